"""Tiny random theories and a brute-force oracle that shares nothing with the solvers but the LP
driver."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache

import numpy as np

from hetplan.formulations.hap.data import Communication, Compute, Device, HapData, Triple
from hetplan.formulations.hap.problem import Floats, HapProblem
from hetplan.solvers import highs
from hetplan.solvers.model import Model
from hetplan.solvers.run import Options, Run, Stop

FORMS = ("Identity", "All-Gather(0)", "All-Reduce")


def instance(seed: int, segments: int | None = None) -> HapData:
    """A few tensors in three forms, 5 to 9 random triples; several effects, detours, cycles, dead
    ends."""
    draw = random.Random(seed)
    g = segments or draw.choice([1, 1, 1, 2, 3])
    names = [f"e{i}|{form}" for i in range(draw.randint(2, 3)) for form in FORMS]
    goal = names[-1]
    triples: list[Triple] = []
    count = draw.randint(5, 9)
    for n in range(count):
        level = n * len(names) // count
        pool = names[: max(1, level + 1)]
        pre = [] if n < 2 else draw.sample(pool, min(len(pool), draw.choice([0, 1, 1, 1, 2])))
        near = names[max(0, level - 2) : level + 4]
        post = draw.sample(near, min(len(near), draw.choice([1, 1, 1, 2])))
        if n == count - 1:
            post = [goal]
        triples.append(_triple(draw, n, pre, post, draw.randrange(g)))
    draw.shuffle(triples)
    speeds = draw.choice(
        [[1.0], [1.0, 1.0], [1.0, 2.0], [1.0, 1.0, 3.0], [1.0, 2.0, 5.0], [1.0, 1.5, 2.5, 4.0]]
    )
    devices = [Device(name=f"d{j}", flops_per_second=v) for j, v in enumerate(speeds)]
    return HapData(devices=devices, segments=g, triples=triples, goal=goal)


def _triple(draw: random.Random, n: int, pre: list[str], post: list[str], segment: int) -> Triple:
    def size(scale: float) -> float:
        return draw.choice(
            [0.0, draw.uniform(0.1, 1.0) * scale, float(draw.randint(1, 4)) * scale / 4]
        )

    if draw.random() < 0.45:
        return Communication(
            kind="comm", instruction=f"comm {n}", pre=pre, post=post, segment=segment,
            fixed_seconds=size(0.5), shared_seconds=size(1.5),
        )  # fmt: skip
    return Compute(
        kind="compute", instruction=f"op {n}", pre=pre, post=post, segment=segment,
        fixed_flops=size(1.0), shared_flops=size(6.0),
    )  # fmt: skip


def limited(seed: int) -> HapData:
    """`instance` with bytes on its triples, more where they cost little, and memory that about
    holds some program
    (mostly the one of fewest bytes) at some ratios: every device a little more, or less, than its
    part of it."""
    plain, draw = instance(seed), random.Random(f"memory {seed}")
    m = len(plain.devices)

    def held(cost: float) -> float:
        return draw.choice([0.0, draw.uniform(0.5, 6.0), float(draw.randint(1, 4)) / (0.2 + cost)])

    triples = [
        t.model_copy(update={"fixed_bytes": held(fixed) / m, "shared_bytes": held(shared)})
        for t in plain.triples
        for fixed, shared in [_work(t)]
    ]
    programs = sorted(all_programs(plain.model_copy(update={"triples": triples})).values()) or [()]
    total = [sum(m * _bytes(triples[i])[0] + _bytes(triples[i])[1] for i in q) for q in programs]
    least = programs[total.index(min(total))]
    chosen = least if draw.random() < 0.8 else draw.choice(programs)
    rows = []
    for _ in range(plain.segments):
        row = [draw.uniform(0.2, 1.0) for _ in plain.devices]
        rows.append([x / sum(row) for x in row])
    size, device_bytes = draw.choice([0.8, 1.0, 1.0, 1.05, 1.2]), []
    for j in range(m):
        part = sum(
            _bytes(triples[i])[0] + _bytes(triples[i])[1] * rows[triples[i].segment][j]
            for i in chosen
        )
        device_bytes.append(part * size * draw.choice([1.0, 1.0, 1.0, 0.9, 1.3]))
    memory = {"device_bytes": device_bytes}
    kept = [triple.model_dump() for triple in triples]
    return HapData.model_validate({**plain.model_dump(), "triples": kept, "memory": memory})


def _work(triple: Triple) -> tuple[float, float]:
    if isinstance(triple, Communication):
        return triple.fixed_seconds, triple.shared_seconds
    return triple.fixed_flops, triple.shared_flops


def _bytes(triple: Triple) -> tuple[float, float]:
    return triple.fixed_bytes or 0.0, triple.shared_bytes or 0.0


Signature = tuple[tuple[tuple[float, ...], ...], tuple[float, ...], tuple[float, ...]]


@cache
def programs(seed: int, segments: int | None = None) -> dict[Signature, tuple[int, ...]]:
    """Every cost function that a program of the instance has, with one such program.

    A signature is the stages' work (F, S_1 … S_g) in any order, the communication (fixed, shared_1
    …), and the bytes
    (fixed, shared_1 …).
    """
    return all_programs(instance(seed, segments))


def all_programs(data: HapData) -> dict[Signature, tuple[int, ...]]:
    """The same for any tiny instance."""
    found: dict[Signature, tuple[int, ...]] = {}
    g = data.segments

    def extend(program: tuple[int, ...], known: frozenset[str]) -> None:
        if data.goal in known:
            found.setdefault(_signature(data, program, g), program)
            return
        for i, triple in enumerate(data.triples):
            if (
                i not in program
                and known.issuperset(triple.pre)
                and not known.issuperset(triple.post)
            ):
                extend((*program, i), known.union(triple.post))

    extend((), frozenset())
    return found


def _signature(data: HapData, program: tuple[int, ...], g: int) -> Signature:
    stages, comm, held = [[0.0] * (1 + g)], [0.0] * (1 + g), [0.0] * (1 + g)
    for i in sorted(program):
        held[0] += data.triples[i].fixed_bytes or 0.0
        held[1 + data.triples[i].segment] += data.triples[i].shared_bytes or 0.0
    for i in program:
        triple = data.triples[i]
        if isinstance(triple, Communication):
            comm[0] += triple.fixed_seconds
            comm[1 + triple.segment] += triple.shared_seconds
            stages.append([0.0] * (1 + g))
        else:
            stages[-1][0] += triple.fixed_flops
            stages[-1][1 + triple.segment] += triple.shared_flops
    return tuple(sorted(tuple(row) for row in stages)), tuple(comm), tuple(held)


def least_cost(data: HapData, signature: Signature) -> float | None:
    """The ratio problem of one signature as one plain linear programme over all devices; None where
    nothing fits."""
    stages, comm, (fixed_bytes, *shared_bytes) = signature
    m, g = len(data.devices), data.segments
    model = Model("oracle")
    B = model.continuous("B", (g, m))
    M = model.continuous("M", g)
    T = model.continuous("T", len(stages))
    model.minimize(comm[0] + T.sum() + np.array(comm[1:]) @ M)
    model.row("sum", B.sum(axis=1) == 1)
    model.row("max", M[:, None] >= B)
    for s, (F, *S) in enumerate(stages):
        for j, device in enumerate(data.devices):
            v = device.flops_per_second
            model.row("stage", T[s] >= (F + np.array(S) @ B[:, j]) / v)
    for j, room in enumerate(data.memory.device_bytes if data.memory is not None else ()):
        held = fixed_bytes + np.array(shared_bytes) @ B[:, j]
        model.row("memory", held <= room + 1e-10 * room)
    answer = highs.solve(model, Run(Options(threads=1, gap=0.0)))
    if answer.stop is Stop.INFEASIBLE:
        return None
    assert answer.objective is not None, answer.message
    return answer.objective


def least_at(problem: HapProblem, found: Iterable[Signature], ratios: Floats) -> float:
    """The cheapest of all programs of one segment at ratios [K]."""
    costs = []
    for stages, comm, _ in found:
        busy = [float(((F + S * ratios) / problem.speeds).max()) for F, S in stages]
        costs.append(comm[0] + comm[1] * float(ratios.max()) + sum(busy))
    return min(costs)


def oracle(data: HapData, found: dict[Signature, tuple[int, ...]]) -> float | None:
    """The least cost over all programs and ratios; None without a program."""
    best: float | None = None
    for signature in sorted(found, key=lambda s: _at_least(data, s)):
        if best is not None and _at_least(data, signature) >= best:
            break
        cost = least_cost(data, signature)
        if cost is not None:
            best = cost if best is None else min(best, cost)
    return best


def _at_least(data: HapData, signature: Signature) -> float:
    """Fixed work on the slowest device, shared work at the speed of all, each stage on its own."""
    stages, comm, _ = signature
    speeds = [device.flops_per_second for device in data.devices]
    least = sum(max(F / min(speeds), sum(S) / sum(speeds)) for F, *S in stages)
    return least + comm[0] + sum(comm[1:]) / len(speeds)


@cache
def known_limited(seed: int) -> tuple[HapData, float | None]:
    """The same with memory."""
    data = limited(seed)
    return data, oracle(data, all_programs(data))


@cache
def known(seed: int, segments: int | None = None) -> tuple[HapData, float | None]:
    """An instance and what enumeration says of it."""
    data = instance(seed, segments)
    return data, oracle(data, programs(seed, segments))


def tight(seed: int) -> tuple[HapData, float]:
    """Two device types, four tensors in two or three forms, every way of nearly the same length,
    and the optimum by enumeration: which of two partial programs is better is decided by a few
    percent of an open stage's work."""
    draw = random.Random(seed)
    forms, tensors = draw.choice([2, 2, 3]), 4
    triples: list[Triple] = []

    def near(size: float) -> float:
        return float(size * draw.uniform(0.9, 1.1))

    def compute(pre: list[str], post: str) -> None:
        # share of replicated work, in seconds at ratios 1 : 2
        mixed = draw.choice([0.0, 0.0, 0.5, 0.9, 1.0])
        triples.append(
            Compute(
                kind="compute", instruction=f"op {post}", pre=pre, post=[post],
                fixed_flops=near(mixed), shared_flops=near(3 * (1 - mixed)),
            )
        )  # fmt: skip

    for j in range(forms):
        compute([], f"e0|{j}")
    for i in range(1, tensors):
        for j in range(forms):
            for k in range(forms):
                if j == k or draw.random() < 0.5:
                    compute([f"e{i - 1}|{j}"], f"e{i}|{k}")
            for k in range(forms):
                if j != k and draw.random() < 0.8:
                    fixed = draw.choice([0.0, near(0.1), near(0.3)])
                    triples.append(
                        Communication(
                            kind="comm", instruction=f"comm e{i}", pre=[f"e{i}|{j}"],
                            post=[f"e{i}|{k}"], fixed_seconds=fixed, shared_seconds=near(0.2),
                        )
                    )  # fmt: skip
    last = f"e{tensors - 1}"
    for j in range(forms):
        compute([f"{last}|{j}"], "goal")
    devices = [Device(name="slow", flops_per_second=1.0), Device(name="fast", flops_per_second=2.0)]
    data = HapData(devices=devices, triples=triples, goal="goal")
    return data, min(_two_devices(data, path) for path in paths(data, "goal", frozenset()))


