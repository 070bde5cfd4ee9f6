"""`hetplan solve` runs methods on an instance; `hetplan check` prices decisions again."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hetplan.cli.help_page import described
from hetplan.cli.options import (
    GapOption,
    InstanceArgument,
    JsonOption,
    NativeOption,
    OutputOption,
    PluginOption,
    PyomoOption,
    QuietOption,
    SeedOption,
    ThreadsOption,
    TimeOption,
    make_options,
    offer,
    offer_methods,
    open_instance,
    open_instances,
    read_document,
    split_list,
    target,
)
from hetplan.cli.output import Display, emit, note, watched
from hetplan.errors import HetplanError, InputError, UnsupportedError, require
from hetplan.files import to_json
from hetplan.instances.answers import Verdict, answer_document, judge, read_claims
from hetplan.instances.library import Instance, plain
from hetplan.solvers.registry import Certified, Family, load, solve_loaded
from hetplan.solvers.run import OPTIMAL_GAP, Options, Result, Run, Stop
from hetplan.text import (
    Column,
    Table,
    digits,
    number_text,
    percent_text,
    seconds_text,
)

# The key in a result's details for the name of the exception with which a method broke.
BUG = "bug"


@described(
    sections={
        "Methods": "--method --plugin",
        "Limits of the search": "--time-limit --gap --threads --seed",
        "General solvers": "--native --pyomo-solver",
        "Output": "--certificate --output --json --quiet --help",
    },
    examples=(
        ("A packaged instance by the fastest exact method", "hetplan solve tiny-mixed"),
        (
            "The paper's own algorithm beside CP-SAT, a minute for each",
            "hetplan solve tiny-mixed -m paper,cp-sat -t 60",
        ),
        (
            "Every instance of a folder, as one JSON document in a file",
            "hetplan solve my-instances -m all -t 60 -q -o answers.json",
        ),
    ),
)
def solve(
    instances: Annotated[
        list[str],
        typer.Argument(
            help="Instance files, folders, - for standard input; names, patterns, problems or sets "
            "of the library.",
            autocompletion=offer("sets"),
        ),
    ],
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "--methods",
            "-m",
            metavar="NAME[,NAME…]|all",
            help="Methods to run; each problem runs those that it has; default auto.",
            autocompletion=offer_methods,
        ),
    ] = None,
    plugin: PluginOption = None,
    time_limit: TimeOption = None,
    gap: GapOption = None,
    threads: ThreadsOption = None,
    seed: SeedOption = None,
    native: NativeOption = None,
    pyomo_solver: PyomoOption = None,
    certificate: Annotated[
        Path | None,
        target(
            "--certificate",
            help="Write a proof of the bound, which `check` verifies without a solver (joint).",
        ),
    ] = None,
    json: JsonOption = False,
    output: OutputOption = None,
    quiet: QuietOption = False,
) -> int:
    """Solve instances and print each method's result with its proven bound.

    The JSON document of several instances has one answer for each. Exit code 0 when every result is
    optimal or feasible, 1 when one is infeasible or unknown, 3 when methods contradict each other.
    """
    options = make_options(
        time_limit=time_limit,
        gap=gap,
        threads=threads,
        seed=seed,
        native=native,
        pyomo_solver=pyomo_solver,
    )
    opened = open_instances(instances)
    families = {instance.problem: instance.family for instance in opened}
    methods = chosen_methods(families, method)
    check_back_ends(families, methods, options, pyomo_solver)
    if certificate is not None:
        check_certifiable(opened)
    answers: list[tuple[Instance, list[Result[Any]]]] = []
    for instance in opened:
        results = run_methods(instance, methods[instance.problem], options, quiet=quiet)
        answers.append((instance, results))
        if results and results[-1].stop is Stop.INTERRUPTED:
            break  # Ctrl-C ends the whole command, and the other instances have no answer
    documents = [
        answer_document(instance, results, options.as_dict()) for instance, results in answers
    ]
    alone = len(opened) == 1
    tables = (
        table
        for instance, results in answers
        for table in result_tables(instance, results, alone=alone)
    )
    emit(documents[0] if alone else {"answers": documents}, tables, json=json, output=output)
    if certificate is not None and answers:
        write_certificate(*answers[0], options, certificate, quiet=quiet)
    contradictions = [
        f"{document['instance']}: {line}"
        for document in documents
        for line in document["contradictions"]
    ]
    note(*(f"error: {line}" for line in contradictions))
    all_results = [result for _, results in answers for result in results]
    # A method that broke is a bug of hetplan, as a contradiction is: `main` returns 3 for both.
    if contradictions or any(BUG in result.details for result in all_results):
        return 3
    complete = len(answers) == len(opened)
    answered = all(result.status in ("optimal", "feasible") for result in all_results)
    return 0 if complete and answered else 1


def check_certifiable(opened: Sequence[Instance]) -> None:
    """Raise InputError unless there is one instance, and its problem's bounds have certificates."""
    names = [instance.name for instance in opened]
    require(len(opened) == 1, "one instance", where="--certificate", got=", ".join(names))
    family = opened[0].family
    require(
        family.certify,
        f"bounds of problem {family.name} have no certificates",
        where="--certificate",
        expected="an instance of problem joint",
        kind=UnsupportedError,
    )


