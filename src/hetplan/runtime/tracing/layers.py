"""`trace`: any PyTorch module as a model file, layer by layer, with nothing allocated and nothing
computed.

Layers are those of `engine.chain`'s contract where the module has them; else submodules: up to
the first number of their path (`h.3`), or the largest that contain no numbered ones (`embed`). What
stands between belongs to the layer that ran last. The module runs twice, on micro-batches of 2 and
3 samples; sizes are straight lines through both.
"""

import datetime
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetplan.errors import InputError, UnsupportedError, one_line, require
from hetplan.profiling.models.operators import ELEMENT_BYTES, Counted, Line, Precision
from hetplan.profiling.models.traced_model import LayerEntry, ModelFile
from hetplan.runtime.tracing.counter import (
    DTYPES,
    Call,
    Counter,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    Fused,
    Layers,
    Product,
    numbered,
    saved_by_autograd,
    storage,
)

SAMPLES = (2, 3)
# What modules raise that do not run on tensors without values.
FAILURES = (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError, LookupError)
LOSSES = ("labels", "targets", "target")


@dataclass(frozen=True)
class Passes:
    """Forward and backward pass of a module on some samples."""

    names: tuple[str, ...]
    """The layers, in the order in which they ran."""
    calls: tuple[Call, ...]
    saved: tuple[float, ...]
    """[layers] bytes that autograd keeps."""
    crossing: tuple[float, ...]
    """[layers] bytes that later layers need."""
    params: tuple[int, ...]
    """[layers] parameters of the layer that uses them first."""
    tied: tuple[int, ...]
    """[layers] parameters that a layer shares with an earlier one."""
    tokens: int | None
    """Of a sample; None for what is no text."""


def trace(module: nn.Module, *, name: str, precision: Precision) -> ModelFile:
    """The module's layers, operators and sizes, with floating-point parameters and inputs in
    `precision`.

    module: offers `batch(step, first, last)` -> (inputs, targets), as for `hetplan run`. Raises
    UnsupportedError where an operator's size depends on values, InputError where the module does
    not run or has no data.
    """
    few, more = (run(module, samples, precision, name) for samples in SAMPLES)
    one, other = ([(c.name, c.layer, c.backward) for c in p.calls] for p in (few, more))
    require(
        one == other,
        "runs other operators for another number of samples",
        where=name,
        expected="the same for 2 and 3",
    )
    lists: dict[tuple[Counted, ...], int] = {}
    layers, width = [], ELEMENT_BYTES[precision]
    for k, layer in enumerate(few.names):
        own = tuple(
            counted(a, b, width, f"{name}: {layer}")
            for a, b in zip(few.calls, more.calls, strict=True)
            if a.layer == k
        )
        layers.append(
            LayerEntry(
                name=layer,
                params=few.params[k],
                tied_params=few.tied[k],
                # at one sample, what does not grow included
                output=sum(growth(few.crossing[k], more.crossing[k], layer)) / width,
                saved=sum(growth(few.saved[k], more.saved[k], layer)) / width,
                operators=lists.setdefault(own, len(lists)),
            )
        )
    return ModelFile(
        name=name,
        source=f"traced module, torch {torch.__version__}",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        sequence=few.tokens,
        precision=precision,
        layers=layers,
        operator_lists=[list(own) for own in lists],
    )


def counted(a: Call, b: Call, width: int, where: str) -> Counted:
    """One operator from its calls on fewer and on more samples."""
    one, other = joined(a.products), joined(b.products)
    product = None
    if one is not None and other is not None:
        count, m, k, n = (growth(x, y, where) for x, y in zip(one, other, strict=True))
        product = count, m, k, n
    return Counted(
        name=a.name,
        backward=a.backward,
        read=growth(a.read / width, b.read / width, where),
        written=growth(a.written / width, b.written / width, where),
        product=product,
        ruled=a.ruled,
    )


