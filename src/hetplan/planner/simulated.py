"""What a candidate's plan takes on the simulator: the figure that plans of different strategies
compare by.

A strategy's closed form prices what its paper prices. The replay counts the rest: network cards
that the ranks of a node share, gradients sent back, tied weights, the optimizer's step,
recomputation's working memory.
"""

from __future__ import annotations

from dataclasses import replace

from hetplan.errors import UnsupportedError
from hetplan.planner.candidate import Candidate
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Plan, Prediction
from hetplan.runtime.replay import Replay, replay
from hetplan.text import share_text

MOST_PASSES = 1_000_000  # micro-batches times stages of all replicas


def simulated(candidate: Candidate, workload: Workload) -> Candidate:
    """The candidate with the replay's seconds and memory; one that cannot be replayed keeps its own
    and says so."""
    if candidate.plan is None:
        return candidate
    try:
        check_size(candidate.plan)
        found = replay(candidate.plan, workload)
    except UnsupportedError as error:
        text = f"not replayed, the iteration is that of the closed form: {error}"
        return foretold(replace(candidate, message=joined(candidate.message, text)))
    excess = misfit(candidate, found, workload)
    return foretold(
        replace(
            candidate,
            predicted_seconds=found.seconds,
            closed_form_seconds=candidate.predicted_seconds,
            fits_memory=candidate.fits_memory is True and excess is None,
            peak_bytes=found.peak_bytes,
            replayed=found,
            message=joined(candidate.message, excess or ""),
        )
    )


def check_size(plan: Plan) -> None:
    """Raise UnsupportedError for a plan of so many passes that replaying it takes minutes and
    gigabytes."""
    passes = sum(r.steps * len(r.stages) * len(r.stages[0].layers) for r in plan.replicas)
    if passes > MOST_PASSES:
        raise UnsupportedError(
            "too many micro-batches to replay",
            where=plan.name,
            got=passes,
            expected=f"{MOST_PASSES} passes",
        )


def joined(*texts: str) -> str:
    """Messages behind each other; empty ones are left out."""
    return "; ".join(filter(None, texts))


def misfit(candidate: Candidate, found: Replay, workload: Workload) -> str | None:
    """Why the replayed plan does not fit where its strategy says that it does; None where it fits.

    Devices that the strategy itself lets exceed their limit have been tried with that batch, which
    is more than a prediction.
    """
    if candidate.fits_memory is not True or candidate.peak_bytes is None:
        return None
    over = [
        (held - limit, d)
        for d, (held, limit, own) in enumerate(
            zip(found.peak_bytes, found.limit_bytes, candidate.peak_bytes, strict=True)
        )
        if held > limit >= own
    ]
    if not over:
        return None
    _, device = max(over)
    return (
        f"does not fit when replayed: device {device} ({workload.cluster.devices[device].type}) holds "
        f"{share_text(found.peak_bytes[device], found.limit_bytes[device])}"
    )


def foretold(candidate: Candidate) -> Candidate:
    """The candidate whose plan says what was predicted of it."""
    assert candidate.plan is not None
    prediction = Prediction(
        strategy=candidate.strategy,
        method=candidate.method,
        predicted_seconds=candidate.predicted_seconds,
        closed_form_seconds=candidate.closed_form_seconds,
        objective=candidate.objective,
        bound=candidate.bound,
    )
    return replace(candidate, plan=candidate.plan.model_copy(update={"prediction": prediction}))
