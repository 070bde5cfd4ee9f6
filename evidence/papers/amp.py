"""AMP's experiments (NeurIPS 2022, §4): what is replayed beside what the paper measured.

A replay of a strategy stands for a trial, on hetplan's predicted layer times; strategies that do
not fit in memory are left out.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from evidence.papers import Row, timed
from evidence.truth.tables import spearman
from hetplan.formulations import family
from hetplan.formulations.amp import baselines
from hetplan.formulations.amp.cuts import parameter_cut, uniform_cut
from hetplan.formulations.amp.paper import average, paper_cut, ranked_candidates
from hetplan.formulations.amp.pose import pose
from hetplan.formulations.amp.problem import (
    AmpProblem,
    Configuration,
    Ints,
    Strategy,
    compile_problem,
    megatron_placement,
    place,
)
from hetplan.planner.amp import BUDGET, AmpProblem as PlannedProblem
from hetplan.profiling.hardware.cluster import ClusterFile, build_cluster, example_cluster
from hetplan.profiling.models.model import load_model
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.replay import Settings, replay
from hetplan.replays.simulator.pipeline import Sends
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run


def workload_of(fixed: Row) -> Workload:
    """Of one of the three settings of §4.3."""
    model, cluster = load_model(fixed["model"]), example_cluster(fixed["cluster"])
    return make_workload(model, cluster, global_batch=fixed["batch"])


def with_activations(workload: Workload, share: float) -> Workload:
    """The workload whose narrow layers, those after the `upsample` of TransGAN, send `share` of
    the bytes to the next layer."""
    layers, narrow = [], False
    for layer in workload.profile.layers:
        narrow = narrow or layer.name == "upsample"
        sent = layer.activation_bytes * (share if narrow else 1.0)
        layers.append(layer.model_copy(update={"activation_bytes": sent}))
    profile = workload.profile.model_copy(update={"layers": layers})
    return replace(workload, profile=profile)


def with_cards(workload: Workload) -> Workload:
    """The workload on nodes whose devices have a network card each, as fast as the node's."""
    nodes = tuple(
        replace(node, rails=True, network_bandwidth=node.network_bandwidth * node.devices)
        for node in workload.cluster.nodes
    )
    return replace(workload, cluster=replace(workload.cluster, nodes=nodes))


@cache
def replays(
    model: str,
    cluster: str,
    batch: int,
    *,
    activations: float = 1.0,
    cards: bool = False,
    sends: Sends = "waiting",
) -> tuple[dict[str, list[float]], Row]:
    """Seconds of every method's strategies that fit; and how AMP's estimates rank its own.

    activations: see `with_activations`. cards: whether `with_cards` holds. sends: as in the
    replay's settings.
    """
    run = Run()
    workload = workload_of({"model": model, "cluster": cluster, "batch": batch})
    workload = with_activations(workload, activations)
    if cards:
        workload = with_cards(workload)
    settings = Settings(sends=sends)
    data = pose(workload)
    problem, arrays = PlannedProblem(workload, data), compile_problem(data)

    def objectives(decisions: list[Any]) -> list[float]:
        replayed = [replay(problem.to_plan(one), workload, settings) for one in decisions]
        return [one.seconds for one in replayed if one.fits]

    record = [one for one in ranked_candidates(data, run).candidates if one.fits]
    plans = [problem.to_plan(one.strategy.decision()) for one in record]
    costs = [replay(plan, workload, settings).seconds for plan in plans]
    best = record[int(np.argmin(costs[:BUDGET]))].strategy
    pipeline = best.configuration.pipeline
    cuts = uniform_cut(arrays.layers, pipeline), parameter_cut(arrays.params, pipeline)
    uniform, parameter = (objectives([replace(best, cut=cut).decision()]) for cut in cuts)
    by_rules = [one.strategy for one in baselines.megatron_trials(data, arrays, run)]
    even = [one for one in by_rules if np.array_equal(one.cut, even_cut(arrays, one))]
    drawn = [one.strategy for one in baselines.random_trials(data, arrays, run)]
    megatron, even_megatron, random = (
        objectives([one.decision() for one in each]) for each in (by_rules, even, drawn)
    )
    annealed = solve(family("amp"), data, "annealing", run).decision
    methods = {
        "Megatron": megatron,
        "Megatron, equal layers": even_megatron,
        "random": random,
        "AMP": costs[:BUDGET],
        "annealing": objectives([] if annealed is None else [annealed]),
        "AMP's best, equal layers": uniform,
        "AMP's best, equal parameters": parameter,
    }
    return methods, {
        "strategies": len(costs),
        "ours, Spearman": spearman([one.estimate for one in record], costs),
        "ours, place of the fastest": 1 + int(np.argmin(costs)),
    }


