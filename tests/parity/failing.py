"""Labels that the last stage cannot take: what its rank says, and what the other one says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fakes.losses import RIGHT, Net, plan_of, rows
from hetplan.runtime import distribute

WORLDS = (2,)


def work(rank: int, world: int, folder: Path) -> None:
    """Both ranks end by themselves, since no collective is possible behind a failure."""
    model: Any = distribute(Net(RIGHT["boolean mean"]), plan_of("pp"), example=rows(9, 0, 1))
    model.train_step(lambda *part: rows(1, *part))

    def data(first: int, last: int) -> dict[str, Any]:
        of_rows = rows(1, first, last)
        if first == 3:
            of_rows["labels"][:] = 99
        return of_rows

    try:
        model.train_step(data)
    except Exception as error:  # noqa: BLE001 (what it is, the test says)
        text = f"{type(error).__name__}: {error} {getattr(error, '__notes__', [])}"
        (folder / f"told-{rank}.txt").write_text(text)
    os._exit(0)
