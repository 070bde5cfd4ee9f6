"""`trace`: a PyTorch module that returns a scalar loss, as a single-device program.

torch.export gives the forward graph in ATen's operators, without changes in place; the rules
(`aten`) say what each is made of. The backward pass needs no trace:
theories price each instruction with its mirror, and gradients are torch's.

Attention as modules write it is brought to one product before it and one behind. Modules project
queries, keys and values apart and turn rows into heads by views and transpositions. Three tensors
that every device may hold in four forms each make a theory wide for nothing: they are always sliced
alike. Here the three products become one, with parameters stacked head by head ([n, 3 d, h]), and
the product behind attention takes heads as they are ([h, n, d]). FLOP stay; `Packed` says how
values and gradients of parameters go over.
"""

import operator
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor as TorchTensor
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.node import map_arg

from hetplan.errors import InputError, UnsupportedError, require
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.traced_model import ModelFile
from hetplan.programs.operators.operator import Shape
from hetplan.programs.program import PARAMETER, Node, SingleProgram, Writer
from hetplan.runtime.tracing.aten import RULES, MissingRule, Tensor, Unsupported, Walker
from hetplan.runtime.tracing.counter import Layers, name_of, tree_leaves
from hetplan.runtime.tracing.layers import Called, chain_of, graph_of, labels
from hetplan.text import counted, grouped

# Assertions that torch.export writes: nothing to run.
SILENT = ("aten._assert_tensor_metadata", "aten._assert_async", "aten._assert_scalar")
LISTED = 6
# The region of a graph in which gradients are switched on or off.
GRADIENTS_SET = "wrap_with_set_grad_enabled"
LINEAR = ("abx,yx->aby", "abx,yx,y->aby")
HEADS = (0, 2, 1, 3)


@dataclass(frozen=True)
class Packed:
    """A parameter made of others: each reshaped to `shape`, one after the other along `axis`;
    shapes: their own."""

    owners: tuple[str, ...]
    shapes: tuple[Shape, ...]
    shape: Shape
    axis: int

    def pack(self, values: Sequence[TorchTensor]) -> TorchTensor:
        """From the owners' values."""
        return torch.cat([value.reshape(self.shape) for value in values], dim=self.axis)

    def unpack(self, gradient: TorchTensor) -> dict[str, TorchTensor]:
        """To the owners' gradients."""
        return {
            owner: part.reshape(shape)
            for owner, shape, part in zip(
                self.owners,
                self.shapes,
                gradient.chunk(len(self.owners), dim=self.axis),
                strict=True,
            )
        }


@dataclass(frozen=True)
class Traced:
    """A module as a program."""

    program: SingleProgram
    inputs: tuple[str, ...]
    """Placeholders of the module's arguments, in order."""
    constants: Mapping[str, TorchTensor]
    """Values of the other placeholders."""
    notes: Mapping[str, int]
    """What was left out, with how often."""
    packed: Mapping[str, Packed] = field(default_factory=dict)
    """Parameters made of the module's (see `fuse`)."""

    def data(self, arguments: Any) -> dict[str, TorchTensor]:
        """Values of the placeholders for arguments like those traced."""
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, TorchTensor)]
        return {**self.constants, **dict(zip(self.inputs, tensors, strict=True))}

    def values(self, module: Any, arguments: Any) -> dict[str, TorchTensor]:
        """Values of all sources: the module's parameters, and arguments like those traced."""
        own = {name: p.detach() for name, p in module.named_parameters()}
        packed = {
            name: made.pack([own[owner] for owner in made.owners])
            for name, made in self.packed.items()
        }
        names = [node.name for node in self.program.parameters if node.name not in packed]
        plain = {name: own[self.program.copies.get(name, name)] for name in names}
        return self.data(arguments) | plain | packed


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
    program, walker = graph_of(module, tuple(arguments), name), Walker(Writer(name))
    refuse_regions(walker, program, module)
    with warnings.catch_warnings():  # torch's own, about its own copies
        warnings.simplefilter("ignore", FutureWarning)
        program = program.run_decompositions(decompositions())
    known, inputs = sources(walker, program, module, unsliced or {})
    own, layers = user_module(module), Layers()
    layer_of, calls = labels(own), [n for n in program.graph.nodes if n.op == "call_function"]
    entered = (layer_of.get(place_of(node, module)) for node in calls)
    layers.enter(next(filter(None, entered), type(own).__name__))
    for node in calls:
        walker.where = place_of(node, module)
        layers.enter(layer_of.get(walker.where, layers.names[-1].partition("#")[0]))
        walker.writer.layer = layers.names[-1]
        known[node] = called(walker, node, known)
    require(not walker.unsupported, listed(walker.unsupported), where=name, kind=UnsupportedError)
    (made,) = [node.args[0] for node in program.graph.nodes if node.op == "output"]
    outputs = zip(program.graph_signature.output_specs, made, strict=True)
    results = [known.get(node, node) for s, node in outputs if s.kind is OutputKind.USER_OUTPUT]
    loss = results[0] if len(results) == 1 else None
    if not isinstance(loss, Tensor) or loss.shape != ():
        raise InputError(
            "forward must return one scalar, the loss",
            where=name,
            got=loss.shape if isinstance(loss, Tensor) else f"{len(results)} values",
            expected="shape ()",
        )
    written, packed = fused(pruned(walker.writer.finish(), loss.name))
    return Traced(written, inputs, walker.data, walker.notes, packed)


