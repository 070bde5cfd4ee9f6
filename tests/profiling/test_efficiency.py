"""Measured efficiency of operators and of links: a rule found again, errors of what is left out,
and predictions that follow."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from fakes.workloads import cluster, cluster_document, small
from hetplan.cli.main import main
from hetplan.errors import InputError
from hetplan.profiling.hardware.cluster import device
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.operators import Shape
from hetplan.profiling.profiles.measured_collectives import (
    OPERATIONS,
    Collectives,
    FittedCollective,
    SizePoint,
    fit_line,
)
from hetplan.profiling.profiles.predict import predict
from hetplan.profiling.profiles.profile import Provenance
from hetplan.profiling.rates import efficiency
from hetplan.profiling.rates.efficiency import (
    Correction,
    Learned,
    LearnedLinks,
    LinkEfficiencyFile,
    MeasuredOperator,
    OperatorData,
    Smoothing,
    link_curves,
    moved_share,
    share_of,
    train,
    train_links,
)
from hetplan.profiling.rates.products import move_seconds, products_seconds
from hetplan.replays.pose import costs_of

PEAK, BANDWIDTH = 1e12, 1e11
PREDICT = ["profile", "predict", "--model", "gpt2", "--cluster"]


def rule(elements: float) -> float:
    """Efficiency of the made-up device: small operators reach a tenth, large ones nine tenths."""
    return float(0.1 + 0.8 / (1 + 1e6 / elements))


def data(count: int = 400, device: str = "T4") -> OperatorData:
    random = Random(0)
    found = []
    for _ in range(count):
        m, k, n = (2.0 ** random.randint(4, 12) for _ in range(3))
        elements, size = m * k + k * n + m * n, 2.0 ** random.uniform(12, 28)
        seconds = max(2 * m * k * n / PEAK, 2 * elements / BANDWIDTH) / rule(elements)
        product = {"kind": "product", "count": 1.0, "m": m, "k": k, "n": n}
        found += [
            MeasuredOperator.model_validate({**product, "elements": elements, "seconds": seconds}),
            MeasuredOperator(
                kind="elementwise", elements=size, seconds=2 * size / BANDWIDTH / rule(size)
            ),
        ]
    return OperatorData(
        device=device,
        precision="fp16",
        element_bytes=2,
        flops_per_second=PEAK,
        bytes_per_second=BANDWIDTH,
        provenance=Provenance(kind="measured", source="made up", date="2026-01-01"),
        operators=found,
    )


def test_a_rule_is_found_again() -> None:
    for kind in train(data()).errors:
        assert kind.error < 0.06 and kind.expected_error > 0.5 and kind.operators == 400
    with pytest.raises(InputError, match="too few"):
        train(data(1))


def test_one_operator_gives_a_general_factor_by_hand() -> None:
    """With one measurement of logarithm y the process tells (g + s near) / (g + s + noise) y."""
    one = Correction(np.array([[10.0]]), np.array([0.8]), Smoothing(2.0, 0.5, 1.0, 0.2))
    assert one.at([10.0]) == pytest.approx(0.8 * 1.25 / 1.29)
    assert one.at([14.0]) == pytest.approx(0.8 * (1 + 0.25 * math.exp(-2)) / 1.29)


def test_residuals_are_of_predictions_from_the_others() -> None:
    rows, logs = np.array([[1.0], [3.0], [8.0]]), np.array([0.3, -0.2, 0.6])
    for i, told in enumerate(Correction(rows, logs).residuals()):
        others = [j for j in range(3) if j != i]
        assert told == pytest.approx(logs[i] - Correction(rows[others], logs[others]).at(rows[i]))


def test_twice_as_slow_takes_twice_as_long(tmp_path: Path) -> None:
    """Ten operators that take twice what is expected of a device, a file of them, a profile."""
    spec, random = device("A100-SXM4-80GB"), Random(1)
    shapes = tuple(Shape(1, *(2.0 ** random.randint(8, 13) for _ in range(3))) for _ in range(5))
    told = products_seconds("A100-SXM4-80GB", spec, "fp16", shapes)
    operators = [
        MeasuredOperator(
            kind="product", count=1.0, m=s.m, k=s.k, n=s.n, elements=1.0, seconds=2 * e.seconds
        )
        for s, e in zip(shapes, told, strict=True)
    ]
    for elements in (1e6, 1e7, 1e8):
        seconds = 2 * move_seconds("pointwise", 2 * elements, "A100-SXM4-80GB", spec).seconds
        operators.append(MeasuredOperator(kind="elementwise", elements=elements, seconds=seconds))
    file = data(2, "A100-SXM4-80GB").model_copy(update={"operators": operators})
    learned = Learned(file, spec)
    for op in load_model("gpt2", sequence=1024).layers[1].operators:
        assert learned.factor(op, 4, 1) == pytest.approx(2, rel=0.08)
    assert train(file).errors[0].error < 0.1


def test_predictions_follow_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "t4.json"
    data().save(path)
    learned = {"T4": Learned(OperatorData.load(path), device("T4"))}
    model = load_model("gpt2", sequence=128)
    plain = predict(model, cluster(), micro_batches=[1], tensor_degrees=[1])
    found = predict(model, cluster(), micro_batches=[1], tensor_degrees=[1], learned=learned)
    for before, after in zip(plain.tables, found.tables, strict=True):
        assert (before.forward_seconds == after.forward_seconds) == (before.device != "T4")
    assert found.provenance.learned == ["T4"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured, trained, profile = (
        tmp_path / f"{name}.json" for name in ("operators", "trained", "profile")
    )
    data(40).save(measured)
    assert main(["profile", "train", str(measured), "-o", str(trained)]) == 0
    assert "predicted from the others" in capsys.readouterr().out
    arguments = [*PREDICT, "g4dn-4", "-o", str(profile), "--efficiency", str(trained)]
    assert main([*arguments, "--micro-batches", "1"]) == 0
    assert "rescaled by its own operators: T4" in capsys.readouterr().out
    assert main([*arguments, "--precision", "fp32"]) == 2
    capsys.readouterr()
    arguments[len(PREDICT)] = "amp-mixed"
    assert main([*arguments, "--micro-batches", "1"]) == 0
    assert "never measured, physics alone: V100-SXM2-16GB" in capsys.readouterr().out
    document: dict[str, Any] = json.loads(trained.read_text())
    document["operators"][0]["seconds"] = 0
    trained.write_text(json.dumps(document))
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_comes_with_hetplan_is_used_where_the_device_is_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The packaged operators serve the device of their name alone."""
    own = efficiency.packaged("Intel(R) Xeon(R) Processor, 1 thread", "fp32")
    assert own is not None and efficiency.packaged("T4", "fp16") is None
    assert own.provenance.kind == "measured"
    for error in train(own).errors:
        assert error.error < 0.3 < error.expected_error
    content = cluster_document()
    content["nodes"][1]["device"] = own.device
    content["devices"] = {
        own.device: {
            "memory_gib": 8,
            "peak_tflops": {"fp32": 0.18},
            "memory_gb_per_s": 100,
            "source": "x",
        }
    }
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps(content))
    options = ["--sequence", "128", "--precision", "fp32", "--micro-batches", "1"]
    assert main([*PREDICT, str(path), *options]) == 0
    out = capsys.readouterr().out
    assert f"rescaled by its own operators: {own.device}" in out
    assert "as others measured its operators: V100-SXM2-16GB" in out


