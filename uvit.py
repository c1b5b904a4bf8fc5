"""Diffusion by a U-ViT with decayed identity shortcuts (Residual Connections Harm Generative Representation Learning).

A ViT block adds its input to its output twice. Here the added input is weakened with depth, from the first block to the last:

    x_{l+1} = α_l · x_l + f_l(x_l)                                (Eq. 3)   Block.forward
    α_l     falls in equal steps from 1 to α_min                  (Eq. 5)   shortcut_weights

A U-ViT (Bao et al. 2023) is a ViT over time, class and patches, all tokens alike, whose second half joins the outputs of
its first half by long skips: so the deep layers can lose the pixels and still get them back. It learns to predict the
noise in a noisy image,

    x_t = exp(−½ ∫₀ᵗ β) x_0 + sqrt(1 − exp(−∫₀ᵗ β)) ε,   β(t) = 0.1 + 19.9 t,   0 ≤ t ≤ 1           perturb
    loss = mean of (ε − ε_θ(x_t, t))²                                                                    train

and images come out of noise by walking t from 1 back to 0 (euler_maruyama, probability_flow, dpm_solver).

    python uvit.py --alpha-min 0.7                                # built-in digits, a laptop
    python uvit.py --data cifar100 --alpha-min 0.7 --fid-samples 50000    # one GPU
    python uvit.py --sample runs/uvit-digits-a0.7-s0 --n 64       # images from a run

The first two train, draw samples, and say how good the features are: linear probe, k-NN and effective rank of every block
at several noise levels (the paper's Table 4), beside raw pixels and the untrained network. README: what was measured.

Shapes: b batch, n patches, e extra tokens (time, class), d width, p values in a patch, c channels, h and w pixels.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import importlib.util
import io
import itertools
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
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

# One recipe per data set; a flag overrides its field. A folder of images takes "imagenet"; with --vae all take "latents".
RECIPES = {
    "digits": dict(
        image_size=(16, 16), model="micro", patch_size=4, epochs=15, batch_size=64, lr=3e-3, betas=(0.9, 0.99),
        warmup_steps=100, flip=False, eval_every=0, sample_every=8, sampler="sde",
    ),
    "fashion-mnist": dict(
        image_size=(28, 28), model="small", patch_size=2, epochs=400, batch_size=128, lr=2e-4, betas=(0.99, 0.999),
        warmup_steps=2500, flip=True, eval_every=0, sample_every=20, sampler="dpm-solver",
    ),
    "cifar": dict(  # Bao et al.'s, 500k steps
        image_size=(32, 32), model="small", patch_size=2, epochs=1280, batch_size=128, lr=2e-4, betas=(0.99, 0.999),
        warmup_steps=2500, flip=True, eval_every=0, sample_every=40, sampler="dpm-solver",
    ),
    "imagenet": dict(  # Bao et al.'s for 64×64 pixels, 300k steps on ImageNet-100
        image_size=(64, 64), model="mid", patch_size=4, epochs=2420, batch_size=1024, lr=3e-4, betas=(0.99, 0.99),
        warmup_steps=5000, flip=True, eval_every=0, sample_every=100, sampler="dpm-solver",
    ),
    "latents": dict(  # with --vae: Bao et al.'s for 256×256 pixels, 300k steps on ImageNet-100
        image_size=(256, 256), model="mid", patch_size=2, epochs=2420, batch_size=1024, lr=3e-4, betas=(0.99, 0.99),
        warmup_steps=5000, flip=True, eval_every=0, sample_every=100, sampler="dpm-solver",
    ),
}  # fmt: skip
RECIPES["mnist"] = RECIPES["fashion-mnist"] | {"flip": False}  # characters are not mirrored
RECIPES["svhn"] = RECIPES["cifar"] | {"flip": False}
RECIPE_OF = {name: name for name in ("digits", "mnist", "fashion-mnist", "svhn")}  # a named data set's recipe
RECIPE_OF |= {"kmnist": "mnist", "cifar10": "cifar", "cifar100": "cifar", "stl10": "cifar"}
MODELS = {  # width, depth, heads (Bao et al. 2023, Table 1)
    "micro": (96, 4, 4),
    "small": (512, 12, 8),
    "mid": (768, 16, 12),
    "large": (1024, 20, 16),
}
VARIANTS = {
    "schedule": ("linear", "cosine", "constant", "learned"),
    "decay_on": ("both", "attn", "mlp"),
    "shortcut": ("decay", "scale-both", "scale-branch"),
}
SAMPLERS = ("dpm-solver", "ode", "sde")
OF_SAMPLING = ("sampler", "sampler_steps", "guidance", "clip", "seed", "device", "bf16")  # what --sample may change


@dataclass(frozen=True)
class Config:
    """Train a U-ViT with decayed shortcuts to denoise, draw samples, and probe its features.

    A field that is None takes the data set's recipe, or the named model's size.
    """

    data: str = "digits"  # digits (built in), a torchvision name, or a folder with train/<class>/* and val/<class>/*
    root: str = "data"  # where named data sets and the cache of decoded images live
    recipe: str | None = None  # digits, fashion-mnist, mnist, cifar, svhn, imagenet or latents; None: the data set's
    vae: str | None = None  # diffusers' AutoencoderKL, by name or folder: train on its latents; None: on pixels
    alpha_min: float | Literal["auto"] = 0.7  # weight of the last shortcut (paper Eq. 5, Table 4); auto: from the depth
    schedule: str = "linear"  # how α falls from 1: linear, cosine, constant (α_min throughout) or learned
    decay_on: str = "both"  # shortcuts that decay: both, attn or mlp (paper Table 3b)
    shortcut: str = "decay"  # α·x + f (Eq. 3); scale-both: c·(x + f); scale-branch: x + c·f (paper Table 3b)
    scale: float = 0.5**0.5  # the constant c of these two
    drop_path: float = 0.0  # stochastic depth: the last block's chance to be dropped, the lth of L has l/L of it
    conditional: bool = False  # tell the network the class
    label_dropout: float = 0.1  # share of the labels that is hidden in training (conditional; Bao et al. 2023)

    model: str | None = None  # sizes by name: micro, small, mid or large; patch_size is apart
    image_size: tuple[int, ...] | int | None = None  # pixels: one number, or height and width
    patch_size: int | None = None  # pixels, or places of the latents
    width: int | None = None  # of the tokens
    depth: int | None = None  # blocks, half of them down and half up, besides the middle one; two shortcuts each
    heads: int | None = None  # attention heads

    epochs: int | None = None  # passes over the training images
    batch_size: int | None = None  # images per optimiser step
    lr: float | None = None  # learning rate after the warm-up, constant (Bao et al.: 2e-4 for batches of 128)
    warmup_steps: int | None = None  # linear warm-up
    weight_decay: float = 0.03  # AdamW's (Bao et al.)
    betas: tuple[float, float] | None = None  # AdamW's
    clip_grad: float | None = None  # largest norm of the gradient; None: no clipping
    accumulate: int = 1  # parts that a batch is split into, to save memory; the mathematics stays
    ema: float = 0.9999  # decay of the weights' moving average, which samples and is probed (Bao et al.)
    flip: bool | None = None  # mirror half of the images

    sampler: str | None = None  # dpm-solver (DPM-Solver++ 2M), ode (probability flow) or sde (Euler–Maruyama)
    sampler_steps: int | None = None  # network evaluations; None: 50 for dpm-solver, 1000 for the others
    clip: bool = True  # keep the predicted x_0 in −1 … 1 while sampling pixels (Ho et al. 2020; Bao et al. do not)
    guidance: float = 0.0  # ε_c + guidance · (ε_c − ε_0) (Bao et al.); 0: the conditional model as it is
    fid_samples: int = 0  # images to draw for FID (50,000 for a paper's number); 0: none
    fid_weights: str | None = None  # torch-fidelity's Inception weights in a file; None: downloaded
    kid: bool = False  # also the kernel Inception distance of these images
    precision_recall: bool = False  # also precision and recall (3 neighbours, in Inception's features)

    probe_times: tuple[float, ...] = (0.05, 0.15, 0.3)  # noise levels t at which features are probed
    eval_every: int | None = None  # epochs between probes; 0: only at the end
    sample_every: int | None = None  # epochs between grids of samples; 0: only at the end
    probe_limit: int = 130_000  # training images probed at most, evenly over the classes (ImageNet-100 has 126,689)
    seed: int = 0  # decides everything
    limit: int | None = None  # only the first N training images, evenly over the classes
    skip_bad_images: bool = False  # go on without images that can't be read
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    bf16: bool = True  # bfloat16 on CUDA
    compile: bool = False  # torch.compile the training step
    log: Literal["none", "tensorboard"] = "none"  # what metrics.jsonl is written to besides
    out: str | None = None  # run folder; None: runs/uvit-<data>-a<alpha_min>-s<seed>
    overwrite: bool = False  # start anew where the run folder holds another or a finished run

    sample: str | None = None  # a run folder: draw images from it instead of training
    n: int | None = None  # images to draw with --sample; None: 64
    label: int | None = None  # their class, from 0 (conditional runs); None: all classes in turn

    def __post_init__(self) -> None:
        for name, table in (("recipe", RECIPES), ("model", MODELS), ("sampler", SAMPLERS), *VARIANTS.items()):
            if getattr(self, name) not in (None, *table):
                raise ValueError(f"{name} must be one of {', '.join(table)}, not {getattr(self, name)!r}")
        recipe = RECIPES[self.recipe or ("latents" if self.vae else RECIPE_OF.get(self.data, "imagenet"))]
        filled = {**recipe, **dict(zip(("width", "depth", "heads"), MODELS[self.model or recipe["model"]]))}
        filled["sampler_steps"] = 50 if (self.sampler or recipe["sampler"]) == "dpm-solver" else 1000
        if self.sample:  # the run's own, unless told
            del filled["sampler"], filled["sampler_steps"]
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
            object.__setattr__(self, "alpha_min", round(rank.alpha_min_for(self.depth + 1, weights=weights), 4))

    def _check(self) -> None:
        """Raises ValueError for a value that can't be meant."""

        sizes = ("patch_size", "width", "depth", "heads")
        counts = ("epochs", "batch_size", "accumulate", "probe_limit", "limit", "lr", "clip_grad", "sampler_steps", "n")
        for name in (*sizes, *counts):
            value, limit = getattr(self, name), 2**16 if name in sizes else 2**31
            if value is not None and not 0 < value < limit:
                raise ValueError(f"{name} must be positive and below {limit}, not {value}")
        size, patch = self.image_size, self.patch_size
        if len(size) != 2 or not 1 <= min(size) <= max(size) < 2**16:
            raise ValueError(
                f"image_size must be one or two positive numbers, not {' '.join(map(str, size)) or 'none'}"
            )
        if not self.vae and (size[0] % patch or size[1] % patch):
            raise ValueError(f"patch_size {patch} does not divide the image of {size[0]}x{size[1]} pixels")
        if self.width % self.heads:
            raise ValueError(f"heads {self.heads} does not divide width {self.width}")
        if self.width % 2 or self.depth % 2:
            name = "width" if self.width % 2 else "depth"
            raise ValueError(f"{name} must be even, not {getattr(self, name)}")
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
        if self.log == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
            raise ValueError("log tensorboard needs a package that is not installed: pip install tensorboard")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must not be negative, not {self.weight_decay}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), not {self.betas[0]} {self.betas[1]}")
        for name in ("ema", "label_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), not {getattr(self, name)}")
        for name in ("eval_every", "sample_every", "warmup_steps", "fid_samples"):
            if not 0 <= getattr(self, name) < 2**31:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if self.sampler_steps is not None and self.sampler_steps < 2:
            raise ValueError(f"sampler_steps must be 2 or more, not {self.sampler_steps}")
        if not -1 <= self.guidance <= 100:
            raise ValueError(f"guidance must lie in [-1, 100], not {self.guidance}")
        if self.guidance and not (self.conditional or self.sample):
            raise ValueError(f"guidance {self.guidance} needs a network that knows classes: add --conditional")
        if self.fid_samples == 1:
            raise ValueError("fid_samples must be 0, or 2 or more, not 1")
        if not self.fid_samples and (self.kid or self.precision_recall):
            raise ValueError(
                f"{'kid' if self.kid else 'precision_recall'} needs images: say how many with --fid-samples"
            )
        if not self.probe_times or not all(0 <= t <= 1 for t in self.probe_times):
            raise ValueError(f"probe_times must lie in [0, 1], not {' '.join(map(str, self.probe_times)) or 'none'}")
        if len({f"{t:g}" for t in self.probe_times}) < len(self.probe_times):
            raise ValueError(f"probe_times must differ, not {' '.join(map(str, self.probe_times))}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2^63), not {self.seed}")
        if self.probe_limit < 2:
            raise ValueError(f"probe_limit must be 2 or more, not {self.probe_limit}")
        if self.accumulate > self.batch_size:
            raise ValueError(f"accumulate {self.accumulate} is more than the {self.batch_size} images of a batch")
        for name in ("vae", "fid_weights", "sample"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} must not be empty: name one, or leave the flag out")
        for name in ("label", "n"):
            if getattr(self, name) is not None and not self.sample:
                raise ValueError(f"{name} {getattr(self, name)} is for --sample RUN")
        if self.label is not None and self.label < 0:
            raise ValueError(f"label must not be negative, not {self.label}")

    @property
    def data_name(self) -> str:
        return self.data if self.data in RECIPE_OF else Path(self.data).expanduser().resolve().name

    @property
    def variant(self) -> str:
        """The shortcut in short: a0.7, a0.7-cosine, a0.7-attn, learned, scale-both0.7071."""
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
    """Train a U-ViT with decayed shortcuts to denoise, draw samples, and probe its features; one for every α_min and seed.

    A field that is None takes the data set's recipe, or the named model's size.
    """

    alpha_min: tuple[float | Literal["auto"], ...] = (0.7,)  # weights of the last shortcut (Eq. 5); auto: by depth
    seed: tuple[int, ...] = (0,)  # decides everything

    def __post_init__(self) -> None:
        for name in ("alpha_min", "seed"):
            if not getattr(self, name):
                raise ValueError(f"{name} must list one value or more, not none")
        names = [run.name for run in self.runs]  # making them checks their values
        for field in dataclasses.fields(self) if self.sample else ():
            value = getattr(self, field.name)
            if value != field.default and field.name not in ("sample", "n", "label", *OF_SAMPLING):
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
                raise ValueError(f"{field.name} {shown} is not heeded by --sample: leave it out")
        if self.sample and len(names) > 1:
            raise ValueError(f"sample takes one seed, not {' '.join(map(str, self.seed))}")
        if len({*names}) < len(names):
            raise ValueError(
                f"alpha_min {' '.join(map(str, self.alpha_min))} and seed {' '.join(map(str, self.seed))} name the run "
                f"{max(names, key=names.count)} twice: list values that differ, in six digits"
            )

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
    """Eq. 5, per shortcut: α = linspace(1, α_min, 2·(depth + 1)), attention and MLP of each block in turn.

    Equal steps, both ends included, from the first block down over the middle one to the last block up.
    `cosine` has the same ends and falls most in the middle; `constant` is α_min throughout; `learned` starts at √½.
    With `decay_on` attn or mlp only these fall, in depth + 1 steps, and the others are 1.
    """
    count = 2 * (depth + 1) if decay_on == "both" else depth + 1
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
        return [(config.scale, config.scale)] * (2 * config.depth + 2)
    if config.shortcut == "scale-branch":
        return [(1.0, config.scale)] * (2 * config.depth + 2)
    alphas = shortcut_weights(config.depth, config.alpha_min, config.schedule, config.decay_on)
    return [(alpha, 1.0) for alpha in alphas]


