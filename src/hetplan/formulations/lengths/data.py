"""Data and decision of problem `lengths`: samples of unequal length for one iteration of a plan.

Sets   i samples, r replicas of the model, k micro-batches of a replica.
Data   l_i tokens of a sample.
       a_r seconds per token, b_r seconds per squared token of a sample (attention within it), c_r
       seconds per micro-batch, all on the slowest stage of replica r.
       a'_r, b'_r, c'_r the same sums over all other stages and over the messages between stages;
       0 for replicas of one stage.
       C_r the most tokens of a micro-batch, which its memory allows; K_r the most micro-batches.
A micro-batch with samples I keeps the slowest stage busy for
w_r(I) = c_r + sum_{i in I} (a_r l_i + b_r l_i^2) seconds. It spends the *fill seconds* w'_r(I),
the same sum with a'_r, b'_r and c'_r, on the other stages and on messages. A micro-batch without
samples takes no time. Replica r takes sum_k w_r(I_rk) + max_k w'_r(I_rk) seconds: its slowest stage
computes all micro-batches, and the pipeline is filled and drained once. Where the stages take
proportional times, this is the time of the pipeline as a flow shop, in any order of micro-batches
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
    fill_token_seconds: NonNegative = 0.0
    """a'_r: fill seconds per token, over all other stages and messages."""
    fill_squared_token_seconds: NonNegative = 0.0
    """b'_r: fill seconds per squared token of a sample."""
    fill_micro_batch_seconds: NonNegative = 0.0
    """c'_r: fill seconds of a micro-batch, however many tokens it has."""
    tokens: PositiveCount
    """C_r: the most tokens of a micro-batch."""
    micro_batches: Annotated[int, Field(ge=1, le=100_000)]
    """K_r: the most micro-batches."""


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
