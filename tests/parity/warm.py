"""What torch imports when it is first used in a way, done before processes are forked: hundreds of modules."""

from __future__ import annotations

import torch

from hetplan.runtime.execution.chain import describe
from hetplan.runtime.execution.distributed import example_of
from hetplan.runtime.references.build import stand_in


def used_once() -> None:
    """A chain is described on the meta device, a model trained for a step."""
    torch.set_num_threads(1)
    names = ["first", "between", "last"]
    with torch.device("meta"):
        module = stand_in(names)
    describe(module, names, *example_of(module))
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.square().sum().backward()
    torch.optim.AdamW([parameter]).step()
