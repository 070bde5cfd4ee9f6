"""Files for launchers: valid by the published schemas, and every node gets the ranks of its plan,
also where nodes have unequal numbers of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from export.schemas import complaints
from hetplan.adapters.exports.launchers.kinds import LAUNCHERS, LauncherSection
from hetplan.adapters.exports.launchers.ray_train import seats
from hetplan.adapters.exports.launchers.start import Start
from hetplan.adapters.exports.scripts import torchrun
from hetplan.errors import InputError, UnsupportedError
from hetplan.plans.plan import Plan, save_plan
from hetplan.schema import StrictModel

FILES = Path(__file__).parent.parent / "files"
KUBERNETES = json.loads((FILES / "kubernetes.json").read_text())
SCHEDULERS = json.loads((FILES / "schedulers.json").read_text())
TYPES = ("V100-SXM2-16GB", "T4", "A100-SXM4-80GB")
KEYS: dict[str, dict[str, Any]] = {
    "ssh": {"hosts": [f"me@host-{n}.lan" for n in range(40)], "env": {"NCCL_DEBUG": "a 'b' $c"}},
    "slurm": {"options": {"time": "12:00:00"}, "types": {"T4": {"partition": "small"}}},
    "kubeflow": {"image": "registry.lan/hetplan:1"},
    "jobset": {"image": "registry.lan/hetplan:1"},
    "ray": {},
}
CODES = {one.__name__: one for one in LauncherSection.__args__}


def random_plan(seed: int) -> Plan:
    """Nodes of one to four devices, some left idle; pipelines of their own lengths and widths."""
    rng = Random(seed)
    kinds = TYPES[: rng.randint(1, 3)]
    nodes = [(rng.choice(kinds), rng.randint(1, 4)) for _ in range(rng.randint(1, 6))]
    devices = [
        {"type": kind, "node": n} for n, (kind, size) in enumerate(nodes) for _ in range(size)
    ]
    used = rng.sample(range(len(devices)), rng.randint(1, len(devices)))
    layers, replicas = 8, []
    while used:
        stages: list[dict[str, Any]] = []
        left = layers
        while used and left:
            own = [used.pop() for _ in range(min(rng.choice((1, 1, 2)), len(used)))]
            last = left == 1 or not used or len(stages) == 3
            taken = left if last else rng.randint(1, left - 1)
            begin = layers - left
            stages.append({"layers": [[begin, begin + taken]], "devices": [own],
                           "tensor_shares": [1.0] * len(own)})  # fmt: skip
            left -= taken
        replicas.append({"stages": stages, "micro_batches": [{"count": 2, "samples": 1}]})
    workload = {"model": "some", "cluster": "some", "global_batch": 2 * len(replicas),
                "precision": "fp32", "layers": [f"l{i}" for i in range(layers)]}  # fmt: skip
    return Plan.model_validate(
        {"name": f"random {seed}", "workload": workload, "devices": devices, "replicas": replicas}
    )


def start(plan: Plan, kind: str, folder: str = "out/x", **more: Any) -> Start:
    """What writes the files of a launcher."""
    launcher = CODES[kind].model_validate({"kind": kind, **KEYS[kind]})
    given = {"name": "hetplan-job", "root": "/home/a b", "run_options": ["--steps", "3"], **more}
    return Start(plan=plan, launcher=launcher, folder=folder, **given)


def written(one: Start) -> dict[str, str]:
    """The launcher's own files."""
    return LAUNCHERS[one.launcher.kind][2](one)


PLANS = [random_plan(seed) for seed in range(200)]


def test_the_random_plans_are_uneven() -> None:
    sizes = [{len(devices) for devices in plan.nodes.values()} for plan in PLANS]
    assert sum(len(one) > 1 for one in sizes) > 80
    assert sum(len({d.type for d in plan.devices}) > 1 for plan in PLANS) > 80
    assert sum(len(plan.ranks) < len(plan.devices) for plan in PLANS) > 100


