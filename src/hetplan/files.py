"""Reading and writing files: strict JSON and YAML, limits on size and depth, atomic replacement.

Nothing that is read here is executed: the standard library parses JSON, and the safe loader of
PyYAML, without aliases, parses YAML. The standard library accepts JSON with NaN and infinities,
with a key twice in one object, and of any depth; this module refuses all three with their place.
In files of other programs, it accepts NaN, infinities and repeated keys: a file may have them where
hetplan reads nothing, and the schema of the file judges the values that hetplan reads.
"""

import contextlib
import gzip
import io
import json
import math
import os
import re
import secrets
import select
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hetplan.errors import InputError, json_path, kind_and_text, one_line, require, short_repr

MAX_BYTES = 256 * 2**20
MAX_DEPTH = 64
# Levels of other programs' JSON. The parser of the standard library recurses once for each level.
MAX_FOREIGN_DEPTH = 400
# Bytes and values of other programs' JSON. A value takes some hundred bytes of memory, and a packed
# file of a few kilobytes may hold so many values that they take gigabytes.
MAX_FOREIGN_BYTES = 64 * 2**20
MAX_FOREIGN_VALUES = 2_000_000
PIPE_SECONDS = 10  # seconds of waiting for a program that writes into a named pipe
# People write the YAML files, so that they are small. The parser is slow: a file of this size takes
# half a minute at worst.
MAX_YAML_BYTES = 2**20


def read_bytes(path: str | os.PathLike[str], most: int = MAX_BYTES) -> bytes:
    """The file's bytes; those of a `.gz` are unpacked. Raises InputError for a file that cannot be
    read, and for one of more than `most` bytes."""
    name = os.fspath(path)
    try:
        with opened(name, most + 1) as file:
            stream: Any = gzip.GzipFile(fileobj=file) if name.endswith(".gz") else file
            content = stream.read(most + 1)
    except InputError:  # is a ValueError too
        raise
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reasons: dict[type[Exception], str] = {
            FileNotFoundError: "no such file",
            IsADirectoryError: "is a folder, expected a file",
        }
        what = reasons.get(type(error), f"cannot be read: {one_line(str(error))}")
        raise InputError(what, where=name) from None
    require(len(content) <= most, "file is too large", where=name, expected=f"at most {most} bytes")
    return bytes(content)


def opened(name: str, most: int) -> BinaryIO:
    """The bytes of a file, or the first `most` of those that come through a named pipe."""
    if stat.S_ISFIFO(os.stat(name).st_mode):
        return io.BytesIO(pipe_content(name, most))
    return open(name, "rb")


def pipe_content(name: str, most: int) -> bytes:
    """The bytes that come through a named pipe, the first `most` of them.

    The pipe is opened without waiting for a program that writes into it, since none may ever come.
    Raises InputError where none has come after some seconds.
    """
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as pipe:
        waiting = select.poll()
        waiting.register(pipe, select.POLLIN)
        something_came = waiting.poll(1000 * PIPE_SECONDS)
        first = pipe.read(1)  # None: a program will write; empty: none is there, or it has gone
        nobody_writes = not something_came and first == b""
        require(
            not nobody_writes, "is a pipe into which nothing writes", where=name, expected="a file"
        )
        os.set_blocking(descriptor, True)
        rest = io.BufferedReader(pipe).read(most)
    return (first or b"") + rest


def read_json(path: str | os.PathLike[str]) -> Any:
    """The parsed JSON of a file. Raises InputError, with the place, for NaN, infinities, duplicate
    keys and nesting beyond MAX_DEPTH."""
    return parse_json(read_bytes(path), where=os.fspath(path))


def read_foreign_text(path: str | os.PathLike[str], most: int = MAX_FOREIGN_BYTES) -> str:
    """The text of another program's file of at most `most` bytes. Bytes that are no text become
    U+FFFD, so that a stray one in a log costs its word alone."""
    content = read_bytes(path, most)
    return content.decode(encoding_of(content), "replace")


def encoding_of(content: bytes) -> str:
    """The encoding of another program's text: UTF-8, with or without a mark at its beginning, or
    UTF-16, in which PowerShell's `>` and Windows' editors write. A mark says so, or else the zeros
    of UTF-16 among the first letters."""
    return json.detect_encoding(content)


