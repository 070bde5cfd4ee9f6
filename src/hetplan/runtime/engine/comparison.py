"""The comparison of passes that should be equal: the loss and the gradients of a module on unlike
samples, computed in two ways.

What is drawn with torch are fixed numbers here (`tracing.draws`). Trained parameters have noise
added, since one that begins at zero could hide the gradients of others. The passes are in float64
where the module and the operators of its trace allow it. Afterwards the module is as before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetplan.errors import HetplanError, UnsupportedError, kind_and_text
from hetplan.runtime.engine.chain import Chain
from hetplan.runtime.engine.data import drawing_data, tensor_checksum
from hetplan.runtime.engine.samples import PLAIN, unlike_samples
from hetplan.runtime.tracing.draws import Alike
from hetplan.runtime.tracing.layers import Called
from hetplan.runtime.tracing.losses import name_of
from hetplan.runtime.tracing.module_state import ModuleState
from hetplan.runtime.tracing.split import Split, has_samples, leaves, mapped

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
SAMPLES = 6
# Number of parameters up to which a module is compared twice, with noise of another strength.
SMALL, STRONG = 10_000_000, 5.0
AUTOCAST = "wrap_with_autocast"  # the operator of a region of a graph that rounds its values
SKIP = "; the option probe=False, or --no-probe, trains all the same"


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


class Comparison:
    """Two ways of computing a module's passes on some samples."""

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[..., Tensor] | None,
        samples: Any,
        dtype: torch.dtype,
    ) -> None:
        """loss: see `Called`. samples: (inputs, targets) of unlike samples. dtype: floating type of
        the passes, or that with the largest rounding errors."""
        self.module, self.called, self.samples = module, Called(module, loss), samples
        self.trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.relative, self.negligible = TOLERANCES[dtype]

    def check(self) -> None:
        """Raise Differs where both ways differ, UnsupportedError where they cannot be compared."""
        raise NotImplementedError

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

    def refusal(
        self, cause: str, found: Difference | None = None, *, place: str | None = None
    ) -> UnsupportedError:
        """The error for a cause. found: the difference that shows it. place: where the cause is;
        None: in the module."""
        name = type(self.module).__name__
        if found is None:
            expected = f"the same in each pass{SKIP}"
            return UnsupportedError(cause, where=place or name, expected=expected)
        place = f"{name}, loss"
        if found.tensor is not None:
            place = f"{name}, norm of the gradient of {found.tensor}"
        return UnsupportedError(
            cause, where=place, got=float(f"{found.got:.5g}"),
            expected=f"{found.expected:.5g} as in one process{SKIP}",
        )  # fmt: skip


# (samples, floating type of the passes) -> the comparison of a module on these samples
Making = Callable[[Any, torch.dtype], Comparison]


def compare(
    module: nn.Module, chain: Chain | None, make: Making, example: Any, levels: Sequence[str]
) -> str | None:
    """Make a comparison. Returns None where both ways compute the same, or a text that says why
    nothing was compared. Raises UnsupportedError where they differ.

    chain: of the layers that the comparison runs, too; None: it runs none. example: (inputs,
    targets) of one sample or more. levels: of `unlike_samples`, the first one first.
    """
    if any(p.is_meta for p in module.parameters()):
        return "its parameters have no values yet"
    kept = coarsest(module, chain)
    types = [torch.float64, kept] if kept == torch.float32 and is_free(chain) else [kept]
    why = ""
    count = sum(parameter.numel() for parameter in module.parameters())
    for level in levels:
        noise = 0.0 if level == PLAIN else NOISE
        for dtype in types:
            try:
                if count <= SMALL:  # costs little, and other choices of experts may show more
                    attempt(module, chain, make, example, level, dtype, STRONG * noise)
                attempt(module, chain, make, example, level, dtype, noise)
                return None
            except HetplanError:
                raise
            except Exception as error:  # noqa: BLE001 (it may not take these numbers)
                why = kind_and_text(error)
    return f"its own passes fail: {why}"


def attempt(
    module: nn.Module,
    chain: Chain | None,
    make: Making,
    example: Any,
    level: str,
    dtype: torch.dtype,
    noise: float,
) -> None:
    """Make a comparison on samples of one level. Raises UnsupportedError where both ways differ,
    and any exception of the module's own passes. Afterwards the module is as before.

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
                    make(samples, dtype).check()
                return
            except Differs as error:
                if dtype == torch.float64 or turn == 1:
                    raise error.refusal from None


def coarsest(module: nn.Module, chain: Chain | None) -> torch.dtype:
    """The floating type of the module and its layers that has the largest rounding errors."""
    found = {p.dtype for p in module.parameters()}
    if chain is not None and isinstance(chain.source, Split):
        for node in chain.source.nodes:
            found |= {x.dtype for x in leaves(node.meta.get("val")) if isinstance(x, Tensor)}
            if name_of(node) == AUTOCAST:
                found.add(torch.bfloat16)
    known = [dtype for dtype in TOLERANCES if dtype in found]
    return known[-1] if known else torch.float32


def is_free(chain: Chain | None) -> bool:
    """Whether no operator of the trace names a floating type, so that it runs in any."""
    if chain is None:
        return True
    if not isinstance(chain.source, Split):
        return False
    arguments = [leaves((node.args, node.kwargs)) for node in chain.source.nodes]
    types = [x for of_node in arguments for x in of_node if isinstance(x, torch.dtype)]
    return not any(dtype.is_floating_point for dtype in types)


def widened(module: nn.Module, chain: Chain | None, samples: Any, dtype: torch.dtype) -> Any:
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


def tensors_of(module: nn.Module, chain: Chain | None) -> list[Tensor]:
    """The parameters, the buffers and the constants of a module and of its layers, each once."""
    found: list[Tensor] = []
    layers = () if chain is None else chain.layers
    for owner in (module, *layers):
        found += [*owner.parameters(), *owner.buffers()]
    if chain is not None and isinstance(chain.source, Split):
        values = [value for _, value in chain.source.attributes.values()]
        found += [value for value in values if isinstance(value, Tensor)]
    return list({id(tensor): tensor for tensor in found}.values())


def rows_of(data: Any, first: int, last: int) -> Any:
    """The rows [first, last) of data."""
    return mapped(data, lambda x: x[first:last] if has_samples(x) else x)


def copied(data: Any) -> Any:
    """Data whose tensors a pass may change."""
    return mapped(data, lambda x: x.clone() if isinstance(x, Tensor) else x)


def largest_of(x: Tensor) -> float:
    """The largest absolute value; 0 where there are no elements."""
    return float(x.abs().max()) if x.numel() else 0.0


def add_noise(module: nn.Module, noise: float, seed: int) -> None:
    """Add noise to the trained parameters. noise: its share of a parameter's values; 0: none."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if noise and parameter.requires_grad and parameter.is_floating_point():
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter)
            data = parameter.data
            parameter.data = data + noise * drawn * (data.abs() + LEAST)


@contextmanager
def as_it_was(module: nn.Module, chain: Chain | None) -> Iterator[None]:
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
