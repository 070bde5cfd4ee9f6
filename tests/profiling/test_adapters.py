"""Adapters beside frozen weights: what is trained, what is held, and what both take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fakes.lora import Network, weight_bytes, with_lora
from fakes.one_device import config_file, one_device, only_layout
from fakes.small_models import small_model
from hetplan.errors import HetplanError, InputError
from hetplan.profiling.frameworks import HETPLAN, MOMENT_BYTES_IN_8_BITS
from hetplan.profiling.inputs.inputs import Inputs
from hetplan.profiling.models.adapters import parse_adapters
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.operators import DEFAULT_STACK, Elementwise, Matmul
from hetplan.profiling.profiles.predict import predict, profile_layers
from hetplan.profiling.rates.times import Rates, layer_time
from hetplan.profiling.workload import make_workload

WITHIN = 0.03
# Llama-3-8B with two of its blocks, in the keys of Hugging Face
LLAMA = {
    "hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 112, "vocab_size": 96, "pad_token_id": 0,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
OF_GROUPS = ("num_key_value_heads", "head_dim")
GPT = {
    "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def module_of(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The module of a configuration without memory for its weights."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


@pytest.mark.parametrize(
    ("text", "trained"),
    [
        ("lora:16:q,k,v,o", 13_631_488),
        ("lora:16:q_proj,k_proj,v_proj,o_proj", 13_631_488),
        ("lora:16", 41_943_040),
        ("LoRA:16:all-linear", 41_943_040),
        ("lora:8:v", 32 * 8 * (4096 + 1024)),
        # Megatron-LM has one module of queries, keys and values
        ("lora:16:linear_qkv,linear_proj", 32 * 16 * (4096 + 6144 + 4096 + 4096)),
    ],
)
def test_trained_parameters_of_llama_3_8b(text: str, trained: int) -> None:
    model = load_model("llama3-8b", sequence=128, adapters=text)
    assert model.trained == trained
    assert model.params == load_model("llama3-8b", sequence=128).params + trained
    assert f"{trained:,} parameters are trained" in model.notes[-1]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", SMALL), ("gpt2", GPT), ("phi3", SMALL), ("qwen3", SMALL), ("glm4", SMALL),
        ("gpt_neox", {key: SMALL[key] for key in SMALL if key not in OF_GROUPS}),
    ],
)  # fmt: skip
def test_trained_parameters_are_those_of_torch(
    kind: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """Beside each linear module of the blocks as transformers builds them, joint ones too."""
    path, config = config_file(tmp_path, kind, sizes)
    adapted = with_lora(module_of(config), 4)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert load_model(path, sequence=16, adapters="lora:4").trained == trained


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("modules", [None, ATTENTION])
def test_states_are_those_of_torch(
    bits: int, modules: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """Weights, gradients and Adam's states in bf16 with fp32 masters, on one device."""
    path, config = config_file(tmp_path, "llama", LLAMA)
    module = with_lora(module_of(config), 16, modules)
    trained = [p for p in module.parameters() if p.requires_grad]
    masters = [nn.Parameter(p.detach().float()) for p in trained]
    optimizer = torch.optim.AdamW(masters, foreach=False)
    for parameter, master in zip(trained, masters, strict=True):
        parameter.grad, master.grad = torch.empty_like(parameter), torch.empty_like(master)
    optimizer.step()
    moments = sum(
        state[name].nbytes
        for state in optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    )
    text = "lora:16" if modules is None else f"lora:16:{','.join(modules)}"
    model = load_model(path, sequence=512, precision="bf16", adapters=parse_adapters(text, bits))
    layout = only_layout(model, one_device(tmp_path))
    held = layout.held[0]
    assert held.weights == pytest.approx(weight_bytes(module, bits), rel=WITHIN)
    assert held.weights == pytest.approx(weight_bytes(module, bits), rel=1e-3)
    assert held.gradients == sum(p.grad.nbytes for p in trained if p.grad is not None)
    assert held.optimizer == sum(p.nbytes for p in masters) + moments
    largest = 4096 * 14336 * 2  # bytes of the largest module in bf16
    assert held.casts == (0 if bits == 16 else largest)


