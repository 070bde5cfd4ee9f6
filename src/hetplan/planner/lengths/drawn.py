"""Plans for the mean length and for a quantile, compared on drawn lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hetplan.planner.lengths.costs import PlanCosts
from hetplan.planner.lengths.packing import Packed, balanced, packed, padded
from hetplan.planner.lengths.samples import Lengths
from hetplan.planner.planning import Planning
from hetplan.profiling.workload import Workload
from hetplan.solvers.run import Run
from hetplan.text import seconds_text

QUANTILE = 0.9  # the share of the samples that are no longer than the second length
DRAWS = 5  # iterations whose lengths are drawn
WAYS = ("padded", "packed", "balanced")
LONGEST = "longest"
PROGRAMS = "hap"  # the strategy whose plans are programs for samples of one length


@dataclass(frozen=True)
class Drawn:
    """One way to form micro-batches, over all draws."""

    seconds: float | None  # of an iteration, in the mean; None where a draw does not fit
    tokens: float | None  # of an iteration in the mean, with padding
    gap: float | None = None  # the largest distance from a balance to its bound, as a share


@dataclass(frozen=True)
class LengthsPlan:
    """The plan for one length, on drawn lengths."""

    label: str
    length: int  # tokens of a sample
    planning: Planning
    ways: dict[str, Drawn]  # by the names of WAYS; empty without a plan

    @property
    def predicted(self) -> float | None:
        """Replayed seconds of an iteration whose samples all have the length."""
        best = self.planning.best
        return None if best is None else best.predicted_seconds

    @property
    def seconds(self) -> float | None:
        """Seconds of a balanced iteration; None where a draw does not fit."""
        return self.ways["balanced"].seconds if self.ways else None


@dataclass(frozen=True)
class LengthsAnswer:
    """The plans, and the one of the fewest seconds when balanced."""

    lengths: Lengths
    seed: int
    plans: tuple[LengthsPlan, ...]
    chosen: int | None  # None: no plan fits every draw

    @property
    def planning(self) -> Planning:
        """The planning of the chosen plan, or of the last one."""
        return self.plans[-1 if self.chosen is None else self.chosen].planning

    @property
    def notes(self) -> list[str]:
        """A line for each plan, with its seconds of an iteration on drawn lengths."""
        lines = []
        for number, plan in enumerate(self.plans):
            said = [
                f"{name} {'does not fit' if way.seconds is None else seconds_text(way.seconds)}"
                for name, way in plan.ways.items()
            ]
            chosen = ", chosen" if number == self.chosen else ""
            lines.append(
                f"plan for the {plan.label} of {self.lengths.name}, {plan.length} tokens, on drawn "
                f"lengths: {', '.join(said) or 'no plan'}{chosen}"
            )
        return lines

    def document(self) -> dict[str, Any]:
        """The answer as JSON types."""
        return {
            "name": self.lengths.name,
            "source": self.lengths.source,
            "mean": self.lengths.mean,
            "quantile": QUANTILE,
            "longest": self.lengths.longest,
            "cut": self.lengths.cut,
            "draws": DRAWS,
            "seed": self.seed,
            "chosen": self.chosen,
            "plans": [
                {
                    "for": plan.label,
                    "sequence": plan.length,
                    "predicted_seconds": plan.predicted,
                    "drawn": {
                        name: {"seconds": way.seconds, "tokens": way.tokens, "gap": way.gap}
                        for name, way in plan.ways.items()
                    },
                }
                for plan in self.plans
            ],
        }


def planned_lengths(lengths: Lengths) -> list[tuple[str, int]]:
    """(label, tokens) of the lengths to plan for, each once: the mean, the quantile, the longest.
    The longest is for samples that the plans of the others do not hold."""
    labels = {max(1, round(lengths.mean)): "mean"}
    labels.setdefault(lengths.quantile(QUANTILE), f"{QUANTILE:.0%} quantile")
    labels.setdefault(lengths.longest, LONGEST)
    return [(label, length) for length, label in labels.items()]


WorkloadsAt = Callable[[int], Sequence[Workload]]  # tokens of a sample -> one of each precision


def plan_lengths(
    lengths: Lengths,
    workloads_at: WorkloadsAt,
    planning_at: Callable[[int, Run], Planning],
    run: Run,
    seed: int = 0,
) -> LengthsAnswer:
    """Plans for the mean and for the quantile, and what they take on drawn lengths. Where neither
    fits every draw, there is a plan for the longest sample, too.

    planning_at: (tokens of a sample, run) -> the planning of the workloads of that length. run: its
    time is shared by all. seed: of the drawn lengths.
    """
    to_plan = planned_lengths(lengths)
    plans: list[LengthsPlan] = []
    for number, (label, length) in enumerate(to_plan):
        if label == LONGEST and any(plan.seconds is not None for plan in plans):
            break
        share = run.share(len(to_plan) - number, f"for {length} tokens,")
        planning = planning_at(length, share)
        ways = on_drawn(lengths, planning, workloads_at, run, seed)
        plans.append(LengthsPlan(label, length, planning, ways))
    known = []
    for number, plan in enumerate(plans):
        if plan.seconds is not None:
            known.append((plan.seconds, number))
    return LengthsAnswer(lengths, seed, tuple(plans), min(known)[1] if known else None)


def on_drawn(
    lengths: Lengths, planning: Planning, workloads_at: WorkloadsAt, run: Run, seed: int
) -> dict[str, Drawn]:
    """Name of WAYS -> the seconds of the best plan of a planning on drawn lengths; empty where no
    plan fits."""
    best = planning.best
    if best is None or best.plan is None:
        return {}
    workload = planning.workload
    at_other = workloads_at(other_length(lengths, workload))
    other = next(each for each in at_other if each.precision == workload.precision)
    costs = PlanCosts(best.plan, workload, other, lengths.longest)
    draws = [lengths.draw(workload.global_batch, (seed, draw)) for draw in range(DRAWS)]
    return {
        "padded": drawn(costs, [padded(costs, draw) for draw in draws]),
        "packed": drawn(costs, [packed(costs, draw) for draw in draws]),
        "balanced": drawn(costs, [balanced(costs, draw, run) for draw in draws]),
    }


def other_length(lengths: Lengths, workload: Workload) -> int:
    """A second sequence length, from which the cost of attention follows: the other one that is
    planned for, or half of this one where there is none that is clearly another."""
    length = workload.sequence
    assert length is not None, "samples with tokens"
    others = [other for _, other in planned_lengths(lengths) if abs(other - length) > length / 4]
    if others:
        return others[0]
    return length // 2 if length > 1 else 2


def drawn(costs: PlanCosts, packings: Sequence[Packed | None]) -> Drawn:
    """The means over the draws; unknown where one of them does not fit."""
    found = [packing for packing in packings if packing is not None]
    seconds = [costs.seconds(packing.batches) for packing in found]
    known = [value for value in seconds if value is not None]
    if len(known) < len(packings):
        return Drawn(None, None)
    gaps = [packing.gap for packing in found if packing.gap is not None]
    return Drawn(fmean(known), fmean(packing.tokens for packing in found), max(gaps, default=None))
