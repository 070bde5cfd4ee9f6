"""A second replay, written from `docs/simulator.md` alone: slow, plain, no code shared. Of named
schedules with split passes it knows ZB-H1 and ZB-H2; the others are stated as explicit orders.

Without recomputation and learned links. Everything is a dictionary or a list; a task's number is
its place in the list. Seconds of layers are looked up in the profile, those of updates in the
measured rates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from hetplan.profiling.models.operators import CONTENTION, Matmul
from hetplan.profiling.rates.collectives import collective_seconds, node_fabric
from hetplan.profiling.rates.products import move_seconds
from hetplan.profiling.rates.times import Rates, operator_time

TIE = 1e-6


class Task(dict[str, Any]):
    """seconds, delay, ports {port: share}, batch, before (tasks)."""


def run(tasks: list[Task]) -> float:
    """Seconds until the last task is done."""
    number = {id(task): i for i, task in enumerate(tasks)}
    started: dict[int, float] = {}
    free: dict[int, float] = defaultdict(float)
    asks: dict[int, float] = {}
    line: list[Any] = []  # (task, the port that it waits for) in the order of asking

    def done(task: Task) -> float | None:
        begin = started.get(number[id(task)])
        return None if begin is None else begin + task["seconds"] + task["delay"]

    def ready() -> None:
        changed = True
        while changed:
            changed = False
            for i, task in enumerate(tasks):
                if i in started or i in asks:
                    continue
                ends = [done(before) for before in task["before"]]
                if None in ends:
                    continue
                moment = max([0.0, *(end for end in ends if end is not None)])
                changed = True
                if task["ports"]:
                    asks[i] = moment
                else:
                    started[i] = moment

    ready()
    while len(started) < len(tasks):
        waiting = {i for i, _ in line}
        moments = [asks[i] for i in asks if i not in waiting and i not in started]
        moments += [free[port] for _, port in line]
        limit = min(moments) * (1 + TIE)
        first = [(i, port) for i, port in line if free[port] <= limit]
        now = [i for i in asks if i not in waiting and i not in started and asks[i] <= limit]
        now.sort(key=lambda i: (tasks[i]["batch"] < 0, tasks[i]["batch"], i))
        for i, port in [*first, *((i, None) for i in now)]:
            task = tasks[i]
            if port is not None and free[port] > limit:
                continue  # somebody before it has taken its port
            held = [p for p in sorted(task["ports"]) if free[p] > limit]
            if port is None and held:
                line.append((i, held[0]))
            elif held:
                line[line.index((i, port))] = (i, held[0])
            else:
                if port is not None:
                    line.remove((i, port))
                started[i] = max([asks[i], *(free[p] for p in task["ports"])])
                for p, share in task["ports"].items():
                    free[p] = started[i] + share * task["seconds"]
        ready()
    return max(end for task in tasks if (end := done(task)) is not None)


class Cluster:
    """Links of a workload's cluster."""

    def __init__(self, workload: Any) -> None:
        self.nodes = workload.cluster.nodes
        self.place = [n for n, node in enumerate(self.nodes) for _ in range(node.devices)]

    def link(self, a: int, b: int) -> tuple[float, float]:
        m, n = self.nodes[self.place[a]], self.nodes[self.place[b]]
        if self.place[a] == self.place[b]:
            return m.intra_bandwidth, m.intra_latency
        cards = (m.network_bandwidth, n.network_bandwidth)
        slower = min(*cards, m.flow, n.flow, *self.uplinks(m, n))
        return slower, max(m.network_latency, n.network_latency)

    def uplinks(self, m: Any, n: Any) -> list[float]:
        """Bytes/s of the switches' links that a message between two nodes passes."""
        if m.switch == n.switch:
            return []
        under = [[one.uplink for one in self.nodes if one.switch == end.switch] for end in (m, n)]
        return [sum(rates) for rates in under]

    def together(self, messages: list[tuple[int, int, float]]) -> tuple[float, float, Any]:
        """(seconds, latency, seconds by port) of messages at once."""
        messages = [(a, b, size) for a, b, size in messages if a != b]
        ports: dict[int, float] = defaultdict(float)
        for a, b, size in messages:
            m, n = self.place[a], self.place[b]
            if m == n:
                ports[2 * (len(self.nodes) + a)] += size / self.nodes[m].intra_bandwidth
                ports[2 * (len(self.nodes) + b) + 1] += size / self.nodes[m].intra_bandwidth
            else:
                ends = self.nodes[m], self.nodes[n]
                for side, (device, place) in enumerate(((a, m), (b, n))):
                    rails = len({one.switch for one in self.nodes if one.uplink < math.inf})
                    own = len(self.nodes) + len(self.place) + rails + device
                    has = ends[side].rails
                    rate = ends[side].network_bandwidth / (ends[side].devices if has else 1)
                    ports[2 * (own if has else place) + side] += size / rate
                for side, rate in enumerate(self.uplinks(*ends)):
                    first = 2 * (len(self.nodes) + len(self.place))  # behind all others
                    switch = [one.switch for one in self.nodes].index(ends[side].switch)
                    ports[first + 2 * switch + side] += size / rate
        slowest = max((size / self.link(a, b)[0] for a, b, size in messages), default=0.0)
        latency = max((self.link(a, b)[1] for a, b, _ in messages), default=0.0)
        return max([slowest, *ports.values()]), latency, ports

    def all_reduce(self, groups: list[list[int]], sizes: list[float]) -> tuple[float, Any]:
        """(seconds, share by port) of rings side by side."""
        rounds = 2 * (max(map(len, groups)) - 1)
        if rounds == 0:
            return 0.0, {}
        messages, latency = [], 0.0
        for group, size in zip(groups, sizes, strict=True):
            ring = sorted(group)
            hops = list(pairwise([*ring, ring[0]]))
            for a, b in hops:
                m, n = self.place[a], self.place[b]
                pairs = [(a, b)]
                if m != n and (self.nodes[m].rails or self.nodes[n].rails):
                    here, there = ([d for d in ring if self.place[d] == x] for x in (m, n))
                    pairs = list(zip(here, there, strict=False))
                messages += [(c, d, size / len(ring) / len(pairs)) for c, d in pairs]
            if len(ring) > 1:
                delays = sorted(self.link(a, b)[1] for a, b in hops)
                latency = max(latency, 2 * sum(delays[:-1]))
        seconds, _, ports = self.together(messages)
        whole = rounds * seconds + latency
        return whole, {p: rounds * held / whole for p, held in ports.items() if held}


