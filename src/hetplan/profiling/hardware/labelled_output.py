"""Tells which host printed which line, in the output of a command that ran on several hosts.

`HOST: line`                     pdsh, clush, `srun -l` (which writes the number of a task)
`HOST | CHANGED | rc=0 >>`       Ansible, before the lines of a host
`HOST | CHANGED | rc=0 | (stdout) line\\nline`   Ansible with `--one-line`
`HOST`, `node[01-04] (4)`        a line of its own between rules, as of `clush -b` and `dshbak -c`,
                                 or without rules, as of a loop in a shell
`==> FILE <==`                   `head` and `tail` of several files
"""

import re
from collections.abc import Callable, Iterable, Iterator

from hetplan.profiling.hardware.node_lists import node_names
from hetplan.text import grouped

HOST = r"[A-Za-z0-9_](?:[\w.\-]|\[[\d,\-]+\])*"
PREFIXED = re.compile(rf"\s*(?P<host>{HOST}):\s(?P<line>.*)")
ANSIBLE = re.compile(rf"(?P<host>{HOST}) \| (?P<rest>[A-Z]+!? (?:\||=>).*)")
WORKED = re.compile(r"(?:CHANGED|SUCCESS) \| rc=0 (?:>>|\| \(stdout\))(?P<lines>.*)")
OF_A_FILE = re.compile(r"==> (?P<host>\S+) <==")
# A name between marks such as `=== node1 ===`; pdsh and clush write the number of hosts behind it.
HEADING = re.compile(rf"[=#*>-]*\s*(?P<host>{HOST}(?:,{HOST})*):?\s*(?:\(\d+\))?\s*[=#*<-]*")
RULE = re.compile(r"[=#*\s-]*")


def lines_of_hosts(text: str, is_content: Callable[[str], bool]) -> dict[str, list[str]]:
    """Host -> the lines that it printed, without blanks around them; the host "" has the lines
    that name none. Raises InputError for a node list that is none.

    is_content: whether a line is of the command's own output, so that a single word of it is taken
    for no host. A word before a colon is taken for a host only where such content follows it
    somewhere, as messages have colons too.
    """
    lines = [line.strip() for line in text.splitlines()]
    prefixed = [match for match in map(PREFIXED.fullmatch, lines) if match]
    has_prefixes = any(is_content(match["line"].strip()) for match in prefixed)
    return grouped(
        (host, line) for hosts, line in _labelled(lines, has_prefixes, is_content) for host in hosts
    )


def _labelled(
    lines: Iterable[str], has_prefixes: bool, is_content: Callable[[str], bool]
) -> Iterator[tuple[list[str], str]]:
    """(the hosts, a line that they printed) for each line."""
    hosts = [""]
    for line in lines:
        prefixed = PREFIXED.fullmatch(line) if has_prefixes else None
        ansible = ANSIBLE.fullmatch(line)
        heading = OF_A_FILE.fullmatch(line) or HEADING.fullmatch(line)
        if RULE.fullmatch(line):
            continue
        if prefixed:
            yield named(prefixed["host"]), prefixed["line"].strip()
        elif is_content(line):
            yield hosts, line
        elif ansible:
            hosts = named(ansible["host"])
            worked = WORKED.fullmatch(ansible["rest"])
            said = worked["lines"] if worked else ansible["rest"]
            for part in said.split("\\n"):
                yield hosts, part.strip()
        elif heading and not has_prefixes:
            hosts = named(heading["host"])
            for host in hosts:
                yield [host], ""
        else:
            yield hosts, line


def named(hosts: str) -> list[str]:
    """The names of a list of hosts."""
    return node_names(hosts, where="name of a host")