def ranks_by_script(plan: Plan) -> dict[int, list[int]]:
    """Node -> the ranks that `node.sh` starts there: torchrun numbers them node by node."""
    lines = re.findall(r"^  (\d+)\) NODE_RANK=(\d+) PROCESSES=(\d+) ", torchrun(plan), re.MULTILINE)
    counts = {int(place): (int(node), int(count)) for node, place, count in lines}
    ordered = [counts[place] for place in range(len(counts))]
    ends = pairwise(accumulate((count for _, count in ordered), initial=0))
    return {node: [*range(*end)] for (node, _), end in zip(ordered, ends, strict=True)}


def by_type(plan: Plan) -> dict[int, tuple[str, int]]:
    """Node -> its device type and its number of ranks."""
    return {n: (plan.devices[d[0]].type, len(d)) for n, d in plan.nodes.items()}


def nodes_of(command: str) -> list[int]:
    """The nodes of a task's command, in the order of its numbers."""
    found = re.search(r"nodes=\(([\d ]+)\)", command)
    assert found is not None
    return [int(node) for node in found[1].split()]


def test_node_script_starts_the_ranks_of_the_plan() -> None:
    for plan in PLANS:
        ranks = {n: [plan.ranks[d] for d in devices] for n, devices in plan.nodes.items()}
        assert ranks_by_script(plan) == ranks


def test_nodes_whose_devices_are_not_in_a_row_are_refused() -> None:
    plan = next(p for p in PLANS if len(p.nodes) > 1 and len(p.ranks) == len(p.devices) > 2)
    mixed = plan.model_copy(update={"devices": [*plan.devices[1:], plan.devices[0]]})
    with pytest.raises(UnsupportedError, match="devices of a node that are not numbered in a row"):
        torchrun(mixed)


def test_slurm_by_its_options() -> None:
    known = set(SCHEDULERS["sbatch"]["options"])
    for plan in PLANS:
        text = written(start(plan, "slurm"))["job.sbatch"]
        head, _, body = text.partition("\nset -euo pipefail\n")
        assert all(line.startswith("#") for line in head.splitlines())
        parts = head.split("#SBATCH hetjob\n")
        tasks: list[tuple[str | None, int]] = []
        for part in parts:
            options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", part, re.MULTILINE))
            assert options.keys() <= known and part.count("#SBATCH") == len(options)
            assert shlex.split(options["chdir"]) == ["/home/a b"]
            assert (options["ntasks-per-node"], options["time"]) == ("1", "12:00:00")
            kind = "T4" if "partition" in options else options.get("constraint")
            tasks += [(kind, int(options["gpus-per-node"]))] * int(options["nodes"])
        nodes = nodes_of(body)
        assert sorted(nodes) == sorted(plan.nodes) and nodes[0] == next(iter(plan.nodes))
        wanted = by_type(plan)
        for node, (kind, count) in zip(nodes, tasks, strict=True):
            assert count == wanted[node][1] and kind in (None, wanted[node][0])
        srun = shlex.split(body.splitlines()[-1])
        words = srun[1 : srun.index("bash")]
        assert {w[2:].partition("=")[0] for w in words} <= set(SCHEDULERS["sbatch"]["srun"])
        assert (f"--het-group=0-{len(parts) - 1}" in words) == (len(parts) > 1)


def objects(plan: Plan, kind: str) -> Iterator[dict[str, Any]]:
    """The written objects, each held to the schema of its kind."""
    text = written(start(plan, kind))["job.yaml"]
    for one in yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        content = KUBERNETES["kinds"][f"{one['apiVersion']} {one['kind']}"]
        schema = {
            "type": "object", "required": ["apiVersion", "kind", "metadata", *content],
            "additionalProperties": False,
            "properties": {"apiVersion": {"type": "string"}, "kind": {"type": "string"},
                           "metadata": {"$ref": "metadata"}, **content},
        }  # fmt: skip
        assert [*complaints(one, schema, KUBERNETES["definitions"])] == []
        yield one


