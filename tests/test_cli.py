"""The command line as a user runs it, in a clean folder: what it prints, and one line for every mistake."""

import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, flags
from PIL import Image

import mae
import rank
import resnet_decay
import uvit

SCRIPTS = [mae, resnet_decay, uvit]  # the same promises, kept by copies of the same plumbing


def run(*arguments, script="mae.py", **environment):
    """The script in a process of its own; returns (exit code, stdout, stderr)."""
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def complaint(capsys, *arguments, script=mae):
    """The one line that a mistake gets; asserts that it is one line, with exit code 2."""
    capsys.readouterr()
    code = script.main(list(arguments))
    error = capsys.readouterr().err
    assert code == 2, error
    assert len(error.strip().splitlines()) == 1, error
    assert (
        error.startswith(f"{getattr(script, 'SCRIPT', script.__name__)}.py: ")
        and "Traceback" not in error
        and len(error) < 400
    )
    return error


FINISHED = {}  # a finished run of every script, trained once for all tests


def finished_run(script, folder, tmp_path_factory):
    """A copy of the script's smallest run, finished, in `folder`."""
    if script not in FINISHED:
        FINISHED[script] = tmp_path_factory.mktemp(script.__name__) / "run"
        assert script.main(flags(script, out=FINISHED[script])) == 0
    shutil.copytree(FINISHED[script], folder)


def folder_of_images(folder, classes=("cat", "dog"), splits=("train", "val"), count=4, size=(20, 16)):
    """A data set of plain colours in files."""
    for split in splits:
        for i, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            for j in range(count):
                Image.new("RGB", size, (60 * i, 40 * j, 99)).save(folder / split / name / f"{j}.png")
    return folder


# ---- What it prints -------------------------------------------------------------------------------------------------


def test_a_run_prints_greppable_lines_and_no_bar_into_a_pipe(clean):
    code, out, error = run(*flags(eval_every=1))
    assert code == 0, error
    assert error == ""  # no bar, no warning
    assert len(re.findall(r"^train epoch=\d step=\d loss=\d\.\d+ lr=\S+ images_per_second=\S+$", out, re.M)) == 2
    assert len(re.findall(r"^eval linear=\S+ knn_weighted=\S+ .*best_layer=\d$", out, re.M)) == 2
    assert len(re.findall(r"^baseline (pixels|untrained) linear=\S+ knn_weighted=\S+$", out, re.M)) == 2
    assert re.search(r"cumulative decay 3\.813e-01", out)  # 1 · 0.8667 · 0.7333 · 0.6
    result = json.loads((clean / "runs/mae-digits-a0.6-s0/result.json").read_text())
    (line,) = re.findall(r"^result .*$", out, re.M)
    assert f"linear={result['linear']:.5g} " in line
    for name in ("pixels", "untrained", "trained, last layer", r"trained, layer \d \(best\)"):
        assert re.search(rf"^ *{name}: linear \d+\.\d %, k-NN \d+\.\d %$", out, re.M)
    assert [path.name for path in clean.iterdir()] == ["runs"]

    code, again, error = run(*flags(eval_every=1))
    assert code == 0 and error == "" and "is finished" in again and line in again


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_every_flag(script):
    code, out, _ = run("--help", script=f"{script.__name__}.py")
    assert code == 0
    for field in script.Config.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in out
    assert "Traceback" not in out


def test_a_study_prints_greppable_lines_and_no_bar_into_a_pipe(clean):
    arguments = flags(resnet_decay, eval_every=1, alpha_min=(1.0, 0.5), limit=100)
    code, out, error = run(*arguments, script="resnet_decay.py")
    assert code == 0, error
    assert error == ""  # no bar, no warning
    which = r"alpha_min=\S+ blocks=8 seed=0"
    assert (
        len(re.findall(rf"^train {which} epoch=\d step=\d loss=\d\.\d+ lr=\S+ images_per_second=\S+$", out, re.M)) == 4
    )
    assert len(re.findall(rf"^eval {which} accuracy=\S+ effective_rank=\S+ exp_effective_rank=\S+$", out, re.M)) == 4
    assert (
        len(re.findall(rf"^result {which} .*accuracy=\S+ effective_rank=\S+ exp_effective_rank=\S+$", out, re.M)) == 2
    )
    assert re.search(r"cumulative decay 8\.204e-02", out)  # 1 · 0.9286 · 0.8571 · … · 0.5
    assert [path.name for path in clean.iterdir()] == ["runs"]
    tables = out[out.index("Figure 9 a") :]

    code, again, error = run(*arguments, script="resnet_decay.py")
    assert code == 0 and error == "" and again.count("is finished") == 2 and again.endswith(tables)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_runs_from_another_folder_on_a_folder_of_images(script, clean, capsys):
    folder_of_images(clean / "pets", count=6)
    assert script.main(flags(script, data="./pets", image_size=(16, 24), batch_size=99, limit=9, out="run")) == 0
    out = capsys.readouterr().out
    assert "9 train and 12 test images of 3x16x24" in out
    assert "9 training images are fewer than batch_size 99: all of them are in every batch" in out
    result = json.loads((clean / "run/result.json").read_text())
    assert result["steps"] == 2


