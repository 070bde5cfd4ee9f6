"""`hetplan study report astra`: the paper's Table 2 and figures beside predictions."""

from __future__ import annotations

import json

import pytest

from hetplan.cli.main import main
from hetplan.formulations.astra.report import ALL, HYBRID, SAYS, cases, expert, report, speed
from hetplan.formulations.astra.search.space import Space
from present import present


def test_table_2_stands_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    name = "Table 2: llama2-7b on 1024 [AH]?00"
    assert main(["study", "report", "astra", "--name", name, "--json", "-q"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["type"]: row for row in document["rows"]}
    assert {t: row["their_tokens_per_second"] for t, row in rows.items()} == {
        "H100": 10148287,
        "H800": 9024716,
        "A800": 3966756,
    }
    assert all(0.85 < row["ratio"] < 1.2 for row in rows.values())
    for row in rows.values():
        assert row["ratio"] == row["tokens_per_second"] / row["their_tokens_per_second"]
    assert any("half of each type is assumed" in note for note in document["notes"])


def test_every_figure_is_there_once() -> None:
    titles = [(figure, model, gpu, gpus) for figure, model, gpu, gpus, *_ in cases()]
    assert len(set(titles)) == len(titles) and {title[0] for title in titles} == set(SAYS)


def test_figures_compare_what_they_say() -> None:
    """By the searches themselves, on the smallest case of each."""
    tables, document = report("Figure [1589]*: llama2-7b on 128 A800")
    by_figure = {row["figure"]: row for row in document["rows"]}
    assert [table.title for table in tables] == [f"Astra, Figure {n}" for n in (5, 8, 9, 10)]
    small, here = (present(speed("llama2-7b", "A800", n, HYBRID)) for n in (64, 128))
    alone = present(speed("llama2-7b", "A800", 128, Space(pipeline=(1,), tensor=(1,))))
    assert by_figure["Figure 9"]["tokens_per_second"] == here
    assert by_figure["Figure 9"]["their_tokens_per_second"] == pytest.approx(2 * small)
    assert by_figure["Figure 9"]["ratio"] < 1
    assert by_figure["Figure 8"]["their_tokens_per_second"] == alone
    assert by_figure["Figure 10"]["their_tokens_per_second"] <= here
    assert by_figure["Figure 5"]["ratio"] >= 1 - 1e-12


def test_the_rule_of_thumb_takes_the_least_degrees_that_fit() -> None:
    """Llama-2-70B: 4 bytes and more per parameter fit on no 4 of 80 GB, but on a node of 8."""

    def node(tensor: int) -> float | None:
        space = Space(
            pipeline=(1,), tensor=(tensor,), interleaving=False, offload=False,
            micro_batch=(1, 2, 4, 8), sequence_parallel=(True,), distributed_optimizer=(True,),
            recompute=(None, "full"), recompute_method=("uniform",), recompute_layers=(1,),
        )  # fmt: skip
        return speed("llama2-70b", "A800", 64, space)

    assert node(4) is None
    assert expert("llama2-70b", "A800", 64) == node(8) is not None
    assert present(node(8)) < present(speed("llama2-70b", "A800", 64, ALL))
