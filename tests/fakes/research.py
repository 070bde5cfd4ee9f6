"""Small modules as ordinary research code writes them: noise, hooks, own backward code, state, and
losses in which samples meet.

Each is a row of `MODULES`, with what hetplan has to say of it. `RIGHT`: training under any plan is
the training of one process. `NOISY`: the same, save that one process draws other numbers. Any other
text: a pattern that the one line has with which hetplan refuses the module.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fakes.hugging import with_data

TOKENS, WIDTH, CLASSES = 4, 6, 5
LAYERS = ("embed", "block-0", "block-1", "head")
RIGHT, NOISY = "right", "noisy"
ROWS, BACKWARD, STATE = "samples influence each other", "backward pass has code", "state"
DRAWN, IN_PLACE, GRAPH = "Python's or numpy's", "changes in place", "finds no graph"
# Losses that may be refused as such before samples are compared.
ROWS_OR_LOSS = f"{ROWS}|does not add up over micro-batches|a value between layers|{GRAPH}"


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Net(nn.Module):
    """An embedding, two blocks and a head, with hooks for what a case does between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.more()

    def more(self) -> None:
        """Further submodules, buffers and attributes."""

    def first(self, x: Tensor) -> Tensor:
        """What comes in."""
        return self.embed(x)

    def between(self, x: Tensor) -> Tensor:
        """What passes from one block to the other."""
        return x

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of what comes out."""
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        x = self.blocks[1](self.between(x))
        return self.loss(x, labels)


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {}


def is_(verdict: str) -> Callable[[Any], Any]:
    """Adds a class to `MODULES`, under its name with blanks for capital letters."""

    def add(cls: Any) -> Any:
        name = "".join(f" {c.lower()}" if c.isupper() else c for c in cls.__name__).strip()
        MODULES[name] = cls, verdict
        return cls

    return add


# ---- plain -------------------------------------------------------------------------------------


@is_(RIGHT)
class Plain(Net):
    pass


@is_(RIGHT)
class ZeroHead(Net):
    def more(self) -> None:
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


@is_(RIGHT)
class LowRank(Net):
    """An adapter whose second factor begins at zero, beside a frozen weight."""

    def more(self) -> None:
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        nn.init.zeros_(self.b.weight)
        self.blocks[0].requires_grad_(False)

    def between(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x))


@is_(RIGHT)
class GroupNorms(Net):
    def more(self) -> None:
        self.norm = nn.GroupNorm(2, TOKENS)
        self.instance = nn.InstanceNorm1d(TOKENS)

    def between(self, x: Tensor) -> Tensor:
        return self.instance(self.norm(x))


@is_(RIGHT)
class Tokens(Net):
    """Attention over the tokens of a sample, written by hand."""

    def between(self, x: Tensor) -> Tensor:
        return (x @ x.mT / WIDTH**0.5).softmax(-1) @ x


@is_(RIGHT)
class WeightNorm(Net):
    def more(self) -> None:
        self.embed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


@is_(RIGHT)
class AlongTokens(Net):
    """What would mix samples along their dimension, along the tokens."""

    def between(self, x: Tensor) -> Tensor:
        y = x.roll(1, 1) + x.flip(1) + x.cumsum(1) + x.sort(1).values - x.mean((1, 2), True)
        best = y.topk(2, 1).values.sum(1, keepdim=True)
        return x + 0.1 * (y + best) / y.abs().amax((1, 2), True)


@is_(RIGHT)
class Normed(Net):
    """Weights with a parametrization, which has a number of its own."""

    def more(self) -> None:
        self.head = parametrizations.weight_norm(self.head)


@is_(RIGHT)
class ScaledGradient(Net):
    def between(self, x: Tensor) -> Tensor:
        return 0.1 * x + (0.9 * x).detach()


@is_("has a name that torch.fx needs itself")
class Named(Net):
    """A table under the name of an attribute of torch's own graphs."""

    def more(self) -> None:
        self.code = nn.Embedding(CLASSES, WIDTH)

    def between(self, x: Tensor) -> Tensor:
        return x + self.code(x.argmax(-1) % CLASSES)


