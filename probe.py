"""Labelled images in, "how good are these features?" out: data, augmentation, features, evaluation protocols.

A data set, wherever it comes from, is one uint8 tensor of images and one vector of labels, for train and for test:

    >>> data = probe.load_images("digits", root="data", size=(16, 16))       # built in, needs no download
    >>> data.train.shape, data.train_labels.shape
    (torch.Size([10059, 1, 16, 16]), torch.Size([10059]))

Features of every layer come from one pass, and all layers are probed at once:

    >>> train = probe.features(model, model.layer_tokens, data.train)["mean"]     # (images, layers, width)
    >>> test = probe.features(model, model.layer_tokens, data.test)["mean"]
    >>> probe.linear_probe(train, data.train_labels, (test, data.test_labels))    # percent, one number a layer
    >>> probe.knn(train, data.train_labels, test, data.test_labels)               # percent: weighted, majority

Shapes: n images, c channels, h height, w width, l layers, d feature width, b batch, t tokens.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm


class BadInput(ValueError):
    """A user's mistake: its one-line message says what is wrong, with the value, and what would be right."""


# ---- Several processes ----------------------------------------------------------------------------------------------
# torchrun starts a script N times. Each process does its share of every batch, and what all need is brought together.


def keep_memory(keep: bool = True) -> None:
    """Let this process keep the memory that it frees, where its C library can be told to (glibc).

    By default large tensors are given back to the system at every step, and their pages are cleared anew at the next: a
    sixth to a quarter of a training step's time on a CPU. Without `keep`, to what glibc's own rule comes to by itself.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: the largest that it takes
        library.mallopt(-1, 2**31 - 1 if keep else 64 << 20)  # M_TRIM_THRESHOLD


def training_flops(model: nn.Module, *inputs: Tensor) -> float:
    """Floating-point operations of a training step, for each of the images in `inputs`: three times a forward pass's.

    PyTorch counts those of products and convolutions, attention's among them; nothing else weighs.
    """
    training = model.training
    model.eval()  # no statistics are kept
    plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  # it does not see into fused attention
    with torch.no_grad(), plain, FlopCounterMode(display=False) as counter:
        model(*inputs)
    model.train(training)
    return 3.0 * counter.get_total_flops() / len(inputs[0])


def product_rate(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations a second of plain 8192×8192 products on a GPU, of which training takes its share; None on others."""
    if device.type != "cuda":
        return None
    x = torch.randn(8192, 8192, device=device, dtype=dtype)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(30):
        if i == 10:  # it is warm
            start.record()
        x @ x
    end.record()
    end.synchronize()
    return 20 * 2 * 8192**3 / (start.elapsed_time(end) / 1000)


