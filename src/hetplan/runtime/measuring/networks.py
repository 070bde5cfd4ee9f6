"""The models that are measured: reference layers on a device, with random weights in the model's
precision and torch's own dropout. Times and memory of a step do not depend on the weights' values.

`Network` is a model on one device. `Sharded` is a model whose weights are in shards on several
ranks (ZeRO 3): a rank has no more of it than its shards and the weights of one layer of each kind.
Before each pass of a layer its weights are gathered into the memory of its kind. Gathering does not
overlap with passes, so that its seconds can be subtracted. Gradients are not summed over the ranks,
since a batch curve does not include the seconds of this sum.

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
    """A text model on a device."""

    layers: tuple[nn.Module, ...]
    """The embedding, the blocks, and the head."""
    layer_parameters: tuple[tuple[Tensor, ...], ...]
    """[layer] parameters; a table that embedding and head share is listed for the embedding
    alone."""
    seconds_apart: float = 0.0
    """Seconds of all collectives so far, which the times of passes do not include."""

    def loss(self, tokens: Tensor) -> Any:
        """The loss of one micro-batch [B, S]; the targets are the tokens."""
        x = tokens
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.layers[-1](x, tokens)

    def largest(self, value: float) -> float:
        """The largest value of all ranks. Here there is one rank."""
        return value

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, each once."""
        return [parameter for layer in self.layer_parameters for parameter in layer]


def shape_of(model: Model) -> tuple[Transformer, int]:
    """(shape, tokens of a sample) of a text model. Raises UnsupportedError for any other model."""
    shape = model.spec.shape
    if shape is None or model.sequence is None:
        raise UnsupportedError(f"{model.name} has no torch layers here; text transformers have")
    return shape, model.sequence


def silent(line: str) -> None:
    """Drop a line about the progress: the `tell` of a measurement that is not watched."""


