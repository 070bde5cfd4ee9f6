"""Messages and collectives between ranks. Only this module chooses between gloo and NCCL, and
copies tensors to and from the host's memory.

Each process group is made once, by all ranks in the same order. Where every rank has a GPU of its
own, NCCL exchanges tensors on GPUs. Else (CPUs, several ranks on one GPU, CPUs and GPUs mixed) gloo
does: a tensor on a GPU is copied to pinned host memory, exchanged, and copied back (staging).

NCCL has no tags, and messages of two ranks wait for each other in one queue per process group. So
each tag gets a process group of its own, a lane. On a lane, two ranks send in one direction only,
the messages of one hop (see `engine.pipeline`), in the order of the micro-batches. With its first
message, a pair of ranks sets up a connection, for which both ranks wait; `with_lanes` lets all
pairs do so in an order that cannot block.
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

# Timeout of the collectives of NCCL and gloo; NCCL's default is 10 minutes. The parent of the
# ranks, or `worker.look_after` under torchrun, notices a rank that hangs earlier.
PATIENCE = timedelta(minutes=30)


@cache
def group_inside(world: Any, ranks: tuple[int, ...], backend: str, number: int) -> Any:
    """The process group of some ranks of the process group `world`. All ranks call this together;
    the first call with these arguments makes the group. It is `world` itself for all ranks on gloo,
    where `world` has gloo and `number` is 0."""
    of_all_ranks = len(ranks) == world.size() and (backend, number) == ("gloo", 0)
    if of_all_ranks and "gloo" in dist.get_backend_config():
        return world
    return dist.new_group(list(ranks), backend=backend, timeout=PATIENCE)


def one_group(ranks: Iterable[int], backend: str, number: int = 0) -> Any:
    """The process group of these ranks. number: distinguishes several groups of the same ranks."""
    return group_inside(dist.group.WORLD, tuple(ranks), backend, number)


def host_group() -> Any:
    """The process group of all ranks for tensors in host memory."""
    return one_group(range(dist.get_world_size()), "gloo")


def gather_objects(value: object) -> list[Any]:
    """[rank] the value that each rank gives. All ranks call this together."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=host_group())
    return values


def host_total(value: float) -> float:
    """The sum of the values of all ranks. All ranks call this together."""
    return float(host_sum(torch.tensor(value, dtype=torch.float64)))


def host_sum(values: Tensor) -> Tensor:
    """The elementwise sum over all ranks, in place. All ranks call this together."""
    dist.all_reduce(values, group=host_group())
    return values


def host_least(values: Tensor) -> Tensor:
    """The elementwise minimum over all ranks, in place. All ranks call this together."""
    dist.all_reduce(values, dist.ReduceOp.MIN, group=host_group())
    return values


