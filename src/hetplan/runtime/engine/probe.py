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

Both must be equal. Otherwise further passes tell the likely cause. Whatever the module draws with
torch are fixed numbers here (`tracing.draws`). Trained parameters have noise added, since one that
begins at zero could hide the gradients of others. The passes are in float64 where no operator of
the trace names another floating type.

Where both are equal and the data have real numbers, the same passes once more compare the gradients
of these. Backward code is found there, too, that only frozen layers or none lie behind. It is a
comparison of its own: inputs that have gradients would make the first layers of a reentrant
checkpoint train, which do not train otherwise. Data that totals are counted from are left out: a
total is a constant for the passes of a plan.
"""

import multiprocessing
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hetplan.errors import HetplanError, UnsupportedError, kind_and_text
from hetplan.runtime.engine.chain import Chain, describe
from hetplan.runtime.engine.data import drawing_data, tensor_checksum
from hetplan.runtime.engine.rows import leaves_of
from hetplan.runtime.engine.samples import BOLD, MILD, PLAIN, unlike_samples
from hetplan.runtime.engine.totals import BatchTotals, added_up
from hetplan.runtime.tracing.draws import Alike
from hetplan.runtime.tracing.layers import Called
from hetplan.runtime.tracing.losses import name_of
from hetplan.runtime.tracing.module_state import ModuleState
from hetplan.runtime.tracing.split import Split, Totals, has_samples, leaves, mapped

# Floating type of the passes -> (relative, negligible) differences. A gradient may be off by the
# first share of its largest element, and by the second share of the largest element of all.
TOLERANCES = {
    torch.float64: (1e-7, 1e-10),
    torch.float32: (2e-4, 1e-5),
    torch.float16: (5e-2, 1e-3),
    torch.bfloat16: (2e-1, 1e-2),
}
# Noise on a parameter, as a share of its values, which count as LEAST where they are less.
NOISE, SLIGHT_NOISE, LEAST = 0.1, 1e-3, 0.2
# Six samples: chance has 1 of 720 that a module which sorts them finds them in order.
SAMPLES, MICRO_BATCHES = 6, ((0, 1), (1, 3), (3, 6))
# Number of parameters up to which a module is compared twice, with noise of another strength.
SMALL, STRONG = 10_000_000, 5.0
# Number of parameters from which on a module is compared only where the user asks for it: one of a
# billion parameters takes minutes on a few cores.
LARGE = 500_000_000
AUTOCAST = "wrap_with_autocast"  # the operator of a region of a graph that rounds its values
SKIP = "; the option probe=False, or --no-probe, trains all the same"

AS_ASKED = "as asked for"

ROWS = "samples influence each other, which those of other micro-batches cannot"
BACKWARD = "its backward pass has code that a trace drops, as a hook or an autograd.Function"
STATE = "its state changes in forward, which ranks do not share"
DRAWN = "its forward draws from Python's or numpy's generator, which a trace freezes"
HIDDEN = "its forward gives another loss each time, by state or numbers that hetplan does not see"
OTHER = "its trace computes something else"


@dataclass(frozen=True)
class Pass:
    """The loss of a forward pass, and the gradients of its backward pass."""

    loss: float
    gradients: Mapping[str, Tensor]
    """Name of a trained parameter, or "the data's" and a path -> its gradient; those
    without one are left out."""

    def is_finite(self) -> bool:
        """Whether all numbers are finite."""
        numbers = [torch.tensor(self.loss), *self.gradients.values()]
        return all(bool(x.isfinite().all()) for x in numbers)

    def plus(self, other: "Pass") -> "Pass":
        """The sum of two passes."""
        summed = dict(self.gradients)
        for name, gradient in other.gradients.items():
            summed[name] = summed[name] + gradient if name in summed else gradient
        return Pass(self.loss + other.loss, summed)

    def times(self, factor: float) -> "Pass":
        """The pass with its loss and its gradients multiplied."""
        scaled = {name: factor * gradient for name, gradient in self.gradients.items()}
        return Pass(factor * self.loss, scaled)


@dataclass(frozen=True)
class Difference:
    """The first number in which two passes differ."""

    tensor: str | None
    """Name of the tensor whose gradient differs, as in `Pass`; None: the losses differ."""
    got: float
    expected: float


class Differs(Exception):
    """Passes differ, as the error in `refusal` says."""

    def __init__(self, refusal: UnsupportedError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


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


class Probe:
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
        self.module, self.chain = module, replace(chain, compute=None)
        self.called = Called(module, loss)
        self.samples = samples
        self.micro_batches = [rows_of(samples, first, last) for first, last in MICRO_BATCHES]
        self.trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.relative, self.negligible = TOLERANCES[dtype]

    def check(self) -> None:
        """Raise Differs where the layers compute something else than the module, UnsupportedError
        where a pass changes the module or the layers cannot run."""
        first = float(self.called(*copied(self.samples)).detach())  # fills caches, too
        before = ModuleState(self.module, tensor_checksum)
        generators = states_of_generators()
        own = self.own(self.samples)
        changed = before.first_change(ModuleState(self.module, tensor_checksum))
        if states_of_generators() != generators:
            raise self.refusal(DRAWN)
        if changed is not None:
            raise self.refusal(STATE, where=changed)
        if not own.is_finite():
            raise ArithmeticError("its loss or a gradient is not finite")
        again = self.difference(Pass(first, own.gradients), own)
        if again is not None:
            raise self.refusal(HIDDEN, again)
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

    def own(self, data: Any) -> Pass:
        """The module's own passes."""
        for parameter in self.trained.values():
            parameter.grad = None
        loss = self.called(*copied(data))
        if loss.requires_grad:
            loss.backward()
        gradients = {n: p.grad for n, p in self.trained.items() if p.grad is not None}
        for parameter in self.trained.values():
            parameter.grad = None
        return Pass(float(loss.detach()), gradients)

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

    def difference(self, own: Pass, ours: Pass) -> Difference | None:
        """The first difference of two passes that should be equal."""
        scale = max(abs(own.loss), abs(ours.loss))
        if abs(own.loss - ours.loss) > self.relative * scale + self.negligible:
            return Difference(None, ours.loss, own.loss)
        gradients = [*own.gradients.values(), *ours.gradients.values()]
        largest = max(map(largest_of, gradients), default=0.0)
        zero = torch.zeros(())
        for name in dict.fromkeys((*self.trained, *own.gradients, *ours.gradients)):
            expected, got = own.gradients.get(name, zero), ours.gradients.get(name, zero)
            scale = max(largest_of(expected), largest_of(got))
            if largest_of(expected - got) > self.relative * scale + self.negligible * largest:
                return Difference(name, float(got.norm()), float(expected.norm()))
        return None

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

    def refusal(
        self, cause: str, found: Difference | None = None, *, where: str | None = None
    ) -> UnsupportedError:
        """The error for a cause. found: the difference that shows it. where: what changes."""
        name = type(self.module).__name__
        if found is None:
            place = name if where is None else f"{name}.{where}"
            return UnsupportedError(cause, where=place, expected=f"the same in each pass{SKIP}")
        place = f"{name}, loss"
        if found.tensor is not None:
            place = f"{name}, norm of the gradient of {found.tensor}"
        return UnsupportedError(
            cause, where=place, got=float(f"{found.got:.5g}"),
            expected=f"{found.expected:.5g} as in one process{SKIP}",
        )  # fmt: skip


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
    count = sum(parameter.numel() for parameter in module.parameters())
    why = None
    if wanted is False:
        why = AS_ASKED
    elif wanted is None and count > LARGE:
        why = f"it has {count:,} parameters, and a smaller one of its class or probe=True tells"
    else:
        if spread > 1 or str(getattr(chain.source, "device", "cpu")) != "cpu":
            # experts that are spread need the other ranks; the module is on the CPU
            chain = describe(module, chain.names, example, loss=loss)
        why = probe(module, chain, example, loss)
    return None if why is None else not_compared(module, why)


