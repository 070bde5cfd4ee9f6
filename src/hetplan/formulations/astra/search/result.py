"""A training job, and the result of a search for it: counted, timed and ranked, with its proof.

Order, Pareto set and choice under a money limit follow Astra, Section 3.6, eq. 29-33.
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

JOB_TOKENS = 1e9  # what money is quoted for, unless the job says otherwise
MOST_TOKENS = 1e18


@dataclass(frozen=True)
class Job:
    """A training job. tokens: of the whole training, for money. money_limit: dollars for them,
    None: none."""

    model: Model
    global_batch: int
    tokens: float = JOB_TOKENS
    money_limit: float | None = None

    def __post_init__(self) -> None:
        check_global_batch(self.global_batch)
        require(
            0 < self.tokens <= MOST_TOKENS,
            "tokens of the job",
            got=self.tokens,
            expected=f"more than 0, at most {MOST_TOKENS:g}",
        )
        require(
            self.money_limit is None or 0 <= self.money_limit < math.inf,
            "money limit",
            got=self.money_limit,
            expected="dollars, at least 0",
        )

    @property
    def tokens_per_iteration(self) -> int:
        """Tokens of one optimizer step."""
        return self.global_batch * self.model.tokens_per_sample

    @property
    def iterations(self) -> float:
        """Optimizer steps of the whole job (not rounded: money is proportional)."""
        return self.tokens / self.tokens_per_iteration


Parts = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One priced strategy.

    seconds: per iteration. tokens_per_second. money: dollars for the job's tokens, None without a
    price. devices: number of GPUs by type. stages: (type, layers) of each, in pipeline order.
    stage_bytes: what each device of a stage holds at its peak. offloaded: share of the optimizer
    states on the host. segments: mode 2, (type, stages, layers on them together) in pool order.
    parts: seconds of the pipeline (what an `astra` instance prices), of the exposed gradient
    reduction and of the optimizer on the stage where the two take longest; they add up to
    `seconds`.
    """

    seconds: float
    parts: Parts
    tokens_per_second: float
    money: float | None
    devices: Mapping[str, int]
    strategy: Mapping[str, int | bool | str | None]
    offloaded: float
    stages: tuple[tuple[str, int], ...]
    stage_bytes: tuple[float, ...]
    segments: tuple[tuple[str, int, int], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "seconds": self.seconds,
            "pipeline_seconds": self.parts[0],
            "reduction_seconds": self.parts[1],
            "optimizer_seconds": self.parts[2],
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
    """The end of a search.

    counts: strategies generated (Table 3's product), after_rules, in_memory, priced. seconds:
    of the search.
    best: the fastest within the money limit, None when there is none. top: the first by throughput,
    then money.
    pareto: nothing else is at least as fast and as cheap. proof: what is proven, in words; proven:
    whether it is.
    points: (tokens per second, money) of all priced strategies [n] for plots (mode 2: the Pareto
    set). instance: mode 2, the best strategy's segments as an `astra` instance. left_out: what the
    mode does not try.
    """

    mode: str
    counts: Mapping[str, int]
    best: Candidate | None
    top: tuple[Candidate, ...]
    pareto: tuple[Candidate, ...]
    proven: bool
    proof: str
    reason: str = ""
    points: tuple[tuple[float, float | None], ...] = ()
    instance: AstraData | None = None
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0
    details: Mapping[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON types, without the points of the plot."""
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
    """A strategy in a line: `32 A800-SXM4-80GB: pp 2, tp 8, dp 2, mbs 1 x 128, sequence
    parallel`."""
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
    """The strategy's context and expert degrees, shards and virtual stages in words."""
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
    """The strategy's sequence parallelism, sharded optimizer and recomputation in words."""
    if s["sequence_parallel"]:
        yield "sequence parallel"
    if s["use_distributed_optimizer"]:
        yield "distributed optimizer"
    if s["recompute_granularity"] is not None:
        keys = ("recompute_granularity", "recompute_method", "recompute_num_layers")
        yield " ".join(["recompute", *(str(s[key]) for key in keys if s[key] is not None)])


def segments_text(stages: Sequence[tuple[str, int]]) -> str:
    """`2 x H100: 12 layers | 1 x A800: 4 layers`. stages: (type, layers) in pipeline order."""
    texts = []
    for name, run in groupby(stages, key=lambda stage: stage[0]):
        layers = [number for _, number in run]
        texts.append(f"{len(layers)} x {name}: {counted(sum(layers), 'layer')}")
    return " | ".join(texts)


# Money is seconds x GPUs x price: amounts closer than this differ by the order of multiplication
# alone.
ROUNDING = 1e-12


def tied(values: Floats) -> Ints:
    """[n] the rank of each value, ascending; values that differ by rounding alone have one.

    The last digits of a sum depend on the machine, and where its arrays lie on the memory: what is
    sorted by these ranks comes in one order everywhere, ties by place.
    """
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    with np.errstate(invalid="ignore"):  # inf - inf
        steps = np.diff(ascending) > ROUNDING * np.abs(ascending[:-1])
    ranks = np.empty(len(values), np.int64)
    ranks[order] = np.concatenate([np.zeros(1, np.int64), np.cumsum(steps)])[: len(values)]
    return ranks


def ranking(throughput: Floats, money: Floats) -> Ints:
    """Indices by throughput, largest first, then by money, least first (eq. 33); ties keep their
    order (`tied`).

    throughput, money: [n] finite; money NaN where no price is known (then the order is by
    throughput alone).
    """
    return np.lexsort((tied(np.nan_to_num(money)), tied(-throughput)))


def pareto(throughput: Floats, money: Floats) -> Ints:
    """Indices of the pool that nothing beats in both, sorted as `ranking`.

    The paper's eq. 30 asks for strictly better in both; of equals in one the better in the other is
    kept here, and of equals in both the first, so that the set is a curve without doubles.
    """
    order = ranking(throughput, money)
    cheapest = np.minimum.accumulate(np.nan_to_num(money)[order])
    before = np.concatenate([[np.inf], cheapest[:-1]])[: len(order)]
    return np.asarray(order[np.nan_to_num(money)[order] < before * (1 - ROUNDING)], dtype=np.int64)


def best_under(limit: float | None, throughput: Floats, money: Floats) -> int | None:
    """The fastest whose money is within `limit` (None: no limit); None when nothing is. NaN money
    never is."""
    order = ranking(throughput, money)
    if limit is not None:
        order = order[money[order] <= limit * (1 + ROUNDING)]
    return int(order[0]) if len(order) else None