class PerTarget(Called):
    """A module on its data, (inputs, targets) -> the loss: a chain's, which is a sum, as the mean
    over the targets."""

    def forward(self, x: Any, targets: Any) -> TorchTensor:
        """The mean, for a chain; else what the module gives."""
        loss = super().forward(x, targets)
        return loss / targets.numel() if chain_of(self.module) else loss


def plannable(module: Any, file: ModelFile) -> Model:
    """A module, traced layer by layer, as a model to plan that has programs. Programs of few sizes
    are traced once each."""
    programs = lru_cache(lambda n: trace_samples(module, n, name=file.name).program)
    return load_model(replace(file.spec(), program=programs), precision=file.precision)


def trace_samples(module: Any, samples: int, *, name: str = "module") -> Traced:
    """The program of one step on `samples` rows of the module's own data, with the layers of
    `layers.trace`.

    module: offers `batch(step, first, last)` -> (inputs, targets), and returns the mean loss; or is
    a chain (see `engine.chain`). Raises as `trace` does.
    """
    return trace(PerTarget(module), module.batch(0, 0, samples), name=name)


def listed(unsupported: Sequence[Unsupported]) -> str:
    """`2 operators without a rule: …`, each with all its places."""
    places = grouped(((entry.operator, entry.missing), entry.where) for entry in unsupported)
    texts = [f"{name} in {', '.join(where)}: {lack}" for (name, lack), where in places.items()]
    return f"{counted(len(texts), 'operator')} without a rule: {'; '.join(texts)}"


def decompositions() -> dict[Any, Any]:
    """What torch itself makes of operators that need no rule; every other one stays as it is, but
    for changes in place, which go."""
    known, aten = torch.export.default_decompositions(), torch.ops.aten
    return {
        name: known[name]
        for name in (
            aten.mse_loss.default, aten.rsub.Scalar, aten.rsub.Tensor, aten.square.default,
            aten.stack.default, aten.t.default, aten.transpose.int, aten.unbind.int,
            aten.split.Tensor, aten.broadcast_tensors.default,
        )
    }  # fmt: skip


def refuse_regions(walker: Walker, program: Any, module: Any) -> None:
    """Refuse regions under torch.no_grad() that read parameters, by name.

    Gradients pass every operator of a program, so that without them only what is made of data alone
    has a rule.
    """
    specs = program.graph_signature.input_specs
    owners = {s.arg.name: s.target for s in specs if s.kind is InputKind.PARAMETER}
    behind: dict[Any, set[str]] = {}
    for node in program.graph.nodes:
        behind[node] = {owners[node.name]} if node.name in owners else set()
        behind[node] |= {name for source in node.all_input_nodes for name in behind[source]}
        if str(node.target) == GRADIENTS_SET and not node.args[0] and behind[node]:
            names = ", ".join(sorted(behind[node])[:LISTED])
            walker.refuse(
                "torch.no_grad",
                f"no rule for what it makes of parameters ({names})",
                place_of(node, module),
            )


