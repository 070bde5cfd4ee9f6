"""Sizes of a configuration that follow from others, and checks that sizes fit together.

Sizes are values by field of `Transformer`, or by the names of facts that `decoder_types` describes.
`derive` replaces the facts by fields.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hetplan.errors import InputError, require

# Words of `layer_types` for a block's mixer -> the letter in `Transformer.mixers`. Linear attention
# is the gated delta rule or Mamba-2, whichever the configuration has sizes of.
ALL_KEYS = ("full_attention", "attention", "global", "deepseek_sparse_attention")
IN_WINDOW = ("sliding_attention", "chunked_attention", "local")
LINEAR = ("linear_attention", "mamba", "mamba2")
# Words of `layers_block_type` in a model whose blocks have one part each -> letter of `pattern`.
PARTS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}
# Words of `mlp_layer_types` -> letter of `Experts.blocks`.
NETWORKS = {"dense": "-", "sparse": "E", "moe": "E"}


def derive(sizes: dict[str, Any], where: str) -> None:
    """Put in the sizes that follow from other sizes, and take out the facts from which they follow.

    where: the file, for errors. Raises InputError where a size cannot be derived.
    """
    derive_depth(sizes, where)
    derive_falcon(sizes)
    derive_experts(sizes, where)
    derive_heads(sizes, where)
    derive_attention(sizes, where)
    derive_mixers(sizes, where)
    derive_networks(sizes, where)
    derive_small_parameters(sizes)


def derive_depth(sizes: dict[str, Any], where: str) -> None:
    """The pattern as letters, and its length as the number of blocks where that is not given."""
    pattern = sizes.get("pattern")
    if pattern is not None:
        known = dict.fromkeys(PARTS.values()) if isinstance(pattern, str) else PARTS
        unknown = [part for part in pattern if part not in known]
        require(
            pattern and not unknown,
            "kind of block is not known",
            where=f"{where}: hybrid_override_pattern",
            got=unknown[0] if unknown else pattern,
            expected=f"of {', '.join(known)}",
        )
        letters = [PARTS.get(part, part) for part in pattern]
        sizes["pattern"] = "".join(letters)
    if sizes["layers"] is None:
        sizes["layers"] = len(sizes["pattern"])


def derive_falcon(sizes: dict[str, Any]) -> None:
    """Falcon's grouped heads and two norms, which its new architecture has; and a single head of
    keys and values of other types."""
    single = sizes.pop("single", False)
    if "grouped" in sizes:
        grouped, parallel = sizes.pop("grouped"), sizes.pop("parallel")
        if not grouped:
            sizes["kv_heads"] = 1 if single else sizes["heads"]
        sizes["block_norms"] = 1 if parallel and not grouped else 2
    elif single:
        sizes["kv_heads"] = 1
    if sizes.pop("parallel_residual", False):
        sizes["block_norms"] = 1


def derive_experts(sizes: dict[str, Any], where: str) -> None:
    """The width of shared experts together; without experts, no field of theirs."""
    wanted = sizes.pop("has_experts", True)
    granite_shared = sizes.pop("granite_shared", None)
    if granite_shared is not None:
        # A block of Granite's hybrids has one network with this width, beside experts if any.
        sizes["experts.shared"] = granite_shared
    if not (wanted and sizes.get("experts.count")):
        for field in [field for field in sizes if field.startswith("experts.")]:
            del sizes[field]
        for fact in ("shared_gate", "router_bias", "bare_experts"):
            sizes.pop(fact, None)
        if granite_shared is not None:
            sizes["feed_forward"] = granite_shared
        return
    sizes["experts.bare"] = sizes.pop("bare_experts", False)
    if not sizes.get("experts.width"):
        sizes["experts.width"] = sizes.get("feed_forward")
    if "experts.shared_count" in sizes:
        count = sizes.pop("experts.shared_count") or 0
        require(
            count == 0 or sizes["experts.width"],
            "the width of shared experts is not known",
            where=where,
            expected="moe_intermediate_size",
        )
        sizes["experts.shared"] = count * (sizes["experts.width"] or 0)
    sizes["experts.shared"] = sizes.get("experts.shared") or 0


def derive_heads(sizes: dict[str, Any], where: str) -> None:
    """The width and number of heads, and the widths of networks and of the embedding."""
    hidden, heads = sizes["hidden"], sizes["heads"]
    if "both_halves" in sizes:
        sizes["feed_forward"] = sizes.pop("both_halves") // 2
    if "expansion" in sizes:
        sizes["feed_forward"] = sizes.pop("expansion") * hidden
    if sizes.get("latent.keys") is None:
        for field in [field for field in sizes if field.startswith("latent.")]:
            del sizes[field]
    else:
        # Every head has keys of its own, which are computed from the latent ones.
        sizes["kv_heads"] = heads
        sizes["head_dim"] = sizes["latent.rope"] + sizes["latent.nope"]
    if not sizes.get("layer_input"):
        drop(sizes, "layer_")
    if sizes.get("head_dim") is None:
        require(
            hidden % heads == 0,
            "hidden size is not a multiple of the number of heads",
            where=where,
            got=hidden,
            expected=f"a multiple of {heads}",
        )
    usual = {
        "feed_forward": 4 * hidden,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "embedding_width": hidden,
    }
    sizes |= {field: size for field, size in usual.items() if sizes.get(field) is None}


def derive_attention(sizes: dict[str, Any], where: str) -> None:
    """Norms of queries and keys, an indexer, and the heads of blocks that reach all keys."""
    if sizes.pop("wide_qk_norm", False):
        sizes["qk_norm"] = "all"
    if sizes.pop("head_qk_norm", False):
        sizes["qk_norm"] = "head"
    gated_queries = "delta.heads" in sizes and sizes["attention_bias"]
    require(
        not gated_queries,
        "biases of the gates of attention are not described",
        where=f"{where}: attention_bias",
        got=True,
        expected="false",
    )
    shared_indexers = [kind for kind in sizes.pop("indexers", None) or () if kind != "full"]
    require(
        not shared_indexers,
        "blocks without an indexer of their own are not described",
        where=f"{where}: indexer_types",
        got=shared_indexers[:1],
        expected="full for every block",
    )
    different_heads = set(sizes.pop("heads_by_block", None) or ()) - {sizes["heads"]}
    require(
        not different_heads,
        "numbers of heads differ between blocks",
        where=f"{where}: num_attention_heads_per_layer",
        got=sorted(different_heads),
        expected=f"{sizes['heads']} for every block",
    )
    derive_reaching(sizes, where)


def derive_reaching(sizes: dict[str, Any], where: str) -> None:
    """Gemma 4's heads in blocks that reach all keys, by two keys or by a list of single blocks."""
    if "reaching.shared" not in sizes:
        return
    by_block = sizes.pop("per_layer") or {}
    kinds = {tuple(sorted(entry.items())) for entry in by_block.values()}
    require(
        len(kinds) <= 1 and all(isinstance(size, int) for kind in kinds for _, size in kind),
        "blocks have more than two kinds of heads",
        where=f"{where}: per_layer_config",
        got=len(kinds),
        expected="one entry for all blocks that reach all keys",
    )
    entry: Mapping[str, Any] = dict(next(iter(kinds), ()))
    own = {
        "reaching.head_dim": entry.get("head_dim", 512),  # 512: the class's default
        "reaching.kv_heads": entry.get("num_key_value_heads", sizes["kv_heads"]),
    }
    for field, size in own.items():
        sizes[field] = sizes[field] or size
    if sizes.pop("double_wide"):
        sizes["borrower_feed_forward"] = 2 * sizes["feed_forward"]


