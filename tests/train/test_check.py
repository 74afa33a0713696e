"""`check`: certifies, warns or refuses by name, measures, and leaves everything as it was."""

import json
import random
import subprocess
import sys
import textwrap

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional

from carpool.channel import Shrinking
from carpool.commands.check import check as command
from carpool.train import Verdict, check, examine
from tests.support.training_models import mlp, sentences, token_loss, tokens, transformer, vector_loss, vectors, weights

pytestmark = pytest.mark.slow


def judge(model, loss=None, batch=None, **options):
    batch = vectors(8, torch.float32) if batch is None else batch
    return check(model, loss or vector_loss(model), batch, **options)


def words(verdict, level):
    return [str(finding) for finding in verdict.findings if finding.level == level]


@pytest.mark.slow
def test_a_clean_model_is_certified_and_measured():
    verdict = judge(mlp(torch.float32))
    assert verdict.shrinking == Shrinking.CERTIFIED
    assert verdict.can_shrink
    assert verdict.findings == ()
    assert verdict.measurement.difference < 1e-13
    assert (verdict.measurement.accumulation, verdict.measurement.steps) == (4, 5)
    assert "differ by at most" in str(verdict)


def test_batch_norm_is_refused_by_name_and_shown_to_differ():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.stem(x))

    verdict = judge(Net())
    assert verdict.shrinking == Shrinking.REFUSED
    assert not verdict.can_shrink
    assert words(verdict, "refuse")[0].startswith("stem.1 (BatchNorm1d): ")
    assert verdict.measurement.difference > 1e-5
    assert "stem.1 (BatchNorm1d)" in verdict.sentence


def test_frozen_batch_norm_may_be_split():
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    model[1].eval()
    verdict = judge(model)
    assert verdict.shrinking == Shrinking.CERTIFIED
    assert words(verdict, "note")


def test_batch_norm_as_a_function_is_found_in_its_module():
    class Sneaky(nn.Module):
        def forward(self, x):
            return functional.batch_norm(x, None, None, training=True)

    verdict = judge(nn.Sequential(nn.Linear(6, 3), Sneaky()))
    assert verdict.shrinking == Shrinking.REFUSED
    assert any(text.startswith("1 (Sneaky)") for text in words(verdict, "refuse"))


def test_any_module_that_mixes_samples_is_found():
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    verdict = judge(nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.GELU(), Centred()), nn.Linear(8, 3)))
    assert verdict.shrinking == Shrinking.REFUSED
    assert words(verdict, "refuse") == [
        "1.1 (Centred): it mixes the samples of a batch: its output for one depends on the others"
    ]


@pytest.mark.parametrize("kind", ["module", "function", "attention", "attention-function"])
def test_dropout_is_a_warning_and_does_not_disturb_the_measurement(kind):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

        def forward(self, x):
            if kind == "function":
                return functional.dropout(x, 0.3, self.training)
            if kind == "attention":
                return self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]
            x = x[:, None, None]
            return functional.scaled_dot_product_attention(x, x, x, None, 0.4)[:, 0, 0]

    middle = nn.Dropout(0.3) if kind == "module" else Functional()
    verdict = judge(nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 3)))
    assert verdict.shrinking == Shrinking.WARNED
    assert verdict.can_shrink
    assert any("same in distribution" in text and text.startswith("1") for text in words(verdict, "warn"))
    assert verdict.measurement.difference < 1e-13


def test_dropout_that_is_off_is_not_mentioned():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 3))
    assert judge(model).findings == ()


def test_in_batch_losses_are_refused():
    model = nn.Linear(6, 4)

    def contrastive(batch):
        features = functional.normalize(model(batch[0]), dim=1)
        return functional.cross_entropy(features @ features.T * 5, torch.arange(len(features)))

    verdict = judge(model, contrastive)
    assert verdict.shrinking == Shrinking.REFUSED
    [refusal] = words(verdict, "refuse")
    assert "contrastive" in refusal
    assert "in-batch" in refusal
    assert verdict.measurement.difference > 1e-6


def test_a_sum_instead_of_a_mean_gets_a_remedy():
    model = mlp(torch.float32)

    def summed(batch):
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    assert 'average="sum"' in words(judge(model, summed), "refuse")[0]
    assert judge(model, summed, average="sum").shrinking == Shrinking.CERTIFIED
    assert 'average="samples"' in words(judge(model, average="sum"), "refuse")[0]


def test_a_mean_over_tokens_gets_a_remedy():
    model = transformer(torch.float32)
    batch = sentences(8)
    verdict = judge(model, token_loss(model), batch)
    assert "average=" in words(verdict, "refuse")[0]
    assert "tokens?" in words(verdict, "refuse")[0]
    assert judge(model, token_loss(model), batch, average=tokens).shrinking == Shrinking.CERTIFIED


def test_random_draws_are_refused_because_nothing_can_be_measured():
    class Jitter(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    verdict = judge(nn.Sequential(nn.Linear(6, 3), Jitter()))
    assert any("1 (Jitter)" in text and "randn_like" in text for text in words(verdict, "warn"))
    assert verdict.shrinking == Shrinking.REFUSED


def test_everything_is_as_before():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    vector_loss(model)(vectors(8, torch.float32)).backward()
    optimizer.step()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    slopes = [p.grad.clone() for p in model.parameters()]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    draws = (random.getstate(), torch.get_rng_state())
    judge(model, optimizer=optimizer)
    assert all(torch.equal(v, before[k]) and v.dtype == before[k].dtype for k, v in model.state_dict().items())
    assert all(map(torch.equal, slopes, [p.grad for p in model.parameters()]))
    assert all(map(torch.equal, moments, [optimizer.state[p]["exp_avg"] for p in model.parameters()]))
    assert random.getstate() == draws[0]
    assert torch.equal(torch.get_rng_state(), draws[1])
    assert torch.get_default_dtype() == torch.float32
    vector_loss(model)(vectors(8, torch.float32)).backward()
    optimizer.step()
    assert torch.isfinite(weights(model)).all()


def test_autocast_and_the_scripts_own_optimizer():
    model = mlp(torch.float32)

    def loss(batch):
        with torch.autocast("cpu", torch.bfloat16):
            return vector_loss(model)(batch)

    verdict = judge(model, loss, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), accumulation=3, steps=4)
    assert verdict.shrinking == Shrinking.CERTIFIED
    assert (verdict.measurement.accumulation, verdict.measurement.steps) == (3, 4)


