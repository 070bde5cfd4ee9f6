"""Launch scripts of others, in the forms in which people publish them, as nodes of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetplan.cli.main import main
from hetplan.errors import InputError
from hetplan.profiling.hardware.cluster import load_cluster
from hetplan.profiling.hardware.hosts import Host
from hetplan.profiling.hardware.launch_scripts import read_launch_script

# The start of Megatron-LM's and DeepSpeed's examples: an array, or a text, of arguments.
ARRAY = """#!/bin/bash
GPUS_PER_NODE=8   # of a node
NUM_NODES=4
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE  # all
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    --tensor-model-parallel-size 2
"""
QUOTED = """
export NNODES=${NNODES:-2}
DISTRIBUTED_ARGS="--nproc_per_node ${GPUS:-4} --nnodes $NNODES \\
                  --node_rank $NODE_RANK"
python -m torch.distributed.launch $DISTRIBUTED_ARGS train.py --nnodes 9
"""
SLURM = """#!/bin/bash
#SBATCH --job-name=train --nodes=3
#SBATCH --gres=gpu:a100_80gb:4   # of each node
#SBATCH --ntasks-per-node=1
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun -N 1 -n 1 -w "$MASTER_ADDR" hostname --ip-address
LAUNCHER="torchrun --nproc_per_node $SLURM_GPUS_ON_NODE --nnodes $SLURM_NNODES"
srun --jobid $SLURM_JOBID bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID train.py"
"""


def written(folder: Path, text: str) -> str:
    path = folder / "train.sh"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        (ARRAY, [8] * 4),
        (ARRAY.replace("\n", "\r\n"), [8] * 4),
        (QUOTED, [4] * 2),
        (SLURM, [4] * 3),
        ("torchrun --nnodes=2 --nproc-per-node=8 train.py\n", [8, 8]),
        ("torchrun --nproc_per_node=8 --nproc_per_node=2 train.py\n", [2]),  # the last counts
        ("#SBATCH -N2\n#SBATCH --gpus-per-node=h100:4\nsrun python train.py\n", [4, 4]),
        ("#SBATCH --nodes=2\n#SBATCH -G 8\nsrun python train.py\n", [4, 4]),
        ("#SBATCH -N 2 --ntasks-per-node=4 --gpus-per-task=1\nsrun python a.py\n", [4, 4]),
        ("#SBATCH -N 2\n#SBATCH -w gpu[07-08]\n#SBATCH --gres=gpu:2\n", [2, 2]),
        ("#PBS -l select=2:ncpus=64:ngpus=4\nmpirun -np 8 python train.py\n", [4, 4]),
        ("deepspeed --num_gpus 8 --num_nodes 2 --hostfile gone train.py\n", [8, 8]),
        ("deepspeed --include a:0,1@b:2 train.py\n", [2, 1]),
        ("deepspeed --num_gpus=4 train.py --nnodes 3\n", [4]),
        ("deepspeed --hostfile=hosts --num_nodes=2 train.py\n", [2, 3]),
        ("deepspeed --hostfile=hosts --num_gpus=2 train.py\n", [2, 2, 2]),
        ("mpirun -np 16 -H a:8,b:8 -x PATH python train.py\n", [8, 8]),
        ("accelerate launch --num_machines 2 --num_processes 16 a.py\n", [8, 8]),
        ("accelerate launch --config_file fsdp.yaml a.py\n", [4, 4]),
        ("accelerate launch --config_file fsdp.yaml --num_processes 2 a.py\n", [1, 1]),
        ("CUDA_VISIBLE_DEVICES=4,5 accelerate launch --num_processes=2 a.py\n", [2]),
        # srun within an elastic range: Slurm says how many nodes
        ("#SBATCH -N 2\ntorchrun --nnodes=1:4 --nproc_per_node=gpu a.py\n", [None, None]),
    ],
)
def test_sizes_of_jobs(text: str, devices: list[int | None], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=3\nc slots=8\n")
    (tmp_path / "fsdp.yaml").write_text("num_machines: 2\nnum_processes: 8\nuse_cpu: false\n")
    hosts, _ = read_launch_script(written(tmp_path, text))
    assert [host.devices for host in hosts] == devices


def test_names_types_and_what_is_assumed(tmp_path: Path) -> None:
    hosts, lines = read_launch_script(written(tmp_path, SLURM))
    assert [host.driver_name for host in hosts] == ["a100 80gb"] * 3 and not lines
    hosts, _ = read_launch_script(written(tmp_path, "#SBATCH -N 2 -w gpu[07-08] -G 4\n"))
    assert [host.name for host in hosts] == ["gpu07", "gpu08"]
    _, lines = read_launch_script(written(tmp_path, "deepspeed --num_gpus 4 train.py\n"))
    assert lines == [f"nodes are assumed: one, as {tmp_path}/train.sh tells no number"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "#PBS -l select=16:ngpus=4\nmpiexec -perhost 1 python -m torch.distributed.run "
            "--nnodes 32 --nproc_per_node 4 a.py\n",
            ("32", "torchrun", "16"),
        ),
        ("srun -N 8 torchrun --nproc_per_node 8 a.py\n", ("1", "torchrun", "8")),
        ("#SBATCH --nodes=2\nsrun torchrun --nnodes 2 --nproc_per_node 8 a.py\n", None),
    ],
)
def test_numbers_of_nodes_that_contradict_each_other_are_told(
    text: str, told: tuple[str, str, str] | None, tmp_path: Path
) -> None:
    _, lines = read_launch_script(written(tmp_path, text))
    if told is None:
        assert lines == []
        return
    taken, launcher, around = told
    assert lines == [
        f"nodes are taken to be {taken}, as {launcher} in {tmp_path}/train.sh is told or takes by "
        f"default; the job around it asks for {around}"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello\n", "no launch"),
        ("", "no launch"),
        ("torchrun --nnodes $2 --nproc_per_node 8 a.py\n", r"nodes is not known \(got '\?'"),
        ("torchrun --nnodes 1:4 --nproc_per_node 8 a.py\n", r"nodes is not known \(got '1:4'"),
        (
            "if x; then N=2; else N=4; fi\nN=2\nN=4\ntorchrun --nnodes $N a.py\n",
            "nodes is not known",
        ),
        ("torchrun --nnodes 2 a.py\ntorchrun --nnodes 3 a.py\n", "jobs of different sizes"),
        ("torchrun --nnodes 99999 a.py\n", "too many nodes"),
        ("torchrun --nproc_per_node 9999 a.py\n", "number of devices is not usable"),
        ("#SBATCH -N 2\n#SBATCH hetjob\n#SBATCH -N 4\n", "heterogeneous jobs are not read"),
        ("#PBS -l select=1:ngpus=4+2:ngpus=8\n", "several kinds of nodes are not read"),
        ("deepspeed --hostfile gone a.py\n", "no such file"),
        ("deepspeed --include a:x a.py\n", "not usable"),
        ("deepspeed --exclude a:0 a.py\n", "exclusions are not read"),
        ("mpirun -H a:b:c:d python a.py\n", "not usable"),
        ("\n" * 3000, "too many lines"),
        (
            'a=`srun "$@" sh -c \'hostname\'`\nsrun "$@" sh -xeuc \'\n torchrun \\\n --nnodes '
            "$SLURM_NNODES \\\n --nproc-per-node gpu main.py'\n",
            r"nodes is not known \(got '\?'",
        ),
        ("A=$B\nB=$A$A\ntorchrun --nnodes $A a.py\n", "nodes is not known"),
    ],
)
def test_scripts_that_do_not_tell(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_launch_script(written(tmp_path, text))


def test_nothing_of_a_script_is_executed(tmp_path: Path) -> None:
    bad = tmp_path / "made"
    text = f"X=$(touch {bad})\nY=`touch {bad}`\ntorchrun --nnodes $(touch {bad}; echo 2) a.py\n"
    with pytest.raises(InputError, match="nodes is not known"):
        read_launch_script(written(tmp_path, text))
    assert not bad.exists()


def test_a_cluster_file_from_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetplan.cli.cluster.local_node", lambda: Host("here"))
    target = tmp_path / "cluster.yaml"
    arguments = ["cluster", "detect", "-o", str(target), "--script", written(tmp_path, ARRAY)]
    assert main([*arguments, "--device", "H100-SXM5-80GB", "--network", "400"]) == 0
    cluster = load_cluster(target)
    assert [(node.devices, node.device) for node in cluster.nodes] == [(8, "H100-SXM5-80GB")] * 4
    assert "as many as" in capsys.readouterr().out
    assert main([*arguments, "--slurm", "a"]) == 2
    assert "--script" in capsys.readouterr().err
