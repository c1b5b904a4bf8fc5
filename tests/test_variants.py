"""Every shortcut x ← a·x + b·f(x): schedules, where they act, constants, learned weights, stochastic depth, lists of α_min."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from conftest import TINY, TINY_RESNET, TINY_UVIT, flags
from hypothesis import given
from hypothesis import strategies as st
from test_cli import complaint
from test_equations import autoencoder, branches_and_input, pictures
from test_resnet_decay import network as resnet
from test_uvit import TIMES
from test_uvit import network as uvit_network
from test_uvit import pictures as noisy

import mae
import rank
import resnet_decay
import uvit

SCRIPTS = [mae, uvit, resnet_decay]
TINIES = {"mae": TINY, "uvit": TINY_UVIT, "resnet_decay": TINY_RESNET}
SHORT = {  # a few steps; the gradient reaches an untrained autoencoder's encoder in its third
    "mae": dict(epochs=1, limit=100, warmup_epochs=0, batch_size=20),
    "uvit": dict(epochs=1, limit=100),
    "resnet_decay": dict(epochs=1, limit=100),
}
DEPTHS = st.integers(1, 5)
VARIANTS = st.one_of(
    st.fixed_dictionaries(
        {"alpha_min": st.floats(0.1, 1), "schedule": st.sampled_from(["linear", "cosine", "constant"]),
         "decay_on": st.sampled_from(["both", "attn", "mlp"])}
    ),
    st.fixed_dictionaries({"shortcut": st.sampled_from(["scale-both", "scale-branch"]), "scale": st.floats(0.1, 1)}),
)  # fmt: skip


def expected_pairs(blocks, alpha_min=1.0, schedule="linear", decay_on="both", shortcut="decay", scale=1.0):
    """(a, b) of every shortcut, made here: NumPy, one shortcut after the other."""
    if shortcut != "decay":
        return [(scale if shortcut == "scale-both" else 1.0, scale)] * (2 * blocks)
    count = 2 * blocks if decay_on == "both" else blocks
    fallen = [i / max(1, count - 1) for i in range(count)]
    if schedule == "cosine":
        fallen = [np.sin(np.pi / 2 * part) ** 2 for part in fallen]
    if schedule == "constant":
        fallen = [1.0] * count
    falling = iter([1 - (1 - alpha_min) * part for part in fallen])
    decays = {"both": (True, True), "attn": (True, False), "mlp": (False, True)}[decay_on]
    return [(next(falling) if decayed else 1.0, 1.0) for _ in range(blocks) for decayed in decays]


def expansion(first, outputs, pairs):
    """Eq. 4 with two weights: x_L = (Π a_l) x_0 + Σ_l (Π_{i>l} a_i) b_l f_l(x_l)."""
    total = math.prod(a for a, _ in pairs) * first
    for l, output in enumerate(outputs):
        total = total + math.prod(a for a, _ in pairs[l + 1 :]) * pairs[l][1] * output
    return total


@given(DEPTHS, VARIANTS, st.integers(0, 2**16))
def test_every_variant_is_its_expansion(depth, variant, seed):
    model = autoencoder(depth, seed=seed, unet=False, **variant)
    first, outputs, last = branches_and_input(model, pictures(seed=seed))
    pairs = expected_pairs(depth, **variant)
    assert len(outputs) == len(pairs)
    torch.testing.assert_close(last, expansion(first, outputs, pairs), rtol=1e-9, atol=1e-9)


@given(st.sampled_from([2, 4]), VARIANTS, st.integers(0, 2**16))
def test_every_variant_of_the_u_vit_is_its_expansion(depth, variant, seed):
    """Over the whole depth, with joins that pass x through."""
    model = uvit_network(depth, seed=seed, **variant)
    first, outputs = [], []
    model.blocks[0].register_forward_pre_hook(lambda module, arguments: first.append(arguments[0]))
    with torch.no_grad():
        for block in model.blocks:
            if block.join is not None:
                block.join.weight.copy_(torch.cat([torch.eye(16), torch.zeros(16, 16)], dim=1))
                block.join.bias.zero_()
            for branch in (block.attn, block.mlp):
                branch.register_forward_hook(lambda module, arguments, output: outputs.append(output))
        *_, last = model.tokens(noisy(seed=seed), TIMES)
    pairs = expected_pairs(depth + 1, **variant)
    assert len(outputs) == len(pairs)
    torch.testing.assert_close(last, expansion(first[0], outputs, pairs), rtol=1e-9, atol=1e-9)


@given(st.integers(8, 16), VARIANTS)
def test_every_variant_of_a_resnets_block_is_two_weights(blocks, variant):
    """relu(a·P(x) + b·f(x)); one shortcut a block, so that nothing is told where to decay."""
    variant = {name: value for name, value in variant.items() if name != "decay_on"}
    model = resnet(blocks, **variant)
    if "shortcut" in variant:
        pairs = expected_pairs(blocks, **variant)[:blocks]
    else:
        pairs = expected_pairs(blocks, **variant, decay_on="attn")[::2]
    assert len(model.blocks) == blocks
    for block, (a, b) in zip(model.blocks, pairs):
        x = torch.rand(2, block.branch[0].in_channels, 4, 4, generator=torch.Generator().manual_seed(1)).double()
        with torch.no_grad():
            expected = (a * block.shortcut(x) + b * block.branch(x)).clamp(min=0)
            torch.testing.assert_close(block(x), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("blocks", [8, 12])
def test_a_resnets_cosine_has_the_ends_of_the_line_and_its_middle(blocks):
    line, cosine = (resnet_decay.shortcut_weights(blocks, 0.4, schedule=name) for name in ("linear", "cosine"))
    assert cosine[0] == 1 and cosine[-1] == 0.4
    assert sum(cosine) == pytest.approx(sum(line))  # point symmetric about the middle
    assert cosine[1] > line[1] and cosine[-2] < line[-2]


def forward_and_gradient(script, dtype=torch.float64, like=None, **settings):
    """What a network of that script with random parameters computes, and all its gradients but those of learned weights."""
    if script is mae:
        model, noise = autoencoder(4, **settings), torch.rand(2, 16, generator=torch.Generator().manual_seed(3))
        inputs = (pictures(), noise)
    elif script is uvit:
        model, inputs = uvit_network(4, **settings), (noisy(), TIMES)
    else:
        model, inputs = resnet(8, **settings), (pictures() * 255,)
    model = model.to(dtype)
    if like is not None:
        model.load_state_dict(like.state_dict(), strict=False)
        learned_at(model, like.alphas)
    output = model(*(x.to(dtype) for x in inputs))
    output.square().sum().backward()
    return model, [output.detach(), *(p.grad for name, p in model.named_parameters() if "logit" not in name)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_branch_scaled_by_1_and_no_decay_are_the_plain_network_to_the_bit(script):
    _, plain = forward_and_gradient(script, torch.float32, alpha_min=1.0)
    _, branch = forward_and_gradient(script, torch.float32, shortcut="scale-branch", scale=1.0)
    _, both = forward_and_gradient(script, torch.float32, shortcut="scale-both", scale=1.0)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain, branch, both, strict=True))


def learned_at(model, alphas):
    """Set a model's learned shortcuts to these weights."""
    alphas = iter(torch.logit(torch.tensor(alphas, dtype=torch.float64)))
    blocks = model.encoder if isinstance(model, mae.MaskedAutoencoder) else model.blocks
    with torch.no_grad():
        for block in blocks:
            if isinstance(block, resnet_decay.Block):
                block.logit.copy_(next(alphas))
            else:
                block.logits.copy_(torch.stack([next(alphas), next(alphas)]))


