"""Segments: by layers, by METIS, and by networkx where it is not installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from hetplan.errors import InputError
from hetplan.formulations.hap.spmd import segments
from hetplan.formulations.hap.spmd.networks import model
from hetplan.formulations.hap.spmd.program import SingleProgram
from hetplan.formulations.hap.spmd.segments import FALLBACK, LAYERS, METIS, How, segmented
from hetplan.formulations.hap.spmd.work import work_of


def work(program: SingleProgram) -> list[float]:
    """FLOP of each segment."""
    gradients = program.needs_gradient()
    found = [0.0] * program.segments
    for node in program.computations:
        found[node.segment] += work_of(program, node, gradients).total
    return found


def crossing(program: SingleProgram) -> int:
    """Entries of tensors read in another segment."""
    return sum(
        source.elements
        for node in program.computations
        for source in program.inputs(node)
        if not source.source and source.segment != node.segment
    )


@pytest.mark.parametrize("how", ["layer", "metis"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_segments_cover_the_program(how: How, count: int) -> None:
    program = model("vit", 64, 8)
    found, label = segmented(program, count, how)
    assert found.segments == count
    assert label == (
        LAYERS if how == "layer" or count == 1 else METIS if find_spec("pymetis") else FALLBACK
    )
    first = [node.segment for node in found.computations]
    assert list(dict.fromkeys(first)) == list(range(count)), "numbered as they appear"
    for node in found.computations:
        for source in found.inputs(node):
            assert not source.source or source.segment == node.segment
    assert max(work(found)) <= 1.6 * sum(work(found)) / count
    assert crossing(found) <= 4 * count * 64 * 196 * 768


def test_layers_stay_together() -> None:
    found, _ = segmented(model("gpt2", 16, 4), 3)
    by_layer: dict[str, set[int]] = {}
    for node in found.computations:
        by_layer.setdefault(node.layer, set()).add(node.segment)
    assert all(len(numbers) == 1 for numbers in by_layer.values())


def test_without_metis_networkx_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "find_spec", lambda name: None)
    found, label = segmented(model("vgg19", 64, 4), 3, "metis")
    assert (found.segments, label) == (3, FALLBACK)


def test_more_segments_than_operators_are_refused() -> None:
    with pytest.raises(InputError, match="segments"):
        segmented(model("vgg19", 64, 4), 1000)
