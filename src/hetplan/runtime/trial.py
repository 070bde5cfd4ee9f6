"""Poplar's Algorithm 1 on a live device: passes of a real chain of layers, timed, within a memory
limit.

One device tries for a whole ZeRO group: it is charged with the model states that it would hold as
one of `devices`
(see `formulations.poplar.zero`) and with the activations that the pass really kept, measured. On
CUDA these are what torch's allocator says at its peak, temporaries of the backward pass included;
on a CPU, where nothing keeps such books, the distinct storages that autograd saves. The whole
model's weights and gradients do lie on the device meanwhile: where ZeRO 3 trains models that one
device cannot hold, this cannot measure.
Source: Poplar (AAAI 2025), Algorithm 1.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hetplan.errors import InputError, UnsupportedError
from hetplan.formulations.poplar.awareness import (
    Awareness,
    MemoryReading,
    OutOfMemoryOnDevice,
    explore,
)
from hetplan.formulations.poplar.zero import STAGES, States
from hetplan.profiling.models import Model
from hetplan.runtime.chain import Chain, build_chain


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
    micro-batch tried.
    """

    model: Model
    device: str
    limit: float
    devices: int = 1
    largest: int = 256
    repeats: int = 3
    tell: Callable[[str], None] | None = None
    chain: Chain = field(init=False, repr=False)
    states: States = field(init=False)
    passes: dict[int, Pass] = field(init=False, default_factory=dict)
    too_large: dict[int, float] = field(
        init=False, default_factory=dict
    )  # micro-batch -> free bytes it exceeded

    def __post_init__(self) -> None:
        self.chain = build_chain(self.model, self.device)
        self.states = states_of(self.chain, self.model)

    def at(self, stage: int) -> TrialAt:
        """The device under a ZeRO stage."""
        return TrialAt(self, stage, self.states.resident(stage, 1.0 / self.devices))

    def measure(self, batch: int, free: float) -> Pass:
        """Times and activations of a micro-batch, each size once; raises OutOfMemoryOnDevice beyond
        `free` bytes."""
        if self.too_large.get(batch, -1.0) >= free:
            raise OutOfMemoryOnDevice(f"{batch} samples exceed {free:.0f} bytes")
        if batch not in self.passes:
            try:
                with out_of_memory(batch):
                    self.passes[batch] = self._timed(batch, free)
            except OutOfMemoryOnDevice as error:
                self.too_large[batch] = free
                self._say(f"micro-batch {batch}: {error}")
                raise
            found = self.passes[batch]
            self._say(
                f"micro-batch {batch}: {1e3 * found.seconds:.4g} ms, {found.saved_bytes / 2**20:.4g} MiB"
            )
        if self.passes[batch].saved_bytes > free:
            raise OutOfMemoryOnDevice(f"{batch} samples exceed {free:.0f} bytes")
        return self.passes[batch]

    def forward_bytes(self, batch: int, free: float) -> float:
        """Bytes that the forward pass of a micro-batch keeps; raises OutOfMemoryOnDevice."""
        tokens = self._tokens(batch)
        with out_of_memory(batch), saved(self.device, self.chain, free) as kept:
            loss = self.chain.forward(tokens)
            found = kept()
            del loss
        return found

    def _timed(self, batch: int, free: float) -> Pass:
        tokens = self._tokens(batch)
        with saved(self.device, self.chain, free, whole=True) as kept:
            self._step(tokens)  # the warm-up, which makes the gradients too where they are missing
            bytes_kept = kept()
        times = []
        for _ in range(self.repeats):
            self._wait()
            begun = time.perf_counter()
            self._step(tokens)
            self._wait()
            times.append(time.perf_counter() - begun)
        return Pass(statistics.median(times), max(times) - min(times), bytes_kept)

    def _step(self, tokens: Any) -> None:
        self.chain.forward(tokens).backward()

    def _tokens(self, batch: int) -> Any:
        import torch

        vocabulary = self.model.spec.shape.vocabulary if self.model.spec.shape else 2
        return torch.randint(vocabulary, (batch, self.model.sequence or 1), device=self.device)

    def _wait(self) -> None:
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize(self.device)

    def _say(self, line: str) -> None:
        if self.tell is not None:
            self.tell(line)


