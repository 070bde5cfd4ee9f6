"""Imports other projects' measurements and descriptions as hetplan's files, for
`hetplan profile import`.

`READERS` has a function (path, settings) -> `Imported` for each kind of file. A reader's errors
name the file and the place in it.
"""

import os
from collections.abc import Callable

from hetplan.adapters.importers import graphs, profilers
from hetplan.adapters.importers.common import Imported, Settings
from hetplan.errors import look_up
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


def import_file(kind: str, path: str | os.PathLike[str], settings: Settings) -> Imported:
    """The content of a file as a document of hetplan's.

    kind: a key of `READERS`. Raises InputError with file, place, got and expected.
    """
    read = look_up("unknown kind of file", kind, READERS)
    where = os.fspath(path)
    with derived(where):
        return read(where, settings)
