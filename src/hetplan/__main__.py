"""`python -m hetplan`."""

import sys

from hetplan.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
