"""On GPUs: the plans of the parity tests, and `hetplan run --device cuda` with its faults and what
it measures. Several ranks share one through the host's memory, or each has its own by NCCL."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.plans.plan import Plan, parse_plan, save_plan  # noqa: E402
from hetplan.profiling.models.model import load_model  # noqa: E402
from hetplan.runtime.launch.devices import gpus  # noqa: E402
from hetplan.runtime.measuring.layers import measure_profile  # noqa: E402
from parity.asking import Answers, request, run_forked, served  # noqa: E402
from parity.cases import CASES, Case  # noqa: E402
from parity.curves import check_equal, check_resumed, loaded  # noqa: E402
from parity.faulty import PLACE, PLAN  # noqa: E402
from parity.gradients import STAGED, TOLERANCE, Written, check_case, read  # noqa: E402
from parity.halves import GRADIENTS, PRECISIONS, WORLDS, chosen, error_of  # noqa: E402
from parity.splits import plan_of  # noqa: E402

GPUS = gpus()


pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU that torch can use")


WAYS = [
    pytest.param(("cuda", 8), id="one GPU, staged"),
    pytest.param(
        ("cuda each", min(GPUS, 8)),
        id="a GPU each, NCCL",
        marks=pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
    ),
]


@pytest.fixture(scope="module", params=WAYS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """World size -> [rank] -> case -> (loss, fragments)."""
    device, most = request.param
    folder = tmp_path_factory.mktemp("cuda")
    run_forked("parity.gradients", folder, PARITY_DEVICE=device, PARITY_RANKS=str(most))
    return read(folder, sorted({case.world for case in CASES if case.world <= most}))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_loss_and_gradients_are_those_of_one_cpu(case: Case, written: Written) -> None:
    """Every kind of plan, dropout included: masks are the same on every device."""
    if case.world not in written:
        pytest.skip(f"needs {case.world} GPUs")
    check_case(case, written, TOLERANCE[case.dtype])


@pytest.mark.parametrize("name", STAGED)
def test_the_ways_agree(name: str, written: Written) -> None:
    """Through the host's memory or not, with lanes or tags."""
    (case,) = [case for case in CASES if case.name == name]
    for rank in written.get(case.world, []):
        (loss, fragments), (again, staged) = rank[name], rank[f"staged: {name}"]
        tolerance = TOLERANCE[case.dtype]
        assert again == pytest.approx(loss, rel=tolerance)
        for one, other in zip(fragments, staged, strict=True):
            assert torch.allclose(one["values"], other["values"], rtol=tolerance, atol=tolerance)


def test_training_on_gpus_goes_on_anywhere(tmp_path: Path) -> None:
    """Any two plans give one loss curve; checkpoints of GPUs are read under other plans, on GPUs
    and on CPUs."""
    run_forked("parity.curves", tmp_path, PARITY_DEVICE="cuda")
    whole = loaded(tmp_path, "curves")
    check_equal(whole)
    for device in ("cuda", "cpu"):
        run_forked("parity.curves:resume", tmp_path, PARITY_DEVICE=device)
        check_resumed(tmp_path, whole)


def test_half_precision_is_within_its_rounding(tmp_path: Path) -> None:
    run_forked("parity.halves", tmp_path, PARITY_DEVICE="cuda")
    written = read(tmp_path, WORLDS)
    for case in chosen():
        for precision in PRECISIONS:
            error_of(case, precision, written, GRADIENTS[precision])


BAD = {
    "killed": "was killed by SIGKILL",
    "stopped": "hangs; no sign of life",
    "stuck": "hangs; at forward of chunk 0, micro-batch 0",
    "asleep": "hangs; at forward of chunk 0, micro-batch 0",
    "hungry_on_gpu": "out of memory",
    "wrong": "KeyError: 'no such key'",
}


MODEL, SEQUENCE, SAMPLES = "gpt2", 128, 4


