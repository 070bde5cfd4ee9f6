"""docs/howto-family.md: its commands, and the family of examples/experts, held to what a family in
the tree is held to."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetplan.errors import InputError
from hetplan.formulations import FAMILIES, family
from hetplan.instances.library import instance_schema, parse_instance
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run
from markdown_pages import ROOT, blocks
from page_commands import prepare, run_as_shown

PAGE = ROOT / "docs" / "howto-family.md"


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's family, registered while a test lasts."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setitem(FAMILIES, "experts", "experts.family:FAMILY")
    yield family("experts")
    for name in [name for name in sys.modules if name.partition(".")[0] == "experts"]:
        del sys.modules[name]


def posed(seed: int) -> dict[str, Any]:
    """`data` of a tiny instance; every third one has too few places."""
    draw = random.Random(seed)
    experts, devices = draw.randint(1, 5), draw.randint(1, 3)
    most = 1 if seed % 3 == 0 else 4
    return {
        "expert_flops": [float(draw.choice([1, 2, 3, draw.uniform(1, 5)])) for _ in range(experts)],
        "devices": [
            {
                "name": f"d{j}",
                "flops_per_second": draw.choice([1.0, 1.0, 2.5]),
                "room": draw.randint(0, most),
            }
            for j in range(devices)
        ],
    }


def oracle(data: dict[str, Any]) -> float | None:
    """The least time over all placements, written without the page's code."""
    rows = data["devices"]
    best: float | None = None
    for place in itertools.product(range(len(rows)), repeat=len(data["expert_flops"])):
        if any(place.count(j) > row["room"] for j, row in enumerate(rows)):
            continue
        times = [
            sum(w for w, k in zip(data["expert_flops"], place, strict=True) if k == j)
            / row["flops_per_second"]
            for j, row in enumerate(rows)
        ]
        best = max(times) if best is None else min(best, max(times))
    return best


@pytest.mark.pages
def test_the_pages_commands_print_what_is_shown(tmp_path: Path) -> None:
    folder = prepare(PAGE, tmp_path)
    for block in blocks(PAGE, "console"):
        run_as_shown(block, folder)


@pytest.mark.parametrize("method", ["auto", "exact", "cp-sat", "milp", "greedy"])
@pytest.mark.parametrize("seed", range(18))
def test_methods_agree_with_enumeration(experts: Any, seed: int, method: str) -> None:
    """Every third instance has too few places for some of its experts."""
    data, best = experts.load_data().model_validate(posed(seed)), oracle(posed(seed))
    result = solve(experts, data, method, Run(Options(threads=1)))
    if best is None:
        assert result.status == "infeasible"
        return
    assert result.objective is not None and result.objective >= best * (1 - 1e-9)
    if experts.method(method).exact:
        assert result.status == "optimal"
        assert result.objective == pytest.approx(best, rel=1e-6)


def test_a_run_that_stops_keeps_its_bound(experts: Any) -> None:
    data = experts.load_data().model_validate(
        {
            "expert_flops": [1.0 + 1e-3 * e * e for e in range(30)],
            "devices": [
                {"name": f"d{j}", "flops_per_second": 1.0 + j / 7, "room": 30} for j in range(5)
            ],
        }
    )
    result = solve(experts, data, "exact", Run(Options(time_limit=0.2)))
    assert result.status == "feasible"
    assert result.objective is not None and result.bound is not None
    assert 0 < result.bound < result.objective


def test_files_are_read_strictly(experts: Any) -> None:
    header = {
        "format": "hetplan-instance",
        "version": 1,
        "problem": "experts",
        "name": "x",
        "origin": "here",
    }
    assert parse_instance({**header, "data": posed(1)}, where="x.json").problem == "experts"
    broken = posed(1)
    broken["devices"][0]["room"] = "four"
    with pytest.raises(InputError, match=r"x\.json: data\.devices\[0\]\.room"):
        parse_instance({**header, "data": broken}, where="x.json")
    assert "expert_flops" in str(instance_schema("experts"))
