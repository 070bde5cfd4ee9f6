"""Seconds of functions on a torch device, repeat by repeat."""

import time
from collections.abc import Callable
from typing import Any

import torch

from hetplan.runtime.launch.devices import now

WARM_UP = 2  # repeats before those that count
LAUNCHES = {"cpu": 1, "cuda": 10}  # calls of the function in a repeat


def timed(run: Callable[[], Any], device: str, repeats: int) -> list[float]:
    """[repeat] seconds of one call of a function, after the warm-up. Where torch has a single
    thread on a CPU, they are the processor seconds of this thread.

    On a GPU a repeat consists of several calls, so that the host launches a call's kernels while
    the GPU still runs those of the call before.
    """
    single_thread = device == "cpu" and torch.get_num_threads() == 1
    launches = LAUNCHES[device.partition(":")[0]]

    def clock() -> float:
        return time.thread_time() if single_thread else now(device)

    times = []
    for _ in range(WARM_UP + repeats):
        begun = clock()
        for _ in range(launches):
            run()
        # at least 1 ns, also where the clock has not moved: rates are quotients by these seconds
        times.append(max((clock() - begun) / launches, 1e-9))
    return times[WARM_UP:]