def gpt2_plan(*stages: tuple[int, int]) -> Plan:
    """GPT-2 in fp32, four micro-batches, a stage for each range of layers."""
    model = load_model(MODEL, sequence=SEQUENCE, precision="fp32")
    alone = {"row_shares": [1.0], "tensor_shares": [1.0]}
    document = {
        "format": "hetplan-plan",
        "version": 1,
        "name": MODEL,
        "workload": {
            "model": MODEL,
            "cluster": "made up",
            "global_batch": 4 * SAMPLES,
            "sequence": SEQUENCE,
            "precision": "fp32",
            "layers": [layer.name for layer in model.layers],
        },
        "devices": [{"type": "A", "node": 0} for _ in stages],
        "replicas": [
            {
                "stages": [
                    {"layers": [r], "devices": [[d]], **alone} for d, r in enumerate(stages)
                ],
                "micro_batches": [{"count": 4, "samples": SAMPLES}],
            }
        ],
    }
    return parse_plan(document, where=MODEL)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Every fault at the same time, then runs to measure one after the other."""
    folder = tmp_path_factory.mktemp("cuda")
    file, one, two, split = (folder / f"{name}.json" for name in ("plan", "one", "two", "split"))
    save_plan(PLAN, file)
    save_plan(plan_of("gpt2", 3), split)
    layers = len(load_model(MODEL).layers)
    save_plan(gpt2_plan((0, layers)), one)
    save_plan(gpt2_plan((0, 4), (4, layers)), two)
    cuda = ("--device", "cuda")
    asked = [
        request(fault, "run", file, *cuda, "--factory", f"parity.faulty:{fault}", "--quiet")
        for fault in BAD
    ]  # fmt: skip
    written = served(asked, folder, width=len(asked))
    kept = folder / "kept"
    of_others = ("--factory", "fakes.hugging:gpt2", "--steps", 3)
    timed = [
        request("one", "run", one, *cuda, "--steps", 6, "--json"),
        request("two", "run", two, *cuda, "--steps", 3, "--json", "--checkpoint", kept),
        request("table", "run", file, *cuda, "--factory", "parity.cases:two", "--steps", 2),
        *(
            request(f"split on {device}", "run", split, "--device", device, "--json", *of_others)
            for device in ("cuda", "cpu")
        ),
    ]
    written |= served(timed, folder, width=1)
    resumed = ("--steps", 3, "--json", "--checkpoint", kept, "--resume")
    return written | served([request("resumed", "run", one, *cuda, *resumed)], folder, width=1)


@pytest.mark.parametrize("fault", BAD)
def test_a_rank_that_ends_badly_is_named_and_nothing_is_left(fault: str, answers: Answers) -> None:
    answer = answers[fault]
    assert (answer["code"], answer["left"]) == (1, False)
    assert answer["err"].startswith(f"hetplan: error: {PLACE}: ") and BAD[fault] in answer["err"]


def test_ranks_that_share_a_gpu_are_told(answers: Answers) -> None:
    assert answers["table"]["code"] == 0, answers["table"]["err"]
    assert "ranks on GPUs" in answers["table"]["out"]
    assert (GPUS < 4) == ("through the host's memory (gloo)" in answers["table"]["out"])


def test_stages_on_gpus_have_the_losses_of_one(answers: Answers) -> None:
    """Also behind a checkpoint, under another plan."""
    whole, first, second = (json.loads(answers[name]["out"]) for name in ("one", "two", "resumed"))
    assert {run["device"] for run in (whole, first, second)} == {"cuda"}
    losses = [step["loss"] for step in whole["steps"]]
    assert len(set(losses)) == 6
    halves = [step["loss"] for run in (first, second) for step in run["steps"]]
    assert halves == pytest.approx(losses, rel=1e-3)


def test_a_model_of_others_is_traced_before_its_ranks_are_forked(answers: Answers) -> None:
    """Hugging Face's GPT-2: torch asks for GPUs while it traces, and ranks still get theirs."""
    losses = []
    for device in ("cuda", "cpu"):
        answer = answers[f"split on {device}"]
        assert answer["code"] == 0, answer["err"]
        losses.append([step["loss"] for step in json.loads(answer["out"])["steps"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_time_and_memory_are_near_the_profiles(answers: Answers) -> None:
    """Told; held within bounds that only an error would break: kernels of other processes share the
    GPU."""
    run = json.loads(answers["one"]["out"])
    model = load_model(MODEL, sequence=SEQUENCE, precision="fp32")
    (table,) = measure_profile(model, "cuda", micro_batches=(SAMPLES,), repeats=5).tables
    predicted, measured = 4 * sum(table.layer_seconds()), run["ranks"][0]["busy_seconds"]
    weights = 4.0 * model.params
    assert table.readings is not None
    kept, peak = sum(table.readings.saved_bytes), run["ranks"][0]["peak_bytes"]
    print(
        f"\npasses: {1e3 * measured:.4g} ms, the profile says {1e3 * predicted:.4g} ms; "
        f"memory: {peak / 2**20:.5g} MiB,"
        f" weights, gradients and AdamW {4 * weights / 2**20:.5g} MiB and {kept / 2**20:.5g} "
        "MiB kept by the passes",
        file=sys.stderr,
    )
    assert 0.3 < measured / predicted < 3.0
    assert 4 * weights < peak < 2.0 * (4 * weights + kept)


def test_nccl_with_one_rank(tmp_path: Path) -> None:
    """What one GPU can show of it: groups are made, and every exchange takes tensors on the GPU."""
    run_forked("parity.exchanges", tmp_path, PARITY_DEVICE="cuda")
    assert (tmp_path / "exchanged-1-0").read_text() == "gloo nccl"
