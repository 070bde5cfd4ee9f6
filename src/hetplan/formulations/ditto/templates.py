"""Pipeline templates for every part of a cluster, and pipelines made of them.

Oobleck (SOSP 2023, Section 4) keeps a template ready for each number of nodes from n_min to n, so
that it can go on at once when nodes fail. With several device types a number of nodes does not say
of which types they are. The list here has a proven template for each vector of nodes (one entry per
type), and so the fastest one for each number. Pipelines of these templates train side by side, an
instantiation. To choose the templates, their numbers of pipelines and their micro-batches (Section
4.2) is a problem of its own:

Sets   i templates, with nodes_i (a vector by device type), S_i stages and T_i(k) seconds for k
       micro-batches;  p pipelines, each of a template i(p).
Data   n nodes by type; B micro-batches in all; f pipelines that may fail: at least f + 1 pipelines,
       so that a copy of the model remains.
Vars   c_i in {0, 1, ...}: pipelines of template i;  k_p micro-batches of pipeline p.
Min    Z, seconds of the slowest pipeline  s.t.
(1) sum_i c_i nodes_i <= n
(2) sum_i c_i >= f + 1
(3) sum_p k_p = B,  k_p >= S_i(p)
(4) T_i(p)(k_p) <= Z
T_i grows with k. For a given Z a pipeline of template i takes S_i to K_i(Z) micro-batches, so that
(3) and (4) become sum_i c_i S_i <= B <= sum_i c_i K_i(Z). This is an integer programme in c alone.
CP-SAT solves it for each Z of a bisection over the values that Z can take.

The last functions show templates as tables for people: one decision, and the list of a cluster.
"""

import bisect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from hetplan.errors import require
from hetplan.formulations.ditto import exact
from hetplan.formulations.ditto.data import DittoData, DittoDecision, DittoStage
from hetplan.formulations.ditto.evaluate import evaluation_of, slowest_stage, stage_seconds
from hetplan.formulations.ditto.problem import total_seconds
from hetplan.solvers.general import minimise
from hetplan.solvers.model import Model
from hetplan.solvers.run import OPTIMAL_GAP, Run, Stop, Stopped, stop_reason
from hetplan.text import Table, grouped, percent_text, seconds_text

# Seconds that a value of Z counts towards the budget of a run.
VALUE_SECONDS = 1e-6

# A vector of nodes: the number of nodes of each device type, in the data's order.
Nodes = tuple[int, ...]
# Each micro-batch and each vector of nodes is looked at once.
MOST_MICRO_BATCHES, MOST_VECTORS = 10**6, 10**6


@dataclass(frozen=True)
class Template:
    """The template of one vector of nodes."""

    nodes: Nodes
    decision: DittoDecision  # its stages
    times: tuple[float, ...]  # seconds of each stage per micro-batch
    seconds: float  # T for the data's number of micro-batches
    # a proven lower bound on T of every template on these nodes; None: nothing is proven
    bound: float | None

    @classmethod
    def of(
        cls, data: DittoData, nodes: Nodes, decision: DittoDecision, bound: float | None = None
    ) -> "Template":
        """The template with these stages, priced with the times and micro-batches of `data`."""
        times = [stage_seconds(data, stage) for stage in decision.stages]
        return cls(nodes, decision, tuple(times), total_seconds(data.micro_batches, times), bound)

    @property
    def node_count(self) -> int:
        """The number of nodes that the template is for."""
        return sum(self.nodes)

    def iteration_seconds(self, micro_batches: int) -> float:
        """T in seconds with another number of micro-batches, which is at least that of stages."""
        return total_seconds(micro_batches, list(self.times))


@dataclass(frozen=True)
class TemplateList:
    """The templates of all parts of a cluster."""

    templates: tuple[Template, ...]
    infeasible: tuple[Nodes, ...]  # vectors of nodes whose memory no template fits in
    complete: bool  # whether time sufficed for all vectors

    def by_count(self) -> dict[int, Template]:
        """The fastest template of each number of nodes."""
        alike = grouped((template.node_count, template) for template in self.templates)
        return {n: min(alike[n], key=lambda template: template.seconds) for n in sorted(alike)}


