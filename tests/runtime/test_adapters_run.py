"""`run --factory` with adapters of `peft` beside frozen weights: gradients are those of one
process, only those of the adapters are exchanged, and `peft` loads what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")
pytest.importorskip("transformers", reason="transformers is an extra of the tests")
peft: Any = pytest.importorskip("peft", reason="peft is an extra of the tests")

from fakes.hugging import llama  # noqa: E402
from parity.adapted import ROWS, adapted, alone, exactly, plans  # noqa: E402
from parity.asking import run_forked  # noqa: E402

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks left."""
    folder = tmp_path_factory.mktemp("adapted")
    run_forked("parity.adapted", folder)
    return folder


def test_steps_are_those_of_one_process(folder: Path) -> None:
    written = torch.load(folder / "adapted.pt")
    with exactly():
        before = adapted().state_dict()
    for name, expected in zip(plans(), alone(), strict=True):
        assert written[name].keys() == expected.keys()
        for key, value in expected.items():
            assert torch.allclose(written[name][key], value, rtol=1e-9, atol=1e-12), (name, key)
            changed = not torch.equal(value, before[key])
            assert changed == ("lora_" in key), key
        before = expected


def test_only_gradients_of_adapters_are_exchanged(folder: Path) -> None:
    trained = sum(p.numel() for p in adapted().parameters() if p.requires_grad)
    for rank in range(3):
        summed = torch.load(folder / f"summed-{rank}.pt")
        for level in (0, 1, 3):  # ZeRO 2 sums in every micro-batch
            assert summed[f"5 to 2 to 1, ZeRO {level}"] == trained


def test_peft_loads_the_trained_adapters(folder: Path) -> None:
    """Beside a new base model with the same weights, in its own files; without the base's."""
    trained = folder / "trained"
    files = sorted(file.name for file in trained.iterdir())
    assert files == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    with exactly():
        module = adapted()
        states = alone()[-1]
        module.load_state_dict(states)
        base = llama()
        inside = {
            name.removeprefix("base_model.model.").replace(".base_layer", ""): value
            for name, value in states.items()
            if "lora_" not in name
        }
        base.load_state_dict(inside)
        loaded = peft.PeftModel.from_pretrained(base, trained, autocast_adapter_dtype=False)
        inputs, _ = module.batch(0, 0, ROWS)
        with torch.no_grad():
            expected, got = module(**inputs).logits, loaded(**inputs).logits
            plain = loaded.unload()(**inputs).logits
    assert torch.allclose(got, expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(plain, expected, rtol=1e-3)
