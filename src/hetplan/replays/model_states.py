"""What a ZeRO stage leaves on a device of one model's states.

Model states per parameter in mixed precision with Adam: 2 bytes of weight, 2 of gradient, K = 12 of
optimizer (fp32 weight, momentum, variance); in fp32: 4, 4 and 8. With a part s of the shards on a
device (1/N when equal):

    stage 0: w + g + o      1: w + g + s o      2: w + s (g + o)      3: s (w + g + o)

plus the activations of a micro-batch, which ZeRO leaves alone. Stages 2 and 3 hold the whole
gradient of the layer at work, stage 3 also its weights and those fetched ahead for the next one
(hetplan's addition; the paper counts states).
Source: Rajbhandari et al. 2020 (ZeRO), Sections 3.1 and 5; Poplar (AAAI 2025), appendix "Details
about ZeRO".
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hetplan.errors import require
from hetplan.profiling.frameworks import HETPLAN, Framework
from hetplan.profiling.models.operators import ELEMENT_BYTES, Precision
from hetplan.profiling.workload import Workload

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class States:
    """The bytes of one model."""

    weights: float
    """Of the whole model."""
    gradients: float
    """Of the whole model."""
    optimizer: float
    """Of the optimizer's states of the whole model."""
    layer: float
    """Of the weights of the largest layer."""
    per_sample: float
    """Of the activations kept for the backward pass of one sample, and of those of the layer that
    is computed again."""
    layers: int
    """Number of layers."""
    element_bytes: int = 2
    """Of an entry in the passes."""
    framework: Framework = HETPLAN
    """It says what shards and layers at work take."""

    @classmethod
    def of(cls, workload: Workload) -> "States":
        """The states of a workload's model. Tied parameters count once, as one device holds the
        whole model."""
        layers = workload.profile.layers
        saved = sum(layer.saved_bytes for layer in layers) + workload.working_bytes.get(1, 0.0)
        return cls.of_weights(
            [layer.param_bytes for layer in layers], workload.precision, saved, workload.framework
        )

    @classmethod
    def of_weights(
        cls,
        layers: Sequence[float],
        precision: Precision,
        per_sample: float = 0.0,
        framework: Framework = HETPLAN,
    ) -> "States":
        """The states with Adam, from the bytes of the weights that each layer owns."""
        each, weights = ELEMENT_BYTES[precision], float(sum(layers))
        _, gradients, optimizer = framework.state_bytes(each)
        return cls(
            weights=weights,
            gradients=weights / each * gradients,
            optimizer=weights / each * optimizer,
            layer=float(max(layers)),
            per_sample=per_sample,
            layers=len(layers),
            element_bytes=each,
            framework=framework,
        )

    def resident(self, stage: int, part: float) -> float:
        """Bytes on a device that holds `part` of the shards, without activations."""
        check_stage(stage)
        held = self.framework.held_bytes(self.weights, self.layer, self.element_bytes, stage, part)
        return sum(held)

    def largest_batch(self, stage: int, part: float, memory: float) -> int:
        """The largest micro-batch that fits beside the states in `memory` bytes; 0 where none
        does."""
        free = memory - self.resident(stage, part)
        if free < self.per_sample or free < 0:
            return 0
        return int(free / self.per_sample) if self.per_sample > 0 else 10**9


def check_stage(stage: int) -> None:
    """Raise InputError for anything but 0 to 3."""
    require(stage in STAGES, "ZeRO stage", got=stage, expected="0, 1, 2 or 3")
