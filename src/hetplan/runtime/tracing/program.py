"""`trace`: a PyTorch module that returns a scalar loss, as a single-device program.

torch.export gives the forward graph in ATen's operators, without changes in place. The rules in
`tracing.aten` turn each of them into operators of the program. The backward pass needs no trace:
the cost of an instruction includes its backward pass, and torch computes the gradients.

Attention is rewritten so that one product comes before it and one after it. Modules compute
queries, keys and values in three products, and turn rows into heads by views and transpositions.
The search would then choose a form for each of these three tensors, although they are always sliced
alike. Here the three products become one, with parameters stacked head by head, [n, 3 d, h] for n
heads of width d and hidden size h. The product after attention takes heads as they are, with the
weight [h, n, d]. The FLOPs stay the same. `Packed` converts values and gradients of parameters.
"""

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from hetplan.runtime.tracing.layers import Called, chain_of, graph_of, labels, requested
from hetplan.runtime.tracing.losses import has_rows, is_symbolic
from hetplan.text import counted, grouped

# Assertions that torch.export writes into graphs; they have no output.
SILENT = ("aten._assert_tensor_metadata", "aten._assert_async", "aten._assert_scalar")
LISTED = 6  # largest number of parameters that an error names
# The operator of a region of a graph in which gradients are switched on or off.
GRADIENTS_SET = "wrap_with_set_grad_enabled"
LINEAR = ("abx,yx->aby", "abx,yx,y->aby")  # products with a weight, without and with a bias
HEADS = (0, 2, 1, 3)  # order of the permutation that exchanges rows and heads


@dataclass(frozen=True)
class Packed:
    """A parameter of the program that consists of several parameters of the module, its owners.
    Each owner is reshaped, and all of them are joined along an axis."""

    owners: tuple[str, ...]
    """Names of the owners."""
    shapes: tuple[Shape, ...]
    """[owner] shape in the module."""
    shape: Shape
    """Shape to which each owner is reshaped."""
    axis: int

    def pack(self, values: Sequence[TorchTensor]) -> TorchTensor:
        """The packed value. values: values of the owners."""
        return torch.cat([value.reshape(self.shape) for value in values], dim=self.axis)

    def unpack(self, gradient: TorchTensor) -> dict[str, TorchTensor]:
        """Owner -> its gradient. gradient: gradient of the packed parameter."""
        parts = gradient.chunk(len(self.owners), dim=self.axis)
        return {
            owner: part.reshape(shape)
            for owner, shape, part in zip(self.owners, self.shapes, parts, strict=True)
        }


@dataclass(frozen=True)
class Traced:
    """A module as a single-device program."""

    program: SingleProgram
    inputs: tuple[str, ...]
    """Placeholders of the module's arguments, in order."""
    constants: Mapping[str, TorchTensor]
    """Any other placeholder -> its value."""
    notes: Mapping[str, int]
    """Left out of the program (dropout, say) -> how often."""
    packed: Mapping[str, Packed] = field(default_factory=dict)
    """Name of a packed parameter -> the parameters it consists of (see `fused`)."""

    def data(self, arguments: Any) -> dict[str, TorchTensor]:
        """Placeholder -> value, for arguments of the same shapes as the traced ones."""
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, TorchTensor)]
        return {**self.constants, **dict(zip(self.inputs, tensors, strict=True))}

    def values(self, module: Any, arguments: Any) -> dict[str, TorchTensor]:
        """Name -> value of all parameters and placeholders of the program, for arguments of the
        same shapes as the traced ones."""
        of_module = {name: p.detach() for name, p in module.named_parameters()}
        packed_values = {
            name: packed.pack([of_module[owner] for owner in packed.owners])
            for name, packed in self.packed.items()
        }
        names = [node.name for node in self.program.parameters if node.name not in packed_values]
        plain_values = {name: of_module[self.program.copies.get(name, name)] for name in names}
        return self.data(arguments) | plain_values | packed_values


