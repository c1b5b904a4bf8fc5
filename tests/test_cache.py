"""The cache of decoded images: made once, whoever comes; gone on with after a kill; never trusted blindly, never run."""

import json
import os
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from conftest import ROOT, flags
from PIL import Image
from test_cli import folder_of_images
from test_cli import run as command

import probe


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
