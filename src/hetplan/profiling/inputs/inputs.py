"""The inputs of a plan: the workload for which it was made, as the plan file carries it.

A plan file carries its cluster, model and profile in full. So its workload can be made again, equal
in every number, without the files that the user gave. The plan file names these files with their
digests, and commands say which of them have changed since.
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
    """The parts of a plan file's workload that are not in its inputs."""

    where: str  # the plan file
    model: str  # name of the model
    cluster: str  # name of the cluster
    global_batch: int  # samples per optimizer step
    sequence: int | None  # tokens per sample; None for images
    precision: Precision
    layers: Sequence[str]  # [L] names of the layers


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """The inputs that a user gives in place of a plan's inputs; None: the plan's input is used."""

    cluster: Cluster | None = None
    model: Model | None = None
    profile: str | os.PathLike[str] | None = None  # its file

    @property
    def roles(self) -> set[str]:
        """The names of the replaced inputs."""
        return {role for role, value in vars(self).items() if value is not None}


class Inputs(Record):
    """A workload as a plan file carries it."""

    memory_margin: Annotated[float, Field(ge=0, lt=1)]
    """Share of each device's memory that stays free."""
    reserved_bytes: NonNegative
    """Bytes of each device that training cannot use."""
    framework: Framework
    stack: StackRecord
    cluster: ClusterRecord
    model: ModelRecord
    profile: ProfileRecord
    links: LinkEfficiencyFile | None = None
    """Learned efficiency of messages and collectives; None: links reach the cluster's bandwidths.
    """
    files: dict[Role, SourceFile] = Field(default_factory=dict)
    """The user's files, as read."""

    @field_serializer("framework")
    def _framework(self, framework: Framework) -> dict[str, Any]:
        return framework.model_dump(mode="json", exclude_defaults=True)

    @field_serializer("links")
    def _links(self, links: LinkEfficiencyFile | None) -> dict[str, Any] | None:
        return None if links is None else links.model_dump(mode="json", exclude_defaults=True)

    @classmethod
    def of(cls, workload: Workload) -> Self | None:
        """The inputs of a workload; None where a file cannot carry one of its values, such as a
        name of several lines or a size out of range in a user's model."""
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
        """The workload of the plan, with the replaced inputs.

        Where the cluster or the model is replaced, a predicted profile that no measurement
        corrected is predicted again; any other one stays. Raises InputError where the parts do not
        fit together.
        """
        files = self.files
        stack: Stack = from_record(Stack, self.stack)
        cluster = replaced.cluster or self.cluster.cluster(named.cluster, files.get("cluster"))
        model = replaced.model or self.model_of(named)
        check_units(stack, model, cluster)
        profile = self.profile_for(named, replaced, model, cluster, stack)
        files_of_workload: dict[str, SourceFile] = {}
        for role in ("profile", "links"):
            file = files.get(role)
            if role == "profile" and replaced.profile is not None:
                file = SourceFile.of(replaced.profile)
            if file is not None:
                files_of_workload[role] = file
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
                files=files_of_workload,
            )

    def model_of(self, named: Named) -> Model:
        """The plan's model."""
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
        """The profile of the workload: the one that the user gives instead, or the plan's, or one
        that is predicted for a replaced cluster or model."""
        if replaced.profile is not None:
            where = os.fspath(replaced.profile)
            given = Profile.load(replaced.profile)
            check_profile(given, model, cluster, where=where)
            return given
        profile = self.profile.profile(named.layers)
        origin = profile.provenance
        corrected = origin.learned or origin.calibrated  # by measurements
        can_be_predicted = origin.kind == "predicted" and not corrected
        if can_be_predicted and replaced.roles & {"cluster", "model"}:
            sizes = sorted({table.micro_batch for table in profile.tables})
            return predict(model, cluster, micro_batches=sizes, stack=stack)
        check_profile(profile, model, cluster, where=f"{named.where}: inputs.profile")
        return profile

    def changes(self, where: str, replaced: Replaced) -> Iterator[str]:
        """A sentence for each change since the plan was made: of a file that it names, and of the
        predictor. Replaced inputs do not count.

        where: the plan file; relative paths begin at its folder.
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

    def same_costs(self, other: "Inputs") -> bool:
        """Whether plans cost the same with the inputs `other`: all but the files and the origin of
        the profile are equal."""
        mine = self.model_dump(mode="json")
        others = other.model_dump(mode="json")
        for dumped in (mine, others):
            dumped.pop("files", None)
            dumped["profile"]["kinds"].pop("provenance", None)
        return mine == others

    def with_paths(self, change: Mapping[Role, SourceFile]) -> Self:
        """The inputs with other files by role."""
        return self.model_copy(update={"files": dict(change)})


def relative_to(inputs: Inputs, folder: str) -> Inputs:
    """The inputs with paths of files relative to `folder`, the folder of a plan file."""
    return inputs.with_paths({role: file.beside(folder) for role, file in inputs.files.items()})


def absolute_from(inputs: Inputs, folder: str) -> Inputs:
    """The inputs that were read from a plan file in `folder`, with absolute paths of files."""
    return inputs.with_paths({role: file.found_from(folder) for role, file in inputs.files.items()})
