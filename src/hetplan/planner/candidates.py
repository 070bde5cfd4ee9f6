"""One strategy's candidates, replayed: as it proposes them, tightened where the replay needs more
memory, and with recomputation where memory costs time.

A family's memory model may be simpler than the replay's (tensor ranks that keep some activations
whole, working memory of recomputation). What it proves holds with the replay's, too. Where its plan
does not fit in the replay, the problem is posed again with the replay's memory
(`planner.replayed_memory`), or, where that is not known, with less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetplan.planner.candidate import Candidate
from hetplan.planner.recomputation import recomputed, unlimited, useful_modes
from hetplan.planner.simulated import joined, simulated
from hetplan.planner.strategies import Strategy
from hetplan.profiling.recomputation import Recomputation
from hetplan.profiling.workload import Workload
from hetplan.schema import derived
from hetplan.solvers.registry import load
from hetplan.solvers.run import Run
from hetplan.text import bytes_text, seconds_text

FREE = "recomputation not tried: without memory limits nothing is faster"
ROUNDS = 4  # of posing a problem again with less memory
WITHIN = "solved within the memory that the replay counts"
SAME = 1e-6  # relative: differences below are none

Given = Mapping[str, object] | None
Tell = Callable[[Candidate], None]


@dataclass(frozen=True)
class Search:
    """One strategy on one workload. tell: called with every candidate as it is found, replayed.
    methods: which to try, all by default (strategies without a choice of methods try theirs).
    precision_named: whether names of methods end with the workload's precision, as `auto+bf16`."""

    strategy: Strategy
    workload: Workload
    run: Run
    given: Given = None
    tell: Tell | None = None
    methods: Sequence[str] | None = None
    precision_named: bool = False

    @property
    def name(self) -> str:
        """`amp`, or `amp in bf16`."""
        of = f" in {self.workload.precision}" if self.precision_named else ""
        return f"{self.strategy.name}{of}"

    def candidates(self) -> tuple[list[Candidate], list[str]]:
        """All of them, and notes on what was tried in vain."""
        found = self.exact_ones()
        more, notes = self.with_recomputation(found)
        return [*found, *more, *self.other_ones()], notes

    def first_ones(self) -> list[Candidate]:
        """What methods propose that answer at once."""
        return self.asked(lambda method: method in self.strategy.first)

    def exact_ones(self) -> list[Candidate]:
        """What methods that prove their answers propose; everything where the strategy has no
        choice of methods."""
        if not self.strategy.methods:
            return self.proposed("none", None)
        return self.asked(lambda method: method in self.strategy.exact)

    def other_ones(self, *, but: Sequence[str] = ()) -> list[Candidate]:
        """What heuristics and baselines propose; `but`: leaving out those."""
        return self.asked(lambda method: method not in self.strategy.exact and method not in but)

    def asked(self, wanted: Callable[[str], bool]) -> list[Candidate]:
        """What those of the methods to try propose that are wanted."""
        tried = self.strategy.methods if self.methods is None else self.methods
        methods = tuple(filter(wanted, tried)) if self.strategy.methods else ()
        return self.proposed("none", methods) if methods else []

    def with_recomputation(self, plain: Sequence[Candidate]) -> tuple[list[Candidate], list[str]]:
        """Candidates that recompute, where that gains anything; notes where it does not."""
        found: list[Candidate] = []
        notes: list[str] = []
        if not self.strategy.recomputes or self.run.cancelled:
            return found, notes
        modes, budget = useful_modes(self.workload), self.budget()
        if modes and self.memory_is_free(plain, part_of(budget, 1 + len(modes))):
            return found, [FREE]
        for left, mode in zip(range(len(modes), 0, -1), modes, strict=True):
            if budget.should_stop:
                return found, [*notes, f"no time was left for {mode} recomputation"]
            kept, note = self.with_mode(mode, plain, part_of(budget, left))
            found += kept
            notes += note
        return found, notes

    def budget(self) -> Run:
        """A run for what comes beyond a first proposal: all of it together has the time limit of
        one method."""
        return Run(
            self.run.options, lambda progress: self.run.report(note=progress.note), self.run.cancel
        )

    def proposed(
        self,
        mode: Recomputation,
        methods: Sequence[str] | None,
        reserve: float = 0.0,
        run: Run | None = None,
    ) -> list[Candidate]:
        """The strategy's candidates under `mode`, replayed, those of exact methods tightened."""
        tight = replace(self.workload, reserved_bytes=self.workload.reserved_bytes + reserve)
        with derived(f"profile of {self.workload.model.name} under {mode} recomputation"):
            posed = recomputed(tight, mode)
        found = self.strategy.propose(posed, run or self.run, self.given, methods=methods)
        done = []
        for candidate in found:
            replayed = simulated(self.named(labelled(candidate, mode)), self.workload)
            if self.strategy.methods and reserve == 0.0 and exact(candidate):
                replayed = self.tightened(replayed, mode, candidate, run or self.budget())
            every = (
                [replayed, *self.rearranged(replayed, run or self.budget())]
                if reserve == 0.0
                else [replayed]
            )
            for each in every:
                if self.tell is not None and reserve == 0.0:
                    self.tell(each)
            done += every
        return done

    def rearranged(self, found: Candidate, run: Run) -> list[Candidate]:
        """What of nearly the price of an exact method's plan is shorter when replayed."""
        if self.strategy.rearranged is None or not exact(found) or not found.fits_memory:
            return []
        other = load(self.strategy.rearranged)(self.workload, found, run)
        return [] if other is None else [other]

    def named(self, candidate: Candidate) -> Candidate:
        """The candidate with its precision, in its method's name too where there are several."""
        own = self.workload.precision
        method = f"{candidate.method}+{own}" if self.precision_named else candidate.method
        return replace(candidate, precision=own, method=method)

    def tightened(
        self, first: Candidate, mode: Recomputation, posed: Candidate, budget: Run
    ) -> Candidate:
        """The first candidate where its replay fits, else what the problem gives with the replay's
        memory, if anything; what is proven of the problem as first posed, with more memory, holds
        for it."""
        if replay_excess(first, posed) <= 0 or budget.should_stop:
            return first
        if self.strategy.within_replay is None:
            return self.reserved(first, mode, posed, budget)
        optimum = load(self.strategy.within_replay)
        with derived(
            f"{self.workload.model.name} on {self.workload.cluster.name} within the replay's memory"
        ):
            (found,) = optimum(recomputed(self.workload, mode), budget, first.bound)
        again = simulated(self.named(labelled(found, mode)), self.workload)
        if again.plan is None:
            none = again.status == "infeasible" and self.strategy.name == "amp"
            return replace(first, message=joined(first.message, "no plan does" if none else ""))
        return replace(
            again,
            solve_seconds=first.solve_seconds + again.solve_seconds,
            message=joined(again.message, WITHIN),
        )

    def reserved(
        self, first: Candidate, mode: Recomputation, posed: Candidate, budget: Run
    ) -> Candidate:
        """The candidate whose replay fits, if less memory in the model finds one; the first's bound
        holds for it."""
        reserve, current = 0.0, first
        for left in range(ROUNDS, 0, -1):
            excess = replay_excess(current, posed)
            if excess <= 0 or budget.should_stop:
                return current
            reserve += excess * (1 + SAME) + 1.0
            found = self.proposed(mode, self.strategy.exact, reserve, part_of(budget, left))
            again = next((c for c in found if c.method == first.method), None)
            if again is None or again.plan is None:
                return first
            current = again
            if current.fits_memory:
                text = f"memory of the problem tightened by {bytes_text(reserve)} per device for the replay"
                status = (
                    "optimal" if first.status == "optimal" and same(current, first) else "feasible"
                )
                return replace(
                    current,
                    method=first.method,
                    bound=first.bound,
                    status=status,
                    solve_seconds=first.solve_seconds + current.solve_seconds,
                    message=joined(current.message, text),
                )
        return first

    def memory_is_free(self, plain: Sequence[Candidate], run: Run) -> bool:
        """Whether the strategy's best plan stays the best without memory limits: then less kept
        gains nothing."""
        best = shortest(c for c in plain if exact(c) and c.fits_memory)
        if best is None:
            return False
        free = self.strategy.propose(
            unlimited(self.workload), run, self.given, methods=self.strategy.exact
        )
        if any(c.status not in ("optimal", "infeasible") for c in free):
            return False
        least = min(
            (c.predicted_seconds for c in free if c.predicted_seconds is not None), default=None
        )
        closed = best.closed_form_seconds or best.predicted_seconds
        return least is not None and closed is not None and closed <= least * (1 + SAME)

    def with_mode(
        self, mode: Recomputation, plain: Sequence[Candidate], run: Run
    ) -> tuple[list[Candidate], list[str]]:
        """Candidates under `mode` that are better than those without, or fit where none does."""
        best = shortest(c for c in plain if c.fits_memory)
        found = self.proposed(mode, self.strategy.exact, run=run)
        if best is None or best.predicted_seconds is None:
            usable = [c for c in found if c.fits_memory]
            return usable, [] if usable else [f"nothing is found with {mode} recomputation either"]
        gains = [
            c
            for c in found
            if c.fits_memory and (c.predicted_seconds or 0.0) < best.predicted_seconds
        ]
        if gains:
            return gains, []
        other = shortest(c for c in found if c.fits_memory)
        if other is None:
            return [], []
        took = seconds_text(other.predicted_seconds)
        return [], [f"{mode} recomputation gains nothing ({other.name}: {took})"]


