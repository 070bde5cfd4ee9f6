"""HAP's A* ends, on networks of 24 layers too, and finds the cheapest of all programs at its
ratios."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from evidence.papers.hap import mixed, shape, theory_on
from evidence.speed.hap_theories import chain, residual
from hap.hap_cases import instance, least_at, programs
from hetplan.formulations.hap import paper
from hetplan.formulations.hap.astar import COMPUTED_AGAIN, REPEATED, Search
from hetplan.formulations.hap.astar_states import Transitions
from hetplan.formulations.hap.data import HapData
from hetplan.formulations.hap.evaluate import evaluate
from hetplan.formulations.hap.family import FAMILY
from hetplan.formulations.hap.graph import Graph, work_of
from hetplan.formulations.hap.needs import graph_of_needs
from hetplan.formulations.hap.outcomes import reduced_or_answered
from hetplan.formulations.hap.paths import shortest
from hetplan.formulations.hap.problem import Floats
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.instances.library import find
from hetplan.programs.networks import bert, vgg19, vit
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run


def reduced(data: HapData) -> ReducedTheory:
    """The reduced theory of an instance that needs a search."""
    theory = reduced_or_answered(data, Run())
    assert isinstance(theory, ReducedTheory)
    return theory


def found_at(theory: ReducedTheory, ratios: Floats) -> float:
    """Seconds of the search's program at ratios [K]; it knows them without the evaluator."""
    search = Search(Transitions(theory), ratios[None])
    found = search.run(Run())
    assert found is not None
    cost = theory.problem.cost_of(theory.program(found.triples()))
    assert search.score(found) == pytest.approx(max(found.ready), rel=1e-12)
    assert max(found.ready) == pytest.approx(theory.problem.program_seconds(cost, ratios[None]))
    return max(found.ready)


def network(name: str) -> HapData:
    """A network of one or two layers, or VGG19, on two machines of V100 and six of P100."""
    program = {
        "vit-1": lambda: vit(512, shape(1), 196, 768, 10),
        "vit-2": lambda: vit(512, shape(2), 196, 768, 10),
        "bert": lambda: bert(512, shape(1), 128, 30522),
        "bert-moe": lambda: bert(256, shape(1), 128, 30522, 8),
        "vgg19": lambda: vgg19(512, 64, 7, 10, 4096),
    }[name]()
    return theory_on(program, mixed(8), 10.4, 8).data


def packaged(name: str) -> tuple[HapData, float]:
    """A packaged instance, and the objective of its record."""
    entry = find(name)
    assert entry is not None
    best = entry.best_known()
    assert best is not None and best.objective is not None
    return entry.load().data, best.objective


@pytest.mark.parametrize("name", ["vit-1", "vit-2", "bert", "bert-moe", "vgg19"])
def test_networks_equal_the_graph_of_needs(name: str) -> None:
    """At ratios by speed, at even ones, and at three drawn ones between. The slower type is the
    slowest of every stage there, so that costs add up, and a shortest path of the canonical graph
    is the cheapest of all programs: each tensor computed and communicated any number of times."""
    theory, draw = reduced(network(name)), np.random.default_rng(0)
    graph = graph_of_needs(theory, 10_000, canonical=True)
    assert graph is not None
    problem = theory.problem
    for share in (0.0, 1.0, *draw.uniform(size=3)):
        ratios = (1 - share) * problem.proportional + share * problem.even
        length, _ = shortest(graph, costs_at(graph, ratios))
        assert found_at(theory, ratios) == pytest.approx(length[graph.start, 0], rel=1e-12)


def costs_at(graph: Graph, ratios: Floats) -> Floats:
    """[A, 1] seconds of each arc on the slowest type, or of its collective."""
    work, speeds = graph.work, graph.theory.problem.speeds
    on_types = work.fixed_seconds[:, None] + work.shared_seconds * ratios
    computing = (on_types * speeds[-1] / speeds).max(axis=1)
    collective = work.fixed_seconds + work.shared_seconds[:, 0] * ratios.max()
    seconds: Floats = np.where(work.comm, collective, computing)
    return seconds[:, None]