@pytest.mark.parametrize("kind", ["kubeflow", "jobset"])
def test_kubernetes_by_the_published_schemas(kind: str) -> None:
    for plan in PLANS:
        files, *others = objects(plan, kind)
        assert Plan.model_validate_json(files["data"]["plan.json"]) == plan
        if kind == "kubeflow":
            runtime, job = others
            assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
            assert job["metadata"]["name"] == "hetplan-job"  # the pods' names begin with it
            spec = runtime["spec"]["template"]["spec"]
        else:
            spec = others[0]["spec"]
        wanted, seen = by_type(plan), []
        for i, part in enumerate(spec["replicatedJobs"]):
            job = part["template"]["spec"]
            (container,) = job["template"]["spec"]["containers"]
            nodes = nodes_of(container["command"][2])
            assert (part["name"], part["replicas"]) == (f"nodes-{i}", 1)
            assert job["completions"] == job["parallelism"] == len(nodes)
            ((gpu, count),) = container["resources"]["limits"].items()
            label = job["template"]["spec"]["nodeSelector"].get("nvidia.com/gpu.product")
            for node in nodes:
                assert (gpu, count) == ("nvidia.com/gpu", wanted[node][1])
                assert label in (None, wanted[node][0])
            assert "hetplan-job-nodes-0-0-0.hetplan-job;" in container["command"][2]
            seen += nodes
        assert sorted(seen) == sorted(plan.nodes) and seen[0] == next(iter(plan.nodes))
    assert LAUNCHERS[kind][1].format("out") == "kubectl create -f out/job.yaml"


def test_a_schema_finds_what_is_wrong() -> None:
    definitions, spec = KUBERNETES["definitions"], {"$ref": "jobset"}
    _, one = objects(PLANS[0], "jobset")
    for path, value in (
        ("netwrok", {}),
        ("replicatedJobs", []),
        ("failurePolicy", {"maxRestarts": "0"}),
    ):
        assert [*complaints(one["spec"] | {path: value}, spec, definitions)]