def trace(
    module: Any,
    arguments: Sequence[Any],
    *,
    name: str = "module",
    unsliced: Mapping[int, Sequence[int]] | None = None,
) -> Traced:
    """The program of `module(*arguments)`, which must return a scalar.

    arguments: example tensors; the program is for their shapes alone. unsliced: number of an
    argument -> dimensions that the search leaves whole.

    Raises UnsupportedError that lists every operator without a rule and every parameter that is not
    trained, with its place, or says why torch.export has no graph. Raises InputError where the
    module does not return one scalar.
    """
    program, walker = graph_of(module, tuple(arguments), name), Walker(Writer(name))
    refuse_regions(walker, program, module)
    with warnings.catch_warnings():  # torch warns of copies that it makes itself
        warnings.simplefilter("ignore", FutureWarning)
        program = program.run_decompositions(decompositions())
    values, inputs = sources(walker, program, module, unsliced or {})  # values: by graph node
    inner, layers = user_module(module), Layers()
    layer_of = labels(inner)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    entered = (layer_of.get(place_of(node, module)) for node in calls)
    first_layer = next(filter(None, entered), type(inner).__name__)
    layers.enter(first_layer)  # operators before it belong to it
    for node in calls:
        walker.where = place_of(node, module)
        present_layer = layers.names[-1].partition("#")[0]
        layers.enter(layer_of.get(walker.where, present_layer))
        walker.writer.layer = layers.names[-1]
        values[node] = called(walker, node, values)
    require(not walker.unsupported, listed(walker.unsupported), where=name, kind=UnsupportedError)
    (output_nodes,) = [node.args[0] for node in program.graph.nodes if node.op == "output"]
    outputs = zip(program.graph_signature.output_specs, output_nodes, strict=True)
    results = [
        values.get(node, node) for spec, node in outputs if spec.kind is OutputKind.USER_OUTPUT
    ]
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
    """A module as a function of its data: (inputs, targets) -> the mean loss. The loss of a chain,
    which is a sum, is divided by the number of targets."""

    def forward(self, x: Any, targets: Any) -> TorchTensor:
        """The mean loss of a chain; for any other module the loss that it returns."""
        loss = super().forward(x, targets)
        return loss / targets.numel() if chain_of(self.module) else loss


def plannable(
    module: Any, file: ModelFile, check_runs: Callable[[int], None] | None = None
) -> Model:
    """The model to plan of a module. Its program for a number of samples is traced when it is asked
    for first, and kept. file: the module traced layer by layer. check_runs: as in `ModelSpec`."""
    programs = lru_cache(lambda samples: trace_samples(module, samples, name=file.name).program)
    spec = replace(file.spec(), program=programs, check_runs=check_runs)
    return load_model(spec, precision=file.precision)


def trace_samples(module: Any, samples: int, *, name: str = "module") -> Traced:
    """The program of one step on `samples` rows of the module's own data, with the layers of
    `layers.trace`.

    module: offers `batch(step, first, last)` -> (inputs, targets), and returns the mean loss; or is
    a chain (see `engine.chain`). Raises as `trace` does.
    """
    return trace(PerTarget(module), requested(module.batch, 0, 0, samples), name=name)


def listed(unsupported: Sequence[Unsupported]) -> str:
    """The text "2 operators without a rule: …", each operator with all its places."""
    places = grouped(((entry.operator, entry.missing), entry.where) for entry in unsupported)
    texts = [f"{name} in {', '.join(where)}: {lack}" for (name, lack), where in places.items()]
    return f"{counted(len(texts), 'operator')} without a rule: {'; '.join(texts)}"


def decompositions() -> dict[Any, Any]:
    """ATen operator -> torch's decomposition of it into operators that have rules. Every other
    operator stays as it is, except that torch replaces changes in place."""
    decomposition_of, aten = torch.export.default_decompositions(), torch.ops.aten
    return {
        overload: decomposition_of[overload]
        for overload in (
            aten.mse_loss.default, aten.rsub.Scalar, aten.rsub.Tensor, aten.square.default,
            aten.stack.default, aten.t.default, aten.transpose.int, aten.unbind.int,
            aten.split.Tensor, aten.broadcast_tensors.default,
        )
    }  # fmt: skip


