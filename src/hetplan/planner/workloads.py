"""Makes the workloads to plan: one for each precision that is worth planning.

A precision changes the times and the bytes of every layer, so that each precision gives another
workload. Their plans are ranked together. Whether training converges in a precision is not known
here: only precisions that the user names are planned.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hetplan.errors import InputError, require, unknown_name
from hetplan.planner.fits import MEMORY_MARGIN
from hetplan.profiling.frameworks import HETPLAN, Framework
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.models.model import Model
from hetplan.profiling.models.operators import DEFAULT_STACK, PRECISIONS, Precision, Stack
from hetplan.profiling.models.zoo import ModelSpec
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.workload import Workload, make_workload

AUTO = "auto"
# The precisions that `auto` stands for. Of equally fast plans that of the earlier precision wins:
# bf16 stands before fp16, because it needs no loss scaling.
PREFERRED: tuple[Precision, ...] = ("bf16", "fp16", "fp32")


def traced(module: Any, precision: str | Sequence[str]) -> Model:
    """A torch module as a model to plan, with the name of its class. Needs torch."""
    from hetplan.runtime.spmd.runs import check_planned_runs
    from hetplan.runtime.tracing.layers import trace
    from hetplan.runtime.tracing.program import plannable

    layers = trace(module, name=type(module).__name__, precision=the_one_precision(precision))
    return plannable(module, layers, partial(check_planned_runs, module, None))


def the_one_precision(names: str | Sequence[str]) -> Precision:
    """The one precision in which a module is traced. Raises InputError for several."""
    first, *others = precisions_of(names)
    require(
        not others,
        "a module is planned in one precision",
        got=", ".join((first, *others)),
        expected="one of them",
    )
    return first


def precisions_of(names: str | Sequence[str]) -> tuple[Precision, ...]:
    """The precisions of the given names, each once. names: a sequence, one text with commas between
    names, or `auto`. Raises InputError for unknown names, and for none."""
    if names == AUTO:
        return PREFERRED
    if isinstance(names, str):
        names = names.split(",")
    texts = [text.strip() for text in names]
    # text -> the same text as a Precision, which type checkers accept
    known: dict[str, Precision] = {name: name for name in PRECISIONS}
    for text in texts:
        if text not in known:
            raise unknown_name("unknown precision", text, (*PRECISIONS, AUTO))
    require(texts, "no precision named", expected=f"some of {', '.join(PRECISIONS)}, or {AUTO}")
    return tuple(known[text] for text in dict.fromkeys(texts))


def make_workloads(
    model: str | os.PathLike[str] | ModelSpec | Model,
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
    """(workloads, notes): a workload for each precision worth planning, in the order of the names,
    and a note on each precision that is left out.

    memory_margin: share of each device's memory that stays free. There is one workload, which
    `profiling.workload.make_workload` makes, for one precision and for a Model, which has its own
    precision. Of several precisions, one is left out if some device has no peak speed in it, or if
    every device has the times and bytes of an earlier precision. Raises InputError if all are left
    out, and for several precisions with a profile, which is of one precision.
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
        without_peak = [
            kind for kind in cluster.types if name not in cluster.specs[kind].peak_tflops
        ]
        if without_peak:
            notes.append(f"{name} is left out: no units for it in {', '.join(without_peak)}")
            continue
        workload = make_workload(
            model,
            cluster,
            global_batch,
            sequence=sequence,
            precision=name,
            framework=framework,
            stack=stack,
        )
        twin = next((other for other in workloads if equally_planned(workload, other)), None)
        if twin is None:
            workloads.append(replace(workload, memory_margin=memory_margin))
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


def equally_planned(one: Workload, other: Workload) -> bool:
    """Whether two workloads have the same plans: equal profiles, and equal bytes of states."""
    return (
        one.state_bytes_per_param_byte == other.state_bytes_per_param_byte
        and one.profile.layers == other.profile.layers
        and one.profile.tables == other.profile.tables
    )
