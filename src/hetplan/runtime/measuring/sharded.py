"""A text model whose weights lie in shards over ranks (ZeRO 3), as measurements take it: no rank
holds more of it than its shards and one layer of each kind.

Before each of its passes a layer's weights are gathered into the memory of its kind. Gathering does
not overlap with passes, so that its seconds can be taken off. Gradients stay where they arise: what
summing them takes is no part of a batch curve.
Source: Rajbhandari et al. 2020 (ZeRO), Section 5.3.
"""

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.formulations.poplar.awareness import OutOfMemoryOnDevice
from hetplan.runtime.devices import now
from hetplan.runtime.measuring.networks import Network, out_of_memory


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
