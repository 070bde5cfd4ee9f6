"""`hetplan run`: a plan executed with local ranks, on this machine or on the plan's devices
rehearsed on it.

`hetplan launch`: one file to a running job. It plans, then trains here, or writes what a launcher
takes, and submits it. The keys of a job file are the options of `hetplan plan` and `hetplan run`,
underscores for hyphens.
"""

import functools
import inspect
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from pydantic import Field, create_model

from hetplan.adapters.exports.launchers.kinds import KINDS, LAUNCHERS
from hetplan.adapters.exports.launchers.start import Start
from hetplan.adapters.exports.scripts import torchrun
from hetplan.cli.commands import with_groups_as_options
from hetplan.cli.help_page import described
from hetplan.cli.options import (
    JsonOption,
    PlanArgument,
    QuietOption,
    StrategiesOption,
    number,
    target,
)
from hetplan.cli.output import emit, note, write_document
from hetplan.cli.plan import plan
from hetplan.cli.setting import Setting
from hetplan.errors import InputError, require
from hetplan.files import read_yaml, write_text
from hetplan.interpreter import own_command
from hetplan.plans.plan import Plan, load_plan, save_plan
from hetplan.runtime.execution.choice import engine_of
from hetplan.runtime.job import Job, Loss, StepReport, check_options
from hetplan.runtime.launch.devices import on_devices
from hetplan.runtime.launch.local import Again, launch as launch_ranks, launch_elastic
from hetplan.runtime.launch.rehearsal import Rehearsal
from hetplan.runtime.launch.torchrun import is_rank, serve
from hetplan.runtime.measured import Measured
from hetplan.schema import StrictModel, check_header, check_plain, parse
from hetplan.text import counted, number_text

Predict = Callable[[Plan, Path], Rehearsal | None]


@dataclass(frozen=True, kw_only=True)
class Training:
    """The iterations, and who computes them."""

    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Iterations to run.")] = 10
    factory: Annotated[
        str | None,
        typer.Option(
            "--factory",
            metavar="MODULE:FUNCTION",
            help="Function that makes your model from the plan; default the built-in model.",
        ),
    ] = None
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="MODULE:FUNCTION",
            help="Function that makes batch(step, first, last) from the plan; default the model's.",
        ),
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option("--device", help="What ranks compute on; auto: GPUs where there are any."),
    ] = "auto"
    backend: Annotated[
        Literal["hetplan", "torch"],
        typer.Option(
            "--backend", help="Whose engine; torch: DDP, FSDP2, pipelining, for plans they can say."
        ),
    ] = "hetplan"
    optimizer: Annotated[
        Literal["sgd", "adamw"], typer.Option("--optimizer", help="The optimizer.")
    ] = "adamw"
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", metavar="X", help="Learning rate of the optimizer.")
    ] = 1e-3
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Seed of weights, data and dropout.")
    ] = 0
    hang_seconds: Annotated[
        float,
        typer.Option(
            "--hang-after", metavar="SECONDS", help="A rank without progress counts as hung."
        ),
    ] = 10.0

    def check(self, *, virtual: bool, time_scale: float | None) -> None:
        """Raise InputError for options that do not go together."""
        require(virtual or time_scale is None, "--time-scale is for --virtual devices")
        require(
            not (virtual and self.backend == "torch"),
            "--virtual devices are for hetplan's own engine",
            got="--backend torch",
        )


def predicted(
    plan: Plan,
    where: Path,
    setting: Setting,
    *,
    virtual: bool,
    scale: float | None,
    required: bool,
    quiet: bool,
) -> Rehearsal | None:
    """The plan's predicted times; None where they are not needed and what the plan names is not
    known. where: the plan's file. scale: seconds here per second there."""
    if not virtual and not setting.known(plan):
        return None
    try:
        workload, engine = setting.workload(plan, where, quiet=quiet), engine_of(plan)
        scaled = scale if virtual else 1.0
        return Rehearsal.of(plan, workload, engine, scaled, cores=free_cores())
    except InputError as error:
        if required or setting != Setting():
            raise
        # a model of the user's own under names that are known: the run needs no prediction
        if not quiet:
            note(f"no prediction: {error}")
        return None


