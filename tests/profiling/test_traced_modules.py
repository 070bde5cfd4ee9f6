"""Modules traced on fake tensors: what is counted, held against torch's own counts and against
descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hetplan.errors import InputError, UnsupportedError
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.operators import Layer

torch: Any = pytest.importorskip("torch", reason="tracing needs torch")

from fakes import networks  # noqa: E402
from fakes.lora import with_lora  # noqa: E402
from hetplan.runtime.tracing import (  # noqa: E402
    counter,
    layers as traced,
)

H, S, V, HEADS = networks.WIDTH, networks.TOKENS, networks.VOCABULARY, networks.HEADS


def flops(layer: Layer, samples: int = 1) -> float:
    """FLOPs of the traced operators of a layer, both passes."""
    shapes = [op.shape(samples) for op in layer.operators]
    return sum(shape.flops for shape in shapes if shape is not None)


def counted_by_torch(module: Any, samples: int) -> int:
    """FLOPs of one iteration by torch's counter, on real tensors."""
    from torch.utils.flop_counter import FlopCounterMode

    x, targets = module.batch(0, 0, samples)
    with FlopCounterMode(display=False) as counter:
        loss = module(x, targets) if isinstance(module, networks.Text) else module(x).sum()
        loss.backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("make", [networks.Text, networks.Images])
@pytest.mark.parametrize("samples", [1, 5])
def test_flops_are_those_that_torch_counts(make: Any, samples: int) -> None:
    module = make()
    found = traced.trace(module, name="x", precision="fp32").chain()
    own = sum(flops(layer, samples) for layer in found)
    # torch's counter takes CPU attention for no product; ours has 2 and 5 of them
    attention = 7 * 2 * samples * S * S * H * 3 if make is networks.Text else 0
    assert own - attention == counted_by_torch(module, samples)


def test_groups_of_a_convolution_share_its_work() -> None:
    """Forward and two products backward of 7 x 7 pixels; torch's counter forgets the groups in one
    of them."""
    for groups in (1, 2):
        layer = traced.trace(networks.Images(groups), name="x", precision="fp32").chain()[1]
        assert flops(layer) == 3 * 2 * 49 * 9 * 8 * 16 / groups


def test_layers_parameters_and_what_is_sent_on() -> None:
    model = load_model(traced.trace(networks.Text(), name="text", precision="fp16").spec())
    assert [layer.name for layer in model.layers] == [
        "embed", "body.blocks.0", "body.blocks.1", "body.blocks.2", "head",
    ]  # fmt: skip
    assert model.sequence == S
    block = 12 * H * H + 9 * H + 3 * H
    assert [layer.params for layer in model.layers] == [V * H, block, block, block, 0]
    assert model.layers[-1].tied_params == V * H
    assert [layer.output for layer in model.layers] == [S * H] * 4 + [0]
    assert len({layer.operators for layer in model.layers[1:4]}) == 1
    skipping = traced.trace(networks.Text(skip=True), name="x", precision="fp16").chain()
    assert [layer.output for layer in skipping] == [S * H, 2 * S * H, 2 * S * H, S * H, 0]


def test_frozen_parameters_are_counted_apart() -> None:
    """Beside them adapters are trained, and no product computes the gradient of a frozen weight."""
    module = networks.Text()
    full = traced.trace(module, name="text", precision="fp16").chain()
    found = traced.trace(with_lora(networks.Text(), 2), name="text", precision="fp16").chain()
    assert [layer.frozen for layer in found] == [layer.params for layer in full]
    assert found[-1].frozen_tied == full[-1].tied_params == V * H
    adapters = sum(p.numel() for p in with_lora(networks.Text(), 2).parameters() if p.requires_grad)
    assert sum(layer.trained for layer in found) == adapters > 0
    assert sum(map(flops, found[1:-1])) < 0.8 * sum(map(flops, full[1:-1]))


def test_what_is_kept_is_what_the_kernels_of_a_gpu_keep() -> None:
    """Fused attention keeps queries, keys, values, its output and fp32 sums; dropout a byte per
    element."""
    found = traced.trace(networks.Text(), name="x", precision="fp16").chain()[1]
    norms = 2 * 2 * S * 2  # mean and deviation; of an RMSNorm, too
    elements = (1 + 1 + 3 + 1 + 1 + 1 + 4 + 4) * S * H  # inputs of norms, qkv, out, up, gelu, down
    assert found.saved_bytes("fp16") == pytest.approx(
        2 * elements + S * H + 4 * S * HEADS + norms, rel=1e-3
    )


