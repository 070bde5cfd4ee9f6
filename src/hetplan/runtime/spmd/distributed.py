"""A rank's part of an SPMD plan: its shards of the parameters, both passes, gradients where they
are held, and checkpoints.

A rank holds a parameter as the operator that reads it wants it: whole, or a slice. A parameter that
operators read in different ways (a tied embedding, sliced in one place and whole in another) is
held whole, and slices of its gradient are gathered. Gradients add up over the runs of an iteration;
gradients of whole parameters are all-reduced in the last run.

Checkpoints hold parameters and optimizer states under the program's names, every rank's slices as
boxes of the whole: another program reads its own boxes from them.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetplan.errors import UnsupportedError, require
from hetplan.plans.making import check_world
from hetplan.plans.plan import Plan
from hetplan.programs.decided import Shard
from hetplan.programs.program import SingleProgram
from hetplan.programs.proofs import read_program
from hetplan.runtime.engine.data import Reading, check_alike, drawing_data
from hetplan.runtime.engine.loop import Box, TrainedPart
from hetplan.runtime.engine.transport import Staging, Transport, host_group, host_total
from hetplan.runtime.events import Watch
from hetplan.runtime.spmd.machine import Machine, copied, piece
from hetplan.runtime.spmd.models import (
    Array,
    ProgramModel,
    as_model,
    check_samples,
    samples_of,
    synthetic_batch,
    synthetic_initial,
)

# (first, last) row -> placeholder -> values, as arrays or tensors
Data = Callable[[int, int], Mapping[str, Array]]


class DistributedProgram(TrainedPart):
    """A rank's part of a program under an SPMD plan. step: iterations begun."""

    def __init__(
        self,
        model: SingleProgram | ProgramModel | nn.Module,
        plan: Plan,
        *,
        device: str = "cpu",
        seed: int = 0,
        watch: Watch | None = None,
        staging: Staging = "auto",
    ) -> None:
        check_world(plan, dist.get_world_size())
        made = as_model(model, plan)
        check_samples(made.program, plan)
        self.plan, self.seed, self.step = plan, seed, 0
        self.watch, self.device = watch or Watch(), torch.device(device)
        transport = Transport.over(device, staging, self.watch)
        everyone = tuple(range(dist.get_world_size()))
        groups = {} if transport.backend == "gloo" else transport.groups([everyone])
        self.everyone = groups.get(everyone, transport.everyone)
        self.synthetic = made.batch is None
        self.batch = made.batch or synthetic_batch(made.program, seed)
        decided = read_program(plan, made.program)
        self.shards = decided.shards
        self.shapes = {name: shard.shape for name, shard in self.shards.items()}
        first = made.initial or synthetic_initial(seed)
        self.parameters = {
            name: nn.Parameter(self.own_part(shard, first(name, shard.shape)))
            for name, shard in self.shards.items()
        }
        self.runs = plan.replicas[0].steps
        self.machine = Machine(
            decided,
            self.everyone,
            dist.get_rank(),
            self.parameters,
            runs=self.runs,
            watch=self.watch,
        )

    def own_part(self, shard: Shard, values: Array) -> Tensor:
        """This rank's part of a parameter's values. Raises InputError for values of another
        shape."""
        whole = self.tensor(values)
        require(
            tuple(whole.shape) == shard.shape,
            "first values of a parameter",
            where=shard.name,
            got=tuple(whole.shape),
            expected=f"{shard.shape}",
        )
        if shard.dimension is not None:
            whole = piece(whole, shard.dimension, shard.bounds[dist.get_rank()])
        return copied(whole)

    def tensor(self, value: Array) -> Tensor:
        """Values on this rank's device, real ones in torch's default precision."""
        here = torch.as_tensor(value, device=self.device)
        if here.is_floating_point():
            return here.to(torch.get_default_dtype())
        return here

    def iteration(self, step: int, rows: Data | None) -> float:
        """All runs of the program; rows: (first, last) -> placeholder -> these global rows."""
        require(
            self.autocast is None,
            "SPMD programs are computed in their parameters' own type",
            where=self.plan.name,
            got="train_step inside torch.autocast",
            expected="no torch.autocast around it",
            kind=UnsupportedError,
        )
        of_step = rows or (lambda first, last: self.batch(step, first, last))
        user_made = rows is not None or not self.synthetic
        with self.watch.during("prepare", 0, step):
            dist.barrier(group=host_group())
        loss = 0.0
        for run in range(self.runs):
            data = self._data(step, run, of_step, compared=user_made)
            self.machine.begin(run, {name: self.tensor(value) for name, value in data.items()})
            loss += self.machine.run()
        with self.watch.during("synchronise", 0, step):
            total = host_total(loss)
            for parameter in self.parameters.values():
                if parameter.grad is None:  # nothing depends on it
                    parameter.grad = torch.zeros_like(parameter)
        return total / self.runs

    def _data(self, step: int, run: int, of_step: Data, *, compared: bool) -> Mapping[str, Array]:
        """A run's data, which all ranks read. Raises InputError where they are compared and
        differ."""
        samples = samples_of(self.plan)
        rows = run * samples, (run + 1) * samples
        with drawing_data(self.seed, step, rows[0]):
            data = of_step(*rows)
        world = dist.get_world_size()
        if compared and world > 1:
            reading = Reading(rows, tuple(range(world)), f"run {run}")
            with self.watch.meets():
                check_alike(step, [reading], dist.get_rank(), lambda *_: (data, None))
        return data

    def updated(self) -> list[tuple[str, nn.Parameter]]:
        """This rank's shards."""
        return list(self.parameters.items())

    def boxes(
        self,
        values: Mapping[int, Tensor] | None = None,
        *,
        deduplicated: bool = False,
        scalars: bool = False,
    ) -> Iterator[Box]:
        """Slices, and whole parameters, which ranks save in turns."""
        rank, world = dist.get_rank(), dist.get_world_size()
        for number, (name, parameter) in enumerate(self.parameters.items()):
            shard, offsets = self.shards[name], [0] * len(self.shapes[name])
            saves = number % world == rank
            if shard.dimension is not None:
                offsets[shard.dimension] = shard.bounds[rank][0]
                saves = True
            if parameter.numel() == 0 or (deduplicated and not saves):
                continue
            tensor = parameter if values is None else values.get(id(parameter))
            if tensor is not None:
                sizes = tuple(parameter.shape)
                yield Box(name, tuple(offsets), sizes, shard.shape, tensor.detach())