def whole_parts(length: int, shares: list[float]) -> list[int]:
    """Integer parts nearest to the shares; what is missing goes to those rounded down most."""
    exact = [length * share / sum(shares) for share in shares]
    parts = [round(part) for part in exact]
    while sum(parts) < length:
        parts[min(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))] += 1
    while sum(parts) > length:
        parts[min(range(len(parts)), key=lambda i: (exact[i] - parts[i], i))] -= 1
    return parts


def layer_seconds(workload: Any, kind: str, tensor: int, rows: int) -> list[list[float]]:
    """Of every layer: forward, backward, and what the host takes of both."""
    profile = workload.profile
    if rows == 0:
        return [[0.0] * 4] * len(profile.layers)
    degree = tensor if profile.micro_batches(kind, tensor) else 1
    points = []
    for size in profile.micro_batches(kind, degree):
        table = profile.table(kind, degree, size)
        host = [table.forward_host_seconds, table.backward_host_seconds]
        host = [seconds or [0.0] * len(profile.layers) for seconds in host]
        points.append((size, [table.forward_seconds, table.backward_seconds, *host]))

    def at(side: int, layer: int) -> float:
        known: list[tuple[float, float]] = [(size, times[side][layer]) for size, times in points]
        for (x, y), (u, v) in pairwise(known):
            if x <= rows <= u:
                return y + (rows - x) / (u - x) * (v - y)
        if rows < known[0][0]:
            return known[0][1]
        if side > 1:
            return known[-1][1]
        last, slope = known[-1], known[-1][1] / known[-1][0]
        if len(known) > 1:
            rise = (last[1] - known[-2][1]) / (last[0] - known[-2][0])
            slope = rise if rise > 0 else slope
        return last[1] + (rows - last[0]) * slope

    count = range(len(profile.layers))
    return [[at(side, l) * degree / tensor for side in range(4)] for l in count]


