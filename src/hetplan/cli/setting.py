"""The workload of a command that takes a plan file.

It is the plan's workload, except for the cluster, the model and the profile that the command's
options give instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from hetplan.cli.options import offered, open_cluster
from hetplan.cli.output import note
from hetplan.errors import require
from hetplan.plans.making import workload_of
from hetplan.plans.plan import Plan
from hetplan.profiling.frameworks import load_framework
from hetplan.profiling.hardware.cluster import example_clusters
from hetplan.profiling.inputs.inputs import Replaced
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.operators import load_stack
from hetplan.profiling.models.zoo import BUILT_IN
from hetplan.profiling.rates.efficiency import LearnedLinks, LinkEfficiencyFile
from hetplan.profiling.source_files import SourceFile
from hetplan.profiling.workload import Workload, make_workload

OwnClusterOption = Annotated[
    str | None,
    offered(
        "clusters",
        "--cluster",
        metavar="FILE|NAME",
        help="Cluster file (YAML), or an example's name; default the plan's own.",
    ),
]
OwnModelOption = Annotated[
    str | None,
    offered(
        "models",
        "--model",
        metavar="NAME|FILE",
        help="Built-in model or config.json; default the plan's own.",
    ),
]
OwnProfileOption = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="Measured profile; default the plan's own."),
]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The options of a command that replace the cluster, the model and the profile of a plan."""

    cluster: OwnClusterOption = None  # a file, or an example's name; None: the plan's cluster
    model: OwnModelOption = None  # a built-in name, or a file; None: the plan's model
    profile: OwnProfileOption = None  # a file; None: the plan's profile

    def cluster_is_known(self, plan: Plan) -> bool:
        """Whether the plan's cluster can be loaded: an option gives it, the plan carries it, or the
        plan names an example."""
        is_example = plan.workload.cluster in example_clusters()
        carried = plan.inputs is not None  # a plan carries all of its inputs or none
        return self.cluster is not None or carried or is_example

    def model_is_known(self, plan: Plan) -> bool:
        """Whether the plan's model can be loaded: an option gives it, the plan carries it, or the
        plan names a built-in model."""
        carried = plan.inputs is not None
        return self.model is not None or carried or plan.workload.model in BUILT_IN

    def workload(self, plan: Plan, where: str | Path, *, quiet: bool = False) -> Workload:
        """The workload that a plan was made for, with the options' inputs in place of its inputs.

        A note on stderr names the input files that changed since the plan was made, and says
        whether the predictor changed. where: the plan's file. quiet: write no note. Raises
        InputError for an input that cannot be loaded or does not fit the plan.
        """
        if plan.inputs is None:
            return self.named_workload(plan, where)
        replaced = self.replaced(plan)
        if not quiet:
            note_changes(plan, where, replaced)
        return workload_of(plan, str(where), replaced)

    def replaced(self, plan: Plan) -> Replaced:
        """The inputs that the options give, loaded, which replace the plan's inputs. Raises
        InputError for one that cannot be loaded."""
        assert plan.inputs is not None
        cluster, model = None, None
        if self.model is not None:
            model = load_model(
                self.model,
                sequence=plan.workload.sequence,
                precision=plan.workload.precision,
                attention=plan.inputs.stack.attention,
            )
        if self.cluster is not None:
            cluster = open_cluster(self.cluster)
        return Replaced(cluster=cluster, model=model, profile=self.profile)

    def named_workload(self, plan: Plan, where: str | Path) -> Workload:
        """The workload of a plan that does not carry its inputs but names them.

        Where no option replaces the cluster or the model, its name must be that of an example
        cluster or of a built-in model; the function raises InputError otherwise.
        """
        lacking = []  # the missing inputs, each with the option that gives it
        if not self.cluster_is_known(plan):
            lacking.append(f"the cluster {plan.workload.cluster!r} with --cluster")
        if not self.model_is_known(plan):
            lacking.append(f"the model {plan.workload.model!r} with --model")
        require_inputs(lacking, where)
        return make_workload(
            self.model or plan.workload.model,
            open_cluster(self.cluster or plan.workload.cluster),
            plan.workload.global_batch,
            sequence=plan.workload.sequence,
            precision=plan.workload.precision,
            profile=self.profile,
            framework=load_framework(plan.workload.framework, where=f"{where}: workload.framework"),
            stack=load_stack(plan.workload.stack, where=f"{where}: workload.stack"),
        )


def require_inputs(lacking: Sequence[str], where: str | Path) -> None:
    """Raise InputError for inputs that a plan file does not carry. lacking: each with the option
    that gives it. where: the plan's file."""
    require(
        not lacking,
        f"the plan does not carry what it was made for: give {' and '.join(lacking)}",
        where=str(where),
    )


def note_changes(plan: Plan, where: str | Path, replaced: Replaced) -> None:
    """Write a note that names the files of a plan's inputs that changed since the plan was made,
    and says whether the predictor did. where: the plan's file. replaced: inputs that the user gives
    instead, which do not count."""
    if plan.inputs is None:
        return
    changes = list(plan.inputs.changes(str(where), replaced))
    if changes:
        note(f"{where}: {', '.join(changes)}; going on with what the plan carries")


def with_links(workload: Workload, path: Path | None) -> Workload:
    """The workload with the learned efficiency of links from a file.

    path: a link efficiency file; None: the workload stays as it is. Raises InputError where the
    file cannot be loaded.
    """
    if path is None:
        return workload
    file = SourceFile.of(path)
    files = dict(workload.files)
    if file is not None:  # a pipe is not recorded, since it cannot be read again
        files["links"] = file
    links = LearnedLinks(LinkEfficiencyFile.load(path))
    return replace(workload, links=links, files=files)
