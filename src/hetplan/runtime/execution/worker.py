"""What one rank does: its part of the model, the steps, the checkpoints."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from hetplan.errors import HetplanError, InputError, UnsupportedError, kind_and_text
from hetplan.runtime.devices import local_device, peak_bytes, settle
from hetplan.runtime.execution.chain import describe
from hetplan.runtime.execution.distributed import COMPUTE, Distributed, example_of
from hetplan.runtime.execution.spmd.distributed import DistributedProgram, as_model
from hetplan.runtime.execution.spmd.model import ProgramModel, check_samples, planned_program
from hetplan.runtime.execution.spmd.rehearsed import RehearsedProgram
from hetplan.runtime.execution.transport import host_total
from hetplan.runtime.job import Job, Report, StepReport
from hetplan.runtime.plan import Plan
from hetplan.runtime.references.build import reference, stand_in
from hetplan.runtime.spmd_decision import read_program
from hetplan.runtime.spmd_virtual import SpmdRehearsal, SpmdWatch
from hetplan.runtime.virtual import Shared, Virtual
from hetplan.runtime.watch import WAITS, Event, Recorder

OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def make_model(
    job: Job, watch: Recorder, device: str = "cpu"
) -> Distributed | DistributedProgram | RehearsedProgram:
    """This rank's part of the job's model."""
    if isinstance(watch, SpmdWatch):
        return RehearsedProgram(watch)
    if job.plan.schedule == "spmd":
        return DistributedProgram(
            make_program(job), job.plan, device=device, seed=job.seed, watch=watch
        )
    precision = precision_of(job)
    return Distributed(
        make_module(job), job.plan, device=device, seed=job.seed, watch=watch, precision=precision
    )


def make_program(job: Job) -> ProgramModel:
    """The job's single-device program. Raises InputError for an unusable factory."""
    if job.factory is not None:
        return as_model(called(job.factory, job.plan))
    return ProgramModel(planned_program(job.plan, job.model))


def make_module(job: Job) -> nn.Module:
    """The job's model, on the meta device where it is hetplan's own. Raises InputError for an
    unusable factory."""
    plan = job.plan
    if job.factory is not None:
        return from_factory(job.factory, plan)
    with torch.device("meta"):
        if job.virtual:
            widest = max(
                len(stage.tensor_shares) for replica in plan.replicas for stage in replica.stages
            )
            return stand_in(plan.workload.layers, tensor=widest, seed=job.seed)
        return named(plan, job.model or plan.workload.model, job.seed)


def named(plan: Plan, model: str, seed: int) -> nn.Module:
    """The reference model of a name or a config.json."""
    from hetplan.profiling.models import load_model

    workload = plan.workload
    return reference(
        load_model(model, sequence=workload.sequence, precision=workload.precision), seed=seed
    )


def from_factory(text: str, plan: Plan | None) -> nn.Module:
    """The torch module that `module:function` makes of the plan; None: there is none yet, a model
    is described."""
    made = called(text, plan)
    if not isinstance(made, nn.Module):
        raise InputError(
            "--factory made something else", got=type(made).__name__, expected="a torch.nn.Module"
        )
    return made


def called(text: str, plan: Plan | None) -> Any:
    """What `module:function` makes of the plan. Raises InputError for whatever its author's code
    raises."""
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise InputError("--factory is not usable", got=text, expected="MODULE:FUNCTION")
    try:
        function: Any = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:
        raise InputError(
            f"--factory cannot be imported: {kind_and_text(error)}", got=text
        ) from error
    try:
        return function(plan)
    except HetplanError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"--factory raises {kind_and_text(error)}", got=text) from error


def check_job(job: Job) -> None:
    """Everything that can be wrong with plan and model, before a process starts. Raises
    InputError."""
    check_folder(job)
    if job.plan.schedule == "spmd":
        check_program(job)
        return
    module = make_module(job)
    describe(module, job.plan.workload.layers, *example_of(module), COMPUTE[precision_of(job)])


def precision_of(job: Job) -> Literal["fp32", "bf16", "fp16"]:
    """Of the passes: the plan's for reference models; a user's own model and a stand-in choose
    theirs."""
    return "fp32" if job.virtual or job.factory is not None else job.plan.workload.precision