def derive_mixers(sizes: dict[str, Any], where: str) -> None:
    """The mixer of each block: where attention has a window, and where there is another mixer."""
    layers = sizes["layers"]
    kinds = mixer_words(sizes, where)
    if not sizes.pop("window_used", True) and kinds is None:
        sizes["window"] = None
    reaching_first = sizes.pop("reaching_first", 0)
    if kinds is None and reaching_first and sizes.get("window"):
        count = min(reaching_first, layers)
        kinds = ["full_attention"] * count + ["sliding_attention"] * (layers - count)
    if kinds is not None:
        check_entries(kinds, layers, f"{where}: layer_types")
        letters = mixer_letters(kinds, sizes, where)
        sizes.pop("full_every", None)
        if set(letters) == {"*"}:
            sizes["window"] = None
        elif "w" in letters or set(letters) & {"M", "D"}:
            every = sizes["full_every"] = period(letters)
            if not every and set(letters) != {"w"}:
                sizes["mixers"] = letters
    if "M" not in sizes.get("mixers", "") + (sizes.get("pattern") or ""):
        drop(sizes, "mamba.")
    if "D" not in sizes.get("mixers", ""):
        drop(sizes, "delta.")
    derive_mamba(sizes)
    if not sizes.get("window"):
        sizes["full_every"] = 0


