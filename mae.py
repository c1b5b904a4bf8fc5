"""Masked autoencoder with decayed identity shortcuts (Residual Connections Harm Generative Representation Learning).

A ViT block adds its input to its output twice. Here the added input is weakened with depth:

    x_{l+1} = α_l · x_l + f_l(x_l)                                (Eq. 3)   Block.forward
    x_L     = (Π_l α_l) x_0 + Σ_l (Π_{i>l} α_i) f_l(x_l)          (Eq. 4)   what the encoder then computes
    α_l     falls in equal steps from 1 to α_min                  (Eq. 5)   shortcut_weights

so that the deep layers must build features of their own instead of passing the pixels on. The decoder, which does need
the pixels, gets them by UNet skips. One number to choose: α_min.

    python mae.py --alpha-min 0.6                                 # built-in digits, a laptop
    python mae.py --data cifar100 --alpha-min 0.6                 # one GPU
    python mae.py --data imagenet100/ --alpha-min auto            # a folder of images; α_min from the model's depth

Each command pretrains, then says how good the features are: linear probe, k-NN and effective rank of every layer,
beside raw pixels and the untrained encoder. What the first one printed stands in the README.

Shapes: b batch, n patches, k kept patches, d width, p values in a patch, c channels, h and w pixels.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import itertools
import json
import math
import operator
import os
import re
import signal
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import tyro
from einops import rearrange
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import probe
import rank
from probe import BadInput

# ---- Config ---------------------------------------------------------------------------------------------------------

# One recipe per data set; a flag overrides its field. A folder of images takes "imagenet", the paper's (A.1).
RECIPES = {
    "digits": dict(
        image_size=(16, 16), model="micro", patch_size=2, epochs=4, batch_size=16, lr=16e-3, warmup_epochs=0.5,
        min_scale=1.0, flip=False, eval_every=2,
    ),
    "fashion-mnist": dict(
        image_size=(28, 28), model="vit-ti", patch_size=4, epochs=200, batch_size=256, lr=6e-4, warmup_epochs=10,
        min_scale=0.4, flip=True, eval_every=20,
    ),
    "cifar": dict(
        image_size=(32, 32), model="vit-s", patch_size=4, epochs=400, batch_size=512, lr=3e-4, warmup_epochs=20,
        min_scale=0.2, flip=True, eval_every=20,
    ),
    "imagenet": dict(
        image_size=(224, 224), model="vit-b", patch_size=16, epochs=800, batch_size=4096, lr=1.5e-4, warmup_epochs=40,
        min_scale=0.2, flip=True, eval_every=100,
    ),
}  # fmt: skip
RECIPES["mnist"] = RECIPES["fashion-mnist"] | {"flip": False}  # characters are not mirrored
RECIPES["svhn"] = RECIPES["cifar"] | {"flip": False}
RECIPE_OF = {name: name for name in ("digits", "mnist", "fashion-mnist", "svhn")}  # a named data set's recipe
RECIPE_OF |= {"kmnist": "mnist", "cifar10": "cifar", "cifar100": "cifar", "stl10": "cifar"}
MODELS = {  # encoder width, depth, heads; decoder width, depth, heads
    "micro": (64, 8, 4, 32, 3, 2),
    "vit-ti": (192, 12, 3, 256, 8, 8),
    "vit-s": (384, 12, 6, 512, 8, 16),
    "vit-b": (768, 12, 12, 512, 8, 16),  # paper A.1
    "vit-l": (1024, 24, 16, 512, 8, 16),
}
VARIANTS = {
    "schedule": ("linear", "cosine", "constant", "learned"),
    "decay_on": ("both", "attn", "mlp"),
    "shortcut": ("decay", "scale-both", "scale-branch"),
}
PROTOCOLS = ("linear", "knn", "linear-imagenet", "finetune", "scratch", "tsne", "segment", "reconstruct")
OF_PROTOCOLS = ("epochs", "batch_size", "lr", "warmup_epochs")  # what --evaluate takes from the protocol, unless told
HEEDED = {  # the flags that --evaluate and --export heed; all else is the finished run's
    "evaluate": {"evaluate", "protocol", "masks", "root", "seed", "device", "out"},
    "linear-imagenet": {*OF_PROTOCOLS, "limit"},
    "finetune": {*OF_PROTOCOLS, "limit", "weight_decay", "drop_path"},
    "scratch": {*OF_PROTOCOLS, "limit", "weight_decay", "drop_path"},
    "export": {"export", "to", "to_hf", "device", "overwrite"},
}


@dataclass(frozen=True)
class Config:
    """Pretrain a masked autoencoder with decayed shortcuts, then probe its features.

    A field that is None takes the data set's recipe, or the named model's size.
    """

    data: str = "digits"  # digits (built in), a torchvision name, or a folder with train/<class>/* and val/<class>/*
    root: str = "data"  # where named data sets and the cache of decoded images live
    recipe: str | None = None  # digits, fashion-mnist, mnist, cifar, svhn or imagenet; None: the data set's
    alpha_min: float | Literal["auto"] = 0.6  # weight of the last shortcut (paper Eq. 5); auto: from the depth
    schedule: str = "linear"  # how α falls from 1: linear, cosine, constant (α_min throughout) or learned
    decay_on: str = "both"  # shortcuts that decay: both, attn or mlp (paper Table 3b)
    shortcut: str = "decay"  # α·x + f (Eq. 3); scale-both: c·(x + f); scale-branch: x + c·f (paper Table 3b)
    scale: float = 0.5**0.5  # the constant c of these two
    drop_path: float = 0.0  # stochastic depth: the last block's chance to be dropped, the lth of L has l/L of it
    unet: bool = True  # skips from the encoder into the decoder (without them: paper Table 3a)
    mask_ratio: float = 0.75  # share of the patches that is hidden (He et al. 2022)

    model: str | None = None  # sizes by name: micro, vit-ti, vit-s, vit-b or vit-l; patch_size is apart
    image_size: tuple[int, ...] | int | None = None  # pixels: one number, or height and width
    patch_size: int | None = None  # pixels
    width: int | None = None  # of the encoder's tokens
    depth: int | None = None  # encoder blocks, two shortcuts each
    heads: int | None = None  # attention heads of the encoder
    decoder_width: int | None = None  # of the decoder's tokens
    decoder_depth: int | None = None  # decoder blocks; the first depth/2 take a skip each
    decoder_heads: int | None = None  # attention heads of the decoder

    init: str | None = None  # a plain ViT's weights to start from: facebookresearch/mae's, timm's or an exported run's
    epochs: int | None = None  # passes over the training images
    batch_size: int | None = None  # images per optimiser step
    lr: float | None = None  # base learning rate, for 256 images a step (paper A.1: 1.5e-4)
    warmup_epochs: float | None = None  # linear warm-up, then cosine to 0 (paper A.1: 40)
    weight_decay: float = 0.05  # AdamW's, on matrices only (paper A.1)
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's (paper A.1)
    clip_grad: float | None = None  # largest norm of the gradient; None: no clipping
    accumulate: int = 1  # parts that a batch is split into, to save memory; the mathematics stays
    min_scale: float | None = None  # smallest share of the image in a random crop (paper A.1: 0.2); 1: no crop
    flip: bool | None = None  # mirror half of the images

    pool: Literal["mean", "cls"] = "mean"  # probed feature: mean of all tokens (the authors' code) or class token
    eval_every: int | None = None  # epochs between probes; 0: only at the end
    probe_limit: int = 130_000  # training images probed at most, evenly over the classes (ImageNet-100 has 126,689)
    seed: int = 0  # decides everything
    limit: int | None = None  # only the first N training images, evenly over the classes
    skip_bad_images: bool = False  # go on without images that can't be read
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    bf16: bool = True  # bfloat16 on CUDA
    compile: bool = False  # torch.compile the training step
    log: Literal["none", "tensorboard"] = "none"  # what metrics.jsonl is written to besides
    out: str | None = None  # run folder; None: runs/mae-<data>-a<alpha_min>-s<seed>
    overwrite: bool = False  # start anew where the run folder holds another or a finished run

    evaluate: tuple[str, ...] | None = None  # finished runs to evaluate instead of training
    protocol: tuple[str, ...] | None = None  # linear knn, linear-imagenet finetune scratch, tsne segment reconstruct
    masks: str | None = None  # segment: a folder with images/* and masks/*.png; None: the digits' ink
    export: str | None = None  # a finished run whose encoder is written as a plain ViT instead of training
    to: str | None = None  # export: the file.safetensors for timm
    to_hf: str | None = None  # export: the folder for transformers' ViTModel

    def __post_init__(self) -> None:
        for name, table in (("recipe", RECIPES), ("model", MODELS), *VARIANTS.items()):
            if getattr(self, name) not in (None, *table):
                raise ValueError(f"{name} must be one of {', '.join(table)}, not {getattr(self, name)!r}")
        recipe = RECIPES[self.recipe or RECIPE_OF.get(self.data, "imagenet")]
        sizes = ("width", "depth", "heads", "decoder_width", "decoder_depth", "decoder_heads")
        filled = {**recipe, **dict(zip(sizes, MODELS[self.model or recipe["model"]])), "protocol": ("linear", "knn")}
        if self.epochs is not None:  # the recipe's warm-up is for its own epochs
            filled["warmup_epochs"] = min(filled["warmup_epochs"], self.epochs / 4)
        if self.evaluate:  # the protocol's own, unless told
            filled = {name: value for name, value in filled.items() if name not in OF_PROTOCOLS}
        for name, value in filled.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        size = (self.image_size,) if isinstance(self.image_size, int) else tuple(self.image_size)
        object.__setattr__(self, "image_size", size * 2 if len(size) == 1 else size)
        self._check()
        if self.shortcut != "decay" or self.schedule == "learned":
            object.__setattr__(self, "alpha_min", 1.0)  # nothing falls to it
        if self.alpha_min == "auto":
            weights = partial(shortcut_weights, self.depth, schedule=self.schedule, decay_on=self.decay_on)
            object.__setattr__(self, "alpha_min", round(rank.alpha_min_for(self.depth, weights=weights), 4))

    def _check(self) -> None:
        """Raises ValueError for a value that can't be meant."""

        sizes = ("patch_size", "width", "depth", "heads", "decoder_width", "decoder_depth", "decoder_heads")
        counts = ("epochs", "batch_size", "accumulate", "probe_limit", "limit", "lr", "clip_grad")
        for name in (*sizes, *counts):
            value, limit = getattr(self, name), 2**16 if name in sizes else 2**31
            if value is not None and not 0 < value < limit:
                raise ValueError(f"{name} must be positive and below {limit}, not {value}")
        size, patch = self.image_size, self.patch_size
        if len(size) != 2 or not 1 <= min(size) <= max(size) < 2**16:
            raise ValueError(
                f"image_size must be one or two positive numbers, not {' '.join(map(str, size)) or 'none'}"
            )
        if size[0] % patch or size[1] % patch:
            raise ValueError(f"patch_size {patch} does not divide the image of {size[0]}x{size[1]} pixels")
        for width, heads in (("width", "heads"), ("decoder_width", "decoder_heads")):
            if getattr(self, width) % getattr(self, heads):
                raise ValueError(f"{heads} {getattr(self, heads)} does not divide {width} {getattr(self, width)}")
            if getattr(self, width) % 4:
                raise ValueError(f"{width} must be a multiple of 4 (sine-cosine positions), not {getattr(self, width)}")
        if self.unet and self.depth % 2:
            raise ValueError(f"depth must be even with UNet skips, not {self.depth}; --no-unet takes any depth")
        if self.alpha_min != "auto" and not 0 <= self.alpha_min <= 1:
            raise ValueError(f"alpha_min must lie in [0, 1], or be auto, not {self.alpha_min}")
        for name, default in (("schedule", "linear"), ("decay_on", "both")):
            if self.shortcut != "decay" and getattr(self, name) != default:
                raise ValueError(f"{name} {getattr(self, name)} is of --shortcut decay, not of {self.shortcut}")
        if self.schedule == "learned" and self.decay_on != "both":
            raise ValueError(f"schedule learned learns every shortcut: decay_on must be both, not {self.decay_on}")
        if not 0 < self.scale <= 1:
            raise ValueError(f"scale must lie in (0, 1], not {self.scale}")
        if not 0 <= self.drop_path < 1:
            raise ValueError(f"drop_path must lie in [0, 1), not {self.drop_path}")
        if not 0 < self.mask_ratio < 1 or not 0 < self.kept < self.patches:
            raise ValueError(f"mask_ratio {self.mask_ratio} must keep some of the {self.patches} patches and mask some")
        if not 0 < self.min_scale <= 1:
            raise ValueError(f"min_scale must lie in (0, 1], not {self.min_scale}")
        if self.warmup_epochs is not None and not 0 <= self.warmup_epochs <= (self.epochs or math.inf):
            raise ValueError(f"warmup_epochs must lie in [0, epochs = {self.epochs}], not {self.warmup_epochs}")
        if self.evaluate == ():
            raise ValueError("evaluate must name one finished run or more")
        for name in {*self.protocol} - {*PROTOCOLS}:
            raise ValueError(f"protocol must be one or more of {', '.join(PROTOCOLS)}, not {name!r}")
        if not self.protocol:
            raise ValueError(f"protocol must name one or more of {', '.join(PROTOCOLS)}")
        if self.masks is not None and "segment" not in self.protocol:
            raise ValueError(f"masks {self.masks!r} is for --evaluate with --protocol segment")
        if (self.export is not None) != (self.to is not None or self.to_hf is not None):
            raise ValueError("export RUN goes with --to FILE.safetensors or --to-hf FOLDER")
        if self.to is not None and not self.to.endswith(".safetensors"):
            raise ValueError(f"to must name a file that ends in .safetensors, not {self.to!r}")
        if self.log == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
            raise ValueError("log tensorboard needs a package that is not installed: pip install tensorboard")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must not be negative, not {self.weight_decay}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), not {self.betas[0]} {self.betas[1]}")
        if self.eval_every < 0:
            raise ValueError(f"eval_every must not be negative, not {self.eval_every}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2^63), not {self.seed}")
        if self.probe_limit < 2:
            raise ValueError(f"probe_limit must be 2 or more, not {self.probe_limit}")
        if self.batch_size is not None and self.accumulate > self.batch_size:
            raise ValueError(f"accumulate {self.accumulate} is more than the {self.batch_size} images of a batch")

    @property
    def patches(self) -> int:
        return (self.image_size[0] // self.patch_size) * (self.image_size[1] // self.patch_size)

    @property
    def kept(self) -> int:
        return int(self.patches * (1 - self.mask_ratio) + 1e-9)  # 10 of 100 at 0.9, whatever 1 − 0.9 rounds to

    @property
    def data_name(self) -> str:
        return self.data if self.data in RECIPE_OF else Path(self.data).expanduser().resolve().name

    @property
    def variant(self) -> str:
        """The shortcut in short: a0.6, a0.6-cosine, a0.6-attn, learned, scale-both0.7071."""
        if self.shortcut != "decay":
            return f"{self.shortcut}{self.scale:.4g}"
        parts = ["learned" if self.schedule == "learned" else f"a{self.alpha_min:g}"]
        parts += [self.schedule] if self.schedule in ("cosine", "constant") else []
        parts += [self.decay_on] if self.decay_on != "both" else []
        return "-".join(parts)

    @property
    def name(self) -> str:
        return f"{SCRIPT}-{self.data_name}-{self.variant}-s{self.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.out or f"runs/{self.name}").expanduser()


@dataclass(frozen=True)
class Study(Config):
    """Pretrain a masked autoencoder with decayed shortcuts, then probe its features; one for every α_min and seed.

    A field that is None takes the data set's recipe, or the named model's size.
    """

    alpha_min: tuple[float | Literal["auto"], ...] = (0.6,)  # weights of the last shortcut (Eq. 5); auto: by depth
    seed: tuple[int, ...] = (0,)  # decides everything

    def __post_init__(self) -> None:
        for name in ("alpha_min", "seed"):
            if not getattr(self, name):
                raise ValueError(f"{name} must list one value or more, not none")
        self._check_command()
        names = [run.name for run in self.runs]  # making them checks their values
        if len({*names}) < len(names):
            raise ValueError(
                f"alpha_min {' '.join(map(str, self.alpha_min))} and seed {' '.join(map(str, self.seed))} name the run "
                f"{max(names, key=names.count)} twice: list values that differ, in six digits"
            )

    def _check_command(self) -> None:
        """Raises ValueError for a flag that would not be heeded: training takes most, --evaluate and --export a few."""
        given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        if self.evaluate is None and self.export is None:
            if self.protocol is not None:
                raise ValueError(f"protocol {' '.join(self.protocol) or 'none'} is for --evaluate RUN")
            return
        if self.evaluate is not None and self.export is not None:
            raise ValueError("export and evaluate are two commands")
        named = ("export",) if self.evaluate is None else ("evaluate", *(self.protocol or ()))
        command = f"--{named[0]}" + (f" --protocol {' '.join(named[1:])}" if named[1:] else "")
        heeded = set().union(*(HEEDED.get(name, ()) for name in named))
        for name in given:
            if name not in heeded:
                value = getattr(self, name)
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
                raise ValueError(f"{name} {shown} is not heeded by {command}: leave it out")
        if len(self.seed) > 1:
            raise ValueError(f"evaluate takes one seed, not {' '.join(map(str, self.seed))}")
        if self.protocol is None:
            object.__setattr__(self, "protocol", ("linear", "knn"))

    @property
    def runs(self) -> list[Config]:
        """The single runs, seed by seed; `out` is the run folder of one and the parent of several."""
        common = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        runs = [
            Config(**common | {"seed": seed, "alpha_min": alpha_min})
            for seed, alpha_min in itertools.product(self.seed, self.alpha_min)
        ]
        if len(runs) == 1 or not self.out:
            return runs
        return [dataclasses.replace(run, out=f"{self.out}/{run.name}") for run in runs]


# ---- Equations ------------------------------------------------------------------------------------------------------


def shortcut_weights(depth: int, alpha_min: float, schedule: str = "linear", decay_on: str = "both") -> list[float]:
    """Eq. 5, per shortcut: α = linspace(1, α_min, 2·depth), attention and MLP of each block in turn.

    Equal steps, both ends included, as the authors' code has it; the printed δ = (1 − α_min)/L does not reach α_min.
    `cosine` has the same ends and falls most in the middle; `constant` is α_min throughout; `learned` starts at √½.
    With `decay_on` attn or mlp only these fall, in depth steps, and the others are 1.
    """
    count = 2 * depth if decay_on == "both" else depth
    alphas = torch.linspace(1.0, alpha_min, count, dtype=torch.float64)
    if schedule == "cosine":
        fallen = 0.5 - 0.5 * torch.cos(torch.linspace(0, math.pi, count, dtype=torch.float64))
        alphas = torch.lerp(alphas[0], alphas[-1], fallen)
    elif schedule != "linear":
        alphas = torch.full_like(alphas, alpha_min if schedule == "constant" else 0.5**0.5)
    if decay_on != "both":
        ones = torch.ones_like(alphas)
        alphas = torch.stack((alphas, ones) if decay_on == "attn" else (ones, alphas), dim=1).flatten()
    return alphas.tolist()


def shortcut_pairs(config: Config) -> list[tuple[float, float]]:
    """(a, b) of every shortcut x ← a·x + b·f(x), attention and MLP of each block in turn; Eq. 3 is (α, 1)."""
    if config.shortcut == "scale-both":
        return [(config.scale, config.scale)] * (2 * config.depth)
    if config.shortcut == "scale-branch":
        return [(1.0, config.scale)] * (2 * config.depth)
    alphas = shortcut_weights(config.depth, config.alpha_min, config.schedule, config.decay_on)
    return [(alpha, 1.0) for alpha in alphas]


def weighted_sum(weights: tuple[float | Tensor, float | Tensor], x: Tensor, branch: Tensor) -> Tensor:
    """a·x + b·f(x) for weights (a, b); with plain numbers and b = 1 it costs no more than the plain sum."""
    a, b = weights
    branch = branch if isinstance(b, float) and b == 1 else b * branch
    return a * x + branch if isinstance(a, Tensor) else torch.add(branch, x, alpha=a)


def branch_factors(pairs: list[tuple[float, float]]) -> list[float]:
    """g_l = b_l / Π_{i≤l} a_i, with which the decayed network is a plain one: y_{l+1} = y_l + g_l·f(y_l).

    There y_l = x_l / Π_{i<l} a_i, and LayerNorm makes the same of both (but for its eps). Raises ValueError where an a is 0.
    """
    decays = itertools.accumulate((float(a) for a, _ in pairs), operator.mul)
    factors = [float(b) / decay if decay else math.inf for (_, b), decay in zip(pairs, decays)]
    if max(factors) > 1e30:  # near the end of float32
        raise ValueError("a shortcut's weight is 0, or their product is nearly 0")
    return factors


def drop_factors(noise: Tensor, drop_path: float) -> Tensor:
    """Stochastic depth (Huang et al. 2016): the factor of every branch (b, 2·depth), from noise as large in [0, 1).

    0 with chance p·l/L in block l = 1 … L, each branch and sample for itself, else 1/(1 − p·l/L): 1 on average.
    """
    depth = noise.shape[1] // 2
    chance = drop_path * torch.arange(1, depth + 1, device=noise.device).repeat_interleave(2) / depth
    return (noise >= chance) / (1 - chance)


def patchify(images: Tensor, patch: int) -> Tensor:
    """(b, c, h, w) images to (b, n, p) patches, row by row; p = patch·patch·c."""
    return rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=patch, q=patch)


