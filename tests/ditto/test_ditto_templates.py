"""Templates for parts of a cluster, and pipelines from them: against brute force."""

from __future__ import annotations

import random
from itertools import combinations_with_replacement, product

import pytest

from ditto.ditto_cases import data_of
from ditto.ditto_oracle import solve as oracle
from hetplan.formulations.ditto.data import DittoDecision
from hetplan.formulations.ditto.templates import (
    Instantiation,
    Template,
    cluster_part,
    instantiate,
    node_vectors,
    template_list,
)
from hetplan.solvers.run import Options, Run, Stop

RUN = Options(threads=1, time_limit=600)


@pytest.mark.parametrize("seed", range(12))
def test_every_part_of_a_cluster_gets_its_optimum(seed: int) -> None:
    data = data_of(seed)
    found = template_list(data, Run(RUN))
    assert found.complete
    vectors = list(node_vectors(data))
    assert sorted([t.nodes for t in found.templates] + list(found.infeasible)) == sorted(vectors)
    for nodes in found.infeasible:
        assert oracle(cluster_part(data, nodes)) is None
    for template in found.templates:
        best = oracle(cluster_part(data, template.nodes))
        assert best is not None
        assert template.seconds == pytest.approx(best.objective, rel=1e-6, abs=1e-12)
        assert template.iteration_seconds(data.micro_batches) == template.seconds
    for count, template in found.by_count().items():
        assert template.seconds == min(t.seconds for t in found.templates if sum(t.nodes) == count)


def test_a_list_cut_short_says_so() -> None:
    run = Run(RUN)
    run.cancel.set()
    assert not template_list(data_of(3), run).complete


def template(nodes: tuple[int, ...], times: list[float], micro_batches: int) -> Template:
    bare = Template(nodes, DittoDecision(stages=[]), tuple(times), 0.0, None)
    seconds = bare.iteration_seconds(micro_batches)
    return Template(nodes, bare.decision, bare.times, seconds, seconds)


def random_templates(
    rng: random.Random, micro_batches: int
) -> tuple[list[Template], tuple[int, ...]]:
    """A few templates on one or two types, and a small cluster."""
    types = rng.choice((1, 2))
    nodes = tuple(rng.randint(1, 4 if types == 1 else 2) for _ in range(types))
    vectors = [v for v in product(*(range(n + 1) for n in nodes)) if any(v) and rng.random() < 0.8]
    return [
        template(
            v,
            [rng.choice((1.0, 2.0, rng.uniform(0.5, 3))) for _ in range(rng.randint(1, 3))],
            micro_batches,
        )
        for v in vectors
    ], nodes


def brute_force(
    templates: list[Template], nodes: tuple[int, ...], micro_batches: int, failures: int
) -> float | None:
    """The least slowest pipeline over all multisets and all shares."""
    best = None
    for size in range(failures + 1, sum(nodes) + 1):
        for chosen in combinations_with_replacement(templates, size):
            if any(sum(t.nodes[i] for t in chosen) > n for i, n in enumerate(nodes)):
                continue
            for shares in product(*(range(len(t.times), micro_batches + 1) for t in chosen)):
                if sum(shares) != micro_batches:
                    continue
                slowest = max(t.iteration_seconds(k) for t, k in zip(chosen, shares, strict=True))
                best = slowest if best is None else min(best, slowest)
    return best


def check_instantiation(
    found: Instantiation, nodes: tuple[int, ...], micro_batches: int, failures: int
) -> None:
    for i, available in enumerate(nodes):
        assert sum(p.template.nodes[i] for p in found.pipelines) <= available
    assert sum(p.micro_batches for p in found.pipelines) == micro_batches
    assert all(p.micro_batches >= len(p.template.times) for p in found.pipelines)
    assert len(found.pipelines) >= failures + 1


def test_an_interrupted_instantiation_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user interrupts while the pipelines are counted for the first time."""
    templates, nodes = random_templates(random.Random(0), 4)
    run = Run(RUN)

    def interrupted(*_: object) -> None:
        run.cancel.set()

    monkeypatch.setattr("hetplan.formulations.ditto.templates.count_pipelines", interrupted)
    assert instantiate(templates, nodes, 4, run, failures=0).stop is Stop.INTERRUPTED


@pytest.mark.parametrize("seed", range(60))
def test_instantiation_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    micro_batches, failures = rng.randint(2, 7), rng.choice((0, 0, 1))
    templates, nodes = random_templates(rng, micro_batches)
    best = brute_force(templates, nodes, micro_batches, failures)
    found = instantiate(templates, nodes, micro_batches, Run(RUN), failures=failures)
    if best is None:
        assert found.stop is Stop.INFEASIBLE
        assert found.message
        return
    assert found.stop is Stop.OPTIMAL
    assert found.iteration_seconds == pytest.approx(best, rel=1e-12)
    assert found.bound == pytest.approx(best, rel=1e-12)
    check_instantiation(found, nodes, micro_batches, failures)
