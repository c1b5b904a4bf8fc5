"""Several processes: torchrun over gloo against one process, and the arithmetic of shares."""

import contextlib
import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, TINY_RESNET, flags
from hypothesis import given
from hypothesis import strategies as st

import mae
import probe
import resnet_decay
import uvit

pytestmark = pytest.mark.xdist_group("processes")  # torchrun is started once, not in both of pytest's processes
CHANGED = {  # 12 steps of three sizes of batch, every random number in use
    "mae": dict(epochs=3, limit=170, batch_size=50, accumulate=2, drop_path=0.2, min_scale=0.5, flip="True", lr=0.02),
    "uvit": dict(epochs=3, limit=170, batch_size=50, accumulate=2, drop_path=0.2, flip="True"),
    "resnet_decay": dict(epochs=3, limit=170, batch_size=50, drop_path=0.2, flip="True", lr=0.02),
}


ALL = """
import contextlib, sys
sys.path.insert(0, sys.argv[1])
import mae, probe, resnet_decay, uvit
with probe.processes_joined(cuda=False):
    probe.processes_joined = lambda cuda: contextlib.nullcontext()  # met once for all three
    for script, line in zip((mae, resnet_decay, uvit), open("lines").read().splitlines()):
        script.SAVE_SECONDS = 600 if probe.process()[0] else 0  # one is later than the other
        if script.main(line.split()):
            sys.exit(1)
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder in which torchrun has trained all scripts in two processes; its output is in the file `output`."""
    folder = tmp_path_factory.mktemp("two")
    scripts = (mae, resnet_decay, uvit)
    lines = [" ".join(flags(script, **CHANGED[script.SCRIPT], out=script.SCRIPT)) for script in scripts]
    (folder / "lines").write_text("\n".join(lines))
    (folder / "all.py").write_text(ALL)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "all.py", str(ROOT)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL, cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "output").write_text(done.stdout)
    return folder


def trained(folder):
    """Final weights, and the losses by epoch."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return torch.load(folder / "checkpoint.pt", weights_only=True)["model"], [record["loss"] for record in records]


@pytest.mark.parametrize("script", [mae, uvit])
def test_two_processes_train_to_the_weights_of_one(script, two, clean, no_probes):
    """The same losses and weights to 1e-5: sums of gradients are taken in another order, and that is all."""
    settings = CHANGED[script.SCRIPT]
    output = (two / "output").read_text()
    assert output.count(f"run folder {script.SCRIPT}\n") == 1 and output.count("\nresult ") == 3  # one process speaks
    assert script.main(flags(script, **settings, out="one")) == 0
    (weights, losses), (same_weights, same_losses) = trained(clean / "one"), trained(two / script.SCRIPT)
    assert len(losses) == 3 and losses == pytest.approx(same_losses, abs=1e-5)
    for name, values in weights.items():
        torch.testing.assert_close(same_weights[name], values, rtol=1e-5, atol=1e-5)
    assert not [path for path in (two / script.SCRIPT).iterdir() if path.suffix in (".tmp", ".lock")]


def test_two_processes_train_a_resnet_as_one_that_normalises_each_share_by_itself(two, clean):
    """On CPUs BatchNorm sees a process's share alone, so the network is that of one process that does the same."""
    weights, losses = trained(two / "resnet_decay")

    settings = TINY_RESNET | CHANGED["resnet_decay"] | {"flip": True}
    config = resnet_decay.Config(**settings)
    data = probe.load_images("digits", "data", config.image_size, config.limit)
    model = resnet_decay.build(config, data.train, 10, torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, weight_decay=5e-4)
    expected = []
    for epoch in range(3):
        order = torch.randperm(170, generator=resnet_decay.generator_for("cpu", 0, "order", epoch)).tensor_split(4)
        expected.append(0.0)
        for i, index in enumerate(order):
            step, half = 4 * epoch + i, len(index) // 2
            for place in (slice(0, half), slice(half, len(index))):
                generator = resnet_decay.generator_for("cpu", 0, "step", step)
                views = probe.augment(
                    data.train[index[place]], (16, 16), generator, config.min_scale, True, config.padding,
                    batch=len(index), place=place,
                )  # fmt: skip
                drops = resnet_decay.drop_factors(torch.rand(len(index), 8, generator=generator)[place], 0.2)
                loss = F.cross_entropy(model(views, drops), data.train_labels[index[place]], reduction="sum") / len(
                    index
                )
                loss.backward()
                expected[-1] += loss.item() / 4
            for group in optimizer.param_groups:
                group["lr"] = resnet_decay.learning_rate(config, step / 4, 50)
            optimizer.step()
            optimizer.zero_grad()
    assert losses == pytest.approx(expected, abs=1e-5)
    for name, values in model.named_parameters():
        torch.testing.assert_close(weights[name], values.detach(), rtol=1e-5, atol=1e-5)
    assert all(torch.isfinite(values).all() for values in weights.values())


