"""AMP by general solvers: one model per configuration, written once and solved by CP-SAT, HiGHS or
through Pyomo."""
