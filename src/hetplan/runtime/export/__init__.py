"""Plans in the words of other frameworks: what each can say is written, what it cannot is refused
by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetplan.names import unknown_name
from hetplan.runtime.export import documents, scripts
from hetplan.runtime.export.grid import refuse
from hetplan.runtime.plan import Plan


@dataclass(frozen=True)
class Exporter:
    """write: plan -> text. version: of the framework whose options were read, and where."""

    name: str
    write: Callable[[Plan], str]
    what: str
    version: str


EXPORTERS: dict[str, Exporter] = {
    exporter.name: exporter
    for exporter in (
        Exporter(
            "megatron",
            scripts.megatron,
            "a shell script of Megatron-LM's flags and ranks",
            scripts.MEGATRON,
        ),
        Exporter(
            "deepspeed",
            documents.deepspeed,
            "DeepSpeed's JSON: batch sizes and ZeRO stage",
            "DeepSpeed 0.16 and later: deepspeed.ai/docs/config-json",
        ),
        Exporter("torchtitan", documents.torchtitan, "torchtitan's TOML", documents.TORCHTITAN),
        Exporter(
            "flagscale",
            documents.flagscale,
            "FlagScale's YAML for heterogeneous training",
            documents.FLAGSCALE,
        ),
        Exporter(
            "torchrun",
            scripts.torchrun,
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
        lost = "the program: which tensors are sliced, and every collective"
        raise refuse(plan, to, "SPMD programs", lost)
    return EXPORTERS[to].write(plan)