@pytest.mark.parametrize("script", SCRIPTS)
def test_out_names_the_run_folder_and_overwrite_discards_what_it_holds(script, clean, capsys):
    assert script.main(flags(script, out="here/run", epochs=1)) == 0
    text = complaint(capsys, *flags(script, out="here/run", epochs=2), script=script)
    assert "epochs 1, not 2" in text and "--overwrite" in text
    assert json.loads((clean / "here/run/result.json").read_text())["epochs"] == 1
    assert script.main([*flags(script, out="here/run", epochs=2), "--overwrite"]) == 0
    assert json.loads((clean / "here/run/result.json").read_text())["epochs"] == 2
    assert len((clean / "here/run/metrics.jsonl").read_text().splitlines()) == 2


# ---- Mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--alpha-min 1.1", "alpha_min 1.1 [0, 1]"),
        ("--alpha-min -0.1", "alpha_min -0.1 [0, 1]"),
        ("--alpha-min nan", "alpha_min nan [0, 1]"),
        ("--alpha-min inf", "alpha_min inf"),
        ("--alpha-min x", "--alpha-min x"),
        ("--alpha-min", "alpha_min one value or more"),
        ("--alpha 0.6", "--alpha"),
        ("0.6", "0.6"),
        ("--patch-size 3", "patch_size 3 16x16"),
        ("--patch-size 0", "patch_size 0"),
        ("--image-size 16 20 --patch-size 8", "patch_size 8 16x20"),
        ("--image-size", "image_size none"),
        ("--image-size 16 16 16", "image_size 16 16 16"),
        ("--image-size -16", "image_size -16"),
        ("--heads 3", "heads 3 width 16"),
        ("--decoder-heads 5", "decoder_heads 5 decoder_width 16"),
        ("--heads 0", "heads 0"),
        ("--width 18 --heads 2", "width multiple of 4 18"),
        ("--depth 3", "depth even 3 --no-unet"),
        ("--depth 0", "depth 0"),
        ("--mask-ratio 0.99", "mask_ratio 0.99 16 patches"),
        ("--mask-ratio 0", "mask_ratio 0"),
        ("--mask-ratio 1", "mask_ratio 1"),
        ("--mask-ratio nan", "mask_ratio nan"),
        ("--mask-ratio 0.01 --image-size 4", "mask_ratio 0.01 1 patches"),
        ("--epochs 0", "epochs 0"),
        ("--epochs 1.5", "--epochs 1.5"),
        ("--batch-size -1", "batch_size -1"),
        ("--lr 0", "lr 0"),
        ("--lr nan", "lr nan"),
        ("--lr inf", "lr inf"),
        ("--warmup-epochs 9", "warmup_epochs 9 epochs = 2"),
        ("--weight-decay -1", "weight_decay -1"),
        ("--betas 0.9 1", "betas 0.9 1"),
        ("--clip-grad 0", "clip_grad 0"),
        ("--accumulate 0", "accumulate 0"),
        ("--min-scale 0", "min_scale 0"),
        ("--min-scale nan", "min_scale nan"),
        ("--eval-every -1", "eval_every -1"),
        ("--probe-limit 0", "probe_limit 0"),
        ("--seed -1", "seed -1"),
        ("--limit 0", "limit 0"),
        ("--limit 1", "limit 1 digits two"),
        ("--model vit-x", "model vit-x vit-b"),
        ("--recipe x", "recipe x cifar"),
        ("--pool max", "max pool"),
        ("--device tpu", "device tpu"),
        ("--device cuda:77", "device cuda:77"),
        ("--data nowhere", "nowhere digits folder"),
        ("--data ./nowhere", "./nowhere folder"),
        ("--patch-size 1 --image-size 4", "patch_size 1"),
        ("--out /dev/null/run", "/dev/null/run /dev/null"),
        (f"--out {'x' * 300}", "xxx too long"),
        ("--probe-limit 1", "probe_limit 1"),
        ("--accumulate 51", "accumulate 51 50"),
        ("--width 10000000000", "width 10000000000 65536"),
        ("--epochs 99999999999", "epochs 99999999999"),
        (f"--seed {10**30}", "seed 2^63"),
        ("--device meta", "device meta cuda"),
        ("--device hpu", "device hpu cuda"),
    ],
)
def test_a_mistake_gets_one_line_and_writes_nothing(arguments, words, clean, capsys):
    text = complaint(capsys, *flags(), *arguments.split())
    assert all(word in text for word in words.split()), text
    assert list(clean.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--blocks 7", "blocks 8 to 16 7"),
        ("--blocks 8 17", "blocks 8 to 16 17"),
        ("--blocks", "blocks one value or more"),
        ("--blocks 8.5", "--blocks 8.5"),
        ("--alpha-min", "alpha_min one value or more"),
        ("--alpha-min 1.0 1.5", "alpha_min 1.5 [0, 1]"),
        ("--alpha-min 1.0 x", "--alpha-min x"),
        ("--alpha-min 1.0 -0.2 0.4", "alpha_min -0.2"),
        ("--alpha-min nan", "alpha_min nan"),
        ("--alpha-min 0.7 0.70", "alpha_min differ 0.7"),
        ("--seed", "seed one value or more"),
        ("--seed 0 -1", "seed -1"),
        ("--seed 3 3", "seed differ 3"),
        ("--width 0", "width 0"),
        ("--width -4", "width -4"),
        ("--width 10000000", "width 10000000 8192"),
        ("--image-size", "image_size none"),
        ("--image-size 0", "image_size 0"),
        ("--epochs 0", "epochs 0"),
        ("--batch-size 1", "batch_size 1 2 or more"),
        ("--limit 5 --batch-size 2", "batch_size 2 5 images 3 or more"),
        ("--lr 0", "lr 0"),
        ("--lr nan", "lr nan"),
        ("--momentum 1", "momentum 1"),
        ("--weight-decay -1", "weight_decay -1"),
        ("--padding -1", "padding -1"),
        ("--padding 17", "padding 16 17"),
        ("--min-scale 0", "min_scale 0"),
        ("--eval-every -1", "eval_every -1"),
        ("--limit 1", "limit 1 digits two"),
        ("--recipe x", "recipe x cifar"),
        ("--device tpu", "device tpu"),
        ("--data nowhere", "nowhere digits folder"),
        ("--alpha-min 1 0.4 --data nowhere", "nowhere digits folder"),
        ("--out /dev/null/run", "/dev/null/run /dev/null"),
        ("--alpha-min 1 0.4 --out /dev/null/runs", "/dev/null/runs /dev/null"),
        ("--model vit-b", "--model"),
    ],
)
def test_a_mistake_in_a_study_gets_one_line_and_writes_nothing(arguments, words, clean, capsys):
    text = complaint(capsys, *flags(resnet_decay), *arguments.split(), script=resnet_decay)
    assert all(word in text for word in words.split()), text
    assert list(clean.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--alpha-min 1.5", "alpha_min 1.5 [0, 1]"),
        ("--patch-size 5", "patch_size 5 16x16"),
        ("--image-size", "image_size none"),
        ("--width 17", "heads 2 width 17"),
        ("--width 9 --heads 3", "width even 9"),
        ("--depth 3", "depth even 3"),
        ("--depth 0", "depth 0"),
        ("--heads 3", "heads 3 width 16"),
        ("--epochs 0", "epochs 0"),
        ("--lr nan", "lr nan"),
        ("--warmup-steps -1", "warmup_steps -1"),
        ("--ema 1", "ema 1"),
        ("--label-dropout 1", "label_dropout 1"),
        ("--betas 0.9 1", "betas 0.9 1"),
        ("--sampler euler", "sampler dpm-solver ode sde euler"),
        ("--sampler-steps 0", "sampler_steps 0"),
        ("--sampler-steps 1", "sampler_steps 1 2 or more"),
        ("--guidance 0.5", "guidance 0.5 classes --conditional"),
        ("--guidance nan --conditional", "guidance nan"),
        ("--guidance -2 --conditional", "guidance -2"),
        ("--fid-samples -1", "fid_samples -1"),
        ("--fid-samples 1", "fid_samples 1"),
        ("--fid-samples 10 --fid-weights nowhere.pth", "fid_weights nowhere.pth torch-fidelity"),
        ("--kid", "kid --fid-samples"),
        ("--precision-recall", "precision_recall --fid-samples"),
        ("--probe-times", "probe_times none"),
        ("--probe-times 0.1 1.5", "probe_times 1.5"),
        ("--probe-times 0.1 0.1", "probe_times differ"),
        ("--sample nowhere", "sample nowhere uvit.py"),
        ("--sample nowhere --label -1", "label -1"),
        ("--accumulate 51", "accumulate 51 50"),
        ("--model vit-b", "model vit-b micro"),
        ("--recipe x", "recipe x latents"),
        ("--device tpu", "device tpu"),
        ("--data nowhere", "nowhere digits folder"),
        ("--vae ./nowhere", "vae ./nowhere"),
        ("--out /dev/null/run", "/dev/null/run /dev/null"),
    ],
)
def test_a_mistake_in_diffusion_gets_one_line_and_writes_nothing(arguments, words, clean, capsys):
    tiny = [] if "--sample" in arguments else flags(uvit)
    text = complaint(capsys, *tiny, *arguments.split(), script=uvit)
    assert all(word in text for word in words.split()), text
    assert list(clean.iterdir()) == []


