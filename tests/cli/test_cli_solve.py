"""`hetplan solve` and `hetplan check`: the contract of their documents and exit codes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fakes.cli import Call, Ran, Write
from hetplan.errors import InputError
from hetplan.formulations import FAMILIES, family
from hetplan.formulations.joint.certificate.document import Certificate
from hetplan.formulations.joint.certificate.write import certify
from hetplan.instances.library import find, library, load_from_library
from hetplan.solvers.registry import solve
from hetplan.solvers.run import RESERVED, Options, Run
from present import present

KEYS = ("method", "status", "objective", "bound", "gap", "seconds", "decision")


def test_document(hetplan: Call, numbers: Write) -> None:
    ran = hetplan("solve", numbers(3, 1, 2), "--method", "auto,first", "--json", "--seed", 7)
    assert (ran.code, ran.err) == (0, "")
    assert (ran.json["instance"], ran.json["problem"]) == ("numbers", "fake")
    exact, first = ran.json["results"]
    assert tuple(exact)[: len(KEYS)] == KEYS
    assert {k: exact[k] for k in KEYS if k != "seconds"} == {
        "method": "auto",
        "status": "optimal",
        "objective": 1.0,
        "bound": 1.0,
        "gap": 0.0,
        "decision": {"index": 1},
    }
    assert exact["seconds"] >= 0
    assert (first["status"], first["objective"], first["bound"], first["gap"]) == (
        "feasible",
        3.0,
        None,
        None,
    )
    assert ran.json["options"]["seed"] == 7


@pytest.mark.parametrize(
    ("values", "method", "status", "code"),
    [
        ((3, 1), "auto", "optimal", 0),
        ((3, 1), "first", "feasible", 0),
        ((), "auto", "infeasible", 1),
        ((3, 1), "clueless", "unknown", 1),
        ((3, 1), "auto,clueless", "optimal", 1),
        ((0, 1), "auto", "optimal", 0),
    ],
)
def test_exit_code_follows_status(
    hetplan: Call, numbers: Write, values: tuple[float, ...], method: str, status: str, code: int
) -> None:
    ran = hetplan("solve", numbers(*values), "-m", method, "--json")
    assert ran.code == code
    assert ran.json["results"][0]["status"] == status


def test_what_is_known_without_a_decision_is_told(hetplan: Call, numbers: Write) -> None:
    assert "there are no numbers" in hetplan("solve", numbers()).out
    (result,) = hetplan("solve", numbers(3), "-m", "clueless", "--json").json["results"]
    found = [result[key] for key in ("objective", "bound", "gap", "decision")]
    assert found == [None, 0.25, None, None]


def test_methods_given_twice_run_once(hetplan: Call, numbers: Write) -> None:
    ran = hetplan("solve", numbers(3), "-m", "first,auto", "-m", "first", "--json")
    assert [r["method"] for r in ran.json["results"]] == ["first", "auto"]


def test_all_methods_of_amp(hetplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    ran = hetplan("solve", "tiny-mixed", "-m", "all", "--json", "--threads", 1, "-o", path)
    results = {result["method"]: result for result in ran.json["results"]}
    assert ran.code == 0, ran.err
    assert list(results) == [method.name for method in family("amp").methods]
    best = results["auto"]["objective"]
    assert all(result["objective"] >= best * (1 - 1e-6) for result in results.values())
    assert json.loads(path.read_text()) == ran.json
    checked = hetplan("check", "tiny-mixed", path, "--json")
    assert checked.code == 0
    assert [d["source"] for d in checked.json["decisions"]] == list(results)


def test_table_for_people(hetplan: Call) -> None:
    ran = hetplan("solve", "amp/tiny-mixed", "--method", "exact,paper")
    assert ran.code == 0
    for expected in (
        "exact",
        "optimal",
        "0.40216",
        "node 0: 2 V100 (0-1)",
        "embedding .. block3",
        "0 %",
    ):
        assert expected in ran.out


def test_equation_4_stands_beside_the_time(hetplan: Call) -> None:
    """Poplar's tie-break: in the table of every method, in the document, under the decision."""
    ran = hetplan("solve", "poplar/tiles-5-zero0", "--method", "exact,deepspeed", "-q")
    assert ran.code == 0 and "under-utilisation" in ran.out.splitlines()[1]
    assert (
        "under-utilisation (Poplar, eq. 4): " in ran.out and "decision of exact: ZeRO 0" in ran.out
    )
    document = hetplan(
        "solve", "poplar/tiles-5-zero0", "--method", "exact,deepspeed", "-q", "--json"
    ).json
    exact, equal = (result["details"]["under_utilisation"] for result in document["results"])
    assert 0 <= exact < equal


