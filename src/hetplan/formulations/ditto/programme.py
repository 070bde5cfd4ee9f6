"""The mixed-integer programme of problem `ditto`; sets, variables and numbers of constraints as in
`arcs`.

Seconds are scaled so that the objective is about 1e3 (one power of two, exact).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.formulations.ditto.arcs import Arcs, simple_objective
from hetplan.formulations.ditto.problem import Floats, Ints
from hetplan.solvers.linear_model import LinearModel
from hetplan.solvers.run import Run


@dataclass(frozen=True)
class Programme:
    """The model with its columns: before, after [Q], peak [P], theta. unit: of the model per
    second."""

    model: LinearModel
    arcs: Arcs
    before: Ints
    peak: Ints
    after: Ints
    theta: int
    unit: float

    @property
    def seconds(self) -> Floats:
        """t_q in the model's unit."""
        return self.arcs.seconds * self.unit

    def every(self, arcs: Ints, values: Floats) -> tuple[Ints, Floats]:
        """The columns of some arcs in all roles, each with its arc's value (values [Q])."""
        peaks = self.arcs.peaks_of(arcs)
        columns = np.concatenate([self.before[arcs], self.after[arcs], self.peak[peaks]])
        return columns, np.concatenate(
            [values[arcs], values[arcs], values[self.arcs.peak_arc[peaks]]]
        )


def follow_a_path(m: Programme) -> None:  # (1)
    """Stages in front of k* lead from layer 0 up to it, stages behind it from there to layer L."""
    arcs, layers = m.arcs, m.arcs.problem.layers
    for at in range(layers + 1):
        ends, begins = np.flatnonzero(arcs.last == at), np.flatnonzero(arcs.first == at)
        peaks = m.peak[arcs.peaks_of(begins)]
        columns = np.concatenate([m.before[ends], m.before[begins], peaks])
        signs = np.concatenate([np.ones(len(ends)), -np.ones(len(begins) + len(peaks))])
        m.model.equal("path_in_front", columns, signs, to=-1.0 if at == 0 else 0.0)
        peaks = m.peak[arcs.peaks_of(ends)]
        columns = np.concatenate([m.after[ends], peaks, m.after[begins]])
        signs = np.concatenate([np.ones(len(ends) + len(peaks)), -np.ones(len(begins))])
        m.model.equal("path_behind", columns, signs, to=1.0 if at == layers else 0.0)


def keep_below_the_slowest(m: Programme) -> None:  # (2)
    """No stage in front of k* is slower than it, none behind it by more than the tie.

    A column theta for the sum over peaks keeps it out of the rows of all layers.
    """
    slack, peaks = m.arcs.tie * m.unit, m.seconds[m.arcs.peak_arc]
    m.model.equal("theta", np.append(m.peak, m.theta), np.append(peaks, -1.0), to=0.0)
    for layer in range(m.arcs.problem.layers):
        q = m.arcs.covering(layer)
        columns = np.concatenate([m.before[q], m.after[q], [m.theta]])
        behind = np.maximum(m.seconds[q] - slack, 0.0)
        m.model.row("slowest", columns, np.concatenate([m.seconds[q], behind, [-1.0]]), upper=0.0)


def count_stages_behind(m: Programme) -> None:  # (3)
    """k* knows how many stages lie behind it."""
    columns = np.concatenate([m.peak, m.after])
    m.model.equal("count", columns, np.concatenate([m.arcs.behind, -np.ones(len(m.arcs))]), to=0.0)


def keep_to_devices(m: Programme) -> None:  # (4)
    """Each kind gives what it has."""
    for i, available in enumerate(m.arcs.problem.devices):
        columns, sizes = m.every(np.flatnonzero(m.arcs.kind == i), m.arcs.devices.astype(float))
        m.model.row("devices", columns, sizes, upper=float(available))


def keep_to_micro_batches(m: Programme) -> None:  # (5)
    """No more stages than micro-batches."""
    everything = np.concatenate([m.before, m.after, m.peak])
    m.model.row("stages", everything, upper=float(m.arcs.problem.micro_batches))


def fit_memory(m: Programme) -> None:  # (6)
    """A stage holds as many micro-batches as there are stages from it on."""
    arcs = m.arcs
    if not arcs.problem.has_memory:
        return
    most = arcs.problem.most_stages
    for a in range(arcs.problem.layers):
        taken = np.where(arcs.first == a, most - arcs.alive, 0) + 1.0
        columns, values = m.every(np.flatnonzero(arcs.first >= a), taken)
        m.model.row("memory", columns, values, upper=float(most))


def minimise_time(m: Programme) -> None:
    """T, written with theta."""
    m.model.minimize(m.before, m.seconds)
    m.model.minimize(m.after, 2 * m.seconds)
    m.model.minimize(
        m.peak, (m.arcs.problem.micro_batches - m.arcs.behind) * m.seconds[m.arcs.peak_arc]
    )


CONSTRAINTS = (
    follow_a_path,
    keep_below_the_slowest,
    count_stages_behind,
    keep_to_devices,
    keep_to_micro_batches,
    fit_memory,
)


def build(arcs: Arcs, run: Run | None = None) -> Programme:
    """The whole programme; raises `Stopped` when `run` should stop."""
    estimate = simple_objective(arcs.problem) if arcs.price is None else arcs.price
    model = LinearModel("ditto", run)
    count = len(arcs)
    programme = Programme(
        model=model,
        arcs=arcs,
        before=model.binary("before", count),
        peak=model.binary("peak", len(arcs.peak_arc)),
        after=model.binary("after", count),
        theta=int(model.continuous("theta")),
        unit=float(2.0 ** (10 - np.ceil(np.log2(estimate)))) if estimate > 0 else 1.0,
    )
    for constrain in CONSTRAINTS:
        constrain(programme)
    minimise_time(programme)
    if arcs.start is not None:
        before, peaks, after = arcs.roles()
        model.start = np.zeros(model.size)
        model.start[
            np.concatenate(
                [programme.before[before], programme.peak[peaks], programme.after[after]]
            )
        ] = 1.0
        model.start[programme.theta] = programme.seconds[arcs.peak_arc[peaks]].sum()
    return programme