def read_foreign_json(path: str | os.PathLike[str]) -> Any:
    """The parsed JSON of another program's file (`parse_foreign_json`)."""
    return parse_foreign_json(read_bytes(path, MAX_FOREIGN_BYTES), where=os.fspath(path))


def parse_foreign_json(
    content: bytes | str, *, where: str, most_values: int = MAX_FOREIGN_VALUES
) -> Any:
    """Another program's document in `content` (UTF-8 or UTF-16), as Python's `json` reads it: with
    NaN and infinities, and with the last value of a key that stands twice. An integer of more
    digits than Python converts becomes an infinity.

    Raises InputError with the place for content that is no JSON, for nesting beyond
    MAX_FOREIGN_DEPTH, and for more than `most_values`. `where` names the source in errors.
    """

    def integer(text: str) -> int | float:
        try:
            return int(text)
        except ValueError:
            return -math.inf if text.startswith("-") else math.inf

    encoding = "" if isinstance(content, str) else encoding_of(content)
    with json_errors(content, where, encoding) as text:
        # Each value but the first of an object or a list stands behind a comma.
        values = text.count(",") + text.count("[") + text.count("{")
        require(
            values <= most_values,
            "has too many values",
            where=where,
            got=values,
            expected=f"at most {most_values}",
        )
        check_depth(text, where, MAX_FOREIGN_DEPTH)
        return json.loads(text, parse_int=integer)


@contextlib.contextmanager
def json_errors(content: bytes | str, where: str, encoding: str = "utf-8-sig") -> Iterator[str]:
    """A context for parsing JSON: gives the text of `content`, and turns errors of decoding and of
    parsing into InputErrors with the place. `where` names the source."""
    text = ""
    try:
        text = content if isinstance(content, str) else content.decode(encoding)
        yield text
    except UnicodeDecodeError as error:
        name = "UTF-8" if encoding.startswith("utf-8") else encoding.upper()
        raise InputError(f"not {name} text at byte {error.start}", where=where) from None
    except json.JSONDecodeError as error:
        require(text.strip(), "is empty", where=where, expected="a JSON document")
        is_cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        require(not is_cut, "ends in the middle", where=where, expected="a whole JSON document")
        place = f"{where}: line {error.lineno} column {error.colno}"
        raise InputError(f"not valid JSON: {error.msg}", where=place) from None


@dataclass(frozen=True, eq=False)
class Fault:
    """A mark in a parsed document in the place of a value that is refused; the fields are those of
    the error."""

    what: str
    got: str | None = None
    expected: str | None = None


def parse_json(content: bytes | str, *, where: str) -> Any:
    """The document in `content` (UTF-8); raises InputError. `where` names the source in errors.

    json's hooks below do not know the place of a value. They put a Fault in the place of a refused
    value; the path to the first Fault of the finished document is the place in the error.
    """
    faults: list[Fault] = []

    def refused(what: str, got: str | None = None, expected: str | None = None) -> Fault:
        faults.append(Fault(what, got, expected))
        return faults[-1]

    def constant(text: str) -> Fault:  # NaN, Infinity, -Infinity
        return refused("number is not finite", text, "a finite number")

    def integer(text: str) -> int | Fault:
        try:
            return int(text)
        except ValueError:  # more digits than Python converts
            digits = len(text.lstrip("-"))
            limit = sys.get_int_max_str_digits()
            return refused(f"an integer of {digits} digits", expected=f"at most {limit}")

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
            result[key] = refused(f"key {short_repr(key)} stands twice in one object")
        return result

    with json_errors(content, where) as text:
        check_depth(text, where, MAX_DEPTH)
        document = json.loads(
            text, parse_constant=constant, parse_int=integer, object_pairs_hook=unique_keys
        )
    if faults:
        # The document still has a fault. An object that has a key twice loses the value of one of
        # the two, and the faults in this value, but it gets a fault of its own.
        path, fault = next(faults_in(document))
        place = f"{where}: {json_path(path)}" if path else where
        raise InputError(fault.what, where=place, got=fault.got, expected=fault.expected)
    return document