def test_control_characters_do_not_reach_the_terminal(hetplan: Call, numbers: Write) -> None:
    path = numbers(1)
    path.write_text(path.read_text().replace('"name": "numbers"', '"name": "a\\u001b[31m\\u0007b"'))
    ran = hetplan("solve", path)
    assert ran.code == 2 and "control characters" in ran.error
    assert not {"\x1b", "\x07"} & {*ran.out, *ran.err}


def test_native_values_keep_their_types(hetplan: Call, numbers: Write) -> None:
    given = [
        "cp-sat.a=true",
        "cp-sat.b=3",
        "highs.c=0.5",
        "highs.d=text",
        "pyomo.e=nan",
        "highs.f.g=1=2",
        f"pyomo.h={'1' * 310}",
    ]
    flags = [part for text in given for part in ("--native", text)]
    native = hetplan("solve", numbers(1), *flags, "--json").json["options"]["native"]
    assert native == {
        "cp-sat": {"a": True, "b": 3},
        "highs": {"c": 0.5, "d": "text", "f.g": "1=2"},
        "pyomo": {"e": "nan", "h": "1" * 310},
    }


@pytest.mark.parametrize(
    ("method", "message", "code"),
    [
        ("picky", "picky takes no numbers (expected method auto)", 1),
        ("broken", "bug in hetplan: ZeroDivisionError: division\nby zero", 3),
    ],
)
def test_a_method_that_fails_leaves_the_others_results(
    hetplan: Call, numbers: Write, method: str, message: str, code: int
) -> None:
    ran = hetplan("solve", numbers(3), "-m", f"{method},auto", "--json")
    assert ran.code == code
    failed, exact = ran.json["results"]
    assert (failed["status"], failed["message"]) == ("unknown", message)
    assert exact["status"] == "optimal"


def test_a_lie_is_an_error_of_ours(hetplan: Call, numbers: Write) -> None:
    ran = hetplan("solve", numbers(3), "-m", "liar", "--json")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err == "hetplan: error: fake/liar: bound 4.0 exceeds objective 3.0\n"


