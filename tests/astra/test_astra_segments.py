"""The methods of problem `astra` against brute force, each other, and the optima of the packaged
instances."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from astra.cases import oracle, random_instance
from hetplan.errors import InputError
from hetplan.formulations import family
from hetplan.formulations.astra import paper
from hetplan.formulations.astra.data import AstraData, DeviceType
from hetplan.formulations.astra.problem import compile_problem, infeasible_because
from hetplan.instances.library import Entry, library
from hetplan.schema import parse
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Result, Run, Stop
from present import present
from quick import rest_wide
from stopping import After, cancelled_after

ASTRA = family("astra")
EXACT = [method.name for method in ASTRA.methods if method.exact and method.name != "auto"]
CASES = 220


@cache
def best_of(seed: int) -> float | None:
    """The oracle's answer for one seed."""
    return oracle(random_instance(seed))


def test_more_layers_than_a_chain_has_are_refused() -> None:
    document = random_instance(0).model_dump(mode="json")
    assert (
        parse(
            AstraData, document | {"layers": 4096, "equal_layers_per_type": False}, where="f"
        ).layers
        == 4096
    )
    with pytest.raises(InputError, match=r"f: layers.*got 4097"):
        parse(AstraData, document | {"layers": 4097}, where="f")


def run_one(data: AstraData, method: str, *, time_limit: float = 60) -> Result[Any]:
    """One method, one thread."""
    return solve(ASTRA, data, method, Run(Options(threads=1, time_limit=time_limit)))


def instance(**changes: Any) -> AstraData:
    """Four types, 32 stages, 96 layers: the size that the paper's enumeration is meant for."""
    given: dict[str, Any] = {
        "layers": 96,
        "stages": 32,
        "micro_batches": 64,
        "data_parallel": 8,
        "tensor_parallel": 8,
        "device_types": [
            DeviceType(name=f"t{i}", max_devices=800, layer_seconds=0.01 + 0.004 * i, p2p_seconds=h)
            for i, h in enumerate((0.002, 0.0005, 0.003, 0.0001))
        ],
        "equal_layers_per_type": False,
    }
    return AstraData(**(given | changes))


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("seed", range(CASES))
def test_equal_to_brute_force(method: str, seed: int) -> None:
    result, best = run_one(random_instance(seed), method), best_of(seed)
    if best is None:
        assert result.status == "infeasible" and result.message
    else:
        assert result.status == "optimal"
        assert result.objective == pytest.approx(best, rel=1e-6, abs=1e-9)


@pytest.mark.wide
def test_the_cases_are_of_every_kind() -> None:
    cases = [random_instance(seed) for seed in range(CASES)]
    infeasible = [data for seed, data in enumerate(cases) if best_of(seed) is None]
    assert CASES // 10 <= len(infeasible) <= CASES // 2
    assert {data.equal_layers_per_type for data in infeasible} == {False, True}
    problems = [compile_problem(data) for data in cases]
    dividing = [
        p
        for p, d in zip(problems, cases, strict=True)
        if d in infeasible and not infeasible_because(p)
    ]
    assert dividing, "no case is infeasible for want of numbers that divide"
    assert {p.equal for p in problems} == {False, True}


@pytest.mark.parametrize("seed", range(CASES))
def test_paper_is_exact_under_its_own_restriction_and_never_better(seed: int) -> None:
    """Where stages of a type may differ, it keeps the best of those that do not."""
    data, best = random_instance(seed), best_of(seed)
    result = run_one(data, "paper")
    restricted = oracle(data.model_copy(update={"equal_layers_per_type": True}))
    assert result.objective == (restricted and pytest.approx(restricted, rel=1e-9))
    if best is None:
        assert result.objective is None
    elif data.equal_layers_per_type:
        assert result.status == "optimal"
    elif result.objective is not None:
        assert result.bound is None and result.objective >= best * (1 - 1e-9)


def test_the_enumeration_of_two_types_by_hand() -> None:
    """Six layers on three stages of types a (1 s a layer, at most two stages) and b (2 s): m = (0,
    3), (1, 2) and (2, 1), of which n = (2,), (2, 2), (4, 1), (1, 4) and (2, 2) divide. With K = 4:
    12 + 12, 10 + 12, 8 + 12, 10 + 24 and 8 + 12 s; of the two of 20 s the first is kept."""
    types = [
        DeviceType(name=name, max_devices=most, layer_seconds=c, p2p_seconds=0.0)
        for name, most, c in (("a", 2, 1.0), ("b", 3, 2.0))
    ]
    data = AstraData(
        layers=6, stages=3, micro_batches=4, data_parallel=1, tensor_parallel=1,
        device_types=types, equal_layers_per_type=False,
    )  # fmt: skip
    result = run_one(data, "paper")
    assert (result.objective, result.details["candidates"]) == (20.0, 5)
    stages = [(stage.type, stage.layers) for stage in present(result.decision).stages]
    assert stages == [("a", 4), ("b", 1), ("b", 1)]


