"""The shape of the source tree: links, import directions, what loads when. (What may not appear at
all, ruff refuses: see `banned-api` in pyproject.toml.)

Each rule is a function from source text to its faults, tested on a source that breaks it and then
applied to the whole tree.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from hetplan.formulations import FAMILIES, family
from hetplan.solvers.registry import load

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "hetplan"
TESTS = ROOT / "tests"
LINKS = ("formulations", "instances", "planner", "profiling", "runtime", "solvers")

# A module may import what stands on a lower level, and from its own part; parts on one level are
# strangers.
LEVELS = (
    ("answers", "clock", "compiled", "errors", "files", "interpreter", "schema", "text"),
    ("profiling",),
    ("plans",),
    ("programs",),
    ("replays",),
    ("adapters", "solvers"),
    # what executes plans knows no paper's problem, and a problem nothing that executes
    ("formulations", "runtime"),
    ("instances",),
    ("planner",),
    ("studies",),
    ("cli",),
)
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
TORCH = (
    "hetplan.runtime.engine",
    "hetplan.runtime.measuring",
    "hetplan.runtime.references",
    "hetplan.runtime.spmd",
    "hetplan.runtime.stock",
    "hetplan.runtime.tracing",
)  # packages that need torch, and may import it when they are imported
# Kernels of `hetplan.programs.operators` stand beside the shapes that planning needs without torch:
# they import it when they are called.
# How plans of stages and SPMD programs differ is the engines' matter; the plan file's rules and the
# choice of an engine look at the schedule itself.
MAY_COMPARE = ("plans/plan.py", "runtime/execution/choice.py")
ENTRIES = ("__init__", "__main__")  # hetplan itself: the version, and `python -m hetplan`

HEAVY = (
    "highspy",
    "matplotlib",
    "networkx",
    "numba",
    "numpy",
    "ortools",
    "pandas",
    "pyarrow",
    "pydantic",
    "pyomo",
    "scipy",
    "torch",
)


def modules() -> list[Path]:
    """Every module of hetplan, relative to src/hetplan."""
    return sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    """`cli/main.py` -> `hetplan.cli.main`."""
    parts = ["hetplan", *path.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(path: Path) -> str:
    """The part of hetplan that a module belongs to: `cli`, `errors` …"""
    return path.parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    """A file's syntax."""
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement, inside classes, functions and branches too."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for node in getattr(tree, field, ()):
            yield node
            yield from statements(node)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, inside functions too; `from a import b` gives
    `a.b`."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def upward_imports(tree: ast.AST, path: Path) -> list[str]:
    """Imports of hetplan's parts on the same or a higher level, and relative ones."""
    here, faults = part_of(path), []
    for line, name in imports(tree):
        first, *rest = name.split(".")
        if first == "":
            faults.append(f"{path}:{line}: relative import {name}")
        if first != "hetplan" or here in ENTRIES:
            continue
        # `import hetplan` gives no more than its version
        there = rest[0] if rest else "__version__"
        if there in ("__version__", here):
            continue
        if there not in LEVEL:
            faults.append(f"{path}:{line}: {name} is of no part with a level")
        elif LEVEL[there] >= LEVEL[here] and not (LEVEL[there] == LEVEL[here] == 0):
            faults.append(f"{path}:{line}: {here} imports {name}")
    return faults


def linked_imports(tree: ast.AST, path: Path) -> list[str]:
    """Imports through the links at the root."""
    return [
        f"{path}:{line}: {name}, expected hetplan.{name}"
        for line, name in imports(tree)
        if name.split(".")[0] in LINKS
    ]


def evidence_imports(tree: ast.AST, path: Path) -> list[str]:
    """Imports of `evidence`, which is no part of the installed package."""
    return [
        f"{path}:{line}: hetplan imports {name}"
        for line, name in imports(tree)
        if name.split(".")[0] == "evidence"
    ]


