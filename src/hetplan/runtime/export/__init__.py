"""Plans in the words of other frameworks: what each can say is written, what it cannot is refused
by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetplan.names import unknown_name
from hetplan.solvers.registry import load

if TYPE_CHECKING:
    from hetplan.runtime.plan import Plan


@dataclass(frozen=True)
class Exporter:
    """target: "module:function" of a plan -> text. version: of the framework whose options were
    read, and where."""

    name: str
    target: str
    what: str
    version: str


EXPORTERS: dict[str, Exporter] = {
    exporter.name: exporter
    for exporter in (
        Exporter(
            "megatron",
            "hetplan.runtime.export.megatron:export",
            "a shell script of Megatron-LM's flags and ranks",
            "Megatron-LM core 0.13 and later: megatron/training/arguments.py at 000c4ac, parallel_state.py",
        ),
        Exporter(
            "deepspeed",
            "hetplan.runtime.export.deepspeed:export",
            "DeepSpeed's JSON: batch sizes and ZeRO stage",
            "DeepSpeed 0.16 and later: deepspeed.ai/docs/config-json",
        ),
        Exporter(
            "torchtitan",
            "hetplan.runtime.export.torchtitan:export",
            "torchtitan's TOML",
            "torchtitan's TOML job config: torchtitan/config/job_config.py at 6404b93 (September 2025)",
        ),
        Exporter(
            "flagscale",
            "hetplan.runtime.export.flagscale:export",
            "FlagScale's YAML for heterogeneous training",
            "FlagScale, branch main-legacy at 0526731: its heterogeneous training guide",
        ),
        Exporter(
            "torchrun",
            "hetplan.runtime.export.torchrun:export",
            "a shell script that starts hetplan's own runtime",
            "torch 2.11 and later: torch.distributed.run",
        ),
    )
}


def export(plan: Plan, to: str) -> str:
    """The plan as `to` reads it. Raises InputError for an unknown name, UnsupportedError for what
    `to` cannot say."""
    if to not in EXPORTERS:
        raise unknown_name("unknown framework", to, EXPORTERS)
    if plan.program is not None and to != "torchrun":
        from hetplan.runtime.export.grid import refuse

        raise refuse(
            plan, to, "SPMD programs", "the program: which tensors are sliced, and every collective"
        )
    write: Callable[[Plan], str] = load(EXPORTERS[to].target)
    return write(plan)
