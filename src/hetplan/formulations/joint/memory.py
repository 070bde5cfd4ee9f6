"""Peak memory of every device of a plan: model states, activations kept at once, and what
recomputation needs beside."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from hetplan.formulations.joint.costs import Costs, Floats
from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.plan import Plan, Replica, Stage
from hetplan.schema import Range
from hetplan.text import bytes_text

if TYPE_CHECKING:  # compiled kernels, which `hetplan fits` does not need
    from hetplan.profiling.simulator.tasks import Ints, Timeline

Owner = tuple[int, int]  # replica, stage
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


def memory(
    plan: Plan, costs: Costs, divided: Floats | None, owners: Sequence[Owner], timeline: "Timeline"
) -> tuple[Held, ...]:
    """[D] what devices hold at their peak.

    divided [D]: each device's share of the states under ZeRO without pipelines, else None.
    """
    held = [Held()] * len(plan.devices)
    alike: dict[tuple[object, ...], tuple[Passes, tuple[float, float]]] = {}
    for unit, (i, j) in enumerate(owners):
        stage, batches = plan.replicas[i].stages[j], plan.replicas[i].micro_batches
        samples = max(batch.samples for batch in batches)
        rows = samples * max(stage.row_shares) / sum(stage.row_shares)
        tensor = len(stage.tensor_shares)
        key = (tensor, *stage.layers)
        if key not in alike:
            passes = Passes.of(costs, stage.layers, tensor)
            alike[key] = passes, stage_params(plan, stage, costs)
        passes, (weights, largest) = alike[key]
        for device in stage.all_devices:
            part, level, share = tensor_part(stage, device), plan.zero, 1.0
            if divided is not None:
                share = float(divided[device])
            elif plan.zero:
                level = min(plan.zero, max(costs.data.framework.pipeline_levels))
                share = 1 / data_ranks(plan, stage)
            states = part * weights, part * largest, level, share
            kept = float(timeline.peak_bytes[unit])
            held[device] = held_on(costs.data, states, passes, kept, rows)
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


def saved_bytes(stage: Stage, chunk: int, sizes: "Ints", costs: Costs) -> list[float]:
    """[sizes] bytes that the fullest device of the stage keeps of one micro-batch."""
    largest_share = max(stage.row_shares) / sum(stage.row_shares)
    each = costs.saved_bytes(stage.layers[chunk], len(stage.tensor_shares))
    return [float(np.ceil(n * largest_share)) * each for n in sizes]


def data_ranks(plan: Plan, stage: Stage) -> int:
    """How many row groups of all replicas hold the stage's layers."""
    return sum(len(counterpart(replica, stage).devices) for replica in plan.replicas)


def counterpart(replica: Replica, stage: Stage) -> Stage:
    """The replica's stage that begins where `stage` does, or the nearest before."""
    first = stage.layers[0][0]
    return [other for other in replica.stages if other.layers[0][0] <= first][-1]


def tensor_part(stage: Stage, device: int) -> float:
    """The share of every weight that a device of the stage holds."""
    rank = next(group.index(device) for group in stage.devices if device in group)
    return stage.tensor_shares[rank] / sum(stage.tensor_shares)


def stage_params(plan: Plan, stage: Stage, costs: Costs) -> tuple[float, float]:
    """Bytes of a stage's weights, copies of tied ones included, and of its largest layer."""
    layers = costs.data.layers
    each = [
        layers[l].param_bytes + copied_bytes(plan, l, costs)
        for first, last in stage.layers
        for l in range(first, last)
    ]
    return sum(each), max(each)


def owners_of(plan: Plan, layer: int) -> list[Owner]:
    """The stage of every replica that holds the layer."""
    return [
        (i, j)
        for i, replica in enumerate(plan.replicas)
        for j, stage in enumerate(replica.stages)
        if any(first <= layer < last for first, last in stage.layers)
    ]


def copied_bytes(plan: Plan, layer: int, costs: Costs) -> float:
    """Tied weights that the layer's stage holds as a copy: those of a layer elsewhere (the first
    one's)."""
    tied = costs.data.layers[layer].tied_param_bytes
    if not tied:  # of most layers; looking for owners takes a look at every stage of every replica
        return 0.0
    return 0.0 if owners_of(plan, layer) == owners_of(plan, 0) else tied


def single_stage(plan: Plan) -> bool:
    """Whether every replica is one stage on one device: data parallelism."""
    return all(
        len(replica.stages) == 1 and len(replica.stages[0].all_devices) == 1
        for replica in plan.replicas
    )
