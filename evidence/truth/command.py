"""`hetplan truth`: predictions held against what was measured.

`validate` compares them with plans that really ran, `calibrate` estimates constants from your own
runs, `sensitivity` says how plans fare when the profile is wrong.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from hetplan.cli.options import (
    JsonOption,
    OwnClusterOption,
    OwnModelOption,
    SeedOption,
    Setting,
    number,
    split_list,
    target,
)
from hetplan.cli.output import emit
from hetplan.errors import require
from hetplan.files import read_json
from hetplan.formulations.joint.plan import Plan, parse_plan
from hetplan.planner.pictures.scene import PlanningDocument
from hetplan.planner.ranking import make_plans
from hetplan.planner.strategy import make_strategies
from hetplan.profiling.workload import Workload
from hetplan.runtime.calibration import (
    Estimate,
    MeasuredRun,
    calibrate as estimate,
    load_measured_run,
)
from hetplan.runtime.sensitivity import Sensitivity, perturbed, scenarios, sensitivity as analyse
from hetplan.schema import parse
from hetplan.solvers.run import Options, Run
from hetplan.studies.truth.compare import SETS, calibrate_set, compare, reasons, standings
from hetplan.studies.truth.job import known_rows
from hetplan.studies.truth.tables import GIB, Compared, summary
from hetplan.text import Table, bytes_text, number_text, percent_text, seconds_text


def signed(value: float | None) -> str:
    """A relative error with its sign: `+3.2 %`."""
    return "-" if value is None else f"{100 * value:+.1f} %"


def validate(
    name: Annotated[str, typer.Argument(metavar="SET", help=f"One of {', '.join(SETS)}.")],
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="With the set's CSV files; of sailor: profiles/, llm_info.json, network_coeffs*, "
            "validation/**.json.",
        ),
    ],
    framework_gib: Annotated[
        float | None,
        number(
            "--framework-gib",
            least=0,
            most=1e6,
            metavar="GIB",
            help="sailor: what framework and driver take of each GPU, where known.",
        ),
    ] = None,
    rank: Annotated[
        bool,
        typer.Option(
            "--rank", help="Rank each published configuration among all of its model and GPUs."
        ),
    ] = False,
    json: JsonOption = False,
) -> int:
    """Predict every run of a published set and compare; nothing is fitted to its totals.

    A run that cannot be said has its reason. Exit code 0; of sailor 1 where a plan has no
    prediction.
    """
    rows = compare(name, folder, None if framework_gib is None else framework_gib * GIB, rank=rank)
    figures = summary(rows)
    document = {"set": name, "rows": [row.document() for row in rows], "summary": figures}
    parts = {part: (None, own) for part, own in parts_of(figures).items()}
    tables = [
        figures_table(
            f"{name}, predicted", parts, [f"{count} x {reason}" for reason, count in reasons(rows)]
        )
    ]
    if name != "operators":  # they are a hundred thousand: the JSON lists them
        tables.insert(0, rows_table(name, rows))
    emit(document, tables, json=json)
    return int(name == "sailor" and any(row.predicted is None for row in rows))


def rows_table(name: str, rows: Sequence[Compared]) -> Table:
    """One line per row of a set, with its prediction or the reason."""
    documents = (
        row.document() | {"error": row.error, "memory_error": row.memory_error} for row in rows
    )
    return Table.of(
        f"{name}, row by row",
        cast(Iterator[dict[str, Any]], documents),
        {
            "row": lambda row: f"{row['file']} {row['row']}",
            "workload": lambda row: row["workload"] or "-",
            "measured": lambda row: seconds_text(row["measured_seconds"]),
            "predicted": lambda row: seconds_text(row["predicted_seconds"]),
            "error": lambda row: signed(row["error"]),
            "memory": lambda row: bytes_text(row["measured_bytes"]),
            "memory predicted": lambda row: bytes_text(row["predicted_bytes"]),
            "memory error": lambda row: signed(row["memory_error"]),
            "reason": lambda row: row["reason"] or "",
            **({"ranking": ranking} if any(row.ranked for row in rows) else {}),
        },
        right=(2, 3, 4, 5, 6, 7),
    )


def ranking(row: Mapping[str, Any]) -> str:
    """A row's place among all configurations, what is preferred, and where the difference lies."""
    if "ranked" not in row:
        return ""
    of, (cause, own, best) = row["ranked"], row["ranked"]["why"][0]
    return (
        f"{round(of['place'] * of['count'])} of {of['count']} ({percent_text(of['place'])}) are no "
        f"faster; preferred {of['best']}, "
        f"{seconds_text(of['best_seconds'])}; {cause}: {seconds_text(own)}, preferred "
        f"{seconds_text(best)}"
    )