def sources(
    walker: Walker, program: Any, module: Any, unsliced: Mapping[int, Sequence[int]]
) -> tuple[dict[Any, Any], tuple[str, ...]]:
    """Values of the graph's placeholders: parameters and arguments are written, buffers are
    constants."""
    tensors = {**dict(program.named_buffers()), **dict(program.constants)}
    known: dict[Any, Any] = {}
    inputs: list[str] = []
    owners: dict[str, Tensor] = {}
    trained = dict(user_module(module).named_parameters())
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, entry in zip(placeholders, program.graph_signature.input_specs, strict=True):
        value = node.meta.get("val")
        if entry.kind is InputKind.PARAMETER:
            owner = canonical(user_module(module), own_path(entry.target, module))
            if not trained[owner].requires_grad and node.users:
                walker.refuse(
                    "parameter",
                    "does not require gradients, and every parameter is trained",
                    owner,
                )
            if owner not in owners:
                shape = tuple(int(n) for n in value.shape)
                owners[owner] = Tensor(walker.writer.parameter(walker.fresh(owner), shape), shape)
            known[node] = owners[owner]
        elif entry.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            known[node] = tensors[entry.target]
        elif hasattr(value, "shape"):
            shape = tuple(int(n) for n in value.shape)
            label = walker.fresh(node.name)
            walker.writer.placeholder(
                label,
                shape,
                below=None if value.is_floating_point() else classes_of(node),
                unsliced=tuple(unsliced.get(len(inputs), ())),
            )
            inputs.append(label)
            known[node] = Tensor(label, shape)
        else:
            known[node] = value
    return known, tuple(inputs)


def canonical(module: Any, name: str) -> str:
    """The first name of a parameter that goes by several (tied weights)."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return str(next(n for n, value in parameters.items() if value is parameters[name]))


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
        whole = hasattr(value, "is_floating_point") and not value.is_floating_point()
        if whole and (classes := classes_of(user)) > 2:
            return classes
    return 2


def user_module(module: Any) -> Any:
    """The module that the user wrote."""
    return module.module if isinstance(module, Called) else module


def own_path(path: str, module: Any) -> str:
    """A path within what is traced as one within the user's module."""
    return path.removeprefix("module").removeprefix(".") if isinstance(module, Called) else path


