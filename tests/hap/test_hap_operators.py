"""Every operator's gradients against differences, and every rule by running both of its sides on
three devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hap.spmd_cases import CASES, draw_inputs, dual, hold, lengths, place, shapes, whole
from hetplan.errors import InputError
from hetplan.formulations.hap.spmd.forms import PARTIAL, WHOLE, Way, whole_way
from hetplan.formulations.hap.spmd.operators import operator, operators
from hetplan.formulations.hap.spmd.operators.base import Array, Place
from hetplan.formulations.hap.spmd.operators.rearrange import groups

Case = tuple[str, list[Any], dict[str, Any]]
IDS = [f"{case[0]}-{i}" for i, case in enumerate(CASES)]


def test_every_operator_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(operators())


def alone(case: Case) -> Place:
    shape = operator(case[0]).shape(shapes(case), case[2])
    return Place(shape, (0,) * len(case[1]))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_gradients_are_slopes(case: Case) -> None:
    """(f(x + e d) - f(x - e d)) / 2e = <gradient, d> for a random direction d."""
    draw = np.random.default_rng(5)
    kind, (inputs, op, here) = case[0], (draw_inputs(case, draw), operator(case[0]), alone(case))
    output = op.forward(inputs, case[2], here)
    assert output.shape == here.shape
    over = draw.normal(size=output.shape)
    gradients = op.backward(inputs, output, over, case[2], here)
    for i, gradient in enumerate(gradients):
        if gradient is None:
            assert kind == "positive" or inputs[i].dtype.kind == "i"
            continue
        assert gradient.shape == inputs[i].shape
        direction, step = draw.normal(size=inputs[i].shape), 1e-6

        def at(sign: float, i: int = i, direction: Array = direction, step: float = step) -> float:
            moved = [*inputs]
            moved[i] = inputs[i] + sign * step * direction
            return float((op.forward(moved, case[2], here) * over).sum())

        assert (at(1) - at(-1)) / (2 * step) == pytest.approx(
            float((gradient * direction).sum()), rel=2e-6, abs=1e-8
        )


def all_ways(case: Case) -> list[Way]:
    return [whole_way(len(case[1])), *operator(case[0]).ways(shapes(case), case[2])]


def cuts(case: Case, way: Way) -> list[list[int] | None]:
    """Uneven lengths of the slices of each input and of the output, in common units."""
    output = operator(case[0]).shape(shapes(case), case[2])
    sizes = [
        s[f] if f >= 0 else 0
        for s, f in zip([*shapes(case), output], [*way.inputs, way.output], strict=True)
    ]
    units = np.gcd.reduce([n for n in sizes if n] or [1])
    return [lengths(n, n // units) if n else None for n in sizes]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_rule_holds_forward_and_backward(case: Case) -> None:
    draw = np.random.default_rng(6)
    op, inputs, here = operator(case[0]), draw_inputs(case, draw), alone(case)
    expected = op.forward(inputs, case[2], here)
    over = draw.normal(size=expected.shape)
    slopes = op.backward(inputs, expected, over, case[2], here)
    for way in all_ways(case):
        parts = cuts(case, way)
        held = [hold(x, f, p, draw) for x, f, p in zip(inputs, way.inputs, parts, strict=False)]
        arrived = hold(over, dual(way.output), parts[-1], draw)
        outputs, backs = [], []
        for j in range(3):
            shape = list(here.shape)
            if way.output >= 0 and parts[-1] is not None:
                shape[way.output] = parts[-1][j]
            starts = [0 if p is None else sum(p[:j]) for p in parts[:-1]]
            spot = place(shape, starts, way.output == PARTIAL, j == 0)
            local = [row[j] for row in held]
            outputs.append(op.forward(local, case[2], spot))
            assert outputs[-1].shape == tuple(shape)
            backs.append(op.backward(local, outputs[-1], arrived[j], case[2], spot))
        assert np.allclose(whole(outputs, way.output), expected, rtol=0, atol=1e-10), way
        for i, slope in enumerate(slopes):
            rows = [row[i] for row in backs]
            if slope is None:
                assert rows == [None] * 3
                continue
            # a gradient that reaches a device whole is used by each as it is: its effect on a
            # sliced or summed input must agree, on a whole one add up
            found = whole([r for r in rows if r is not None], dual(way.inputs[i]))
            assert np.allclose(found, slope, rtol=0, atol=1e-10), (way, i)


def test_work_is_counted_per_gradient() -> None:
    """A product of 5 x 6 and 6 x 7: 2 * 5 * 6 * 7 FLOP forward, and once more for each gradient."""
    forward, backward = operator("contract").work(
        [(5, 6), (6, 7)], (5, 7), {"equation": "ab,bc->ac"}
    )
    assert (forward, backward) == (420.0, [420.0, 420.0])
    forward, backward = operator("convolve").work(
        [(2, 3, 8, 8), (4, 3, 3, 3)], (2, 4, 8, 8), {"padding": 1}
    )
    assert (forward, backward) == (2.0 * 2 * 4 * 64 * 27, [2.0 * 2 * 4 * 64 * 27] * 2)
    for case in CASES:
        output = operator(case[0]).shape(shapes(case), case[2])
        forward, backward = operator(case[0]).work(shapes(case), output, case[2])
        assert forward >= 0 and len(backward) == len(case[1]) and min(backward) >= 0


def test_packed_attention_costs_what_three_tensors_cost() -> None:
    one = operator("attention").work([(5, 6, 4, 12)], (5, 6, 4, 4), {})
    three = operator("attention").work([(5, 6, 4, 4)] * 3, (5, 6, 4, 4), {})
    assert one[0] == three[0] and sum(one[1]) == sum(three[1])


def test_reshape_pairs_runs_of_equal_size() -> None:
    assert groups((2, 3, 4), (2, 12)) == [(range(1), range(1)), (range(1, 3), range(1, 2))]
    assert groups((24,), (2, 3, 4)) == [(range(1), range(3))]
    assert Way((1,), 1) in operator("reshape").ways([(5, 12)], {"shape": (5, 6, 2)})
    assert all(w.output != 2 for w in operator("reshape").ways([(5, 12)], {"shape": (5, 6, 2)}))


def test_the_rules_of_figure_9() -> None:
    """HAP's three of a matrix product, by name of the forms."""
    ways = operator("contract").ways([(5, 6), (6, 7)], {"equation": "ab,bc->ac"})
    assert set(ways) == {Way((0, WHOLE), 0), Way((WHOLE, 1), 1), Way((1, 0), PARTIAL)}


@pytest.mark.parametrize(
    ("kind", "whole_shapes", "attributes", "words"),
    [
        ("contract", [(5, 6), (7, 8)], {"equation": "ab,bc->ac"}, "length of b"),
        ("contract", [(5, 6, 1), (6, 8)], {"equation": "ab,bc->ac"}, "as many dimensions"),
        ("add", [(5, 6), (5, 7)], {}, "shapes do not fit"),
        ("reshape", [(5, 6)], {"shape": (5, 7)}, "number of entries"),
        ("convolve", [(5, 6, 7, 7), (5, 5, 3, 3)], {}, "input channels"),
        ("gated", [(5, 6, 3)], {}, "last dimension"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    kind: str, whole_shapes: list[tuple[int, ...]], attributes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        operator(kind).shape(whole_shapes, attributes)
