"""rank.py: every number against an independent computation, and the invariances that its equations promise."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rank

seeds = st.integers(0, 2**31 - 1)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- Spectral entropy -----------------------------------------------------------------------------------------------

spectra = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30)


def close(a: float, b: float, tolerance: float = 1e-12) -> bool:
    return abs(a - b) <= tolerance


@given(spectra)
def test_entropy_is_equation_6(values):
    p = np.array(values) / np.sum(values)
    assert close(rank.spectral_entropy(values), -(p * np.log(p)).sum())


@given(spectra, st.integers(1, 10))
def test_zeros_contribute_nothing_to_the_entropy(values, zeros):
    assert close(rank.spectral_entropy(values + [0.0] * zeros), rank.spectral_entropy(values))


@given(spectra, st.sampled_from([1e-200, 1e-3, 7.0, 1e200]))
def test_entropy_does_not_change_with_the_scale(values, scale):
    assert close(rank.spectral_entropy([scale * value for value in values]), rank.spectral_entropy(values))


def test_entropy_of_values_whose_sum_overflows():
    assert close(rank.spectral_entropy([1.7e308] * 8), math.log(8))


@given(spectra, st.randoms(use_true_random=False))
def test_entropy_does_not_depend_on_the_order_or_the_shape(values, random):
    shuffled = values.copy()
    random.shuffle(shuffled)
    assert close(rank.spectral_entropy(shuffled), rank.spectral_entropy(values))
    assert close(rank.spectral_entropy(torch.tensor([shuffled], dtype=torch.float64)), rank.spectral_entropy(values))
    assert rank.spectral_entropy(torch.tensor(values[0])) == rank.spectral_entropy(torch.zeros(2, 0)) == 0


@pytest.mark.parametrize("m", [1, 2, 7, 768])
def test_entropy_of_m_equal_values_is_log_m(m):
    assert close(rank.spectral_entropy([0.3] * m), math.log(m))


@given(spectra)
def test_entropy_of_m_values_lies_between_0_and_log_m(values):
    assert -1e-12 <= rank.spectral_entropy(values) <= math.log(len(values)) + 1e-12


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0, 0.0]])
def test_entropy_of_nothing_is_0(values):
    assert rank.spectral_entropy(values) == 0


@pytest.mark.parametrize("bad", [-1e-9, math.inf, -math.inf, math.nan])
def test_entropy_of_a_bad_value_is_an_error(bad):
    with pytest.raises(ValueError, match="finite and not negative"):
        rank.spectral_entropy([1.0, bad, 2.0])


# ---- Effective rank -------------------------------------------------------------------------------------------------


def effective_rank_of_samples_by_samples(features: np.ndarray) -> float:
    """The definition to the letter: the n×n matrix, its SVD, the entropy."""
    z = features - features.mean(axis=1, keepdims=True)
    sigma = np.linalg.svd(z @ z.T, compute_uv=False)
    if sigma.sum() == 0:
        return 0.0
    p = sigma[sigma > 0] / sigma.sum()
    return float(-(p * np.log(p)).sum())


@given(st.integers(1, 30), st.integers(2, 30), seeds)
def test_effective_rank_is_that_of_the_matrix_between_samples(n, d, seed):
    features = normal(n, d, seed=seed) * normal(d, seed=seed + 1).exp() + normal(n, 1, seed=seed + 2)
    expected = effective_rank_of_samples_by_samples(features.numpy())
    assert close(rank.effective_rank(features), expected, 1e-10)


@pytest.mark.parametrize("lengths", [[1.0, 1.0], [3.0, 1.0], [1.0, 2.0, 3.0]])
def test_effective_rank_of_orthogonal_samples_is_the_entropy_of_their_squared_lengths(lengths):
    directions = np.array([[1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])[: len(lengths)]  # each sums to 0
    p = np.square(lengths) / np.square(lengths).sum()
    features = torch.tensor(directions * np.array(lengths)[:, None])
    assert close(rank.effective_rank(features), -(p * np.log(p)).sum(), 1e-12)


@given(st.integers(2, 20), st.integers(2, 20), seeds)
def test_effective_rank_does_not_depend_on_the_order_of_samples(n, d, seed):
    features = normal(n, d, seed=seed)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    assert close(rank.effective_rank(features[order]), rank.effective_rank(features), 1e-10)


@pytest.mark.parametrize("scale", [1e-200, 1e-5, -3.0, 1e200])
def test_effective_rank_does_not_change_with_one_common_scale(scale):
    features = normal(20, 8)
    assert close(rank.effective_rank(scale * features), rank.effective_rank(features), 1e-10)


@given(st.integers(2, 20), st.integers(2, 20), seeds)
def test_effective_rank_does_not_change_when_a_row_is_shifted(n, d, seed):
    features = normal(n, d, seed=seed)
    shifted = features + 10 * normal(n, 1, seed=seed + 1)
    assert close(rank.effective_rank(shifted), rank.effective_rank(features), 1e-10)


@given(st.integers(2, 20), st.integers(2, 12), seeds)
def test_effective_rank_does_not_change_with_a_rotation_that_fixes_the_mean(n, d, seed):
    features = normal(n, d, seed=seed)
    basis, _ = torch.linalg.qr(torch.cat([torch.ones(d, 1).double(), normal(d, d - 1, seed=seed + 1)], dim=1))
    turn = torch.eye(d, dtype=torch.float64)
    turn[1:, 1:] = torch.linalg.qr(normal(d - 1, d - 1, seed=seed + 2))[0]
    rotation = basis @ turn @ basis.T
    assert torch.allclose(rotation.sum(dim=1), torch.ones(d).double(), atol=1e-10)  # the all-ones vector stays
    assert close(rank.effective_rank(features @ rotation), rank.effective_rank(features), 1e-10)


def test_effective_rank_centres_samples_and_not_channels():
    features = normal(12, 6)
    across_channels = effective_rank_of_samples_by_samples(features.numpy())
    columns_centred = features - features.mean(dim=0)
    sigma = torch.linalg.svdvals(columns_centred @ columns_centred.T)
    assert close(rank.effective_rank(features), across_channels, 1e-10)
    assert abs(rank.effective_rank(features) - rank.spectral_entropy(sigma)) > 0.05
    assert abs(rank.effective_rank(features) - effective_rank_of_samples_by_samples(columns_centred.numpy())) > 0.01


@given(st.integers(1, 20), st.integers(1, 800), seeds)
def test_effective_rank_of_constant_rows_is_exactly_0(n, d, seed):
    rows = normal(n, 1, seed=seed).expand(n, d)
    assert rank.effective_rank(rows) == 0
    assert rank.effective_rank(torch.zeros(n, d)) == 0


def test_constant_rows_among_others_change_nothing():
    features = normal(10, 7)
    constant = torch.full((5, 7), 0.1, dtype=torch.float64)
    assert close(rank.effective_rank(torch.cat([features, constant])), rank.effective_rank(features), 1e-12)


def test_a_row_that_varies_little_still_counts():
    """Two orthogonal rows, one of length ε: the entropy of 1 and ε², far above the rounding that is set to zero."""
    epsilon = 1e-7
    features = torch.tensor([[1.0, -1.0, 0.0, 0.0], [0.0, 0.0, epsilon, -epsilon]], dtype=torch.float64)
    expected = epsilon**2 * (1 - math.log(epsilon**2))
    assert rank.effective_rank(features) == pytest.approx(expected, rel=1e-3)


def test_effective_rank_of_one_sample_repeated_is_0():
    assert close(rank.effective_rank(normal(1, 16).expand(40, 16)), 0, 1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_feature_that_is_not_finite_is_an_error(bad):
    features = normal(6, 4)
    features[3, 2] = bad
    with pytest.raises(ValueError, match="finite"):
        rank.effective_rank(features)


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), (0, 4), (4, 0)])
def test_features_that_are_no_matrix_are_an_error(shape):
    with pytest.raises(ValueError, match="samples, channels"):
        rank.effective_rank(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_effective_rank_computes_in_float64_whatever_comes_in(dtype):
    features = normal(50, 20).to(dtype)
    exact = effective_rank_of_samples_by_samples(features.double().numpy())
    assert close(rank.effective_rank(features.requires_grad_()), exact, 1e-10)


LARGE = """
import resource, sys, time
import torch, rank
features = torch.randn(10_000, 768, generator=torch.Generator().manual_seed(0))
rank.effective_rank(features[:1000])
unit = 1 if sys.platform == "darwin" else 1024
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
seconds = []
for _ in range(3):
    start = time.perf_counter()
    value = rank.effective_rank(features)
    seconds.append(time.perf_counter() - start)
