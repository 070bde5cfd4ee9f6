"""A plan file says everything: commands that take one need nothing else, wherever it lies."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from fakes.cli import Call
from hetplan.planner.hap import Hap
from hetplan.planner.library import plan as plan_by_python
from hetplan.planner.proposals import propose
from hetplan.plans.degrees import Degrees
from hetplan.plans.making import new_plan, with_inputs, workload_of
from hetplan.plans.plan import Plan, load_plan, save_plan
from hetplan.profiling.hardware.cluster import open_cluster
from hetplan.profiling.inputs.inputs import Inputs, Replaced
from hetplan.profiling.profiles.predict import predict
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.replay import replay
from hetplan.solvers.run import Options, Run
from present import present

CLUSTER = {
    "format": "hetplan-cluster",
    "version": 1,
    "name": "lab",
    "nodes": [
        {
            "count": 2,
            "devices": 1,
            "device": "my-card",
            "intra_node_gbit_per_s": 170.1,
            "network_gbit_per_s": 10.3,
            "nodes_per_switch": 1,
            "uplink_gbit_per_s": 7,
        },
        {"devices": 2, "device": "T4", "intra_node_gbit_per_s": 50, "network_gbit_per_s": 25},
    ],
    "devices": {
        "my-card": {"memory_gib": 24, "peak_tflops": {"fp32": 22}, "memory_gb_per_s": 600},
    },
}
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
LAYERS = 6  # the embedding, four blocks, the head
BATCH = 8


def stages(workload: Workload) -> Plan:
    """Two uneven stages on three devices: a row group of two, then a device alone."""
    first = {"layers": [[0, 4]], "devices": [[0], [2]], "row_shares": [3.0, 1.0]}
    second = {"layers": [[4, LAYERS]], "devices": [[1]]}
    batches = [{"count": 2, "samples": 4}]
    return new_plan(workload, [{"stages": [first, second], "micro_batches": batches}])


def replicas(workload: Workload) -> Plan:
    """Two unequal replicas under ZeRO 1 with shards of their own sizes, with recomputation."""
    each = [
        {
            "stages": [{"layers": [[0, LAYERS]], "devices": [[device]]}],
            "micro_batches": [{"count": count, "samples": 2}],
        }
        for device, count in ((0, 3), (2, 1))
    ]
    shares = [0.75, 0.0, 0.25, 0.0]
    return new_plan(workload, each, zero=1, zero_shares=shares, recomputation="full")


def degrees(workload: Workload) -> Plan:
    """Two context ranks in each of two replicas, with overlap."""
    each = [
        {
            "stages": [
                {"layers": [[0, LAYERS]], "devices": [[d], [d + 1]], "row_shares": [1.0, 1.0]}
            ],
            "micro_batches": [{"count": 4, "samples": 1}],
        }
        for d in (0, 2)
    ]
    return new_plan(workload, each, degrees=Degrees(context=2, overlap=["gradients"]))


def program(workload: Workload) -> Plan:
    """HAP's program with its batch in proportion to the devices' speeds."""
    methods = [method for method in Hap.methods if method.name == "dp-proportional"]
    (found,) = propose(Hap(), workload, Run(Options(time_limit=20)), methods)[:1]
    return present(found.plan)


KINDS: dict[str, Callable[[Workload], Plan]] = {
    "stages": stages,
    "replicas": replicas,
    "degrees": degrees,
    "program": program,
}


@dataclass(frozen=True)
class Files:
    """What a plan was made of. folder: with all of them."""

    folder: Path
    workload: Workload

    @property
    def cluster(self) -> Path:
        """The cluster's file."""
        return self.folder / "cluster.yaml"

    @property
    def config(self) -> Path:
        """The model's Hugging Face configuration."""
        return self.folder / "tiny" / "config.json"

    def plan_with_inputs(self, kind: str) -> Plan:
        """A plan that carries its inputs."""
        return with_inputs(KINDS[kind](self.workload), Inputs.of(self.workload))


