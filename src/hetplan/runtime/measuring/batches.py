"""Poplar's Algorithm 1 on a live device: it times passes of a real model within a memory limit.

One device is measured for a whole ZeRO group. Its memory counts the model states that it would have
as one of `devices` (see `replays.model_states`), and the activations that are measured in the pass.
On CUDA the activations are the peak of torch's allocator, which includes temporaries of the
backward pass. On a CPU, where no allocator counts, they are the distinct storages that autograd
saves.

A model whose weights and gradients exceed the limit, which only ZeRO 3 trains, is measured with one
block's weights in all blocks: seconds and activations do not depend on the values of weights. Where
torchrun starts several ranks, each rank has a shard of the weights, and each layer's weights are
gathered before its passes.

Source: Poplar (AAAI 2025), Algorithm 1.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hetplan.errors import InputError, require
from hetplan.profiling.models.model import Model
from hetplan.profiling.profiles.batch_curve import BatchCurve, CurvePoint
from hetplan.profiling.profiles.largest_batch import (
    Awareness,
    MemoryReading,
    OutOfMemoryOnDevice,
    explore,
)
from hetplan.replays.model_states import STAGES, States
from hetplan.runtime.launch.devices import check_device, device_name, measured_here, now
from hetplan.runtime.measuring.networks import (
    Network,
    Sharded,
    network,
    out_of_memory,
    saved_bytes,
    silent,
    tokens_of,
)


def measure_batch_curve(
    model: Model,
    device: str,
    *,
    memory: float | None = None,
    name: str | None = None,
    devices: int = 1,
    largest: int = 256,
    repeats: int = 3,
    tell: Callable[[str], None] | None = None,
) -> BatchCurve:
    """Measure `model` on the torch device `device` under every ZeRO stage.

    memory: limit of bytes; None: the free memory of the GPU (a CPU needs a limit). name: the
    device's type in cluster files; None: torch's name of it. devices: number of devices in the ZeRO
    group; it becomes the number of torch.distributed's ranks where these are more. largest: the
    largest micro-batch to try. repeats: timed passes of each size. tell: receives a line for each
    size tried.

    Raises UnsupportedError without torch or for a model that has no torch layers, InputError for
    arguments out of range.
    """
    for what, value in (
        ("devices", devices), ("largest micro-batch", largest), ("repeats", repeats),
    ):  # fmt: skip
        require(value >= 1, what, got=value, expected="at least 1")
    check_device(device)
    limit = memory
    if limit is None and device != "cpu":
        limit = float(torch.cuda.mem_get_info(device)[0])
    if limit is None or not 0 < limit < 1e30:
        raise InputError(
            "memory limit", got=memory, expected="more than 0 bytes; a CPU needs --memory-gib"
        )
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    devices = max(devices, ranks)
    trial = Trial(model, device, limit, devices, largest, repeats, tell or silent)
    sizes = [stage.largest for stage in explore_stages(trial)]  # [ZeRO stage] largest micro-batch
    largest_timed = max(trial.passes, default=None)
    saved_bytes_per_sample = None
    if largest_timed:
        saved_bytes_per_sample = trial.passes[largest_timed].saved_bytes / largest_timed
    weights = ""
    if ranks > 1:
        weights = f", weights in shards on {ranks} ranks"
    elif trial.shared:
        weights = ", one block's weights for all blocks"
    return BatchCurve(
        model=model.name,
        sequence=model.sequence or 1,
        precision=model.precision,
        device=name or device_name(device),
        devices=devices,
        memory_bytes=trial.limit,
        provenance=measured_here(f"hetplan profile batch-curve{weights}", device),
        zero_stage=next((stage for stage, size in enumerate(sizes) if size), None),
        largest=sizes,
        saved_bytes_per_sample=saved_bytes_per_sample,
        tried_up_to=largest,
        points=[
            CurvePoint(micro_batch=batch, seconds=timed.seconds, spread_seconds=timed.spread)
            for batch, timed in sorted(trial.passes.items())
        ],
    )


@dataclass(frozen=True)
class Pass:
    """The measured passes of one micro-batch size."""

    seconds: float  # median of a forward and backward pass
    spread: float  # seconds of the slowest pass less those of the fastest
    saved_bytes: float  # peak bytes of the activations


@dataclass
class Trial:
    """A model on a torch device. `at(stage)` is the device as Algorithm 1 sees it under one ZeRO
    stage; the measured passes are the same for all stages."""

    model: Model
    device: str
    limit: float  # bytes that training may use
    devices: int = 1  # number of devices in the ZeRO group
    largest: int = 256  # largest micro-batch to try
    repeats: int = 3  # timed passes, after one that is not timed
    tell: Callable[[str], None] = silent  # receives a line for each micro-batch tried
    network: Network = field(init=False, repr=False)
    states: States = field(init=False)
    shared: bool = field(init=False)  # whether all blocks have one block's weights
    passes: dict[int, Pass] = field(init=False, default_factory=dict)  # micro-batch -> its passes

    def __post_init__(self) -> None:
        parameters_of_layers = network(self.model, "meta").layer_parameters
        weights = [  # bytes
            sum(p.numel() * p.element_size() for p in parameters)
            for parameters in parameters_of_layers
        ]
        self.states = States.of_weights(weights, self.model.precision)
        weights_and_gradients = 2 * sum(weights)
        self.shared = dist.is_initialized() or weights_and_gradients > self.limit
        self.network = network(self.model, self.device, blocks=1 if self.shared else None)
        if self.shared:
            embedding, block, head = self.network.layers
            self.network.layers = (embedding, *[block] * (len(weights) - 2), head)
        if dist.is_initialized():
            self.network = Sharded(self.network, self.device)
            self.limit = -self.network.largest(-self.limit)  # the smallest limit of all ranks

    def at(self, stage: int) -> "TrialAt":
        """The device under a ZeRO stage."""
        return TrialAt(self, self.states.resident(stage, 1.0 / self.devices))

    def measure(self, batch: int, free: float) -> Pass:
        """The passes of a micro-batch, which are measured once for each size. Raises
        OutOfMemoryOnDevice where the activations need more than `free` bytes."""
        if batch not in self.passes:
            try:
                with out_of_memory(batch):
                    measured = self._timed(batch, free)
            except OutOfMemoryOnDevice as error:
                self.tell(f"micro-batch {batch}: {error}")
                raise
            self.passes[batch] = measured
            self.tell(
                f"micro-batch {batch}: {1e3 * measured.seconds:.4g} ms, "
                f"{measured.saved_bytes / 2**20:.4g} MiB"
            )
        if self.passes[batch].saved_bytes > free:
            raise OutOfMemoryOnDevice(f"{batch} samples exceed {free:.0f} bytes")
        return self.passes[batch]

    def forward_bytes(self, batch: int, free: float) -> float:
        """Bytes that the forward pass of a micro-batch keeps. Raises OutOfMemoryOnDevice where they
        are more than `free`."""
        tokens = tokens_of(self.model, batch, self.device)
        with out_of_memory(batch), self._kept(free) as kept:
            loss = self.network.loss(tokens)
            size = kept()
            del loss
        return size

    def _timed(self, batch: int, free: float) -> Pass:
        """Measure the passes of a micro-batch, after a warm-up that measures the activations."""
        tokens = tokens_of(self.model, batch, self.device)
        with self._kept(free, whole=True) as kept:
            self.network.loss(tokens).backward()  # the warm-up, which also allocates gradients
            size = kept()
        times = []
        for _ in range(self.repeats):
            begun = now(self.device) - self.network.seconds_apart
            self.network.loss(tokens).backward()
            times.append(now(self.device) - self.network.seconds_apart - begun)
        largest = self.network.largest
        spread = max(times) - min(times)
        return Pass(largest(statistics.median(times)), largest(spread), largest(size))

    @contextmanager
    def _kept(self, free: float, *, whole: bool = False) -> Iterator[Callable[[], float]]:
        """A context that measures the bytes of activations. It yields a function that returns them.

        whole: on CUDA the function returns the peak so far; False: the bytes allocated at the call.
        OutOfMemoryOnDevice is raised where the bytes are more than `free`: on a CPU in the middle
        of the pass, on CUDA by the function.
        """
        if self.device == "cpu":
            with saved_bytes(self.network.parameters, free) as kept:
                yield kept
            return
        # Gradients are allocated before, so that they do not count as activations.
        for parameter in self.network.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)

        def kept_on_device() -> float:
            torch.cuda.synchronize(self.device)
            read = torch.cuda.max_memory_allocated if whole else torch.cuda.memory_allocated
            size = self.network.largest(float(read(self.device) - before))
            if size > free:
                raise OutOfMemoryOnDevice(f"{size:.0f} bytes of activations, {free:.0f} free")
            return size

        yield kept_on_device


@dataclass(frozen=True)
class TrialAt:
    """A `Trial` under one ZeRO stage: the `TrialDevice` of Algorithm 1."""

    trial: Trial
    resident: float  # bytes of model states on the device

    @property
    def free(self) -> float:
        """Bytes left for activations."""
        return self.trial.limit - self.resident

    def forward_memory(self, batch: int) -> MemoryReading:
        """The memory around a forward pass: the model states before it, and the states with the
        activations of `batch` samples after it.

        Activations are the bytes that `batch` further samples add, where they fit. Bytes that do
        not depend on the number of samples, such as masks, would make Algorithm 1's estimate of the
        largest micro-batch too low. The total is limited to the bytes of `largest` samples, so that
        the estimate does not exceed `largest`.
        """
        if self.free <= 0:
            raise OutOfMemoryOnDevice(f"the states alone exceed {self.trial.limit:.0f} bytes")
        kept = self.trial.forward_bytes(batch, self.free)
        try:
            added = self.trial.forward_bytes(2 * batch, self.free) - kept
        except OutOfMemoryOnDevice:
            added = kept
        # half a sample more, so that rounding errors do not lower the estimate
        of_largest = self.resident + added / batch * (self.trial.largest + 0.5)
        return MemoryReading(
            total=min(self.trial.limit, of_largest),
            before=self.resident,
            after=self.resident + added,
        )

    def step_seconds(self, batch: int) -> float:
        """Median seconds of a forward and backward pass."""
        return self.trial.measure(batch, self.free).seconds


def explore_stages(trial: Trial) -> list[Awareness]:
    """[ZeRO stage, 0 to 3] the result of Algorithm 1 under the stage. The algorithm itself would
    stop at the first stage with which a sample fits."""
    return [explore(trial.at(stage)) for stage in STAGES]