Figures = Mapping[str, Any]
# Columns of figures: title, key in a summary, how it reads.
COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("rows", "rows", number_text),
    ("predicted", "predicted", number_text),
    ("mean error of seconds", "error", percent_text),
    ("bias", "bias", signed),
    ("Spearman", "spearman", partial(number_text, digits=3)),
    ("of all", "order", partial(number_text, digits=3)),
    ("of MFU", "utilisation", partial(number_text, digits=3)),
    ("regret", "regret", percent_text),
    ("worst", "worst_regret", percent_text),
    ("mean error of memory", "memory_error", percent_text),
    ("from 5 GB on", "memory_large_error", percent_text),
    ("more than 5 % below", "memory_below", number_text),
    ("said not to fit", "unfit", number_text),
)


def parts_of(whole: Figures) -> dict[str, Figures]:
    """A set's figures as a whole, by file, and by GPU type or operator; a plan that is a file of
    its own stands in its folder."""
    return {
        "all": whole,
        **{name: part for name, part in whole["files"].items() if not name.endswith(".json")},
        **whole["kinds"],
    }


def figures_table(
    title: str, parts: Mapping[str, tuple[Figures | None, Figures]], notes: Sequence[str] = ()
) -> Table:
    """One line per part: each figure, or as it was and as it is; columns that nobody knows are left
    out."""

    def cell(part: str, key: str, text: Callable[[Any], str]) -> str:
        before, now = parts[part]
        old, new = None if before is None else before.get(key), now[key]
        return text(new) if before is None or old == new else f"{text(old)} -> {text(new)}"

    columns = [column for column in COLUMNS if any(now[column[1]] for _, now in parts.values())]
    return Table.of(
        title,
        parts,
        {
            "part": str,
            **{name: partial(cell, key=key, text=text) for name, key, text in columns},
        },
        (*notes, "nothing is fitted to the totals of these measurements"),
        right=range(1, len(columns) + 1),
    )


def table(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="With truth, operators and sailor in it, or some."),
    ],
    json: JsonOption = False,
) -> int:
    """Every set at once, today's figures beside those of an earlier predictor."""
    rows = standings(folder)
    parts = {f"{row['name']} {row['part']}": (row["before"], row["now"]) for row in rows}
    return emit(
        {"parts": rows},
        [figures_table("predictions beside published measurements: before -> now", parts)],
        json=json,
    )


def known(json: JsonOption = False) -> int:
    """Model FLOPs utilisation of well-known runs, published and predicted; needs no files."""
    rows = list(known_rows())
    return emit(
        {"runs": rows},
        [
            Table.of(
                "model FLOPs utilisation of well-known runs",
                rows,
                {
                    "run": lambda row: row["name"],
                    "GPUs": lambda row: str(row["gpus"]),
                    "published": lambda row: percent_text(row["published"]),
                    "predicted": lambda row: percent_text(row["predicted"]),
                    "points": lambda row: f"{100 * (row['predicted'] - row['published']):+.1f}",
                    "source": lambda row: row["source"],
                },
                ("nothing is fitted to these runs",),
                right=(1, 2, 3, 4),
            )
        ],
        json=json,
    )