@is_("the name of a word of Python")
class Worded(Net):
    def more(self) -> None:
        self.register_parameter("lambda", nn.Parameter(torch.ones(WIDTH)))

    def between(self, x: Tensor) -> Tensor:
        return x * getattr(self, "lambda")


@is_("gradients of an embedding are sparse")
class Sparse(Net):
    def more(self) -> None:
        self.table = nn.Embedding(CLASSES, WIDTH, sparse=True)

    def between(self, x: Tensor) -> Tensor:
        return x + self.table(x.argmax(-1) % CLASSES)


@is_(RIGHT)
class TimeFirst(Net):
    """A recurrent block whose samples are in the second dimension."""

    def more(self) -> None:
        self.rnn = nn.LSTM(WIDTH, WIDTH)

    def between(self, x: Tensor) -> Tensor:
        return x + self.rnn(x.transpose(0, 1))[0].transpose(0, 1)


@is_(RIGHT)
class Compiled(Net):
    """A block that torch.compile wraps."""

    def more(self) -> None:
        self.blocks[1] = torch.compile(self.blocks[1], backend="eager")


# ---- samples that meet -------------------------------------------------------------------------


@is_(ROWS)
class InBatchNegatives(Net):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = F.normalize(x[:, 0], dim=-1), F.normalize(x.mean(1), dim=-1)
        scores = left @ right.T / 0.1
        return F.cross_entropy(scores, torch.arange(scores.shape[0]))


@is_(ROWS_OR_LOSS)
class BothWays(Net):
    """CLIP's loss."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = x[:, 0] @ x[:, 1].T
        own = torch.arange(scores.shape[0])
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


@is_(ROWS_OR_LOSS)
class PairsOfSamples(Net):
    """SigLIP's loss."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = x[:, 0] @ x[:, 1].T
        signs = 2 * torch.eye(scores.shape[0]) - 1
        return -F.logsigmoid(signs * scores).mean()


@is_(ROWS_OR_LOSS)
class SameClass(Net):
    """A supervised contrastive loss."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z, classes = F.normalize(x[:, 0], dim=-1), y[:, 0]
        same = (classes[:, None] == classes[None]).to(z.dtype)
        logs = (z @ z.T / 0.5).log_softmax(-1)
        return -((same * logs).sum(-1) / same.sum(-1)).mean()


@is_(ROWS)
class Mixup(Net):
    def first(self, x: Tensor) -> Tensor:
        return self.embed(0.7 * x + 0.3 * x.roll(1, 0))


@is_(ROWS)
class DrawnMixup(Net):
    def first(self, x: Tensor) -> Tensor:
        order = torch.randperm(x.shape[0])
        return self.embed(0.7 * x + 0.3 * x[order])


@is_(ROWS)
class HiddenMixup(Net):
    """Manifold mixup, in the middle of the model."""

    def between(self, x: Tensor) -> Tensor:
        return 0.5 * x + 0.5 * x.flip(0)


@is_(ROWS)
class Centred(Net):
    def between(self, x: Tensor) -> Tensor:
        return (x - x.mean((0, 1))) / (x.std((0, 1)) + 1e-5)


@is_(ROWS)
class LargestOfBatch(Net):
    def between(self, x: Tensor) -> Tensor:
        return x / x.abs().amax()


@is_(RIGHT)
class WeighedByBatch(Net):
    """The mean of the weights is a total of the batch, like a number of labels."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(self.head(x).flatten(0, 1), y.flatten(), reduction="none")
        weights = 1.0 + y.flatten().to(x.dtype)
        return (each * weights / weights.mean()).mean()