def least_of_all_orders(theory: ReducedTheory, ratios: Floats) -> float:
    """The cheapest path of the graph of needs in all orders, by labels: at each node, all that the
    types have done, of which none is as early everywhere as another one."""
    graph = graph_of_needs(theory, 5_000)
    assert graph is not None
    work, speeds = work_of(theory.problem, theory.steps), theory.problem.speeds
    shared = work.shared_seconds[:, 0]
    into: dict[int, list[tuple[int, int]]] = defaultdict(list)  # node -> (node before it, step)
    for tail, head, action in zip(graph.tail, graph.head, graph.action, strict=True):
        into[int(head)].append((int(tail), int(action)))
    last = graph.n - 1
    labels: dict[int, list[Floats]] = {last: [np.zeros(len(speeds))]}
    pending = [(last, labels[last][0])]
    for node, label in pending:  # from the empty need, in the order of execution
        if not any(label is other for other in labels[node]):
            continue
        for after, step in into[node]:
            if work.comm[step]:
                collective = work.fixed_seconds[step] + shared[step] * ratios.max()
                longer = np.full_like(label, label.max() + collective)
            else:
                on_types = work.fixed_seconds[step] + shared[step] * ratios
                longer = label + on_types * speeds[-1] / speeds
            others = labels.get(after, [])
            if not any((other <= longer).all() for other in others):
                kept = [other for other in others if not (longer <= other).all()]
                labels[after] = [*kept, longer]
                pending.append((after, longer))
    return float(min(label.max() for label in labels[graph.start]))


@pytest.mark.parametrize("seed", range(24))
def test_drawn_ratios_equal_the_graph_in_all_orders(seed: int) -> None:
    """Any type may be the slowest of a stage here. Two or three types, chains and branches."""
    types = 2 + seed % 2
    if seed % 4 < 2:
        theory = reduced(chain(1 + seed % 3, types, seed))
    else:
        theory = reduced(residual(1, types, seed, operators=6))
    draw = np.random.default_rng(seed)
    for _ in range(3):
        ratios = draw.dirichlet(np.full(types, 4.0)) / theory.problem.counts
        assert found_at(theory, ratios) == pytest.approx(
            least_of_all_orders(theory, ratios), rel=1e-12
        )


@pytest.mark.parametrize("seed", range(240))
def test_random_theories_equal_enumeration(seed: int) -> None:
    """Where every property counts as a tensor, the search is over all programs; and its first
    estimate is a lower bound of them. The fast devices have more than their part."""
    theory = reduced_or_answered(instance(seed, 1), Run(Options(threads=1)))
    if not isinstance(theory, ReducedTheory):
        return
    problem = theory.problem
    row = problem.speeds**2 / float(problem.speeds**2 @ problem.counts)
    search = Search(Transitions(theory, forms=False, once=False), row[None])
    least = least_at(problem, programs(seed, 1), row)
    assert max(search.rest(0)) <= least * (1 + 1e-9) + 1e-12
    found = search.run(Run())
    assert found is not None
    assert max(found.ready) == pytest.approx(least, rel=1e-9, abs=1e-12)
    cost = problem.cost_of(theory.program(found.triples()))
    assert problem.program_seconds(cost, row[None]) == pytest.approx(least, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("hap-vit-24-6", 9_000),
        ("hap-vgg19-6", 1_200),
        ("hap-chain-24x2", 1_200),
        pytest.param("hap-bert-moe-6", 30_000, marks=pytest.mark.wide),
        pytest.param("hap-llama-blocks-6", 2_500, marks=pytest.mark.wide),
        pytest.param("real-hap-opt350-rtx", 27_000, marks=pytest.mark.wide),
    ],
)
def test_the_alternation_ends_at_the_joint_optimum(name: str, most: int) -> None:
    """After so many states and with nothing left out."""
    data, best = packaged(name)
    result = paper.solve(data, Run(Options(threads=1)))
    assert result.decision is not None and result.message == ""
    states = result.details["states"]
    assert isinstance(states, int) and states < most
    assert evaluate(data, result.decision).objective == pytest.approx(best, rel=1e-6)


def test_states_grow_slowly_with_layers() -> None:
    """A tensor computed again, or the third pruning one step deep, is above the first limit
    already, and with more layers the search would not end."""
    for layers, most in ((1, 36), (2, 62), (4, 200)):
        theory = reduced(theory_on(vit(512, shape(layers), 196, 768, 10), mixed(8), 10.4, 8).data)
        search = Search(Transitions(theory), theory.problem.proportional[None])
        assert search.run(Run()) is not None
        assert search.extended < most


@pytest.mark.parametrize(
    ("name", "above"),
    [
        pytest.param("hap-gpt2-6-memory", 1e-6, marks=pytest.mark.wide),
        ("hap-vgg19-6-memory", 0.05),
    ],
)
def test_limited_memory_has_an_answer(name: str, above: float) -> None:
    """Prices of bytes come near the optimum."""
    data, best = packaged(name)
    result = paper.solve(data, Run(Options(threads=1)))
    assert result.decision is not None and result.message == ""
    assert evaluate(data, result.decision).objective == pytest.approx(best, rel=above)


