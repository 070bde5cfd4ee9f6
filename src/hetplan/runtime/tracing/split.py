"""Any module as a chain of layers: the graph that torch.export makes of it, cut where the plan's
layers meet.

A value of the graph is of one of three kinds.
- data: follows from the data alone (masks, positions, rotary tables, the number of rows). Every
  rank computes what its layers read, from its own rows of the data.
- table: the same for all samples, or made of such and of data by pointwise operators (position
  embeddings, relative biases). Every layer that reads one computes it; these layers then share its
  parameters.
- layer: everything else. What is alive at a cut passes on as a tuple of tensors, the samples in
  their first dimension.

The model's loss is a mean. Here it becomes a sum, and what it is a mean over is counted before, so
that micro-batches of any size weigh what they should.

Where tensor ranks have equal shares, `divisions` says how they divide the weights of a split
module, by a tensor plan in the words of `transformers`: the paths of modules inside, with * for
what differs, and `colwise` (each rank computes some of the outputs) or `rowwise` (from some of the
inputs). It is the module's `tensor_plan`, or its author's `_tp_plan`, or the table `NAMED`. Any
tensor plan gives exact results; it only decides what is computed where. Weights under other words
stay whole.
"""

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.export.passes import move_to_device_pass
from torch.fx import Node
from torch.fx.node import map_arg

from hetplan.errors import UnsupportedError, require
from hetplan.runtime.tracing.counter import numbered
from hetplan.runtime.tracing.experts import Experts, as_nodes
from hetplan.runtime.tracing.layers import Called, graph_of, labels

# For modules that say nothing: the names of GPT-2, BERT, ViT, T5 and others.
COLUMNS = (
    "c_attn", "c_fc", "query", "key", "value", "intermediate.dense", "q_proj", "k_proj", "v_proj",
    "fc1", "gate_proj", "up_proj", "Attention.q", "Attention.k", "Attention.v", "wi", "wi_0",
    "wi_1", "lm_head",
)  # fmt: skip
ROWS = ("c_proj", "output.dense", "o_proj", "out_proj", "fc2", "down_proj", "Attention.o", "wo")
NAMED = {f"*{name}": "colwise" for name in COLUMNS} | {f"*{name}": "rowwise" for name in ROWS}
# Of a product: which argument its weight is, and the weight's dimension of outputs.
WEIGHTS = {"linear": (1, 0), "addmm": (2, 1), "mm": (1, 1), "matmul": (1, 1)}
RESHAPES = ("view", "reshape", "_unsafe_view")
DATA, TABLE, LAYER = range(3)  # what is made of one and another is of the later kind
Shape = tuple[tuple[int, ...], Any]  # of one sample, and the type
CLASSES = ("cross_entropy_loss", "nll_loss_nd")
ELEMENTS = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)  # fmt: skip
MEAN, SUM = 1, 2  # torch's numbers of reductions
# They may give a view of their first argument, whether or not their schemas say so.
VIEWS = ("reshape", "contiguous", "to", "getitem", "flatten")


def mapped(value: Any, act: Callable[[Any], Any]) -> Any:
    """Nested data with something done to each leaf; dictionaries in the order of their keys."""
    if isinstance(value, Mapping):
        return {key: mapped(value[key], act) for key in sorted(value)}
    if isinstance(value, (tuple, list)):
        return tuple(mapped(one, act) for one in value)
    return act(value)


def leaves(value: Any) -> list[Any]:
    """The leaves of nested data, in the order of `mapped`."""
    leaves: list[Any] = []
    mapped(value, leaves.append)
    return leaves


