"""The mixed-integer programme of problem `ditto`; sets, variables and numbers of constraints as in `arcs`.

Seconds are scaled so that the objective is about 1e3 (one power of two, exact).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.formulations.ditto.arcs import Arcs, simple_objective
from hetplan.formulations.ditto.problem import Floats, Ints
from hetplan.solvers.linear_model import LinearModel


@dataclass(frozen=True)
class Programme:
    """The model with its columns: before, after [Q], peak [Q, S_max]. unit: of the model per second."""

    model: LinearModel
    arcs: Arcs
    before: Ints
    peak: Ints
    after: Ints
    unit: float

    @property
    def seconds(self) -> Floats:
        """t_q in the model's unit."""
        return self.arcs.seconds * self.unit

    def every(self, arcs: Ints) -> Ints:
        """The columns of some arcs in all roles, arc by arc: [len(arcs), S_max + 2]."""
        return np.column_stack([self.before[arcs], self.after[arcs], self.peak[arcs]])


def follow_a_path(m: Programme) -> None:  # (1)
    """Stages in front of k* lead from layer 0 up to it, stages behind it from there to layer L."""
    arcs, layers = m.arcs, m.arcs.problem.layers
    for at in range(layers + 1):
        ends, begins = np.flatnonzero(arcs.last == at), np.flatnonzero(arcs.first == at)
        peaks = m.peak[begins].ravel()
        columns = np.concatenate([m.before[ends], m.before[begins], peaks])
        signs = np.concatenate([np.ones(len(ends)), -np.ones(len(begins) + len(peaks))])
        m.model.equal("path_in_front", columns, signs, to=-1.0 if at == 0 else 0.0)
        peaks = m.peak[ends].ravel()
        columns = np.concatenate([m.after[ends], peaks, m.after[begins]])
        signs = np.concatenate([np.ones(len(ends) + len(peaks)), -np.ones(len(begins))])
        m.model.equal("path_behind", columns, signs, to=1.0 if at == layers else 0.0)


def keep_below_the_slowest(m: Programme) -> None:  # (2)
    """No stage in front of k* is slower than it, none behind it by more than the tie."""
    slack, counts = m.arcs.tie * m.unit, m.arcs.counts
    for layer in range(m.arcs.problem.layers):
        q = m.arcs.covering(layer)
        columns = np.concatenate([m.before[q], m.after[q], m.peak.ravel()])
        behind = np.maximum(m.seconds[q] - slack, 0.0)
        values = np.concatenate([m.seconds[q], behind, -np.repeat(m.seconds, counts)])
        m.model.row("slowest", columns, values, upper=0.0)


def count_stages_behind(m: Programme) -> None:  # (3)
    """k* knows how many stages lie behind it."""
    columns = np.concatenate([m.peak.ravel(), m.after])
    counts = np.tile(np.arange(m.arcs.counts, dtype=float), len(m.arcs))
    m.model.equal("count", columns, np.concatenate([counts, -np.ones(len(m.arcs))]), to=0.0)


def keep_to_devices(m: Programme) -> None:  # (4)
    """Each kind gives what it has."""
    for i, available in enumerate(m.arcs.problem.devices):
        q = np.flatnonzero(m.arcs.kind == i)
        m.model.row("devices", m.every(q), m.arcs.devices[q][:, None], upper=float(available))


def keep_to_micro_batches(m: Programme) -> None:  # (5)
    """No more stages than micro-batches."""
    everything = m.every(np.arange(len(m.arcs)))
    m.model.row("stages", everything, upper=float(m.arcs.problem.micro_batches))


def fit_memory(m: Programme) -> None:  # (6)
    """A stage holds as many micro-batches as there are stages from it on."""
    arcs = m.arcs
    if not arcs.problem.has_memory:
        return
    most = arcs.problem.most_stages
    for a in range(arcs.problem.layers):
        later = m.every(np.flatnonzero(arcs.first >= a))
        here = np.flatnonzero((arcs.first == a) & (arcs.alive < most))
        tighter = np.repeat((most - arcs.alive[here]).astype(float), arcs.counts + 2)
        columns = np.concatenate([later.ravel(), m.every(here).ravel()])
        m.model.row("memory", columns, np.concatenate([np.ones(later.size), tighter]), upper=float(most))


def minimise_time(m: Programme) -> None:
    """T, written with theta."""
    m.model.minimize(m.before, m.seconds)
    m.model.minimize(m.after, 2 * m.seconds)
    weights = m.arcs.problem.micro_batches - np.arange(m.arcs.counts, dtype=float)
    m.model.minimize(m.peak, m.seconds[:, None] * weights)


CONSTRAINTS = (
    follow_a_path,
    keep_below_the_slowest,
    count_stages_behind,
    keep_to_devices,
    keep_to_micro_batches,
    fit_memory,
)


def build(arcs: Arcs) -> Programme:
    """The whole programme."""
    estimate = simple_objective(arcs.problem)
    model = LinearModel("ditto")
    count = len(arcs)
    programme = Programme(
        model=model,
        arcs=arcs,
        before=model.binary("before", count),
        peak=model.binary("peak", (count, arcs.counts)),
        after=model.binary("after", count),
        unit=float(2.0 ** (10 - np.ceil(np.log2(estimate)))) if estimate > 0 else 1.0,
    )
    for constrain in CONSTRAINTS:
        constrain(programme)
    minimise_time(programme)
    return programme
