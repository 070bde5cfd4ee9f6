"""How tensors get from rank to rank: the one module that knows gloo, NCCL, and the host's memory
between them.

Process groups are made once each, by all ranks in the same order. Where every rank has a GPU of its
own, tensors on GPUs go by NCCL. Else (CPUs, several ranks on one GPU, CPUs and GPUs mixed) they go
by gloo: what is on a GPU is copied to pinned host memory, exchanged, and copied back (staging).

NCCL knows no tags, and messages of two ranks wait for each other in one queue per process group. So
messages get lanes, process groups of their own, one for each tag: on a lane, two ranks send in one
direction only, what one hop carries, in the order of the micro-batches. The first message of two
ranks makes them meet; `opened` has them do so in one order everywhere.
"""

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.runtime.events import Watch
from hetplan.schema import Range

# whoever watches over the ranks notices earlier; NCCL's own are 10
PATIENCE = timedelta(minutes=30)


@cache
def group_inside(world: Any, ranks: tuple[int, ...], backend: str, number: int) -> Any:
    """The group of some ranks of the process group `world`, which is itself that of all ranks where
    it has gloo."""
    everyone = len(ranks) == world.size() and (backend, number) == ("gloo", 0)
    return (
        world
        if everyone and "gloo" in dist.get_backend_config()
        else dist.new_group(list(ranks), backend=backend, timeout=PATIENCE)
    )


def one_group(ranks: Iterable[int], backend: str, number: int = 0) -> Any:
    """The group of these ranks; number: where several of the same ranks are to be told apart."""
    return group_inside(dist.group.WORLD, tuple(ranks), backend, number)


def host_group() -> Any:
    """All ranks, for tensors in host memory."""
    return one_group(range(dist.get_world_size()), "gloo")


def gather_objects(value: object) -> list[Any]:
    """[ranks] what each one has given."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=host_group())
    return values


def host_total(value: float) -> float:
    """The sum over all ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, group=host_group())
    return float(total)


def host_least(values: Tensor) -> Tensor:
    """The least over all ranks, elementwise, in place."""
    dist.all_reduce(values, dist.ReduceOp.MIN, group=host_group())
    return values


