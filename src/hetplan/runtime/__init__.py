"""The execution of plans. Ranks need torch; what asks about plans does not."""

from typing import Any


def distribute(module: Any, plan: Any, *, backend: str = "hetplan", **options: Any) -> Any:
    """This rank's part of a model under a plan.

    module: a torch module for a plan of stages (see `hetplan.runtime.engine.distributed`); for a
    plan with an SPMD program a single-device program, or a module with data of its own (see
    `hetplan.runtime.spmd.distributed`). backend: "torch" for stock torch's engines
    (`hetplan.runtime.stock`).
    """
    from hetplan.runtime.execution.choice import engine_of

    return engine_of(plan, "torch" if backend == "torch" else "hetplan").distribute(
        module, plan, **options
    )
