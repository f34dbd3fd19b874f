"""A script for torchrun: the Trainer of transformers on two steps of a tiny GPT-2."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + 12) % 32
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    arguments = TrainingArguments(
        output_dir="trained",
        max_steps=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        ddp_backend="gloo",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Tokens())
    result = trainer.train()
    world, wrapped = arguments.world_size, type(trainer.model_wrapped).__name__
    print(f"rank {arguments.process_index} of {world}: {result.global_step} steps, {wrapped}")


if __name__ == "__main__":
    main()
