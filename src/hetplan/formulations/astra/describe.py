"""An `astra` decision as a table for people: one line per segment of equal stages."""

from collections import Counter

from hetplan.formulations.astra.data import AstraData, AstraDecision
from hetplan.text import Table, ranges_text, seconds_text


def describe(data: AstraData, decision: AstraDecision) -> list[Table]:
    """The segments of a feasible decision, in pipeline order of their first stage."""
    kinds = {kind.name: kind for kind in data.device_types}
    group = data.data_parallel * data.tensor_parallel
    segments = Counter((stage.type, stage.layers) for stage in decision.stages)
    slowest = max(x * kinds[name].layer_seconds + kinds[name].p2p_seconds for name, x in segments)
    rows = []
    for (name, layers), count in segments.items():
        kind = kinds[name]
        seconds = layers * kind.layer_seconds + kind.p2p_seconds
        where = [
            s
            for s, stage in enumerate(decision.stages)
            if (stage.type, stage.layers) == (name, layers)
        ]
        bottleneck = (
            "slowest" if seconds >= slowest * (1 - 1e-12) else f"{100 * seconds / slowest:.1f} %"
        )
        rows.append(
            (
                ranges_text(where),
                name,
                str(layers),
                f"{count * group}",
                seconds_text(seconds),
                bottleneck,
            )
        )
    title = (
        f"{data.layers} layers on {data.stages} stages of {group} devices "
        f"(data {data.data_parallel} x tensor {data.tensor_parallel}), "
        f"{data.micro_batches} micro-batches"
    )
    header = ("stages", "type", "layers each", "devices", "per micro-batch", "of the slowest")
    return [Table(title, header, tuple(rows), right=(2, 3, 4))]
