"""Pipelines of plans as problems of the order of passes, and the orders of named schedules.

What the problem leaves out of the replay: the ports of all-reduces within a pass, messages of other
replicas at the same ports, and that collectives between replicas begin together. All of that only
takes longer, so that a bound holds for the replay. A collective counts behind a stage's last pass
(`PassProblem.tails`).

The seconds of passes of weights, and the bytes kept for them, are those of the replay
(`replays.costs.Costs.weight_seconds`).
"""

import numpy as np
from numpy.typing import ArrayLike

from hetplan.errors import UnsupportedError, require
from hetplan.formulations.joint.schedule.data import Message, Pass, PassProblem
from hetplan.plans.passes import PassKind, WholeSchedule
from hetplan.plans.plan import Plan
from hetplan.replays.chains import ChainReplayer, Replay
from hetplan.replays.simulator.pipeline import (
    MESSAGE_WAITS,
    Collective,
    OrderKey,
    Replica,
    orders_of,
)
from hetplan.replays.simulator.splits import SplitSchedule
from hetplan.replays.simulator.tasks import Floats, Traffic


def pose(plan: Plan, replayer: ChainReplayer, *, split: bool = True) -> list[PassProblem]:
    """The problem of each replica of a plan of stages. split: whether backward passes are done in
    two parts.

    Raises UnsupportedError for a plan whose replicas exchange something after every pass.
    """
    pipelines, collectives = replayer.parts(plan)
    require(
        all(collective.when != "step" for collective in collectives),
        "replicas exchange gradients after every pass",
        where="schedule",
        got=f"ZeRO {plan.zero}",
        expected="0 or 1",
        kind=UnsupportedError,
    )
    rooms = stage_rooms(plan, replayer.replay(plan))
    problems = []
    for i, pipeline in enumerate(pipelines):
        tails = stage_tails(pipeline, i, collectives)
        problems.append(problem_of(pipeline, split=split, room=rooms[i], tails=tails))
    return problems


def stage_rooms(plan: Plan, run: Replay) -> list[tuple[float, ...]]:
    """For each replica [S] the bytes that micro-batches may take on each stage beside what else the
    stage's devices hold."""
    rooms: list[list[float]] = [[] for _ in plan.replicas]
    for unit, (i, _) in enumerate(run.owners):
        kept = float(run.timeline.peak_bytes[unit])
        spare = min(run.limit_bytes[d] - run.peak_bytes[d] for d in run.devices[unit])
        rooms[i].append(kept + spare)
    return [tuple(room) for room in rooms]


def stage_tails(pipeline: Replica, number: int, collectives: list[Collective]) -> tuple[float, ...]:
    """[S] seconds of each stage's collectives and update behind its last pass.

    Collectives in buckets overlap the last backward pass and count as nothing.
    """
    tails = np.array(np.broadcast_to(pipeline.optimizer, pipeline.stages), float)
    for when in ("gradients", "parameters"):
        longest = np.zeros(pipeline.stages)
        for collective in collectives:
            if collective.when != when or collective.buckets > 1:
                continue
            for i, s in collective.members:
                if i == number:
                    longest[s] = max(longest[s], collective.seconds)
        tails += longest
    return tuple(tails.tolist())


def problem_of(
    pipeline: Replica,
    *,
    split: bool = False,
    room: tuple[float, ...] | None = None,
    tails: tuple[float, ...] | None = None,
) -> PassProblem:
    """The problem of a pipeline of the simulator.

    split: whether backward passes are done in two parts. tails: as `PassProblem.tails`; None: the
    updates alone.
    """
    stage, chunk = np.array(pipeline.placed).T  # [V] of each virtual stage
    shape = (pipeline.stages, pipeline.chunks, int(pipeline.kind.max()) + 1)

    def of_virtual(values: ArrayLike) -> Floats:
        """[V, M] the values [S, C, B] of each virtual stage and of each micro-batch's kind."""
        table = np.broadcast_to(np.asarray(values, float), shape)
        return np.asarray(table[stage, chunk][:, pipeline.kind])

    reduces, computed = added_by_reduces(pipeline), pipeline.whole_seconds
    forward = (computed[:, 0] + reduces[:, 0])[stage, chunk]
    backward = (computed[:, 1] + reduces[:, 1])[stage, chunk]
    weight = of_virtual(pipeline.weights)
    inputs = (computed[:, 1] + reduces[:, 2])[stage, chunk] + of_virtual(pipeline.added) - weight
    numbers: dict[int, int] = {}  # port of the simulator -> port of the problem
    messages: list[tuple[tuple[Message, ...], ...]] = [(), ()]
    for side, hops in enumerate(pipeline.hops):
        messages[side] = tuple(
            tuple(message_of(hop[k], numbers) for k in pipeline.kind) for hop in hops
        )
    if tails is None:
        tails = tuple(np.broadcast_to(pipeline.optimizer, pipeline.stages).tolist())
    return PassProblem(
        place=tuple(stage.tolist()),
        forward=rows(forward),
        backward=rows(inputs if split else backward),
        weight=rows(weight) if split else (),
        kept=rows(of_virtual(pipeline.saved_bytes)),
        kept_for_weight=rows(of_virtual(pipeline.held_bytes)) if split else (),
        room=room,
        activations=messages[0],
        gradients=messages[1],
        tails=tails,
        kinds=tuple(pipeline.kind.tolist()),
        receiver_waits=pipeline.sends in MESSAGE_WAITS,
    )


def rows(values: Floats) -> tuple[tuple[float, ...], ...]:
    """An array of two dimensions as tuples."""
    return tuple(tuple(row) for row in values.tolist())


def added_by_reduces(pipeline: Replica) -> Floats:
    """[S, 3, C, M] seconds of the all-reduces of tensor ranks within each forward pass, backward
    pass, and backward pass of inputs."""
    shape = (pipeline.stages, 3, pipeline.chunks, pipeline.micro_batches)
    if not pipeline.reduces:
        return np.zeros(shape)
    _, of_whole = pipeline.reduces
    of_passes = (*pipeline.reduces, pipeline.inputs_reduces or of_whole)
    lasts = [
        [[[t.seconds + t.latency for t in kinds] for kinds in chunks] for chunks in stages]
        for stages in of_passes
    ]
    return np.array(lasts).swapaxes(0, 1)[..., pipeline.kind]


def message_of(traffic: Traffic, numbers: dict[int, int]) -> Message:
    """A message of the simulator. numbers: port of the simulator -> port of the problem, which new
    ports are added to. Ports are numbered as they occur, so that alike pipelines are equal."""
    ports = tuple((numbers.setdefault(port, len(numbers)), share) for port, share in traffic.ports)
    return Message(traffic.seconds, traffic.latency, ports)


def named_order(problem: PassProblem, schedule: WholeSchedule | SplitSchedule) -> list[list[Pass]]:
    """The order of a named schedule of the simulator, with the problem's kinds of passes.

    Where the problem splits backward passes, the pass of weights of a whole one follows that of
    inputs. Where it does not, a whole pass takes the place of that of inputs.
    """
    S, chunks = problem.stages, problem.chunks
    key = OrderKey(schedule, S, problem.micros, len(chunks[0]))
    stand_for: dict[PassKind, tuple[PassKind, ...]]
    stand_for = {"F": ("F",), "B": ("D",), "W": (), "D": ("D",)}
    if problem.weight:
        stand_for = {"F": ("F",), "B": ("B",), "W": ("W",), "D": ("B", "W")}
    found: list[list[Pass]] = []
    for s, passes in enumerate(orders_of(key)):
        found.append([])
        for one in passes:
            virtual = chunks[s][one.chunk]
            found[s] += [Pass(kind, virtual, one.batch) for kind in stand_for[one.kind]]
    return found
