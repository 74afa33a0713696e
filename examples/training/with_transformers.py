"""Hugging Face Trainer: one line after the trainer is made. `per_device_train_batch_size` stays the full batch."""

import common
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from carpool.train.transformers import CarpoolTrainerCallback

args = common.options(
    __doc__,
    small={"batch_size": 8, "length": 16, "layers": 1, "width": 32},
    full={"batch_size": 16, "length": 512, "layers": 12, "width": 768},
)
torch.manual_seed(0)
config = GPT2Config(
    n_layer=args.layers, n_embd=args.width, n_head=args.width // 16 if args.width < 768 else 12, n_positions=args.length
)


def sentence():
    """Of every sentence, another part counts."""
    tokens = torch.randint(0, config.vocab_size, (args.length,))
    counted = torch.arange(args.length) < torch.randint(2, args.length, ())
    return {"input_ids": tokens, "labels": torch.where(counted, tokens, -100)}


settings = TrainingArguments(
    output_dir=args.checkpoints or "out/with_transformers",
    per_device_train_batch_size=args.batch_size,
    max_steps=args.iterations,
    learning_rate=3e-4,
    use_cpu=args.device == "cpu",
    bf16=args.device == "cuda",
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
trainer = Trainer(GPT2LMHeadModel(config), settings, train_dataset=[sentence() for _ in range(4 * args.batch_size)])
carpool = CarpoolTrainerCallback(trainer, accumulation=args.accumulation)
result = trainer.train(resume_from_checkpoint=carpool.resume)
print(
    f"{result.global_step} iterations with accumulation {carpool.accumulation.count}, loss {result.training_loss:.4f}"
)
