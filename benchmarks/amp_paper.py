"""AMP's experiments: what is replayed beside what the paper measured.

    python benchmarks/amp_paper.py [-o rows.json] [--write docs/reproductions.md]

Tables 3 to 5: every strategy of a method is replayed, which stands for a trial, on hetplan's
predicted layer times. Figure 2: AMP's estimate of every strategy against its replay. Figure 3: the
cut of §3.5 against equal layers and equal parameters in the heterogeneous model, as its narrow
layers are taken to need from a tenth to all of a wide layer's time; seconds of the closed form.
Source: AMP (NeurIPS 2022), §4.3 and §4.5.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import markdown, save

from hetplan.formulations import family
from hetplan.formulations.amp import baselines
from hetplan.formulations.amp.cuts import parameter_cut, uniform_cut
from hetplan.formulations.amp.paper import average, paper_cut, rank
from hetplan.formulations.amp.pose import pose
from hetplan.formulations.amp.problem import (
    Configuration,
    compile_problem,
    megatron_placement,
    place,
)
from hetplan.planner.amp import BUDGET, AmpProblem
from hetplan.profiling.cluster import example_cluster
from hetplan.profiling.models import load_model
from hetplan.profiling.workload import Workload, make_workload
from hetplan.runtime.replay import replay
from hetplan.runtime.truth.scores import spearman
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run
from hetplan.text import number_text

Row = dict[str, Any]
Measured = Mapping[str, tuple[float, float]]
MEGATRON, RANDOM, AMP, ANNEALING = "Megatron", "random", "AMP", "annealing"
UNIFORM, PARAMETER = "AMP's best, equal layers", "AMP's best, equal parameters"
# §4.3: name, model, cluster, batch; Tables 3 to 5: least and mean seconds as measured; §4.5: the
# fastest strategy's place in AMP's record.
SETTINGS: tuple[tuple[str, str, str, int, Measured, int], ...] = (
    (
        "homogeneous", "gpt2-amp", "g4dn-4", 32,
        {MEGATRON: (1.32, 2.41), AMP: (1.20, 1.43), ANNEALING: (1.57, 1.82)}, 3,
    ),
    (
        "mixed-cluster", "gpt2-amp", "amp-mixed", 32,
        {MEGATRON: (1.97, 2.62), RANDOM: (1.71, 3.04), AMP: (1.28, 1.73), ANNEALING: (1.46, 2.29)},
        2,
    ),
    (
        "mixed-model", "transgan-amp", "p3-4", 64,
        {MEGATRON: (1.89, 1.94), PARAMETER: (2.19, 2.19), UNIFORM: (1.25, 1.25), AMP: (1.07, 1.66)},
        1,
    ),
)  # fmt: skip
HETEROGENEITY = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
BEGIN, END = "<!-- benchmarks:amp-paper -->", "<!-- end -->"


def settings(tell: Callable[[str], None] = print) -> tuple[list[Row], list[Row], list[Row]]:
    """Least and mean seconds (Tables 3 to 5), Figure 2, Figure 3."""
    rows, figure_2, figure_3 = list[Row](), list[Row](), list[Row]()
    for setting, model, cluster, batch, measured, best in SETTINGS:
        tell(setting)
        workload = make_workload(load_model(model), example_cluster(cluster), global_batch=batch)
        replayed, figure = trials(workload)
        for method, (least, mean) in measured.items():
            seconds = replayed[method]
            rows.append(
                {
                    "setting": setting,
                    "method": method,
                    "measured, least": least,
                    "measured, mean": mean,
                    "replayed, least": min(seconds, default=None),
                    "replayed, mean": float(np.mean(seconds)) if seconds else None,
                    "strategies": len(seconds),
                }
            )
        figure_2.append({"setting": setting} | figure | {"the paper's": best})
        figure_3 += cut_speedups(workload) if PARAMETER in measured else []
    return rows, figure_2, figure_3


def table(title: str, rows: list[Row]) -> str:
    """The rows as they stand."""
    cells = [[v if isinstance(v, str) else number_text(v, 3) for v in row.values()] for row in rows]
    return markdown(title, tuple(rows[0]), cells)


def trials(workload: Workload) -> tuple[dict[str, list[float]], Row]:
    """Seconds of every method's strategies that fit, and Figure 2."""
    data, run = pose(workload), Run()
    problem, arrays = AmpProblem(workload, data), compile_problem(data)

    def seconds(decisions: list[Any]) -> list[float]:
        replays = [replay(problem.to_plan(one), workload) for one in decisions]
        return [one.seconds for one in replays if one.fits]

    record = [one for one in rank(data, run).candidates if one.fits]
    costs = [replay(problem.to_plan(one.strategy.decision()), workload).seconds for one in record]
    best = record[int(np.argmin(costs[:BUDGET]))].strategy
    cuts = {
        UNIFORM: uniform_cut(arrays.layers, best.configuration.pipeline),
        PARAMETER: parameter_cut(arrays.params, best.configuration.pipeline),
    }
    annealed = solve(family("amp"), data, "annealing", run).decision
    every = {
        MEGATRON: baselines.megatron_trials(data, arrays, run),
        RANDOM: baselines.random_trials(data, arrays, run),
    }
    tried = {name: [one.strategy.decision() for one in each] for name, each in every.items()}
    replayed = {
        **{name: seconds(each) for name, each in tried.items()},
        **{name: seconds([replace(best, cut=cut).decision()]) for name, cut in cuts.items()},
        AMP: costs[:BUDGET],
        ANNEALING: seconds([] if annealed is None else [annealed]),
    }
    return replayed, {
        "strategies": len(costs),
        "Spearman": spearman([one.estimate for one in record], costs),
        "place of the fastest": 1 + int(np.argmin(costs)),
    }


def cut_speedups(workload: Workload) -> list[Row]:
    """Figure 3, of the degrees that it names and micro-batch 1."""
    data = pose(workload)
    problem, rows = compile_problem(data), list[Row]()
    config = Configuration(4, 4, 1, 1, data.global_batch // 4)
    narrow_ones = problem.params == problem.params[-2]  # the last block and those like it
    placement = megatron_placement([device.node for device in data.devices], config)
    for ratio in HETEROGENEITY:
        times = problem.seconds[1, 1]
        narrow = times.copy()
        narrow[:, narrow_ones] = ratio * times.max(axis=1, keepdims=True)
        posed = replace(problem, seconds={(1, 1): narrow})
        averages = average(posed, config, placement)
        answer = paper_cut(averages.layer, averages.link, config.gas)
        assert answer is not None, "nobody stops it"
        placed = place(posed, config, placement)
        cuts = uniform_cut(problem.layers, 4), parameter_cut(problem.params, 4)
        equal_layers, equal_params = (placed.seconds(c) / placed.seconds(answer[0]) for c in cuts)
        rows.append(
            {"heterogeneity": ratio, "equal layers": equal_layers, "equal parameters": equal_params}
        )
    return rows


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    rows, figure_2, figure_3 = settings(lambda name: print(name, file=sys.stderr))
    tables = [
        table("AMP, Tables 3 to 5: seconds per iteration", rows),
        table("AMP, Figure 2: estimates against replays of every strategy", figure_2),
        table("AMP, Figure 3: speed of AMP's cut over Megatron's two", figure_3),
    ]
    save(arguments.output, tables, [*rows, *figure_2, *figure_3])
    if arguments.write is not None:
        page = arguments.write.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        _, _, after = rest.partition(END)
        text = "\n".join(tables)
        arguments.write.write_text(f"{before}{BEGIN}\n\n{text}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
