"""HAP's experiments: its models on V100 + P100 and on A100 + P100, at bandwidths from 1 to 400
Gbit/s.

Speeds of V100 and P100 are those measured in the paper's artefact (fp32); the A100's is the P100's
times the ratio of their datasheets. Collectives are rings at the network's bandwidth. The batch
grows with the devices: 64 samples each, 32 for BERT-MoE (Table 1); experts as many as devices.
Source: HAP, Section 7.1, Table 1, Figures 13 and 17.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hetplan.formulations.hap.data import Device, HapData
from hetplan.formulations.hap.spmd.links import ring
from hetplan.formulations.hap.spmd.networks import bert, model, sizes
from hetplan.formulations.hap.spmd.program import SingleProgram
from hetplan.formulations.hap.spmd.rules import Theory, theory_of

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
