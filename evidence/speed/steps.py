"""Step times of hetplan's engine beside stock torch's on the same GPT, ranks, rows and weights.

    python -m evidence.speed steps [--device cuda] [--width N] [--steps N] [--output FILE]

Two gloo ranks, one thread each; on a GPU one rank alone, with a larger GPT in bf16 autocast. Both
engines are in the same processes and take their steps in turns, each pair in the other order, so
that what else the machine does disturbs both. A step is forward and backward passes and what ranks
exchange, without the update; it counts as long as its slowest rank. `by itself` is torch's own
wrapper around the module as it is, without any of hetplan's code: DistributedDataParallel, or FSDP2
of each block and the whole.

The engine's own time per micro-batch is that of one rank less the same layers in a plain loop. A
step on a GPU ends when the GPU is done with it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from evidence.speed.harness import markdown, save
from hetplan import distribute
from hetplan.plans.plan import Plan, parse_plan

ROWS, BATCHES = 4, 4  # of a micro-batch, of a replica
KINDS = {"data parallel": (1, 0), "ZeRO 2": (1, 2), "ZeRO 3": (1, 3), "1F1B": (2, 0)}
Step = Callable[[], object]


@dataclass(frozen=True)
class Network:
    """A GPT and where it is trained. length: tokens of a row; words: of the vocabulary."""

    device: str
    layers: int
    width: int
    heads: int
    length: int
    words: int

    @property
    def names(self) -> list[str]:
        """The plan's layers."""
        return ["embedding", *(f"block-{i}" for i in range(self.layers)), "head"]

    def autocast(self) -> Any:
        """bf16 on a GPU, whose matrix units do no fp32; fp32 on a CPU."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")


NETWORKS = {
    "cpu": Network("cpu", layers=4, width=128, heads=4, length=64, words=1000),
    "cuda": Network("cuda", layers=12, width=768, heads=12, length=1024, words=50304),
}


def module(network: Network) -> Any:
    """The same weights every time."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=network.words, n_embd=network.width, n_layer=network.layers,
        n_head=network.heads, n_positions=network.length,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    made: Any = transformers.GPT2LMHeadModel(config)
    made.batch = partial(rows, network)
    return made


def rows(network: Network, step: int, first: int, last: int) -> dict[str, torch.Tensor]:
    """Texts of some rows."""
    numbers = torch.arange(first, last)[:, None] * 31 + step
    words = (numbers + torch.arange(network.length) * 7) % network.words
    return {"input_ids": words, "labels": words}


def plan_of(network: Network, stages: int, zero: int, ranks: int = 2) -> Plan:
    """Equal replicas of so many stages."""
    cut = len(network.names) // stages
    replicas = [
        {
            "stages": [
                {
                    "layers": [[j * cut, (j + 1) * cut]],
                    "devices": [[i * stages + j]],
                    "row_shares": [1.0],
                    "tensor_shares": [1.0],
                }
                for j in range(stages)
            ],
            "micro_batches": [{"count": BATCHES, "samples": ROWS}],
        }
        for i in range(ranks // stages)
    ]
    workload = {
        "model": "gpt", "cluster": "two", "sequence": network.length, "precision": "fp32",
        "global_batch": ROWS * BATCHES * len(replicas), "layers": network.names,
    }  # fmt: skip
    document = {
        "format": "hetplan-plan", "version": 1, "name": "steps", "workload": workload,
        "devices": [{"type": network.device, "node": 0}] * ranks, "replicas": replicas,
        "schedule": "1f1b", "zero": zero,
    }  # fmt: skip
    return parse_plan(document, where="steps")


def by_plan(network: Network, plan: Plan, backend: str) -> Step:
    """A step under a plan."""
    model = distribute(module(network), plan, backend=backend, device=network.device)

    def step() -> object:
        with network.autocast():
            loss = model.train_step()
        for _, parameter in model.updated():
            parameter.grad = None
        return loss

    return step


def by_itself(network: Network, zero: int) -> Step:
    """A step of torch's own wrapper around the module."""
    own, rank = module(network), dist.get_rank()
    wrapped: Any = own
    if zero:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*own.transformer.h, own):
            wrapped = fully_shard(part, mesh=mesh, reshard_after_forward=zero == 3)
    else:
        wrapped = DistributedDataParallel(own)

    def step() -> object:
        for batch in range(BATCHES):
            last = batch + 1 == BATCHES
            if zero:
                wrapped.set_requires_gradient_sync(last)
            first = (rank * BATCHES + batch) * ROWS
            with nullcontext() if last or zero else wrapped.no_sync():
                loss = wrapped(**rows(network, 0, first, first + ROWS)).loss / BATCHES
                loss.backward()
        own.zero_grad()
        return float(loss.detach())

    return step