def faults_in(value: Any, *path: int | str) -> Iterator[tuple[Sequence[int | str], Fault]]:
    """Each fault in `value`, with the keys and indices that lead to it. path: the keys and indices
    that lead to `value` itself."""
    if isinstance(value, Fault):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from faults_in(inner, *path, key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from faults_in(inner, *path, index)


# One JSON string (its brackets do not count; an unclosed one runs to the end) or one bracket.
STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{\]}]', re.DOTALL)


def check_depth(text: str, where: str, most: int) -> None:
    """Raise InputError for JSON nested beyond `most` levels, before the parser recurses into it."""
    if text.count("[") + text.count("{") <= most:
        return
    depth = 0
    for match in STRING_OR_BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match.group(), 0)
        if depth > most:
            line = text.count("\n", 0, match.start()) + 1
            raise InputError(
                "nested too deeply",
                where=f"{where}: line {line}",
                expected=f"at most {most} levels",
            )


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The parsed YAML of a file of at most MAX_YAML_BYTES. Raises InputError, with the place, for
    aliases, duplicate keys and deep nesting."""
    import yaml

    class Loader(yaml.SafeLoader):
        """The safe loader of PyYAML, which here also refuses aliases, duplicate keys and deep
        nesting. Description files need none of them, and attacks use them."""

        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                event = self.peek_event()  # type: ignore[no-untyped-call]
                raise yaml.MarkedYAMLError(None, None, "aliases are not allowed", event.start_mark)
            self.depth += 1
            if self.depth > MAX_DEPTH:
                mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
                raise yaml.MarkedYAMLError(
                    None, None, f"nested deeper than {MAX_DEPTH} levels", mark
                )
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[Any] = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                usable = isinstance(key, str | int | float | bool)
                stands_twice = usable and key in seen  # other keys may have no hash
                if not usable or stands_twice:
                    problem = "unusable key"
                    if stands_twice:
                        problem = f"key {str(key)[:80]!r} stands twice"
                    raise yaml.MarkedYAMLError(None, None, problem, key_node.start_mark)
                seen.add(key)
            return super().construct_mapping(node, deep)

    name = os.fspath(path)
    content = read_bytes(path, MAX_YAML_BYTES)
    try:
        value = yaml.load(content, Loader=Loader)
        require(value is not None, "is empty", where=name, expected="a YAML document")
        return value
    except InputError:  # is a ValueError too
        raise
    except yaml.reader.ReaderError as error:
        what = f"no text that YAML allows, at position {error.position}"
        raise InputError(what, where=name, expected="a YAML document") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}: line {mark.line + 1} column {mark.column + 1}" if mark else name
        problem = error.problem or error.context
        raise InputError(f"not valid YAML: {problem}", where=place) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"not valid YAML: {one_line(str(error))[:160]}", where=name) from None


def check_target(path: Path) -> None:
    """Raise InputError for a path where no file can be written."""
    check_name(path)
    folder = path.parent
    require(not os.path.isdir(path), "is a folder, expected a file name", where=str(path))
    require(
        os.path.isfile(path) or not os.path.exists(path),
        "is a device or a pipe, expected a file name",
        where=str(path),
    )
    require(os.path.isdir(folder), "no such folder", where=str(folder))
    require(os.access(folder, os.W_OK), "folder cannot be written to", where=str(folder))


def check_name(path: Path) -> None:
    """Raise InputError for a path that can name nothing: one that is too long, or that goes through
    a link to itself. What asks whether such a path exists may say no, or raise an OSError."""
    with writable(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(path)


def check_utf8(path: str) -> None:
    """Raise InputError for a path that is no UTF-8 text, and so cannot stand in a script."""
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError("name is not UTF-8, and scripts would state it", where=path) from None


def check_folder_target(path: Path) -> None:
    """Raise InputError for a path where no folder can be made, or into which no file can be
    written."""
    check_name(path)
    exists = os.path.lexists(path)  # a link to nothing is in the way, too
    require(not exists or os.path.isdir(path), "is a file, expected a folder", where=str(path))
    if not exists:
        require(os.path.isdir(path.parent), "no such folder", where=str(path.parent))
    folder = path if exists else path.parent
    require(os.access(folder, os.W_OK), "folder cannot be written to", where=str(folder))


@contextlib.contextmanager
def writable(path: str | os.PathLike[str], what: str = "cannot be written") -> Iterator[None]:
    """A context in which `path` is made or written. What the operating system says against it
    becomes an InputError: a full disk, a name that is too long, a folder that allows no files."""
    where = os.fspath(path)
    try:
        yield
    except InputError:  # is a ValueError too
        raise
    except OSError as error:
        raise InputError(f"{what}: {error.strerror or kind_and_text(error)}", where=where) from None
    except ValueError as error:  # a name with a null byte or with lone surrogates
        raise InputError(f"{what}: {one_line(str(error))[:160]}", where=where) from None


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder and those above it; one that exists stays. Raises InputError where it cannot be
    made, and where the path is a file."""
    with writable(path, "folder cannot be made"):
        os.makedirs(path, exist_ok=True)


