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
have a faster plan than the one that is found, down to its bound. So the least value that is proven
for all choices is the least value that their bounds allow. Planned choices whose bounds are better
than the winner are reported as undecided.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        """The number of nodes of this kind that can be had."""
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
    """The target that a user sets."""

    # The quantity of which the winner has least. `money` is dollars of all iterations where their
    # number is known, else dollars per hour.
    least: Least
    seconds: float = math.inf  # the most that an iteration may take
    iterations: float | None = None  # iterations of the whole training; None: unknown
    budget: float = math.inf  # the most dollars for all iterations

    def dollars(self, per_hour: float | None, seconds: float) -> float:
        """Dollars of the whole training where the number of iterations is known, else per hour; 0
        where no price is known, which `check` refuses if money counts.

        per_hour: price of the choice. seconds: seconds of an iteration.
        """
        if per_hour is None:
            return 0.0
        if self.iterations is None:
            return per_hour
        # The choice without nodes, which begins the first box, costs nothing and takes infinitely
        # long; 0 times infinity is no number.
        if per_hour == 0:
            return 0.0
        return per_hour * (seconds * self.iterations / HOUR)

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
    # seconds of an iteration of the plan; None: no plan was found that fits
    seconds: float | None = None
    plan: Plan | None = None

    @property
    def cost(self) -> float:
        """The cost of a choice on the frontier of cost and time: dollars per hour, or where a price
        is unknown the number of devices."""
        return float(self.devices) if self.per_hour is None else self.per_hour


@dataclass(frozen=True)
class Recommendation:
    """The recommended choice, all other choices that were planned, and what bounds prove."""

    kinds: Sequence[Kind]
    goal: Goal
    choices: Sequence[Choice]  # the planned choices, in the order in which they were planned
    winner: int | None  # index of the best choice; None where no planned choice meets the target
    # Indices of planned choices that the bounds allow to be better than the winner, although the
    # plans that were found for them are not better.
    undecided: Sequence[int]
    ruled_out: int  # number of choices that bounds alone ruled out
    left: int  # number of choices neither planned nor ruled out before the run had to stop
    least: float  # the least value of the objective that the bounds allow for any choice
    cut: bool = False  # whether the time limit ended the run before its budget was used up

    @property
    def best(self) -> Choice | None:
        """The recommended choice."""
        return None if self.winner is None else self.choices[self.winner]

    def meets_target(self, choice: Choice) -> bool:
        """Whether a plan was found for a choice, and keeps the rules."""
        return choice.seconds is not None and self.goal.allows(choice.per_hour, choice.seconds)

    def value(self, choice: Choice) -> float:
        """The objective of a planned choice; infinite where it has no plan or breaks a rule."""
        if choice.seconds is None or not self.meets_target(choice):
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


class AvailableNodes:
    """The nodes that can be had for a workload, with bounds and plans of choices among them."""

    def __init__(self, workload: Workload, moves: int = MOVES) -> None:
        """workload: a workload whose cluster has all nodes that can be had."""
        self.workload, self.moves = workload, moves
        self.kinds = kinds_of(workload.cluster)
        self.modes: tuple[Recomputation, ...] = ("none", *useful_modes(workload))
        nodes = [kind.node for kind in self.kinds]
        # [kinds, layers] device-seconds
        self.least_work = least_work(pose(workload, self.modes), nodes)

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
        return computing_alone(self.least_work[used], devices, Options())

    def planned(self, choice: Choice, run: Run) -> Choice:
        """The choice with the fastest plan that the local search finds for it. run: says when the
        search has to stop."""
        numbers: list[int] = []  # of the nodes, in the cluster of all nodes that can be had
        for n, kind in zip(choice.counts, self.kinds, strict=True):
            numbers += kind.nodes[:n]
        name = choice_text(choice.counts, self.kinds)
        workload = on_part(self.workload, Part(name, tuple(sorted(numbers))))
        data = pose(workload, self.modes)
        parameters = Parameters(steps=self.moves)
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
class SearchResult:
    """The end of the branch and bound over choices. `Recommendation` explains the fields."""

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
) -> SearchResult:
    """Branch and bound over choices, whose nodes are boxes of them.

    most: [kinds] nodes that can be had. choice_of: gives a choice with its bound. planned: gives
    the choice with its plan. run: says when the search has to stop.
    """
    choices: list[Choice] = []
    incumbent = Incumbent[int](run, gap=ROUNDING)  # the decision is the index of a choice
    open_boxes: dict[Box, float] = {}  # box -> its bound on the objective

    def opened(boxes: Iterable[Box]) -> list[tuple[float, Box]]:
        """(bound, box) of each box that has nodes and whose bound breaks no rule. These boxes are
        noted in `open_boxes`."""
        bounded: list[tuple[float, Box]] = []
        for low, high in boxes:
            cheapest = choice_of(low)
            fastest = choice_of(high)
            if any(high) and goal.allows(cheapest.per_hour, fastest.bound):
                bound = goal.value(cheapest.devices, cheapest.per_hour, fastest.bound)
                open_boxes[low, high] = bound
                bounded.append((bound, (low, high)))
        return bounded

    def expand(box: Box, threshold: float) -> Expansion[Box]:
        """The halves of a box. A box of a single choice has none: the choice is planned, and the
        box dropped with its own bound, because another plan may be better than the one that is
        found."""
        bound = open_boxes.pop(box)
        low, high = box
        if low != high:
            return Expansion(opened(halves(low, high)))
        choice = planned(choice_of(low))
        choices.append(choice)
        if choice.seconds is not None and goal.allows(choice.per_hour, choice.seconds):
            value = goal.value(choice.devices, choice.per_hour, choice.seconds)
            incumbent.offer(value, len(choices) - 1)
        return Expansion(dropped_bound=bound)

    all_choices: Box = ((0,) * len(most), most)
    proof = search(opened([all_choices]), expand, incumbent, run)
    winner = incumbent.decision
    undecided = []
    for i, choice in enumerate(choices):
        bound = goal.value(choice.devices, choice.per_hour, choice.bound)
        if i != winner and bound < incumbent.threshold:
            undecided.append(i)
    left = sum(size(*box) for box, bound in open_boxes.items() if bound < incumbent.threshold)
    least = math.inf if proof.bound is None else proof.bound
    return SearchResult(choices, winner, undecided, left, least)