def test_a_bug_is_one_line_and_a_traceback_on_request(
    hetplan: Call, numbers: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.json"
    target.write_text("old")
    ran = hetplan("solve", numbers(3), "-m", "broken", "-o", target)
    assert ran.code == 3
    assert ran.err == (
        "hetplan: error: ZeroDivisionError: division by zero (this is a bug; HETPLAN_DEBUG=1 "
        "shows where)\n"
    )
    assert target.read_text() == "old"
    monkeypatch.setenv("HETPLAN_DEBUG", "1")
    assert "Traceback" in hetplan("solve", numbers(3), "-m", "broken").err


def test_a_file_that_ends_too_early_is_a_bug_and_no_wish_to_abort(
    hetplan: Call, numbers: Write
) -> None:
    """typer takes every EOFError for the user's wish to leave a prompt."""
    ran = hetplan("solve", numbers(3), "-m", "cut-short")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err == (
        "hetplan: error: EOFError: Ran out of input (this is a bug; HETPLAN_DEBUG=1 shows where)\n"
    )


@pytest.mark.parametrize(
    ("values", "methods", "said"),
    [
        (
            (3, 1),
            "auto,proud",
            ["bound 3 of proud, which calls its 3 optimal, is above objective 1 of auto"],
        ),
        (
            (3, 1),
            "auto,denier,first",
            [
                "denier calls the instance infeasible, objective 1 of auto has a decision",
                "denier calls the instance infeasible, objective 3 of first has a decision",
            ],
        ),
        ((3, 1), "auto,first,clueless", []),
        ((3, 3), "auto,proud", []),
        ((), "auto,denier", []),
    ],
)
def test_methods_that_contradict_each_other_are_told(
    hetplan: Call, numbers: Write, values: tuple[float, ...], methods: str, said: list[str]
) -> None:
    path, lines = numbers(*values), [f"{line}: one of the two methods is wrong" for line in said]
    ran = hetplan("solve", path, "-m", methods, "--json", "-q")
    assert ran.json["contradictions"] == lines
    assert ran.err == "".join(f"hetplan: error: numbers: {line}\n" for line in lines)
    assert (ran.code == 3) == bool(lines)
    assert [result["method"] for result in ran.json["results"]] == methods.split(",")
    shown = hetplan("solve", path, "-m", methods, "-q")
    assert shown.code == ran.code and shown.err == ran.err
    assert all(method in shown.out for method in methods.split(","))


def test_contradictions_on_one_of_several_instances(hetplan: Call, numbers: Write) -> None:
    paths = numbers(2, 2, name="equal"), numbers(3, 1, name="unequal")
    ran = hetplan("solve", *paths, "-m", "auto,proud", "--json", "-q")
    assert ran.code == 3 and ran.err.startswith("hetplan: error: unequal: bound 3 of proud")
    found = [len(answer["contradictions"]) for answer in ran.json["answers"]]
    assert found == [0, 1]


def test_native_options_of_highs_reach_the_default_of_hap(hetplan: Call) -> None:
    words = ["solve", "hap-chain-2x2", "--native", "highs.presolve=off", "--json", "-q"]
    ran = hetplan(*words)
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["results"][0]["status"] == "optimal"
    refused = hetplan("solve", "hap-chain-2x2", "--native", "highs.presolve=sideways")
    assert refused.error.startswith("native option highs.presolve: value not usable")


def test_native_options_of_highs_and_another_solver_behind_pyomo(hetplan: Call) -> None:
    words = ["solve", "tiny-mixed", "-m", "pyomo", "--native", "highs.presolve=off"]
    assert hetplan(*words).code == 0
    refused = hetplan(*words, "--pyomo-solver", "glpk")
    assert "no method chosen runs highs" in refused.error


def test_instance_from_standard_input(
    hetplan: Call, numbers: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    with numbers(5, 4).open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert hetplan("solve", "-", "--json").json["results"][0]["objective"] == 4.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "tiny-mixd",
            "neither a file nor an instance of the library: 'tiny-mixd'; did you mean tiny-mixed?",
        ),
        (
            "qqqq",
            "an instance of the library: 'qqqq' (expected a name from `hetplan instances list`)",
        ),
        ("qqqq.json", "qqqq.json: no such file"),
        ("\x1b[31m", "neither a file nor"),
        ("a\x00b", "neither a file nor"),
    ],
)
def test_missing_instances(hetplan: Call, name: str, message: str) -> None:
    assert message in hetplan("solve", name).error
    assert message in hetplan("check", name, name).error


def test_folders_hold_instances_for_solve_alone(hetplan: Call, tmp_path: Path) -> None:
    assert "holds no instance files" in hetplan("solve", tmp_path).error
    assert "is a folder, expected a file" in hetplan("check", tmp_path, "-").error


PLUGIN = """
from hetplan.solvers.registry import Method
METHODS = {"fake": [Method("mine", "fakes.family:first", False, "mine")], **MORE}
"""


def plugin(folder: Path, name: str, more: str = "{}") -> Path:
    """A module with the method `mine`, and more."""
    path = folder / f"{name}.py"
    path.write_text(PLUGIN.replace("MORE", more))
    return path


