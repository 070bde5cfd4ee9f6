"""This machine's GPUs and the links between them, through torch."""

from __future__ import annotations

import socket
import time
from typing import Any

from hetplan.errors import InputError
from hetplan.profiling.detect import Host, catalogued, local_network_gbit

COPIED_BYTES = 256 * 2**20
REPEATS = 5


def local_node() -> Host:
    """The local node; without torch or GPUs one of no devices. Raises InputError where GPUs differ
    among themselves."""
    name, network = socket.gethostname() or "local", local_network_gbit()
    torch = _torch()
    if torch is None or torch.cuda.device_count() == 0:
        return Host(name, network_gbit=network)
    count = torch.cuda.device_count()
    found = [torch.cuda.get_device_properties(i) for i in range(count)]
    names = {properties.name for properties in found}
    if len(names) > 1:
        raise InputError(
            "the GPUs of this node differ, and a node of a cluster file has one type",
            where=name, got=", ".join(sorted(names)), expected="CUDA_VISIBLE_DEVICES with those of one type",
        )  # fmt: skip
    device = catalogued(found[0].name, float(found[0].total_memory))
    intra = copy_gbit(torch) if count > 1 else None
    return Host(name, count, device, intra, network)


def local_device_name() -> str | None:
    """What the driver calls the first GPU; None without torch or GPUs."""
    torch = _torch()
    return (
        str(torch.cuda.get_device_name(0))
        if torch is not None and torch.cuda.device_count()
        else None
    )


def copy_gbit(torch: Any) -> float:
    """Gbit/s of a large copy between the first two GPUs, the fastest of some."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda:1")
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize(0)
        begun = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        times.append(time.perf_counter() - begun)
    return float(COPIED_BYTES * 8 / min(times) / 1e9)


def _torch() -> Any:
    """torch, or None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch
