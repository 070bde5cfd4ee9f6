"""A small net with many losses: means, weighted means and sums of such, as training code has
them, and losses that no sum over micro-batches gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetplan.plans.plan import Plan, parse_plan

CLASSES, WIDTH, TOKENS, ROWS = 11, 6, 5, 8
LAYERS = ["emb", "h.0", "h.1", "out"]
WEIGHTS = torch.linspace(0.2, 3.0, CLASSES, dtype=torch.float64)
Act = Callable[["Net", Tensor, dict[str, Tensor]], Tensor]


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    """A net over tokens that returns act(net, outputs [rows, tokens, classes], data)."""

    def __init__(self, act: Act, inner: bool = False) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.h = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("weights", WEIGHTS.to(torch.get_default_dtype()))
        self.act, self.inner = act, inner

    def forward(
        self, ids: Tensor, labels: Tensor, mask: Tensor, values: Tensor, share: Tensor,
        number: Tensor,
    ) -> Tensor:  # fmt: skip
        data = {
            "ids": ids, "labels": labels, "mask": mask, "values": values, "share": share,
            "number": number,
        }  # fmt: skip
        x = self.emb(ids)
        for block in self.h:
            x = block(x)
            data["inner"] = data.get("inner", x)
        return self.act(self, self.out(x), data)


def rows(step: int, first: int, last: int) -> dict[str, Tensor]:
    """Rows [first, last) of a step's global batch: tokens, labels of which many are -100, a mask
    of the labels, real targets, a weight of each row, and the number of labels in the batch."""
    generator = torch.Generator().manual_seed(step)
    kind = torch.get_default_dtype()
    ids = torch.randint(0, CLASSES, (ROWS, TOKENS), generator=generator)
    lengths = torch.randint(1, TOKENS + 1, (ROWS,), generator=generator)
    seen = torch.arange(TOKENS) < lengths[:, None]
    labels = torch.where(seen, ids.roll(1, 1), -100)
    values = torch.randn(ROWS, TOKENS, CLASSES, generator=generator, dtype=kind)
    share = torch.rand(ROWS, generator=generator, dtype=kind) + 0.1
    data = {
        "ids": ids, "labels": labels, "mask": seen.to(kind), "values": values, "share": share,
    }  # fmt: skip
    return {name: x[first:last] for name, x in data.items()} | {"number": seen.sum()}


def flat(x: Tensor, data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs and labels, token by token."""
    return x.flatten(0, 1), data["labels"].flatten()


def each(x: Tensor, data: dict[str, Tensor]) -> Tensor:
    """The loss of each token [rows, tokens]; 0 without a label."""
    return F.cross_entropy(*flat(x, data), reduction="none").view_as(data["labels"])


def cross(x: Tensor, data: dict[str, Tensor], **options: Any) -> Tensor:
    return F.cross_entropy(*flat(x, data), **options)


def shifted(net: Net, x: Tensor, d: dict[str, Tensor]) -> Tensor:
    """The next token's loss."""
    return F.cross_entropy(x[:, :-1].flatten(0, 1), d["labels"][:, 1:].flatten())


def focal(net: Net, x: Tensor, d: dict[str, Tensor]) -> Tensor:
    loss = each(x, d)
    return ((1 - torch.exp(-loss)) ** 2 * loss)[d["labels"] != -100].mean()


def added_in_place(net: Net, x: Tensor, d: dict[str, Tensor]) -> Tensor:
    loss = cross(x, d)
    loss += 0.1 * (x**2).mean()
    loss /= 2
    return loss


def from_zero(net: Net, x: Tensor, d: dict[str, Tensor]) -> Tensor:
    total = torch.zeros((), dtype=x.dtype)
    for k in range(3):
        total += (x[..., k] - d["values"][..., k]).abs().mean()
    return total / 3


def balanced(net: Net, x: Tensor, d: dict[str, Tensor]) -> Tensor:
    """Classes weigh by how rare they are in the batch."""
    found = F.one_hot(d["ids"], CLASSES).sum((0, 1))
    weight = d["ids"].numel() / (CLASSES * found.clamp(min=1).to(x.dtype))
    return cross(x, d, weight=weight)