def template_list(data: DittoData, run: Run, *, fewest: int = 1) -> TemplateList:
    """The templates of all vectors of at least `fewest` nodes, each proven within the run's gap.
    Vectors with fewer nodes come first."""
    templates: list[Template] = []
    infeasible: list[Nodes] = []
    for nodes in node_vectors(data, fewest):
        if run.should_stop:
            return TemplateList(tuple(templates), tuple(infeasible), complete=False)
        part = cluster_part(data, nodes)
        answer = exact.solve(part, run.part())
        if answer.decision is None:
            if answer.stop is not Stop.INFEASIBLE:
                return TemplateList(tuple(templates), tuple(infeasible), complete=False)
            infeasible.append(nodes)
            continue
        templates.append(Template.of(part, nodes, answer.decision, answer.bound))
        run.report(note=f"{len(templates)} templates")
    return TemplateList(tuple(templates), tuple(infeasible), complete=True)


def ready_templates(data: DittoData, ready: Sequence[Sequence[DittoStage]]) -> list[Template]:
    """The templates of these pipelines, priced with this data's times.

    ready: the stages of each pipeline. A pipeline is left out where it has a device type that the
    data lack, or needs more nodes of a type than there are.
    """
    types = data.device_types
    names = {device_type.name for device_type in types}
    available = tuple(device_type.nodes for device_type in types)
    templates = []
    for stages in ready:
        devices = Counter[str]()  # of each type
        for stage in stages:
            devices[stage.type] += stage.devices
        if not names.issuperset(devices):
            continue
        needed = tuple(
            math.ceil(devices[device_type.name] / device_type.devices_per_node)
            for device_type in types
        )
        if fits(needed, available):
            templates.append(Template.of(data, needed, DittoDecision(stages=list(stages))))
    return templates


def node_vectors(data: DittoData, fewest: int = 1) -> Iterator[Nodes]:
    """All vectors of at least `fewest` nodes, those with fewer nodes first."""
    vectors = product(*(range(device_type.nodes + 1) for device_type in data.device_types))
    large_enough = [nodes for nodes in vectors if sum(nodes) >= max(fewest, 1)]
    return iter(sorted(large_enough, key=lambda nodes: (sum(nodes), nodes)))


def cluster_part(data: DittoData, nodes: Nodes) -> DittoData:
    """The instance with this vector of nodes in place of its own."""
    types = [
        device_type.model_copy(update={"nodes": count})
        for device_type, count in zip(data.device_types, nodes, strict=True)
    ]
    return data.model_copy(update={"device_types": types})


@dataclass(frozen=True)
class Pipeline:
    """One pipeline of an instantiation."""

    template: Template
    micro_batches: int

    @property
    def iteration_seconds(self) -> float:
        """T of the pipeline, in seconds."""
        return self.template.iteration_seconds(self.micro_batches)


@dataclass(frozen=True)
class Instantiation:
    """Pipelines that train side by side. `instantiate` chooses them."""

    stop: Stop  # `optimal`, `infeasible`, a limit or `interrupted`
    pipelines: tuple[Pipeline, ...] = ()  # empty where no pipelines were found
    bound: float | None = None  # seconds, proven: no instantiation of the templates is faster
    message: str = ""

    @property
    def iteration_seconds(self) -> float | None:
        """Z, seconds of the slowest pipeline, after which gradients are synchronised. None where
        there is no pipeline."""
        return max((pipeline.iteration_seconds for pipeline in self.pipelines), default=None)


