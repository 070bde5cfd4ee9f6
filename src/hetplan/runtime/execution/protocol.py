"""The interface of engines. An engine executes plans of one kind.

Importing an engine loads no torch, since the planner asks engines which plans they refuse and which
devices hold which parameters. The methods that need torch import the code behind them.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

from hetplan.plans.plan import Plan
from hetplan.profiling.models.model import Model
from hetplan.profiling.workload import Workload
from hetplan.runtime.events import Watch
from hetplan.runtime.job import Job
from hetplan.runtime.launch.rehearsal import Rehearsing

Backend = Literal["hetplan", "torch"]
Interval = tuple[float, float]
DeviceIntervals = list[tuple[int, Interval]]
"""(device, interval of a layer's parameters that it holds); all parameters of the layer are the
interval [0, 1)."""


class Part(Protocol):
    """A rank's part of a model. Checkpoints need more of it: see `engine.loop.TrainedPart`."""

    step: int
    """Iterations begun."""

    def train_step(self) -> float:
        """The passes of one iteration; returns the loss of the whole batch, the same on every rank.
        All ranks call this together."""

    def optimizer(self, kind: Callable[..., Any], **options: Any) -> Any:
        """An optimizer of torch over the parameters that this rank updates."""


class Engine(Rehearsing, Protocol):
    """Executes plans of one kind."""

    @property
    def trains_rehearsals(self) -> bool:
        """Whether a rehearsal trains a model; else its losses are not numbers."""

    def check_model(self, plan: Plan, model: Model) -> None:
        """Raise UnsupportedError where the engine has no layers of its own for a described model
        under this plan. Needs no torch."""

    def owners(self, plan: Plan, workload: Workload) -> dict[int, DeviceIntervals]:
        """Layer -> the intervals of its parameters that devices compute with. Devices with copies
        have equal intervals. Needs no torch."""

    def check_job(self, job: Job) -> Any:
        """Check plan and model before a rank starts; raise InputError and UnsupportedError.

        Returns an object that the job's ranks share when they are forked from this process, and
        None where they share nothing.
        """

    def part(self, job: Job, watch: Watch, device: str, shared: Any) -> Part:
        """This rank's part of the job's model. shared: the object that `check_job`
        returned. All ranks call this together."""

    def distribute(self, module: Any, plan: Plan, **options: Any) -> Any:
        """This rank's part of a user's model. All ranks call this together."""
