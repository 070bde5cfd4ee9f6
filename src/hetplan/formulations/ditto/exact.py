"""Method `exact`: branch and bound over θ, the time of the slowest stage.

A node is an interval of θ. It is bounded by prices of devices (`intervals`), divided while it is
wide, and then its templates are sought by label setting (`Parts`), which for a single θ is exact.
The labels of least bound are kept first; where some had to be cut, the interval is divided, and a
single θ is searched again with more of them.

Source: hetplan; the objective is Oobleck's (SOSP 2023, Section 4.1.2), the problem Ditto's (Section
3).

Lemma 5. A label makes another of its bucket and phase superfluous if it costs no more and has as
many devices of each kind and, where memory or N_b make stages count, as many stages. Whatever is
put in front of the second can be put in front of the first, since memory in front depends on the
stages behind and costs are sums.

Theorem. At any time the least bound among open and dropped intervals is a lower bound, and where
none is below the incumbent, that is optimal. θ of an optimal template is a stage time, hence a
candidate; the intervals part the candidates; their bounds hold by Lemmas 2 to 4 of `intervals`, and
a single θ of which no label was cut is closed exactly. Below the least θ under which stages reach
from the first layer to the last there is no template.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from hetplan.formulations.ditto.data import DittoData, DittoDecision
from hetplan.formulations.ditto.intervals import CuttingPlanes, Priced, Space, best_prices
from hetplan.formulations.ditto.problem import (
    DittoProblem,
    Floats,
    Stages,
    compile_problem,
    infeasible_because,
)
from hetplan.solvers import branch_and_bound, labels
from hetplan.solvers.branch_and_bound import Expansion, Incumbent, Proof
from hetplan.solvers.highs import check_native
from hetplan.solvers.labels import Extensions, Labels, Numbers
from hetplan.solvers.run import Options, Outcome, Run, Stop

NONE_FITS = "no template fits in memory"
CUT = "a single θ takes more labels than memory allows, which leaves a gap"


@dataclass(frozen=True)
class Parameters:
    """The effort of the search; chosen on the packaged instances and on those of
    evidence/speed/ditto.py."""

    # How hard prices are sought.
    planes: CuttingPlanes = field(default_factory=CuttingPlanes)
    # Intervals up to this ratio of their ends are searched by labels. Prices alone settle most
    # wider ones, and labels of narrow ones are fewer.
    narrow: float = 1.02
    # Labels kept per bucket at first, and how many times more when a single θ is searched again.
    width: int = 3000
    widen: int = 8
    # Labels per bucket at most: some 60 bytes each, and as many buckets as layers.
    most_width: int = 500_000
    # The first template is sought in narrow intervals so far apart, with so few labels.
    first_apart: float = 1.3
    first_width: int = 200
    # Proofs go deeper than the gap asked for by this factor, so that methods agree to that gap.
    depth: float = 0.1


@dataclass(frozen=True)
class ThetaInterval:
    """The templates whose θ, the slowest stage's time, is among some candidates."""

    first: int  # numbers of the candidates, both included
    last: int
    width: int  # labels per bucket


