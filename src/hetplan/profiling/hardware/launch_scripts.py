"""Nodes from the scripts with which people start training: what `torchrun`, `deepspeed`,
`accelerate launch`, `mpirun` and `srun` are told, and the lines that Slurm and PBS read.

Nothing of a script is executed. Texts and arrays that it assigns stand for `$NAME`, `${NAME}` and
`${NAME[@]}`, and `${NAME:-text}` is the text where the script assigns none. Slurm's variables have
what the script asks Slurm for. What needs more of a shell, and a name that is assigned two texts,
is not known.

A number of processes of a node is taken for that of its devices. Where a script starts several
jobs of different sizes, none is chosen.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hetplan.errors import InputError, require
from hetplan.files import read_foreign_text, read_yaml
from hetplan.profiling.hardware.hostfiles import entries_of, read_hostfile
from hetplan.profiling.hardware.hosts import Host, check_number_of_devices, check_number_of_hosts
from hetplan.profiling.hardware.node_lists import node_names

EXPECTED = "torchrun, deepspeed, accelerate launch, mpirun, srun or lines #SBATCH or #PBS"
ASSIGNMENT = re.compile(
    r"""^[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_]\w*)=
    (?:"(?P<quoted>[^"]*)"|'(?P<plain>[^']*)'|\((?P<array>[^()]*)\)|(?P<word>[^\s"']*))""",
    re.MULTILINE | re.VERBOSE,
)
REFERENCE = re.compile(
    r"""\$(?:(?P<plain>[A-Za-z_]\w*)
    |\{(?P<name>[A-Za-z_]\w*)(?:\[[@*]\])?(?::?-(?P<default>[^{}$]*))?\})""",
    re.VERBOSE,
)
# What only a shell knows: commands, arithmetic, arguments, and other references.
OF_A_SHELL = re.compile(r"\$\(\([^()]*\)\)|\$\([^()]*\)|`[^`]*`|\$\{[^{}]*\}|\$.")
COMMENT = re.compile(r"(?<!\S)#.*")
UNKNOWN = "\0"  # stands in a text for what is not known
GRES = re.compile(r"(?:gres[/:])?(?:gpu:)?(?:(?P<type>[A-Za-z][\w.-]*):)?(?P<number>\d{1,6})")
MOST_REFERENCES = 8  # texts that refer to texts, one behind the other
# Of a script, of which each line may repeat a long text.
MOST_BYTES = 2**18
MOST_LINES = 2000
MOST_CHARACTERS = 8000  # of a line, behind which no option of a launcher stands
# The first words of lines that schedulers read.
DIRECTIVES = {"#SBATCH": "sbatch", "#PBS": "pbs"}
MODULES = ("torch.distributed.run", "torch.distributed.launch")
# Launcher -> long names of its short options, and of options with several names.
NAMES: dict[str, dict[str, str]] = {
    "torchrun": {"nproc-per-node": "devices", "nnodes": "nodes"},
    "deepspeed": {
        "num-nodes": "nodes", "num-gpus": "devices", "hostfile": "hostfile", "H": "hostfile",
        "include": "include", "i": "include", "exclude": "exclude", "e": "exclude",
    },
    "accelerate": {
        "num-machines": "nodes", "num-processes": "processes", "config-file": "config",
    },
    "mpirun": {
        "np": "processes", "n": "processes",
        "npernode": "devices", "N": "devices", "ppn": "devices",
        "hostfile": "hostfile", "machinefile": "hostfile", "f": "hostfile", "H": "hosts",
        "host": "hosts", "hosts": "hosts",
    },
    "srun": {
        "nodes": "nodes", "N": "nodes", "nodelist": "names", "w": "names",
        "gres": "gres", "gpus-per-node": "gres", "gpus": "gpus", "G": "gpus",
        "ntasks-per-node": "tasks", "gpus-per-task": "of_task",
    },
}  # fmt: skip
NAMES["sbatch"] = NAMES["srun"]
NAMES["mpiexec"] = NAMES["mpirun"]


@dataclass(frozen=True)
class Job:
    """The size of a job as a command or the lines of a scheduler tell it. None: not told."""

    nodes: int | None = None
    devices: int | None = None  # of a node
    processes: int | None = None  # of all nodes
    unread: str = ""  # the number of nodes, where it is told and not known
    device_type: str | None = None  # the scheduler's name of the devices
    names: tuple[str, ...] = ()  # of the nodes
    hosts: tuple[Host, ...] = ()  # of a hostfile or a list of hosts


