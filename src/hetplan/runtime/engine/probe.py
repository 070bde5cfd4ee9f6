"""The probe: whether the layers that a plan trains compute what the module itself computes.

A trace keeps the operators of one forward pass and nothing else. It drops backward code (hooks, an
autograd function of the user's own), and freezes state and numbers from Python's and numpy's
generators. Its layers run on micro-batches, so that samples of different ones cannot influence each
other. Each of these would train another model without a word, and names of operators do not tell
them apart from what is right. So the probe compares:

1. the module's own loss and gradients of a batch of six unlike samples, by its own forward and
   backward code;
2. the sum of the layers' losses and gradients of three micro-batches, of one, two and three
   samples, divided by their weight, as a plan has it.

Both must be equal (`engine.comparison`). Otherwise further passes tell the likely cause.

Where both are equal and the data have real numbers, the same passes once more compare the gradients
of these. Backward code is found there, too, that only frozen layers or none lie behind. It is a
comparison of its own: inputs that have gradients would make the first layers of a reentrant
checkpoint train, which do not train otherwise. Data that totals are counted from are left out: a
total is a constant for the passes of a plan.
"""

import multiprocessing
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetplan.errors import HetplanError, UnsupportedError, kind_and_text
from hetplan.runtime.engine.chain import Chain, describe
from hetplan.runtime.engine.comparison import (
    SKIP,
    Comparison,
    Difference,
    Differs,
    Pass,
    compare,
    copied,
    rows_of,
)
from hetplan.runtime.engine.data import tensor_checksum
from hetplan.runtime.engine.rows import leaves_of
from hetplan.runtime.engine.samples import BOLD, MILD, PLAIN
from hetplan.runtime.engine.totals import BatchTotals, added_up
from hetplan.runtime.tracing.failures import noting
from hetplan.runtime.tracing.module_state import ModuleState
from hetplan.runtime.tracing.split import Split, Totals, has_samples, mapped

# Function -> its text, for errors, of a call in forward that a trace does not have.
FROZEN = {
    (dist, "get_rank"): "get_rank()",
    (dist, "get_world_size"): "get_world_size()",
    (torch, "manual_seed"): "manual_seed()",
}
# Variables of the environment by which launchers tell a process its rank and the number of ranks.
RANKS = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
)  # fmt: skip
LEVELS = (BOLD, MILD, PLAIN)  # of the samples, the first one first
MICRO_BATCHES = ((0, 1), (1, 3), (3, 6))  # of the samples
# Number of parameters from which on a module is compared only where the user asks for it: one of a
# billion parameters takes minutes on a few cores.
LARGE = 500_000_000
AS_ASKED = "as asked for"

ROWS = "samples influence each other, which those of other micro-batches cannot"
BACKWARD = "its backward pass has code that a trace drops, as a hook or an autograd.Function"
STATE = "its state changes in forward, which ranks do not share"
DRAWN = "its forward draws from Python's or numpy's generator, which a trace freezes"
FREEZES = "its forward asks for ranks or seeds a generator, which a trace freezes or drops"
BY_RANK = "its forward gives another loss where the environment tells another rank"
HIDDEN = "its forward gives another loss each time, by state or numbers that hetplan does not see"
OTHER = "its trace computes something else"


