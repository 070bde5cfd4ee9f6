"""Samples of unequal length in `hetplan plan`: what `--lengths` goes together with, its table."""

from collections.abc import Mapping, Sequence

from hetplan.cli.options import split_list
from hetplan.cli.output import note
from hetplan.errors import require
from hetplan.planner import ALL, STRATEGIES
from hetplan.planner.lengths.drawn import (
    DRAWS,
    PROGRAMS,
    QUANTILE,
    WAYS,
    LengthsAnswer,
    LengthsPlan,
)
from hetplan.planner.lengths.samples import Lengths, lengths_for, open_lengths
from hetplan.solvers.run import OPTIMAL_GAP
from hetplan.text import Column, Table, counted, percent_text, seconds_text, signed_percent_text


def usable_lengths(
    source: str, model: str, sequence: int | None, refused: Mapping[str, object]
) -> Lengths:
    """The lengths of `--lengths` for a model, cut at `--sequence`, or where that is missing at the
    positions that the model has learned. A note says how many are cut.

    refused: options that do not go together with `--lengths`, with their values. Raises InputError
    for one that is given, and for a model of images.
    """
    for option, value in refused.items():
        require(
            value is None,
            f"{option} is for samples of one length",
            where="--lengths",
            expected="one of the two options",
        )
    usable = lengths_for(model, open_lengths(source), sequence)
    if usable.cut > 0:
        note(f"{percent_text(usable.cut)} of the samples are cut at {usable.longest} tokens")
    return usable


def stages_only(strategies: Sequence[str] | None) -> list[str]:
    """The strategies of `--strategies` whose plans are stages: by default all such. Raises
    InputError where the user names another one."""
    named = [ALL] if strategies is None else split_list(strategies)
    if ALL in named:
        return [name for name in STRATEGIES if name != PROGRAMS]
    require(
        PROGRAMS not in named,
        "its programs are made for samples of one length",
        where="--strategies",
        got=PROGRAMS,
        expected="another strategy with --lengths",
    )
    return named


def lengths_table(answer: LengthsAnswer) -> Table:
    """The plans for both lengths, and what they take on drawn lengths."""
    lengths = answer.lengths
    chosen = None if answer.chosen is None else answer.plans[answer.chosen]

    def drawn(way: str) -> Column[LengthsPlan]:
        def text(plan: LengthsPlan) -> str:
            if not plan.ways:
                return "-"
            seconds = plan.ways[way].seconds
            return "does not fit" if seconds is None else seconds_text(seconds)

        return Column(way, text, right=True)

    columns: list[Column[LengthsPlan]] = [
        Column("plan for the", lambda plan: plan.label),
        Column("tokens", lambda plan: plan.length, right=True),
        Column("all so long", lambda plan: plan.predicted, seconds_text, right=True),
        *(drawn(way) for way in WAYS),
        Column("", lambda plan: "chosen" if plan is chosen else ""),
    ]
    title = (
        f"samples of {lengths.name}: {lengths.mean:.0f} tokens in the mean, "
        f"{QUANTILE:.0%} at most {lengths.quantile(QUANTILE)}, the longest {lengths.longest}"
    )
    return Table.of(title, answer.plans, columns, lines(answer, chosen))


def lines(answer: LengthsAnswer, chosen: LengthsPlan | None) -> list[str]:
    """Lines on the gain of the chosen plan by packing and by balance."""
    said = [f"in the mean of {counted(DRAWS, 'drawn iteration')}, seed {answer.seed}, replayed"]
    if chosen is None:
        return [*said, "no plan holds the longest of the drawn samples"]
    padded, packed, balanced = (chosen.ways[way] for way in WAYS)
    if padded.tokens is not None and balanced.tokens is not None:
        share = 1 - balanced.tokens / padded.tokens
        said.append(f"chosen plan: {percent_text(share)} of the padded tokens are padding")
    for name, before, after in (
        ("packing", padded.seconds, packed.seconds),
        ("balance", packed.seconds, balanced.seconds),
    ):
        if before is not None and after is not None:
            said.append(f"chosen plan: {name} changes the seconds by {change_text(after / before)}")
    if balanced.gap is not None and balanced.gap > OPTIMAL_GAP:
        said.append(f"no balance is better by more than {percent_text(balanced.gap)} before replay")
    elif balanced.gap is not None:
        said.append("no balance is better before replay")
    return said


def change_text(ratio: float) -> str:
    """A ratio as a change in percent; `nothing` where it is below a thousandth of a percent."""
    change = ratio - 1
    return "nothing" if abs(change) < 1e-5 else signed_percent_text(change)
