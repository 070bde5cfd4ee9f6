"""The physics of a matrix product: a roofline over tiles, by number format and regime.

A library cuts the result into tiles, and also the inner dimension where tiles are few. The
multiprocessors compute the tiles in waves, and the last wave takes as long as a full one (NVIDIA,
"Matrix Multiplication Background", tile and wave quantisation). The fastest kind of tile that
libraries use decides, but a product takes no less than its bytes need.

A format is how the operands are stored: its rate and its bytes are its own. A regime says for how
long a device computes. In bursts of milliseconds, as benchmarks of single products have them, the
clock is at its highest. In sustained use, as in training, no device computes more than the watts of
its board pay for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from hetplan.profiling.hardware.cluster import DeviceSpec, Floats
from hetplan.profiling.models.operators import PRECISIONS, Precision
from hetplan.profiling.rates.shipped import Format, Tiling

Regime = Literal["burst", "sustained"]
# Bytes of an operand's number. The scales of `fp8-block` (blocks of 128) and `fp4` (blocks of 16)
# are left out.
FORMAT_BYTES: dict[Format, float] = {
    "fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "fp8-block": 1, "fp4": 0.5,
}  # fmt: skip
# Kinds of tensor cores, by what a device's catalogue entry says of it.
Architecture = Literal["older", "ampere", "ada", "hopper", "blackwell", "other"]
# Bytes/s of memory above which a board has stacked memory, and the chip of a data centre: those of
# the RTX 5090 are 1.8e12, those of the H100 in PCIe slots 2e12.
STACKED_MEMORY = 1900e9


def architecture(spec: DeviceSpec) -> Architecture:
    """The kind of tensor cores of a catalogue entry; `other` for vendors besides NVIDIA.

    Boards without stacked memory that have units for 8 bits compute as Ada does, those with 4 bits
    (RTX Blackwell) included: they have the instructions of a warp, not those of a group of warps
    (NVIDIA, PTX ISA, mma and wgmma).
    """
    peaks = spec.peak_tflops
    if spec.vendor != "nvidia":
        return "other"
    if "fp8" in peaks and spec.memory_bytes_per_s < STACKED_MEMORY:
        return "ada"
    if "fp4" in peaks:
        return "blackwell"
    if "fp8" in peaks:
        return "hopper"
    return "ampere" if "bf16" in peaks else "older"


@dataclass(frozen=True)
class Physics:
    """Constants of the roofline over tiles."""

    # [T] rows and columns of each kind of tile of cuBLAS and CUTLASS, and the number of parts into
    # which it cuts the inner dimension (CUTLASS documentation, "Efficient GEMM in CUDA")
    rows: tuple[int, ...] = (256, 128, 128, 256, 64, 128, 64, 64, 128, 64, 128, 64)
    columns: tuple[int, ...] = (128, 256, 128, 64, 256, 64, 128, 64, 128, 64, 128, 64)
    split: tuple[int, ...] = (1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 4, 4)
    # share of the peak that large products reach: in 16 bits vidur's A100, A40 and H100 0.69 to
    # 0.78, in fp32 NeuSight's V100 and A100 0.8 to 0.97
    share_16: float = 0.8
    share_32: float = 0.9
    # joules of an operation; no device computes more than the watts of its board pay for
    joules_32: float = 19e-12  # fp32, up to Turing (NeuSight's T4: 70 W at 3.7 TFLOP/s)
    joules_32_new: float = 9.3e-12  # fp32, from Ampere on (NeuSight's L4: 72 W at 7.7 TFLOP/s)
    # tensor cores up to Turing (a T4: 70 W at 24 TFLOP/s, NVIDIA developer forum 264462)
    joules_16: float = 2.9e-12
    joules_16_new: float = 0.97e-12  # from Ampere on (vidur's H100: 700 W at 720 TFLOP/s)
    # SimuMax's B200 inside training: 1000 W at 1100 TFLOP/s
    joules_16_blackwell: float = 0.91e-12
    # How many 8- or 4-bit operations take the joules of one in 16 bits, on boards with stacked
    # memory: aiconfigurator's B200 in fp8 and in nvfp4 over SimuMax's in bf16, 2545 and 3958 over
    # 1100 TFLOP/s. They are lower bounds, since these bursts do not reach the watts; no source has
    # sustained ones.
    operations_8: float = 2.3
    operations_4: float = 3.6
    # aiconfigurator's L40S: 350 W at the 250 and 410 TFLOP/s of its largest products in bf16 and
    # in 8 bits. They are reached in bursts already.
    joules_16_ada: float = 1.4e-12
    joules_8_ada: float = 0.85e-12
    # CDNA 3: MI300X with 750 W at 620 TFLOP/s in bf16 and 990 in fp8, the medians of 200 products
    # of normally distributed numbers by the fastest library (SemiAnalysis, "MI300X vs H100 vs H200
    # Benchmark Part 1: Training", 22 December 2024)
    joules_16_cdna3: float = 1.21e-12
    joules_8_cdna3: float = 0.76e-12
    multiprocessors: int = 80  # number where the catalogue has none: a V100's
    # (exponent of the smooth minimum over tiles, exponent of the smooth maximum of computing and
    # moving); the minimum is smooth because libraries do not always choose the fastest tile
    sharpness: tuple[float, float] = (20.0, 10.0)
    # Measured / physical seconds of a device that was not measured: 10 % of the products lie below
    # `low`, 10 % above `high`, over all measured devices, each with the mean fit of the others
    # (`evidence/speed/fit_rates.py`).
    low: float = 0.77
    high: float = 1.3
    # The same where an architecture was measured, for a device whose operators were not: standard
    # deviation of logarithms between two boards or versions of libraries. Half of what lies between
    # the medians of architectures (`evidence/speed/rates_left_out.py`).
    boards: float = 0.04
    # Least k and n of the products by which the formats' tiles were fitted, by bytes of a number:
    # libraries have no kernels for less than a block of 128, or fall back to other ones.
    least_width: float = 64.0
    least_narrow_width: float = 128.0
    # The same for a format on an architecture that nobody measured, by the others.
    unlike_low: float = 0.65
    unlike_high: float = 1.5
    # Measured seconds inside training over bursts limited by watts: 10 % of SimuMax's products on
    # B200 lie below.
    sustained_low: float = 0.81


PHYSICS = Physics()


@dataclass(frozen=True)
class Machine:
    """A device as the model of products sees it."""

    peak: float  # FLOP/s of its datasheet
    reached: float  # FLOP/s of large products
    bursts: float  # FLOP/s of large products in bursts; at least `reached`
    bandwidth: float  # bytes/s of its datasheet
    multiprocessors: int  # tiles that it computes at once; a V100's where the catalogue has none
    element_bytes: float  # bytes of a number in this format

    @classmethod
    def of(
        cls,
        spec: DeviceSpec,
        number: Format,
        physics: Physics = PHYSICS,
        regime: Regime = "sustained",
    ) -> "Machine":
        """The machine of a catalogue entry for operands of a format. Raises InputError where it has
        no units for them."""
        peak = peak_flops(spec, number)
        share = peak * (physics.share_32 if number == "fp32" else physics.share_16)
        limits = [watts_limit(spec, number, physics, which) for which in ("burst", regime)]
        return cls(
            peak=peak,
            reached=min(share, *limits),
            bursts=min(share, limits[0]),
            bandwidth=spec.memory_bytes_per_s,
            multiprocessors=spec.multiprocessors or physics.multiprocessors,
            element_bytes=FORMAT_BYTES[number],
        )


def peak_flops(spec: DeviceSpec, number: Format) -> float:
    """The dense peak in FLOP/s of a format; raises InputError where the device has no units for
    it."""
    units = "fp8" if number == "fp8-block" else number
    return spec.peak_flops(cast(Precision, units))


def watts_limit(spec: DeviceSpec, number: Format, physics: Physics, regime: Regime) -> float:
    """FLOP/s that the watts of the board pay for; infinite where they are no limit, or unknown."""
    joules = joules_of(spec, number, physics, regime)
    if spec.tdp_w is None or joules is None:
        return math.inf
    return spec.tdp_w / joules


def joules_of(spec: DeviceSpec, number: Format, physics: Physics, regime: Regime) -> float | None:
    """Joules of an operation; None in bursts that the board's watts do not limit, and where nobody
    measured any.

    They are NVIDIA's, and those of AMD's CDNA 3. A device that a cluster file describes counts as
    NVIDIA's unless it has units for 4 bits.
    """
    kind = architecture(spec)
    is_described = spec.vendor == "other" and "fp4" not in spec.peak_tflops
    is_narrow = number not in PRECISIONS
    if is_cdna3(spec) and number != "fp32" and regime == "sustained":
        return physics.joules_8_cdna3 if is_narrow else physics.joules_16_cdna3
    if kind == "other" and not is_described:
        return None
    has_bf16 = "bf16" in spec.peak_tflops
    if number == "fp32":
        return physics.joules_32_new if has_bf16 else physics.joules_32
    if kind == "ada":
        return physics.joules_8_ada if is_narrow else physics.joules_16_ada
    if regime == "burst":
        return None
    joules = physics.joules_16_new if has_bf16 else physics.joules_16
    if kind == "blackwell":
        joules = physics.joules_16_blackwell
    if not is_narrow:
        return joules
    return joules / (physics.operations_4 if number == "fp4" else physics.operations_8)


def is_cdna3(spec: DeviceSpec) -> bool:
    """Whether a device is an MI300X or one of its kin: AMD's with units for 8 bits, none for 4."""
    stacked = spec.memory_bytes_per_s >= STACKED_MEMORY
    has_8_not_4 = "fp8" in spec.peak_tflops and "fp4" not in spec.peak_tflops
    return spec.vendor == "amd" and stacked and has_8_not_4


