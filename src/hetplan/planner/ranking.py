"""Plan a workload by several strategies and rank what they propose: the fastest replay that fits
first.

Each strategy is searched on its own, in every precision and, where that is asked for, on every part
of the cluster. Plans are compared by their replays; what a strategy proves is of its own problem.
Where nothing fits, `planner.fits` says what would.

`hetplan.plan`: the planner as one function, with typed objects in and out; and precision as a
choice.

What a precision changes are times and bytes of every layer, so that each makes a workload of its
own; their plans are ranked together. Whether training converges in a precision is the user's to
say: only what is named is tried.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypedDict, Unpack

from hetplan.errors import InputError, require, unknown_name
from hetplan.planner.explain import Explanation, explain
from hetplan.planner.fits import MEMORY_MARGIN, advice
from hetplan.planner.joint import Joint
from hetplan.planner.search import OnCandidate, StrategySearch
from hetplan.planner.strategy import (
    MOST_TYPES,
    Candidate,
    NoPlan,
    Settings,
    Strategy,
    Variant,
    fault_of,
    joined,
    make_strategies,
    parts_of_cluster,
    refused,
)
from hetplan.profiling.cluster import Cluster, open_cluster
from hetplan.profiling.frameworks import HETPLAN, Framework
from hetplan.profiling.models import Model
from hetplan.profiling.operators import DEFAULT_STACK, PRECISIONS, Precision, Stack
from hetplan.profiling.profile import Profile
from hetplan.profiling.workload import Workload, make_workload
from hetplan.solvers.run import Options, Run
from hetplan.text import counted, number_text


@dataclass(frozen=True)
class Criteria:
    """What wins, beside time: the fastest plan that fits, unless these say otherwise."""

    money_limit: float | None = None  # dollars per million tokens that no winner exceeds
    # Percent: not the fastest wins but the cheapest that is at most so much slower.
    cheapest_within: float | None = None
    on_parts: bool = False  # plan on every part of the cluster, too; the other two imply it

    @property
    def wants_parts(self) -> bool:
        """Whether plans that leave devices idle are looked for, on parts of the cluster."""
        return self.on_parts or self.money_limit is not None or self.cheapest_within is not None

    def check(self, workload: Workload) -> None:
        """Raise InputError for what is no amount or no share, and where a price is unknown."""
        limit, percent = self.money_limit, self.cheapest_within
        require(
            limit is None or 0 < limit < math.inf,
            "money limit",
            got=limit,
            expected="dollars per million tokens greater than 0",
        )
        require(
            percent is None or 0 <= percent < math.inf,
            "percent that a cheaper plan may be slower",
            got=percent,
            expected="a number from 0 on",
        )
        cluster, what = workload.cluster, "money limit" if limit is not None else "cheapest plan"
        unpriced = [k for k in cluster.types if cluster.specs[k].price_per_hour is None]
        if unpriced and (limit is not None or percent is not None):
            raise InputError(
                f"{what}, but device {unpriced[0]!r} has no price",
                where=f"cluster {cluster.name}",
                expected="price_per_hour of every device",
            )

    def judged(self, candidate: Candidate, workload: Workload) -> tuple[Candidate, bool]:
        """The candidate, and whether it may win: it fits and does not exceed the limit, else its
        message says so."""
        fits = candidate.plan is not None and candidate.fits_memory is True
        money = candidate.money_per_million_tokens(workload)
        if self.money_limit is None or money is None or money <= self.money_limit:
            return candidate, fits
        limit = number_text(self.money_limit, 4)
        text = f"costs {number_text(money, 4)} per million tokens, above the limit {limit}"
        return replace(candidate, message=joined(candidate.message, text)), False


@dataclass(frozen=True)
class Planning:
    """What came of planning a workload."""

    workload: Workload = field(repr=False)  # in the winner's precision
    candidates: tuple[Candidate, ...]  # best first
    winner: int | None  # index of the best one that fits and meets the criteria
    notes: tuple[str, ...] = ()  # what was tried in vain
    advice: tuple[str, ...] = ()  # what would make one fit, where nothing fits
    precisions: tuple[str, ...] = ()  # all that were planned
    criteria: Criteria = Criteria()

    def __str__(self) -> str:
        """A line for each candidate, best first, then notes and what would fit."""
        return "\n".join([*map(str, self.candidates), *self.notes, *self.advice])

    @property
    def best(self) -> Candidate | None:
        """The winner itself."""
        return None if self.winner is None else self.candidates[self.winner]

    @property
    def bound(self) -> float | None:
        """Seconds that no chain of stages replays below, in any of the precisions, nor one with
        further degrees where these were searched (`computing_alone`); None where the sixth problem
        was not posed of each."""
        bounds = [
            c.bound for c in self.candidates if c.strategy == Joint.name and not c.variant.part
        ]
        known = [bound for bound in bounds if bound is not None]
        every = len(known) == max(len(self.precisions), 1)
        return min([*known, *self.computing_alone]) if every else None

    @property
    def computing_alone(self) -> list[float]:
        """Of each search over further degrees, seconds that none of its plans replays below."""
        return [c.computing_alone for c in self.candidates if c.computing_alone is not None]

    @property
    def explanation(self) -> Explanation | None:
        """Why the winner takes as long as it does; None without one."""
        return (
            None
            if self.winner is None
            else explain(self.candidates, self.winner, self.workload, self.criteria.cheapest_within)
        )

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        explained = self.explanation
        return {
            "workload": {**workload_document(self.workload), "precisions": list(self.precisions)},
            "candidates": [candidate.document(self.workload) for candidate in self.candidates],
            "winner": self.winner,
            "bound": self.bound,
            "pareto": pareto(self.candidates, self.workload),
            "notes": list(self.notes),
            "advice": list(self.advice),
            "explanation": None if explained is None else explained.document(),
        }


def make_plans(
    workload: Workload | Sequence[Workload],
    strategies: Sequence[Strategy] | None = None,
    run: Run | None = None,
    *,
    criteria: Criteria | None = None,
    on_candidate: OnCandidate | None = None,
    notes: Sequence[str] = (),
) -> Planning:
    """Solve `workload` by each strategy (all by default), replay the plans, rank them by seconds,
    then whole nodes, then money.

    workload: one, or the same in different precisions (`planner.library`), ranked together. A
    plan that does not fit in memory never wins. The run's time limit is for all of it.
    on_candidate: called with every candidate as it is found. notes: to stand before those of the
    planning. Raises InputError for criteria that are not usable, or a workload that cannot be
    posed.
    """
    in_precisions = (workload,) if isinstance(workload, Workload) else tuple(workload)
    run, criteria, first = (run or Run()).share(END), criteria or Criteria(), in_precisions[0]
    picked = make_strategies() if strategies is None else list(strategies)
    criteria.check(first)
    variants = [
        (w, Variant(precision=w.precision if len(in_precisions) > 1 else None))
        for w in in_precisions
    ]
    # where money counts, slower plans may win, too
    cannot_win = math.inf if criteria.wants_parts else StrategySearch.cannot_win
    start = partial(StrategySearch, on_candidate=on_candidate, cannot_win=cannot_win)
    candidates = search_all(
        [start(s, w, run, v) for s in picked for w, v in variants],
        run.share(2 if criteria.wants_parts else 1),
    )
    all_notes = list(notes)
    if criteria.wants_parts:
        searches = [
            start(s, w, run, replace(v, part=part))
            for w, v in variants
            for part in parts_of_cluster(w)
            for s in picked
        ]
        candidates, left_out = with_parts(candidates, searches, run)
        all_notes += left_out
    judged = [criteria.judged(candidate, first) for candidate in candidates]
    judged.sort(key=lambda pair: (not pair[1], *rank(pair[0], first)))
    ranked = tuple(candidate for candidate, _ in judged)
    allowed = [candidate for candidate, may_win in judged if may_win]
    winner = winner_of(allowed, first, criteria.cheapest_within)
    smallest = min(in_precisions, key=lambda w: sum(l.saved_bytes for l in w.profile.layers))
    precision = None if winner is None else ranked[winner].variant.precision
    return Planning(
        next((w for w in in_precisions if w.precision == precision), first),
        ranked,
        winner,
        tuple(all_notes),
        () if any(candidate.fits_memory for candidate in ranked) else advice(smallest),
        tuple(w.precision for w in in_precisions),
        criteria,
    )


def search_all(searches: Sequence[StrategySearch], run: Run) -> list[Candidate]:
    """All candidates, strategy by strategy, within the time of `run`.

    Methods that answer at once come first, so that a complete ranking stands early. Exact methods
    follow, then the other heuristics, which are for comparison. Strategies that end soon go before
    those that may take all their time. `joint` is last and begins with the plans of the others.
    Each phase may take a share of the time that is left (a fifth for exact methods, which mostly
    need little of it; the last ones up to a half). At least a quarter of the time is for `joint`,
    where it can use that much.
    """
    candidates: list[list[Candidate]] = [[] for _ in searches]
    last = {i: s.strategy for i, s in enumerate(searches) if isinstance(s.strategy, Joint)}
    usable = sum(joint.settings.seconds for joint in last.values()) / max(run.remaining, 1e-3)
    others = run.share(1 / max(0.75, 1 - usable))
    order = sorted(
        (i for i in range(len(searches)) if i not in last), key=lambda i: searches[i].strategy.slow
    )
    later = partial(StrategySearch.candidates_of, wanted=lambda m: not (m.quick or m.exact))
    phases: list[tuple[int, int, Callable[[StrategySearch, Run], list[Candidate]]]] = [
        *((10, i, partial(StrategySearch.candidates_of, wanted=lambda m: m.quick)) for i in order),
        *(
            (min(5, len(order) - k + 1), i, StrategySearch.exact_candidates)
            for k, i in enumerate(order)
        ),
        *((10, i, StrategySearch.recomputing_candidates) for i in order),
        *((8, i, later) for i in order),
        *((len(last) - k, i, StrategySearch.exact_candidates) for k, i in enumerate(last)),
    ]
    for share, i, phase in phases:
        within, known = run if i in last else others, tuple(chain.from_iterable(candidates))
        search = replace(searches[i], run=within, known=known)
        try:
            candidates[i] += phase(search, within.share(share))
        except Exception as error:  # noqa: BLE001 - a fault costs this strategy's phase alone
            fault = fault_of(search.strategy.name, search.strategy.methods[0], error)
            candidates[i].append(replace(fault, variant=search.variant))
    for own, search in zip(candidates, searches, strict=True):
        if not own and not search.variant.part and not others.remaining:
            reason = NoPlan("unknown", "not begun: the time limit was reached")
            own.append(refused(search.strategy, search.strategy.methods[0], reason))
    return list(chain.from_iterable(candidates))


def with_parts(
    whole: list[Candidate], searches: Sequence[StrategySearch], run: Run
) -> tuple[list[Candidate], list[str]]:
    """All of `whole`, and those candidates on parts of the cluster that nothing beats in both time
    and money; notes on the others and on parts that were not tried."""
    more, workload = search_all(searches, run.share(1)), searches[0].workload
    together = [*whole, *more]
    front = {id(together[i]) for i in pareto(together, workload)}
    kept = [c for c in more if id(c) in front]
    notes = []
    if len(kept) < len(more):
        beaten = counted(len(more) - len(kept), "plan")
        notes.append(f"on parts of the cluster, {beaten} left out: beaten in time and money")
    if (types := len(workload.cluster.types)) > MOST_TYPES:
        which = "of one, of two, and of all but one (not every combination)"
        notes.append(f"parts of {types} device types: {which}")
    return [*whole, *kept], notes


def pareto(candidates: Sequence[Candidate], workload: Workload) -> list[int]:
    """Indices of the candidates that fit and than which none is both faster and cheaper, fastest
    first."""
    priced = [
        (c.predicted_seconds, money, i)
        for i, c in enumerate(candidates)
        if c.fits_memory
        and c.predicted_seconds is not None
        and (money := c.money_per_million_tokens(workload)) is not None
    ]
    priced.sort()
    return [
        i
        for place, (_, money, i) in enumerate(priced)
        if all(money < other for _, other, _ in priced[:place])
    ]


def winner_of(
    allowed: Sequence[Candidate], workload: Workload, percent: float | None
) -> int | None:
    """Index of the fastest, or of the cheapest that is at most `percent` slower; the allowed stand
    first in the ranking, in this order."""
    if not allowed:
        return None
    most = (allowed[0].predicted_seconds or 0.0) * (1 + (percent or 0.0) / 100)
    near = [i for i in pareto(allowed, workload) if (allowed[i].predicted_seconds or 0.0) <= most]
    return near[-1] if near and percent is not None else 0


def rank(candidate: Candidate, workload: Workload) -> tuple[float, ...]:
    """Sort key: seconds per iteration, then nodes in use in part, then money; what is unknown comes
    last."""
    seconds, money = candidate.predicted_seconds, candidate.money_per_million_tokens(workload)
    plan, late = candidate.plan, math.inf if seconds is None else seconds
    order = (late, 0) if plan is None else plan.order(late)
    return *order, math.inf if money is None else money


def workload_document(workload: Workload) -> dict[str, Any]:
    """What was planned, as JSON types."""
    return {
        "model": workload.model.name,
        "parameters": workload.model.params,
        "layers": len(workload.profile.layers),
        "cluster": workload.cluster.name,
        "devices": workload.cluster.counts(),
        "global_batch": workload.global_batch,
        "sequence": workload.sequence,
        "precision": workload.precision,
        "tokens_per_iteration": workload.tokens_per_iteration,
        "state_bytes": workload.state_bytes,
        "usable_bytes": workload.device_bytes(),
        "price_per_hour": workload.cluster.price_per_hour(),
        "profile": workload.profile.provenance.model_dump(mode="json"),
    }


TIME_LIMIT = 60.0
# An eleventh of the time is for what no search counts: Python's start, the replay of the last plan,
# ranking, explaining and printing.
END = 1.1
AUTO = "auto"
# What `auto` stands for; of equals the first wins, and bf16 needs no loss scaling.
PREFERRED: tuple[Precision, ...] = ("bf16", "fp16", "fp32")


class Training(TypedDict, total=False):
    """framework: what trains, whose memory counts (hetplan itself). stack: the software that
    computes. memory_margin: share of each device's memory that stays free for its allocator (0.05).
    """

    framework: str | Framework
    stack: str | Stack
    memory_margin: float


def plan(
    model: Any,
    cluster: str | os.PathLike[str] | Cluster,
    *,
    global_batch: int,
    sequence: int | None = None,
    precision: str | Sequence[str] = "fp16",
    profile: str | os.PathLike[str] | Profile | None = None,
    strategies: str | Sequence[str] | None = None,
    settings: Settings | None = None,
    money_limit: float | None = None,
    cheapest_within: float | None = None,
    parts: bool = False,
    time_limit: float | None = TIME_LIMIT,
    threads: int | None = None,
    on_candidate: OnCandidate | None = None,
    **training: Unpack[Training],
) -> Planning:
    """Plan the training of a model on a cluster, as `hetplan plan` does.

    model: a built-in name, a config.json, a Model (which brings its own sequence and precision), or
    a torch module with a method `batch(step, first, last)` -> (inputs, targets), which is traced.
    cluster: a file, the name of an example, or a Cluster. global_batch: samples per iteration.
    precision: one, several, or "auto" for all that every device has. profile: measured; None:
    predicted. strategies: names, or one text with commas between them; None: all.
    settings: strategy -> name -> value, what a strategy has to set of its own.
    time_limit: seconds for all of it. money_limit, cheapest_within, parts: see `Criteria`.
    on_candidate: called with every candidate as it is found. framework, stack, memory_margin:
    see `Training`.
    Returns the candidates, best first: `planning.best` is the winner or None; a candidate's
    `predicted_seconds` are replayed, `bound` is proven for its `objective`, `plan` is what a plan
    file holds. Raises InputError.
    """
    if not isinstance(model, (str, os.PathLike, Model)):
        model = traced(model, precision)
    workloads, notes = make_workloads(
        model,
        cluster if isinstance(cluster, Cluster) else open_cluster(cluster),
        global_batch,
        sequence=sequence,
        precision=precision,
        profile=profile,
        **training,
    )
    options = Options(time_limit=time_limit)
    options = options if threads is None else replace(options, threads=threads)
    return make_plans(
        workloads,
        make_strategies(strategies, settings),
        Run(options),
        criteria=Criteria(money_limit, cheapest_within, parts),
        on_candidate=on_candidate,
        notes=notes,
    )


def traced(module: Any, precision: str | Sequence[str]) -> Model:
    """A torch module as a model to plan, under its class's name; needs torch."""
    from hetplan.runtime.tracing.layers import trace
    from hetplan.runtime.tracing.program import plannable

    return plannable(module, trace(module, name=type(module).__name__, precision=only(precision)))


