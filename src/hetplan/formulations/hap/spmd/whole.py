"""What a program takes in whole units: ratios rounded to rows, heads and experts, each axis on its
own.

An instance knows one ratio per device and segment; a real tensor is cut between units (`axes`). A
batch of 32 over 16 devices leaves little of a ratio of 2.3 samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.hap.data import Communication, HapDecision
from hetplan.formulations.hap.problem import Floats
from hetplan.formulations.hap.spmd.forms import PARTIAL, WHOLE, Form
from hetplan.formulations.hap.spmd.holding import form_kept
from hetplan.formulations.hap.spmd.instructions import Change, Instruction, Run
from hetplan.formulations.hap.spmd.program import PARAMETER
from hetplan.formulations.hap.spmd.rules import Theory


@dataclass(frozen=True)
class Held:
    """parameters: name -> [m] the part that each device holds; saved [m]: bytes of tensors kept for
    the backward pass
    (0 where the theory has no memory)."""

    parameters: dict[str, Floats]
    saved: Floats


class Parts:
    """Parts of tensors under a decision's ratios, in whole units."""

    def __init__(self, theory: Theory, ratios: Sequence[Sequence[float]]) -> None:
        self.theory, self.ratios = theory, ratios
        self.m = len(theory.data.devices)
        self._known: dict[tuple[str, Form, int], Floats] = {}

    def of(self, tensor: str, form: Form, segment: int) -> Floats:
        """[m] of the tensor on each device: slices, or 1 where it is whole or a summand."""
        if form in (WHOLE, PARTIAL):
            return np.ones(self.m)
        key = (tensor, form, segment)
        if key not in self._known:
            lengths = self.theory.axes.lengths(tensor, form, self.ratios[segment])
            self._known[key] = np.array(lengths) / sum(lengths)
        return self._known[key]

    def shared_by(self, instruction: Instruction, segment: int) -> Floats:
        """[m] of an instruction's shared work, or of the tensor that a collective moves."""
        if isinstance(instruction, Change):
            forms = [form for form in (instruction.source, instruction.target) if form >= 0]
            rows = [self.of(instruction.tensor, form, segment) for form in forms]
            return np.max(rows, axis=0) if rows else np.ones(self.m)
        node = self.theory.program.node(instruction.node)
        if isinstance(instruction, Run):
            pairs = [
                (node.name, instruction.way.output),
                *zip(node.inputs, instruction.way.inputs, strict=True),
            ]
            for tensor, form in pairs:
                if form >= 0:
                    return self.of(tensor, form, segment)
            return np.ones(self.m)
        return np.array(self.ratios[segment])  # gathered factors: slices of the batch


def whole_seconds(theory: Theory, decision: HapDecision) -> float:
    """The program's cost as the evaluator has it, with every slice in whole units. Source: HAP,
    Section 5.1."""
    parts, data = Parts(theory, decision.ratios), theory.data
    speeds = np.array([device.flops_per_second for device in data.devices])
    total, busy = 0.0, np.zeros(parts.m)
    for i in decision.program:
        triple = data.triples[i]
        if isinstance(triple, Communication):
            total += float(busy.max()) + triple.fixed_seconds
            busy = np.zeros(parts.m)
            if triple.shared_seconds:
                share = parts.shared_by(theory.instructions[i], triple.segment)
                total += triple.shared_seconds * float(share.max())
        elif triple.fixed_flops or triple.shared_flops:
            share = np.zeros(parts.m)
            if triple.shared_flops:
                share = parts.shared_by(theory.instructions[i], triple.segment)
            busy += (triple.fixed_flops + triple.shared_flops * share) / speeds
    return total + float(busy.max())


def held(theory: Theory, decision: HapDecision) -> Held:
    """What each device holds, in whole units, of parameters (and their gradients and optimizer
    states; all of one, with its copies, that is read in several ways), and of tensors."""
    parts, program = Parts(theory, decision.ratios), theory.program
    ways: dict[str, dict[tuple[Form, bytes], Floats]] = {}
    saved = np.zeros(parts.m)
    for i in decision.program:
        kept = form_kept(theory.instructions[i])
        if theory.holding is not None and kept is not None:
            size = theory.holding.saved.get(kept[0], 0.0)
            saved += size * parts.of(*kept, theory.data.triples[i].segment)
    for run in runs(theory, decision):
        node = program.node(run.node)
        for source, form in zip(program.inputs(node), run.way.inputs, strict=True):
            if source.kind == PARAMETER:
                part, owner = (
                    parts.of(source.name, form, node.segment),
                    program.copies.get(source.name, source.name),
                )
                ways.setdefault(owner, {})[form, part.tobytes()] = part
    parameters = {
        owner: next(iter(read.values())) if len(read) == 1 else np.ones(parts.m)
        for owner, read in ways.items()
    }
    return Held(parameters, saved)


def runs(theory: Theory, decision: HapDecision) -> Iterator[Run]:
    """The operators that the program runs."""
    for i in decision.program:
        instruction = theory.instructions[i]
        if isinstance(instruction, Run):
            yield instruction
