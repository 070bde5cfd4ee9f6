"""The memory of training frameworks on every device: model states, and all that they hold besides.

Nothing here is fitted to measured totals. Every figure is the framework's documented default or
stands in its source code, as `origin` says. PyTorch's allocator
(`torch.cuda.max_memory_allocated`) counts all of it but `context_bytes` and the communicators.
"""

from typing import Annotated, Generic, Literal, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Strict

from hetplan.errors import look_up, unknown_name
from hetplan.profiling.hardware.cluster import GIB
from hetplan.profiling.rates.times import Recomputation
from hetplan.schema import Count, Name, NonNegative, StrictModel

# CUDA context, libraries' workspaces and NCCL's buffers: one to two GiB before the first tensor.
RESERVED_BYTES = 1.5 * GIB
FP32_BYTES = 4
# Of a moment in 8 bits: one byte, and its part of a scale in 32 bits for 256 moments (Dettmers et
# al. 2022, "8-bit Optimizers via Block-wise Quantization"; bitsandbytes, `optim/optimizer.py`).
MOMENT_BYTES_IN_8_BITS = 1 + 4 / 256

# JSON has no tuples, so that lists are accepted.
Levels = Annotated[tuple[Count, ...], Strict(False)]
Modes = Annotated[tuple[Recomputation, ...], Strict(False)]

# bytes on one device, or an array of bytes for many strategies
Size = TypeVar("Size", float, NDArray[np.float64])


def at_most(size: Size, limit: float) -> Size:
    """The smaller one of the size and the limit, for a number and for an array."""
    within = size <= limit  # counts as 1 or 0
    return size * within + limit * (1 - within)


class Loss(NamedTuple):
    """The bytes of a logit at its loss."""

    whole: float  # where each rank has all logits
    divided: float  # where tensor ranks divide the logits
    origin: str  # the source of the figures


LOSSES = {
    "eager": Loss(
        12,
        16,
        "torch's cross-entropy of logits.float(): log-softmax, its gradient and the loss's, fp32 "
        "each; one more where tensor ranks compute the loss "
        "(torch/distributed/tensor/parallel/loss.py)",
    ),
    "compiled": Loss(
        4,
        16,
        "torch.compile of the same loss: 16-bit logits and their gradient. The loss over tensor "
        "ranks is a handler of DTensor, which is not compiled",
    ),
    "native": Loss(
        6,
        14,
        "Megatron-LM's fused loss: logits in 16 bits, and an fp32 copy that becomes softmax and "
        "gradient in place; compiled for tensor ranks, it writes exponentials and gradient to "
        "buffers of their own (core/fusions/fused_cross_entropy.py, which says so of Inductor)",
    ),
    "te": Loss(
        6,
        6,
        "Transformer Engine's fused loss: the gradient takes the place of the logits, beside their "
        "fp32 copy (transformer_engine/pytorch/cross_entropy.py)",
    ),
}


class StateBytes(NamedTuple, Generic[Size]):
    """Bytes of model states on a device."""

    weights: Size
    gradients: Size
    optimizer: Size
    buffers: Size  # buffers of the collectives of shards