def read_launch_script(path: str) -> tuple[list[Host], list[str]]:
    """(the nodes that a launch script asks for, lines on what is assumed). Raises InputError."""
    text = read_foreign_text(path, MOST_BYTES).replace("\\\r\n", " ").replace("\\\n", " ")
    count = len(text.splitlines())
    require(
        count <= MOST_LINES,
        "too many lines",
        where=path,
        got=count,
        expected=f"at most {MOST_LINES}",
    )
    scheduled = scheduled_job(text.splitlines(), path)
    variables = assigned(text) | of_slurm(scheduled)
    found: dict[Job, None] = {}  # a set in order
    contradictions: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        job = None
        for launcher, words in launches(filled(line, variables)):
            inner = job_of(launcher, words, path, f"{path}: line {number}")
            outer = scheduled if job is None else within(job, scheduled)
            contradictions += contradiction(inner, outer, launcher, path)
            job = inner if job is None else within(inner, job)
        if job is not None:
            found[job] = None
    require(found or scheduled != Job(), "no launch", where=path, expected=EXPECTED)
    if len(found) > 1:  # such as an srun that asks for a node's address
        found.pop(Job(), None)
    require(
        len(found) <= 1,
        "starts several jobs of different sizes",
        where=path,
        got="; ".join(map(told, found)),
        expected="one job",
    )
    job = next(iter(found), Job())
    hosts, lines = hosts_of(within(job, scheduled), path)
    return hosts, [*dict.fromkeys(contradictions), *lines]


def contradiction(inner: Job, outer: Job, launcher: str, path: str) -> list[str]:
    """A line where a launcher starts a job on another number of nodes than what it runs in asks
    for; no line where either is not told."""
    if inner.nodes is None or outer.nodes in (None, inner.nodes):
        return []
    return [
        f"nodes are taken to be {inner.nodes}, as {launcher} in {path} is told or takes by "
        f"default; the job around it asks for {outer.nodes}"
    ]


def within(inner: Job, outer: Job) -> Job:
    """A job that another one starts, as torchrun within srun: what it does not tell is told by the
    outer one."""
    names = [field.name for field in fields(Job)]
    own = {name: getattr(inner, name) for name in names if getattr(inner, name)}
    if inner.processes is not None and inner.devices is None:
        own["devices"] = None  # follows from its processes
    return replace(outer, **own)


def hosts_of(job: Job, path: str) -> tuple[list[Host], list[str]]:
    """(the nodes of a job, lines on what is assumed). Raises InputError where the number of nodes
    is told and not known."""
    if job.hosts:
        return list(job.hosts), []
    lines = []
    number = job.nodes or len(job.names)
    if not number:
        require(
            not job.unread,
            "number of nodes is not known",
            where=path,
            got=job.unread,
            expected="a number that the script assigns",
        )
        number = 1
        lines = [f"nodes are assumed: one, as {path} tells no number"]
    check_number_of_hosts(number, path)
    names = job.names if len(job.names) == number else [f"node{index}" for index in range(number)]
    devices, why = job.devices, f"as many as {path} asks for on a node"
    if devices is None and job.processes is not None and job.processes % number == 0:
        devices = job.processes // number
        why = f"an even part of the processes that {path} starts"
    if devices is None:
        why = f"{path} does not tell it"
    else:
        check_number_of_devices(devices, path)
    driver_name = job.device_type.replace("_", " ") if job.device_type else None
    hosts = [Host(name, devices, devices_from=why, driver_name=driver_name) for name in names]
    return hosts, lines


def told(job: Job) -> str:
    """The size of a job, for messages."""
    if job.hosts:
        return f"{len(job.hosts)} hosts"
    return f"{job.nodes or '?'} nodes of {job.devices or '?'}"


def scheduled_job(lines: Sequence[str], path: str) -> Job:
    """What the lines `#SBATCH` and `#PBS` of a script ask for. Raises InputError for a
    heterogeneous job."""
    words: dict[str, list[str]] = {"sbatch": [], "pbs": []}
    for number, line in enumerate(lines, 1):
        mark, _, rest = line.strip().partition(" ")
        scheduler = DIRECTIVES.get(mark)
        if scheduler is None:
            continue
        found = words_of(rest)
        several = scheduler == "sbatch" and found in (["hetjob"], ["packjob"])
        require(not several, "heterogeneous jobs are not read", where=f"{path}: line {number}")
        words[scheduler] += found
    if words["pbs"]:
        return job_of_pbs(words["pbs"], path)
    return job_of("sbatch", words["sbatch"], path, path) if words["sbatch"] else Job()