def gaussian(net: Net, x: Tensor, d: dict[str, Tensor]) -> Tensor:
    variance = F.softplus(x) + 0.1
    return 0.5 * (variance.log() + (x - d["values"]) ** 2 / variance).mean()


def vae(net: Net, x: Tensor, d: dict[str, Tensor]) -> Tensor:
    mu, log_var = x.chunk(2, 1) if x.shape[1] % 2 == 0 else (x[:, :2], x[:, 2:4])
    kl = -0.5 * torch.sum(1 + log_var - mu**2 - log_var.exp(), dim=(1, 2))
    return F.mse_loss(x, d["values"], reduction="sum") / x.size(0) + 0.1 * kl.mean(0)


def learned_weight(net: Net, x: Tensor, d: dict[str, Tensor]) -> Tensor:
    """Kendall's weighting of two tasks, with its constant summand."""
    return torch.exp(-net.scale) * cross(x, d) + net.scale + F.mse_loss(x, d["values"])


def distilled(net: Net, x: Tensor, d: dict[str, Tensor]) -> Tensor:
    teacher = (d["values"] / 2).softmax(-1)
    student = (x / 2).log_softmax(-1)
    soft = F.kl_div(student, teacher, reduction="batchmean") * 4
    return 0.7 * soft + 0.3 * cross(x, d)


