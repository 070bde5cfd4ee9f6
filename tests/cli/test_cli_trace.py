"""`hetplan profile predict --factory`: a user's module traced, its files, and planning with
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.cli import Call
from hetplan.profiling.profile import load_profile

torch: Any = pytest.importorskip("torch", reason="tracing needs torch")

from fakes import networks  # noqa: E402
from hetplan.runtime.tracing import layers as traced  # noqa: E402


def test_command_line(hetplan: Call, tmp_path: Path) -> None:
    """A factory's profile and model file, and a plan with both."""
    profile, model = tmp_path / "profile.json", tmp_path / "model.json"
    ran = hetplan(
        "profile",
        "predict",
        "--factory",
        "fakes.networks:text",
        "--model",
        "mine",
        "--cluster",
        "g4dn-4",
        "--micro-batches",
        "1,2,4",
        "-o",
        profile,
        "--model-output",
        model,
    )
    assert ran.code == 0 and "operators in 5 layers" in ran.err
    found = load_profile(profile)
    assert (found.model, found.sequence) == ("mine", networks.TOKENS) and {
        t.tensor for t in found.tables
    } == {1}
    again = hetplan(
        "profile",
        "predict",
        "--model",
        model,
        "--cluster",
        "g4dn-4",
        "--micro-batches",
        "1,2,4",
        "--json",
    )
    assert again.json["tables"] == json.loads(profile.read_text())["tables"]
    planned = hetplan(
        "plan",
        "--model",
        model,
        "--profile",
        profile,
        "--cluster",
        "g4dn-4",
        "--global-batch",
        16,
        "--strategies",
        "dp",
        "--json",
    )
    assert planned.code == 0 and planned.json["winner"] == 0
    assert (
        hetplan(
            "plan", "--model", model, "--sequence", 8, "--cluster", "g4dn-4", "--global-batch", 8
        ).code
        == 2
    )


def test_usage(hetplan: Call, tmp_path: Path) -> None:
    for arguments, what in (
        (
            ("--factory", "fakes.networks:nothing", "--cluster", "g4dn-4"),
            "cannot be imported",
        ),
        (("--factory", "fakes.networks:text"), "--cluster"),
        (
            (
                "--model",
                "gpt2",
                "--cluster",
                "g4dn-4",
                "--model-output",
                tmp_path / "m",
            ),
            "--factory",
        ),
    ):
        ran = hetplan("profile", "predict", *arguments)
        assert ran.code == 2 and what in ran.err and ran.err.count("\n") == 1
    path = tmp_path / "model.json"
    document = traced.trace(networks.Images(), name="images", precision="fp32").model_dump(
        mode="json"
    )
    document["layers"][1]["operators"] = 7
    path.write_text(json.dumps(document))
    ran = hetplan("plan", "--model", path, "--cluster", "g4dn-4", "--global-batch", 8)
    assert ran.code == 2 and "layers[1].operators is 7" in ran.err
