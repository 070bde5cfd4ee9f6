"""`distribute`: a torch module and a plan become this rank's part of a training run, in the manner
of DDP.

    torch.distributed.init_process_group("gloo")
    model = distribute(module, plan)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
    for step in range(steps):
        loss = model.train_step()   # all passes of the plan; the loss of the whole batch
        optimizer.step()
        optimizer.zero_grad()
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property
from math import floor, inf, isfinite, log2
from operator import itemgetter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetplan.errors import HetplanError, InputError, UnsupportedError, kind_and_text, require
from hetplan.plans.making import check_world
from hetplan.plans.places import Place
from hetplan.plans.plan import Plan
from hetplan.plans.refusals import check_executed
from hetplan.runtime.engine.buckets import LocalCuts, bucket_plans, local_cuts
from hetplan.runtime.engine.chain import Chain, Rows, TensorGroup, describe
from hetplan.runtime.engine.data import Reading, check_alike, drawing_data
from hetplan.runtime.engine.layout import Layout
from hetplan.runtime.engine.loop import Box, Trained
from hetplan.runtime.engine.pipeline import Mail, Pipeline, streams
from hetplan.runtime.engine.position import Position
from hetplan.runtime.engine.states import States
from hetplan.runtime.engine.tensors import spread
from hetplan.runtime.engine.transport import (
    Group,
    Staging,
    Transport,
    gather_objects,
    host_total,
)
from hetplan.runtime.events import Watch
from hetplan.runtime.launch.devices import local_device
from hetplan.runtime.tracing.experts import Experts
from hetplan.runtime.tracing.split import leaves, mapped
from hetplan.schema import Range

# fp32: in the parameters' own type
COMPUTE = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Placed(Trained):
    """This rank's part of a model under a plan. seed: of dropout; step: iterations begun.

    device: "cpu", "cuda" (this rank's GPU: by LOCAL_RANK, or torch's current one), "cuda:1" or
    "auto". precision: of the passes and of what stages send each other; weights, gradients and
    updates stay what they are. chain: of the module on a CPU, where it is there already.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        *,
        loss: Callable[[Any, Any], Tensor] | None = None,
        example: Any = None,
        device: str = "cpu",
        seed: int = 0,
        watch: Watch | None = None,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        chain: Chain | None = None,
    ) -> None:
        check_executed(plan)
        check_world(plan, dist.get_world_size())
        require(
            isinstance(module, nn.Module),
            "plans of stages run torch modules",
            where=plan.name,
            got=type(module).__name__,
            expected="a torch.nn.Module",
        )
        require(
            type(module).__name__ != "OptimizedModule",
            "plans cut modules into layers, which are compiled one by one",
            where=plan.name,
            got="torch.compile(module)",
            expected="layer.compile() of model.chain.layers",
            kind=UnsupportedError,
        )
        self.module, self.plan, self.seed, self.step = module, plan, seed, 0
        self.device = local_device(device)
        self.layout = Layout(plan)
        self.place = plan.places[dist.get_rank()]
        self.chain = chain or describe(
            module, plan.workload.layers, paired(example) if example else example_of(module),
            compute=COMPUTE[precision], loss=loss, device=self.device,
            spread=plan.further.expert,
        )  # fmt: skip
        self.shapes = {name: p.shape for name, p in self.chain.parameters.items()}
        self.watch = watch or Watch()

    def take(self, cuts: LocalCuts) -> dict[str, nn.Parameter]:
        """Cut this rank's layers in place: every parameter becomes the part that this rank has, on
        the device."""
        made: dict[str, nn.Parameter] = {}
        for k in self.layout.layers(self.place):
            layer = self.chain.layers[k]
            for inside, name in self.chain.parameter_names[k].items():
                owner, _, last = inside.rpartition(".")
                if name not in made:
                    parameter: Any = layer.get_parameter(inside)
                    whole = self.module.initial(name, parameter) if parameter.is_meta else parameter
                    part = cuts[name].take(whole.detach()).to(self.device)
                    made[name] = nn.Parameter(part.contiguous(), parameter.requires_grad)
                setattr(layer.get_submodule(owner), last, made[name])
            layer.to(self.device)  # what is left: buffers
        return made

    def rows_of(self, step: int, rows: Rows | None) -> Rows:
        """Data of an iteration's rows, each asked for once: the loop's, or the module's own, with
        what is drawn for them the same on all ranks that read them. Raises InputError where there
        are more or fewer rows than were asked for."""
        of_step = rows or (lambda first, last: self.module.batch(step, first, last))

        @cache
        def checked(first: int, last: int) -> Any:
            with drawing_data(self.seed, step, first):
                batch = paired(of_step(first, last))
            for value in leaves(batch):
                rows = len(value) if isinstance(value, Tensor) else last - first
                require(
                    rows == last - first,
                    f"data of rows {first} to {last}",
                    got=f"{rows} rows",
                    expected=f"{last - first}",
                )
            return batch

        def taken(first: int, last: int) -> Any:
            begin, end = self.layout.requested_rows(self.place.replica, (first, last))
            batch = checked(begin, end)
            if (begin, end) == (first, last):
                return batch
            return mapped(
                batch, lambda x: x[first - begin : last - begin] if isinstance(x, Tensor) else x
            )

        return taken

    @cached_property
    def readings(self) -> list[Reading]:
        """Rows that several ranks read, the same on every rank."""
        ranks: dict[tuple[int, int, Range], list[int]] = defaultdict(list)
        for place in self.plan.places:
            if self.reads(place):
                for batch in range(self.plan.replicas[place.replica].steps):
                    own = self.layout.local_rows(place, batch)
                    if own[0] < own[1]:
                        asked = self.layout.requested_rows(place.replica, own)
                        ranks[place.replica, batch, asked].append(place.rank)
        return [
            Reading(rows, tuple(own), f"replica {replica}, micro-batch {batch}")
            for (replica, batch, rows), own in sorted(ranks.items())
            if len(own) > 1
        ]

    def reads(self, place: Place) -> bool:
        """Whether a rank reads data: for its layers, or to count what its targets weigh."""
        chunks = self.layout.stage(place).layers
        weighs = chunks[-1][1] == len(self.chain.names) and self.layout.reports_loss(place)
        return weighs or any(self.chain.source.reads(first, last) for first, last in chunks)

    def check_data(self, step: int, rows: Rows) -> None:
        """Raise InputError where ranks have different data of the same rows. All ranks
        together."""
        if self.readings:
            check_alike(step, self.readings, self.place.rank, rows)

    def gather(self) -> nn.Module:
        """The module, on rank 0 with all that has been trained; of a model that is split, see
        `tracing.split`. All ranks call this together."""
        self.chain.check_gathers()
        mine: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
        for box in self.boxes(mine=True):
            mine[box.name].append((box.offsets[0], box.values.reshape(-1).cpu()))
        for name in self.shapes:
            parts = [part for own in gather_objects(mine[name]) for part in own]
            if dist.get_rank() == 0:
                whole = torch.cat([values for _, values in sorted(parts, key=itemgetter(0))])
                parameter, dim = (
                    self.module.get_parameter(name).data,
                    self.chain.parameters[name].dim,
                )
                moved = parameter.movedim(dim, 0) if parameter.dim() else parameter
                moved.copy_(whole.view(moved.shape))
        return self.module


