"""Options that several commands share: their declarations, the parsing of their values, and their
shell completion. The functions at the end open the object that an argument stands for: a file,
standard input (`-`), or a name in the packaged library.

A shell asks for completions while the user types, so completers read nothing heavy. A completer
takes the incomplete word (and typer's context, where earlier arguments matter) and returns whole
words. Where it returns none, the shell completes file names.
"""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hetplan.errors import InputError, require
from hetplan.files import MAX_BYTES, check_folder_target, check_target, parse_json, read_json
from hetplan.formulations import FAMILIES, add_plugins, family
from hetplan.instances.library import (
    SETS,
    Instance,
    find,
    library,
    load_from_library,
    parse_instance,
)
from hetplan.profiling.frameworks import MOMENT_BYTES_IN_8_BITS, Framework, load_framework
from hetplan.profiling.hardware import cluster as clusters
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.models.adapters import parse_adapters
from hetplan.profiling.models.model import find_model
from hetplan.profiling.models.operators import Precision, Stack
from hetplan.profiling.models.zoo import ModelSpec
from hetplan.solvers.registry import load
from hetplan.solvers.run import NativeValue, Options
from hetplan.studies.rows import digest, subjects

LARGEST_MARGIN = 0.9  # share of a memory; more would leave hardly any memory to plan with
LARGEST = 10_000  # most micro-batches or ranks that an option may name, beyond any machine


