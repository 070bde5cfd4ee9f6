"""The process of a helper (workers.py): `python -m hetplan.formulations.joint.helper`."""

import sys

from hetplan.formulations.joint.workers import serve

if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
