"""Pipelines of plans as problems of the order of passes, and the orders of named schedules.

What the problem leaves out of the replay: the ports of all-reduces within a pass, messages of other
replicas at the same ports, and that collectives between replicas begin together. All of that only
takes longer, so that a bound holds for the replay. A collective counts behind a stage's last pass
(`PassProblem.tails`).

The weight-gradient part of a backward pass is half of what the pass takes without recomputation:
each product of a layer has one product for the gradient of its input and one for that of its
weight. Memory is counted as if all that a forward pass keeps were needed until the weights have
their gradient, which is never too little.
"""

import numpy as np

from hetplan.errors import UnsupportedError, require
from hetplan.formulations.joint.data import JointData, JointDecision
from hetplan.formulations.joint.evaluate import plan_of
from hetplan.formulations.joint.schedule.data import Message, Pass, PassProblem
from hetplan.plans.passes import PassKind
from hetplan.plans.plan import Plan
from hetplan.replays.chains import ChainReplayer, Replay
from hetplan.replays.simulator.pipeline import MESSAGE_WAITS, Collective, Replica, Schedule, order
from hetplan.replays.simulator.tasks import Floats, Traffic

WEIGHT_SHARE = 0.5  # of a backward pass without recomputation


def pose(data: JointData, decision: JointDecision, *, split: bool = True) -> list[PassProblem]:
    """The problem of each replica of a plan. split: whether backward passes are done in two parts.

    Raises UnsupportedError for a plan whose replicas exchange something after every pass.
    """
    plan, replayer = plan_of(data, decision), ChainReplayer.of(data)
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
        weight = weight_seconds(replayer, plan, i) if split else None
        problems.append(problem_of(pipeline, weight=weight, room=rooms[i], tails=tails))
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


def weight_seconds(replayer: ChainReplayer, plan: Plan, number: int) -> Floats:
    """[S, C, B] seconds of the weight-gradient part of a replica's backward passes."""
    replica = plan.replicas[number]
    sizes = tuple(batch.samples for batch in replica.micro_batches)
    costs = replayer.costs("none")
    passes = [costs.stage_seconds(stage, sizes).passes for stage in replica.stages]
    return WEIGHT_SHARE * np.array(passes)[..., 1]


def problem_of(
    pipeline: Replica,
    *,
    weight: Floats | None = None,
    room: tuple[float, ...] | None = None,
    tails: tuple[float, ...] | None = None,
) -> PassProblem:
    """The problem of a pipeline of the simulator.

    weight [S, C, B]: seconds of the weight-gradient part of each backward pass; None: backward
    passes are whole. tails: as `PassProblem.tails`; None: the updates alone.
    """
    S, C, kind = pipeline.stages, pipeline.chunks, pipeline.kind
    seconds = pipeline.pass_seconds + added_by_reduces(pipeline)  # [S, 2, C, M]
    forward, backward = by_virtual(seconds[:, 0]), by_virtual(seconds[:, 1])
    of_weight = None
    if weight is not None:
        of_weight = by_virtual(np.broadcast_to(weight, (S, C, int(kind.max()) + 1))[..., kind])
        of_weight = np.minimum(of_weight, backward)
        backward = backward - of_weight
    shape = (S, C, int(kind.max()) + 1)
    saved = by_virtual(np.broadcast_to(pipeline.saved_bytes, shape)[..., kind])
    messages: list[tuple[tuple[Message, ...], ...]] = [(), ()]
    for side, hops in enumerate(pipeline.hops):
        messages[side] = tuple(tuple(message_of(hop[k]) for k in kind.tolist()) for hop in hops)
    if tails is None:
        tails = tuple(np.broadcast_to(pipeline.optimizer, S).tolist())
    return PassProblem(
        place=tuple(v % S for v in range(S * C)),
        forward=rows(forward),
        backward=rows(backward),
        weight=() if of_weight is None else rows(of_weight),
        kept=rows(saved),
        kept_for_weight=() if of_weight is None else rows(saved),
        room=room,
        activations=messages[0],
        gradients=messages[1],
        tails=tails,
        kinds=tuple(kind.tolist()),
        receiver_waits=pipeline.sends in MESSAGE_WAITS,
    )


def by_virtual(values: Floats) -> Floats:
    """[S C, M] values [S, C, M] by virtual stage: chunk c of stage s is c S + s."""
    return np.asarray(values.swapaxes(0, 1).reshape(-1, values.shape[-1]))


def rows(values: Floats) -> tuple[tuple[float, ...], ...]:
    """An array of two dimensions as tuples."""
    return tuple(tuple(row) for row in values.tolist())


def added_by_reduces(pipeline: Replica) -> Floats:
    """[S, 2, C, M] seconds of the all-reduces of tensor ranks within each pass."""
    shape = (pipeline.stages, 2, pipeline.chunks, pipeline.micro_batches)
    if not pipeline.reduces:
        return np.zeros(shape)
    lasts = [
        [[[t.seconds + t.latency for t in kinds] for kinds in chunks] for chunks in stages]
        for stages in pipeline.reduces
    ]
    return np.array(lasts).swapaxes(0, 1)[..., pipeline.kind]


def message_of(traffic: Traffic) -> Message:
    """A message of the simulator."""
    return Message(traffic.seconds, traffic.latency, traffic.ports)


def named_order(problem: PassProblem, schedule: Schedule) -> list[list[Pass]]:
    """The order of a named schedule of the simulator. Where backward passes are split, the pass of
    weights follows that of inputs."""
    S, split = problem.stages, bool(problem.weight)
    chunks = len(problem.place) // S
    found = []
    for s in range(S):
        passes: list[Pass] = []
        backward, chunk, batch = order(schedule, S, s, problem.micros, chunks)
        for is_back, c, m in zip(backward.tolist(), chunk.tolist(), batch.tolist(), strict=True):
            v = c * S + s
            kinds: tuple[PassKind, ...] = ("F",)
            if is_back:
                kinds = ("B", "W") if split else ("D",)
            passes += [Pass(kind, v, m) for kind in kinds]
        found.append(passes)
    return found
