"""What all importers share: their settings, their result, and chains from graphs of operators."""

from __future__ import annotations

import datetime
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetplan.errors import InputError
from hetplan.profiling.precision import Precision
from hetplan.profiling.profile import Profile, ProfileLayer, ProfileTable, Provenance
from hetplan.schema import derived

# A backward pass of matrix products takes twice the forward's time; where a file gives their sum
# only.
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class Settings:
    """What a user may say that a file does not. None: what the file tells, or the format's usual.

    device: the device type's name in cluster files. micro_batch: samples in one measured pass.
    nodes: of a cluster.
    """

    model: str | None = None
    device: str | None = None
    precision: Precision | None = None
    sequence: int | None = None
    micro_batch: int | None = None
    nodes: int | None = None


@dataclass(frozen=True)
class Imported:
    """kind: profile, cluster or model. document: the file's content, as JSON types. notes: what had
    to be assumed."""

    kind: str
    document: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Node:
    """One operator. output: bytes of a pass for each operator behind it. kept: bytes until the
    backward pass."""

    name: str
    forward: float
    backward: float
    params: float
    output: float
    kept: float


@dataclass
class Graph:
    """Operators by their number, and which one feeds which."""

    nodes: dict[int, Node] = field(default_factory=dict)
    edges: list[tuple[int, int]] = field(default_factory=list)

    def chain(self, where: str) -> list[tuple[Node, float]]:
        """Operators in an order of work, lowest numbers first, each with the bytes that pass the
        cut behind it.

        What several later operators need passes a cut once. Raises InputError for a circle.
        """
        after: dict[int, list[int]] = {number: [] for number in self.nodes}
        waits = dict.fromkeys(self.nodes, 0)
        for source, target in self.edges:
            after[source].append(target)
            waits[target] += 1
        ready = [number for number, count in waits.items() if count == 0]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            number = heapq.heappop(ready)
            order.append(number)
            for target in after[number]:
                waits[target] -= 1
                if waits[target] == 0:
                    heapq.heappush(ready, target)
        if len(order) < len(self.nodes):
            stuck = min(number for number, count in waits.items() if count)
            raise InputError(
                "operators wait for each other in a circle", where=where, got=self.nodes[stuck].name
            )
        place = {number: i for i, number in enumerate(order)}
        last = {
            number: max((place[t] for t in targets), default=-1)
            for number, targets in after.items()
        }
        crossing, leaving = 0.0, [0.0] * (len(order) + 1)
        found = []
        for i, number in enumerate(order):
            crossing -= leaving[i]
            if last[number] > i:
                crossing += self.nodes[number].output
                leaving[last[number]] += self.nodes[number].output
            found.append((self.nodes[number], max(crossing, 0.0)))
        return found


def chain_profile(
    chain: Sequence[tuple[Node, float]],
    settings: Settings,
    *,
    model: str,
    device: str,
    source: str,
    where: str,
) -> Profile:
    """A profile of one table from a chain; sizes in the chain are of a whole pass of `micro_batch`
    samples."""
    batch = settings.micro_batch or 1
    return make_profile(
        settings,
        model=model,
        source=source,
        where=where,
        layers=[
            ProfileLayer(
                name=f"{i}-{node.name}"[:200],
                param_bytes=node.params,
                activation_bytes=crossing / batch,
                tensor_bytes=0.0,
                saved_bytes=node.kept / batch,
            )
            for i, (node, crossing) in enumerate(chain)
        ],
        tables=[
            ProfileTable(
                device=settings.device or device,
                tensor=1,
                micro_batch=batch,
                forward_seconds=[node.forward for node, _ in chain],
                backward_seconds=[node.backward for node, _ in chain],
            )
        ],
    )


def make_profile(
    settings: Settings,
    *,
    model: str,
    source: str,
    where: str,
    layers: list[ProfileLayer],
    tables: Iterable[ProfileTable],
    sequence: int | None = None,
    precision: Precision = "fp32",
) -> Profile:
    """A measured profile; raises InputError where sizes are out of range."""
    with derived(where):
        return Profile(
            model=settings.model or model[:200],
            sequence=settings.sequence or sequence,
            precision=settings.precision or precision,
            provenance=Provenance(
                kind="measured",
                source=source,
                date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            ),
            layers=layers,
            tables=list(tables),
        )


def profile_result(profile: Profile, *notes: str) -> Imported:
    """A profile and what had to be assumed (empty notes left out)."""
    return Imported(
        "profile", profile.model_dump(mode="json"), tuple(note for note in notes if note)
    )


def device_note(settings: Settings, device: str) -> str:
    """That the device's name is not the file's, where the user gave none."""
    if settings.device is not None:
        return ""
    return (
        f"the file names no device type: {device!r}; --device-type gives the name in cluster files"
    )
