"""Every rule by running both of its sides on three devices, and the work that is charged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="programs run on torch tensors")


from fakes.simulated import whole_place  # noqa: E402
from hap.spmd_cases import CASES, draw_inputs, dual, hold, lengths, shapes, whole  # noqa: E402
from hetplan.errors import InputError  # noqa: E402
from hetplan.programs.forms import PARTIAL, WHOLE, ShardingRule, replicated_rule  # noqa: E402
from hetplan.programs.operators.operator import Place, zeros  # noqa: E402
from hetplan.programs.operators.table import OPERATORS, operator  # noqa: E402
from hetplan.programs.program import Node  # noqa: E402

Case = tuple[str, list[Any], dict[str, Any]]
IDS = [f"{case[0]}-{i}" for i, case in enumerate(CASES)]


def test_every_operator_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(OPERATORS)


def all_sharding_rules(case: Case) -> list[ShardingRule]:
    return [
        replicated_rule(len(case[1])),
        *operator(case[0]).all_sharding_rules(shapes(case), case[2]),
    ]


def cuts(case: Case, rule: ShardingRule) -> list[list[int] | None]:
    """Uneven lengths of the slices of each input and of the output, in common units."""
    output = operator(case[0]).shape(shapes(case), case[2])
    sizes = [
        s[f] if f >= 0 else 0
        for s, f in zip([*shapes(case), output], [*rule.inputs, rule.output], strict=True)
    ]
    sliced = [n for n in sizes if n]
    units = np.gcd.reduce(sliced or [1])
    assert units >= 3 or not sliced, f"{case[0]}: {rule} leaves no unit for each of three devices"
    return [lengths(n, n // units) if n else None for n in sizes]


@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
def test_zeros_are_zeros_whatever_the_inputs_hold(value: float) -> None:
    """A device without rows sums with the others: what it adds must not be nan, nor its gradients
    (tokens that experts mask with -inf, overflows of fp16)."""
    x = torch.tensor([[value, 1.0]], requires_grad=True)
    made = zeros((0, 3), [x, torch.tensor([0, 1])]).sum() + zeros((2,), [x]).sum()
    made.backward()
    assert made.item() == 0 and x.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_rule_holds_forward_and_backward(case: Case) -> None:
    """On uneven slices, whole tensors and summands: together they give what one device gives, and
    so do the gradients."""
    kind, _, attributes = case
    draw, inputs = np.random.default_rng(6), draw_inputs(case, np.random.default_rng(6))
    shape = operator(kind).shape(shapes(case), attributes)
    node = Node("y", kind, tuple(f"x{i}" for i in range(len(inputs))), shape, attributes)
    expected = node.compute(inputs, whole_place(node))
    assert expected.shape == shape
    over = torch.as_tensor(draw.normal(size=shape))
    slopes = slopes_of(expected, inputs, over)
    assert operator(kind).differentiable == any(slope is not None for slope in slopes)
    for rule in all_sharding_rules(case):
        parts = cuts(case, rule)
        held = [hold(x, f, p, draw) for x, f, p in zip(inputs, rule.inputs, parts, strict=False)]
        arrived = hold(over, dual(rule.output), parts[-1], draw)
        outputs, backs = [], []
        for j in range(3):
            here = list(shape)
            if rule.output >= 0 and parts[-1] is not None:
                here[rule.output] = parts[-1][j]
            starts = tuple(0 if p is None else sum(p[:j]) for p in parts[:-1])
            local = [row[j] for row in held]
            spot = Place(tuple(here), starts, rule.output == PARTIAL, first=j == 0)
            outputs.append(node.compute(local, spot))
            assert outputs[-1].shape == tuple(here)
            backs.append(slopes_of(outputs[-1], local, arrived[j].detach()))
        together = whole([part.detach() for part in outputs], rule.output)
        assert torch.allclose(together, expected.detach(), rtol=0, atol=1e-10), rule
        for i, slope in enumerate(slopes):
            rows = [row[i] for row in backs]
            if slope is None:
                assert rows == [None] * 3
                continue
            # a gradient that reaches a device whole is used by each as it is: its effect on a
            # sliced or summed input must agree, on a whole one add up
            together = whole([r for r in rows if r is not None], dual(rule.inputs[i]))
            assert torch.allclose(together, slope, rtol=0, atol=1e-10), (rule, i)


def slopes_of(output: Any, inputs: list[Any], over: Any) -> list[Any]:
    """Gradients of the inputs, None where an input has none."""
    if not output.requires_grad:
        return [None] * len(inputs)
    real = [x for x in inputs if x.requires_grad]
    found = iter(torch.autograd.grad(output, real, over))
    return [next(found) if x.requires_grad else None for x in inputs]


def test_what_kernels_compute_by_hand() -> None:
    """Where torch has no module that the tracer could be held against."""

    def run(kind: str, values: list[Any], **attributes: Any) -> Any:
        tensors = [torch.as_tensor(v) for v in values]
        shape = operator(kind).shape([tuple(t.shape) for t in tensors], attributes)
        node = Node("y", kind, tuple("abc"[: len(values)]), shape, attributes)
        return node.compute(tensors, whole_place(node)).tolist()

    gates = [[[0.6, 0.4], [0.9, 0.1], [0.7, 0.3]]]
    placed = run("route", [gates], active=1, capacity=2)
    assert placed == pytest.approx(
        np.array([[[[0.6, 0], [0, 0]], [[0, 0.9], [0, 0]], [[0, 0], [0, 0]]]])
    )
    quarter = run("rotary", [np.array([[[[1.0, 0.0], [1.0, 0.0]]]])])
    assert quarter[0][0] == pytest.approx(np.array([[1.0, 0.0], [np.cos(1), np.sin(1)]]))
    assert run("embed", [[1, 5], [[1.0], [2.0]]]) == [[2.0], [0.0]]


def test_sharding_rules_by_hand() -> None:
    """HAP's three of a matrix product (Figure 9); a reshape pairs runs of equal size."""
    sharding_rules = operator("contract").sharding_rules(
        [(5, 6), (6, 7)], {"equation": "ab,bc->ac"}
    )
    assert set(sharding_rules) == {
        ShardingRule((0, WHOLE), 0),
        ShardingRule((WHOLE, 1), 1),
        ShardingRule((1, 0), PARTIAL),
    }

    def pairs(before: tuple[int, ...], after: tuple[int, ...]) -> set[ShardingRule]:
        return set(operator("reshape").sharding_rules([before], {"shape": after})) - {
            ShardingRule((PARTIAL,), PARTIAL)
        }

    assert pairs((2, 3, 4), (2, 12)) == {ShardingRule((0,), 0), ShardingRule((1,), 1)}
    assert pairs((1, 24), (2, 3, 4)) == {ShardingRule((1,), 0)}
    assert pairs((5, 12), (5, 6, 1, 2)) == {ShardingRule((0,), 0), ShardingRule((1,), 1)}


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
