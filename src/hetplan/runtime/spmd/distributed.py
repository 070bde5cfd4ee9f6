"""What an SPMD plan trains, and this rank's part of it: its shards of the parameters, both passes,
gradients where they are held, and checkpoints.

A parameter is held as the operator that reads it wants it: whole, or a slice. One that operators
read in different ways (a tied embedding, sliced in one place and whole in another) is held whole,
and slices of its gradient are gathered. Gradients add up over the runs of an iteration; those of
whole parameters are all-reduced in the last one.

A plan's program comes from `--factory module:function`, which returns a torch module with data of
its own (`batch`), a `SingleProgram` or a `ProgramModel`; without it, it is the planner's own of the
plan's model.

Checkpoints hold parameters and optimizer states under the program's names, every rank's slices as
boxes of the whole: another program reads its own boxes from them.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from hetplan.errors import InputError, UnsupportedError, require
from hetplan.formulations.hap.spmd.networks import program_of
from hetplan.formulations.hap.spmd.program import PLACEHOLDER, Node, SingleProgram
from hetplan.plans.making import check_world, model_of
from hetplan.plans.plan import Plan
from hetplan.plans.refusals import check_own_layers
from hetplan.runtime.engine.chain import check_names
from hetplan.runtime.engine.data import Reading, check_alike, drawing_data
from hetplan.runtime.engine.loop import Box, Trained
from hetplan.runtime.engine.transport import Staging, Transport, host_group, host_total
from hetplan.runtime.events import Watch
from hetplan.runtime.launch.rehearsal import Virtual
from hetplan.runtime.replay import read_program
from hetplan.runtime.spmd.machine import Machine, copied, piece
from hetplan.runtime.tracing.program import trace_samples

# a tensor does as well
Array = NDArray[Any]
Batch = Callable[[int, int, int], Mapping[str, Array]]
Initial = Callable[[str, tuple[int, ...]], Array]


@dataclass(frozen=True)
class ProgramModel:
    """program: of one run of the plan (its micro-batch). batch: (step, first, last) -> placeholder
    -> these rows of the global batch. initial: (name, shape) -> a parameter's first values,
    unsplit. Left out: synthetic ones."""

    program: SingleProgram
    batch: Batch | None = None
    initial: Initial | None = None


def samples_of(plan: Plan) -> int:
    """Samples of one run of the program."""
    sizes = {batch.samples for batch in plan.replicas[0].micro_batches}
    require(
        len(sizes) == 1,
        "runs of an SPMD program are of different sizes",
        where=plan.name,
        got=sorted(sizes),
        expected="equal ones",
    )
    return sizes.pop()


def planned_program(plan: Plan, model: str | None) -> SingleProgram:
    """The program of a model's name or config.json (default the plan's), for one run. Raises
    UnsupportedError."""
    made = model_of(plan, model)
    check_own_layers(plan, made)
    check_names([layer.name for layer in made.layers], plan.workload.layers, plan.name)
    return program_of(made, samples_of(plan))


def check_samples(program: SingleProgram, plan: Plan) -> None:
    """Raise InputError unless the program's data are of one run."""
    if program.samples != samples_of(plan):
        node = placeholders(program)[0]
        raise InputError(
            f"program is not for the plan's runs: {node.name}", where=plan.name,
            got=f"shape {node.shape}", expected=f"{samples_of(plan)} samples",
        )  # fmt: skip


def placeholders(program: SingleProgram) -> list[Node]:
    """The data."""
    return [node for node in program.nodes if node.kind == PLACEHOLDER]


def synthetic_batch(program: SingleProgram, seed: int) -> Batch:
    """Rows that follow from seed, step and number alone: tokens that can be learnt, or drawn
    values.

    A text is an arithmetic sequence modulo the vocabulary, its labels the next tokens.
    """
    nodes = {node.name: node for node in placeholders(program)}
    texts = nodes.keys() == {"tokens", "labels"} and nodes["tokens"].shape == nodes["labels"].shape

    def row(step: int, number: int) -> dict[str, Array]:
        draw = np.random.default_rng((seed, step, number))
        if texts:
            below, length = nodes["tokens"].attributes["below"], nodes["tokens"].shape[1]
            text = (draw.integers(below) + np.arange(length + 1) * draw.integers(1, 4)) % below
            return {"tokens": text[:-1], "labels": text[1:]}
        return {
            name: draw.integers(node.attributes["below"], size=node.shape[1:])
            if "below" in node.attributes
            else draw.standard_normal(node.shape[1:])
            for name, node in nodes.items()
        }

    def batch(step: int, first: int, last: int) -> Mapping[str, Array]:
        rows = [row(step, number) for number in range(first, last)]
        return {name: np.stack([r[name] for r in rows]) for name in nodes}

    return batch


