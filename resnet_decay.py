"""ResNet-18 with decayed identity shortcuts, trained with labels (Residual Connections Harm Generative Representation Learning).

A basic block adds its input to its output. Here the added input is weakened with depth:

    x_{l+1} = relu(α_l · P_l(x_l) + f_l(x_l))                     (Eq. 3)   Block.forward
    α_l     falls in equal steps from 1 to α_min                  (Eq. 5)   shortcut_weights
    ρ       = −Σ_i σ̄_i log σ̄_i                                    (Eq. 6)   rank.effective_rank of the pooled test features

P_l is the identity, or the projection that begins a stage; both are decayed. (This is not Eq. 4 to the letter: a ReLU
follows every sum, and a projection's BatchNorm brings the stream back to unit scale at the start of its stage.)

There is no mask and no decoder: does decay alone lower the rank of what a network learns, and the more so the deeper it
is (the paper's appendix B.3, Figure 9)? One command trains every pair of α_min and depth and draws the answer:

    python resnet_decay.py                                        # built-in digits, a laptop: 3 × 3 networks
    python resnet_decay.py --alpha-min 0.7 --blocks 8             # a single one
    python resnet_decay.py --data cifar100 --seed 0 1 2           # one GPU; mean and deviation over three seeds

What the first one printed stands in the README.

Shapes: b batch, c channels, h and w pixels, d pooled features.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import itertools
import json
import math
import os
import re
import signal
import statistics
import sys
import threading
import time
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import probe
import rank
from probe import BadInput

# ---- Config ---------------------------------------------------------------------------------------------------------

# One recipe per data set; a flag overrides its field. A folder of images takes "imagenet".
RECIPES = {
    "digits": dict(
        image_size=(16, 16), width=16, epochs=6, batch_size=128, lr=0.2, padding=2, min_scale=1.0, flip=False,
    ),
    "fashion-mnist": dict(
        image_size=(28, 28), width=64, epochs=100, batch_size=128, lr=0.2, padding=4, min_scale=1.0, flip=True,
    ),
    "cifar": dict(
        image_size=(32, 32), width=64, epochs=200, batch_size=128, lr=0.2, padding=4, min_scale=1.0, flip=True,
    ),
    "imagenet": dict(
        image_size=(224, 224), width=64, epochs=90, batch_size=256, lr=0.1, padding=0, min_scale=0.08, flip=True,
    ),
}  # fmt: skip
RECIPES["mnist"] = RECIPES["fashion-mnist"] | {"flip": False}  # characters are not mirrored
RECIPES["svhn"] = RECIPES["cifar"] | {"flip": False}
RECIPE_OF = {name: name for name in ("digits", "mnist", "fashion-mnist", "svhn")}  # a named data set's recipe
RECIPE_OF |= {"kmnist": "mnist", "cifar10": "cifar", "cifar100": "cifar", "stl10": "cifar"}
VARIANTS = {
    "schedule": ("linear", "cosine", "constant", "learned"),
    "shortcut": ("decay", "scale-both", "scale-branch"),
}


@dataclass(frozen=True)
class Config:
    """One network: train it with labels, and take the effective rank of its features by epoch.

    A field that is None takes the data set's recipe.
    """

    data: str = "digits"  # digits (built in), a torchvision name, or a folder with train/<class>/* and val/<class>/*
    root: str = "data"  # where named data sets and the cache of decoded images live
    recipe: str | None = None  # digits, fashion-mnist, mnist, cifar, svhn or imagenet; None: the data set's
    alpha_min: float = 0.7  # weight of the last shortcut (paper Eq. 5; 0.7: its best ResNet-18)
    blocks: int = 8  # 8 (ResNet-18) to 16: more blocks in the third stage (paper B.3)
    schedule: str = "linear"  # how α falls from 1: linear, cosine, constant (α_min throughout) or learned
    shortcut: str = "decay"  # α·x + f (Eq. 3); scale-both: c·(x + f); scale-branch: x + c·f (paper Table 3b)
    scale: float = 0.5**0.5  # the constant c of these two
    drop_path: float = 0.0  # stochastic depth: the last block's chance to be dropped, the lth of L has l/L of it
    decay_projections: bool = True  # weaken the three projection shortcuts like the others; else they stay at 1

    image_size: tuple[int, ...] | int | None = None  # pixels: one number, or height and width
    width: int | None = None  # channels of the first stage; the fourth has 8 times as many
    zero_init: bool = False  # every branch starts at zero (its last BatchNorm's weight)

    epochs: int | None = None  # passes over the training images
    batch_size: int | None = None  # images per optimiser step
    lr: float | None = None  # learning rate for 256 images a step; cosine to 0
    momentum: float = 0.9  # Nesterov's
    weight_decay: float = 5e-4  # on every parameter, as usual for ResNets on CIFAR
    padding: int | None = None  # pixels of black around an image before a crop of its old size; 0: no such crop
    min_scale: float | None = None  # smallest share of the image in a random resized crop; 1: no such crop
    flip: bool | None = None  # mirror half of the images

    eval_every: int = 1  # epochs between tests; 0: only at the end
    seed: int = 0  # decides everything
    limit: int | None = None  # only the first N training images, evenly over the classes
    skip_bad_images: bool = False  # go on without images that can't be read
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    bf16: bool = True  # bfloat16 on CUDA
    compile: bool = False  # torch.compile the training step
    log: Literal["none", "tensorboard"] = "none"  # what metrics.jsonl is written to besides
    out: str | None = None  # run folder, or the parent of several; None: runs/ and its data, blocks, alpha_min, seed
    overwrite: bool = False  # start anew where the run folder holds another or a finished run

    def __post_init__(self) -> None:
        for name, table in (("recipe", RECIPES), *VARIANTS.items()):
            if getattr(self, name) not in (None, *table):
                raise ValueError(f"{name} must be one of {', '.join(table)}, not {getattr(self, name)!r}")
        for name, value in RECIPES[self.recipe or RECIPE_OF.get(self.data, "imagenet")].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        size = (self.image_size,) if isinstance(self.image_size, int) else tuple(self.image_size)
        object.__setattr__(self, "image_size", size * 2 if len(size) == 1 else size)
        self._check()
        if self.shortcut != "decay" or self.schedule == "learned":
            object.__setattr__(self, "alpha_min", 1.0)  # nothing falls to it

    def _check(self) -> None:
        """Raises ValueError for a value that can't be meant."""

        for name in ("width", "epochs", "batch_size", "limit", "lr"):
            value, limit = getattr(self, name), 2**13 if name == "width" else 2**31
            if value is not None and not 0 < value < limit:
                raise ValueError(f"{name} must be positive and below {limit}, not {value}")
        size = self.image_size
        if len(size) != 2 or not 1 <= min(size) <= max(size) < 2**16:
            raise ValueError(
                f"image_size must be one or two positive numbers, not {' '.join(map(str, size)) or 'none'}"
            )
        if not 0 <= self.alpha_min <= 1:
            raise ValueError(f"alpha_min must lie in [0, 1], not {self.alpha_min}")
        for name, default in (("schedule", "linear"), ("decay_projections", True)):
            if self.shortcut != "decay" and getattr(self, name) != default:
                raise ValueError(f"{name} {getattr(self, name)} is of --shortcut decay, not of {self.shortcut}")
        if self.schedule == "learned" and not self.decay_projections:
            raise ValueError("schedule learned learns every shortcut: decay_projections must be True, not False")
        if not 0 < self.scale <= 1:
            raise ValueError(f"scale must lie in (0, 1], not {self.scale}")
        if not 0 <= self.drop_path < 1:
            raise ValueError(f"drop_path must lie in [0, 1), not {self.drop_path}")
        if not 8 <= self.blocks <= 16:
            raise ValueError(f"blocks must lie in 8 to 16, not {self.blocks}")
        if self.batch_size < 2:
            raise ValueError(f"batch_size must be 2 or more (BatchNorm), not {self.batch_size}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), not {self.momentum}")
        if self.log == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
            raise ValueError("log tensorboard needs a package that is not installed: pip install tensorboard")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must not be negative, not {self.weight_decay}")
        if not 0 <= self.padding <= max(size):
            raise ValueError(f"padding must lie in 0 to the image's {max(size)} pixels, not {self.padding}")
        if not 0 < self.min_scale <= 1:
            raise ValueError(f"min_scale must lie in (0, 1], not {self.min_scale}")
        if self.eval_every < 0:
            raise ValueError(f"eval_every must not be negative, not {self.eval_every}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2^63), not {self.seed}")

    @property
    def data_name(self) -> str:
        return self.data if self.data in RECIPE_OF else Path(self.data).expanduser().resolve().name

    @property
    def variant(self) -> str:
        """The shortcut in short: a0.7, a0.7-cosine, learned, scale-both0.7071."""
        if self.shortcut != "decay":
            return f"{self.shortcut}{self.scale:.4g}"
        falls = f"a{self.alpha_min:g}" + (f"-{self.schedule}" if self.schedule != "linear" else "")
        return "learned" if self.schedule == "learned" else falls

    @property
    def name(self) -> str:
        return f"resnet_decay-{self.data_name}-b{self.blocks}-{self.variant}-s{self.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.out or f"runs/{self.name}").expanduser()