def paths(data: HapData, wanted: str, later: frozenset[str]) -> list[list[int]]:
    """Every program of a theory whose triples need one property at most, without property twice."""
    found: list[list[int]] = []
    for i, triple in enumerate(data.triples):
        if wanted not in triple.post:
            continue
        if not triple.pre:
            found.append([i])
        elif triple.pre[0] not in later:
            found += [[*path, i] for path in paths(data, triple.pre[0], later | {wanted})]
    return found


def _two_devices(data: HapData, program: list[int]) -> float:
    """The least cost of a program on two devices of speeds 1 and 2: convex and piecewise linear in
    the slower one's ratio x, so the least of its values at both ends and at every kink."""
    rows, (alone, top), _ = _signature(data, tuple(program), 1)
    F, S = np.array(rows).T
    with np.errstate(divide="ignore", invalid="ignore"):
        kinks = ((F + S) / 2 - F) / (S + S / 2)
    x = np.concatenate([[0.0, 0.5, 1.0], kinks[np.isfinite(kinks) & (kinks > 0) & (kinks < 1)]])
    slow, fast = F + S * x[:, None], (F + S * (1 - x[:, None])) / 2
    costs = alone + top * np.maximum(x, 1 - x) + np.maximum(slow, fast).sum(axis=1)
    return float(costs.min())
