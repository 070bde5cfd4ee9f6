"""Ranks by fork: torch is imported once, and one process group serves many cases.

`main([TARGET, FOLDER])` runs the function `work(rank, world, folder)` of the module `TARGET`, or
another one that `TARGET` names behind a colon, in every rank of each world size that the module
lists as `WORLDS`. A rank that fails writes its traceback to FOLDER/failed-WORLD-RANK.txt.

PARITY_DEVICE in the environment: "cuda" has all ranks on one GPU, "cuda each" each on its own, as
far as there are.
PARITY_RANKS: the largest world size.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetplan.runtime.engine.chain import describe
from hetplan.runtime.engine.distributed import example_of
from hetplan.runtime.references import stand_in


def used_once() -> None:
    """Before processes are forked: torch imports hundreds of modules when it first describes a
    chain on the meta device and trains for a step. No step where there is a GPU: the first one
    begins autograd's threads for it, behind which no rank can be forked."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        module = stand_in(["first", "between", "last"])
    describe(module, list(module.layers), example_of(module))
    if not torch.cuda.is_available():
        parameter = torch.nn.Parameter(torch.ones(1))
        parameter.square().sum().backward()
        torch.optim.AdamW([parameter]).step()


def rank_main(work: Any, rank: int, world: int, folder: Path) -> None:
    """One rank: joins the group, works, leaves."""
    if os.environ.get("PARITY_DEVICE") == "cuda each":
        os.environ["LOCAL_RANK"] = str(rank)
    store = dist.FileStore(str(folder / f"store-{work.__name__}-{world}"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=600)
    )
    work(rank, world, folder)
    dist.barrier()
    dist.destroy_process_group()


def largest() -> int:
    """The largest world size that is asked for."""
    return int(os.environ.get("PARITY_RANKS", "8"))


def main(arguments: list[str]) -> int:
    """All world sizes, one after the other."""
    (name, _, function), folder = arguments[0].partition(":"), Path(arguments[1])
    target = importlib.import_module(name)
    getattr(target, "prepare", used_once)()
    work = getattr(target, function or "work")
    failed = 0
    for world in [world for world in target.WORLDS if world <= largest()]:
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    rank_main(work, rank, world, folder)
                    code = 0
                except BaseException:  # noqa: BLE001 (what a rank dies of is told by the test)
                    (folder / f"failed-{world}-{rank}.txt").write_text(traceback.format_exc())
                finally:
                    os._exit(code)
            children.append(child)
        failed += sum(os.waitpid(child, 0)[1] != 0 for child in children)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
