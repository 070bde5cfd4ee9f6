"""Makes the loss of a traced module a sum over micro-batches.

One process computes a loss over all rows of the global batch at once. Micro-batches have some of
the rows each, and their results are added up. The loss is the same under every plan if it is a sum
of sums over the rows, each times a coefficient:

    loss = sum_i c_i * S_i      S_i: sums over the rows of what the model computes

A coefficient c_i may depend on the data of the global batch, such as one over the number of labels.
It then follows from totals: sums over the rows of what the data alone say, the number of the rows
included. All ranks add their totals up before the passes, so that c_i is that of one process.

`divide_means` writes means as sums divided by counts. `Sums` then finds the totals and checks that
the loss has this form. A constant summand of the loss would count once in every micro-batch. Each
micro-batch therefore gets only its share of it: the share of the rows that the micro-batch has.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.fx.node import map_arg

from hetplan.errors import UnsupportedError

aten: Any = torch.ops.aten
UNREDUCED, MEAN, SUM = 0, 1, 2  # torch's numbers of reductions
# Losses whose targets are classes: a mean counts the targets that are not ignored, by weight.
CLASSES = ("cross_entropy_loss", "nll_loss_nd")
# A mean of this loss divides each sample by the length of its target.
OTHER_MEANS = ("ctc_loss",)
# Reductions that are sums over the rows, of one value or of products of two values.
ADDITIVE = (
    "sum", "nansum", "count_nonzero", "dot", "vdot", "inner", "mv", "mm", "bmm", "matmul", "einsum",
)  # fmt: skip
# Operators that give a sum over the rows again where they read one, whatever else they read.
LINEAR = (
    "sum", "mean", "neg", "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "select",
    "slice", "getitem", "to", "_to_copy", "clone", "alias", "detach", "contiguous", "expand",
    "permute", "transpose", "t", "flatten", "unflatten", "unbind", "split", "chunk", "view_as",
    "type_as", "lift_fresh_copy", "positive",
)  # fmt: skip
ADDING = ("add", "sub", "rsub", "stack", "cat")  # of sums, and of constants by the share of rows
SCALING = ("mul", "matmul", "dot", "mv", "mm", "bmm", "vdot", "inner")  # one sum and constants
# Operators that make one position for each row of the micro-batch. Their schemas say that they read
# numbers, but a number of rows must stay that of the micro-batch there.
PLACES = ("arange", "linspace", "range")
SIZES = ("sym_size", "sym_numel")
MASKED = ("index", "masked_select", "nonzero")  # they select as many elements as a mask has
# Operators that put values in order -> those of their outputs that a model may not use over rows,
# since they compare the values of all rows. A sort's second output, the places of the values, may
# be used: it can put rows back in their order after they were grouped.
ORDERING = {"topk": (0, 1), "sort": (0,)}


def name_of(node: Node) -> str:
    """The name of a node's operator without namespace and overload: "add_" for aten.add_.Tensor."""
    schema = getattr(node.target, "_schema", None)
    named = schema.name if schema else getattr(node.target, "__name__", "")
    return str(named).rpartition("::")[2]


def values_of(node: Node) -> dict[str, Any]:
    """Name -> value of all arguments of a node by its operator's schema, defaults included; empty
    without a schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}
    values = {argument.name: argument.default_value for argument in schema.arguments}
    by_position = dict(zip(values, node.args, strict=False))  # of the first arguments
    return {**values, **by_position, **node.kwargs}


def is_symbolic(value: Any) -> bool:
    """Whether a number is symbolic in the trace: it depends on how many rows there are."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def has_rows(value: Any) -> bool:
    """Whether a size of a tensor, or of one of several tensors, depends on the rows."""
    if isinstance(value, (tuple, list)):
        return any(map(has_rows, value))
    return isinstance(value, Tensor) and any(is_symbolic(size) for size in value.shape)


def value_of(node: Any) -> Any:
    """The fake tensor, or the number, that stands for a node's value in the trace."""
    return node.meta.get("val") if isinstance(node, Node) else node


