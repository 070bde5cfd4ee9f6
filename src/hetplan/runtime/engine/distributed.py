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

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from math import floor, inf, isfinite, log2
from operator import itemgetter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetplan.errors import InputError, UnsupportedError, require
from hetplan.plans.making import check_world
from hetplan.plans.places import Place
from hetplan.plans.plan import Plan
from hetplan.plans.refusals import check_executed
from hetplan.runtime.engine.buckets import LocalCuts, bucket_plans, local_cuts
from hetplan.runtime.engine.chain import Chain, Rows, TensorGroup, describe
from hetplan.runtime.engine.checkpoint import SavedPart
from hetplan.runtime.engine.data import (
    Reading,
    check_alike,
    drawing_data,
    keeping_generators,
    numbers_of_batch,
)
from hetplan.runtime.engine.layout import Layout
from hetplan.runtime.engine.loop import Box
from hetplan.runtime.engine.pipeline import Mail, Pipeline, streams
from hetplan.runtime.engine.position import Position
from hetplan.runtime.engine.probe import check_probe
from hetplan.runtime.engine.replaced import Replaced
from hetplan.runtime.engine.rows import check_forms, leaves_of
from hetplan.runtime.engine.states import States
from hetplan.runtime.engine.tensors import on_meshes
from hetplan.runtime.engine.totals import BatchTotals, added_up
from hetplan.runtime.engine.transport import (
    Group,
    Staging,
    Transport,
    gather_objects,
    host_sum,
    host_total,
)
from hetplan.runtime.events import Watch
from hetplan.runtime.launch.devices import local_device
from hetplan.runtime.tracing.evaluation import evaluating
from hetplan.runtime.tracing.experts import Experts
from hetplan.runtime.tracing.layers import paired, requested
from hetplan.runtime.tracing.split import Split, has_samples, leaves, mapped
from hetplan.schema import Range

