"""A local search for the fastest plan with equal replicas."""

from collections.abc import Sequence

from hetplan.formulations.joint.annealing import LocalSearch, Parameters
from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.design import Design
from hetplan.formulations.joint.space import Space
from hetplan.plans.alike import has_equal_replicas
from hetplan.plans.plan import Plan
from hetplan.solvers.run import Run

# A move of one replica changes all others, too. Numbers of replicas whose best plans differ much in
# their seconds are searched, too.
EQUAL = Parameters(alike_probabilities=(1.0,), far=3.0)


class EqualSpace(Space):
    """The designs whose plans have equal replicas."""

    def allows(self, design: Design) -> bool:
        """Whether all replicas have the same stages, cuts and micro-batches, and every stage is a
        single tensor group."""
        shapes = {
            (tuple(self.shapes(p.groups)), p.cuts, p.micro_batch, p.samples)
            for p in design.pipelines
        }
        groups = [group for pipeline in design.pipelines for group in pipeline.groups]
        return len(shapes) == 1 and all(len(group) == 1 for group in groups)


def equal_search(
    data: JointData, run: Run, starts: Sequence[Plan], parameters: Parameters = EQUAL
) -> Plan | None:
    """The fastest plan with equal replicas that the search finds; None where it finds none that
    fits in memory. starts: plans; those with equal replicas are where it begins."""
    search = LocalSearch(EqualSpace(data), run, parameters)
    search.begin([plan for plan in starts if has_equal_replicas(plan)])
    search.construct()
    search.vary()
    search.rounds()
    return None if search.incumbent is None else search.incumbent.plan