def inserted(before: Node, target: Any, /, *args: Any, **kwargs: Any) -> Node:
    """A new node before another one, which computes target(*args, **kwargs)."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    values, named = map_arg((args, kwargs), value_of)
    node.meta["val"] = target(*values, **named)
    stack = before.meta.get("nn_module_stack")
    if stack:
        node.meta["nn_module_stack"] = stack
    return node


def without_changes_in_place(graph: fx.Graph) -> None:
    """Replace changes in place of values without rows, as in `loss += 0.1 * other`, by operators
    that change nothing."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        name = name_of(node)
        is_change = schema is not None and name.endswith("_") and not name.startswith("_")
        if not is_change or not node.args or has_rows(value_of(node)):
            continue
        base: Any = node.args[0]
        packet = getattr(aten, name[:-1], None)
        overload = getattr(packet, getattr(schema, "overload_name", "") or "default", None)
        # a change of a parameter or a buffer, or of a view of another value, stays one
        makes_value = getattr(base, "op", "") == "call_function" and not is_view(base)
        if overload is None or not makes_value or any(map(is_view, base.users)):
            continue
        with graph.inserting_before(node):
            changed = graph.call_function(overload, node.args, node.kwargs)
        changed.meta.update(node.meta)
        node.replace_all_uses_with(changed)
        base.replace_all_uses_with(
            changed,
            delete_user_cb=lambda user, k=order[node]: order.get(user, -1) > k,
        )
        graph.erase_node(node)


def is_view(node: Node) -> bool:
    """Whether a node's value is a view of its first argument by the operator's schema."""
    schema = getattr(node.target, "_schema", None)
    alias = schema.returns[0].alias_info if schema and schema.returns else None
    return alias is not None and not alias.is_write


class Counts:
    """Nodes of a graph that count elements."""

    def __init__(self, graph: fx.Graph) -> None:
        self.placeholders = graph.find_nodes(op="placeholder")
        self.masks: dict[Any, Node] = {}
        """Symbol -> mask. The symbol is the number of true elements of the mask."""
        for node in graph.nodes:
            value = value_of(node)
            if name_of(node) in MASKED and isinstance(value, Tensor):
                for mask in masks_of(node):
                    new = (symbol for size in value.shape for symbol in symbols_of(size))
                    for symbol in new:
                        # torch names a size "u0", "u1", … that depends on values of the data
                        if symbol.name.startswith("u"):
                            self.masks.setdefault(symbol, mask)

    def elements(self, before: Node, number: Any) -> Any:
        """A node before another one whose value is this number of elements; None where the number
        is not a constant times the number of rows, or times that of a mask's true elements.

        number: an expression of sizes.
        """
        symbols = list(number.free_symbols)
        factor = number / symbols[0] if len(symbols) == 1 else None
        if factor is None or not factor.is_Integer:
            return None
        counted = self._counted(before, symbols[0])
        if counted is None or factor == 1:
            return counted
        times: Any = aten.mul.Tensor if isinstance(value_of(counted), Tensor) else operator.mul
        return inserted(before, times, counted, int(factor))

    def _counted(self, before: Node, symbol: Any) -> Any:
        """A node before another one whose value is that of a symbol; None where there is none."""
        if symbol in self.masks:
            return inserted(before, aten.sum.default, self.masks[symbol])
        for placeholder in self.placeholders:
            value = value_of(placeholder)
            for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if is_symbolic(size) and size.node.expr == symbol:
                    return inserted(before, aten.sym_size.int, placeholder, dim)
        return None


def masks_of(node: Node) -> list[Node]:
    """The masks by which a node selects elements."""
    if name_of(node) == "index":
        indices = [index for index in node.args[1] if isinstance(index, Node)]
        return [index for index in indices if value_of(index).dtype == torch.bool]
    return [x for x in node.args[-1:] if isinstance(x, Node) and value_of(x).dtype == torch.bool]


def symbols_of(size: Any) -> set[Any]:
    """The symbols of a size."""
    return set(size.node.expr.free_symbols) if is_symbolic(size) else set()


