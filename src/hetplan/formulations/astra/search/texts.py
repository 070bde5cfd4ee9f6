"""Texts in the result of a search: what is proven, what the mode does not try, and why no strategy
is best."""

from collections.abc import Mapping, Sequence

import numpy as np

from hetplan.formulations.astra.search.space import Space
from hetplan.replays.arrays import Floats


def proof_on_one_type(priced: int) -> str:
    """The text of the proof of a search on one type of device at a time.

    priced: number of strategies.
    """
    return f"all {priced} strategies that pass the rules and fit in memory were priced"


def proof_on_segments(explored: int, strategies: int, alone: int) -> str:
    """The text of the proof of a finished search on segments of several types.

    strategies: their number. explored: number of them that had to be solved. alone: number of
    strategies that were priced on single types.
    """
    solved = f"{explored} of {strategies} strategies had to be solved"
    text = f"{solved}; by their bounds no other is faster or cheaper"
    return f"{text}; all {alone} on one type alone were priced" if alone else text


def no_proof(explored: int, strategies: int) -> str:
    """The text of a search on segments that was stopped."""
    return f"stopped after {explored} of {strategies} strategies: nothing is proven"


def uneven_left_out(space: Space, sizes: Sequence[int], layers: int) -> tuple[str, ...]:
    """The text that says which pipeline degrees a search with equal stages does not try; empty
    where it tries all.

    sizes: numbers of GPUs. layers: number of layers of the model.
    """
    largest = min(max(sizes), layers)
    degrees = [degree for degree in space.pipeline or range(1, layers + 1) if degree <= largest]
    if space.uneven or all(layers % degree == 0 for degree in degrees):
        return ()
    which = f"pipeline degrees that do not divide the {layers} layers"
    return (f"{which}: the heterogeneous mode has them",)


def equal_only_left_out(space: Space, alone: bool) -> tuple[str, ...]:
    """The text that says which options a search on segments does not try, since they need equal
    stages; empty where the space has no such options. alone: whether they were tried on single
    types."""
    needs_equal_stages = {
        "virtual stages": space.interleaving,
        "hybrid recomputation": "hybrid" in space.recompute,
        "block-wise recomputation": "full" in space.recompute and "block" in space.recompute_method,
    }
    named = ", ".join(name for name, tried in needs_equal_stages.items() if tried)
    if not named:
        return ()
    where = "not tried, no type has all these GPUs by itself"
    if alone:
        where = "tried on each type that has all these GPUs by itself"
    return (f"on segments of several types, {named}, which need equal stages: {where}",)


def why_nothing(
    counts: Mapping[str, int],
    money: Floats,
    limit: float | None,
    layers: int,
    left_out: tuple[str, ...],
    finished: bool,
) -> str:
    """The text that says why no strategy is best.

    counts: see `SearchResult`. money: [n] dollars of the priced strategies, NaN where no price is
    known. limit: dollars; None: there is no limit. layers: number of layers of the model. left_out:
    texts. finished: whether the search explored every strategy.
    """
    after_rules, in_memory = counts["after_rules"], counts["in_memory"]
    if counts["generated"] == 0:
        return "; ".join(("there is nothing to try", *left_out))
    if after_rules == 0:
        return "every strategy meets a rule or has degrees that do not divide"
    if in_memory == 0:
        return f"none of {after_rules} strategies fits in memory"
    if len(money) == 0 and finished:
        return f"no segments of {in_memory} strategies hold all {layers} layers in memory"
    if len(money) == 0:
        return "no strategy was explored in time"
    if np.isnan(money).all():
        return f"no price is known to keep within {limit} dollars"
    cheapest = np.nanmin(money)
    return f"no strategy costs {limit} dollars or less: the cheapest costs {cheapest:.6g}"