def schedule_branches(tree: ast.AST, path: Path) -> list[str]:
    """Comparisons with the schedule of SPMD programs outside `MAY_COMPARE`."""
    if path.as_posix() in MAY_COMPARE:
        return []
    return [
        f"{path}:{node.lineno}: compares with 'spmd', expected engine_of(plan)"
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Constant) and side.value == "spmd"
    ]


def needs_torch(module: str) -> bool:
    """Whether a module is in one of the packages that need torch."""
    return any(module == package or module.startswith(f"{package}.") for package in TORCH)


Rule = Callable[[ast.Module, Path], list[str]]


@pytest.mark.parametrize(
    ("rule", "place", "source"),
    [
        (upward_imports, "solvers/x.py", "from hetplan.formulations.amp.data import AmpData"),
        (upward_imports, "solvers/x.py", "def f():\n    import hetplan.cli.main"),
        (upward_imports, "runtime/x.py", "from hetplan.formulations.hap.data import HapData"),
        (upward_imports, "runtime/x.py", "def f():\n    from hetplan.formulations import family"),
        (upward_imports, "formulations/x.py", "from hetplan.runtime.job import Job"),
        (upward_imports, "adapters/x.py", "from hetplan.formulations import family"),
        (upward_imports, "replays/x.py", "from hetplan.solvers.registry import evaluate"),
        (upward_imports, "programs/x.py", "from hetplan.replays.chains import Replay"),
        (upward_imports, "errors.py", "from hetplan import profiling"),
        (upward_imports, "cli/x.py", "from . import main"),
        (upward_imports, "cli/x.py", "from hetplan.elsewhere import main"),
        (linked_imports, "cli/x.py", "from solvers.run import Run"),
        (linked_imports, "cli/x.py", "def f():\n    import profiling"),
        (evidence_imports, "cli/x.py", "def f():\n    from evidence.papers import PAPERS"),
        (schedule_branches, "cli/x.py", "if plan.schedule == 'spmd': pass"),
        (schedule_branches, "runtime/x.py", "assert 'spmd' != plan.schedule"),
    ],
)
def test_each_rule_finds_its_fault(rule: Rule, place: str, source: str) -> None:
    assert rule(ast.parse(source), Path(place)) != []


@pytest.mark.parametrize(
    ("rule", "place", "source"),
    [
        (
            upward_imports,
            "cli/x.py",
            "from hetplan.errors import InputError\nimport numpy\nimport hetplan",
        ),
        (upward_imports, "schema.py", "from hetplan.errors import InputError"),
        (upward_imports, "profiling/x.py", "from hetplan import __version__"),
        (linked_imports, "cli/x.py", "from hetplan.solvers import run"),
        (evidence_imports, "cli/x.py", "from hetplan.studies.evidence import run"),
        (schedule_branches, "planner/x.py", "new_plan(schedule='spmd')"),
        (schedule_branches, "plans/plan.py", "plan.schedule == 'spmd'"),
    ],
)
def test_no_rule_is_too_strict(rule: Rule, place: str, source: str) -> None:
    assert rule(ast.parse(source), Path(place)) == []


@pytest.mark.parametrize(
    "rule", [upward_imports, linked_imports, evidence_imports, schedule_branches]
)
def test_source_keeps_the_rule(rule: Rule) -> None:
    faults = [fault for path in modules() for fault in rule(tree_of(SOURCE / path), path)]
    assert faults == []


def test_tests_do_not_import_through_the_links() -> None:
    """Only files in whose text an import may begin with a link's name are parsed."""
    suspect = re.compile(rf"^\s*(?:from|import)\s.*\b(?<!\.)(?:{'|'.join(LINKS)})\b", re.MULTILINE)
    faults = []
    for path in sorted(TESTS.rglob("*.py")):
        if suspect.search(path.read_text(encoding="utf-8")):
            faults += linked_imports(tree_of(path), path.relative_to(ROOT))
    assert faults == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the links belong to a checkout")
