"""A lower bound of every program found without search: the dearest chain of preconditions, for
theories of any width.
"""

from hetplan.formulations.hap.derivations import TripleSeconds, derivations
from hetplan.formulations.hap.problem import Step
from hetplan.formulations.hap.theory import ReducedTheory


def least_seconds(theory: ReducedTheory) -> TripleSeconds:
    """A bound of a triple's share of any program's cost, whatever the ratios.

    A stage lasts at least as long as the mean over all devices. In it shared work counts at least
    1 / (n v), with the speed v of the fastest device. The largest of n ratios is at least 1 / n.
    """
    problem = theory.problem
    devices = float(problem.counts.sum())
    mean = float((problem.counts / problem.speeds).sum()) / devices
    least = 1.0 / (devices * float(problem.speeds[-1]))

    def seconds_of(step: Step) -> float:
        computing = step.fixed * mean + step.shared * least
        return step.fixed + step.shared / devices if step.comm else computing

    return seconds_of


def chain_bound(theory: ReducedTheory) -> float:
    """A lower bound of every program's cost: the dearest chain of preconditions, with the least
    seconds of each triple."""
    return derivations(theory.steps, least_seconds(theory), max)[0][theory.goal] * (1 - 1e-12)
