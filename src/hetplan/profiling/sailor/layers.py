"""Layer times for any micro-batch, from tables with faults: cleaned, and with what a real run adds
to them.

- A layer does not get faster when its micro-batch grows, so a time above that of a larger
micro-batch is a fault.
  In its place stands what bounds it: the larger one's time from above; from below the least time in
  which the GPU ever got through that layer (its launches) and the throughput.
- Tensor parallelism: compute/tp and bytes/bandwidth grow with the micro-batch, and a fixed part
  (launches, the all-reduces' latency and their waiting for the slowest rank) does not. Forward and
  backward pay it once each. A profile of many equal micro-batches in a row hides it behind queued
  work, a training step does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.profiling.sailor.data import Floats, ModelData, NotPricedError, Tables

# A larger time at a smaller micro-batch: up to this ratio it is noise, beyond it a fault.
NOISE = 1.1


@dataclass(frozen=True)
class Curve:
    """One GPU type and tensor degree: forward and backward [B, L] at `sizes` [B]; per_sample [2, L]
    seconds."""

    sizes: Floats
    passes: Floats
    per_sample: Floats
    update: float
    tensor: int

    def seconds(self, samples: float) -> Floats:
        """[2, L] forward and backward seconds of a micro-batch of `samples`."""
        known: Floats = self._measured(samples)
        if self.tensor == 1 or samples <= self.sizes[0]:
            return known
        model = self.passes[:, 0] + (samples - self.sizes[0]) * self.per_sample
        return np.asarray(np.maximum(known, model))

    def _measured(self, samples: float) -> Floats:
        """Between two sizes a straight line; beyond the last one its throughput; before the first
        one its time."""
        last = self.sizes[-1]
        if samples > last:
            return np.asarray(self.passes[:, -1] + (samples - last) * self.per_sample)
        at = int(np.searchsorted(self.sizes, samples))
        if self.sizes[at] == samples or at == 0:
            return np.asarray(self.passes[:, at])
        share = (samples - self.sizes[at - 1]) / (self.sizes[at] - self.sizes[at - 1])
        return np.asarray((1 - share) * self.passes[:, at - 1] + share * self.passes[:, at])


def curve(model: ModelData, kind: str, tensor: int) -> Curve:
    """The curve of a GPU type and degree; a degree without tables is scaled from the nearest one
    that has some."""
    tables = model.tables.get(kind)
    if tables is None:
        known = ", ".join(model.tables)
        raise NotPricedError(
            f"no profile of {model.name}", where="profiles", got=kind, expected=known
        )
    degrees = sorted({degree for degree, _ in tables})
    nearest = min(degrees, key=lambda degree: abs(np.log2(degree / tensor)))
    sizes = sorted(batch for degree, batch in tables if degree == nearest)
    raw = _passes(tables, nearest, sizes)
    floor = np.min([_passes(tables, *key) for key in ((d, [b]) for d, b in tables)], axis=0)[:, 0]
    grid = np.array(sizes, float)
    per_sample = (raw / grid[None, :, None]).min(axis=1)
    scale = nearest / tensor
    update = float(np.median([tables[nearest, b].update for b in sizes]))
    return Curve(
        grid,
        clean(raw, grid, floor, per_sample) * scale,
        per_sample * scale,
        update * scale,
        tensor,
    )


def clean(raw: Floats, sizes: Floats, floor: Floats, per_sample: Floats) -> Floats:
    """[2, B, L] `raw` without times above those of larger micro-batches. floor, per_sample: [2,
    L]."""
    above = np.minimum.accumulate(raw[:, ::-1], axis=1)[:, ::-1]
    below = np.maximum(floor[:, None], per_sample[:, None] * sizes[None, :, None])
    faulty = raw > NOISE * above
    return np.asarray(np.where(faulty, np.minimum(above, below), above))


def _passes(tables: Tables, degree: int, sizes: list[int]) -> Floats:
    """[2, B, L]."""
    found = [tables[degree, batch] for batch in sizes]
    return np.array([[m.forward for m in found], [m.backward for m in found]])
