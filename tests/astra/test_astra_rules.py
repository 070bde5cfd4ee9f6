"""The rule language: precedence, None, types, positions of errors; evaluation against a plain
Python reading."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.errors import InputError
from hetplan.formulations.astra.search.rules import (
    Column,
    Source,
    Values,
    compile_rule,
    rules_from_text,
)

WORDS = ("selective", "full", "hybrid")
COLUMNS = {
    "a": Column("number"),
    "b": Column("number"),
    "layers": Column("number"),
    "granularity": Column("string", WORDS),
    "flag": Column("bool"),
}
ROWS = 5
TABLE = {
    "a": Values(np.array([1.0, 2.0, 3.0, 4.0, 5.0])),
    "b": Values(np.array([0.0, 2.0, 2.0, 8.0, 5.0])),
    "layers": Values(
        np.array([0.0, 1.0, 2.0, 3.0, 0.0]), np.array([False, True, True, True, False])
    ),
    "granularity": Values(np.array([0, 1, 2, 0, 0]), np.array([True, True, True, True, False])),
    "flag": Values(np.array([True, False, True, False, True])),
}


def met(text: str) -> list[int]:
    mask = compile_rule(Source(text), COLUMNS).met(TABLE, ROWS)
    assert mask.shape == (ROWS,) and mask.dtype == bool
    return [int(i) for i in np.flatnonzero(mask)]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("$a > 3", [3, 4]),
        ("$a == 1 || $a == 2 && $b == 0", [0]),  # && first
        ("($a == 1 || $a == 2) && $b == 0", [0]),
        ("$b == 0 && $a == 2 || $a == 1", [0]),
        ("$a == 5 || $b == 5 && $a == 1", [4]),
        ("$a - 1 - 1 == 1", [2]),  # left to right
        ("$b / 2 / 2 == 2", [3]),
        ("$a % 2 == 0", [1, 3]),
        ("-$a + 6 == - - 2", [3]),
        ("$a + $a * $a == 12", [2]),
        ("($a + $a) * $a == 18", [2]),
        ("$granularity = selective", [0, 3]),  # the paper's spelling
        ("$granularity == 'selective'", [0, 3]),
        ('$granularity ≠ "selective"', [1, 2, 4]),
        ("$granularity == None", [4]),
        ("None != $granularity", [0, 1, 2, 3]),
        ("None == None", [0, 1, 2, 3, 4]),
        ("$layers >= 0", [1, 2, 3]),  # None is not ordered
        ("$layers + 1 == None", [0, 4]),
        ("$layers != 1", [0, 2, 3, 4]),
        ("$layers == $layers", [0, 1, 2, 3, 4]),
        ("$a % $b != 0", [0, 2, 3]),  # dividing by zero is None, which differs from 0
        ("$a / $b <= 1", [1, 3, 4]),
        ("$flag && $a < 4", [0, 2]),
        ("$flag == false", [1, 3]),
        ("true", [0, 1, 2, 3, 4]),
        ("($flag || $a == 2) == true", [0, 1, 2, 4]),
        ("$a*1e0 >= .5 && $a<2.5", [0, 1]),
    ],
)
def test_meaning(text: str, rows: list[int]) -> None:
    assert met(text) == rows


@pytest.mark.parametrize(
    ("text", "column", "part"),
    [
        ("$pipelin > 1", 1, "unknown parameter"),
        ("$a > 1 && $layer == 2", 11, "expected $layers"),
        ("$a + 1", 1, "must be true or false"),
        ("$a > 'x'", 4, "orders numbers only"),
        ("$a == 'x'", 4, "a number and a string"),
        ("$granularity == 'selectve'", 17, "selective, full, hybrid"),
        ("$granularity == full && $a", 25, "&& cannot take this"),
        ("$flag + 1 == 2", 1, "+ cannot take this"),
        ("$a + None == 2", 6, "+ cannot take this"),
        ("granularity == full", 1, "expected $granularity"),
        ("($a > 1", 1, "bracket is not closed"),
        ("$a > 1)", 7, "bracket was never opened"),
        ("$a > 1 && ($b > (2)", 11, "bracket is not closed"),
        ("$granularity == 'full", 17, "string is not closed"),
        ("$a >", 5, "a value is missing"),
        ("$a > 1 &&", 10, "a value is missing"),
        ("&& $a > 1", 1, "a value is missing"),
        ("$a & $b", 4, "single sign"),
        ("$a > 1 | $b > 1", 8, "single sign"),
        ("1 < $a < 3", 8, "do not chain"),
        ("(1 < $a < 3)", 9, "do not chain"),
        ("$a > 1 $b", 8, "unexpected text"),
        ("$ > 1", 1, "$ without a name"),
        ("$a > 1; $b", 7, "unexpected character"),
        ("$a % 0 == 1", 6, "division by zero"),
        ("$a > 1e300", 6, "too large"),
        ("()", 2, "a value is missing"),
        ("__import__('os').system('true')", 17, "unexpected character"),
        ("__import__('os') == 1", 11, "unexpected text"),
    ],
)
def test_faults_name_their_place(text: str, column: int, part: str) -> None:
    with pytest.raises(InputError) as error:
        compile_rule(Source(text, "my.rules", 3), COLUMNS)
    assert f"my.rules: line 3 column {column}:" in str(error.value)
    assert part in str(error.value)


@pytest.mark.parametrize(
    "text", ["(" * 60 + "$a > 1" + ")" * 60, "-" * 60 + "1 > 2", "$a > 1 " + " " * 10_000]
)
def test_size_limits(text: str) -> None:
    with pytest.raises(InputError, match=r"deeply|too long"):
        compile_rule(Source(text), COLUMNS)


def test_long_chains_do_not_recurse() -> None:
    assert met("$a > " + "+".join(["0"] * 2000)) == [0, 1, 2, 3, 4]
    assert met(" || ".join(["$a == 3"] * 500)) == [2]


def test_files_have_comments_and_lines() -> None:
    text = "# nothing\n\n$a > 4   # five\n$granularity == 'full' # '#' in a string is kept\n"
    rules = rules_from_text(text, COLUMNS, where="x")
    assert [str(rule) for rule in rules] == ["$a > 4", "$granularity == 'full'"]
    with pytest.raises(InputError, match="x: line 2 column 6"):
        rules_from_text("$a > 1\n$b > $c", COLUMNS, where="x")


numbers = st.sampled_from(["$a", "$b", "1", "2", "3.5"])
sums = st.recursive(
    numbers,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(" ".join)
        | inner.map(lambda e: f"({e})")
        | inner.map(lambda e: f"-{e}")
    ),
    max_leaves=5,
)
comparisons = st.tuples(sums, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), sums).map(
    " ".join
)
conditions = st.recursive(
    comparisons,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["&&", "||"]), inner).map(" ".join)
        | inner.map(lambda e: f"({e})")
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(conditions)
def test_agrees_with_python_precedence(text: str) -> None:
    python = text.replace("&&", " and ").replace("||", " or ").replace("$", "")
    # Python's own reading is the oracle, on generated text only
    code = compile(python, "rule", "eval")
    expected = [
        i
        for i in range(ROWS)
        if eval(code, {"a": float(TABLE["a"].data[i]), "b": float(TABLE["b"].data[i])})  # noqa: S307
    ]
    assert met(text) == expected


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="$ab=!<>&|()+-*/% 'None01fla\"é", max_size=30))
def test_any_text_is_a_rule_or_a_placed_error(text: str) -> None:
    rule, complaint = None, "column"
    try:
        rule = compile_rule(Source(text), COLUMNS)
    except InputError as error:
        complaint = str(error)
    assert "column" in complaint and "\n" not in complaint
    assert rule is None or rule.met(TABLE, ROWS).shape == (ROWS,)
