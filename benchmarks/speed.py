"""Speed against the peers: one table, each figure of ours beside another library's, measured in turn in one run.

    python benchmarks/speed.py                          # everything; 20 minutes on two cores
    python benchmarks/speed.py --only mae-step knn      # two rows
    python benchmarks/speed.py --quick                  # tiny sizes: does it run?

A ratio is ours over the peer's, of the medians of timings taken in turn (ours, peer, ours, peer, …) after one warm-up
each; beside it stand the least and the greatest ratio of two neighbours, which tell how quiet the machine was. Each
side runs as its users have it: on CPUs the scripts keep the memory that they free (probe.keep_memory), and a peer gives it
back, as glibc does by itself. Peers are
optional (pip install transformers timm faiss-cpu); what is not installed is left out, and said so.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import io
import json
import multiprocessing
import os
import platform
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mae  # noqa: E402
import probe  # noqa: E402
import rank  # noqa: E402
import resnet_decay  # noqa: E402
import uvit  # noqa: E402

# ---- Config ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Measure speed against the peers."""

    only: tuple[str, ...] | None = None  # rows; None: all of them
    repeats: int = 7  # timings of each side
    quick: bool = False  # tiny sizes, which say nothing about speed
    device: str = "auto"  # auto, cpu, cuda
    out: str = "results/speed.json"  # where the table is kept


@dataclass
class Bench:
    """A row: what is timed, on our side and on the peer's."""

    ours: Callable[[], object]
    theirs: Callable[[], object] | None = None
    peer: str = ""
    aim: float | None = None  # for the ratio
    flops: tuple[float, float] | None = None  # floating-point operations of one call, ours and the peer's
    images: int | None = None  # in one call
    memory: bool = False  # whether the peak memory of each side is measured too
    note: str = ""


# ---- Floating-point operations --------------------------------------------------------------------------------------


def vit_flops(tokens: int, width: int, depth: int) -> float:
    """Forward, one image: depth · (24·n·d² + 4·n²·d): four d×d and two d×4d products, q·kᵀ and its product with v."""
    return depth * (24.0 * tokens * width**2 + 4.0 * tokens**2 * width)


