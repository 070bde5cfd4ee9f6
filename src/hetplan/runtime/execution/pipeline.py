"""One rank's passes of an iteration, in the order of its schedule.

A pass of a micro-batch is a pass of each layer, an autograd graph of its own: so that ZeRO 3 and
recomputation act between layers, and nothing is kept of a layer that is computed again. A rank
without rows of a micro-batch computes nothing and gets no message, but takes part in what ZeRO does
together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetplan.errors import InputError
from hetplan.runtime.execution.chain import Chain
from hetplan.runtime.execution.messages import Mail
from hetplan.runtime.execution.places import Layout
from hetplan.runtime.execution.position import Position, at
from hetplan.runtime.execution.states import States
from hetplan.runtime.plan import Place
from hetplan.runtime.watch import Watch

Rows = Callable[[int, int], tuple[Tensor, Tensor]]  # global rows [first, last) -> inputs, targets


@dataclass
class Saved:
    """What is kept of a layer's forward pass: its input and, unless it is computed again, its
    output."""

    layer: int
    x: Tensor
    y: Tensor | None


@dataclass
class Pipeline:
    """A rank's part. layers: those of this rank, by number; loss: behind the last layer, unless
    that gives it."""

    layout: Layout
    place: Place
    chain: Chain
    layers: Mapping[int, nn.Module]
    states: States
    mail: Mail
    loss: Callable[[Tensor, Tensor], Tensor] | None
    count: Callable[[Tensor], float]
    watch: Watch
    device: Any

    def __post_init__(self) -> None:
        self.ranges = self.layout.layers(self.place)
        self.actions = self.layout.actions(self.place)
        self.hops = len(self.layout.plan.replicas[self.place.replica].stages)
        self.recompute = self.layout.plan.recomputation == "full"
        self.saved: dict[tuple[int, int], list[Saved]] = {}
        self.position = Position()
        self.total = 0.0

    @property
    def has_loss(self) -> bool:
        """Whether the last layer is here."""
        return self.ranges[-1][1] == len(self.chain.names)

    def weight(self, rows: Rows) -> float:
        """What this rank's targets weigh: to be added up over all ranks; one tensor rank speaks for
        its group."""
        if not self.has_loss or self.place.tensor != 0:
            return 0.0
        mine = [self._rows(batch) for batch in range(self._steps())]
        return float(sum(self.count(rows(a, b)[1]) for a, b in mine if a < b))

    def run(self, rows: Rows, position: Position, weight: float) -> float:
        """All passes; gradients are those of the losses divided by `weight`. Returns the sum of
        this rank's losses."""
        self.total, self.position = 0.0, position
        for backward, chunk, batch in self.actions:
            if backward:
                self._backward(chunk, batch, rows, weight)
                if chunk == 0:
                    self.states.after_step()
                    self.watch.stepped(batch)
            else:
                self._forward(chunk, batch, rows)
        assert not self.saved, "a forward pass has no backward pass"
        return self.total if self.place.tensor == 0 else 0.0

    def _steps(self) -> int:
        return self.layout.plan.replicas[self.place.replica].steps

    def _rows(self, batch: int) -> tuple[int, int]:
        return self.layout.rows(self.place.replica, self.place.stage, batch)[self.place.group]

    def _hop(self, chunk: int) -> int:
        """The virtual stage of a chunk here: hop v leads to the next one, hop v - 1 here."""
        return chunk * self.hops + self.place.stage

    def _forward(self, chunk: int, batch: int, rows: Rows) -> None:
        (first, last), (a, b) = self.ranges[chunk], self._rows(batch)
        busy, last_layer = a < b, len(self.chain.names) - 1
        x = self._arrive(chunk, batch, rows) if busy else None
        targets = rows(a, b)[1].to(self.device) if busy and last > last_layer else None
        self.watch.begins("forward", chunk, batch)
        kept: list[Saved] = []
        with at(Position(self.position.seed, self.position.step, a)):
            for k in range(first, last):
                self.states.before_layer(k)
                if x is not None:
                    x = self._layer(k, x, targets if k == last_layer else None, kept)
                self.states.after_layer(k, backward=False)
        self.watch.ends("forward", chunk, batch)
        self.saved[chunk, batch] = kept
        if x is None:
            return
        if last > last_layer:
            if x.numel() != 1:
                raise InputError(
                    "loss", got=tuple(x.shape), expected="one number, the sum over all rows"
                )
            self.total += float(x)
        else:
            self.mail.send(x, self._hop(chunk), batch, forward=True)

    def _arrive(self, chunk: int, batch: int, rows: Rows) -> Tensor:
        """The first layer's input."""
        first = self.ranges[chunk][0]
        if first == 0:
            return rows(*self._rows(batch))[0].to(self.device)
        shape, dtype = self.chain.outputs[first - 1]
        self.watch.begins("receive", chunk, batch)
        x = self.mail.receive(shape, dtype, self._hop(chunk) - 1, batch, forward=True)
        self.watch.ends("receive", chunk, batch)
        return x

    def _layer(self, k: int, x: Tensor, targets: Tensor | None, kept: list[Saved]) -> Tensor:
        """A layer's forward pass on a graph of its own; what comes out is detached."""
        x = x.detach()
        if k > 0 and x.is_floating_point():
            x.requires_grad_()
        again = self.recompute and k + 1 < len(self.chain.names)
        with torch.set_grad_enabled(not again):
            y = self._call(k, x, targets)
        self.watch.passed()
        kept.append(Saved(k, x, None if again else y))
        return y.detach()

    def _call(self, k: int, x: Tensor, targets: Tensor | None) -> Tensor:
        if k + 1 < len(self.chain.names):
            return self.chain.call(k, x)
        if self.loss is None:
            return self.chain.call(k, x, targets)
        assert targets is not None
        y = self.chain.call(k, x)
        return self.loss(y if self.chain.compute is None else y.float(), targets)

    def _backward(self, chunk: int, batch: int, rows: Rows, weight: float) -> None:
        (first, last), (a, b) = self.ranges[chunk], self._rows(batch)
        kept = self.saved.pop((chunk, batch))
        grad = self._gradient(chunk, batch, kept, weight) if a < b else None
        self.watch.begins("backward", chunk, batch)
        with at(Position(self.position.seed, self.position.step, a)):
            for k in reversed(range(first, last)):
                self.states.before_layer(k)
                if kept:
                    grad = self._layer_back(kept.pop(), grad)
                self.states.after_layer(k, backward=True)
        self.watch.ends("backward", chunk, batch)
        if a < b and first > 0:
            shape, dtype = self.chain.outputs[first - 1]
            if grad is None:  # nothing before depends on a parameter
                grad = torch.zeros(b - a, *shape, dtype=dtype, device=self.device)
            self.mail.send(grad, self._hop(chunk) - 1, batch, forward=False)

    def _gradient(self, chunk: int, batch: int, kept: Sequence[Saved], weight: float) -> Tensor:
        """Of what the last layer here gave."""
        last = self.ranges[chunk][1]
        if last == len(self.chain.names):
            y = kept[-1].y
            assert y is not None
            return torch.full_like(y, 1.0 / weight)
        shape, dtype = self.chain.outputs[last - 1]
        self.watch.begins("receive", chunk, batch)
        x = self.mail.receive(shape, dtype, self._hop(chunk), batch, forward=False)
        self.watch.ends("receive", chunk, batch)
        return x

    def _layer_back(self, saved: Saved, grad: Tensor | None) -> Tensor | None:
        """A layer's backward pass: the gradient of its input."""
        y = saved.y
        if y is None:
            y = self._call(saved.layer, saved.x, None)
        if grad is not None and y.requires_grad:
            torch.autograd.backward(y, grad)
        self.watch.passed()
        return saved.x.grad
