"""`hetplan fits`: published cases, cases by hand, and that what fits replays as fitting."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import hetplan as hp
from hetplan.errors import InputError
from hetplan.planner.fits import CutLayout, Fit, Shape, advice, first_enough, smallest
from hetplan.plans.making import new_plan
from hetplan.plans.plan import Plan
from hetplan.profiling.hardware.cluster import (
    Cluster,
    ClusterFile,
    build_cluster,
    open_cluster,
)
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.transformer import Experts
from hetplan.profiling.models.zoo import llama, text_model
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.pose import costs_of
from hetplan.replays.replay import replay
from hetplan.text import bytes_text, percent_text
from present import present
from quick import rest_wide

A100, V100, T4 = "A100-SXM4-80GB", "V100-SXM2-16GB", "T4"


def cluster_of(*nodes: tuple[int, int, str]) -> Cluster:
    """Nodes of (how many, devices in each, device)."""
    entries = [
        {
            "count": count,
            "devices": devices,
            "device": device,
            "intra_node_gbit_per_s": 600.0,
            "network_gbit_per_s": 100.0,
        }
        for count, devices, device in nodes
    ]
    document = {"format": "hetplan-cluster", "version": 1, "name": "made", "nodes": entries}
    return build_cluster(ClusterFile.model_validate(document))


@pytest.mark.parametrize("framework", ["hetplan", "fsdp", "deepspeed"])
def test_llama_2_7b_needs_two_80_gb_devices(framework: str) -> None:
    """Full fine-tuning with Adam: 16 bytes for each of 6.74 B parameters are 108 GB (Rajbhandari
    et al. 2020, Section 3.1). One device cannot hold that, two with sharded states can."""
    alone = hp.fits("llama2-7b", cluster_of((1, 1, A100)), framework=framework)
    states = present(alone.nearest).held[0]
    assert not alone.fits
    assert states.weights + states.gradients + states.optimizer >= 16 * 6.738e9
    assert alone.advice == (f"1 more {A100} (1 node of 1)",)
    pair = hp.fits("llama2-7b", cluster_of((1, 2, A100)), framework=framework, zero=3)
    assert [layout.zero for layout in pair.layouts] == [3]
    assert pair.layouts[0].shape.data == 2


def test_states_by_hand() -> None:
    """gpt2's 124.4 M parameters in 16 bit, two replicas: Megatron's 18 bytes, with the distributed
    optimizer 6 + 12 / 2 (its theoretical_memory_usage.py)."""
    fit = hp.fits("gpt2", cluster_of((1, 2, A100)), framework="megatron", micro_batch=1)
    params = hp.load_model("gpt2").params
    plain, sharded = fit.layouts
    for layout, each in ((plain, 18), (sharded, 12)):
        held = layout.held[0]
        assert held.weights + held.gradients + held.optimizer == pytest.approx(each * params)
        # 16-bit logits and their fp32 copy, of 1024 tokens
        assert held.logits == pytest.approx(6 * 1024 * 50257)
        limit = fit.limit_bytes[A100]
        assert layout.free == {A100: pytest.approx(limit - held.allocated)}
    reserved = 0.5e9 + 3 * 0.688e9
    assert fit.limit_bytes[A100] == pytest.approx(0.95 * 80 * 2**30 - reserved)


WIDE = pytest.mark.wide
CASES = [
    pytest.param("gpt2-xl", cluster_of((1, 4, T4), (1, 4, V100)), "hetplan"),
    pytest.param("llama2-7b", cluster_of((2, 4, V100), (2, 4, T4)), "hetplan", marks=WIDE),
    pytest.param("llama2-13b", cluster_of((4, 4, V100), (1, 3, A100)), "megatron", marks=WIDE),
    pytest.param("bert-large", cluster_of((1, 1, T4), (1, 2, V100)), "hetplan"),
    pytest.param("bert-large", cluster_of((1, 2, V100), (1, 1, A100)), "megatron"),
    pytest.param("gpt2-xl", cluster_of((3, 1, T4)), "deepspeed"),
]


@pytest.mark.parametrize(("model", "cluster", "framework"), CASES)
def test_what_fits_replays_as_fitting(model: str, cluster: Cluster, framework: str) -> None:
    """Each layout as a plan: the replay holds what `fits` says, within the same limits."""
    fit = hp.fits(model, cluster, framework=framework)
    assert fit.layouts
    for layout in fit.layouts:
        samples = layout.shape.data * layout.micro_batch * 2 * layout.shape.pipeline
        workload = make_workload(model, cluster, samples, framework=framework)
        plan = plan_of(layout, workload)
        outcome = replay(plan, workload)
        assert outcome.fits
        stages = [stage for replica in plan.replicas for stage in replica.stages]
        for stage, held in zip(stages, layout.held * layout.shape.data, strict=True):
            for device in stage.all_devices:
                assert outcome.peak_bytes[device] == pytest.approx(held.allocated, rel=1e-9)


def plan_of(layout: CutLayout, workload: Workload) -> Plan:
    """The layout on the cluster's devices, groups of one node for each stage of its types."""
    free: dict[str, list[list[int]]] = {}
    first = 0
    for node in workload.cluster.nodes:
        numbers = list(range(first, first + node.devices))
        first += node.devices
        width = layout.shape.tensor
        groups = [numbers[i : i + width] for i in range(0, len(numbers) - width + 1, width)]
        free.setdefault(node.device, []).extend(groups)
    taken: list[list[list[int]]] = []
    for kinds in layout.shape.kinds:
        pool = [(kind, group) for kind in kinds for group in free[kind]][: layout.shape.data]
        for kind, group in pool:
            free[kind].remove(group)
        taken.append([group for _, group in pool])
    begins = (0, *layout.ends[:-1])
    replicas = [
        {
            "stages": [
                {
                    "layers": [(begin, end)],
                    "devices": [groups[i]],
                    "tensor_shares": [1.0] * layout.shape.tensor,
                }
                for begin, end, groups in zip(begins, layout.ends, taken, strict=True)
            ],
            "micro_batches": [{"count": 2 * layout.shape.pipeline, "samples": layout.micro_batch}],
        }
        for i in range(layout.shape.data)
    ]
    more = {"zero": layout.zero, "recomputation": layout.recomputation}
    return new_plan(workload, replicas, **more)