class Layers(nn.Module):
    """The layers of a chain as one module, from the data to the summand of the loss."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.layers = nn.ModuleList(chain.layers)
        self.chain = chain

    def forward(self, data: Any, totals: Totals) -> Tensor:
        """Run one layer after the other. totals: of the batch that the data are a part of."""
        count = len(self.chain.layers)
        read = self.chain.source.feed(lambda: data, 0, count, totals)
        values: tuple[Tensor, ...] = ()
        for k in range(count):
            values = self.chain.call(k, (*values, *read[k]))
        return values[0]


class Probe(Comparison):
    """The comparison of a module with its chain on six samples."""

    def __init__(
        self,
        module: nn.Module,
        chain: Chain,
        loss: Callable[..., Tensor] | None,
        samples: Any,
        dtype: torch.dtype,
    ) -> None:
        """samples: (inputs, targets) of unlike samples. dtype: floating type of the passes, or that
        with the largest rounding errors."""
        super().__init__(module, loss, samples, dtype)
        self.chain = replace(chain, compute=None)
        self.micro_batches = [rows_of(samples, first, last) for first, last in MICRO_BATCHES]

    def check(self) -> None:
        """Raise Differs where the layers compute something else than the module, UnsupportedError
        where a pass changes the module or the layers cannot run."""
        fresh = ModuleState(self.module, tensor_checksum)
        first = float(self.called(*copied(self.samples)).detach())  # fills caches, too
        before = ModuleState(self.module, tensor_checksum)
        initialised = fresh.first_change(before, saved=True)
        generators = states_of_generators()
        with noting(FROZEN) as noted:
            own = self.own(self.samples)
        for place, text, _ in noted:
            raise self.refusal(FREEZES, place=f"{text} at {place}")
        changed = initialised or before.first_change(ModuleState(self.module, tensor_checksum))
        if states_of_generators() != generators:
            raise self.refusal(DRAWN)
        if changed is not None:
            raise self.refusal(STATE, place=f"{type(self.module).__name__}.{changed}")
        if not own.is_finite():
            raise ArithmeticError("its loss or a gradient is not finite")
        again = self.difference(Pass(first, own.gradients), own)
        if again is not None:
            raise self.refusal(HIDDEN, again)
        elsewhere = self.loss_on_another_rank()
        if elsewhere is not None:
            by_rank = self.difference(Pass(elsewhere, own.gradients), own)
            if by_rank is not None:
                raise self.refusal(BY_RANK, by_rank)
        try:
            parts = [self.of_layers(data, self.micro_batches) for data in self.micro_batches]
        except HetplanError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"its layers fail on data that it takes: {kind_and_text(error)}",
                where=type(self.module).__name__,
                expected=f"passes on one, two and three samples{SKIP}",
            ) from error
        summed = reduce(Pass.plus, parts)
        found = self.difference_of_sum(own, summed, self.micro_batches)
        if found is not None:
            raise Differs(self.explained(found, own, parts[0]))
        found = self.difference_of_inputs()
        if found is not None:
            raise Differs(self.refusal(BACKWARD, found))

    def loss_on_another_rank(self) -> float | None:
        """The module's loss where the environment has another rank. None where the pass fails: the
        module may ask the ranks for more than a variable."""
        try:
            with on_another_rank():
                return float(self.called(*copied(self.samples)).detach())
        except Exception:  # noqa: BLE001 (as above)
            return None

    def difference_of_inputs(self) -> Difference | None:
        """The first difference between the gradients of the samples' real numbers in the module's
        passes and in those of the layers. None also where a pass fails with data that have
        gradients, which no training gives it."""
        samples, followed = with_gradients(self.samples, counted_data(self.chain))
        if not followed:
            return None
        batches = [rows_of(samples, first, last) for first, last in MICRO_BATCHES]
        try:
            own = taken(self.own(samples), followed)
            parts = [taken(self.of_layers(data, batches), followed) for data in batches]
        except Exception:  # noqa: BLE001 (the module may ask for numbers of its data, as .numpy())
            return None
        return self.difference_of_sum(own, reduce(Pass.plus, parts), batches)

    def of_layers(self, data: Any, batches: Sequence[Any]) -> Pass:
        """The passes of the chain's layers, on parameters of their own, as ranks have them: hooks
        of the module's parameters do not reach these.

        batches: the micro-batches of the batch that the data are one of.
        """
        layers = Layers(self.chain)
        of_module = dict(self.module.named_parameters(remove_duplicate=False))
        fresh: dict[int, Tensor] = {}  # id of a parameter of the module -> that of the layers
        state = {}
        for k, names in enumerate(self.chain.parameter_names):
            for inside, name in names.items():
                parameter = self.chain.layers[k].get_parameter(inside)
                # layers that state themselves have other names and the module's own parameters
                parameter = of_module.get(name, parameter)
                if id(parameter) not in fresh:
                    leaf = parameter.detach().requires_grad_(parameter.requires_grad)
                    fresh[id(parameter)] = leaf
                state[f"layers.{k}.{inside}"] = fresh[id(parameter)]
        arguments = (copied(data), self.totals(batches).values)
        loss: Tensor = torch.func.functional_call(layers, state, arguments, tie_weights=False)
        if loss.requires_grad:
            loss.backward()
        gradients = {}
        for name, parameter in self.trained.items():
            if id(parameter) in fresh:
                gradient = fresh[id(parameter)].grad
                if gradient is not None:
                    gradients[name] = gradient
        return Pass(float(loss.detach()), gradients)

    def difference_of_sum(
        self, own: Pass, summed: Pass, batches: Sequence[Any]
    ) -> Difference | None:
        """The first difference between the module's passes and those of the layers on some
        micro-batches, whose losses are sums. The module's loss is their mean, or their sum."""
        differences = []
        for factor in (1.0 / (self.totals(batches).weight or 1.0), 1.0):
            difference = self.difference(own, summed.times(factor))
            if difference is None:
                return None
            differences.append(difference)
        return differences[0]

    def totals(self, batches: Sequence[Any]) -> BatchTotals:
        """The totals of a batch of some micro-batches, and the weight by which the engine divides
        their losses."""
        try:
            return added_up(self.chain.source, [partial(copied, data) for data in batches])
        except HetplanError:
            raise
        except Exception:  # noqa: BLE001 (the module's `count`; a run says what it lacks)
            return BatchTotals()

    def explained(self, found: Difference, own: Pass, single: Pass) -> UnsupportedError:
        """The refusal of a difference, with its likely cause. own: the module's passes of all
        samples. single: the layers' passes of the first sample."""
        together = self.difference_of_sum(
            own, self.of_layers(self.samples, [self.samples]), [self.samples]
        )
        if together is None:
            return self.refusal(ROWS, found)
        first = self.micro_batches[0]
        single = self.of_layers(first, [first])
        of_first = self.difference_of_sum(self.own(first), single, [first])
        if of_first is None:
            return self.refusal(ROWS, found)
        if of_first.tensor is not None:
            return self.refusal(BACKWARD, of_first)
        return self.refusal(OTHER, of_first)


