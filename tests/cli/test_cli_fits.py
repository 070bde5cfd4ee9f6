"""`hetplan fits`: its line, its table, its document and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.cli import Call
from hetplan.profiling.models.model import load_model


def test_the_command(hetplan: Call, cluster: Path) -> None:
    """Exit codes, the line and the document."""
    yes = hetplan("fits", "--model", "gpt2", "--cluster", "amp-mixed", "--json")
    assert yes.code == 0 and yes.json["fits"] and yes.json["layouts"][0]["pipeline"] == 1
    assert yes.json["layouts"][0]["data"] == 16  # all devices
    held = yes.json["layouts"][0]["stages"][0]["bytes"]
    assert held["weights"] == pytest.approx(2 * load_model("gpt2").params)
    no = hetplan("fits", "--model", "llama2-7b", "--cluster", cluster, "--global-batch", 32)
    assert no.code == 1 and no.out.startswith("does not fit: llama2-7b in fp16 on ")
    assert "would fit: 6 more V100-SXM2-16GB (3 nodes of 2)" in no.out
    assert "lacking" in no.out and "fullest device: optimizer" in no.out
    wrong = hetplan("fits", "--model", "gpt2", "--cluster", "amp-mixed", "--memory-margin", 2)
    assert wrong.code == 2 and "--memory-margin" in wrong.err


@pytest.mark.wide
def test_what_the_page_of_commands_says_of_a_large_model(hetplan: Call) -> None:
    no = hetplan("fits", "--model", "llama2-70b", "--cluster", "amp-mixed", "--global-batch", 32)
    assert no.code == 1
    assert "would fit: 104 more V100-SXM2-16GB (26 nodes of 4)" in no.out


def test_types_of_gradients_and_moments_and_the_loss_are_options(hetplan: Call) -> None:
    job = ("--model", "gpt2", "--cluster", "amp-mixed", "--framework", "megatron")
    asked = ("fits", *job, "--micro-batch", "1", "--zero", "0", "--json")
    params = load_model("gpt2").params
    held = [
        hetplan(*asked, *more).json["layouts"][0]["stages"][0]["bytes"]
        for more in ((), ("--gradient-bytes", 2, "--moment-bytes", 2, "--loss", "eager"))
    ]
    assert [each["gradients"] for each in held] == pytest.approx([4 * params, 2 * params])
    assert [each["optimizer"] for each in held] == pytest.approx([12 * params, 8 * params])
    assert [each["logits"] for each in held] == pytest.approx([6 * 1024 * 50257, 12 * 1024 * 50257])
    wrong = hetplan(*asked, "--loss", "ego")
    assert wrong.code == 2 and "--loss: unknown loss 'ego'" in wrong.error