def only(names: str | Sequence[str]) -> Precision:
    """The one precision of a module, which is traced in it; raises InputError."""
    first, *others = precisions_of(names)
    require(
        not others,
        "a module is planned in one precision",
        got=", ".join((first, *others)),
        expected="one of them",
    )
    return first


def precisions_of(names: str | Sequence[str]) -> tuple[Precision, ...]:
    """`auto`, one precision, several separated by commas, or a sequence of them; raises
    InputError."""
    if names == AUTO:
        return PREFERRED
    texts = [text.strip() for text in (names.split(",") if isinstance(names, str) else names)]
    known: dict[str, Precision] = {name: name for name in PRECISIONS}
    for text in texts:
        if text not in known:
            raise unknown_name("unknown precision", text, (*PRECISIONS, AUTO))
    require(texts, "no precision named", expected=f"some of {', '.join(PRECISIONS)}, or {AUTO}")
    return tuple(known[text] for text in dict.fromkeys(texts))


def make_workloads(
    model: str | os.PathLike[str] | Model,
    cluster: Cluster,
    global_batch: int,
    *,
    sequence: int | None = None,
    precision: str | Sequence[str] = "fp16",
    profile: str | os.PathLike[str] | Profile | None = None,
    framework: str | Framework = HETPLAN,
    stack: str | Stack = DEFAULT_STACK,
    memory_margin: float = MEMORY_MARGIN,
) -> tuple[list[Workload], list[str]]:
    """One workload per precision worth planning, the preferred first; why others are left out.
    memory_margin: share of each device's memory that stays free.

    With one precision, or with a Model, which brings its own, it is `make_workload`. Of several,
    those that a device has no peak for are left out, as is one whose times and bytes are those of
    another on every device. Raises InputError where none is left, or for a profile, which is of one
    precision.
    """
    precisions = precisions_of(precision)
    if isinstance(model, Model) or len(precisions) == 1:
        workload = make_workload(
            model,
            cluster,
            global_batch,
            sequence=sequence,
            precision=precisions[0],
            profile=profile,
            framework=framework,
            stack=stack,
        )
        return [replace(workload, memory_margin=memory_margin)], []
    if profile is not None:
        raise InputError(
            "a profile is of one precision",
            where=profile.model if isinstance(profile, Profile) else os.fspath(profile),
            got=", ".join(precisions),
            expected="one --precision",
        )
    workloads: list[Workload] = []
    notes: list[str] = []
    for name in precisions:
        kinds = [k for k in cluster.types if name not in cluster.specs[k].peak_tflops]
        if kinds:
            notes.append(f"{name} is left out: no units for it in {', '.join(kinds)}")
            continue
        made = make_workload(
            model,
            cluster,
            global_batch,
            sequence=sequence,
            precision=name,
            framework=framework,
            stack=stack,
        )
        # equal profiles and equal bytes of states make equal plans
        twins = (
            other
            for other in workloads
            if other.state_bytes_per_param_byte == made.state_bytes_per_param_byte
            and other.profile.layers == made.profile.layers
            and other.profile.tables == made.profile.tables
        )
        twin = next(twins, None)
        if twin is None:
            workloads.append(replace(made, memory_margin=memory_margin))
        else:
            same = f"times and bytes are those of {twin.precision}"
            notes.append(f"{name} is not planned apart: {same}")
    require(
        workloads,
        "no precision that every device has",
        where=f"cluster {cluster.name}",
        got=", ".join(precisions),
        expected="; ".join(notes),
    )
    return workloads, notes
