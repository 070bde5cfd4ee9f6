"""The engine of a plan: the only place that chooses one."""

from hetplan.errors import UnsupportedError, require
from hetplan.plans.plan import Plan
from hetplan.profiling.models.model import Model
from hetplan.runtime.execution.programs import ProgramEngine
from hetplan.runtime.execution.protocol import Backend, Engine
from hetplan.runtime.execution.stages import StageEngine
from hetplan.runtime.execution.stock import StockEngine


def engine_of(plan: Plan, backend: Backend = "hetplan") -> Engine:
    """The engine that executes the plan.

    backend: "torch" for stock torch's engines. Raises UnsupportedError for a plan with an SPMD
    program on them.
    """
    if plan.schedule != "spmd":
        return StockEngine() if backend == "torch" else StageEngine()
    require(
        backend == "hetplan",
        "stock torch has no engine for this plan",
        where=plan.name,
        got="programs",
        expected="hetplan's own engine (--backend hetplan)",
        kind=UnsupportedError,
    )
    return ProgramEngine()


def refusal(plan: Plan, model: Model) -> str | None:
    """The reason why `hetplan run` refuses the plan, and the expected input; None where it runs
    the plan."""
    try:
        engine_of(plan).check_model(plan, model)
    except UnsupportedError as error:
        return str(error)
    return None
