"""Train a small BERT with the Trainer of Hugging Face, on random text."""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--depth", type=int, default=4)
options = parser.parse_args()


class RandomText(Dataset):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(8000, (128,)), "labels": torch.tensor(index % 2)}


class Told(TrainerCallback):
    def on_step_end(self, args: object, state: object, control: object, **rest: object) -> None:
        if state.global_step % 20 == 0:
            print(f"step {state.global_step}", flush=True)


config = BertConfig(
    vocab_size=8000, hidden_size=options.width, num_hidden_layers=options.depth,
    num_attention_heads=max(1, options.width // 64), intermediate_size=4 * options.width, max_position_embeddings=128,
)  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=options.steps, per_device_train_batch_size=options.batch, save_strategy="no",
        report_to="none", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    Trainer(BertForSequenceClassification(config), arguments, train_dataset=RandomText(), callbacks=[Told()]).train()