@is_(ROWS)
class Sorted(Net):
    """Sorted outputs beside sorted targets: a Wasserstein distance."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x.mean((1, 2)).sort().values, y.to(x.dtype).mean(1).sort().values)


@is_(ROWS_OR_LOSS)
class SoftOverSamples(Net):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        weights = x.mean((1, 2)).softmax(0)
        each = F.cross_entropy(self.head(x).flatten(0, 1), y.flatten(), reduction="none")
        return (each.view_as(y).mean(1) * weights * weights.shape[0]).mean()


@is_(ROWS)
class Running(Net):
    def between(self, x: Tensor) -> Tensor:
        return x + 0.1 * x.cumsum(0)


@is_(ROWS)
class AcrossSamples(Net):
    """Attention between the samples of a batch."""

    def more(self) -> None:
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=False)

    def between(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


@is_(ROWS)
class BesideTheFirst(Net):
    def between(self, x: Tensor) -> Tensor:
        return x - 0.5 * x[:1]


@is_(ROWS_OR_LOSS)
class Decorrelated(Net):
    """A weak penalty on the covariance of the batch, as VICReg has it."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = x.mean(1)
        z = z - z.mean(0)
        penalty = (z.T @ z).square()
        each = F.cross_entropy(self.head(x).flatten(0, 1), y.flatten(), reduction="none")
        return (each.view_as(y).mean(1) + 0.01 * penalty.mean()).mean()


@is_(ROWS)
class Balanced(Net):
    """A router's auxiliary loss: over all tokens of the batch, twice."""

    def more(self) -> None:
        self.router = nn.Linear(WIDTH, 3)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1).flatten(0, 1)
        balance = (shares.mean(0) * F.one_hot(shares.argmax(-1), 3).to(x.dtype).mean(0)).sum()
        each = F.cross_entropy(self.head(x).flatten(0, 1), y.flatten(), reduction="none")
        return (each + balance).mean()


@is_(RIGHT)
class Frequencies(Net):
    """Weights by how often a class is in the batch, which is a total of the batch."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        counts = F.one_hot(y, CLASSES).sum((0, 1)).to(x.dtype)
        each = F.cross_entropy(self.head(x).flatten(0, 1), y.flatten(), reduction="none")
        return (each / (1 + counts[y.flatten()])).mean()


@is_(ROWS)
class BesideTheMedian(Net):
    def between(self, x: Tensor) -> Tensor:
        return x - x.median(0).values


@is_(ROWS)
class Ranked(Net):
    def between(self, x: Tensor) -> Tensor:
        return x + 0.5 * x[x.mean((1, 2)).argsort()]


# ---- backward code -----------------------------------------------------------------------------


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return -0.5 * gradient


class Sign(torch.autograd.Function):
    """Signs, with the gradient of the identity."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return gradient


class Square(torch.autograd.Function):
    """A square, with its own gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        (x,) = context.saved_tensors
        return 2 * x * gradient


@is_(BACKWARD)
class ReversedGradient(Net):
    def between(self, x: Tensor) -> Tensor:
        return Reversed.apply(x)


@is_(BACKWARD)
class HiddenByZeros(ReversedGradient):
    """A head of zeros, behind which nothing has a gradient in the first step."""

    def more(self) -> None:
        nn.init.zeros_(self.head.weight)


@is_(BACKWARD)
class StraightThrough(Net):
    def between(self, x: Tensor) -> Tensor:
        return Sign.apply(x)


@is_(BACKWARD)
class ReversedBeforeFrozen(Net):
    """Own backward code behind which nothing trains, until somebody unfreezes the embedding."""

    def more(self) -> None:
        self.embed.requires_grad_(False)

    def first(self, x: Tensor) -> Tensor:
        return Reversed.apply(self.embed(x))


@is_(RIGHT)
class WeighedByInputs(Net):
    """Weights of tokens that are real numbers of the data, and are counted over the batch."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weights = x[..., 0].abs()
        y = self.blocks[1](self.blocks[0](self.embed(x)))
        each = F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten(), reduction="none")
        return (each.view_as(labels) * weights).sum() / weights.sum()


