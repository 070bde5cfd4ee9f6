"""Threads of numpy's matrix products: ranks that share a machine must not all take all of its
cores.

numpy has no call for it. Its wheels bundle OpenBLAS, whose own function is looked up in the library
that is loaded; other libraries are left to their environment variables (OMP_NUM_THREADS and the
like).
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

MAPS = Path("/proc/self/maps")
SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def limit_threads(threads: int) -> bool:
    """Whether a library was found whose products now use at most so many threads."""
    loaded = MAPS.read_text() if MAPS.exists() else ""
    found = False
    for path in sorted(set(re.findall(r"/\S*openblas\S*\.so\S*", loaded))):
        library = ctypes.CDLL(path)
        for name in SETTERS:
            if hasattr(library, name):
                getattr(library, name)(threads)
                found = True
                break
    return found
