"""Others' measurements and descriptions as hetplan's files, for `hetplan profile import`.

Every kind has a function that reads one format: (path, settings) -> `Imported`. Errors name file
and place.
"""

import os
from collections.abc import Callable

from hetplan.adapters.importers import graphs, profilers
from hetplan.adapters.importers.common import Imported, Settings
from hetplan.errors import look_up

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
    """Read `path` as a file of that kind; raises InputError with file, place, got and expected."""
    return look_up("unknown kind of file", kind, READERS)(os.fspath(path), settings)