def refuse_regions(walker: Walker, program: Any, module: Any) -> None:
    """Record regions under torch.no_grad() that depend on parameters as unsupported.

    Gradients pass every operator of a program. So a region without gradients has a rule only where
    it depends on data alone.
    """
    specs = program.graph_signature.input_specs
    parameter_of = {s.arg.name: s.target for s in specs if s.kind is InputKind.PARAMETER}
    parameters: dict[Any, set[str]] = {}  # node -> names of the parameters that it depends on
    for node in program.graph.nodes:
        parameters[node] = {parameter_of[node.name]} if node.name in parameter_of else set()
        for source in node.all_input_nodes:
            parameters[node] |= parameters[source]
        if str(node.target) != GRADIENTS_SET:
            continue
        gradients_are_on = node.args[0]
        if not gradients_are_on and parameters[node]:
            names = ", ".join(sorted(parameters[node])[:LISTED])
            walker.refuse(
                "torch.no_grad",
                f"no rule for what it makes of parameters ({names})",
                place_of(node, module),
            )


def sources(
    walker: Walker, program: Any, module: Any, unsliced: Mapping[int, Sequence[int]]
) -> tuple[dict[Any, Any], tuple[str, ...]]:
    """(graph's placeholder -> its value, placeholders of the arguments).

    Parameters and arguments are written to the program; buffers are constants.
    """
    constants = {**dict(program.named_buffers()), **dict(program.constants)}
    values: dict[Any, Any] = {}
    inputs: list[str] = []
    parameters: dict[str, Tensor] = {}  # first name of a parameter -> its tensor in the program
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
            if owner not in parameters:
                shape = tuple(int(n) for n in value.shape)
                written = walker.writer.parameter(walker.fresh(owner), shape)
                parameters[owner] = Tensor(written, shape)
            values[node] = parameters[owner]
        elif entry.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            values[node] = constants[entry.target]
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
            values[node] = Tensor(label, shape)
        else:
            values[node] = value
    return values, tuple(inputs)


def canonical(module: Any, name: str) -> str:
    """The first name of a parameter. A tied weight has several names."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return str(next(n for n, value in parameters.items() if value is parameters[name]))


def classes_of(node: Any) -> int:
    """The number of values that a tensor of whole numbers takes: the rows of the table that it
    indexes, or the classes of the loss whose labels it has; 2 where it has no such use."""
    for user in node.users:
        kind = str(user.target)
        if kind.startswith("aten.embedding."):
            return int(user.args[0].meta["val"].shape[0])
        if kind.startswith(("aten.cross_entropy_loss.", "aten.nll_loss_nd.")):
            return int(user.args[0].meta["val"].shape[1])
        value = user.meta.get("val")
        has_whole_numbers = hasattr(value, "is_floating_point") and not value.is_floating_point()
        if has_whole_numbers:
            classes = classes_of(user)
            if classes > 2:  # 2 may mean that this user has no such use: ask the others
                return classes
    return 2


def user_module(module: Any) -> Any:
    """The module that the user wrote."""
    return module.module if isinstance(module, Called) else module


def own_path(path: str, module: Any) -> str:
    """A path in the traced module as a path in the user's module."""
    return path.removeprefix("module").removeprefix(".") if isinstance(module, Called) else path


