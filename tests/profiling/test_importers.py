"""Importers: small files of every kind and what becomes of them, broken ones, and the published
samples of other planners where they lie beside this checkout."""

from __future__ import annotations

import json
import math
import re
from copy import deepcopy
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from fakes.foreign import DEEPSPEED, PIPEDREAM, imported, metis, piper, placement, write
from fakes.sailor import KEPT, LAYERS, OUTPUT, PARAMS, sailor_folder
from hetplan.adapters.importers import READERS, import_cluster, import_file
from hetplan.adapters.importers.common import Settings
from hetplan.adapters.importers.sailor_cluster import line_of
from hetplan.cli.main import main
from hetplan.errors import InputError
from hetplan.profiling.hardware.cluster import load_cluster
from hetplan.profiling.models.model import load_model


def test_pipedream_cuts_carry_what_later_operators_need(tmp_path: Path) -> None:
    path = write(tmp_path / "graph.txt", PIPEDREAM)
    found = imported("pipedream", path, tmp_path, "--micro-batch", "2", "--device-type", "V100")
    assert [layer.name.split("-")[0] for layer in found.layers] == ["0", "1", "2", "3"]
    assert found.layers[2].name == "2-Linear(1 2)"
    (table,) = found.tables
    assert (table.device, table.tensor, table.micro_batch) == ("V100", 1, 2)
    assert table.forward_seconds == pytest.approx([0.004, 0.001, 0.002, 0.001])
    assert table.backward_seconds == pytest.approx([0.008, 0.001, 0.003, 0.002])
    # behind 1: its output once; behind 2: 1's, for 3, and 2's; behind 3: 2's and 3's
    assert [layer.activation_bytes * 2 for layer in found.layers] == [100, 130, 80, 0]
    assert [layer.param_bytes for layer in found.layers] == [12, 0, 4, 0]


def test_piper(tmp_path: Path) -> None:
    found = imported("piper", write(tmp_path / "p.json", piper()), tmp_path)
    assert [t.tensor for t in found.tables] == [1, 2]
    assert [sum(t.layer_seconds()) for t in found.tables] == pytest.approx([0.09, 0.045])
    assert [layer.activation_bytes for layer in found.layers] == [7, 14, 0]
    assert found.layers[0].param_bytes == 60 and found.layers[0].saved_bytes == 30


def test_dnn_partitioning_joins_colours(tmp_path: Path) -> None:
    found = imported("dnn-partitioning", write(tmp_path / "d.json", placement()), tmp_path)
    (table,) = found.tables
    assert table.forward_seconds == pytest.approx([0.002, 0.003])
    assert table.backward_seconds == pytest.approx([0.004, 0.006])
    assert [layer.param_bytes for layer in found.layers] == [100, 5]
    assert [layer.activation_bytes for layer in found.layers] == [10, 0]
    notes = import_file("dnn-partitioning", tmp_path / "d.json", Settings()).notes
    assert "on links of 0.0008 Gbit/s transfers take what the file says" in "".join(notes)


def test_dnn_partitioning_carries_the_costs_of_transfers(tmp_path: Path) -> None:
    """At the usual rate, 100 bytes per ms, the bytes behind a layer take what its edges cost; they
    are kept and parameters are counted by the sizes. Sizes may be missing."""
    document = changed(placement(), "edges", 0, "cost", value=0.3)
    document["edges"].append({"sourceId": 1, "destId": 2, "cost": 0.1, "size": 10.0})
    found = imported("dnn-partitioning", write(tmp_path / "d.json", document), tmp_path)
    assert [layer.activation_bytes for layer in found.layers] == pytest.approx([30, 0])
    assert [layer.saved_bytes for layer in found.layers] == [10, 0]
    assert [layer.param_bytes for layer in found.layers] == [100, 5]
    assert "transfers cost as there at 0.0008 Gbit/s" in found.provenance.source
    for edge in document["edges"]:
        del edge["size"]
    found = imported("dnn-partitioning", write(tmp_path / "d.json", document), tmp_path)
    assert "at 100 Gbit/s" in found.provenance.source
    assert [layer.activation_bytes for layer in found.layers] == pytest.approx([0.3e-3 * 12.5e9, 0])
    for edge in document["edges"]:
        edge.update(size=10.0, cost=0.0)
    found = imported("dnn-partitioning", write(tmp_path / "d.json", document), tmp_path)
    assert [layer.activation_bytes for layer in found.layers] == [10, 0]