@pytest.mark.parametrize(
    "cast", [lambda x: x.float(), lambda x: x.to(torch.float32), lambda x: x.log_softmax(-1, dtype=torch.float32)]
)
def test_a_script_that_casts_is_still_measured_in_float64(cast):
    """Many losses are computed in float32 on purpose, whose rounding would hide what is looked for."""
    model = mlp(torch.float32)

    def loss(batch):
        scores = cast(model(batch[0]))
        return 7 * (scores.logsumexp(-1) - scores[torch.arange(len(scores)), batch[1]]).mean()

    verdict = judge(model, loss, vectors(53, torch.float32))
    assert verdict.shrinking == Shrinking.CERTIFIED
    assert verdict.measurement.difference < 1e-13


def test_the_measurement_sees_what_the_probes_do_not():
    """A loss whose value is additive but whose gradient is not: only training both ways shows it."""
    model = nn.Linear(6, 1)

    def odd(batch):
        out = model(batch[0])[:, 0]
        trick = out.mean().square()
        return out.square().mean() + trick - trick.detach()

    verdict = judge(model, odd)
    assert verdict.measurement.difference > 1e-6
    assert verdict.shrinking == Shrinking.REFUSED
    assert "no single module" in words(verdict, "refuse")[0]


def test_a_loss_that_fails_on_a_piece_is_refused():
    """Batch norm cannot train on one sample."""
    verdict = judge(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), accumulation=8)
    assert verdict.shrinking == Shrinking.REFUSED
    assert "fails on a part of the batch" in words(verdict, "refuse")[-1]
    assert verdict.measurement is None


def test_a_loss_that_fails_on_the_whole_batch_raises_the_scripts_error():
    def broken(batch):
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        judge(mlp(torch.float32), broken)


def test_looking_alone_does_not_certify():
    assert examine(mlp()).shrinking == Shrinking.UNKNOWN
    assert not examine(mlp()).can_shrink
    assert examine(nn.Sequential(nn.BatchNorm2d(3))).shrinking == Shrinking.REFUSED


def test_a_verdict_survives_its_file(tmp_path):
    verdict = judge(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3)))
    verdict.save(tmp_path / "verdict.json")
    assert Verdict.load(tmp_path / "verdict.json") == verdict
    assert json.loads((tmp_path / "verdict.json").read_text())["shrinking"] == "warned"


# The command


SCRIPT = """
    import torch
    from torch import nn
    from carpool.train import Training
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 8), {middle}, nn.Linear(8, 1))
    training = Training(model, torch.optim.Adam(model.parameters()), checkpoints="saved")
    print("the script's own words")
    for _ in training.steps(10):
        training.step(torch.randn(6, 4), lambda x: model(x).square().mean())
    print("never reached")
"""


def run(tmp_path, monkeypatch, script, *options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    return CliRunner().invoke(command, [*options, "--", sys.executable, "train.py"], catch_exceptions=False)


@pytest.mark.slow
@pytest.mark.parametrize(("middle", "status"), [("nn.GELU()", 0), ("nn.BatchNorm1d(8)", 1)])
def test_the_command(tmp_path, monkeypatch, capfd, middle, status):
    result = run(
        tmp_path,
        monkeypatch,
        SCRIPT.format(middle=middle),
        "--json",
        "--steps",
        "3",
        "--accumulation",
        "3",
        "--output",
        "v.json",
    )
    assert result.exit_code == status
    printed = json.loads(result.stdout)
    assert printed["can_shrink"] == (status == 0)
    assert printed["measurement"]["steps"] == 3
    assert Verdict.load(tmp_path / "v.json").can_shrink == (status == 0)
    captured = capfd.readouterr()
    assert "the script's own words" in captured.err
    assert "never reached" not in captured.err
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("script", "said"),
    [("print('no training')", "without a training step"), ("raise SystemExit(7)", "failed with status 7")],
)
def test_the_command_without_a_step_to_check(tmp_path, monkeypatch, script, said):
    result = run(tmp_path, monkeypatch, script)
    assert result.exit_code == 3
    assert said in result.stderr


def test_the_command_with_nothing_to_run():
    result = CliRunner().invoke(command, ["--", "no-such-program-here"])
    assert result.exit_code == 3
    assert "cannot run no-such-program-here" in result.stderr
    assert CliRunner().invoke(command, []).exit_code == 2


def test_a_script_that_joins_a_process_group_is_checked(tmp_path):
    """As `torch.distributed` scripts do it, without a launcher."""
    script = tmp_path / "ddp.py"
    script.write_text(
        "import os, torch\n"
        "from torch import distributed, nn\n"
        "from carpool.train import Training\n"
        "distributed.init_process_group('gloo')\n"
        "model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))\n"
        "training = Training(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "assert os.environ['LOCAL_RANK'] == '0'\n"
        "training.step(torch.randn(8, 4), lambda batch: model(batch).mean())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "carpool.cli", "check", "--", sys.executable, str(script)], check=False
    )
    assert done.returncode == 0
