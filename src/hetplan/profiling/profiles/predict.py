"""The profile that is predicted where none was measured, for every device type of a cluster."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetplan.errors import require
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.models.model import Model
from hetplan.profiling.models.operators import DEFAULT_STACK, ELEMENT_BYTES, Stack
from hetplan.profiling.profiles.profile import Profile, ProfileLayer, ProfileTable, Provenance
from hetplan.profiling.rates.efficiency import Learned
from hetplan.profiling.rates.shipped import shipped
from hetplan.profiling.rates.times import Rates, layer_time
from hetplan.schema import derived

# 1: a roofline of shares of the datasheets (2025). 2: measured rates, fused attention, the host.
PREDICTOR = 2
LARGEST_MICRO_BATCH = 64
LARGEST_GLOBAL_BATCH = 10**9


def predict(
    model: Model,
    cluster: Cluster,
    *,
    micro_batches: Sequence[int],
    tensor_degrees: Sequence[int] | None = None,
    stack: Stack = DEFAULT_STACK,
    learned: Mapping[str, Learned] | None = None,
    date: str | None = None,
) -> Profile:
    """A predicted profile of `model` for every device type, tensor degree and micro-batch size.

    tensor_degrees: default those of `default_tensor_degrees`. stack: the software. learned: by
    device type, what replaces the plain roofline there. date: ISO day of the prediction, default
    today. Raises InputError where a device type has no matrix units for the model's
    precision.
    """
    degrees = (
        tensor_degrees if tensor_degrees is not None else default_tensor_degrees(model, cluster)
    )
    for name in cluster.types:
        cluster.specs[name].peak_flops(model.precision, name=f"{cluster.name}: device {name}")
    sizes = [(name, tp, size) for name in cluster.types for tp in degrees for size in micro_batches]
    require(
        sizes,
        "nothing to predict",
        expected="at least one micro-batch size and one tensor degree",
    )
    with derived(f"profile of {model.name} on {cluster.name}"):
        return Profile(
            model=model.name,
            sequence=model.sequence,
            precision=model.precision,
            provenance=Provenance(
                kind="predicted",
                source="hetplan's predictor: measured rates, physics elsewhere",
                predictor=PREDICTOR,
                sources=[origin.name for origin in shipped().origins],
                date=date or datetime.datetime.now(datetime.UTC).date().isoformat(),
                learned=list(learned or ()),
            ),
            layers=profile_layers(model),
            tables=[
                _table(model, cluster, *size, stack, (learned or {}).get(size[0])) for size in sizes
            ],
        )


def profile_layers(model: Model) -> list[ProfileLayer]:
    """The device-independent part of a profile of `model`."""
    p, width = model.precision, ELEMENT_BYTES[model.precision]
    return [
        ProfileLayer(
            name=layer.name,
            param_bytes=float(layer.params * width),
            tied_param_bytes=float(layer.tied_params * width),
            activation_bytes=float(layer.output * width),
            tensor_bytes=layer.tensor_bytes(p),
            saved_bytes=layer.saved_bytes(p),
            replicated_saved_bytes=layer.replicated_saved_bytes(p),
        )
        for layer in model.layers
    ]


def _table(
    model: Model,
    cluster: Cluster,
    device: str,
    tensor: int,
    micro_batch: int,
    stack: Stack,
    learned: Learned | None,
) -> ProfileTable:
    """One table; equal layers are computed once."""
    middle = Rates(device, cluster.specs[device], model.precision, stack)
    ends: dict[str, float] = {}
    for edge in ("low", "high", "seconds"):
        rates = replace(middle, edge=edge)
        times = {
            layer.operators: layer_time(
                layer, rates, micro_batch=micro_batch, tensor=tensor, learned=learned
            )
            for layer in {one.operators: one for one in model.layers}.values()
        }
        ends[edge] = sum(
            times[layer.operators].forward + times[layer.operators].backward
            for layer in model.layers
        )
    host = [
        [getattr(times[layer.operators], key) for layer in model.layers]
        for key in ("forward_host", "backward_host")
    ]
    return ProfileTable(
        device=device,
        tensor=tensor,
        micro_batch=micro_batch,
        forward_seconds=[times[layer.operators].forward for layer in model.layers],
        backward_seconds=[times[layer.operators].backward for layer in model.layers],
        forward_host_seconds=host[0] if any(host[0]) else [],
        backward_host_seconds=host[1] if any(host[1]) else [],
        interval=(ends["low"] / ends["seconds"], ends["high"] / ends["seconds"]),
    )


def check_global_batch(global_batch: int) -> None:
    """Raise InputError unless the global batch is between 1 and 10^9 samples."""
    require(
        1 <= global_batch <= LARGEST_GLOBAL_BATCH,
        "global batch is not usable",
        got=global_batch,
        expected=f"1 to {LARGEST_GLOBAL_BATCH}",
    )


def default_micro_batches(global_batch: int, largest: int = LARGEST_MICRO_BATCH) -> tuple[int, ...]:
    """For each power of two up to `largest`, the largest divisor of the global batch that does not
    exceed it.

    All divisors of a rich number would be dozens; this keeps at most seven, spread evenly on a log
    scale.
    Raises InputError for a global batch below 1.
    """
    check_global_batch(global_batch)
    powers = (2**i for i in range(largest.bit_length()))
    sizes = (
        next(b for b in range(min(power, global_batch), 0, -1) if global_batch % b == 0)
        for power in powers
    )
    return tuple(dict.fromkeys(sizes))


def default_tensor_degrees(model: Model, cluster: Cluster) -> tuple[int, ...]:
    """Powers of two up to the largest node that divide the model's heads and feed-forward size."""
    largest = max(node.devices for node in cluster.nodes)
    return tuple(
        tp
        for tp in (1 << i for i in range(largest.bit_length()))
        if tp <= largest and model.tensor_degree_fits(tp)
    )