def test_dnn_partitioning_says_backward_in_words_or_numbers(tmp_path: Path) -> None:
    document = placement()
    for node in document["nodes"]:
        node["isBackwardNode"] = bool(node["isBackwardNode"])
    numbers = imported("dnn-partitioning", write(tmp_path / "d.json", placement()), tmp_path)
    assert imported("dnn-partitioning", write(tmp_path / "d.json", document), tmp_path) == numbers


def test_dnn_partitioning_backward_nodes_alone_count_where_their_edges_come_from(
    tmp_path: Path,
) -> None:
    """Operator graphs have nodes without a colour, and backward nodes whose colour no forward node
    has: `node4` follows forward node 2, `node3` follows `node4` alone."""
    document = changed(placement(), "nodes", 2, "colorClass", value=7)
    for i in (0, 1, 3):
        document = changed(document, "nodes", i, "colorClass")
    found = imported("dnn-partitioning", write(tmp_path / "d.json", document), tmp_path)
    assert found.tables[0].backward_seconds == pytest.approx([0.0, 0.010])
    document["edges"].append({"sourceId": 1, "destId": 3, "cost": 0.1, "size": 10.0})
    found = imported("dnn-partitioning", write(tmp_path / "d.json", document), tmp_path)
    assert found.tables[0].backward_seconds == pytest.approx([0.004, 0.006])


def test_dnn_partitioning_counts_a_colours_backward_node_once(tmp_path: Path) -> None:
    document = changed(placement(), "nodes", 1, "colorClass", value=1)
    document = changed(document, "nodes", 3, "colorClass", value=1)
    found = imported("dnn-partitioning", write(tmp_path / "d.json", document), tmp_path)
    assert found.tables[0].backward_seconds == pytest.approx([0.010, 0.0])


def test_metis(tmp_path: Path) -> None:
    folder = tmp_path / "metis"
    folder.mkdir()
    for tensor, batch in ((1, 2), (2, 2)):
        write(folder / f"DeviceType.A100_tp{tensor}_bs{batch}.json", metis())
    found = imported("metis", folder, tmp_path)
    assert (found.model, found.devices()) == ("GPT3", ("A100",))
    assert [(t.tensor, t.micro_batch) for t in found.tables] == [(1, 2), (2, 2)]
    assert sum(found.tables[0].forward_seconds) == pytest.approx(0.003)
    assert sum(found.tables[0].layer_seconds()) == pytest.approx(0.009)
    assert [layer.param_bytes for layer in found.layers] == [2000, 4000]
    assert found.layers[0].activation_bytes == 40
    assert found.layers[0].saved_bytes == pytest.approx((1e6 - 8 * 2000) / 2)


def test_metis_memory_of_another_length_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = changed(metis(), "execution_memory", "layer_memory_total_mb", value=[1.0])
    found = imported("metis", write(tmp_path / "DeviceType.X_tp1_bs1.json", document), tmp_path)
    assert found.layers[0].saved_bytes == 0
    assert "has 1 entries for 2 layers" in capsys.readouterr().err


def test_sailor(tmp_path: Path) -> None:
    root = sailor_folder(tmp_path / "s")
    for path, devices in (
        (root / "profiles/TOY", ("fast", "slow")),
        (root / "profiles/TOY/slow/profile.json", ("slow",)),
    ):
        found = imported("sailor", path, tmp_path)
        assert found.devices() == devices and len(found.layers) == LAYERS
        assert found.layers[0].param_bytes == PARAMS and found.layers[0].activation_bytes == OUTPUT
        assert found.layers[0].saved_bytes == pytest.approx(KEPT)
        table = found.table("slow", 2, 4)
        assert table is not None and sum(table.layer_seconds()) == pytest.approx(4 * 4 * 0.009 / 2)


def sailor_of_known_gpus(root: Path) -> Path:
    """Sailor's folder with GPUs of the catalogue: its name of the fast one is the catalogue's, that
    of the slow one Sailor's own."""
    sailor_folder(root)
    for name, known in (("fast", "RTX-3090"), ("slow", "V100-16")):
        (root / "profiles/TOY" / name).rename(root / "profiles/TOY" / known)
        for file in root.glob("*_*.json"):
            file.write_text(file.read_text().replace(f'"{name}"', f'"{known}"'))
    return root


