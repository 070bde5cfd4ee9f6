"""The way in: loading the command line counts as running it, so that Ctrl-C is one line from the
first moment on."""

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
        gc.freeze()  # to look for garbage at the very end would take some tenths of a second
