"""Plans: the one representation of what to run, for every family. Executing them needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from hetplan.formulations.hap.spmd.program import SingleProgram
    from hetplan.runtime.execution.distributed import Distributed
    from hetplan.runtime.execution.spmd.distributed import DistributedProgram
    from hetplan.runtime.execution.spmd.model import ProgramModel
    from hetplan.runtime.plan import Plan


@overload
def distribute(
    module: SingleProgram | ProgramModel, plan: Plan, **options: Any
) -> DistributedProgram: ...


@overload
def distribute(module: Any, plan: Any, **options: Any) -> Distributed: ...


def distribute(module: Any, plan: Any, **options: Any) -> Any:
    """This rank's part of a torch module under a plan; see `hetplan.runtime.execution.distributed`.

    Of a single-device program under a plan with the schedule `spmd`:
    `hetplan.runtime.execution.spmd.distributed`.
    """
    from hetplan.formulations.hap.spmd.program import SingleProgram
    from hetplan.runtime.execution.spmd.model import ProgramModel

    if isinstance(module, SingleProgram | ProgramModel):
        from hetplan.runtime.execution.spmd.distributed import DistributedProgram

        return DistributedProgram(module, plan, **options)
    from hetplan.runtime.execution.distributed import Distributed

    return Distributed(module, plan, **options)
