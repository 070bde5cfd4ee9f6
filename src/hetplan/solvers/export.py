"""Writes models to files: mixed-integer programmes as MPS or LP, CP-SAT models as protocol buffers.

Columns and rows of a mixed-integer programme have the names of the formulation (`x_3_1`,
`cover_2`); of a CP-SAT model, the variables do.
"""

import itertools
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.errors import require
from hetplan.files import write_bytes
from hetplan.solvers.model import LinearArrays, Model, member_names
from hetplan.solvers.run import Options

if TYPE_CHECKING:  # importing it loads OR-Tools
    from hetplan.solvers.constraint_model import ConstraintModel

# File ending -> the method whose models such files contain.
ENDINGS = {".mps": "milp", ".lp": "milp", ".pb": "cp-sat", ".pbtxt": "cp-sat"}


@dataclass(frozen=True)
class Exported:
    """A model in a file. Its objective in seconds is objective / per_unit + offset, up to the
    rounding that `solvers.model` states."""

    file: str
    rows: int  # number of constraints
    columns: int  # number of variables
    discrete: int  # number of integer variables
    per_unit: float  # units of the model's objective per second
    offset: float  # seconds that every decision costs beside the model's objective


def write_models(models: "Sequence[Model | ConstraintModel]", path: Path) -> list[Exported]:
    """Write each model to a file: a single one to `path`, several ones to `path` with a number
    before its ending."""
    paths = [path]
    if len(models) > 1:
        paths = [path.with_stem(f"{path.stem}-{number:03d}") for number in range(len(models))]
    return [write_model(model, each) for model, each in zip(models, paths, strict=True)]


def method_of(path: Path) -> str:
    """The method whose models a file of that name contains, by its ending; raises InputError for
    an ending that is not in `ENDINGS`."""
    require(
        path.suffix in ENDINGS,
        "unknown ending",
        where=str(path),
        got=path.suffix,
        expected=", ".join(ENDINGS),
    )
    return ENDINGS[path.suffix]


def write_model(model: "Model | ConstraintModel", path: Path) -> Exported:
    """Write one model in the format of the ending of `path`. The file appears when it is
    complete."""
    if ENDINGS[path.suffix] == "milp":
        assert isinstance(model, Model), "the method milp states linear models"
        return write_milp(model, path)
    return write_cp_sat(model, path)


def write_milp(model: Model, path: Path) -> Exported:
    """Write a model as a mixed-integer programme, by HiGHS."""
    arrays = model.arrays()
    scale = model.milp_scale()
    write_by_library(path, lambda file: write_with_highs(model, arrays, file))
    rows, columns = arrays.shape
    discrete = int(arrays.integer.sum())
    return Exported(str(path), rows, columns, discrete, scale.per_unit, scale.offset)


def write_cp_sat(model: "Model | ConstraintModel", path: Path) -> Exported:
    """Write a model as a CP-SAT model, whose variables are all integer."""
    from hetplan.solvers.cpsat import write

    cp, scale = write(model) if isinstance(model, Model) else (model.cp, model.scale)
    write_by_library(path, lambda file: bool(cp.export_to_file(file)))
    rows, columns = len(cp.proto.constraints), len(cp.proto.variables)
    return Exported(str(path), rows, columns, columns, scale.per_unit, scale.offset)


def write_by_library(path: Path, write: Callable[[str], bool]) -> None:
    """Have a library write a temporary file, and copy the complete file to `path`.

    write: writes a file of the given name; returns whether it succeeded. Raises InputError where it
    did not.
    """
    # OR-Tools writes text only to files that end in .txt
    ending = ".txt" if path.suffix == ".pbtxt" else path.suffix
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / f"model{ending}"
        require(write(str(temporary)), "the model cannot be written", where=str(path))
        write_bytes(path, temporary.read_bytes())


def write_with_highs(model: Model, arrays: LinearArrays, file: str) -> bool:
    """Have HiGHS write a file with the names of the formulation; returns whether it succeeded."""
    import highspy

    from hetplan.solvers.highs import instance, loaded

    highs = loaded(arrays, instance(Options()))
    for number, name in enumerate(member_names(model.column_blocks)):
        highs.passColName(number, name)
    # the rows of one constraint are numbered from 0
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
    for row, name in enumerate(model.row_names):
        highs.passRowName(row, f"{name}_{next(numbers[name])}")
    successes = (highspy.HighsStatus.kOk, highspy.HighsStatus.kWarning)
    succeeded: bool = highs.writeModel(file) in successes
    return succeeded
