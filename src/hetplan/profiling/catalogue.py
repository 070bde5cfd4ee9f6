"""The device catalogue: what a device type can do, from datasheets, with a source for every entry.

The figures stand in `devices.yaml` beside this module, in the units that datasheets print; the
properties of `DeviceSpec` give SI. A cluster file may add types or override figures (`overridden`).
"""

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hetplan.errors import InputError
from hetplan.files import read_yaml
from hetplan.names import suggestion, unknown_name
from hetplan.profiling.operators import Precision
from hetplan.schema import Name, PositiveCount, Rate, StrictModel, parse

GIB = 2**30
EXAMPLE = (
    "`devices: {NAME: {memory_gib: 80, peak_tflops: {fp16: 990, bf16: 990, fp32: 67}, "
    "memory_gb_per_s: 3350}}`"
)

Peaks = Annotated[dict[Precision | Literal["fp8", "fp4"], Rate], Field(min_length=1)]
Price = Annotated[float, Field(ge=0, le=1e6)]


class DeviceSpec(StrictModel):
    """One device type. Keys carry the datasheet's units; the properties are SI.

    peak_tflops: dense peak by precision of the operands, 8 and 4 bit among them. price_per_hour: US
    dollars per device, None: unknown. tdp_w: watts that the board may draw, None: not known.
    multiprocessors: how many tiles of a product are computed at once, None: not known.
    """

    memory_gib: Rate
    peak_tflops: Peaks
    memory_gb_per_s: Rate
    tdp_w: Rate | None = None
    multiprocessors: PositiveCount | None = None
    price_per_hour: Price | None = None
    source: Name
    price_source: Name | None = None
    vendor: Name = "other"

    @property
    def memory_bytes(self) -> float:
        """Nominal memory in bytes."""
        return self.memory_gib * GIB

    @property
    def memory_bytes_per_s(self) -> float:
        """Peak memory bandwidth in bytes per second."""
        return self.memory_gb_per_s * 1e9

    def peak_flops(self, precision: Precision, *, name: str = "device") -> float:
        """Dense peak in FLOP/s; raises InputError where the device has no units for `precision`."""
        if precision not in self.peak_tflops:
            raise InputError(
                "has no peak_tflops for this precision",
                where=name,
                got=precision,
                expected=", ".join(sorted(self.peak_tflops)),
            )
        return self.peak_tflops[precision] * 1e12


class DeviceOverride(StrictModel):
    """A cluster file's `devices` entry: any part of a catalogue entry, or a whole new type."""

    memory_gib: Rate | None = None
    peak_tflops: Peaks | None = None
    memory_gb_per_s: Rate | None = None
    tdp_w: Rate | None = None
    multiprocessors: PositiveCount | None = None
    price_per_hour: Price | None = None
    source: Name | None = None
    price_source: Name | None = None
    vendor: Name | None = None


class CatalogueFile(StrictModel):
    """`devices.yaml`."""

    format: Literal["hetplan-devices"]
    version: Literal[1]
    devices: dict[Name, DeviceSpec]


@cache
def catalogue() -> dict[str, DeviceSpec]:
    """All catalogued device types by name."""
    path = Path(__file__).with_name("devices.yaml")
    return dict(parse(CatalogueFile, read_yaml(path), where=path.name).devices)


def device(name: str, *, where: str | None = None) -> DeviceSpec:
    """The catalogue's entry `name`; raises InputError that suggests the nearest names."""
    known = catalogue()
    if name not in known:
        see = f"one of {', '.join(known)}, or in the cluster file its own entry, {EXAMPLE}"
        raise unknown_name("unknown device", name, known, where=where, see=see)
    return known[name]


def overridden(name: str, override: DeviceOverride, *, where: str) -> DeviceSpec:
    """The catalogue's entry `name` with parts replaced (peaks by precision), or a new type.

    Raises InputError where a new type lacks memory_gib, peak_tflops or memory_gb_per_s.
    """
    base = catalogue().get(name)
    parts = override.model_dump(exclude_none=True)
    if base is None:
        for key in ("memory_gib", "peak_tflops", "memory_gb_per_s"):
            if key not in parts:
                nearest = suggestion(name, catalogue())
                raise InputError(
                    f"{key} is missing for a device that the catalogue does not know{nearest}",
                    where=where,
                )
        return DeviceSpec(**{"source": "the cluster file", **parts})
    merged = base.model_dump() | parts
    merged["peak_tflops"] = {**base.peak_tflops, **(override.peak_tflops or {})}
    if override.source is None and parts:
        merged["source"] = (
            f"{base.source}; changed by the cluster file: {', '.join(sorted(parts))}"[:200]
        )
    if override.price_per_hour is not None and override.price_source is None:
        merged["price_source"] = "the cluster file"
    return DeviceSpec(**merged)