class Distributed(Placed):
    """A part on hetplan's own engine, which takes every plan. staging: "always" sends everything by
    way of the host's memory (see `engine.transport`). bucket_bytes: of gradients that are summed
    together while the passes go on.

    Under fp16 the loss is scaled by `scale` times a power of two near the batch's weight. If any
    gradient on any rank is not finite, all gradients become None, so that optimizers skip the step.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        *,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        staging: Staging = "auto",
        bucket_bytes: int = 4 << 20,
        **options: Any,
    ) -> None:
        super().__init__(module, plan, precision=precision, **options)
        self.scaled = precision == "fp16"
        plans = bucket_plans(self.layout, self.chain, bucket_bytes)
        tensor_groups = [
            ranks
            for i, replica in enumerate(plan.replicas)
            for j in range(len(replica.stages))
            for ranks in self.layout.computing_groups(i, j)
        ]
        self.transport = Transport.over(self.device, staging, self.watch)
        groups = self.transport.groups(
            [*tensor_groups, *(group for p in plans for group in p.groups)]
        )
        exchanging = self.transport.groups(self.layout.expert_groups.values(), number=-1)
        self.transport = self.transport.opened(lambda: streams(self.layout))
        cuts = local_cuts(self.layout, self.chain, self.place)
        parameters = self.take(cuts)
        self._join_groups(groups, exchanging)
        self.chain = spread(self.chain, self.layout, self.place, groups)
        shares = [plan.zero_shares[p.device] if plan.zero_shares else 1.0 for p in plan.places]
        self.states = States(
            plans, groups, self.place.rank, parameters, cuts,
            zero=plan.zero, shares=shares, in_step=plan.in_step,
        )  # fmt: skip
        self.pipeline = Pipeline(
            self.layout, self.place, self.chain, self.states,
            Mail(self.layout, self.place, self.transport),
        )  # fmt: skip

    def _join_groups(
        self,
        groups: Mapping[tuple[int, ...], Group],
        exchanging: Mapping[tuple[int, ...], Group],
    ) -> None:
        """Give modules with a `tensor` their part of the tensor group, experts the group that they
        exchange tokens with, and modules that can recompute the plan's choice of it."""
        ranks = self.layout.ranks_of(self.place.replica, self.place.stage)[self.place.group]
        part = self.layout.part(self.place)
        group = TensorGroup(part.index, part.shares, part.expert, groups.get(tuple(sorted(ranks))))
        layers = [self.chain.layers[k] for k in self.layout.layers(self.place)]
        for module in [inner for layer in layers for inner in layer.modules()]:
            if isinstance(getattr(module, "tensor", None), TensorGroup):
                module.tensor = group
            if isinstance(module, Experts):
                module.join(group, exchanging[self.layout.expert_groups[self.place.rank]])
            if self.plan.recomputation == "selective" and hasattr(module, "selective"):
                module.selective = True

    def iteration(self, step: int, rows: Rows | None) -> float:
        """All passes of the plan; rows: (first, last) -> (inputs, targets)."""
        of_step = self.rows_of(step, rows)
        with self.watch.during("prepare", 0, step):
            self.states.begin(self.pipeline.visits)
            self.check_data(step, of_step)
            weight = host_total(self.pipeline.weight(of_step))
        scale = 2.0 ** floor(log2(weight)) * self.scale.value if self.scaled else 1.0
        summed = self.pipeline.run(
            of_step, Position(self.seed, step, autocast=self.autocast), weight / scale
        )
        with self.watch.during("synchronise", 0, step):
            self.pipeline.mail.settle()
            self.states.end()
            if self.scaled:
                finite = isfinite(self.gradient_norm(inf))
                for _, parameter in self.updated():
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad.div_(scale) if finite else None
                self.scale = self.scale.following(finite=finite)
            return host_total(summed) / weight

    def updated(self) -> list[tuple[str, nn.Parameter]]:
        """Shares of parameters under ZeRO, else what this rank holds."""
        return (
            list(self.states.parameters.items())
            if self.states.zero == 0
            else [(s.piece.name, s.parameter) for b in self.states.buckets for s in b.shares]
        )

    def boxes(
        self,
        values: Mapping[int, Tensor] | None = None,
        *,
        mine: bool = False,
        scalars: bool = False,
    ) -> Iterator[Box]:
        """Of flat tensors, the dimension that tensor ranks split in front."""
        for bucket in self.states.buckets:
            first = bucket.plan.shard_groups[0] if self.states.zero else bucket.plan.owners[:1]
            if not mine or bucket.rank in first:
                yield from bucket.boxes(values, scalars=scalars)


def paired(batch: Any) -> tuple[Any, Any]:
    """(inputs, targets) of some rows; a dictionary of all that a module's forward takes has no
    targets beside."""
    if isinstance(batch, Mapping):
        return batch, None
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise InputError(
            "`batch` returned something else", got=type(batch).__name__,
            expected="(inputs, targets), or a dictionary of what the model's forward takes",
        )  # fmt: skip
    return batch[0], batch[1]


def example_of(module: nn.Module) -> tuple[Any, Any]:
    """One sample of the module's own data."""
    batch = getattr(module, "batch", None)
    if not callable(batch):
        raise InputError(
            "model has no `batch`",
            got=type(module).__name__,
            expected="example=(inputs, targets) of a sample",
        )
    try:
        with drawing_data(0, 0, 0):
            return paired(batch(0, 0, 1))
    except HetplanError:
        raise
    except Exception as error:  # the author's code
        raise InputError(f"the model's `batch` raises {kind_and_text(error)}") from error
