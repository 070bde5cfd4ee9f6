"""The order of work of DeepSpeed's pipeline engine, as tasks: 1F1B in which transfers occupy both
ends.

Stage s of S does forward passes at every other slot from s on, and the backward pass of micro-batch
m at slot 2 S - 1 - s + 2 m, so that forward and backward slots of neighbours meet. Before a forward
slot a stage sends the gradient that it made last and takes the next activation; before a backward
slot it takes a gradient and sends its last activation. Sending and taking is a rendezvous in the
stream of the computation: nothing else runs meanwhile.
Source: DeepSpeed, runtime/pipe/schedule.py, TrainSchedule, and the blocking p2p of its pipeline
engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.profiling.simulator.tasks import NO_PORT, Kind, TaskList
from hetplan.profiling.simulator.timeline import Timeline, simulate

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Lane:
    """One pipeline of S stages. forward, backward [S]; transfer [S - 1] seconds of one micro-batch,
    either way.

    cards [S - 1, 2]: the network cards (of the sender of activations, of their receiver) that a
    transfer holds; NO_PORT within a node.
    """

    forward: Floats
    backward: Floats
    transfer: Floats
    cards: Ints


def simulate_lanes(lanes: list[Lane], micro_batches: int, *, rendezvous: bool = True) -> Timeline:
    """All pipelines of one iteration side by side, until the last backward pass; units are stages,
    lane by lane.

    rendezvous: transfers occupy their ends, as in DeepSpeed; else they only hold the cards (full
    overlap).
    """
    tasks = TaskList()
    unit = 0
    for lane in lanes:
        _place(tasks, lane, micro_batches, unit, rendezvous)
        unit += len(lane.forward)
    return simulate(tasks.build(unit))


def _place(tasks: TaskList, lane: Lane, M: int, unit: int, rendezvous: bool) -> None:
    S = len(lane.forward)
    units = unit + np.arange(S)[:, None, None]
    work = tasks.add(
        (S, 2, M),
        kind=np.array([Kind.FORWARD, Kind.BACKWARD])[None, :, None],
        unit=units,
        seconds=np.stack([lane.forward, lane.backward], axis=1)[:, :, None],
        micro_batch=np.arange(M),
    )
    # moves[h, way, m]: between stages h and h + 1; way 0: the activation, 1: the gradient
    moves = np.empty((max(S - 1, 0), 2, M), np.int64)
    if S > 1:
        ends = np.stack([lane.cards, lane.cards[:, ::-1]], axis=1)
        # a card's two directions
        ports = np.where(ends == NO_PORT, NO_PORT, 2 * ends + np.array([0, 1]))
        moves = tasks.add(
            (S - 1, 2, M),
            kind=Kind.TRANSFER,
            unit=units[:-1],
            seconds=lane.transfer[:, None, None],
            ports=ports[:, :, None, :],
            micro_batch=np.arange(M),
        )
    for s in range(S):
        sequence = stage_order(work[s], moves, s, S) if rendezvous else _passes(work[s], s, S)
        tasks.order(sequence[:-1], sequence[1:])
    if S > 1 and not rendezvous:
        tasks.order(work[:-1, 0], moves[:, 0])
        tasks.order(moves[:, 0], work[1:, 0])
        tasks.order(work[1:, 1], moves[:, 1])
        tasks.order(moves[:, 1], work[:-1, 1])


def slots(stage: int, stages: int, micro_batches: int) -> list[tuple[int, int] | None]:
    """What a stage does slot by slot: (0, m) forward, (1, m) backward of micro-batch m, None for
    nothing."""
    timetable: list[tuple[int, int] | None] = [None] * (2 * (micro_batches + stages - 1))
    for m in range(micro_batches):
        timetable[stage + 2 * m] = (0, m)
        timetable[2 * stages - 1 - stage + 2 * m] = (1, m)
    return timetable


def _passes(work: Ints, stage: int, stages: int) -> Ints:
    """Passes of a stage in order."""
    done = [slot for slot in slots(stage, stages, work.shape[1]) if slot is not None]
    return np.array([work[way, m] for way, m in done], np.int64)


def stage_order(work: Ints, moves: Ints, stage: int, stages: int) -> Ints:
    """Passes [2, M] and transfers [S - 1, 2, M] of a stage in the engine's order."""
    sequence: list[int] = []
    before: tuple[int, int] | None = None
    for t, slot in enumerate(slots(stage, stages, work.shape[1])):
        forward_slot = (t - stage) % 2 == 0
        hop = stage - 1 if forward_slot else stage  # to the stage before, or to the one behind
        if 0 <= hop < stages - 1:
            gradient = before if forward_slot else slot
            activation = slot if forward_slot else before
            sequence += [int(moves[hop, 1, gradient[1]])] if gradient is not None else []
            sequence += [int(moves[hop, 0, activation[1]])] if activation is not None else []
        if slot is not None:
            sequence.append(int(work[slot]))
        before = slot
    return np.array(sequence, np.int64)