def orders_rows(node: Node) -> bool:
    """Whether a node is an output of an operator that puts real numbers of all rows in order."""
    source: Any = node.args[0] if node.args else None
    if name_of(node) != "getitem" or not isinstance(source, Node):
        return False
    values = values_of(source)
    ordered = value_of(values.get("self"))
    if node.args[1] not in ORDERING.get(name_of(source), ()) or not ordered.is_floating_point():
        return False
    return ordered.dim() > 0 and is_symbolic(ordered.shape[values["dim"]])


def divide_means(graph: fx.Graph) -> None:
    """Write each mean over the rows as a sum divided by a count: of the elements, or for classes of
    the targets that are not ignored, by their weights."""
    counts = Counts(graph)
    for node in list(graph.nodes):
        values = values_of(node)
        name = name_of(node)
        is_mean = name == "mean" or values.get("reduction") == MEAN
        reads_rows = any(has_rows(value_of(x)) for x in node.all_input_nodes)
        output = value_of(node)
        if not is_mean or not reads_rows or has_rows(output) or name in OTHER_MEANS:
            continue
        if name == "mean":
            count = counts.elements(
                node, value_of(values["self"]).numel().node.expr / output.numel()
            )
            dims = values.get("dim")
            target: Any = aten.sum.dim_IntList if dims else aten.sum.default
            positional: tuple[Any, ...] = (
                (values["self"], dims, values["keepdim"]) if dims else (values["self"],)
            )
            named: dict[str, Any] = {"dtype": values.get("dtype")}
        else:
            count = counted_losses(counts, node, values)
            target, positional, named = node.target, (), values | {"reduction": SUM}
        if count is None:
            continue
        summed = inserted(node, target, *positional, **named)
        mean = inserted(node, aten.div.Tensor, summed, count)
        node.replace_all_uses_with(mean)
        graph.erase_node(node)


def counted_losses(counts: Counts, node: Node, values: Mapping[str, Any]) -> Any:
    """A node whose value is the number by which a loss with the reduction "mean" divides."""
    target = values.get("target")
    if name_of(node) in CLASSES and not value_of(target).is_floating_point():
        ignored, weight = values["ignore_index"], values["weight"]
        counted = inserted(node, aten.ne.Scalar, target, ignored)
        if weight is not None:
            is_ignored = inserted(node, aten.eq.Scalar, target, ignored)
            classes = inserted(node, aten.masked_fill.Scalar, target, is_ignored, 0)
            of_targets = inserted(node, aten.index.Tensor, weight, [classes])
            counted = inserted(node, aten.mul.Tensor, of_targets, counted)
        return inserted(node, aten.sum.default, counted)
    of_trace = {name: map_arg(value, value_of) for name, value in values.items()}
    each: Any = node.target(**(of_trace | {"reduction": UNREDUCED}))
    return counts.elements(node, each.numel().node.expr)


# How a value depends on the rows.
CONSTANT = "constant"  # the same for all rows
SIZE = "size"  # a number that follows from the number of rows
ROWS = "rows"  # a value for each row
TOTAL = "total"  # a sum over the rows of what the data say
GLOBAL = "global"  # follows from totals and constants
SUMMED = "sum"  # a sum over the rows of what the model computes, times what is global
OTHER = "other"  # anything else without rows
KNOWN = (CONSTANT, TOTAL, GLOBAL)  # the same in all passes, once the totals are known


@dataclass(frozen=True)
class Form:
    """The dependence of a value of the graph on the rows."""

    kind: str
    why: str = ""
    """Where `kind` is OTHER: the operation for which the value is no sum, as a text for errors."""


