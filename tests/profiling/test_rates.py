"""Measured rates: seconds by hand where physics alone speaks, single published measurements, and
intervals."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetplan.errors import InputError
from hetplan.profiling.hardware.cluster import DeviceSpec, Node, catalogue, device, example_cluster
from hetplan.profiling.models.operators import Precision, Shape
from hetplan.profiling.rates.collectives import (
    FABRIC_RATES,
    CollectiveCurve,
    Fabric,
    all_reduce_bus_bandwidth,
    borrowed_curves,
    collective_seconds,
    curve_of,
    node_fabric,
    with_intra_bandwidth,
)
from hetplan.profiling.rates.products import (
    MoveKind,
    move_seconds,
    product_seconds,
    products_seconds,
    wider,
)
from hetplan.profiling.rates.shipped import (
    Format,
    FormatRate,
    MoveRate,
    ProductTrees,
    Tiling,
    shipped,
)
from hetplan.profiling.rates.tiles import (
    PHYSICS,
    Architecture,
    Machine,
    Regime,
    architecture,
    physical,
)

MADE_UP = DeviceSpec(
    memory_gib=16,
    peak_tflops={"fp16": 100, "fp32": 10},
    memory_gb_per_s=1000,
    multiprocessors=10,
    source="made up",
)
WITH_FP16_AND_FP32 = sorted(
    name for name, spec in catalogue().items() if {"fp16", "fp32"} <= set(spec.peak_tflops)
)
sizes, widths = (st.integers(least, 2**15).map(float) for least in (1, 256))


def test_what_is_shipped_names_its_origins_and_devices() -> None:
    rates = shipped()
    known = {origin.name for origin in rates.origins}
    assert known == {"neusight", "vidur", "vtrain", "aiconfigurator"}
    licences = {origin.licence.split(" ")[0] for origin in rates.origins}
    assert licences == {"MIT", "Apache-2.0"}
    assert all("@" in origin.source for origin in rates.origins)
    tables: list[ProductTrees | FormatRate | MoveRate] = [
        *rates.products,
        *rates.formats,
        *rates.moves,
    ]
    for table in tables:
        assert table.origin in known and set(table.devices) <= set(catalogue())
        assert table.errors.low <= 1 <= table.errors.high
    for curve in rates.collectives:
        assert set(curve.origin.split(", ")) <= known
        assert curve.seconds == sorted(curve.seconds)


class TestProducts:
    PLAIN = dataclasses.replace(
        PHYSICS, rows=(256, 128), columns=(128, 256), split=(1, 2), sharpness=(500.0, 500.0)
    )
    TILING = Tiling(slowness=[1.0, 1.5], wave_seconds=[1e-7, 1e-7], memory=0.8, start_seconds=3e-6)

    @pytest.mark.parametrize(
        ("size", "seconds"),
        [
            # 80 tiles of 256 x 128, 8 waves of 10 on 80 TFLOP/s, the waves' own 0.1 us each
            ((1, 2560, 4096, 1024), 3e-6 + 8e-7 + 2 * 2560 * 4096 * 1024 / 80e12),
            # one row more takes 88 tiles: 9 waves
            ((1, 2561, 4096, 1024), 3e-6 + 9e-7 + 9 / 8 * 2 * 2560 * 4096 * 1024 / 80e12),
            # 2 tiles of 128 x 256, cut in two inside, are one wave at 1.5 times the seconds; of
            # 256 x 128 it takes one of the whole depth
            ((1, 128, 65536, 512), 3e-6 + 1e-7 + 1.5 * 2 * 10 * 128 * 256 * 32768 / 80e12),
            # the bytes of a shallow product
            ((1, 8192, 32, 8192), 3e-6 + 2 * (8192 * 8192 + 2 * 8192 * 32) / 0.8e12),
        ],
    )
    def test_physics_by_hand(self, size: tuple[float, ...], seconds: float) -> None:
        machine = Machine.of(MADE_UP, "fp16")
        told, _ = physical(machine, self.TILING, np.array([size], float), self.PLAIN)
        assert told[0] == pytest.approx(seconds, rel=2e-3)

    def test_watts_bound_sustained_products(self) -> None:
        """30 W at 19 pJ an operation are 1.58 TFLOP/s, less than 0.9 of 10."""
        shape = Shape(1, 25600, 4096, 10240)
        small = MADE_UP.model_copy(update={"tdp_w": 30.0})
        free, bound = (
            product_seconds("never measured", spec, "fp32", shape) for spec in (MADE_UP, small)
        )
        assert bound.seconds / free.seconds == pytest.approx(9e12 / (30 / 19e-12), rel=0.02)
        assert free.source == "roofline over tiles, never measured"

    def test_watts_do_not_bound_where_the_energy_of_an_operation_is_unknown(self) -> None:
        """A B200 at 1 kW has an energy of its own, less than an H100's; an MI355X has none."""
        spec = catalogue()["B200"]
        assert spec.tdp_w == 1000
        assert Machine.of(spec, "fp16").reached == pytest.approx(1000 / 0.91e-12)
        assert Machine.of(spec, "fp16", regime="burst").reached == pytest.approx(0.8 * 2250e12)
        assert Machine.of(catalogue()["MI355X"], "fp16").reached == pytest.approx(0.8 * 2516.6e12)

    def test_an_mi300x_reaches_half_of_its_peak_in_sustained_use(self) -> None:
        """SemiAnalysis, December 2024: 620 TFLOP/s in bf16, 990 in fp8; an MI325X has 1000 W."""
        mi300x, mi325x = catalogue()["MI300X"], catalogue()["MI325X"]
        assert Machine.of(mi300x, "bf16").reached == pytest.approx(620e12, rel=0.01)
        assert Machine.of(mi300x, "fp8").reached == pytest.approx(990e12, rel=0.01)
        assert Machine.of(mi300x, "fp8").bursts == pytest.approx(0.8 * 2614.9e12)
        assert Machine.of(mi325x, "fp8").reached == pytest.approx(990e12 * 1000 / 750, rel=0.01)

    @pytest.mark.parametrize(
        ("name", "precision", "shape", "seconds", "within"),
        [
            # vidur (microsoft/vidur@7d47513): Llama-2-7b, the MLP's first product
            ("A100-SXM4-80GB", "fp16", Shape(1, 4000, 4096, 22016), 3.3655e-3, 0.05),
            ("A100-SXM4-80GB", "fp16", Shape(1, 1, 4096, 22016), 116e-6, 0.10),
            ("H100-SXM5-80GB", "fp16", Shape(1, 4000, 4096, 22016), 987e-6, 0.05),
            ("A40", "fp16", Shape(1, 4000, 2048, 8192), 1336e-6, 0.12),
            # NeuSight (sitar-lab/NeuSight@6945927): a head of a large vocabulary
            ("L4", "fp32", Shape(1, 2048, 65536, 50272), 1.6794, 0.15),
        ],
    )
    def test_published_measurements(
        self, name: str, precision: Precision, shape: Shape, seconds: float, within: float
    ) -> None:
        told = product_seconds(name, device(name), precision, shape)
        assert told.seconds == pytest.approx(seconds, rel=within)

    @given(m=sizes, k=widths, n=widths, name=st.sampled_from(WITH_FP16_AND_FP32))
    def test_interval_and_growth(self, m: float, k: float, n: float, name: str) -> None:
        """Sixteen times the rows take longer, whatever the tiles make of them."""
        shapes = (Shape(1, m, k, n), Shape(1, 16 * m + 4096, k, n))
        one, more = products_seconds(name, device(name), "fp16", shapes)
        assert 0 < one.low <= one.seconds <= one.high
        assert one.seconds < more.seconds
        assert one == product_seconds(name, device(name), "fp16", shapes[0])

    def test_what_is_far_from_measurements_has_the_wider_interval(self) -> None:
        """vidur measured single fp16 products: batches are further, more rows are not."""
        spec = device("A100-SXM4-80GB")
        for shape, far in ((Shape(32, 4096, 4096, 4096), True), (Shape(1, 2e5, 4096, 4096), False)):
            told = product_seconds("A100-SXM4-80GB", spec, "fp16", shape)
            assert (told.high == pytest.approx(told.seconds * PHYSICS.high)) == far
            assert told.source == ("vidur, beyond its sizes" if far else "vidur")

    def test_precisions(self) -> None:
        shape, spec = Shape(1, 4096, 4096, 4096), device("A100-SXM4-80GB")
        both = [product_seconds("A100-SXM4-80GB", spec, p, shape) for p in ("fp16", "bf16")]
        assert both[0] == both[1]
        with pytest.raises(InputError, match="peak_tflops"):
            product_seconds("T4", device("T4"), "bf16", shape)


