"""Plans that stock torch can say, on its own engines: DistributedDataParallel, FSDP2's
`fully_shard`, and the stages and schedules of torch.distributed.pipelining.

Pipelines are equal replicas of stages on one device each, with equal micro-batches; ZeRO 2 and 3
are FSDP2 without and with resharding behind the forward pass, over one group of ranks or over
several that hold all shards each (HSDP). The layers, the data, the loss and checkpoints are those
of `engine.distributed`, so that a run may go on under either engine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from hetplan.adapters.exports.documents import SCHEDULES
from hetplan.adapters.exports.grid import unequal
from hetplan.errors import UnsupportedError
from hetplan.plans.plan import Plan
from hetplan.runtime.engine.buckets import local_cuts
from hetplan.runtime.engine.chain import Chain, Rows
from hetplan.runtime.engine.distributed import Placed
from hetplan.runtime.engine.loop import Box
from hetplan.runtime.engine.pipeline import layer_pass
from hetplan.runtime.engine.position import Position
from hetplan.runtime.engine.transport import host_total, one_group


def check_stock(plan: Plan, chain: Chain) -> None:
    """Raise UnsupportedError for the first feature of a plan that torch's engines lack."""
    for feature in lacking(plan, chain):
        raise UnsupportedError(
            "stock torch has no engine for this plan",
            where=plan.name,
            got=feature,
            expected="hetplan's own engine (--backend hetplan)",
        )


def lacking(plan: Plan, chain: Chain) -> Iterator[str]:
    """Every feature of a plan and its model that torch's engines lack."""
    first = plan.replicas[0]
    for difference, _ in unequal(plan):
        yield difference
    if any(len(stage.all_devices) > 1 for stage in first.stages):
        yield "tensor groups"
    if plan.zero == 1:
        yield "ZeRO 1"
    if plan.further.expert > 1:
        yield "experts over ranks"
    if len(first.stages) > 1 and first.steps < len(first.stages):
        yield "fewer micro-batches than stages"
    yield from lacking_for_model(plan, chain)
    if plan.recomputation == "selective":
        yield "recomputation of the scores alone"


