"""What a cluster should keep at hand when nodes may fail: its template list, and which pipelines to
run from it.

Oobleck (SOSP 2023, Section 4): one template per number of nodes; pipelines of these, at least f + 1
of them, that share the micro-batches out. The list is proven, the instantiation exact, with
Oobleck's own procedure beside it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from hetplan.errors import InputError
from hetplan.formulations.ditto.data import DittoData
from hetplan.formulations.ditto.instantiate import Instantiation, instantiate, oobleck_instantiate
from hetplan.formulations.ditto.templates import Nodes, Template, TemplateList, template_list
from hetplan.solvers.result import Stop
from hetplan.solvers.run import Run
from hetplan.text import Table, percent_text, seconds_text


@dataclass(frozen=True)
class Readiness:
    """The list, and what to run from it with `micro_batches` in all and `failures` pipelines to
    lose."""

    data: DittoData
    micro_batches: int
    failures: int
    listed: TemplateList
    exact: Instantiation
    oobleck: Instantiation

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
    """Template list from `fewest` nodes on, then both instantiations on all nodes, within what is
    left of `run`.

    micro_batches: in all; the instance's where None. Raises InputError for counts that no cluster
    of the kind has.
    """
    nodes = tuple(kind.nodes for kind in data.device_types)
    wanted = data.micro_batches if micro_batches is None else micro_batches
    if not 1 <= fewest <= sum(nodes):
        raise InputError(
            "not usable", where="fewest nodes", got=fewest, expected=f"1 to {sum(nodes)}"
        )
    if not 0 <= failures < sum(nodes):
        raise InputError(
            "not usable", where="failures", got=failures, expected=f"0 to {sum(nodes) - 1}"
        )
    if wanted < 1:
        raise InputError("not usable", where="micro-batches", got=wanted, expected="at least 1")
    listed = template_list(data, run, fewest=fewest)
    run.report(note="instantiation")
    common: tuple[Any, ...] = (listed.templates, nodes, wanted, run)
    return Readiness(
        data,
        wanted,
        failures,
        listed,
        instantiate(*common, failures=failures),
        oobleck_instantiate(*common, failures=failures),
    )


def rows_of(found: Readiness) -> dict[str, Any]:
    """All of it as JSON types."""
    fastest = {template.nodes for template in found.listed.by_count().values()}
    return {
        "complete": found.listed.complete,
        "templates": [
            {
                "nodes": dict(zip(found.names, template.nodes, strict=True)),
                "node_count": template.node_count,
                "fastest_of_its_count": template.nodes in fastest,
                "predicted_seconds": template.seconds,
                "bound": template.bound,
                "decision": template.decision.model_dump(mode="json"),
            }
            for template in found.listed.templates
        ],
        "infeasible": [
            dict(zip(found.names, nodes, strict=True)) for nodes in found.listed.infeasible
        ],
        "micro_batches": found.micro_batches,
        "failures": found.failures,
        "instantiation": {
            name: {
                "stop": str(chosen.stop),
                "predicted_seconds": chosen.seconds,
                "bound": chosen.bound,
                "message": chosen.message,
                "pipelines": [
                    {
                        "nodes": dict(zip(found.names, pipeline.template.nodes, strict=True)),
                        "micro_batches": pipeline.micro_batches,
                        "predicted_seconds": pipeline.seconds,
                    }
                    for pipeline in chosen.pipelines
                ],
            }
            for name, chosen in (("exact", found.exact), ("oobleck", found.oobleck))
        },
    }


def tables_of(found: Readiness) -> list[Table]:
    """The fastest template of each number of nodes, then both instantiations."""
    return [template_table(found), instantiation_table(found)]


def template_table(found: Readiness) -> Table:
    """One line per number of nodes."""
    rows = tuple(
        (
            f"{count}",
            nodes_text(found, template.nodes),
            f"{len(template.times)}",
            seconds_text(template.seconds),
            proof_text(template),
        )
        for count, template in found.listed.by_count().items()
    )
    notes = [
        f"{len(found.listed.templates)} templates in all, one per combination of nodes (--json lists them)"
    ]
    if found.listed.infeasible:
        few = [nodes_text(found, nodes) for nodes in found.listed.infeasible[:4]]
        more = len(found.listed.infeasible) - len(few)
        notes.append(
            f"no template fits on {', '.join(few)}" + (f" and {more} more" if more else "")
        )
    if not found.listed.complete:
        notes.append("time ran out before the list was complete")
    title = f"fastest template of each number of nodes, {found.data.micro_batches} micro-batches (predicted)"
    header = ("nodes", "of which", "stages", "iteration", "")
    return Table(title, header, rows, notes=tuple(notes), right=(0, 2, 3))


def proof_text(template: Template) -> str:
    """`proven`, or the gap left."""
    if template.bound is None:
        return ""
    gap = 1 - template.bound / template.seconds if template.seconds > 0 else 0.0
    return "proven" if gap <= 1e-6 else f"gap {percent_text(gap)}"


def instantiation_table(found: Readiness) -> Table:
    """One line per procedure."""
    rows = tuple(
        (
            name,
            "proven" if chosen.stop is Stop.OPTIMAL else str(chosen.stop),
            seconds_text(chosen.seconds),
            "-" if chosen.seconds is None or not best else percent_text(chosen.seconds / best - 1),
            pipelines_text(found, chosen) or chosen.message,
        )
        for best in (found.exact.bound,)
        for name, chosen in (("exact", found.exact), ("oobleck", found.oobleck))
    )
    title = (
        f"pipelines for {found.micro_batches} micro-batches, {found.failures} of them may be lost"
    )
    header = ("procedure", "", "iteration", "above bound", "pipelines")
    return Table(title, header, rows, right=(2, 3))


def pipelines_text(found: Readiness, chosen: Instantiation) -> str:
    """`2 x (1 V100 + 1 T4: 40)`: pipelines alike, their nodes and their micro-batches."""
    alike = Counter(
        (pipeline.template.nodes, pipeline.micro_batches) for pipeline in chosen.pipelines
    )
    return ", ".join(
        f"{n} x ({nodes_text(found, nodes)}: {k})" for (nodes, k), n in sorted(alike.items())
    )


def nodes_text(found: Readiness, nodes: Nodes) -> str:
    """`2 V100 + 1 T4`."""
    return " + ".join(f"{n} {name}" for n, name in zip(nodes, found.names, strict=True) if n)
