"""This rank's part of an SPMD program: its shards of the parameters, both passes, gradients where
they are held.

A parameter is held as the operator that reads it wants it: whole, or a slice. One that operators
read in different ways (a tied embedding, sliced in one place and whole in another) is held whole,
and slices of its gradient are gathered. Gradients add up over the runs of an iteration; those of
whole parameters are all-reduced in the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetplan.errors import InputError
from hetplan.formulations.hap.spmd.forms import WHOLE, Form
from hetplan.formulations.hap.spmd.program import PARAMETER, PLACEHOLDER, Node, SingleProgram
from hetplan.runtime.execution.spmd.machine import Machine, Slices, mirrored, piece, useful
from hetplan.runtime.execution.spmd.model import (
    Array,
    ProgramModel,
    check_samples,
    synthetic_batch,
    synthetic_initial,
)
from hetplan.runtime.execution.spmd.ranks import Ranks, copied
from hetplan.runtime.execution.transport import Staging, Transport, host_total
from hetplan.runtime.plan import Plan, check_world
from hetplan.runtime.spmd_decision import Reading, Shard, read_program, shards_of
from hetplan.runtime.watch import Watch

# (first, last) row -> placeholder -> values, as arrays or tensors
Data = Callable[[int, int], Mapping[str, Array]]


class DistributedProgram:
    """A rank's part of a program under an SPMD plan. step: iterations begun."""

    def __init__(
        self,
        model: SingleProgram | ProgramModel,
        plan: Plan,
        *,
        device: str = "cpu",
        seed: int = 0,
        watch: Watch | None = None,
        staging: Staging = "auto",
    ) -> None:
        check_world(plan, dist.get_world_size())
        made = as_model(model)
        check_samples(made.program, plan)
        self.reading: Reading = read_program(plan, made.program)
        self.program, self.plan, self.seed, self.step = made.program, plan, seed, 0
        self.order = useful(self.reading.order)
        self.watch, self.device = watch or Watch(), torch.device(device)
        transport = Transport.over(device, staging, self.watch)
        everyone = tuple(range(dist.get_world_size()))
        groups = {} if transport.backend == "gloo" else transport.groups([everyone])
        self.everyone = groups.get(everyone, transport.everyone)
        self.batch = made.batch or synthetic_batch(made.program, seed)
        self.machine = RankMachine(self)
        self.shards = shards_of(self.reading)
        first = made.initial or synthetic_initial(seed)
        self.parameters: dict[str, nn.Parameter] = {}
        for name, shard in self.shards.items():
            whole = self.tensor(first(name, shard.shape))
            if tuple(whole.shape) != shard.shape:
                got, expected = tuple(whole.shape), f"{shard.shape}"
                what = "first values of a parameter"
                raise InputError(what, where=name, got=got, expected=expected)
            self.parameters[name] = nn.Parameter(held_by(dist.get_rank(), shard, whole))

    @property
    def runs(self) -> int:
        """Runs of the program in an iteration."""
        return self.plan.replicas[0].steps

    def tensor(self, value: Array) -> Tensor:
        """Values on this rank's device, real ones in torch's default precision."""
        here = torch.as_tensor(value, device=self.device)
        return here.to(torch.get_default_dtype()) if here.is_floating_point() else here

    def train_step(self, rows: Data | None = None) -> float:
        """All runs of one global batch; gradients are left where `optimizer` finds them. All ranks
        together.

        rows: (first, last) -> placeholder -> these global rows; default the model's `batch` of this
        step. Returns the loss of the whole batch, the same on every rank.
        """
        step = self.step
        self.step += 1
        of_step = rows or (lambda first, last: self.batch(step, first, last))
        with self.watch.during("prepare", 0, step):
            dist.barrier(group=Transport.on_cpu().everyone.process)
        loss = sum(self._run(run, of_step) for run in range(self.runs))
        with self.watch.during("synchronise", 0, step):
            total = host_total(loss)
            for parameter in self.parameters.values():
                if parameter.grad is None:  # nothing depends on it
                    parameter.grad = torch.zeros_like(parameter)
        return total / self.runs

    def _run(self, run: int, of_step: Data) -> float:
        samples = self.plan.replicas[0].samples // self.runs
        data = of_step(run * samples, (run + 1) * samples)
        self.machine.begin(run, {name: self.tensor(value) for name, value in data.items()})
        (loss,) = self.machine.run(self.order, self.reading.theory.data.goal, 1 / self.runs)
        self.machine.finish()
        return float(loss)

    def optimizer(self, kind: Callable[..., Any], **options: Any) -> Any:
        """An optimizer of torch over this rank's shards; elementwise ones (SGD, Adam, AdamW) stay
        exact."""
        return kind(list(self.parameters.values()), **options)

    def updated(self) -> None:
        """Nothing is gathered anew: every rank updates what it holds."""

    def gradients(self) -> Iterator[tuple[Shard, Tensor]]:
        """Of every parameter, this rank's part of the gradient; whole ones are the same on all
        ranks."""
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None, "train_step sets all"
            yield self.shards[name], parameter.grad


