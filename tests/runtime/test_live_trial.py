"""Poplar's Algorithm 1 on a live torch device: real layers, real passes, a memory limit that is
kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetplan.errors import InputError, UnsupportedError
from hetplan.formulations.poplar.awareness import OutOfMemoryOnDevice, explore
from hetplan.profiling.architecture import Experts, Transformer
from hetplan.profiling.models import Model, load_model
from hetplan.profiling.zoo import bert, gpt2, llama, text_model
from hetplan.runtime.batch_curve import Trial, explore_stages, measure_batch_curve

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")
from hetplan.runtime.references.timed import network, out_of_memory  # noqa: E402

SMALL = {"vocabulary": 97}
SHAPES: dict[str, Transformer] = {
    "gpt2": gpt2(2, 32, 4, **SMALL, positions=24),
    "untied": gpt2(2, 32, 4, **SMALL, positions=24, tied=False, final_norm=False),
    "narrow": gpt2(1, 32, 4, **SMALL, positions=24, position_offset=2, embedding_width=16),
    "llama": llama(2, 32, 4, 48, **SMALL),
    "grouped": llama(2, 32, 4, 48, **SMALL, kv_heads=2),
    "window": llama(1, 32, 4, 48, **SMALL, window=5),
    "unfused": llama(1, 32, 4, 48, **SMALL, attention="standard"),
    "bert": bert(2, 32, 4, 64, **SMALL),
    "pixel": gpt2(1, 32, 4, **SMALL, positions=24, norm="pixel"),
}


def model_of(name: str, sequence: int = 16, precision: str = "fp32") -> Model:
    return load_model(text_model(name, "test", sequence, SHAPES[name]), precision=precision)


@pytest.mark.parametrize("name", SHAPES)
def test_layers_own_the_parameters_that_the_description_counts(name: str) -> None:
    model = model_of(name)
    chain = network(model, "cpu")
    counted = [sum(p.numel() for p in layer) for layer in chain.own]
    assert counted == [layer.params for layer in model.layers]
    tokens = torch.randint(97, (3, 16))
    loss = chain.loss(tokens)
    assert loss.shape == () and bool(torch.isfinite(loss))
    loss.backward()
    used = [p for layer in chain.own for p in layer]
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in used)


def test_attention_is_masked_and_windowed() -> None:
    """A token changes nothing before it; in a window of 5, nothing 5 or more places behind it
    either."""
    for name in ("llama", "window", "unfused", "bert"):
        chain = network(model_of(name), "cpu")
        first = torch.randint(97, (1, 16))
        other = first.clone()
        other[0, 8] = (other[0, 8] + 1) % 97
        torch.manual_seed(0)
        a = chain.layers[1](chain.layers[0](first))
        torch.manual_seed(0)  # the same dropout
        b = chain.layers[1](chain.layers[0](other))
        changed = (a - b).abs().amax(dim=-1)[0] > 1e-7
        assert bool(changed[8])
        assert bool(changed[:8].any()) == (name == "bert"), name
        if name == "window":
            assert bool(changed[9:13].all()) and not bool(changed[13:].any())
        elif name == "llama":
            assert bool(changed[13:].any())


def test_fused_and_unfused_attention_agree() -> None:
    """The same weights, the scores in memory or not."""
    losses = []
    for name in ("unfused", "fused"):
        shape = replace(SHAPES["unfused"], attention="fused" if name == "fused" else "standard")
        torch.manual_seed(1)
        chain = network(load_model(text_model(name, "test", 16, shape), precision="fp32"), "cpu")
        losses.append(chain.loss(torch.arange(32).view(2, 16)).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_what_has_no_layers_is_refused() -> None:
    mixture = gpt2(2, 32, 4, **SMALL, experts=Experts(4, 2))
    for model in (load_model("vit-base"), load_model(text_model("moe", "test", 16, mixture))):
        with pytest.raises(UnsupportedError, match="no torch layers"):
            network(model, "cpu")


def test_the_largest_micro_batch_is_the_largest_that_fits() -> None:
    """Under a limit for 11.5 samples' activations: 11, found by doubling and binary search."""
    model = model_of("gpt2")
    unlimited = Trial(model, "cpu", 1e12, repeats=1)
    one = unlimited.forward_bytes(1, 1e12)
    assert unlimited.forward_bytes(12, 1e12) == pytest.approx(12 * one, rel=0.1)
    limit = (
        unlimited.at(0).resident
        + (unlimited.forward_bytes(11, 1e12) + unlimited.forward_bytes(12, 1e12)) / 2
    )
    told: list[str] = []
    trial = Trial(model, "cpu", limit, repeats=1, tell=told.append)
    found = explore(trial.at(0))
    assert found.largest == 11
    assert found.tried[:4] == (1, 2, 4, 8)
    assert (
        set(found.points) == {b for b in found.tried if b <= 11} and min(found.points.values()) > 0
    )
    with pytest.raises(OutOfMemoryOnDevice):
        trial.measure(12, trial.at(0).free)
    assert told[-1].startswith("micro-batch 12:") and "bytes of activations" in told[-1]


