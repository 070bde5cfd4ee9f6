"""`hetplan doctor`: what is installed, what was found on this machine, and whether it works
together. It imports nothing that may be missing."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from hetplan import __version__
from hetplan.cli.options import JsonOption
from hetplan.cli.output import emit
from hetplan.errors import one_line
from hetplan.text import Table, bytes_text

PACKAGES = (
    "numpy", "numba", "ortools", "highspy", "pyomo", "networkx", "pydantic", "pyyaml", "typer",
    "rich",
)  # fmt: skip
OPTIONAL = ("torch",)
# Solvers that Pyomo can drive by their program.
BINARIES = ("highs", "cbc", "glpsol", "scip", "gurobi_cl", "cplex", "ipopt", "xpress")
# Loads both in one process: some of their releases ship clashing libraries.
TOGETHER = (
    "from ortools.sat.python import cp_model; import highspy; highspy.Highs(); cp_model.CpModel()"
)
GPU_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")


def doctor(json: JsonOption = False) -> int:
    """Report versions, solvers, cores, memory and GPUs.

    Exit code 1 when something that hetplan needs is missing or fails.
    """
    report = examined()
    return emit(
        report, report_tables(report), json=json, ok=all(check["ok"] for check in report["checks"])
    )


def examined(needed: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """The report as JSON types. needed: distributions without which hetplan does not work."""
    packages = {name: installed(name) for name in (*needed, *OPTIONAL)}
    trouble = run_program([sys.executable, "-P", "-c", TOGETHER])[1]
    gpus, why = local_gpus()
    return {
        "hetplan": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "solver_binaries": {name: shutil.which(name) for name in BINARIES},
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus,
        "gpus_missing": why or None,
        "checks": [
            *(
                {
                    "check": f"{name} is installed",
                    "ok": packages[name] is not None,
                    "detail": packages[name] or "not found",
                }
                for name in needed
            ),
            {
                "check": "OR-Tools and HiGHS load in one process",
                "ok": not trouble,
                "detail": trouble,
            },
        ],
    }


def installed(name: str) -> str | None:
    """The version of a distribution without importing it; None where it is not installed."""
    return next((found.version for found in metadata.distributions(name=name)), None)


def run_program(command: list[str], patience: float = 30.0) -> tuple[str, str]:
    """What a program prints, and why it failed (empty where it did not). patience: in seconds."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {patience:.0f} s"
    except OSError as error:
        return "", f"cannot be run: {error.strerror}"
    if done.returncode == 0:
        return done.stdout, ""
    said = one_line(done.stdout or done.stderr)[-200:]
    return "", f"failed with exit code {done.returncode}{': ' if said else ''}{said}"


def local_gpus(patience: float = 30.0) -> tuple[list[dict[str, Any]] | None, str]:
    """GPUs by nvidia-smi: name, memory and driver; None, and the reason, where it is missing or
    fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, "no nvidia-smi"
    printed, trouble = run_program([program, *GPU_QUERY], patience)
    if trouble:
        return None, f"nvidia-smi: {trouble}"
    rows = [[field.strip() for field in line.split(",")] for line in printed.splitlines()]
    gpus = [
        {
            "name": row[0],
            "memory_bytes": int(row[1]) * 2**20 if row[1].isdecimal() else None,
            "driver": row[2],
        }
        for row in rows
        if len(row) == 3
    ]
    return gpus, "" if gpus else "none"


def report_tables(report: dict[str, Any]) -> list[Table]:
    """The report for people."""
    gpus = [f"{gpu['name']} ({bytes_text(gpu['memory_bytes'])})" for gpu in report["gpus"] or []]
    rows = (
        ("hetplan", report["hetplan"]),
        ("python", f"{report['python']} on {report['platform']}"),
        *((name, version or "not installed") for name, version in report["packages"].items()),
        ("cores", str(report["cores"])),
        ("memory", bytes_text(report["memory_bytes"])),
        ("GPUs", "; ".join(gpus) or report["gpus_missing"]),
        (
            "solver programs",
            ", ".join(name for name, path in report["solver_binaries"].items() if path)
            or "none found",
        ),
    )
    return [
        Table("", ("", ""), rows),
        Table(
            "checks",
            ("", "", ""),
            tuple(
                ("ok" if c["ok"] else "FAILED", c["check"], c["detail"]) for c in report["checks"]
            ),
        ),
    ]
