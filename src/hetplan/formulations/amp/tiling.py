"""Stages as rectangles on a grid of nodes and devices, laid out like dominoes.

Every stage is an h x w rectangle or the same one turned, and the stages together tile the grid.
Source: AMP (NeurIPS 2022), §4.2, and the annealing of its published code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hetplan.formulations.amp.placement import by_node
from hetplan.formulations.amp.problem import Ints

# Cells that a random tiling may try before it falls back to the straight one.
MAX_STEPS = 20_000


def device_grid(nodes: Sequence[int]) -> Ints:
    """Devices [rows, columns]: a row per node where nodes are equal, else rows of the common
    divisor.

    Every row lies within a node, so a rectangle w wide uses w neighbours; nodes [D] names each
    device's node.
    """
    members = by_node(nodes)
    columns = math.gcd(*map(len, members))
    return np.array([device for node in members for device in node], dtype=np.int64).reshape(
        -1, columns
    )


def random_tiling(
    shape: tuple[int, int], tile: tuple[int, int], rng: np.random.Generator
) -> list[tuple[slice, slice]]:
    """A random tiling of a grid by `tile` (h, w), each one upright or turned, ordered by their
    first cells.

    h divides the rows and w the columns, so that a tiling exists. The first free cell takes a tile
    in one of the two orientations at random, in the other where that leads nowhere; after MAX_STEPS
    the straight tiling serves.
    """
    rows, columns = shape
    free = np.ones(shape, dtype=bool)
    placed: list[
        tuple[tuple[slice, slice], list[tuple[int, int]]]
    ] = []  # a tile and what is left to try there
    pending = orientations(tile, rng)
    for _ in range(MAX_STEPS):
        if not free.any():
            return [area for area, _ in placed]
        row, column = divmod(int(free.argmax()), columns)
        area = None
        while pending and area is None:
            height, width = pending.pop()
            tried = (slice(row, row + height), slice(column, column + width))
            if row + height <= rows and column + width <= columns and free[tried].all():
                area = tried
        if area is not None:
            free[area] = False
            placed.append((area, pending))
            pending = orientations(tile, rng)
        else:  # a dead end: take back the last tile and turn it
            area, pending = placed.pop()
            free[area] = True
    return straight_tiling(shape, tile)


def orientations(tile: tuple[int, int], rng: np.random.Generator) -> list[tuple[int, int]]:
    """The tile upright and turned, in random order."""
    height, width = tile
    both = [tile] if height == width else [tile, (width, height)]
    return both[::-1] if rng.random() < 0.5 else both


def straight_tiling(shape: tuple[int, int], tile: tuple[int, int]) -> list[tuple[slice, slice]]:
    """All tiles upright, row by row."""
    height, width = tile
    return [
        (slice(row, row + height), slice(column, column + width))
        for row in range(0, shape[0], height)
        for column in range(0, shape[1], width)
    ]
