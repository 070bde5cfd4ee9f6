"""`python -m evidence.papers`: the papers' figures are complete, and ours stand
beside them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evidence import papers
from evidence.papers import amp, astra, hap, poplar
from hetplan.formulations import family
from hetplan.programs.networks import vgg19
from hetplan.solvers.registry import load, solve
from hetplan.solvers.run import Options, Run

pytestmark = pytest.mark.evidence


def made(paper: str, name: str, *, full: bool = False) -> list[dict[str, Any]]:
    """The rows of one exhibit."""
    told: list[str] = []
    (exhibit,), _ = papers.exhibits(paper, name, full=full, tell=told.append)
    assert len(told) == len(exhibit.rows) and all(line.startswith(exhibit.name) for line in told)
    return list(exhibit.rows)


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_every_exhibit_says_what_the_paper_says(
    paper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its function exists, its chart's axis is a column, full has no fewer rows."""
    monkeypatch.setattr(papers, "load", lambda target: load(target) and (lambda fixed, row: {}))
    few, notes = papers.exhibits(paper, None, full=False, tell=lambda line: None)
    whole, _ = papers.exhibits(paper, None, full=True, tell=lambda line: None)
    assert notes and len(few) >= 4
    for some, every in zip(few, whole, strict=True):
        assert some.said and 0 < len(some.rows) <= len(every.rows)
        assert not some.x or all(some.x in row for row in every.rows)
        assert all("full" not in row for row in every.rows)


def test_ours_stand_over_the_papers() -> None:
    row = papers.compared({"paper, s": 2.0, "ours, s": 1.0, "paper": "a few", "ours": 3.0})
    assert row["ours / paper, s"] == 0.5 and "ours / paper" not in row


@pytest.mark.parametrize("folder", ["papers", "truth"])
def test_no_report_limits_a_method_by_seconds(folder: str) -> None:
    """Its figures would depend on the machine's load. An option may ask for a limit, and a test of
    an option's value is none."""
    for path in sorted((Path(papers.__file__).parents[1] / folder).iterdir()):
        if path.suffix in (".py", ".yaml"):
            text = path.read_text(encoding="utf-8")
            limits = re.findall(r"time_limit=(?!limit\b)[^,)]+|\blimit: \d+", text)
            assert limits == [], path.name


def test_hap_gathers_even_slices_padded_and_skewed_ones_apart() -> None:
    rows = made("hap", "Figure 4")
    assert rows[0]["All-Gather"] > rows[0]["Grouped-Broadcast"]
    assert rows[-1]["All-Gather"] < rows[-1]["Grouped-Broadcast"]
    every = {row["Grouped-Broadcast"] for row in rows}
    assert len(every) == 1, "exact slices do not care"


def test_hap_shares_follow_speed_where_computing_decides() -> None:
    rows = [hap.shares({"layers": 1, "batch": 256, "vocabulary": 512}, {"hidden": h})
            for h in (256, 8192)]  # fmt: skip
    assert rows[0]["EV, s"] < rows[0]["CP, s"] and rows[1]["CP, s"] < rows[1]["EV, s"]
    for row in rows:
        assert row["optimum, s"] <= min(row["CP, s"], row["EV, s"]) * (1 + 1e-9)


def test_hap_has_a_sweet_point_only_where_communication_overlaps() -> None:
    """Figure 2: without overlap the best ratios of one program are even, or by speed."""
    row = hap.shares({"layers": 1, "batch": 256, "vocabulary": 4096}, {"hidden": 4096})
    assert row["optimum, s"] == pytest.approx(min(row["CP, s"], row["EV, s"]), rel=1e-6)
    assert row["best overlapped, s"] < min(row["CP overlapped, s"], row["EV overlapped, s"])
    assert 0 < row["of the way to CP"] < 1