def write_certificate(
    instance: Instance,
    results: Sequence[Result[Any]],
    options: Options,
    path: Path,
    *,
    quiet: bool,
) -> None:
    """Write a certificate of the largest bound of the results, and note what it proves. The time
    limit holds for the certificate alone, too."""
    claimed = max((r.bound for r in results if r.bound is not None), default=None)
    certify = load(instance.family.certify or "")
    run = Run(options)
    work = functools.partial(certify, instance.data, instance.name, claimed, run)
    document = watched(run, work, Display(f"{instance.name}: certificate"), quiet=quiet)
    document.save(path)
    note(f"{path}: {proven_text(document.bound, claimed)}")


def proven_text(proven: float, claimed: float | None) -> str:
    """What a certificate proves, in words. claimed: the bound that a method had found."""
    text = f"proves that nothing is below {number_text(proven, 8)}"
    if claimed is None or claimed <= 0:
        return text
    lower = max(0.0, 1 - proven / claimed)
    if lower <= OPTIMAL_GAP:
        return f"{text}, the bound itself"
    return f"{text}, which is {percent_text(lower)} less than the bound {number_text(claimed, 8)}"


def chosen_methods(
    families: Mapping[str, Family], wanted: Sequence[str] | None
) -> dict[str, list[str]]:
    """Problem -> the methods that the user wants and the problem has, each once.

    families: problem -> its family. wanted: the values of `--method`; `all` stands for every
    method, None for `auto`. Raises InputError for a name that is no method of any problem.
    """
    listed = split_list(wanted) if wanted is not None else ["auto"]
    names = list(dict.fromkeys(listed))
    require(names, "no method named", where="--method", expected="at least one")
    methods_of = {
        problem: [method.name for method in family.methods] for problem, family in families.items()
    }
    every_method = {method for methods in methods_of.values() for method in methods}
    for name in names:
        if name != "all" and name not in every_method:
            any_family = next(iter(families.values()))
            any_family.method(name)  # raises the InputError, which lists the family's methods
    if "all" in names:
        return methods_of
    return {
        problem: [name for name in names if name in methods]
        for problem, methods in methods_of.items()
    }


def check_back_ends(
    families: Mapping[str, Family],
    methods: Mapping[str, Sequence[str]],
    options: Options,
    pyomo_solver: str | None,
) -> None:
    """Raise InputError for options of a back end that no chosen method runs: they would have no
    effect, and the user would not notice.

    methods: problem -> the chosen methods.
    """
    option_of: dict[str, str] = {}  # back end -> the option that names it
    if pyomo_solver is not None:
        option_of["pyomo"] = f"--pyomo-solver {pyomo_solver}"
    for backend, native in options.native.items():
        option_of.setdefault(backend, f"--native {backend}.{next(iter(native))}")
    chosen = dict.fromkeys(name for names in methods.values() for name in names)
    for backend, option in option_of.items():
        users: dict[str, None] = {}  # the methods that run the back end, as an ordered set
        for family in families.values():
            for method in family.methods:
                if method.takes(backend, options):
                    users[method.name] = None
        require(
            users.keys() & chosen.keys(),
            f"no method chosen runs {backend}",
            where=option,
            got=", ".join(chosen),
            expected=f"--method {' or '.join(users)}" if users else None,
        )