def test_sailor_brings_its_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """10 GB/s in a node, 1 GB/s for one pair of GPUs of two nodes, 2 GB/s for two pairs."""
    root = sailor_of_known_gpus(tmp_path / "s")
    file = tmp_path / "cluster.yaml"
    arguments = ["--cluster-output", str(file), "--nodes", "3"]
    found = imported("sailor", root / "profiles/TOY", tmp_path, *arguments)
    told = capsys.readouterr().err
    assert "V100-16 is taken for the catalogue's V100-SXM2-16GB" in told
    assert "off by at most" in told and "--cluster-output" not in told
    cluster = load_cluster(file)
    assert [node.device for node in cluster.nodes] == ["RTX-3090"] * 3 + ["V100-16"] * 3
    assert set(cluster.types) == set(found.devices())
    assert cluster.specs["V100-16"].memory_gib == 16
    node = cluster.nodes[0]
    assert (node.devices, node.all_reduce) == (2, ((2, 10e9),))
    assert node.intra_bandwidth == pytest.approx(10e9) and node.intra_latency < 1e-9
    assert node.network_bandwidth == pytest.approx(2e9) and node.flow == pytest.approx(1e9)


def test_a_rate_of_sailor_that_depends_on_the_size_becomes_a_rate_and_a_latency() -> None:
    seconds_of_none, rate = 1e-3, 4e9
    line = line_of(lambda size: size / (seconds_of_none + size / rate))
    assert line.rate == pytest.approx(rate) and line.latency == pytest.approx(seconds_of_none)
    assert line.error < 1e-6
    # Small messages that are faster than large ones have no latency.
    falling = line_of(lambda size: 4e9 if size < 1e7 else 2e9)
    assert falling.latency == 0 and 2e9 < falling.rate < 4e9
    assert 0.1 < falling.error < 1


def test_links_of_sailor_that_are_of_no_use(tmp_path: Path) -> None:
    root = sailor_folder(tmp_path / "s")
    place = root / "profiles/TOY"
    with pytest.raises(InputError, match=r"fast: the catalogue has no such device.*--device-type"):
        import_cluster("sailor", place, Settings())
    document = import_cluster("sailor", place / "slow", Settings(device="T4")).document
    assert [node["device"] for node in document["nodes"]] == ["T4"]
    with pytest.raises(InputError, match="--cluster-output: brings no links"):
        import_cluster("metis", place, Settings())
    assert "--cluster-output" in import_file("sailor", place, Settings()).notes[-1]
    (root / "network_coeffs_x.json").unlink()
    assert "--cluster-output" not in "".join(import_file("sailor", place, Settings()).notes)
    with pytest.raises(InputError, match=r"no file network_coeffs"):
        import_cluster("sailor", place / "slow", Settings(device="T4"))


def test_sailor_tells_what_every_rank_keeps(tmp_path: Path) -> None:
    root = sailor_folder(tmp_path / "s")
    document = json.loads((root / "llm_info.json").read_text())
    for layer in document["TOY"]["2"].values():
        layer["act_mem_bytes"] = 0.75 * KEPT  # half of it divided by two
    write(root / "llm_info.json", document)
    found = imported("sailor", root / "profiles/TOY", tmp_path)
    assert found.layers[0].saved_bytes == pytest.approx(KEPT)
    assert found.layers[0].replicated_saved_bytes == pytest.approx(KEPT / 2)


def test_pipedream_nodes_without_a_description_bear_their_number(tmp_path: Path) -> None:
    described = "node4 -- Add -- "
    assert described in PIPEDREAM
    path = write(tmp_path / "graph.txt", PIPEDREAM.replace(described, "node4 -- "))
    found = imported("pipedream", path, tmp_path)
    assert found.layers[-1].name == "3-node4"


def test_deepspeed_opens_lists_of_blocks(tmp_path: Path) -> None:
    found = imported("deepspeed", write(tmp_path / "out.txt", DEEPSPEED), tmp_path)
    (table,) = found.tables
    assert [layer.name for layer in found.layers] == [
        "0-embed-Embedding",
        "1-0-Block",
        "2-1-Block",
        "3-head-Linear",
    ]
    assert table.micro_batch == 4 and found.model == "Net"
    assert table.forward_seconds == pytest.approx([0.0005, 0.003, 0.005, 0.001])
    assert table.backward_seconds == pytest.approx([2.5 * t for t in table.forward_seconds])
    assert [layer.param_bytes for layer in found.layers] == [2e6, 2e6, 2e6, 1e6]


