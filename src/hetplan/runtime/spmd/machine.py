"""One rank's execution of an SPMD program on torch tensors.

torch runs the backward pass. A collective is an autograd function whose backward pass is the
opposite collective; `programs.forms` says in which form a gradient is. torch runs the backward
passes of operations in reverse order, so that every rank mirrors the instructions in the same
order. Slices may have any length, 0 included.

A property says that a tensor is available in a form (`programs.forms`). An instruction needs the
property `before`, and establishes the property `after`.
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

# How slices of different lengths are exchanged: by one collective of slices padded to the longest,
# or by one collective for each slice.
Manner = Literal["padded", "grouped"]


def piece(value: Tensor, dimension: int, bounds: tuple[int, int]) -> Tensor:
    """The slice [first, last) of a dimension, as a view."""
    first, last = bounds
    return value.narrow(dimension, first, last - first)


def copied(value: Tensor) -> Tensor:
    """A copy in row-major order, outside autograd's graph."""
    return value.detach().clone(memory_format=torch.contiguous_format)


class Ranks:
    """This rank's collectives with all ranks of a program. Results are new tensors.

    A padded reduce-scatter is an all-reduce of which each rank keeps a slice: gloo's own is slower,
    and takes equal slices only.
    """

    def __init__(
        self,
        group: Group,
        rank: int,
        during: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """group: all ranks. rank: this rank's number. during: a context that each collective runs
        in."""
        self.group, self.rank, self.during = group, rank, during

    def total(self, value: Tensor) -> Tensor:
        """All-reduce: the sum over all ranks."""
        with self.during():
            return self.group.reduced(value)

    def gather(self, value: Tensor, dimension: int, bounds: Bounds, manner: Manner) -> Tensor:
        """All-gather: the whole tensor from each rank's slice of a dimension.

        bounds: [rank] of the slices. Padded, it is one all-gather; grouped, a broadcast of each
        slice.
        """
        with self.during():
            rows_first = value.detach().movedim(dimension, 0).contiguous()
            if manner == "padded":
                lengths = [last - first for first, last in bounds]
                slices = self.group.gather(rows_first, lengths)
            else:
                slices = self._broadcasts(rows_first, bounds)
            return torch.cat(slices).movedim(0, dimension).contiguous()

    def _broadcasts(self, value: Tensor, bounds: Bounds) -> list[Tensor]:
        """[rank] every rank's slice of the first dimension, each by a broadcast from its rank."""
        slices = []
        for rank, (first, last) in enumerate(bounds):
            if rank == self.rank:
                received = value.clone()
            else:
                received = value.new_empty((last - first, *value.shape[1:]))
            if last > first:
                self.group.broadcast(received, rank)
            slices.append(received)
        return slices

    def scatter(self, value: Tensor, dimension: int, bounds: Bounds, manner: Manner) -> Tensor:
        """Reduce-scatter: this rank's slice of the sum over all ranks.

        bounds: [rank] of the slices. Padded, it is one all-reduce; grouped, a reduction of each
        slice to its rank.
        """
        with self.during():
            if manner == "padded":
                return copied(piece(self.group.reduced(value), dimension, bounds[self.rank]))
            slices = [copied(piece(value, dimension, interval)) for interval in bounds]
            for rank, reduced in enumerate(slices):
                self.group.reduce(reduced, rank)
            return slices[self.rank]

    def swap(
        self, value: Tensor, source: int, before: Bounds, target: int, after: Bounds
    ) -> Tensor:
        """All-to-all: this rank's slice of the dimension `target` from each rank's slice of the
        dimension `source`, which may be the same one with other bounds.

        before, after: [rank] bounds of the slices of `source`, and of `target`.
        """
        with self.during():
            value = value.detach()
            old, new = before[self.rank], after[self.rank]
            if source == target:
                sent = [piece(value, source, overlap(old, to, old[0])) for to in after]
                received_ranges = [overlap(of, new, 0) for of in before]
            else:
                sent = [piece(value, target, to) for to in after]
                received_ranges = list(before)
            shape = list(value.shape)
            shape[target] = new[1] - new[0]
            received_shapes = []
            for first, last in received_ranges:
                shape[source] = last - first
                received_shapes.append(tuple(shape))
            sizes = [math.prod(shape) for shape in received_shapes]
            flat = torch.cat([part.reshape(-1) for part in sent])
            received = self.group.swap(flat, [part.numel() for part in sent], sizes)
            slices = [
                part.view(shape)
                for part, shape in zip(received.split(sizes), received_shapes, strict=True)
            ]
            return torch.cat(slices, dim=source)


class Machine:
    """One rank's runs of a program: an iteration runs it once for each of its micro-batches."""

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
        """group: all ranks. parameters: this rank's shard of each (`Decided.shards`). runs: number
        of runs in an iteration. Gradients add up for each use of a parameter, and the last run adds
        up the uses and ranks."""
        self.decided, self.program = decided, decided.program
        self.ranks = Ranks(group, rank, self._collective)
        self.parameters = parameters
        self.runs, self.watch = runs, watch or Watch()
        self.order = first_to_establish(decided.order)
        self.gathers: dict[str, Manner] = {}
        """Property before a synchronisation by sufficient factors -> how the backward pass gathers
        these factors."""
        for instruction in self.order:
            if isinstance(instruction, Synchronise) and instruction.how != "All-Reduce":
                grouped = instruction.how.startswith("Grouped")
                self.gathers[instruction.before] = "grouped" if grouped else "padded"
        self.values: dict[str, Tensor] = {}
        """Property -> this rank's part of the tensor, in the forward pass."""
        self.data: Mapping[str, Tensor] = {}
        """Placeholder -> the whole tensor."""
        self._summed: dict[tuple[str, Form, int], Tensor] = {}
        """Use of a parameter (name, form, segment) -> its gradient, summed over the iteration's
        runs so far."""
        self._pass: str = "forward"
        """The pass that runs, "forward" or "backward"."""
        self._run_number = 0
        self._stage = 0
        """Number of the stretch of the run between two collectives, which its events carry."""

    def begin(self, run: int, data: Mapping[str, Tensor]) -> None:
        """Begin a run of the iteration. run: its number, from 0. data: placeholder -> the whole
        tensor. Raises InputError for data of another shape."""
        for node in self.program.nodes:
            shape = tuple(data[node.name].shape) if node.kind == PLACEHOLDER else node.shape
            require(
                shape == node.shape,
                "data of a run",
                where=node.name,
                got=shape,
                expected=f"{node.shape}",
            )
        self.data, self._run_number, self._stage, self._pass = data, run, 0, "forward"

    def run(self) -> float:
        """Run the forward and the backward pass; returns this rank's summand of the loss."""
        self.watch.begins("forward", 0, self._run_number)
        for instruction in self.order:
            self.forward(instruction)
        loss = self.values[self.decided.rules.goal]
        self.values = {}  # autograd keeps what the backward pass needs
        self.watch.ends("forward", self._stage, self._run_number)
        self._pass, self._stage = "backward", self._stage + 1
        self.watch.begins("backward", self._stage, self._run_number)
        torch.autograd.backward([loss], [torch.full_like(loss, 1 / self.runs)])
        self.watch.ends("backward", self._stage, self._run_number)
        return float(loss.detach())

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """A context for a collective. It records that the pass is interrupted by the collective,
        and goes on as the next stage."""
        self.watch.ends(self._pass, self._stage, self._run_number)
        self._stage += 1
        self.watch.begins("collective", self._stage, self._run_number)
        yield
        self.watch.ends("collective", self._stage, self._run_number)
        self.watch.begins(self._pass, self._stage, self._run_number)

    def forward(self, instruction: Instruction) -> None:
        """Execute one instruction of the forward pass."""
        if isinstance(instruction, Run):
            value = self._run(instruction)
        elif isinstance(instruction, Change):
            value = self._change(instruction, self.values[instruction.before])
        else:  # only the backward pass synchronises
            value = self.values[instruction.before]
        self.values[instruction.after] = value

    def _slice(self, tensor: str, form: Form, segment: int) -> tuple[int, int]:
        """[first, last) of the dimension `form` of a tensor on this rank."""
        return self.decided.bounds(tensor, form, segment)[self.ranks.rank]

    def _input(self, node: Node, form: Form, segment: int, *, complete: bool) -> Tensor:
        """A placeholder's data or a parameter in the form in which an operator reads it."""
        if node.kind == PARAMETER:
            return self._parameter(node, form, segment, complete=complete)
        value = self.data[node.name]
        if form == WHOLE:
            return value
        return piece(value, form, self._slice(node.name, form, segment))

    def _parameter(self, node: Node, form: Form, segment: int, *, complete: bool) -> Tensor:
        """A parameter in a form: this rank's shard, or a slice of it where the shard is the whole
        parameter.

        complete: whether every rank computes the whole gradient of a whole parameter, rather than a
        summand.
        """
        owner = self.program.copies.get(node.name, node.name)
        shard_is_whole = self.decided.shards[owner].dimension is None
        sliced = form != WHOLE and shard_is_whole
        use = node.name, form, segment

        def read(parameter: Tensor) -> Tensor:
            value = parameter.view_as(parameter)
            if sliced:
                return piece(value, form, self._slice(node.name, form, segment))
            return value

        def summed(gradient: Tensor) -> Tensor | None:
            """The parameter's gradient in the last run of the iteration; None in earlier runs."""
            if use in self._summed:
                gradient = gradient + self._summed.pop(use)
            is_last_run = self._run_number + 1 >= self.runs
            if not is_last_run:
                self._summed[use] = gradient
                return None
            if form == WHOLE and not complete:
                return self.ranks.total(gradient)
            if sliced:
                bounds = self.decided.bounds(node.name, form, segment)
                return self.ranks.gather(gradient, form, bounds, "padded")
            return gradient

        return mirrored(read, summed, self.parameters[owner])

    def _run(self, run: Run) -> Tensor:
        """An operator's output on this rank."""
        node, output = self.program.node(run.node), run.rule.output
        inputs: list[Tensor] = []
        starts: list[int] = []
        for source, form in zip(self.program.inputs(node), run.rule.inputs, strict=True):
            if source.source:
                inputs.append(self._input(source, form, node.segment, complete=run.factors))
            else:
                name = source.name
                if source.segment != node.segment:  # sliced by the ratios of this segment
                    name = f"{source.name}@{node.segment}"
                inputs.append(self.values[property_name(name, form)])
            start = 0
            if form >= 0:  # a slice; WHOLE and PARTIAL are negative
                start, _ = self._slice(source.name, form, node.segment)
            starts.append(start)
        shape = list(node.shape)
        if output >= 0:
            first, last = self._slice(node.name, output, node.segment)
            shape[output] = last - first
        place = Place(
            shape=tuple(shape),
            starts=tuple(starts),
            partial=output == PARTIAL,
            first=self.ranks.rank == 0,
        )
        if run.factors:
            return self._by_factors(run, node, inputs, place)
        return node.compute(inputs, place)

    def _by_factors(self, run: Run, node: Node, inputs: Sequence[Tensor], place: Place) -> Tensor:
        """A product of a slice of the batch with a whole weight, and a bias where it has one.

        Every rank computes the parameters' whole gradients from their sufficient factors: the
        gathered input and the gathered gradient of the output (HAP, Section 2.5.2).
        """
        (left, right, *bias), out = parsed(node.attributes["equation"])
        x, *parameters = inputs
        # detached: `backward` gives the parameters' gradients, and autograd that of x alone
        local = node.compute([x, *(p.detach() for p in parameters)], place)
        factor = x.detach()
        x_form, manner = run.rule.inputs[0], self.gathers[run.after]

        def backward(gradient: Tensor) -> tuple[Tensor, ...]:
            x_bounds = self.decided.bounds(node.inputs[0], x_form, node.segment)
            whole_x = self.ranks.gather(factor, x_form, x_bounds, manner)
            bounds = self.decided.bounds(node.name, run.rule.output, node.segment)
            whole_gradient = self.ranks.gather(gradient, run.rule.output, bounds, manner)
            weight = torch.einsum(f"{left},{out}->{right}", whole_x, whole_gradient)
            biases = [torch.einsum(f"{out}->{letters}", whole_gradient) for letters in bias]
            return gradient, weight, *biases

        # The output is `local`. The parameters are inputs so that `backward` gives their gradients.
        return mirrored(lambda x, *_: x.view_as(x), backward, local, *parameters)

    def _change(self, change: Change, value: Tensor) -> Tensor:
        """The tensor in another form. In the backward pass its gradient goes through the opposite
        change."""
        how = change.how
        segment = self.program.node(change.tensor).segment
        if how == "Share":  # from whole to equal summands on the m ranks
            return value / self.decided.m
        if how == "Slice":
            return piece(value, change.target, self._slice(change.tensor, change.target, segment))
        if is_free(change):  # what is left of these: a repartition of a whole tensor or of summands
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
        """The tensor in slices along another dimension, or by another segment's ratios."""
        source, target = change.source, change.target
        target_segment = reading_segment(change) if change.how == "Repartition" else segment
        before = self.decided.bounds(change.tensor, source, segment)
        after = self.decided.bounds(change.tensor, target, target_segment)
        return mirrored(
            partial(self.ranks.swap, source=source, before=before, target=target, after=after),
            partial(self.ranks.swap, source=target, before=after, target=source, after=before),
            value,
        )


def first_to_establish(order: Sequence[Instruction]) -> list[Instruction]:
    """The instructions without those that give a property which one before them has given."""
    first: dict[str, Instruction] = {}
    for instruction in order:
        first.setdefault(instruction.after, instruction)
    return list(first.values())
