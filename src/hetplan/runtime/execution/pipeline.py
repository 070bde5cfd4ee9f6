"""One rank's passes of an iteration, in the order of its schedule, and what stages send each other.

A pass of a micro-batch is a pass of each layer, an autograd graph of its own: so that ZeRO 3 and
recomputation act between layers, and nothing is kept of a layer that is computed again. A rank
without rows of a micro-batch computes nothing and gets no message, but takes part in what ZeRO does
together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hetplan.errors import InputError
from hetplan.formulations.joint.plan import Place
from hetplan.runtime.execution.chain import Chain, called
from hetplan.runtime.execution.places import Layout
from hetplan.runtime.execution.position import Position, at, drawing
from hetplan.runtime.execution.states import States
from hetplan.runtime.execution.transport import Message, Stream, Transport
from hetplan.schema import Range

Rows = Callable[[int, int], tuple[Tensor, Tensor]]  # global rows [first, last) -> inputs, targets


@dataclass
class Mail:
    """One rank's messages: the rows that a sender has and a receiver needs, whatever the widths of
    both.

    A micro-batch's rows lie on the row groups of a stage as its shares say; from one stage to the
    next every intersection of two groups' rows is one message per receiving tensor rank.
    Activations are whole on all tensor ranks, so each one receives from one of the sender's. What a
    hop carries comes in the order of the micro-batches.

    sent: those on their way, with their tensors; local: what a rank sends to itself.
    """

    layout: Layout
    place: Place
    transport: Transport
    sent: list[Message] = field(default_factory=list)
    local: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def send(self, x: Tensor, hop: int, batch: int, *, forward: bool) -> None:
        """My rows of what goes over a hop (virtual stages hop and hop + 1), to all who need
        them."""
        first, rank = self.layout.own_rows(self.place, batch)[0], self.place.rank
        self.sent = self.transport.pending(self.sent)
        self.transport.watch.departs(hop, batch, forward=forward)
        carried = messages(self.layout, self.place.replica, hop, batch, forward=forward)
        for (tag, sender, receiver), (a, b) in carried:
            if sender == rank:
                rows = x[a - first : b - first].contiguous()
                if receiver == rank:
                    self.local[tag, batch] = rows
                else:
                    self.sent.append(self.transport.post(rows, receiver, tag))

    def receive(
        self, shape: tuple[int, ...], dtype: Any, hop: int, batch: int, *, forward: bool
    ) -> Tensor:
        """My rows [rows, *shape] of what comes over a hop."""
        (first, last), rank = self.layout.own_rows(self.place, batch), self.place.rank
        x = self.transport.space((last - first, *shape), dtype)
        carried = messages(self.layout, self.place.replica, hop, batch, forward=forward)
        for (tag, sender, receiver), (a, b) in carried:
            if sender == receiver == rank:
                x = self.local.pop((tag, batch))
            elif receiver == rank:
                self.transport.fetch(x[a - first : b - first], sender, tag)
        self.transport.watch.arrives(hop, batch, forward=forward)
        return x.to(self.transport.device)

    def settle(self) -> None:
        """Wait until everything sent has been received."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()


