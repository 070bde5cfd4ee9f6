"""The packaged instances of real networks: which they are, and the theories behind them.

The theory of the published size and that of the same operators on small tensors have the same
triples in the same order, so that a packaged decision can be executed: `theory_named(name,
tiny=True)`.
"""

from __future__ import annotations

from hetplan.errors import InputError
from hetplan.formulations.hap.data import Device
from hetplan.formulations.hap.experiments import NETWORK, P100, V100
from hetplan.formulations.hap.spmd.holding import holding_of
from hetplan.formulations.hap.spmd.links import ring
from hetplan.formulations.hap.spmd.networks import model, sizes, vit
from hetplan.formulations.hap.spmd.program import SingleProgram
from hetplan.formulations.hap.spmd.rules import ELEMENT_BYTES, Theory, theory_of
from hetplan.formulations.hap.spmd.segments import segmented

DEVICES = [Device(name="V100", flops_per_second=V100)] * 2 + [
    Device(name="P100", flops_per_second=P100)
] * 4
M = len(DEVICES)
# per device, where they are not 64
SAMPLES = {"bert-moe": 32, "gpt2": 8, "llama-blocks": 2}
# instance -> what it is
NETWORKS = {
    "hap-vgg19-6": "VGG19 on CIFAR-10, 64 samples per device",
    "hap-vit-6": "ViT of 12 blocks, 64 samples per device",
    "hap-vit-24-6": "ViT of 24 blocks, 64 samples per device",
    "hap-bert-base-6": "BERT-base, 64 samples per device",
    "hap-bert-moe-6": "BERT-base with 6 experts in every second block, 32 samples per device",
    "hap-gpt2-6": "GPT-2, 8 samples per device",
    "hap-llama-blocks-6": "4 blocks of Llama 7B, 2 samples per device",
    "hap-vgg19-6-segments2": "VGG19 on CIFAR-10, 64 samples per device, two segments of layers",
    "hap-vit-2blocks-6-segments2": "ViT of 2 blocks, 64 samples per device, two segments of layers",
    "hap-vgg19-6-memory": "VGG19 on CIFAR-10, 64 samples per device, 0.6 GiB on each",
    "hap-bert-moe-6-memory": "BERT-base with 6 experts in every second block, 32 samples per device, 8 GiB on each",
    "hap-gpt2-6-memory": "GPT-2, 8 samples per device, 8.25 GiB on each",
}
# GiB of each device where memory is limited: less than data parallelism and the optimum without
# limit hold
MEMORY_GIB = {"vgg19": 0.6, "bert-moe": 8.0, "gpt2": 8.25}


def program_named(name: str, *, tiny: bool = False) -> SingleProgram:
    """The single-device program behind a packaged instance, on small tensors if asked."""
    if name not in NETWORKS:
        raise InputError(
            "no such packaged network", got=name, expected=f"one of {', '.join(NETWORKS)}"
        )
    kind, _, segments = name.removeprefix("hap-").removesuffix("-memory").partition("-segments")
    kind = kind.removesuffix(f"-{M}")
    batch = M * (2 if tiny else SAMPLES.get(kind, 64))
    if kind == "vit-2blocks":
        program = vit(batch, sizes(2, tiny, M), 2 * M if tiny else 196, 768, 10)
    else:
        program = model(kind, batch, M, tiny=tiny)
    if not segments:
        return program
    # segments by the work of the published size, whatever the size asked for
    if tiny:
        at = {node.name: node.segment for node in program_named(name).nodes}
        return program.with_segments(at)
    return segmented(program, int(segments))[0]


def theory_named(name: str, *, tiny: bool = False) -> Theory:
    """Its theory on two V100 and four P100 (of small tensors, without memory)."""
    program, holding = program_named(name, tiny=tiny), None
    if name.endswith("-memory") and not tiny:
        room = MEMORY_GIB[name.removeprefix("hap-").removesuffix(f"-{M}-memory")] * 2**30
        holding = holding_of(program, [room] * M, element_bytes=ELEMENT_BYTES)
    return theory_of(program, DEVICES, ring(M, NETWORK / 8 * 1e9), holding=holding)