def joined(products: Sequence[Product]) -> Product | None:
    """Several products as one of the first one's size, with the sum of their work along k."""
    if not products:
        return None
    count, m, _, n = products[0]
    work = sum(c * x * y * z for c, x, y, z in products)
    return (count, m, work / (count * m * n), n) if count * m * n else (0.0, 0.0, 0.0, 0.0)


def growth(few: float, more: float, where: str) -> Line:
    """The straight line through sizes at 2 and at 3 samples."""
    each = more - few
    fixed = few - SAMPLES[0] * each
    require(
        each >= 0 and fixed >= -1e-6 * few,
        "an operator does not grow with the samples in a straight line",
        where=where,
        got=f"{few:g} for 2 samples, {more:g} for 3",
        expected="samples that do not influence each other",
        kind=UnsupportedError,
    )
    return max(fixed, 0.0), each


def run(module: nn.Module, samples: int, precision: Precision, name: str) -> Passes:
    """Forward and backward on fake tensors."""
    batch = getattr(module, "batch", None)
    if not callable(batch):
        raise InputError(
            "module has no data",
            where=name,
            got=type(module).__name__,
            expected="a method batch(step, first, last) -> (inputs, targets)",
        )
    layers, dtype = Layers(), DTYPES[precision]
    saved: dict[int, float] = defaultdict(float)

    def keep(size: float) -> None:
        saved[layers.now] += size

    rows = batch(0, 0, samples)  # the user's code may look at its values
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = {f"module.{key}": value for key, value in faked(module, dtype).items()}
        data = tuple(fake(value, dtype) for value in rows)
        own = {storage(t) for t in state.values()}
        counter = Counter(layers, own | {storage(t) for t in data if isinstance(t, Tensor)})
        try:
            with Fused(), saved_by_autograd(own, keep), _watched(module, layers), counter:
                out = torch.func.functional_call(Called(module), state, data)
            ones, counter.backward = torch.ones_like(out), True
            with counter:
                torch.autograd.backward([out], [ones])
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UnsupportedError(
                f"{one_line(str(error))[:80]}: the size of what it gives depends on values, "
                "which a trace has none of",
                where=_place(name, layers),
            ) from None
        except FAILURES as error:
            raise InputError(
                f"module does not run on fake tensors: {one_line(str(error))[:200]}",
                where=_place(name, layers),
            ) from error
    if not layers.names:
        layers.enter(type(module).__name__)
    params, tied = _owned(module, state, counter, len(layers.names))
    text = isinstance(data[0], Tensor) and data[0].dim() == 2 and not data[0].is_floating_point()
    return Passes(
        tuple(layers.names), tuple(counter.calls),
        tuple(saved[k] for k in range(len(layers.names))), tuple(counter.crossing()),
        tuple(params), tuple(tied), data[0].shape[1] if text else None,
    )  # fmt: skip


def _place(name: str, layers: Layers) -> str:
    """Where a pass stopped."""
    return f"{name}: {layers.names[-1] if layers.names else 'module'}"


def faked(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Fake parameters and buffers by name; those that are one stay one."""
    made: dict[int, Tensor] = {}
    named: dict[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for tensor in named.values():
        made.setdefault(id(tensor), fake(tensor, dtype).requires_grad_(tensor.requires_grad))
    return {name: made[id(tensor)] for name, tensor in named.items()}


def fake(value: Any, dtype: torch.dtype) -> Any:
    """A tensor's likeness without values, in `dtype` where it is real; other data as they are."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty(
        value.shape, dtype=dtype if value.is_floating_point() else value.dtype, device="cpu"
    )


class Called(nn.Module):
    """A module called on its data: (inputs, targets) -> the loss, or whatever it gives. loss: of
    (output, targets), where the module has none."""

    def __init__(self, module: nn.Module, loss: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, x: Any, targets: Any) -> Tensor:
        """A chain's layers one after the other, any other module at once."""
        *inner, last = chain_of(self.module).values() or [self.module]
        for layer in inner:
            x = layer(x)
        positional, named = _arguments(last.forward, x, None if self.loss else targets)
        if "use_cache" in inspect.signature(last.forward).parameters:
            named = {"use_cache": False, **named}  # keys and values, kept for texts that go on
        out = last(*positional, **named)
        return _tensor_of(self.loss(out, targets) if self.loss else out)