def exported(
    module: nn.Module, data: Any, loss: Callable[..., Tensor] | None, device: str, *, spread: int
) -> Any:
    """The module's loss as an fx.GraphModule of any number of rows. data: (inputs, targets) of one
    row or more. spread: see `Split`. Raises UnsupportedError where
    torch.export cannot."""
    # torch.export takes a size of 1 for a constant
    two = mapped(data, lambda x: torch.cat([x[:1], x[:1]]) if isinstance(x, Tensor) else x)
    dims = mapped(two, lambda x: {0: Dim("rows")} if isinstance(x, Tensor) else None)
    called, where = Called(module, loss), type(module).__name__
    with as_nodes(module, spread) if spread > 1 else nullcontext():
        made = graph_of(called, two, where, dynamic_shapes=dims)
    return move_to_device_pass(made, device).module()


def name_of(node: Node) -> str:
    """`add_` of aten.add_.Tensor."""
    schema = getattr(node.target, "_schema", None)
    named = schema.name if schema else getattr(node.target, "__name__", "")
    return str(named).rpartition("::")[2]


def path_of(node: Node) -> str:
    """The path of the module whose code an operator stands in."""
    stack: Any = node.meta.get("nn_module_stack", {})
    path: str = ["", *(path.partition("@")[0] for path, _ in stack.values())][-1]
    return path.removeprefix("module").lstrip(".")


def shape_of(node: Node) -> Shape:
    """What passes on from one layer to the next, of one sample."""
    value = node.meta["val"]
    rows, *rest = value.shape or (1,)
    if isinstance(rows, int) or not rows.node.expr.is_symbol:
        raise UnsupportedError(
            "a value between layers does not have the samples in front", where=node.name,
            got=", ".join(map(str, value.shape)), expected="one row for each sample",
        )  # fmt: skip
    return tuple(rest), value.dtype


