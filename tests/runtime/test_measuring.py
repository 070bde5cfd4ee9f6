"""What is measured on this machine: profiles layer by layer, Poplar's Algorithm 1 within a memory
limit that is kept, and collectives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetplan.cli.main import main
from hetplan.errors import InputError, UnsupportedError
from hetplan.profiling.models.configurations import from_config
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.transformer import Experts, Transformer
from hetplan.profiling.models.zoo import bert, gpt2, llama, text_model
from hetplan.profiling.profiles.largest_batch import OutOfMemoryOnDevice, explore
from hetplan.profiling.profiles.measured_collectives import OPERATIONS, Collectives, fit_line
from hetplan.profiling.profiles.profile import load_profile

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.runtime.measuring import collectives, layers as measure  # noqa: E402
from hetplan.runtime.measuring.batches import (  # noqa: E402
    Trial,
    explore_stages,
    measure_batch_curve,
)
from hetplan.runtime.measuring.collectives import groups_of, torchrun_place  # noqa: E402
from hetplan.runtime.measuring.networks import KINDS, network, out_of_memory, saved_bytes  # noqa: E402
from parity.asking import run_forked  # noqa: E402
from parity.shards import deep  # noqa: E402

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
    counted = [sum(p.numel() for p in layer) for layer in chain.layer_parameters]
    assert counted == [layer.params for layer in model.layers]
    tokens = torch.randint(97, (3, 16))
    loss = chain.loss(tokens)
    assert loss.shape == () and bool(torch.isfinite(loss))
    loss.backward()
    used = [p for layer in chain.layer_parameters for p in layer]
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
        with pytest.raises(UnsupportedError, match=r"no torch layers|no experts"):
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
    lines: list[str] = []
    trial = Trial(model, "cpu", limit, repeats=1, tell=lines.append)
    explored = explore(trial.at(0))
    assert explored.largest == 11
    assert explored.tried[:4] == (1, 2, 4, 8)
    assert (
        set(explored.points) == {b for b in explored.tried if b <= 11}
        and min(explored.points.values()) > 0
    )
    with pytest.raises(OutOfMemoryOnDevice):
        trial.measure(12, trial.at(0).free)
    assert lines[-1].startswith("micro-batch 12:") and "bytes of activations" in lines[-1]


def test_the_stage_is_raised_where_no_sample_fits() -> None:
    """States of stage 0 alone exceed the limit; eight devices that share them from some stage on
    hold a sample."""
    model = model_of("llama", sequence=2)
    states = Trial(model, "cpu", 1e12).states
    one = Trial(model, "cpu", 1e12).forward_bytes(1, 1e12)
    limit = states.resident(2, 1 / 8) + 2.5 * one
    assert limit < states.resident(1, 1 / 8)
    trial = Trial(model, "cpu", limit, devices=8, repeats=1)
    sizes = [stage.largest for stage in explore_stages(trial)]
    assert sizes[:2] == [0, 0] and sizes[2] == 2
    curve = measure_batch_curve(model, "cpu", memory=limit, devices=8, repeats=1)
    assert curve.zero_stage == 2 and curve.largest == sizes
    assert {1, 2} <= set(curve.measured)
    assert curve.saved_bytes_per_sample == pytest.approx(one, rel=0.2)
    nothing = measure_batch_curve(model, "cpu", memory=1000.0, repeats=1)
    assert (nothing.zero_stage, nothing.largest, nothing.points) == (None, [0, 0, 0, 0], [])


@pytest.mark.wide
def test_a_model_that_only_zero_3_holds_is_measured_on_one_device() -> None:
    """Its weights and gradients exceed the device, which holds one block's; activations and the
    states charged are those of all blocks."""
    shape = gpt2(12, 64, 4, **SMALL, positions=8)
    model = load_model(text_model("deep", "test", 2, shape), precision="fp32")
    whole = Trial(model, "cpu", 1e12, devices=64, repeats=1)
    one = whole.forward_bytes(1, 1e12)
    limit = whole.states.resident(3, 1 / 64) + 2.5 * one
    weights = sum(p.numel() * p.element_size() for p in whole.network.parameters)
    assert limit < weights and limit < whole.states.resident(2, 1 / 64) and not whole.shared
    trial = Trial(model, "cpu", limit, devices=64, repeats=1)
    assert trial.shared and trial.states == whole.states
    held = sum(p.numel() * p.element_size() for p in trial.network.parameters)
    assert held < weights / 6
    assert trial.forward_bytes(1, 1e12) == one
    curve = measure_batch_curve(model, "cpu", memory=limit, devices=64, repeats=1)
    assert (curve.zero_stage, curve.largest) == (3, [0, 0, 0, 2])
    assert "one block's weights for all blocks" in curve.provenance.source


def test_ranks_measure_a_model_that_no_rank_holds(tmp_path: Path) -> None:
    """Two ranks with half of each layer: the gradients of one process; memory that is short on one
    rank is short on both, and they go on; the largest micro-batch is that of one device."""
    run_forked("parity.shards", tmp_path)
    ranks = [torch.load(tmp_path / f"shards-{rank}.pt") for rank in range(2)]
    for (mine, whole), short, _, _ in ranks:
        assert short == [True, False]
        for gradient, expected in zip(mine, whole, strict=True):
            assert (gradient - expected).abs().max() <= 1e-4 * expected.abs().max()
    params = deep().params
    assert params <= sum(held for _, _, held, _ in ranks) <= params + 2 * 14
    first, second = (curve for *_, curve in ranks)
    assert first == second and first["points"]
    assert (first["devices"], first["zero_stage"], first["largest"]) == (64, 3, [0, 0, 0, 2])
    assert "weights in shards on 2 ranks" in first["provenance"]["source"]


@pytest.mark.wide
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


GPT: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 128,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 16,
}


def small(**changes: Any) -> Model:
    return load_model(from_config(GPT | changes, name="small"), precision="fp32")


def test_each_layer_kind_is_measured_once_per_size() -> None:
    profile = measure.measure_profile(
        small(), "cpu", micro_batches=(2, 1), tensor_degrees=(1, 2), repeats=1
    )
    assert [(t.tensor, t.micro_batch) for t in profile.tables] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert profile.provenance.kind == "measured" and len(profile.layers) == 5
    for table in profile.tables:
        assert table.device == "cpu"
        assert min(table.forward_seconds) > 0 and min(table.backward_seconds) > 0
        assert len(set(table.forward_seconds[1:4])) == 1  # blocks are equal
        assert table.readings is not None and table.readings.peak_bytes is None
        assert min(table.readings.saved_bytes[1:]) > 0 and min(table.readings.optimizer_seconds) > 0


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    first = measure.measure_profile(small(), "cpu", micro_batches=(1,), repeats=1, output=path)
    said: list[str] = []
    both = measure.measure_profile(
        small(), "cpu", micro_batches=(1, 2), repeats=1, output=path, tell=said.append
    )
    assert both.tables[0] == first.tables[0] and "already in the file" in said[0]
    assert load_profile(path) == both

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "measure_layers", stop)
    with pytest.raises(KeyboardInterrupt):
        measure.measure_profile(small(), "cpu", micro_batches=(1, 2, 4), repeats=1, output=path)
    assert load_profile(path) == both


def test_a_file_of_another_model_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    measure.measure_profile(small(), "cpu", micro_batches=(1,), repeats=1, output=path)
    other = load_model(from_config(GPT, name="other"), precision="fp32")
    with pytest.raises(
        InputError, match=r"profile\.json: model of the profile that is there differs"
    ):
        measure.measure_profile(other, "cpu", micro_batches=(1,), output=path)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(GPT))
    target = tmp_path / "out.json"
    arguments = [
        "profile",
        "measure",
        "--model",
        str(config),
        "--precision",
        "fp32",
        "--device",
        "cpu",
        "--device-type",
        "X",
    ]
    assert (
        main(
            [
                *arguments,
                "--micro-batches",
                "1,2",
                "--tensor",
                "2",
                "--repeats",
                "1",
                "-o",
                str(target),
            ]
        )
        == 0
    )
    profile = load_profile(target)
    assert [(t.device, t.tensor, t.micro_batch) for t in profile.tables] == [
        ("X", 2, 1),
        ("X", 2, 2),
    ]
    assert "measured profile of tiny" in capsys.readouterr().out
    assert main([*arguments, "--tensor", "3"]) == 2
    assert main(["profile", "measure", "--model", str(config)]) == 2
    assert "--device" in capsys.readouterr().err


def test_a_rank_holds_its_part() -> None:
    whole, part = (
        sum(
            p.numel() for p in network(small(), "meta", tensor=tensor, blocks=1).layer_parameters[1]
        )
        for tensor in (1, 2)
    )
    h, f = 32, 128
    matrices = 4 * h * h + 2 * h * f
    assert whole == matrices + 3 * h + h + f + h + 4 * h
    split_biases = 3 * h // 2 + f // 2
    assert part == matrices // 2 + split_biases + 2 * h + 4 * h
    with pytest.raises(InputError, match="does not divide"):
        network(small(), "meta", tensor=3)


# Models whose kernels exist on the meta device; fused attention and norms are decomposed there, and
# keep more.
@pytest.mark.parametrize(
    ("name", "sequence"), [("gpt2", 256), ("gpt2-medium", 512), ("bert-large", 128)]
)
@pytest.mark.parametrize("tensor", [1, 2])
def test_memory_agrees_with_what_torch_keeps_on_the_meta_device(
    name: str, sequence: int, tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GPUs keep one byte per element of a dropout's mask; other devices, and so the meta device, a
    # whole number.
    monkeypatch.setattr(
        torch.nn.functional,
        "dropout",
        lambda x, p, *_: torch.native_dropout(x, p, True)[0],
        raising=True,
    )
    model = load_model(name, sequence=sequence, precision="bf16", attention="standard")
    made = network(model, "meta", tensor=tensor, blocks=1)
    tokens = torch.zeros(1, sequence, device="meta", dtype=torch.int64)
    with torch.no_grad():
        x = made.layers[0](tokens)
    inputs = ((tokens,), (x.requires_grad_(),), (x, tokens))
    described = (model.layers[0], model.layers[1], model.layers[-1])
    for one, layer, own, inputs_of_layer in zip(
        described, made.layers, made.layer_parameters, inputs, strict=True
    ):
        with saved_bytes(layer.parameters()) as kept:
            out = layer(*inputs_of_layer)
            counted = kept()
        del out
        predicted = sum(t.size("bf16") / (tensor if t.split else 1) for t in one.saved)
        assert predicted == pytest.approx(counted, rel=0.05), KINDS
        if tensor == 1:
            assert sum(p.numel() for p in own) == one.params


SIZES = [1e3, 1e4, 1e5, 1e6]


def test_lines_are_found_again() -> None:
    line = fit_line(SIZES, [2e-5 + n / 1e9 for n in SIZES])
    assert line.latency == pytest.approx(2e-5) and line.bandwidth == pytest.approx(1e9)
    assert line.r_squared == pytest.approx(1)


def test_neither_part_is_negative() -> None:
    through_origin = fit_line([1e6, 2e6], [1e-4, 3e-4])
    assert through_origin.latency == 0 and through_origin.bandwidth > 0
    falling = fit_line([1e6, 2e6], [3e-4, 1e-4])
    assert falling.bandwidth == pytest.approx(2e10) and falling.latency == 0


def test_groups_of_a_job() -> None:
    assert groups_of(4, 4) == {"node": [[0, 1, 2, 3]]}
    assert groups_of(2, 1) == {"all": [[0, 1]]}
    assert groups_of(4, 2) == {
        "node": [[0, 1], [2, 3]],
        "between": [[0, 2]],
        "all": [[0, 1, 2, 3]],
    }


def test_outside_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["profile", "collectives"]) == 2
    assert "torchrun" in capsys.readouterr().err
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "1"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="2 or more"):
        torchrun_place()


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_writes_a_curve(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process that is told that it is a rank, and joins nobody."""
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(collectives, "joined_ranks", nullcontext)
    config, target = tmp_path / "tiny.json", tmp_path / "curve.json"
    config.write_text(json.dumps(GPT))
    command = ["profile", "batch-curve", "--model", str(config), "--precision", "fp32"]
    command += ["--memory-gib", "1", "--max-micro-batch", "1", "--repeats", "1"]
    assert main([*command, "-o", str(target)]) == 0
    captured = capsys.readouterr()
    assert ("micro-batch 1:" in captured.err, "largest micro-batch" in captured.out) == (
        not rank,
    ) * 2
    assert target.exists() == (not rank)


@pytest.mark.engine
def test_two_ranks_on_gloo(tmp_path: Path) -> None:
    target = tmp_path / "collectives.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "hetplan",
    ]
    command += ["profile", "collectives", "--repeats", "2", "-q", "-o", str(target)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    measured = Collectives.load(target)
    assert measured.backend == "gloo" and measured.ranks == 2
    assert [fit.operation for fit in measured.fits] == list(OPERATIONS)
    for fit in measured.fits:
        assert fit.group == "node" and fit.ranks == 2 and fit.bytes_per_second > 0
        assert [p.bytes for p in fit.points] == sorted(p.bytes for p in fit.points)
        assert all(p.seconds <= p.median_seconds for p in fit.points)
