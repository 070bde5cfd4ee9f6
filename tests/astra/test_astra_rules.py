"""The rule language: precedence, None, types, positions of errors; evaluation against a plain
Python reading."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetplan.errors import InputError
from hetplan.formulations.astra.search.parameters import MEANINGS as PARAMETERS
from hetplan.formulations.astra.search.rule_names import MEANINGS
from hetplan.formulations.astra.search.rules import (
    Column,
    Source,
    compile_rule,
    rules_from_text,
)
from hetplan.formulations.astra.search.space import Space, rule_columns

NONE = np.nan
WORDS = ("selective", "full", "hybrid")
COLUMNS = {
    "a": Column("number"),
    "b": Column("number"),
    "layers": Column("number"),
    "granularity": Column("string", WORDS),
    "method": Column("string", ("block", "uniform")),
    "flag": Column("bool"),
}
ROWS = 5
TABLE = {
    "a": np.array([1.0, 2.0, 3.0, 4.0, 5.0]),
    "b": np.array([0.0, 2.0, 2.0, 8.0, 5.0]),
    "layers": np.array([NONE, 1.0, 2.0, 3.0, NONE]),
    "granularity": np.array([0.0, 1.0, 2.0, 0.0, NONE]),
    "flag": np.array([1.0, 0.0, 1.0, 0.0, 1.0]),
}


def met(text: str) -> list[int]:
    mask = compile_rule(Source(text), COLUMNS).met(TABLE, ROWS)
    assert mask.shape == (ROWS,)
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
        ("$a + 1", 1, "got 'a number', expected a comparison"),
        ("$a > 'x'", 6, "a number and a string"),
        ("$a == 'x'", 7, "a number and a string"),
        ("$granularity == 'selectve'", 17, "selective, full, hybrid"),
        ("$granularity == selec tive", 17, "cannot be read"),
        ("$granularity == $method", 17, "never has this value"),
        ("'full' == full", 11, "never has this value"),
        ("$granularity == full && $a", 25, "got 'a number'"),
        ("$flag + 1 == 2", 1, "got 'a bool', expected a number"),
        ("$a + None == 2", 6, "got 'a none', expected a number"),
        ("granularity == full", 1, "expected $granularity"),
        ("($a > 1", 1, "cannot be read"),
        ("$a > 1)", 7, "cannot be read"),
        ("$granularity == 'full", 17, "another ' on the same line"),
        ("$a >", 5, "the end of the rule"),
        ("&& $a > 1", 1, "cannot be read"),
        ("$a & $b", 4, "expected &&"),
        ("1 < $a < 3", 10, "do not chain"),
        ("$a > 1 $b", 8, "cannot be read"),
        ("$a ** 2 > 1", 5, "cannot be read"),
        ("$ > 1", 1, "$ and the name"),
        ("$a > 1; $b", 7, "unexpected character"),
        ("$a > 1e300", 6, "too large"),
        ("()", 1, "cannot be read"),
        ("__import__('os').system('true')", 17, "unexpected character"),
        ("__import__('os') == 1", 1, "cannot be read"),
        ("$a(1) == 1", 1, "cannot be read"),
        ("1 > 2" + " || true" * 150, 1194, "too long"),
    ],
)
def test_faults_name_their_place(text: str, column: int, part: str) -> None:
    with pytest.raises(InputError) as error:
        compile_rule(Source(text, "my.rules", 3), COLUMNS)
    assert f"my.rules: line 3 column {column}:" in str(error.value)
    assert part in str(error.value)


@pytest.mark.parametrize(
    "text", ["(" * 140 + "$a" + ")" * 140, "-" * 290 + "$a", "+".join(["0"] * 140) + "+$a"]
)
def test_deep_rules_are_read(text: str) -> None:
    assert met(f"{text} > 3") == [3, 4]


def test_files_have_comments_and_lines() -> None:
    text = "# nothing\n\n$a > 4   # five\n$granularity == 'full' # '#' in a string is kept\n"
    rules = rules_from_text(text, COLUMNS, where="x")
    assert [np.flatnonzero(rule.met(TABLE, ROWS)).tolist() for rule in rules] == [[4], [1]]
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


@settings(max_examples=100)
@given(conditions)
def test_agrees_with_python_precedence(text: str) -> None:
    python = text.replace("&&", " and ").replace("||", " or ").replace("$", "")
    # Python's own reading is the oracle, on generated text only
    code = compile(python, "rule", "eval")
    expected = [
        i
        for i in range(ROWS)
        if eval(code, {"a": float(TABLE["a"][i]), "b": float(TABLE["b"][i])})  # noqa: S307
    ]
    assert met(text) == expected


@settings(max_examples=100)
@given(st.text(alphabet="$ab=!<>&|()+-*/% 'None01fla\"é", max_size=30))
def test_any_text_is_a_rule_or_a_placed_error(text: str) -> None:
    rule, complaint = None, "column"
    try:
        rule = compile_rule(Source(text), COLUMNS)
    except InputError as error:
        complaint = str(error)
    assert "column" in complaint and "\n" not in complaint
    assert rule is None or rule.met(TABLE, ROWS).shape == (ROWS,)


def test_every_name_has_a_meaning() -> None:
    assert set(MEANINGS) == set(rule_columns(("A100",)))


def test_every_parameter_has_a_meaning() -> None:
    assert set(PARAMETERS) == {field.name for field in fields(Space)}
