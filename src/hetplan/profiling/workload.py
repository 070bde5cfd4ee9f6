"""The workload: one model, cluster, profile and global batch, from which every family's problem is
posed."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hetplan.answers import Answers
from hetplan.errors import InputError, require
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
from hetplan.profiling.models.zoo import ModelSpec
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
    """The job that is to be planned: one model trained on one cluster.

    `make_workload` builds it and checks that the parts fit together. Where the profile has other
    names of layers than the model (an importer counts `layer-0`, `layer-1`, ...), the model's names
    replace them, because layers correspond by position.
    """

    model: Model
    cluster: Cluster
    profile: Profile  # tables of every device type of the cluster
    global_batch: int  # samples per optimizer step
    reserved_bytes: float = RESERVED_BYTES  # memory of each device that training cannot use
    # Tensor degree -> bytes per sample that each device of such a group needs beside the layers'
    # kept tensors, while one layer is computed again.
    working_bytes: Mapping[int, float] = field(default_factory=dict)
    # learned efficiency of messages and collectives; None: links reach the file's bandwidths
    links: LearnedLinks | None = None
    framework: Framework = HETPLAN  # the framework that trains, and its memory on every device
    stack: Stack = DEFAULT_STACK  # the software that computes and communicates
    # share of each device's memory that stays free besides, since allocators fragment memory
    memory_margin: float = 0.0
    # "profile" and "links" -> the user's file from which they were read
    files: Mapping[str, SourceFile] = field(default_factory=dict, compare=False, repr=False)
    # cache of objects that are derived from this workload, such as the costs that a replay reads
    answers: Answers = field(init=False, repr=False, compare=False, default_factory=Answers)

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
        """Tokens of one optimizer step; an image counts as one."""
        return self.global_batch * self.model.tokens_per_sample

    @property
    def flops_per_iteration(self) -> float:
        """FLOPs of the matrix products of one optimizer step, with attention in full and nothing
        computed again (the FLOPs of MFU, Chowdhery et al. 2022, Appendix B)."""
        model = self.model
        return self.global_batch * (model.forward_flops() + model.backward_flops())

    def utilisation(self, seconds: float, types: Sequence[str]) -> float | None:
        """Model FLOPs utilisation (MFU) of an iteration; None where a device has no peak in the
        precision.

        seconds: seconds of the iteration. types: the device type of each device that is used.
        """
        peaks = []  # FLOP/s of each device
        for name in types:
            tflops = self.cluster.specs[name].peak_tflops.get(self.precision)
            if tflops is None:
                return None
            peaks.append(tflops * 1e12)
        return self.flops_per_iteration / (seconds * sum(peaks))

    def interval(self, types: Iterable[str]) -> tuple[float, float] | None:
        """The factors (low, high) between which real over predicted seconds lie on these device
        types; None where no table has an interval.

        They held eight in ten of the measurements that the predictor's fits had not seen.
        """
        used = set(types)
        tables = [table for table in self.profile.tables if table.device in used]
        intervals = [table.interval for table in tables if table.interval is not None]
        if not intervals:
            return None
        return min(low for low, _ in intervals), max(high for _, high in intervals)

    @property
    def state_bytes_per_param_byte(self) -> float:
        """Bytes of weights, gradients and optimizer states (Adam) per byte of trained weights:
        usually 8 in 16 bit, 4 in fp32."""
        element_bytes = ELEMENT_BYTES[self.precision]
        return sum(self.framework.state_bytes(element_bytes)) / element_bytes

    @property
    def state_bytes(self) -> float:
        """Bytes of weights, gradients and optimizer states of one copy of the model, undivided."""
        trained = sum(layer.param_bytes for layer in self.profile.layers)
        frozen = sum(layer.frozen_bytes for layer in self.profile.layers)
        return self.state_bytes_per_param_byte * trained + frozen

    def device_bytes(self) -> dict[str, float]:
        """Device type -> bytes of a device that training can use: its memory less the margin and
        `reserved_bytes`, at least 0."""
        usable_share = 1 - self.memory_margin
        usable = {}
        for name in self.cluster.types:
            memory = usable_share * self.cluster.specs[name].memory_bytes
            usable[name] = max(0.0, memory - self.reserved_bytes)
        return usable


def check_units(stack: Stack, model: Model, cluster: Cluster) -> None:
    """Raise InputError where the stack multiplies in 8 or 4 bits but the model is trained in fp32,
    or a device has no units for such products."""
    if stack.narrow is None:
        return
    all_have_units = all(stack.narrow in spec.peak_tflops for spec in cluster.specs.values())
    require(
        model.precision != "fp32" and all_have_units,
        "the stack needs 16-bit training on devices with units for its products",
        where=cluster.name,
        got=f"stack {stack.name}, {model.precision}",
        expected="--precision bf16, devices with such rates in the catalogue, or another stack",
    )


def make_workload(
    model: str | os.PathLike[str] | ModelSpec | Model,
    cluster: str | os.PathLike[str] | Cluster,
    global_batch: int,
    *,
    sequence: int | None = None,
    precision: str = "fp16",
    profile: str | os.PathLike[str] | Profile | None = None,
    framework: str | Framework = HETPLAN,
    stack: str | Stack = DEFAULT_STACK,
) -> Workload:
    """The workload of a model, a cluster and a profile.

    Raises InputError where a part cannot be read or the parts do not fit together.

    model: name, config.json or Model. cluster: file or Cluster. global_batch: samples per optimizer
    step. sequence, precision: tokens per sample and precision of the model; a Model has its own.
    profile: file or Profile; None: one is predicted. framework: the framework that trains, or its
    name. stack: the software that computes, or its name.
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
        file = SourceFile.of(profile)  # None for a pipe, which no plan can name
        if file is not None:
            files["profile"] = file
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
    """Raise InputError unless the profile is one of this model, and has tables of every device type
    of this cluster. where: the profile's file, for messages."""
    where = where or f"profile of {profile.model}"
    check_made_for(model, profile.model, profile.sequence, profile.precision, where=where)
    require(
        len(profile.layers) == len(model.layers),
        "number of layers differs",
        where=f"{where}: layers",
        got=len(profile.layers),
        expected=f"{len(model.layers)}, as {model.name} has",
    )
    has_frozen = any(layer.frozen for layer in model.layers)
    require(
        has_frozen == any(layer.frozen_bytes for layer in profile.layers),
        "frozen weights of profile and model differ",
        where=f"{where}: layers",
        got="frozen weights" if not has_frozen else "all weights trained",
        expected="a profile of the model with the same --adapters",
    )
    names = [layer.name for layer in model.layers]
    in_profile = [layer.name for layer in profile.layers]
    # Sorted, because equal names in another order are an error. A profile with other names than the
    # model's corresponds by position, and has no wrong order.
    if sorted(in_profile) == sorted(names):
        for i, (name, expected) in enumerate(zip(in_profile, names, strict=True)):
            require(
                name == expected,
                "layers stand in another order than the model's",
                where=f"{where}: layers[{i}].name",
                got=name,
                expected=repr(expected),
            )
    missing = [name for name in cluster.types if name not in profile.devices()]
    if missing:
        raise InputError(
            f"no table for device type {missing[0]!r} of cluster {cluster.name}",
            where=f"{where}: tables",
            got=", ".join(profile.devices()),
            expected="every device type of the cluster",
        )


def with_names_of(model: Model, profile: Profile) -> Profile:
    """The profile with the names of the model's layers, by which plans, programs and exports refer
    to layers; the profile itself where the names are equal. Model and profile have equally many
    layers."""
    names = [layer.name for layer in model.layers]
    if names == [layer.name for layer in profile.layers]:
        return profile
    layers = [
        layer.model_copy(update={"name": name})
        for layer, name in zip(profile.layers, names, strict=True)
    ]
    return profile.model_copy(update={"layers": layers})