def usable_target(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """The callback of an option that names a file to write: returns the path unchanged.

    Raises InputError where the file cannot be written, before the command does its long work.
    """
    if path is not None:
        option = max(parameter.opts, key=len)
        require(str(path) != ".", "names no file", where=option, expected="a file name")
        check_target(path)
    return path


def usable_folder(path: Path | None) -> Path | None:
    """The callback of an option that names a folder to write into: returns the path unchanged.

    The folder need not exist, its own folder must. Raises InputError where files cannot be written,
    before the command does its long work.
    """
    if path is not None:
        check_folder_target(path)
    return path


def target(*names: str, help: str, metavar: str = "FILE") -> Any:
    """An option that names a file to write."""
    return typer.Option(*names, metavar=metavar, help=help, callback=usable_target)


def number(*names: str, least: float, most: float, help: str, metavar: str = "N") -> Any:
    """An option whose value is a number from `least` to `most`; NaN is refused as well.

    Many options have limits far beyond any real value: a `least` such as 1e-9 keeps out 0, and a
    `most` such as 1e15 keeps out infinity.
    """

    def check(value: float | None) -> float | None:
        in_range = value is None or least <= value <= most
        require_option(in_range, names[0], value, f"{least:g} to {most:g}")
        return value

    return typer.Option(*names, metavar=metavar, help=help, callback=check)


# A set of completions -> "module:attribute" with its names: an iterable, or a function that returns
# one.
OFFERED: Mapping[str, str] = {
    "problems": "hetplan.formulations:FAMILIES",
    "models": "hetplan.profiling.models.zoo:BUILT_IN",
    "devices": "hetplan.profiling.hardware.cluster:catalogue",
    "precisions": "hetplan.profiling.models.operators:PRECISIONS",
    "strategies": "hetplan.planner:STRATEGIES",
    "frameworks": "hetplan.adapters.exports:EXPORTERS",
    "trainers": "hetplan.profiling.frameworks:FRAMEWORKS",
    "losses": "hetplan.profiling.frameworks:LOSSES",
    "stacks": "hetplan.profiling.models.operators:STACKS",
    "clusters": "hetplan.profiling.hardware.cluster:example_clusters",
    "parameters": "hetplan.formulations.astra.search.space:PARAMETERS",
    "lengths": "hetplan.planner.lengths.samples:published",
    "instances": "hetplan.cli.options:instance_names",
    "sets": "hetplan.cli.options:set_names",
}


def beginning(names: Iterable[str], incomplete: str, *, many: bool) -> list[str]:
    """The completions of an incomplete word.

    many: the word is a list of names, separated by commas. Then the last name is completed by those
    that the list does not have yet.
    """
    if not many:
        return [name for name in names if name.startswith(incomplete)]
    before, comma, last = incomplete.rpartition(",")
    listed = before.split(",")
    others = [name for name in names if name not in listed]
    return [f"{before}{comma}{name}" for name in others if name.startswith(last)]


def offer(what: str, *, ending: str = "", many: bool = False) -> Callable[[str], list[str]]:
    """A completer of the names in the set `what` of OFFERED.

    ending: a text that follows each name. many: whether the option takes a list of names.
    """

    def complete(incomplete: str) -> list[str]:
        source = load(OFFERED[what])
        names = source() if callable(source) else source
        return beginning((f"{name}{ending}" for name in names), incomplete, many=many)

    return complete


def instance_names() -> list[str]:
    """The names of the packaged instances."""
    return [entry.name for entry in library()]


def set_names() -> list[str]:
    """The names of the packaged sets, of the problems and of the packaged instances."""
    return [*SETS, *FAMILIES, *instance_names()]


def offer_methods(ctx: typer.Context, incomplete: str) -> list[str]:
    """A completer of methods. It offers the methods of the first instance's problem, or of every
    problem where the command line names no packaged instance."""
    # While an option lacks its value, typer leaves the arguments before it in `ctx.args`.
    unassigned = [word for word in ctx.args if not word.startswith("-")]
    instances = [*(ctx.params.get("instances") or ()), *unassigned]
    entry = find(str(instances[0])) if instances else None
    problems = list(FAMILIES) if entry is None else [entry.problem]
    names = [method.name for problem in problems for method in family(problem).methods]
    return beginning([*dict.fromkeys(names), "all"], incomplete, many=True)


def offered(what: str, *names: str, metavar: str, help: str, **more: Any) -> Any:
    """An option whose values the shell completes from the set `what` of OFFERED.

    more: further arguments of `offer`.
    """
    return typer.Option(*names, metavar=metavar, help=help, autocompletion=offer(what, **more))


JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output.")
]
OutputOption = Annotated[
    Path | None,
    target("--output", "-o", metavar="FILE", help="Write the JSON document to a file as well."),
]
PngOption = Annotated[
    Path | None,
    typer.Option(
        "--png",
        metavar="DIR",
        help="Its pictures as PNG files in a folder.",
        file_okay=False,
        callback=usable_folder,
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]
TimeOption = Annotated[
    float | None,
    typer.Option(
        "--time-limit", "-t", metavar="SECONDS", help="Seconds for each method; default no limit."
    ),
]
LimitOption = Annotated[
    float,
    typer.Option("--time-limit", "-t", metavar="SECONDS", help="Seconds for everything together."),
]
# The time limit of a command whose budget is counted, and the budget.
CUTTING_LIMIT = 600.0
COUNTED_SECONDS = 60.0
CountedOption = Annotated[
    float,
    number(
        "--counted-seconds",
        least=1e-3,
        most=1e9,
        metavar="SECONDS",
        help="Work in seconds of a slow core, counted, for everything together; more finds faster "
        "plans.",
    ),
]
GapOption = Annotated[
    float | None,
    typer.Option("--gap", metavar="RATIO", help="Relative gap to stop at; default 1e-6."),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", help="Threads of general solvers; default all cores."),
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Seed of everything random; default 0.")
]
WrittenOption = Annotated[Path | None, target("--output", "-o", help="Write the file.")]
MicroBatchesOption = Annotated[
    list[str] | None,
    typer.Option("--micro-batches", metavar="N[,N…]", help="Micro-batch sizes to time."),
]
TensorOption = Annotated[
    list[str] | None, typer.Option("--tensor", metavar="N[,N…]", help="Tensor parallel degrees.")
]
ModelOption = Annotated[
    str,
    offered(
        "models",
        "--model",
        metavar="NAME|FILE",
        help="Built-in model, or a Hugging Face config.json.",
    ),
]
NamedModelOption = Annotated[
    str | None,
    offered(
        "models",
        "--model",
        metavar="NAME|FILE",
        help="Built-in model, config.json or traced model.",
    ),
]
TracedOption = Annotated[
    str | None,
    typer.Option(
        "--factory",
        metavar="MODULE:FUNCTION",
        help="Your own PyTorch module instead, traced (needs torch).",
    ),
]
ProbeOption = Annotated[
    bool | None,
    typer.Option(
        "--probe/--no-probe",
        help="Compare your module's training with its layers' first; default unless it is large.",
        show_default=False,
    ),
]
ClusterOption = Annotated[
    str,
    offered(
        "clusters",
        "--cluster",
        metavar="FILE|NAME",
        help="Cluster file (YAML), or an example's name.",
    ),
]
BatchOption = Annotated[
    int, typer.Option("--global-batch", metavar="N", help="Samples per iteration.")
]
SequenceOption = Annotated[
    int | None,
    typer.Option("--sequence", metavar="N", help="Tokens per sample; default the model's."),
]
LengthsOption = Annotated[
    str | None,
    offered(
        "lengths",
        "--lengths",
        metavar="FILE|NAME",
        help="Tokens of samples, one number per line, or published ones: plan for their mean and "
        "a quantile. --sequence then cuts longer ones.",
    ),
]
PrecisionOption = Annotated[
    Precision, typer.Option("--precision", help="Precision of the training.")
]
FrameworkOption = Annotated[
    str,
    offered(
        "trainers",
        "--framework",
        metavar="NAME",
        help="The framework that trains; its memory counts: hetplan, megatron, fsdp or deepspeed.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The options that say which framework trains, and what it holds."""

    framework: FrameworkOption = "hetplan"
    gradient_bytes: Annotated[
        float | None,
        number(
            "--gradient-bytes",
            least=1,
            most=8,
            help="Bytes of a gradient: 2 in bf16, 4 in fp32; default the framework's.",
        ),
    ] = None
    moment_bytes: Annotated[
        float | None,
        number(
            "--moment-bytes",
            least=1,
            most=8,
            help="Bytes of each of Adam's two moments; default 4.",
        ),
    ] = None
    loss: Annotated[
        str | None,
        offered(
            "losses",
            "--loss",
            metavar="KIND",
            help="How the loss is computed: eager, compiled, native (Megatron) or te; default the "
            "framework's.",
        ),
    ] = None
    adapters: Annotated[
        str | None,
        typer.Option(
            "--adapters",
            metavar="lora:RANK[:MODULES]",
            help="Train adapters beside frozen weights, as lora:16:q,v; default modules "
            "all-linear.",
        ),
    ] = None
    base: Annotated[
        int | None,
        typer.Option(
            "--base",
            metavar="16|8|4",
            help="Bits of a frozen weight of the blocks' products (4: NF4); default 16, the "
            "precision's.",
        ),
    ] = None
    optimizer: Annotated[
        Literal["adam", "adam-8bit"],
        typer.Option("--optimizer", help="Adam, or Adam with both moments in 8 bits."),
    ] = "adam"
    reshard: Annotated[
        Literal["always", "never"] | None,
        typer.Option(
            "--reshard",
            help="Whether pipelines under ZeRO 2 and 3 give up gathered weights after every pass.",
        ),
    ] = None

    def trained(self, model: str) -> str | ModelSpec:
        """The model under these options. Raises InputError, or UnsupportedError for a model that
        takes no adapters."""
        if self.adapters is None:
            require_option(self.base is None, "--base", self.base, "--adapters beside it")
            return model
        adapters = parse_adapters(self.adapters, 16 if self.base is None else self.base)
        return find_model(model).with_adapters(adapters)

    def trainer(self) -> Framework:
        """The framework under these options. Raises InputError."""
        moment_bytes = self.moment_bytes
        if self.optimizer == "adam-8bit":
            require_option(
                moment_bytes is None, "--moment-bytes", moment_bytes, "none with adam-8bit"
            )
            moment_bytes = MOMENT_BYTES_IN_8_BITS
        return load_framework(self.framework, where="--framework").with_choices(
            gradient_bytes=self.gradient_bytes,
            moment_bytes=moment_bytes,
            loss=self.loss,
            reshard=self.reshard,
        )

    def reducing(self, stack: Stack) -> Stack:
        """The software that exchanges gradients of as many bytes as it holds."""
        if self.gradient_bytes is None:
            return stack
        return replace(stack, gradient_bytes=round(self.gradient_bytes))


StackOption = Annotated[
    str,
    offered(
        "stacks",
        "--stack",
        metavar="NAME[:SETTING=VALUE,…]",
        help="The software that computes: eager-2021, eager, fused, compiled, graphs, fp8 or fp4; "
        "with settings such as fp8:graphs=partial,one_copy=true.",
    ),
]
# Commands give it the default 0.05, which is `planner.fits.MEMORY_MARGIN`: importing it is slow.
MarginOption = Annotated[
    float,
    number(
        "--memory-margin",
        least=0,
        most=LARGEST_MARGIN,
        metavar="SHARE",
        help="Share of each device's memory that stays free for the allocator.",
    ),
]
OwnMarginOption = Annotated[
    float | None,
    number(
        "--memory-margin",
        least=0,
        most=LARGEST_MARGIN,
        metavar="SHARE",
        help="Share of each device's memory that stays free; default the plan's own, else 0.05.",
    ),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="Measured profile; default a prediction."),
]
EfficiencyOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--efficiency", metavar="FILE", help="Operators measured by `quick` or `operators`."
    ),
]
LinksOption = Annotated[
    Path | None,
    typer.Option(
        "--links",
        metavar="FILE",
        help="Learned efficiency of links, as `hetplan profile train` writes it.",
    ),
]
StrategiesOption = Annotated[
    list[str] | None,
    offered(
        "strategies",
        "--strategies",
        metavar="A[,B…]",
        help="Strategies to try; default all.",
        many=True,
    ),
]
PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN", help="A plan file, as `hetplan plan -o` writes it.")
]
InstanceArgument = Annotated[
    str,
    typer.Argument(
        help="Instance file, - for standard input, or a name from `hetplan instances list`.",
        autocompletion=offer("instances"),
    ),
]


