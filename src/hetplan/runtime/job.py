"""A training run as it is asked for, and what its ranks report of every step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from hetplan.errors import require
from hetplan.plans.plan import Plan
from hetplan.runtime.events import Event
from hetplan.runtime.launch.rehearsal import Rehearsal


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank needs to know."""

    plan: Plan
    steps: int = 10
    factory: str | None = None
    """`module:function` that makes the model from the plan (see `engine.chain`). None: the
    reference model `model`, or a narrow stand-in in a rehearsal."""
    data: str | None = None
    """`module:function` that makes `batch(step, first, last)` from the plan. None: the model's."""
    model: str | None = None
    """A name or a config.json, default the plan's own."""
    rehearsal: Rehearsal | None = None
    """Predicted times, slept on `virtual` devices."""
    virtual: bool = False
    backend: Literal["hetplan", "torch"] = "hetplan"
    """Whose engine: hetplan's, or stock torch's for the plans that it can say."""
    optimizer: Literal["sgd", "adamw"] = "adamw"
    learning_rate: float = 1e-3
    seed: int = 0
    hang_seconds: float = 10.0
    """Without progress for so long, a rank counts as hung (longer where its passes are)."""
    checkpoint: str | None = None
    """Folder, written `every` so many steps and at the end."""
    every: int | None = None
    resume: bool = False
    """Begin with what the folder holds."""
    save: str | None = None
    """Folder for the trained model of a factory, under its own names; at the end."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cuda gives local rank r GPU r modulo the machine's."""
    shared_gpus: int = 0
    """The machine's GPUs, where there are more local ranks than those."""


def check_options(
    steps: int,
    learning_rate: float,
    hang_after: float,
    checkpoint: object,
    every: int | None,
    *,
    resume: bool,
    time_scale: float | None = None,
) -> None:
    """Raise InputError for options out of range, and for those that mean nothing without a folder
    of checkpoints."""
    for name, value, expected in (
        ("--steps", steps, "1 step or more"),
        ("--every", every, "1 step or more"),
        ("--time-scale", time_scale, "a positive number"),
        ("--learning-rate", learning_rate, "a positive number"),
        ("--hang-after", hang_after, "a positive number"),
    ):
        require(value is None or 0 < value < inf, name, got=value, expected=expected)
    for name, asked in (("--resume", resume), ("--every", every is not None)):
        require(not asked or checkpoint is not None, f"{name} needs --checkpoint with a folder")


@dataclass(frozen=True)
class StepReport:
    """One rank's step. begin, end: seconds of the monotonic clock; forward, backward, waits:
    seconds in them.

    peak_bytes: the most memory that the process has had, libraries included; of a GPU, what torch
    has taken. events: of the last step, for a trace.
    """

    step: int
    loss: float
    begin: float
    end: float
    forward: float
    backward: float
    waits: float
    peak_bytes: int
    events: list[Event] = field(default_factory=list)


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
