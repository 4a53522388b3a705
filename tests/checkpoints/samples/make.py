"""How the samples beside this file were made: two ranks on gloo, without a GPU, by the trainers' own code.

megatron: megatron-core 0.16.1, `dist_checkpointing.save` of a GPTModel with tensor parallelism of 2 (torch_dist). The
names `iter_0000020` and `latest_checkpointed_iteration.txt` are those of megatron/training/checkpointing.py, which is
not in that package. torchtitan: torchtitan 0.3.0, its CheckpointManager and OptimizersContainer, a model under FSDP2.

    pip install --no-deps megatron-core==0.16.1 torchtitan==0.3.0 torchdata spmd_types; pip install tyro
    for r in 0 1; do python make.py megatron /empty/folder $r 2 & done; wait
"""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist


class Counts:
    """Stands for a data loader and a schedule: any state of a few numbers."""

    def __init__(self, **values):
        self.values = values

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state):
        self.values.update(state)


def megatron(root):
    torch.cuda.synchronize, torch.cuda.current_device = (lambda *_: None), (lambda: "cpu")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True, tensor_model_parallel_size=2
    )
    model = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8,
        share_embeddings_and_output_weights=True, position_embedding_type="learned_absolute",
    )  # fmt: skip
    folder = root / "iter_0000020"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (root / "latest_checkpointed_iteration.txt").write_text("20")
    dist.barrier()
    state = {"model": model.sharded_state_dict(), "iteration": 20, "checkpoint_version": 3.0}
    dist_checkpointing.save(state, str(folder))


def torchtitan(root):
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="foreach").build(model_parts=[model])
    manager = CheckpointManager.Config(enable=True, interval=10, folder=root.name).build(
        dataloader=Counts(samples=40), model_parts=[model], optimizers=optimizers, lr_schedulers=Counts(last_epoch=20),
        states={"train_state": Counts(step=torch.tensor(20))}, sd_adapter=None, base_folder=str(root.parent),
    )  # fmt: skip
    model(torch.ones(2, 8)).sum().backward()
    optimizers.step()
    manager.save(20)
    manager.close()


def main():
    warnings.simplefilter("ignore")
    name, root, rank, world = sys.argv[1], Path(sys.argv[2]).absolute(), int(sys.argv[3]), int(sys.argv[4])
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{root}.rdzv", rank=rank, world_size=world)
    torch.manual_seed(7)
    {"megatron": megatron, "torchtitan": torchtitan}[name](root)


if __name__ == "__main__":
    main()