def synthetic_initial(seed: int) -> Initial:
    """First values from seed and name: norms' scales 1, shifts and biases 0, others normal by their
    inputs."""

    def initial(name: str, shape: tuple[int, ...]) -> Array:
        last = name.rpartition(".")[2]
        if last in ("scale", "shift", "bias"):
            return np.full(shape, float(last == "scale"))
        draw = np.random.default_rng((seed, zlib.crc32(name.encode())))
        return np.asarray(draw.standard_normal(shape) / np.sqrt(max(1, int(np.prod(shape[1:])))))

    return initial


# (first, last) row -> placeholder -> values, as arrays or tensors
Data = Callable[[int, int], Mapping[str, Array]]


class DistributedProgram(Trained):
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
        self.parameters: dict[str, nn.Parameter] = {}
        for name, shard in self.shards.items():
            whole = self.tensor(first(name, shard.shape))
            require(
                tuple(whole.shape) == shard.shape,
                "first values of a parameter",
                where=name,
                got=tuple(whole.shape),
                expected=f"{shard.shape}",
            )
            if shard.dimension is not None:
                whole = piece(whole, shard.dimension, shard.bounds[dist.get_rank()])
            self.parameters[name] = nn.Parameter(copied(whole))
        self.runs = plan.replicas[0].steps
        self.machine = Machine(
            decided,
            self.everyone,
            dist.get_rank(),
            self.parameters,
            runs=self.runs,
            watch=self.watch,
        )

    def tensor(self, value: Array) -> Tensor:
        """Values on this rank's device, real ones in torch's default precision."""
        here = torch.as_tensor(value, device=self.device)
        return here.to(torch.get_default_dtype()) if here.is_floating_point() else here

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
        mine: bool = False,
        scalars: bool = False,
    ) -> Iterator[Box]:
        """Slices, and whole parameters, for which ranks answer in turns."""
        rank, world = dist.get_rank(), dist.get_world_size()
        for number, (name, parameter) in enumerate(self.parameters.items()):
            shard, offsets = self.shards[name], [0] * len(self.shapes[name])
            if shard.dimension is not None:
                offsets[shard.dimension] = shard.bounds[rank][0]
            answers = shard.dimension is not None or number % world == rank
            held = parameter if values is None else values.get(id(parameter))
            if held is not None and parameter.numel() > 0 and (answers or not mine):
                yield Box(name, tuple(offsets), tuple(parameter.shape), shard.shape, held.detach())


def as_model(model: Any, plan: Plan) -> ProgramModel:
    """With data and first values. Raises InputError for what is no program and no module with data
    of its own, UnsupportedError for a module with operators that have no rule."""
    if isinstance(model, SingleProgram):
        return ProgramModel(model)
    if isinstance(model, nn.Module) and callable(getattr(model, "batch", None)):
        return traced_model(model, plan)
    if not isinstance(model, ProgramModel):
        raise InputError(
            "SPMD plans run single-device programs", got=type(model).__name__,
            expected="a SingleProgram, a ProgramModel, or a module with a method batch",
        )  # fmt: skip
    return model


def traced_model(module: Any, plan: Plan) -> ProgramModel:
    """A module for one run of the plan: its own data, its parameters' values as the first ones."""
    samples = samples_of(plan)
    with drawing_data(0, 0, 0):
        traced = trace_samples(module, samples, name=plan.workload.model)
        values = traced.values(module, module.batch(0, 0, samples))
    return ProgramModel(
        traced.program,
        lambda step, first, last: traced.data(module.batch(step, first, last)),
        lambda name, _: values[name],
    )


class RehearsedProgram:
    """Takes the place of `DistributedProgram` on virtual devices; nothing is trained, so that the
    loss is not a number."""

    def __init__(self, watch: Virtual) -> None:
        self.watch, self.step = watch, 0
        self.everyone = Transport.over("cpu").everyone

    def train_step(self) -> float:
        """One iteration in the devices' time; a real all-reduce of one number stands for every
        collective."""
        step = self.step
        self.step += 1
        order = sorted(self.watch.spans, key=lambda m: (m[1], m[0] == "collective"))
        with self.watch.during("prepare", 0, step):
            dist.barrier(group=host_group())
        for what, stage, run in order:
            with self.watch.during(what, stage, run):
                if what == "collective":
                    self.everyone.total(torch.ones(1))
        with self.watch.during("synchronise", 0, step):
            dist.barrier(group=host_group())
        return math.nan

    def optimizer(self, kind: Callable[..., Any], **options: Any) -> Any:
        """One of nothing."""
        return kind([nn.Parameter(torch.zeros(0))], **options)
