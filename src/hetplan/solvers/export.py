"""Models as files: mixed-integer programmes as MPS or LP, CP-SAT models as protocol buffers.

Columns and rows carry the names of the formulation (`x_3_1`, `cover_2`), so that a reader finds the
constraints again.
"""

import itertools
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetplan.errors import require
from hetplan.files import write_bytes
from hetplan.solvers.model import LinearArrays, Model, member_names
from hetplan.solvers.run import Options

# File ending -> method whose models it can hold.
ENDINGS = {".mps": "milp", ".lp": "milp", ".pb": "cp-sat", ".pbtxt": "cp-sat"}


@dataclass(frozen=True)
class Exported:
    """A model in a file. per_unit, offset: seconds = objective / per_unit + offset, up to stated
    rounding."""

    file: str
    rows: int
    columns: int
    discrete: int
    per_unit: float
    offset: float


def write_models(models: Sequence[Model], path: Path) -> list[Exported]:
    """All models: the only one as `path`, several as `path` with a number before its ending."""
    names = [path]
    if len(models) > 1:
        names = [path.with_stem(f"{path.stem}-{number:03d}") for number in range(len(models))]
    return [write_model(model, name) for model, name in zip(models, names, strict=True)]


def method_of(path: Path) -> str:
    """The method whose models a file of that name holds; raises InputError for another ending."""
    require(
        path.suffix in ENDINGS,
        "unknown ending",
        where=str(path),
        got=path.suffix,
        expected=", ".join(ENDINGS),
    )
    return ENDINGS[path.suffix]


def write_model(model: Model, path: Path) -> Exported:
    """One model, atomically, as the ending of `path` says."""
    if ENDINGS[path.suffix] == "milp":
        arrays, scale = model.arrays(), model.milp_scale()
        write_through(path, lambda file: write_linear(model, arrays, file))
        rows, columns, discrete = *arrays.shape, int(arrays.integer.sum())
    else:
        from hetplan.solvers.cpsat import write

        cp, scale = write(model)
        write_through(path, lambda file: bool(cp.export_to_file(file)))
        rows = len(cp.proto.constraints)
        columns = discrete = len(cp.proto.variables)
    return Exported(str(path), rows, columns, discrete, scale.per_unit, scale.offset)


def write_through(path: Path, write: Callable[[str], bool]) -> None:
    """Let a library write a file beside, and put it where it belongs once it is whole."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"model{path.suffix.replace('.pbtxt', '.txt')}"
        require(write(str(file)), "the model cannot be written", where=str(path))
        write_bytes(path, file.read_bytes())


def write_linear(model: Model, arrays: LinearArrays, file: str) -> bool:
    """By HiGHS, with the formulation's names."""
    import highspy

    from hetplan.solvers.highs import instance, loaded

    highs = loaded(arrays, instance(Options()))
    for number, name in enumerate(member_names(model.column_blocks)):
        highs.passColName(number, name)
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
    for row, name in enumerate(model.row_names):
        highs.passRowName(row, f"{name}_{next(numbers[name])}")
    written: bool = highs.writeModel(file) in (
        highspy.HighsStatus.kOk,
        highspy.HighsStatus.kWarning,
    )
    return written
