"""Pipeline templates for every part of a cluster, not only for the whole of it.

Oobleck (SOSP 2023, Section 4.1) keeps a template ready for each number of nodes from n_min to n, so
that it can go on at once when nodes fail. With several device types a number of nodes does not say
which: the list holds a proven template for each vector of nodes (one entry per type), and the best
one for each number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from hetplan.formulations.ditto import exact
from hetplan.formulations.ditto.data import DittoData, DittoDecision
from hetplan.formulations.ditto.evaluate import price, stage_seconds
from hetplan.solvers.result import Stop
from hetplan.solvers.run import Run

Nodes = tuple[int, ...]


@dataclass(frozen=True)
class Template:
    """The template of one vector of nodes.

    nodes: by device type, in the data's order. times: seconds of each stage per micro-batch.
    seconds: T for the data's number of micro-batches; bound: proven for this vector, None if time
    ran out before anything was.
    """

    nodes: Nodes
    decision: DittoDecision
    times: tuple[float, ...]
    seconds: float
    bound: float | None

    @property
    def node_count(self) -> int:
        """How many nodes it is for."""
        return sum(self.nodes)

    def iteration_seconds(self, micro_batches: int) -> float:
        """T with another number of micro-batches, at least as many as there are stages."""
        result = price(micro_batches, list(self.times)).objective
        assert result is not None
        return result


@dataclass(frozen=True)
class TemplateList:
    """All templates found. infeasible: vectors for which none exists (memory). complete: time
    sufficed for all."""

    templates: tuple[Template, ...]
    infeasible: tuple[Nodes, ...]
    complete: bool

    def by_count(self) -> dict[int, Template]:
        """The fastest template of each number of nodes."""
        best: dict[int, Template] = {}
        for template in self.templates:
            known = best.get(template.node_count)
            if known is None or template.seconds < known.seconds:
                best[template.node_count] = template
        return dict(sorted(best.items()))


def template_list(data: DittoData, run: Run, *, fewest: int = 1) -> TemplateList:
    """Templates of all vectors with at least `fewest` nodes, small ones first, each proven within
    the run's gap."""
    templates: list[Template] = []
    infeasible: list[Nodes] = []
    for nodes in node_vectors(data, fewest):
        if run.should_stop:
            return TemplateList(tuple(templates), tuple(infeasible), complete=False)
        part = cluster_part(data, nodes)
        found = exact.solve(part, run.part())
        if found.decision is None:
            if found.stop is not Stop.INFEASIBLE:
                return TemplateList(tuple(templates), tuple(infeasible), complete=False)
            infeasible.append(nodes)
            continue
        times = tuple(stage_seconds(part, stage) for stage in found.decision.stages)
        seconds = price(data.micro_batches, list(times)).objective
        assert seconds is not None
        templates.append(Template(nodes, found.decision, times, seconds, found.bound))
        run.report(note=f"{len(templates)} templates")
    return TemplateList(tuple(templates), tuple(infeasible), complete=True)


def node_vectors(data: DittoData, fewest: int = 1) -> Iterator[Nodes]:
    """All vectors of at least `fewest` nodes, by number of nodes."""
    every = product(*(range(kind.nodes + 1) for kind in data.device_types))
    return iter(
        sorted(
            (nodes for nodes in every if sum(nodes) >= max(fewest, 1)), key=lambda n: (sum(n), n)
        )
    )


def cluster_part(data: DittoData, nodes: Nodes) -> DittoData:
    """The same problem on fewer nodes."""
    kinds = [
        kind.model_copy(update={"nodes": count})
        for kind, count in zip(data.device_types, nodes, strict=True)
    ]
    return data.model_copy(update={"device_types": kinds})
