"""The speed of each type of device at a program, and the bytes that it keeps, from a workload's
profile.

A program's devices have one speed each. It is set so that the whole model takes on each type what
the profile says, at the largest micro-batch within a device's even share. A layer's FLOP are
weighted so that its seconds are the profile's, in the mean over devices. Within a layer, operators
that mostly move entries would seem too quick by their FLOP alone: an entry moved counts as many
FLOP as the first device type computes in the time of moving it.
"""

import numpy as np

from hetplan.errors import UnsupportedError, require
from hetplan.profiling.profiles.profile import ProfileTable
from hetplan.profiling.rates.times import Rates
from hetplan.profiling.workload import Workload
from hetplan.programs.operators.operator import ELEMENT_FLOPS
from hetplan.programs.program import SingleProgram
from hetplan.programs.work import products_of, work_of, worked_out

LARGE_MOVE = 2.0**27  # elements: enough that a kernel's start does not count


def speeds_of(
    workload: Workload, program: SingleProgram
) -> tuple[dict[str, float], dict[str, float]]:
    """(FLOP/s of each device type, weight of every operator's FLOP). The weighted FLOP of all
    operators add up to the model's."""
    cluster, gradients = workload.cluster, program.needs_gradient()
    element = moved_element_flops(workload) / ELEMENT_FLOPS
    plain: dict[str, float] = {}
    weighted: dict[str, float] = {}
    layers: dict[str, float] = {}
    for node in program.computations:
        products = products_of(program, node, gradients).total
        plain[node.name] = work_of(program, node, gradients).total
        weighted[node.name] = products + element * (plain[node.name] - products)
        layers[node.layer] = layers.get(node.layer, 0.0) + weighted[node.name]
    seconds = {
        name: np.array(table.layer_seconds()) * program.samples / table.micro_batch
        for name, table in tables(workload).items()
    }
    speed = {name: sum(layers.values()) / float(row.sum()) for name, row in seconds.items()}
    mean = sum(n * seconds[name] * speed[name] for name, n in cluster.counts().items())
    mean = np.asarray(mean) / len(cluster.devices)
    wanted = dict(zip([layer.name for layer in workload.profile.layers], mean, strict=True))
    weights = {
        node.name: weighted[node.name] / plain[node.name] * wanted[node.layer] / layers[node.layer]
        for node in program.computations
        if plain[node.name] > 0
    }
    return speed, weights


def moved_element_flops(workload: Workload) -> float:
    """The FLOP that the first device type computes while it moves one element."""
    cluster = workload.cluster
    kind = cluster.types[0]
    rates = Rates(kind, cluster.specs[kind], workload.precision, workload.stack)
    return rates.flops_per_s * rates.moved_seconds(LARGE_MOVE, "add") / LARGE_MOVE


def tables(workload: Workload) -> dict[str, ProfileTable]:
    """Device type -> the profile's times of single devices, at the largest micro-batch within a
    device's even share."""
    profile, chosen = workload.profile, {}
    share = max(1, workload.global_batch // len(workload.cluster.devices))
    for name in workload.cluster.types:
        sizes = profile.micro_batches(name, 1)
        require(
            sizes,
            f"no times of single devices of {name}",
            where=f"profile of {profile.model}",
            kind=UnsupportedError,
        )
        size = max([b for b in sizes if b <= share] or [min(sizes)])
        table = profile.table(name, 1, size)
        assert table is not None, "the profile lists this table"
        chosen[name] = table
    return chosen


def saved_bytes(workload: Workload, program: SingleProgram) -> dict[str, float]:
    """Node -> bytes of its tensor that are kept: a layer's, as the profile says, divide over its
    tensors by their entries."""
    samples, nodes = program.samples, worked_out(program)
    kept: dict[str, float] = {}
    for layer in workload.profile.layers:
        members = [node for node in nodes if node.layer == layer.name]
        entries = sum(node.elements for node in members)
        for node in members:
            kept[node.name] = layer.saved_bytes * samples * node.elements / entries
    return kept
