"""A pipeline template on a real cluster: which devices each stage takes, and what an iteration then
takes.

Sets   k in 0..S-1 stages of one pipeline: layers [a_k, b_k) on the devices G_k of one node, tensor
       parallel, x = |G_k|.
Data   N_b micro-batches of m samples; B(G): the lowest bandwidth between any two devices of G,
       bytes/s.
Price  T = (N_b - 1) max_k t_k + sum_k t_k + sum_{k < S-1} e_k                             (1F1B)
       t_k = sum_l (the profile's seconds at tensor degree x + 2 (x-1)/x tensor_bytes_l m / B(G_k))
       e_k = activation_bytes of the stage's last layer m / the slowest link on which stage k + 1
             receives it
This is AMP's price (NeurIPS 2022, eq. 3 and 5) for one pipeline whose stages may differ in width,
so that plans of both problems compare. Ditto's own T leaves out e_k, divides compute evenly by x,
and counts T3 from the slowest stage on, by which an uneven pipeline may be given less than the
N_b t_k that its slowest stage alone computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from hetplan.errors import UnsupportedError
from hetplan.formulations.amp.data import AmpData
from hetplan.formulations.amp.evaluate import ring_seconds
from hetplan.formulations.ditto.data import DittoDecision
from hetplan.formulations.ditto.pose import kind_names, kind_of
from hetplan.profiling.workload import Workload

Groups = list[list[int]]


def place(workload: Workload, decision: DittoDecision) -> Groups:
    """Devices of each stage [S][x], each group in one node.

    Wide stages choose first, so that powers of two leave no remainder; a stage prefers the node of
    a neighbour in the pipeline, then the node with least room.
    """
    free = free_devices(workload)
    node_of = [-1] * len(decision.stages)
    groups: Groups = [[] for _ in decision.stages]
    for k in sorted(range(len(decision.stages)), key=lambda k: -decision.stages[k].devices):
        stage = decision.stages[k]
        rooms = [n for n, devices in free[stage.type].items() if len(devices) >= stage.devices]
        near = {node_of[j] for j in (k - 1, k + 1) if 0 <= j < len(node_of)}
        chosen = min(rooms, key=lambda n: (n not in near, len(free[stage.type][n]), n))
        node_of[k] = chosen
        devices = free[stage.type][chosen]
        groups[k], free[stage.type][chosen] = devices[: stage.devices], devices[stage.devices :]
    return groups


def free_devices(workload: Workload) -> dict[str, dict[int, list[int]]]:
    """Devices by the posed problem's type and by node."""
    nodes = workload.cluster.nodes
    kinds = list(dict.fromkeys(kind_of(node) for node in nodes))
    name = dict(zip(kinds, kind_names(kinds), strict=True))
    free: dict[str, dict[int, list[int]]] = {text: {} for text in name.values()}
    for device, place_of in enumerate(workload.cluster.devices):
        kind = kind_of(nodes[place_of.node])
        free[name[kind]].setdefault(place_of.node, []).append(device)
    return free


@dataclass(frozen=True)
class Priced:
    """Seconds of a template's parts."""

    micro_batches: int
    stages: tuple[float, ...]  # [S] of one micro-batch on a stage
    links: tuple[float, ...]  # [S] of one micro-batch to the next stage; the last one's is 0

    @property
    def seconds(self) -> float:
        """T."""
        return fsum([(self.micro_batches - 1) * max(self.stages), *self.stages, *self.links])


def price(
    workload: Workload, cluster: AmpData, decision: DittoDecision, groups: Groups, micro_batch: int
) -> Priced:
    """Seconds of a template on the devices `groups`; cluster: the workload's AMP data, for its
    bandwidths."""
    layers, stages, links = workload.profile.layers, [], []
    for k, (stage, group) in enumerate(zip(decision.stages, groups, strict=True)):
        compute = layer_seconds(workload, group, micro_batch)[stage.first : stage.last]
        size = fsum(layer.tensor_bytes for layer in layers[stage.first : stage.last]) * micro_batch
        stages.append(fsum(compute) + ring_seconds(cluster, group, size))
        sent = layers[stage.last - 1].activation_bytes * micro_batch
        after = groups[k + 1] if k + 1 < len(groups) else None
        links.append(0.0 if after is None else sent / slowest_link(cluster, group, after))
    return Priced(workload.global_batch // micro_batch, tuple(stages), tuple(links))


def layer_seconds(workload: Workload, group: Sequence[int], micro_batch: int) -> list[float]:
    """[L] seconds on one tensor group; an even part of one device's where the profile lacks the
    degree."""
    name, width = workload.cluster.devices[group[0]].type, len(group)
    table = workload.profile.table(name, width, micro_batch)
    if table is not None:
        return table.seconds()
    alone = workload.profile.table(name, 1, micro_batch)
    if alone is None:
        raise UnsupportedError(
            f"no times of single devices of {name} for micro-batch {micro_batch}"
        )
    return [seconds / width for seconds in alone.seconds()]


def slowest_link(cluster: AmpData, here: Sequence[int], after: Sequence[int]) -> float:
    """Bytes/s of the slowest link in use: every device of the next stage receives the whole
    activation.

    Tensor ranks that exist on both sides talk to each other; where one side is wider, its ranks
    share a partner.
    """
    most = max(len(here), len(after))
    pairs = ((here[r * len(here) // most], after[r * len(after) // most]) for r in range(most))
    return min(cluster.bandwidth[a][b] for a, b in pairs)
