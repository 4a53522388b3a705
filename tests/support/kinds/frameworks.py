"""Folders as training frameworks write them, as rows."""

from __future__ import annotations

import torch

from kinds.writers import (
    ACCELERATE,
    AXES,
    BAD,
    BLIND,
    CONFIG,
    DEEPSPEED,
    DEEPSPEED_3,
    EXPERTS,
    HF_BIN,
    HUGGINGFACE,
    INCOMPLETE,
    INDEXED,
    LEVELDB,
    MEGATRON_RANKS,
    MSGPACK,
    NANOTRON,
    OF_TWO,
    ORBAX,
    RNG,
    SCHEDULER,
    TENSORFLOW,
    UNKNOWN,
    UNTOLD,
    VERL,
    WHOLE,
    Row,
    at,
    cut,
    dcp,
    emptied,
    flip,
    iteration,
    model,
    nemo,
    olmo,
    plain,
    raw,
    saved,
    tensors,
    text,
    training,
    tree,
    without,
    without_folder,
)

FRAMEWORKS = [
    Row(
        "DCP",
        "step-10",
        dcp,
        WHOLE,
        {
            "no .metadata": (without(".metadata"), BAD),
            "no shard": (without("__0_0.distcp"), BAD),
            "a cut shard": (at("__0_0.distcp", cut), BAD),
            "one bit": (at("__0_0.distcp", flip), BAD),
            "a cut .metadata": (at(".metadata", cut), BAD),
        },
    ),
    Row("a part of DCP, given alone", "step-10/__0_0.distcp", lambda path: dcp(path.parent), UNKNOWN, BLIND),
    Row("its metadata, given alone", "step-10/.metadata", lambda path: dcp(path.parent), UNKNOWN, BLIND),
    Row(
        "HF Trainer",
        "checkpoint-10",
        tree(HUGGINGFACE),
        UNTOLD,
        {
            "no model": (without("model.safetensors"), (UNTOLD, *BAD)),
            "no trainer_state": (without("trainer_state.json"), BAD),
            "a cut model": (at("model.safetensors", cut), BAD),
            "a cut optimizer": (at("optimizer.pt", cut), BAD),
            "an optimizer that is garbage": (at("optimizer.pt", raw(bytes(range(1, 99)))), BAD),
            "no rng of rank 0": (without("rng_state_0.pth"), BAD),
            "a cut state": (at("trainer_state.json", cut), BAD),
        },
    ),
    Row(
        "HF Trainer, torch.save",
        "checkpoint-10",
        tree(HF_BIN),
        WHOLE,
        {"no model": (without("pytorch_model.bin"), (UNTOLD, *BAD)), "one bit": (at("pytorch_model.bin", flip), BAD)},
    ),
    Row(
        "torchtune: shards without an index",
        "epoch_0",
        tree({key: put for key, put in INDEXED.items() if "index" not in key}),
        UNTOLD,
        {"a shard is missing": (without("model-00001-of-00002.safetensors"), (UNTOLD, *BAD))},
    ),
    Row(
        "torchtune: the state of its recipe",
        "out",
        tree(
            {
                "recipe_state/recipe_state.pt": saved(lambda: {"optimizer": training()["optimizer"], "epochs_run": 1}),
                "epoch_0/hf_model_0001_0.pt": saved(model),
            }
        ),
        UNTOLD,
        {"one is missing": (without("epoch_0/hf_model_0001_0.pt"), (UNTOLD, WHOLE))},
    ),
    Row(
        "Accelerate",
        "checkpoint_0",
        tree(ACCELERATE),
        WHOLE,
        {
            "no states of rank 0": (without("random_states_0.pkl"), BAD),
            "a cut model": (at("pytorch_model.bin", cut), BAD),
            "no states: it was killed": (without("random_states_0.pkl", "random_states_1.pkl"), (UNTOLD, *BAD)),
            "no model": (without("pytorch_model.bin"), (UNTOLD, *BAD)),
        },
    ),
    Row(
        "Accelerate: the model in the folder of DeepSpeed, and a state of somebody's own",
        "checkpoint_0",
        tree(
            {
                **{f"pytorch_model/{name}": put for name, put in DEEPSPEED.items() if name != "latest"},
                "random_states_0.pkl": RNG,
                "custom_checkpoint_0.pkl": saved({"average": torch.ones(9)}),
            }
        ),
        WHOLE,
        {"no model": (without_folder("pytorch_model"), (UNTOLD, *BAD))},
    ),
    Row(
        "DeepSpeed",
        "out",
        tree(DEEPSPEED),
        WHOLE,
        {
            "no model": (without("global_step10/mp_rank_00_model_states.pt"), BAD),
            "a rank is missing": (without("global_step10/zero_pp_rank_1_mp_rank_00_optim_states.pt"), BAD),
            "its tracker names another": (at("latest", text("global_step20")), BAD),
            "an empty tracker": (at("latest", emptied), BAD),
        },
    ),
    Row(
        "DeepSpeed: a mixture of experts",
        "out",
        tree(EXPERTS),
        WHOLE,
        {
            what: (without(f"global_step10/{name}_mp_rank_00_{part}_states.pt"), BAD)
            for what, name, part in (
                ("an expert is missing", "layer_0_expert_1", "model"),
                ("the first is missing", "layer_1_expert_0", "model"),
                ("the last is missing", "layer_0_expert_2", "model"),
                ("no optimizer of the experts", "expp_rank_0", "optim"),
            )
        }
        | {"no other part of the model": (without("global_step10/mp_rank_00_model_states.pt"), BAD)},
    ),
    Row(
        "DeepSpeed, stage 3: a model for each rank",
        "out",
        tree(DEEPSPEED_3),
        WHOLE,
        {
            "a rank has no model": (without("global_step10/zero_pp_rank_1_mp_rank_00_model_states.pt"), BAD),
            "a rank has no optimizer": (without("global_step10/zero_pp_rank_0_mp_rank_00_optim_states.pt"), BAD),
            "the last rank is missing": (
                without(*(f"global_step10/zero_pp_rank_1_mp_rank_00_{part}_states.pt" for part in ("model", "optim"))),
                BAD,
            ),
        },
    ),
    Row(
        "Megatron, torch_dist",
        "out",
        iteration(),
        WHOLE,
        {
            "no common.pt": (without("iter_0000010/common.pt"), BAD),
            "no .metadata": (without("iter_0000010/.metadata"), BAD),
            "no shard": (without("iter_0000010/__0_0.distcp"), BAD),
        },
    ),
    Row("Megatron, interrupted: common.pt only", "out", iteration("common.pt"), INCOMPLETE),
    Row("Megatron, interrupted: metadata.json only", "out", iteration("metadata.json"), INCOMPLETE),
    Row("Megatron, interrupted: shards only", "out", iteration("__0_0.distcp"), INCOMPLETE),
    Row(
        "Megatron, zarr",
        "iter_0000010",
        tree({"common.pt": SCHEDULER, "metadata.json": text('{"sharded_backend": "zarr"}'), "w/.zarray": text("{}")}),
        UNKNOWN,
    ),
    Row(
        "Megatron, a folder for each rank",
        "out",
        tree(MEGATRON_RANKS),
        WHOLE,
        {
            "a rank has no weights": (without("iter_0000010/mp_rank_01/model_optim_rng.pt"), BAD),
            "a rank has no optimizer": (without("iter_0000010/mp_rank_00/distrib_optim.pt"), BAD),
            "its tracker names another": (at("latest_checkpointed_iteration.txt", text("20")), BAD),
        },
    ),
    Row(
        "Megatron, without the arguments of the job: no file says how many ranks there were",
        "out",
        tree({f"iter_0000010/mp_rank_{rank:02}/model_optim_rng.pt": saved(training) for rank in (0, 1)}),
        UNTOLD,
        {"a rank before another": (without_folder("iter_0000010/mp_rank_00"), BAD)},
    ),
    Row(
        "Megatron of 2022",
        "iter_0000010",
        tree({f"mp_rank_{rank:02}/{name}.pt": OF_TWO for rank in (0, 1) for name in ("model_rng", "optim")}),
        WHOLE,
        {"a rank has no optimizer": (without("mp_rank_01/optim.pt"), BAD)},
    ),
    Row(
        "Megatron-DeepSpeed: both trackers",
        "out",
        tree({**DEEPSPEED, "latest_checkpointed_iteration.txt": text("10")}),
        WHOLE,
    ),
    Row(
        "verl",
        "out",
        tree(VERL),
        WHOLE,
        {
            "a rank is missing": (without("global_step_10/actor/model_world_size_2_rank_1.pt"), BAD),
            "a cut file": (at("global_step_10/actor/optim_world_size_2_rank_0.pt", cut), BAD),
            "its tracker names another": (at("latest_checkpointed_iteration.txt", text("20")), BAD),
        },
    ),
    Row(
        "nanotron",
        "out",
        tree(NANOTRON),
        UNTOLD,
        {
            "a shard is missing": (without("10/model/qkv/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors"), BAD),
            "the optimizer of a rank is missing": (without(f"10/optimizer/optimizer_{AXES.format(0)}.pt"), BAD),
            "its metadata, written last, is missing": (without("10/checkpoint_metadata.json"), BAD),
            "its tracker names another": (at("latest.txt", text("20")), BAD),
        },
    ),
    Row("Orbax", "out", tree(ORBAX), UNKNOWN, {"a file is missing": (without("10/default/d/4f1c"), (UNKNOWN,))}),
    Row("Orbax, its step", "out/10", lambda path: tree(ORBAX)(path.parent), UNKNOWN),
    Row(
        "TensorFlow",
        "out",
        tree(TENSORFLOW),
        UNKNOWN,
        {"no tensors": (without("model.ckpt-10.data-00000-of-00001"), (UNKNOWN,))},
    ),
    Row(
        "Lightning with DeepSpeed: a folder that ends in .ckpt",
        "epoch=1-step=10.ckpt",
        tree({"latest": text("global_step10"), **DEEPSPEED}),
        WHOLE,
        {"a rank is missing": (without("global_step10/zero_pp_rank_1_mp_rank_00_optim_states.pt"), BAD)},
    ),
    Row("Composer: the file of one rank", "out", tree({"ep0-ba10-rank0.pt": saved(training)}), UNTOLD),
    Row(
        "LLaMA's own files",
        "llama",
        tree({"consolidated.00.pth": saved(model), "consolidated.01.pth": saved(model), "params.json": CONFIG}),
        UNTOLD,
        {"one is cut": (at("consolidated.01.pth", cut), BAD)},
    ),
    Row(
        "Detectron2",
        "out",
        tree(
            {
                "model_0004999.pth": saved(training),
                "model_final.pth": saved(training),
                "last_checkpoint": text("model_final.pth"),
            }
        ),
        WHOLE,
    ),
    Row(
        "an adapter that HF Trainer saved",
        "checkpoint-10",
        tree(
            {
                **{name: put for name, put in HUGGINGFACE.items() if name != "model.safetensors"},
                "adapter_model.safetensors": tensors(),
            }
        ),
        UNTOLD,
    ),
    Row(
        "a SavedModel of TensorFlow",
        "out",
        tree({"saved_model.pb": raw(b"\x08\x01\x12\xfa\x01" + bytes(90)), "variables/variables.index": raw(LEVELDB)}),
        UNKNOWN,
    ),
    Row(
        "Flax: files without an extension",
        "out",
        tree({"checkpoint_10": raw(MSGPACK), "checkpoint_20": raw(MSGPACK)}),
        UNKNOWN,
    ),
    Row(
        "NeMo 2: Megatron's files in a folder of their own",
        "model-step=9",
        nemo,
        WHOLE,
        {
            "no .metadata: it was killed": (without("weights/.metadata"), BAD),
            "common.pt only": (
                without("weights/.metadata", "weights/metadata.json", "weights/__0_0.distcp"),
                (UNTOLD, *BAD),
            ),
        },
    ),
    Row(
        "Megatron, with pipelines",
        "iter_0000010",
        tree({f"mp_rank_{t:02}_{p:03}/model_optim_rng.pt": OF_TWO for t in (0, 1) for p in (0, 1)}),
        WHOLE,
        {
            "a rank has no weights": (without("mp_rank_01_001/model_optim_rng.pt"), BAD),
            "a rank is missing": (without_folder("mp_rank_01_001"), BAD),
        },
    ),
    Row(
        "OLMo: DCP, and a file for each rank",
        "step1000",
        olmo,
        UNTOLD,
        {
            "a rank is missing": (without("train/rank1.pt"), (UNTOLD,)),
            "no shard": (without("model_and_optim/__0_0.distcp"), BAD),
        },
    ),
    Row(
        "Ray Train: one file of a loop of one's own",
        "checkpoint_000009",
        tree({"model.pt": saved(training), ".metadata.json": text("{}")}),
        WHOLE,
        {"cut": (at("model.pt", cut), BAD)},
    ),
    Row(
        "RLlib: plain pickles",
        "checkpoint_000001",
        tree({"algorithm_state.pkl": plain({"a": 1}), "rllib_checkpoint.json": text('{"type": "Algorithm"}')}),
        UNKNOWN,
    ),
    Row(
        "Colossal-AI: an index of the optimizer's parts, each with several tensors",
        "epoch0-step10",
        tree(
            {
                "modeling/model.safetensors": tensors(),
                "optimizer/pytorch_optim-00001.bin": saved(lambda: {0: {"exp_avg": torch.ones(9)}}),
                "optimizer/pytorch_optim.bin.index.json": text('{"weight_map": {"0": "pytorch_optim-00001.bin"}}'),
            }
        ),
        UNTOLD,
        {
            "a part is missing": (without("optimizer/pytorch_optim-00001.bin"), BAD),
            "a part lacks its tensors": (at("optimizer/pytorch_optim-00001.bin", saved({1: 2})), BAD),
        },
    ),
]