Staging = Literal["auto", "always"]
Stream = tuple[int, int, int]  # (tag, sender, receiver) of messages
Message = tuple[Any, Sequence[Tensor]]  # (work to wait for, tensors that must live until then)
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Transport:
    """The exchange of this rank's tensors with other ranks."""

    device: torch.device
    """The device of the rank's tensors."""
    carrier: torch.device
    """The device on which tensors are exchanged: a GPU by NCCL, the CPU by gloo."""
    always: bool = False
    """Whether tensors that are on the carrier already are copied all the same."""
    watch: Watch = field(default_factory=Watch)
    lanes: Mapping[int, Any] = field(default_factory=dict)
    """Tag -> process group, for NCCL; empty for gloo."""

    @classmethod
    def over(
        cls, device: str, staging: Staging = "auto", watch: Watch | None = None
    ) -> "Transport":
        """The transport of a rank with this device. All ranks call this together. staging: "always"
        copies tensors to host memory even where NCCL could exchange them."""
        own_device = torch.device(device)
        direct = staging == "auto" and own_gpus(own_device)
        carrier = own_device if direct else torch.device("cpu")
        return cls(own_device, carrier, staging == "always", watch or Watch())

    @property
    def backend(self) -> str:
        """torch.distributed's name of the library that exchanges tensors."""
        return "gloo" if self.carrier.type == "cpu" else "nccl"

    def groups(
        self, members: Iterable[Sequence[int]], number: int = 0
    ) -> "dict[tuple[int, ...], Group]":
        """Sorted ranks -> group, for each set of two ranks or more. All ranks call this together,
        with the same members. number: see `one_group`."""
        different = sorted({tuple(sorted(ranks)) for ranks in members})
        several = [ranks for ranks in different if len(ranks) > 1]
        return {ranks: Group(self, one_group(ranks, self.backend, number)) for ranks in several}

    @property
    def everyone(self) -> "Group":
        """The group of all ranks, which exchanges tensors in host memory."""
        return Group(replace(self, carrier=torch.device("cpu")), host_group())

    def space(self, shape: Sequence[int], dtype: Any) -> Tensor:
        """An empty tensor on the carrier. Host memory is pinned where a GPU reads and writes it."""
        pinned = self.carrier.type == "cpu" and self.device.type == "cuda"
        return torch.empty(tuple(shape), dtype=dtype, device=self.carrier, pin_memory=pinned)

    def carried(self, x: Tensor) -> Tensor:
        """x on the carrier: x itself, or a copy that is complete."""
        if x.device.type == self.carrier.type and not self.always:
            return x
        return self.space(x.shape, x.dtype).copy_(x.detach())

    def post(self, rows: Sequence[tuple[Tensor, int]], tag: int) -> list[Message]:
        """Begin to send tensors. rows: (contiguous tensor, receiver), in the order in which the
        receivers fetch them."""
        return self._begun(dist.isend, [(self.carried(x), rank) for x, rank in rows], tag)

    def fetch(self, into: Sequence[tuple[Tensor, int]], tag: int) -> list[Message]:
        """Begin to receive tensors. into: (contiguous tensor on the carrier, sender)."""
        return self._begun(dist.irecv, into, tag)

    def _begun(self, act: Any, rows: Sequence[tuple[Tensor, int]], tag: int) -> list[Message]:
        """Begin sends or receives, on a lane as one batch. Without lanes they begin one by one,
        which saves the checks of a batch.

        act: dist.isend or dist.irecv. rows: (tensor, the other rank).
        """
        group, tag = self.lane(tag)
        if not self.lanes:
            return [(act(x, rank, group, tag), [x]) for x, rank in rows]
        operations = [dist.P2POp(act, x, rank, group, tag) for x, rank in rows]
        works = dist.batch_isend_irecv(operations) if operations else []
        return [(work, [x for x, _ in rows]) for work in works]

    def lane(self, tag: int) -> tuple[Any, int]:
        """(process group, tag within the group) for the messages of a tag."""
        return (self.lanes[tag], 0) if self.lanes else (host_group(), tag)

    def pending(self, sent: list[Message]) -> list[Message]:
        """The messages that may still be on their way; the memory of the others is free again.
        gloo does not say so, and all its messages count as pending."""
        if self.backend == "gloo":
            return sent
        return [(work, tensors) for work, tensors in sent if not work.is_completed()]

    def with_lanes(self, streams: Callable[[], Sequence[Stream]]) -> "Transport":
        """A transport with a lane for every tag, on which the ends of each stream are connected.
        All ranks call this together. On gloo, which needs no lanes, it is this transport."""
        return self if self.backend == "gloo" else self.on_lanes(streams(), self.backend)

    def on_lanes(self, streams: Sequence[Stream], backend: str) -> "Transport":
        """The same as `with_lanes`, with lanes of a given backend. streams: in the same order on
        all ranks."""
        all_ranks, rank = range(dist.get_world_size()), dist.get_rank()
        tags = sorted({tag for tag, _, _ in streams})
        opened = replace(self, lanes={tag: one_group(all_ranks, backend, 1 + tag) for tag in tags})
        # All ranks go through the streams in the same order, so that no two wait for each other.
        for tag, sender, receiver in streams:
            if rank == sender:
                done(opened.post([(torch.zeros(1, device=self.device), receiver)], tag))
            elif rank == receiver:
                done(opened.fetch([(opened.space((1,), torch.get_default_dtype()), sender)], tag))
        return opened


def done(messages: Sequence[Message]) -> None:
    """Wait for messages to be done."""
    for work, _ in messages:
        work.wait()