def test_the_stage_is_raised_where_no_sample_fits() -> None:
    """States of stage 0 alone exceed the limit; eight devices that share them from some stage on
    hold a sample."""
    model = model_of("llama", sequence=2)
    states = Trial(model, "cpu", 1e12).states
    one = Trial(model, "cpu", 1e12).forward_bytes(1, 1e12)
    limit = states.resident(2, 1 / 8) + 2.5 * one
    assert limit < states.resident(1, 1 / 8)
    trial = Trial(model, "cpu", limit, devices=8, repeats=1)
    sizes = [found.largest for found in explore_stages(trial)]
    assert sizes[:2] == [0, 0] and sizes[2] == 2
    curve = measure_batch_curve(model, "cpu", memory=limit, devices=8, repeats=1)
    assert curve.zero_stage == 2 and curve.largest == sizes
    assert {1, 2} <= set(curve.measured)
    assert curve.saved_bytes_per_sample == pytest.approx(one, rel=0.2)
    nothing = measure_batch_curve(model, "cpu", memory=1000.0, repeats=1)
    assert (nothing.zero_stage, nothing.largest, nothing.points) == (None, [0, 0, 0, 0], [])


def test_what_a_pass_keeps_once_does_not_make_the_estimate_too_low() -> None:
    """Five windows of 300 x 300 booleans beside activations of a few hundred kilobytes per
    sample."""
    shape = llama(5, 8, 2, 8, **SMALL, window=7, attention="standard")
    model = load_model(text_model("masked", "test", 300, shape), precision="fp32")
    free = Trial(model, "cpu", 1e12).forward_bytes(9, 1e12)
    unlimited = Trial(model, "cpu", 1e12)
    one, two = unlimited.forward_bytes(1, 1e12), unlimited.forward_bytes(2, 1e12)
    assert 2 * one - two > 1e5  # kept once
    trial = Trial(model, "cpu", unlimited.at(0).resident + free, repeats=1)
    assert explore(trial.at(0)).largest == 9


def test_no_micro_batch_beyond_the_largest_asked_for() -> None:
    trial = Trial(model_of("gpt2"), "cpu", 1e12, largest=6, repeats=1)
    found = explore(trial.at(0))
    assert found.largest == 6 and max(found.tried) == 6


def test_each_size_is_measured_once() -> None:
    """All four stages share the passes."""
    told: list[str] = []
    explore_stages(Trial(model_of("gpt2"), "cpu", 1e12, largest=8, repeats=1, tell=told.append))
    assert len(told) == len(set(told)) and sum("micro-batch 8:" in line for line in told) == 1


def test_what_the_allocator_raises_is_out_of_memory() -> None:
    with pytest.raises(OutOfMemoryOnDevice), out_of_memory(1):
        torch.empty(2**50, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="shape"), out_of_memory(1):
        torch.ones(2) @ torch.ones(3, 3)


def test_half_precision_runs_too() -> None:
    curve = measure_batch_curve(
        model_of("llama", precision="bf16"), "cpu", memory=1e9, largest=2, repeats=1, name="T4"
    )
    assert (curve.precision, curve.device, curve.largest) == ("bf16", "T4", [2, 2, 2, 2])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"memory": None}, "memory limit"),
        ({"memory": -1.0}, "memory limit"),
        ({"devices": 0}, "devices"),
        ({"device": "tpu"}, "no such device here"),
        ({"device": "cuda:99"}, "no such device here"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], says: str) -> None:
    arguments: dict[str, Any] = {"device": "cpu", "memory": 1e9} | changes
    with pytest.raises(InputError, match=says):
        measure_batch_curve(model_of("gpt2"), arguments.pop("device"), **arguments)
