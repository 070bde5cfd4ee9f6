"""The strategies that the planner knows: adding one is adding an entry here and the function that
it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetplan.errors import InputError, UnsupportedError
from hetplan.names import unknown_name
from hetplan.solvers.registry import load
from hetplan.solvers.run import Run

if TYPE_CHECKING:
    from hetplan.planner.candidate import Candidate
    from hetplan.profiling.workload import Workload

    Propose = Callable[..., list[Candidate]]


@dataclass(frozen=True)
class Strategy:
    """A way to plan a workload.

    target: "module:function" of (workload, run) -> candidates, best method first; imported when
    used. It returns a candidate with a reason rather than nothing, and raises InputError only for
    what makes the whole workload unusable. The run's time limit is for each method. settings:
    "module:class" of a StrictModel that `target` takes as a third argument; None: it takes none.
    methods: those of `target` that its argument `methods` chooses from; none: it has no such
    argument. exact: those of them that prove their answers. first: those that answer at once and
    stand before anything is proven, so that the ranking is complete early. recomputes: whether
    recomputation is chosen around it (`planner.recomputation`). within_replay: "module:function" of
    (workload, run, bound known) -> candidates, the exact method within the memory that the replay
    counts, where its own problem cannot say that. rearranged: "module:function" of (workload,
    replayed candidate of an exact method, run) -> a candidate of nearly that price whose replay is
    shorter, or None. slow: whether it goes behind the others because on large clusters it takes all
    the time that it is given.
    """

    name: str
    target: str
    summary: str
    settings: str | None = None
    methods: tuple[str, ...] = ()
    exact: tuple[str, ...] = ("auto",)
    first: tuple[str, ...] = ()
    recomputes: bool = False
    within_replay: str | None = None
    rearranged: str | None = None
    slow: bool = False

    def propose(
        self,
        workload: Workload,
        run: Run,
        given: Mapping[str, object] | None = None,
        *,
        methods: Sequence[str] | None = None,
    ) -> list[Candidate]:
        """The candidates of this strategy, of some of its methods only where `methods` names them.

        given: its settings by name, as JSON types.
        """
        from hetplan.planner.settings import parse_settings
        from hetplan.schema import derived

        function: Propose = load(self.target)
        own = (
            ()
            if self.settings is None
            else (parse_settings(self.settings_model(), given or {}, self.name),)
        )
        with derived(f"{workload.model.name} on {workload.cluster.name} as {self.name}"):
            chosen_methods = {} if methods is None else {"methods": tuple(methods)}
            return function(workload, run, *own, **chosen_methods)

    def settings_model(self) -> Any:
        """The pydantic model of its settings, None where it has none."""
        return None if self.settings is None else load(self.settings)


# One strategy is planned for each of the five papers.
ALL = "all"
PAPERS = ("amp", "astra", "hap", "poplar", "ditto")
STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "amp",
            "hetplan.planner.amp:propose",
            "degrees, placement, micro-batch and stages (AMP)",
            methods=("auto", "paper", "megatron"),
            first=("megatron",),
            recomputes=True,
            within_replay="hetplan.planner.replayed_memory:amp_optimum",
            rearranged="hetplan.planner.rearranged:rearranged",
            slow=True,
        ),
        Strategy(
            "poplar",
            "hetplan.planner.poplar:propose",
            "unequal batches under each ZeRO stage (Poplar)",
            settings="hetplan.planner.poplar_settings:PoplarSettings",
            methods=("auto", "paper"),
            recomputes=True,
        ),
        Strategy(
            "astra",
            "hetplan.planner.astra:propose",
            "the whole strategy search, segments by type (Astra)",
        ),
        Strategy(
            "ditto",
            "hetplan.planner.ditto:propose",
            "one pipeline, stages of unequal width (Ditto)",
            methods=("auto", "paper", "oobleck", "greedy"),
            recomputes=True,
            within_replay="hetplan.planner.replayed_memory:ditto_optimum",
        ),
        Strategy(
            "dp",
            "hetplan.planner.data_parallel:propose",
            "plain data parallelism, the floor",
            methods=("enumeration",),
            exact=("enumeration",),
            recomputes=True,
        ),
        Strategy(
            "hap",
            "hetplan.planner.hap:propose",
            "one SPMD program, sharding ratios per device (HAP)",
            settings="hetplan.planner.hap_settings:HapSettings",
            methods=("auto", "paper", "dp-even", "dp-proportional"),
            first=("dp-proportional",),
            slow=True,
        ),
    )
}


def chosen(names: Sequence[str] | None) -> list[Strategy]:
    """The strategies named, each once; `all` of them, also without names. Raises InputError for
    unknown ones."""
    if names is None or ALL in names:
        return list(STRATEGIES.values())
    if not names:
        raise InputError("no strategy named", expected=f"some of {', '.join(STRATEGIES)}")
    for name in names:
        if name not in STRATEGIES:
            if name in PAPERS:
                known = f"some of {', '.join(STRATEGIES)}"
                raise UnsupportedError("strategy is not available yet", got=name, expected=known)
            raise unknown_name("unknown strategy", name, STRATEGIES)
    return [STRATEGIES[name] for name in dict.fromkeys(names)]
