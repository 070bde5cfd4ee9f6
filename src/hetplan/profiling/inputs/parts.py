"""The cluster, the model and the profile of a plan as records of its file.

Consecutive equal nodes are one record with their count. Layers that are equal but for their names
are of one kind: a record has every kind once, and a list with the number of each layer's kind. The
tables of a profile have one entry for each kind.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from pydantic import BaseModel, Discriminator, Field, Tag, field_serializer, model_validator

from hetplan.errors import printable, require
from hetplan.profiling.hardware.cluster import (
    MAX_DEVICES,
    ONE_SWITCH,
    Cluster,
    DeviceSpec,
    Node,
    NodeCount,
    RankCount,
)
from hetplan.profiling.inputs.records import Record, Whole, as_record, from_record, record_of
from hetplan.profiling.models.model import Model
from hetplan.profiling.models.operators import (
    Counted,
    Elementwise,
    Layer,
    Matmul,
    Operator,
    Precision,
    Reduce,
    Saved,
)
from hetplan.profiling.models.transformer import Transformer
from hetplan.profiling.models.zoo import ModelSpec
from hetplan.profiling.profiles.profile import HOST, Profile, ProfileTable
from hetplan.profiling.source_files import SourceFile
from hetplan.schema import (
    LEAST_BYTES,
    MOST_BYTES,
    Count,
    Line,
    Name,
    Range,
    Seconds,
)

T = TypeVar("T")
MOST_LAYERS = 4096
MOST_ENTRIES = 4_000_000  # of all tables of a profile: 1000 tables of the longest chain
LARGEST_TENSOR_DEGREE = 4096
Bandwidth = Annotated[float, Field(ge=LEAST_BYTES, le=MOST_BYTES)]
# [L] the number of each layer's kind
KindOfLayer = Annotated[list[Count], Field(min_length=1, max_length=MOST_LAYERS)]
# A type checker cannot read the classes that `record_of` makes.
if TYPE_CHECKING:
    MatmulRecord = Record
    ElementwiseRecord = Record
    SavedRecord = Record
    ReduceRecord = Record
    TransformerRecord = Record
else:
    MatmulRecord = record_of(Matmul)
    ElementwiseRecord = record_of(Elementwise)
    SavedRecord = record_of(Saved)
    ReduceRecord = record_of(Reduce)
    TransformerRecord = record_of(Transformer)


class NodeRecord(Record):
    """Consecutive equal nodes, with the fields of `Node`."""

    count: NodeCount = 1
    """Number of the nodes."""
    device: Name
    devices: NodeCount
    intra_bandwidth: Bandwidth
    network_bandwidth: Bandwidth
    intra_latency: Seconds
    network_latency: Seconds
    switch: Range | None = None
    """None: `ONE_SWITCH`, above all nodes without a switch."""
    switch_nodes: NodeCount = MAX_DEVICES
    uplink: Bandwidth | None = None
    """None: no limit, as infinity in `Node`."""
    rails: bool = False
    all_reduce: list[tuple[RankCount, Bandwidth]] = Field(default_factory=list, max_length=64)
    """(ranks, bus bandwidth) of large all-reduces inside a node, where they were stated."""
    flow: Bandwidth | None = None
    """None: no limit, as infinity in `Node`."""

    @classmethod
    def of(cls, node: Node, count: int) -> Self:
        """The record of `count` nodes that are equal to `node`."""
        values = vars(node) | {
            "switch": None if node.switch == ONE_SWITCH else node.switch,
            "uplink": None if math.isinf(node.uplink) else node.uplink,
            "all_reduce": list(node.all_reduce),
            "flow": None if math.isinf(node.flow) else node.flow,
        }
        return cls(count=count, **values)

    def node(self) -> Node:
        """One of the nodes."""
        values = dict(self) | {
            "switch": self.switch or ONE_SWITCH,
            "uplink": math.inf if self.uplink is None else self.uplink,
            "all_reduce": tuple(self.all_reduce),
            "flow": math.inf if self.flow is None else self.flow,
        }
        del values["count"]
        return Node(**values)


class ClusterRecord(Record):
    """A cluster: its nodes in order, and every device type that they use, in full."""

    nodes: list[NodeRecord] = Field(min_length=1, max_length=MAX_DEVICES)
    devices: dict[Name, DeviceSpec]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        used = {node.device for node in self.nodes}
        require(
            used == self.devices.keys(),
            f"devices are {', '.join(sorted(self.devices))}, "
            f"expected the types of the nodes: {', '.join(sorted(used))}",
        )
        total = sum(node.count * node.devices for node in self.nodes)
        require(total <= MAX_DEVICES, f"nodes have {total} devices, expected at most {MAX_DEVICES}")
        return self

    @field_serializer("devices")
    def _without_unknown(self, devices: dict[str, DeviceSpec]) -> dict[str, Any]:
        return {name: spec.model_dump(exclude_none=True) for name, spec in devices.items()}

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        """The record of a cluster."""
        runs = [(node, len(list(same))) for node, same in groupby(cluster.nodes)]
        specs = {name: cluster.specs[name] for name in cluster.types}
        return cls(nodes=[NodeRecord.of(node, count) for node, count in runs], devices=specs)

    def cluster(self, name: str, file: SourceFile | None) -> Cluster:
        """The cluster of that name, which was read from `file`."""
        nodes = tuple(entry.node() for entry in self.nodes for _ in range(entry.count))
        return Cluster(name, nodes, self.devices, file)

    def places(self) -> list[tuple[str, int]]:
        """(type, number of the node) of every device, in order."""
        nodes = [entry for entry in self.nodes for _ in range(entry.count)]
        return [(node.device, n) for n, node in enumerate(nodes) for _ in range(node.devices)]


class CountedRecord(Record, Counted):
    """A traced operator."""


def operator_tag(value: Any) -> str:
    """The tag of an operator's record, or of its JSON: product, elementwise or traced. The keys
    that only one class of operators has decide."""
    keys = type(value).model_fields if isinstance(value, BaseModel) else value
    if not isinstance(keys, dict):
        return "elementwise"  # no record at all, which the class of any tag refuses
    if "m" in keys:
        return "product"
    return "traced" if "read" in keys else "elementwise"


OperatorRecord = Annotated[
    Annotated[MatmulRecord, Tag("product")]
    | Annotated[ElementwiseRecord, Tag("elementwise")]
    | Annotated[CountedRecord, Tag("traced")],
    Discriminator(operator_tag),
]


class LayerRecord(Record):
    """A kind of layer, with the fields of `Layer`."""

    name: Name
    """Name of the first layer of the kind."""
    kind: Name
    params: Whole
    operators: list[OperatorRecord] = Field(max_length=100_000)
    output: Whole
    saved: list[SavedRecord] = Field(max_length=100_000)
    reduces: list[ReduceRecord] = Field(default_factory=list, max_length=100_000)
    tied_params: Whole = 0
    frozen: Whole = 0
    frozen_tied: Whole = 0
    quantised: Whole = 0
    quantised_bytes: Whole = 0
    cast: Whole = 0

    @classmethod
    def of(cls, layer: Layer) -> Self:
        """The record of a kind. layer: its first layer."""
        lists = {
            "operators": [operator_record(operator) for operator in layer.operators],
            "saved": [as_record(tensor) for tensor in layer.saved],
            "reduces": [as_record(reduce) for reduce in layer.reduces],
        }
        return cls(**vars(layer) | lists)

    def layer(self) -> Layer:
        """The first layer of the kind."""
        tuples = {
            "operators": tuple(operator_of(record) for record in self.operators),
            "saved": tuple(from_record(Saved, record) for record in self.saved),
            "reduces": tuple(from_record(Reduce, record) for record in self.reduces),
        }
        return Layer(**dict(self) | tuples)


def operator_record(operator: Operator) -> Record:
    """The record of an operator."""
    if isinstance(operator, Counted):
        return CountedRecord(**dict(operator))
    record: Record = as_record(operator)
    return record


def operator_of(record: Record) -> Operator:
    """The operator of a record."""
    if isinstance(record, CountedRecord):
        return Counted(**dict(record))
    kind = Matmul if operator_tag(record) == "product" else Elementwise
    operator: Operator = from_record(kind, record)
    return operator


class ModelRecord(Record):
    """A model: the operators and tensors of its layers, and its shape where it is a transformer."""

    source: Line = ""
    notes: list[Line] = Field(default_factory=list, max_length=1000)
    """See `ModelSpec.notes`."""
    layers: KindOfLayer
    kinds: list[LayerRecord] = Field(min_length=1, max_length=MOST_LAYERS)
    tensor_degrees: list[Annotated[int, Field(ge=1, le=LARGEST_TENSOR_DEGREE)]] = Field(
        max_length=LARGEST_TENSOR_DEGREE
    )
    """All tensor degrees that divide the model evenly."""
    shape: TransformerRecord | None = None
    """The shape of a text model."""
    encoder: TransformerRecord | None = None
    """The shape of a vision transformer."""
    kind: Line = ""
    """Hugging Face's `model_type` where the shape does not say it; empty: unknown."""

    @model_validator(mode="after")
    def _kinds_are_there(self) -> Self:
        check_kinds(self.layers, len(self.kinds))
        return self

    @classmethod
    def of(cls, model: Model) -> Self:
        """The record of a model."""
        spec, shape, encoder = model.spec, model.spec.shape, model.spec.encoder
        kind_of_layer, first_layers = by_kind(fields_but_name(layer) for layer in model.layers)
        degrees = range(1, LARGEST_TENSOR_DEGREE + 1)
        return cls(
            source=printable(spec.source),
            notes=[printable(note) for note in spec.notes],
            layers=kind_of_layer,
            kinds=[LayerRecord.of(model.layers[l]) for l in first_layers],
            tensor_degrees=[degree for degree in degrees if spec.fits(degree)],
            shape=None if shape is None else as_record(shape),
            encoder=None if encoder is None else as_record(encoder),
            kind="" if shape is not None and shape.function is not None else printable(spec.kind),
        )

    def model(
        self,
        name: str,
        names: Sequence[str],
        sequence: int | None,
        precision: Precision,
        file: SourceFile | None,
    ) -> Model:
        """The model. names: names of its layers. file: the file from which it was read."""
        kinds = [record.layer() for record in self.kinds]
        layers = tuple(
            replace(kinds[kind], name=layer_name)
            for layer_name, kind in zip(names, self.layers, strict=True)
        )
        degrees = frozenset(self.tensor_degrees)

        def build(wanted: int) -> tuple[Layer, ...]:
            require(
                wanted == (sequence or 0),  # `ModelSpec.chain` asks a model of images for 0 tokens
                "the plan file has this model for another sequence length",
                where=name,
                got=wanted,
                expected=f"{sequence}",
            )
            return layers

        spec = ModelSpec(
            name=name,
            source=self.source,
            sequence=sequence,
            build=build,
            fits=degrees.__contains__,
            notes=tuple(self.notes),
            shape=self.transformer(),
            encoder=None if self.encoder is None else from_record(Transformer, self.encoder),
            file=file,
            kind=self.kind,
        )
        return Model(spec, sequence, precision, layers)

    @property
    def model_type(self) -> str:
        """Hugging Face's `model_type`; empty where it is unknown."""
        shape = self.transformer()
        if shape is not None and shape.function is not None:
            return shape.function.kind
        return self.kind

    def transformer(self) -> Transformer | None:
        """The shape of a text model; None for others."""
        if self.shape is None:
            return None
        shape: Transformer = from_record(Transformer, self.shape)
        return shape


