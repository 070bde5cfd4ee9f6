"""`joint` from its prose: plans are enumerated, and a second replay says what each takes.

The plans are those of `joint.enumeration`, which uses the rules of a plan file and nothing of the
formulation but its data. Seconds are those of `plain_replay`, which shares no code with hetplan's
replay. Only whether a plan fits in memory is taken from hetplan's replay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from random import Random
from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError

from hetplan.formulations.joint.data import JointData
from hetplan.plans.plan import Plan, Recomputation
from hetplan.profiling.frameworks import HETPLAN
from hetplan.replays.chains import ChainReplayer
from joint.enumeration import all_plans
from plain_replay import seconds_of
from play.problem import Data, Decision, Problem, amount, demand

MOST_CHUNKS = 4


def draw(rng: Random) -> Data:
    """At most two devices (three in few), three layers and four samples.

    The plain replay knows no measured curves of collectives and no recomputation of what tensor
    ranks reduce, so that instances with recomputation have nothing to reduce.
    """
    kinds = ["a", "b"][: rng.choice((1, 1, 2))]
    layers = rng.choice((1, 2, 2, 3, 3))
    counts = rng.choice(([1], [2], [2], [2], [1, 1], [1, 1], [1, 1], [2, 1]))
    if sum(counts) > 2:
        layers = min(layers, 2)
    modes = ["none", "full"] if rng.random() < 0.3 else ["none"]
    degrees = rng.choice(([1], [1, 2], [1, 2]))
    network, inside = 10 ** rng.uniform(5, 10), 10 ** rng.uniform(7, 11)
    reduces = 0.0 if "full" in modes else rng.choice((0.0, 1e4, 1e6))
    sizes = [amount(rng, 1e6) for _ in range(layers)]
    tied = layers > 1 and rng.random() < 0.3
    room = 1e12 if rng.random() < 0.6 else 10 ** rng.uniform(6.3, 8.7)
    return {
        "global_batch": rng.choice((1, 2, 2, 3, 3, 4)) if sum(counts) < 3 else rng.choice((1, 2)),
        "element_bytes": 2,
        "gradient_bytes": rng.choice((2, 4)),
        "framework": HETPLAN.model_dump(mode="json"),
        "tensor_degrees": degrees,
        "nodes": [
            {
                "device": rng.choice(kinds),
                "devices": count,
                "intra_bandwidth": inside * rng.choice((0.3, 1.0, 1.0)),
                "intra_latency": rng.choice((0.0, 1e-5)),
                "network_bandwidth": network * rng.choice((1.0, 1.0, 5.0)),
                "network_latency": rng.choice((0.0, 2e-5)),
            }
            for count in counts
        ],
        "types": {
            kind: {
                "memory_bytes": room * rng.choice((1, 1, 0.5)),
                "update": {
                    "start_seconds": rng.choice((0.0, 1e-6, 1e-3)),
                    "bytes_per_second": 10 ** rng.uniform(9, 12),
                    "log2_bytes": [10.0],
                    "share": [0.8],
                },
            }
            for kind in kinds
        },
        "layers": [
            {
                "name": f"l{l}",
                "param_bytes": size,
                "tied_param_bytes": sizes[0] * 0.9 if tied and l == layers - 1 else 0.0,
                "activation_bytes": amount(rng, 1e5),
                "tensor_bytes": reduces * rng.choice((0, 1, 2)),
                "kept": {mode: {"saved_bytes": 1e6 if mode == "none" else 1e5} for mode in modes},
            }
            for l, size in enumerate(sizes)
        ],
        "tables": tables(rng, kinds, layers, degrees, modes),
    }


def tables(
    rng: Random, kinds: list[str], layers: int, degrees: list[int], modes: list[str]
) -> list[dict[str, Any]]:
    """Seconds of passes that need not grow with the samples."""
    rows = []
    for kind in kinds:
        alike = rng.random() < 0.3
        each = [amount(rng, 1e-3) for _ in range(layers)]
        each = [each[0]] * layers if alike else each
        for tensor in rng.choice(([1], degrees)):
            start, wild = rng.choice((0.0, 0.3, 1.0, 1.0)), rng.random() < 0.2
            for b in sorted(rng.sample((1, 2, 3, 4), rng.randint(1, 3))):
                size = rng.uniform(0.5, 4) if wild else start + b
                forward = [x * size / tensor**0.8 for x in each]
                host = rng.choice((0.0, 0.5))
                row = {"type": kind, "tensor": tensor, "micro_batch": b}
                rows.append(
                    row
                    | {
                        "forward_seconds": forward,
                        "backward_seconds": [x * rng.choice((1, 2, 1.7)) for x in forward],
                        "forward_host_seconds": [host * x for x in forward],
                        "backward_host_seconds": [host * x for x in forward],
                        "repeated": {mode: [1.0] * layers for mode in modes[1:]},
                    }
                )
    return rows


class Profile:
    """The tables as the plain replay asks for them, with a mode's repeated passes in them."""

    def __init__(self, data: JointData, mode: Recomputation) -> None:
        self.layers = data.layers
        self.tables = {(one.type, one.tensor, one.micro_batch): one for one in data.tables}
        self.mode = mode

    def micro_batches(self, kind: str, tensor: int) -> list[int]:
        return sorted(b for name, t, b in self.tables if (name, t) == (kind, tensor))

    def table(self, kind: str, tensor: int, micro_batch: int) -> Any:
        one = self.tables[kind, tensor, micro_batch]
        if self.mode == "none":
            return one
        share = one.repeated[self.mode]
        forward = [x * y for x, y in zip(share, one.forward_seconds, strict=True)]
        host = [x * y for x, y in zip(share, one.forward_host_seconds, strict=True)]
        both = zip(one.backward_seconds, forward, strict=True)
        hosts = zip(one.backward_host_seconds, host, strict=True)
        return SimpleNamespace(
            forward_seconds=one.forward_seconds,
            forward_host_seconds=one.forward_host_seconds,
            backward_seconds=[x + y for x, y in both],
            backward_host_seconds=[x + y for x, y in hosts],
        )