class Framework(StrictModel):
    """The memory that a framework needs on a device.

    Bytes per parameter are those of training in 16 bit with Adam, beside weights of 2 bytes; in
    fp32 weights and gradients have 4 bytes each and no copies. ZeRO divides optimizer states from
    level 1 on, gradients from level 2 on, weights at level 3.
    """

    name: Name
    gradient_bytes: NonNegative = 2
    """Per parameter."""
    optimizer_bytes: NonNegative = 12
    """Per parameter: the fp32 weights, and Adam's two moments."""
    shard_bytes: NonNegative = 2
    """Bytes per parameter of the shards of 16-bit weights at level 3; 0: the fp32 weights serve."""
    gathered_layers: NonNegative = 2
    """Number of layers, each as large as the largest, whose weights are whole at the same time at
    level 3."""
    reduced_bytes: NonNegative = 2
    """Bytes per parameter of the largest layer's whole gradient at levels 2 and 3, until it is
    reduced."""
    bucket_bytes: NonNegative = 0.0
    """Largest bucket of gradients at levels 1 and 2."""
    sequence_parallel: bool = False
    """Whether tensor ranks also divide the tensors between their matrix products."""
    whole_inputs: bool = False
    """Whether sequence-parallel ranks keep the whole tensors that they gather for a product."""
    activation_gradients: bool = False
    """Whether the gradients of activations count: those of a block's output and of its largest kept
    tensor, which a backward pass holds at the same time."""
    unused_gradients: bool = False
    """Whether the products' backward passes return 16-bit gradients of weights that nobody reads,
    since the gradients are accumulated elsewhere."""
    whole_in_pipelines: bool = False
    """Whether stages of pipelines at levels 2 and 3 gather weights once for all micro-batches, and
    accumulate whole gradients."""
    logit_bytes: NonNegative | None = None
    """Bytes per logit of a micro-batch at the loss; None: those of the fp32 logits that the model's
    layers keep."""
    divided_logit_bytes: NonNegative | None = None
    """Bytes per logit where tensor ranks divide the logits; None: `logit_bytes`."""
    transfer_buffers: int = 0
    """Buffers of a stage for its sends and receives, each as large as an activation."""
    workspace_bytes: NonNegative = 0.0
    """Workspaces of matrix products, which the allocator counts."""
    context_bytes: NonNegative = 0.5e9
    """CUDA's context."""
    communicators: int = 2
    """NCCL's process groups of a usual run."""
    communicator_bytes: NonNegative = 0.688e9
    """Bytes of one such group."""
    fragmentation: NonNegative = 0.15
    """The share of the allocator's pool (max_memory_reserved) that no tensor uses while memory is
    free; near the limit the allocator returns unused blocks. The average over eight models of Guo
    et al. 2024 (GMLake), abstract."""
    levels: Levels = (0, 1, 2, 3)
    """ZeRO levels offered with data parallelism alone."""
    pipeline_levels: Levels = (0, 1)
    """ZeRO levels offered with tensor or pipeline parallelism."""
    recomputation: Modes = ("none", "selective", "full")
    """The offered modes of recomputation, from the most kept bytes to the fewest."""
    origin: str
    """The sources of the figures."""

    @property
    def all_levels(self) -> tuple[int, ...]:
        """The ZeRO levels that some plan of the framework may have, ascending."""
        return tuple(sorted({*self.levels, *self.pipeline_levels}))

    def with_choices(
        self,
        *,
        gradient_bytes: float | None = None,
        moment_bytes: float | None = None,
        loss: str | None = None,
        reshard: Literal["always", "never"] | None = None,
    ) -> Self:
        """The framework under other settings of a run; None leaves a setting as it is.

        gradient_bytes, moment_bytes: per parameter, of the gradients and of each of Adam's moments.
        loss: a key of `LOSSES`. reshard: whether stages of pipelines at levels 2 and 3 give up
        gathered weights after every pass. Raises InputError for an unknown loss.
        """
        changes: dict[str, float | bool] = {}
        if gradient_bytes is not None:
            changes["gradient_bytes"] = gradient_bytes
        if moment_bytes is not None:
            changes["optimizer_bytes"] = FP32_BYTES + 2 * moment_bytes
        if loss is not None:
            if loss not in LOSSES:
                raise unknown_name("unknown loss", loss, LOSSES, where="--loss")
            changes["logit_bytes"] = LOSSES[loss].whole
            changes["divided_logit_bytes"] = LOSSES[loss].divided
        if reshard is not None:
            changes["whole_in_pipelines"] = reshard == "never"
        return self.model_copy(update=changes)

    @property
    def reserved_bytes(self) -> float:
        """Memory of a device that the allocator does not count."""
        return self.context_bytes + self.communicators * self.communicator_bytes

    def state_bytes(self, element_bytes: int) -> tuple[float, float, float]:
        """(weight, gradient, optimizer states) bytes per parameter, whose weights have
        `element_bytes` bytes in the passes."""
        if element_bytes == 4:
            # the weights themselves are in fp32, so that the moments are all states
            return 4.0, 4.0, max(self.optimizer_bytes - FP32_BYTES, 0.0)
        return 2.0, self.gradient_bytes, self.optimizer_bytes

    def held_bytes(
        self,
        weights: Size,
        largest: Size,
        element_bytes: int,
        level: int,
        share: Size,
        *,
        staged: bool = False,
        frozen: Size | float = 0.0,
        largest_frozen: Size | float = 0.0,
    ) -> StateBytes[Size]:
        """Bytes of model states on a device.

        weights, largest: bytes of the trained weights of all its layers, and of its largest layer.
        level: ZeRO level. share: the device's share of the shards, in (0, 1]. staged: whether the
        layers are a stage of a pipeline. frozen, largest_frozen: bytes in which it holds the frozen
        weights of all its layers, and of the layer with the most of them; they have neither
        gradients nor states, and are sharded at level 3 alone.
        """
        params, fp32 = weights / element_bytes, element_bytes == 4
        weight_bytes, gradient_bytes, optimizer_bytes = self.state_bytes(element_bytes)
        held_weights, all_frozen = params * weight_bytes, frozen
        gradients = params * gradient_bytes
        optimizer = params * optimizer_bytes
        if level >= 1:
            optimizer = optimizer * share
        if level >= 2:
            gradients = gradients * share
        if level == 3:
            held_weights = held_weights * share
            if not fp32:  # `held_weights` counts 2 bytes per parameter
                held_weights = held_weights * (self.shard_bytes / 2)
            frozen = frozen * share
        # no bucket at other levels: at most 0
        buffers = at_most(weights, self.bucket_bytes if level in (1, 2) else 0.0)
        if level >= 2:
            whole = staged and self.whole_in_pipelines
            # the largest layer's gathered weights and gradient, over its weights
            gathered = self.gathered_layers if level == 3 and not whole else 0.0
            reduced = 1.0 if fp32 else self.reduced_bytes / 2
            buffers = buffers + largest * (gathered + reduced) + largest_frozen * gathered
            buffers = buffers + self.whole_bytes(
                weights, element_bytes, level, staged=staged, frozen=all_frozen
            )
        return StateBytes(held_weights + frozen, gradients, optimizer, buffers)

    def whole_bytes(
        self,
        weights: Size,
        element_bytes: int,
        level: int,
        *,
        staged: bool,
        frozen: Size | float = 0.0,
    ) -> Size:
        """The part of `held_bytes` that a stage keeps whole beside its shards, from its first
        micro-batch to its last: gradients, and at level 3 also weights."""
        whole_per_param = whole_frozen = 0.0
        if staged and self.whole_in_pipelines and level >= 2:
            _, whole_per_param, _ = self.state_bytes(element_bytes)
            if level == 3:
                whole_per_param += element_bytes
                whole_frozen = 1.0
        return weights * (whole_per_param / element_bytes) + frozen * whole_frozen

    def loss_bytes(self, elements: float, kept: float, tensor: int) -> float:
        """Bytes of a sample's logits at the loss on each of `tensor` ranks, which divide them.

        elements: number of the sample's logits. kept: bytes of the logits that the model's layers
        keep.
        """
        per_logit = self.logit_bytes
        if tensor > 1 and self.divided_logit_bytes is not None:
            per_logit = self.divided_logit_bytes
        if per_logit is None:
            return kept / tensor
        return elements * per_logit / tensor


