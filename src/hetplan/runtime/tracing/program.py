"""`trace`: a PyTorch module that returns a scalar loss, as a single-device program.

torch.export gives the forward graph in ATen's operators; the tables of rules (`products`,
`pointwise`, `moves`) say what each is made of. The backward pass needs no trace: every operator
brings its gradients, and theories price each instruction with its mirror.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hetplan.errors import InputError, UnsupportedError
from hetplan.formulations.hap.spmd.program import SingleProgram, Writer
from hetplan.runtime.tracing import moves, pointwise, products
from hetplan.runtime.tracing.aliases import Aliases, changed_by
from hetplan.runtime.tracing.export import exported
from hetplan.runtime.tracing.fuse import Packed, fused
from hetplan.runtime.tracing.walk import MissingRule, Rule, Tensor, Unsupported, Walker

RULES: dict[str, Rule] = {**products.RULES, **pointwise.RULES, **moves.RULES}
# Assertions that torch.export writes: nothing to run.
SILENT = ("aten._assert_tensor_metadata", "aten._assert_async", "aten._assert_scalar")
LISTED = 6
# The region of a graph in which torch.export found gradients switched on or off.
GRADIENTS_SET = "wrap_with_set_grad_enabled"


@dataclass(frozen=True)
class Traced:
    """program; inputs: names of the placeholders of the module's arguments, in order; constants:
    values of the other placeholders; notes: what was left out, with how often; packed: parameters
    made of the module's (see `fuse`)."""

    program: SingleProgram
    inputs: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]
    notes: Mapping[str, int]
    packed: Mapping[str, Packed] = field(default_factory=dict)

    def values(self, module: Any, arguments: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Values of all sources of the program: the module's parameters, and arguments
        like those traced."""
        given = dict(self.constants)
        given |= {
            name: argument.detach() for name, argument in zip(self.inputs, arguments, strict=True)
        }
        values = {name: p.detach() for name, p in module.named_parameters()}
        for node in self.program.parameters:
            if node.name in self.packed:
                made = self.packed[node.name]
                given[node.name] = made.pack([values[owner] for owner in made.owners])
            else:
                given[node.name] = values[self.program.copies.get(node.name, node.name)]
        return given

    def by_parameter(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradients of the program's parameters as those of the module's."""
        found: dict[str, torch.Tensor] = {}
        for name, gradient in gradients.items():
            found |= self.packed[name].unpack(gradient) if name in self.packed else {name: gradient}
        return found


def trace(
    module: Any,
    arguments: Sequence[Any],
    *,
    name: str = "module",
    unsliced: Mapping[int, Sequence[int]] | None = None,
) -> Traced:
    """The program of `module(*arguments)`, which must return a scalar.

    arguments: example tensors; shapes are fixed by them. unsliced: argument -> dimensions that
    theories leave whole.
    Raises UnsupportedError that lists every operator without a rule, with where it is called and
    what is missing, and parameters that are not trained, or says why torch.export has no graph;
    InputError where the module gives no scalar.
    """
    found = walk(module, arguments, name=name, unsliced=unsliced or {})
    if isinstance(found, Traced):
        return found
    raise UnsupportedError(listed(found), where=name)


def survey(module: Any, arguments: Sequence[Any], *, name: str = "module") -> list[Unsupported]:
    """Every operator of `module(*arguments)` without a rule; empty where `trace` works."""
    found = walk(module, arguments, name=name, unsliced={})
    return [] if isinstance(found, Traced) else found


def listed(unsupported: Sequence[Unsupported]) -> str:
    """`2 operators without a rule: …`, the first few written out."""
    texts = [entry.text() for entry in unsupported[:LISTED]]
    more = len(unsupported) - LISTED
    return (
        f"{len(unsupported)} operator{'s' if len(unsupported) > 1 else ''} without a rule: "
        f"{'; '.join(texts)}{f'; and {more} more' if more > 0 else ''}"
    )


def walk(
    module: Any, arguments: Sequence[Any], *, name: str, unsliced: Mapping[int, Sequence[int]]
) -> Traced | list[Unsupported]:
    """The program, or what keeps it from being one."""
    program = exported(module, arguments, name)
    walker = Walker(Writer(name))
    known, inputs = sources(walker, program, module, unsliced)
    result = values_of(walker, program.graph, known)
    if walker.unsupported:
        return walker.unsupported
    loss = result[0] if isinstance(result, (tuple, list)) and len(result) == 1 else result
    if not isinstance(loss, Tensor) or loss.shape != ():
        got = loss.shape if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(
            "forward must return one scalar, the loss", where=name, got=got, expected="shape ()"
        )
    written, packed = fused(pruned(walker.writer.finish(), loss.name))
    return Traced(written, inputs, walker.data, walker.notes, packed)


def values_of(walker: Walker, graph: Any, known: dict[Any, Any], *, inner: bool = False) -> Any:
    """What a graph gives; `known` has its placeholders' values, and gets the other nodes'. inner:
    see `Aliases`."""
    aliases, result = Aliases(graph, inner=inner), None
    for node in graph.nodes:
        if node.op == "output":
            result = resolved(node.args[0], known)
        elif node.op == "get_attr":  # the graph of a region
            known[node] = getattr(graph.owning_module, node.target)
        elif node.op == "call_function":
            walker.where, walker.writer.layer = place_of(node)
            if str(node.target) == GRADIENTS_SET:
                known[node] = region(walker, *resolved(tuple(node.args), known))
            else:
                known[node] = called(walker, node, known, aliases)
            for target in changed_by(node)[:1]:
                known |= dict.fromkeys(aliases.same(target), known[node])
    return result


def region(walker: Walker, trained: bool, inner: Any, *arguments: Any) -> Any:
    """The values of a region under torch.no_grad() or enable_grad(). Gradients pass every operator
    of a program, so that without them only what is made of data alone has a rule."""
    known = dict(
        zip((n for n in inner.graph.nodes if n.op == "placeholder"), arguments, strict=True)
    )
    place = walker.where
    found = values_of(walker, inner.graph, known, inner=True)
    walker.where = place
    for value in () if trained else found:
        if isinstance(value, Tensor) and (behind := walker.writer.parameters_behind(value.name)):
            walker.refuse(
                "torch.no_grad",
                f"no rule for what it makes of parameters ({', '.join(behind[:LISTED])})",
            )
    return found


def sources(
    walker: Walker, program: Any, module: Any, unsliced: Mapping[int, Sequence[int]]
) -> tuple[dict[Any, Any], tuple[str, ...]]:
    """Values of the graph's placeholders: parameters and arguments are written, buffers are
    constants."""
    from torch.export.graph_signature import InputKind

    tensors = {**dict(program.named_buffers()), **dict(program.constants)}
    known: dict[Any, Any] = {}
    inputs: list[str] = []
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    owners: dict[str, Any] = {}
    trained = dict(module.named_parameters())
    for entry in program.graph_signature.input_specs:
        node = nodes[entry.arg.name]
        if entry.kind is InputKind.PARAMETER:
            owner = canonical(module, entry.target)
            if not trained[owner].requires_grad and node.users:
                walker.refuse(
                    "parameter", "does not require gradients, and every parameter is trained", owner
                )
            if owner not in owners:
                shape = tuple(int(n) for n in node.meta["val"].shape)
                owners[owner] = Tensor(walker.writer.parameter(walker.fresh(owner), shape), shape)
            known[node] = owners[owner]
        elif entry.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            # a copy: operators in place run on it
            known[node] = tensors[entry.target].clone()
        elif "val" in node.meta and hasattr(node.meta["val"], "shape"):
            shape = tuple(int(n) for n in node.meta["val"].shape)
            below = None if node.meta["val"].is_floating_point() else classes_of(node)
            label = walker.fresh(node.name)
            walker.writer.placeholder(
                label, shape, below=below, unsliced=tuple(unsliced.get(len(inputs), ()))
            )
            inputs.append(label)
            known[node] = Tensor(label, shape)
        else:
            known[node] = node.meta.get("val")
    return known, tuple(inputs)


def canonical(module: Any, name: str) -> str:
    """The first name of a parameter that goes by several (tied weights)."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    same: str = next(other for other, value in parameters.items() if value is parameters[name])
    return same


def classes_of(node: Any) -> int:
    """How many values whole numbers take: rows of the table or classes of the loss that use them,
    at least 2."""
    for user in node.users:
        kind = str(user.target)
        if kind.startswith("aten.embedding."):
            return int(user.args[0].meta["val"].shape[0])
        if kind.startswith(("aten.cross_entropy_loss.", "aten.nll_loss_nd.")):
            return int(user.args[0].meta["val"].shape[1])
        value = user.meta.get("val")
        if (
            hasattr(value, "is_floating_point")
            and not value.is_floating_point()
            and classes_of(user) > 2
        ):
            return classes_of(user)
    return 2


def place_of(node: Any) -> tuple[str, str]:
    """(path of the calling module, the layer that it counts to: `blocks.3`)."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((str(entry[0]) for entry in reversed(list(stack.values()))), "")
    path = path.removeprefix("L['self']").removeprefix(".")
    parts = path.split(".") if path else []
    digit = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return path, ".".join(parts[: 1 if digit is None else digit + 1])


def resolved(value: Any, known: Mapping[Any, Any]) -> Any:
    """An argument with the graph's nodes replaced by their values."""
    if hasattr(value, "op") and value in known:
        return known[value]
    if isinstance(value, (tuple, list)):
        return type(value)(resolved(one, known) for one in value)
    return value


def called(walker: Walker, node: Any, known: Mapping[Any, Any], aliases: Aliases) -> Any:
    """The value of one call."""
    arguments = resolved(tuple(node.args), known)
    named = {key: resolved(value, known) for key, value in node.kwargs.items()}
    if node.target is operator.getitem:
        return arguments[0][arguments[1]]
    if not has_tensor((arguments, tuple(named.values()))):
        return node.target(*arguments, **named)
    kind = ".".join(str(node.target).split(".")[:2])
    if kind in SILENT:
        return None
    rule = RULES.get(kind.removesuffix("_"))
    shape = shape_of(node)
    if rule is None:
        return walker.stand_in(kind, "no rule for this operator", shape)
    if (other := aliases.shown(node)) is not None:
        return walker.stand_in(
            kind, f"in place, where another view of the tensor is read later ({other})", shape
        )
    try:
        found = rule(walker, *arguments, **named)
    except MissingRule as error:
        return walker.stand_in(kind, str(error), shape)
    except TypeError as error:
        return walker.stand_in(kind, f"arguments that its rule does not take ({error})", shape)
    if isinstance(found, Tensor) and list(found.shape) != shape:
        raise InputError(
            f"shape of {kind}", where=walker.where, got=found.shape, expected=str(tuple(shape))
        )
    return found


def has_tensor(value: Any) -> bool:
    """Whether tensors of the program are among the arguments."""
    if isinstance(value, (tuple, list)):
        return any(has_tensor(one) for one in value)
    return isinstance(value, Tensor)


def shape_of(node: Any) -> Any:
    """Lengths of the node's value, a list of them for several."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return [[int(n) for n in one.shape] for one in value if hasattr(one, "shape")]
    return [int(n) for n in value.shape] if hasattr(value, "shape") else []


def pruned(program: SingleProgram, loss: str) -> SingleProgram:
    """The program without what the loss does not depend on, the loss last."""
    needed = {loss}
    for node in reversed(program.nodes):
        if node.name in needed:
            needed.update(node.inputs)
    nodes = tuple(node for node in program.nodes if node.name in needed)
    at = next(i for i, node in enumerate(nodes) if node.name == loss)
    return SingleProgram(program.name, (*nodes[:at], *nodes[at + 1 :], nodes[at]), program.copies)
