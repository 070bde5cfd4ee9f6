"""Peak memory of every device of a plan: model states, activations kept at once, and what
recomputation needs beside."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from hetplan.formulations.joint.costs import MOST_KEPT, Costs, Floats
from hetplan.formulations.joint.data import JointData
from hetplan.schema import Range
from hetplan.text import bytes_text

if TYPE_CHECKING:  # compiled kernels, which `hetplan fits` does not need
    from hetplan.formulations.joint.sharding import ZeroCosts
SMALL = 0.005  # of what is allocated: not worth a word


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on one device at its peak, by component; all 0 on one that is not used.

    optimizer: with the fp32 weights of mixed precision. activations: kept from forward to backward
    passes. working: of the layer that is computed again. logits: of the micro-batch at the loss,
    with their copies and gradient. collectives: gathered layers, gradients at work, buckets.
    transfers: buffers of activations and gradients between stages. workspace: of the framework's
    libraries. reserved: CUDA context and NCCL, which no allocator counts.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    working: float = 0.0
    logits: float = 0.0
    collectives: float = 0.0
    transfers: float = 0.0
    workspace: float = 0.0
    reserved: float = 0.0

    @property
    def allocated(self) -> float:
        """What `torch.cuda.max_memory_allocated` counts."""
        states = self.weights + self.gradients + self.optimizer
        passes = self.activations + self.working + self.logits
        return states + passes + self.collectives + self.transfers + self.workspace

    @property
    def text(self) -> str:
        """What matters of `allocated`, the largest first: `weights 1.2 GiB, …`."""
        parts = sorted(asdict(self).items(), key=lambda part: -part[1])
        least = SMALL * self.allocated
        shown = [part for part in parts if part[0] != "reserved" and part[1] > least]
        return ", ".join(f"{name} {bytes_text(size)}" for name, size in shown)


def memory(zero: "ZeroCosts", kept: Floats) -> tuple[Held, ...]:
    """[D] what devices hold at their peak. kept: bytes that every stage of the first replica, then
    of the second, … keeps at once."""
    plan, costs, kept_by_stage = zero.plan, zero.costs, iter(kept.tolist())
    held, level = [Held()] * len(plan.devices), plan.zero
    if zero.divided is None:
        level = min(level, max(costs.data.framework.pipeline_levels))
    for replica in plan.replicas:
        samples = max(batch.samples for batch in replica.micro_batches)
        for stage in replica.stages:
            rows = samples * max(stage.row_shares) / sum(stage.row_shares)
            layers, kept_here = tuple(stage.layers), next(kept_by_stage)
            passes, weights, largest = stage_bytes(
                costs, layers, len(stage.tensor_shares), zero.copied_in(stage)
            )
            alike: dict[tuple[float, float], Held] = {}
            each = zip(stage.all_devices, stage.parts, zero.shares(stage), strict=True)
            for device, part, share in each:
                if (part, share) not in alike:
                    states = part * weights, part * largest, level, share
                    alike[part, share] = held_on(costs.data, states, passes, kept_here, rows)
                held[device] = alike[part, share]
    return tuple(held)


@dataclass(frozen=True)
class Passes:
    """Bytes per sample on each device of a stage. saved: kept from forward to backward. working:
    of the layer that is computed again. logits: those that are kept, 0 without the head. loss:
    logits, their copies and gradient at the loss. boundary: of the larger of what the stage takes
    and sends, 0 for the whole model."""

    saved: float
    working: float
    logits: float
    loss: float
    boundary: float

    @classmethod
    def of(cls, costs: Costs, layers: Sequence[Range], tensor: int) -> "Passes":
        """Of a stage on a tensor group. layers: one range per model chunk."""
        data, framework = costs.data, costs.data.framework
        part = (layers[-1][1] == len(data.layers)) / tensor  # of the logits
        logits, each = part * data.logit_bytes, framework.logit_bytes
        if tensor > 1 and framework.divided_logit_bytes is not None:
            each = framework.divided_logit_bytes
        loss = logits if each is None else part * data.logit_elements * each
        boundary = max(
            max(costs.inputs[first], data.layers[end - 1].activation_bytes) for first, end in layers
        )
        return cls(
            saved=sum(costs.saved_bytes(chunk, tensor) for chunk in layers),
            working=max(costs.working_bytes(chunk, tensor) for chunk in layers),
            logits=logits,
            loss=loss,
            boundary=boundary / (tensor if framework.sequence_parallel else 1),
        )


def held_on(
    data: JointData,
    states: tuple[float, float, int, float],
    passes: Passes,
    kept: float,
    rows: float,
) -> Held:
    """What a device holds at its peak: at the loss, or where a layer is computed again; both at
    once where the framework says nothing of its logits, which is a safe bound.

    states: bytes of its part of the stage's weights and of the largest layer's, ZeRO level, its
    share of the shards. kept: bytes of all micro-batches that it keeps at once. rows: its samples
    of the largest micro-batch.
    """
    framework, (weights, largest, level, share) = data.framework, states
    width = data.element_bytes
    own, gradients, optimizer, buffers = framework.held_bytes(weights, largest, width, level, share)
    apart = framework.logit_bytes is not None
    logits, loss, working = rows * passes.logits, rows * passes.loss, rows * passes.working
    return Held(
        own,
        gradients,
        optimizer,
        activations=max(kept - logits, 0.0),
        working=0.0 if apart and working <= loss else working,
        logits=0.0 if apart and working > loss else loss,
        collectives=buffers,
        transfers=framework.transfer_buffers * rows * passes.boundary,
        workspace=framework.workspace_bytes,
        reserved=data.reserved_bytes,
    )


@lru_cache(MOST_KEPT)
def stage_bytes(
    costs: Costs, layers: tuple[Range, ...], tensor: int, copied: tuple[tuple[int, float], ...]
) -> tuple[Passes, float, float]:
    """Of a stage: what its passes keep, and bytes of its weights and of its largest layer, with
    what its layers copy."""
    copies = dict(copied)
    each = [
        costs.data.layers[l].param_bytes + copies.get(l, 0.0)
        for first, last in layers
        for l in range(first, last)
    ]
    return Passes.of(costs, layers, tensor), sum(each), max(each)