def run(script: Path, place: Path, **environment: str) -> list[list[str]]:
    """What torchrun was started with, on each node: its words and the variables beside them."""
    log = place / "log"
    log.unlink(missing_ok=True)
    programs = {
        "torchrun": f'printf "%s\\n" "$MASTER_ADDR $CUDA_VISIBLE_DEVICES $*" >> {log}',
        "ssh": 'shift 2; echo "$1" >> hosts; shift; bash -c "${1/\\/home\\/a b/$PWD}"',
        "scontrol": 'printf "%s\\n" "${3%%,*}" "and more"',
        "srun": "while [[ $1 == --* ]]; do shift; done; for ((i = 0; i < TASKS; i++)); do "
        'SLURM_PROCID=$i "$@"; done',
    }
    for name, text in programs.items():
        (place / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (place / name).chmod(0o755)
    path = f"{place}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(script)], cwd=place, env={"PATH": path, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return sorted(line.split() for line in log.read_text().splitlines())


def place_files(one: Start, place: Path) -> Path:
    """The folder as `hetplan launch` fills it."""
    folder = place / one.folder
    folder.mkdir(parents=True)
    save_plan(one.plan, folder / "plan.json")
    for name, text in {"node.sh": torchrun(one.plan), **written(one)}.items():
        (folder / name).write_text(text)
    return folder


def expected(plan: Plan, master: str) -> list[list[str]]:
    """torchrun's words on every node."""
    lines = []
    for i, (node, devices) in enumerate(plan.nodes.items()):
        local = [sum(d.node == node for d in plan.devices[:device]) for device in devices]
        words = f"--nnodes {len(plan.nodes)} --node-rank {i} --nproc-per-node {len(devices)}"
        more = "-m hetplan run out/x/plan.json --steps 3"
        address = f"--master-addr {master} --master-port PORT"
        lines.append(f"{master} {','.join(map(str, local))} {words} {address} {more}".split())
    return sorted(lines)


@pytest.mark.parametrize("seed", [1, 7])
def test_ssh_and_slurm_start_every_node(seed: int, tmp_path: Path) -> None:
    plan = PLANS[seed]
    nodes = [*plan.nodes]
    folder = place_files(start(plan, "ssh"), tmp_path / "ssh")
    master = f"host-{nodes[0]}.lan"
    lines = run(folder / "submit.sh", tmp_path / "ssh")
    assert [[w.replace("29500", "PORT") for w in line] for line in lines] == expected(plan, master)
    hosts = (tmp_path / "ssh" / "hosts").read_text().split()
    assert sorted(hosts) == sorted(f"me@host-{n}.lan" for n in nodes)
    slots = (folder / "hostfile").read_text().splitlines()
    assert slots == [f"me@host-{n}.lan slots={len(d)}" for n, d in plan.nodes.items()]
    folder = place_files(start(plan, "slurm"), tmp_path / "slurm")
    lines = run(folder / "job.sbatch", tmp_path / "slurm", SLURM_JOB_NODELIST="a,b",
                SLURM_JOB_ID="123456", TASKS=str(len(nodes)))  # fmt: skip
    assert [[w.replace("23456", "PORT") for w in line] for line in lines] == expected(plan, "a")


def test_ranks_end_with_the_script_that_started_them(tmp_path: Path) -> None:
    """Also where it is killed: what ssh has started on a host does not end with ssh."""
    plan = PLANS[1]
    folder = place_files(start(plan, "ssh"), tmp_path)
    programs = {
        "torchrun": f"echo $$ > {tmp_path}/rank-$NODE.new; mv {tmp_path}/rank-$NODE.new "
        f"{tmp_path}/rank-$NODE; exec sleep 600",
        "ssh": 'shift 3; exec setsid bash -c "${1/\\/home\\/a b/$PWD}"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = subprocess.Popen(
        ["bash", str(folder / "submit.sh")],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    files = [tmp_path / f"rank-{node}" for node in plan.nodes]
    until(lambda: all(file.exists() for file in files))
    ranks = [Path("/proc", file.read_text().strip()) for file in files]
    assert all(rank.exists() for rank in ranks)
    script.kill()
    script.wait()
    until(lambda: not any(rank.exists() for rank in ranks))


def until(holds: Callable[[], bool]) -> None:
    """Wait until it holds, for a minute at most."""
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it does not come to hold")


def test_pods_start_every_node(tmp_path: Path) -> None:
    plan = PLANS[7]
    one = start(plan, "jobset", folder="files", run_options=[])
    folder = place_files(one, tmp_path)
    _, spec = objects(plan, "jobset")
    started = 0
    for part in spec["spec"]["replicatedJobs"]:
        (container,) = part["template"]["spec"]["template"]["spec"]["containers"]
        words = [w.replace("/hetplan/", f"{folder}/") for w in container["command"]]
        script = tmp_path / "pod.sh"
        script.write_text(shlex.join(words) + "\n")
        for index in range(part["template"]["spec"]["completions"]):
            node = nodes_of(container["command"][2])[index]
            (line,) = run(script, tmp_path, JOB_COMPLETION_INDEX=str(index))
            assert line[0] == "hetplan-job-nodes-0-0-0.hetplan-job"
            assert line[line.index("--node-rank") + 1] == str([*plan.nodes].index(node))
            assert line[line.index("--nproc-per-node") + 1] == str(len(plan.nodes[node]))
            started += 1
    assert started == len(plan.nodes)


def test_too_few_hosts_are_refused() -> None:
    plan = next(plan for plan in PLANS if max(plan.nodes) > 2)
    short = CODES["ssh"].model_validate({"kind": "ssh", "hosts": ["a", "b"]})
    with pytest.raises(InputError, match=r"launcher.hosts: too few hosts \(got 2, expected"):
        written(Start(plan=plan, launcher=short, name="a", root="/", folder="b"))


class Ray:
    """A cluster of Ray that places one worker per rank, shuffled; each works in its turn."""

    def __init__(self, plan: Plan, rng: Random) -> None:
        self.plan = plan
        self.nodes = {f"id{n}": by_type(plan)[n][0] for n in plan.nodes}
        self.workers = [f"id{plan.devices[d].node}" for d in plan.ranks]
        rng.shuffle(self.workers)
        self.now = 0

    def modules(self) -> dict[str, types.ModuleType]:
        """What the script imports."""
        names = ("ray", "ray.train", "ray.train.torch", "torch")
        made = {name: types.ModuleType(name) for name in names}
        cluster = self

        def gather(found: list[Any], mine: Any) -> None:
            kinds = [cluster.nodes[node] for node in cluster.workers]
            assert mine[:2] == (cluster.workers[cluster.now], kinds[cluster.now])
            found[:] = [
                (node, kind, f"ip-{node}", 1000 + i)
                for i, (node, kind) in enumerate(zip(cluster.workers, kinds, strict=True))
            ]

        class Trainer:
            def __init__(self, work: Any, *, torch_config: Any, scaling_config: Any) -> None:
                self.work, self.scaling = work, scaling_config

            def fit(self) -> None:
                assert set(self.scaling) <= set(SCHEDULERS["ray"]["ScalingConfig"])
                assert len(self.scaling["label_selector"]) == self.scaling["num_workers"]
                for cluster.now in range(self.scaling["num_workers"]):
                    self.work()

        vars(made["ray"]).update(
            nodes=lambda: [
                {"NodeID": node, "Labels": {"ray.io/accelerator-type": kind}}
                for node, kind in self.nodes.items()
            ],
            get_runtime_context=lambda: types.SimpleNamespace(
                get_node_id=lambda: self.workers[self.now]
            ),
            util=types.SimpleNamespace(get_node_ip_address=lambda: "here"),
        )
        vars(made["ray.train"]).update(ScalingConfig=dict)
        vars(made["ray.train.torch"]).update(TorchConfig=dict, TorchTrainer=Trainer)
        made["torch"].distributed = types.SimpleNamespace(  # type: ignore[attr-defined]
            get_world_size=lambda: len(self.workers),
            get_rank=lambda: self.now,
            all_gather_object=gather,
        )
        return made

    def run(self, script: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
        """The variables of each worker's rank, in the workers' order."""
        started: list[dict[str, str]] = []

        def note(words: list[str], *, env: dict[str, str], check: bool) -> None:
            assert words[1:5] == ["-P", "-m", "hetplan", "run"] and words[6:] == ["--steps", "3"]
            started.append(env)

        with monkeypatch.context() as patch:
            for name, module in self.modules().items():
                patch.setitem(sys.modules, name, module)
            patch.setattr(subprocess, "run", note)
            exec(compile(script, "train.py", "exec"), {})  # noqa: S102 (the file under test)
        return started


def test_ray_gives_every_worker_a_rank_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), "/kept", ""]))
    for plan in PLANS[:40]:
        one = start(plan, "ray", folder=str(tmp_path))
        save_plan(plan, tmp_path / "plan.json")
        script = written(one)["train.py"]
        cluster = Ray(plan, Random(len(plan.ranks)))
        started = cluster.run(script, monkeypatch)
        assert sorted(int(env["RANK"]) for env in started) == [*range(plan.world_size)]
        first = next(i for i, env in enumerate(started) if env["RANK"] == "0")
        for node, env in zip(cluster.workers, started, strict=True):
            place = plan.places[int(env["RANK"])]
            device = plan.devices[place.device]
            assert device.type == cluster.nodes[node]
            own = plan.nodes[device.node]
            assert (env["LOCAL_WORLD_SIZE"], env["LOCAL_RANK"]) == (
                str(len(own)), str(own.index(place.device)),
            )  # fmt: skip
            assert cluster.workers.count(node) == len(own)
            assert env["MASTER_ADDR"] == f"ip-{cluster.workers[first]}"
            assert env["MASTER_PORT"] == str(1000 + first)
            assert env["PYTHONPATH"] == "/kept"


