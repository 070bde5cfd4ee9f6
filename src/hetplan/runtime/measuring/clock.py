"""Seconds of functions on a torch device, repeat by repeat."""

import time
from collections.abc import Callable
from typing import Any

import torch

from hetplan.runtime.launch.devices import now

WARM_UP = 2  # repeats that are not counted
LAUNCHES = {"cpu": 1, "cuda": 10}  # of a function between two looks at the clock


def timed(run: Callable[[], Any], device: str, repeats: int) -> list[float]:
    """Seconds of each repeat behind the warm-up; on one thread of a CPU, the thread's own time.

    Of operators the fastest repeat counts, for the others were disturbed. On a GPU several launches
    share a repeat, so that they hide behind each other.
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
        times.append(max((clock() - begun) / launches, 1e-9))
    return times[WARM_UP:]
