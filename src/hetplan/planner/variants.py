"""Variants: the choices that are made outside a strategy, namely recomputation, precision and part
of the cluster. What is solved and replayed is a strategy in a variant.

A strategy knows nothing of variants. For recomputation it gets the workload of `with_recomputation`
and for a part of the cluster that of `on_part`, so that what it decides and proves holds there. Its
plans then leave the devices outside the part idle, and only devices in use are paid for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hetplan.plans.plan import Plan, PlanDevice, Recomputation
from hetplan.profiling.models.operators import Precision
from hetplan.profiling.profiles.profile import Profile, ProfileTable
from hetplan.profiling.workload import Workload
from hetplan.replays.costs import Costs
from hetplan.replays.data import ReplayData, Table
from hetplan.replays.pose import kept_of, pose

MODES: tuple[Recomputation, ...] = ("selective", "full")
# Of more device types the parts are too many to solve each.
MOST_TYPES = 6


@dataclass(frozen=True)
class Part:
    """Some nodes of a cluster. name: stands behind `@` in the names of its plans."""

    name: str
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Variant:
    """One choice for each axis that all strategies share; every axis is plain by default."""

    recomputation: Recomputation = "none"  # what backward passes compute again
    precision: Precision | None = None  # where several are ranked together; None: the only one
    part: Part | None = None  # where the plan runs; None: on the whole cluster

    @property
    def label(self) -> str:
        """The text that follows a method's name: `+full+bf16@T4`; empty where all is plain."""
        mode = None if self.recomputation == "none" else self.recomputation
        axes = "".join(f"+{axis}" for axis in (mode, self.precision) if axis)
        return f"{axes}@{self.part.name}" if self.part and self.part.name else axes

    def marked(self, plan: Plan) -> Plan:
        """The strategy's plan with the variant's recomputation, which the strategy did not know."""
        if self.recomputation == "none":
            return plan
        return plan.model_copy(
            update={
                "recomputation": self.recomputation,
                "origin": f"{plan.origin}+{self.recomputation}",
            }
        )


PLAIN = Variant()


def parts_of_cluster(workload: Workload) -> Iterator[Part]:
    """Every part of the cluster by device types but the whole, smaller ones first.

    Every subset of at most six types; of more types one, two, or all but one.
    """
    types, nodes = workload.cluster.types, workload.cluster.nodes
    sizes: Sequence[int] = range(1, len(types))
    if len(types) > MOST_TYPES:
        sizes = (1, 2, len(types) - 1)
    for size in sizes:
        for names in combinations(types, size):
            kept = tuple(n for n, node in enumerate(nodes) if node.device in names)
            yield Part("+".join(names), kept)


def on_part(workload: Workload, part: Part | None) -> Workload:
    """The workload on a part alone."""
    if part is None:
        return workload
    whole = workload.cluster
    return replace(workload, cluster=whole.part(part.nodes, f"{whole.name}: {part.name}"[:200]))


def places_of(numbers: Sequence[int], count: int) -> list[int]:
    """[count] the place of each device in `numbers`; -1 for devices that are not there."""
    places = dict(zip(numbers, range(len(numbers)), strict=True))
    return [places.get(number, -1) for number in range(count)]


def renumbered(plan: Plan, workload: Workload, numbers: Sequence[int]) -> Plan:
    """The plan on the devices of the workload's cluster.

    numbers: of each device of the plan its number in that cluster; below 0 for one that is not in
    it, which the plan does not use.
    """
    shares = None
    if plan.zero_shares is not None:
        shares = [0.0] * len(workload.cluster.devices)
        for number, share in zip(numbers, plan.zero_shares, strict=True):
            if number >= 0:
                shares[number] = share
    replicas = []
    for replica in plan.replicas:
        stages = []
        for stage in replica.stages:
            devices = [[numbers[device] for device in group] for group in stage.devices]
            stages.append(stage.model_copy(update={"devices": devices}))
        replicas.append(replica.model_copy(update={"stages": stages}))
    return plan.model_copy(
        update={
            "name": f"{workload.model.name} on {workload.cluster.name}"[:200],
            "workload": plan.workload.model_copy(update={"cluster": workload.cluster.name}),
            "devices": [PlanDevice(type=d.type, node=d.node) for d in workload.cluster.devices],
            "zero_shares": shares,
            "replicas": replicas,
            "inputs": None,  # those of the plan are not this workload's
        }
    )


def with_recomputation(workload: Workload, mode: Recomputation) -> Workload:
    """The workload as it is under a mode of recomputation.

    Backward passes take the time of what they compute again, layers keep what the mode keeps, and
    the layer at work has the working memory that computing it again needs. A strategy that plans
    this workload as any other one plans with recomputation.
    """
    if mode == "none":
        return workload
    posed = pose(workload, ("none", mode))
    layers = [
        layer.model_copy(
            update={
                "saved_bytes": of_layer.kept[mode].saved_bytes,
                "replicated_saved_bytes": of_layer.kept[mode].replicated_saved_bytes,
            }
        )
        for layer, of_layer in zip(workload.profile.layers, posed.layers, strict=True)
    ]
    measured = [table for table in workload.profile.tables if table.device in posed.types]
    tables = [
        with_repeated_passes(table, of_table, mode)
        for table, of_table in zip(measured, posed.tables, strict=True)
    ]
    fields = {**dict(workload.profile), "layers": layers, "tables": tables}
    return replace(
        workload, profile=Profile(**fields), working_bytes=working_bytes(posed, mode, tables)
    )


def with_repeated_passes(table: ProfileTable, posed: Table, mode: Recomputation) -> ProfileTable:
    """The table with backward passes that repeat the mode's share of forward passes."""
    backward = [
        back + share * forward
        for back, share, forward in zip(
            posed.backward_seconds, posed.repeated[mode], posed.forward_seconds, strict=True
        )
    ]
    return table.model_copy(update={"backward_seconds": backward})


def working_bytes(
    posed: ReplayData, mode: Recomputation, tables: Sequence[ProfileTable]
) -> dict[int, float]:
    """Tensor degree -> bytes that the layer at work needs per sample, of the degrees in the
    tables."""
    costs, all_layers = Costs(posed, mode), (0, len(posed.layers))
    degrees = {1, *(table.tensor for table in tables)}
    return {degree: costs.working_bytes(all_layers, degree) for degree in degrees}


def useful_modes(workload: Workload) -> tuple[Recomputation, ...]:
    """The modes under which this model keeps less than it does without (fused attention has no core
    to repeat)."""
    least = sum(layer.saved_bytes for layer in workload.profile.layers)
    useful: list[Recomputation] = []
    for mode in MODES:
        layers = range(len(workload.profile.layers))
        kept = sum(kept_of(workload, l, mode).saved_bytes for l in layers)
        if kept < least * (1 - 1e-9):
            useful.append(mode)
            least = kept
    return tuple(useful)
