"""Any value for any flag gives a run or one clear line: hypothesis writes command lines, on the smallest data there is."""

import contextlib
import dataclasses
import io
import json
import shutil
import typing

import pytest
from conftest import TINY, TINY_RESNET, TINY_UVIT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mae
import probe
import resnet_decay
import uvit

TINIES = {
    "mae": TINY | {"epochs": 1, "warmup_epochs": 0, "batch_size": 6, "limit": 12},
    "uvit": TINY_UVIT | {"epochs": 1, "batch_size": 6, "limit": 12},
    "resnet_decay": TINY_RESNET | {"epochs": 1, "batch_size": 6, "limit": 12},
}
WORDS = (
    ["0", "-1", "1", "2", "3", "4", "6", "0.3", "0.5", "1.0", "-0.5", "1e-9", "nan", "inf", "-inf", "1e400", "65536"]
    + ["99999999999999999999", "0x10", "١", "", " ", "x", "auto", "None", "none", "True", "false", "ä b", "--", "[1]", "1,2"]
)  # fmt: skip
OWN = {  # flags whose value is a name: those that there are, and others
    "data": ["digits", "", "nowhere", "./nowhere", "~", "cifar1000"],
    "root": ["root", "", ".", "file", "file/under"],
    "recipe": ["digits", "cifar", "imagenet", "latents", "Digits", ""],
    "model": ["micro", "small", "vit-s", "vit-x", ""],
    "device": ["cpu", "auto", "cuda", "cuda:99", "gpu", "mps", "meta", "", "cpu:0"],
    "out": ["run", "new/place", "", ".", "file", "file/under", "/proc/none", "a" * 300, "ü/画"],
    "schedule": ["linear", "cosine", "constant", "learned", "Linear"],
    "decay_on": ["both", "attn", "mlp", "all"],
    "shortcut": ["decay", "scale-both", "scale-branch", "plain"],
    "pool": ["mean", "cls", "max"],
    "sampler": ["sde", "ode", "dpm-solver", "ddim"],
    "evaluate": ["nowhere", "run", ""],
    "protocol": ["linear", "knn", "segment", "quiz"],
    "masks": ["nowhere", ""],
    "init": ["nowhere", "file", "", "run"],
    "log": ["none", "tensorboard", "wandb"],
    "export": ["nowhere", "run", ""],
    "to": ["plain.safetensors", "file/plain.safetensors", "plain", ""],
    "to_hf": ["hf", "file", ""],
    "vae": ["nowhere", "./nowhere", ""],
    "sample": ["nowhere", "run", "file", ""],
    "fid_weights": ["nowhere", "file", ""],
}
LEFT_OUT = {"compile", "fid_samples", "sampler_steps"}  # that take minutes, or the network


def lines(script):
    """Command lines: the smallest run with up to four flags changed, each to nothing, one value or several."""
    flags = {}
    for field in dataclasses.fields(script.Study):
        if field.name in LEFT_OUT:
            continue
        name = field.name.replace("_", "-")
        if typing.get_type_hints(script.Study)[field.name] is bool:
            flags[field.name] = st.sampled_from([[f"--{name}"], [f"--no-{name}"], [f"--{name}", "perhaps"]])
        else:
            value = st.sampled_from(OWN.get(field.name, WORDS))
            values = (
                st.lists(value, max_size=3) if "tuple" in str(field.type) else st.lists(value, min_size=1, max_size=1)
            )
            flags[field.name] = values.map(lambda values, name=name: [f"--{name}", *values])
    changed = st.lists(st.sampled_from(sorted(flags)), min_size=1, max_size=4, unique=True)
    return changed.flatmap(lambda names: st.fixed_dictionaries({name: flags[name] for name in names}))


@pytest.fixture(scope="module")
def small():
    """Twelve digits to train on and six to test."""
    data = probe.load_images("digits", "data", (16, 16), 12)
    return dataclasses.replace(data, test=data.test[:6], test_labels=data.test_labels[:6])


@pytest.mark.parametrize("script", [mae, uvit, resnet_decay])
def test_any_command_line_is_a_run_or_one_line(script, clean, small, monkeypatch, no_probes):
    def load_images(data, root, size, limit=None, skip_bad=False, crops=False):
        if data != "digits":
            raise probe.BadInput(f"no data set is called {data!r}")
        if limit is not None and limit < 2:
            raise probe.BadInput(f"limit {limit} leaves too few images")
        return dataclasses.replace(small, train=probe.fit(small.train, size), test=probe.fit(small.test, size))

    monkeypatch.setattr(probe, "load_images", load_images)
    for name in ("draw_curves", "draw_reconstructions", "draw_samples", "draw_figure_9"):
        if hasattr(script, name):
            monkeypatch.setattr(script, name, lambda *_, **more: None)
    monkeypatch.setattr(script.rank, "main", lambda arguments: 0)
    ends = {0: 0, 1: 0, 2: 0}

    @settings(max_examples=170, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(lines(script))
    def example(changed):
        shutil.rmtree(clean)
        clean.mkdir()
        (clean / "file").write_text("a letter")
        monkeypatch.chdir(clean)
        line = []
        for name, value in TINIES[script.SCRIPT].items():
            if name not in changed:
                values = value if isinstance(value, tuple) else (value,)
                line += [f"--{name.replace('_', '-')}", *map(str, values)]
        line += [word for words in changed.values() for word in words]
        out, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = script.main(line)
        ends[code] += 1
        complaints = error.getvalue().strip().splitlines()
        if code == 0:
            assert complaints == [] and (out.getvalue() or "overwrite" in changed), (line, complaints)
            for result in clean.rglob("result.json"):
                assert json.loads(result.read_text())["script"] == script.SCRIPT
        elif code == 2:
            (complaint,) = complaints
            assert complaint.startswith(f"{script.SCRIPT}.py: ") and len(complaint) > 20, (line, complaint)
            assert not list(clean.rglob("checkpoint.pt")), line
        else:
            assert code == 1 and all(c.startswith(f"{script.SCRIPT}.py: ") for c in complaints) and complaints, line

    example()
    assert ends[0] >= 10 and ends[2] >= 50, ends
