"""A rank's part of an SPMD plan: its shards of the parameters, its passes, its gradients, and its
part of the checkpoints.

A rank has a parameter in the form in which an operator reads it: whole, or a slice. A parameter
that operators read in different forms (a tied embedding, read as a slice by one operator and whole
by another) is whole on every rank, and slices of its gradient are gathered. Gradients add up over
the runs of an iteration. Gradients of whole parameters are all-reduced in the last run.

Checkpoints contain parameters and optimizer states under the program's names. Every rank writes its
slices as boxes of the whole tensors, so that a run under another program can read its own boxes.
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
from hetplan.runtime.engine.checkpoint import SavedPart
from hetplan.runtime.engine.data import Reading, check_alike, drawing_data
from hetplan.runtime.engine.distributed import check_on_first_rank
from hetplan.runtime.engine.loop import Box
from hetplan.runtime.engine.transport import Staging, Transport, host_group, host_total
from hetplan.runtime.events import Watch
from hetplan.runtime.spmd.machine import Machine, copied, piece
from hetplan.runtime.spmd.models import (
    Array,
    ProgramModel,
    as_model,
    check_samples,
    check_training,
    samples_of,
    synthetic_batch,
    synthetic_initial,
)

# (first, last) -> {placeholder: values} of the rows [first, last) of the global batch
Data = Callable[[int, int], Mapping[str, Array]]


class DistributedProgram(SavedPart):
    """A rank's part of a program under an SPMD plan."""

    def __init__(
        self,
        model: SingleProgram | ProgramModel | nn.Module,
        plan: Plan,
        *,
        device: str = "cpu",
        seed: int = 0,
        watch: Watch | None = None,
        staging: Staging = "auto",
        probe: bool | None = None,
    ) -> None:
        """model: see `spmd.models.as_model`. seed: seed of synthetic data and of first values.
        watch: records the events of the run. staging: see `engine.transport`. probe: whether to
        compare a torch module's training with one process's first; None: where it is not large."""
        check_world(plan, dist.get_world_size())
        program_model = as_model(model, plan)
        program = program_model.program
        check_samples(program, plan)
        if isinstance(model, nn.Module):
            check_on_first_rank(lambda: check_training(model, plan, probe))
        self.plan, self.seed, self.step = plan, seed, 0
        self.watch = watch or Watch()
        self.device = torch.device(device)
        transport = Transport.over(device, staging, self.watch)
        all_ranks = tuple(range(dist.get_world_size()))
        self.everyone = transport.everyone  # on gloo the group of all ranks
        if transport.backend != "gloo":
            groups = transport.groups([all_ranks])
            self.everyone = groups.get(all_ranks, transport.everyone)  # a single rank has no group
        self.synthetic = program_model.batch is None
        self.batch = program_model.batch or synthetic_batch(program, seed)
        decided = read_program(plan, program)
        self.shards = decided.shards
        self.shapes = {name: shard.shape for name, shard in self.shards.items()}
        initial = program_model.initial or synthetic_initial(seed)
        self.parameters = {
            name: nn.Parameter(self.own_part(shard, initial(name, shard.shape)))
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
        """The values as a tensor on this rank's device; floating-point values in torch's default
        type."""
        on_device = torch.as_tensor(value, device=self.device)
        if on_device.is_floating_point():
            return on_device.to(torch.get_default_dtype())
        return on_device

    def iteration(self, step: int, rows: Data | None) -> float:
        """Run the program once for each micro-batch, and return the loss of the whole batch. rows:
        None: the model's data."""
        require(
            self.autocast is None,
            "SPMD programs are computed in their parameters' own type",
            where=self.plan.name,
            got="train_step inside torch.autocast",
            expected="no torch.autocast around it",
            kind=UnsupportedError,
        )
        of_step = rows or (lambda first, last: self.batch(step, first, last))
        # synthetic data follow from the seed alone, and need no comparison
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
                if parameter.grad is None:  # the loss does not depend on it
                    parameter.grad = torch.zeros_like(parameter)
        return total / self.runs

    def _data(self, step: int, run: int, of_step: Data, *, compared: bool) -> Mapping[str, Array]:
        """The data of a run, which all ranks read. compared: whether to raise InputError where
        ranks have different data."""
        samples = samples_of(self.plan)
        rows = run * samples, (run + 1) * samples
        with drawing_data(self.seed, step, rows[0]):
            data = of_step(*rows)
        world = dist.get_world_size()
        if compared and world > 1:
            reading = Reading(rows, tuple(range(world)), f"run {run}")
            with self.watch.meets():
                # (inputs, targets): the data of a program are not told apart
                check_alike(step, [reading], dist.get_rank(), lambda *_: (data, None))
        return data

    def updated(self) -> list[tuple[str, nn.Parameter]]:
        """(name, this rank's shard) of each parameter."""
        return list(self.parameters.items())

    def boxes(
        self,
        values: Mapping[int, Tensor] | None = None,
        *,
        deduplicated: bool = False,
        scalars: bool = False,
    ) -> Iterator[Box]:
        """The boxes of this rank's slices and whole parameters. Every rank saves its slices; the
        whole parameters are distributed over the ranks in turn."""
        rank = dist.get_rank()
        world = dist.get_world_size()
        for number, (name, parameter) in enumerate(self.parameters.items()):
            shard = self.shards[name]
            offsets = [0] * len(self.shapes[name])
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
