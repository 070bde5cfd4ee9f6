"""Writes the set `hard` of the library, or looks for candidates.

    python -m evidence.speed hard_instances [folder]
    python -m evidence.speed hard_instances --search PROBLEM FIRST COUNT SIZE [SECONDS]

Small instances on which a paper's heuristic is worst among those drawn, and the smallest found on
which neither CP-SAT nor HiGHS ends with a proof in a minute. --search prints for each seed what the
heuristics lose against the optimum and, with SECONDS, how the general solvers end; the lists below
were chosen from it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from evidence.speed.hap_theories import chain
from evidence.speed.packaging import LIBRARY, write_best
from hetplan.formulations import family
from hetplan.instances.generate import draw
from hetplan.instances.library import Instance
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run

# (problem, seed, size) of `hetplan instances generate`, and what makes it hard.
CHOSEN: tuple[tuple[str, int, str, str], ...] = (
    ("amp", 113, "small", "AMP's plan and Megatron's are worst"),
    ("amp", 123, "small", "AMP's plan is far off where annealing finds the optimum"),
    ("amp", 121, "small", "annealing is worst"),
    ("amp", 106, "small", "all heuristics are far off"),
    ("astra", 135, "small", "the paper's enumeration is worst"),
    ("astra", 116, "small", "the paper's enumeration is far off"),
    ("astra", 120, "small", "the paper's enumeration is far off"),
    ("astra", 112, "small", "the paper's enumeration is far off"),
    ("ditto", 125, "small", "folding and recovery are worst"),
    ("ditto", 122, "small", "all heuristics miss the optimum"),
    ("ditto", 128, "small", "greedy recovery is worst"),
    ("ditto", 104, "small", "the divide and conquer is worst"),
    ("ditto", 139, "small", "neither CP-SAT nor HiGHS ends with a proof in a minute"),
    (
        "ditto",
        138,
        "small",
        "no heuristic gives a plan, and neither CP-SAT nor HiGHS a proof in a minute",
    ),
    ("poplar", 127, "small", "the paper's algorithm is worst, and the baselines no better"),
    ("poplar", 135, "small", "the paper's algorithm is far off"),
    ("poplar", 115, "small", "the paper's algorithm is worse than the baselines"),
    ("poplar", 104, "small", "the paper's algorithm is much worse than the baselines"),
    ("poplar", 120, "small", "DeepSpeed's equal micro-batches are worst"),
)
# (layers, types, seed) of HAP's chains, and what makes it hard.
CHAINS: tuple[tuple[int, int, int, str], ...] = (
    (2, 3, 113, "the alternation misses the optimum by most among those drawn"),
    (2, 2, 9, "the alternation misses the optimum"),
)
GENERAL = ("cp-sat", "cp-sat-linear", "milp")


def drawn(problem: str, seed: int, size: str) -> Instance:
    """An instance of a generator; of hap, whose generator is a theory's, `size` is LAYERSxTYPES."""
    if problem != "hap":
        return draw(problem, seed, size)
    layers, types = map(int, size.split("x"))
    return Instance(
        problem="hap",
        name=f"chain-{layers}x{types}-{seed}",
        origin=f"hetplan, made up: chain of {layers} layers of 5 operators, {types} device types, "
        f"seed {seed}",
        data=chain(layers, types, seed),
    )


def chosen() -> Iterator[Instance]:
    """The set."""
    for problem, seed, size, why in CHOSEN:
        yield renamed(drawn(problem, seed, size), why)
    for layers, types, seed, why in CHAINS:
        yield renamed(drawn("hap", seed, f"{layers}x{types}"), why)


def renamed(found: Instance, why: str) -> Instance:
    """As one of the set, its origin saying why it belongs there."""
    name = found.name.removeprefix("random-").removeprefix(f"{found.problem}-")
    origin = f"{found.origin}; chosen because {why}"
    return Instance(
        problem=found.problem, name=f"hard-{found.problem}-{name}", origin=origin, data=found.data
    )


def search(problem: str, seeds: range, size: str, general_seconds: float) -> None:
    """One line per seed: the optimum, what heuristics lose, and how the general solvers end (0 s:
    not tried)."""
    methods = [method for method in family(problem).methods if not method.exact]
    for seed in seeds:
        found = drawn(problem, seed, size)
        best = solve(found.family, found.data, "auto", Run(Options(time_limit=20, threads=1)))
        told = [f"{found.name} {best.status} {best.objective} {best.seconds:.2f}s"]
        for method in methods:
            result = solve(
                found.family, found.data, method.name, Run(Options(time_limit=20, threads=1))
            )
            if best.objective and result.objective:
                told.append(f"{method.name} {100 * (result.objective / best.objective - 1):.2f}")
            else:
                told.append(f"{method.name} {result.status}")
        for name in GENERAL if general_seconds else ():
            result = solve(
                found.family, found.data, name, Run(Options(time_limit=general_seconds, threads=1))
            )
            told.append(f"{name} {result.status} gap {result.gap} {result.seconds:.1f}s")
        print(", ".join(told), flush=True)


def main(folder: Path) -> None:
    """Write the set."""
    for instance in chosen():
        write_best(instance, folder)


if __name__ == "__main__":
    given = sys.argv[1:]
    if given[:1] == ["--search"]:
        first, count = int(given[2]), int(given[3])
        search(
            given[1],
            range(first, first + count),
            given[4],
            float(given[5]) if len(given) > 5 else 0.0,
        )
    else:
        main(Path(given[0]) if given else LIBRARY)
