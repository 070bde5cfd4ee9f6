"""Splits a module into a chain of layers: torch.export makes a graph of the module, which is cut
where one layer of the plan ends and the next begins.

A value of the graph is of one of three kinds.
- data: a value that follows from the data alone (masks, positions, rotary tables, the number of
  rows). Every rank computes the data that its layers read, from its own rows.
- table: a value that is the same for all samples, or that pointwise operators compute from tables
  and data (position embeddings, relative biases). Every layer that reads a table computes it; these
  layers then share its parameters.
- layer: any other value, and random numbers. The values that are alive at a cut pass to the next
  layer as a tuple of tensors, with the samples in their first dimension.

The model's loss becomes a sum over micro-batches (`tracing.losses`), so that micro-batches of any
size give the same gradient. What it divides by, such as the number of labels, is a total: a sum
over the rows of the global batch of what the data say. The engine adds totals up over all ranks
before the passes, and layers read them like other data.

Where tensor ranks have equal shares, `divisions` says how they divide the weights of a split
module. It follows a tensor plan in the words of `transformers`: patterns of the paths of inner
modules, each with `colwise` (a rank computes some of the outputs) or `rowwise` (a rank computes
from some of the inputs). The tensor plan is the module's `tensor_plan`, or its author's `_tp_plan`,
or the table `NAMED`. Any tensor plan gives exact results; it only decides which rank computes what.
Weights under any other word stay whole.
"""

import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from itertools import chain, pairwise
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.export.passes import move_to_device_pass
from torch.fx import Node
from torch.fx.node import map_arg

from hetplan.errors import UnsupportedError, require
from hetplan.runtime.tracing.counter import numbered
from hetplan.runtime.tracing.draws import draws
from hetplan.runtime.tracing.evaluation import check_alike, operators_of
from hetplan.runtime.tracing.experts import Experts, as_nodes
from hetplan.runtime.tracing.layers import Called, graph_of, labels
from hetplan.runtime.tracing.losses import (
    SUMMED,
    Sums,
    as_numbers,
    divide_means,
    from_numbers,
    name_of,
    sizes_of,
    values_of,
    without_changes_in_place,
)

# The tensor plan of modules without one: names in GPT-2, BERT, ViT, T5 and other models.
COLUMNS = (
    "c_attn", "c_fc", "query", "key", "value", "intermediate.dense", "q_proj", "k_proj", "v_proj",
    "fc1", "gate_proj", "up_proj", "Attention.q", "Attention.k", "Attention.v", "wi", "wi_0",
    "wi_1", "lm_head",
)  # fmt: skip
ROWS = ("c_proj", "output.dense", "o_proj", "out_proj", "fc2", "down_proj", "Attention.o", "wo")
NAMED = {f"*{name}": "colwise" for name in COLUMNS} | {f"*{name}": "rowwise" for name in ROWS}
# Product -> (number of its argument that is the weight, the weight's dimension of outputs).
WEIGHTS = {"linear": (1, 0), "addmm": (2, 1), "mm": (1, 1), "matmul": (1, 1)}
RESHAPES = ("view", "reshape", "_unsafe_view")
DATA, TABLE, LAYER = range(3)  # a value computed from values of two kinds is of the later kind
Shape = tuple[tuple[int, ...], Any]  # (sizes of one sample, dtype) of a value between layers
Totals = Mapping[Node, Any]  # total -> its value for the global batch
# How `peft` names the modules of a model, and those in place of a product with an adapter.
PEFT_MODEL = "base_model.model."
PEFT_PRODUCT = re.compile(r"(?P<product>.*)\.(?P<part>base_layer|lora_A|lora_B)(\.\w+)?")
# Operators that may return a view of their first argument, whether or not their schemas say so.
VIEWS = ("reshape", "contiguous", "to", "getitem", "flatten")


def mapped(value: Any, act: Callable[[Any], Any]) -> Any:
    """Nested data in which each leaf x is replaced by act(x). Dictionaries are visited in the order
    of their keys; lists become tuples."""
    if isinstance(value, Mapping):
        return {key: mapped(value[key], act) for key in sorted(value)}
    if isinstance(value, (tuple, list)):
        return tuple(mapped(item, act) for item in value)
    return act(value)