@pytest.mark.parametrize(
    "script, said",
    [
        (mae, "alpha_min must lie in [0, 1], or be auto"),
        (resnet_decay, "alpha_min must lie in [0, 1]"),
        (uvit, "alpha_min must lie in [0, 1], or be auto"),
    ],
)
def test_a_mistake_ends_the_process_with_exit_code_2(script, said, clean):
    code, out, error = run(*flags(script, alpha_min=2), script=f"{script.__name__}.py")
    assert (code, out) == (2, "")
    assert error == f"{script.__name__}.py: {said}, not 2.0 (--help lists every flag)\n"


def test_no_network_for_a_named_set_says_how_to_get_it(clean):
    closed = {
        f"{name}{suffix}": "http://127.0.0.1:9"
        for name in ("http", "https", "HTTP", "HTTPS")
        for suffix in ("_proxy", "_PROXY")
    }
    code, _, error = run("--data", "cifar10", **closed)
    assert code == 2 and len(error.strip().splitlines()) == 1
    assert "cifar10" in error and "data" in error and "digits" in error
    assert list(clean.iterdir()) == []


@pytest.mark.parametrize("splits, missing", [(("train",), "val"), (("val",), "train"), ((), "train")])
def test_a_folder_without_a_split_is_named(splits, missing, clean, capsys):
    (clean / "pets").mkdir()
    folder_of_images(clean / "pets", splits=splits)
    text = complaint(capsys, *flags(data="./pets"))
    assert "pets" in text and missing in text
    assert [path.name for path in clean.iterdir()] == ["pets"]


