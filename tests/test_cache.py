"""The cache of decoded images: made once, whoever comes; gone on with after a kill; never trusted blindly, never run."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from multiprocessing.pool import ThreadPool

import numpy as np
import pytest
import torch
from conftest import ROOT, flags
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_image
from test_cli import folder_of_images
from test_cli import run as command

import mae
import probe
import resnet_decay
import uvit


def noisy_folder(folder, count=12, size=(20, 16)):
    """Two classes of `count` images of noise each in train, and two in val."""
    random = np.random.RandomState(0)
    for split, many in (("train", count), ("val", 2)):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for j in range(many):
                pixels = random.randint(0, 256, (size[1], size[0], 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{j:02}.png")
    return folder


def load(clean, **more):
    return probe.load_images(str(clean / "set"), clean / "root", (8, 8), **more)


def reads(monkeypatch):
    """The paths that are decoded from now on."""
    seen, read = [], probe._read
    monkeypatch.setattr(probe, "_read", lambda path, size: seen.append(path) or read(path, size))
    return seen


def test_interrupted_decoding_goes_on_where_it_was(clean, monkeypatch):
    noisy_folder(clean / "set")
    expected = load(clean).train.clone()
    for file in (clean / "root/cache").iterdir():
        file.unlink()
    clock = iter(range(0, 10**6, 3))  # three seconds a look: every image's row is noted
    monkeypatch.setattr(probe.time, "monotonic", lambda: next(clock))
    write, notes = probe._write, []

    def interrupted(path, text):
        write(path, text)
        notes.append(text)
        if len(notes) == 9:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(probe, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(clean)
    left = {path.suffix for path in (clean / "root/cache").iterdir()}
    assert ".partial" in left and ".npy" not in left
    seen = reads(monkeypatch)
    assert torch.equal(load(clean).train, expected)
    assert len([path for path in seen if "train" in path.parts]) == 24 - 9
    assert {path.suffix for path in (clean / "root/cache").iterdir()} == {".npy", ".json"}


def test_bad_images_of_an_interrupted_decoding_are_remembered(clean, monkeypatch):
    noisy_folder(clean / "set")
    for name in ("cat/03", "dog/05"):
        (clean / f"set/train/{name}.png").write_bytes(b"no image")
    expected = load(clean, skip_bad=True)
    expected = (expected.train.clone(), expected.train_labels)
    for file in (clean / "root/cache").iterdir():
        file.unlink()
    clock = iter(range(0, 10**6, 3))
    monkeypatch.setattr(probe.time, "monotonic", lambda: next(clock))
    write, notes = probe._write, []
    with monkeypatch.context() as patch:
        patch.setattr(
            probe, "_write",
            lambda path, text: (write(path, text), notes.append(text), 1 / (0 if len(notes) == 7 else 1)),
        )  # fmt: skip
        with pytest.raises(ZeroDivisionError):
            load(clean, skip_bad=True)
    assert json.loads(notes[-1]) == [7, [3]]
    found = load(clean, skip_bad=True)
    assert torch.equal(found.train, expected[0]) and torch.equal(found.train_labels, expected[1])


@pytest.mark.parametrize(
    "note", ["", "[]", "[5]", "[99, []]", "[-1, []]", '["a", []]', "[5, [7]]", "[5, [3, 1]]", "null"]
)
def test_a_note_that_does_not_fit_is_not_gone_by(note, clean, monkeypatch):
    noisy_folder(clean / "set", count=4)
    expected = load(clean).train.clone()
    for file in (clean / "root/cache").glob("*.npy"):
        file.rename(file.with_suffix(".partial"))
        file.with_suffix(".progress.json").write_text(note)
    seen = reads(monkeypatch)
    assert torch.equal(load(clean).train, expected) and len(seen) == 12


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((24, 3, 8, 8), dtype=np.float32),
        np.zeros((23, 3, 8, 8), dtype=np.uint8),
        np.zeros((24, 3, 8, 4), dtype=np.uint8),
        np.zeros((24, 192), dtype=np.uint8),
    ],
    ids=["dtype", "count", "size", "shape"],
)  # fmt: skip
def test_a_cache_of_another_form_is_made_again(array, clean):
    noisy_folder(clean / "set")
    expected = load(clean).train.clone()
    (file,) = [f for f in (clean / "root/cache").glob("*.npy") if f.stat().st_size > 24 * 192]
    np.save(file, array)
    assert torch.equal(load(clean).train, expected)


class Hostile:
    def __reduce__(self):
        return (os.system, ("touch ran",))


def test_a_cache_that_would_run_code_runs_nothing_and_is_made_again(clean):
    noisy_folder(clean / "set")
    expected = load(clean).train.clone()
    for file in (clean / "root/cache").glob("*.npy"):
        np.save(file, np.array([Hostile()], dtype=object), allow_pickle=True)
    assert torch.equal(load(clean).train, expected)
    for file in (clean / "root/cache").glob("*.npy"):
        file.write_bytes(pickle.dumps(Hostile()))
    assert torch.equal(load(clean).train, expected)
    assert not (clean / "ran").exists()


BUILD = """
import sys, time
import probe
read, seen = probe._read, []
probe._read = lambda path, size: (time.sleep(0.02), seen.append(path), read(path, size))[2]
images = probe.load_images("set", "root", (8, 8))
print("decoded", len(seen), int(images.train.sum()))
"""


def test_of_two_processes_at_once_one_makes_the_cache_and_the_other_waits(clean):
    noisy_folder(clean / "set", count=60)
    both = [
        subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        for _ in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert all(process.returncode == 0 for process in both)
    (one, total), (other, same) = (map(int, out.strip().split("decoded ")[1].split()) for out in outputs)
    assert one + other == 124 and total == same
    assert {path.suffix for path in (clean / "root/cache").iterdir()} == {".npy", ".json"}


def test_a_disk_that_fills_is_one_line_and_leaves_no_half_cache(clean):
    """A limit on the size of a file in place of a small disk: the cache needs 24 · 192 bytes and more."""
    noisy_folder(clean / "set")
    done = subprocess.run(
        [sys.executable, str(ROOT / "mae.py"), *flags(data="set", image_size=16, limit=20)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: __import__("resource").setrlimit(__import__("resource").RLIMIT_FSIZE, (4096, 4096)),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("mae.py: can't write the cache of decoded images") and "--root" in line
    assert not list((clean / "data/cache").glob("*.partial")) and not (clean / "runs").exists()


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="it is Linux that tells")
def test_images_stay_in_the_memory_map(clean):
    noisy_folder(clean / "set")
    data = load(clean)
    mapped = []
    for line in open("/proc/self/maps"):
        if line.rstrip().endswith(".npy"):
            mapped.append([int(end, 16) for end in line.split()[0].split("-")])
    for images in (data.train, data.test):
        assert any(low <= images.data_ptr() < high for low, high in mapped)


STRANGE = {  # every kind of file that may stand among images: whether it can be read
    "truncated.jpg": False, "empty.png": False, "text.jpg": False, "one_by_one.png": True, "long.png": True,
    "deep.png": True, "moving.gif": True, "png_called.jpg": True, "картинка 画像 ü.png": True, "bomb.png": False,
}  # fmt: skip


def strange_folder(folder):
    """A data set among whose train images stand the files of STRANGE, a folder named like an image and links that loop."""
    folder_of_images(folder, count=2)
    place = folder / "train/cat"
    gradient = np.arange(300 * 300 * 3, dtype=np.uint32).reshape(300, 300, 3)
    Image.fromarray((gradient % 251).astype(np.uint8)).save(place / "whole.jpg")
    (place / "truncated.jpg").write_bytes((place / "whole.jpg").read_bytes()[:3000])
    (place / "whole.jpg").unlink()
    (place / "empty.png").write_bytes(b"")
    (place / "text.jpg").write_text("a letter")
    Image.new("RGB", (1, 1), (9, 9, 9)).save(place / "one_by_one.png")
    Image.new("RGB", (20_000, 20), (9, 9, 9)).save(place / "long.png")
    Image.fromarray(np.full((30, 30), 40_000, dtype=np.uint16)).save(place / "deep.png")
    frames = [Image.new("P", (20, 20), i) for i in range(3)]
    frames[0].save(place / "moving.gif", save_all=True, append_images=frames[1:])
    Image.new("RGB", (20, 20), (9, 9, 9)).save(place / "other.png")
    (place / "other.png").rename(place / "png_called.jpg")
    Image.new("RGB", (20, 20), (9, 9, 9)).save(place / "картинка 画像 ü.png")
    Image.new("1", (20_000, 20_000)).save(place / "bomb.png")  # 400 million pixels
    (place / "folder.png").mkdir()
    os.symlink(place, place / "round")
    return folder


def test_files_of_every_strange_kind_are_read_or_named(clean):
    strange_folder(clean / "set")
    names = [path.name for path in sorted((clean / "set/train/cat").iterdir()) if path.is_file()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(probe.BadInput) as refused:
            load(clean)
        first_bad = min(name for name, good in STRANGE.items() if not good)
        assert first_bad in str(refused.value) and "\n" not in str(refused.value)
        data = load(clean, skip_bad=True)
    good = [name for name in names if STRANGE.get(name, True)]
    assert (data.train_labels == 0).sum() == len(good) == 2 + sum(STRANGE.values())
    dark = data.train[good.index("deep.png")]
    assert (dark == round(40_000 / 257)).all()
    assert (data.train[good.index("long.png")] == 9).all() and (data.train[good.index("one_by_one.png")] == 9).all()


def test_strange_files_are_one_line_on_the_command_line(clean):
    strange_folder(clean / "set")
    code, out, error = command(*flags(data="set", image_size=16, limit=12))
    assert code == 2 and len(error.strip().splitlines()) == 1 and "--skip-bad-images" in error
    link = clean / "set/train/cat/loop.png"
    os.symlink(link, link)
    code, out, error = command(*flags(data="set", image_size=16, limit=12), "--skip-bad-images")
    assert code == 0, error
    assert "can't be read and are left out" in out and error == ""


# ---- Held for random crops ------------------------------------------------------------------------------------------


def plain(path, size):
    """Pillow's own decoding of a file, (3, h, w)."""
    with Image.open(path) as image:
        fitted = ImageOps.fit(image.convert("RGB"), (size[1], size[0]), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(fitted).copy()).permute(2, 0, 1)


