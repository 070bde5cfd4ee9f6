"""Reference layers as measurements take them: on a device, with random weights in the model's
precision and torch's own dropout, and what autograd keeps of their passes.

What a step costs and holds does not depend on the weights' values.

A text model whose weights lie in shards over ranks (ZeRO 3), as measurements take it: no rank
holds more of it than its shards and one layer of each kind.

Before each of its passes a layer's weights are gathered into the memory of its kind. Gathering does
not overlap with passes, so that its seconds can be taken off. Gradients stay where they arise: what
summing them takes is no part of a batch curve.
Source: Rajbhandari et al. 2020 (ZeRO), Section 5.3.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetplan.errors import UnsupportedError, require
from hetplan.profiling.models.model import Model
from hetplan.profiling.models.transformer import Transformer
from hetplan.profiling.profiles.largest_batch import OutOfMemoryOnDevice
from hetplan.runtime.launch.devices import now
from hetplan.runtime.references import text_layers
from hetplan.runtime.tracing.counter import DTYPES, saved_by_autograd, storage

KINDS = ("embedding", "block", "head")


@dataclass
class Network:
    """A text model on a device. layers: embedding, blocks, head; own: the parameters of each, a
    shared table with the embedding alone; seconds_apart: of collectives so far."""

    layers: tuple[nn.Module, ...]
    own: tuple[tuple[Tensor, ...], ...]
    seconds_apart: float = 0.0

    def loss(self, tokens: Tensor) -> Any:
        """Of one micro-batch [B, S]; the targets are the tokens themselves."""
        x = tokens
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.layers[-1](x, tokens)

    def largest(self, value: float) -> float:
        """Of all ranks, of which there is one."""
        return value

    @property
    def parameters(self) -> list[Tensor]:
        """All, each once."""
        return [parameter for layer in self.own for parameter in layer]


def shape_of(model: Model) -> tuple[Transformer, int]:
    """Shape and sequence of a text model; raises UnsupportedError for others."""
    shape = model.spec.shape
    if shape is None or model.sequence is None:
        raise UnsupportedError(f"{model.name} has no torch layers here; text transformers have")
    return shape, model.sequence


def silent(line: str) -> None:
    """Tell nobody."""


def shard(shape: Transformer, tensor: int) -> Transformer:
    """One rank's part of a shape; raises InputError where the degree divides heads or feed-forward
    unevenly."""
    require(
        shape.heads % tensor == shape.feed_forward % tensor == 0,
        "tensor degree does not divide heads and feed-forward size",
        got=tensor,
    )
    return replace(
        shape,
        heads=shape.heads // tensor,
        kv_heads=max(shape.kv_heads // tensor, 1),
        feed_forward=shape.feed_forward // tensor,
        vocabulary=-(-shape.vocabulary // tensor),
    )


def network(model: Model, device: str, *, tensor: int = 1, blocks: int | None = None) -> Network:
    """The model's layers on a torch device, one rank's part of them; blocks: fewer than it has.

    Raises UnsupportedError for a model without torch layers.
    """
    shape = shard(shape_of(model)[0], tensor)
    shape = replace(shape, layers=shape.layers if blocks is None else blocks)
    with torch.device(device):
        layers = nn.ModuleList(text_layers(shape).values()).to(DTYPES[model.precision])
    own: list[list[Tensor]] = [[] for _ in layers]
    for name, parameter in layers.named_parameters():  # a shared one under its first name
        nn.init.normal_(parameter, std=0.02)
        own[int(name.partition(".")[0])].append(parameter)
    return Network(tuple(layers), tuple(map(tuple, own)))


def tokens_of(model: Model, batch: int, device: str, *, tensor: int = 1) -> Tensor:
    """[B, S] random tokens of one rank's part of the vocabulary."""
    shape, sequence = shape_of(model)
    return torch.randint(shard(shape, tensor).vocabulary, (batch, sequence), device=device)


