"""Data that users' code draws: the same on all ranks that read the same rows, or one line that says
where they differ."""

from __future__ import annotations

import json
import random
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.plans.plan import Plan, save_plan  # noqa: E402
from hetplan.runtime.engine import data  # noqa: E402
from hetplan.runtime.engine.data import (  # noqa: E402
    checksums,
    drawing_data,
    keeping_generators,
    place_factors,
    seed_generators,
    tensor_checksum,
)
from hetplan.runtime.engine.models import make_module  # noqa: E402
from hetplan.runtime.job import Job  # noqa: E402
from parity.asking import Answers, request, run_forked, served  # noqa: E402
from parity.drawn import CASES, ONE, PIPELINE, TEXT, alone, noise  # noqa: E402

LINE = "ranks that read the same rows have different data"
ROWS = "replica 0, micro-batch 0, rows 0 to 2"


def drawn() -> list[float]:
    """The next number of each generator."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002


def test_generators_are_seeded_and_left_as_they_were() -> None:
    seed_generators(3, "one")
    first = drawn()
    seed_generators(3, "two")
    other = drawn()
    seed_generators(3, "one")
    with drawing_data(3, 7, 4):
        inside = drawn()
    assert drawn() == first, "what is drawn inside does not move the generators outside"
    for seed, step, row in ((3, 7, 4), (4, 7, 4), (3, 8, 4), (3, 7, 2)):
        with drawing_data(seed, step, row):
            assert (drawn() == inside) == ((seed, step, row) == (3, 7, 4))
    assert not set(first) & set(other) and not set(first) & set(inside)


def test_a_context_around_several_batches_restores_the_generators() -> None:
    seed_generators(3, "one")
    first = drawn()
    with drawing_data(3, 7, 4):
        inside = drawn()
    seed_generators(3, "one")
    with keeping_generators():
        for _ in range(2):
            with drawing_data(3, 7, 4):
                assert drawn() == inside
    assert drawn() == first
    with pytest.raises(KeyError), keeping_generators():
        raise KeyError
    seed_generators(3, "one")
    with drawing_data(3, 7, 4):
        drawn()
    assert drawn() == first, "the error has ended the context"


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int64", "uint8", "bool"])
def test_every_bit_and_place_counts(dtype: str) -> None:
    x = torch.arange(30).remainder(2).to(getattr(torch, dtype)).view(5, 6)
    same = torch.cat([x, x])[5:]  # it begins elsewhere in its memory
    assert tensor_checksum(same) == tensor_checksum(x) == tensor_checksum(x.t().contiguous().t())
    seen = {tensor_checksum(x), tensor_checksum(x.view(6, 5)), tensor_checksum(x.flip(1))}
    for place in range(30):
        changed = x.clone()
        changed.view(-1)[place] = 1 - x.view(-1)[place].to(torch.int64)
        seen.add(tensor_checksum(changed))
    assert len(seen) == 33


def test_places_count_across_the_parts_of_a_large_tensor() -> None:
    count = len(place_factors("cpu"))
    x = torch.zeros(3 * count, dtype=torch.int64)
    seen = set()
    places = (0, 1, 5, count, count + 5, 2 * count)
    for place in places:
        changed = x.clone()
        changed[place] = 1
        seen.add(tensor_checksum(changed))
    assert len(seen) == len(places)


def test_a_tensor_may_have_more_parts_than_a_part_has_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond 32 GiB, which parts of four words stand for."""
    monkeypatch.setattr(data, "CHUNK", 4)
    monkeypatch.setattr(data, "place_factors", lambda *given: place_factors(*given)[:4])
    x = torch.zeros(70, dtype=torch.int64)
    seen = {tensor_checksum(x)}
    for place in range(70):
        changed = x.clone()
        changed[place] = 1
        seen.add(tensor_checksum(changed))
    assert len(seen) == 71


