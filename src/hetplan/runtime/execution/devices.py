"""A rank's own device, the time until it is done, and the most memory that it has had."""

from __future__ import annotations

import os
import resource

import torch

from hetplan.errors import InputError

KIB = 1024  # Linux counts resident memory in KiB


def local_device(device: str) -> str:
    """`cpu`, or the GPU of this rank as torch's current device: `cuda:0`, say.

    device: "auto" is cuda where there is a GPU; "cuda" without a number goes round the machine's
    GPUs by LOCAL_RANK, as torchrun sets it, or is torch's current one. Raises InputError where
    there is no such device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = device.partition(":")
    if kind == "cpu" and not number:
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind != "cuda" or (number and not number.isdecimal()) or int(number or 0) >= count:
        have = ["cpu", *(f"cuda:{i}" for i in range(count))]
        raise InputError("no such device here", got=device, expected=" or ".join(have))
    local = os.environ.get("LOCAL_RANK", "")
    index = (
        int(number)
        if number
        else int(local) % count
        if local.isdecimal()
        else torch.cuda.current_device()
    )
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def settle(device: str) -> None:
    """Wait until a GPU has done what this process asked it to compute; messages on their way go
    on."""
    if device != "cpu":
        torch.cuda.current_stream(device).synchronize()


def peak_bytes(device: str) -> int:
    """The most memory that torch has taken of the GPU; of the CPU the process, libraries
    included."""
    if device != "cpu":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
