"""uvit.py against closed forms, a plainly written U-ViT, and torch-fidelity; and a run to its end."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY_UVIT
from hypothesis import given
from hypothesis import strategies as st

import mae
import probe
import rank
import uvit

DEPTHS = st.sampled_from([2, 4, 6])
ALPHAS = st.floats(0, 1)


def network(depth=4, alpha_min=0.6, random=True, seed=0, channels=3, classes=0, **settings):
    """A small float64 U-ViT; `random` fills every parameter, zero-initialised ones too."""
    sizes = dict(width=16, heads=2, patch_size=4, image_size=(16, 12), conditional=classes > 0)
    config = uvit.Config(depth=depth, alpha_min=alpha_min, **{**sizes, **settings})
    generator = torch.Generator().manual_seed(seed)
    model = uvit.UViT(config, channels, classes, generator).double()
    if random:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def pictures(count=3, channels=3, size=(16, 12), seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, channels, *size, generator=generator, dtype=torch.float64)


TIMES = torch.tensor([0.9, 0.2, 0.5], dtype=torch.float64)

# ---- Equations ------------------------------------------------------------------------------------------------------


@given(DEPTHS, ALPHAS)
def test_schedule_falls_in_equal_steps_from_one_to_alpha_min(depth, alpha_min):
    alphas = uvit.shortcut_weights(depth, alpha_min)
    assert len(alphas) == 2 * (depth + 1) and alphas[0] == 1 and alphas[-1] == alpha_min
    assert alphas == mae.shortcut_weights(depth + 1, alpha_min)
    model = network(depth, alpha_min)
    assert model.alphas == alphas


@given(DEPTHS, ALPHAS, st.integers(0, 2**16))
def test_the_whole_depth_is_equation_4(depth, alpha_min, seed):
    """x_L = (Π α_l) x_0 + Σ_l (Π_{i>l} α_i) f_l(x_l), with joins that pass x through."""
    model = network(depth, alpha_min, seed=seed)
    first, outputs, last = [], [], None
    hooks = [model.blocks[0].register_forward_pre_hook(lambda module, arguments: first.append(arguments[0]))]
    with torch.no_grad():
        for block in model.blocks:
            if block.join is not None:
                block.join.weight.copy_(torch.cat([torch.eye(16), torch.zeros(16, 16)], dim=1))
                block.join.bias.zero_()
            for branch in (block.attn, block.mlp):
                hooks.append(branch.register_forward_hook(lambda module, arguments, output: outputs.append(output)))
        *_, last = model.tokens(pictures(seed=seed), TIMES)
    count = 2 * (depth + 1)
    alphas = [1 - (1 - alpha_min) * i / (count - 1) for i in range(count)]
    expected = math.prod(alphas) * first[0]
    for l, output in enumerate(outputs):
        expected = expected + math.prod(alphas[l + 1 :]) * output
    assert len(outputs) == count
    torch.testing.assert_close(last, expected, rtol=1e-10, atol=1e-10)


def test_branches_start_at_zero():
    model = network(random=False)
    outputs = []
    for block in model.blocks:
        for branch in (block.attn, block.mlp):
            branch.register_forward_hook(lambda module, arguments, output: outputs.append(output))
    list(model.tokens(pictures(), TIMES))
    assert len(outputs) == 10 and all((output == 0).all() for output in outputs)


# ---- Diffusion ------------------------------------------------------------------------------------------------------


@given(st.floats(0, 1))
def test_signal_and_noise_are_the_closed_form(t):
    """∫β by Simpson's rule, exact for a straight line; and the variance is preserved."""
    ends = [uvit.beta(torch.tensor(x, dtype=torch.float64)).item() for x in (0, t / 2, t)]
    integral = t / 6 * (ends[0] + 4 * ends[1] + ends[2])
    assert ends[0] == pytest.approx(0.1) and uvit.beta(1.0) == pytest.approx(20)
    signal, deviation = (x.item() for x in uvit.signal_and_noise(torch.tensor(t, dtype=torch.float64)))
    assert signal == pytest.approx(math.exp(-integral / 2), rel=1e-12)
    assert deviation == pytest.approx(math.sqrt(-math.expm1(-integral)), rel=1e-12, abs=1e-15)
    assert signal**2 + deviation**2 == pytest.approx(1, rel=1e-12)


