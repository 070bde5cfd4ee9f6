"""What stands behind an argument: a file, standard input (`-`), or a name in the packaged
library."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetplan.cli.completion import instance_names
from hetplan.cli.options import OwnClusterOption, OwnModelOption, ProfileOption
from hetplan.errors import InputError
from hetplan.files import MAX_BYTES, parse_json, read_json
from hetplan.instances.library import Instance, find, parse_instance
from hetplan.names import unknown_name
from hetplan.profiling import cluster as clusters
from hetplan.profiling.cluster import Cluster
from hetplan.profiling.efficiency import LearnedLinks, load_link_efficiency
from hetplan.profiling.workload import Workload, make_workload
from hetplan.runtime.plan import Plan


def read_document(argument: str) -> tuple[Any, str]:
    """Parsed JSON of a file or of standard input, and the name to use in errors; raises
    InputError."""
    if argument != "-":
        return read_json(argument), argument
    try:
        content = sys.stdin.buffer.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where="stdin") from None
    if len(content) > MAX_BYTES:
        raise InputError("too large", where="stdin", expected=f"at most {MAX_BYTES} bytes")
    return parse_json(content, where="stdin"), "stdin"


def open_instance(argument: str) -> Instance:
    """The instance in a file, on standard input or in the library; raises InputError."""
    if argument != "-" and not os.path.exists(argument):
        entry = find(argument)
        if entry is not None:
            return entry.load()
        if Path(argument).suffix not in (".json", ".gz"):
            raise unknown_name(
                "neither a file nor an instance of the library:",
                argument,
                instance_names(),
                see="a name from `hetplan instances list`",
            )
    value, where = read_document(argument)
    return parse_instance(value, where=where)


def open_cluster(argument: str) -> Cluster:
    """A cluster file, or one of the examples by name; raises InputError."""
    return clusters.open_cluster(argument, "neither a file nor an example cluster:")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What may stand in place of the cluster, the model and the profile that a plan names."""

    cluster: OwnClusterOption = None
    model: OwnModelOption = None
    profile: ProfileOption = None

    def workload(self, plan: Plan) -> Workload:
        """The workload that a plan was made for, with what is given here; raises InputError."""
        return make_workload(
            self.model or plan.workload.model,
            open_cluster(self.cluster or plan.workload.cluster),
            plan.workload.global_batch,
            sequence=plan.workload.sequence,
            precision=plan.workload.precision,
            profile=self.profile,
        )


def with_links(workload: Workload, path: Path | None) -> Workload:
    """The workload with a learned efficiency of its links, where a file is given; raises
    InputError."""
    if path is None:
        return workload

    return replace(workload, links=LearnedLinks(load_link_efficiency(path)))
