"""Executes plans on stock torch's engines: DistributedDataParallel, FSDP2's `fully_shard`, and the
stages and schedules of torch.distributed.pipelining.

These engines execute pipelines of equal replicas with equal micro-batches, whose stages have one
device each. ZeRO 2 and 3 are FSDP2 without and with resharding after the forward pass. FSDP2 shards
over one group of ranks, or over several groups each of which has all shards (HSDP). The layers, the
data, the loss and the checkpoints are those of `engine.distributed`, so that a run may go on under
either engine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from hetplan.adapters.exports.grid import unequal
from hetplan.adapters.exports.titan import SCHEDULES
from hetplan.errors import UnsupportedError
from hetplan.plans.plan import Plan
from hetplan.runtime.engine.buckets import local_cuts
from hetplan.runtime.engine.chain import Chain, Rows
from hetplan.runtime.engine.distributed import Placed
from hetplan.runtime.engine.loop import Box
from hetplan.runtime.engine.pipeline import layer_pass
from hetplan.runtime.engine.position import Position
from hetplan.runtime.engine.transport import host_total, one_group

STOCK_SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipev")


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
    """Yield every feature of a plan and its model that torch's engines lack."""
    first = plan.replicas[0]
    for lacks, _lost_in_files in unequal(plan):
        yield lacks
    if any(len(stage.all_devices) > 1 for stage in first.stages):
        yield "tensor groups"
    if plan.schedule not in STOCK_SCHEDULES:
        yield f"the schedule {plan.schedule}"
    if plan.splits_backward and len(plan.replicas) > 1:
        # DistributedDataParallel and FSDP2 join gradients behind whole backward passes
        yield "replicas whose backward passes are split"
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
    """Yield every feature of a model under this plan that torch's engines lack."""
    first = plan.replicas[0]
    parameters = chain.parameters.values()
    chunk_of: dict[int, int] = {}  # layer -> the first layer of its model chunk
    for stage in first.stages:
        for begin, end in stage.layers:
            chunk_of |= dict.fromkeys(range(begin, end), begin)
    if any(len({chunk_of[layer] for layer in p.layers}) > 1 for p in parameters):
        yield "parameters of several stages"
    shards = max(1, len(plan.replicas) // plan.further.shard_groups)  # shards of a group (HSDP)
    # FSDP2 pads uneven shards along dimension 0 alone
    if plan.zero > 0 and any(p.dim > 0 and p.shape[p.dim] % shards for p in parameters):
        yield "uneven shards of parameters along another dimension than the first"
    if chain.compute is torch.float16:
        yield "fp16's loss scale"


class ModelChunk(nn.Module):
    """A model chunk, layers [first, last), as torch's engines call it: with the tensors that the
    stage before sent, and with the numbers of the rows, by which the chunk finds its data."""

    def __init__(self, stock: "Stock", first: int, last: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(stock.chain.layers[first:last])
        self.first, self.last = first, last
        self.stock = [stock]  # in a list, so that it does not become a submodule

    def forward(self, *x: Tensor, rows: Tensor) -> Any:
        """The tensors for the next stage; for the model's last layer the sum of the losses, [1].

        rows: consecutive numbers of the global batch's rows.
        """
        stock = self.stock[0]
        chain = stock.chain
        first_row, last_row = int(rows[0]), int(rows[-1]) + 1
        read = chain.read(
            stock.rows, (first_row, last_row), self.first, self.last, stock.device, stock.totals
        )
        position = replace(stock.position, first_row=first_row)
        for layer, inputs in zip(range(self.first, self.last), read, strict=True):
            x = layer_pass(
                chain,
                layer,
                (*x, *inputs),
                position,
                stock.layout.recomputation_of(stock.place, layer),
                torch.device(stock.device),
            )
            stock.watch.passed()
        return x[0].reshape(1).clone() if self.last == len(chain.names) else x


class Stock(Placed):
    """This rank's part of a model on stock torch's engines."""

    def __init__(self, module: nn.Module, plan: Plan, **options: Any) -> None:
        super().__init__(module, plan, **options)
        check_stock(plan, self.chain)
        self.take(local_cuts(self.layout, self.chain, self.place))
        replicas, stages = range(len(plan.replicas)), range(len(plan.replicas[0].stages))
        # [replica][stage] rank, and [stage][replica] rank
        ranks_of_replicas = [[self.layout.ranks_of(i, j)[0][0] for j in stages] for i in replicas]
        ranks_of_stages = list(zip(*ranks_of_replicas, strict=True))
        backend = "gloo" if self.device == "cpu" else "nccl"
        pipeline_groups = [one_group(ranks, backend) for ranks in ranks_of_replicas]
        replica_groups = [one_group(ranks, backend) for ranks in ranks_of_stages]
        self.groups = plan.further.shard_groups
        self.mesh = self._mesh(ranks_of_stages, backend) if plan.zero else None
        chunks = self.layout.stage(self.place).layers
        self.parts = [ModelChunk(self, first, last) for first, last in chunks]
        along = self.layout.virtual_stages(self.place.replica)
        pipeline_stages = [
            PipelineStage(
                self._wrapped(part, replica_groups[self.place.stage]),
                along.index((self.place.stage, chunk)), len(along),
                torch.device(self.device), group=pipeline_groups[self.place.replica],
            )
            for chunk, part in enumerate(self.parts)
        ]  # fmt: skip
        several_chunks = plan.schedule not in ("gpipe", "1f1b")
        schedule_class = schedules.get_schedule_class(SCHEDULES[plan.pass_schedule])
        self.schedule: Any = schedule_class(
            pipeline_stages if several_chunks else pipeline_stages[0], plan.replicas[0].steps,
            # the factor averages over the batch, so that the engine does not divide once more
            loss_fn=lambda out, _: self.factor * out.sum(), scale_grads=False,
        )  # fmt: skip

    def _wrapped(self, part: ModelChunk, group: Any) -> nn.Module:
        """A part that sums its gradients over the replicas. Under ZeRO it is sharded layer by
        layer, or at once where layers share parameters."""
        if self.plan.zero:
            modules: list[nn.Module] = [part]
            if all(len(p.layers) == 1 for p in self.chain.parameters.values()):
                modules = [*part.layers, part]
            for module in modules:
                fully_shard(
                    module, mesh=self.mesh, reshard_after_forward=self.plan.zero == 3,
                    shard_placement_fn=self._placement,
                )  # fmt: skip
        elif group.size() > 1 and any(p.requires_grad for p in part.parameters()):
            return DistributedDataParallel(part, process_group=group)
        return part

    def _placement(self, parameter: nn.Parameter) -> Any:
        """The placement of a parameter's shards: along the dimension that checkpoints move to the
        front."""
        (name,) = {name for name, updated in self.updated() if updated is parameter}
        return Shard(self.chain.parameters[name].dim)

    def _mesh(self, ranks_of_stages: Sequence[Sequence[int]], backend: str) -> DeviceMesh:
        """The mesh of the ranks that have this rank's stage: [ranks], or under HSDP
        [shard group, rank in the group]. All ranks call this together.

        ranks_of_stages: [stage][replica] rank.
        """
        device = torch.device(self.device).type
        if self.groups == 1:
            return DeviceMesh.from_group(
                one_group(ranks_of_stages[self.place.stage], backend), device
            )
        grids = [torch.tensor(ranks).view(self.groups, -1) for ranks in ranks_of_stages]
        own_groups = []  # this rank's group of replicated shards, then its shard group
        for grids_of_dimension in ([grid.t() for grid in grids], grids):
            own_group = None
            for grid in grids_of_dimension:
                for ranks in grid.tolist():
                    group = one_group(ranks, backend)  # every rank makes every group
                    if self.place.rank in ranks:
                        own_group = group
            own_groups.append(own_group)
        return DeviceMesh.from_group(
            own_groups, device, mesh=grids[self.place.stage], mesh_dim_names=("replicate", "shard")
        )

    def iteration(self, step: int, rows: Rows | None) -> float:
        """Run all passes and return the loss of the whole batch. All passes are one event, since
        torch's engines do not report them one by one."""
        self.rows = self.rows_of(step, rows)
        self.position = Position(self.seed, step, autocast=self.autocast)
        batches = self.layout.micro_batches[self.place.replica]
        has_last_layer = self.parts[-1].last == len(self.chain.names)
        with self.watch.during("prepare", 0, step):
            reported = batches if has_last_layer else []
            data = [partial(self.rows, first, last) for first, last in reported]
            totals = self.add_up(step, self.rows, data)
        self.totals, weight = totals.values, totals.weight
        averaged = len(self.plan.replicas)  # torch's engines divide gradients by this number
        self.factor = averaged / weight
        losses = list[Tensor]()
        with self.watch.during("backward", 0, step), self.watch.meets():
            # chunks find their data by these numbers; the loss function ignores its target
            row_numbers = torch.arange(batches[0][0], batches[-1][1])
            self.schedule.step(
                rows=row_numbers, target=row_numbers, losses=losses, return_outputs=False
            )
        with self.watch.during("synchronise", 0, step):
            loss = host_total(float(sum(loss.detach() for loss in losses))) / averaged
            totals.check_loss(loss)
            return loss

    def updated(self) -> list[tuple[str, nn.Parameter]]:
        """(unsplit name, parameter) for each parameter of this rank's layers; under FSDP2 the
        parameters are distributed tensors."""
        parameters: dict[str, nn.Parameter] = {}
        for part in self.parts:
            for number, layer in zip(range(part.first, part.last), part.layers, strict=True):
                for name_in_layer, name in self.chain.parameter_names[number].items():
                    parameters[name] = layer.get_parameter(name_in_layer)
        return list(parameters.items())

    def boxes(
        self,
        values: Mapping[int, Tensor] | None = None,
        *,
        deduplicated: bool = False,
        scalars: bool = False,
    ) -> Iterator[Box]:
        """Boxes of flat tensors, as in `engine.distributed`. FSDP2 gives every shard the same
        number of rows, rounded up; the last shards may have fewer rows or none."""
        shards = len(self.plan.replicas) // self.groups
        shard_group, index = divmod(self.place.replica, shards)
        # all shard groups have the same shards; without ZeRO every rank has all elements
        saves = shard_group == 0 and (index == 0 or self.plan.zero > 0)
        for name, parameter in self.updated():
            tensor = parameter.data if values is None else values.get(id(parameter))
            if tensor is None or (deduplicated and not saves):
                continue
            shape = self.shapes[name] or (1,)
            dim = self.chain.parameters[name].dim
            rows = shape[dim]
            row_elements = prod(shape[:dim]) * prod(shape[dim + 1 :])
            first_row = 0
            if self.plan.zero:
                rows_of_shard = -(-rows // shards)  # rounded up
                first_row = min(rows_of_shard * index, rows)
            size = local(parameter).numel()
            shard = local(tensor).detach()
            if shard.dim():
                shard = shard.movedim(dim, 0)
            yield Box(name, (first_row * row_elements,), (size,), (rows * row_elements,), shard)


def local(value: Any) -> Any:
    """This rank's shard of a distributed tensor; any other tensor as it is."""
    return value.to_local() if hasattr(value, "to_local") else value
