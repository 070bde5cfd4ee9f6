"""The planner: it poses one workload as the problems of several papers, solves them, and replays,
ranks and explains the plans.

This module has only the names of the strategies, so that the completion of a command line loads
nothing else.
"""

# Strategy -> "module:class", which is imported when the strategy is used.
STRATEGIES: dict[str, str] = {
    "joint": "hetplan.planner.joint:Joint",
    "amp": "hetplan.planner.amp:Amp",
    "poplar": "hetplan.planner.poplar:Poplar",
    "astra": "hetplan.planner.astra:Astra",
    "ditto": "hetplan.planner.ditto:Ditto",
    "dp": "hetplan.planner.amp:DataParallel",
    "hap": "hetplan.planner.hap:Hap",
}
ALL = "all"  # the name that stands for all strategies