class Split:
    """A module as layers, [L]. outputs [L - 1]: what passes on, of one sample; inlets [L]: what
    each layer reads of the data.

    data: (inputs, targets) of a row or more. weigh: what some rows' losses weigh, where the model
    gives their sum. spread: over so many ranks experts are spread. Raises UnsupportedError where
    the module cannot be split, InputError where the names are not those of its parts.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        data: Any,
        loss: Callable[..., Tensor] | None,
        weigh: Callable[[Any], float],
        device: str,
        *,
        spread: int = 1,
    ) -> None:
        made = exported(module, data, loss, device, spread=spread)
        self.module, self.nodes, self.device = module, made.graph.nodes, device
        self.inputs = made.graph.find_nodes(op="placeholder")
        own = dict(module.named_parameters(remove_duplicate=False))
        first = {id(p): (name, p) for name, p in module.named_parameters()}
        self.held: dict[Node, tuple[str, Any]] = {
            node: first.get(id(own.get(path)), (path, operator.attrgetter(node.target)(made)))
            for node in made.graph.find_nodes(op="get_attr")
            for path in [str(node.target).removeprefix("module.")]
        }
        """Parameters (tied ones under the first of their names), buffers, constants."""
        self.weigh = weigh
        self.loss = self._summed(made.graph)
        self.kinds: dict[Node, int] = {}
        self.sources: dict[Node, list[Node]] = {}
        """Node -> its arguments, and what has changed them in place."""
        self.bases: dict[Node, Node] = {}
        """Node -> what its value is a view of, as a rule itself."""
        self.changes: dict[Node, list[Node]] = defaultdict(list)
        """Base -> what changes it in place."""
        for node in self.nodes:
            self._classify(node)
        self.reading: dict[tuple[Node, ...], nn.Module] = {}
        self._drop_causal_masks(data)
        self.layers, self.outputs, self.inlets = self._cut(self._places(module, names), len(names))

    def _summed(self, graph: fx.Graph) -> Node:
        """The loss as a sum; what it was a mean over becomes what rows weigh."""
        loss: Any = graph.output_node().args[0][0]
        name, schema = name_of(loss), getattr(loss.target, "_schema", None)
        arguments = schema.arguments if schema else []
        values = {a.name: a.default_value for a in arguments}
        values |= dict(zip(values, loss.args, strict=False)) | loss.kwargs
        if name == "sum" or values.get("reduction") == SUM:
            return loss
        counted: Any = values.get("target", values.get("self"))
        classes = name in CLASSES and not counted.meta["val"].is_floating_point()
        known = (classes and values["weight"] is None) or name in ELEMENTS
        with graph.inserting_before(loss):
            if name == "mean" and len(loss.args) == 1:
                summed = graph.call_function(torch.ops.aten.sum.default, loss.args)
            elif known and values["reduction"] == MEAN:
                summed = graph.call_function(loss.target, (), values | {"reduction": SUM})
            else:
                raise UnsupportedError(
                    "the model's loss is not known as a mean over samples or tokens", got=name,
                    expected=f"one number by mean, {', '.join((*CLASSES, *ELEMENTS))}",
                )  # fmt: skip
        each = counted.meta["val"].numel().node.hint // 2  # there are two rows
        self.weigh = lambda data: each * len(next(x for x in leaves(data) if isinstance(x, Tensor)))
        if classes:
            left = values["ignore_index"]
            self.weigh = lambda data: float((self.read(data, (counted,))[0] != left).sum())
        return summed

    def _classify(self, node: Node) -> None:
        """Its kind, and what it is computed from."""
        arguments = node.all_input_nodes
        bases = dict.fromkeys(self.bases[one] for one in arguments)
        before = [change for base in bases for change in self.changes[base]]
        self.sources[node] = list(dict.fromkeys([*arguments, *before]))
        kinds = {self.kinds[one] for one in self.sources[node]}
        if node in self.held:
            kinds = {TABLE if isinstance(self.held[node][1], nn.Parameter) else DATA}
        elif kinds and max(kinds) == TABLE:
            tags = getattr(node.target, "tags", ())
            values = [x for x in leaves(node.meta.get("val")) if isinstance(x, Tensor)]
            same = all(isinstance(size, int) for value in values for size in value.shape)
            shared = same or torch.Tag.pointwise in tags or name_of(node) in VIEWS
            if torch.Tag.nondeterministic_seeded in tags or not shared:
                kinds.add(LAYER)
        self.kinds[node] = max(kinds, default=DATA)
        schema = getattr(node.target, "_schema", None)
        alias = schema.returns[0].alias_info if schema and schema.returns else None
        view = alias is not None or name_of(node) in VIEWS
        self.bases[node] = base = self.bases[arguments[0]] if view and arguments else node
        if alias is not None and alias.is_write:
            self.changes[base].append(node)
            require(
                self.kinds[node] == self.kinds[base] and base not in self.held,
                "the model changes in place what is not one layer's",
                where=base.name,
                got=name_of(node),
                expected="a copy before, no batch normalisation",
                kind=UnsupportedError,
            )

    def _drop_causal_masks(self, data: Any) -> None:
        """Let attention say by itself that it is causal, or sees everything, where its mask does:
        torch's flash kernels take no mask. A mask that reads the values of the data stays."""
        for node in self.nodes:
            own = node.args[3:4]
            mask: Any = own[0] if own else node.kwargs.get("attn_mask")
            if name_of(node) != "scaled_dot_product_attention" or self.kinds.get(mask) != DATA:
                continue
            if self.cone([mask], lambda one: name_of(one) == "sym_size").intersection(self.inputs):
                continue
            (seen,) = self.read(data, (mask,))
            causal = torch.equal(seen, torch.ones_like(seen).tril())
            if seen.dtype == torch.bool and (causal or bool(seen.all())):
                if own:
                    node.update_arg(3, None)
                else:
                    node.update_kwarg("attn_mask", None)
                node.update_kwarg("is_causal", causal)
                self.sources[node].remove(mask)

    def _runs(self, module: nn.Module) -> dict[Node, str]:
        """Node in a layer -> the part of the module that runs, named as a trace names it."""
        label_of = {id(module.get_submodule(path)): label for path, label in labels(module).items()}
        needed = self.cone([self.loss], lambda node: self.kinds[node] != LAYER)
        runs: dict[Node, str] = {}
        times: Counter[str] = Counter()
        label = run = ""
        for node in self.nodes:
            if node in needed and self.kinds[node] == LAYER:
                now = label_of.get(id(module.get_submodule(path_of(node))), label)
                if now != label:
                    label = now
                    times[label] += 1
                    run = label if times[label] == 1 else f"{label}#{times[label]}"
                runs[node] = run
        return runs

    def _places(self, module: nn.Module, names: Sequence[str]) -> dict[Node, int]:
        """Node -> its layer, never before those of what it reads.

        Names are those of a trace, or any that stand for what comes before the numbered blocks, for
        each block, and for what comes behind.
        """
        runs = self._runs(module)
        parts = [part for part in dict.fromkeys(runs.values()) if part]
        blocks = list(dict.fromkeys(filter(None, map(numbered, parts))))
        places = {name: k for k, name in enumerate(names)}
        if not set(parts) <= set(names):
            require(
                len(names) == len(blocks) + 2,
                "model does not match the plan",
                where=type(module).__name__,
                got=f"the parts {', '.join(parts)}",
                expected=f"{', '.join(names)}, or {len(names) - 2} numbered blocks",
            )
            places = {part: 1 + blocks.index(numbered(part)) for part in parts if numbered(part)}
            places |= dict.fromkeys(parts[parts.index(list(places)[-1]) + 1 :], len(names) - 1)
        made: dict[Node, int] = {}
        now = 0
        for node, part in runs.items():
            now = max(now, places.get(part, 0))
            # an item stays where its tuple is
            made[node] = made[node.args[0]] if node.target is operator.getitem else now
        return made | {self.loss: len(names) - 1}

    def _cut(self, places: Mapping[Node, int], count: int) -> Any:
        """`layers`, `outputs` and `inlets` of this class."""
        until = dict(places)
        for node, place in places.items():
            until |= {one: max(until[one], place) for one in self.sources[node] if one in places}
        alive = [
            [node for node, place in places.items() if place <= k < until[node]]
            for k in range(count - 1)
        ]
        layers, inlets = [], []
        for k, (before, after) in enumerate(pairwise([[], *alive, [self.loss]])):
            known = {n for n, kind in self.kinds.items() if kind == DATA or places.get(n, k) < k}
            reached = self.cone(after, known.__contains__)
            inlets.append(tuple(n for n in self.nodes if n in reached and self.kinds[n] == DATA))
            layers.append(self.piece([*before, *inlets[-1]], after))
        outputs = tuple(tuple(map(shape_of, nodes)) for nodes in alive)
        return tuple(layers), outputs, tuple(inlets)

    def cone(self, outputs: Iterable[Node], ends: Callable[[Node], bool]) -> set[Node]:
        """What outputs are computed from, as far as `ends`, these included."""
        reached, waiting = set(), list(outputs)
        while waiting:
            node = waiting.pop()
            if node not in reached:
                reached.add(node)
                waiting += [] if ends(node) else self.sources[node]
        return reached

    def piece(self, inputs: Sequence[Node], outputs: Sequence[Node]) -> nn.Module:
        """A module that computes outputs from inputs."""
        graph, ends = fx.Graph(), set(inputs)
        wanted = self.cone(outputs, ends.__contains__) - ends
        made: dict[Node, Any] = {node: graph.placeholder(node.name) for node in inputs}
        for node in inputs:
            if wanted.intersection(self.changes[node]):
                made[node] = graph.call_function(torch.ops.aten.clone.default, (made[node],))
        root: dict[str, Any] = {}
        for node in self.nodes:
            if node in wanted and node in self.held:
                name, root[name] = self.held[node]
                made[node] = graph.get_attr(name)
            elif node in wanted and node.target is torch.ops.hetplan.experts.default:
                *read, path = map_arg(node.args, made.__getitem__)
                root[path] = Experts(self.module.get_submodule(path))
                made[node] = graph.call_module(path, tuple(read))
            elif node in wanted:
                made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(tuple(made[node] for node in outputs))
        return fx.GraphModule(root, graph)

    def read(self, data: Any, nodes: tuple[Node, ...]) -> Any:
        """Values that follow from some rows' data."""
        if nodes not in self.reading:
            self.reading[nodes] = self.piece(self.inputs, nodes).to(self.device)
        here = [x.to(self.device) if isinstance(x, Tensor) else x for x in leaves(data)]
        return self.reading[nodes](*here)

    def reads(self, first: int, last: int) -> bool:
        """Whether one of the layers [first, last) reads data."""
        return any(self.inlets[first:last])

    def feed(self, data: Callable[[], Any], first: int, last: int) -> list[tuple[Any, ...]]:
        """What each of the layers [first, last) reads of some rows' data, asked for where one
        does."""
        read_by = self.inlets[first:last]
        nodes = tuple(dict.fromkeys(node for one in read_by for node in one))
        values = dict(zip(nodes, self.read(data(), nodes) if nodes else (), strict=True))
        return [tuple(values[node] for node in one) for one in read_by]


