"""The totals over all rows of a global batch, by which its losses are divided. The ranks add them
up before the passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hetplan.errors import require
from hetplan.runtime.engine.chain import InputsAndTargets
from hetplan.runtime.tracing.split import Split, Totals


@dataclass(frozen=True)
class BatchTotals:
    """The totals over all rows of a global batch."""

    weight: float = 1.0
    """The number by which the sum of the losses is divided."""
    values: Totals = field(default_factory=dict)
    """Total -> its value, which layers read."""
    lacks_labels: bool = False
    """Whether all that the losses are divided by is 0."""

    def check_loss(self, loss: float) -> None:
        """Raise InputError where the batch's losses are divided by 0 and are not 0 themselves."""
        require(
            not self.lacks_labels or loss == 0,
            "the losses of a batch are divided by 0",
            got=f"losses with a sum of {loss:g}",
            expected="a divisor or a `count` above 0, or no loss",
        )


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
