"""What one rank holds under each degree, against torch's own books: modules of the rank's share on
the meta device, Adam's states, what a pass keeps, torch's FSDP and torch's pipeline schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from hetplan.formulations.astra.search.memory import (
    held_by,
    in_flight,
    share_needed,
    stage_bytes,
    stage_peaks,
)
from hetplan.formulations.astra.search.pricing import Priced
from hetplan.formulations.astra.search.space import Space, strategies
from hetplan.profiling.frameworks import MEGATRON
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.transformer import Experts
from hetplan.profiling.models.zoo import llama, text_model
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import model_facts
from hetplan.replays.offers import offer_of

torch: Any = pytest.importorskip("torch", reason="torch's own counts need torch")

from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from fakes import kept  # noqa: E402
from quick import rest_wide  # noqa: E402

WITHIN = 0.05
# Megatron's 2 + 4 + 12 bytes, two layers gathered and one reduced, beside no workspace and without
# what its backward passes hold.
TRAINER = MEGATRON.model_copy(
    update={"workspace_bytes": 0.0, "activation_gradients": False, "unused_gradients": False}
)
LAYERS, TOKENS, HIDDEN, HEADS, GROUPS, WIDE, COUNT, ACTIVE = 8, 2048, 1024, 16, 8, 2816, 8, 2


@dataclass(frozen=True)
class Ranks:
    """The degrees of a case."""

    tensor: int = 1
    sequence: bool = False
    context: int = 1
    exchange: bool = False
    expert: int = 1
    whole: bool = False
    shards: int = 1
    groups: int = 1
    zero: bool = False
    mixture: bool = False
    again: bool = False

    @property
    def replicas(self) -> int:
        """Ranks with the same dense parameters."""
        return 8 // self.tensor


class Gathered(torch.autograd.Function):  # type: ignore[misc]
    """All tokens times a weight, of which a rank keeps its own tokens alone (Megatron-LM's
    LinearWithGradAccumulationAndAsyncCommunication)."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, ranks: int) -> Any:
        ctx.save_for_backward(x, weight)
        return F.linear(x.repeat(1, ranks, 1), weight)


class Moved(torch.autograd.Function):  # type: ignore[misc]
    """A collective, which keeps nothing: a new tensor of another shape."""

    @staticmethod
    def forward(ctx: Any, x: Any, *shape: int) -> Any:
        return x.new_empty(shape)