def weighted_sum(weights: tuple[float | Tensor, float | Tensor], x: Tensor, branch: Tensor) -> Tensor:
    """a·x + b·f(x) for weights (a, b); with plain numbers and b = 1 it costs no more than the plain sum."""
    a, b = weights
    branch = branch if isinstance(b, float) and b == 1 else b * branch
    return a * x + branch if isinstance(a, Tensor) else torch.add(branch, x, alpha=a)


def drop_factors(noise: Tensor, drop_path: float) -> Tensor:
    """Stochastic depth (Huang et al. 2016): the factor of every branch (b, 2·(depth + 1)), from noise as large in [0, 1).

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


def time_embedding(t: Tensor, width: int) -> Tensor:
    """Sine-cosine embedding (b, d) of 999·t, t (b,) in [0, 1]: cosines, then sines, of falling frequency."""
    frequencies = torch.exp(-math.log(10000) * torch.arange(width // 2, device=t.device) / (width // 2))
    angles = 999 * t.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


# The variance-preserving diffusion: β(t) = 0.1 + 19.9 t (Song et al. 2021). Times are tensors, or float64 numbers.

EARLIEST = 1e-3  # samplers walk from t = 1 to here, and then to 0 at once: the score has no limit at 0


def beta(t: Tensor) -> Tensor:
    """β(t) = 0.1 + 19.9 t."""
    return 0.1 + 19.9 * t


def signal_and_noise(t: Tensor) -> tuple[Tensor, Tensor]:
    """exp(−½ ∫₀ᵗ β), the share of x_0 in x_t, and sqrt(1 − exp(−∫₀ᵗ β)), the noise's deviation; ∫₀ᵗ β = 0.1 t + 9.95 t²."""
    integral = 0.1 * t + 9.95 * t**2
    return torch.exp(-0.5 * integral), torch.sqrt(-torch.expm1(-integral))


