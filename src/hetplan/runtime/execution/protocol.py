"""The interface of engines. An engine executes plans of one kind: plans of stages, or plans with
an SPMD program.

Importing an engine does not load torch, because the planner asks engines which plans they refuse
and which device has which parameters. The methods that need torch import it when they are called.
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
"""[first, last) within [0, 1), in which a layer's parameters follow each other."""
DeviceIntervals = list[tuple[int, Interval]]
"""(device, interval of a layer's parameters on that device)."""


class ModelPart(Protocol):
    """A rank's part of a model. Checkpoints need more methods: see `engine.loop.TrainedPart`."""

    step: int
    """Number of iterations begun."""

    def train_step(self) -> float:
        """Compute the passes of one iteration; returns the loss of the whole batch, which is the
        same on every rank. All ranks call this together."""

    def optimizer(self, kind: Callable[..., Any], **options: Any) -> Any:
        """A torch optimizer over the parameters that this rank updates. kind: the optimizer's
        class; options: its keyword arguments."""


class Engine(Rehearsing, Protocol):
    """Executes plans of one kind."""

    @property
    def trains_rehearsals(self) -> bool:
        """Whether a rehearsal trains a model. If not, the losses of a rehearsal are NaN."""

    def check_model(self, plan: Plan, model: Model) -> None:
        """Raise UnsupportedError where the engine cannot build a described model (`hetplan run`
        without --factory) under this plan. Does not load torch."""

    def owners(self, plan: Plan, workload: Workload) -> dict[int, DeviceIntervals]:
        """Layer -> the intervals of its parameters that each device computes with. Devices with
        copies have the same interval. Does not load torch."""

    def check_job(self, job: Job) -> Any:
        """Check the plan and the model of a job before any rank starts.

        Returns the objects that the job's ranks share when they are forked from this process, or
        None. Raises InputError and UnsupportedError.
        """

    def part(self, job: Job, watch: Watch, device: str, shared: Any) -> ModelPart:
        """This rank's part of the job's model. All ranks call this together. shared: the result of
        `check_job`."""

    def distribute(self, module: Any, plan: Plan, **options: Any) -> Any:
        """This rank's part of a user's own model. All ranks call this together."""
