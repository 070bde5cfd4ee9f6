"""The problem for general solvers.

x[e, j] = 1: expert e is on device j. t: seconds of the slowest device. Minimise t subject to
(1) every expert is on one device   (2) at most m_j experts on device j   (3) t >= work of j / v_j
"""

import numpy as np

from experts.data import ExpertsData, ExpertsDecision
from hetplan.solvers.general import Formulation
from hetplan.solvers.model import Model, Totals
from hetplan.solvers.run import Run


def build(data: ExpertsData, run: Run) -> Model:
    """Columns and rows, in seconds."""
    work, speeds = np.array(data.expert_flops), [d.flops_per_second for d in data.devices]
    totals = Totals(
        least=work.sum() / sum(speeds), largest=work.sum() / min(speeds), roundings=len(work)
    )
    model = Model("experts", run, totals)
    x = model.binary("x", (len(work), len(speeds)))
    t = model.seconds("slowest")
    model.row("placed", x.sum(axis=1) == 1)  # (1)
    for j, device in enumerate(data.devices):
        model.row("room", x[:, j].sum() <= device.room)  # (2)
        model.row("slowest", t >= work @ x[:, j] / device.flops_per_second)  # (3)
    model.minimize(t)
    return model


def formulate(data: ExpertsData, run: Run) -> Formulation[ExpertsDecision]:
    """The model, and how to read its answer."""
    return Formulation(
        build=lambda: build(data, run),
        read=lambda answer: ExpertsDecision(device_of=answer.values("x").argmax(axis=1).tolist()),
        infeasible="fewer places than experts",
    )
