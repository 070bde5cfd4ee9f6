"""Products of matrices: contractions and convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetplan.errors import require
from hetplan.programs.forms import Way, along
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
    """The letters of inputs and output: `ab,bc,c->ac` gives (("ab", "bc", "c"), "ac")."""
    left, _, output = equation.partition("->")
    return tuple(left.split(",")), output


def contract_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The lengths of the output's letters; a letter has the same length in all inputs."""
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


def contract_ways(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Along every letter of the factors and the output."""
    terms, output = parsed(attributes["equation"])
    letters = dict.fromkeys("".join((*terms[:2], output)))
    return [along(letter, terms, output) for letter in letters]


def contract_products(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """One product in the forward pass, and one for each factor's gradient."""
    terms, _ = parsed(attributes["equation"])
    pairs = zip("".join(terms[:2]), (*whole[0], *whole[1]), strict=True)
    flops = 2.0 * float(math.prod(dict(pairs).values()))
    return flops, [flops, flops, *[0.0] * (len(whole) - 2)]


def contract_work(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """The products; a bias' gradient only moves."""
    return with_bias(contract_products(whole, output, attributes), output)


def with_bias(products: Work, output: Shape) -> Work:
    """The products, and the entries that a bias' gradient reads, where there is a bias."""
    forward, (left, right, *bias) = products
    return forward, [left, right, *[ELEMENT_FLOPS * size(output)] * len(bias)]


def contract(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """Sums of products over the letters that the output lacks, plus a bias if there is one."""
    import torch

    terms, output = parsed(attributes["equation"])
    result = torch.einsum(f"{terms[0]},{terms[1]}->{output}", inputs[0], inputs[1])
    if len(inputs) == 2:
        return result
    own, bias = terms[2], inputs[2]
    kept = [letter for letter in output if letter in own]
    assert list(own) == kept, "a bias keeps the order of the output"
    lengths = iter(bias.shape)
    shape = [next(lengths) if letter in own else 1 for letter in output]
    return result + place.once * bias.view(shape)


def convolve_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """x [b, c, H, W] with weight [o, c, k, l]; `padding` and `stride` are alike both ways."""
    (b, c, height, width), (o, inner, k, l) = whole[:2]
    require(inner == c, "input channels", where="convolve", got=c, expected=str(inner))
    pad, stride = attributes.get("padding", 0), attributes.get("stride", 1)
    return (b, o, (height + 2 * pad - k) // stride + 1, (width + 2 * pad - l) // stride + 1)


def convolve_ways(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Samples, output channels, and input channels, which are summed over."""
    terms = ("bcHW", "ockl", "o")[: len(whole)]
    return [along(letter, terms, "boHW") for letter in "boc"]


def convolve_products(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """One product in the forward pass, and one for the gradients of input and weight each."""
    flops = 2.0 * size(output) * size(whole[1][1:])
    return flops, [flops, flops, *[0.0] * (len(whole) - 2)]


def convolve_work(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """The products; a bias' gradient only moves."""
    return with_bias(convolve_products(whole, output, attributes), output)


def convolve(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """The convolution with zero padding, plus a bias if there is one."""
    from torch.nn.functional import conv2d

    x, weight = inputs[:2]
    if 0 in x.shape or 0 in weight.shape:  # this device has none of the input channels
        result = zeros(place.shape, inputs[:2])
    else:
        padding, stride = attributes.get("padding", 0), attributes.get("stride", 1)
        result = conv2d(x, weight, padding=padding, stride=stride)
    if len(inputs) == 2:
        return result
    return result + place.once * inputs[2][:, None, None]


PRODUCTS: dict[str, Operator] = {
    "contract": Operator(contract_shape, contract_ways, contract, contract_work, contract_products),
    "convolve": Operator(convolve_shape, convolve_ways, convolve, convolve_work, convolve_products),
}
