"""Further processes that run rounds of the local search beside this one.

Each helper is a process of Python that reads one pickled task from its standard input, runs rounds
of annealing and writes the pickled result to its standard output. A helper that dies has its rounds
run in this process, with the same result. A helper ends when this process does: its standard input
is then closed. Ctrl-C does not reach helpers; this process ends them.
"""

import contextlib
import os
import pickle  # noqa: TID251 - between processes of hetplan alone, never from a file
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import IO

from hetplan.formulations.joint.annealing import BestPlan, LocalSearch, Parameters, Valued
from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.space import Space
from hetplan.solvers.run import Options, Run

POLL_SECONDS = 0.05  # between two looks at helpers that are waited for
# Seconds after a time limit in which a helper's result is waited for. The helper has the same time
# limit, and looks at the clock after each replay.
GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class Task:
    """The rounds of one worker: all that they depend on."""

    data: JointData
    options: Options
    budget: float | None  # counted seconds
    parameters: Parameters
    worker: int  # number of the worker
    steps: int  # done before the rounds
    best_of_shape: Mapping[tuple[object, ...], Valued]  # the designs that rounds begin with
    incumbent: BestPlan | None


@dataclass(frozen=True)
class Rounds:
    """The result of a task."""

    incumbent: BestPlan | None
    steps: int
    replays: int


def run_rounds(task: Task, cancel: threading.Event | None = None) -> Rounds:
    """Run the rounds of a task. cancel: the wish to stop."""
    run = Run(task.options, cancel=cancel or threading.Event(), budget=task.budget)
    local = LocalSearch(Space(task.data), run, task.parameters, task.worker)
    local.steps, local.incumbent = task.steps, task.incumbent
    local.best_of_shape.update(task.best_of_shape)
    local.rounds()
    return Rounds(local.incumbent, local.steps - task.steps, local.replays)


class Helper:
    """One further process; `result` is None until it has answered."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", "hetplan.formulations.joint.helper"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C does not reach it
        )
        self.result: Rounds | None = None
        self._thread: threading.Thread | None = None

    def begin(self, task: Task) -> None:
        """Send the task, and wait for the result in a thread."""
        self._thread = threading.Thread(target=self._converse, args=(task,), daemon=True)
        self._thread.start()

    def _converse(self, task: Task) -> None:
        sent, received = self.process.stdin, self.process.stdout
        assert sent is not None and received is not None
        # a process that has died closes its pipes, also in the middle of an answer
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            pickle.dump(task, sent)
            sent.flush()
            self.result = pickle.load(received)  # noqa: S301 - from the process begun here

    def ended(self, seconds: float) -> bool:
        """Wait at most `seconds`; returns whether the process has answered or died."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        if self._thread is not None:
            self._thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Helpers:
    """The further processes of a search. As a context, it ends them when it is left."""

    def __init__(self, local: LocalSearch) -> None:
        self.local = local
        self.workers = 1
        self.tasks: list[Task] = []
        self.helpers: list[Helper] = []

    def __enter__(self) -> "Helpers":
        if self.are_worth_it:
            self.workers = self.local.parameters.workers
            with contextlib.suppress(OSError):  # no further process can be started
                for _ in range(self.workers - 1):
                    self.helpers.append(Helper())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for helper in self.helpers:
            helper.end()

    @property
    def are_worth_it(self) -> bool:
        """Whether several workers run rounds."""
        run, parameters = self.local.run, self.local.parameters
        left = min(run.remaining, run.seconds_left)
        shortest = left >= parameters.least_shared
        # a round of this number of steps counts at least `longest` seconds
        longest = parameters.steps * parameters.move_seconds
        return parameters.workers > 1 and shortest and longest >= parameters.least_shared

    def begin(self) -> None:
        """Begin the rounds of the other workers, with the designs that are the best so far."""
        local = self.local
        run = local.run
        seconds_left = run.seconds_left
        time_limit = None if seconds_left == float("inf") else max(seconds_left, 1e-3)
        for worker in range(1, self.workers):
            task = Task(
                data=local.space.data,
                options=replace(run.options, time_limit=time_limit),
                budget=None if run.budget is None else run.remaining,
                parameters=local.parameters,
                worker=worker,
                steps=local.steps,
                best_of_shape=dict(local.best_of_shape),
                incumbent=local.incumbent,
            )
            self.tasks.append(task)
            if worker <= len(self.helpers):
                self.helpers[worker - 1].begin(task)

    def merge(self) -> None:
        """Wait for the results of the other workers, and keep the best plan of all."""
        local = self.local
        for number, task in enumerate(self.tasks):
            rounds = self.result_of(number)
            if rounds is None and not local.run.cancelled and local.run.seconds_left > 0:
                rounds = run_rounds(self.with_time_left(task), local.run.cancel)
            if rounds is None:
                continue
            local.steps += rounds.steps
            local.replays += rounds.replays
            found = rounds.incumbent
            best = local.incumbent
            if found is not None and (best is None or found.order < best.order):
                local.incumbent = found
                seconds, _ = found.order
                local.run.report(incumbent=seconds)

    def with_time_left(self, task: Task) -> Task:
        """The task with the time that is left now."""
        left = self.local.run.seconds_left
        limit = None if left == float("inf") else max(left, 1e-3)
        return replace(task, options=replace(task.options, time_limit=limit))

    def result_of(self, number: int) -> Rounds | None:
        """The result of a helper; None where it died, is late, or was never there."""
        if number >= len(self.helpers):
            return None
        helper, waited = self.helpers[number], 0.0
        run = self.local.run
        while not helper.ended(POLL_SECONDS):
            if run.cancelled or waited > GRACE_SECONDS:
                return None
            if run.seconds_left <= 0:
                waited += POLL_SECONDS
        return helper.result


def serve(source: IO[bytes], target: IO[bytes]) -> None:
    """Run the rounds of the task in `source`, and write the result to `target`. The process ends
    when `source` is closed, as it is when the process that sends tasks has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task = pickle.load(source)  # noqa: S301 - from the process that began it

    def end_with_sender() -> None:
        source.read()
        os._exit(1)

    threading.Thread(target=end_with_sender, daemon=True).start()
    pickle.dump(run_rounds(task), target)
    target.flush()
