"""`amp` from its prose: degrees, placement, micro-batch and stages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations
from random import Random
from typing import Any

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


def draw(rng: Random) -> Data:
    """At most six devices (mostly four) and five layers."""
    count = rng.choice((1, 2, 2, 3, 3, 4, 4, 4, 4, 4, 5, 6))
    layers = rng.choice((1, 2, 3, 4, 4, 5, 5))
    kinds = ["a", "b", "c"][: rng.choice((1, 2, 2, 3))]
    second, byte = magnitude(rng), rng.choice((1.0, 1e6, 1e9))
    node, devices = 0, list[Data]()
    for _ in range(count):
        node += rng.random() < 0.4
        devices.append({"type": rng.choice(kinds), "node": node})
    if rng.random() < 0.5:  # nodes of one type
        devices = [one | {"type": kinds[one["node"] % len(kinds)]} for one in devices]
    table = layer_tables(rng, kinds, count, layers, second)
    data = {
        "devices": devices,
        "bandwidth": links(rng, devices, byte / second),
        "layers": [
            {
                "name": f"l{number}",
                "param_bytes": amount(rng, byte),
                "activation_bytes": amount(rng, byte / 4),
                "tensor_bytes": amount(rng, byte / 4, zero=0.4),
            }
            for number in range(layers)
        ],
        "layer_seconds": table,
        "global_batch": rng.choice((1, 2, 3, 4, 4, 5, 6, 8, 8, 12)),
    }
    if rng.random() < 0.4:
        room = byte * layers * 10 ** rng.uniform(-1, 1)
        memory: dict[str, object] = {
            "device_bytes": {kind: room * rng.choice((1, 1, 0.5, 3)) for kind in kinds},
            "state_bytes_per_param_byte": rng.choice((0, 1, 4, 8)),
            "layer_bytes_per_sample": [amount(rng, byte / 4) for _ in range(layers)],
        }
        if rng.random() < 0.3:
            memory["layer_frozen_bytes"] = [amount(rng, byte) for _ in range(layers)]
        data["memory"] = memory
    return data


def layer_tables(
    rng: Random, kinds: list[str], count: int, layers: int, second: float
) -> list[dict[str, Any]]:
    """Seconds of layers; some degrees and micro-batches have no table, maybe of one type only."""
    rows = []
    lacking = rng.choice((0.0, 0.0, 0.2))
    # some layers take nothing; in some instances all are alike
    alike = rng.random() < 0.3
    for tensor in range(1, count + 1):
        if count % tensor or (tensor > 1 and rng.random() < lacking):
            continue
        for micro_batch in (1, 2, 3, 4, 6):
            if rng.random() < (0.3 if micro_batch in (1, 2) else 0.6):
                continue
            for kind in kinds:
                if rng.random() < lacking:
                    continue
                one = amount(rng, second) * micro_batch / tensor
                each = [amount(rng, second) * micro_batch / tensor for _ in range(layers)]
                seconds = [one] * layers if alike else each
                row = {"type": kind, "tensor": tensor, "micro_batch": micro_batch}
                rows.append(row | {"seconds": seconds})
    for kind in kinds:  # a file has to have some table of every type
        if all(row["type"] != kind for row in rows):
            row = {"type": kind, "tensor": 1, "micro_batch": 1}
            rows.append(row | {"seconds": [second] * layers})
    return rows


def links(rng: Random, devices: list[Any], scale: float) -> list[list[float]]:
    """Bandwidths: by node, any, or almost none between some devices."""
    inside, between = scale * rng.choice((1, 10, 100)), scale * rng.choice((1, 0.1, 1e-4))
    wild, count = rng.random() < 0.4, len(devices)
    rates = [[scale] * count for _ in devices]
    for a, b in combinations(range(count), 2):
        rate = inside if devices[a]["node"] == devices[b]["node"] else between
        if wild:
            rate = scale * 10 ** rng.uniform(-2, 2)
        rates[a][b] = rates[b][a] = rate
    return rates


class Reader:
    """An instance, its tables by type, degree and micro-batch."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.kinds = [device["type"] for device in data["devices"]]
        self.rates = data["bandwidth"]
        self.layers = data["layers"]
        self.seconds = {
            (row["type"], row["tensor"], row["micro_batch"]): row["seconds"]
            for row in data["layer_seconds"]
        }

    def slowest_link(self, group: list[int]) -> float:
        return float(min(self.rates[a][b] for a, b in combinations(group, 2)))

    def price(self, decision: Decision) -> float:
        """Seconds by eq. 3 to 5, after all rules have been looked at."""
        pp, dp, tp = decision["pipeline"], decision["data"], decision["tensor"]
        mbs, stages, place = decision["micro_batch"], decision["stages"], decision["placement"]
        count = len(self.kinds)
        demand(min(pp, dp, tp, mbs) >= 1, "a degree below 1")
        demand(pp * dp * tp == count, "the degrees do not multiply to the devices")
        demand(self.data["global_batch"] % (dp * mbs) == 0, "no whole number of micro-batches")
        gas = self.data["global_batch"] // (dp * mbs)
        demand(len(stages) == pp, "another number of stages than the degree")
        demand_chain(stages, len(self.layers))
        shape = [len(place), *(len(each) for each in place), *(len(g) for e in place for g in e)]
        demand(shape == [pp] + [dp] * pp + [tp] * (pp * dp), "a placement of another shape")
        used = sorted(device for each in place for group in each for device in group)
        demand(used == list(range(count)), "no bijection from positions to devices")
        for kind in self.kinds:
            demand((kind, tp, mbs) in self.seconds, f"no table of {kind}")
        self.demand_memory(decision, gas)
        slowest = 0.0
        for i in range(dp):
            times = [self.stage_seconds(place[j][i], stages[j], tp, mbs) for j in range(pp)]
            sends = 0.0
            for j in range(pp - 1):
                size = self.layers[stages[j][1] - 1]["activation_bytes"] * mbs
                rate = min(self.rates[place[j][i][r]][place[j + 1][i][r]] for r in range(tp))
                sends += size / rate
            slowest = max(slowest, (gas - 1) * max(times) + sum(times) + sends)
        joined = 0.0
        for j in range(pp if dp > 1 else 0):
            size = sum(self.layers[l]["param_bytes"] for l in range(*stages[j])) / tp
            for r in range(tp):
                rate = self.slowest_link([place[j][i][r] for i in range(dp)])
                joined = max(joined, 2 * (dp - 1) / dp * size / rate)
        return slowest + joined

    def stage_seconds(self, group: list[int], stage: list[int], tp: int, mbs: int) -> float:
        """t_ij of one tensor group."""
        total = 0.0
        for l in range(*stage):
            total += max(self.seconds[self.kinds[device], tp, mbs][l] for device in group)
            if tp > 1:
                size = self.layers[l]["tensor_bytes"] * mbs
                total += 2 * (tp - 1) / tp * size / self.slowest_link(group)
        return total

    def demand_memory(self, decision: Decision, gas: int) -> None:
        """1F1B keeps min(gas, pp - j) micro-batches alive on stage j."""
        memory = self.data.get("memory")
        if memory is None:
            return
        pp, tp, mbs = decision["pipeline"], decision["tensor"], decision["micro_batch"]
        for j, (first, last) in enumerate(decision["stages"]):
            states = sum(self.layers[l]["param_bytes"] for l in range(first, last))
            states *= memory["state_bytes_per_param_byte"]
            states += sum(memory.get("layer_frozen_bytes", [0] * len(self.layers))[first:last])
            kept = sum(memory["layer_bytes_per_sample"][first:last]) * mbs * min(gas, pp - j)
            for device in (d for group in decision["placement"][j] for d in group):
                room = memory["device_bytes"][self.kinds[device]]
                demand((states + kept) / tp <= room * (1 + 1e-9), f"device {device} is too small")


