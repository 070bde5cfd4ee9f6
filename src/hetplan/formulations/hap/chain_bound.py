"""A lower bound of every program, found without search, for theories of any width.

Every program runs some chain of triples from the sources to the goal. The bound is the seconds of
the most expensive chain of preconditions in the cheapest derivation of the goal.

A stage lasts as long as its slowest device computes, and so at least as long as any weighted mean
of the devices' seconds, whose weights add up to 1. Work that every device repeats counts most under
equal weights. Work that the devices share counts most where a device's weight is its share of all
devices' speed: since the ratios add up to 1, it then takes as long as all devices together need for
it. The bound is the larger one of the two.
"""

import numpy as np

from hetplan.formulations.hap.derivations import TripleSeconds, cheapest_derivations
from hetplan.formulations.hap.problem import Step
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.replays.arrays import Floats

# Rounding in sums of thousands of terms, as a share of the bound.
ROUNDING = 1e-12


def least_seconds(theory: ReducedTheory, weights: Floats) -> TripleSeconds:
    """The function that bounds a triple's share of any program's cost, whatever the ratios.

    weights [groups]: of one device of each group; those of all devices add up to 1. Work that is
    shared takes a device of weight w and speed v the seconds w / v times its ratio, which is no
    less than the least w / v times its ratio. The largest of n ratios is at least 1 / n.
    """
    problem = theory.problem
    devices = float(problem.counts.sum())
    fixed_seconds = float((problem.counts * weights / problem.speeds).sum())  # per FLOP
    shared_seconds = float((weights / problem.speeds).min())  # per FLOP

    def seconds_of(step: Step) -> float:
        if step.comm:
            return step.fixed + step.shared / devices
        return step.fixed * fixed_seconds + step.shared * shared_seconds

    return seconds_of


def chain_bound(theory: ReducedTheory) -> float:
    """A lower bound in seconds of every program's cost."""
    counts, speeds = theory.problem.counts, theory.problem.speeds
    equal = np.ones(len(counts)) / counts.sum()
    by_speed = speeds / (counts * speeds).sum()
    bound = 0.0
    for weights in (equal, by_speed):
        derivations = cheapest_derivations(theory.steps, least_seconds(theory, weights), max)
        bound = max(bound, derivations.cost[theory.goal])
    return bound * (1 - ROUNDING)
