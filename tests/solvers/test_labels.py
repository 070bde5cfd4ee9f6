"""Label setting against enumeration: cheapest paths through layers that keep to a budget."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from hetplan.solvers.labels import Extensions, KeptLabels, LabelLimits, Labels, Numbers, set_labels
from hetplan.solvers.run import Options, Run, Stopped

LAYERS, NODES = 6, 4
FIELDS = [("bound", "f8"), ("parent", "i8"), ("cost", "f8"), ("used", "i8"), ("node", "i8")]
Path = tuple[int, ...]


@dataclass
class Paths:
    """Buckets are layers of nodes; a step to the next layer or the one after costs and uses."""

    cost: Numbers  # [LAYERS, NODES] of a node
    used: Numbers  # [LAYERS, NODES]
    budget: int

    def extend(self, bucket: int, labels: Labels, limit: float) -> Iterator[Extensions]:
        for layer in range(bucket + 1, min(bucket + 3, LAYERS)):
            rows, nodes = (grid.ravel() for grid in np.indices((len(labels), NODES)))
            children = labels[rows]
            children["cost"] += self.cost[layer, nodes]
            children["used"] += self.used[layer, nodes]
            children["node"] = nodes
            children["bound"] = children["cost"]  # whatever follows costs nothing
            kept = np.flatnonzero(children["used"] <= self.budget)
            yield Extensions(children[kept], rows[kept], np.full(len(kept), layer))

    def undominated(self, bucket: int, labels: Labels) -> Numbers:
        order = np.lexsort((labels["used"], labels["cost"], labels["node"]))
        kept: list[int] = []
        for i in order:
            one = labels[i]
            others = (labels[j] for j in kept)
            if not any(o["node"] == one["node"] and o["used"] <= one["used"] for o in others):
                kept.append(int(i))
        return np.array(kept, dtype=np.int64)

    def cheapest(self) -> float:
        """By enumeration: the layers passed and the node in each, from layer 0 to the last."""
        best = math.inf
        for steps in range(LAYERS):
            for between in itertools.combinations(range(1, LAYERS - 1), steps):
                layers = (0, *between, LAYERS - 1)
                if max(b - a for a, b in itertools.pairwise(layers)) > 2:
                    continue
                for nodes in itertools.product(range(NODES), repeat=len(layers) - 1):
                    passed = list(zip(layers[1:], nodes, strict=True))
                    if sum(int(self.used[p]) for p in passed) <= self.budget:
                        best = min(best, float(sum(self.cost[p] for p in passed)))
        return best


def paths(seed: int) -> Paths:
    rng = random.Random(seed)
    cost = np.array([[rng.randint(1, 20) for _ in range(NODES)] for _ in range(LAYERS)])
    used = np.array([[rng.randint(1, 9) for _ in range(NODES)] for _ in range(LAYERS)])
    return Paths(cost, used, rng.randint(2, 20))


def labelled(
    problem: Paths, limits: LabelLimits, threshold: float = math.inf, run: Run | None = None
) -> KeptLabels:
    root = np.zeros(1, dtype=FIELDS)
    root["parent"] = -1
    order = range(LAYERS)
    return set_labels(
        problem, root, order, run or Run(), threshold=lambda: threshold, limits=limits,
        path_fields=["cost", "node"],
    )  # fmt: skip


def least(found: KeptLabels) -> float:
    return float(found.last["cost"].min(initial=math.inf))


@pytest.mark.parametrize("chunk", [1, 5, 4096])
@pytest.mark.parametrize("seed", range(20))
def test_all_labels_equal_enumeration(seed: int, chunk: int) -> None:
    problem = paths(seed)
    found = labelled(problem, LabelLimits(10**6, chunk=chunk))
    assert found.cut_bound == math.inf
    assert least(found) == problem.cheapest()
    assert found.count == sum(len(bucket) for bucket in found.buckets)
    for label in found.last:  # the path of a label is what it has paid for
        path = found.path(label)
        assert path[-1]["parent"] == -1
        steps = [a["cost"] - b["cost"] for a, b in itertools.pairwise(path)]
        assert sum(steps) == label["cost"]
        assert all(
            problem.cost[:, a["node"]].tolist().count(int(step)) > 0
            for a, step in zip(path, steps, strict=False)
        )


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("crowding", [1, 4])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_cut_leaves_its_bound(seed: int, crowding: int, width: int) -> None:
    problem = paths(seed)
    found = labelled(problem, LabelLimits(width, crowding=crowding))
    assert max(len(bucket) for bucket in found.buckets) <= width
    assert min(found.cut_bound, least(found)) <= problem.cheapest()


@pytest.mark.parametrize("seed", range(20))
def test_labels_at_the_threshold_are_left_out(seed: int) -> None:
    problem = paths(seed)
    cheapest = problem.cheapest()
    if math.isfinite(cheapest):
        assert least(labelled(problem, LabelLimits(10**6), threshold=cheapest)) == math.inf
        assert least(labelled(problem, LabelLimits(10**6), threshold=cheapest + 1)) == cheapest


def test_some_have_no_path_and_a_stopped_run_stops_the_search() -> None:
    assert 1 <= sum(paths(seed).cheapest() == math.inf for seed in range(20)) <= 10
    run = Run(Options())
    run.cancel.set()
    with pytest.raises(Stopped):
        labelled(paths(0), LabelLimits(10), run=run)
