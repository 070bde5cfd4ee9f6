"""The paper's baselines: DeepSpeed's equal micro-batches, and Whale's shares by peak fp32 FLOP/s.

DeepSpeed (Rasley et al. 2020) gives every device the same micro-batch in every step; the paper
tuned it to the largest that fits everywhere. Whale (Jia et al. 2022) gives each device a part of
every step in proportion to its peak FLOP/s in single precision, whatever precision is trained in;
the paper scaled it to the largest that fits everywhere. Neither can use a device on which nothing
fits. Where the global batch is no multiple of a step, the last step is smaller in the same
proportions.
Source: Poplar (AAAI 2025), "Models and Baselines".
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from hetplan.formulations.poplar.data import PoplarData, PoplarDecision, Share, Step
from hetplan.formulations.poplar.problem import NOTHING_FITS, Floats, Ints
from hetplan.profiling.catalogue import catalogue
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

# "Whale uses single-precision floating point operations per second (FLOPs) as cost model" (Poplar,
# introduction).
WHALE_PRECISION: Final = "fp32"


def deepspeed(data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """The same micro-batch everywhere, the largest that fits on all devices."""
    return _in_proportion(data, np.ones(len(data.devices)), "")


def whale(data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """Micro-batches and shares in proportion to peak fp32 FLOP/s."""
    weights, message = peak_flops(data)
    return _in_proportion(data, weights, message)


def peak_flops(data: PoplarData) -> tuple[Floats, str]:
    """[n] peak FLOP/s of the devices, from the instance or else the catalogue (WHALE_PRECISION).

    Where a device has neither, all devices fall back on the highest speed of their curves, which
    flatters Whale; the message says so.
    """
    known = catalogue()
    found: list[float] = []
    for device in data.devices:
        if device.flops_per_second is not None:
            found.append(device.flops_per_second)
        elif device.name in known:
            found.append(known[device.name].peak_flops(WHALE_PRECISION, name=device.name))
        else:
            peaks = [
                max((b / t for b, t in enumerate(d.step_seconds, 1)), default=0.0)
                for d in data.devices
            ]
            return np.array(
                peaks
            ), f"no peak FLOP/s known for {device.name!r}: measured speeds instead"
    return np.array(found), ""


def _in_proportion(data: PoplarData, weights: Floats, message: str) -> Outcome[PoplarDecision]:
    """Micro-batches floor(scale x weight), at least 1, for the largest scale at which they fit
    everywhere."""
    begun = time.perf_counter()
    largest = np.array([len(device.step_seconds) for device in data.devices])
    empty = np.flatnonzero(largest == 0)
    if len(empty) == len(largest):  # no method has a plan then
        return Outcome(stop=Stop.INFEASIBLE, message=NOTHING_FITS)
    if len(empty):
        name = data.devices[empty[0]].name
        return Outcome(
            stop=Stop.DONE,
            message=f"device {empty[0]} ({name}) holds no sample, and all must take part",
        )
    scale = float(np.min(largest / weights))
    batches = np.minimum(
        np.maximum(1, np.floor(scale * weights * (1 + 1e-12)).astype(np.int64)), largest
    )
    if data.stepwise:
        decision = PoplarDecision(steps=_steps(data.global_batch, batches))
    else:
        loads = rounded(data.global_batch, weights)
        shares = [
            Share(samples=g, micro_batch=b)
            for g, b in zip(loads.tolist(), batches.tolist(), strict=True)
        ]
        decision = PoplarDecision(devices=shares)
    spent = time.perf_counter() - begun
    return Outcome(stop=Stop.DONE, decision=decision, solve_seconds=spent, message=message)


def _steps(total: int, batches: Ints) -> list[Step]:
    full, rest = divmod(total, int(batches.sum()))
    steps = [Step(count=full, micro_batches=batches.tolist())] if full else []
    if rest:
        steps.append(
            Step(count=1, micro_batches=rounded(rest, batches.astype(np.float64)).tolist())
        )
    return steps


def rounded(total: int, weights: Floats) -> Ints:
    """Integers in proportion to `weights` that add up to `total`: floors, then the largest
    remainders."""
    exact = total * (weights / weights.sum())
    floors: Ints = np.floor(exact * (1 - 1e-14)).astype(np.int64)  # never more than `total` in sum
    order = np.argsort(floors - exact, kind="stable")
    floors[order[: total - int(floors.sum())]] += 1
    return floors
