"""Hugging Face's Trainer on a GPT-2 made from a config, with dropout; goes on from its last checkpoint."""

import argparse
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator
from transformers.trainer_utils import get_last_checkpoint


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, 128, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    shape = {"vocab_size": 128, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    arguments = TrainingArguments(
        args.dir, max_steps=24, per_device_train_batch_size=4, save_steps=5, save_total_limit=3, logging_steps=1,
        use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True, seed=args.seed,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Text(), data_collator=default_data_collator)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.dir) if os.path.isdir(args.dir) else None)


if __name__ == "__main__":
    main()
