"""HAP's experiments, and the real networks among the packaged instances.

The experiments: HAP's models on V100 + P100 and on A100 + P100, at bandwidths from 1 to 400 Gbit/s.
Speeds of V100 and P100 are those measured in the paper's artefact (fp32); the A100's is the P100's
times the ratio of their datasheets. Collectives are rings at the network's bandwidth. The batch
grows with the devices: 64 samples each, 32 for BERT-MoE (Table 1); experts as many as devices.
Source: HAP, Section 7.1, Table 1, Figures 13 and 17.

The packaged networks: the theory of the published size and that of the same operators on small
tensors have the same triples in the same order, so that a packaged decision can be executed:
`theory_named(name, tiny=True)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hetplan.errors import InputError
from hetplan.formulations.hap.data import Device, HapData
from hetplan.formulations.hap.spmd.networks import bert, model, sizes, vit
from hetplan.formulations.hap.spmd.prices import holding_of, ring
from hetplan.formulations.hap.spmd.program import SingleProgram
from hetplan.formulations.hap.spmd.rules import ELEMENT_BYTES, Theory, theory_of
from hetplan.formulations.hap.spmd.segments import segmented

V100, P100 = 3.86e12, 2.15e12
A100 = P100 * 19.5 / 9.3
NETWORK = 10.4
SIZES = (8, 16, 32, 64)
BANDWIDTHS = (1.0, 10.4, 100.0, 400.0)
MODELS = {"vgg19": 64, "vit": 64, "bert-base": 64, "bert-moe": 32}
# Figure 17: BERT-MoE on two A100 and two P100, tokens in proportion to experts.
EXPERTS = (4, 6, 8, 10, 12, 16)


@dataclass(frozen=True)
class Experiment:
    """counts: devices by type. gbit: of the network between machines. figure: of the paper, empty
    for sweeps that it does not have. experts: None except in Figure 17."""

    name: str
    model: str
    counts: tuple[tuple[str, int], ...]
    gbit: float
    figure: str = ""
    experts: int | None = None

    @property
    def devices(self) -> list[Device]:
        """Every GPU."""
        speed = {"V100": V100, "P100": P100, "A100": A100}
        return [
            Device(name=kind, flops_per_second=speed[kind])
            for kind, n in self.counts
            for _ in range(n)
        ]

    @property
    def program(self) -> SingleProgram:
        """The single-device program."""
        m = len(self.devices)
        if self.experts is not None:
            return bert(8 * self.experts, sizes(12, False, m), 128, 30522, self.experts)
        return model(self.model, MODELS[self.model] * m, m)

    @cached_property
    def theory(self) -> Theory:
        """Its theory; GPUs of one machine share its network in an all-to-all."""
        m = len(self.devices)
        machines = 2 if self.figure == "Figure 17" else 8
        return theory_of(
            self.program, self.devices, ring(m, self.gbit / 8 * 1e9, sharing=max(1, m // machines))
        )

    @property
    def data(self) -> HapData:
        """The instance."""
        return self.theory.data


def mixed(gpus: int) -> tuple[tuple[str, int], ...]:
    """Two machines of V100 and six of P100 with equally many GPUs."""
    return ("V100", gpus // 4), ("P100", gpus - gpus // 4)


def experiments() -> Iterator[Experiment]:
    """Figure 13's, the same at other bandwidths on 32 GPUs, and Figure 17's."""
    for name in MODELS:
        for gpus in SIZES:
            yield Experiment(f"{name}-{gpus}gpu", name, mixed(gpus), NETWORK, "Figure 13")
    for name in MODELS:
        for gbit in BANDWIDTHS:
            if gbit != NETWORK:
                yield Experiment(f"{name}-32gpu-{gbit:g}gbit", name, mixed(32), gbit)
    for experts in EXPERTS:
        counts = ("A100", 2), ("P100", 2)
        yield Experiment(
            f"bert-moe-a100-p100-{experts}experts",
            "bert-moe",
            counts,
            NETWORK,
            "Figure 17",
            experts,
        )


LIBRARY_DEVICES = [Device(name="V100", flops_per_second=V100)] * 2 + [
    Device(name="P100", flops_per_second=P100)
] * 4
LIBRARY_COUNT = len(LIBRARY_DEVICES)
# per device, where they are not 64
SAMPLES = {"bert-moe": 32, "gpt2": 8, "llama-blocks": 2}
# instance -> what it is
NETWORKS = {
    "hap-vgg19-6": "VGG19 on CIFAR-10, 64 samples per device",
    "hap-vit-6": "ViT of 12 blocks, 64 samples per device",
    "hap-vit-24-6": "ViT of 24 blocks, 64 samples per device",
    "hap-bert-base-6": "BERT-base, 64 samples per device",
    "hap-bert-moe-6": "BERT-base with 6 experts in every second block, 32 samples per device",
    "hap-gpt2-6": "GPT-2, 8 samples per device",
    "hap-llama-blocks-6": "4 blocks of Llama 7B, 2 samples per device",
    "hap-vgg19-6-segments2": "VGG19 on CIFAR-10, 64 samples per device, two segments of layers",
    "hap-vit-2blocks-6-segments2": "ViT of 2 blocks, 64 samples per device, two segments of layers",
    "hap-vgg19-6-memory": "VGG19 on CIFAR-10, 64 samples per device, 0.6 GiB on each",
    "hap-bert-moe-6-memory": "BERT-base with 6 experts in every second block, 32 samples "
    "per device, 8 GiB on each",
    "hap-gpt2-6-memory": "GPT-2, 8 samples per device, 8.25 GiB on each",
}
# GiB of each device where memory is limited: less than data parallelism and the optimum without
# limit hold
MEMORY_GIB = {"vgg19": 0.6, "bert-moe": 8.0, "gpt2": 8.25}


def program_named(name: str, *, tiny: bool = False) -> SingleProgram:
    """The single-device program behind a packaged instance, on small tensors if asked."""
    if name not in NETWORKS:
        raise InputError(
            "no such packaged network", got=name, expected=f"one of {', '.join(NETWORKS)}"
        )
    kind, _, segments = name.removeprefix("hap-").removesuffix("-memory").partition("-segments")
    kind = kind.removesuffix(f"-{LIBRARY_COUNT}")
    batch = LIBRARY_COUNT * (2 if tiny else SAMPLES.get(kind, 64))
    if kind == "vit-2blocks":
        program = vit(
            batch, sizes(2, tiny, LIBRARY_COUNT), 2 * LIBRARY_COUNT if tiny else 196, 768, 10
        )
    else:
        program = model(kind, batch, LIBRARY_COUNT, tiny=tiny)
    if not segments:
        return program
    # segments by the work of the published size, whatever the size asked for
    if tiny:
        at = {node.name: node.segment for node in program_named(name).nodes}
        return program.with_segments(at)
    return segmented(program, int(segments))[0]


def theory_named(name: str, *, tiny: bool = False) -> Theory:
    """Its theory on two V100 and four P100 (of small tensors, without memory)."""
    program, holding = program_named(name, tiny=tiny), None
    if name.endswith("-memory") and not tiny:
        room = (
            MEMORY_GIB[name.removeprefix("hap-").removesuffix(f"-{LIBRARY_COUNT}-memory")] * 2**30
        )
        holding = holding_of(program, [room] * LIBRARY_COUNT, element_bytes=ELEMENT_BYTES)
    return theory_of(
        program, LIBRARY_DEVICES, ring(LIBRARY_COUNT, NETWORK / 8 * 1e9), holding=holding
    )
