"""A variant: the choices that are made outside a strategy, namely recomputation, precision and part
of the cluster. What is solved and replayed is a strategy in a variant.

A strategy knows nothing of variants: it poses whatever workload it is given. For recomputation it
is given a profile whose backward passes include what is computed again and whose layers keep less,
so that what it decides and proves holds for recomputation. For a part of the cluster it is given
that part as a cluster. Its plans then leave the other devices idle, and only devices in use are
paid for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hetplan.formulations.joint.costs import Costs
from hetplan.formulations.joint.plan import Plan, PlanDevice, Recomputation
from hetplan.formulations.joint.pose import kept_of, pose
from hetplan.profiling.operators import Precision
from hetplan.profiling.profile import Profile
from hetplan.profiling.workload import Workload

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
        """What it adds to a method's name: `+full+bf16@T4`; nothing where it is plain."""
        mode = None if self.recomputation == "none" else self.recomputation
        axes = "".join(f"+{axis}" for axis in (mode, self.precision) if axis)
        return f"{axes}@{self.part.name}" if self.part and self.part.name else axes

    def marked(self, plan: Plan) -> Plan:
        """The plan of a strategy that posed the workload in this variant."""
        if self.recomputation == "none":
            return plan
        origin = f"{plan.origin}+{self.recomputation}"
        return plan.model_copy(update={"recomputation": self.recomputation, "origin": origin})


PLAIN = Variant()


def parts_of_cluster(workload: Workload) -> Iterator[Part]:
    """Every part of the cluster by device types but the whole, smaller ones first.

    Every subset of at most six types; of more types one, two, or all but one.
    """
    types, nodes = workload.cluster.types, workload.cluster.nodes
    few = len(types) <= MOST_TYPES
    for size in range(1, len(types)) if few else (1, 2, len(types) - 1):
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
    """Of each of `count` devices its place in `numbers`, -1 where it is not there."""
    places = dict(zip(numbers, range(len(numbers)), strict=True))
    return [places.get(number, -1) for number in range(count)]


def renumbered(plan: Plan, workload: Workload, numbers: Sequence[int]) -> Plan:
    """The plan with the devices of the workload's cluster.

    numbers: of each of the plan's devices its number there, below 0 for one that is not there and
    that the plan does not use.
    """
    shares = None
    if plan.zero_shares is not None:
        shares = [0.0] * len(workload.cluster.devices)
        for number, share in zip(numbers, plan.zero_shares, strict=True):
            if number >= 0:
                shares[number] = share
    replicas = [
        replica.model_copy(
            update={
                "stages": [
                    stage.model_copy(
                        update={"devices": [[numbers[d] for d in group] for group in stage.devices]}
                    )
                    for stage in replica.stages
                ]
            }
        )
        for replica in plan.replicas
    ]
    return plan.model_copy(
        update={
            "name": f"{workload.model.name} on {workload.cluster.name}"[:200],
            "workload": plan.workload.model_copy(update={"cluster": workload.cluster.name}),
            "devices": [PlanDevice(type=d.type, node=d.node) for d in workload.cluster.devices],
            "zero_shares": shares,
            "replicas": replicas,
        }
    )


def recomputed(workload: Workload, mode: Recomputation) -> Workload:
    """The workload with `mode` in its layers' times and in what they keep, and with the memory of
    the layer at work."""
    if mode == "none":
        return workload
    profile, data = workload.profile, pose(workload, ("none", mode))
    layers = [
        layer.model_copy(
            update={
                "saved_bytes": posed.kept[mode].saved_bytes,
                "replicated_saved_bytes": posed.kept[mode].replicated_saved_bytes,
            }
        )
        for layer, posed in zip(profile.layers, data.layers, strict=True)
    ]
    tables = []
    before = (table for table in profile.tables if table.device in data.types)
    for at, table in zip(data.tables, before, strict=True):
        passes = zip(at.backward_seconds, at.repeated[mode], at.forward_seconds, strict=True)
        backward = [back + share * forward for back, share, forward in passes]
        tables.append(table.model_copy(update={"backward_seconds": backward}))
    costs, every = Costs(data, mode), (0, len(layers))
    working = {t: costs.working_bytes(every, t) for t in {1, *(table.tensor for table in tables)}}
    changed = {**dict(profile), "layers": layers, "tables": tables}
    return replace(workload, profile=Profile(**changed), working_bytes=working)


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
