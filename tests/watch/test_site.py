"""Unmodified scripts in processes of their own: they are counted, and nothing about them changes."""

import os
import subprocess
import sys
import textwrap

import pytest

from carpool import channel
from carpool.watch import INJECTED

TRAIN = """
import torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(model.weight.sum().item().hex(), flush=True)
"""


class Script:
    """A script that runs in a folder of its own, watched."""

    def __init__(self, folder):
        self.folder = folder
        self.worker = folder / "worker"
        self.worker.mkdir()

    def run(self, text, *flags, before="", watched=True, path=(), **variables):
        file = self.folder / "script.py"
        file.write_text(before + textwrap.dedent(text))
        places = [str(INJECTED)] * watched + [str(place) for place in path]
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("CARPOOL", "PYTHON"))},
            "CARPOOL_WORKER_DIR": str(self.worker),
            "CARPOOL_ATTEMPT": "1",
            "PYTHONPATH": os.pathsep.join(places),
            **variables,
        }
        done = subprocess.run(
            [sys.executable, *flags, str(file)], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done

    @property
    def report(self):
        return channel.read_report(self.worker)


@pytest.fixture
def script(tmp_path):
    return Script(tmp_path)


class TestStart:
    """Without PyTorch, so that they are quick."""

    def test_nothing_is_printed_and_nothing_changes(self, script):
        text = (
            "import sys; print(sys.path, sorted(set(sys.modules) - {'sitecustomize'}), 'sitecustomize' in sys.modules)"
        )
        plain, watched = script.run(text, watched=False), script.run(text)
        assert (watched.stdout.replace("True", "False"), watched.stderr) == (plain.stdout, "")
        assert script.report is None

    def test_a_hidden_sitecustomize_runs(self, script, tmp_path):
        own = tmp_path / "own"
        own.mkdir()
        (own / "sitecustomize.py").write_text("import sys; sys.seen = __file__; VALUE = 7")
        text = "import sys, sitecustomize; print(sys.seen, sitecustomize.VALUE)"
        assert script.run(text, path=[own]).stdout == f"{own / 'sitecustomize.py'} 7\n"

    @pytest.mark.parametrize("body", ["raise RuntimeError('boom')", "import missing_module"])
    def test_a_hidden_sitecustomize_that_fails_does_so_as_without_carpool(self, script, tmp_path, body):
        own = tmp_path / "own"
        own.mkdir()
        (own / "sitecustomize.py").write_text(body)
        plain = script.run("print('ran')", path=[own], watched=False)
        watched = script.run("print('ran')", path=[own])
        assert (watched.stdout, watched.stderr) == (plain.stdout, plain.stderr)

    @pytest.mark.parametrize("flag", ["-I", "-S", "-E"])
    def test_an_isolated_interpreter_is_left_alone(self, script, flag):
        assert script.run("print('ran')", flag).stdout == "ran\n"

    def test_a_torch_of_another_kind_is_left_alone(self, script, tmp_path):
        """A module of that name without the hook, and one that fails to import."""
        folder = tmp_path / "fake" / "torch" / "optim"
        folder.mkdir(parents=True)
        for file in (folder / "__init__.py", folder.parent / "__init__.py"):
            file.write_text("")
        (folder / "optimizer.py").write_text("VALUE = 1")
        (folder / "broken.py").write_text("raise ImportError('no')")
        done = script.run("import torch.optim.optimizer as o; print(o.VALUE)", path=[tmp_path / "fake"])
        assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.slow
class TestTorch:
    def test_loops_children_threads_and_compiled_steps(self, script):
        """The script's own loop trains as without Carpool and is counted. Forked and spawned children that train, an
        optimizer in a thread, a compiled step and one that raises change nothing. One start, because importing PyTorch
        is what takes the time."""
        plain = script.run(TRAIN, watched=False)
        done = script.run(
            """
            import multiprocessing, threading

            def train(steps, compiled=False):
                model = torch.nn.Linear(4, 4)
                optimizer = torch.optim.AdamW(model.parameters())
                step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
                for _ in range(steps):
                    model(torch.randn(2, 4)).sum().backward()
                    step()

            if __name__ == "__main__":
                for kind in ("fork", "spawn"):
                    child = multiprocessing.get_context(kind).Process(target=train, args=(7,))
                    child.start()
                    child.join()
                    assert child.exitcode == 0
                thread = threading.Thread(target=train, args=(5,))
                thread.start()
                thread.join()
                train(3, compiled=True)
                try:
                    optimizer.step(lambda: 1 / 0)
                except ZeroDivisionError:
                    print("as without")
                for _ in range(10):
                    optimizer.step()
            """,
            before=TRAIN,
        )
        assert (done.stdout, plain.stderr) == (f"{plain.stdout}as without\n", "")
        assert all("torch/" in line for line in done.stderr.splitlines()), "only PyTorch's compiler may say something"
        assert (script.report.iteration, script.report.watched, script.report.total) == (40, True, 0)


@pytest.mark.slow
class TestFrameworks:
    def test_transformers_tell_the_total_and_accumulate_gradients(self, script):
        pytest.importorskip("transformers")
        script.run(
            """
            import torch
            from transformers import Trainer, TrainingArguments

            class Model(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.layer = torch.nn.Linear(4, 1)
                def forward(self, x, labels):
                    out = self.layer(x)
                    return {"loss": ((out - labels) ** 2).mean(), "logits": out}

            data = [{"x": torch.randn(4), "labels": torch.zeros(1)} for _ in range(48)]
            arguments = TrainingArguments("out", per_device_train_batch_size=2, gradient_accumulation_steps=3,
                num_train_epochs=2, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True)
            Trainer(Model(), arguments, train_dataset=data).train()
            """,
            HOME=str(script.folder),
        )
        assert (script.report.iteration, script.report.total) == (16, 16)

    def test_lightning_tells_the_total(self, script):
        pytest.importorskip("lightning")
        script.run(
            """
            import torch, lightning

            class Module(lightning.LightningModule):
                def __init__(self):
                    super().__init__()
                    self.layer = torch.nn.Linear(4, 1)
                def training_step(self, batch, index):
                    return self.layer(batch).square().mean()
                def configure_optimizers(self):
                    return torch.optim.SGD(self.parameters(), lr=0.1)

            loader = torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=2)
            lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False).fit(Module(), loader)
            """,
            HOME=str(script.folder),
        )
        assert (script.report.iteration, script.report.total) == (24, 24)