def shard(shape: Transformer, tensor: int) -> Transformer:
    """One rank's part of a shape under a tensor degree. Raises InputError where the degree does not
    divide the heads and the feed-forward size."""
    require(
        shape.heads % tensor == shape.feed_forward % tensor == 0,
        "tensor degree does not divide heads and feed-forward size",
        got=tensor,
    )
    return replace(
        shape,
        heads=shape.heads // tensor,
        kv_heads=max(shape.kv_heads // tensor, 1),  # fewer than ranks: ranks have the same one
        feed_forward=shape.feed_forward // tensor,
        vocabulary=-(-shape.vocabulary // tensor),  # rounded up, as the largest part is
    )


def network(model: Model, device: str, *, tensor: int = 1, blocks: int | None = None) -> Network:
    """One rank's part of the model's layers on a torch device.

    tensor: the tensor degree. blocks: number of blocks; None: as many as the model has. Raises
    UnsupportedError for a model without torch layers.
    """
    shape = shard(shape_of(model)[0], tensor)
    shape = replace(shape, layers=shape.layers if blocks is None else blocks)
    with torch.device(device):
        layers = nn.ModuleList(text_layers(shape).values()).to(DTYPES[model.precision])
    layer_parameters: list[list[Tensor]] = [[] for _ in layers]
    for name, parameter in layers.named_parameters():  # a shared parameter by its first name
        nn.init.normal_(parameter, std=0.02)
        layer_number = int(name.partition(".")[0])
        layer_parameters[layer_number].append(parameter)
    return Network(tuple(layers), tuple(map(tuple, layer_parameters)))


def tokens_of(model: Model, batch: int, device: str, *, tensor: int = 1) -> Tensor:
    """Random tokens [B, S] of one rank's part of the vocabulary. tensor: the tensor degree."""
    shape, sequence = shape_of(model)
    return torch.randint(shard(shape, tensor).vocabulary, (batch, sequence), device=device)


@contextmanager
def saved_bytes(
    parameters: Iterable[Tensor], limit: float = float("inf")
) -> Iterator[Callable[[], float]]:
    """A context that counts the bytes of the distinct storages that autograd saves, without those
    of parameters. It yields a function that returns the bytes so far. Raises OutOfMemoryOnDevice as
    soon as they are more than `limit`."""
    sizes: list[float] = []

    def add(size: float) -> None:
        sizes.append(size)
        if sum(sizes) > limit:
            raise OutOfMemoryOnDevice(f"{sum(sizes):.0f} bytes of activations, {limit:.0f} free")

    with saved_by_autograd({storage(parameter) for parameter in parameters}, add):
        yield lambda: sum(sizes)


@contextmanager
def out_of_memory(batch: int) -> Iterator[None]:
    """A context that raises OutOfMemoryOnDevice where torch is out of memory, after it has freed
    the memory of the failed pass. batch: the micro-batch, for the error."""
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
    """One rank's part of a network whose weights are in shards on torch.distributed's ranks. All
    blocks have one block's weights.

    A rank that is out of memory computes no more, but goes on gathering with the other ranks. At
    the end of the pass all ranks raise OutOfMemoryOnDevice.
    """

    short: bool
    """Whether this rank is out of memory in the present pass."""
    whole: list[Tensor]
    """[layer] memory for the gathered weights of the layer, which all blocks share."""
    shards: list[Tensor]
    """[layer] this rank's shard of the layer's weights."""

    def __init__(self, network: Network, device: str) -> None:
        super().__init__(network.layers, network.layer_parameters)
        self.device = device
        self.ranks = dist.get_world_size()
        self.short = False
        first, block, last = map(self._flat, self.layer_parameters)
        self.whole = [first, *[block] * (len(self.layers) - 2), last]
        self.shards = [weights.chunk(self.ranks)[dist.get_rank()].clone() for weights in self.whole]

    def _flat(self, parameters: tuple[Tensor, ...]) -> Tensor:
        """The weights of a layer as one flat tensor, padded to equal shards. The layer's parameters
        `parameters` become views of it."""
        sizes = [parameter.numel() for parameter in parameters]
        # 1 to `ranks` elements, so that the padding is always the last part of the split below
        padding = self.ranks - sum(sizes) % self.ranks
        flat = self.parameters[0].new_zeros(sum(sizes) + padding, requires_grad=False)
        # not strict: the padding is no parameter's
        for parameter, values in zip(parameters, flat.split([*sizes, padding]), strict=False):
            parameter.data = values.view_as(parameter).copy_(parameter.data)
        return flat

    def largest(self, value: float) -> float:
        """The largest value of all ranks. All ranks call this together."""
        result = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(result, dist.ReduceOp.MAX)
        return float(result)

    def loss(self, tokens: Tensor) -> Any:
        """Run the forward pass. Returns an object whose method `backward` runs the backward
        pass."""
        inputs = list[Tensor]()
        outputs = list[Any]()
        gradient = None
        last = len(self.layers) - 1
        self.short = False
        for k, layer in enumerate(self.layers):
            x = outputs[-1].detach().requires_grad_() if k else tokens
            inputs.append(x)
            arguments = (x, tokens) if k == last else (x,)
            outputs.append(self._pass(k, layer, *arguments))
        self._agree()

        def backward() -> None:
            nonlocal gradient
            for k in reversed(range(len(outputs))):
                self._pass(k, torch.autograd.backward, outputs.pop(), gradient)
                gradient = inputs.pop().grad
            self._agree()

        return SimpleNamespace(backward=backward)

    def _pass(self, k: int, act: Callable[..., Any], *values: Any) -> Any:
        """Gather the weights of layer k and return act(*values); the first value where this rank is
        out of memory."""
        begun = now(self.device)
        dist.all_gather_into_tensor(self.whole[k], self.shards[k])
        self.seconds_apart += now(self.device) - begun
        with suppress(OutOfMemoryOnDevice), out_of_memory(1):
            if not self.short:
                return act(*values)
        self.short = True
        return values[0]

    def _agree(self) -> None:
        """Raise OutOfMemoryOnDevice where some rank is out of memory. All ranks call this
        together."""
        if self.largest(self.short):
            raise OutOfMemoryOnDevice("out of memory on some rank")
