"""This rank's part of an SPMD program: its shards of the parameters, both passes, gradients where
they are held.

A parameter is held as the operator that reads it wants it: whole, or a slice. One that operators
read in different ways
(a tied embedding, sliced in one place and whole in another) is held whole, and slices of its
gradient are gathered.
Gradients add up over the runs of an iteration; those of whole parameters are all-reduced in the
last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hetplan.errors import InputError, UnsupportedError
from hetplan.formulations.hap.spmd.exchange import Bounds, Slices
from hetplan.formulations.hap.spmd.forms import WHOLE, Form
from hetplan.formulations.hap.spmd.machine import Machine, useful
from hetplan.formulations.hap.spmd.operators.base import Array
from hetplan.formulations.hap.spmd.program import PARAMETER, Node, SingleProgram
from hetplan.runtime.execution.spmd.blas import limit_threads
from hetplan.runtime.execution.spmd.model import (
    ProgramModel,
    check_samples,
    synthetic_batch,
    synthetic_initial,
)
from hetplan.runtime.execution.spmd.ranks import Ranks
from hetplan.runtime.execution.transport import Staging, Transport, host_total
from hetplan.runtime.plan import Plan, check_world
from hetplan.runtime.spmd_decision import Reading, read_program
from hetplan.runtime.spmd_shards import Shard, shards_of
from hetplan.runtime.watch import Watch

Data = Callable[[int, int], Mapping[str, Array]]
DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


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
        if device not in ("cpu", "auto"):
            raise UnsupportedError(
                "SPMD programs compute on the CPU", got=device, expected="cpu or auto"
            )
        limit_threads(torch.get_num_threads())
        made = as_model(model)
        check_samples(made.program, plan)
        self.reading: Reading = read_program(plan, made.program)
        self.program, self.plan, self.seed, self.step = made.program, plan, seed, 0
        self.order = useful(self.reading.order)
        self.watch = watch or Watch()
        self.everyone = Transport.on_cpu(staging, self.watch).everyone
        self.dtype = DTYPES[torch.get_default_dtype()]
        self.batch = made.batch or synthetic_batch(made.program, seed)
        self.machine = RankMachine(self)
        self.shards = shards_of(self.reading)
        first = made.initial or synthetic_initial(seed)
        self.parameters: dict[str, nn.Parameter] = {}
        for name, shard in self.shards.items():
            whole = np.asarray(first(name, shard.shape), self.dtype)
            if whole.shape != shard.shape:
                raise InputError(
                    "first values of a parameter",
                    where=name,
                    got=whole.shape,
                    expected=f"{shard.shape}",
                )
            self.parameters[name] = nn.Parameter(
                torch.from_numpy(shard.take(whole, dist.get_rank()))
            )

    @property
    def runs(self) -> int:
        """Runs of the program in an iteration."""
        return self.plan.replicas[0].steps

    def train_step(self, rows: Data | None = None) -> float:
        """All runs of one global batch; gradients are left where `optimizer` finds them. All ranks
        together.

        rows: (first, last) -> placeholder -> these global rows; default the model's `batch` of this
        step. Returns the loss of the whole batch, the same on every rank.
        """
        step = self.step
        self.step += 1
        of_step = rows or (lambda first, last: self.batch(step, first, last))
        self.watch.begins("prepare", 0, step)
        dist.barrier(group=self.everyone.process)
        self.watch.ends("prepare", 0, step)
        loss = sum(self._run(run, of_step) for run in range(self.runs))
        self.watch.begins("synchronise", 0, step)
        total = host_total(loss)
        self.machine.settle()
        self.watch.ends("synchronise", 0, step)
        return total / self.runs

    def _run(self, run: int, of_step: Data) -> float:
        samples = self.plan.replicas[0].samples // self.runs
        data = of_step(run * samples, (run + 1) * samples)
        goal = self.reading.theory.data.goal
        loss = self.machine.begin(run, data).run(self.order, goal, 1 / self.runs)
        self.machine.finish()
        return float(loss[0])

    def optimizer(self, kind: Callable[..., Any], **options: Any) -> Any:
        """An optimizer of torch over this rank's shards; elementwise ones (SGD, Adam, AdamW) stay
        exact."""
        return kind(list(self.parameters.values()), **options)

    def updated(self) -> None:
        """Nothing is gathered anew: every rank updates what it holds."""

    def gradients(self) -> Iterator[tuple[Shard, Array]]:
        """Of every parameter, this rank's part of the gradient; whole ones are the same on all
        ranks."""
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None, "train_step sets all"
            yield self.shards[name], parameter.grad.numpy()


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
        super().__init__(
            reading.theory.program,
            reading.theory.axes,
            reading.decision.ratios,
            Ranks(self._told, owner.everyone),
            owner.dtype,
        )
        self.owner, self.watch = owner, owner.watch
        self.data: Mapping[str, Array] = {}
        self.joined: dict[str, Array] = {}
        self._open: dict[tuple[str, Form, int, bool], Array] = {}
        self._pass, self._number, self._stage = "forward", 0, 0

    def begin(self, run: int, data: Mapping[str, Array]) -> RankMachine:
        """A run's data."""
        for node in self.program.nodes:
            if node.kind == "placeholder" and data[node.name].shape != node.shape:
                raise InputError(
                    "data of a run",
                    where=node.name,
                    got=data[node.name].shape,
                    expected=f"{node.shape}",
                )
        self.data, self._number, self._stage, self._pass = data, run, 0, "forward"
        self.watch.begins("forward", 0, run)
        return self

    def turn(self) -> None:
        """The backward pass begins a stage of its own."""
        self.watch.ends("forward", self._stage, self._number)
        self._pass, self._stage = "backward", self._stage + 1
        self.watch.begins("backward", self._stage, self._number)

    def finish(self) -> None:
        """Behind the passes."""
        self.watch.ends("backward", self._stage, self._number)
        self.gradients.clear()

    def _told(self, begins: bool) -> None:
        """A collective ends what is computed before it and begins the next stage."""
        if begins:
            self.watch.ends(self._pass, self._stage, self._number)
            self._stage += 1
            self.watch.begins("collective", self._stage, self._number)
        else:
            self.watch.ends("collective", self._stage, self._number)
            self.watch.begins(self._pass, self._stage, self._number)

    def source(self, node: Node, form: Form, segment: int) -> Slices:
        """This rank's slice of the data; of a parameter what it holds, cut where that is the
        whole."""
        if node.kind != PARAMETER:
            value = self.typed(self.data[node.name])
            return [value] if form == WHOLE else self.cut(value, node.name, form, segment)
        name = self.program.copies.get(node.name, node.name)
        held: Array = self.owner.parameters[name].detach().numpy()
        if form == WHOLE or self.owner.shards[name].dimension is not None:
            return [held]
        return self.cut(held, node.name, form, segment)

    def given(
        self, node: Node, form: Form, segment: int, slices: Slices, *, complete: bool
    ) -> None:
        """Added up; joined with the others' in the last run."""
        key = (node.name, form, segment, complete)
        value = slices[0] + self._open.pop(key) if key in self._open else slices[0]
        if self._number + 1 < self.owner.runs:
            self._open[key] = value
            return
        name = self.program.copies.get(node.name, node.name)
        if form == WHOLE:
            value = value if complete else self.exchange.total([value])[0]
        elif self.owner.shards[name].dimension is None:
            bounds: Bounds = self.bounds(node.name, form, segment)
            value = self.exchange.gather([value], form, bounds, "padded")[0]
        self.joined[name] = self.joined[name] + value if name in self.joined else value

    def settle(self) -> None:
        """The joined gradients become the parameters'; zeros where nothing depends on one."""
        for name, parameter in self.owner.parameters.items():
            found = self.joined.get(name)
            added = (
                torch.zeros_like(parameter)
                if found is None
                else torch.from_numpy(np.array(found, order="C"))
            )
            parameter.grad = added if parameter.grad is None else parameter.grad.add_(added)
        self.joined.clear()
