"""Types of the command line's fixtures (see tests/cli/conftest.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ran:
    """What one call gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as one JSON document."""
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line of a failed call; nothing else may have been printed."""
        assert self.code == 2, (self.code, self.err)
        assert self.out == ""
        assert self.err.count("\n") == 1 and self.err.endswith("\n"), self.err
        assert self.err.startswith("hetplan: error: ")
        return self.err.removeprefix("hetplan: error: ").rstrip("\n")


Call = Callable[..., Ran]
Write = Callable[..., Path]
