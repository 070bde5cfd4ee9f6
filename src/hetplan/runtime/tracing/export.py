"""A module's graph by torch.export, with gradients: regions under torch.no_grad() are told
apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hetplan.errors import UnsupportedError

LONGEST = 300


def exported(module: Any, arguments: Sequence[Any], name: str) -> Any:
    """torch.export's program. Raises UnsupportedError with the first line of what torch, or the
    module, says."""
    was_training = module.training
    try:
        with torch.enable_grad():
            return torch.export.export(module, tuple(arguments), strict=False)
    except Exception as error:  # torch's or the module's: whatever is raised is told
        first = next((line for line in str(error).splitlines() if line.strip()), "no message")
        raise UnsupportedError(
            f"torch.export finds no graph: {type(error).__name__}: {first.strip()[:LONGEST]}",
            where=name,
        ) from error
    finally:
        module.train(was_training)