def passes(workload: Any, stage: Any, layers: range, samples: int) -> list[float]:
    """Forward, backward, and the host's part of both, of the stage's slowest row group."""
    best = [0.0] * 4
    shares = stage.tensor_shares
    even = len(set(shares)) == 1
    for group, rows in zip(stage.devices, whole_parts(samples, stage.row_shares), strict=True):
        ranks = []
        for device, share in zip(group, shares, strict=True):
            kind = workload.cluster.devices[device].type
            times = layer_seconds(workload, kind, len(group) if even else 1, rows)
            scale = 1.0 if even else share / sum(shares)
            ranks.append([scale * sum(times[l][side] for l in layers) for side in range(4)])
        both = [max(each) for each in zip(*ranks, strict=True)]
        if sum(both[:2]) > sum(best[:2]):
            best = both
    return best


def weight_seconds(workload: Any, stage: Any, layers: range, samples: int) -> float:
    """Seconds of a pass of weights on the stage's slowest device: of a backward pass, one of the
    two products for each trained weight, and the lookups."""
    profile, slowest, shares = workload.profile, 0.0, stage.tensor_shares
    even = len(set(shares)) == 1
    for group, rows in zip(stage.devices, whole_parts(samples, stage.row_shares), strict=True):
        for device, share in zip(group, shares, strict=True):
            kind = workload.cluster.devices[device].type
            tensor = len(group) if even else 1
            degree = tensor if profile.micro_batches(kind, tensor) else 1
            sizes = profile.micro_batches(kind, degree)
            size = next((n for n in sizes if n >= rows), sizes[-1])
            rates = Rates(kind, workload.cluster.specs[kind], workload.precision, workload.stack)
            times, total = layer_seconds(workload, kind, tensor, rows), 0.0
            for l in layers:
                total += times[l][1] * weight_share(workload.model.layers[l], rates, size, degree)
            slowest = max(slowest, total * (1.0 if even else share / sum(shares)))
    return min(slowest, passes(workload, stage, layers, samples)[1])


def weight_share(layer: Any, rates: Rates, samples: int, tensor: int) -> float:
    """The part of a layer's backward pass that is one of weights."""
    every, of_weights = 0.0, 0.0
    for op in layer.operators:
        seconds = operator_time(op, rates, samples, tensor).backward
        every += seconds
        if isinstance(op, Matmul):
            of_weights += seconds / op.backward_products if op.weight else 0.0
        elif getattr(op, "kind", "") == "lookup":
            of_weights += seconds
    return of_weights / every if every else 0.0


def orders_of(plan: Any, replica: int) -> list[list[tuple[int, int, int]]]:
    """[stage] (side, chunk, micro-batch) in their order. Side 0 is forward, 1 backward, 2 of
    weights. Where some passes are split, a whole one has a pass of weights without seconds."""
    stages, texts = plan.replicas[replica].stages, None
    S, C, M = len(stages), len(stages[0].layers), plan.replicas[replica].steps
    if plan.passes is not None:
        texts = plan.passes[replica]
    elif plan.schedule in ("zb-h1", "zb-h2"):
        texts = [zero_bubble(S, s, M, twice=plan.schedule == "zb-h2") for s in range(S)]
    if texts is None:
        return [schedule_of(plan.schedule, S, s, M, C) for s in range(S)]
    split = any(text[0] == "W" for of_stage in texts for text in of_stage)
    orders: list[list[tuple[int, int, int]]] = []
    for of_stage in texts:
        orders.append([])
        whole = "D" if any(text[0] == "W" for text in of_stage) else "DB"
        for text in of_stage:
            batch, _, chunk = text[1:].partition(".")
            at = int(chunk or 0), int(batch)
            orders[-1].append(({"F": 0, "W": 2}.get(text[0], 1), *at))
            if split and text[0] in whole:
                orders[-1].append((2, *at))
    return orders


def is_split(plan: Any, replica: int, s: int, c: int, m: int) -> bool:
    """Whether a backward pass is split."""
    if plan.passes is None:
        return True
    texts = plan.passes[replica][s]
    return f"W{m}.{c}" in texts or (c == 0 and f"W{m}" in texts)


