"""`trace`: a PyTorch module as a model file, layer by layer, with nothing allocated and nothing
computed.

Where the module keeps the contract of `engine.chain`, its layers are the contract's. Else a layer
is a submodule whose path ends with the path's first number (`h.3`), or a largest submodule that
neither has a number in its path nor contains submodules with one (`embed`). An operator outside of
all layers belongs to the layer that ran last.

The module runs twice, on micro-batches of 2 and of 3 samples. Each size is a straight line through
both results.
"""

import datetime
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from hetplan.errors import (
    HetplanError,
    InputError,
    UnsupportedError,
    kind_and_text,
    one_line,
    require,
)
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
    Selected,
    numbered,
    saved_by_autograd,
    storage,
    tree_leaves,
    tree_map,
)
from hetplan.runtime.tracing.failures import FIXING, exporting, noting, place_of, with_number
from hetplan.runtime.tracing.module_state import ModuleState

SAMPLES = (2, 3)  # two sizes, as a straight line is through two points
# Exceptions of modules that do not run on tensors without values.
FAILURES = (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError, LookupError)
# Names of the arguments by which modules take targets and return a loss.
TARGET_ARGUMENTS = ("labels", "targets", "target")


@dataclass(frozen=True)
class Passes:
    """The record of a module's forward and backward pass on some samples."""

    names: tuple[str, ...]
    """The layers, in the order in which they ran."""
    calls: tuple[Call, ...]
    saved: tuple[float, ...]
    """[layer] bytes that autograd keeps for the backward pass."""
    crossing: tuple[float, ...]
    """[layer] bytes that pass from this layer to later ones, see `Counter.crossing`."""
    params: tuple[int, ...]
    """[layer] number of parameters that this layer is the first to use."""
    tied: tuple[int, ...]
    """[layer] number of parameters that this layer shares with an earlier one."""
    frozen: tuple[int, ...]
    """[layer] the part of `params` that is not trained."""
    frozen_tied: tuple[int, ...]
    """[layer] the part of `tied` that is not trained."""
    tokens: int | None
    """Tokens of a sample; None where the inputs are no texts."""


def trace(module: nn.Module, *, name: str, precision: Precision) -> ModelFile:
    """The model file of a module: its layers, operators and sizes, with floating-point parameters
    and inputs in `precision`.

    module: offers `batch(step, first, last)` -> (inputs, targets), as for `hetplan run`. Raises
    UnsupportedError where an operator's size depends on values, InputError where the module does
    not run or has no method `batch`.
    """
    passes, numbers = [], []
    for samples in SAMPLES:
        with noting(FIXING) as noted:
            passes.append(run(module, samples, precision, name))
        numbers.append(set(with_number(noted, {samples}.__contains__)))
    few, more = passes
    few_operators, more_operators = (
        [(call.name, call.layer, call.backward) for call in passes.calls] for passes in (few, more)
    )
    # what asked for a number, and was told that of the samples in both runs
    seen = sorted(numbers[0] & numbers[1])
    require(
        few_operators == more_operators,
        "runs other operators for another number of samples",
        where=name,
        got=", ".join(seen) or None,
        expected="the same for 2 and 3",
    )
    lists: dict[tuple[Counted, ...], int] = {}  # the operators of a layer -> number of the list
    layers, width = [], ELEMENT_BYTES[precision]
    for k, layer in enumerate(few.names):
        operators = tuple(
            counted(few_call, more_call, width, f"{name}: {layer}")
            for few_call, more_call in zip(few.calls, more.calls, strict=True)
            if few_call.layer == k
        )
        layers.append(
            LayerEntry(
                name=layer,
                params=few.params[k],
                tied_params=few.tied[k],
                frozen=few.frozen[k],
                frozen_tied=few.frozen_tied[k],
                # elements for one sample, with those that do not grow with the samples
                output=sum(growth(few.crossing[k], more.crossing[k], layer)) / width,
                saved=sum(growth(few.saved[k], more.saved[k], layer)) / width,
                operators=lists.setdefault(operators, len(lists)),
            )
        )
    return ModelFile(
        name=name,
        source=f"traced module, torch {torch.__version__}",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        sequence=few.tokens,
        precision=precision,
        layers=layers,
        operator_lists=[list(operators) for operators in lists],
    )


