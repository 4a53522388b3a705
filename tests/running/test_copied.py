"""Command lines that were copied from a script: what can't work, or is not what was meant, is said by the plan."""

from __future__ import annotations

import shlex

import pytest

from torchaos.harness.running.planner.job_plan import errors_in, warnings_in

OWN = "torchrun --max-restarts 1 --nproc-per-node 8"


@pytest.mark.parametrize(
    ("launcher", "nodes", "line", "said"),
    [
        ("slurm", 2, f"{OWN} --nnodes $SLURM_NNODES train.py", "--nnodes is the text $SLURM_NNODES; leave it out"),
        ("slurm", 2, f"{OWN} --rdzv_endpoint=$HEAD:29500 train.py", "--rdzv-endpoint is the text $HEAD; leave it out"),
        ("slurm", 2, f"{OWN} --rdzv_id ${{SLURM_JOB_ID}} train.py", "--rdzv-id is the text ${SLURM_JOB_ID}"),
        ("local", 1, "torchrun --nproc_per_node $GPUS train.py", "--nproc-per-node is the text $GPUS; write the value"),
        ("slurm", 2, f"{OWN} --node-rank $(hostname) train.py", "--node-rank is the text $(hostname); leave it out"),
        ("kubernetes", 2, f"{OWN} --nnodes 4 train.py", "waits for 4 nodes (--nnodes), and the job has 2"),
        ("netns", 2, f"{OWN} --nnodes=3:4 train.py", "torchrun waits for 3 nodes (--nnodes), and the job has 2"),
        ("ssh", 2, f"{OWN} --standalone train.py", "with --standalone, the torchrun of each node"),
        ("slurm", 2, f"srun -N2 {OWN} train.py", "launcher: slurm itself starts the command on each node; leave srun"),
        ("kubernetes", 2, f"mpirun -np 2 {OWN} train.py", "launcher: kubernetes itself starts the command"),
        ("local", 1, "sbatch train.sbatch", "sbatch only submits the job; `torchaos init -- sbatch SCRIPT` reads the"),
    ],
)  # fmt: skip
def test_a_line_that_can_not_work(launcher: str, nodes: int, line: str, said: str) -> None:
    """The one error says what the nodes would get, and what to write."""
    (error,) = errors_in(line.split(), {}, launcher, nodes)
    assert said in error


@pytest.mark.parametrize(
    ("launcher", "line", "said"),
    [
        ("slurm", f"{OWN} --node_rank 0 --master_addr h0 train.py",
         "gets the same --node-rank, --master-addr, and launcher: slurm"),
        ("netns", f"{OWN} --rdzv-endpoint=h0:29500 train.py", "gets the same --rdzv-endpoint, and launcher: netns"),
        ("ssh", f"{OWN} --rdzv-backend static train.py", "gets the same --rdzv-backend static"),
        ("local", f"srun {OWN} train.py", "the ranks that srun starts are no children of torchaos"),
        ("local", f"apptainer exec --nv a.sif {OWN} train.py", "the ranks run in a container of apptainer"),
        ("slurm", f"srun --container-image=a.sqsh {OWN} train.py", "a container of srun --container-image"),
        ("local", f"{OWN} train.py --data $SCRATCH/data", "the job gets the text $SCRATCH; write the value"),
        ("local", f"{OWN} train.py --run=${{USER}}", "the job gets the text ${USER}"),
        ("local", f"{OWN} --nnodes 2 --node_rank 0 --master_addr h0 train.py",
         "waits for 2 nodes (--nnodes), and launcher: local starts one"),
    ],
)  # fmt: skip
def test_a_line_that_is_probably_not_meant(launcher: str, line: str, said: str) -> None:
    """The one warning says why, and what to write."""
    (warning,) = warnings_in(line.split(), launcher)
    assert said in warning


@pytest.mark.parametrize(
    ("launcher", "nodes", "line"),
    [
        ("slurm", 2, f"{OWN} --nnodes 2 train.py --nnodes 9 --node-rank 3"),
        ("netns", 3, f"{OWN} --nnodes 2:3 --rdzv-endpoint={{endpoint.rendezvous}} train.py"),
        ("netns", 2, f"{OWN} --rdzv-backend etcd-v2 --rdzv-endpoint localhost:2379 train.py"),
        ("local", 1, f"{OWN} --standalone train.py --pattern 'a$' --price 5$"),
        ("local", 1, f"{OWN} --nnodes 1:4 train.py"),
        ("local", 1, "bash -c 'torchrun --nproc-per-node $GPUS train.py'"),
        ("local", 1, f"{OWN} --rdzv-endpoint localhost:0 -m trainer --mount /a:/b"),
    ],
)
def test_a_line_that_is_right(launcher: str, nodes: int, line: str) -> None:
    """Nothing is said of options of the trainer, of a shell, of spare nodes and of a rendezvous elsewhere."""
    words = shlex.split(line)
    assert [*errors_in(words, {}, launcher, nodes), *warnings_in(words, launcher)] == []
