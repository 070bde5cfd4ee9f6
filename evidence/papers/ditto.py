"""Ditto's experiments on the clusters of its Figure 8, as packaged: GPT-2 XL, layer times predicted
for an RTX 4090 and scaled by the figure's relative throughputs."""

from math import fsum

from evidence.papers import Row
from hetplan.formulations import family
from hetplan.instances.library import load_from_library
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run


def cluster(fixed: Row, row: Row) -> Row:
    """Figure 8: nodes / devices per node of each type, and its throughput in weakest types."""
    data = load_from_library(row["instance"]).data
    kinds = {kind.name: kind for kind in data.device_types}
    total = {name: fsum(kind.forward_seconds) for name, kind in kinds.items()}
    return {
        f"ours, {name}": f"{kind.nodes}/{data.devices_per_node}, {max(total.values()) / own:.3g}"
        for name, kind, own in zip(kinds, kinds.values(), total.values(), strict=True)
    }


def iteration(fixed: Row, row: Row) -> Row:
    """Figure 10: seconds of an iteration by method, and what Ditto's takes over the optimum's."""
    data = load_from_library(row["instance"]).data
    options = Options(threads=1)  # no limit in seconds: every method ends by itself
    seconds = {
        f"`{method}`, s": solve(family("ditto"), data, method, Run(options)).objective
        for method in fixed["methods"]
    }
    folded, best = seconds["`paper`, s"], seconds["`exact`, s"]
    loss = None if folded is None or best is None else 100 * (folded / best - 1)
    return seconds | {"ours, loss %": loss}