@dataclass
class TemplateSearch:
    """The search of one problem; the incumbent holds the best template."""

    problem: DittoProblem
    run: Run
    parameters: Parameters = Parameters()
    counts: dict[str, int] = field(
        default_factory=lambda: {"intervals": 0, "searched": 0, "labels": 0}
    )

    def __post_init__(self) -> None:
        self.space = Space(self.problem)
        self.incumbent = Incumbent[Stages](self.run, self.run.options.gap * self.parameters.depth)

    def solve(self) -> Proof:
        """The best template and its proof, or what there is when the run stops."""
        least = self.space.least_theta()
        if least is None:
            return Proof(bound=None, finished=True, proven=True, empty=True, expanded=0)
        self.find_first(least)
        whole = ThetaInterval(least, len(self.space.candidates) - 1, self.parameters.width)
        return branch_and_bound.search([(-math.inf, whole)], self.expand, self.incumbent, self.run)

    def find_first(self, least: int) -> None:
        """A first template, of about the least θ that has one; nothing stops it."""
        calm = replace(self, run=Run(replace(self.run.options, time_limit=None)))
        calm.incumbent = self.incumbent
        for node in calm.first_nodes(least):
            priced = calm.price(node, math.inf)
            if math.isfinite(priced.bound):
                calm.label(node, priced)
            if self.incumbent.decision is not None:
                return

    def first_nodes(self, least: int) -> Iterator[ThetaInterval]:
        """Narrow intervals, the least θ first."""
        values, parameters = self.space.candidates, self.parameters
        while least < len(values):
            last = np.searchsorted(values, values[least] * parameters.narrow, side="right")
            yield ThetaInterval(least, max(least, int(last) - 1), parameters.first_width)
            apart = np.searchsorted(values, values[least] * parameters.first_apart, side="right")
            least = max(least + 1, int(apart))

    def expand(self, node: ThetaInterval, threshold: float) -> Expansion[ThetaInterval]:
        """Bound an interval, search it if it is narrow, and divide it if that does not settle
        it."""
        low, high = self.ends(node)
        priced = self.price(node, threshold)
        if priced.bound >= self.incumbent.threshold:
            return Expansion(dropped_bound=priced.bound)
        single = node.first == node.last
        if not single and high > low * self.parameters.narrow:
            return Expansion([(priced.bound, part) for part in self.parts(node, high)])
        reached, cut, longest = self.label(node, priced)
        bound = max(priced.bound, min(reached, cut))
        if bound >= self.incumbent.threshold:
            return Expansion(dropped_bound=bound)
        if not single:
            return Expansion([(bound, part) for part in self.parts(node, longest)])
        if math.isinf(cut):  # the best template of this θ has been offered
            return Expansion(dropped_bound=self.incumbent.threshold)
        if node.width >= self.parameters.most_width:
            return Expansion(dropped_bound=bound)
        wider = min(node.width * self.parameters.widen, self.parameters.most_width)
        return Expansion([(bound, replace(node, width=wider))])

    def price(self, node: ThetaInterval, threshold: float) -> Priced:
        """The interval at its best prices."""
        low, high = self.ends(node)
        self.counts["intervals"] += 1
        return best_prices(
            self.space, self.space.arcs(low, high), self.space.charge(low),
            min(threshold, self.incumbent.threshold), self.parameters.planes, self.run,
        )  # fmt: skip

    def label(self, node: ThetaInterval, priced: Priced) -> tuple[float, float, float]:
        """(Least cost as charged, least bound cut off, longest stage of the cheapest path)."""
        parts = Parts(self.space, priced)
        labelled = labels.set_labels(
            parts, parts.root(), range(self.problem.layers, -1, -1), self.run,
            threshold=lambda: self.incumbent.threshold,
            limits=labels.LabelLimits(node.width), path_fields=["first", "option"],
        )  # fmt: skip
        self.counts["searched"] += 1
        self.counts["labels"] += labelled.count
        if not len(labelled.last):
            return math.inf, labelled.cut_bound, self.ends(node)[1]
        cheapest = labelled.last[labelled.last["cost"].argmin()]
        stages = parts.stages(labelled.path(cheapest))
        self.offer(stages)
        longest = max(float(self.problem.time[r, a, b]) for a, b, r in stages)
        return float(cheapest["cost"]), labelled.cut_bound, longest

    def offer(self, stages: Stages) -> None:
        """Stages that keep to layers and devices: an incumbent if they are a good template."""
        if self.problem.accepts(stages):
            self.incumbent.offer(self.problem.price(stages), stages)

    def parts(self, node: ThetaInterval, longest: float) -> tuple[ThetaInterval, ThetaInterval]:
        """Two intervals, the second from the longest stage of a path on, or from the middle.

        The path is excluded from the first part, and priced truly in the second.
        """
        low, high = self.ends(node)
        middle = math.sqrt(low * high) if low > 0 else high / 2
        at = min(longest, middle) if longest > low else middle
        number = int(np.searchsorted(self.space.candidates, at))
        number = min(max(number, node.first + 1), node.last)
        return replace(node, last=number - 1), replace(node, first=number)

    def ends(self, node: ThetaInterval) -> tuple[float, float]:
        """The interval in seconds."""
        values = self.space.candidates
        return float(values[node.first]), float(values[node.last])


