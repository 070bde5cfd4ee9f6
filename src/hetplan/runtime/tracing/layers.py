"""`trace`: any PyTorch module as a model file, layer by layer, with nothing allocated and nothing
computed.

Layers are those of `execution.chain`'s contract where the module has them; else submodules: up to
the first number of their path (`h.3`), or the largest that contain no numbered ones (`embed`). What
stands between belongs to the layer that ran last. The module runs twice, on micro-batches of 2 and
3 samples; sizes are straight lines through both.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetplan.errors import InputError, UnsupportedError, one_line
from hetplan.profiling.described import LayerEntry, ModelFile, OperatorEntry, entry
from hetplan.profiling.operators import ELEMENT_BYTES, Counted, Growth, Sizes
from hetplan.profiling.precision import Precision
from hetplan.runtime.tracing.counter import Call, Counter, Fused, Layers, storage
from hetplan.runtime.tracing.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from hetplan.runtime.tracing.rules import Product

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SAMPLES = (2, 3)
# What modules raise that do not run on tensors without values.
FAILURES = (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError, LookupError)
LOSSES = ("labels", "targets", "target")


@dataclass(frozen=True)
class Run:
    """One pass. calls; saved, crossing [layers] bytes; params, tied [layers] numbers; tokens: per
    sample, or None."""

    names: tuple[str, ...]
    calls: tuple[Call, ...]
    saved: tuple[float, ...]
    crossing: tuple[float, ...]
    params: tuple[int, ...]
    tied: tuple[int, ...]
    tokens: int | None


def trace(module: nn.Module, *, name: str, precision: Precision) -> ModelFile:
    """The module's layers, operators and sizes, with floating-point parameters and inputs in
    `precision`.

    module: offers `batch(step, first, last)` -> (inputs, targets), as for `hetplan run`. Raises
    UnsupportedError where an operator's size depends on values, InputError where the module does
    not run or has no data.
    """
    few, more = (run(module, samples, precision, name) for samples in SAMPLES)
    if [(c.name, c.layer, c.backward) for c in few.calls] != [
        (c.name, c.layer, c.backward) for c in more.calls
    ]:
        raise InputError(
            "runs other operators for another number of samples",
            where=name,
            expected="the same for 2 and 3",
        )
    lists: dict[tuple[Counted, ...], int] = {}
    layers = []
    width = ELEMENT_BYTES[precision]
    pairs = list(zip(few.calls, more.calls, strict=True))
    for k, layer in enumerate(few.names):
        found = tuple(counted(a, b, width, f"{name}: {layer}") for a, b in pairs if a.layer == k)
        layers.append(
            LayerEntry(
                name=layer,
                params=few.params[k],
                tied_params=few.tied[k],
                output=one_sample(few.crossing[k], more.crossing[k], layer) / width,
                saved=one_sample(few.saved[k], more.saved[k], layer) / width,
                operators=lists.setdefault(found, len(lists)),
            )
        )
    entries: list[list[OperatorEntry]] = [[entry(op) for op in found] for found in lists]
    return ModelFile(
        name=name,
        source=f"traced module, torch {torch.__version__}",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        sequence=few.tokens,
        precision=precision,
        layers=layers,
        operator_lists=entries,
    )


def counted(a: Call, b: Call, width: int, where: str) -> Counted:
    """One operator from its calls on fewer and on more samples."""
    one, other = joined(a.products), joined(b.products)
    product = None
    if one is not None and other is not None:
        product = Sizes(*(growth(x, y, where) for x, y in zip(one, other, strict=True)))
    read = growth(a.read / width, b.read / width, where)
    written = growth(a.written / width, b.written / width, where)
    return Counted(a.name, a.backward, read, written, product, a.ruled)


def joined(products: Sequence[Product]) -> Product | None:
    """Several products as one of the first one's size, with the sum of their work along k."""
    if not products:
        return None
    count, m, _, n = products[0]
    work = sum(c * x * y * z for c, x, y, z in products)
    return (count, m, work / (count * m * n), n) if count * m * n else (0.0, 0.0, 0.0, 0.0)


def growth(few: float, more: float, where: str) -> Growth:
    """The straight line through sizes at 2 and at 3 samples."""
    each = more - few
    fixed = few - SAMPLES[0] * each
    if each < 0 or fixed < -1e-6 * few:
        raise UnsupportedError(
            "an operator does not grow with the samples in a straight line", where=where,
            got=f"{few:g} for 2 samples, {more:g} for 3", expected="samples that do not influence each other",
        )  # fmt: skip
    return Growth(max(fixed, 0.0), each)


def one_sample(few: float, more: float, where: str) -> float:
    """The size at one sample, what does not grow included."""
    return growth(few, more, where).at(1)


def run(module: nn.Module, samples: int, precision: Precision, name: str) -> Run:
    """Forward and backward on fake tensors."""
    batch = getattr(module, "batch", None)
    if not callable(batch):
        raise InputError(
            "module has no data", where=name, got=type(module).__name__,
            expected="a method batch(step, first, last) -> (inputs, targets)",
        )  # fmt: skip
    inputs, targets = batch(0, 0, samples)
    layers = Layers()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        state = faked(module, DTYPES[precision])
        data = tuple(_fake_input(mode, value, DTYPES[precision]) for value in (inputs, targets))
        own = {storage(t) for t in state.values()}
        counter = Counter(layers, own | {storage(t) for t in data if isinstance(t, Tensor)})
        saved: list[dict[int, float]] = []
        try:
            with Fused(), _saved(own, layers, saved), counter:
                out = _forward(module, state, data, layers)
            ones, counter.backward = torch.ones_like(out), True
            with counter:
                torch.autograd.backward([out], [ones])
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UnsupportedError(
                f"{one_line(str(error))[:80]}: the size of what it gives depends on values, which a trace has none of",
                where=f"{name}: {layers.names[-1] if layers.names else 'module'}",
            ) from None
        except FAILURES as error:
            raise InputError(
                f"module does not run on fake tensors: {one_line(str(error))[:200]}",
                where=f"{name}: {layers.names[-1] if layers.names else 'module'}",
            ) from error
    if not layers.names:
        layers.enter(type(module).__name__)
    params, tied = _owned(module, state, counter, len(layers.names))
    sizes = [sum(s.values()) for s in saved] + [0.0] * (len(layers.names) - len(saved))
    tokens = data[0].shape[1] if _is_text(data[0]) else None
    return Run(
        tuple(layers.names), tuple(counter.calls), tuple(sizes), tuple(counter.crossing()), tuple(params), tuple(tied),
        tokens,
    )  # fmt: skip


