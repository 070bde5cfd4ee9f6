"""Templates as tables for people: one decision, and what a cluster keeps at hand."""

from collections import Counter
from typing import Any

from hetplan.formulations.ditto.data import DittoData, DittoDecision
from hetplan.formulations.ditto.evaluate import price, slowest_stage, stage_seconds
from hetplan.formulations.ditto.templates import Instantiation, Nodes, Readiness, Template
from hetplan.solvers.run import Stop
from hetplan.text import Table, percent_text, seconds_text


def describe(data: DittoData, decision: DittoDecision) -> list[Table]:
    """The stages of a feasible template, with T1, T2 and T3 in the notes."""
    times = [stage_seconds(data, stage) for stage in decision.stages]
    slowest = slowest_stage(times)
    rows = []
    for k, (stage, seconds) in enumerate(zip(decision.stages, times, strict=True)):
        share = (
            "slowest"
            if k == slowest
            else f"{100 * seconds / times[slowest]:.1f} %"
            if times[slowest]
            else "-"
        )
        layers = (
            f"{stage.first}-{stage.last - 1}" if stage.last - stage.first > 1 else f"{stage.first}"
        )
        rows.append((f"{k}", layers, stage.type, f"{stage.devices}", seconds_text(seconds), share))
    parts = price(data.micro_batches, times).parts
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
    """All of it as JSON types."""
    chosen, every = ready.exact, ready.listed.by_count().values()
    fastest = {template.nodes for template in every}
    return {
        "complete": ready.listed.complete,
        "templates": [
            {
                "nodes": dict(zip(ready.names, template.nodes, strict=True)),
                "node_count": template.node_count,
                "fastest_of_its_count": template.nodes in fastest,
                "predicted_seconds": template.seconds,
                "bound": template.bound,
                "decision": template.decision.model_dump(mode="json"),
            }
            for template in ready.listed.templates
        ],
        "infeasible": [
            dict(zip(ready.names, nodes, strict=True)) for nodes in ready.listed.infeasible
        ],
        "micro_batches": ready.micro_batches,
        "failures": ready.failures,
        "instantiation": {
            "exact": {
                "stop": str(chosen.stop),
                "predicted_seconds": chosen.seconds,
                "bound": chosen.bound,
                "message": chosen.message,
                "pipelines": [
                    {
                        "nodes": dict(zip(ready.names, pipeline.template.nodes, strict=True)),
                        "micro_batches": pipeline.micro_batches,
                        "predicted_seconds": pipeline.seconds,
                    }
                    for pipeline in chosen.pipelines
                ],
            }
        },
    }


def tables_of(ready: Readiness) -> list[Table]:
    """The fastest template of each number of nodes, then the pipelines to run."""
    return [template_table(ready), instantiation_table(ready)]


def template_table(ready: Readiness) -> Table:
    """One line per number of nodes."""
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
        few = [nodes_text(ready, nodes) for nodes in ready.listed.infeasible[:4]]
        more = len(ready.listed.infeasible) - len(few)
        notes.append(
            f"no template fits on {', '.join(few)}" + (f" and {more} more" if more else "")
        )
    if not ready.listed.complete:
        notes.append("time ran out before the list was complete")
    title = (
        "fastest template of each number of nodes, "
        f"{ready.data.micro_batches} micro-batches (predicted)"
    )
    header = ("nodes", "of which", "stages", "iteration", "")
    return Table(title, header, rows, notes=tuple(notes), right=(0, 2, 3))


def proof_text(template: Template) -> str:
    """`proven`, or the gap left."""
    if template.bound is None:
        return ""
    gap = 1 - template.bound / template.seconds if template.seconds > 0 else 0.0
    return "proven" if gap <= 1e-6 else f"gap {percent_text(gap)}"


def instantiation_table(ready: Readiness) -> Table:
    """The pipelines to run."""
    chosen = ready.exact
    row = (
        "proven" if chosen.stop is Stop.OPTIMAL else str(chosen.stop),
        seconds_text(chosen.seconds),
        pipelines_text(ready, chosen) or chosen.message,
    )
    title = (
        f"pipelines for {ready.micro_batches} micro-batches, {ready.failures} of them may be lost"
    )
    return Table(title, ("", "iteration", "pipelines"), (row,), right=(1,))


def pipelines_text(ready: Readiness, chosen: Instantiation) -> str:
    """`2 x (1 V100 + 1 T4: 40)`: pipelines alike, their nodes and their micro-batches."""
    alike = Counter(
        (pipeline.template.nodes, pipeline.micro_batches) for pipeline in chosen.pipelines
    )
    return ", ".join(
        f"{n} x ({nodes_text(ready, nodes)}: {k})" for (nodes, k), n in sorted(alike.items())
    )


def nodes_text(ready: Readiness, nodes: Nodes) -> str:
    """`2 V100 + 1 T4`."""
    return " + ".join(f"{n} {name}" for n, name in zip(nodes, ready.names, strict=True) if n)
