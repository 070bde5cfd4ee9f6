"""Where and with what figures are taken: the machine, the versions, a process's peak memory."""

from __future__ import annotations

import os
import platform
import resource
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("ortools", "highspy", "pyomo", "numpy", "numba", "networkx")


@cache
def machine() -> dict[str, Any]:
    """Processor, cores, system and Python of this machine."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


@cache
def versions() -> dict[str, str]:
    """hetplan and what it solves with; absent where not installed."""
    from hetplan import __version__

    found = {"hetplan": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """The processor's name as its maker gives it, where the system tells."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def peak_bytes() -> int:
    """This process's peak resident memory. On Linux ru_maxrss begins at the parent's; VmHWM does
    not."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    # in KiB on Linux, in bytes on macOS
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
