"""Recommends nodes for a target: of the nodes that can be had, how many of each kind to take.

Sets      Kinds k of nodes. Nodes of one kind are equal.
Data      N_k nodes of kind k can be had. The workload, the prices and the goal.
Decision  A choice: n_k nodes of each kind, 0 <= n_k <= N_k, at least one in all.
Objective The fewest devices, the least money, or the least time; see `Goal`.
Rules     (1) An iteration is not longer than the target allows.
          (2) The money of all iterations stays within the budget.

The seconds of a choice are those of the plan that `planned` finds, by the local search of the
problem `joint` in a counted number of moves, so that the same command gives the same answer. No
plan is faster than the devices compute alone (`computing_alone`), and devices that are added never
make that bound longer. So a box of choices, from counts `low` to counts `high`, has a lower bound:
the seconds of `high` with the devices and the price of `low`. The search takes the box of the
least bound first, divides it, and plans the choices that are left (branch and bound). What the
bounds rule out is proven for all plans of stages. A choice that was planned, the winner too, may
have a faster plan than the one that is found, down to its bound; so the least value of all choices
is that of bounds. Other choices whose bounds are better than the winner are told as undecided.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any, Literal

import numpy as np

from hetplan.errors import InputError, require
from hetplan.formulations import family
from hetplan.formulations.joint.annealing import Parameters
from hetplan.formulations.joint.bound.alone import computing_alone
from hetplan.formulations.joint.evaluate import plan_of
from hetplan.planner.variants import Part, on_part, useful_modes
from hetplan.plans.making import with_inputs
from hetplan.plans.plan import Plan, Recomputation
from hetplan.profiling.hardware.cluster import Cluster, Node
from hetplan.profiling.inputs.inputs import Inputs
from hetplan.profiling.workload import Workload
from hetplan.replays.arrays import Floats
from hetplan.replays.costs import Costs
from hetplan.replays.data import ReplayData
from hetplan.replays.pose import pose
from hetplan.solvers.branch_and_bound import Expansion, Incumbent, search
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run
from hetplan.text import counted, grouped

Counts = tuple[int, ...]  # nodes of each kind
Box = tuple[Counts, Counts]  # all choices from the first counts to the second ones
Least = Literal["gpus", "money", "time"]
HOUR = 3600.0  # seconds
MOST_CHOICES = 10**6
# Moves of the local search for each choice. On examples/offers.yaml five times as many shorten the
# plans of 5 GPUs by 3 %, those of 31 GPUs by less, and take three times as long.
MOVES = 300
ROUNDING = 1e-9  # a relative difference below which two values count as equal


@dataclass(frozen=True)
class Kind:
    """Equal nodes that can be had."""

    name: str
    node: Node
    nodes: tuple[int, ...]  # their numbers in the cluster of all nodes
    price: float | None  # dollars per hour of one node; None: unknown

    @property
    def most(self) -> int:
        """How many can be had."""
        return len(self.nodes)


def kinds_of(cluster: Cluster) -> list[Kind]:
    """The kinds of nodes of a cluster, in the order of their first nodes. Nodes under different
    switches of equal speed count as one kind."""
    alike = grouped((replace(node, switch=(0, 0)), n) for n, node in enumerate(cluster.nodes))
    kinds = []
    for node, numbers in alike.items():
        price = cluster.specs[node.device].price_per_hour
        hourly = None if price is None else price * node.devices
        kinds.append(Kind(f"{node.devices} x {node.device}", node, tuple(numbers), hourly))
    return kinds


@dataclass(frozen=True)
class Goal:
    """What is asked for.

    least: what the winner has least of. `money` is that of all iterations where their number is
    known, else dollars per hour. seconds: the most that an iteration may take. iterations: of the
    whole training; None: unknown. budget: the most dollars for all iterations.
    """

    least: Least
    seconds: float = math.inf
    iterations: float | None = None
    budget: float = math.inf

    def dollars(self, per_hour: float | None, seconds: float) -> float:
        """Dollars of the whole training where the number of iterations is known, else per hour; 0
        where no price is known, which `check` refuses if money counts.

        per_hour: price of the choice. seconds: of an iteration.
        """
        if per_hour is None:
            return 0.0
        if self.iterations is None:
            return per_hour
        # A choice without nodes, which begins the first box, has no price and infinite seconds.
        return per_hour * (seconds * self.iterations / HOUR) if per_hour else 0.0

    def value(self, devices: int, per_hour: float | None, seconds: float) -> float:
        """The objective: devices, dollars or seconds of an iteration."""
        if self.least == "gpus":
            return float(devices)
        if self.least == "money":
            return self.dollars(per_hour, seconds)
        return seconds

    def allows(self, per_hour: float | None, seconds: float) -> bool:
        """Whether (1) and (2) hold."""
        within_budget = self.dollars(per_hour, seconds) <= self.budget * (1 + ROUNDING)
        return seconds <= self.seconds * (1 + ROUNDING) and within_budget

    def check(self, kinds: Sequence[Kind]) -> None:
        """Raise InputError where money counts and a price is unknown."""
        if self.least != "money" and self.budget == math.inf:
            return
        for kind in kinds:
            if kind.price is None:
                raise InputError(
                    "money counts, but a device has no price",
                    where=kind.node.device,
                    expected="price_per_hour under `devices` of the file",
                )


@dataclass(frozen=True)
class Choice:
    """A choice with its bound, and with the plan that was found for it."""

    counts: Counts
    devices: int
    per_hour: float | None  # dollars; None where any of the nodes that can be had has no price
    bound: float  # seconds of an iteration that no plan of stages beats
    seconds: float | None = None  # of an iteration of the plan; None: no plan was found that fits
    plan: Plan | None = None

    @property
    def cost(self) -> float:
        """What the frontier holds against time: dollars per hour, or devices without prices."""
        return float(self.devices) if self.per_hour is None else self.per_hour


@dataclass(frozen=True)
class Recommendation:
    """The answer.

    choices: those that were planned, in their order. winner: its index; None where no planned
    choice meets the target. undecided: indices of planned choices that the bounds allow to be
    better than the winner, though the plans found are not. ruled_out: choices that bounds alone
    ruled out. left: choices that were neither planned nor ruled out before the time was over.
    least: the least that the objective can be by these bounds.
    """

    kinds: Sequence[Kind]
    goal: Goal
    choices: Sequence[Choice]
    winner: int | None
    undecided: Sequence[int]
    ruled_out: int
    left: int
    least: float

    @property
    def best(self) -> Choice | None:
        """The recommended choice."""
        return None if self.winner is None else self.choices[self.winner]

    def value(self, choice: Choice) -> float:
        """The objective of a planned choice; infinite where it has no plan or breaks a rule."""
        if choice.seconds is None or not self.goal.allows(choice.per_hour, choice.seconds):
            return math.inf
        return self.goal.value(choice.devices, choice.per_hour, choice.seconds)

    def frontier(self) -> list[int]:
        """Indices of the planned choices that no other planned choice beats in cost and in time,
        the cheapest first."""
        rows = []
        for i, choice in enumerate(self.choices):
            if choice.seconds is not None:
                rows.append((choice.cost, choice.seconds, i))
        rows.sort()
        front: list[int] = []
        fastest = math.inf
        for _, seconds, i in rows:
            if seconds < fastest * (1 - ROUNDING):
                front.append(i)
                fastest = seconds
        return front


class Offers:
    """The nodes that can be had for a workload, with bounds and plans of choices among them."""

    def __init__(self, workload: Workload, moves: int = MOVES) -> None:
        """workload: on the cluster of all nodes that can be had."""
        self.workload, self.moves = workload, moves
        self.kinds = kinds_of(workload.cluster)
        self.modes: tuple[Recomputation, ...] = ("none", *useful_modes(workload))
        self.work = least_work(pose(workload, self.modes), [kind.node for kind in self.kinds])

    def choice(self, counts: Counts) -> Choice:
        """A choice with its bound."""
        devices = sum(n * kind.node.devices for n, kind in zip(counts, self.kinds, strict=True))
        per_hour: float | None = 0.0
        for n, kind in zip(counts, self.kinds, strict=True):
            if kind.price is None or per_hour is None:
                per_hour = None
            else:
                per_hour += n * kind.price
        return Choice(counts, devices, per_hour, self.bound(counts))

    def bound(self, counts: Counts) -> float:
        """Seconds that the devices of a choice compute at least; infinite without devices."""
        used = [k for k, n in enumerate(counts) if n > 0]
        if not used:
            return math.inf
        devices = [counts[k] * self.kinds[k].node.devices for k in used]
        return computing_alone(self.work[used], devices, Options())

    def planned(self, choice: Choice, run: Run) -> Choice:
        """The choice with the fastest plan that the local search finds for it. run: tells when to
        stop."""
        numbers = [
            number
            for n, kind in zip(choice.counts, self.kinds, strict=True)
            for number in kind.nodes[:n]
        ]
        name = choice_text(choice.counts, self.kinds)
        workload = on_part(self.workload, Part(name, tuple(sorted(numbers))))
        data, parameters = pose(workload, self.modes), Parameters(steps=self.moves)
        # A part of the run: the search's incumbents are seconds, those of `run` the goal's values.
        result = solve(family("joint"), data, "search", run.part(), parameters=parameters)
        if result.decision is None:
            return choice
        made = plan_of(data, result.decision).model_copy(update={"origin": "recommend"})
        plan = with_inputs(made, Inputs.of(workload))
        return replace(choice, seconds=result.objective, plan=plan)


def choice_text(counts: Counts, kinds: Sequence[Kind]) -> str:
    """A choice in words, such as `2 nodes of 4 x T4`."""
    parts = []
    for n, kind in zip(counts, kinds, strict=True):
        if n > 0:
            parts.append(f"{counted(n, 'node')} of {kind.name}")
    return ", ".join(parts)


def least_work(data: ReplayData, nodes: Sequence[Node]) -> Floats:
    """[kinds, layers] the fewest device-seconds that all samples of a layer take on the devices of
    each kind of node: over tensor degrees t that fit into a node and numbers of rows n, the least
    of t (forward + backward of n rows) / n, times the samples."""
    costs = Costs(data)
    work = np.full((len(nodes), len(data.layers)), math.inf)
    for k, node in enumerate(nodes):
        for tensor in data.tensor_degrees:
            if tensor > node.devices:
                continue
            for rows in range(1, data.global_batch + 1):
                forward, backward = costs.layer_seconds(node.device, tensor, rows)[:2]
                each = tensor * (np.asarray(forward) + np.asarray(backward)) / rows
                work[k] = np.minimum(work[k], each)
    return np.asarray(work * data.global_batch)


@dataclass(frozen=True)
class Searched:
    """The end of the branch and bound over choices; see the fields of `Recommendation`."""

    choices: list[Choice]
    winner: int | None
    undecided: list[int]
    left: int
    least: float


def recommend(
    most: Counts,
    goal: Goal,
    choice_of: Callable[[Counts], Choice],
    planned: Callable[[Choice], Choice],
    run: Run,
) -> Searched:
    """Branch and bound over choices, whose nodes are boxes of them.

    most: [kinds] nodes that can be had. choice_of: a choice with its bound. planned: a choice with
    its plan. run: when to stop.
    """
    choices: list[Choice] = []
    incumbent = Incumbent[int](run, gap=ROUNDING)  # the decision is the index of a choice
    open_boxes: dict[Box, float] = {}  # box -> its bound on the objective

    def bounded(low: Counts, high: Counts) -> Iterator[tuple[float, Box]]:
        """The box with its bound, unless it has no node or its bound breaks a rule."""
        cheapest, fastest = choice_of(low), choice_of(high)
        if any(high) and goal.allows(cheapest.per_hour, fastest.bound):
            bound = goal.value(cheapest.devices, cheapest.per_hour, fastest.bound)
            open_boxes[low, high] = bound
            yield bound, (low, high)

    def expand(box: Box, threshold: float) -> Expansion[Box]:
        """The halves of a box; a single choice is planned, and dropped with its own bound, because
        another plan may be better than the one that is found."""
        bound = open_boxes.pop(box)
        low, high = box
        if low != high:
            return Expansion([child for half in halves(low, high) for child in bounded(*half)])
        choice = planned(choice_of(low))
        choices.append(choice)
        if choice.seconds is not None and goal.allows(choice.per_hour, choice.seconds):
            value = goal.value(choice.devices, choice.per_hour, choice.seconds)
            incumbent.offer(value, len(choices) - 1)
        return Expansion(dropped_bound=bound)

    proof = search(bounded(tuple(0 for _ in most), most), expand, incumbent, run)
    winner = incumbent.decision
    undecided = []
    for i, choice in enumerate(choices):
        bound = goal.value(choice.devices, choice.per_hour, choice.bound)
        if i != winner and bound < incumbent.threshold:
            undecided.append(i)
    left = sum(size(*box) for box, bound in open_boxes.items() if bound < incumbent.threshold)
    least = math.inf if proof.bound is None else proof.bound
    return Searched(choices, winner, undecided, left, least)


def size(low: Counts, high: Counts) -> int:
    """The number of choices in a box; the one without nodes is none."""
    every = math.prod(upper - lower + 1 for lower, upper in zip(low, high, strict=True))
    return every if any(low) else every - 1


def frontier(
    most: Counts,
    choice_of: Callable[[Counts], Choice],
    planned: Callable[[Choice], Choice],
    stopped: Callable[[], bool] = lambda: False,
) -> list[Choice]:
    """Plans the choices that may be on the frontier of cost and time, the cheapest first.

    A box is left out where its bound is no faster than a plan that costs no more. most, choice_of,
    planned: as for `recommend`. stopped: whether the time is over.
    """
    number = count()
    choices: list[Choice] = []
    fastest = math.inf
    boxes: list[tuple[float, int, Counts, Counts]] = []

    def add(low: Counts, high: Counts) -> None:
        heapq.heappush(boxes, (choice_of(low).cost, next(number), low, high))

    add(tuple(0 for _ in most), most)
    while boxes and not stopped():
        _, _, low, high = heapq.heappop(boxes)
        if choice_of(high).bound >= fastest * (1 - ROUNDING):
            continue
        if low != high:
            for part in halves(low, high):
                add(*part)
            continue
        choice = planned(choice_of(low))
        choices.append(choice)
        if choice.seconds is not None:
            fastest = min(fastest, choice.seconds)
    return choices


def halves(low: Counts, high: Counts) -> Iterator[tuple[Counts, Counts]]:
    """The two halves of a box, across the kind with the most counts."""
    widths = [upper - lower for lower, upper in zip(low, high, strict=True)]
    k = widths.index(max(widths))
    middle = (low[k] + high[k]) // 2
    yield low, (*high[:k], middle, *high[k + 1 :])
    yield (*low[:k], middle + 1, *low[k + 1 :]), high


def recommendation(
    workload: Workload,
    goal: Goal,
    run: Run | None = None,
    *,
    moves: int = MOVES,
    whole_frontier: bool = False,
) -> Recommendation:
    """The recommended nodes for a workload.

    workload: on the cluster of all nodes that can be had. run: its time limit is for everything.
    moves: of the local search for each choice. whole_frontier: whether all choices that may be on
    the frontier of cost and time are planned, too. Raises InputError where a price that counts is
    unknown, or there are too many choices.
    """
    run = run or Run()
    offers = Offers(workload, moves)
    goal.check(offers.kinds)
    most = tuple(kind.most for kind in offers.kinds)
    every = math.prod(n + 1 for n in most) - 1
    require(
        every <= MOST_CHOICES,
        "too many choices",
        where=workload.cluster.name,
        got=every,
        expected=f"at most {MOST_CHOICES}",
    )
    choice_of = cache(offers.choice)
    plans: dict[Counts, Choice] = {}

    def planned(choice: Choice) -> Choice:
        if choice.counts not in plans:
            plans[choice.counts] = offers.planned(choice, run)
            run.report(note=f"{len(plans)} of {every} choices planned")
        return plans[choice.counts]

    searched = recommend(most, goal, choice_of, planned, run)
    choices = searched.choices
    ruled_out = every - len(choices) - searched.left
    if whole_frontier:
        looked_at = {choice.counts for choice in choices}
        for choice in frontier(most, choice_of, planned, lambda: run.should_stop):
            if choice.counts not in looked_at:
                choices.append(choice)
    return Recommendation(
        kinds=offers.kinds,
        goal=goal,
        choices=choices,
        winner=searched.winner,
        undecided=searched.undecided,
        ruled_out=ruled_out,
        left=searched.left,
        least=searched.least,
    )


def document_of(answer: Recommendation, workload: Workload) -> dict[str, Any]:
    """The answer as JSON types."""

    def row(choice: Choice) -> dict[str, Any]:
        counts = dict(zip([kind.name for kind in answer.kinds], choice.counts, strict=True))
        seconds, speed, total = choice.seconds, None, None
        if seconds is not None:
            speed = workload.tokens_per_iteration / seconds
        if seconds is not None and choice.per_hour is not None and answer.goal.iterations:
            total = answer.goal.dollars(choice.per_hour, seconds)
        return {
            "nodes": counts,
            "devices": choice.devices,
            "price_per_hour": choice.per_hour,
            "bound_seconds": choice.bound,
            "seconds": seconds,
            "tokens_per_second": speed,
            "money": total,
            "meets_target": seconds is not None and answer.goal.allows(choice.per_hour, seconds),
        }

    return {
        "model": workload.model.name,
        "least": answer.goal.least,
        "choices": [row(choice) for choice in answer.choices],
        "winner": answer.winner,
        "undecided": list(answer.undecided),
        "ruled_out": answer.ruled_out,
        "left": answer.left,
        "least_value": None if answer.least == math.inf else answer.least,
        "frontier": answer.frontier(),
    }