def price(data: Data, decision: Decision) -> float:
    return Reader(data).price(decision)


def decisions(data: Data) -> Iterator[Decision]:
    """Every choice of degrees, micro-batch, cut and bijection, feasible or not."""
    count, layers = len(data["devices"]), len(data["layers"])
    sizes = sorted({row["micro_batch"] for row in data["layer_seconds"]})
    for pp in range(1, min(count, layers) + 1):
        for dp in range(1, count + 1):
            tp = count // (pp * dp)
            if pp * dp * tp != count:
                continue
            for mbs in sizes:
                if data["global_batch"] % (dp * mbs):
                    continue
                for order in permutations(range(count)):
                    place = [
                        [list(order[at : at + tp]) for at in range(start, start + dp * tp, tp)]
                        for start in range(0, count, dp * tp)
                    ]
                    for stages in cuts(layers, pp):
                        yield {
                            "pipeline": pp,
                            "data": dp,
                            "tensor": tp,
                            "micro_batch": mbs,
                            "placement": place,
                            "stages": stages,
                        }


def optimum(data: Data) -> float | None:
    reader, best = Reader(data), None
    for decision in decisions(data):
        try:
            seconds = reader.price(decision)
        except Broken:
            continue
        best = seconds if best is None else min(best, seconds)
    return best


def spoil(data: Data, decision: Decision) -> Decision:
    """The last layer is nowhere."""
    *stages, (first, last) = decision["stages"]
    return decision | {"stages": [*stages, [first, last - 1]]}


PROBLEM = Problem("amp", draw, price, optimum, spoil)