PluginOption = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="MODULE",
        help="A module with methods of your own, installed or in this folder.",
        callback=add_plugins,
    ),
]
NativeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--native",
        metavar="BACKEND.NAME=VALUE",
        help="A back end's own option; BACKEND: cp-sat, highs, pyomo.",
    ),
]
PyomoOption = Annotated[
    str | None,
    typer.Option(
        "--pyomo-solver", metavar="NAME", help="Solver behind the pyomo method; default highs."
    ),
]


def check_picture(path: Path | None) -> None:
    """Raise InputError for a picture's file of an unknown format."""
    require(
        path is None or path.suffix.lower() in (".svg", ".png"),
        "unknown kind of picture",
        where=str(path),
        expected=".svg, .png",
    )


def require_option(holds: bool, option: str, got: object, expected: str) -> None:
    """Raise InputError for an option whose value does not satisfy the condition `holds`."""
    require(holds, "not usable", where=option, got=got, expected=expected)


def make_options(**values: Any) -> Options:
    """A solver run's `Options` from the values of the command line; None keeps the default. Raises
    InputError."""
    entries = {name: value for name, value in values.items() if value is not None}
    if "native" in entries:
        entries["native"] = parse_dotted(entries["native"], "--native", "BACKEND.NAME=VALUE")
    try:
        return Options(**entries)
    except InputError as error:
        option = f"--{error.what.replace(' ', '-')}"
        if error.what.replace(" ", "_") not in entries:
            raise
        raise InputError(
            "not usable", where=option, got=error.got, expected=error.expected
        ) from None


