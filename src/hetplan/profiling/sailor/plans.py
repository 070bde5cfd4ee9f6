"""Sailor's plans that were run: stages of layers, per stage and data replica a GPU group, and what
was measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetplan.profiling.foreign import Foreign, read_foreign


@dataclass(frozen=True)
class Group:
    """The tensor group of one stage's replica: GPU type and GPUs per node of each of its nodes,
    tensor degree."""

    nodes: tuple[tuple[str, int], ...]
    tensor: int

    @property
    def kinds(self) -> tuple[str, ...]:
        """GPU types, each once."""
        return tuple(dict.fromkeys(kind for kind, _ in self.nodes))


@dataclass(frozen=True)
class RunPipeline:
    """One pipeline: layers by stage, groups by stage and data replica."""

    layers: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[Group, ...], ...]


@dataclass(frozen=True)
class Run:
    """A plan and its measurements (None: not given). file: relative to `validation/`."""

    file: str
    model: str | None
    pipelines: tuple[RunPipeline, ...]
    micro_batch: int
    global_batch: int
    seconds: float | None
    max_bytes: float | None

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return 1 + max(max(stage) for stage in self.pipelines[0].layers)

    @property
    def kinds(self) -> set[str]:
        """GPU types of all groups."""
        return {k for p in self.pipelines for stage in p.groups for g in stage for k in g.kinds}


def load_run(path: Path, root: Path) -> Run:
    """The plan of a file below `root`; raises InputError with file, place, got and expected."""
    document = read_foreign(path)
    model, real, memory = (document.get(key) for key in ("model", "real", "max_mem"))
    return Run(
        file=path.relative_to(root).as_posix(),
        model=model.text() if model else None,
        pipelines=tuple(_pipeline(entry) for entry in document["pipeline_list"].entries(least=1)),
        micro_batch=document["mbs"].whole(1),
        global_batch=document["gbs"].whole(1),
        seconds=_positive(real),
        max_bytes=_positive(memory),
    )


def _positive(entry: Foreign | None) -> float | None:
    """A measurement; None, and what nobody measured (0), are none."""
    if entry is None or entry.value is None:
        return None
    return entry.number() or None


def _pipeline(entry: Foreign) -> RunPipeline:
    stages = entry["layers_per_stage"].entries(least=1)
    layers = tuple(tuple(layer.whole() for layer in stage.entries(least=1)) for stage in stages)
    following = 0
    for stage, numbers in zip(stages, layers, strict=True):
        if list(numbers) != list(range(following, following + len(numbers))):
            raise stage.error(
                "stages do not take the layers in turn", f"layers from {following} on"
            )
        following += len(numbers)
    groups = entry["tmp_per_stage"].entries(length=len(layers))
    return RunPipeline(
        layers, tuple(tuple(_group(g) for g in stage.entries(least=1)) for stage in groups)
    )


def _group(entry: Foreign) -> Group:
    nodes, tensor = entry.entries(length=2)
    found = []
    for node in nodes.entries(least=1):
        parts = node.entries(least=2)
        found.append((parts[0].text(), parts[1].whole(1, 4096)))
    return Group(tuple(found), tensor.whole(1, 4096))
