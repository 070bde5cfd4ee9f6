"""The model that an SPMD plan trains: a single-device program with data and first values.

With `--factory module:function`, the function returns a `SingleProgram`, a `ProgramModel`, or a
torch module with a method `batch`. Without it, the program is hetplan's own for the plan's model.
"""

import os
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hetplan.errors import InputError, UnsupportedError, require
from hetplan.plans.making import model_of
from hetplan.plans.plan import Plan
from hetplan.plans.refusals import check_own_program
from hetplan.programs.networks import program_of
from hetplan.programs.program import PLACEHOLDER, Node, SingleProgram
from hetplan.programs.proofs import read_program
from hetplan.runtime.engine.chain import check_names
from hetplan.runtime.engine.data import drawing_data
from hetplan.runtime.engine.distributed import example_of
from hetplan.runtime.engine.models import called
from hetplan.runtime.engine.probe import check_layers, in_a_fork
from hetplan.runtime.job import Job
from hetplan.runtime.spmd.runs import check_runs
from hetplan.runtime.tracing.layers import requested
from hetplan.runtime.tracing.program import trace_samples

Array = NDArray[Any]  # or a torch tensor
# (step, first, last) -> {placeholder: values} of the rows [first, last) of the global batch
Batch = Callable[[int, int, int], Mapping[str, Array]]
# (name, shape) of a parameter -> its first values, unsplit
Initial = Callable[[str, tuple[int, ...]], Array]


@dataclass(frozen=True)
class ProgramModel:
    """A single-device program with its data and first values."""

    program: SingleProgram
    """The program of one run, which computes one micro-batch of the plan."""
    batch: Batch | None = None
    """None: synthetic data."""
    initial: Initial | None = None
    """None: random values, see `synthetic_initial`."""


def samples_of(plan: Plan) -> int:
    """Number of samples in one run of the program; all runs have as many."""
    return plan.replicas[0].micro_batches[0].samples


def planned_program(plan: Plan, model: str | None) -> SingleProgram:
    """hetplan's own program of a model, for one run.

    model: a name or the path of a config.json; None: the plan's model. Raises UnsupportedError for
    a program that hetplan does not compute, InputError where the model does not match the plan.
    """
    described = model_of(plan, model)
    check_own_program(plan)
    check_names([layer.name for layer in described.layers], plan.workload.layers, plan.name)
    return program_of(described, samples_of(plan))


def check_samples(program: SingleProgram, plan: Plan) -> None:
    """Raise InputError unless the program is for as many samples as a run of the plan has."""
    if program.samples != samples_of(plan):
        node = placeholders(program)[0]
        raise InputError(
            f"program is not for the plan's runs: {node.name}", where=plan.name,
            got=f"shape {node.shape}", expected=f"{samples_of(plan)} samples",
        )  # fmt: skip


def placeholders(program: SingleProgram) -> list[Node]:
    """The nodes of a program that are data."""
    return [node for node in program.nodes if node.kind == PLACEHOLDER]


def synthetic_batch(program: SingleProgram, seed: int) -> Batch:
    """The synthetic data of a program. A row follows from seed, step and the row's number.

    A program with tokens and labels gets texts that can be learnt: a text is an arithmetic sequence
    modulo the vocabulary, and its labels are the next tokens. Any other program gets random values.
    """
    nodes = {node.name: node for node in placeholders(program)}
    reads_texts = False
    if nodes.keys() == {"tokens", "labels"}:
        reads_texts = nodes["tokens"].shape == nodes["labels"].shape

    def row(step: int, number: int) -> dict[str, Array]:
        random = np.random.default_rng((seed, step, number))
        if reads_texts:
            vocabulary = nodes["tokens"].attributes["below"]
            length = nodes["tokens"].shape[1]
            first_token = random.integers(vocabulary)
            increment = random.integers(1, 4)
            text = (first_token + np.arange(length + 1) * increment) % vocabulary
            return {"tokens": text[:-1], "labels": text[1:]}
        values: dict[str, Array] = {}
        for name, node in nodes.items():
            if "below" in node.attributes:
                values[name] = random.integers(node.attributes["below"], size=node.shape[1:])
            else:
                values[name] = random.standard_normal(node.shape[1:])
        return values

    def batch(step: int, first: int, last: int) -> Mapping[str, Array]:
        rows = [row(step, number) for number in range(first, last)]
        return {name: np.stack([r[name] for r in rows]) for name in nodes}

    return batch


