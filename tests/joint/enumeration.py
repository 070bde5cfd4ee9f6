"""Random tiny instances of `joint`, random plans, and all plans of an instance."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, product
from random import Random
from typing import Any

from pydantic import ValidationError

from hetplan.errors import UnsupportedError
from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.schedule.dispatch import best_dispatched
from hetplan.formulations.joint.schedule.pose import pose
from hetplan.plans.passes import FLAT_SPLIT, FOLDED
from hetplan.plans.plan import Plan, Replica
from hetplan.profiling.frameworks import HETPLAN
from hetplan.profiling.rates.collectives import CollectiveCurve
from hetplan.profiling.rates.products import MoveCurve
from hetplan.replays.chains import ChainReplayer
from hetplan.replays.data import DeviceType, Kept, Layer, Node, Table
from hetplan.solvers.run import Run

Pipeline = list[list[list[int]]]  # [stage][row group][tensor rank]
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b")


def random_data(rng: Random, *, devices: int = 6, layers: int = 7, batch: int = 12) -> JointData:
    """At most so many devices, layers and samples. Transfers are cheap, as long as passes, or
    dear."""
    kinds = ["slow", "fast", "other"][: rng.choice((1, 2, 2, 3))]
    L, modes = rng.randint(2, layers), ("none", *rng.choice(((), ("full",))))
    nodes, left = [], rng.randint(1, devices)
    network, inside = 10 ** rng.uniform(6, 9.5), 10 ** rng.uniform(7, 10)
    while left:
        here = rng.randint(1, min(left, 4))
        left -= here
        curve = CollectiveCurve(
            log2_bytes=[10.0, 20.0, 26.0],
            seconds=[1e-5, 2e-5, 1e-3],
            stretch=rng.choice((0.5, 1.0, 2.0)),
        )
        nodes.append(
            Node(
                device=rng.choice(kinds),
                devices=here,
                intra_bandwidth=inside * rng.choice((0.3, 1.0, 1.0)),
                intra_latency=rng.choice((0.0, 1e-5)),
                network_bandwidth=network * rng.choice((1.0, 1.0, 5.0)),
                network_latency=rng.choice((0.0, 2e-5)),
                all_reduce=dict.fromkeys((2, 3, 4), curve) if rng.random() < 0.2 else {},
            )
        )
    degrees = rng.choice(([1], [1, 2], [1, 2]))
    tables = []
    for kind in kinds:
        speed = {"slow": 3.0, "fast": 1.0, "other": 1.7}[kind]
        each = [rng.uniform(0.3, 1.5) for _ in range(L)]
        for tensor in rng.choice(([1], degrees)):
            start = rng.choice((0.0, 0.3, 1.0))
            for b in sorted(rng.sample((1, 2, 4, 8), rng.randint(1, 3))):
                forward = [1e-3 * speed * x * (start + b) / tensor**0.8 for x in each]
                host = rng.choice((0.0, 0.5))
                tables.append(
                    Table(
                        type=kind,
                        tensor=tensor,
                        micro_batch=b,
                        forward_seconds=forward,
                        backward_seconds=[x * rng.uniform(1, 2.5) for x in forward],
                        forward_host_seconds=[host * x for x in forward],
                        backward_host_seconds=[host * x for x in forward],
                        repeated={mode: [1.0] * L for mode in modes[1:]},
                    )
                )
    tied = rng.random() < 0.4
    sizes = [10 ** rng.uniform(4, 6.5) for _ in range(L)]
    move = MoveCurve(start_seconds=1e-6, bytes_per_second=1e11, log2_bytes=[10.0], share=[0.8])
    room = 10 ** rng.uniform(7.0, 9.0)
    return JointData(
        global_batch=rng.randint(1, batch),
        element_bytes=2,
        gradient_bytes=rng.choice((2, 4)),
        hidden_reduces=rng.random() < 0.3,
        framework=HETPLAN,
        tensor_degrees=degrees,
        nodes=nodes,
        types={kind: DeviceType(memory_bytes=room, update=move) for kind in kinds},
        layers=[
            Layer(
                name=f"l{i}",
                param_bytes=size,
                tied_param_bytes=sizes[0] * 0.9 if tied and i == L - 1 else 0.0,
                activation_bytes=10 ** rng.uniform(3, 6),
                tensor_bytes=rng.choice((0.0, 1e4, 1e5)),
                kept={mode: Kept(saved_bytes=1e6 if mode == "none" else 1e5) for mode in modes},
            )
            for i, size in enumerate(sizes)
        ],
        tables=tables,
    )


def random_plan(rng: Random, data: JointData) -> Plan | None:
    """A plan of the space, whether or not it fits; None where the draw breaks a rule."""
    kinds, L, G = data.devices, len(data.layers), data.global_batch
    devices = list(range(len(kinds)))
    rng.shuffle(devices)
    if rng.random() < 0.5:
        devices.sort(key=lambda d: kinds[d][1])
    devices = devices[: rng.choice((len(devices), rng.randint(1, len(devices))))]
    schedule = rng.choice(SCHEDULES)
    count = min(rng.choice((1, 1, 2, 3)), len(devices), G)
    cuts = sorted(rng.sample(range(1, len(devices)), count - 1))
    pools = [devices[a:b] for a, b in zip([0, *cuts], [*cuts, len(devices)], strict=True)]
    samples = parts_of(rng, G, count)
    chunks = rng.randint(1, 4) if schedule == "interleaved-1f1b" else 1
    replicas: list[dict[str, Any]] = []
    for pool, g in zip(pools, samples, strict=True):
        groups: list[list[list[int]]] = []
        while pool:
            kind, width = kinds[pool[0]][0], rng.choice((1, 1, 2, 3))
            rows = [d for d in pool[:width] if kinds[d][0] == kind]
            pool = [d for d in pool if d not in rows]
            alike = len(rows) == 2 and kinds[rows[0]][1] == kinds[rows[1]][1]
            if alike and 2 in data.tensor_degrees and rng.random() < 0.5:
                groups.append([rows])
            else:
                groups.append([[d] for d in rows])
        S = len(groups)
        if S * chunks > L:
            return None
        at = [0, *sorted(rng.sample(range(1, L), S * chunks - 1)), L]
        b = rng.choice((1, 1, rng.randint(1, g), g))
        full, last = divmod(g, b)
        batches = [{"count": n, "samples": s} for n, s in ((full, b), (1, last)) if n and s]
        replicas.append(
            {
                "stages": [
                    {
                        "layers": [(at[v], at[v + 1]) for v in range(s, S * chunks, S)],
                        "devices": group,
                        "row_shares": [rng.choice((1.0, 1.0, 2.0)) for _ in group],
                        "tensor_shares": [1.0] * len(group[0]),
                    }
                    for s, group in enumerate(groups)
                ],
                "micro_batches": batches,
            }
        )
    zero, mode = rng.choice((0, 0, 1, 2, 3)), rng.choice(data.modes)
    try:
        return data.plan(replicas, schedule=schedule, zero=zero, recomputation=mode)
    except ValidationError:
        return None


def in_any_order(rng: Random, data: JointData, plan: Plan) -> Iterator[Plan]:
    """The plan's replicas under every named schedule with split passes, also on a V, and in the
    best orders that rules of dispatching find; whether or not they fit."""
    folded = on_a_v(rng, data, plan)
    for schedule in (*FLAT_SPLIT, *FOLDED):
        layers = folded if schedule in FOLDED else plan.replicas
        if layers is not None and (schedule in FOLDED or plan.schedule != "interleaved-1f1b"):
            with suppress(ValidationError):
                yield changed(plan, replicas=layers, schedule=schedule)
    with suppress(UnsupportedError):
        yield from dispatched(data, plan)
    if folded is not None:
        with suppress(UnsupportedError, ValidationError):
            yield from dispatched(data, changed(plan, replicas=folded, schedule="v-half"))


def changed(plan: Plan, **fields: Any) -> Plan:
    """The plan with other fields; raises pydantic's ValidationError where they break a rule."""
    return Plan.model_validate({**dict(plan), "recomputation": "none", **fields})