def instantiate(
    templates: Sequence[Template], nodes: Nodes, micro_batches: int, run: Run, *, failures: int = 0
) -> Instantiation:
    """The fastest instantiation of these templates; when time runs out, the best one so far.

    nodes: n. micro_batches: B. failures: f.
    """
    useful = [
        template
        for template in templates
        if len(template.times) <= micro_batches and fits(template.nodes, nodes)
    ]
    best: list[int] | None = None
    try:
        values = iteration_values(useful, micro_batches, run)
    except Stopped:
        return Instantiation(stop_reason(run))
    if values.size:
        best = count_pipelines(useful, nodes, micro_batches, math.inf, failures, run)
    if best is None:
        if run.should_stop:
            return Instantiation(stop_reason(run))
        reason = f"no templates add up to {failures + 1} pipelines on these nodes"
        message = f"{reason} with {micro_batches} micro-batches"
        return Instantiation(Stop.INFEASIBLE, message=message)
    first, last = 0, len(values) - 1
    while first < last:
        middle = (first + last) // 2
        answer = count_pipelines(useful, nodes, micro_batches, float(values[middle]), failures, run)
        if answer is not None:
            best, last = answer, middle
        elif run.should_stop:
            break
        else:
            first = middle + 1
    pipelines = share_out(useful, best, micro_batches)
    # every value below that number `first` is proven too small
    stop = Stop.OPTIMAL if first == last else stop_reason(run)
    return Instantiation(stop, pipelines, float(values[first]))


def fits(part: Nodes, whole: Nodes) -> bool:
    """Whether `part` has no more nodes of any type than `whole`."""
    return all(needed <= there for needed, there in zip(part, whole, strict=True))


def iteration_values(templates: Sequence[Template], micro_batches: int, run: Run) -> np.ndarray:
    """All values that Z can take, ascending. Raises Stopped where time runs out: the values are as
    many as micro-batches."""
    values = []
    for template in templates:
        for count in range(len(template.times), micro_batches + 1):
            run.check(VALUE_SECONDS)
            values.append(template.iteration_seconds(count))
    return np.unique(np.array(values))


def most_micro_batches(template: Template, seconds: float, limit: int) -> int:
    """K_i, the most micro-batches (at most `limit`) that the template finishes within `seconds`.

    It is S_i - 1 where even S_i micro-batches take longer.
    """
    fewest = len(template.times)
    counts = range(fewest, limit + 1)
    return fewest - 1 + bisect.bisect_right(counts, seconds, key=template.iteration_seconds)


def count_pipelines(
    templates: Sequence[Template],
    nodes: Nodes,
    micro_batches: int,
    seconds: float,
    failures: int,
    run: Run,
) -> list[int] | None:
    """c, the number of pipelines of each template, with (1), (2) and sum c S <= B <= sum c K(Z).

    seconds: Z. None where there is no such c, or where time ran out.
    """
    # [templates] K_i(Z), and S_i
    most_each = np.array([most_micro_batches(t, seconds, micro_batches) for t in templates])
    stages = np.array([len(t.times) for t in templates])
    # [templates, types] nodes of a pipeline, and the most pipelines that they allow. A type of
    # which a template needs none sets no limit: each pipeline takes at least one micro-batch.
    needed = np.array([t.nodes for t in templates])
    most_by_type = np.array(nodes) // np.maximum(needed, 1) + micro_batches * (needed == 0)
    most_pipelines = np.where(most_each >= stages, most_by_type.min(axis=1), 0)
    model = Model("pipelines", run)
    try:
        count = model.integer("count", len(templates), 0, most_pipelines)
        model.row("nodes", needed.T @ count <= nodes)  # (1)
        model.row("pipelines", count.sum() >= failures + 1)  # (2)
        model.row("least", stages @ count <= micro_batches)  # (3)
        model.row("most", most_each @ count >= micro_batches)  # (3), (4)
    except Stopped:
        return None
    answer = minimise("cp-sat", model, run.part())
    return None if answer.x is None else answer.counts("count").tolist()


def share_out(
    templates: Sequence[Template], count: Sequence[int], micro_batches: int
) -> tuple[Pipeline, ...]:
    """The pipelines with their micro-batches, the fastest for these numbers of pipelines.

    Each pipeline gets one micro-batch per stage. Each further one goes to the pipeline that is then
    the fastest with it. count: the number of pipelines of each template.
    """
    chosen: list[Template] = []  # the template of each pipeline
    for template, pipelines in zip(templates, count, strict=True):
        chosen += [template] * pipelines
    share = [len(template.times) for template in chosen]
    # seconds of each pipeline with one micro-batch more
    with_one_more = [
        template.iteration_seconds(k + 1) for template, k in zip(chosen, share, strict=True)
    ]
    for _ in range(micro_batches - sum(share)):  # not negative by (3)
        p = with_one_more.index(min(with_one_more))
        share[p] += 1
        with_one_more[p] = chosen[p].iteration_seconds(share[p] + 1)
    return tuple(Pipeline(template, k) for template, k in zip(chosen, share, strict=True))


