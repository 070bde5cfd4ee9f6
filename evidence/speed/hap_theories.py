"""Theories of the packaged instances: made-up ones of the shape that real models give (chains,
residual networks, programs of which the ratios alone are asked for), and real networks.

Forms of a tensor follow HAP's names: Identity (replicated), All-Gather(0) and All-Gather(1)
(sharded on the batch or the hidden dimension), All-Reduce (partial sums); Unsynced stands for a
batch shard whose weight gradient still has to be reduced.

The theory of a network of published size and that of the same operators on small tensors have the
same triples in the same order, so that a packaged decision can be executed:
`theory_named(name, tiny=True)`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from evidence.papers.hap import GBIT, devices
from hetplan.errors import InputError
from hetplan.formulations.hap.data import Communication, Compute, Device, HapData, Triple
from hetplan.formulations.hap.pose import segmented
from hetplan.formulations.hap.pricing import ELEMENT_BYTES, Theory, theory_of
from hetplan.profiling.models.transformer import Transformer, transformer
from hetplan.programs.holding import holding_of
from hetplan.programs.links import ring
from hetplan.programs.networks import (
    PUBLISHED,
    Blocks,
    bert,
    language_model,
    published_layers,
    vgg19,
    vit,
)
from hetplan.programs.program import SingleProgram, Writer

WHOLE, BATCH, HIDDEN, PARTIAL, UNSYNCED = (
    "Identity",
    "All-Gather(0)",
    "All-Gather(1)",
    "All-Reduce",
    "Unsynced",
)
# Effective FLOP/s of an A100, a V100, a T4 and a P100, for made-up clusters.
SPEEDS = (6.2e13, 3.1e13, 1.4e13, 0.9e13)


def cluster(types: int, each: int = 4) -> list[Device]:
    """`each` devices of the first `types` speeds."""
    return [
        Device(name=f"type{t}-{i}", flops_per_second=SPEEDS[t])
        for t in range(types)
        for i in range(each)
    ]


class _Writer:
    """Collects triples; draws sizes around those of a Transformer layer on a 10-100 Gbit/s
    network."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.triples: list[Triple] = []

    def near(self, size: float) -> float:
        """A size within a factor of two."""
        return float(size * 2 ** self.draw.uniform(-1, 1))

    def compute(
        self,
        name: str,
        pre: Sequence[str],
        post: str,
        *,
        fixed: float = 0.0,
        shared: float = 0.0,
        segment: int = 0,
    ) -> None:
        """One compute triple."""
        self.triples.append(
            Compute(
                kind="compute", instruction=name, pre=list(pre), post=[post],
                segment=segment, fixed_flops=fixed, shared_flops=shared,
            )
        )  # fmt: skip

    def comm(
        self, name: str, pre: str, post: str, *, fixed: float, shared: float = 0.0, segment: int = 0
    ) -> None:
        """One communication triple."""
        self.triples.append(
            Communication(
                kind="comm", instruction=name, pre=[pre], post=[post],
                segment=segment, fixed_seconds=fixed, shared_seconds=shared,
            )
        )  # fmt: skip

    def matmul(self, before: str, after: str) -> None:
        """Batch, hidden and reduction parallelism, or replicated; the batch shard pays for its
        gradient."""
        flops, gradient = self.near(4e11), self.near(4e-3)
        self.compute(
            f"MatMul {after} 0", [f"{before}|{BATCH}"], f"{after}|{UNSYNCED}", shared=flops
        )
        self.comm(f"Sync {after}", f"{after}|{UNSYNCED}", f"{after}|{BATCH}", fixed=gradient)
        self.compute(f"MatMul {after} r", [f"{before}|{WHOLE}"], f"{after}|{WHOLE}", fixed=flops)
        self.compute(f"MatMul {after} 1", [f"{before}|{WHOLE}"], f"{after}|{HIDDEN}", shared=flops)
        self.compute(
            f"MatMul {after} k", [f"{before}|{HIDDEN}"], f"{after}|{PARTIAL}", shared=flops
        )

    def local(self, before: str, after: str, forms: Sequence[str]) -> None:
        """An operator that works on any of `forms` alike."""
        flops = self.near(2e9)
        for form in forms:
            whole = form == WHOLE
            self.compute(
                f"Map {after} {form}", [f"{before}|{form}"], f"{after}|{form}",
                fixed=flops if whole else 0.0, shared=0.0 if whole else flops,
            )  # fmt: skip

    def join(self, left: str, right: str, after: str) -> None:
        """A sum of two tensors in equal form."""
        flops = self.near(5e8)
        for form in (WHOLE, BATCH, HIDDEN, PARTIAL):
            whole = form in (WHOLE, PARTIAL)
            self.compute(
                f"Add {after} {form}", [f"{left}|{form}", f"{right}|{form}"], f"{after}|{form}",
                fixed=flops if whole else 0.0, shared=0.0 if whole else flops,
            )  # fmt: skip

    def collectives(self, tensor: str, *, reduce: bool = True, gather: bool = True) -> None:
        """Ways from one form of `tensor` to another."""
        size = self.near(2e-3)
        if reduce:
            self.comm(
                f"All-Reduce {tensor}",
                f"{tensor}|{PARTIAL}",
                f"{tensor}|{WHOLE}",
                fixed=2 * size + 2e-5,
            )
            self.comm(
                f"Reduce-Scatter {tensor}",
                f"{tensor}|{PARTIAL}",
                f"{tensor}|{BATCH}",
                fixed=2e-5,
                shared=2 * size,
            )
        if gather:
            self.comm(
                f"All-Gather {tensor}",
                f"{tensor}|{BATCH}",
                f"{tensor}|{WHOLE}",
                fixed=2e-5,
                shared=2 * size,
            )
            self.compute(f"Slice {tensor}", [f"{tensor}|{WHOLE}"], f"{tensor}|{BATCH}")


