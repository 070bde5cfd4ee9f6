"""The exact method beyond enumeration: against every θ tried one by one, ties, stops, limits and
growth."""

from __future__ import annotations

import math
from random import Random

import pytest

from ditto.ditto_cases import SEEDS, data_of, middle_instance, optimum_of
from hetplan.errors import UnsupportedError
from hetplan.formulations.ditto.data import DittoData, Memory
from hetplan.formulations.ditto.exact.relaxer import Relaxer
from hetplan.formulations.ditto.exact.space import Space
from hetplan.formulations.ditto.family import FAMILY
from hetplan.formulations.ditto.problem import compile_problem
from hetplan.solvers.options import Options
from hetplan.solvers.registry import solve
from hetplan.solvers.result import Stop
from hetplan.solvers.run import Run


def by_theta(space: Space) -> list[tuple[float, float]]:
    """(θ, least T with such a k*) for every candidate θ, without intervals, incumbent or prices."""
    answers = [
        (float(theta), Relaxer(space, Run(Options(gap=0.0)))(theta, theta, math.inf))
        for theta in space.candidates
    ]
    return [(theta, answer.bound) for theta, answer in answers if answer.bound is not None]


@pytest.mark.parametrize("seed", range(40))
def test_the_search_equals_trying_every_theta(seed: int) -> None:
    data = middle_instance(seed)
    space = Space(compile_problem(data))
    each = by_theta(space)
    result = solve(FAMILY, data, "exact", Run(Options(threads=1)))
    assert result.status == "optimal"
    assert result.objective == pytest.approx(min(cost for _, cost in each), rel=2e-7)
    bounds_hold(space, each, Random(seed))


def bounds_hold(space: Space, each: list[tuple[float, float]], rng: Random) -> None:
    """The bound of random intervals, as its slope raises it, is kept by the optimum of every θ
    inside."""
    relax = Relaxer(space, Run(Options(gap=0.0)))
    for _ in range(10):
        low, high = sorted(rng.choice(each)[0] for _ in range(2))
        answer = relax(low, high, max(cost for _, cost in each) * (1 + 1e-6))
        assert answer.bound is not None
        for theta, cost in each:
            if low <= theta <= high:
                assert cost >= answer.bound + answer.slope * (theta - low) - 1e-9