def held_by(rank: int, shard: Shard, whole: Tensor) -> Tensor:
    """A rank's part of a whole tensor; a copy."""
    if shard.dimension is None:
        return copied(whole)
    return copied(piece(whole, shard.dimension, shard.bounds[rank]))


def as_model(model: SingleProgram | ProgramModel) -> ProgramModel:
    """With data and first values. Raises InputError for what is no program."""
    if isinstance(model, SingleProgram):
        return ProgramModel(model)
    if not isinstance(model, ProgramModel):
        raise InputError(
            "SPMD plans run single-device programs", got=type(model).__name__,
            expected="a SingleProgram or a ProgramModel",
        )  # fmt: skip
    return model


class RankMachine(Machine):
    """The machine of one rank. Gradients add up per use of a parameter until the last run joins
    them."""

    def __init__(self, owner: DistributedProgram) -> None:
        reading = owner.reading
        together = Ranks(owner.everyone, self._notify)
        super().__init__(
            reading.theory.program, reading.theory.axes, reading.decision.ratios, together
        )
        self.owner, self.watch = owner, owner.watch
        self.data: Mapping[str, Tensor] = {}
        self._open: dict[tuple[str, Form, int], Tensor] = {}
        self._pass, self._number, self._stage = "forward", 0, 0

    def begin(self, run: int, data: Mapping[str, Tensor]) -> None:
        """A run's data."""
        for node in self.program.nodes:
            if node.kind == PLACEHOLDER and tuple(data[node.name].shape) != node.shape:
                got, expected = tuple(data[node.name].shape), f"{node.shape}"
                raise InputError("data of a run", where=node.name, got=got, expected=expected)
        self.data, self._number, self._stage, self._pass = data, run, 0, "forward"
        self.watch.begins("forward", 0, run)

    def turn(self) -> None:
        """The backward pass begins a stage of its own."""
        self.watch.ends("forward", self._stage, self._number)
        self._pass, self._stage = "backward", self._stage + 1
        self.watch.begins("backward", self._stage, self._number)

    def finish(self) -> None:
        """Behind the passes."""
        self.watch.ends("backward", self._stage, self._number)

    def _notify(self, begins: bool) -> None:
        """A collective ends what is computed before it and begins the next stage."""
        if begins:
            self.watch.ends(self._pass, self._stage, self._number)
            self._stage += 1
            self.watch.begins("collective", self._stage, self._number)
        else:
            self.watch.ends("collective", self._stage, self._number)
            self.watch.begins(self._pass, self._stage, self._number)

    def source(self, node: Node, form: Form, segment: int, *, complete: bool) -> Slices:
        """This rank's slice of the data; of a parameter what it holds, cut where that is the
        whole."""
        rank = self.exchange.here[0]
        if node.kind != PARAMETER:
            value = self.data[node.name]
            return [value if form == WHOLE else self._cut(value, node, form, segment)[rank]]
        name = self.program.copies.get(node.name, node.name)
        held, key = self.owner.parameters[name], (node.name, form, segment)
        cut = form != WHOLE and self.owner.shards[name].dimension is None

        def read(slices: Slices) -> Slices:
            return [self._cut(held, node, form, segment)[rank] if cut else held.view_as(held)]

        def joined(gradients: Slices) -> list[Tensor | None]:
            gradient = gradients[0] + self._open.pop(key) if key in self._open else gradients[0]
            if self._number + 1 < self.owner.runs:
                self._open[key] = gradient
                return [None]
            if form == WHOLE and not complete:
                return [*self.exchange.total([gradient])]
            if cut:
                bounds = self.bounds(node.name, form, segment)
                return [*self.exchange.gather([gradient], form, bounds, "padded")]
            return [gradient]

        return mirrored(read, joined, [held])

    def _cut(self, value: Tensor, node: Node, form: Form, segment: int) -> Slices:
        return [piece(value, form, pair) for pair in self.bounds(node.name, form, segment)]
