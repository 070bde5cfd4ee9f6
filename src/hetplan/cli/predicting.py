"""Predicted profiles, of models by name or traced: what is asked for, and what is printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cli import learning
from hetplan.cli.options import split_list
from hetplan.cli.output import check_target, note, print_json, print_tables, write_document
from hetplan.errors import InputError, UnsupportedError
from hetplan.names import unknown_name
from hetplan.text import Table, count_text, number_text, seconds_text

if TYPE_CHECKING:
    from hetplan.profiling.cluster import Cluster
    from hetplan.profiling.models import Model
    from hetplan.profiling.profile import Profile, ProfileTable

LARGEST = 4096  # of micro-batches and tensor degrees: beyond any device and any node


def traced_model(
    factory: str, name: str | None, precision: str, output: Path | None, *, quiet: bool
) -> Model:
    """The module that a factory makes (without a plan: there is none yet), traced; written where
    asked for."""
    try:
        from hetplan.runtime.execution.worker import from_factory
        from hetplan.runtime.tracing.layers import trace
    except ImportError:
        raise UnsupportedError(
            "tracing modules needs torch: pip install 'hetplan[runtime]'"
        ) from None
    from hetplan.profiling.models import load_model
    from hetplan.profiling.precision import PRECISIONS, Precision

    check_target(output)
    chosen: Precision | None = next((p for p in PRECISIONS if p == precision), None)
    if chosen is None:
        raise unknown_name("unknown precision", precision, PRECISIONS, where="--precision")
    found = trace(from_factory(factory, None), name=name or factory, precision=chosen)
    if output is not None:
        found.save(output)
    model = load_model(found.spec(), precision=chosen)
    if not quiet:
        count = sum(len(layer.operators) for layer in model.layers)
        flops = (model.forward_flops() / 1e9, model.backward_flops() / 1e9)
        note(
            f"traced {count} operators in {len(model.layers)} layers: {flops[0]:.4g} GFLOP forward, "
            f"{flops[1]:.4g} backward per sample"
        )
    return model


def told(profile: Profile, model: Model, *, json: bool, output: Path | None) -> int:
    """Write and print a predicted profile."""
    document = profile.model_dump(mode="json")
    write_document(output, document)
    for line in model.notes:
        note(line)
    if json:
        print_json(document)
    else:
        print_tables([summary(profile, model)])
    return 0


def predicted(
    model: Model,
    cluster: Cluster,
    global_batch: int | None,
    micro_batches: Sequence[str] | None,
    tensor: Sequence[str] | None,
    efficiency: Sequence[Path],
) -> Profile:
    """The predicted profile for the given or the usual sizes and degrees; raises InputError."""
    from hetplan.profiling.predict import LARGEST_MICRO_BATCH, default_micro_batches, predict

    if micro_batches is not None and global_batch is not None:
        raise InputError("--micro-batches and --global-batch exclude each other")
    # All powers of two up to the largest divide it, so they are its own default sizes.
    sizes = default_micro_batches(LARGEST_MICRO_BATCH if global_batch is None else global_batch)
    if micro_batches is not None:
        sizes = whole_numbers(micro_batches, "--micro-batches")
    degrees = None if tensor is None else whole_numbers(tensor, "--tensor")
    check_degrees(model, degrees or ())
    learned = learning.learned_of(efficiency, cluster, model.precision)
    return predict(model, cluster, micro_batches=sizes, tensor_degrees=degrees, learned=learned)


def check_degrees(model: Model, degrees: Sequence[int]) -> None:
    """Raise InputError for a tensor degree that the model cannot take."""
    for degree in degrees:
        if not model.tensor_degree_fits(degree):
            expected = "a divisor of the model's heads and feed-forward size"
            raise InputError("not usable", where="--tensor", got=degree, expected=expected)


def whole_numbers(texts: Sequence[str], option: str) -> tuple[int, ...]:
    """`["1,2", "4"]` as (1, 2, 4), each once, ascending; raises InputError."""
    numbers = set()
    for text in split_list(texts):
        if not (text.isdecimal() and 1 <= int(text[:9]) <= LARGEST and len(text) < 9):
            expected = f"whole numbers from 1 to {LARGEST}"
            raise InputError("not usable", where=option, got=text, expected=expected)
        numbers.add(int(text))
    if not numbers:
        raise InputError("no number given", where=option)
    return tuple(sorted(numbers))


def summary(profile: Profile, model: Model) -> Table:
    """One row per table: the whole model's forward and backward of one micro-batch, and the rate
    that gives."""
    tokens = "" if profile.sequence is None else f", {profile.sequence} tokens per sample"
    title = (
        f"{profile.provenance.kind} profile of {profile.model} ({count_text(model.params)} parameters, "
        f"{len(profile.layers)} layers{tokens}, {profile.precision})"
    )
    header = ("device", "tensor", "micro-batch", "forward", "backward", "samples/s")
    rows = tuple(summary_row(table) for table in profile.tables)
    notes = ["whole model on one tensor group, without all-reduces between its devices"]
    plain = [name for name in profile.devices() if name not in profile.provenance.learned]
    if profile.provenance.kind == "predicted":
        if profile.provenance.learned:
            notes.append(f"learned efficiency: {', '.join(profile.provenance.learned)}")
        if plain:
            notes.append(f"never measured, plain roofline: {', '.join(plain)}")
    return Table(title, header, rows, tuple(notes), right=(1, 2, 3, 4, 5))


def summary_row(table: ProfileTable) -> tuple[str, ...]:
    """Sums over the layers."""
    seconds = sum(table.seconds())
    return (
        table.device,
        str(table.tensor),
        str(table.micro_batch),
        seconds_text(sum(table.forward_seconds)),
        seconds_text(sum(table.backward_seconds)),
        number_text(table.micro_batch / seconds if seconds > 0 else None, 4),
    )
