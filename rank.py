"""The theory's numbers: effective rank, cumulative decay, correlation.

Residual shortcuts push a network towards features of high rank; decaying them (x_{l+1} = α_l·x_l + f_l(x_l), Eq. 3)
lowers it. This file measures both sides of that claim, in float64:

    ρ(A)  = −Σ_i σ̄_i log σ̄_i,   σ̄_i = σ_i / Σ_j σ_j          (Eq. 6)    effective_rank(features)
    α_eff = Π_l α_l                                             (Eq. 4)    alpha_eff(alphas)

    >>> import torch, rank
    >>> rank.effective_rank(torch.randn(10_000, 768))           # entropy of the spectrum, at most log 768 = 6.64
    >>> rank.alpha_min_for(depth=12)                            # 0.600…: the α_min whose α_eff is the best ViT-B's

and compares finished runs of all three scripts, rank and accuracy against epoch and each other (the paper's Figure 6):

    python rank.py runs/mae-*                                   # a table, runs/comparison.png and .json
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor

BEST_ALPHA_EFF = 3.6e-3  # ViT-B's best, α_min = 0.6 over its 24 shortcuts (paper Table 1, counted per shortcut)


# ---- Effective rank -------------------------------------------------------------------------------------------------


def spectral_entropy(singular_values: Tensor | Sequence[float]) -> float:
    """Eq. 6: ρ = −Σ_i σ̄_i log σ̄_i with σ̄_i = σ_i / Σ_j σ_j, in nats; exp(ρ) is Roy & Vetterli's effective rank.

    `singular_values` has any shape and order. Zeros contribute 0; a spectrum of zeros has entropy 0.
    Raises ValueError where a value is negative, infinite or NaN.
    """
    sigma = torch.as_tensor(singular_values, dtype=torch.float64).flatten()
    if not (torch.isfinite(sigma).all() and (sigma >= 0).all()):
        raise ValueError("singular values must be finite and not negative")
    largest = sigma.max().item() if len(sigma) else 0.0
    if largest == 0:
        return 0.0
    sigma = sigma / largest  # so that neither huge nor tiny values overflow in the sum
    return torch.special.entr(sigma / sigma.sum()).sum().item()


def effective_rank(features: Tensor) -> float:
    """Eq. 6 of the covariance between samples, A(i, j) = ⟨z_i − z̄_i, z_j − z̄_j⟩; features (n, d), one row a sample.

    As in the authors' code, every sample is centred across its own d channels. A is n×n and is never built: with Z the
    centred features, A = Z Zᵀ has the same nonzero singular values as the d×d product Zᵀ Z.
    A zero matrix, and one whose rows are each constant, has rank 0. Raises ValueError where a feature is not finite.
    """
    if features.ndim != 2 or 0 in features.shape:
        raise ValueError(f"features must be (samples, channels), not {tuple(features.shape)}")
    z = features.detach().cpu().double()
    largest = z.abs().max().item()
    if not math.isfinite(largest):
        raise ValueError("features must be finite")
    if largest == 0:
        return 0.0
    z = z / largest
    z = z - z.mean(dim=1, keepdim=True)
    rounding = 4 * torch.finfo(torch.float64).eps
    z = torch.where(z.abs().amax(dim=1, keepdim=True) > rounding, z, 0.0)  # a constant row is zero, not its rounding
    return spectral_entropy(torch.linalg.eigvalsh(z.T @ z).clamp(min=0))


# ---- Cumulative decay -----------------------------------------------------------------------------------------------


def alpha_eff(alphas: Sequence[float]) -> float:
    """Cumulative decay Π_l α_l over all shortcuts: the weight of the network's input in its output (Eq. 4)."""
    return math.prod(float(alpha) for alpha in alphas)


def alpha_min_for(
    depth: int,
    target: float = BEST_ALPHA_EFF,
    shortcuts_per_block: int = 2,
    weights: Callable[[float], Sequence[float]] | None = None,
) -> float:
    """The α_min whose schedule over `depth` blocks has alpha_eff = `target`, by bisection.

    The schedule is Eq. 5 as the authors' code has it: every shortcut its own α, equal steps from 1 to α_min, both ends
    included; or `weights`, any other from α_min to the α of every shortcut. The product grows with α_min, to 1.
    Raises ValueError for a target outside (0, 1] or below what α_min = 0 gives: fewer than two shortcuts, if Eq. 5's.
    """
    if not 0 < target <= 1:
        raise ValueError(f"the cumulative decay must lie in (0, 1], not {target}")
    count = depth * shortcuts_per_block
    weights = weights or (lambda alpha_min: [1 - (1 - alpha_min) * i / (count - 1 or 1) for i in range(count)])
    low, high = 0.0, 1.0
    if alpha_eff(weights(low)) > target:
        raise ValueError(
            f"no α_min gives {len(weights(low))} shortcuts a cumulative decay of {target:g}: it needs two shortcuts or more"
        )
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if alpha_eff(weights(middle)) < target else (low, middle)
    return high