# precision -> type of the passes; None: the parameters' type
COMPUTE = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Placed(SavedPart):
    """This rank's part of a model under a plan.

    module: the whole model; this rank's layers are cut in place.
    loss: (outputs, targets) -> loss; None: the module's.
    count: targets of some rows, or the dictionary of their data -> the number by which a loss that
        is a sum is divided, over the global batch; None: the module's `count`.
    example: (inputs, targets) of one sample; None: from the module's `batch`.
    device: "cpu", "cuda", "cuda:1" or "auto"; see `local_device`.
    seed: seed of dropout and of synthetic data.
    watch: records the events of the run.
    precision: type of the passes and of the messages between stages. Weights, gradients and updates
        keep their types.
    chain: the module as a chain of layers; None: `describe` makes it.
    probe: whether to compare the chain with the module first (see `engine.probe`); None: where the
        module is not large. A given chain is not compared.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        *,
        loss: Callable[[Any, Any], Tensor] | None = None,
        count: Callable[[Any], float] | None = None,
        example: Any = None,
        device: str = "cpu",
        seed: int = 0,
        watch: Watch | None = None,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        chain: Chain | None = None,
        probe: bool | None = None,
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
        spread = plan.further.expert
        if chain is None:
            data = paired(example) if example else example_of(module)
            chain = describe(
                module, plan.workload.layers, data, compute=COMPUTE[precision], loss=loss,
                count=count, device=self.device, spread=spread,
            )  # fmt: skip
            check_on_first_rank(
                lambda: check_probe(module, chain, data, loss=loss, spread=spread, wanted=probe)
            )
        self.chain = chain
        self.shapes = {name: p.shape for name, p in self.chain.parameters.items()}
        self.watch = watch or Watch()
        self.numbers: dict[str, set[float]] = {}
        """Path of a number for the whole batch -> its values in the data that this step has
        read."""

    def take(self, cuts: LocalCuts) -> dict[str, nn.Parameter]:
        """Replace the parameters of this rank's layers by this rank's parts of them, on the device.

        cuts: name of a parameter -> this rank's part. Returns name -> new parameter. Layers that
        share a parameter share its part.
        """
        self.replaced = Replaced(dict(self.module.named_parameters()))
        parameters: dict[str, nn.Parameter] = {}
        for number in self.layout.layers(self.place):
            layer = self.chain.layers[number]
            for name_in_layer, name in self.chain.parameter_names[number].items():
                submodule, _, attribute = name_in_layer.rpartition(".")
                if name not in parameters:
                    parameter: Any = layer.get_parameter(name_in_layer)
                    whole = self.module.initial(name, parameter) if parameter.is_meta else parameter
                    part = cuts[name].take(whole.detach()).to(self.device)
                    parameters[name] = nn.Parameter(part.contiguous(), parameter.requires_grad)
                setattr(layer.get_submodule(submodule), attribute, parameters[name])
            layer.to(self.device)  # moves the buffers
        return parameters

    def rows_of(self, step: int, rows: Rows | None) -> Rows:
        """A function (first, last) -> (inputs, targets) for the rows of one iteration. It requests
        each range of rows from `rows` only once.

        rows: a function of the user's loop with the same arguments; None: the module's `batch`. The
        random numbers that it draws are the same on all ranks that read the same rows.

        The returned function raises InputError where the data have more or fewer rows than
        requested, where they have another form than those of the trace, and where a number that
        they give for the whole batch differs from that of other rows.
        """
        self.replaced.check_trained()
        source = rows or (lambda first, last: self.module.batch(step, first, last))
        # Layers that the module states itself take any sizes. Messages between stages do not.
        fixes_sizes = isinstance(self.chain.source, Split) or self.has_messages
        self.numbers.clear()

        @cache
        def checked(first: int, last: int) -> Any:
            """The data of rows, from the user's code; each range is requested once."""
            with drawing_data(self.seed, step, first):
                batch = paired(source(first, last))
            expected = last - first
            where = f"rows {first} to {last}"
            for value in leaves(batch):
                number = len(value) if has_samples(value) else expected
                require(
                    number == expected,
                    f"data of {where}",
                    got=f"{number} rows",
                    expected=f"{expected}",
                )
            if fixes_sizes:
                check_forms(self.chain.forms, batch, f"{where} of step {step}")
            for path, value in leaves_of(batch):
                if isinstance(value, Tensor) and not has_samples(value):
                    self.numbers.setdefault(path, set()).add(float(value))
            return batch

        def read(first: int, last: int) -> Any:
            """The data of rows, which may be a part of a requested range."""
            begin, end = self.layout.requested_rows(self.place.replica, (first, last))
            batch = checked(begin, end)
            if (begin, end) == (first, last):
                return batch
            return mapped(batch, lambda x: x[first - begin : last - begin] if has_samples(x) else x)

        return read

    @cached_property
    def has_messages(self) -> bool:
        """Whether stages send values to each other."""
        return any(len(replica.stages) > 1 for replica in self.plan.replicas)

    def add_up(self, step: int, rows: Rows, batches: Sequence[Callable[[], Any]]) -> BatchTotals:
        """Compare the data of a step between the ranks, and return the totals of its batch. A
        collective call: all ranks make it together.

        batches: see `totals.added_up`; none where the rank reports no loss. Raises InputError where
        ranks have different data of the same rows, or different numbers for the whole batch, and
        where `count` gives no number from 0 on. A step without labels has a loss of 0, and rank 0
        says so.
        """
        with keeping_generators():  # reads all rows whose labels count, or that several ranks read
            self.check_data(step, rows)
            totals = added_up(self.chain.source, batches, host_sum)
        require(
            0 <= totals.weight < inf,
            "`count` of a batch is no number of losses",
            where=f"step {step}",
            got=f"{totals.weight:g}",
            expected="a finite number from 0 on",
        )
        values = dict(totals.values)
        paths = [form.path for form in self.chain.forms if form.is_number]
        if paths:
            for batch in batches:
                batch()  # notes the numbers of its rows, also where no total reads them
            of_path = dict(zip(paths, numbers_of_batch(step, paths, self.numbers), strict=True))
            for form, leaf in zip(self.chain.forms, self.chain.source.inputs, strict=False):
                if form.is_number:
                    values[leaf] = of_path[form.path]
        if totals.weight != 0 and not self.chain.source.lacks_labels(values):
            return totals
        if dist.get_rank() == 0:
            text = f"hetplan: note: step {step} has no label: its loss is 0"
            print(text, file=sys.stderr, flush=True)
        return replace(totals, weight=totals.weight or 1.0, lacks_labels=True)

    @cached_property
    def readings(self) -> list[Reading]:
        """The ranges of rows that several ranks request, in the same order on every rank."""
        # (replica, micro-batch, requested rows) -> ranks that request them
        readers: dict[tuple[int, int, Range], list[int]] = defaultdict(list)
        for place in self.plan.places:
            if not self.reads(place):
                continue
            for batch in range(self.plan.replicas[place.replica].steps):
                first, last = self.layout.local_rows(place, batch)
                if first < last:
                    requested = self.layout.requested_rows(place.replica, (first, last))
                    readers[place.replica, batch, requested].append(place.rank)
        return [
            Reading(rows, tuple(ranks), f"replica {replica}, micro-batch {batch}")
            for (replica, batch, rows), ranks in sorted(readers.items())
            if len(ranks) > 1
        ]

    def reads(self, place: Place) -> bool:
        """Whether a rank reads data: inputs of its layers, or targets whose weight it counts."""
        chunks = self.layout.stage(place).layers
        weighs = chunks[-1][1] == len(self.chain.names) and self.layout.reports_loss(place)
        return weighs or any(self.chain.source.reads(first, last) for first, last in chunks)

    def check_data(self, step: int, rows: Rows) -> None:
        """Raise InputError where ranks have different data of the same rows. A collective call: all
        ranks make it together."""
        if self.readings:
            check_alike(step, self.readings, self.place.rank, rows)

    def gather(self) -> nn.Module:
        """The module, on rank 0 with its trained parameters. All ranks call this together. Raises
        UnsupportedError for a module that states its layers itself (see `engine.chain`)."""
        self._gather_parameters()
        self.replaced.release()
        return self.module

    def _gather_parameters(self) -> None:
        """Copy the trained parameters into the module on rank 0. See `gather`."""
        self.chain.check_gathers()
        # Parameter -> (offset, values) of each box of its flat tensor that this rank saves.
        local_parts: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
        for box in self.boxes(deduplicated=True):
            local_parts[box.name].append((box.offsets[0], box.values.reshape(-1).cpu()))
        for name in self.shapes:
            parts = [part for of_rank in gather_objects(local_parts[name]) for part in of_rank]
            if dist.get_rank() == 0:
                parts.sort(key=itemgetter(0))
                flat = torch.cat([values for _, values in parts])
                parameter = self.module.get_parameter(name).data
                if parameter.dim():
                    parameter = parameter.movedim(self.chain.parameters[name].dim, 0)
                parameter.copy_(flat.view(parameter.shape))

    def state_dict(self) -> dict[str, Tensor]:
        """On rank 0 a copy of the unsplit module's state, which `load_state_dict` of the module
        takes; on the other ranks an empty dictionary. All ranks call this together. Raises
        UnsupportedError for a module that states its layers itself (see `engine.chain`)."""
        self._gather_parameters()
        if dist.get_rank() != 0:
            return {}
        state = self.module.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items()}


