"""Model chains: parameters against published counts, FLOPs and saved bytes against closed
formulas."""

from __future__ import annotations

import pytest

from hetplan.errors import InputError
from hetplan.profiling.models import Model, load_model
from hetplan.profiling.operators import Elementwise, Matmul
from hetplan.profiling.zoo import BUILT_IN, gpt2, text_model

PUBLISHED = {name: spec.published for name, spec in BUILT_IN.items() if spec.published is not None}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_agree_with_the_published_count(name: str) -> None:
    published = PUBLISHED[name]
    exact = not published.source.startswith(("the name", "released"))
    tolerance = 0.0 if exact else 0.005
    assert load_model(name).params == pytest.approx(published.params, rel=tolerance, abs=0), (
        published.source
    )


def test_all_models_but_one_have_a_published_count() -> None:
    assert set(BUILT_IN) - set(PUBLISHED) == {"transgan-amp"}
    rounded = {name for name, p in PUBLISHED.items() if p.source.startswith("the name")}
    # named by size in the papers, never released
    assert rounded == {"glm-67b", "llama-0.5b", "bert-1.1b"}


def test_glm_130b_has_the_parameters_of_its_release() -> None:
    """Shapes of the released configuration and code; the name counts the embedding at both ends of
    the pipeline."""
    h, inner, blocks, vocabulary = 12288, 32768, 70, 150528
    attention = h * 3 * h + 3 * h + h * h + h
    feed_forward = h * 2 * inner + 2 * inner + inner * h + h  # GeGLU
    embedding = vocabulary * h
    model = load_model("glm-130b")
    assert model.params == embedding + blocks * (attention + feed_forward + 4 * h) + 2 * h
    assert model.params + embedding == pytest.approx(130e9, rel=0.005)
    assert model.layers[-1].tied_params == embedding


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_chains_are_well_formed(name: str) -> None:
    model = load_model(name)
    assert len({layer.name for layer in model.layers}) == len(model.layers)
    assert all(layer.output > 0 for layer in model.layers[:-1]) and model.layers[-1].output == 0
    assert all(layer.operators and layer.params >= 0 for layer in model.layers)
    assert all(
        0 <= layer.replicated_saved_bytes("fp16") <= layer.saved_bytes("fp16")
        for layer in model.layers
    )
    assert model.tensor_degree_fits(1) and BUILT_IN[name].source
    assert 0 < model.backward_flops() <= 2 * model.forward_flops()


def test_amp_model_is_gpt2_medium_with_its_padded_vocabulary() -> None:
    amp, medium = load_model("gpt2-amp"), load_model("gpt2-medium")
    assert amp.params - medium.params == (52256 - 50257) * 1024
    assert amp.layers[1:-1] == medium.layers[1:-1] and len(amp.layers) == 26


@pytest.mark.parametrize(
    ("hidden", "heads", "sequence"), [(768, 12, 1024), (1024, 16, 512), (6144, 64, 1000)]
)
def test_block_follows_the_published_formulas(hidden: int, heads: int, sequence: int) -> None:
    spec = text_model("x", "x", sequence, gpt2(2, hidden, heads))
    block = load_model(spec).layers[1]
    s, h, a = sequence, hidden, heads
    # Narayanan et al. 2021, Appendix: 24 s h^2 + 4 s^2 h forward.
    assert block.forward_flops() == 24 * s * h * h + 4 * s * s * h
    assert block.backward_flops() == 2 * block.forward_flops()
    # Korthikanti et al. 2022, equations 1 and 2.
    assert block.saved_bytes("fp16") == s * h * 34 + 5 * a * s * s
    assert block.replicated_saved_bytes("fp16") == 10 * s * h
    # Shoeybi et al. 2019, Section 3: two all-reduces forward, two backward, of s h elements.
    assert block.tensor_bytes("fp16") == 4 * 2 * s * h
    assert block.activation_bytes("fp32") == 4 * s * h
    assert block.params == 12 * h * h + 13 * h


def test_head_follows_the_published_formulas() -> None:
    head = load_model("gpt2-medium").layers[-1]
    s, h, v = 1024, 1024, 50257
    assert head.forward_flops() == 2 * s * h * v
    assert head.saved_bytes("fp16") == 4 * s * h + 4 * s * v  # Korthikanti et al. 2022, Section 4.3
    assert head.params == 2 * h and head.tied_params == v * h
    assert load_model("llama2-7b").layers[-1].tied_params == 0


def test_whole_model_flops_of_gpt3_formula() -> None:
    """Narayanan et al. 2021, equation 3 (without recomputation: 72 instead of 96), exact to
    rounding."""
    s, h, layers, v = 2048, 2304, 24, 51200
    model = load_model(text_model("x", "x", s, gpt2(layers, h, 24, vocabulary=v, positions=s)))
    expected = 72 * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model.forward_flops() + model.backward_flops() == pytest.approx(expected, rel=1e-12)