@pytest.mark.parametrize(
    "size, crops, held",
    [
        ((224, 224), True, (256, 256)),
        ((224, 224), False, (224, 224)),
        ((96, 70), True, (110, 80)),
        ((64, 64), True, (64, 64)),
        ((16, 96), True, (16, 96)),
    ],
)
def test_training_images_for_crops_are_held_at_8_sevenths(size, crops, held, clean):
    folder = noisy_folder(clean / "set", count=2, size=(90, 80))
    data = probe.load_images(str(folder), clean / "root", size, crops=crops)
    files = sorted((folder / "train").rglob("*.png"))
    assert torch.equal(data.train, torch.stack([plain(file, held) for file in files]))
    assert torch.equal(data.test, torch.stack([plain(file, size) for file in sorted((folder / "val").rglob("*.png"))]))


def test_sets_that_are_no_folder_are_held_at_their_size(clean):
    assert probe.load_images("digits", "data", (72, 72), 10, crops=True).train.shape == (10, 1, 72, 72)


def test_features_are_those_of_images_fitted_to_the_size():
    images = torch.randint(256, (7, 3, 16, 24), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    model = torch.nn.Identity()

    def layer_tokens(x):
        yield x.flatten(1)[:, None].float()

    found = probe.features(model, layer_tokens, images, batch_size=3, size=(8, 10))["mean"]
    assert torch.equal(found[:, 0], probe.fit(images, (8, 10)).flatten(1).float())
    assert probe.features(model, layer_tokens, images)["mean"].shape == (7, 1, 3 * 16 * 24)


@pytest.mark.parametrize("script, held", [(mae, 80), (resnet_decay, 80), (uvit, 70)])
def test_crops_are_taken_of_the_larger_images_and_probes_see_the_size(script, held, clean, monkeypatch, no_probes):
    noisy_folder(clean / "set", count=6, size=(90, 80))
    asked, seen, load_images, augment = [], [], probe.load_images, probe.augment
    monkeypatch.setattr(probe, "load_images", lambda *a, **k: asked.append(load_images(*a, **k)) or asked[-1])
    monkeypatch.setattr(probe, "augment", lambda x, *a, **k: seen.append(x.shape[2]) or augment(x, *a, **k))
    settings = {"patch_size": 35, "recipe": "imagenet"} if script is not resnet_decay else {"recipe": "imagenet"}
    settings |= {"sampler": "sde", "sampler_steps": 2} if script is uvit else {}
    line = flags(script, data="set", image_size=70, limit=12, batch_size=6, epochs=1, out="run", **settings)
    if script is not resnet_decay:
        line[line.index("--warmup-epochs" if script is mae else "--warmup-steps") + 1] = "1"
    assert script.main(line) == 0
    assert asked[0].train.shape[2:] == (held, held) and asked[0].test.shape[2:] == (70, 70)
    assert seen == ([held] * 2 if script is not uvit else [])
    if script is mae:  # evaluated on the same cache
        before = sorted(path.name for path in (clean / "data/cache").iterdir())
        assert mae.main(["--evaluate", "run", "--device", "cpu"]) == 0
        assert sorted(path.name for path in (clean / "data/cache").iterdir()) == before


def test_a_protocol_on_all_images_copies_none_of_them(clean, monkeypatch):
    noisy_folder(clean / "set", count=6)
    run = mae.Config(data="set", image_size=16, recipe="cifar", model="micro")
    data = probe.load_images(str(clean / "set"), clean / "root", (16, 16))
    model = mae.build(run, data.train, torch.device("cpu"))
    given = []
    monkeypatch.setattr(probe, "imagenet_probe", lambda features_of, images, *rest, **how: given.append(images) or 1.0)
    for limit in (None, 4):
        study = mae.Study(evaluate=("run",), protocol=("linear-imagenet",), limit=limit)
        mae.trained_accuracy("linear-imagenet", run, model, data, study)
    assert given[0].data_ptr() == data.train.data_ptr() and len(given[0]) == 12
    assert len(given[1]) == 4


# ---- Checked before use ---------------------------------------------------------------------------------------------


def train_cache(clean):
    """The .npy file of the train images."""
    return max((clean / "root/cache").glob("*.npy"), key=lambda file: file.stat().st_size)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1}, {"key": "0" * 20}, {"count": 23}, {"size": [8, 9]}, {"bad": [24]}, {"bad": [3, 1]}, {"bad": [True]},
        {"bad": None}, {"checksum": 0}, {"more": 1}, {"bad": ...}, {"checksum": ...}, {"version": ...},
    ],
    ids=str,
)  # fmt: skip
def test_a_header_that_says_otherwise_is_not_trusted(change, clean, monkeypatch):
    noisy_folder(clean / "set")
    expected = load(clean).train.clone()
    file = train_cache(clean).with_suffix(".json")
    header = json.loads(file.read_text()) | change
    file.write_text(json.dumps({name: value for name, value in header.items() if value is not ...}))
    seen = reads(monkeypatch)
    assert torch.equal(load(clean).train, expected) and len(seen) == 24
    assert torch.equal(load(clean).train, expected) and len(seen) == 24


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, '"bad"', "\xff"])
def test_a_header_that_is_none_is_made_again(text, clean):
    noisy_folder(clean / "set", count=2)
    expected = load(clean).train.clone()
    train_cache(clean).with_suffix(".json").write_text(text, encoding="latin-1")
    assert torch.equal(load(clean).train, expected)


