"""The theories of `benchmarks/hap_theories.py`, for tests."""

from __future__ import annotations

from fakes.benchmarks import benchmark
from hetplan.formulations.hap.spmd.program import SingleProgram
from hetplan.profiling.transformer import Transformer

made = benchmark("hap_theories")
chain, residual, stages_only = made.chain, made.residual, made.stages_only
NETWORKS, theory_named = made.NETWORKS, made.theory_named
MAKERS, model, sizes = made.MAKERS, made.model, made.sizes


def gpt2(batch: int, shape: Transformer, tokens: int, vocabulary: int) -> SingleProgram:
    """A GPT-2 of that shape."""
    program: SingleProgram = made.gpt2(batch, shape, tokens, vocabulary)
    return program