def test_grouped_queries_and_fused_attention_save_less() -> None:
    llama, wide = (
        load_model("llama3-8b").layers[1],
        load_model("llama2-7b", sequence=8192).layers[1],
    )
    keys = {
        layer: next(t for t in layer.saved if t.name == "keys and values").elements
        for layer in (llama, wide)
    }
    assert keys[wide] == 4 * keys[llama]
    # No s x s tensor is kept: saved bytes grow linearly with the sequence.
    assert load_model("llama2-7b", sequence=8192).layers[1].saved_bytes("fp16") == 2 * load_model(
        "llama2-7b", sequence=4096
    ).layers[1].saved_bytes("fp16")


def test_vgg_flops_match_the_published_19_6_billion_products() -> None:
    # He et al. 2016, Table 1: VGG-19 takes 19.6e9 multiply-adds.
    assert load_model("vgg19").forward_flops() / 2 == pytest.approx(19.6e9, rel=0.01)


def test_vit_flops_match_the_published_figure() -> None:
    # torchvision's model table: 17.56e9 multiply-adds for vit_b_16.
    assert load_model("vit-base").forward_flops() / 2 == pytest.approx(17.56e9, rel=0.01)


def test_experts_cost_what_active_tokens_cost() -> None:
    model = load_model("bert-moe")
    dense, moe = model.layers[1], model.layers[2]
    assert (dense.kind, moe.kind) == ("block", "moe-block")
    router = 2 * 512 * 768 * 8
    up_and_down = 2 * 2 * 512 * 768 * 3072
    assert moe.forward_flops() - dense.forward_flops() == router + up_and_down  # top 2 instead of 1
    assert moe.params - dense.params == 768 * 8 + 7 * (2 * 768 * 3072 + 3072 + 768)


def test_transgan_has_two_kinds_of_blocks() -> None:
    blocks = [layer for layer in load_model("transgan-amp").layers if layer.kind == "block"]
    assert len(blocks) == 24
    assert {b.output for b in blocks[:12]} == {81 * 1024} and {b.output for b in blocks[12:]} == {
        288 * 288 * 16
    }
    # No norm parameters, no query-key-value biases, but biases everywhere else.
    assert blocks[0].params == 12 * 1024**2 + 6 * 1024 and blocks[-1].params == 12 * 16**2 + 6 * 16
    # windows, not all pairs
    assert blocks[-1].saved_bytes("fp16") < 2 * 288 * 288 * (16 * 17 + 4 * 256)


def test_tensor_parallelism_shrinks_products_and_nothing_else() -> None:
    for op in load_model("llama2-7b").layers[1].operators:
        if isinstance(op, Matmul):
            assert op.shape(2, 4).flops == op.shape(2, 1).flops / 4
        else:
            assert isinstance(op, Elementwise)
            assert op.moved(2, 4) == op.moved(2, 1) / (4 if op.split else 1)


def test_megatron_splits_columns_then_rows() -> None:
    """Shoeybi et al. 2019, Section 3: no communication between the two products of each pair."""
    splits = {
        op.name: op.split for op in load_model("gpt2").layers[1].operators if isinstance(op, Matmul)
    }
    assert splits == {
        "qkv": "n",
        "scores": "count",
        "context": "count",
        "attention-output": "k",
        "up": "n",
        "down": "k",
    }


@pytest.mark.parametrize(
    ("name", "degrees"),
    [("gpt2", {1, 2, 4}), ("gpt2-xl", {1}), ("llama2-70b", {1, 2, 4, 8}), ("vgg19", {1})],
)
def test_tensor_degrees_divide_heads(name: str, degrees: set[int]) -> None:
    assert {tp for tp in (1, 2, 4, 8, 16) if load_model(name).tensor_degree_fits(tp)} == degrees


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt2-mdium", {}, "unknown model 'gpt2-mdium'; did you mean gpt2-medium"),
        ("llama3", {}, "did you mean llama3-8b, llama3-70b"),
        ("g" * 300, {}, "unknown model 'gggg"),
        ("./" + "g" * 300, {}, "cannot be read: .*too long"),
        (
            "gpt2",
            {"sequence": 1025},
            r"longer than the learned positions \(got 1025, expected at most 1024\)",
        ),
        ("gpt2", {"sequence": 0}, r"gpt2: sequence length is not usable \(got 0"),
        ("llama2-7b", {"sequence": 10**9 + 1}, "sequence length is not usable"),
        (
            "vgg19",
            {"sequence": 128},
            r"vgg19: this model takes images and has no sequence length \(got 128",
        ),
        (
            "gpt2",
            {"precision": "fp8"},
            r"unknown precision 'fp8'.* \(expected one of fp16, bf16, fp32",
        ),
    ],
)
def test_errors(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(name, **options)  # type: ignore[arg-type]


def test_images_count_as_one_token() -> None:
    model: Model = load_model("vgg19")
    assert model.sequence is None and model.tokens_per_sample == 1
    assert load_model("gpt2", sequence=256).tokens_per_sample == 256
