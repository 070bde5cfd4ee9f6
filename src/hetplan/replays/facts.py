"""Sizes of a transformer for cost formulas that describe a model as an embedding, equal blocks and
a head.

`ModelFacts` reads the sizes from the model's chain of layers. Blocks that differ, such as blocks
with and without experts, become an average block, whose parameters, bytes and collectives are the
means over all blocks.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hetplan.errors import UnsupportedError
from hetplan.profiling.models.model import Model
from hetplan.profiling.models.operators import BLOCKS, ELEMENT_BYTES, Layer, Matmul, Precision
from hetplan.profiling.models.transformer import Cut, Transformer, transformer_layers
from hetplan.profiling.rates.times import CORE_SAVED
from hetplan.profiling.workload import Workload
from hetplan.replays.arrays import Ints
from hetplan.replays.memory import EXPERT_PRODUCTS, saved_bytes_of


class SavedBytes(NamedTuple):
    """Bytes per sample that a block keeps for its backward pass."""

    divided: float  # bytes of tensors that tensor ranks divide
    whole: float  # bytes of tensors that every tensor rank has whole
    # the part of `divided` that attention's core keeps; selective recomputation frees it
    core: float


class FrozenBytes(NamedTuple):
    """Bytes in which the frozen weights of a layer are held."""

    dense: float
    experts: float  # of experts, which expert parallelism divides


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of one model at one sequence length and precision, or of one rank's part of it."""

    model: Model  # the whole model
    shape: Transformer  # sizes of the blocks
    embedding: Layer  # the first layer of the chain
    blocks: tuple[Layer, ...]  # all layers between embedding and head
    head: Layer  # the last layer of the chain

    def divided(self, cut: Cut) -> "ModelFacts":
        """The facts of one rank's part of the model under a cut. Only text models can be cut."""
        if cut not in self._parts:
            layers = transformer_layers(replace(self.shape, cut=cut), self.sequence)
            embedding, *blocks, head = layers
            part = replace(self, embedding=embedding, blocks=tuple(blocks), head=head)
            self._parts[cut] = part
        return self._parts[cut]

    @cached_property
    def _parts(self) -> "dict[Cut, ModelFacts]":
        """Cut -> the facts of one rank's part, as far as `divided` has computed them."""
        return {Cut(): self}

    @property
    def precision(self) -> Precision:
        """Training precision."""
        return self.model.precision

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def sequence(self) -> int:
        """Tokens per sample."""
        return self.model.tokens_per_sample

    @cached_property
    def different_blocks(self) -> list[tuple[Layer, float]]:
        """(block, share of the blocks that have equal operators), once for each list of
        operators."""
        block_with = {block.operators: block for block in self.blocks}
        count = Counter(block.operators for block in self.blocks)
        return [(block, count[block.operators] / self.layers) for block in block_with.values()]

    @cached_property
    def kinds_before(self) -> Ints:
        """[kinds, N + 1] number of blocks of each of `different_blocks` among the first n."""
        kinds = [block.operators for block, _ in self.different_blocks]
        is_of_kind = np.array([[block.operators == k for block in self.blocks] for k in kinds])
        before = np.zeros((len(kinds), self.layers + 1), dtype=np.int64)
        np.cumsum(is_of_kind, axis=1, out=before[:, 1:])
        return before

    @cached_property
    def most_of_kinds(self) -> Ints:
        """[kinds, N + 1] the most blocks of each of `different_blocks` among n that follow one
        another."""
        before, lengths = self.kinds_before, range(self.layers + 1)
        most = [(before[:, n:] - before[:, : self.layers + 1 - n]).max(axis=1) for n in lengths]
        return np.stack(most, axis=1)

    @cached_property
    def block_params(self) -> float:
        """Trained parameters of an average block, which have gradients and optimizer states."""
        return sum(block.trained for block in self.blocks) / self.layers

    @cached_property
    def frozen(self) -> FrozenBytes:
        """Bytes of the frozen weights of an average block."""
        each = [frozen_bytes_of(block, self.precision) for block in self.blocks]
        return FrozenBytes(
            dense=sum(block.dense for block in each) / self.layers,
            experts=sum(block.experts for block in each) / self.layers,
        )

    @cached_property
    def tensor_collectives(self) -> float:
        """Number of collectives of tensor ranks in one pass of an average block; both passes have
        equally many."""
        return sum(len(block.reduces) for block in self.blocks) / (2 * self.layers)

    @cached_property
    def expert_params(self) -> float:
        """Trained parameters of experts in an average block, which expert parallelism divides."""
        return sum(map(expert_params_of, self.blocks)) / self.layers

    @property
    def has_experts(self) -> bool:
        """Whether some block has experts."""
        return self.expert_params > 0 or self.frozen.experts > 0

    @cached_property
    def dispatched_bytes(self) -> float:
        """Bytes per sample of one token dispatch of an average block; 0 without experts."""
        experts = self.shape.experts
        if experts is None:
            return 0.0
        share_with_experts = sum(block.kind == "moe-block" for block in self.blocks) / self.layers
        token_bytes = (experts.latent or self.shape.hidden) * ELEMENT_BYTES[self.precision]
        return share_with_experts * experts.rows(self.sequence) * token_bytes

    @cached_property
    def saved(self) -> SavedBytes:
        """Bytes per sample that an average block keeps for its backward pass."""
        divided = whole = core = 0.0
        for block in self.blocks:
            for tensor in block.saved:
                size = tensor.size(self.precision) / self.layers
                if tensor.split:
                    divided += size
                else:
                    whole += size
                if tensor.name in CORE_SAVED:
                    core += size
        return SavedBytes(divided, whole, core)

    def tensor_bytes(self, name: str) -> float:
        """Bytes per sample that an average block keeps of the `Saved` tensor called `name`."""
        each_block = (saved_bytes_of(block, name, self.precision) for block in self.blocks)
        return sum(each_block) / self.layers

    def attention_bytes(self, heads: int) -> float:
        """Bytes per sample of the keys and values of `heads` heads. The queries and outputs of that
        number of heads have equally many bytes."""
        width = self.shape.head_dim + self.shape.value_dim
        return float(self.sequence * heads * width * ELEMENT_BYTES[self.precision])

    @property
    def boundary_bytes(self) -> float:
        """Bytes per sample of a block's output, which is equally large in all blocks. A stage sends
        them to the next one, and full recomputation keeps them."""
        return float(self.blocks[0].output * ELEMENT_BYTES[self.precision])