class ProfileRecord(Record):
    """A profile. Layers of one kind have equal bytes, and equal seconds in every table."""

    layers: KindOfLayer
    kinds: Profile
    """With one layer of each kind, named as the kind's first layer."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_kinds(self.layers, len(self.kinds.layers))
        entries = len(self.layers) * len(self.kinds.tables)
        require(
            entries <= MOST_ENTRIES,
            f"kinds.tables are {len(self.kinds.tables)} for {len(self.layers)} layers, "
            f"expected at most {MOST_ENTRIES} entries together",
        )
        return self

    @field_serializer("kinds")
    def _kinds(self, kinds: Profile) -> dict[str, Any]:
        return kinds.model_dump(mode="json", exclude_defaults=True)

    @classmethod
    def of(cls, profile: Profile) -> Self:
        """The record of a profile."""
        rows = [row for table in profile.tables for row in rows_of(table)]
        columns = zip(*rows, strict=True)  # the entries of each layer in all rows
        kind_of_layer, first_layers = by_kind(
            (layer.model_copy(update={"name": ""}), column)
            for layer, column in zip(profile.layers, columns, strict=True)
        )
        return cls(layers=kind_of_layer, kinds=with_layers(profile, first_layers))

    def profile(self, names: Sequence[str]) -> Profile:
        """The whole profile. names: names of its layers."""
        whole = with_layers(self.kinds, self.layers)
        layers = [
            layer.model_copy(update={"name": name})
            for layer, name in zip(whole.layers, names, strict=True)
        ]
        return whole.model_copy(update={"layers": layers})


def check_kinds(layers: Sequence[int], kinds: int) -> None:
    """Raise InputError, which is a ValueError, for a layer whose kind is none of `kinds` kinds."""
    for i, kind in enumerate(layers):
        require(
            kind < kinds,
            f"layers[{i}] is {kind}, expected less than the number of kinds ({kinds})",
        )


def by_kind(layers: Iterable[Hashable]) -> tuple[list[int], list[int]]:
    """(the kind of each layer, the first layer of each kind). Equal entries are of one kind; kinds
    are numbered in the order of their first layers."""
    number_of: dict[Hashable, int] = {}
    kind_of_layer, first_layers = [], []
    for l, layer in enumerate(layers):
        if layer not in number_of:
            number_of[layer] = len(number_of)
            first_layers.append(l)
        kind_of_layer.append(number_of[layer])
    return kind_of_layer, first_layers


def fields_but_name(layer: Layer) -> tuple[Hashable, ...]:
    """The values of all fields of a layer but its name."""
    return tuple(value for key, value in vars(layer).items() if key != "name")


ROWS = ("forward_seconds", "backward_seconds", *HOST)


def rows_of(table: ProfileTable) -> list[list[float]]:
    """The rows of a table that have an entry for each layer, without those that it leaves out."""
    rows = [getattr(table, key) for key in ROWS]
    readings = [] if table.readings is None else [row for _, row in table.readings]
    return [row for row in [*rows, *readings] if row]


def with_layers(profile: Profile, layers: Sequence[int]) -> Profile:
    """The profile with some of its layers, in the given order; a layer may occur several times."""

    def picked(row: Sequence[T] | None) -> Sequence[T] | None:
        return [row[layer] for layer in layers] if row else row

    tables = []
    for table in profile.tables:
        changes: dict[str, Any] = {key: picked(getattr(table, key)) for key in ROWS}
        if table.readings is not None:
            readings = {key: picked(row) for key, row in table.readings}
            changes["readings"] = table.readings.model_copy(update=readings)
        tables.append(table.model_copy(update=changes))
    return profile.model_copy(update={"layers": picked(profile.layers), "tables": tables})