def perturb(x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t = exp(−½ ∫β) x_0 + sqrt(1 − exp(−∫β)) ε; x and noise (b, c, h, w), t (b,)."""
    signal, deviation = (factor[:, None, None, None] for factor in signal_and_noise(t))
    return signal * x + deviation * noise


def equal_steps(steps: int) -> list[Tensor]:
    """`steps` times at which the network is asked, equally spaced from 1 to EARLIEST, and then 0."""
    return [*torch.linspace(1, EARLIEST, steps, dtype=torch.float64), torch.zeros((), dtype=torch.float64)]


Predict = Callable[[Tensor, Tensor], Tensor]  # x_t (b, c, h, w) and t () to the noise in it


def euler_maruyama(predict: Predict, x: Tensor, steps: int, noise: Callable[[int], Tensor]) -> Tensor:
    """The reverse SDE in equal steps: dx = [−½ β x − β·score] dt + √β dw, score = −ε/σ; noise(i) is step i's."""
    for i, (t, s) in enumerate(itertools.pairwise(equal_steps(steps))):
        score = -predict(x, t) / signal_and_noise(t)[1].item()
        x = x + beta(t).item() * (0.5 * x + score) * (t - s).item()
        if s > 0:
            x = x + (beta(t) * (t - s)).sqrt().item() * noise(i)
    return x


def probability_flow(predict: Predict, x: Tensor, steps: int) -> Tensor:
    """The ODE with the same marginals in equal Euler steps: dx = [−½ β x − ½ β·score] dt."""
    for t, s in itertools.pairwise(equal_steps(steps)):
        score = -predict(x, t) / signal_and_noise(t)[1].item()
        x = x + 0.5 * beta(t).item() * (x + score) * (t - s).item()
    return x


def dpm_solver(predict: Predict, x: Tensor, steps: int) -> Tensor:
    """DPM-Solver++(2M) (Lu et al. 2022), in equal steps h of λ = log(signal/deviation); D extrapolates the prediction of x_0:

    x_s = (σ_s/σ_t) x_t − signal_s (e^−h − 1) D,   D = x̂_0 + (x̂_0 − the last x̂_0) / 2r,   r = last h / h
    """
    ends = (torch.log(torch.divide(*signal_and_noise(torch.tensor(t, dtype=torch.float64)))) for t in (1.0, EARLIEST))
    integral = torch.log1p(torch.exp(-2 * torch.linspace(*ends, steps, dtype=torch.float64)))  # of β, from λ
    times = 2 * integral / (0.1 + torch.sqrt(0.01 + 4 * 9.95 * integral))  # the root of 9.95 t² + 0.1 t = integral
    last = None
    for t, s in itertools.pairwise([*times, torch.zeros((), dtype=torch.float64)]):
        (signal_t, sigma_t), (signal_s, sigma_s) = signal_and_noise(t), signal_and_noise(s)
        x_0 = (x - sigma_t.item() * predict(x, t)) / signal_t.item()
        ratio = (sigma_s * signal_t / (sigma_t * signal_s)).item()  # e^−h; 0 in the last step, which goes to x̂_0
        d = x_0 if last is None or ratio == 0 else x_0 + (x_0 - last) / 2  # r = 1: the steps are equal
        x = (sigma_s / sigma_t).item() * x - signal_s.item() * (ratio - 1) * d
        last = x_0
    return x


# ---- Model ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head self-attention: tokens (b, n, d) to (b, n, d)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.heads)
        return self.proj(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))


