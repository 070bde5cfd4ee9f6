"""A training run as it is asked for, and what its ranks report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hetplan.errors import InputError
from hetplan.runtime.plan import Plan
from hetplan.runtime.virtual import Rehearsal

Optimizer = Literal["sgd", "adamw"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank needs to know.

    factory: `module:function` that makes the model from the plan (see `execution.chain`); None: the
    reference model `model` (a name or a config.json, default the plan's), or a narrow stand-in in a
    rehearsal. rehearsal: predicted times, slept on `virtual` devices. hang_seconds: without
    progress for so long, a rank counts as hung (longer where its passes are). checkpoint: folder,
    written `every` so many steps and at the end; resume: begin with what the folder holds. device:
    cuda gives local rank r GPU r modulo the machine's; shared_gpus: that number, where there are
    more local ranks.
    """

    plan: Plan
    steps: int = 10
    factory: str | None = None
    model: str | None = None
    rehearsal: Rehearsal | None = None
    virtual: bool = False
    optimizer: Optimizer = "adamw"
    learning_rate: float = 1e-3
    seed: int = 0
    hang_seconds: float = 10.0
    checkpoint: str | None = None
    every: int | None = None
    resume: bool = False
    device: Device = "auto"
    shared_gpus: int = 0


def check_numbers(
    steps: int,
    learning_rate: float,
    hang_after: float,
    every: int | None,
    time_scale: float | None = None,
) -> None:
    """Raise InputError for options out of range."""
    if steps < 1:
        raise InputError("--steps", got=steps, expected="1 step or more")
    if every is not None and every < 1:
        raise InputError("--every", got=every, expected="1 step or more")
    for name, value in (
        ("--time-scale", time_scale),
        ("--learning-rate", learning_rate),
        ("--hang-after", hang_after),
    ):
        if value is not None and not 0 < value < 1e9:
            raise InputError(name, got=value, expected="a positive number")


def check_folder_given(checkpoint: object, every: int | None, *, resume: bool) -> None:
    """Raise InputError for options that mean nothing without a folder of checkpoints."""
    for name, given in (("--resume", resume), ("--every", every is not None)):
        if given and checkpoint is None:
            raise InputError(f"{name} needs --checkpoint with a folder")


@dataclass(frozen=True)
class StepReport:
    """One rank's step. begin, end: seconds of the monotonic clock; forward, backward, waits:
    seconds in them.

    peak_bytes: the most memory that the process has had, libraries included; of a GPU, what torch
    has taken. events: (what, chunk, micro-batch, start, end), where a trace is wanted (the last
    step's).
    """

    step: int
    loss: float
    begin: float
    end: float
    forward: float
    backward: float
    waits: float
    peak_bytes: int
    events: list[tuple[str, int, int, float, float]] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)


Report = Callable[[StepReport], None]


@dataclass(frozen=True)
class Loss:
    """A node lost. error: what the run ended with; step: where it went on, under which plan, how
    many seconds later."""

    error: str
    node: int
    step: int
    plan: str
    seconds: float

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)
