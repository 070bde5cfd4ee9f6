"""`python -m hetplan`."""

import sys

from hetplan.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