def place_of(node: Any, module: Any) -> str:
    """The path of the submodule of the user's module that calls a node's operator."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((str(entry[0]) for entry in reversed(list(stack.values()))), "")
    return own_path(path.removeprefix("L['self']").removeprefix("."), module)


def called(walker: Walker, node: Any, values: Mapping[Any, Any]) -> Any:
    """The value of a call in the graph. values: values of the nodes before it. A call without a
    tensor of the program among its arguments is computed at once."""
    arguments, named = map_arg((node.args, node.kwargs), lambda n: values.get(n, n))
    if node.target is operator.getitem:
        return arguments[0][arguments[1]]
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves((arguments, named))):
        return node.target(*arguments, **named)
    kind, shape = name_of(node.target), shape_of(node)
    if kind in SILENT:
        return None
    require(
        shape is not None,
        f"{kind}: the size of what it gives depends on values, and a program has fixed sizes",
        where=walker.where or "the module itself",
        kind=UnsupportedError,
    )
    walker.output_shape = shape
    if kind not in RULES:
        return walker.stand_in(kind, "no rule for this operator", shape)
    try:
        value = RULES[kind](walker, *arguments, **named)
    except MissingRule as error:
        return walker.stand_in(kind, str(error), shape)
    except TypeError as error:
        return walker.stand_in(kind, f"arguments that its rule does not take ({error})", shape)
    if isinstance(value, Tensor) and list(value.shape) != shape:
        raise InputError(
            f"shape of {kind}", where=walker.where, got=value.shape, expected=str(tuple(shape))
        )
    return value


def shape_of(node: Any) -> Any:
    """The shape of a node's value; a list of shapes for several values; None where a size depends
    on values."""
    value = node.meta.get("val")
    several = isinstance(value, (tuple, list))
    outputs = value if several else [value]
    if any(is_symbolic(one) or has_rows(one) for one in outputs):  # all rows are fixed here
        return None
    shapes = [[int(n) for n in one.shape] for one in outputs if hasattr(one, "shape")]
    if several:
        return shapes
    return shapes[0] if shapes else []


def pruned(program: SingleProgram, loss: str) -> SingleProgram:
    """The program without the nodes that the loss does not depend on. The loss is its last node."""
    needed = {loss}
    for node in reversed(program.nodes):
        if node.name in needed:
            needed.update(node.inputs)
    last = program.node(loss)
    nodes = [node for node in program.nodes if node.name in needed and node is not last]
    return SingleProgram(program.name, (*nodes, last), program.copies)


def fused(program: SingleProgram) -> tuple[SingleProgram, dict[str, Packed]]:
    """(the program with every attention that fits the pattern rewritten, its packed
    parameters)."""
    fuser = _Fuser(program)
    for node in program.computations:
        has_separate_inputs = len(node.inputs) == 3  # queries, keys and values
        if node.kind == "attention" and has_separate_inputs:
            fuser.join_projections(node)
        if node.kind == "contract":
            fuser.take_heads(node)
    nodes: list[Node] = []
    for node in program.nodes:
        nodes += fuser.replacements.get(node.name, (node,))
    return SingleProgram(program.name, tuple(nodes), program.copies), fuser.packed


class _Fuser:
    """Collects the replacements of nodes around attention, and the packed parameters."""

    def __init__(self, program: SingleProgram) -> None:
        self.program = program
        self.users = Counter(name for node in program.nodes for name in node.inputs)
        # Tied parameters, which are not packed: their other uses read them as they are.
        self.tied = {*program.copies, *program.copies.values()}
        # node -> the nodes that take its place, none for a node that is left out
        self.replacements: dict[str, tuple[Node, ...]] = {}
        self.packed: dict[str, Packed] = {}

    def backwards(self, name: str, *kinds: str) -> list[Node]:
        """The nodes that compute a tensor one from the other, the last one first, where they are of
        these kinds.

        Empty where a node is of another kind or has several users, or where a permutation does not
        exchange rows and heads.
        """
        nodes: list[Node] = []
        for kind in kinds:
            node = self.program.node(nodes[-1].inputs[0] if nodes else name)
            swaps = kind != "permute" or tuple(node.attributes.get("order", ())) == HEADS
            if node.kind != kind or self.users[node.name] > 1 or not swaps:
                return []
            nodes.append(node)
        return nodes

    def is_linear(self, node: Node) -> bool:
        """Whether a node is a product of a tensor [a, b, x] with a weight, and a bias where it has
        one, that are parameters and not tied."""
        if node.attributes.get("equation") not in LINEAR:
            return False
        _, *parameters = self.program.inputs(node)
        return all(p.kind == PARAMETER and p.name not in self.tied for p in parameters)

    def projection(self, name: str) -> list[Node]:
        """The permutation and the view that turn rows into heads [b, n, s, d], and the product
        before them; empty where the tensor `name` is computed otherwise."""
        nodes = self.backwards(name, "permute", "reshape", "contract")
        if not nodes:
            return []
        _, view, product = nodes
        fits = self.is_linear(product) and view.shape[:2] == product.shape[:2]
        return nodes if fits else []

    def join_projections(self, attention: Node) -> None:
        """Replace the products that compute queries, keys and values from one tensor by a single
        product."""
        projections = [self.projection(name) for name in attention.inputs]
        shapes = {self.program.node(name).shape for name in attention.inputs}
        # only heads of the same number and width are stacked, not fewer heads of keys and values
        if len(shapes) > 1 or not all(projections):
            return
        products = [product for _, _, product in projections]
        read_one_tensor = len({product.inputs[0] for product in products}) == 1
        all_or_none_have_biases = len({len(product.inputs) for product in products}) == 1
        if not read_one_tensor or not all_or_none_have_biases:
            return
        b, n, s, d = shapes.pop()
        hidden = self.program.node(products[0].inputs[0]).shape[2]
        base, layer = f"{attention.name}.qkv", products[0].layer
        weights = [product.inputs[1] for product in products]
        parameters = [self.pack(f"{base}.weight", weights, (n, d, hidden), 1, layer)]
        equation = "bsh,ndh->bnsd"
        if len(products[0].inputs) == 3:
            biases = [product.inputs[2] for product in products]
            parameters.append(self.pack(f"{base}.bias", biases, (n, d), 1, layer))
            equation = "bsh,ndh,nd->bnsd"
        joint = Node(
            base,
            "contract",
            (products[0].inputs[0], *(parameter.name for parameter in parameters)),
            (b, n, s, 3 * d),
            MappingProxyType({"equation": equation}),
            layer=layer,
        )
        self.replacements[attention.name] = (
            *parameters, joint, replace(attention, inputs=(base,)),
        )  # fmt: skip
        for nodes in projections:
            _, _, product = nodes
            self._leave_out([*(node.name for node in nodes), *product.inputs[1:]])

    def take_heads(self, product: Node) -> None:
        """Replace the product after attention, which reads joined heads, by a product that reads
        heads."""
        if not self.is_linear(product):
            return
        nodes = self.backwards(product.inputs[0], "reshape", "permute")
        if not nodes:
            return
        view, permutation = nodes
        if view.shape[:2] != permutation.shape[:2]:
            return
        heads = self.program.node(permutation.inputs[0])
        if heads.kind != "attention":
            return
        _, n, _, d = heads.shape
        weight = self.pack(
            f"{product.name}.by-head", [product.inputs[1]], (product.shape[2], n, d), 0,
            product.layer,
        )  # fmt: skip
        equation = "bnsd,hnd->bsh" if len(product.inputs) == 2 else "bnsd,hnd,h->bsh"
        inputs = (heads.name, weight.name, *product.inputs[2:])
        by_head = replace(
            product, inputs=inputs, attributes=MappingProxyType({"equation": equation})
        )
        self.replacements[product.name] = (weight, by_head)
        self._leave_out([view.name, permutation.name, product.inputs[1]])

    def _leave_out(self, names: Sequence[str]) -> None:
        """Replace nodes by nothing."""
        self.replacements.update(dict.fromkeys(names, ()))

    def pack(self, name: str, owners: Sequence[str], shape: Shape, axis: int, layer: str) -> Node:
        """A packed parameter, which is also recorded in `packed`."""
        shapes = tuple(self.program.node(owner).shape for owner in owners)
        self.packed[name] = Packed(tuple(owners), shapes, shape, axis)
        whole = (*shape[:axis], len(owners) * shape[axis], *shape[axis + 1 :])
        return Node(name, PARAMETER, (), whole, layer=layer)
