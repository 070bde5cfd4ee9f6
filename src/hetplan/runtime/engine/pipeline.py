"""One rank's passes of an iteration, in the order of its schedule, and the messages between stages.

A micro-batch passes a rank layer by layer. Between some layers the engine begins collectives: it
gathers parameters, or sums gradients (`States.collective_layers`). It cuts a chunk's layers there
into spans. A span's pass has one autograd graph, so that one call of autograd computes its backward
pass. A rank without rows of a micro-batch computes nothing and gets no message, but joins ZeRO's
collectives.

The virtual stages of a replica are numbered along the model (`plans.passes`). Hop v leads from
virtual stage v to v + 1: activations go over it forward, their gradients backward.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
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
from hetplan.plans.passes import Pass
from hetplan.plans.places import Place
from hetplan.runtime.engine.chain import Chain, Rows
from hetplan.runtime.engine.layout import Layout
from hetplan.runtime.engine.position import Position, at, seeded_layer
from hetplan.runtime.engine.splitting import WeightPass, backward_of_inputs
from hetplan.runtime.engine.states import States
from hetplan.runtime.engine.transport import Message, Stream, Transport, done
from hetplan.runtime.tracing.split import Shape, Totals
from hetplan.schema import Range

Values = tuple[Tensor, ...]  # activations that one layer passes to the next
Gradients = Sequence[Tensor | None]  # gradients of `Values`; None: no gradient
Transfer = tuple[int, int, bool]  # hop, micro-batch, whether forward


@dataclass
class Mail:
    """One rank's messages to and from the neighbouring stages.

    A stage divides the rows of a micro-batch over its row groups, and two stages may divide them
    differently. Every intersection of a sending and a receiving group's rows is one message for
    each receiving tensor rank. Activations are whole on all tensor ranks, so that each of them
    receives from one sending tensor rank. The messages of a hop arrive in the order in which they
    are sent, and receives begin in that order.
    """

    layout: Layout
    place: Place
    transport: Transport
    # messages that may still be on their way
    sent: list[Message] = field(default_factory=list)
    # (buffers, messages to wait for) of each receive that has begun
    expected: dict[Transfer, tuple[list[Tensor], list[Message]]] = field(default_factory=dict)
    # tensors that the rank sends to itself
    local: dict[Transfer, list[Tensor]] = field(default_factory=dict)
    # all messages of each transfer that has been asked for
    planned: dict[Transfer, list[tuple[Stream, Range]]] = field(default_factory=dict)

    def send(self, values: Sequence[Tensor], hop: int, batch: int, *, forward: bool) -> None:
        """Begin to send this rank's rows over a hop, to every rank that needs some of them.

        values: tensors [rows, …]. forward: the direction of the hop.
        """
        first_row, _ = self.layout.local_rows(self.place, batch)
        rank = self.place.rank
        self.sent = self.transport.pending(self.sent)
        outgoing: list[tuple[Tensor, int]] = []
        for (_, sender, receiver), (begin, end) in self._messages(hop, batch, forward=forward):
            if sender != rank:
                continue
            rows = [x[begin - first_row : end - first_row].contiguous() for x in values]
            if receiver == rank:
                self.local[hop, batch, forward] = rows
            else:
                outgoing += [(x, receiver) for x in rows]
        self.sent += self.transport.post(outgoing, self._tag(hop, forward=forward))

    def expect(self, shapes: Sequence[Shape], hop: int, batch: int, *, forward: bool) -> None:
        """Begin to receive this rank's rows, tensors [rows, *shape], over a hop."""
        first_row, last_row = self.layout.local_rows(self.place, batch)
        rank = self.place.rank
        buffers = [
            self.transport.space((last_row - first_row, *shape), dtype) for shape, dtype in shapes
        ]
        incoming: list[tuple[Tensor, int]] = []
        for (_, sender, receiver), (begin, end) in self._messages(hop, batch, forward=forward):
            if receiver == rank and sender != rank:
                incoming += [(x[begin - first_row : end - first_row], sender) for x in buffers]
        begun = self.transport.fetch(incoming, self._tag(hop, forward=forward))
        self.expected[hop, batch, forward] = buffers, begun

    def _messages(self, hop: int, batch: int, *, forward: bool) -> list[tuple[Stream, Range]]:
        """All messages of a hop of the rank's replica, see `messages`. They are the same in every
        iteration."""
        key = (hop, batch, forward)
        if key not in self.planned:
            replica = self.place.replica
            self.planned[key] = list(messages(self.layout, replica, hop, batch, forward=forward))
        return self.planned[key]

    def _tag(self, hop: int, *, forward: bool) -> int:
        """The tag of a hop of the rank's replica, see `tag_of`."""
        return tag_of(self.layout, self.place.replica, hop, forward=forward)

    def receive(self, hop: int, batch: int, *, forward: bool) -> list[Tensor]:
        """Wait for a receive that `expect` began. Returns the tensors, on this rank's device."""
        buffers, begun = self.expected.pop((hop, batch, forward))
        done(begun)
        # A rank sends to itself only between two chunks of its stage. Then all of its rows come
        # from itself, and none are in the buffers.
        values = self.local.pop((hop, batch, forward), buffers)
        return [x.to(self.transport.device) for x in values]

    def settle(self) -> None:
        """Wait until everything sent has been received."""
        done(self.sent)
        self.sent.clear()


