"""Built-in single-device programs: the networks of HAP's Table 1, GPT-2 and a stack of Llama
blocks.

Every one is written twice in size: as published, and `tiny`, the same operators on tensors small
enough to be executed on simulated devices. Tokens and patches are marked `unsliced`: where samples
can be sliced too, slicing tokens saves nothing more.
"""

from __future__ import annotations

from collections.abc import Callable

from hetplan.errors import InputError
from hetplan.formulations.hap.spmd.program import SingleProgram

# (global batch, devices, tiny) -> program
Maker = Callable[[int, int, bool], SingleProgram]


def model(name: str, batch: int, devices: int, *, tiny: bool = False) -> SingleProgram:
    """The built-in program `name` for a global batch; the experts of BERT-MoE are as many as
    devices."""
    if name not in makers():
        raise InputError("unknown program", got=name, expected=f"one of {', '.join(makers())}")
    if batch < 1 or devices < 1:
        raise InputError(
            "batch and devices", where=name, got=(batch, devices), expected="at least 1 each"
        )
    return makers()[name](batch, devices, tiny)


def makers() -> dict[str, Maker]:
    """All of them by name."""
    from hetplan.formulations.hap.spmd.models import networks as n

    def tokens(published: int, tiny: bool, devices: int) -> int:
        return 2 * devices if tiny else published

    return {
        "vgg19": lambda b, m, t: n.vgg19(b, m if t else 64, 7, 10, m if t else 4096),
        "vit": lambda b, m, t: n.vit(b, n.sizes(12, t, m), tokens(196, t, m), 768, 10),
        "vit-24": lambda b, m, t: n.vit(b, n.sizes(24, t, m), tokens(196, t, m), 768, 10),
        "bert-base": lambda b, m, t: n.bert(
            b, n.sizes(12, t, m), tokens(128, t, m), 6 * m if t else 30522
        ),
        "bert-moe": lambda b, m, t: n.bert(
            b, n.sizes(12, t, m), tokens(128, t, m), 6 * m if t else 30522, m
        ),
        "gpt2": lambda b, m, t: n.gpt2(
            b, n.sizes(12, t, m), tokens(1024, t, m), 6 * m if t else 50257
        ),
        "llama-blocks": lambda b, m, t: n.llama(
            b, n.sizes(4, t, m, 4096, 32, 11008), tokens(2048, t, m)
        ),
    }
