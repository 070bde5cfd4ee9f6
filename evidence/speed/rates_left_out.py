"""How often the intervals of predicted products hold on what was left out.

    python -m evidence.speed rates_left_out OPERATORS

OPERATORS holds the files of `fit_rates`, and SimuMax's `simumax_operators.csv`. An interval is said
to hold eight in ten measurements. Three kinds of rows are left out:

- sizes: every third product of a device and format, by the tiles that the others give;
- a device: all products of one device, by the mean tiles of the other architectures;
- a source: what SimuMax measured inside training, by the rates that vidur's products in sustained
  use (A100) and aiconfigurator's bursts within the watts of the board (B200) give.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evidence.speed.fit_rates import (
    LEFT_OUT,
    Floats,
    burst_machine,
    burst_products,
    errors,
    fit_tiling,
)
from evidence.truth.tables import read_table
from hetplan.profiling.hardware.cluster import device
from hetplan.profiling.models.operators import Shape
from hetplan.profiling.rates.products import products_seconds, wider
from hetplan.profiling.rates.shipped import Format, Tiling
from hetplan.profiling.rates.tiles import PHYSICS, mean_of, physical


@dataclass(frozen=True)
class LeftOut:
    """Measured over predicted seconds [N] of what was left out, and the predicted interval."""

    name: str
    ratio: Floats
    low: float | Floats
    high: float | Floats

    def line(self) -> str:
        """One line of the table."""
        held = float(np.mean((self.ratio >= self.low) & (self.ratio <= self.high)))
        error = float(np.mean(np.abs(1 / self.ratio - 1)))
        median = float(np.median(self.ratio))
        count = len(self.ratio)
        return f"| {self.name} | {count} | {error:.1%} | {median:.2f} | {held:.0%} |"


def sizes_and_devices(
    products: Mapping[tuple[str, Format], tuple[Floats, Floats]],
) -> Iterator[LeftOut]:
    """What is left out of aiconfigurator's products: every third size, then each device whole.

    A device's own interval comes from every third product; here it is judged by another third.
    """
    tilings: dict[tuple[str, Format], Tiling] = {}
    for (name, number), (sizes, seconds) in products.items():
        machine = burst_machine(name, number)
        third = np.arange(len(sizes)) % LEFT_OUT
        tiling = fit_tiling(machine, sizes[third == 2], seconds[third == 2])
        tilings[name, number] = tiling
        ratio = seconds / physical(machine, tiling, sizes)[0]
        made = errors(ratio[third == 0], np.ones(int((third == 0).sum())))
        low, high = wider(made["low"], made["high"], PHYSICS.boards)
        judged = ratio[third == 1]
        yield LeftOut(f"sizes, {name} {number}", judged, made["low"], made["high"])
        yield LeftOut(f"the same as of another board, {name} {number}", judged, low, high)
    for (name, number), (sizes, seconds) in products.items():
        others = [t for (n, f), t in tilings.items() if f == number and n != name]
        if others:
            ratio = seconds / physical(burst_machine(name, number), mean_of(others), sizes)[0]
            low, high = PHYSICS.unlike_low, PHYSICS.unlike_high
            yield LeftOut(f"device, {name} {number}", ratio, low, high)


def sources(folder: Path) -> Iterator[LeftOut]:
    """SimuMax's products inside training, by layout: TN forward, NN input gradient, NT weight
    gradient."""
    found: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
    for row in read_table(folder / "simumax_operators.csv"):
        if row.text("kind") == "matmul":
            shape = tuple(float(row.text(column)) for column in ("count", "m", "k", "n", "seconds"))
            found[row.text("gpu"), row.text("stage")].append(shape)
    for (name, layout), rows in sorted(found.items()):
        shapes = tuple(Shape(*row[:4]) for row in rows)
        told = products_seconds(name, device(name), "bf16", shapes)
        seconds = np.array([estimate.seconds for estimate in told])
        low = np.array([estimate.low for estimate in told]) / seconds
        high = np.array([estimate.high for estimate in told]) / seconds
        ratio = np.array([row[4] for row in rows]) / seconds
        yield LeftOut(f"source, {name} bf16 {layout}", ratio, low, high)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("operators", type=Path)
    folder = parser.parse_args().operators
    print("| left out | products | mean error | median of measured / predicted | in the interval |")
    print("|---|---|---|---|---|")
    for left_out in (*sizes_and_devices(burst_products(folder)), *sources(folder)):
        print(left_out.line(), flush=True)


if __name__ == "__main__":
    main()