def expert_params_of(layer: Layer, *, frozen: bool = False) -> float:
    """Trained parameters of all experts of a layer, or the frozen ones."""
    params: float = 0
    for op in layer.operators:
        if isinstance(op, Matmul) and op.name in EXPERT_PRODUCTS and op.frozen == frozen:
            params += op.count * op.k * op.n
    return params


def frozen_bytes_of(layer: Layer, precision: Precision) -> FrozenBytes:
    """Bytes in which a layer holds its frozen weights. All weights that are held in fewer bits have
    equally many."""
    each = float(ELEMENT_BYTES[precision])
    if layer.quantised:
        each = layer.quantised_bytes / layer.quantised
    experts = each * expert_params_of(layer, frozen=True)
    return FrozenBytes(layer.frozen_bytes(precision) - experts, experts)


def model_facts(model: Model) -> ModelFacts:
    """The facts of a transformer. Raises UnsupportedError for any other chain of layers, which has
    no attention heads to divide."""
    chain = model.layers
    shape = model.spec.shape or model.spec.encoder
    blocks = tuple(layer for layer in chain if layer.kind in BLOCKS)
    if shape is None or chain[1:-1] != blocks:
        raise UnsupportedError(
            "the search takes transformers: an embedding, blocks, a head",
            where=model.name,
            got=", ".join(dict.fromkeys(layer.kind for layer in chain)),
            expected="a language model; `hetplan plan` has strategies for other chains",
        )
    return ModelFacts(model, shape, embedding=chain[0], blocks=blocks, head=chain[-1])


def facts_of(workload: Workload) -> ModelFacts:
    """The facts of the workload's model; the workload caches them."""
    return workload.answers.once(ModelFacts, lambda: model_facts(workload.model))