def free_cores() -> float:
    """Of this process's cores, the part that it gets beside what else keeps them busy."""
    cores = len(os.sched_getaffinity(0))
    return cores * cores / (cores + os.getloadavg()[0])


def note_loss(loss: Loss) -> None:
    """What happened, for people."""
    note(
        f"{loss.error}; going on from step {loss.step} with {loss.plan}, {loss.seconds:.1f} s later"
    )


@dataclass(frozen=True, kw_only=True)
class Survival:
    """Checkpoints, and what happens when a rank is lost."""

    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="FOLDER", help="Write checkpoints there.")
    ] = None
    every: Annotated[
        int | None,
        typer.Option("--every", metavar="N", help="Steps between checkpoints; default at the end."),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the folder's latest checkpoint.")
    ] = False
    save: Annotated[
        str | None,
        typer.Option(
            "--save",
            metavar="FOLDER",
            help="Write the trained module there (save_pretrained).",
        ),
    ] = None
    elastic: Annotated[
        bool,
        typer.Option("--elastic", help="Replan without the node of a lost rank, and go on."),
    ] = False
    strategies: StrategiesOption = None
    replan_seconds: Annotated[
        float | None,
        number(
            "--replan-seconds",
            least=1e-9,
            most=1e9,
            metavar="SECONDS",
            help="Time limit of each replanning.",
        ),
    ] = None

    def check(self) -> None:
        """Raise InputError for options that do not go together."""
        require(
            not (self.elastic and is_rank()),
            "--elastic is for local ranks; torchrun has --max-restarts",
        )
        require(
            not self.elastic or None not in (self.checkpoint, self.every),
            "--elastic needs --checkpoint with a folder and --every with a number of steps",
        )
        require(
            self.elastic or (self.strategies is None and self.replan_seconds is None),
            "--strategies and --replan-seconds are for --elastic",
        )

    def replanner(
        self, job: Job, plan: Path, predict: Predict, setting: Setting, *, quiet: bool
    ) -> Again:
        """What plans again without lost nodes, by a process of its own: solvers leave threads
        behind, and ranks are forked. plan: the file of what runs now. Raises InputError where the
        cluster is not known."""
        require(
            job.rehearsal,
            "--elastic needs the plan's cluster",
            where=job.plan.name,
            got=job.plan.workload.cluster,
            expected="--cluster with its file",
        )
        values = {
            "--cluster": setting.cluster,
            "--model": setting.model,
            "--profile": setting.profile,
            "--time-limit": self.replan_seconds,
            "--strategies": None if self.strategies is None else ",".join(self.strategies),
        }
        pairs = [(name, str(value)) for name, value in values.items() if value is not None]
        files, folder = [plan], Path(self.checkpoint or "")

        def again(job: Job, lost: tuple[int, ...]) -> Job | None:
            nodes = [f"node{n}" for n in sorted(lost)]
            if not quiet:
                note(f"lost {', '.join(nodes)}: planning without")
            folder.mkdir(parents=True, exist_ok=True)
            target = folder / f"plan-without-{'-'.join(nodes)}.json"
            program = own_command("plan", "replan", str(files[-1]))
            words = ["--lost", ",".join(nodes), "--output", str(target), "--json", "--quiet"]
            done = subprocess.run(
                [*program, *words, *[word for pair in pairs for word in pair]],
                stdout=subprocess.DEVNULL,
                check=False,
            )
            if done.returncode != 0:
                return None
            files.append(target)
            made = load_plan(target)
            return replace(job, plan=made, rehearsal=predict(made, target))

        return again


