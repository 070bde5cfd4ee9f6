"""Keeps the working folder from the front of Python's path; puts it last, for modules of the user.

For `python -m` and `python -c` Python puts the working folder first on its path, except under the
option `-P` or the variable PYTHONSAFEPATH. A file `random.py` in the working folder would then be
imported, and so executed, in the place of Python's own module. hetplan therefore starts Python
processes with one of the two, and puts the working folder last on the path.
"""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator

from hetplan.errors import InputError

# The variable that has the effect of -P, for Python processes whose command hetplan does not write.
SAFE_PATH = "PYTHONSAFEPATH"


def own_command(*words: str) -> list[str]:
    """The command line that runs `hetplan WORDS` in a new process, without the working folder on
    its path."""
    return [sys.executable, "-P", "-m", "hetplan", *words]


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """A context in which every new Python process starts without the working folder on its path."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


def working_folder_last() -> None:
    """Put the working folder behind all else on the path, where `python -m` has put it first."""
    if sys.path[:1] == [os.getcwd()]:
        sys.path.append(sys.path.pop(0))


def make_importable(module: str, option: str) -> None:
    """Put the working folder last on the path, so that the module named by the user can be imported
    from there. Raises InputError where the folder has the module and another one of the same name,
    which Python finds first, hides it. option: the option that names it, for the message."""
    if "" not in sys.path:  # an empty entry stands for the working folder
        sys.path.append("")
    hiding = hidden_by(module)
    if hiding is not None:
        name = module.partition(".")[0]
        raise InputError(
            f"{option} names a module of the working folder that another one hides",
            got=module,
            expected=f"another name than {name}, which is {hiding}",
        )


def hidden_by(module: str) -> str | None:
    """The place of the package that hides `module` of the working folder; None where the folder has
    no such module, and where Python finds that of the folder."""
    in_folder = os.path.join(os.getcwd(), *module.split("."))
    files = (f"{in_folder}.py", os.path.join(in_folder, "__init__.py"))
    if not any(map(os.path.isfile, files)):
        return None
    name = module.partition(".")[0]
    loaded = sys.modules.get(name)
    spec = importlib.util.find_spec(name) if loaded is None else loaded.__spec__
    if spec is None:
        return None
    package = os.path.realpath(name)  # of the working folder
    expected_places = {f"{package}.py", os.path.join(package, "__init__.py"), package}
    # a package without __init__.py has folders in the place of a file
    places = list(spec.submodule_search_locations or ())
    if spec.origin:
        places.append(spec.origin)
    if expected_places & {os.path.realpath(place) for place in places}:
        return None
    return spec.origin if spec.has_location and spec.origin else "Python's own"