@dataclass(frozen=True)
class Study(Config):
    """Train a ResNet for every α_min, depth and seed of three lists; effective rank by depth and by epoch (Figure 9).

    A setting that is None takes the data set's recipe.
    """

    alpha_min: tuple[float, ...] = (1.0, 0.7, 0.4)  # weights of the last shortcut, one or more (paper Eq. 5)
    blocks: tuple[int, ...] = (8, 12, 16)  # depths, 8 (ResNet-18) to 16: more blocks in the third stage (paper B.3)
    seed: tuple[int, ...] = (0,)  # seeds; several become mean and standard deviation

    def __post_init__(self) -> None:
        for name in ("alpha_min", "blocks", "seed"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"{name} must list one value or more, not none")
            shown = {f"{value + 0.0:g}" if name == "alpha_min" else value for value in values}
            if len(shown) < len(values):
                raise ValueError(f"{name} must list values that differ in six digits, not {' '.join(map(str, values))}")
        if self.shortcut != "decay" or self.schedule == "learned":
            object.__setattr__(self, "alpha_min", (1.0,))  # nothing falls to it
        list(self.runs)  # making them checks their values

    @property
    def runs(self) -> list[Config]:
        """The single networks, seed by seed; `out` is the run folder of one and the parent of several."""
        common = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        runs = [
            Config(**common | {"seed": seed, "blocks": blocks, "alpha_min": alpha_min})
            for seed, blocks, alpha_min in itertools.product(self.seed, self.blocks, self.alpha_min)
        ]
        if len(runs) == 1 or not self.out:
            return runs
        return [dataclasses.replace(run, out=f"{self.out}/{run.name}") for run in runs]

    def figure(self, ending: str) -> Path:
        """Where Figure 9 goes (.png) and its tables (.json)."""
        return Path(self.out or "runs").expanduser() / f"resnet_decay-{self.data_name}-figure9{ending}"


# ---- Equations ------------------------------------------------------------------------------------------------------


def blocks_of_stages(depth: int) -> tuple[int, int, int, int]:
    """ResNet-18's 2, 2, 2, 2 blocks; what is more goes into the third stage (paper B.3)."""
    return 2, 2, depth - 6, 2


