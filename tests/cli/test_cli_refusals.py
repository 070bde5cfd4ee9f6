"""What the commands refuse: an option, an argument or a file that cannot be used is one line of
error and exit code 2, before anything is written."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from fakes.cli import Call

# Command -> arguments (as a shell takes them) -> a part of the error's line.
REFUSALS: dict[str, dict[str, str]] = {
    "": {
        "frobnicate": "no such command 'frobnicate'",
        "--frobnicate": "no such option",
        "solve": "missing argument",
        "check x": "nothing to check",
        "instances frobnicate": "no such command 'frobnicate'",
        "schema frobnicate": "'frobnicate' is not one of 'instance'",
        "schema instance --problem tsp": "unknown problem 'tsp' (expected one of amp",
        "schema instance --problem amb": "unknown problem 'amb'; did you mean amp?",
        "schema cluster --problem amp": "--problem does not go with schema cluster",
        "schema decision": "schema decision needs --problem",
        "instances list --problem tsp": "--problem: unknown problem 'tsp' (expected",
        "instances list smok": "nor an instance of the library: 'smok'; did you mean smoke",
        "plan --model gpt2 --cluster home --global-batch 1e9": "(got '1e9', expected a whole numbe",
        "plan --model gpt2 --cluster home --global-batch 8 --gap x": "(got 'x', expected a number)",
        "plan simulat x": "no such command 'simulat'; did you mean simulate",
        "plan plann x": "no such command 'plann'",
        "pan x": "no such command 'pan'; did you mean plan",
        "export layot --model gpt2": "no such command 'layot'; did you mean layout",
        "study reprot x": "no such command 'reprot'; did you mean report",
        "solve tiny-mixed -t abc": "'--time-limit' / '-t' (got 'abc', expected a number)",
        "solve tiny-mixed --seed x": "'--seed' (got 'x', expected a whole number",
        "solve tiny-mixed -t 0": "--time-limit: not usable (got 0.0, expected seconds greater",
        "solve tiny-mixed --gap -1": "--gap: not usable (got -1.0, expected a relative gap from 0",
        "solve tiny-mixed --threads 0": "--threads: not usable (got 0, expected 1 to 512)",
        "solve tiny-mixed --seed -1": "--seed: not usable (got -1, expected 0 to 2147483647)",
        "solve tiny-mixed -o ''": "--output: names no file (expected a file name)",
        "study run smoke --jobs 0": "'--jobs' / '-j' (got '0', expected at least 1)",
        "study run smoke -o no/such": "no: no such folder",
        "study report . --png no/such": "no: no such folder",
        "study report . --rows no/such.parquet": "no: no such folder",
        "launch job.yaml -o no/such": "no: no such folder",
        "instances list --name 'zzz*'": "--name: none of the packaged instances matches (got",
        "instances list amp --largest 0": "none of the packaged instances matches",
        "cluster detect --hostfile nothere": "nothere: no such file",
        "fits --model gpt2 --cluster home --recomputation foo": "--recomputation: recomputation of "
        "hetplan 'foo' (expected one of none, selective, full)",
        "instances show nothing": "neither a file nor an instance of the library",
        "instances show nothing --best": "no best-known record (got 'nothing')",
    },
    "plan search --model gpt2": {
        "--gpus A800:8 --rules /no/such.rules": "no such file",
        "": "--gpus or by --cluster",
        "--gpus A800": "TYPE:COUNT",
        "--gpus A800:0": "TYPE:COUNT",
        "--gpus A801:8": "unknown device 'A801'; did you mean A800-SXM4-80GB, A800-PCIE-80GB?",
        "--gpus A100:8": "several devices",
        "--gpus A800:8,A800:8": "names a type twice",
        "--gpus A800:8 --mode cheap": "'cheap' is not one of",
        "--gpus A800:8,H100:8 --mode homogeneous": "takes one type",
        "--gpus A800:8 --total 4": "heterogeneous mode",
        "--gpus A800:8,H100:8 --total 17": "too few GPUs",
        "--gpus A800:1 --mode cost": "at least 2",
        "--gpus A800:8 --param tensr=1": "--param: unknown parameter 'tensr'; did you mean tensor?",
        "--gpus A800:8 --param tensor=0": "1 to 10000",
        "--gpus A800:8 --param tensor=4-2": "as 1,2 or 1-8",
        "--gpus A800:8 --param tensor=1 --param tensor=2": "given twice",
        "--gpus A800:8 --param sequence_parallel=maybe": "true or false",
        "--gpus A800:8 --param recompute=some": "unknown kind of recomputation",
        "--gpus A800:8 --param overlap": "NAME=VALUE",
        "--gpus A800:8 --top 0": "--top",
        "--gpus A800:8 --plot plot.gif": ".svg, .png",
        "--gpus A800:8 --tokens -1": "tokens of the job",
        "--gpus A800:8 --tokens inf": "tokens of the job (got inf",
        "--gpus A800:8 --money-limit inf": "money limit (got inf",
        "--gpus A800:8 --network-gbit -1": "--network-gbit",
        "--gpus A800:8 --network-gbit nan": "--network-gbit: not usable (got nan",
        "--gpus A800:8 --intra-node-gbit 1e-300": "--intra-node-gbit: not usable (got 1e-300",
        "--gpus A800:8 --intra-node-gbit inf": "--intra-node-gbit: not usable (got inf",
        "--gpus A800:8 --devices-per-node 0": "--devices-per-node: not usable (got 0, expected 1",
        "--gpus A800:8,H100:8 --total 0": "number of GPUs (got 0",
        "--gpus A800:8 --global-batch 9999999999999999999999999": "global batch is not usable",
        "--cluster amp-mxed": "an example cluster: 'amp-mxed'; did you mean amp-mixed?",
        "--gpus A800:8 --precision int8": "'int8' is not one of 'fp16'",
        "--gpus A800:8 --global-batch 0": "global batch",
        "--gpus V100-SXM2-16GB:8 --precision bf16": "--precision fp16 or fp32",
    },
    "plan --model gpt2 --cluster g4dn-4 --global-batch 8 --threads 1": {
        "--strategies foo": "unknown strategy 'foo' (expected one of joint, amp",
        "--strategies popler": "unknown strategy 'popler'; did you mean poplar?",
        "--strategies ,": "no strategy named",
        "--precision fp8": "unknown precision 'fp8' (expected one of fp16, bf16, fp32, auto)",
        "--sequence 0": "sequence",
        "--sequence many": "invalid value for '--sequence'",
        "--time-limit 0": "--time-limit: not usable (got 0.0",
        "--money-limit -1": "money limit (got -1.0",
        "--money-limit nan": "money limit (got nan",
        "--profile no-such.json": "no-such.json: no such file",
        "-o no/such/place.json": "no/such: no such folder",
        "--global-batch 0": "global batch",
        "--global-batch -8": "global batch",
        "--global-batch 99999999999999999999": "global batch",
        "--global-batch 8.5": "invalid value for '--global-batch'",
        "--model gpt-none": "unknown model",
        "--model no/such/config.json": "no/such/config.json: no such file",
        "--cluster no-such.yaml": "no-such.yaml: no such file",
        "--cluster amp-mxed": "an example cluster: 'amp-mxed'; did you mean amp-mixed?",
        "--model gpt2-mediun": "unknown model 'gpt2-mediun'; did you mean gpt2-medium",
        "--threads 0": "--threads: not usable (got 0",
        "--set hap.seconds=1 --strategies dp": "expected none: these strategies have",
    },
    "plan --model gpt2 --cluster home --global-batch 64 --strategies poplar": {
        "--set poplar.x=1": "no such setting (got 'poplar.x', expected one of poplar.zero",
        "--set poplar.shards=many": "setting poplar: shards: not usable (got 'many'",
        "--set poplar.zero=4": "setting poplar: zero",
        "--set poplar.curves=nowhere.json": "nowhere.json",
        "--set shards=memory": "not usable (got 'shards=memory', expected STRATEGY.NAME=VALUE)",
        "--set poplar.zero=1 --set poplar.zero=2": "--set: poplar.zero is given twice",
        "--set dp.x=1 --strategies dp": "no such setting (got 'dp.x'",
    },
    "profile predict --model gpt2 --cluster amp-mixed --sequence 128": {
        "--micro-batches 0": "not usable (got '0', expected whole numbers from 1 to 10000",
        "--micro-batches 1e3": "--micro-batches: not usable (got '1e3'",
        f"--micro-batches {'9' * 5000}": "--micro-batches: not usable",
        "--micro-batches ,": "--micro-batches: no number given",
        "--micro-batches 1 --global-batch 8": "exclude each other",
        "--global-batch 0": "global batch",
        "--tensor 5": "--tensor: not usable (got 5, expected a divisor of the model's heads",
        "--precision bf16": "device V100-SXM2-16GB",
        "--sequence 2000": "learned positions",
        "-o no/such/place.json": "no/such: no such folder",
    },
    "profile": {
        "measure --model gpt2": "'--device'",
        "--model gpt2": "missing option '--device'",
        "batch-curve": "missing option '--model'",
        "predict --cluster g4dn-4": "missing option '--model'",
        "predict --model gpt2": "'--cluster'",
    },
    "profile batch-curve --model gpt2 --sequence 16 --precision fp32": {
        "": "--memory-gib: missing",
        "--cluster poplar-a": "no such option: --cluster",
        "--tensor 2": "no such option: --tensor",
        "--memory-gib -1": "--memory-gib: not usable (got -1.0, expected 1e-09 to 1e+15)",
        "--memory-gib 1 --repeats 0": "invalid value for '--repeats'",
    },
    "solve": {
        "tiny-mixed --native cp-sat.x=2": "runs cp-sat (got 'auto', expected --method cp-sat or",
        "tiny-mixed -m exact,paper --native highs.x=off": "runs highs (got 'exact, paper', exp",
        "tiny-mixed -m milp --native pyomo.x=1": "--native pyomo.x: no method chosen runs pyomo",
        "tiny-mixed -q -m pyomo --native pyomo.time_limit=1": "repeats the common option",
        "tiny-mixed --threads 0": "expected 1 to 512",
        "tiny-mixed --threads 513": "expected 1 to 512",
        "tiny-mixed --threads 99999999999999999999": "expected 1 to 512",
        "tiny-mixed --pyomo-solver cbc": "--pyomo-solver cbc: no method chosen runs pyomo",
    },
    "plan templates": {
        "amp-homogeneous": "expected ditto",
        "ditto-ex1-nb32-flat --fewest-nodes 5": "expected 1 to 4",
        "ditto-ex1-nb32-flat --failures 4": "expected 0 to 3",
        "ditto-ex1-nb32-flat --micro-batches 0": "expected 1 to 1000000",
    },
    "study run": {
        "-o x": "no instances named",
        "nothing-such -o x": "neither a file nor an instance",
        "papers -o x -j 0": "--jobs",
        "papers -o x --seeds 1,b": "--seeds",
        "papers -o file": "is a file",
        "tiny-mixed -m dito -o x": "has the method 'dito' (expected one of all, annealing, auto",
    },
    "study report": {
        ".": "holds no study",
        "poplar": "poplar: is no folder of a study (expected a folder)",
    },
    "export no-such.json --to megatron": {"": "no-such.json: no such file"},
    "show": {
        "nothing.json --cluster amp-mixed": "no such file",
        "hap-chain": "neither a file nor an instance",
        "hap-chain-2x2 --html x.html": "--html: is for plan files (got 'hap-chain-2x2')",
        "answer.json": "answer.json: is an answer; show it with: hetplan show INSTANCE answer.json",
    },
    "solve numbers.json": {
        "-m nope": "problem fake: unknown method 'nope' (expected one of auto, first",
        "-m auto,frist": "problem fake: unknown method 'frist'; did you mean first?",
        "-m ,": "--method: no method named",
        "--time-limit 0": "--time-limit: not usable (got 0.0, expected seconds greater than 0)",
        "--time-limit -3": "--time-limit: not usable (got -3.0",
        "--time-limit nan": "--time-limit: not usable (got nan",
        "--time-limit inf": "--time-limit: not usable (got inf",
        "--time-limit soon": "invalid value for '--time-limit' / '-t'",
        "--gap 1": "--gap: not usable (got 1.0",
        "--gap -0.1": "--gap: not usable (got -0.1",
        "--threads 0": "--threads: not usable (got 0",
        "--threads 1.5": "invalid value for '--threads'",
        "--seed -1": "--seed: not usable (got -1",
        "--native nonsense": "--native: not usable (got 'nonsense', expected BACKEND.NAME=VALUE)",
        "--native gurobi.x=1": "native options of an unknown back end (got 'gurobi'",
        "--native cp-sat.num_workers=3": "cp-sat.num_workers repeats the common option",
        "--native highs.a=1 --native highs.a=2": "--native: highs.a is given twice",
        "-o no/such/folder/x.json": "no/such/folder: no such folder",
        "-o .": "--output: names no file (expected a file name)",
        "--frobnicate": "no such option",
        "-m picky": "picky takes no numbers (expected method auto)",
        "extra": "neither a file nor an instance of the library: 'extra'",
    },
    "plan replan plan.json --cluster cluster.yaml -q": {
        "--lost node9": "no such node (got 'node9'",
        "--lost node0,node1": "nothing is left",
        "--lost node1 --within -1": "--within: not usable (got -1.0",
        "--lost node1 --strategies foo": "unknown strategy 'foo'",
        "--lost node1 --model gpt2-medium": "model of the plan is not the workload's",
    },
    "plan --model gpt2 --cluster g4dn-4 --global-batch 8": {
        "--money-limit -1": "--money-limit: money limit (got -1.0, expected dollars",
        "--cheapest-within -1": "--cheapest-within: percent",
        "--run 0": "'--run' (got '0', expected at least 1)",
        "--strategies ''": "--strategies: no strategy named (expected some of joint, amp",
    },
    "plan what-if plan.json --cluster cluster.yaml": {
        "--add ''": "--add: names nothing",
        "--remove ,": "--remove: names nothing",
        "--strategies ''": "--strategies: no strategy named",
    },
    "run plan.json --virtual --elastic --checkpoint x --every 1 --cluster cluster.yaml": {
        "--strategies ''": "--strategies: no strategy named",
        "--strategies dq": "unknown strategy 'dq'",
    },
    "plan simulate plan.json --cluster cluster.yaml": {
        "--cluster amp-mixed": "devices of the plan is not the workload's",
        "--model gpt2-medium": "model of the plan is not the workload's",
        "--overlap 0": "--overlap",
    },
    "export": {
        "plan.json --to torchtitan": "precision fp16 (only bf16, fp32)",
        "plan.json --to megatorn": "unknown framework 'megatorn'; did you mean megatron",
        "plan.json --to megatron -o no/such/x.sh": "no such folder",
    },
    "show plan.json": {
        "": "plan.json: the plan does not carry what it was made for: give the cluster "
        "'two-by-two' with --cluster"
    },
    "show plan.json --cluster cluster.yaml": {
        "--html no/such/x.html": "no such folder",
        "extra": "a plan has no second argument",
    },
    "instances export": {
        "tiny-mixed -o x.txt": "unknown ending",
        "tiny-mixed -o no/x.mps": "no such folder",
        "nothing -o x.mps": "neither a file",
    },
    "instances update": {
        "answer.json": "no such instance among those to update",
        "answer.json --folder x": "no such folder",
        "file": "file: is empty (expected a JSON document)",
        ".": "holds no study",
    },
}
LINES = [
    (f"{command} {more}", part) for command, all in REFUSALS.items() for more, part in all.items()
]


@pytest.mark.parametrize(("line", "part"), LINES, ids=[line[:60] for line, _ in LINES])
def test_refusals_are_one_line(
    hetplan: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    line: str,
    part: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = {"instance": "nothing", "problem": "ditto", "results": [{"method": "exact"}]}
    Path("answer.json").write_text(json.dumps(answer))
    Path("file").write_text("")
    if " numbers.json" in line:
        request.getfixturevalue("numbers")(3, 1)
    if " plan.json" in line:
        request.getfixturevalue("plan_files")
    before = sorted(tmp_path.iterdir())
    assert part in hetplan(*shlex.split(line)).error
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("key", ["framework", "stack"])
@pytest.mark.parametrize("command", ["show", "run --virtual", "plan simulate"])
def test_an_unknown_name_in_a_plan_is_refused_with_its_file(
    hetplan: Call, tmp_path: Path, plan_files: object, command: str, key: str
) -> None:
    plan = json.loads((tmp_path / "plan.json").read_text())
    plan["workload"][key] = "nosuch"
    path = tmp_path / "other.json"
    path.write_text(json.dumps(plan))
    line = [*command.split(), path, "--cluster", tmp_path / "cluster.yaml"]
    assert f"other.json: workload.{key}: unknown" in hetplan(*line).error