def zero_bubble(S: int, s: int, M: int, *, twice: bool) -> list[str]:
    """ZB-H1: 1F1B whose passes of weights wait until the stage has begun as many micro-batches as
    the first one begins; ZB-H2: with nearly twice as many forward passes in the warm-up."""
    begun, late = (2 * (S - s) - 1, 2 * s) if twice else (S - s, s)
    texts = [f"F{m}" for m in range(min(begun, M))]
    for m in range(M + late):
        if m < M:
            texts.append(f"B{m}")
        if 0 <= m - late < M:
            texts.append(f"W{m - late}")
        if m + begun < M:
            texts.append(f"F{m + begun}")
    return texts


def along_model(plan: Any, replica: int) -> list[tuple[int, int]]:
    """(stage, chunk) in the order of their layers."""
    stages = plan.replicas[replica].stages
    places = [(s, c) for s, stage in enumerate(stages) for c in range(len(stage.layers))]
    return sorted(places, key=lambda place: stages[place[0]].layers[place[1]])


def schedule_of(schedule: str, S: int, s: int, M: int, C: int) -> list[tuple[int, int, int]]:
    """(backward, chunk, micro-batch) in the order of a stage."""
    if schedule == "interleaved-1f1b":
        forwards = [
            (c, m) for start in range(0, M, S) for c in range(C) for m in range(start, start + S)
        ]
        warm = 2 * (S - 1 - s) + (C - 1) * S
    else:
        forwards = [(c, m) for c in range(C) for m in range(M)]
        warm = len(forwards) if schedule == "gpipe" else S - 1 - s
    warm = min(warm, len(forwards))
    backwards = [(C - 1 - c, m) for c, m in forwards]
    made = [(0, c, m) for c, m in forwards[:warm]]
    for ahead, back in zip(forwards[warm:], backwards, strict=False):
        made += [(0, *ahead), (1, *back)]
    return made + [(1, c, m) for c, m in backwards[len(forwards) - warm :]]


