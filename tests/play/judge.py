"""What an answer document says of a tiny instance, held against enumeration and the prose.

The complaints are one line each. A remark is no complaint: an exact method that ended without a
proof, or a heuristic that says `infeasible`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from play.problem import Broken, Data, Problem

FIELDS = ("method", "status", "objective", "bound", "gap", "seconds", "decision")
STATUSES = ("optimal", "feasible", "infeasible", "unknown")
PRICE = 1e-9  # by which share an objective may differ from the decision's price
PROOF = 1e-6  # by which share optima of exact methods may differ, and what counts as no gap
SLOW = 20.0  # seconds that no method needs for a tiny instance


@dataclass
class Judgement:
    """What is wrong with an answer document, and what is worth a look."""

    complaints: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def judge(
    problem: Problem,
    data: Data,
    best: float | None,
    document: dict[str, Any],
    code: int,
    exact: Mapping[str, bool],
) -> Judgement:
    """The judgement of an answer document.

    best: the least seconds of all decisions; None where there is no decision. code: the exit code
    of the command that printed the document. exact: method -> whether it proves.
    """
    found = Judgement()
    for key in ("instance", "problem", "results"):
        if key not in document:
            found.complaints.append(f"the document lacks {key!r}")
    if document.get("problem") != problem.name:
        found.complaints.append(f"the document is of problem {document.get('problem')!r}")
    results = document.get("results", [])
    ran = [result.get("method") for result in results]
    if ran != list(exact):
        found.complaints.append(f"results of {ran}, asked for {list(exact)}")
    if document.get("contradictions"):
        found.complaints.append(f"contradictions: {document['contradictions']}")
    answered = all(result.get("status") in ("optimal", "feasible") for result in results)
    expected = 0 if answered else 1
    if code != expected:
        found.complaints.append(f"exit code {code}, the results have {expected}")
    for result in results:
        lacking = [key for key in FIELDS if key not in result]
        if lacking:
            found.complaints.append(f"{result.get('method')}: lacks {', '.join(lacking)}")
            continue
        one = Judgement()
        form(result, one)
        if not one.complaints:
            truth(problem, data, best, result, exact.get(result["method"], True), one)
        found.complaints += [f"{result['method']}: {line}" for line in one.complaints]
        found.remarks += [f"{result['method']}: {line}" for line in one.remarks]
    return found


def form(result: dict[str, Any], found: Judgement) -> None:
    """The figures of one result agree with one another."""
    status, decision = result["status"], result["decision"]
    objective, bound, gap = result["objective"], result["bound"], result["gap"]
    complain = found.complaints.append
    if status not in STATUSES:
        complain(f"status {status!r}")
    if (decision is None) != (status in ("infeasible", "unknown")):
        complain(f"status {status}, decision {decision}")
    if (decision is None) != (objective is None):
        complain(f"objective {objective}, decision {decision}")
    if (gap is None) != (objective is None or bound is None):
        complain(f"gap {gap} of objective {objective} and bound {bound}")
    if gap is not None and objective is not None:
        right = (objective - bound) / objective if objective > 0 else 0.0
        if abs(gap - right) > 1e-12:
            complain(f"gap {gap}, (objective - bound) / objective is {right}")
    if (status == "optimal") != (gap is not None and gap <= PROOF):
        complain(f"status {status} with gap {gap}")
    if status == "infeasible" and not result.get("message"):
        complain("infeasible without a reason")
    if result["seconds"] < 0:
        complain(f"{result['seconds']} seconds")
    if result["seconds"] > SLOW:
        complain(f"took {result['seconds']:.1f} s")


def truth(
    problem: Problem,
    data: Data,
    best: float | None,
    result: dict[str, Any],
    proves: bool,
    found: Judgement,
) -> None:
    """Decision, objective, bound and status are right."""
    status, objective, bound = result["status"], result["objective"], result["bound"]
    complain = found.complaints.append
    if status == "infeasible" and best is not None:
        complain(f"infeasible, a decision takes {best!r} s")
    if bound is not None and best is not None and bound > best * (1 + PROOF):
        complain(f"bound {bound!r} is above the optimum {best!r}")
    if status == "infeasible" and not proves:
        found.remarks.append(f"a heuristic says infeasible: {result.get('message')}")
    if proves and status in ("feasible", "unknown"):
        text = f"{status}, gap {result['gap']}, {result.get('message')}"
        found.remarks.append(f"no proof: {text}")
    if result["decision"] is None:
        return
    try:
        seconds = problem.price(data, result["decision"])
    except Broken as broken:
        complain(f"the decision breaks a rule: {broken}")
        return
    if abs(objective - seconds) > PRICE * seconds:
        complain(f"objective {objective!r}, the decision takes {seconds!r} s")
    if best is None:
        complain(f"a decision of {seconds!r} s, which enumeration lacks")
        return
    if seconds < best * (1 - PROOF):
        complain(f"a decision of {seconds!r} s is below the optimum {best!r}")
    if status == "optimal" and seconds > best * (1 + PROOF):
        complain(f"{seconds!r} s called optimal, the optimum is {best!r}")
    found.complaints += problem.more(data, result, best)
