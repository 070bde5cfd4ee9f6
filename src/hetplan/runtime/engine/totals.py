"""What the losses of a global batch are divided by: totals over all of its rows. The ranks add them
up before the passes."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.runtime.engine.chain import InputsAndTargets
from hetplan.runtime.engine.transport import host_sum
from hetplan.runtime.tracing.split import Split, Totals


@dataclass(frozen=True)
class BatchTotals:
    """What follows from all rows of a global batch."""

    weight: float = 1.0
    """The number by which the sum of the losses is divided."""
    values: Totals = field(default_factory=dict)
    """Total -> its value, which layers read."""


def added_up(
    source: InputsAndTargets | Split,
    batches: Sequence[Callable[[], Any]],
    over_ranks: Callable[[Tensor], Tensor] = lambda numbers: numbers,
) -> BatchTotals:
    """The totals of a global batch.

    batches: functions that return the data of the micro-batches whose losses this rank reports.
    over_ranks: returns the sum of numbers over all ranks; by default there is one process.
    """
    weight, values = 1.0, dict[Any, Any]()
    for number, size in enumerate(source.rounds):
        numbers = torch.zeros(size, dtype=torch.float64)
        for batch in batches:
            numbers += source.measure(number, batch(), values)
        factor, known = source.known(number, over_ranks(numbers))
        weight *= factor
        values |= known
    return BatchTotals(weight, values)


def add_up(
    source: InputsAndTargets | Split, batches: Sequence[Callable[[], Any]], step: int
) -> BatchTotals:
    """The totals of a global batch of all ranks, which call this together. A step without labels
    has a loss of 0, and rank 0 says so.

    batches: as in `added_up`; none where the rank reports no loss.
    """
    totals = added_up(source, batches, host_sum)
    if totals.weight != 0 and not source.lacks_labels(totals.values):
        return totals
    if dist.get_rank() == 0:
        print(
            f"hetplan: note: step {step} has no label: its loss is 0", file=sys.stderr, flush=True
        )
    return replace(totals, weight=totals.weight or 1.0)