def tight(seed: int) -> DittoData:
    """A middle instance with few micro-batches, or with memory that binds."""
    data, rng = middle_instance(seed), Random(seed)
    if seed % 2:
        return data.model_copy(update={"micro_batches": rng.randint(2, 5)})
    state, activation = [1.0] * data.layers, [rng.choice((0.2, 0.6)) for _ in range(data.layers)]
    room = {kind.name: sum(state) * rng.choice((0.25, 0.4, 0.6)) for kind in data.device_types}
    memory = Memory(device_bytes=room, layer_state_bytes=state, layer_activation_bytes=activation)
    return data.model_copy(update={"memory": memory})


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances of any size begin with the relaxation that does not count stages."""
    monkeypatch.setattr("hetplan.formulations.ditto.exact.search.FEW_VECTORS", 0)


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("block", range(8))
def test_the_relaxation_without_a_count_ends_at_the_optimum(block: int) -> None:
    for seed in range(block, len(SEEDS), 8):
        best, result = (
            optimum_of(seed),
            solve(FAMILY, data_of(seed), "exact", Run(Options(threads=1))),
        )
        assert result.status == ("infeasible" if best is None else "optimal"), seed
        if best is not None:
            assert result.objective == pytest.approx(best.objective, rel=1e-6, abs=1e-12), seed


@pytest.mark.parametrize("seed", range(40))
def test_counting_at_once_and_relaxing_first_agree(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tight(seed)
    counted = solve(FAMILY, data, "exact", Run(Options(threads=1)))
    monkeypatch.setattr("hetplan.formulations.ditto.exact.search.FEW_VECTORS", 0)
    relaxed = solve(FAMILY, data, "exact", Run(Options(threads=1)))
    assert relaxed.status == counted.status
    assert relaxed.objective == (
        None if counted.objective is None else pytest.approx(counted.objective, rel=2e-6)
    )
    monkeypatch.setattr("hetplan.formulations.ditto.exact.search.MANY_VECTORS", 0)
    alone = solve(FAMILY, data, "exact", Run(Options(threads=1)))
    if counted.objective is None:
        assert alone.objective is None
        return
    assert alone.bound is not None and alone.bound <= counted.objective * (1 + 1e-9)
    assert alone.objective is None or alone.objective >= counted.objective * (1 - 1e-6)
    assert alone.status != "optimal" or alone.objective == pytest.approx(
        counted.objective, rel=2e-6
    )


@pytest.mark.parametrize("seed", range(20))
def test_bounds_without_a_count_hold(seed: int) -> None:
    problem = compile_problem(tight(seed))
    each = by_theta(Space(problem))
    if each:
        bounds_hold(Space(problem, counted=False), each, Random(seed))


def chain(work: list[float], nodes: int, micro_batches: int) -> DittoData:
    """One type of single devices."""
    kind = {
        "name": "a",
        "nodes": nodes,
        "devices_per_node": 1,
        "forward_seconds": [0.0] * len(work),
        "backward_seconds": work,
    }
    return DittoData.model_validate({"micro_batches": micro_batches, "device_types": [kind]})


@pytest.mark.parametrize("method", [method.name for method in FAMILY.methods if method.exact])
def test_a_nearly_slowest_stage_counts_as_slowest(method: str) -> None:
    # Taken literally, the last stage is the slowest and 10.8 the price; within the tie it is the
    # first.
    result = solve(
        FAMILY, chain([1.0, 0.2, 0.2, 1.0 + 4e-10], 4, 8), method, Run(Options(threads=1))
    )
    assert result.status == "optimal"
    assert result.objective == pytest.approx(2.4 * 2 + 3.0, rel=1e-8)


def test_a_uniform_pipeline_costs_what_it_must() -> None:
    result = solve(FAMILY, chain([1.0] * 6, 6, 10), "exact")
    assert result.objective == pytest.approx(10 + 6 - 1)


class Impatient(Run):
    """Stops after a number of looks at the clock."""

    looks: int

    @property
    def should_stop(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("looks", [0, 1, 2, 4])
def test_a_stopped_search_keeps_template_and_bound(looks: int) -> None:
    for seed in range(12):
        data = middle_instance(seed)
        optimum = solve(FAMILY, data, "exact").objective
        run = Impatient(Options(threads=1))
        run.looks = looks
        result = solve(FAMILY, data, "exact", run)
        assert optimum is not None
        assert result.objective is not None
        assert result.objective >= optimum * (1 - 1e-6)
        if result.stop is Stop.LIMIT:
            assert result.bound is None or result.bound <= optimum * (1 + 1e-9)


def test_too_many_device_vectors_are_refused_by_name() -> None:
    kinds = [
        {
            "name": f"type{i}",
            "nodes": 50,
            "devices_per_node": 1,
            "forward_seconds": [1.0 + i] * 60,
            "backward_seconds": [1.0] * 60,
        }
        for i in range(5)
    ]
    data = DittoData.model_validate({"micro_batches": 300, "device_types": kinds})
    with pytest.raises(UnsupportedError, match="vectors of devices"):
        solve(FAMILY, data, "exact")


def test_a_bound_above_every_template_is_infeasible_for_all() -> None:
    """One usable device whose memory holds no template: the bound of all layers exceeds what
    fitting stages cost."""
    seconds = ([2 / 3, 4 / 3, 2.0, 5 / 3, 2 / 3], [4 / 3, 8 / 3, 4.0, 10 / 3, 4 / 3])
    kinds = [
        {"name": name, "nodes": nodes, "devices_per_node": 1, "forward_seconds": seconds[0],
         "backward_seconds": seconds[1]}
        for name, nodes in (("none", 0), ("one", 1))
    ]  # fmt: skip
    memory = {
        "device_bytes": {"none": 16.0, "one": 10.0},
        "layer_state_bytes": [4.0, 2.0, 2.0, 2.0, 0.0],
        "layer_activation_bytes": [0.0, 2.0, 2.0, 1.0, 5.0],
    }
    data = DittoData.model_validate({"micro_batches": 3, "device_types": kinds, "memory": memory})
    for method in ("exact", "cp-sat", "milp", "pyomo"):
        assert solve(FAMILY, data, method, Run(Options(threads=1))).status == "infeasible", method