def tag_of(layout: Layout, replica: int, hop: int, *, forward: bool) -> int:
    """The tag of a hop's messages in one direction.

    Any two ranks use a tag in one direction and for one hop only. Of S > 2 stages, two neighbours
    share every S-th hop, so that up to S successive hops can have one tag. Two stages share all
    hops, so that each hop needs a tag of its own. Groups of S - 1 hops are right for both. On a V
    two neighbours share one hop of each chunk.
    """
    of_replica = layout.plan.replicas[replica]
    hops = len(of_replica.stages)  # of a group
    if not of_replica.folded:
        hops = max(1, hops - 1)  # max: a single stage sends to itself, without tags
    number = hop // hops
    return 2 * number + forward


def messages(
    layout: Layout, replica: int, hop: int, batch: int, *, forward: bool
) -> Iterator[tuple[Stream, Range]]:
    """(tag, sender, receiver) and global rows [first, last) of every message of a hop, those of a
    rank to itself included."""
    along = layout.virtual_stages(replica)
    (source, _), (target, _) = along[hop], along[hop + 1]
    if not forward:
        source, target = target, source
    tag = tag_of(layout, replica, hop, forward=forward)
    sending_groups = zip(
        layout.ranks_of(replica, source), layout.rows(replica, source, batch), strict=True
    )
    receiving_groups = zip(
        layout.ranks_of(replica, target), layout.rows(replica, target, batch), strict=True
    )
    pairs = product(enumerate(sending_groups), enumerate(receiving_groups))
    for (i, (senders, sent_rows)), (j, (receivers, received_rows)) in pairs:
        # context groups have the same rows; each passes its own tokens on
        if layout.context > 1 and i != j:
            continue
        first, last = max(sent_rows[0], received_rows[0]), min(sent_rows[1], received_rows[1])
        if first >= last:
            continue
        for tensor_rank, receiver in enumerate(receivers):
            # the receivers are spread evenly over the senders, which all have the same values
            sender = senders[tensor_rank * len(senders) // len(receivers)]
            yield (tag, sender, receiver), (first, last)


def streams(layout: Layout) -> list[Stream]:
    """(tag, sender, receiver) of all messages between two ranks in an iteration, each once."""
    used: set[Stream] = set()
    for i, replica in enumerate(layout.plan.replicas):
        chunks = len(replica.stages[0].layers)  # every stage has as many
        virtual_stages = len(replica.stages) * chunks
        hops, batches = range(virtual_stages - 1), range(replica.steps)
        for hop, batch, forward in product(hops, batches, (False, True)):
            used |= {stream for stream, _ in messages(layout, i, hop, batch, forward=forward)}
    return sorted((tag, sender, receiver) for tag, sender, receiver in used if sender != receiver)


@dataclass
class Saved:
    """A span's forward pass, kept for its backward pass; its autograd graph hangs on `outputs`."""

    inputs: Values
    outputs: Values


def every_second_product() -> Callable[..., CheckpointPolicy]:
    """The policy of the recomputation `operators` for one pass of a layer: fused attention and
    every second product are kept, all else is computed again. Source: torchtitan's selective
    activation checkpointing."""
    # number of products so far, in the first pass (False) and in the recomputation (True)
    products = Counter[bool]()

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = str(operator).split(".")[1]  # "mm" of "aten.mm.default"
        kept = name.startswith("_scaled_dot_product")
        if name in ("mm", "addmm"):  # products with weights; those of attention have other names
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def layer_pass(
    chain: Chain,
    k: int,
    values: Sequence[Any],
    position: Position,
    recomputation: str,
    device: Any,
) -> Values:
    """The forward pass of layer k: its outputs, or the loss.

    values: the outputs of the layer before, then what the layer reads of the data. position: the
    position of the rows; a pass that is computed again draws the same random numbers by it.
    recomputation: the plan's. The last layer is never computed again: under 1F1B its backward pass
    follows at once.

    The outputs are converted to the types in `chain.outputs`, which the next stage expects, also
    where autocast computes in another type. Autocast keeps no rounded weights for the next pass.
    """
    is_last = k + 1 == len(chain.names)
    # None: the loss keeps its type, since `Tensor.to(None)` changes nothing
    types = [None] if is_last else [dtype for _, dtype in chain.outputs[k]]
    half = position.autocast

    def run(*values: Any) -> Values:
        # `train_step` and `evaluate` are outside of autocast: entering it again takes time
        rounding: Any = nullcontext()
        if half is not None:
            rounding = torch.autocast(device.type, half, cache_enabled=False)
        # seeding takes time, which a layer that draws nothing saves
        seeded: Any = seeded_layer(k, device) if chain.drawing[k] else nullcontext()
        with at(position), seeded, rounding:
            outputs = chain.call(k, values)
        return tuple(y.to(dtype) for y, dtype in zip(outputs, types, strict=True))

    # the recomputation "selective" is done inside of layers, see `Distributed._join_groups`
    if is_last or recomputation not in ("full", "operators"):
        return run(*values)
    options: dict[str, Any] = {}
    if recomputation == "operators":
        policy = every_second_product()
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)
    with set_checkpoint_early_stop(False):  # tensor ranks meet in every collective again
        outputs: Values = checkpoint(
            run, *values, use_reentrant=False, preserve_rng_state=False, **options
        )
    return outputs