def test_hap_gains_on_equal_gpus_with_fewer_samples() -> None:
    """Figure 14: BERT-Base gains nothing with Table 1's samples, and something with an eighth."""
    setting = {"model": "bert-base", "GPUs": 32, "Gbit/s": 10.4}
    many, few = (hap.fewer_samples({}, setting | {"samples per GPU": n}) for n in (64, 8))
    assert many["speed-up"] == pytest.approx(1.0, rel=1e-6) and few["speed-up"] > 1.1


def test_poplar_without_the_slow_devices() -> None:
    """On cluster B under ZeRO 3 the T4 cost more than they bring; under ZeRO 1 they do not."""
    row = {"model": "llama-0.5b", "cluster": "poplar-b"}
    third, first = (poplar.idle_devices({}, row | {"ZeRO": stage}) for stage in (3, 1))
    assert third["used"] == "2 V100-PCIE-16GB" and third["gain, %"] > 30
    assert third["any"] == third["whole types"] > third["all"]
    alone = poplar.seconds_by_method("poplar-b", "llama-0.5b", (), 3)["strong only"]
    flops = poplar.paper_workload("poplar-b", "llama-0.5b").flops_per_iteration / 1e12
    assert third["any"] == pytest.approx(flops / alone, rel=1e-2)
    assert first["used"] == "2 V100-PCIE-16GB, 2 T4" and first["gain, %"] == 0


def test_hap_loses_on_all_gpus_where_machines_are_the_devices() -> None:
    """Figure 16: rings of 2 and of 8 machines pass unlike shares of a gradient, rings of 16 and of
    64 GPUs nearly the same."""
    row = hap.concurrent({"inside": 12.0}, {"model": "vgg19", "GPUs": 64})
    assert 64 < row["machines as devices, %"] < row["ours, %"] - 10
    assert row["no network, %"] == pytest.approx(100.0, abs=0.1)
    assert row["with 12 GB/s inside, %"] == pytest.approx(row["machines as devices, %"], abs=2)
    assert "equal experts, %" not in row  # VGG19 has none


def test_hap_groups_of_gpus_stand_in_their_own_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """§7.1: the V100 in two machines, the P100 in six; Figure 14's 32 P100 in four."""
    stood: dict[Any, int] = {}

    def answer(name: str, counts: Any, method: str, gbit: float = 0.0, machines: int = 8) -> Any:
        stood[counts] = machines
        return SimpleNamespace(objective=1.0, details={}, message="")

    monkeypatch.setattr(hap, "answer", answer)
    monkeypatch.setattr(hap, "solved", lambda data, method: answer("", (), method))
    row = hap.concurrent({"inside": 12.0}, {"model": "vgg19", "GPUs": 64})
    assert row["ours, %"] == pytest.approx(100.0)  # 64 samples against 16 and 48, in the same time
    del stood[()]
    assert stood == {hap.mixed(64): 8, (("V100", 16),): 2, (("P100", 48),): 6}
    made("hap", "Figure 14")
    assert stood[("P100", 32),] == 4


def test_hap_machines_are_as_fast_as_their_gpus() -> None:
    program = vgg19(64, 64, 7, 10, 64)
    theory = hap.theory_on_machines(program, hap.mixed(64), 8, np.inf)
    speeds = [device.flops_per_second for device in theory.data.devices]
    assert speeds == [8 * hap.SPEED["V100"]] * 2 + [8 * hap.SPEED["P100"]] * 6


def test_hap_says_what_became_of_its_search() -> None:
    """Beside every figure of the alternation: it ended, or in words of the method's own."""
    data = hap.network("vgg19", (("V100", 1), ("P100", 1))).data
    result = hap.solved(data, "paper")
    states = result.details["states"]
    assert hap.search_text(result) == {"HAP's A*": f"ended, {states} states"}
    cut_off = solve(family("hap"), data, "paper", Run(Options(threads=1, time_limit=1e-9)))
    assert hap.search_text(cut_off) == {
        "HAP's A*": "cut off by the time limit and completed greedily"
    }
    assert hap.search_text(hap.solved(data, "dp-even")) == {"HAP's A*": "ended"}