def test_a_cache_copied_half_or_of_another_folder_is_not_trusted(clean, monkeypatch):
    noisy_folder(clean / "set", count=40)
    expected = load(clean).train.clone()
    file, seen = train_cache(clean), reads(monkeypatch)
    whole = file.read_bytes()
    half = len(whole) // 2
    for damaged in (whole[:-1], whole[:half] + bytes(len(whole) - half), whole[:64], whole + b"1"):
        file.write_bytes(damaged)
        assert torch.equal(load(clean).train, expected)
    assert len(seen) == 3 * 80  # what only follows the array does no harm
    random = np.random.RandomState(1)
    np.save(file, random.randint(0, 256, (80, 3, 8, 8), dtype=np.uint8))
    assert torch.equal(load(clean).train, expected) and len(seen) == 4 * 80


def test_a_map_larger_than_all_memory_is_read(clean):
    """A file with holes, four times as large as memory and swap."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rows = 4 * pages // 2**20 + 2**14
    try:
        written = np.lib.format.open_memmap("huge.npy", mode="w+", dtype=np.uint8, shape=(rows, 2**20))
    except OSError:
        pytest.skip("this file system has no such files")
    written[-1, -1] = 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = probe.mapped(clean / "huge.npy")
    assert read.shape == (rows, 2**20) and read[-1, -1] == 7 and read[rows // 2, 5] == 0


# ---- Interrupted ----------------------------------------------------------------------------------------------------


def every_image_noted(monkeypatch):
    clock = iter(range(0, 10**6, 3))  # three seconds a look
    monkeypatch.setattr(probe.time, "monotonic", lambda: next(clock))


def test_an_unreadable_image_does_not_cost_what_was_decoded_before_it(clean, monkeypatch):
    noisy_folder(clean / "set")
    (clean / "set/train/dog/07.png").write_bytes(b"no image")
    with monkeypatch.context() as patch:
        every_image_noted(patch)
        with pytest.raises(probe.BadInput, match="07.png"):
            load(clean)
    seen = reads(monkeypatch)
    data = load(clean, skip_bad=True)
    assert [path.name for path in seen if "train" in path.parts] == ["07.png", "08.png", "09.png", "10.png", "11.png"]
    files = sorted((clean / "set/train").rglob("*.png"))
    files.remove(clean / "set/train/dog/07.png")
    assert torch.equal(data.train, torch.stack([plain(file, (8, 8)) for file in files]))
    assert {path.suffix for path in (clean / "root/cache").iterdir()} <= {".npy", ".json", ".lock"}


SLOW = """
import itertools, os, signal, sys, time
import probe, mae
clock, read = itertools.count(0, 3), probe._read
probe.time = type("Time", (), {"monotonic": lambda: next(clock)})
def slow(path, size):
    time.sleep(0.02)
    print("decoding", path.name, flush=True)
    return read(path, size)
