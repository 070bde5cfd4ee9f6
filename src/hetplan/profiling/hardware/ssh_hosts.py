"""Hosts that are asked over ssh: their GPUs, the links within them, and the network between them.

A host needs sshd, and a key that lets this user in without a password. hetplan need not be
installed on it: a shell script reads what `nvidia-smi` and `/sys` say. Where the hosts have
python3, the rate and the latency of the network are measured between the first host and each other
one.
"""

import re
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from hetplan.errors import InputError, one_line, require
from hetplan.profiling.hardware.gpu_lists import gpu_list, host_with
from hetplan.profiling.hardware.hosts import (
    Host,
    check_number_of_hosts,
    fastest_port,
    several_types,
)
from hetplan.profiling.hardware.network_probe import SINK, SOURCE
from hetplan.profiling.hardware.topologies import topology_of

CONNECT_SECONDS = 10  # ssh's patience with a host that does not answer
ANSWER_SECONDS = 60.0  # until a host has answered; nvidia-smi takes seconds on a cold machine
PROBE_SECONDS = 30.0  # until the network between two hosts is measured
AT_ONCE = 32  # hosts that are asked at the same time
# Names by which a machine reaches itself alone.
OWN_NAMES = re.compile(r"localhost(\..*)?|127\..*|::1|0\.0\.0\.0", re.IGNORECASE)
# What the programs of `network_probe` print.
PORT_LINE = re.compile(r"port (\d{1,5})$")
NETWORK_LINE = re.compile(r"network ([0-9.e+-]+) ([0-9.e+-]+)$")

# Sections of the answer begin with their names. Interfaces without a device are bridges and the
# like, whose speeds are no cable's; those of bonds are.
QUESTION = """\
echo '== gpus'
nvidia-smi --query-gpu=name,memory.total --format=csv 2>&1
echo '== list'
nvidia-smi -L 2>/dev/null
echo '== topology'
nvidia-smi topo -m 2>/dev/null
echo '== infiniband'
cat /sys/class/infiniband/*/ports/*/rate 2>/dev/null
echo '== ethernet'
for interface in /sys/class/net/*; do
    if [ -e "$interface/device" ] || [ -e "$interface/bonding" ]; then
        cat "$interface/speed" 2>/dev/null
    fi
done
echo '== address'
set -- $SSH_CONNECTION
echo "$3"
echo '== end'
"""


class Target(NamedTuple):
    """A host as ssh takes it."""

    login: str  # USER@ADDRESS, or the address alone
    address: str  # name or IP address
    port: str  # port of ssh; empty: the default of ssh

    @property
    def words(self) -> list[str]:
        """The words of ssh's command line that name the host."""
        return [*(["-p", self.port] if self.port else []), self.login]


def target_of(host: str, where: str) -> Target:
    """The host of a text [USER@]NAME[:PORT], with an IPv6 address in brackets where a port follows.
    Raises InputError for another port than 1 to 65535. where: its place, for messages."""
    user, at, place = host.rpartition("@")
    bracketed = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](?::(.*))?", place)
    if bracketed:
        address, port = bracketed[1], bracketed[2]
    elif place.count(":") == 1:
        address, port = place.split(":")
    else:  # a name or an IPv6 address
        address, port = place, None
    is_port = port is None or (re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536)
    require(
        address and is_port and not host.startswith("-") and not address.startswith("-"),
        "is not a host of ssh",
        where=where,
        got=host,
        expected="[USER@]HOST[:PORT]",
    )
    return Target(f"{user}{at}{address}", address, port or "")


class Answer(NamedTuple):
    """The answer of a host."""

    host: Host
    address: str  # the IP address by which ssh reached it


def ask_hosts(text: str, where: str) -> list[Host]:
    """The hosts of a text "HOST,HOST", asked over ssh, with the network measured between them.

    Raises InputError that says of every host why it could not be asked. where: the place of the
    text, for messages.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    require(names, "no host", where=where, got=text, expected="[USER@]HOST[:PORT],…")
    check_number_of_hosts(len(names), where)
    again = sorted({name for name in names if names.count(name) > 1})
    require(not again, "a host stands twice", where=where, got=", ".join(again))
    targets = [target_of(name, where) for name in names]
    for target in targets:
        require(
            len(targets) == 1 or not OWN_NAMES.fullmatch(target.address),
            "other hosts cannot reach a host by this name",
            where=where,
            got=target.address,
            expected="the name or the address by which all hosts reach it",
        )
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(answer_or_reason, targets))
    if len(targets) > 1:
        answers = [
            several_types(answer.host).what
            if isinstance(answer, Answer) and answer.host.parts
            else answer
            for answer in answers
        ]
    reasons = [
        f"{target.login}: {answer}"
        for target, answer in zip(targets, answers, strict=True)
        if isinstance(answer, str)
    ]
    require(not reasons, f"cannot be asked: {'; '.join(reasons)}", where=where)
    return with_network(targets, [answer for answer in answers if isinstance(answer, Answer)])


def answer_or_reason(target: Target) -> Answer | str:
    """The host's answer, or as a text why there is none."""
    try:
        return ask(target)
    except InputError as error:
        return str(error)


def ssh_command(target: Target, *words: str) -> list[str]:
    """The command line that runs a command on a host, which never asks for a password."""
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
    return ["ssh", *options, *target.words, *words]