def leaves(value: Any) -> list[Any]:
    """The leaves of nested data, in the order of `mapped`."""
    leaves: list[Any] = []
    mapped(value, leaves.append)
    return leaves


def has_samples(x: Any) -> bool:
    """Whether a leaf of the data has one row for each sample: any tensor but a single number."""
    return isinstance(x, Tensor) and x.dim() > 0


def exported(
    module: nn.Module, data: Any, loss: Callable[..., Tensor] | None, device: str, *, spread: int
) -> Any:
    """The module's loss as an fx.GraphModule for any number of rows.

    data: (inputs, targets) of one row or more. spread: see `Split`. Raises UnsupportedError where
    torch.export cannot make a graph.
    """
    # torch.export takes a size of 1 for a constant, so that it gets two rows
    two_rows = mapped(data, lambda x: torch.cat([x[:1], x[:1]]) if has_samples(x) else x)
    dims = mapped(two_rows, lambda x: {0: Dim("rows")} if has_samples(x) else None)
    called, where = Called(module, loss), type(module).__name__
    words = {word for path in module.state_dict() for word in path.split(".")}
    require(
        not any(map(iskeyword, words)),
        "a submodule or a parameter has the name of a word of Python",
        where=where,
        got=next(filter(iskeyword, sorted(words)), None),
        expected="another name",
        kind=UnsupportedError,
    )
    with as_nodes(module, spread) if spread > 1 else nullcontext():
        program = graph_of(called, two_rows, where, dynamic_shapes=dims)
    return move_to_device_pass(program, device).module()


def path_of(node: Node) -> str:
    """The path of the innermost module whose code calls an operator; "" for the module itself."""
    stack: Any = node.meta.get("nn_module_stack", {})
    path: str = ["", *(path.partition("@")[0] for path, _ in stack.values())][-1]
    return path.removeprefix("module").lstrip(".")


def shape_of(node: Node) -> Shape:
    """The sizes and the type of one sample of a value that passes between layers. Raises
    UnsupportedError where the value's first dimension are not the samples."""
    value = node.meta["val"]
    rows, *rest = value.shape or (1,)  # a single number is refused as a fixed number of rows
    if isinstance(rows, int) or not rows.node.expr.is_symbol:
        raise UnsupportedError(
            "a value between layers does not have the samples in front", where=node.name,
            got=", ".join(map(str, value.shape)) or "a single number",
            expected="one row for each sample",
        )  # fmt: skip
    return tuple(rest), value.dtype


