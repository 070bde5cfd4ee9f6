"""A model as a chain of layers at one sequence length and precision: built in, or from a file."""

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hetplan.errors import require, unknown_name
from hetplan.files import read_json
from hetplan.profiling.models.configurations import from_config
from hetplan.profiling.models.operators import PRECISIONS, Attention, Layer, Precision
from hetplan.profiling.models.traced_model import FORMAT, ModelFile
from hetplan.profiling.models.zoo import ModelSpec, built_in
from hetplan.profiling.source_files import SourceFile


@dataclass(frozen=True)
class Model:
    """Layers of one model for samples of `sequence` tokens (None: images) in `precision`."""

    spec: ModelSpec
    sequence: int | None
    precision: Precision
    layers: tuple[Layer, ...]

    @property
    def name(self) -> str:
        """The model's name."""
        return self.spec.name

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the model before trusting a plan: keys that its file leaves
        out."""
        return self.spec.notes

    @cached_property
    def params(self) -> int:
        """All parameters; tied ones count once."""
        return sum(layer.params for layer in self.layers)

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of one sample; an image counts as one."""
        return self.sequence or 1

    def forward_flops(self) -> float:
        """FLOPs of the forward pass of one sample."""
        return sum(layer.forward_flops() for layer in self.layers)

    def backward_flops(self) -> float:
        """FLOPs of the backward pass of one sample."""
        return sum(layer.backward_flops() for layer in self.layers)

    def tensor_degree_fits(self, tensor: int) -> bool:
        """Whether a tensor-parallel group of that size divides heads and feed-forward evenly."""
        return self.spec.fits(tensor)


def check_made_for(
    model: Model, name: str, sequence: int | None, precision: str, *, where: str
) -> None:
    """Raise InputError unless what names a model, sequence and precision names this one's."""
    for key, got, expected in (
        ("model", name, model.name),
        ("sequence", sequence, model.sequence),
        ("precision", precision, model.precision),
    ):
        require(
            got == expected,
            f"{key} differs from the workload's",
            where=f"{where}: {key}",
            got=got,
            expected=repr(expected),
        )


def load_model(
    name: str | os.PathLike[str] | ModelSpec,
    *,
    sequence: int | None = None,
    precision: str = "fp16",
    attention: Attention | None = None,
) -> Model:
    """A model by built-in name, by path to a Hugging Face config.json (or its folder), or from a
    ModelSpec.

    sequence: tokens per sample, None for the model's default. precision: fp16, bf16 or fp32.
    attention: standard or fused, None for the shape's own (fused).
    Raises InputError for an unknown name (with suggestions), an unusable file, sequence or
    precision.
    """
    if precision not in PRECISIONS:
        raise unknown_name("unknown precision", precision, PRECISIONS)
    spec = name if isinstance(name, ModelSpec) else find_model(name)
    if attention is not None:
        spec = spec.with_attention(attention)
    chosen, layers = spec.chain(sequence)
    return Model(spec, chosen, precision, layers)


def find_model(name: str | os.PathLike[str]) -> ModelSpec:
    """The model that `name` stands for: a path if it looks like one, else a built-in."""
    text = os.fspath(name)
    # Path.is_dir raises where a name is too long or a folder is closed
    is_folder = os.path.isdir(text)
    if isinstance(name, os.PathLike) or text.endswith(".json") or os.sep in text or is_folder:
        return load_file(Path(text) / "config.json" if is_folder else Path(text))
    return built_in(text)


def load_file(path: Path) -> ModelSpec:
    """A traced model, or a Hugging Face configuration, whichever the file is. A configuration is
    called after its file, or after its folder where that is config.json."""
    value, where = read_json(path), str(path)
    if isinstance(value, dict) and value.get("format") == FORMAT:
        described = ModelFile.parsed(value, where=where).spec()
    else:
        name = path.resolve().parent.name if path.stem == "config" else path.stem
        described = from_config(value, name=name, where=where)
    return replace(described, file=SourceFile.of(path))
