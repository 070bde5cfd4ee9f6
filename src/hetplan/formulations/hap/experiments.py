"""HAP's experiments, what is predicted of them beside what the paper measured.

The experiments: HAP's models on V100 + P100 and on A100 + P100, at bandwidths from 1 to 400 Gbit/s.
Speeds of V100 and P100 are those measured in the paper's artefact (fp32); the A100's is the P100's
times the ratio of their datasheets. Collectives are rings at the network's bandwidth. The batch
grows with the devices: 64 samples each, 32 for BERT-MoE (Table 1); experts as many as devices.
Source: HAP (EuroSys 2024), Section 7.1, Table 1, Figures 13 and 17.

Ours are predictions of one cost model, the same for every method. The paper's are measured; its bar
charts carry no numbers, so that only what its text states is given (Sections 7.2 and 7.6).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from hetplan.formulations.hap.data import Device, HapData
from hetplan.formulations.hap.family import FAMILY
from hetplan.formulations.hap.spmd.networks import bert, model, sizes
from hetplan.formulations.hap.spmd.program import SingleProgram
from hetplan.formulations.hap.spmd.rules import Theory, ring, theory_of
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run
from hetplan.text import Table, percent_text, seconds_text

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


@dataclass(frozen=True)
class Limits:
    """Seconds on one experiment."""

    joint: float = 30.0  # for the joint search, whose bound is kept
    other: float = 4.0  # for each other method


MEASURED = (
    ("VGG19, V100 + P100 (Figure 13): over data parallelism", "up to 2.41 times (32 GPUs)"),
    ("ViT (Figure 13): over DP-CP", "about the same"),
    ("BERT-Base (Figure 13): over the baselines", "up to 1.28 times (64 GPUs)"),
    ("BERT-MoE (Figure 13): over data parallelism", "none: it runs out of memory there"),
    ("BERT-MoE, A100 + P100 (Figure 17): over DeepSpeed's padded experts", "up to 1.64 times"),
)
PREDICTED = (
    "predicted by hetplan, not measured: one cost model for every method; memory is not limited",
    "joint: programs and ratios together, within the gap shown; method paper: HAP's alternation, "
    "above joint, in {:g} s; speed-ups are those of joint",
)


def row_of(case: Experiment, limits: Limits = Limits()) -> dict[str, Any]:
    """All methods on one experiment: predicted seconds per iteration (None: no program), and the
    joint search's bound. `joint` is the best of all methods' results, because the
    joint search does not get those of the others and may end with a worse one."""
    data = case.data
    joint = solve(FAMILY, data, "auto", Run(Options(threads=1, time_limit=limits.joint)))
    options = Options(threads=1, time_limit=limits.other)
    predicted = dict[str, float | None](joint=joint.objective)
    for method in ("paper", "dp-even", "dp-proportional"):
        predicted[method] = solve(FAMILY, data, method, Run(options)).objective
    best = min((x for x in predicted.values() if x is not None), default=None)
    predicted["joint"] = best
    gap = None
    if best is not None and joint.bound is not None:
        gap = max(0.0, 1 - joint.bound / best)
    return {
        "experiment": case.name,
        "figure": case.figure,
        "predicted_seconds": predicted,
        "bound": joint.bound,
        "gap": gap,
    }


def report(
    name: str | None, tell: Callable[[str], None] | None = None, limits: Limits = Limits()
) -> tuple[list[Table], dict[str, Any]]:
    """Tables and JSON types for the experiments whose names match the shell pattern `name`; all
    without.

    rows: the experiments. measured: what the paper states.
    """
    rows = []
    for case in experiments():
        if name is None or fnmatchcase(case.name, name):
            if tell is not None:
                tell(case.name)
            rows.append(row_of(case, limits))
    return as_tables(rows, limits), {
        "rows": rows,
        "measured": [{"figure": figure, "speedup": text} for figure, text in MEASURED],
    }


def as_tables(rows: Sequence[dict[str, Any]], limits: Limits) -> list[Table]:
    """Iterations and speed-ups, and what the paper measured."""

    def times(row: dict[str, Any], method: str) -> float | None:
        seconds, joint = row["predicted_seconds"][method], row["predicted_seconds"]["joint"]
        return None if seconds is None else float(seconds / joint)

    cells = []
    for row in rows:
        above = times(row, "paper")
        gains = [times(row, method) for method in ("dp-even", "dp-proportional")]
        cells.append(
            (
                row["experiment"],
                row["figure"] or "-",
                seconds_text(row["predicted_seconds"]["joint"]),
                percent_text(row["gap"]),
                "-" if above is None else f"+{100 * max(0.0, above - 1):.3g} %",
                *("-" if gain is None else f"{gain:.2f}" for gain in gains),
            )
        )
    header = (
        "experiment", "paper", "joint", "gap", "method paper", "over dp-even",
        "over dp-proportional",
    )  # fmt: skip
    right = tuple(range(2, len(header)))
    notes = tuple(note.format(limits.other) for note in PREDICTED)
    return [
        Table("Predicted iterations", header, tuple(cells), notes, right=right),
        Table("As the paper measured it", ("speed-up of HAP", "measured"), MEASURED),
    ]
