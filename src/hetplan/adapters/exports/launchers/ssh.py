"""Export for ssh: a script that calls `node.sh` on every host."""

import re
import shlex
from typing import NamedTuple

from hetplan.adapters.exports.grid import heading
from hetplan.adapters.exports.launchers.start import Start
from hetplan.errors import require

SUBMIT = """#!/usr/bin/env bash
{comments}
# Every host has this folder at the same place. A host that fails ends the others.
set -euo pipefail
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
{commands}
for _ in $(jobs -p); do wait -n; done
"""


def ssh(start: Start) -> dict[str, str]:
    """File name -> text: `submit.sh` starts `node.sh` on every host, and `hostfile` lists the hosts
    with their numbers of ranks."""
    nodes, hosts = start.plan.nodes, start.launcher.hosts
    require(
        len(hosts) > max(nodes),  # nodes count from 0; those without ranks have a host as well
        "too few hosts",
        where="launcher.hosts",
        got=len(hosts),
        expected=f"{max(nodes) + 1}, one per node of the cluster",
    )
    call = shlex.join([f"{start.folder}/node.sh", f"{start.folder}/plan.json", *start.words])
    folder = shlex.quote(start.root)
    targets = [target_of(host, f"launcher.hosts[{n}]") for n, host in enumerate(hosts)]
    address = targets[next(iter(nodes))].address
    commands = []
    for node in nodes:
        on_host = f"cd {folder} && NODE={node} MASTER_ADDR={address} bash {call}"
        ssh_words = shlex.join(["ssh", "-o", "BatchMode=yes", *targets[node].words])
        commands.append(f"{ssh_words} {shlex.quote(on_host)} &")
    script = SUBMIT.format(
        comments="\n".join(heading(start.plan, "ssh", "torchrun on every host")),
        commands="\n".join(commands),
    )
    slots = [f"{targets[node].login} slots={len(ranks)}\n" for node, ranks in nodes.items()]
    return {"submit.sh": script, "hostfile": "".join(slots)}


class Target(NamedTuple):
    """A host as ssh takes it."""

    login: str  # USER@ADDRESS, or the address alone
    address: str  # name or IP address
    port: str  # of ssh; empty: its own default

    @property
    def words(self) -> list[str]:
        """The words of ssh's command line that name the host."""
        return [*(["-p", self.port] if self.port else []), self.login]


def target_of(host: str, where: str) -> Target:
    """The host of a job file: [USER@]NAME[:PORT], with an IPv6 address in brackets where a port
    follows. Raises InputError for another port than 1 to 65535. where: its place, for messages."""
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
        address and is_port,
        "is not a host of ssh",
        where=where,
        got=host,
        expected="[USER@]HOST[:PORT]",
    )
    return Target(f"{user}{at}{address}", address, port or "")
