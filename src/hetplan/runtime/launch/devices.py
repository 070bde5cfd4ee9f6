"""The devices on which the ranks of a job compute: this machine's GPUs, or its CPU."""

import datetime
import os
import socket
import time
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from hetplan.errors import UnsupportedError, require
from hetplan.profiling.hardware.detect import local_network_gbit
from hetplan.profiling.hardware.driver_names import catalogued
from hetplan.profiling.hardware.hosts import Host
from hetplan.profiling.profiles.profile import Provenance
from hetplan.runtime.job import Job
from hetplan.text import grouped

COPIED_BYTES = 256 * 2**20  # bytes of each copy that `copy_gbit` times


def on_devices(job: Job, local_ranks: int | None = None) -> Job:
    """The job with the device "auto" decided, and with the number of GPUs that its ranks share.

    local_ranks: number of ranks on this machine; None: all ranks. Rehearsals compute on the CPU.
    Raises UnsupportedError for a rehearsal on GPUs, InputError where "cuda" finds no GPU.
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
    if count == 0:
        return replace(job, device="cpu", shared_gpus=0)
    ranks = local_ranks or job.plan.world_size
    return replace(job, device="cuda", shared_gpus=count if count < ranks else 0)


def gpus() -> int:
    """The number of GPUs that torch can use.

    A child process asks CUDA: a process that has initialised CUDA cannot fork ranks that use it.
    """
    torch = torch_here()
    if torch is None or not torch.backends.cuda.is_built():
        return 0
    with get_context("fork").Pool(1) as pool:
        return pool.apply(usable_gpus)


def usable_gpus() -> int:
    """The number of GPUs that torch can use. This process initialises CUDA; see `gpus`."""
    cuda = torch_here().cuda
    return int(cuda.device_count()) if cuda.is_available() else 0


def check_device(device: str) -> None:
    """Raise UnsupportedError where torch is not installed, InputError where this machine has no
    such device that torch can use."""
    required_torch("measuring")
    cuda_devices = [f"cuda:{i}" for i in range(usable_gpus())]
    devices = ["cpu", *cuda_devices]
    any_gpu = device == "cuda" and bool(cuda_devices)
    require(
        device in devices or any_gpu,
        "no such device here",
        got=device,
        expected=" or ".join(devices),
    )


def torch_here() -> Any:
    """The module torch, or None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def required_torch(what: str) -> Any:
    """The module torch; raises UnsupportedError where it is not installed. what: the activity that
    needs it."""
    torch = torch_here()
    if torch is None:
        raise UnsupportedError(f"{what} needs torch: pip install 'hetplan[runtime]'")
    return torch


def now(device: str) -> float:
    """Seconds on the host's clock, once the device has finished all work given to it."""
    if device != "cpu":
        torch_here().cuda.synchronize(device)
    return time.perf_counter()


def device_name(device: str) -> str:
    """Torch's name of the device's type; "cpu" for the CPU."""
    return "cpu" if device == "cpu" else str(torch_here().cuda.get_device_name(device))


def measured_here(how: str, device: str) -> Provenance:
    """The provenance of a measurement on a device, made today with the installed torch. how: the
    command that measures."""
    return Provenance(
        kind="measured",
        source=f"{how}, torch {torch_here().__version__} on {device_name(device)}"[:200],
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def local_node() -> Host:
    """This machine as a node of a cluster; without torch or GPUs a node without devices. GPUs of
    several types are its parts."""
    name = socket.gethostname() or "local"
    network = local_network_gbit()
    torch = torch_here()
    if torch is None or torch.cuda.device_count() == 0:
        return Host(name, network_gbit=network)
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    by_type = grouped((properties.name, i) for i, properties in enumerate(gpus))
    parts = []
    for driver_name, numbers in by_type.items():
        memory = float(min(gpus[i].total_memory for i in numbers))
        part = Host(
            name,
            len(numbers),
            catalogued(driver_name, memory),
            copy_gbit(torch, numbers[0], numbers[1]) if len(numbers) > 1 else None,
            driver_name=driver_name,
            memory_bytes=memory,
        )
        parts.append(part)
    if len(parts) == 1:
        return replace(parts[0], network_gbit=network)
    first, second = (numbers[0] for numbers in list(by_type.values())[:2])
    between = copy_gbit(torch, first, second)
    parts = [replace(part, network_gbit=between) for part in parts]
    order = ",".join(str(i) for numbers in by_type.values() for i in numbers)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    among = f" among those of {visible}" if visible else ""
    variables = f"CUDA_VISIBLE_DEVICES={order}{among}"
    return Host(name, network_gbit=network, parts=tuple(parts), order=variables)


def copy_gbit(torch: Any, first: int, second: int) -> float:
    """Gbit/s of the fastest of five copies of COPIED_BYTES from one GPU to another, given by their
    numbers."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=f"cuda:{first}")
    target = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=f"cuda:{second}")
    times = []
    for _ in range(5):
        start = now(f"cuda:{first}")
        target.copy_(source)
        torch.cuda.synchronize(second)
        times.append(now(f"cuda:{first}") - start)
    return float(COPIED_BYTES * 8 / min(times) / 1e9)


def local_device(device: str) -> str:
    """This rank's device, "cpu" or for example "cuda:0"; a GPU becomes torch's current device.

    device: "auto" is "cuda" where there is a GPU, else "cpu". "cuda" without a number is the GPU
    whose number is LOCAL_RANK modulo the number of GPUs; where torchrun has not set LOCAL_RANK, it
    is torch's current device. Raises InputError where there is no such device.
    """
    if device == "auto":
        device = "cuda" if usable_gpus() else "cpu"
    check_device(device)
    if device == "cpu":
        return device
    cuda = torch_here().cuda
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is None:
        default_index = cuda.current_device()
    else:
        default_index = int(local_rank) % cuda.device_count()
    index = int(device.partition(":")[2] or default_index)
    cuda.set_device(index)
    return f"cuda:{index}"


def settle(device: str) -> None:
    """Wait until a GPU has finished the computations of this process's current stream. Transfers
    on other streams go on."""
    if device != "cpu":
        torch_here().cuda.current_stream(device).synchronize()


def peak_bytes(device: str) -> int:
    """Most bytes used at once: by torch's tensors on a GPU; on the CPU by the whole process,
    libraries included."""
    if device != "cpu":
        return int(torch_here().cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
