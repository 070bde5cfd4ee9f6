"""A lower bound of every program, found without search, for theories of any width.

Every program runs some chain of triples from the sources to the goal. The bound is the seconds of
the most expensive chain of preconditions in the cheapest derivation of the goal.
"""

from hetplan.formulations.hap.derivations import TripleSeconds, cheapest_derivations
from hetplan.formulations.hap.problem import Step
from hetplan.formulations.hap.theory import ReducedTheory

# Rounding in sums of thousands of terms, as a share of the bound.
ROUNDING = 1e-12


def least_seconds(theory: ReducedTheory) -> TripleSeconds:
    """The function that bounds a triple's share of any program's cost, whatever the ratios.

    A stage lasts at least as long as the mean of its n devices' seconds. In this mean shared work
    counts at least 1 / (n v), with the speed v of the fastest device, because the ratios sum to 1.
    For the same reason the largest of n ratios is at least 1 / n.
    """
    problem = theory.problem
    devices = float(problem.counts.sum())
    fixed_seconds = float((problem.counts / problem.speeds).sum()) / devices  # per FLOP
    shared_seconds = 1.0 / (devices * float(problem.speeds[-1]))  # per FLOP

    def seconds_of(step: Step) -> float:
        if step.comm:
            return step.fixed + step.shared / devices
        return step.fixed * fixed_seconds + step.shared * shared_seconds

    return seconds_of


def chain_bound(theory: ReducedTheory) -> float:
    """A lower bound in seconds of every program's cost."""
    derivations = cheapest_derivations(theory.steps, least_seconds(theory), max)
    return derivations.cost[theory.goal] * (1 - ROUNDING)
