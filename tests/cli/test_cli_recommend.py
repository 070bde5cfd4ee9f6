"""`hetplan recommend` from a file of offers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.cli import Call
from hetplan.plans.plan import load_plan

SEQUENCE = 64  # tokens
OFFERS = {
    "format": "hetplan-cluster",
    "version": 1,
    "name": "offers",
    "nodes": [
        {"count": 2, "devices": 1, "device": "T4", "intra_node_gbit_per_s": 50,
         "network_gbit_per_s": 50},
        {"count": 1, "devices": 2, "device": "V100-SXM2-16GB", "intra_node_gbit_per_s": 170,
         "network_gbit_per_s": 10},
    ],
    "devices": {"T4": {"price_per_hour": 0.5}, "V100-SXM2-16GB": {"price_per_hour": 2.0}},
}  # fmt: skip


def test_the_command(hetplan: Call, tmp_path: Path) -> None:
    offers = tmp_path / "offers.yaml"
    offers.write_text(json.dumps(OFFERS))
    data = ("--model", "gpt2", "--offers", offers, "--global-batch", 4, "--sequence", SEQUENCE)
    job = ("recommend", *data, "--moves", 20, "--quiet")
    plan = tmp_path / "plan.json"
    answer = hetplan(*job, "--tokens", "1e6", "--budget", 50, "--plan", plan, "--json").json
    [best] = [answer["choices"][answer["winner"]]]
    assert best["meets_target"] and best["money"] <= 50
    assert best["bound_seconds"] <= best["seconds"]
    made = load_plan(plan)
    assert len(made.devices) == best["devices"]
    table = hetplan(*job, "--tokens-per-second", 1)
    assert table.code == 0 and "recommended: 1 node of 1 x T4" in table.out
    too_fast = hetplan(*job, "--tokens-per-second", 1e12, "--plan", tmp_path / "none.json")
    assert too_fast.code == 1 and "no choice meets the target" in too_fast.out
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "no target"),
        (("--days", 3), "--days and --budget need a number of tokens"),
        (
            ("--tokens", 1e9, "--days", 3, "--tokens-per-second", 5),
            "the speed is given twice",
        ),
        (("--tokens-per-second", 0), "--tokens-per-second"),
        (("--tokens-per-second", 5, "--plot", "picture.gif"), "unknown kind of picture"),
    ],
)
def test_targets_that_say_nothing(
    hetplan: Call, tmp_path: Path, words: tuple[object, ...], complaint: str
) -> None:
    offers = tmp_path / "offers.yaml"
    offers.write_text(json.dumps(OFFERS))
    ran = hetplan("recommend", "--model", "gpt2", "--offers", offers, "--global-batch", 4, *words)
    assert ran.code == 2 and complaint in ran.err


def test_prices_that_count_are_known(hetplan: Call, tmp_path: Path) -> None:
    own = {"memory_gib": 16, "peak_tflops": {"fp16": 65, "fp32": 8}, "memory_gb_per_s": 320}
    node = {"devices": 1, "device": "Own", "intra_node_gbit_per_s": 50, "network_gbit_per_s": 50}
    offers = tmp_path / "offers.yaml"
    offers.write_text(json.dumps({**OFFERS, "nodes": [node], "devices": {"Own": own}}))
    job = ("recommend", "--model", "gpt2", "--offers", offers, "--global-batch", 4)
    ran = hetplan(*job, "--tokens-per-second", 1, "--least", "money")
    assert ran.code == 2 and "money counts, but a device has no price" in ran.err