def shortcut_weights(
    depth: int, alpha_min: float, decay_projections: bool = True, schedule: str = "linear"
) -> list[float]:
    """Eq. 5, one shortcut per block: α = linspace(1, α_min, depth), equal steps, both ends included.

    `cosine` has the same ends and falls most in the middle; `constant` is α_min throughout; `learned` starts at √½.
    Without `decay_projections` the first shortcuts of stages 2, 3 and 4 are 1 and the others what they were.
    """
    alphas = torch.linspace(1.0, alpha_min, depth, dtype=torch.float64)
    if schedule == "cosine":
        fallen = 0.5 - 0.5 * torch.cos(torch.linspace(0, math.pi, depth, dtype=torch.float64))
        alphas = torch.lerp(alphas[0], alphas[-1], fallen)
    elif schedule != "linear":
        alphas = torch.full_like(alphas, alpha_min if schedule == "constant" else 0.5**0.5)
    projections = itertools.accumulate(blocks_of_stages(depth)[:3])  # the blocks that begin a stage
    undecayed = set() if decay_projections else set(projections)
    return [1.0 if l in undecayed else alpha for l, alpha in enumerate(alphas.tolist())]


def shortcut_pairs(config: Config) -> list[tuple[float, float]]:
    """(a, b) of every shortcut x ← a·x + b·f(x), block by block; Eq. 3 is (α, 1)."""
    if config.shortcut == "scale-both":
        return [(config.scale, config.scale)] * config.blocks
    if config.shortcut == "scale-branch":
        return [(1.0, config.scale)] * config.blocks
    alphas = shortcut_weights(config.blocks, config.alpha_min, config.decay_projections, config.schedule)
    return [(alpha, 1.0) for alpha in alphas]


def weighted_sum(weights: tuple[float | Tensor, float | Tensor], x: Tensor, branch: Tensor) -> Tensor:
    """a·x + b·f(x) for weights (a, b); with plain numbers and b = 1 it costs no more than the plain sum."""
    a, b = weights
    branch = branch if isinstance(b, float) and b == 1 else b * branch
    return a * x + branch if isinstance(a, Tensor) else torch.add(branch, x, alpha=a)


def drop_factors(noise: Tensor, drop_path: float) -> Tensor:
    """Stochastic depth (Huang et al. 2016): the factor of every branch (b, blocks), from noise as large in [0, 1).

    0 with chance p·l/L in block l = 1 … L, each sample for itself, else 1/(1 − p·l/L): 1 on average.
    """
    chance = drop_path * torch.arange(1, noise.shape[1] + 1, device=noise.device) / noise.shape[1]
    return (noise >= chance) / (1 - chance)


# ---- Model ----------------------------------------------------------------------------------------------------------


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """A convolution that keeps the image's size but for its stride, and its BatchNorm."""
    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]


class Block(nn.Module):
    """Basic block (He et al. 2016) whose shortcut is weakened (Eq. 3): the paper's one change."""

    def __init__(
        self, inputs: int, width: int, stride: int = 1, pair: tuple[float, float] = (1.0, 1.0), learned: bool = False
    ) -> None:
        super().__init__()
        self.pair = pair  # (a, b) of the shortcut
        self.logit = nn.Parameter(torch.logit(torch.tensor(pair[0]))) if learned else None
        self.branch = nn.Sequential(
            *conv(inputs, width, 3, stride), nn.ReLU(inplace=True), *conv(width, width, 3)
        )  # fmt: skip
        same = inputs == width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*conv(inputs, width, 1, stride))  # else: projection

    def weights(self, drop: Tensor | None = None) -> tuple[float | Tensor, float | Tensor]:
        """(a, b) as they are now: learned or not, b times the factors `drop` (b,) of the branch."""
        a, b = self.pair if self.logit is None else (self.logit.sigmoid(), 1.0)
        return (a, b) if drop is None else (a, b * drop[:, None, None, None])

    def forward(self, x: Tensor, drop: Tensor | None = None) -> Tensor:
        x = weighted_sum(self.weights(drop), self.shortcut(x), self.branch(x))  # a·x + b·f(x); a = α, b = 1 in Eq. 3
        return F.relu(x, inplace=True)


class ResNet(nn.Module):
    """ResNet-18 (He et al. 2016) with decayed shortcuts and 8 to 16 basic blocks.

    Takes images (b, c, h, w) in 0 … 255; `mean` and `std` (c,) of the data set are buffers of the model.
    """

    def __init__(
        self, config: Config, channels: int = 3, classes: int = 1000, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        width = config.width
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))
        if max(config.image_size) <= 64:
            self.stem = nn.Sequential(*conv(channels, width, 3), nn.ReLU(inplace=True))
        else:
            pool = nn.MaxPool2d(3, stride=2, padding=1)
            self.stem = nn.Sequential(*conv(channels, width, 7, stride=2), nn.ReLU(inplace=True), pool)

        pairs, learned = iter(shortcut_pairs(config)), config.schedule == "learned"
        self.stages = nn.ModuleList()  # at 1, 1/2, 1/4 and 1/8 of the stem's size
        inputs = width
        for i, count in enumerate(blocks_of_stages(config.blocks)):
            stage = nn.Sequential()
            for l in range(count):
                stride = 2 if i > 0 and l == 0 else 1
                stage.append(Block(inputs, width * 2**i, stride, next(pairs), learned))
                inputs = width * 2**i
            self.stages.append(stage)
        self.head = nn.Linear(inputs, classes)
        self.initialize(config.zero_init, generator)

    @torch.no_grad()
    def initialize(self, zero_init: bool, generator: torch.Generator | None) -> None:
        """torchvision's start: He et al.'s normal for convolutions, uniform within 1/√d for the classifier."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
            elif isinstance(module, Block) and zero_init:
                nn.init.zeros_(module.branch[-1].weight)
        bound = self.head.in_features**-0.5
        nn.init.uniform_(self.head.weight, -bound, bound, generator=generator)
        nn.init.uniform_(self.head.bias, -bound, bound, generator=generator)

    @property
    def blocks(self) -> list[Block]:
        return [block for stage in self.stages for block in stage]

    @property
    @torch.no_grad()
    def alphas(self) -> list[float]:
        """The shortcuts' weights as they are now, in order."""
        return [float(block.weights()[0]) for block in self.blocks]

    def features(self, images: Tensor, drops: Tensor | None = None) -> Tensor:
        """Images (b, c, h, w), 0 … 255, to the last block's output, averaged over places (b, d).

        `drops` (b, blocks), if given, are the branches' factors (drop_factors).
        """
        x = self.stem((images - self.mean[:, None, None]) / self.std[:, None, None])
        for l, block in enumerate(self.blocks):
            x = block(x, None if drops is None else drops[:, l])
        return x.mean(dim=(2, 3))

    def forward(self, images: Tensor, drops: Tensor | None = None) -> Tensor:
        """Images (b, c, h, w), 0 … 255, to logits (b, classes)."""
        return self.head(self.features(images, drops))


