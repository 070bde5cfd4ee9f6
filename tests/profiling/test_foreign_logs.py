"""Logs of launchers, which write a rank, a host or a time before each line, and files of others
that are damaged or far too large."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from fakes.foreign import DEEPSPEED, PIPEDREAM, imported, metis, piper, write
from fakes.sailor import LAYERS, sailor_folder
from hetplan.adapters.importers import import_file
from hetplan.adapters.importers.common import Settings
from hetplan.errors import InputError
from hetplan.files import MAX_FOREIGN_VALUES

PREFIXES = [
    "0: ",
    "[default0]:",
    "[rank0]:",
    "[rank0]: ",
    "node-01: ",
    "[1,0]<stdout>:",
    "trainer_1  | ",
    "(RayWorker pid=123, ip=10.0.0.1) ",
]


def layers(path: Path) -> Any:
    """The layers and tables that an import gives."""
    document = import_file("deepspeed", path, Settings()).document
    return document["layers"], document["tables"]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_ranks_before_each_line_are_taken_off(prefix: str, tmp_path: Path) -> None:
    plain = write(tmp_path / "log.txt", DEEPSPEED)
    before = layers(plain)
    lines = [f"{prefix}{line}".rstrip() for line in DEEPSPEED.splitlines()]
    others = [line.replace("0", "7").replace("1", "7") for line in lines]
    mixed = [line for pair in zip(others, lines, strict=True) for line in pair]
    for text in (lines, mixed if "0" in prefix else lines):
        path = write(plain, "\n".join(["a line of a launcher", *text, ""]))
        assert layers(path) == before


def test_times_before_each_line_may_differ(tmp_path: Path) -> None:
    path = write(tmp_path / "log.txt", DEEPSPEED)
    before = layers(path)
    stamped = [
        f"\x1b[32m[2024-05-01 10:{second // 60:02}:{second % 60:02},{second:03}] [0] \x1b[0m{line}"
        for second, line in enumerate(DEEPSPEED.splitlines())
    ]
    assert layers(write(path, "\n".join(stamped))) == before


def nested(levels: int) -> str:
    """A profile of modules within modules."""
    opened = [f"{' ' * i}(m): Block(" for i in range(1, levels)]
    closed = [f"{' ' * i})" for i in range(levels - 1, 0, -1)]
    return "\n".join(["-- Detailed Profile --", "Net(", *opened, *closed, ")"])


# (kind, name of the file, content, message)
HOSTILE: list[tuple[str, str, Any, str]] = [
    ("deepspeed", "o.txt", nested(2000), r"line \d+: modules are nested too deeply"),
    (
        "deepspeed",
        "o.txt",
        DEEPSPEED.replace("(embed)", f"({'e' * 20000})"),
        r"line 13: line is too long",
    ),
    ("deepspeed", "o.txt", DEEPSPEED.replace("1 M, 28.5%", "1.2.3 M, 28.5%"), "has no figures"),
    ("pipedream", "g.txt", PIPEDREAM.replace("=8.000", "=1.2.3"), r"is '1.2.3', expected a number"),
    (
        "deepspeed",
        "o.txt",
        DEEPSPEED.replace("(1 M", f"({'9' * 400} M"),
        "param_bytes follows from",
    ),
    (
        "pipedream",
        "g.txt",
        "\n".join(
            f"node{i} -- forward_compute_time=1, backward_compute_time=1, activation_size=1, "
            "parameter_size=1"
            for i in range(4100)
        ),
        r"too many layers \(got 4097, expected at most 4096\)",
    ),
    ("piper", "p.json", piper() | {"nodes": [{}] * 10_000}, r"nodes"),
    ("piper", "p.json", piper() | {"edges": [{}] * 1000}, r"edges\[0\]\.sourceId: required key"),
    ("piper", "p.json", piper() | {"nodes": piper()["nodes"] * 2}, r"nodes\[3\]\.id: node stands"),
    ("metis", "DeviceType.A_tp1_bs1.json", ["execution_time", "layer_compute_total_ms"], "0 entri"),
    (
        "metis",
        "DeviceType.A_tp1_bs1.json",
        ["model", "parameters", "activation_parameters_bytes"],
        "sent has 0 entries",
    ),
]


@pytest.mark.parametrize(("kind", "name", "content", "message"), HOSTILE)
def test_hostile_files_are_one_line(
    kind: str, name: str, content: Any, message: str, tmp_path: Path
) -> None:
    if kind == "metis":  # the keys of a list that is made empty
        *keys, last = content
        content = metis()
        place = content
        for key in keys:
            place = place[key]
        place[last] = []
    path = write(tmp_path / name, content)
    with pytest.raises(InputError, match=message) as error:
        import_file(kind, path, Settings())
    assert "\n" not in str(error.value)


def test_lists_without_an_end_are_refused_before_they_are_made(tmp_path: Path) -> None:
    text = '{"nodes": [' + "[]," * MAX_FOREIGN_VALUES + "[]], " + '"edges": []}'
    path = tmp_path / "p.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert path.stat().st_size < 100_000
    with pytest.raises(InputError, match=r"has too many values \(got 4\d+, expected at most"):
        import_file("piper", path, Settings())


def test_wide_trees_of_modules_are_read_in_linear_time(tmp_path: Path) -> None:
    """Modules beside each other: each is compared with those that it may stand in alone."""
    line = "(m): Linear(1 M, 28.5% Params, 0 MACs, 0% MACs, 500 us, 5.00% latency, 0.0 FLOPS)"
    tree = DEEPSPEED.replace("  (embed)", f"  {line}\n" * 3000 + "  (embed)")
    assert len(layers(write(tmp_path / "o.txt", tree))[0]) == 3004


def test_sailors_folder_may_be_the_working_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = sailor_folder(tmp_path)
    for folder, kinds in (("fast", 1), (".", 2)):
        monkeypatch.chdir(root / "profiles" / "TOY" / folder)
        document = import_file("sailor", ".", Settings()).document
        assert document["model"] == "TOY"
        assert len({table["device"] for table in document["tables"]}) == kinds
    assert os.path.isdir(".")


def test_sizes_of_sailors_other_models_are_no_help(tmp_path: Path) -> None:
    root = sailor_folder(tmp_path)
    write(
        root / "llm_info.json", {"OTHER": json.loads((root / "llm_info.json").read_text())["TOY"]}
    )
    with pytest.raises(InputError, match=r"llm_info\.json: no sizes of model 'TOY'"):
        import_file("sailor", root / "profiles" / "TOY", Settings())


def test_a_last_norm_of_sailors_is_a_part_of_the_head(tmp_path: Path) -> None:
    """LLaMA-3-8B has the norm before the head as a layer of its own."""
    root = sailor_folder(tmp_path)
    plain = imported("sailor", root / "profiles" / "TOY", tmp_path)
    info = root / "llm_info.json"
    sizes = json.loads(info.read_text())
    for by_layer in sizes["TOY"].values():
        by_layer[str(LAYERS - 2)]["params_bytes"] = 16.0
    write(info, sizes)
    joined = imported("sailor", root / "profiles" / "TOY", tmp_path)
    assert len(joined.layers) == LAYERS - 1 and len(plain.layers) == LAYERS
    before, after = plain.layers[-2:], joined.layers[-1]
    assert after.saved_bytes == before[0].saved_bytes + before[1].saved_bytes
    assert after.activation_bytes == 0
    for whole, table in zip(plain.tables, joined.tables, strict=True):
        assert sum(table.forward_seconds) == pytest.approx(sum(whole.forward_seconds))
        assert table.backward_seconds[-1] == pytest.approx(sum(whole.backward_seconds[-2:]))
    notes = import_file("sailor", root / "profiles" / "TOY", Settings()).notes
    assert any("the norm before the head" in note for note in notes)
