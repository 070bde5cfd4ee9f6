"""Collectives timed under torchrun, on gloo or NCCL, for every kind of group that the job has.

Every rank makes all groups in the same order and takes part in those it is in; rank 0 collects.
Uneven gathers cost as much as `all-gather` (padded: every rank sends the largest part) or
`grouped-broadcast` (exact parts, one launch per rank).
"""

import datetime
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist

from hetplan.errors import require
from hetplan.profiling.profiles.measured_collectives import (
    OPERATIONS,
    Collectives,
    FittedCollective,
    SizePoint,
    fit_line,
)
from hetplan.runtime.launch.devices import check_device, device_name, measured_here
from hetplan.runtime.measuring.networks import silent

Kind = Literal["node", "between", "all"]
SIZES = tuple(4**k * 1024 for k in range(1, 8))  # 4 KiB to 16 MiB per rank
WARM_UP = 2
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def groups_of(ranks: int, per_node: int) -> dict[Kind, list[list[int]]]:
    """The ranks of every group with more than one member, by kind of group; kinds with equal groups
    stand once. ranks: at least 2."""
    nodes = [list(range(first, first + per_node)) for first in range(0, ranks, per_node)]
    if len(nodes) == 1:
        return {"node": nodes}
    everyone = list(range(ranks))
    if per_node == 1:
        return {"all": [everyone]}
    return {"node": nodes, "between": [everyone[::per_node]], "all": [everyone]}


def torchrun_place() -> list[int]:
    """This process's rank, all ranks, its rank within the node and the node's ranks; raises
    InputError outside of torchrun, or with a single rank."""
    for name in VARIABLES:
        require(
            os.environ.get(name, "").isdecimal(),
            "is missing",
            where=name,
            expected="torchrun --no-python --nproc-per-node N hetplan profile collectives …",
        )
    place = [int(os.environ[name]) for name in VARIABLES]
    _, ranks, _, per_node = place
    require(
        ranks >= 2 and per_node >= 1 and ranks % per_node == 0,
        "ranks are not usable",
        where="WORLD_SIZE",
        got=ranks,
        expected="nodes of equally many, 2 or more in all",
    )
    return place


@contextmanager
def joined_ranks(device: str) -> Iterator[str]:
    """torchrun's ranks as a process group; yields this rank's device.

    device: cpu (gloo) or cuda (NCCL, each rank on the GPU of its local number).
    """
    local_rank = torchrun_place()[2]
    check_device(device)
    place = "cpu" if device == "cpu" else f"cuda:{local_rank}"
    if device != "cpu":
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl", timeout=datetime.timedelta(seconds=120)
    )
    try:
        yield place
    finally:
        dist.destroy_process_group()


def measure_collectives(
    device: str,
    *,
    repeats: int = 10,
    tell: Callable[[str], None] | None = None,
) -> Collectives | None:
    """Measure all operations; returns the result on rank 0, None on the others.

    device: cpu (gloo) or cuda (NCCL, each rank on the GPU of its local number). repeats: timed runs
    of each size. tell: receives a line per operation and kind of group.
    """
    tell = tell or silent
    rank, ranks, _, per_node = torchrun_place()
    fits = []
    with joined_ranks(device) as place:
        for kind, members in groups_of(ranks, per_node).items():
            made = [dist.new_group(group) for group in members]  # all ranks, in the same order
            mine = next((i for i, group in enumerate(members) if rank in group), None)
            for operation in OPERATIONS:
                dist.barrier()
                if mine is None:
                    continue
                points = _points(operation, members[mine], made[mine], place, repeats)
                if rank != 0:
                    continue
                line = fit_line([p.bytes for p in points], [p.seconds for p in points])
                fit = FittedCollective(
                    operation=operation,
                    group=kind,
                    ranks=len(members[0]),
                    latency_seconds=line.latency,
                    bytes_per_second=line.bandwidth,
                    r_squared=line.r_squared,
                    points=points,
                )
                fits.append(fit)
                speed, latency = line.bandwidth / 1e9, 1e6 * line.latency
                tell(f"{operation}, {kind}: {speed:.3g} GB/s, {latency:.3g} us")
        dist.barrier()
    if rank != 0:
        return None
    backend = "gloo" if device == "cpu" else "nccl"
    return Collectives(
        backend=backend,
        device=device_name(device),
        ranks=ranks,
        provenance=measured_here(f"hetplan profile collectives, {backend}", device),
        fits=fits,
    )


def _points(
    operation: str, ranks: list[int], group: Any, place: str, repeats: int
) -> list[SizePoint]:
    """Fastest and median of the repeats; each repeat counts as long as its slowest rank."""
    points = []
    for size in SIZES:
        run = _operation(operation, ranks, group, place, size)
        times = torch.zeros(repeats, dtype=torch.float64)
        for i in range(-WARM_UP, repeats):
            dist.barrier(group)
            begun = time.perf_counter()
            run()
            if place != "cpu":
                torch.cuda.synchronize()
            if i >= 0:
                times[i] = time.perf_counter() - begun
        slowest = times.to(place)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        seconds = slowest.tolist()
        points.append(
            SizePoint(
                bytes=float(size), seconds=min(seconds), median_seconds=statistics.median(seconds)
            )
        )
    return points


def _operation(
    operation: str, ranks: list[int], group: Any, place: str, size: int
) -> Callable[[], Any]:
    """A function that runs the collective once on `size` bytes of this rank (reduce-scatter and
    all-to-all: all parts together)."""
    each = max(size // 4 // len(ranks), 1)
    own = torch.ones(each * len(ranks), device=place)
    pieces, target = list(own.chunk(len(ranks))), torch.empty_like(own)
    everyones = [torch.empty_like(own) for _ in ranks]

    def send() -> None:
        if dist.get_rank() == ranks[0]:
            dist.send(own, ranks[1], group=group)
        elif dist.get_rank() == ranks[1]:
            dist.recv(target, ranks[0], group=group)

    def broadcast() -> None:
        work = [
            dist.broadcast(part, rank, group=group, async_op=True)
            for part, rank in zip(everyones, ranks, strict=True)
        ]
        for one in work:
            one.wait()

    runs: dict[str, Callable[[], Any]] = {
        "send": send,
        "all-reduce": lambda: dist.all_reduce(own, group=group),
        "all-gather": lambda: dist.all_gather(everyones, own, group=group),
        "reduce-scatter": lambda: dist.reduce_scatter(target[:each], pieces, group=group),
        "all-to-all": lambda: dist.all_to_all_single(target, own, group=group),
        "grouped-broadcast": broadcast,
    }
    return runs[operation]