class Split:
    """A module that is split into L layers.

    layers [L]: the modules of the layers. outputs [L - 1]: shapes of the values that pass from each
    layer to the next. inlets [L]: nodes of the data that each layer reads. totals: the totals in
    rounds; those of a round follow from the rows and the totals of earlier rounds.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        data: Any,
        loss: Callable[..., Tensor] | None,
        count: Callable[[Any], float] | None,
        device: str,
        *,
        spread: int = 1,
    ) -> None:
        """names: [L] of the plan's layers. data: (inputs, targets) of a row or more. loss: see
        `Called`. count: targets of some rows, or the dictionary of their data -> the number by
        which a loss that is a sum is divided; None: such a loss stays a sum. spread: number of
        ranks over which experts are spread.

        Raises UnsupportedError where the module cannot be split, InputError where the names do not
        match the module's submodules.
        """
        self.export = partial(exported, module, data, loss, device, spread=spread)
        exported_module = self.export()
        graph = exported_module.graph
        self.operators = operators_of(graph)
        """The operators of a forward pass in training."""
        self.module, self.nodes, self.device = module, graph.nodes, device
        self.inputs = graph.find_nodes(op="placeholder")
        named = dict(module.named_parameters(remove_duplicate=False))
        first_named = {id(p): (name, p) for name, p in module.named_parameters()}
        self.attributes: dict[Node, tuple[str, Any]] = {}
        """Node -> (name, value) of a parameter (a tied one under its first name), a buffer or a
        constant."""
        for node in graph.find_nodes(op="get_attr"):
            path = str(node.target).removeprefix("module.")
            value = operator.attrgetter(node.target)(exported_module)
            self.attributes[node] = first_named.get(id(named.get(path)), (path, value))
        self._check_attributes(type(module).__name__)
        self.kinds: dict[Node, int] = {}
        """Node -> DATA, TABLE or LAYER."""
        self.sources: dict[Node, list[Node]] = {}
        """Node -> its arguments, and the nodes before it that change them in place."""
        self.bases: dict[Node, Node] = {}
        """Node -> the node of whose value its value is a view; the node itself if it is no view."""
        self.changes: dict[Node, list[Node]] = defaultdict(list)
        """Base -> the nodes that change its value in place."""
        self.totals = self._add_up(graph, type(module).__name__)
        require(
            count is None or not self.denominators,
            "`count` is for a loss that is a sum, and the model's loss divides itself",
            where=type(module).__name__,
            kind=UnsupportedError,
        )
        if count is None and not self.denominators:
            stated = getattr(module, "count", None)
            count = stated if callable(stated) else None
        self.count = count
        self.readers: dict[tuple[Node, ...], tuple[nn.Module, list[Node]]] = {}
        """Nodes of kind DATA -> (the module that computes their values from the data and from
        totals, these totals)."""
        self.counters: dict[int, tuple[nn.Module, list[Node]]] = {}
        """Round -> the same for the round's totals, from those of earlier rounds."""
        self._drop_causal_masks(data)
        self.layers, self.outputs, self.inlets = self._cut(self._places(module, names), len(names))

    def _check_attributes(self, where: str) -> None:
        """Raise UnsupportedError where layers cannot have a parameter, a buffer or a constant."""
        kept = set(dir(fx.GraphModule({}, fx.Graph()))) - set(dir(nn.Module()))
        for node, (path, _) in self.attributes.items():
            first = path.partition(".")[0]
            require(
                first not in kept,
                "a submodule or a parameter has a name that torch.fx needs itself",
                where=where,
                got=first,
                expected="another name",
                kind=UnsupportedError,
            )
            sparse = [user for user in node.users if values_of(user).get("sparse") is True]
            require(
                not sparse,
                "gradients of an embedding are sparse",
                where=f"{where}, {path}",
                expected="sparse=False",
                kind=UnsupportedError,
            )

    def _add_up(self, graph: fx.Graph, where: str) -> list[list[Node]]:
        """Make the loss a sum over micro-batches, see `tracing.losses`. Returns the totals in
        rounds. Raises UnsupportedError where the loss is no such sum."""
        without_changes_in_place(graph)
        divide_means(graph)
        self._classify_all()
        sums = Sums(graph, self._from_data)
        self._classify_all()
        loss: Any = graph.output_node().args[0][0]
        cone = self.cone([loss], lambda _: False)
        sums.check(loss, cone, where)
        self.loss = loss
        self.tail = {node for node in cone if sums.forms[node].kind == SUMMED}
        self.denominators = [node for node in sums.denominators if node in cone]
        return sums.rounds(lambda node: self.cone([node], lambda _: False), cone)

    def _from_data(self, node: Node) -> bool:
        """Whether a node's value follows from the data alone."""
        if node not in self.kinds:  # a node that has been inserted since
            for argument in node.all_input_nodes:
                self._from_data(argument)
            self._classify(node)
        return self.kinds[node] == DATA

    def _classify_all(self) -> None:
        """Classify all nodes anew."""
        self.kinds.clear()
        self.sources.clear()
        self.bases.clear()
        self.changes.clear()
        for node in self.nodes:
            self._classify(node)

    def _classify(self, node: Node) -> None:
        """Set the `kinds`, `sources` and `bases` of a node, and add it to the `changes` of its base
        where it changes this in place."""
        arguments = node.all_input_nodes
        bases = dict.fromkeys(self.bases[argument] for argument in arguments)
        earlier_changes = [change for base in bases for change in self.changes[base]]
        self.sources[node] = list(dict.fromkeys([*arguments, *earlier_changes]))
        kinds = {self.kinds[source] for source in self.sources[node]}
        if node in self.attributes:
            _, value = self.attributes[node]
            kinds = {TABLE if isinstance(value, nn.Parameter) else DATA}
        elif kinds and max(kinds) == TABLE:
            tags = getattr(node.target, "tags", ())
            outputs = [x for x in leaves(node.meta.get("val")) if isinstance(x, Tensor)]
            # the number of rows is a symbol: a value of fixed sizes has no dimension of samples
            same_for_all = all(isinstance(size, int) for x in outputs for size in x.shape)
            is_table = same_for_all or torch.Tag.pointwise in tags or name_of(node) in VIEWS
            if torch.Tag.nondeterministic_seeded in tags or not is_table:
                kinds.add(LAYER)
        if draws(node):
            # Every rank that read the numbers as data would draw others. As a layer's they are
            # drawn once, and pass on to the layers that read them.
            kinds.add(LAYER)
        # a node that reads no other is an argument of the module, or depends on nothing
        self.kinds[node] = max(kinds, default=DATA)
        schema = getattr(node.target, "_schema", None)
        alias = schema.returns[0].alias_info if schema and schema.returns else None
        is_view = alias is not None or name_of(node) in VIEWS
        base = self.bases[arguments[0]] if is_view and arguments else node
        self.bases[node] = base
        if alias is not None and alias.is_write:
            self.changes[base].append(node)
            is_new = base.op == "call_function" and set(base.users) <= {*self.changes[base], node}
            if draws(node) and is_new:  # numbers drawn into a new tensor that no other node reads
                self.kinds[base] = self.kinds[node]
            require(
                self.kinds[node] == self.kinds[base] and base not in self.attributes,
                "the model changes in place what is not one layer's",
                where=base.name,
                got=name_of(node),
                expected="a copy before, no batch normalisation",
                kind=UnsupportedError,
            )

    def _drop_causal_masks(self, data: Any) -> None:
        """Replace the mask of an attention by its argument `is_causal`, where the mask is causal or
        hides nothing: torch's flash kernels take no mask. A mask that depends on the values of the
        data stays."""
        for node in self.nodes:
            positional_mask = node.args[3:4]
            mask: Any = positional_mask[0] if positional_mask else node.kwargs.get("attn_mask")
            if name_of(node) != "scaled_dot_product_attention" or self.kinds.get(mask) != DATA:
                continue
            # the nodes that the mask is computed from, without the data whose sizes alone it reads
            cone = self.cone([mask], lambda source: name_of(source) == "sym_size")
            if cone.intersection(self.inputs):
                continue
            (visible,) = self.read(data, (mask,))
            is_causal = torch.equal(visible, torch.ones_like(visible).tril())
            if visible.dtype == torch.bool and (is_causal or bool(visible.all())):
                if positional_mask:
                    node.update_arg(3, None)
                else:
                    node.update_kwarg("attn_mask", None)
                node.update_kwarg("is_causal", is_causal)
                self.sources[node].remove(mask)

    def _runs(self, module: nn.Module) -> dict[Node, str]:
        """Node of kind LAYER -> the name of the submodule that runs, as `tracing.layers.labels`
        gives it; a submodule that runs for the k-th time, k > 1, is named `name#k`."""
        label_of = {id(module.get_submodule(path)): label for path, label in labels(module).items()}
        needed = self.cone([self.loss], lambda node: self.kinds[node] != LAYER)
        runs: dict[Node, str] = {}
        times: Counter[str] = Counter()
        label = run = ""
        for node in self.nodes:
            if node in needed and self.kinds[node] == LAYER:
                submodule = module.get_submodule(path_of(node))
                label_of_node = label_of.get(id(submodule), label)
                if label_of_node != label:
                    label = label_of_node
                    times[label] += 1
                    run = label if times[label] == 1 else f"{label}#{times[label]}"
                runs[node] = run
        return runs

    def _places(self, module: nn.Module, names: Sequence[str]) -> dict[Node, int]:
        """Node -> number of its layer, which is never before the layer of a node that it reads.

        names: the layers of a trace; or any names: of one layer before the numbered blocks, of each
        block, and of one layer after them.
        """
        runs = self._runs(module)
        parts = [part for part in dict.fromkeys(runs.values()) if part]  # submodules that run
        blocks = list(dict.fromkeys(filter(None, map(numbered, parts))))
        places = {name: k for k, name in enumerate(names)}  # submodule -> number of its layer
        if not set(parts) <= set(names):
            expected = [", ".join(names)]
            if len(names) > 2:
                expected.append(f"{len(names) - 2} numbered blocks")
            require(
                bool(blocks) and len(names) == len(blocks) + 2,
                "model does not match the plan",
                where=type(module).__name__,
                got=f"the parts {', '.join(parts)}",
                expected=", or ".join(expected),
            )
            places = {part: 1 + blocks.index(numbered(part)) for part in parts if numbered(part)}
            last_in_blocks = list(places)[-1]
            after_blocks = parts[parts.index(last_in_blocks) + 1 :]
            places |= dict.fromkeys(after_blocks, len(names) - 1)
        layer_of: dict[Node, int] = {}
        layer = 0
        for node, part in runs.items():
            layer = max(layer, places.get(part, 0))
            # an item of a tuple belongs to the layer of the tuple
            is_item = node.target is operator.getitem
            layer_of[node] = layer_of[node.args[0]] if is_item else layer
        return layer_of | dict.fromkeys(self.tail, len(names) - 1)

    def _cut(self, layer_of: Mapping[Node, int], count: int) -> Any:
        """`layers`, `outputs` and `inlets` of this class, for `count` layers."""
        last_reader = dict(layer_of)  # node -> the last layer that reads its value
        for node, layer in layer_of.items():
            for source in self.sources[node]:
                if source in layer_of:
                    last_reader[source] = max(last_reader[source], layer)
        alive = [  # [L - 1] nodes whose values pass from layer k to layer k + 1
            [node for node, layer in layer_of.items() if layer <= k < last_reader[node]]
            for k in range(count - 1)
        ]
        layers, inlets = [], []
        for k, (before, after) in enumerate(pairwise([[], *alive, [self.loss]])):
            # Nodes that layer k does not compute. Tables are of no layer: each layer computes those
            # that it reads.
            given = {
                node
                for node, kind in self.kinds.items()
                if kind == DATA or layer_of.get(node, k) < k
            }
            cone = self.cone(after, given.__contains__)
            inlets.append(tuple(n for n in self.nodes if n in cone and self.kinds[n] == DATA))
            layers.append(self.piece([*before, *inlets[-1]], after))
        outputs = tuple(tuple(map(shape_of, nodes)) for nodes in alive)
        return tuple(layers), outputs, tuple(inlets)

    def check_evaluation(self) -> None:
        """Raise UnsupportedError where the module computes something else in evaluation than in
        training, dropout aside."""
        modes = {submodule: submodule.training for submodule in self.module.modules()}
        try:
            self.module.eval()
            operators = operators_of(self.export().graph)
        finally:
            for submodule, training in modes.items():
                submodule.training = training
        check_alike(self.operators, operators, type(self.module).__name__)

    def cone(self, outputs: Iterable[Node], ends: Callable[[Node], bool]) -> set[Node]:
        """The nodes from which outputs are computed, with the outputs. The search does not go
        beyond nodes for which `ends` is true, and includes them."""
        reached, waiting = set(), list(outputs)
        while waiting:
            node = waiting.pop()
            if node in reached:
                continue
            reached.add(node)
            if not ends(node):
                waiting += self.sources[node]
        return reached

    def piece(self, inputs: Sequence[Node], outputs: Sequence[Node]) -> nn.Module:
        """A module that computes the values of the nodes `outputs` from those of `inputs`."""
        graph, ends = fx.Graph(), set(inputs)
        wanted = self.cone(outputs, ends.__contains__) - ends
        copy_of: dict[Node, Any] = {node: graph.placeholder(node.name) for node in inputs}
        for node in inputs:
            if wanted.intersection(self.changes[node]):  # another layer may read the input, too
                clone = graph.call_function(torch.ops.aten.clone.default, (copy_of[node],))
                copy_of[node] = clone
        root: dict[str, Any] = {}  # name -> parameter, buffer, constant or submodule
        for node in self.nodes:
            if node not in wanted:
                continue
            if node in self.attributes:
                name, value = self.attributes[node]
                root[name] = value
                copy_of[node] = graph.get_attr(name)
            elif node.target is torch.ops.hetplan.experts.default:
                *arguments, path = map_arg(node.args, copy_of.__getitem__)
                root[path] = Experts(self.module.get_submodule(path))
                copy_of[node] = graph.call_module(path, tuple(arguments))
            else:
                copy_of[node] = graph.node_copy(node, copy_of.__getitem__)
        graph.output(tuple(copy_of[node] for node in outputs))
        return fx.GraphModule(root, graph)

    def read(self, data: Any, nodes: tuple[Node, ...], totals: Totals | None = None) -> Any:
        """The values of some nodes of kind DATA for the data of some rows, on the device. totals:
        total -> its value; None: the rows are the whole batch."""
        if nodes not in self.readers:
            self.readers[nodes] = self._reader(nodes, chain.from_iterable(self.totals))
        return self._values(self.readers[nodes], data, totals)

    def _reader(
        self, nodes: tuple[Node, ...], totals: Iterable[Node]
    ) -> tuple[nn.Module, list[Node]]:
        """(module that computes the values of nodes from the data and from totals, those of the
        totals that it reads)."""
        given = set(totals)
        cone = self.cone(nodes, {*self.inputs, *given}.__contains__)
        drawn = next(filter(draws, cone), None)
        require(
            drawn is None,
            "the weight of samples in the loss depends on numbers that forward draws",
            where=type(self.module).__name__,
            got=None if drawn is None else name_of(drawn),
            expected="a mean over what the data alone tell",
            kind=UnsupportedError,
        )
        read = [total for total in self.nodes if total in given & cone]
        return self.piece([*self.inputs, *read], nodes).to(self.device), read

    def _values(
        self, reader: tuple[nn.Module, list[Node]], data: Any, totals: Totals | None
    ) -> Any:
        """The value that a reader computes from the data of some rows."""
        module, read = reader
        if read and totals is None:
            totals = self.totals_of(data)
        on_device = [x.to(self.device) if isinstance(x, Tensor) else x for x in leaves(data)]
        return module(*on_device, *((totals or {})[total] for total in read))

    @property
    def rounds(self) -> list[int]:
        """[round] number of numbers that `measure` gives, and that are added up over all ranks."""
        numbers = [sizes_of(totals) for totals in self.totals]
        if self.count is None:
            return numbers
        return [1, *numbers]

    def measure(self, number: int, data: Any, totals: Totals) -> Tensor:
        """The numbers of a round for the data of some rows, [`rounds`] in fp64. totals: totals of
        earlier rounds."""
        if self.count is not None:
            if number == 0:
                inputs, targets = data
                counted = self.count(inputs if targets is None else targets)
                return torch.tensor([float(counted)], dtype=torch.float64)
            number -= 1
        if number not in self.counters:
            earlier = chain.from_iterable(self.totals[:number])
            self.counters[number] = self._reader(tuple(self.totals[number]), earlier)
        return as_numbers(self._values(self.counters[number], data, totals))

    def known(self, number: int, numbers: Tensor) -> tuple[float, Totals]:
        """(weight of the losses, totals) of a round, from the sum of its numbers over all ranks.
        The weight is 1 unless the round is that of `count`."""
        if self.count is not None:
            if number == 0:
                return float(numbers[0]), {}
            number -= 1
        return 1.0, from_numbers(self.totals[number], numbers, self.device)

    def totals_of(self, data: Any) -> Totals:
        """The totals where some rows are the whole batch."""
        totals: dict[Node, Any] = {}
        for number in range(len(self.rounds)):
            totals |= self.known(number, self.measure(number, data, totals))[1]
        return totals

    def lacks_labels(self, values: Totals) -> bool:
        """Whether all that the loss divides by is 0. values: values of totals, and of inputs that
        are numbers for the whole batch."""
        ends = set(values)
        divisors = self.cone(self.denominators, ends.__contains__) & ends
        counted = [torch.as_tensor(values[node]) for node in divisors]
        return bool(counted) and not any(bool(x.any()) for x in counted)

    def reads(self, first: int, last: int) -> bool:
        """Whether one of the layers [first, last) reads data."""
        return any(self.inlets[first:last])

    def feed(
        self, data: Callable[[], Any], first: int, last: int, totals: Totals | None = None
    ) -> list[tuple[Any, ...]]:
        """[layer] the data that each of the layers [first, last) reads. data: returns (inputs,
        targets) of some rows; it is called only where one of the layers reads data. totals: see
        `read`."""
        inlets = self.inlets[first:last]
        nodes = tuple(dict.fromkeys(node for inlet in inlets for node in inlet))
        values: dict[Node, Any] = {}
        if nodes:
            values = dict(zip(nodes, self.read(data(), nodes, totals), strict=True))
        return [tuple(values[node] for node in inlet) for inlet in inlets]


