"""Launch lines and batch scripts as other people write them, made small, and what `torchaos init` makes of each."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from torchaos.harness.interfaces import UsageError
from torchaos.harness.running.scaffold.job_draft import draft_of, scenario_text
from torchaos.harness.scenario.field_types import fill, unknown_placeholders

RUN = "torchrun --max-restarts 3"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Scripts that save nowhere, so that no option for a folder is added."""
    for name in ("train.py", "main.py", "pretrain_gpt.py", "echo.py"):
        (tmp_path / name).write_text("import torch\n")
    (tmp_path / "hosts").write_text("# two machines\nh1 slots=4\nh2 slots=4\n")
    (tmp_path / "run.sh").write_text(
        'export NCCL_DEBUG=INFO\nGPUS=${GPUS:-4}\ntorchrun --nproc_per_node=$GPUS \\\n  train.py --cfg a.yaml "$@"\n'
    )
    (tmp_path / "far.sh").write_text('cd "$(dirname "$0")"/../far\ntorchrun --nproc_per_node=4 train.py\n')
    (tmp_path / "lost.sh").write_text("cd $(mktemp -d)\ntorchrun --nproc_per_node=4 train.py\n")
    (tmp_path / "shifts.sh").write_text(
        'N=$1; shift\nCFG=$1\nshift 1\ntorchrun --nproc_per_node=$N train.py --cfg $CFG "$@"\n'
    )
    (tmp_path / "slices.sh").write_text("torchrun --nproc_per_node=$2 train.py --cfg $1 ${@:3}\n")
    (tmp_path / "one.yaml").write_text("num_machines: 1\nnum_processes: 4\nmixed_precision: fp16\ngpu_ids: all\n")
    return tmp_path


