"""What all tests share: the project on the path, one hypothesis profile, and the smallest run there is."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the tests run in two processes

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import probe  # noqa: E402

hypothesis.settings.register_profile(
    "project", max_examples=25, deadline=None, derandomize=True, database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],  # shrinking what a mutant breaks takes minutes
)  # fmt: skip
hypothesis.settings.load_profile("project")

# A run of two epochs of four steps on 200 of the built-in digits, in about two seconds.
TINY = dict(
    epochs=2, warmup_epochs=1, limit=200, batch_size=50, width=16, depth=2, heads=2,
    decoder_width=16, decoder_depth=2, decoder_heads=2, patch_size=4, eval_every=0,
)  # fmt: skip
TINY_UVIT = dict(
    epochs=2, warmup_steps=2, limit=200, batch_size=50, width=16, depth=2, heads=2, patch_size=4, eval_every=0,
    sampler_steps=3, probe_times=(0.1, 0.3),
)  # fmt: skip
TINY_RESNET = dict(epochs=2, limit=200, batch_size=50, width=4, alpha_min=0.6, blocks=8, eval_every=0)


def flags(script=None, /, **settings):
    """The script's smallest run, changed by `settings`, as command-line arguments; mae.py's for None."""
    tiny = {"resnet_decay": TINY_RESNET, "uvit": TINY_UVIT}.get(getattr(script, "SCRIPT", None), TINY)
    arguments = []
    for name, value in {**tiny, **settings}.items():
        values = value if isinstance(value, tuple) else (value,)
        arguments += [f"--{name.replace('_', '-')}", *map(str, values)]
    return arguments


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """An empty folder to stand in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_probes(monkeypatch):
    """Every layer scores 1: for tests of training alone."""
    scores = dict.fromkeys(("linear", "held_out", "knn_weighted", "knn_majority"), 1.0)
    monkeypatch.setattr(probe, "evaluate_layers", lambda train, *rest: [dict(scores) for _ in range(train.shape[1])])


@pytest.fixture(autouse=True)
def one_stream():
    """No test depends on another's use of the global random stream."""
    torch.manual_seed(0)
