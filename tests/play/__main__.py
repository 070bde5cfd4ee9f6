"""Plays thousands of tiny instances: `PYTHONPATH=tests python -m play FAMILY --count N --seed S`.

Every disagreement is printed with its seed and, with --keep, its instance and answer are written
into a folder. The exit code is 1 where there was one.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from play.families import NAMES, drawn, play

STUCK = 300  # seconds after which an instance is given up, with a traceback


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m play", description=__doc__)
    parser.add_argument("family", choices=NAMES)
    parser.add_argument("--count", type=int, default=100, help="instances")
    parser.add_argument("--seed", type=int, default=0, help="the first instance's seed")
    parser.add_argument("--methods", default="", help="names with commas; all by default")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds for each method")
    parser.add_argument("--wild", action="store_true", help="numbers of any magnitude")
    parser.add_argument("--keep", type=Path, help="folder for instances that disagree")
    asked = parser.parse_args()
    methods = [name for name in asked.methods.split(",") if name]
    begun, wrong, counts, remarks = time.monotonic(), 0, Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(asked.seed, asked.seed + asked.count):
            faulthandler.dump_traceback_later(STUCK, exit=True)
            data = drawn(asked.family, seed, wild=asked.wild)
            played = play(asked.family, data, Path(folder), methods, asked.limit)
            faulthandler.cancel_dump_traceback_later()
            judgement = played.judged()
            counts["infeasible" if played.best is None else "feasible"] += 1
            for line in judgement.remarks:
                kind = ": ".join(line.split(", ")[0].split(": ")[:2])
                remarks[kind] += 1
                if "no proof" in kind or remarks[kind] == 1:
                    print(f"seed {seed}: remark: {line}")
            for line in judgement.complaints:
                print(f"seed {seed}: WRONG: {line}")
            if judgement.complaints:
                wrong += 1
                if asked.keep:
                    documents = [answer.document for answer in played.answers]
                    asked.keep.mkdir(parents=True, exist_ok=True)
                    text = json.dumps({"data": played.data, "answers": documents}, indent=1)
                    (asked.keep / f"{asked.family}-{seed}.json").write_text(text)
            sys.stdout.flush()
    print(f"{asked.family}: {asked.count} instances from seed {asked.seed}, {dict(counts)}, ")
    print(f"{wrong} disagree, {time.monotonic() - begun:.0f} s; remarks: {dict(remarks)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