LARGE = Shape(1, 8192, 8192, 8192)


def teraflops(
    name: str, number: Format, regime: Regime, shape: Shape = LARGE, **parts: object
) -> float:
    spec = device(name).model_copy(update=parts)
    return shape.flops / product_seconds(name, spec, number, shape, regime=regime).seconds / 1e12


class TestFormats:
    @pytest.mark.parametrize(
        ("name", "number", "reached", "within"),
        [
            # aiconfigurator (ai-dynamo/aiconfigurator@095f58a): medians of m, n, k >= 4096
            ("A100-SXM4-80GB", "bf16", 251, 0.1),
            ("H100-SXM5-80GB", "bf16", 801, 0.1),
            ("H100-SXM5-80GB", "fp8", 1258, 0.15),
            ("H100-SXM5-80GB", "fp8-block", 1261, 0.15),
            ("B200", "bf16", 1587, 0.1),
            ("B200", "fp8", 2422, 0.15),
            ("B200", "fp8-block", 2751, 0.15),
            ("B200", "fp4", 4125, 0.15),
            ("L40S", "bf16", 235, 0.15),
            ("L40S", "fp8", 374, 0.15),
        ],
    )
    def test_large_products_in_bursts(
        self, name: str, number: Format, reached: float, within: float
    ) -> None:
        assert teraflops(name, number, "burst") == pytest.approx(reached, rel=within)

    def test_a_board_in_training_computes_what_its_watts_pay_for(self) -> None:
        """SimuMax (MooreThreads/SimuMax@4dcaae5): B200 inside training, medians of m, k, n >= 4096,
        1111 TFLOP/s; half of the watts are half of the rate. Bursts do not depend on watts."""
        assert teraflops("B200", "bf16", "sustained", tdp_w=1000.0) == pytest.approx(1111, rel=0.1)
        half = teraflops("B200", "bf16", "sustained", tdp_w=500.0)
        assert half == pytest.approx(
            teraflops("B200", "bf16", "sustained", tdp_w=1000.0) / 2, rel=0.05
        )
        bursts = {teraflops("B200", "bf16", "burst", tdp_w=watts) for watts in (500.0, 1000.0)}
        assert len(bursts) == 1 and bursts.pop() > 1400

    def test_watts_pay_for_the_bursts_that_were_measured_in_4_bits(self) -> None:
        """aiconfigurator's B200 reaches 3958 TFLOP/s in nvfp4, 3.6 times SimuMax's bf16 inside
        training: an operation takes fewer joules than one in 8 bits. More watts pay for more."""
        on_b200 = teraflops("B200", "fp4", "sustained", tdp_w=1000.0)
        assert on_b200 == pytest.approx(3958, rel=0.15)
        in_8_bits = teraflops("B200", "fp8", "sustained", tdp_w=1000.0)
        assert 1.4 < on_b200 / in_8_bits < 1.7
        assert teraflops("GB300", "fp4", "sustained") > 1.25 * on_b200

    def test_a_device_takes_the_tiles_of_its_architecture(self) -> None:
        """A GB200 is a B200 with other figures; its interval is the wider one of two boards."""
        shape = Shape(1, 4096, 4096, 4096)
        b200, gb200 = (
            product_seconds(name, device(name), "fp8", shape, regime="burst")
            for name in ("B200", "GB200")
        )
        assert gb200.source == "aiconfigurator on B200" and b200.source == "aiconfigurator"
        assert gb200.seconds == pytest.approx(b200.seconds * 4500 / 5000, rel=0.05)
        assert gb200.high / gb200.seconds > b200.high / b200.seconds
        assert gb200.low / gb200.seconds < b200.low / b200.seconds
        unlike = product_seconds("MI300X", device("MI300X"), "fp8", shape)
        assert unlike.source == "fp8 of other architectures"
        assert unlike.high / unlike.seconds == pytest.approx(PHYSICS.unlike_high)
        assert wider(0.9, 1.1, 0.0) == pytest.approx((0.9, 1.1))

    def test_narrower_products_than_any_measured_have_the_wider_interval(self) -> None:
        spec = device("H100-SXM5-80GB")
        wide, narrow = (
            product_seconds("H100-SXM5-80GB", spec, "fp8", Shape(1, 4096, 4096, n), regime="burst")
            for n in (128, 32)
        )
        assert narrow.high / narrow.seconds > wide.high / wide.seconds

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("T4", "older"), ("RTX-3090", "ampere"), ("A10G", "ampere"), ("L4", "ada"),
            ("RTX-5090", "ada"), ("RTX-PRO-6000-Blackwell", "ada"), ("H20", "hopper"),
            ("GB300", "blackwell"), ("MI355X", "other"), ("TPU-v5p", "other"),
        ],
    )  # fmt: skip
    def test_architectures(self, name: str, kind: Architecture) -> None:
        assert architecture(device(name)) == kind

    def test_a_device_without_units_is_refused(self) -> None:
        with pytest.raises(InputError, match="peak_tflops"):
            product_seconds("A100-SXM4-80GB", device("A100-SXM4-80GB"), "fp8-block", LARGE)