def write_files(folder: Path) -> None:
    """A cluster file and a configuration."""
    (folder / "tiny").mkdir(parents=True)
    (folder / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (folder / "tiny" / "config.json").write_text(json.dumps(CONFIG))


def workload_in(folder: Path, profile: Profile | None = None) -> Workload:
    """That of the files of a folder. profile: None: it is predicted."""
    return make_workload(
        folder / "tiny" / "config.json",
        folder / "cluster.yaml",
        BATCH,
        precision="fp32",
        profile=profile,
        framework="deepspeed",
        stack="compiled",
    )


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """The profile of the workload, which takes the longest to make."""
    folder = tmp_path_factory.mktemp("predicted")
    write_files(folder)
    return workload_in(folder).profile


@pytest.fixture
def files(tmp_path: Path, predicted: Profile) -> Files:
    """A cluster file, a configuration, and the workload of both."""
    folder = tmp_path / "made here"
    write_files(folder)
    return Files(folder, workload_in(folder, predicted))


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the working folder."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def moved(files: Files, kind: str, empty: Path) -> Path:
    """The plan file in the empty folder; the files that it was made from are gone."""
    made = files.folder / "plan.json"
    save_plan(files.plan_with_inputs(kind), made)
    target = empty / "plan.json"
    made.rename(target)
    files.cluster.unlink()
    files.config.unlink()
    return target


def told(text: str) -> list[str]:
    """The lines of standard error that say what is not as it was."""
    return [line for line in text.splitlines() if "going on with what the plan carries" in line]


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_alone_is_shown(hetplan: Call, files: Files, empty: Path, kind: str) -> None:
    plan = moved(files, kind, empty)
    ran = hetplan("show", plan)
    assert ran.code == 0 and "tiny on lab" in ran.out
    if kind != "degrees":  # these are drawn by files alone, from their stages
        (line,) = told(ran.err)
        assert "cluster.yaml is not there" in line and "config.json is not there" in line
    drawn = hetplan("show", plan, "--html", empty / "page.html")
    assert drawn.code == 0 and "my-card" in (empty / "page.html").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_alone_is_replayed_as_it_was(
    hetplan: Call, files: Files, empty: Path, kind: str
) -> None:
    expected = replay(KINDS[kind](files.workload), files.workload)
    ran = hetplan("plan", "simulate", moved(files, kind, empty), "--json")
    assert ran.code == 0 and len(told(ran.err)) == 1
    assert ran.json["predicted_seconds"] == expected.seconds
    assert ran.json["peak_bytes"] == list(expected.peak_bytes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_alone_is_exported(hetplan: Call, files: Files, empty: Path, kind: str) -> None:
    ran = hetplan("export", moved(files, kind, empty), "--to", "torchrun")
    assert ran.code == 0 and "torchrun" in ran.out


TARGETS = ("megatron", "bridge", "deepspeed", "torchtitan", "flagscale")


@pytest.mark.parametrize("to", TARGETS)
def test_an_export_has_the_figures_of_the_model_in_the_plan(
    hetplan: Call, files: Files, empty: Path, to: str
) -> None:
    """As an export to which the model's file is given."""
    replica = {
        "stages": [{"layers": [[0, LAYERS]], "devices": [[2, 3]], "tensor_shares": [1.0, 1.0]}],
        "micro_batches": [{"count": 2, "samples": 4}],
    }
    if to == "deepspeed":
        replica["stages"] = [{"layers": [[0, LAYERS]], "devices": [[2]]}]  # it has no tensor ranks
    plan = with_inputs(new_plan(files.workload, [replica]), Inputs.of(files.workload))
    save_plan(plan, empty / "plan.json")
    given = hetplan("export", "plan.json", "--to", to, "--model", files.config)
    files.config.unlink()
    alone = hetplan("export", "plan.json", "--to", to)
    assert given.code == 0 and alone.out == given.out
    if to == "megatron":
        assert "--hidden-size 32" in alone.out


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_alone_is_made_again_without_a_node(
    hetplan: Call, files: Files, empty: Path, kind: str
) -> None:
    """The new plan carries the whole cluster, and is replanned in turn."""
    words = ("--strategies", "dp", "--time-limit", 20, "--quiet")
    plan = moved(files, kind, empty)
    first = hetplan("plan", "replan", plan, "--lost", "node2", *words, "-o", "second.json")
    assert first.code == 0, first.err
    second = load_plan("second.json")
    inputs = present(second.inputs)
    assert inputs == present(Inputs.of(files.workload)).with_paths(inputs.files)
    again = hetplan("plan", "replan", "second.json", "--lost", "node1,node2", *words)
    assert again.code == 0, again.err


@pytest.mark.parametrize("kind", ["stages", "program"])
def test_what_if_of_a_plan_alone(hetplan: Call, files: Files, empty: Path, kind: str) -> None:
    plan = moved(files, kind, empty)
    words = ("--remove", "node1", "--strategies", "dp", "--time-limit", 20, "--quiet", "--json")
    ran = hetplan("plan", "what-if", plan, *words)
    assert ran.code == 0, ran.err
    assert [row["change"] for row in ran.json["variants"]] == ["remove node1"]
    assert ran.json["base"]["devices"] == {"my-card": 2, "T4": 2}
    refused = hetplan("plan", "what-if", plan, "--global-batch", 16)
    assert "--global-batch: is not for a plan, which says it" in refused.error
    lacking = hetplan("plan", "what-if", "--model", "gpt2", "--global-batch", 16)
    assert "missing option '--cluster'" in lacking.error


@pytest.mark.parametrize("kind", ["stages", "program"])
def test_a_plan_alone_runs(hetplan: Call, files: Files, empty: Path, kind: str) -> None:
    """The model is built from the shape that the plan carries."""
    pytest.importorskip("torch")
    plan = moved(files, kind, empty)
    ran = hetplan("run", plan, "--steps", 1, "--device", "cpu", "--json", "--quiet")
    assert ran.code == 0, ran.err
    assert ran.json["predicted_seconds"] > 0


def test_a_plan_alone_is_rehearsed(hetplan: Call, files: Files, empty: Path) -> None:
    pytest.importorskip("torch")
    plan = moved(files, "stages", empty)
    ran = hetplan("run", plan, "--virtual", "--steps", 1, "--json", "--quiet")
    assert ran.code == 0, ran.err


def test_every_figure_of_a_workload_comes_back(files: Files, empty: Path) -> None:
    made = files.workload
    back = workload_of(load_plan(moved(files, "stages", empty)))
    assert back.cluster == made.cluster and back.profile == made.profile
    assert back.model.layers == made.model.layers and back.model.spec.shape == made.model.spec.shape
    assert (back.framework, back.stack) == (made.framework, made.stack)
    assert (back.global_batch, back.sequence, back.precision) == (BATCH, 32, "fp32")
    degrees_that_fit = [t for t in range(1, 65) if made.model.tensor_degree_fits(t)]
    assert [t for t in range(1, 65) if back.model.tensor_degree_fits(t)] == degrees_that_fit


def measured(workload: Workload, path: Path) -> None:
    """A file of a profile whose every layer takes a time of its own."""
    plain = predict(workload.model, workload.cluster, micro_batches=[1, 2, 4], date="2026-01-01")
    document = plain.model_dump(mode="json")
    document["provenance"] = {"kind": "measured", "source": "a test", "date": "2026-01-01"}
    for number, table in enumerate(document["tables"]):
        for key in ("forward_seconds", "backward_seconds"):
            table[key] = [0.001 * (number + 1) / (layer + 3) for layer in range(LAYERS)]
    path.write_text(json.dumps(document))


def test_a_measured_profile_is_carried(hetplan: Call, files: Files, empty: Path) -> None:
    profile = files.folder / "profile.json"
    measured(files.workload, profile)
    workload = make_workload(
        files.config, files.cluster, BATCH, precision="fp32", profile=profile, stack="eager"
    )
    save_plan(with_inputs(stages(workload), Inputs.of(workload)), empty / "plan.json")
    for path in (profile, files.cluster, files.config):
        path.unlink()
    ran = hetplan("plan", "simulate", "plan.json", "--json")
    assert ran.json["predicted_seconds"] == replay(stages(workload), workload).seconds
    (line,) = told(ran.err)
    assert "profile.json is not there" in line
    carried = workload_of(load_plan("plan.json")).profile
    assert carried == workload.profile and carried.provenance.kind == "measured"


def test_a_changed_file_is_told_in_one_line(hetplan: Call, files: Files) -> None:
    """What the plan carries counts, until the file itself is given."""
    plan = files.folder / "plan.json"
    save_plan(files.plan_with_inputs("stages"), plan)
    before = hetplan("plan", "simulate", plan, "--json")
    assert before.err == ""
    slower = CLUSTER | {"nodes": [{**CLUSTER["nodes"][0], "network_gbit_per_s": 0.1}]}  # type: ignore[index]
    slower["nodes"].append(CLUSTER["nodes"][1])  # type: ignore[index,attr-defined]
    files.cluster.write_text(yaml.safe_dump(slower))
    changed = hetplan("plan", "simulate", plan, "--json")
    assert changed.json == before.json
    (line,) = changed.err.splitlines()
    assert line.endswith("cluster.yaml has changed; going on with what the plan carries")
    given = hetplan("plan", "simulate", plan, "--cluster", files.cluster, "--json")
    assert given.err == ""
    assert given.json["predicted_seconds"] > before.json["predicted_seconds"]


def test_every_command_tells_a_changed_file(hetplan: Call, files: Files) -> None:
    """Export too, and `run -q`, which leaves out progress alone."""
    plan = files.folder / "plan.json"
    save_plan(files.plan_with_inputs("stages"), plan)
    commands: list[tuple[object, ...]] = [
        ("export", plan, "--to", "torchrun"),
        ("export", plan, "--to", "torchrun", "--model", files.folder / "tiny" / "config.json"),
        ("run", plan, "--virtual", "--steps", 1, "-q"),
    ]
    for command in commands:
        ran = hetplan(*command)
        assert ran.code == 0 and not told(ran.err)
    files.cluster.unlink()
    for command in commands:
        (line,) = told(hetplan(*command).err)
        assert "cluster.yaml is not there" in line


def test_a_run_without_a_known_model_says_what_to_give(hetplan: Call, files: Files) -> None:
    plan = files.folder / "plan.json"
    made = files.plan_with_inputs("stages")
    save_plan(made.model_copy(update={"inputs": None}), plan)
    said = hetplan("run", plan, "--steps", 1).error
    model = made.workload.model
    assert said == (
        f"{plan}: the plan does not carry what it was made for: give the model {model!r} with "
        "--model or --factory"
    )


def test_a_file_of_the_same_size_has_changed_too(files: Files) -> None:
    plan = files.folder / "plan.json"
    save_plan(files.plan_with_inputs("stages"), plan)
    text = files.config.read_text()
    files.config.write_text(text.replace("64", "96"))
    inputs = present(load_plan(plan).inputs)
    folder = os.path.relpath(files.config)
    assert list(inputs.changes(str(plan), Replaced())) == [f"{folder} has changed"]


def test_paths_are_relative_to_the_plan_file(files: Files, tmp_path: Path) -> None:
    """So that a folder with all of them can be moved."""
    plan = files.folder / "plan.json"
    save_plan(files.plan_with_inputs("stages"), plan)
    stated = json.loads(plan.read_text())["inputs"]["files"]
    assert stated["cluster"]["path"] == "cluster.yaml"
    assert stated["model"]["path"] == os.path.join("tiny", "config.json")
    target = tmp_path / "another place"
    files.folder.rename(target)
    loaded = load_plan(target / "plan.json")
    assert not list(present(loaded.inputs).changes(str(target / "plan.json"), Replaced()))
    save_plan(loaded, tmp_path / "copy.json")
    copied = json.loads((tmp_path / "copy.json").read_text())["inputs"]["files"]
    assert copied["cluster"]["path"] == os.path.join("another place", "cluster.yaml")


def test_a_predictor_of_another_version_is_told(hetplan: Call, files: Files) -> None:
    plan = files.folder / "plan.json"
    save_plan(files.plan_with_inputs("stages"), plan)
    document = json.loads(plan.read_text())
    document["inputs"]["profile"]["kinds"]["provenance"]["predictor"] = 1
    plan.write_text(json.dumps(document))
    ran = hetplan("plan", "simulate", plan)
    assert ran.code == 0
    assert "the predictor of costs is version 3, the plan's was 1" in ran.err


def test_an_old_plan_is_read_and_asks_once_for_all_that_it_lacks(
    hetplan: Call, files: Files
) -> None:
    plan = files.folder / "plan.json"
    save_plan(stages(files.workload), plan)
    assert "inputs" not in json.loads(plan.read_text())
    for command in (("show",), ("plan", "simulate"), ("plan", "what-if")):
        error = hetplan(*command, plan).error
        assert error.endswith(
            "give the cluster 'lab' with --cluster and the model 'tiny' with --model"
        )
    given = ("--cluster", files.cluster, "--model", files.config)
    ran = hetplan("plan", "simulate", plan, *given, "--json")
    assert ran.json["predicted_seconds"] == replay(stages(files.workload), files.workload).seconds
    assert hetplan("export", plan, "--to", "torchrun").code == 0


def test_an_old_plan_of_known_names_needs_nothing(hetplan: Call, tmp_path: Path) -> None:
    workload = make_workload("gpt2", open_cluster("amp-mixed"), 8)
    replica = {
        "stages": [{"layers": [[0, 14]], "devices": [[0]]}],
        "micro_batches": [{"count": 8, "samples": 1}],
    }
    save_plan(new_plan(workload, [replica]), tmp_path / "plan.json")
    ran = hetplan("plan", "simulate", tmp_path / "plan.json")
    assert (ran.code, ran.err) == (0, "")


@pytest.mark.parametrize("made_by", ["plan", "python", "search"])
def test_whoever_makes_a_plan_gives_it_its_inputs(
    hetplan: Call, files: Files, empty: Path, made_by: str
) -> None:
    common = ("--model", files.config, "--cluster", files.cluster, "--precision", "fp32")
    shared = ("--stack", "eager", "--memory-margin", 0.2)
    target = empty / "plan.json"
    if made_by == "plan":
        words = ("--global-batch", 8, "--strategies", "dp", "--framework", "megatron", "--quiet")
        assert hetplan("plan", *common, *shared, *words, "-o", target).code == 0
    elif made_by == "search":
        more = ("-b", 8, "--write-plan", target)
        assert hetplan("plan", "search", *common, *shared, *more).code == 0
    else:
        planning = plan_by_python(
            str(files.config),
            str(files.cluster),
            global_batch=8,
            precision="fp32",
            strategies="dp",
            stack="eager",
            framework="megatron",
            memory_margin=0.2,
        )
        save_plan(present(present(planning.best).plan), target)
    plan = load_plan(target)
    inputs = present(plan.inputs)
    assert inputs.memory_margin == 0.2 and inputs.stack.name == "eager"
    assert inputs.framework.name == "megatron"
    assert set(inputs.files) == {"cluster", "model"}
    assert replay(plan, workload_of(plan)).seconds == present(plan.prediction).predicted_seconds
    assert target.stat().st_size < 40_000


def test_of_a_plannings_document_the_winner_carries_its_inputs(
    hetplan: Call, files: Files, empty: Path
) -> None:
    """And it is shown without the files."""
    words = ("--model", files.config, "--cluster", files.cluster, "--global-batch", 8)
    asked = (*words, "--precision", "fp32", "--strategies", "dp,amp", "--quiet", "--json")
    document = hetplan("plan", *asked).json
    carrying = ["inputs" in (c["plan"] or {}) for c in document["candidates"]]
    assert carrying == [n == document["winner"] for n in range(len(carrying))]
    (empty / "planning.json").write_text(json.dumps(document))
    files.cluster.unlink()
    shown = hetplan("show", "planning.json")
    assert shown.code == 0 and len(told(shown.err)) == 1


HOSTILE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an unknown key": (lambda i: i.update(more="rm"), "inputs.more: unknown key"),
    "an unknown key inside": (
        lambda i: i["model"]["kinds"][0]["operators"][0].update(run="rm"),
        "run: unknown key",
    ),
    "a kind that there is not": (
        lambda i: i["model"]["layers"].__setitem__(0, 99),
        "layers[0] is 99, expected less than the number of kinds",
    ),
    "fewer layers": (
        lambda i: i["profile"]["layers"].pop(),
        "has 5 entries, expected one per",
    ),
    "other devices": (
        lambda i: i["cluster"]["nodes"][0].update(devices=3),
        "inputs.cluster.nodes have 6 devices, expected as many as devices (4)",
    ),
    "a device type without figures": (
        lambda i: i["cluster"]["devices"].pop("T4"),
        "expected the types of the nodes",
    ),
    "no bandwidth": (
        lambda i: i["cluster"]["nodes"][0].update(network_bandwidth=0.0),
        "network_bandwidth: not usable",
    ),
    "a million nodes": (
        lambda i: i["cluster"]["nodes"][0].update(count=10**6),
        "count: not usable",
    ),
    "text for a number": (
        lambda i: i["model"]["shape"].update(hidden="32"),
        "hidden: not usable (got '32'",
    ),
    "heads of nothing": (lambda i: i["model"]["shape"].update(heads=0), "heads: not usable (got 0"),
    "seconds below zero": (
        lambda i: i["profile"]["kinds"]["tables"][0]["forward_seconds"].__setitem__(0, -1.0),
        "forward_seconds[0]: not usable",
    ),
    "another stack": (
        lambda i: i["stack"].update(name="fused"),
        "inputs.stack.name is 'fused', expected workload.stack ('compiled')",
    ),
    "no digest": (
        lambda i: i["files"]["cluster"].update(sha256="0"),
        "sha256: not usable",
    ),
    "a file of another kind": (
        lambda i: i["files"].update(key=i["files"]["cluster"]),
        "inputs.files.key",
    ),
    "no margin": (lambda i: i.update(memory_margin=1.0), "memory_margin: not usable"),
    "another model's profile": (
        lambda i: i["profile"]["kinds"].update(model="other"),
        "model differs from the workload's",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_inputs_are_one_line(hetplan: Call, files: Files, what: str) -> None:
    plan = files.folder / "plan.json"
    save_plan(files.plan_with_inputs("stages"), plan)
    document = json.loads(plan.read_text())
    change, expected = HOSTILE[what]
    change(document["inputs"])
    plan.write_text(json.dumps(document))
    assert expected in hetplan("plan", "simulate", plan).error


@pytest.mark.parametrize("path", ["/dev/zero", "/", "fifo"])
def test_a_path_to_something_else_is_not_read(
    hetplan: Call, files: Files, empty: Path, path: str
) -> None:
    """A plan of a stranger may name a device or a pipe, whose reading never ends. Nothing is said
    of those."""
    os.mkfifo(empty / "fifo")
    plan = empty / "plan.json"
    save_plan(files.plan_with_inputs("stages"), plan)
    document = json.loads(plan.read_text())
    document["inputs"]["files"]["cluster"]["path"] = path
    plan.write_text(json.dumps(document))
    ran = hetplan("plan", "simulate", plan)
    assert (ran.code, told(ran.err)) == (0, [])


NUMBERS = (0, 1, -1, 10**9, 10**18, 1e-30, 1e30, 0.5)


@pytest.mark.parametrize("seed", range(40))
def test_changed_numbers_never_look_like_a_bug(hetplan: Call, files: Files, seed: int) -> None:
    """Each command answers, or refuses in one line."""
    rng = random.Random(seed)
    plan = files.folder / "plan.json"
    save_plan(files.plan_with_inputs(rng.choice(["stages", "replicas", "degrees"])), plan)
    document = json.loads(plan.read_text())
    for _ in range(rng.choice([1, 2, 8])):
        places = list(numbers_in(document["inputs"]))
        holder, key = rng.choice(places)
        number = rng.choice(NUMBERS)
        holder[key] = type(holder[key])(number) if rng.random() < 0.8 else number
    plan.write_text(json.dumps(document))
    for command in (("plan", "simulate"), ("show",)):
        ran = hetplan(*command, plan)
        assert ran.code in (0, 1, 2), (command, ran.err)


def numbers_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each number of a document, as its list or object and its place there."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(pairs):
        if isinstance(inner, dict | list):
            yield from numbers_in(inner)
        elif isinstance(inner, int | float) and not isinstance(inner, bool):
            yield value, key
