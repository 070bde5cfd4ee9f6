"""Precision as a choice: one workload per precision that is allowed and that every device of the
cluster has.

What a precision changes are times and bytes of every layer, so that each makes a problem of its
own; their plans are ranked together. Whether training converges in a precision is the user's to
say: only what is named is tried.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from hetplan.errors import InputError
from hetplan.names import unknown_name
from hetplan.profiling.cluster import Cluster, load_cluster
from hetplan.profiling.models import Model
from hetplan.profiling.precision import PRECISIONS, Precision
from hetplan.profiling.profile import Profile
from hetplan.profiling.workload import Workload, make_workload

AUTO = "auto"
# What `auto` stands for; of equals the first wins, and bf16 needs no loss scaling.
PREFERRED: tuple[Precision, ...] = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Choice:
    """workloads: one per precision worth planning, the preferred first. notes: why others are not
    among them."""

    workloads: tuple[Workload, ...]
    notes: tuple[str, ...] = ()


def precisions_of(given: str | Sequence[str]) -> tuple[Precision, ...]:
    """`auto`, one precision, several separated by commas, or a sequence of them; raises
    InputError."""
    if given == AUTO:
        return PREFERRED
    texts = given.split(",") if isinstance(given, str) else given
    found: list[Precision] = []
    for text in dict.fromkeys(text.strip() for text in texts):
        known = next((precision for precision in PRECISIONS if precision == text), None)
        if known is None:
            raise unknown_name("unknown precision", text, (*PRECISIONS, AUTO))
        found.append(known)
    if not found:
        raise InputError(
            "no precision named", expected=f"some of {', '.join(PRECISIONS)}, or {AUTO}"
        )
    return tuple(found)


def make_workloads(
    model: str | os.PathLike[str] | Model,
    cluster: str | os.PathLike[str] | Cluster,
    global_batch: int,
    *,
    sequence: int | None = None,
    precision: str | Sequence[str] = "fp16",
    profile: str | os.PathLike[str] | Profile | None = None,
) -> Choice:
    """`make_workload` for every precision given. With one, or with a Model, which brings its own,
    that is all.

    With several, those that a device has no peak for are left out, as is one whose times and bytes
    are those of another on every device. Raises InputError where none is left, or for a profile,
    which is of one precision.
    """
    chosen = precisions_of(precision)
    if isinstance(model, Model) or len(chosen) == 1:
        only = make_workload(
            model, cluster, global_batch, sequence=sequence, precision=chosen[0], profile=profile
        )
        return Choice((only,))
    if profile is not None:
        where = profile.model if isinstance(profile, Profile) else os.fspath(profile)
        raise InputError(
            "a profile is of one precision",
            where=where,
            got=", ".join(chosen),
            expected="one --precision",
        )
    if not isinstance(cluster, Cluster):
        cluster = load_cluster(cluster)
    lacking = {name: lacks(cluster, name) for name in chosen}
    usable = [name for name in chosen if not lacking[name]]
    if not usable:
        raise InputError(
            "no precision that every device has", where=f"cluster {cluster.name}", got=", ".join(chosen),
            expected="; ".join(f"{name}: not on {', '.join(kinds)}" for name, kinds in lacking.items()),
        )  # fmt: skip
    every = [
        make_workload(model, cluster, global_batch, sequence=sequence, precision=name)
        for name in usable
    ]
    kept, notes = apart(every)
    left_out = [
        f"{name} is left out: no units for it in {', '.join(kinds)}"
        for name, kinds in lacking.items()
        if kinds
    ]
    return Choice(kept, (*left_out, *notes))


def lacks(cluster: Cluster, precision: Precision) -> list[str]:
    """Device types without a peak in the precision."""
    return [name for name in cluster.types if precision not in cluster.specs[name].peak_tflops]


def apart(workloads: Sequence[Workload]) -> tuple[tuple[Workload, ...], tuple[str, ...]]:
    """The workloads that differ in more than their precision's name, and notes on those that do
    not.

    Equal profiles and equal bytes of states make equal problems: the plans of one are those of the
    other.
    """
    kept: list[Workload] = []
    notes: list[str] = []
    for workload in workloads:
        twin = next((other for other in kept if equal(workload, other)), None)
        if twin is None:
            kept.append(workload)
        else:
            text = f"{workload.precision} is not planned apart: times and bytes are those of {twin.precision}"
            notes.append(text)
    return tuple(kept), tuple(notes)


def equal(one: Workload, other: Workload) -> bool:
    """Whether two workloads of one model and cluster are the same problem under two names."""
    same_states = one.state_bytes_per_param_byte == other.state_bytes_per_param_byte
    return (
        same_states
        and one.profile.layers == other.profile.layers
        and one.profile.tables == other.profile.tables
    )
