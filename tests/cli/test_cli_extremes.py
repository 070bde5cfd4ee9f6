"""Numbers far from anything real: refused where they stand, and what files may hold never overflows
later."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from fakes.cli import Call, Ran
from fakes.workloads import cluster_document, profile_document
from hetplan.errors import InputError
from hetplan.instances.library import load_from_library
from hetplan.planner import STRATEGIES
from hetplan.schema import (
    LEAST_BYTES,
    LEAST_RATE,
    LEAST_SECONDS,
    MOST_BYTES,
    MOST_RATE,
    MOST_SECONDS,
    Count,
    NonNegative,
    StrictModel,
    derived,
)

Plan = Callable[[dict[str, Any], dict[str, Any] | None, str], Ran]


@pytest.fixture
def plan(hetplan: Call, tmp_path: Path, two_blocks: Path) -> Plan:
    """`hetplan plan` of two blocks of gpt2 on a cluster and a profile, both given as documents."""

    def call(cluster: dict[str, Any], profile: dict[str, Any] | None, strategies: str) -> Ran:
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(cluster))
        (tmp_path / "p.json").write_text(json.dumps(profile))
        words = ("--model", two_blocks, "--cluster", tmp_path / "c.yaml", "--global-batch", 8)
        given = () if profile is None else ("--profile", tmp_path / "p.json")
        limits = ("--threads", 1, "-t", 5, "-q", "--json")
        return hetplan("plan", *words, *given, "--strategies", strategies, *limits)

    return call


@pytest.mark.parametrize("value", [1e30, 1e300, 1e-300, 5e-324])
@pytest.mark.parametrize(
    ("part", "key"),
    [("tables", "forward_seconds"), ("tables", "backward_seconds"), ("layers", "saved_bytes")],
)
def test_profile_is_refused_where_it_is_wrong(
    plan: Plan, tmp_path: Path, two_blocks: Path, value: float, part: str, key: str
) -> None:
    document = profile_document(two_blocks)
    row = document[part][0]
    if part == "tables":
        row[key][0] = value
    else:
        row |= {key: value, "replicated_saved_bytes": 0.0}
    error = plan(cluster_document(), document, "dp").error
    place = f"{part}[0].{key}" + ("[0]" if part == "tables" else "")
    assert error.startswith(f"{tmp_path / 'p.json'}: {place}: ") and f"{value!r}" in error
    assert ("expected at most" if value > 1 else "expected 0 or at least") in error


@pytest.mark.parametrize("value", [1e30, 1e300, 1e-300, 5e-324])
def test_cluster_is_refused_where_it_is_wrong(plan: Plan, tmp_path: Path, value: float) -> None:
    documents = {
        f"devices.T4.{key}": cluster_document(devices={"T4": {key: value}})
        for key in ("memory_gib", "memory_gb_per_s")
    }
    documents["devices.T4.peak_tflops.fp16"] = cluster_document(
        devices={"T4": {"peak_tflops": {"fp16": value}}}
    )
    for key in ("intra_node_gbit_per_s", "network_gbit_per_s"):
        documents[f"nodes[1].{key}"] = cluster_document()
        documents[f"nodes[1].{key}"]["nodes"][1][key] = value
    for place, document in documents.items():
        error = plan(document, None, "dp").error
        bound = "most 1e+09" if value > 1 else "least 1e-06"
        assert (
            error
            == f"{tmp_path / 'c.yaml'}: {place}: not usable (got {value!r}, expected at {bound})"
        )


SECONDS = (0.0, LEAST_SECONDS, MOST_SECONDS, 1e-3, 1.0)
BYTES = (0.0, LEAST_BYTES, MOST_BYTES, 1e6)
RATES = (LEAST_RATE, MOST_RATE, 100.0)
LATENCIES = (0.0, 5e-324, 1e9, 5.0)


def corner(rng: Random, plain: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A cluster and a profile at the ends of what their files may hold. plain: a usual profile."""
    rates = {key: rng.choice(RATES) for key in ("memory_gib", "memory_gb_per_s")}
    device = {
        **rates,
        "price_per_hour": rng.choice((0.0, 5e-324, 1e6)),
        "peak_tflops": {"fp16": rng.choice(RATES)},
    }
    cluster = cluster_document(devices={"T4": device})
    for node in cluster["nodes"]:
        node |= {f"{where}_gbit_per_s": rng.choice(RATES) for where in ("intra_node", "network")}
        node |= {
            f"{where}_latency_us": rng.choice(LATENCIES) for where in ("intra_node", "network")
        }
    profile = copy.deepcopy(plain)
    for table in profile["tables"]:
        for key in ("forward_seconds", "backward_seconds"):
            table[key] = [
                rng.choice(SECONDS) if rng.random() < 0.5 else value for value in table[key]
            ]
    for layer in profile["layers"]:
        for key in (
            "param_bytes",
            "tied_param_bytes",
            "activation_bytes",
            "tensor_bytes",
            "saved_bytes",
        ):
            layer[key] = rng.choice(BYTES) if rng.random() < 0.5 else layer[key]
        layer["replicated_saved_bytes"] = 0.0
    return cluster, profile


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.wide) for seed in range(1, 10))]
)
def test_whatever_files_may_hold_can_be_planned(plan: Plan, two_blocks: Path, seed: int) -> None:
    """Every strategy gives finite numbers, or says that nothing fits."""
    rng = Random(f"corner {seed}")
    cluster, profile = corner(rng, profile_document(two_blocks))
    for given in (profile, None):
        ran = plan(cluster, given, ",".join(STRATEGIES))
        assert ran.code in (0, 1), ran.err
        json.loads(ran.out, parse_constant=lambda text: pytest.fail(f"{text} in the output"))