@dataclass(frozen=True)
class Group:
    """The collectives of some ranks. All members make the same calls in the same order.

    The methods `totalling`, `scattering` and `gathering` begin a collective, and return a function
    that waits for its result.
    """

    transport: Transport
    process: Any
    """torch's process group."""

    def total(self, x: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """All-reduce x in place."""
        self.totalling(x, operation)()

    def totalling(self, x: Tensor, operation: Any = dist.ReduceOp.SUM) -> Callable[[], None]:
        """Begin to all-reduce x in place."""
        return self._in_place(
            x, lambda y: [dist.all_reduce(y, operation, group=self.process, async_op=True)]
        )

    def reduced(self, x: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """The all-reduce of x, as a new tensor."""
        result = x.detach().clone(memory_format=torch.contiguous_format)
        self.total(result, operation)
        return result

    def broadcast(self, x: Tensor, owner: int) -> None:
        """Write the owner's x to the x of all members. owner: its number among all ranks."""
        act = partial(dist.broadcast, src=owner, group=self.process, async_op=True)
        self._in_place(x, lambda y: [act(y)])()

    def reduce(self, x: Tensor, owner: int) -> None:
        """Write the sum over the members to the owner's x. The other members' x is undefined
        afterwards."""
        self.scattering(x, [owner], [(0, len(x))])()

    def scattering(
        self, x: Tensor, owners: Sequence[int], parts: Sequence[Range]
    ) -> Callable[[], None]:
        """Begin to sum x over the members, each part [first, last) for its owner. A part may have
        any length, and is undefined afterwards on all members but its owner. The reduce-scatter of
        gloo and NCCL takes equal parts only."""
        owned_parts = list(zip(owners, parts, strict=True))

        def reduce_parts(y: Tensor) -> list[Any]:
            return [
                dist.reduce(y[first:last], dst=owner, group=self.process, async_op=True)
                for owner, (first, last) in owned_parts
                if first < last
            ]

        return self._in_place(x, reduce_parts)

    def gather(self, own: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """[member] the tensor `own` of every member, [length, …]."""
        return self.gathering(own, lengths)()

    def gathering(self, own: Tensor, lengths: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Begin to gather the members' tensors `own`, [length, …]. They are padded to the longest,
        since gloo and NCCL gather equal parts."""
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
        """All-to-all of flat tensors: the received parts, one after the other. leaving, coming:
        [member] number of elements sent to it, and received from it."""
        carried = self.transport.carried(sent)
        received = self.transport.space((sum(coming),), sent.dtype)
        with self.transport.watch.meets():
            dist.all_to_all_single(
                received, carried, list(coming), list(leaving), group=self.process
            )
        return received.to(sent.device)

    def _in_place(self, x: Tensor, act: Callable[[Tensor], list[Any]]) -> Callable[[], None]:
        """Begin a collective whose result is written to x. act: begins it on a tensor on the
        carrier. Half precision is exchanged as fp32, in which sums are more exact."""
        if x.numel() == 0:
            return lambda: None
        exact = x.float() if x.dtype in HALF else x
        y = self.transport.carried(exact).contiguous()
        works = act(y)

        def finish() -> None:
            with self.transport.watch.meets():
                for work in works:
                    work.wait()
            if y is not x:
                x.detach().copy_(y)

        return finish


def own_gpus(device: torch.device) -> bool:
    """Whether every rank has NCCL, and a GPU that no other rank has. All ranks call this
    together."""
    gpus = gather_objects(identity(device))
    return None not in gpus and len(set(gpus)) == len(gpus)


def identity(device: torch.device) -> str | None:
    """A name of a GPU that no other GPU has; None for a CPU, or without NCCL."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    return f"{socket.gethostname()} {getattr(properties, 'uuid', device.index)}"


class _Mirrored(torch.autograd.Function):
    """A function of tensors with a given backward pass."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *inputs: Tensor) -> Any:
        ctx.mirror = backward
        return forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        of_inputs = ctx.mirror(*gradients)
        if not isinstance(of_inputs, tuple):
            of_inputs = (of_inputs,)
        return None, None, *of_inputs


def mirrored(
    forward: Callable[..., Tensor], backward: Callable[..., Any], *inputs: Tensor
) -> Tensor:
    """forward(*inputs), for which autograd calls `backward`: gradient of the output -> gradient of
    the input, or a tuple of those of all inputs."""
    output: Tensor = _Mirrored.apply(forward, backward, *inputs)
    return output