@described(
    sections={
        "Training": "--steps --factory --data --optimizer --learning-rate --seed",
        "Ranks": "--device --backend --hang-after",
        "Checkpoints": "--checkpoint --every --resume --save",
        "Replanning when a rank is lost": "--elastic --strategies --replan-seconds",
        "Prediction": "--cluster --model --profile",
        "Rehearsal without the plan's devices": "--virtual --time-scale",
        "Output": "--trace --json --quiet --help",
    },
    examples=(
        (
            "Ten iterations of the plan's own model on this machine",
            "hetplan run plan.json",
        ),
        (
            "The plan's GPUs rehearsed on processor cores, with a trace for Perfetto",
            "hetplan run plan.json --virtual --steps 3 --trace trace.json",
        ),
        (
            "Your own model and data, with a checkpoint every 100 steps",
            "hetplan run plan.json --factory mine:model --data mine:batch "
            "--checkpoint kept --every 100 --steps 1000",
        ),
    ),
)
def run(
    plan: PlanArgument,
    training: Training,
    survival: Survival,
    setting: Setting,
    virtual: Annotated[
        bool,
        typer.Option(
            "--virtual", help="Rehearse the plan's devices: narrow layers, predicted times."
        ),
    ] = False,
    time_scale: Annotated[
        float | None,
        typer.Option(
            "--time-scale",
            metavar="X",
            help="Seconds here per second there; default about 1 s per iteration.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        target("--trace", metavar="FILE", help="Write the last iteration for Perfetto (JSON)."),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Execute a plan with one process per device, and tell measured times beside predicted ones.
    Under torchrun this process is one of them. Exit code 1 when a rank died, failed or hung; the
    error names it and its place in the plan.
    """
    survival.check()
    check_options(
        training.steps, training.learning_rate, training.hang_seconds, survival.checkpoint,
        survival.every, resume=survival.resume, time_scale=time_scale,
    )  # fmt: skip
    training.check(virtual=virtual, time_scale=time_scale)
    loaded = load_plan(plan)
    predict = functools.partial(
        predicted,
        setting=setting,
        virtual=virtual,
        scale=time_scale,
        required=virtual or survival.elastic,
        quiet=quiet or is_rank(),
    )
    asked = Job(
        plan=loaded,
        rehearsal=predict(loaded, plan),
        checkpoint=survival.checkpoint,
        every=survival.every,
        resume=survival.resume,
        save=survival.save,
        model=setting.model,
        virtual=virtual,
        **vars(training),
    )
    job = asked if is_rank() else on_devices(asked)
    cores = len(os.sched_getaffinity(0)) if job.device == "cpu" else loaded.world_size
    if loaded.world_size > 2 * cores and not (quiet or virtual or is_rank()):
        note(f"{loaded.world_size} ranks share {counted(cores, 'core')} and take turns")

    trains = not virtual or engine_of(loaded, training.backend).trains_rehearsals

    def tell(report: StepReport) -> None:
        if not quiet:
            loss = f": loss {number_text(report.loss)}" if trains else ""
            note(f"step {report.step}{loss}")

    if is_rank():
        measured = serve(job)
    elif survival.elastic:
        again = survival.replanner(job, plan, predict, setting, quiet=quiet)
        measured = launch_elastic(job, again, tell, None if quiet else note_loss)
    else:
        measured = Measured(job, launch_ranks(job, tell))
    if measured is None:  # another rank tells
        return 0
    if trace is not None:
        write_document(trace, measured.trace())
    return emit(measured.document(), [measured.table()], json=json)


# Arguments, options that `hetplan launch` gives itself, and those of what is printed only.
LEFT_OUT = ("Ellipsis", "all", "json", "measure", "output", "run", "trace")


def keys(command: Callable[..., int]) -> dict[str, tuple[Any, Any]]:
    """Key of a job file -> type and default (... where it must be given) of a command's option."""
    return {
        name: (
            str | None if Path in get_args(kind) else kind,
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in inspect.signature(with_groups_as_options(command)).parameters.values()
        for kind, option in [get_args(parameter.annotation)[:2]]
        # typer takes the name for a default where a type is annotated
        if (name := str(option.default).removeprefix("--").replace("-", "_")) not in LEFT_OUT
    }


PLAN, RUN = keys(plan), keys(run)
FIELDS: dict[str, Any] = {
    "format": (Literal["hetplan-job"], "hetplan-job"),
    "version": (Literal[1], 1),
    "launcher": (Annotated[KINDS, Field(discriminator="kind")], ...),
}
JobFile = create_model("JobFile", __base__=StrictModel, **{**RUN, **PLAN, **FIELDS})


def options(given: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """What a job file gives of a command's options, as its arguments."""
    words = []
    for key, values in given.items():
        if key not in known:
            continue
        name = f"--{key.replace('_', '-')}"
        for value in values if isinstance(values, list) else [values]:
            if value is True:
                words.append(name)
            elif value is not None and value is not False:
                words += [name, str(value)]
    return words


def launch(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job file (YAML).")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Folder for the plan and the files; default JOB-launch beside the job file.",
        ),
    ] = None,
    planned: Annotated[
        Path | None,
        typer.Option("--plan", metavar="PLAN", help="Launch this plan, and plan nothing."),
    ] = None,
    submit: Annotated[
        bool, typer.Option("--submit", help="Hand the files to the launcher's command.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands, and do nothing.")
    ] = False,
) -> int:
    """Plan the training that a job file describes; train here, or write what ssh, Slurm, Kubernetes
    or Ray takes to start every rank on its node."""
    value, where = read_yaml(job), str(job)
    check_header(value, "hetplan-job", 1, where=where)
    check_plain(value, where)
    asked: Any = parse(JobFile, value, where=where)
    given, launcher = asked.model_dump(exclude_unset=True), asked.launcher
    program, command, files_of, _ = LAUNCHERS[launcher.kind]
    folder = os.path.relpath(output or job.with_name(f"{job.stem}-launch"))
    local = launcher.kind == "local"
    # with a model's file the factory is for the run alone
    planning = options(given, PLAN.keys() - ({"factory"} if asked.model else set()))
    first = ["plan", *planning, "--output", f"{folder}/plan.json"]
    # strategies are for planning; the files of a prediction are on this machine alone
    words = options(given, RUN.keys() - {"strategies", *(() if local else ("cluster", "profile"))})
    last = [*(word.format(folder) for word in command.split()), *(words if local else ())]
    if dry_run:
        print(*([] if planned else [shlex.join(["hetplan", *first])]), shlex.join(last), sep="\n")
        return 0
    require(local or not submit or shutil.which(program), f"{program} is not installed here")
    os.makedirs(folder, exist_ok=True)
    if planned is not None:
        save_plan(load_plan(planned), Path(folder, "plan.json"))
    elif code := subprocess.run(own_command(*first), check=False).returncode:
        return code
    if local:
        return subprocess.run(
            own_command(*last[1:]), env=os.environ | launcher.env, check=False
        ).returncode
    made = load_plan(Path(folder, "plan.json"))
    require(made.refused is None or asked.factory is not None, f"{made.refused}", where=where)
    start = Start(
        plan=made,
        launcher=launcher,
        name=re.sub("[^a-z0-9]+", "-", f"hetplan-{job.stem}".lower())[:40].strip("-"),
        root=os.getcwd(),
        folder=folder,
        words=words,
        gpus=asked.device != "cpu",
    )
    texts = {"node.sh": torchrun(made, variables=launcher.env), **files_of(start)}
    for file, text in texts.items():
        write_text(Path(folder, file), text)
    print(f"written to {folder}: plan.json, {', '.join(texts)}", shlex.join(last), sep="\n")
    return subprocess.run(last, check=False).returncode if submit else 0