@pytest.mark.parametrize("script", SCRIPTS)
def test_learned_weights_start_at_the_root_of_a_half_and_at_fixed_values_are_that_schedule(script):
    fixed, expected = forward_and_gradient(script, alpha_min=0.4)
    untouched = {mae: lambda: autoencoder(4, schedule="learned", random=False),
                 uvit: lambda: uvit_network(4, schedule="learned", random=False),
                 resnet_decay: lambda: resnet(8, schedule="learned")}[script]()  # fmt: skip
    assert untouched.alphas == pytest.approx([0.5**0.5] * len(fixed.alphas), rel=1e-6)
    model, found = forward_and_gradient(script, like=fixed, schedule="learned")
    assert model.alphas == pytest.approx(fixed.alphas, rel=1e-12)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    logits = [p for name, p in model.named_parameters() if "logit" in name]
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in logits)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_gradient_of_a_learned_weight_is_that_of_finite_differences(script):
    def loss_at(value):
        model = {mae: autoencoder, uvit: uvit_network}.get(script, resnet)(
            8 if script is resnet_decay else 2, schedule="learned"
        )
        count = len(model.alphas)
        learned_at(model, [0.7] * (count - 3) + [value] + [0.7] * 2)
        if script is mae:  # the loss itself is in float32
            return model, list(model.layer_tokens(pictures()))[-1].square().mean()
        inputs = (noisy(), TIMES) if script is uvit else (pictures() * 255,)
        return model, model(*inputs).square().mean()

    model, loss = loss_at(0.6)
    loss.backward()
    logits = torch.cat([p.grad.flatten() for name, p in model.named_parameters() if "logit" in name])
    up, down = (loss_at(0.6 + step)[1].item() for step in (1e-5, -1e-5))
    assert logits[-3].item() == pytest.approx((up - down) / 2e-5 * 0.6 * 0.4, rel=1e-5)  # dα/dlogit = α(1 − α)


