"""Find the lumps and fees of a certificate's chains, with the bound's own shortest paths."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from hetplan.formulations.joint.bound.driver import Part
from hetplan.formulations.joint.bound.path import DURATIONS, Ints
from hetplan.formulations.joint.bound.replicas import STANDARD, WARM_UP, Lump, Replicas, TooLong
from hetplan.formulations.joint.certificate.document import Chains, Lump as LumpProof
from hetplan.replays.arrays import Floats
from hetplan.solvers.run import Run

# What is certified is lower by this share than what the paths show in floating point.
MARGIN = 2e-7
# Sums that the paths of a part may compare; `check` compares as many.
EFFORT = 4e7
# Fees of a price that are tried, in times the seconds of a path and replica; the last one asks
# whether there is a path of so cheap devices at all.
FEES = (1.0, 0.3, 3.0, 10.0, 0.0, 1000.0)
# A path is asked for again while it grows by this share.
LEAST_GROWTH = 0.003


class Fails(Exception):
    """Some replicas may be as fast, as far as the inequalities see."""


def certified_chains(part: Part, goal: float, run: Run) -> Chains | None:
    """The proof that no plan of the part takes at most so many seconds; None where it fails."""
    part.effort.limit, part.effort.spent, part.kept = EFFORT, 0, {}
    try:
        lumps = [each for lump in part.lumps for each in refuted(part, goal, lump, run)]
    except (Fails, TooLong):
        return None
    prices = part.prices[0].tolist()
    return Chains(seconds=goal * (1 - MARGIN), prices=prices, lumps=lumps)


def refuted(part: Part, goal: float, lump: Lump, run: Run) -> Iterator[LumpProof]:
    """Proofs of lumps that have all replicas of this one. Raises Fails."""
    run.check()
    if not lump.fewest_samples(1):
        return  # a micro-batch has no more samples than the replica
    wide = lump.high > STANDARD.width * lump.low
    for exact in (False, True) if lump.is_single else (False,) if not wide else ():
        replicas = part.replicas(lump, 1, cut=not exact)
        fees = fees_of(replicas, goal, lump.high, exact=exact)
        if fees is not None:
            yield LumpProof(**lump._asdict(), exact=exact, fees=fees)
            return
    if lump.is_single:
        raise Fails
    for half in lump.halves():
        yield from refuted(part, goal, half, run)


def fees_of(
    replicas: Replicas, goal: float, worth: float, *, exact: bool
) -> list[list[float]] | None:
    """Fees that show that the replicas take longer, for each case of changes between nodes; None
    where none do. worth: price of a replica's devices at most."""
    fees = []
    for changes, limit in all_cases(replicas, goal):
        of_case = [0.0]
        for schedule in ("interleaved-1f1b", "gpipe") if exact else ("interleaved-1f1b",):
            found = fees_of_case(replicas, schedule, changes, limit, worth)
            if found is None:
                return None
            of_case += found
        fees.append(of_case)
    return fees


def all_cases(replicas: Replicas, goal: float) -> Iterator[tuple[int, float]]:
    """(changes between nodes, seconds) as `check` takes them: also where cards leave no time."""
    of, homes = replicas.of, replicas.homes.total
    if homes < 2:
        yield 0, goal
        return
    if of.tied_ends:
        yield homes, goal
    yield homes - 1, goal - max(of.tied_ends / of.card - replicas.tail, 0.0)


def fees_of_case(
    replicas: Replicas, schedule: str, changes: int, limit: float, worth: float
) -> list[float] | None:
    """Fees in seconds, each of which raises what is known of the way, until it exceeds the limit;
    None where they do not."""
    deepest = min(len(replicas.of.data.layers), sum(replicas.homes.home + replicas.homes.other))
    behind = np.arange(deepest + 1)
    after = np.minimum(behind + 1, deepest)
    least = partial(least_way, replicas, schedule, changes, limit, worth, after)
    fees: list[float] = []
    path, value = 0.0, replicas.way
    while path < value * (1 - LEAST_GROWTH) and value <= limit:
        path = value
        for times in FEES:
            fee = times * path / worth
            reached = least(path, fee) - fee * worth
            if reached > value:
                value = reached
                fees.append(fee)
            if value > limit:
                return fees
    return fees if value > limit else None


def least_way(
    replicas: Replicas,
    schedule: str,
    changes: int,
    limit: float,
    worth: float,
    after: Ints,
    path: float,
    fee: float,
) -> float:
    """The least way with a fee for each price, infinite beyond the limit. after: number of stages
    with one more."""
    J = len(replicas.ways)
    behind = np.arange(len(after))
    ahead = WARM_UP[schedule] * behind
    forward = [replicas.counts.behind(1 + passes) for passes in ahead.tolist()]
    caps = np.array([forward, [replicas.counts.but_one] * len(forward)]).T
    weights = np.zeros((1, DURATIONS, J))
    weights[0, [2 * (schedule == "gpipe"), 3]] = 1.0
    every = after[:, None] + np.zeros((1, J), np.int64)
    best: Floats = replicas.path(
        changes, limit, path, weights, caps, every, fee, ceiling=fee * worth, ordered=True
    )
    return float(best[:, changes].min())
