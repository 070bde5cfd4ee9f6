"""`hetplan plan search` runs Astra's strategy search for a model on a pool of GPUs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from hetplan.cli.help_page import described
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
    Trainer,
    check_picture,
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
from hetplan.profiling.frameworks import MEGATRON
from hetplan.profiling.hardware.cluster import GBIT, MAX_DEVICES, Cluster
from hetplan.profiling.inputs.inputs import Inputs
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.operators import DEFAULT_STACK, load_stack
from hetplan.profiling.profiles.profile import load_profile
from hetplan.profiling.rates.collectives import borrowed_curves
from hetplan.profiling.rates.efficiency import LearnedLinks, LinkEfficiencyFile
from hetplan.profiling.workload import Workload, check_profile, check_units, make_workload
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.offers import Offer, offer_of, offers_of_cluster
from hetplan.schema import LEAST_RATE, MOST_RATE, derived
from hetplan.solvers.run import Run
from hetplan.studies.charts import as_picture, figure
from hetplan.text import Table, count_text, figure_text, number_text, seconds_text

# A Pareto plot with more dots is thinned out to fewer than twice this number: more of them overlap,
# and make an SVG file large.
DOTS = 3000
CEILING = 4.0  # a dot may cost this multiple of the Pareto set's dearest point


@dataclass(frozen=True, kw_only=True)
class GpuPool:
    """The options that describe the pool: GPU types with their numbers, or a cluster file, and the
    bandwidths of links."""

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
        """The GPU types on offer, from `TYPE:COUNT` texts or a cluster file, with the links that
        the options give. Raises InputError."""
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
        replaced = {field: value for field, value in changes.items() if value is not None}
        return tuple(replace(offer, **replaced) for offer in offers)

    def pool(self) -> Pool:
        """The pool that the options describe. Where they name no mode, one type gives a homogeneous
        pool and several types a heterogeneous one. Raises InputError."""
        offers = self.offers()
        mode = self.mode or ("homogeneous" if len(offers) == 1 else "heterogeneous")
        require(
            self.total is None or mode == "heterogeneous",
            "--total is for the heterogeneous mode",
            got=self.total,
        )
        if mode == "cost":
            # It takes one type at a time, and each up to the same number of GPUs (eq. 3).
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
    """The options that limit the strategies: the ranges of their parameters, and rules that drop
    some of them."""

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
        """The rules that apply: the shipped ones, unless the user excludes them, and the rules of
        the user's files. Raises InputError."""
        columns = columns_of(pool)
        rules = default_rules(columns) if self.default_rules else []
        for path in self.rules or []:
            rules += rules_from_file(path, columns)
        return rules

    def space(self, measured: Mapping[str, Any]) -> Space:
        """The space of the strategies' parameters.

        A range that the user gives comes first, then a range in `measured`, then the default one.
        Raises InputError.
        """
        usual = Space()
        values: dict[str, Any] = {}  # parameter -> the user's range
        for text in self.parameter or []:
            left, equals, right = (part.strip() for part in text.partition("="))
            name = left.replace("-", "_")
            require_option(bool(equals and right), "--param", text, "NAME=VALUE[,VALUE…]")
            require(name not in values, f"{name} is given twice", where="--param")
            check_name("unknown parameter", name, PARAMETERS, where="--param")
            values[name] = parameter_value(right, getattr(usual, name))
        return replace(usual, **(dict(measured) | values))


@dataclass(frozen=True, kw_only=True)
class Measurements(Trainer):
    """The options that name measurements to use in place of predictions, the software that
    computes, and the framework whose memory counts."""

    profile: ProfileOption = None
    efficiency: EfficiencyOption = None
    links: LinksOption = None
    stack: StackOption = DEFAULT_STACK.name
    framework: FrameworkOption = MEGATRON.name
    memory_margin: MarginOption = 0.05

    def assumptions(self, model: Model, pool: Pool) -> Assumptions:
        """The assumptions behind the predicted seconds and bytes.

        Raises InputError for a measurement of another model or of other device types.
        """
        from hetplan.cli.profile import learned_of

        profile, links = None, None
        nodes = tuple(offer.node for offer in pool.offers)
        specs = {offer.name: offer.spec for offer in pool.offers}
        types = Cluster("the pool", nodes, specs)
        learned = learned_of(self.efficiency or [], types, model.precision)
        stack = self.reducing(load_stack(self.stack, where="--stack"))
        check_units(stack, model, types)
        if self.profile is not None:
            profile = load_profile(self.profile)
            check_profile(profile, model, types, where=str(self.profile))
        if self.links is not None:
            links = LearnedLinks(LinkEfficiencyFile.load(self.links))
        return Assumptions(
            framework=self.trainer(),
            memory_margin=self.memory_margin,
            profile=profile,
            learned=learned,
            links=links,
            stack=stack,
        )

    def workload(self, job: Job, cluster: str) -> Workload:
        """The job as a workload on a cluster. cluster: a file, or an example's name."""
        workload = make_workload(
            job.model,
            open_cluster(cluster),
            job.global_batch,
            profile=self.profile,
            framework=self.trainer(),
            stack=self.reducing(load_stack(self.stack, where="--stack")),
        )
        return replace(workload, memory_margin=self.memory_margin)