probe._read = slow
sys.exit(mae.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number, code", [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_decoding_that_is_killed_goes_on(number, code, clean, monkeypatch):
    noisy_folder(clean / "set", count=100)
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *flags(data="set", image_size=16, out="run")], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    for _ in range(100):
        process.stdout.readline()
    process.send_signal(number)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert len(error.splitlines()) == (0 if number == signal.SIGKILL else 1), error
    (note,) = (clean / "data/cache").glob("*.progress.json")
    done, bad = json.loads(note.read_text())
    assert 20 <= done < 200 and bad == []
    seen = reads(monkeypatch)
    data = probe.load_images("set", "data", (16, 16), flags_limit())
    assert len([path for path in seen if "train" in path.parts]) == len(data.train) - done
    files = sorted((clean / "set/train").rglob("*.png"))
    assert torch.equal(data.train, torch.stack([plain(file, (16, 16)) for file in files]))


def flags_limit():
    """The --limit of the smallest run."""
    return mae.tyro.cli(mae.Study, args=flags()).limit


def test_a_full_disk_gives_its_space_back_even_after_a_note(clean, monkeypatch):
    noisy_folder(clean / "set")
    every_image_noted(monkeypatch)
    write, notes = probe._write, []

    def full(path, text):
        notes.append(path)
        if len(notes) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, text)

    monkeypatch.setattr(probe, "_write", full)
    with pytest.raises(probe.BadInput, match="No space left on device.*--root"):
        load(clean)
    assert {path.suffix for path in (clean / "root/cache").iterdir()} <= {".lock"}