def counted(few: Call, more: Call, width: int, where: str) -> Counted:
    """One operator of a model file, from its calls on 2 and on 3 samples. width: bytes of an
    element."""
    few_product, more_product = joined(few.products), joined(more.products)
    product = None
    if few_product is not None and more_product is not None:
        count, m, k, n = (
            growth(at_few, at_more, where)
            for at_few, at_more in zip(few_product, more_product, strict=True)
        )
        product = count, m, k, n
    return Counted(
        name=few.name,
        backward=few.backward,
        read=growth(few.read / width, more.read / width, where),
        written=growth(few.written / width, more.written / width, where),
        product=product,
        ruled=few.ruled,
    )


def paired(batch: Any) -> tuple[Any, Any]:
    """(inputs, targets) of a batch. A dictionary holds all arguments of the module's forward, so
    that its targets are None."""
    if isinstance(batch, Mapping):
        return batch, None
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise InputError(
            "`batch` returned something else", got=type(batch).__name__,
            expected="(inputs, targets), or a dictionary of what the model's forward takes",
        )  # fmt: skip
    return batch[0], batch[1]


def requested(batch: Callable[..., Any], step: int, first: int, last: int) -> tuple[Any, Any]:
    """(inputs, targets) that a module's `batch` returns for some rows of a step. Raises InputError
    for any exception of it."""
    try:
        return paired(batch(step, first, last))
    except HetplanError:
        raise
    except Exception as error:  # the author's code
        raise InputError(f"the model's `batch` raises {kind_and_text(error)}") from error


def joined(products: Sequence[Product]) -> Product | None:
    """Several products as one: it has the first product's count, m and n, and a k with which its
    work is the work of all of them. None without products."""
    if not products:
        return None
    count, m, _, n = products[0]
    if not count * m * n:
        return (0.0, 0.0, 0.0, 0.0)
    work = sum(c * x * y * z for c, x, y, z in products)
    return (count, m, work / (count * m * n), n)


def growth(few: float, more: float, where: str) -> Line:
    """(size at 0 samples, size of each sample) of the straight line through the sizes `few` at 2
    samples and `more` at 3. Raises UnsupportedError where a part is negative."""
    each = more - few
    fixed = few - SAMPLES[0] * each
    # sizes are added up and divided in floating point: -1e-6 allows for the rounding errors
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
    """Run the forward and the backward pass of a module on fake tensors, and record them."""
    batch = getattr(module, "batch", None)
    if not callable(batch):
        raise InputError(
            "module has no data",
            where=name,
            got=type(module).__name__,
            expected="a method batch(step, first, last) -> (inputs, targets) or a dictionary",
        )
    layers, dtype = Layers(), DTYPES[precision]
    saved: dict[int, float] = defaultdict(float)

    def keep(size: float) -> None:
        """Count bytes that autograd saves for the layer that runs."""
        saved[layers.now] += size

    # real tensors, since the user's code may read their values
    rows = requested(batch, 0, 0, samples)
    # a number that `item()` takes out of a tensor becomes a symbol
    symbols = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False)
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols):
        state = {f"module.{key}": value for key, value in faked(module, dtype).items()}
        data = tree_map(lambda value: fake(value, dtype), rows)
        of_parameters = {storage(tensor) for tensor in state.values()}
        of_data = {storage(value) for value in tree_leaves(data) if isinstance(value, Tensor)}
        counter, selected = Counter(layers, of_parameters | of_data), Selected(set(of_data))
        try:
            with (
                Fused(), saved_by_autograd(of_parameters, keep), _watched(module, layers),
                selected, counter,
            ):  # fmt: skip
                out = torch.func.functional_call(Called(module), state, data)
            ones, counter.backward = torch.ones_like(out), True
            with selected, counter:
                torch.autograd.backward([out], [ones])
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UnsupportedError(
                f"{one_line(str(error))[:80]}: the size of what it gives depends on values, "
                "which a trace has none of",
                where=_place(name, layers),
            ) from None
        except GuardOnDataDependentSymNode as error:
            raise UnsupportedError(
                f"control flow or a size depends on values of the data{place_of(error)}",
                where=_place(name, layers),
            ) from None
        except FAILURES as error:
            raise InputError(
                f"module does not run on fake tensors: {one_line(str(error))[:200]}",
                where=_place(name, layers),
            ) from error
    if not layers.names:
        layers.enter(type(module).__name__)
    trained, frozen = _owned(module, state, counter, len(layers.names))
    return Passes(
        names=tuple(layers.names),
        calls=tuple(counter.calls),
        saved=tuple(saved[k] for k in range(len(layers.names))),
        crossing=tuple(counter.crossing()),
        params=tuple(sum(pair) for pair in zip(trained.own, frozen.own, strict=True)),
        tied=tuple(sum(pair) for pair in zip(trained.tied, frozen.tied, strict=True)),
        frozen=tuple(frozen.own),
        frozen_tied=tuple(frozen.tied),
        tokens=tokens_of(rows[0]),
    )