def ask(target: Target) -> Answer:
    """Ask one host. Raises InputError where it cannot be reached or understood."""
    try:
        done = subprocess.run(
            ssh_command(target, "sh", "-s"),
            input=QUESTION.encode(),
            capture_output=True,
            timeout=ANSWER_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise InputError("this machine has no ssh") from None
    except subprocess.TimeoutExpired:
        raise InputError(f"no answer within {ANSWER_SECONDS:g} s") from None
    sections = sections_of(done.stdout.decode("utf-8", "replace"))
    if "end" not in sections:
        said = one_line(done.stderr.decode("utf-8", "replace").strip())[-200:]
        raise InputError(said or f"ssh ended with exit code {done.returncode}")
    return answer_of(target.address, sections)


def sections_of(text: str) -> dict[str, list[str]]:
    """Name -> lines of each section of an answer. What a host's login prints before the first one
    is passed over."""
    sections: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("== "):
            sections[line.removeprefix("== ")] = []
        elif sections and line.strip():
            list(sections.values())[-1].append(line)
    return sections


def answer_of(name: str, sections: dict[str, list[str]]) -> Answer:
    """The answer of the host `name`."""
    queried = gpu_list(sections["gpus"])
    gpus = queried.gpus
    listed = gpu_list(sections["list"]).gpus
    if any(gpu.divided for gpu in listed):  # a query does not tell the slices of MIG
        gpus = listed
    network = fastest_port(sections["infiniband"], sections["ethernet"])
    network_from = ""
    if network:
        line = f"links between nodes are assumed: {network:g} Gbit/s"
        network_from = f"{line}, the fastest port of {name}; --network says otherwise"
    if gpus:
        host = host_with(name, gpus)
        intra, intra_from = links_within(name, host.device, len(gpus), sections["topology"])
        host = replace(host, intra_gbit=intra, intra_from=intra_from)
    else:
        said = one_line(" ".join(queried.others))[:100]
        host = Host(name, devices_from=f"nvidia-smi there says {said or 'nothing'}")
    host = replace(host, network_gbit=network, network_from=network_from)
    return Answer(host, "".join(sections["address"]).strip() or name)


def links_within(
    name: str, device: str | None, devices: int, matrix: Sequence[str]
) -> tuple[float | None, str]:
    """(Gbit/s between two GPUs of a host, the line that says what it follows from); None where the
    host's matrix says nothing."""
    if device is None or devices == 1 or not matrix:
        return None, ""
    topology = topology_of("\n".join(matrix), f"nvidia-smi topo -m of {name}")
    if topology.gpus == 1:
        return None, ""
    gbit, basis = topology.fabric(device)
    line = f"links within a node are assumed: {gbit:g} Gbit/s {basis}; --intra says otherwise"
    return gbit, line


def with_network(targets: Sequence[Target], answers: Sequence[Answer]) -> list[Host]:
    """The hosts, with the network that was measured between the first one and each other one.

    The first host has the highest rate and the lowest latency of these. Where a link could not be
    measured, the host keeps the rate of its fastest port.
    """
    hosts = [answer.host for answer in answers]
    first = targets[0]
    measured: list[Network] = []
    for number in range(1, len(hosts)):
        network = measured_network(first, targets[number], answers[number].address)
        if network is None:
            continue
        measured.append(network)
        hosts[number] = with_measured(hosts[number], network)
    if measured:
        best = Network(max(n.gbit for n in measured), min(n.latency_us for n in measured))
        hosts[0] = with_measured(hosts[0], best)
    return hosts


class Network(NamedTuple):
    """A measured link between two hosts."""

    gbit: float  # Gbit/s of one TCP connection
    latency_us: float  # half of a round trip of a byte


def with_measured(host: Host, network: Network) -> Host:
    """The host with a measured network, which is no assumption."""
    return replace(
        host, network_gbit=network.gbit, network_latency_us=network.latency_us, network_from=""
    )


def measured_network(source: Target, sink: Target, address: str) -> Network | None:
    """The link from one host to another; None where it cannot be measured, as without python3 or
    behind a firewall. address: the IP address of the second host."""
    try:
        with subprocess.Popen(
            ssh_command(sink, "python3", "-"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as receiving:
            assert receiving.stdin is not None and receiving.stdout is not None
            receiving.stdin.write(SINK.encode())
            receiving.stdin.close()
            port = line_of(PORT_LINE, receiving.stdout)
            if port is None:
                return None
            program = f"ADDRESS, PORT = {address!r}, {port[1]}\n{SOURCE}"
            sending = subprocess.run(
                ssh_command(source, "python3", "-"),
                input=program.encode(),
                capture_output=True,
                timeout=PROBE_SECONDS,
                check=False,
            )
            receiving.kill()
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = line_of(NETWORK_LINE, sending.stdout.splitlines())
    if found is None:
        return None
    return Network(round(float(found[1]), 3), round(float(found[2]), 1))


def line_of(form: re.Pattern[str], output: Iterable[bytes]) -> re.Match[str] | None:
    """The first line of a program's output with this form; None without one. A host's login may
    print lines of its own."""
    for text in output:
        match = form.match(text.decode("utf-8", "replace"))
        if match:
            return match
    return None
