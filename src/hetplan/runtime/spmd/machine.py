"""What one rank does under a distributed program, on torch tensors.

The backward pass is torch's. Collectives are autograd functions whose backward pass is the opposite
collective (`formulations.hap.spmd.operators` says in which form a gradient is). torch runs the
backward pass of what was done last first, so that every rank mirrors the instructions in the same
order.
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
from hetplan.formulations.hap.spmd.operators import (
    PARTIAL,
    WHOLE,
    Change,
    Form,
    Instruction,
    Run,
    Synchronise,
    parsed,
    property_name,
    reading_segment,
)
from hetplan.formulations.hap.spmd.program import PARAMETER, PLACEHOLDER, Bounds, Node
from hetplan.formulations.hap.spmd.whole import Decided
from hetplan.runtime.engine.transport import Group, mirrored
from hetplan.runtime.events import Watch
from hetplan.runtime.spmd.kernels import Place, compute

# one collective of slices padded to the largest, or one per slice
Manner = Literal["padded", "grouped"]


def piece(value: Tensor, dimension: int, bounds: tuple[int, int]) -> Tensor:
    """A slice; a view."""
    first, last = bounds
    return value.narrow(dimension, first, last - first)


def copied(value: Tensor) -> Tensor:
    """The values in memory of their own, row by row."""
    return value.detach().clone(memory_format=torch.contiguous_format)


def shared(one: tuple[int, int], two: tuple[int, int], origin: int) -> tuple[int, int]:
    """What two ranges share, counted from `origin`; empty where it is nothing."""
    first, last = max(one[0], two[0]), min(one[1], two[1])
    return (first - origin, last - origin) if first < last else (0, 0)


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
            parts = (
                self.group.gather(own, [last - first for first, last in bounds])
                if manner == "padded"
                else self._grouped(own, bounds)
            )
            return torch.cat(parts).movedim(0, dimension).contiguous()

    def _grouped(self, own: Tensor, bounds: Bounds) -> list[Tensor]:
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
                leaving = [piece(value, source, shared(mine, to, mine[0])) for to in after]
                ranges = [shared(of, after[self.rank], 0) for of in before]
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
    """The runs of a program on one rank.

    parameters: what the rank holds of each (`Decided.shards`). runs: of an iteration; gradients add
    up per use of a parameter until the last one joins them.
    """

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
        self.decided, self.program = decided, decided.theory.program
        self.ranks, self.parameters = Ranks(group, rank, self._collective), parameters
        self.runs, self.watch = runs, watch or Watch()
        self.order = useful(decided.order)
        # only the backward pass gathers factors
        self.gathers: dict[str, Manner] = {
            i.before: "grouped" if i.how.startswith("Grouped") else "padded"
            for i in self.order
            if isinstance(i, Synchronise) and i.how != "All-Reduce"
        }
        self.values: dict[str, Tensor] = {}  # property -> what this rank holds of it
        self.data: Mapping[str, Tensor] = {}
        self._open: dict[tuple[str, Form, int], Tensor] = {}
        self._pass, self._number, self._stage = "forward", 0, 0

    def begin(self, run: int, data: Mapping[str, Tensor]) -> None:
        """A run's number and data."""
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
        """Both passes; this rank's summand of the loss."""
        self.watch.begins("forward", 0, self._number)
        for instruction in self.order:
            self.forward(instruction)
        loss = self.values[self.decided.theory.data.goal]
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
        """One instruction."""
        if isinstance(instruction, Run):
            made = self._run(instruction)
        else:
            made = self.values[instruction.before]
            made = self._change(instruction, made) if isinstance(instruction, Change) else made
        self.values[instruction.after] = made

    def _slice(self, tensor: str, form: Form, segment: int) -> tuple[int, int]:
        """Where this rank's slice begins and ends."""
        return self.decided.bounds(tensor, form, segment)[self.ranks.rank]

    def _source(self, node: Node, form: Form, segment: int, *, complete: bool) -> Tensor:
        """This rank's slice of the data; of a parameter what it holds, cut where that is the whole.

        complete: the gradient of a whole parameter comes the same on every device, not in summands.
        """
        if node.kind != PARAMETER:
            value = self.data[node.name]
            cut = form != WHOLE
            return piece(value, form, self._slice(node.name, form, segment)) if cut else value
        name, key = self.program.copies.get(node.name, node.name), (node.name, form, segment)
        cut = form != WHOLE and self.decided.shards[name].dimension is None

        def read(held: Tensor) -> Tensor:
            whole = held.view_as(held)
            return piece(whole, form, self._slice(node.name, form, segment)) if cut else whole

        def joined(gradient: Tensor) -> Tensor | None:
            if key in self._open:
                gradient = gradient + self._open.pop(key)
            if self._number + 1 < self.runs:
                self._open[key] = gradient
                return None
            if form == WHOLE and not complete:
                return self.ranks.total(gradient)
            if cut:
                return self.ranks.gather(
                    gradient, form, self.decided.bounds(node.name, form, segment), "padded"
                )
            return gradient

        return mirrored(read, joined, self.parameters[name])

    def _run(self, run: Run) -> Tensor:
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
        act = partial(self._by_factors, run) if run.factors else compute
        return act(node, inputs, place)

    def _by_factors(self, run: Run, node: Node, inputs: Sequence[Tensor], place: Place) -> Tensor:
        """A product of a slice of the batch with a whole weight (and bias).

        The parameters' gradients are computed on every device, from the gathered input and the
        gathered gradient of the output (HAP, Section 2.5.2).
        """
        (left, right, *bias), out = parsed(node.attributes["equation"])
        read, *parameters = inputs
        local = compute(node, [read, *(p.detach() for p in parameters)], place)
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
        """A tensor from one form to another."""
        name, how, ranks, bounds = change.tensor, change.how, self.ranks, self.decided.bounds
        segment = self.program.node(name).segment
        source, target = change.source, change.target
        if how == "Share":
            return value / self.decided.m
        if how == "Repartition" and source < 0:
            return value
        if how == "Slice":
            return piece(value, target, self._slice(name, target, segment))
        if how == "All-Reduce":
            return mirrored(ranks.total, ranks.total, value)
        if how in ("All-To-All", "Repartition"):
            there = reading_segment(change) if how == "Repartition" else segment
            before, after = bounds(name, source, segment), bounds(name, target, there)
            return mirrored(
                partial(ranks.swap, source=source, before=before, target=target, after=after),
                partial(ranks.swap, source=target, before=after, target=source, after=before),
                value,
            )
        form = target if how == "Reduce-Scatter" else source
        manner: Manner = "grouped" if how == "Grouped-Broadcast" else "padded"
        cuts = bounds(name, form, segment)
        gather = partial(ranks.gather, dimension=form, bounds=cuts, manner=manner)
        scatter = partial(ranks.scatter, dimension=form, bounds=cuts, manner=manner)
        both = (scatter, gather) if how == "Reduce-Scatter" else (gather, scatter)
        return mirrored(*both, value)


def useful(order: Sequence[Instruction]) -> list[Instruction]:
    """The instructions that give something new."""
    first: dict[str, Instruction] = {}
    for instruction in order:
        first.setdefault(instruction.after, instruction)
    return list(first.values())
