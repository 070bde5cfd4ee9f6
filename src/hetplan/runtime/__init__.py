"""The execution of plans. A rank needs torch; modules that only answer questions about plans do
not import it."""

from typing import Any


def distribute(module: Any, plan: Any, *, backend: str = "hetplan", **options: Any) -> Any:
    """This rank's part of a model under a plan.

    module: for a plan of stages a torch module (see `hetplan.runtime.engine.distributed`). For a
    plan with an SPMD program a single-device program, or a torch module that offers
    `batch(step, first, last)` (see `hetplan.runtime.spmd.distributed`).
    backend: "hetplan" for hetplan's own engines; "torch" for stock torch's engines
    (`hetplan.runtime.stock`).
    """
    from hetplan.runtime.execution.choice import engine_of

    engine = engine_of(plan, "torch" if backend == "torch" else "hetplan")
    return engine.distribute(module, plan, **options)