class Distributed(Placed):
    """This rank's part of a model on hetplan's engine, which runs every plan of stages.

    staging: "always" sends all tensors by way of the host's memory (see `engine.transport`).
    bucket_bytes: least bytes of the layers whose gradients are summed together, while the passes of
        other layers go on.
    options: those of `Placed`.

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
        self.evaluates = False  # whether it has been checked that the trace can evaluate
        plans = bucket_plans(self.layout, self.chain, bucket_bytes)
        group_ranks: list[Sequence[int]] = []
        for number, replica in enumerate(plan.replicas):
            for stage in range(len(replica.stages)):
                group_ranks += self.layout.computing_groups(number, stage)
        for bucket_plan in plans:
            group_ranks += bucket_plan.groups
        self.transport = Transport.over(self.device, staging, self.watch)
        groups = self.transport.groups(group_ranks)
        expert_groups = self.transport.groups(self.layout.expert_groups.values(), number=-1)
        self.transport = self.transport.with_lanes(lambda: streams(self.layout))
        cuts = local_cuts(self.layout, self.chain, self.place)
        parameters = self.take(cuts)
        self._join_groups(groups, expert_groups)
        self.chain = on_meshes(self.chain, self.layout, self.place, groups)
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
        expert_groups: Mapping[tuple[int, ...], Group],
    ) -> None:
        """Set this rank's tensor group in modules with the attribute `tensor`, the group that
        exchanges tokens in experts, and the mode of modules with selective recomputation.

        groups: sorted ranks of a tensor group -> the group. expert_groups: ranks over which experts
        are spread -> the group.
        """
        ranks = self.layout.ranks_of(self.place.replica, self.place.stage)[self.place.group]
        part = self.layout.part(self.place)
        group = TensorGroup(part.index, part.shares, part.expert, groups.get(tuple(sorted(ranks))))
        layers = [self.chain.layers[k] for k in self.layout.layers(self.place)]
        for module in [inner for layer in layers for inner in layer.modules()]:
            if isinstance(getattr(module, "tensor", None), TensorGroup):
                module.tensor = group
            if isinstance(module, Experts):
                module.join(group, expert_groups[self.layout.expert_groups[self.place.rank]])
            if self.plan.recomputation == "selective" and hasattr(module, "selective"):
                module.selective = True

    def iteration(self, step: int, rows: Rows | None) -> float:
        """Run all passes of the plan and return the loss of the whole batch.

        rows: (first, last) -> (inputs, targets); None: the module's `batch`.
        """
        of_step = self.rows_of(step, rows)
        with self.watch.during("prepare", 0, step):
            self.states.begin(self.pipeline.visits)
            totals = self.add_up(step, of_step, self.pipeline.reported(of_step))
        weight = totals.weight
        scale = 1.0
        if self.scaled:
            # The power of two brings a token's gradient, which is divided by the weight, near 1
            # (see `LossScale`). The division of gradients by it below is exact.
            scale = 2.0 ** floor(log2(weight)) * self.scale.value
        position = Position(self.seed, step, autocast=self.autocast)
        summed = self.pipeline.run(of_step, position, weight / scale, totals.values)
        with self.watch.during("synchronise", 0, step):
            self.pipeline.mail.settle()
            self.states.end()
            if self.scaled:
                finite = isfinite(self.gradient_norm(inf))  # the same on all ranks
                for _, parameter in self.updated():
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad.div_(scale) if finite else None
                self.scale = self.scale.following(finite=finite)
            loss = host_total(summed) / weight
            totals.check_loss(loss)
            return loss

    def evaluate(self, rows: Rows | None = None) -> float:
        """The loss of a global batch in evaluation, the same on every rank: without dropout, and
        without gradients. All ranks call this together; the number of steps stays.

        rows: see `train_step`. The first call traces the module once more. Raises
        UnsupportedError where the module computes something else in evaluation than in training.
        """
        if not self.evaluates:
            self.chain.source.check_evaluation()
            self.evaluates = True
        position = Position(self.seed, self.step, autocast=self._autocast("evaluate"))
        of_step = self.rows_of(self.step, rows)
        with (
            torch.no_grad(),
            torch.autocast(torch.device(self.device).type, enabled=False),
            evaluating([self.chain.layers[k] for k in self.layout.layers(self.place)]),
        ):
            self.states.begin(self.pipeline.forward_visits)
            totals = self.add_up(self.step, of_step, self.pipeline.reported(of_step))
            summed = self.pipeline.evaluate(of_step, position, totals.values)
            self.pipeline.mail.settle()
            self.states.end_forward()
        loss = host_total(summed) / totals.weight
        totals.check_loss(loss)
        return loss

    def updated(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) that this rank updates: its shares of parameters under ZeRO, else its
        parts of parameters."""
        if self.states.zero == 0:
            return list(self.states.parameters.items())
        shares = [share for bucket in self.states.buckets for share in bucket.shares]
        return [(share.piece.name, share.parameter) for share in shares]

    def boxes(
        self,
        values: Mapping[int, Tensor] | None = None,
        *,
        deduplicated: bool = False,
        scalars: bool = False,
    ) -> Iterator[Box]:
        """Boxes of flat tensors, in which the dimension that tensor ranks split comes first.

        The ranks of a bucket's first shard group save it; a bucket without shards is saved by the
        first of its owners.
        """
        for bucket in self.states.buckets:
            savers = bucket.plan.owners[:1]  # each owner has all elements
            if bucket.shard is not None:
                savers = bucket.plan.shard_groups[0]
            if not deduplicated or bucket.rank in savers:
                yield from bucket.boxes(values, scalars=scalars)


def check_on_first_rank(check: Callable[[], str | None]) -> None:
    """Make a check on rank 0, and raise its error on all ranks. All ranks call this together.

    check: returns a note, which is printed, or None; raises UnsupportedError.
    """
    refused: str | None = None
    if dist.get_rank() == 0:
        try:
            note = check()
        except UnsupportedError as error:
            refused = str(error)
        else:
            if note is not None:
                print(f"hetplan: {note}", file=sys.stderr, flush=True)
    refused = gather_objects(refused)[0]
    if refused is not None:
        raise UnsupportedError(refused)


def example_of(module: nn.Module, row: int = 0) -> tuple[Any, Any]:
    """(inputs, targets) of one sample, from the module's `batch`. row: the sample's row of the
    first global batch."""
    batch = getattr(module, "batch", None)
    if not callable(batch):
        raise InputError(
            "model has no `batch`",
            got=type(module).__name__,
            expected="example=(inputs, targets) of a sample",
        )
    with drawing_data(0, 0, 0):  # any seed: only the shapes of the example matter
        return requested(batch, 0, row, row + 1)