class Sums:
    """The forms of the values of a graph whose means are divided, and its totals.

    The graph is changed: a number of rows that is used as a number becomes a total, a constant that
    is added to a sum is divided over the micro-batches, and a division of a sum by a total of 0
    gives 0.
    """

    def __init__(self, graph: fx.Graph, from_data: Callable[[Node], bool]) -> None:
        """from_data: whether a node's value follows from the data alone."""
        self.graph, self.from_data = graph, from_data
        self.counts = Counts(graph)
        self.forms: dict[Node, Form] = {}
        self.denominators: list[Node] = []
        """The values by which sums are divided."""
        self.mixing: dict[Node, str] = {}
        """Node with rows that depends on other rows -> a text for errors."""
        self.global_sizes: dict[Node, Any] = {}
        """Number that follows from the number of rows -> the same of the global batch."""
        for node in list(graph.nodes):
            if node.op != "output":
                self.forms[node] = self._form(node)

    def form(self, value: Any) -> Form:
        """The form of an argument of a node."""
        return self.forms[value] if isinstance(value, Node) else Form(CONSTANT)

    def _form(self, node: Node) -> Form:
        """The form of a node, whose arguments have theirs. The node's arguments may be changed."""
        value = value_of(node)
        if node.op in ("placeholder", "get_attr"):
            if has_rows(value):
                return Form(ROWS)
            is_input_tensor = node.op == "placeholder" and isinstance(value, Tensor)
            return Form(GLOBAL if is_input_tensor else CONSTANT)
        if node.op != "call_function" or value is None:
            return Form(CONSTANT)
        name = name_of(node)
        if name in SIZES:
            return Form(SIZE if is_symbolic(value) else CONSTANT)
        kinds = {self.form(argument).kind for argument in node.all_input_nodes}
        if is_symbolic(value) and SIZE in kinds and kinds <= {SIZE, CONSTANT}:
            return Form(SIZE)
        if SIZE in kinds:
            self._count_all_rows(node)
        # again, since other arguments may have taken the places of sizes
        of_arguments = [self.form(argument) for argument in node.all_input_nodes]
        kinds = {form.kind for form in of_arguments}
        if has_rows(value):
            self._note_mixing(node)
            return Form(ROWS)
        for form in of_arguments:
            if form.kind == OTHER:
                return form
        if ROWS in kinds:
            is_sum = name in ADDITIVE or values_of(node).get("reduction") == SUM
            if not is_sum or SUMMED in kinds:
                return Form(OTHER, f"{name} over all rows")
            return Form(TOTAL if self.from_data(node) else SUMMED)
        if SUMMED in kinds:
            return self._of_sums(node, name)
        if SIZE in kinds:
            return Form(OTHER, f"{name} of a number of rows")
        return Form(GLOBAL if kinds & {TOTAL, GLOBAL} else CONSTANT)

    def _note_mixing(self, node: Node) -> None:
        """Record a node with rows whose values depend on those of other rows: it puts them in
        order, or it reads a real number that the model computes from all rows.

        Two kinds of numbers that models compute from all rows are allowed. Whole numbers, such as
        an expert's number of tokens, only group rows. What `any` and `all` say, such as whether a
        value overflows half precision, only limits a range.
        """
        if orders_rows(node):
            self.mixing[node] = f"{name_of(node.all_input_nodes[0])} over all rows"
        for source in node.all_input_nodes:
            value, form = value_of(source), self.form(source)
            is_real = isinstance(value, Tensor) and value.is_floating_point()
            is_any_or_all = form.why.startswith(("any ", "all "))  # `why` begins with the operator
            if not is_real or self.from_data(source) or is_any_or_all:
                continue
            if form.kind in (SUMMED, OTHER):
                why = form.why or f"{name_of(source)} over all rows"
                self.mixing[node] = f"{name_of(node)} with {why}"

    def _count_all_rows(self, node: Node) -> None:
        """Replace the numbers of rows that a node uses as numbers by those of the global batch."""
        schema = getattr(node.target, "_schema", None)
        if name_of(node) in PLACES:
            return
        types = (
            {argument.name: str(argument.type) for argument in schema.arguments} if schema else {}
        )
        names = list(types)

        def replaced(value: Any, kind: str) -> Any:
            is_number = schema is None or any(t in kind for t in ("Tensor", "number", "float"))
            return map_arg(value, self._global_size) if is_number else value

        node.args = tuple(
            replaced(value, types[names[k]] if schema else "") for k, value in enumerate(node.args)
        )
        node.kwargs = {
            key: replaced(value, types.get(key, "")) for key, value in node.kwargs.items()
        }

    def _global_size(self, node: Node) -> Node:
        """A node's number for the global batch, where it is one that follows from the number of
        rows; any other node as it is."""
        if self.form(node).kind != SIZE:
            return node
        if node not in self.global_sizes:
            self.global_sizes[node] = self._total_size(node)
        return self.global_sizes[node]

    def _total_size(self, node: Node) -> Node:
        """The number of the global batch that a number of rows stands for; the node itself where
        there is none."""
        number, following = value_of(node), node.next
        total = None
        if isinstance(number, torch.SymInt):
            total = self.counts.elements(following, number.node.expr)
        if total is not None:
            # The node `total` is added up over all ranks. The nodes that it is computed from are
            # not, so that they stay those of the micro-batch.
            for part in total.all_input_nodes:
                self.forms.setdefault(part, Form(ROWS))
            self.forms[total] = Form(TOTAL if self.from_data(total) else SUMMED)
            return total
        if name_of(node) in SIZES:
            return node
        args, kwargs = map_arg((node.args, node.kwargs), self._global_size)
        total = inserted(following, node.target, *args, **kwargs)
        is_known = all(self.form(x).kind in KNOWN for x in total.all_input_nodes)
        self.forms[total] = Form(GLOBAL) if is_known else Form(OTHER, "a number of rows")
        return total

    def _of_sums(self, node: Node, name: str) -> Form:
        """The form of a node without rows that reads sums over rows and values without rows."""
        arguments = list(node.all_input_nodes)
        sums = [x for x in arguments if self.form(x).kind == SUMMED]
        if name in LINEAR:
            return Form(SUMMED)
        if name in ADDING:
            is_list = name in ("stack", "cat")
            added: Any = node.args[0] if is_list else node.args[:2]
            shared = tuple(self._shared(node, x) for x in added)
            node.args = (list(shared), *node.args[1:]) if is_list else (*shared, *node.args[2:])
            return Form(SUMMED)
        if name == "where":
            condition, *choices = node.args
            if self.form(condition).kind in KNOWN:
                node.args = (condition, *(self._shared(node, x) for x in choices))
                return Form(SUMMED)
            return Form(OTHER, "where by a condition on a mean or sum over the rows")
        if name == "masked_fill" and node.args[2] == 0 and self.form(node.args[1]).kind in KNOWN:
            return Form(SUMMED)
        if name in SCALING:
            if len(sums) == 1 and list(node.args[:2]).count(sums[0]) == 1:
                return Form(SUMMED)
            return Form(OTHER, f"{name} of two sums over the rows")
        if name in ("div", "true_divide"):
            divisor = node.args[1]
            if self.form(divisor).kind in KNOWN and node.kwargs.get("rounding_mode") is None:
                self._divide(node, divisor)
                return Form(SUMMED)
            return Form(OTHER, "division by a sum over the rows that the model's outputs decide")
        return Form(OTHER, f"{name} of a mean or sum over the rows")

    def _divide(self, node: Node, divisor: Any) -> None:
        """Let a sum that is divided by 0 be 0: the global batch has no label then."""
        if self.form(divisor).kind not in (TOTAL, GLOBAL):
            return
        self.denominators.append(divisor)
        if not isinstance(value_of(divisor), Tensor):
            return
        dtype = value_of(node).dtype
        number = inserted(node, aten.to.dtype, divisor, dtype)
        is_zero = inserted(node, aten.eq.Scalar, divisor, 0)
        safe = inserted(node, aten.masked_fill.Scalar, number, is_zero, torch.inf)
        for new in (number, is_zero, safe):
            self.forms[new] = Form(GLOBAL)
        node.args = (node.args[0], safe, *node.args[2:])

    def _shared(self, node: Node, summand: Any) -> Any:
        """A summand of a sum over the rows: a constant times the share of the micro-batch's rows,
        any other as it is."""
        if self.form(summand).kind == SUMMED or (not isinstance(summand, Node) and summand == 0):
            return summand
        local = self._rows_before(node)
        share = inserted(node, operator.truediv, local, self._global_size(local))
        self.forms[share] = Form(GLOBAL)
        is_tensor = isinstance(value_of(summand), Tensor)
        times: Any = aten.mul.Tensor if is_tensor else operator.mul
        product = inserted(node, times, summand, share)
        self.forms[product] = Form(SUMMED)
        return product

    def _rows_before(self, node: Node) -> Node:
        """A node before another one whose value is the micro-batch's number of rows."""
        for placeholder in self.counts.placeholders:
            if has_rows(value_of(placeholder)):
                local = inserted(node, aten.sym_size.int, placeholder, 0)
                self.forms[local] = Form(SIZE)
                return local
        raise UnsupportedError("the data have no tensor with one row for each sample")

    def check(self, loss: Any, cone: Iterable[Node], where: str) -> None:
        """Raise UnsupportedError where the loss is no sum over micro-batches.

        loss: the node of the loss. cone: the nodes that it is computed from.
        """
        expected = (
            "a mean or a sum over samples, tokens or weights of the data, times constants, or a "
            "sum of such"
        )
        for node in cone:
            if node in self.mixing:
                raise UnsupportedError(
                    "samples influence each other", where=where,
                    got=self.mixing[node],
                    expected="rows that are computed each by itself",
                )  # fmt: skip
        value, form = value_of(loss), self.form(loss)
        if not isinstance(value, Tensor) or value.numel() != 1:
            sizes = ["rows" if is_symbolic(x) else str(x) for x in getattr(value, "shape", ())]
            raise UnsupportedError(
                "the model's loss is not one number",
                where=where, got=f"{name_of(loss)} of sizes [{', '.join(sizes)}]",
                expected=f"{expected}; distribute(…, loss=…) makes one of the outputs",
            )  # fmt: skip
        if form.kind != SUMMED:
            raise UnsupportedError(
                "the model's loss does not add up over micro-batches",
                where=where, got=form.why or "a number that no row decides", expected=expected,
            )  # fmt: skip

    def rounds(self, cone: Callable[[Node], set[Node]], needed: set[Node]) -> list[list[Node]]:
        """The totals among needed nodes, in rounds: a total is in a later round than those that it
        is computed from. cone: node -> the nodes that it is computed from."""
        round_of: dict[Node, int] = {}
        for node in self.graph.nodes:
            if node in needed and self.forms.get(node, Form(OTHER)).kind == TOTAL:
                before = [round_of[total] for total in cone(node) if total in round_of]
                round_of[node] = max(before, default=-1) + 1
        last = max(round_of.values(), default=-1)
        return [[node for node, k in round_of.items() if k == number] for number in range(last + 1)]


def sizes_of(nodes: Iterable[Node]) -> int:
    """The length of the vector that `as_numbers` makes of the values of totals."""
    values = map(value_of, nodes)
    return sum(value.numel() if isinstance(value, Tensor) else 1 for value in values)


def as_numbers(values: Iterable[Any]) -> Tensor:
    """The values of totals as one vector of fp64 in host memory."""
    flat = (
        value.detach().reshape(-1).cpu().double()
        if isinstance(value, Tensor)
        else torch.tensor([float(value)], dtype=torch.float64)
        for value in values
    )
    return torch.cat(list(chain([torch.zeros(0, dtype=torch.float64)], flat)))


def from_numbers(nodes: Iterable[Node], numbers: Tensor, device: Any) -> dict[Node, Any]:
    """Total -> its value, from the vector that `as_numbers` makes."""
    values: dict[Node, Any] = {}
    first = 0
    for node in nodes:
        like = value_of(node)
        if isinstance(like, Tensor):
            part = numbers[first : first + like.numel()]
            values[node] = part.to(device=device, dtype=like.dtype).reshape(tuple(like.shape))
            first += like.numel()
        else:
            values[node] = round(float(numbers[first]))
            first += 1
    return values
