"""PyTorch modules as single-device programs: numbers against autograd, work against torch's own
counter and the built-in graphs, and what is said of operators without a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="tracing needs torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from evidence.speed.hap_theories import MAKERS, model  # noqa: E402
from fakes.links import measured_by_hap  # noqa: E402
from fakes.programs import drawn_program, every_rule  # noqa: E402
from fakes.simulated import Outcome, agree, execute, reference  # noqa: E402
from hap.shallow import PUBLISHED, shallow  # noqa: E402
from hap.torch_networks import network  # noqa: E402
from hetplan.errors import InputError, UnsupportedError  # noqa: E402
from hetplan.formulations.hap.data import Device, HapDecision  # noqa: E402
from hetplan.formulations.hap.pricing import theory_of  # noqa: E402
from hetplan.programs.program import SingleProgram  # noqa: E402
from hetplan.programs.work import Work, products_of, work_of  # noqa: E402
from hetplan.runtime.tracing.aten import RULES  # noqa: E402
from hetplan.runtime.tracing.program import Traced, trace  # noqa: E402

# Network and blocks: attention with experts by default.
NETWORKS = [
    ("bert-moe", 2),
    *(pytest.param(name, 2, marks=pytest.mark.wide) for name in ("vgg19", "vit")),
    *(
        pytest.param(name, PUBLISHED, marks=pytest.mark.wide)
        for name in MAKERS
        if name != "vit-24"  # the same operators as vit
    ),
]


@cache
def traced(name: str, blocks: int) -> tuple[Traced, Any, tuple[Any, ...]]:
    """A small network traced in double precision, with its module and arguments."""
    torch.manual_seed(0)
    with shallow(blocks):
        module, arguments = network(name, 6, 3, tiny=True)
    module = module.double()
    arguments = tuple(a.double() if a.is_floating_point() else a for a in arguments)
    return trace(module, arguments, name=name), module, arguments


def by_autograd(module: Any, arguments: Sequence[Any]) -> Outcome:
    """Loss and gradients from torch."""
    module.zero_grad()
    loss = module(*arguments)
    loss.backward()
    return Outcome(loss.item(), {n: p.grad.clone() for n, p in module.named_parameters()})


def check(found: Traced, module: Any, arguments: Sequence[Any], seed: int | None = None) -> None:
    """The program computes what autograd does: on one device, or with a seed on three, by a program
    drawn from its theory, under uneven ratios."""
    values = found.values(module, arguments)
    if seed is None:
        computed = reference(found.program, values)
    else:
        theory = every_rule(found.program, 3)
        decision = HapDecision(program=drawn_program(theory, seed), ratios=[[0.5, 0.2, 0.3]])
        computed = execute(theory, decision, values)
    gradients: dict[str, Any] = {}
    for name, gradient in computed.gradients.items():
        packed = found.packed.get(name)
        gradients |= packed.unpack(gradient) if packed else {name: gradient}
    own = Outcome(computed.loss, gradients)
    agree(own, by_autograd(module, arguments))


def summed(program: SingleProgram, count: Callable[..., Work] = work_of) -> tuple[float, float]:
    """FLOP of both passes."""
    needed = program.needs_gradient()
    each = [count(program, node, needed) for node in program.computations]
    return sum(w.forward for w in each), sum(w.backward for w in each)


@pytest.mark.parametrize(("name", "blocks"), NETWORKS)
def test_traced_and_built_in_graphs_agree(name: str, blocks: int) -> None:
    """Parameters and products at the published size, entry for entry and FLOP for FLOP."""
    with shallow(blocks):
        (module, arguments), built = network(name, 4, 4, meta=True), model(name, 4, 4)
    found = trace(module, arguments, name=name).program
    for program in (found, built):
        own = [node.elements for node in program.parameters if node.name not in program.copies]
        assert sum(own) == sum(p.numel() for p in module.parameters())
    assert summed(found, products_of) == pytest.approx(summed(built, products_of), rel=1e-12)
    # elementwise work as well, but for rotary positions, which the module writes out, and its
    # separate gate
    tolerance = 0.05 if name == "llama-blocks" else 1e-12
    assert sum(summed(found)) == pytest.approx(sum(summed(built)), rel=tolerance)


@pytest.mark.parametrize(("name", "blocks"), NETWORKS)
def test_traced_programs_compute_and_count_what_torch_does(name: str, blocks: int) -> None:
    """Loss and gradients of autograd, on one device and for two networks unevenly on three; both
    passes' products under torch's own counter of FLOP."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    found, module, arguments = traced(name, blocks)
    check(found, module, arguments)
    if name in ("gpt2", "bert-moe"):
        check(found, module, arguments, seed=2)
    with FlopCounterMode(display=False) as forward, sdpa_kernel(SDPBackend.MATH):
        loss = module(*arguments)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    counted = forward.get_total_flops(), backward.get_total_flops()
    assert summed(found.program, products_of) == counted


