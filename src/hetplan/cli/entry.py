"""The entry point of the program `hetplan`.

It imports the command line inside `main`, so that Ctrl-C ends the program with one line even while
modules are loaded.
"""

import gc
import os

ABORTED = 130


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        from hetplan.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        os.write(2, b"hetplan: error: aborted\n")
        return ABORTED
    finally:
        gc.freeze()  # Python's last garbage collection would take some tenths of a second
