"""The pipeline layer assignment of AMP §3.5: the O(k L^4) dynamic programme over a tolerance m.

Sets   l in 0..L-1 layers, j in 0..k-1 stages, c in 1..L-1 boundaries, m in {0} and all sums of
consecutive t.
Data   t[l] seconds of a micro-batch on any stage, e[j, l] seconds of the link behind stage j ending
       with layer l, gas micro-batches per pipeline. t(c, i) is the sum over layers c to i - 1.
Table  dp[i][j][m]: least (gas-1) max(0, max stage - m) + sum t + sum e over the cuts of i layers
       (eq. 6) dp[i][0][m] = (gas-1) max(0, t(0, i) - m) + t(0, i)
       (eq. 7) dp[i][j][m] = min over c of dp[c][j-1][max(t(c, i), m)] + (gas-1) max(0, t(c, i) - m)
                     + t(c, i) + e[j-1, c-1]
                     (eq. 8)
       dp[L][k-1][0] = least (gas-1) max_j t_j + sum t_j + sum e_j. So the programme is exact for
       its data, in which a stage costs the same wherever it runs, pipelines do not differ and
       synchronisation is free.
Source AMP (NeurIPS 2022), §3.5. The released code compares cuts as printed but stores the cost
       without e[j-1, c-1], so that later stages do not see it; `released=True` does the same.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hetplan.formulations.amp.problem import Floats, Ints

MAX_TABLE_BYTES = 2 * 2**30
# Steps of the innermost loop between two questions whether to stop: well under a second.
STEPS_AT_ONCE = 10**8


class TableTooLarge(ValueError):
    """The programme's table would exceed MAX_TABLE_BYTES."""


def table_bytes(layers: int, stages: int, tolerances: int) -> int:
    """Bytes of the tables: costs of two stages (8 bytes) and choices of k stages (2 bytes) per (L +
    1) M.

    tolerances: M, at most L (L + 1) / 2 + 1, one for each run of layers and 0; equal layers share
    theirs.
    """
    return (2 * 8 + 2 * stages) * (layers + 1) * tolerances


def paper_cut(
    layer_seconds: Floats,
    link_seconds: Floats,
    gas: int,
    *,
    released: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Ints, float] | None:
    """AMP's cut of L layers into k stages and the value that its table holds for it.

    layer_seconds: t [L]. link_seconds: e [k - 1, L], its shape gives k. gas: micro-batches per
    pipeline. released: store costs as the released code does (the value then lacks links and the
    cut may be worse). stop: asked several times a second. Returns (cut [k + 1], value); None when
    stopped.
    Raises ValueError when k > L, TableTooLarge when the table would exceed 2 GiB.
    """
    layers, stages = layer_seconds.size, link_seconds.shape[0] + 1
    if stages > layers:
        raise ValueError(
            f"{stages} stages of {layers} layers: expected at least one layer per stage"
        )
    from hetplan.formulations.amp.cut_kernels import interval_ranks, tolerance_stage

    if stages == 1:  # eq. 7 with m = 0
        return np.array([0, layers]), gas * float(np.cumsum(layer_seconds)[-1])
    values, rank = interval_ranks(layer_seconds)
    if table_bytes(layers, stages, values.size) > MAX_TABLE_BYTES:
        raise TableTooLarge(
            f"{layers} layers, {stages} stages: table of the programme exceeds 2 GiB"
        )
    table = np.full((layers + 1, values.size), np.inf)
    for i in range(1, layers + 1):  # eq. 7
        whole = values[rank[0, i]]
        table[i] = (gas - 1) * np.maximum(0.0, whole - values) + whole
    choice = np.zeros((stages, layers + 1, values.size), dtype=np.uint16)
    best = np.empty(values.size)
    for j in range(1, stages):
        link = np.concatenate([[0.0], link_seconds[j - 1]])
        following = np.full_like(table, np.inf)
        rows = max(1, STEPS_AT_ONCE // (layers * values.size))
        for i in range(j + 1, layers + 1, rows):
            if stop():
                return None
            tolerance_stage(
                table,
                following,
                choice[j],
                values,
                rank,
                link,
                float(gas - 1),
                j,
                released,
                i,
                min(i + rows, layers + 1),
                best,
            )
        table = following
    return trace(choice, rank), float(table[layers, 0])


def trace(choice: Ints, rank: Ints) -> Ints:
    """The cut behind dp[L][k-1][0]: each choice sets the tolerance max(t(c, i), m) of the stage
    before."""
    stages, layers = choice.shape[0], choice.shape[1] - 1
    cut = np.zeros(stages + 1, dtype=np.int64)
    i, m = layers, 0
    for j in range(stages - 1, -1, -1):
        cut[j + 1] = i
        c = int(choice[j, i, m])
        i, m = c, max(int(rank[c, i]), m)
    return cut


def chain_seconds(layer_seconds: Floats, link_seconds: Floats, gas: int, cut: Ints) -> float:
    """What the programme minimises (eq. 5), for any cut: (gas-1) max_j t_j + sum_j t_j + sum_j
    e_j."""
    stages = np.add.reduceat(layer_seconds, cut[:-1])
    links = link_seconds[np.arange(cut.size - 2), cut[1:-1] - 1]
    return float((gas - 1) * stages.max() + stages.sum() + links.sum())
