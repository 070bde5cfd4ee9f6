"""What one rank does under a distributed program, on torch tensors.

torch runs the backward pass. A collective is an autograd function whose backward pass is the
opposite collective (`programs.forms` says in which form a gradient is). torch runs the backward
pass of the last operation first, so that every rank mirrors the instructions in the same order.
Slices may be of any length, none included.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from hetplan.errors import require
from hetplan.programs.axes import Bounds
from hetplan.programs.decided import Decided
from hetplan.programs.forms import (
    PARTIAL,
    WHOLE,
    Change,
    Form,
    Instruction,
    Run,
    Synchronise,
    is_free,
    property_name,
    reading_segment,
)
from hetplan.programs.operators.operator import Place
from hetplan.programs.operators.products import parsed
from hetplan.programs.program import PARAMETER, PLACEHOLDER, Node
from hetplan.runtime.engine.loop import overlap
from hetplan.runtime.engine.transport import Group, mirrored
from hetplan.runtime.events import Watch

# one collective of slices padded to the largest, or one per slice
Manner = Literal["padded", "grouped"]


def piece(value: Tensor, dimension: int, bounds: tuple[int, int]) -> Tensor:
    """A slice; a view."""
    first, last = bounds
    return value.narrow(dimension, first, last - first)


def copied(value: Tensor) -> Tensor:
    """The values in memory of their own, row by row."""
    return value.detach().clone(memory_format=torch.contiguous_format)


class Ranks:
    """The collectives of one rank among all; results are new tensors.

    On gloo a reduce-scatter is an all-reduce of which a slice is kept (gloo's own is slower, and
    wants equal slices).
    """

    def __init__(
        self,
        group: Group,
        rank: int,
        during: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """group: of all ranks. during: entered around every collective."""
        self.group, self.rank, self.during = group, rank, during

    def total(self, value: Tensor) -> Tensor:
        """Everyone gets the sum, by an all-reduce."""
        with self.during():
            return self.group.reduced(value)

    def gather(self, value: Tensor, dimension: int, bounds: Bounds, manner: Manner) -> Tensor:
        """Everyone gets the slices side by side, by an all-gather of slices padded to the longest,
        or a broadcast from each owner of one."""
        with self.during():
            own = value.detach().movedim(dimension, 0).contiguous()
            if manner == "padded":
                parts = self.group.gather(own, [last - first for first, last in bounds])
            else:
                parts = self._grouped(own, bounds)
            return torch.cat(parts).movedim(0, dimension).contiguous()

    def _grouped(self, own: Tensor, bounds: Bounds) -> list[Tensor]:
        """[rank] every rank's slice, each by a broadcast from its owner."""
        parts = []
        for owner, (first, last) in enumerate(bounds):
            mine = owner == self.rank
            part = own.clone() if mine else own.new_empty((last - first, *own.shape[1:]))
            if last > first:
                self.group.broadcast(part, owner)
            parts.append(part)
        return parts

    def scatter(self, value: Tensor, dimension: int, bounds: Bounds, manner: Manner) -> Tensor:
        """Everyone gets its slice of the sum, by an all-reduce of which a slice is kept, or a
        reduction to each owner of one."""
        with self.during():
            if manner == "padded":
                return copied(piece(self.group.reduced(value), dimension, bounds[self.rank]))
            parts = [copied(piece(value, dimension, pair)) for pair in bounds]
            for owner, part in enumerate(parts):
                self.group.reduce(part, owner)
            return parts[self.rank]

    def swap(
        self, value: Tensor, source: int, before: Bounds, target: int, after: Bounds
    ) -> Tensor:
        """From slices along one dimension to slices along another, or to others along the same, by
        one message from every rank to every other one."""
        with self.during():
            value, mine = value.detach(), before[self.rank]
            if source == target:
                leaving = [piece(value, source, overlap(mine, to, mine[0])) for to in after]
                ranges = [overlap(of, after[self.rank], 0) for of in before]
            else:
                leaving, ranges = [piece(value, target, to) for to in after], list(before)
            shape = list(value.shape)
            shape[target] = after[self.rank][1] - after[self.rank][0]
            shapes = [(*shape[:source], b - a, *shape[source + 1 :]) for a, b in ranges]
            sizes = [math.prod(s) for s in shapes]
            sent = torch.cat([part.reshape(-1) for part in leaving])
            received = self.group.swap(sent, [part.numel() for part in leaving], sizes)
            parts = zip(received.split(sizes), shapes, strict=True)
            return torch.cat([part.view(s) for part, s in parts], dim=source)


