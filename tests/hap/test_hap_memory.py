"""Memory per device: the constraint, every exact method against enumeration, heuristics, what is
infeasible."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hap.hap_cases import all_programs, known_limited, limited, oracle
from hetplan.errors import InputError
from hetplan.formulations.hap.data import HapData, HapDecision, Memory
from hetplan.formulations.hap.describe import show
from hetplan.formulations.hap.evaluate import evaluate
from hetplan.formulations.hap.family import FAMILY
from hetplan.instances.envelope import Instance
from hetplan.schema import parse
from hetplan.solvers.options import Options
from hetplan.solvers.registry import solve
from hetplan.solvers.result import Result
from hetplan.solvers.run import Run

SEEDS = range(240)


def run(data: HapData, method: str) -> Result[object]:
    """`method` with one thread."""
    return solve(FAMILY, data, method, Run(Options(threads=1, time_limit=60)))


def without(data: HapData) -> HapData:
    """The same without memory."""
    triples = [
        t.model_copy(update={"fixed_bytes": None, "shared_bytes": None}) for t in data.triples
    ]
    return data.model_copy(update={"memory": None, "triples": triples})


def test_the_cases_reach_what_they_should() -> None:
    """Infeasible by memory alone, dearer by it, several segments, equal speeds of unequal
    memory."""
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        data, best = known_limited(seed)
        plain = oracle(without(data), all_programs(without(data)))
        assert data.memory is not None
        seen["infeasible"] += best is None
        seen["only for memory"] += best is None and plain is not None
        if best is None or plain is None:
            continue
        seen["dearer"] += best > plain * (1 + 1e-6)
        seen["dearer in several segments"] += best > plain * (1 + 1e-6) and data.segments > 1
        seen["as cheap"] += best <= plain * (1 + 1e-9)
        speeds = Counter(d.flops_per_second for d in data.devices)
        seen["equal speeds"] += max(speeds.values()) > 1
    assert all(n >= 15 for n in seen.values()) and len(seen) == 6, seen


# the rest of the seeds in the slow run
FEW = {"auto": 80, "milp": 80, "pyomo": 30, "cp-sat": 60}
CASES = [
    pytest.param(method, range(start, end), marks=marks, id=f"{method}-{start}")
    for method, few in FEW.items()
    for start, end, marks in ((0, few, ()), (few, len(SEEDS), pytest.mark.slow))
]


@pytest.mark.parametrize(("method", "seeds"), CASES)
def test_exact_methods_equal_enumeration(method: str, seeds: range) -> None:
    for seed in seeds:
        data, best = known_limited(seed)
        result = run(data, method)
        if best is None:
            assert result.status == "infeasible" and result.message, (seed, result)
            continue
        assert result.objective == pytest.approx(best, rel=1e-6, abs=1e-9), seed
        assert result.bound is not None and result.bound <= best * (1 + 1e-7) + 1e-12, seed
        if method == "cp-sat":  # its ratios are rounded, its bound with them
            assert result.bound >= best * (1 - 1e-3) - 1e-9, seed
        else:
            assert result.status == "optimal", (seed, result.gap)


@pytest.mark.parametrize("method", ["paper", "dp-even", "dp-proportional"])
def test_heuristics_fit_or_say_that_they_do_not(method: str) -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS[:120]:
        data, best = known_limited(seed)
        result = run(data, method)
        assert result.bound is None
        if result.objective is None:
            seen["none"] += best is not None
            assert result.message and (best is None or "memory" in result.message), (seed, result)
            assert result.status == "unknown" or best is None
        else:  # the evaluator has seen that it fits
            assert best is not None and result.objective >= best * (1 - 1e-7), seed
            seen["best"] += result.objective <= best * (1 + 1e-6)
            seen["dearer"] += result.objective > best * (1 + 1e-6)
    assert min(seen["best"], 3 if method == "paper" else seen["none"] + seen["dearer"]) >= 3, seen


THEORY = {
    "devices": [{"name": "fast", "flops_per_second": 4.0},
                {"name": "slow", "flops_per_second": 1.0}],
    "triples": [
        {"kind": "compute", "instruction": "whole", "pre": [], "post": ["x"], "fixed_flops": 1.0,
         "shared_flops": 0.0, "fixed_bytes": 8.0},
        {"kind": "compute", "instruction": "sliced", "pre": [], "post": ["x"], "fixed_flops": 0.0,
         "shared_flops": 2.5, "shared_bytes": 10.0},
        {"kind": "comm", "instruction": "gather", "pre": ["x"], "post": ["y"], "fixed_seconds": 1.0,
         "shared_seconds": 2.0, "fixed_bytes": 1.0, "shared_bytes": 2.0},
    ],
    "goal": "y",
    "memory": {"device_bytes": [9.0, 5.0]},
}  # fmt: skip


def theory(**changes: object) -> HapData:
    """THEORY with other keys."""
    return parse(HapData, {**THEORY, **changes}, where="test")


def test_the_evaluator_by_hand() -> None:
    """Sliced: 1 + 12 B bytes on each device, so that B <= (2/3, 1/3), and just (2/3, 1/3) fits
    both."""
    fits = evaluate(theory(), HapDecision(program=[1, 2], ratios=[[2 / 3, 1 / 3]]))
    assert fits.objective == pytest.approx(2.5 / 3 + 1 + 4 / 3)
    over = evaluate(theory(), HapDecision(program=[1, 2], ratios=[[0.75, 0.25]]))
    assert over.objective is None and over.violations == (
        "device 0 (fast) holds 10 bytes, it has 9",
    )
    whole = evaluate(theory(), HapDecision(program=[0, 2], ratios=[[0.0, 1.0]]))
    assert [v.split(" holds")[0] for v in whole.violations] == ["device 1 (slow)"]
    barely = evaluate(
        theory(), HapDecision(program=[1, 2], ratios=[[2 / 3 + 5e-10, 1 / 3 - 5e-10]])
    )
    assert barely.objective is not None


@pytest.mark.parametrize("method", ["auto", "cp-sat", "milp", "pyomo", "paper"])
def test_the_optimum_by_hand(method: str) -> None:
    """Without memory 0.8 of the work on the fast device is best; with it, the only ratios that fit
    are."""
    result = run(theory(), method)
    assert result.objective == pytest.approx(2.5 / 3 + 1 + 4 / 3, rel=1e-7)
    free = run(without(theory()), method)
    assert free.objective is not None and result.objective is not None
    assert free.objective < result.objective - 0.01
    given = run(theory(program=[1, 2]), method)
    assert given.objective == pytest.approx(result.objective, rel=1e-9)
    none = run(theory(memory={"device_bytes": [8.5, 4.5]}), method)
    assert none.objective is None and "memory" in none.message
    none = run(theory(memory={"device_bytes": [8.5, 4.5]}, program=[1, 2]), method)
    assert none.status == "infeasible" and "given program" in none.message


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"memory": {"device_bytes": [1.0]}},
            "memory.device_bytes has 1 entries, expected one per device (2)",
        ),
        (
            {"memory": None},
            "triples[0].fixed_bytes is 8.0, expected none without memory.device_bytes",
        ),
        ({"memory": {"device_bytes": [1.0, -1.0]}}, "memory.device_bytes[1]"),
        ({"memory": {}}, "memory.device_bytes: required key is missing"),
    ],
)
def test_unusable_memory_is_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError) as error:
        theory(**change)
    assert complaint in str(error.value)


def test_files_without_memory_are_as_they_were() -> None:
    """No new key where memory is not given, all of them where it is."""
    plain = json.dumps(
        Instance(problem="hap", name="a", origin="b", data=without(theory())).document()
    )
    assert "bytes" not in plain and "memory" not in plain
    stored = Instance(problem="hap", name="a", origin="b", data=theory()).document()["data"]
    assert stored["memory"] == {"device_bytes": [9.0, 5.0]}
    assert (
        "shared_bytes" not in stored["triples"][0] and stored["triples"][2]["shared_bytes"] == 2.0
    )
    assert parse(HapData, stored, where="test") == theory()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.25, 4.0))
def test_more_memory_is_never_dearer(seed: int, factor: float) -> None:
    """And bytes in another unit change nothing; plenty of memory is none."""
    data = limited(seed)
    assert data.memory is not None

    def at(device_bytes: list[float], unit: float = 1.0) -> float | None:
        triples = [
            t.model_copy(
                update={
                    key: (getattr(t, key) or 0.0) * unit for key in ("fixed_bytes", "shared_bytes")
                }
            )
            for t in data.triples
        ]
        memory = Memory(device_bytes=[x * unit for x in device_bytes])
        return run(data.model_copy(update={"memory": memory, "triples": triples}), "auto").objective

    before = at(data.memory.device_bytes)
    in_gibibytes = at(data.memory.device_bytes, 2.0**30)
    more = at([x * (1 + factor) for x in data.memory.device_bytes])
    plenty, none = at([1e6] * len(data.devices)), run(without(data), "auto").objective
    assert (before is None) == (in_gibibytes is None) and (plenty is None) == (none is None)
    if before is not None:
        assert in_gibibytes == pytest.approx(before, rel=3e-6, abs=1e-9)
        assert more is not None and more <= before * (1 + 2e-6) + 1e-9
    if more is not None and none is not None:
        assert more >= none * (1 - 2e-6) - 1e-9
    if none is not None:
        assert plenty == pytest.approx(none, rel=2e-6, abs=1e-9)


def test_what_is_held_is_shown() -> None:
    """Beside the ratios; nothing of it without memory."""
    decision = HapDecision(program=[1, 2], ratios=[[2 / 3, 1 / 3]])
    tables, document = show(theory(), decision)
    assert tables[0].header[-1] == "holds" and [row[-1] for row in tables[0].rows] == [
        "9 B of 9 B",
        "5 B of 5 B",
    ]
    assert document["held_bytes"] == pytest.approx([9.0, 5.0]) and document["device_bytes"] == [
        9.0,
        5.0,
    ]
    tables, document = show(without(theory()), decision)
    assert "holds" not in tables[0].header and "held_bytes" not in document