@contextmanager
def on_another_rank() -> Iterator[None]:
    """A context in which the environment tells another rank, of another number of ranks."""
    kept = {name: os.environ.get(name) for name in RANKS}
    for name, value in kept.items():
        number = int(value) if value is not None and value.isdigit() else 1
        os.environ[name] = str(number + 1)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def check_probe(
    module: nn.Module,
    chain: Chain,
    example: Any,
    *,
    loss: Callable[..., Tensor] | None = None,
    spread: int = 1,
    wanted: bool | None = None,
) -> str | None:
    """Compare a module with its chain, and raise UnsupportedError where they differ. Returns a note
    on what is not known where nothing was compared, else None.

    example: (inputs, targets) of one sample or more. loss, spread: those with which the chain was
    described. wanted: whether to compare; None: where the module is not large. A module without a
    `forward` states its layers and nothing else: there is nothing to compare them with.
    """
    if type(module).forward is nn.Module.forward:
        return None
    why = why_not(module, wanted)
    if why is None:
        if spread > 1 or str(getattr(chain.source, "device", "cpu")) != "cpu":
            # experts that are spread need the other ranks; the module is on the CPU
            chain = describe(module, chain.names, example, loss=loss)
        why = compare(module, chain, partial(Probe, module, chain, loss), example, LEVELS)
    return None if why is None else not_compared(module, why)


def check_layers(
    module: nn.Module, names: Sequence[str], example: Any, wanted: bool | None
) -> str | None:
    """`check_probe` for a plan with a program, which has no chain: compare the module with the
    chain of its layers. names: names of the plan's layers."""
    if wanted is False:
        return not_compared(module, AS_ASKED)
    try:
        chain = describe(module, names, example)
    except HetplanError as error:
        return not_compared(module, f"it cannot be split: {error}")
    return check_probe(module, chain, example, wanted=wanted)


def why_not(module: nn.Module, wanted: bool | None) -> str | None:
    """The reason for which a module is not to be compared; None where it is. wanted: as in
    `check_probe`."""
    if wanted is False:
        return AS_ASKED
    count = sum(parameter.numel() for parameter in module.parameters())
    if wanted is None and count > LARGE:
        return f"it has {count:,} parameters, and a smaller one of its class or probe=True tells"
    return None


def not_compared(module: nn.Module, why: str) -> str:
    """The note on what is not known of a module whose training is not compared."""
    return (
        f"{type(module).__name__}: training is not compared with one process's ({why}): whether "
        "samples influence each other, and backward code or state of forward are lost, is not known"
    )


def in_a_fork(check: Callable[[], str | None]) -> str | None:
    """Make a check in a process that is forked for it, and return its note. Raises the
    UnsupportedError of the check.

    Backward passes begin threads (OpenMP's, and autograd's where there is a GPU). Behind them the
    caller could not fork the ranks of a run.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        """Make the check and send (text of the refusal, note)."""
        refused, note = None, None
        try:
            note = check()
        except UnsupportedError as error:
            refused = str(error)
        sender.send((refused, note))

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        refused, note = receiver.recv()
    except EOFError:
        refused, note = None, "the comparison of its training with one process's has failed"
    process.join()
    if refused is not None:
        raise UnsupportedError(refused)
    return None if note is None else str(note)


def counted_data(chain: Chain) -> set[str]:
    """The paths of the data that totals are counted from."""
    source, paths = chain.source, [form.path for form in chain.forms]
    if not isinstance(source, Split):  # `count` of the contract takes the targets
        return {path for path in paths if path.startswith("labels")}
    totals = [total for of_round in source.totals for total in of_round]
    read = source.cone(totals, lambda _: False)
    named = zip(source.inputs, paths, strict=False)  # as in `Placed.add_up`
    return {path for node, path in named if node in read}


def with_gradients(data: Any, without: set[str]) -> tuple[Any, dict[str, Tensor]]:
    """(data whose real numbers have gradients, path -> such a tensor). without: paths of data that
    stay as they are."""
    followed: dict[str, Tensor] = {}
    values = []
    for path, value in leaves_of(data):
        if path not in without and has_samples(value) and value.is_floating_point():
            value = value.detach().requires_grad_()
            followed[path] = value
        values.append(value)
    each = iter(values)
    return mapped(data, lambda _: next(each)), followed


def taken(passed: Pass, followed: Mapping[str, Tensor]) -> Pass:
    """A pass with the gradients of the data alone, which afterwards have none."""
    gradients = {}
    for path, value in followed.items():
        if value.grad is not None:
            gradients[f"the data's {path}"] = value.grad
        value.grad = None
    return replace(passed, gradients=gradients)


def states_of_generators() -> str:
    """The states of Python's and of numpy's generators of random numbers, as a text."""
    of_numpy: Any = np.random.get_state()  # noqa: NPY002 (users draw from it)
    _, numbers, *more = of_numpy
    return f"{random.getstate()} {numbers.tobytes()!r} {more}"