def try_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder as `make_folder` does and write a file into it, which is removed again. Raises
    InputError where either cannot be done, so that long work need not end with it."""
    make_folder(path)
    trial = Path(path, f".{secrets.token_hex(6)}.tmp")
    with writable(path):
        trial.touch()
        trial.unlink()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` atomically: an old file stays until the new one is complete. UTF-8; gzip where
    the name ends in `.gz`. Raises InputError for text that UTF-8 cannot hold."""
    with writable(path):
        data = text.encode("utf-8")
    if os.fspath(path).endswith(".gz"):
        data = gzip.compress(data, mtime=0)  # without a time, equal texts give equal files
    write_bytes(path, data)


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` atomically: a temporary file beside `path`, flushed to disk, then renamed over
    it."""
    with writable(path):
        # A link stays a link: the file to which it points is replaced.
        target = Path(os.path.realpath(path))
        check_target(target)
        # The name is cut, since a file system allows 255 bytes and the target may have as many.
        temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(6)}.tmp")
        try:
            with open(temporary, "xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            if os.path.exists(target):
                os.chmod(temporary, target.stat().st_mode & 0o777)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def to_yaml(value: Any) -> str:
    """YAML text, for files that people edit."""
    import yaml

    return str(yaml.safe_dump(value, sort_keys=False))


# Characters that JSON texts may contain and that steer a terminal or an editor: control characters,
# ends of lines, marks of writing direction, the byte-order mark and lone surrogates.
STEERING = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def to_json(value: Any) -> str:
    """JSON text that is easy to read and to diff, with a final newline.

    A list of numbers stands on one line. So does everything else that fits into 120 characters,
    unless it or a container in it has more than 20 items.
    Characters of STEERING are escaped. Raises ValueError for NaN and infinities.
    """
    text = "".join(_json_parts(value, 0)) + "\n"
    return STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _json_parts(value: Any, depth: int) -> Iterator[str]:
    """The pieces of the text of `value`, which begins in a line indented by `depth` blanks."""
    if not isinstance(value, dict | list | tuple) or _fits(value):
        yield json.dumps(value, allow_nan=False, ensure_ascii=False)
        return
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    separator = f"{opening}\n" + " " * (depth + 1)
    for item in value:
        yield separator
        if isinstance(value, dict):
            yield json.dumps(str(item), ensure_ascii=False) + ": "
            yield from _json_parts(value[item], depth + 1)
        else:
            yield from _json_parts(item, depth + 1)
        separator = ",\n" + " " * (depth + 1)
    yield "\n" + " " * depth + closing


def _fits(value: Any) -> bool:
    """Whether an object or a list belongs on one line (see `to_json`). The items are counted before
    the text is written, because the text of many items takes long to write."""
    items = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(value, dict) and all(isinstance(item, int | float) for item in items):
        return True
    containers = [item for item in items if isinstance(item, dict | list | tuple)]
    if any(len(container) > 20 for container in (items, *containers)):
        return False
    return len(json.dumps(value, allow_nan=False, ensure_ascii=False)) <= 120
