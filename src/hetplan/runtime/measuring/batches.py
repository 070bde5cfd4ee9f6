"""Poplar's Algorithm 1 on a live device: passes of a real model, timed, within a memory limit.

One device tries for a whole ZeRO group: it is charged with the model states that it would hold as
one of `devices` (see `replays.model_states`) and with the activations that the pass really
kept, measured. On CUDA these are what torch's allocator says at its peak, temporaries of the
backward pass included; on a CPU, where nothing keeps such books, the distinct storages that
autograd saves. A model whose weights and gradients exceed the limit, which only ZeRO 3 trains, is
measured with one block's weights in the place of all blocks': values do not matter to seconds nor
to activations. Where torchrun starts several ranks, these hold the weights in shards, and each
layer is gathered before it passes.
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

    memory: bytes to keep within, default what the GPU has free (a CPU needs a figure). name: the
    device's type in cluster files. devices: size of the ZeRO group that shares the states, at least
    the ranks of torch.distributed, which then hold the weights in shards. largest: of the
    micro-batches tried. repeats: timed passes per size. tell: receives a line per size
    tried.
    Raises UnsupportedError without torch or for a model that has no torch layers, InputError for
    arguments.
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
    sizes = [stage.largest for stage in explore_stages(trial)]
    sample = max(trial.passes, default=None)
    sharing = ", one block's weights for all blocks" if trial.shared else ""
    held = f", weights in shards on {ranks} ranks" if ranks > 1 else sharing
    return BatchCurve(
        model=model.name,
        sequence=model.sequence or 1,
        precision=model.precision,
        device=name or device_name(device),
        devices=devices,
        memory_bytes=trial.limit,
        provenance=measured_here(f"hetplan profile batch-curve{held}", device),
        zero_stage=next((stage for stage, size in enumerate(sizes) if size), None),
        largest=sizes,
        saved_bytes_per_sample=trial.passes[sample].saved_bytes / sample if sample else None,
        tried_up_to=largest,
        points=[
            CurvePoint(micro_batch=batch, seconds=one.seconds, spread_seconds=one.spread)
            for batch, one in sorted(trial.passes.items())
        ],
    )


@dataclass(frozen=True)
class Pass:
    """One micro-batch size, measured. saved_bytes: activations at their peak; all others in
    seconds."""

    seconds: float
    spread: float
    saved_bytes: float


@dataclass
class Trial:
    """A model on a torch device; `at(stage)` is the device as Algorithm 1 sees it under one ZeRO
    stage.

    limit: bytes that training may use. devices: size of the ZeRO group. largest: no micro-batch
    beyond this is tried. repeats: timed passes behind one that is not. tell: receives a line per
    micro-batch tried. shared: all blocks have one block's weights, or those that ranks gather.
    """

    model: Model
    device: str
    limit: float
    devices: int = 1
    largest: int = 256
    repeats: int = 3
    tell: Callable[[str], None] = silent
    network: Network = field(init=False, repr=False)
    states: States = field(init=False)
    shared: bool = field(init=False)
    passes: dict[int, Pass] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        # the parameters that really exist; activations are measured
        own = network(self.model, "meta").own
        weights = [sum(p.numel() * p.element_size() for p in layer) for layer in own]
        self.states = States.of_weights(weights, self.model.precision)
        self.shared = dist.is_initialized() or 2 * sum(weights) > self.limit
        self.network = network(self.model, self.device, blocks=1 if self.shared else None)
        if self.shared:
            embedding, block, head = self.network.layers
            self.network.layers = (embedding, *[block] * (len(own) - 2), head)
        if dist.is_initialized():
            self.network = Sharded(self.network, self.device)
            self.limit = -self.network.largest(-self.limit)

    def at(self, stage: int) -> "TrialAt":
        """The device under a ZeRO stage."""
        return TrialAt(self, self.states.resident(stage, 1.0 / self.devices))

    def measure(self, batch: int, free: float) -> Pass:
        """Times and activations of a micro-batch, each size once; raises OutOfMemoryOnDevice beyond
        `free` bytes."""
        if batch not in self.passes:
            try:
                with out_of_memory(batch):
                    one = self.passes[batch] = self._timed(batch, free)
            except OutOfMemoryOnDevice as error:
                self.tell(f"micro-batch {batch}: {error}")
                raise
            self.tell(
                f"micro-batch {batch}: {1e3 * one.seconds:.4g} ms, "
                f"{one.saved_bytes / 2**20:.4g} MiB"
            )
        if self.passes[batch].saved_bytes > free:
            raise OutOfMemoryOnDevice(f"{batch} samples exceed {free:.0f} bytes")
        return self.passes[batch]

    def forward_bytes(self, batch: int, free: float) -> float:
        """Bytes that the forward pass of a micro-batch keeps; raises OutOfMemoryOnDevice."""
        tokens = tokens_of(self.model, batch, self.device)
        with out_of_memory(batch), self._kept(free) as kept:
            loss = self.network.loss(tokens)
            size = kept()
            del loss
        return size

    def _timed(self, batch: int, free: float) -> Pass:
        tokens = tokens_of(self.model, batch, self.device)
        with self._kept(free, whole=True) as kept:
            # the warm-up, which makes the gradients too where they are missing
            self.network.loss(tokens).backward()
            size = kept()
        times = []
        for _ in range(self.repeats):
            begun = now(self.device) - self.network.seconds_apart
            self.network.loss(tokens).backward()
            times.append(now(self.device) - self.network.seconds_apart - begun)
        largest, spread = self.network.largest, max(times) - min(times)
        return Pass(largest(statistics.median(times)), largest(spread), largest(size))

    @contextmanager
    def _kept(self, free: float, *, whole: bool = False) -> Iterator[Callable[[], float]]:
        """Measure what passes inside keep: yields a function that gives the bytes so far.

        whole: at the peak of the pass on CUDA, else what is allocated when asked. Raises
        OutOfMemoryOnDevice as soon as it is more than `free`: on a CPU in the middle of the pass,
        on CUDA when asked.
        """
        if self.device == "cpu":
            with saved_bytes(self.network.parameters, free) as kept:
                yield kept
            return
        for parameter in self.network.parameters:  # gradients are no activations
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
    """A `Trial` under one ZeRO stage; resident: bytes of model states there. Speaks Algorithm 1's
    protocol."""

    trial: Trial
    resident: float

    @property
    def free(self) -> float:
        """What is left for activations."""
        return self.trial.limit - self.resident

    def forward_memory(self, batch: int) -> MemoryReading:
        """States before the forward pass, states and activations after it, and the limit (not
        beyond `largest`).

        What a pass keeps once, whatever its samples (masks), would make the estimate too low: what
        a second sample adds counts instead, where two fit.
        """
        if self.free <= 0:
            raise OutOfMemoryOnDevice(f"the states alone exceed {self.trial.limit:.0f} bytes")
        kept = self.trial.forward_bytes(batch, self.free)
        try:
            added = self.trial.forward_bytes(2 * batch, self.free) - kept
        except OutOfMemoryOnDevice:
            added = kept
        return MemoryReading(
            min(self.trial.limit, self.resident + added / batch * (self.trial.largest + 0.5)),
            self.resident,
            self.resident + added,
        )

    def step_seconds(self, batch: int) -> float:
        """Median seconds of forward and backward."""
        return self.trial.measure(batch, self.free).seconds


def explore_stages(trial: Trial) -> list[Awareness]:
    """[4] what Algorithm 1 finds under each ZeRO stage; the first that holds a sample is where it
    would stop."""
    return [explore(trial.at(stage)) for stage in STAGES]