# ---- Stochastic depth -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script, columns, of", [(mae, 8, 2), (uvit, 6, 2), (resnet_decay, 8, 1)])
def test_branches_are_dropped_at_the_rate_of_their_depth_and_are_whole_on_average(script, columns, of):
    noise = torch.rand(20_000, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factors = script.drop_factors(noise, 0.4)
    blocks = columns // of
    for column in range(columns):
        chance = 0.4 * (column // of + 1) / blocks
        assert sorted(set(factors[:, column].tolist())) == pytest.approx([0, 1 / (1 - chance)])
        assert (factors[:, column] == 0).double().mean().item() == pytest.approx(chance, abs=0.012)  # 3 deviations
        assert factors[:, column].mean().item() == pytest.approx(1, abs=0.03)
    assert torch.equal(script.drop_factors(noise, 0.0), torch.ones_like(noise))


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_drops_the_block_is_the_plain_one_and_its_expectation_is_too(script):
    """E[block] over one dropped branch: the mean over dropped and kept, weighted by their chances, in closed form."""
    generator = torch.Generator().manual_seed(0)
    if script is resnet_decay:
        block, x = resnet(8, alpha_min=0.5).blocks[1], torch.rand(3, 4, 4, 4, generator=generator).double()
        value = lambda drop: resnet_decay.weighted_sum(block.weights(drop), block.shortcut(x), block.branch(x))
        ones = torch.ones(3).double()
    else:
        model = autoencoder(4, 0.5) if script is mae else uvit_network(4, 0.5)
        block = (model.encoder if script is mae else model.blocks)[1]
        x = torch.rand(3, 5, 16, generator=generator).double()
        value = lambda drop: block(x, drop=drop)
        ones = torch.ones(3, 2).double()
    with torch.no_grad():
        plain = value(None)
        torch.testing.assert_close(value(ones), plain, rtol=1e-12, atol=1e-12)
        dropped, kept = ones.clone(), ones.clone()
        dropped[..., -1] = 0
        kept[..., -1] = 1 / (1 - 0.3)
        if script is resnet_decay:  # one branch a block: the last column is the last sample
            dropped, kept = 0 * ones, ones / (1 - 0.3)
        torch.testing.assert_close(0.3 * value(dropped) + 0.7 * value(kept), plain, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(value(dropped), plain)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dropped_branch_leaves_its_sample_alone_what_it_was(script):
    """Every branch of one sample dropped: it is Π α of its input; its neighbour is untouched."""
    if script is resnet_decay:
        model, inputs = resnet(8, alpha_min=0.5), (pictures(2) * 255,)
        model.eval()
        run, columns = lambda drops: model.features(inputs[0], drops), 8
    elif script is mae:
        model, images = autoencoder(4, 0.5), pictures(2)
        run, columns = lambda drops: list(model.encode(model.patches(images), drops=drops))[-1], 8
    else:
        model, images = uvit_network(4, 0.5), noisy(2)
        run, columns = lambda drops: list(model.tokens(images, TIMES[:2], drops=drops))[-1], 10
    drops = torch.ones(2, columns).double()
    drops[0] = 0
    with torch.no_grad():
        plain, found = run(None), run(drops)
    torch.testing.assert_close(found[1], plain[1], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(found[0], plain[0])
    if script is mae:
        x_0 = model.embed(model.patches(images)) + model.positions
        expected = math.prod(model.alphas) * torch.cat([model.cls.expand(2, 1, -1), x_0], dim=1)[0]
        torch.testing.assert_close(found[0], expected, rtol=1e-10, atol=1e-12)


# ---- auto -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [mae, uvit])
def test_auto_has_the_best_vit_bs_cumulative_decay_whatever_the_schedule(script):
    blocks = 12
    depth = blocks if script is mae else blocks - 1
    sizes = dict(width=16, heads=2, alpha_min="auto")
    if script is mae:
        assert script.Config(depth=depth, **sizes).alpha_min == pytest.approx(0.6, abs=0.005)
        assert (
            script.Config(depth=depth, **sizes | {"width": 96}).alpha_min
            == script.Config(depth=depth, **sizes).alpha_min
        )
        found = [script.Config(depth=depth, **sizes).alpha_min for depth in range(2, 40, 2)]
        assert all(shallow < deep for shallow, deep in zip(found, found[1:]))
    for variant in ({"schedule": "cosine"}, {"schedule": "constant"}, {"decay_on": "attn"}, {"decay_on": "mlp"}):
        config = script.Config(depth=12, **sizes, **variant)
        pairs = expected_pairs(12 if script is mae else 13, config.alpha_min, **variant)
        assert rank.alpha_eff([a for a, _ in pairs]) == pytest.approx(3.6e-3, rel=0.01)  # α_min has four digits
    assert script.Config(depth=12, schedule="constant", **sizes).alpha_min == pytest.approx(
        3.6e-3 ** (1 / (24 if script is mae else 26)), abs=5e-5
    )


# ---- Runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_learned_weights_move_and_are_logged_and_have_no_weight_decay(script, clean, no_probes):
    settings = TINIES[script.SCRIPT] | {"schedule": "learned", "lr": 0.05, "out": "run"}
    result = script.train(script.Config(**settings))
    records = [json.loads(line) for line in (clean / "run/metrics.jsonl").read_text().splitlines()]
    assert len(records) == 2 and all(len(r["alphas"]) >= 4 and all(0 < a < 1 for a in r["alphas"]) for r in records)
    assert records[0]["alphas"] != records[1]["alphas"]
    if script is not uvit:  # there the averaged weights are measured
        assert result["alpha_eff"] == pytest.approx(rank.alpha_eff(records[-1]["alphas"]))
    saved = torch.load(clean / "run/checkpoint.pt", weights_only=True)["optimizer"]["param_groups"]
    decays = {}
    names = [name for name, _ in script_model(script, script.Config(**settings)).named_parameters()]
    for group in saved:
        for number in group["params"]:
            decays[number] = group["weight_decay"]
    assert len(decays) == len(names)
    learned = sum("logit" in name for name in names)
    assert sum(decay == 0 for decay in decays.values()) >= learned
    if script is not mae:  # mae's vectors have none anyway
        assert sum(decay == 0 for decay in decays.values()) == learned


def script_model(script, config):
    if script is mae:
        return mae.MaskedAutoencoder(config, 1)
    return uvit.UViT(config, 1) if script is uvit else resnet_decay.ResNet(config, 1, 10)


@pytest.mark.parametrize("script", SCRIPTS)
def test_variants_train_to_weights_of_their_own_and_dropped_branches_to_the_same_ones_twice(script, clean, no_probes):
    weights = {}
    variants = {
        "plain": {},
        "drop": {"drop_path": 0.5},
        "again": {"drop_path": 0.5},
        "both": {"shortcut": "scale-both"},
    }
    for name, variant in variants.items():
        config = script.Config(**TINIES[script.SCRIPT] | SHORT[script.SCRIPT] | variant | {"out": name})
        script.train(config)
        weights[name] = torch.load(clean / name / "checkpoint.pt", weights_only=True)["model"]
    same = lambda one, two: all(torch.equal(weights[one][name], weights[two][name]) for name in weights[one])
    assert same("drop", "again") and not same("plain", "drop") and not same("plain", "both")


@pytest.mark.parametrize("script", [mae, uvit])
def test_a_list_of_alpha_min_is_a_run_each_and_ends_with_their_comparison(script, clean, capsys, no_probes):
    arguments = flags(
        script, epochs=1, alpha_min=(1.0, 0.5), limit=100, **{"warmup_epochs": 0} if script is mae else {}
    )
    assert script.main(arguments) == 0
    out = capsys.readouterr().out
    names = [f"{script.SCRIPT}-digits-a{alpha}-s0" for alpha in ("1", "0.5")]
    results = [json.loads((clean / "runs" / name / "result.json").read_text()) for name in names]
    assert [result["alpha_min"] for result in results] == [1.0, 0.5]
    compared = json.loads((clean / f"runs/{script.SCRIPT}-digits-comparison.json").read_text())
    (group,) = compared.values()
    assert [row["alpha_min"] for row in group["rows"]] == [1.0, 0.5]
    assert (clean / f"runs/{script.SCRIPT}-digits-comparison.png").exists()
    assert out.count("\nresult ") == 2 and "pearson" in out
    assert script.main(arguments) == 0  # a finished study is shown
    assert capsys.readouterr().out.count("is finished") == 2
    grown = flags(
        script, epochs=1, alpha_min=(1.0,), seed=(0, 1), limit=100, **{"warmup_epochs": 0} if script is mae else {}
    )
    assert script.main(grown) == 0
    assert capsys.readouterr().out.count("is finished") == 1


@pytest.mark.parametrize("script", [mae, uvit])
def test_out_is_the_folder_of_one_run_and_the_parent_of_several(script):
    assert script.Study(out="here").runs[0].folder.name == "here"
    assert [str(run.folder) for run in script.Study(out="here", alpha_min=(1.0, 0.5)).runs] == [
        f"here/{script.SCRIPT}-digits-a1-s0", f"here/{script.SCRIPT}-digits-a0.5-s0",
    ]  # fmt: skip


@pytest.mark.parametrize("script", [mae, uvit])
def test_a_folder_that_holds_something_else_stops_the_list_before_it_begins(script, clean, capsys):
    (clean / f"runs/{script.SCRIPT}-digits-a0.5-s0").mkdir(parents=True)
    (clean / f"runs/{script.SCRIPT}-digits-a0.5-s0/letter.txt").write_text("dear")
    assert "not a run's folder" in complaint(capsys, *flags(script, alpha_min=(1.0, 0.5)), script=script)
    assert len(list((clean / "runs").iterdir())) == 1


@pytest.mark.parametrize("script", [mae, uvit])
def test_a_run_that_diverges_is_named_and_the_others_are_trained(script, clean, capsys, monkeypatch, no_probes):
    train = script.train

    def diverge(config):
        if config.alpha_min == 1:
            raise FloatingPointError("the loss is not finite at step 3")
        return train(config)

    monkeypatch.setattr(script, "train", diverge)
    assert (
        script.main(
            flags(script, epochs=1, limit=50, alpha_min=(1.0, 0.5), **{"warmup_epochs": 0} if script is mae else {})
        )
        == 1
    )
    shown = capsys.readouterr()
    assert shown.err == f"{script.SCRIPT}.py: {script.SCRIPT}-digits-a1-s0: the loss is not finite at step 3\n"
    assert "\nresult alpha_min=0.5" in shown.out


@pytest.mark.parametrize(
    "script, line, words",
    [(script, line, words) for script in SCRIPTS for line, words in [
        ("--shortcut residual", "shortcut must be one of decay, scale-both, scale-branch, not 'residual'"),
        ("--schedule step", "schedule must be one of linear, cosine, constant, learned, not 'step'"),
        ("--shortcut scale-both --schedule cosine", "schedule cosine is of --shortcut decay, not of scale-both"),
        ("--scale 0", "scale must lie in (0, 1], not 0"),
        ("--scale nan", "scale must lie in (0, 1], not nan"),
        ("--drop-path 1", "drop_path must lie in [0, 1), not 1"),
        ("--drop-path nan", "drop_path must lie in [0, 1), not nan"),
        ("--seed", "seed must list one value or more"),
    ]]
    + [(script, line, words) for script in (mae, uvit) for line, words in [
        ("--decay-on norm", "decay_on must be one of both, attn, mlp, not 'norm'"),
        ("--shortcut scale-branch --decay-on mlp", "decay_on mlp is of --shortcut decay"),
        ("--schedule learned --decay-on mlp", "decay_on must be both, not mlp"),
        ("--alpha-min", "alpha_min must list one value or more"),
        ("--alpha-min 1.0 1.5", "alpha_min must lie in [0, 1], or be auto, not 1.5"),
        ("--alpha-min 0.5 0.50", "digits-a0.5-s0 twice"),
        ("--alpha-min 1.0 0.5 --schedule learned", "twice"),
        ("--alpha-min 0.5 --seed 1 1", "digits-a0.5-s1 twice"),
    ]]
    + [(resnet_decay, "--schedule learned --no-decay-projections", "decay_projections must be True"),
       (uvit, "--sample runs/x --seed 0 1", "sample takes one seed")],
)  # fmt: skip
def test_a_variant_that_has_no_meaning_gets_one_line(script, line, words, clean, capsys):
    assert words in complaint(capsys, *line.split(), script=script)
    assert not list(clean.iterdir())


@pytest.mark.parametrize("script", [mae, uvit])
def test_a_list_that_names_a_run_twice_is_refused(script):
    for lists in ({"alpha_min": (0.5, 0.50)}, {"seed": (1, 1)}, {"alpha_min": (1.0, 0.5), "schedule": "learned"}):
        with pytest.raises(ValueError, match="twice"):
            script.Study(**lists)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_run_folder_tells_the_variant(script):
    name = lambda **settings: script.Config(**settings).folder.name
    blocks = "-b8" if script is resnet_decay else ""
    start = f"{script.SCRIPT}-digits{blocks}"
    assert name(alpha_min=0.5) == f"{start}-a0.5-s0"
    assert name(alpha_min=0.5, schedule="cosine") == f"{start}-a0.5-cosine-s0"
    assert name(alpha_min=0.5, schedule="learned") == f"{start}-learned-s0"
    assert name(shortcut="scale-both") == f"{start}-scale-both0.7071-s0"
    if script is not resnet_decay:
        assert name(alpha_min=0.5, decay_on="mlp") == f"{start}-a0.5-mlp-s0"


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_grouped_and_fits_two_screens(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        script.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 100
    titles = [line.strip("- ") for line in lines if line.endswith("---") and line.strip("- ")]
    assert titles == [*script.GROUPS.values()]
    shown = " ".join(lines)
    for field in dataclasses.fields(script.Study):
        assert f"--{field.name.replace('_', '-')}" in shown
