"""The ratio problem for a fixed program: against a plain linear programme; rounding to whole
numbers."""

from __future__ import annotations

import random

import pytest

from fakes.theories import stages_only
from hap.hap_cases import _signature, least_cost
from hetplan.errors import InputError
from hetplan.formulations.hap.data import (
    Communication,
    Compute,
    Device,
    HapData,
    Triple,
)
from hetplan.formulations.hap.family import FAMILY
from hetplan.formulations.hap.problem import compile_problem
from hetplan.formulations.hap.ratios import shard_lengths
from hetplan.solvers.options import Options
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run


def given(seed: int, types: int, segments: int, *, shared_only: bool) -> HapData:
    """A random program of up to 8 stages on up to 12 devices."""
    draw = random.Random(seed)
    triples: list[Triple] = []
    count = draw.randint(2, 16)
    for n in range(count):
        pre, post = [f"p{n - 1}"] if n else [], [f"p{n}"]
        k = draw.randrange(segments)
        if draw.random() < 0.4:
            triples.append(
                Communication(
                    kind="comm", instruction="c", pre=pre, post=post, segment=k,
                    fixed_seconds=draw.random(), shared_seconds=3 * draw.random(),
                )
            )  # fmt: skip
        else:
            triples.append(
                Compute(
                    kind="compute", instruction="o", pre=pre, post=post, segment=k,
                    fixed_flops=0.0 if shared_only else draw.choice([0.0, 1e12]) * draw.random(),
                    shared_flops=8e12 * draw.random(),
                )
            )  # fmt: skip
    speeds = [draw.uniform(1, 9) * 1e12 for _ in range(types)]
    devices = [
        Device(name="d", flops_per_second=draw.choice(speeds))
        for _ in range(draw.randint(types, 12 if types < 9 else 30))
    ]
    return HapData(
        devices=devices,
        segments=segments,
        triples=triples,
        goal=f"p{count - 1}",
        program=list(range(count)),
    )


@pytest.mark.parametrize(
    ("types", "segments", "shared_only"),
    [(1, 1, False), (4, 1, True), (2, 1, False), (5, 1, False), (20, 1, False), (3, 3, False)],
)
def test_ratios_are_those_of_one_plain_programme(
    types: int, segments: int, shared_only: bool
) -> None:
    for seed in range(40):
        data = given(seed, types, segments, shared_only=shared_only)
        result = solve(FAMILY, data, "auto", Run(Options(threads=1)))
        assert data.program is not None
        # the oracle's model is in TFLOP
        devices = [
            d.model_copy(update={"flops_per_second": d.flops_per_second / 1e12})
            for d in data.devices
        ]
        names = ("fixed_flops", "shared_flops")
        triples = [
            t
            if isinstance(t, Communication)
            else t.model_copy(update={name: getattr(t, name) / 1e12 for name in names})
            for t in data.triples
        ]
        scaled = data.model_copy(update={"devices": devices, "triples": triples})
        best = least_cost(scaled, _signature(scaled, tuple(data.program), segments))
        assert result.status == "optimal", seed
        assert result.objective == pytest.approx(best, rel=1e-8), seed


def test_cost_does_not_depend_on_the_number_of_equal_devices() -> None:
    """64 devices or 8 of the same types: the same linear programme."""
    for types in (2, 4):
        few, many = (compile_problem(stages_only(n, 50, types)) for n in (8, 64))
        assert few.K == many.K == types
        assert many.given is not None
        assert len(few.stages(many.given).F) == len(many.stages(many.given).F) <= 51


def test_proportional_work_needs_few_rows() -> None:
    """Stages of one mixture of work count as one."""
    problem = compile_problem(stages_only(64, 500, 8, replicated=False))
    assert problem.given is not None
    assert len(problem.stages(problem.given).F) == 1


def test_rounding_by_hand() -> None:
    """Nearest, then the cheapest corrections; the sum is kept."""
    assert shard_lengths([0.5, 0.3, 0.2], 10) == [5, 3, 2]
    assert shard_lengths([1 / 3, 1 / 3, 1 / 3], 10) == [4, 3, 3]
    assert shard_lengths([0.26, 0.26, 0.48], 10) == [2, 3, 5]
    assert shard_lengths([0.05] * 20, 10).count(1) == 10
    with pytest.raises(InputError, match="length of a dimension"):
        shard_lengths([1.0], 0)