def on_a_v(rng: Random, data: JointData, plan: Plan) -> list[Replica] | None:
    """The replicas with two chunks on a V, cut anywhere; None where there are too few layers."""
    replicas, L = [], len(data.layers)
    for replica in plan.replicas:
        S = len(replica.stages)
        if 2 * S > L:
            return None
        at = [0, *sorted(rng.sample(range(1, L), 2 * S - 1)), L]
        stages = [
            stage.model_copy(
                update={"layers": [(at[s], at[s + 1]), (at[2 * S - 1 - s], at[2 * S - s])]}
            )
            for s, stage in enumerate(replica.stages)
        ]
        replicas.append(replica.model_copy(update={"stages": stages}))
    return replicas


def dispatched(data: JointData, plan: Plan) -> Iterator[Plan]:
    """The plan in explicit orders of whole and of split passes, without a limit of memory."""
    for split in (False, True):
        passes = []
        for problem in pose(plan, ChainReplayer.of(data), split=split):
            found = best_dispatched(replace(problem, room=None), Run())
            assert found is not None
            passes.append(problem.texts(found.order))
        with suppress(ValidationError):
            yield changed(plan, schedule="explicit", passes=passes)


def parts_of(rng: Random, total: int, count: int) -> list[int]:
    """Positive whole numbers that add up."""
    cuts = sorted(rng.sample(range(1, total), count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def home_nodes(plan: Plan) -> set[int]:
    """Nodes that hold some layer alone."""
    homes = set()
    for layer in range(len(plan.workload.layers)):
        nodes = {
            plan.devices[device].node
            for replica in plan.replicas
            for stage in replica.stages
            if any(first <= layer < last for first, last in stage.layers)
            for device in stage.all_devices
        }
        if len(nodes) == 1:
            homes |= nodes
    return homes


def all_plans(data: JointData) -> Iterator[Plan]:
    """Every plan of the space, devices told apart; see docs/method-joint.md."""
    for pools in set_partitions(range(len(data.devices))):
        for chosen in subsets(pools):
            for layout in product(*(list(pipelines(data, pool)) for pool in chosen)):
                if layout and len(layout) <= data.global_batch:
                    yield from plans_of(data, layout)


def plans_of(data: JointData, layout: Sequence[Pipeline]) -> Iterator[Plan]:
    """All plans with such replicas [replica][stage][row group][tensor rank]."""
    L, G = len(data.layers), data.global_batch
    schedules = [("gpipe", 1), ("1f1b", 1), *(("interleaved-1f1b", C) for C in range(1, 5))]
    for (schedule, C), zero, mode in product(schedules, range(4), data.modes):
        if any(len(pipe) * C > L for pipe in layout):
            continue
        for samples in compositions(G, len(layout)):
            each = [
                list(replicas_of(pipe, g, L, C)) for pipe, g in zip(layout, samples, strict=True)
            ]
            for made in product(*each):
                try:
                    yield data.plan(list(made), schedule=schedule, zero=zero, recomputation=mode)
                except ValidationError:  # unlike numbers of steps, or no whole rounds
                    continue


def replicas_of(pipe: Pipeline, g: int, L: int, C: int) -> Iterator[dict[str, Any]]:
    """A replica that takes g samples: every micro-batch, all cuts."""
    S = len(pipe)
    for b, inner in product(range(1, g + 1), combinations(range(1, L), S * C - 1)):
        at, (full, last) = [0, *inner, L], divmod(g, b)
        yield {
            "stages": [
                {
                    "layers": [(at[v], at[v + 1]) for v in range(s, S * C, S)],
                    "devices": stage,
                    "row_shares": [1.0] * len(stage),
                    "tensor_shares": [1.0] * len(stage[0]),
                }
                for s, stage in enumerate(pipe)
            ],
            "micro_batches": [
                {"count": n, "samples": size} for n, size in ((full, b), (1, last)) if n and size
            ],
        }


def pipelines(data: JointData, devices: Sequence[int]) -> Iterator[Pipeline]:
    """All ways to make stages in order of all these devices."""
    if not devices:
        yield []
    for size in range(1, len(devices) + 1):
        for chosen in combinations(devices, size):
            left = [d for d in devices if d not in chosen]
            for stage in stages(data, chosen):
                for rest in pipelines(data, left):
                    yield [stage, *rest]


def stages(data: JointData, devices: Sequence[int]) -> Iterator[list[list[int]]]:
    """Row groups of these devices, in their order: of one type, tensor ranks of one node."""
    for t in data.tensor_degrees:
        rows = [list(devices[i : i + t]) for i in range(0, len(devices), t)]
        kinds = {data.devices[d][0] for d in devices}
        whole = all(len(row) == t and len({data.devices[d][1] for d in row}) == 1 for row in rows)
        if len(kinds) == 1 and whole:
            yield rows


def set_partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to divide items into sets."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in combinations(rest, size):
            left = [item for item in rest if item not in others]
            for more in set_partitions(left):
                yield [[first, *others], *more]


def subsets(pools: list[list[int]]) -> Iterator[tuple[list[int], ...]]:
    """All choices of some of them, at least one."""
    for size in range(1, len(pools) + 1):
        yield from combinations(pools, size)


def compositions(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ways to add up positive whole numbers to a total."""
    for cuts in combinations(range(1, total), count - 1):
        yield tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
