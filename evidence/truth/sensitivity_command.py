"""`python -m evidence.truth sensitivity`: plans replayed under profiles that are wrong on
purpose."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from evidence.truth.sensitivity import Sensitivity, scenarios, sensitivity as analyse
from hetplan.cli.options import JsonOption, SeedOption, number, split_list
from hetplan.cli.output import emit
from hetplan.cli.setting import Setting
from hetplan.errors import require
from hetplan.files import read_json
from hetplan.planner.pictures.scene import PlanningDocument
from hetplan.planner.ranking import make_plans
from hetplan.planner.strategy import make_strategies
from hetplan.plans.plan import Plan, parse_plan
from hetplan.profiling.profiles.profile import perturbed
from hetplan.profiling.workload import Workload
from hetplan.schema import parse
from hetplan.solvers.run import Options, Run
from hetplan.text import (
    Column,
    Table,
    number_text,
    percent_text,
    seconds_text,
)


def sensitivity(
    plans: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN…", help="Plan files, or what `hetplan plan --json` prints: all its plans."
        ),
    ],
    setting: Setting,
    spread: Annotated[
        float,
        number(
            "--spread",
            least=1e-9,
            most=90,
            metavar="PERCENT",
            help="By how much times without a spread are off.",
        ),
    ] = 10.0,
    draws: Annotated[
        int, typer.Option("--draws", metavar="N", help="Random scenarios.", min=0, max=10_000)
    ] = 20,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategies",
            metavar="A[,B…]",
            help="Plan anew with these where a whole device type is off.",
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            "-t",
            metavar="SECONDS",
            help="Of each planning anew. By default none: plans then do not depend on the load.",
        ),
    ] = None,
    seed: SeedOption = None,
    json: JsonOption = False,
) -> int:
    """Perturb the profile (by its measured spread, or +- 10 %): how time, ranks and the best
    decision change."""
    named = [pair for path in plans for pair in read_plans(path)]
    workload = setting.workload(named[0][1], plans[0])
    analysis = analyse(
        [plan for _, plan in named], workload, draws=draws, seed=seed or 0, unmeasured=spread / 100
    )
    tried = [] if strategies is None else split_list(strategies)
    anew = planned_anew(analysis, workload, tried, time_limit, spread / 100) if tried else []
    names = [name for name, _ in named]
    return emit(
        sensitivity_document(analysis, names, anew),
        sensitivity_tables(analysis, names, anew, spread),
        json=json,
    )


def read_plans(path: Path) -> list[tuple[str, Plan]]:
    """(name, plan) of a plan file, or of every candidate with a plan in a planner's document;
    raises InputError."""
    value, where = read_json(path), str(path)
    if not isinstance(value, dict) or "candidates" not in value:
        return [(path.name, parse_plan(value, where=where))]
    named = [
        (o.name, parse_plan(o.plan, where=f"{where}: candidates[{i}].plan"))
        for i, o in enumerate(parse(PlanningDocument, value, where=where).candidates)
        if o.plan is not None
    ]
    require(named, "no candidate has a plan", where=where)
    return named


def planned_anew(
    analysis: Sensitivity,
    workload: Workload,
    strategies: Sequence[str],
    limit: float | None,
    unmeasured: float,
) -> list[dict[str, Any]]:
    """The best plan of these strategies where one device type is off as a whole, beside the given
    plans there."""
    rows = []
    for outcome, scenario in zip(
        analysis.outcomes, scenarios(workload.profile, 0, 0, unmeasured), strict=False
    ):
        held = replace(workload, profile=perturbed(workload.profile, scenario.factors))
        best = make_plans(held, make_strategies(strategies), Run(Options(time_limit=limit))).best
        seconds = None if best is None else best.predicted_seconds
        kept = min(outcome.seconds)
        rows.append(
            {
                "scenario": outcome.scenario,
                "given_seconds": kept,
                "new_seconds": seconds,
                "gain": None if seconds is None else kept / seconds - 1,
                "strategy": None if best is None else best.strategy,
            }
        )
    return rows


def sensitivity_document(
    analysis: Sensitivity, names: Sequence[str], anew: list[dict[str, Any]]
) -> dict[str, Any]:
    """As JSON types."""
    return {
        "spread": "measured" if analysis.measured else "assumed",
        "plans": [
            {
                "name": name,
                "seconds": analysis.nominal.seconds[i],
                "rank": analysis.nominal.ranks[i],
                **analysis.figures(i),
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
            for o in analysis.outcomes
        ],
        "planned_anew": anew,
    }


def sensitivity_tables(
    analysis: Sensitivity, names: Sequence[str], anew: list[dict[str, Any]], spread: float
) -> Iterator[Table]:
    """Plans, then the scenarios with another winner, then what planning anew gains."""
    count = len(analysis.outcomes)
    others = [o.scenario for o in analysis.outcomes if o.winner != analysis.nominal.winner]
    off = (
        "the profile's measured spread"
        if analysis.measured
        else f"+- {number_text(spread)} %, nothing is measured"
    )
    notes = [
        f"layer times off by {off}; regret: the most by which another of these plans is faster"
    ]
    if others:
        notes.append(
            f"another plan is the fastest in {len(others)} of {count}: {', '.join(others[:6])}"
        )
    figures = [analysis.figures(plan) for plan in range(len(names))]
    yield Table.of(
        "sensitivity to the profile, predicted",
        range(len(names)),
        [
            Column("plan", lambda i: names[i]),
            Column("rank", lambda i: analysis.nominal.ranks[i], right=True),
            Column("iteration", lambda i: analysis.nominal.seconds[i], seconds_text, right=True),
            Column("lowest", lambda i: figures[i]["lowest_seconds"], seconds_text, right=True),
            Column("highest", lambda i: figures[i]["highest_seconds"], seconds_text, right=True),
            Column("fastest in", lambda i: f"{figures[i]['wins']} of {count}", right=True),
            Column("regret", lambda i: figures[i]["regret"], percent_text, right=True),
        ],
        notes,
    )
    if anew:
        yield Table.of(
            "planned anew",
            anew,
            [
                Column("scenario", lambda row: row["scenario"]),
                Column("best of these", lambda row: row["given_seconds"], seconds_text, right=True),
                Column("planned anew", lambda row: row["new_seconds"], seconds_text, right=True),
                Column("by", lambda row: row["strategy"] or "-"),
                Column("gain", lambda row: row["gain"], percent_text, right=True),
            ],
        )
