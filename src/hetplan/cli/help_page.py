"""Formats the help of a command: its docstring, its options in sections by purpose, and worked
examples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from textwrap import wrap
from typing import Any, TypeVar

from typer.core import TyperCommand

Function = TypeVar("Function", bound=Callable[..., Any])
ATTRIBUTE = "help_description"  # the attribute of a command's function for its `Description`
COMMAND_WIDTH = 72  # characters of an example's line: of 80, those beside its indentation and `\`
by_position = itemgetter(0)


@dataclass(frozen=True)
class Description:
    """The parts of a command's help beside its docstring."""

    # heading -> its options, as `--name`, in the order of the help
    sections: Mapping[str, Sequence[str]] = field(default_factory=dict)
    examples: Sequence[tuple[str, str]] = ()  # (a user's purpose, the command that serves it)

    def place(self, names: Sequence[str]) -> tuple[str, int] | None:
        """The heading of the section that lists an option, and the option's position there; None
        for an option that no section lists. names: all names of the option."""
        for heading, options in self.sections.items():
            for position, name in enumerate(options):
                if name in names:
                    return heading, position
        return None


def described(
    sections: Mapping[str, str] | None = None, examples: Sequence[tuple[str, str]] = ()
) -> Callable[[Function], Function]:
    """A decorator that gives a command's function its `Description`.

    sections: heading -> the names of its options, separated by spaces; None: all options stand
    together. examples: see `Description`.
    """
    options = {heading: tuple(names.split()) for heading, names in (sections or {}).items()}

    def decorate(function: Function) -> Function:
        setattr(function, ATTRIBUTE, Description(options, tuple(examples)))
        return function

    return decorate


def description_of(function: Callable[..., Any]) -> Description:
    """The `Description` that `described` gave to a command's function; an empty one for a function
    that is not decorated."""
    description: Description = getattr(function, ATTRIBUTE, Description())
    return description


class Page(TyperCommand):
    """A command whose help divides its options into the sections of its description, and ends with
    the description's examples."""

    description = Description()  # replaced where the command's function is `described`

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the sections of options, and the section `Options` with the options
        that the description does not list."""
        headings = ["Arguments", *self.description.sections, "Options"]
        # heading -> (position, help record of the parameter)
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
        for heading, entries in rows.items():
            if entries:
                with formatter.section(heading):
                    formatter.write_dl([record for _, record in sorted(entries, key=by_position)])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write each example: its purpose as a comment, then its command, a long one on several
        lines."""
        if not self.description.examples:
            return
        with formatter.section("Examples"):
            for purpose, command in self.description.examples:
                lines = wrap(command, COMMAND_WIDTH, break_long_words=False, break_on_hyphens=False)
                formatter.write(f"  # {purpose}\n")
                formatter.write("  " + " \\\n      ".join(lines) + "\n")
