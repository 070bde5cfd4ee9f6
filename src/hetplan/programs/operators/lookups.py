"""Tables, pools, means, and the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetplan.errors import InputError
from hetplan.programs.forms import PARTIAL, WHOLE, Way
from hetplan.programs.operators.moves import other_lengths
from hetplan.programs.operators.operator import (
    ELEMENT_FLOPS,
    Attributes,
    Operator,
    Place,
    Shape,
    Shapes,
    Work,
    first_two,
    output_sized_work,
    size,
    zeros,
)

if TYPE_CHECKING:
    from torch import Tensor


def embed_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """(numbers, table): a row of the table for every number."""
    return (*whole[0], whole[1][1])


def embed_ways(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Numbers or columns can be sliced; a slice of the rows gives zeros for all other rows, so that
    its output is a summand.

    Source: Shoeybi et al. 2019, Section 3.
    """
    rank = len(whole[0])
    numbers = [Way((d, WHOLE), d) for d in range(rank)]
    return [*numbers, Way((WHOLE, 1), rank), Way((WHOLE, 0), PARTIAL)]


def embed(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """Rows of a table by number; zeros for rows that are not on this device."""
    from torch.nn.functional import embedding

    ids, table = inputs
    if not len(table):
        return zeros(place.shape, [table])
    rows = ids - place.starts[1] if place.partial else ids
    here = (rows >= 0) & (rows < len(table))
    found = embedding(rows.clamp(0, len(table) - 1), table)
    return found * here.unsqueeze(-1).to(table.dtype)


def pooled(whole: Shapes, attributes: Attributes) -> Shape:
    """Windows of `window`, `stride` apart (default side by side), `padding` alike both ways."""
    (*front, height, width), window = whole[0], attributes["window"]
    pad, stride = attributes.get("padding", 0), attributes.get("stride", window)
    return (*front, *((n + 2 * pad - window) // stride + 1 for n in (height, width)))


def max_pool(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """The largest entry of each window."""
    from torch.nn.functional import max_pool2d

    stride, padding = attributes.get("stride"), attributes.get("padding", 0)
    return max_pool2d(inputs[0], attributes["window"], stride, padding)


def mean_pool_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """x [b, c, H, W]: one entry for each sample and channel."""
    return whole[0][:2]


def mean_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """Without `dimension`."""
    return other_lengths(whole[0], attributes["dimension"])


def mean_ways(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Any dimension can be sliced; slices of `dimension` give summands."""
    left_out, ways = attributes["dimension"], []
    for d in range(len(whole[0])):
        if d != left_out:
            ways.append(Way((d,), d if d < left_out else d - 1))
    return [*ways, Way((left_out,), PARTIAL)]


def mean(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """This slice's part of the mean along `dimension`, whose whole length is `length`."""
    return inputs[0].sum(attributes["dimension"]) / attributes["length"]


def cross_entropy_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """(logits, labels): a scalar."""
    return ()


def cross_entropy_ways(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Any dimension of the labels can be sliced; slices give summands of the mean."""
    return [Way((d, d), PARTIAL) for d in range(len(whole[1]))]


def cross_entropy_work(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """The logits read and written in each pass."""
    moved = 2 * ELEMENT_FLOPS * size(whole[0])
    return moved, [moved, 0.0]


def cross_entropy(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """The part of these rows in the mean over `count` rows.

    No label is left out (torch's `ignore_index`): how many rows count would be known at run time
    only. Raises InputError for a label outside 0 … V - 1.
    """
    from torch.nn import functional

    logits, labels = inputs
    vocabulary = logits.shape[-1]
    wrong = labels[(labels < 0) | (labels >= vocabulary)]
    if wrong.numel():
        raise InputError(
            "label of a cross-entropy, which leaves none out (no ignore_index)",
            got=int(wrong[0]),
            expected=f"0 to {vocabulary - 1}",
        )
    rows = logits.reshape(-1, vocabulary)
    total = functional.cross_entropy(rows, labels.flatten(), reduction="sum")
    return total / attributes["count"]


LOOKUPS: dict[str, Operator] = {
    "embed": Operator(embed_shape, embed_ways, embed, output_sized_work),
    "max-pool": Operator(pooled, first_two, max_pool),
    "mean-pool": Operator(
        mean_pool_shape, first_two, lambda x, a, p: x[0].mean(dim=(2, 3)), linear=True
    ),
    "mean": Operator(mean_shape, mean_ways, mean, linear=True),
    "cross-entropy": Operator(
        cross_entropy_shape, cross_entropy_ways, cross_entropy, cross_entropy_work
    ),
}
