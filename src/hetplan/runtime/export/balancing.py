"""Balanced pipeline layouts: which layers each virtual stage holds, for Megatron-LM and torchtitan.

Units of a chain: embedding, blocks, all layers of multi-token prediction (MTP) together, loss with
the head. Virtual stage k is on pipeline rank k mod P. The slowest virtual stage is as fast as any
cut of the chain allows; of such cuts the one with the least sum of squares is taken, and of equal
ones that whose earlier stages hold more, since whole rounds of stages load all ranks alike. A stage
may be empty. A unit counts in parts of 1 / 4e7 of the whole, so that sums of squares are exact.
Megatron Core (`transformer/pipeline_parallel_layer_layout.py`) writes E, t, m and L, `|` between
virtual stages, `t*3` and `(tt|)*29`. It wants the MTP layers in one virtual stage, which is a
rank's last. torchtitan names modules, and has no MTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Layout:
    """pipeline: ranks. units: as Megatron writes each. ends [K]: first unit behind each virtual
    stage. seconds [K]: of each."""

    pipeline: int
    units: tuple[str, ...]
    ends: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def stages(self) -> list[tuple[str, ...]]:
        """[K] units of each virtual stage."""
        return [self.units[first:last] for first, last in pairwise((0, *self.ends))]

    def megatron(self) -> str:
        """The value of `--pipeline-model-parallel-layout`."""
        *before, last = map(runs_text, self.stages)
        repeated = [(text, len(list(run))) for text, run in groupby(before)]
        texts = [f"({text}|)*{count}" if count > 1 else f"{text}|" for text, count in repeated]
        return "".join([*texts, last])

    def torchtitan(self) -> list[list[str]]:
        """`module_fqns_per_model_part`: modules of each virtual stage, without MTP."""
        blocks = (f"layers.{i}" for i in range(self.units.count("t")))
        named = {"E": ["tok_embeddings"], "L": ["norm", "output"]}
        modules = [[next(blocks)] if unit == "t" else named.get(unit, []) for unit in self.units]
        return [[*chain(*modules[first:last])] for first, last in pairwise((0, *self.ends))]


def runs_text(units: Sequence[str]) -> str:
    """A virtual stage in Megatron's letters: `Et*3`."""
    runs = ((letter, len(list(run))) for letter, run in groupby("".join(units)))
    return "".join(f"{letter}*{count}" if count > 1 else letter for letter, count in runs)


def balanced(seconds: Sequence[float], pipeline: int, virtual: int = 1, mtp: int = 0) -> Layout:
    """The layout of P x V virtual stages whose slowest is the fastest.

    seconds: of embedding, each block and head, forward and backward, each at least 0. mtp: layers,
    each as slow as the last block; the head computes their logits as well (DeepSeek-V3, Section
    2.2), and their projection is left out.
    """
    embedding, *blocks, head = seconds
    units = ("E", *"t" * len(blocks), *(["m" * mtp] if mtp else []), "L")
    each = np.array(
        [0.0, embedding, *blocks, *([mtp * blocks[-1]] if mtp else []), (1 + mtp) * head]
    )
    reach, parts = np.cumsum(each), np.cumsum(np.rint(each * (4e7 / each.sum())))
    spans = np.where(np.tri(len(reach), k=-1), np.inf, parts - parts[:, None])
    early = (pipeline * (virtual - 1) if mtp else 0, len(blocks) + 1)
    slowest, _ = least(spans, pipeline * virtual, np.maximum, early)
    _, ends = least(np.where(spans <= slowest, spans**2, np.inf), pipeline * virtual, np.add, early)
    return Layout(
        pipeline=pipeline,
        units=units,
        ends=ends,
        seconds=tuple(float(reach[b] - reach[a]) for a, b in pairwise((0, *ends))),
    )


def least(
    costs: Any, stages: int, join: Any, early: tuple[int, int]
) -> tuple[float, tuple[int, ...]]:
    """The least joined cost of cutting units into so many stages, and where each ends.

    costs [N + 1, N + 1]: of a stage from one unit up to another. early: (K, n): none of the first K
    stages ends behind unit n.
    """
    at, came = costs[0].copy(), []
    for k in range(1, stages):
        if k <= early[0]:
            at[early[1] + 1 :] = np.inf
        joined = join(at[:, None], costs)
        came.append(len(at) - 1 - joined[::-1].argmin(axis=0))
        at = joined.min(axis=0)
    ends = [len(at) - 1]
    for begin in reversed(came):
        ends.append(int(begin[ends[-1]]))
    return float(at[-1]), tuple(ends[::-1])
