"""Memory of adapters against torch's own books with `peft` and, where it is installed,
bitsandbytes: bytes of weights, gradients and Adam's states, and of all tensors that autograd keeps
of a block for the backward pass of one sample.

`peft` makes adapters in fp32 by default, whose products keep further copies of their inputs; here
they have the model's own type, as hetplan counts them.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")
transformers: Any = pytest.importorskip("transformers", reason="an extra of the tests")
peft: Any = pytest.importorskip("peft", reason="peft is an extra of hetplan")

from fakes.fused import with_fused_kernels  # noqa: E402
from fakes.lora import packed  # noqa: E402
from fakes.one_device import config_file, one_device, only_layout  # noqa: E402
from hetplan.profiling.models.adapters import parse_adapters  # noqa: E402
from hetplan.profiling.models.model import load_model  # noqa: E402

pytestmark = pytest.mark.wide

WITHIN = 0.03
TOKENS, WORDS, RANK = 128, 1000, 16
LLAMA = {
    "hidden_size": 256, "num_attention_heads": 8, "head_dim": 32,
    "num_key_value_heads": 2, "intermediate_size": 896, "vocab_size": WORDS, "bos_token_id": 0,
    "eos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
GPT = {
    "n_embd": 256, "n_head": 8, "n_positions": TOKENS, "vocab_size": WORDS,
    "bos_token_id": 0, "eos_token_id": 0, "activation_function": "gelu_pytorch_tanh",
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {"llama": LLAMA, "gpt2": GPT}
DEPTH = {"llama": "num_hidden_layers", "gpt2": "n_layer"}
# Bytes of the masks of two dropouts in a block of GPT-2, a byte per element as on a GPU. On a CPU
# torch keeps wider ones, so that nothing is dropped here.
MASKS = {"gpt2": 2 * TOKENS * 256}
# (model type, names of modules in `--adapters`, names that peft takes)
CASES = [
    ("llama", "", "all-linear"),
    ("llama", ":q,k,v,o", ["q_proj", "k_proj", "v_proj", "o_proj"]),
    ("llama", ":q,v", ["q_proj", "v_proj"]),
    ("llama", ":gate,up,down", ["gate_proj", "up_proj", "down_proj"]),
    ("gpt2", "", "all-linear"),
    ("gpt2", ":qkv", ["attn.c_attn"]),
]
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def with_peft(config: Any, dtype: Any, modules: Any) -> Any:
    """The model of a configuration with adapters of `peft` in its own type."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    lora = peft.LoraConfig(r=RANK, target_modules=modules, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(with_fused_kernels(model), lora, autocast_adapter_dtype=False)
    return adapted.train()


def kept_bytes(model: Any) -> int:
    """Bytes of the tensors that autograd keeps of a sample, without weights and logits."""
    held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}
    alive = []  # so that no storage is given out twice

    def keep(tensor: Any) -> Any:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held and WORDS not in tensor.shape:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    words = torch.arange(TOKENS)[None] % WORDS
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=words, labels=words, use_cache=False)
    return sum(kept.values())


@dataclass(frozen=True)
class Books:
    """Bytes of a model with some number of blocks."""

    weights: float
    gradients: float
    optimizer: float
    kept: float

    def beside(self, fewer: Books) -> Books:
        """The bytes of the blocks that another model does not have."""
        pairs = zip(astuple(self), astuple(fewer), strict=True)
        return Books(*(more - less for more, less in pairs))


def torchs(module: Any) -> Books:
    """The bytes of a module in torch; Adam has its states, and fp32 masters of narrower weights."""
    trained = [p for p in module.parameters() if p.requires_grad]
    masters = [p if p.dtype == torch.float32 else p.detach().float() for p in trained]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(p.detach()) for p in masters])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    own_masters = [m for m, p in zip(masters, trained, strict=True) if m is not p]
    return Books(
        weights=sum(p.nbytes for p in module.parameters()),
        gradients=sum(p.nbytes for p in trained),
        optimizer=sum(t.nbytes for t in (*states, *own_masters)),
        kept=kept_bytes(module),
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("kind", "text", "modules"), CASES)
def test_a_blocks_memory_is_that_of_torchs_books(
    kind: str, text: str, modules: Any, precision: str, tmp_path: Path
) -> None:
    """Of the third block: before the first adapter torch keeps nothing."""
    torch_books, own_books = [], []
    for blocks in (2, 3):
        path, config = config_file(tmp_path, kind, SIZES[kind] | {DEPTH[kind]: blocks})
        torch_books.append(torchs(with_peft(config, PRECISIONS[precision], modules)))
        adapters = parse_adapters(f"lora:{RANK}{text}")
        model = load_model(path, sequence=TOKENS, precision=precision, adapters=adapters)
        held = only_layout(model, one_device(tmp_path)).held[0]
        own_books.append(Books(held.weights, held.gradients, held.optimizer, held.activations))
    fewer, more = own_books
    of_torch = torch_books[1].beside(torch_books[0])
    of_block = more.beside(fewer)
    assert of_block.weights == of_torch.weights and of_block.gradients == of_torch.gradients
    assert of_block.optimizer == of_torch.optimizer
    assert (more.weights, more.gradients) == (torch_books[1].weights, torch_books[1].gradients)
    masks = MASKS.get(kind, 0)
    assert of_block.kept == pytest.approx(of_torch.kept + masks, rel=WITHIN)


def test_packed_weights_are_those_of_bitsandbytes() -> None:
    """A weight in 4 bits, and its share of the scales; the tables of a module, 1088 bytes, are left
    out."""
    layers = pytest.importorskip("bitsandbytes.nn", reason="bitsandbytes need not be installed")
    rows, columns = 1024, 512
    options = {"bias": False, "quant_type": "nf4", "compress_statistics": True}
    weight = layers.Linear4bit(rows, columns, **options).to("cpu").weight
    state = weight.quant_state
    sizes = [weight.nbytes, state.absmax.nbytes, state.state2.absmax.nbytes]
    assert sizes == [part.nbytes for part in packed(torch.empty(columns, rows), 4)]
    narrow = parse_adapters("lora:1", 4).weight_bytes(rows)
    assert narrow is not None and sum(sizes) == pytest.approx(narrow * rows * columns)
    assert state.code.nbytes + state.state2.code.nbytes == 1088