def messages(
    layout: Layout, replica: int, hop: int, batch: int, *, forward: bool
) -> Iterator[tuple[Stream, Range]]:
    """(tag, sender, receiver) and global rows of all that goes over a hop of a replica.

    Tags are such that two ranks send in one direction only, what one hop carries: two stages meet
    once in as many hops as there are stages, or in each one where there are two.
    """
    count = len(layout.plan.replicas[replica].stages)
    stages = [hop % count, (hop + 1) % count]
    senders, receivers = (
        list(zip(layout.ranks_of(replica, s), layout.rows(replica, s, batch), strict=True))
        for s in (stages if forward else reversed(stages))
    )
    tag = 2 * (hop // max(1, count - 1)) + forward
    for (sending, (a, b)), (receiving, (c, d)) in product(senders, receivers):
        if max(a, c) < min(b, d):
            for tensor, receiver in enumerate(receiving):
                sender = sending[tensor * len(sending) // len(receiving)]
                yield (tag, sender, receiver), (max(a, c), min(b, d))


def streams(layout: Layout) -> list[Stream]:
    """(tag, sender, receiver) of every message between two ranks, each once."""
    used: set[Stream] = set()
    for i, replica in enumerate(layout.plan.replicas):
        hops = range(len(replica.stages) * len(replica.stages[0].layers) - 1)
        for hop, batch, forward in product(hops, range(replica.steps), (False, True)):
            used |= {one for one, _ in messages(layout, i, hop, batch, forward=forward)}
    return sorted((tag, a, b) for tag, a, b in used if a != b)


@dataclass
class Saved:
    """What is kept of a layer's forward pass: its input and, unless it is computed again, its
    output."""

    layer: int
    x: Tensor
    y: Tensor | None


@dataclass
class Pipeline:
    """A rank's part. loss: behind the last layer, unless that gives it."""

    layout: Layout
    place: Place
    chain: Chain
    states: States
    mail: Mail
    loss: Callable[[Tensor, Tensor], Tensor] | None
    count: Callable[[Tensor], float]

    def __post_init__(self) -> None:
        self.ranges = self.layout.stage(self.place).layers
        self.end = len(self.chain.names)
        self.watch = self.mail.transport.watch
        self.replica = self.layout.plan.replicas[self.place.replica]
        self.saved: dict[tuple[int, int], list[Saved]] = {}
        self.position = Position()
        self.total: Tensor | float = 0.0

    def weight(self, rows: Rows) -> float:
        """What this rank's targets weigh: to be added up over all ranks; one tensor rank speaks for
        its group."""
        if self.ranges[-1][1] < self.end or self.place.tensor != 0:
            return 0.0
        mine = [self._rows(batch) for batch in range(self.replica.steps)]
        return float(sum(self.count(rows(a, b)[1]) for a, b in mine if a < b))

    def run(self, rows: Rows, position: Position, weight: float) -> float:
        """All passes; gradients are those of the losses divided by `weight`. Returns the sum of
        this rank's losses."""
        self.total, self.position = 0.0, position
        for backward, chunk, batch in self.layout.actions(self.place):
            if backward:
                self._backward(chunk, batch, rows, weight)
                if chunk == 0:
                    self.states.after_step()
                    self.watch.stepped(batch)
            else:
                self._forward(chunk, batch, rows)
        assert not self.saved, "a forward pass has no backward pass"
        return float(self.total) if self.place.tensor == 0 else 0.0

    def _rows(self, batch: int) -> Range:
        return self.layout.own_rows(self.place, batch)

    def _hop(self, chunk: int) -> int:
        """The virtual stage of a chunk here: hop v leads to the next one, hop v - 1 here."""
        return chunk * len(self.replica.stages) + self.place.stage

    def _forward(self, chunk: int, batch: int, rows: Rows) -> None:
        (first, last), (a, b) = self.ranges[chunk], self._rows(batch)
        x = targets = None
        if a < b and first > 0:
            x = self._receive(chunk, batch, forward=True)
        elif a < b:
            x = rows(a, b)[0].to(self.mail.transport.device)
        if a < b and last == self.end:
            targets = rows(a, b)[1].to(self.mail.transport.device)
        kept: list[Saved] = []
        position = replace(self.position, first_row=a)
        with self.watch.during("forward", chunk, batch), at(position):
            for k in range(first, last):
                self.states.before_layer(k)
                if x is not None:
                    x = self._layer(k, x, targets if k + 1 == self.end else None, kept)
                self.states.after_layer(k, backward=False)
        self.saved[chunk, batch] = kept
        if x is None:
            return
        if last == self.end:
            if x.numel() != 1:
                raise InputError(
                    "loss", got=tuple(x.shape), expected="one number, the sum over all rows"
                )
            self.total = self.total + x.double()  # no look at the value: a GPU goes on
        else:
            self.mail.send(x, self._hop(chunk), batch, forward=True)

    def _receive(self, chunk: int, batch: int, *, forward: bool) -> Tensor:
        """What the layer before a chunk gave, or the gradient of what the chunk's last one did."""
        first, last = self.ranges[chunk]
        shape, dtype = self.chain.outputs[(first if forward else last) - 1]
        with self.watch.during("receive", chunk, batch):
            hop = self._hop(chunk) - forward
            return self.mail.receive(shape, dtype, hop, batch, forward=forward)

    def _layer(self, k: int, x: Tensor, targets: Tensor | None, kept: list[Saved]) -> Tensor:
        """A layer's forward pass on a graph of its own; what comes out is detached."""
        x = x.detach()
        if k > 0 and x.is_floating_point():
            x.requires_grad_()
        again = self.layout.plan.recomputation == "full" and k + 1 < self.end
        with torch.set_grad_enabled(not again):
            y = self._call(k, x, targets)
        self.watch.passed()
        kept.append(Saved(k, x, None if again else y))
        return y.detach()

    def _call(self, k: int, x: Tensor, targets: Tensor | None) -> Any:
        """targets: of the last layer's pass, None otherwise."""
        layer, compute = self.chain.layers[k], self.chain.compute
        more = () if targets is None or self.loss is not None else (targets,)
        with drawing(k, self.mail.transport.device):
            y = called(layer, compute, x, *more)
        if targets is None or self.loss is None:
            return y
        return self.loss(y if compute is None else y.float(), targets)

    def _backward(self, chunk: int, batch: int, rows: Rows, weight: float) -> None:
        (first, last), (a, b) = self.ranges[chunk], self._rows(batch)
        kept = self.saved.pop((chunk, batch))
        grad = self._gradient(chunk, batch, kept, weight) if kept else None
        position = replace(self.position, first_row=a)
        with self.watch.during("backward", chunk, batch), at(position):
            for k in reversed(range(first, last)):
                self.states.before_layer(k)
                if kept:
                    grad = self._layer_back(kept.pop(), grad)
                self.states.after_layer(k, backward=True)
        if a < b and first > 0:
            shape, dtype = self.chain.outputs[first - 1]
            if grad is None:  # nothing before depends on a parameter
                grad = torch.zeros(b - a, *shape, dtype=dtype, device=self.mail.transport.device)
            self.mail.send(grad, self._hop(chunk) - 1, batch, forward=False)

    def _gradient(self, chunk: int, batch: int, kept: Sequence[Saved], weight: float) -> Tensor:
        """Of what the last layer here gave."""
        y = kept[-1].y
        if self.ranges[chunk][1] == self.end and y is not None:
            return torch.full_like(y, 1.0 / weight)
        return self._receive(chunk, batch, forward=False)

    def _layer_back(self, saved: Saved, grad: Tensor | None) -> Tensor | None:
        """A layer's backward pass: the gradient of its input."""
        y = saved.y
        if y is None:
            y = self._call(saved.layer, saved.x, None)
        if grad is not None and y.requires_grad:
            torch.autograd.backward(y, grad)
        self.watch.passed()
        return saved.x.grad
