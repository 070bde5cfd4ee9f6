"""`ditto` from its prose: stages on powers of two of devices of one node."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

from play.problem import (
    Broken,
    Data,
    Decision,
    Problem,
    amount,
    cuts,
    demand,
    demand_chain,
    magnitude,
)

TIE = 1e-9  # stages within this share of the slowest one count as the slowest


def draw(rng: Random) -> Data:
    """At most five layers and two types (three of one device a node)."""
    second, layers = magnitude(rng), rng.choice((1, 2, 3, 3, 4, 4, 5))
    width = rng.choice((1, 2, 2, 4))
    sizes = [x for x in (2, 4) if x <= width]
    alike = rng.random() < 0.3
    names = ["a", "b", "c"][: rng.choice((1, 2, 3) if width == 1 else (1, 2, 2))]
    types = []
    for name in names:
        forward = [amount(rng, second) for _ in range(layers)]
        backward = [amount(rng, 2 * second) for _ in range(layers)]
        if alike:
            forward, backward = [forward[0]] * layers, [backward[0]] * layers
        dear = second * rng.choice((0.0, 0.05, 0.3, 3))
        types.append(
            {
                "name": name,
                "nodes": rng.choice((0, 1, 1, 1, 2, 2, 3)),
                "devices_per_node": width,
                "forward_seconds": forward,
                "backward_seconds": backward,
                "allreduce_seconds": {
                    str(x): [amount(rng, dear, zero=0.3) for _ in range(layers)] for x in sizes
                },
            }
        )
    data: Data = {"micro_batches": rng.choice((1, 2, 3, 4, 8, 100)), "device_types": types}
    if rng.random() < 0.4:
        room = layers * 10 ** rng.uniform(-0.5, 1.2)
        data["memory"] = {
            "device_bytes": {name: room * rng.choice((1, 1, 0.5, 3)) for name in names},
            "layer_state_bytes": [amount(rng, 1.0) for _ in range(layers)],
            "layer_activation_bytes": [amount(rng, 0.5) for _ in range(layers)],
        }
    return data


def price(data: Data, decision: Decision) -> float:
    """T1 + T2 + T3 with the first of the slowest stages, counted from 0."""
    types = {kind["name"]: kind for kind in data["device_types"]}
    layers = len(data["device_types"][0]["forward_seconds"])
    stages, batches = decision["stages"], data["micro_batches"]
    demand_chain([(stage["first"], stage["last"]) for stage in stages], layers)
    demand(1 <= len(stages) <= batches, "more stages than micro-batches")
    used = dict.fromkeys(types, 0)
    times = []
    for number, stage in enumerate(stages):
        kind, x = types[stage["type"]], stage["devices"]
        powers = [2**power for power in range(31) if 2**power <= kind["devices_per_node"]]
        demand(x in powers, f"a stage on {x} devices")
        used[kind["name"]] += x
        rows = range(stage["first"], stage["last"])
        alone = sum(kind["forward_seconds"][l] + kind["backward_seconds"][l] for l in rows)
        reduces = kind["allreduce_seconds"][str(x)] if x > 1 else [0.0] * layers
        times.append(alone / x + 2 * sum(reduces[l] for l in rows))
        if data.get("memory"):
            memory = data["memory"]
            alive = min(batches, len(stages) - number)
            held = sum(memory["layer_state_bytes"][l] for l in rows)
            held += alive * sum(memory["layer_activation_bytes"][l] for l in rows)
            room = memory["device_bytes"][kind["name"]]
            demand(held / x <= room * (1 + 1e-9), f"stage {number} does not fit")
    for name, kind in types.items():
        demand(used[name] <= kind["nodes"] * kind["devices_per_node"], f"too many of {name}")
    slowest = max(times)
    k = next(k for k, seconds in enumerate(times) if seconds >= slowest * (1 - TIE))
    return float(sum(times) + (batches - len(stages) + k - 1) * times[k] + sum(times[k:]))


def decisions(data: Data) -> Iterator[Decision]:
    """Every cut, and every type and number of devices of every stage."""
    layers = len(data["device_types"][0]["forward_seconds"])
    choices = []
    for kind in data["device_types"]:
        room = min(kind["devices_per_node"], kind["devices_per_node"] * kind["nodes"])
        choices += [(kind["name"], x) for x in (1, 2, 4) if x <= room]
    for count in range(1, min(layers, data["micro_batches"]) + 1):
        for stages in cuts(layers, count):
            for chosen in product(choices, repeat=count):
                yield {
                    "stages": [
                        {"first": first, "last": last, "type": name, "devices": x}
                        for (first, last), (name, x) in zip(stages, chosen, strict=True)
                    ]
                }


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
    """The first layer is nowhere."""
    first, *others = decision["stages"]
    return {"stages": [first | {"first": first["first"] + 1}, *others]}


PROBLEM = Problem("ditto", draw, price, optimum, spoil)
