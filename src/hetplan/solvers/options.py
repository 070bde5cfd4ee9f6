"""Options that every method takes, typed; a native block passes a back end's own options
through."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetplan.errors import InputError

NativeValue = bool | int | float | str
# Native options that would repeat a common one: the common field is the only place for them.
RESERVED: Mapping[str, Mapping[str, str]] = {
    "cp-sat": {
        "max_time_in_seconds": "time_limit",
        "relative_gap_limit": "gap",
        "num_workers": "threads",
        "num_search_workers": "threads",
        "random_seed": "seed",
    },
    "highs": {
        "time_limit": "time_limit",
        "mip_rel_gap": "gap",
        "threads": "threads",
        "random_seed": "seed",
    },
    "pyomo": {},
}


# Back ends start them all, needed or not; more than any machine's cores only take memory and
# minutes.
MOST_THREADS = 512


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a caller may ask of any method.

    time_limit: seconds for one method on one instance, None for none.
    gap: relative gap at which a proof may stop; 1e-6 counts as optimal.
    threads: worker threads of general solvers (1 to 512). seed: of everything random.
    pyomo_solver: the solver name behind the `pyomo` method.
    native: back end ("cp-sat", "highs", "pyomo") -> its own option names and values.
    """

    time_limit: float | None = None
    gap: float = 1e-6
    threads: int = field(default_factory=lambda: min(os.cpu_count() or 1, MOST_THREADS))
    seed: int = 0
    pyomo_solver: str = "highs"
    native: Mapping[str, Mapping[str, NativeValue]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.time_limit is not None and not (
            self.time_limit > 0 and math.isfinite(self.time_limit)
        ):
            raise InputError("time limit", got=self.time_limit, expected="seconds greater than 0")
        if not 0 <= self.gap < 1:
            raise InputError("gap", got=self.gap, expected="a relative gap from 0 to 1")
        if not 1 <= self.threads <= MOST_THREADS:
            raise InputError("threads", got=self.threads, expected=f"1 to {MOST_THREADS}")
        if not 0 <= self.seed < 2**31:
            raise InputError("seed", got=self.seed, expected="0 to 2147483647")
        for backend, entries in self.native.items():
            if backend not in RESERVED:
                raise InputError(
                    "native options of an unknown back end",
                    got=backend,
                    expected=", ".join(RESERVED),
                )
            for name in entries:
                if name in RESERVED[backend]:
                    common = RESERVED[backend][name]
                    raise InputError(
                        f"native option {backend}.{name} repeats the common option {common}"
                    )

    def as_dict(self) -> dict[str, object]:
        """As given, for results and study rows (JSON types only)."""
        return {
            "time_limit": self.time_limit,
            "gap": self.gap,
            "threads": self.threads,
            "seed": self.seed,
            "pyomo_solver": self.pyomo_solver,
            "native": {backend: dict(entries) for backend, entries in self.native.items()},
        }