def check_layers(
    module: nn.Module, names: Sequence[str], example: Any, wanted: bool | None
) -> str | None:
    """As `check_probe`, for a module whose plan has no chain, since it runs a program: compare it
    with the chain of its layers. names: of the plan's layers."""
    if wanted is False:
        return not_compared(module, AS_ASKED)
    try:
        chain = describe(module, names, example)
    except HetplanError as error:
        return not_compared(module, f"it cannot be split: {error}")
    return check_probe(module, chain, example, wanted=wanted)


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


def probe(
    module: nn.Module, chain: Chain, example: Any, loss: Callable[..., Tensor] | None = None
) -> str | None:
    """Compare a module with its chain. Returns None where they compute the same, or a text that
    says why nothing was compared. Raises UnsupportedError where they differ.

    example: (inputs, targets) of one sample or more. The module is as before when this returns.
    """
    if any(p.is_meta for p in module.parameters()):
        return "its parameters have no values yet"
    kept = coarsest(module, chain)
    types = [torch.float64, kept] if kept == torch.float32 and is_free(chain) else [kept]
    why = ""
    count = sum(parameter.numel() for parameter in module.parameters())
    for level, noise in ((BOLD, NOISE), (MILD, NOISE), (PLAIN, 0.0)):
        for dtype in types:
            try:
                if count <= SMALL:  # costs little, and other choices of experts may show more
                    attempt(module, chain, loss, example, level, dtype, STRONG * noise)
                attempt(module, chain, loss, example, level, dtype, noise)
                return None
            except HetplanError:
                raise
            except Exception as error:  # noqa: BLE001 (it may not take these numbers)
                why = kind_and_text(error)
    return f"its own passes fail: {why}"