class Block(nn.Module):
    """Pre-norm transformer block whose two shortcuts are weakened (Eq. 3): the paper's one change.

    A block of the way up first joins the output of its mirror block to its input.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        attn: tuple[float, float] = (1.0, 1.0),
        mlp: tuple[float, float] = (1.0, 1.0),
        learned: bool = False,
        joins: bool = False,
    ) -> None:
        super().__init__()
        self.pairs = [attn, mlp]  # (a, b) of each shortcut
        self.logits = nn.Parameter(torch.logit(torch.tensor([attn[0], mlp[0]]))) if learned else None
        self.join = nn.Linear(2 * width, width) if joins else None
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def weights(self, drop: Tensor | None = None) -> list[tuple[float | Tensor, float | Tensor]]:
        """(a, b) of both shortcuts as they are now: learned or not, b times the factors `drop` (b, 2) of the branches."""
        pairs = self.pairs if self.logits is None else [(a, 1.0) for a in self.logits.sigmoid()]
        return pairs if drop is None else [(a, b * d[:, None, None]) for (a, b), d in zip(pairs, drop.unbind(1))]

    def forward(self, x: Tensor, skip: Tensor | None = None, drop: Tensor | None = None) -> Tensor:
        if self.join is not None:
            x = self.join(torch.cat([x, skip], dim=-1))
        attn, mlp = self.weights(drop)
        x = weighted_sum(attn, x, self.attn(self.norm1(x)))  # a·x + b·f(x); a = α, b = 1 in Eq. 3
        x = weighted_sum(mlp, x, self.mlp(self.norm2(x)))
        return x


class UViT(nn.Module):
    """U-ViT (Bao et al. 2023) with decayed shortcuts: noisy images (b, c, h, w) and times (b,) to the noise in them.

    With `classes` it also takes labels (b,); label `classes` stands for none.
    """

    def __init__(
        self,
        config: Config,
        channels: int = 3,
        classes: int = 0,
        generator: torch.Generator | None = None,
        size: tuple[int, int] | None = None,  # where it is not the images', but their latents'
    ) -> None:
        super().__init__()
        self.size, self.patch, self.classes = size or config.image_size, config.patch_size, classes
        width, half = config.width, config.depth // 2
        n = (self.size[0] // self.patch) * (self.size[1] // self.patch)
        values = self.patch * self.patch * channels
        self.extras = 2 if classes else 1

        self.embed = nn.Linear(values, width)
        self.label_embed = nn.Embedding(classes + 1, width) if classes else None
        self.positions = nn.Parameter(torch.zeros(self.extras + n, width))
        pairs, learned = shortcut_pairs(config), config.schedule == "learned"
        self.blocks = nn.ModuleList(  # down, the middle one, up
            Block(width, config.heads, pairs[2 * l], pairs[2 * l + 1], learned, joins=l > half)
            for l in range(config.depth + 1)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, values)
        self.smooth = nn.Conv2d(channels, channels, 3, padding=1)
        self.initialize(generator)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None) -> None:
        """Bao et al.'s start, normals of 0.02 cut off at 2, with two changes.

        Every branch ends in zeros; and patches and positions enter with variance 1 a value, as strong as the class: the
        loss of short runs falls faster so.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.embed.weight, std=self.embed.in_features**-0.5, generator=generator)
        nn.init.normal_(self.positions, generator=generator)
        if self.label_embed is not None:
            nn.init.normal_(self.label_embed.weight, generator=generator)
        for parameter in self.smooth.parameters():
            bound = (9 * self.smooth.in_channels) ** -0.5
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
        for block in self.blocks:
            nn.init.zeros_(block.attn.proj.weight)
            nn.init.zeros_(block.mlp[-1].weight)

    @property
    @torch.no_grad()
    def alphas(self) -> list[float]:
        """The shortcuts' weights as they are now, in order."""
        return [float(a) for block in self.blocks for a, _ in block.weights()]

    def tokens(
        self, x: Tensor, t: Tensor, labels: Tensor | None = None, drops: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Tokens (b, e + n, d) after every block: time, class (if any), patches.

        `drops` (b, 2·(depth + 1)), if given, are the branches' factors (drop_factors).
        """
        patches = self.embed(patchify(x, self.patch))
        extras = [time_embedding(t, patches.shape[-1])]
        if self.label_embed is not None:
            extras.append(self.label_embed(labels))
        x = torch.cat([torch.stack(extras, dim=1).to(patches.dtype), patches], dim=1) + self.positions
        skips = []
        half = len(self.blocks) // 2
        for l, block in enumerate(self.blocks):
            drop = None if drops is None else drops[:, 2 * l : 2 * l + 2]
            x = block(x, skips.pop() if l > half else None, drop)  # deepest first
            if l < half:
                skips.append(x)
            yield x

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None, drops: Tensor | None = None) -> Tensor:
        *_, last = self.tokens(x, t, labels, drops)
        patches = self.head(self.norm(last))[:, self.extras :]
        return self.smooth(unpatchify(patches, self.patch, self.size))


# ---- Train ----------------------------------------------------------------------------------------------------------


DIVERGED = (
    "try a lower --lr, more --warmup-steps or a higher --alpha-min (the paper's runs are unstable at 0.4 and below), with "
    "another --out or --overwrite"
)
SAVE_SECONDS = 600  # a checkpoint after every epoch, and within epochs that take longer than this


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up to lr, then constant (Bao et al.)."""
    return config.lr * min(1.0, (step + 1) / max(1, config.warmup_steps))


def ema_decay(config: Config, step: int) -> float:
    """min(ema, (1 + step)/(10 + step)): the moving average forgets its random start."""
    return min(config.ema, (1 + step) / (10 + step))


def due(config: Config, epoch: int) -> bool:
    """Whether the features are probed after this epoch, counted from 1."""
    return epoch == config.epochs or (config.eval_every > 0 and epoch > 0 and epoch % config.eval_every == 0)


def check_finite(config: Config, value: float, step: int, lr: float) -> None:
    """Raises FloatingPointError where the loss, or the sum of the weights, is not finite."""
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the loss is not finite at step {step} (lr {lr:.1e}): {DIVERGED}; {config.folder} keeps what was saved before"
        )


def scaled(images: Tensor) -> Tensor:
    """Pixels 0 … 255 to −1 … 1; latents are scaled already."""
    return images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images.float()


def build(config: Config, shape: tuple[int, int, int], classes: int, device: torch.device) -> nn.ModuleDict:
    """The untrained network that the seed decides, and the moving average of its weights, equal at the start.

    `shape` (c, h, w) is that of what it denoises: images, or latents.
    """
    generator = generator_for("cpu", config.seed, "init")
    model = UViT(config, shape[0], classes if config.conditional else 0, generator, shape[1:])
    return nn.ModuleDict({"model": model, "ema": copy.deepcopy(model).requires_grad_(False)}).to(device)


def mirrored(views: Tensor, flips: Tensor) -> Tensor:
    """What the network sees of images (b, c, h, w) uint8, or of latents (b, 2, c, h, w), straight and mirrored."""
    if views.ndim == 5:  # the latents of a mirrored image are not the mirrored latents
        return scaled(views[torch.arange(len(views), device=views.device), flips.long()])
    return scaled(torch.where(flips[:, None, None, None], views.flip(3), views))