def parse_dotted(texts: Sequence[str], option: str, form: str) -> dict[str, dict[str, NativeValue]]:
    """`["owner.name=value"]` as {"owner": {"name": value}}.

    option, form: the option and its expected form, for the InputError that a wrong text raises.
    """
    parsed: dict[str, dict[str, NativeValue]] = {}
    for text in texts:
        left, equals, value = text.partition("=")
        owner, dot, name = left.strip().partition(".")
        require_option(bool(equals and dot and owner and name), option, text, form)
        entries = parsed.setdefault(owner, {})
        require(name not in entries, f"{owner}.{name} is given twice", where=option)
        entries[name] = native_value(value.strip())
    return parsed


def native_value(text: str) -> NativeValue:
    """The value of an option's text: a boolean for true or false, else a whole number, else a
    finite number, else the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for convert in (int, float):
        # OverflowError: a whole number beyond all floating-point numbers stays a text
        with contextlib.suppress(ValueError, OverflowError):
            value = convert(text)
            if math.isfinite(value):  # `float` reads `inf` and `nan`, which are words here
                return value
    return text


def split_list(values: Sequence[str]) -> list[str]:
    """`["a,b", "c"]` as ["a", "b", "c"]; empty parts are left out."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def whole_numbers(
    texts: Sequence[str], option: str, least: int = 1, most: int = LARGEST
) -> tuple[int, ...]:
    """The whole numbers that an option's texts list: `["1,2", "4-6"]` as (1, 2, 4, 5, 6), each
    once, ascending. Raises InputError."""
    numbers: set[int] = set()
    for text in split_list(texts):
        ends = text.split("-")
        # No option takes a number of 9 digits, and `int` refuses one of some thousand.
        usable = len(ends) <= 2 and all(end.isdecimal() and len(end) < 9 for end in ends)
        first, last = (int(ends[0]), int(ends[-1])) if usable else (0, 0)
        require_option(
            usable and least <= first <= last <= most,
            option,
            text,
            f"whole numbers from {least} to {most}, as 1,2 or 1-8",
        )
        numbers.update(range(first, last + 1))
    require(numbers, "no number given", where=option)
    return tuple(sorted(numbers))