LINES = [
    ("torchrun --max_restarts 0 train.py", f"{RUN} train.py", {}),
    ("torchrun --max-restarts=0 --nproc_per_node=4 train.py", f"{RUN} --nproc_per_node=4 train.py", {}),
    ("torchrun --standalone --nnodes=1 --nproc-per-node=8 train.py --max_restarts 0",
     f"{RUN} --standalone --nnodes=1 --nproc-per-node=8 train.py --max_restarts 0", {}),
    ("python -m torch.distributed.run --nproc_per_node 2 --max_restarts=0 -m pkg.train",
     "python -m torch.distributed.run --nproc_per_node 2 --max-restarts 3 -m pkg.train", {}),
    ("python -m torch.distributed.launch --nproc_per_node=2 train.py",
     "python -m torch.distributed.launch --max-restarts 3 --nproc_per_node=2 train.py", {}),
    ("python -u train.py --lr 1e-3", f"{RUN} --nproc-per-node 2 train.py --lr 1e-3", {}),
    ("python -m pkg.train --lr 1e-3", f"{RUN} --nproc-per-node 2 -m pkg.train --lr 1e-3", {}),
    ("accelerate launch --num_processes 8 --mixed_precision bf16 train.py", f"{RUN} --nproc-per-node 8 train.py",
     {"ACCELERATE_MIXED_PRECISION": "bf16"}),
    ("accelerate launch --multi_gpu --main_process_port=29601 --num_processes=2 --gpu_ids=0,1 --num_machines=1 "
     "--dynamo_backend=no main.py", f"{RUN} --nproc-per-node 2 main.py", {"CUDA_VISIBLE_DEVICES": "0,1"}),
    ("accelerate launch --config_file one.yaml train.py --config_file x",
     f"{RUN} --nproc-per-node 4 train.py --config_file x", {"ACCELERATE_MIXED_PRECISION": "fp16"}),
    ("accelerate launch --num_machines 2 --num_processes 16 --machine_rank 0 --main_process_ip 10.0.0.1 -m pkg.train",
     f"{RUN} --nproc-per-node 8 -m pkg.train", {}),
    ("accelerate launch --cpu --num-processes 2 train.py", f"{RUN} --nproc-per-node 2 train.py",
     {"ACCELERATE_USE_CPU": "true"}),
    ("deepspeed --num_gpus 4 train.py --deepspeed ds.json",
     f"{RUN} --nproc-per-node 4 train.py --deepspeed ds.json", {}),
    ("deepspeed --include localhost:1,3 --master_port 29600 train.py", f"{RUN} --nproc-per-node 2 train.py",
     {"CUDA_VISIBLE_DEVICES": "1,3"}),
    ("CUDA_VISIBLE_DEVICES=0,1 OMP_NUM_THREADS=4 torchrun --nproc-per-node 2 train.py",
     f"{RUN} --nproc-per-node 2 train.py", {"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "4"}),
    ("torchrun --nnodes 4 --node_rank 0 --master_addr h0 --master_port 29500 --nproc_per_node 8 train.py",
     f"{RUN} --nproc_per_node 8 train.py", {}),
    ("mpirun -np 4 -x NCCL_DEBUG python train.py", f"{RUN} --nproc-per-node 4 train.py", {}),
    ("conda run -n env torchrun --nproc-per-node 2 train.py",
     "conda run -n env torchrun --max-restarts 3 --nproc-per-node 2 train.py", {}),
    ("time -p nohup torchrun --nproc-per-node 2 train.py", f"{RUN} --nproc-per-node 2 train.py", {}),
    ("python -m deepspeed.launcher.runner --num_gpus 4 train.py", f"{RUN} --nproc-per-node 4 train.py", {}),
    ("composer -n 8 train.py --lr 3e-4", f"{RUN} --nproc-per-node 8 train.py --lr 3e-4", {}),
    ("./train.py --lr 3e-4", f"{RUN} --nproc-per-node 2 ./train.py --lr 3e-4", {}),
    ("tune run --nproc_per_node 4 full --config x", "tune run --nproc_per_node 4 full --config x", {}),
    ("bash train.sh", "bash train.sh", {}),
    ("uv run --no-sync torchrun --nproc-per-node 2 train.py",
     "uv run --no-sync torchrun --max-restarts 3 --nproc-per-node 2 train.py", {}),
    ("uv run train.py --lr 1", "uv run torchrun --max-restarts 3 --nproc-per-node 2 train.py --lr 1", {}),
    ("poetry run python -u train.py", "poetry run torchrun --max-restarts 3 --nproc-per-node 2 train.py", {}),
    ("conda run --no-capture-output -n deepspeed deepspeed --num_gpus 4 train.py",
     "conda run --no-capture-output -n deepspeed torchrun --max-restarts 3 --nproc-per-node 4 train.py", {}),
    ("nohup nice -n 5 numactl --interleave=all accelerate-launch --num_processes 4 train.py",
     "nice -n 5 numactl --interleave=all torchrun --max-restarts 3 --nproc-per-node 4 train.py", {}),
    ("timeout -k 30 2h mpirun -np 4 python train.py",
     "timeout -k 30 2h torchrun --max-restarts 3 --nproc-per-node 4 train.py", {}),
    ("env -u FOO torchrun --nproc-per-node 2 train.py",
     "env -u FOO torchrun --max-restarts 3 --nproc-per-node 2 train.py", {}),
    ("env -S A=1\\ torchrun --nproc-per-node 2 train.py", f"{RUN} --nproc-per-node 2 train.py", {"A": "1"}),
    ("cd src && A=1 torchrun --nproc-per-node 2 train.py 2>&1 | tee log", f"{RUN} --nproc-per-node 2 train.py",
     {"A": "1"}),
    ("'torchrun --nproc-per-node 2 train.py > log'", f"{RUN} --nproc-per-node 2 train.py", {}),
    ("accelerate launch -m axolotl.cli.train x.yaml", f"{RUN} --nproc-per-node 2 -m axolotl.cli.train x.yaml", {}),
    ("axolotl train x.yaml --launcher torchrun -- --nproc_per_node=2",
     "axolotl train x.yaml --launcher torchrun -- --nproc_per_node=2", {}),
    ("deepspeed --hostfile hosts train.py", f"{RUN} --nproc-per-node 4 train.py", {}),
    ("deepspeed --module pkg.train", f"{RUN} --nproc-per-node 2 -m pkg.train", {}),
    ("accelerate launch -m --num_processes 4 --mixed_precision=bf16 pkg.train --num_processes 9",
     f"{RUN} --nproc-per-node 4 -m pkg.train --num_processes 9", {"ACCELERATE_MIXED_PRECISION": "bf16"}),
    ("deepspeed --module --num_gpus 4 pkg.train", f"{RUN} --nproc-per-node 4 -m pkg.train", {}),
    ("torchrun -m --max-restarts 0 --nproc-per-node 2 pkg.train --max-restarts 0",
     "torchrun -m --max-restarts 3 --nproc-per-node 2 pkg.train --max-restarts 0", {}),
    ("torchrun --no-python --nproc-per-node 2 ./rank.sh", f"{RUN} --no-python --nproc-per-node 2 ./rank.sh", {}),
    ("mpirun -np 16 -H a:8,b:8 -x NCCL_DEBUG=INFO -x PATH python train.py", f"{RUN} --nproc-per-node 8 train.py",
     {"NCCL_DEBUG": "INFO"}),
    ("mpiexec -n 2 -genv OMP_NUM_THREADS 4 python train.py", f"{RUN} --nproc-per-node 2 train.py",
     {"OMP_NUM_THREADS": "4"}),
    ("bash run.sh --lr 1", f"{RUN} --nproc_per_node=4 train.py --cfg a.yaml --lr 1", {"NCCL_DEBUG": "INFO"}),
    ("nohup ./run.sh", f"{RUN} --nproc_per_node=4 train.py --cfg a.yaml", {"NCCL_DEBUG": "INFO"}),
    ("bash far.sh", f"{RUN} --nproc_per_node=4 train.py", {}),
    ("bash lost.sh", "bash lost.sh", {}),
    ("bash shifts.sh 4 cfg.yaml --lr 1", f"{RUN} --nproc_per_node=4 train.py --cfg cfg.yaml --lr 1", {}),
    ("bash slices.sh cfg.yaml 4 --lr 1", f"{RUN} --nproc_per_node=4 train.py --cfg cfg.yaml --lr 1", {}),
    ("torchrun --no_python --nproc-per-node 2 python train.py",
     f"{RUN} --no_python --nproc-per-node 2 python train.py", {}),
    ("mpirun -np 8 --map-by ppr:4:node --hostfile hosts python train.py", f"{RUN} --nproc-per-node 4 train.py", {}),
    ("deepspeed -i h1:0,1@h2:0,1 train.py", f"{RUN} --nproc-per-node 2 train.py", {"CUDA_VISIBLE_DEVICES": "0,1"}),
    ("mpirun -np 2 -npernode 1 torchrun --nproc-per-node 4 --nnodes 2 train.py", f"{RUN} --nproc-per-node 4 train.py",
     {}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "became", "env"), LINES, ids=[line for line, _, _ in LINES])
def test_a_line_for_one_machine(project: Path, line: str, became: str, env: dict[str, str]) -> None:
    """Options are replaced in their place, numbers of ranks are kept, and the settings of another launcher go to the
    environment."""
    draft = draft_of(shlex.split(line), project, {})
    assert " ".join(draft.command) == became
    assert {name: value for name, value in draft.env.items() if name[:5] != "TORCH"} == env
    assert draft.launcher == "local"


SLURM = [
    ("srun -N 2 --ntasks-per-node=1 --gpus-per-node=8 torchrun --nproc-per-node 8 train.py",
     2, f"{RUN} --nproc-per-node 8 train.py", 16),
    ('srun -p llm_s -n 8 -N 8 --ntasks-per-node=1 --gpus-per-task=8 -w "HOST-[1-8]" torchrun --nproc_per_node 8 '
     "--rdzv_backend c10d --rdzv_id 101 --rdzv_endpoint 10.1.1.1:29500 --local-ranks-filter 0 ./train.py --x y",
     8, f"{RUN} --nproc_per_node 8 --local-ranks-filter 0 ./train.py --x y", 64),
    ("srun --nodes=2 --ntasks-per-node=4 --gpus-per-task=1 python train.py", 2,
     f"{RUN} --nproc-per-node 4 train.py", 8),
    ("srun -l -N2 bash -c torchrun\\ --nproc-per-node\\ 4\\ --node-rank\\ $SLURM_NODEID\\ train.py",
     2, f"{RUN} --nproc-per-node 4 train.py", 8),
    ("salloc -N 2 --gres=gpu:8 srun torchrun --nproc-per-node=gpu train.py", 2,
     f"{RUN} --nproc-per-node 8 train.py", 16),
    ("srun -N 2 --gpus-per-node=4 torchrun train.py", 2, f"{RUN} train.py", 2),
]  # fmt: skip


@pytest.mark.parametrize(("line", "nodes", "became", "ranks"), SLURM, ids=[line for line, *_ in SLURM])
def test_a_line_with_srun(project: Path, line: str, nodes: int, became: str, ranks: int) -> None:
    """srun, its options and what torchaos sets for each node are left out; the number of nodes is kept."""
    draft = draft_of(shlex.split(line), project, {})
    assert (draft.launcher, draft.nodes, " ".join(draft.command), draft.ranks) == ("slurm", nodes, became, ranks)


HEAD = "#!/bin/bash\n#SBATCH --job-name=x\n#SBATCH --nodes={} # how many\n#SBATCH --ntasks-per-node={}\n"
SCRIPTS = {
    "pytorch's own multi-node example": (HEAD.format(4, 1) + """
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
head_node=${nodes[0]}
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
echo Node IP: $head_node_ip
export LOGLEVEL=INFO
srun torchrun \\
--nnodes 4 \\
--nproc_per_node 1 \\
--rdzv_id $RANDOM \\
--rdzv_backend c10d \\
--rdzv_endpoint $head_node_ip:29500 \\
train.py 50 10
""", 4, f"{RUN} --nproc_per_node 1 train.py 50 10", 4),
    "AWS' FSDP example: arrays of options": (HEAD.format(4, 1) + """
set -ex;
GPUS_PER_NODE=8 # 4 for G5.12x, 8 for P4/P5
declare -a TORCHRUN_ARGS=(
    --nproc_per_node=$GPUS_PER_NODE
    --nnodes=$SLURM_JOB_NUM_NODES
    --rdzv_id=$SLURM_JOB_ID   # the job
    --rdzv_backend=c10d
    --rdzv_endpoint=$(hostname)
)
export TRAIN_SCRIPT=./train.py
declare -a TRAINING_ARGS=(
    --max_context_width=8192
    --model_type=mistral
)
AUTO_RESUME=""
if [ -d "/opt/sagemaker_cluster" ]; then
    echo "Detected Hyperpod cluster"
    AUTO_RESUME="--auto-resume=1"
fi
srun ${AUTO_RESUME} -l torchrun "${TORCHRUN_ARGS[@]}" $TRAIN_SCRIPT "${TRAINING_ARGS[@]}"
""", 4, f"{RUN} --nproc_per_node=8 ./train.py --max_context_width=8192 --model_type=mistral", 32),
    "BigScience: LAUNCHER and CMD in bash -c": (HEAD.format(2, 1) + """#SBATCH --gres=gpu:8
module load cuda/12
source activate base
GPUS_PER_NODE=8
NNODES=$SLURM_NNODES
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
export CMD=" \\
    pretrain_gpt.py --micro-batch-size 2 \\
    "
export LAUNCHER="python -u -m torch.distributed.run \\
    --nproc_per_node $GPUS_PER_NODE \\
    --nnodes $NNODES \\
    --rdzv_endpoint $MASTER_ADDR:6000 \\
    --max_restarts 0 \\
    --tee 3 \\
    "
srun --jobid $SLURM_JOBID bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $CMD" 2>&1 | tee main.log
""", 2, "python -u -m torch.distributed.run --nproc_per_node 8 --max-restarts 3 --tee 3 pretrain_gpt.py "
     "--micro-batch-size 2", 16),
    "Hugging Face's accelerate example": (HEAD.format(4, 1) + """#SBATCH --gres=gpu:4
source activateEnvironment.sh
export GPUS_PER_NODE=4
head_node_ip=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
export LAUNCHER="accelerate launch \\
    --num_processes $((SLURM_NNODES * GPUS_PER_NODE)) \\
    --num_machines $SLURM_NNODES \\
    --rdzv_backend c10d \\
    --main_process_ip $head_node_ip \\
    --main_process_port 29500 \\
    "
export SCRIPT="train.py"
export SCRIPT_ARGS=" \\
    --mixed_precision fp16 \\
    "
export CMD="$LAUNCHER $SCRIPT $SCRIPT_ARGS"
srun $CMD
""", 4, f"{RUN} --nproc-per-node 4 train.py --mixed_precision fp16", 16),
    "Lightning: srun starts each rank": (HEAD.format(2, 8) + """#SBATCH --gres=gpu:8
#SBATCH --signal=SIGUSR1@90
export NCCL_DEBUG=INFO
srun python3 train.py --devices 8
""", 2, f"{RUN} --nproc-per-node 8 train.py --devices 8", 16),
    "one node without srun": ("""#!/bin/bash
#SBATCH -N 1 -p gpu -A acct
#SBATCH --gpus-per-node=4
cd $HOME/code && torchrun --standalone --nproc_per_node=$SLURM_GPUS_ON_NODE train.py > log 2>&1
""", 1, f"{RUN} --nproc_per_node=4 train.py", 4),
    "a script of a shell in the step": (HEAD.format(2, 1) + "srun --label bash inner.sh --lr 1\n",
     2, f"{RUN} --nproc-per-node 4 main.py --lr 1", 8),
    "a script of a shell without its program": (HEAD.format(2, 1) + "srun -l --ntasks-per-node=1 ./inner.sh --lr 1\n",
     2, f"{RUN} --nproc-per-node 4 main.py --lr 1", 8),
    "the shell's own quotes and $@": (HEAD.format(2, 1) + "srun sh -xeuc '\n  torchrun \\\n"
     "   --nnodes $SLURM_NNODES --node-rank $SLURM_NODEID --nproc-per-node 2 \\\n   main.py'\n", 2,
     f"{RUN} --nproc-per-node 2 main.py", 4),
    "preparation before the job": (HEAD.format(2, 1) + "python echo.py\nsrun torchrun --nproc-per-node 2 train.py\n", 2,
     f"{RUN} --nproc-per-node 2 train.py", 4),
    "litgpt as a module, four tasks on a node": ("""#!/bin/bash -l
#SBATCH --nodes=2
#SBATCH --gres=gpu:a100:4
#SBATCH --ntasks-per-node=4
conda activate env
srun python -m litgpt pretrain --devices 4
""", 2, f"{RUN} --nproc-per-node 4 -m litgpt pretrain --devices 4", 8),
    "GPUs of the whole job, and torchrun counts them": (
        "#SBATCH --nodes 2\n#SBATCH --gpus=8\nsrun torchrun --nproc_per_node=gpu --nnodes=$SLURM_JOB_NUM_NODES "
        "--rdzv_endpoint=$(scontrol show hostnames | head -n1):29500 train.py &\nwait\n",
        2, f"{RUN} --nproc-per-node 4 train.py", 8),
    "a function of the shell": ("#SBATCH -N 2\nrun() {\n  torchrun --nproc-per-node 4 --nnodes 2 train.py\n}\n"
     "export -f run\nsrun bash -c run\n", 2, f"{RUN} --nproc-per-node 4 train.py", 8),
    "GPUs of a type": (
     HEAD.format(2, 1) + "#SBATCH --gpus-per-node=a100:4\nsrun torchrun --nproc-per-node=auto train.py\n",
     2, f"{RUN} --nproc-per-node 4 train.py", 8),
    "a torchrun for each node, in a loop": (HEAD.format(2, 1) + """nodes=($(scontrol show hostnames))
for i in 0 1; do
  srun -N1 -n1 -w ${nodes[$i]} torchrun --nproc-per-node 4 --nnodes 2 --node-rank $i --master-addr $H train.py &
done
wait
""", 2, f"{RUN} --nproc-per-node 4 train.py", 8),
    "an array with comments between its lines": (HEAD.format(2, 1) + """ARGS=(
  --lr 3e-4   # the rate's peak
  --name 'a # b'
)
srun torchrun --nproc-per-node 4 train.py "${ARGS[@]}"
""", 2, f"{RUN} --nproc-per-node 4 train.py --lr 3e-4 --name a # b", 8),
    "a script that it writes itself": (HEAD.format(2, 1) + """cat <<'EOT' > run.sh
torchrun --nproc-per-node 4 --nnodes $SLURM_NNODES train.py
EOT
srun bash run.sh
""", 2, f"{RUN} --nproc-per-node 4 train.py", 8),
    "a here-document for the shell": (
     HEAD.format(2, 1) + "srun bash <<'EOF'\ntorchrun --nproc-per-node 4 train.py\nEOF\n",
     2, f"{RUN} --nproc-per-node 4 train.py", 8),
    "options behind the first command, which Slurm does not read": (
     HEAD.format(2, 1) + "echo hi\n#SBATCH --nodes=9\nsrun torchrun --nproc-per-node 4 train.py\n", 2,
     f"{RUN} --nproc-per-node 4 train.py", 8),
    "options that are comments": (
     "##SBATCH --nodes=9\n# SBATCH --nodes=8\n#SBATCH --nodes=2\nsrun torchrun --nproc-per-node 4 main.py\n",
     2, f"{RUN} --nproc-per-node 4 main.py", 8),
    "a variable before the command": (
     "#SBATCH -N 2\nsrun bash -c 'NCCL_DEBUG=INFO torchrun --nproc-per-node 2 train.py'\n", 2,
     f"{RUN} --nproc-per-node 2 train.py", 4),
    "a command in an option's value": (
     """#SBATCH -N 2
srun bash -c "torchrun --nnodes=2 --nproc_per_node=4 --rdzv_conf=is_host=\\$(((SLURM_NODEID)) && echo 0 || echo 1) \\
  --rdzv_endpoint='$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)':29500 train.py"
""", 2, f"{RUN} --nproc_per_node=4 train.py", 8),
}  # fmt: skip


def test_what_a_script_leaves_to_its_shell_is_said(project: Path) -> None:
    """A script whose line is only known to its shell stays the command, and the user hears which line counts."""
    assert any(
        "lost.sh starts the job in line 2, and only its shell knows $(mktemp" in text
        for text in draft_of(["bash", "lost.sh"], project, {}).to_check
    )
    assert Path(draft_of(["bash", "far.sh"], project, {}).cwd).resolve() == project.parent / "far"


def test_the_nodes_of_other_launchers_are_said(project: Path) -> None:
    """Ranks on several machines are not put together on one without a word."""
    for line in ("mpirun -np 8 --map-by ppr:4:node python train.py", "deepspeed -i h1:0,1@h2:0,1 train.py"):
        assert any("one of 2 nodes" in text for text in draft_of(line.split(), project, {}).to_check)


def test_a_script_that_submits_another(project: Path) -> None:
    """It is read through to the batch script: a run of the line itself would submit a job and see nothing of it."""
    (project / "x.sbatch").write_text("#SBATCH -N 2\nsrun torchrun --nproc-per-node 4 train.py\n")
    (project / "submit.sh").write_text("sbatch --nodes 4 x.sbatch\n")
    draft = draft_of(["bash", "submit.sh"], project, {})
    assert (draft.launcher, draft.nodes, draft.ranks) == ("slurm", 4, 16)


@pytest.mark.parametrize("value", ['{"a": {"b": 1}}', "run=${now:%Y}", "{{jinja}}", "}{", "{run}/out", "{lr}"])
def test_braces_reach_the_job_as_they_were_typed(project: Path, value: str) -> None:
    """A value in JSON or for a configuration is no placeholder: the scenario file doubles its braces, so that the job
    gets them as typed. Only torchaos' own placeholders keep their meaning."""
    draft = draft_of(["torchrun", "--nproc-per-node", "2", "train.py", "--x", value], project, {"A": "b"})
    command = yaml.safe_load(scenario_text("s", draft, 5, 60.0))["job"]["command"]
    words = shlex.split(command) if isinstance(command, str) else command
    assert not unknown_placeholders(words[-1])
    assert fill(words[-1], {"run": "/r"}) == value.replace("{run}", "/r")
    assert not any("no shell fills in" in text for text in draft.to_check)


def test_a_line_without_a_script_is_said(project: Path) -> None:
    """A draft that starts nothing is not left for the first run to find; a module is no lack of a script."""
    said = "no script was found behind torchrun's options; write it into the command"
    assert said in draft_of(shlex.split("torchrun --nproc-per-node 2"), project, {}).to_check
    assert said not in draft_of(shlex.split("torchrun --nproc-per-node 2 -m pkg.train"), project, {}).to_check


@pytest.mark.parametrize(("text", "nodes", "became", "ranks"), SCRIPTS.values(), ids=SCRIPTS)
def test_a_batch_script(project: Path, text: str, nodes: int, became: str, ranks: int) -> None:
    """Its #SBATCH lines give the nodes, and its line with the launcher, with variables filled in, becomes the command
    of one node."""
    (project / "x.sbatch").write_text(text)
    (project / "inner.sh").write_text('exec torchrun --nproc-per-node 4 --rdzv-endpoint $H:1 main.py "$@"\n')
    draft = draft_of(["sbatch", "x.sbatch"], project, {"HOME": "/home/me"})
    assert (draft.launcher, draft.nodes, " ".join(draft.command), draft.ranks) == ("slurm", nodes, became, ranks)


@pytest.mark.parametrize(
    ("line", "script", "why"),
    [
        ("sbatch x.sbatch", "#SBATCH -N 2\nsrun --container-image=nemo.sqsh --container-mounts=/a:/b torchrun a.py\n",
         "srun --container-image=nemo.sqsh: the container has no torchaos; start torchaos inside"),
        ("sbatch x.sbatch", "#SBATCH --container-image nvcr.io/x\nsrun torchrun a.py\n",
         "--container-image=nvcr.io/x: the job's"),
        ("sbatch x.sbatch",
         "ARGS=(--container-image $PWD/p.sqsh\n --container-mounts /a)\nsrun -l \"${ARGS[@]}\" torchrun a.py\n",
         "srun --container-image=.*p.sqsh: the container has no torchaos"),
        ("sbatch x.sbatch", "srun apptainer exec --nv a.sif torchrun a.py\n",
         "apptainer: the ranks would be in a container"),
        ("sbatch x.sbatch", "#SBATCH --array=0-3\nsrun torchrun a.py\n", "--array=0-3: each task of a job array"),
        ("sbatch x.sbatch", "#SBATCH -N 2\nmake all\n", "x.sbatch: no line of it starts torchrun, srun or a script"),
        ("sbatch x.sbatch", "#SBATCH -N 4 --ntasks-per-node=8\nsrun with_env.sh python train.py ${@}\n",
         "with_env.sh python train.py: it shows no torchrun"),
        ("sbatch none.sbatch", "", "none.sbatch: it can't be read: No such file"),
        ("singularity run --nv a.sif python train.py", "", "singularity: the ranks would be in a container"),
        ("docker run --gpus all img torchrun train.py", "", "docker: the ranks would be in a container"),
        ("accelerate config", "", "it starts no job; write accelerate launch"),
        ("kubectl apply -f job.yaml", "", "kubectl: write launcher: kubernetes"),
        ("bsub -n 4 torchrun train.py", "", "bsub: it starts the job on another machine"),
        ("ray job submit -- python train.py", "", "ray: it starts the job on another machine"),
        ("ssh node1 torchrun train.py", "", "ssh: write launcher: ssh"),
        ("jsrun -n 4 python train.py", "", "jsrun: it starts the job on another machine"),
        ("tmux new -d torchrun train.py", "", "tmux: it starts the job in the background"),
        ("horovodrun -np 4 python train.py", "", "torchaos needs torchrun"),
        ("srun --het-group=0,1 torchrun train.py", "", "heterogeneous"),
        ("sbatch x.sbatch", "#SBATCH hetjob\nsrun python a.py : --het-group=1 torchrun b.py\n", "heterogeneous"),
    ],
)  # fmt: skip
def test_what_init_can_not_draft(project: Path, line: str, script: str, why: str) -> None:
    """It says precisely what it can't do, and what to do instead."""
    (project / "x.sbatch").write_text(script)
    with pytest.raises(UsageError, match=why):
        draft_of(line.split(), project, {"PWD": "/work"})


def test_the_settings_of_accelerate_config(project: Path) -> None:
    """Without a file in the line, accelerate reads the one that `accelerate config` wrote."""
    (project / "accelerate").mkdir()
    (project / "accelerate" / "default_config.yaml").write_text("num_processes: 4\nmixed_precision: bf16\n")
    draft = draft_of(["accelerate", "launch", "train.py"], project, {"HF_HOME": str(project)})
    assert " ".join(draft.command) == f"{RUN} --nproc-per-node 4 train.py"
    assert draft.env["ACCELERATE_MIXED_PRECISION"] == "bf16"