def test_a_disk_too_small_for_the_latents_is_one_line(clean, monkeypatch):
    """Their space is asked for before the first of them is written."""
    vae = torch.nn.Linear(1, 1)
    vae.config = types.SimpleNamespace(scaling_factor=1.0)
    monkeypatch.setattr(uvit, "encode", lambda vae, images: torch.ones(len(images), 4, 8, 8))
    data = probe.load_images("digits", "data", (16, 16), 40)

    def fallocate(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fallocate, raising=False)
        with pytest.raises(probe.BadInput, match="No space left on device.*--root"):
            uvit.encoded(vae, data, clean)
    assert not list((clean / "cache").glob("*.npy")) and not list((clean / "cache").glob("*.tmp"))
    assert uvit.encoded(vae, data, clean).train.shape == (40, 2, 4, 8, 8)


@pytest.mark.parametrize("damage", [b"", b"garbage", b"\x93NUMPY\x01\x00\x05\x00((((("])
def test_damaged_latents_are_made_again(damage, clean, monkeypatch):
    vae = torch.nn.Linear(1, 1)
    vae.config = types.SimpleNamespace(scaling_factor=1.0)
    monkeypatch.setattr(uvit, "encode", lambda vae, images: images[:, :, :8, :8].float())
    data = probe.load_images("digits", "data", (16, 16), 40)
    expected = uvit.encoded(vae, data, clean).train.clone()
    for file in (clean / "cache").glob("latents-*.npy"):
        file.write_bytes(damage)
    assert torch.equal(uvit.encoded(vae, data, clean).train, expected)


