"""All plans of a folder, measured beside predicted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from hetplan.errors import InputError
from hetplan.profiling.sailor.data import (
    ModelData,
    NotPricedError,
    PlanRun,
    load_links,
    load_model_data,
    load_run,
    model_names,
    read_sizes,
)
from hetplan.profiling.sailor.predict import Prediction, Predictor


@dataclass(frozen=True)
class Compared:
    """One plan: the run as it was measured, and its prediction, or why there is none."""

    run: PlanRun
    prediction: Prediction | None
    reason: str | None = None


def validate(folder: Path, framework: float | None = None) -> list[Compared]:
    """Every plan in `folder`/validation, in order of its name. framework: bytes that the framework
    takes, if known.

    Raises InputError for a folder or a file that cannot be used; a plan that the data cannot price
    keeps its reason.
    """
    root = folder / "validation"
    if not root.is_dir():
        raise InputError(
            "no such folder", where=str(root), expected="plans that were run, as JSON files"
        )
    runs = [load_run(path, root) for path in sorted(root.rglob("*.json"))]
    if not runs:
        raise InputError("no plan", where=str(root), expected="at least one JSON file")
    links = load_links(folder)
    info = read_sizes(folder)
    names = [name for name in model_names(folder) if name in info.root]
    load = cache(lambda name: load_model_data(folder, name, info))
    predictor = cache(lambda name: Predictor(load(name), links, framework))
    compared = []
    for run in runs:
        try:
            model = model_of(run, names, load)
            compared.append(Compared(run, predictor(model.name).predict(run)))
        except NotPricedError as error:
            compared.append(Compared(run, None, str(error)))
    return compared


def model_of(run: PlanRun, names: Sequence[str], load: Callable[[str], ModelData]) -> ModelData:
    """The plan's model: named in the plan or a folder above it, else the only one with its layers
    and GPU types.

    names: of models with profiles. load: reads one; those that a named plan does not need are not
    read.
    """
    folders = [part for part in run.file.split("/")[:-1] if part in names]
    name = run.model or (folders[-1] if folders else None)
    if name is None:
        models = [load(known) for known in names]
        fitting = [m for m in models if m.layers == run.layers and run.kinds <= set(m.tables)]
        if len(fitting) != 1:
            kinds = ", ".join(sorted(run.kinds))
            raise NotPricedError(
                f"which model has {run.layers} layers and profiles of {kinds}",
                where=run.file,
                got=", ".join(m.name for m in fitting) or "none",
                expected="exactly one",
            )
        return fitting[0]
    if name not in names:
        raise NotPricedError(
            "no profiles of this model", where=run.file, got=name, expected=", ".join(names)
        )
    model = load(name)
    if model.layers != run.layers:
        raise NotPricedError(
            "number of layers differs from its model's",
            where=run.file,
            got=run.layers,
            expected=f"{model.layers} ({model.name})",
        )
    return model


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The correlation of ranks, ties at their mean rank; None where all of one are equal."""
    if len(set(a)) < 2 or len(set(b)) < 2:
        return None
    return float(np.corrcoef([ranks(column) for column in (a, b)])[0, 1])


def ranks(values: Sequence[float]) -> list[float]:
    """Places in ascending order from 1 on, equal values at their mean."""
    _, place, counts = np.unique(np.array(values), return_inverse=True, return_counts=True)
    means = np.cumsum(counts) - (counts - 1) / 2
    return [float(means[i]) for i in place]
