"""Built-in single-device programs: the networks of HAP's Table 1, GPT-2 and a stack of Llama blocks.

Every one is written twice in size: as published, and `tiny`, the same operators on tensors small enough to be
executed on simulated devices. Tokens and patches are marked `unsliced`: where samples can be sliced too, slicing
tokens saves nothing more.
"""

from __future__ import annotations

from collections.abc import Callable

from hetplan.errors import InputError
from hetplan.formulations.hap.spmd.program import SingleProgram

# (global batch, devices, tiny) -> program
Maker = Callable[[int, int, bool], SingleProgram]


def model(name: str, batch: int, devices: int, *, tiny: bool = False) -> SingleProgram:
    """The built-in program `name` for a global batch; the experts of BERT-MoE are as many as devices."""
    if name not in makers():
        raise InputError("unknown program", got=name, expected=f"one of {', '.join(makers())}")
    if batch < 1 or devices < 1:
        raise InputError("batch and devices", where=name, got=(batch, devices), expected="at least 1 each")
    return makers()[name](batch, devices, tiny)


def makers() -> dict[str, Maker]:
    """All of them by name."""
    from hetplan.formulations.hap.spmd.models import networks as n

    return {
        "vgg19": lambda b, m, t: n.vgg19(b, image=32, width=8 * m if t else 64, classes=10, dense=8 * m if t else 4096),
        "vit": lambda b, m, t: n.vit(b, n.sizes(12, t, m), patches=5 if t else 196, pixels=768, classes=10),
        "vit-24": lambda b, m, t: n.vit(b, n.sizes(24, t, m), patches=5 if t else 196, pixels=768, classes=10),
        "bert-base": lambda b, m, t: n.bert(b, n.sizes(12, t, m), tokens=5 if t else 128, vocabulary=6 * m if t else 30522),
        "bert-moe": lambda b, m, t: n.bert(
            b, n.sizes(12, t, m), tokens=5 if t else 128, vocabulary=6 * m if t else 30522, experts=m
        ),
        "gpt2": lambda b, m, t: n.gpt2(b, n.sizes(12, t, m), tokens=5 if t else 1024, vocabulary=6 * m if t else 50257),
        "llama-blocks": lambda b, m, t: n.llama(b, n.sizes(4, t, m, 4096, 32, 11008), tokens=5 if t else 2048),
    }
