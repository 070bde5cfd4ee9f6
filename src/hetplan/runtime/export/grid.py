"""What frameworks with equal replicas can say: the plan as a grid of stages, data ranks and tensor
ranks.

Every check names what the framework lacks and what an export without it would lose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hetplan.errors import UnsupportedError
from hetplan.runtime.plan import Plan, Replica
from hetplan.schema import Range
from hetplan.text import ranges_text


def refuse(plan: Plan, framework: str, lacks: str, lost: str) -> UnsupportedError:
    """The error for what a framework cannot express."""
    return UnsupportedError(
        f"{framework} cannot express {lacks}; what would be lost: {lost}",
        where=plan.name,
        expected="a plan without it, or --to torchrun",
    )


@dataclass(frozen=True)
class Grid:
    """devices [stage][data rank][tensor rank]; stages[j]: layer ranges, one per model chunk; widths
    [stage]: tensor degree. micro_batch: samples; count: micro-batches of each data rank."""

    devices: list[list[list[int]]]
    stages: list[list[Range]]
    widths: list[int]
    micro_batch: int
    count: int

    @property
    def pipeline(self) -> int:
        """Stages on different devices."""
        return len(self.stages)

    @property
    def data(self) -> int:
        """Replicas."""
        return len(self.devices[0])

    @property
    def chunks(self) -> int:
        """Model chunks of each stage."""
        return len(self.stages[0])

    def virtual_stages(self) -> list[Range]:
        """Layer ranges in the order of the model: chunk 0 of all stages, then chunk 1."""
        return [stage[c] for c in range(self.chunks) for stage in self.stages]

    def ranked(self) -> list[int]:
        """Devices by rank where tensor ranks are innermost, then data ranks, then stages."""
        return [d for stage in self.devices for group in stage for d in group]


def grid_of(plan: Plan, framework: str) -> Grid:
    """The plan as a grid; raises UnsupportedError where replicas differ or samples or weights
    divide unequally."""
    for lacks, lost in unequal(plan):
        raise refuse(plan, framework, lacks, lost)
    first = plan.replicas[0]
    return Grid(
        devices=[[r.stages[j].devices[0] for r in plan.replicas] for j in range(len(first.stages))],
        stages=[stage.layers for stage in first.stages],
        widths=[len(stage.devices[0]) for stage in first.stages],
        micro_batch=first.micro_batches[0].samples,
        count=first.steps,
    )


def unequal(plan: Plan) -> Iterator[tuple[str, str]]:
    """(what a framework of equal replicas lacks, what would be lost) of everything that is not
    equal."""
    for i, replica in enumerate(plan.replicas):
        for j, stage in enumerate(replica.stages):
            here = f"replicas[{i}].stages[{j}]"
            if len(stage.devices) > 1:
                yield (
                    f"row groups within a stage ({here}.devices has {len(stage.devices)})",
                    f"the division of every micro-batch as {listed(stage.row_shares)}",
                )
            if len(set(stage.tensor_shares)) > 1:
                yield (
                    f"unequal tensor shards ({here}.tensor_shares)",
                    f"the division of its weights as {listed(stage.tensor_shares)}",
                )
    if plan.zero_shares is not None and len({plan.zero_shares[d] for d in plan.ranks}) > 1:
        yield "unequal ZeRO shards (zero_shares)", "shards by each device's memory"
    for i, replica in enumerate(plan.replicas):
        if shape_of(replica) != shape_of(plan.replicas[0]):
            yield (
                f"replicas with different stages (replicas[{i}] and replicas[0])",
                f"the cut of replicas[{i}] into {len(replica.stages)} stages of its own",
            )
    sizes = {batch.samples for replica in plan.replicas for batch in replica.micro_batches}
    if len(sizes) > 1:
        yield (
            f"micro-batches of different sizes ({listed(sorted(sizes))})",
            "the samples that each device takes by its speed",
        )
    counts = {replica.steps for replica in plan.replicas}
    if len(counts) > 1:
        yield (
            f"different numbers of micro-batches ({listed(sorted(counts))})",
            "the samples that each replica takes by its speed",
        )


def listed(numbers: Iterable[float]) -> str:
    """Numbers with commas."""
    return ", ".join(f"{number:g}" for number in numbers)


def shape_of(replica: Replica) -> list[tuple[tuple[Range, ...], int]]:
    """Layers and tensor degree of each stage."""
    return [(tuple(stage.layers), len(stage.devices[0])) for stage in replica.stages]


def equal_widths(plan: Plan, grid: Grid, framework: str) -> int:
    """The tensor degree of all stages."""
    if len(set(grid.widths)) > 1:
        widths = ", ".join(map(str, grid.widths))
        raise refuse(
            plan, framework, f"stages of different tensor degrees ({widths})", "the stages' widths"
        )
    return grid.widths[0]


def only(plan: Plan, framework: str, key: str, known: Sequence[object], lost: str) -> None:
    """Refuse a plan whose `key` (zero, schedule, recomputation, precision) is none of `known`."""
    value = plan.workload.precision if key == "precision" else getattr(plan, key)
    if value not in known:
        listed = ", ".join(map(str, known))
        raise refuse(plan, framework, f"{key} {value} (only {listed})", lost)


def blocks_of(plan: Plan, framework: str) -> int:
    """The number of blocks of a chain embedding, blocks, head; refuses other chains."""
    names = plan.workload.layers
    if (
        len(names) < 3
        or names[0] != "embedding"
        or names[-1] != "head"
        or plan.workload.sequence is None
    ):
        raise refuse(
            plan,
            framework,
            f"layers other than one embedding, blocks and one head ({names[0]} .. {names[-1]})",
            "where each layer goes",
        )
    return len(names) - 2


def node_order(plan: Plan, devices: Sequence[int], framework: str) -> list[tuple[int, int]]:
    """(node, ranks) in the order of ranks; refuses ranks that come back to a node, which launchers
    cannot number."""
    order: list[tuple[int, int]] = []
    for device in devices:
        node = plan.devices[device].node
        if order and order[-1][0] == node:
            order[-1] = (node, order[-1][1] + 1)
            continue
        if any(node == other for other, _ in order):
            own = ranges_text(r for r, d in enumerate(devices) if plan.devices[d].node == node)
            raise refuse(
                plan,
                framework,
                f"ranks of one node that are not consecutive (node {node} has ranks {own})",
                "the placement of stages and replicas on nodes",
            )
        order.append((node, 1))
    return order


def local_number(plan: Plan, device: int) -> int:
    """The device's number within its node."""
    node = plan.devices[device].node
    return sum(other.node == node for other in plan.devices[:device])


def heading(plan: Plan, framework: str, version: str) -> list[str]:
    """Comment lines, without the comment sign: what this is, for which version, and what was
    predicted."""
    prediction = plan.prediction
    lines = [f"{one_line(plan.name)}, for {framework} ({version})"]
    if prediction is not None and prediction.predicted_seconds is not None:
        lines.append(
            f"by {prediction.strategy}/{prediction.method}, "
            f"{prediction.predicted_seconds:.6g} s per iteration predicted (replayed)"
        )
    return lines


def one_line(text: str) -> str:
    """Free text of a plan file, safe within a comment."""
    return "".join(c if c.isprintable() else " " for c in text)
