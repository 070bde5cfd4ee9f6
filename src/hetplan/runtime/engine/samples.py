"""Samples to try a module with: those of an example, and others made of them.

Other samples have other numbers of the same kind. Whole numbers stay among those of a sample, so
that they remain words, classes, positions and masks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hetplan.runtime.tracing.layers import TARGET_ARGUMENTS
from hetplan.runtime.tracing.split import has_samples, leaves, mapped

# How unlike samples are: `BOLD` ones may have numbers that the example does not have, and labels
# that do not count. In `COUNTED` ones all labels count. `MILD` ones have the example's numbers in
# another order. In `PLAIN` ones only floating-point numbers differ. A module may not take the first
# ones.
BOLD, COUNTED, MILD, PLAIN = "bold", "counted", "mild", "plain"
NOT_COUNTED = -100  # the label that losses over classes ignore
# Of targets: [sample] the number of the change, which is another one than that of the inputs. So
# the order of targets is not that of outputs.
CROSSED = (0, 3, 1, 5, 2, 4)


def unlike_samples(example: Any, count: int, level: str) -> Any:
    """(inputs, targets) of `count` unlike samples: the first ones of the example as far as it has
    different ones, and others made of its first one. level: BOLD, COUNTED, MILD or PLAIN."""
    rows = [row_of(example, 0)]
    number = min(len(x) for x in leaves(example) if has_samples(x))
    for k in range(1, min(number, count)):
        row = row_of(example, k)
        if not any(same(row, other) for other in rows):
            rows.append(row)
    inputs, targets = rows[0]
    for k in range(len(rows), count):
        of_targets = unlike(targets, crossed(k), TARGET_ARGUMENTS[0], level)
        rows.append((unlike(inputs, k, "", level), of_targets))
    columns = iter(zip(*map(leaves, rows), strict=True))

    def joined(x: Any) -> Any:
        column = next(columns)
        return torch.cat(column) if has_samples(x) else x

    return mapped(rows[0], joined)


def crossed(change: int) -> int:
    """The number of the change of targets beside a change of inputs."""
    rounds, place = divmod(change, len(CROSSED))
    return rounds * len(CROSSED) + CROSSED[place]


def unlike(value: Any, change: int, name: str, level: str) -> Any:
    """A sample's data with other numbers. change: number of the change; 0: none. name: name of the
    argument that the value is."""
    if isinstance(value, Mapping):
        changes = dict.fromkeys(value, change)
        changes |= {key: crossed(change) for key in TARGET_ARGUMENTS if key in value}
        return {key: unlike(value[key], changes[key], str(key), level) for key in sorted(value)}
    if isinstance(value, (tuple, list)):
        return tuple(unlike(item, change, name, level) for item in value)
    if not isinstance(value, Tensor) or not value.numel() or change == 0:
        return value
    if value.is_floating_point():
        return unlike_floats(value, change, level)
    if level == PLAIN or value.is_complex():
        return value
    if value.numel() == 1:
        return unlike_number(value, change, level)
    return unlike_numbers(value, change, name, level)


def unlike_floats(value: Tensor, change: int, level: str) -> Tensor:
    """Floating-point numbers in another order, and smaller. Where the level is BOLD or COUNTED, new
    ones in place of zeros, and the negatives of numbers of both signs for every second change."""
    is_bold = level in (BOLD, COUNTED)
    if is_bold and not value.any():
        places = torch.arange(value.numel(), device=value.device) * 0.618
        return ((places + 0.3 * change) % 1.0).view(value.shape).to(value.dtype)
    order = value if level == PLAIN else value.reshape(-1).roll(change).view(value.shape)
    if is_bold and change % 2 and bool((value < 0).any() and (value > 0).any()):
        order = -order
    # not in the order of the samples, which a module may sort
    return order / (1.0 + 0.25 * crossed(change))


def unlike_number(value: Tensor, change: int, level: str) -> Tensor:
    """A whole number of a sample: the one below for every second change, which is valid where the
    number is. A 0 becomes 1 where the level is BOLD or COUNTED."""
    if value.dtype == torch.bool or change % 2 == 0:
        return value
    if int(value) > 0:
        return value - 1
    return value + 1 if level in (BOLD, COUNTED) else value


def unlike_numbers(value: Tensor, change: int, name: str, level: str) -> Tensor:
    """Several whole numbers in another order; where the level is BOLD or COUNTED some of them more
    than once, and new ones where all are equal; where it is BOLD a first label that does not
    count."""
    flat = value.reshape(-1)
    if level == MILD:
        return flat.roll(change).view(value.shape)
    places = torch.arange(len(flat), device=flat.device)
    moved = flat[(places // (change + 1) + change) % len(flat)]
    if value.dtype == torch.bool:
        return moved.view(value.shape)
    if bool((flat == flat[0]).all()):
        moved = flat + ((places + change) % 2).to(flat.dtype)
    if name in TARGET_ARGUMENTS and level == BOLD:
        moved[0] = NOT_COUNTED
    return moved.view(value.shape)


def row_of(data: Any, row: int) -> Any:
    """A sample of data."""
    return mapped(data, lambda x: x[row : row + 1] if has_samples(x) else x)


def same(first: Any, second: Any) -> bool:
    """Whether two samples have the same numbers."""
    pairs = zip(leaves(first), leaves(second), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