def part_of(budget: Run, parts: int) -> Run:
    """A run with one of so many parts of what is left of a budget; without a limit there is
    none."""
    inner = budget.part(time_limit=budget.remaining / parts)
    inner.watch = budget.watch
    return inner


def exact(candidate: Candidate) -> bool:
    """Whether a method that proves its answers proposes it."""
    return candidate.method.startswith(("auto", "enumeration"))


def same(one: Candidate, other: Candidate) -> bool:
    """Whether both have the same objective."""
    return one.objective is not None and one.objective == other.objective


def shortest(candidates: Iterable[Candidate]) -> Candidate | None:
    """The one with the shortest predicted iteration."""
    timed = [
        (c.predicted_seconds, i, c)
        for i, c in enumerate(candidates)
        if c.predicted_seconds is not None
    ]
    return min(timed)[2] if timed else None


def labelled(candidate: Candidate, mode: Recomputation) -> Candidate:
    """The candidate and its plan under the mode's name."""
    if mode == "none":
        return candidate
    plan = candidate.plan
    if plan is not None:
        plan = plan.model_copy(update={"recomputation": mode, "origin": f"{plan.origin}+{mode}"})
    return replace(candidate, method=f"{candidate.method}+{mode}", plan=plan)


def replay_excess(candidate: Candidate, posed: Candidate) -> float:
    """Bytes by which the replay exceeds a device's memory though the plan is one of the strategy's
    own problem; 0 where it fits."""
    found = candidate.replayed
    if (
        found is None
        or candidate.fits_memory
        or posed.status == "infeasible"
        or posed.peak_bytes is None
    ):
        return 0.0
    return max(
        (held - limit for held, limit in zip(found.peak_bytes, found.limit_bytes, strict=True)),
        default=0.0,
    )