@dataclass(frozen=True)
class Readiness:
    """The templates that a cluster keeps ready, and the pipelines that it runs."""

    data: DittoData
    micro_batches: int  # B, of all pipelines together
    failures: int  # f, pipelines that may fail
    listed: TemplateList
    exact: Instantiation  # the fastest one on all nodes

    @property
    def names(self) -> list[str]:
        """Device types, in the order of a vector of nodes."""
        return [kind.name for kind in self.data.device_types]


def readiness(
    data: DittoData,
    run: Run,
    *,
    fewest: int = 1,
    micro_batches: int | None = None,
    failures: int = 0,
) -> Readiness:
    """The template list of a cluster, and the fastest instantiation on all its nodes.

    fewest: nodes of the smallest vectors in the list. micro_batches: B; None: that of the instance.
    failures: f. Raises InputError for a count that is not possible on this cluster.
    """
    nodes = tuple(kind.nodes for kind in data.device_types)
    wanted = data.micro_batches if micro_batches is None else micro_batches
    for where, got, allowed, expected in (
        ("fewest nodes", fewest, 1 <= fewest <= sum(nodes), f"1 to {sum(nodes)}"),
        ("failures", failures, 0 <= failures < sum(nodes), f"0 to {sum(nodes) - 1}"),
        ("micro-batches", wanted, 1 <= wanted <= MOST_MICRO_BATCHES, f"1 to {MOST_MICRO_BATCHES}"),
    ):
        require(allowed, "not usable", where=where, got=got, expected=expected)
    vectors = math.prod(count + 1 for count in nodes)
    require(
        vectors <= MOST_VECTORS,
        "too many parts of the cluster for a template each",
        where="nodes",
        got=vectors,
        expected=f"at most {MOST_VECTORS}",
    )
    listed = template_list(data, run, fewest=fewest)
    run.report(note="instantiation")
    chosen = instantiate(listed.templates, nodes, wanted, run, failures=failures)
    return Readiness(data, wanted, failures, listed, chosen)


def describe(data: DittoData, decision: DittoDecision) -> list[Table]:
    """The stages of a feasible template, with T1, T2 and T3 in the notes."""
    times = [stage_seconds(data, stage) for stage in decision.stages]
    slowest = slowest_stage(times)
    rows = []
    for k, (stage, seconds) in enumerate(zip(decision.stages, times, strict=True)):
        share = "-"
        if k == slowest:
            share = "slowest"
        elif times[slowest]:
            share = f"{100 * seconds / times[slowest]:.1f} %"
        layers = f"{stage.first}"
        if stage.last - stage.first > 1:
            layers = f"{stage.first}-{stage.last - 1}"
        rows.append((f"{k}", layers, stage.type, f"{stage.devices}", seconds_text(seconds), share))
    parts = evaluation_of(data.micro_batches, times).parts
    used = sum(stage.devices for stage in decision.stages)
    available = sum(kind.nodes for kind in data.device_types) * data.devices_per_node
    title = (
        f"{data.layers} layers on {len(times)} stages, {used} of {available} devices, "
        f"{data.micro_batches} micro-batches"
    )
    header = ("stage", "layers", "type", "devices", "per micro-batch", "of the slowest")
    notes = tuple(
        f"{name} {seconds_text(parts[name])}: {meaning}"
        for name, meaning in (
            ("T1", "the first micro-batch through all stages"),
            ("T2", "the steady phase, paced by the slowest stage"),
            ("T3", "the last micro-batch from the slowest stage on"),
        )
    )
    return [Table(title, header, tuple(rows), notes=notes, right=(0, 3, 4, 5))]


