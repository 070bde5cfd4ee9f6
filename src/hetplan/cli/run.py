"""`hetplan run` executes a plan with ranks on this machine, on its devices or as a rehearsal of the
plan's devices.

`hetplan launch` turns a job file into a running job. It plans, then it trains here, or it writes
the files of a launcher and submits them. The keys of a job file are the options of `hetplan plan`
and `hetplan run`, with underscores for hyphens.
"""

import contextlib
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

from hetplan.adapters.exports.launchers.kinds import LAUNCHERS, LauncherSection
from hetplan.adapters.exports.launchers.start import Start
from hetplan.adapters.exports.scripts import torchrun
from hetplan.cli.commands import with_groups_as_options
from hetplan.cli.help_page import described
from hetplan.cli.options import (
    JsonOption,
    PlanArgument,
    ProbeOption,
    QuietOption,
    StrategiesOption,
    number,
    open_cluster,
    target,
    usable_folder,
)
from hetplan.cli.output import emit, note, write_document
from hetplan.cli.plan import named_strategies, plan
from hetplan.cli.profile import named
from hetplan.cli.setting import Setting, require_inputs
from hetplan.errors import InputError, require
from hetplan.files import check_utf8, make_folder, read_yaml, try_folder, write_text
from hetplan.interpreter import own_command
from hetplan.plans.packed import packed_plan
from hetplan.plans.plan import Plan, load_plan, save_plan
from hetplan.profiling.models.model import find_model
from hetplan.runtime.execution.choice import engine_of
from hetplan.runtime.job import Job, NodeLoss, StepReport, check_options
from hetplan.runtime.launch.devices import on_devices
from hetplan.runtime.launch.local import Again, launch as launch_ranks, launch_elastic
from hetplan.runtime.launch.rehearsal import Rehearsal
from hetplan.runtime.launch.torchrun import is_rank, serve
from hetplan.runtime.measured import Measured
from hetplan.schema import StrictModel, check_header, check_plain, parse
from hetplan.text import counted, number_text

# Returns the predicted times of a plan and its file, see `predicted`.
Predict = Callable[[Plan, Path], Rehearsal | None]


@dataclass(frozen=True, kw_only=True)
class Training:
    """The options of the training: its iterations, its model and data, and the engine that
    computes."""

    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Iterations to run.")] = 10
    factory: Annotated[
        str | None,
        typer.Option(
            "--factory",
            metavar="MODULE:FUNCTION",
            help="Function that makes your model from the plan; default the built-in model.",
        ),
    ] = None
    probe: ProbeOption = None
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="MODULE:FUNCTION",
            help="Function that makes batch(step, first, last) from the plan; default the model's.",
        ),
    ] = None
    pack: Annotated[
        bool,
        typer.Option(
            "--pack", help="Pack the module's sample(number), of any lengths, into the plan's rows."
        ),
    ] = False
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
        own_module = self.factory is not None and self.backend == "hetplan" and not virtual
        require(
            own_module or not self.pack,
            "--pack is for a module of --factory on hetplan's own engine",
        )
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
    quiet: bool = False,
) -> Rehearsal | None:
    """The plan's predicted times; None where the run does not need them and they cannot be
    predicted.

    where: the plan's file. virtual: whether the run rehearses the plan's devices. scale: seconds of
    the rehearsal per second of the plan's devices; None: chosen by the rehearsal. required: whether
    the run needs the predicted times. quiet: write no note.
    """
    if not virtual and not setting.cluster_is_known(plan):
        return None
    try:
        workload = setting.workload(plan, where, quiet=quiet)
        engine = engine_of(plan)
        # A run on real devices is compared with the predicted seconds as they are.
        rehearsal_scale = scale if virtual else 1.0
        return Rehearsal.of(plan, workload, engine, rehearsal_scale, cores=free_cores())
    except InputError as error:
        if required or setting != Setting():  # the user gives options of the prediction
            raise
        # The user may run a model of their own under a built-in name: that run needs no prediction.
        if not quiet:
            note(f"no prediction: {error}")
        return None


def free_cores() -> float:
    """The number of cores that this process can expect to get, when it shares its cores with the
    machine's present load.

    As many threads as cores compete here with the load's threads, and each gets an equal share.
    """
    cores = len(os.sched_getaffinity(0))
    load, _, _ = os.getloadavg()  # of the last minute
    share = cores / (cores + load)
    return cores * share


def note_loss(loss: NodeLoss) -> None:
    """Print a note about a lost rank and the plan with which the training continues."""
    note(
        f"{loss.error}; going on from step {loss.step} with {loss.plan}, {loss.seconds:.1f} s later"
    )


