"""Whether a plan's degrees divide its model as a framework wants it: heads, widths, experts and
tokens."""

from collections.abc import Iterator

from hetplan.adapters.exports.grid import Grid
from hetplan.plans.degrees import Degrees
from hetplan.profiling.models.transformer import Transformer

Division = tuple[str, int, int]
"""(name of the divided quantity, its size, number of ranks)."""


def check_division(grid: Grid, degrees: Degrees, *, shares_keys: bool = True) -> None:
    """Refuse a plan whose degrees do not divide the model evenly. Nothing is refused where the
    model's shape is unknown.

    shares_keys: whether several tensor ranks may hold the same key and value heads, as in Megatron
    (`TransformerConfig.__post_init__` of megatron-core).
    """
    shape = grid.shape
    if shape is None:
        return
    divisions = [*token_divisions(grid, shape, degrees)]
    for tensor in sorted(set(grid.widths)):
        divisions += width_divisions(shape, degrees, tensor, shares_keys=shares_keys)
    for what, number, ranks in divisions:
        grid.refuse(
            number % ranks,
            f"{number} {what} on {ranks} ranks",
            "the even division, which it wants: it ends with an error",
        )
    expert_tensor = degrees.expert_tensor if degrees.expert > 1 else max(grid.widths)
    grid.refuse(
        shape.experts is not None and shape.feed_forward_bias and expert_tensor > 1,
        f"experts with biases in {expert_tensor} tensor parts",
        "the tensor parts of experts, which have to be whole (expert tensor degree 1)",
    )


def width_divisions(
    shape: Transformer, degrees: Degrees, tensor: int, *, shares_keys: bool
) -> Iterator[Division]:
    """Everything that tensor ranks and expert ranks divide. tensor: the tensor degree."""
    yield "attention heads", shape.heads, tensor
    keys_are_shared = shares_keys and tensor % shape.kv_heads == 0
    if shape.latent is None and not keys_are_shared:
        yield "key and value heads", shape.kv_heads, tensor
    experts = shape.experts
    if experts is None or not all(map(experts.in_block, range(shape.layers))):
        yield "inner width of feed-forward networks", shape.feed_forward, tensor
    if experts is not None:
        expert_tensor = degrees.expert_tensor if degrees.expert > 1 else tensor
        yield "inner width of experts", experts.width or shape.feed_forward, expert_tensor
        yield "inner width of the shared expert", experts.shared, tensor
        yield "experts", experts.count, degrees.expert


def token_divisions(grid: Grid, shape: Transformer, degrees: Degrees) -> Iterator[Division]:
    """Everything that ranks divide by tokens."""
    tensor, context = max(grid.widths), degrees.context
    tokens = grid.plan.workload.sequence or 0
    if degrees.sequence_parallel:
        yield "tokens of a sample", tokens, tensor * context
    if context > 1:
        # Every context rank takes a part from the front and one from the end of a sample.
        yield "tokens of a sample", tokens, 2 * context
    if degrees.exchange == "all-to-all":
        yield "attention heads", shape.heads, tensor * context
