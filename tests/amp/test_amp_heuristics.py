"""AMP's procedure and its baselines: decisions valid, never below the optimum, rules kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from amp.cases import CASES, QUICK, data_of, heuristics, optimum_of
from amp.generate import instance
from hetplan.formulations.amp.baselines import (
    accepts,
    device_grid,
    megatron_trials,
    random_tiling,
    straight_tiling,
)
from hetplan.formulations.amp.data import AmpData
from hetplan.formulations.amp.evaluate import evaluate, peak_bytes
from hetplan.formulations.amp.family import FAMILY
from hetplan.formulations.amp.paper import (
    TableTooLarge,
    average,
    paper_cut,
    ranked_candidates,
)
from hetplan.formulations.amp.problem import (
    Configuration,
    compile_problem,
    megatron_placement,
)
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run, Stop
from quick import rest_wide


@pytest.mark.parametrize("method", [method.name for method in heuristics()])
@pytest.mark.parametrize("case", rest_wide(CASES, len(QUICK)))
def test_heuristic_is_valid_and_never_below_the_optimum(
    method: str, case: tuple[int, int | None]
) -> None:
    best = optimum_of(case)
    result = solve(FAMILY, data_of(case), method)
    assert result.stop is Stop.DONE
    assert result.bound is None
    assert (result.decision is None) <= (result.message != ""), "a method without a plan says why"
    if best is None:
        assert result.decision is None
    elif result.objective is not None:
        assert result.objective >= best.objective * (1 - 1e-9) - 1e-12


@pytest.mark.wide
def test_heuristics_mostly_find_something_and_sometimes_the_optimum() -> None:
    """The checks above must not pass for want of decisions."""
    feasible = [case for case in CASES if optimum_of(case) is not None]
    for method in heuristics():
        results = [solve(FAMILY, data_of(case), method.name) for case in feasible[:60]]
        objectives = [
            (optimum_of(case), result.objective)
            for case, result in zip(feasible, results, strict=False)
        ]
        assert sum(found is not None for _, found in objectives) > 40
        hits = [
            found == pytest.approx(best.objective) for best, found in objectives if best and found
        ]
        assert 10 < sum(hits) < len(hits)


@pytest.mark.parametrize("case", rest_wide(CASES[::9], 8))
def test_prices_on_arrays_equal_the_evaluator(case: tuple[int, int | None]) -> None:
    """`Placed` against the independent evaluator, on AMP's candidates and Megatron's."""
    data = data_of(case)
    problem = compile_problem(data)
    for candidate in ranked_candidates(data).candidates:
        found = evaluate(data, candidate.strategy.decision())
        assert (found.objective is not None) == candidate.fits
        assert found.objective is None or found.objective == pytest.approx(
            candidate.seconds, rel=1e-12
        )
    for trial in megatron_trials(data, problem, Run()):
        found = evaluate(data, trial.strategy.decision())
        assert found.objective == (
            None if trial.seconds is None else pytest.approx(trial.seconds, rel=1e-12)
        )


def homogeneous(layers: int, nodes: tuple[int, ...], **changes: Any) -> AmpData:
    """One type, nodes of the given sizes, equal layers, tables for tensor 1, 2, 4 and micro-batches
    1, 2."""
    devices = [{"type": "a", "node": node} for node, size in enumerate(nodes) for _ in range(size)]
    bandwidth = [
        [
            0.0 if i == j else 100.0 if left["node"] == right["node"] else 10.0
            for j, right in enumerate(devices)
        ]
        for i, left in enumerate(devices)
    ]
    document = {
        "devices": devices,
        "bandwidth": bandwidth,
        "layers": [
            {"name": f"l{i}", "param_bytes": 1.0, "activation_bytes": 1.0, "tensor_bytes": 1.0}
            for i in range(layers)
        ],
        "layer_seconds": [
            {
                "type": "a",
                "tensor": tensor,
                "micro_batch": batch,
                "seconds": [batch / tensor] * layers,
            }
            for tensor in (1, 2, 4)
            for batch in (1, 2)
        ],
        "global_batch": 16,
    }
    return AmpData.model_validate(document | changes)


def test_amp_estimates_homogeneous_clusters_exactly() -> None:
    """No averages are lost, so the estimate is T and the best-ranked candidate is the best of
    them."""
    ranking = ranked_candidates(homogeneous(8, (4, 4)))
    assert len(ranking.candidates) > 10
    for candidate in ranking.candidates:
        assert candidate.estimate == pytest.approx(candidate.seconds)
    seconds = [candidate.seconds for candidate in ranking.candidates]
    assert seconds == sorted(seconds)


def test_averages_by_hand() -> None:
    """Types by their count, links by pipelines, all-reduces by tensor groups; S by the slowest
    group."""
    document = homogeneous(2, (2, 2)).model_dump()
    document["devices"][3]["type"] = "b"
    for tensor in (1, 2):
        entry = {"type": "b", "tensor": tensor, "micro_batch": 2, "seconds": [6.0, 10.0]}
        document["layer_seconds"].append(entry)
    for a, b, value in ((0, 2, 4.0), (1, 3, 20.0), (2, 3, 50.0)):
        document["bandwidth"][a][b] = document["bandwidth"][b][a] = value
    problem = compile_problem(AmpData.model_validate(document))
    pipelines = Configuration(2, 2, 1, 2, 4)
    found = average(problem, pipelines, np.arange(4).reshape(2, 2, 1))
    assert found.layer.tolist() == [(3 * 2 + 6) / 4, (3 * 2 + 10) / 4]
    assert found.link == pytest.approx(np.full((1, 2), 2 * (1 / 4 + 1 / 20) / 2))
    assert found.sync == pytest.approx([1 / 100, 1 / 50])
    groups = average(problem, Configuration(2, 1, 2, 2, 8), np.arange(4).reshape(2, 1, 2))
    reduce_seconds = 2 * (1 / 100 + 1 / 50) / 2
    assert groups.layer == pytest.approx(
        [(3 + 6) / 4 + reduce_seconds, (3 + 10) / 4 + reduce_seconds]
    )
    # of a group's links to the next stage the slowest counts
    assert groups.link == pytest.approx(np.full((1, 2), 2 / 4))


def test_memory_makes_amp_step_back_and_say_so() -> None:
    """Everything replicated does not fit; the next estimate that fits is returned."""
    memory = {
        "device_bytes": {"a": 5.0},
        "state_bytes_per_param_byte": 1.0,
        "layer_bytes_per_sample": [0.0] * 8,
    }
    data = homogeneous(8, (4,), memory=memory)
    ranking = ranked_candidates(data)
    assert not ranking.candidates[0].fits
    result = solve(FAMILY, data, "paper")
    assert result.objective is not None
    assert result.details["rank"] != 1
    assert "its own choice" in result.message
    memory["device_bytes"] = {"a": 0.5}
    nothing = solve(FAMILY, homogeneous(8, (4,), memory=memory), "paper")
    assert nothing.decision is None
    assert nothing.message == f"none of AMP's {len(ranking.candidates)} strategies fits in memory"


def test_a_run_out_of_time_keeps_what_it_has() -> None:
    data = homogeneous(8, (4, 4))
    for method in heuristics():
        run = Run(Options(time_limit=1e-9))
        result = solve(FAMILY, data, method.name, run)
        assert result.stop is Stop.LIMIT, method.name
        cancelled = Run()
        cancelled.cancel.set()
        assert solve(FAMILY, data, method.name, cancelled).stop is Stop.INTERRUPTED


@pytest.mark.parametrize(
    ("nodes", "batch", "expected"),
    [
        # 16 samples on 8 devices: dp 8 for both micro-batches, 16 / 8 / 2 is whole
        ((4, 4), 16, {"pp1 dp8 tp1 mbs1", "pp1 dp8 tp1 mbs2"}),
        # 8 samples by micro-batch 2 leave dp <= 4; nodes of 1 forbid tensor groups, nodes of 4 not
        ((4, 4), 8, {"pp1 dp8 tp1 mbs1", "pp1 dp4 tp2 mbs2", "pp2 dp4 tp1 mbs2"}),
        ((7, 1), 8, {"pp1 dp8 tp1 mbs1", "pp2 dp4 tp1 mbs2"}),
    ],
)
def test_megatron_takes_the_least_tensor_times_pipeline_within_the_smallest_node(
    nodes: tuple[int, ...], batch: int, expected: set[str]
) -> None:
    data = homogeneous(8, nodes, global_batch=batch)
    trials = megatron_trials(data, compile_problem(data), Run())
    assert {str(trial.strategy.configuration) for trial in trials} == expected


def test_megatron_splits_further_where_memory_asks_for_it() -> None:
    memory = {
        "device_bytes": {"a": 4.0},
        "state_bytes_per_param_byte": 1.0,
        "layer_bytes_per_sample": [0.0] * 8,
    }
    data = homogeneous(8, (4, 4), memory=memory)
    result = solve(FAMILY, data, "megatron")
    assert result.decision is not None
    assert result.decision.pipeline * result.decision.tensor == 2


@pytest.mark.parametrize(
    ("nodes", "tensor", "expected"),
    [
        ([0, 0, 1, 1], 2, [[0, 1], [2, 3]]),
        ([1, 0, 1, 0], 2, [[1, 3], [0, 2]]),
        ([0, 0, 0, 1, 1, 1], 2, [[0, 1], [3, 4], [2, 5]]),
        ([5, 5, 5, 5], 1, [[0], [1], [2], [3]]),
    ],
)
def test_megatron_order(nodes: list[int], tensor: int, expected: list[list[int]]) -> None:
    groups = len(nodes) // tensor
    placement = megatron_placement(nodes, Configuration(1, groups, tensor, 1, 1))
    assert placement.tolist() == [expected]
    assert megatron_placement(nodes, Configuration(groups, 1, tensor, 1, 1)).tolist() == [
        [g] for g in expected
    ]


@pytest.mark.parametrize("method", ["annealing", "random"])
def test_the_seed_decides_everything(method: str) -> None:
    case = next(case for case in CASES if case[1] == 6 and optimum_of(case) is not None)
    runs = [
        solve(FAMILY, data_of(case), method, Run(Options(seed=seed))) for seed in (3, 3, 4, 5, 6)
    ]
    assert runs[0].decision == runs[1].decision
    assert runs[0].details == runs[1].details
    assert len({str(run.details) for run in runs}) > 1


@given(
    st.sampled_from([(1, 1), (4, 4), (2, 8), (3, 4), (6, 1), (8, 8)]), st.data(), st.integers(0, 99)
)
def test_tilings_cover_the_grid_once(
    shape: tuple[int, int], drawn: st.DataObject, seed: int
) -> None:
    rows, columns = shape
    h = drawn.draw(st.sampled_from([d for d in range(1, rows + 1) if rows % d == 0]))
    w = drawn.draw(st.sampled_from([d for d in range(1, columns + 1) if columns % d == 0]))
    for tiles in (
        random_tiling(shape, (h, w), np.random.default_rng(seed)),
        straight_tiling(shape, (h, w)),
    ):
        covered = np.zeros(shape, dtype=int)
        for area in tiles:
            covered[area] += 1
            assert sorted(covered[area].shape) == sorted((h, w))
        assert (covered == 1).all()


@pytest.mark.parametrize(("sizes", "shape"), [((4, 4), (2, 4)), ((4, 2), (3, 2)), ((3, 2), (5, 1))])
def test_the_grid_folds_unequal_nodes(sizes: tuple[int, ...], shape: tuple[int, int]) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    grid = device_grid(nodes)
    assert grid.shape == shape
    for row in grid:
        assert len({nodes[device] for device in row}) == 1


@pytest.mark.parametrize(
    ("energy", "neighbour", "temperature", "draw", "taken"),
    [
        (2.0, 1.0, 1e-9, 0.999, True),
        (1.0, 1.0, 1e-9, 0.999, True),
        (np.inf, np.inf, 1.0, 0.999, True),
        (np.inf, 1.0, 1.0, 0.999, True),
        (1.0, np.inf, 10.0, 0.0, False),
        (1.0, 1.0 + 10 * np.log(2), 10.0, 0.49, True),
        (1.0, 1.0 + 10 * np.log(2), 10.0, 0.51, False),
    ],
)
def test_annealing_takes_worse_neighbours_as_often_as_it_says(
    energy: float, neighbour: float, temperature: float, draw: float, taken: bool
) -> None:
    assert accepts(energy, neighbour, temperature, draw) == taken


@pytest.mark.parametrize("method", ["exact", "megatron"])
def test_an_exact_fit_is_a_fit_for_solvers_too(method: str) -> None:
    """Rounding of a sum of bytes decides nothing: evaluator and arrays allow the same."""
    solved = (
        (data, solve(FAMILY, data, method)) for data in map(instance, range(200)) if data.memory
    )
    data, result = next((data, result) for data, result in solved if result.decision is not None)
    assert result.decision is not None and data.memory is not None
    held = peak_bytes(data, result.decision)
    assert held is not None
    most = dict[str, float]()
    for device, size in zip(data.devices, held, strict=True):
        most[device.type] = max(size * (1 - 5e-10), most.get(device.type, 0.0))
    memory = data.memory.model_copy(update={"device_bytes": most})
    tight = solve(FAMILY, data.model_copy(update={"memory": memory}), method)
    assert tight.objective == pytest.approx(result.objective, rel=1e-9)


def test_a_table_too_large_is_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(TableTooLarge):
        paper_cut(rng.random(8), rng.random((3, 8)), 4, most_bytes=5_000)
    # eight equal layers have 9 tolerances, not 37
    equal = paper_cut(np.ones(8), rng.random((3, 8)), 4, most_bytes=5_000)
    assert equal is not None
    one = paper_cut(rng.random(800), np.zeros((0, 800)), 4, most_bytes=5_000)
    assert one is not None and one[0].tolist() == [0, 800]