@contextlib.contextmanager
def processes_joined(cuda: bool) -> Iterator[None]:
    """Under torchrun: meet the other processes (NCCL for CUDA's tensors, else gloo); only the first one prints."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    wait = datetime.timedelta(days=1)  # while the first process decodes or draws
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=wait)
    try:
        with contextlib.ExitStack() as quiet:
            if dist.get_rank() > 0:
                nowhere = quiet.enter_context(open(os.devnull, "w"))
                quiet.enter_context(contextlib.redirect_stdout(nowhere))
                quiet.enter_context(contextlib.redirect_stderr(nowhere))
            yield
    finally:
        dist.destroy_process_group()


def process() -> tuple[int, int]:
    """This process's number, and how many there are: (0, 1) without torchrun."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def share(count: int) -> slice:
    """This process's part of `count` things in a row; the parts differ by one at most."""
    number, processes = process()
    return slice(count * number // processes, count * (number + 1) // processes)


def summed(x: Tensor) -> Tensor:
    """The sum of every process's x."""
    if process()[1] > 1:
        x = x.clone()
        dist.all_reduce(x)
    return x


def gathered(x: Tensor, count: int) -> Tensor:
    """Every process's share of `count` rows, in a row: (count, …) from (its share, …)."""
    number, processes = process()
    if processes == 1:
        return x
    most = -(-count // processes)
    padded = torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
    parts = [torch.empty_like(padded) for _ in range(processes)]
    dist.all_gather(parts, padded)
    lengths = (count * (i + 1) // processes - count * i // processes for i in range(processes))
    return torch.cat([part[:length] for part, length in zip(parts, lengths)])


def of_any(flag: bool) -> bool:
    """Whether any process says so."""
    return summed(torch.tensor(int(flag))).item() > 0


def of_all(items: list) -> list:
    """Every process's list, joined in order."""
    if process()[1] == 1:
        return items
    lists = [None] * process()[1]
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


@contextlib.contextmanager
def first_process_first() -> Iterator[None]:
    """The others enter when the first process has left: it builds a cache, they find it."""
    number, processes = process()
    if number > 0:
        dist.barrier()
    try:
        yield
    finally:
        if number == 0 and processes > 1:
            dist.barrier()


# ---- Data -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """A data set. Test labels count in the train classes' names."""

    train: Tensor  # (n, c, h, w) uint8; larger than was asked for where `crops` were
    train_labels: Tensor  # (n,) int64
    test: Tensor  # (n, c, h, w) uint8
    test_labels: Tensor  # (n,) int64
    classes: tuple[str, ...]


# name: torchvision's class, and its arguments for train and for test
NAMED_SETS = {
    "cifar10": ("CIFAR10", {"train": True}, {"train": False}),
    "cifar100": ("CIFAR100", {"train": True}, {"train": False}),
    "mnist": ("MNIST", {"train": True}, {"train": False}),
    "fashion-mnist": ("FashionMNIST", {"train": True}, {"train": False}),
    "kmnist": ("KMNIST", {"train": True}, {"train": False}),
    "svhn": ("SVHN", {"split": "train"}, {"split": "test"}),
    "stl10": ("STL10", {"split": "train"}, {"split": "test"}),
}
IMAGE_FILES = {".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".gif", ".tif", ".tiff", ".webp"}


def load_images(
    data: str,
    root: str | Path,
    size: tuple[int, int],
    limit: int | None = None,
    skip_bad: bool = False,
    crops: bool = False,
) -> Images:
    """The data set `data` at `size` (height, width): short side resized, centre kept.

    `data` is "digits" (built in), a name of NAMED_SETS (torchvision's, under `root`, downloaded if need be), or a
    folder with train/<class>/* and val/<class>/* or test/<class>/*, which is decoded once into a cache under `root`.
    Files of a folder become RGB; the other sets keep their channels. `limit` keeps so many training images, evenly over
    the classes; `skip_bad` leaves unreadable files out. `crops`: random crops will be taken of a folder's training images,
    so these are held at 8/7 of a `size` above 64 pixels (256 for 224), and whoever wants them whole fits them to `size`.
    Images may be mapped from a file: copy them before you write to them. Raises BadInput for whatever of this can't be had.
    """
    if limit is not None and limit < 2:
        raise BadInput(f"limit {limit} leaves too few images of {data}: two or more are needed")
    with first_process_first():
        if data == "digits":
            images = _limited(_digits(size), limit)
        elif data in NAMED_SETS:
            images = _limited(_named(data, Path(root), size), limit)
        else:
            images = _folder(data, Path(root), size, limit, skip_bad, crops)
    if len(images.train) < 2:
        raise BadInput(f"{data} has {len(images.train)} training image: two or more are needed")
    return images


def evenly(labels: Tensor, limit: int | None) -> Tensor:
    """Indices, in order, of the first `limit` images chosen in turn from every class; all of them for None."""
    if limit is None or limit >= len(labels):
        return torch.arange(len(labels))
    by_class = torch.argsort(labels, stable=True)
    start_of_class = torch.searchsorted(labels[by_class], labels[by_class])
    turn = torch.arange(len(labels)) - start_of_class  # 0 for the first image of its class, 1 for the second, …
    return by_class[torch.argsort(turn, stable=True)][:limit].sort().values


def _limited(images: Images, limit: int | None) -> Images:
    if limit is None:
        return images
    kept = evenly(images.train_labels, limit)
    return Images(images.train[kept], images.train_labels[kept], images.test, images.test_labels, images.classes)


def _digits(size: tuple[int, int]) -> Images:
    """The built-in set: scikit-learn's 1,797 handwritten digits, each moved, scaled and turned at random.

    1,437 digits give 10,059 grey train images of 16×16, the other 360 give 2,000 for test: no digit is in both.
    Only +, −, ×, ÷ and rounding in float64, and a frozen random stream: the same bytes on every machine.
    """
    from sklearn.datasets import load_digits  # here, as it takes a second

    source = load_digits()
    random = np.random.RandomState(0)
    order = random.permutation(1797)
    train = np.tile(order[:1437], 7)
    test = np.tile(order[1437:], 6)[:2000]
    drawn = np.concatenate([train, test])
    n, side = len(drawn), 16

    def uniform(low: float, high: float) -> np.ndarray:
        return low + (high - low) * random.random_sample((n, 1, 1))

    zoom, down, right = uniform(0.45, 0.75), uniform(-2.5, 2.5), uniform(-2.5, 2.5)  # zoom: source pixels per pixel
    half_tangent = uniform(-0.13, 0.13)  # tan(θ/2), |θ| up to 15 degrees: sine and cosine without a library's rounding
    cosine = (1 - half_tangent * half_tangent) / (1 + half_tangent * half_tangent)
    sine = 2 * half_tangent / (1 + half_tangent * half_tangent)
    y, x = np.meshgrid(np.arange(side) - 7.5, np.arange(side) - 7.5, indexing="ij")
    y, x = y - down, x - right
    y, x = zoom * (cosine * y - sine * x) + 3.5, zoom * (sine * y + cosine * x) + 3.5

    padded = np.pad(source.images[drawn], ((0, 0), (1, 1), (1, 1)))  # a border of paper
    y, x = np.clip(y + 1, 0, 8.999), np.clip(x + 1, 0, 8.999)
    top, left = np.floor(y).astype(int), np.floor(x).astype(int)
    y, x = y - top, x - left
    i = np.arange(n)[:, None, None]
    upper = padded[i, top, left] * (1 - x) + padded[i, top, left + 1] * x
    lower = padded[i, top + 1, left] * (1 - x) + padded[i, top + 1, left + 1] * x
    values = (upper * (1 - y) + lower * y) * (255 / 16)  # ink is 0 … 16 in the source
    images = fit(torch.from_numpy(np.floor(values + 0.5).astype(np.uint8))[:, None], size)
    labels = torch.from_numpy(source.target[drawn].astype(np.int64))
    names = tuple(str(digit) for digit in range(10))
    return Images(images[: len(train)], labels[: len(train)], images[len(train) :], labels[len(train) :], names)


def _named(name: str, root: Path, size: tuple[int, int]) -> Images:
    from torchvision import datasets  # here, as it takes a second

    class_name, *splits = NAMED_SETS[name]
    dataset_class = getattr(datasets, class_name)

    def open_set(folder: Path, download: bool) -> list:
        with contextlib.redirect_stdout(None):  # torchvision announces every file
            return [dataset_class(str(folder), download=download, **split) for split in splits]

    try:
        sets = open_set(root, download=False)
    except Exception:  # torchvision: RuntimeError where files are missing, anything where they are damaged
        try:
            with tempfile.TemporaryDirectory() as staging:  # a download that fails leaves nothing under root
                open_set(Path(staging), download=True)
                shutil.copytree(staging, root, dirs_exist_ok=True)
            sets = open_set(root, download=False)
        except Exception as error:
            reason = " ".join(str(error).split())[:120]
            raise BadInput(
                f"{name} is not under {root} and could not be downloaded ({reason}): put torchvision's files for "
                f"{class_name} there, name a folder of images with a slash (--data ./{name}), or use --data digits, "
                "which needs no download"
            ) from error
    found = []
    for part in sets:
        images = torch.as_tensor(np.asarray(part.data))
        if images.ndim == 3:
            images = images[:, None]  # grey
        elif images.shape[-1] == 3:
            images = images.permute(0, 3, 1, 2).contiguous()
        labels = part.targets if hasattr(part, "targets") else part.labels
        found += [fit(images, size), torch.as_tensor(np.asarray(labels)).long()]
    classes = getattr(sets[0], "classes", range(int(found[1].max()) + 1))
    return Images(*found, tuple(str(c) for c in classes))


# ---- Folders of image files -----------------------------------------------------------------------------------------


def _folder(data: str, root: Path, size: tuple[int, int], limit: int | None, skip_bad: bool, crops: bool) -> Images:
    folder = Path(data).expanduser()
    if not data or not os.path.isdir(folder):
        known = ", ".join(["digits", *NAMED_SETS])
        raise BadInput(f"no data set and no folder is called {data!r}: use one of {known}, or a folder's path")
    try:
        splits = [
            folder / name for name in ("val", "test") if (folder / name).is_dir() and any((folder / name).iterdir())
        ]
        if not (folder / "train").is_dir() or not splits:
            raise BadInput(f"{folder} must hold train/<class>/* and val/<class>/* or test/<class>/*")
        test_folder = splits[0]
        train, test = _files_by_class(folder / "train"), _files_by_class(test_folder)
    except OSError as error:
        raise BadInput(f"{folder} can't be read ({error.strerror}: {error.filename})") from error
    unknown = sorted(test.keys() - train.keys())
    if unknown:
        raise BadInput(f"{test_folder} has {len(unknown)} classes that train does not have, {unknown[0]!r} the first")
    classes = tuple(sorted(train))

    loaded = []
    larger = size  # small files have no more pixels
    if crops and min(size) > 64:
        larger = tuple(round(side * 8 / 7) for side in size)
    for by_class, kept, held in ((train, limit, larger), (test, None, size)):
        files = [(path, label) for label, name in enumerate(classes) for path in by_class.get(name, [])]
        labels = torch.tensor([label for _, label in files])
        chosen = evenly(labels, kept)
        images, readable = _decoded([files[i][0] for i in chosen.tolist()], root / "cache", held, skip_bad)
        loaded += [images, labels[chosen][readable]]
    return Images(*loaded, classes)


def _files_by_class(folder: Path) -> dict[str, list[Path]]:
    """Image files under every class folder, at any depth, sorted; classes without one are left out."""
    found = {}
    for class_folder in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        paths = [Path(place) / name for place, _, names in os.walk(class_folder, onerror=_raise) for name in names]
        hidden = [any(part.startswith(".") for part in path.relative_to(folder).parts) for path in paths]
        paths = sorted(p for p, h in zip(paths, hidden) if p.suffix.lower() in IMAGE_FILES and not h)
        if paths:
            found[class_folder.name] = paths
    if not found:
        raise BadInput(f"{folder} has no image in a class folder: it must hold <class>/*.jpg, png, webp or the like")
    return found


def _raise(error: OSError) -> None:
    raise error


CACHE_VERSION = 2  # another number where files are decoded in another way: older caches are not used


def _decoded(files: list[Path], cache: Path, size: tuple[int, int], skip_bad: bool) -> tuple[Tensor, Tensor]:
    """All files as one memory-mapped tensor (n, 3, h, w) uint8, and the indices of the files that are in it.

    The cache's name is a hash of every file's path, size and time of change: a changed folder is decoded again. One
    process builds it and others that want it wait; what a killed one had decoded is not decoded again.
    """
    stamps = []
    for path in files:
        stat = path.stat() if path.exists() else None  # a link to nothing is an unreadable image
        stamps.append((str(path.absolute()), stat and stat.st_size, stat and stat.st_mtime_ns))
    key = hashlib.sha256(json.dumps([CACHE_VERSION, stamps, size]).encode()).hexdigest()[:20]
    form = {"version": CACHE_VERSION, "key": key, "count": len(files), "size": list(size)}
    images_file = cache / f"{key}.npy"
    cached = _cached(images_file, form)
    if cached is None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with locked(cache / f"{key}.lock"):
                cached = _cached(images_file, form)  # somebody else may have made it meanwhile
                if cached is None:
                    _decode(files, images_file, form, skip_bad)
                    cached = _cached(images_file, form)
            if cached is None:
                raise OSError(f"{images_file.name} does not hold what was written to it")
        except OSError as error:
            raise BadInput(f"can't write the cache of decoded images to {cache} ({error}): name a --root") from error
    images, bad = cached
    if bad and not skip_bad:
        raise _unreadable(files[bad[0]])
    if len(bad) == len(files):
        raise BadInput(f"none of the {len(files)} images, {files[0]} the first, can be read")
    readable = torch.ones(len(files), dtype=torch.bool)
    readable[bad] = False
    return images[: len(files) - len(bad)], readable.nonzero().flatten()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Entered by one process at a time, the others wait; a lock ends with its process, however it ends."""
    with open(path, "w") as file:
        try:
            import fcntl
        except ImportError:  # Windows: both would build, and the later one would win
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process, which makes {path.with_suffix('')}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: as on Windows
            pass
        yield
        path.unlink(missing_ok=True)  # only where all went well: others may wait on it, and must not be passed by


def mapped(file: Path) -> Tensor:
    """An array in a file as a tensor that stays there. Raises what NumPy raises for a damaged file; unpickles nothing."""
    try:
        array = np.load(file, mmap_mode="c", allow_pickle=False)  # "c": what is written to it stays in memory
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        array = np.load(file, mmap_mode="r", allow_pickle=False)  # larger than all memory: Linux maps it only so
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def _sampled(images: Tensor | np.ndarray) -> int:
    """A checksum of up to 127 of the images, evenly chosen, with the first: tells a half-copied file from a whole one."""
    checksum = 0
    for image in images[:: max(1, len(images) // 64)]:
        checksum = zlib.crc32(np.asarray(image), checksum)
    return checksum


def _cached(images_file: Path, form: dict) -> tuple[Tensor, list[int]] | None:
    """The images and the indices of the bad files that a cache holds; None if it is not there whole, in this form."""
    try:
        images, header = mapped(images_file), json.loads(images_file.with_suffix(".json").read_text())
        bad, checksum = header.pop("bad"), header.pop("checksum")
        whole = header == form and images.shape == (form["count"], 3, *form["size"]) and images.dtype == torch.uint8
        whole = whole and bad == sorted({*bad}) and all(type(i) is int and 0 <= i < len(images) for i in bad)
        whole = whole and checksum == _sampled(images)
    except Exception:  # NumPy raises whatever it meets in a damaged file
        return None
    return (images, bad) if whole else None


def _unreadable(path: Path) -> BadInput:
    return BadInput(f"{str(path)!r} can't be read as an image: mend or delete it, or use --skip-bad-images")


def _decode(files: list[Path], images_file: Path, form: dict, skip_bad: bool) -> None:
    """Decode into a partial file and rename it when whole, its header first; goes on where a killed one was."""
    partial, progress = images_file.with_suffix(".partial"), images_file.with_suffix(".progress.json")
    size, shape = form["size"], (len(files), 3, *form["size"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    saved = started = time.monotonic()
    try:
        images, done, bad = _resumed(partial, progress, shape) or (reserved(partial, np.uint8, shape), 0, [])
        # Threads, as Pillow decodes and resizes without Python's lock: as fast as processes
        with ThreadPool(cores) as pool, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of large images, odd palettes and the like
            decoded = _in_turn(pool, lambda path: _read(path, size), files[done:], chunks=4 * cores)
            bar = tqdm(decoded, "decoding", len(files), initial=done, unit=" images", disable=None)
            for i, image in enumerate(bar, start=done):
                if image is not None:
                    images[i - len(bad)] = image  # no gaps: the rows left over are last
                elif skip_bad:
                    bad.append(i)
                else:
                    raise _unreadable(files[i])
                if time.monotonic() > saved + 2:
                    saved = time.monotonic()
                    images.flush()  # first the rows, then that they are there
                    _write(progress, json.dumps([i + 1, bad]))
                    bar.set_postfix_str(f"{(i + 1 - done) / (saved - started) / cores:.0f} a second and core")
        if bad:
            tqdm.write(f"{len(bad)} of {len(files)} images can't be read and are left out, {files[bad[0]]} the first")
        images.flush()
        _write(images_file.with_suffix(".json"), json.dumps({**form, "bad": bad, "checksum": _sampled(images)}))
        os.replace(partial, images_file)
    except OSError:  # a disk that is full: its space is given back
        progress.unlink(missing_ok=True)
        raise
    finally:
        if not progress.exists():  # nothing to go on from
            partial.unlink(missing_ok=True)
        elif not partial.exists():
            progress.unlink()


def _in_turn(pool: ThreadPool, work: Callable, items: list, chunks: int, chunk: int = 16) -> Iterator:
    """pool.imap(work, items), but at most `chunks` chunks ahead: on a slow disk, what waits to be written fills no memory."""
    waiting = deque()
    for first in range(0, len(items), chunk):
        waiting.append(pool.map_async(work, items[first : first + chunk], chunksize=chunk))
        if len(waiting) > chunks:
            yield from waiting.popleft().get()
    for results in waiting:
        yield from results.get()


def _resumed(partial: Path, progress: Path, shape: tuple[int, ...]) -> tuple[np.ndarray, int, list[int]] | None:
    """The images, their number and the bad files that an interrupted decoding has left; None where nothing fits."""
    try:
        done, bad = json.loads(progress.read_text())
        images = np.lib.format.open_memmap(partial, mode="r+")
        fits = images.shape == shape and images.dtype == np.uint8
        fits = fits and 0 < done <= shape[0] and bad == sorted({*bad}) and all(0 <= i < done for i in bad)
    except (OSError, ValueError, TypeError, EOFError):
        return None
    return (images, done, bad) if fits else None


def reserved(file: Path, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    """A new memory map of that shape whose disk space is there: a full disk is an error now, not a crash at some write."""
    array = np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with open(file, "r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
    return array


def _write(path: Path, text: str) -> None:
    """The file is written whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _read(path: Path, size: tuple[int, int]) -> np.ndarray | None:
    """One file as (3, h, w) uint8: short side resized (bicubic), centre kept; None if it can't be read.

    Of an animation the first frame. A JPEG of 4 times `size` and more is decoded at a half, a quarter or an eighth, still
    twice `size`: three times faster on photographs, and 50 dB and more from the whole file's result, near 8 bits' own 59.
    """
    from PIL import Image, ImageOps

    if not path.is_file():  # a pipe would be waited for
        return None
    try:
        with Image.open(path) as image:
            image.draft(None, (2 * size[1], 2 * size[0]))  # does nothing but to a JPEG
            if image.mode.startswith(("I", "F")):  # 16 bits a pixel: Pillow would clip them to white
                values = np.asarray(image, dtype=np.float64)
                deep = image.mode.startswith("I;16") or values.max() > 255
                values = (values / 257 if deep else values).round().clip(0, 255)
                image = Image.fromarray(values.astype(np.uint8))
            image = ImageOps.fit(image.convert("RGB"), (size[1], size[0]), Image.Resampling.BICUBIC)
            return np.asarray(image).transpose(2, 0, 1)
    except Exception:  # Pillow's plugins raise whatever they meet in a damaged file
        return None


# ---- Augmentation ---------------------------------------------------------------------------------------------------


def augment(
    images: Tensor,
    size: tuple[int, int],
    generator: torch.Generator,
    min_scale: float = 0.2,
    flip: bool = True,
    padding: int = 0,
    batch: int | None = None,
    place: slice = slice(None),
) -> Tensor:
    """Random shift, resized crop and horizontal flip, each image its own: (b, c, H, W) uint8 to (b, c, h, w) float32.

    `images` may be those at `place` of a larger `batch`: they are changed as they would be in it.

    `min_scale` is the smallest share of the image's area that a crop keeps; 1 means no crop. `padding` is the longest
    shift in pixels. Values stay in 0 … 255. Everything runs on the images' device, where `generator` must be too.
    """
    b, _, height, width = images.shape
    batch, device = batch or b, images.device
    if padding:
        places = torch.randint(2 * padding + 1, (2, batch, 1, 1), generator=generator, device=device)
        images = shifted(images, *places[:, place], padding)
    flips = torch.rand(batch, generator=generator, device=device)[place] < (0.5 if flip else 0.0)
    if min_scale < 1:
        boxes = random_boxes(batch, height, width, generator, scale=(min_scale, 1.0))[place]
    else:
        boxes = torch.tensor([[0, 0, height, width]], device=device).expand(b, 4)
    return crop_and_resize(images, boxes, size, flips)


def shifted(images: Tensor, top: Tensor, left: Tensor, padding: int) -> Tensor:
    """Each image (b, c, h, w) padded with `padding` zeros on every side and cropped to its old size at (top, left) (b, 1, 1)."""
    b, _, h, w = images.shape
    padded = F.pad(images, (padding,) * 4)
    rows = top + torch.arange(h, device=images.device)[:, None]  # (b, h, 1)
    columns = left + torch.arange(w, device=images.device)  # (b, 1, w)
    i = torch.arange(b, device=images.device)[:, None, None]
    return padded[i, :, rows, columns].permute(0, 3, 1, 2)


def random_boxes(
    count: int,
    height: int,
    width: int,
    generator: torch.Generator,
    scale: tuple[float, float] = (0.2, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Crops (count, 4) as top, left, height, width, drawn as torchvision's RandomResizedCrop draws them.

    Ten tries at a share of the area and an aspect ratio; the first that fits is taken, else the largest centre crop.
    """
    device = generator.device
    draws = torch.rand(count, 10, 2, generator=generator, device=device)
    area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[..., 0])
    aspect = torch.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * draws[..., 1])
    w, h = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()  # (count, 10)
    fits = (w >= 1) & (w <= width) & (h >= 1) & (h <= height)
    first = fits.int().argmax(dim=1, keepdim=True)
    w, h = w.gather(1, first)[:, 0], h.gather(1, first)[:, 0]
    place = torch.rand(count, 2, generator=generator, device=device)
    top, left = (place[:, 0] * (height - h + 1)).floor(), (place[:, 1] * (width - w + 1)).floor()

    centre_w, centre_h = min(width, round(height * ratio[1])), min(height, round(width / ratio[0]))
    centre = [(height - centre_h) // 2, (width - centre_w) // 2, centre_h, centre_w]
    boxes = torch.stack([top, left, h, w], dim=1)
    return torch.where(fits.any(dim=1, keepdim=True), boxes, torch.tensor(centre, dtype=boxes.dtype, device=device))


def crop_and_resize(images: Tensor, boxes: Tensor, size: tuple[int, int], flips: Tensor | None = None) -> Tensor:
    """Each image's box (b, 4: top, left, height, width) resized to `size`: (b, c, H, W) to (b, c, h, w), 0 … 255.

    Antialiased bicubic interpolation, as Pillow and torchvision have it, is linear and separable: one small matrix for
    the rows and one for the columns of each image, so the whole batch is a few batched products.
    """
    top, left, height, width = boxes.to(torch.float32).unbind(1)
    rows = _resize_matrix(top, height, images.shape[2], size[0])  # (b, h, H)
    columns = _resize_matrix(left, width, images.shape[3], size[1])  # (b, w, W)
    if flips is not None:
        columns = torch.where(flips[:, None, None], columns.flip(1), columns)
    lines = images.to(torch.float32).flatten(1, 2) @ columns.mT  # (b, c·H, w)
    channels = lines.unflatten(1, (images.shape[1], -1)).unbind(1)
    return torch.stack([rows @ channel for channel in channels], dim=1).clamp_(0, 255)


def _resize_matrix(start: Tensor, length: Tensor, pixels: int, size: int) -> Tensor:
    """Weights (b, size, pixels) that carry the interval [start, start + length) of an axis of `pixels` to `size`.

    The kernel reaches two pixels to either side, of the coarser of both grids: its few weights are put in their places.
    """
    scale = (length / size)[:, None, None]  # source pixels per pixel
    reach = scale.clamp(min=1)
    centre = start[:, None, None] + (torch.arange(size, device=start.device)[:, None] + 0.5) * scale  # (b, size, 1)
    taps = torch.arange(math.ceil(4 * max(1, pixels / size)) + 2, device=start.device)
    j = (centre - 2 * reach).floor() + taps  # (b, size, taps): source pixels
    inside = (j + 0.5 > start[:, None, None]) & (j + 0.5 < (start + length)[:, None, None])
    x = ((j + 0.5 - centre) / reach).abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = torch.where(x < 1, near, torch.where(x < 2, far, 0.0)) * inside
    weights = weights / weights.sum(dim=2, keepdim=True)
    places = j.clamp(0, pixels - 1).long()  # what lies outside has no weight
    return torch.zeros(len(start), size, pixels, device=start.device).scatter_add_(2, places, weights)


def fit(images: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 images (n, c, H, W) at `size`: short side resized, centre kept."""
    height, width = images.shape[2:]
    if (height, width) == tuple(size):
        return images
    scale = min(height / size[0], width / size[1])
    h, w = (min(side, max(1, round(asked * scale))) for side, asked in ((height, size[0]), (width, size[1])))
    box = torch.tensor([[(height - h) // 2, (width - w) // 2, h, w]], device=images.device)
    chunks = [crop_and_resize(chunk, box.expand(len(chunk), 4), size) for chunk in images.split(1000)]
    return torch.cat([chunk.round().to(torch.uint8) for chunk in chunks])


# ---- Features -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def features(
    model: nn.Module,
    layer_tokens: Callable[[Tensor], Iterable[Tensor]],
    images: Tensor,
    batch_size: int | None = None,
    device: torch.device | str = "cpu",
    index: Tensor | None = None,
    pools: Sequence[str] = ("mean", "cls"),
    size: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """Features of every layer from one pass in eval mode, {name: (n, l, d)} for each of `pools`, float32, on `device`.

    `layer_tokens` takes a batch of images (b, c, h, w) and yields the tokens (b, t, d) after every layer: "mean" is
    their mean over all tokens (the authors' code), "cls" the first token. Of the images at `index` (n,), or of all, fitted to `size` where one is told.
    The model comes back as it was. Several processes share the images, and each gets the features of all. A
    batch has 256 images, on a CPU 32: there the small networks' tokens then stay in its caches, a fourth faster.
    """
    batch_size = batch_size or (32 if torch.device(device).type == "cpu" else 256)
    pool = {"mean": lambda tokens: tokens.mean(dim=1), "cls": lambda tokens: tokens[:, 0]}
    index = torch.arange(len(images)) if index is None else index
    if len(index) < process()[1]:
        raise BadInput(f"{len(index)} images are fewer than the {process()[1]} processes that share them: start fewer")
    mine = index[share(len(index))]
    pools = sorted({*pools})  # gathered in the same order by every process
    pooled: dict[str, list[Tensor]] = {name: [] for name in pools}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for part in tqdm(mine.split(batch_size), "features", unit=" batches", leave=False, disable=None):
            layers: dict[str, list[Tensor]] = {name: [] for name in pools}
            shown = images[part].to(device)
            for tokens in layer_tokens(fit(shown, size) if size else shown):
                for name in pools:
                    layers[name].append(pool[name](tokens.float()))
            for name in pools:
                pooled[name].append(torch.stack(layers[name], dim=1))
    finally:
        for module, training in modes:
            module.training = training
    return {name: gathered(torch.cat(parts), len(index)) for name, parts in pooled.items()}


# ---- Protocols ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Products of all 24 bits: TF32's 11 can't tell features apart that lie almost in a line."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def logistic_regression(
    x: Tensor, y: Tensor, classes: int, iterations: int = 100, chunk: int = 2**24
) -> tuple[Tensor, Tensor]:
    """The weights (classes, d) and biases (classes, 1) that minimise cross-entropy + ‖W‖²/2n, scikit-learn's loss.

    x (n, d) is standardised, y (n,). Deep features lie almost in a line (the spectrum of decayed ones spans nine orders
    of magnitude), where a hundred steps in their own coordinates end ten points short of the minimum. So W = V Pᵀ, and
    L-BFGS looks for V: P whitens the features, the same model in coordinates that all matter alike. It stops after
    `iterations`, or where no gradient is more than a thousandth of 1 / classes, as they are at the start. At most
    `chunk` logits are held at once.
    """
    n, width = x.shape
    covariance = (x.T @ x / n).cpu().double()
    ridge = 10 / n * torch.eye(width, dtype=torch.float64)  # what the penalty leaves of directions that hardly vary
    whiten = torch.linalg.inv(torch.linalg.cholesky(covariance + ridge)).float().to(x.device)  # Pᵀ
    free = torch.zeros(classes, width, device=x.device, requires_grad=True)  # V
    bias = torch.zeros(classes, 1, device=x.device, requires_grad=True)
    rows = max(1, chunk // classes)
    optimizer = torch.optim.LBFGS(
        [free, bias], max_iter=iterations, history_size=20, tolerance_grad=1e-3 / classes, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = (free @ whiten).square().sum() / (2 * n)
        total.backward()
        for part, labels in zip(x.split(rows), y.split(rows)):
            logits = torch.addmm(bias, free @ whiten, part.T)[None]  # (1, classes, b): faster than classes last
            share = F.cross_entropy(logits, labels[None], reduction="sum") / n
            share.backward()
            total = total + share
        return total.detach()

    optimizer.step(loss)
    return (free @ whiten).detach(), bias.detach()


@full_precision()
def linear_probe(train: Tensor, train_labels: Tensor, *tests: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Linear classifiers on frozen features, one for each of l feature sets: logistic regression.

    train (n, l, d) or (n, d), train_labels (n,); every test is a pair of the same form. Returns for every test the
    accuracies (l,) in percent. Features are standardised with train's mean and deviation.

    The paper's ImageNet-100 protocol takes 200 epochs of gradient steps towards the same minimum. The loss is convex, so
    what is found there depends on no learning rate, batch size or seed.
    """
    train, *features = (x[:, None] if x.ndim == 2 else x for x in (train, *(test for test, _ in tests)))
    labels, classes = train_labels.to(train.device), int(train_labels.max()) + 1
    accuracies = torch.zeros(len(tests), train.shape[1])
    for i in tqdm(range(train.shape[1]), "linear probe", unit=" layers", leave=False, disable=None):
        deviation, mean = torch.std_mean(train[:, i], dim=0, correction=0)
        deviation = torch.where(deviation > 1e-6 * mean.abs(), deviation, 1.0)  # constant channels stay constant
        weight, bias = logistic_regression((train[:, i] - mean) / deviation, labels, classes)
        for j, (test, (_, truth)) in enumerate(zip(features, tests)):
            right = 0
            for part, answers in zip(test[:, i].split(4096), truth.to(train.device).split(4096)):
                logits = (part - mean) / deviation @ weight.T + bias.T
                right += (logits.argmax(dim=1) == answers).sum().item()
            accuracies[j, i] = 100 * right / len(truth)
    return list(accuracies)


@full_precision()
@torch.no_grad()
def knn(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    k: int = 20,
    temperature: float = 0.07,
    chunk: int = 2**25,
) -> tuple[Tensor, Tensor]:
    """k nearest neighbours by cosine similarity: two votes' accuracies (l,) in percent, weighted and majority.

    Features (n, l, d) or (n, d). The weighted vote (Wu et al. 2018, the usual protocol) gives each neighbour
    exp(similarity / temperature); the other one vote each. Ties go to the lower class. At most `chunk` similarities are
    held at a time. With fewer than k training images, all of them vote.
    """
    train, test = (x[:, None] if x.ndim == 2 else x for x in (train, test))
    train_labels, test_labels = train_labels.to(train.device), test_labels.to(train.device)
    n, sets, _ = train.shape
    classes = int(max(train_labels.max(), test_labels.max())) + 1
    rows = max(1, chunk // n)
    accuracies = torch.zeros(2, sets)
    for layer in range(sets):
        keys, queries = F.normalize(train[:, layer], dim=1), F.normalize(test[:, layer], dim=1)
        right = torch.zeros(2, device=train.device)
        for query, truth in zip(queries.split(rows), test_labels.split(rows)):
            similarity, index = (query @ keys.T).topk(min(k, n), dim=1)
            neighbours = F.one_hot(train_labels[index], classes).to(similarity.dtype)  # (b, k, classes)
            weights = torch.exp((similarity - similarity[:, :1]) / temperature)  # scaled by the best: no overflow
            weighted = (weights[..., None] * neighbours).sum(dim=1).argmax(dim=1)
            majority = neighbours.sum(dim=1).argmax(dim=1)
            right += torch.stack([(weighted == truth).sum(), (majority == truth).sum()])
        accuracies[:, layer] = (100 * right / len(test)).cpu()
    return accuracies[0], accuracies[1]


def evaluate_layers(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, seed: int = 0
) -> list[dict[str, float]]:
    """For each of l layers: linear, held_out, knn_weighted, knn_majority, in percent; features (n, l, d).

    `held_out` is the linear probe's accuracy on a tenth of train that it was not trained on: choose layers by it, and
    report `linear`, the same probe's accuracy on test. The neighbours are those of the whole train set.
    Several processes share the layers. Raises FloatingPointError where a feature is not finite.
    """
    layers = train.shape[1]
    if not (torch.isfinite(train).all() and torch.isfinite(test).all()):
        raise FloatingPointError("the features are not finite")
    train, test = train[:, share(layers)], test[:, share(layers)]
    if not train.shape[1]:  # more processes than layers
        return of_all([])
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).to(train.device)
    held, used = order.tensor_split([max(1, len(train) // 10)])
    labels = train_labels.to(train.device)
    held_out, linear = linear_probe(train[used], labels[used], (train[held], labels[held]), (test, test_labels))
    weighted, majority = knn(train, train_labels, test, test_labels)
    names = ("linear", "held_out", "knn_weighted", "knn_majority")
    return of_all([dict(zip(names, map(float, row))) for row in zip(linear, held_out, weighted, majority)])


def best_layer(layers: Sequence[dict[str, float]]) -> int:
    """Number (from 1) of the layer with the best held-out accuracy; the earlier one of equals."""
    return 1 + max(range(len(layers)), key=lambda i: layers[i]["held_out"])


# ---- Protocols that train -------------------------------------------------------------------------------------------


def warm_cosine(epoch: float, epochs: int, warmup: float) -> float:
    """Share of the peak learning rate at a fractional `epoch`: linear warm-up, then half a cosine to 0."""
    if epoch < warmup:
        return epoch / warmup
    return 0.5 * (1 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup)))


def imagenet_probe(
    features_of: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    size: tuple[int, int],
    epochs: int = 90,
    batch_size: int = 16384,
    lr: float = 0.1,
    warmup_epochs: float | None = None,
    flip: bool = True,
    part: int = 256,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> float:
    """He et al. 2022's linear probe of ImageNet-1K (their Table 10): the test accuracy in percent.

    `features_of` takes images (b, c, h, w) in 0 … 255 to features (b, d), frozen and in eval mode. A BatchNorm without
    weights and a linear classifier are trained on random resized crops (a scale of 0.08 and more) and flips by LARS (You
    et al. 2017), momentum 0.9, no weight decay, `lr` × batch/256, 10 of 90 epochs of warm-up. A batch goes through in parts of
    `part` images; BatchNorm's statistics are a part's, as those of a GPU's share are in the usual training on several.
    """
    from timm.optim import Lars  # here, as timm takes seconds

    n, classes = len(images), int(labels.max()) + 1
    batch = min(batch_size, n)
    if n // math.ceil(n / batch) < 2:
        raise BadInput(f"linear-imagenet normalises batches: two images or more in each, not {n} in batches of {batch}")
    warmup = epochs / 9 if warmup_epochs is None else warmup_epochs
    generator = torch.Generator().manual_seed(seed)
    on_device = torch.Generator(device).manual_seed(seed)
    width = features_of(fit(images[:1], size).to(device).float()).shape[1]
    norm, head = nn.BatchNorm1d(width, eps=1e-6, affine=False).to(device), nn.Linear(width, classes)
    nn.init.normal_(head.weight, std=0.01, generator=generator)
    nn.init.zeros_(head.bias)
    head.to(device)
    groups = [{"params": [head.weight], "always_adapt": True}, {"params": [head.bias], "always_adapt": False}]
    optimizer = Lars(groups, momentum=0.9, weight_decay=0.0)  # biases are not adapted, as in He et al.'s code
    bar = tqdm(range(epochs), "linear probe (LARS)", unit=" epochs", leave=False, disable=None)
    for epoch in bar:
        batches = torch.randperm(n, generator=generator).tensor_split(math.ceil(n / batch))
        for i, index in enumerate(batches):  # of one size, as are their parts: none is too small for BatchNorm
            for chosen in index.tensor_split(math.ceil(len(index) / part)):
                views = augment(images[chosen].to(device), size, on_device, min_scale=0.08, flip=flip)
                logits = head(norm(features_of(views)))
                loss = F.cross_entropy(logits, labels[chosen].to(device)) * (len(chosen) / len(index))
                loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = lr * batch / 256 * warm_cosine(epoch + i / len(batches), epochs, warmup)
            optimizer.step()
            optimizer.zero_grad()
        bar.set_postfix_str(f"loss {loss.item() * len(index) / len(chosen):.3f}")
    norm.eval()
    return _accuracy(lambda x: head(norm(features_of(x))), test, test_labels, size, device)


@torch.no_grad()
def _accuracy(
    logits_of: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, size: tuple[int, int], device: object
) -> float:
    """Percent of the images that get their label."""
    right = 0
    for part, truth in zip(images.split(256), labels.split(256)):
        right += (logits_of(fit(part, size).to(device).float()).argmax(dim=1).cpu() == truth).sum().item()
    return 100 * right / len(labels)


def layer_decay_groups(
    stages: Sequence[Sequence[nn.Parameter]], decay: float = 0.65, weight_decay: float = 0.05
) -> list[dict]:
    """Layer-wise learning rates (Clark et al. 2020): AdamW's groups for `stages`, from the embedding to the head.

    Stage i of L gets decay^(L − 1 − i) of the learning rate, as "scale". Vectors have no weight decay.
    """
    groups = []
    for i, parameters in enumerate(stages):
        for vectors in (False, True):
            chosen = [p for p in parameters if (p.ndim <= 1) == vectors]
            scale = decay ** (len(stages) - 1 - i)
            groups.append({"params": chosen, "weight_decay": 0.0 if vectors else weight_decay, "scale": scale})
    return [group for group in groups if group["params"]]


def randaugmented(images: Tensor, generator: torch.Generator, magnitude: float = 9.0, deviation: float = 0.5) -> Tensor:
    """RandAugment (Cubuk et al. 2020): two random operations on every uint8 image (b, c, h, w), on the CPU.

    Their strength is normal about `magnitude` of 10, as timm's "rand-m9-mstd0.5".
    """
    from torchvision.transforms import v2  # here, as it takes a second

    strengths = magnitude + deviation * torch.randn(len(images), generator=generator)
    seed = int(torch.randint(2**62, (), generator=generator))
    with torch.random.fork_rng(devices=[]):  # torchvision draws from the global stream
        torch.manual_seed(seed)
        changed = [
            v2.RandAugment(2, min(100, max(0, round(10 * strength))), num_magnitude_bins=101)(image)
            for image, strength in zip(images, strengths.tolist())
        ]
    return torch.stack(changed)


def finetune(
    classifier: nn.Module,
    groups: list[dict],
    images: Tensor,
    labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    size: tuple[int, int],
    epochs: int = 100,
    batch_size: int = 1024,
    lr: float = 5e-4,
    warmup_epochs: float | None = None,
    flip: bool = True,
    part: int = 256,
    bf16: bool = True,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> float:
    """Train the whole `classifier` by He et al. 2022's recipe for ViT-B (their Table 9): the test accuracy in percent.

    AdamW (0.9, 0.999), `lr` × batch/256 times each group's "scale", 5 of 100 epochs of warm-up, random resized crops, flips,
    RandAugment (9, 0.5), mixup 0.8 or cutmix 1.0, label smoothing 0.1. `classifier` takes images (b, c, h, w) in 0 … 255 and,
    in training, noise (b, classifier.branches) for stochastic depth, to logits (b, classifier.classes). A batch goes through in parts of `part`.
    Raises FloatingPointError where the loss is not finite.
    """
    from torchvision.transforms import v2

    n, classes = len(images), classifier.classes
    batch = min(batch_size, n)
    warmup = epochs / 20 if warmup_epochs is None else warmup_epochs
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    mix = v2.RandomChoice([v2.MixUp(alpha=0.8, num_classes=classes), v2.CutMix(alpha=1.0, num_classes=classes)])
    generator, on_device = torch.Generator().manual_seed(seed), torch.Generator(device).manual_seed(seed)
    classifier.to(device).train()
    bar = tqdm(range(epochs), "fine-tuning", unit=" epochs", leave=False, disable=None)
    for epoch in bar:
        batches, loss_sum = torch.randperm(n, generator=generator).split(batch), 0.0
        for i, index in enumerate(batches):
            views = augment(images[index].to(device), size, on_device, min_scale=0.08, flip=flip)
            views = randaugmented(views.round().to(torch.uint8).cpu(), generator)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
                views, truth = mix(views.float(), labels[index])
            noise = torch.rand(len(views), classifier.branches, generator=on_device, device=device)
            for rows in torch.arange(len(views)).split(part):
                with torch.autocast(noise.device.type, torch.bfloat16, enabled=bf16 and noise.is_cuda):
                    logits = classifier(views[rows].to(device), noise[rows.to(device)])
                    loss = F.cross_entropy(logits.float(), truth[rows].to(device), label_smoothing=0.1)
                (loss * (len(rows) / len(views))).backward()
                loss_sum += loss.item() * len(rows)
            for group in optimizer.param_groups:
                share = warm_cosine(epoch + i / len(batches), epochs, warmup)
                group["lr"] = lr * batch / 256 * group["scale"] * share
            optimizer.step()
            optimizer.zero_grad()
        if not math.isfinite(loss_sum):
            raise FloatingPointError(f"the loss of fine-tuning is not finite in epoch {epoch + 1}: try a lower --lr")
        bar.set_postfix_str(f"loss {loss_sum / n:.3f}")
    classifier.eval()
    return _accuracy(classifier, test, test_labels, size, device)


# ---- Protocols that look --------------------------------------------------------------------------------------------


def tsne(features: Tensor, labels: Tensor, seed: int = 0) -> tuple[Tensor, float]:
    """scikit-learn's t-SNE of features (n, d), in the plane (n, 2), and the silhouette score of the labels there, −1 … 1."""
    from sklearn.manifold import TSNE  # here, as they take a second
    from sklearn.metrics import silhouette_score

    perplexity = min(30.0, (len(features) - 1) / 3)
    points = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(features.cpu().double().numpy())
    return torch.from_numpy(points), float(silhouette_score(points, labels.numpy()))


def normalised_cut(tokens: Tensor, count: int) -> Tensor:
    """The first `count` eigenvectors (n, count) of the normalised cut (Shi & Malik 2000) of tokens (n, d), largest first.

    Affinity W = (1 + cosine)/2 between any two tokens, D its row sums: solutions y of W y = λ D y, the constant one left
    out, each of unit length and with its largest entry positive. W = F Fᵀ with F (n, d + 1), so it is never built.
    """
    unit = F.normalize(tokens.double(), dim=1)
    factor = torch.cat([torch.ones_like(unit[:, :1]), unit], dim=1) / 2**0.5
    degree = (factor @ factor.sum(dim=0)).clamp(min=1e-12)
    scaled = factor / degree.sqrt()[:, None]
    _, vectors = torch.linalg.eigh(scaled.T @ scaled)  # rising
    chosen = vectors.flip(1)[:, 1 : count + 1]
    y = F.normalize(scaled @ chosen / degree.sqrt()[:, None], dim=0)
    largest = y.gather(0, y.abs().argmax(dim=0, keepdim=True))
    return y * largest.sign()


def clustered(vectors: Tensor, count: int, seed: int = 0) -> Tensor:
    """scikit-learn's k-means: the number of each row's cluster (n,), of `count`."""
    from sklearn.cluster import KMeans

    found = KMeans(count, n_init=10, random_state=seed).fit_predict(vectors.cpu().numpy())
    return torch.from_numpy(found).long()


def matched_miou(clusters: Tensor, truth: Tensor, ignore: int = 255) -> float:
    """Mean intersection over union, in percent, of true segments with the clusters that match them best, one to one.

    Both of any shape, the same; the match is Hungarian, over all images together. Pixels labelled `ignore` don't count;
    a segment that finds no cluster counts as 0. Raises ValueError where nothing is labelled.
    """
    from scipy.optimize import linear_sum_assignment  # scikit-learn brings scipy

    counted = truth != ignore
    if not counted.any():
        raise ValueError("no pixel of the masks is labelled")
    _, segments = truth[counted].unique(return_inverse=True)
    _, found = clusters[counted].unique(return_inverse=True)
    shape = int(segments.max()) + 1, int(found.max()) + 1
    both = torch.bincount(segments * shape[1] + found, minlength=shape[0] * shape[1]).view(shape).double()
    union = both.sum(dim=1, keepdim=True) + both.sum(dim=0) - both
    rows, columns = linear_sum_assignment((both / union).numpy(), maximize=True)
    return 100 * (both / union)[rows, columns].sum().item() / shape[0]


def masked_images(folder: str | Path, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """images/* (n, 3, h, w) uint8 and the masks/*.png of the same names (n, h, w), centre squares alike. Raises BadInput.

    A mask is a grey or palette PNG whose values are the segments' numbers; 255 is left out.
    """
    from PIL import Image, ImageOps

    folder = Path(folder).expanduser()
    if not (folder / "images").is_dir() or not (folder / "masks").is_dir():
        raise BadInput(f"masks {str(folder)!r} must be a folder that holds images/* and masks/*.png of the same names")
    files = sorted(path for path in (folder / "images").iterdir() if path.suffix.lower() in IMAGE_FILES)
    images, masks = [], []
    for path in files:
        mask_file = folder / "masks" / f"{path.stem}.png"
        image = _read(path, size)
        if image is None:
            raise _unreadable(path)
        try:
            with Image.open(mask_file) as mask:
                if mask.mode not in ("L", "P", "1"):
                    raise BadInput(f"{mask_file} is of mode {mask.mode}: a mask is a grey or palette PNG of numbers")
                mask = ImageOps.fit(mask, (size[1], size[0]), Image.Resampling.NEAREST)
                masks.append(torch.from_numpy(np.asarray(mask).astype(np.int64)))
        except OSError as error:
            raise BadInput(f"{path} has no mask that can be read: {mask_file}") from error
        images.append(torch.from_numpy(image.copy()))
    if not images:
        raise BadInput(f"{folder / 'images'} holds no image")
    return torch.stack(images), torch.stack(masks)