def test_ray_on_other_nodes_is_refused() -> None:
    plan = next(p for p in PLANS if len({len(d) for d in p.nodes.values()}) > 1)
    workers = [("one", by_type(plan)[0][0] if 0 in plan.nodes else "T4")] * plan.world_size
    with pytest.raises(InputError, match="Ray placed the workers on other nodes than the plan's"):
        seats(plan, workers)


def test_launchers_take_their_own_keys_alone() -> None:
    assert {kind: set(own) for kind, (_, _, _, own) in LAUNCHERS.items()} == {
        "local": set(), "ssh": {"hosts"}, "slurm": {"options", "types"},
        "kubeflow": {"image", "types"}, "jobset": {"image", "types"}, "ray": {"types"},
    }  # fmt: skip
    assert all(issubclass(one, StrictModel) for one in CODES.values())
    assert (
        shlex.split(LAUNCHERS["ray"][1])[3].removeprefix("--")
        in SCHEDULERS["ray"]["ray job submit"]
    )


@pytest.mark.parametrize(
    ("host", "words", "address"),
    [
        ("node-1", ["node-1"], "node-1"),
        ("me@node-1.lan:2222", ["-p", "2222", "me@node-1.lan"], "node-1.lan"),
        ("10.0.0.1:22", ["-p", "22", "10.0.0.1"], "10.0.0.1"),
        ("fe80::1", ["fe80::1"], "fe80::1"),
        ("me@[fe80::1]:2222", ["-p", "2222", "me@fe80::1"], "fe80::1"),
        ("[::1]", ["::1"], "::1"),
    ],
)
def test_ssh_goes_to_the_port_of_a_host(host: str, words: list[str], address: str) -> None:
    plan = PLANS[0]
    launcher = CODES["ssh"].model_validate({"kind": "ssh", "hosts": [host] * 40})
    files = written(Start(plan=plan, launcher=launcher, folder="out", name="job", root="/a b"))
    (first, *_) = [line for line in files["submit.sh"].splitlines() if line.startswith("ssh ")]
    said = shlex.split(first.removesuffix(" <&9 8>&- &"))
    assert said[: 3 + len(words)] == ["ssh", "-o", "BatchMode=yes", *words]
    assert f" MASTER_ADDR={address} bash out/attended.sh" in said[-1]
    assert files["hostfile"].splitlines()[0].split()[0] == words[-1]


