"""hetplan: plan the training of one model on mixed GPUs, with a proven bound on every plan.

    import hetplan as hp
    planning = hp.plan("gpt2-medium", "amp-mixed", global_batch=32)
    planning.best.plan, planning.best.predicted_seconds, planning.best.bound

`__all__` lists the public names. Importing hetplan loads none of them; each is loaded from its
module when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetplan.adapters.exports import export
    from hetplan.planner.candidate import Candidate
    from hetplan.planner.fits import Fit, fits
    from hetplan.planner.library import plan
    from hetplan.planner.planning import Planning
    from hetplan.plans.plan import Plan, load_plan, save_plan
    from hetplan.profiling.hardware.cluster import Cluster, load_cluster
    from hetplan.profiling.models.model import Model, load_model
    from hetplan.replays.chains import Replay
    from hetplan.replays.replay import replay
    from hetplan.runtime import distribute

__version__ = "0.1.0"

# Public name -> the module that defines it.
_MODULE_OF = {
    "Candidate": "hetplan.planner.candidate",
    "Cluster": "hetplan.profiling.hardware.cluster",
    "Fit": "hetplan.planner.fits",
    "Model": "hetplan.profiling.models.model",
    "Plan": "hetplan.plans.plan",
    "Planning": "hetplan.planner.planning",
    "Replay": "hetplan.replays.chains",
    "distribute": "hetplan.runtime",
    "export": "hetplan.adapters.exports",
    "fits": "hetplan.planner.fits",
    "load_cluster": "hetplan.profiling.hardware.cluster",
    "load_model": "hetplan.profiling.models.model",
    "load_plan": "hetplan.plans.plan",
    "plan": "hetplan.planner.library",
    "replay": "hetplan.replays.replay",
    "save_plan": "hetplan.plans.plan",
}

__all__ = [
    "Candidate",
    "Cluster",
    "Fit",
    "Model",
    "Plan",
    "Planning",
    "Replay",
    "__version__",
    "distribute",
    "export",
    "fits",
    "load_cluster",
    "load_model",
    "load_plan",
    "plan",
    "replay",
    "save_plan",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module. Python calls this for names that are not loaded yet."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hetplan' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    """The names of this module, with the public names that are not loaded yet."""
    return sorted({*globals(), *__all__})