Staging = Literal["auto", "always"]
Stream = tuple[int, int, int]  # (tag, sender, receiver) of messages
Message = tuple[Any, Sequence[Tensor]]  # what to wait for, and what must live until then
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Transport:
    """One rank's. device: where its tensors are; carrier: where they are exchanged, cuda by NCCL,
    cpu by gloo.

    always: copied to buffers of the carrier's, even where they are there already. lanes: a process
    group for each tag, NCCL's only.
    """

    device: torch.device
    carrier: torch.device
    always: bool = False
    watch: Watch = field(default_factory=Watch)
    lanes: Mapping[int, Any] = field(default_factory=dict)

    @classmethod
    def over(
        cls, device: str, staging: Staging = "auto", watch: Watch | None = None
    ) -> "Transport":
        """All ranks together. staging: "always" also where NCCL could do."""
        here = torch.device(device)
        direct = staging == "auto" and own_gpus(here)
        carrier = here if direct else torch.device("cpu")
        return cls(here, carrier, staging == "always", watch or Watch())

    @property
    def backend(self) -> str:
        """What exchanges."""
        return "gloo" if self.carrier.type == "cpu" else "nccl"

    def groups(
        self, members: Iterable[Sequence[int]], number: int = 0
    ) -> "dict[tuple[int, ...], Group]":
        """A group for each set of two ranks or more; the same call on every rank. number: see
        `one_group`."""
        everyone = sorted({tuple(sorted(ranks)) for ranks in members})
        several = [ranks for ranks in everyone if len(ranks) > 1]
        return {ranks: Group(self, one_group(ranks, self.backend, number)) for ranks in several}

    @property
    def everyone(self) -> "Group":
        """All ranks, for tensors in host memory."""
        return Group(replace(self, carrier=torch.device("cpu")), host_group())

    def space(self, shape: Sequence[int], dtype: Any) -> Tensor:
        """Memory of the carrier's; the host's is pinned where a GPU reads and writes it."""
        pinned = self.carrier.type == "cpu" and self.device.type == "cuda"
        return torch.empty(tuple(shape), dtype=dtype, device=self.carrier, pin_memory=pinned)

    def carried(self, x: Tensor) -> Tensor:
        """x where the carrier can take it: itself, or a copy that is complete."""
        return (
            x
            if x.device.type == self.carrier.type and not self.always
            else self.space(x.shape, x.dtype).copy_(x.detach())
        )

    def post(self, rows: Sequence[tuple[Tensor, int]], tag: int) -> list[Message]:
        """Begin to send each of these rows to another rank; contiguous, in the order in which they
        are received."""
        return self._begun(dist.isend, [(self.carried(x), rank) for x, rank in rows], tag)

    def fetch(self, into: Sequence[tuple[Tensor, int]], tag: int) -> list[Message]:
        """Begin to receive rows, each from another rank, into contiguous memory of the
        carrier's."""
        return self._begun(dist.irecv, into, tag)

    def _begun(self, act: Any, rows: Sequence[tuple[Tensor, int]], tag: int) -> list[Message]:
        """What one hop carries, as one batch."""
        group, tag = self.lane(tag)
        one_hops = [dist.P2POp(act, x, rank, group, tag) for x, rank in rows]
        works = dist.batch_isend_irecv(one_hops) if one_hops else []
        return [(work, [x for x, _ in rows]) for work in works]

    def lane(self, tag: int) -> tuple[Any, int]:
        """The group that a tag's messages go by, and the tag that is left to give."""
        return (self.lanes[tag], 0) if self.lanes else (host_group(), tag)

    def pending(self, sent: list[Message]) -> list[Message]:
        """Those still on their way, as far as NCCL tells; the memory of others is free again."""
        return sent if self.backend == "gloo" else [m for m in sent if not m[0].is_completed()]

    def opened(self, streams: Callable[[], Sequence[Stream]]) -> "Transport":
        """With a lane for every tag, on which both ends of each stream have met; all ranks
        together. gloo needs none."""
        return self if self.backend == "gloo" else self.on_lanes(streams(), self.backend)

    def on_lanes(self, streams: Sequence[Stream], backend: str) -> "Transport":
        """The same for a given backend. streams: in one order on all ranks."""
        everyone, rank = range(dist.get_world_size()), dist.get_rank()
        tags = sorted({tag for tag, _, _ in streams})
        made = replace(self, lanes={tag: one_group(everyone, backend, 1 + tag) for tag in tags})
        # one order everywhere: each waits for its other end only
        for tag, sender, receiver in streams:
            if rank == sender:
                done(made.post([(torch.zeros(1, device=self.device), receiver)], tag))
            elif rank == receiver:
                done(made.fetch([(made.space((1,), torch.get_default_dtype()), sender)], tag))
        return made


def done(messages: Sequence[Message]) -> None:
    """Wait for them."""
    for work, _ in messages:
        work.wait()


