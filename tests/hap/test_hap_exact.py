"""Every method against enumeration on tiny theories, without memory and with it; memory per device
by hand; what must not change the optimum of the joint search."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from evidence.speed.hap_theories import chain, residual
from hap.hap_cases import all_programs, instance, known, known_limited, oracle
from hetplan.errors import InputError
from hetplan.formulations.hap.cell_search import Parameters
from hetplan.formulations.hap.chain_bound import chain_bound
from hetplan.formulations.hap.cp_programs import least_seconds
from hetplan.formulations.hap.data import Compute, Device, HapData, HapDecision, Triple
from hetplan.formulations.hap.evaluate import evaluate, show
from hetplan.formulations.hap.exact import solve as exact
from hetplan.formulations.hap.family import FAMILY
from hetplan.formulations.hap.outcomes import reduced_or_answered
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.instances.library import Instance
from hetplan.schema import parse
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Result, Run, Stop

SEEDS = range(240)
Cases = Callable[[int], tuple[HapData, float | None]]


def run(data: HapData, method: str = "auto") -> Result[object]:
    """`method` with one thread."""
    return solve(FAMILY, data, method, Run(Options(threads=1, time_limit=60)))


def without(data: HapData) -> HapData:
    """The same without memory."""
    triples = [
        t.model_copy(update={"fixed_bytes": None, "shared_bytes": None}) for t in data.triples
    ]
    return data.model_copy(update={"memory": None, "triples": triples})


@pytest.mark.wide
def test_the_cases_reach_what_they_should() -> None:
    """Infeasible ones (with memory, by memory alone), several segments, all numbers of types."""
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        (plain, best), (limited_data, limited_best) = known(seed), known_limited(seed)
        free = without(limited_data)
        seen["infeasible"] += best is None
        seen["infeasible by memory"] += (
            limited_best is None and oracle(free, all_programs(free)) is not None
        )
        seen["several segments"] += plain.segments > 1 and limited_best is not None
        seen[f"{len({d.flops_per_second for d in plain.devices})} types"] += best is not None
    assert all(n >= 15 for n in seen.values()) and len(seen) == 7, seen


# With the proven bound's distance that rounded ratios make; the rest of the seeds with -m wide.
EXACT = [
    pytest.param(
        cases, method, seed, id=f"{cases.__name__}-{method}-{seed}",
        marks=pytest.mark.wide if seed >= few else (),
    )
    for cases, methods in (
        (known, {"auto": 120, "milp": 120, "cp-sat": 80, "cp-sat-linear": 80, "pyomo": 20}),
        (known_limited, {"auto": 60, "milp": 60, "cp-sat": 30, "cp-sat-linear": 30, "pyomo": 15}),
    )
    for method, few in methods.items()
    for seed in SEEDS
]  # fmt: skip


# Method -> the share by which rounded ratios may lower its bound.
ROUNDED = {"cp-sat": 5e-6, "cp-sat-linear": 1e-3}


def equals_enumeration(data: HapData, best: float | None, method: str) -> None:
    """Status, objective and bound of an exact method, where `best` is the optimum."""
    result = run(data, method)
    if best is None:
        assert result.status == "infeasible" and result.message
        return
    assert result.objective == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert result.bound is not None and result.bound <= best * (1 + 1e-7) + 1e-12
    if method in ROUNDED:  # its ratios are rounded, its bound with them
        assert result.bound >= best * (1 - ROUNDED[method]) - 1e-9
    else:
        assert result.status == "optimal", result.gap


@pytest.mark.parametrize(("cases", "method", "seed"), EXACT)
def test_exact_methods_equal_enumeration(cases: Cases, method: str, seed: int) -> None:
    equals_enumeration(*cases(seed), method)


# Their optimum moves where the order, a segment, a rounding or the memory of the model is wrong.
TELLING = (9, 4, 10, 14, 22, 27, 41, 45)


@pytest.mark.parametrize("cases", [known, known_limited])
@pytest.mark.parametrize("seed", TELLING)
def test_the_constraint_model_equals_enumeration(cases: Cases, seed: int) -> None:
    equals_enumeration(*cases(seed), "cp-sat")


@pytest.mark.parametrize(
    "cases", [known, pytest.param(known_limited, marks=pytest.mark.wide)], ids=["free", "limited"]
)
@pytest.mark.parametrize("method", ["paper", "dp-even", "dp-proportional"])
@pytest.mark.parametrize("count", [40, pytest.param(120, marks=pytest.mark.wide)])
def test_heuristics_fit_or_say_that_they_do_not(count: int, method: str, cases: Cases) -> None:
    """They prove nothing, and are never better than the optimum."""
    seen: Counter[str] = Counter()
    for seed in SEEDS[:count]:
        data, best = cases(seed)
        result = run(data, method)
        assert result.bound is None
        if result.objective is None:
            seen["none"] += best is not None
            assert result.message and (best is None or "memory" in result.message), (seed, result)
            assert best is None or (result.status == "unknown" and data.memory is not None)
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


@pytest.mark.parametrize("method", ["auto", "cp-sat", "cp-sat-linear", "milp", "pyomo", "paper"])
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


def shared_step() -> HapData:
    """A theory on one device of 1 FLOP/s where two triples need what a third one gives: its only
    program takes 4 + 1 + 1 + 1 seconds."""
    steps = [([], "x", 4.0), (["x"], "y", 1.0), (["x"], "z", 1.0), (["y", "z"], "goal", 1.0)]
    triples: list[Triple] = [
        Compute(
            kind="compute",
            instruction=f"makes {post}",
            pre=pre,
            post=[post],
            fixed_flops=flops,
            shared_flops=0.0,
        )
        for pre, post, flops in steps
    ]
    device = Device(name="one", flops_per_second=1.0)
    return HapData(devices=[device], triples=triples, goal="goal")


@pytest.mark.parametrize("method", ["auto", "cp-sat", "cp-sat-linear", "milp", "pyomo", "paper"])
def test_what_two_triples_need_is_derived_once(method: str) -> None:
    result = run(shared_step(), method)
    assert result.objective == pytest.approx(7.0)
    assert method == "paper" or result.status == "optimal"


def test_the_first_bound_counts_what_two_triples_need_once() -> None:
    assert least_seconds(shared_step()) == pytest.approx(6.0)


STAGES = {
    "devices": THEORY["devices"],
    "triples": [
        {"kind": "compute", "instruction": "whole", "pre": [], "post": ["x"], "fixed_flops": 1.0,
         "shared_flops": 0.0},
        {"kind": "comm", "instruction": "gather", "pre": ["x"], "post": ["y"],
         "fixed_seconds": 0.1, "shared_seconds": 0.0},
        {"kind": "compute", "instruction": "sliced", "pre": ["y"], "post": ["z"],
         "fixed_flops": 0.0, "shared_flops": 5.0},
    ],
    "goal": "z",
}  # fmt: skip


@pytest.mark.parametrize("method", ["auto", "cp-sat", "cp-sat-linear", "milp", "pyomo"])
def test_stages_take_turns(method: str) -> None:
    """1 s on the slow device, 0.1 s, then 1 s on both; in one stage it would be 1.5 s on the fast
    device alone."""
    result = run(parse(HapData, STAGES, where="test"), method)
    assert result.objective == pytest.approx(2.1, rel=1e-7)
    assert result.bound is not None and 2.1 * (1 - 3e-5) <= result.bound <= 2.1 * (1 + 1e-9)


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


# Two of each size by default.
JOINT = [
    pytest.param(chain(*size, seed), marks=() if seed < 2 else pytest.mark.wide)
    for size in ((1, 3), (2, 2), (3, 2), (2, 3))
    for seed in range(3)
]


@pytest.mark.parametrize("data", [*JOINT, residual(1, 2, operators=10)])
def test_the_search_agrees_with_the_programme_and_beats_the_paper(data: HapData) -> None:
    best = run(data)
    assert best.status == "optimal" and best.objective is not None
    assert run(data, "milp").objective == pytest.approx(best.objective, rel=2e-6)
    for method in ("paper", "dp-even", "dp-proportional"):
        other = run(data, method)
        assert other.objective is not None and other.objective >= best.objective * (1 - 1e-9)


def test_wide_theories_tell_their_gap() -> None:
    """Without room for all states the bound is relaxed, still valid, and the message says so."""
    data = residual(1, 2, operators=16)
    best = run(data).objective
    assert best is not None
    for limits in (
        Parameters(most_states=50, patience=0),
        Parameters(most_states=1, most_canonical_states=5),
    ):
        found = exact(data, Run(Options(threads=1)), limits)
        assert found.decision is not None and found.bound is not None
        objective = evaluate(data, found.decision).objective
        assert objective is not None and objective >= best * (1 - 1e-9)
        assert 0 < found.bound <= best * (1 + 1e-9)
        assert found.stop is Stop.OPTIMAL or "too wide" in found.message


@pytest.mark.parametrize(("bounded", "sharper"), [(5_000_000, True), (0, False)])
def test_canonical_graphs_are_bounded_whatever_the_vertices(bounded: int, sharper: bool) -> None:
    """81 vertices of a cell: more than are tried where the graph of all orders is small."""
    one = chain(4, 3)
    triples = tuple(
        triple.model_copy(update={"segment": 4 * i // len(one.triples)})
        for i, triple in enumerate(one.triples)
    )
    data = one.model_copy(update={"segments": 4, "triples": triples})
    limits = Parameters(most_states=1, most_arc_vertices=bounded, least_size=1.0)
    answer, reduced = exact(data, Run(Options(threads=1)), limits), reduced_or_answered(data, Run())
    assert isinstance(reduced, ReducedTheory) and answer.bound is not None
    assert "too wide" in answer.message
    assert (answer.bound > 1.03 * chain_bound(reduced)) == sharper


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.floats(0.01, 100.0))
def test_scaling_all_times_scales_the_optimum(seed: int, factor: float) -> None:
    data = instance(seed, 1)
    best = run(data).objective
    changed = []
    for t in data.triples:
        names = (
            ("fixed_flops", "shared_flops")
            if isinstance(t, Compute)
            else ("fixed_seconds", "shared_seconds")
        )
        changed.append(t.model_copy(update={name: getattr(t, name) * factor for name in names}))
    scaled = run(data.model_copy(update={"triples": changed})).objective
    assert scaled == (None if best is None else pytest.approx(best * factor, rel=3e-6))


def test_the_paper_keeps_one_communication_per_tensor() -> None:
    """Its program never gathers and scatters the same tensor, nor communicates it twice."""
    data = chain(3, 2)
    decision = run(data, "paper").decision
    assert isinstance(decision, HapDecision)
    told = [
        data.triples[i].pre[0].split("|")[0]
        for i in decision.program
        if data.triples[i].kind == "comm"
    ]
    assert told and len(told) == len(set(told))