def synthetic_initial(seed: int) -> Initial:
    """The first values of parameters, which follow from the seed and a parameter's name: 1 for the
    scale of a norm, 0 for shifts and biases, and normal values with variance 1 / inputs for all
    others."""

    def initial(name: str, shape: tuple[int, ...]) -> Array:
        last = name.rpartition(".")[2]
        if last in ("scale", "shift", "bias"):
            return np.full(shape, float(last == "scale"))
        random = np.random.default_rng((seed, zlib.crc32(name.encode())))
        inputs = max(1, int(np.prod(shape[1:])))
        return np.asarray(random.standard_normal(shape) / np.sqrt(inputs))

    return initial


def as_model(model: Any, plan: Plan) -> ProgramModel:
    """A `SingleProgram`, a `ProgramModel` or a torch module with a method `batch` as a
    `ProgramModel`.

    Raises InputError for any other object, UnsupportedError for a module with operators that have
    no rule.
    """
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
    """A module as the program of one run of the plan. The data are those of the module's `batch`,
    and the first values are those of the module's parameters."""
    samples = samples_of(plan)
    with drawing_data(0, 0, 0):
        traced = trace_samples(module, samples, name=plan.workload.model)
        values = traced.values(module, requested(module.batch, 0, 0, samples))
    return ProgramModel(
        traced.program,
        lambda step, first, last: traced.data(requested(module.batch, step, first, last)),
        lambda name, _: values[name],
    )


def make_program(job: Job) -> ProgramModel:
    """The job's single-device program. Raises InputError for an unusable factory."""
    return as_model(factory_result(job), job.plan)


def factory_result(job: Job) -> Any:
    """The result of the job's factory; without a factory, hetplan's own program of the model."""
    if job.factory is None:
        return planned_program(job.plan, job.model)
    return called(job.factory, job.plan, seed=job.seed)


def check_training(model: Any, plan: Plan, wanted: bool | None) -> str | None:
    """Raise UnsupportedError where a plan would train a torch module otherwise than one process
    does. Returns a note where nothing was compared, else None: a program is all that there is of
    its model, and has nothing to be compared with.

    wanted: see `engine.probe.check_probe`.
    """
    if not isinstance(model, nn.Module):
        return None
    note = check_layers(model, plan.workload.layers, example_of(model), wanted)
    if plan.replicas[0].steps > 1:
        # the same note where nothing is compared
        note = check_runs(model, plan.workload.global_batch, wanted) or note
    return note


def check_program(job: Job) -> None:
    """Raise InputError where the job's program does not match its plan, or an option of the job has
    no meaning for programs; UnsupportedError for --save, and where the plan would train a module
    otherwise than one process does. The program of a rehearsal is not read: the prediction of its
    times has read it."""
    require(job.data is None, "SPMD programs take their data from --factory", got="--data")
    if not job.virtual:
        model = factory_result(job)
        program = as_model(model, job.plan).program
        check_samples(program, job.plan)
        read_program(job.plan, program)
        # under torchrun one rank compares for all
        if os.environ.get("RANK", "0") == "0":
            note = in_a_fork(lambda: check_training(model, job.plan, job.probe))
            if note is not None:
                print(f"hetplan: {note}", file=sys.stderr, flush=True)
    elif job.checkpoint is not None:
        raise InputError(
            "rehearsals of SPMD programs train nothing", where=job.plan.name, got="--checkpoint",
            expected="no checkpoint, or no --virtual",
        )  # fmt: skip
    require(
        job.save is None,
        "SPMD programs are not gathered",
        where=job.plan.name,
        got="--save",
        expected="--checkpoint, or a plan of another strategy",
        kind=UnsupportedError,
    )
