"""Method `exact`: branch and bound over θ, the time of the slowest stage.

A node of the search is an interval of θ. Prices of devices bound its templates (`intervals`). A
wide interval is divided. In a narrow one templates are built by label setting (`Parts`): a label
stands for the stages that cover the last layers. Each bucket keeps a limited number of labels,
those of least bound. If none had to be cut, label setting is exact for a single θ. If some were, a
longer interval is divided, and a single θ is searched again with a larger limit.

Source: hetplan; the objective is Oobleck's (SOSP 2023, Section 4.1.2), the problem Ditto's (Section
3).

Lemma 5. A label dominates another one of its bucket and phase (`intervals`) if it costs no more,
uses equally many devices of each kind and, where memory or N_b limit the stages, has equally many
stages. Stages that can be put in front of the second can be put in front of the first: their memory
depends on the number of stages behind them, and costs are sums.

Theorem. At any time the least bound among open and dropped intervals is a lower bound on T. Where
it is not below the incumbent, the incumbent is optimal. For the θ of an optimal template is a stage
time, hence a candidate, and the intervals partition the candidates. The bounds of intervals hold by
Lemmas 2 to 4 of `intervals`, and a single θ of which no label was cut is closed exactly. No
template has a θ below the least one under which stages reach from the first layer to the last.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

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

    # effort of the prices of an interval
    planes: CuttingPlanes = field(default_factory=CuttingPlanes)
    # Intervals whose ends have at most this ratio are searched by labels. Prices alone settle most
    # wider ones, and narrow ones have fewer labels.
    narrow: float = 1.02
    width: int = 3000  # labels that a bucket keeps at first
    widen: int = 8  # factor of this limit when a single θ is searched again
    # Labels that a bucket keeps at most. A label takes some 60 bytes, and each layer has a bucket.
    most_width: int = 500_000
    # The first template is sought in narrow intervals whose ends differ by this factor from one to
    # the next, and with this limit of labels.
    first_apart: float = 1.3
    first_width: int = 200
    # The gap of the search is this share of the gap asked for, so that methods agree to that gap.
    depth: float = 0.1


@dataclass(frozen=True)
class ThetaInterval:
    """A node of the search: the templates whose θ is one of consecutive candidates."""

    first: int  # number of the least candidate
    last: int  # number of the greatest candidate
    width: int  # labels that a bucket keeps


class Labelled(NamedTuple):
    """The end of label setting in one interval."""

    least_cost: float  # seconds, as charged in the interval; infinite where no template was built
    cut_bound: float  # seconds, the least bound of a label that was cut; infinite where none was
    # seconds of the longest stage of the template of least cost; the interval's greatest θ where no
    # template was built
    longest: float


@dataclass
class TemplateSearch:
    """The search of one problem. Its incumbent has the best template so far."""

    problem: DittoProblem
    run: Run
    parameters: Parameters = Parameters()
    # Intervals bounded, intervals searched by labels, and labels kept.
    counts: dict[str, int] = field(
        default_factory=lambda: {"intervals": 0, "searched": 0, "labels": 0}
    )

    def __post_init__(self) -> None:
        self.space = Space(self.problem)
        self.incumbent = Incumbent[Stages](self.run, self.run.options.gap * self.parameters.depth)

    def solve(self) -> Proof:
        """The proof of the search. The incumbent then has the best template, or the best so far
        when the run stops."""
        least = self.space.least_theta()
        if least is None:
            return Proof(bound=None, finished=True, proven=True, empty=True, expanded=0)
        self.find_first(least)
        whole = ThetaInterval(least, len(self.space.candidates) - 1, self.parameters.width)
        return branch_and_bound.search([(-math.inf, whole)], self.expand, self.incumbent, self.run)

    def find_first(self, least: int) -> None:
        """Offer the incumbent a first template, of about the least θ that has one.

        Neither the time limit nor the user stops this. least: the number of the least candidate.
        """
        unstopped = replace(self, run=Run(replace(self.run.options, time_limit=None)))
        unstopped.incumbent = self.incumbent  # `replace` has made another one
        for node in unstopped.first_nodes(least):
            priced = unstopped.price(node, math.inf)
            if math.isfinite(priced.bound):
                unstopped.label(node, priced)
            if self.incumbent.decision is not None:
                return

    def first_nodes(self, least: int) -> Iterator[ThetaInterval]:
        """Narrow intervals in which a first template is sought, that of the least θ first.

        least: the number of the least candidate.
        """
        parameters = self.parameters
        while least < len(self.space.candidates):
            last = self._last_within(least, parameters.narrow)
            yield ThetaInterval(least, last, parameters.first_width)
            least = self._last_within(least, parameters.first_apart) + 1

    def _last_within(self, number: int, ratio: float) -> int:
        """The number of the last candidate that is at most `ratio` times candidate `number`."""
        values = self.space.candidates
        after = np.searchsorted(values, values[number] * ratio, side="right")
        return max(number, int(after) - 1)

    def expand(self, node: ThetaInterval, threshold: float) -> Expansion[ThetaInterval]:
        """The expansion of an interval, which is bounded, searched if it is narrow, and divided if
        that does not close it."""
        low, high = self.ends(node)
        priced = self.price(node, threshold)
        # the incumbent's own threshold from here on: it falls when `label` offers a template
        if priced.bound >= self.incumbent.threshold:
            return Expansion(dropped_bound=priced.bound)
        single = node.first == node.last
        if not single and high > low * self.parameters.narrow:
            return Expansion([(priced.bound, part) for part in self.parts(node, high)])
        least_cost, cut_bound, longest = self.label(node, priced)
        # templates that were neither built nor cut are dominated, or reach the threshold
        bound = max(priced.bound, min(least_cost, cut_bound))
        if bound >= self.incumbent.threshold:
            return Expansion(dropped_bound=bound)
        if not single:
            return Expansion([(bound, part) for part in self.parts(node, longest)])
        if math.isinf(cut_bound):  # the best template of this θ has been offered
            return Expansion(dropped_bound=self.incumbent.threshold)
        if node.width >= self.parameters.most_width:
            return Expansion(dropped_bound=bound)
        wider = min(node.width * self.parameters.widen, self.parameters.most_width)
        return Expansion([(bound, replace(node, width=wider))])

    def price(self, node: ThetaInterval, threshold: float) -> Priced:
        """The interval with the best prices of devices, or with prices whose bound reaches the
        threshold."""
        low, high = self.ends(node)
        self.counts["intervals"] += 1
        return best_prices(
            self.space,
            self.space.arcs(low, high),
            self.space.charge(low),
            min(threshold, self.incumbent.threshold),
            self.parameters.planes,
            self.run,
        )

    def label(self, node: ThetaInterval, priced: Priced) -> Labelled:
        """The end of label setting in an interval. The template of least cost is offered to the
        incumbent."""
        parts = Parts(self.space, priced)
        kept = labels.set_labels(
            parts,
            parts.root(),
            range(self.problem.layers, -1, -1),
            self.run,
            threshold=lambda: self.incumbent.threshold,
            limits=labels.LabelLimits(node.width),
            path_fields=["first", "option"],
        )
        self.counts["searched"] += 1
        self.counts["labels"] += kept.count
        if not len(kept.last):
            _, high = self.ends(node)
            return Labelled(math.inf, kept.cut_bound, high)
        cheapest = kept.last[kept.last["cost"].argmin()]
        stages = parts.stages(kept.path(cheapest))
        self.offer(stages)
        longest = max(float(self.problem.time[r, a, b]) for a, b, r in stages)
        return Labelled(float(cheapest["cost"]), kept.cut_bound, longest)

    def offer(self, stages: Stages) -> None:
        """Offer the incumbent stages that keep to layers and devices, if they also keep to
        micro-batches and memory."""
        if self.problem.accepts(stages):
            self.incumbent.offer(self.problem.price(stages), stages)

    def parts(self, node: ThetaInterval, longest: float) -> tuple[ThetaInterval, ThetaInterval]:
        """The two parts of an interval, cut at the longest stage of a template or at the middle.

        The cut is at the lesser of the two. The template is then not in the first part. If the cut
        is at its longest stage, its cost in the second part is its true cost.

        longest: seconds of the template's longest stage.
        """
        low, high = self.ends(node)
        # the geometric mean, because the ratio of its ends tells whether an interval is narrow
        middle = math.sqrt(low * high) if low > 0 else high / 2
        cut = min(longest, middle) if longest > low else middle
        number = int(np.searchsorted(self.space.candidates, cut))
        number = min(max(number, node.first + 1), node.last)  # neither part is empty
        return replace(node, last=number - 1), replace(node, first=number)

    def ends(self, node: ThetaInterval) -> tuple[float, float]:
        """(least, greatest candidate) of the interval, in seconds."""
        values = self.space.candidates
        return float(values[node.first]), float(values[node.last])


def solve(
    data: DittoData, run: Run, parameters: Parameters = Parameters()
) -> Outcome[DittoDecision]:
    """The proven optimum; at the time limit the best template so far and a proven bound."""
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
    """A good template without a search, as a start for other methods; None where none is built.

    options: options of HiGHS. Their time limit does not apply.
    """
    search = TemplateSearch(problem, Run(replace(options, time_limit=None)))
    least = search.space.least_theta()
    if least is not None:
        search.find_first(least)
    return search.incumbent.decision


class Parts:
    """The rules of label setting in one interval (`solvers.labels.LabelRules`).

    A label is a part of a template: stages that cover the layers from `first` to the last. Its
    bucket is `first`.
    """

    def __init__(self, space: Space, priced: Priced) -> None:
        self.space, self.priced = space, priced
        p, arcs = space.problem, priced.arcs
        # [arcs] the kind and the number of devices of each stage
        self.kind, self.size = p.option_kind[arcs.option], p.option_devices[arcs.option]
        # [arcs] seconds that a stage adds to a label's bound: its cost and the price of its
        # devices, less the price of all devices (Lemma 4)
        with_devices = priced.costs + priced.prices[self.kind] * self.size
        self.stage_bound: Floats = with_devices - priced.prices @ space.devices

    def root(self) -> Labels:
        """The label that covers no layer, as an array of one label."""
        fields = [
            ("bound", "f8"),  # seconds, a lower bound on T of its templates
            ("parent", "i8"),  # the label that it extends by a stage
            ("cost", "f8"),  # seconds that its stages are charged
            ("used", "i4", len(self.space.devices)),  # [K] devices of its stages
            ("stages", "i4"),  # the number of its stages
            ("phase", "i1"),  # 1 if it has the slowest stage
            ("first", "i4"),  # the first layer that it covers
            ("option", "i4"),  # the option of its first stage
        ]
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
        """The labels of a bucket, each extended by every stage that may come in front of it."""
        space, arcs, front = self.space, self.priced.arcs, self.priced.front
        ending_here = slice(*arcs.of_end[bucket : bucket + 2])
        first, after = arcs.first[ending_here], arcs.after[ending_here]
        kind, size = self.kind[ending_here], self.size[ending_here]
        label_bound = labels["cost"] + labels["used"] @ self.priced.prices  # [labels]
        if space.limited:
            stages_left = space.problem.micro_batches - 1 - labels["stages"]
            front_bound = front[stages_left, after[:, None], first[:, None]]
            # a negative number counted rows from the end: no stage may follow such a label
            front_bound = np.where(stages_left >= 0, front_bound, np.inf)  # [arcs, labels]
        else:
            front_bound = front[0, after, first][:, None]  # [arcs, 1]
        bound = self.stage_bound[ending_here][:, None] + front_bound + label_bound
        allowed = bound < limit  # [arcs, labels]
        allowed &= labels["phase"] == arcs.before[ending_here][:, None]
        allowed &= labels["used"].T[kind] + size[:, None] <= space.devices[kind][:, None]
        if space.problem.has_memory:
            allowed &= labels["stages"] <= arcs.behind[ending_here][:, None]
        arc, label = np.nonzero(allowed)
        if not len(arc):
            return
        children = labels[label]
        children["bound"] = bound[arc, label]
        children["cost"] += self.priced.costs[ending_here][arc]
        children["used"][np.arange(len(arc)), kind[arc]] += size[arc].astype(np.int32)
        children["stages"] += 1
        children["phase"], children["first"] = after[arc], first[arc]
        children["option"] = arcs.option[ending_here][arc]
        # a whole template is bounded by its cost: the price of unused devices is no part of it
        whole = children["first"] == 0
        children["bound"][whole] = children["cost"][whole]
        yield Extensions(children, label, first[arc])

    def undominated(self, bucket: int, labels: Labels) -> Numbers:
        """The cheapest label of each phase and combination of devices, and of each number of stages
        where it matters (Lemma 5)."""
        axes = [labels["phase"], *labels["used"].T]
        if self.space.counted:
            axes.append(labels["stages"])
        key = np.stack(axes)
        order = np.lexsort((labels["cost"], *key))  # by key, labels of one key by cost
        differs = (np.diff(key[:, order], axis=1) != 0).any(axis=0)
        is_first_of_key = np.append(True, differs)[: len(order)]  # no label: none is first
        cheapest: Numbers = order[is_first_of_key]
        return cheapest