def even_cut(arrays: AmpProblem, strategy: Strategy) -> Ints:
    """The cut of a strategy's stages into equally many layers."""
    return uniform_cut(arrays.layers, strategy.configuration.pipeline)


def trials(fixed: Row, row: Row) -> Row:
    """Tables 3 to 5: least and mean seconds of a method's strategies."""
    seconds = replays(**fixed)[0][row["method"]]
    least, mean = (min(seconds), float(np.mean(seconds))) if seconds else (None, None)
    return {"ours, least": least, "ours, mean": mean, "strategies": len(seconds)}


def assumptions(fixed: Row, row: Row) -> Row:
    """Table 5 again with one assumption of ours changed."""
    changes = fixed["changes"][row["changed"]]
    methods, ranks = replays(**fixed["setting"], **changes)
    least: Row = {key: min(methods[name]) for key, name in fixed["methods"].items()}
    return {
        **least,
        "place of the fastest": ranks["ours, place of the fastest"],
        "over equal layers": least["Megatron, layers"] / least["AMP"],
        "over either cut": least["Megatron, either"] / least["AMP"],
    }


def estimates(fixed: Row, row: Row) -> Row:
    """Figure 2: AMP's estimates of its strategies against replays of them."""
    return replays(**fixed[row["setting"]])[1]


def cut_speedups(fixed: Row, row: Row) -> Row:
    """Figure 3: Megatron's two cuts against AMP's, in seconds of the closed form. Narrow layers are
    those like the last block."""
    data = pose(workload_of(fixed))
    problem = compile_problem(data)
    config = Configuration(4, 4, 1, 1, data.global_batch // 4)
    placement = megatron_placement([device.node for device in data.devices], config)
    times = problem.seconds[1, 1].copy()
    narrow = problem.params == problem.params[-2]
    times[:, narrow] = row["heterogeneity"] * times.max(axis=1, keepdims=True)
    posed = replace(problem, seconds={(1, 1): times})
    averages = average(posed, config, placement)
    answer = paper_cut(averages.layer, averages.link, config.gas)
    assert answer is not None, "nobody stops it"
    placed = place(posed, config, placement)
    cuts = uniform_cut(problem.layers, 4), parameter_cut(problem.params, 4)
    equal_layers, equal_params = (placed.seconds(c) / placed.seconds(answer[0]) for c in cuts)
    return {"over equal layers": equal_layers, "over equal parameters": equal_params}


def optimisation(fixed: Row, row: Row) -> Row:
    """Table 2: as many nodes as devices in each, the first half V100, the others T4."""
    count = row["nodes"]
    nodes = [{**kind, "count": count // 2, "devices": count} for kind in fixed["nodes"]]
    header = {"format": "hetplan-cluster", "version": 1, "name": f"{count} x {count}"}
    cluster = build_cluster(ClusterFile.model_validate({**header, "nodes": nodes}))
    data = pose(make_workload(load_model(fixed["model"]), cluster, fixed["batch"]))
    return timed("amp", data, fixed["methods"])
