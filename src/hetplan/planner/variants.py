"""Variants: the choices of recomputation, precision and part of the cluster, which are made outside
the strategies. Each strategy is searched in several variants.

A strategy does not know its variant. Under recomputation it gets the workload of
`with_recomputation`, and on a part of the cluster that of `on_part`, so that its plans and bounds
hold in the variant. Plans on a part leave the other devices idle, and only devices in use cost
money.
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

MODES: tuple[Recomputation, ...] = ("selective", "full")  # modes of recomputation that are tried
# Most device types of a cluster of which all combinations are parts to search. 6 types have 62 such
# parts, each of which is searched by every strategy; the number doubles with every further type.
MOST_TYPES = 6


@dataclass(frozen=True)
class Part:
    """A part of a cluster."""

    name: str  # follows `@` in the names of the candidates on the part
    nodes: tuple[int, ...]  # numbers of the nodes


@dataclass(frozen=True)
class Variant:
    """One variant. By default it changes nothing (`PLAIN`)."""

    recomputation: Recomputation = "none"
    precision: Precision | None = None  # None where only one precision is planned
    part: Part | None = None  # None: the whole cluster

    @property
    def label(self) -> str:
        """The text that follows a method's name: `+full+bf16@T4`; empty for the plain variant."""
        label = ""
        if self.recomputation != "none":
            label += f"+{self.recomputation}"
        if self.precision:
            label += f"+{self.precision}"
        if self.part and self.part.name:
            label += f"@{self.part.name}"
        return label

    def marked(self, plan: Plan) -> Plan:
        """A strategy's plan with the variant's mode of recomputation, also in its origin."""
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
    """The parts of the cluster that are searched, those of the fewest device types first. A part
    has all nodes of some device types.

    On a cluster of at most MOST_TYPES types every combination of types but all of them is a part.
    On one of more types, every part has one type, two types, or all types but one.
    """
    types, nodes = workload.cluster.types, workload.cluster.nodes
    sizes: Sequence[int] = range(1, len(types))
    if len(types) > MOST_TYPES:
        sizes = (1, 2, len(types) - 1)
    for size in sizes:
        for names in combinations(types, size):
            of_types = tuple(n for n, node in enumerate(nodes) if node.device in names)
            yield Part("+".join(names), of_types)


def on_part(workload: Workload, part: Part | None) -> Workload:
    """The workload with a part of its cluster as the cluster; itself for None."""
    if part is None:
        return workload
    whole = workload.cluster
    name = f"{whole.name}: {part.name}"[:200]  # as long as a name in a file may be (`schema.Name`)
    return replace(workload, cluster=whole.part(part.nodes, name))


def places_of(numbers: Sequence[int], count: int) -> list[int]:
    """[count] the index of each device in `numbers`; -1 for devices that are not in it."""
    places = dict(zip(numbers, range(len(numbers)), strict=True))
    return [places.get(number, -1) for number in range(count)]


def renumbered(plan: Plan, workload: Workload, numbers: Sequence[int]) -> Plan:
    """The plan of another cluster, with devices of the workload's cluster.

    numbers: [device of the plan] its number in the workload's cluster; below 0 for a device that
    has none, which the plan must not use.
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
    """The workload under a mode of recomputation.

    Its backward passes include the time of recomputation, its layers keep what the mode keeps, and
    its `working_bytes` are the memory that the recomputation of one layer takes. A strategy needs
    no knowledge of recomputation to plan it.
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
    # the tables that `pose` takes over, in the same order
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
    """The profile's table with backward passes that include the recomputed share of the forward
    passes. posed: the same table in the data of the replay."""
    layers = zip(posed.backward_seconds, posed.repeated[mode], posed.forward_seconds, strict=True)
    with_repeated = [backward + share * forward for backward, share, forward in layers]
    return table.model_copy(update={"backward_seconds": with_repeated})


def working_bytes(
    posed: ReplayData, mode: Recomputation, tables: Sequence[ProfileTable]
) -> dict[int, float]:
    """Tensor degree -> bytes per sample that the recomputation of one layer takes. The degrees are
    1, which strategies always ask for, and those of the tables."""
    costs = Costs(posed, mode)
    all_layers = (0, len(posed.layers))
    degrees = {1, *(table.tensor for table in tables)}
    return {degree: costs.working_bytes(all_layers, degree) for degree in degrees}


def useful_modes(workload: Workload) -> tuple[Recomputation, ...]:
    """The modes of recomputation under which the model keeps fewer bytes than under all modes
    before them. Fused attention, for example, has no core that `selective` could recompute."""
    least = sum(layer.saved_bytes for layer in workload.profile.layers)
    layers = range(len(workload.profile.layers))
    useful: list[Recomputation] = []
    for mode in MODES:
        kept = sum(kept_of(workload, l, mode).saved_bytes for l in layers)
        if kept < least * (1 - 1e-9):  # by more than the rounding of sums
            useful.append(mode)
            least = kept
    return tuple(useful)
