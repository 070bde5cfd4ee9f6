"""The inputs of a plan: the workload that it was made for, as the plan file carries it.

What a workload consists of is carried in full, so that it can be made again, equal in every number,
without the files that it was made from. These files are named with their digests; a command says
where they have changed since.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_serializer

from hetplan.profiling.frameworks import Framework
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.inputs.parts import ClusterRecord, ModelRecord, ProfileRecord
from hetplan.profiling.inputs.records import Record, as_record, from_record, record_of
from hetplan.profiling.models.model import Model
from hetplan.profiling.models.operators import Precision, Stack
from hetplan.profiling.profiles.predict import PREDICTOR, predict
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.rates.efficiency import LearnedLinks, LinkEfficiencyFile
from hetplan.profiling.source_files import SourceFile
from hetplan.profiling.workload import Workload, check_profile, check_units
from hetplan.schema import NonNegative, derived

Role = Literal["cluster", "model", "profile", "links"]
if TYPE_CHECKING:
    StackRecord = Any
else:
    StackRecord = record_of(Stack)


@dataclass(frozen=True, kw_only=True)
class Named:
    """What a plan file says of its workload beside its inputs. where: the plan file."""

    where: str
    model: str
    cluster: str
    global_batch: int
    sequence: int | None
    precision: Precision
    layers: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """What a user gives in place of a plan's inputs. model: its file or name is loaded already."""

    cluster: Cluster | None = None
    model: Model | None = None
    profile: str | os.PathLike[str] | None = None

    @property
    def roles(self) -> set[str]:
        """The inputs that are not the plan's."""
        return {role for role, value in vars(self).items() if value is not None}


class Inputs(Record):
    """A workload as a plan file carries it.

    memory_margin: share of each device's memory that stays free. reserved_bytes: memory of each
    device that training cannot use. links: learned efficiency of messages and collectives, None:
    links reach the cluster's bandwidths. files: what the user gave, as it was read.
    """

    memory_margin: Annotated[float, Field(ge=0, lt=1)]
    reserved_bytes: NonNegative
    framework: Framework
    stack: StackRecord
    cluster: ClusterRecord
    model: ModelRecord
    profile: ProfileRecord
    links: LinkEfficiencyFile | None = None
    files: dict[Role, SourceFile] = Field(default_factory=dict)

    @field_serializer("framework")
    def _framework(self, framework: Framework) -> dict[str, Any]:
        return framework.model_dump(mode="json", exclude_defaults=True)

    @field_serializer("links")
    def _links(self, links: LinkEfficiencyFile | None) -> dict[str, Any] | None:
        return None if links is None else links.model_dump(mode="json", exclude_defaults=True)

    @classmethod
    def of(cls, workload: Workload) -> Self | None:
        """The inputs of a workload; None where a file cannot carry one of its values, as a name of
        several lines or a size out of range in a model of the user's own."""
        files: dict[Role, SourceFile | None] = {
            "cluster": workload.cluster.file,
            "model": workload.model.spec.file,
            "profile": workload.files.get("profile"),
            "links": workload.files.get("links"),
        }
        try:
            return cls(
                memory_margin=workload.memory_margin,
                reserved_bytes=workload.reserved_bytes,
                framework=workload.framework,
                stack=as_record(workload.stack),
                cluster=ClusterRecord.of(workload.cluster),
                model=ModelRecord.of(workload.model),
                profile=ProfileRecord.of(workload.profile),
                links=None if workload.links is None else workload.links.file,
                files={role: file for role, file in files.items() if file is not None},
            )
        except ValidationError:
            return None

    def workload(self, named: Named, replaced: Replaced) -> Workload:
        """The workload of the plan with what replaces some of it.

        Where the cluster or the model is replaced, a predicted profile is predicted again; a
        measured one stays. Raises InputError where the parts do not fit together.
        """
        files = self.files
        stack: Stack = from_record(Stack, self.stack)
        cluster = replaced.cluster or self.cluster.cluster(named.cluster, files.get("cluster"))
        model = replaced.model or self.model_of(named)
        check_units(stack, model, cluster)
        profile = self.profile_for(named, replaced, model, cluster, stack)
        beside: dict[str, SourceFile] = {}
        for role in ("profile", "links"):
            file = files.get(role)
            if role == "profile" and replaced.profile is not None:
                file = SourceFile.of(replaced.profile)
            if file is not None:
                beside[role] = file
        with derived(named.where):
            return Workload(
                model,
                cluster,
                profile,
                named.global_batch,
                self.reserved_bytes,
                links=None if self.links is None else LearnedLinks(self.links),
                framework=self.framework,
                stack=stack,
                memory_margin=self.memory_margin,
                files=beside,
            )

    def model_of(self, named: Named) -> Model:
        """The plan's own model."""
        return self.model.model(
            named.model,
            named.layers,
            named.sequence,
            named.precision,
            self.files.get("model"),
        )

    def profile_for(
        self, named: Named, replaced: Replaced, model: Model, cluster: Cluster, stack: Stack
    ) -> Profile:
        """The profile given instead, the plan's own, or one that is predicted for a replaced
        cluster or model."""
        if replaced.profile is not None:
            where, given = os.fspath(replaced.profile), Profile.load(replaced.profile)
            check_profile(given, model, cluster, where=where)
            return given
        own = self.profile.profile(named.layers)
        source = own.provenance
        plain = source.kind == "predicted" and not source.learned and not source.calibrated
        if plain and replaced.roles & {"cluster", "model"}:
            sizes = sorted({table.micro_batch for table in own.tables})
            return predict(model, cluster, micro_batches=sizes, stack=stack)
        check_profile(own, model, cluster, where=f"{named.where}: inputs.profile")
        return own

    def changes(self, where: str, replaced: Replaced) -> Iterator[str]:
        """What has changed since the plan was made: files that it names, and the predictor.

        where: the plan file, from whose folder relative paths begin. Files whose contents are
        replaced do not count.
        """
        folder = os.path.dirname(where)
        for role, file in self.files.items():
            if role not in replaced.roles:
                found = file.found_from(folder)
                difference = found.difference()
                if difference is not None:
                    yield f"{os.path.relpath(found.path)} {difference}"
        predictor = self.profile.kinds.provenance.predictor
        if predictor not in (None, PREDICTOR) and "profile" not in replaced.roles:
            yield f"the predictor of costs is version {PREDICTOR}, the plan's was {predictor}"

    def with_paths(self, change: Mapping[Role, SourceFile]) -> Self:
        """The inputs with other paths of the files."""
        return self.model_copy(update={"files": dict(change)})


def relative_to(inputs: Inputs, folder: str) -> Inputs:
    """The inputs of a plan file in `folder`, whose files have paths relative to it."""
    return inputs.with_paths({role: file.beside(folder) for role, file in inputs.files.items()})


def absolute_from(inputs: Inputs, folder: str) -> Inputs:
    """The inputs that were read from a plan file in `folder`, with absolute paths."""
    return inputs.with_paths({role: file.found_from(folder) for role, file in inputs.files.items()})