def rows_of(ready: Readiness) -> dict[str, Any]:
    """The list of templates and the pipelines as JSON types."""
    fastest = {template.nodes for template in ready.listed.by_count().values()}
    return {
        "complete": ready.listed.complete,
        "templates": [
            {
                "nodes": named_nodes(ready, template.nodes),
                "node_count": template.node_count,
                "fastest_of_its_count": template.nodes in fastest,
                "predicted_seconds": template.seconds,
                "bound": template.bound,
                "decision": template.decision.model_dump(mode="json"),
            }
            for template in ready.listed.templates
        ],
        "infeasible": [named_nodes(ready, nodes) for nodes in ready.listed.infeasible],
        "micro_batches": ready.micro_batches,
        "failures": ready.failures,
        "instantiation": {"exact": instantiation_document(ready)},
    }


def named_nodes(ready: Readiness, nodes: Nodes) -> dict[str, int]:
    """Device type -> number of nodes."""
    return dict(zip(ready.names, nodes, strict=True))


def instantiation_document(ready: Readiness) -> dict[str, Any]:
    """The pipelines to run as JSON types."""
    chosen = ready.exact
    return {
        "stop": str(chosen.stop),
        "predicted_seconds": chosen.iteration_seconds,
        "bound": chosen.bound,
        "message": chosen.message,
        "pipelines": [
            {
                "nodes": named_nodes(ready, pipeline.template.nodes),
                "micro_batches": pipeline.micro_batches,
                "predicted_seconds": pipeline.iteration_seconds,
            }
            for pipeline in chosen.pipelines
        ],
    }


def tables_of(ready: Readiness) -> list[Table]:
    """The fastest template of each number of nodes, then the pipelines to run."""
    return [template_table(ready), instantiation_table(ready)]


def template_table(ready: Readiness) -> Table:
    """The table of the fastest template of each number of nodes."""
    rows = tuple(
        (
            f"{count}",
            nodes_text(ready, template.nodes),
            f"{len(template.times)}",
            seconds_text(template.seconds),
            proof_text(template),
        )
        for count, template in ready.listed.by_count().items()
    )
    notes = [
        f"{len(ready.listed.templates)} templates in all, one per combination of nodes "
        "(--json lists them)"
    ]
    if ready.listed.infeasible:
        shown = [nodes_text(ready, nodes) for nodes in ready.listed.infeasible[:4]]
        more = len(ready.listed.infeasible) - len(shown)
        and_more = f" and {more} more" if more else ""
        notes.append(f"no template fits on {', '.join(shown)}{and_more}")
    if not ready.listed.complete:
        notes.append("time ran out before the list was complete")
    title = (
        "fastest template of each number of nodes, "
        f"{ready.data.micro_batches} micro-batches (predicted)"
    )
    header = ("nodes", "of which", "stages", "iteration", "")
    return Table(title, header, rows, notes=tuple(notes), right=(0, 2, 3))


def proof_text(template: Template) -> str:
    """The proof of a template: `proven`, or its gap; empty without a bound."""
    if template.bound is None:
        return ""
    gap = 1 - template.bound / template.seconds if template.seconds > 0 else 0.0
    return "proven" if gap <= OPTIMAL_GAP else f"gap {percent_text(gap)}"


def instantiation_table(ready: Readiness) -> Table:
    """The table of the pipelines to run."""
    chosen = ready.exact
    row = (
        "proven" if chosen.stop is Stop.OPTIMAL else str(chosen.stop),
        seconds_text(chosen.iteration_seconds),
        pipelines_text(ready, chosen) or chosen.message,
    )
    title = (
        f"pipelines for {ready.micro_batches} micro-batches, {ready.failures} of them may be lost"
    )
    return Table(title, ("", "iteration", "pipelines"), (row,), right=(1,))


def pipelines_text(ready: Readiness, chosen: Instantiation) -> str:
    """The pipelines as text, such as `2 x (1 V100 + 1 T4: 40)` for two pipelines with these nodes
    and 40 micro-batches each."""
    alike = Counter(
        (pipeline.template.nodes, pipeline.micro_batches) for pipeline in chosen.pipelines
    )
    return ", ".join(
        f"{count} x ({nodes_text(ready, nodes)}: {micro_batches})"
        for (nodes, micro_batches), count in sorted(alike.items())
    )


def nodes_text(ready: Readiness, nodes: Nodes) -> str:
    """A vector of nodes as text, such as `2 V100 + 1 T4`."""
    return " + ".join(f"{n} {name}" for n, name in zip(nodes, ready.names, strict=True) if n)