def mae_flops(config: mae.Config, channels: int = 3) -> float:
    """Forward, one image: embedding of k patches, encoder on 1 + k tokens, skips, decoder on 1 + n, masked predictions.

    A skip: 2·d·d' on the kept tokens, and twice 2·d'·d' on all.
    """
    n, k, values = config.patches, config.kept, config.patch_size**2 * channels
    narrow, skips = config.decoder_width, min(config.depth // 2, config.decoder_depth)
    total = 2.0 * k * values * config.width + vit_flops(1 + k, config.width, config.depth)
    total += skips * (2.0 * (2 + k) * config.width * narrow + 4.0 * (1 + n) * narrow**2)
    return total + vit_flops(1 + n, narrow, config.decoder_depth) + 2.0 * (n - k) * narrow * values


def hf_mae_flops(config: mae.Config, channels: int = 3) -> float:
    """The same for Hugging Face's ViTMAE, which embeds and predicts all patches and has no skips."""
    n, k, values = config.patches, config.kept, config.patch_size**2 * channels
    narrow = config.decoder_width
    total = 2.0 * n * values * config.width + vit_flops(1 + k, config.width, config.depth)
    total += 2.0 * (1 + k) * config.width * narrow
    return total + vit_flops(1 + n, narrow, config.decoder_depth) + 2.0 * (1 + n) * narrow * values


def uvit_flops(config: uvit.Config, channels: int = 3) -> float:
    """Forward, one image: depth + 1 blocks, and a join of 2d to d in each of the depth / 2 on the way up."""
    n = (config.image_size[0] // config.patch_size) * (config.image_size[1] // config.patch_size)
    values = config.patch_size**2 * channels
    joins = config.depth // 2 * 4.0 * (1 + n) * config.width**2
    ends = 2.0 * values * config.width * (2 * n + 1)
    return vit_flops(1 + n, config.width, config.depth + 1) + joins + ends


def resnet_flops(side: int, channels: int = 3, classes: int = 10) -> float:
    """Forward of ResNet-18 with the 3×3 stem, one image: 2·9·c·c' a pixel for every convolution."""
    total = 2.0 * side**2 * 9 * channels * 64
    for i, width in enumerate((64, 128, 256, 512)):
        pixels, before = (side / 2**i) ** 2, width if i == 0 else width // 2
        total += pixels * 18 * width * (before + 3 * width)
        total += 0 if i == 0 else pixels * 2 * width * before
    return total + 2.0 * 512 * classes


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a plain 4096×768×3072 product: the fastest of 100, as it is a yardstick."""
    x, w = (torch.randn(shape, device=device, dtype=dtype) for shape in ((4096, 768), (768, 3072)))
    return 2 * 4096 * 768 * 3072 / min(stopwatch(lambda: x @ w, device) for _ in range(100))


# ---- Rows -----------------------------------------------------------------------------------------------------------


def stepper(model: nn.Module, loss: Callable[[], Tensor], device: torch.device) -> Callable[[], None]:
    """A training step: forward, backward, AdamW; bfloat16 on CUDA."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def generator_of(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def pictures(count: int, channels: int, side: int, device: torch.device) -> Tensor:
    """Random images (count, channels, side, side), 0 … 255."""
    return 255 * torch.rand(count, channels, side, side, generator=generator_of(device), device=device)


def mae_model(device: torch.device, **settings: object) -> tuple[mae.Config, mae.MaskedAutoencoder]:
    config = mae.Config(recipe="imagenet", **settings)
    model = mae.MaskedAutoencoder(config, 3, torch.Generator().manual_seed(0))
    model.mean.fill_(127.5)
    model.std.fill_(73.6)
    return config, model.to(device)


def mae_step(quick: bool, device: torch.device) -> Bench:
    small = dict(width=32, depth=2, heads=2, decoder_width=32, decoder_depth=2, decoder_heads=2, image_size=32)
    batch = 2 if quick else 8 if device.type == "cpu" else 256
    config, model = mae_model(device, **small if quick else {})
    images, generator = pictures(batch, 3, config.image_size[0], device), generator_of(device)
    noise = partial(torch.rand, batch, config.patches, generator=generator, device=device)
    ours = stepper(model, lambda: model(images, noise()), device)
    flops = 3 * batch * mae_flops(config), 3 * batch * hf_mae_flops(config)
    row = Bench(ours, peer="transformers ViTMAEForPreTraining", aim=0.95, flops=flops, images=batch, memory=True)
    row.note = f"ViT-B/16 at 224, batch {batch}, α_min 0.6"
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    theirs = ViTMAEForPreTraining(
        ViTMAEConfig(
            hidden_size=config.width, num_hidden_layers=config.depth, num_attention_heads=config.heads,
            intermediate_size=4 * config.width, image_size=config.image_size[0], patch_size=config.patch_size,
            decoder_hidden_size=config.decoder_width, decoder_num_hidden_layers=config.decoder_depth,
            decoder_num_attention_heads=config.decoder_heads, decoder_intermediate_size=4 * config.decoder_width,
            norm_pix_loss=True,
        )
    ).to(device)  # fmt: skip
    row.theirs = stepper(theirs, lambda: theirs(images / 127.5 - 1).loss, device)
    return row


def encoder(quick: bool, device: torch.device, training: bool = False) -> Bench:
    import timm

    small = dict(width=32, depth=2, heads=2, image_size=32)
    batch = 2 if quick else 8 if device.type == "cpu" else 256
    config, model = mae_model(device, alpha_min=1.0, **small if quick else {})
    images = pictures(batch, 3, config.image_size[0], device)
    vit = timm.create_model(
        "vit_base_patch16_224", img_size=config.image_size, embed_dim=config.width, depth=config.depth,
        num_heads=config.heads, num_classes=0,
    ).to(device)  # fmt: skip

    def ours() -> None:
        with (
            torch.set_grad_enabled(training),
            torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"),
        ):
            *_, last = model.layer_tokens(images)
        if training:
            last.float().square().mean().backward()
            model.zero_grad()

    def theirs() -> None:
        with (
            torch.set_grad_enabled(training),
            torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"),
        ):
            last = vit.forward_features(images / 127.5 - 1)
        if training:
            last.float().square().mean().backward()
            vit.zero_grad()

    values = config.patch_size**2 * 3
    once = vit_flops(1 + config.patches, config.width, config.depth) + 2.0 * config.patches * values * config.width
    flops = batch * once * (3 if training else 1)
    how = "forward and backward" if training else "forward"
    return Bench(ours, theirs, "timm vit_base_patch16_224", 1.0, (flops, flops), batch, True, f"α_min 1, {how}")


class PlainUViT(nn.Module):
    """timm's blocks with the long skips of U-ViT: what uvit.UViT is compared with, as no library has a U-ViT."""

    def __init__(self, config: uvit.Config) -> None:
        super().__init__()
        from timm.models.vision_transformer import Block

        self.config, width, values = config, config.width, config.patch_size**2 * 3
        n = (config.image_size[0] // config.patch_size) * (config.image_size[1] // config.patch_size)
        self.embed, self.head = nn.Linear(values, width), nn.Linear(width, values)
        self.positions = nn.Parameter(torch.zeros(1 + n, width))
        self.blocks = nn.ModuleList(Block(width, config.heads, qkv_bias=False) for _ in range(config.depth + 1))
        self.joins = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(config.depth // 2))
        self.norm, self.smooth = nn.LayerNorm(width), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        patches = self.embed(uvit.patchify(x, self.config.patch_size))
        time = uvit.time_embedding(t, patches.shape[-1])[:, None].to(patches.dtype)
        x, skips, half = torch.cat([time, patches], dim=1) + self.positions, [], len(self.joins)
        for l, block in enumerate(self.blocks):
            if l > half:
                x = self.joins[l - half - 1](torch.cat([x, skips.pop()], dim=-1))
            x = block(x)
            if l < half:
                skips.append(x)
        return self.smooth(
            uvit.unpatchify(self.head(self.norm(x))[:, 1:], self.config.patch_size, self.config.image_size)
        )


def uvit_step(quick: bool, device: torch.device) -> Bench:
    batch = 2 if quick else 8 if device.type == "cpu" else 128
    config = uvit.Config(data="cifar100", **dict(width=32, depth=2, heads=2) if quick else {"model": "small"})
    model = uvit.UViT(config, 3, 0, torch.Generator().manual_seed(0)).to(device)
    x, generator = pictures(batch, 3, 32, device) / 127.5 - 1, generator_of(device)
    peer = PlainUViT(config).to(device)

    def loss(network: nn.Module) -> Tensor:
        t = 1 - torch.rand(batch, generator=generator, device=device)
        noise = torch.randn(x.shape, generator=generator, device=device)
        return F.mse_loss(network(uvit.perturb(x, noise, t), t).float(), noise)

    sides = (stepper(network, partial(loss, network), device) for network in (model, peer))
    flops = 3 * batch * uvit_flops(config)
    note = f"U-ViT Small/2 at 32, batch {batch}; no library has one: timm's blocks with its long skips"
    return Bench(*sides, "timm blocks", 1.0, (flops, flops), batch, True, note)


def resnet_step(quick: bool, device: torch.device) -> Bench:
    import torchvision

    batch, side = (2, 16) if quick else (32 if device.type == "cpu" else 256, 64)
    config = resnet_decay.Config(data="cifar10", alpha_min=0.7, blocks=8, width=64, image_size=side)
    model = resnet_decay.ResNet(config, 3, 10, torch.Generator().manual_seed(0)).to(device)
    model.std.fill_(64.0)
    peer = torchvision.models.resnet18(num_classes=10)
    peer.conv1, peer.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()  # as for small images here
    peer.to(device)
    images = pictures(batch, 3, side, device)
    labels = torch.arange(batch, device=device) % 10
    ours = stepper(model, lambda: F.cross_entropy(model(images), labels), device)
    theirs = stepper(peer, lambda: F.cross_entropy(peer(images / 64), labels), device)
    flops = 3 * batch * resnet_flops(side)
    note = f"ResNet-18 at {side}, batch {batch}, α_min 0.7"
    return Bench(ours, theirs, "torchvision resnet18", 1.0, (flops, flops), batch, True, note)


def small_step(quick: bool, device: torch.device) -> Bench:
    config = mae.Config()
    model = mae.MaskedAutoencoder(config, 1, torch.Generator().manual_seed(0)).to(device)
    batch, generator = config.batch_size, generator_of(device)
    images = pictures(batch, 1, 16, device)
    noise = partial(torch.rand, batch, config.patches, generator=generator, device=device)
    step = stepper(model, lambda: model(images, noise()), device)
    return Bench(step, images=batch, note="the default run's network, batch 16")


def class_features(n: int, width: int, classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Features (n, width) around class means, their spectrum falling over two orders of magnitude, and labels (n,)."""
    generator = generator_of("cpu")
    labels = torch.arange(n) % classes
    means = 0.25 * torch.randn(classes, width, generator=generator)
    mixed = torch.linalg.qr(torch.randn(width, width, generator=generator))[0] * torch.logspace(0, -2, width)[:, None]
    features = (means[labels] + torch.randn(n, width, generator=generator)) @ mixed
    return features.to(device), labels


def linear_probe(quick: bool, device: torch.device) -> Bench:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    n, width, classes = (300, 16, 5) if quick else (10_000, 384, 100)
    x, y = class_features(n * 5 // 4, width, classes, device)
    train, test = (x[:n], y[:n]), (x[n:], y[n:])
    found = {}

    def ours() -> None:
        found["ours"] = probe.linear_probe(*train, test)[0].item()

    def theirs() -> None:
        logistic = LogisticRegression(max_iter=5000, tol=1e-6)  # with its own 1e-4 it stops 2 points short
        model = make_pipeline(StandardScaler(), logistic)
        model.fit(train[0].cpu().numpy(), train[1].numpy())
        found["theirs"] = 100 * model.score(test[0].cpu().numpy(), test[1].numpy())

    ours()
    theirs()
    note = f"{n:,}×{width}, {classes} classes; accuracy {found['ours']:.1f} and {found['theirs']:.1f} %"
    return Bench(ours, theirs, "scikit-learn LogisticRegression", 0.1, note=note)


def knn(quick: bool, device: torch.device) -> Bench:
    from sklearn.neighbors import KNeighborsClassifier

    n, tests, width = (300, 100, 16) if quick else (20_000, 5_000, 384)
    x, y = class_features(n + tests, width, 100 if not quick else 5, device)
    train, test = (x[:n], y[:n]), (x[n:], y[n:])

    def theirs() -> None:
        model = KNeighborsClassifier(20, metric="cosine", algorithm="brute").fit(
            train[0].cpu().numpy(), train[1].numpy()
        )
        model.score(test[0].cpu().numpy(), test[1].numpy())

    note = f"20 neighbours, {n:,} × {tests:,} × {width}"
    return Bench(lambda: probe.knn(*train, *test), theirs, "scikit-learn KNeighborsClassifier", note=note)


def knn_faiss(quick: bool, device: torch.device) -> Bench:
    import faiss

    row = knn(quick, device)
    n, tests, width = (300, 100, 16) if quick else (20_000, 5_000, 384)
    x = F.normalize(class_features(n + tests, width, 100, device)[0], dim=1).cpu().numpy()

    def theirs() -> None:
        index = faiss.IndexFlatIP(width)
        index.add(x[:n])
        index.search(x[n:], 20)

    row.theirs, row.peer = theirs, "faiss IndexFlatIP, search alone"
    return row


def effective_rank(quick: bool, device: torch.device) -> Bench:
    n, width = (200, 16) if quick else (5_000, 384)
    x = class_features(n, width, 100, device)[0]

    def theirs() -> float:
        z = (x - x.mean(dim=1, keepdim=True)).cpu().double()
        return rank.spectral_entropy(torch.linalg.eigvalsh(z @ z.T).clamp(min=0))

    assert abs(rank.effective_rank(x) - theirs()) < 1e-3
    note = f"{n:,} features of width {width}"
    return Bench(lambda: rank.effective_rank(x), theirs, "eigenvalues of the n×n matrix", note=note)


def augment(quick: bool, device: torch.device) -> Bench:
    from torchvision.transforms import v2

    count, side = (8, 16) if quick else (512, 64)
    images = pictures(count, 3, side, device).byte()
    how = dict(scale=(0.2, 1.0), interpolation=v2.InterpolationMode.BICUBIC, antialias=True)
    each = v2.Compose([v2.RandomResizedCrop(side, **how), v2.RandomHorizontalFlip()])
    ours = partial(probe.augment, images, (side, side), generator_of(device))
    note = f"{count} images of {side} pixels: resized crop and flip"
    return Bench(
        ours, lambda: torch.stack([each(x) for x in images]), "torchvision v2, per image", images=count, note=note
    )


def pipeline(quick: bool, device: torch.device, first: bool) -> Bench:
    """An epoch of a folder of JPEGs as augmented batches; the first one decodes them."""
    from PIL import Image
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    temporary = tempfile.TemporaryDirectory()  # goes with the functions below
    folder, count, side = Path(temporary.name), 40 if quick else 1_000, 32 if quick else 224
    rows = np.random.default_rng(0).integers(0, 256, (count, 10, 13, 3), dtype=np.uint8)
    for i, row in enumerate(rows):
        for split in ("train", "val") if i < 4 else ("train",):
            (folder / split / str(i % 4)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(row).resize((400, 300), Image.BICUBIC).save(folder / split / str(i % 4) / f"{i}.jpg")
    generator = generator_of(device)
    roots = (
        Path(temporary.name) / f"root{i}" for i in range(10_000)
    )  # a new cache each time that the first epoch is timed
    held = None if first else probe.load_images(str(folder), next(roots), (side, side), crops=True)

    def ours() -> None:
        data = held or probe.load_images(str(folder), next(roots), (side, side), crops=True)
        for index in torch.randperm(len(data.train)).split(100):
            probe.augment(data.train[index].to(device), (side, side), generator)

    how = dict(scale=(0.2, 1.0), interpolation=v2.InterpolationMode.BICUBIC, antialias=True)
    crop = [v2.RandomResizedCrop(side, **how), v2.RandomHorizontalFlip()]
    each = v2.Compose([*crop, v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    workers = 0 if quick else os.cpu_count()

    def theirs() -> None:
        loader = torch.utils.data.DataLoader(
            ImageFolder(folder / "train", each), 100, shuffle=True, num_workers=workers
        )
        for images, _ in loader:
            images.to(device)

    which = "the first epoch, decoding and the cache included" if first else "a later epoch, from the cache"
    note = f"{count:,} JPEGs of 400×300 for {side} pixels: {which}"
    return Bench(ours, theirs, f"DataLoader, {workers} workers", images=count, note=note)


BENCHES: dict[str, Callable[[bool, torch.device], Bench]] = {
    "mae-step": mae_step,
    "encoder": encoder,
    "encoder-train": partial(encoder, training=True),
    "uvit-step": uvit_step,
    "resnet-step": resnet_step,
    "small-step": small_step,
    "linear-probe": linear_probe,
    "knn": knn,
    "knn-faiss": knn_faiss,
    "effective-rank": effective_rank,
    "augment": augment,
    "pipeline-first": partial(pipeline, first=True),
    "pipeline-later": partial(pipeline, first=False),
}


# ---- Measure --------------------------------------------------------------------------------------------------------


def stopwatch(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that it takes, on CUDA by its events."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measured(row: Bench, repeats: int, device: torch.device) -> dict:
    """Both sides in turn: medians, their ratio, and the least, middle and greatest ratio of neighbours."""
    sides = {"ours": row.ours, "theirs": row.theirs} if row.theirs else {"ours": row.ours}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for i in range(1 + repeats):  # the first one is a warm-up
        for side, work in sides.items():
            probe.keep_memory(side == "ours" and device.type == "cpu")
            seconds = stopwatch(work, device)
            times[side] += [seconds] if i else []
    found: dict = {f"{side}_seconds": statistics.median(seconds) for side, seconds in times.items()}
    if row.theirs:
        paired = sorted(ours / theirs for ours, theirs in zip(times["ours"], times["theirs"]))
        found |= {"ratio": found["ours_seconds"] / found["theirs_seconds"], "paired": statistics.median(paired)}
        found |= {"least": paired[0], "greatest": paired[-1]}
    if row.images:
        found["images_per_second"] = row.images / found["ours_seconds"]
    for side, flops in zip(times, row.flops or ()):
        found[f"{side}_flops_per_second"] = flops / found[f"{side}_seconds"]
    return found


def peak_memory(name: str, side: str, config: Config) -> int:
    """Bytes that one side's steps take at most: on a CPU those of the process, so each is asked in one of its own."""
    device = mae.choose_device(config.device)
    row = BENCHES[name](config.quick, device)
    setattr(row, "theirs" if side == "ours" else "ours", None)  # its weights are freed
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        getattr(row, side)()
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would have the parent's in it
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", status.read_text())[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = None
    if Path("/proc/cpuinfo").exists():
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{model[1] if model else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "torchvision", "timm", "transformers", "scikit-learn", "faiss-cpu"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def run(config: Config) -> Iterator[dict]:
    """The rows' results, one by one."""
    device = mae.choose_device(config.device)
    rate = product_rate(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    yield {
        "row": "product",
        "note": f"plain 4096×768×3072 product: {rate / 1e9:.0f} GFLOP/s",
        "ours_flops_per_second": rate,
    }
    for name in config.only or BENCHES:
        try:
            row = BENCHES[name](config.quick, device)
        except ImportError as error:
            yield {"row": name, "note": f"{error.name} is not installed"}
            continue
        if config.quick:
            row.note, row.aim = "tiny sizes: a check that it runs, no measurement", None
        found = {"row": name, "note": row.note, "peer": row.peer, "aim": row.aim} | measured(
            row, config.repeats, device
        )
        for side in ("ours", "theirs"):
            if f"{side}_flops_per_second" in found:
                found[f"{side}_share"] = found[f"{side}_flops_per_second"] / rate
            if row.memory and getattr(row, side):
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    found[f"{side}_peak_bytes"] = pool.apply(peak_memory, (name, side, config))
        yield found


def shown(found: dict) -> str:
    """A row of the table."""
    cells = [found["row"].ljust(15)]
    for key, form in (
        ("ours_seconds", "{:.4g} s"),
        ("theirs_seconds", "{:.4g} s"),
        ("ratio", "{:.3f}"),
        ("aim", "{:g}"),
    ):
        cells.append((form.format(found[key]) if found.get(key) is not None else "").rjust(10))
    cells.append(f"{found['least']:.2f}–{found['greatest']:.2f}".rjust(11) if "least" in found else " " * 11)
    for key in ("ours_share", "theirs_share"):
        cells.append((f"{100 * found[key]:.0f} %" if key in found else "").rjust(6))
    for key in ("ours_peak_bytes", "theirs_peak_bytes"):
        cells.append((f"{found[key] / 2**30:.2f} GiB" if key in found else "").rjust(9))
    cells.append((f"{found['images_per_second']:,.0f}" if "images_per_second" in found else "").rjust(9))
    return " ".join(cells) + "  " + " | ".join(filter(None, (found.get("peer"), found["note"])))


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # tyro's boxed complaint
            config = tyro.cli(Config, args=arguments)
    except SystemExit as stop:
        if not stop.code:
            raise
        given = " ".join(sys.argv[1:] if arguments is None else arguments)
        print(f"speed.py: can't read {given!r}: --help lists every flag", file=sys.stderr)
        return 2
    try:
        if config.only == ():
            raise probe.BadInput(f"only must name one or more of {', '.join(BENCHES)}")
        for name in {*(config.only or ())} - {*BENCHES}:
            raise probe.BadInput(f"only must name some of {', '.join(BENCHES)}, not {name!r}")
        if not 1 <= config.repeats < 10_000:
            raise probe.BadInput(f"repeats must lie in [1, 10,000), not {config.repeats}")
        out = Path(config.out).expanduser()
        if out.is_dir():
            raise probe.BadInput(f"can't write {out}: it is a folder")
        try:  # before half an hour of measuring
            out.parent.mkdir(parents=True, exist_ok=True)
            out.with_name(out.name + ".tmp").touch()
            out.with_name(out.name + ".tmp").unlink()
        except OSError as error:
            raise probe.BadInput(f"can't write {out}: {error.strerror}") from error
        device = mae.choose_device(config.device)
        head = {"hardware": hardware(device), "versions": versions(), "date": str(datetime.date.today())}
        print(f"{head['hardware']}; " + ", ".join(f"{name} {version}" for name, version in head["versions"].items()))
        titles = (
            "ours",
            "peer",
            "ratio",
            "aim",
            "range",
            "of product (ours, peer), peak memory (ours, peer), images/s",
        )
        print(" " * 15 + "".join(f"{title:>11}" for title in titles[:4]), *titles[4:], sep="   ", flush=True)
        rows = []
        for found in run(config):
            rows.append(found)
            print(shown(found), flush=True)
        mae.write_whole(out, json.dumps(head | {"quick": config.quick, "rows": rows}, indent=1).encode())
        print(f"the table is in {out}")
        return 0
    except probe.BadInput as error:
        print(f"speed.py: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    except BrokenPipeError:  # nobody reads on: speed.py | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"speed.py: can't write {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