def test_out_of_time_keeps_a_bound() -> None:
    """A run that is cancelled at its second report stops there, with what it has."""
    run = Run(Options(threads=1))
    run.watch = lambda progress: run.cancel.set() if progress.bound is not None else None
    result = solve(ASTRA, instance(), "exact", run)
    assert result.stop is Stop.INTERRUPTED and result.status == "feasible"
    best = run_one(instance(), "exact").objective
    assert result.bound is not None and best is not None and result.objective is not None
    assert result.bound <= best * (1 + 1e-12) <= result.objective * (1 + 1e-9)


@pytest.mark.parametrize("equal", [True, False])
def test_the_enumeration_in_pieces_finds_the_same_and_stops_where_it_is_told(equal: bool) -> None:
    data = instance(layers=20, stages=7, equal_layers_per_type=equal)
    whole, patient = paper.solve(data, Run()), After(10**9)
    again = paper.solve(data, Run(cancel=patient), piece=3)
    assert (again.decision, again.bound) == (whole.decision, whole.bound)
    assert again.details == whole.details and patient.looked > 1000
    for most in (3, patient.looked // 2):
        stopped = paper.solve(data, cancelled_after(most), piece=3)
        assert stopped.stop is Stop.INTERRUPTED and stopped.bound is None


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"stages": 97}, "at least one layer each"),
        (
            {
                "device_types": [
                    DeviceType(name="a", max_devices=63, layer_seconds=1, p2p_seconds=0)
                ]
            },
            "0 stages",
        ),
        (
            {
                "device_types": [
                    DeviceType(
                        name="a", max_devices=10**6, layer_seconds=1, p2p_seconds=0, max_layers=2
                    )
                ]
            },
            "room for 64 layers",
        ),
    ],
)
def test_reasons_for_infeasibility(changes: dict[str, Any], part: str) -> None:
    for method in ("exact", "cp-sat", "cp-sat-linear", "milp", "paper"):
        result = run_one(instance(**changes), method)
        assert result.status == "infeasible" and part in result.message


ENTRIES = library("astra")


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("entry", rest_wide(ENTRIES, 8), ids=lambda entry: entry.name)
def test_every_exact_method_finds_the_optimum_on_file(entry: Entry, method: str) -> None:
    best, result = present(entry.best_known()), run_one(entry.load().data, method)
    assert best.status == result.status == "optimal"
    assert result.objective == pytest.approx(best.objective, rel=1e-6)


def test_slots_without_end_are_left_to_other_methods() -> None:
    """The slots of 64 types and thousands of layers, without an even plan that would bound them: a
    bound, and no model that fills the memory."""
    types = [
        DeviceType(name=f"t{i}", max_devices=10**6, layer_seconds=1.0 + i, p2p_seconds=0.5)
        for i in range(64)
    ]
    data = instance(layers=4095, micro_batches=2, device_types=types, equal_layers_per_type=True)
    result = run_one(data, "cp-sat")
    assert result.stop is Stop.LIMIT and "the method exact" in result.message
    assert result.bound == pytest.approx(4111 + 4111 / 32)  # all on t0, evenly


@pytest.mark.parametrize("method", EXACT)
def test_equal_layers_that_do_not_divide_need_a_slow_type(method: str) -> None:
    """Three layers on two stages: 2 + 1 on the two stages of the fast type would take 21 s but are
    not equal; 2 on it and 1 on the slow type (10 s a layer) take 12 + 9 x 10 s."""
    types = [
        DeviceType(name=name, max_devices=most, layer_seconds=c, p2p_seconds=0.0)
        for name, most, c in (("fast", 2, 1.0), ("slow", 1, 10.0))
    ]
    data = AstraData(
        layers=3, stages=2, micro_batches=10, data_parallel=1, tensor_parallel=1,
        device_types=types, equal_layers_per_type=True,
    )  # fmt: skip
    result = run_one(data, method)
    assert result.status == "optimal" and result.objective == pytest.approx(102.0)