print(value, min(seconds), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before)
"""


def test_ten_thousand_samples_take_a_second_and_no_matrix_between_them():
    """10,000 × 10,000 numbers of float64 are 800 MB, and their SVD takes minutes."""
    pytest.importorskip("resource")
    root = Path(rank.__file__).parent
    done = subprocess.run([sys.executable, "-c", LARGE], cwd=root, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    value, seconds, more_bytes = map(float, done.stdout.split())
    assert math.log(768) - 0.1 < value < math.log(768)
    assert seconds < 4  # 0.5 s on one core that nothing else uses
    assert more_bytes < 500e6


# ---- Cumulative decay -----------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 2), max_size=40))
def test_alpha_eff_is_the_product(alphas):
    assert rank.alpha_eff(alphas) == pytest.approx(np.prod(alphas), rel=1e-12, abs=1e-300)


def test_alpha_eff_of_the_papers_best_model():
    """ViT-B, α_min = 0.6: 24 shortcuts, or 12 where a block counts once."""
    assert f"{rank.alpha_eff(np.linspace(1, 0.6, 24)):.3e}" == "3.578e-03"
    assert f"{rank.alpha_eff(torch.linspace(1, 0.6, 12).double()):.3e}" == "5.908e-02"


@given(st.integers(1, 60), st.floats(1e-6, 1, exclude_min=True), st.sampled_from([1, 2, 3]))
def test_alpha_min_for_is_the_inverse_of_alpha_eff(depth, target, shortcuts_per_block):
    if depth * shortcuts_per_block < 2:
        return
    alpha_min = rank.alpha_min_for(depth, target, shortcuts_per_block)
    assert 0 < alpha_min <= 1
    assert np.prod(np.linspace(1, alpha_min, depth * shortcuts_per_block)) == pytest.approx(target, rel=1e-9)


def test_alpha_min_for_goes_by_two_shortcuts_a_block_and_the_best_model():
    assert rank.alpha_min_for(depth=12) == pytest.approx(0.6, abs=0.005)
    assert np.prod(np.linspace(1, rank.alpha_min_for(depth=12), 24)) == pytest.approx(3.6e-3, rel=1e-9)
    assert rank.alpha_min_for(depth=12, target=5.908e-2, shortcuts_per_block=1) == pytest.approx(0.6, abs=1e-4)


def test_two_shortcuts_are_1_and_alpha_min():
    for target in (0.25, 1e-6, 1e-9):
        assert rank.alpha_min_for(depth=1, target=target) == pytest.approx(target, rel=1e-6)


def test_no_decay_is_alpha_min_1():
    assert rank.alpha_min_for(depth=12, target=1) == 1


def test_alpha_min_rises_with_the_depth():
    alpha_mins = [rank.alpha_min_for(depth) for depth in range(1, 61)]
    assert all(shallow < deep for shallow, deep in zip(alpha_mins, alpha_mins[1:]))


@pytest.mark.parametrize("target", [0, -0.1, 1.0001, math.nan, math.inf])
def test_a_target_outside_0_to_1_is_an_error(target):
    with pytest.raises(ValueError, match="cumulative decay"):
        rank.alpha_min_for(12, target)


@pytest.mark.parametrize("depth, shortcuts_per_block", [(0, 2), (1, 1), (12, 0), (-1, 2)])
def test_fewer_than_two_shortcuts_are_an_error(depth, shortcuts_per_block):
    with pytest.raises(ValueError, match="two shortcuts"):
        rank.alpha_min_for(depth, 0.5, shortcuts_per_block)


# ---- Correlation ----------------------------------------------------------------------------------------------------

lengths = st.integers(3, 40)
shares = st.floats(-2, 2)


def related(n: int, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = normal(n, seed=seed)
    return x, share * x + normal(n, seed=seed + 1)


@given(lengths, shares, seeds)
def test_pearson_is_numpys(n, share, seed):
    x, y = related(n, share, seed)
    assert close(rank.pearson(x, y), np.corrcoef(x, y)[0, 1])
    assert close(rank.pearson(x.tolist(), y[:, None]), np.corrcoef(x, y)[0, 1])  # a list, a column
    assert close(rank.pearson(x.view(1, -1), y.view(1, -1)), np.corrcoef(x, y)[0, 1])


def test_pearson_of_a_series_with_zeros():
    x, y = [0.0, 1.0, 0.0, 3.0], [2.0, 0.0, 1.0, 0.0]
    assert close(rank.pearson(x, y), np.corrcoef(x, y)[0, 1])


@given(lengths, shares, seeds)
def test_pearson_is_symmetric(n, share, seed):
    x, y = related(n, share, seed)
    assert close(rank.pearson(x, y), rank.pearson(y, x), 1e-15)


@given(lengths, shares, seeds, st.floats(0.01, 100), st.floats(-10, 10))
def test_pearson_does_not_change_with_scale_and_shift(n, share, seed, scale, shift):
    x, y = related(n, share, seed)
    r = rank.pearson(x, y)
    assert close(rank.pearson(scale * x + shift, y), r, 1e-10)
    assert close(rank.pearson(x, scale * y + shift), r, 1e-10)
    assert close(rank.pearson(-scale * x + shift, y), -r, 1e-10)


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_pearson_of_huge_and_tiny_values(scale):
    x, y = related(10, 0.5, 0)
    assert close(rank.pearson(scale * x, y), rank.pearson(x, y))
    assert close(rank.pearson(y, scale * x), rank.pearson(x, y))


@given(st.integers(2, 40), st.floats(0.1, 10), st.floats(-10, 10), seeds)
def test_pearson_of_a_line_is_1_and_never_more(n, slope, shift, seed):
    x = normal(n, seed=seed)
    rising, falling = rank.pearson(x, slope * x + shift), rank.pearson(x, -slope * x + shift)
    assert 1 - 1e-12 <= rising <= 1
    assert -1 <= falling <= -1 + 1e-12


@pytest.mark.parametrize(
    "x, y, reason",
    [
        ([1.0, 2.0], [1.0, 2.0, 3.0], "2 and 3 values"),
        ([1.0], [2.0], "1 and 1 values"),
        ([], [], "0 and 0 values"),
        ([5.0, 5.0, 5.0], [1.0, 2.0, 3.0], "constant"),
        ([1.0, 2.0, 3.0], [0.1, 0.1, 0.1], "constant"),
        ([1.0, math.nan, 3.0], [1.0, 2.0, 3.0], "not finite"),
        ([1.0, 2.0, 3.0], [1.0, math.inf, 3.0], "not finite"),
    ],
)
def test_where_pearson_is_not_defined_is_an_error(x, y, reason):
    with pytest.raises(ValueError, match=reason):
        rank.pearson(x, y)


# ---- Runs compared --------------------------------------------------------------------------------------------------


def write_run(folder: Path, curve: dict, script="mae", seed=0, alpha_min=0.6, data="digits", **settings) -> Path:
    """A finished run folder with these {epoch: (effective rank, accuracy)}, and an epoch 99 that was not probed."""
    accuracy = rank.SCRIPTS[script]
    records = [{"epoch": e, "loss": 1.0, "effective_rank": r, accuracy: a} for e, (r, a) in curve.items()]
    config = {"script": script, "data": data, "alpha_min": alpha_min, "seed": seed, **settings}
    result = records[-1] | {"alpha_min": alpha_min, "alpha_eff": 0.02, "exp_effective_rank": 3.0}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "result.json").write_text(json.dumps(result))
    lines = [*records, {"epoch": 99, "loss": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def curve(seed: int, epochs=(1, 2, 3)) -> dict:
    values = normal(len(epochs), 2, seed=seed).abs()
    return {epoch: tuple(point) for epoch, point in zip(epochs, values.tolist())}


def test_correlation_over_runs_is_numpys_at_every_epoch_that_all_share(tmp_path):
    curves = [curve(0), curve(1, (1, 3, 4)), curve(2), curve(3, (1, 2, 3, 9))]
    runs = [rank.read_run(write_run(tmp_path / str(i), c, alpha_min=0.2 * (i + 1))) for i, c in enumerate(curves)]
    found = rank.compare(runs)["pearson"]
    assert [(point["epoch"], point["n"]) for point in found] == [(1, 4), (3, 4)]
    for point in found:
        ranks, accuracies = zip(*(c[point["epoch"]] for c in curves))
        assert close(point["r"], np.corrcoef(ranks, accuracies)[0, 1])


def test_a_line_is_mean_and_range_over_the_seeds_of_one_alpha_min(tmp_path):
    runs = [rank.read_run(write_run(tmp_path / str(i), curve(i), seed=i, alpha_min=0.6)) for i in range(3)]
    runs += [rank.read_run(write_run(tmp_path / "plain", curve(7), alpha_min=1.0))]
    plain, decayed = rank.compare(runs)["lines"]
    assert (plain["alpha_min"], plain["seeds"], decayed["alpha_min"], decayed["seeds"]) == (1.0, 1, 0.6, 3)
    for i, name in enumerate(("effective_rank", "accuracy")):
        for epoch, (mean, least, largest) in zip(decayed["epochs"], decayed[name]):
            values = [curve(seed)[epoch][i] for seed in range(3)]
            assert close(mean, np.mean(values)) and (least, largest) == (min(values), max(values))
        assert [v[0] for v in plain[name]] == [point[i] for point in curve(7).values()]


def test_runs_that_differ_in_another_setting_share_no_line(tmp_path):
    runs = [
        rank.read_run(write_run(tmp_path / str(i), curve(i), "resnet_decay", seed=i % 2, blocks=blocks, lr=0.1))
        for i, blocks in enumerate((16, 16, 8, 8))
    ]
    found = rank.compare(runs)
    assert found["settings"] == ["blocks"]
    assert [(line["blocks"], line["seeds"]) for line in found["lines"]] == [(8, 2), (16, 2)]
    assert [(row["blocks"], row["seed"]) for row in found["rows"]] == [(8, 0), (8, 1), (16, 0), (16, 1)]


def test_correlation_of_one_run_is_not_defined(tmp_path):
    found = rank.compare([rank.read_run(write_run(tmp_path / "one", curve(0)))])
    assert [(point["r"], point["n"]) for point in found["pearson"]] == [(None, 1)] * 3


def damage(folder: Path, kind: str) -> None:
    """Make a whole run folder one that can't be read."""
    name, content = {
        "unfinished": ("result.json", None),
        "foreign": ("config.json", None),
        "unknown script": ("config.json", '{"script": "gpt"}'),
        "script that is a list": ("config.json", '{"script": [1]}'),
        "truncated result": ("result.json", '{"alpha_min": 0.'),
        "result that is a list": ("result.json", "[]"),
        "no log": ("metrics.jsonl", None),
        "empty log": ("metrics.jsonl", ""),
        "log of numbers": ("metrics.jsonl", "1\n2\n"),
        "not finite": ("result.json", (folder / "result.json").read_text().replace("0.02", "NaN")),
        "words for numbers": ("result.json", (folder / "result.json").read_text().replace("0.02", '"small"')),
        "bytes": ("result.json", b"\xff\xfe\x00"),
    }[kind]
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


