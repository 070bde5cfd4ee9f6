"""What the runtime takes from torch is public, save in one module."""

from __future__ import annotations

import re
from pathlib import Path

import hetplan.runtime

RUNTIME = Path(hetplan.runtime.__file__).parent
# The one module that may use private names.
PRIVATE = RUNTIME / "tracing" / "counter.py"
# `torch._x`, `torch.a._x`, or `from torch.a._b import ..., _x`; `__version__` is nobody's secret.
USES = re.compile(
    r"\btorch(?:\.\w+)*\._[a-z]\w*|from torch[\w.]*\._\w+ import|from torch[\w.]* import .*\b_[a-z]"
)


def test_private_names_of_torch_are_in_one_module() -> None:
    using = {file for file in RUNTIME.rglob("*.py") if USES.search(file.read_text("utf-8"))}
    assert using == {PRIVATE}