def job_of_pbs(words: Sequence[str], path: str) -> Job:
    """The chunks of `-l select=2:ncpus=8:ngpus=4`, or the whole job's GPUs of `-l ngpus=8`."""
    for word in words:
        select = re.fullmatch(r"(?:-l)?select=(?P<chunks>.+)", word)
        if select is None:
            continue
        chunks = select["chunks"].split("+")
        require(len(chunks) == 1, "several kinds of nodes are not read", where=path, got=word)
        number, *settings = chunks[0].split(":")
        values = dict(setting.partition("=")[::2] for setting in settings)
        devices = whole(values.get("ngpus"))
        kind = values.get("gputype") or values.get("gpu_type") or values.get("gpu_model")
        return Job(whole(number), devices, device_type=kind)
    return Job()


def assigned(text: str) -> dict[str, str]:
    """Name -> the text that a script assigns it; UNKNOWN where it assigns several."""
    values: dict[str, str] = {}
    for match in ASSIGNMENT.finditer(text):
        array = match["array"]
        pieces = [match["quoted"], match["plain"], match["word"]]
        value = next((piece for piece in pieces if piece is not None), "")
        if array is not None:
            value = " ".join(COMMENT.sub("", line).strip() for line in array.splitlines())
        if "$(" in value or "`" in value:
            value = UNKNOWN
        name = match["name"]
        values[name] = value if values.get(name, value) == value else UNKNOWN
    return values


def of_slurm(scheduled: Job) -> dict[str, str]:
    """Slurm's variables in a job that a script asks for."""
    values = {}
    if scheduled.nodes is not None:
        for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
            values[name] = str(scheduled.nodes)
    if scheduled.devices is not None:
        for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
            values[name] = str(scheduled.devices)
    return values


def filled(line: str, variables: Mapping[str, str]) -> str:
    """A line with the texts of the names in it. What is not known becomes UNKNOWN."""

    def text(match: re.Match[str]) -> str:
        name = match["plain"] or match["name"]
        value = variables.get(name)
        own = None if value is None else REFERENCE.fullmatch(value)
        if own is not None and own["name"] == name:  # NAME=${NAME:-text}
            return UNKNOWN if own["default"] is None else str(own["default"])
        if value is None:
            return UNKNOWN if match["default"] is None else str(match["default"])
        return value

    for _ in range(MOST_REFERENCES):
        result = REFERENCE.sub(text, line)[:MOST_CHARACTERS]
        if result == line:
            break
        line = result
    return OF_A_SHELL.sub(UNKNOWN, line)