class TestMoves:
    @pytest.mark.parametrize(
        ("kind", "rows", "row", "name", "seconds"),
        [
            # NeuSight: binary moves three numbers of 4 bytes, the others two
            ("binary", 13021, 984, "P100-PCIE-16GB", 298.2e-6),
            ("binary", 12166, 728, "P100-PCIE-16GB", 212.8e-6),
        ],
    )
    def test_published_measurements(
        self, kind: MoveKind, rows: int, row: int, name: str, seconds: float
    ) -> None:
        moved = 4.0 * rows * row * (3 if kind == "binary" else 2)
        told = move_seconds(kind, moved, name, device(name), row=row)
        assert told.seconds == pytest.approx(seconds, rel=0.03)

    @given(
        moved=st.floats(1, 1e11),
        kind=st.sampled_from(["binary", "pointwise", "norm", "softmax"]),
        row=st.sampled_from([None, 64.0, 1000.0, 50000.0]),
        name=st.sampled_from(WITH_FP16_AND_FP32),
    )
    def test_interval_and_growth(
        self, moved: float, kind: MoveKind, row: float | None, name: str
    ) -> None:
        spec = device(name)
        one, more = (move_seconds(kind, b, name, spec, row=row) for b in (moved, 1.1 * moved))
        assert one.low <= one.seconds <= one.high and one.seconds <= more.seconds
        assert one.seconds >= moved / spec.memory_bytes_per_s

    def test_a_device_that_was_not_measured_borrows_from_the_nearest(self) -> None:
        told = move_seconds("norm", 1e8, "H100-SXM5-80GB", device("H100-SXM5-80GB"))
        assert told.source == "neusight on A100-PCIE-40GB"
        assert told.high / told.seconds > 1.2


