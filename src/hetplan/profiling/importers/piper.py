"""Piper's graphs (NeurIPS 2021): per node and tensor degree seconds per sample, bytes of parameters
and activations.

`nodes[]`: {"id", "name", "TMPCs": {degree: [{"id": "vanilla" | "activation recomp",
"timePerSample", "parameterSize", "memoryUsageA" (per sample in flight), "memoryUsageB" (once),
…}]}}; `edges[]`: {"sourceId", "destId", "communicationCost" (bytes per sample)}. Times are forward
and backward together; "vanilla" is without recomputation.
"""

from __future__ import annotations

from pathlib import Path

from hetplan.profiling.foreign import Foreign, key_number, read_foreign
from hetplan.profiling.importers.common import (
    FORWARD_SHARE,
    Graph,
    Imported,
    Node,
    Settings,
    device_note,
    make_profile,
    profile_result,
)
from hetplan.profiling.profile import ProfileLayer, ProfileTable
from hetplan.schema import MOST_BYTES

DEVICE = "piper-gpu"
PLAIN = "vanilla"


def read(path: str, settings: Settings) -> Imported:
    """A profile with one table per tensor degree that all nodes have, micro-batches of one
    sample."""
    document = read_foreign(path)
    variants = {
        node["id"].whole(): _variants(node["TMPCs"]) for node in document["nodes"].entries(least=1)
    }
    names = {node["id"].whole(): node["name"].text() for node in document["nodes"].entries()}
    degrees = sorted(set.intersection(*(set(found) for found in variants.values())))
    if not degrees:
        raise document["nodes"].error("no tensor degree that all nodes have")
    graph = Graph(
        edges=[
            (_end(e["sourceId"], names), _end(e["destId"], names))
            for e in document["edges"].entries()
        ]
    )
    sent = dict.fromkeys(names, 0.0)
    for edge in document["edges"].entries():
        source = edge["sourceId"].whole()
        sent[source] = max(sent[source], edge["communicationCost"].number(0, MOST_BYTES))
    least = degrees[0]
    for number, name in names.items():
        graph.nodes[number] = Node(name, 0.0, float(number), 0.0, sent[number], 0.0)
    chain = graph.chain(path)
    order = [int(node.backward) for node, _ in chain]
    layers = [
        ProfileLayer(
            name=f"{i}-{names[number]}"[:200],
            param_bytes=variants[number][least]["parameterSize"].number(0, MOST_BYTES / least)
            * least,
            activation_bytes=crossing,
            tensor_bytes=0.0,
            saved_bytes=variants[number][least]["memoryUsageA"].number(0, MOST_BYTES / least)
            * least,
        )
        for i, (number, (_, crossing)) in enumerate(zip(order, chain, strict=True))
    ]
    tables = []
    for degree in degrees:
        both = [variants[number][degree]["timePerSample"].seconds() for number in order]
        tables.append(
            ProfileTable(
                device=settings.device or DEVICE,
                tensor=degree,
                micro_batch=1,
                forward_seconds=[FORWARD_SHARE * seconds for seconds in both],
                backward_seconds=[(1 - FORWARD_SHARE) * seconds for seconds in both],
            )
        )
    profile = make_profile(
        settings,
        model=Path(path).stem,
        source=f"Piper graph {Path(path).name}",
        where=path,
        layers=layers,
        tables=tables,
    )
    return profile_result(
        profile,
        device_note(settings, DEVICE),
        "forward and backward are given together: a third counts as forward",
        "times without recomputation; what is kept per sample is that of the lowest degree, as if wholly divided",
    )


def _variants(by_degree: Foreign) -> dict[int, Foreign]:
    """The variant without recomputation of each degree."""
    found = {}
    for degree, entry in by_degree.items():
        plain = [v for v in entry.entries(least=1) if v["id"].text() == PLAIN]
        if not plain:
            raise entry.error("no variant without recomputation", f'an entry with "id": "{PLAIN}"')
        found[key_number(degree, entry, 1, 4096)] = plain[0]
    return found


def _end(entry: Foreign, names: dict[int, str]) -> int:
    if entry.whole() not in names:
        raise entry.error("an edge names a node that is not there")
    return entry.whole()