@dataclass(frozen=True, kw_only=True)
class Survival:
    """The options of checkpoints, and of the replanning after the loss of a rank."""

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
            not self.elastic or (self.checkpoint is not None and self.every is not None),
            "--elastic needs --checkpoint with a folder and --every with a number of steps",
        )
        require(
            self.elastic or (self.strategies is None and self.replan_seconds is None),
            "--strategies and --replan-seconds are for --elastic",
        )
        named_strategies(self.strategies)  # a wrong name is told before the run, not after a loss

    def replanner(
        self, job: Job, plan: Path, predict: Predict, setting: Setting, *, quiet: bool
    ) -> Again:
        """A function that plans again without lost nodes.

        It runs `hetplan plan replan` in a new process: solvers leave threads behind, and a process
        with threads cannot fork ranks. plan: the file of the plan that runs now. predict: returns
        the new plan's predicted times. Raises InputError where the plan's cluster is unknown.
        """
        # With --elastic the prediction is required: it lacks only where the cluster is unknown.
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
        options = ["--json", "--quiet"]
        for name, value in values.items():
            if value is not None:
                options += [name, str(value)]
        plan_files = [plan]  # the last one is the file of the plan that runs
        folder = Path(self.checkpoint or "")  # `check` has seen that there is one

        def again(job: Job, lost: tuple[int, ...]) -> Job | None:
            nodes = [f"node{number}" for number in sorted(lost)]
            if not quiet:
                note(f"lost {', '.join(nodes)}: planning without")
            make_folder(folder)
            target = folder / f"plan-without-{'-'.join(nodes)}.json"
            command = own_command("plan", "replan", str(plan_files[-1]))
            command += ["--lost", ",".join(nodes), "--output", str(target), *options]
            completed = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
            if completed.returncode != 0:
                return None
            plan_files.append(target)
            new_plan = load_plan(target)
            return replace(job, plan=new_plan, rehearsal=predict(new_plan, target))

        return again


