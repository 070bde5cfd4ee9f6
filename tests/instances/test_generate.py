"""Random instances: the same under one predictor, valid, of the size asked for, and solvable."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from hetplan.errors import InputError
from hetplan.instances.generate import MAKERS, SIZES, draw
from hetplan.instances.library import SETS, Instance, in_set, library, parse_instance
from hetplan.profiling.profiles.predict import PREDICTOR
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run
from present import present
from quick import rest_wide


@pytest.mark.parametrize("problem", MAKERS)
@pytest.mark.parametrize("seed", rest_wide(range(3), 1))
def test_the_same_seed_is_the_same_instance(problem: str, seed: int) -> None:
    one, other = draw(problem, 100 + seed), draw(problem, 100 + seed)
    assert one == other and one != draw(problem, 200 + seed)
    assert parse_instance(one.document(), where="again").data == one.data


def like(value: Any) -> Any:
    """What equals a JSON value up to the rounding of exp and log, in which C libraries differ."""
    if isinstance(value, dict):
        return {key: like(part) for key, part in value.items()}
    if isinstance(value, list):
        return [like(part) for part in value]
    return pytest.approx(value, rel=1e-12, abs=0) if isinstance(value, float) else value


def check_drawn(instance: Instance) -> None:
    """A random instance that the current predictor made is drawn again."""
    problem, size, seed = instance.name.split("-")[1:]
    again = draw(problem, int(seed), size)
    assert again.origin == instance.origin
    assert again.document() == like(instance.document())


def predictor_of(instance: Instance) -> int:
    """The version of the predictor that a random instance names."""
    named = present(re.search(r"predicted profile \(predictor (\d+)\)", instance.origin))
    return int(named[1])


@pytest.mark.parametrize("one_in", rest_wide([5, 1], 1))
def test_packaged_draws_name_their_predictor(one_in: int) -> None:
    """One in so many of those that the current predictor made is drawn again."""
    packaged = [entry.load() for entry in library(name="random-*")]
    current = [instance for instance in packaged if predictor_of(instance) == PREDICTOR]
    assert {*map(predictor_of, packaged)} <= set(range(1, PREDICTOR + 1))
    for instance in current[::one_in]:
        check_drawn(instance)


@pytest.mark.parametrize("problem", MAKERS)
@pytest.mark.parametrize("seed", rest_wide(range(2), 1))
def test_what_the_current_predictor_made_is_drawn_again(problem: str, seed: int) -> None:
    drawn = draw(problem, seed)
    assert predictor_of(drawn) == PREDICTOR
    check_drawn(parse_instance(drawn.document(), where="again"))
    with pytest.raises(AssertionError):
        check_drawn(replace(drawn, data=draw(problem, seed + 10).data))


@pytest.mark.parametrize("problem", [name for name in MAKERS if name != "joint"])
def test_exact_methods_agree_on_a_drawn_instance(problem: str) -> None:
    drawn = draw(problem, 7)
    found = [
        solve(drawn.family, drawn.data, method, Run(Options(threads=1, time_limit=600)))
        for method in ("exact", "cp-sat-linear")
    ]
    assert {result.status for result in found} <= {"optimal", "infeasible"}
    assert found[0].status == found[1].status
    if found[0].objective is not None:
        assert found[0].objective == pytest.approx(found[1].objective, rel=3e-6)


@pytest.mark.parametrize("seeds", rest_wide([range(2), range(2, 5)], 1))
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, seeds: range) -> None:
    for seed in seeds:
        assert len(draw("amp", seed, size).data.devices) <= SIZES[size]


@pytest.mark.parametrize(
    ("problem", "size", "message"),
    [
        ("hap", "small", r"no generator for the problem \(got 'hap', expected one of"),
        ("amp", "huge", "unknown size 'huge'"),
    ],
)
def test_what_cannot_be_drawn(problem: str, size: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        draw(problem, 0, size)


def test_every_set_has_instances() -> None:
    entries = library()
    for name in SETS:
        assert any(in_set(entry.problem, entry.name, name) for entry in entries), name
