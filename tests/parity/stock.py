"""Plans that stock torch can say, on its own engines, which ours is compared with:
DistributedDataParallel, FSDP2's `fully_shard`, and the stages and schedules of
torch.distributed.pipelining.

Pipelines are equal replicas of stages on one device each, with equal micro-batches; ZeRO 2 and 3
are FSDP2 without and with resharding behind the forward pass. The layers, the data, the loss and
checkpoints are those of `execution.distributed`, so that a run may go on under either.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hetplan.errors import UnsupportedError
from hetplan.formulations.joint.plan import Plan
from hetplan.runtime.execution.chain import Chain
from hetplan.runtime.execution.distributed import Placed, exactly
from hetplan.runtime.execution.loop import Box
from hetplan.runtime.execution.pipeline import Rows
from hetplan.runtime.execution.places import held_by
from hetplan.runtime.execution.position import Position, at, drawing
from hetplan.runtime.execution.transport import host_total, one_group
from hetplan.runtime.export.documents import SCHEDULES


def check_stock(plan: Plan, chain: Chain) -> None:
    """Raise UnsupportedError for the first thing of a plan that torch's engines cannot say."""
    first = plan.replicas[0]
    stages = len(first.stages)
    alike = [([s.layers for s in r.stages], r.micro_batches) for r in plan.replicas]
    shares = plan.zero_shares or [1.0] * len(plan.devices)
    owners = [p.layers for p in chain.parameters.values()]
    range_of = {k: a for s in first.stages for a, b in s.layers for k in range(a, b)}
    lacking = {
        "programs": plan.schedule == "spmd",
        "replicas or micro-batches that differ": alike.count(alike[0]) < len(alike)
        or len({batch.samples for batch in first.micro_batches}) > 1,
        "tensor ranks and row groups": any(
            len(s.all_devices) > 1 for r in plan.replicas for s in r.stages
        ),
        "ZeRO 1, or unequal shards": plan.zero == 1
        or (plan.zero > 0 and len({shares[d] for d in plan.ranks}) > 1),
        "fewer micro-batches than stages": stages > 1 and first.steps < stages,
        "parameters of several stages": any(len({range_of[k] for k in o}) > 1 for o in owners),
        "shards of parameters that layers divide": plan.zero > 0
        and any(p.dim for p in chain.parameters.values()),
        "fp16's loss scale": chain.compute is torch.float16,
        "recomputation of a part": plan.recomputation in ("selective", "operators"),
    }
    for what, lacks in lacking.items():
        if lacks:
            raise UnsupportedError(
                "stock torch has no engine for this plan", where=plan.name, got=what,
                expected="hetplan's own engine",
            )  # fmt: skip