def place_of(node: Any, module: Any) -> str:
    """The path of the calling module."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((str(entry[0]) for entry in reversed(list(stack.values()))), "")
    return own_path(path.removeprefix("L['self']").removeprefix("."), module)


def called(walker: Walker, node: Any, known: Mapping[Any, Any]) -> Any:
    """The value of one call."""
    arguments, named = map_arg((node.args, node.kwargs), lambda n: known.get(n, n))
    if node.target is operator.getitem:
        return arguments[0][arguments[1]]
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves((arguments, named))):
        return node.target(*arguments, **named)
    kind, shape = name_of(node.target), shape_of(node)
    walker.made = shape
    if kind in SILENT:
        return None
    if kind not in RULES:
        return walker.stand_in(kind, "no rule for this operator", shape)
    try:
        made = RULES[kind](walker, *arguments, **named)
    except MissingRule as error:
        return walker.stand_in(kind, str(error), shape)
    except TypeError as error:
        return walker.stand_in(kind, f"arguments that its rule does not take ({error})", shape)
    if isinstance(made, Tensor) and list(made.shape) != shape:
        raise InputError(
            f"shape of {kind}", where=walker.where, got=made.shape, expected=str(tuple(shape))
        )
    return made


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
    last = program.node(loss)
    nodes = [node for node in program.nodes if node.name in needed and node is not last]
    return SingleProgram(program.name, (*nodes, last), program.copies)


def fused(program: SingleProgram) -> tuple[SingleProgram, dict[str, Packed]]:
    """The program with every attention that fits the pattern rewritten, and its packed
    parameters."""
    fuser = _Fuser(program)
    for node in program.computations:
        if node.kind == "attention" and len(node.inputs) == 3:
            fuser.before(node)
        if node.kind == "contract":
            fuser.behind(node)
    nodes = tuple(new for node in program.nodes for new in fuser.instead.get(node.name, (node,)))
    return SingleProgram(program.name, nodes, program.copies), fuser.packed


class _Fuser:
    """instead: node -> what takes its place."""

    def __init__(self, program: SingleProgram) -> None:
        self.program = program
        self.users = Counter(name for node in program.nodes for name in node.inputs)
        self.tied = {*program.copies, *program.copies.values()}
        self.instead: dict[str, tuple[Node, ...]] = {}
        self.packed: dict[str, Packed] = {}

    def back(self, name: str, *kinds: str) -> list[Node]:
        """The nodes of these kinds from a tensor backwards, if nothing else uses what they make,
        and a transposition is that of rows and heads; else none."""
        nodes: list[Node] = []
        for kind in kinds:
            node = self.program.node(nodes[-1].inputs[0] if nodes else name)
            swaps = kind != "permute" or tuple(node.attributes.get("order", ())) == HEADS
            if node.kind != kind or self.users[node.name] > 1 or not swaps:
                return []
            nodes.append(node)
        return nodes

    def linear(self, node: Node) -> bool:
        """Whether it is a product of [a, b, x] with a parameter that nothing shares."""
        return node.attributes.get("equation") in LINEAR and all(
            p.kind == PARAMETER and p.name not in self.tied for p in self.program.inputs(node)[1:]
        )

    def projection(self, name: str) -> list[Node]:
        """What turns rows into heads [b, n, s, d], and the product before; none where it is
        something else."""
        nodes = self.back(name, "permute", "reshape", "contract")
        fits = nodes and self.linear(nodes[2]) and nodes[1].shape[:2] == nodes[2].shape[:2]
        return nodes if fits else []

    def before(self, node: Node) -> None:
        """Queries, keys and values of one tensor as one product."""
        projections = [self.projection(name) for name in node.inputs]
        shapes = {self.program.node(name).shape for name in node.inputs}
        if len(shapes) > 1 or not all(projections):
            return
        products = [nodes[2] for nodes in projections]
        if len({p.inputs[0] for p in products}) > 1 or len({len(p.inputs) for p in products}) > 1:
            return
        b, n, s, d = shapes.pop()
        hidden = self.program.node(products[0].inputs[0]).shape[2]
        base, layer = f"{node.name}.qkv", products[0].layer
        made = [
            self.pack(f"{base}.weight", [p.inputs[1] for p in products], (n, d, hidden), 1, layer)
        ]
        equation = "bsh,ndh->bnsd"
        if len(products[0].inputs) == 3:
            made.append(
                self.pack(f"{base}.bias", [p.inputs[2] for p in products], (n, d), 1, layer)
            )
            equation = "bsh,ndh,nd->bnsd"
        inputs = (products[0].inputs[0], *(p.name for p in made))
        joint = Node(
            base,
            "contract",
            inputs,
            (b, n, s, 3 * d),
            MappingProxyType({"equation": equation}),
            layer=layer,
        )
        self.instead[node.name] = (*made, joint, replace(node, inputs=(base,)))
        for nodes in projections:
            gone = (*(node.name for node in nodes), *nodes[2].inputs[1:])
            self.instead.update(dict.fromkeys(gone, ()))

    def behind(self, node: Node) -> None:
        """A product of joined heads as one of heads."""
        nodes = self.back(node.inputs[0], "reshape", "permute") if self.linear(node) else []
        if not nodes or nodes[0].shape[:2] != nodes[1].shape[:2]:
            return
        heads = self.program.node(nodes[1].inputs[0])
        if heads.kind != "attention":
            return
        _, n, _, d = heads.shape
        weight = self.pack(
            f"{node.name}.by-head", [node.inputs[1]], (node.shape[2], n, d), 0, node.layer
        )
        equation = "bnsd,hnd->bsh" if len(node.inputs) == 2 else "bnsd,hnd,h->bsh"
        inputs = (heads.name, weight.name, *node.inputs[2:])
        self.instead[node.name] = (
            weight,
            replace(node, inputs=inputs, attributes=MappingProxyType({"equation": equation})),
        )
        self.instead.update(dict.fromkeys((*(n.name for n in nodes), node.inputs[1]), ()))

    def pack(self, name: str, owners: Sequence[str], shape: Shape, axis: int, layer: str) -> Node:
        """A parameter made of others."""
        shapes = tuple(self.program.node(owner).shape for owner in owners)
        self.packed[name] = Packed(tuple(owners), shapes, shape, axis)
        whole = (*shape[:axis], len(owners) * shape[axis], *shape[axis + 1 :])
        return Node(name, PARAMETER, (), whole, layer=layer)
