"""Data and decision of problem `joint`, as they stand in files.

Sets    l layers in a chain, n nodes, d devices (numbered node by node), G samples of an iteration.
Data    per device type, tensor degree and micro-batch the seconds of every layer; bytes of weights,
        of what passes between layers, of what tensor ranks join and of what is kept; links and
        memory.
Decide  a plan: replicas, their stages, devices and micro-batches; schedule, ZeRO, recomputation.
Rules   those of a plan file (`plan`), and: tensor degrees are among `tensor_degrees`; a stage's
        devices are of one type, those of a tensor group on one node; at most four chunks; only
        modes of recomputation that the data have; no device holds more than its memory.
Least   the replayed seconds of one iteration (`replay`).
"""

from typing import Annotated, Literal

from pydantic import Field

from hetplan.plans.plan import Recomputation, Replica
from hetplan.replays.data import ReplayData
from hetplan.schema import Count, StrictModel

MOST_CHUNKS = 4  # of a stage

# `data` of an instance: the objective is a replay, which reads these numbers.
JointData = ReplayData


class JointDecision(StrictModel):
    """`decision`: the fields of a plan file that say what runs where."""

    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b"] = "1f1b"
    zero: Annotated[Count, Field(le=3)] = 0
    recomputation: Recomputation = "none"
    replicas: list[Replica] = Field(min_length=1, max_length=4096)
