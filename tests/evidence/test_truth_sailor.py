"""Predictions of Sailor's plans: by hand on a toy folder, and on the published plans where they lie
beside."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evidence.truth.__main__ import main
from evidence.truth.sailor import (
    BYTES_PER_PARAM,
    HOST_SECONDS,
    Curve,
    clean,
    compare_plans,
)
from evidence.truth.sets import compare
from evidence.truth.tables import Predicted, spearman, summary
from fakes.sailor import KEPT, LAYERS, OUTPUT, PARAMS, add_plan, plan, sailor_folder, write
from hetplan.adapters.importers.sailor import Fit
from hetplan.errors import InputError

pytestmark = pytest.mark.evidence

SHARED = Path(__file__).parents[3] / "shared" / "data" / "sailor"
WHOLE = list(range(LAYERS))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sailor_folder(tmp_path)


def predicted(folder: Path, document: Any, framework: float | None = 0.0) -> Predicted:
    add_plan(folder, "TOY/one.json", document)
    (found,) = compare_plans(folder, framework)
    assert found.predicted is not None, found.reason
    return found.predicted


def test_the_slowest_replica_and_its_card_decide(folder: Path) -> None:
    document = plan([WHOLE], [[("fast", 2), ("slow", 2)]], 1, 8)
    # degree 2 halves compute; the ring of two moves every rank's 16 MB once, two ranks share 2 GB/s
    expected = 4 * 4 * 0.009 / 2 + LAYERS * PARAMS / 2e9 + 0.001
    assert predicted(folder, document).seconds == pytest.approx(expected)


def test_receivers_wait_and_pairs_exchange_in_turn(folder: Path) -> None:
    document = plan([[0, 1], [2, 3]], [[("fast", 1)], [("slow", 1)]], 1, 16)
    found = predicted(folder, document)
    move, host = OUTPUT / 1e9, HOST_SECONDS
    first, last = 2 * 0.003 + host, 2 * 0.009 + 2 * host
    # for each of 16 micro-batches the slow stage computes, and waits for the next activation, which
    # waits for its gradient
    assert found.seconds == pytest.approx(16 * (last + 2 * move) + first + 0.0005, rel=2e-3)
    # the slow stage first: it waits for gradients only, its activations leave while it computes
    document = plan([[0, 1], [2, 3]], [[("slow", 1)], [("fast", 1)]], 1, 16)
    other = predicted(folder, document).seconds
    assert other < found.seconds - 10 * move


def test_replicas_in_one_node_reduce_at_its_own_speed(folder: Path) -> None:
    document = plan([WHOLE], [[("fast", 1), ("fast", 1)]], 1, 2)
    for stage in document["pipeline_list"][0]["tmp_per_stage"][0]:
        stage[0][0][1] = 2  # nodes of two GPUs
    expected = 4 * 0.003 + LAYERS * PARAMS / 1e10 + 0.001
    assert predicted(folder, document).seconds == pytest.approx(expected)


def test_memory_is_states_and_activations_alive(folder: Path) -> None:
    document = plan([[0, 1], [2, 3]], [[("fast", 1)], [("fast", 1)]], 2, 16)
    found = predicted(folder, document, framework=1e9)
    first = BYTES_PER_PARAM / 4 * 2 * PARAMS + 2 * (2 * 2 * KEPT + 2 * OUTPUT) + 1e9
    assert found.peak_bytes == pytest.approx(first)


def test_times_above_those_of_larger_micro_batches_are_faults() -> None:
    raw = np.array([[[5.0], [2.0], [4.0]], [[1.0], [2.0], [4.0]]])
    per_sample, floor = np.array([[1.0], [1.0]]), np.array([[1.5], [1.0]])
    cleaned = clean(raw, np.array([1.0, 2.0, 4.0]), floor, per_sample)
    assert cleaned[0, :, 0].tolist() == [1.5, 2.0, 4.0]  # the floor bounds the fault from below
    assert cleaned[1, :, 0].tolist() == [1.0, 2.0, 4.0]  # nothing to mend


def test_with_tensor_parallelism_a_fixed_part_is_paid_beside_what_grows() -> None:
    sizes, passes = np.array([1.0, 2.0, 4.0]), np.array([[[3.0], [3.0], [4.0]]] * 2)
    per_sample = np.full((2, 1), 1.0)
    alone, group = (Curve(sizes, passes, per_sample, 0.0, tensor) for tensor in (1, 2))
    assert alone.layer_seconds(4)[0, 0] == 4 and group.layer_seconds(4)[0, 0] == 3 + 3 * 1
    assert alone.layer_seconds(3)[0, 0] == 3.5 and alone.layer_seconds(6)[0, 0] == 6
    assert group.layer_seconds(1)[0, 0] == 3


def test_a_fit_is_not_used_beyond_its_top() -> None:
    fit = Fit((-1.0, 4.0, 2.0), 5.5e9)
    assert fit.bandwidth(1e6) == 2e9
    assert fit.bandwidth(4e6) == 5.5e9  # 6 GB/s at the top, capped
    assert Fit((-1.0, 4.0, 2.0), 9e9).bandwidth(1e12) == 6e9


def test_equal_ranks_share_their_place() -> None:
    assert spearman([1, 2, 3], [2, 2, 9]) == pytest.approx(0.8660254)
    assert spearman([1, 2], [2, 2]) is None


BREAKS: list[tuple[str, Any, str]] = [
    ("validation/TOY/one.json", {"mbs": 1}, r"one\.json: pipeline_list: required key is missing"),
    (
        "llm_info.json",
        {"TOY": {"1": {"0": {}}}},
        r"llm_info\.json: TOY\.1\[0\]\.params_bytes: required key",
    ),
    (
        "profiles/TOY/fast/profile.json",
        {"1": {"1": {"0": [1, 2]}}},
        r"fast/profile\.json: 1\.1\[0\]: .*3 items",
    ),
    ("network_coeffs_x.json", {}, r"network_coeffs_x\.json: .*inter"),
    (
        "network_coeffs_x.json",
        {"inter": {"fast": {"1": [[1, 2], 3]}}},
        r"inter\.fast\.1\[0\]\[2\]: required",
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), BREAKS)
def test_broken_files_are_one_line(
    folder: Path, name: str, content: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    add_plan(folder, "TOY/one.json", plan([WHOLE], [[("fast", 1)]], 1, 8))
    write(folder / name, content)
    assert main(["sailor", str(folder)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1


@pytest.mark.parametrize(
    "name", ["llm_info.json", "network_coeffs_x.json", "validation/TOY/one.json"]
)
def test_missing_files_are_named(folder: Path, name: str) -> None:
    add_plan(folder, "TOY/one.json", plan([WHOLE], [[("fast", 1)]], 1, 8))
    (folder / name).unlink()
    with pytest.raises(InputError, match=r"no such file|no file|no plan"):
        compare_plans(folder)


def test_a_plan_without_prices_keeps_its_reason(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_plan(folder, "a.json", plan([WHOLE], [[("fast", 1)]], 1, 8, real=0.1, max_mem=10**9))
    add_plan(folder, "b.json", plan([WHOLE], [[("other", 1)]], 1, 8))
    assert main(["sailor", str(folder), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    plans = document["rows"]
    assert set(document) == {"set", "rows", "summary"}
    assert [p["file"] for p in plans] == ["a.json", "b.json"]
    assert plans[0]["measured_seconds"] == 0.1 and plans[0]["measured_bytes"] == 10**9
    assert plans[0]["predicted_seconds"] == pytest.approx(8 * 4 * 0.003 + 0.001)
    assert plans[1]["predicted_seconds"] is None and "other" in plans[1]["reason"]


def test_only_models_that_plans_name_are_read(folder: Path) -> None:
    (folder / "profiles/OTHER/fast").mkdir(parents=True)
    write(folder / "profiles/OTHER/fast/profile.json", {"broken": 1})
    sizes = json.loads((folder / "llm_info.json").read_text())
    write(folder / "llm_info.json", sizes | {"OTHER": sizes["TOY"]})
    add_plan(folder, "TOY/one.json", plan([WHOLE], [[("fast", 1)]], 1, 8))
    assert compare_plans(folder)[0].predicted is not None
    add_plan(folder, "unnamed.json", plan([WHOLE], [[("fast", 1)]], 1, 8))
    with pytest.raises(InputError, match=r"OTHER/fast/profile\.json"):
        compare_plans(folder)


def test_a_plan_may_name_its_model(folder: Path) -> None:
    add_plan(folder, "x/one.json", plan([WHOLE], [[("fast", 1)]], 1, 8, model="TOY"))
    add_plan(folder, "x/two.json", plan([WHOLE], [[("fast", 1)]], 1, 8, model="NONE"))
    add_plan(folder, "x/three.json", plan([WHOLE[:-1]], [[("fast", 1)]], 1, 8, model="TOY"))
    one, three, two = compare_plans(folder)
    assert one.predicted is not None
    assert two.reason is not None and "no profiles of this model" in two.reason
    assert three.reason is not None and "number of layers differs" in three.reason


def test_a_table_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_plan(folder, "TOY/a.json", plan([WHOLE], [[("fast", 1)]], 1, 8, real=0.1))
    assert main(["sailor", str(folder)]) == 0
    assert "mean error of seconds" in capsys.readouterr().out


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs Sailor's published data in {SHARED}")
def test_published_plans() -> None:
    kinds = summary(compare("sailor", SHARED))["kinds"]
    clariden, mit = kinds["clariden"], kinds["mit"]
    assert clariden["error"] < 0.09 and clariden["order"] >= 0.95
    assert mit["error"] < 0.08
    assert clariden["memory_error"] < 0.05
