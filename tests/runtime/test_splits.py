"""Models of others, split by plans: losses, checkpoints and weights are those of one process."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")
pytest.importorskip("transformers", reason="transformers is an extra of the tests")

from torch import nn  # noqa: E402

from fakes.hugging import FACTORIES, NAMES, with_data  # noqa: E402
from hetplan.errors import InputError, UnsupportedError  # noqa: E402
from hetplan.plans.plan import load_plan  # noqa: E402
from hetplan.runtime.engine.chain import describe  # noqa: E402
from hetplan.runtime.engine.models import check_planned  # noqa: E402
from hetplan.runtime.tracing.layers import Called  # noqa: E402
from hetplan.runtime.tracing.split import shape_of  # noqa: E402
from parity.asking import HUGGING, request, run_forked, served  # noqa: E402
from parity.commanded import made, widened  # noqa: E402
from parity.device import default_type  # noqa: E402
from parity.splits import COMBINED, TYPES, WORLDS, alone  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks of both plans left."""
    folder = tmp_path_factory.mktemp("splits")
    run_forked("parity.splits", folder, imports=HUGGING)
    return folder


@pytest.mark.engine
@pytest.mark.parametrize(("name", "dtype"), COMBINED)
def test_two_plans_train_as_one_process(name: str, dtype: str, folder: Path) -> None:
    """Half of the steps under one plan, the rest under another one from its checkpoint; the weights
    come back under the model's own names, those of Hugging Face by `from_pretrained`."""
    expected, weights = alone(name, dtype)
    losses = [x for world in WORLDS for x in torch.load(folder / f"losses-{world}.pt")[name, dtype]]
    assert losses == pytest.approx(expected, rel=TYPES[dtype])
    with default_type(dtype):
        module: Any = FACTORIES[name]()
    if hasattr(module, "from_pretrained"):
        saved = folder / f"{name}-{dtype}-saved"
        assert len(list(saved.glob("*.safetensors"))) > 1
        state = type(module).from_pretrained(saved, dtype=getattr(torch, dtype)).state_dict()
    else:
        state = torch.load(folder / f"{name}-{dtype}.pt")
    assert state.keys() == weights.keys()
    for key, value in weights.items() if dtype == "float64" else ():  # AdamW magnifies rounding
        assert torch.allclose(state[key], value, rtol=1e3 * TYPES[dtype], atol=TYPES[dtype]), key


CONFIGURED = ("gpt2", "llama", "bert", "mixtral")
STEPS, ROWS = 2, 8
# Encoder and decoder, and a model that is none of Hugging Face's: what the layer `engine` takes
# through all commands. By default gpt2 goes through them, and `test_experts` has a mixture.
COMMANDED = (("t5", "float32"), ("unet", "float64"))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("gpt2", "float32", marks=pytest.mark.engine),
        *(
            pytest.param(
                name,
                dtype,
                marks=pytest.mark.engine if (name, dtype) in COMMANDED else pytest.mark.wide,
            )
            for name in FACTORIES
            for dtype in TYPES
            if (name, dtype) != ("gpt2", "float32")
        ),
    ],
)
def test_commands_take_a_model_from_its_configuration_to_its_checkpoint(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """Plan, run, resume under another plan, and what one process has: losses, and weights that
    `from_pretrained` reads."""
    with default_type(dtype), widened():
        check_commands(name, dtype, tmp_path)


def check_commands(name: str, dtype: str, tmp_path: Path) -> None:
    """One model in one type."""
    factory = f"parity.commanded:{'double_' if dtype == 'float64' else ''}{name}"
    module = made(name)
    if name == "mixtral":  # torch's grouped product knows no fp64
        module.set_experts_implementation("eager")
    on: list[Any] = ["--cluster", "home", "--global-batch", ROWS, "--precision", "fp32", "-q"]
    on += ["--time-limit", 600, "--factory", factory]
    if name in CONFIGURED:
        module.config.save_pretrained(tmp_path)
        on[-2:] = ["--model", tmp_path / "config.json", "--sequence", 6]
    words: list[Any] = []
    for strategy, more in (("poplar", []), ("amp", ["--resume", "--save", tmp_path / "saved"])):
        plan = tmp_path / f"{strategy}.json"
        words += ["plan", *on, "--strategies", strategy, "-o", plan, "&&", "run", plan]
        words += ["--factory", factory, "--checkpoint", tmp_path / "kept"]
        words += ["--steps", STEPS, "--learning-rate", 0.01, "--device", "cpu", "--json", *more]
        words += ["&&"]
    answer = served([request("all", *words[:-1], imports=HUGGING)], tmp_path, 1)["all"]
    assert answer["code"] == 0, answer["err"]
    worlds = [load_plan(tmp_path / f"{s}.json").world_size for s in ("poplar", "amp")]
    assert min(worlds) > 1 or name != "gpt2", worlds
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    expected = {}
    for step in range(2 * STEPS):
        loss = Called(module)(*module.batch(step, 0, ROWS))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected[step] = float(loss.detach())
    told = re.findall(r'"step": (\d+),\s*"loss": ([^,\s}]+)', answer["out"])
    assert {int(k): float(loss) for k, loss in told} == pytest.approx(expected, rel=TYPES[dtype])
    if hasattr(module, "from_pretrained"):
        trained = type(module).from_pretrained(tmp_path / "saved", dtype=torch.get_default_dtype())
    else:
        trained = made(name)
        trained.load_state_dict(torch.load(tmp_path / "saved" / "model.pt"))
    for (key, ours), theirs in zip(
        trained.state_dict().items(), module.state_dict().values(), strict=True
    ):
        fine = dtype == "float64"  # AdamW magnifies rounding
        close = {"rtol": 1e-7, "atol": 1e-10} if fine else {"rtol": 1e-2, "atol": 1e-4}
        assert torch.allclose(ours, theirs, **close), key


class Strange(nn.Module):
    """One linear layer, and what a case does with it."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(4, 4), nn.BatchNorm1d(4), act

    def forward(self, x: Any, targets: Any) -> Any:
        return self.act(self, self.linear(x), targets)


def described(act: Any, names: list[str]) -> None:
    """Split what does something."""
    rows = torch.ones(1, 4), torch.ones(1, 4)
    describe(with_data(Strange(act), lambda step, first, last: rows), names, rows)


@pytest.mark.parametrize(
    ("act", "names", "message"),
    [
        (lambda m, x, t: (m.norm(x) - t).square().mean(), ["linear"], "batch normalisation"),
        (lambda m, x, t: (x - t).square().mean().sqrt(), ["linear"], "does not add up"),
        (lambda m, x, t: (x / len(x)).mean(), ["linear"], r"by len\(x\) at test_splits.py:\d+;"),
        (lambda m, x, t: sum(row.mean() for row in x), ["linear"], "a loop over the rows"),
        (
            lambda m, x, t: nn.functional.softplus((x - t).mean(1).view(-1, 2)[:, 0]).mean(),
            ["linear"], "rows in pairs",
        ),
        (lambda m, x, t: (x if x.sum() > 0 else t).mean(), ["linear"], "depends on values"),
        (lambda m, x, t: (x - t).mean(), ["a", "b", "c"], "does not match the plan"),
        (lambda m, x, t: (m.linear(x) - t).mean(), ["a", "b"], "does not match the plan"),
        (
            lambda m, x, t: torch.zeros_like(t).copy_(x).mean(), ["linear"],
            "changes in place what is not one layer's",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused(act: Any, names: list[str], message: str) -> None:
    with pytest.raises((InputError, UnsupportedError), match=message):
        described(act, names)


def test_a_number_that_passes_between_layers_is_named() -> None:
    node: Any = SimpleNamespace(name="drawn", meta={"val": torch.ones(())})
    with pytest.raises(UnsupportedError, match=r"got .a single number., expected one row"):
        shape_of(node)


def test_planning_says_that_a_module_cannot_be_split() -> None:
    rows = torch.ones(2, 4), torch.ones(2, 4)
    module = with_data(Strange(lambda m, x, t: (x - t).mean() / len(x)), lambda *_: rows)
    note = check_planned(module, ["linear"], None)
    assert note is not None and "refuse all plans but those of hap: Strange: forward fixes" in note
    assert re.search(r"by len\(x\) at test_splits.py:\d+;", note)
    assert check_planned(module, ["linear"], wanted=False) is None


def attended(seen: Any) -> Any:
    """Attention under a mask of [rows, 1, 3, 3], made from the rows."""

    def act(_: Any, x: Any, targets: Any) -> Any:
        row = x[:, None].unflatten(-1, (2, 2)).flatten(1, 2)  # [rows, 2, 2]
        heads = torch.cat((row, row[:, :1]), 1)[:, None]
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=seen(x))
        return (mixed[:, 0, :2].flatten(1) - targets).square().mean()

    return act


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (lambda x: torch.ones(3, 3).tril().bool().expand(x.shape[0], 1, 3, 3), (None, True)),
        (lambda x: torch.ones(3, 3).bool().expand(x.shape[0], 1, 3, 3), (None, False)),
        (lambda x: torch.ones(3, 3).triu().bool().expand(x.shape[0], 1, 3, 3), "mask"),
        (lambda x: torch.ones(3, 3).tril().log().expand(x.shape[0], 1, 3, 3), "mask"),
    ],
    ids=["causal", "everything", "another order", "added numbers"],
)
def test_masks_that_attention_can_say_by_itself_are_dropped(seen: Any, expected: Any) -> None:
    """And the loss stays what it was."""
    rows = torch.tensor([[0.3, -1.0, 0.5, 2.0]]), torch.tensor([[1.0, 0.0, -1.0, 0.5]])
    module = with_data(Strange(attended(seen)), lambda step, first, last: rows)
    chain = describe(module, ["linear"], rows)
    (node,) = [n for n in chain.layers[0].graph.nodes if "scaled_dot" in n.name]
    mask = node.kwargs.get("attn_mask", (*node.args, None, None, None, None)[3])
    said = (mask, node.kwargs.get("is_causal", False))
    assert said == expected if expected != "mask" else mask is not None
    (read,) = chain.read(lambda first, last: rows, (0, 1), 0, 1, "cpu")
    (loss,) = chain.call(0, read)
    assert loss.item() == pytest.approx(Called(module)(*rows).item(), rel=1e-6)


@pytest.mark.engine
def test_names_of_traces_and_of_configurations() -> None:
    for name in ("gpt2", "llama"):
        module: Any = FACTORIES[name]()
        chain = describe(module, NAMES[name], module.batch(0, 0, 1))
        assert chain.names == tuple(NAMES[name])
        own = dict(module.named_parameters())
        assert chain.parameters.keys() == own.keys()
        blocks = [
            k for k, layer in enumerate(chain.parameter_names) if any(".1." in n for n in layer)
        ]
        assert len(blocks) == 1
