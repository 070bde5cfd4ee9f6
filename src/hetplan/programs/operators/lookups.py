"""Operators that look rows up in a table, that pool windows, that take means, and the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetplan.errors import InputError
from hetplan.programs.forms import PARTIAL, WHOLE, ShardingRule
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
    """The output's shape: for every row number (first input) a row of the table (second input)."""
    return (*whole[0], whole[1][1])


def embed_rules(whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
    """The row numbers can be sliced along any dimension, the table by columns or by rows. A slice
    of the table's rows gives zeros for all other rows, so that its output is a summand.

    Source: Shoeybi et al. 2019, Section 3.
    """
    dimensions = len(whole[0])
    sliced_numbers = [ShardingRule((d, WHOLE), d) for d in range(dimensions)]
    sliced_columns = ShardingRule((WHOLE, 1), dimensions)
    sliced_rows = ShardingRule((WHOLE, 0), PARTIAL)
    return [*sliced_numbers, sliced_columns, sliced_rows]


def embed(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """The table's rows of the given numbers; zeros for rows that are not on this device."""
    from torch.nn.functional import embedding

    numbers, table = inputs
    if not len(table):  # this device has no rows at all
        return zeros(place.shape, [table])
    if place.partial:  # the table is a slice that begins at row starts[1]
        numbers = numbers - place.starts[1]
    on_device = (numbers >= 0) & (numbers < len(table))
    rows = embedding(numbers.clamp(0, len(table) - 1), table)
    return rows * on_device.unsqueeze(-1).to(table.dtype)


def pooled(whole: Shapes, attributes: Attributes) -> Shape:
    """The output's shape of pooling: one entry for each window.

    Windows are squares of side `window`, `stride` apart (side by side unless given), on an image
    with `padding` entries on each side (0 unless given).
    """
    *front, height, width = whole[0]
    window = attributes["window"]
    padding, stride = attributes.get("padding", 0), attributes.get("stride", window)
    rows, columns = ((length + 2 * padding - window) // stride + 1 for length in (height, width))
    return (*front, rows, columns)


def max_pool(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """The largest entry of each window."""
    from torch.nn.functional import max_pool2d

    stride, padding = attributes.get("stride"), attributes.get("padding", 0)
    # torch takes the stride None for the side of the window, as `pooled` does
    return max_pool2d(inputs[0], attributes["window"], stride, padding)


def mean_pool_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The output's shape [b, c] of an image [b, c, H, W]: an entry per sample and channel."""
    return whole[0][:2]


def mean_pool(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """The mean of each channel over the whole image."""
    return inputs[0].mean(dim=(2, 3))


def mean_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The output's shape: the input's without `dimension`."""
    return other_lengths(whole[0], attributes["dimension"])


def mean_rules(whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
    """Any dimension can be sliced; slices along the averaged one give summands."""
    averaged = attributes["dimension"]
    dimensions = len(whole[0])
    before = [ShardingRule((d,), d) for d in range(averaged)]
    # the output lacks the averaged dimension, so that dimension d is number d - 1 there
    behind = [ShardingRule((d,), d - 1) for d in range(averaged + 1, dimensions)]
    return [*before, *behind, ShardingRule((averaged,), PARTIAL)]


def mean(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """The slice's summand of the mean along `dimension`, whose whole length is `length`."""
    return inputs[0].sum(attributes["dimension"]) / attributes["length"]


def cross_entropy_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The output's shape, a scalar; the inputs are logits and labels."""
    return ()


def cross_entropy_rules(whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
    """Any dimension of the labels can be sliced; slices give summands of the mean."""
    return [ShardingRule((d, d), PARTIAL) for d in range(len(whole[1]))]


def cross_entropy_work(whole: Shapes, output: Shape, attributes: Attributes) -> Work:
    """Work of reading and writing the logits in each pass; labels have no gradient."""
    flops = 2 * ELEMENT_FLOPS * size(whole[0])
    return flops, [flops, 0.0]


def cross_entropy(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """The summand of this device's rows in the mean loss over all `count` rows.

    Every label counts. torch's `ignore_index` is not supported, because the number of rows that
    count would depend on the labels. Raises InputError for a label outside 0 … V - 1.
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
    "embed": Operator(embed_shape, embed_rules, embed, output_sized_work),
    "max-pool": Operator(pooled, first_two, max_pool),
    "mean-pool": Operator(mean_pool_shape, first_two, mean_pool, linear=True),
    "mean": Operator(mean_shape, mean_rules, mean, linear=True),
    "cross-entropy": Operator(
        cross_entropy_shape, cross_entropy_rules, cross_entropy, cross_entropy_work
    ),
}
