"""The same tiny trainings in Lightning, Accelerate and the Hugging Face Trainer, with and without Carpool."""

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.support.training_models import mlp, vector_loss, vectors, weights

SAMPLES = 22  # batches of 8, 8 and 6: the last one is partial


def loader(**options):
    return DataLoader(TensorDataset(*vectors(SAMPLES)), batch_size=8, **options)


# Lightning


def lightning_parts():
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()
            self.sizes = []
            self.losses = []
            self.limit = 99

        def training_step(self, batch, batch_idx):
            self.sizes.append(len(batch[0]))
            loss = vector_loss(self.net)(batch)
            if len(batch[0]) > self.limit:
                raise torch.OutOfMemoryError("injected")
            self.log("loss", loss)
            return {"loss": loss, "size": len(batch[0])}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.losses.append(float(outputs["loss"]))

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return pl, Module


def lightning_fit(directory, callbacks=(), limit=99, resume=None, data=None, **options):
    pl, module = lightning_parts()
    model = module()
    model.limit = limit
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "gradient_clip_val": 0.5,
        "default_root_dir": directory,
    }
    trainer = pl.Trainer(callbacks=list(callbacks), **{**settings, **options})
    trainer.fit(model, loader() if data is None else data, ckpt_path=resume)
    return model, trainer


# Hugging Face Trainer


class Sentences(Dataset):
    """Token sequences of which a different part counts, so that means per token and per sample differ."""

    def __init__(self, classes=False):
        g = torch.Generator().manual_seed(1)
        self.items = []
        for _ in range(SAMPLES):
            ids = torch.randint(0, 17, (10,), generator=g)
            labels = ids.clone()
            labels[int(torch.randint(2, 10, (1,), generator=g)) :] = -100
            self.items.append({"input_ids": ids, "labels": ids[0] % 3 if classes else labels})

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.items[index]


def language_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    marks = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, **marks)).double()


def classifier():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"intermediate_size": 16, "max_position_embeddings": 16, "num_labels": 3}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes, **more, **off)).double()


def hf_trainer(directory, model, data, **options):
    from transformers import Trainer, TrainingArguments

    settings = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return Trainer(model, TrainingArguments(**{**settings, **options}), train_dataset=data)


# Accelerate


def accelerated(directory, accumulation, **options):
    from accelerate import Accelerator

    from carpool.train.accelerate import AcceleratedTraining

    accelerator = Accelerator(cpu=True)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, loader(), schedule)
    settings = {"schedule": schedule, "clip_norm": 0.5, "checkpoints": directory, **options}
    training = AcceleratedTraining(accelerator, model, optimizer, accumulation=accumulation, **settings)
    for batch in training.batches(data, epochs=2):
        training.step(batch, vector_loss(model))
    return weights(model), training, schedule


def accelerate_alone():
    """The loop of Accelerate's own documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, loader(), schedule)
    for _ in range(2):
        for batch in data:
            optimizer.zero_grad()
            accelerator.backward(vector_loss(model)(batch))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
    return weights(model), schedule
