"""Writes the set `real` of the library.

    python -m evidence.speed real_instances DATA [folder [pattern [seconds]]]

DATA holds the published files of Sailor, Piper, PipeDream and dnn-partitioning, a folder each.
Every instance with its optimum, or with the bound proven in so many seconds, two minutes by
default.
"""

from __future__ import annotations

import fnmatch
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from evidence.speed.packaging import LIBRARY, SECONDS, write_best
from evidence.speed.real_workloads import (
    Measured,
    cluster,
    opt_350,
    other,
    own,
    sailor,
    with_reduces_apart,
    workload,
)
from hetplan.formulations.amp.pose import pose as pose_amp
from hetplan.formulations.astra.data import AstraData, DeviceType as AstraType
from hetplan.formulations.ditto.data import DeviceType as DittoType, DittoData, Memory
from hetplan.formulations.hap.pose import pose as pose_hap
from hetplan.formulations.poplar.pose import pose as pose_poplar
from hetplan.instances.library import Instance
from hetplan.profiling.workload import Workload

CPU_PROFILE = Path(__file__).with_name("real_cpu_profile.json.gz")
Nodes = Sequence[tuple[str, int, int]]


def told(measured: Measured, nodes: Nodes, batch: int, more: str = "") -> str:
    """The origin: what was measured and by whom, what is assumed."""
    devices = " + ".join(f"{count}x{per_node} {device}" for device, count, per_node in nodes)
    links = (
        "bandwidths of the same source"
        if measured.links is not None
        else "bandwidths assumed (100 and 10 Gbit/s)"
    )
    return (
        f"measured profile of {measured.profile.model} by {measured.credit}; {links}; "
        f"nodes assumed: {devices}; batch {batch}{more}"
    )


def posed(measured: Measured, nodes: Nodes, batch: int) -> Workload:
    """The profile's model on those nodes."""
    return workload(measured, cluster(measured, nodes), batch)


def amp(name: str, measured: Measured, nodes: Nodes, batch: int, memory: bool = False) -> Instance:
    """AMP: tables of every tensor degree and micro-batch measured on all types."""
    where = cluster(measured, nodes)
    data = pose_amp(
        workload(measured, where, batch, with_reduces_apart(measured, where)), memory=memory
    )
    more = (
        ""
        if measured.links is None
        else "; tensor groups' all-reduces within a node taken out of the times"
    )
    origin = told(measured, nodes, batch, more)
    return Instance(problem="amp", name=f"real-amp-{name}", origin=origin, data=data)