def check_folder(job: Job) -> None:
    """Raise InputError where a run from the beginning would mix its checkpoints with another run's,
    and where one that goes on would not be the run that it goes on with."""
    from hetplan.runtime.execution.checkpoint import check_same, check_writable, complete

    if job.checkpoint is None:
        return
    check_writable(job.checkpoint)
    if job.resume:
        check_same(job.checkpoint, optimizer=job.optimizer, seed=job.seed)
    elif checkpoints := complete(job.checkpoint):
        raise InputError(
            "folder holds checkpoints", where=job.checkpoint, got=checkpoints[-1].name,
            expected="an empty one, or --resume to go on from the latest",
        )  # fmt: skip


def check_program(job: Job) -> None:
    """The same of an SPMD plan; a rehearsal's costs have read its program already."""
    if not job.virtual:
        if job.factory is None and job.plan.workload.precision != "fp32":
            raise UnsupportedError(
                "SPMD programs are computed in fp32",
                where=job.plan.name,
                got=job.plan.workload.precision,
                expected="--virtual, a plan for fp32, or --factory with a program",
            )
        program = make_program(job).program
        check_samples(program, job.plan)
        read_program(job.plan, program)
    elif job.checkpoint is not None:
        raise InputError(
            "rehearsals of SPMD programs train nothing", where=job.plan.name, got="--checkpoint",
            expected="no checkpoint, or no --virtual",
        )  # fmt: skip


def recorder(job: Job, rank: int, shared: Shared | None) -> Recorder:
    """What watches this rank: with virtual devices, what sleeps for them, too."""
    if shared is None:
        return Recorder()
    if isinstance(shared.rehearsal, SpmdRehearsal):
        return SpmdWatch(shared=shared, rank=rank)
    place = job.plan.places[rank]
    ranks: dict[tuple[int, int], list[int]] = {}
    for other in job.plan.places:
        ranks.setdefault((other.replica, other.stage), []).append(other.rank)
    return Virtual(
        shared=shared, rank=rank, replica=place.replica, stage=place.stage, stage_ranks=ranks
    )


def train(job: Job, watch: Recorder, report: Report, stopping: Callable[[], bool]) -> None:
    """All steps on this rank, inside a process group; `stopping` asks whether to end behind a
    step."""
    from hetplan.runtime.execution.checkpoint import load, save

    device = local_device(job.device)
    if device != "cpu":
        watch.settle = lambda: settle(device)
    model = make_model(job, watch, device)
    optimizer = model.optimizer(OPTIMIZERS[job.optimizer], lr=job.learning_rate)
    if job.resume and job.checkpoint is not None and not isinstance(model, RehearsedProgram):
        load(model, optimizer, job.checkpoint)
    first = model.step
    for step in range(first, first + job.steps):
        watch.take()
        loss = model.train_step()
        passed = watch.take()
        watch.begins("optimizer", 0, step)
        optimizer.step()
        optimizer.zero_grad()
        watch.ends("optimizer", 0, step)
        done = passed if job.virtual else [*passed, *watch.take()]
        keep = step == first + job.steps - 1
        report(step_report(step, loss, done, peak_bytes(device), keep=keep))
        stop = agreed(stopping())
        due = job.every is not None and (step + 1) % job.every == 0
        due = due or stop or step == first + job.steps - 1
        if job.checkpoint is not None and due and not isinstance(model, RehearsedProgram):
            watch.begins("checkpoint", 0, step)
            save(model, optimizer, job.checkpoint)
            watch.ends("checkpoint", 0, step)
        if stop:
            return


def agreed(wish: bool) -> bool:
    """Whether any rank wishes to stop: the same answer everywhere."""
    return host_total(float(wish)) > 0


def step_report(
    step: int, loss: float, events: list[Event], peak: int, *, keep: bool
) -> StepReport:
    """A step's times from its events; it begins behind the preparation, where all ranks have
    met."""
    forward, backward = (
        float(sum(e.end - e.start for e in events if e.what == what))
        for what in ("forward", "backward")
    )
    waits = sum(e.end - e.start for e in events if e.what in WAITS and e.what != "prepare")
    kept = [(e.what, e.chunk, e.batch, e.start, e.end) for e in events] if keep else []
    begin = next(e.end for e in events if e.what == "prepare")
    return StepReport(step, loss, begin, events[-1].end, forward, backward, waits, peak, kept)
