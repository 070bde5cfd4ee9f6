"""A model measured by ranks that hold its weights in shards, a target of `parity.forked`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fakes.workloads import shape
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.zoo import text_model
from hetplan.profiling.profiles.largest_batch import OutOfMemoryOnDevice
from hetplan.runtime.measuring.batches import Trial, measure_batch_curve
from hetplan.runtime.measuring.networks import Sharded, network as network_of, saved_bytes

WORLDS = [2]


def deep() -> Model:
    """Twelve blocks, of which a device of a ZeRO group of 64 holds little under stage 3."""
    return load_model(
        text_model("deep", "made up", 2, shape(layers=12, tied=True)), precision="fp32"
    )


def limit() -> float:
    """Bytes for the activations of two samples and a half, under ZeRO 3 alone."""
    whole = Trial(deep(), "cpu", 1e12, devices=64, repeats=1)
    return whole.states.resident(3, 1 / 64) + 2.5 * whole.forward_bytes(1, 1e12)


def gradients(sharded: Sharded, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """By parameter of each kind of layer: from shards that this rank holds of every layer, and of
    one process that has all weights, blocks added up."""
    torch.manual_seed(dist.get_rank())
    plain = network_of(deep(), "cpu")
    for shard, own in zip(sharded.shards, plain.layer_parameters, strict=True):
        shard.normal_(std=0.02)
        everyones = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, shard)
        sizes = [p.numel() for p in own]
        for parameter, values in zip(
            own, torch.cat(everyones)[: sum(sizes)].split(sizes), strict=True
        ):
            parameter.data = values.view_as(parameter)
    for passed in (sharded, plain):
        passed.loss(tokens).backward()
    first, *blocks, last = ([p.grad for p in own] for own in plain.layer_parameters)
    summed = [sum(each) for each in zip(*blocks, strict=True)]
    return [p.grad for p in sharded.parameters], [*first, *summed, *last]


def work(rank: int, world: int, folder: Path) -> None:
    """Gradients; memory that is short on one rank; a curve."""
    trial = Trial(deep(), "cpu", 1e12, devices=64, repeats=1)
    network = trial.network
    assert isinstance(network, Sharded)
    tokens = torch.arange(6).view(3, 2)
    found = gradients(network, tokens)
    short = []
    for limited in (rank == 1, False):
        try:
            with saved_bytes(network.parameters, 100.0) if limited else nullcontext():
                network.loss(tokens)
            short.append(False)
        except OutOfMemoryOnDevice:
            short.append(True)
    held = sum(shard.numel() for shard in network.shards)
    curve = measure_batch_curve(
        deep(), "cpu", memory=limit() + rank, devices=64, repeats=1, largest=4
    )
    torch.save((found, short, held, curve.model_dump()), folder / f"shards-{rank}.pt")
