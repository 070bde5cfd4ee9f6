"""Balanced pipeline layouts: against enumeration, in Megatron's grammar, and from the command."""

from __future__ import annotations

import json
import random
import re
from itertools import chain, combinations_with_replacement, pairwise

import pytest

from hetplan.adapters.exports.balancing import PipelineLayout, balanced
from hetplan.cli.main import main

NAMES = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}


def drawn(seed: int, most: int = 6) -> tuple[list[float], int, int, int]:
    """Seconds of embedding, blocks and head; ranks, virtual stages, MTP layers."""
    rng = random.Random(seed)
    kinds = [rng.uniform(0.5, 3.0) for _ in range(rng.randint(1, 3))]
    blocks = sorted(rng.choice(kinds) for _ in range(rng.randint(1, most)))
    ends = rng.uniform(0.0, 1.0), rng.uniform(0.1, 4.0)
    return [ends[0], *blocks, ends[1]], rng.randint(1, 4), rng.randint(1, 3), rng.choice((0, 0, 2))


def unrolled(text: str) -> list[str]:
    """Virtual stages of Megatron's text: groups first, then letters (its parser's two steps)."""
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    return text.split("|")


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_has_a_faster_slowest_stage(seed: int) -> None:
    seconds, pipeline, virtual, mtp = drawn(seed)
    layout, stages = balanced(seconds, pipeline, virtual, mtp), pipeline * virtual
    weights = [*seconds[:-1], *([mtp * seconds[-2]] if mtp else []), (1 + mtp) * seconds[-1]]
    costs = []
    for ends in combinations_with_replacement(range(len(weights) + 1), stages - 1):
        cut = [0, *ends, len(weights)]
        place = next(k for k, end in enumerate(cut[1:]) if end >= len(weights) - 1)
        if mtp and place < pipeline * (virtual - 1):
            continue
        each = [sum(weights[a:b]) for a, b in pairwise(cut)]
        costs.append((max(each), sum(x * x for x in each)))
    slowest = min(cost[0] for cost in costs)
    squares = min(cost[1] for cost in costs if cost[0] <= slowest * (1 + 1e-6))
    assert max(layout.seconds) == pytest.approx(slowest, rel=1e-6)
    assert sum(x * x for x in layout.seconds) == pytest.approx(squares, rel=1e-5)
    assert ["".join(stage) for stage in layout.stages] == unrolled(layout.megatron())
    assert [*chain(*layout.torchtitan())] == [
        "tok_embeddings", *(f"layers.{i}" for i in range(len(seconds) - 2)), "norm", "lm_head",
    ]  # fmt: skip


def test_equal_blocks_load_all_ranks_alike() -> None:
    layout = balanced([0.01, *[1.0] * 40, 0.01], 4, 4)
    loads = [sum(layout.seconds[rank::4]) for rank in range(4)]
    assert max(loads) - min(loads) < 0.1
    assert layout.megatron() == "Et*2|(t*3|)*8(t*2|)*6t*2L"


@pytest.mark.wide
def test_megatron_reads_a_thousand_layouts() -> None:
    reader = pytest.importorskip(
        "megatron.core.transformer.pipeline_parallel_layer_layout",
        reason="needs megatron-core (pip install megatron-core)",
    ).PipelineParallelLayerLayout
    for seed in range(1000):
        seconds, pipeline, virtual, mtp = drawn(seed, most=130)
        layout = balanced(seconds, pipeline, virtual, mtp)
        read = reader(layout.megatron(), pipeline)
        read.validate_layer_layout(len(seconds) - 2, mtp or None)
        assert read.virtual_pipeline_model_parallel_size == virtual
        assert [one.name for one in read.flatten_layout] == [NAMES[u] for u in letters(layout)]


def letters(layout: PipelineLayout) -> str:
    return "".join(layout.units)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "export",
        "layout",
        "--model",
        "gpt2",
        "--pipeline",
        "4",
        "--virtual",
        "2",
        "--mtp",
        "1",
    ]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    stages = unrolled(document["pipeline_model_parallel_layout"])
    assert len(stages) == len(document["module_fqns_per_model_part"]) == 8
    assert "".join(stages) == "E" + 12 * "t" + "mL"
    assert document["slowest_seconds"] == max(document["stage_seconds"])
    assert main(arguments) == 0
    assert "proven: no cut" in capsys.readouterr().out
    assert main(["export", "layout", "--model", "vgg19", "--pipeline", "2"]) == 2
    assert "expected a language model" in capsys.readouterr().err