@dataclass(frozen=True)
class Divided:
    """Dimension `dim` of a parameter: `blocks` of `length` each, divided alike, where `together`
    (the width of a head) stays on one rank."""

    dim: int
    blocks: int
    length: int
    together: int

    def goes_into(self, shares: Sequence[float]) -> bool:
        """Whether ranks of these shares get equal parts."""
        return len(set(shares)) == 1 and self.length % (self.together * len(shares)) == 0


def divisions(module: nn.Module, split: Split) -> dict[str, Divided]:
    """Parameter, by the name that layers have for it -> how it is divided. What takes a product's
    blocks apart is marked: meta["blocks"] is the parameter and the number of blocks."""
    words = getattr(module, "tensor_plan", None) or getattr(module, "_tp_plan", None) or NAMED
    made: dict[str, Divided] = {}
    for layer in split.layers:
        parameters = dict(layer.named_parameters(remove_duplicate=False))
        for node in layer.graph.find_nodes(op="get_attr"):
            value: Any = parameters.get(str(node.target))
            for user in node.users if value is not None and value.dim() < 3 else ():
                place, outputs = WEIGHTS.get(name_of(user), (None, 0))
                path, name = path_of(user), str(node.target)
                word = next((word for pattern, word in words.items() if fnmatch(path, pattern)), "")
                weighs = place is not None and user.args[place] is node
                if (
                    place is not None
                    and word.startswith("colwise")
                    and weighs == (value.dim() == 2)
                ):
                    dim = outputs if weighs else 0
                    blocks, together = uses_of(user, value.shape[dim], name)
                    made[name] = Divided(dim, blocks, value.shape[dim] // blocks, together)
                elif weighs and word == "rowwise":
                    made[name] = Divided(1 - outputs, 1, value.shape[1 - outputs], 1)
    return made


def uses_of(product: Node, columns: int, name: str) -> tuple[int, int]:
    """(equal blocks that a product's columns are split into, columns that a view makes a dimension
    of)."""
    blocks, together, waiting = 1, 1, [product]
    while waiting:
        for user in waiting.pop().users:
            value, kind = user.meta.get("val"), name_of(user)
            if kind in ("split", "chunk"):
                if {part.shape[-1] for part in value} == {columns // len(value)}:
                    blocks, user.meta["blocks"] = len(value), (name, len(value))
                    waiting.append(user)
            elif kind in RESHAPES and value.shape[-1] not in (columns, columns // blocks):
                together = int(value.shape[-1])
            elif kind in (*RESHAPES, "getitem", "add"):
                waiting.append(user)
    return blocks, together