class Everything(nn.Module):
    """Operators that the networks do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.grouped = nn.Linear(8, 8)
        self.convolve = nn.Conv2d(2, 4, 3, padding=1, stride=2, bias=False)
        self.classes = nn.Linear(8, 5)
        self.dropout = nn.Dropout(0.0)
        self.mask: Any
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).triu(1))

    def forward(self, x: Any, images: Any, labels: Any) -> Any:
        """x [3, 4, 6], images [3, 2, 4, 4], labels [3]."""
        y = x @ self.weight
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        one, two = y.split([4, 4], dim=-1)
        y = torch.cat([two.neg(), one / 2 - 0.25], dim=-1) + torch.stack([y, 1 - y], dim=0).sum(
            dim=0
        )
        q = self.grouped(y).unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = q[:, ::1][:, :2], q[:, 2:]
        y = (
            F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )
        scores = torch.softmax(
            (y @ y.transpose(1, 2)).masked_fill(self.mask, float("-inf")), dim=-1
        )
        y = self.dropout(torch.bmm(scores, y)) + torch.arange(4.0, dtype=y.dtype)[:, None]
        pooled = F.adaptive_avg_pool2d(F.relu_(self.convolve(images)), 1).squeeze(-1).squeeze(-1)
        y = torch.tanh(y.mean(1))
        y = y + torch.sigmoid(pooled)[:, None, :].expand(3, 2, 4).reshape(3, 8)
        first, second = F.silu(y).chunk(2, dim=1)
        y = torch.cat([second.square(), F.gelu(first)], dim=1).unsqueeze(0).select(0, 0)
        return F.cross_entropy(torch.addmm(self.classes.bias, y, self.classes.weight.t()), labels)


@pytest.fixture(scope="module")
def everything() -> tuple[Traced, Any, tuple[Any, ...]]:
    """All of them traced, with the module and its arguments."""
    torch.manual_seed(1)
    module = Everything().double()
    arguments = (
        torch.randn(3, 4, 6).double(),
        torch.randn(3, 2, 4, 4).double(),
        torch.tensor([0, 3, 4]),
    )
    return trace(module, arguments), module, arguments


def test_every_other_operator(everything: tuple[Traced, Any, tuple[Any, ...]]) -> None:
    check(*everything)


def test_attention_is_brought_to_the_built_in_form() -> None:
    """One product before it and one behind: the theory has as many triples as the built-in
    graph's."""
    devices = [Device(name="d", flops_per_second=1e12)] * 3
    _, module, arguments = traced("vit", 2)
    found = trace(module, arguments, name="vit", unsliced={0: [1]}).program
    with shallow():
        built = model("vit", 6, 3, tiny=True)
    assert "permute" not in {node.kind for node in found.nodes}
    assert all(len(node.inputs) == 1 for node in found.nodes if node.kind == "attention")
    here, there = (
        theory_of(program, devices, measured_by_hap(3)).data.triples for program in (found, built)
    )
    assert len(here) == len(there)


class Strange(nn.Module):
    """A module that needs rules which do not exist."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Softplus())
        self.norm = nn.LayerNorm((3, 4))
        self.table = nn.Embedding(5, 4, padding_idx=0)

    def forward(self, x: Any, ids: Any) -> Any:
        """x [2, 3, 4], ids [2, 3]."""
        y = self.norm(self.inner(x)) + self.table(ids)
        return torch.sort(y, dim=-1).values.mean()


def test_operators_without_a_rule_are_listed(
    everything: tuple[Traced, Any, tuple[Any, ...]],
) -> None:
    """Each once, with all its places and what is missing."""
    arguments = torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(UnsupportedError) as error:
        trace(Strange(), arguments)
    assert str(error.value) == (
        "module: 4 operators without a rule: aten.softplus in inner.1, inner.2: no rule for this "
        "operator; aten.layer_norm in norm: layer norm over several dimensions, or without scale "
        "or shift; aten.embedding in table: embedding with a padding index or gradients by "
        "frequency; aten.sort in the module itself: no rule for this operator"
    )
    known, *_ = everything
    assert known.program.nodes


class Written(nn.Module):
    """Two linear layers and a buffer, with a forward given as a function."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.two, self.written = nn.Linear(4, 4), nn.Linear(4, 4), forward
        self.shift: Any
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, *arguments: Any) -> Any:
        """The function's."""
        return self.written(self, *arguments)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "mse": F.mse_loss,
    "mse, summed": nn.MSELoss(reduction="sum"),
    "mse, each": lambda y, x: F.mse_loss(y, x, reduction="none").mean(),
    "mse of unequal shapes": lambda y, x: F.mse_loss(y, x[:1]),
    "nll of log-softmax": lambda y, labels: F.nll_loss(F.log_softmax(y, dim=-1), labels),
    "entropy": lambda y, x: -(F.softmax(y, -1) * F.log_softmax(y, -1)).sum(-1).mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_their_gradients(loss: str) -> None:
    """On one device and, unevenly, on three."""
    torch.manual_seed(5)
    x = torch.randn(6, 4).double()
    seen = x.argmax(-1) if loss.startswith("nll") else x
    module = Written(lambda m, x, seen: LOSSES[loss](m.two(m.one(x)), seen)).double()
    found = trace(module, (x, seen))
    check(found, module, (x, seen))
    check(found, module, (x, seen), seed=0)


