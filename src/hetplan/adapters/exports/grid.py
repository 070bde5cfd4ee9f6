"""Views a plan as a grid of stages, data ranks and tensor ranks, for exports to frameworks whose
replicas are all alike.

A check that refuses a plan raises UnsupportedError. The message names the feature that the
framework lacks, and the part of the plan that an export without it would lose.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from hetplan.errors import UnsupportedError, require
from hetplan.plans.plan import Plan, Replica
from hetplan.profiling.models.transformer import Transformer
from hetplan.schema import Range
from hetplan.text import comments, grouped, ranges_text


class Grid:
    """A plan as a framework of equal replicas sees it.

    The figures describe the first replica. They hold for all replicas once `check` has passed.
    """

    plan: Plan
    framework: str
    """The framework's name, for messages."""
    shape: Transformer | None
    """The model's shape, None where it is unknown."""
    missing: str | None
    """Why the model's own settings are not written; None: they are."""
    stages: list[list[Range]]
    """[stage][model chunk] layers [first, last)."""
    widths: list[int]
    """[stage] tensor degree."""
    pipeline: int
    """Number of stages of a replica, without model chunks."""
    data: int
    """Number of data ranks."""
    chunks: int
    """Number of model chunks of a stage."""
    micro_batch: int
    """Samples of a micro-batch of one data rank."""
    micro_batches: int
    """Number of micro-batches of each data rank."""

    def __init__(
        self, plan: Plan, framework: str, shape: Transformer | None = None, *, model: bool = True
    ) -> None:
        """model: whether the model's own settings are to be written where they are known."""
        first = plan.replicas[0]
        self.plan = plan
        self.framework = framework
        self.shape = shape
        self.missing = None
        if not model:
            self.missing = "The arguments of the model are left to you."
        elif shape is None:
            self.missing = (
                f"The arguments of the model are left to you: {plan.workload.model} is not known. "
                "--model FILE names its configuration."
            )
        elif shape.function is None:
            self.missing = (
                "The arguments of the model are left to you: of its type hetplan knows the sizes, "
                "not what it computes beyond them."
            )
        self.stages = [stage.layers for stage in first.stages]
        self.widths = [len(stage.devices[0]) for stage in first.stages]
        self.pipeline = len(self.stages)
        self.data = len(plan.replicas)
        self.chunks = len(self.stages[0])
        self.micro_batch = first.micro_batches[0].samples
        self.micro_batches = first.steps

    @property
    def writes_model(self) -> bool:
        """Whether the model's own settings are written."""
        return self.missing is None

    def refuse(
        self,
        present: object,
        lacks: str,
        lost: str,
        expected: str = "a plan without it (other --strategies or --precision), or --to torchrun",
    ) -> None:
        """Raise UnsupportedError where the plan has a feature that the framework cannot express.

        present: a truth value, whether the plan has the feature. lacks: the feature, for the
        message. lost: the part of the plan that an export without it would lose. expected: the
        remedy, for the message.
        """
        require(
            not present,
            f"{self.framework} cannot express {lacks}; what would be lost: {lost}",
            where=self.plan.name,
            expected=expected,
            kind=UnsupportedError,
        )

    def only(
        self,
        field: Literal["zero", "schedule", "recomputation", "precision"],
        allowed: Sequence[object],
        lost: str,
    ) -> None:
        """Refuse a plan whose `field` has none of the allowed values.

        lost: the part of the plan that an export would lose.
        """
        source = self.plan.workload if field == "precision" else self.plan
        value = getattr(source, field)
        choices = ", ".join(map(str, allowed))
        self.refuse(value not in allowed, f"{field} {value} (only {choices})", lost)

    def check(self) -> None:
        """Refuse a plan whose replicas differ, or whose samples or weights divide unequally."""
        # Of one stage with one chunk, every schedule is the same.
        one_chunk, one_stage = self.chunks == 1, self.pipeline == 1
        self.refuse(
            self.plan.schedule == "interleaved-1f1b" and one_chunk != one_stage,
            "interleaved 1F1B of one stage, or of one chunk",
            "the order of passes",
        )
        for lacks, lost in unequal(self.plan):
            self.refuse(True, lacks, lost)

    @property
    def devices(self) -> list[list[list[int]]]:
        """[stage][data rank][context and tensor rank] number of the device."""
        return [
            [replica.stages[j].all_devices for replica in self.plan.replicas]
            for j in range(self.pipeline)
        ]

    @property
    def devices_by_rank(self) -> list[int]:
        """[rank] device; tensor ranks are innermost, then context ranks, data ranks and stages."""
        return [device for stage in self.devices for group in stage for device in group]

    @property
    def virtual_stages(self) -> list[Range]:
        """[virtual stage] layers [first, last), in the order of the model."""
        return sorted(layers for stage in self.stages for layers in stage)

    def equal_width(self) -> int:
        """The tensor degree of all stages. Refuses a plan whose stages have different degrees."""
        self.refuse(
            len(set(self.widths)) > 1,
            f"stages of different tensor degrees ({', '.join(map(str, self.widths))})",
            "the stages' widths",
        )
        return self.widths[0]

    def blocks(self) -> int:
        """The model's number of blocks. Refuses a model whose layers are not one embedding, blocks
        and one head."""
        names = self.plan.workload.layers
        is_text_model = (
            len(names) >= 3
            and names[0] == "embedding"
            and names[-1] == "head"
            and self.plan.workload.sequence is not None
        )
        self.refuse(
            not is_text_model,
            f"layers other than one embedding, blocks and one head ({names[0]} .. {names[-1]})",
            "where each layer goes",
        )
        return len(names) - 2

    def blocks_by_stage(self) -> list[int]:
        """[virtual stage] number of blocks."""
        last_block = self.blocks()  # layer 0 is the embedding
        counts = []
        for first, last in self.virtual_stages:
            blocks = range(max(first, 1), min(last, last_block + 1))  # empty: `len` gives 0
            counts.append(len(blocks))
        return counts

    def nodes(self) -> list[tuple[int, int]]:
        """(node, number of ranks) in the order of ranks. Refuses a plan where the ranks of a node
        are not consecutive, which launchers cannot number."""
        devices = self.plan.devices
        ranks_of_node = grouped(
            (devices[device].node, rank) for rank, device in enumerate(self.devices_by_rank)
        )
        for node, ranks in ranks_of_node.items():
            consecutive = ranks[-1] - ranks[0] < len(ranks)  # `grouped` keeps ranks ascending
            self.refuse(
                not consecutive,
                "ranks of one node that are not consecutive "
                f"(node {node} has ranks {ranges_text(ranks)})",
                "the placement of stages and replicas on nodes",
            )
        return [(node, len(ranks)) for node, ranks in ranks_of_node.items()]


