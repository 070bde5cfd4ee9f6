"""`poplar` from its prose: whole samples for devices under ZeRO 0 to 3."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

from play.problem import Data, Decision, Problem, amount, compositions, demand, magnitude

TIE = 1e-9  # decisions within this share of the least time are of the least time


def draw(rng: Random) -> Data:
    """At most four devices, micro-batches of four and twelve samples."""
    second = magnitude(rng)
    devices: list[dict[str, Any]] = []
    for number in range(rng.choice((1, 2, 2, 3, 3, 4))):
        if devices and rng.random() < 0.4:
            devices.append(dict(rng.choice(devices)))
            continue
        device: dict[str, Any] = {"name": f"d{number}", "step_seconds": curve(rng, second)}
        if rng.random() < 0.7:
            device["flops_per_second"] = rng.choice((1.0, 2.0, 2.5)) * 1e13
        devices.append(device)
    return {
        "zero_stage": rng.randint(0, 3),
        "global_batch": rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)),
        "comm_seconds": amount(rng, second * rng.choice((0.1, 1, 10)), zero=0.2),
        "devices": devices,
    }


def curve(rng: Random, second: float) -> list[float]:
    """t(1), …, t(mbs): a line, any numbers, all equal, or none."""
    length, way = rng.choice((0, 1, 2, 3, 3, 4, 4)), rng.random()
    start, slope = rng.choice((0.0, 1.0)), rng.choice((1.0, 1.0, 1.5, 3.0))
    if way < 0.4:
        return [second * (start + slope * b) for b in range(1, length + 1)]
    if way < 0.5:
        return [second] * length
    return [amount(rng, second, zero=0.0) for _ in range(length)]


def peak_speed(device: dict[str, Any]) -> float:
    """Samples per second at the best micro-batch; 0 where none fits."""
    return max((b / t for b, t in enumerate(device["step_seconds"], start=1)), default=0.0)


def share_seconds(times: list[float], samples: int, micro_batch: int) -> float:
    """⌊g/b⌋·t(b) + t(g mod b)."""
    full, last = divmod(samples, micro_batch)
    return full * times[micro_batch - 1] + (times[last - 1] if last else 0.0)


def idle_and_seconds(data: Data, decision: Decision) -> tuple[float, float]:
    """(the sum of eq. 4, seconds) of a decision that keeps all rules."""
    devices, batch = data["devices"], data["global_batch"]
    speeds = [peak_speed(device) for device in devices]
    curves = [device["step_seconds"] for device in devices]
    if data["zero_stage"] <= 1:
        demand(set(decision) == {"devices"}, "a decision of ZeRO 2 or 3")
        shares = decision["devices"]
        demand(len(shares) == len(devices), "another number of devices")
        demand(sum(share["samples"] for share in shares) == batch, "another number of samples")
        busy = []
        for share, times in zip(shares, curves, strict=True):
            demand(share["samples"] >= 0, "fewer than 0 samples")
            if share["samples"] == 0:
                busy.append(0.0)
                continue
            demand(1 <= share["micro_batch"] <= len(times), "no such micro-batch")
            busy.append(share_seconds(times, share["samples"], share["micro_batch"]))
        slowest = max(busy)
        idle = sum((slowest - b) * speed for b, speed in zip(busy, speeds, strict=True))
        return idle, slowest + data["comm_seconds"]
    demand(set(decision) == {"steps"}, "a decision of ZeRO 0 or 1")
    idle, total, samples = 0.0, 0.0, 0
    for step in decision["steps"]:
        sizes, count = step["micro_batches"], step["count"]
        demand(count >= 1 and len(sizes) == len(devices), "a step of another shape")
        demand(any(sizes), "a step without samples")
        for size, times in zip(sizes, curves, strict=True):
            demand(0 <= size <= len(times), "no such micro-batch")
        samples += count * sum(sizes)
        lost, seconds = step_figures(curves, speeds, sizes)
        idle += count * lost
        total += count * (seconds + data["comm_seconds"])
    demand(samples == batch, "another number of samples")
    return idle, total


def step_figures(
    curves: list[list[float]], speeds: list[float], sizes: tuple[int, ...]
) -> tuple[float, float]:
    """(idle seconds times speeds, seconds of the slowest device) of a step."""
    busy = [times[b - 1] if b else 0.0 for times, b in zip(curves, sizes, strict=True)]
    slowest = max(busy)
    return sum((slowest - b) * speed for b, speed in zip(busy, speeds, strict=True)), slowest


def price(data: Data, decision: Decision) -> float:
    return idle_and_seconds(data, decision)[1]


def share_decisions(data: Data) -> Iterator[tuple[float, float]]:
    """(idle, seconds) of every decision under ZeRO 0 and 1."""
    devices = data["devices"]
    speeds = [peak_speed(device) for device in devices]
    for shares in compositions(data["global_batch"], len(devices)):
        choices = []
        for share, device in zip(shares, devices, strict=True):
            times = device["step_seconds"]
            sizes = range(1, len(times) + 1)
            all_seconds = {share_seconds(times, share, b) for b in sizes} if share else {0.0}
            choices.append(all_seconds)
        for busy in product(*choices):
            slowest = max(busy)
            idle = sum((slowest - b) * speed for b, speed in zip(busy, speeds, strict=True))
            yield idle, slowest + data["comm_seconds"]


def step_decisions(data: Data) -> list[tuple[float, float]]:
    """(idle, seconds) of every decision under ZeRO 2 and 3 that no other one beats in both.

    Decisions for G samples are a first step of B samples and a decision for G - B samples.
    """
    curves = [device["step_seconds"] for device in data["devices"]]
    speeds = [peak_speed(device) for device in data["devices"]]
    best_steps: dict[int, list[tuple[float, float]]] = {}
    for sizes in product(*(range(len(times) + 1) for times in curves)):
        if any(sizes):
            idle, seconds = step_figures(curves, speeds, sizes)
            best_steps.setdefault(sum(sizes), []).append((idle, seconds + data["comm_seconds"]))
    steps = {samples: unbeaten(pairs) for samples, pairs in best_steps.items()}
    known: list[list[tuple[float, float]]] = [[(0.0, 0.0)]]
    for total in range(1, data["global_batch"] + 1):
        reached = [
            (idle + lost, seconds + more)
            for samples, pairs in steps.items()
            if samples <= total
            for lost, more in pairs
            for idle, seconds in known[total - samples]
        ]
        known.append(unbeaten(reached))
    return known[-1]


def unbeaten(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The pairs that no other pair is below in both figures."""
    kept: list[tuple[float, float]] = []
    for idle, seconds in sorted(pairs, key=lambda pair: (pair[1], pair[0])):
        if not kept or idle < kept[-1][0]:
            kept.append((idle, seconds))
    return kept


