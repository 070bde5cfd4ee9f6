"""The bytes of a model's states that each ZeRO stage leaves on a device.

In mixed precision with Adam, a parameter has w = 2 bytes of weight, g = 2 bytes of gradient and
o = 12 bytes of optimizer states (fp32 weight, momentum, variance); in fp32 it has 4, 4 and 8. With
a part s of the shards on a device (1/N when N devices have equal parts), the device holds

    stage 0: w + g + o      1: w + g + s o      2: w + s (g + o)      3: s (w + g + o)

bytes per parameter, and the activations of a micro-batch, which ZeRO does not divide. Stages 2 and
3 also hold the whole gradient of the layer that is computed; stage 3 holds this layer's weights,
and the weights that are fetched ahead for the next layer. The paper counts only states; hetplan
adds these layers.

Source: Rajbhandari et al. 2020 (ZeRO), Sections 3.1 and 5; Poplar (AAAI 2025), appendix "Details
about ZeRO".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetplan.errors import require
from hetplan.profiling.frameworks import HETPLAN, Framework
from hetplan.profiling.models.operators import ELEMENT_BYTES, Precision
from hetplan.profiling.workload import Workload

STAGES = (0, 1, 2, 3)
UNLIMITED = 10**9  # samples: the largest global batch


@dataclass(frozen=True)
class States:
    """The bytes of one model's states and activations."""

    weights: float  # bytes of all trained weights
    gradients: float  # bytes of all gradients
    optimizer: float  # bytes of all optimizer states
    layer: float  # bytes of the trained weights of the largest layer
    # bytes of activations that one sample needs: those kept for its backward pass, and those of the
    # layer that is computed again
    per_sample: float
    layers: int  # number of layers
    element_bytes: int = 2  # bytes of a number in the passes
    framework: Framework = HETPLAN  # it says how many bytes shards and gathered layers take
    frozen: float = 0.0  # bytes in which all frozen weights are held
    frozen_layer: float = 0.0  # bytes of the frozen weights of the layer with the most of them
    casts: float = 0.0  # bytes of the largest frozen weight that a product casts from fewer bits

    @classmethod
    def of(cls, workload: Workload) -> "States":
        """The states of a workload's model. Tied parameters count once, because one device holds
        the whole model."""
        layers = workload.profile.layers
        working = workload.working_bytes.get(1, 0.0)  # of a tensor group of one device
        saved = sum(layer.saved_bytes for layer in layers) + working
        states = cls.of_weights(
            [layer.param_bytes for layer in layers], workload.precision, saved, workload.framework
        )
        frozen = [layer.frozen_bytes for layer in layers]
        return replace(
            states,
            frozen=float(sum(frozen)),
            frozen_layer=max(frozen),
            casts=max(layer.cast_bytes for layer in layers),
        )

    @classmethod
    def of_weights(
        cls,
        layers: Sequence[float],
        precision: Precision,
        per_sample: float = 0.0,
        framework: Framework = HETPLAN,
    ) -> "States":
        """The states of a model trained with Adam. layers: bytes of each layer's weights."""
        element_bytes, weights = ELEMENT_BYTES[precision], float(sum(layers))
        _, gradient_bytes, optimizer_bytes = framework.state_bytes(element_bytes)  # per parameter
        return cls(
            weights=weights,
            gradients=weights / element_bytes * gradient_bytes,
            optimizer=weights / element_bytes * optimizer_bytes,
            layer=float(max(layers)),
            per_sample=per_sample,
            layers=len(layers),
            element_bytes=element_bytes,
            framework=framework,
        )

    def resident(self, stage: int, part: float) -> float:
        """Bytes without activations on a device that holds `part` of the shards, from 0 to 1."""
        check_stage(stage)
        held = self.framework.held_bytes(
            self.weights,
            self.layer,
            self.element_bytes,
            stage,
            part,
            frozen=self.frozen,
            largest_frozen=self.frozen_layer,
        )
        return sum(held) + self.casts

    def largest_batch(self, stage: int, part: float, memory: float) -> int:
        """The largest micro-batch that fits beside the states in `memory` bytes; 0 where not even
        one sample fits, `UNLIMITED` where samples need no memory."""
        free = memory - self.resident(stage, part)
        if free < self.per_sample or free < 0:  # `per_sample` may be 0
            return 0
        if self.per_sample <= 0:
            return UNLIMITED
        return int(free / self.per_sample)


def check_stage(stage: int) -> None:
    """Raise InputError for a ZeRO stage other than 0 to 3."""
    require(stage in STAGES, "ZeRO stage", got=stage, expected="0, 1, 2 or 3")
