"""docs/search.md names what there is: every parameter, every `$name`, every key of the document,
and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from fakes.cli import Call
from hetplan.formulations.astra.search.pool import Mode
from hetplan.formulations.astra.search.rules import __doc__ as GRAMMAR
from hetplan.formulations.astra.search.space import GRANULARITIES, METHODS, PARAMETERS, rule_columns

PAGE = (Path(__file__).parents[2] / "docs" / "search.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text under one heading of the second level."""
    return PAGE.split(f"\n## {title}", 1)[1].split("\n## ", 1)[0]


def names(title: str) -> list[str]:
    """First cells of the section's tables."""
    return re.findall(r"^\| `([^`]+)` \|", section(title), flags=re.MULTILINE)


def test_every_name_is_there() -> None:
    assert sorted(names("Modes")) == sorted(get_args(Mode))
    assert sorted(names("Parameters")) == sorted(PARAMETERS)
    assert sorted(names("Rules")) == sorted(f"${name}" for name in rule_columns(("x",)))
    for word in (*GRANULARITIES, *METHODS, "none"):
        assert f"`{word}`" in section("Parameters")


def test_the_grammar_is_the_parsers() -> None:
    rules = [" ".join(line.split()) for line in section("Rules").splitlines()]
    for line in (GRAMMAR or "").splitlines():
        if re.match(r" +\w+ += ", line):
            assert " ".join(line.split("   left")[0].split()).split(" left to right")[0] in rules


@pytest.mark.parametrize("gpus", ["A800:8", "A800:4,H100:4"])
def test_every_key_is_there(hetplan: Call, gpus: str) -> None:
    found = hetplan(
        "plan", "search", "-m", "gpt2", "-g", gpus, "-b", 16, "-p", "tensor=1,2", "--json"
    )
    document = json.loads(found.out)
    best = document["best"]
    assert sorted(names("JSON")) == sorted([*document, *best])
    text = section("JSON")
    inner = [
        document["workload"],
        document["pool"],
        document["pool"]["types"][0],
        document["counts"],
    ]
    inner += [best["stages"][0], *best["segments"][:1]]
    for part in inner:
        assert [key for key in part if f"`{key}`" not in text] == []
    assert {f"${name}" for name in best["strategy"]} <= set(names("Rules"))
