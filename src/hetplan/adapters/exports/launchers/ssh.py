"""Export for ssh: scripts that run `node.sh` on every host, and end it when they end."""

import shlex

from hetplan.adapters.exports.grid import heading
from hetplan.adapters.exports.launchers.start import Start
from hetplan.errors import require
from hetplan.profiling.hardware.ssh_hosts import target_of

# The hosts' commands read from a pipe that this script alone keeps open. So they notice its end,
# whatever ends it: killing ssh here would not end what it has started there.
SUBMIT = """#!/usr/bin/env bash
{comments}
# Every host has this folder at the same place. A host that fails ends the others.
set -euo pipefail
pipe=$(mktemp -u)
mkfifo "$pipe"
exec 8<>"$pipe" 9<"$pipe"
rm "$pipe"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
{commands}
for _ in $(jobs -p); do wait -n; done
"""

ATTENDED = """#!/usr/bin/env bash
# Runs node.sh until it ends, or until the script that has started it over ssh is gone.
set -uo pipefail
exec 3<&0
bash "$(dirname "$0")/node.sh" "$@" </dev/null 3<&- &
node=$!
{ cat <&3; kill "$node"; } >/dev/null 2>&1 &
trap 'kill $! 2>/dev/null' EXIT
wait "$node"
"""


def ssh(start: Start) -> dict[str, str]:
    """File name -> text: `submit.sh` starts `attended.sh` on every host, which runs `node.sh`, and
    `hostfile` lists the hosts with their numbers of ranks."""
    nodes, hosts = start.plan.nodes, start.launcher.hosts
    require(
        len(hosts) > max(nodes),  # nodes count from 0; those without ranks have a host as well
        "too few hosts",
        where="launcher.hosts",
        got=len(hosts),
        expected=f"{max(nodes) + 1}, one per node of the cluster",
    )
    call = shlex.join(
        [f"{start.folder}/attended.sh", f"{start.folder}/plan.json", *start.run_options]
    )
    folder = shlex.quote(start.root)
    targets = [target_of(host, f"launcher.hosts[{n}]") for n, host in enumerate(hosts)]
    address = targets[next(iter(nodes))].address
    commands = []
    for node in nodes:
        on_host = f"cd {folder} && NODE={node} MASTER_ADDR={address} bash {call}"
        ssh_words = shlex.join(["ssh", "-o", "BatchMode=yes", *targets[node].words])
        commands.append(f"{ssh_words} {shlex.quote(on_host)} <&9 8>&- &")
    script = SUBMIT.format(
        comments="\n".join(heading(start.plan, "ssh", "torchrun on every host")),
        commands="\n".join(commands),
    )
    slots = [f"{targets[node].login} slots={len(ranks)}\n" for node, ranks in nodes.items()]
    return {"submit.sh": script, "attended.sh": ATTENDED, "hostfile": "".join(slots)}
