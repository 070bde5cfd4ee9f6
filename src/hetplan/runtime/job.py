"""The options of a training run, and the reports that its ranks give of every step."""

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
    """A training run: the plan, the model, and all options that every rank needs."""

    plan: Plan
    steps: int = 10
    """Number of training steps."""
    factory: str | None = None
    """`module:function` that makes the model from the plan (see `engine.chain`). None: the
    reference model `model`, or a narrow stand-in in a rehearsal."""
    data: str | None = None
    """`module:function` that makes `batch(step, first, last)` from the plan. None: the model's
    method `batch`."""
    pack: tuple[int, ...] = ()
    """[row of the global batch] tokens of the rows into which samples of unequal length are packed
    (see `engine.packing`); the plan is then one of rows (see `plans.packed`). Empty: samples are
    rows."""
    model: str | None = None
    """Name of a model or path of a config.json. None: the plan's model."""
    rehearsal: Rehearsal | None = None
    """The predicted times; None without a prediction."""
    virtual: bool = False
    """True: the run is a rehearsal, in which ranks sleep through the predicted times."""
    probe: bool | None = None
    """Whether to compare the layers of the factory's module with the module before the run (see
    `engine.probe`). None: where the module is not large."""
    backend: Literal["hetplan", "torch"] = "hetplan"
    """The engine: hetplan's, or stock torch's, which executes fewer plans."""
    optimizer: Literal["sgd", "adamw"] = "adamw"
    learning_rate: float = 1e-3
    seed: int = 0
    hang_seconds: float = 10.0
    """Seconds without progress after which a rank counts as hung; a rank whose passes take longer
    may take longer, too."""
    checkpoint: str | None = None
    """Folder of the checkpoints, which are written after `every` steps and at the end."""
    every: int | None = None
    """Steps between two checkpoints; None: only one at the end."""
    resume: bool = False
    """True: go on from the last checkpoint in the folder."""
    save: str | None = None
    """Folder in which the trained model of a factory is written at the end, each parameter under
    its name in the factory's module."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """With "cuda", local rank r gets the GPU r modulo the machine's number of GPUs."""
    shared_gpus: int = 0
    """The machine's number of GPUs where it has more local ranks than GPUs; else 0."""


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
    """Raise InputError for an option out of range, and for one that needs a folder of checkpoints
    where there is none."""
    for name, value, expected in (
        ("--steps", steps, "1 step or more"),
        ("--every", every, "1 step or more"),
        ("--time-scale", time_scale, "a positive number"),
        ("--learning-rate", learning_rate, "a positive number"),
        ("--hang-after", hang_after, "a positive number"),
    ):
        require(value is None or 0 < value < inf, name, got=value, expected=expected)
    for name, is_given in (("--resume", resume), ("--every", every is not None)):
        require(not is_given or checkpoint is not None, f"{name} needs --checkpoint with a folder")


@dataclass(frozen=True)
class StepReport:
    """The report of one rank about one step."""

    step: int
    loss: float
    begin: float
    """Seconds on the monotonic clock."""
    end: float
    """Seconds on the monotonic clock."""
    forward: float
    """Seconds of all forward passes of the step."""
    backward: float
    """Seconds of all backward passes of the step."""
    waits: float
    """Seconds for which the rank waited for other ranks."""
    peak_bytes: int
    """Most bytes used at once so far: by the whole process on a CPU, libraries included; by torch's
    tensors on a GPU."""
    events: list[Event] = field(default_factory=list)
    """The events of the step, for a trace; empty but in the report of the last step."""


Report = Callable[[StepReport], None]
"""Receives each report of a rank as soon as its step is done."""


@dataclass(frozen=True)
class NodeLoss:
    """The loss of a node in an elastic run, and how the run went on."""

    error: str
    """The error with which the run on the node ended."""
    node: int
    """Number of the node in the cluster."""
    step: int
    """The step from which the run went on."""
    plan: str
    """Name of the plan under which the run went on."""
    seconds: float
    """Seconds from the error until the run could go on."""
