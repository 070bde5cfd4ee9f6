"""`astra` from its prose: a type and a number of layers for every stage."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

from play.problem import Broken, Data, Decision, Problem, amount, demand, magnitude


def draw(rng: Random) -> Data:
    """At most nine layers, five stages and three types."""
    second = magnitude(rng)
    data_parallel, tensor = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2))
    types = []
    for number in range(rng.choice((1, 2, 2, 3))):
        kind = {
            "name": f"t{number}",
            "max_devices": rng.choice((0, 1, 2, 3, 4, 5)) * data_parallel * tensor
            + rng.choice((0, 0, 1)),
            "layer_seconds": amount(rng, second),
            "p2p_seconds": amount(rng, second / 3, zero=0.3),
        }
        if rng.random() < 0.15:
            kind["max_layers"] = rng.randint(0, 4)
        types.append(kind)
    return {
        "layers": rng.randint(1, 9),
        "stages": rng.choice((1, 2, 2, 3, 3, 4, 5)),
        "micro_batches": rng.choice((1, 1, 2, 3, 8, 1000)),
        "data_parallel": data_parallel,
        "tensor_parallel": tensor,
        "device_types": types,
        "equal_layers_per_type": rng.random() < 0.4,
    }


def price(data: Data, decision: Decision) -> float:
    """Eq. 22; the transfer of every stage counts."""
    types = {kind["name"]: kind for kind in data["device_types"]}
    stages = decision["stages"]
    demand(len(stages) == data["stages"], "another number of stages")
    demand(all(stage["layers"] >= 1 for stage in stages), "a stage without layers")
    demand(sum(stage["layers"] for stage in stages) == data["layers"], "another number of layers")
    devices = data["data_parallel"] * data["tensor_parallel"]
    for name, kind in types.items():
        held = [stage["layers"] for stage in stages if stage["type"] == name]
        demand(len(held) * devices <= kind["max_devices"], f"too many stages on {name}")
        if data["equal_layers_per_type"]:
            demand(len(set(held)) <= 1, f"unequal stages on {name}")
        if kind.get("max_layers") is not None:
            demand(all(n <= kind["max_layers"] for n in held), f"too many layers on {name}")
    times = []
    for stage in stages:
        kind = types[stage["type"]]
        times.append(stage["layers"] * kind["layer_seconds"] + kind["p2p_seconds"])
    return float(sum(times) + (data["micro_batches"] - 1) * max(times))


def decisions(data: Data) -> Iterator[Decision]:
    """Every type and every number of layers of every stage, where the layers add up."""
    names = [kind["name"] for kind in data["device_types"]]
    stages, layers = data["stages"], data["layers"]
    for held in product(range(1, layers + 1), repeat=stages):
        # the order of the stages does not matter, so the longest come first
        if sum(held) != layers or list(held) != sorted(held, reverse=True):
            continue
        for chosen in product(names, repeat=stages):
            pairs = zip(chosen, held, strict=True)
            yield {"stages": [{"type": name, "layers": n} for name, n in pairs]}


def optimum(data: Data) -> float | None:
    best = None
    for decision in decisions(data):
        try:
            seconds = price(data, decision)
        except Broken:
            continue
        best = seconds if best is None else min(best, seconds)
    return best


def spoil(data: Data, decision: Decision) -> Decision:
    """One layer too many."""
    first, *others = decision["stages"]
    return {"stages": [first | {"layers": first["layers"] + 1}, *others]}


PROBLEM = Problem("astra", draw, price, optimum, spoil)