@pytest.mark.parametrize("script", [mae, uvit, resnet_decay])
def test_more_processes_than_images_of_a_batch_are_one_line(script, clean, monkeypatch, capsys):
    monkeypatch.setattr(probe, "process", lambda: (0, 64))
    monkeypatch.setattr(probe, "first_process_first", contextlib.nullcontext)
    assert script.main(flags(script)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "64 processes" in error and "batch" in error and not list(clean.iterdir())


@pytest.mark.parametrize("script, flag", [(mae, "--evaluate"), (uvit, "--sample")])
def test_what_runs_in_one_process_says_so(script, flag, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert script.main([flag, "somewhere"]) == 2
    assert "in one process" in capsys.readouterr().err


@given(st.integers(0, 200), st.integers(1, 9))
def test_shares_are_disjoint_whole_and_even(count, processes):
    with pytest.MonkeyPatch.context() as patch:
        shares = []
        for number in range(processes):
            patch.setattr(probe, "process", lambda number=number: (number, processes))
            shares.append(range(count)[probe.share(count)])
    assert [i for part in shares for i in part] == list(range(count))
    lengths = [len(part) for part in shares]
    assert max(lengths) - min(lengths) <= 1


def test_a_process_of_several_trains_on_its_share_alone(clean, monkeypatch, no_probes):
    """Process 1 of 2, the other one missing: its first gradient is twice that of its half of the batch."""
    seen = {}

    class Alone(torch.nn.Module):  # in place of DistributedDataParallel, whose average is over one process
        def __init__(self, module, devices):
            super().__init__()
            self.module = module

        def forward(self, images, noise):
            seen.setdefault("images", images.clone())
            seen.setdefault("noise", noise.clone())
            return self.module(images, noise)

    class Watched(torch.optim.AdamW):
        def step(self):
            weights = self.param_groups[0]["params"]
            seen.setdefault("gradients", [p.grad.clone() for p in weights if p.grad is not None])
            super().step()

    config = mae.Config(**TINY | {"epochs": 1, "warmup_epochs": 0, "min_scale": 0.5}, out="run")
    monkeypatch.setattr(mae, "DistributedDataParallel", Alone)
    monkeypatch.setattr(torch.optim, "AdamW", Watched)
    data = probe.load_images("digits", "data", (16, 16), 200)
    monkeypatch.setattr(probe, "load_images", lambda *arguments: data)
    for name, stand_in in (("summed", lambda x: x), ("of_any", bool), ("features", None)):
        monkeypatch.setattr(probe, name, stand_in)
    monkeypatch.setattr(mae, "evaluate_baselines", lambda *arguments: {"pixels": {}, "untrained": {}})
    monkeypatch.setattr(mae, "evaluate", lambda *arguments: (_ for _ in ()).throw(StopIteration))
    monkeypatch.setattr(probe, "process", lambda: (1, 2))
    with pytest.raises((StopIteration, RuntimeError)):
        mae.train(config)

    order = torch.randperm(200, generator=mae.generator_for("cpu", 0, "order", 0))[:50]
    generator = mae.generator_for("cpu", 0, "step", 0)
    views = probe.augment(data.train[order], (16, 16), generator, 0.5, config.flip)
    noise = torch.rand(50, config.patches, generator=generator)
    torch.testing.assert_close(seen["images"], views[25:], rtol=1e-5, atol=1e-3)
    assert torch.equal(seen["noise"], noise[25:])
    model = mae.build(config, data.train, torch.device("cpu"))
    (model(views[25:], noise[25:]) * 25 / 50 * 2).backward()
    expected = [p.grad for p in model.parameters() if p.ndim > 1 and p.grad is not None]
    assert len(expected) == len(seen["gradients"])
    for one, other in zip(seen["gradients"], expected):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("script", [mae, uvit])
def test_four_parts_of_a_batch_are_the_whole_batch(script, clean, no_probes, monkeypatch):
    # Adam's own eps makes a whole step of a gradient that is nothing but rounding, which differs from CPU to CPU.
    monkeypatch.setattr(torch.optim, "AdamW", partial(torch.optim.AdamW, eps=1e-4))
    weights = []
    for accumulate in (1, 4):
        settings = {**CHANGED[script.SCRIPT], "accumulate": accumulate, "epochs": 2}
        assert script.main(flags(script, **settings, out=f"in{accumulate}")) == 0
        weights.append(trained(clean / f"in{accumulate}"))
    assert weights[0][1] == pytest.approx(weights[1][1], abs=1e-6)
    for name, values in weights[0][0].items():
        torch.testing.assert_close(weights[1][0][name], values, rtol=1e-6, atol=1e-6)
