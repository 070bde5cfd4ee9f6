# The commands that a developer needs; CONTRIBUTING.md explains them. ROOM: a folder or a file of tests.
PYTHON ?= python3
ROOM ?= tests/solvers tests/astra
BIN = .venv/bin

.PHONY: setup test check docs ci

setup:  ## a virtual environment with everything that the tests need
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[test,docs]' pre-commit build

test:  ## the tests of a room: make test ROOM=tests/amp
	$(BIN)/pytest -n 2 --dist worksteal $(ROOM)

check:  ## linters, types and the language of the pages: seconds
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/prose.py

docs:  ## the documentation as a web site, in the folder build
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

ci:  ## everything that must hold before a change lands
	.ci/run
