"""Plans around the answers of the CP-SAT model of `joint`: the plan of an answer, all plans of its
shape, the plans that are known without the model, and the fastest one that the evaluator priced.
"""

import math
from collections.abc import Iterator
from itertools import product

from hetplan.formulations.joint.cp_variables import INTERLEAVED, Variables
from hetplan.formulations.joint.data import JointData, JointDecision
from hetplan.formulations.joint.evaluate import evaluate
from hetplan.plans.passes import WHOLE_SCHEDULES
from hetplan.plans.plan import MicroBatches, Replica, Stage
from hetplan.solvers.model import ModelAnswer
from hetplan.solvers.run import Run


def read(v: Variables, answer: ModelAnswer) -> JointDecision:
    """The plan of an answer."""
    value = answer.value
    chunks = value(v.chunks)
    replicas: list[Replica] = []
    for s in v.stages:
        group = v.prices.groups[value(v.group[s])]
        if not group.rows:
            break
        stage = Stage(
            layers=[(value(v.first[s, c]), value(v.last[s, c])) for c in range(chunks)],
            devices=[list(row) for row in group.rows],
            row_shares=[1.0] * len(group.rows),
            tensor_shares=[1.0] * group.tensor,
        )
        if value(v.opens[s]):
            batches = micro_batches(value(v.samples[s]), value(v.size[s]))
            replicas.append(Replica(stages=[stage], micro_batches=batches))
        else:
            replicas[-1].stages.append(stage)
    return JointDecision(
        schedule=WHOLE_SCHEDULES[value(v.schedule)],
        zero=value(v.zero),
        recomputation=v.prices.data.modes[value(v.mode)],
        replicas=replicas,
    )


def micro_batches(samples: int, size: int) -> list[MicroBatches]:
    """Micro-batches of a size; the last one takes what is left."""
    full, left = divmod(samples, size)
    parts = ((full, size), (1, left))
    return [MicroBatches(count=count, samples=b) for count, b in parts if count and b]


def of_one_shape(decision: JointDecision, data: JointData) -> Iterator[JointDecision]:
    """The decision and all that differ from it in schedule, ZeRO level, mode and the sizes of
    micro-batches alone. Some of them may break a rule, which the evaluator notices."""
    yield decision
    chunks = len(decision.replicas[0].stages[0].layers)
    schedules = WHOLE_SCHEDULES if chunks == 1 else WHOLE_SCHEDULES[INTERLEAVED:]
    sizes = product(*(range(1, replica.samples + 1) for replica in decision.replicas))
    for chosen, schedule, zero, mode in product(sizes, schedules, data.zero_levels, data.modes):
        replicas = [
            replica.model_copy(update={"micro_batches": micro_batches(replica.samples, size)})
            for replica, size in zip(decision.replicas, chosen, strict=True)
        ]
        yield JointDecision(schedule=schedule, zero=zero, recomputation=mode, replicas=replicas)


def on_one_device(data: JointData) -> Iterator[JointDecision]:
    """The plans of one device of each type, which are known before the model is built."""
    kinds = [kind for kind, _ in data.devices]
    if 1 not in data.tensor_degrees:
        return
    for kind, mode, size in product(
        dict.fromkeys(kinds), data.modes, range(1, data.global_batch + 1)
    ):
        stage = Stage(layers=[(0, len(data.layers))], devices=[[kinds.index(kind)]])
        replica = Replica(stages=[stage], micro_batches=micro_batches(data.global_batch, size))
        yield JointDecision(zero=min(data.zero_levels), recomputation=mode, replicas=[replica])


class Best:
    """The fastest plan that the evaluator has priced."""

    def __init__(self, data: JointData, run: Run) -> None:
        self.data, self.run = data, run
        self.decision: JointDecision | None = None
        self.seconds = math.inf
        self.priced = 0

    def price(self, decision: JointDecision) -> None:
        """Have the evaluator price a plan, and keep it where it is the fastest one that fits."""
        seconds = evaluate(self.data, decision).objective
        self.priced += 1
        if seconds is not None and seconds < self.seconds:
            self.decision, self.seconds = decision, seconds
            self.run.report(incumbent=seconds)
