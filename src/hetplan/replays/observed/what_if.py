"""The parts of a step's seconds, by replays of its own passes with some durations replaced.

A replay keeps the order of passes of every worker, and begins each pass as soon as

(1) the pass before it on its worker is done;
(2) the pass that it needs is done, and the message between the two has arrived. A forward pass
    needs that of the virtual stage before, a backward pass that of the virtual stage behind. The
    backward pass of the last virtual stage and passes of weights need nothing from other workers.

Passes are *alike* if they have one kind and one virtual stage in replicas that should be equally
fast. With m the mean seconds of alike passes over workers and micro-batches, and w their mean over
the micro-batches of one worker, each part is the difference of two replays:

    computing      the most seconds of m that one worker computes
    schedule       replay of m without messages, less that
    messages       replay of m with messages, less the one without
    slow workers   replay of w with messages, less that of m
    spread         replay of the passes' own seconds with messages, less that of w
    unexplained    the recorded passes, less that: delays of the host, waits for ports
    after          gradients and update, behind the last pass

so that all parts together are the step. A message costs two medians over the passes that need it:
`arrival`, from the end of the pass that gives it, where the worker had nothing else to wait for;
and
`behind`, from the end of the worker's pass before, where the message could have arrived long ago.
Where messages arrive while the worker computes, the second one is about 0; where the worker
receives between its passes, the two are alike.

Sources: what-if analysis as in Lin et al. 2025 (Understanding Stragglers in Large Model Training
Using What-if Analysis), Sections 3 and 4, whose ideal durations are the means as well.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, fields
from statistics import fmean, median
from typing import NamedTuple

from hetplan.errors import InputError
from hetplan.replays.observed.steps import Pass, Step, Worker

Alike = Callable[[Worker, Pass], Hashable]  # gives equal keys to alike passes
Boundary = tuple[str, int]  # (kind of pass, virtual stage) that waits for the message
Durations = Callable[[Worker, Pass], float]
Place = tuple[int, str, int, int]  # (replica, kind, virtual stage, micro-batch) of a pass


class Message(NamedTuple):
    """The costs of a message."""

    arrival: float = 0.0  # seconds after the pass that gives it
    behind: float = 0.0  # seconds after the pass before the one that needs it


NOTHING = Message()


@dataclass(frozen=True)
class Parts:
    """The parts of a step's seconds; their sum is the step."""

    computing: float
    schedule: float
    messages: float
    slow_workers: float
    spread: float
    unexplained: float
    after: float

    @property
    def seconds(self) -> float:
        """The step's seconds."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


def mean_parts(parts: list[Parts]) -> Parts:
    """The mean of each part over several steps."""
    return Parts(*(fmean(getattr(one, field.name) for one in parts) for field in fields(Parts)))


def by_stage(worker: Worker, one: Pass) -> Hashable:
    """Passes of one kind and virtual stage are alike in all replicas."""
    return one.kind, one.virtual_stage


class WhatIf:
    """The replays of one step. alike: the passes that should take equally long.

    Raises InputError where passes wait for each other in a circle.
    """

    def __init__(self, step: Step, alike: Alike = by_stage) -> None:
        self.step, self.alike = step, alike
        self.last = step.virtual_stages - 1
        self.passes = {
            place_of(worker, one): one for worker in step.workers for one in worker.passes
        }
        self.messages = self.message_costs()
        self.means = mean_by(step, alike)
        self.worker_means = mean_by(step, lambda worker, one: (worker.name, alike(worker, one)))

    def needed(self, worker: Worker, one: Pass) -> Place | None:
        """The pass whose result a pass needs; None where it needs none or the trace lacks it."""
        before = {"forward": one.virtual_stage - 1, "backward": one.virtual_stage + 1}
        virtual_stage = before.get(one.kind, -1)
        place = (worker.replica, one.kind, virtual_stage, one.micro_batch)
        return place if place in self.passes else None

    def waits(self) -> Iterator[tuple[Boundary, float, float, float]]:
        """(boundary, end of the pass that gives the message, end of the worker's pass before,
        begin) of every pass that needs a message."""
        for worker in self.step.workers:
            own = {place_of(worker, one) for one in worker.passes}
            before = self.step.begin
            for one in worker.passes:
                needed = self.needed(worker, one)
                if needed is not None and needed not in own:
                    boundary = (one.kind, one.virtual_stage)
                    yield boundary, self.passes[needed].end, before, one.begin
                before = one.end

    def message_costs(self) -> dict[Boundary, Message]:
        """Boundary -> the costs of its messages. Gaps below 0, which differing clocks of machines
        may give, count as 0."""
        arrivals: dict[Boundary, list[float]] = defaultdict(list)
        for boundary, given, before, begin in self.waits():
            if given >= before:
                arrivals[boundary].append(max(0.0, begin - given))
        arrival = {boundary: median(gaps) for boundary, gaps in arrivals.items()}
        behind: dict[Boundary, list[float]] = defaultdict(list)
        for boundary, given, before, begin in self.waits():
            if given + arrival.get(boundary, 0.0) <= before:
                behind[boundary].append(max(0.0, begin - before))
        costs = {}
        for boundary in {**arrivals, **behind}:
            gaps = behind.get(boundary)
            costs[boundary] = Message(arrival.get(boundary, 0.0), median(gaps) if gaps else 0.0)
        return costs

    def replay(self, seconds: Durations, messages: Mapping[Boundary, Message]) -> float:
        """Seconds from the begin of the first pass to the end of the last one.

        seconds: of each pass. messages: the costs of the messages of each boundary; those of
        missing boundaries cost nothing.
        """
        done: dict[Place, float] = {}
        clock = dict.fromkeys(range(len(self.step.workers)), 0.0)
        position = dict.fromkeys(clock, 0)
        progress = True
        while progress:
            progress = False
            for number, worker in enumerate(self.step.workers):
                while position[number] < len(worker.passes):
                    one = worker.passes[position[number]]
                    needed = self.needed(worker, one)
                    if needed is not None and needed not in done:
                        break
                    begin = clock[number]
                    if needed is not None:
                        message = messages.get((one.kind, one.virtual_stage), NOTHING)
                        behind = message.behind if position[number] else 0.0
                        begin = max(begin + behind, done[needed] + message.arrival)
                    clock[number] = begin + seconds(worker, one)
                    done[place_of(worker, one)] = clock[number]
                    position[number] += 1
                    progress = True
        if len(done) < len(self.passes):
            raise InputError(
                "passes wait for each other in a circle",
                where=f"step {self.step.number}",
                expected="PLAN, the plan of the run, if chunks lie on the stages as a V",
            )
        return max(clock.values())

    def own(self, worker: Worker, one: Pass) -> float:
        """The recorded seconds of a pass."""
        return one.seconds

    def mean(self, worker: Worker, one: Pass) -> float:
        """The mean seconds of all passes that are alike."""
        return self.means[self.alike(worker, one)]

    def worker_mean(self, worker: Worker, one: Pass) -> float:
        """The mean seconds of the worker's passes that are alike."""
        return self.worker_means[worker.name, self.alike(worker, one)]

    def parts(self) -> Parts:
        """The parts of the step."""
        step = self.step
        busiest = max(
            sum(self.mean(worker, one) for one in worker.passes) for worker in step.workers
        )
        without_messages = self.replay(self.mean, {})
        by_means = self.replay(self.mean, self.messages)
        by_worker_means = self.replay(self.worker_mean, self.messages)
        by_own = self.replay(self.own, self.messages)
        return Parts(
            computing=busiest,
            schedule=without_messages - busiest,
            messages=by_means - without_messages,
            slow_workers=by_worker_means - by_means,
            spread=by_own - by_worker_means,
            unexplained=step.passes_end - step.begin - by_own,
            after=step.end - step.passes_end,
        )

    def worker_effects(self) -> dict[str, float]:
        """Name of each worker -> seconds by which the step is longer because the worker's passes
        take its own mean seconds, and not those of all alike passes."""
        by_means = self.replay(self.mean, self.messages)
        effects = {}
        for slow in self.step.workers:

            def seconds(worker: Worker, one: Pass, slow: Worker = slow) -> float:
                return self.worker_mean(worker, one) if worker is slow else self.mean(worker, one)

            effects[slow.name] = self.replay(seconds, self.messages) - by_means
        return effects

    def message_effects(self) -> dict[Boundary, float]:
        """Boundary -> seconds by which the step would be shorter if its messages took no time."""
        by_own = self.replay(self.own, self.messages)
        effects = {}
        for boundary in self.messages:
            others = {key: value for key, value in self.messages.items() if key != boundary}
            effects[boundary] = by_own - self.replay(self.own, others)
        return effects


def place_of(worker: Worker, one: Pass) -> Place:
    """The place of a pass in the step."""
    return worker.replica, one.kind, one.virtual_stage, one.micro_batch


def mean_by(step: Step, key: Callable[[Worker, Pass], Hashable]) -> dict[Hashable, float]:
    """Key -> the mean seconds of the passes with this key."""
    seconds: dict[Hashable, list[float]] = defaultdict(list)
    for worker in step.workers:
        for one in worker.passes:
            seconds[key(worker, one)].append(one.seconds)
    return {name: fmean(values) for name, values in seconds.items()}
