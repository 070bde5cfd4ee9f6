"""`hetplan sensitivity`: how plans fare when the profile is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli import sources
from hetplan.cli.options import (
    JsonOption,
    PlanClusterOption,
    PlanModelOption,
    ProfileOption,
    SeedOption,
    split_list,
)
from hetplan.cli.output import print_json, print_tables
from hetplan.errors import InputError
from hetplan.text import Table, number_text, percent_text, seconds_text

if TYPE_CHECKING:
    from hetplan.profiling.workload import Workload
    from hetplan.runtime.plan import Plan
    from hetplan.runtime.sensitivity import Sensitivity


def sensitivity(
    plans: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN…", help="Plan files, or what `hetplan plan --json` prints: all its plans."
        ),
    ],
    cluster: PlanClusterOption = None,
    model: PlanModelOption = None,
    profile: ProfileOption = None,
    spread: Annotated[
        float,
        typer.Option(
            "--spread", metavar="PERCENT", help="By how much times without a spread are off."
        ),
    ] = 10.0,
    draws: Annotated[int, typer.Option("--draws", metavar="N", help="Random scenarios.")] = 20,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategies",
            metavar="A[,B…]",
            help="Plan anew with these where a whole device type is off.",
        ),
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option(
            "--time-limit", "-t", metavar="SECONDS", help="Planning anew: for each method."
        ),
    ] = 30.0,
    seed: SeedOption = None,
    json: JsonOption = False,
) -> int:
    """Perturb the profile (by its measured spread, or +- 10 %): how time, ranks and the best
    decision change."""
    from hetplan.runtime.sensitivity import sensitivity as analyse

    if not 0 < spread <= 90:
        raise InputError(
            "not usable", where="--spread", got=spread, expected="more than 0, at most 90 percent"
        )
    if not 0 <= draws <= 10_000:
        raise InputError("not usable", where="--draws", got=draws, expected="0 to 10000")
    named = [pair for path in plans for pair in read_plans(path)]
    workload = sources.workload_of(named[0][1], cluster, model, profile)
    found = analyse(
        [plan for _, plan in named], workload, draws=draws, seed=seed or 0, unmeasured=spread / 100
    )
    anew = []
    if strategies is not None:
        anew = replan(found, workload, split_list(strategies), time_limit, spread / 100)
    names = [name for name, _ in named]
    if json:
        print_json(document(found, names, anew))
    else:
        print_tables(tables(found, names, anew, spread))
    return 0


def read_plans(path: Path) -> list[tuple[str, Plan]]:
    """(name, plan) of a plan file, or of every candidate with a plan in a planner's document;
    raises InputError."""
    from hetplan.files import read_json
    from hetplan.runtime.plan import parse_plan

    value = read_json(path)
    if not (isinstance(value, dict) and isinstance(value.get("candidates"), list)):
        return [(path.name, parse_plan(value, where=str(path)))]
    found = []
    for i, candidate in enumerate(value["candidates"]):
        if isinstance(candidate, dict) and candidate.get("plan") is not None:
            name = f"{candidate.get('strategy')}/{candidate.get('method')}"
            found.append(
                (name, parse_plan(candidate["plan"], where=f"{path}: candidates[{i}].plan"))
            )
    if not found:
        raise InputError("no candidate has a plan", where=str(path))
    return found


def replan(
    found: Sensitivity,
    workload: Workload,
    strategies: Sequence[str],
    limit: float,
    unmeasured: float,
) -> list[dict[str, Any]]:
    """The best plan of these strategies where one device type is off as a whole, beside the given
    plans there."""
    from hetplan.planner.ranking import make_plans
    from hetplan.planner.strategy import chosen
    from hetplan.runtime.replay import replay
    from hetplan.runtime.sensitivity import perturbed, scenarios
    from hetplan.solvers.options import Options
    from hetplan.solvers.run import Run

    rows = []
    for outcome, one in zip(
        found.outcomes, scenarios(workload.profile, 0, 0, unmeasured), strict=False
    ):
        held = replace(workload, profile=perturbed(workload.profile, one.factors))
        best = make_plans(held, chosen(strategies), Run(Options(time_limit=limit))).best
        seconds = None if best is None or best.plan is None else replay(best.plan, held).seconds
        given = min(outcome.seconds)
        rows.append(
            {
                "scenario": outcome.scenario,
                "given_seconds": given,
                "new_seconds": seconds,
                "gain": None if seconds is None else given / seconds - 1,
                "strategy": None if best is None else best.strategy,
            }
        )
    return rows


def document(
    found: Sensitivity, names: Sequence[str], anew: list[dict[str, Any]]
) -> dict[str, Any]:
    """As JSON types."""
    return {
        "spread": "measured" if found.measured else "assumed",
        "plans": [
            {
                "name": name,
                "seconds": found.nominal.seconds[i],
                "rank": found.nominal.ranks[i],
                "lowest_seconds": found.lowest(i),
                "highest_seconds": found.highest(i),
                "wins": found.wins(i),
                "regret": found.regret(i),
            }
            for i, name in enumerate(names)
        ],
        "scenarios": [
            {
                "name": o.scenario,
                "seconds": list(o.seconds),
                "ranks": list(o.ranks),
                "winner": o.winner,
            }
            for o in found.outcomes
        ],
        "planned_anew": anew,
    }


def tables(
    found: Sensitivity, names: Sequence[str], anew: list[dict[str, Any]], spread: float
) -> list[Table]:
    """Plans, then the scenarios with another winner, then what planning anew gains."""
    count = len(found.outcomes)
    rows = tuple(
        (
            name,
            str(found.nominal.ranks[i]),
            seconds_text(found.nominal.seconds[i]),
            seconds_text(found.lowest(i)),
            seconds_text(found.highest(i)),
            f"{found.wins(i)} of {count}",
            percent_text(found.regret(i)),
        )
        for i, name in enumerate(names)
    )
    usual = found.nominal.winner
    others = [o.scenario for o in found.outcomes if o.winner != usual]
    told = (
        "the profile's measured spread"
        if found.measured
        else f"+- {number_text(spread)} %, nothing is measured"
    )
    notes = [
        f"layer times off by {told}; regret: the most by which another of these plans is faster"
    ]
    if others:
        notes.append(
            f"another plan is the fastest in {len(others)} of {count}: {', '.join(others[:6])}"
        )
    header = ("plan", "rank", "iteration", "lowest", "highest", "fastest in", "regret")
    result = [
        Table(
            "sensitivity to the profile, predicted",
            header,
            rows,
            tuple(notes),
            right=(1, 2, 3, 4, 5, 6),
        )
    ]
    if anew:
        lines = tuple(
            (
                row["scenario"],
                seconds_text(row["given_seconds"]),
                seconds_text(row["new_seconds"]),
                row["strategy"] or "-",
                percent_text(row["gain"]),
            )
            for row in anew
        )
        columns = ("scenario", "best of these", "planned anew", "by", "gain")
        result.append(Table("planned anew", columns, lines, right=(1, 2, 4)))
    return result
