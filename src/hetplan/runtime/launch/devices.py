"""What the ranks of a job compute on: this machine's GPUs, counted without touching them, or its
CPU."""

import datetime
import os
import socket
import time
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from hetplan.errors import UnsupportedError, require
from hetplan.profiling.hardware.detect import Host, catalogued, local_network_gbit
from hetplan.profiling.profiles.profile import Provenance
from hetplan.runtime.job import Job

COPIED_BYTES = 256 * 2**20


def on_devices(job: Job, local_ranks: int | None = None) -> Job:
    """The job with "auto" decided, and told whether ranks share GPUs. Raises InputError where there
    are none.

    local_ranks: on this machine, default all. Rehearsals compute on the CPU.
    """
    if job.device == "cpu":
        return job
    if job.virtual:
        require(
            job.device != "cuda",
            "rehearsals compute on the CPU",
            got="--device cuda",
            expected="--device cpu or auto",
            kind=UnsupportedError,
        )
        return replace(job, device="cpu")
    count = gpus()
    require(
        job.device != "cuda" or count != 0,
        "no GPU that torch can use here",
        got="--device cuda",
        expected="--device cpu or auto",
    )
    return replace(
        job,
        device="cuda" if count else "cpu",
        shared_gpus=count if count < (local_ranks or job.plan.world_size) else 0,
    )


def gpus() -> int:
    """How many GPUs torch can use. Asked in a process of its own: one that has used CUDA cannot
    fork ranks that do."""
    torch = torch_here()
    if torch is None or not torch.backends.cuda.is_built():
        return 0
    with get_context("fork").Pool(1) as pool:
        return pool.apply(usable_gpus)


def usable_gpus() -> int:
    """How many GPUs torch can use, asked of CUDA by this process."""
    cuda = torch_here().cuda
    return int(cuda.device_count()) if cuda.is_available() else 0


def check_device(device: str) -> None:
    """Raise UnsupportedError without torch, InputError for a device that torch does not have
    here."""
    required_torch("measuring")
    here = ["cpu", *(f"cuda:{i}" for i in range(usable_gpus()))]
    require(
        device in here or (device == "cuda" and len(here) != 1),
        "no such device here",
        got=device,
        expected=" or ".join(here),
    )


def torch_here() -> Any:
    """torch, or None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def required_torch(what: str) -> Any:
    """torch; raises UnsupportedError where it is not installed."""
    torch = torch_here()
    if torch is None:
        raise UnsupportedError(f"{what} needs torch: pip install 'hetplan[runtime]'")
    return torch


def now(device: str) -> float:
    """Seconds on the host's clock when the device is done with what it was given."""
    if device != "cpu":
        torch_here().cuda.synchronize(device)
    return time.perf_counter()


def device_name(device: str) -> str:
    """What torch calls the device."""
    return "cpu" if device == "cpu" else str(torch_here().cuda.get_device_name(device))


def measured_here(how: str, device: str) -> Provenance:
    """Today, by this torch on this device. how: the command that measured."""
    return Provenance(
        kind="measured",
        source=f"{how}, torch {torch_here().__version__} on {device_name(device)}"[:200],
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def local_node() -> Host:
    """This machine as a node; without torch or GPUs one of no devices. Raises InputError where GPUs
    differ among themselves."""
    name, network = socket.gethostname() or "local", local_network_gbit()
    torch = torch_here()
    if torch is None or torch.cuda.device_count() == 0:
        return Host(name, network_gbit=network)
    count = torch.cuda.device_count()
    here = [torch.cuda.get_device_properties(i) for i in range(count)]
    names = {properties.name for properties in here}
    require(
        len(names) <= 1,
        "the GPUs of this node differ, and a node of a cluster file has one type",
        where=name,
        got=", ".join(sorted(names)),
        expected="CUDA_VISIBLE_DEVICES with those of one type",
    )
    return Host(
        name,
        count,
        catalogued(here[0].name, float(here[0].total_memory)),
        copy_gbit(torch) if count > 1 else None,
        network,
    )


def local_device_name() -> str | None:
    """What the driver calls the first GPU; None without torch or GPUs."""
    torch = torch_here()
    return device_name("cuda:0") if torch is not None and torch.cuda.device_count() else None


def copy_gbit(torch: Any) -> float:
    """Gbit/s of a large copy between the first two GPUs, the fastest of five."""
    source, target = (
        torch.empty(COPIED_BYTES, dtype=torch.uint8, device=f"cuda:{i}") for i in range(2)
    )
    times = []
    for _ in range(5):
        begun = now("cuda:0")
        target.copy_(source)
        torch.cuda.synchronize(1)
        times.append(now("cuda:0") - begun)
    return float(COPIED_BYTES * 8 / min(times) / 1e9)


def local_device(device: str) -> str:
    """`cpu`, or the GPU of this rank as torch's current device: `cuda:0`, say.

    device: "auto" is cuda where there is a GPU; "cuda" without a number goes round the machine's
    GPUs by LOCAL_RANK, as torchrun sets it, or is torch's current one. Raises InputError where
    there is no such device.
    """
    if device == "auto":
        device = "cuda" if usable_gpus() else "cpu"
    check_device(device)
    if device == "cpu":
        return device
    cuda, local = torch_here().cuda, os.environ.get("LOCAL_RANK")
    turn = cuda.current_device() if local is None else int(local) % cuda.device_count()
    index = int(device.partition(":")[2] or turn)
    cuda.set_device(index)
    return f"cuda:{index}"


def settle(device: str) -> None:
    """Wait until a GPU has done what this process asked it to compute; messages on their way go
    on."""
    if device != "cpu":
        torch_here().cuda.current_stream(device).synchronize()


def peak_bytes(device: str) -> int:
    """The most memory that torch has taken of the GPU; of the CPU the process, libraries
    included."""
    if device != "cpu":
        return int(torch_here().cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