# ---- Train ----------------------------------------------------------------------------------------------------------


DIVERGED = (
    "try a lower --lr or a higher --alpha-min (the paper's runs are unstable at 0.4 and below), with another --out or "
    "--overwrite"
)
SAVE_SECONDS = 600  # a checkpoint after every epoch, and within epochs that take longer than this


def learning_rate(config: Config, epoch: float, batch: int) -> float:
    """lr × batch/256 at a fractional `epoch`: cosine to 0."""
    return config.lr * batch / 256 * 0.5 * (1 + math.cos(math.pi * epoch / config.epochs))


def due(config: Config, epoch: int) -> bool:
    """Whether the network is tested after this epoch, counted from 1."""
    return epoch == config.epochs or (config.eval_every > 0 and epoch > 0 and epoch % config.eval_every == 0)


def share_statistics(model: nn.Module) -> None:
    """Let BatchNorm's running statistics be their mean over the processes, each of which has seen its shares alone."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and probe.process()[1] > 1:
            for running in (module.running_mean, module.running_var):
                running.copy_(probe.summed(running) / probe.process()[1])


def check_finite(config: Config, value: float, step: int, lr: float) -> None:
    """Raises FloatingPointError where the loss, or the sum of the weights, is not finite."""
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the loss is not finite at step {step} (lr {lr:.1e}): {DIVERGED}; {config.folder} keeps what was saved before"
        )


def build(config: Config, images: Tensor, classes: int, device: torch.device) -> ResNet:
    """The untrained model that the seed decides, with the mean and deviation of train `images` (n, c, h, w)."""
    model = ResNet(config, images.shape[1], classes, generator_for("cpu", config.seed, "init"))
    std, mean = torch.std_mean(images[:: max(1, len(images) // 1000)].float(), dim=(0, 2, 3))
    model.mean.copy_(mean)
    model.std.copy_(std.clamp(min=1.0))  # images of one colour have none
    if (
        device.type == "cuda" and probe.process()[1] > 1
    ):  # statistics of the whole batch; on CPUs each share has its own
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # Not on CPUs, though faster there: oneDNN's gradient of a narrow 1×1 convolution writes past its memory (its issue 6035).
    return model.to(device, memory_format=torch.channels_last if device.type == "cuda" else torch.contiguous_format)


def train(config: Config) -> dict:
    """Train one network, test it, and leave everything in the run folder; returns what result.json holds.

    A run that was killed goes on where it was; a finished one is not trained again, its result is returned. Raises
    BadInput where the data, the device or the run folder can't be used, FloatingPointError where the loss is not finite.
    """
    device = choose_device(config.device)
    saved, result = open_run(config)
    if result:
        say(f"{config.folder} is finished: its result is shown; --overwrite trains again")
        return result
    root = Path(config.root).expanduser()
    crops = config.min_scale < 1 and not config.padding
    data = probe.load_images(config.data, root, config.image_size, config.limit, config.skip_bad_images, crops)
    n, channels = data.train.shape[:2]
    batch, (number, processes) = min(config.batch_size, n), probe.process()
    steps_per_epoch = math.ceil(n / batch)
    if n // steps_per_epoch < 2:
        raise BadInput(
            f"batch_size {batch} leaves a batch of one of the {n} images, and BatchNorm needs two: use 3 or more"
        )
    if n // steps_per_epoch // processes < 2:
        raise BadInput(
            f"batch_size {batch} leaves {processes} processes less than two images each, which BatchNorm needs: use "
            f"{3 * processes} or more, or start fewer"
        )

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # of this network, not of those before it
    model = build(config, data.train, len(data.classes), device)
    logits = [block.logit for block in model.blocks if block.logit is not None]  # of learned shortcuts: no weight decay
    others = [p for p in model.parameters() if all(p is not logit for logit in logits)]
    groups = [{"params": others, "weight_decay": config.weight_decay}, {"params": logits, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(
        groups, config.lr, config.momentum, nesterov=config.momentum > 0, fused=device.type in ("cpu", "cuda")
    )
    state = {"step": 0, "loss": 0.0, "loss_sum": 0.0, "seconds": 0.0, "images": 0, "train_images": n}
    state["records"] = []  # what metrics.jsonl holds
    lock = start_run(config, saved, model, optimizer, state)
    board = tensorboard(config, state["records"])

    flops = probe.training_flops(model, torch.zeros(1, channels, *config.image_size, device=device))
    rate = probe.product_rate(device, torch.bfloat16 if config.bf16 else torch.float32)
    which = {"alpha_min": config.alpha_min, "blocks": config.blocks, "seed": config.seed}
    size = "x".join(map(str, (channels, *config.image_size)))
    say(
        f"{device_name(device)}, torch {torch.__version__}, run folder {config.folder}",
        f"{config.data}: {n} train and {len(data.test)} test images of {size} in {len(data.classes)} classes",
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {flops / 1e9:.3g} GFLOP an image, "
        f"{described(config, model.alphas)}",
    )
    if batch < config.batch_size:
        say(f"{n} training images are fewer than batch_size {config.batch_size}: all of them are in every batch")

    images, labels = resident(data.train, device), data.train_labels
    if config.compile:
        torch.compiler.reset()  # it holds eight networks at most
    network = torch.compile(model) if config.compile else model
    if processes > 1:  # each takes its share of every batch, and gradients are averaged
        network = DistributedDataParallel(network, [device] if device.type == "cuda" else None)
    steps = config.epochs * steps_per_epoch
    bar = tqdm(
        total=steps, initial=state["step"], desc=as_line("training", which), unit=" steps", leave=None, disable=None
    )
    loss_sum = torch.tensor(state["loss_sum"] if number == 0 else 0.0, device=device)  # over the steps of this epoch
    order, seen, started = None, 0, time.monotonic()

    def end_epoch(stop: Stop) -> None:
        """Test where that is due, and log; may be stopped at once, as the checkpoint has the epoch."""
        stop.at_once = True
        record = state["records"][-1]
        scores = evaluate(model, data) if due(config, record["epoch"]) else {}
        say(as_line("train", which | record), *([as_line("eval", which | scores)] if scores else []))
        record |= scores
        log(config, state["records"], board)
        stop.at_once = False
        if scores:
            save_checkpoint(config, model, optimizer, state)

    with Stop() as stop:
        last = state["records"][-1] if state["records"] else {"epoch": 0}
        if due(config, last["epoch"]) and "accuracy" not in last:  # it was stopped while it was tested
            end_epoch(stop)
        for step in range(state["step"], steps):
            epoch, i = divmod(step, steps_per_epoch)
            if order is None or i == 0:  # equal batches, give or take an image: a small last one would upset BatchNorm
                order = torch.randperm(n, generator=generator_for("cpu", config.seed, "order", epoch))
                order = order.tensor_split(steps_per_epoch)
            whole = len(order[i])
            mine = probe.share(whole)
            index = order[i][mine]
            generator = generator_for(device, config.seed, "step", step)  # drawn for the whole batch by every process
            views, truth = images[index.to(images.device)].to(device), labels[index].to(device)
            crop = (config.image_size, generator, config.min_scale, config.flip, config.padding)
            views = probe.augment(views, *crop, batch=whole, place=mine)
            drops = None
            if config.drop_path:
                uniform = torch.rand(whole, config.blocks, generator=generator, device=device)[mine]
                drops = drop_factors(uniform, config.drop_path)

            with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16 and device.type == "cuda"):
                loss = F.cross_entropy(network(views, drops), truth) * (len(views) / whole)
            (loss * processes).backward()  # the average over processes becomes the sum
            lr = learning_rate(config, step / steps_per_epoch, batch)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach()

            bar.update()
            seen += whole
            last_of_epoch = i == steps_per_epoch - 1
            if not last_of_epoch and step % 20 and not (stop.signal and processes == 1):
                continue
            epoch_sum, seconds = probe.summed(loss_sum).item(), time.monotonic() - started
            stopped, late = probe.of_any(bool(stop.signal)), probe.of_any(seconds > SAVE_SECONDS)
            mean_loss = epoch_sum / (i + 1)
            bar.set_postfix_str(f"loss {mean_loss:.4f}, lr {lr:.1e}, {seen / seconds:,.0f} images/s")
            check_finite(config, mean_loss, step, lr)
            if not (last_of_epoch or stopped or late):
                continue
            check_finite(config, sum(p.detach().sum() for p in model.parameters()).item(), step, lr)
            share_statistics(model)
            state |= {"step": step + 1, "loss": mean_loss, "loss_sum": 0.0 if last_of_epoch else epoch_sum}
            state |= {"seconds": state["seconds"] + seconds, "images": state["images"] + seen}
            if last_of_epoch:
                record = {"epoch": epoch + 1, "step": step + 1, "loss": mean_loss, "lr": lr}
                record["images_per_second"] = seen / seconds
                if rate:
                    record["utilisation"] = flops * seen / seconds / processes / rate
                if config.schedule == "learned":
                    record["alphas"] = model.alphas
                state["records"].append(record)
                loss_sum.zero_()
            save_checkpoint(config, model, optimizer, state)
            if stopped:
                raise KeyboardInterrupt(stop.signal or signal.SIGTERM, step + 1)
            if last_of_epoch:
                end_epoch(stop)
            seen, started = 0, time.monotonic()
    bar.close()

    records = state["records"]
    draw_curves(config, records)
    tested = [{name: r[name] for name in ("epoch", "loss", *SCORES)} for r in records if "accuracy" in r]
    result = {
        "script": SCRIPT, "data": config.data, **which, "alpha_eff": rank.alpha_eff(model.alphas), "epochs": config.epochs,
        "steps": steps, "loss": state["loss"], "seconds": state["seconds"],
        "images_per_second": state["images"] / max(state["seconds"], 1e-9), "peak_memory_bytes": peak_memory(device),
        "device": device_name(device), "torch": torch.__version__, "utilisation": records[-1].get("utilisation"),
        **{name: records[-1][name] for name in SCORES}, "per_epoch": tested,
    }  # fmt: skip
    write_whole(config.folder / "result.json", json.dumps(result, indent=1).encode())
    (config.folder / ".lock").unlink(missing_ok=True)
    lock.close()
    return result


# ---- Evaluate -------------------------------------------------------------------------------------------------------

SCORES = ("accuracy", "effective_rank", "exp_effective_rank")


@torch.no_grad()
def evaluate(model: ResNet, data: probe.Images) -> dict[str, float]:
    """SCORES on the test images: accuracy in percent; effective rank (Eq. 6) of the pooled features, and exp of it."""
    device = model.mean.device
    pooled = probe.features(
        model, lambda images: [model.features(images)[:, None]], data.test, device=device, pools=["mean"]
    )
    features = pooled["mean"][:, 0]  # (n, d)
    if not torch.isfinite(features).all():
        raise FloatingPointError(f"the features are not finite: {DIVERGED}")
    right = model.head(features).argmax(dim=1) == data.test_labels.to(device)
    entropy = rank.effective_rank(features)
    accuracy = 100 * right.double().mean().item()
    return {"accuracy": accuracy, "effective_rank": entropy, "exp_effective_rank": math.exp(entropy)}


def train_all(study: Study) -> tuple[list[dict], int]:
    """Train what is not yet finished of the study; the results, and how many networks diverged.

    Every run folder is looked at before the first one is trained. Figure 9 is drawn anew after each network.
    """
    runs = study.runs
    results = {i: result for i, (_, result) in enumerate(map(open_run, runs)) if result}  # finished before
    diverged = 0
    for i, run in enumerate(tqdm(runs, "study", unit="network", disable=None if len(runs) > 1 else True)):
        try:
            results[i] = train(run)
        except FloatingPointError as error:
            diverged += 1
            which = f"alpha_min {run.alpha_min:g}, blocks {run.blocks}, seed {run.seed}"
            tqdm.write(f"{SCRIPT}.py: {which}: {error}", file=sys.stderr)
            continue
        say(as_line("result", {k: v for k, v in results[i].items() if isinstance(v, (int, float))}))
        if len(runs) > 1:
            tables = figure_9([results[i] for i in sorted(results)])
            draw_figure_9(study, tables)
            write_whole(study.figure(".json"), json.dumps(tables, indent=1).encode())
    return [results[i] for i in sorted(results)], diverged


def figure_9(results: list[dict]) -> dict[str, list[dict]]:
    """The two tables of Figure 9, a row each for (a) α_min and depth, (b) α_min and epoch of the shallowest network.

    Every score is the mean over seeds and has beside it the standard deviation (over n − 1; None for one seed).
    """

    def averaged(records: list[dict]) -> dict:
        columns = {name: [record[name] for record in records] for name in SCORES}
        means = {name: statistics.fmean(values) for name, values in columns.items()}
        spreads = {f"{name}_std": statistics.stdev(v) if len(v) > 1 else None for name, v in columns.items()}
        return {"seeds": len(records)} | means | spreads

    by_depth, by_epoch = {}, {}
    for result in results:
        by_depth.setdefault((result["alpha_min"], result["blocks"], result["alpha_eff"]), []).append(result)
    shallowest = min(result["blocks"] for result in results)
    for result in results:
        for record in result["per_epoch"] if result["blocks"] == shallowest else []:
            by_epoch.setdefault((result["alpha_min"], shallowest, record["epoch"]), []).append(record)
    return {
        "a": [dict(zip(("alpha_min", "blocks", "alpha_eff"), key)) | averaged(of) for key, of in by_depth.items()],
        "b": [dict(zip(("alpha_min", "blocks", "epoch"), key)) | averaged(of) for key, of in by_epoch.items()],
    }


def draw_figure_9(study: Study, tables: dict[str, list[dict]]) -> None:
    """Effective rank of the test features: (a) after the last epoch against depth, (b) against epoch, a line per α_min."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # here, as it takes a second

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    alphas = sorted(study.alpha_min, reverse=True)
    for panel, table, x in zip(panels, tables.values(), ("blocks", "epoch")):
        for i, alpha_min in enumerate(alphas):
            rows = sorted((row for row in table if row["alpha_min"] == alpha_min), key=lambda row: row[x])
            ranks, spreads = ([row[name] for row in rows] for name in ("effective_rank", "effective_rank_std"))
            style = {"color": colormaps["viridis"](0.85 * i / max(1, len(alphas) - 1)), "marker": ".", "capsize": 2}
            spreads = [math.nan if spread is None else spread for spread in spreads] if any(spreads) else None
            panel.errorbar([row[x] for row in rows], ranks, spreads, label=f"α_min = {alpha_min:g}", **style)
        panel.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        panel.set(xlabel=x)
    panels[0].set(ylabel="effective rank (Eq. 6)", xticks=sorted(study.blocks))
    panels[0].set_title(f"(a) {study.data_name}, after the last epoch")
    panels[1].set_title(f"(b) {tables['b'][0]['blocks']} blocks, by epoch")
    panels[0].legend()
    save_figure(study.figure(".png"), figure)


