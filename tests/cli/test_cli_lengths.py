"""`hetplan plan --lengths`: plans for two lengths, chosen by drawn samples, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hetplan as hp
from fakes.cli import Call
from fakes.workloads import TWO_BLOCKS, cluster_document
from hetplan.cli.lengths import stages_only
from hetplan.errors import InputError
from hetplan.files import to_json
from hetplan.planner import STRATEGIES
from hetplan.plans.plan import load_plan

NUMBERS = "40\n60\n300\n80\n20\n"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The words of a planning of gpt2 with two blocks on four devices, with a file of lengths."""
    (tmp_path / "config.json").write_text(to_json(TWO_BLOCKS))
    (tmp_path / "cluster.yaml").write_text(to_json(cluster_document()))
    (tmp_path / "lengths.txt").write_text(NUMBERS)
    monkeypatch.chdir(tmp_path)
    data = ["--model", "config.json", "--cluster", "cluster.yaml", "--global-batch", 8]
    return ["plan", *data, "--strategies", "dp", "--quiet", "--threads", 1]


def test_the_plan_of_the_better_length_is_written(hetplan: Call, job: list[Any]) -> None:
    answer = hetplan(*job, "--lengths", "lengths.txt", "-o", "plan.json", "--json").json
    told = answer["lengths"]
    assert [plan["sequence"] for plan in told["plans"]] == [100, 300]
    assert (told["mean"], told["longest"], told["cut"]) == (100, 300, 0)
    seconds = [plan["drawn"]["balanced"]["seconds"] for plan in told["plans"]]
    assert told["chosen"] == seconds.index(min(seconds))
    chosen = told["plans"][told["chosen"]]
    assert load_plan("plan.json").workload.sequence == chosen["sequence"]
    assert answer["workload"]["sequence"] == chosen["sequence"]
    best = answer["candidates"][answer["winner"]]
    assert best["predicted_seconds"] == chosen["predicted_seconds"]
    tokens = {way: drawn["tokens"] for way, drawn in chosen["drawn"].items()}
    assert tokens["packed"] == tokens["balanced"] <= tokens["padded"]


def test_longer_samples_are_cut(hetplan: Call, job: list[Any]) -> None:
    table = hetplan(*job, "--lengths", "lengths.txt", "--sequence", 100)
    assert table.code == 0
    assert "20 % of the samples are cut at 100 tokens" in table.err
    assert "samples of lengths.txt: 60 tokens in the mean, 90% at most 100, the longest 100" in (
        table.out
    )
    assert table.out.count("chosen plan: ") == 3


def test_without_a_plan_for_the_longest_nothing_is_written(
    hetplan: Call, job: list[Any], tmp_path: Path
) -> None:
    small = cluster_document(devices={n: {"memory_gib": 1.9} for n in ("V100-SXM2-16GB", "T4")})
    (tmp_path / "cluster.yaml").write_text(to_json(small))
    config = TWO_BLOCKS | {"n_positions": 10**6}
    (tmp_path / "config.json").write_text(to_json(config))
    (tmp_path / "lengths.txt").write_text(NUMBERS + "900000\n" * 20)
    answer = hetplan(*job, "--lengths", "lengths.txt", "-o", "plan.json")
    assert answer.code == 1
    assert "no plan holds the longest of the drawn samples" in answer.out
    assert not Path("plan.json").exists()


def test_programs_are_no_strategy_for_unequal_lengths() -> None:
    others = [name for name in STRATEGIES if name != "hap"]
    assert stages_only(None) == stages_only(["all"]) == others
    assert stages_only(["dp,amp"]) == ["dp", "amp"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--lengths", "lengths.tx"), "lengths.tx: no such file"),
        (("--lengths", "squads"), "did you mean squad?"),
        (("--lengths", "squad", "--profile", "p.json"), "--profile is for samples of one length"),
        (
            ("--lengths", "squad", "--run", 1, "-o", "p.json"),
            "--run is for samples of one length",
        ),
        (("--lengths", "squad", "--strategies", "dp,hap"), "made for samples of one length"),
        (("--lengths", "squad", "--sequence", 0), "--sequence: not usable (got 0, expected 1 or"),
        (("--lengths", "wikipedia", "--sequence", 2000), "longer than the learned positions"),
        (("--lengths", "squad", "--model", "vgg19"), "vgg19: images have no lengths in tokens"),
    ],
)
def test_what_does_not_go_with_lengths(
    words: tuple[Any, ...], complaint: str, hetplan: Call, job: list[Any]
) -> None:
    refused = hetplan(*job, *words)
    assert refused.code == 2
    assert complaint in refused.err
    assert len(refused.err.strip().splitlines()) == 1


def test_the_python_function_takes_lengths(job: list[Any]) -> None:
    """A file and a list give the same plan, that of the smaller balanced seconds."""
    of_file, of_list = (
        hp.plan(
            "config.json", "cluster.yaml", global_batch=8, strategies="dp", threads=1,
            lengths=lengths,
        )
        for lengths in ("lengths.txt", [int(number) for number in NUMBERS.split()])
    )  # fmt: skip
    assert of_file.best is not None and of_list.best is not None
    assert of_file.best.predicted_seconds == of_list.best.predicted_seconds
    assert of_file.workload.sequence in (100, 300)
    told = [line for line in of_file.notes if "on drawn lengths" in line]
    assert len(told) == 2 and sum(line.endswith(", chosen") for line in told) == 1
    assert all("balanced" in line for line in told)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lengths": [3, 0]}, r"lengths\[1\]: is no length \(got 0"),
        ({"lengths": []}, "there are no lengths"),
        ({"lengths": "nowhere.txt"}, "nowhere.txt"),
        ({"lengths": [3], "strategies": "hap"}, "strategies: its programs are made for samples of"),
        ({"lengths": [3], "profile": "p.json"}, "predicted profiles"),
    ],
)
def test_the_python_function_refuses(job: list[Any], given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        hp.plan("config.json", "cluster.yaml", global_batch=8, threads=1, **given)
