"""The form of the data that a chain of layers was made for, to which the data of all steps keep.

A trace has the sizes of one sample, and its numbers, fixed. Only the number of samples is open.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hetplan.errors import InputError, require
from hetplan.runtime.tracing.split import has_samples

# Types of leaves that a trace takes for constants.
NUMBERS = (bool, int, float, str)


@dataclass(frozen=True)
class LeafForm:
    """The form of a leaf of the data."""

    path: str
    """Keys and places that lead to the leaf, such as "input_ids"."""
    sizes: tuple[int, ...] | None = None
    """Sizes of one sample; None: no tensor with samples."""
    is_number: bool = False
    """Whether the leaf is a tensor of a single number, the same for the whole batch of a step."""
    constant: Any = None
    """Value of a number that is no tensor; None for other leaves."""

    @property
    def shape_text(self) -> str:
        """The leaf's shape as a text for errors."""
        if self.sizes is not None:
            return f"sizes {list(self.sizes)} of a sample"
        return "one number for the batch" if self.is_number else "no tensor"


def named_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of nested data, in the order of `tracing.split.mapped`."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from named_leaves(value[key], f"{path}.{key}".lstrip("."))
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from named_leaves(item, f"{path}[{number}]")
    else:
        yield path, value


def leaves_of(data: Any) -> Iterator[tuple[str, Any]]:
    """(path, leaf) of (inputs, targets)."""
    inputs, targets = data
    yield from named_leaves(inputs, "" if isinstance(inputs, Mapping) else "inputs")
    yield from named_leaves(targets, "labels")


def forms_of(data: Any) -> tuple[LeafForm, ...]:
    """The forms of all leaves of (inputs, targets)."""
    forms = []
    for path, leaf in leaves_of(data):
        if has_samples(leaf):
            forms.append(LeafForm(path, sizes=tuple(leaf.shape[1:])))
        elif isinstance(leaf, Tensor):
            forms.append(LeafForm(path, is_number=True))
        else:
            forms.append(LeafForm(path, constant=leaf if isinstance(leaf, NUMBERS) else None))
    return tuple(forms)


def check_forms(forms: tuple[LeafForm, ...], data: Any, where: str) -> None:
    """Raise InputError where data have another form than those of the trace.

    data: (inputs, targets). where: a text for errors.
    """
    found = forms_of(data)
    paths, expected_paths = [form.path for form in found], [form.path for form in forms]
    require(
        paths == expected_paths,
        "the data have other parts than those of the trace",
        where=where,
        got=", ".join(paths),
        expected=", ".join(expected_paths),
    )
    for form, expected in zip(found, forms, strict=True):
        place = f"{form.path} of {where}"
        if form.sizes != expected.sizes or form.is_number != expected.is_number:
            raise other_sizes(form, expected, place)
        require(
            form.constant == expected.constant,
            "a number of the data is not that of the trace",
            where=place,
            got=repr(form.constant),
            expected=f"{expected.constant!r}; a tensor of one number may change from step to step",
        )


def other_sizes(form: LeafForm, expected: LeafForm, where: str) -> InputError:
    """The error of a leaf whose sizes are not those of the trace."""
    got, sizes = form.sizes, expected.sizes
    if got and sizes and got[0] != sizes[0] and got[1:] == sizes[1:]:
        what = "tokens" if len(sizes) == 1 else "places"
        return InputError(
            f"the data have {got[0]} {what} where the trace has {sizes[0]}; pad rows alike",
            where=where,
        )
    return InputError(
        "the data have another shape than those of the trace",
        where=where,
        got=form.shape_text,
        expected=expected.shape_text,
    )