def calibrate(
    profile: Annotated[
        Path,
        typer.Argument(
            metavar="PROFILE|SET", help="The profile that the plans ran with, or a published set."
        ),
    ],
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS…|DIR",
            help='JSON files: {"plan": plan or its file, "seconds": …, "peak_bytes": …}; of a set '
            "its folder.",
        ),
    ],
    cluster: OwnClusterOption = None,
    model: OwnModelOption = None,
    rows: Annotated[
        int,
        typer.Option("--rows", metavar="N", help="Of a set: rows to estimate from.", min=1),
    ] = 20,
    seed: SeedOption = None,
    output: Annotated[
        Path | None,
        target("--output", "-o", help="Write the constants to a file."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Estimate factors of compute, host time and bandwidths, a pass's overhead and the framework's
    memory from your own measured runs.

    `hetplan plan simulate --calibration FILE` predicts with them. Of a set some rows are drawn, and
    the others predicted without and with the constants. Exit code 1, and no file, where the runs do
    not tell.
    """
    if profile.name in SETS and not profile.exists():
        rest = calibrate_set(profile.name, runs[0], rows, seed or 0)
        estimated, measured = rest.estimate, rest.runs
        more: dict[str, Any] = {
            "set": profile.name,
            "rest": {"before": summary(rest.before), "after": summary(rest.after)},
        }
        before = parts_of(more["rest"]["before"])
        parts = {
            part: (before[part], figures)
            for part, figures in parts_of(more["rest"]["after"]).items()
        }
        tables = [
            calibration_table(measured, estimated),
            figures_table("the other rows: before -> calibrated", parts),
        ]
    else:
        measured, more = tuple(load_measured_run(path) for path in runs), {}
        setting = Setting(cluster=cluster, model=model, profile=profile)
        estimated = estimate(
            measured, [setting.workload(measured[0].plan, runs[0])] * len(measured)
        )
        tables = [calibration_table(measured, estimated)]
    constants = estimated.calibration
    if constants is not None and output is not None:
        constants.save(output)
    document = {
        "calibration": None if constants is None else constants.model_dump(mode="json"),
        "reason": estimated.reason or None,
        "runs": [
            {"run": run.where, "measured_seconds": run.seconds, "predicted_seconds": seconds}
            for run, seconds in zip(measured, estimated.predictions, strict=True)
        ],
    }
    return emit(document | more, tables, json=json, ok=constants is not None)


def calibration_table(runs: Sequence[MeasuredRun], estimated: Estimate) -> Table:
    """Runs beside their predictions, and the constants."""
    constants = estimated.calibration
    notes = [f"not calibrated: {estimated.reason}"]
    if constants is not None:
        values = constants.values()
        notes = [f"{name}: {number_text(values[name], 3)}" for name in constants.fitted]
        notes += [f"{name} keeps its value: {why}" for name, why in constants.refused.items()]
        notes.append(
            f"mean error {percent_text(constants.error_before)} before, "
            f"{percent_text(constants.error_left_out)} of runs left out"
        )
        if constants.framework_bytes is not None:
            notes.append(
                f"framework and driver hold {bytes_text(constants.framework_bytes)} of each device"
            )
    word = "calibrated" if constants is not None else "not calibrated"
    return Table.of(
        "calibration",
        zip(
            runs,
            estimated.predictions,
            estimated.left_out or (None,) * len(runs),
            strict=True,
        ),
        {
            "run": lambda row: row[0].where,
            "measured": lambda row: seconds_text(row[0].seconds),
            f"predicted, {word}": lambda row: seconds_text(row[1]),
            "left out": lambda row: signed(None if row[2] is None else row[2] / row[0].seconds - 1),
        },
        notes,
        right=(1, 2, 3),
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
        float,
        typer.Option("--time-limit", "-t", metavar="SECONDS", help="Of each planning anew."),
    ] = 30.0,
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
    limit: float,
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
    yield Table.of(
        "sensitivity to the profile, predicted",
        range(len(names)),
        {
            "plan": lambda i: names[i],
            "rank": lambda i: str(analysis.nominal.ranks[i]),
            "iteration": lambda i: seconds_text(analysis.nominal.seconds[i]),
            "lowest": lambda i: seconds_text(analysis.figures(i)["lowest_seconds"]),
            "highest": lambda i: seconds_text(analysis.figures(i)["highest_seconds"]),
            "fastest in": lambda i: f"{analysis.figures(i)['wins']} of {count}",
            "regret": lambda i: percent_text(analysis.figures(i)["regret"]),
        },
        notes,
        right=(1, 2, 3, 4, 5, 6),
    )
    if anew:
        yield Table.of(
            "planned anew",
            anew,
            {
                "scenario": lambda row: row["scenario"],
                "best of these": lambda row: seconds_text(row["given_seconds"]),
                "planned anew": lambda row: seconds_text(row["new_seconds"]),
                "by": lambda row: row["strategy"] or "-",
                "gain": lambda row: percent_text(row["gain"]),
            },
            right=(1, 2, 4),
        )
