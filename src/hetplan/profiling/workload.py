"""The workload: one model, cluster, profile and global batch, from which every family's problem is
posed."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hetplan.errors import require
from hetplan.profiling.frameworks import HETPLAN, RESERVED_BYTES, Framework, load_framework
from hetplan.profiling.hardware.cluster import Cluster, load_cluster
from hetplan.profiling.models.model import Model, check_made_for, load_model
from hetplan.profiling.models.operators import (
    DEFAULT_STACK,
    ELEMENT_BYTES,
    Precision,
    Stack,
    load_stack,
)
from hetplan.profiling.profiles.predict import check_global_batch, default_micro_batches, predict
from hetplan.profiling.profiles.profile import Profile, load_profile
from hetplan.profiling.rates.efficiency import LearnedLinks
from hetplan.profiling.source_files import SourceFile

# Bytes of weight, gradient, fp32 master weight and Adam's two moments per parameter: 2 + 2 + 4 + 4
# + 4 in mixed precision (Rajbhandari et al. 2020, ZeRO, Section 3.1), 4 + 4 + 4 + 4 in fp32; in
# both cases 16.
STATE_BYTES_PER_PARAM = 16


@dataclass(frozen=True)
class Workload:
    """What is to be planned. Built by `make_workload`, which checks that the parts fit together.

    profile: has tables of every device type of the cluster, and the model's layers under the
    model's names: where a profile names them otherwise (an importer counts `layer-0`, `layer-1`,
    ...), the model's names take the place of its own, for layers correspond by position.
    reserved_bytes: memory of each device that training cannot use. memory_margin: share of each
    device's memory that stays free besides, for what an allocator cannot use. working_bytes: what
    each device of a tensor group of that degree needs per sample beside what its layers keep, while
    one of them is computed again. links: learned efficiency of messages and collectives, None:
    links reach the cluster file's bandwidths. framework: what trains, and what it holds on every
    device. stack: the software that computes and communicates. files: the user's files of the
    profile and of the links, by `profile` and `links`.
    """

    model: Model
    cluster: Cluster
    profile: Profile
    global_batch: int
    reserved_bytes: float = RESERVED_BYTES
    working_bytes: Mapping[int, float] = field(default_factory=dict)
    links: LearnedLinks | None = None
    framework: Framework = HETPLAN
    stack: Stack = DEFAULT_STACK
    memory_margin: float = 0.0
    files: Mapping[str, SourceFile] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_global_batch(self.global_batch)
        check_profile(self.profile, self.model, self.cluster)
        object.__setattr__(self, "profile", with_names_of(self.model, self.profile))
        require(
            0 <= self.memory_margin < 1,
            "memory margin is not usable",
            got=self.memory_margin,
            expected="a share from 0 to below 1",
        )

    @property
    def sequence(self) -> int | None:
        """Tokens per sample; None for images."""
        return self.model.sequence

    @property
    def precision(self) -> Precision:
        """Training precision."""
        return self.model.precision

    @property
    def tokens_per_iteration(self) -> int:
        """Tokens (images) of one optimizer step."""
        return self.global_batch * self.model.tokens_per_sample

    @property
    def flops_per_iteration(self) -> float:
        """Of the matrix products of one optimizer step, attention in full and nothing computed
        again (the FLOPs of MFU, Chowdhery et al. 2022, Appendix B)."""
        model = self.model
        return self.global_batch * (model.forward_flops() + model.backward_flops())

    def utilisation(self, seconds: float, types: Sequence[str]) -> float | None:
        """Model FLOPs utilisation of an iteration on devices of these types, one name for each;
        None where a device has no peak in the precision."""
        peaks = [self.cluster.specs[kind].peak_tflops.get(self.precision) for kind in types]
        known = [peak * 1e12 for peak in peaks if peak is not None]
        return (
            None if len(known) < len(peaks) else self.flops_per_iteration / (seconds * sum(known))
        )

    def interval(self, types: Iterable[str]) -> tuple[float, float] | None:
        """Factors of predicted seconds on these device types, low and high: eight in ten operators
        that were left out lay between. None where no table tells."""
        used = set(types)
        known = [
            table.interval
            for table in self.profile.tables
            if table.interval is not None and table.device in used
        ]
        return None if not known else (min(low for low, _ in known), max(high for _, high in known))

    @property
    def state_bytes_per_param_byte(self) -> float:
        """Weights, gradients and optimizer states per byte of weights: 8 in 16 bit, 4 in fp32
        (Adam)."""
        each = ELEMENT_BYTES[self.precision]
        return sum(self.framework.state_bytes(each)) / each

    @property
    def state_bytes(self) -> float:
        """Weights, gradients and optimizer states of one copy of the model, undivided."""
        return self.state_bytes_per_param_byte * sum(
            layer.param_bytes for layer in self.profile.layers
        )

    def device_bytes(self) -> dict[str, float]:
        """Usable memory by device type: the nominal one less `reserved_bytes` and the margin, at
        least 0."""
        specs, left = self.cluster.specs, 1 - self.memory_margin
        return {
            name: max(0.0, left * specs[name].memory_bytes - self.reserved_bytes)
            for name in self.cluster.types
        }


def check_units(stack: Stack, model: Model, cluster: Cluster) -> None:
    """Raise InputError where the stack multiplies in 8 or 4 bits and training, or a device,
    cannot."""
    needed = {"fp8", "fp4" if stack.fp4 else "fp8"} if stack.fp8 or stack.fp4 else set[str]()
    require(
        not needed
        or (
            model.precision != "fp32"
            and all(needed <= {*spec.peak_tflops} for spec in cluster.specs.values())
        ),
        "the stack needs 16-bit training on devices with units for its products",
        where=cluster.name,
        got=f"stack {stack.name}, {model.precision}",
        expected="--precision bf16, devices with such rates in the catalogue, or another stack",
    )


def make_workload(
    model: str | os.PathLike[str] | Model,
    cluster: str | os.PathLike[str] | Cluster,
    global_batch: int,
    *,
    sequence: int | None = None,
    precision: str = "fp16",
    profile: str | os.PathLike[str] | Profile | None = None,
    framework: str | Framework = HETPLAN,
    stack: str | Stack = DEFAULT_STACK,
) -> Workload:
    """Join a model (name, config.json or Model), a cluster (file or Cluster) and a profile (file or
    Profile).

    Without a profile one is predicted. A Model brings its own sequence, precision and attention.
    framework: what trains, or its name. stack: the software that computes, or its name. Raises
    InputError where a part cannot be read or the parts do not fit together.
    """
    if isinstance(stack, str):
        stack = load_stack(stack)
    if not isinstance(model, Model):
        model = load_model(model, sequence=sequence, precision=precision, attention=stack.attention)
    if not isinstance(cluster, Cluster):
        cluster = load_cluster(cluster)
    check_units(stack, model, cluster)
    files: dict[str, SourceFile] = {}
    if profile is None:
        profile = predict(
            model, cluster, micro_batches=default_micro_batches(global_batch), stack=stack
        )
    elif not isinstance(profile, Profile):
        where = os.fspath(profile)
        file = SourceFile.of(profile)
        files = {} if file is None else {"profile": file}
        profile = load_profile(profile)
        check_profile(profile, model, cluster, where=where)
    if isinstance(framework, str):
        framework = load_framework(framework)
    return Workload(
        model,
        cluster,
        profile,
        global_batch,
        framework.reserved_bytes,
        framework=framework,
        stack=stack,
        files=files,
    )


def check_profile(
    profile: Profile, model: Model, cluster: Cluster, *, where: str | None = None
) -> None:
    """Raise InputError unless the profile is one of this model for every device type of this
    cluster.

    where: the profile's file, for messages.
    """
    where = where or f"profile of {profile.model}"
    check_made_for(model, profile.model, profile.sequence, profile.precision, where=where)
    require(
        len(profile.layers) == len(model.layers),
        "number of layers differs",
        where=f"{where}: layers",
        got=len(profile.layers),
        expected=f"{len(model.layers)}, as {model.name} has",
    )
    names = [layer.name for layer in model.layers]
    in_profile = [layer.name for layer in profile.layers]
    if sorted(in_profile) == sorted(names):  # other names stand for the model's, by position
        for i, (name, expected) in enumerate(zip(in_profile, names, strict=True)):
            require(
                name == expected,
                "layers stand in another order than the model's",
                where=f"{where}: layers[{i}].name",
                got=name,
                expected=repr(expected),
            )
    missing = [name for name in cluster.types if name not in profile.devices()]
    require(
        not missing,
        f"no table for device type {next(iter(missing), '')!r} of cluster {cluster.name}",
        where=f"{where}: tables",
        got=", ".join(profile.devices()),
        expected="every device type of the cluster",
    )


def with_names_of(model: Model, profile: Profile) -> Profile:
    """The profile with the names of the model's layers, of which it has as many; itself where the
    names are the same.

    Plans, programs and exports speak of layers by these names.
    """
    names = [layer.name for layer in model.layers]
    if names == [layer.name for layer in profile.layers]:
        return profile
    layers = [
        layer.model_copy(update={"name": name})
        for layer, name in zip(profile.layers, names, strict=True)
    ]
    return profile.model_copy(update={"layers": layers})
