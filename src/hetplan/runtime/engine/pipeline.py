"""One rank's passes of an iteration, in the order of its schedule, and what stages send each other.

A pass of a micro-batch is a pass of each layer, an autograd graph of its own: so that ZeRO 3 and
recomputation act between layers, and nothing is kept of a layer that is computed again. A rank
without rows of a micro-batch computes nothing and gets no message, but takes part in what ZeRO does
together.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from hetplan.errors import InputError
from hetplan.plans.places import Place
from hetplan.runtime.engine.chain import Chain, Rows
from hetplan.runtime.engine.layout import Layout
from hetplan.runtime.engine.position import Position, at, seeded_layer
from hetplan.runtime.engine.states import States
from hetplan.runtime.engine.transport import Message, Stream, Transport, done
from hetplan.runtime.tracing.split import Shape
from hetplan.schema import Range

Values = tuple[Tensor, ...]  # what passes from layer to layer
Gradients = Sequence[Tensor | None]
Moment = tuple[int, int, bool]  # hop, micro-batch, forward


@dataclass
class Mail:
    """One rank's messages: the rows that a sender has and a receiver needs, whatever the widths of
    both.

    A micro-batch's rows lie on the row groups of a stage as its shares say; from one stage to the
    next every intersection of two groups' rows is one message per receiving tensor rank.
    Activations are whole on all tensor ranks, so each one receives from one of the sender's. What a
    hop carries comes in the order of the micro-batches.

    sent: those on their way, with their tensors; expected: those that are to come, by (hop,
    micro-batch, forward), with what they are received into; local: what a rank sends to itself.
    """

    layout: Layout
    place: Place
    transport: Transport
    sent: list[Message] = field(default_factory=list)
    expected: dict[Moment, tuple[list[Tensor], list[Message]]] = field(default_factory=dict)
    local: dict[Moment, list[Tensor]] = field(default_factory=dict)

    def send(self, values: Sequence[Tensor], hop: int, batch: int, *, forward: bool) -> None:
        """My rows of what goes over a hop (virtual stages hop and hop + 1), to all who need
        them."""
        first, rank = self.layout.local_rows(self.place, batch)[0], self.place.rank
        self.sent = self.transport.pending(self.sent)
        rows: list[tuple[Tensor, int]] = []
        carried = messages(self.layout, self.place.replica, hop, batch, forward=forward)
        for (_, sender, receiver), (a, b) in carried:
            if sender == rank:
                own = [x[a - first : b - first].contiguous() for x in values]
                if receiver == rank:
                    self.local[hop, batch, forward] = own
                rows += [(x, receiver) for x in own if receiver != rank]
        self.sent += self.transport.post(rows, self._tag(hop, forward=forward))

    def expect(self, shapes: Sequence[Shape], hop: int, batch: int, *, forward: bool) -> None:
        """Begin to receive my rows [rows, *shape] of what comes over a hop."""
        (first, last), rank = self.layout.local_rows(self.place, batch), self.place.rank
        values = [self.transport.space((last - first, *shape), dtype) for shape, dtype in shapes]
        rows: list[tuple[Tensor, int]] = []
        carried = messages(self.layout, self.place.replica, hop, batch, forward=forward)
        for (_, sender, receiver), (a, b) in carried:
            if receiver == rank != sender:
                rows += [(x[a - first : b - first], sender) for x in values]
        begun = self.transport.fetch(rows, self._tag(hop, forward=forward))
        self.expected[hop, batch, forward] = values, begun

    def _tag(self, hop: int, *, forward: bool) -> int:
        return tag_of(self.layout, self.place.replica, hop, forward=forward)

    def receive(self, hop: int, batch: int, *, forward: bool) -> list[Tensor]:
        """What was expected."""
        values, begun = self.expected.pop((hop, batch, forward))
        done(begun)
        values = self.local.pop((hop, batch, forward), values)
        return [x.to(self.transport.device) for x in values]

    def settle(self) -> None:
        """Wait until everything sent has been received."""
        done(self.sent)
        self.sent.clear()


def tag_of(layout: Layout, replica: int, hop: int, *, forward: bool) -> int:
    """Tags are such that two ranks send in one direction only, what one hop carries: two stages
    meet once in as many hops as there are stages, or in each one where there are two."""
    return 2 * (hop // max(1, len(layout.plan.replicas[replica].stages) - 1)) + forward


def messages(
    layout: Layout, replica: int, hop: int, batch: int, *, forward: bool
) -> Iterator[tuple[Stream, Range]]:
    """(tag, sender, receiver) and global rows of all that goes over a hop of a replica."""
    count = len(layout.plan.replicas[replica].stages)
    stages = [hop % count, (hop + 1) % count]
    senders, receivers = (
        list(
            enumerate(zip(layout.ranks_of(replica, s), layout.rows(replica, s, batch), strict=True))
        )
        for s in (stages if forward else reversed(stages))
    )
    tag = tag_of(layout, replica, hop, forward=forward)
    for (i, (sending, (a, b))), (j, (receiving, (c, d))) in product(senders, receivers):
        # context ranks have the same rows, and pass on their own tokens
        if max(a, c) < min(b, d) and (layout.context == 1 or i == j):
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
    """What is kept of a layer's forward pass: its input and its output, with the graph between."""

    x: Values
    y: Values


