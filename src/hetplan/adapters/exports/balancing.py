"""Balanced pipeline layouts: which layers each virtual stage holds, for Megatron-LM and torchtitan.

A model is a chain of units: the embedding, the blocks, all layers of multi-token prediction (MTP)
together, and the loss with the head. The chain is cut into P x V virtual stages for P pipeline
ranks; virtual stage k is on pipeline rank k mod P. A virtual stage may be empty.

`balanced` minimizes the time of the slowest virtual stage. Among the cuts that reach this minimum
it takes one with the least sum of squared stage times. Among these it takes the cut whose earlier
stages hold more units, since whole rounds of P stages then load all ranks alike. The time of a unit
is rounded to a multiple of 1 / 4e7 of the whole chain's time, so that sums of squares are exact.

Megatron Core (`transformer/pipeline_parallel_layer_layout.py`) writes the units as E, t, m and L,
puts `|` between virtual stages, and abbreviates repetitions: `t*3` and `(tt|)*29`. It wants the MTP
layers in one virtual stage, which must be the last one of its rank. torchtitan names modules and
has no MTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np

# The whole chain's seconds as a number of integer parts. No sum of squares of stage times exceeds
# its square, 1.6e15, and integers are exact in 64-bit floats up to 2 ** 53, which is 9e15.
PARTS = 4e7


@dataclass(frozen=True)
class PipelineLayout:
    """A chain of units cut into K = P x V virtual stages, as `balanced` returns it."""

    pipeline: int
    """P, the number of pipeline ranks."""
    units: tuple[str, ...]
    """The units in Megatron's letters."""
    ends: tuple[int, ...]
    """[K] number of the first unit behind each virtual stage."""
    seconds: tuple[float, ...]
    """[K] seconds of each virtual stage, forward and backward."""

    @property
    def stages(self) -> list[tuple[str, ...]]:
        """[K] units of each virtual stage."""
        return [self.units[first:last] for first, last in pairwise((0, *self.ends))]

    def megatron(self) -> str:
        """The value of `--pipeline-model-parallel-layout`."""
        *all_but_last, last = [runs_text(stage) for stage in self.stages]
        text = ""
        for stage, run in groupby(all_but_last):
            count = len(list(run))
            text += f"({stage}|)*{count}" if count > 1 else f"{stage}|"
        return text + last

    def torchtitan(self) -> list[list[str]]:
        """The value of `module_fqns_per_model_part` (0.3.0): [K] modules of each virtual
        stage, without MTP."""
        parts, block = [], 0
        for stage in self.stages:
            modules = []
            for unit in stage:
                if unit == "E":
                    modules.append("tok_embeddings")
                elif unit == "t":
                    modules.append(f"layers.{block}")
                    block += 1
                elif unit == "L":
                    modules += ["norm", "lm_head"]
            parts.append(modules)
        return parts


def runs_text(units: Sequence[str]) -> str:
    """A virtual stage in Megatron's letters, with repetitions of a letter abbreviated: `Et*3`."""
    text = ""
    for letter, run in groupby("".join(units)):
        count = len(list(run))
        text += f"{letter}*{count}" if count > 1 else letter
    return text


def balanced(
    seconds: Sequence[float], pipeline: int, virtual: int = 1, mtp: int = 0
) -> PipelineLayout:
    """The layout of P x V virtual stages with the least time of the slowest virtual stage.

    seconds: forward and backward seconds of the embedding, of each block and of the head, each at
    least 0. pipeline: P. virtual: V. mtp: number of MTP layers. Each MTP layer takes as long as the
    last block. The head computes their logits as well (DeepSeek-V3, Section 2.2); the time of their
    projection is left out.
    """
    embedding, *blocks, head = seconds
    units = ["E", *"t" * len(blocks)]
    unit_seconds = [embedding, *blocks]
    if mtp:
        units.append("m" * mtp)
        unit_seconds.append(mtp * blocks[-1])
    units.append("L")
    unit_seconds.append((1 + mtp) * head)

    # cumulative_seconds[n], cumulative_parts[n]: time of the first n units, in seconds and in
    # integer parts of the chain's time. stage_parts[a, b]: time of a stage of the units a to b - 1,
    # infinite for a > b.
    each = np.array([0.0, *unit_seconds])
    cumulative_seconds = np.cumsum(each)
    cumulative_parts = np.cumsum(np.rint(each * (PARTS / each.sum())))
    ends_before_it_begins = np.tri(len(each), k=-1)
    parts_between = cumulative_parts - cumulative_parts[:, None]
    stage_parts = np.where(ends_before_it_begins, np.inf, parts_between)

    stages = pipeline * virtual
    # The MTP layers belong to the last virtual stage of a rank: no earlier one reaches them.
    without_mtp = pipeline * (virtual - 1) if mtp else 0
    last_block_end = 1 + len(blocks)  # the embedding is one unit
    slowest, _ = least_cut(stage_parts, stages, np.maximum, without_mtp, last_block_end)
    squares = np.where(stage_parts <= slowest, stage_parts**2, np.inf)
    _, ends = least_cut(squares, stages, np.add, without_mtp, last_block_end)
    stage_seconds = [
        float(cumulative_seconds[end] - cumulative_seconds[begin])
        for begin, end in pairwise((0, *ends))
    ]
    return PipelineLayout(
        pipeline=pipeline,
        units=tuple(units),
        ends=ends,
        seconds=tuple(stage_seconds),
    )


def least_cut(
    costs: Any, stages: int, join: Any, early_stages: int, early_end: int
) -> tuple[float, tuple[int, ...]]:
    """The least cost of cutting N units into consecutive stages, and the end of each stage, found
    by dynamic programming over the stages.

    A stage with end e holds units up to e - 1. costs [N + 1, N + 1]: the cost of a stage, by its
    first unit and its end. join: `np.maximum` or `np.add`, which joins the costs of stages to the
    cost of a cut. early_stages, early_end: none of the first `early_stages` stages ends after
    `early_end`. Among cuts of equal cost, the result's earlier stages hold more units.
    """
    units = len(costs) - 1
    best = costs[0].copy()  # [N + 1] least cost of the stages so far, by the last one's end
    begins_by_end = []  # for each later stage: [N + 1] its best first unit, by its end
    for stage in range(1, stages):  # `best` is that of the first `stage` stages
        if stage <= early_stages:
            best[early_end + 1 :] = np.inf
        joined = join(best[:, None], costs)
        # Of equal entries the last is wanted, and `argmin` takes the first: search backwards.
        begins_by_end.append(units - joined[::-1].argmin(axis=0))
        best = joined.min(axis=0)
    ends = [units]
    for begins in reversed(begins_by_end):
        ends.append(int(begins[ends[-1]]))
    ends.reverse()
    return float(best[units]), tuple(ends)
