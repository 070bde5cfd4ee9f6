"""Sailor's profiles (SOSP 2025): see `hetplan.profiling.sailor.data`. Times include the tensor
group's all-reduces.

PATH is a `profile.json` at profiles/<model>/<GPU>/, that folder, or the model's folder with all its
GPUs; sizes come from the `llm_info.json` in a folder above.
"""

from __future__ import annotations

from pathlib import Path

from hetplan.errors import InputError
from hetplan.profiling.foreign import read_foreign
from hetplan.profiling.importers.common import Imported, Settings, layer, profile, table
from hetplan.profiling.profile import ProfileLayer
from hetplan.profiling.sailor.data import ModelData, load_model_data


def read(path: str, settings: Settings) -> Imported:
    """A profile with a table per GPU type, tensor degree and micro-batch."""
    start = Path(path)
    if not start.exists():
        raise InputError("no such file or folder", where=path)
    folder = start.parent if start.is_file() else start
    one = (folder / "profile.json").is_file()
    model, gpu = (folder.parent, folder.name) if one else (folder, None)
    root = next(
        (above for above in model.resolve().parents if (above / "llm_info.json").is_file()), None
    )
    if root is None:
        raise InputError(
            "no llm_info.json in a folder above", where=path, expected="sizes of the model's layers"
        )
    name = model.resolve().name
    if model.resolve() != root / "profiles" / name:
        raise InputError(
            "not in its place", where=path, expected=f"{root}/profiles/<model>/<GPU>/profile.json"
        )
    data = load_model_data(root, name, read_foreign(root / "llm_info.json"))
    kinds = list(data.tables) if gpu is None else [gpu]
    if settings.device is not None and len(kinds) > 1:
        raise InputError(
            "several GPU types",
            where="--device-type",
            got=", ".join(kinds),
            expected="one of them as PATH",
        )
    return profile(
        settings,
        model=name,
        source=f"Sailor profiles of {name} on {', '.join(kinds)}",
        where=path,
        layers=layers(data),
        tables=[
            table(
                settings.device or kind,
                *key,
                list(map(float, m.forward)),
                list(map(float, m.backward)),
            )
            for kind in kinds
            for key, m in sorted(data.tables[kind].items(), key=lambda item: item[0])
        ],
        sequence=data.sequence or None,
        notes=["update times are left out: a profile has none"],
    )


def layers(data: ModelData) -> list[ProfileLayer]:
    """Sizes of whole layers: parts that tensor parallelism divides, and parts that every rank
    keeps.

    With k_t bytes kept on each of t ranks, k_t = r + p / t; the two lowest degrees give r and p.
    """
    least, *more = sorted(data.sizes)
    low = data.sizes[least]
    replicated = 0.0 * low.kept
    if more:
        other = data.sizes[more[0]].kept
        divided = (low.kept - other) / (1 / least - 1 / more[0])
        replicated = (low.kept - divided / least).clip(0.0, low.kept)
    whole = replicated + (low.kept - replicated) * least
    return [
        layer(
            f"layer-{i}",
            float(low.params[i] * least),
            float(low.output[i]) if i < data.layers - 1 else 0.0,
            float(whole[i]),
            float(replicated[i]),
        )
        for i in range(data.layers)
    ]