def attempt(
    module: nn.Module,
    chain: Chain,
    loss: Callable[..., Tensor] | None,
    example: Any,
    level: str,
    dtype: torch.dtype,
    noise: float,
) -> None:
    """Compare a module with its chain. Raises UnsupportedError where they differ, and any exception
    of the module's own passes. Afterwards the module is as before.

    level: of `unlike_samples`. dtype: floating type of the passes. noise: as in `add_noise`.

    In other types than float64 rounding may choose another expert for a token. So the module is
    refused where a second comparison differs, too, whose parameters are slightly other ones.
    """
    for turn in range(2):
        samples = unlike_samples(example, SAMPLES, level)
        with as_it_was(module, chain), drawing_data(0, 0, 0), torch.enable_grad():
            add_noise(module, noise, seed=0)
            if turn == 1:
                add_noise(module, SLIGHT_NOISE, seed=1)
            if dtype == torch.float64:
                samples = widened(module, chain, samples, dtype)
            try:
                with Alike():
                    Probe(module, chain, loss, samples, dtype).check()
                return
            except Differs as error:
                if dtype == torch.float64 or turn == 1:
                    raise error.refusal from None


def coarsest(module: nn.Module, chain: Chain) -> torch.dtype:
    """The floating type of the module and its layers that has the largest rounding errors."""
    found = {p.dtype for p in module.parameters()}
    if isinstance(chain.source, Split):
        for node in chain.source.nodes:
            found |= {x.dtype for x in leaves(node.meta.get("val")) if isinstance(x, Tensor)}
            if name_of(node) == AUTOCAST:
                found.add(torch.bfloat16)
    known = [dtype for dtype in TOLERANCES if dtype in found]
    return known[-1] if known else torch.float32


def is_free(chain: Chain) -> bool:
    """Whether no operator of the trace names a floating type, so that it runs in any."""
    if not isinstance(chain.source, Split):
        return False
    arguments = [leaves((node.args, node.kwargs)) for node in chain.source.nodes]
    types = [x for of_node in arguments for x in of_node if isinstance(x, torch.dtype)]
    return not any(dtype.is_floating_point for dtype in types)


def widened(module: nn.Module, chain: Chain, samples: Any, dtype: torch.dtype) -> Any:
    """Give all tensors of a module and its layers a wider floating type. Returns the samples in
    this type."""
    for tensor in tensors_of(module, chain):
        if tensor.dtype == torch.float32:
            tensor.data = tensor.data.to(dtype)
    torch.set_default_dtype(dtype)
    return mapped(samples, lambda x: x.to(dtype) if is_float32(x) else x)


def is_float32(x: object) -> bool:
    """Whether x is a tensor of float32."""
    return isinstance(x, Tensor) and x.dtype == torch.float32


def tensors_of(module: nn.Module, chain: Chain) -> list[Tensor]:
    """The parameters, the buffers and the constants of a module and of its layers, each once."""
    found: list[Tensor] = []
    for owner in (module, *chain.layers):
        found += [*owner.parameters(), *owner.buffers()]
    if isinstance(chain.source, Split):
        values = [value for _, value in chain.source.attributes.values()]
        found += [value for value in values if isinstance(value, Tensor)]
    return list({id(tensor): tensor for tensor in found}.values())


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


def rows_of(data: Any, first: int, last: int) -> Any:
    """The rows [first, last) of data."""
    return mapped(data, lambda x: x[first:last] if has_samples(x) else x)


def copied(data: Any) -> Any:
    """Data whose tensors a pass may change."""
    return mapped(data, lambda x: x.clone() if isinstance(x, Tensor) else x)


def largest_of(x: Tensor) -> float:
    """The largest absolute value; 0 where there are no elements."""
    return float(x.abs().max()) if x.numel() else 0.0


def states_of_generators() -> str:
    """The states of Python's and of numpy's generators of random numbers, as a text."""
    of_numpy: Any = np.random.get_state()  # noqa: NPY002 (users draw from it)
    _, numbers, *more = of_numpy
    return f"{random.getstate()} {numbers.tobytes()!r} {more}"


def add_noise(module: nn.Module, noise: float, seed: int) -> None:
    """Add noise to the trained parameters. noise: its share of a parameter's values; 0: none."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if noise and parameter.requires_grad and parameter.is_floating_point():
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter)
            data = parameter.data
            parameter.data = data + noise * drawn * (data.abs() + LEAST)


@contextmanager
def as_it_was(module: nn.Module, chain: Chain) -> Iterator[None]:
    """A context after which a module and its layers have their values and attributes again, and
    torch its default type."""
    kept = [(tensor, tensor.data) for tensor in tensors_of(module, chain)]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    state, dtype = ModuleState(module, tensor_checksum), torch.get_default_dtype()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        for tensor, data in kept:
            tensor.data = data
        for parameter, gradient in gradients:
            parameter.grad = gradient
        state.restore()
