"""Plans of every family replayed on a workload: chains of stages by the sixth problem's evaluator,
SPMD programs by their own; and the replay as a trace.

An SPMD program, written down from a theory's decision and read as a proof again; and replayed: its
stages on the event-driven simulator, and what each device holds.

A plan's program is taken only as what the model's background theory allows: every instruction must
be one of its triples, in an order that proves the goal. Whatever passes can be executed and priced.

Devices compute at the speeds that HAP's problem gives them (`formulations.hap.pose`) and wait for
the slowest at every collective; collectives are rings over the slowest link. Behind the last run
each device updates what it holds.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from hetplan.errors import InputError, UnsupportedError, require
from hetplan.formulations import family
from hetplan.formulations.hap.data import Device, HapDecision
from hetplan.formulations.hap.pose import in_segments, priced, saved_bytes
from hetplan.formulations.hap.spmd.networks import program_of
from hetplan.formulations.hap.spmd.operators import (
    Change,
    Instruction,
    Run,
    Synchronise,
    form_name,
    reading_segment,
)
from hetplan.formulations.hap.spmd.program import SingleProgram
from hetplan.formulations.hap.spmd.rules import (
    Holding,
    Links,
    Theory,
    links_of,
    ring,
    theory_of,
)
from hetplan.formulations.hap.spmd.whole import Decided, Prices, Stage, Timed
from hetplan.plans.plan import Plan
from hetplan.plans.program import SpmdInstruction, SpmdProgram
from hetplan.profiling.models.operators import ELEMENT_BYTES
from hetplan.profiling.workload import Workload
from hetplan.replays.chains import ChainReplayer, Noise, Replay, Settings
from hetplan.replays.degrees import zero_costs
from hetplan.replays.pose import costs_of
from hetplan.replays.sharding import ZeroCosts
from hetplan.replays.simulator.pipeline import Collective, Replica as Pipeline, simulate_stages
from hetplan.replays.simulator.tasks import LABELS, Kind, Timeline
from hetplan.solvers.registry import evaluate
from hetplan.text import grouped

NO_MATCH = "program does not match the model"


def plan_instruction(instruction: Instruction, segment: int) -> SpmdInstruction:
    """An instruction as plan files have it; segment: the one whose ratios it follows."""
    if isinstance(instruction, Run):
        return SpmdInstruction(
            do="Run", tensor=instruction.node, segment=segment,
            before=[form_name(form) for form in instruction.way.inputs],
            after=form_name(instruction.way.output),
        )  # fmt: skip
    if isinstance(instruction, Change):
        return SpmdInstruction(
            do=instruction.how, tensor=instruction.tensor,
            segment=reading_segment(instruction) if instruction.how == "Repartition" else segment,
            before=[form_name(instruction.source)], after=form_name(instruction.target),
        )  # fmt: skip
    form = instruction.after.rpartition("|")[2]
    return SpmdInstruction(
        do="All-Reduce gradient" if instruction.how == "All-Reduce" else instruction.how,
        tensor=instruction.node, segment=segment, before=[form], after=form,
        parameters=list(instruction.parameters),
    )  # fmt: skip


def write_program(theory: Theory, decision: HapDecision) -> SpmdProgram:
    """A decision as plan files have it."""
    return SpmdProgram(
        instructions=[
            plan_instruction(theory.instructions[i], theory.data.triples[i].segment)
            for i in decision.program
        ],
        ratios=decision.ratios,
    )


def read_program(plan: Plan, program: SingleProgram) -> Decided:
    """The plan's program as a decision about `program`, in the theory of as many devices, whatever
    they are. Raises InputError where it is none."""
    listed = plan.program
    assert listed is not None, "plans with the schedule spmd have a program"
    if program.segments == 1 < len(listed.ratios):
        program = in_segments(
            program, {step.tensor: step.segment for step in listed.instructions if step.do == "Run"}
        )
    require(
        program.segments == len(listed.ratios),
        "program.ratios are not for this model",
        where=plan.name,
        got=f"{len(listed.ratios)} segments",
        expected=f"{program.segments}",
    )
    m = len(listed.ratios[0])
    theory = theory_of(
        program,
        [Device(name="any", flops_per_second=1.0)] * m,
        ring(m, 1e9),
        all_dimensions=True,
    )
    return Decided(theory, decision_of(listed, theory, plan.name))


def decision_of(listed: SpmdProgram, theory: Theory, where: str) -> HapDecision:
    """The triples that a plan's instructions stand for. Raises InputError for one that is none, or
    no proof."""
    numbers = grouped(
        (plan_instruction(instruction, theory.data.triples[i].segment).model_dump_json(), i)
        for i, instruction in enumerate(theory.instructions)
    )
    keys = [step.model_dump_json() for step in listed.instructions]
    wrong = next((n for n, key in enumerate(keys) if key not in numbers), None)
    if wrong is not None:
        step = listed.instructions[wrong]
        raise refusal(step, f"program.instructions[{wrong}]", theory, where)
    choices = [numbers[key] for key in keys]
    # several triples are alike where only a synchronisation that follows tells them apart
    chosen = [theory.instructions[i] for choice in choices for i in choice]
    synchronised = {x.before for x in chosen if isinstance(x, Synchronise)}
    taken: list[int] = []
    for choice in choices:
        left = [i for i in choice if i not in taken] or choice
        waiting = [i for i in left if theory.instructions[i].after in synchronised]
        taken.append((waiting or left)[0])
    decision = HapDecision(program=taken, ratios=listed.ratios)
    verdict = evaluate(family("hap"), theory.data, decision)
    if verdict.objective is None:
        raise InputError(f"{NO_MATCH}: {verdict.violations[0]}", where=where)
    return decision


def refusal(step: SpmdInstruction, place: str, theory: Theory, where: str) -> InputError:
    """The error for an instruction that is no triple."""
    if step.tensor not in {node.name for node in theory.program.nodes}:
        what, expected = f"{place} is about an unknown tensor", f"one of {theory.program.name}'s"
        return InputError(f"{NO_MATCH}: {what}", where=where, got=step.tensor, expected=expected)
    return InputError(
        f"{NO_MATCH}: no rule allows {place}",
        where=where,
        got=f"{step.do} {step.tensor} ({', '.join(step.before)}) -> {step.after}",
    )


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
    def of(cls, plan: Plan, workload: Workload, links: Links | None = None) -> "SpmdCosts":
        """links: default rings over the workload's. Raises InputError where the program is not the
        model's, UnsupportedError for a model without one."""
        program = program_of(workload.model, workload.global_batch // plan.replicas[0].steps)
        devices = plan.replicas[0].stages[0].devices[0]
        decided = read_program(plan, program)
        own = on_nodes_of(workload, devices)
        speeds, weights = priced(own, program)
        by_type = {device.name: device.flops_per_second for device in speeds}
        prices = Prices(
            np.array([by_type[workload.cluster.devices[d].type] for d in devices]),
            weights,
            replace(links or links_of(own.cluster), devices=len(devices)),
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
        held = dict(zip(self.devices, self.decided.bytes(holding), strict=True))
        return tuple(held.get(device, 0.0) for device in range(len(self.plan.devices)))


def on_nodes_of(workload: Workload, devices: Sequence[int]) -> Workload:
    """The workload on the nodes of these devices alone."""
    nodes = sorted({workload.cluster.devices[d].node for d in devices})
    return (
        workload
        if len(nodes) == len(workload.cluster.nodes)
        else replace(workload, cluster=workload.cluster.part(nodes))
    )


__all__ = ["Noise", "Replay", "Replayer", "Settings", "replay"]


class Replayer(ChainReplayer):
    """Replays plans of one workload, one after the other; what they have in common is kept."""

    def __init__(self, workload: Workload, settings: Settings | None = None) -> None:
        super().__init__(partial(costs_of, workload), settings)
        self.workload = workload

    def seconds(self, plan: Plan, limit: float = math.inf) -> float:
        """As of any plan; of an SPMD program its seconds."""
        return super().seconds(plan, limit) if plan.program is None else self.replay(plan).seconds

    def robust_seconds(self, plan: Plan, noise: Noise | None = None) -> float:
        """The median of replays whose durations are noisy; of an SPMD program its seconds."""
        of_chains = super().robust_seconds
        return of_chains(plan, noise) if plan.program is None else self.replay(plan).seconds

    def zero(self, plan: Plan) -> ZeroCosts:
        """The plan's costs, with its further degrees."""
        further = None if plan.degrees is None else zero_costs(plan, self.workload)
        return further or super().zero(plan)

    def parts(self, plan: Plan) -> tuple[list[Pipeline], list[Collective]]:
        """What the simulator takes of a plan without a program."""
        check_same(plan, self.workload)
        return super().parts(plan)

    def replay(self, plan: Plan) -> Replay:
        """One iteration of a plan, with its timeline and memory."""
        check_same(plan, self.workload)
        return (
            replay_program(plan, self.workload, self.settings)
            if plan.program is not None
            else super().replay(plan)
        )


def replay(plan: Plan, workload: Workload, settings: Settings | None = None) -> Replay:
    """One iteration of the plan. Raises InputError unless plan and workload belong together,
    UnsupportedError for what is not modelled."""
    return Replayer(workload, settings).replay(plan)


def replay_program(plan: Plan, workload: Workload, settings: Settings) -> Replay:
    """One iteration of an SPMD program; every device is a unit of its own."""
    require(
        settings == Settings(),
        "collectives of SPMD programs stand where the program has them",
        where=plan.name,
        got="other settings than the default",
        expected="the default",
        kind=UnsupportedError,
    )
    costs, usable = SpmdCosts.of(plan, workload), workload.device_bytes()
    return Replay(
        costs.timeline(),
        ((0, 0),) * len(costs.devices),
        tuple((device,) for device in costs.devices),
        costs.peak_bytes(),
        tuple(usable[device.type] for device in workload.cluster.devices),
    )


def check_same(plan: Plan, workload: Workload) -> None:
    """Raise InputError unless the plan was made for such a model, cluster and batch."""
    made, devices = plan.workload, workload.cluster.devices
    for name, of_plan, of_workload in (
        ("model", made.model, workload.model.name),
        ("global_batch", made.global_batch, workload.global_batch),
        ("sequence", made.sequence, workload.sequence),
        ("precision", made.precision, workload.precision),
        ("number of layers", len(made.layers), len(workload.profile.layers)),
        ("devices", [d.type for d in plan.devices], [d.type for d in devices]),
        ("nodes", [d.node for d in plan.devices], [d.node for d in devices]),
    ):
        require(
            of_plan == of_workload,
            f"{name} of the plan is not the workload's",
            where=plan.name,
            got=of_plan,
            expected=repr(of_workload),
        )


COMMUNICATES = (LABELS[Kind.TRANSFER], LABELS[Kind.COLLECTIVE])
MICRO = 1e6  # seconds to microseconds


def trace(replayed: Replay) -> dict[str, Any]:
    """The replay as a trace; 2 row for computing, 2 row + 1 for communicating.

    A row is a stage, or of an SPMD program a device; its collectives stand on the first one's.
    """
    units = [(i, unit if replayed.by_device else j) for unit, (i, j) in enumerate(replayed.owners)]
    rows = []
    for (replica, row), devices in zip(units, replayed.devices, strict=True):
        names = ", ".join(map(str, devices))
        label = f"device {names}" if replayed.by_device else f"stage {row} (devices {names})"
        rows += [
            (replica, 2 * row, f"{label} computes"),
            (replica, 2 * row + 1, f"{label} communicates"),
        ]
    spans = []
    for event in replayed.timeline.events():
        (replica, row), kind = units[event["unit"]], event["kind"]
        name = kind if event["micro_batch"] < 0 else f"{kind} {event['micro_batch']}"
        place = (replica, 2 * row + (kind in COMMUNICATES))
        spans.append((*place, name, kind, event["start"], event["end"]))
    return trace_document(rows, spans)


def trace_document(
    rows: Iterable[tuple[int, int, str]],
    spans: Iterable[tuple[int, int, str, str, float, float]],
) -> dict[str, Any]:
    """The Trace Event Format, which chrome://tracing and Perfetto open.

    rows: (replica, number, label). spans: (replica, row, name, category, start, end) in seconds.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": replica, **name}
        for replica, row, label in rows
        for name in (
            {"name": "process_name", "args": {"name": f"replica {replica}"}},
            {"tid": row, "name": "thread_name", "args": {"name": label}},
        )
    ]
    events += [
        {
            "name": name, "cat": category, "ph": "X", "ts": start * MICRO,
            "dur": (end - start) * MICRO, "pid": replica, "tid": row,
        }
        for replica, row, name, category, start, end in spans
    ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
