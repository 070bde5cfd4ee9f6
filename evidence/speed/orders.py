"""The price of the named schedule: how far 1F1B, interleaved 1F1B, ZB-H1 and ZBV are from the best
order of passes, in the room that the named schedule itself takes.

    python -m evidence.speed orders [--seconds 5] [--most 60] [FILE.md|FILE.json]

For each workload of the study of paradigms, the fastest plan of its rows that has a pipeline, and
of this plan the replica with most stages. 1F1B and ZB-H1 run its stages as they are. Interleaved
1F1B and ZBV run them in two chunks of half the seconds and bytes each, with messages as between the
plan's stages; so all four compare by the same devices and the same work. The order by which a
schedule is measured has the same stages, chunks and kinds of passes, and no stage keeps more bytes
than under the schedule. For 1F1B and interleaved 1F1B it may also split the backward passes. No
stage then keeps more bytes than under the schedule with every backward pass done as its two parts,
one directly after the other: between the two it also keeps the gradients of the products' outputs.

orders.json beside this file has every row of the run that docs/method-joint.md shows: 6 s for each
row while other work shared the two cores, so that fewer orders are proven than on an idle machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from evidence.speed.harness import markdown, save
from evidence.speed.paradigms import workloads
from hetplan.errors import UnsupportedError
from hetplan.formulations.joint.data import JointDecision
from hetplan.formulations.joint.evaluate import plan_of
from hetplan.formulations.joint.schedule.data import NOTHING, Message, Order, PassProblem
from hetplan.formulations.joint.schedule.evaluate import evaluate
from hetplan.formulations.joint.schedule.pose import named_order, pose
from hetplan.formulations.joint.schedule.solve import best_order
from hetplan.planner.variants import useful_modes
from hetplan.replays.chains import ChainReplayer
from hetplan.replays.pose import pose as pose_workload
from hetplan.solvers.run import Options, Run
from hetplan.studies.rows import read_rows

ROWS = Path(__file__).parents[2] / "docs" / "studies" / "paradigms"
MOST_MICROS = 32  # a plan with more micro-batches is measured on so many


class Case(NamedTuple):
    """A named schedule on a pipeline, and the problem whose best order it is measured by."""

    name: str
    problem: PassProblem  # with the kinds of passes of the schedule
    order: Order
    compared: PassProblem  # with those of the best order
    known: Order  # the schedule as an order of `compared`, which takes no longer


def first_micros(problem: PassProblem, count: int) -> PassProblem:
    """The problem with its first micro-batches alone, all of them alike."""

    def cut(table: Any) -> Any:
        return tuple(tuple(row[:1]) * count for row in table)

    names = ("forward", "backward", "weight", "kept", "kept_for_weight", "activations", "gradients")
    tables = {name: cut(getattr(problem, name)) for name in names}
    return replace(problem, **tables, kinds=())


def in_two_chunks(problem: PassProblem, *, v_shaped: bool) -> PassProblem:
    """The pipeline with each stage in two chunks of half the seconds and bytes. v_shaped: whether
    the second chunks go back from the last stage to the first."""
    S, M = problem.stages, problem.micros
    back = tuple(reversed(range(S)))
    place = (*range(S), *(back if v_shaped else range(S)))

    def halves(table: Any) -> Any:
        return tuple(tuple(value / 2 for value in table[s]) for s in place) if table else ()

    forth, home = problem.activations, problem.gradients
    if v_shaped:
        none: tuple[tuple[Message, ...], ...] = ((NOTHING,) * M,)
        activations = (*forth, *none, *reversed(home))
        gradients = (*home, *none, *reversed(forth))
    else:
        # from the last stage to the first: as long as the slowest message between two stages
        longest = max(forth, key=lambda hop: hop[0].lasts)
        around = (tuple(message._replace(ports=()) for message in longest),)
        activations, gradients = (*forth, *around, *forth), (*home, *around, *home)
    return replace(
        problem,
        place=place,
        forward=halves(problem.forward),
        backward=halves(problem.backward),
        weight=halves(problem.weight),
        kept=halves(problem.kept),
        kept_for_weight=halves(problem.kept_for_weight),
        activations=activations,
        gradients=gradients,
    )


def cases(whole: PassProblem, split: PassProblem) -> Iterator[Case]:
    """The named schedules on a pipeline with whole and with split backward passes."""
    order, parted_order = named_order(whole, "1f1b"), named_order(split, "1f1b")
    yield Case("1F1B", whole, order, whole, order)
    yield Case("1F1B, split", whole, order, split, parted_order)
    flat = named_order(split, "zb-h1")
    yield Case("ZB-H1", split, flat, split, flat)
    if whole.micros % whole.stages == 0:
        chunked = in_two_chunks(whole, v_shaped=False)
        parted = in_two_chunks(split, v_shaped=False)
        order = named_order(chunked, "interleaved-1f1b")
        parted_order = named_order(parted, "interleaved-1f1b")
        yield Case("interleaved", chunked, order, chunked, order)
        yield Case("interleaved, split", chunked, order, parted, parted_order)
    if whole.micros >= 2 * whole.stages - 1:
        in_v = in_two_chunks(split, v_shaped=True)
        folded = named_order(in_v, "zbv")
        yield Case("ZBV", in_v, folded, in_v, folded)


def plans() -> Iterator[tuple[str, PassProblem, PassProblem]]:
    """(workload, its pipeline with whole, with split backward passes)."""
    fastest: dict[str, tuple[float, JointDecision]] = {}
    for row in read_rows(ROWS):
        if row["objective"] is None or not row["decision_json"]:
            continue
        decision = JointDecision.model_validate(json.loads(row["decision_json"]))
        staged = max(len(replica.stages) for replica in decision.replicas) > 1
        chunked = len(decision.replicas[0].stages[0].layers) > 1
        known = fastest.get(row["instance"])
        if staged and not chunked and (known is None or row["objective"] < known[0]):
            fastest[row["instance"]] = row["objective"], decision
    for name, workload in workloads():
        if name not in fastest:
            continue
        data = pose_workload(workload, ("none", *useful_modes(workload)))
        replayer = ChainReplayer.of(data)
        try:
            wholes = pose(plan_of(data, fastest[name][1]), replayer, split=False)
            splits = pose(plan_of(data, fastest[name][1]), replayer, split=True)
        except UnsupportedError:
            continue
        at = max(range(len(wholes)), key=lambda i: wholes[i].stages)
        micros = min(MOST_MICROS, wholes[at].micros)
        if wholes[at].stages > 1 and micros > 1:
            yield name, first_micros(wholes[at], micros), first_micros(splits[at], micros)


def measure(name: str, case: Case, seconds: float) -> dict[str, Any]:
    """The row of one named schedule on one pipeline."""
    named = evaluate(replace(case.problem, room=None), case.order)
    roomy = replace(case.compared, room=None)
    compared = replace(roomy, room=evaluate(roomy, case.known).peak_bytes)
    run = Run(Options(time_limit=seconds, threads=2))
    best = best_order(compared, run, [case.known])
    found = best.found.seconds if best.found else None
    return {
        "workload": name,
        "schedule": case.name,
        "stages": case.problem.stages,
        "micros": case.problem.micros,
        "seconds": named.seconds,
        "best": found,
        "bound": best.bound,
        "price": found and named.seconds / found - 1,
        "most": named.seconds / best.bound - 1,
        "proven": best.proven,
    }


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """One line for each schedule."""
    header = ["schedule", "pipelines", "proven", "price, mean", "median", "most", "by the bound"]
    lines = []
    for schedule in dict.fromkeys(row["schedule"] for row in rows):
        of_it = [row for row in rows if row["schedule"] == schedule and row["price"] is not None]
        prices = sorted(row["price"] for row in of_it)
        if not prices:
            continue
        at_most = sum(row["most"] for row in of_it) / len(of_it)
        lines.append(
            [
                schedule,
                len(of_it),
                sum(row["proven"] for row in of_it),
                f"{sum(prices) / len(prices):.1%}",
                f"{prices[len(prices) // 2]:.1%}",
                f"{prices[-1]:.1%}",
                f"{at_most:.1%}",
            ]
        )
    return [markdown("The price of the named schedule", header, lines)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--most", type=int, default=1000)
    parser.add_argument("file", nargs="?")
    options = parser.parse_args()
    rows = []
    for number, (name, whole, split) in enumerate(plans()):
        if number >= options.most:
            break
        for case in cases(whole, split):
            rows.append(measure(name, case, options.seconds))
            print(json.dumps(rows[-1]), flush=True)
    save(options.file, tables(rows), rows)


if __name__ == "__main__":
    main()
