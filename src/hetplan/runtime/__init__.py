"""Plans: the one representation of what to run, for every family. Executing them needs torch."""

from typing import Any


def distribute(module: Any, plan: Any, *, backend: str = "hetplan", **options: Any) -> Any:
    """This rank's part of a torch module under a plan; see `hetplan.runtime.engine.distributed`.
    backend: "torch" for stock torch's engines (`hetplan.runtime.stock`).

    Of a single-device program under a plan with the schedule `spmd`:
    `hetplan.runtime.spmd.distributed`.
    """
    from hetplan.formulations.hap.spmd.program import SingleProgram
    from hetplan.runtime.engine.distributed import Distributed
    from hetplan.runtime.spmd.distributed import DistributedProgram, ProgramModel
    from hetplan.runtime.stock import Stock

    if isinstance(module, SingleProgram | ProgramModel):
        return DistributedProgram(module, plan, **options)
    return (Stock if backend == "torch" else Distributed)(module, plan, **options)
