"""Whether `hetplan plan --time-limit` keeps its limit, and how soon the first plan is told.

    python -m evidence.speed time_limits [--time-limit S]… [--cold] [--output FILE]

The workloads of docs/workloads.md, and one of 768 devices, each by `hetplan plan` in a process of
its own. `seconds` are those of the whole command, with Python's start and the printing; `over` is
by how much they exceed the limit. `first plan`: seconds until standard error, which is not a
terminal here, tells a plan that fits. Processor seconds are of the command and of all processes
that it starts. The kernels are compiled before, unless `--cold` gives every command an empty folder
for them. Other work on the machine makes every figure but the processor seconds longer: the column
`load` (one minute's mean) tells.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from evidence.speed.harness import markdown, save

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from workloads_table import ROWS, Row

LIMITS = (30.0,)
# As the cluster `company`, eight times as large.
LARGE = """format: hetplan-cluster
version: 1
name: 768 devices
nodes:
  - {count: 32, devices: 8, device: H100-SXM5-80GB, intra_node_gbit_per_s: 3600,
     network_gbit_per_s: 400}
  - {count: 64, devices: 8, device: A100-SXM4-80GB, intra_node_gbit_per_s: 2400,
     network_gbit_per_s: 200}
"""
# A plan told on standard error: `hetplan: amp/auto 347 ms, 0 % from its own problem's bound`.
PLAN = re.compile(r"hetplan: [a-z]+/\S+ [0-9.]+ (?!.*does not fit)")
HEADER = (
    *("workload", "limit, s", "seconds", "over", "first plan, s", "processor s", "exit code"),
    "load",
)


def taken(row: Row, limit: float, kernels: str | None) -> dict[str, Any]:
    """One plan. kernels: folder for numba's kernels; None: where they are."""
    command = [
        *(sys.executable, "-P", "-m", "hetplan", "plan"),
        *("--model", row.model, "--cluster", row.cluster),
        *("--global-batch", str(row.batch), "--time-limit", f"{limit:g}"),
    ]
    environment = (
        dict(os.environ) if kernels is None else {**os.environ, "NUMBA_CACHE_DIR": kernels}
    )
    begun, first = time.perf_counter(), None
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if first is None and PLAN.match(line):
            first = time.perf_counter() - begun
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "workload": row.title, "limit": limit, "seconds": seconds, "first": first,
        "processors": used.ru_utime + used.ru_stime, "exit": process.returncode,
        "load": os.getloadavg()[0],
    }  # fmt: skip


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    over = row["seconds"] / row["limit"] - 1
    return (
        row["workload"], f"{row['limit']:g}", f"{row['seconds']:.1f}",
        f"{100 * over:.0f} %" if over > 0 else "", "–" if row["first"] is None else
        f"{row['first']:.1f}", f"{row['processors']:.1f}", f"{row['exit']}", f"{row['load']:.1f}",
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--time-limit", type=float, action="append")
    parser.add_argument("--workload", action="append", help="a part of its name; default all")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--output")
    given = parser.parse_args(arguments)
    kept = []
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder, "large.yaml")
        large.write_text(LARGE, encoding="utf-8")
        rows = [*ROWS, Row("256 H100, 512 A100", "llama2-13b", str(large), 4096)]
        wanted = [
            r for r in rows if not given.workload or any(w in r.title for w in given.workload)
        ]
        if not given.cold:
            for row in (rows[0], rows[-1]):  # which together need all the kernels
                taken(row, 60.0, None)
        for limit in given.time_limit or LIMITS:
            for i, row in enumerate(wanted):
                kernels = str(Path(folder, f"{i}-{limit:g}")) if given.cold else None
                kept.append(taken(row, limit, kernels))
                print(*cells(kept[-1]), sep=" | ", file=sys.stderr, flush=True)
    title = "Time limits of hetplan plan" + (", nothing compiled" if given.cold else "")
    save(given.output, [markdown(title, HEADER, [cells(row) for row in kept])], kept)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
