"""The workload of a command that takes a plan: the one that the plan carries, with what the options
give in its place."""

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
    """What may stand in place of the cluster, the model and the profile of a plan."""

    cluster: OwnClusterOption = None
    model: OwnModelOption = None
    profile: OwnProfileOption = None

    def known(self, plan: Plan) -> bool:
        """Whether the cluster is known: given here, carried by the plan, or an example."""
        named = plan.workload.cluster in example_clusters()
        return self.cluster is not None or plan.inputs is not None or named

    def workload(self, plan: Plan, where: str | Path, *, quiet: bool = False) -> Workload:
        """The workload that a plan was made for, with what stands here instead. Unless quiet, says
        what has changed since the plan was made. where: the plan's file. Raises InputError."""
        if plan.inputs is None:
            return self.named_workload(plan, where)
        replaced = self.replaced(plan)
        changes = list(plan.inputs.changes(str(where), replaced))
        if changes and not quiet:
            note(f"{where}: {', '.join(changes)}; going on with what the plan carries")
        return workload_of(plan, str(where), replaced)

    def replaced(self, plan: Plan) -> Replaced:
        """What stands here in place of the plan's inputs, loaded; raises InputError."""
        assert plan.inputs is not None
        stated, model = plan.workload, None
        if self.model is not None:
            model = load_model(
                self.model,
                sequence=stated.sequence,
                precision=stated.precision,
                attention=plan.inputs.stack.attention,
            )
        return Replaced(
            cluster=None if self.cluster is None else open_cluster(self.cluster),
            model=model,
            profile=self.profile,
        )

    def named_workload(self, plan: Plan, where: str | Path) -> Workload:
        """The workload of a plan that carries none, by the names that it gives; raises InputError
        for a name that is not known."""
        lacking = []
        if not self.known(plan):
            lacking.append(f"the cluster {plan.workload.cluster!r} with --cluster")
        if self.model is None and plan.workload.model not in BUILT_IN:
            lacking.append(f"the model {plan.workload.model!r} with --model")
        require(
            not lacking,
            f"the plan does not carry what it was made for: give {' and '.join(lacking)}",
            where=str(where),
        )
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


def with_links(workload: Workload, path: Path | None) -> Workload:
    """The workload with a learned efficiency of its links, where a file is given; raises
    InputError."""
    if path is None:
        return workload
    file = SourceFile.of(path)
    files = dict(workload.files)
    if file is not None:
        files["links"] = file
    links = LearnedLinks(LinkEfficiencyFile.load(path))
    return replace(workload, links=links, files=files)