def test_a_method_of_the_users_own(
    hetplan: Call, numbers: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an option or by an entry point; two of a name are refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hetplan.formulations.JOINED", [])
    path = numbers(3, 1)
    for name, more in (
        ("own_one", "{}"),
        ("own_two", "{}"),
        ("own_lost", '{"nothing": []}'),
    ):
        plugin(tmp_path, name, more)
    assert "unknown method 'mine'" in hetplan("solve", path, "-m", "mine").error
    assert (
        "own_lost: METHODS: unknown problem" in hetplan("solve", path, "--plugin", "own_lost").error
    )
    assert "no plugin" in hetplan("solve", path, "--plugin", "numbers").error
    ran = hetplan("solve", path, "-m", "mine,auto", "--plugin", "own_one", "--json", "-q")
    assert [result["objective"] for result in ran.json["results"]] == [3.0, 1.0]
    twice = hetplan("solve", path, "-m", "mine", "--plugin", "own_two").error
    assert twice == "own_two: there is a method of this name (got 'mine')"
    monkeypatch.setattr("hetplan.formulations.JOINED", [])
    monkeypatch.setattr("hetplan.formulations.installed_plugins", lambda: ["own_two"])
    assert hetplan("solve", path, "-m", "mine", "-q").code == 0


def test_several_instances_of_several_problems(
    hetplan: Call, numbers: Write, tmp_path: Path
) -> None:
    """A name, a pattern, a set, a folder and the same again: one answer each, with the methods that
    its problem has."""
    folder = tmp_path / "mine"
    folder.mkdir()
    numbers(3, 1, 2).rename(folder / "numbers.json")
    given = ["astra/tiny-*", folder, "amp/tiny-mixed", "tiny-mixed"]
    ran = hetplan("solve", *given, "-m", "first,paper", "--json", "-q")
    assert ran.code == 0, ran.err
    answers = {answer["problem"]: answer["results"] for answer in ran.json["answers"]}
    names = [answer["instance"] for answer in ran.json["answers"]]
    assert sorted(names) == ["numbers", "tiny-mixed", "tiny-two-types", "tiny-two-types-equal"]
    ran_methods = {problem: [r["method"] for r in results] for problem, results in answers.items()}
    assert ran_methods == {"astra": ["paper"], "fake": ["first"], "amp": ["paper"]}
    text = hetplan("solve", *given, "-m", "first", "-q").out
    assert "tiny-mixed" in text and "decision of" not in text
    assert "unknown method 'second'" in hetplan("solve", *given, "-m", "second").error


# check


def answer(**changes: Any) -> dict[str, Any]:
    """A truthful answer to the numbers 3, 1, but for the changes."""
    result = {"method": "mine", "objective": 1.0, "bound": 1.0, "decision": {"index": 1}} | changes
    return {"instance": "numbers", "problem": "fake", "results": [result]}


@pytest.mark.parametrize(
    ("document", "code", "complaint"),
    [
        ({"index": 1}, 0, None),
        ({"index": 0}, 0, None),
        ({"index": 2}, 1, "index is 2, expected one of 0..1"),
        (answer(), 0, None),
        (answer(objective=None, bound=None), 0, None),
        (answer(objective=1.0 + 1e-9), 0, None),
        (answer(objective=0.9, bound=None), 1, "stated objective 0.9 is not the decision's (1.0)"),
        (answer(bound=1.1), 1, "stated bound 1.1 exceeds the decision's objective (1.0)"),
        (answer(decision={"index": 9}, bound=None), 1, "index is 9"),
        (answer(status="optimal", gap=0.0), 0, None),
        (answer(status="feasible", bound=None, gap=None), 0, None),
        (answer(status="optimal", objective=None), 0, None),
        (answer(bound=-0.5, gap=1.5), 0, None),
        (answer(bound=0.5, gap=0.5 + 1e-9), 0, None),
        (answer(bound=0.5, gap=0.0), 1, "stated gap 0.0 is not that of objective and bound (0.5)"),
        (answer(bound=None, gap=0.0), 1, "stated gap 0.0 without an objective and a bound"),
        (
            answer(status="optimal", bound=0.5),
            1,
            "stated optimal with a gap of 0.5, expected at most 1e-06",
        ),
        (answer(status="optimal", bound=None), 1, "stated optimal without a bound that proves it"),
        (
            answer(status="optimal", objective=None, bound=0.5),
            1,
            "stated optimal with a gap of 0.5",
        ),
        (answer(status="infeasible"), 1, "stated infeasible with a decision"),
        (answer(status="unknown", bound=None), 1, "stated unknown with a decision"),
        (answer(status="optimal", decision=None), 1, "stated optimal without a decision"),
        (
            answer(status="feasible", decision=None, objective=None),
            1,
            "stated feasible without a decision",
        ),
        (answer(status="unknown", decision=None), 1, "stated objective 1.0 without a decision"),
    ],
)
def test_check(
    hetplan: Call, numbers: Write, tmp_path: Path, document: Any, code: int, complaint: str | None
) -> None:
    path = tmp_path / "decision.json"
    path.write_text(json.dumps(document))
    ran = hetplan("check", numbers(3, 1), path, "--json")
    assert (ran.code, ran.err) == (code, "")
    (verdict,) = ran.json["decisions"]
    assert verdict["valid"] == (code == 0)
    if complaint is None:
        assert verdict["complaints"] == []
    else:
        assert verdict["complaints"][0].startswith(complaint)
        assert complaint in hetplan("check", numbers(3, 1), path).out


def judged(hetplan: Call, tmp_path: Path, instance: Path, *results: dict[str, Any]) -> Ran:
    """`hetplan check` of an answer with these results."""
    path = tmp_path / "several.json"
    path.write_text(json.dumps({"instance": "numbers", "problem": "fake", "results": results}))
    return hetplan("check", instance, path, "--json")


@pytest.mark.parametrize(
    ("values", "methods"),
    [
        ((), "auto"),
        ((3, 1), "clueless"),
        ((3, 1), "auto,clueless"),
        ((), "auto,clueless"),
        ((3, 1), "auto,first"),
    ],
)
def test_a_true_answer_has_the_exit_code_of_its_solve(
    hetplan: Call, numbers: Write, tmp_path: Path, values: tuple[float, ...], methods: str
) -> None:
    """0 for what is optimal or feasible, 1 where something is infeasible or unknown: there is
    nothing to verify."""
    path, target = numbers(*values), tmp_path / "answer.json"
    solved = hetplan("solve", path, "-m", methods, "-o", target)
    ran = hetplan("check", path, target, "--json")
    assert ran.code == solved.code
    results = json.loads(target.read_text())["results"]
    for result, verdict in zip(results, ran.json["decisions"], strict=True):
        assert verdict["complaints"] == []
        assert verdict["valid"] is (None if result["decision"] is None else True)
        assert (verdict["objective"], verdict["stated_bound"]) == (
            result["objective"],
            result["bound"],
        )
    text = hetplan("check", path, target).out
    for result in results:
        if result["decision"] is None:
            assert f"numbers: {result['method']}: nothing to price" in text
            assert f"no decision (stated {result['status']}" in text


def test_results_are_held_against_each_other(hetplan: Call, numbers: Write, tmp_path: Path) -> None:
    path = numbers(3, 1)
    worse = {"method": "worse", "decision": {"index": 0}, "objective": 3.0, "bound": 2.0}
    best = {"method": "best", "decision": {"index": 1}, "objective": 1.0, "bound": 1.0}
    none = {"method": "none", "status": "infeasible", "decision": None}
    high = {"method": "high", "status": "unknown", "decision": None, "bound": 1.5}
    wrong = {"method": "wrong", "decision": {"index": 9}, "bound": 9.0}
    assert judged(hetplan, tmp_path, path, worse).code == 0
    ran = judged(hetplan, tmp_path, path, worse, best, none, high)
    assert ran.code == 1
    assert [v["complaints"] for v in ran.json["decisions"]] == [
        ["stated bound 2.0 exceeds the objective of best's decision (1.0)"],
        [],
        ["stated infeasible, but best's decision holds"],
        ["stated bound 1.5 exceeds the objective of best's decision (1.0)"],
    ]
    # a decision that does not hold refutes nothing
    ran = judged(hetplan, tmp_path, path, wrong, none)
    assert [len(v["complaints"]) for v in ran.json["decisions"]] == [1, 0]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "decision.json: index: required key is missing"),
        ([], "decision.json: not usable"),
        ({"index": 1, "also": 2}, "decision.json: also: unknown key"),
        ({"index": -1}, "decision.json: index: not usable (got -1"),
        (
            answer() | {"results": []},
            "decision.json: results: is empty (expected one result at least)",
        ),
        (
            answer(status="solved"),
            "decision.json: results[0].status: not usable (got 'solved', expected 'opt",
        ),
        (answer(gap="none"), "decision.json: results[0].gap: not usable (got 'none'"),
        (
            answer(decision={"index": "x"}),
            "decision.json: results[0].decision.index: not usable (got 'x'",
        ),
        (
            answer() | {"problem": "amp"},
            "decision.json: problem: answers another problem (got 'amp'",
        ),
        (answer() | {"results": 3}, "decision.json: results: not usable (got 3"),
    ],
)
def test_check_of_what_is_no_decision(
    hetplan: Call, numbers: Write, tmp_path: Path, document: Any, message: str
) -> None:
    path = tmp_path / "decision.json"
    path.write_text(json.dumps(document))
    assert message in hetplan("check", numbers(3, 1), path).error