@pytest.mark.parametrize("micro_batch", rest_wide([1, 16, 64], 1))
def test_what_fits_lacks_nothing(micro_batch: int) -> None:
    """Whatever the limit: the cut counts no less than the stages hold."""
    pipelines = 0
    for margin in range(0, 90, 15):
        fit = hp.fits(
            "gpt2-large", cluster_of((1, 3, V100), (1, 2, T4)), framework="deepspeed",
            memory_margin=margin / 100, micro_batch=micro_batch, sequence=512,
        )  # fmt: skip
        pipelines += sum(layout.shape.pipeline > 1 for layout in fit.layouts)
        assert all(min(layout.free.values()) >= 0 for layout in fit.layouts)
    assert pipelines


@pytest.mark.parametrize("least", range(1, 13))
@pytest.mark.parametrize("most", [0, 1, 2, 5, 12])
def test_smallest_number_that_is_enough(least: int, most: int) -> None:
    assert smallest(lambda n: n >= least, most) == (least if least <= most else None)


def test_a_wanted_micro_batch_takes_as_many_replicas_as_have_one() -> None:
    made = cluster_of((1, 4, A100))
    for batch, data in ((8, 2), (4, 1), (None, 4)):
        fit = hp.fits("gpt2", made, global_batch=batch, micro_batch=4)
        assert fit.layouts[0].shape.data == data
    assert hp.fits("gpt2", made, sequence=64, micro_batch=100).layouts[0].micro_batch == 100


def test_one_device_has_nothing_to_shard() -> None:
    fit = hp.fits("gpt2", cluster_of((1, 1, A100)))
    assert [layout.zero for layout in fit.layouts] == [0]


def test_simplest_first_and_tightest_last() -> None:
    """Less memory wants sharding, then stages and recomputation, and more devices in the end."""

    def ask(*nodes: tuple[int, int, str]) -> Fit:
        return hp.fits("gpt2-xl", cluster_of(*nodes), global_batch=32)

    roomy, tight, small, least = (
        ask((1, 4, A100)), ask((1, 4, V100)), ask((1, 2, V100)), ask((1, 1, V100))
    )  # fmt: skip
    assert (roomy.layouts[0].zero, roomy.layouts[0].shape.pipeline) == (0, 1)
    assert tight.fits and tight.layouts[0].zero > 0
    assert small.fits and small.layouts[0].recomputation != "none"
    assert not least.fits and least.advice == (f"1 more {V100} (1 node of 1)",)
    for fit in (roomy, tight, small):
        for layout in fit.layouts:
            assert min(layout.free.values()) >= 0
            assert 32 % (layout.shape.data * layout.micro_batch) == 0