@described(
    sections={
        "Training": "--steps --factory --probe --data --pack --optimizer --learning-rate --seed",
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
        quiet=is_rank(),  # the ranks of torchrun would all write the same notes
    )
    needs_model = training.factory is None and not virtual
    if needs_model and not setting.model_is_known(loaded):
        require_inputs([f"the model {loaded.workload.model!r} with --model or --factory"], plan)
    require(
        not (training.pack and survival.elastic), "--pack has no rows for the plans of --elastic"
    )
    rows, widths = packed_plan(loaded) if training.pack else (loaded, ())
    requested = Job(
        plan=rows,
        rehearsal=predict(loaded, plan),
        checkpoint=survival.checkpoint,
        every=survival.every,
        resume=survival.resume,
        save=survival.save,
        model=setting.model,
        virtual=virtual,
        **{**vars(training), "pack": widths},  # its fields have the names of the job's
    )
    job = requested if is_rank() else on_devices(requested)
    # On GPUs, ranks do not compute on cores, so that no note is due.
    cores = len(os.sched_getaffinity(0)) if job.device == "cpu" else loaded.world_size
    if loaded.world_size > 2 * cores and not (virtual or is_rank()):
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
    if measured is None:  # another rank has the measurements and prints them
        return 0
    if trace is not None:
        write_document(trace, measured.trace())
    return emit(measured.document(), [measured.table()], json=json)


# Names in `keys` that are no keys of a job file: arguments ("Ellipsis"), options that `hetplan
# launch` gives itself, and options that only concern the output.
LEFT_OUT = ("Ellipsis", "all", "json", "measure", "output", "run", "trace")


def keys(command: Callable[..., int]) -> dict[str, tuple[Any, Any]]:
    """Key of a job file -> (type, default) of a command's option, as pydantic's create_model takes
    them. The default is `...` where the option is required."""
    fields: dict[str, tuple[Any, Any]] = {}
    for parameter in inspect.signature(with_groups_as_options(command)).parameters.values():
        kind, option, *_ = get_args(parameter.annotation)
        # In an annotation, typer stores an option's first name as its default; that of a switch
        # has its opposite behind a slash.
        name = str(option.default).partition("/")[0]
        key = name.removeprefix("--").replace("-", "_")
        if key in LEFT_OUT:
            continue
        if Path in get_args(kind):  # `Path | None`: a job file's paths are texts
            kind = str | None
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[key] = (kind, default)
    return fields


PLAN, RUN = keys(plan), keys(run)
# The keys of a job file that are no options.
FIELDS: dict[str, Any] = {
    "format": (Literal["hetplan-job"], "hetplan-job"),
    "version": (Literal[1], 1),
    "launcher": (Annotated[LauncherSection, Field(discriminator="kind")], ...),
}
# Of a key that both commands have, the type of `hetplan plan` counts. Defaults do not matter, since
# `launch` passes on only what the file sets.
JobFile = create_model("JobFile", __base__=StrictModel, **{**RUN, **PLAN, **FIELDS})


def options(given: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """The options of a command as words of its command line. A value True gives the option without
    a value, False and None give no option, and a list gives the option once for each entry.

    given: key -> value of a job file. known: the keys that are options of the command.
    """
    words = []
    for key, value_or_list in given.items():
        if key not in known:
            continue
        name = f"--{key.replace('_', '-')}"
        values = value_or_list if isinstance(value_or_list, list) else [value_or_list]
        for value in values:
            if value is True:
                words.append(name)
            elif value is not None and value is not False:
                words += [name, str(value)]
    return words


def check_inputs(job_file: Any, where: str) -> None:
    """Raise InputError where the model, the cluster or a strategy that a job file names cannot be
    loaded. where: the job's file."""
    try:
        if job_file.model or job_file.factory is None:
            find_model(named(job_file.model))
        open_cluster(job_file.cluster)
        named_strategies(job_file.strategies)
    except InputError as error:
        raise InputError(str(error), where=where) from None


@described(
    sections={
        "Plan": "--plan",
        "Start": "--submit --dry-run",
        "Output": "--output --help",
    },
    examples=(
        ("The commands that a job file stands for", "hetplan launch job.yaml --dry-run"),
        (
            "Plan, write the launcher's files, and hand them over",
            "hetplan launch job.yaml --submit",
        ),
        ("Launch a plan that you have", "hetplan launch job.yaml --plan plan.json"),
    ),
)
def launch(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job file (YAML).")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Folder for the plan and the files; default JOB-launch beside the job file.",
            callback=usable_folder,
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
    value = read_yaml(job)
    where = str(job)
    check_header(value, "hetplan-job", 1, where=where)
    check_plain(value, where)
    job_file: Any = parse(JobFile, value, where=where)
    stated = job_file.model_dump(exclude_unset=True)  # the keys that stand in the file
    section = job_file.launcher
    launcher = LAUNCHERS[section.kind]
    local = section.kind == "local"
    folder = os.path.relpath(output or job.with_name(f"{job.stem}-launch"))

    plan_keys = set(PLAN)
    if job_file.model:  # the planner takes the model, and the factory is for the run alone
        plan_keys.discard("factory")
    planning = ["plan", *options(stated, plan_keys), "--output", f"{folder}/plan.json"]
    new_plan = None
    if planned is None:
        check_inputs(job_file, where)
    else:
        new_plan = load_plan(planned)

    run_keys = RUN.keys() - {"strategies"}  # strategies are for planning alone
    if not local:  # only this machine has the files of a prediction
        run_keys -= {"cluster", "profile"}
        if new_plan is None or new_plan.inputs is not None:  # the plan file carries its model
            run_keys -= {"model"}
    run_options = options(stated, run_keys)
    starting = [word.format(folder) for word in launcher.command.split()]
    if local:
        starting += run_options

    if dry_run:
        if planned is None:
            print(shlex.join(["hetplan", *planning]))
        print(shlex.join(starting))
        return 0
    # Files can be written for a launcher that is on another machine.
    installed = local or not submit or shutil.which(launcher.program)
    require(installed, f"{launcher.program} is not installed here")
    if not local:
        check_utf8(os.path.abspath(folder))
    is_new = not os.path.isdir(folder)
    try_folder(folder)
    if new_plan is not None:
        save_plan(new_plan, Path(folder, "plan.json"))
    elif code := subprocess.run(own_command(*planning), check=False).returncode:
        if is_new:
            with contextlib.suppress(OSError):  # a folder with files stays
                os.rmdir(folder)
        return code
    if local:
        _, *words = starting  # without the name `hetplan`
        variables = os.environ | section.env
        return subprocess.run(own_command(*words), env=variables, check=False).returncode
    new_plan = load_plan(Path(folder, "plan.json"))
    # A plan may be refused for its built-in model alone, which the user's own model replaces.
    can_run = new_plan.refused is None or job_file.factory is not None
    require(can_run, f"{new_plan.refused}", where=where)
    start = Start(
        plan=new_plan,
        launcher=section,
        # Kubernetes allows 63 characters, of which JobSet takes some for the names of its pods.
        name=re.sub("[^a-z0-9]+", "-", f"hetplan-{job.stem}".lower())[:40].strip("-"),
        root=os.getcwd(),
        folder=folder,
        run_options=run_options,
        gpus=job_file.device != "cpu",
    )
    texts = {"node.sh": torchrun(new_plan, variables=section.env), **launcher.files_of(start)}
    for file, text in texts.items():
        write_text(Path(folder, file), text)
    print(f"written to {folder}: plan.json, {', '.join(texts)}", shlex.join(starting), sep="\n")
    return subprocess.run(starting, check=False).returncode if submit else 0
