"""Killed runs go on to the same numbers."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, flags

import mae
import resnet_decay
import uvit

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


@pytest.mark.parametrize("script, kills", [(mae, 3), (resnet_decay, 1), (uvit, 1)])
def test_kills_change_nothing(script, kills, clean):
    """SIGKILL at a random moment after the first epoch, and again after another: the same weights bit for bit."""
    whole = start(script, **LONG, out="whole")
    moments = random.Random(0)
    for _ in range(kills):
        before = epochs_logged(clean / "killed")
        process = start(script, **LONG, out="killed")
        while process.poll() is None and epochs_logged(clean / "killed") <= before:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it was finished before it could be killed"
        process.stderr.close()
    last = start(script, **LONG, out="killed")
    assert last.wait() == 0, last.stderr.read()
    assert whole.wait() == 0, whole.stderr.read()
    (weights, result, records), (same_weights, same_result, same_records) = (
        numbers(clean / name) for name in ("whole", "killed")
    )
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
    assert result == same_result
    assert records == same_records and len(records) == 10
    assert not list((clean / "killed").glob("*.tmp"))


@pytest.mark.parametrize(
    "script, more, without", [(mae, (), ""), (resnet_decay, ("--overwrite",), " without --overwrite")]
)
def test_ctrl_c_says_in_one_line_that_the_run_goes_on(script, more, without, clean):
    process = start(script, *more, **{**LONG, "epochs": 1000}, out="run")
    while process.poll() is None and epochs_logged(clean / "run") < 1:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert process.stderr.read().strip().splitlines() == [
        f"{script.__name__}.py: stopped; the same command{without} goes on from the last checkpoint"
    ]


def test_half_a_line_of_metrics_and_a_leftover_file_do_no_harm(clean):
    process = start(mae, **LONG, out="run")
    while process.poll() is None and epochs_logged(clean / "run") < 2:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with open(clean / "run/metrics.jsonl", "a") as file:
        file.write('{"epoch": 9')
    (clean / "run/checkpoint.pt.tmp").write_text("half a file")
    again = start(mae, **LONG, out="run")
    assert again.wait() == 0, again.stderr.read()
    assert [record["epoch"] for record in numbers(clean / "run")[2]] == list(range(1, 11))
