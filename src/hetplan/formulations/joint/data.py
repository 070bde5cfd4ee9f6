"""Data and decision of problem `joint`, as they stand in files.

Sets    l layers in a chain, n nodes, d devices (numbered node by node), G samples of an iteration.
Data    seconds of every layer by device type, tensor degree and micro-batch; bytes of each layer's
        weights, of the activations that it sends on, of those that tensor ranks all-reduce, and of
        those kept for the backward pass; bandwidth and latency of the links, memory of the devices.
Decide  a plan: replicas, their stages, devices and micro-batches; schedule, ZeRO, recomputation.
S.t.    the rules of a plan file (plans/plan.py), and the constraints (2) to (8) of evaluate.py:
        tensor degrees are among `tensor_degrees`; a stage's devices are of one type, those of a
        tensor group on one node; a stage has at most four chunks; the data have the plan's mode of
        recomputation; tensor shares are equal; no device needs more than its memory.
Min     the replayed seconds of one iteration (replays/chains.py).
"""

from typing import Annotated

from pydantic import Field

from hetplan.plans.passes import WholeSchedule
from hetplan.plans.plan import Recomputation, Replica
from hetplan.replays.data import ReplayData
from hetplan.schema import Count, StrictModel

MOST_CHUNKS = 4  # the most chunks of a stage, under an interleaved schedule

# `data` of an instance: the objective is a replay, which reads these numbers.
JointData = ReplayData


class JointDecision(StrictModel):
    """`decision`: the fields of a plan file that say what runs where."""

    schedule: WholeSchedule = "1f1b"
    zero: Annotated[Count, Field(le=3)] = 0
    """ZeRO level."""
    recomputation: Recomputation = "none"
    """Mode of recomputation."""
    replicas: list[Replica] = Field(min_length=1, max_length=4096)