def draw_curves(config: Config, records: list[dict]) -> None:
    """curves.png: loss, test accuracy and effective rank against epoch."""
    from matplotlib.figure import Figure

    learned = [record for record in records if "alphas" in record]
    figure = Figure(figsize=(13 if learned else 10, 3.4), layout="constrained")
    figure.suptitle(config.name)
    titles = {"loss": "loss", "accuracy": "test accuracy (%)", "effective_rank": "effective rank (Eq. 6)"}
    axes = figure.subplots(1, 4 if learned else 3)
    if learned:
        draw_learned(axes[3], learned)
    for axis, (name, title) in zip(axes, titles.items()):
        held = [record for record in records if name in record]
        axis.plot([record["epoch"] for record in held], [record[name] for record in held], marker=".")
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axis.set(title=title, xlabel="epoch")
    save_figure(config.folder / "curves.png", figure)


def draw_learned(axis: object, records: list[dict]) -> None:
    """Learned shortcut weights by shortcut, at a few epochs, the first light and the last dark."""
    shown = records[:: -max(1, math.ceil(len(records) / 5))][::-1]
    for i, record in enumerate(shown):
        numbers = range(1, len(record["alphas"]) + 1)
        shade = str(0.8 * (1 - (i + 1) / len(shown)))
        axis.plot(numbers, record["alphas"], marker=".", color=shade, label=f"epoch {record['epoch']}")
    axis.set(title="learned α", xlabel="shortcut")
    axis.legend(fontsize=7)


