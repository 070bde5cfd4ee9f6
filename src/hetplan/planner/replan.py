"""A plan after a loss: the best on what is left, preferring what moves less among plans nearly as
fast."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetplan.errors import InputError
from hetplan.planner.candidate import Candidate
from hetplan.planner.candidates import Tell
from hetplan.planner.moves import Moves, moves
from hetplan.planner.parts import lifted
from hetplan.planner.ranking import make_plans
from hetplan.planner.settings import Settings
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Plan
from hetplan.runtime.replay import check_same, replay
from hetplan.solvers.run import Run

WITHIN = 5.0  # percent


@dataclass(frozen=True)
class Choice:
    """A candidate for the whole cluster, idle on what is lost, and what moves for it."""

    candidate: Candidate
    moves: Moves

    def document(self, workload: Workload) -> Mapping[str, Any]:
        """As JSON types."""
        return {
            **self.candidate.document(workload),
            "bytes_to_move": self.moves.total,
            "bytes_from_checkpoint": self.moves.from_checkpoint,
            "move_seconds": self.moves.seconds(workload),
            "links": [
                {"from_node": a, "to_node": b, "bytes": size}
                for (a, b), size in self.moves.between_nodes(workload).items()
            ],
        }


@dataclass(frozen=True)
class Replanning:
    """before: seconds per iteration of the old plan, whole. choices: that fit, fastest first.
    chosen: index of the one that moves least among those within `within` percent of the fastest;
    None where nothing fits."""

    workload: Workload
    lost: tuple[int, ...]
    before: float
    choices: tuple[Choice, ...]
    chosen: int | None
    within: float

    @property
    def best(self) -> Choice | None:
        """The one chosen."""
        return None if self.chosen is None else self.choices[self.chosen]

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "lost_nodes": list(self.lost),
            "seconds_before": self.before,
            "within_percent": self.within,
            "candidates": [choice.document(self.workload) for choice in self.choices],
            "winner": self.chosen,
        }


def parse_lost(texts: Sequence[str], workload: Workload) -> tuple[int, ...]:
    """`["node1", "node3"]` as node numbers; raises InputError for others, none or all of the
    cluster."""
    count = len(workload.cluster.nodes)
    found = []
    for text in texts:
        match = re.fullmatch(r"node ?(\d{1,9})", text.strip())
        if match is None or int(match[1]) >= count:
            expected = f"node0 to node{count - 1}"
            raise InputError("no such node", where="--lost", got=text, expected=expected)
        found.append(int(match[1]))
    lost = tuple(sorted(set(found)))
    if not lost:
        raise InputError("no lost node named", where="--lost", expected="node1, say")
    if len(lost) == count:
        raise InputError("nothing is left", where="--lost", got=", ".join(texts))
    return lost


def replan(
    plan: Plan,
    workload: Workload,
    lost: Sequence[int],
    run: Run | None = None,
    *,
    strategies: Sequence[str] | None = None,
    settings: Settings | None = None,
    within: float = WITHIN,
    found_one: Tell | None = None,
) -> Replanning:
    """Plan again without the lost nodes (numbers), and count what moves. plan: what runs now on
    workload's cluster.

    Raises InputError unless plan and workload belong together.
    """
    check_same(plan, workload)
    nodes = [n for n in range(len(workload.cluster.nodes)) if n not in lost]
    rest = replace(workload, cluster=workload.cluster.part(nodes))
    planning = make_plans(rest, strategies, run, settings=settings, found_one=found_one)
    gone = [d for d, device in enumerate(workload.cluster.devices) if device.node in lost]
    choices = []
    for candidate in planning.candidates:
        if candidate.plan is None or not candidate.fits_memory:
            continue
        whole = replace(lifted(candidate, workload, nodes, ""), method=candidate.method)
        assert whole.plan is not None
        choices.append(Choice(whole, moves(plan, whole.plan, workload, gone)))
    chosen = least_moved(choices, within)
    before = replay(plan, workload).seconds
    return Replanning(workload, tuple(lost), before, tuple(choices), chosen, within)


def least_moved(choices: Sequence[Choice], within: float) -> int | None:
    """Index of the choice that moves least (network and checkpoint alike) of those nearly as fast
    as the fastest."""
    timed = [(c.candidate.predicted_seconds, i) for i, c in enumerate(choices)]
    known = [(seconds, i) for seconds, i in timed if seconds is not None]
    if not known:
        return None
    limit = min(known)[0] * (1 + within / 100)
    near = [i for seconds, i in known if seconds <= limit]
    return min(near, key=lambda i: (choices[i].moves.total + choices[i].moves.from_checkpoint, i))