def test_check_of_an_answer_to_an_instance_of_another_name(
    hetplan: Call, numbers: Write, tmp_path: Path
) -> None:
    path = tmp_path / "decision.json"
    path.write_text(json.dumps(answer() | {"instance": "others"}))
    ran = hetplan("check", numbers(3, 1), path, "--json")
    assert ran.code == 0
    assert "answers instance 'others', checked against 'numbers'" in ran.err


def test_check_of_a_best_known_record(hetplan: Call, tmp_path: Path) -> None:
    best_file, path = present(find("tiny-mixed")).best_file, tmp_path / "worse.json"
    ran = hetplan("check", "tiny-mixed", best_file)
    assert ran.code == 0 and "tiny-mixed: enumeration: holds" in ran.out
    record = json.loads(best_file.read_text())
    record["decision"]["stages"] = [[0, 4], [4, 6]]
    path.write_text(json.dumps(record))
    ran = hetplan("check", "tiny-mixed", path)
    assert ran.code == 1 and "stated objective" in ran.out


def test_two_arguments_from_one_pipe(hetplan: Call) -> None:
    assert "can come from standard input" in hetplan("check", "-", "-").error
    assert "can come from standard input" in hetplan("check", "-", "--certificate", "-").error


TINY = "tiny-joint-gpt2-0"