class Reader:
    """An instance, its second replay, and hetplan's replay for the memory."""

    def __init__(self, data: Data) -> None:
        self.data = JointData.model_validate(data)
        self.nodes = [
            SimpleNamespace(
                **dict(node),
                uplink=node.uplink_bandwidth or math.inf,
                flow=node.flow_bandwidth or math.inf,
            )
            for node in self.data.nodes
        ]
        names = [node.device for node in self.data.nodes for _ in range(node.devices)]
        self.cluster = SimpleNamespace(
            nodes=self.nodes, devices=[SimpleNamespace(type=name) for name in names]
        )

    @cached_property
    def replayer(self) -> ChainReplayer:
        return ChainReplayer.of(self.data)

    def update_seconds(self, moved: float, kind: str) -> float:
        """A start, and the bytes over the share of the bandwidth that they reach."""
        curve = self.data.types[kind].update
        return float(curve.start_seconds + moved / (curve.bytes_per_second * curve.share[0]))

    def seconds(self, plan: Plan) -> float:
        workload = SimpleNamespace(
            cluster=self.cluster,
            profile=Profile(self.data, plan.recomputation),
            precision="fp16",
            stack=SimpleNamespace(gradient_bytes=self.data.gradient_bytes),
        )
        return seconds_of(plan, workload, update_seconds=self.update_seconds)

    def fits(self, plan: Plan) -> bool:
        return bool(self.replayer.replay(plan).fits)


def price(data: Data, decision: Decision) -> float:
    """Seconds of the second replay, after the rules of the space have been looked at."""
    reader = Reader(data)
    kinds = [(node["device"], n) for n, node in enumerate(data["nodes"])]
    devices = [kind for kind in kinds for _ in range(data["nodes"][kind[1]]["devices"])]
    fields = {key: value for key, value in decision.items() if key != "replicas"}
    try:
        plan = reader.data.plan(decision["replicas"], **fields)
    except ValidationError as error:
        demand(False, str(error))
    demand(plan.recomputation in data["layers"][0]["kept"], "a mode that the data lack")
    for stage in (stage for replica in plan.replicas for stage in replica.stages):
        demand(len({devices[d][0] for d in stage.all_devices}) == 1, "a stage of two types")
        demand(len(stage.tensor_shares) in data["tensor_degrees"], "another tensor degree")
        demand(len(set(stage.tensor_shares)) == 1, "unequal tensor shares")
        demand(len(stage.layers) <= MOST_CHUNKS, "too many chunks")
        for group in stage.devices:
            demand(len({devices[d][1] for d in group}) == 1, "a tensor group on two nodes")
    demand(reader.fits(plan), "more bytes than a device has")
    return reader.seconds(plan)


def fitting(reader: Reader) -> Iterator[float]:
    """The seconds of the plans that fit, the least first."""
    plans = list(all_plans(reader.data))
    seconds = [reader.seconds(plan) for plan in plans]
    for number in sorted(range(len(plans)), key=lambda number: seconds[number]):
        if reader.fits(plans[number]):
            yield seconds[number]


def optimum(data: Data) -> float | None:
    return next(fitting(Reader(data)), None)


def spoil(data: Data, decision: Decision) -> Decision:
    """One sample more."""
    first, *others = decision["replicas"]
    batch, *batches = first["micro_batches"]
    more = batch | {"samples": batch["samples"] + 1}
    return decision | {"replicas": [first | {"micro_batches": [more, *batches]}, *others]}


PROBLEM = Problem("joint", draw, price, optimum, spoil)
