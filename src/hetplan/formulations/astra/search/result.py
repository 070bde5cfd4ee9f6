"""The training job that a search plans, and the result of the search: candidates, their ranking and
the Pareto set.

Ranking, Pareto set and the choice under a money limit follow Astra, Section 3.6, eq. 29-33.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from hetplan.errors import require
from hetplan.formulations.astra.data import AstraData
from hetplan.profiling.models.model import Model
from hetplan.profiling.profiles.predict import check_global_batch
from hetplan.replays.arrays import Floats, Ints
from hetplan.text import counted

JOB_TOKENS = 1e9  # tokens of a job for which money is quoted by default
MOST_TOKENS = 1e18  # the most tokens of a job


@dataclass(frozen=True)
class Job:
    """A training job."""

    model: Model
    global_batch: int  # samples of an iteration
    tokens: float = JOB_TOKENS  # tokens of the whole training, to which money refers
    money_limit: float | None = None  # dollars for the training; None: there is no limit

    def __post_init__(self) -> None:
        check_global_batch(self.global_batch)
        require(
            0 < self.tokens <= MOST_TOKENS,
            "tokens of the job",
            where="--tokens",
            got=self.tokens,
            expected=f"more than 0, at most {MOST_TOKENS:g}",
        )
        require(
            self.money_limit is None or 0 <= self.money_limit < math.inf,
            "money limit",
            where="--money-limit",
            got=self.money_limit,
            expected="dollars, at least 0",
        )

    @property
    def tokens_per_iteration(self) -> int:
        """Tokens of one optimizer step."""
        return self.global_batch * self.model.tokens_per_sample

    @property
    def iterations(self) -> float:
        """Optimizer steps of the whole job. Not rounded, so that money is proportional to
        tokens."""
        return self.tokens / self.tokens_per_iteration


# (pipeline, exposed gradient reduction, optimizer) seconds of an iteration
Parts = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One priced strategy."""

    seconds: float  # seconds of an iteration
    # The terms of `seconds`. The pipeline's term is the objective of an `astra` instance. The two
    # other terms belong to the stage on which they take longest together.
    parts: Parts
    tokens_per_second: float
    money: float | None  # dollars for the job's tokens; None where no price is known
    devices: Mapping[str, int]  # device type -> number of GPUs
    strategy: Mapping[str, int | bool | str | None]  # column of the table -> value
    offloaded: float  # share of the optimizer states on the host
    stages: tuple[tuple[str, int], ...]  # (type, layers) of each stage, in pipeline order
    stage_bytes: tuple[float, ...]  # bytes on each device of each stage at its peak
    # mode 2: (type, number of stages, layers on them together) of each segment, in pool order
    segments: tuple[tuple[str, int, int], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The candidate as JSON types."""
        pipeline, reduction, optimizer = self.parts
        return {
            "seconds": self.seconds,
            "pipeline_seconds": pipeline,
            "reduction_seconds": reduction,
            "optimizer_seconds": optimizer,
            "tokens_per_second": self.tokens_per_second,
            "money": self.money,
            "devices": dict(self.devices),
            "strategy": dict(self.strategy),
            "offloaded_share": self.offloaded,
            "segments": [{"type": t, "stages": s, "layers": n} for t, s, n in self.segments],
            "stages": [
                {"type": t, "layers": n, "peak_bytes": b}
                for (t, n), b in zip(self.stages, self.stage_bytes, strict=True)
            ],
        }


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search."""

    mode: str  # mode of the pool
    # number of strategies by step: generated (Table 3's product), after_rules, in_memory, priced
    counts: Mapping[str, int]
    best: Candidate | None  # the fastest candidate within the money limit; None: there is none
    top: tuple[Candidate, ...]  # the first candidates by throughput, then by money
    pareto: tuple[Candidate, ...]  # the Pareto set of throughput and money
    proven: bool  # whether `best` and `pareto` are proven
    proof: str  # text that says what is proven
    reason: str = ""  # text that says why no candidate is best
    # (tokens per second, money) of all priced strategies, for plots; mode 2: of the Pareto set
    points: tuple[tuple[float, float | None], ...] = ()
    instance: AstraData | None = None  # mode 2: the best strategy's segments as an `astra` instance
    left_out: tuple[str, ...] = ()  # texts that say what the mode does not try
    seconds: float = 0.0  # seconds that the search took
    details: Mapping[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON types, without `points` and `instance`."""
        return {
            "mode": self.mode,
            "counts": dict(self.counts),
            "search_seconds": self.seconds,
            "best": None if self.best is None else self.best.as_dict(),
            "top": [candidate.as_dict() for candidate in self.top],
            "pareto": [candidate.as_dict() for candidate in self.pareto],
            "proven": self.proven,
            "proof": self.proof,
            "reason": self.reason,
            "left_out": list(self.left_out),
            "details": dict(self.details),
        }


def summary(candidate: Candidate) -> str:
    """A line of text for a strategy, such as `32 A800-SXM4-80GB: pp 2, tp 8, dp 2, mbs 1 x 128,
    sequence parallel`."""
    s = candidate.strategy
    devices = " + ".join(f"{count} {name}" for name, count in candidate.devices.items())
    parts = [
        f"pp {s['pipeline_model_parallel_size']}",
        f"tp {s['tensor_model_parallel_size']}",
        f"dp {s['data_parallel_size']}",
        f"mbs {s['micro_batch_size']} x {s['num_micro_batches']}",
        *further_degrees(s),
        *optimizer_options(s),
    ]
    if candidate.offloaded > 0:
        parts.append(f"{100 * candidate.offloaded:.0f} % of the optimizer offloaded")
    if candidate.segments:
        parts.append(f"[{segments_text(candidate.stages)}]")
    return f"{devices}: {', '.join(parts)}"


def further_degrees(s: Mapping[str, int | bool | str | None]) -> Iterator[str]:
    """Texts for the strategy's context and expert degrees, shards and virtual stages."""
    if s["context_parallel_size"] != 1:
        yield f"cp {s['context_parallel_size']}"
    if s["cp_comm_type"] == "a2a":
        yield "all-to-all"
    if s["expert_model_parallel_size"] != 1:
        yield f"ep {s['expert_model_parallel_size']}"
    if s["expert_tensor_parallel_size"] != s["tensor_model_parallel_size"]:
        yield f"expert tensor {s['expert_tensor_parallel_size']}"
    if s["use_fsdp"]:
        yield "fully sharded"
    if s["num_distributed_optimizer_instances"] != 1:
        yield f"in {s['num_distributed_optimizer_instances']} groups"
    if s["num_layers_per_virtual_pipeline_stage"] is not None:
        yield f"{s['virtual_pipeline_model_parallel_size']} virtual stages"


def optimizer_options(s: Mapping[str, int | bool | str | None]) -> Iterator[str]:
    """Texts for the strategy's sequence parallelism, sharded optimizer and recomputation."""
    if s["sequence_parallel"]:
        yield "sequence parallel"
    if s["use_distributed_optimizer"]:
        yield "distributed optimizer"
    if s["recompute_granularity"] is not None:
        keys = ("recompute_granularity", "recompute_method", "recompute_num_layers")
        values = [str(s[key]) for key in keys if s[key] is not None]
        yield " ".join(["recompute", *values])


def segments_text(stages: Sequence[tuple[str, int]]) -> str:
    """A text for segments, such as `2 x H100: 12 layers | 1 x A800: 4 layers`.

    stages: (type, layers) of each stage, in pipeline order.
    """
    texts = []
    for name, run in groupby(stages, key=lambda stage: stage[0]):
        layers = [number for _, number in run]
        texts.append(f"{len(layers)} x {name}: {counted(sum(layers), 'layer')}")
    return " | ".join(texts)


# Relative. Values that differ by less differ only by rounding, such as that of a product whose
# factors are multiplied in another order.
ROUNDING = 1e-12


def tied(values: Floats) -> Ints:
    """[n] the rank of each value, ascending. Values that differ only by rounding have equal ranks.

    The last digits of a sum depend on the machine and on the alignment of arrays in memory. A
    stable sort by these ranks gives the same order everywhere.
    """
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    with np.errstate(invalid="ignore"):  # inf - inf
        steps = np.diff(ascending) > ROUNDING * np.abs(ascending[:-1])
    ranks = np.empty(len(values), np.int64)
    # cut off where there are no values: then there is no first rank 0
    ranks[order] = np.concatenate([np.zeros(1, np.int64), np.cumsum(steps)])[: len(values)]
    return ranks


def ranking(throughput: Floats, money: Floats) -> Ints:
    """[n] the numbers of strategies in descending order of throughput, and of equal throughput in
    ascending order of money (eq. 33). Ties keep their order, see `tied`.

    throughput: [n] finite. money: [n] dollars, NaN where no price is known; NaN counts as 0.
    """
    return np.lexsort((tied(np.nan_to_num(money)), tied(-throughput)))


def pareto(throughput: Floats, money: Floats) -> Ints:
    """The numbers of the strategies in the Pareto set, in the order of `ranking`.

    By the paper's eq. 30 a strategy beats another one if it is strictly better in both throughput
    and money. Here it also beats one that is equal in one of them and worse in the other. Of
    strategies that are equal in both, only the first is in the set. A strategy without a price is
    not in the set, as nothing is known of its money; where none has a price, the fastest is.
    """
    order = ranking(throughput, money)
    priced = order[~np.isnan(money[order])]
    if not len(priced):
        return order[:1]
    order, dollars = priced, money[priced]
    least = np.minimum.accumulate(dollars)
    least_before = np.concatenate([[np.inf], least[:-1]])[: len(order)]  # of faster strategies
    return np.asarray(order[dollars < least_before * (1 - ROUNDING)], dtype=np.int64)


def best_under(limit: float | None, throughput: Floats, money: Floats) -> int | None:
    """The number of the first strategy by `ranking` whose money is within `limit`; None where there
    is none.

    limit: dollars; None: there is no limit. A strategy without a price is within no limit.
    """
    order = ranking(throughput, money)
    if limit is not None:
        order = order[money[order] <= limit * (1 + ROUNDING)]
    return int(order[0]) if len(order) else None
