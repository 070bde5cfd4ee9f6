"""Profiles measured on this machine: what is measured, how a run goes on, and memory against
torch's own counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetplan.cli.main import main
from hetplan.errors import InputError
from hetplan.profiling.huggingface import from_config
from hetplan.profiling.models import Model, load_model
from hetplan.profiling.profile import load_profile
from hetplan.runtime import measure

torch = pytest.importorskip("torch", reason="measuring needs torch")
from hetplan.runtime.references.timed import KINDS, network, saved_by_autograd  # noqa: E402

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


def test_each_layer_kind_is_measured_once_per_size(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = measure.measure_layers

    def counted(model: Model, device: str, tensor: int, batch: int, *rest: int) -> Any:
        seen.append((tensor, batch))
        return real(model, device, tensor, batch, *rest)

    monkeypatch.setattr(measure, "measure_layers", counted)
    found = measure.measure_profile(
        small(), "cpu", micro_batches=(2, 1), tensor_degrees=(1, 2), repeats=1
    )
    assert seen == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert found.provenance.kind == "measured" and len(found.layers) == 5
    for table in found.tables:
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
    found = load_profile(target)
    assert [(t.device, t.tensor, t.micro_batch) for t in found.tables] == [("X", 2, 1), ("X", 2, 2)]
    assert "measured profile of tiny" in capsys.readouterr().out
    assert main([*arguments, "--tensor", "3"]) == 2
    assert main(["profile", "measure", "--model", str(config)]) == 2
    assert "--device" in capsys.readouterr().err


def test_a_rank_holds_its_part() -> None:
    whole, part = (
        sum(p.numel() for p in network(small(), "meta", tensor=tensor, blocks=1).own[1])
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
    model = load_model(name, sequence=sequence, precision="bf16")
    made = network(model, "meta", tensor=tensor, blocks=1)
    tokens = torch.zeros(1, sequence, device="meta", dtype=torch.int64)
    with torch.no_grad():
        x = made.layers[0](tokens)
    inputs = ((tokens,), (x.requires_grad_(),), (x, tokens))
    described = (model.layers[0], model.layers[1], model.layers[-1])
    for one, layer, own, given in zip(described, made.layers, made.own, inputs, strict=True):
        with saved_by_autograd(layer.parameters()) as kept:
            out = layer(*given)
            counted = kept()
        del out
        predicted = sum(t.size("bf16") / (tensor if t.split else 1) for t in one.saved)
        assert predicted == pytest.approx(counted, rel=0.05), KINDS
        if tensor == 1:
            assert sum(p.numel() for p in own) == one.params
