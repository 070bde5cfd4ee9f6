"""`hetplan instances export`: HiGHS and CP-SAT read the files back and find the optimum on file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import highspy
import pytest
from ortools.sat import cp_model_pb2
from ortools.sat.python import cp_model

from fakes.cli import Call
from hetplan.instances.library import find
from present import present

# The solvers take many seconds.
SLOW_TO_READ = pytest.param("poplar-b-llama-0.5b-zero0", marks=pytest.mark.wide)
# One model each. HAP's cp-sat restricts ratios to steps, so that its optimum is another.
LINEAR = (
    "tiny-two-types",
    "tiny-two-types-equal",
    "tiny-fast-slow",
    "hap-chain-2x2",
    SLOW_TO_READ,
)


def known(name: str) -> float:
    """The optimum on file."""
    best = present(present(find(name)).best_known())
    assert best.status == "optimal"
    return best.objective


def by_highs(model: dict[str, Any]) -> float:
    """The optimum of an exported file, in the instance's unit; infinite where it has none."""
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    assert highs.readModel(model["file"]) == highspy.HighsStatus.kOk
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return math.inf
    return seconds(model, highs.getInfo().objective_function_value)


def seconds(model: dict[str, Any], objective: float) -> float:
    """In the instance's unit."""
    return float(objective / model["per_unit"] + model["offset"])


@pytest.mark.parametrize("ending", ["mps", "lp"])
@pytest.mark.parametrize("name", LINEAR)
def test_highs_reads_it_back(hetplan: Call, tmp_path: Path, name: str, ending: str) -> None:
    path = tmp_path / f"model.{ending}"
    [model] = hetplan("instances", "export", name, "-o", path, "--json").json["models"]
    assert model["file"] == str(path) and model["rows"] > 0 < model["discrete"] <= model["columns"]
    assert by_highs(model) == pytest.approx(known(name), rel=1e-5)


def test_names_are_those_of_the_formulation(hetplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "model.lp"
    hetplan("instances", "export", "tiny-fast-slow", "-o", path)
    text = path.read_text()
    assert "theta" in text and "before_0" in text


def test_the_rounding_of_a_model_is_told(hetplan: Call, tmp_path: Path) -> None:
    text = "costs are rounded down to whole units, which may lower the optimum by up to 5e-07 of it"
    assert text in hetplan("instances", "export", "hap-chain-2x2", "-o", tmp_path / "m.pb").out
    assert text not in hetplan("instances", "export", "hap-chain-2x2", "-o", tmp_path / "m.mps").out


@pytest.mark.parametrize("name", ["tiny-two-types", "tiny-fast-slow", SLOW_TO_READ])
@pytest.mark.parametrize("ending", ["pb", "pbtxt"])
def test_cp_sat_reads_it_back(hetplan: Call, tmp_path: Path, name: str, ending: str) -> None:
    path = tmp_path / f"model.{ending}"
    [model] = hetplan("instances", "export", name, "-o", path, "--json").json["models"]
    proto = cp_model_pb2.CpModelProto()
    if ending == "pb":
        proto.ParseFromString(path.read_bytes())
    else:
        text_format = pytest.importorskip("google.protobuf.text_format")
        text_format.Parse(path.read_text(), proto)
    copy = cp_model.CpModel()
    copy.proto.CopyFrom(proto)
    solver = cp_model.CpSolver()
    status: object = solver.solve(copy)
    assert status == cp_model.OPTIMAL
    assert seconds(model, solver.objective_value) == pytest.approx(known(name), rel=1e-5)


def test_amp_has_a_model_for_each_configuration_that_may_win(hetplan: Call, tmp_path: Path) -> None:
    """The best known decision is in one of them: a first guess may be the optimum itself."""
    path = tmp_path / "amp.mps"
    command = ("instances", "export", "tiny-mixed", "-o", path)
    assert "the instance's optimum is the least over the files" in hetplan(*command).out
    models = hetplan(*command, "--json").json["models"]
    assert min(map(by_highs, models)) == pytest.approx(known("tiny-mixed"), rel=1e-5)