@dataclass(frozen=True)
class Divided:
    """The division of one dimension of a parameter over tensor ranks. The dimension consists of
    blocks, such as queries, keys and values, and each block is divided in the same way."""

    dim: int  # the divided dimension
    blocks: int  # number of blocks
    length: int  # length of a block
    together: int  # entries that stay on one rank, the width of a head

    def goes_into(self, shares: Sequence[float]) -> bool:
        """Whether ranks of these shares get equal parts."""
        return len(set(shares)) == 1 and self.length % (self.together * len(shares)) == 0


def divisions(module: nn.Module, split: Split) -> dict[str, Divided]:
    """Name of a parameter in the layers -> how it is divided, for parameters that are.

    A node that splits the output of such a parameter's product into its blocks is marked:
    `meta["blocks"]` is (name of the parameter, number of blocks).
    """
    plan = getattr(module, "tensor_plan", None) or getattr(module, "_tp_plan", None) or NAMED
    divided: dict[str, Divided] = {}
    for layer in split.layers:
        parameters = dict(layer.named_parameters(remove_duplicate=False))
        for node in layer.graph.find_nodes(op="get_attr"):
            name = str(node.target)
            value: Any = parameters.get(name)
            if value is None or value.dim() >= 3:  # tensor plans are for matrices and their biases
                continue
            for product in node.users:
                if name_of(product) not in WEIGHTS:
                    continue
                weight_argument, outputs_dim = WEIGHTS[name_of(product)]
                is_weight = product.args[weight_argument] is node  # else a bias
                word = word_of(plan, path_of(product))
                is_matrix = value.dim() == 2
                # a bias of two dimensions is a table that is added, not one number for each output
                if word.startswith("colwise") and is_weight == is_matrix:
                    dim = outputs_dim if is_weight else 0
                    blocks, together = uses_of(product, value.shape[dim], name)
                    divided[name] = Divided(dim, blocks, value.shape[dim] // blocks, together)
                elif is_weight and word == "rowwise":
                    inputs_dim = 1 - outputs_dim
                    divided[name] = Divided(inputs_dim, 1, value.shape[inputs_dim], 1)
    return divided


def word_of(plan: Mapping[str, str], path: str) -> str:
    """The word of a tensor plan for a module; "" where the plan does not name it.

    `peft` puts the model into a module of its own, and a product with an adapter into the modules
    `base_layer`, `lora_A` and `lora_B`. The rank between A and B is not divided: only B is divided
    by columns, and only A by rows.
    """
    path = path.removeprefix(PEFT_MODEL)
    adapted = PEFT_PRODUCT.fullmatch(path)
    if adapted is not None:
        path = adapted["product"]
    words = (word for pattern, word in plan.items() if fnmatch(path, pattern))
    word = next(words, "")
    undivided = {"lora_A": "colwise", "lora_B": "rowwise"}
    if adapted is not None and word.startswith(undivided.get(adapted["part"], "none")):
        return ""
    return word


def uses_of(product: Node, columns: int, name: str) -> tuple[int, int]:
    """(number of blocks, width of a head) of a product's output columns.

    The blocks are equal parts into which the columns are split; 1 where they are not split. The
    width is the length of the last dimension that a view makes of the columns, 1 without such a
    view. name: name of the product's weight, with which a node that splits the columns is marked.
    """
    blocks, together, waiting = 1, 1, [product]
    while waiting:
        for user in waiting.pop().users:
            value, kind = user.meta.get("val"), name_of(user)
            if kind in ("split", "chunk"):
                if {part.shape[-1] for part in value} == {columns // len(value)}:
                    blocks = len(value)
                    user.meta["blocks"] = (name, blocks)
                    waiting.append(user)
            # a view that keeps all columns, or those of a block, is followed; any other makes heads
            elif kind in RESHAPES and value.shape[-1] not in (columns, columns // blocks):
                together = int(value.shape[-1])
            elif kind in (*RESHAPES, "getitem", "add"):
                waiting.append(user)
    return blocks, together