def test_what_else_data_may_hold() -> None:
    """Numbers, texts, arrays, nested; of other objects the type alone: they may be written
    differently by every process."""
    transformers = pytest.importorskip("transformers")
    words = torch.arange(6).view(2, 3)
    batch = transformers.BatchEncoding({"input_ids": words, "labels": words, "length": 3})
    assert checksums((batch, None)) == checksums(({**batch}, None))
    assert set(checksums((batch, None))) == {"input_ids", "labels", "length"}
    nested = {"a": [1, 2.5, "x", None], "b": {"c": np.arange(3)}, "d": object()}
    told = checksums(((words, nested), words))
    assert set(told) == {
        "inputs[0]", *(f"inputs[1].a[{k}]" for k in range(4)), "inputs[1].b.c", "inputs[1].d",
        "labels",
    }  # fmt: skip
    assert told == checksums(((words, nested | {"d": object()}), words))
    assert told != checksums(((words, nested | {"d": set()}), words))
    assert told != checksums(((words, nested | {"a": [1, 2.5, "y", None]}), words))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Case -> [rank] what it told."""
    folder = tmp_path_factory.mktemp("drawn")
    run_forked("parity.drawn", folder)
    made: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("told-*.pt")):
        for name, one in torch.load(file).items():
            made.setdefault(name, []).append(one)
    return made


@pytest.mark.engine
@pytest.mark.parametrize("name", CASES)
def test_ranks_draw_what_one_process_does(name: str, told: dict[str, Any]) -> None:
    """Under every plan with the same micro-batches, also where stages divide rows differently."""
    losses = alone(name)
    for rank in told[name]:
        assert rank["losses"] == pytest.approx(losses, rel=1e-12)
        assert rank["kept"]


@pytest.mark.engine
def test_ranks_of_a_program_draw_the_same(told: dict[str, Any]) -> None:
    (first, *others) = told["program"]
    assert all(rank["losses"] == first["losses"] for rank in others)
    assert first["losses"][0] != first["losses"][1]
    wanted = f"step 2, run 0, rows 0 to 4: {LINE}: labels on rank 0 other than on rank 1 (expected"
    assert [rank["error"].startswith(wanted) for rank in told["program"]] == [True, True]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "where", "ranks"),
    [
        ("pipeline", ROWS, "rank 0 other than on rank 1"),
        ("row groups of one stage", "replica 0, micro-batch 0, rows 0 to 4", "rank 0 other"),
        ("tensor ranks", ROWS, "rank 0 other than on rank 1"),
        ("unequal numbers of micro-batches", ROWS, "rank 0 other than on rank 1"),
    ],
)
def test_data_that_differ_are_one_line(
    name: str, where: str, ranks: str, told: dict[str, Any]
) -> None:
    for rank in told[name]:
        assert f"step 2, {where}: {LINE}: labels on {ranks}" in rank["error"]
        assert "drawn without a seed, or by rank" in rank["error"]


@pytest.mark.engine
def test_rows_of_one_rank_are_compared_with_none(told: dict[str, Any]) -> None:
    assert [rank["error"] for rank in told["apart"]] == ["", ""]


def started(name: str, plan: Path, folder: Path, *options: object) -> list[dict[str, Any]]:
    """The two ranks of a plan as torchrun starts them: processes that import the factory each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        request(
            f"{name} {rank}", "run", plan, *options,
            environment=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, folder=str(folder),
        )
        for rank in range(2)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """All runs of the command line."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "my_models.py").write_text(TEXT)

    def saved(name: str, plan: Plan) -> Path:
        save_plan(plan, folder / name)
        return folder / name

    one, two = saved("one.json", ONE), saved("two.json", PIPELINE)
    replicas = saved("replicas.json", CASES["tensor ranks"])
    common = ("--steps", 3, "--device", "cpu", "--json", "--quiet", "--factory")
    asked: list[dict[str, Any]] = []
    for name in ("given", "augmented"):
        asked += [request(f"{name} one", "run", one, *common, f"my_models:{name}")]
        asked += [request(f"{name} forked", "run", two, *common, f"my_models:{name}")]
        asked += started(f"{name} started", two, folder, *common, f"my_models:{name}")
    seed = ("my_models:given", "--seed", 4)
    asked += [request("seed one", "run", one, *common, *seed)]
    asked += started("seed started", two, folder, *common, *seed)
    asked += started("tensor started", replicas, folder, *common, "my_models:given")
    asked += started("torch started", two, folder, *common, "my_models:given", "--backend", "torch")
    data = ("--data", "my_models:rows")
    asked += started("data started", two, folder, *common, "my_models:given", *data)
    for name in ("entropy", "by_rank"):
        asked += started(f"{name} started", two, folder, *common, f"my_models:{name}")
    asked += started(
        "entropy torch", two, folder, *common, "my_models:entropy", "--backend", "torch"
    )
    asked += [request("entropy forked", "run", two, *common, "my_models:entropy")]
    asked += [request("entropy one", "run", one, *common, "my_models:entropy")]
    kept = ("--checkpoint", folder / "kept", "--steps")
    begun = ["run", two, *common, "my_models:augmented", *kept, 1]
    gone_on = ["run", one, *common, "my_models:augmented", *kept, 2, "--resume"]
    asked += [request("resumed", *begun, "&&", *gone_on)]
    for one_request in asked:
        one_request["folder"] = str(folder)
    return served(asked, folder, 4)


def losses_of(answer: dict[str, Any]) -> dict[int, float]:
    """By step, of the last document."""
    assert answer["code"] == 0, answer["err"]
    document: dict[str, Any] = {}
    start, decoder = 0, json.JSONDecoder()
    while answer["out"][start:].strip():
        start = answer["out"].index("{", start)
        document, start = decoder.raw_decode(answer["out"], start)
    return {one["step"]: one["loss"] for one in document["steps"]}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("given forked", "given one"),
        ("given started 0", "given one"),
        ("augmented forked", "augmented one"),
        ("augmented started 0", "augmented one"),
        ("seed started 0", "seed one"),
        ("tensor started 0", "given one"),
        ("torch started 0", "given one"),
        ("data started 0", "given one"),
    ],
)
def test_unseeded_factories_give_the_losses_of_one_process(
    name: str, like: str, answers: Answers
) -> None:
    expected = losses_of(answers[like])
    assert len(expected) == 3 and losses_of(answers[name]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.engine
def test_seeds_and_noise_give_other_losses(answers: Answers) -> None:
    first = {name: losses_of(answers[f"{name} one"])[0] for name in ("given", "augmented", "seed")}
    assert len(set(first.values())) == 3


@pytest.mark.engine
def test_a_resumed_run_draws_what_one_without_a_break_does(answers: Answers) -> None:
    expected = losses_of(answers["augmented one"])
    resumed = losses_of(answers["resumed"])
    assert resumed == pytest.approx({step: expected[step] for step in (1, 2)}, rel=1e-5)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "step"),
    [("entropy started", 0), ("by_rank started", 1), ("entropy torch", 0)],
)
def test_factories_that_no_seed_reaches_are_stopped(name: str, step: int, answers: Answers) -> None:
    for rank in range(2):
        answer = answers[f"{name} {rank}"]
        assert answer["code"] == 2 and answer["err"].count("\n") == 1, answer["err"]
        line = f"rank {rank}: step {step}, {ROWS}: {LINE}: inputs, labels on rank 0 other than"
        assert line in answer["err"]


@pytest.mark.engine
def test_forked_ranks_are_stopped_likewise(answers: Answers) -> None:
    answer = answers["entropy forked"]
    assert answer["code"] == 1 and answer["err"].count("\n") == 1
    assert f"step 0, {ROWS}: {LINE}: inputs, labels" in answer["err"]
    losses_of(answers["entropy one"])  # no other rank reads its rows


def drawn_values(module: Any) -> list[Any]:
    """First weights of a model, and the data of two rows."""
    inputs, labels = module.batch(0, 0, 2)
    return [inputs, labels, *module.state_dict().values()]


@pytest.mark.parametrize(
    "options",
    [{}, {"virtual": True}, {"backend": "torch"}, {"data": "my_models:rows"}, {"seed": 1}],
    ids=str,
)
def test_every_start_seeds_before_the_import(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_models.py").write_text(TEXT)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []
    for state in range(2):
        monkeypatch.delitem(sys.modules, "my_models", raising=False)
        random.seed(state)
        np.random.seed(state)  # noqa: NPY002
        torch.manual_seed(state)
        made.append(drawn_values(make_module(Job(plan=ONE, factory="my_models:given", **options))))
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)


def test_noise_needs_a_seed() -> None:
    """The noise that these tests add is not the same twice."""
    assert not torch.equal(noise((3,)), noise((3,)))
