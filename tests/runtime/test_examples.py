"""Unequal batches in loops of others: gradients are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")
pytest.importorskip("transformers", reason="transformers is an extra of the tests")

from parity.asking import run_forked  # noqa: E402
from parity.exampled import CASES, LOOPS, NEEDED, alone  # noqa: E402

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks left."""
    folder = tmp_path_factory.mktemp("examples")
    run_forked("parity.exampled", folder)
    return folder


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("loop", NEEDED)
def test_unequal_batches_train_as_one_process(loop: str, model: str, folder: Path) -> None:
    """Four updates by SGD at rate 1, which are the sums of four gradients."""
    if loop not in LOOPS:
        pytest.skip(f"{NEEDED[loop]} is not installed")
    expected = alone(model)
    for rank in range(3):
        weights = torch.load(folder / f"weights-{rank}.pt")
        for case in (case for case in CASES if case[:2] == (loop, model)):
            for key, value in expected.items():
                assert torch.allclose(weights[case][key], value, rtol=1e-5, atol=1e-5), (case, key)
