"""Memory as Megatron-LM's own tests report it, on the last rank.

Source: NVIDIA/Megatron-LM@d98e8a6, tests/functional_tests/test_cases, golden_values_*.json,
`mem-max-allocated-bytes` (BSD-3-Clause)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest

from fakes.workloads import cluster
from hetplan.plans.making import new_plan
from hetplan.plans.plan import Plan
from hetplan.profiling.frameworks import FSDP, MEGATRON
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.transformer import Transformer
from hetplan.profiling.models.zoo import gpt2, text_model
from hetplan.profiling.profiles.predict import predict
from hetplan.profiling.rates.times import Recomputation
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.memory import PeakBytes
from hetplan.replays.pose import costs_of
from hetplan.replays.replay import replay


@dataclass(frozen=True)
class Run:
    """A run of its tests. blocks: of each stage and chunk."""

    shape: Transformer
    sequence: int
    micro_batch: int
    micro_batches: int
    tensor: int
    data: int
    blocks: tuple[int, ...]
    stages: int
    zero: int

    @property
    def workload(self) -> Workload:
        """On one node of A100."""
        devices = self.tensor * self.data * self.stages
        node = {"count": 1, "devices": devices, "device": "A100-SXM4-80GB"}
        links = {"intra_node_gbit_per_s": 2400, "network_gbit_per_s": 1600}
        model = load_model(
            text_model("a-test", "Megatron-LM", self.sequence, self.shape),
            sequence=self.sequence,
            precision="bf16",
        )
        made = cluster(nodes=[node | links])
        profile = predict(
            model, made, micro_batches=[self.micro_batch], tensor_degrees=[self.tensor]
        )
        batch = self.data * self.micro_batches * self.micro_batch
        return make_workload(model, made, batch, profile=profile, framework=MEGATRON)

    def plan(self, workload: Workload, recomputation: Recomputation = "none") -> Plan:
        """Tensor ranks next to each other, then replicas, then stages."""
        ends = [end + 1 for end in accumulate(self.blocks)]
        ranges = list(pairwise([0, *ends[:-1], ends[-1] + 1]))
        replicas = [
            {
                "stages": [
                    {
                        "layers": ranges[stage :: self.stages],
                        "devices": [
                            [(stage * self.data + i) * self.tensor + t for t in range(self.tensor)]
                        ],
                        "tensor_shares": [1.0] * self.tensor,
                    }
                    for stage in range(self.stages)
                ],
                "micro_batches": [{"count": self.micro_batches, "samples": self.micro_batch}],
            }
            for i in range(self.data)
        ]
        schedule = "1f1b" if len(self.blocks) == self.stages else "interleaved-1f1b"
        more = {"schedule": schedule, "zero": self.zero, "recomputation": recomputation}
        return new_plan(workload, replicas, **more)

    def last_rank(self) -> PeakBytes[float]:
        """What the last rank holds."""
        workload = self.workload
        return replay(self.plan(workload), workload).held[-1]


GPT_7B = replace(  # gpt3_7b_tp4_pp1_memory_speed; 131073 tokens padded to 512 a tensor rank
    gpt2(32, 4096, 32, vocabulary=131584, positions=8192),
    kv_heads=8, tied=False, attention="fused",
)  # fmt: skip
SMALL = gpt2(12, 512, 8, vocabulary=50304, positions=1024, attention="standard")
RUNS = {
    # gpt3_7b_tp4_pp1_memory_speed on A100 and H100
    "7b": (Run(GPT_7B, 8192, 2, 2, 4, 2, (32,), 1, 1), (58.188e9, 57.144e9)),
    # gpt3_mcore_te_tp1_pp1_dist_optimizer_no_mmap_bin_files, unfused attention
    "one-stage": (Run(SMALL, 1024, 4, 1, 1, 8, (12,), 1, 1), (4.673e9, 4.702e9)),
    # gpt3_mcore_te_tp1_pp4_vp1: interleaved, one block in each chunk
    "interleaved": (Run(SMALL, 1024, 4, 4, 1, 2, (1,) * 12, 4, 0), (4.123e9, 4.161e9)),
}


@pytest.mark.parametrize("name", RUNS)
def test_megatrons_peak_is_predicted(name: str) -> None:
    run, measured = RUNS[name]
    predicted = run.last_rank().allocated
    for peak in measured:
        assert predicted == pytest.approx(peak, rel=0.03)


def test_the_components_are_the_peak_and_the_shapes_say_them() -> None:
    run, _ = RUNS["7b"]
    workload = run.workload
    outcome = replay(run.plan(workload), workload)
    assert outcome.peak_bytes == tuple(held.allocated for held in outcome.held)
    held, params = outcome.held[0], workload.model.params
    assert (held.weights, held.gradients, held.optimizer) == pytest.approx(
        (2 * params / 4, 4 * params / 4, 12 * params / 4 / 2)
    )
    assert held.logits == pytest.approx(6 * 2 * 8192 * 131584 / 4)
    assert (held.working, held.collectives, held.transfers) == (0, 0, 0)
    assert held.reserved == MEGATRON.reserved_bytes == workload.reserved_bytes


def test_stages_hold_two_buffers_of_what_they_exchange() -> None:
    run, _ = RUNS["interleaved"]
    assert run.last_rank().transfers == 2 * 4 * 1024 * 512 * 2


def test_sequence_parallel_ranks_divide_everything_that_is_kept() -> None:
    """Korthikanti et al. 2022, Table 2: without, 10 s b h of a block are on every rank."""
    run, _ = RUNS["7b"]
    workload = run.workload
    plan = run.plan(workload)
    whole = replay(plan, workload).held[0].activations
    divided = MEGATRON.model_copy(update={"sequence_parallel": True})
    parallel = replay(plan, replace(workload, framework=divided)).held[0].activations
    replicated = 32 * 10 * 8192 * 2 * 4096
    assert whole - parallel == pytest.approx(replicated * 3 / 4, rel=0.02)


def test_ranks_that_keep_what_they_gather_hold_it_whole() -> None:
    """FSDP2 with tensor ranks, of 7B: a block keeps its 16-bit inputs of qkv and up, s b h each, on
    all four; with full recomputation only while it is computed again."""
    run, _ = RUNS["7b"]
    size = 2 * 8192 * 4096
    sequence = MEGATRON.model_copy(update={"sequence_parallel": True})
    plain, whole = (
        replace(run.workload, framework=sequence.model_copy(update={"whole_inputs": on}))
        for on in (False, True)
    )
    blocks, head = (1, 33), (33, 34)
    for mode, kept, again in (
        ("none", 32 * 2 * size, 0), ("operators", 0, 2 * size), ("full", 0, 2 * size)
    ):  # fmt: skip
        less, more = costs_of(plain, mode), costs_of(whole, mode)  # type: ignore[arg-type]
        assert more.saved_bytes(blocks, 4) - less.saved_bytes(blocks, 4) == 0.75 * kept
        assert more.working_bytes(blocks, 4) - less.working_bytes(blocks, 4) == 0.75 * again
        assert more.saved_bytes(head, 4) - less.saved_bytes(head, 4) == 0.75 * size
    divided = costs_of(replace(run.workload, framework=FSDP)).passes_bytes([head], 4)
    assert divided.loss == 16 * 8192 * 131584 / 4


def test_logits_and_the_layer_computed_again_do_not_meet() -> None:
    """They meet in no moment of a backward pass: the larger of the two is the peak."""
    run, _ = RUNS["one-stage"]
    workload = run.workload
    plan = run.plan(workload, "full")
    held = replay(plan, workload).held[0]
    assert held.logits > 0 and held.working == 0
    least = {"logit_bytes": 0.1, "unused_gradients": False}
    short = replace(workload, framework=MEGATRON.model_copy(update=least))
    again = replay(plan, short).held[0]
    assert again.logits == 0 and again.working > 0
    assert again.activations == held.activations


def test_full_shards_leave_no_weights_whole_but_those_at_work() -> None:
    run, _ = RUNS["one-stage"]
    workload = replace(run.workload, framework=FSDP)
    plan = run.plan(workload).model_copy(update={"zero": 3})
    held, params = replay(plan, workload).held[0], workload.model.params
    assert held.weights + held.gradients + held.optimizer == pytest.approx(16 * params / 8)
    largest = max(layer.params for layer in workload.model.layers)
    assert held.collectives == pytest.approx((2 * 2 + 6) * largest)