def lacking_for_model(plan: Plan, chain: Chain) -> Iterator[str]:
    """Every feature of a model under this plan that torch's engines lack."""
    first, parameters = plan.replicas[0], chain.parameters.values()
    stage_of: dict[int, int] = {}  # layer -> its stage (and chunk), by the first layer there
    for stage in first.stages:
        for begin, end in stage.layers:
            stage_of |= dict.fromkeys(range(begin, end), begin)
    if any(len({stage_of[layer] for layer in p.layers}) > 1 for p in parameters):
        yield "parameters of several stages"
    shards = max(1, len(plan.replicas) // plan.further.shard_groups)  # of each group (HSDP)
    if plan.zero > 0 and any(p.dim and p.shape[p.dim] % shards for p in parameters):
        yield "uneven shards of parameters along another dimension than the first"
    if chain.compute is torch.float16:
        yield "fp16's loss scale"


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
        stock, chain, own = self.stock[0], self.stock[0].chain, (int(rows[0]), int(rows[-1]) + 1)
        read = chain.read(stock.rows, own, self.first, self.last, stock.device)
        position = replace(stock.position, first_row=own[0])
        for k, inputs in zip(range(self.first, self.last), read, strict=True):
            x = layer_pass(
                chain,
                k,
                (*x, *inputs),
                position,
                stock.layout.recomputation_of(stock.place, k),
                torch.device(stock.device),
            )
            stock.watch.passed()
        return x[0].reshape(1).clone() if self.last == len(chain.names) else x


class Stock(Placed):
    """A part on torch's engines."""

    def __init__(self, module: nn.Module, plan: Plan, **options: Any) -> None:
        super().__init__(module, plan, **options)
        check_stock(plan, self.chain)
        self.take(local_cuts(self.layout, self.chain, self.place))
        replicas, stages = range(len(plan.replicas)), range(len(plan.replicas[0].stages))
        ranks = [[self.layout.ranks_of(i, j)[0][0] for j in stages] for i in replicas]
        backend = "gloo" if self.device == "cpu" else "nccl"
        pipelines = [one_group(own, backend) for own in ranks]
        alike = list(zip(*ranks, strict=True))
        replicated = [one_group(own, backend) for own in alike]
        self.groups = plan.further.shard_groups
        self.mesh = self._mesh(alike, backend) if plan.zero else None
        chunks = self.layout.stage(self.place).layers
        self.parts = [Part(self, first, last) for first, last in chunks]
        made = [
            PipelineStage(
                self._wrapped(part, replicated[self.place.stage]),
                len(stages) * chunk + self.place.stage, len(stages) * len(chunks),
                torch.device(self.device), group=pipelines[self.place.replica],
            )
            for chunk, part in enumerate(self.parts)
        ]  # fmt: skip
        self.schedule: Any = schedules.get_schedule_class(SCHEDULES[plan.pass_schedule])(
            made if plan.schedule == "interleaved-1f1b" else made[0], plan.replicas[0].steps,
            loss_fn=lambda out, _: self.factor * out.sum(), scale_grads=False,
        )  # fmt: skip

    def _wrapped(self, part: Part, group: Any) -> nn.Module:
        """A part that sums its gradients over the replicas, under FSDP2 layer by layer."""
        if self.plan.zero:
            alone = all(len(p.layers) == 1 for p in self.chain.parameters.values())
            for module in (*part.layers, part) if alone else (part,):
                fully_shard(
                    module, mesh=self.mesh, reshard_after_forward=self.plan.zero == 3,
                    shard_placement_fn=self._placement,
                )  # fmt: skip
        elif group.size() > 1 and any(p.requires_grad for p in part.parameters()):
            return DistributedDataParallel(part, process_group=group)
        return part

    def _placement(self, parameter: nn.Parameter) -> Any:
        """The dimension that checkpoints have in front."""
        (name,) = {name for name, held in self.updated() if held is parameter}
        return Shard(self.chain.parameters[name].dim)

    def _mesh(self, alike: Sequence[Sequence[int]], backend: str) -> DeviceMesh:
        """The replicas of this rank's stage: one group, or [groups that hold all shards, ranks of
        one]. alike [stages]: their replicas' ranks. All ranks together."""
        device, own = torch.device(self.device).type, alike[self.place.stage]
        if self.groups == 1:
            return DeviceMesh.from_group(one_group(own, backend), device)
        grids = [torch.tensor(ranks).view(self.groups, -1) for ranks in alike]
        sides = [[grid.t().tolist() for grid in grids], [grid.tolist() for grid in grids]]
        made = [[(one_group(r, backend), r) for each in side for r in each] for side in sides]
        mine = [next(g for g, ranks in side if self.place.rank in ranks) for side in made]
        return DeviceMesh.from_group(
            mine, device, mesh=grids[self.place.stage], mesh_dim_names=("replicate", "shard")
        )

    def iteration(self, step: int, rows: Rows | None) -> float:
        """All passes; torch's engines say nothing of each of them."""
        self.rows = self.rows_of(step, rows)
        self.position = Position(self.seed, step, autocast=self.autocast)
        batches = self.layout.micro_batches[self.place.replica]
        ends = self.parts[-1].last == len(self.chain.names)
        with self.watch.during("prepare", 0, step):
            self.check_data(step, self.rows)
            weigh = self.chain.source.weigh
            weight = host_total(sum(weigh(self.rows(a, b)) for a, b in batches) if ends else 0.0)
        averaged = len(self.plan.replicas)  # torch's engines divide by their number
        self.factor, losses = averaged / weight, list[Tensor]()
        with self.watch.during("backward", 0, step), self.watch.meets():
            numbers = torch.arange(batches[0][0], batches[-1][1])
            self.schedule.step(rows=numbers, target=numbers, losses=losses, return_outputs=False)
        with self.watch.during("synchronise", 0, step):
            return host_total(float(sum(loss.detach() for loss in losses))) / averaged

    def updated(self) -> list[tuple[str, nn.Parameter]]:
        """What this rank holds; under FSDP2 distributed tensors."""
        own = {
            name: part.layers[k - part.first].get_parameter(inside)
            for part in self.parts
            for k in range(part.first, part.last)
            for inside, name in self.chain.parameter_names[k].items()
        }
        return list(own.items())

    def boxes(
        self,
        values: Mapping[int, Tensor] | None = None,
        *,
        mine: bool = False,
        scalars: bool = False,
    ) -> Iterator[Box]:
        """As of `engine.distributed`; FSDP2's shares are of equally many rows, but for the last
        ones."""
        count = len(self.plan.replicas) // self.groups
        group, replica = divmod(self.place.replica, count)
        for name, parameter in self.updated():
            held = parameter.data if values is None else values.get(id(parameter))
            if held is None or (mine and (group or (replica and not self.plan.zero))):
                continue
            whole, dim = (*self.shapes[name], 1), self.chain.parameters[name].dim
            rows, rest = whole[dim], [*whole[:dim], *whole[dim + 1 :]]
            first = min(-(-rows // count) * replica, rows) if self.plan.zero else 0
            size, here = local(parameter).numel(), local(held).detach()
            if here.dim():
                here = here.movedim(dim, 0)
            yield Box(name, (first * prod(rest),), (size,), (rows * prod(rest),), here)


def local(value: Any) -> Any:
    """What is here of a distributed tensor; any other tensor as it is."""
    return value.to_local() if hasattr(value, "to_local") else value
