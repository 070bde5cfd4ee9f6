"""`hetplan run --elastic`: plans for what a lost node has left, by `hetplan replan`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cli.output import note
from hetplan.errors import InputError

if TYPE_CHECKING:
    from hetplan.runtime.job import Job, Loss
    from hetplan.runtime.plan import Plan
    from hetplan.runtime.virtual import Rehearsal


@dataclass
class Replanner:
    """Plans again by a process of its own: solvers leave threads behind, and ranks are forked.

    plan: the file of what runs now; folder: where those to come are written; rehearse: a plan's
    predicted times; more: options of `hetplan replan`.
    """

    plan: Path
    folder: Path
    rehearse: Callable[[Plan], Rehearsal | None]
    more: Sequence[str]
    quiet: bool

    def __call__(self, job: Job, lost: tuple[int, ...]) -> Job | None:
        """The job under a plan without the lost nodes, None where none fits."""
        from hetplan.runtime.plan import load_plan

        nodes = [f"node{n}" for n in sorted(lost)]
        if not self.quiet:
            note(f"lost {', '.join(nodes)}: planning without")
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / f"plan-without-{'-'.join(nodes)}.json"
        command = [
            sys.executable,
            "-m",
            "hetplan",
            "replan",
            str(self.plan),
            "--lost",
            ",".join(nodes),
        ]
        done = subprocess.run(
            [*command, "--output", str(target), "--json", "--quiet", *self.more],
            stdout=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            return None
        self.plan, plan = target, load_plan(target)
        return replace(job, plan=plan, rehearsal=self.rehearse(plan))


def options(
    cluster: str | None,
    model: str | None,
    profile: Path | None,
    strategies: Sequence[str] | None,
    seconds: float | None,
) -> list[str]:
    """What `hetplan replan` is given."""
    given = {"--cluster": cluster, "--model": model, "--profile": profile, "--time-limit": seconds}
    found = [
        text for name, value in given.items() if value is not None for text in (name, str(value))
    ]
    return [*found, *(text for name in strategies or () for text in ("--strategies", name))]


def check_elastic(
    elastic: bool,
    checkpoint: Path | None,
    every: int | None,
    strategies: Sequence[str] | None,
    seconds: float | None,
) -> None:
    """Raise InputError for options that do not go together."""
    if elastic and (checkpoint is None or every is None):
        raise InputError(
            "--elastic needs --checkpoint with a folder and --every with a number of steps"
        )
    if not elastic and (strategies is not None or seconds is not None):
        raise InputError("--strategies and --replan-seconds are for --elastic")
    if seconds is not None and not 0 < seconds < 1e9:
        raise InputError("--replan-seconds", got=seconds, expected="a positive number")


def check_known(plan: Plan, rehearsal: Rehearsal | None) -> None:
    """Raise InputError where there is nothing to replan with."""
    if rehearsal is None:
        raise InputError(
            "--elastic needs the plan's cluster", where=plan.name, got=plan.workload.cluster,
            expected="--cluster with its file",
        )  # fmt: skip


def tell_loss(loss: Loss) -> None:
    """What happened, for people."""
    note(
        f"{loss.error}; going on from step {loss.step} with {loss.plan}, {loss.seconds:.1f} s later"
    )
