"""The replay of plans with further degrees: against the plain replay on one rank's part of the
model, against figures worked by hand, and against what the search says that devices hold."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from fakes.workloads import BARE, cluster
from hetplan.errors import InputError, UnsupportedError
from hetplan.formulations.astra.search.engine import search
from hetplan.formulations.astra.search.pool import homogeneous
from hetplan.formulations.astra.search.pricing import EMBEDDING, HEAD, Priced, iteration_parts
from hetplan.formulations.astra.search.result import Job
from hetplan.formulations.astra.search.space import Space, strategies
from hetplan.planner.astra import PoolProblem, least_seconds, plan_of
from hetplan.plans.degrees import Degrees
from hetplan.plans.making import new_plan
from hetplan.plans.plan import Plan
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.transformer import Cut, Experts
from hetplan.profiling.models.zoo import llama, text_model
from hetplan.profiling.profiles.predict import predict
from hetplan.profiling.rates.times import Rates, operator_time
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.chains import Replay, Settings
from hetplan.replays.degree_checks import unsupported
from hetplan.replays.degrees import DegreeCosts, zero_costs
from hetplan.replays.facts import expert_params_of, model_facts
from hetplan.replays.offers import offers_of_cluster
from hetplan.replays.overlap import uncovered
from hetplan.replays.replay import replay
from hetplan.replays.simulator.tasks import Kind
from plain_replay import block_waits, host_update, seconds_of, weight_share
from present import present

BLOCKS, BATCH = 6, 16
NODES = [
    {
        "count": 2, "devices": 4, "device": "T4", "intra_node_gbit_per_s": 140,
        "network_gbit_per_s": 40,
    }
]  # fmt: skip


@cache
def workload(experts: bool = False, batch: int = BATCH) -> Workload:
    """A small model in fp16 on two nodes of four T4, whose links nobody has measured: they are
    faster than those of a PCIe slot."""
    mixture = Experts(count=4, active=2) if experts else None
    shape = llama(BLOCKS, 512, 8, 1024, kv_heads=4, experts=mixture)
    model = load_model(text_model("tiny", "test", 256, shape))
    return make_workload(model, cluster(nodes=NODES), batch, stack=BARE)


def plan(
    degrees: Degrees | None,
    *,
    pp: int = 2,
    dp: int = 2,
    tp: int = 1,
    on: Workload | None = None,
    samples: int = 1,
    **more: Any,
) -> Plan:
    """Like replicas in Megatron's order of ranks: tensor, context, replica, stage."""
    on, cp = on or workload(), degrees.context if degrees else 1
    ends = [0, *(1 + BLOCKS * (s + 1) // pp for s in range(pp - 1)), BLOCKS + 2]

    def devices(i: int, s: int) -> list[list[int]]:
        first = (s * dp + i) * cp * tp
        return [list(range(first + g * tp, first + (g + 1) * tp)) for g in range(cp)]

    replicas = [
        {
            "stages": [
                {
                    "layers": [(ends[s], ends[s + 1])], "devices": devices(i, s),
                    "row_shares": [1.0] * cp, "tensor_shares": [1.0] * tp,
                }
                for s in range(pp)
            ],
            "micro_batches": [{"count": on.global_batch // (dp * samples), "samples": samples}],
        }
        for i in range(dp)
    ]  # fmt: skip
    return new_plan(on, replicas, degrees=degrees, **more)


def cut_of(on: Workload, made: Plan) -> Cut:
    """One rank's part of the layers of a plan with further degrees."""
    degrees, tensor = made.further, len(made.replicas[0].stages[0].tensor_shares)
    own = degrees.expert_tensor if present(on.model.spec.shape).experts else tensor
    return Cut(degrees.context, degrees.expert, tensor // own)


COMPUTING: dict[Any, tuple[float, float, float]] = {}  # what `computing` has said


def computing(on: Workload, made: Plan) -> tuple[float, float, float]:
    """Seconds of a block's passes on one rank, and of attention's core in the forward pass."""
    degrees, samples = made.further, made.replicas[0].micro_batches[0].samples
    tensor, cut = len(made.replicas[0].stages[0].tensor_shares), cut_of(on, made)
    key = on.model.name, on.model.spec.shape, cut, samples, tensor, degrees.sequence_parallel
    if key not in COMPUTING:
        COMPUTING[key] = computed(on, cut, samples, tensor, degrees.sequence_parallel)
    return COMPUTING[key]


def computed(
    on: Workload, cut: Cut, samples: int, tensor: int, sequence_parallel: bool
) -> tuple[float, float, float]:
    """The same from what it depends on."""
    layers = divided(on, cut)
    stack = replace(on.stack, sequence_parallel=sequence_parallel)
    (table,) = predict(
        replace(on.model, layers=layers), on.cluster, micro_batches=[samples],
        tensor_degrees=[tensor], stack=stack,
    ).tables  # fmt: skip
    rates = Rates("T4", on.cluster.specs["T4"], on.precision, stack)
    core = [op for op in layers[1].operators if op.name in ("scores", "softmax", "context")]
    seconds = sum(operator_time(op, rates, samples, tensor).forward for op in core)
    return table.forward_seconds[1], table.backward_seconds[1], seconds


def waits(on: Workload, made: Plan) -> tuple[float, ...]:
    """What a block waits for, by the plain replay."""
    samples = made.replicas[0].micro_batches[0].samples
    return block_waits(on, made, samples, computing(on, made))


SHARES: dict[Any, float] = {}  # what `weights_of` has found


def weights_of(on: Workload, made: Plan) -> float:
    """Seconds that a block's pass of weights computes on one rank."""
    samples = made.replicas[0].micro_batches[0].samples
    tensor, cut = len(made.replicas[0].stages[0].tensor_shares), cut_of(on, made)
    key = on.model.spec.shape, cut, samples, tensor, made.further.sequence_parallel
    if key not in SHARES:
        stack = replace(on.stack, sequence_parallel=made.further.sequence_parallel)
        rates = Rates("T4", on.cluster.specs["T4"], on.precision, stack)
        SHARES[key] = weight_share(divided(on, cut)[1], rates, samples, tensor)
    return SHARES[key] * computing(on, made)[1]


def split_waits(on: Workload, made: Plan) -> tuple[float, ...]:
    """What a block waits for in a forward pass and in the two parts of a backward pass, by the
    plain replay."""
    samples = made.replicas[0].micro_batches[0].samples
    return block_waits(on, made, samples, computing(on, made), weights_of(on, made))


EVERY: list[dict[str, Any]] = [
    {"tp": tp, "dp": dp, "zero": zero, "samples": samples, "degrees": degrees}
    for tp, cp, dp, zero, samples in product((1, 2), (1, 2, 4), (1, 2, 4), (0, 3), (1, 2))
    for degrees in (
        Degrees(context=cp, expert_tensor=tp),
        Degrees(context=cp, exchange="all-to-all", expert_tensor=1, sequence_parallel=tp > 1),
        Degrees(context=cp, expert=2, expert_tensor=1, shard_groups=2 if zero == 3 else 1),
        Degrees(context=cp, expert=4, expert_tensor=tp, sequence_parallel=tp > 1),
    )
    if tp * cp * dp <= 8 and tp * cp * dp % (degrees.expert * degrees.expert_tensor) == 0
    if cp * dp % degrees.shard_groups == 0
]


@pytest.mark.parametrize("experts", [False, True])
def test_a_block_waits_as_long_as_the_plain_replay_says(experts: bool) -> None:
    """Every combination of degrees on a pipeline of one stage."""
    on, seen, some_take_longer = workload(experts), set(), False
    for given in EVERY:
        if given["degrees"].expert > 1 and not experts:
            continue
        made = plan(on=on, pp=1, **given)
        try:
            zero = zero_costs(made, on)
        except InputError:
            continue  # ranks with the same experts that are not whole groups
        if zero is None:
            continue
        assert isinstance(zero.costs, DegreeCosts)
        found, expected = zero.costs.waits("T4", given["samples"]), waits(on, made)
        assert found == pytest.approx(expected, rel=1e-9), given
        in_parts = zero.costs.split_waits("T4", given["samples"])
        assert in_parts == pytest.approx(split_waits(on, made)[1:], rel=1e-9), given
        stage, samples = made.replicas[0].stages[0], given["samples"]
        added = zero.costs.added_seconds(stage, (1, 1 + BLOCKS), samples)
        longer = BLOCKS * (sum(split_waits(on, made)[1:]) - expected[1])
        assert added == pytest.approx(longer, rel=1e-6, abs=1e-12), given
        some_take_longer |= added > 1e-6
        seen.add(found)
    assert len(seen) > (40 if experts else 20) and some_take_longer


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize(("tp", "dp", "samples"), [(1, 2, 2), (2, 2, 1), (2, 1, 1)])
def test_degrees_of_one_change_nothing(
    zero: int, mode: Any, tp: int, dp: int, samples: int
) -> None:
    """An overlap of offloading where nothing is offloaded makes a block that says nothing."""
    shape: dict[str, Any] = {"tp": tp, "dp": dp, "samples": samples}
    shape |= {"zero": zero, "recomputation": mode}
    without = replay(plan(None, **shape), workload())
    for degrees in (Degrees(), Degrees(expert_tensor=tp, overlap=["offload"])):
        same = replay(plan(degrees, **shape), workload())
        assert same.seconds == pytest.approx(without.seconds, rel=1e-12)
        assert same.peak_bytes == pytest.approx(without.peak_bytes, rel=1e-12)


@pytest.mark.parametrize("exchange", ["ring", "all-to-all"])
@pytest.mark.parametrize(("tp", "dp", "pp", "zero"), [(1, 2, 2, 0), (2, 1, 2, 1), (1, 1, 4, 0)])
def test_context_ranks_replay_as_row_groups_of_shorter_samples(
    exchange: Any, tp: int, dp: int, pp: int, zero: int
) -> None:
    """Two ranks with half the tokens each are two row groups of twice the samples, half as long, on
    a model whose blocks see all keys and wait for the exchange."""
    on, degrees = workload(), Degrees(context=2, exchange=exchange, expert_tensor=tp)
    made = plan(degrees, on=on, tp=tp, dp=dp, pp=pp, zero=zero)
    facts = model_facts(on.model).divided(Cut(context=2))
    halves = replace(on.model, layers=(facts.embedding, *facts.blocks, facts.head))
    profile = predict(
        halves, on.cluster, micro_batches=[1], tensor_degrees=[tp], stack=on.stack
    )  # fmt: skip
    there, back = waits(on, made)
    assert there > 0 and back > there * (0.99 if exchange == "all-to-all" else 1.5)
    (table,) = (t for t in profile.tables)
    longer = {
        name: [x + more * (0 < l <= BLOCKS) for l, x in enumerate(getattr(table, name))]
        for name, more in (("forward_seconds", there), ("backward_seconds", back))
    }
    own = profile.model_copy(update={"tables": [table.model_copy(update=longer)]})
    twice = replace(on, model=halves, profile=own, global_batch=2 * BATCH)
    batches = {"count": BATCH // dp, "samples": 2}
    replicas = [
        {**r.model_dump(), "micro_batches": [batches]}
        for r in plan(degrees, on=on, tp=tp, dp=dp, pp=pp).replicas
    ]
    again = new_plan(twice, replicas, zero=zero)
    # the plain replay spends host and tensor ranks' seconds on the pass with its exchange
    expected = seconds_of(again, twice)
    assert replay(made, on).seconds == pytest.approx(expected, rel=1e-9 if tp == 1 else 1e-3)
    assert replay(made, on).seconds < replay(plan(None, dp=dp, pp=pp, tp=tp), on).seconds


@pytest.mark.parametrize(
    ("degrees", "shape"),
    [
        (Degrees(context=2), {}),
        (Degrees(context=2, exchange="all-to-all", sequence_parallel=True), {"tp": 2, "dp": 1}),
        (Degrees(expert=2), {"on": workload(experts=True)}),
        (Degrees(overlap=["offload"]), {"dp": 4, "zero": 3}),
    ],
)
def test_exchanges_are_in_passes_of_inputs_and_scattering_in_those_of_weights(
    degrees: Degrees, shape: dict[str, Any]
) -> None:
    """Of a stage with three blocks, under ZB-H1, beside 1F1B."""
    on = shape.get("on", workload())
    split = plan(degrees, schedule="zb-h1", **shape)
    _, inputs, weights = split_waits(on, split)
    assert inputs > 0 and (weights > 0) == (split.zero == 3)
    spent: dict[tuple[str, Any], float] = {}
    for made in (split, plan(degrees, **shape)):
        tasks = replay(made, on).timeline.tasks
        for kind in (Kind.BACKWARD, Kind.WEIGHTS):
            of_first = (tasks.kind == kind) & (tasks.unit == 0) & (tasks.micro_batch == 0)
            spent[made.schedule, kind] = float(tasks.seconds[of_first].sum())
    _, whole_wait = waits(on, split)
    longer = 3 * (inputs + weights - whole_wait)
    both = spent["zb-h1", Kind.BACKWARD] + spent["zb-h1", Kind.WEIGHTS]
    # tensor ranks reduce beside fewer of the host's seconds: that is below a hundredth
    tolerance = 1e-2 if "tp" in shape else 1e-9
    assert both == pytest.approx(spent["1f1b", Kind.BACKWARD] + longer, rel=tolerance)
    # the embedding's pass of weights is all that the first stage has beside its blocks
    blocks = 3 * (weights_of(on, split) + weights)
    assert blocks < spent["zb-h1", Kind.WEIGHTS] < 1.5 * blocks


@pytest.mark.parametrize("exchange", ["ring", "all-to-all"])
def test_a_pass_that_is_repeated_waits_again(exchange: Any) -> None:
    """A full recomputation adds a forward pass of the blocks, with what they wait for."""
    on, passes = workload(), dict[Any, tuple[float, float]]()
    modes: tuple[Any, ...] = ("none", "full")
    for mode in modes:
        degrees = Degrees(context=2, exchange=exchange)
        made = plan(degrees, on=on, pp=1, dp=1, recomputation=mode)
        costs = present(zero_costs(made, on)).costs
        passes[mode] = costs.passes(made.replicas[0].stages[0], (1, 1 + BLOCKS), 1)
    (there, back), (again, more) = passes["none"], passes["full"]
    assert again == there and more == pytest.approx(there + back, rel=1e-12)
    seconds, _, _ = computing(on, made)
    assert there == pytest.approx(BLOCKS * (seconds + waits(on, made)[0]), rel=1e-9)


def ring(ranks: int, size: float, *, between: bool, rings: int = 1) -> float:
    """An all-reduce by the cluster's file: so many rings share the card of a node."""
    rate = 40e9 / 8 / rings if between else 140e9 / 8
    nodes = 2 if between else 1
    hops = sorted([20e-6] * (nodes if between else 0) + [6e-6] * (ranks - nodes * between))[:-1]
    return 2 * (ranks - 1) * size / ranks / rate + 2 * sum(hops)


def update(on: Workload, size: float) -> float:
    """Seconds of the optimizer on so many bytes of fp16 weights."""
    from hetplan.profiling.rates.products import move_seconds

    return move_seconds("binary", size / 2 * 28, "T4", on.cluster.specs["T4"]).seconds


@pytest.mark.parametrize(("zero", "expert"), [(0, 2), (0, 4), (1, 2), (1, 4), (0, 8)])
def test_experts_are_joined_by_those_who_hold_the_same(zero: int, expert: int) -> None:
    """Eight replicas of one device: dense gradients go round all, those of an expert's ranks round
    the 8 / expert that hold it; and every pass waits for its tokens."""
    on = workload(experts=True)
    made = plan(Degrees(expert=expert), pp=1, dp=8, on=on, zero=zero)
    if expert == 8:
        with pytest.raises(InputError, match=r"degrees\.expert does not divide the experts"):
            replay(made, on)
        return
    there, back = waits(on, made)
    experts = 2 * sum(map(expert_params_of, on.model.layers))
    dense = sum(layer.param_bytes for layer in on.profile.layers) - experts
    table = predict(
        replace(on.model, layers=divided(on, Cut(expert=expert))), on.cluster, micro_batches=[1],
        tensor_degrees=[1], stack=on.stack,
    ).tables[0]  # fmt: skip
    each = sum(table.forward_seconds) + sum(table.backward_seconds)
    each += BLOCKS * (there + back)
    all_dense = ring(8, dense, between=True)
    # ranks 0, 2, 4, 6 hold the same experts, and 1, 3, 5, 7; or 0 and 4, 1 and 5, …
    all_experts = ring(8 // expert, experts / expert, between=True, rings=expert)
    share = (dense / 8 + experts / 8) if zero else dense + experts / expert
    # the second collective has the cards as soon as the first one's bytes have passed them
    latency = ring(8, 0.0, between=True)
    expected = BATCH / 8 * each + all_dense - latency + all_experts + update(on, share)
    assert replay(made, on).seconds == pytest.approx(expected, rel=1e-9)
    assert all_experts > 0 and there == back > 0


def divided(on: Workload, cut: Cut) -> Any:
    """One rank's layers."""
    own = model_facts(on.model).divided(cut)
    return (own.embedding, *own.blocks, own.head)


@pytest.mark.parametrize("groups", [1, 2])
def test_full_shards_are_gathered_behind_each_block(groups: int) -> None:
    """In a pipeline of two stages, too: no gradients are joined at the end but those of shards over
    the groups."""
    on = workload()
    made = plan(Degrees(shard_groups=groups, overlap=["offload"]), dp=4, zero=3, on=on)
    forward, backward = waits(on, made)
    assert 0 < forward < backward
    more = replay(made, on).timeline
    plain = replay(plan(None, dp=4, on=on), on).timeline
    tasks, before = more.tasks, plain.tasks
    same = np.flatnonzero((before.kind == 0) & (before.unit == 0) & (before.micro_batch == 0))[0]
    assert tasks.seconds[same] - before.seconds[same] == pytest.approx(3 * forward, rel=1e-9)
    back = np.flatnonzero((before.kind == 1) & (before.unit == 0) & (before.micro_batch == 0))[0]
    assert tasks.seconds[back] - before.seconds[back] == pytest.approx(3 * backward, rel=1e-9)
    joined = tasks.seconds[tasks.kind == 3]
    held = [sum(l.param_bytes for l in on.profile.layers[a:b]) for a, b in ((0, 4), (4, 8))]
    # shards over two ranks of a node, joined between the pairs of the same node
    expected = [] if groups == 1 else [ring(2, x / 2, between=False) for x in held]
    assert joined == pytest.approx(expected, rel=1e-6)


def test_overlap_hides_what_it_names() -> None:
    """Gradients in buckets, weights behind the next forward pass, messages sent at once."""
    shape: dict[str, Any] = {"dp": 4, "zero": 1, "samples": 2}
    on = workload()
    base = replay(plan(Degrees(overlap=["offload"]), **shape), on)
    sent = replay(plan(Degrees(overlap=["messages"]), **shape), on)
    asynchronous = replay(plan(None, **shape), on, Settings(sends="asynchronous"))
    assert sent.seconds == asynchronous.seconds <= base.seconds
    weights = replay(plan(Degrees(overlap=["weights"]), **shape), on)
    # all weights are one bucket of 40 million: none is hidden
    assert weights.seconds == pytest.approx(base.seconds, rel=1e-12)
    wide: dict[str, Any] = {"tp": 2, "dp": 2}
    plain = replay(plan(Degrees(expert_tensor=2, overlap=["offload"]), **wide), on)
    hidden = replay(plan(Degrees(expert_tensor=2, overlap=["tensor"]), **wide), on)
    assert hidden.seconds < plain.seconds


@pytest.mark.parametrize("overlap", [["gradients"], ["weights"], ["gradients", "weights"]])
def test_buckets_of_forty_million_parameters(overlap: Any) -> None:
    shape = llama(4, 2048, 16, 8192)
    model = load_model(text_model("wide", "test", 256, shape))
    on = make_workload(model, cluster(nodes=NODES), 32, stack=BARE)
    replicas = [
        {
            "stages": [{"layers": [(0, 6)], "devices": [[d]]}],
            "micro_batches": [{"count": 1, "samples": 4}],
        }
        for d in range(8)
    ]
    both = [
        replay(new_plan(on, replicas, zero=1, degrees=degrees), on)
        for degrees in (Degrees(overlap=["offload"]), Degrees(overlap=overlap))
    ]
    before, after = (run.timeline.tasks for run in both)
    collectives = [tasks.seconds[tasks.kind == 3] for tasks in (before, after)]
    reduce, gather = collectives[0]
    buckets = sum(layer.param_bytes for layer in on.profile.layers) / 2 / 40e6
    parts, count = collectives[1], int(np.ceil(buckets)) if "gradients" in overlap else 1
    assert len(parts) == count + 1 and parts[:-1] == pytest.approx(reduce / count)
    forward = float(after.seconds[0])
    once = gather / buckets
    left = once + uncovered(once * (buckets - 1), forward)
    assert parts[-1] == pytest.approx(float(left) if "weights" in overlap else gather)
    assert both[1].seconds < both[0].seconds


def test_offloaded_states_are_updated_on_the_host() -> None:
    on = workload()
    runs: list[Replay] = []
    for share in (0.0, 0.5):
        degrees = Degrees(offloaded=share, overlap=["messages"])
        runs.append(replay(plan(degrees, pp=1, dp=1, on=on), on))
    params = sum(layer.param_bytes for layer in on.profile.layers) / 2
    here = update(on, 2 * params)
    expected = runs[0].seconds - here / 2 + host_update(params / 2, 0.0)
    assert runs[1].seconds == pytest.approx(expected, rel=1e-9)
    held = [run.held[0].optimizer for run in runs]
    assert held[1] == held[0] / 2 > 0


SPACE = Space(
    pipeline=(1, 2), tensor=(1, 2), micro_batch=(1, 2), context=(1, 2), exchange=("p2p", "a2a"),
    expert=(1, 2, 4), whole_experts=(False, True), fsdp=(False,), uneven=True,
    recompute=(None, "full"), recompute_method=("uniform",), recompute_layers=(1,), offload=False,
    overlap=False, no_overlap_offload=(True,), virtual=(1,),
)  # fmt: skip


@pytest.mark.parametrize("experts", [False, True])
def test_memory_is_the_searchs_and_computing_alone_is_no_longer(experts: bool) -> None:
    """Every tenth strategy."""
    on = workload(experts)
    (offer,) = offers_of_cluster(on.cluster)
    pool, job = homogeneous(offer), Job(on.model, BATCH)
    assumed = Assumptions(framework=on.framework, stack=on.stack)
    found = search(job, pool, space=SPACE, assumed=assumed, top=10**6)
    alone = least_seconds(job, SPACE, pool, assumed)
    seen = set()
    for candidate in found.top[::10]:
        made = plan_of(candidate, on, pool)
        run, s = replay(made, on), candidate.strategy
        seen |= {name for name in Degrees.model_fields if getattr(made.degrees, name, 1) != 1}
        for j, claimed in enumerate(candidate.stage_bytes):
            device = made.replicas[0].stages[j].devices[0][0]
            held = run.peak_bytes[device] + on.reserved_bytes
            plain = (s["virtual_pipeline_model_parallel_size"] or 1) == 1
            assert held == pytest.approx(claimed, rel=1e-6 if plain else 0.02), (
                j,
                len(made.replicas),
            )
            assert held <= claimed * (1 + 1e-6)
        assert alone * (1 - 1e-9) <= run.seconds == pytest.approx(candidate.seconds, rel=0.35)
    assert found.best is not None and alone < found.best.seconds
    assert {"context", "exchange", "sequence_parallel"} <= seen
    assert not experts or {"expert", "expert_tensor"} <= seen


LIES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"context": 3}, {"pp": 1, "dp": 2}, "degrees.context does not divide the tokens of a sample"),
    ({"context": 2, "exchange": "all-to-all", "expert_tensor": 4}, {"pp": 1, "dp": 1, "tp": 4},
     "degrees.context x tensor ranks does not divide the heads (got 8, expected a divisor of 4)"),
    ({"expert": 8}, {"pp": 1, "dp": 8}, "degrees.expert does not divide the experts"),
    ({"expert_tensor": 4, "expert": 2}, {"pp": 1, "dp": 4, "tp": 2}, "does not divide the tensor"),
    ({"expert": 4, "shard_groups": 2}, {"pp": 1, "dp": 4, "zero": 3},
     "degrees.shard_groups does not divide the ranks with the same experts (got 2, expected a "
     "divisor of 1)"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "shape", "text"), LIES)
def test_degrees_that_the_model_cannot_have_are_one_line(
    said: dict[str, Any], shape: dict[str, Any], text: str
) -> None:
    on = workload(experts=True)
    with pytest.raises(InputError) as error:
        replay(plan(Degrees(**said), on=on, **shape), on)
    assert text in str(error.value) and "\n" not in str(error.value)
    assert not isinstance(error.value, UnsupportedError)


def test_what_the_replay_does_not_have_is_named() -> None:
    on = workload()
    for said, shape, text in (
        ({"recompute_method": "block", "recompute_layers": 1}, {}, "recomputation of some layers"),
        ({"context": 2}, {"zero": 2, "pp": 1}, "ZeRO 2"),
        ({"shard_groups": 2}, {"zero": 1, "pp": 1}, "groups of shards without ZeRO 3"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            replay(plan(Degrees(**said), on=on, **shape), on)
    replicas = [r.model_dump() for r in plan(Degrees(context=2), on=on).replicas]
    replicas[0]["micro_batches"][0]["count"], replicas[1]["micro_batches"][0]["count"] = 4, 12
    with pytest.raises(UnsupportedError, match="unlike replicas"):
        replay(new_plan(on, replicas, degrees=Degrees(context=2)), on)


@pytest.mark.parametrize(("share", "unequal"), [(1 / 6, False), (1.0, False), (0.5, True)])
def test_equal_tensor_shares_are_equal_however_they_are_written(
    share: float, unequal: bool
) -> None:
    on, degrees = workload(), Degrees(sequence_parallel=True)
    made = plan(degrees, on=on, pp=1, dp=1, tp=6)
    first = made.replicas[0].model_dump()
    last_share = 1.0 if unequal else share
    first["stages"][0]["tensor_shares"] = [share] * 5 + [last_share]
    divided = new_plan(on, [first], degrees=degrees)
    assert unsupported(divided, on, degrees)["unequal tensor ranks"] is unequal


def test_the_strategys_search_has_every_degree() -> None:
    (offer,) = offers_of_cluster(workload(True).cluster)
    space = PoolProblem(workload(True), "degrees", homogeneous(offer)).plannable()
    assert space.expert == (1, 2, 4) and space.context == (1, 2, 4, 8)
    assert space.fsdp == space.whole_experts == space.sequence_parallel == (False, True)


def test_the_head_is_on_the_stage_with_a_block_less() -> None:
    """Seven blocks on two stages, and a head as long as a block: the formula's slowest stage is the
    one with four blocks, or three and the head."""
    shape = llama(7, 512, 8, 1024, kv_heads=4, vocabulary=6000)
    model = load_model(text_model("head", "test", 256, shape))
    on = make_workload(model, cluster(nodes=NODES), 32, stack=BARE)
    (offer,) = offers_of_cluster(on.cluster)
    pool, job = homogeneous(offer), Job(model, 32)
    space = replace(SPACE, pipeline=(2,), tensor=(1,), micro_batch=(1,), context=(1,))
    best = search(job, pool, space=space, assumed=Assumptions(stack=on.stack)).best
    assert best is not None and [blocks for _, blocks in best.stages] == [4, 3]
    table = strategies(model_facts(model), space, [], gpus=8, global_batch=32, whole_stages=False)
    (r,) = [r for r in range(table.rows) if table.row(r) == best.strategy]
    row = Priced(model_facts(model), table.take(np.array([r])), offer, Assumptions(stack=on.stack))
    embedding, head = (float(row.blocks[figure][0]) for figure in (EMBEDDING, HEAD))
    block, crossing = float(row.forward[0] + row.backward[0]), float(row.crossing_seconds[0])
    stage, steps = 4 * block + crossing, best.strategy["num_micro_batches"]
    slowest = max(stage + embedding, stage - block + head)
    assert slowest < stage + head - embedding
    total = 7 / 4 * stage + embedding + head
    expected = total - slowest + float(steps or 0) * slowest
    assert iteration_parts(row, np.zeros(1))[0][0] == pytest.approx(expected, rel=1e-12)