# ---- Several at once ------------------------------------------------------------------------------------------------


def test_a_file_system_without_locks_is_done_without(clean, monkeypatch, capsys):
    fcntl = pytest.importorskip("fcntl")

    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    noisy_folder(clean / "set", count=2)
    assert len(load(clean).train) == 4 and "waiting" not in capsys.readouterr().out


def test_what_is_decoded_ahead_of_the_writer_is_bounded_and_comes_in_turn():
    started, counted = 0, threading.Lock()

    def work(item):
        nonlocal started
        with counted:
            started += 1
        return item

    with ThreadPool(4) as pool:
        for i, item in enumerate(probe._in_turn(pool, work, list(range(300)), chunks=3, chunk=8)):
            assert item == i
            if i in (0, 100):
                time.sleep(0.1)  # the threads do what they may
            assert started <= i + 1 + 4 * 8
        assert i == 299
        assert list(probe._in_turn(pool, work, [], chunks=3)) == []


# ---- Files ----------------------------------------------------------------------------------------------------------


def test_large_photographs_are_decoded_at_a_fraction_to_within_50_decibels(clean):
    """At 4 times the size and more; below that, Pillow's own bits."""
    photograph = Image.fromarray(load_sample_image("china.jpg"))
    decibels = []
    for enlarged, size in ((4, 224), (2, 224), (4, 512)):
        image = photograph.resize((640 * enlarged, 427 * enlarged), Image.Resampling.LANCZOS)
        image.save("photograph.jpg", quality=92)
        found = torch.from_numpy(probe._read(clean / "photograph.jpg", (size, size)).copy())
        error = (found.double() - plain("photograph.jpg", (size, size)).double()).square().mean()
        decibels.append(10 * torch.log10(255**2 / error).item())
    assert 50 < decibels[0] < 100 and decibels[1] == decibels[2] == float("inf"), decibels


def test_a_file_that_numpy_warns_of_is_read_in_silence(clean, capfd):
    folder = noisy_folder(clean / "set", count=2)
    values = np.full((20, 20), np.nan, dtype=np.float32)
    values[5:] = 40.0
    Image.fromarray(values).save(folder / "train/cat/02.tiff")
    with pytest.warns(RuntimeWarning):
        assert probe._read(folder / "train/cat/02.tiff", (8, 8)) is not None
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert len(load(clean).train) == 5
    assert not heard and capfd.readouterr().err == ""