KINDS = [
    "unfinished", "foreign", "unknown script", "script that is a list", "truncated result", "result that is a list", "no log",
    "empty log", "log of numbers", "not finite", "words for numbers", "bytes",
]  # fmt: skip


def test_a_folder_that_is_no_whole_run_is_named_and_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "whole", curve(0))
    for kind in KINDS:
        damage(write_run(tmp_path / kind, curve(1)), kind)
    assert rank.main(["whole", *KINDS, "nowhere", "whole/../whole"]) == 0
    named = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in named] == [["left out", name] for name in (*KINDS, "nowhere")]
    (group,) = json.loads((tmp_path / "runs" / "comparison.json").read_text()).values()
    assert [row["folder"] for row in group["rows"]] == [str(Path("whole/../whole"))]
    assert (tmp_path / "runs" / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.rglob("*.tmp"))


def test_numbers_that_are_infinite_are_not_compared(tmp_path):
    folder = write_run(tmp_path / "run", {1: (1.0, 50.0), 2: (math.inf, 60.0)})
    with pytest.raises(ValueError, match="not all there"):
        rank.read_run(folder)


def test_every_script_and_data_set_is_a_group_of_its_own(tmp_path, capsys):
    folders = [
        write_run(tmp_path / "a", curve(0), "mae"),
        write_run(tmp_path / "b", curve(1), "uvit"),
        write_run(tmp_path / "c", curve(2), "resnet_decay", blocks=8),
        write_run(tmp_path / "d", curve(3), "mae", data="cifar100"),
        write_run(tmp_path / "e", curve(4), "mae", seed=1),
    ]
    assert rank.main([*map(str, folders), "--out", str(tmp_path / "all")]) == 0
    groups = json.loads((tmp_path / "all.json").read_text())
    assert {name: len(group["rows"]) for name, group in groups.items()} == {
        "mae digits": 2, "mae cifar100": 1, "uvit digits": 1, "resnet_decay digits": 1,
    }  # fmt: skip
    assert "pearson mae digits epoch=1 r=" in capsys.readouterr().out