@dataclass(frozen=True)
class Tiles:
    """N products cut into each of T kinds of tile on a device."""

    busy: Floats  # [N, T] seconds of all waves at the reached rate, the last one counted as full
    waves: Floats  # [N, T] number of waves
    lost: Floats  # [N, T] `busy` over `alone`
    alone: Floats  # [N, 1] seconds of the product's own operations at the reached rate
    moved: Floats  # [N, 1] seconds of the product's bytes at the datasheet's bandwidth

    @classmethod
    def of(cls, machine: Machine, sizes: Floats, physics: Physics = PHYSICS) -> "Tiles":
        """The tiles of products `sizes` [N, 4]: count, m, k, n, each at least 1."""
        count, m, k, n = sizes.T[:, :, None]  # [N, 1] each
        rows, columns, split = map(np.array, (physics.rows, physics.columns, physics.split))
        tiles = count * np.ceil(m / rows) * np.ceil(n / columns) * split
        waves = np.ceil(tiles / machine.multiprocessors)
        inner = np.ceil(k / split / 32) * 32  # kernels take the inner dimension in steps of 32
        busy = 2.0 * waves * machine.multiprocessors * rows * columns * inner / machine.reached
        alone = 2.0 * count * m * k * n / machine.reached
        moved = count * (m * k + k * n + m * n) * machine.element_bytes / machine.bandwidth
        return cls(busy, waves, busy / alone, alone, moved)


