"""ViT, T5 and CLIP from their configurations: parameters against published checkpoints, products
against torch's counter on the modules of transformers."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.workloads import cluster
from hetplan.adapters.exports import export
from hetplan.errors import InputError, UnsupportedError
from hetplan.plans.making import new_plan
from hetplan.profiling.models.configurations import from_config
from hetplan.profiling.models.model import load_model
from hetplan.profiling.workload import make_workload
from hetplan.replays.replay import replay
from quick import rest_wide

TOWER = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def vit(*sizes: int, patch: int = 16, image: int = 224, labels: int = 1000) -> dict[str, Any]:
    """sizes: hidden, feed-forward, layers, heads."""
    return {
        "model_type": "vit", **dict(zip(TOWER, sizes, strict=True)), "patch_size": patch,
        "image_size": image, "id2label": {str(n): f"class {n}" for n in range(labels)},
    }  # fmt: skip


def t5(*sizes: int, **more: Any) -> dict[str, Any]:
    """sizes: hidden, head, feed-forward, layers, heads."""
    keys = ("d_model", "d_kv", "d_ff", "num_layers", "num_heads")
    return {"model_type": "t5", "vocab_size": 32128, **dict(zip(keys, sizes, strict=True)), **more}


def clip(vision: tuple[int, ...], text: tuple[int, ...], patch: int, width: int) -> dict[str, Any]:
    return {
        "model_type": "clip", "projection_dim": width,
        "vision_config": {**dict(zip(TOWER, vision, strict=True)), "patch_size": patch},
        "text_config": {"vocab_size": 49408, **dict(zip(TOWER, text, strict=True))},
    }  # fmt: skip


BASE_TEXT = (512, 2048, 12, 8)
# Exact counts: of torchvision's ViT (IMAGENET1K_V1), of checkpoints on the Hugging Face hub.
PUBLISHED = {
    "vit_b_16": (86_567_656, vit(768, 3072, 12, 12)),
    "vit_b_32": (88_224_232, vit(768, 3072, 12, 12, patch=32)),
    "vit_l_16": (304_326_632, vit(1024, 4096, 24, 16)),
    "vit_l_32": (306_535_400, vit(1024, 4096, 24, 16, patch=32)),
    "t5-small": (60_506_624, t5(512, 64, 2048, 6, 8)),
    "t5-base": (222_903_552, t5(768, 64, 3072, 12, 12)),
    "t5-large": (737_668_096, t5(1024, 64, 4096, 24, 16)),
    "t5-3b": (2_851_598_336, t5(1024, 128, 16384, 24, 32)),
    "flan-t5-small": (  # heads do not divide the hidden size: d_kv gives their width
        76_961_152,
        t5(512, 64, 1024, 8, 6, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
    "flan-t5-xl": (
        2_849_757_184,
        t5(2048, 64, 5120, 24, 32, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
    "clip-vit-base-patch32": (151_277_313, clip((768, 3072, 12, 12), BASE_TEXT, 32, 512)),
    "clip-vit-base-patch16": (149_620_737, clip((768, 3072, 12, 12), BASE_TEXT, 16, 512)),
    "clip-vit-large-patch14": (
        427_616_513, clip((1024, 4096, 24, 16), (768, 3072, 12, 12), 14, 768)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_checkpoint(name: str) -> None:
    params, config = PUBLISHED[name]
    model = load_model(from_config(config, name=name))
    assert model.params == params
    assert len({layer.name for layer in model.layers}) == len(model.layers)
    assert all(layer.output > 0 for layer in model.layers[:-1]) and model.layers[-1].output == 0
    assert model.tensor_degree_fits(2) and not model.tensor_degree_fits(7)


def products(kind: str, config: dict[str, Any]) -> float:
    """FLOPs of one sample's forward pass, by torch."""
    torch = pytest.importorskip("torch", reason="counts with torch")
    hf: Any = pytest.importorskip("transformers", reason="counts the modules of transformers")
    from torch.utils.flop_counter import FlopCounterMode

    own = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        tokens = torch.zeros(1, 77 if kind == "clip" else 64, dtype=torch.long)
        images = torch.zeros(1, 3, 224, 224)
        if kind == "vit":
            made, data = hf.ViTForImageClassification(hf.ViTConfig(**own)), {"pixel_values": images}
        elif kind == "t5":
            made = hf.T5ForConditionalGeneration(hf.T5Config(**own))
            data = {"input_ids": tokens, "decoder_input_ids": tokens}
        else:
            made = hf.CLIPModel(hf.CLIPConfig(**own))
            data = {"pixel_values": images, "input_ids": tokens}
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            made.eval()(**data)
    return float(counter.get_total_flops())


@pytest.mark.parametrize("name", rest_wide(["t5-small", "vit_b_32", "clip-vit-base-patch32"], 1))
def test_products_are_those_that_torch_counts(name: str) -> None:
    config = PUBLISHED[name][1]
    kind = config["model_type"]
    own = load_model(from_config(config, name=name), sequence=64 if kind == "t5" else None)
    assert own.forward_flops() == pytest.approx(products(kind, config), rel=1e-4)


def test_a_decoder_block_passes_both_texts_on() -> None:
    """What the encoder gave goes through every stage that needs it; the last decoder block sends
    its own alone."""
    model = load_model(from_config(PUBLISHED["t5-small"][1], name="t5"), sequence=100)
    assert [layer.output for layer in model.layers] == [*[2 * 100 * 512] * 12, 100 * 512, 0]
    encoder, decoder = model.layers[2], model.layers[8]
    assert decoder.params - encoder.params == 4 * 512 * 512 + 512
    assert decoder.forward_flops() > encoder.forward_flops()
    assert decoder.saved_bytes("fp16") > encoder.saved_bytes("fp16")
    assert model.layers[-1].tied_params == 32128 * 512


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5", "vocab_size": 9}, "c: d_model: key is missing"),
        (t5(512, 64, 2048, 6, 8, num_decoder_layers=0), "num_decoder_layers: not usable"),
        ({**vit(768, 3072, 12, 12), "id2label": 3}, "id2label: not usable"),
        (vit(770, 3072, 12, 12), "not a multiple of the number of heads"),
        ({"model_type": "clip"}, "c: vision_config: key is missing .* text_config missing too"),
        ({**clip((768, 3072, 12, 12), BASE_TEXT, 32, 512), "text_config": 3}, "text_config"),
        (vit(768, 3072, 12, 12, patch=300), "patch_size"),
    ],
)
def test_errors_are_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        from_config(config, name="x", where="c")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["t5-small", "clip-vit-base-patch32"])
def test_frameworks_for_decoders_refuse_an_encoder(name: str) -> None:
    """Their scripts would start another model; hetplan's own runtime takes the user's module."""
    workload = make_workload(load_model(from_config(PUBLISHED[name][1], name=name)), cluster(), 8)
    count = len(workload.profile.layers)
    stages = [
        {"layers": [(0, count // 2)], "devices": [[0]]},
        {"layers": [(count // 2, count)], "devices": [[1]]},
    ]
    plan = new_plan(workload, [{"stages": stages, "micro_batches": [{"count": 8, "samples": 1}]}])
    assert replay(plan, workload).fits
    with pytest.raises(UnsupportedError, match="layers other than one embedding, blocks and one"):
        export(plan, "megatron")
    assert "torchrun" in export(plan, "torchrun")
