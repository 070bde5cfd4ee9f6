"""HAP's experiments (EuroSys 2024): its models on V100, P100 and A100, by one cost model.

Speeds of V100 and P100 are those measured in the paper's artefact (fp32); the A100's is the P100's
times the ratio of their datasheets. Collectives are rings at the network's bandwidth. The batch
grows with the devices: 64 samples each, 32 for BERT-MoE (Table 1); experts as many as devices.
Memory is not limited.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evidence.papers import Row, timed
from hetplan.formulations import family
from hetplan.formulations.hap.data import Device, HapData, HapDecision
from hetplan.formulations.hap.pricing import ELEMENT_BYTES, Theory, theory_of
from hetplan.profiling.models.transformer import Transformer, transformer
from hetplan.programs.links import ring, three_steps
from hetplan.programs.networks import bert, vgg19, vit
from hetplan.programs.program import SingleProgram
from hetplan.programs.timed import Prices, Timed
from hetplan.solvers.registry import evaluate, solve
from hetplan.solvers.run import Options, Result, Run

SPEED = {"V100": 3.86e12, "P100": 2.15e12, "A100": 2.15e12 * 19.5 / 9.3}
GBIT = 10.4  # between machines (§7.1)
NO_LIMIT = 1e9  # Gbit/s of a network on which communication takes no time
RATIOS = 21  # ratios between even ones and those by speed
MACHINES = {"V100": 2, "P100": 6}  # §7.1, each with equally many GPUs
Counts = tuple[tuple[str, int], ...]
Floats = NDArray[np.float64]
# Table 1 for m devices.
NETWORKS: dict[str, Callable[[int], SingleProgram]] = {
    "vgg19": lambda m: vgg19(64 * m, 64, 7, 10, 4096),
    "vit": lambda m: vit(64 * m, shape(12), 196, 768, 10),
    "bert-base": lambda m: bert(64 * m, shape(12), 128, 30522),
    "bert-moe": lambda m: bert(32 * m, shape(12), 128, 30522, m),
}


def shape(layers: int, hidden: int = 768) -> Transformer:
    """Heads of 64, feed-forward networks four times as wide."""
    return transformer(layers, hidden, hidden // 64, 4 * hidden, vocabulary=0)


def mixed(gpus: int) -> Counts:
    """The GPUs of all `MACHINES`, of each type."""
    return ("V100", gpus // 4), ("P100", gpus - gpus // 4)


def devices(counts: Counts) -> list[Device]:
    """Every GPU."""
    return [Device(name=kind, flops_per_second=SPEED[kind]) for kind, n in counts for _ in range(n)]


def theory_on(program: SingleProgram, counts: Counts, gbit: float, machines: int) -> Theory:
    """A program's theory; GPUs of one machine share its network in an all-to-all."""
    every = devices(counts)
    return theory_of(
        program, every, ring(len(every), gbit / 8 * 1e9, sharing=max(1, len(every) // machines))
    )


def theory_on_machines(
    program: SingleProgram, counts: Counts, machines: int, inside: float
) -> Theory:
    """A program's theory where every machine is a device, as fast as its GPUs together (§3).

    Collectives take three steps (§6), of which those inside machines run at `inside` bytes/s.
    """
    gpus = sum(n for _, n in counts)
    each = gpus // machines
    every = [
        Device(name=kind, flops_per_second=each * SPEED[kind])
        for kind, n in counts
        for _ in range(n // each)
    ]
    links = three_steps(ring(machines, GBIT / 8 * 1e9), inside)
    return theory_of(program, every, links, slices=gpus)


@cache
def network(name: str, counts: Counts, gbit: float = GBIT, machines: int = 8) -> Theory:
    """A model of Table 1; all GPUs of §7.1 stand in eight machines."""
    return theory_on(NETWORKS[name](sum(n for _, n in counts)), counts, gbit, machines)


@cache
def experts(count: int, held: int) -> Theory:
    """Figure 17: BERT-MoE with tokens for `count` experts on two A100 and two P100, `held` with
    what is padded."""
    return theory_on(
        bert(8 * count, shape(12), 128, 30522, held), (("A100", 2), ("P100", 2)), GBIT, 2
    )


def solved(data: HapData, method: str) -> Result[Any]:
    """A method on an instance, to its end: a limit in seconds would make figures depend on the
    machine's load."""
    return solve(family("hap"), data, method, Run(Options(threads=1)))


@cache
def answer(
    name: str, counts: Counts, method: str, gbit: float = GBIT, machines: int = 8
) -> Result[Any]:
    """An iteration of a model by a method."""
    return solved(network(name, counts, gbit, machines).data, method)


def search_text(*results: Result[Any]) -> Row:
    """What became of HAP's A* in the alternation: that it ended, and after how many states in all
    rounds; or the message that says what was left out."""
    texts = []
    for result in results:
        states = result.details.get("states")
        ended = "ended" if states is None else f"ended, {states} states"
        texts.append(result.message.removeprefix("HAP's A*, ") or ended)
    return {"HAP's A*": " | ".join(texts)}


def over(slow: float | None, fast: float | None) -> float | None:
    """How many times as fast."""
    return None if slow is None or fast is None else slow / fast


def iterations(fixed: Row, row: Row) -> Row:
    """Figures 13 and 14: methods, and HAP over the best of the baselines that the paper compares it
    with."""
    gpus = row["GPUs"]
    counts = mixed(gpus) if fixed["mixed"] else (("P100", gpus),)
    results = {
        name: answer(
            row["model"], counts, method, row.get("Gbit/s", GBIT), fixed.get("machines", 8)
        )
        for name, method in fixed["methods"].items()
    }
    seconds: Row = {name: result.objective for name, result in results.items()}
    baselines = [seconds[name] for name in fixed["baselines"][row["model"]]]
    speed_up = {"ours, speed-up": over(min(filter(None, baselines), default=None), seconds["HAP"])}
    return seconds | speed_up | search_text(results["HAP"])


def kept(data: HapData, *without: str) -> HapData:
    """The instance without triples whose instructions have such words."""
    triples = [t for t in data.triples if not any(word in t.instruction for word in without)]
    return data.model_copy(update={"triples": triples})


def shares(fixed: Row, row: Row) -> Row:
    """Figure 2: a Transformer whose weights are all sharded (their gradients need no collectives)
    on two P100 and two A100, its program at ratios by speed, at even ones and at the best.

    The last columns change one assumption: all communication overlaps with computing, so that an
    iteration takes the longer of both. Computing takes what a network without limits leaves.
    """
    program = bert(fixed["batch"], shape(fixed["layers"], row["hidden"]), 128, fixed["vocabulary"])
    counts = (("P100", 2), ("A100", 2))
    data, computing = (
        kept(theory_on(program, counts, gbit, 2).data, "All-Reduce(", "weight")
        for gbit in (GBIT, NO_LIMIT)
    )
    best = solved(data, "exact")
    assert best.decision is not None, "sliced operators have a program"
    decided = best.decision.program
    speeds = np.array([device.flops_per_second for device in data.devices])
    even, by_speed = np.full(4, 0.25), speeds / speeds.sum()

    def seconds(instance: HapData, ratios: Floats) -> float:
        """An iteration of the program on an instance."""
        decision = HapDecision(program=decided, ratios=[ratios.tolist()])
        objective = evaluate(family("hap"), instance, decision).objective
        assert objective is not None, "the ratios are a decision"
        return objective

    overlapped = {}
    for share in np.linspace(0.0, 1.0, RATIOS).tolist():
        ratios = (1.0 - share) * even + share * by_speed
        whole, compute = seconds(data, ratios), seconds(computing, ratios)
        overlapped[share] = max(compute, whole - compute)
    sweet = min(overlapped, key=lambda share: overlapped[share])
    return {
        "CP, s": seconds(data, by_speed),
        "EV, s": seconds(data, even),
        "optimum, s": best.objective,
        "CP overlapped, s": overlapped[1.0],
        "EV overlapped, s": overlapped[0.0],
        "best overlapped, s": overlapped[sweet],
        "of the way to CP": sweet,
    }


def fewer_samples(fixed: Row, row: Row) -> Row:
    """Figure 14 at other batches and bandwidths, without the alternation."""
    counts, gpus = (("P100", row["GPUs"]),), row["GPUs"]
    samples = row["samples per GPU"] * gpus
    networks = {
        "vit": lambda: vit(samples, shape(12), 196, 768, 10),
        "bert-base": lambda: bert(samples, shape(12), 128, 30522),
    }
    data = theory_on(networks[row["model"]](), counts, row["Gbit/s"], 8).data
    even, joint = (solved(data, method) for method in ("dp-even", "exact"))
    speed_up = over(even.objective, joint.objective)
    return {"DP-EV, s": even.objective, "joint, s": joint.objective, "speed-up": speed_up}


def virtual_devices(fixed: Row, row: Row) -> Row:
    """Figures 13 and 14 where every machine is a device, and nothing takes time inside machines."""
    name, gpus = row["model"], row["GPUs"]
    counts, machines = (mixed(gpus), 8) if row["cluster"] == "mixed" else ((("P100", gpus),), 4)
    data = theory_on_machines(NETWORKS[name](gpus), counts, machines, np.inf).data
    baselines = ("deepspeed",) if name == "bert-moe" else ("dp-even", "dp-proportional")
    seconds = [solved(data, method).objective for method in baselines]
    best, hap = min(filter(None, seconds), default=None), solved(data, "paper").objective
    return {"best baseline, s": best, "HAP, s": hap, "ours, speed-up": over(best, hap)}


def gathers(fixed: Row, row: Row) -> Row:
    """Figure 4: GB/s of both ways to gather 4 MB whose largest slice is `share`."""
    links = ring(4, fixed["gbit"] / 8 * 1e9, fixed["latency"])
    prices = {how: links.price(how, 4e6) for how in ("All-Gather", "Grouped-Broadcast")}
    return {
        how: 4e6 / (price.fixed + price.shared * row["share"]) / 1e9
        for how, price in prices.items()
    }


def ablation(fixed: Row, row: Row) -> Row:
    """Figure 15: speeds over DP-EV with the synthesizer at even ratios (Q), with the load balancer
    (B), with grouped broadcasts and sufficient factors (C)."""
    data = network(row["model"], mixed(row["GPUs"])).data
    plain = kept(data, "Grouped-Broadcast", "factors")
    base = solved(plain, "dp-even").objective
    cases = {"Q": (plain, "deepspeed"), "Q + B": (plain, "paper"), "Q + B + C": (data, "paper")}
    results = {name: solved(*case) for name, case in cases.items()}
    speeds: Row = {name: over(base, result.objective) for name, result in results.items()}
    return speeds | search_text(results["Q + B"], results["Q + B + C"])


def concurrent(fixed: Row, row: Row) -> Row:
    """Figure 16: HAP on all GPUs against a model on each type, in samples per second together.

    Further columns change one assumption each: every machine is a device, without or with time for
    what its GPUs pass to each other; communication takes no time; the types train the model of all
    GPUs, with as many experts.
    """
    name, gpus = row["model"], row["GPUs"]
    all_gpus = mixed(gpus)
    # the GPUs of each model that is trained, and the machines that they stand in
    groups = [(all_gpus, 8), *(((each,), MACHINES[each[0]]) for each in all_gpus)]

    def percent(solve_group: Callable[[Counts, int], Result[Any]]) -> float:
        """The samples per second on all GPUs in % of those of the types together."""
        rates = [
            sum(n for _, n in counts) / (solve_group(counts, machines).objective or np.inf)
            for counts, machines in groups
        ]
        return 100 * rates[0] / sum(rates[1:])

    def on_gpus(counts: Counts, machines: int) -> Result[Any]:
        return answer(name, counts, "paper", machines=machines)

    def on_machines(inside: float) -> Callable[[Counts, int], Result[Any]]:
        def solve_group(counts: Counts, machines: int) -> Result[Any]:
            program = NETWORKS[name](sum(n for _, n in counts))
            return solved(theory_on_machines(program, counts, machines, inside).data, "paper")

        return solve_group

    def without_network(counts: Counts, machines: int) -> Result[Any]:
        return answer(name, counts, "paper", NO_LIMIT, machines)

    def with_all_experts(counts: Counts, machines: int) -> Result[Any]:
        program = bert(32 * sum(n for _, n in counts), shape(12), 128, 30522, gpus)
        return solved(theory_on(program, counts, GBIT, machines).data, "paper")

    made: Row = {
        "ours, %": percent(on_gpus),
        "machines as devices, %": percent(on_machines(np.inf)),
        f"with {fixed['inside']:g} GB/s inside, %": percent(on_machines(fixed["inside"] * 1e9)),
        "no network, %": percent(without_network),
    }
    if name == "bert-moe":
        made["equal experts, %"] = percent(with_all_experts)
    return made | search_text(*(on_gpus(counts, machines) for counts, machines in groups))


def uneven_experts(fixed: Row, row: Row) -> Row:
    """Figure 17: against DeepSpeed, which pads the experts to a multiple of the devices."""
    count = row["experts"]
    hap = solved(experts(count, count).data, "paper")
    padded = solved(experts(count, -(-count // 4) * 4).data, "deepspeed")
    seconds: Row = {"HAP, s": hap.objective, "DeepSpeed, s": padded.objective}
    speed_up = {"ours, speed-up": over(padded.objective, hap.objective)}
    return seconds | speed_up | search_text(hap) | {"DeepSpeed": padded.message or "ended"}


def accuracy(fixed: Row, row: Row) -> Row:
    """Figure 18: estimates against a replay of both passes in whole units, over variants of
    BERT."""
    pairs, results = [], list[Result[Any]]()
    counts = mixed(8)
    speeds = np.array([device.flops_per_second for device in devices(counts)])
    for layers, hidden, tokens in fixed["variants"]:
        theory = theory_on(bert(512, shape(layers, hidden), tokens, 30522), counts, GBIT, 8)
        result = solved(theory.data, "paper")
        results.append(result)
        assert result.decision is not None, "data parallelism is a program"
        prices = Prices(speeds, {}, ring(8, GBIT / 8 * 1e9), ELEMENT_BYTES)
        stages = Timed(theory.decided(result.decision), prices).run(last=True)
        pairs.append((result.objective, sum(s.compute.max() + s.seconds for s in stages)))
    pearson: Row = {"ours, Pearson": float(np.corrcoef(np.array(pairs).T)[0, 1])}
    return pearson | {"variants": len(pairs)} | search_text(*results)


def synthesis(fixed: Row, row: Row) -> Row:
    """Figure 19: ViT by layers and by devices."""
    m = row["GPUs"]
    program = vit(64 * m, shape(row["layers"]), 196, 768, 10)
    return timed("hap", theory_on(program, mixed(m), GBIT, 8).data, fixed["methods"])
