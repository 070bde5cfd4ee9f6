"""The ratio problem for a fixed program: against a plain linear programme; rounding to whole
numbers."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from scipy.optimize import linprog

from evidence.speed.hap_theories import stages_only
from hap.hap_cases import instance as drawn, least_cost, programs
from hetplan.errors import InputError
from hetplan.formulations.hap.cell_ratios import best_in_cell
from hetplan.formulations.hap.data import Device
from hetplan.formulations.hap.family import FAMILY
from hetplan.formulations.hap.problem import compile_problem
from hetplan.programs.shards import shard_lengths
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run
from quick import rest_wide


@pytest.mark.parametrize("types", [1, 2, 5, 20])
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("seed", rest_wide(range(20), 6))
def test_ratios_are_those_of_one_plain_programme(seed: int, segments: int, types: int) -> None:
    """Of programs with replicated and shared work, on up to three devices of each type."""
    draw = random.Random(seed)
    devices = [
        Device(name="d", flops_per_second=speed)
        for speed in (draw.uniform(1, 9) for _ in range(types))
        for _ in range(draw.randint(1, 3))
    ]
    data = drawn(seed, segments).model_copy(update={"devices": devices})
    for signature, program in list(programs(seed, segments).items())[:5]:
        given = data.model_copy(update={"program": list(program)})
        result = solve(FAMILY, given, "auto", Run(Options(threads=1)))
        assert result.status == "optimal"
        assert result.objective == pytest.approx(least_cost(data, signature), rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_the_best_in_a_cell_is_the_optimum_of_one_plain_programme(seed: int, segments: int) -> None:
    """Of all ratios; and the bound with its means over types is no less."""
    draw, stages, types = np.random.default_rng(seed), 3, 3
    F, S = draw.uniform(0, 1, stages), draw.uniform(0, 3, (stages, segments))
    comm, slow = draw.uniform(0.5, 4, segments), draw.uniform(0.2, 2, types)
    corners = itertools.product(np.eye(types), repeat=segments)
    x = np.array([np.stack(corner) for corner in corners])  # [vertex, segment, type]
    byte_seconds = draw.uniform(0, 0.5, len(x))
    start = np.full(len(x), 1 / len(x))
    found, stage_weights, top_weights = best_in_cell(
        F, S, comm, byte_seconds, x, slow, start, Options(threads=1)
    )

    busy = slow * (F[:, None] + np.einsum("sg,vgk->vsk", S, x))  # [vertex, stage, type]
    # columns: shares of the vertices, seconds of the stages, the largest ratios
    stage_rows = np.hstack([busy.reshape(len(x), -1).T, -np.repeat(np.eye(stages), types, axis=0)])
    stage_rows = np.hstack([stage_rows, np.zeros((stages * types, segments))])
    ratio_rows = np.hstack(
        [
            x.reshape(len(x), -1).T,
            np.zeros((segments * types, stages)),
            -np.repeat(np.eye(segments), types, axis=0),
        ]
    )
    rows = np.vstack([stage_rows, ratio_rows])
    shares = np.concatenate([np.ones(len(x)), np.zeros(stages + segments)])
    costs = np.concatenate([byte_seconds, np.ones(stages), comm])
    best = linprog(costs, rows, np.zeros(len(rows)), shares[None], [1.0])
    assert best.status == 0

    ratios = np.tensordot(found, x, 1)
    slowest = (slow * (F[:, None] + S @ ratios)).max(axis=1)
    cost = slowest.sum() + comm @ ratios.max(axis=1) + byte_seconds @ found
    assert cost == pytest.approx(best.fun, rel=1e-8)
    at_vertices = np.einsum("sk,vsk->v", stage_weights, busy)
    at_vertices += np.einsum("g,gk,vgk->v", comm, top_weights, x) + byte_seconds
    assert at_vertices.min() == pytest.approx(best.fun, rel=1e-8)


def test_stages_of_one_mixture_and_equal_devices_count_once() -> None:
    """However many there are, the linear programme is the same."""
    few, many = (compile_problem(stages_only(n, 50, 4)) for n in (8, 64))
    assert few.K == many.K == 4 and many.program is not None
    assert len(few.cost_of(many.program).F) == len(many.cost_of(many.program).F) <= 51
    shared = compile_problem(stages_only(64, 500, 8, replicated=False))
    assert shared.program is not None and len(shared.cost_of(shared.program).F) == 1


@pytest.mark.parametrize(
    ("ratios", "lengths"),
    [
        ([0.5, 0.3, 0.2], [5, 3, 2]),
        ([1 / 3, 1 / 3, 1 / 3], [4, 3, 3]),
        ([0.26, 0.26, 0.48], [2, 3, 5]),
        ([0.05] * 20, [1] * 10 + [0] * 10),
    ],
)
def test_rounding_by_hand(ratios: list[float], lengths: list[int]) -> None:
    """Nearest, then the cheapest corrections; the sum is kept."""
    assert shard_lengths(ratios, 10) == lengths
    with pytest.raises(InputError, match="length of a dimension"):
        shard_lengths(ratios, 0)