def physical(
    machine: Machine, tiling: Tiling, sizes: Floats, physics: Physics = PHYSICS
) -> tuple[Floats, Floats]:
    """(physical seconds [N], features of the trees [N, F]) of products `sizes` [N, 4]: count, m, k
    and n.

    computed = (sum over tiles of seconds^-sharp)^(-1/sharp), a smooth minimum;
    seconds = (computed^blunt + moved^blunt)^(1/blunt) + start, a smooth maximum.
    """
    sizes = np.maximum(sizes, 1.0)
    tiles = Tiles.of(machine, sizes, physics)
    sharp, blunt = physics.sharpness
    by_tile = tiles.busy * np.array(tiling.slowness) + tiles.waves * np.array(tiling.wave_seconds)
    best = by_tile.min(axis=1, keepdims=True)
    by_best = by_tile / best
    computed = best * (by_best**-sharp).sum(axis=1, keepdims=True) ** (-1 / sharp)
    moved = tiles.moved / tiling.memory
    longer = np.maximum(computed, moved)
    shorter = np.minimum(computed, moved)
    seconds = longer * (1.0 + (shorter / longer) ** blunt) ** (1 / blunt) + tiling.start_seconds
    measures = (
        sizes,
        tiles.alone * 1e6,  # microseconds
        tiles.alone / tiles.moved,
        tiles.waves[:, 2:3],  # of tiles of 128 x 128, the third kind of `Physics.rows`
        best / moved,
        tiles.lost,
        by_best,
    )
    # Trees compare whole numbers: thousandths of logarithms to base 2.
    features = np.round(1e3 * np.log2(np.concatenate(measures, axis=1)))
    return seconds[:, 0], features


def mean_of(tilings: Sequence[Tiling]) -> Tiling:
    """The tiling whose figures are the geometric means of the tilings' figures."""
    figures = [[*t.slowness, *t.wave_seconds, t.memory, t.start_seconds] for t in tilings]
    mean = np.exp(np.log(figures).mean(axis=0)).tolist()
    tiles = len(tilings[0].slowness)
    return Tiling(
        slowness=mean[:tiles], wave_seconds=mean[tiles:-2], memory=mean[-2], start_seconds=mean[-1]
    )
