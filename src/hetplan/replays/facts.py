"""A transformer as closed forms see it: one kind of block between an embedding and a head.

Read from the layer chain, so that built-in models and configuration files serve alike. Blocks that
differ (experts in every second one) are averaged in time, parameters and activations.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from hetplan.errors import UnsupportedError
from hetplan.profiling.models.model import Model
from hetplan.profiling.models.operators import BLOCKS, ELEMENT_BYTES, Layer, Matmul, Precision
from hetplan.profiling.models.transformer import Cut, Transformer, transformer_layers
from hetplan.profiling.rates.times import CORE_SAVED
from hetplan.profiling.workload import Workload
from hetplan.replays.memory import saved_bytes_of


@dataclass(frozen=True)
class ModelFacts:
    """Figures of one model at one sequence length and precision.

    shape: of its blocks. blocks: the chain's blocks (N of them); first, last: embedding and head;
    the rest of the chain has neither.
    """

    model: Model
    shape: Transformer
    blocks: tuple[Layer, ...]
    first: Layer
    last: Layer

    def divided(self, cut: Cut) -> "ModelFacts":
        """The facts of one rank's part of a cut; shapes of text models alone can be cut."""
        if cut not in self.parts:
            first, *blocks, last = transformer_layers(replace(self.shape, cut=cut), self.sequence)
            self.parts[cut] = replace(self, blocks=tuple(blocks), first=first, last=last)
        return self.parts[cut]

    @cached_property
    def parts(self) -> "dict[Cut, ModelFacts]":
        """Answers of `divided`."""
        return {Cut(): self}

    @property
    def precision(self) -> Precision:
        """Training precision."""
        return self.model.precision

    @property
    def layers(self) -> int:
        """N: transformer layers."""
        return len(self.blocks)

    @property
    def sequence(self) -> int:
        """Tokens per sample."""
        return self.model.tokens_per_sample

    @cached_property
    def different_blocks(self) -> list[tuple[Layer, float]]:
        """Blocks that differ in their operators, each with its share of all blocks."""
        kinds = {block.operators: block for block in self.blocks}
        count = Counter(block.operators for block in self.blocks)
        return [(block, count[kind] / self.layers) for kind, block in kinds.items()]

    @cached_property
    def block_params(self) -> float:
        """Parameters of an average block."""
        return sum(block.params for block in self.blocks) / self.layers

    @cached_property
    def trained(self) -> float:
        """The share of the blocks' parameters that has gradients and optimizer states; of adapters
        a small one, which stands for embedding and head, too."""
        frozen = sum(block.frozen for block in self.blocks) / self.layers
        return 1 - frozen / self.block_params

    @cached_property
    def joins(self) -> float:
        """Collectives of tensor ranks in one pass of an average block."""
        return sum(len(block.reduces) for block in self.blocks) / (2 * self.layers)

    @cached_property
    def expert_params(self) -> float:
        """The part of `block_params` that belongs to experts, and is divided by expert
        parallelism."""
        return sum(map(expert_params_of, self.blocks)) / self.layers

    @cached_property
    def dispatched_bytes(self) -> float:
        """Bytes per sample of one token dispatch of an average block (0 without experts)."""
        if self.shape.experts is None:
            return 0.0
        share = sum(block.kind == "moe-block" for block in self.blocks) / self.layers
        token = (self.shape.experts.latent or self.shape.hidden) * ELEMENT_BYTES[self.precision]
        return share * self.shape.experts.rows(self.sequence) * token

    @cached_property
    def saved(self) -> tuple[float, float, float]:
        """Bytes per sample kept by an average block: (divided by tensor parallelism, not divided,
        core).

        The core's tensors (part of the first figure) are what selective recomputation frees.
        """
        split = whole = core = 0.0
        for block in self.blocks:
            for tensor in block.saved:
                size = tensor.size(self.precision) / self.layers
                split, whole = (split + size, whole) if tensor.split else (split, whole + size)
                core += size if tensor.name in CORE_SAVED else 0.0
        return split, whole, core

    def kept(self, name: str) -> float:
        """Bytes per sample that an average block keeps of one tensor."""
        each = (saved_bytes_of(block, name, self.precision) for block in self.blocks)
        return sum(each) / self.layers

    def head_bytes(self, heads: int) -> float:
        """Bytes per sample of keys and values, or queries and outputs, of so many heads."""
        width = self.shape.head_dim + self.shape.value_dim
        return float(self.sequence * heads * width * ELEMENT_BYTES[self.precision])

    @property
    def boundary_bytes(self) -> float:
        """Bytes per sample between two blocks: what a stage sends on, and what full recomputation
        keeps."""
        return float(self.blocks[0].output * ELEMENT_BYTES[self.precision])


def expert_params_of(layer: Layer) -> float:
    """Parameters of all experts of a layer."""
    return sum(
        op.count * op.k * op.n
        for op in layer.operators
        if isinstance(op, Matmul) and op.name in ("experts-up", "experts-down")
    )


def model_facts(model: Model) -> ModelFacts:
    """The facts of a transformer; raises UnsupportedError for any other chain (it has no heads to
    split)."""
    chain, shape = model.layers, model.spec.shape or model.spec.encoder
    blocks = tuple(layer for layer in chain if layer.kind in BLOCKS)
    if shape is None or chain[1:-1] != blocks:
        raise UnsupportedError(
            "the search takes transformers: an embedding, blocks, a head",
            where=model.name,
            got=", ".join(dict.fromkeys(layer.kind for layer in chain)),
            expected="a language model; `hetplan plan` has strategies for other chains",
        )
    return ModelFacts(model, shape, blocks, chain[0], chain[-1])


def facts_of(workload: Workload) -> ModelFacts:
    """The facts of the workload's model: gathered once, kept with the workload."""
    return workload.answers.once(ModelFacts, lambda: model_facts(workload.model))