@dataclass(frozen=True, kw_only=True)
class Written:
    """The options that ask for files beside the JSON document, and for replays."""

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
        """Raise InputError for a picture in an unknown format, and for a plan or a replay without a
        cluster."""
        check_picture(self.plot)
        for option, value in (("--write-plan", self.write_plan), ("--replay", self.replayed)):
            require(
                not value or cluster is not None,
                "a plan is for a cluster",
                where=option,
                expected="--cluster",
            )


def show_shipped_rules(wanted: bool) -> None:
    """The callback of `--show-rules`: print the shipped rules, and the names that rules may use as
    comments, and stop."""
    if not wanted:
        return
    from hetplan.formulations.astra.search.rule_names import MEANINGS

    rules = files("hetplan.formulations.astra.search") / "default.rules"
    typer.echo(rules.read_text(encoding="utf-8"), nl=False)
    typer.echo("\n# Names:")
    for name, meaning in MEANINGS.items():
        typer.echo(f"#   ${name}: {meaning}")
    raise typer.Exit()


@described(
    examples=(
        (
            "The fastest strategies on 64 GPUs of one type",
            "hetplan plan search --model llama2-7b --gpus A800:64 --global-batch 512",
        ),
        (
            "Search on a cluster file, and write the best plan",
            "hetplan plan search --model gpt2-medium --cluster p3-4 --global-batch 64 "
            "--write-plan plan.json",
        ),
    ),
)
def search(
    model: Annotated[
        str,
        offered(
            "models", "--model", "-m", metavar="NAME|FILE", help="Built-in model or config.json."
        ),
    ],
    gpus: GpuPool,
    filters: Filter,
    measurements: Measurements,
    written: Written,
    global_batch: Annotated[
        int, typer.Option("--global-batch", "-b", help="Samples per iteration.")
    ] = 1024,
    sequence: SequenceOption = None,
    precision: PrecisionOption = "fp16",
    tokens: Annotated[
        float, typer.Option("--tokens", help="Tokens of the whole training, for its money.")
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
    # Made before the search, so that a missing matplotlib is noticed at once.
    empty_plot = None if written.plot is None else figure(4.8)  # inches of its height
    run = Run(make_options(time_limit=time_limit))
    trained = load_model(
        measurements.trained(model),
        sequence=sequence,
        precision=precision,
        attention=load_stack(measurements.stack, where="--stack").attention,
    )
    job, pool = Job(trained, global_batch, tokens, money_limit), gpus.pool()
    assumed = measurements.assumptions(trained, pool)
    types = [offer.name for offer in pool.offers]
    sizes = {} if assumed.profile is None else measured_sizes(assumed.profile, types)
    space = filters.space(sizes)
    rules = filters.rules_for(pool)
    with derived(f"{trained.name} on the pool"):
        result = engine.search(
            job, pool, space=space, rules=rules, assumed=assumed, run=run, top=top
        )
    if written.plot is not None and empty_plot is not None:
        canvas, axes = empty_plot
        title = f"{trained.name}, {pool.mode} pool, {job.tokens:g} tokens"
        write_bytes(written.plot, pareto_picture(result, canvas, axes, written.plot, title))
    if written.instance is not None:
        write_instance(result, written.instance, job, pool)
    for line in trained.notes:
        note(line)
    if assumed.links is None:  # measured links leave the curves of fabrics out
        note(*borrowed_curves(offer.node for offer in pool.offers))
    cluster = gpus.cluster
    replays: Replays = []
    if cluster:
        best_few = result.top[: written.replayed]
        replays = replays_of(best_few, pool, cluster, job, measurements)
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


def pareto_picture(result: SearchResult, canvas: Any, axes: Any, path: Path, title: str) -> bytes:
    """The Pareto plot (Astra, Figure 7) in the format of the file's ending.

    Every priced strategy is a dot and the Pareto set is a line. Dots that cost more than CEILING
    times the set's dearest point are left out, since they would squeeze the set into a corner.
    canvas, axes: an empty figure of matplotlib. Raises InputError where no price is known, or the
    file's ending names no format.
    """
    front = [(c.tokens_per_second, c.money) for c in result.pareto if c.money is not None]
    require(
        front,
        "nothing to plot",
        where=str(path),
        expected="strategies with a known price",
    )
    ceiling = CEILING * max(money for _, money in front)
    priced = [(speed, money) for speed, money in result.points if money is not None]
    near = sorted((speed, money) for speed, money in priced if money <= ceiling)
    step = max(1, len(near) // DOTS)
    # Not empty: the points of the front are priced, and none is above the ceiling.
    speeds, dollars = zip(*near[::step], strict=True)
    axes.scatter(speeds, dollars, s=3, color="#9aa5b1")
    axes.plot(*zip(*front, strict=True), "o-", color="#c0392b", markersize=5)
    axes.set(xlabel="tokens per second", ylabel="dollars for the job", title=figure_text(title))
    axes.set(xlim=(0, None), ylim=(0, None))
    return as_picture(canvas, path.suffix[1:].lower())


def save_best(
    best: Candidate, pool: Pool, cluster: str, job: Job, measured: Measurements, path: Path
) -> None:
    """Write the best strategy as a plan file.

    Raises UnsupportedError where a plan cannot express one of the strategy's options.
    """
    # Imported here, since the search itself does not need the planner.
    from hetplan.planner.astra import plan_of

    workload = measured.workload(job, cluster)
    with_inputs(plan_of(best, workload, pool), Inputs.of(workload)).save(path)


Replays = list[tuple[float | None, Candidate]]  # (replayed seconds, strategy)


def replays_of(
    candidates: Sequence[Candidate], pool: Pool, cluster: str, job: Job, measured: Measurements
) -> Replays:
    """The strategies with their replayed seconds; None: a plan or the replay cannot express the
    strategy."""
    if not candidates:
        return []
    from hetplan.planner.astra import PoolProblem, inexpressible, replayed_seconds

    workload = measured.workload(job, cluster)
    problem = PoolProblem(workload, pool.mode, pool)
    replays: Replays = []
    for candidate in candidates:
        seconds = None
        if not inexpressible(candidate):
            seconds = replayed_seconds(problem.to_plan(candidate), workload)
        replays.append((seconds, candidate))
    return replays


def name_and_count(text: str) -> tuple[str, int]:
    """(GPU type, number of GPUs) of a text: `A800:2048` is ("A800", 2048). Raises InputError."""
    name, colon, count = text.rpartition(":")
    # 10**6: the most that a `Pool` takes.
    usable = bool(colon and name and count.isdecimal() and 0 < int(count) <= 10**6)
    require_option(usable, "--gpus", text, "TYPE:COUNT, like A800:2048")
    return name, int(count)


def parameter_value(text: str, usual: object) -> Any:
    """The value of a parameter from its text. Its type is that of `usual`, the default value: a
    switch, or several switches, words or numbers. Raises InputError."""
    parts = dict.fromkeys(split_list([text]))  # an ordered set
    match usual:
        case bool():
            return switch(text, "--param")
        case (bool(), *_):
            return tuple(switch(part, "--param") for part in parts)
        case (None | str(), *_):
            return tuple(None if part.lower() == "none" else part for part in parts)
    return whole_numbers([text], "--param")


def as_document(job: Job, pool: Pool, result: SearchResult, replays: Replays) -> dict[str, Any]:
    """The search's result as JSON types."""
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
    """The tables of a search's result: the counts, the best strategies, the Pareto set, and the
    replayed strategies."""
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
    # Where the Pareto set begins with the best by throughput, its table shows them.
    if result.top != result.pareto[: len(result.top)]:
        yield candidate_table("by throughput", result.top, job)
    yield candidate_table("Pareto set of throughput and money", result.pareto, job)
    if replays:
        fastest_first = sorted(replays, key=lambda pair: math.inf if pair[0] is None else pair[0])
        title = f"the {len(replays)} best by the formula, fastest replay first"
        rows = tuple(
            (seconds_text(replayed), seconds_text(candidate.seconds), summary(candidate))
            for replayed, candidate in fastest_first
        )
        yield Table(title, ("replayed", "objective", "strategy"), rows, right=(0, 1))


def candidate_table(title: str, candidates: Sequence[Candidate], job: Job) -> Table:
    """A table with one row per candidate; candidates with equal rows share one."""
    header = ("tokens/s", "s/iteration", f"dollars/{count_text(job.tokens)} tokens", "strategy")
    rows: dict[tuple[str, ...], None] = {}  # an ordered set
    for candidate in candidates:
        row = (
            f"{candidate.tokens_per_second:,.0f}",
            seconds_text(candidate.seconds),
            number_text(candidate.money),
            summary(candidate),
        )
        rows[row] = None
    return Table(title, header, tuple(rows), right=(0, 1, 2))


def write_instance(result: SearchResult, path: Path, job: Job, pool: Pool) -> None:
    """Write the best strategy's segments as an instance file for `hetplan solve`. A strategy
    without segments gives a note on stderr and no file."""
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