def run_methods(
    instance: Instance, methods: Sequence[str], options: Options, *, quiet: bool
) -> list[Result[Any]]:
    """The result of each method, in order. After Ctrl-C, the results of the methods that did not
    begin say so.

    A method that refuses the instance raises UnsupportedError where it is the only one; among
    several methods, the refusal is its result.
    """
    results: list[Result[Any]] = []
    for method in methods:
        run = Run(options)
        work = functools.partial(solve_loaded, instance.family, instance.data, method, run)
        try:
            results.append(watched(run, work, Display(f"{instance.name}: {method}"), quiet=quiet))
        except Exception as error:
            # A method that refuses the instance, or breaks, must not lose the others' results.
            refused = isinstance(error, UnsupportedError)
            wrong_input = isinstance(error, InputError) and not refused
            if len(methods) == 1 or wrong_input:
                raise
            results.append(failed_result(method, options, error))
        if run.cancelled:
            message = "not begun: stopped from the keyboard"
            for name in methods[len(results) :]:
                results.append(no_result(name, options, Stop.INTERRUPTED, message))
            break
    return results


def failed_result(method: str, options: Options, error: Exception) -> Result[Any]:
    """The result of a method that refused the instance (UnsupportedError) or broke."""
    if isinstance(error, UnsupportedError):
        return no_result(method, options, Stop.ERROR, str(error))
    name = type(error).__name__
    text = str(error) if isinstance(error, HetplanError) else f"{name}: {error}"
    return no_result(method, options, Stop.ERROR, f"bug in hetplan: {text}", {BUG: name})


def no_result(
    method: str,
    options: Options,
    stop: Stop,
    message: str,
    details: Mapping[str, object] | None = None,
) -> Result[Any]:
    """The result of a method that found nothing. message: why."""
    return Result(
        method=method,
        stop=stop,
        decision=None,
        objective=None,
        bound=None,
        build_seconds=0.0,
        solve_seconds=0.0,
        solver="none",
        options=options.as_dict(),
        seed=options.seed,
        message=message,
        details=details or {},
    )


def result_tables(
    instance: Instance, results: Sequence[Result[Any]], *, alone: bool
) -> Iterator[Table]:
    """The table of an instance's results with one row per method, and the tables of the best
    decision where the instance is the only one (`alone`)."""
    bounds = [result.bound for result in results if result.bound is not None]
    best_bound = max(bounds, default=0.0)

    def above_best_bound(result: Result[Any]) -> float | None:
        if result.objective is None or best_bound <= 0:  # there is no ratio to 0
            return None
        return max(0.0, result.objective / best_bound - 1.0)

    columns: list[Column[Result[Any]]] = [
        Column("method", lambda result: result.method),
        Column("status", lambda result: result.status),
        Column("objective", lambda result: result.objective, digits(8), right=True),
        Column("bound", lambda result: result.bound, digits(8), right=True),
        Column("gap", lambda result: result.gap, percent_text, right=True),
        Column("above best bound", above_best_bound, percent_text, right=True),
        *(part_column(name) for name in instance.family.beside),
        Column("time", lambda result: result.seconds, seconds_text, right=True),
        Column("message", lambda result: result.message),
    ]
    yield Table.of(
        f"{instance.name} ({instance.problem}: {instance.family.title})",
        results,
        columns,
    )
    solved = [result for result in results if result.objective is not None]
    if solved and alone:
        best = min(solved, key=lambda result: result.objective or 0.0)  # none of them is None
        yield from describe(instance, best.decision, f"decision of {best.method}")


def part_column(name: str) -> Column[Result[Any]]:
    """The column of a part of the evaluation beside the objective, with a dash for results without
    a decision."""
    heading = name.replace("_", "-")
    return Column(heading, lambda result: result.details.get(name), digits(4), right=True)


def describe(instance: Instance, decision: Any, source: str) -> list[Table]:
    """A decision as tables for people, or as JSON in a note where its family has no tables.

    source: the decision's origin, which begins the first title.
    """
    if instance.family.describe is None:
        return [Table(source, (), (), notes=(to_json(plain(decision)).rstrip(),))]
    return titled(source, load(instance.family.describe)(instance.data, decision))


def titled(source: str, tables: Sequence[Table]) -> list[Table]:
    """The tables, where the first title begins with their source."""
    first, *rest = tables
    return [replace(first, title=f"{source}: {first.title}"), *rest]