def test_perturbed_images_have_the_moments_of_the_diffusion():
    """Also of the SDE that it solves: dx = −½βx dt + √β dw, in 2,000 small steps, from x_0 = 0.7."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(40_000, 1, 1, 1, generator=generator, dtype=torch.float64)
    x = torch.full_like(noise, 0.7)
    walked, steps, seen = x.clone(), 2000, {}
    for i in range(steps):
        b = 0.1 + 19.9 * (i + 0.5) / steps
        z = torch.randn(noise.shape, generator=generator, dtype=torch.float64)
        walked = walked - 0.5 * b * walked / steps + math.sqrt(b / steps) * z
        seen[i + 1] = (walked.mean().item(), walked.std().item())
    for i in (100, 400, 1000, 2000):
        t = i / steps
        at_t = uvit.perturb(x, noise, torch.full((len(x),), t, dtype=torch.float64))
        integral = 0.1 * t + 19.9 * t * t / 2
        expected = 0.7 * math.exp(-integral / 2), math.sqrt(1 - math.exp(-integral))
        for found in ((at_t.mean().item(), at_t.std().item()), seen[i]):
            assert found == pytest.approx(expected, abs=0.015)  # three deviations of the mean of 40,000


def test_every_image_has_its_own_time():
    x, noise = pictures(), pictures(seed=2)
    mixed = uvit.perturb(x, noise, TIMES)
    for i, t in enumerate(TIMES):
        torch.testing.assert_close(mixed[i : i + 1], uvit.perturb(x[i : i + 1], noise[i : i + 1], t[None]))


MEAN, DEVIATION = 0.3, 0.5


def gaussian(x, t):
    """The exact noise prediction for data that are normal with MEAN and DEVIATION."""
    integral = 0.1 * float(t) + 9.95 * float(t) ** 2
    signal, variance = math.exp(-integral / 2), -math.expm1(-integral)
    return math.sqrt(variance) * (x - signal * MEAN) / (signal**2 * DEVIATION**2 + variance)


def start(count=20_000):
    return torch.randn(count, 1, 1, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def walk(sampler, steps, x):
    if sampler == "sde":
        generator = torch.Generator().manual_seed(1)
        draw = lambda i: torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return uvit.euler_maruyama(gaussian, x, steps, draw)
    return {"ode": uvit.probability_flow, "dpm-solver": uvit.dpm_solver}[sampler](gaussian, x, steps)


@pytest.mark.parametrize("sampler, steps", [("sde", 1000), ("ode", 1000), ("dpm-solver", 50)])
def test_samplers_recover_mean_and_deviation_of_gaussian_data(sampler, steps):
    """Within 0.012: three deviations of the mean of 20,000 numbers of deviation 0.5."""
    x = walk(sampler, steps, start())
    assert x.mean().item() == pytest.approx(MEAN, abs=0.012)
    assert x.std().item() == pytest.approx(DEVIATION, abs=0.012)


@pytest.mark.parametrize("sampler, order", [("ode", 1), ("dpm-solver", 2)])
def test_the_solvers_error_falls_at_their_order(sampler, order):
    """The flow carries x to MEAN + DEVIATION · (x − signal·MEAN)/deviation_1; errors at 40 and 80 evaluations."""
    x = start(500)
    signal = math.exp(-10.05 / 2)
    exact = MEAN + DEVIATION * (x - signal * MEAN) / math.sqrt(signal**2 * DEVIATION**2 + 1 - signal**2)
    coarse, fine = ((walk(sampler, steps, x) - exact).abs().mean().item() for steps in (30, 60))
    assert 2**order * 0.75 < coarse / fine < 2**order * 1.5


@pytest.mark.parametrize("sampler", uvit.SAMPLERS)
def test_samplers_ask_so_many_times_from_one_to_the_earliest_time(sampler):
    asked = []

    def predict(x, t):
        asked.append(float(t))
        return 0 * x

    x = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    solvers = {"ode": uvit.probability_flow, "dpm-solver": uvit.dpm_solver}
    if sampler == "sde":
        uvit.euler_maruyama(predict, x, 10, lambda i: x)
    else:
        solvers[sampler](predict, x, 10)
    assert len(asked) == 10 and asked == sorted(asked, reverse=True)
    assert asked[0] == pytest.approx(1, abs=1e-12) and asked[-1] == pytest.approx(uvit.EARLIEST, rel=1e-9)


def test_training_times_cover_what_the_samplers_visit(clean, monkeypatch):
    seen = []
    perturb = uvit.perturb
    monkeypatch.setattr(uvit, "perturb", lambda x, noise, t: (seen.append(t), perturb(x, noise, t))[1])
    monkeypatch.setattr(uvit, "evaluate", lambda *_: (_ for _ in ()).throw(KeyError))
    monkeypatch.setattr(uvit, "evaluate_baselines", lambda *_: {"pixels": {"a": 1, "b": 2}})
    with pytest.raises(KeyError):
        uvit.train(uvit.Config(**{**TINY_UVIT, "epochs": 10}))
    t = torch.cat(seen)
    assert len(t) == 2000 and t.min() > 0 and t.max() <= 1
    assert t.min() < 0.01 and t.max() > 0.99 and t.mean().item() == pytest.approx(0.5, abs=0.02)
    drawn = 1 - torch.rand(10, generator=torch.Generator().manual_seed(0))
    assert (1 - torch.zeros(1)).item() == 1.0 and (drawn > 0).all()  # rand has 0, so times have 1


# ---- Model ----------------------------------------------------------------------------------------------------------


def plain_uvit(weights, x, t, labels, patch, heads, depth):
    """Bao et al.'s U-ViT written out from its paper: a function of a state dict, with softmax attention."""
    b, c, h, w = x.shape
    rows, columns = h // patch, w // patch
    cells = x.reshape(b, c, rows, patch, columns, patch).permute(0, 2, 4, 3, 5, 1).reshape(b, rows * columns, -1)
    linear = lambda name, x: x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)
    norm = lambda name, x: F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])
    tokens = linear("embed", cells)
    d = tokens.shape[-1]
    angle = 999 * t[:, None].float() * torch.exp(-math.log(10000) * torch.arange(d // 2) / (d // 2))
    extras = [torch.cat([angle.cos(), angle.sin()], dim=1).double()]
    if labels is not None:
        extras.append(weights["label_embed.weight"][labels])
    x = torch.cat([*(extra[:, None] for extra in extras), tokens], dim=1) + weights["positions"]

    def block(i, x):
        y = norm(f"blocks.{i}.norm1", x)
        q, k, v = linear(f"blocks.{i}.attn.qkv", y).reshape(b, -1, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
        y = ((q @ k.transpose(2, 3)) / math.sqrt(d // heads)).softmax(dim=-1) @ v
        x = x + linear(f"blocks.{i}.attn.proj", y.transpose(1, 2).reshape(b, -1, d))
        y = F.gelu(linear(f"blocks.{i}.mlp.0", norm(f"blocks.{i}.norm2", x)))
        return x + linear(f"blocks.{i}.mlp.2", y)

    outputs = []
    for i in range(depth // 2):
        x = block(i, x)
        outputs.append(x)
    x = block(depth // 2, x)
    for j in range(depth // 2):
        i = depth // 2 + 1 + j
        x = block(i, linear(f"blocks.{i}.join", torch.cat([x, outputs[depth // 2 - 1 - j]], dim=-1)))
    x = linear("head", norm("norm", x))[:, len(extras) :]
    x = x.reshape(b, rows, columns, patch, patch, c).permute(0, 5, 1, 3, 2, 4).reshape(b, c, h, w)
    return F.conv2d(x, weights["smooth.weight"], weights["smooth.bias"], padding=1)


@pytest.mark.parametrize("channels, classes, depth", [(3, 0, 4), (1, 5, 6), (4, 2, 2)])
def test_alpha_min_one_equals_a_plain_uvit(channels, classes, depth):
    model = network(depth, 1.0, channels=channels, classes=classes)
    labels = torch.tensor([0, classes, 1]) if classes else None
    images = pictures(channels=channels)
    expected = plain_uvit(model.state_dict(), images, TIMES, labels, 4, 2, depth)
    torch.testing.assert_close(model(images, TIMES, labels), expected, rtol=1e-6, atol=1e-6)
    assert expected.shape == images.shape
    decayed = network(depth, 0.9, channels=channels, classes=classes)
    assert not torch.allclose(decayed(images, TIMES, labels), expected, rtol=1e-3)


def test_skips_pair_deepest_first_and_every_parameter_gets_gradient():
    model = network(depth=6, classes=3)
    outputs, joined = [], {}
    for l, block in enumerate(model.blocks):
        block.register_forward_hook(lambda module, arguments, output: outputs.append(output))
        if block.join is not None:
            block.register_forward_pre_hook(lambda module, arguments, l=l: joined.update({l: arguments[1]}))
    model(pictures(), TIMES, torch.tensor([0, 1, 3])).square().sum().backward()
    assert sorted(joined) == [4, 5, 6]
    for l, skip in joined.items():
        assert skip is outputs[6 - l]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_the_sizes_are_bao_et_als():
    """Parameters of U-ViT-S/2 on CIFAR: 44 M (their Table 1)."""
    model = uvit.UViT(uvit.Config(data="cifar100"), 3)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(44, abs=0.5)
    assert len(model.blocks) == 13 and len(model.positions) == 257


# ---- Sampling -------------------------------------------------------------------------------------------------------


def test_patches_and_positions_enter_as_strong_as_time():
    """Variance 1 a value each: the loss of short runs falls faster so than with Bao et al.'s 0.02."""
    model = uvit.UViT(uvit.Config(data="cifar100", model="micro"), 3, 0, torch.Generator().manual_seed(0))
    noise = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    patches = model.embed(uvit.patchify(noise, 2))
    assert patches.std().item() == pytest.approx(1, abs=0.1)
    assert model.positions.std().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("sampler", uvit.SAMPLERS)
def test_the_same_seed_gives_the_same_images_whatever_the_batch(sampler):
    model = network(channels=1, image_size=(8, 8)).float()
    config = uvit.Config(sampler=sampler, sampler_steps=4)
    whole = uvit.sample(model, config, 70)
    parts = uvit.sample(model, config, 70, batch_size=9)
    assert whole.dtype == torch.uint8 and whole.shape == (70, 1, 8, 8)
    assert (whole.int() - parts.int()).abs().max() <= 1 and (whole == parts).double().mean() > 0.99
    assert torch.equal(whole[:5], uvit.sample(model, config, 5, batch_size=70)) or (
        (whole[:5].int() - uvit.sample(model, config, 5).int()).abs().max() <= 1
    )
    other = uvit.sample(model, dataclasses.replace(config, seed=1), 70)
    assert (whole == other).double().mean() < 0.9
    assert len({picture.numpy().tobytes() for picture in whole}) == 70  # each from its own noise


def test_samples_are_clamped_and_rounded(monkeypatch):
    values = torch.tensor([-3.0, -1.0, -0.998, 0.0, 0.5, 1.0, 9.0])
    monkeypatch.setattr(uvit, "dpm_solver", lambda predict, x, steps: values.reshape(-1, 1, 1, 1).expand(7, 1, 8, 8))
    images = uvit.sample(network(channels=1, image_size=(8, 8)).float(), uvit.Config(sampler="dpm-solver"), 7)
    assert images[:, 0, 0, 0].tolist() == [0, 0, 0, 128, 191, 255, 255]


def test_clipping_keeps_the_implied_image_within_its_range_and_changes_no_other():
    x, noise, t = pictures(), pictures(seed=2), torch.tensor(0.3, dtype=torch.float64)
    signal, deviation = (factor.item() for factor in uvit.signal_and_noise(t))
    kept = uvit.clipped(x, noise, t)
    before, after = ((x - deviation * e) / signal for e in (noise, kept))
    torch.testing.assert_close(after, before.clamp(-1, 1))
    assert (before.abs() > 1).any() and (before.abs() < 1).any()
    model = network(channels=1, image_size=(8, 8)).float()  # of random weights: its images are far outside
    free, cut = (uvit.sample(model, uvit.Config(clip=clip, sampler_steps=5), 8) for clip in (False, True))
    assert not torch.equal(free, cut)


def test_guidance_is_bao_et_als_on_all_channels():
    model = network(classes=4)
    x, labels = pictures(), torch.tensor([0, 3, 1])
    conditional, free = model(x, TIMES, labels), model(x, TIMES, torch.tensor([4, 4, 4]))
    assert torch.equal(uvit.guided(model, x, TIMES, labels, 0.0), conditional)
    torch.testing.assert_close(uvit.guided(model, x, TIMES, labels, 0.7), 1.7 * conditional - 0.7 * free)
    torch.testing.assert_close(uvit.guided(model, x, TIMES, labels, -1.0), free)
    assert torch.equal(uvit.guided(network(), x, TIMES, None, 0.0), network()(x, TIMES))


def test_samples_of_a_class_are_of_that_class(monkeypatch):
    model = network(channels=1, classes=3, image_size=(8, 8)).float()
    seen = []
    monkeypatch.setattr(
        uvit, "guided", lambda model, x, t, labels, guidance: (seen.append((labels.tolist(), guidance)), x)[1]
    )
    config = uvit.Config(sampler_steps=2, conditional=True, guidance=0.5)
    uvit.sample(model, config, 5, batch_size=3)
    assert seen[0] == ([0, 1, 2], 0.5) and seen[-1] == ([0, 1], 0.5)
    uvit.sample(model, config, 2, label=2)
    assert seen[-1][0] == [2, 2]


# ---- Training -------------------------------------------------------------------------------------------------------


def test_learning_rate_warms_up_and_stays():
    config = uvit.Config(lr=2e-4, warmup_steps=100)
    assert uvit.learning_rate(config, 0) == pytest.approx(2e-6)
    assert uvit.learning_rate(config, 49) == pytest.approx(1e-4)
    assert uvit.learning_rate(config, 99) == uvit.learning_rate(config, 10**6) == pytest.approx(2e-4)
    assert uvit.learning_rate(uvit.Config(lr=1.0, warmup_steps=0), 0) == 1.0


@given(st.integers(0, 10**7))
def test_the_moving_average_forgets_its_start(step):
    assert uvit.ema_decay(uvit.Config(), step) == pytest.approx(min(0.9999, (1 + step) / (10 + step)))


def checkpoint(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def test_the_average_is_one_tenth_start_after_one_step_and_it_is_what_samples(clean, monkeypatch):
    used = []
    sample, evaluate = uvit.sample, uvit.evaluate
    monkeypatch.setattr(
        uvit, "sample", lambda model, *rest, **more: (used.append(model), sample(model, *rest, **more))[1]
    )
    monkeypatch.setattr(uvit, "evaluate", lambda model, *rest: (used.append(model), evaluate(model, *rest))[1])
    config = uvit.Config(**{**TINY_UVIT, "epochs": 1, "batch_size": 200, "lr": 0.1})
    uvit.train(config)
    saved = checkpoint(config.folder)["model"]
    first = uvit.build(config, (1, 16, 16), 10, torch.device("cpu"))["model"].state_dict()
    for name, value in first.items():
        expected = 0.1 * value + 0.9 * saved[f"model.{name}"]
        torch.testing.assert_close(saved[f"ema.{name}"], expected, rtol=1e-4, atol=1e-6)
    assert len(used) >= 3 and used[0] is used[-1]
    for name, value in used[-1].state_dict().items():
        assert torch.equal(value, saved[f"ema.{name}"])
    assert any(not torch.equal(saved[f"ema.{name}"], saved[f"model.{name}"]) for name in first)


def test_a_run_leaves_what_it_promises_and_is_not_trained_again(clean, capsys):
    config = uvit.Config(**{**TINY_UVIT, "sample_every": 1, "conditional": True})
    result = uvit.train(config)
    folder = clean / "runs" / "uvit-digits-a0.7-s0"
    assert config.folder.resolve() == folder
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json", "metrics.jsonl", "checkpoint.pt", "curves.png", "probe.png", "samples.png", "result.json",
    }  # fmt: skip
    promised = (
        "script data alpha_min alpha_eff seed epochs steps loss seconds images_per_second peak_memory_bytes device torch utilisation "
        "effective_rank exp_effective_rank linear knn_weighted knn_majority best_layer best_time per_layer baselines "
        "fid fid_samples sampler sampler_steps guidance"
    )
    assert set(promised.split()) <= set(result)
    assert json.loads((folder / "result.json").read_text()) == result
    assert result["steps"] == 8 and result["fid"] is None
    places = [(place["layer"], place["time"]) for place in result["per_layer"]]
    assert places == [(layer, t) for t in (0.1, 0.3) for layer in (1, 2, 3)]
    best = max(result["per_layer"], key=lambda place: place["held_out"])
    assert (result["best_layer"], result["best_time"], result["linear"]) == (
        best["layer"],
        best["time"],
        best["linear"],
    )
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["loss"] < records[0]["loss"]
    before = (folder / "checkpoint.pt").stat().st_mtime_ns
    capsys.readouterr()
    assert uvit.train(config) == result
    assert "finished" in capsys.readouterr().out and (folder / "checkpoint.pt").stat().st_mtime_ns == before


def test_the_seed_decides_everything_and_accumulation_nothing(clean):
    def weights(out, **changes):
        uvit.train(uvit.Config(**{**TINY_UVIT, "out": out, **changes}))
        return checkpoint(clean / out)["model"]

    one, same, other = weights("one"), weights("same"), weights("other", seed=1)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    split = weights("split", accumulate=3)  # 50 images as 17, 17 and 16
    for name in one:
        torch.testing.assert_close(split[name], one[name], rtol=0, atol=2e-4)


def test_hidden_labels_are_the_null_class_at_their_rate(clean, monkeypatch):
    seen = []
    forward = uvit.UViT.forward
    monkeypatch.setattr(
        uvit.UViT, "forward", lambda self, x, t, labels, drops: (seen.append(labels), forward(self, x, t, labels))[1]
    )
    monkeypatch.setattr(uvit, "sample", lambda *_, **more: torch.zeros(4, 1, 16, 16, dtype=torch.uint8))
    monkeypatch.setattr(probe, "training_flops", lambda *_: 1.0)  # it asks the network, too
    uvit.train(uvit.Config(**{**TINY_UVIT, "conditional": True, "label_dropout": 0.25, "epochs": 5}))
    labels = torch.cat(seen)
    assert len(labels) == 1000 and (labels == 10).double().mean().item() == pytest.approx(0.25, abs=0.04)
    data = probe.load_images("digits", "data", (16, 16), 200)
    counts = torch.bincount(labels[:200], minlength=11)[:10] <= torch.bincount(data.train_labels, minlength=10)
    assert counts.all()


def test_probing_leaves_the_network_untouched_and_hides_the_class(clean):
    config = uvit.Config(**TINY_UVIT, conditional=True)
    data = probe.load_images("digits", "data", config.image_size, 60)
    data = dataclasses.replace(data, test=data.test[:50], test_labels=data.test_labels[:50])
    model = uvit.build(config, (1, 16, 16), 10, torch.device("cpu"))["model"]
    with torch.no_grad():
        model.label_embed.weight[:10] = math.nan  # would show
    scores = uvit.evaluate(model, data, config)
    assert all(math.isfinite(place["norm"]) for place in scores["per_layer"])
    assert scores == uvit.evaluate(model, data, config)


def test_features_are_of_noisy_images_at_their_level(clean, monkeypatch):
    """At t = 0 the tokens are those of the clean image; at t = 1 those of noise, which no two images share."""
    config = uvit.Config(**{**TINY_UVIT, "probe_times": (0.0, 1.0)})
    data = probe.load_images("digits", "data", config.image_size, 60)
    data = dataclasses.replace(data, test=data.test[:50], test_labels=data.test_labels[:50])
    model = network(2, channels=1, width=16, image_size=(16, 16)).float()
    held = []
    evaluate_layers = probe.evaluate_layers
    monkeypatch.setattr(
        probe, "evaluate_layers", lambda *arguments: (held.append(arguments), evaluate_layers(*arguments))[1]
    )
    uvit.evaluate(model, data, config)
    with torch.no_grad():
        x = data.test.float() / 127.5 - 1
        clear = [tokens[:, 1:].mean(dim=1) for tokens in model.tokens(x, torch.zeros(50))]
    torch.testing.assert_close(held[0][2], torch.stack(clear, dim=1), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(held[1][2], held[0][2], atol=1e-2)


def test_non_square_grey_images_and_alpha_auto_run(clean):
    result = uvit.train(uvit.Config(**{**TINY_UVIT, "image_size": (16, 24), "alpha_min": "auto"}))
    assert math.isfinite(result["loss"]) and result["alpha_eff"] == pytest.approx(rank.BEST_ALPHA_EFF, rel=0.01)


# ---- Generation quality ---------------------------------------------------------------------------------------------


class Small(torch.nn.Module):
    """A feature extractor of 6 numbers, where Inception has 2,048."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("weight", torch.randn(3 * 16 * 16, 6, generator=generator) / 500)

    def forward(self, images):
        assert images.dtype == torch.uint8 and images.shape[1:] == (3, 16, 16)
        return ((images.flatten(1).float() @ self.weight).tanh(),)


def frechet(a, b):
    """‖μ_a − μ_b‖² + tr(A + B − 2 (A^½ B A^½)^½), A = XᵀX and B = YᵀY of the centred features.

    The last root's trace is the sum of the singular values of X Yᵀ, here by a symmetric eigen-decomposition.
    """
    a, b = (features.double().numpy() for features in (a, b))
    x, y = ((features - features.mean(0)) / np.sqrt(len(features) - 1) for features in (a, b))
    product = x @ y.T
    middle = np.sqrt(np.clip(np.linalg.eigvalsh(product @ product.T), 0, None)).sum()
    return ((a.mean(0) - b.mean(0)) ** 2).sum() + (x**2).sum() + (y**2).sum() - 2 * middle


def quality(monkeypatch, images, extractor=None, count=200, **settings):
    """generation_quality of `images` as if they were sampled, against 200 digits."""
    import torch_fidelity.utils

    data = probe.load_images("digits", "data", (16, 16), 200)
    model = network(2, channels=1, width=16, image_size=(16, 16)).float()
    monkeypatch.setattr(uvit, "sample", lambda model, config, count, **more: images[:count])
    if extractor:
        monkeypatch.setattr(torch_fidelity.utils, "create_feature_extractor", lambda *_, **more: extractor)
    return uvit.generation_quality(model, data, uvit.Config(fid_samples=count, **settings))


def digits(count=200, noise=0.0):
    """The train images, with noise."""
    images = probe.load_images("digits", "data", (16, 16), count).train
    drawn = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + 255 * noise * drawn).clamp(0, 255).round().to(torch.uint8)


def test_fid_is_the_closed_form_zero_for_the_set_itself_and_grows_with_noise(clean, monkeypatch):
    extractor = Small()
    found = [quality(monkeypatch, digits(noise=noise), extractor)["fid"] for noise in (0.0, 0.1, 0.3, 1.0)]
    assert found[0] == pytest.approx(0, abs=1e-6)
    assert found[0] < found[1] < found[2] < found[3]
    features = [uvit.inception_features(extractor, digits(noise=noise)) for noise in (0.3, 0.0)]
    assert found[2] == pytest.approx(frechet(*features), rel=1e-4)


def test_the_reference_is_computed_once_for_its_content_size_and_extractor(clean, monkeypatch):
    calls = []
    features = uvit.inception_features
    monkeypatch.setattr(uvit, "inception_features", lambda *a: (calls.append(len(a[1])), features(*a))[1])
    extractor, other = Small(), Small()
    other.weight *= 0.5
    for images, by, computed in (
        (digits(), extractor, 1), (digits(), extractor, 0), (digits(100), extractor, 1), (digits(noise=0.1), extractor, 1),
        (digits(), other, 1), (digits(), extractor, 0),
    ):  # fmt: skip
        calls.clear()
        first = uvit.reference_features(by, images, clean / "cache")
        assert len(calls) == computed
        assert torch.equal(first, features(by, images))
    (next((clean / "cache").glob("*.npy"))).write_bytes(b"half a file")
    for images in (digits(), digits(100), digits(noise=0.1)):
        assert torch.equal(uvit.reference_features(extractor, images, clean / "cache"), features(extractor, images))


def test_exactly_so_many_images_are_compared_and_said(clean, monkeypatch):
    compared = []
    features = uvit.inception_features
    monkeypatch.setattr(uvit, "inception_features", lambda *a: (compared.append(len(a[1])), features(*a))[1])
    found = quality(monkeypatch, digits(noise=1.0), Small(), count=77, sampler="ode", kid=True, precision_recall=True)
    assert compared == [200, 77]
    assert (found["fid_samples"], found["sampler"], found["sampler_steps"], found["guidance"]) == (77, "ode", 1000, 0.0)
    assert found["kid"] > 0 and 0 <= found["precision"] <= 1 and 0 <= found["recall"] <= 1
    same = quality(monkeypatch, digits(), Small(), kid=True, precision_recall=True)
    assert same["precision"] == same["recall"] == 1 and same["kid"] < found["kid"]


@pytest.fixture(scope="module")
def inception_file(tmp_path_factory):
    """torch-fidelity's Inception with random weights, in a file."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3 as Inception

    load = Inception.load_state_dict
    url = "torch_fidelity.feature_extractor_inceptionv3.load_state_dict_from_url"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(url, lambda *_, **more: {})
        patched.setattr(Inception, "load_state_dict", lambda *_: None)
        torch.manual_seed(0)
        weights = Inception("inception-v3-compat", ["2048"]).state_dict()
    assert Inception.load_state_dict is load
    file = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(weights, file)
    return file


def test_fid_by_torch_fidelitys_inception_from_a_file_is_the_closed_form(clean, monkeypatch, inception_file):
    import torch_fidelity.utils

    uvit.check_inception(str(inception_file))
    images = digits(8, noise=0.5)
    data = probe.load_images("digits", "data", (16, 16), 10)
    monkeypatch.setattr(uvit, "sample", lambda *_, **more: images)
    config = uvit.Config(fid_samples=8, fid_weights=str(inception_file))
    found = uvit.generation_quality(network(2, channels=1).float(), data, config)
    extractor = torch_fidelity.utils.create_feature_extractor(
        "inception-v3-compat", ["2048"], cuda=False, verbose=False, feature_extractor_weights_path=str(inception_file)
    )
    features = [extractor(part.expand(-1, 3, -1, -1))[0] for part in (images, data.train)]
    assert found["fid"] > 0 and found["fid"] == pytest.approx(frechet(*features), rel=1e-3)


def test_weights_that_are_not_inceptions_are_refused_and_run_nothing(clean):
    class Hostile:
        def __reduce__(self):
            return open, ("opened", "w")

    files = {"text": None, "other": {"a": torch.zeros(1)}, "list": [1, 2], "hostile": {"fc.weight": Hostile()}}
    files["sham"] = {"Conv2d_1a_3x3.conv.weight": torch.zeros(32, 3, 3, 3), "fc.weight": torch.zeros(1008, 2048)}
    for name, content in files.items():
        path = clean / f"{name}.pth"
        path.write_text("hello") if content is None else torch.save(content, path)
        with pytest.raises(probe.BadInput, match=f"fid_weights.*{name}.*weights-inception"):
            uvit.check_inception(str(path))
    with pytest.raises(probe.BadInput, match="nowhere"):
        uvit.check_inception("nowhere.pth")
    assert not (clean / "opened").exists()


def test_without_inceptions_weights_the_run_is_unharmed(clean, capsys, monkeypatch):
    import torch_fidelity.utils

    def offline(*_, **more):
        raise OSError("no network")

    monkeypatch.setattr(torch_fidelity.utils, "create_feature_extractor", offline)
    result = uvit.train(uvit.Config(**TINY_UVIT, fid_samples=10))
    out = capsys.readouterr().out
    assert result["fid"] is None and result["fid_samples"] == 10 and "linear" in result
    assert "FID is left out" in out and "--fid-weights" in out and "take 2,048 or more" in out


def test_a_finished_run_is_given_its_fid_without_training(clean, capsys, monkeypatch):
    plain = uvit.train(uvit.Config(**TINY_UVIT))
    weights = checkpoint(clean / "runs" / "uvit-digits-a0.7-s0")["model"]
    asked = []

    def quality(model, data, config, vae):
        assert all(torch.equal(value, weights[f"ema.{name}"]) for name, value in model.state_dict().items())
        asked.append((config.fid_samples, len(data.train)))
        return dict.fromkeys(uvit.QUALITY) | {"fid": 5.0 * config.fid_samples, "fid_samples": config.fid_samples}

    monkeypatch.setattr(uvit, "generation_quality", quality)
    for samples in (10, 10, 20, 0):  # asked for, already there, another number, not asked for
        result = uvit.train(uvit.Config(**TINY_UVIT, fid_samples=samples))
    assert asked == [(10, 200), (20, 200)] and result["fid"] == 100.0
    assert json.loads((clean / "runs" / "uvit-digits-a0.7-s0" / "result.json").read_text()) == result
    assert {k: v for k, v in result.items() if k not in uvit.QUALITY} == {
        k: v for k, v in plain.items() if k not in uvit.QUALITY
    }
    monkeypatch.setattr(uvit, "generation_quality", lambda *_: dict.fromkeys(uvit.QUALITY))
    assert uvit.train(uvit.Config(**TINY_UVIT, fid_samples=30))["fid"] == 100.0  # one that failed replaces nothing


# ---- Latents --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory):
    """A small AutoencoderKL of random weights, which halves the sides."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vae")
    diffusers.AutoencoderKL(
        block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1, latent_channels=4, norm_num_groups=4, scaling_factor=0.5,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def test_latents_are_encoded_once_scaled_by_the_vaes_config_and_decoded_back(clean, vae_folder, monkeypatch):
    vae = uvit.load_vae(str(vae_folder), torch.device("cpu"))
    images = digits(6)
    with torch.no_grad():
        x = (images.float() / 127.5 - 1).expand(-1, 3, -1, -1)
        plain = vae.encode(x).latent_dist.mean
        torch.testing.assert_close(uvit.encode(vae, images), 0.5 * plain)
        torch.testing.assert_close(uvit.decode(vae, 0.5 * plain), vae.decode(plain).sample)
    data = probe.load_images("digits", "data", (16, 16), 40)
    data = dataclasses.replace(data, test=data.test[:10], test_labels=data.test_labels[:10])
    found = uvit.encoded(vae, data, clean)
    assert found.train.shape == (40, 2, 4, 8, 8) and found.test.shape == (10, 4, 8, 8)
    with torch.no_grad():
        for view, seen in enumerate((data.train, data.train.flip(3))):
            torch.testing.assert_close(found.train[:, view].float(), uvit.encode(vae, seen), rtol=1e-2, atol=1e-2)
    mixed = uvit.mirrored(found.train[:2], torch.tensor([True, False]))
    assert torch.equal(mixed, torch.stack([found.train[0, 1], found.train[1, 0]]).float())
    monkeypatch.setattr(uvit, "encode_into", lambda *_: 1 / 0)
    assert torch.equal(uvit.encoded(vae, data, clean).train, found.train)
    assert not list(clean.rglob("*.tmp"))


def test_a_run_on_latents_samples_images(clean, vae_folder):
    config = uvit.Config(**{**TINY_UVIT, "vae": str(vae_folder), "image_size": (16, 16), "limit": 60, "flip": True})
    result = uvit.train(config)
    assert math.isfinite(result["loss"]) and result["baselines"]["pixels"]["knn_weighted"] > 20  # of pixels indeed
    assert checkpoint(config.folder)["model"]["ema.smooth.weight"].shape == (4, 4, 3, 3)
    assert uvit.main(["--sample", str(config.folder), "--n", "3", "--sampler-steps", "2"]) == 0
    assert list(config.folder.glob("samples-*-n3.png"))


@pytest.mark.parametrize("name", ["tests", "./nowhere", "sd-vae", "/tmp/no where"])
def test_a_folder_that_is_no_vae_is_refused(name, clean):
    pytest.importorskip("diffusers")
    (clean / "tests").mkdir()
    with pytest.raises(probe.BadInput, match="vae"):
        uvit.load_vae(name, torch.device("cpu"))


# ---- Images from a finished run -------------------------------------------------------------------------------------


def test_images_come_from_a_finished_run_as_in_its_own_grid(clean, capsys, monkeypatch):
    grids = []
    monkeypatch.setattr(uvit, "draw_samples", lambda config, images, name="samples.png": grids.append((name, images)))
    config = uvit.Config(**TINY_UVIT, conditional=True)
    uvit.train(config)
    run = str(config.folder)
    assert uvit.main(["--sample", run, "--n", "20"]) == 0  # the run's own sampler and steps
    assert torch.equal(grids[-1][1], grids[-2][1][:20]) and grids[-1][0] == "samples-sde-3-g0-s0-n20.png"
    assert uvit.main(["--sample", run, "--n", "4", "--sampler", "ode", "--sampler-steps", "2", "--label", "7"]) == 0
    assert grids[-1][0] == "samples-ode-2-g0-s0-n4-class7.png"
    assert uvit.main(["--sample", run, "--n", "2", "--sampler", "sde"]) == 0
    assert grids[-1][0] == "samples-sde-3-g0-s0-n2.png"
    assert uvit.main(["--sample", run, "--n", "2", "--sampler", "dpm-solver"]) == 0  # and another's own steps
    assert grids[-1][0] == "samples-dpm-solver-50-g0-s0-n2.png"
    capsys.readouterr()
    for arguments, words in (
        (["--sample", run, "--label", "10"], "label 10 is not a class"),
        (["--sample", str(clean)], "is not the folder of a uvit.py run"),
        (["--sample", "nowhere"], "is not the folder of a uvit.py run"),
        (["--sample", run, "--n", "0"], "n must be positive"),
        (["--sample", run, "--guidance", "nan"], "guidance"),
        (["--sample", run, "--guidance", "1e300"], "guidance must lie in [-1, 100]"),
        (["--sample", ""], "sample must not be empty"),
        (["--vae", ""], "vae must not be empty"),
        (["--fid-weights", ""], "fid_weights must not be empty"),
        (["--label", "3"], "label 3 is for --sample RUN"),
        (["--n", "4"], "n 4 is for --sample RUN"),
        (["--sample", "run", "--epochs", "3"], "epochs 3 is not heeded by --sample: leave it out"),
        (["--sample", "run", "--alpha-min", "0.5"], "alpha_min 0.5 is not heeded by --sample"),
        (["--sample", "run", "--fid-samples", "64"], "fid_samples 64 is not heeded by --sample"),
    ):
        assert uvit.main(arguments) == 2
        error = capsys.readouterr().err
        assert words in error and len(error.strip().splitlines()) == 1
    held = json.loads((config.folder / "config.json").read_text())
    (config.folder / "config.json").write_text(json.dumps(held | {"alpha_min": 0.2, "heads": 1, "data": 3}))
    assert uvit.main(["--sample", run, "--n", "20"]) == 0  # the checkpoint says what was trained
    assert torch.equal(grids[-1][1], grids[0][1][:20]) and run in capsys.readouterr().out
    (config.folder / "checkpoint.pt").write_text("hello")
    assert uvit.main(["--sample", run]) == 2
    assert "missing, damaged or not of uvit.py" in capsys.readouterr().err


def test_guidance_needs_a_run_with_classes(clean, capsys):
    config = uvit.Config(**TINY_UVIT)
    uvit.train(config)
    capsys.readouterr()
    for flag in (["--guidance", "0.5"], ["--label", "0"]):
        assert uvit.main(["--sample", str(config.folder), *flag]) == 2
        assert "without --conditional" in capsys.readouterr().err
