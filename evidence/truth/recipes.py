"""What Megatron Bridge's recipes of speed say of a published row beyond its columns: CUDA graphs,
the dispatcher of tokens, the overlap of its exchanges, recomputed layers and attention in 8 bits.

Source: NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs (`*_workload_base_configs.py`), and
from release 26.08 on src/megatron/bridge/perf_recipes. Modules that recipes recompute, such as the
up-projections of latent attention, are small, and are left out. Recipes with full sharding offload
activations to the host, which counts as free.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from evidence.truth.tables import Cells


@dataclass(frozen=True)
class Recipe:
    """Settings of a recipe. graphs, one_copy, hidden_experts, fp8_attention: fields of `Stack`.
    recomputed: layers of each model chunk that are computed again."""

    graphs: Literal["none", "partial", "full"] = "none"
    one_copy: bool = False
    hidden_experts: bool = False
    fp8_attention: bool = False
    recomputed: int = 0


EAGER = Recipe()
EAGER_FLEX = Recipe(one_copy=True)
PARTIAL = Recipe(graphs="partial")
PARTIAL_FLEX = Recipe(graphs="partial", one_copy=True)
# `cuda_graph_impl="full_iteration"`, `moe_a2a_overlap`, `fp8_dot_product_attention`
WHOLE = Recipe(graphs="full", one_copy=True, hidden_experts=True, fp8_attention=True)

FIRST_FLEX = (25, 11)  # the first release whose recipes name a backend of the dispatcher
FIRST_WHOLE = (26, 6)  # the first release with graphs of the whole iteration


def release(row: Cells) -> tuple[int, ...]:
    """The numbers of a release, such as (26, 4, 1) of `26.04.01 NeMo Container`."""
    return tuple(map(int, re.findall(r"\d+", row.text("release"))))


def on_rack(row: Cells) -> bool:
    """Whether a row ran on a rack of GB200 or GB300."""
    return row.text("system").startswith("DGX-GB")


def in_mxfp8(row: Cells) -> bool:
    """Whether products are computed in MXFP8, which sources also call FP8-MX."""
    return "MX" in row.text("precision")


def dense_recipe(row: Cells) -> Recipe:
    """Of Llama. The recipe of the 8B model in FP8 on H100 computes five layers again, unless its
    states are fully sharded, as in earlier releases."""
    on_h100 = row.text("system") == "DGX-H100" and not row.whole("fsdp", 0)
    small = row.text("model").upper().endswith("8B")
    in_fp8 = row.text("precision") != "BF16"
    return Recipe(recomputed=5) if on_h100 and small and in_fp8 else EAGER


def deepseek_recipe(row: Cells) -> Recipe:
    """Of DeepSeek-V3."""
    one_each = row.whole("micro_batch") == 1
    if on_rack(row):
        if in_mxfp8(row) and one_each and release(row) >= FIRST_WHOLE:
            return WHOLE
        return PARTIAL_FLEX if one_each else EAGER_FLEX
    if row.text("system") == "DGX-B200" and row.whole("pp", 1) == 8:
        return Recipe(graphs="partial", one_copy=True, hidden_experts=True)
    return PARTIAL_FLEX if row.text("system") == "DGX-B300" else EAGER_FLEX


def kimi_recipe(row: Cells) -> Recipe:
    """Of Kimi K2."""
    if not on_rack(row):
        return EAGER
    if row.text("system") == "DGX-GB200":
        return PARTIAL_FLEX
    whole = in_mxfp8(row) and row.whole("micro_batch") == 1 and release(row) >= FIRST_WHOLE
    return WHOLE if whole else EAGER_FLEX


def gpt_oss_recipe(row: Cells) -> Recipe:
    """Of GPT OSS. Its second version, with a batch of 1280, has other settings than its first."""
    second, system = row.whole("global_batch") == 1280, row.text("system")
    if on_rack(row) and in_mxfp8(row) and second and release(row) >= FIRST_WHOLE:
        return WHOLE
    if system == "DGX-GB300":
        return PARTIAL
    if system == "DGX-B300":
        flex = second and row.whole("ep", 1) == 8
        hidden = flex and in_mxfp8(row)
        return Recipe(graphs="partial", one_copy=flex, hidden_experts=hidden, fp8_attention=hidden)
    return Recipe(hidden_experts=second and system == "DGX-GB200")


def qwen_recipe(row: Cells) -> Recipe:
    """Of Qwen3, with 235 or 30 billion parameters."""
    system = row.text("system")
    if on_rack(row):
        return WHOLE if in_mxfp8(row) and release(row) >= (26, 8) else PARTIAL_FLEX
    if "235B" in row.text("model").upper():
        return Recipe(hidden_experts=system == "DGX-H100")
    if system == "DGX-H100" and row.text("precision") != "BF16":
        return EAGER_FLEX
    return PARTIAL_FLEX


def nemotron_recipe(row: Cells) -> Recipe:
    """Of Nemotron 3 Nano and Super."""
    eager = row.text("system") == "DGX-B200" and "SUPER" in row.text("model").upper()
    return EAGER_FLEX if eager else PARTIAL_FLEX


RECIPES: dict[str, Callable[[Cells], Recipe]] = {
    "LLAMA": dense_recipe,
    "DEEPSEEK": deepseek_recipe,
    "KIMI": kimi_recipe,
    "GPT OSS": gpt_oss_recipe,
    "QWEN3": qwen_recipe,
    "NEMOTRON": nemotron_recipe,
}


def recipe_of(row: Cells) -> Recipe:
    """The recipe of a row; releases before 25.11, and models without one, have no settings."""
    model = row.text("model").upper().replace("_", "-")
    for start, recipe in RECIPES.items():
        dense = start == "LLAMA"
        if model.startswith(start) and (dense or release(row) >= FIRST_FLEX):
            return recipe(row)
    return EAGER