def every_second_product() -> Callable[..., CheckpointPolicy]:
    """What a layer's pass keeps under the recomputation `operators`: fused attention and every
    second product. Source: torchtitan's selective activation checkpointing."""
    products = Counter[bool]()

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = str(operator).split(".")[1]
        kept = name.startswith("_scaled_dot_product")
        if name in ("mm", "addmm"):  # with weights; others are those of attention
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def passed(
    chain: Chain, k: int, values: Sequence[Any], position: Position, again: str, device: Any
) -> Values:
    """A layer's pass, with the same random numbers whenever these rows pass. again: the plan's
    recomputation; the last layer's pass is followed by its backward pass at once.

    What passes on is of the type that stages have agreed upon, whatever autocast makes; no rounded
    weights are kept for the next pass."""
    half = position.autocast
    types = [dtype for _, dtype in chain.outputs[k]] if k + 1 < len(chain.names) else [None]

    def act(*values: Any) -> Values:
        rounding = torch.autocast(device.type, half, enabled=half is not None, cache_enabled=False)
        with at(position), seeded_layer(k, device), rounding:
            made = chain.call(k, values)
        return tuple(y.to(dtype) for y, dtype in zip(made, types, strict=True))

    if again not in ("full", "operators") or k + 1 == len(chain.names):
        return act(*values)
    more: dict[str, Any] = {}
    if again == "operators":
        policy = every_second_product()
        more["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)
    with set_checkpoint_early_stop(False):  # tensor ranks meet in every collective again
        made: Values = checkpoint(
            act, *values, use_reentrant=False, preserve_rng_state=False, **more
        )
    return made


@dataclass
class Pipeline:
    """A rank's part."""

    layout: Layout
    place: Place
    chain: Chain
    states: States
    mail: Mail

    def __post_init__(self) -> None:
        self.ranges = self.layout.stage(self.place).layers
        self.end = len(self.chain.names)
        self.watch = self.mail.transport.watch
        self.replica = self.layout.plan.replicas[self.place.replica]
        self.saved: dict[tuple[int, int], list[Saved]] = {}
        self.actions = self.layout.actions(self.place)
        layers = [range(first, last) for first, last in self.ranges]
        self.visits = [
            (backward, k)
            for backward, chunk, _ in self.actions
            for k in (reversed(layers[chunk]) if backward else layers[chunk])
        ]
        self.position = Position()
        self.total: Tensor | float = 0.0

    def weight(self, rows: Rows) -> float:
        """What this rank's targets weigh: to be added up over all ranks; one rank speaks for those
        that compute the same rows."""
        if self.ranges[-1][1] < self.end or not self.layout.reports_loss(self.place):
            return 0.0
        mine = [self.layout.local_rows(self.place, k) for k in range(self.replica.steps)]
        return float(sum(self.chain.source.weigh(rows(a, b)) for a, b in mine if a < b))

    def run(self, rows: Rows, position: Position, weight: float) -> float:
        """All passes; gradients are those of the losses divided by `weight`. Returns the sum of
        this rank's losses."""
        self.total, self.position = 0.0, position
        self._expect(*self.actions[0])
        for (backward, chunk, batch), then in zip_longest(self.actions, self.actions[1:]):
            if then is not None:
                self._expect(*then)
            if backward:
                self._backward(chunk, batch, rows, weight)
            else:
                self._forward(chunk, batch, rows)
        assert not self.saved, "a forward pass has no backward pass"
        return float(self.total) if self.layout.reports_loss(self.place) else 0.0

    def _hop(self, chunk: int) -> int:
        """The virtual stage of a chunk here: hop v leads to the next one, hop v - 1 here."""
        return chunk * len(self.replica.stages) + self.place.stage

    def _forward(self, chunk: int, batch: int, rows: Rows) -> None:
        (first, last), (a, b) = self.ranges[chunk], self.layout.local_rows(self.place, batch)
        x: Values | None = None
        read: Sequence[tuple[Any, ...]] = [()] * (last - first)
        if a < b:
            x = tuple(self._receive(chunk, batch, forward=True)) if first > 0 else ()
            read = self.chain.read(rows, (a, b), first, last, self.mail.transport.device)
        kept: list[Saved] = []
        with self.watch.during("forward", chunk, batch):
            for k in range(first, last):
                self.states.before_layer(k)
                if x is not None:
                    x = self._layer(k, x, read[k - first], a, kept)
                self.states.after_layer(k, backward=False)
        self.saved[chunk, batch] = kept
        if x is None:
            return
        if last == self.end:
            if x[0].numel() != 1:
                raise InputError(
                    "loss", got=tuple(x[0].shape), expected="one number, the sum over all rows"
                )
            self.total = self.total + x[0].double()  # no look at the value: a GPU goes on
        else:
            self.mail.send(x, self._hop(chunk), batch, forward=True)

    def _expect(self, backward: bool, chunk: int, batch: int) -> None:
        """Post a pass's receive while the one before computes."""
        (first, last), (a, b) = self.ranges[chunk], self.layout.local_rows(self.place, batch)
        if a < b and (last < self.end if backward else first > 0):
            shapes = self.chain.outputs[(last if backward else first) - 1]
            sent = [one for one in shapes if not backward or one[1].is_floating_point]
            self.mail.expect(sent, self._hop(chunk) - (not backward), batch, forward=not backward)

    def _receive(self, chunk: int, batch: int, *, forward: bool) -> list[Tensor]:
        """What the layer before a chunk gave, or the gradients of what the chunk's last one did."""
        with self.watch.during("receive", chunk, batch):
            return self.mail.receive(self._hop(chunk) - forward, batch, forward=forward)

    def _layer(
        self, k: int, x: Values, read: tuple[Any, ...], row: int, kept: list[Saved]
    ) -> Values:
        """A layer's forward pass on a graph of its own; what comes out is detached."""
        x = tuple(value.detach().requires_grad_(value.is_floating_point()) for value in x)
        position, again = (
            replace(self.position, first_row=row),
            self.layout.recomputation_of(self.place, k),
        )
        y = passed(self.chain, k, (*x, *read), position, again, self.mail.transport.device)
        self.watch.passed()
        kept.append(Saved(x, y))
        return tuple(value.detach() for value in y)

    def _backward(self, chunk: int, batch: int, rows: Rows, weight: float) -> None:
        (first, last), (a, b) = self.ranges[chunk], self.layout.local_rows(self.place, batch)
        kept = self.saved.pop((chunk, batch))
        grads = self._gradients(chunk, batch, kept, weight) if kept else []
        position = replace(self.position, first_row=a)  # of scores that are computed again
        with self.watch.during("backward", chunk, batch), at(position):
            for k in reversed(range(first, last)):
                self.states.before_layer(k)
                if kept:
                    grads = self._layer_back(kept.pop(), grads)
                self.states.after_layer(k, backward=True)
        if a < b and first > 0:
            device = self.mail.transport.device
            sent = [
                # None: nothing before depends on a parameter
                torch.zeros(b - a, *shape, dtype=dtype, device=device) if grad is None else grad
                for (shape, dtype), grad in zip(self.chain.outputs[first - 1], grads, strict=True)
                if dtype.is_floating_point
            ]
            self.mail.send(sent, self._hop(chunk) - 1, batch, forward=False)

    def _gradients(self, chunk: int, batch: int, kept: Sequence[Saved], weight: float) -> Gradients:
        """Of what the last layer here gave."""
        y, last = kept[-1].y, self.ranges[chunk][1]
        if last == self.end:
            return [torch.full_like(y[0], 1.0 / weight)]
        received = iter(self._receive(chunk, batch, forward=False))
        return [
            next(received) if dtype.is_floating_point else None
            for _, dtype in self.chain.outputs[last - 1]
        ]

    def _layer_back(self, saved: Saved, grads: Gradients) -> Gradients:
        """A layer's backward pass: the gradients of its inputs."""
        both = zip(saved.y, grads, strict=True)
        pairs = [(a, b) for a, b in both if b is not None and a.requires_grad]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
        self.watch.passed()
        return [value.grad for value in saved.x]