def test_what_is_wanted_is_kept_and_what_else_would_fit_is_said() -> None:
    fit = hp.fits("gpt2-xl", cluster_of((1, 4, V100)), recomputation="none", micro_batch=8)
    assert not fit.fits
    assert [line.split(":")[0] for line in fit.advice[:2]] == [
        "another recomputation", "another micro-batch",
    ]  # fmt: skip
    assert present(fit.nearest).micro_batch == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_margin": 1.0}, "memory margin"),
        ({"recomputation": "some"}, "recomputation of hetplan"),
        ({"recomputation": "operators", "framework": "megatron"}, "recomputation of megatron"),
        ({"framework": "megatro"}, "did you mean megatron"),
        ({"framework": "megatron", "zero": 3}, "ZeRO of megatron"),
        ({"micro_batch": 0}, "micro-batch"),
        ({"micro_batch": 9, "global_batch": 8}, "at most the batch of 8"),
        ({"global_batch": 0}, "global batch is not usable"),
        ({"micro_batch": 1, "global_batch": 0}, "global batch is not usable"),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        hp.fits("gpt2", cluster_of((1, 1, T4)), **options)  # type: ignore[arg-type]


def test_a_shorter_sequence_leaves_more() -> None:
    made = cluster_of((1, 4, A100))
    long, short = (hp.fits("gpt2", made, sequence=n, micro_batch=1) for n in (1024, 256))
    assert short.layouts[0].free[A100] > long.layouts[0].free[A100]


def test_memory_is_answered_where_the_speed_is_not_known() -> None:
    """T4 has no peak in bf16: what it holds is what it holds in fp16."""
    made = cluster_of((1, 2, T4), (1, 2, A100))
    half, brain = (hp.fits("gpt2", made, precision=p, micro_batch=2) for p in ("fp16", "bf16"))
    assert brain.layouts == half.layouts
    assert (half.without_peak, brain.without_peak) == ((), (T4,))
    assert brain.document()["without_peak"] == [T4]


def test_advice_names_the_smallest_change_first() -> None:
    """One wish less, where that is not enough two; then what else; devices at the end."""
    pair = cluster_of((1, 2, V100))

    def heads(**options: Any) -> list[str]:
        return [line.split(":")[0] for line in hp.fits("gpt2-xl", pair, **options).advice]

    more = f"2 more {V100} (1 node of 2)"
    assert heads(zero=0, micro_batch=8) == [
        "another micro-batch", "without a memory margin", "with 512 tokens per sample", more,
    ]  # fmt: skip
    wishes = heads(recomputation="none", micro_batch=4, precision="fp32")
    assert wishes[0] == "another recomputation and micro-batch"


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"memory_margin": 0.6, "micro_batch": 24}, {"memory_margin": 0.0}),
        ({"micro_batch": 6, "precision": "fp32", "recomputation": "none"}, {"precision": "fp16"}),
        ({"micro_batch": 64}, {"sequence": 512}),
        ({"global_batch": 1, "zero": 3}, {"global_batch": None}),
    ],
)
def test_what_is_advised_fits(options: dict[str, Any], change: dict[str, Any]) -> None:
    pair = cluster_of((1, 2, V100))
    fit, changed = (hp.fits("gpt2-large", pair, **one) for one in (options, options | change))
    assert not fit.fits and changed.fits
    assert any(line.endswith(f": {changed.layouts[0].text}") for line in fit.advice)


def test_a_fit_reads_as_a_sentence() -> None:
    """What fits says what it leaves free, what does not what is largest."""
    fit = hp.fits("gpt2", "home", global_batch=8)
    kind, free = next(iter(fit.layouts[0].free.items()))
    margin = f"{bytes_text(free)} of {kind} ({percent_text(free / fit.limit_bytes[kind])})"
    assert str(fit).startswith(f"fits: {fit.layouts[0].text}; free: {margin}")
    lacks = hp.fits("llama2-13b", "home", global_batch=8)
    largest = bytes_text(present(lacks.nearest).fullest.optimizer)
    assert str(lacks).startswith(f"does not fit (largest: optimizer {largest} of ")
    assert f"; would fit: {lacks.advice[0]}" in str(lacks)


def one_block(tokens: int, experts: Experts | None = None) -> Model:
    """A model of one block, which neither stages nor replicas can divide."""
    shape = llama(1, 1024, 8, 2048, kv_heads=4, experts=experts, vocabulary=1024)
    return load_model(text_model("one-block", "test", tokens, shape))


APART = cluster_of((2, 1, V100))  # on two nodes, so that no tensor ranks divide a block