# ---- Correlation ----------------------------------------------------------------------------------------------------


def pearson(x: Tensor | Sequence[float], y: Tensor | Sequence[float]) -> float:
    """Pearson's correlation of two equally long series, in [−1, 1] (the paper's Figure 6: rank against accuracy).

    Raises ValueError where it is not defined: lengths that differ, fewer than two values, a value that is not finite,
    or a constant series.
    """
    x, y = (torch.as_tensor(series, dtype=torch.float64).flatten() for series in (x, y))
    if len(x) != len(y) or len(x) < 2:
        raise ValueError(f"Pearson's r is not defined for series of {len(x)} and {len(y)} values")
    if not (torch.isfinite(x).all() and torch.isfinite(y).all()):
        raise ValueError("Pearson's r is not defined for values that are not finite")
    if x.min() == x.max() or y.min() == y.max():
        raise ValueError("Pearson's r is not defined for a constant series")
    x, y = (series / series.abs().max() for series in (x, y))  # no overflow, no underflow in the squares
    x, y = (series - series.mean() for series in (x, y))
    return (x @ y / (x.norm() * y.norm())).clamp(-1, 1).item()


# ---- Runs compared --------------------------------------------------------------------------------------------------

SCRIPTS = {"mae": "linear", "uvit": "linear", "resnet_decay": "accuracy"}  # what each calls its test accuracy
APART = ("script", "data", "alpha_min", "seed")  # settings that every table shows, or that seeds are averaged over


@dataclass(frozen=True)
class Config:
    """Compare finished runs: effective rank and accuracy by epoch, and how the two correlate (the paper's Figure 6)."""

    runs: tyro.conf.Positional[tuple[str, ...]]  # run folders of mae.py, uvit.py and resnet_decay.py
    out: str = "runs/comparison"  # the figure is <out>.png, its numbers <out>.json


def read_run(folder: Path) -> dict:
    """A finished run: its `config`, its `result`, and its `curve` {epoch: (effective rank, accuracy)}.

    Raises ValueError, with what is wrong, where the folder holds no whole run.
    """
    if not (folder / "config.json").is_file():
        raise ValueError("no run folder: it has no config.json")
    if not (folder / "result.json").is_file():
        raise ValueError("not finished: it has no result.json")
    try:
        config, result = (json.loads((folder / name).read_text()) for name in ("config.json", "result.json"))
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        if config["script"] not in SCRIPTS:
            raise ValueError(f"of an unknown script, {config['script']!r}")
        accuracy = SCRIPTS[config["script"]]
        curve = {r["epoch"]: (r["effective_rank"], r[accuracy]) for r in records if "effective_rank" in r}
        numbers = [x for point in curve.values() for x in point]
        numbers += [result[name] for name in ("alpha_min", "alpha_eff", "loss", "effective_rank", accuracy)]
        if not curve or not all(math.isfinite(x) for x in (*numbers, *curve, config["seed"])):
            raise ValueError("its numbers are not all there")
    except (OSError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"broken: {type(error).__name__} ({error})") from error
    return {"folder": str(folder), "config": config, "result": result, "curve": curve}


def compare(runs: Sequence[dict]) -> dict:
    """Runs of one script and data set (read_run): what Figure 6 draws.

    `settings`: names of the other settings that differ. `rows`: the last values of every run. `lines`: for every α_min
    (and every choice of those settings) the epochs that its seeds share, and [mean, least, largest] over them of rank
    and accuracy. `pearson`: r of rank and accuracy over all runs, and their number n, at every epoch that all share;
    r is None where it is not defined.
    """
    accuracy = SCRIPTS[runs[0]["config"]["script"]]
    names = {name for run in runs for name in run["config"]} - {*APART}
    settings = sorted(n for n in names if len({json.dumps(run["config"].get(n)) for run in runs}) > 1)
    number = lambda value: value if isinstance(value, int | float) else math.inf
    key = lambda run: (-run["result"]["alpha_min"], *((number(v), str(v)) for v in map(run["config"].get, settings)))
    runs = sorted(runs, key=lambda run: (key(run), run["config"]["seed"]))
    shown = ("alpha_eff", "loss", accuracy, "knn_weighted", "effective_rank", "exp_effective_rank", "best_layer")
    rows, lines, correlations = [], [], []
    for run in runs:
        row = {"alpha_min": run["result"]["alpha_min"]} | {name: run["config"].get(name) for name in settings}
        row |= {"seed": run["config"]["seed"]} | {n: run["result"][n] for n in shown if n in run["result"]}
        rows.append(row | {"epoch": max(run["curve"]), "folder": run["folder"]})
    for alike in (list(group) for _, group in itertools.groupby(runs, key)):
        line = {"alpha_min": alike[0]["result"]["alpha_min"]}
        line |= {name: alike[0]["config"].get(name) for name in settings}
        line |= {"seeds": len(alike), "epochs": shared_epochs(alike)}
        for i, name in enumerate(("effective_rank", "accuracy")):
            values = [[run["curve"][epoch][i] for run in alike] for epoch in line["epochs"]]
            line[name] = [[sum(v) / len(v), min(v), max(v)] for v in values]
        lines.append(line)
    for epoch in shared_epochs(runs):
        try:
            r = pearson(*zip(*(run["curve"][epoch] for run in runs)))
        except ValueError:
            r = None
        correlations.append({"epoch": epoch, "r": r, "n": len(runs)})
    return {"settings": settings, "rows": rows, "lines": lines, "pearson": correlations}


