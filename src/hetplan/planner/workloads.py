"""The workloads to plan: one for each precision that is worth planning.

What a precision changes are times and bytes of every layer, so that each makes a workload of its
own; their plans are ranked together. Whether training converges in a precision is the user's to
say: only what is named is tried.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetplan.errors import InputError, require, unknown_name
from hetplan.planner.fits import MEMORY_MARGIN
from hetplan.profiling.frameworks import HETPLAN, Framework
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.models.model import Model
from hetplan.profiling.models.operators import DEFAULT_STACK, PRECISIONS, Precision, Stack
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.workload import Workload, make_workload

AUTO = "auto"
# What `auto` stands for; of equals the first wins, and bf16 needs no loss scaling.
PREFERRED: tuple[Precision, ...] = ("bf16", "fp16", "fp32")


def traced(module: Any, precision: str | Sequence[str]) -> Model:
    """A torch module as a model to plan, under its class's name; needs torch."""
    from hetplan.runtime.tracing.layers import trace
    from hetplan.runtime.tracing.program import plannable

    return plannable(module, trace(module, name=type(module).__name__, precision=only(precision)))


def only(names: str | Sequence[str]) -> Precision:
    """The one precision of a module, which is traced in it; raises InputError."""
    first, *others = precisions_of(names)
    require(
        not others,
        "a module is planned in one precision",
        got=", ".join((first, *others)),
        expected="one of them",
    )
    return first


def precisions_of(names: str | Sequence[str]) -> tuple[Precision, ...]:
    """`auto`, one precision, several separated by commas, or a sequence of them; raises
    InputError."""
    if names == AUTO:
        return PREFERRED
    texts = [text.strip() for text in (names.split(",") if isinstance(names, str) else names)]
    known: dict[str, Precision] = {name: name for name in PRECISIONS}
    for text in texts:
        if text not in known:
            raise unknown_name("unknown precision", text, (*PRECISIONS, AUTO))
    require(texts, "no precision named", expected=f"some of {', '.join(PRECISIONS)}, or {AUTO}")
    return tuple(known[text] for text in dict.fromkeys(texts))


def make_workloads(
    model: str | os.PathLike[str] | Model,
    cluster: Cluster,
    global_batch: int,
    *,
    sequence: int | None = None,
    precision: str | Sequence[str] = "fp16",
    profile: str | os.PathLike[str] | Profile | None = None,
    framework: str | Framework = HETPLAN,
    stack: str | Stack = DEFAULT_STACK,
    memory_margin: float = MEMORY_MARGIN,
) -> tuple[list[Workload], list[str]]:
    """One workload per precision worth planning, the preferred first; why others are left out.
    memory_margin: share of each device's memory that stays free.

    With one precision, or with a Model, which brings its own, it is `make_workload`. Of several,
    those that a device has no peak for are left out, as is one whose times and bytes are those of
    another on every device. Raises InputError where none is left, or for a profile, which is of one
    precision.
    """
    precisions = precisions_of(precision)
    if isinstance(model, Model) or len(precisions) == 1:
        workload = make_workload(
            model,
            cluster,
            global_batch,
            sequence=sequence,
            precision=precisions[0],
            profile=profile,
            framework=framework,
            stack=stack,
        )
        return [replace(workload, memory_margin=memory_margin)], []
    if profile is not None:
        raise InputError(
            "a profile is of one precision",
            where=profile.model if isinstance(profile, Profile) else os.fspath(profile),
            got=", ".join(precisions),
            expected="one --precision",
        )
    workloads: list[Workload] = []
    notes: list[str] = []
    for name in precisions:
        kinds = [k for k in cluster.types if name not in cluster.specs[k].peak_tflops]
        if kinds:
            notes.append(f"{name} is left out: no units for it in {', '.join(kinds)}")
            continue
        made = make_workload(
            model,
            cluster,
            global_batch,
            sequence=sequence,
            precision=name,
            framework=framework,
            stack=stack,
        )
        # equal profiles and equal bytes of states make equal plans
        twins = (
            other
            for other in workloads
            if other.state_bytes_per_param_byte == made.state_bytes_per_param_byte
            and other.profile.layers == made.profile.layers
            and other.profile.tables == made.profile.tables
        )
        twin = next(twins, None)
        if twin is None:
            workloads.append(replace(made, memory_margin=memory_margin))
        else:
            same = f"times and bytes are those of {twin.precision}"
            notes.append(f"{name} is not planned apart: {same}")
    require(
        workloads,
        "no precision that every device has",
        where=f"cluster {cluster.name}",
        got=", ".join(precisions),
        expected="; ".join(notes),
    )
    return workloads, notes