def unequal(plan: Plan) -> Iterator[tuple[str, str]]:
    """Every feature of a plan that makes its replicas or ranks unequal, as (lacks, lost).

    `lacks` and `lost` are texts for `Grid.refuse`.
    """
    for i, replica in enumerate(plan.replicas):
        for j, stage in enumerate(replica.stages):
            here = f"replicas[{i}].stages[{j}]"
            # Row groups divide the samples of a micro-batch. In a plan with degrees they are the
            # context ranks, which frameworks can express.
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
    if plan.zero_shares is not None:
        shares_in_use = {plan.zero_shares[device] for device in plan.ranks}
        if len(shares_in_use) > 1:
            yield "unequal ZeRO shards (zero_shares)", "shards by each device's memory"
    for i, replica in enumerate(plan.replicas):
        if stage_shapes(replica) != stage_shapes(plan.replicas[0]):
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
    """The numbers as text, separated by commas."""
    return ", ".join(f"{number:g}" for number in numbers)


def stage_shapes(replica: Replica) -> list[tuple[list[Range], int]]:
    """[stage] (layers [first, last) of each model chunk, tensor degree) of a replica."""
    return [(stage.layers, len(stage.devices[0])) for stage in replica.stages]


def heading(plan: Plan, framework: str, version: str) -> list[str]:
    """Comment lines at the top of an exported file: the plan, the framework and its version, and
    the predicted seconds."""
    lines = [f"{plan.name}, for {framework} ({version})"]
    prediction = plan.prediction
    if prediction is not None and prediction.predicted_seconds is not None:
        lines.append(
            f"by {prediction.strategy}/{prediction.method}, "
            f"{prediction.predicted_seconds:.6g} s per iteration predicted (replayed)"
        )
    return comments(*lines)