def test_a_folder_without_images_is_named(clean, capsys):
    folder_of_images(clean / "pets", count=0)
    assert "pets/train" in complaint(capsys, *flags(data="./pets"))
    assert [path.name for path in clean.iterdir()] == ["pets"]


def test_a_test_class_that_train_lacks_is_named(clean, capsys):
    folder_of_images(clean / "pets")
    (clean / "pets/val/dog").rename(clean / "pets/val/wolf")
    assert "'wolf'" in complaint(capsys, *flags(data="./pets"))
    assert not (clean / "runs").exists()


def test_an_unreadable_image_is_named_and_can_be_left_out(clean, capsys):
    folder_of_images(clean / "pets")
    (clean / "pets/train/cat/2.png").write_bytes(b"not a picture")
    text = complaint(capsys, *flags(data="./pets", image_size=16))
    assert "pets/train/cat/2.png" in text and "--skip-bad-images" in text
    assert not (clean / "runs").exists() and not list(clean.rglob("*.npy")) and not list(clean.rglob("*.tmp"))
    assert mae.main([*flags(data="./pets", image_size=16), "--skip-bad-images"]) == 0
    assert "7 train and 8 test" in capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_foreign_folder_is_not_written_to(script, clean, capsys):
    (clean / "thesis").mkdir()
    (clean / "thesis/chapter.txt").write_text("mine")
    assert "thesis" in complaint(capsys, *flags(script, out="thesis"), script=script)
    assert "thesis" in complaint(capsys, *flags(script, out="thesis"), "--overwrite", script=script)
    assert [path.name for path in (clean / "thesis").iterdir()] == ["chapter.txt"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_foreign_folder_with_a_config_is_not_a_run(script, clean, capsys):
    (clean / "model").mkdir()
    (clean / "model/config.json").write_text('{"hidden_size": 768}')
    for more in ([], ["--overwrite"]):
        assert "not a run's folder" in complaint(capsys, *flags(script, out="model"), *more, script=script)
    assert (clean / "model/config.json").read_text() == '{"hidden_size": 768}'


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_finished_run_is_shown_without_its_checkpoint_and_only_under_its_settings(
    script, clean, capsys, tmp_path_factory
):
    finished_run(script, clean / "run", tmp_path_factory)
    (clean / "run/checkpoint.pt").unlink()
    before = (clean / "run/result.json").read_bytes()
    assert script.main(flags(script, out="run")) == 0
    assert "is finished" in capsys.readouterr().out
    assert "lr" in complaint(capsys, *flags(script, out="run", lr=0.5), script=script)
    assert (clean / "run/result.json").read_bytes() == before


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"script": "mae"}', '{"script": "resnet_decay"}', '{"linear": 3', b"\xff\xfe", None]
)
def test_a_damaged_result_or_log_is_made_again_from_the_checkpoint(script, content, clean, tmp_path_factory):
    finished_run(script, clean / "run", tmp_path_factory)
    result = json.loads((clean / "run/result.json").read_text())
    for name in ("result.json", "metrics.jsonl"):
        (clean / "run" / name).unlink()
        if content is not None:
            (clean / "run" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert script.main(flags(script, out="run")) == 0
    again = json.loads((clean / "run/result.json").read_text())
    for name in ("loss", "effective_rank", {resnet_decay: "accuracy"}.get(script, "per_layer")):
        assert again[name] == result[name]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_folder_that_changed_under_a_run_is_not_gone_on_with(script, clean, capsys, monkeypatch):
    folder_of_images(clean / "pets")
    arguments = flags(script, data="./pets", image_size=16, out="run")
    with monkeypatch.context() as patched:
        patched.setattr(
            script, "log", lambda config, records, board=None: records and 1 / (2 - records[-1]["epoch"])
        )  # stopped in the second epoch
        with pytest.raises(ZeroDivisionError):
            script.main(arguments)
    Image.new("RGB", (20, 20)).save(clean / "pets/train/cat/new.png")
    assert "8 training images, and ./pets now has 9" in complaint(capsys, *arguments, script=script)
    assert script.main([*arguments, "--overwrite"]) == 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_folder_spelled_otherwise_is_the_same_run(script, clean, capsys):
    folder_of_images(clean / "pets")
    assert script.main(flags(script, data="./pets", image_size=16)) == 0
    assert script.main(flags(script, data=str(clean / "pets") + "/", image_size=16)) == 0
    assert "is finished" in capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(script, clean, capsys, monkeypatch):
    from pathlib import Path

    write, calls = Path.write_bytes, []

    def full(path, content):
        calls.append(path.name)
        if calls.count("checkpoint.pt.tmp") > (
            1 if script is resnet_decay else 2
        ):  # the others save before the first step
            raise OSError(28, "No space left on device", str(path))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    capsys.readouterr()
    assert script.main(flags(script, out="run")) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and "No space left" in error[0]
    assert not list((clean / "run").glob("*.tmp"))
    assert torch.load(clean / "run/checkpoint.pt", weights_only=True)["state"]["step"] == 4


@pytest.mark.parametrize("script", SCRIPTS)
def test_features_that_are_not_finite_are_one_line(script, clean, capsys, monkeypatch):
    """Weights can be finite, and so large that features are not."""
    rates = iter([0.01] * 7 + [math.inf])
    monkeypatch.setattr(script, "learning_rate", lambda *_: next(rates))
    monkeypatch.setattr(script, "check_finite", lambda *_: None)
    capsys.readouterr()
    assert script.main(flags(script, out="run")) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and "features are not finite" in error[0] and "--lr" in error[0]


@pytest.mark.parametrize("script", SCRIPTS)
def test_memory_that_does_not_suffice_is_one_line(script, clean, capsys, monkeypatch):
    def exhausted(*_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:129] DefaultCPUAllocator: can't allocate memory\n more")

    monkeypatch.setattr(script, "build", exhausted)
    capsys.readouterr()
    assert script.main(flags(script, out="run")) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and "out of memory" in error[0] and "--batch-size" in error[0]
    monkeypatch.setattr(script, "build", lambda *_: [][0])
    with pytest.raises(IndexError):  # a fault of ours is not hidden
        script.main(flags(script, out="run"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_same_settings_said_otherwise_are_the_same_run(script, clean, capsys, tmp_path_factory):
    finished_run(script, clean / "run", tmp_path_factory)
    assert script.main(flags(script, out="run", recipe="digits")) == 0
    assert "is finished" in capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS)
def test_another_scripts_run_is_named_as_such(script, clean, capsys, tmp_path_factory):
    other = SCRIPTS[SCRIPTS.index(script) - 1]
    finished_run(other, clean / "run", tmp_path_factory)
    text = complaint(capsys, *flags(script, out="run"), script=script)
    assert f"script {other.__name__}, not {script.__name__}" in text


def test_a_name_with_a_line_break_is_still_one_line(clean, capsys):
    assert "no data set and no folder" in complaint(capsys, *flags(data="two\nlines"))
    assert "no data set and no folder is called ''" in complaint(capsys, *flags(data=""))
    (clean / "two\nlines").mkdir()
    assert "must hold train" in complaint(capsys, *flags(data="two\nlines"))


def test_narrow_networks_on_wide_images_do_not_crash(clean):
    """In channels-last memory oneDNN's gradient of a narrow strided 1×1 convolution writes past its workspace."""
    arguments = flags(resnet_decay, image_size=64, limit=8, epochs=1)
    code, _, error = run(*arguments, script="resnet_decay.py")
    assert (code, error) == (0, "")


def test_a_reader_that_leaves_early_is_no_traceback(clean):
    command = f"{sys.executable} {ROOT / 'mae.py'} {' '.join(flags())} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


class Hostile:
    """A pickle that would make a file when it is loaded."""

    def __reduce__(self):
        return open, ("opened", "w")


def truncated(content):
    return content[: len(content) // 2]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "foreign", "hostile", "other shapes", "numbers"])
def test_a_damaged_or_foreign_checkpoint_is_named_and_kept(script, damage, clean, capsys, tmp_path_factory):
    finished_run(script, clean / "run", tmp_path_factory)
    (clean / "run/result.json").unlink()
    file = clean / "run/checkpoint.pt"
    good = torch.load(file, weights_only=True)
    if damage == "truncated":
        file.write_bytes(truncated(file.read_bytes()))
    elif damage in ("empty", "text"):
        file.write_text("" if damage == "empty" else "hello")
    elif damage == "foreign":
        torch.save(torch.nn.Linear(2, 2).state_dict(), file)
    elif damage == "hostile":
        torch.save({**good, "state": Hostile()}, file)
    elif damage == "other shapes":
        torch.save({**good, "model": {name: value.flatten()[:1] for name, value in good["model"].items()}}, file)
    elif damage == "numbers":
        torch.save([1, 2, 3], file)
    before = file.read_bytes()
    text = complaint(capsys, *flags(script, out="run"), script=script)
    assert "checkpoint.pt" in text and "delete that folder" in text and "--overwrite" in text
    assert file.read_bytes() == before
    assert not (clean / "opened").exists()
    if damage == "truncated":
        assert script.main([*flags(script, out="run"), "--overwrite"]) == 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_checkpoint_of_another_config_is_not_gone_on_with(script, clean, capsys):
    assert script.main(flags(script, out="run", alpha_min=0.5)) == 0
    assert "alpha_min 0.5, not 0." in complaint(capsys, *flags(script, out="run"), script=script)


# ---- Runs compared --------------------------------------------------------------------------------------------------


def test_finished_runs_of_every_script_are_compared(clean, tmp_path_factory, capsys):
    for script in SCRIPTS:
        finished_run(script, clean / script.__name__, tmp_path_factory)
    capsys.readouterr()
    assert rank.main([script.__name__ for script in SCRIPTS] + ["--out", "all"]) == 0
    assert not capsys.readouterr().err
    groups = json.loads((clean / "all.json").read_text())
    for script in SCRIPTS:
        (row,) = groups[f"{script.__name__} digits"]["rows"]
        result = json.loads((clean / script.__name__ / "result.json").read_text())
        assert all(row[name] == result[name] for name in ("alpha_min", "seed", "loss", "effective_rank"))
