"""The ratio problem for a fixed program: against a plain linear programme; rounding to whole
numbers."""

from __future__ import annotations

import random

import pytest

from evidence.speed.hap_theories import stages_only
from hap.hap_cases import instance as drawn, least_cost, programs
from hetplan.errors import InputError
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
