"""The function that a model computes, beyond its sizes: all that costs neither seconds nor bytes,
but makes it another model.

Exports write these fields for frameworks that build the model themselves. Their names follow those
of Hugging Face's configurations. `configured_functions` reads them from such a configuration.

Records of plan files hold no lists. A choice for each block is therefore a text with one digit per
block, 1 or 0.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021) and how they are scaled to longer sequences."""

    theta: float  # the base of the angles, `rope_theta`
    partial: float = 1.0  # the share of a head's width that is rotated, `partial_rotary_factor`
    kind: str = "default"  # `rope_type`: default, linear, llama3, yarn or another
    factor: float = 1.0
    # The sequence length before scaling, `original_max_position_embeddings`; None: not given.
    original: int | None = None
    low_freq_factor: float | None = None  # for kind llama3, as `high_freq_factor`
    high_freq_factor: float | None = None
    beta_fast: float | None = None  # for kind yarn, as `beta_slow`
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    # Whether pairs of neighbouring numbers turn together, not numbers half a width apart.
    interleaved: bool = False
    skipped: str = ""  # [block] 1: a block without positions; empty: none


@dataclass(frozen=True)
class Router:
    """The rule by which a mixture of experts chooses the experts of a token and weighs their
    outputs."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"  # `scoring_func`
    normalized: bool = True  # whether the weights of the chosen experts add up to 1
    scaling: float = 1.0  # factor of the weights, `routed_scaling_factor`
    groups: int = 0  # groups of experts, `n_group`; 0: experts form no groups
    group_topk: int = 0  # groups from which a token's experts come, `topk_group`
    # The score of a group is the sum of the scores of that many of its best experts.
    group_score_topk: int = 0
    expert_bias: bool = False  # whether a bias for balance takes part in the choice
    linear_bias: bool = False  # whether the router's product has a bias
    float32: bool = False  # whether the router computes in 32 bits in any training precision
    shared_gate: bool = False  # whether a gate weighs the shared expert


@dataclass(frozen=True)
class Function:
    """The function that a model computes, beyond its sizes."""

    kind: str  # Hugging Face's `model_type`
    activation: str  # `hidden_act`, as `silu`, `gelu_pytorch_tanh`, `relu2`
    norm_epsilon: float
    # Where norms stand: before each sublayer, behind it, or both.
    norms: Literal["before", "behind", "both"] = "before"
    rope: Rope | None = None  # None: no rotary positions
    router: Router | None = None  # None: no experts
    # The last keys that a token attends to in blocks with a window, itself included; None: all.
    window: int | None = None
    windowed: str = ""  # [block] 1: a block with the window; empty: all of them
    sinks: bool = False  # whether each head has a learned logit that takes part in the softmax
    clamp: float | None = None  # the largest number that enters the activation, `swiglu_limit`
    linear_offset: float = 0.0  # added to the linear half of a gated unit
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    initializer_range: float = 0.02  # standard deviation of initial weights
    # Layers of multi-token prediction beside the model, which hetplan does not plan.
    predictions: int = 0
    # Everything else that changes what the model computes, by name, joined by commas.
    others: str = ""
