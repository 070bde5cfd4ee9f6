"""Tiny random instances of problem `lengths` with their oracle by enumeration."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hetplan.formulations.lengths.data import LengthsData, LengthsReplica


def replica(rng: random.Random, name: str) -> LengthsReplica:
    """A replica with or without attention, overhead and pipeline; room for few tokens or many."""
    return LengthsReplica(
        name=name,
        token_seconds=rng.choice([0.0, 1.0, 1.0, 2.0, rng.uniform(0.5, 3.0)]),
        squared_token_seconds=rng.choice([0.0, 0.0, 0.1, rng.uniform(0.0, 0.5)]),
        micro_batch_seconds=rng.choice([0.0, 0.0, 1.0, rng.uniform(0.0, 4.0)]),
        fill_token_seconds=rng.choice([0.0, 0.0, 1.0, rng.uniform(0.0, 3.0)]),
        fill_squared_token_seconds=rng.choice([0.0, 0.0, 0.2]),
        fill_micro_batch_seconds=rng.choice([0.0, 0.0, 1.0, rng.uniform(0.0, 3.0)]),
        tokens=rng.choice([4, 6, 8, 12, 50]),
        micro_batches=rng.randint(1, 3),
    )


def random_instance(seed: int) -> LengthsData:
    """Up to 7 samples and 3 replicas; equal samples and equal replicas are frequent, and about a
    quarter of the instances is infeasible."""
    rng = random.Random(seed)
    lengths = rng.choice([[2, 3], [2, 4], [1, 2, 3, 4, 5, 6, 7], [3, 5, 8]])
    replicas = [replica(rng, "r0")]
    for number in range(1, rng.randint(1, 3)):
        copied = rng.random() < 0.5
        made = rng.choice(replicas) if copied else replica(rng, "new")
        replicas.append(made.model_copy(update={"name": f"r{number}"}))
    return LengthsData(
        samples=[rng.choice(lengths) for _ in range(rng.randint(1, 7))], replicas=replicas
    )


# [replica][micro-batch] (tokens, squared tokens); micro-batches in ascending order
Loads = tuple[tuple[tuple[int, int], ...], ...]


def oracle(data: LengthsData) -> float | None:
    """The least seconds of the slowest replica over all different packings, sample by sample; None
    where there is none. The seconds are written from the prose of the problem once more."""
    packings: set[Loads] = {tuple(((0, 0),) * one.micro_batches for one in data.replicas)}
    for length in data.samples:
        packings = {after for loads in packings for after in with_sample(data, loads, length)}
    return min((slowest(data, loads) for loads in packings), default=None)


def with_sample(data: LengthsData, loads: Loads, length: int) -> Iterator[Loads]:
    """The packings with one more sample."""
    for r, one in enumerate(data.replicas):
        for k, (tokens, squares) in enumerate(loads[r]):
            if tokens + length <= one.tokens:
                joined = (tokens + length, squares + length**2)
                changed = sorted((*loads[r][:k], joined, *loads[r][k + 1 :]))
                yield (*loads[:r], tuple(changed), *loads[r + 1 :])


def slowest(data: LengthsData, loads: Loads) -> float:
    """Seconds of the slowest replica."""
    of_replicas = []
    for one, batches in zip(data.replicas, loads, strict=True):
        times, ways = [0.0], [0.0]
        for tokens, squares in batches:
            if tokens > 0:
                work = one.token_seconds * tokens + one.squared_token_seconds * squares
                times.append(one.micro_batch_seconds + work)
                way = one.fill_token_seconds * tokens
                way += one.fill_squared_token_seconds * squares
                ways.append(one.fill_micro_batch_seconds + way)
        of_replicas.append(sum(times) + max(ways))
    return max(of_replicas)