@dataclass(frozen=True)
class TrialAt:
    """A `Trial` under one ZeRO stage; resident: bytes of model states there. Speaks Algorithm 1's
    protocol."""

    trial: Trial
    stage: int
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
        most = self.resident + added / batch * (self.trial.largest + 0.5)
        return MemoryReading(min(self.trial.limit, most), self.resident, self.resident + added)

    def step_seconds(self, batch: int) -> float:
        """Median seconds of forward and backward."""
        return self.trial.measure(batch, self.free).seconds


def explore_stages(trial: Trial) -> list[Awareness]:
    """[4] what Algorithm 1 finds under each ZeRO stage; the first that holds a sample is where it
    would stop."""
    return [explore(trial.at(stage)) for stage in STAGES]


def states_of(chain: Chain, model: Model) -> States:
    """Weights, gradients and Adam's states of the parameters that really exist; activations are
    measured instead."""
    layers = [sum(p.numel() * p.element_size() for p in layer) for layer in chain.parameters]
    return States.of_weights(layers, model.precision)


def check_device(device: str) -> None:
    """Raise UnsupportedError without torch, InputError for a device that torch does not have
    here."""
    try:
        import torch
    except ImportError:
        raise UnsupportedError(
            "measuring needs torch; install hetplan with its extra: pip install 'hetplan[runtime]'"
        ) from None
    kind, _, number = device.partition(":")
    usable = kind == "cpu" and not number
    if kind == "cuda" and (not number or number.isdecimal()):
        usable = int(number or 0) < torch.cuda.device_count()
    if not usable:
        have = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise InputError("no such device here", got=device, expected=" or ".join(have))


@contextmanager
def out_of_memory(batch: int) -> Iterator[None]:
    """What torch raises where memory is short, as OutOfMemoryOnDevice; what the pass held is given
    back first."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        short = True
    except RuntimeError as error:  # the CPU's allocator has no exception of its own
        if "allocate memory" not in str(error):
            raise
        short = True
    else:
        short = False
    if short:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise OutOfMemoryOnDevice(f"{batch} samples: out of memory on the device")


@contextmanager
def saved(
    device: str, chain: Chain, free: float, *, whole: bool = False
) -> Iterator[Callable[[], float]]:
    """Measure what passes inside keep: yields a function that gives the bytes so far.

    whole: at the peak of the pass on CUDA, else what is allocated when asked. Raises
    OutOfMemoryOnDevice as soon as it is more than `free`: on a CPU in the middle of the pass, on
    CUDA when asked.
    """
    if device == "cpu":
        with _saved_by_autograd(chain, free) as kept:
            yield kept
        return
    import torch

    ensure_gradients(chain)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)

    def kept_on_device() -> float:
        torch.cuda.synchronize(device)
        read = torch.cuda.max_memory_allocated if whole else torch.cuda.memory_allocated
        found = float(read(device) - before)
        if found > free:
            raise OutOfMemoryOnDevice(f"{found:.0f} bytes of activations, {free:.0f} free")
        return found

    yield kept_on_device


def ensure_gradients(chain: Chain) -> None:
    """Allocate all gradients, so that later passes add to them and their growth is not taken for
    activations."""
    import torch

    for layer in chain.parameters:
        for parameter in layer:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


@contextmanager
def _saved_by_autograd(chain: Chain, free: float) -> Iterator[Callable[[], float]]:
    """Bytes of the distinct storages that autograd saves, parameters left out."""
    import torch

    own = {p.untyped_storage().data_ptr() for layer in chain.parameters for p in layer}
    seen: dict[int, int] = {}
    total = 0

    def pack(tensor: Any) -> Any:
        nonlocal total
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in own and seen.get(place, 0) < storage.nbytes():
            total += storage.nbytes() - seen.get(place, 0)
            seen[place] = storage.nbytes()
            if total > free:
                raise OutOfMemoryOnDevice(f"{total} bytes of activations, {free:.0f} free")
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: float(total)