def mixer_words(sizes: dict[str, Any], where: str) -> list[str] | None:
    """The kind of each block's mixer in the words of transformers; None where the configuration
    does not list them."""
    layers = sizes["layers"]
    kinds: list[str] | None = sizes.pop("kinds", None)
    indices = sizes.pop("attention_blocks", None)
    interval = sizes.pop("full_interval", None)
    pattern = sizes.pop("window_pattern", None)
    if kinds is not None:
        return kinds
    if indices is not None:
        return ["attention" if i in indices else "mamba" for i in range(layers)]
    if "delta.heads" in sizes:
        every = interval or 4  # the default of all classes with the gated delta rule
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if "reaching.shared" in sizes:  # Gemma 4: every sixth block and the last one
        ends = {*range(5, layers, 6), layers - 1}
        return ["full_attention" if i in ends else "sliding_attention" for i in range(layers)]
    if "mamba.heads" in sizes and not sizes.get("pattern"):
        return ["mamba"] * layers
    if isinstance(pattern, str):  # such as LLLG
        words = {"L": "sliding_attention", "G": "full_attention"}
        unknown = sorted(set(pattern) - set(words)) or ([] if pattern else [""])
        require(
            not unknown,
            "not usable",
            where=f"{where}: sliding_window_pattern",
            got=pattern,
            expected="letters L and G",
        )
        return [words[pattern[i % len(pattern)]] for i in range(layers)]
    if isinstance(pattern, int) and sizes.get("window"):
        sizes["full_every"] = pattern
    return None


def mixer_letters(kinds: Sequence[str], sizes: Mapping[str, Any], where: str) -> str:
    """One letter for each block, as in `Transformer.mixers`. Raises InputError for a mixer that is
    not known, or whose sizes the configuration lacks."""
    letters = []
    for i, kind in enumerate(kinds):
        if kind in ALL_KEYS:
            letter = "*"
        elif kind in IN_WINDOW:
            letter = "w" if sizes.get("window") else "*"
        elif kind in LINEAR and "delta.heads" in sizes:
            letter = "D"
        elif kind in LINEAR and "mamba.heads" in sizes:
            letter = "M"
        else:
            raise InputError(
                "mixer is not known",
                where=f"{where}: layer_types[{i}]",
                got=kind,
                expected="attention, within a window or not, Mamba-2 or the gated delta rule",
            )
        letters.append(letter)
    return "".join(letters)


def period(letters: str) -> int:
    """The p for which every p-th block reaches all keys, and all others have a window; 0 where
    there is none."""
    first = letters.find("*")
    if first < 1:
        return 0
    every = first + 1
    fits = all((letter == "*") == ((i + 1) % every == 0) for i, letter in enumerate(letters))
    return every if fits and set(letters) == {"*", "w"} else 0


def derive_mamba(sizes: dict[str, Any]) -> None:
    """The width of a head of Mamba-2 where it is `auto`: of `mamba_expand` times the hidden size,
    one head's part."""
    expand = sizes.pop("mamba_expand", 2)
    if "mamba.heads" in sizes and not isinstance(sizes["mamba.head_dim"], int):
        sizes["mamba.head_dim"] = expand * sizes["hidden"] // sizes["mamba.heads"]


def derive_networks(sizes: dict[str, Any], where: str) -> None:
    """Set which blocks have experts, and which blocks have a dense network."""
    layers = sizes["layers"]
    words = sizes.pop("mlp_kinds", None)
    dense_blocks = sizes.pop("dense_blocks", None)
    moe_blocks = sizes.pop("moe_blocks", None)
    flags = sizes.pop("moe_flags", None)
    first, last = sizes.pop("moe_from", None), sizes.pop("moe_to", None)
    if "experts.count" not in sizes:
        return
    every, dense = sizes.get("experts.every", 1), sizes.get("experts.dense", 0)
    if isinstance(every, list):
        flags, every = [flag == 1 for flag in every], 1
    if words is not None:
        check_entries(words, layers, f"{where}: mlp_layer_types")
        unknown = [word for word in words if word not in NETWORKS]
        require(
            not unknown,
            "kind of network is not known",
            where=f"{where}: mlp_layer_types",
            got=unknown[:1],
            expected=f"{', '.join(NETWORKS)}",
        )
        has_experts = [NETWORKS[word] == "E" for word in words]
    elif flags is not None:
        check_entries(flags, layers, f"{where}: list of blocks with experts")
        has_experts = list(flags)
    elif moe_blocks is not None:
        has_experts = [i in moe_blocks for i in range(layers)]
    elif first is not None:
        end = layers - 1 if last in (None, -1) else last
        has_experts = [(i + 1) % every == 0 and first <= i <= end for i in range(layers)]
    else:
        absent = set(dense_blocks or ())
        has_experts = [
            (i + 1) % every == 0 and i >= dense and i not in absent for i in range(layers)
        ]
    write_blocks_with_experts(sizes, has_experts, every)