def size(low: Counts, high: Counts) -> int:
    """The number of choices in a box, without the one that has no nodes."""
    number = math.prod(upper - lower + 1 for lower, upper in zip(low, high, strict=True))
    return number if any(low) else number - 1


def frontier(
    most: Counts,
    choice_of: Callable[[Counts], Choice],
    planned: Callable[[Choice], Choice],
    stopped: Callable[[], bool] = lambda: False,
) -> list[Choice]:
    """Plans the choices that may be on the frontier of cost and time, the cheapest first.

    A box is left out where its bound is no faster than a plan that costs no more. most, choice_of,
    planned: see `recommend`. stopped: says whether the time is over.
    """
    number = count()
    choices: list[Choice] = []
    fastest = math.inf
    boxes: list[tuple[float, int, Counts, Counts]] = []

    def add(low: Counts, high: Counts) -> None:
        heapq.heappush(boxes, (choice_of(low).cost, next(number), low, high))

    add((0,) * len(most), most)
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

    workload: a workload whose cluster has all nodes that can be had. run: its budget and its time
    limit are for everything. moves: moves of the local search for each choice. whole_frontier:
    whether all choices that may be on the frontier of cost and time are planned, too. Raises
    InputError where a price that counts is unknown, or there are too many choices.
    """
    run = run or Run()
    nodes = AvailableNodes(workload, moves)
    goal.check(nodes.kinds)
    most = tuple(kind.most for kind in nodes.kinds)
    number_of_choices = size((0,) * len(most), most)
    require(
        number_of_choices <= MOST_CHOICES,
        "too many choices",
        where=workload.cluster.name,
        got=number_of_choices,
        expected=f"at most {MOST_CHOICES}",
    )
    choice_of = cache(nodes.choice)
    plans: dict[Counts, Choice] = {}

    def planned(choice: Choice) -> Choice:
        if choice.counts not in plans:
            plans[choice.counts] = nodes.planned(choice, run)
            run.report(note=f"{len(plans)} of {number_of_choices} choices planned")
        return plans[choice.counts]

    searched = recommend(most, goal, choice_of, planned, run)
    choices = searched.choices
    ruled_out = number_of_choices - len(choices) - searched.left
    if whole_frontier:
        looked_at = {choice.counts for choice in choices}
        for choice in frontier(most, choice_of, planned, lambda: run.should_stop):
            if choice.counts not in looked_at:
                choices.append(choice)
    return Recommendation(
        kinds=nodes.kinds,
        goal=goal,
        choices=choices,
        winner=searched.winner,
        undecided=searched.undecided,
        ruled_out=ruled_out,
        left=searched.left,
        least=searched.least,
        cut=run.cut,
    )


def document_of(answer: Recommendation, workload: Workload) -> dict[str, Any]:
    """The answer as JSON types."""

    def row(choice: Choice) -> dict[str, Any]:
        counts = dict(zip([kind.name for kind in answer.kinds], choice.counts, strict=True))
        seconds = choice.seconds
        speed = None
        money = None
        if seconds is not None:
            speed = workload.tokens_per_iteration / seconds
            if choice.per_hour is not None and answer.goal.iterations:
                money = answer.goal.dollars(choice.per_hour, seconds)
        return {
            "nodes": counts,
            "devices": choice.devices,
            "price_per_hour": choice.per_hour,
            "bound_seconds": choice.bound,
            "seconds": seconds,
            "tokens_per_second": speed,
            "money": money,
            "meets_target": answer.meets_target(choice),
        }

    return {
        "model": workload.model.name,
        "least": answer.goal.least,
        "choices": [row(choice) for choice in answer.choices],
        "winner": answer.winner,
        "undecided": list(answer.undecided),
        "ruled_out": answer.ruled_out,
        "left": answer.left,
        "cut": answer.cut,
        "least_value": None if answer.least == math.inf else answer.least,
        "frontier": answer.frontier(),
    }