@cache
def proof() -> str:
    """A certificate of a packaged instance."""
    data = load_from_library(TINY).data
    document: Certificate = certify(data, TINY, None, Run(Options(threads=1)))
    return document.model_dump_json()


@pytest.fixture(name="certificate")
def certificate_file(tmp_path: Path) -> Path:
    """The same as a file."""
    path = tmp_path / "proof.json"
    path.write_text(proof(), encoding="utf-8")
    return path


def test_solve_writes_a_certificate(hetplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    ran = hetplan("solve", TINY, "-m", "milp", "--certificate", path, "--json")
    assert ran.code == 0
    assert f"{path}: proves that nothing is below" in ran.err
    [result] = ran.json["results"]
    verdict = hetplan("check", TINY, "--certificate", path, "--json").json["certificate"]
    assert verdict["claimed_bound"] == result["bound"]
    assert 0 < verdict["stated_bound"] <= verdict["proven_bound"] <= result["bound"]


def test_a_certificate_is_checked(hetplan: Call, certificate: Path) -> None:
    ran = hetplan("check", TINY, "--certificate", certificate, "--json")
    assert (ran.code, ran.err) == (0, "")
    verdict = ran.json["certificate"]
    assert ran.json["decisions"] == [] and verdict["holds"]
    assert 0 < verdict["stated_bound"] <= verdict["proven_bound"]
    assert f"{certificate}: holds" in hetplan("check", TINY, "--certificate", certificate).out
    best_file = present(find(TINY)).best_file
    assert hetplan("check", TINY, best_file, "--certificate", certificate).code == 0
    document = json.loads(certificate.read_text())
    certificate.write_text(json.dumps(document | {"bound": 1.001 * document["bound"]}))
    ran = hetplan("check", TINY, "--certificate", certificate)
    assert ran.code == 1 and f"{certificate}: does not hold" in ran.out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bound": "high"}, "proof.json: bound: not usable"),
        ({"alone": []}, "proof.json: alone: not one price for each type of devices"),
        ({"alone": [-1.0]}, "proof.json: alone[0]: not usable"),
        ({"format": "hetplan-instance"}, "proof.json: format: not a hetplan-certificate file"),
        ({"parts": [{"several": False, "chunks": False, "homes": [7, 7, 7]}]}, "parts[0].homes"),
        ({"more": 1}, "proof.json: more: unknown key"),
    ],
)
def test_a_damaged_certificate_is_one_line(
    hetplan: Call, certificate: Path, change: dict[str, Any], message: str
) -> None:
    certificate.write_text(json.dumps(json.loads(certificate.read_text()) | change))
    assert message in hetplan("check", TINY, "--certificate", certificate).error