class Part(nn.Module):
    """Layers [first, last) as torch's engines call them: on what the stage before sent and on the
    numbers of the rows, by which a stage finds its data."""

    def __init__(self, stock: "Stock", first: int, last: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(stock.chain.layers[first:last])
        self.first, self.last = first, last
        self.stock = [stock]  # not as a submodule

    def forward(self, *x: Tensor, rows: Tensor) -> Any:
        """What passes on, or [1] the sum of the losses."""
        stock, chain = self.stock[0], self.stock[0].chain
        position = replace(stock.position, first_row=int(rows[0]))
        read: Any = [()] * (self.last - self.first)
        if chain.source.reads(self.first, self.last):
            data = stock.data(position.first_row, int(rows[-1]) + 1)
            read = chain.source.feed(data, self.first, self.last)
        for k, inputs in zip(range(self.first, self.last), read, strict=True):

            def act(*values: Any, k: int = k) -> tuple[Tensor, ...]:
                with at(position), drawing(k, torch.device(stock.device)):
                    return chain.call(k, values)

            again = stock.plan.recomputation == "full" and k + 1 < len(chain.names)
            values = (*x, *(i.to(stock.device) if isinstance(i, Tensor) else i for i in inputs))
            x = checkpoint(act, *values, use_reentrant=False) if again else act(*values)
        return x[0].reshape(1).clone() if self.last == len(chain.names) else x


class Stock(Placed):
    """A part on torch's engines."""

    def __init__(self, module: nn.Module, plan: Plan, **options: Any) -> None:
        super().__init__(module, plan, **options)
        check_stock(plan, self.chain)
        self.take(held_by(self.layout, self.chain, self.place))
        replicas, stages = range(len(plan.replicas)), range(len(plan.replicas[0].stages))
        ranks = [[self.layout.ranks_of(i, j)[0][0] for j in stages] for i in replicas]
        backend = "gloo" if self.device == "cpu" else "nccl"
        pipelines = [one_group(own, backend) for own in ranks]
        alike = [one_group(own, backend) for own in zip(*ranks, strict=True)]
        self.parts = [Part(self, a, b) for a, b in self.layout.stage(self.place).layers]
        self.factor, self.position = 1.0, Position()
        made = [
            PipelineStage(
                self._wrapped(part, alike[self.place.stage]),
                len(stages) * chunk + self.place.stage, len(stages) * len(self.parts),
                torch.device(self.device), group=pipelines[self.place.replica],
            )
            for chunk, part in enumerate(self.parts)
        ]  # fmt: skip
        self.schedule: Any = get_schedule_class(SCHEDULES[plan.schedule])(
            made if plan.schedule == "interleaved-1f1b" else made[0], plan.replicas[0].steps,
            loss_fn=lambda out, _: self.factor * out.sum(), scale_grads=False,
        )  # fmt: skip

    def _wrapped(self, part: nn.Module, group: Any) -> Any:
        """A part that sums its gradients over the replicas."""
        if self.plan.zero:
            mesh = DeviceMesh.from_group(group, torch.device(self.device).type)
            sharded: Any = fully_shard(part, mesh=mesh, reshard_after_forward=self.plan.zero == 3)
            sharded.set_gradient_divide_factor(1.0)
            return sharded
        if group.size() > 1 and any(p.requires_grad for p in part.parameters()):
            return DistributedDataParallel(part, process_group=group)
        return part

    def iteration(self, step: int, rows: Rows | None) -> float:
        """All passes; torch's engines say nothing of each of them."""
        of_step = exactly(rows or (lambda first, last: self.module.batch(step, first, last)))
        self.data, self.position = cache(of_step), Position(self.seed, step)
        batches = self.layout.micro_batches[self.place.replica]
        with self.watch.during("prepare", 0, step):
            ends = any(part.last == len(self.chain.names) for part in self.parts)
            own = sum(self.chain.source.weigh(self.data(a, b)) for a, b in batches) if ends else 0.0
            weight = host_total(own)
            averaged = 1 if self.plan.zero else len(self.plan.replicas)  # DDP divides
            self.factor = averaged / weight
        with self.watch.during("backward", 0, step):
            losses: list[Tensor] = []
            numbers = torch.arange(batches[0][0], batches[-1][1])
            self.schedule.step(rows=numbers, target=numbers, losses=losses, return_outputs=False)
        with self.watch.during("synchronise", 0, step):
            return host_total(sum(float(loss.detach()) for loss in losses)) / averaged

    def updated(self) -> list[tuple[str, nn.Parameter]]:
        """What this rank holds; under FSDP2 distributed tensors."""
        held = {
            name: part.layers[k - part.first].get_parameter(inside)
            for part in self.parts
            for k in range(part.first, part.last)
            for inside, name in self.chain.own[k].items()
        }
        return list(held.items())

    def boxes(
        self,
        values: Mapping[int, Tensor] | None = None,
        *,
        mine: bool = False,
        scalars: bool = False,
    ) -> Iterator[Box]:
        """As of `execution.distributed`; FSDP2's shares are of equally many rows, but for the last
        ones."""
        replica, count = self.place.replica, len(self.plan.replicas)
        if mine and replica and not self.plan.zero:
            return
        for name, parameter in self.updated():
            held = parameter.data if values is None else values.get(id(parameter))
            if held is None:
                continue
            shape, size, first = self.shapes[name], parameter.numel(), 0
            if self.plan.zero:
                size, each = local(parameter).numel(), -(-shape[0] // count)
                first = min(each * replica, shape[0]) * prod(shape[1:])
            if not scalars:
                held = local(held).detach()
                held = held.movedim(self.chain.parameters[name].dim, 0) if held.dim() else held
            yield Box(name, (first,), (size,), (prod(shape),), held)


def local(value: Any) -> Tensor:
    """What is here of a distributed tensor; any other as it is."""
    here: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return here
