"""Whether a module's loss of a batch is the mean of its losses of equal parts.

A plan of several runs computes a program once for each part of the batch, and takes the mean of
their losses and gradients. That is the training of one process for a mean over samples or tokens. A
mean over what a mask counts has another weight in each part, a sum is divided by the number of
runs, and a root or statistics over the batch are others. The program of one run computes all of
these right.
"""

from functools import partial, reduce
from typing import Any

from hetplan.runtime.engine.comparison import SAMPLES, Comparison, Differs, Pass, compare, rows_of
from hetplan.runtime.engine.data import drawing_data
from hetplan.runtime.engine.probe import in_a_fork, not_compared, why_not
from hetplan.runtime.engine.samples import COUNTED, MILD, PLAIN
from hetplan.runtime.tracing.layers import chain_of, requested

# Programs refuse labels that do not count, so that no sample has them.
LEVELS = (COUNTED, MILD, PLAIN)
RUNS = ((0, 3), (3, 6))  # of the samples
UNEQUAL = "its loss of a batch is not the mean of those of its parts, which several runs give"


class RunsProbe(Comparison):
    """The comparison of a module's passes of a batch with the mean of those of its parts."""

    def check(self) -> None:
        """Raise Differs where the mean is something else."""
        own = self.own(self.samples)
        if not own.is_finite():
            raise ArithmeticError("its loss or a gradient is not finite")
        parts = [self.own(rows_of(self.samples, first, last)) for first, last in RUNS]
        found = self.difference(own, reduce(Pass.plus, parts).times(1 / len(parts)))
        if found is not None:
            raise Differs(self.refusal(UNEQUAL, found))


def check_planned_runs(module: Any, wanted: bool | None, rows: int) -> None:
    """Raise UnsupportedError as `check_runs` does, before there is a plan. The comparison has a
    process of its own, since a run may fork its ranks behind it.

    module, rows, wanted: as in `check_runs`.
    """
    in_a_fork(lambda: check_runs(module, rows, wanted))


def check_runs(module: Any, rows: int, wanted: bool | None) -> str | None:
    """Raise UnsupportedError where several runs of a module's program train it otherwise than one
    process does. Returns a note where nothing was compared, else None.

    module: offers `batch`. rows: of the global batch. wanted: as in `engine.probe.check_probe`. The
    loss of a chain, a sum, is divided by the number of its targets (`tracing.program.PerTarget`),
    which is the same in all runs.
    """
    if chain_of(module):
        return None
    why = why_not(module, wanted)
    # Samples that are made of one may count other elements than it, and those of the data do.
    for number in (1, min(rows, SAMPLES)):
        if why is None:
            with drawing_data(0, 0, 0):
                example = requested(module.batch, 0, 0, number)
            why = compare(module, None, partial(RunsProbe, module, None), example, LEVELS)
    return None if why is None else not_compared(module, why)
