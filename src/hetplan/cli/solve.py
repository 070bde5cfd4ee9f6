"""`hetplan solve` runs methods on an instance; `hetplan check` prices decisions again."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
)
from hetplan.cli.output import Display, emit, note, watched
from hetplan.clock import CLOCK
from hetplan.errors import HetplanError, InputError, UnsupportedError, require
from hetplan.files import to_json
from hetplan.instances.answers import Verdict, answer_document, judge, read_claims
from hetplan.instances.library import Instance, plain
from hetplan.solvers.registry import Family, load, solve as solve_one
from hetplan.solvers.run import Options, Result, Run, Stop
from hetplan.text import (
    Column,
    Table,
    digits,
    number_text,
    percent_text,
    seconds_text,
)

# Among a result's details: the exception of a method that broke.
BUG = "bug"


@described(
    sections={
        "Methods": "--method --plugin",
        "Limits of the search": "--time-limit --gap --threads --seed",
        "General solvers": "--native --pyomo-solver",
        "Output": "--output --json --quiet --help",
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
    posed = open_instances(instances)
    families = {one.problem: one.family for one in posed}
    methods = chosen_methods(families, method)
    check_back_ends(families, methods, options, pyomo_solver)
    answers: list[tuple[Instance, list[Result[Any]]]] = []
    for one in posed:
        results = run_methods(one, methods[one.problem], options, quiet=quiet)
        answers.append((one, results))
        if results and results[-1].stop is Stop.INTERRUPTED:
            break
    documents = [answer_document(*answer, options.as_dict()) for answer in answers]
    alone = len(posed) == 1
    emit(
        documents[0] if alone else {"answers": documents},
        (table for answer in answers for table in result_tables(*answer, alone=alone)),
        json=json,
        output=output,
    )
    every = [result for _, results in answers for result in results]
    wrong = [
        f"{document['instance']}: {line}"
        for document in documents
        for line in document["contradictions"]
    ]
    note(*(f"error: {line}" for line in wrong))
    if wrong or any(BUG in result.details for result in every):
        return 3
    complete = len(answers) == len(posed)
    answered = all(result.status in ("optimal", "feasible") for result in every)
    return 0 if complete and answered else 1


def chosen_methods(
    families: Mapping[str, Family], wanted: Sequence[str] | None
) -> dict[str, list[str]]:
    """The methods named, by problem, each once; `all` stands for every method. Raises InputError
    for one that no problem has."""
    names = list(dict.fromkeys(split_list(wanted) if wanted is not None else ["auto"]))
    require(names, "no method named", where="--method", expected="at least one")
    having = {name: [method.name for method in own.methods] for name, own in families.items()}
    for name in names:
        if name != "all" and not any(name in own for own in having.values()):
            next(iter(families.values())).method(name)
    return {
        problem: own if "all" in names else [name for name in names if name in own]
        for problem, own in having.items()
    }


def check_back_ends(
    families: Mapping[str, Family],
    methods: Mapping[str, Sequence[str]],
    options: Options,
    pyomo_solver: str | None,
) -> None:
    """Refuse options of a back end that none of the methods runs: they would change nothing,
    silently."""
    wanted = {} if pyomo_solver is None else {"pyomo": f"--pyomo-solver {pyomo_solver}"}
    for backend, native in options.native.items():
        wanted.setdefault(backend, f"--native {backend}.{next(iter(native))}")
    for backend, option in wanted.items():
        users = list(
            dict.fromkeys(
                method.name
                for family in families.values()
                for method in family.methods
                if method.takes(backend, options)
            )
        )
        chosen = dict.fromkeys(name for names in methods.values() for name in names)
        require(
            set(users) & set(chosen),
            f"no method chosen runs {backend}",
            where=option,
            got=", ".join(chosen),
            expected=f"--method {' or '.join(users)}" if users else None,
        )


def run_methods(
    instance: Instance, methods: Sequence[str], options: Options, *, quiet: bool
) -> list[Result[Any]]:
    """One result per method, in order; after Ctrl-C the methods that have not begun say so.

    A single method that cannot take the instance raises UnsupportedError; among several it is one
    result.
    """
    results: list[Result[Any]] = []
    for method in methods:
        run = Run(options)
        work = functools.partial(solve_loaded, instance, method, run)
        try:
            results.append(watched(run, work, Display(f"{instance.name}: {method}"), quiet=quiet))
        except Exception as error:
            # A method that refuses the instance, or breaks, does not take the others' results
            # along.
            refused = isinstance(error, UnsupportedError)
            if len(methods) == 1 or (isinstance(error, InputError) and not refused):
                raise
            kind = type(error).__name__
            text = str(error) if isinstance(error, HetplanError) else f"{kind}: {error}"
            message = text if refused else f"bug in hetplan: {text}"
            results.append(
                no_result(method, options, Stop.ERROR, message, {} if refused else {BUG: kind})
            )
        if run.cancelled:
            later, message = methods[len(results) :], "not begun: stopped from the keyboard"
            results += [no_result(name, options, Stop.INTERRUPTED, message) for name in later]
            break
    return results


def solve_loaded(instance: Instance, method: str, run: Run) -> Result[Any]:
    """The method's result; neither its time limit nor its seconds count that it was loaded."""
    instance.family.method(method).load()
    run.started = CLOCK.seconds()
    return solve_one(instance.family, instance.data, method, run)


