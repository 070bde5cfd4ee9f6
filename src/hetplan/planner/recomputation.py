"""Recomputation as a choice of every strategy: the workload as it is when layers are computed
again.

A strategy poses whatever workload it is given. With a profile whose backward passes include what is
repeated and whose layers keep less, its exact models decide with the memory that recomputation
leaves, and their bounds hold for it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from hetplan.profiling.operators import Layer
from hetplan.profiling.profile import Profile, ProfileLayer, ProfileTable
from hetplan.profiling.recomputation import Recomputation, kept_bytes, repeated_share
from hetplan.profiling.workload import Workload
from hetplan.runtime.costs import Costs

MODES: tuple[Recomputation, ...] = ("selective", "full")
# More than any device has: with it no memory limit binds.
UNLIMITED = 1e18


def recomputed(workload: Workload, mode: Recomputation) -> Workload:
    """The workload with `mode` in its layers' times and in what they keep, and with the memory of
    the layer at work."""
    if mode == "none":
        return workload
    profile = workload.profile
    layers = [kept_layer(workload, l, mode) for l in range(len(profile.layers))]
    tables = [
        repeated_table(workload, table, mode)
        for table in profile.tables
        if table.device in workload.cluster.specs
    ]
    changed = {**dict(profile), "layers": layers, "tables": tables}
    costs, every = Costs(workload, mode), (0, len(layers))
    working = {
        degree: costs.working_bytes(every, degree) for degree in {1, *(t.tensor for t in tables)}
    }
    return replace(workload, profile=Profile(**changed), working_bytes=working)


def kept_layer(workload: Workload, at: int, mode: Recomputation) -> ProfileLayer:
    """What the layer keeps; the part that every tensor rank keeps whole follows from what two ranks
    keep each."""
    told, layer = workload.profile.layers[at], workload.model.layers[at]
    before = workload.profile.layers[at - 1].activation_bytes if at else 0.0
    alone, halved = (
        kept_bytes(layer, mode, workload.precision, tensor, before) for tensor in (1, 2)
    )
    whole = min(max(2 * halved - alone, 0.0), alone)
    return told.model_copy(update={"saved_bytes": alone, "replicated_saved_bytes": whole})


def repeated_table(workload: Workload, table: ProfileTable, mode: Recomputation) -> ProfileTable:
    """The table with what is repeated in the backward passes."""
    spec = workload.cluster.specs[table.device]

    @cache
    def share(layer: Layer) -> float:
        return repeated_share(
            layer, mode, spec, workload.precision, table.micro_batch, table.tensor
        )

    backward = [
        back + forward * share(layer)
        for back, forward, layer in zip(
            table.backward_seconds, table.forward_seconds, workload.model.layers, strict=True
        )
    ]
    return table.model_copy(update={"backward_seconds": backward})


def useful_modes(workload: Workload) -> tuple[Recomputation, ...]:
    """The modes under which this model keeps less than it does without (fused attention has no core
    to repeat)."""
    held = [sum(layer.saved_bytes for layer in workload.profile.layers)]
    found: list[Recomputation] = []
    for mode in MODES:
        kept = sum(
            kept_layer(workload, l, mode).saved_bytes for l in range(len(workload.profile.layers))
        )
        if kept < min(held) * (1 - 1e-9):
            found.append(mode)
            held.append(kept)
    return tuple(found)


def unlimited(workload: Workload) -> Workload:
    """The workload on devices whose memory never binds."""
    return replace(workload, reserved_bytes=-UNLIMITED)
