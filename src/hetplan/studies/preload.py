"""Imported once by the fork server: what every task would load anew, solvers and compiled kernels.

Neither imports nor kernels start threads, so that forking is safe. Without it the seconds of short
solves would be those of loading.
"""

import highspy
import numba
import pyomo.environ
from ortools.sat.python import cp_model

import hetplan.studies.work
from hetplan.formulations import FAMILIES, family
from hetplan.solvers.registry import load

__all__ = ["cp_model", "hetplan", "highspy", "numba", "pyomo"]

for name in FAMILIES:
    found = family(name)
    for target in dict.fromkeys(
        [*found.warmers, *(m.ready for m in found.methods if m.ready is not None)]
    ):
        load(target)()
