"""Adapters of low rank beside frozen weights (LoRA), and frozen weights in 8 or 4 bits (QLoRA).

An adapter of rank r beside a module with a weight of k x n numbers is two products, k x r (A) and
r x n (B), whose result is scaled and added to the module's. Only A and B are trained. The frozen
weights have no gradients and no optimizer states, and their products compute no gradients of
weights. So the inputs of modules without an adapter are not kept for the backward pass.

The weights of a block's products may be held in fewer bits than those of the training precision,
and are cast to it for every product. Embedding, head, norms, biases and routers are not.

Sources: Hu et al. 2021 (LoRA), Section 4; Dettmers et al. 2023 (QLoRA), Sections 2 and 3 for 4
bits; Dettmers et al. 2022 (LLM.int8()), Section 2.1 for 8 bits.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hetplan.errors import InputError, check_name, require
from hetplan.profiling.models.operators import (
    BLOCKS,
    Elementwise,
    Layer,
    Matmul,
    Operator,
    Saved,
    Split,
)

ALL = "all-linear"  # a module for every product of the blocks, without routers
BASE_BITS = (16, 8, 4)  # of a frozen weight; 16: the training precision
LARGEST_RANK = 65536
FORM = "lora:RANK or lora:RANK:MODULE[,MODULE…], as lora:16:q,k,v,o"

# NF4 in blocks of 64 weights, each with a scale in 8 bits; 256 scales share one in 32 bits (double
# quantisation, QLoRA, Section 3).
SCALED_WEIGHTS, SCALED_SCALES = 64, 256
NF4_BITS = 4 + 8 / SCALED_WEIGHTS + 32 / (SCALED_WEIGHTS * SCALED_SCALES)
INT8_SCALE_BYTES = 4  # of each output of a module in 8 bits (LLM.int8(), bitsandbytes `SCB`)
# Kernels that the host launches for a cast: one for the scales, one for the weights.
CAST_LAUNCHES = 2

ROUTER = "router"
# Names of modules in the models of Hugging Face and in Megatron-LM -> the module of `modules_of`.
ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "query", "q_lin"), "q"),
    **dict.fromkeys(("k_proj", "key", "k_lin"), "k"),
    **dict.fromkeys(("v_proj", "value", "v_lin"), "v"),
    **dict.fromkeys(
        ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack", "linear_qkv"), "qkv"
    ),
    **dict.fromkeys(("o_proj", "linear_proj", "out_lin"), "o"),
    **dict.fromkeys(("gate_proj", "w1"), "gate"),
    **dict.fromkeys(("up_proj", "w3", "fc1", "c_fc", "fc_in", "dense_h_to_4h"), "up"),
    **dict.fromkeys(("gate_up_proj", "linear_fc1"), "gate_up"),
    **dict.fromkeys(("down_proj", "w2", "fc2", "fc_out", "dense_4h_to_h", "linear_fc2"), "down"),
    **dict.fromkeys(("q_a_proj",), "q_a"),
    **dict.fromkeys(("q_b_proj",), "q_b"),
    **dict.fromkeys(("kv_a_proj_with_mqa",), "kv_a"),
    **dict.fromkeys(("kv_b_proj",), "kv_b"),
}
# Modules that a model may join in one, in the order of their outputs -> the name of the joint one.
JOINT: Mapping[tuple[str, ...], str] = {("q", "k", "v"): "qkv", ("gate", "up"): "gate_up"}
# Joint module -> the models, by Hugging Face's `model_type`, that have it in place of its parts.
WITH_JOINT: Mapping[str, frozenset[str]] = {
    "qkv": frozenset(
        ("gpt2", "gpt_bigcode", "gpt_neox", "bloom", "falcon", "mpt", "codegen", "phi3")
    ),
    "gate_up": frozenset(("phi3", "glm", "glm4")),
}
# Product -> the kept tensor that is its input. Those of other products are kept in any case.
INPUT_OF: Mapping[str, str] = {
    **dict.fromkeys(("qkv", "output-gate", "kv-down", "q-down"), "qkv input"),
    **dict.fromkeys(("up", "experts-up"), "up input"),
    **dict.fromkeys(("down", "experts-down"), "down input"),
    "lm-head": "head input",
    **{name: f"{name} input" for name in ("mamba-in", "mamba-out", "delta-in", "delta-out")},
}


class Weights(NamedTuple):
    """The weights of one product in the whole layer, of which a rank may compute a part."""

    number: int  # of equal weights, as of the experts of a block
    rows: int
    columns: int
    modules: tuple[tuple[str, int], ...]  # (name, columns) of the modules that share the product


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model, and the bits of the weights beside them."""

    rank: int
    modules: str = ALL  # names joined by commas, or `ALL`
    base_bits: int = 16  # of each frozen weight of a block's products; 16: the training precision
    joint: str = ""  # the model's joint modules (`JOINT`), joined by commas

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules with an adapter."""
        return tuple(self.modules.split(","))

    @property
    def joint_names(self) -> tuple[str, ...]:
        """The names of the model's joint modules."""
        return tuple(self.joint.split(","))

    def beside(self, kind: str) -> "Adapters":
        """The adapters of a model. kind: its `model_type` of Hugging Face; empty: unknown."""
        names = [name for name, kinds in WITH_JOINT.items() if kind in kinds]
        return replace(self, joint=",".join(names))

    def chosen(self, modules: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
        """(name, columns) of the modules of one product that have an adapter.

        A user may name the joint module of those that a model has apart: Megatron-LM has one for
        queries, keys and values.
        """
        if self.modules == ALL:
            return tuple(modules)
        joint = JOINT.get(tuple(name for name, _ in modules))
        if joint in self.names:
            return ((joint, sum(columns for _, columns in modules)),)
        return tuple((name, columns) for name, columns in modules if name in self.names)

    def weight_bytes(self, rows: int) -> float | None:
        """Bytes in which a frozen weight of a product with `rows` rows is held, with its part of
        the scales; None: those of the training precision."""
        if self.base_bits == 4:
            return NF4_BITS / 8
        if self.base_bits == 8:
            return 1 + INT8_SCALE_BYTES / rows
        return None

    @property
    def text(self) -> str:
        """The adapters in words."""
        base = "" if self.base_bits == 16 else f", base in {self.base_bits} bits"
        return f"LoRA of rank {self.rank} on {self.modules}{base}"


def parse_adapters(text: str, base_bits: int = 16) -> Adapters:
    """The adapters of the text `lora:RANK` or `lora:RANK:MODULES`; without modules all linear ones.
    Raises InputError.

    base_bits: bits of a frozen weight of a block's products.
    """
    kind, _, rest = text.partition(":")
    rank, _, modules = rest.partition(":")
    usable = kind.strip().lower() == "lora" and rank.strip().isdecimal() and len(rank) < 9
    require(
        usable and 1 <= int(rank) <= LARGEST_RANK,
        "adapters are not usable",
        where="--adapters",
        got=text,
        expected=f"{FORM}, with a rank from 1 to {LARGEST_RANK}",
    )
    require(
        base_bits in BASE_BITS,
        "bits of the frozen weights are not usable",
        where="--base",
        got=base_bits,
        expected=" or ".join(map(str, BASE_BITS)),
    )
    names = [name.strip() for name in modules.split(",") if name.strip()]
    if not names and rest.count(":"):
        raise InputError("names no module", where="--adapters", got=text, expected=FORM)
    canonical = dict.fromkeys(ALIASES.get(name, name) for name in names or [ALL])
    require(
        ALL not in canonical or len(canonical) == 1,
        f"{ALL} stands for all modules",
        where="--adapters",
        got=text,
        expected=f"{ALL} alone",
    )
    return Adapters(int(rank), ",".join(canonical), base_bits)


def check_modules(
    adapters: Adapters, modules: Sequence[Sequence[tuple[str, int]]], *, where: str
) -> None:
    """Raise InputError for a name that is no module of the model. modules: of each product. where:
    the model."""
    present: dict[str, None] = {}
    for of_product in modules:
        names = tuple(name for name, _ in of_product)
        present |= dict.fromkeys(names)
        if names in JOINT:
            present[JOINT[names]] = None
    present.pop(ROUTER, None)
    for name in adapters.names:
        if name != ALL:
            check_name(f"{where} has no module", name, (*present, ALL), where="--adapters")


def adapted(layer: Layer, adapters: Adapters, weights: Callable[[Matmul], Weights]) -> Layer:
    """The layer with frozen weights and, in a block, with adapters beside the chosen modules.

    weights: a product of the layer -> its weights.
    """
    if layer.kind not in BLOCKS:
        return frozen_end(layer)
    operators: list[Operator] = []
    saved: list[Saved] = []
    used_inputs: set[str] = set()  # kept tensors that some A reads
    unused_inputs: set[str] = set()  # kept tensors that only frozen products read
    adapter_params = quantised = largest = 0
    quantised_bytes = 0.0
    for op in layer.operators:
        if not (isinstance(op, Matmul) and op.weight):
            operators.append(op)
            continue
        operators.append(replace(op, frozen=True))
        if op.name == ROUTER:
            continue
        of_op = weights(op)
        chosen = adapters.chosen(of_op.modules)
        weight_bytes = adapters.weight_bytes(of_op.rows)
        if weight_bytes is not None:
            numbers = of_op.number * of_op.rows * of_op.columns
            quantised += numbers
            quantised_bytes += numbers * weight_bytes
            largest = max(largest, of_op.rows * max(columns for _, columns in of_op.modules))
        (used_inputs if chosen else unused_inputs).add(INPUT_OF.get(op.name, ""))
        if chosen:
            beside, kept = beside_product(op, chosen, of_op.columns, adapters.rank)
            operators += beside
            saved.append(kept)
            columns_of_all = sum(columns for _, columns in chosen)
            in_one = len(chosen) * of_op.rows + columns_of_all  # numbers of A and B for each rank
            adapter_params += of_op.number * adapters.rank * in_one
    dropped = unused_inputs - used_inputs
    return replace(
        layer,
        operators=tuple(operators),
        saved=(*(tensor for tensor in layer.saved if tensor.name not in dropped), *saved),
        params=layer.params + adapter_params,
        frozen=layer.params,
        quantised=quantised,
        quantised_bytes=math.ceil(quantised_bytes),
        cast=largest,
    )


def beside_product(
    op: Matmul, chosen: Sequence[tuple[str, int]], columns: int, rank: int
) -> tuple[list[Operator], Saved]:
    """(operators of the adapters beside a product, the tensor that they keep).

    Tensor ranks divide the rows of A and the columns of B as those of the product beside it, and
    never the rank. B's result is scaled and added to the product's in one kernel, as residuals are;
    backward, the gradient of A's input is added to that of the product's.

    chosen: (name, columns) of the modules with an adapter. columns: of all modules of the product.
    """
    modules = len(chosen)
    adapted_columns = sum(width for _, width in chosen)
    n = op.n * adapted_columns // columns  # of this rank, which may compute a part of the columns
    rows = op.m * op.count
    operators: list[Operator] = [
        replace(
            op,
            n=rank,
            count=op.count * modules,
            split="k" if op.split == "k" else "none",
            left=None,
            out=None,
            narrow=False,
        )
    ]
    for _, width in chosen:
        own = op.n * width // columns
        split: Split = "n" if op.split == "n" else "none"
        operators.append(replace(op, k=rank, n=own, split=split, left=None, out=None, narrow=False))
    added = Elementwise(f"{op.name}-adapter", 3 * rows * n, 3 * rows * op.k, split=op.split == "n")
    kept = Saved(f"{op.name} adapter", rows * rank * modules, split=False)
    return [*operators, added], kept


def frozen_end(layer: Layer) -> Layer:
    """The embedding or the head with frozen weights.

    Nothing before the first block is trained, so that the embedding has no backward pass and keeps
    nothing. The head passes the gradient on and needs no input of its product.
    """
    operators: list[Operator] = []
    first = layer.kind == "embedding"
    for op in layer.operators:
        if isinstance(op, Matmul) and op.weight:
            operators.append(replace(op, frozen=True, input_gradient=not first))
        elif isinstance(op, Elementwise) and first:
            operators.append(replace(op, backward=0))
        else:
            operators.append(op)
    inputs = {INPUT_OF.get(op.name) for op in operators}
    saved = tuple(tensor for tensor in layer.saved if tensor.name not in inputs)
    return replace(
        layer,
        operators=tuple(operators),
        saved=() if first else saved,
        frozen=layer.params,
        frozen_tied=layer.tied_params,
    )
