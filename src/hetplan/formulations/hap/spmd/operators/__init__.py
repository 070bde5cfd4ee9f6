"""The operators that programs are made of, by name."""

from __future__ import annotations

from functools import cache

from hetplan.errors import InputError
from hetplan.formulations.hap.spmd.operators.base import Operator


@cache
def operators() -> dict[str, Operator]:
    """All operators by kind."""
    from hetplan.formulations.hap.spmd.operators import (
        attention,
        contraction,
        elementwise,
        experts,
        images,
        norms,
        rearrange,
        tables,
    )

    modules = (attention, contraction, elementwise, experts, images, norms, rearrange, tables)
    return {op.kind: op for module in modules for op in module.OPERATORS}


def operator(kind: str) -> Operator:
    """The operator of that kind; raises InputError listing the known ones."""
    if kind not in operators():
        raise InputError(
            "unknown operator", got=kind, expected=f"one of {', '.join(sorted(operators()))}"
        )
    return operators()[kind]
