"""Prediction of a model's profile on every device type of a cluster, where none was measured."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from hetplan.errors import require
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.models.model import Model
from hetplan.profiling.models.operators import DEFAULT_STACK, ELEMENT_BYTES, Stack
from hetplan.profiling.profiles.profile import Profile, ProfileLayer, ProfileTable, Provenance
from hetplan.profiling.rates.efficiency import Learned
from hetplan.profiling.rates.shipped import shipped
from hetplan.profiling.rates.times import LayerTime, Rates, layer_time
from hetplan.schema import derived

# The predictor's version, which predicted profiles state. Version 1 (2025) was a roofline of shares
# of the datasheets' peaks; version 2 has measured rates, fused attention and the host's seconds;
# version 3 has rates by number format and by sustained watts, and curves of PCIe collectives.
PREDICTOR = 3
LARGEST_MICRO_BATCH = 64  # samples, of the default micro-batches
LARGEST_GLOBAL_BATCH = 10**9  # samples


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

    micro_batches: sizes in samples. tensor_degrees: `default_tensor_degrees` unless given. stack:
    the software that runs the operators. learned: corrections from measured operators, by device
    type. date: ISO day of the prediction, today unless given. Raises InputError where a device type
    has no matrix units for the model's precision.
    """
    learned = learned or {}
    degrees = tensor_degrees
    if degrees is None:
        degrees = default_tensor_degrees(model, cluster)
    for name in cluster.types:  # peak_flops raises InputError where the type lacks the precision
        cluster.specs[name].peak_flops(model.precision, name=f"{cluster.name}: device {name}")
    table_keys = list(product(cluster.types, degrees, micro_batches))
    require(
        table_keys,
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
                for device, tensor, micro_batch in table_keys
            ],
        )


def profile_layers(model: Model) -> list[ProfileLayer]:
    """The device-independent part of a profile of `model`."""
    precision = model.precision
    element_bytes = ELEMENT_BYTES[precision]
    return [
        ProfileLayer(
            name=layer.name,
            param_bytes=float(layer.trained * element_bytes),
            tied_param_bytes=float((layer.tied_params - layer.frozen_tied) * element_bytes),
            frozen_bytes=layer.frozen_bytes(precision),
            frozen_tied_bytes=float(layer.frozen_tied * element_bytes),
            cast_bytes=float(layer.cast * element_bytes),
            activation_bytes=float(layer.output * element_bytes),
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
        """The times of every layer; layers that are alike are computed once."""
        times = {
            l: layer_time(
                model.layers[l], rates, micro_batch=micro_batch, tensor=tensor, learned=learned
            )
            for l in set(model.first_alike)
        }
        return [times[l] for l in model.first_alike]

    def total(times: list[LayerTime]) -> float:
        """Seconds of both passes of all layers."""
        return sum(time.forward + time.backward for time in times)

    rates = Rates(device, cluster.specs[device], model.precision, stack)
    times = layer_times(rates)
    seconds = total(times)
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
        # A table without host seconds leaves them out: a host that takes no time is not written.
        forward_host_seconds=forward_host if any(forward_host) else [],
        backward_host_seconds=backward_host if any(backward_host) else [],
        interval=(low / seconds, high / seconds),
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

    A global batch may have dozens of divisors. These are evenly spread on a logarithmic scale, and
    at most seven with the default of `largest`. Raises InputError where `check_global_batch` does.
    """
    check_global_batch(global_batch)
    sizes = []
    for exponent in range(largest.bit_length()):
        size = min(2**exponent, global_batch)
        while global_batch % size:
            size -= 1
        sizes.append(size)
    return tuple(dict.fromkeys(sizes))


def default_tensor_degrees(model: Model, cluster: Cluster) -> tuple[int, ...]:
    """The powers of two up to the devices of the largest node that divide the model's heads and
    feed-forward size."""
    largest_node = max(node.devices for node in cluster.nodes)
    powers = (2**exponent for exponent in range(largest_node.bit_length()))
    return tuple(degree for degree in powers if model.tensor_degree_fits(degree))
