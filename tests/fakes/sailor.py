"""A small folder as Sailor's: one model of four layers, two GPU types, plans of several shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYERS = 4
OUTPUT = 4e6  # bytes per sample between layers
PARAMS = 8e6  # bytes per layer, undivided
KEPT = 2e7
SLOPE = {"fast": 0.001, "slow": 0.003}  # forward seconds per sample and layer


def layer_seconds(kind: str, degree: int, batch: int) -> list[float]:
    """Compute divides by the degree; backward takes twice as long; the update 1 ms in all."""
    forward = SLOPE[kind] * batch / degree
    return [forward, 2 * forward, 0.001]


def sailor_folder(root: Path) -> Path:
    """Write profiles, sizes and links; GB/s do not depend on the message: 10 in a node, 1 per pair,
    2 at most."""
    for kind in SLOPE:
        folder = root / "profiles" / "TOY" / kind
        folder.mkdir(parents=True)
        table = {
            str(b): {
                str(t): {str(l): layer_seconds(kind, t, b) for l in range(LAYERS)} for t in (1, 2)
            }
            for b in (1, 2, 4)
        }
        write(folder / "profile.json", table)
    sizes = {
        str(t): {
            str(l): {
                "params_bytes": PARAMS / t,
                "act_output_bytes": OUTPUT,
                "act_input_bytes": OUTPUT,
                "act_mem_bytes": KEPT / t,
                "act_input_floats": 48,
            }
            for l in range(LAYERS)
        }
        for t in (1, 2)
    }
    write(root / "llm_info.json", {"TOY": sizes})
    within = {kind: {"2": [[0.0, 0.0, 10.0], 1e10]} for kind in SLOPE}
    between = {kind: {str(n): [[0.0, 0.0, float(n)], n * 1e9] for n in (1, 2)} for kind in SLOPE}
    write(root / "network_coeffs_x.json", {"inter": between, "intra": within})
    write(root / "intra_bandwidths.json", within)
    (root / "validation").mkdir()
    return root


def plan(
    stages: list[list[int]],
    groups: list[list[tuple[str, int]]],
    micro_batch: int,
    global_batch: int,
    **more: Any,
) -> dict[str, Any]:
    """A plan document. groups: per stage and replica, GPU type and degree, a node each."""
    tmp = [[[[[kind, degree, "zone"]], degree] for kind, degree in stage] for stage in groups]
    pipeline = {"num_stages": len(stages), "layers_per_stage": stages, "tmp_per_stage": tmp}
    return {"pipeline_list": [pipeline], "mbs": micro_batch, "gbs": global_batch, **more}


def add_plan(root: Path, name: str, document: Any) -> None:
    """Write a plan below validation/."""
    path = root / "validation" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, document)


def write(path: Path, document: Any) -> None:
    """As JSON."""
    path.write_text(json.dumps(document))