def graph_of(module: nn.Module, arguments: Any, where: str, **options: Any) -> Any:
    """torch.export's program, with gradients. Raises UnsupportedError with the first line of what
    torch, or the module, says."""
    was_training = module.training
    try:
        with torch.enable_grad():
            return torch.export.export(module, arguments, strict=False, **options)
    except Exception as error:  # torch's or the module's: whatever it is
        first = next((line for line in str(error).splitlines() if line.strip()), "no message")
        raise UnsupportedError(
            f"torch.export finds no graph: {type(error).__name__}: {first.strip()[:300]}",
            where=where,
        ) from error
    finally:
        module.train(was_training)


def chain_of(module: nn.Module) -> dict[str, nn.Module]:
    """Path -> layer of a module that keeps the contract of `engine.chain`; else nothing."""
    layers = getattr(module, "layers", None)
    if isinstance(layers, nn.ModuleDict) and type(module).forward is nn.Module.forward:
        return {f"layers.{name}": layer for name, layer in layers.items()}
    return dict(module.named_children()) if isinstance(module, nn.Sequential) else {}


def _arguments(
    forward: Callable[..., Any], x: Any, targets: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs, and targets where the function needs two or names them; several inputs are a tuple or
    a dictionary."""
    parameters = inspect.signature(forward).parameters
    positional, named = (
        ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), {})
    )
    needed = [
        p for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    if len(needed) > 1 and not named and targets is not None:
        return (*positional, targets), named
    label = next((label for label in LOSSES if label in parameters and targets is not None), None)
    return positional, named if label is None else {**named, label: targets}


def _tensor_of(out: Any) -> Tensor:
    """The loss of what a module returns, or its first tensor that has a gradient."""
    loss = getattr(out, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    values = list(out.values()) if isinstance(out, dict) else out
    for value in values if isinstance(values, (tuple, list)) else [values]:
        if isinstance(value, Tensor) and value.requires_grad:
            return value
    raise TypeError(f"module returned {type(out).__name__} without a tensor that has a gradient")


@contextmanager
def _watched(module: nn.Module, layers: Layers) -> Iterator[None]:
    """Submodules tell which layer they belong to when they run."""
    with ExitStack() as stack:
        for path, label in labels(module).items():

            def enter(_: nn.Module, __: Any, label: str = label) -> None:
                layers.enter(label)

            stack.callback(module.get_submodule(path).register_forward_pre_hook(enter).remove)
        yield


def labels(module: nn.Module) -> dict[str, str]:
    """Path of a submodule -> layer, without those that contain several layers."""
    if chain := chain_of(module):
        return {path: path.removeprefix("layers.") for path in chain}
    paths = [path for path, _ in module.named_modules() if path]
    holds = {above for path in paths for above in _above(numbered(path))}
    layer_of = {}
    for path in paths:
        if label := numbered(path):
            layer_of[path] = label
        elif path not in holds:
            layer_of[path] = next(head for head in (*_above(path), path) if head not in holds)
    return layer_of


def _above(path: str) -> list[str]:
    """The paths of what contains a submodule, the outermost first."""
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _owned(
    module: nn.Module, state: dict[str, Tensor], counter: Counter, count: int
) -> tuple[list[int], list[int]]:
    """[layers] parameters of the layer that uses them first, and of others that share them."""
    params, tied = [0] * count, [0] * count
    parameters = [state[f"module.{n}"] for n, _ in module.named_parameters(remove_duplicate=False)]
    for key, tensor in {storage(p): p for p in parameters}.items():
        first, *others = sorted(set(counter.users.get(key, [0])))
        params[first] += tensor.numel()
        for other in others:
            tied[other] += tensor.numel()
    return params, tied
