"""Compiled: labels of the search over stages, their states, and which of them others make
superfluous."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetplan.compiled import kernel
from hetplan.formulations.amp.problem import Floats, Ints


class Labels(NamedTuple):
    """Labels side by side; `parent`, `key` (the state) and `order` (rows in canonical order) serve
    comparison."""

    done: Ints
    used: Ints
    last: Ints
    sums: Floats
    tops: Floats
    synced: Floats
    bound: Floats
    parent: Ints
    key: Ints
    order: Ints


@kernel
def canonical(
    count: int,
    shape_cells: Ints,
    size: Ints,
    kind: Ints,
    labels: Labels,
    signature: Ints,
    renamed: Ints,
    code: Ints,
) -> None:
    """Write the keys [1 + K + dp tp] of the first `count` labels and the order of their rows: equal
    keys mean equal futures. signature, renamed [K], code [dp]: scratch.

    Interchangeable cells are sorted by (used, groups of the last stage), rows by (renamed cells,
    costs). Of a full cell only its class matters: nothing more can be placed in it, and links out
    of it depend on the class alone.
    """
    cells, rows, tp = len(size), len(code), shape_cells.shape[1]
    for y in range(count):
        used, last, sums, tops = labels.used[y], labels.last[y], labels.sums[y], labels.tops[y]
        key, order = labels.key[y], labels.order[y]
        for c in range(cells):
            signature[c] = (kind[c] * 8192 + used[c]) * 8192
        for i in range(rows):
            for r in range(tp):
                c = shape_cells[last[i], r]
                signature[c] += used[c] < size[c]
        for c in range(cells):
            rank = 0
            for d in range(cells):
                if signature[d] < signature[c] or (signature[d] == signature[c] and d < c):
                    rank += 1
            renamed[c] = rank if used[c] < size[c] else cells + kind[c]
            key[1 + rank] = signature[c]
        key[0] = labels.done[y]
        for i in range(rows):
            code[i] = 0
            for r in range(tp):  # only an order: it may wrap around, the key below is complete
                code[i] = code[i] * 2 * cells + renamed[shape_cells[last[i], r]]
            m = i  # insertion sort: rows are few and nearly sorted
            while m > 0:
                k = order[m - 1]
                if code[k] < code[i]:
                    break
                if code[k] == code[i] and (
                    sums[k] < sums[i] or (sums[k] == sums[i] and tops[k] <= tops[i])
                ):
                    break
                order[m] = k
                m -= 1
            order[m] = i
        for i in range(rows):
            for r in range(tp):
                key[1 + cells + i * tp + r] = renamed[shape_cells[last[order[i]], r]]


@kernel
def dominated(
    gas: int, labels: Labels, by_code: Ints, code: Ints, alive: NDArray[np.bool_]
) -> None:
    """Mark labels that another one in the same state makes superfluous: alive[y] becomes False.

    by_code: labels sorted by code; equal codes are compared by key. Only near neighbours are
    compared.
    """
    count = len(by_code)
    for m in range(count):
        x = by_code[m]
        for step in range(-32, 33):
            n = m + step
            if step == 0 or n < 0 or n >= count or not alive[x]:
                continue
            y = by_code[n]
            if alive[y] and code[x] == code[y] and no_worse(gas, labels, x, y):
                alive[y] = False


@kernel
def no_worse(gas: int, labels: Labels, x: int, y: int) -> bool:
    """Whether label x has the state of y and costs no more under every completion."""
    if labels.synced[x] > labels.synced[y]:
        return False
    for k in range(labels.key.shape[1]):
        if labels.key[x, k] != labels.key[y, k]:
            return False
    for i in range(labels.sums.shape[1]):
        u, v = labels.order[x, i], labels.order[y, i]
        sum_x, sum_y = labels.sums[x, u], labels.sums[y, v]
        if (
            sum_x > sum_y
            or (gas - 1) * labels.tops[x, u] + sum_x > (gas - 1) * labels.tops[y, v] + sum_y
        ):
            return False
    return True
