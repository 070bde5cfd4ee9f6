"""The ladder of bounds: proven claims on all plans and on classes of plans, as a plan file keeps
it."""

from typing import Annotated, Literal

from pydantic import Field

from hetplan.schema import NonNegative, PositiveCount, StrictModel

RungName = Literal["alone", "micro-batches", "passes", "links", "equal", "all", "any-order"]


class Rung(StrictModel):
    """One class of plans with its bound.

    The rungs of a ladder, of which any may be missing:

    alone          all plans, by computing alone
    micro-batches  plans with this number of equal replicas and this micro-batch, by computing alone
    passes         the same plans, with the filling and draining of their pipelines
    links          the same plans, with messages and the joining of gradients, too
    equal          all plans with equal replicas (`alike.has_equal_replicas`)
    all            all plans
    any-order      all plans, and those that split backward passes or have orders of their own

    Plans of all rungs but the last have whole backward passes, under one of GPipe, 1F1B and
    interleaved 1F1B.
    """

    rung: RungName
    bound: NonNegative
    """Seconds that no plan of the class replays below."""
    best: NonNegative | None = None
    """Replayed seconds of the fastest plan of the class that is known; None where none is known."""
    replicas: PositiveCount | None = None
    """Number of equal replicas; None where it may be any."""
    micro_batch: PositiveCount | None = None
    """Most samples of a micro-batch; None where it may have any number."""


Ladder = Annotated[list[Rung], Field(min_length=1, max_length=7)]