@contextmanager
def saved_bytes(
    parameters: Iterable[Tensor], limit: float = float("inf")
) -> Iterator[Callable[[], float]]:
    """Yields how many bytes of distinct storages autograd has saved inside, parameters left out;
    raises OutOfMemoryOnDevice as soon as they are more than `limit`."""

    sizes: list[float] = []

    def add(size: float) -> None:
        sizes.append(size)
        if sum(sizes) > limit:
            raise OutOfMemoryOnDevice(f"{sum(sizes):.0f} bytes of activations, {limit:.0f} free")

    with saved_by_autograd({storage(parameter) for parameter in parameters}, add):
        yield lambda: sum(sizes)


@contextmanager
def out_of_memory(batch: int) -> Iterator[None]:
    """What torch raises where memory is short, as OutOfMemoryOnDevice; what the pass held is given
    back first."""
    try:
        yield
        return
    except torch.OutOfMemoryError:
        pass
    except RuntimeError as error:  # the CPU's allocator has no exception of its own
        if "allocate memory" not in str(error):
            raise
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise OutOfMemoryOnDevice(f"{batch} samples: out of memory on the device")


class Sharded(Network):
    """A network in which one block's weights stand for all blocks', on one of torch.distributed's
    ranks. shards: this rank's weights, by layer.

    A rank whose memory is short computes no more, but goes on gathering with the others; then all
    raise OutOfMemoryOnDevice.
    """

    def __init__(self, network: Network, device: str) -> None:
        super().__init__(network.layers, network.own)
        self.device, self.ranks, self.short = device, dist.get_world_size(), False
        first, block, last = map(self._flat, self.own)
        self.whole = [first, *[block] * (len(self.layers) - 2), last]
        self.shards = [weights.chunk(self.ranks)[dist.get_rank()].clone() for weights in self.whole]

    def _flat(self, own: tuple[Tensor, ...]) -> Tensor:
        """The weights of a layer, padded to equal shards; its parameters become views of them."""
        sizes = [parameter.numel() for parameter in own]
        padding = self.ranks - sum(sizes) % self.ranks
        flat = self.parameters[0].new_zeros(sum(sizes) + padding, requires_grad=False)
        for parameter, values in zip(own, flat.split([*sizes, padding]), strict=False):
            parameter.data = values.view_as(parameter).copy_(parameter.data)
        return flat

    def largest(self, value: float) -> float:
        """Of all ranks."""
        result = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(result, dist.ReduceOp.MAX)
        return float(result)

    def loss(self, tokens: Tensor) -> Any:
        """The forward pass; what is returned has a `backward`."""
        inputs, outputs, gradient = list[Tensor](), list[Any](), None
        self.short = False
        for k, layer in enumerate(self.layers):
            x = outputs[-1].detach().requires_grad_() if k else tokens
            inputs.append(x)
            outputs.append(self._pass(k, layer, x, *[tokens] * (k == len(self.layers) - 1)))
        self._agree()

        def backward() -> None:
            nonlocal gradient
            for k in reversed(range(len(outputs))):
                self._pass(k, torch.autograd.backward, outputs.pop(), gradient)
                gradient = inputs.pop().grad
            self._agree()

        return SimpleNamespace(backward=backward)

    def _pass(self, k: int, act: Callable[..., Any], *values: Any) -> Any:
        """What layer k makes of the values; the first one where memory is short."""
        begun = now(self.device)
        dist.all_gather_into_tensor(self.whole[k], self.shards[k])
        self.seconds_apart += now(self.device) - begun
        with suppress(OutOfMemoryOnDevice), out_of_memory(1):
            if not self.short:
                return act(*values)
        self.short = True
        return values[0]

    def _agree(self) -> None:
        """Raise OutOfMemoryOnDevice where memory is short on some rank."""
        if self.largest(self.short):
            raise OutOfMemoryOnDevice("out of memory on some rank")