# Sources of the defaults. Context: some 300 MB and the kernels loaded (pytorch#107667).
# Communicators: 688 MB each on four A100 with NVLink (NVIDIA/nccl#964).
HETPLAN = Framework(
    name="hetplan",
    context_bytes=RESERVED_BYTES,
    communicators=0,
    origin="hetplan's own runtime: Rajbhandari et al. 2020 (ZeRO), Section 3.1; context and NCCL "
    "1.5 GiB together",
)
MEGATRON = Framework(
    name="megatron",
    gradient_bytes=4,
    activation_gradients=True,
    unused_gradients=True,
    logit_bytes=6,
    transfer_buffers=2,
    workspace_bytes=64e6,
    communicators=3,
    levels=(0, 1),
    origin="Megatron-LM: 18 bytes a parameter, 6 + 12 / d with the distributed optimizer "
    "(theoretical_memory_usage.py; fp32 main gradients); 16-bit logits beside their fp32 copy, "
    "which becomes softmax and gradient in place (tensor_parallel/cross_entropy.py); cuBLAS "
    "workspace 32 MiB, Transformer Engine's as much; one process group each for data, tensor and "
    "pipeline; gradients are accumulated in main_grad, beside which Transformer Engine keeps an "
    "unused 16-bit gradient for each shape of a weight (get_dummy_wgrad in "
    "pytorch/module/base.py), and the head makes one in its backward pass "
    "(tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication)",
)
FSDP = Framework(
    name="fsdp",
    gradient_bytes=4,
    shard_bytes=0,
    reduced_bytes=6,
    sequence_parallel=True,
    whole_inputs=True,
    whole_in_pipelines=True,
    activation_gradients=True,
    logit_bytes=12,
    divided_logit_bytes=16,
    transfer_buffers=2,
    workspace_bytes=64e6,
    levels=(2, 3),
    pipeline_levels=(2, 3),
    recomputation=("none", "operators", "full"),
    origin="PyTorch FSDP2 as torchtitan uses it: fp32 shards, cast when gathered, the layer at "
    "work and the next one; a layer's gradient in 16 bit and its fp32 copy to be reduced; eager "
    "cross-entropy of logits.float(): log-softmax, its gradient and the loss's, fp32 each "
    "(torchtitan components/loss.py), one more where tensor ranks compute the loss "
    "(torch/distributed/tensor/parallel/loss.py); ranks are sequence parallel and autograd keeps "
    "what they gather; stages of pipelines do not reshard after forward, to gather once, and sum "
    "fp32 gradients before they are scattered (models/llama3/infra/parallelize.py, apply_fsdp)",
)
DEEPSPEED = Framework(
    name="deepspeed",
    bucket_bytes=1e9,
    activation_gradients=True,
    logit_bytes=14,
    transfer_buffers=2,
    workspace_bytes=64e6,
    origin="DeepSpeed: reduce_bucket_size of 5e8 elements in 16 bit, its default; states as in "
    "Rajbhandari et al. 2020, Section 3.1; the loss of transformers (loss_utils.py): 16-bit "
    "logits, their fp32 copy, that shifted by a token, and log-softmax; backward as many",
)
FRAMEWORKS = {framework.name: framework for framework in (HETPLAN, MEGATRON, FSDP, DEEPSPEED)}


def load_framework(name: str, *, where: str | None = None) -> Framework:
    """The framework of that name. where: the place of the name, for messages. Raises InputError
    that suggests the nearest name."""
    return look_up("unknown framework", name, FRAMEWORKS, where=where)