def figures(data: Data) -> list[tuple[float, float]]:
    """(idle, seconds) of all decisions that may be the best one."""
    if data["zero_stage"] <= 1:
        return list(share_decisions(data))
    return step_decisions(data)


def optimum(data: Data) -> float | None:
    return min((seconds for _, seconds in figures(data)), default=None)


def tie_complaints(data: Data, result: dict[str, Any], best: float) -> list[str]:
    """What is wrong with the sum of eq. 4, and with the claim that it is the least one."""
    idle = idle_and_seconds(data, result["decision"])[0]
    stated = result["details"].get("under_utilisation")
    speed = sum(peak_speed(device) for device in data["devices"])
    scale = result["objective"] * speed * data["global_batch"]
    found = []
    if stated is not None and abs(stated - idle) > 1e-9 * scale:
        found.append(f"under-utilisation {stated}, the decision's is {idle}")
    if result["details"].get("tie_break") == "proven" and result["status"] == "optimal":
        alike = max(best, result["objective"]) * (1 + TIE / 2)
        least = min(idle for idle, seconds in figures(data) if seconds <= alike)
        if idle > least + 1e-7 * scale:
            found.append(f"under-utilisation {idle} called the least, which is {least}")
    return found


def spoil(data: Data, decision: Decision) -> Decision:
    """One sample more."""
    if "devices" in decision:
        first, *others = decision["devices"]
        return {"devices": [first | {"samples": first["samples"] + 1}, *others]}
    first, *others = decision["steps"]
    return {"steps": [first | {"count": first["count"] + 1}, *others]}


PROBLEM = Problem("poplar", draw, price, optimum, spoil, tie_complaints)
