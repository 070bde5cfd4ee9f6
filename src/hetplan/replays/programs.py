"""SPMD programs of plans replayed: their stages on the event-driven simulator, and what each device
holds.

Devices compute at the speeds that the workload's profile gives them (`programs.speeds`) and wait
for the slowest at every collective; collectives are rings over the slowest link. Behind the last
run each device updates what it holds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetplan.errors import UnsupportedError, require
from hetplan.plans.plan import Plan
from hetplan.profiling.models.operators import ELEMENT_BYTES
from hetplan.profiling.workload import Workload
from hetplan.programs.decided import Decided
from hetplan.programs.holding import Holding
from hetplan.programs.links import Links, links_of
from hetplan.programs.networks import program_of
from hetplan.programs.proofs import read_program
from hetplan.programs.speeds import saved_bytes, speeds_of
from hetplan.programs.timed import Prices, Stage, Timed
from hetplan.replays.chains import Noise, Replay, Settings
from hetplan.replays.pose import costs_of
from hetplan.replays.simulator.pipeline import simulate_stages
from hetplan.replays.simulator.tasks import Timeline


@dataclass(frozen=True)
class SpmdCosts:
    """A plan's program on its workload."""

    plan: Plan
    workload: Workload
    decided: Decided
    devices: tuple[int, ...]
    """[rank] the device of each rank, in the order of the program's ratios."""
    prices: Prices

    @classmethod
    def of(cls, plan: Plan, workload: Workload, links: Links | None = None) -> "SpmdCosts":
        """The costs of a plan. links: default rings over the workload's. Raises InputError where
        the program is not the model's, UnsupportedError for a model without one."""
        program = program_of(workload.model, workload.global_batch // plan.replicas[0].steps)
        devices = plan.replicas[0].stages[0].devices[0]
        decided = read_program(plan, program)
        own = on_nodes_of(workload, devices)
        speeds, weights = speeds_of(own, program)
        prices = Prices(
            np.array([speeds[workload.cluster.devices[d].type] for d in devices]),
            weights,
            replace(links or links_of(own.cluster), devices=len(devices)),
            ELEMENT_BYTES[workload.precision],
        )
        return cls(plan, workload, decided, tuple(devices), prices)

    def stages(self) -> list[tuple[int, Stage]]:
        """(run, stage) of an iteration; the last run joins the gradients."""
        timed, runs = Timed(self.decided, self.prices), self.plan.replicas[0].steps
        between, last = timed.run(last=False), timed.run(last=True)
        each = [(run, stage) for run in range(runs - 1) for stage in between]
        return each + [(runs - 1, stage) for stage in last]

    def updates(self) -> list[float]:
        """[m] seconds of the optimizer's step."""
        costs, size = costs_of(self.workload), self.prices.element_bytes
        return [
            costs.update_seconds(device, size * float(entries))
            for device, entries in zip(self.devices, self.decided.entries(), strict=True)
        ]

    def timeline(self) -> Timeline:
        """The events of one iteration; units are the ranks' devices."""
        stages = self.stages()
        return simulate_stages(
            np.array([stage.compute for _, stage in stages]),
            [stage.seconds for _, stage in stages],
            backward=[stage.backward for _, stage in stages],
            runs=[run for run, _ in stages],
            updates=self.updates(),
        )

    def peak_bytes(self) -> tuple[float, ...]:
        """[D] predicted bytes: parameters with gradients and optimizer states as they are held, and
        the tensors kept for the backward pass, as HAP's problem counts them."""
        states = self.workload.state_bytes_per_param_byte * self.prices.element_bytes
        holding = Holding(states, saved_bytes(self.workload, self.decided.program))
        held = dict(zip(self.devices, self.decided.bytes(holding), strict=True))
        return tuple(held.get(device, 0.0) for device in range(len(self.plan.devices)))


def on_nodes_of(workload: Workload, devices: Sequence[int]) -> Workload:
    """The workload on the nodes of these devices alone."""
    nodes = sorted({workload.cluster.devices[d].node for d in devices})
    if len(nodes) == len(workload.cluster.nodes):
        return workload
    return replace(workload, cluster=workload.cluster.part(nodes))


class ProgramReplayer:
    """Replays plans with SPMD programs of one workload."""

    def __init__(self, workload: Workload, settings: Settings | None = None) -> None:
        self.workload, self.settings = workload, settings or Settings()

    def seconds(self, plan: Plan, limit: float = math.inf) -> float:
        """Seconds per iteration, whatever the limit."""
        return self.replay(plan).seconds

    def robust_seconds(self, plan: Plan, noise: Noise | None = None) -> float:
        """Seconds per iteration: a program's collectives leave no moments that only just meet."""
        return self.replay(plan).seconds

    def replay(self, plan: Plan) -> Replay:
        """One iteration; every device is a unit of its own."""
        require(
            self.settings == Settings(),
            "collectives of SPMD programs stand where the program has them",
            where=plan.name,
            got="other settings than the default",
            expected="the default",
            kind=UnsupportedError,
        )
        costs, usable = SpmdCosts.of(plan, self.workload), self.workload.device_bytes()
        return Replay(
            timeline=costs.timeline(),
            owners=((0, 0),) * len(costs.devices),
            devices=tuple((device,) for device in costs.devices),
            peak_bytes=costs.peak_bytes(),
            limit_bytes=tuple(usable[device.type] for device in self.workload.cluster.devices),
        )