@dataclass(frozen=True)
class Group:
    """Some ranks, and what they do together; every member makes the same calls in the same order.

    Those that only begin a collective return what waits for it.
    """

    transport: Transport
    process: Any

    def total(self, x: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """All-reduce in place."""
        self.totalling(x, operation)()

    def totalling(self, x: Tensor, operation: Any = dist.ReduceOp.SUM) -> Callable[[], None]:
        """The same, begun."""
        return self._in_place(
            x, lambda y: [dist.all_reduce(y, operation, group=self.process, async_op=True)]
        )

    def reduced(self, x: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """The same as a new tensor."""
        result = x.detach().clone(memory_format=torch.contiguous_format)
        self.total(result, operation)
        return result

    def broadcast(self, x: Tensor, owner: int) -> None:
        """The values of a member (its number among all ranks), everywhere."""
        act = partial(dist.broadcast, src=owner, group=self.process, async_op=True)
        self._in_place(x, lambda y: [act(y)])()

    def reduce(self, x: Tensor, owner: int) -> None:
        """The sum, for one member; the others' x is used up."""
        self.scattering(x, [owner], [(0, len(x))])()

    def scattering(
        self, x: Tensor, owners: Sequence[int], parts: Sequence[Range]
    ) -> Callable[[], None]:
        """Begin to sum parts [first, last) of x, of any length, each for one member; what others
        have there is used up. gloo's and NCCL's own reduce-scatter know equal parts only."""
        each = list(zip(owners, parts, strict=True))
        act = partial(dist.reduce, group=self.process, async_op=True)
        return self._in_place(
            x, lambda y: [act(y[a:b], dst=owner) for owner, (a, b) in each if a < b]
        )

    def gather(self, own: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Every member's [length, …]."""
        return self.gathering(own, lengths)()

    def gathering(self, own: Tensor, lengths: Sequence[int]) -> Callable[[], list[Tensor]]:
        """The same, begun; padded to the longest, since gloo and NCCL gather equal parts."""
        longest, rest = max(lengths), own.shape[1:]
        if longest == 0 or 0 in rest:
            return lambda: [own.new_empty((length, *rest)) for length in lengths]
        sent = self.transport.space((longest, *rest), own.dtype)
        sent[: len(own)] = own.detach()
        sent[len(own) :] = 0
        received = [self.transport.space(sent.shape, own.dtype) for _ in lengths]
        work = dist.all_gather(received, sent, group=self.process, async_op=True)

        def finish() -> list[Tensor]:
            with self.transport.watch.meets():
                work.wait()
            return [r[:length].to(own.device) for r, length in zip(received, lengths, strict=True)]

        return finish

    def swap(self, sent: Tensor, leaving: Sequence[int], coming: Sequence[int]) -> Tensor:
        """From every member to every other one: parts of flat tensors, of any length."""
        carried = self.transport.carried(sent)
        received = self.transport.space((sum(coming),), sent.dtype)
        with self.transport.watch.meets():
            dist.all_to_all_single(
                received, carried, list(coming), list(leaving), group=self.process
            )
        return received.to(sent.device)

    def _in_place(self, x: Tensor, act: Callable[[Tensor], list[Any]]) -> Callable[[], None]:
        """Half precision goes by way of fp32: sums are more exact."""
        if x.numel() == 0:
            return lambda: None
        y = self.transport.carried(x.float() if x.dtype in HALF else x).contiguous()
        works = act(y)

        def finish() -> None:
            with self.transport.watch.meets():
                for work in works:
                    work.wait()
            if y is not x:
                x.detach().copy_(y)

        return finish


def own_gpus(device: torch.device) -> bool:
    """Whether every rank has a GPU that no other rank has, and NCCL; all ranks together."""
    everyone = gather_objects(identity(device))
    return None not in everyone and len(set(everyone)) == len(everyone)


def identity(device: torch.device) -> str | None:
    """What tells a GPU from all others; None for a CPU, or without NCCL."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    return f"{socket.gethostname()} {getattr(properties, 'uuid', device.index)}"


class _Mirrored(torch.autograd.Function):
    """A step whose backward pass is given."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *inputs: Tensor) -> Any:
        ctx.mirror = backward
        return forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        made = ctx.mirror(*gradients)
        return None, None, *(made if isinstance(made, tuple) else (made,))


def mirrored(
    forward: Callable[..., Tensor], backward: Callable[..., Any], *inputs: Tensor
) -> Tensor:
    """What `forward` makes of the inputs, with `backward` from its gradient to theirs."""
    made: Tensor = _Mirrored.apply(forward, backward, *inputs)
    return made
