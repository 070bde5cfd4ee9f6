"""The text about a fault in hetplan, with the facts that a bug report needs, on one line."""

import platform
import traceback
from importlib.metadata import version
from pathlib import Path

from hetplan.errors import one_line

PACKAGE = Path(__file__).parents[1]


def fault_text(error: Exception) -> str:
    """The error, the innermost line of hetplan in its traceback, and the versions."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if PACKAGE in Path(frame.filename).parents]
    place = ""
    if ours:
        place = f" in {Path(ours[-1].filename).relative_to(PACKAGE)}, line {ours[-1].lineno}"
    versions = f"hetplan {version('hetplan')}, Python {platform.python_version()}"
    request = f"a fault of hetplan, please report it: {versions}; HETPLAN_DEBUG=1 shows more"
    return one_line(f"{type(error).__name__}: {error}{place} ({request})")
