"""Collectives timed under torchrun, on gloo or NCCL, for every kind of group that the job has.

Every rank makes all groups in the same order and takes part in those it is in; rank 0 collects.
Uneven gathers cost what `all-gather` (padded: every rank sends the largest part) or
`grouped-broadcast` (exact parts, one launch per rank) do.
"""

import datetime
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from hetplan.errors import InputError
from hetplan.profiling.measured import (
    OPERATIONS,
    Collectives,
    FittedCollective,
    SizePoint,
    fit_line,
)
from hetplan.runtime.devices import check_device, device_name, measured_here
from hetplan.runtime.measuring.networks import silent

Kind = Literal["node", "between", "all"]
SIZES = tuple(4**k * 1024 for k in range(1, 8))  # 4 KiB to 16 MiB per rank
WARM_UP = 2
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def groups_of(ranks: int, per_node: int) -> dict[Kind, list[list[int]]]:
    """Ranks of the groups of each kind with more than one member; equal kinds once. ranks: at least
    2."""
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
        if not os.environ.get(name, "").isdecimal():
            raise InputError(
                "is missing", where=name,
                expected="torchrun --nproc-per-node N -m hetplan profile collectives …",
            )  # fmt: skip
    place = [int(os.environ[name]) for name in VARIABLES]
    _, ranks, _, per_node = place
    if ranks < 2 or per_node < 1 or ranks % per_node:
        raise InputError(
            "ranks are not usable", where="WORLD_SIZE", got=ranks,
            expected="nodes of equally many, 2 or more in all",
        )  # fmt: skip
    return place


def measure_collectives(
    device: str,
    *,
    repeats: int = 10,
    tell: Callable[[str], None] | None = None,
) -> Collectives | None:
    """Measure all operations; the result on rank 0, None on the others.

    device: cpu (gloo) or cuda (NCCL, each rank on the GPU of its local number).
    """
    rank, ranks, local_rank, per_node = torchrun_place()
    check_device(device)
    backend = "gloo" if device == "cpu" else "nccl"
    place = "cpu" if device == "cpu" else f"cuda:{local_rank}"
    if device != "cpu":
        torch.cuda.set_device(local_rank)
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=120))
    fits = []
    try:
        for kind, members in groups_of(ranks, per_node).items():
            made = [dist.new_group(group) for group in members]  # all ranks, in the same order
            mine = next((i for i, group in enumerate(members) if rank in group), None)
            for operation in OPERATIONS:
                dist.barrier()
                points = None
                if mine is not None:
                    points = _points(operation, members[mine], made[mine], place, repeats)
                if rank == 0 and points is not None:
                    line = fit_line([p.bytes for p in points], [p.seconds for p in points])
                    fits.append(
                        FittedCollective(
                            operation=operation, group=kind, ranks=len(members[0]),
                            latency_seconds=line.latency, bytes_per_second=line.bandwidth,
                            r_squared=line.r_squared, points=points,
                        )
                    )  # fmt: skip
                    speed, latency = line.bandwidth / 1e9, 1e6 * line.latency
                    (tell or silent)(f"{operation}, {kind}: {speed:.3g} GB/s, {latency:.3g} us")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if rank != 0:
        return None
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
    """What a rank does on `size` bytes of its own (reduce-scatter, all-to-all: in all parts
    together)."""
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
        pairs = zip(everyones, ranks, strict=True)
        work = [dist.broadcast(part, r, group=group, async_op=True) for part, r in pairs]
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
