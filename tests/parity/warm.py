"""What is done once, before processes are forked: torch imports hundreds of modules when it is
first used in a way, and a model's shapes are found on the meta device, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from hetplan.runtime.execution import chain
from hetplan.runtime.execution.distributed import example_of
from hetplan.runtime.references.build import stand_in

Outputs = tuple[tuple[tuple[int, ...], Any], ...]
_known: dict[Any, Outputs] = {}
_outputs_of = chain.outputs_of


def used_once() -> None:
    """A chain is described on the meta device, a model trained for a step."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        module = stand_in(["first", "between", "last"])
    chain.describe(module, list(module.layers), *example_of(module))
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.square().sum().backward()
    torch.optim.AdamW([parameter]).step()


def remembered(
    names: Sequence[str], layers: Sequence[nn.Module], example: Tensor, compute: Any
) -> Outputs:
    """`outputs_of`, once for all layers with the same parameters: forked ranks need not find them
    again."""
    held = [
        (type(layer), n, p.shape, p.dtype) for layer in layers for n, p in layer.named_parameters()
    ]
    key = (
        tuple(names),
        tuple(held),
        example.shape[1:],
        example.dtype,
        compute,
        torch.get_default_dtype(),
    )
    if key not in _known:
        _known[key] = _outputs_of(names, layers, example, compute)
    return _known[key]


def remember(models: Iterable[tuple[Any, Sequence[str], Any]]) -> None:
    """Find the shapes of models (how they are made, names of layers, type) now, and keep them for
    forked ranks."""
    patch.object(chain, "outputs_of", remembered).start()
    for make, names, dtype in models:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            module = make()
        chain.describe(module, names, *example_of(module))