def of_triples(*ways: tuple[list[str], str, str]) -> HapData:
    """A theory of triples (pre, post, kind), of which the last one gives the goal."""
    triples = []
    for pre, post, kind in ways:
        sizes = {"fixed_flops": 1.0, "shared_flops": 1.0}
        if kind == "comm":
            sizes = {"fixed_seconds": 1.0, "shared_seconds": 1.0}
        elif kind == "slice":
            kind, sizes = "compute", {"fixed_flops": 0.0, "shared_flops": 0.0}
        triples.append({"kind": kind, "instruction": "x", "pre": pre, "post": [post], **sizes})
    devices = [{"name": str(v), "flops_per_second": v} for v in (1.0, 2.0)]
    return HapData.model_validate({"devices": devices, "triples": triples, "goal": ways[-1][1]})


def test_rules_that_leave_no_program_are_left_out() -> None:
    """And the message says so. In the first theory a tensor is computed from a later one, in the
    second it goes through two collectives."""
    again = of_triples(
        ([], "a|I", "compute"),
        (["a|I"], "b|I", "compute"),
        (["b|I"], "b|J", "compute"),
        (["b|J"], "a|J", "compute"),
        (["a|J"], "c|I", "compute"),
    )
    twice = of_triples(
        ([], "a|I", "compute"),
        (["a|I"], "a|J", "comm"),
        (["a|J"], "a|K", "comm"),
        (["a|K"], "c|I", "compute"),
    )
    for data, message in ((again, COMPUTED_AGAIN), (twice, REPEATED)):
        result = solve(FAMILY, data, "paper")
        assert result.message == message
        assert result.objective == pytest.approx(solve(FAMILY, data, "exact").objective, rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_only_time_cuts_it_off(seed: int) -> None:
    """A greedy program then takes its place, which the message says; it is never better."""
    data = chain(1 + seed % 3, 2, seed)
    ended = solve(FAMILY, data, "paper")
    assert ended.message == ""
    cut_off = solve(FAMILY, data, "paper", Run(Options(threads=1, time_limit=1e-9)))
    assert cut_off.message == "HAP's A*, cut off by the time limit and completed greedily"
    assert cut_off.objective is not None and ended.objective is not None
    assert cut_off.objective >= ended.objective * (1 - 1e-9)
    even = solve(FAMILY, data, "deepspeed", Run(Options(threads=1, time_limit=1e-9)))
    assert even.message == "cut off by the time limit; data parallelism takes its place"


def test_even_ratios_have_the_cheapest_program_there() -> None:
    """The baseline `deepspeed`."""
    data = network("vgg19")
    theory = reduced(data)
    result = solve(FAMILY, data, "deepspeed")
    assert result.objective == pytest.approx(found_at(theory, theory.problem.even), rel=1e-9)


def test_one_type_is_left_where_it_is_always_the_slowest() -> None:
    """At ratios by speed and at even ones; not where the fast type has more than its part."""
    theory = reduced(chain(2, 3, 0))
    problem, transitions = theory.problem, Transitions(theory)
    fast = problem.speeds**2 / float(problem.speeds**2 @ problem.counts)
    for ratios, types in ((problem.proportional, 1), (problem.even, 1), (fast, 3)):
        assert len(Search(transitions, ratios[None]).no_seconds) == types


def test_a_triple_with_two_effects_counts_once_in_the_estimate() -> None:
    """Its seconds are shared out to the tensors that it computes."""
    sizes = {"fixed_flops": 6.0, "shared_flops": 0.0}
    triples = [
        {"kind": "compute", "instruction": "both", "pre": [], "post": ["a|I", "b|I"], **sizes},
        {"kind": "compute", "instruction": "x", "pre": ["a|I", "b|I"], "post": ["c|I"], **sizes},
    ]
    devices = [{"name": "d", "flops_per_second": 1.0}]
    data = HapData.model_validate({"devices": devices, "triples": triples, "goal": "c|I"})
    search = Search(Transitions(reduced(data)), np.array([[1.0]]))
    assert search.rest(0) == (12.0,)
    found = search.run(Run())
    assert found is not None and found.ready == (12.0,)


def test_slices_made_at_once_are_in_the_program() -> None:
    """Behind the triple whose effect they slice, a slice of a slice too; those of no use are
    not."""
    data = of_triples(
        ([], "a|I", "compute"),
        (["a|I"], "a|J", "slice"),
        (["a|J"], "a|K", "slice"),
        (["a|I"], "a|L", "slice"),
        (["a|K"], "c|I", "compute"),
    )
    theory = reduced(data)
    transitions = Transitions(theory)
    assert [len(move.steps) for move in transitions.moves.listed] == [3, 1]
    found = Search(transitions, theory.problem.proportional[None]).run(Run())
    assert found is not None
    assert theory.program(found.triples()) == [0, 1, 2, 4]
    assert solve(FAMILY, data, "paper").objective is not None