@pytest.mark.wide
def test_the_command_that_measures_quickly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    path, options = tmp_path / "quick.json", ["--device", "cpu", "--precision", "fp32"]
    assert main(["profile", "quick", *options, "--device-type", "T4", "-o", str(path)]) == 0
    assert "operators of T4 in fp32" in capsys.readouterr().out
    assert len(OperatorData.load(path).operators) == 10


def test_operators_of_this_cpu(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    from hetplan.runtime.measuring import operators

    found = operators.measure_operators("cpu", "fp32", count=3, repeats=1, name="X")
    assert [op.kind for op in found.operators] == ["product", "elementwise"] * 3
    assert found.device == "X" and found.flops_per_second > 0
    rates = [op.elements * 4 / op.seconds for op in found.operators]
    assert max(rates) <= found.bytes_per_second * (1 + 1e-9)
    tiny = tuple(
        operators.Sizes((c, max(m // 64, 8), k // 8, n // 8), 4096, b)
        for (c, m, k, n), _, b in operators.QUICK
    )
    quick = operators.measure_quickly("cpu", "fp32", name="T4", operators=tiny)
    assert len(quick.operators) == 10 and quick.bus_bytes_per_second is None
    path = tmp_path / "quick.json"
    train(quick).save(path)
    assert main([*PREDICT, "g4dn-4", "--precision", "fp32", "--efficiency", str(path)]) == 0


def test_quick_measures_all_reduces_by_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two, four and all six GPUs; the line for the cluster file is in Gbit/s."""
    pytest.importorskip("torch", reason="measuring needs torch")
    from hetplan.cli.profile import all_reduce_lines
    from hetplan.runtime.measuring import operators

    made = data(4)
    rates = {2: 20e9, 4: 5e9, 6: 2.5e9}
    monkeypatch.setattr(operators, "operators_of", lambda *_, **__: made)
    monkeypatch.setattr(operators, "check_device", lambda device: None)
    monkeypatch.setattr(operators, "measured_here", lambda *_: made.provenance)
    monkeypatch.setattr(operators, "usable_gpus", lambda: 6)
    monkeypatch.setattr(operators, "bus_bandwidth", lambda ranks, device: rates[ranks])
    measured = operators.measure_quickly("cuda", "fp16")
    assert measured.all_reduce_bytes_per_second == rates
    assert measured.bus_bytes_per_second == 2.5e9
    assert OperatorData.model_validate_json(measured.model_dump_json()) == measured
    (line,) = all_reduce_lines(measured)
    assert line.endswith("all_reduce_gbit_per_s: {2: 160, 4: 40, 6: 20}")
    assert all_reduce_lines(made) == []
    assert [operators.rank_counts(gpus) for gpus in (2, 8)] == [[2], [2, 4, 8]]


BANDWIDTH, LATENCY = 1e9, 4e-4


SIZES = [2.0**p for p in range(10, 27)]


def measured(ranks: int, device: str = "X") -> Collectives:
    """Collectives that take what a ring needs and, below a megabyte, half as long again."""

    def seconds(operation: str, size: float) -> float:
        slow = 1.5 if size < 2**20 else 1.0
        return LATENCY + slow * moved_share(operation, ranks) * size / BANDWIDTH

    fits = []
    for operation in OPERATIONS:
        times = [seconds(operation, size) for size in SIZES]
        line = fit_line(SIZES, times)
        points = [
            SizePoint(bytes=n, seconds=t, median_seconds=t)
            for n, t in zip(SIZES, times, strict=True)
        ]
        fits.append(
            FittedCollective(
                operation=operation, group="node", ranks=ranks, latency_seconds=line.latency,
                bytes_per_second=line.bandwidth, r_squared=line.r_squared, points=points,
            )
        )  # fmt: skip
    return Collectives(
        backend="gloo", device=device, ranks=ranks, fits=fits,
        provenance=Provenance(kind="measured", source="made up", date="2026-01-01"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "share"),
    [
        ("send", 1),
        ("all-reduce", 1.5),
        ("all-gather", 3),
        ("reduce-scatter", 0.75),
        ("all-to-all", 0.75),
    ],
)
def test_bytes_that_pass_a_link(operation: str, share: float) -> None:
    assert moved_share(operation, 4) == share


class TestLinks:
    def test_curves_by_hand(self) -> None:
        """A disturbed message does not let the share fall; the smallest one's seconds are the
        least; what was not measured takes the nearest ranks, then another operation."""
        shares = ((1e3, 0.1), (1e4, 0.05), (1e5, 0.4))
        curves = link_curves([("send", "node", 2, *share) for share in shares])
        curves += link_curves([("all-reduce", "node", ranks, 1e3, ranks / 10) for ranks in (2, 8)])
        assert curves[0].share == [0.1, 0.1, 0.4]
        told = [share_of(curves, "send", "between", 2, size) for size in (500, 1e3, 10**4.5, 1e9)]
        assert told == pytest.approx([0.05, 0.1, 0.2, 0.4])
        assert share_of(curves, "all-reduce", "node", 6, 1e4) == pytest.approx(0.8)
        assert share_of(curves, "all-gather", "all", 2, 1e4) == pytest.approx(0.1)

    def test_a_rule_is_found_again(self) -> None:
        found = train_links([measured(2), measured(4)])
        assert found.bytes_per_second["node"] == pytest.approx(BANDWIDTH, rel=0.01)
        assert found.trained_on + found.kept_apart == 2 * len(OPERATIONS) * len(SIZES)
        assert found.error < 0.1 < found.plain_error
        links = LearnedLinks(found)
        shares = [links.share("all-reduce", "node", 4, size) for size in SIZES]
        assert shares == sorted(shares) and shares[0] < 0.1
        assert shares[-1] == pytest.approx(1, rel=0.1)
        # of a group that was not measured that of the next wider
        assert shares == [links.share("all-reduce", "between", 4, size) for size in SIZES]

    def test_files_must_be_of_one_kind_of_device(self) -> None:
        with pytest.raises(InputError, match="another device"):
            train_links([measured(2), measured(4, device="Y")])
        few = measured(2)
        with pytest.raises(InputError, match="too few"):
            train_links([few.model_copy(update={"fits": few.fits[:1]})])

    def test_costs_follow_what_was_measured(self) -> None:
        plain = small()
        learned = replace(plain, links=LearnedLinks(train_links([measured(2), measured(4)])))
        before, after = costs_of(plain), costs_of(learned)
        for size in (1e4, 1e8):
            share = after.links.share("send", "node", 2, size)  # type: ignore[union-attr]
            one, other = (c.messages([(0, 1, size)]) for c in (before, after))
            assert other.seconds == pytest.approx(one.seconds / share) and other.latency == 0
        bare = before.ring([[0, 1, 2, 3]], 1e8).seconds - before.ring([[0, 1, 2, 3]], 0.0).seconds
        share = learned.links.share("all-reduce", "between", 4, 1e8)  # type: ignore[union-attr]
        assert after.ring([[0, 1, 2, 3]], 1e8).seconds == pytest.approx(bare / share)
        assert after.ring([[0, 1]], 1e3).seconds > 5 * 1e3 / before.link(0, 1)[0]

    def test_command_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        files = [tmp_path / f"{ranks}.json" for ranks in (2, 4)]
        for ranks, path in zip((2, 4), files, strict=True):
            measured(ranks).save(path)
        trained = tmp_path / "links.json"
        assert main(["profile", "train", *map(str, files), "-o", str(trained)]) == 0
        assert "learned efficiency of links between X, gloo" in capsys.readouterr().out
        assert LinkEfficiencyFile.load(trained).kept_apart == 41
        planning = ["plan", "--model", "gpt2", "--cluster", "home", "--global-batch", "12"]
        planning += ["--strategies", "dp", "--json", "-q"]
        seconds = []
        for arguments in (planning, [*planning, "--links", str(trained)]):
            assert main(arguments) == 0
            found = json.loads(capsys.readouterr().out)
            seconds.append(found["candidates"][found["winner"]]["predicted_seconds"])
        # large gradients: learned shares near 1, no latency beside them
        assert seconds[1] != seconds[0]
        document = json.loads(trained.read_text())
        document["curves"] = []
        trained.write_text(json.dumps(document))
        assert main([*planning, "--links", str(trained)]) == 2
        assert "links.json: curves" in capsys.readouterr().err
