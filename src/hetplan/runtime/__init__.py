"""Plans: the one representation of what to run, for every family. Executing them needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetplan.runtime.execution.distributed import Distributed


def distribute(module: Any, plan: Any, **options: Any) -> Distributed:
    """This rank's part of a torch module under a plan; see `hetplan.runtime.execution.distributed`."""
    from hetplan.runtime.execution.distributed import Distributed

    return Distributed(module, plan, **options)
