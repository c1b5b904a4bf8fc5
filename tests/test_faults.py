"""Killed, stopped and broken runs: nothing is lost, and what goes on comes to the same numbers."""

import contextlib
import io
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, TINY, TINY_RESNET, TINY_UVIT, flags
from test_cli import complaint, finished_run, folder_of_images

import mae
import resnet_decay
import uvit

TINIES = {"mae": TINY, "uvit": TINY_UVIT, "resnet_decay": TINY_RESNET}
LONG = dict(epochs=10, batch_size=20, eval_every=4)  # 10 steps an epoch


def start(script, *more, **settings):
    """The script in a process of its own, which heeds Ctrl-C even where these tests run in a shell's background."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / f"{script.__name__}.py"), *flags(script, **settings), *more],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def epochs_logged(folder):
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def numbers(folder):
    """What must not depend on how often a run was killed: final weights, and every number that is no time."""
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    result = json.loads((folder / "result.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for entry in (result, *records):
        for name in ("seconds", "images_per_second", "peak_memory_bytes"):
            entry.pop(name, None)
    return checkpoint["model"], result, records


def test_ctrl_c_says_in_one_line_that_the_run_goes_on(clean):
    process = start(mae, **{**LONG, "epochs": 1000}, out="run")
    while process.poll() is None and epochs_logged(clean / "run") < 1:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    (line,) = process.stderr.read().strip().splitlines()
    assert re.fullmatch(
        r"mae.py: stopped; the same command goes on from (step \d+, which is saved|the last checkpoint)", line
    )


@pytest.mark.parametrize("script", [mae, resnet_decay, uvit])
def test_a_stopped_run_that_was_begun_anew_says_to_leave_overwrite_out(script, clean, capsys, monkeypatch, no_probes):
    rate = script.learning_rate
    monkeypatch.setattr(script, "learning_rate", lambda *a: os.kill(os.getpid(), signal.SIGINT) or rate(*a))
    assert script.main([*flags(script, out="run"), "--overwrite"]) == 130
    error = capsys.readouterr().err
    assert error == (
        f"{script.SCRIPT}.py: stopped; the same command without --overwrite goes on from step 1, which is saved\n"
    )


def test_half_a_line_of_metrics_and_a_leftover_file_do_no_harm(clean, no_probes):
    settings = {**TINY, "epochs": 4}
    with pytest.MonkeyPatch.context() as patch:
        log = mae.log
        patch.setattr(mae, "log", lambda config, records, board=None: log(config, records) or 1 / (2 - len(records)))
        with pytest.raises(ZeroDivisionError):
            mae.main(flags(mae, **settings, out="run"))
    with open(clean / "run/metrics.jsonl", "a") as file:
        file.write('{"epoch": 9')
    (clean / "run/checkpoint.pt.tmp").write_text("half a file")
    assert mae.main(flags(mae, **settings, out="run")) == 0
    assert [record["epoch"] for record in numbers(clean / "run")[2]] == [1, 2, 3, 4]


# ---- Thirty kills ---------------------------------------------------------------------------------------------------

FORKS = """
import importlib, os, random, signal, sys, time
script, kills, span, arguments = importlib.import_module(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
import matplotlib.figure, sklearn.datasets, PIL.Image, PIL.ImageOps  # so that a child begins at once
moments, died = random.Random(0), 0
for _ in range(kills):
    child = os.fork()
    if child == 0:
        os._exit(script.main(arguments))
    time.sleep(moments.uniform(0, span))
    os.kill(child, signal.SIGKILL)
    died += os.WIFSIGNALED(os.waitpid(child, 0)[1])
print("died", died, file=sys.stderr)
sys.exit(script.main(arguments))
"""


@pytest.mark.parametrize("script, kills, span", [(mae, 30, 0.8), (uvit, 5, 1.2), (resnet_decay, 5, 1.0)])
def test_thirty_kills_at_random_moments_change_nothing(script, kills, span, clean):
    """While images are cached, baselines probed, steps trained, checkpoints saved, features probed, pictures drawn."""
    folder_of_images(clean / "images", count=25)
    settings = dict(
        data="images", image_size=16, epochs=4, batch_size=5, limit=None, eval_every=1, recipe="cifar", min_scale=0.5,
    )  # fmt: skip
    settings |= {"accumulate": 2} if script is not resnet_decay else {}
    settings |= {"sample_every": 2, "min_scale": None} if script is uvit else {}
    line = [x for x in flags(script, **{k: v for k, v in settings.items() if v is not None})]
    at = line.index("--limit")
    line = [*line[:at], *line[at + 2 :]]
    assert script.main([*line, "--out", "whole"]) == 0
    for cached in (clean / "data/cache").iterdir():
        cached.unlink()  # killed while it is made, too
    done = subprocess.run(
        [sys.executable, "-c", FORKS, script.SCRIPT, str(kills), str(span), *line, "--out", "killed"],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(re.search(r"died (\d+)", done.stderr)[1]) >= kills / 2, done.stderr  # the others were finished before
    (weights, result, records), (same_weights, same_result, same_records) = (
        numbers(clean / name) for name in ("whole", "killed")
    )
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
    assert result == same_result and records == same_records and len(records) == 4


# ---- Signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [mae, uvit, resnet_decay])
def test_a_run_stopped_before_anything_is_saved_does_not_say_that_it_goes_on(script, clean, capsys, monkeypatch):
    monkeypatch.setattr(script.probe, "load_images", lambda *a: os.kill(os.getpid(), signal.SIGTERM))
    assert script.main(flags(script, out="run")) == 143
    error = capsys.readouterr().err
    assert error == f"{script.SCRIPT}.py: stopped; the same command starts anew: nothing was saved yet\n"
    assert not (clean / "run").exists()


def test_an_evaluation_that_is_stopped_says_that_nothing_of_it_is_kept(clean, capsys, monkeypatch, no_probes):
    assert mae.main(flags(mae)) == 0  # in the folder that training would go to
    monkeypatch.setattr(mae, "evaluate", lambda *a: os.kill(os.getpid(), signal.SIGINT))
    capsys.readouterr()
    assert mae.main(["--evaluate", "runs/mae-digits-a0.6-s0"]) == 130
    assert capsys.readouterr().err == "mae.py: stopped; the same command starts anew: nothing was saved yet\n"


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("script", [mae, uvit, resnet_decay])
def test_a_stopped_run_is_saved_at_its_step_and_goes_on_to_the_same_numbers(script, number, code, clean, no_probes):
    """The signal comes between two steps of an epoch, in this process; the epoch is not begun anew."""
    settings = {**TINIES[script.SCRIPT], "epochs": 3, "batch_size": 20}
    assert script.main(flags(script, **settings, out="whole")) == 0
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        rate = script.learning_rate

        def signalled(*arguments):
            steps.append(arguments)
            if len(steps) == 14:
                os.kill(os.getpid(), number)
            return rate(*arguments)

        patch.setattr(script, "learning_rate", signalled)
        error = io.StringIO()
        with contextlib.redirect_stderr(error):
            assert script.main(flags(script, **settings, out="run")) == code
    assert error.getvalue() == (
        f"{script.SCRIPT}.py: stopped; the same command goes on from step 14, which is saved\n"
    )  # fmt: skip
    assert len(steps) == 14
    assert torch.load(clean / "run/checkpoint.pt", weights_only=True)["state"]["step"] == 14
    assert script.main(flags(script, **settings, out="run")) == 0
    (weights, result, records), (same_weights, same_result, same_records) = (
        numbers(clean / name) for name in ("whole", "run")
    )
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
    assert records == same_records and result == same_result


@pytest.mark.parametrize("script", [mae, uvit, resnet_decay])
def test_a_run_stopped_while_it_is_probed_has_its_epoch_and_is_probed_later(script, clean, no_probes):
    settings = {**TINIES[script.SCRIPT], "eval_every": 1}
    assert script.main(flags(script, **settings, out="whole")) == 0
    evaluate, asked = script.evaluate, []

    def interrupted(*arguments):
        asked.append(arguments)
        if script is not uvit or len(asked) > 1:  # uvit.py's first call is its baseline
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "evaluate", interrupted)
        error = io.StringIO()
        with contextlib.redirect_stderr(error):
            assert script.main(flags(script, **settings, out="run")) == 143
    assert error.getvalue().count("\n") == 1 and "goes on from the last checkpoint" in error.getvalue()
    saved = torch.load(clean / "run/checkpoint.pt", weights_only=True)["state"]
    assert saved["step"] == 4 and len(saved["records"]) == 1 and "effective_rank" not in saved["records"][0]
    assert script.main(flags(script, **settings, out="run")) == 0
    whole, run = numbers(clean / "whole"), numbers(clean / "run")
    assert whole[1:] == run[1:] and all("effective_rank" in record for record in run[2])


@pytest.mark.parametrize("script", [mae, uvit, resnet_decay])
def test_weights_that_are_not_finite_are_never_saved(script, clean, no_probes, capsys):
    """The loss of the last step of an epoch is finite, and the step after it ruins the weights."""
    settings = {**TINIES[script.SCRIPT], "epochs": 3}
    rate, steps = script.learning_rate, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            script, "learning_rate", lambda *a: steps.append(a) or (math.inf if len(steps) == 8 else rate(*a))
        )
        assert script.main(flags(script, **settings, out="run")) == 1
    error = capsys.readouterr().err
    assert "not finite at step 7" in error and "0.4 and below" in error and "--alpha-min" in error
    saved = torch.load(clean / "run/checkpoint.pt", weights_only=True)
    assert saved["state"]["step"] == 4
    assert all(torch.isfinite(values).all() for values in saved["model"].values())


# ---- Two at once ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [mae, uvit, resnet_decay])
def test_a_second_run_on_a_run_folder_is_refused_and_the_first_goes_on(script, clean, capsys, no_probes):
    fcntl = pytest.importorskip("fcntl")
    (clean / "run").mkdir()
    with open(clean / "run/.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "run is in use by another process" in complaint(capsys, *flags(script, out="run"), script=script)
        assert [path.name for path in (clean / "run").iterdir()] == [".lock"]
        assert script.main([*flags(script, out="run"), "--overwrite"]) == 2
    assert script.main(flags(script, out="run")) == 0
    assert script.main([*flags(script, out="run"), "--overwrite"]) == 0  # the lock ends with the run


# ---- Files of strangers ---------------------------------------------------------------------------------------------


class Hostile:
    def __reduce__(self):
        return (os.system, ("touch ran",))


@pytest.mark.parametrize("script", [mae, uvit, resnet_decay])
def test_a_checkpoint_that_would_run_code_is_refused_and_runs_nothing(script, clean, capsys, tmp_path_factory):
    finished_run(script, clean / "run", tmp_path_factory)
    (clean / "run/result.json").unlink()
    torch.save({"config": Hostile(), "model": Hostile()}, clean / "run/checkpoint.pt")
    assert "damaged or not a checkpoint" in complaint(capsys, *flags(script, out="run"), script=script)
    (clean / "run/checkpoint.pt").write_bytes(pickle.dumps(Hostile()))
    assert "damaged or not a checkpoint" in complaint(capsys, *flags(script, out="run"), script=script)
    assert not (clean / "ran").exists()


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
@pytest.mark.parametrize("script", [mae, uvit, resnet_decay])
def test_weights_of_a_wrapped_network_are_one_line(script, prefix, clean, capsys, tmp_path_factory):
    finished_run(script, clean / "run", tmp_path_factory)
    (clean / "run/result.json").unlink()
    saved = torch.load(clean / "run/checkpoint.pt", weights_only=True)
    saved["model"] = {prefix + name: values for name, values in saved["model"].items()}
    torch.save(saved, clean / "run/checkpoint.pt")
    assert "does not fit the model" in complaint(capsys, *flags(script, out="run"), script=script)


# ---- Memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_memory_does_not_grow_with_the_steps(clean, no_probes, monkeypatch):
    """Within 2 % from the middle of 1,000 steps to their end; records, checkpoints and extracted features included."""
    held, step = [], torch.optim.AdamW.step

    def counted(self, *args, **kwargs):
        step(self, *args, **kwargs)
        with open("/proc/self/status") as file:
            held.append(next(int(line.split()[1]) for line in file if line.startswith("VmRSS")))

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    assert mae.main(flags(mae, epochs=25, limit=200, batch_size=5, eval_every=5, out="run")) == 0
    assert len(held) == 1000 and held[-1] < 1.02 * held[499]