def seconds_of(
    plan: Any,
    workload: Any,
    sends: str = "waiting",
    exchange: float = 0.0,
    buckets: int = 1,
    prefetch: int = 0,
    update_seconds: Callable[[float, str], float] | None = None,
) -> float:
    """Seconds of one iteration.

    update_seconds: (bytes that an update moves, device type) -> its seconds; None: those of the
    measured rates.
    """
    cluster, L = Cluster(workload), len(workload.profile.layers)
    layers = workload.profile.layers
    tasks: list[Task] = []

    def add(seconds: float, ports: Any = None, batch: int = -1, delay: float = 0.0) -> Task:
        task = Task(seconds=seconds, ports=ports or {}, batch=batch, delay=delay, before=[])
        tasks.append(task)
        return task

    def alike() -> bool:
        return all(
            len(r.stages) == 1 and sum(map(len, r.stages[0].devices)) == 1 for r in plan.replicas
        )

    in_step = all(len(r.stages) == 1 and len(r.stages[0].layers) == 1 for r in plan.replicas)
    sharded = plan.zero > 0 and in_step and (plan.zero > 1 or alike())
    groups = [g for r in plan.replicas for g in r.stages[0].devices]
    width = max(map(len, groups))
    rings = [[g[r * len(g) // width] for g in groups] for r in range(width)]
    given = plan.zero_shares or [1.0] * len(plan.devices)
    share = {d: given[d] / sum(given[e] for e in ring) for ring in rings for d in ring}

    def half(size: float) -> tuple[float, Any]:
        if size == 0:
            return 0.0, {}
        padded = size / width * max(share.values()) * len(groups)
        both, ports = cluster.all_reduce(rings, [padded] * width)
        return both / 2, ports

    def walk(times: list[float], gather: list[float], scatter: list[float]) -> tuple[float, float]:
        """The link and the computation of a pass with prefetch, by asking times."""
        computed: list[float] = []
        link, there = 0.0, {}
        for l, seconds in enumerate(times):
            for j in range(l + prefetch + 1):
                if j < len(times) and j not in there:
                    asked = computed[j - 1 - prefetch] if j > prefetch else 0.0
                    link = max(link, asked) + gather[j]
                    there[j] = link
            computed.append(max(computed[-1] if computed else 0.0, there[l]) + seconds)
            link = max(link, computed[-1]) + scatter[l]
        return computed[-1], max(0.0, link - computed[-1])

    gathers = [half(layer.param_bytes)[0] if plan.zero == 3 else 0.0 for layer in layers]
    width_of = {"fp32": 4}.get(workload.precision, 2)
    each = workload.stack.gradient_bytes
    wider = 1.0 if each is None else each / width_of  # gradients than weights
    scatters = [half(wider * layer.param_bytes)[0] for layer in layers]
    left, overlaps = 0.0, sharded and plan.zero > 1 and prefetch > 0

    placed: list[Any] = []
    for number, replica in enumerate(plan.replicas):
        S, C = len(replica.stages), len(replica.stages[0].layers)
        sizes = [b.samples for b in replica.micro_batches for _ in range(b.count)]
        orders, along = orders_of(plan, number), along_model(plan, number)
        split_passes = {
            (s, c, m)
            for s, order in enumerate(orders)
            for side, c, m in order
            if side == 2 and is_split(plan, number, s, c, m)
        }
        sides = sorted({side for order in orders for side, _, _ in order})
        of_weights: dict[Any, float] = {}  # seconds of the passes of weights
        for s, c, m in split_passes:
            of_chunk = range(*replica.stages[s].layers[c])
            of_weights[s, c, m] = weight_seconds(workload, replica.stages[s], of_chunk, sizes[m])
        M, V = len(sizes), S * C
        first: dict[Any, Task] = {}
        last: dict[Any, Task] = {}
        parts: dict[int, list[Task]] = {}
        reduced: dict[Any, tuple[float, Any]] = {}
        for s, stage in enumerate(replica.stages):
            for side in sides:
                for c in range(C):
                    begin, end = stage.layers[c]
                    for m in range(M):
                        v = along.index((s, c))
                        later = of_weights.get((s, c, m), 0.0)
                        if side == 2:
                            first[s, side, c, m] = add(later, batch=m)
                            last[s, side, c, m] = first[s, side, c, m]
                            continue
                        one = [passes(workload, stage, range(begin, end), sizes[m])[side]]
                        one[0] -= later * side
                        if overlaps:
                            each = [
                                passes(workload, stage, range(l, l + 1), sizes[m])[side]
                                for l in range(L)
                            ]
                            if side:
                                one = list(walk(each[::-1], gathers[::-1], scatters[::-1]))
                                left = max(left, one[1])
                                serial = sum(each) + sum(gathers) + sum(scatters)
                            else:
                                one = list(walk(each, gathers, [0.0] * L))
                                serial = sum(each) + sum(gathers)
                            one[0] += CONTENTION * max(0.0, serial - sum(one))
                        exchanges = (v > 0) + (v < V - 1)
                        first[s, side, c, m] = add(one[0] + exchange * exchanges, batch=m)
        for s, stage in enumerate(replica.stages):
            for side in (0, 1):
                for c in range(C):
                    begin, end = stage.layers[c]
                    for m in range(M):
                        key = s, side, c, m
                        size = sum(layer.tensor_bytes for layer in layers[begin:end])
                        rows = whole_parts(sizes[m], stage.row_shares)
                        both, ports = cluster.all_reduce(stage.devices, [size * r for r in rows])
                        if size == 0:
                            both, ports = 0.0, {}
                        spent = passes(workload, stage, range(begin, end), sizes[m])
                        seconds, host = spent[side], spent[side + 2]
                        if side and (s, c, m) in split_passes and seconds:
                            # an even part of the host's seconds goes with the pass of weights
                            left = 1 - of_weights[s, c, m] / seconds
                            seconds, host = seconds * left, host * left
                        device = (seconds**2 - host**2) ** 0.5 + both / 2
                        reduced[key] = (device**2 + host**2) ** 0.5 - seconds, ports
                        last[key] = first[key]
        with_reduces = any(len(stage.tensor_shares) > 1 for stage in replica.stages)
        if with_reduces:
            for key, (seconds, ports) in reduced.items():
                last[key] = add(seconds, ports, key[3])
        for s in range(S):  # the last pass, a backward one or one of weights, in parts
            key = s, *orders[s][-1]
            whole = first[key]["seconds"]
            first[key]["seconds"] = whole / buckets
            parts[s] = [first[key]]
            for _ in range(buckets - 1):
                parts[s].append(add(whole / buckets))
                parts[s][-1]["before"].append(parts[s][-2])
            if with_reduces and key[1] == 1:
                last[key]["before"].append(parts[s][-1])
                parts[s][-1] = last[key]
            else:
                last[key] = parts[s][-1]
        for key, begins in first.items():
            in_parts = key[1:] == orders[key[0]][-1]
            if with_reduces and key[1] < 2 and not in_parts:
                last[key]["before"].append(begins)
        previous, following = {}, {}
        for s in range(S):
            for a, b in pairwise(orders[s]):
                first[s, *b]["before"].append(last[s, *a])
                previous[s, *b], following[s, *a] = last[s, *a], first[s, *b]
        for side in (0, 1):
            for h in range(V - 1):
                (s, c), (t, d) = along[h : h + 2] if side == 0 else along[h : h + 2][::-1]
                sends_first, its_chunk = along[h]
                layer = replica.stages[sends_first].layers[its_chunk][1] - 1
                for m in range(M):
                    here, after = replica.stages[s], replica.stages[t]
                    sent: list[tuple[int, int, float]] = []
                    row = [0, 0]
                    ends = [
                        whole_parts(sizes[m], here.row_shares),
                        whole_parts(sizes[m], after.row_shares),
                    ]
                    for g, count in zip(here.devices, ends[0], strict=True):
                        row[1] = 0
                        for k, other in zip(after.devices, ends[1], strict=True):
                            both_rows = min(row[0] + count, row[1] + other) - max(row)
                            row[1] += other
                            wide = max(len(g), len(k))
                            for r in range(wide if both_rows > 0 else 0):
                                size = both_rows * layers[layer].activation_bytes / wide
                                sent.append((g[r * len(g) // wide], k[r * len(k) // wide], size))
                        row[0] += count
                    seconds, latency, held = cluster.together(sent)
                    ports = {p: x / seconds for p, x in held.items()} if seconds else {}
                    move = add(seconds, ports, m, latency)
                    made, needed = (s, side, c, m), (t, side, d, m)
                    move["before"].append(last[made])
                    first[needed]["before"].append(move)
                    if sends in ("waiting", "rendezvous") and needed in previous:
                        move["before"].append(previous[needed])
                    if sends in ("blocking", "rendezvous") and made in following:
                        following[made]["before"].append(move)
        updates = []
        for s, stage in enumerate(replica.stages):
            own = {l for begin, end in stage.layers for l in range(begin, end)}
            held_bytes = sum(layers[l].param_bytes for l in own)
            if layers[-1].tied_param_bytes and L - 1 in own and tied_apart(plan, L):
                held_bytes += layers[-1].tied_param_bytes
            slowest = 0.0
            for group in stage.devices:
                for device, portion in zip(group, stage.tensor_shares, strict=True):
                    part = portion / sum(stage.tensor_shares)
                    if sharded:
                        part *= share[device]
                    elif plan.zero:
                        part /= sum(
                            len(
                                [
                                    other
                                    for other in r.stages
                                    if other.layers[0][0] <= stage.layers[0][0]
                                ][-1].devices
                            )
                            for r in plan.replicas
                        )
                    kind = workload.cluster.devices[device].type
                    params = held_bytes * part / {"fp32": 4}.get(workload.precision, 2)
                    if update_seconds is not None:
                        slowest = max(slowest, update_seconds(params * 28, kind))
                        continue
                    spec = workload.cluster.specs[kind]
                    slowest = max(slowest, move_seconds("binary", params * 28, kind, spec).seconds)
            update = add(slowest)
            update["before"].append(last[s, *orders[s][-1]])
            updates.append(update)
        placed.append((first, last, parts, updates, M))

    if sharded and len(plan.ranks) > 1:
        members = [(i, 0) for i in range(len(plan.replicas))]
        weights = sum(layer.param_bytes for layer in layers)
        step, once, ports = left, half(weights)[0], half(weights)[1]
        if alike() and not overlaps:
            scatter = poplar(plan, wider * weights, L, cluster, share)
            once = poplar(plan, weights, L, cluster, share)
            step = scatter + 2 * once if plan.zero == 3 else scatter
        elif not overlaps:
            step = sum(scatters) + 2 * sum(gathers)
        if plan.zero == 1:
            reduce_and_gather(add, placed, members, (scatter, ports), (once, ports), 1)
        else:
            before: list[Task] = []
            for m in range(placed[0][4]):
                task = add(step, ports, m)
                task["before"] += before
                before = [task]
                for first, last, _, updates, M in placed:
                    task["before"].append(last[0, 1, 0, m])
                    side = int(plan.schedule == "gpipe")
                    (first[0, side, 0, m + 1] if m + 1 < M else updates[0])["before"].append(task)
            if plan.zero == 2:
                task = add(once, ports)
                task["before"] += [updates[0] for *_, updates, _ in placed]
    elif not sharded:
        for owners, size in joined_layers(plan, layers):
            owned = [g for i, s in owners for g in plan.replicas[i].stages[s].devices]
            if len(owned) == 1:
                continue
            wide = max(map(len, owned))
            across = [[g[r * len(g) // wide] for g in owned] for r in range(wide)]
            reduce = cluster.all_reduce(across, [wider * size / wide] * wide)
            gather = cluster.all_reduce(across, [size / wide] * wide)
            if reduce[0] and plan.zero:
                reduce, gather = (reduce[0] / 2, reduce[1]), (gather[0] / 2, gather[1])
                reduce_and_gather(add, placed, owners, reduce, gather, buckets)
            elif reduce[0]:
                reduce_and_gather(add, placed, owners, reduce, None, buckets)
    return run(tasks)


def reduce_and_gather(
    add: Any, placed: Any, owners: Any, reduce: Any, gather: Any, buckets: int
) -> None:
    """Gradients joined behind the last backward passes, in parts; weights gathered behind the
    updates. Both are (seconds, ports)."""
    before: list[Task] = []
    for part in range(buckets):
        task = add(reduce[0] / buckets, reduce[1])
        task["before"] += before
        before = [task]
        for i, s in owners:
            own = placed[i][2][s]
            task["before"].append(own[-(-(part + 1) * len(own) // buckets) - 1])
    for i, s in owners:
        placed[i][3][s]["before"].append(before[0])
    if gather:
        task = add(*gather)
        task["before"] += [placed[i][3][s] for i, s in owners]


def holders(plan: Any, layer: int) -> tuple[tuple[int, int], ...]:
    """(replica, stage) of everybody with the layer."""
    return tuple(
        (i, s)
        for i, replica in enumerate(plan.replicas)
        for s, stage in enumerate(replica.stages)
        if any(begin <= layer < end for begin, end in stage.layers)
    )


def tied_apart(plan: Any, count: int) -> bool:
    """Whether first and last layer have different holders."""
    return holders(plan, 0) != holders(plan, count - 1)


def joined_layers(plan: Any, layers: Any) -> list[tuple[Any, float]]:
    """(holders, bytes), in the order of their first layers; what is tied, last."""
    sizes: dict[Any, float] = {}
    for l, layer in enumerate(layers):
        sizes[holders(plan, l)] = sizes.get(holders(plan, l), 0.0) + layer.param_bytes
    tied = layers[-1].tied_param_bytes
    if tied and tied_apart(plan, len(layers)):
        sizes[holders(plan, 0)] -= tied
        both = tuple(sorted({*holders(plan, 0), *holders(plan, len(layers) - 1)}))
        sizes[both] = sizes.get(both, 0.0) + tied
    return list(sizes.items())


def poplar(plan: Any, size: float, count: int, cluster: Cluster, share: dict[int, float]) -> float:
    """Seconds in which all devices in use scatter or gather so many bytes of `count` layers, by
    Poplar's formula."""
    used = sorted(share)
    links = [cluster.link(a, b) for a, b in pairwise([*used, used[0]])]
    speed, latency = min(s for s, _ in links), max(l for _, l in links)
    n, messages = len(used), count if plan.zero == 3 else 1
    padded = (n - 1) * (size * max(share.values()) / speed + messages * latency)
    direct: float = size / speed + n * (n - 1) * messages * latency
    return min(padded, direct)


def group_seconds(workload: Any, operation: str, size: float, stride: int, ranks: int) -> float:
    """An operation in all groups of ranks that are `stride` apart, on nodes that are all alike."""
    node = workload.cluster.nodes[0]
    if ranks == 1:
        return 0.0
    if stride * ranks <= node.devices:
        return collective_seconds(operation, size, ranks, node_fabric(node)).seconds
    network: float = 0.96 * node.network_bandwidth
    latency: float = node.network_latency
    in_a_node = max(1, node.devices // stride)
    if operation in ("send", "all-to-all"):  # all devices of a node send at once
        rate: float = min(node.intra_bandwidth, network / node.devices)
        leaving = (ranks - in_a_node) / ranks if operation == "all-to-all" else 1.0
        return leaving * size / rate + latency
    nodes = math.ceil(ranks / in_a_node)
    rate = min(node.intra_bandwidth, network / min(stride, node.devices))
    hops = (nodes - 1) * latency + (ranks - nodes) * node.intra_latency
    rounds = 2 if operation == "all-reduce" else 1
    seconds: float = rounds * ((ranks - 1) / ranks * size / rate + hops)
    return seconds


def block_waits(
    workload: Any,
    plan: Any,
    samples: int,
    computing: tuple[float, float, float],
    of_weights: float | None = None,
) -> tuple[float, ...]:
    """Seconds that a block of a model in 16 bits waits in a plan with further degrees, forward and
    backward. computing: seconds of its passes and of attention's core in the forward pass.

    of_weights: where the backward pass is split, the seconds that the pass of weights computes; the
    answer then has the waits of the pass of inputs and of that of weights in place of one.
    """
    shape, degrees, block = workload.model.spec.shape, plan.degrees, workload.model.layers[1]
    tensor, data = len(plan.replicas[0].stages[0].tensor_shares), len(plan.replicas)
    context, expert, expert_tensor = degrees.context, degrees.expert, degrees.expert_tensor
    tokens, width = workload.model.tokens_per_sample * samples / context, 2
    forward, backward, core = computing

    def beside(seconds: float, window: float) -> float:
        return seconds - (1 - CONTENTION) * min(seconds, window)

    there, back, of_experts = 0.0, 0.0, 0
    if shape.experts:
        of_experts = 3 * shape.hidden * shape.feed_forward * shape.experts.count
        own_tokens = tokens * shape.experts.active
        if degrees.sequence_parallel or expert_tensor < tensor:
            own_tokens /= tensor
        size = own_tokens * shape.hidden * width
        once = group_seconds(workload, "all-to-all", size, expert_tensor, expert)
        there, back = there + 2 * once, back + 2 * once
    else:
        expert_tensor = tensor
    head = tokens * 2 * (shape.hidden / shape.heads) * width / tensor
    if degrees.exchange == "ring":
        turn = group_seconds(workload, "send", shape.kv_heads * head, tensor, context)
        turn *= context - 1
        there, back = there + beside(turn, core), back + beside(2 * turn, 2 * core)
    else:
        each = (shape.heads + shape.kv_heads) * head / 4
        once = group_seconds(workload, "all-to-all", each, tensor, context)
        there, back = there + 4 * once, back + 4 * once
    if plan.zero == 3:
        ranks, apart = data * context // degrees.shard_groups, expert * expert_tensor
        parts = [((block.params - of_experts) / tensor, tensor, ranks)]
        parts.append((of_experts / apart, apart, tensor * ranks // apart))
        gather = sum(
            group_seconds(workload, "all-gather", params * width, stride, n)
            for params, stride, n in parts
            if params
        )
        there += beside(gather, forward)
        if of_weights is not None:  # it gathers nothing, and scatters what the other one cannot
            back += beside(gather, backward - of_weights)
            return there, back, beside(gather, of_weights)
        back += beside(2 * gather, backward)
    return (there, back) if of_weights is None else (there, back, 0.0)


def host_update(params: float, hidden: float) -> float:
    """Adam of so many parameters in 16 bits on the host of a device without a known machine:
    51 GB/s of memory, 25 GB/s to the device. hidden: seconds that hide transfers."""
    return params * 30 / 51e9 + max(0.0, params * 4 / 25e9 - hidden)
