"""`run --factory` with adapters beside frozen weights: gradients are those of one process, and only
those of the adapters are exchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")
pytest.importorskip("transformers", reason="transformers is an extra of the tests")

from parity.adapted import adapted, alone, plans  # noqa: E402
from parity.asking import run_forked  # noqa: E402
from parity.device import default_type  # noqa: E402

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks left."""
    folder = tmp_path_factory.mktemp("adapted")
    run_forked("parity.adapted", folder)
    return folder


def test_steps_are_those_of_one_process(folder: Path) -> None:
    written = torch.load(folder / "adapted.pt")
    with default_type("float64"):
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