def report(study: Study, results: list[dict]) -> None:
    """Print both tables of Figure 9, at most ten epochs of the second, and where everything lies."""

    def score(row: dict, name: str, digits: int) -> str:
        spread = row[f"{name}_std"]
        return f"{row[name]:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")

    columns = {"effective_rank": 3, "exp_effective_rank": 1, "accuracy": 2}
    tables = figure_9(results)
    epochs = sorted({row["epoch"] for row in tables["b"]})
    shown = epochs[:: -max(1, math.ceil(len(epochs) / 10))]
    tables["b"] = [row for row in tables["b"] if row["epoch"] in shown]
    by_epoch = f"{tables['b'][0]['blocks']} blocks, by epoch"
    titles = {"b": by_epoch}
    if len(study.runs) > 1:
        spread = "mean ± standard deviation over seeds, " if len(study.seed) > 1 else ""
        titles = {"a": f"Figure 9 a: after the last epoch ({spread}test images)", "b": f"Figure 9 b: {by_epoch}"}
    for part, title in titles.items():
        x = {"a": "blocks", "b": "epoch"}[part]
        print(f"\n{title}\n{'alpha_min':>9}{x:>8}{'seeds':>7}" + "".join(f"{name:>22}" for name in columns))
        for row in tables[part]:
            scores = "".join(f"{score(row, name, digits):>22}" for name, digits in columns.items())
            print(f"{row['alpha_min']:>9g}{row[x]:>8}{row['seeds']:>7}{scores}")
    place = study.runs[0].folder
    if len(study.runs) > 1:
        place = f"a folder each in {place.parent}"
        print(f"\nfigure and tables: {study.figure('.png')}, {study.figure('.json')}")
    print(f"curves.png, metrics.jsonl, checkpoint.pt and result.json are in {place}", flush=True)


