"""`hetplan launch`: one file to a running job. It plans, then trains here, or writes what a
launcher takes, and submits it.

The keys of a job file are the options of `hetplan plan` and `hetplan run`, underscores for hyphens.
"""

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from pydantic import Field, create_model

from hetplan.cli.main import with_groups_as_options
from hetplan.cli.plan import plan
from hetplan.cli.run import run
from hetplan.errors import require
from hetplan.files import read_yaml, write_text
from hetplan.formulations.joint.plan import load_plan, save_plan
from hetplan.runtime.export.launchers import KINDS, LAUNCHERS, Start
from hetplan.runtime.export.scripts import torchrun
from hetplan.schema import StrictModel, check_header, parse

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
    pairs = [
        (f"--{key.replace('_', '-')}", value)
        for key, values in given.items()
        for value in (values if isinstance(values, list) else [values])
        if key in known and value is not None and value is not False
    ]
    return [
        word for name, value in pairs for word in ((name,) if value is True else (name, str(value)))
    ]


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
    asked: Any = parse(JobFile, value, where=where)
    given, launcher = asked.model_dump(exclude_unset=True), asked.launcher
    program, command, files_of, _ = LAUNCHERS[launcher.kind]
    folder = os.path.relpath(output or job.with_name(f"{job.stem}-launch"))
    local = launcher.kind == "local"
    # with a model's file the factory is for the run alone
    planning = options(given, PLAN.keys() - ({"factory"} if asked.model else set()))
    first = ["hetplan", "plan", *planning, "--output", f"{folder}/plan.json"]
    # strategies are for planning; the files of a prediction are on this machine alone
    words = options(given, RUN.keys() - {"strategies", *(() if local else ("cluster", "profile"))})
    last = [*(word.format(folder) for word in command.split()), *(words if local else ())]
    if dry_run:
        print(*([] if planned else [shlex.join(first)]), shlex.join(last), sep="\n")
        return 0
    require(local or not submit or shutil.which(program), f"{program} is not installed here")
    os.makedirs(folder, exist_ok=True)
    if planned is not None:
        save_plan(load_plan(planned), Path(folder, "plan.json"))
    elif code := subprocess.run([sys.executable, "-m", *first], check=False).returncode:
        return code
    if local:
        return subprocess.run(
            [sys.executable, "-m", *last], env=os.environ | launcher.env, check=False
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
