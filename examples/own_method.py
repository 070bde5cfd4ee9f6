"""A method of your own for Astra's problem, beside hetplan's. In this folder:

hetplan solve tiny-two-types --plugin own_method -m auto,even
"""

from hetplan.formulations.astra.data import AstraData, AstraDecision, AstraStage
from hetplan.solvers.registry import Method
from hetplan.solvers.run import Outcome, Run, Stop


def even(data: AstraData, run: Run) -> Outcome[AstraDecision]:
    """Stages of equally many layers, on the types in their order."""
    size, rest = divmod(data.layers, data.stages)
    group = data.data_parallel * data.tensor_parallel
    room = [kind.name for kind in data.device_types for _ in range(kind.max_devices // group)]
    stages = [AstraStage(type=room[s], layers=size + (s < rest)) for s in range(data.stages)]
    return Outcome(stop=Stop.DONE, decision=AstraDecision(stages=stages))


METHODS = {"astra": [Method("even", "own_method:even", exact=False, summary="equal stages")]}