# ---- Plumbing -------------------------------------------------------------------------------------------------------


SCRIPT = "resnet_decay"
ELSEWHERE = ("root", "device", "out", "overwrite", "compile", "log", "recipe", "model")  # not in config.json
DONE = "per_epoch"  # what a finished result.json has
SMALLER = "try a smaller --batch-size, --width or --image-size"
FILES = ("result.json", "checkpoint.pt", "metrics.jsonl", "curves.png")  # and config.json
GROUPS = {
    "--data": "data", "--alpha-min": "shortcuts", "--image-size": "network", "--epochs": "training", "--eval-every": "run",
}  # fmt: skip  # the first flag of each group, and its title in --help
ANEW = "delete that folder, name another --out, or --overwrite to start anew"


def choose_device(name: str) -> torch.device:
    """The device of that name; auto takes CUDA, then MPS, then the CPU. Raises BadInput where there is no such device.

    Under torchrun each process of a machine takes a GPU of its own.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadInput(f"device {name!r} can't be used here: use auto, cpu, cuda, cuda:1 or mps") from error
    if device.type == "cpu":
        probe.keep_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32
    return device


def device_name(device: torch.device) -> str:
    """What the run says that it ran on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)" if device.type == "cpu" else device.type


def described(config: Config, alphas: list[float]) -> str:
    """The shortcuts in words: their number, their weights, and what they leave of the input."""
    plain = f"a{config.alpha_min:g}"
    which = "" if config.variant == plain else f" ({config.variant})"
    ends = f"from {max(alphas):g} to {min(alphas):g}"
    return f"{len(alphas)} shortcuts {ends}{which}, cumulative decay {rank.alpha_eff(alphas):.3e}"


def generator_for(device: torch.device | str, *key: object) -> torch.Generator:
    """A random stream of its own for every key, so that a run can go on at any step without saved random states."""
    return torch.Generator(device).manual_seed(zlib.crc32(repr(key).encode()))


def resident(images: Tensor, device: torch.device) -> Tensor:
    """The training images on the GPU where they take less than a third of its free memory, else as they are."""
    fits = device.type == "cuda" and images.nbytes < torch.cuda.mem_get_info(device)[0] / 3
    return images.to(device) if fits else images