@pytest.mark.parametrize("label", [-100, -1, 4])
def test_labels_that_are_no_classes_are_refused(label: int) -> None:
    """Also in a slice of the rows alone; tracing reads no labels."""
    module = Written(lambda m, x, labels: F.cross_entropy(m.two(m.one(x)), labels))
    arguments = torch.randn(3, 4), torch.tensor([1, 2, label])
    found = trace(module, arguments)
    for seed in (None, 0):
        with pytest.raises(InputError, match=rf"no ignore_index\) \(got {label}, expected 0 to 3"):
            check(found, module, arguments, seed)


def test_parameters_that_are_not_trained_and_losses_that_are_none_are_refused() -> None:
    with pytest.raises(InputError, match="one scalar, the loss"):
        trace(nn.Linear(3, 2), (torch.randn(4, 3),))
    module, x = Written(lambda m, x: m.two(m.one(x)).mean()), torch.randn(3, 4)
    module.one.weight.requires_grad_(False)
    with pytest.raises(UnsupportedError, match=r"parameter in one.weight: does not require grad"):
        trace(module, (x,))


def without_gradients(m: Any, x: Any) -> Any:
    with torch.no_grad():
        z = m.one(x)
    return (z * m.two(x)).mean()


def slice_in_place(m: Any, x: Any) -> Any:
    z = m.one(x)
    z[:, :2].mul_(3)
    return z.pow(2).mean()


def likelihood(m: Any, x: Any) -> Any:
    return F.nll_loss(m.two(m.one(x)), x.argmax(-1))


@pytest.mark.parametrize("outside", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (without_gradients, r"torch.no_grad in .*\(one.bias, one.weight\)"),
        (slice_in_place, "aten.slice_scatter in the module itself: no rule"),
        (likelihood, "nll_loss of anything but log_softmax"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(forward: Any, words: str, outside: Any) -> None:
    """Whatever holds where `trace` is called."""
    with outside(), pytest.raises(UnsupportedError, match=words):
        trace(Written(forward), (torch.randn(3, 4),))


def data_without_gradients(m: Any, x: Any) -> Any:
    with torch.no_grad():
        shifted, scaled = x + m.shift, x * 2
        with torch.enable_grad():
            z = m.one(x)
    return (m.two(shifted) * scaled * z).mean()


def test_what_torch_cannot_export_is_one_line() -> None:
    module = Written(lambda m, x, y: m.two(m.one(x))[: int(y[0])].mean())
    seen = r"torch\.export finds no graph: .* depends on values of the data, at test_hap_trace.py:"
    with pytest.raises(UnsupportedError, match=seen) as error:
        trace(module, (torch.randn(3, 4), torch.tensor([2])))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_sizes_that_depend_on_values_are_one_line() -> None:
    module = Written(lambda m, x, y: m.two(m.one(x))[y > 1].mean())
    with pytest.raises(UnsupportedError, match=r"aten\.index: the size of what it gives depends"):
        trace(module, (torch.randn(3, 4), torch.tensor([2, 1, 3])))


def flat_view(m: Any, x: Any) -> Any:
    z = m.one(x)
    z.view(-1).mul_(2)
    return (z * m.two(x)).mean()


def plain(m: Any, x: Any) -> Any:
    z = m.one(x)
    z += m.two(x)
    z *= 2
    return z.pow(2).mean()


def constant(m: Any, x: Any) -> Any:
    """The buffer is read before and after it changes, through a slice as well."""
    z = m.one(x) + m.shift
    m.shift[1:].add_(1)
    return (z * m.two(x) * m.shift).mean()


@pytest.mark.parametrize("forward", [data_without_gradients, plain, flat_view, constant])
def test_regions_of_data_and_changes_in_place_compute_what_autograd_does(forward: Any) -> None:
    torch.manual_seed(3)
    module, x = Written(forward).double(), torch.randn(3, 4).double()
    found = trace(module, (x,))
    assert module.shift.tolist() == [0, 1, 2, 3], "tracing changes nothing"
    check(found, module, (x,))


def test_dropout_is_left_out_and_said() -> None:
    module = Written(lambda m, x: F.dropout(F.dropout(m.one(x)), 0.1).mean())
    assert dict(trace(module, (torch.randn(4, 4),)).notes) == {"dropout": 2}


def test_rules_are_of_operators_that_torch_has() -> None:
    for name in RULES:
        library, operator = name.split(".")
        assert library == "hetplan" or hasattr(getattr(torch.ops, library), operator), name
