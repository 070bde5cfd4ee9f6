"""Clusters like those of the papers: nodes of equal devices, fast and slow ones alternating, slow
links between."""

from __future__ import annotations

from typing import Any

from hetplan.formulations.amp.data import AmpData

TYPES = ("fast", "slow")
SLOWDOWN = (1.0, 2.7)
INSIDE = (21e9, 6e9)  # bytes/s within a node of that type
ACROSS = 1.25e9


def mixed_cluster(*, nodes: int, per_node: int, layers: int, memory: bool = False) -> AmpData:
    """`nodes` nodes of `per_node` devices; a small first layer, equal ones, a large last one; batch
    32."""
    node_of = [node for node in range(nodes) for _ in range(per_node)]
    bandwidth = [
        [0.0 if d == e else INSIDE[a % 2] if a == b else ACROSS for e, b in enumerate(node_of)]
        for d, a in enumerate(node_of)
    ]
    work = [0.001, *[0.004] * (layers - 2), 0.008]
    params = [200e6, *[50e6] * (layers - 2), 200e6]
    document: dict[str, Any] = {
        "devices": [{"type": TYPES[node % 2], "node": node} for node in node_of],
        "bandwidth": bandwidth,
        "layers": [
            {"name": f"layer{l}", "param_bytes": size, "activation_bytes": 2e6, "tensor_bytes": 8e6}
            for l, size in enumerate(params)
        ],
        "layer_seconds": [
            {
                "type": name,
                "tensor": tensor,
                "micro_batch": batch,
                "seconds": [w * slowdown * batch**0.9 / tensor**0.85 for w in work],
            }
            for tensor in (1, 2, 4)
            for batch in (1, 2, 4)
            for name, slowdown in zip(TYPES, SLOWDOWN, strict=True)
        ],
        "global_batch": 32,
    }
    if memory:
        document["memory"] = {
            "device_bytes": {"fast": 16e9, "slow": 15e9},
            "state_bytes_per_param_byte": 8.0,
            "layer_bytes_per_sample": [5e8] * layers,
        }
    return AmpData.model_validate(document)