@dataclass
class Pipeline:
    """Runs a rank's passes of an iteration."""

    layout: Layout
    place: Place
    chain: Chain
    states: States
    mail: Mail

    def __post_init__(self) -> None:
        self.ranges = self.layout.stage(self.place).layers
        """[chunk] the chunk's layers [first, last)."""
        self.end = len(self.chain.names)
        """Number of the model's layers."""
        self.watch = self.mail.transport.watch
        self.replica = self.layout.plan.replicas[self.place.replica]
        self.spans = [self.states.spans(first, last) for first, last in self.ranges]
        """[chunk] its layers in spans, each of which has one autograd graph."""
        self.saved: dict[tuple[int, int], list[Saved]] = {}
        """(chunk, micro-batch) -> forward passes of its spans that wait for their backward
        passes; none where the rank has no rows."""
        self.weight_passes: dict[tuple[int, int], list[WeightPass]] = {}
        """(chunk, micro-batch) -> the passes of weights of its spans, last span first, that wait
        for their turn; none where the rank has no rows."""
        self.actions = self.layout.actions(self.place)
        self.visits: list[tuple[bool, int]] = []
        """(completes, first layer) of all passes of spans, in the order of the schedule: whether
        the pass completes the gradients of a micro-batch."""
        self.forward_visits: list[tuple[bool, int]] = []
        """The visits of the forward passes alone."""
        for kind, chunk, _ in self.actions:
            starts = [first for first, _ in self.spans[chunk]]
            if kind == "F":
                self.forward_visits += [(False, first) for first in starts]
                self.visits += [(False, first) for first in starts]
            else:
                self.visits += [(kind in ("D", "W"), first) for first in reversed(starts)]
        self.number = {
            chunk: v
            for v, (stage, chunk) in enumerate(self.layout.virtual_stages(self.place.replica))
            if stage == self.place.stage
        }
        """Chunk -> number of its virtual stage."""
        self.arriving = self._arriving()
        """(chunk, whether forward) -> the micro-batches whose messages this rank still has to
        expect, in the order in which they are sent."""
        self.position = Position()
        self.recomputations = {
            k: self.layout.recomputation_of(self.place, k) for k in self.layout.layers(self.place)
        }
        """Layer of this rank -> its recomputation."""
        self.total: Tensor | float = 0.0
        """Sum of the losses of the iteration so far."""
        self.totals: Totals = {}

    def reported(self, rows: Rows) -> list[Callable[[], Any]]:
        """Functions that return the data of this rank's micro-batches; none where the rank has no
        loss, or another rank reports the loss of the same rows."""
        has_loss = self.ranges[-1][1] == self.end
        if not has_loss or not self.layout.reports_loss(self.place):
            return []
        batches: list[Callable[[], Any]] = []
        for batch in range(self.replica.steps):
            first_row, last_row = self.layout.local_rows(self.place, batch)
            if first_row < last_row:
                batches.append(partial(rows, first_row, last_row))
        return batches

    def run(self, rows: Rows, position: Position, weight: float, totals: Totals) -> float:
        """Run all passes of an iteration; gradients add up on the parameters.

        weight: the number by which the losses are divided before the backward passes. totals:
        totals of the global batch. Returns the sum of the losses that this rank reports.
        """
        self.total, self.position, self.totals = 0.0, position, totals
        self.arriving = self._arriving()
        self._expect(self.actions[0])
        for (kind, chunk, batch), following in zip_longest(self.actions, self.actions[1:]):
            if following is not None:
                self._expect(following)
            if kind == "F":
                self._forward(chunk, batch, rows)
            elif kind == "W":
                self._weights(chunk, batch)
            else:
                self._backward(chunk, batch, weight, split=kind == "B")
        assert not self.saved, "a forward pass has no backward pass"
        assert not self.weight_passes, "a backward pass of inputs has no pass of weights"
        return float(self.total) if self.layout.reports_loss(self.place) else 0.0

    def evaluate(self, rows: Rows, position: Position, totals: Totals) -> float:
        """Run the forward passes of an iteration alone. Returns the sum of the losses that this
        rank reports. Parameters and totals are as in `run`."""
        self.total, self.position, self.totals = 0.0, position, totals
        self.arriving = self._arriving()
        actions = [action for action in self.actions if action.kind == "F"]
        self._expect(actions[0])
        for (_, chunk, batch), following in zip_longest(actions, actions[1:]):
            if following is not None:
                self._expect(following)
            self._forward(chunk, batch, rows)
            del self.saved[chunk, batch]  # no backward pass follows
        return float(self.total) if self.layout.reports_loss(self.place) else 0.0

    def _virtual_stage(self, chunk: int) -> int:
        """The number v of a chunk's virtual stage: hop v - 1 leads here, hop v to the next one."""
        return self.number[chunk]

    def _arriving(self) -> dict[tuple[int, bool], deque[int]]:
        """(chunk, whether forward) -> the micro-batches of the messages to this rank, in the order
        in which the neighbouring virtual stage sends them."""
        along = self.layout.virtual_stages(self.place.replica)
        orders = self.layout.orders(self.place.replica)
        arriving: dict[tuple[int, bool], deque[int]] = {}
        for chunk, forward in product(self.number, (True, False)):
            sender = self.number[chunk] + (-1 if forward else 1)
            if not 0 <= sender < len(along):
                continue
            stage, its_chunk = along[sender]
            arriving[chunk, forward] = deque(
                one.batch
                for one in orders[stage]
                if one.chunk == its_chunk and (one.kind == "F" if forward else one.sends_gradients)
            )
        return arriving

    def _forward(self, chunk: int, batch: int, rows: Rows) -> None:
        """A chunk's forward pass of a micro-batch."""
        first, last = self.ranges[chunk]
        first_row, last_row = self.layout.local_rows(self.place, batch)
        has_rows = first_row < last_row
        x: Values = ()
        data: Sequence[tuple[Any, ...]] = [()] * (last - first)
        if has_rows:
            if first > 0:
                x = tuple(self._receive(chunk, batch, forward=True))
            device = self.mail.transport.device
            local_rows = (first_row, last_row)
            data = self.chain.read(rows, local_rows, first, last, device, self.totals)
        kept: list[Saved] = []
        position = replace(self.position, first_row=first_row)
        with self.watch.during("forward", chunk, batch):
            for begin, end in self.spans[chunk]:
                self.states.before_span(begin)
                if has_rows:
                    of_span = data[begin - first : end - first]
                    kept.append(self._span(begin, x, of_span, position))
                    x = tuple(value.detach() for value in kept[-1].outputs)
                self.states.after_span(begin, completes=False)
        self.saved[chunk, batch] = kept
        if not has_rows:
            return
        if last == self.end:
            if x[0].numel() != 1:
                raise InputError(
                    "loss", got=tuple(x[0].shape), expected="one number, the sum over all rows"
                )
            self.total = self.total + x[0].double()  # a tensor, so that a GPU is not waited for
        else:
            self.mail.send(x, self._virtual_stage(chunk), batch, forward=True)

    def _expect(self, action: Pass) -> None:
        """Begin the receive that a pass needs, and those of messages that are sent before. `run`
        calls this before the pass before, so that the messages arrive while that pass computes."""
        key = action.chunk, action.kind == "F"
        if action.kind == "W" or key not in self.arriving:
            return
        arriving = self.arriving[key]
        while action.batch in arriving:
            self._expect_batch(action.chunk, arriving.popleft(), backward=action.kind != "F")

    def _expect_batch(self, chunk: int, batch: int, *, backward: bool) -> None:
        """Begin the receive of a chunk's inputs, or of the gradients of its outputs."""
        first, last = self.ranges[chunk]
        first_row, last_row = self.layout.local_rows(self.place, batch)
        if first_row == last_row:
            return
        stage = self._virtual_stage(chunk)
        if backward:
            shapes = [shape for shape in self.chain.outputs[last - 1] if has_gradient(shape)]
            self.mail.expect(shapes, stage, batch, forward=False)
        else:
            self.mail.expect(self.chain.outputs[first - 1], stage - 1, batch, forward=True)

    def _receive(self, chunk: int, batch: int, *, forward: bool) -> list[Tensor]:
        """The inputs of a chunk, from the virtual stage before it; with forward=False the gradients
        of its outputs, from the virtual stage after it."""
        stage = self._virtual_stage(chunk)
        with self.watch.during("receive", chunk, batch):
            return self.mail.receive(stage - 1 if forward else stage, batch, forward=forward)

    def _span(
        self, first: int, x: Values, data: Sequence[tuple[Any, ...]], position: Position
    ) -> Saved:
        """A span's forward pass on an autograd graph of its own.

        first: the span's first layer. x: outputs of the layer before. data: [layer of the span] the
        parts of the data that the layer reads. position: that of the micro-batch's rows.
        """
        inputs = tuple(value.detach().requires_grad_(value.is_floating_point()) for value in x)
        device = self.mail.transport.device
        values: Values = inputs
        for k, read in enumerate(data, first):
            values = layer_pass(
                self.chain, k, (*values, *read), position, self.recomputations[k], device
            )
            self.watch.passed()
        return Saved(inputs, values)

    def _backward(self, chunk: int, batch: int, weight: float, *, split: bool) -> None:
        """A chunk's backward pass of a micro-batch. split: it leaves the gradients of weights to
        `_weights`."""
        first, _ = self.ranges[chunk]
        first_row, last_row = self.layout.local_rows(self.place, batch)
        kept = self.saved.pop((chunk, batch))
        grads: Gradients = []
        if kept:
            grads = self._output_gradients(chunk, batch, kept[-1].outputs, weight)
        later: list[WeightPass] = []
        # layers that are computed again draw random numbers by position
        position = replace(self.position, first_row=first_row)
        with self.watch.during("backward", chunk, batch), at(position):
            for begin, _ in reversed(self.spans[chunk]):
                self.states.before_span(begin)
                if kept and split:
                    grads, of_weights = self._backward_of_inputs(kept.pop(), grads)
                    later.append(of_weights)
                elif kept:
                    grads = self._whole_backward(kept.pop(), grads)
                self.states.after_span(begin, completes=not split)
        if split:
            self.weight_passes[chunk, batch] = later
        if first_row < last_row and first > 0:
            self._send_gradients(chunk, batch, grads)

    def _send_gradients(self, chunk: int, batch: int, grads: Gradients) -> None:
        """Send the gradients of a chunk's inputs to the virtual stage before."""
        first, _ = self.ranges[chunk]
        first_row, last_row = self.layout.local_rows(self.place, batch)
        sent = []
        for (shape, dtype), grad in zip(self.chain.outputs[first - 1], grads, strict=True):
            if not dtype.is_floating_point:
                continue
            if grad is None:  # the loss does not depend on this input
                device = self.mail.transport.device
                grad = torch.zeros(last_row - first_row, *shape, dtype=dtype, device=device)
            sent.append(grad)
        self.mail.send(sent, self._virtual_stage(chunk) - 1, batch, forward=False)

    def _output_gradients(
        self, chunk: int, batch: int, outputs: Values, weight: float
    ) -> Gradients:
        """The gradients of a chunk's outputs: of the loss, or received from the next stage."""
        _, last = self.ranges[chunk]
        if last == self.end:
            loss = outputs[0]
            return [torch.full_like(loss, 1.0 / weight)]
        received = iter(self._receive(chunk, batch, forward=False))
        return [
            next(received) if has_gradient(shape) else None
            for shape in self.chain.outputs[last - 1]
        ]

    def _weights(self, chunk: int, batch: int) -> None:
        """A chunk's pass of weights of a micro-batch, behind its backward pass of inputs."""
        first_row, _ = self.layout.local_rows(self.place, batch)
        later = self.weight_passes.pop((chunk, batch))
        position = replace(self.position, first_row=first_row)
        with self.watch.during("weights", chunk, batch), at(position):
            for number, (begin, _) in enumerate(reversed(self.spans[chunk])):
                self.states.before_span(begin)
                if later:
                    later[number].run()
                    self.watch.passed()
                self.states.after_span(begin, completes=True)

    def _backward_of_inputs(self, saved: Saved, grads: Gradients) -> tuple[Gradients, WeightPass]:
        """A span's backward pass of inputs: their gradients, and the pass of weights that is
        left."""
        outputs, gradients = with_gradients(saved, grads)
        of_inputs, later = backward_of_inputs(outputs, gradients, saved.inputs)
        self.watch.passed()
        return of_inputs, later

    def _whole_backward(self, saved: Saved, grads: Gradients) -> Gradients:
        """A span's backward pass: the gradients of its inputs from those of its outputs."""
        outputs, gradients = with_gradients(saved, grads)
        if outputs:  # none where no output depends on a trained parameter
            torch.autograd.backward(outputs, gradients)
        self.watch.passed()
        return [value.grad for value in saved.inputs]


def with_gradients(saved: Saved, grads: Gradients) -> tuple[list[Tensor], list[Tensor]]:
    """(outputs of a span, their gradients), without outputs that have no gradient."""
    pairs = [
        (output, grad)
        for output, grad in zip(saved.outputs, grads, strict=True)
        if grad is not None and output.requires_grad
    ]
    return [output for output, _ in pairs], [grad for _, grad in pairs]


def has_gradient(shape: Shape) -> bool:
    """Whether a value that passes between layers has a gradient: whether it is a real number."""
    _, dtype = shape
    return bool(dtype.is_floating_point)