@pytest.mark.parametrize("name", LINKS)
def test_root_links(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert os.readlink(link) == f"src/hetplan/{name}"
    assert link.is_dir()


def test_every_part_has_a_level() -> None:
    parts = {part_of(path) for path in modules()} - set(ENTRIES)
    assert parts == set(LEVEL)


def test_profiling_is_no_regular_package() -> None:
    """From Python 3.15 on `profiling` is the standard library's; a link with an __init__.py would
    hide it."""
    assert not (SOURCE / "profiling" / "__init__.py").exists()


def run_python(code: str, **environment: str) -> str:
    """What `code` prints when it runs at the root of the repository, where the links can be
    imported."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_links_hide_no_module_of_the_standard_library(tmp_path: Path) -> None:
    """A regular `profiling` later on the path wins over the link, as Python 3.15's own must."""
    package = tmp_path / "profiling"
    package.mkdir()
    (package / "__init__.py").write_text("OWNER = 'the standard library'\n")
    code = (
        "import cProfile, profile, profiling; print(profiling.OWNER, cProfile.__file__, "
        "profile.__file__)"
    )
    owner = run_python(code, PYTHONPATH=str(tmp_path))
    assert owner.startswith("the standard library ")
    assert str(ROOT) not in owner.replace(sys.prefix, "")


@pytest.mark.parametrize("torch_too", [False, pytest.param(True, marks=pytest.mark.engine)])
def test_every_module_loads_once_under_one_name_and_torch_by_what_needs_it_alone(
    torch_too: bool,
) -> None:
    """First what may not import torch, not even where it is installed; then the others."""
    if torch_too:
        pytest.importorskip("torch")
    every = [module_name(path) for path in modules() if path.name != "__main__.py"]
    light = [name for name in every if not needs_torch(name)]
    heavy = [name for name in every if needs_torch(name)] if torch_too else []
    names = light + heavy
    code = (
        f"import importlib, os, sys\nfor name in {light!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} imports torch')\n"
        f"for name in {heavy!r}: importlib.import_module(name)\n"
        "for name, module in list(sys.modules.items()):\n"
        "    file = getattr(module, '__file__', None)\n"
        "    if file and '/hetplan/' in os.path.realpath(file): print(os.path.realpath(file), name)"
    )
    loaded = [line.rsplit(" ", 1) for line in run_python(code).splitlines() if str(SOURCE) in line]
    twice = [file for file, times in Counter(file for file, _ in loaded).items() if times > 1]
    assert twice == []
    assert {name for _, name in loaded} == set(names)


@pytest.mark.parametrize(
    "code",
    [
        "import hetplan",
        "from hetplan.cli.main import main; main(['--help'])",
        "from hetplan.cli.main import main; main(['--version'])",
        "import hetplan.formulations as f; [f.family(name) for name in f.FAMILIES]",
    ],
)
def test_nothing_heavy_loads_before_it_is_used(code: str) -> None:
    last = run_python(f"{code}\nimport sys; print(*sorted(sys.modules.keys() & {set(HEAVY)!r}))")
    assert last.splitlines()[-1] == ""


def test_every_target_of_a_family_can_be_loaded() -> None:
    loaded = set()
    for name in FAMILIES:
        one = family(name)
        own = (one.data, one.decision, one.evaluate, one.describe)
        for target in (*own, *(method.target for method in one.methods)):
            if target is not None:
                assert callable(load(target)), target
                loaded.add(target)
    assert "hetplan.formulations.amp.data:AmpData" in loaded


def test_names_in_the_test_folder_are_unique() -> None:
    """pytest puts folders of tests on the path: two files of one name would be one module."""
    files = [path for path in TESTS.rglob("*.py") if "__pycache__" not in path.parts]
    tests = Counter(path.name for path in files if path.name.startswith("test_"))
    folders = Counter(
        path.name for path in TESTS.rglob("*") if path.is_dir() and path.name != "__pycache__"
    )
    assert [name for name, times in (tests + folders).items() if times > 1] == []
    assert [path for path in files if path.name == "__init__.py"] == []