def test_traffic_of_simple_operators() -> None:
    a, b = torch.zeros(8, 16), torch.zeros(16, 4)
    assert counter.traffic("aten.mm", (a, b), {}, a @ b) == (4 * (128 + 64), 4 * 32)
    assert counter.traffic("aten.add", (a, torch.zeros(1, 16).expand(8, 16)), {}, a) == (
        4 * (128 + 16),
        4 * 128,
    )
    table, rows = torch.zeros(1000, 4), torch.zeros(3, dtype=torch.int64)
    assert counter.traffic("aten.embedding", (table, rows), {}, table[rows]) == (48 + 24, 48)
    assert counter.traffic("aten.zeros_like", (a,), {}, a) == (0, 4 * 128)


def test_operators_without_a_rule_are_listed_and_counted_as_memory() -> None:
    found = traced.trace(networks.Odd(), name="odd", precision="fp32")
    assert any("linalg" in name for name in found.without_rule())
    assert "no rule for" in found.spec().notes[0]
    assert traced.trace(networks.Text(), name="text", precision="fp32").without_rule() == {}


class Named(networks.Text):
    """The same with its data by name, as `hetplan run` takes them, too."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def batch(self, step: int, first: int, last: int) -> Any:
        x, targets = super().batch(step, first, last)
        return {"targets": targets, self.key: x}

    def forward(self, targets: Any, **inputs: Any) -> Any:  # type: ignore[override]
        return super().forward(inputs[self.key], targets)


def test_dictionaries_of_arguments_are_traced_like_pairs() -> None:
    pair = traced.trace(networks.Text(), name="x", precision="fp32")
    named = traced.trace(Named("input_ids"), name="x", precision="fp32")
    assert (named.layers, named.operator_lists) == (pair.layers, pair.operator_lists)
    assert named.sequence == pair.sequence == S
    # other names do not say that they are texts
    assert traced.trace(Named("places"), name="x", precision="fp32").sequence is None


def test_data_that_cannot_be_had_are_one_line() -> None:
    class WithoutData(networks.Text):
        def batch(self, step: int, first: int, last: int) -> Any:
            raise KeyError("rows")

    text = WithoutData()
    with pytest.raises(InputError, match=r"the model's `batch` raises KeyError: 'rows'"):
        traced.trace(text, name="x", precision="fp32")


def test_what_cannot_be_traced_says_why() -> None:
    with pytest.raises(UnsupportedError, match=r"nonzero.*depends on values"):
        traced.trace(networks.Choosing(), name="x", precision="fp32")
    with pytest.raises(UnsupportedError, match="straight line"):
        traced.trace(networks.Comparing(), name="x", precision="fp32")
    with pytest.raises(InputError, match=r"x: module has no data .*batch"):
        traced.trace(networks.without_data(None), name="x", precision="fp32")
    broken = networks.Images()
    broken[1] = torch.nn.Linear(5, 5)
    with pytest.raises(InputError, match="x: 1: module does not run on fake tensors"):
        traced.trace(broken, name="x", precision="fp32")


def of_loss(loss: Any) -> Sequence[Layer]:
    """The layers of a text model with a loss of (logits summed over the words, targets)."""
    module = networks.Text(loss=lambda logits, targets: loss(logits.sum(-1), targets))
    return traced.trace(module, name="x", precision="fp32").chain()


def test_masks_of_the_data_select_everything() -> None:
    def selecting(y: Any, targets: Any) -> Any:
        mask = targets > 1
        places = mask.flatten().nonzero().squeeze(1)
        means = y[mask].mean() + y.masked_select(mask).mean() + y.flatten()[places].mean()
        return means + y[torch.where(mask)].mean() + (y * mask).sum() / mask.sum()

    layers, everything = of_loss(selecting), of_loss(lambda y, _: y.mean())
    assert [flops(layer, 3) for layer in layers] == [flops(layer, 3) for layer in everything]
    ruled = [getattr(operator, "ruled", True) for operator in layers[-1].operators]
    assert all(ruled)
    with pytest.raises(UnsupportedError, match=r"nonzero.*depends on values"):
        of_loss(lambda y, _: y[y > 0].mean())


@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (lambda y, _: sum(y[k].mean() for k in range(len(y))), r"len\(x\) at \w+.py:\d+'"),
        (lambda y, _: sum(row.mean() for row in y), r"a loop over the rows at \w+.py:\d+'"),
        (lambda y, _: sum(y[k].mean() for k in range(y.shape[0])), r"samples \(expected"),
    ],
)
def test_what_fixes_the_rows_is_named(loss: Any, cause: str) -> None:
    with pytest.raises(InputError, match=cause):
        of_loss(loss)