def chain(layers: int, types: int, seed: int = 0) -> HapData:
    """`layers` x 5 operators in a row, about five triples each: norm, matmul, map, matmul, map."""
    write = _Writer(seed)
    write.compute("Placeholder-Shard(0)", [], f"e0|{BATCH}")
    write.compute("Placeholder", [], f"e0|{WHOLE}")
    for i in range(5 * layers):
        before, after = f"e{i}", f"e{i + 1}"
        if i % 5 in (1, 3):
            write.matmul(before, after)
        else:
            forms = (WHOLE, BATCH) if i % 5 == 0 else (WHOLE, BATCH, HIDDEN)
            write.local(before, after, forms)
        write.collectives(after, reduce=i % 5 in (1, 3), gather=i % 5 in (0, 2, 4))
    last = f"e{5 * layers}"
    for form in (WHOLE, BATCH):
        write.compute(f"Loss {form}", [f"{last}|{form}"], "loss|All-Reduce", shared=1e6)
    return HapData(devices=cluster(types), triples=write.triples, goal="loss|All-Reduce")


def residual(blocks: int, types: int, seed: int = 0, operators: int = 60) -> HapData:
    """Blocks x + f(x) of `operators` operators with at most three live tensors: the residual stream
    and a gate of two short branches in the middle of f."""
    write = _Writer(seed)
    write.compute("Placeholder-Shard(0)", [], f"x0|{BATCH}")
    write.compute("Placeholder", [], f"x0|{WHOLE}")
    for block in range(blocks):
        stream, name = f"x{block}", f"b{block}"
        current = stream
        for i in range(operators - 4):
            after = f"{name}.{i}"
            if i == operators // 2:
                write.local(current, f"{name}.u", (WHOLE, BATCH, HIDDEN))
                write.local(current, f"{name}.w", (WHOLE, BATCH, HIDDEN))
                write.local(f"{name}.w", f"{name}.s", (WHOLE, BATCH, HIDDEN))
                write.join(f"{name}.u", f"{name}.s", after)
            elif i % 6 in (1, 4):
                write.matmul(current, after)
                write.collectives(after, gather=False)
            else:
                write.local(
                    current, after, (WHOLE, BATCH) if i % 6 == 0 else (WHOLE, BATCH, HIDDEN)
                )
                if i % 6 in (0, 3, 5):
                    write.collectives(after, reduce=False)
            current = after
        write.join(stream, current, f"x{block + 1}")
        write.collectives(f"x{block + 1}", reduce=False)
    for form in (WHOLE, BATCH):
        write.compute(f"Loss {form}", [f"x{blocks}|{form}"], "loss|All-Reduce", shared=1e6)
    return HapData(devices=cluster(types), triples=write.triples, goal="loss|All-Reduce")


