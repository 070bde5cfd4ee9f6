"""Writes the packaged `hap` instances and their optima: python benchmarks/hap_instances.py [folder].

Theories of the shape of a Transformer's on made-up clusters, and one program whose ratios alone are asked for.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hetplan.formulations import family
from hetplan.formulations.hap.data import HapData
from hetplan.formulations.hap.theories import chain, residual, stages_only
from hetplan.instances.envelope import Instance
from hetplan.instances.record import add_to_library
from hetplan.solvers.registry import solve

LIBRARY = Path(__file__).parents[1] / "src" / "hetplan" / "instances" / "library" / "hap"

INSTANCES: dict[str, tuple[str, HapData]] = {
    "hap-chain-2x2": ("chain of 2 layers of 5 operators, 2 device types", chain(2, 2)),
    "hap-chain-24x2": ("chain of 24 layers of 5 operators, 2 device types", chain(24, 2)),
    "hap-chain-24x3": ("chain of 24 layers of 5 operators, 3 device types", chain(24, 3)),
    "hap-residual-1x2": ("residual block of 60 operators, 2 device types", residual(1, 2)),
    "hap-ratios-64x100": (
        "program of 100 stages on 64 devices of 4 types, ratios alone",
        stages_only(64, 100, 4),
    ),
}


def main(folder: Path) -> None:
    """Write every instance and its record; a missing proof is an error."""
    for name, (what, data) in INSTANCES.items():
        instance = Instance(problem="hap", name=name, origin=f"hetplan, made up: {what}, seed 0", data=data)
        result = solve(family("hap"), data, "exact")
        if result.status != "optimal":
            raise SystemExit(f"{name}: {result.status}, expected a proven optimum")
        add_to_library(folder, instance, result, packed=len(data.triples) > 400)
        print(f"{name}: {result.objective:.6g} s (predicted) in {result.seconds:.2f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else LIBRARY)
