"""Plan from Python: the best plan, what is proven of it, and the price of each paradigm.

python examples/plan_from_python.py [SECONDS]
"""

import sys
from pathlib import Path

import hetplan as hp

CLUSTER = Path(__file__).with_name("amp-mixed.yaml")


def main(seconds: float) -> None:
    """Plan GPT-2 on 12 V100 and 4 T4 in so many seconds, and print what came of it."""
    planning = hp.plan(
        "gpt2",
        CLUSTER,
        global_batch=32,
        strategies=["astra", "poplar", "dp"],
        time_limit=seconds,
        on_candidate=lambda candidate: print(f"tried {candidate.name}"),
    )
    best, explanation = planning.best, planning.explanation
    if best is None or best.plan is None or explanation is None:
        print("nothing fits:", *planning.advice, sep="\n  ")
        return
    print(f"best: {best.name}, {best.predicted_seconds:.3f} s per iteration (predicted)")
    if best.bound is not None:
        print(f"proven for its own formula: not below {best.bound:.3f} s")
    for strategy, price in explanation.prices.items():
        print(f"price of {strategy}: {price:.1%} longer than the best plan of all")
    stages = best.plan.replicas[0].stages
    print(f"{len(best.plan.replicas)} pipelines of {len(stages)} stages")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 20.0)
