"""Measures collectives under torchrun, on gloo or NCCL, for every kind of group that the job has.

Every rank makes all groups in the same order, and takes part in the collectives of its own groups.
Rank 0 collects the results. A gather of unequal parts costs as much as `all-gather`, where every
rank sends as much as the largest part, or as `grouped-broadcast`, with one broadcast of the exact
part for each rank.
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

# Kind of group: the ranks of a node, the first ranks of all nodes, or all ranks.
Kind = Literal["node", "between", "all"]
SIZES = tuple(4**k * 1024 for k in range(1, 8))  # bytes of a rank, 4 KiB to 16 MiB
WARM_UP = 2  # runs before those that count
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def groups_of(ranks: int, per_node: int) -> dict[Kind, list[list[int]]]:
    """Kind of group -> the groups of this kind, each a list of two ranks or more. Where two kinds
    have equal groups, only one of them is listed.

    ranks: number of all ranks, at least 2. per_node: number of ranks on a node.
    """
    nodes = [list(range(first, first + per_node)) for first in range(0, ranks, per_node)]
    if len(nodes) == 1:
        return {"node": nodes}
    everyone = list(range(ranks))
    if per_node == 1:
        return {"all": [everyone]}
    return {"node": nodes, "between": [everyone[::per_node]], "all": [everyone]}


def torchrun_place() -> list[int]:
    """[this process's rank, number of all ranks, its rank within the node, number of the node's
    ranks]. Raises InputError outside of torchrun, or with a single rank."""
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
    """A context in which torchrun's ranks are a process group; it yields this rank's device.

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
    """Measure all operations. Returns the result on rank 0, None on all other ranks.

    device: cpu (gloo) or cuda (NCCL, each rank on the GPU of its local number). repeats: timed runs
    of each size. tell: receives a line for each operation and kind of group.
    """
    tell = tell or silent
    rank, ranks, _, per_node = torchrun_place()
    fits = []
    with joined_ranks(device) as place:
        for kind, members in groups_of(ranks, per_node).items():
            # every rank makes all groups, in the same order
            groups = [dist.new_group(group_ranks) for group_ranks in members]
            own = next((i for i, group_ranks in enumerate(members) if rank in group_ranks), None)
            for operation in OPERATIONS:
                dist.barrier()
                if own is None:
                    continue
                points = _points(operation, members[own], groups[own], place, repeats)
                if rank != 0:  # of several groups of a kind, that of rank 0 stands for all
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
                speed = line.bandwidth / 1e9
                latency = 1e6 * line.latency
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
    """The fastest and the median seconds of a collective for each size. A repeat takes as long as
    on its slowest rank. ranks: the ranks of the group. place: this rank's device."""
    points = []
    for size in SIZES:
        run = _operation(operation, ranks, group, place, size)
        times = torch.zeros(repeats, dtype=torch.float64)
        for i in range(-WARM_UP, repeats):  # negative numbers are those of the warm-up
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
    """A function that runs the collective once on `size` bytes of each rank. For reduce-scatter and
    all-to-all, these are the parts for all ranks together."""
    part_elements = max(size // 4 // len(ranks), 1)  # 4 bytes an element
    own = torch.ones(part_elements * len(ranks), device=place)
    pieces = list(own.chunk(len(ranks)))
    target = torch.empty_like(own)
    of_all_ranks = [torch.empty_like(own) for _ in ranks]

    def send() -> None:
        if dist.get_rank() == ranks[0]:
            dist.send(own, ranks[1], group=group)
        elif dist.get_rank() == ranks[1]:
            dist.recv(target, ranks[0], group=group)

    def broadcast() -> None:
        works = [
            dist.broadcast(part, rank, group=group, async_op=True)
            for part, rank in zip(of_all_ranks, ranks, strict=True)
        ]
        for work in works:
            work.wait()

    runs: dict[str, Callable[[], Any]] = {
        "send": send,
        "all-reduce": lambda: dist.all_reduce(own, group=group),
        "all-gather": lambda: dist.all_gather(of_all_ranks, own, group=group),
        "reduce-scatter": lambda: dist.reduce_scatter(target[:part_elements], pieces, group=group),
        "all-to-all": lambda: dist.all_to_all_single(target, own, group=group),
        "grouped-broadcast": broadcast,
    }
    return runs[operation]
