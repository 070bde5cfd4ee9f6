"""The memory model against torch's own books: weights, gradients, optimizer states, activations,
recomputation.

Activations are those of the kernels that GPUs have: fused attention, norms, dropout with a byte per
element, SwiGLU in one kernel. Sequence parallelism and published sizes by the formulas of
Korthikanti et al. 2022.
"""

from __future__ import annotations

from typing import Any

import pytest

from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.transformer import Transformer
from hetplan.profiling.models.zoo import gpt2, text_model
from hetplan.profiling.rates.times import Recomputation, kept_bytes
from hetplan.profiling.workload import STATE_BYTES_PER_PARAM

torch: Any = pytest.importorskip("torch", reason="torch's own counts need torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from fakes import kept  # noqa: E402
from fakes.references import Mixture, built  # noqa: E402
from hetplan.runtime.references import Block  # noqa: E402
from quick import rest_wide  # noqa: E402

SAMPLES = 2
MODES: tuple[Recomputation, ...] = ("none", "selective", "full")
WITHIN = 0.05


def shape_of(model: Model) -> Transformer:
    """Of a text or a vision transformer."""
    found = model.spec.shape or model.spec.encoder
    assert found is not None
    return found


def block_of(make: Any, *arguments: Any) -> Any:
    """A block in bf16 on the meta device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return make(*arguments)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "gpt2-medium",
        "llama-1.1b",
        "llama3-8b",
        "bert-large",
        "bert-moe",
        "vit-base",
        "vgg19",
    ],
)
def test_parameters_are_those_of_the_modules(name: str) -> None:
    model = load_model(name, precision="fp32")
    with torch.device("meta"):
        module = built(model)
    assert list(module.layers) == [layer.name for layer in model.layers]
    assert sum(p.numel() for p in module.parameters()) == model.params
    for described, layer in zip(model.layers, module.layers.values(), strict=True):
        own = sum(p.numel() for p in layer.parameters())
        assert own == described.params + described.tied_params


def test_states_are_those_of_adam() -> None:
    """16 bytes per parameter: weight, gradient and two moments in fp32."""
    with torch.device("meta"):
        module = torch.nn.Linear(300, 200)
        module(torch.empty(1, 300)).sum().backward()
        optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
        optimizer.step()
    held = [
        t for p in module.parameters() for t in (p, p.grad, *optimizer.state[p].values()) if t.dim()
    ]
    assert sum(t.numel() * t.element_size() for t in held) == STATE_BYTES_PER_PARAM * (
        300 * 200 + 200
    )


@pytest.mark.parametrize(
    ("name", "sequence", "mode"),
    [
        *(("gpt2", 256, mode) for mode in MODES),
        ("vit-base", None, "none"),
        *(
            pytest.param(name, sequence, mode, marks=pytest.mark.wide)
            for name, sequence in (("vit-base", None), ("gpt2-medium", 1024), ("bert-large", 512))
            for mode in MODES
            if (name, mode) != ("vit-base", "none")
        ),
    ],
)
def test_activations_of_a_block(name: str, sequence: int | None, mode: Recomputation) -> None:
    model = load_model(name, sequence=sequence, precision="bf16")
    t, layer = shape_of(model), model.layers[1]
    block = block_of(Block, t, "block")
    block.attention.selective = mode == "selective"
    x = torch.empty(SAMPLES, sequence or 197, t.hidden, dtype=torch.bfloat16, device="meta")
    run = (lambda y: checkpoint(block, y, use_reentrant=False)) if mode == "full" else None
    found = kept.kept_bytes(block, x, run=run) / SAMPLES
    before = 2.0 * model.layers[0].output
    assert kept_bytes(layer, mode, "bf16", 1, before) == pytest.approx(found, rel=WITHIN)
    if mode == "none":
        assert layer.saved_bytes("bf16") == pytest.approx(found, rel=WITHIN)


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("name", rest_wide(["llama-1.1b", "llama3-8b", "llama2-7b"], 1))
def test_activations_of_llama(name: str, mode: Recomputation) -> None:
    """Fused attention has no core that could be computed again."""
    model = load_model(name, sequence=1024, precision="bf16")
    t, layer = shape_of(model), model.layers[1]
    block = block_of(kept.LlamaBlock, t)
    x = torch.empty(SAMPLES, 1024, t.hidden, dtype=torch.bfloat16, device="meta")
    run = (lambda y: checkpoint(block, y, use_reentrant=False)) if mode == "full" else None
    found = kept.kept_bytes(block, x, run=run) / SAMPLES
    assert kept_bytes(layer, mode, "bf16", 1, 2.0 * layer.output) == pytest.approx(
        found, rel=WITHIN
    )
    if mode == "none":
        eager = kept.kept_bytes(block_of(lambda: kept.LlamaBlock(t, eager=True)), x) / SAMPLES
        assert eager - found == pytest.approx(1024 * t.feed_forward * 2)  # silu(gate), beside


def test_activations_of_experts() -> None:
    """Real routing, whatever its load: each token visits as many experts as it must."""
    model = load_model("bert-moe", sequence=128, precision="fp32")
    t = shape_of(model)
    layer = next(layer for layer in model.layers if layer.kind == "moe-block")
    assert t.experts is not None
    torch.manual_seed(0)
    block = Block(t, "block")
    block.feed_forward = Mixture(t, t.experts)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(SAMPLES, 128, t.hidden)
    # torch's index_add keeps what it adds, weighed outputs of the experts, only to know their
    # shape.
    added = t.experts.active * 128 * t.hidden * 4
    found = kept.kept_bytes(block, x, real=True) / SAMPLES - added
    assert layer.saved_bytes("fp32") == pytest.approx(found, rel=WITHIN)


def korthikanti(a: int, h: int, tensor: int, *, sequence_parallel: bool, selective: bool) -> float:
    """Bytes of a layer per s b h (2048 tokens), Table 2."""
    scores = 0.0 if selective else 5 * a * 2048 / h
    if sequence_parallel:
        return (34 + scores) / tensor
    return 10 + (24 + scores) / tensor


# GPT-3 and MT-NLG 530B: Korthikanti et al. 2022, Table 3; what selective recomputation saves:
# Section 5.
@pytest.mark.parametrize(("a", "h", "saves"), [(96, 12288, 0.70), (128, 20480, 0.65)])
@pytest.mark.parametrize("tensor", [1, 8])
def test_published_sizes(a: int, h: int, saves: float, tensor: int) -> None:
    model = load_model(
        text_model("x", "x", 2048, gpt2(2, h, a, positions=2048)), attention="standard"
    )
    layer, unit = model.layers[1], 2048 * h
    for selective, mode in ((False, "none"), (True, "selective")):
        expected = korthikanti(a, h, tensor, sequence_parallel=False, selective=selective)
        assert kept_bytes(layer, mode, "fp16", tensor, 0.0) == pytest.approx(expected * unit)  # type: ignore[arg-type]
        everything = kept_bytes(layer, mode, "fp16", 1, 0.0) / tensor  # type: ignore[arg-type]
        split = korthikanti(a, h, tensor, sequence_parallel=True, selective=selective)
        assert everything == pytest.approx(split * unit)
    assert kept_bytes(layer, "full", "fp16", tensor, 2.0 * layer.output) == 2 * unit
    whole, frugal = (kept_bytes(layer, mode, "fp16", 1, 0.0) for mode in MODES[:2])
    assert 1 - frugal / whole == pytest.approx(saves, abs=0.005)