def pairs(net: Net, x: Tensor, d: dict[str, Tensor]) -> Tensor:
    """A preference loss: the two halves of a row's tokens."""
    chosen, rejected = x[:, :2].logsumexp(-1).sum(-1), x[:, 2:4].logsumexp(-1).sum(-1)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def dice(net: Net, x: Tensor, d: dict[str, Tensor]) -> Tensor:
    """The dice loss of each row, averaged."""
    p, t = x.sigmoid().flatten(1), (d["values"] > 0).to(x.dtype).flatten(1)
    return (1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()


def two_selections(net: Net, x: Tensor, d: dict[str, Tensor]) -> Tensor:
    keep = d["mask"].bool()
    return F.cross_entropy(x[keep], d["labels"][keep]) + 0.1 * x[~keep].square().mean()


def inner_head(net: Net, x: Tensor, d: dict[str, Tensor]) -> Tensor:
    return cross(x, d) + 0.3 * (d["inner"] ** 2).mean()


def by_its_size(net: Net, x: Tensor, d: dict[str, Tensor]) -> Tensor:
    kept = x.sum(-1)[d["mask"].bool()]
    return kept.sum() / kept.numel()


RIGHT: dict[str, Act] = {
    "mean over tokens": lambda n, x, d: cross(x, d),
    "shifted": shifted,
    "class weights": lambda n, x, d: cross(x, d, weight=n.weights),
    "label smoothing": lambda n, x, d: cross(x, d, label_smoothing=0.1),
    "both": lambda n, x, d: cross(x, d, weight=n.weights, label_smoothing=0.2),
    "another ignored label": lambda n, x, d: F.cross_entropy(
        x.flatten(0, 1), d["ids"].flatten(), ignore_index=3
    ),
    "nll with weights": lambda n, x, d: F.nll_loss(
        x.log_softmax(-1).flatten(0, 1), d["labels"].flatten(), weight=n.weights
    ),
    "classes in dimension 1": lambda n, x, d: F.cross_entropy(x.transpose(1, 2), d["labels"]),
    "probabilities": lambda n, x, d: F.cross_entropy(
        x.flatten(0, 1), d["values"].softmax(-1).flatten(0, 1), weight=n.weights
    ),
    "half a mean": lambda n, x, d: 0.5 * F.mse_loss(x, d["values"]),
    "two means halved": lambda n, x, d: (cross(x, d) + F.l1_loss(x, d["values"])) / 2,
    "sum over items": lambda n, x, d: cross(x, d, reduction="sum") / d["number"],
    "batchmean": lambda n, x, d: F.kl_div(
        x.log_softmax(-1), d["values"].softmax(-1), reduction="batchmean"
    ),
    "boolean mean": lambda n, x, d: each(x, d)[d["labels"] != -100].mean(),
    "masked mean": lambda n, x, d: (each(x, d) * d["mask"]).sum() / d["mask"].sum(),
    "clamped count": lambda n, x, d: (each(x, d) * d["mask"]).sum() / d["mask"].sum().clamp(min=1),
    "count with epsilon": lambda n, x, d: (each(x, d) * d["mask"]).sum() / (d["mask"].sum() + 1e-6),
    "weighted rows": lambda n, x, d: (each(x, d).mean(1) * d["share"]).sum() / d["share"].sum(),
    "normed weights": lambda n, x, d: (each(x, d).mean(1) * d["share"] / d["share"].sum()).sum(),
    "weights by their mean": lambda n, x, d: (
        each(x, d).mean(1) * d["share"] / d["share"].mean()
    ).mean(),
    "dot of weights": lambda n, x, d: torch.dot(each(x, d).mean(1), d["share"]) / 7,
    "mean of rows' means": lambda n, x, d: (
        (each(x, d) * d["mask"]).sum(1) / d["mask"].sum(1)
    ).mean(),
    "sum": lambda n, x, d: cross(x, d, reduction="sum"),
    "sum over a constant": lambda n, x, d: (x - d["values"]).square().sum() / 100,
    "by the batch's size": lambda n, x, d: (x - d["values"]).square().sum() / x.shape[0],
    "by all elements": lambda n, x, d: (x - d["values"]).abs().sum() / x.numel(),
    "by tokens": lambda n, x, d: (x - d["values"]).abs().sum() / (x.shape[0] * x.shape[1]),
    "item of a mask": lambda n, x, d: cross(x, d, reduction="sum") / d["mask"].sum().item(),
    "focal": focal,
    "added in place": added_in_place,
    "from zero": from_zero,
    "balanced classes": balanced,
    "huber": lambda n, x, d: (
        F.huber_loss(x, d["values"], delta=0.7) + F.smooth_l1_loss(x, d["values"])
    ),
    "two classes": lambda n, x, d: F.binary_cross_entropy_with_logits(
        x, (d["values"] > 0).to(x.dtype), pos_weight=n.weights
    ),
    "margin": lambda n, x, d: F.multi_margin_loss(x.flatten(0, 1), d["ids"].flatten()),
    "hinge": lambda n, x, d: F.hinge_embedding_loss(x.sum(-1), 2 * d["mask"] - 1),
    "cosine": lambda n, x, d: F.cosine_embedding_loss(
        x.flatten(0, 1), d["values"].flatten(0, 1), (2 * d["mask"] - 1).flatten()
    ),
    "triplet": lambda n, x, d: F.triplet_margin_loss(x[:, 0], x[:, 1], x[:, 2]),
    "poisson": lambda n, x, d: F.poisson_nll_loss(x, d["values"].abs()),
    "soft margin": lambda n, x, d: F.soft_margin_loss(x, d["values"].sign()),
    "many labels": lambda n, x, d: F.multilabel_soft_margin_loss(
        x.flatten(0, 1), (d["values"] > 0).to(x.dtype).flatten(0, 1), weight=n.weights
    ),
    "gaussian": gaussian,
    "evidence": vae,
    "learned weight": learned_weight,
    "penalty": lambda n, x, d: (
        cross(x, d) + 0.01 * sum(p.square().sum() for p in n.out.parameters())
    ),
    "distilled": distilled,
    "pairs": pairs,
    "dice of rows": dice,
    "two selections": two_selections,
    "masked select": lambda n, x, d: torch.masked_select(x.sum(-1), d["mask"].bool()).mean(),
    "stacked": lambda n, x, d: torch.stack([cross(x, d), F.mse_loss(x, d["values"])]).mean(),
    "weighted stack": lambda n, x, d: (
        torch.stack([cross(x, d), F.mse_loss(x, d["values"])]) * n.weights[:2]
    ).sum(),
    "mean of positions": lambda n, x, d: (x - d["values"]).square().mean(0).sum(-1).mean(),
    "where labelled": lambda n, x, d: torch.where(d["labels"] == -100, 0.0, each(x, d)).sum()
    / (d["labels"] != -100).sum(),
    "none without labels": lambda n, x, d: torch.where(
        d["mask"].sum() > 0, (each(x, d) * d["mask"]).sum() / d["mask"].sum(), 0.0
    ),
    "an inner head": inner_head,
    "mean over a selection's size": by_its_size,
    "less than a constant": lambda n, x, d: cross(x, d) - 0.25,
    "negative": lambda n, x, d: -(x.log_softmax(-1) * d["values"]).sum(-1).mean(),
    "constant of the batch": lambda n, x, d: x.square().sum() + d["values"].mean(),
}  # fmt: skip

REFUSED: dict[str, tuple[Act, str]] = {
    "root": (lambda n, x, d: F.mse_loss(x, d["values"]).sqrt(), "sqrt of a mean"),
    "perplexity": (lambda n, x, d: cross(x, d).exp(), "exp of a mean"),
    "logarithm": (lambda n, x, d: torch.log(F.mse_loss(x, d["values"]) + 1), "log of a mean"),
    "the worst tokens": (lambda n, x, d: each(x, d).flatten().topk(4).values.mean(), "topk over"),
    "the worst": (lambda n, x, d: each(x, d).max(), "max over all rows"),
    "norm": (lambda n, x, d: (x - d["values"]).norm(), "norm"),
    "as many as rows": (
        lambda n, x, d: each(x, d).flatten().topk(x.shape[0]).values.mean(),
        "influence .*topk over",
    ),
    "in order": (
        lambda n, x, d: each(x, d).flatten().sort().values[x.shape[0] :].mean(),
        "influence .*sort over",
    ),
    "own threshold": (
        lambda n, x, d: each(x, d)[each(x, d) > 0.5].mean(), "that the model's outputs decide",
    ),
    "product": (lambda n, x, d: cross(x, d) * F.mse_loss(x, d["values"]), "mul of two sums"),
    "ratio": (lambda n, x, d: cross(x, d) / x.square().mean(), "division by a sum"),
    "own scale": (
        lambda n, x, d: cross(x, d) / cross(x, d).detach(), "division by a sum",
    ),
    "flooding": (lambda n, x, d: (cross(x, d) - 0.5).abs() + 0.5, "abs of a mean"),
    "spread": (lambda n, x, d: x.std(), "std over all rows"),
    "dice of the batch": (
        lambda n, x, d: 1 - 2 * (x.sigmoid() * d["mask"][..., None]).sum()
        / (x.sigmoid().sum() + d["mask"].sum()),
        "division by a sum",
    ),
    "no mean": (lambda n, x, d: each(x, d).mean(1), r"not one number .* of sizes \[rows\]"),
    "first row": (lambda n, x, d: each(x, d)[0].mean(), "select over all rows"),
    "centred": (lambda n, x, d: (x - x.mean(0)).square().mean(), "samples influence each other"),
    "by the largest": (
        lambda n, x, d: (each(x, d) / each(x, d).detach().amax()).mean(), "influence",
    ),
}  # fmt: skip


def plan_of(name: str) -> Plan:
    """One process with unequal micro-batches; two unequal replicas; two stages."""

    def stage(first: int, last: int, device: int) -> dict[str, Any]:
        shares = {"row_shares": [1.0], "tensor_shares": [1.0]}
        return {"layers": [[first, last]], "devices": [[device]], **shares}

    def replica(stages: list[dict[str, Any]], *counts: tuple[int, int]) -> dict[str, Any]:
        batches = [{"count": count, "samples": samples} for count, samples in counts]
        return {"stages": stages, "micro_batches": batches}

    whole, last = (0, len(LAYERS)), len(LAYERS)
    replicas = {
        "one": [replica([stage(*whole, 0)], (2, 3), (1, 2))],
        "dp": [replica([stage(*whole, 0)], (2, 2)), replica([stage(*whole, 1)], (1, 3), (1, 1))],
        "pp": [replica([stage(0, 2, 0), stage(2, last, 1)], (2, 3), (1, 2))],
    }[name]
    workload = {
        "model": "net", "cluster": "made up", "global_batch": ROWS, "sequence": TOKENS,
        "precision": "fp32", "layers": LAYERS,
    }  # fmt: skip
    devices = [{"type": "A", "node": 0}] * (1 if name == "one" else 2)
    document = {
        "format": "hetplan-plan", "version": 1, "name": name, "workload": workload,
        "devices": devices, "replicas": replicas, "schedule": "1f1b",
    }  # fmt: skip
    return parse_plan(document, where=name)
