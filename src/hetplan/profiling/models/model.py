"""Loading a model, built in or from a file, as a chain of layers at one sequence length and
precision."""

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hetplan.errors import require, unknown_name
from hetplan.files import parse_foreign_json, parse_json, read_bytes
from hetplan.profiling.models.adapters import Adapters, parse_adapters
from hetplan.profiling.models.configurations import from_config
from hetplan.profiling.models.operators import PRECISIONS, Attention, Layer, Precision
from hetplan.profiling.models.traced_model import FORMAT, ModelFile
from hetplan.profiling.models.zoo import ModelSpec, built_in
from hetplan.profiling.source_files import SourceFile


@dataclass(frozen=True)
class Model:
    """A model as a chain of layers, at one sequence length and precision."""

    spec: ModelSpec  # the model at any sequence length
    sequence: int | None  # tokens per sample; None for images
    precision: Precision
    layers: tuple[Layer, ...]

    @property
    def name(self) -> str:
        """The model's name."""
        return self.spec.name

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user about the model, such as the keys of its file that were
        assumed."""
        return self.spec.notes

    @cached_property
    def params(self) -> int:
        """All parameters; tied ones count once."""
        return sum(layer.params for layer in self.layers)

    @cached_property
    def trained(self) -> int:
        """Trained parameters; tied ones count once."""
        return sum(layer.trained for layer in self.layers)

    @cached_property
    def first_alike(self) -> tuple[int, ...]:
        """[layers] the first layer that equals each one in all but the name."""
        first: dict[Layer, int] = {}
        return tuple(
            first.setdefault(replace(layer, name=""), l) for l, layer in enumerate(self.layers)
        )

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
        """Whether `tensor` tensor-parallel ranks divide heads and feed-forward size evenly."""
        return self.spec.fits(tensor)


def check_made_for(
    model: Model, name: str, sequence: int | None, precision: str, *, where: str
) -> None:
    """Raise InputError unless a file was made for this model at its sequence length and precision.

    name, sequence, precision: the values that the file states. where: the file, for messages.
    """
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
    adapters: Adapters | str | None = None,
) -> Model:
    """A model by built-in name, by path to a Hugging Face config.json (or its folder), or from a
    ModelSpec.

    sequence: tokens per sample; None: the model's default. precision: fp16, bf16 or fp32.
    attention: standard or fused; None: as the model's shape says, usually fused. adapters: those
    that are trained in place of the model's weights, or their text, as `lora:16:q,v`; None: none.
    Raises InputError for an unknown name (with suggestions), an unusable file, sequence or
    precision, and as `ModelSpec.with_adapters` does.
    """
    if precision not in PRECISIONS:
        raise unknown_name("unknown precision", precision, PRECISIONS)
    spec = name if isinstance(name, ModelSpec) else find_model(name)
    if attention is not None:
        spec = spec.with_attention(attention)
    if adapters is not None:
        if isinstance(adapters, str):
            adapters = parse_adapters(adapters)
        spec = spec.with_adapters(adapters)
    chosen, layers = spec.chain(sequence)
    return Model(spec, chosen, precision, layers)


def find_model(name: str | os.PathLike[str]) -> ModelSpec:
    """The model of a file or folder where `name` looks like a path, else the built-in model."""
    text = os.fspath(name)
    # not Path.is_dir, which raises where a name is too long or a folder is closed
    is_folder = os.path.isdir(text)
    if is_folder:
        return load_file(Path(text) / "config.json")
    if isinstance(name, os.PathLike) or text.endswith(".json") or os.sep in text:
        return load_file(Path(text))
    return built_in(text)


def load_file(path: Path) -> ModelSpec:
    """The model of a file: a traced model, or a Hugging Face configuration.

    The name of a configuration's model is the file's name without its suffix; for config.json it is
    the name of the file's folder.
    """
    content = read_bytes(path)
    where = str(path)
    value = parse_foreign_json(content, where=where)
    if isinstance(value, dict) and value.get("format") == FORMAT:
        spec = ModelFile.parsed(parse_json(content, where=where), where=where).spec()
    else:
        name = path.resolve().parent.name if path.stem == "config" else path.stem
        spec = from_config(value, name=name, where=where)
    return replace(spec, file=SourceFile.of(path))