def train(config: Config) -> dict:
    """Train, sample, probe, and leave everything in the run folder; returns what result.json holds.

    A run that was killed goes on where it was; a finished one is not trained again, its result is returned. Raises
    BadInput where the data, the device or the run folder can't be used, FloatingPointError where the loss is not finite.
    """
    device = choose_device(config.device)
    saved, result = open_run(config)
    if config.fid_samples and config.fid_weights:
        check_inception(config.fid_weights)
    if result and lacks_quality(config, result):
        print(f"{config.folder} is finished, but for the images that --fid-samples asks for")
        return add_quality(config, result)
    if result:
        print(f"{config.folder} is finished: its result is shown; --overwrite trains again")
        return result
    vae = load_vae(config.vae, device) if config.vae else None
    root = Path(config.root).expanduser()
    data = probe.load_images(config.data, root, config.image_size, config.limit, config.skip_bad_images)
    n, channels = data.train.shape[:2]
    with probe.first_process_first():
        inputs = encoded(vae, data, root) if vae else data  # what the network denoises: images, or latents
    smallest = n % min(config.batch_size, n) or min(config.batch_size, n)
    if smallest < probe.process()[1]:
        raise BadInput(
            f"the smallest batch has {smallest} of the {n} images, fewer than the {probe.process()[1]} processes: choose "
            "another --batch-size, or start fewer"
        )
    shape = inputs.train.shape[-3:]
    if shape[1] % config.patch_size or shape[2] % config.patch_size:
        raise BadInput(f"patch_size {config.patch_size} does not divide the latents of {shape[1]}x{shape[2]}")

    models = build(config, shape, len(data.classes), device)
    model, ema = models["model"], models["ema"]
    parameters, averages = list(model.parameters()), list(ema.parameters())
    logits = [
        block.logits for block in model.blocks if block.logits is not None
    ]  # of learned shortcuts: no weight decay
    others = [p for p in parameters if all(p is not logit for logit in logits)]
    groups = [{"params": others, "weight_decay": config.weight_decay}, {"params": logits, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=config.betas, fused=device.type in ("cpu", "cuda"))
    state = {"step": 0, "loss": 0.0, "loss_sum": 0.0, "seconds": 0.0, "images": 0, "train_images": n, "baselines": {}}
    state |= {"shape": tuple(shape), "records": []}  # records: what metrics.jsonl holds
    lock = start_run(config, saved, models, optimizer, state)
    board = tensorboard(config, state["records"])

    one = [torch.zeros(1, *shape, device=device), torch.ones(1, device=device)]
    one += [torch.zeros(1, dtype=torch.long, device=device)] if config.conditional else []
    flops = probe.training_flops(model, *one)
    rate = probe.product_rate(device, torch.bfloat16 if config.bf16 else torch.float32)
    batch, (number, processes) = min(config.batch_size, n), probe.process()
    print(f"{device_name(device)}, torch {torch.__version__}, run folder {config.folder}")
    size = "x".join(map(str, (channels, *config.image_size)))
    print(f"{config.data}: {n} train and {len(data.test)} test images of {size}")
    print(
        f"{sum(p.numel() for p in parameters) / 1e6:.2f} M parameters, {flops / 1e9:.3g} GFLOP an image, "
        f"{len(model.positions)} tokens, {described(config, model.alphas)}"
    )
    if batch < config.batch_size:
        print(f"{n} training images are fewer than batch_size {config.batch_size}: all of them are in every batch")
    if 0 < config.fid_samples < 2048:
        print(f"FID of {config.fid_samples} images says little: its bias falls with their number; take 2,048 or more")
    if not state["baselines"]:
        state["baselines"] = evaluate_baselines(ema, data, inputs, config)
        save_checkpoint(config, models, optimizer, state)
    for name, scores in state["baselines"].items():
        print(as_line(f"baseline {name}", scores))

    images, labels = resident(inputs.train, device), data.train_labels
    network = torch.compile(model) if config.compile else model
    if processes > 1:  # each takes its share of every batch, and gradients are averaged
        network = DistributedDataParallel(network, [device] if device.type == "cuda" else None)
    steps_per_epoch = math.ceil(n / batch)
    steps = config.epochs * steps_per_epoch
    bar = tqdm(total=steps, initial=state["step"], desc="training", unit=" steps", disable=None)
    loss_sum = torch.tensor(state["loss_sum"] if number == 0 else 0.0, device=device)  # over the steps of this epoch
    order, seen, started = None, 0, time.monotonic()

    def end_epoch(stop: Stop) -> None:
        """Probe and sample where that is due, and log; may be stopped at once, as the checkpoint has the epoch."""
        stop.at_once = True
        record = state["records"][-1]
        scores = evaluate(ema, inputs, config) if due(config, record["epoch"]) else {}
        with bar.external_write_mode():
            print(as_line("train", record), *([as_line("eval", scores)] if scores else []), sep="\n", flush=True)
        record |= scores
        log(config, state["records"], board)
        if config.sample_every and record["epoch"] % config.sample_every == 0:
            draw_samples(config, sample(ema, config, 64, vae=vae))
        stop.at_once = False
        if scores:
            save_checkpoint(config, models, optimizer, state)

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
            index = order[i][mine]
            generator = generator_for(device, config.seed, "step", step)  # drawn for the whole batch by every process
            uniform = partial(torch.rand, generator=generator, device=device)
            views = images[index.to(images.device)].to(device)
            views = mirrored(views, uniform(whole)[mine] < (0.5 if config.flip else 0.0))
            t = 1 - uniform(whole)[mine]  # in (0, 1]: 1 is where sampling begins
            noise = torch.randn(whole, *views.shape[1:], generator=generator, device=device)[mine]
            truth = drops = None
            if config.conditional:
                truth = labels[index].to(device)
                truth = torch.where(uniform(whole)[mine] < config.label_dropout, model.classes, truth)
            if config.drop_path:
                drops = drop_factors(uniform(whole, 2 * config.depth + 2)[mine], config.drop_path)

            parts = torch.arange(len(views), device=device).chunk(config.accumulate)
            for j, part in enumerate(parts):
                last_part = j == len(parts) - 1
                with contextlib.nullcontext() if last_part or processes == 1 else network.no_sync():
                    noisy = perturb(views[part], noise[part], t[part])
                    with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16 and device.type == "cuda"):
                        predicted = network(noisy, t[part], *(None if x is None else x[part] for x in (truth, drops)))
                    loss = F.mse_loss(predicted.float(), noise[part]) * (len(part) / whole)
                    (loss * processes).backward()  # the average over processes becomes the sum
                loss_sum += loss.detach()
            if config.clip_grad is not None:
                nn.utils.clip_grad_norm_(parameters, config.clip_grad)
            lr = learning_rate(config, step)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_lerp_(averages, parameters, 1 - ema_decay(config, step))

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
            check_finite(config, sum(p.detach().sum() for p in models.parameters()).item(), step, lr)
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
            save_checkpoint(config, models, optimizer, state)
            if stopped:
                raise KeyboardInterrupt(stop.signal or signal.SIGTERM, step + 1)
            if last_of_epoch:
                end_epoch(stop)
            seen, started = 0, time.monotonic()
    bar.close()

    records = state["records"]
    draw_curves(config, records)
    draw_samples(config, sample(ema, config, 64, vae=vae))
    quality = generation_quality(ema, data, config, vae) if config.fid_samples else dict.fromkeys(QUALITY)
    result = {
        "script": SCRIPT, "data": config.data, "alpha_min": config.alpha_min, "alpha_eff": rank.alpha_eff(ema.alphas),
        "seed": config.seed, "epochs": config.epochs, "steps": steps, "loss": state["loss"],
        "seconds": state["seconds"], "images_per_second": state["images"] / max(state["seconds"], 1e-9),
        "peak_memory_bytes": peak_memory(device), "device": device_name(device), "torch": torch.__version__,
        "utilisation": records[-1].get("utilisation"), **quality, **{name: records[-1][name] for name in SCORES}, "baselines": state["baselines"],
    }  # fmt: skip
    write_whole(config.folder / "result.json", json.dumps(result, indent=1).encode())
    (config.folder / ".lock").unlink(missing_ok=True)
    lock.close()
    return result


# ---- Sample ---------------------------------------------------------------------------------------------------------


