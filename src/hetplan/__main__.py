"""`python -m hetplan`."""

import sys

from hetplan.interpreter import working_folder_last

if __name__ == "__main__":
    working_folder_last()
    from hetplan.cli.entry import main

    sys.exit(main())
