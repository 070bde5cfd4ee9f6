"""Step times of hetplan's engine beside stock torch's on the same GPT, ranks, rows and weights.

    python -m evidence.speed steps [--device cuda] [--width N] [--steps N] [--output FILE]

Two gloo ranks, one thread each; on a GPU one rank alone, with a larger GPT in bf16 autocast. Both
engines are in the same processes and take their steps in turns, each pair in the other order, so
that what else the machine does disturbs both. A step is forward and backward passes and what ranks
exchange, without the update. Its seconds are those of its slowest rank. Its processor seconds are
those of all ranks together, which other processes on the machine hardly change. `by itself` is
torch's own engine around the module as it is, without any of hetplan's code:
DistributedDataParallel, FSDP2 of each block and the whole, or two stages that a user of
torch.distributed.pipelining writes by hand.

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
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from evidence.speed.harness import markdown, save
from hetplan import distribute
from hetplan.plans.plan import Plan, parse_plan

ROWS, BATCHES = 4, 4  # of a micro-batch, of a replica
KINDS = {"data parallel": (1, 0), "ZeRO 2": (1, 2), "ZeRO 3": (1, 3), "1F1B": (2, 0)}
Step = Callable[[], object]
Times = dict[str, list[float]]  # engine -> seconds of each step


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


class HandmadeStage(nn.Module):  # type: ignore[misc]
    """One of two stages of a GPT, as a user of torch.distributed.pipelining writes it."""

    def __init__(self, own: Any, rank: int) -> None:
        super().__init__()
        body, half = own.transformer, len(own.transformer.h) // 2
        self.rank = rank
        self.blocks = body.h[half * rank : half * (rank + 1)]
        if rank == 0:
            self.words, self.places = body.wte, body.wpe
        else:
            self.norm, self.head = body.ln_f, own.lm_head

    def forward(self, x: Tensor) -> Tensor:
        """Activations for the next stage, or scores of the words. x: words, or activations."""
        if self.rank == 0:
            x = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        if self.rank == 1:
            x = self.head(self.norm(x))
        return x


def pipeline_by_itself(network: Network) -> Step:
    """A step of torch's own 1F1B schedule over two stages."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = HandmadeStage(module(network), rank)
    stage = PipelineStage(part, rank, world, torch.device(network.device))

    def loss_of(scores: Tensor, words: Tensor) -> Tensor:
        """The mean loss of the words that follow."""
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten())

    schedule = Schedule1F1B(stage, BATCHES, loss_fn=loss_of)

    def step() -> object:
        words = rows(network, 0, 0, ROWS * BATCHES)["input_ids"]
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(words)
        else:
            schedule.step(target=words, losses=losses)
        part.zero_grad()
        return sum(float(loss.detach()) for loss in losses) / BATCHES

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


def in_turns(network: Network, steps: dict[str, Step], count: int) -> tuple[Times, Times]:
    """(seconds of the slowest rank, processor seconds of all ranks), step by step; two of each are
    not timed."""
    seconds: Times = {name: [] for name in steps}
    processor: Times = {name: [] for name in steps}
    for turn in range(count + 2):
        order = list(steps) if turn % 2 else list(reversed(steps))
        for name in order:
            dist.barrier()
            begun, used = time.perf_counter(), time.process_time()
            steps[name]()
            if network.device == "cuda":
                torch.cuda.synchronize()
            spent = torch.tensor(time.process_time() - used, dtype=torch.float64)
            slowest = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(spent)
            if turn > 1:
                seconds[name].append(float(slowest))
                processor[name].append(float(spent))
    return seconds, processor


def compared(
    network: Network, world: int, count: int, kinds: Sequence[str]
) -> dict[str, tuple[Times, Times]]:
    """Kind of plan -> the times of each engine, see `in_turns`."""
    made = {}
    chosen = {kind: KINDS[kind] for kind in kinds} if world > 1 else {"one": (1, 0)}
    for kind, (stages, zero) in chosen.items():
        plan = plan_of(network, stages, zero, ranks=world)
        steps = {
            "ours": by_plan(network, plan, "hetplan"),
            "stock": by_plan(network, plan, "torch"),
        }
        if world == 1:
            steps["by itself"] = plain_step(network)
        elif stages == 1:
            steps["by itself"] = by_itself(network, zero)
        else:
            steps["by itself"] = pipeline_by_itself(network)
        made[kind] = in_turns(network, steps, count)
    return made


def ranks(network: Network, world: int, count: int, kinds: Sequence[str] = ()) -> Any:
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
                    made = compared(network, world, count, kinds)
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


def row(kind: str, seconds: Times, processor: Times) -> tuple[str, ...]:
    """A line of the table of steps on two ranks."""
    medians = [
        f"{1e3 * statistics.median(seconds[name]):.1f}" for name in ("ours", "stock", "by itself")
    ]
    ratios = [
        ratio(times["ours"], times[other])
        for times in (seconds, processor)
        for other in ("stock", "by itself")
    ]
    return kind, *medians, *ratios


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=NETWORKS, default="cpu")
    parser.add_argument("--width", type=int, help="of a block; default 128, on a GPU 768")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    network = NETWORKS[options.device]
    network = replace(network, width=options.width or network.width)
    table, kept = [], []
    if network.device == "cpu" and options.kinds:
        measured = ranks(network, 2, options.steps, options.kinds)
        for kind, (seconds, processor) in measured.items():
            table.append(row(kind, seconds, processor))
            kept.append({"kind": kind, "seconds": seconds, "processor_seconds": processor})
    seconds, processor = ranks(network, 1, options.steps)["one"]
    kept.append({"kind": "one rank", "seconds": seconds, "processor_seconds": processor})
    lines = []
    for name in ("ours", "stock"):
        pairs = zip(processor[name], processor["by itself"], strict=True)
        more = [1e3 * (a - b) / BATCHES for a, b in pairs]
        share = ratio(processor[name], processor["by itself"])
        lines.append((name, f"{statistics.median(more):.2f}", share))
    header = (
        "plan", "ours, ms", "--backend torch, ms", "torch by itself, ms", "ours / stock",
        "ours / by itself", "processor, ours / stock", "processor, ours / by itself",
    )  # fmt: skip
    header_of_one = ("engine", "processor ms per micro-batch", "processor ratio")
    tables = [
        *([markdown("A step on two ranks", header, table)] if table else []),
        markdown("An engine's own time on one rank", header_of_one, lines),
    ]
    save(options.output, tables, kept)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