def image_noise(shape: tuple[int, ...], first: int, count: int, device: torch.device, *key: object) -> Tensor:
    """Standard normal noise (count, *shape) for images number `first` and on: an image's is its own, whatever the batch."""
    block = 64  # images whose noise is drawn at once
    numbers = range(first // block, (first + count - 1) // block + 1)
    drawn = [torch.randn(block, *shape, generator=generator_for(device, *key, i), device=device) for i in numbers]
    return torch.cat(drawn)[first % block :][:count]


@torch.no_grad()
def sample(
    model: UViT,
    config: Config,
    count: int,
    label: int | None = None,
    batch_size: int = 256,
    vae: nn.Module | None = None,
) -> Tensor:
    """`count` images (count, c, h, w) uint8 by the config's sampler, steps, guidance and seed; classes in turn, or `label`.

    An image's noise is its own: neither `count` nor `batch_size` changes it. Latents are decoded by `vae`.
    Several processes share the images, and each gets all.
    """
    device, channels = model.positions.device, model.smooth.in_channels
    shape = (channels, *model.size)
    mine = probe.share(count)
    finished = []
    bar = tqdm(range(mine.start, mine.stop, batch_size), "sampling", unit=" batches", leave=False, disable=None)
    for first in bar:
        size = min(batch_size, mine.stop - first)
        labels = None
        if model.classes:
            turn = torch.arange(first, first + size, device=device) % model.classes
            labels = turn if label is None else torch.full_like(turn, label)
        noise = partial(image_noise, shape, first, size, device, config.seed, "sample")

        def predict(x: Tensor, t: Tensor) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16 and device.type == "cuda"):
                predicted = guided(model, x, t.float().to(device).expand(len(x)), labels, config.guidance).float()
            return clipped(x, predicted, t) if config.clip and vae is None else predicted

        if config.sampler == "sde":
            x = euler_maruyama(predict, noise("start"), config.sampler_steps, noise)
        else:
            solver = dpm_solver if config.sampler == "dpm-solver" else probability_flow
            x = solver(predict, noise("start"), config.sampler_steps)
        x = decode(vae, x) if vae else x
        finished.append(((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu())
    none = torch.empty(0, channels if vae is None else 3, *config.image_size, dtype=torch.uint8)
    return probe.gathered(torch.cat(finished) if finished else none, count)


def guided(model: UViT, x: Tensor, t: Tensor, labels: Tensor | None, guidance: float) -> Tensor:
    """Classifier-free guidance in U-ViT's convention, ε_c + guidance · (ε_c − ε_0), on all channels; 0: ε_c itself."""
    conditional = model(x, t, labels)
    if guidance == 0:
        return conditional
    return conditional + guidance * (conditional - model(x, t, torch.full_like(labels, model.classes)))


def clipped(x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """The noise that x_t holds if the x_0 that `noise` implies is cut off at −1 and 1.

    Near t = 1 an error of the network stands in x_0 a hundred times enlarged; an image can't be so large.
    """
    signal, deviation = (factor.item() for factor in signal_and_noise(t))
    x_0 = ((x - deviation * noise) / signal).clamp(-1, 1)
    return (x - signal * x_0) / deviation


def draw_samples(config: Config, images: Tensor, name: str = "samples.png") -> None:
    """A grid of images, about as many rows as columns, as PNG in the run folder."""
    from torchvision.transforms.functional import to_pil_image  # here, as they take a second
    from torchvision.utils import make_grid

    file = io.BytesIO()
    grid = make_grid(images, nrow=math.ceil(len(images) ** 0.5), padding=1, pad_value=128)
    grid = grid.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)  # small pictures, twice as large
    to_pil_image(grid).save(file, format="png")
    write_whole(config.folder / name, file.getbuffer())


# ---- Latents --------------------------------------------------------------------------------------------------------


def load_vae(name: str, device: torch.device) -> nn.Module:
    """diffusers' AutoencoderKL of that name or folder, from safetensors alone, in eval mode. Raises BadInput."""
    if Path(name).expanduser().is_dir():
        name = str(Path(name).expanduser())
    elif name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise BadInput(f"vae {name!r} is no folder, and no name of a VAE such as stabilityai/sd-vae-ft-ema")
    try:
        from diffusers import AutoencoderKL
    except ImportError as error:
        raise BadInput(f"vae {name} needs diffusers: pip install diffusers") from error
    try:
        logging.disable()  # what diffusers says before it raises is said below, in one line
        local = Path(name).is_dir()
        vae = AutoencoderKL.from_pretrained(name, use_safetensors=True, low_cpu_mem_usage=False, local_files_only=local)
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise BadInput(f"vae {name!r} can't be loaded as diffusers' AutoencoderKL ({reason})") from error
    finally:
        logging.disable(logging.NOTSET)
    return vae.to(device).eval().requires_grad_(False)


def encode(vae: nn.Module, images: Tensor) -> Tensor:
    """uint8 images (b, c, h, w), grey ones as RGB, to latents: the posterior's mean, scaled as the VAE's config says."""
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    posterior = vae.encode(scaled(images).expand(-1, 3, -1, -1)).latent_dist
    return (posterior.mode() - shift) * vae.config.scaling_factor


def decode(vae: nn.Module, latents: Tensor) -> Tensor:
    """Latents to images (b, 3, h, w) in −1 … 1."""
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    return torch.cat([vae.decode(part / vae.config.scaling_factor + shift).sample for part in latents.split(16)])


@torch.no_grad()
def encoded(vae: nn.Module, data: probe.Images, root: Path) -> probe.Images:
    """The data set in latents, float16: train (n, 2, c, h, w) straight and mirrored, test (n, c, h, w).

    Encoded once, into a cache under `root`, whose name is a hash of the images and of the VAE's weights.
    """
    device = next(vae.parameters()).device
    weights = hashlib.sha256(repr((vae.config.scaling_factor, getattr(vae.config, "shift_factor", None))).encode())
    for values in vae.state_dict().values():
        weights.update(values.cpu().contiguous().numpy().tobytes())
    latents = {}
    for split, images, views in (("train", data.train, 2), ("test", data.test, 1)):
        key = weights.copy()
        key.update(repr((tuple(images.shape), views)).encode())
        for part in images.split(1000):
            key.update(part.contiguous().numpy().tobytes())
        file = root / "cache" / f"latents-{key.hexdigest()[:20]}.npy"
        latents[split] = held_latents(file, len(images), views)
        if latents[split] is None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with probe.locked(file.with_suffix(".lock")):
                    if held_latents(file, len(images), views) is None:  # nobody else has made them meanwhile
                        encode_into(file, vae, images, views, device)
            except OSError as error:
                raise BadInput(f"can't write the cache of latents to {file.parent} ({error}): name a --root") from error
            latents[split] = held_latents(file, len(images), views)
    return dataclasses.replace(data, train=latents["train"], test=latents["test"][:, 0])


def held_latents(file: Path, count: int, views: int) -> Tensor | None:
    """The latents (count, views, c, h, w) float16 that a cache holds, memory-mapped; None if it is not there whole."""
    try:
        held = probe.mapped(file)
    except Exception:  # NumPy raises whatever it meets in a damaged file
        return None
    return held if held.dtype == torch.float16 and held.ndim == 5 and held.shape[:2] == (count, views) else None


def encode_into(file: Path, vae: nn.Module, images: Tensor, views: int, device: torch.device) -> None:
    """Write latents (n, views, c, h, w) of the images as they are, and mirrored as the second view, whole or not at all."""
    partial_file = file.with_suffix(".tmp")
    shape = encode(vae, images[:1].to(device)).shape[1:]
    try:
        held = probe.reserved(partial_file, np.float16, (len(images), views, *shape))
        bar = tqdm(range(0, len(images), 32), "encoding", unit=" batches", leave=False, disable=None)
        for first in bar:
            part = images[first : first + 32].to(device)
            for view, seen in enumerate((part, part.flip(3))[:views]):
                held[first : first + 32, view] = encode(vae, seen).half().cpu().numpy()
        held.flush()
        os.replace(partial_file, file)
    finally:
        partial_file.unlink(missing_ok=True)


# ---- Evaluate -------------------------------------------------------------------------------------------------------

SCORES = (
    "linear",
    "knn_weighted",
    "knn_majority",
    "effective_rank",
    "exp_effective_rank",
    "best_layer",
    "best_time",
    "per_layer",
)
QUALITY = ("fid", "kid", "precision", "recall", "fid_samples", "sampler", "sampler_steps", "guidance")


def evaluate(model: UViT, data: probe.Images, config: Config) -> dict:
    """SCORES of every block at every noise level (`per_layer`), and of the place that held-out accuracy chooses (Table 4).

    Features are the mean of a noisy image's patch tokens, the class not told. Accuracies in percent on test; effective
    rank (Eq. 6) of the test features, and exp of it; `norm` is their mean length.
    """
    device = model.positions.device
    chosen = probe.evenly(data.train_labels, config.probe_limit)
    places = []
    for t in config.probe_times:

        def layer_tokens(images: Tensor) -> Iterator[Tensor]:
            times = torch.full((len(images),), t, device=device)
            x = scaled(images)
            x = perturb(x, torch.randn(x.shape, generator=noise, device=device), times)
            labels = torch.full((len(x),), model.classes, device=device) if model.classes else None
            return (tokens[:, model.extras :] for tokens in model.tokens(x, times, labels))

        extract = partial(probe.features, model, layer_tokens, device=device, pools=["mean"])
        noise = generator_for(device, config.seed, "probe train", t)
        straight = data.train if data.train.ndim == 4 else data.train[:, 0]  # of latents, those not mirrored
        train = extract(straight, index=chosen)["mean"]  # (n, l, d)
        noise = generator_for(device, config.seed, "probe test", t)
        test = extract(data.test)["mean"]
        if not all(torch.isfinite(x).all() for x in (train, test)):
            raise FloatingPointError(f"the features are not finite: {DIVERGED}")
        layers = probe.evaluate_layers(train, data.train_labels[chosen], test, data.test_labels, config.seed)
        for i, layer in enumerate(layers):
            entropy = rank.effective_rank(test[:, i])
            layer |= {"layer": i + 1, "time": t, "effective_rank": entropy, "exp_effective_rank": math.exp(entropy)}
            layer["norm"] = test[:, i].norm(dim=1).mean().item()
        places += layers
    best = places[probe.best_layer(places) - 1]
    scores = {name: best[name] for name in SCORES if name in best}
    return scores | {"best_layer": best["layer"], "best_time": best["time"], "per_layer": places}


def evaluate_baselines(model: UViT, data: probe.Images, inputs: probe.Images, config: Config) -> dict:
    """What the trained features must beat, probed alike: raw pixels (of at most 32×32) and the untrained network."""
    size = tuple(min(side, 32) for side in config.image_size)

    def pixels(images: Tensor) -> Iterator[Tensor]:
        yield probe.fit(images, size).flatten(1)[:, None] / 255  # one token for the image

    chosen = probe.evenly(data.train_labels, config.probe_limit)
    extract = partial(probe.features, model, pixels, device=model.positions.device, pools=["mean"])
    train, test = extract(data.train, index=chosen)["mean"], extract(data.test)["mean"]
    (raw,) = probe.evaluate_layers(train, data.train_labels[chosen], test, data.test_labels, config.seed)
    both = {"pixels": raw, "untrained": evaluate(model, inputs, config)}
    return {name: {key: scores[key] for key in ("linear", "knn_weighted")} for name, scores in both.items()}


INCEPTION = "torch-fidelity's weights-inception-2015-12-05-6726825d.pth"


def check_inception(path: str) -> None:
    """Raises BadInput unless the file holds the weights of torch-fidelity's Inception, and no code to run.

    torch-fidelity itself would unpickle whatever the file holds.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old pickles
            weights = torch.load(path, map_location="cpu", weights_only=True)
        shapes = {name: tuple(weights[name].shape) for name in ("Conv2d_1a_3x3.conv.weight", "fc.weight")}
    except Exception as error:
        raise BadInput(f"fid_weights {path!r} can't be read as Inception's weights: use {INCEPTION}") from error
    if shapes != {"Conv2d_1a_3x3.conv.weight": (32, 3, 3, 3), "fc.weight": (1008, 2048)}:
        raise BadInput(f"fid_weights {path!r} does not hold Inception: use {INCEPTION}")
    with contextlib.suppress(ImportError):  # without torch-fidelity FID is left out, and says so
        from torch_fidelity.utils import create_feature_extractor

        try:
            create_feature_extractor(
                "inception-v3-compat", ["2048"], cuda=False, verbose=False, feature_extractor_weights_path=path
            )
        except Exception as error:
            raise BadInput(f"fid_weights {path!r} does not hold the whole of Inception: use {INCEPTION}") from error


def generation_quality(model: UViT, data: probe.Images, config: Config, vae: nn.Module | None = None) -> dict:
    """QUALITY of exactly `fid_samples` sampled images against train, by torch-fidelity; None where it was not asked for.

    Without Inception's weights a line says so and all is None.
    """
    how = {name: getattr(config, name) for name in ("fid_samples", "sampler", "sampler_steps", "guidance")}
    nothing = dict.fromkeys(QUALITY) | how
    try:
        from torch_fidelity.metric_fid import KEY_METRIC_FID, fid_features_to_statistics, fid_statistics_to_metric
        from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, kid_features_to_metric
        from torch_fidelity.metric_prc import calculate_precision_recall_part
        from torch_fidelity.utils import create_feature_extractor
    except ImportError:
        print("FID is left out: it needs torch-fidelity (pip install torch-fidelity)")
        return nothing
    try:
        extractor = create_feature_extractor(
            "inception-v3-compat", ["2048"], cuda=model.positions.is_cuda, verbose=False,
            feature_extractor_weights_path=config.fid_weights,
        )  # fmt: skip
    except Exception:
        if config.fid_weights:
            raise
        print(
            f"FID is left out: Inception's weights can't be downloaded; name their file with --fid-weights ({INCEPTION})"
        )
        return nothing
    with probe.first_process_first():
        real = reference_features(extractor, data.train, Path(config.root).expanduser() / "cache")
    fake = inception_features(extractor, sample(model, config, config.fid_samples, vae=vae))
    statistics = (fid_features_to_statistics(features.double()) for features in (fake, real))
    found = nothing | {"fid": fid_statistics_to_metric(*statistics, False)[KEY_METRIC_FID]}
    if config.kid:
        size = min(1000, len(fake), len(real))
        found["kid"] = kid_features_to_metric(fake, real, kid_subset_size=size, verbose=False)[KEY_METRIC_KID_MEAN]
    if config.precision_recall:
        found["precision"], found["recall"] = calculate_precision_recall_part(fake, real)
    return found


def lacks_quality(config: Config, result: dict) -> bool:
    """Whether a finished run's result does not hold what --fid-samples, --kid and --precision-recall ask for."""
    wanted = ["fid"] + ["kid"] * config.kid + ["precision"] * config.precision_recall
    held = result.get("fid_samples") == config.fid_samples and all(result.get(n) is not None for n in wanted)
    return config.fid_samples > 0 and not held


def add_quality(config: Config, result: dict) -> dict:
    """A finished run's result with the quality that is asked for now, of its averaged weights; it is not trained again."""
    asked = ("fid_samples", "fid_weights", "kid", "precision_recall", "root", "device")
    run, model = load_run(config.folder, {name: getattr(config, name) for name in asked})
    data = probe.load_images(
        config.data, Path(config.root).expanduser(), run.image_size, run.limit, run.skip_bad_images
    )
    found = generation_quality(model, data, run, load_vae(run.vae, model.positions.device) if run.vae else None)
    if found["fid"] is not None:
        result |= found
        write_whole(config.folder / "result.json", json.dumps(result, indent=1).encode())
    return result


def inception_features(extractor: nn.Module, images: Tensor) -> Tensor:
    """Inception's features (n, 2048) of uint8 images (n, c, h, w), grey ones as RGB, on the CPU."""
    device = next(iter(extractor.state_dict().values())).device
    features = []
    for part in tqdm(images.split(50), "Inception", unit=" batches", leave=False, disable=None):
        features += [found.cpu() for found in extractor(part.to(device).expand(-1, 3, -1, -1).contiguous())]
    return torch.cat(features)


def reference_features(extractor: nn.Module, images: Tensor, cache: Path) -> Tensor:
    """inception_features of the train images, from the cache: its key is their content and size and the extractor's weights."""
    key = hashlib.sha256(repr(tuple(images.shape)).encode())
    for part in (*images.split(1000), *extractor.state_dict().values()):
        key.update(part.cpu().contiguous().numpy().tobytes())
    file = cache / f"inception-{key.hexdigest()[:20]}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):
        return torch.from_numpy(np.load(file, allow_pickle=False))
    features = inception_features(extractor, images)
    content = io.BytesIO()
    np.save(content, features.numpy())
    cache.mkdir(parents=True, exist_ok=True)
    write_whole(file, content.getbuffer())
    return features


def draw_curves(config: Config, records: list[dict]) -> None:
    """curves.png: loss by epoch; probe.png: linear probe and effective rank of every block at every noise level."""
    from matplotlib.figure import Figure  # here, as it takes a second

    learned = [record for record in records if "alphas" in record]
    figure = Figure(figsize=(9 if learned else 5, 3.2), layout="constrained")
    axes = figure.subplots(1, 2 if learned else 1, squeeze=False)[0]
    axes[0].plot([r["epoch"] for r in records], [r["loss"] for r in records], marker=".")
    axes[0].set(title="loss", xlabel="epoch")
    if learned:
        draw_learned(axes[1], learned)
    for axis in axes:
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    save_figure(config.folder / "curves.png", figure)

    probed = [record for record in records if "per_layer" in record][-1]
    places, best = probed["per_layer"], (probed["best_layer"], probed["best_time"])
    blocks, times = config.depth + 1, config.probe_times
    figure = Figure(figsize=(2.5 + 0.6 * blocks, 1.5 + 0.8 * len(times)), layout="constrained")
    for axis, (name, title) in zip(
        figure.subplots(2, 1),
        {
            "linear": "linear probe, test accuracy (%), * chosen on held-out",
            "effective_rank": "effective rank (Eq. 6)",
        }.items(),
    ):
        values = [[place[name] for place in places if place["time"] == t] for t in times]
        heat = axis.imshow(values, aspect="auto")
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                color = "black" if heat.norm(value) > 0.6 else "white"  # on yellow, on blue
                star = "*" if (j + 1, times[i]) == best else ""
                axis.text(j, i, f"{value:.3g}{star}", ha="center", va="center", color=color, fontsize=7)
        axis.set(title=title, xlabel="block", ylabel="t")
        axis.set_xticks(range(blocks), range(1, blocks + 1))
        axis.set_yticks(range(len(times)), times)
    save_figure(config.folder / "probe.png", figure)


def draw_learned(axis: object, records: list[dict]) -> None:
    """Learned shortcut weights by shortcut, at a few epochs, the first light and the last dark."""
    shown = records[:: -max(1, math.ceil(len(records) / 5))][::-1]
    for i, record in enumerate(shown):
        numbers = range(1, len(record["alphas"]) + 1)
        shade = str(0.8 * (1 - (i + 1) / len(shown)))
        axis.plot(numbers, record["alphas"], marker=".", color=shade, label=f"epoch {record['epoch']}")
    axis.set(title="learned α", xlabel="shortcut")
    axis.legend(fontsize=7)


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
    """Print a row a place, the best by held-out accuracy marked, one greppable line, and what it all amounts to."""
    names = ("linear", "held_out", "knn_weighted", "knn_majority", "effective_rank", "exp_effective_rank", "norm")
    print("block    t " + "".join(f"{name:>20}" for name in names))
    for place in result["per_layer"]:
        best = (place["layer"], place["time"]) == (result["best_layer"], result["best_time"])
        numbers = "".join(f"{place[name]:>20.4g}" for name in names)
        print(f"{place['layer']:>4}{'*' if best else ' '}{place['time']:>5g} {numbers}")
    print("* best place, chosen by held_out: a tenth of train that its probe did not see")
    print(as_line("result", {k: v for k, v in result.items() if isinstance(v, (int, float))}))
    scores = {**result["baselines"], f"trained, block {result['best_layer']}, t {result['best_time']:g}": result}
    for name, score in scores.items():
        print(f"{name:>24}: linear {score['linear']:.1f} %, k-NN {score['knn_weighted']:.1f} %")
    if result["fid"] is not None:
        print(f"FID {result['fid']:.2f} ({as_line('', {k: v for k, v in result.items() if k in QUALITY[1:]}).strip()})")
    print(f"pictures, metrics.jsonl, checkpoint.pt and result.json are in {config.folder}", flush=True)


def draw_from(config: Config) -> None:
    """`--sample RUN`: n images from a run's averaged weights, as RUN/samples-<how>.png.

    Raises BadInput where the folder is not a uvit.py run with a checkpoint, or its network does not know classes.
    """
    folder = Path(config.sample).expanduser()
    held = read_json(folder / "config.json")
    if not isinstance(held, dict) or held.get("script") != SCRIPT:
        raise BadInput(f"sample {config.sample!r} is not the folder of a {SCRIPT}.py run")
    if not held.get("conditional") and (config.guidance or config.label is not None):
        what = f"guidance {config.guidance}" if config.guidance else f"label {config.label}"
        raise BadInput(f"{what} needs a network that knows classes, and {folder} was trained without --conditional")
    asked = {name: getattr(config, name) for name in OF_SAMPLING if getattr(config, name) is not None}
    run, model = load_run(folder, asked)
    if config.label is not None and config.label >= model.classes:
        raise BadInput(f"label {config.label} is not a class of {folder}, which knows 0 to {model.classes - 1}")
    vae = load_vae(run.vae, model.positions.device) if run.vae else None
    n = config.n or 64
    images = sample(model, run, n, config.label, vae=vae)
    name = f"samples-{run.sampler}-{run.sampler_steps}-g{run.guidance:g}-s{run.seed}-n{n}"
    name += ("" if config.label is None else f"-class{config.label}") + ("" if run.clip else "-noclip")
    draw_samples(run, images, f"{name}.png")
    print(f"{n} images by {run.sampler} in {run.sampler_steps} steps: {folder / name}.png")


def load_run(folder: Path, asked: dict) -> tuple[Config, UViT]:
    """A run's config as its checkpoint holds it, changed by the fields `asked`, and its averaged weights. Raises BadInput."""
    try:
        saved = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        held, weights, shape = saved["config"], saved["model"], saved["state"]["shape"]
        if asked.get("sampler", held["sampler"]) != held["sampler"]:  # another sampler takes its own number of steps
            asked = {"sampler_steps": None} | asked
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in held.items()}
        del fields["script"]
        run = Config(**fields | asked | {"out": str(folder)})
    except Exception as error:  # a damaged or foreign file makes torch.load raise whatever it meets
        raise BadInput(f"{folder}/checkpoint.pt is missing, damaged or not of {SCRIPT}.py: name a whole run") from error
    device = choose_device(run.device)
    try:
        models = build(run, shape, len(weights["ema.label_embed.weight"]) - 1 if run.conditional else 0, device)
        models.load_state_dict(weights)
    except Exception as error:
        raise BadInput(f"{folder}/checkpoint.pt does not fit its own config: it is damaged") from error
    return run, models["ema"]


# ---- Plumbing -------------------------------------------------------------------------------------------------------


SCRIPT = "uvit"
ELSEWHERE = (
    "root",
    "device",
    "out",
    "overwrite",
    "compile",
    "log",
    "recipe",
    "model",
    "sample",
    "n",
    "label",
    "fid_samples",
    "fid_weights",
    "kid",
    "precision_recall",
)  # not in config.json
DONE = "per_layer"  # what a finished result.json has
SMALLER = "try a smaller --batch-size, a higher --accumulate or a smaller --model"
FILES = ("result.json", "checkpoint.pt", "metrics.jsonl", "curves.png", "probe.png", "samples.png")  # and config.json
GROUPS = {
    "--data": "data", "--alpha-min": "shortcuts", "--conditional": "network", "--epochs": "training",
    "--sampler": "sampling and its quality", "--probe-times": "probing", "--seed": "run", "--sample": "a finished run",
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
        if study.sample and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise BadInput("--sample runs in one process: start it without torchrun")
        if study.sample:
            with stop:
                draw_from(study.runs[0])
            return 0
        with stop, probe.processes_joined(choose_device(study.device).type == "cuda"):
            _, diverged = train_all(study)
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
        begun = study and not study.sample and any((run.folder / "checkpoint.pt").exists() for run in study.runs)
        place = f"step {step[0]}, which is saved" if step else "the last checkpoint"
        end = f"goes on from {place}" if step or begun else "starts anew: nothing was saved yet"
        print(f"{SCRIPT}.py: stopped; the same command{without} {end}", file=sys.stderr)
        return 128 + number


if __name__ == "__main__":
    sys.exit(main())
