"""hetplan's command line with one more problem.

python examples/experts_too.py solve layer.json -m exact,milp,greedy
"""

from hetplan.cli.entry import main
from hetplan.formulations import FAMILIES

FAMILIES["experts"] = "experts.family:FAMILY"
if __name__ == "__main__":
    main()
