"""Data and decision of problem `lengths`: samples of unequal length for one iteration of a plan.

Sets   i samples, r replicas of the model, k micro-batches of a replica.
Data   l_i tokens of a sample.
       a_r seconds per token, b_r seconds per squared token of a sample (attention within it), c_r
       seconds per micro-batch, all of the slowest stage of replica r.
       f_r how many micro-batch times the other stages add while the pipeline fills and drains; 0
       for replicas of one stage.
       C_r tokens that a micro-batch may have, for its memory; K_r micro-batches at most.
A micro-batch with samples I takes w_r(I) = c_r + sum_{i in I} (a_r l_i + b_r l_i^2) seconds; one
without samples is left out. Replica r takes sum_k w_r(I_rk) + f_r max_k w_r(I_rk) seconds. This is
the time of a flow shop whose stages take proportional times, in any order of micro-batches
(Pinedo, Scheduling, proportionate permutation flow shops).
Decide for every sample its replica and micro-batch. Minimise the seconds of the slowest replica.
Source hetplan. WLB-LLM (OSDI 2025) packs by a like sum of linear and quadratic seconds.
"""

from typing import Annotated

from pydantic import FailFast, Field

from hetplan.schema import Count, Name, NonNegative, PositiveCount, StrictModel

MOST_TOKENS = 10**7  # of a sample: squares and sums of a million of them stay below 2**63


class LengthsReplica(StrictModel):
    """One replica of the model."""

    name: Name
    token_seconds: NonNegative
    """a_r: seconds per token."""
    squared_token_seconds: NonNegative = 0.0
    """b_r: seconds per squared token of a sample."""
    micro_batch_seconds: NonNegative = 0.0
    """c_r: seconds of a micro-batch, however many tokens it has."""
    fill: NonNegative = 0.0
    """f_r: micro-batch times for which the slowest stage waits in an iteration."""
    tokens: PositiveCount
    """C_r: tokens of a micro-batch at most."""
    micro_batches: Annotated[int, Field(ge=1, le=100_000)]
    """K_r: micro-batches at most."""


Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


class LengthsData(StrictModel):
    """An instance's data."""

    samples: Annotated[list[Tokens], FailFast()] = Field(min_length=1, max_length=1_000_000)
    """[samples] l_i: tokens of each."""
    replicas: list[LengthsReplica] = Field(min_length=1, max_length=4096)


class LengthsDecision(StrictModel):
    """The samples of every micro-batch."""

    micro_batches: list[list[list[Count]]]
    """[replica][micro-batch] numbers of samples; a list may be empty."""
