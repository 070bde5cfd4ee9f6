"""How tensor ranks of equal shares divide the weights of a split module.

A plan says it in the words of `transformers`: the paths of modules inside, with * for what differs,
and `colwise` (each rank computes some of the outputs) or `rowwise` (from some of the inputs). It is
the module's attribute `tensor_plan`, or the one that its author gave it, or the table here. Every
plan is exact; it decides what is computed where. Weights under other words stay whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.fx import Node

from hetplan.runtime.tracing.split import Split, name_of, path_of

# For modules that say nothing: the names of GPT-2, BERT, ViT, T5 and others.
COLUMNS = (
    "c_attn", "c_fc", "query", "key", "value", "intermediate.dense", "q_proj", "k_proj", "v_proj",
    "fc1", "gate_proj", "up_proj", "Attention.q", "Attention.k", "Attention.v", "wi", "wi_0",
    "wi_1", "lm_head",
)  # fmt: skip
ROWS = ("c_proj", "output.dense", "o_proj", "out_proj", "fc2", "down_proj", "Attention.o", "wo")
TABLE = {f"*{name}": "colwise" for name in COLUMNS} | {f"*{name}": "rowwise" for name in ROWS}
# Of a product: which argument its weight is, and the weight's dimension of outputs.
WEIGHTS = {"linear": (1, 0), "addmm": (2, 1), "mm": (1, 1), "matmul": (1, 1)}
VIEWS = ("view", "reshape", "_unsafe_view")


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
    words = getattr(module, "tensor_plan", None) or getattr(module, "_tp_plan", None) or TABLE
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
            elif kind in VIEWS and value.shape[-1] not in (columns, columns // blocks):
                together = int(value.shape[-1])
            elif kind in (*VIEWS, "getitem", "add"):
                waiting.append(user)
    return blocks, together