def test_calculon_model_and_system(tmp_path: Path) -> None:
    sizes = {
        "hidden": 64,
        "feedforward": 256,
        "seq_size": 32,
        "attn_heads": 4,
        "attn_size": 32,
        "num_blocks": 3,
    }
    path, target = write(tmp_path / "m.json", sizes), tmp_path / "model.json"
    assert main(["profile", "import", "calculon", str(path), "-o", str(target)]) == 0
    model = load_model(target)
    assert model.sequence == 32 and len(model.layers) == 5
    # qkv 64 x 384, projection 128 x 64, feed-forward 2 x 64 x 256, biases and norms
    assert (
        model.layers[1].params == 64 * 384 + 384 + 128 * 64 + 64 + 2 * 64 * 256 + 256 + 64 + 4 * 64
    )
    system = {
        "matrix": {"float16": {"tflops": 312}, "float8": {"tflops": 9}},
        "mem1": {"GiB": 80, "GBps": 2048},
        "networks": [
            {"bandwidth": 300, "efficiency": 0.5, "size": 8, "latency": 1e-5},
            {"bandwidth": 25, "efficiency": 1.0, "size": 65536, "latency": 2e-5},
        ],
    }
    path, target = write(tmp_path / "sys.json", system), tmp_path / "cluster.yaml"
    assert (
        main(["profile", "import", "calculon", str(path), "-o", str(target), "--nodes", "2"]) == 0
    )
    cluster = load_cluster(target)
    assert len(cluster.devices) == 16
    assert cluster.bandwidth()[0, 1] == 150e9 and cluster.bandwidth()[0, 8] == 25e9
    assert cluster.latency()[0, 8] == pytest.approx(2e-5)
    assert cluster.specs["sys"].peak_flops("bf16") == 312e12


def changed(document: Any, *path: Any, value: Any = None) -> Any:
    """A copy with another value at a path; without the key where there is none."""
    copy = deepcopy(document)
    inner = reduce(getitem, path[:-1], copy)
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copy


TIME = ("nodes", 0, "TMPCs", "2", 1, "timePerSample")


SIZES = ("model", "parameters", "parameters_per_layer_bytes")


METIS = "DeviceType.A_tp1_bs1.json"


SHORT = DEEPSPEED.replace("500 us, 5.00% latency", "...")
NO_NUMBER = DEEPSPEED.replace("500 us, 5.00% latency", "5.0.0 us, 5.00% latency")


BROKEN: list[tuple[str, str, Any, str]] = [
    (
        "pipedream",
        "g.txt",
        PIPEDREAM + "node5 -- x -- forward_compute_time=1\n",
        r"line 9: backward_compute_time: required key is missing",
    ),
    (
        "pipedream",
        "g.txt",
        PIPEDREAM.replace("=8.000", "=nan"),
        r"line 2: backward_compute_time: not usable",
    ),
    (
        "pipedream",
        "g.txt",
        PIPEDREAM + "\tnode4 -- node9\n",
        r"names a node that is not there .*node9",
    ),
    ("pipedream", "g.txt", PIPEDREAM + "\tnode4 -- node1\n", r"circle"),
    ("pipedream", "g.txt", PIPEDREAM + "nonsense\n", r"line 9: not usable"),
    ("pipedream", "g.txt", "", r"no node"),
    (
        "piper",
        "p.json",
        changed(piper(), "nodes", 1, "TMPCs"),
        r"nodes\[1\]\.TMPCs: required key is missing",
    ),
    ("piper", "p.json", changed(piper(), *TIME, value=-1), r"nodes\[0\]\.TMPCs\.2\.timePerSample"),
    (
        "piper",
        "p.json",
        changed(piper(), "edges", 0, "destId", value=8),
        r"edges\[0\]\.destId: .*not there",
    ),
    (
        "dnn-partitioning",
        "d.json",
        changed(placement(), "edges"),
        r"edges: required key is missing",
    ),
    (
        "dnn-partitioning",
        "d.json",
        changed(placement(), "nodes", 2, "id", value=4),
        r"node stands twice \(got 4\)",
    ),
    (
        "dnn-partitioning",
        "d.json",
        changed(placement(), "nodes", 0, "fpgaLatency", value="x"),
        r"nodes\[0\]\.fpgaLat",
    ),
    ("metis", "m.json", metis(), r"name is not usable"),
    (
        "metis",
        METIS,
        changed(metis(), "execution_time"),
        r"execution_time\.layer_compute_total_ms: required key",
    ),
    ("metis", METIS, changed(metis(), *SIZES, value=[1]), r"2 entries"),
    ("calculon", "c.json", {"hidden": 64}, r"feedforward: key is missing"),
    ("calculon", "c.json", {}, r"neither a model nor a system"),
    ("calculon", "c.json", {"networks": []}, r"mem1\.GiB: required key is missing"),
    ("deepspeed", "o.txt", "nothing", r"no detailed profile"),
    ("deepspeed", "o.txt", DEEPSPEED.split("  (head)", maxsplit=1)[0], r"does not end"),
    ("deepspeed", "o.txt", SHORT, r"line 13: module embed has no figures"),
    ("deepspeed", "o.txt", NO_NUMBER, r"line 13: module embed has no figures"),
    ("sailor", "profile.json", {}, r"llm_info\.json"),
]


