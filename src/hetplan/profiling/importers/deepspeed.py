"""Printed output of DeepSpeed's flops profiler: its summary, and a tree of modules with parameters,
MACs and latency.

A module's line `(name): Class(` is followed by `12.6 M, 3.75% Params, 128.87 GMACs, 4.10% MACs,
1.29 ms, 1.69% latency, …`; newer versions write `12.6 M = 3.75% Params`. Layers are the tree's
modules, a list of repeated blocks unrolled and what stands beside it kept whole. The profiler times
forward passes; the summary has the backward pass as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetplan.errors import InputError
from hetplan.profiling.importers.common import (
    Imported,
    Operator,
    Settings,
    chain_profile,
    lines_of,
)

SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "sec": 1.0}
BLOCKS = ("ModuleList", "Sequential")
MODULE = re.compile(r"^\s*(?:\((?P<name>[^)]*)\):\s*)?(?P<kind>[A-Za-z_]\w*)\((?P<rest>.*)$")
PARAMS = re.compile(r"(?P<n>[\d.]+)\s*(?P<scale>[kKMGBT]?)\s*[,=]\s*[\d.]+% Params")
LATENCY = re.compile(r"(?P<n>[\d.]+)\s*(?P<unit>s|sec|ms|us|ns)\s*[,=]\s*[\d.]+% latency")
SUMMARY = re.compile(
    r"^(?P<key>batch size per GPU|fwd latency|bwd latency|model parallel size):\s*(?P<value>.+)$"
)
TIME = re.compile(r"(?P<n>[\d.]+)\s*(?P<unit>s|sec|ms|us|ns)$")


@dataclass
class Module:
    """One module of the tree: forward seconds and parameters, None where the output leaves them
    out."""

    name: str
    kind: str
    line: int
    params: float | None = None
    seconds: float | None = None
    inner: list[Module] = field(default_factory=list)


def read(path: str, settings: Settings) -> Imported:
    """A profile with one table; the backward pass has the summary's ratio to the forward pass, 2
    without one."""
    lines = lines_of(path)
    summary = {
        match["key"]: match["value"].strip()
        for _, line in lines
        if (match := SUMMARY.match(line.strip()))
    }
    tree = parse_tree(lines, path)
    ratio, guessed = 2.0, "no backward latency in the summary: twice the forward one"
    forward, backward = (_time(summary.get(key)) for key in ("fwd latency", "bwd latency"))
    if forward and backward:
        ratio, guessed = backward / forward, ""
    batch = summary.get("batch size per GPU", "")
    used = settings.micro_batch or (
        int(batch) if batch.isdecimal() and int(batch[:9]) > 0 else None
    )
    width = 4 if settings.precision == "fp32" else 2
    chain = []
    for module in layers_of(tree):
        if module.params is None or module.seconds is None:
            raise InputError(
                f"module {module.name} has no figures", where=f"{path}: line {module.line}",
                expected="output that is not shortened (module_depth = -1, detailed)",
            )  # fmt: skip
        label = f"{module.name}-{module.kind}" if module.name else module.kind
        seconds, params = module.seconds, width * module.params
        chain.append((Operator(label, seconds, ratio * seconds, params, 0.0, 0.0), 0.0))
    return chain_profile(
        chain,
        replace(settings, micro_batch=used, precision=settings.precision or "fp16"),
        model=tree.kind,
        device="deepspeed-gpu",
        where=path,
        source=f"DeepSpeed flops profiler, {Path(path).name}",
        notes=(
            guessed,
            "the profiler does not tell what layers send on and keep: activation_bytes and "
            "saved_bytes are 0",
        ),
    )


def parse_tree(lines: list[tuple[int, str]], path: str) -> Module:
    """The first tree behind the last heading of a detailed profile; raises InputError where there
    is none."""
    starts = [i for i, (_, line) in enumerate(lines) if "Detailed Profile" in line]
    if not starts:
        raise InputError(
            "no detailed profile", where=path, expected="a heading 'Detailed Profile per GPU'"
        )
    stack: list[Module] = []
    for number, line in lines[starts[-1] + 1 :]:
        if not stack and not (MODULE.match(line) and line.rstrip().endswith("(")):
            continue  # notes between the heading and the tree
        if stack and line.strip() == ")":
            done = stack.pop()
            if not stack:
                return done
            continue
        match = MODULE.match(line)
        if match and not PARAMS.match(line.strip()):
            module = Module(match["name"] or "", match["kind"], number)
            if stack:
                stack[-1].inner.append(module)
            _figures(module, match["rest"])
            if line.rstrip().endswith("("):
                stack.append(module)
        elif stack:
            _figures(stack[-1], line)
    raise InputError("the tree of modules does not end", where=path, expected="closing parentheses")


def _figures(module: Module, text: str) -> None:
    """Take the figures of a line, where it has some."""
    params, latency = PARAMS.search(text), LATENCY.search(text)
    if params:
        module.params = float(params["n"]) * SCALES[params["scale"]]
    if latency:
        module.seconds = float(latency["n"]) * UNITS[latency["unit"]]


def layers_of(tree: Module) -> Iterator[Module]:
    """Modules in printed order; those that hold a list of blocks are opened, others and the blocks
    stay whole."""
    if tree.kind in BLOCKS and len(tree.inner) > 1:
        yield from tree.inner
        return
    if not any(map(_has_blocks, tree.inner)):
        yield tree
        return
    for inner in tree.inner:
        yield from layers_of(inner) if _has_blocks(inner) else (inner,)


def _has_blocks(module: Module) -> bool:
    """Whether the module is or holds a list of several modules."""
    return (module.kind in BLOCKS and len(module.inner) > 1) or any(map(_has_blocks, module.inner))


def _time(text: str | None) -> float | None:
    match = TIME.match(text) if text else None
    return float(match["n"]) * UNITS[match["unit"]] if match else None