def words_of(line: str) -> list[str]:
    """The words of a line as a shell divides it; those between blanks where quotes do not end."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


def launches(line: str) -> Iterator[tuple[str, list[str]]]:
    """(launcher, its words) of the commands in a line, of which each starts the next one, as in
    `srun torchrun …` and `srun bash -c "torchrun …"`."""
    words = words_of(line)
    for index, word in enumerate(words):
        program = word.rpartition("/")[2]
        rest = words[index + 1 :]
        if program == "accelerate" and rest[:1] == ["launch"]:
            yield program, rest[1:]
        elif program in NAMES and program not in ("accelerate", "sbatch"):
            if "hostname" not in rest:  # which is asked for the address of a node
                yield program, rest
        elif word == "-m" and rest[:1] and rest[0] in MODULES:
            yield "torchrun", rest[1:]
        elif re.fullmatch(r"-[a-z]*c", word) and rest[:1] and " " in rest[0]:
            yield from launches(rest[0])


def options_of(launcher: str, words: Sequence[str]) -> dict[str, str]:
    """What the options of a launcher say, by this module's names, up to the program that it
    starts: its first word that is no option and no value of one."""
    names = NAMES[launcher]
    found: dict[str, str] = {}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word in NAMES or not word.startswith("-"):
            if word in NAMES or word.endswith(".py") or word in ("python", "python3", "bash"):
                break
            continue  # the value of an option that is not known here
        option, equals, value = word.lstrip("-").partition("=")
        attached = option[1:] if not word.startswith("--") and not equals else ""
        name = names.get(option.replace("_", "-"))
        if name is None and attached.isdecimal() and option[0] in names:  # -N2
            name, value, equals = names[option[0]], attached, "="
        if name is None:
            continue
        if not equals:
            value = words[index] if index < len(words) else ""
            index += 1
        found[name] = value  # of several the last counts
    return found


def job_of(launcher: str, words: Sequence[str], path: str, where: str) -> Job:
    """The job that a launcher starts. Raises InputError for hosts that cannot be read."""
    options = options_of(launcher, words)
    folder = Path(path).parent
    config = options.get("config")
    if config and UNKNOWN not in config:
        options = settings_of_accelerate(folder / config) | options
    require(
        "exclude" not in options,
        "exclusions are not read",
        where=where,
        got=options.get("exclude"),
        expected="--include, or a hostfile without them",
    )
    hostfile = options.get("hostfile")
    if (
        hostfile
        and UNKNOWN not in hostfile
        and ("nodes" not in options or (folder / hostfile).exists())
    ):
        return Job(hosts=tuple(chosen_hosts(read_hostfile(str(folder / hostfile)), options)))
    listed = options.get("hosts") or options.get("include")
    if listed and UNKNOWN not in listed:
        return Job(hosts=tuple(listed_hosts(launcher, listed, where)))
    stated = options.get("nodes")
    nodes = whole(stated)
    if stated is None and launcher in ("torchrun", "accelerate"):
        nodes = 1  # their default
    unread = "" if stated is None or nodes is not None else stated.replace(UNKNOWN, "?")
    devices, device_type = whole(options.get("devices")), None
    if "gres" in options:
        devices, device_type = of_gres(options["gres"])
    processes = whole(options.get("processes"))
    if "gpus" in options:
        processes, device_type = of_gres(options["gpus"])
    per_task, tasks = whole(options.get("of_task")), whole(options.get("tasks"))
    if devices is None and per_task is not None and tasks is not None:
        devices = per_task * tasks
    names = options.get("names", "")
    known = tuple(node_names(names, where=where)) if names and UNKNOWN not in names else ()
    return Job(nodes, devices, processes, unread, device_type, known)


def chosen_hosts(hosts: Sequence[Host], options: Mapping[str, str]) -> list[Host]:
    """The hosts of a hostfile that a launcher takes: the first so many, with so many devices."""
    most = whole(options.get("devices"))
    chosen = hosts[: whole(options.get("nodes"))]
    return [
        host if most is None else replace(host, devices=min(most, host.devices or most))
        for host in chosen
    ]


def settings_of_accelerate(path: Path) -> dict[str, str]:
    """What a configuration of `accelerate` says of the size of a job."""
    document: Any = read_yaml(path)
    values = document if isinstance(document, dict) else {}
    keys = {"num_machines": "nodes", "num_processes": "processes"}
    return {name: str(values[key]) for key, name in keys.items() if key in values}


def listed_hosts(launcher: str, text: str, where: str) -> list[Host]:
    """The hosts of mpirun's `-H a:4,b:4`, or of DeepSpeed's `--include a:0,1@b:0`."""
    if launcher != "deepspeed":
        entries = entries_of(text, where)
        return [Host(entry.name, entry.processes or 1) for entry in entries]
    hosts = []
    for piece in text.split("@"):
        name, colon, slots = piece.partition(":")
        numbers = [number for number in slots.split(",") if number]
        usable = bool(name) and all(map(str.isdecimal, numbers)) and (numbers or not colon)
        if not usable:
            raise InputError("not usable", where=where, got=text, expected="HOST:0,1@HOST:0")
        hosts.append(Host(name, len(numbers) or None))
    return hosts


def of_gres(text: str) -> tuple[int | None, str | None]:
    """(number, type) of GPUs in `gpu:a100:4`, `a100:4` or `4`; None for what it does not tell."""
    for part in text.split(","):
        match = GRES.fullmatch(part.strip())
        if match:
            return int(match["number"]), None if match["type"] == "gpu" else match["type"]
    return None, None


def whole(text: str | None) -> int | None:
    """The whole number from 1 in a text; None where it has none."""
    usable = text is not None and text.isascii() and text.isdecimal() and len(text) <= 6
    return (int(text) or None) if text is not None and usable else None
