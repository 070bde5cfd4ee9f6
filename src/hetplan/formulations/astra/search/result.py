"""What a search returns: counted, timed, ranked, with the proof's extent in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetplan.formulations.astra.data import AstraData

Segment = tuple[str, int, int]
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
    segments: tuple[Segment, ...] = ()

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
class Found:
    """The end of a search.

    counts: strategies generated (Table 3's product), after_rules, in_memory, priced. timings:
    seconds per phase.
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
    timings: Mapping[str, float]
    best: Candidate | None
    top: tuple[Candidate, ...]
    pareto: tuple[Candidate, ...]
    proven: bool
    proof: str
    reason: str = ""
    points: tuple[tuple[float, float | None], ...] = ()
    instance: AstraData | None = None
    left_out: tuple[str, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON types, without the points of the plot."""
        return {
            "mode": self.mode,
            "counts": dict(self.counts),
            "timings": dict(self.timings),
            "best": None if self.best is None else self.best.as_dict(),
            "top": [candidate.as_dict() for candidate in self.top],
            "pareto": [candidate.as_dict() for candidate in self.pareto],
            "proven": self.proven,
            "proof": self.proof,
            "reason": self.reason,
            "left_out": list(self.left_out),
            "details": dict(self.details),
        }