@pytest.mark.parametrize("host", ["node:0", "node:65536", "node:ssh", "node:"])
def test_a_port_that_is_none_is_refused_with_its_place(host: str) -> None:
    launcher = CODES["ssh"].model_validate({"kind": "ssh", "hosts": [host] * 40})
    one = Start(plan=PLANS[0], launcher=launcher, folder="out", name="job", root="/a")
    with pytest.raises(InputError, match=r"launcher\.hosts\[0\]: is not a host of ssh"):
        written(one)


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "a b", "a;b", "$(x)", "me@-x", ""])
def test_hosts_that_ssh_would_read_otherwise_are_no_hosts(host: str) -> None:
    with pytest.raises(ValueError, match="hosts"):
        CODES["ssh"].model_validate({"kind": "ssh", "hosts": [host]})


@pytest.mark.parametrize("name", ["@PLAN@", "@LABELS@ and @GPUS@", 'it\'s "quoted"', "a {b} %s"])
def test_names_stay_names_in_every_script(name: str) -> None:
    """A name that looks like a place in a template, or that holds quotes, is text."""
    plan = PLANS[0].model_copy(update={"name": name})
    for kind in KEYS:
        for file, text in written(start(plan, kind)).items():
            plain = written(start(PLANS[0], kind))[file].replace(PLANS[0].name, name)
            if file != "job.yaml":  # it holds the plan as JSON, with quotes escaped
                assert text == plain, (kind, file)