def stages_only(
    devices: int, stages: int, types: int, seed: int = 0, *, replicated: bool = True
) -> HapData:
    """A given program of `stages` stages, for the ratio problem alone."""
    write = _Writer(seed)
    for s in range(stages):
        before = [f"c{s - 1}|{BATCH}"] if s else []
        fixed = write.near(2e9) if replicated and s % 3 == 0 else 0.0
        write.compute(
            f"MatMul {s}", before, f"t{s}|{PARTIAL}", shared=write.near(4e11), fixed=fixed
        )
        write.comm(
            f"Reduce-Scatter {s}",
            f"t{s}|{PARTIAL}",
            f"c{s}|{BATCH}",
            fixed=2e-5,
            shared=write.near(2e-3),
        )
    speeds = [SPEEDS[t % 4] * (1 + t // 4 / 10) for t in range(types)]
    return HapData(
        devices=[Device(name=f"d{j}", flops_per_second=speeds[j % types]) for j in range(devices)],
        triples=write.triples,
        goal=f"c{stages - 1}|{BATCH}",
        program=list(range(2 * stages)),
    )


def sizes(
    layers: int, tiny: bool, devices: int, hidden: int = 768, heads: int = 12, feed: int = 3072
) -> Transformer:
    """As published; or as small as dimensions that every device shall have a part of can be."""
    if tiny:
        heads, each = max(2, devices), devices + devices % 2
        hidden, feed = heads * each, 2 * heads
    return transformer(layers, hidden, heads, feed, vocabulary=0)


def gpt2(batch: int, t: Transformer, tokens: int, vocabulary: int) -> SingleProgram:
    """Norm first, causal, the head tied to the embedding."""
    t = replace(t, vocabulary=vocabulary, positions=tokens)
    blocks = Blocks(Writer("gpt2"), t, PUBLISHED, causal=True)
    return language_model(blocks, batch, tokens, published_layers(t))


def llama(batch: int, t: Transformer, tokens: int) -> SingleProgram:
    """Blocks alone, on embedded tokens, with a loss over 16 classes behind them in place of the
    head."""
    w = Writer("llama-blocks")
    t = replace(
        t, gated=True, norm="rms", rotary=True, attention_bias=False, output_bias=False,
        feed_forward_bias=False,
    )  # fmt: skip
    names = PUBLISHED | {"attention": "b{i}", "scores": "b{i}.heads", "feed": "b{i}"}
    x = w.placeholder("embedded", (batch, tokens, t.hidden), unsliced=(1,))
    labels = w.placeholder("labels", (batch, tokens), below=16)
    x = Blocks(w, t, names, causal=True).stack(x, published_layers(t))
    return w.loss(w.linear("classify", x, "bsh,ch->bsc", (16, t.hidden)), labels)


def _tokens(published: int, tiny: bool, devices: int) -> int:
    return 2 * devices if tiny else published


# (global batch, devices, tiny) -> program
MAKERS: dict[str, Callable[[int, int, bool], SingleProgram]] = {
    "vgg19": lambda b, m, t: vgg19(b, m if t else 64, 7, 10, m if t else 4096),
    "vit": lambda b, m, t: vit(b, sizes(12, t, m), _tokens(196, t, m), 768, 10),
    "vit-24": lambda b, m, t: vit(b, sizes(24, t, m), _tokens(196, t, m), 768, 10),
    "bert-base": lambda b, m, t: bert(
        b, sizes(12, t, m), _tokens(128, t, m), 6 * m if t else 30522
    ),
    "bert-moe": lambda b, m, t: bert(
        b, sizes(12, t, m), _tokens(128, t, m), 6 * m if t else 30522, m
    ),
    "gpt2": lambda b, m, t: gpt2(b, sizes(12, t, m), _tokens(1024, t, m), 6 * m if t else 50257),
    "llama-blocks": lambda b, m, t: llama(b, sizes(4, t, m, 4096, 32, 11008), _tokens(2048, t, m)),
}


def model(name: str, batch: int, devices: int, *, tiny: bool = False) -> SingleProgram:
    """The built-in program `name` for a global batch; the experts of BERT-MoE are as many as
    devices."""
    if name not in MAKERS:
        raise InputError("unknown program", got=name, expected=f"one of {', '.join(MAKERS)}")
    if batch < 1 or devices < 1:
        got = (batch, devices)
        raise InputError("batch and devices", where=name, got=got, expected="at least 1 each")
    return MAKERS[name](batch, devices, tiny)


LIBRARY_DEVICES = devices((("V100", 2), ("P100", 4)))
LIBRARY_COUNT = len(LIBRARY_DEVICES)
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
    "hap-bert-moe-6-memory": "BERT-base with 6 experts in every second block, 32 samples "
    "per device, 8 GiB on each",
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
    kind = kind.removesuffix(f"-{LIBRARY_COUNT}")
    batch = LIBRARY_COUNT * (2 if tiny else SAMPLES.get(kind, 64))
    if kind == "vit-2blocks":
        program = vit(
            batch, sizes(2, tiny, LIBRARY_COUNT), 2 * LIBRARY_COUNT if tiny else 196, 768, 10
        )
    else:
        program = model(kind, batch, LIBRARY_COUNT, tiny=tiny)
    if not segments:
        return program
    # segments by the work of the published size, whatever the size asked for
    if tiny:
        at = {node.name: node.segment for node in program_named(name).nodes}
        return program.with_segments(at)
    return segmented(program, int(segments))


def theory_named(name: str, *, tiny: bool = False) -> Theory:
    """Its theory on two V100 and four P100 (of small tensors, without memory)."""
    program, links = program_named(name, tiny=tiny), ring(LIBRARY_COUNT, GBIT / 8 * 1e9)
    if tiny or not name.endswith("-memory"):
        return theory_of(program, LIBRARY_DEVICES, links)
    network = name.removeprefix("hap-").removesuffix(f"-{LIBRARY_COUNT}-memory")
    return theory_of(
        program,
        LIBRARY_DEVICES,
        links,
        holding=holding_of(program, element_bytes=ELEMENT_BYTES),
        device_bytes=[MEMORY_GIB[network] * 2**30] * LIBRARY_COUNT,
    )