def test_moments_in_8_bits(tmp_path: Path) -> None:
    """bitsandbytes: a byte for each moment, and a scale in 32 bits for every 256 of them."""
    model = load_model("llama3-8b", sequence=128, adapters="lora:16")
    cluster = one_device(tmp_path)
    narrow = HETPLAN.with_choices(moment_bytes=MOMENT_BYTES_IN_8_BITS)
    plain, in_8_bits = (
        only_layout(model, cluster, framework).held[0].optimizer for framework in (HETPLAN, narrow)
    )
    saved = plain - in_8_bits
    assert saved == pytest.approx(2 * model.trained * (4 - 1 - 4 / 256))


def kept_by_torch(module: nn.Module, hidden: int, tokens: int) -> int:
    """Bytes of the tensors that autograd keeps, without weights."""
    weights = {id(p) for p in module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in weights and tensor.ndim == 2 and tensor.shape[0] == tokens:
            kept[tensor.untyped_storage()._cdata] = tensor.nbytes
        return tensor

    alive = []

    def keep_alive(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)  # so that no storage is given out twice
        return keep(tensor)

    x = torch.ones(tokens, hidden, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep_alive, lambda tensor: tensor):
        module(x)
    return sum(kept.values())


@pytest.mark.parametrize("modules", ["gate,up,down", "down", "gate", "q"])
def test_frozen_modules_keep_no_inputs(modules: str, tmp_path: Path) -> None:
    """Beside a frozen module without an adapter torch keeps no input; A keeps it, and B keeps A's
    result. The difference from full training is that of the described block."""
    hidden, inner, tokens, rank = 64, 112, 8, 4
    full = kept_by_torch(Network(hidden, inner), hidden, tokens)
    names = [f"{name}_proj" for name in modules.split(",")]
    adapted = kept_by_torch(with_lora(Network(hidden, inner), rank, names), hidden, tokens)
    path, _ = config_file(tmp_path, "llama", SMALL)
    saved = []
    for text in (None, f"lora:{rank}:{modules}"):
        block = load_model(path, sequence=tokens, precision="fp32", adapters=text).layers[1]
        of_network = ("up input", "down input", "up adapter", "down adapter")
        saved.append(sum(t.size("fp32") for t in block.saved if t.name in of_network))
    assert saved[1] - saved[0] == adapted - full


def test_backward_computes_no_gradients_of_frozen_weights() -> None:
    """A third of the work is gone; the embedding has no backward pass; the head passes on."""
    plain, adapted = (
        load_model("llama3-8b", sequence=512, adapters=text) for text in (None, "lora:1:q")
    )
    ratio = adapted.backward_flops() / plain.backward_flops()
    assert 0.5 < ratio < 0.56  # attention's own products have both gradients
    first = adapted.layers[0]
    assert first.saved == () and first.backward_flops() == 0
    assert not any(op.backward for op in first.operators if isinstance(op, Elementwise))
    assert adapted.layers[-1].backward_flops() == plain.layers[-1].backward_flops() / 2


def test_casts_take_the_seconds_of_a_copy(tmp_path: Path) -> None:
    """In each pass every weight is read in 4 bits and written in 16."""
    cluster = one_device(tmp_path)
    (kind,) = cluster.types
    models = [
        load_model("llama3-8b", sequence=512, adapters=parse_adapters("lora:16", bits))
        for bits in (16, 4)
    ]
    rates = Rates(kind, cluster.specs[kind], "fp16", replace(DEFAULT_STACK, host_seconds=0.0))
    plain, narrow = (layer_time(model.layers[1], rates) for model in models)
    weights = 218_103_808  # of a block's modules
    moved = weights * (2 + 4.127 / 8)
    copy = rates.moved_seconds(moved / 2, "copy")
    assert narrow.forward - plain.forward == pytest.approx(copy, rel=1e-3)
    assert narrow.backward - plain.backward == pytest.approx(copy, rel=1e-3)


def test_a_tied_head_has_a_frozen_copy_apart_from_the_embedding(tmp_path: Path) -> None:
    """Frozen tied weights are copied to a last stage, and never reduced."""
    path, _ = config_file(tmp_path, "llama", {**SMALL, "tie_word_embeddings": True})
    model = load_model(path, sequence=16, precision="bf16", adapters="lora:4")
    embedding, *_, head = profile_layers(model)
    assert embedding.frozen_bytes == head.frozen_tied_bytes == 96 * 64 * 2
    assert (embedding.param_bytes, head.param_bytes, head.tied_param_bytes) == (0, 0, 0)


def test_a_plan_file_keeps_the_adapters(tmp_path: Path) -> None:
    """The workload of the inputs has the same layers and the same profile."""
    model = load_model("llama3-8b", sequence=128, adapters=parse_adapters("lora:8:q,v", 4))
    workload = make_workload(model, one_device(tmp_path), 2)
    inputs = Inputs.of(workload)
    assert inputs is not None
    written = Inputs.model_validate_json(inputs.model_dump_json())
    names = [layer.name for layer in model.layers]
    again = written.model.model("llama3-8b", names, 128, "fp16", None)
    assert again.layers == model.layers
    shape = again.spec.shape
    assert shape is not None and shape.adapters is not None
    assert (shape.adapters.text, again.trained) == (
        "LoRA of rank 8 on q,v, base in 4 bits", model.trained,
    )  # fmt: skip
    assert written.profile.profile(names).layers == workload.profile.layers


@pytest.mark.parametrize(
    ("text", "bits", "message"),
    [
        ("lora", 16, r"^--adapters: adapters are not usable \(got 'lora', expected lora:RANK or"),
        ("lora:0", 16, "expected lora:RANK or"),
        ("lora:x:q", 16, "expected lora:RANK or"),
        ("dora:8", 16, "adapters are not usable"),
        ("lora:8:", 16, "names no module"),
        ("lora:8:q,all-linear", 16, "all-linear stands for all modules"),
        ("lora:8", 5, r"^--base: .* \(got 5, expected 16 or 8 or 4\)$"),
    ],
)
def test_unusable_adapters_are_refused(text: str, bits: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_adapters(text, bits)


@pytest.mark.parametrize(
    ("model", "text", "message"),
    [
        ("llama3-8b", "lora:8:quary", "llama3-8b has no module 'quary'"),
        ("gpt2", "lora:8:q", "gpt2 has no module 'q'"),
        ("vit-base", "lora:8", "adapters are for language models"),
    ],
)
def test_models_without_such_modules_are_refused(model: str, text: str, message: str) -> None:
    with pytest.raises(HetplanError, match=message):
        load_model(model, adapters=text)


def test_all_kinds_of_decoders_take_adapters(tmp_path: Path) -> None:
    """Hybrids and models whose blocks differ among them."""
    path = tmp_path / "config.json"
    for kind in ("qwen3_next", "bamba", "granitemoehybrid", "gpt_neo", "gemma3n_text"):
        config, params = small_model(kind)
        path.write_text(json.dumps(config))
        model = load_model(path, sequence=16, adapters=parse_adapters("lora:4", 4))
        assert model.trained > 0 and model.params - model.trained == params
        assert all(0 <= layer.quantised <= layer.frozen for layer in model.layers)


def test_a_profile_of_full_training_is_refused(tmp_path: Path) -> None:
    cluster = one_device(tmp_path)
    profile = predict(load_model("gpt2", sequence=128), cluster, micro_batches=[1])
    adapted = load_model("gpt2", sequence=128, adapters="lora:8")
    with pytest.raises(InputError, match="frozen weights of profile and model differ"):
        make_workload(adapted, cluster, 2, profile=profile)


def test_products_of_experts_have_an_adapter_each(tmp_path: Path) -> None:
    """Of each of four experts; the router has none."""
    sizes = {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}
    path, _ = config_file(tmp_path, "mixtral", sizes)
    layer = load_model(path, sequence=16, adapters="lora:4:gate,up,down").layers[1]
    assert layer.trained == 4 * 3 * 4 * (64 + 112)
    routers = [op for op in layer.operators if isinstance(op, Matmul) and op.name == "router"]
    assert [op.frozen for op in routers] == [True]
