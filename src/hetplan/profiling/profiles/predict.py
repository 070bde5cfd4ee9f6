"""The profile that is predicted where none was measured, for every device type of a cluster."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from hetplan.errors import require
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.models.model import Model
from hetplan.profiling.models.operators import DEFAULT_STACK, ELEMENT_BYTES, Operator, Stack
from hetplan.profiling.profiles.profile import Profile, ProfileLayer, ProfileTable, Provenance
from hetplan.profiling.rates.efficiency import Learned
from hetplan.profiling.rates.shipped import shipped
from hetplan.profiling.rates.times import LayerTime, Rates, layer_time
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

    tensor_degrees: `default_tensor_degrees` unless given. stack: the software. learned: by device
    type, the measured operators that correct its predictions. date: ISO day of the prediction,
    today unless given. Raises InputError where a device type has no matrix units for the model's
    precision.
    """
    learned = learned or {}
    degrees = tensor_degrees
    if degrees is None:
        degrees = default_tensor_degrees(model, cluster)
    for name in cluster.types:
        cluster.specs[name].peak_flops(model.precision, name=f"{cluster.name}: device {name}")
    sizes = list(product(cluster.types, degrees, micro_batches))
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
                learned=list(learned),
            ),
            layers=profile_layers(model),
            tables=[
                _table(model, cluster, device, tensor, micro_batch, stack, learned.get(device))
                for device, tensor, micro_batch in sizes
            ],
        )


def profile_layers(model: Model) -> list[ProfileLayer]:
    """The device-independent part of a profile of `model`."""
    precision, width = model.precision, ELEMENT_BYTES[model.precision]
    return [
        ProfileLayer(
            name=layer.name,
            param_bytes=float(layer.params * width),
            tied_param_bytes=float(layer.tied_params * width),
            activation_bytes=float(layer.output * width),
            tensor_bytes=layer.tensor_bytes(precision),
            saved_bytes=layer.saved_bytes(precision),
            replicated_saved_bytes=layer.replicated_saved_bytes(precision),
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
    """The table of one device type, tensor degree and micro-batch size."""

    def layer_times(rates: Rates) -> list[LayerTime]:
        """The seconds of every layer; equal layers are computed once."""
        known: dict[tuple[Operator, ...], LayerTime] = {}
        for layer in model.layers:
            if layer.operators not in known:
                known[layer.operators] = layer_time(
                    layer, rates, micro_batch=micro_batch, tensor=tensor, learned=learned
                )
        return [known[layer.operators] for layer in model.layers]

    def total(times: list[LayerTime]) -> float:
        return sum(time.forward + time.backward for time in times)

    rates = Rates(device, cluster.specs[device], model.precision, stack)
    times = layer_times(rates)
    middle = total(times)
    low = total(layer_times(replace(rates, edge="low")))
    high = total(layer_times(replace(rates, edge="high")))
    forward_host = [time.forward_host for time in times]
    backward_host = [time.backward_host for time in times]
    return ProfileTable(
        device=device,
        tensor=tensor,
        micro_batch=micro_batch,
        forward_seconds=[time.forward for time in times],
        backward_seconds=[time.backward for time in times],
        forward_host_seconds=forward_host if any(forward_host) else [],
        backward_host_seconds=backward_host if any(backward_host) else [],
        interval=(low / middle, high / middle),
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