def switch(text: str, option: str) -> bool:
    """The truth value of the text `true` or `false`. Raises InputError for any other text."""
    require_option(text.lower() in ("true", "false"), option, text, "true or false")
    return text.lower() == "true"


def read_document(argument: str) -> tuple[Any, str]:
    """(the parsed JSON of a file or of standard input, its name for error messages). Raises
    InputError."""
    if argument != "-":
        return read_json(argument), argument
    try:
        content = sys.stdin.buffer.read(MAX_BYTES + 1)  # one byte more tells that it is too large
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where="stdin") from None
    require(
        len(content) <= MAX_BYTES,
        "too large",
        where="stdin",
        expected=f"at most {MAX_BYTES} bytes",
    )
    return parse_json(content, where="stdin"), "stdin"


def open_instance(argument: str) -> Instance:
    """The instance in a file, on standard input or in the library; raises InputError."""
    # An argument that ends like a file's name is one: its error is that there is no such file.
    named = argument != "-" and Path(argument).suffix not in (".json", ".gz")
    if named and not os.path.exists(argument):
        return load_from_library(argument, "neither a file nor an instance of the library:")
    value, where = read_document(argument)
    return parse_instance(value, where=where)


def open_instances(arguments: Sequence[str]) -> list[Instance]:
    """All instances that the arguments stand for, each once.

    An argument is a file, standard input, a folder, or a name, a pattern, a problem or a set of the
    library. Raises InputError.
    """
    opened: dict[str, Instance] = {}  # by digest, so that each comes once
    for argument in arguments:
        is_file_name = argument == "-" or Path(argument).suffix in (".json", ".gz")
        is_one_file = is_file_name or os.path.exists(argument)
        if os.path.isdir(argument) or not is_one_file:
            instances = [instance for _, instance, _ in subjects([argument])]
        else:
            instances = [open_instance(argument)]
        opened.update((digest(instance), instance) for instance in instances)
    return list(opened.values())


def open_cluster(argument: str) -> Cluster:
    """The cluster of a cluster file, or of an example's name. Raises InputError."""
    return clusters.open_cluster(argument, "neither a file nor an example cluster:")