@pytest.mark.parametrize(("kind", "name", "content", "message"), BROKEN)
def test_broken_files_are_one_line_with_their_place(
    kind: str,
    name: str,
    content: Any,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path / name, content)
    assert main(["profile", "import", kind, str(path), "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and name in error
    with pytest.raises(InputError, match=message):
        import_file(kind, path, Settings())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", READERS)
def test_missing_files(kind: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such|not usable"):
        import_file(kind, tmp_path / "absent.json", Settings())


SHARED = Path(__file__).parents[3] / "shared" / "data"


beside = pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs the published samples in {SHARED}")


@beside
@pytest.mark.parametrize("name", ["gnmt", "resnet50", "vgg16"])
def test_published_pipedream(name: str, tmp_path: Path) -> None:
    path = SHARED / "pipedream" / f"{name}.txt"
    found = imported("pipedream", path, tmp_path)
    text = path.read_text()

    def total(key: str) -> float:
        return math.fsum(map(float, re.findall(rf"{key}=([\d.]+)", text)))

    (table,) = found.tables
    assert sum(table.forward_seconds) == pytest.approx(total("forward_compute_time") / 1e3)
    assert sum(table.backward_seconds) == pytest.approx(total("backward_compute_time") / 1e3)
    assert sum(layer.param_bytes for layer in found.layers) == pytest.approx(
        total("parameter_size")
    )
    assert found.layers[-1].activation_bytes == 0


@beside
@pytest.mark.parametrize("name", ["bert24_training", "bert24_inference", "resnet50_training"])
def test_published_placements(name: str, tmp_path: Path) -> None:
    path = SHARED / "dnn-partitioning" / f"{name}.json"
    found = imported("dnn-partitioning", path, tmp_path)
    (table,) = found.tables
    document = json.loads(path.read_text())
    milliseconds = sum(n["fpgaLatency"] for n in document["nodes"])
    assert sum(table.layer_seconds()) == pytest.approx(milliseconds / 1e3)
    # 2 ** 31 bytes cost 1 in these files
    behind = [layer.activation_bytes / 2**31 for layer in found.layers]
    dearest = max(edge["cost"] for edge in document["edges"])
    assert max(behind) >= dearest > 0 == behind[-1]


@beside
def test_published_piper(tmp_path: Path) -> None:
    path = SHARED / "piper/bert32a100.json"
    nodes = json.loads(path.read_text())["nodes"]
    for table in imported("piper", path, tmp_path).tables:
        given = sum(n["TMPCs"][str(table.tensor)][0]["timePerSample"] for n in nodes)
        assert sum(table.layer_seconds()) == pytest.approx(given)


@beside
@pytest.mark.parametrize("kind", ["systems", "models"])
def test_published_calculon(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    for path in sorted((SHARED / "calculon" / kind).glob("*.json")):
        assert main(["profile", "import", "calculon", str(path), "-o", str(target)]) == 0
        given = json.loads(path.read_text())
        if kind == "systems":
            assert len(load_cluster(target).devices) == given["networks"][0]["size"]
            continue
        model = load_model(target)
        assert len(model.layers) == given["num_blocks"] + 2 and model.spec.shape is not None
        assert model.spec.shape.query_width == given["attn_heads"] * given["attn_size"]


@beside
def test_published_sailor(tmp_path: Path) -> None:
    for path in sorted((SHARED / "sailor/profiles").glob("*/*/profile.json")):
        found, given = imported("sailor", path, tmp_path), json.loads(path.read_text())
        for table in found.tables:
            rows = given[str(table.micro_batch)][str(table.tensor)].values()
            assert sum(table.layer_seconds()) == pytest.approx(sum(r[0] + r[1] for r in rows))