def _is_text(data: Any) -> bool:
    return isinstance(data, Tensor) and data.dim() == 2 and not data.is_floating_point()


def faked(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Fake parameters and buffers by name; those that are one stay one."""
    made: dict[int, Tensor] = {}
    state = {}
    for names in (
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in names:
            if id(tensor) not in made:
                kind = dtype if tensor.is_floating_point() else tensor.dtype
                made[id(tensor)] = torch.empty(
                    tensor.shape, dtype=kind, device="cpu", requires_grad=tensor.requires_grad
                )
            state[name] = made[id(tensor)]
    return state


def _fake_input(mode: FakeTensorMode, value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    fake = torch.empty(
        value.shape, dtype=dtype if value.is_floating_point() else value.dtype, device="cpu"
    )
    return fake


def _forward(
    module: nn.Module, state: dict[str, Tensor], data: tuple[Any, Any], layers: Layers
) -> Tensor:
    """The loss, or whatever the module gives."""
    x, targets = data
    chain = _chain(module)
    if chain is None:
        with _watched(module, layers):
            return _tensor_of(
                torch.func.functional_call(module, state, *_arguments(module.forward, x, targets))
            )
    for k, (name, path, layer) in enumerate(chain):
        layers.enter(name)
        inside = {
            key.removeprefix(path): value for key, value in state.items() if key.startswith(path)
        }
        last = k == len(chain) - 1
        args, named = _arguments(layer.forward, x, targets) if last else ((x,), {})
        x = torch.func.functional_call(layer, inside, args, named)
    return _tensor_of(x)


def _chain(module: nn.Module) -> list[tuple[str, str, nn.Module]] | None:
    """(name, prefix of its parameters, layer) of a module that keeps the contract of
    `execution.chain`."""
    layers = getattr(module, "layers", None)
    if isinstance(layers, nn.ModuleDict) and not _has_forward(module):
        return [(name, f"layers.{name}.", layer) for name, layer in layers.items()]
    if isinstance(module, nn.Sequential):
        return [(name, f"{name}.", layer) for name, layer in module.named_children()]
    return None


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _arguments(
    forward: Callable[..., Any], x: Any, targets: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs, and targets where the function needs two or names them."""
    parameters = inspect.signature(forward).parameters
    given, named = ((), x) if isinstance(x, dict) else ((x,), {})
    needed = [
        p for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    told = next((label for label in LOSSES if label in parameters), None)
    if len(needed) > 1 and not named:
        return (*given, targets), named
    return (given, named) if told is None else (given, {**named, told: targets})


def _tensor_of(out: Any) -> Tensor:
    """The loss of what a module returns, or its first tensor that has a gradient."""
    found = getattr(out, "loss", None)
    if isinstance(found, Tensor):
        return found
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

            def told(_: nn.Module, __: Any, label: str = label) -> None:
                layers.enter(label)

            handle = module.get_submodule(path).register_forward_pre_hook(told)
            stack.callback(handle.remove)
        yield


def labels(module: nn.Module) -> dict[str, str]:
    """path of a submodule -> layer, without those that contain several layers."""
    paths = [path for path, _ in module.named_modules() if path]
    numbered = {path: _numbered(path) for path in paths}
    holds = {
        ".".join(p.split(".")[:i])
        for p, n in numbered.items()
        if n
        for i in range(1, len(n.split(".")))
    }
    found = {}
    for path in paths:
        parts = path.split(".")
        if numbered[path]:
            found[path] = numbered[path]
        elif path not in holds:
            heads = (".".join(parts[: i + 1]) for i in range(len(parts)))
            found[path] = next(head for head in heads if head not in holds)
    return found


def _numbered(path: str) -> str:
    """The path up to its first number, or nothing."""
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])


@contextmanager
def _saved(own: set[int], layers: Layers, found: list[dict[int, float]]) -> Iterator[None]:
    """Distinct storages that autograd keeps, by the layer that keeps them first; parameters left
    out."""
    seen: set[int] = set()
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        key = storage(tensor)
        if key not in own and key not in seen:
            seen.add(key)
            alive.append(tensor)
            while len(found) <= layers.now:
                found.append({})
            found[layers.now][key] = float(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _owned(
    module: nn.Module, state: dict[str, Tensor], counter: Counter, count: int
) -> tuple[list[int], list[int]]:
    """[layers] parameters of the layer that uses them first, and of others that share them."""
    params, tied, seen = [0] * count, [0] * count, set()
    for name, _ in module.named_parameters(remove_duplicate=False):
        tensor = state[name]
        if storage(tensor) in seen:
            continue
        seen.add(storage(tensor))
        users = sorted(set(counter.users.get(storage(tensor), [0])))
        params[users[0]] += tensor.numel()
        for other in users[1:]:
            tied[other] += tensor.numel()
    return params, tied
