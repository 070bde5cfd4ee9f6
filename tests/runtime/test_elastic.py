"""Going on without lost nodes, with ranks that are made up; `test_run_faults` has one with real
ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fakes.workloads import small
from hetplan.errors import InputError
from hetplan.runtime import launch
from hetplan.runtime.job import Job, Loss, StepReport
from hetplan.runtime.launch import RankError, launch_elastic
from hetplan.runtime.plan import Plan

torch = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.runtime.rehearsals import plan  # noqa: E402 (needs torch)

Tell = Callable[[StepReport], None]


def report(step: int) -> StepReport:
    """Of one rank."""
    return StepReport(step, float(step), 0.0, 1.0, 0.4, 0.4, 0.0, 1)


class Cluster:
    """Runs that save every second step, and die at given ones: `dies` [(step, device or None)] of
    each run."""

    def __init__(self, folder: Path, dies: list[tuple[int, int | None]]) -> None:
        self.folder, self.dies, self.jobs = folder, dies, list[Job]()

    def launch(self, job: Job, tell: Tell) -> list[list[StepReport]]:
        """As `launch`."""
        first = launch.latest(job) or 0 if job.resume else 0
        step, device = (
            self.dies[len(self.jobs)] if len(self.jobs) < len(self.dies) else (1000, None)
        )
        self.jobs.append(job)
        for s in range(first, first + job.steps):
            if s == step:
                raise RankError(f"rank of device {device}: gone", device)
            tell(report(s))
            if (s + 1) % 2 == 0:
                (self.folder / f"step-{s + 1}").mkdir(exist_ok=True)
                (self.folder / f"step-{s + 1}" / "hetplan.json").write_text("{}")
        return [[report(s) for s in range(first, first + job.steps)]]


def three_nodes() -> Plan:
    """Devices 0 and 1 on nodes of their own, 2 and 3 on a third."""
    made = plan("four stages, even", small())
    devices = [
        d.model_copy(update={"node": n}) for d, n in zip(made.devices, (0, 1, 2, 2), strict=True)
    ]
    return made.model_copy(update={"devices": devices})


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(plan=three_nodes(), steps=9, checkpoint=str(tmp_path), every=2)


def survive(
    job: Job, dies: list[tuple[int, int | None]], monkeypatch: pytest.MonkeyPatch, fits: bool = True
) -> tuple[Cluster, list[tuple[int, ...]], dict[int, float], list[Loss]]:
    """The runs, what was asked of the planner, the losses and what was told."""
    assert job.checkpoint is not None
    cluster, asked, heard = (
        Cluster(Path(job.checkpoint), dies),
        list[tuple[int, ...]](),
        list[Loss](),
    )
    monkeypatch.setattr(launch, "launch", cluster.launch)

    def again(ran: Job, lost: tuple[int, ...]) -> Job | None:
        asked.append(lost)
        return (
            replace(ran, plan=ran.plan.model_copy(update={"name": f"without {lost}"}))
            if fits
            else None
        )

    measured = launch_elastic(job, again, None, heard.append)
    assert list(measured.lost) == heard
    return cluster, asked, measured.losses, heard


def test_nodes_lost_one_after_the_other(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first checkpoint the run begins anew, behind it with what was saved; no step is
    left out."""
    cluster, asked, losses, heard = survive(job, [(1, 3), (5, 0)], monkeypatch)
    assert asked == [(2,), (2, 0)]
    assert [(j.resume, j.steps) for j in cluster.jobs] == [(False, 9), (False, 9), (True, 5)]
    assert [(loss.node, loss.step, loss.plan) for loss in heard] == [
        (2, 0, "without (2,)"),
        (0, 4, "without (2, 0)"),
    ]
    assert losses == {step: float(step) for step in range(9)}


def test_what_was_there_before_is_not_done_again(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "step-20").mkdir()
    (tmp_path / "step-20" / "hetplan.json").write_text("{}")
    cluster, _, losses, _ = survive(replace(job, resume=True), [(23, 1)], monkeypatch)
    assert [(j.resume, j.steps) for j in cluster.jobs] == [(True, 9), (True, 7)]
    assert list(losses) == list(range(20, 29))


@pytest.mark.parametrize(
    ("dies", "fits"),
    [
        ([(3, None)], True),  # an error of its own would come again
        ([(3, 0)], False),  # nothing fits on the others
        ([(3, 0), (3, 1), (3, 2)], True),  # no node is left
    ],
)
def test_what_ends_a_run_all_the_same(
    job: Job, dies: list[tuple[int, int | None]], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RankError, match=f"rank of device {dies[-1][1]}: gone"):
        survive(job, dies, monkeypatch, fits)


def test_checkpoints_are_needed(job: Job) -> None:
    with pytest.raises(InputError, match="needs a folder for checkpoints"):
        launch_elastic(replace(job, checkpoint=None), lambda *_: None)