def tokens_of(inputs: Any) -> int | None:
    """The number of tokens of a sample; None where the inputs are no texts. The inputs of a text
    are one tensor of whole numbers [rows, tokens], or a dictionary with the key `input_ids`."""
    if isinstance(inputs, Mapping):
        inputs = inputs.get("input_ids")
    if not isinstance(inputs, Tensor) or inputs.dim() != 2 or inputs.is_floating_point():
        return None
    return int(inputs.shape[1])


def _place(name: str, layers: Layers) -> str:
    """The layer in which a pass stopped, as a text for errors."""
    return f"{name}: {layers.names[-1] if layers.names else 'module'}"


def faked(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Name -> fake tensor for each parameter and buffer. Names of the same tensor share a fake
    one."""
    fakes: dict[int, Tensor] = {}  # id of the real tensor -> the fake one
    named: dict[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for tensor in named.values():
        fakes.setdefault(id(tensor), fake(tensor, dtype).requires_grad_(tensor.requires_grad))
    return {name: fakes[id(tensor)] for name, tensor in named.items()}


def fake(value: Any, dtype: torch.dtype) -> Any:
    """An empty tensor of a tensor's shape, in `dtype` where the tensor has a floating-point type;
    any other value as it is."""
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        dtype = value.dtype
    return torch.empty(value.shape, dtype=dtype, device="cpu")


class Called(nn.Module):
    """A module as a function of its data: (inputs, targets) -> the loss, or the module's first
    output that has a gradient.

    loss: a function (output, targets) -> loss for a module that does not return its loss.
    """

    def __init__(self, module: nn.Module, loss: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, x: Any, targets: Any) -> Tensor:
        """Call the layers of a chain one after the other, any other module at once."""
        *inner, last = chain_of(self.module).values() or [self.module]
        for layer in inner:
            x = layer(x)
        positional, named = _arguments(last.forward, x, None if self.loss else targets)
        if "use_cache" in inspect.signature(last.forward).parameters:
            # the cache of keys and values is for the generation of texts
            named = {"use_cache": False, **named}
        out = last(*positional, **named)
        return _tensor_of(self.loss(out, targets) if self.loss else out)


def graph_of(module: nn.Module, arguments: Any, where: str, **options: Any) -> Any:
    """The program with gradients that torch.export makes of a module. Raises UnsupportedError with
    the cause of an exception of torch or of the module. Afterwards the module's attributes are as
    before: what a first call does is done by the first real one."""
    state = ModuleState(module, None)
    try:
        with torch.enable_grad(), without_reentrant_checkpoints(), exporting(where):
            return torch.export.export(module, arguments, strict=False, **options)
    finally:
        state.restore()


@contextmanager
def without_reentrant_checkpoints() -> Iterator[None]:
    """A context in which torch's reentrant checkpoints run their function and nothing else. Their
    backward pass runs the function again for the same gradients, and a trace has no place for
    that."""

    class Plain:
        """Stands for `CheckpointFunction`."""

        @staticmethod
        def apply(function: Callable[..., Any], _: bool, *arguments: Any) -> Any:
            """The function's outputs."""
            return function(*arguments)

    place: Any = torch.utils.checkpoint
    reentrant = place.CheckpointFunction
    place.CheckpointFunction = Plain
    try:
        yield
    finally:
        place.CheckpointFunction = reentrant


def chain_of(module: nn.Module) -> dict[str, nn.Module]:
    """Path -> layer of a module that keeps the contract of `engine.chain`, or is an nn.Sequential;
    empty for any other module."""
    layers = getattr(module, "layers", None)
    if isinstance(layers, nn.ModuleDict) and type(module).forward is nn.Module.forward:
        return {f"layers.{name}": layer for name, layer in layers.items()}
    return dict(module.named_children()) if isinstance(module, nn.Sequential) else {}


def _arguments(
    forward: Callable[..., Any], x: Any, targets: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional arguments, arguments by name) with which a module is called.

    x: one input, a tuple of inputs, or a dictionary of inputs by name. Targets are the last
    positional argument of a function that requires two of them, or go to the parameter that is
    named for them (`TARGET_ARGUMENTS`); else they are left out.
    """
    parameters = inspect.signature(forward).parameters
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(x, dict):
        named = x
    elif isinstance(x, tuple):
        positional = x
    else:
        positional = (x,)
    if targets is None:
        return positional, named
    required = [
        p for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    if len(required) > 1 and not named:
        return (*positional, targets), named
    for name in TARGET_ARGUMENTS:
        if name in parameters:
            return positional, {**named, name: targets}
    return positional, named


def _tensor_of(out: Any) -> Tensor:
    """The loss in a module's output, or the output's first tensor that has a gradient."""
    loss = getattr(out, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    values = list(out.values()) if isinstance(out, dict) else out
    if not isinstance(values, (tuple, list)):
        values = [values]
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            return value
    raise TypeError(f"module returned {type(out).__name__} without a tensor that has a gradient")


@contextmanager
def _watched(module: nn.Module, layers: Layers) -> Iterator[None]:
    """A context in which each submodule enters its layer in `layers` when it runs."""
    with ExitStack() as stack:
        for path, label in labels(module).items():

            def enter(_: nn.Module, __: Any, label: str = label) -> None:
                layers.enter(label)

            stack.callback(module.get_submodule(path).register_forward_pre_hook(enter).remove)
        yield


def labels(module: nn.Module) -> dict[str, str]:
    """Path of a submodule -> name of its layer, for all submodules but those that contain several
    layers."""
    if chain := chain_of(module):
        return {path: path.removeprefix("layers.") for path in chain}
    paths = [path for path, _ in module.named_modules() if path]
    containers = {above for path in paths for above in _above(numbered(path))}
    layer_of = {}
    for path in paths:
        if label := numbered(path):
            layer_of[path] = label
        elif path not in containers:
            outermost_first = (*_above(path), path)
            layer_of[path] = next(p for p in outermost_first if p not in containers)
    return layer_of


def _above(path: str) -> list[str]:
    """The paths of the submodules that contain a submodule, the outermost first."""
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


class Owned(NamedTuple):
    """Numbers of parameters, all of them trained or none."""

    own: list[int]
    """[layer] that the layer is the first to use."""
    tied: list[int]
    """[layer] that the layer shares with an earlier one."""


def _owned(
    module: nn.Module, state: dict[str, Tensor], counter: Counter, count: int
) -> tuple[Owned, Owned]:
    """The trained and the frozen parameters of `count` layers. A parameter that no layer uses
    counts in layer 0."""
    trained, frozen = (Owned([0] * count, [0] * count) for _ in range(2))
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    parameters = [state[f"module.{name}"] for name in names]
    for key, tensor in {storage(p): p for p in parameters}.items():
        owned = trained if tensor.requires_grad else frozen
        first, *others = sorted(set(counter.users.get(key, [0])))
        owned.own[first] += tensor.numel()
        for other in others:
            owned.tied[other] += tensor.numel()
    return trained, frozen
