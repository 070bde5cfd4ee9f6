"""`hetplan plan search`: Astra's strategy search on a real model and a pool of GPUs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from hetplan.cli.options import (
    EfficiencyOption,
    FrameworkOption,
    JsonOption,
    LinksOption,
    MarginOption,
    OutputOption,
    PrecisionOption,
    ProfileOption,
    SequenceOption,
    StackOption,
    TimeOption,
    make_options,
    number,
    offered,
    open_cluster,
    require_option,
    split_list,
    switch,
    target,
    whole_numbers,
)
from hetplan.cli.output import emit, note
from hetplan.errors import check_name, require
from hetplan.files import write_bytes
from hetplan.formulations.astra.search import engine, pool as pools
from hetplan.formulations.astra.search.engine import columns_of
from hetplan.formulations.astra.search.pool import Mode, Pool
from hetplan.formulations.astra.search.result import Candidate, Job, SearchResult, summary
from hetplan.formulations.astra.search.rules import Rule, default_rules, rules_from_file
from hetplan.formulations.astra.search.space import PARAMETERS, Space, measured_sizes
from hetplan.instances.library import Instance, save_instance
from hetplan.plans.making import with_inputs
from hetplan.profiling.frameworks import MEGATRON, load_framework
from hetplan.profiling.hardware.cluster import GBIT, MAX_DEVICES, Cluster
from hetplan.profiling.inputs.inputs import Inputs
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.operators import DEFAULT_STACK, load_stack
from hetplan.profiling.profiles.profile import load_profile
from hetplan.profiling.rates.efficiency import LearnedLinks, LinkEfficiencyFile
from hetplan.profiling.workload import Workload, check_profile, check_units, make_workload
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.offers import Offer, offer_of, offers_of_cluster
from hetplan.schema import LEAST_RATE, MOST_RATE, derived
from hetplan.solvers.run import Run
from hetplan.studies.page import as_picture, figure
from hetplan.text import Table, count_text, figure_text, number_text, seconds_text

# Dots drawn at most, and how far above the set's dearest point they may lie.
DOTS, CEILING = 3000, 4.0


@dataclass(frozen=True, kw_only=True)
class GpuPool:
    """The GPUs on offer, by type and number or as a cluster file, and their links."""

    gpus: Annotated[
        list[str] | None,
        offered(
            "devices",
            "--gpus",
            "-g",
            metavar="TYPE:COUNT[,…]",
            help="The pool, like A800:2048,H100:1024.",
            ending=":",
            many=True,
        ),
    ] = None
    cluster: Annotated[
        str | None,
        offered(
            "clusters", "--cluster", metavar="FILE|NAME", help="The pool as a cluster file instead."
        ),
    ] = None
    mode: Annotated[
        Mode | None, typer.Option("--mode", help="Default: by the number of types.")
    ] = None
    total: Annotated[
        int | None,
        typer.Option("--total", metavar="N", help="GPUs to use (heterogeneous); default all."),
    ] = None
    node_devices: Annotated[
        int | None,
        number("--devices-per-node", least=1, most=MAX_DEVICES, help="Of every type."),
    ] = None
    intra_gbit: Annotated[
        float | None,
        number(
            "--intra-node-gbit", least=LEAST_RATE, most=MOST_RATE, help="Between devices of a node."
        ),
    ] = None
    network_gbit: Annotated[
        float | None,
        number("--network-gbit", least=LEAST_RATE, most=MOST_RATE, help="Of one node."),
    ] = None

    def offers(self) -> tuple[Offer, ...]:
        """The types on offer, from `TYPE:COUNT` texts or a cluster file, with any links given;
        raises InputError."""
        require(
            (self.gpus is None) != (self.cluster is None),
            "the pool is given by --gpus or by --cluster",
            expected="one of the two",
        )
        if self.cluster is not None:
            offers = offers_of_cluster(open_cluster(self.cluster))
        else:
            texts = split_list(self.gpus or [])
            offers = tuple(offer_of(*name_and_count(text)) for text in texts)
        changes: dict[str, Any] = {
            "node_devices": self.node_devices,
            "intra": None if self.intra_gbit is None else self.intra_gbit * GBIT,
            "network": None if self.network_gbit is None else self.network_gbit * GBIT,
        }
        known = {name: value for name, value in changes.items() if value is not None}
        return tuple(replace(offer, **known) for offer in offers)

    def pool(self) -> Pool:
        """The pool of the mode; without one, several types are mixed. Raises InputError."""
        offers = self.offers()
        mode = self.mode or ("homogeneous" if len(offers) == 1 else "heterogeneous")
        require(
            self.total is None or mode == "heterogeneous",
            "--total is for the heterogeneous mode",
            got=self.total,
        )
        if mode == "cost":
            return pools.cost(offers, max(offer.most for offer in offers))
        if mode == "heterogeneous":
            most = sum(offer.most for offer in offers)
            return pools.heterogeneous(most if self.total is None else self.total, offers)
        require(
            len(offers) == 1,
            "the homogeneous mode takes one type",
            where="--gpus",
            got=f"{len(offers)} types",
        )
        return pools.homogeneous(offers[0])


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which strategies are generated, and which rules drop some of them."""

    rules: Annotated[
        list[Path] | None, typer.Option("--rules", help="File of rules, one a line; may repeat.")
    ] = None
    default_rules: Annotated[
        bool,
        typer.Option("--default-rules/--no-default-rules", help="Apply the shipped rules as well."),
    ] = True
    parameter: Annotated[
        list[str] | None,
        offered(
            "parameters",
            "--param",
            "-p",
            metavar="NAME=VALUES",
            help="Like tensor=1,2,4 or pipeline=1-8; may repeat.",
            ending="=",
        ),
    ] = None

    def rules_for(self, pool: Pool) -> list[Rule]:
        """The shipped rules and those of the files; raises InputError."""
        columns = columns_of(pool)
        shipped = default_rules(columns) if self.default_rules else []
        return [*shipped, *(r for path in self.rules or [] for r in rules_from_file(path, columns))]

    def space(self, measured: Mapping[str, Any]) -> Space:
        """The parameter space with the given ranges replaced, and else those that were measured;
        raises InputError."""
        usual, values = Space(), dict[str, Any]()
        for text in self.parameter or []:
            left, equals, right = (part.strip() for part in text.partition("="))
            name = left.replace("-", "_")
            require_option(bool(equals and right), "--param", text, "NAME=VALUE[,VALUE…]")
            require(name not in values, f"{name} is given twice", where="--param")
            check_name("unknown parameter", name, PARAMETERS, where="--param")
            values[name] = parameter_value(right, getattr(usual, name))
        return replace(usual, **(dict(measured) | values))


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What was measured, in place of what is predicted; the software that computes, and what it
    holds in memory."""

    profile: ProfileOption = None
    efficiency: EfficiencyOption = None
    links: LinksOption = None
    stack: StackOption = DEFAULT_STACK.name
    framework: FrameworkOption = MEGATRON.name
    memory_margin: MarginOption = 0.05

    def assumptions(self, model: Model, pool: Pool) -> Assumptions:
        """What prices follow from; raises InputError for what is of another model or type."""
        from hetplan.cli.profile import learned_of

        offers, profile, links = pool.offers, None, None
        types = Cluster("the pool", tuple(o.node for o in offers), {o.name: o.spec for o in offers})
        learned = learned_of(self.efficiency or [], types, model.precision)
        stack = load_stack(self.stack, where="--stack")
        check_units(stack, model, types)
        if self.profile is not None:
            profile = load_profile(self.profile)
            check_profile(profile, model, types, where=str(self.profile))
        if self.links is not None:
            links = LearnedLinks(LinkEfficiencyFile.load(self.links))
        return Assumptions(
            framework=load_framework(self.framework, where="--framework"),
            memory_margin=self.memory_margin,
            profile=profile,
            learned=learned,
            links=links,
            stack=stack,
        )

    def workload(self, job: Job, cluster: str) -> Workload:
        """What the search plans, on a cluster."""
        made = make_workload(
            job.model,
            open_cluster(cluster),
            job.global_batch,
            profile=self.profile,
            framework=self.framework,
            stack=self.stack,
        )
        return replace(made, memory_margin=self.memory_margin)


@dataclass(frozen=True, kw_only=True)
class Written:
    """Files beside the document, and replays in it."""

    plot: Annotated[Path | None, target("--plot", help="Pareto plot: a .svg or .png file.")] = None
    instance: Annotated[
        Path | None,
        target("--instance", help="Write the best's segments as an astra instance."),
    ] = None
    write_plan: Annotated[
        Path | None,
        target("--write-plan", help="Write the best as a plan file (needs --cluster)."),
    ] = None
    replayed: Annotated[
        int,
        typer.Option("--replay", metavar="N", help="Replay the N best (needs --cluster).", min=0),
    ] = 0

    def check(self, cluster: str | None) -> None:
        """Raise InputError for another kind of picture, or a plan for no cluster."""
        require(
            self.plot is None or self.plot.suffix.lower() in (".svg", ".png"),
            "unknown kind of picture",
            where=str(self.plot),
            expected=".svg, .png",
        )
        for option, asked in (("--write-plan", self.write_plan), ("--replay", self.replayed)):
            require(
                not asked or cluster is not None,
                "a plan is for a cluster",
                where=option,
                expected="--cluster",
            )


def show_shipped_rules(wanted: bool) -> None:
    """Print the shipped rules and stop."""
    if wanted:
        rules = files("hetplan.formulations.astra.search") / "default.rules"
        typer.echo(rules.read_text(encoding="utf-8"), nl=False)
        raise typer.Exit()


def search(
    model: Annotated[
        str,
        offered(
            "models", "--model", "-m", metavar="NAME|FILE", help="Built-in model or config.json."
        ),
    ],
    gpus: GpuPool,
    kept: Filter,
    measurements: Measurements,
    written: Written,
    global_batch: Annotated[
        int, typer.Option("--global-batch", "-b", help="Samples per iteration.")
    ] = 1024,
    sequence: SequenceOption = None,
    precision: PrecisionOption = "fp16",
    tokens: Annotated[
        float, typer.Option("--tokens", help="Of the whole training, for money.")
    ] = 1e9,
    money_limit: Annotated[
        float | None, typer.Option("--money-limit", help="Dollars for those tokens.")
    ] = None,
    show_rules: Annotated[
        bool,
        typer.Option(
            "--show-rules",
            callback=show_shipped_rules,
            is_eager=True,
            help="Print the shipped rules and stop.",
        ),
    ] = False,
    top: Annotated[int, typer.Option("--top", metavar="N", help="Strategies to list.", min=1)] = 10,
    time_limit: TimeOption = None,
    json: JsonOption = False,
    output: OutputOption = None,
) -> int:
    """Search parallel strategies for a model: generate, filter by rules and memory, price, rank,
    with a proof.

    Exit code 0 when a strategy was found, 1 when none passes the rules, fits in memory and keeps
    the money limit.
    """
    written.check(gpus.cluster)
    canvas = None if written.plot is None else figure(4.8)
    run = Run(make_options(time_limit=time_limit))
    trained = load_model(
        model,
        sequence=sequence,
        precision=precision,
        attention=load_stack(measurements.stack, where="--stack").attention,
    )
    job, pool = Job(trained, global_batch, tokens, money_limit), gpus.pool()
    assumed, types = measurements.assumptions(trained, pool), [o.name for o in pool.offers]
    sizes = {} if assumed.profile is None else measured_sizes(assumed.profile, types)
    space, rules = kept.space(sizes), kept.rules_for(pool)
    with derived(f"{trained.name} on the pool"):
        result = engine.search(
            job, pool, space=space, rules=rules, assumed=assumed, run=run, top=top
        )
    if written.plot is not None and canvas is not None:
        title = f"{trained.name}, {pool.mode} pool, {job.tokens:g} tokens"
        write_bytes(written.plot, pareto_picture(result, *canvas, written.plot, title))
    if written.instance is not None:
        write_instance(result, written.instance, job, pool)
    for line in trained.notes:
        note(line)
    cluster, count = gpus.cluster, written.replayed
    replays = replays_of(result.top[:count], pool, cluster, job, measurements) if cluster else []
    emit(
        as_document(job, pool, result, replays),
        tables(job, pool, result, replays),
        json=json,
        output=output,
    )
    if result.best is None:
        return 1
    if written.write_plan is not None and cluster is not None:
        save_best(result.best, pool, cluster, job, measurements, written.write_plan)
    return 0


def pareto_picture(result: SearchResult, made: Any, axes: Any, path: Path, title: str) -> bytes:
    """The Pareto set (Astra, Figure 7): every priced strategy a dot, the set a line, but for dots
    that would squeeze the set into a corner. Raises InputError where no money is known, or the
    file's ending names no format."""
    front = [(c.tokens_per_second, c.money) for c in result.pareto if c.money is not None]
    require(
        front,
        "nothing to plot",
        where=str(path),
        expected="strategies with a known price",
    )
    ceiling = CEILING * max(money for _, money in front)
    priced = [(x, y) for x, y in result.points if y is not None]
    near = sorted((x, y) for x, y in priced if y <= ceiling)
    speeds, dollars = zip(*near[:: max(1, len(near) // DOTS)], strict=True)
    axes.scatter(speeds, dollars, s=3, color="#9aa5b1")
    axes.plot(*zip(*front, strict=True), "o-", color="#c0392b", markersize=5)
    axes.set(xlabel="tokens per second", ylabel="dollars for the job", title=figure_text(title))
    axes.set(xlim=(0, None), ylim=(0, None))
    return as_picture(made, path.suffix[1:].lower())


def save_best(
    best: Candidate, pool: Pool, cluster: str, job: Job, measured: Measurements, path: Path
) -> None:
    """The best strategy's plan file; raises UnsupportedError where it cannot say an option."""
    # loaded with the planner, which the search itself does not need
    from hetplan.planner.astra import plan_of

    workload = measured.workload(job, cluster)
    with_inputs(plan_of(best, workload, pool), Inputs.of(workload)).save(path)


Replays = list[tuple[float | None, Candidate]]


def replays_of(
    candidates: Sequence[Candidate], pool: Pool, cluster: str, job: Job, measured: Measurements
) -> Replays:
    """Strategies with their replayed seconds, None where a plan or the replay cannot say them."""
    if not candidates:
        return []
    from hetplan.planner.astra import PoolProblem, replayed_seconds, unsaid

    workload = measured.workload(job, cluster)
    make = PoolProblem(workload, pool.mode, pool).to_plan
    return [(None if unsaid(c) else replayed_seconds(make(c), workload), c) for c in candidates]


def name_and_count(text: str) -> tuple[str, int]:
    """`A800:2048` as ("A800", 2048); raises InputError."""
    name, colon, count = text.rpartition(":")
    fits = bool(colon and name and count.isdecimal() and 0 < int(count) <= 10**6)
    require_option(fits, "--gpus", text, "TYPE:COUNT, like A800:2048")
    return name, int(count)


def parameter_value(text: str, usual: object) -> Any:
    """A parameter's text as what its usual value is: a switch, or several switches, words or
    numbers; raises InputError."""
    parts = dict.fromkeys(split_list([text]))
    match usual:
        case bool():
            return switch(text, "--param")
        case (bool(), *_):
            return tuple(switch(part, "--param") for part in parts)
        case (None | str(), *_):
            return tuple(None if part.lower() == "none" else part for part in parts)
    return whole_numbers([text], "--param")


def as_document(job: Job, pool: Pool, result: SearchResult, replays: Replays) -> dict[str, Any]:
    """The search as one JSON document."""
    return {
        "workload": {
            "model": job.model.name,
            "global_batch": job.global_batch,
            "sequence": job.model.sequence,
            "precision": job.model.precision,
            "tokens": job.tokens,
            "money_limit": job.money_limit,
        },
        "pool": {
            "mode": pool.mode,
            "sizes": list(pool.sizes),
            "types": [
                {
                    "type": offer.name,
                    "most": offer.most,
                    "devices_per_node": offer.node_devices,
                    "intra_node_bytes_per_s": offer.intra,
                    "network_bytes_per_s": offer.network,
                    "price_per_hour": offer.spec.price_per_hour,
                }
                for offer in pool.offers
            ],
        },
        **result.as_dict(),
        "replayed_seconds": [seconds for seconds, _ in replays],
    }


def tables(job: Job, pool: Pool, result: SearchResult, replays: Replays) -> Iterator[Table]:
    """Counts, the best strategies, the Pareto set, and what was replayed."""
    counts = ", ".join(f"{value:,} {key.replace('_', ' ')}" for key, value in result.counts.items())
    title = f"{job.model.name}, global batch {job.global_batch}: {pool.mode} pool"
    notes = [
        f"strategies: {counts}; {seconds_text(result.seconds)}",
        f"proof: {result.proof}" if result.proven else result.proof,
        *(f"left out: {text}" for text in result.left_out),
    ]
    if result.best is None:
        yield Table(title, (), (), notes=(*notes, f"no strategy: {result.reason}"))
        return
    pipeline, reduction, optimizer = (seconds_text(part) for part in result.best.parts)
    notes.append(
        f"best: {pipeline} pipeline + {reduction} exposed gradient reduction + {optimizer} "
        "optimizer"
    )
    limit = "" if job.money_limit is None else f" within {number_text(job.money_limit)} dollars"
    yield Table(title, (), (), notes=tuple(notes))
    yield candidate_table(f"best{limit}", [result.best], job)
    if result.top != result.pareto[: len(result.top)]:
        yield candidate_table("by throughput", result.top, job)
    yield candidate_table("Pareto set of throughput and money", result.pareto, job)
    if replays:
        order = sorted(replays, key=lambda pair: math.inf if pair[0] is None else pair[0])
        title = f"the {len(order)} best by the formula, fastest replay first"
        rows = ((seconds_text(s), seconds_text(c.seconds), summary(c)) for s, c in order)
        yield Table(title, ("replayed", "objective", "strategy"), tuple(rows), right=(0, 1))


def candidate_table(title: str, candidates: Sequence[Candidate], job: Job) -> Table:
    """One line per candidate; those whose lines would be the same share one."""
    header = ("tokens/s", "s/iteration", f"dollars/{count_text(job.tokens)} tokens", "strategy")
    rows = dict.fromkeys(
        (f"{c.tokens_per_second:,.0f}", seconds_text(c.seconds), number_text(c.money), summary(c))
        for c in candidates
    )
    return Table(title, header, tuple(rows), right=(0, 1, 2))


def write_instance(result: SearchResult, path: Path, job: Job, pool: Pool) -> None:
    """The best strategy's segments as an instance file for `hetplan solve`; says so where there are
    none."""
    if result.instance is None:
        note(f"{path} not written: the strategy mixes no types, so there are no segments")
        return
    types = "-".join(offer.name for offer in pool.offers)
    save_instance(
        Instance(
            problem="astra",
            name=f"{job.model.name}-{types}-{pool.sizes[0]}",
            origin=f"hetplan plan search: {job.model.name}, global batch {job.global_batch}, best "
            f"strategy of {pool.sizes[0]} GPUs; "
            "times are predicted; its objective is the pipeline's seconds, without gradient "
            "reduction and optimizer",
            data=result.instance,
        ),
        path,
    )