def test_amp_cuts_are_fastest_on_the_model_that_they_are_for() -> None:
    rows = made("amp", "Figure 3")
    assert [row["heterogeneity"] for row in rows] == [0.1, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert all(min(row["over equal layers"], row["over equal parameters"]) >= 1 for row in rows)
    assert rows[0]["over equal layers"] > rows[4]["over equal layers"]


def test_astra_needs_no_more_than_the_rule_of_thumb() -> None:
    row = {"model": "llama2-70b", "type": "A800", "GPUs": 32}
    found = astra.experts({}, row)
    assert found["ratio"] == found["tokens/s"] / found["rule of thumb"] > 1.2
    assert astra.rule_of_thumb(row | {"model": "glm-130b", "GPUs": 8}) is None


def test_amp_trials_are_replays() -> None:
    fixed = {"model": "gpt2-amp", "cluster": "g4dn-4", "batch": 32}
    rows = {m: amp.trials(fixed, {"method": m}) for m in ("Megatron", "AMP", "annealing")}
    assert rows["AMP"]["strategies"] == 10 and rows["annealing"]["strategies"] == 1
    assert all(row["ours, least"] <= row["ours, mean"] for row in rows.values())
    assert rows["AMP"]["ours, least"] <= rows["Megatron"]["ours, least"]


def test_astra_overlap_of_gradients_and_of_weights_add_up() -> None:
    """The settings of Figure 11: each hides something of its own, both hide the most."""
    row = {"model": "llama2-13b", "type": "A800", "GPUs": 1024}
    found = astra.overlaps({}, row)
    assert 1 < found["tensor"] < min(found["gradients"], found["weights"])
    assert max(found["gradients"], found["weights"]) < found["all"]


def test_astra_whole_states_turn_the_order_of_the_models() -> None:
    """Figure 9: the largest model falls most only where every data rank holds all states."""
    rows = [
        astra.scaling({}, {"model": model, "type": "A800", "GPUs": 1024})
        for model in ("llama2-7b", "llama2-70b")
    ]
    small, large = rows
    assert large["of 64 GPUs'"] > small["of 64 GPUs'"]
    assert large["of 64 GPUs', whole states"] < small["of 64 GPUs', whole states"]


def test_astra_offloading_gains_as_much_on_more_gpus_with_more_samples() -> None:
    row = {"model": "glm-130b", "type": "A800"}
    few, many = (astra.offloading({"samples": 16}, row | {"GPUs": n}) for n in (64, 1024))
    text = "whole states, batch grows"
    assert many[text] == pytest.approx(few[text], rel=1e-2) and many["whole states"] < few[text]


def test_astra_without_offloading_small_models_fall_most() -> None:
    """Figure 10: larger models fall per GPU as their number grows, but less than small ones."""
    text = "no offloading, of 64 GPUs'"
    shares = [
        astra.offloading({"samples": 16}, {"model": model, "type": "A800", "GPUs": 4096})[text]
        for model in ("llama2-7b", "llama2-70b", "glm-130b")
    ]
    assert shares == pytest.approx([0.475, 0.645, 0.697], abs=0.01)


def test_amp_bytes_between_narrow_layers_decide_table_5() -> None:
    """With as many bytes as wide layers send, AMP beats Megatron with either cut."""
    setting = {"model": "transgan-amp", "cluster": "p3-4", "batch": 64}
    as_is, few = (amp.replays(**setting, activations=share)[0] for share in (1.0, 1 / 16))
    assert min(as_is["AMP"]) > min(as_is["Megatron"])
    assert min(as_is["AMP"]) < min(as_is["Megatron, equal layers"])
    assert min(few["AMP"]) < 0.7 * min(few["Megatron"])