def plain_step(network: Network) -> Step:
    """One process: the passes of all micro-batches, a loop around the module."""
    own = module(network).to(network.device)

    def step() -> object:
        for batch in range(BATCHES):
            texts = rows(network, 0, batch * ROWS, (batch + 1) * ROWS)
            here = {name: value.to(network.device) for name, value in texts.items()}
            with network.autocast():
                loss = own(**here).loss / BATCHES
            loss.backward()
        own.zero_grad()
        return float(loss.detach())

    return step


def in_turns(network: Network, steps: dict[str, Step], count: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank, step by step; two of each are not timed."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(count + 2):
        order = list(steps) if turn % 2 else list(reversed(steps))
        for name in order:
            dist.barrier()
            begun = time.perf_counter()
            steps[name]()
            if network.device == "cuda":
                torch.cuda.synchronize()
            slowest = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn > 1:
                times[name].append(float(slowest))
    return times


def compared(network: Network, world: int, count: int) -> dict[str, dict[str, list[float]]]:
    """Kind of plan -> engine -> seconds of each step."""
    made = {}
    for kind, (stages, zero) in (KINDS if world > 1 else {"one": (1, 0)}).items():
        plan = plan_of(network, stages, zero, ranks=world)
        steps = {
            "ours": by_plan(network, plan, "hetplan"),
            "stock": by_plan(network, plan, "torch"),
        }
        if world == 1:
            steps["by itself"] = plain_step(network)
        elif stages == 1:
            steps["by itself"] = by_itself(network, zero)
        made[kind] = in_turns(network, steps, count)
    return made


def ranks(network: Network, world: int, count: int) -> Any:
    """What rank 0 of forked ranks measured."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    store = dist.FileStore(f"{folder}/store", world)
                    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
                    made = compared(network, world, count)
                    if rank == 0:
                        torch.save(made, f"{folder}/made.pt")
                    dist.barrier()
                    code = 0
                except Exception:  # noqa: BLE001 (a forked rank's last word)
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.append(child)
        if any(os.waitpid(child, 0)[1] for child in children):
            raise SystemExit("a rank failed")
        return torch.load(Path(folder) / "made.pt")


def ratio(one: Sequence[float], other: Sequence[float]) -> str:
    """Median of the pairs' quotients, and its quartiles."""
    quotients = [a / b for a, b in zip(one, other, strict=True)]
    low, middle, high = statistics.quantiles(quotients, n=4)
    return f"{middle:.3f} ({low:.3f} – {high:.3f})"


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=NETWORKS, default="cpu")
    parser.add_argument("--width", type=int, help="of a block; default 128, on a GPU 768")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    network = NETWORKS[options.device]
    network = replace(network, width=options.width or network.width)
    table, kept = [], []
    for kind, times in ranks(network, 2, options.steps).items() if network.device == "cpu" else ():
        itself = times.get("by itself")
        seconds = {name: f"{1e3 * statistics.median(own):.1f}" for name, own in times.items()}
        table.append(
            (kind, seconds["ours"], seconds["stock"], seconds.get("by itself"),
             ratio(times["ours"], times["stock"]),
             None if itself is None else ratio(times["ours"], itself))
        )  # fmt: skip
        kept.append({"kind": kind, "seconds": times})
    one = ranks(network, 1, options.steps)["one"]
    kept.append({"kind": "one rank", "seconds": one})
    lines = []
    for name in ("ours", "stock"):
        more = [1e3 * (a - b) / BATCHES for a, b in zip(one[name], one["by itself"], strict=True)]
        share = ratio(one[name], one["by itself"])
        lines.append((name, f"{statistics.median(more):.2f}", share))
    header = ("plan", "ours, ms", "--backend torch, ms", "torch by itself, ms", "ours / stock",
              "ours / by itself")  # fmt: skip
    tables = [
        *([markdown("A step on two ranks", header, table)] if table else []),
        markdown(
            "An engine's own time on one rank", ("engine", "ms per micro-batch", "ratio"), lines
        ),
    ]
    save(options.output, tables, kept)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
