"""`hetplan doctor`: what is installed, what was found on this machine, and whether it works
together."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hetplan.cli.options import JsonOption
from hetplan.cli.output import emit
from hetplan.errors import one_line
from hetplan.text import Table, bytes_text

PACKAGES = (
    "numpy",
    "numba",
    "ortools",
    "highspy",
    "pyomo",
    "networkx",
    "pydantic",
    "pyyaml",
    "typer",
    "rich",
)
OPTIONAL = ("torch",)
# Solvers that Pyomo can drive by their program.
BINARIES = ("highs", "cbc", "glpsol", "scip", "gurobi_cl", "cplex", "ipopt", "xpress")
PATIENCE_S = 30.0


def doctor(json: JsonOption = False) -> int:
    """Report versions, solvers, cores, memory and GPUs.

    Exit code 1 when something that hetplan needs is missing or fails.
    """
    report = examine()
    emit(report, tables(report), json=json)
    return 0 if all(check["ok"] for check in report["checks"]) else 1


def examine() -> dict[str, Any]:
    """The whole report as JSON types; what could not be found out is None."""
    from hetplan import __version__

    found, why = gpus()
    return {
        "hetplan": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed(name) for name in (*PACKAGES, *OPTIONAL)},
        "solver_binaries": {name: shutil.which(name) for name in BINARIES},
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "gpus": found,
        "gpus_missing": why or None,
        "kernel_cache": kernel_cache(),
        "checks": [
            *(needed(name) for name in PACKAGES),
            check_together(),
        ],
    }


def installed(name: str) -> str | None:
    """The version of a distribution without importing it; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def needed(name: str) -> dict[str, Any]:
    """Whether a required package is installed."""
    found = installed(name)
    return {
        "check": f"{name} is installed",
        "ok": found is not None,
        "detail": found or "not found",
    }


def check_together() -> dict[str, Any]:
    """Whether OR-Tools and HiGHS load in one process: some of their releases ship clashing
    libraries."""
    code = (
        "from ortools.sat.python import cp_model; import highspy; highspy.Highs(); "
        "cp_model.CpModel()"
    )
    what = "OR-Tools and HiGHS load in one process"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"check": what, "ok": False, "detail": f"no answer within {PATIENCE_S:.0f} s"}
    lines = done.stderr.strip().splitlines()
    detail = (
        "" if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")
    )
    return {"check": what, "ok": done.returncode == 0, "detail": detail}


def memory_bytes() -> int | None:
    """Physical memory of this machine."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def gpus() -> tuple[list[dict[str, Any]] | None, str]:
    """GPUs by nvidia-smi: name, memory and driver; None, and the reason, where it is missing or
    fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, "no nvidia-smi"
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            [program, *query],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"nvidia-smi: no answer within {PATIENCE_S:.0f} s"
    except OSError as error:
        return None, f"nvidia-smi cannot be run: {error.strerror}"
    if done.returncode != 0:
        said = one_line(done.stdout or done.stderr)[:200]
        return (
            None,
            f"nvidia-smi failed with exit code {done.returncode}{': ' if said else ''}{said}",
        )
    found = [gpu for gpu in map(parse_gpu, done.stdout.splitlines()) if gpu is not None]
    return found, "" if found else "none"


def parse_gpu(line: str) -> dict[str, Any] | None:
    """`NVIDIA T4, 15360, 535.1` -> name, memory in bytes (nvidia-smi counts MiB), driver; None for
    else."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 3:
        return None
    memory = int(fields[1]) * 2**20 if fields[1].isdecimal() else None
    return {"name": fields[0], "memory_bytes": memory, "driver": fields[2]}


def kernel_cache() -> dict[str, Any]:
    """Where numba keeps compiled kernels between runs: NUMBA_CACHE_DIR, beside the source, or at
    home."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    spec = find_spec("hetplan")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    if chosen:
        return {
            "location": chosen,
            "chosen_by": "NUMBA_CACHE_DIR",
            "writable": writable(Path(chosen)),
        }
    if os.access(package, os.W_OK):
        return {
            "location": str(package / "**" / "__pycache__"),
            "chosen_by": "beside the source",
            "writable": True,
        }
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"
    return {
        "location": str(home),
        "chosen_by": "the user's cache folder",
        "writable": writable(home),
    }


def writable(folder: Path) -> bool:
    """Whether files can be made in `folder`, or the folder itself be made."""
    existing = next((p for p in (folder, *folder.absolute().parents) if p.exists()), None)
    return existing is not None and os.access(existing, os.W_OK)


def tables(report: dict[str, Any]) -> list[Table]:
    """The report for people."""
    gpu_names = [f"{g['name']} ({bytes_text(g['memory_bytes'])})" for g in report["gpus"] or []]
    rows = [
        ("hetplan", report["hetplan"]),
        ("python", f"{report['python']} on {report['platform']}"),
        *((name, version or "not installed") for name, version in report["packages"].items()),
        ("cores", str(report["cores"])),
        ("memory", bytes_text(report["memory_bytes"])),
        ("GPUs", "; ".join(gpu_names) or report["gpus_missing"]),
        (
            "solver programs",
            ", ".join(k for k, v in report["solver_binaries"].items() if v) or "none found",
        ),
        (
            "compiled kernels",
            f"{report['kernel_cache']['location']} ({report['kernel_cache']['chosen_by']})",
        ),
    ]
    checks = tuple(
        ("ok" if c["ok"] else "FAILED", c["check"], c["detail"]) for c in report["checks"]
    )
    return [Table("", ("", ""), tuple(rows)), Table("checks", ("", "", ""), checks)]
