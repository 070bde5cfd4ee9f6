"""Balanced samples for a training loop of one's own: which samples of a global batch each replica
takes, micro-batch by micro-batch.

    balance = BalancedRows(load_plan("plan.json"), "gpt2", longest=1024)
    rows = balance.divide(lengths)  # of the samples of this iteration's global batch
    for batch in rows[replica]: ...  # numbers of the samples of a micro-batch

Processors may round differently, so let one rank divide the samples and send the answer to all.
A replica may get no samples: its ranks then only take part in the exchange of gradients. A gradient
is that of one process if every loss is a sum over tokens, divided by the tokens that count in the
global batch.
"""

import os
from collections.abc import Sequence

from hetplan.errors import InputError, UnsupportedError, require
from hetplan.planner.lengths.costs import PlanCosts
from hetplan.planner.lengths.packing import balance
from hetplan.plans.making import workload_of
from hetplan.plans.plan import Plan
from hetplan.profiling.workload import make_workload
from hetplan.solvers.run import Run


class BalancedRows:
    """Divides the samples of global batches over the replicas of a plan.

    model: the plan's model, by name or as a config.json, because the plan has it at one length.
    longest: tokens of the longest sample. Raises InputError for a plan that does not carry its
    workload, UnsupportedError for one with a program or with a measured profile, which is of one
    length.
    """

    def __init__(self, plan: Plan, model: str | os.PathLike[str], longest: int) -> None:
        workload = workload_of(plan)
        require(
            workload.sequence is not None and "profile" not in workload.files,
            "a balance needs predicted times of samples with tokens",
            where=plan.name,
            kind=UnsupportedError,
        )
        length = plan.workload.sequence or 1
        other = make_workload(
            model,
            workload.cluster,
            workload.global_batch,
            sequence=length // 2 if length > 1 else 2,
            precision=workload.precision,
            framework=workload.framework,
            stack=workload.stack,
        )
        require(
            other.model.name == workload.model.name,
            "the plan is for another model",
            where=plan.name,
            got=other.model.name,
            expected=workload.model.name,
        )
        self.costs = PlanCosts(plan, workload, other, longest)

    def divide(self, lengths: Sequence[int]) -> list[list[list[int]]]:
        """[replica][micro-batch] numbers of samples, which count from 0.

        lengths: tokens of each sample of a global batch. Raises InputError where no micro-batches
        are found that hold them all.
        """
        result = balance(self.costs, lengths, Run())
        if result is None or result.decision is None:
            raise InputError(
                "no micro-batches that hold these samples",
                where=self.costs.plan.name,
                got=f"{len(lengths)} samples, the longest of {max(lengths, default=0)} tokens",
                expected=f"at most {max(self.costs.capacities)} tokens in a micro-batch",
            )
        return result.decision.micro_batches
