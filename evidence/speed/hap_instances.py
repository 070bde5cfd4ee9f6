"""Writes the packaged `hap` instances and their optima.

    python -m evidence.speed hap_instances [folder [pattern]]

Theories of the shape of a Transformer's on made-up clusters, one program whose ratios alone are
asked for, and the theories of real networks of published size on two V100 and four P100
(`networks`), some with several segments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from evidence.papers.hap import SPEED
from evidence.speed.hap_theories import NETWORKS, chain, residual, stages_only, theory_named
from evidence.speed.packaging import LIBRARY, add_to_library
from hetplan.formulations import family
from hetplan.formulations.hap.data import HapData
from hetplan.instances.library import Instance
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run

# Seconds for a real network, whose bound is kept.
LIMIT = 120.0
FOLDER = LIBRARY / "hap"

MADE_UP: dict[str, tuple[str, Callable[[], HapData]]] = {
    "hap-chain-2x2": ("chain of 2 layers of 5 operators, 2 device types", lambda: chain(2, 2)),
    "hap-chain-24x2": ("chain of 24 layers of 5 operators, 2 device types", lambda: chain(24, 2)),
    "hap-chain-24x3": ("chain of 24 layers of 5 operators, 3 device types", lambda: chain(24, 3)),
    "hap-residual-1x2": ("residual block of 60 operators, 2 device types", lambda: residual(1, 2)),
    "hap-ratios-64x100": (
        "program of 100 stages on 64 devices of 4 types, ratios alone",
        lambda: stages_only(64, 100, 4),
    ),
}


def data_named(name: str) -> HapData:
    """The theory of a packaged network."""
    return theory_named(name).data


def instances() -> dict[str, tuple[str, Callable[[], HapData]]]:
    """name -> (origin, data)."""
    found = {
        name: (f"hetplan, made up: {what}, seed 0", data) for name, (what, data) in MADE_UP.items()
    }
    for name, what in NETWORKS.items():
        origin = (
            f"hetplan: {what}, on 2 V100 ({SPEED['V100']:.3g} FLOP/s) and 4 P100 "
            f"({SPEED['P100']:.3g} FLOP/s), as "
            "HAP's artefact "
            "measured them, rings over 10.4 Gbit/s; forward pass, each instruction priced with "
            "its mirror"
        )
        found[name] = (origin, partial(data_named, name))
    return found


def main(folder: Path, pattern: str) -> None:
    """Write every instance whose name matches, and its record; a missing proof of a made-up one is
    an error."""
    for name, (origin, make) in instances().items():
        if not fnmatchcase(name, pattern):
            continue
        instance = Instance(problem="hap", name=name, origin=origin, data=make())
        result = solve(family("hap"), instance.data, "exact", Run(Options(time_limit=LIMIT)))
        if name in MADE_UP and result.status != "optimal":
            raise SystemExit(f"{name}: {result.status}, expected a proven optimum")
        add_to_library(folder, instance, result, packed=len(instance.data.triples) > 400)
        gap = "no bound" if result.gap is None else f"gap {result.gap:.3g}"
        print(f"{name}: {result.objective:.6g} s (predicted), {gap}, in {result.seconds:.2f} s")


if __name__ == "__main__":
    main(
        Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER,
        sys.argv[2] if len(sys.argv) > 2 else "*",
    )
