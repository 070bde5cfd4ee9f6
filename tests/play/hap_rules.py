"""`hap` from its prose: a program and the ratios of its segments.

Programs are enumerated. The ratios of one program are a linear program, which SciPy solves and
which the prices of its own solution confirm.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from scipy.optimize import linprog

from play.problem import Data, Decision, Problem, amount, demand, magnitude

SUM = 1e-9  # how far the ratios of a segment may add up beside 1
ROOM = 1e-9  # by which share bytes may be above the memory


def draw(rng: Random) -> Data:
    """At most six triples over six properties, three devices and two segments."""
    second, flop = magnitude(rng), rng.choice((1.0, 1e9))
    devices = rng.choice((1, 2, 2, 2, 3, 3))
    segments = rng.choice((1, 1, 1, 2))
    speeds = [flop / second * rng.choice((1, 1, 2, 0.5, 3.7)) for _ in range(devices)]
    remembers = rng.random() < 0.3
    triples: list[dict[str, Any]] = []
    known: list[str] = []
    for number in range(rng.choice((1, 2, 3, 4, 4, 5, 5, 6))):
        have = sorted(set(known)) if rng.random() < 0.9 else [f"p{n}" for n in range(6)]
        pre = rng.sample(have, min(len(have), rng.choice((0, 1, 1, 1, 2))))
        post = [f"p{n}" for n in rng.sample(range(6), rng.choice((1, 1, 1, 2)))]
        known += post
        segment = rng.randrange(segments)
        triple = {"instruction": f"i{number}", "pre": pre, "post": post, "segment": segment}
        if rng.random() < 0.6:
            triple |= {
                "kind": "compute",
                "fixed_flops": amount(rng, flop, zero=0.5),
                "shared_flops": amount(rng, flop, zero=0.2),
            }
        else:
            triple |= {
                "kind": "comm",
                "fixed_seconds": amount(rng, second / 4, zero=0.3),
                "shared_seconds": amount(rng, second, zero=0.3),
            }
        if remembers and rng.random() < 0.8:
            triple |= {"fixed_bytes": amount(rng, 0.3, zero=0.4), "shared_bytes": amount(rng, 1.0)}
        triples.append(triple)
    goal = rng.choice(known) if rng.random() < 0.9 else f"p{rng.randrange(6)}"
    data: Data = {
        "devices": [{"name": f"d{j}", "flops_per_second": speed} for j, speed in enumerate(speeds)],
        "segments": segments,
        "triples": triples,
        "goal": goal,
    }
    if remembers:
        room = 10 ** rng.uniform(-0.7, 0.8)
        data["memory"] = {"device_bytes": [room * rng.choice((1, 1, 0.3)) for _ in speeds]}
    if rng.random() < 0.2:
        program = next(programs(data), None)
        if program is not None:
            data["program"] = program
    return data


def price(data: Data, decision: Decision) -> float:
    """The sum over stages, each with its collective and its slowest device."""
    program, ratios = decision["program"], decision["ratios"]
    triples, devices = data["triples"], data["devices"]
    demand(len(set(program)) == len(program), "a triple that runs twice")
    demand(all(0 <= q < len(triples) for q in program), "no such triple")
    known: set[str] = set()
    for q in program:
        demand(set(triples[q]["pre"]) <= known, f"triple {q} lacks a property")
        known |= set(triples[q]["post"])
    demand(data["goal"] in known, "the goal is missing")
    if data.get("program") is not None:
        demand(program == data["program"], "another program than the one given")
    demand(len(ratios) == data["segments"], "another number of segments")
    for row in ratios:
        demand(len(row) == len(devices), "another number of devices")
        demand(min(row) >= 0, "a ratio below 0")
        demand(abs(sum(row) - 1) <= SUM, f"ratios that add up to {sum(row)!r}")
    demand_memory(data, program, ratios)
    total = 0.0
    for stage in stages_of(data, program):
        busy = [0.0] * len(devices)
        for q in stage:
            triple = triples[q]
            row = ratios[triple["segment"]]
            if triple["kind"] == "comm":
                total += triple["fixed_seconds"] + triple["shared_seconds"] * max(row)
                continue
            for j, device in enumerate(devices):
                flops = triple["fixed_flops"] + triple["shared_flops"] * row[j]
                busy[j] += flops / device["flops_per_second"]
        total += max(busy)
    return total


def demand_memory(data: Data, program: list[int], ratios: list[list[float]]) -> None:
    if data.get("memory") is None:
        return
    for j, room in enumerate(data["memory"]["device_bytes"]):
        held = 0.0
        for q in program:
            triple = data["triples"][q]
            held += triple.get("fixed_bytes") or 0.0
            held += (triple.get("shared_bytes") or 0.0) * ratios[triple["segment"]][j]
        demand(held <= room * (1 + ROOM), f"device {j} holds {held}")


def stages_of(data: Data, program: list[int]) -> list[list[int]]:
    """A stage begins at every collective."""
    stages: list[list[int]] = [[]]
    for q in program:
        if data["triples"][q]["kind"] == "comm":
            stages.append([])
        stages[-1].append(q)
    return stages


def programs(data: Data) -> Iterator[list[int]]:
    """Every sequence of distinct triples that ends with the goal.

    Triples behind the goal only add seconds and bytes. Of sequences with the same stages, up to the
    order of computations within a stage, one comes.
    """
    seen = set()

    def grow(program: list[int], known: frozenset[str]) -> Iterator[list[int]]:
        if data["goal"] in known:
            stages = tuple(frozenset(stage) for stage in stages_of(data, program))
            if stages not in seen:
                seen.add(stages)
                yield program
            return
        for q, triple in enumerate(data["triples"]):
            if q not in program and set(triple["pre"]) <= known:
                yield from grow([*program, q], known | set(triple["post"]))

    yield from grow([], frozenset())


def floor_of(data: Data, program: list[int]) -> float:
    """Seconds that a program takes at least, whatever the ratios.

    The slowest device takes no less than the mean of all devices weighted by their speeds, to which
    shared work adds the same at all ratios. The largest ratio is no less than the mean ratio.
    """
    devices = data["devices"]
    speed = sum(device["flops_per_second"] for device in devices)
    total = 0.0
    for q in program:
        triple = data["triples"][q]
        if triple["kind"] == "comm":
            total += triple["fixed_seconds"] + triple["shared_seconds"] / len(devices)
        else:
            total += (len(devices) * triple["fixed_flops"] + triple["shared_flops"]) / speed
    return total


def best_ratios(data: Data, program: list[int]) -> tuple[float, list[list[float]]] | None:
    """(least seconds, ratios) of a program; None where no ratios fit into memory.

    Columns: the ratios [segment][device], the largest ratio of each segment, and the slowest
    device's seconds of each stage.
    """
    devices, segments, triples = data["devices"], data["segments"], data["triples"]
    wide, stages = len(devices), stages_of(data, program)
    slowest_at = segments * wide + segments
    columns = slowest_at + len(stages)
    even = [[1 / wide] * wide for _ in range(segments)]
    without_memory = {key: value for key, value in data.items() if key != "memory"}
    unit = price(without_memory, {"program": program, "ratios": even}) or 1.0
    cost, constant = [0.0] * columns, 0.0
    rows, right = [], []
    for k in range(segments):
        for j in range(wide):
            row = [0.0] * columns
            row[k * wide + j], row[segments * wide + k] = 1.0, -1.0
            rows.append(row)
            right.append(0.0)
    for s, stage in enumerate(stages):
        cost[slowest_at + s] = 1.0
        for j, device in enumerate(devices):
            row, fixed = [0.0] * columns, 0.0
            row[slowest_at + s] = -1.0
            for q in stage:
                triple = triples[q]
                if triple["kind"] == "compute":
                    speed = device["flops_per_second"] * unit
                    row[triple["segment"] * wide + j] += triple["shared_flops"] / speed
                    fixed += triple["fixed_flops"] / speed
            rows.append(row)
            right.append(-fixed)
        for q in stage:
            triple = triples[q]
            if triple["kind"] == "comm":
                cost[segments * wide + triple["segment"]] += triple["shared_seconds"] / unit
                constant += triple["fixed_seconds"] / unit
    for j, room in enumerate(data["memory"]["device_bytes"] if data.get("memory") else []):
        row, held = [0.0] * columns, 0.0
        for q in program:
            row[triples[q]["segment"] * wide + j] += triples[q].get("shared_bytes") or 0.0
            held += triples[q].get("fixed_bytes") or 0.0
        rows.append(row)
        right.append(room - held)
    sums = [[0.0] * columns for _ in range(segments)]
    for k in range(segments):
        sums[k][k * wide : (k + 1) * wide] = [1.0] * wide
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    found = linprog(cost, rows, right, sums, [1.0] * segments, method="highs", options=tight)
    if found.status == 2:
        return None
    assert found.status == 0, found.message
    ratios = []
    for k in range(segments):
        row = [max(0.0, float(x)) for x in found.x[k * wide : (k + 1) * wide]]
        ratios.append([x / sum(row) for x in row])
    priced = price(without_memory, {"program": program, "ratios": ratios})
    assert abs(priced / unit - (found.fun + constant)) <= 1e-8, "SciPy's ratios have another price"
    return priced, ratios


def optimum(data: Data) -> float | None:
    given = data.get("program")
    candidates = list(programs(data)) if given is None else [given]
    best = None
    for floor, program in sorted((floor_of(data, program), program) for program in candidates):
        if best is not None and floor >= best:
            break
        found = best_ratios(data, program)
        if found is not None and (best is None or found[0] < best):
            best = found[0]
    return best


def spoil(data: Data, decision: Decision) -> Decision:
    """Half of the work is done by nobody."""
    first, *others = decision["ratios"]
    return decision | {"ratios": [[ratio / 2 for ratio in first], *others]}


PROBLEM = Problem("hap", draw, price, optimum, spoil)
