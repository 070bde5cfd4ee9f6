"""The help of a command: its docstring, its options in sections by purpose, and worked examples at
the end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from typer.core import TyperCommand

Function = TypeVar("Function", bound=Callable[..., Any])
ATTRIBUTE = "help_description"


@dataclass(frozen=True)
class Description:
    """sections: heading -> the options below it, as `--name`. examples: (what for, the command)."""

    sections: Mapping[str, frozenset[str]] = field(default_factory=dict)
    examples: Sequence[tuple[str, str]] = ()


def described(
    sections: Mapping[str, str], examples: Sequence[tuple[str, str]]
) -> Callable[[Function], Function]:
    """Decorate a command's function with what its help says beside its docstring.

    sections: heading -> the names of its options, separated by spaces. examples: pairs of what a
    user wants and the command that does it.
    """
    named = {heading: frozenset(names.split()) for heading, names in sections.items()}

    def decorate(function: Function) -> Function:
        setattr(function, ATTRIBUTE, Description(named, tuple(examples)))
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
        """Arguments, then every section of options; `Options` are those of no section."""
        sections: dict[str, list[Any]] = {"Arguments": []}
        sections |= {heading: [] for heading in self.description.sections}
        sections["Options"] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections[self.heading_of(parameter)].append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def heading_of(self, parameter: Any) -> str:
        """The section that a parameter stands in."""
        if parameter.param_type_name == "argument":
            return "Arguments"
        for heading, names in self.description.sections.items():
            if not names.isdisjoint(parameter.opts):
                return heading
        return "Options"

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The examples, each a comment and a command, not wrapped."""
        if self.description.examples:
            with formatter.section("Examples"):
                for purpose, command in self.description.examples:
                    formatter.write(f"  # {purpose}\n")
                    formatter.write(f"  {command}\n")
