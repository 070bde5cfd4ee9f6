"""`hetplan doctor` reports the installed packages and the machine's cores, memory and GPUs, and
checks that the packages work together. It imports no package that may be missing.
"""

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
# The programs of solvers that Pyomo can call.
BINARIES = ("highs", "cbc", "glpsol", "scip", "gurobi_cl", "cplex", "ipopt", "xpress")
# A Python program that loads OR-Tools and HiGHS in one process: some of their releases ship
# libraries that clash.
LOAD_BOTH = (
    "from ortools.sat.python import cp_model; import highspy; highspy.Highs(); cp_model.CpModel()"
)
GPU_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")


def doctor(json: JsonOption = False) -> int:
    """Report versions, solvers, cores, memory and GPUs.

    Exit code 1 when something that hetplan needs is missing or fails.
    """
    report = machine_report()
    ok = all(check["ok"] for check in report["checks"])
    return emit(report, report_tables(report), json=json, ok=ok)


def machine_report(needed: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """The report on this machine as JSON types.

    needed: the distributions without which hetplan does not work.
    """
    packages = {name: installed(name) for name in (*needed, *OPTIONAL)}
    checks: list[dict[str, Any]] = [
        {
            "check": f"{name} is installed",
            "ok": packages[name] is not None,
            "detail": packages[name] or "not found",
        }
        for name in needed
    ]
    # -P: a file of the folder where the user is must not stand in for a module.
    _, trouble = run_program([sys.executable, "-P", "-c", LOAD_BOTH])
    checks.append(
        {"check": "OR-Tools and HiGHS load in one process", "ok": not trouble, "detail": trouble}
    )
    gpus, why_none = local_gpus()
    return {
        "hetplan": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "solver_binaries": {name: shutil.which(name) for name in BINARIES},
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus,
        "gpus_missing": why_none or None,
        "checks": checks,
    }


def installed(name: str) -> str | None:
    """The version of a distribution, read without an import; None where it is not installed."""
    distributions = metadata.distributions(name=name)
    return next((distribution.version for distribution in distributions), None)


def run_program(command: list[str], patience: float = 30.0) -> tuple[str, str]:
    """Run a program and return (its output, why it failed). The second text is empty where it did
    not fail. patience: seconds after which the program is ended."""
    try:
        completed = subprocess.run(
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
    if completed.returncode == 0:
        return completed.stdout, ""
    reason = f"failed with exit code {completed.returncode}"
    # The last characters are shown, because the last line of a traceback is the error.
    printed = one_line(completed.stdout or completed.stderr)[-200:]
    return "", f"{reason}: {printed}" if printed else reason


def local_gpus(patience: float = 30.0) -> tuple[list[dict[str, Any]] | None, str]:
    """(the machine's GPUs with name, memory and driver, why there are none).

    nvidia-smi lists the GPUs. Where it is missing or fails, the first value is None. patience: as
    in `run_program`.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, "no nvidia-smi"
    printed, trouble = run_program([program, *GPU_QUERY], patience)
    if trouble:
        return None, f"nvidia-smi: {trouble}"
    gpus = []
    for line in printed.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3:  # as GPU_QUERY asks; any other line is a message
            name, mebibytes, driver = fields
            memory_bytes = int(mebibytes) * 2**20 if mebibytes.isdecimal() else None
            gpus.append({"name": name, "memory_bytes": memory_bytes, "driver": driver})
    return gpus, "" if gpus else "none"


def report_tables(report: dict[str, Any]) -> list[Table]:
    """The report as tables for people: the machine, and the checks."""
    gpus = [f"{gpu['name']} ({bytes_text(gpu['memory_bytes'])})" for gpu in report["gpus"] or []]
    solver_programs = [name for name, path in report["solver_binaries"].items() if path]
    rows = (
        ("hetplan", report["hetplan"]),
        ("python", f"{report['python']} on {report['platform']}"),
        *((name, version or "not installed") for name, version in report["packages"].items()),
        ("cores", str(report["cores"])),
        ("memory", bytes_text(report["memory_bytes"])),
        ("GPUs", "; ".join(gpus) or report["gpus_missing"]),
        ("solver programs", ", ".join(solver_programs) or "none found"),
    )
    checks = tuple(
        ("ok" if check["ok"] else "FAILED", check["check"], check["detail"])
        for check in report["checks"]
    )
    return [Table("", ("", ""), rows), Table("checks", ("", "", ""), checks)]
