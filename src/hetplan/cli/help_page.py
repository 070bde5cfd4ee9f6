"""The help of a command: its docstring, its options in sections by purpose, and worked examples at
the end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from textwrap import wrap
from typing import Any, TypeVar

from typer.core import TyperCommand

Function = TypeVar("Function", bound=Callable[..., Any])
ATTRIBUTE = "help_description"
COMMAND_WIDTH = 72  # of an example's line
first = itemgetter(0)


@dataclass(frozen=True)
class Description:
    """sections: heading -> its options, as `--name`, in the order of the help. examples: pairs of
    what a user wants and the command that does it."""

    sections: Mapping[str, Sequence[str]] = field(default_factory=dict)
    examples: Sequence[tuple[str, str]] = ()

    def place(self, names: Sequence[str]) -> tuple[str, int] | None:
        """The heading that an option with these names stands below and its position there; None
        for an option of no section."""
        for heading, listed in self.sections.items():
            for position, name in enumerate(listed):
                if name in names:
                    return heading, position
        return None


def described(
    sections: Mapping[str, str], examples: Sequence[tuple[str, str]]
) -> Callable[[Function], Function]:
    """Decorate a command's function with what its help says beside its docstring.

    sections: heading -> the names of its options, separated by spaces. examples: as `Description`.
    """
    listed = {heading: tuple(names.split()) for heading, names in sections.items()}

    def decorate(function: Function) -> Function:
        setattr(function, ATTRIBUTE, Description(listed, tuple(examples)))
        return function

    return decorate


def description_of(function: Callable[..., Any]) -> Description:
    """What `described` said of a command's function; empty where it is not decorated."""
    description: Description = getattr(function, ATTRIBUTE, Description())
    return description


class Page(TyperCommand):
    """A command whose help has its options in sections and ends with examples, where its function
    is `described`."""

    description = Description()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then each section of options; `Options` are those of no section."""
        headings = ["Arguments", *self.description.sections, "Options"]
        rows: dict[str, list[tuple[int, Any]]] = {heading: [] for heading in headings}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                heading, position = "Arguments", 0
            else:
                heading, position = self.description.place(parameter.opts) or ("Options", 0)
            rows[heading].append((position, record))
        for heading, found in rows.items():
            if found:
                with formatter.section(heading):
                    formatter.write_dl([record for _, record in sorted(found, key=first)])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples: a comment, then the command, continued where it is long."""
        if not self.description.examples:
            return
        with formatter.section("Examples"):
            for purpose, command in self.description.examples:
                lines = wrap(command, COMMAND_WIDTH, break_long_words=False, break_on_hyphens=False)
                formatter.write(f"  # {purpose}\n")
                formatter.write("  " + " \\\n      ".join(lines) + "\n")