def unpatchify(patches: Tensor, patch: int, size: tuple[int, int]) -> Tensor:
    """(b, n, p) patches back to (b, c, h, w) images of `size` pixels."""
    return rearrange(patches, "b (h w) (p q c) -> b c (h p) (w q)", p=patch, q=patch, h=size[0] // patch)


def random_mask(noise: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """Noise (b, n) to the indices of the `kept` patches with least noise (b, k), of the masked ones (b, n − k), and
    `restore` (b, n): where each patch stands in [kept, masked]."""
    shuffle = noise.argsort(dim=1)
    return shuffle[:, :kept], shuffle[:, kept:], shuffle.argsort(dim=1)


def take(tokens: Tensor, index: Tensor) -> Tensor:
    """tokens (b, n, d) at index (b, k): (b, k, d). Whole rows are picked, several times faster than gather."""
    b, n, d = tokens.shape
    rows = index + n * torch.arange(b, device=index.device)[:, None]
    return tokens.flatten(0, 1).index_select(0, rows.flatten()).view(b, -1, d)


def unshuffle(tokens: Tensor, fill: Tensor, restore: Tensor) -> Tensor:
    """Class token and kept patches (b, 1 + k, d) to all places (b, 1 + n, d), the masked ones filled with `fill` (d,)."""
    b, n = restore.shape
    filled = fill.to(tokens.dtype).expand(b, n + 1 - tokens.shape[1], -1)
    return torch.cat([tokens[:, :1], take(torch.cat([tokens[:, 1:], filled], dim=1), restore)], dim=1)


def normalized(patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each patch less its mean, over its deviation, with both (b, n, 1); in float32, finite for constant patches."""
    patches = patches.float()
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    deviation = (variance + 1e-6).sqrt()
    return (patches - mean) / deviation, mean, deviation


def sincos_positions(grid: tuple[int, int], width: int) -> Tensor:
    """Sine-cosine positions (h·w, d) of a grid, half of the channels for each axis, w first (He et al. 2022)."""
    frequencies = 10000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    y, x = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) for side in grid), indexing="ij")
    angles = [axis.flatten()[:, None] * frequencies for axis in (x, y)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1).float()


# ---- Model ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head self-attention: tokens (b, n, d) to (b, n, d)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.heads)
        return self.proj(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))


class Block(nn.Module):
    """Pre-norm transformer block whose two shortcuts are weakened (Eq. 3): the paper's one change."""

    def __init__(
        self,
        width: int,
        heads: int,
        attn: tuple[float, float] = (1.0, 1.0),
        mlp: tuple[float, float] = (1.0, 1.0),
        learned: bool = False,
    ) -> None:
        super().__init__()
        self.pairs = [attn, mlp]  # (a, b) of each shortcut
        self.logits = nn.Parameter(torch.logit(torch.tensor([attn[0], mlp[0]]))) if learned else None
        self.norm1, self.attn = nn.LayerNorm(width, eps=1e-6), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def weights(self, drop: Tensor | None = None) -> list[tuple[float | Tensor, float | Tensor]]:
        """(a, b) of both shortcuts as they are now: learned or not, b times the factors `drop` (b, 2) of the branches."""
        pairs = self.pairs if self.logits is None else [(a, 1.0) for a in self.logits.sigmoid()]
        return pairs if drop is None else [(a, b * d[:, None, None]) for (a, b), d in zip(pairs, drop.unbind(1))]

    def forward(self, x: Tensor, drop: Tensor | None = None) -> Tensor:
        attn, mlp = self.weights(drop)
        x = weighted_sum(attn, x, self.attn(self.norm1(x)))  # a·x + b·f(x); a = α, b = 1 in Eq. 3
        x = weighted_sum(mlp, x, self.mlp(self.norm2(x)))
        return x


class Skip(nn.Module):
    """UNet skip: an encoder layer, back in place, joins the decoder's stream; masked places hold a learned token."""

    def __init__(self, width: int, decoder_width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(width))
        self.join = nn.Sequential(
            nn.Linear(decoder_width + width, decoder_width), nn.SiLU(), nn.Linear(decoder_width, decoder_width)
        )

    def forward(self, x: Tensor, layer: Tensor, restore: Tensor) -> Tensor:
        """join([x, layer in place]); the layer's half of the first product is taken before the masked places are filled."""
        first, silu, last = self.join
        of_x, of_layer = first.weight.split([x.shape[-1], layer.shape[-1]], dim=1)
        filled = unshuffle(F.linear(layer, of_layer), F.linear(self.token, of_layer), restore)
        return x + last(silu(F.linear(x, of_x, first.bias) + filled))


class MaskedAutoencoder(nn.Module):
    """Masked autoencoder (He et al. 2022) with decayed shortcuts in the encoder and UNet skips into the decoder.

    Takes images (b, c, h, w) in 0 … 255; `mean` and `std` (c,) of the data set are buffers of the model.
    """

    def __init__(self, config: Config, channels: int = 3, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.size, self.patch, self.kept = config.image_size, config.patch_size, config.kept
        grid = (self.size[0] // self.patch, self.size[1] // self.patch)
        values = self.patch * self.patch * channels
        width, decoder_width = config.width, config.decoder_width
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))

        pairs = shortcut_pairs(config)
        self.embed = nn.Linear(values, width)
        self.cls = nn.Parameter(torch.zeros(width))
        self.register_buffer("positions", sincos_positions(grid, width))
        self.encoder = nn.ModuleList(
            Block(width, config.heads, pairs[2 * l], pairs[2 * l + 1], learned=config.schedule == "learned")
            for l in range(config.depth)
        )  # no norm at the end, as in the authors' code

        self.mask_token = nn.Parameter(torch.zeros(decoder_width))
        class_position = torch.zeros(1, decoder_width)
        decoder_positions = torch.cat([class_position, sincos_positions(grid, decoder_width)])
        self.register_buffer("decoder_positions", decoder_positions)
        skips = min(config.depth // 2, config.decoder_depth) if config.unet else 0
        self.skips = nn.ModuleList(Skip(width, decoder_width) for _ in range(skips))  # deepest first
        self.decoder_embed = None if config.unet else nn.Linear(width, decoder_width)
        self.decoder = nn.ModuleList(Block(decoder_width, config.decoder_heads) for _ in range(config.decoder_depth))
        self.decoder_norm = nn.LayerNorm(decoder_width, eps=1e-6)
        self.head = nn.Linear(decoder_width, values)
        self.initialize(generator)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None) -> None:
        """He et al.'s start, but every branch ends in zeros, so that the encoder begins as exactly (Π α) x_0.

        The authors' code also starts the prediction at zero: the first loss is the targets' variance.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, generator=generator)
                nn.init.zeros_(module.bias)
        # He et al.'s patch embedding has variance 2/(p + d) = 1/p for ViT-B/16, where p = d = 768. With small patches only
        # 1/p keeps the patches' content as large as their positions; 2/(p + d) would drown it.
        nn.init.normal_(self.embed.weight, std=self.embed.in_features**-0.5, generator=generator)
        for token in [self.cls, self.mask_token, *(skip.token for skip in self.skips)]:
            nn.init.normal_(token, std=0.02, generator=generator)
        for block in [*self.encoder, *self.decoder]:
            nn.init.zeros_(block.attn.proj.weight)
            nn.init.zeros_(block.mlp[-1].weight)
        for skip in self.skips:
            nn.init.zeros_(skip.join[-1].weight)
        nn.init.zeros_(self.head.weight)

    def patches(self, images: Tensor) -> Tensor:
        """Images (b, c, h, w), 0 … 255, to standardised patches (b, n, p)."""
        return patchify((images - self.mean[:, None, None]) / self.std[:, None, None], self.patch)

    @property
    @torch.no_grad()
    def alphas(self) -> list[float]:
        """The shortcuts' weights as they are now, in order."""
        return [float(a) for block in self.encoder for a, _ in block.weights()]

    def encode(self, patches: Tensor, kept: Tensor | None = None, drops: Tensor | None = None) -> Iterator[Tensor]:
        """Tokens (b, 1 + k, d) after every block, class token first; of the `kept` patches (b, k), or of all.

        `drops` (b, 2·depth), if given, are the branches' factors (drop_factors).
        """
        positions = self.positions
        if kept is not None:
            patches, positions = take(patches, kept), positions[kept]
        x = self.embed(patches) + positions  # (b, k, d)
        x = torch.cat([self.cls.to(x.dtype).expand(len(x), 1, -1), x], dim=1)
        for l, block in enumerate(self.encoder):
            x = block(x, None if drops is None else drops[:, 2 * l : 2 * l + 2])
            yield x

    def decode(self, layers: list[Tensor], restore: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Encoder layers, each (b, 1 + k, d), to a prediction for every patch (b, n, p), or for the `wanted` (b, m)."""
        if self.decoder_embed is None:  # UNet: the encoder's output comes in by the first skip alone
            x = (self.mask_token + self.decoder_positions)[None]  # the first skip makes one of every sample
        else:
            x = unshuffle(self.decoder_embed(layers[-1]), self.mask_token, restore) + self.decoder_positions
        deepest_first = layers[::-2]  # the Lth, …, 4th, 2nd block
        for i, block in enumerate(self.decoder):
            if i < len(self.skips):
                x = self.skips[i](x, deepest_first[i], restore)
            x = block(x)
        x = x[:, 1:] if wanted is None else take(x[:, 1:], wanted)
        return self.head(self.decoder_norm(x))

    def forward(self, images: Tensor, noise: Tensor, drops: Tensor | None = None) -> Tensor:
        """Mean squared error on the masked patches, per-patch normalised; noise (b, n) chooses them."""
        patches = self.patches(images)
        kept, masked, restore = random_mask(noise, self.kept)
        prediction = self.decode(list(self.encode(patches, kept, drops)), restore, masked)
        target, _, _ = normalized(take(patches, masked))
        return F.mse_loss(prediction.float(), target)

    def layer_tokens(self, images: Tensor) -> Iterator[Tensor]:
        """Tokens (b, 1 + n, d) after every encoder block, nothing masked: what probe.features asks for."""
        return self.encode(self.patches(images))

    @torch.no_grad()
    def reconstruct(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Images with the masked patches grey, and with them predicted; both (b, c, h, w), 0 … 255."""
        patches = self.patches(images)
        kept, masked, restore = random_mask(noise, self.kept)
        _, mean, deviation = normalized(patches)  # the prediction lacks them: they are the original's
        prediction = self.decode(list(self.encode(patches, kept)), restore) * deviation + mean
        hidden = torch.ones_like(noise, dtype=torch.bool).scatter(1, kept, False)[..., None]
        shown = [torch.where(hidden, filling, patches) for filling in (torch.zeros_like(patches), prediction)]
        pictures = [unpatchify(picture, self.patch, self.size) for picture in shown]
        return tuple(
            (picture * self.std[:, None, None] + self.mean[:, None, None]).clamp(0, 255) for picture in pictures
        )


# ---- Train ----------------------------------------------------------------------------------------------------------


DIVERGED = (
    "try a lower --lr, more --warmup-epochs or a higher --alpha-min (the paper's runs are unstable at 0.4 and below), with "
    "another --out or --overwrite"
)
SAVE_SECONDS = 600  # a checkpoint after every epoch, and within epochs that take longer than this


def learning_rate(config: Config, epoch: float, batch: int) -> float:
    """lr × batch/256 at a fractional `epoch`: linear warm-up, then cosine to 0."""
    peak = config.lr * batch / 256
    if epoch < config.warmup_epochs:
        return peak * epoch / config.warmup_epochs
    progress = (epoch - config.warmup_epochs) / (config.epochs - config.warmup_epochs)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def due(config: Config, epoch: int) -> bool:
    """Whether the features are probed after this epoch, counted from 1."""
    return epoch == config.epochs or (config.eval_every > 0 and epoch > 0 and epoch % config.eval_every == 0)


def check_finite(config: Config, value: float, step: int, lr: float) -> None:
    """Raises FloatingPointError where the loss, or the sum of the weights, is not finite."""
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the loss is not finite at step {step} (lr {lr:.1e}): {DIVERGED}; {config.folder} keeps what was saved before"
        )


def build(config: Config, images: Tensor, device: torch.device) -> MaskedAutoencoder:
    """The untrained model that the seed decides, with the mean and deviation of train `images` (n, c, h, w)."""
    model = MaskedAutoencoder(config, images.shape[1], generator_for("cpu", config.seed, "init"))
    std, mean = torch.std_mean(images[:: max(1, len(images) // 1000)].float(), dim=(0, 2, 3))
    model.mean.copy_(mean)
    model.std.copy_(std.clamp(min=1.0))  # images of one colour have none
    return model.to(device)


def train(config: Config) -> dict:
    """Pretrain, probe, and leave everything in the run folder; returns what result.json holds.

    A run that was killed goes on where it was; a finished one is not trained again, its result is returned. Raises
    BadInput where the data, the device or the run folder can't be used, FloatingPointError where the loss is not finite.
    """
    device = choose_device(config.device)
    saved, result = open_run(config)
    if result:
        print(f"{config.folder} is finished: its result is shown; --overwrite trains again")
        return result
    root = Path(config.root).expanduser()
    crops = config.min_scale < 1
    data = probe.load_images(config.data, root, config.image_size, config.limit, config.skip_bad_images, crops)
    n, channels = data.train.shape[:2]
    smallest = n % min(config.batch_size, n) or min(config.batch_size, n)
    if smallest < probe.process()[1]:
        raise BadInput(
            f"the smallest batch has {smallest} of the {n} images, fewer than the {probe.process()[1]} processes: choose "
            "another --batch-size, or start fewer"
        )
    if config.patch_size**2 * channels == 1:
        raise BadInput("patch_size 1 leaves one value in a grey patch, which can't be normalised: use 2 or more")

    model = build(config, data.train, device)
    if config.init is not None and not saved:
        print(start_from(config.init, model))
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == flat] for flat in (True, False))
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=config.betas, fused=device.type in ("cpu", "cuda"))
    state = {"step": 0, "loss": 0.0, "loss_sum": 0.0, "seconds": 0.0, "images": 0, "train_images": n, "baselines": {}}
    state["records"] = []  # what metrics.jsonl holds
    lock = start_run(config, saved, model, optimizer, state)
    board = tensorboard(config, state["records"])

    one = torch.zeros(1, channels, *config.image_size, device=device), torch.zeros(1, config.patches, device=device)
    flops = probe.training_flops(model, *one)
    rate = probe.product_rate(device, torch.bfloat16 if config.bf16 else torch.float32)
    batch, (number, processes) = min(config.batch_size, n), probe.process()
    print(f"{device_name(device)}, torch {torch.__version__}, run folder {config.folder}")
    size = "x".join(map(str, (channels, *config.image_size)))
    print(f"{config.data}: {n} train and {len(data.test)} test images of {size}")
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {flops / 1e9:.3g} GFLOP an image, "
        f"{config.kept} of {config.patches} patches visible, {described(config, model.alphas)}"
    )
    if batch < config.batch_size:
        print(f"{n} training images are fewer than batch_size {config.batch_size}: all of them are in every batch")
    if not state["baselines"]:
        state["baselines"] = evaluate_baselines(model, data, config)
        save_checkpoint(config, model, optimizer, state)
    for name, scores in state["baselines"].items():
        print(as_line(f"baseline {name}", scores))

    images = resident(data.train, device)
    network = torch.compile(model) if config.compile else model
    if processes > 1:  # each takes its share of every batch, and gradients are averaged
        network = DistributedDataParallel(network, [device] if device.type == "cuda" else None)
    steps_per_epoch = math.ceil(n / batch)
    steps = config.epochs * steps_per_epoch
    bar = tqdm(total=steps, initial=state["step"], desc="training", unit=" steps", disable=None)
    loss_sum = torch.tensor(state["loss_sum"] if number == 0 else 0.0, device=device)  # over the steps of this epoch
    order, seen, started = None, 0, time.monotonic()

    def end_epoch(stop: Stop) -> None:
        """Probe where that is due, and log; may be stopped at once, as the checkpoint has the epoch."""
        stop.at_once = True
        record = state["records"][-1]
        scores = evaluate(model, data, config) if due(config, record["epoch"]) else {}
        with bar.external_write_mode():
            print(as_line("train", record), *([as_line("eval", scores)] if scores else []), sep="\n", flush=True)
        record |= scores
        log(config, state["records"], board)
        stop.at_once = False
        if scores:
            save_checkpoint(config, model, optimizer, state)

    with Stop() as stop:
        last = state["records"][-1] if state["records"] else {"epoch": 0}
        if due(config, last["epoch"]) and "linear" not in last:  # it was stopped while it was probed
            end_epoch(stop)
        for step in range(state["step"], steps):
            epoch, i = divmod(step, steps_per_epoch)
            if order is None or i == 0:
                order = torch.randperm(n, generator=generator_for("cpu", config.seed, "order", epoch)).split(batch)
            whole = len(order[i])
            mine = probe.share(whole)
            generator = generator_for(device, config.seed, "step", step)  # drawn for the whole batch by every process
            views = images[order[i][mine].to(images.device)].to(device)
            crop = (config.image_size, generator, config.min_scale, config.flip)
            views = probe.augment(views, *crop, batch=whole, place=mine)
            noise = torch.rand(whole, config.patches, generator=generator, device=device)[mine]
            inputs = [views.chunk(config.accumulate), noise.chunk(config.accumulate)]
            if config.drop_path:
                uniform = torch.rand(whole, 2 * config.depth, generator=generator, device=device)[mine]
                inputs.append(drop_factors(uniform, config.drop_path).chunk(config.accumulate))

            parts = [*zip(*inputs)]
            for j, part in enumerate(parts):
                last_part = j == len(parts) - 1
                with contextlib.nullcontext() if last_part or processes == 1 else network.no_sync():
                    with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16 and device.type == "cuda"):
                        loss = network(*part) * (len(part[0]) / whole)
                    (loss * processes).backward()  # the average over processes becomes the sum
                loss_sum += loss.detach()
            if config.clip_grad is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
            lr = learning_rate(config, step / steps_per_epoch, batch)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()

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
    draw_curves(config, records, state["baselines"])
    draw_reconstructions(config.folder / "reconstruction.png", config, [model], data.test)
    result = {
        "script": SCRIPT, "data": config.data, "alpha_min": config.alpha_min, "alpha_eff": rank.alpha_eff(model.alphas),
        "seed": config.seed, "epochs": config.epochs, "steps": steps, "loss": state["loss"],
        "seconds": state["seconds"], "images_per_second": state["images"] / max(state["seconds"], 1e-9),
        "peak_memory_bytes": peak_memory(device), "device": device_name(device), "torch": torch.__version__,
        "utilisation": records[-1].get("utilisation"), **{name: records[-1][name] for name in SCORES}, "baselines": state["baselines"],
    }  # fmt: skip
    write_whole(config.folder / "result.json", json.dumps(result, indent=1).encode())
    (config.folder / ".lock").unlink(missing_ok=True)
    lock.close()
    return result


# ---- Evaluate -------------------------------------------------------------------------------------------------------

SCORES = ("linear", "knn_weighted", "knn_majority", "effective_rank", "exp_effective_rank", "best_layer", "per_layer")


def evaluate(model: MaskedAutoencoder, data: probe.Images, config: Config) -> dict:
    """SCORES of the encoder: `per_layer` for every layer, the others for the last one (`best_layer`: its number).

    Accuracies in percent on test. Effective rank (Eq. 6) of the test images' class tokens, and exp of it; `norm` is the
    mean length of a probed test feature.
    """
    chosen = probe.evenly(data.train_labels, config.probe_limit)
    extract = partial(probe.features, model, model.layer_tokens, device=model.mean.device, size=config.image_size)
    train = extract(data.train, index=chosen, pools=[config.pool])[config.pool]  # (n, l, d)
    test = extract(data.test, pools={config.pool, "cls"})
    if not all(torch.isfinite(x).all() for x in (train, *test.values())):
        raise FloatingPointError(f"the features are not finite: {DIVERGED}")
    layers = probe.evaluate_layers(train, data.train_labels[chosen], test[config.pool], data.test_labels, config.seed)
    for i, layer in enumerate(layers):
        entropy = rank.effective_rank(test["cls"][:, i])
        layer |= {"layer": i + 1, "effective_rank": entropy, "exp_effective_rank": math.exp(entropy)}
        layer["norm"] = test[config.pool][:, i].norm(dim=1).mean().item()
    last = {name: layers[-1][name] for name in SCORES if name in layers[-1]}
    return last | {"best_layer": probe.best_layer(layers), "per_layer": layers}


def evaluate_baselines(model: MaskedAutoencoder, data: probe.Images, config: Config) -> dict:
    """What the trained features must beat, probed alike: raw pixels (of at most 32×32) and the untrained encoder."""
    size = tuple(min(side, 32) for side in config.image_size)

    def pixels(images: Tensor) -> Iterator[Tensor]:
        yield probe.fit(images, size).flatten(1)[:, None] / 255  # one token for the image

    def untrained(images: Tensor) -> Iterator[Tensor]:
        *_, last = model.layer_tokens(images)
        yield last

    chosen = probe.evenly(data.train_labels, config.probe_limit)
    scores = {}
    for layer_tokens in (pixels, untrained):
        how = {"device": model.mean.device, "pools": [config.pool], "size": config.image_size}
        extract = partial(probe.features, model, layer_tokens, **how)
        train, test = extract(data.train, index=chosen)[config.pool], extract(data.test)[config.pool]
        (layer,) = probe.evaluate_layers(train, data.train_labels[chosen], test, data.test_labels, config.seed)
        scores[layer_tokens.__name__] = {name: layer[name] for name in ("linear", "knn_weighted")}
    return scores


def draw_curves(config: Config, records: list[dict], baselines: dict) -> None:
    """curves.png: loss, accuracy and effective rank against epoch, accuracy and feature norm by layer."""
    from matplotlib.figure import Figure  # here, as it takes a second

    probed = [record for record in records if "per_layer" in record]
    layers = probed[-1]["per_layer"]
    learned = [record for record in records if "alphas" in record]
    figure = Figure(figsize=(16 if learned else 13, 3.2), layout="constrained")
    loss, accuracy, spectrum, by_layer, *more = figure.subplots(1, 5 if learned else 4)
    loss.plot([r["epoch"] for r in records], [r["loss"] for r in records], marker=".")
    for name in ("linear", "knn_weighted", "knn_majority"):
        accuracy.plot([r["epoch"] for r in probed], [r[name] for r in probed], marker=".", label=name)
        by_layer.plot([layer["layer"] for layer in layers], [layer[name] for layer in layers], marker=".", label=name)
    for style, (name, scores) in zip(("--", ":"), baselines.items()):
        accuracy.axhline(scores["linear"], color="grey", linestyle=style, label=f"{name}, linear")
    spectrum.plot([r["epoch"] for r in probed], [r["effective_rank"] for r in probed], marker=".")
    norm = by_layer.twinx()
    norm.plot([layer["layer"] for layer in layers], [layer["norm"] for layer in layers], color="grey", linestyle=":")
    norm.set(ylabel="feature norm (dotted)", yscale="log")
    loss.set(title="loss", xlabel="epoch")
    accuracy.set(title="test accuracy, last layer (%)", xlabel="epoch")
    spectrum.set(title="effective rank, last layer (Eq. 6)", xlabel="epoch")
    by_layer.set(title="test accuracy by layer (%)", xlabel="layer")
    accuracy.legend(fontsize=7)
    if learned:
        draw_learned(more[0], learned)
    for axis in (loss, accuracy, spectrum, by_layer, *more):
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
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


def draw_reconstructions(file: Path, config: Config, models: list[MaskedAutoencoder], images: Tensor) -> None:
    """Figure 8: test images, what the encoder sees of them, and each model's prediction with visible patches kept."""
    from matplotlib.figure import Figure

    some = images[:: max(1, len(images) // 10)][:10]
    noise = torch.rand(len(some), config.patches, generator=generator_for("cpu", config.seed, "reconstruction"))
    rows = {"original": some}
    for i, model in enumerate(models):
        device = model.mean.device
        rows["masked"], predicted = (picture.cpu() for picture in model.reconstruct(some.to(device), noise.to(device)))
        title = "reconstruction" if len(models) == 1 else f"{i + 1}. α_eff {rank.alpha_eff(model.alphas):.2g}"
        rows[title] = predicted
    figure = Figure(figsize=(len(some) * 1.2, 1.3 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(some), squeeze=False)
    for row, (name, pictures) in zip(axes, rows.items()):
        for axis, picture in zip(row, pictures / 255):
            axis.imshow(rearrange(picture.numpy(), "c h w -> h w c"), cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(name, fontsize=7)
    save_figure(file, figure)


def train_all(study: Study) -> tuple[list[dict], int]:
    """Train what is not yet finished of the study, and report each; the results, and how many runs diverged.

    Every run folder is looked at before the first one is trained. Several runs are compared at the end (rank.py).
    """
    runs, results, diverged = study.runs, [], 0
    for run in runs:
        open_run(run)
    for run in runs:
        try:
            results.append(train(run))
        except FloatingPointError as error:
            diverged += 1
            print(f"{SCRIPT}.py: {run.name + ': ' if len(runs) > 1 else ''}{error}", file=sys.stderr)
            continue
        report(results[-1], run)
    if len(results) > 1 and probe.process()[0] == 0:
        folders = [str(run.folder) for run in runs if (run.folder / "result.json").exists()]
        rank.main([*folders, "--out", str(runs[0].folder.with_name(f"{SCRIPT}-{study.data_name}-comparison"))])
    return results, diverged


def report(result: dict, config: Config) -> None:
    """Print a row a layer, the best by held-out accuracy marked, one greppable line, and what it all amounts to."""
    names = ("linear", "held_out", "knn_weighted", "knn_majority", "effective_rank", "exp_effective_rank", "norm")
    print("layer " + "".join(f"{name:>20}" for name in names))
    for layer in result["per_layer"]:
        mark = "*" if layer["layer"] == result["best_layer"] else " "
        print(f"{layer['layer']:>4}{mark} " + "".join(f"{layer[name]:>20.4g}" for name in names))
    print("* best layer, chosen by held_out: a tenth of train that its probe did not see")
    print(as_line("result", {k: v for k, v in result.items() if isinstance(v, (int, float))}))
    best = result["per_layer"][result["best_layer"] - 1]
    scores = {**result["baselines"], "trained, last layer": result, f"trained, layer {best['layer']} (best)": best}
    for name, score in scores.items():
        print(f"{name:>24}: linear {score['linear']:.1f} %, k-NN {score['knn_weighted']:.1f} %")
    print(f"pictures, metrics.jsonl, checkpoint.pt and result.json are in {config.folder}", flush=True)


# ---- Evaluate finished runs -----------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """The encoder, the mean of its tokens, a LayerNorm (He et al. 2022 put one there for fine-tuning) and a linear layer."""

    def __init__(self, model: MaskedAutoencoder, classes: int, drop_path: float, generator: torch.Generator) -> None:
        super().__init__()
        width = len(model.cls)
        self.model, self.drop_path, self.branches = model, drop_path, 2 * len(model.encoder)
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)
        nn.init.trunc_normal_(self.head.weight, std=2e-5, generator=generator)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """Images (b, c, h, w), 0 … 255, to logits (b, classes); noise (b, branches) drops branches in training."""
        drops = None if noise is None else drop_factors(noise, self.drop_path)
        *_, last = self.model.encode(self.model.patches(images), drops=drops)
        return self.head(self.norm(last.mean(dim=1)))

    @property
    def classes(self) -> int:
        return self.head.out_features

    @property
    def stages(self) -> list[list[nn.Parameter]]:
        """The trained parameters, from the embedding over every block to the head: what layer decay counts."""
        blocks = [[*block.parameters()] for block in self.model.encoder]
        return [
            [self.model.cls, *self.model.embed.parameters()],
            *blocks,
            [*self.norm.parameters(), *self.head.parameters()],
        ]


def evaluate_runs(study: Study) -> dict[str, dict]:
    """`--evaluate RUN …`: the named protocols on finished runs; what each run's evaluation.json gained, by its folder.

    Pictures go into the run folder of one run; of several, one for all, into --out or the folder that they lie in.
    Raises BadInput where a folder is not a whole run, or where a picture of several runs can't be made.
    """
    runs = [load_run(Path(name).expanduser(), study) for name in study.evaluate]
    first, place = runs[0][0], Path(study.out or runs[0][0].folder).expanduser()
    name = lambda picture: place / f"{picture}.png"
    if len(runs) > 1:
        place = Path(study.out or first.folder.parent).expanduser()
        name = lambda picture: place / f"{SCRIPT}-{first.data_name}-{picture}.png"
    shared = [protocol for protocol in ("tsne", "segment", "reconstruct") if protocol in study.protocol]
    for run, _ in runs[1:] if shared else []:
        for field in ("data", "image_size", *(["patch_size", "mask_ratio"] if "reconstruct" in shared else [])):
            if getattr(run, field) != getattr(first, field):
                raise BadInput(
                    f"{shared[0]} shows several runs on the same images, and {field} is {getattr(first, field)} in "
                    f"{first.folder} and {getattr(run, field)} in {run.folder}: name runs that share it"
                )
    if "segment" in shared and study.masks is None and first.data != "digits":
        raise BadInput(
            f"segment needs masks, and {first.data} has none: name a folder of images and masks with --masks"
        )
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"can't write pictures to {place}: {error.strerror}") from error

    data, sets = {}, []
    for run, _ in runs:  # each set once
        key = (run.data, run.image_size, run.limit, run.skip_bad_images, run.min_scale < 1)
        if key not in data:
            data[key] = probe.load_images(run.data, Path(study.root).expanduser(), *key[1:])
        sets.append(data[key])
    found = {str(run.folder): {} for run, _ in runs}
    for (run, model), images in zip(runs, sets):
        scores = found[str(run.folder)]
        if {"linear", "knn"} & {*study.protocol}:
            scores["layers"] = evaluate(model, images, run)
            report_layers(run, scores["layers"], study.protocol)
        for protocol in ("linear-imagenet", "finetune", "scratch"):
            if protocol in study.protocol:
                accuracy = trained_accuracy(protocol, run, model, images, study)
                scores[protocol] = accuracy
                print(as_line(protocol, {"accuracy": accuracy["accuracy"]}) + f" run={run.folder}", flush=True)
    if any("layers" in scores for scores in found.values()):
        draw_layers(name("layers"), {folder: scores["layers"] for folder, scores in found.items()})
    models = [model for _, model in runs]
    if "tsne" in study.protocol:
        for (run, _), score in zip(runs, draw_tsne(name("tsne"), runs, sets[0], study)):
            found[str(run.folder)]["tsne"] = {"silhouette": score}
            print(as_line("tsne", {"silhouette": score}) + f" run={run.folder}")
    if "segment" in study.protocol:
        for (run, _), score in zip(runs, draw_segments(name("segment"), runs, sets[0], study)):
            found[str(run.folder)]["segment"] = {"miou": score}
            print(as_line("segment", {"miou": score}) + f" run={run.folder}")
    if "reconstruct" in study.protocol:
        draw_reconstructions(name("reconstruct"), first, models, sets[0].test)
    for folder, scores in found.items():
        before = read_json(Path(folder) / "evaluation.json")
        merged = (before if isinstance(before, dict) else {}) | scores
        write_whole(Path(folder) / "evaluation.json", json.dumps(merged, indent=1).encode())
    print(f"numbers: evaluation.json in each run's folder; pictures: {place}", flush=True)
    return found


def trained_accuracy(
    protocol: str, run: Config, model: MaskedAutoencoder, data: probe.Images, study: Study
) -> dict[str, float]:
    """Test accuracy in percent of a protocol that trains, and what it took: He et al.'s recipe, cut down by the flags."""
    told = {field: getattr(study, field) for field in OF_PROTOCOLS if getattr(study, field) is not None}
    seed, device = study.seed[0], model.mean.device
    chosen = probe.evenly(data.train_labels, study.limit)
    images = data.train if len(chosen) == len(data.train) else data.train[chosen]  # all of them stay on the disk
    sets = (images, data.train_labels[chosen], data.test, data.test_labels, run.image_size)
    how = {"flip": run.flip, "seed": seed, "device": device, **told}
    if protocol == "linear-imagenet":

        @torch.no_grad()
        def features_of(images: Tensor) -> Tensor:
            *_, last = model.layer_tokens(images)
            return (last.mean(dim=1) if run.pool == "mean" else last[:, 0]).float()

        accuracy = probe.imagenet_probe(features_of, *sets, **how)
    else:
        generator = generator_for("cpu", seed, protocol)
        start = build(run, data.train, device)
        if protocol == "finetune":
            start.load_state_dict(model.state_dict())
        classifier = Classifier(start, len(data.classes), study.drop_path or 0.1, generator)
        groups = probe.layer_decay_groups(
            classifier.stages, decay=0.65 if protocol == "finetune" else 1.0, weight_decay=study.weight_decay
        )
        accuracy = probe.finetune(classifier, groups, *sets, bf16=run.bf16, **how)
    return {"accuracy": accuracy, "images": len(chosen), "seed": seed, **told}


def report_layers(run: Config, scores: dict, protocols: tuple[str, ...]) -> None:
    """Table R10, a greppable line a layer: what was asked for, and the norm of the features."""
    names = ["linear", "held_out"] * ("linear" in protocols) + ["knn_weighted", "knn_majority"] * ("knn" in protocols)
    for layer in scores["per_layer"]:
        values = {name: layer[name] for name in ("layer", *names, "effective_rank", "norm")}
        print(as_line("layer", values).replace("layer layer", "layer number") + f" run={run.folder}", flush=True)


def draw_layers(file: Path, scores: dict[str, dict]) -> None:
    """Table R10 as a figure: linear probe, k-NN and feature norm by layer, a line a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4), layout="constrained")
    titles = {"linear": "linear probe (%)", "knn_weighted": "20-NN (%)", "norm": "norm of the features"}
    for axis, (name, title) in zip(figure.subplots(1, 3), titles.items()):
        for folder, found in scores.items():
            layers = found["per_layer"]
            axis.plot([x["layer"] for x in layers], [x[name] for x in layers], marker=".", label=Path(folder).name)
        axis.set(title=title, xlabel="layer")
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.set_yscale("log")
    axis.legend(fontsize=7)
    save_figure(file, figure)


def draw_tsne(file: Path, runs: list, data: probe.Images, study: Study) -> list[float]:
    """Figure 3: the same test images of ten classes, chosen by the seed, in the plane, run beside run; silhouette scores."""
    from matplotlib.figure import Figure

    generator = generator_for("cpu", study.seed[0], "tsne")
    classes = torch.randperm(len(data.classes), generator=generator)[:10]
    index = torch.cat([(data.test_labels == c).nonzero().flatten()[:100] for c in classes])
    labels = data.test_labels[index]
    if len(labels.unique()) < 2 or len(index) < 4:
        raise BadInput(f"tsne needs four test images in two classes, and finds {len(index)} in {len(labels.unique())}")
    figure, scores = Figure(figsize=(5.5 * len(runs), 5), layout="constrained"), []
    for axis, (run, model) in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs):
        pooled = probe.features(
            model, model.layer_tokens, data.test, device=model.mean.device, index=index, pools=[run.pool]
        )
        points, score = probe.tsne(pooled[run.pool][:, -1], labels, study.seed[0])
        for c in classes.tolist():
            axis.scatter(*points[labels == c].T, s=6, label=data.classes[c])
        axis.set(title=f"{run.variant}, silhouette {score:.3f}", xticks=[], yticks=[])
        scores.append(score)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(file, figure)
    return scores


@torch.no_grad()
def draw_segments(file: Path, runs: list, data: probe.Images, study: Study) -> list[float]:
    """Figure 4: images, masks, and for every run the normalised cut's first three vectors as red, green and blue, and its
    clusters; mean IoU in percent, on pixels.

    Tokens of all images (at most 100) are embedded together, last layer, class token left out. The digits' masks are
    their ink: pixels of half the full brightness and more.
    """
    from matplotlib.figure import Figure

    first = runs[0][0]
    if study.masks is None:
        images = data.test[:100]
        masks = (images[:, 0] >= 128).long()
    else:
        images, masks = probe.masked_images(study.masks, first.image_size)
        images, masks = images[:100], masks[:100]
        if images.shape[1] != data.test.shape[1]:
            raise BadInput(f"masks {study.masks!r} holds colour images, and {first.data} is grey: name runs on colour")
    count = len(masks[masks != 255].unique())
    if count < 2:
        raise BadInput(f"the masks hold {count} segment: two or more are needed")
    shown, scores = min(8, len(images)), []
    rows = [("image", images[:shown].permute(0, 2, 3, 1)), ("mask", masks[:shown])]
    for run, model in runs:
        grid = [side // run.patch_size for side in run.image_size]
        parts = [list(model.layer_tokens(part.to(model.mean.device)))[-1][:, 1:] for part in images.split(50)]
        tokens = torch.cat(parts).flatten(0, 1).cpu()  # (images · n, d)
        vectors = probe.normalised_cut(tokens, max(3, count - 1))
        low, high = vectors.quantile(0.02, dim=0), vectors.quantile(0.98, dim=0)
        colours = ((vectors - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)[:, :3]
        clusters = probe.clustered(vectors, count, study.seed[0]).view(len(images), *grid)
        pixels = clusters.repeat_interleave(run.patch_size, dim=1).repeat_interleave(run.patch_size, dim=2)
        scores.append(probe.matched_miou(pixels, masks))
        rows.append((f"{run.variant}\neigenvectors", colours.view(len(images), *grid, -1)[:shown]))
        rows.append((f"{run.variant}\nmIoU {scores[-1]:.1f}", pixels[:shown]))
    figure = Figure(figsize=(1.2 * shown + 1, 1.25 * len(rows)), layout="constrained")
    for axes, (title, pictures) in zip(figure.subplots(len(rows), shown, squeeze=False), rows):
        for axis, picture in zip(axes, pictures):
            axis.imshow(picture.squeeze(-1).numpy(), cmap="gray" if title == "image" else "viridis")
            axis.set(xticks=[], yticks=[])
        axes[0].set_ylabel(title, fontsize=7)
    save_figure(file, figure)
    return scores


def load_run(folder: Path, study: Study) -> tuple[Config, MaskedAutoencoder]:
    """A finished run's config as its checkpoint holds it, and its model, in eval mode. Raises BadInput."""
    result = read_json(folder / "result.json")
    if not isinstance(result, dict) or result.get("script") != SCRIPT or DONE not in result:
        raise BadInput(f"{str(folder)!r} is not the folder of a finished {SCRIPT}.py run")
    try:
        saved = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in saved["config"].items()}
        del fields["script"]
        run = Config(**fields | {"out": str(folder), "device": study.device})
        channels = len(saved["model"]["mean"])
        model = MaskedAutoencoder(run, channels)
        model.load_state_dict(saved["model"])
    except Exception as error:  # a damaged or foreign file makes torch.load raise whatever it meets
        raise BadInput(f"{folder}/checkpoint.pt is missing, damaged or not of {SCRIPT}.py: name a whole run") from error
    return run, model.to(choose_device(study.device)).eval()


# ---- Plain ViTs -----------------------------------------------------------------------------------------------------

PLAIN = {  # our names, and those of timm and He et al.
    r"^cls$": "cls_token", r"^positions$": "pos_embed", r"^embed\.": "patch_embed.proj.", r"^encoder\.": "blocks.",
    r"mlp\.0\.": "mlp.fc1.", r"mlp\.2\.": "mlp.fc2.",
    r"^decoder_positions$": "decoder_pos_embed", r"^decoder\.": "decoder_blocks.", r"^head\.": "decoder_pred.",
}  # fmt: skip
TRANSFORMERS = {  # timm's names, and those of transformers' ViTModel
    r"^norm\.": "layernorm.", r"^cls_token$": "embeddings.cls_token", r"^pos_embed$": "embeddings.position_embeddings",
    r"^patch_embed\.proj\.": "embeddings.patch_embeddings.projection.", r"^blocks\.": "encoder.layer.",
    r"norm1\.": "layernorm_before.", r"norm2\.": "layernorm_after.", r"attn\.(query|key|value)": r"attention.attention.\1",
    r"attn\.proj\.": "attention.output.dense.", r"mlp\.fc1\.": "intermediate.dense.", r"mlp\.fc2\.": "output.dense.",
}  # fmt: skip
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # mean and deviation, in 0 … 1, that published weights expect


def renamed(name: str, table: dict[str, str]) -> str:
    """The name as another library has it."""
    for ours, theirs in table.items():
        name = re.sub(ours, theirs, name)
    return name


@torch.no_grad()
def plain_vit(model: MaskedAutoencoder) -> dict[str, Tensor]:
    """The encoder as the state dict of a plain ViT, timm's names, for images in 0 … 1 less ½, over ½ (timm's for its ViTs).

    The decay is folded into the branches (branch_factors): tokens before the last norm are the encoder's over Π a; the norm
    itself is new, with weight 1 and bias 0. Raises ValueError where a shortcut's weight is 0.
    """
    weight = rearrange(model.embed.weight, "d (p q c) -> d c p q", p=model.patch, q=model.patch)
    middle = torch.einsum("dcpq,c->d", weight, (127.5 - model.mean) / model.std)  # what grey of one half gives
    state = {
        "cls_token": model.cls[None, None],
        "pos_embed": F.pad(model.positions, (0, 0, 1, 0))[None],  # none for the class token
        "patch_embed.proj.weight": weight * (127.5 / model.std)[:, None, None],
        "patch_embed.proj.bias": model.embed.bias + middle,
        "norm.weight": torch.ones_like(model.cls),
        "norm.bias": torch.zeros_like(model.cls),
    }
    factors = growth(model)
    for name, value in model.encoder.state_dict(prefix="encoder.").items():
        if not name.endswith("logits"):
            state[renamed(name, PLAIN)] = value * factors.get(name.rpartition(".")[0], 1.0)
    return {name: value.cpu().contiguous() for name, value in state.items()}


def growth(model: MaskedAutoencoder) -> dict[str, float]:
    """The plain network's branches are the encoder's times these factors: of the last layer of each, by name."""
    ends = (f"encoder.{l}.{layer}" for l in range(len(model.encoder)) for layer in ("attn.proj", "mlp.2"))
    return dict(zip(ends, branch_factors([pair for block in model.encoder for pair in block.weights()])))


def for_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm's state dict of a plain ViT under the names of transformers' ViTModel."""
    parted = {}
    for name, value in state.items():
        thirds = zip(("query", "key", "value"), value.chunk(3)) if "qkv" in name else [("qkv", value)]
        parted |= {name.replace("qkv", part): third.contiguous() for part, third in thirds}
    return {renamed(name, TRANSFORMERS): value for name, value in parted.items()}


def export_run(study: Study) -> None:
    """`--export RUN`: its encoder as a plain ViT, for timm (--to), for transformers (--to-hf), or both. Raises BadInput."""
    from safetensors.torch import save

    run, model = load_run(Path(study.export).expanduser(), study)
    file, folder = (None if path is None else Path(path).expanduser() for path in (study.to, study.to_hf))
    for path in (path for path in (file, folder) if path is not None):
        if path.exists() and not study.overwrite and not (path == folder and path.is_dir() and not any(path.iterdir())):
            raise BadInput(f"{path} is there already: name another, or --overwrite")
    try:
        state = plain_vit(model)
    except ValueError as error:
        raise BadInput(f"{study.export} has no plain ViT: {error}") from error
    grid, channels = [side // run.patch_size for side in run.image_size], len(model.mean)
    half = [0.5] * channels
    told = {"format": "pt", "grid": json.dumps(grid), "mean": json.dumps(half), "std": json.dumps(half)}
    sizes = {
        "img_size": run.image_size, "patch_size": run.patch_size, "in_chans": channels, "embed_dim": run.width,
        "depth": run.depth, "num_heads": run.heads,
    }  # fmt: skip
    usual = {"img_size": (224, 224), "patch_size": 16, "in_chans": 3, "embed_dim": 768, "depth": 12, "num_heads": 12}
    try:
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, save(state, told))
            other = "".join(f"{name}={value}, " for name, value in sizes.items() if value != usual[name])
            print(f'timm.create_model("vit_base_patch16_224", {other}num_classes=0, checkpoint_path="{file}")')
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            shape = {
                "architectures": ["ViTModel"], "model_type": "vit", "image_size": run.image_size,
                "patch_size": run.patch_size, "num_channels": channels, "hidden_size": run.width,
                "intermediate_size": 4 * run.width, "num_hidden_layers": run.depth, "num_attention_heads": run.heads,
                "layer_norm_eps": 1e-6, "qkv_bias": True, "hidden_act": "gelu",
            }  # fmt: skip
            pictures = {
                "image_processor_type": "ViTImageProcessor", "do_resize": True, "do_rescale": True, "do_normalize": True,
                "size": dict(zip(("height", "width"), run.image_size)), "rescale_factor": 1 / 255, "resample": 3,
                "image_mean": half, "image_std": half,
            }  # fmt: skip
            write_whole(folder / "model.safetensors", save(for_transformers(state), told))
            write_whole(folder / "preprocessor_config.json", json.dumps(pictures, indent=1).encode())
            write_whole(folder / "config.json", json.dumps(shape, indent=1).encode())  # last: without it none is loaded
            print(f'transformers.ViTModel.from_pretrained("{folder}", add_pooling_layer=False)')
    except OSError as error:
        raise BadInput(f"can't write {error.filename}: {error.strerror}") from error
    print("for images in 0 … 1, less 0.5, over 0.5; its normalised tokens are the encoder's")


def plain_weights(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A file's tensors, float32, under timm's or He et al.'s names, and what safetensors' metadata tell. Raises BadInput."""
    file = Path(name).expanduser()
    if not file.is_file():
        raise BadInput(f"init {name!r} is {'a folder, not a file' if file.is_dir() else 'no file that can be found'}")
    kinds = "timm's or facebookresearch/mae's names"
    try:
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(file, "pt") as opened:
                state, told = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}
        else:
            with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of old pickles
                state, told = torch.load(file, map_location="cpu", weights_only=True), {}
        if {"config", "state"} <= state.keys():
            kinds = f"it is a run's checkpoint: --export {file.parent} --to FILE.safetensors makes one of it"
        elif any(name.startswith(("embeddings.", "vit.embeddings.")) for name in state):
            kinds = f"it has transformers' names: {kinds} are read, as in the file that --export RUN --to writes"
        state = state.get("model", state)
        state = {re.sub(r"^(module\.|_orig_mod\.)+", "", name): value.float() for name, value in state.items()}
        whole = {"cls_token": 3, "pos_embed": 3, "patch_embed.proj.weight": 4}  # names and numbers of dimensions
        if any(state[part].ndim != dimensions for part, dimensions in whole.items()):
            raise ValueError
    except Exception as error:  # a damaged or foreign file makes the readers raise whatever they meet
        raise BadInput(f"init {name!r} is damaged, or not a plain ViT's weights ({kinds})") from error
    for part, value in state.items():
        if not torch.isfinite(value).all():
            raise BadInput(f"init {name!r} holds values that are not finite, in {part}")
    return state, told


def regridded(positions: Tensor, grid: tuple[int, ...], before: tuple[int, ...]) -> Tensor:
    """Positions (1, 1 + n, d), the class token's first, of one grid for another: (1 + h·w, d), bicubic and antialiased."""
    if grid != before:
        patches = rearrange(positions[:, 1:], "one (h w) d -> one d h w", h=before[0], w=before[1])
        patches = F.interpolate(patches, grid, mode="bicubic", antialias=True)
        positions = torch.cat([positions[:, :1], rearrange(patches, "one d h w -> one (h w) d")], dim=1)
    return positions[0]


@torch.no_grad()
def start_from(name: str, model: MaskedAutoencoder) -> str:
    """Give the model a plain ViT's weights, the decoder's too where they are there and fit; says what was not to be had.

    The decay is divided out of the branches, so that the decayed encoder computes what the plain one does. Positions of
    another grid are interpolated. Images are standardised as the file tells, or else as ImageNet's. Raises BadInput.
    """
    theirs, told = plain_weights(name)
    ours, channels = model.state_dict(), len(model.mean)
    kernel = theirs["patch_embed.proj.weight"]
    blocks = {found[1] for found in map(re.compile(r"blocks\.(\d+)\.").match, theirs) if found}
    sizes = {
        "width": (len(kernel), len(model.cls)), "depth": (len(blocks), len(model.encoder)),
        "patch_size": (kernel.shape[3], model.patch), "number of channels": (kernel.shape[1], channels),
    }  # fmt: skip
    for what, (there, here) in sizes.items():
        if there != here:
            raise BadInput(f"init {name!r} has {what} {there}, and this model has {here}: both must be the same")
    grid, n = tuple(side // model.patch for side in model.size), theirs["pos_embed"].shape[1] - 1
    try:
        before = tuple(json.loads(told["grid"])) if "grid" in told else (math.isqrt(n),) * 2
        if math.prod(before) != n:
            raise ValueError(f"its {n} positions are no square grid")
        for positions in {"pos_embed", "decoder_pos_embed"} & theirs.keys():
            theirs[positions] = regridded(theirs[positions], grid, before)
        for i, statistic in enumerate(("mean", "std")):
            usual = IMAGENET[i] if channels == 3 else [0.5] * channels
            theirs[statistic] = 255 * torch.tensor(json.loads(told[statistic]) if statistic in told else usual)
        theirs["cls_token"] = theirs["cls_token"].flatten() + theirs["pos_embed"][0]
        theirs["pos_embed"] = theirs["pos_embed"][1:]
        theirs["patch_embed.proj.weight"] = rearrange(kernel, "d c p q -> d (p q c)")
        factors = growth(model)
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        raise BadInput(f"init {name!r} can't be the start: {error}") from error
    taken = {}
    for own, value in ours.items():
        plain = renamed(own, PLAIN)
        if plain in theirs and theirs[plain].numel() == value.numel():  # tokens are (1, 1, d) there
            taken[own] = theirs.pop(plain).view_as(value) / factors.get(own.rpartition(".")[0], 1.0)
    missing = [own for own in ours if own not in taken and not own.endswith("logits")]
    lacking = [own for own in missing if own.startswith(("cls", "positions", "embed.", "encoder."))]
    if lacking or any(plain.startswith("blocks.") for plain in theirs):
        part = renamed(lacking[0], PLAIN) + " is missing" if lacking else f"{min(theirs)} has no place here"
        raise BadInput(f"init {name!r} is of another kind of ViT: {part}")
    model.load_state_dict(ours | taken)
    numbers = lambda values: " ".join(f"{value:.4g}" for value in values)
    moved = "" if before == grid else f", positions interpolated from {before[0]}x{before[1]} to {grid[0]}x{grid[1]}"
    told_of = lambda names: ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", own) for own in names)) or "none"
    return (
        f"starting from {name}: {len(taken)} tensors, images standardised by mean {numbers(model.mean)} and deviation "
        f"{numbers(model.std)}{moved}\nnot in it, and as they were: {told_of(missing)}\nin it, and not used: {told_of(theirs)}"
    )


# ---- Plumbing -------------------------------------------------------------------------------------------------------


SCRIPT = "mae"
ELSEWHERE = (
    "root", "device", "out", "overwrite", "compile", "log", "recipe", "model", "evaluate", "protocol", "masks", "export",
    "to", "to_hf",
)  # fmt: skip  # not in config.json
DONE = "per_layer"  # what a finished result.json has
SMALLER = "try a smaller --batch-size, a higher --accumulate or a smaller --model"
FILES = ("result.json", "checkpoint.pt", "metrics.jsonl", "curves.png", "reconstruction.png")  # and config.json
GROUPS = {
    "--data": "data", "--alpha-min": "shortcuts", "--unet": "network", "--epochs": "training", "--pool": "probing",
    "--seed": "run", "--evaluate": "finished runs",
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
            whole = found["step"] >= 0 and all(len(scores) == 2 for scores in found["baselines"].values())
            whole = whole and all({"epoch", "loss"} <= record.keys() for record in found["records"])
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
        stop = Stop(at_once=True)
        if (study.evaluate or study.export is not None) and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise BadInput("--evaluate and --export run in one process: start them without torchrun")
        if study.export is not None:
            export_run(study)
            return 0
        if study.evaluate:
            with stop:
                evaluate_runs(study)
            return 0
        with stop, probe.processes_joined(choose_device(study.device).type == "cuda"):
            _, diverged = train_all(study)
        return 1 if diverged else 0
    except BadInput as error:
        print(f"{SCRIPT}.py: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    except FloatingPointError as error:  # of an evaluation; training's are told run by run
        print(f"{SCRIPT}.py: {error}", file=sys.stderr)
        return 1
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
        begun = (
            study
            and not study.evaluate
            and study.export is None
            and any((run.folder / "checkpoint.pt").exists() for run in study.runs)
        )
        place = f"step {step[0]}, which is saved" if step else "the last checkpoint"
        end = f"goes on from {place}" if step or begun else "starts anew: nothing was saved yet"
        print(f"{SCRIPT}.py: stopped; the same command{without} {end}", file=sys.stderr)
        return 128 + number


if __name__ == "__main__":
    sys.exit(main())
