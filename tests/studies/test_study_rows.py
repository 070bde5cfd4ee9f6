"""Rows: whole or absent, readable as one table, and what is no row is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetplan.errors import InputError
from hetplan.instances.library import find
from hetplan.solvers.run import Options
from hetplan.studies.findings import repriced
from hetplan.studies.rows import (
    COLUMNS,
    FOLDER,
    PACKED,
    Task,
    carry_out,
    kept_rows,
    keys,
    read_rows,
    subjects,
    task_key,
    tasks,
    write_row,
    write_rows,
)
from hetplan.studies.workers import failed, perform
from present import present

pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra `study`)")


def one(method: str = "exact", **options: object) -> Task:
    """A task on the tiny ditto instance."""
    given = Options(threads=1, **options)  # type: ignore[arg-type]
    return next(iter(tasks(["tiny-fast-slow"], [method], [0], given)))


def test_a_row_is_written_and_read_back(tmp_path: Path) -> None:
    row = perform(one())
    write_row(tmp_path, row)
    [found] = read_rows(tmp_path)
    assert set(found) == set(COLUMNS)
    assert found["status"] == "optimal" and found["objective"] == row["objective"] == pytest.approx(
        found["bound"]
    )
    assert found["best_known"] == pytest.approx(found["objective"])
    assert found["peak_bytes"] > 10 * 2**20
    assert keys(tmp_path) == {found["key"]}
    write_row(tmp_path, row)
    assert len(read_rows(tmp_path)) == 1


def test_many_rows_in_one_file_are_a_study_again(tmp_path: Path) -> None:
    made = [perform(one()), perform(one("greedy-joined"))]
    write_rows(tmp_path / FOLDER / PACKED, made)
    assert keys(tmp_path) == {row["key"] for row in made}
    assert [row["method"] for row in read_rows(tmp_path)] == ["exact", "greedy-joined"]
    write_row(tmp_path, made[0])
    write_row(tmp_path, perform(one("paper")))
    assert len(keys(tmp_path)) == len(read_rows(tmp_path)) == 3


def test_a_heuristic_has_no_bound() -> None:
    row = perform(one("greedy-joined"))
    assert (row["status"], row["bound"], row["exact"]) == ("feasible", None, False)


def test_a_refusal_is_a_row(tmp_path: Path) -> None:
    task = one("pyomo", pyomo_solver="gurobi")
    row = perform(task)
    assert (row["status"], row["stop"], row["objective"]) == ("unknown", "error", None)
    assert "gurobi" in row["message"]
    write_row(tmp_path, row)
    assert read_rows(tmp_path)[0]["message"] == row["message"]


def test_what_is_no_study_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no study"):
        read_rows(tmp_path)
    write_row(tmp_path, failed(one(), "why"))
    bad = tmp_path / "rows" / "x.parquet"
    bad.write_bytes(b"PAR1 nonsense")
    with pytest.raises(InputError, match=r"x\.parquet: cannot be read"):
        read_rows(tmp_path)
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), bad)
    with pytest.raises(InputError, match="other columns"):
        read_rows(tmp_path)


def test_a_damaged_row_is_refused_or_harmless(tmp_path: Path) -> None:
    """Pages have checksums: no flipped bit changes a figure in silence."""
    row = perform(one())
    write_row(tmp_path, row)
    [path] = (tmp_path / FOLDER).glob("*.parquet")
    whole, [kept] = path.read_bytes(), read_rows(tmp_path)
    refused = 0
    for at in range(0, len(whole), len(whole) // 60):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        try:
            assert read_rows(tmp_path) == [kept]
        except InputError:
            refused += 1
    assert refused > 20


def test_rows_are_priced_again(tmp_path: Path) -> None:
    row = perform(one())
    assert repriced([row]) == []
    line, *_ = repriced([row | {"objective": 0.9 * row["objective"], "bound": None}])
    assert "tiny-fast-slow by exact" in line and "objective" in line
    assert repriced([row | {"key": "another", "objective": 0.1}]) == []  # of another instance


def test_keys_tell_tasks_apart() -> None:
    found = [task.key for task in tasks(["smoke"], ["all"], [0, 1], Options(threads=1))]
    assert len(found) == len(set(found)) > 50
    assert one().key == one().key != one(time_limit=3.0).key
    assert task_key("a", "exact", {"seed": 0}) != task_key("b", "exact", {"seed": 0})


def test_an_instance_named_twice_is_taken_once(tmp_path: Path) -> None:
    found = subjects(["tiny-*", "smoke", "ditto/tiny-fast-slow"])
    names = [instance.name for _, instance, _ in found]
    assert len(names) == len(set(names))
    entry = present(find("tiny-fast-slow"))
    path = tmp_path / "other.json"
    from hetplan.instances.library import save_instance

    save_instance(entry.load(), path)
    assert len(list(subjects(["tiny-fast-slow", str(path), str(tmp_path)]))) == 1


def test_names_that_bring_nothing() -> None:
    with pytest.raises(InputError, match="neither a file nor an instance"):
        list(subjects(["paper"]))
    with pytest.raises(InputError, match="no instance of the study has the method"):
        list(tasks(["tiny-fast-slow"], ["exact", "megatron"], [0], Options()))


def test_groups_of_methods() -> None:
    def chosen(word: str) -> set[str]:
        return {task.method for task in tasks(["tiny-fast-slow"], [word], [0], Options())}

    assert chosen("heuristics") == {
        "paper", "paper-powers", "paper-communication", "merge", "merge-cp-sat", "merge-milp",
        "greedy", "greedy-joined", "oobleck",
    }  # fmt: skip
    assert chosen("exact-methods") == {
        "auto", "exact", "cp-sat", "cp-sat-linear", "milp", "pyomo",
    }  # fmt: skip
    assert chosen("all") == chosen("heuristics") | chosen("exact-methods")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("options_json", "{"),
        ("options_json", None),
        ("versions_json", "[1]"),
        ("versions_json", '{"method": "x"}'),
        ("details_json", '{"instance_size": "large"}'),
        ("details_json", "[" * 100_000),
        ("decision_json", "3"),
        ("objective", float("nan")),
        ("bound", float("inf")),
        ("seconds", -1.0),
        ("seconds", None),
        ("status", "weird"),
        ("stop", "weird"),
        ("instance", None),
        ("method", "m" * 201),
        ("problem", "two\nlines"),
        ("seed", None),
        ("exact", None),
    ],
)
def test_a_row_with_an_unusable_cell_is_named(column: str, value: object, tmp_path: Path) -> None:
    good = perform(one())
    write_rows(tmp_path / FOLDER / PACKED, [good, {**good, "key": "bad", column: value}])
    kept = kept_rows(tmp_path)
    assert [row["key"] for row in kept.rows] == [good["key"]] and keys(tmp_path) == {good["key"]}
    [fault] = kept.faults
    assert f"{PACKED}: row 1: {column}" in fault and "\n" not in fault and len(fault) < 400


def test_damaged_rows_are_made_again_and_named(tmp_path: Path) -> None:
    """The rows of a damaged file, and a damaged row, are as if they were not there."""
    study = [one(), one("greedy-joined"), one("paper")]
    made = [perform(task) for task in study]
    packed = tmp_path / FOLDER / PACKED
    write_rows(packed, made[:1])
    packed.write_bytes(packed.read_bytes()[:-20])
    write_row(tmp_path, {**made[1], "options_json": "no json"})
    write_row(tmp_path, made[2])
    told: list[str] = []
    tally = carry_out(study, tmp_path, lambda left: map(perform, left), tell=told.extend)
    assert (tally.known, tally.done) == (1, 3)
    assert len(told) == 2 and PACKED in told[1] and "options_json" in told[0]
    assert keys(tmp_path) == {row["key"] for row in made}