def ditto(
    name: str, measured: Measured, nodes: Nodes, batch: int, micro_batch: int, memory: bool = False
) -> Instance:
    """Ditto: what a tensor group needs beyond its share of the single device's time counts as
    all-reduces."""
    found = posed(measured, nodes, batch)
    degrees = {
        d: common_degrees(measured, [kind for kind, _, _ in nodes], micro_batch, d)
        for _, _, d in nodes
    }
    [per_node] = set(degrees.values())
    kinds = [ditto_type(measured, *node, per_node, micro_batch) for node in nodes]
    needs = None
    if memory:
        layers = measured.profile.layers
        needs = Memory(
            device_bytes=found.device_bytes(),
            layer_state_bytes=[
                found.state_bytes_per_param_byte * layer.held_param_bytes for layer in layers
            ],
            layer_activation_bytes=[layer.saved_bytes * micro_batch for layer in layers],
        )
    data = DittoData(micro_batches=batch // micro_batch, device_types=kinds, memory=needs)
    more = (
        f"; micro-batches of {micro_batch}; all-reduces are what a tensor group takes "
        f"beyond its share"
    )
    return Instance(
        problem="ditto",
        name=f"real-ditto-{name}",
        origin=told(measured, nodes, batch, more),
        data=data,
    )


def common_degrees(measured: Measured, kinds: Sequence[str], micro_batch: int, devices: int) -> int:
    """M: the largest degree of 1, 2, 4 … up to a node's devices to which all types were
    measured."""
    degree = 1
    while 2 * degree <= devices and all(
        measured.profile.table(kind, 2 * degree, micro_batch) is not None for kind in kinds
    ):
        degree *= 2
    return degree


def ditto_type(
    measured: Measured, kind: str, nodes: int, devices: int, per_node: int, micro_batch: int
) -> DittoType:
    """A type with `per_node` devices per node: nodes beyond are split."""
    single = measured.profile.table(kind, 1, micro_batch)
    assert single is not None, f"{kind} was not measured alone"
    rows = {}
    degree = 2
    while degree <= per_node:
        table = measured.profile.table(kind, degree, micro_batch)
        assert table is not None
        rows[str(degree)] = [
            max(0.0, (shared - alone / degree) / 2)
            for shared, alone in zip(table.layer_seconds(), single.layer_seconds(), strict=True)
        ]
        degree *= 2
    return DittoType(
        name=kind,
        nodes=nodes * devices // per_node,
        devices_per_node=per_node,
        forward_seconds=single.forward_seconds,
        backward_seconds=single.backward_seconds,
        allreduce_seconds=rows,
    )


def astra(
    name: str, measured: Measured, nodes: Nodes, degrees: tuple[int, int, int], micro_batches: int
) -> Iterator[Instance]:
    """Astra: blocks alone, of the median's time; degrees: stages, data, tensor; with equal layers
    and without."""
    stages, data_parallel, tensor = degrees
    where, profile = cluster(measured, nodes), measured.profile
    kinds = []
    for kind, count, per_node in nodes:
        table = profile.table(kind, tensor, 1)
        assert table is not None, f"{kind} was not measured with {tensor} ranks"
        network = min(node.network_bandwidth for node in where.nodes if node.device == kind)
        kinds.append(
            AstraType(
                name=kind,
                max_devices=count * per_node,
                layer_seconds=statistics.median(table.layer_seconds()[1:-1]),
                p2p_seconds=2
                * statistics.median(layer.activation_bytes for layer in profile.layers[1:-1])
                / network,
            )
        )
    for equal in (False, True):
        data = AstraData(
            layers=len(profile.layers) - 2,
            stages=stages,
            micro_batches=micro_batches,
            data_parallel=data_parallel,
            tensor_parallel=tensor,
            device_types=kinds,
            equal_layers_per_type=equal,
        )
        yield Instance(
            problem="astra",
            name=f"real-astra-{name}{'-equal' if equal else ''}",
            origin=told(
                measured,
                nodes,
                micro_batches * data_parallel,
                "; blocks alone, of the median's time",
            ),
            data=data,
        )


def poplar(name: str, measured: Measured, nodes: Nodes, batch: int, stage: int) -> Instance | None:
    """Poplar: curves through the measured micro-batches; None where nothing fits in memory."""
    found = pose_poplar(posed(measured, nodes, batch), stage)
    if found.unfit is not None:
        return None
    origin = told(
        measured, nodes, batch, f"; ZeRO {stage}; straight lines between measured micro-batches"
    )
    return Instance(
        problem="poplar", name=f"real-poplar-{name}-zero{stage}", origin=origin, data=found.data
    )


def hap(name: str, measured: Measured, nodes: Nodes, batch: int) -> Instance:
    """HAP: OPT-350's operators, priced so that every layer takes what was measured."""
    found = pose_hap(opt_350(measured, cluster(measured, nodes), batch))
    origin = told(
        measured,
        nodes,
        batch,
        "; operators by hetplan, weighted so that layers take what was measured",
    )
    return Instance(problem="hap", name=f"real-hap-{name}", origin=origin, data=found.theory.data)


def instances(data: Path) -> Iterator[Any]:
    """What makes each instance, one after the other: reading is cheap, posing with it."""
    opt, neo, llama, opt30 = (
        sailor(data, name) for name in ("OPT-350", "GPT-Neo-2.7", "LLAMA-3-8", "OPT-30")
    )
    bert = other(data, "piper", "bert32a100.json")
    vgg = other(data, "pipedream", "vgg16.txt", 128)
    gnmt = other(data, "pipedream", "gnmt.txt")
    bert24 = other(data, "dnn-partitioning", "bert24_training.json")
    old, new = ("V100-16", 2, 4), ("A100-40", 2, 4)
    rtx = (("RTX-2080", 1, 4), ("Titan-RTX", 1, 4), ("RTX-3090", 1, 4))

    yield partial(amp, "opt350-a100-v100", opt, (new, old), 64)
    yield partial(amp, "opt350-a100-v100-memory", opt, (new, old), 64, memory=True)
    yield partial(amp, "opt350-gh-a100", opt, (("GH-96", 2, 4), ("A100-80", 2, 4)), 128)
    yield partial(amp, "opt350-rtx", opt, rtx, 48)
    yield partial(amp, "gptneo-a100-v100", neo, (new, old), 32)
    yield partial(amp, "gptneo-a100s", neo, (("A100-80", 1, 4), ("A100-40", 1, 4)), 32)
    yield partial(amp, "llama3-gh-a100", llama, (("GH-96", 2, 4), new), 16)
    yield partial(amp, "opt30-gh-v100", opt30, (("GH-96", 4, 4), ("V100-16", 2, 8)), 32)
    yield partial(amp, "bert32", bert, (("piper-gpu", 2, 8),), 32)
    yield partial(amp, "vgg16", vgg, (("pipedream-gpu", 2, 4),), 2048)
    yield partial(amp, "gnmt", gnmt, (("pipedream-gpu", 4, 4),), 32)
    yield partial(amp, "bert24", bert24, (("dnn-partitioning-accelerator", 2, 4),), 16)

    yield partial(ditto, "opt350-a100-v100", opt, (new, old), 64, 2)
    yield partial(ditto, "opt350-a100-v100-memory", opt, (new, old), 64, 1, memory=True)
    yield partial(ditto, "opt350-gh-a100", opt, (("GH-96", 2, 4), ("A100-80", 3, 4)), 256, 8)
    yield partial(ditto, "opt350-rtx", opt, rtx, 64, 1)
    yield partial(
        ditto,
        "opt350-four-types",
        opt,
        (("GH-96", 1, 4), ("A100-80", 1, 4), new, ("V100-16", 2, 4)),
        64,
        1,
    )
    yield partial(ditto, "gptneo-a100-v100", neo, (new, old), 64, 1)
    yield partial(ditto, "gptneo-a100s", neo, (("A100-80", 1, 4), ("A100-40", 2, 4)), 64, 2)
    yield partial(ditto, "opt30-gh-a100", opt30, (("GH-96", 3, 4), new), 64, 1)
    yield partial(ditto, "bert32", bert, (("piper-gpu", 2, 8),), 32, 1)
    yield partial(ditto, "gnmt", gnmt, (("pipedream-gpu", 2, 4),), 32, 1)

    yield partial(astra, "opt350", opt, (("A100-40", 6, 4), ("V100-16", 8, 4)), (8, 4, 1), 32)
    yield partial(
        astra,
        "gptneo",
        neo,
        (("A100-80", 2, 4), ("A100-40", 4, 4), ("V100-16", 6, 4)),
        (8, 2, 2),
        32,
    )
    yield partial(
        astra,
        "llama3",
        llama,
        (("GH-96", 3, 4), ("A100-40", 4, 4), ("V100-16", 4, 4)),
        (8, 1, 4),
        24,
    )
    yield partial(
        astra,
        "opt30",
        opt30,
        (("GH-96", 8, 4), ("A100-40", 8, 4), ("V100-16", 8, 4)),
        (16, 1, 4),
        64,
    )

    for stage in (0, 1, 2, 3):
        yield partial(poplar, "opt350-a100-v100", opt, (("A100-80", 1, 4), old), 256, stage)
    for stage in (1, 3):
        yield partial(
            poplar, "opt350-gh-a100", opt, (("GH-96", 1, 4), ("A100-80", 2, 4)), 1024, stage
        )
        yield partial(
            poplar, "opt350-rtx", opt, (("Titan-RTX", 2, 4), ("RTX-3090", 2, 4)), 512, stage
        )
        yield partial(
            poplar, "gptneo-a100s", neo, (("A100-80", 2, 4), ("A100-40", 2, 4)), 256, stage
        )

    yield partial(hap, "opt350-a100-v100", opt, (new, old), 16)
    yield partial(hap, "opt350-rtx", opt, (("Titan-RTX", 1, 4), ("RTX-3090", 1, 4)), 8)
    if CPU_PROFILE.exists():
        yield from of_processors(own(CPU_PROFILE))


def of_processors(cpu: Measured) -> Iterator[Any]:
    """hetplan's own profile: nodes of one core and of two."""
    nodes = (("one-core", 2, 2), ("two-cores", 2, 2))
    yield partial(amp, "gpt2-cores", cpu, nodes, 32)
    yield partial(ditto, "gpt2-cores", cpu, nodes, 32, 1)
    yield partial(poplar, "gpt2-cores", cpu, nodes, 100, 0)
    yield partial(poplar, "gpt2-cores", cpu, nodes, 100, 3)
    yield partial(
        astra, "gpt2-cores", cpu, (("one-core", 4, 2), ("two-cores", 2, 2)), (6, 2, 1), 16
    )


def main(data: Path, folder: Path = LIBRARY, pattern: str = "*", seconds: float = SECONDS) -> None:
    """Write every instance whose name matches."""
    for make in instances(data):
        made = make()
        for instance in made if isinstance(made, Iterator) else [made]:
            if instance is not None and fnmatch.fnmatchcase(instance.name, pattern):
                write_best(instance, folder, seconds)


if __name__ == "__main__":
    given = sys.argv[1:]
    if not given:
        sys.exit(__doc__)
    main(
        Path(given[0]),
        Path(given[1]) if len(given) > 1 else LIBRARY,
        given[2] if len(given) > 2 else "*",
        float(given[3]) if len(given) > 3 else SECONDS,
    )
