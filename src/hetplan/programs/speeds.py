"""The speed of each device type, the weight of each operator's FLOP, and the saved bytes of each
tensor, from a workload's profile. With them an SPMD program takes the profile's seconds and bytes.

- Each device type has one speed in FLOP/s. At this speed the whole model takes the seconds of the
  profile, at the largest micro-batch within an even share of the global batch.
- The FLOP of each operator are multiplied by a weight. By the weights, each layer takes the seconds
  of the profile, in the mean over the devices.
- Some operators mostly move elements, and their FLOP alone would make them too fast. So a moved
  element counts as many FLOP as the first device type computes in the time of moving it.
"""

from collections.abc import Mapping

import numpy as np

from hetplan.errors import UnsupportedError, require
from hetplan.profiling.hardware.cluster import Floats
from hetplan.profiling.profiles.profile import ProfileTable
from hetplan.profiling.rates.times import Rates
from hetplan.profiling.workload import Workload
from hetplan.programs.operators.operator import ELEMENT_FLOPS
from hetplan.programs.program import SingleProgram
from hetplan.programs.work import computing_operators, products_of, work_of

LARGE_MOVE = 2.0**27  # elements; the launch of a kernel that moves them is negligible


def speeds_of(
    workload: Workload, program: SingleProgram
) -> tuple[dict[str, float], dict[str, float]]:
    """(device type -> FLOP/s, operator -> weight of its FLOP).

    The weighted FLOP of all operators add up to the FLOP of the model, in which a moved element
    counts by `moved_element_flops`.
    """
    with_gradient = program.needs_gradient()
    moves_factor = moved_element_flops(workload) / ELEMENT_FLOPS
    charged: dict[str, float] = {}  # node -> FLOP as theories charge them
    scaled: dict[str, float] = {}  # node -> FLOP whose moved elements are scaled by the factor
    layer_flops: dict[str, float] = {}  # layer -> sum of the scaled FLOP of its nodes
    for node in program.computations:
        products = products_of(program, node, with_gradient).total
        charged[node.name] = work_of(program, node, with_gradient).total
        moves = charged[node.name] - products
        scaled[node.name] = products + moves_factor * moves
        layer_flops[node.layer] = layer_flops.get(node.layer, 0.0) + scaled[node.name]

    # device type -> [L] seconds of the program's samples
    layer_seconds = {
        name: np.array(table.layer_seconds()) * program.samples / table.micro_batch
        for name, table in profile_tables(workload).items()
    }
    model_flops = sum(layer_flops.values())
    speeds = {name: model_flops / float(row.sum()) for name, row in layer_seconds.items()}
    target_flops = _mean_layer_flops(workload, layer_seconds, speeds)

    weights: dict[str, float] = {}
    for node in program.computations:
        flops = charged[node.name]
        if flops > 0:  # views take no FLOP and need no weight
            moves_weight = scaled[node.name] / flops  # weighs moved elements against products
            weights[node.name] = moves_weight * target_flops[node.layer] / layer_flops[node.layer]
    return speeds, weights


def _mean_layer_flops(
    workload: Workload, layer_seconds: Mapping[str, Floats], speeds: Mapping[str, float]
) -> dict[str, float]:
    """Layer -> the FLOP that a device computes in the seconds of the layer, in the mean over all
    devices. layer_seconds: device type -> [L]; speeds: device type -> FLOP/s."""
    cluster = workload.cluster
    names = [layer.name for layer in workload.profile.layers]
    total = np.zeros(len(names))
    for device_type, count in cluster.counts().items():
        total += count * layer_seconds[device_type] * speeds[device_type]
    mean = total / len(cluster.devices)
    return dict(zip(names, mean.tolist(), strict=True))


def moved_element_flops(workload: Workload) -> float:
    """The FLOP that the first device type computes while it moves one element."""
    cluster = workload.cluster
    device_type = cluster.types[0]
    rates = Rates(device_type, cluster.specs[device_type], workload.precision, workload.stack)
    return rates.flops_per_s * rates.moved_seconds(LARGE_MOVE, "add") / LARGE_MOVE


def profile_tables(workload: Workload) -> dict[str, ProfileTable]:
    """Device type -> the profile's table of a single device. Its micro-batch is the largest within
    an even share of the global batch, or the smallest if all are larger.

    Raises UnsupportedError where the profile has no table of a single device of some type.
    """
    profile = workload.profile
    chosen: dict[str, ProfileTable] = {}
    even_share = max(1, workload.global_batch // len(workload.cluster.devices))
    for name in workload.cluster.types:
        sizes = profile.micro_batches(name, 1)
        require(
            sizes,
            f"no times of single devices of {name}",
            where=f"profile of {profile.model}",
            kind=UnsupportedError,
        )
        fitting = [size for size in sizes if size <= even_share]
        micro_batch = max(fitting) if fitting else min(sizes)
        table = profile.table(name, 1, micro_batch)
        assert table is not None, "the profile lists this table"
        chosen[name] = table
    return chosen


def saved_bytes(workload: Workload, program: SingleProgram) -> dict[str, float]:
    """Node -> bytes of its tensor that are kept from the forward to the backward pass. The profile
    states the bytes of a whole layer; they divide over its tensors in proportion to elements."""
    nodes = computing_operators(program)
    saved: dict[str, float] = {}
    for layer in workload.profile.layers:
        of_layer = [node for node in nodes if node.layer == layer.name]
        elements = sum(node.elements for node in of_layer)
        for node in of_layer:
            saved[node.name] = layer.saved_bytes * program.samples * node.elements / elements
    return saved
