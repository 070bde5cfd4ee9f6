"""The best ratios of a program in a cell, by cuts, and the means over types that prove them best.

At a point of the cell each stage of the program is slowest on some type, and with these types fixed
its cost is bounded from below by an affine function, a cut. The least over the cell of the largest
of several cuts is the value of a matrix game. The optimal blend of cuts in this game gives each
stage a mean over types, and the bound with these means is exact for that program.
"""

import numpy as np

from hetplan.formulations.hap.matrix_game import game
from hetplan.formulations.hap.problem import Floats, Ints
from hetplan.solvers.run import Options

# The most cuts for the best ratios of a program in a cell, and the relative gap at which no further
# cut is made. Means that are not quite the best still prove a bound, a slightly lower one.
CUTS, EXACT = 60, 1e-10


def best_in_cell(
    F: Floats,
    S: Floats,
    comm: Floats,
    byte_seconds: Floats,
    x: Floats,
    slow: Floats,
    start: Floats,
    options: Options,
) -> tuple[Floats, Floats, Floats]:
    """(mu [V], stage_weights [s, K], top_weights [g, K]): the best ratios in a cell, and the means
    over types whose bound shows that they are best.

    F, S: [s] and [s, g], the work of the stages, fixed and per ratio of each segment. comm: [g]
    seconds per largest ratio of each segment. byte_seconds: [V] seconds that the program's bytes
    cost at the vertices. x: [V, g, K] the vertices of the cell. slow: [K] seconds per unit of work
    on each type. start: [V] the point of the first cut. Points are barycentric: mu stands for the
    ratios sum_v mu_v x_v. The rows of both weights have sum 1.
    """
    V, g, K = x.shape
    mu = best = start
    least = np.inf
    cuts: list[Floats] = []  # each cut's value at the vertices
    slowest_types: list[Ints] = []  # each cut's slowest type in each stage [s]
    largest_types: list[Ints] = []  # each cut's type with the largest ratio in each segment [g]
    theta = np.ones(1)
    stages, segments = np.arange(len(F)), np.arange(g)
    for _ in range(CUTS):
        ratios = np.tensordot(mu, x, 1)
        busy = (F[:, None] + S @ ratios) * slow  # [s, K]
        types = busy.argmax(axis=1)
        top = ratios.argmax(axis=1)
        computing = busy[stages, types].sum()
        cost = float(computing + comm @ ratios[segments, top] + byte_seconds @ mu)
        if cost < least:
            least, best = cost, mu
        slowest_types.append(types)
        largest_types.append(top)
        work = np.zeros((g, K))  # seconds per ratio, with these types fixed
        np.add.at(work.T, types, S * slow[types, None])
        np.add.at(work, (segments, top), comm)
        fixed = float(F @ slow[types])
        cuts.append(byte_seconds + fixed + x.reshape(V, -1) @ work.ravel())
        value, mu, theta = game(np.array(cuts), options)
        if least - value <= EXACT * least:
            break
    stage_weights, top_weights = np.zeros((len(F), K)), np.zeros((g, K))
    for share, types, top in zip(theta, slowest_types, largest_types, strict=True):
        stage_weights[stages, types] += share
        top_weights[segments, top] += share
    return best, stage_weights, top_weights
