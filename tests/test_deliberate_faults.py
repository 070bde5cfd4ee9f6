"""Every deliberate fault can still be put into the code, and names tests that there are.

`python -m evidence.speed deliberate_faults` puts them in and runs those tests.
"""

from __future__ import annotations

import pytest

from evidence.speed.deliberate_faults import ROOT, Fault, read_faults


@pytest.mark.parametrize("fault", read_faults(), ids=lambda fault: f"{fault.file}: {fault.why}")
def test_the_text_to_break_occurs_once_and_the_tests_exist(fault: Fault) -> None:
    assert fault.path(ROOT).read_text(encoding="utf-8").count(fault.before) == 1
    assert fault.before != fault.after
    for test in fault.tests:
        path, _, function = test.partition("::")
        assert (ROOT / path).exists(), path
        if function:
            assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8")
