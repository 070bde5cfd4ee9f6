"""Products of matrices: contractions and convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetplan.errors import require
from hetplan.programs.forms import ShardingRule, along
from hetplan.programs.operators.operator import (
    ELEMENT_FLOPS,
    Attributes,
    Operator,
    Place,
    Shape,
    Shapes,
    Work,
    size,
    zeros,
)

if TYPE_CHECKING:
    from torch import Tensor


def parsed(equation: str) -> tuple[tuple[str, ...], str]:
    """The letters of each input, and those of the output, in an equation of einsum: `ab,bc,c->ac`
    gives (("ab", "bc", "c"), "ac")."""
    left, _, output = equation.partition("->")
    return tuple(left.split(",")), output


def contract_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The output's shape: the lengths of its letters. Raises InputError where a letter has two
    lengths, or the equation does not fit the number of inputs or of their dimensions."""
    equation = attributes["equation"]
    terms, output = parsed(equation)
    require(
        len(terms) == len(whole) and len(terms) in (2, 3),
        "number of tensors",
        where=equation,
        got=len(whole),
        expected="2 or 3",
    )
    lengths: dict[str, int] = {}
    for term, shape in zip(terms, whole, strict=True):
        require(
            len(term) == len(shape),
            f"{term} has {len(term)} letters",
            where=equation,
            got=shape,
            expected="as many dimensions",
        )
        for letter, length in zip(term, shape, strict=True):
            known = lengths.setdefault(letter, length)
            require(
                known == length,
                f"length of {letter}",
                where=equation,
                got=length,
                expected=str(known),
            )
    return tuple(lengths[letter] for letter in output)


def contract_rules(whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
    """A contraction can be sliced along every letter of its factors and its output."""
    terms, output = parsed(attributes["equation"])
    letters = dict.fromkeys("".join((*terms[:2], output)))
    return [along(letter, terms, output) for letter in letters]


def contract_products(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """FLOP of one product in the forward pass, and of one for each factor's gradient."""
    terms, _ = parsed(attributes["equation"])
    length_of = dict(zip("".join(terms[:2]), (*whole[0], *whole[1]), strict=True))
    flops = 2.0 * float(math.prod(length_of.values()))
    of_bias = [0.0] * (len(whole) - 2)
    return flops, [flops, flops, *of_bias]


def contract_work(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """FLOP of the products, and of moving the gradient of a bias."""
    return with_bias(contract_products(whole, output, attributes), output)


def with_bias(products: Work, output: Shape) -> Work:
    """FLOP of the products, and of a bias's gradient if there is a bias: it reads every entry of
    the output's gradient."""
    forward, (left, right, *biases) = products
    of_bias = [ELEMENT_FLOPS * size(output)] * len(biases)  # no bias, or one
    return forward, [left, right, *of_bias]


def contract(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """Sums of products over the letters that the output lacks, plus a bias if there is one."""
    import torch

    terms, output = parsed(attributes["equation"])
    result = torch.einsum(f"{terms[0]},{terms[1]}->{output}", inputs[0], inputs[1])
    if len(inputs) == 2:
        return result
    bias_letters, bias = terms[2], inputs[2]
    in_output_order = [letter for letter in output if letter in bias_letters]
    assert list(bias_letters) == in_output_order, "a bias keeps the order of the output"
    length_of = dict(zip(bias_letters, bias.shape, strict=True))
    shape = [length_of.get(letter, 1) for letter in output]
    return result + place.once * bias.view(shape)


def convolve_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The output's shape [b, o, rows, columns] for x [b, c, H, W] and weight [o, c, k, l]. The
    attributes `padding` and `stride` hold for rows and for columns."""
    (b, c, height, width), (o, inner, k, l) = whole[:2]
    require(inner == c, "input channels", where="convolve", got=c, expected=str(inner))
    pad, stride = attributes.get("padding", 0), attributes.get("stride", 1)
    return (b, o, (height + 2 * pad - k) // stride + 1, (width + 2 * pad - l) // stride + 1)


def convolve_rules(whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
    """Samples, output channels and input channels can be sliced. Slices of the input channels give
    summands. Rows and columns cannot be sliced, since neighbouring windows overlap."""
    terms = ("bcHW", "ockl", "o")[: len(whole)]  # the last one is of a bias, if there is one
    return [along(letter, terms, "boHW") for letter in "boc"]


def convolve_products(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """FLOP of one product in the forward pass, and of one for each gradient of x and weight."""
    weight = whole[1]
    flops = 2.0 * size(output) * size(weight[1:])
    of_bias = [0.0] * (len(whole) - 2)
    return flops, [flops, flops, *of_bias]


def convolve_work(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """FLOP of the products, and of moving the gradient of a bias."""
    return with_bias(convolve_products(whole, output, attributes), output)


def convolve(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """The convolution with zero padding, plus a bias if there is one."""
    from torch.nn.functional import conv2d

    x, weight = inputs[:2]
    # A device without samples or output channels has an empty output. One without input channels
    # adds the summand 0.
    if 0 in x.shape or 0 in weight.shape:
        result = zeros(place.shape, inputs[:2])
    else:
        padding, stride = attributes.get("padding", 0), attributes.get("stride", 1)
        result = conv2d(x, weight, padding=padding, stride=stride)
    if len(inputs) == 2:
        return result
    return result + place.once * inputs[2][:, None, None]


PRODUCTS: dict[str, Operator] = {
    "contract": Operator(
        contract_shape, contract_rules, contract, contract_work, contract_products
    ),
    "convolve": Operator(
        convolve_shape, convolve_rules, convolve, convolve_work, convolve_products
    ),
}
