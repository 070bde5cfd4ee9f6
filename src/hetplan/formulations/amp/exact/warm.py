"""Warmers of AMP's kernels (see `solvers.warm`): two halves that take about equally long to
compile."""

from __future__ import annotations

import numpy as np

from hetplan.formulations.amp.cells import find_cells
from hetplan.formulations.amp.data import AmpData
from hetplan.formulations.amp.exact.columns import make_grid, search
from hetplan.formulations.amp.exact.layout import lay_out
from hetplan.formulations.amp.exact.rows import (
    RowModel,
    StageIntervals,
    SyncBox,
    bound_configuration,
    row_model,
)
from hetplan.formulations.amp.orders import placements, try_placement
from hetplan.formulations.amp.problem import AmpProblem, Configuration, Floats, compile_problem
from hetplan.solvers.run import Run


class Blank(RowModel):
    """A row model whose tables are not computed: they promise everything, which prunes nothing."""

    def tables(self, stage_cap: float, sync_cap: float) -> tuple[Floats, Floats]:
        """Zeros in the shapes of the real ones."""
        lay = self.layout
        counts = (int(self.absorb[0]) + 1, int(self.absorb[1]) + 1)
        states, width = int(lay.zones.base[-1]), len(lay.params)
        return np.zeros((lay.config.pipeline, states, width, *counts)), np.zeros(counts)


def tiny() -> tuple[AmpData, AmpProblem, Configuration]:
    """Two nodes of two devices each, of two types; four layers."""
    types = ("a", "a", "b", "b")
    layer = {"name": "layer", "param_bytes": 1.0, "activation_bytes": 1.0, "tensor_bytes": 1.0}
    data = AmpData.model_validate(
        {
            "devices": [{"type": name, "node": i // 2} for i, name in enumerate(types)],
            "bandwidth": [[10.0 if a == b else 1.0 for b in types] for a in types],
            "layers": [layer] * 4,
            "layer_seconds": [
                {"type": name, "tensor": 1, "micro_batch": 1, "seconds": [seconds] * 4}
                for name, seconds in (("a", 1.0), ("b", 2.0))
            ],
            "global_batch": 4,
        }
    )
    problem = compile_problem(data)
    return (
        data,
        problem,
        next(c for c in problem.configurations() if (c.pipeline, c.data) == (2, 2)),
    )


def rows() -> None:
    """Bounds, first decisions and the paper's programme."""
    from hetplan.formulations.amp.paper import solve

    data, problem, config = tiny()
    cells = find_cells(problem)
    model = row_model(lay_out(problem, cells, config))
    bound_configuration(model, lambda: np.inf, lambda: False)
    try_placement(problem, config, next(placements(cells, config)))
    solve(data, Run())


def columns() -> None:
    """The label search."""
    _, problem, config = tiny()
    real = row_model(lay_out(problem, find_cells(problem), config))
    model = Blank(
        real.layout, real.level, real.absorb, real.need, real.stage_values, real.sync_values
    )
    grid = make_grid(model, StageIntervals(0.0, ((0, len(real.stage_values) - 1),)), np.inf)
    search(
        grid,
        SyncBox(0.0, 1e9, 0.0),
        width=4,
        most_leaves=50,
        tolerance=1e-9,
        incumbent=np.full(1, np.inf),
        stop=np.zeros(1, dtype=np.int64),
    )