class TestCollectives:
    a100 = node_fabric(example_cluster("company").nodes[-1])
    h100 = node_fabric(example_cluster("company").nodes[0])

    @pytest.mark.parametrize(
        ("size", "ranks", "seconds"),
        # vTrain (VIA-Research/vTrain@f8dda84), its A100 tables
        [(2**30, 8, 8193e-6), (2**26, 8, 579.9e-6), (2**24, 4, 179.6e-6), (2**20, 2, 44.21e-6)],
    )
    def test_published_measurements(self, size: float, ranks: int, seconds: float) -> None:
        told = collective_seconds("all-reduce", size, ranks, self.a100)
        assert told.seconds == pytest.approx(seconds, rel=0.12)
        assert "vtrain" in told.source

    def test_halves(self) -> None:
        whole = collective_seconds("all-reduce", 1e8, 8, self.a100).seconds
        for operation in ("all-gather", "reduce-scatter"):
            assert collective_seconds(operation, 1e8, 8, self.a100).seconds == whole / 2

    @pytest.mark.parametrize(
        ("operation", "device_type", "gigabytes", "ranks", "size", "seconds"),
        [
            # aiconfigurator (ai-dynamo/aiconfigurator@095f58a), NCCL 2.27.3, 16-bit numbers
            ("all-reduce", "L40S", 32, 2, 2**29, 26.7e-3),
            ("all-reduce", "L40S", 32, 4, 2**29, 156e-3),
            ("all-reduce", "L40S", 32, 8, 2**29, 649e-3),
            ("all-reduce", "L40S", 32, 8, 2**17, 0.28e-3),
            ("all-gather", "L40S", 32, 8, 2**29, 400e-3),
            ("all-reduce", "H100-SXM5-80GB", 450, 8, 2**29, 2.11e-3),
            ("all-reduce", "H100-SXM5-80GB", 450, 2, 2**25, 0.144e-3),
            ("all-to-all", "H100-SXM5-80GB", 450, 8, 2**29, 1.49e-3),
            ("all-reduce", "A100-SXM4-80GB", 300, 8, 2**17, 0.0274e-3),
        ],
    )
    def test_curves_by_ranks(
        self,
        operation: str,
        device_type: str,
        gigabytes: float,
        ranks: int,
        size: float,
        seconds: float,
    ) -> None:
        node = Node(device_type, 8, gigabytes * 1e9, 1e9, 6e-6, 2e-5)
        told = collective_seconds(operation, size, ranks, node_fabric(node))
        assert told.seconds == pytest.approx(seconds, rel=0.1)

    def test_other_cards_in_pcie_slots_take_the_curve_in_proportion(self) -> None:
        """The form of L40S's curve over PCIe 4, twice as slow over PCIe 3; five ranks lie between
        four and eight, ten take as long as eight. Half a slot's figure is taken for a measured one,
        and more than the slot has for that of a bridge."""

        def seconds(device_type: str, bandwidth: float, ranks: int) -> float:
            fabric = node_fabric(Node(device_type, 10, bandwidth, 1e9, 6e-6, 2e-5))
            return collective_seconds("all-reduce", 2.0**29, ranks, fabric).seconds

        measured = {ranks: seconds("L40S", 31.5e9, ranks) for ranks in (2, 4, 5, 8, 10)}
        assert measured[4] / measured[2] > 5 and measured[8] / measured[4] > 3
        assert measured[4] < measured[5] < measured[8] == measured[10]
        for ranks, expected in measured.items():
            assert seconds("A10G", 31.5e9, ranks) == pytest.approx(expected)
            assert seconds("T4", 15.75e9, ranks) == pytest.approx(2 * expected, rel=0.01)
        for stated in (6.25e9, 20e9):
            fabric = node_fabric(Node("T4", 8, stated, 1e9, 6e-6, 2e-5))
            assert fabric.measured is None

    def test_a_cluster_file_states_its_all_reduces(self) -> None:
        """10 GB/s between eight, whatever the fabric; other operations change as they do."""
        stated = Node("L4", 8, 31.5e9, 1e9, 6e-6, 2e-5, all_reduce=((2, 20e9), (8, 10e9)))
        assert all_reduce_bus_bandwidth(stated, 8) == pytest.approx(10e9, rel=0.01)
        assert all_reduce_bus_bandwidth(stated, 4) == pytest.approx(200e18**0.5, rel=0.01)
        plain = dataclasses.replace(stated, all_reduce=())
        faster = all_reduce_bus_bandwidth(stated, 8) / all_reduce_bus_bandwidth(plain, 8)
        gathers = [
            collective_seconds("all-gather", 2.0**29, 8, node_fabric(node)).seconds
            for node in (plain, stated)
        ]
        assert gathers[0] / gathers[1] == pytest.approx(faster, rel=0.01)
        other = Node("my-card", 2, 5e9, 1e9, 6e-6, 2e-5, all_reduce=((2, 3e9),))
        assert all_reduce_bus_bandwidth(other, 2) == pytest.approx(3e9, rel=0.01)

    def test_twice_the_links_are_twice_the_all_reduces(self) -> None:
        """Even where so much bandwidth would be that of other links."""
        for node in (
            Node("L4", 8, 31.5e9, 1e9, 6e-6, 2e-5),
            Node("A100-SXM4-80GB", 8, 300e9, 1e9, 6e-6, 2e-5),
            Node("T4", 4, 6e9, 1e9, 6e-6, 2e-5, all_reduce=((4, 2e9),)),
        ):
            twice = with_intra_bandwidth(node, 2 * node.intra_bandwidth)
            faster = all_reduce_bus_bandwidth(twice, 4) / all_reduce_bus_bandwidth(node, 4)
            assert faster == pytest.approx(2, rel=0.02)

    def test_borrowed_curves_are_told(self) -> None:
        l4 = Node("L4", 8, 32e9, 1e9, 6e-6, 2e-5)
        (line,) = borrowed_curves([l4, l4])
        assert re.search(r"L4 follow the curves of L40S.* 1\d\d Gbit/s among 2, 1\d\.?\d* ", line)
        stated = dataclasses.replace(l4, all_reduce=((8, 1e9),))
        alone, own = dataclasses.replace(l4, devices=1), dataclasses.replace(l4, device="L40S")
        assert borrowed_curves([stated, alone, own]) == []

    def test_other_links_by_hand(self) -> None:
        link = Fabric(25e9, 1e-5, 0.95)
        told = collective_seconds("all-reduce", 1e9, 4, link)
        assert told.seconds == pytest.approx(6e-5 + 1.5 * 1e9 / (0.95 * 25e9))
        assert collective_seconds("send", 1e9, 2, link).seconds == pytest.approx(
            1e-5 + 1e9 / (0.95 * 25e9)
        )
        assert collective_seconds("all-reduce", 1e9, 1, link).seconds == 0
        with pytest.raises(InputError, match="unknown collective"):
            collective_seconds("gossip", 1.0, 2, link)

    def test_the_fabric_follows_from_the_cluster_file(self) -> None:
        """amp-mixed states 170 Gbit/s between V100s: no NVLink of six."""
        (slow, *_), fast = example_cluster("amp-mixed").nodes, example_cluster("hap-64").nodes[0]
        assert node_fabric(slow).measured is None
        assert node_fabric(slow).share == FABRIC_RATES.inside
        measured = node_fabric(fast).measured
        assert measured is not None and measured.fabric == "v100-nvlink"
        assert curve_of("v100-nvlink", "all-reduce", 16) is None

    @given(
        exponent=st.floats(3, 34),
        ranks=st.integers(2, 16),
        operation=st.sampled_from(["all-reduce", "all-gather", "send"]),
        half=st.booleans(),
    )
    def test_interval_and_growth(
        self, exponent: float, ranks: int, operation: str, half: bool
    ) -> None:
        fabrics: list[Fabric] = [self.a100, self.h100]
        if half:
            fabrics = [dataclasses.replace(f, bandwidth=f.bandwidth / 2) for f in fabrics]
        for fabric in fabrics:
            one, more = (
                collective_seconds(operation, math.exp2(e), ranks, fabric)
                for e in (exponent, exponent + 0.1)
            )
            assert 0 < one.low <= one.seconds <= one.high
            assert one.seconds <= more.seconds * (1 + 1e-12)


def test_curves_compare_after_use() -> None:
    one, other = (CollectiveCurve(log2_bytes=[10.0, 20.0], seconds=[1e-5, 1e-3]) for _ in range(2))
    assert one.at(2.0**15) == other.at(2.0**15) == pytest.approx(1e-4)
    assert one == other