def write_blocks_with_experts(
    sizes: dict[str, Any], has_experts: Sequence[bool], every: int
) -> None:
    """The fields of `Experts` for which blocks have experts: a period and a number of dense blocks
    at the beginning where these say it, else one letter for each block."""
    dense = next((i for i, present in enumerate(has_experts) if present), len(has_experts))
    for period_of_experts in (1, every):
        regular = [(i + 1) % period_of_experts == 0 and i >= dense for i in range(len(has_experts))]
        if regular == list(has_experts):
            first_in_period = period_of_experts - 1
            sizes["experts.every"] = period_of_experts
            sizes["experts.dense"] = 0 if dense == first_in_period else dense
            return
    sizes["experts.every"], sizes["experts.dense"] = 1, 0
    sizes["experts.blocks"] = "".join("E" if present else "-" for present in has_experts)


def derive_small_parameters(sizes: dict[str, Any]) -> None:
    """The numbers of parameters that are neither products' nor usual biases and norms."""
    of_block, of_mixture = sizes.get("block_params", 0), 0
    if sizes.pop("sub_norms", False):  # scales of attention's output and of the network's
        of_block += sizes["hidden"] + sizes["feed_forward"]
    if sizes.pop("shared_gate", False) and sizes["experts.shared"]:
        of_mixture += sizes["hidden"]
    if sizes.pop("router_bias", False):
        of_mixture += sizes["experts.count"]
    if "reaching.shared" in sizes and "experts.count" in sizes:
        # Gemma 4: experts beside the dense network, three norms more, and scales of the router
        sizes["block_norms"] += 3
        sizes["experts.shared"] = sizes["feed_forward"]
        of_mixture += sizes["hidden"] + sizes["experts.count"]
    if of_block:
        sizes["block_params"] = of_block
    if of_mixture:
        sizes["experts.further"] = of_mixture
    if sizes.pop("post_norms", False):
        sizes["block_norms"] = 4


def check_entries(values: Sequence[object], layers: int, where: str) -> None:
    """Raise InputError unless a list has one entry for each block."""
    require(
        len(values) == layers,
        "list has not one entry for each block",
        where=where,
        got=len(values),
        expected=str(layers),
    )


def drop(sizes: dict[str, Any], prefix: str) -> None:
    """Take out the fields whose names begin with `prefix`."""
    for field in [field for field in sizes if field.startswith(prefix)]:
        del sizes[field]


def check_sizes(sizes: Mapping[str, Any], where: str) -> None:
    """Raise InputError where sizes contradict each other."""
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    require(
        heads % kv_heads == 0,
        "number of heads is not a multiple of num_key_value_heads",
        where=where,
        got=heads,
        expected=f"a multiple of {kv_heads}",
    )
    pattern = sizes.get("pattern")
    require(
        not pattern or len(pattern) == sizes["layers"],
        "hybrid_override_pattern has another length than num_hidden_layers",
        where=where,
        got=len(pattern or ""),
        expected=str(sizes["layers"]),
    )
    patch, image = sizes.get("patch", 0), sizes.get("image", 0)
    require(
        patch <= image,
        "patch_size is too large",
        where=where,
        got=patch,
        expected=f"at most the image_size ({image})",
    )
    active = sizes.get("experts.active") or 0
    count = sizes.get("experts.count", 0)
    require(
        1 <= active <= count or not count,
        "num_experts_per_tok is too large" if active else "num_experts_per_tok is 0",
        where=where,
        got=active,
        expected=f"1 to the number of experts ({count})",
    )
    borrowers = sizes.get("kv_borrowers", 0)
    require(
        borrowers <= sizes["layers"],
        "num_kv_shared_layers is too large",
        where=where,
        got=borrowers,
        expected=f"at most the number of blocks ({sizes['layers']})",
    )