def test_ranks_that_share_experts_are_tried_where_no_other_layout_fits() -> None:
    """32 experts on either device do not fit, 16 on each do; a plan's replay says the same."""
    model = one_block(512, Experts(count=32, active=2, width=2048))
    plainly = hp.fits(model, APART, framework="megatron", zero=0)
    assert [layout.shape.expert for layout in plainly.layouts] == [1]
    fit = hp.fits(model, APART, framework="megatron", zero=0, memory_margin=0.65, micro_batch=1)
    (layout,) = fit.layouts
    assert layout.shape == Shape(1, 2, ((V100,),), context=1, expert=2)
    assert layout.text.startswith("tensor 1, pipeline 1, data 2, expert 2, no recomputation")
    held = replayed(layout, model, "megatron")
    assert held == pytest.approx(layout.held[0].allocated, rel=1e-9)
    assert hp.Fit.document(fit)["layouts"][0]["expert"] == 2


def replayed(layout: CutLayout, model: Model, framework: str) -> float:
    """The most bytes of a device in the replay of a layout of one stage, one tensor rank and one
    micro-batch on `APART`. Context ranks are the row groups of a stage."""
    shape = layout.shape
    samples = shape.data * layout.micro_batch
    workload = make_workload(model, APART, samples, framework=framework)
    replicas = [
        {
            "stages": [
                {
                    "layers": [(0, len(model.layers))],
                    "devices": [[i * shape.context + c] for c in range(shape.context)],
                    "row_shares": [1.0] * shape.context,
                    "tensor_shares": [1.0],
                }
            ],
            "micro_batches": [{"count": 1, "samples": layout.micro_batch}],
        }
        for i in range(shape.data)
    ]
    more = {"zero": layout.zero, "recomputation": layout.recomputation, "degrees": shape.degrees}
    return max(replay(new_plan(workload, replicas, **more), workload).peak_bytes)


@pytest.mark.parametrize("framework", ["megatron", "fsdp"])
def test_context_ranks_are_tried_where_no_other_layout_fits(framework: str) -> None:
    """A long sample's activations do not fit on one device, its halves do."""
    model = one_block(131072)
    fit = hp.fits(
        model, APART, global_batch=1, framework=framework, memory_margin=0.6, recomputation="none"
    )
    layout = fit.layouts[0]
    assert (layout.shape.context, layout.shape.data) == (2, 1) and "context 2" in layout.text
    held = replayed(layout, model, framework)
    assert held == pytest.approx(layout.held[0].allocated, rel=1e-9)


def test_a_stage_is_refused_for_its_own_layers_alone() -> None:
    """Full shards on 16 stages of one sample each: the embedding is on the first stage alone, and
    the others have room for more blocks. Counting it on every stage refused the layout, and advised
    nothing before a colon."""
    fit = hp.fits("gpt2-xl", "amp-mixed", global_batch=32, framework="fsdp", memory_margin=0.69066)
    assert fit.fits and min(fit.layouts[0].free.values()) >= 0
    least = hp.fits("gpt2-xl", "amp-mixed", global_batch=32, framework="fsdp", memory_margin=0.8)
    assert not least.fits
    workload = replace(
        make_workload("gpt2-xl", open_cluster("amp-mixed"), 32, framework="fsdp"), memory_margin=0.8
    )
    assert re.match(r"\S+ [MG]iB more on each ", advice(workload)[0])


def test_the_arrays_of_a_cut_are_what_the_replay_counts_of_each_stage() -> None:
    for framework in ("megatron", "fsdp"):
        workload = make_workload("gpt2", cluster_of((1, 1, V100)), 8, framework=framework)
        costs = costs_of(workload, "full")
        tied = workload.profile.layers[-1].tied_param_bytes
        for first, tensor in ((0, 1), (3, 2), (13, 1)):
            stages = costs.stages_from(first, tensor, tied if first else 0.0)
            for number, end in enumerate(range(first + 1, 15)):
                copied = ((end - 1, tied),) if first and end == 14 else ()
                one = costs.stage_bytes(((first, end),), tensor, copied)
                for name, size in one.passes.__dict__.items():
                    assert getattr(stages.passes, name)[number] == pytest.approx(size)
                for name in ("weights", "largest", "unused", "unused_whole", "unused_head"):
                    assert getattr(stages, name)[number] == pytest.approx(getattr(one, name))


@pytest.mark.parametrize("enough", [{3, 7, *range(9, 100)}, {*range(20, 100)}, {5}, set()])
def test_the_first_number_that_is_enough_is_asked_for_one_by_one(enough: set[int]) -> None:
    """More nodes may be cut into layouts that need more, so that some numbers in between are not
    enough."""
    assert first_enough(enough.__contains__, 64) == min(enough, default=None)
    assert first_enough(enough.__contains__, 2) is None
