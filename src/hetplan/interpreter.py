"""Python processes that hetplan starts, and modules of its user's own.

For `python -m` and `python -c` Python puts the working folder first on its path, unless it is told
otherwise by `-P` or PYTHONSAFEPATH. A file `random.py` that lies there would be imported, and so
executed, in the place of Python's own. hetplan tells it otherwise, and looks into the working
folder last, for modules that the user names.
"""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator

from hetplan.errors import InputError

# The variable that does what -P does, for Python processes that others start.
SAFE_PATH = "PYTHONSAFEPATH"


def own_command(*words: str) -> list[str]:
    """The command that runs hetplan with these words in a process of its own."""
    return [sys.executable, "-P", "-m", "hetplan", *words]


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Inside, Python processes start without the working folder on their path."""
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


def let_find(module: str, option: str) -> None:
    """Let a module that the user names by `option` be imported from the working folder, where
    nothing installed has its name. Raises InputError where the folder has it, and something
    installed hides it."""
    if "" not in sys.path:
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
    """Where Python finds the module's package, if the working folder has the module and Python
    finds another one; else None."""
    inside = os.path.join(os.getcwd(), *module.split("."))
    if not any(map(os.path.isfile, (f"{inside}.py", os.path.join(inside, "__init__.py")))):
        return None
    name = module.partition(".")[0]
    loaded = sys.modules.get(name)
    spec = importlib.util.find_spec(name) if loaded is None else loaded.__spec__
    if spec is None:
        return None
    top = os.path.realpath(name)
    own = {f"{top}.py", os.path.join(top, "__init__.py"), top}
    # a package without __init__.py has no file of its own, but folders
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else ())]
    if own & {os.path.realpath(place) for place in places}:
        return None
    return spec.origin if spec.has_location and spec.origin else "Python's own"