def test_certificates_are_of_one_instance_of_joint(hetplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    refused = "--certificate: bounds of problem ditto have no certificates"
    for command in ("solve", "check"):
        assert refused in hetplan(command, "ditto-ex1-nb32-head", "--certificate", path).error
    both = hetplan("solve", TINY, "tiny-joint-llama-0", "--certificate", path)
    assert "--certificate: one instance" in both.error
    assert not path.exists()
    assert "nothing to check" in hetplan("check", TINY).error


def test_a_certificate_of_another_instance_is_told(hetplan: Call, certificate: Path) -> None:
    document = json.loads(certificate.read_text())
    certificate.write_text(json.dumps(document | {"instance": "another"}))
    ran = hetplan("check", TINY, "--certificate", certificate, "--json")
    assert ran.code == 0
    assert f"is of instance 'another', checked against '{TINY}'" in ran.err


def test_one_method_that_takes_them_is_enough(hetplan: Call, numbers: Write) -> None:
    assert hetplan("solve", numbers(1), "-m", "first,auto", "--native", "highs.x=1").code == 0
    assert (
        "no method chosen"
        in hetplan("solve", numbers(1), "-m", "first", "--native", "highs.x=1").error
    )
    ran = hetplan(
        "solve",
        "tiny-mixed",
        "-m",
        "milp,cp-sat",
        "--native",
        "cp-sat.linearization_level=2",
        "--json",
    )
    assert [result["status"] for result in ran.json["results"]] == ["optimal", "optimal"]


METHODS = [(name, method.name) for name in FAMILIES for method in family(name).methods]


@pytest.mark.parametrize(("problem", "name"), METHODS)
def test_a_method_takes_the_options_that_it_says(problem: str, name: str) -> None:
    """An option that no back end has is refused by exactly those methods that say they pass it
    on."""
    entries = [
        entry
        for entry in library(problem)
        if entry.name.startswith(("tiny", "tiles", "hap-chain-2x2"))
    ]
    data = load_from_library(entries[0].name).data
    method = family(problem).method(name)
    for backend in method.backends:
        run = Run(Options(threads=1, time_limit=30, native={backend: {"no_such_option": 1}}))
        with pytest.raises(InputError, match=f"native option {backend}.no_such_option"):
            solve(family(problem), data, name, run)
    others = {
        backend: {"no_such_option": 1} for backend in RESERVED if backend not in method.backends
    }
    result = solve(
        family(problem), data, name, Run(Options(threads=1, time_limit=1, native=others))
    )
    assert str(result.stop) in ("optimal", "done", "infeasible", "limit"), result.message


SOLVER = """
from hetplan.solvers.registry import Method
def solve(data, run):
    {body}
METHODS = {{"ditto": [Method("theirs", "{name}:solve", False, "x")]}}
"""


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("p_raises", "x = 1\n1 / 0\n", "p_raises.py, line 2: plugin raises ZeroDivisionError"),
        ("p_syntax", "def f(:\n", "p_syntax.py, line 1: plugin raises SyntaxError"),
        ("p_leaves", "import sys\nsys.exit(0)\n", "p_leaves.py, line 2: plugin raises SystemExit"),
        ("p_table", "METHODS = 3\n", "p_table: METHODS is no table"),
        ("p_lists", "METHODS = {'ditto': [3]}\n", "METHODS['ditto']: is no list of methods"),
        (
            "p_solve",
            SOLVER.format(body="return data.nothing", name="p_solve"),
            "p_solve.py, line 4: method raises AttributeError",
        ),
        (
            "p_none",
            SOLVER.format(body="return None", name="p_none"),
            "p_none: method returns something else (got 'NoneType'",
        ),
    ],
)
def test_an_exception_of_a_plugin_is_the_plugin_s(
    name: str,
    source: str,
    message: str,
    hetplan: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hetplan.formulations.JOINED", [])
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    ran = hetplan("solve", "tiny-fast-slow", "-m", "theirs", "-q", "--plugin", name)
    assert ran.code == 2 and message in ran.error


def test_a_file_beside_a_packaged_instance_has_no_record(
    hetplan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is shown, and nothing of the packaged instance of its name."""
    monkeypatch.chdir(tmp_path)
    name = "tiny-fast-slow"
    document = hetplan("instances", "show", name, "--json").json
    assert "best known" in hetplan("instances", "show", name).out
    Path(name).write_text(json.dumps({**document, "name": "mine"}))
    ran = hetplan("instances", "show", name)
    assert ran.code == 0 and "mine" in ran.out and "best known" not in ran.out
    assert "no best-known record" in hetplan("instances", "show", name, "--best").error
