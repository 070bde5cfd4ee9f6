"""One workload posed as several papers' problems, all solved; plans replayed, ranked, explained.

Here stand the names alone, so that completing a command loads nothing else.
"""

# Strategy -> "module:class", imported when it is used. Adding one is a file and a line here.
STRATEGIES: dict[str, str] = {
    "joint": "hetplan.planner.joint:Joint",
    "amp": "hetplan.planner.amp:Amp",
    "poplar": "hetplan.planner.poplar:Poplar",
    "astra": "hetplan.planner.astra:Astra",
    "ditto": "hetplan.planner.ditto:Ditto",
    "dp": "hetplan.planner.amp:DataParallel",
    "hap": "hetplan.planner.hap:Hap",
}
ALL = "all"  # of them
