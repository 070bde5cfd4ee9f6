"""SPMD programs of plans replayed: their stages on the event-driven simulator, and the bytes that
each device holds.

A plan runs its program one or several times in an iteration. Devices compute at the speeds that the
workload's profile gives them (`programs.speeds`) and wait for the slowest one at every collective.
Collectives are rings over the slowest link. After the last run each device updates the parameters
that it holds.
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
    """Seconds and bytes of a plan's program on m devices of its workload."""

    plan: Plan
    workload: Workload
    decided: Decided  # the program with the plan's choices
    devices: tuple[int, ...]  # [m] the device of each rank, in the order of the program's ratios
    prices: Prices  # speeds of the devices and of their links

    @classmethod
    def of(cls, plan: Plan, workload: Workload, links: Links | None = None) -> "SpmdCosts":
        """The costs of a plan. Raises InputError where the plan's program is not one of the model,
        UnsupportedError for a model without programs.

        links: the seconds of collectives; by default those of rings over the cluster's links.
        """
        program = program_of(workload.model, workload.global_batch // plan.replicas[0].steps)
        devices = plan.replicas[0].stages[0].devices[0]
        decided = read_program(plan, program)
        used_part = on_nodes_of(workload, devices)
        speeds, weights = speeds_of(used_part, program)
        prices = Prices(
            np.array([speeds[workload.cluster.devices[d].type] for d in devices]),
            weights,
            # the plan may leave devices of these nodes idle
            replace(links or links_of(used_part.cluster), devices=len(devices)),
            ELEMENT_BYTES[workload.precision],
        )
        return cls(plan, workload, decided, tuple(devices), prices)

    def stages(self) -> list[tuple[int, Stage]]:
        """(number of the run, stage) of each stage of an iteration. The last run also reduces the
        gradients."""
        timed = Timed(self.decided, self.prices)
        runs = self.plan.replicas[0].steps
        stages_of_run, stages_of_last_run = timed.run(last=False), timed.run(last=True)
        stages = [(run, stage) for run in range(runs - 1) for stage in stages_of_run]
        stages += [(runs - 1, stage) for stage in stages_of_last_run]
        return stages

    def updates(self) -> list[float]:
        """[m] seconds of the optimizer's step on each device."""
        costs = costs_of(self.workload)
        element_bytes = self.prices.element_bytes
        return [
            costs.update_seconds(device, element_bytes * float(entries))
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
        """[D] predicted bytes as HAP's problem counts them: each device's parameters with their
        gradients and optimizer states, and the tensors that it keeps for the backward pass."""
        states = self.workload.state_bytes_per_param_byte * self.prices.element_bytes
        holding = Holding(states, saved_bytes(self.workload, self.decided.program))
        held = dict(zip(self.devices, self.decided.bytes(holding), strict=True))
        return tuple(held.get(device, 0.0) for device in range(len(self.plan.devices)))


def on_nodes_of(workload: Workload, devices: Sequence[int]) -> Workload:
    """The workload on the part of its cluster with the nodes of the given devices."""
    nodes = sorted({workload.cluster.devices[d].node for d in devices})
    if len(nodes) == len(workload.cluster.nodes):
        return workload  # with the answers that it keeps
    return replace(workload, cluster=workload.cluster.part(nodes))


class ProgramReplayer:
    """Replays plans with SPMD programs of one workload."""

    def __init__(self, workload: Workload, settings: Settings | None = None) -> None:
        self.workload = workload
        self.settings = settings or Settings()

    def seconds(self, plan: Plan, limit: float = math.inf) -> float:
        """Seconds per iteration. `limit` has no effect: a program's replay has no cheap bound."""
        return self.replay(plan).seconds

    def robust_seconds(self, plan: Plan, noise: Noise | None = None) -> float:
        """Seconds per iteration without noise: all devices wait at every collective, so that no
        plan gains from events that happen to end at the same moment."""
        return self.replay(plan).seconds

    def replay(self, plan: Plan) -> Replay:
        """One iteration of a plan; its units are the devices of the program.

        Raises UnsupportedError for other settings than the default.
        """
        require(
            self.settings == Settings(),
            "collectives of SPMD programs stand where the program has them",
            where=plan.name,
            got="other settings than the default",
            expected="the default",
            kind=UnsupportedError,
        )
        costs = SpmdCosts.of(plan, self.workload)
        usable = self.workload.device_bytes()  # by device type
        return Replay(
            timeline=costs.timeline(),
            owners=((0, 0),) * len(costs.devices),
            devices=tuple((device,) for device in costs.devices),
            peak_bytes=costs.peak_bytes(),
            limit_bytes=tuple(usable[device.type] for device in self.workload.cluster.devices),
        )