def peak_memory(device: torch.device) -> int | None:
    """Bytes: the most that CUDA held, or that this process held; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def say(*lines: str) -> None:
    """Print above the bars."""
    with tqdm.external_write_mode():
        print(*lines, sep="\n", flush=True)


def as_line(title: str, values: dict) -> str:
    """One greppable line: title name=value name=value …"""
    numbers = ((name, value) for name, value in values.items() if not isinstance(value, (list, dict)))
    return title + "".join(f" {name}={value:.5g}" for name, value in numbers)


def settings(config: Config) -> dict:
    """The script and its config as JSON holds them, less what does not decide the numbers or stands in other fields."""
    fields = dataclasses.asdict(config).items()
    held = {"script": SCRIPT} | {name: value for name, value in fields if name not in ELSEWHERE}
    if config.data not in RECIPE_OF:  # the same folder, however it is spelled
        held["data"] = str(Path(config.data).expanduser().resolve())
    return json.loads(json.dumps(held))


def open_run(config: Config) -> tuple[dict | None, dict | None]:
    """The checkpoint and the result that the run folder holds, each None where there is none.

    Raises BadInput if the folder can't be written, or holds anything else than this very run.
    """
    folder, file = config.folder, config.folder / "checkpoint.pt"
    try:
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        names = {name for name in names if not name.endswith((".tmp", ".lock"))}
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        raise BadInput(f"can't use the run folder {str(folder)[:200]}: {error.strerror}") from error
    if names:
        before, now = read_json(folder / "config.json"), settings(config)
        if not isinstance(before, dict) or "alpha_min" not in before:
            raise BadInput(f"{folder} is not empty and not a run's folder: name another with --out")
        differing = [name for name in now if before.get(name) != now[name]]
        if differing and not config.overwrite:
            name = differing[0]
            raise BadInput(
                f"{folder} holds a run with {name} {before.get(name)}, not {now[name]}: name another --out, or --overwrite "
                "to discard it"
            )
        result = read_json(folder / "result.json")
        if not config.overwrite and isinstance(result, dict) and result.get("script") == SCRIPT and DONE in result:
            return None, result
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise BadInput(f"can't write the run folder {folder}: {existing} is not a folder that can be written to")
    if config.overwrite or not file.exists():
        return None, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old pickles
            saved = torch.load(file, map_location="cpu", weights_only=True)
        differing = saved["config"] != settings(config)
    except Exception as error:  # a damaged or foreign file makes torch.load raise whatever it meets
        raise BadInput(f"{file} is damaged or not a checkpoint of {SCRIPT}.py: {ANEW}") from error
    if differing:
        raise BadInput(f"{file} is of a run with other settings: {ANEW}")
    return saved, None


def start_run(
    config: Config, saved: dict | None, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict
) -> object:
    """Make the run folder, or fill model, optimizer and state from the saved checkpoint; returns the folder's lock.

    Several processes meet here, after every one of them has looked into the folder.
    """
    folder = config.folder
    if saved:
        try:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            found = {name: type(value)(saved["state"][name]) for name, value in state.items()}
            whole = found["step"] >= 0 and all({"epoch", "loss"} <= record.keys() for record in found["records"])
        except Exception as error:  # whatever a file with the right names and the wrong things in it leads to
            raise BadInput(f"{folder}/checkpoint.pt does not fit the model: {ANEW}") from error
        if not whole:
            raise BadInput(f"{folder}/checkpoint.pt is damaged: {ANEW}")
        if found["train_images"] != state["train_images"]:
            raise BadInput(
                f"{folder} holds a run on {found['train_images']} training images, and {config.data} now has "
                f"{state['train_images']}: {ANEW}"
            )
        state |= found
        print(f"going on at step {state['step']}")
    probe.of_any(False)  # all have met
    if probe.process()[0] > 0:
        return open(os.devnull)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = claim(folder)
        if config.overwrite:
            for name in FILES:
                (folder / name).unlink(missing_ok=True)
        write_whole(folder / "config.json", json.dumps(settings(config), indent=1).encode())
        log(config, state["records"])
        return lock
    except OSError as error:
        raise BadInput(f"can't write the run folder {folder}: {error.strerror}") from error


def save_checkpoint(config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Everything that is needed to go on: tensors, numbers and text only."""
    file = io.BytesIO()
    saved = {"config": settings(config), "state": state}
    if probe.process()[0] > 0:
        return
    torch.save(saved | {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    write_whole(config.folder / "checkpoint.pt", file.getbuffer())


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """The file is written whole or not at all, by the first process."""
    if probe.process()[0] > 0:
        return
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except BaseException:  # a full disk, Ctrl-C
        partial.unlink(missing_ok=True)
        raise


def save_figure(path: Path, figure: object) -> None:
    """A matplotlib figure as PNG."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    write_whole(path, file.getbuffer())


def log(config: Config, records: list[dict], board: object = None) -> None:
    """metrics.jsonl: a line a record; the checkpoint holds them too. The last one's numbers go on TensorBoard's `board`."""
    write_whole(config.folder / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records).encode())
    if board is not None:
        add_scalars(board, records[-1])


def add_scalars(board: object, record: dict) -> None:
    """A record's numbers on TensorBoard, at its epoch."""
    for name in (name for name, value in record.items() if isinstance(value, (int, float))):
        board.add_scalar(name, record[name], record["epoch"])
    board.flush()


def tensorboard(config: Config, records: list[dict]) -> object:
    """TensorBoard's writer into the run folder, which holds the records so far; None unless --log asks for it."""
    for old in config.folder.glob("events.out.tfevents.*") if probe.process()[0] == 0 else ():
        old.unlink()  # of before it was stopped, or of the run that was overwritten
    if config.log == "none" or probe.process()[0] > 0:
        return None
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(config.folder)
    for record in records:
        add_scalars(board, record)
    return board


def claim(folder: Path) -> object:
    """The open lock of a run folder, which ends with this process. Raises BadInput where another process has it."""
    file = open(folder / ".lock", "w")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows
        pass
    except OSError as error:
        raise BadInput(f"{folder} is in use by another process: wait for it, or name another --out") from error
    return file


class Stop:
    """Ctrl-C and SIGTERM while this is entered: noted, so that a step ends and is saved; a second one stops at once.

    While `at_once` is set the first one does, too: where nothing is left to be saved.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.signal, self.at_once, self.before = None, at_once, {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self.note)
        return self

    def note(self, number: int, frame: object) -> None:
        if self.at_once or self.signal:
            raise KeyboardInterrupt(number)
        self.signal = number

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def read_json(source: Path | str) -> object:
    """A file's or a line's JSON; None if it has none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(source.read_text() if isinstance(source, Path) else source)


def grouped(text: str) -> str:
    """tyro's help with a title before each of GROUPS."""
    for flag, title in GROUPS.items():
        text = re.sub(rf"^(?=  {flag}[ ,])", f" {title} ".ljust(80, "-") + "\n", text, flags=re.MULTILINE)
    return text


def parse(arguments: list[str] | None = None) -> Study:
    """The command line as a Study; tyro's boxed complaints become one line. Raises BadInput."""
    complaint, shown = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(shown):
            return tyro.cli(Study, args=arguments)
    except SystemExit as stop:
        if not stop.code:
            print(grouped(shown.getvalue()), end="")
            raise
        _, *rows = (row.strip(" │") for row in complaint.getvalue().splitlines())  # a title, then what is wrong
        between_rules = itertools.groupby(rows, lambda row: not row.strip("╰─╯-"))
        wrong = next(list(group) for rule, group in between_rules if not rule)
        text = " ".join(" ".join(wrong).split())
        text = text.removeprefix("Error parsing Study: ").split(" Got errors:")[0]
        raise BadInput(f"{text} (--help lists every flag)") from None


# ---- main -----------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, 2 for bad input, 1 for a failed run, 130 for Ctrl-C."""
    study = None
    try:
        study = parse(arguments)
        with Stop(at_once=True), probe.processes_joined(choose_device(study.device).type == "cuda"):
            results, diverged = train_all(study)
            if results:
                report(study, results)
        return 1 if diverged else 0
    except BadInput as error:
        print(f"{SCRIPT}.py: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        print(f"{SCRIPT}.py: out of memory: {SMALLER}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # nobody reads on: python mae.py | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk, most often
        print(f"{SCRIPT}.py: {error.strerror} ({error.filename}); the last checkpoint is kept", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        without = " without --overwrite" if "--overwrite" in (arguments or sys.argv) else ""
        number, *step = stop.args or (signal.SIGINT,)
        begun = study and any((run.folder / "checkpoint.pt").exists() for run in study.runs)
        place = f"step {step[0]}, which is saved" if step else "the last checkpoint"
        end = f"goes on from {place}" if step or begun else "starts anew: nothing was saved yet"
        print(f"{SCRIPT}.py: stopped; the same command{without} {end}", file=sys.stderr)
        return 128 + number


if __name__ == "__main__":
    sys.exit(main())