def test_a_model_of_absurd_sizes_is_no_bug(hetplan: Call, tmp_path: Path) -> None:
    most = 10**7
    config = {
        "model_type": "mixtral",
        "hidden_size": most,
        "intermediate_size": most,
        "num_hidden_layers": 1,
        "num_attention_heads": 1000,
        "num_key_value_heads": 1000,
        "vocab_size": most,
        "max_position_embeddings": most,
        "num_local_experts": most,
        "num_experts_per_tok": most,
    }
    path = tmp_path / "huge.json"
    path.write_text(json.dumps(config))
    more = ("--cluster", "amp-mixed", "--global-batch", 8, "--strategies", "dp")
    error = hetplan("plan", "--model", path, *more).error
    assert "profile of huge on amp-mixed: " in error
    assert "follows from what is given, and is out of range (got " in error


@pytest.mark.parametrize("value", [0.0, 5e-324, 1e-300])
def test_an_instance_holds_nothing_that_quotients_by_it_overflow(
    hetplan: Call, tmp_path: Path, value: float
) -> None:
    document = load_from_library("tiles-5-zero0").document()
    document["data"]["devices"][0]["step_seconds"][2] = value
    path = tmp_path / "f.json"
    path.write_text(json.dumps(document))
    place = f"{path}: data.devices[0].step_seconds[2]: not usable"
    assert hetplan("solve", path).error == f"{place} (got {value!r}, expected at least 1e-30)"


class Thing(StrictModel):
    """Something that a user's numbers become."""

    value: NonNegative
    count: Count = 0


def test_only_sizes_are_the_users_fault() -> None:
    with (
        pytest.raises(
            InputError,
            match=r"here: value follows .* out of range \(got 2e\+30, expected at most 1e\+30",
        ),
        derived("here"),
    ):
        Thing(value=2e30)
    with pytest.raises(InputError, match=r"got inf, expected a finite number"), derived("here"):
        Thing(value=1e300 * 1e300)
    with pytest.raises(ValidationError, match="valid integer"), derived("here"):
        Thing.model_validate({"value": 1.0, "count": "three"})