def solve(
    data: DittoData, run: Run, parameters: Parameters = Parameters()
) -> Outcome[DittoDecision]:
    """The proven optimum; at the time limit the best template found and a proven bound."""
    check_native(run.options)
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    search = TemplateSearch(problem, run, parameters)
    proof = search.solve()
    stop, message = proof.verdict(run, NONE_FITS, CUT)
    stages = search.incumbent.decision
    return Outcome(
        stop=stop,
        decision=None if stages is None else problem.decision(stages),
        bound=proof.bound,
        message=message,
        details=search.counts,
    )


def first_template(problem: DittoProblem, options: Options) -> Stages | None:
    """A good template at once, a start for other methods; None where none is at hand. options: for
    HiGHS; their time limit is not for this."""
    search = TemplateSearch(problem, Run(replace(options, time_limit=None)))
    least = search.space.least_theta()
    if least is not None:
        search.find_first(least)
    return search.incumbent.decision


class Parts:
    """The labels of one interval as it is charged; see `solvers.labels.LabelRules`."""

    def __init__(self, space: Space, priced: Priced) -> None:
        self.space, self.priced = space, priced
        p, arcs = space.problem, priced.arcs
        self.kind, self.size = p.option_kind[arcs.option], p.option_devices[arcs.option]
        # what a label needs to be completed at best, besides its own cost and devices
        self.ahead: Floats = (
            priced.costs + priced.prices[self.kind] * self.size - priced.prices @ space.devices
        )

    def root(self) -> Labels:
        """The one label that covers no layer."""
        fields = [
            ("bound", "f8"), ("parent", "i8"), ("cost", "f8"),
            ("used", "i4", len(self.space.devices)), ("stages", "i4"), ("phase", "i1"),
            ("first", "i4"), ("option", "i4"),
        ]  # fmt: skip
        root = np.zeros(1, dtype=fields)
        root["parent"], root["bound"] = -1, self.priced.bound
        root["first"] = self.space.problem.layers
        return root

    def stages(self, path: list[Any]) -> Stages:
        """The stages of a label's path, the first stage first."""
        return [
            (int(label["first"]), int(behind["first"]), int(label["option"]))
            for label, behind in pairwise(path)
        ]

    def extend(self, bucket: int, labels: Labels, limit: float) -> Iterator[Extensions]:
        """One stage more in front of each label, [arcs, labels]."""
        space, arcs, front = self.space, self.priced.arcs, self.priced.front
        few = slice(*arcs.of_end[bucket : bucket + 2])
        first, after, kind, size = arcs.first[few], arcs.after[few], self.kind[few], self.size[few]
        score = labels["cost"] + labels["used"] @ self.priced.prices
        if space.limited:
            left = space.problem.micro_batches - 1 - labels["stages"]
            rest = np.where(left >= 0, front[left, after[:, None], first[:, None]], np.inf)
        else:
            rest = front[0, after, first][:, None]
        bound = self.ahead[few][:, None] + rest + score
        allowed = bound < limit
        allowed &= labels["phase"] == arcs.before[few][:, None]
        allowed &= labels["used"].T[kind] + size[:, None] <= space.devices[kind][:, None]
        if space.problem.has_memory:
            allowed &= labels["stages"] <= arcs.behind[few][:, None]
        arc, label = np.nonzero(allowed)
        if not len(arc):
            return
        children = labels[label]
        children["bound"] = bound[arc, label]
        children["cost"] += self.priced.costs[few][arc]
        children["used"][np.arange(len(arc)), kind[arc]] += size[arc].astype(np.int32)
        children["stages"] += 1
        children["phase"], children["first"] = after[arc], first[arc]
        children["option"] = arcs.option[few][arc]
        whole = children["first"] == 0  # devices left over are worth nothing
        children["bound"][whole] = children["cost"][whole]
        yield Extensions(children, label, first[arc])

    def undominated(self, bucket: int, labels: Labels) -> Numbers:
        """The cheapest label of each phase and combination of devices, and of stages where their
        number matters."""
        axes = [labels["phase"], *labels["used"].T]
        if self.space.counted:
            axes.append(labels["stages"])
        key = np.stack(axes)
        order = np.lexsort((labels["cost"], *key))
        differs = (np.diff(key[:, order], axis=1) != 0).any(axis=0)
        cheapest: Numbers = order[np.append(True, differs)[: len(order)]]
        return cheapest
