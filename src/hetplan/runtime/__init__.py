"""Plans: the one representation of what to run, for every family. Executing them needs torch."""

from typing import Any


def distribute(module: Any, plan: Any, **options: Any) -> Any:
    """This rank's part of a torch module under a plan; see `hetplan.runtime.execution.distributed`.

    Of a single-device program under a plan with the schedule `spmd`:
    `hetplan.runtime.execution.spmd.distributed`.
    """
    from hetplan.formulations.hap.spmd.program import SingleProgram
    from hetplan.runtime.execution.distributed import Distributed
    from hetplan.runtime.execution.spmd.distributed import DistributedProgram, ProgramModel

    if isinstance(module, SingleProgram | ProgramModel):
        return DistributedProgram(module, plan, **options)
    return Distributed(module, plan, **options)
