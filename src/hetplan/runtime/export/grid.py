"""What frameworks with equal replicas can say: the plan as a grid of stages, data ranks and tensor
ranks.

Every check names what the framework lacks and what an export without it would lose.
"""

from collections.abc import Iterable, Iterator, Sequence

from hetplan.errors import UnsupportedError, require
from hetplan.formulations.joint.plan import Plan, Replica
from hetplan.profiling.transformer import Transformer
from hetplan.schema import Range
from hetplan.text import comments, grouped, ranges_text


class Grid:
    """A plan as a framework of equal replicas sees it; its figures hold once `check` has passed.

    stages[j]: layer ranges, one per model chunk; widths [stage]: tensor degree. micro_batch:
    samples; count: micro-batches of each data rank. shape: of the model, where it is known.
    """

    def __init__(self, plan: Plan, framework: str, shape: Transformer | None = None) -> None:
        first = plan.replicas[0]
        self.plan, self.framework, self.shape = plan, framework, shape
        self.stages = [stage.layers for stage in first.stages]
        self.widths = [len(stage.devices[0]) for stage in first.stages]
        self.pipeline, self.data = len(self.stages), len(plan.replicas)
        self.chunks = len(self.stages[0])
        self.micro_batch, self.count = first.micro_batches[0].samples, first.steps

    def refuse(self, where: object, lacks: str, lost: str) -> None:
        """Raise UnsupportedError where the plan has what the framework cannot express."""
        require(
            not where,
            f"{self.framework} cannot express {lacks}; what would be lost: {lost}",
            where=self.plan.name,
            expected="a plan without it (other --strategies or --precision), or --to torchrun",
            kind=UnsupportedError,
        )

    def only(self, key: str, known: Sequence[object], lost: str) -> None:
        """Refuse a plan whose `key` (zero, schedule, recomputation, precision) is none of
        `known`."""
        value = getattr(self.plan.workload if key == "precision" else self.plan, key)
        only = ", ".join(map(str, known))
        self.refuse(value not in known, f"{key} {value} (only {only})", lost)

    def check(self) -> None:
        """Refuse a plan whose replicas differ, or whose samples or weights divide unequally."""
        self.refuse(
            self.plan.schedule == "interleaved-1f1b" and (self.chunks == 1) != (self.pipeline == 1),
            "interleaved 1F1B of one stage, or of one chunk",
            "the order of passes",
        )
        for lacks, lost in unequal(self.plan):
            self.refuse(True, lacks, lost)

    @property
    def devices(self) -> list[list[list[int]]]:
        """[stage][data rank][context and tensor rank]."""
        replicas = self.plan.replicas
        return [[r.stages[j].all_devices for r in replicas] for j in range(self.pipeline)]

    @property
    def ranked(self) -> list[int]:
        """Devices by rank where tensor ranks are innermost, then context, data and stages."""
        return [d for stage in self.devices for group in stage for d in group]

    @property
    def virtual_stages(self) -> list[Range]:
        """Layer ranges in the order of the model: chunk 0 of all stages, then chunk 1."""
        return [stage[c] for c in range(self.chunks) for stage in self.stages]

    def equal_width(self) -> int:
        """The tensor degree of all stages; refuses different ones."""
        self.refuse(
            len(set(self.widths)) > 1,
            f"stages of different tensor degrees ({', '.join(map(str, self.widths))})",
            "the stages' widths",
        )
        return self.widths[0]

    def blocks(self) -> int:
        """The number of blocks of a chain embedding, blocks, head; refuses other chains."""
        names = self.plan.workload.layers
        ends = (names[0], names[-1]) == ("embedding", "head")
        self.refuse(
            len(names) < 3 or not ends or self.plan.workload.sequence is None,
            f"layers other than one embedding, blocks and one head ({names[0]} .. {names[-1]})",
            "where each layer goes",
        )
        return len(names) - 2

    def blocks_by_stage(self) -> list[int]:
        """Blocks of each virtual stage."""
        blocks = self.blocks()
        return [len(range(max(a, 1), min(b, blocks + 1))) for a, b in self.virtual_stages]

    def nodes(self) -> list[tuple[int, int]]:
        """(node, ranks) in the order of ranks; refuses ranks that come back to a node, which
        launchers cannot number."""
        node_of = [device.node for device in self.plan.devices]
        order = grouped((node_of[device], rank) for rank, device in enumerate(self.ranked))
        for node, ranks in order.items():
            self.refuse(
                ranks[-1] - ranks[0] >= len(ranks),
                "ranks of one node that are not consecutive "
                f"(node {node} has ranks {ranges_text(ranks)})",
                "the placement of stages and replicas on nodes",
            )
        return [(node, len(ranks)) for node, ranks in order.items()]


def unequal(plan: Plan) -> Iterator[tuple[str, str]]:
    """(what a framework of equal replicas lacks, what would be lost) of everything that is not
    equal."""
    for i, replica in enumerate(plan.replicas):
        for j, stage in enumerate(replica.stages):
            here = f"replicas[{i}].stages[{j}]"
            if len(stage.devices) > 1 and plan.degrees is None:
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
    counts = {replica.steps for replica in plan.replicas}
    for numbers, lacks, takes in (
        (sizes, "micro-batches of different sizes", "device"),
        (counts, "different numbers of micro-batches", "replica"),
    ):
        if len(numbers) > 1:
            yield (
                f"{lacks} ({listed(sorted(numbers))})",
                f"the samples that each {takes} takes by its speed",
            )


def listed(numbers: Iterable[float]) -> str:
    """Numbers with commas."""
    return ", ".join(f"{number:g}" for number in numbers)


def shape_of(replica: Replica) -> list[tuple[list[Range], int]]:
    """Layers and tensor degree of each stage."""
    return [(stage.layers, len(stage.devices[0])) for stage in replica.stages]


def heading(plan: Plan, framework: str, version: str) -> list[str]:
    """Comment lines: what this is, for which version, and what was predicted."""
    lines = [f"{plan.name}, for {framework} ({version})"]
    prediction = plan.prediction
    if prediction is not None and prediction.predicted_seconds is not None:
        lines.append(
            f"by {prediction.strategy}/{prediction.method}, "
            f"{prediction.predicted_seconds:.6g} s per iteration predicted (replayed)"
        )
    return comments(*lines)