def no_result(
    method: str,
    options: Options,
    stop: Stop,
    message: str,
    details: Mapping[str, object] | None = None,
) -> Result[Any]:
    """A result that knows nothing but why."""
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
    """One line per method; where it is alone, then the best decision as its family describes it."""
    best_bound = max((r.bound for r in results if r.bound is not None), default=0.0)

    def above(result: Result[Any]) -> float | None:
        if result.objective is None or best_bound <= 0:
            return None
        return max(0.0, result.objective / best_bound - 1.0)

    columns: list[Column[Result[Any]]] = [
        Column("method", lambda result: result.method),
        Column("status", lambda result: result.status),
        Column("objective", lambda result: result.objective, digits(8), right=True),
        Column("bound", lambda result: result.bound, digits(8), right=True),
        Column("gap", lambda result: result.gap, percent_text, right=True),
        Column("above best bound", above, percent_text, right=True),
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
        best = min(solved, key=lambda result: result.objective or 0.0)
        yield from describe(instance, best.decision, f"decision of {best.method}")


def part_column(name: str) -> Column[Result[Any]]:
    """The column of a part of the evaluation beside the objective; a dash without a decision."""
    heading = name.replace("_", "-")
    return Column(heading, lambda result: result.details.get(name), digits(4), right=True)


def describe(instance: Instance, decision: Any, source: str) -> list[Table]:
    """The decision as tables of its family, else as JSON on a note."""
    if instance.family.describe is None:
        return [Table(source, (), (), notes=(to_json(plain(decision)).rstrip(),))]
    return titled(source, load(instance.family.describe)(instance.data, decision))


def titled(source: str, tables: Sequence[Table]) -> list[Table]:
    """The tables, the first one's title after where they come from."""
    first, *rest = tables
    return [replace(first, title=f"{source}: {first.title}"), *rest]


def check(
    instance: InstanceArgument,
    decision: Annotated[
        str,
        typer.Argument(
            help="A decision, the output of `solve --json`, or a best-known record; - for "
            "standard input."
        ),
    ],
    json: JsonOption = False,
) -> int:
    """Verify decisions against an instance and price them again.

    Exit code 0 when all hold; 1 when one breaks a constraint, contradicts what is stated of it, or
    is missing
    (a result that is infeasible or unknown has nothing to verify).
    """
    require(
        (instance, decision) != ("-", "-"),
        "instance and decision cannot both come from standard input",
    )
    posed = open_instance(instance)
    value, where = read_document(decision)
    claims = read_claims(value, posed, where=where)
    if isinstance(value, dict) and "results" in value and value.get("instance") != posed.name:
        note(f"{where} answers instance {value.get('instance')!r}, checked against {posed.name!r}")
    verdicts = judge(claims, posed)
    return emit(
        {
            "instance": posed.name,
            "problem": posed.problem,
            "decisions": [verdict.document() for verdict in verdicts],
        },
        verdict_tables(posed, verdicts),
        json=json,
        ok=all(verdict.holds for verdict in verdicts),
    )


def verdict_tables(instance: Instance, verdicts: Sequence[Verdict]) -> Iterator[Table]:
    """Of each claim its decision's parts, then its complaints or its description."""
    for verdict in verdicts:
        claim, evaluation = verdict.claim, verdict.evaluation
        word = {True: "holds", False: "does not hold", None: "nothing to price"}[verdict.holds]
        title = f"{instance.name}: {claim.source}: {word}"
        if evaluation is None:
            stated = f"stated {claim.status}" if claim.status else "no status stated"
            bound = "" if claim.bound is None else f", bound {number_text(claim.bound, 10)}"
            yield Table(title, (), (), (*verdict.complaints, f"no decision ({stated}{bound})"))
            continue
        rows = tuple(
            (name, number_text(v, 10))
            for name, v in {**evaluation.parts, "objective": evaluation.objective}.items()
            if v is not None
        )
        yield Table(
            title, ("part", "value") if rows else (), rows, notes=verdict.complaints, right=(1,)
        )
        if evaluation.objective is not None:
            yield from describe(instance, claim.decision, claim.source)