def shared_epochs(runs: Sequence[dict]) -> list[int]:
    """Epochs at which every run was probed."""
    return sorted(set.intersection(*({*run["curve"]} for run in runs)))


def draw(groups: dict[str, dict]) -> bytes:
    """Figure 6 as PNG: a row of panels a group; rank and accuracy by epoch, bands over seeds, and Pearson's r."""
    from matplotlib.figure import Figure  # here, as it takes a second

    figure = Figure(figsize=(11, 3.2 * len(groups)), layout="constrained")
    for axes, (title, group) in zip(figure.subplots(len(groups), 3, squeeze=False), groups.items()):
        for line in group["lines"]:
            label = ", ".join(f"{name} {line[name]}" for name in ("alpha_min", *group["settings"]))
            for axis, name in zip(axes, ("effective_rank", "accuracy")):
                if line["epochs"]:
                    mean, least, largest = zip(*line[name])
                    axis.plot(line["epochs"], mean, marker=".", label=f"{label} (n = {line['seeds']})")
                    axis.fill_between(line["epochs"], least, largest, alpha=0.2)
        defined = [point for point in group["pearson"] if point["r"] is not None]
        axes[2].plot([p["epoch"] for p in defined], [p["r"] for p in defined], marker=".", color="black")
        axes[2].axhline(0, color="grey", linewidth=0.5)
        axes[2].set(ylim=(-1.05, 1.05))
        for axis, text in zip(
            axes, ("effective rank (Eq. 6)", "test accuracy (%)", "Pearson's r of the two, over runs")
        ):
            axis.set(title=text, xlabel="epoch")
        axes[0].set_ylabel(title[-40:])
        if axes[0].lines:
            axes[0].legend(fontsize=7)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def save(path: Path, content: bytes) -> None:
    """The file is written whole or not at all."""
    partial = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        why = "not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise ValueError(f"can't write {path} ({why}): name another --out") from error


def report(title: str, group: dict) -> None:
    """The table of last values, and r by epoch."""
    text = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)
    table = [list(group["rows"][0]), *([text(value) for value in row.values()] for row in group["rows"])]
    widths = [max(map(len, column)) for column in zip(*table)]
    print(title, *("  ".join(cell.rjust(w) for cell, w in zip(row, widths)) for row in table), sep="\n")
    for point in group["pearson"]:
        r = "not defined" if point["r"] is None else f"{point['r']:.3f}"
        line = " (two runs always lie on a line)" if point["n"] == 2 and point["r"] is not None else ""
        print(f"pearson {title} epoch={point['epoch']} r={r} n={point['n']}{line}")
    if group["settings"]:
        print(f"note: these runs differ also in {', '.join(group['settings'])}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 where no finished run was named or nothing can be written."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # tyro's boxed complaint
            config = tyro.cli(Config, args=arguments)
    except SystemExit as stop:
        if not stop.code:
            raise
        given = " ".join(sys.argv[1:] if arguments is None else arguments)
        print(f"rank.py: can't read {given!r}: give run folders, and no flag but --out NAME", file=sys.stderr)
        return 2
    groups = {}
    for name in {Path(name).expanduser().resolve(): name for name in config.runs}.values():  # each folder once
        try:
            run = read_run(Path(name).expanduser())
        except ValueError as error:
            print(f"left out: {name}: {error}".replace("\n", " "), file=sys.stderr)
            continue
        groups.setdefault((run["config"]["script"], run["config"]["data"]), []).append(run)
    try:
        if not groups:
            raise ValueError(f"no finished run among the {len(config.runs)} named: name folders such as runs/*")
        short = [f"{script} {Path(data).name}" for script, data in groups]  # of a folder, its name
        titles = [name if short.count(name) == 1 else " ".join(key) for name, key in zip(short, groups)]
        compared = {title: compare(runs) for title, runs in sorted(zip(titles, groups.values()))}
        for title, group in compared.items():
            report(title, group)
        out = Path(config.out).expanduser()
        save(out.with_name(out.name + ".json"), json.dumps(compared, indent=1).encode())
        save(out.with_name(out.name + ".png"), draw(compared))
        print(f"figure and numbers: {out}.png and {out}.json")
        return 0
    except ValueError as error:
        print(f"rank.py: {error}".replace("\n", " "), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
