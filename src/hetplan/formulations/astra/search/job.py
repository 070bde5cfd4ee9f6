"""What is to be trained, and for how much; the clock of a search."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from hetplan.errors import InputError
from hetplan.profiling.models import Model
from hetplan.profiling.predict import check_global_batch

JOB_TOKENS = 1e9  # what money is quoted for, unless the job says otherwise
MOST_TOKENS = 1e18


@dataclass(frozen=True)
class Job:
    """What is to be trained. tokens: of the whole training, for money. money_limit: dollars for
    them, None: none."""

    model: Model
    global_batch: int
    tokens: float = JOB_TOKENS
    money_limit: float | None = None

    def __post_init__(self) -> None:
        check_global_batch(self.global_batch)
        if not 0 < self.tokens <= MOST_TOKENS:
            expected = f"more than 0, at most {MOST_TOKENS:g}"
            raise InputError("tokens of the job", got=self.tokens, expected=expected)
        if self.money_limit is not None and not 0 <= self.money_limit < math.inf:
            raise InputError("money limit", got=self.money_limit, expected="dollars, at least 0")

    @property
    def tokens_per_iteration(self) -> int:
        """Tokens of one optimizer step."""
        return self.global_batch * self.model.tokens_per_sample

    @property
    def iterations(self) -> float:
        """Optimizer steps of the whole job (not rounded: money is proportional)."""
        return self.tokens / self.tokens_per_iteration


@dataclass
class Clock:
    """Seconds per phase of a search."""

    phases: dict[str, float] = field(default_factory=dict)
    begun: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        """Credit the time since the last lap to `phase`."""
        now = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self.begun
        self.begun = now