class RankBlock(torch.nn.Module):  # type: ignore[misc]
    """One rank's share of a Llama or Mixtral block."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, d, t = ranks, HIDDEN // HEADS, ranks.tensor
        self.norm_1, self.norm_2 = torch.nn.RMSNorm(HIDDEN), torch.nn.RMSNorm(HIDDEN)
        sizes = {"q": HIDDEN // t, "k": GROUPS * d // t, "v": GROUPS * d // t}
        if not ranks.mixture:
            sizes |= {"gate": WIDE // t, "up": WIDE // t}
            self.down = torch.nn.Linear(WIDE // t, HIDDEN, bias=False)
        else:
            own = 1 if ranks.whole else t
            held = COUNT // ranks.expert
            self.router = torch.nn.Linear(HIDDEN, COUNT, bias=False)
            self.ups = torch.nn.Parameter(torch.empty(held, HIDDEN, 2 * WIDE // own))
            self.downs = torch.nn.Parameter(torch.empty(held, WIDE // own, HIDDEN))
        for name, size in sizes.items():
            setattr(self, name, torch.nn.Linear(HIDDEN, size, bias=False))
        self.out = torch.nn.Linear(HIDDEN // t, HIDDEN, bias=False)

    @property
    def spread(self) -> list[Any]:
        """The parameters of experts."""
        return [self.ups, self.downs] if self.ranks.mixture else []

    def attention(self, y: Any, tokens: int) -> Any:
        """[1, T, H], T = `tokens` or a tensor rank's part -> the same, before the reduction."""
        ranks, d = self.ranks, HIDDEN // HEADS
        parts = tokens // y.shape[1]
        q, k, v = (
            Gathered.apply(y, p.weight, parts).view(1, tokens, -1, d)
            for p in (self.q, self.k, self.v)
        )
        # by one kernel, whose tables of angles all blocks share
        q, k = Moved.apply(q, *q.shape), Moved.apply(k, *k.shape)
        if ranks.exchange:  # all tokens of fewer heads
            c = ranks.context
            q, k, v = (Moved.apply(x, 1, tokens * c, x.shape[2] // c, d) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
        )
        mixed = mixed.transpose(1, 2).reshape(1, mixed.shape[2], -1)
        if ranks.exchange:
            mixed = Moved.apply(mixed, 1, tokens, HIDDEN // ranks.tensor)
        return self.out(mixed)

    def experts(self, y: Any) -> Any:
        """[1, T, H] -> the same: as many rows as leave come from the others."""
        ranks = self.ranks
        weights = self.router(y).softmax(-1).topk(ACTIVE, dim=-1)[0]
        held, rows = len(self.ups), y.shape[1] * ACTIVE
        columns = 1 if ranks.whole else ranks.tensor
        sent = y.expand(ACTIVE, -1, -1).reshape(-1, HIDDEN)
        inputs = Moved.apply(sent, held, rows * columns // held, HIDDEN)
        gate, value = torch.bmm(inputs, self.ups).chunk(2, dim=-1)
        outputs = torch.bmm(kept.FusedSwiGLU.apply(gate, value), self.downs)
        back = Moved.apply(outputs, ACTIVE, *y.shape[1:])
        return (back * weights[0].T[..., None]).sum(0)[None]

    def forward(self, x: Any) -> Any:
        """[1, T, H] -> the same."""
        parts = self.ranks.tensor if self.ranks.sequence else 1
        tokens = x.shape[1] * parts
        x = x + Moved.apply(self.attention(self.norm_1(x), tokens), *x.shape)
        y = self.norm_2(x)
        if self.ranks.mixture:
            return x + self.experts(y)
        gate, value = (Gathered.apply(y, p.weight, parts) for p in (self.gate, self.up))
        return x + Moved.apply(self.down(kept.FusedSwiGLU.apply(gate, value)), *x.shape)


def block_of(ranks: Ranks) -> Any:
    """The rank's block in bf16 on the meta device."""
    with torch.device("meta"):
        return RankBlock(ranks).to(torch.bfloat16)


def adams_bytes(elements: int) -> int:
    """fp32 master weights and what torch's Adam adds to them."""
    with torch.device("meta"):
        master = torch.nn.Parameter(torch.empty(elements))
    master.grad = torch.empty_like(master)
    optimizer = torch.optim.AdamW([master], foreach=False)
    optimizer.step()
    held = [master, *(t for t in optimizer.state[master].values() if t.dim())]
    return sum(t.numel() * t.element_size() for t in held)


@pytest.fixture
def mesh_of() -> Iterator[Any]:
    """Device meshes of eight ranks that exchange nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    names = ("groups", "shards")
    yield lambda *sizes: init_device_mesh("cpu", sizes, mesh_dim_names=names[-len(sizes) :])
    torch.distributed.destroy_process_group()


def local_elements(module: Any, mesh: Any) -> int:
    """Of a rank, after torch's fully_shard."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=mesh)
    return sum(p.to_local().numel() for p in module.parameters())


def model_of(mixture: bool) -> Model:
    """Described to hetplan."""
    experts = Experts(count=COUNT, active=ACTIVE) if mixture else None
    shape = llama(LAYERS, HIDDEN, HEADS, WIDE, kv_heads=GROUPS, experts=experts)
    return load_model(text_model("tiny", "test", TOKENS, shape), precision="bf16")


def space_of(ranks: Ranks, **more: Any) -> Space:
    """The one strategy of eight GPUs."""
    return Space(
        **{
            "pipeline": (1,),
            "tensor": (ranks.tensor,),
            "micro_batch": (1,),
            "expert": (ranks.expert,),
            "context": (ranks.context,),
            "whole_experts": (ranks.whole,),
            "exchange": ("a2a" if ranks.exchange else "p2p",),
            "fsdp": (ranks.shards > 1,),
            "shard_groups": (ranks.groups,),
            "interleaving": False,
            "sequence_parallel": (ranks.sequence,),
            "distributed_optimizer": (ranks.zero,),
            "recompute": ("full" if ranks.again else None,),
            "recompute_method": ("uniform",),
            "recompute_layers": (1,),
            "no_overlap_offload": (True,),
            **more,
        }
    )


def described(ranks: Ranks, **more: Any) -> Priced:
    """The model's figures."""
    facts = model_facts(model_of(ranks.mixture))
    table = strategies(facts, space_of(ranks, **more), [], gpus=8, global_batch=64)
    assert table.rows == 1
    assumed = Assumptions(framework=TRAINER, reserved_bytes=0.0)
    return Priced(facts, table, offer_of("H100-SXM5-80GB", 8), assumed)


CASES = {
    "one rank": Ranks(),
    "tensor": Ranks(tensor=4),
    "sequence": Ranks(tensor=4, sequence=True),
    "context, ring": Ranks(context=4),
    "context, all-to-all": Ranks(context=4, exchange=True),
    "experts": Ranks(expert=4, mixture=True),
    "experts, their columns on tensor ranks": Ranks(
        tensor=4, sequence=True, expert=2, mixture=True
    ),
    "experts, whole on tensor ranks": Ranks(
        tensor=4, sequence=True, expert=4, whole=True, mixture=True
    ),
    "ZeRO 1": Ranks(zero=True),
    "everything again": Ranks(again=True, tensor=4, sequence=True),
}


@pytest.mark.parametrize("name", rest_wide(CASES, 5))
def test_a_rank_holds_what_torch_says(name: str) -> None:
    ranks, block = CASES[name], block_of(CASES[name])
    dense, spread = (
        sum(p.numel() for p in block.parameters()) - sum(p.numel() for p in block.spread),
        sum(p.numel() for p in block.spread),
    )
    own = 1 if ranks.whole else ranks.tensor
    held = 6 * (dense + spread)  # bf16 weights, fp32 gradients
    same = 8 // (own * ranks.expert)  # ranks with the same experts
    held += adams_bytes(dense // ranks.replicas if ranks.zero else dense)
    held += adams_bytes(spread // same if ranks.zero else spread)
    tokens = TOKENS // ranks.context // (ranks.tensor if ranks.sequence else 1)
    x = torch.empty(1, tokens, HIDDEN, dtype=torch.bfloat16)
    run = (lambda y: checkpoint(block, y, use_reentrant=False)) if ranks.again else None
    passes = kept.kept_bytes(block, x, run=run)
    priced, place = described(ranks), np.zeros(1, np.int64)
    total, states = stage_bytes(priced, np.array([LAYERS]), place, 0.0, 0.0)
    working = kept.kept_bytes(block, x) if ranks.again else 0.0
    assert total[0] == pytest.approx(LAYERS * (held + passes) + working, rel=WITHIN)
    without = stage_bytes(described(ranks), np.array([LAYERS]), place, 0.0, 0.0)[0][0]
    activations = without - LAYERS * (6 * (dense + spread)) - states[0]
    assert activations == pytest.approx(LAYERS * passes + working, rel=WITHIN)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_full_shards_are_those_of_torch(groups: int, mesh_of: Any) -> None:
    """Shards of all layers, weights of the one at work and the next one, and a gradient; several
    groups of ranks hold all shards each (HSDP)."""
    ranks = Ranks(shards=8, groups=groups)
    block = block_of(ranks)
    whole = sum(p.numel() for p in block.parameters())
    shard = local_elements(block, mesh_of(8) if groups == 1 else mesh_of(groups, 8 // groups))
    assert shard == whole * groups // 8
    held = LAYERS * (6 * shard + adams_bytes(shard)) + whole * (2 * 2 + 2)
    x = torch.empty(1, TOKENS, HIDDEN, dtype=torch.bfloat16)
    passes = kept.kept_bytes(block_of(ranks), x)
    total, _ = stage_bytes(described(ranks), np.array([LAYERS]), np.zeros(1, np.int64), 0.0, 0.0)
    assert total[0] == pytest.approx(held + LAYERS * passes, rel=WITHIN)


@pytest.mark.parametrize(("stages", "virtual"), [(4, 1), (4, 2), (2, 4), (8, 1)])
def test_stages_keep_as_many_micro_batches_as_torchs_schedules(stages: int, virtual: int) -> None:
    """Forward passes without their backward pass, at most, in torch's own order of actions."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    more: dict[str, Any] = {"pipeline": (stages,)}
    if virtual > 1:
        more |= {"interleaving": True, "virtual": (LAYERS // stages // virtual,)}
    space = space_of(Ranks(), **more)
    facts = model_facts(model_of(False))
    table = strategies(facts, space, [], gpus=8, global_batch=64)
    (row,) = np.flatnonzero(
        table.columns["virtual_pipeline_model_parallel_size"] == (virtual if virtual > 1 else -1)
    )
    offer = offer_of("H100-SXM5-80GB", 8)
    priced = Priced(facts, table.take(np.array([row])), offer, Assumptions())
    count = int(priced.K[0])
    name = "Interleaved1F1B" if virtual > 1 else "1F1B"
    orders = get_schedule_ops(name, stages, count, virtual)
    for place, actions in enumerate(orders):
        kinds = [a.computation_type.name for a in actions if a is not None]
        signs = {"FORWARD": 1, "FULL_BACKWARD": -1, "REDUCE_GRAD": 0}
        steps = np.cumsum([signs[kind] for kind in kinds])
        assert steps[-1] == 0
        assert in_flight(priced, np.array([place]))[0] * virtual == steps.max()


def test_states_on_the_host_are_not_on_the_device() -> None:
    priced, block = described(Ranks()), block_of(Ranks())
    sizes = [p.numel() for p in block.parameters()] * LAYERS
    ends = sum(float(part[0]) for part in priced.end_params)
    gone = adams_bytes(round(0.25 * (sum(sizes) + ends)))
    table, stages = priced.table, [(priced.offer, LAYERS)]
    all_here, some_there = (
        stage_peaks(priced.facts, table, 0, stages, share, priced.assumed)[0]
        for share in (0.0, 0.25)
    )
    assert all_here - some_there == pytest.approx(gone, rel=WITHIN)


def test_frozen_weights_are_sharded_and_held() -> None:
    """Fully sharded over eight ranks, weights that nobody trains take 2 bytes over 8 each, and no
    states."""
    priced = described(Ranks(shards=8))
    facts = priced.facts
    frozen = replace(
        facts,
        embedding=replace(facts.embedding, frozen=facts.embedding.params),
        blocks=tuple(replace(block, frozen=block.params) for block in facts.blocks),
        head=replace(facts.head, frozen=facts.head.params),
    )
    untrained = Priced(frozen, priced.table, priced.offer, priced.assumed)
    layers, place = np.array([LAYERS]), np.zeros(1, np.int64)
    held = held_by(untrained, layers, place, 1.0, 1.0)
    params = facts.embedding.params + sum(b.params for b in facts.blocks) + facts.head.params
    assert held.weights[0] == pytest.approx(2 * params / 8)
    assert (held.gradients[0], held.optimizer[0]) == (0.0, 0.0)
    assert np.isfinite(share_needed(untrained, layers)[0])