@is_(RIGHT)
class ScaledInPlace(Net):
    """Data that are changed in place once they are the layer's."""

    def first(self, x: Tensor) -> Tensor:
        return self.embed((x * 1.0).mul_(0.5))


@is_(RIGHT)
class OfNumbers(Net):
    """Code that does not take data with gradients."""

    def first(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            raise TypeError("data have no gradients")
        return self.embed(x)


@is_(RIGHT)
class DetachedStraightThrough(Net):
    def between(self, x: Tensor) -> Tensor:
        return x + (x.sign() - x).detach()


@is_(RIGHT)
class OwnFunction(Net):
    def between(self, x: Tensor) -> Tensor:
        return Square.apply(x)


@is_(BACKWARD)
class MaskedGradient(Net):
    """Rows of a table that do not train."""

    def more(self) -> None:
        mask = torch.ones(WIDTH, WIDTH)
        mask[:2] = 0
        self.embed.weight.register_hook(lambda gradient: gradient * mask)


@is_(BACKWARD)
class ClampedInside(Net):
    def between(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return x


@is_(BACKWARD)
class HookedModule(Net):
    def more(self) -> None:
        self.blocks[1].register_full_backward_hook(lambda _, into, out: (0.1 * into[0],))


@is_(BACKWARD)
class HookedBefore(Net):
    def more(self) -> None:
        self.blocks[1].register_full_backward_pre_hook(lambda _, out: (0.1 * out[0],))


@is_(BACKWARD)
class AccumulatedHook(Net):
    """Gradients that are changed once they are whole."""

    def more(self) -> None:
        def halve(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad *= 0.5

        self.head.weight.register_post_accumulate_grad_hook(halve)


@is_(RIGHT)
class Watched(Net):
    """A hook that only looks."""

    def more(self) -> None:
        self.seen: list[Any] = []
        self.head.weight.register_hook(lambda gradient: None)
        self.blocks[0].register_forward_hook(lambda module, into, out: None)


@is_(RIGHT)
class Teacher(Net):
    """A frozen teacher without gradients, towards which the student goes."""

    def more(self) -> None:
        self.teacher = nn.Linear(WIDTH, CLASSES).requires_grad_(False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            aim = self.teacher(x)
        return F.mse_loss(self.head(x), aim)


@is_(RIGHT)
class StoppedBranch(Net):
    """A branch that does not train, in a region without gradients."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            aim = self.head(x).softmax(-1)
        return F.mse_loss(self.head(x.flip(1)).softmax(-1), aim)


@is_(RIGHT)
class Reentrant(Net):
    def first(self, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[1], self.embed(x), use_reentrant=True)

    def between(self, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[0], x, use_reentrant=True)


@is_(RIGHT)
class Recomputed(Net):
    def between(self, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[0], x, use_reentrant=False)


@is_(BACKWARD)
class ReentrantWithoutGradient(Net):
    """The first layer of a reentrant checkpoint whose inputs have no gradient does not train."""

    def first(self, x: Tensor) -> Tensor:
        return checkpoint(self.embed, x, use_reentrant=True)


@is_(GRAPH)
class Quantised(Net):
    def between(self, x: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127)


@is_("forward computes gradients itself")
class Adversarial(Net):
    """Inputs that move along their gradient."""

    def first(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            moved = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.embed(moved).square().sum(), moved)
        return self.embed(x + 0.1 * gradient.sign())


# ---- state -------------------------------------------------------------------------------------


@is_(ROWS)
class Averaged(Net):
    """A moving average of the values over all samples, kept under no_grad."""

    def more(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
        return x - self.mean


@is_(ROWS)
class Assigned(Net):
    mean: Tensor

    def more(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def between(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return x - self.mean


@is_(STATE)
class Watching(Net):
    """A statistic that is kept and never read."""

    largest: Tensor

    def more(self) -> None:
        self.register_buffer("largest", torch.zeros(()))

    def between(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.detach().abs().max())
        self.largest = self.largest + 1
        return x


@is_(STATE)
class Annealed(Net):
    """A factor that grows with the calls."""

    def more(self) -> None:
        self.calls = 0

    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * min(1.0, self.calls / 10)


@is_(STATE)
class CountedInDictionary(Net):
    def more(self) -> None:
        self.told = {"calls": 0}

    def between(self, x: Tensor) -> Tensor:
        self.told["calls"] += 1
        return x * (1.0 + 0.1 * self.told["calls"])


@is_(IN_PLACE)
class CountedInBuffer(Net):
    def more(self) -> None:
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def between(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x * torch.clamp(self.steps / 10, max=1.0)


@is_(STATE)
class MovingTeacher(Net):
    """A teacher that follows the student in every forward pass."""

    def more(self) -> None:
        self.teacher = nn.Linear(WIDTH, CLASSES).requires_grad_(False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.data = torch.lerp(self.teacher.weight, self.head.weight, 0.1)
            aim = self.teacher(x)
        return F.mse_loss(self.head(x), aim)


CALLS = [0]


@is_(STATE)
class CountedOutside(Net):
    """A counter that no module has."""

    def between(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        return x * (1.0 + 0.1 * CALLS[0])


@is_(STATE)
class Queue(Net):
    """MoCo's queue of negatives."""

    queue: Tensor

    def more(self) -> None:
        self.register_buffer("queue", torch.randn(4, WIDTH))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = x.mean(1)
        scores = torch.cat([(z * x[:, 0]).sum(-1, keepdim=True), z @ self.queue.T], 1)
        self.queue = torch.cat([z.detach(), self.queue])[:4]
        return F.cross_entropy(scores, torch.zeros(scores.shape[0], dtype=torch.long))


@is_(STATE)
class FirstCall(Net):
    """A scale that the first batch decides, as of an ActNorm."""

    def more(self) -> None:
        self.scale, self.is_made = nn.Parameter(torch.ones(WIDTH)), False

    def between(self, x: Tensor) -> Tensor:
        if not self.is_made:
            self.scale.data = 1.0 / (1.0 + x.detach().std((0, 1)))
            self.is_made = True
        return x * self.scale


@is_(BACKWARD)
class HookedByTheFirstCall(Net):
    """A hook that the first call adds."""

    def between(self, x: Tensor) -> Tensor:
        if not hasattr(self, "hook"):
            self.hook = self.head.weight.register_hook(lambda gradient: 0.5 * gradient)
        return x


@is_(STATE)
class SpectralNorm(Net):
    def more(self) -> None:
        self.embed = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


@is_(IN_PLACE)
class BatchNorm(Net):
    def more(self) -> None:
        self.norm = nn.BatchNorm1d(TOKENS)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


@is_(RIGHT)
class FrozenBatchNorm(Net):
    def more(self) -> None:
        self.norm = nn.BatchNorm1d(TOKENS).eval()

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


@is_(ROWS)
class BatchNormWithoutState(Net):
    def more(self) -> None:
        self.norm = nn.BatchNorm1d(TOKENS, track_running_stats=False)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


@is_(RIGHT)
class Cached(Net):
    """Positions that the first call makes."""

    def more(self) -> None:
        self.positions: dict[int, Tensor] = {}

    def first(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.positions:
            self.positions[x.shape[1]] = torch.arange(x.shape[1]).to(x.dtype)[:, None] / 10
        return self.embed(x + self.positions[x.shape[1]])


@is_("forward asks for ranks or seeds a generator")
class Seeded(Net):
    """The same noise in every step."""

    def between(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return x + 0.1 * torch.randn_like(x)


# ---- noise -------------------------------------------------------------------------------------


@is_(NOISY)
class Diffusion(Net):
    """Noise and a time for each sample; the noise is what the model learns."""

    def more(self) -> None:
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.linspace(0.9, 0.1, 10))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        time = torch.randint(0, 10, (x.shape[0],))
        kept = self.kept[time][:, None, None]
        x = self.embed(kept.sqrt() * x + (1 - kept).sqrt() * noise)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), noise)


@is_(NOISY)
class Reparametrised(Net):
    """A variational bottleneck."""

    def more(self) -> None:
        self.scale = nn.Linear(WIDTH, WIDTH)

    def between(self, x: Tensor) -> Tensor:
        return x + torch.exp(0.5 * self.scale(x)) * torch.randn_like(x)


@is_(NOISY)
class MaskedTokens(Net):
    """Tokens that the model has to guess, drawn in forward; the loss is of these alone."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.rand(labels.shape) < 0.5
        x = self.embed(x.masked_fill(hidden[..., None], 0.0))
        for block in self.blocks:
            x = block(x)
        each = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="none")
        return (each.view_as(labels) * hidden).mean()


@is_(NOISY)
class SomeTokens(Net):
    """A masked autoencoder: half of the tokens, drawn for each sample."""

    def first(self, x: Tensor) -> Tensor:
        order = torch.rand(x.shape[:2]).argsort(1)
        kept = order[:, : TOKENS // 2, None].expand(-1, -1, WIDTH)
        return self.embed(x.gather(1, kept))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x.mean(1)), y[:, 0])


@is_(NOISY)
class Gumbel(Net):
    def between(self, x: Tensor) -> Tensor:
        return x + F.gumbel_softmax(x, hard=True)


@is_(NOISY)
class DropPath(Net):
    """Samples that skip a block."""

    def between(self, x: Tensor) -> Tensor:
        kept = x.new_empty(x.shape[0], 1, 1).bernoulli_(0.7)
        return x * kept / 0.7


@is_(NOISY)
class NewNoise(Net):
    """Noise drawn into a new tensor, before the first layer and without reading it."""

    def first(self, x: Tensor) -> Tensor:
        noise = torch.empty(x.shape[0], 1, WIDTH, dtype=x.dtype).normal_()
        return self.embed(x + 0.1 * noise)


@is_(NOISY)
class Dropped(Net):
    def more(self) -> None:
        self.drop = nn.Dropout(0.3)

    def between(self, x: Tensor) -> Tensor:
        return F.dropout(self.drop(x), 0.2, self.training)


@is_(NOISY)
class NoisyInputs(Net):
    """Noise on the inputs, which a later layer reads as well."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x + 0.3 * torch.randn_like(x)
        y = self.blocks[1](self.blocks[0](self.embed(x)) + x)
        return self.loss(y + x, labels)


@is_(NOISY)
class ShuffledTokens(Net):
    def first(self, x: Tensor) -> Tensor:
        return self.embed(x[:, torch.randperm(TOKENS)])


@is_(DRAWN)
class NumpyNoise(Net):
    def between(self, x: Tensor) -> Tensor:
        return x * float(np.random.uniform(0.5, 1.5))  # noqa: NPY002 (as users do)


@is_(DRAWN)
class PythonNoise(Net):
    def between(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else 2 * x


@is_(DRAWN)
class Skipped(Net):
    """A block that is left out now and then."""

    def between(self, x: Tensor) -> Tensor:
        return x if random.random() < 1e-9 else self.blocks[0](x)


def drawn(step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """[rows, TOKENS, WIDTH] numbers and [rows, TOKENS] classes, which differ from row to row."""
    kind = torch.get_default_dtype()
    places = torch.arange(TOKENS * WIDTH, dtype=kind)
    rows = torch.arange(first, last)
    x = torch.sin((rows[:, None] + 1.7 * step + 1) * (1 + 0.37 * places)).view(-1, TOKENS, WIDTH)
    y = ((rows[:, None] + step) ** 2 + 3 * torch.arange(TOKENS)) % CLASSES
    return x, y


def made(name: str) -> nn.Module:
    """A module with its first weights and its data."""
    torch.manual_seed(5)
    build, _ = MODULES[name]
    return with_data(build(), drawn)


def mixup(plan: object = None) -> nn.Module:
    """A factory of a module that hetplan refuses."""
    return made("mixup")