class Machine:
    """The runs of a program on one rank."""

    def __init__(
        self,
        decided: Decided,
        group: Group,
        rank: int,
        parameters: Mapping[str, nn.Parameter],
        *,
        runs: int = 1,
        watch: Watch | None = None,
    ) -> None:
        """group: of all ranks. parameters: the shard that the rank holds of each
        (`Decided.shards`). runs: number of runs of an iteration; gradients add up per use of a
        parameter until the last run joins them."""
        self.decided, self.program = decided, decided.program
        self.ranks, self.parameters = Ranks(group, rank, self._collective), parameters
        self.runs, self.watch = runs, watch or Watch()
        self.order = useful(decided.order)
        # property that waits for gathered factors -> how the backward pass gathers them
        self.gathers: dict[str, Manner] = {}
        for instruction in self.order:
            if isinstance(instruction, Synchronise) and instruction.how != "All-Reduce":
                grouped = instruction.how.startswith("Grouped")
                self.gathers[instruction.before] = "grouped" if grouped else "padded"
        self.values: dict[str, Tensor] = {}  # property -> what this rank holds of it
        self.data: Mapping[str, Tensor] = {}
        # use of a parameter -> its gradients of the iteration's runs so far
        self._open: dict[tuple[str, Form, int], Tensor] = {}
        self._pass, self._number, self._stage = "forward", 0, 0

    def begin(self, run: int, data: Mapping[str, Tensor]) -> None:
        """Begin a run with this number and data. Raises InputError for data of another shape."""
        for node in self.program.nodes:
            shape = tuple(data[node.name].shape) if node.kind == PLACEHOLDER else node.shape
            require(
                shape == node.shape,
                "data of a run",
                where=node.name,
                got=shape,
                expected=f"{node.shape}",
            )
        self.data, self._number, self._stage, self._pass = data, run, 0, "forward"

    def run(self) -> float:
        """Take both passes; returns this rank's summand of the loss."""
        self.watch.begins("forward", 0, self._number)
        for instruction in self.order:
            self.forward(instruction)
        loss = self.values[self.decided.rules.goal]
        self.values = {}  # autograd keeps what the backward pass needs
        self.watch.ends("forward", self._stage, self._number)
        self._pass, self._stage = "backward", self._stage + 1
        self.watch.begins("backward", self._stage, self._number)
        torch.autograd.backward([loss], [torch.full_like(loss, 1 / self.runs)])
        self.watch.ends("backward", self._stage, self._number)
        return float(loss.detach())

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """A collective ends what is computed before it and begins the next stage."""
        self.watch.ends(self._pass, self._stage, self._number)
        self._stage += 1
        self.watch.begins("collective", self._stage, self._number)
        yield
        self.watch.ends("collective", self._stage, self._number)
        self.watch.begins(self._pass, self._stage, self._number)

    def forward(self, instruction: Instruction) -> None:
        """Take one instruction of the forward pass."""
        if isinstance(instruction, Run):
            value = self._run(instruction)
        elif isinstance(instruction, Change):
            value = self._change(instruction, self.values[instruction.before])
        else:  # only the backward pass synchronises
            value = self.values[instruction.before]
        self.values[instruction.after] = value

    def _slice(self, tensor: str, form: Form, segment: int) -> tuple[int, int]:
        """Where this rank's slice begins and ends."""
        return self.decided.bounds(tensor, form, segment)[self.ranks.rank]

    def _source(self, node: Node, form: Form, segment: int, *, complete: bool) -> Tensor:
        """This rank's slice of a placeholder's data, or its shard of a parameter, cut where the
        rank holds the whole.

        complete: every device computes the whole gradient of a whole parameter, not a summand.
        """
        if node.kind != PARAMETER:
            value = self.data[node.name]
            if form == WHOLE:
                return value
            return piece(value, form, self._slice(node.name, form, segment))
        name, key = self.program.copies.get(node.name, node.name), (node.name, form, segment)
        cut = form != WHOLE and self.decided.shards[name].dimension is None

        def read(held: Tensor) -> Tensor:
            value = held.view_as(held)
            if cut:
                return piece(value, form, self._slice(node.name, form, segment))
            return value

        def joined(gradient: Tensor) -> Tensor | None:
            if key in self._open:
                gradient = gradient + self._open.pop(key)
            if self._number + 1 < self.runs:
                self._open[key] = gradient
                return None
            if form == WHOLE and not complete:
                return self.ranks.total(gradient)
            if cut:
                bounds = self.decided.bounds(node.name, form, segment)
                return self.ranks.gather(gradient, form, bounds, "padded")
            return gradient

        return mirrored(read, joined, self.parameters[name])

    def _run(self, run: Run) -> Tensor:
        """An operator's output on this rank."""
        node, output = self.program.node(run.node), run.way.output
        inputs: list[Tensor] = []
        starts: list[int] = []
        for source, form in zip(self.program.inputs(node), run.way.inputs, strict=True):
            if source.source:
                inputs.append(self._source(source, form, node.segment, complete=run.factors))
            else:
                moved = source.segment != node.segment
                name = f"{source.name}@{node.segment}" if moved else source.name
                inputs.append(self.values[property_name(name, form)])
            starts.append(self._slice(source.name, form, node.segment)[0] if form >= 0 else 0)
        shape = list(node.shape)
        if output >= 0:
            first, last = self._slice(node.name, output, node.segment)
            shape[output] = last - first
        # summands of a sum over replicas are added once; a linear operator maps every summand
        place = Place(tuple(shape), tuple(starts), output == PARTIAL, first=self.ranks.rank == 0)
        if run.factors:
            return self._by_factors(run, node, inputs, place)
        return node.compute(inputs, place)

    def _by_factors(self, run: Run, node: Node, inputs: Sequence[Tensor], place: Place) -> Tensor:
        """A product of a slice of the batch with a whole weight (and bias).

        The parameters' gradients are computed on every device, from the gathered input and the
        gathered gradient of the output (HAP, Section 2.5.2).
        """
        (left, right, *bias), out = parsed(node.attributes["equation"])
        read, *parameters = inputs
        local = node.compute([read, *(p.detach() for p in parameters)], place)
        factor, manner, bounds = read.detach(), self.gathers[run.after], self.decided.bounds

        def backward(gradient: Tensor) -> tuple[Tensor, ...]:
            cuts = bounds(node.inputs[0], run.way.inputs[0], node.segment)
            x = self.ranks.gather(factor, run.way.inputs[0], cuts, manner)
            cuts = bounds(node.name, run.way.output, node.segment)
            over = self.ranks.gather(gradient, run.way.output, cuts, manner)
            weight = torch.einsum(f"{left},{out}->{right}", x, over)
            biases = [torch.einsum(f"{out}->{letters}", over) for letters in bias]
            return gradient, weight, *biases

        return mirrored(lambda x, *_: x.view_as(x), backward, local, *parameters)

    def _change(self, change: Change, value: Tensor) -> Tensor:
        """The tensor in another form; going backward, its gradient takes the mirrored change."""
        how, segment = change.how, self.program.node(change.tensor).segment
        if how == "Share":
            return value / self.decided.m
        if how == "Slice":
            return piece(value, change.target, self._slice(change.tensor, change.target, segment))
        if is_free(change):
            return value
        if how == "All-Reduce":
            return mirrored(self.ranks.total, self.ranks.total, value)
        if how in ("All-To-All", "Repartition"):
            return self._swap(change, segment, value)
        scatters = how == "Reduce-Scatter"
        form = change.target if scatters else change.source
        manner: Manner = "grouped" if how == "Grouped-Broadcast" else "padded"
        bounds = self.decided.bounds(change.tensor, form, segment)
        gather = partial(self.ranks.gather, dimension=form, bounds=bounds, manner=manner)
        scatter = partial(self.ranks.scatter, dimension=form, bounds=bounds, manner=manner)
        if scatters:
            return mirrored(scatter, gather, value)
        return mirrored(gather, scatter, value)

    def _swap(self, change: Change, segment: int, value: Tensor) -> Tensor:
        """The tensor in slices along another dimension, or in another segment's ratios."""
        source, target = change.source, change.target
        there = reading_segment(change) if change.how == "Repartition" else segment
        before = self.decided.bounds(change.tensor, source, segment)
        after = self.decided.bounds(change.tensor, target, there)
        return mirrored(
            partial(self.ranks.swap, source=source, before=before, target=target, after=after),
            partial(self.ranks.swap, source=target, before=after, target=source, after=before),
            value,
        )


def useful(order: Sequence[Instruction]) -> list[Instruction]:
    """The instructions that give a new property; others would compute one once more."""
    first: dict[str, Instruction] = {}
    for instruction in order:
        first.setdefault(instruction.after, instruction)
    return list(first.values())
