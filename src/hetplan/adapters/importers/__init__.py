"""Imports other projects' measurements and descriptions as hetplan's files, for
`hetplan profile import`.

`READERS` has a function (path, settings) -> `Imported` for each kind of file. A reader's errors
name the file and the place in it.
"""

import os
from collections.abc import Callable

from hetplan.adapters.importers import graphs, profilers, sailor_cluster
from hetplan.adapters.importers.common import Imported, Settings
from hetplan.errors import look_up, require
from hetplan.schema import derived

READERS: dict[str, Callable[[str, Settings], Imported]] = {
    "sailor": profilers.read_sailor,
    "pipedream": graphs.read_pipedream,
    "piper": graphs.read_piper,
    "dnn-partitioning": graphs.read_dnn_partitioning,
    "metis": profilers.read_metis,
    "calculon": profilers.read_calculon,
    "deepspeed": profilers.read_deepspeed,
}
# Kinds that bring links beside a profile -> the reader of these as a cluster file.
CLUSTER_READERS: dict[str, Callable[[str, Settings], Imported]] = {
    "sailor": sailor_cluster.read_sailor_cluster,
}


def import_cluster(kind: str, path: str | os.PathLike[str], settings: Settings) -> Imported:
    """The cluster file of the links that come with a profile. Raises InputError."""
    require(
        kind in CLUSTER_READERS,
        "brings no links",
        where="--cluster-output",
        got=kind,
        expected=" or ".join(CLUSTER_READERS),
    )
    where = os.fspath(path)
    with derived(where):
        return CLUSTER_READERS[kind](where, settings)


def import_file(kind: str, path: str | os.PathLike[str], settings: Settings) -> Imported:
    """The content of a file as a document of hetplan's.

    kind: a key of `READERS`. Raises InputError with file, place, got and expected.
    """
    read = look_up("unknown kind of file", kind, READERS)
    where = os.fspath(path)
    with derived(where):
        return read(where, settings)
