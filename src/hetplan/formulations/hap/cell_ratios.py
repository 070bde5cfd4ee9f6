"""The best ratios of a program in a cell, by cuts, and the means over types that prove them best.

At a point of the cell each stage of the program is slowest on some type, and with these types fixed
its cost is bounded from below by an affine function, a cut. The least over the cell of the largest
of several cuts is the value of a matrix game. The optimal blend of cuts in this game gives each
stage a mean over types, and the bound with these means is exact for that program.
"""

import numpy as np

from hetplan.formulations.hap.matrix_game import game
from hetplan.formulations.hap.problem import Floats
from hetplan.solvers.run import Options

# Cuts for the best ratios of a program in a cell, and the relative gap at which there are enough.
CUTS, EXACT = 60, 1e-10


def best_in_cell(
    F: Floats,
    S: Floats,
    comm: Floats,
    held: Floats,
    x: Floats,
    slow: Floats,
    start: Floats,
    options: Options,
) -> tuple[Floats, Floats, Floats]:
    """(mu [V], stage_weights [s, K], top_weights [g, K], rows of sum 1): the best ratios mu x of
    stages F [s], S [s, g] and largest ratios that cost comm [g] over the vertices x [V, g, K], and
    the means whose bound shows that they are best.

    slow [K]: seconds per unit of work on each type. held [V]: what bytes cost at the vertices.
    start [V]: where the first cut is made. All points are barycentric (mu).
    """
    V, g, K = x.shape
    mu = best = start
    least, cuts, slowest, largest = np.inf, [], [], []
    theta = np.ones(1)
    stages, segments = np.arange(len(F)), np.arange(g)
    for _ in range(CUTS):
        point = np.tensordot(mu, x, 1)
        busy = (F[:, None] + S @ point) * slow
        types, top = busy.argmax(axis=1), point.argmax(axis=1)
        cost = float(busy[stages, types].sum() + comm @ point[segments, top] + held @ mu)
        if cost < least:
            least, best = cost, mu
        slowest.append(types)
        largest.append(top)
        work = np.zeros((g, K))
        np.add.at(work.T, types, S * slow[types, None])
        np.add.at(work, (segments, top), comm)
        cuts.append(held + float(F @ slow[types]) + x.reshape(V, -1) @ work.ravel())
        value, mu, theta = game(np.array(cuts), options)
        if least - value <= EXACT * least:
            break
    stage_weights, top_weights = np.zeros((len(F), K)), np.zeros((g, K))
    for share, types, top in zip(theta, slowest, largest, strict=True):
        stage_weights[stages, types] += share
        top_weights[segments, top] += share
    return best, stage_weights, top_weights
