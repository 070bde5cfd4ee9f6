"""An SPMD program replayed: its stages on the event-driven simulator, and what each device holds.

Devices compute at the speeds that HAP's problem gives them (`formulations.hap.pose`) and wait for
the slowest at every collective; collectives are rings over the slowest link. Behind the last run
each device updates what it holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hetplan.formulations.hap.pose import priced, ring_links, saved_bytes
from hetplan.formulations.hap.spmd.networks import program_of
from hetplan.formulations.hap.spmd.rules import Holding
from hetplan.formulations.hap.spmd.whole import Decided, Prices, Stage, Timed
from hetplan.formulations.joint.plan import Plan
from hetplan.formulations.joint.pose import costs_of
from hetplan.profiling.operators import ELEMENT_BYTES
from hetplan.profiling.simulator.pipeline import simulate_stages
from hetplan.profiling.simulator.tasks import Timeline
from hetplan.profiling.workload import Workload
from hetplan.runtime.spmd_decision import read_program


@dataclass(frozen=True)
class SpmdCosts:
    """A plan's program on its workload. devices: of the program's ranks, in the order of its
    ratios."""

    plan: Plan
    workload: Workload
    decided: Decided
    devices: tuple[int, ...]
    prices: Prices

    @classmethod
    def of(cls, plan: Plan, workload: Workload) -> "SpmdCosts":
        """Raises InputError where the program is not the model's, UnsupportedError for a model
        without one."""
        runs = plan.replicas[0].steps
        program = program_of(workload.model, workload.global_batch // runs)
        devices = plan.replicas[0].stages[0].devices[0]
        decided = read_program(plan, program)
        own = on_nodes_of(workload, devices)
        speeds, weights = priced(own, program)
        by_type = {device.name: device.flops_per_second for device in speeds}
        types = [workload.cluster.devices[d].type for d in devices]
        prices = Prices(
            np.array([by_type[name] for name in types]),
            weights,
            replace(ring_links(own), devices=len(devices)),
            ELEMENT_BYTES[workload.precision],
        )
        return cls(plan, workload, decided, tuple(devices), prices)

    @cached_property
    def stages(self) -> tuple[list[Stage], list[Stage]]:
        """Of a run, and of the last one, which joins the gradients."""
        timed = Timed(self.decided, self.prices)
        return timed.run(last=False), timed.run(last=True)

    def each(self) -> list[tuple[int, Stage]]:
        """(run, stage) of an iteration."""
        between, last = self.stages
        final = self.plan.replicas[0].steps - 1
        return [
            *((run, stage) for run in range(final) for stage in between),
            *((final, stage) for stage in last),
        ]

    def updates(self) -> list[float]:
        """[m] seconds of the optimizer's step."""
        costs, size = costs_of(self.workload), self.prices.element_bytes
        return [
            costs.update_seconds(d, size * float(entries))
            for d, entries in zip(self.devices, self.decided.entries(), strict=True)
        ]

    def timeline(self) -> Timeline:
        """Of one iteration; units are the ranks' devices."""
        each = self.each()
        return simulate_stages(
            np.array([stage.compute for _, stage in each]),
            [stage.seconds for _, stage in each],
            backward=[stage.backward for _, stage in each],
            runs=[run for run, _ in each],
            updates=self.updates(),
        )

    def peak_bytes(self) -> tuple[float, ...]:
        """[D] predicted: parameters with gradients and optimizer states as they are held, and the
        tensors kept for the backward pass, as HAP's problem counts them."""
        states = self.workload.state_bytes_per_param_byte * self.prices.element_bytes
        holding = Holding((), states, saved_bytes(self.workload, self.decided.theory.program))
        peak = [0.0] * len(self.plan.devices)
        for device, held in zip(self.devices, self.decided.bytes(holding), strict=True):
            peak[device] = held
        return tuple(peak)


def on_nodes_of(workload: Workload, devices: Sequence[int]) -> Workload:
    """The workload on the nodes of these devices alone."""
    nodes = sorted({workload.cluster.devices[d].node for d in devices})
    if len(nodes) == len(workload.cluster.nodes):
        return workload
    return replace(workload, cluster=workload.cluster.part(nodes))