@described(
    examples=(
        (
            "What your own solver found for a packaged instance",
            "hetplan check tiny-mixed answer.json",
        ),
        (
            "A bound of problem joint, without a solver",
            "hetplan check joint-home --certificate proof.json",
        ),
    ),
)
def check(
    instance: InstanceArgument,
    decision: Annotated[
        str | None,
        typer.Argument(
            help="A decision, the output of `solve --json`, or a best-known record; - for "
            "standard input."
        ),
    ] = None,
    certificate: Annotated[
        str | None,
        typer.Option(
            "--certificate", metavar="FILE", help="A certificate of `solve`; - for standard input."
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Verify decisions against an instance and price them again; verify a bound by its certificate.

    Exit code 0 when all hold; 1 when one breaks a constraint, contradicts what is stated of it, or
    is missing (a result that is infeasible or unknown has nothing to verify), and when a
    certificate proves less than it states.
    """
    require(
        decision is not None or certificate is not None,
        "nothing to check",
        expected="a decision, or --certificate",
    )
    require(
        [instance, decision, certificate].count("-") < 2,
        "only one of instance, decision and certificate can come from standard input",
    )
    opened = open_instance(instance)
    verdicts = [] if decision is None else judged_decisions(opened, decision)
    document: dict[str, Any] = {
        "instance": opened.name,
        "problem": opened.problem,
        "decisions": [verdict.document() for verdict in verdicts],
    }
    tables, ok = list(verdict_tables(opened, verdicts)), all(v.holds for v in verdicts)
    if certificate is not None:
        certified = verified(opened, certificate)
        document["certificate"] = {
            "holds": certified.holds,
            "stated_bound": certified.stated,
            "proven_bound": certified.proven,
            "claimed_bound": certified.claimed,
        }
        tables.append(certificate_table(opened, certificate, certified))
        ok = ok and certified.holds
    return emit(document, tables, json=json, ok=ok)


def judged_decisions(opened: Instance, decision: str) -> list[Verdict]:
    """The verdicts on the decisions in a file, or on standard input."""
    value, where = read_document(decision)
    claims = read_claims(value, opened, where=where)
    if isinstance(value, dict) and "results" in value and value.get("instance") != opened.name:
        note(f"{where} answers instance {value.get('instance')!r}, checked against {opened.name!r}")
    return judge(claims, opened)


def verified(opened: Instance, certificate: str) -> Certified:
    """What the certificate in a file, or on standard input, proves of the instance."""
    check_certifiable([opened])
    value, where = read_document(certificate)
    verify = load(opened.family.verify or "")
    work = functools.partial(verify, opened.data, value, where)
    display = Display(f"{opened.name}: certificate")
    certified: Certified = watched(Run(), work, display, quiet=False)
    if value["instance"] != opened.name:
        note(f"{where} is of instance {value['instance']!r}, checked against {opened.name!r}")
    return certified


def certificate_table(opened: Instance, source: str, certified: Certified) -> Table:
    """What a certificate proves, beside what it states."""
    word = "holds" if certified.holds else "does not hold"
    rows = [
        ("stated", number_text(certified.stated, 10)),
        ("proven", number_text(certified.proven, 10)),
    ]
    if certified.claimed is not None:
        rows.append(("of the method", number_text(certified.claimed, 10)))
    title = f"{opened.name}: {source}: {word}"
    notes = (proven_text(certified.proven, certified.claimed),)
    return Table(title, ("bound", "value"), tuple(rows), notes=notes, right=(1,))


def verdict_tables(instance: Instance, verdicts: Sequence[Verdict]) -> Iterator[Table]:
    """For each claim a table with the parts of its decision's evaluation and the complaints, then
    the decision's description."""
    for verdict in verdicts:
        claim, evaluation = verdict.claim, verdict.evaluation
        word = {True: "holds", False: "does not hold", None: "nothing to price"}[verdict.holds]
        title = f"{instance.name}: {claim.source}: {word}"
        if evaluation is None:
            stated = f"stated {claim.status}" if claim.status else "no status stated"
            bound = "" if claim.bound is None else f", bound {number_text(claim.bound, 10)}"
            yield Table(title, (), (), (*verdict.complaints, f"no decision ({stated}{bound})"))
            continue
        parts = {**evaluation.parts, "objective": evaluation.objective}
        rows = tuple(
            (name, number_text(value, 10)) for name, value in parts.items() if value is not None
        )
        header = ("part", "value") if rows else ()
        yield Table(title, header, rows, notes=verdict.complaints, right=(1,))
        if evaluation.objective is not None:
            yield from describe(instance, claim.decision, claim.source)