def test_a_folder_of_images_is_called_by_its_name_and_two_of_one_name_by_their_paths(tmp_path):
    paths = ["/one/pets", "/two/pets", "/one/cars"]
    folders = [write_run(tmp_path / str(i), curve(i), "mae", data=path) for i, path in enumerate(paths)]
    assert rank.main([*map(str, folders), "--out", str(tmp_path / "all")]) == 0
    groups = json.loads((tmp_path / "all.json").read_text())
    assert {*groups} == {"mae /one/pets", "mae /two/pets", "mae cars"}
    assert {group["rows"][0]["folder"] for group in groups.values()} == {*map(str, folders)}


def test_two_runs_lie_on_a_line_and_it_is_said(tmp_path, capsys):
    folders = [write_run(tmp_path / str(i), curve(i), "mae", seed=i) for i in range(2)]
    assert rank.main([*map(str, folders), "--out", str(tmp_path / "all")]) == 0
    assert "n=2 (two runs always lie on a line)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "no finished run among the 0"),
        (["nowhere"], "no finished run among the 1"),
        (["--fast"], "can't read '--fast'"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert rank.main(arguments) == 2
    assert words in capsys.readouterr().err.splitlines()[-1] and not list(tmp_path.iterdir())


def test_a_place_that_can_not_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    run = str(write_run(tmp_path / "run", curve(0)))
    assert rank.main([run, "--out", str(tmp_path / "file" / "figure")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "name another --out" in line
