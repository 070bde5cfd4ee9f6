"""What other planners and profilers write: small files of every kind, and reading them through the
command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetplan.cli.main import main
from hetplan.profiling.profiles.profile import Profile, load_profile

# A diamond: 1 feeds 2 and 3, both feed 4.


def operator(
    name: str, description: str, forward: str, backward: str, activation: str, params: str
) -> str:
    times = f"forward_compute_time={forward}, backward_compute_time={backward}"
    return (
        f"{name} -- {description} -- {times}, activation_size={activation}, "
        f"parameter_size={params}\n"
    )


PIPEDREAM = (
    operator("node4", "Add", "1.0", "2.0", "40.0", "0.000")
    + operator("node1", "Conv2d(3, 64, kernel_size=(3, 3))", "4.000", "8.000", "100.0", "12.000")
    + operator("node2", "ReLU(inplace)", "1.0", "1.0", "[10.0; 20.0]", "0.000")
    + operator("node3", "Linear(1 -- 2)", "2.0", "3.0", "50.0", "4.000")
    + "".join(f"\tnode{a} -- node{b}\n" for a, b in ((1, 2), (1, 3), (2, 4), (3, 4)))
)

DEEPSPEED = """-------------------------- DeepSpeed Flops Profiler --------------------------
model parallel size:                                          1
batch size per GPU:                                           4
fwd latency:                                                  10 ms
bwd latency:                                                  25 ms

------------------------------ Detailed Profile per GPU ------------------------------
Each module profile is listed after its name in the following order:
params, percentage of total params, MACs, percentage of total MACs, fwd latency, and so on

Net(
  3.5 M = 100% Params, 7 GMACs = 100% MACs, 10 ms = 100% latency, 1.4 TFLOPS
  (embed): Embedding(1 M, 28.5% Params, 0 MACs, 0% MACs, 500 us, 5.00% latency, 0.0 FLOPS, 10, 20)
  (body): Encoder(
    2 M, 57.1% Params, 6 GMACs, 85.7% MACs, 8 ms, 80.00% latency, 1.5 TFLOPS,
    (layers): ModuleList(
      2 M, 57.1% Params, 6 GMACs, 85.7% MACs, 8 ms, 80.00% latency, 1.5 TFLOPS,
      (0): Block(
        1 M, 28.5% Params, 3 GMACs, 42.8% MACs, 3 ms, 30.00% latency, 2 TFLOPS,
        (mlp): Sequential(
          1 M, 28.5% Params, 3 GMACs, 42.8% MACs, 3 ms, 30.00% latency, 2 TFLOPS,
          (0): Linear(1 M, 28.5% Params, 3 GMACs, 42.8% MACs, 3 ms, 30.00% latency, 2 TFLOPS, bias)
          (1): GELU(0, 0% Params, 0 MACs, 0% MACs, 1 us, 0.00% latency, 0.0 FLOPS)
        )
      )
      (1): Block(1 M, 28.5% Params, 3 GMACs, 42.8% MACs, 5 ms, 50.00% latency, 1.2 TFLOPS, bias)
    )
  )
  (head): Linear(500 k, 14.2% Params, 1 GMACs, 14.2% MACs, 1 ms, 10.00% latency, 2 TFLOPS, bias)
)
------------------------------------------------------------------------------
"""


def piper(seconds: float = 0.03) -> dict[str, Any]:
    def variant(degree: int, name: str, factor: float) -> dict[str, Any]:
        return {
            "id": name, "timePerSample": factor * seconds / degree, "parameterSize": 60.0 / degree,
            "memoryUsageA": 30.0 / degree, "memoryUsageB": 1.0, "syncTimeFw": {}, "syncTimeBw": {},
        }  # fmt: skip

    nodes = [
        {
            "id": i,
            "name": f"n{i}",
            "TMPCs": {
                str(t): [variant(t, "activation recomp", 1.3), variant(t, "vanilla", 1.0)]
                for t in (1, 2)
            },
        }
        for i in range(3)
    ]
    edges = [
        {"sourceId": i, "destId": j, "communicationCost": 7.0} for i, j in ((0, 1), (1, 2), (0, 2))
    ]
    return {"maxDevices": 2, "nodes": nodes, "edges": edges}


def placement() -> dict[str, Any]:
    def node(
        number: int, colour: int, milliseconds: float, size: float, back: int
    ) -> dict[str, Any]:
        return {
            "id": number, "name": f"node{number}", "supportedOnFpga": 1, "cpuLatency": 9.0,
            "fpgaLatency": milliseconds, "isBackwardNode": back, "colorClass": colour, "size": size,
        }  # fmt: skip

    nodes = [
        node(1, 1, 2.0, 110.0, 0),
        node(2, 2, 3.0, 5.0, 0),
        node(3, 1, 4.0, 110.0, 1),
        node(4, 2, 6.0, 5.0, 1),
    ]
    edges = [
        {"sourceId": s, "destId": t, "cost": 0.1, "size": 10.0} for s, t in ((1, 2), (2, 4), (4, 3))
    ]
    return {"maxFPGAs": 2, "nodes": nodes, "edges": edges}


def metis() -> dict[str, Any]:
    return {
        "model": {
            "model_name": "GPT3",
            "num_layers": 2,
            "parameters": {
                "parameters_per_layer_bytes": [2000, 4000],
                "activation_parameters_bytes": [80, 0],
            },
        },
        "execution_time": {"layer_compute_total_ms": [3.0, 6.0]},
        "execution_memory": {"layer_memory_total_mb": [1.0, 2.0]},
    }


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def imported(kind: str, path: Path, tmp_path: Path, *options: str) -> Profile:
    """Through the command line into a file, and read back from it."""
    target = tmp_path / "imported.json"
    assert main(["profile", "import", kind, str(path), "-o", str(target), *options]) == 0
    return load_profile(target)
