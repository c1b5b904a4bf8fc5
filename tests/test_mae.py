"""mae.py: the masked autoencoder against independent oracles, and a run from its config to its result."""

import dataclasses
import json
import math
from functools import partial

import numpy as np
import pytest
import timm
import torch
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from test_equations import autoencoder, pictures
from torch import nn

import mae
import probe

GRIDS = st.tuples(st.integers(1, 5), st.integers(1, 5))


def noise_for(model, count=2, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, len(model.positions), generator=generator)


# ---- Patches and masks ----------------------------------------------------------------------------------------------


@given(GRIDS, st.integers(1, 4), st.integers(1, 4))
def test_unpatchify_inverts_patchify(grid, channels, patch):
    size = (grid[0] * patch, grid[1] * patch)
    images = pictures(2, channels, size)
    patches = mae.patchify(images, patch)
    assert patches.shape == (2, grid[0] * grid[1], patch * patch * channels)
    assert torch.equal(mae.unpatchify(patches, patch, size), images)


@given(GRIDS, st.data())
def test_one_pixel_moves_one_token(grid, data):
    patch = 3
    size = (grid[0] * patch, grid[1] * patch)
    y, x = data.draw(st.integers(0, size[0] - 1)), data.draw(st.integers(0, size[1] - 1))
    images = pictures(1, 2, size)
    moved = images.clone()
    moved[0, 1, y, x] += 1
    changed = (mae.patchify(moved, patch) != mae.patchify(images, patch)).any(dim=2)[0].nonzero().flatten().tolist()
    assert changed == [y // patch * grid[1] + x // patch]  # row by row


@given(st.integers(2, 60), st.data())
def test_kept_and_masked_partition_the_patches(n, data):
    kept_count = data.draw(st.integers(1, n - 1))
    noise = torch.rand(3, n, generator=torch.Generator().manual_seed(n))
    kept, masked, restore = mae.random_mask(noise, kept_count)
    assert kept.shape == (3, kept_count)
    both = torch.cat([kept, masked], dim=1)
    assert torch.equal(both.sort(dim=1).values, torch.arange(n).expand(3, n))
    assert torch.equal(both.gather(1, restore), torch.arange(n).expand(3, n))
    assert (noise.gather(1, kept).amax(1) <= noise.gather(1, masked).amin(1)).all()


def test_every_patch_is_kept_equally_often():
    noise = torch.rand(20_000, 16, generator=torch.Generator().manual_seed(0))
    kept, _, _ = mae.random_mask(noise, 4)
    shares = torch.bincount(kept.flatten(), minlength=16) / 20_000
    assert (shares - 0.25).abs().max() < 0.015  # five standard deviations


def test_unshuffle_puts_an_order_revealing_input_back_in_place():
    noise = torch.rand(5, 12, generator=torch.Generator().manual_seed(3))
    kept, masked, restore = mae.random_mask(noise, 5)
    place = torch.arange(12.0).expand(5, 12)[..., None]
    tokens = torch.cat([torch.full((5, 1, 1), -7.0), mae.take(place, kept)], dim=1)
    back = mae.unshuffle(tokens, torch.tensor([-1.0]), restore)
    assert (back[:, 0] == -7).all()
    assert torch.equal(back[:, 1:].scatter(1, masked[..., None], -1.0), back[:, 1:])
    assert torch.equal(mae.take(back[:, 1:], kept), mae.take(place, kept))


def test_normalized_patches_have_mean_zero_and_deviation_one_and_can_be_undone():
    patches = 40 * pictures(3, 3, (8, 8)).flatten(2)[:, :, :48] + 100
    target, mean, deviation = mae.normalized(patches)
    assert target.dtype == torch.float32
    torch.testing.assert_close(target.mean(2), torch.zeros(3, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(target.std(2), torch.ones(3, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close((target * deviation + mean).double(), patches, rtol=1e-5, atol=1e-4)


def test_constant_patches_are_finite_targets():
    target, _, _ = mae.normalized(torch.full((1, 4, 12), 0.3, dtype=torch.bfloat16))
    assert torch.isfinite(target).all() and target.abs().max() < 1e-3


@given(GRIDS, st.sampled_from([4, 8, 12, 64]))
def test_positions_are_he_et_als_sine_and_cosine(grid, width):
    positions = mae.sincos_positions(grid, width)
    assert positions.shape == (grid[0] * grid[1], width)
    for place in range(len(positions)):
        y, x = divmod(place, grid[1])
        omega = 1 / 10000 ** (np.arange(width // 4) / (width / 4))
        expected = np.concatenate([np.sin(x * omega), np.cos(x * omega), np.sin(y * omega), np.cos(y * omega)])
        np.testing.assert_allclose(positions[place].numpy(), expected, atol=1e-6)
    assert len(torch.unique(positions, dim=0)) == len(positions)


# ---- The model against oracles --------------------------------------------------------------------------------------


def plain_vit(model, channels):
    """timm's Vision Transformer with the autoencoder's encoder weights: plain pre-norm blocks, no norm at the end."""
    width, depth, patch = model.cls.numel(), len(model.encoder), model.patch
    vit = timm.models.VisionTransformer(
        img_size=model.size, patch_size=patch, in_chans=channels, num_classes=0, embed_dim=width, depth=depth,
        num_heads=model.encoder[0].attn.heads, norm_layer=partial(nn.LayerNorm, eps=1e-6), global_pool="",
    ).double()  # fmt: skip
    vit.norm = nn.Identity()
    with torch.no_grad():
        kernel = model.embed.weight.unflatten(1, (patch, patch, channels)).permute(0, 3, 1, 2)
        vit.patch_embed.proj.weight.copy_(kernel)
        vit.patch_embed.proj.bias.copy_(model.embed.bias)
        vit.cls_token.copy_(model.cls.expand(1, 1, -1))
        vit.pos_embed.copy_(torch.cat([torch.zeros(1, width).double(), model.positions])[None])
        for theirs, ours in zip(vit.blocks, model.encoder):
            names = {"mlp.0": "mlp.fc1", "mlp.2": "mlp.fc2"}
            state = {}
            for name, value in ours.state_dict().items():
                module, parameter = name.rsplit(".", 1)
                state[f"{names.get(module, module)}.{parameter}"] = value
            theirs.load_state_dict(state)
    return vit.eval()


@pytest.mark.parametrize("channels, size", [(3, (16, 16)), (1, (8, 20))])
def test_alpha_min_one_equals_timms_plain_vit(channels, size):
    model = autoencoder(4, 1.0, channels=channels, image_size=size)
    images = pictures(2, channels, size)
    *_, ours = model.layer_tokens(images)
    theirs = plain_vit(model, channels).forward_features(images)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_alpha_below_one_does_not_equal_the_plain_vit():
    model = autoencoder(4, 0.6)
    *_, ours = model.layer_tokens(pictures())
    assert (ours - plain_vit(model, 3).forward_features(pictures())).abs().max() > 0.1


def test_images_are_standardised_with_the_data_sets_mean_and_deviation():
    model = autoencoder()
    model.mean.copy_(torch.tensor([10.0, 20, 30]))
    model.std.copy_(torch.tensor([2.0, 4, 5]))
    images = 255 * pictures()
    expected = torch.stack([(images[:, c] - (10, 20, 30)[c]) / (2, 4, 5)[c] for c in range(3)], dim=1)
    torch.testing.assert_close(model.patches(images), mae.patchify(expected, 4), rtol=1e-12, atol=1e-12)


def test_masked_pixels_do_not_reach_the_encoder():
    model = autoencoder()
    noise = noise_for(model)
    patches = model.patches(pictures()).requires_grad_()
    kept, masked, _ = mae.random_mask(noise, model.kept)
    *_, last = model.encode(patches, kept)
    assert last.shape[1] == 1 + model.kept
    (gradient,) = torch.autograd.grad(last.square().sum(), patches)
    assert (mae.take(gradient, masked) == 0).all()
    assert (mae.take(gradient, kept).abs().amax(2) > 0).all()


def test_encoder_sees_the_kept_patches_at_their_positions():
    """Encoding all patches under a mask that keeps all, in a shuffled order, gives the same tokens in that order."""
    model = autoencoder()
    patches = model.patches(pictures())
    order = torch.randperm(16, generator=torch.Generator().manual_seed(4)).expand(2, 16)
    *_, whole = model.encode(patches)
    *_, shuffled = model.encode(patches, order)
    torch.testing.assert_close(shuffled[:, 1:], mae.take(whole[:, 1:], order), rtol=1e-10, atol=1e-10)


def test_loss_is_he_et_als_mean_over_masked_patches():
    model = autoencoder()
    images, noise = pictures(), noise_for(model)
    kept, _, restore = mae.random_mask(noise, model.kept)
    prediction = model.decode(list(model.encode(model.patches(images), kept)), restore).float()
    target = model.patches(images).float()
    target = (target - target.mean(2, keepdim=True)) / (target.var(2, keepdim=True) + 1e-6).sqrt()
    mask = torch.ones(2, 16).scatter(1, kept, 0.0)
    expected = ((prediction - target).square().mean(2) * mask).sum() / mask.sum()
    torch.testing.assert_close(model(images, noise), expected, rtol=1e-5, atol=1e-6)


def test_visible_patches_carry_no_gradient_from_the_loss():
    model = autoencoder()
    noise = noise_for(model)
    _, masked, _ = mae.random_mask(noise, model.kept)
    outputs = []
    model.head.register_forward_hook(lambda module, arguments, output: outputs.append(output))
    loss = model(pictures(), noise)
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert gradient.shape[:2] == masked.shape  # neither visible patches nor the class token are predicted
    assert (gradient.abs().amax(2) > 0).all()


def test_first_loss_is_the_targets_variance():
    """The prediction starts at zero, so the loss starts at the mean square of a normalised patch: (p − 1)/p."""
    model = autoencoder(random=False)
    p = model.head.out_features
    assert model(255 * pictures(), noise_for(model)).item() == pytest.approx((p - 1) / p, abs=1e-5)


@pytest.mark.parametrize("depth, decoder_depth", [(2, 3), (6, 3), (6, 5), (8, 2)])
def test_skips_pair_deepest_first(depth, decoder_depth):
    """The Lth, …, 4th, 2nd block feed decoder blocks 1, 2, …; what has no partner is left out."""
    model = autoencoder(depth, decoder_depth=decoder_depth)
    assert len(model.skips) == min(depth // 2, decoder_depth)
    taken, layers = [], []
    for skip in model.skips:
        skip.register_forward_pre_hook(lambda module, arguments: taken.append(arguments[1]))
    for block in model.encoder:
        block.register_forward_hook(lambda module, arguments, output: layers.append(output))
    model(pictures(), noise_for(model))
    for i, layer in enumerate(taken):
        assert torch.equal(layer, layers[depth - 1 - 2 * i])


def test_skip_sees_kept_tokens_in_place_and_its_token_where_masked():
    model = autoencoder()
    noise = noise_for(model)
    kept, _, restore = mae.random_mask(noise, model.kept)
    layers = list(model.encode(model.patches(pictures()), kept))
    skip, stream = model.skips[0], torch.randn(2, 17, 12, dtype=torch.float64)
    placed = skip.token.expand(2, 17, -1).clone()
    placed[:, 0] = layers[-1][:, 0]
    for sample in range(2):
        placed[sample, 1 + kept[sample]] = layers[-1][sample, 1:]
    expected = stream + skip.join(torch.cat([stream, placed], dim=-1))  # as written, all places joined
    torch.testing.assert_close(skip(stream, layers[-1], restore), expected, rtol=1e-12, atol=1e-12)


def test_decoder_has_the_bottleneck_by_skips_alone_and_every_parameter_gets_gradient():
    model = autoencoder(6)
    model(pictures(), noise_for(model)).backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().max() == 0]
    assert silent == []
    with torch.no_grad():
        for skip in model.skips:
            skip.join[-1].weight.zero_()
    kept, _, restore = mae.random_mask(noise_for(model), model.kept)
    one, other = (model.decode(list(model.encode(model.patches(pictures(seed=s)), kept)), restore) for s in (1, 2))
    assert torch.equal(one, other)


def test_without_unet_the_decoder_is_he_et_als():
    """Embedded last layer, mask token where masked, positions, blocks, norm, prediction; nothing else."""
    model = autoencoder(3, unet=False)
    assert len(model.skips) == 0
    noise = noise_for(model)
    kept, masked, restore = mae.random_mask(noise, model.kept)
    layers = list(model.encode(model.patches(pictures()), kept))
    x = model.decoder_embed(layers[-1])
    full = torch.empty(2, 16, 12, dtype=torch.float64)
    for image in range(2):
        full[image, kept[image]] = x[image, 1:]
        full[image, masked[image]] = model.mask_token
    x = torch.cat([x[:, :1], full + mae.sincos_positions((4, 4), 12)], dim=1)
    for block in model.decoder:
        x = block(x)
    expected = model.head(model.decoder_norm(x))[:, 1:]
    torch.testing.assert_close(model.decode(layers, restore), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("constant", [False, True])
def test_loss_and_gradients_are_finite_in_bfloat16(constant):
    model = autoencoder().float()
    images = torch.full((2, 3, 16, 16), 77.0) if constant else 255 * pictures().float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(images, noise_for(model))
    loss.backward()
    assert loss.dtype == torch.float32 and torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_perfect_prediction_reconstructs_the_image():
    model = autoencoder()
    model.mean.fill_(120.0)
    model.std.fill_(60.0)
    images, noise = 255 * pictures(), noise_for(model)
    model.decode = lambda layers, restore: mae.normalized(model.patches(images))[0]
    masked, predicted = model.reconstruct(images, noise)
    torch.testing.assert_close(predicted, images, rtol=0, atol=0.01)
    kept, hidden, _ = mae.random_mask(noise, model.kept)
    patches, original = mae.patchify(masked, 4), mae.patchify(images, 4)
    torch.testing.assert_close(mae.take(patches, kept), mae.take(original, kept), rtol=0, atol=1e-5)
    assert (mae.take(patches, hidden) == 120).all()


def test_reconstruction_keeps_visible_patches_whatever_the_prediction():
    model = autoencoder()
    model.mean.fill_(120.0)
    model.std.fill_(60.0)
    images, noise = 255 * pictures(), noise_for(model)
    _, predicted = model.reconstruct(images, noise)
    kept, hidden, _ = mae.random_mask(noise, model.kept)
    difference = (mae.patchify(predicted, 4) - mae.patchify(images, 4)).abs()
    assert mae.take(difference, kept).max() < 1e-5
    assert mae.take(difference, hidden).max() > 1


# ---- Config ---------------------------------------------------------------------------------------------------------


def test_recipes_fill_what_is_not_given():
    config = mae.Config(data="cifar100", patch_size=8)
    assert config.image_size == (32, 32) and config.patch_size == 8 and config.width == 384
    paper = mae.Config(data="some/folder")
    sizes = (paper.width, paper.depth, paper.heads, paper.decoder_width, paper.decoder_depth, paper.decoder_heads)
    assert sizes == (768, 12, 12, 512, 8, 16)
    settings = (paper.epochs, paper.lr, paper.warmup_epochs, paper.weight_decay, paper.betas, paper.mask_ratio)
    assert settings == (800, 1.5e-4, 40, 0.05, (0.9, 0.95), 0.75)
    assert mae.Config(data="some/folder", recipe="cifar", model="vit-ti").width == 192


@pytest.mark.parametrize("recipe", mae.RECIPES)
@pytest.mark.parametrize("model", mae.MODELS)
def test_every_recipe_takes_every_model(recipe, model):
    config = mae.Config(recipe=recipe, model=model)
    assert config.kept == config.patches // 4


def test_characters_are_not_mirrored_by_default():
    flips = {name: mae.Config(data=name).flip for name in mae.RECIPE_OF}
    assert flips.keys() == {"digits", *probe.NAMED_SETS}
    assert {name for name, flip in flips.items() if flip} == {"fashion-mnist", "cifar10", "cifar100", "stl10"}


@given(st.integers(1, 9), st.integers(1, 20))
def test_mask_ratio_keeps_what_decimal_arithmetic_says(tenths, side):
    if side * side * (10 - tenths) >= 10 and side > 1:
        config = mae.Config(image_size=(side,), patch_size=1, mask_ratio=tenths / 10)
        assert config.kept == side * side * (10 - tenths) // 10


def test_auto_chooses_alpha_min_by_depth():
    assert mae.Config(depth=12, alpha_min="auto").alpha_min == pytest.approx(0.600, abs=0.005)
    assert mae.Config(depth=24, alpha_min="auto").alpha_min > 0.7


@given(st.floats(0, 20), st.integers(1, 4096))
def test_learning_rate_warms_up_linearly_and_falls_as_a_cosine(epoch, batch):
    config = mae.Config(epochs=20, warmup_epochs=5, lr=1e-3)
    peak = 1e-3 * batch / 256
    expected = peak * epoch / 5 if epoch < 5 else peak * (math.cos(math.pi * (epoch - 5) / 15) + 1) / 2
    assert mae.learning_rate(config, epoch, batch) == pytest.approx(expected, rel=1e-9, abs=1e-15)


# ---- A run ----------------------------------------------------------------------------------------------------------


def test_a_run_leaves_what_it_promises_and_is_not_trained_again(clean, capsys):
    config = mae.Config(**{**TINY, "epochs": 3, "eval_every": 2})
    result = mae.train(config)
    folder = clean / "runs" / "mae-digits-a0.6-s0"
    assert config.folder.resolve() == folder
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "checkpoint.pt", "curves.png", "reconstruction.png", "result.json"}
    promised = (
        "script data alpha_min alpha_eff seed epochs steps loss seconds images_per_second peak_memory_bytes device torch utilisation "
        "effective_rank exp_effective_rank linear knn_weighted knn_majority best_layer per_layer baselines"
    )
    assert set(promised.split()) <= set(result)
    assert json.loads((folder / "result.json").read_text()) == result
    assert {name: set(scores) for name, scores in result["baselines"].items()} == {
        "pixels": {"linear", "knn_weighted"}, "untrained": {"linear", "knn_weighted"},
    }  # fmt: skip
    assert result["steps"] == 12 and [layer["layer"] for layer in result["per_layer"]] == [1, 2]
    assert result["linear"] == result["per_layer"][-1]["linear"]
    assert result["exp_effective_rank"] == pytest.approx(math.exp(result["effective_rank"]))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [4, 8, 12]
    assert ["linear" in record for record in records] == [False, True, True]
    assert records[-1]["loss"] < records[0]["loss"]
    torch.load(folder / "checkpoint.pt", weights_only=True)

    before = (folder / "checkpoint.pt").stat().st_mtime_ns
    capsys.readouterr()
    assert mae.train(config) == result
    assert "finished" in capsys.readouterr().out
    assert (folder / "checkpoint.pt").stat().st_mtime_ns == before


def test_the_seed_decides_everything_and_accumulation_nothing(clean):
    def weights(out, **changes):
        mae.train(mae.Config(**{**TINY, "out": out, **changes}))
        return torch.load(f"{out}/checkpoint.pt", weights_only=True)["model"]

    one, same, other = weights("one"), weights("same"), weights("other", seed=1)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    split = weights("split", accumulate=3)  # 50 images as 17, 17 and 16
    for name in one:
        torch.testing.assert_close(split[name], one[name], rtol=0, atol=1e-4)


def test_a_run_goes_on_within_an_epoch_to_the_same_bits(clean, monkeypatch):
    """Saved at every look at the clock (each 20 steps), stopped in the third save, gone on with: nothing differs."""
    settings = {**TINY, "batch_size": 4, "min_scale": 0.5, "flip": True}  # 50 steps an epoch
    mae.train(mae.Config(**settings, out="whole"))

    class Stopped(Exception):
        pass

    save, saves = mae.save_checkpoint, []

    def save_then_stop(*arguments):
        save(*arguments)
        saves.append(arguments)
        if len(saves) == 4:  # at step 0, 1, 21, 41
            raise Stopped

    monkeypatch.setattr(mae, "SAVE_SECONDS", 0)
    monkeypatch.setattr(mae, "save_checkpoint", save_then_stop)
    with pytest.raises(Stopped):
        mae.train(mae.Config(**settings, out="stopped"))
    assert saves[-1][-1]["step"] == 41
    monkeypatch.setattr(mae, "save_checkpoint", save)
    mae.train(mae.Config(**settings, out="stopped"))

    whole, stopped = (torch.load(f"{out}/checkpoint.pt", weights_only=True) for out in ("whole", "stopped"))
    assert all(torch.equal(whole["model"][name], stopped["model"][name]) for name in whole["model"])
    assert whole["state"]["loss"] == stopped["state"]["loss"]


def test_a_loss_that_is_not_finite_stops_the_run_in_one_line_and_keeps_the_checkpoint(clean, monkeypatch, capsys):
    from conftest import flags

    monkeypatch.setattr(mae.MaskedAutoencoder, "forward", lambda self, *_: self.embed.weight.sum() * math.nan)
    assert mae.main(flags(out="run")) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "not finite at step 0" in error and "--lr" in error
    assert torch.load("run/checkpoint.pt", weights_only=True)["state"]["step"] == 0


def test_non_square_images_and_a_plain_decoder_run(clean):
    result = mae.train(mae.Config(**{**TINY, "image_size": (16, 24), "unet": False, "depth": 3, "pool": "cls"}))
    assert len(result["per_layer"]) == 3 and math.isfinite(result["loss"])


def test_probing_leaves_the_model_untouched(clean):
    config = mae.Config(**TINY)
    data = probe.load_images("digits", "data", config.image_size, 60)
    model = mae.build(config, data.train, torch.device("cpu"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    scores = mae.evaluate(
        model, dataclasses.replace(data, test=data.test[:50], test_labels=data.test_labels[:50]), config
    )
    assert model.training and scores["best_layer"] in (1, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_training_makes_the_features_better_than_the_untrained_encoders(clean):
    """A minute's work in a few seconds: the last layer's probe gains 5 points or more on the built-in set."""
    config = mae.Config(
        epochs=6, warmup_epochs=1, limit=2000, batch_size=64, lr=8e-3, depth=4, width=32, heads=2, decoder_width=32,
        decoder_depth=2, decoder_heads=2, patch_size=4, eval_every=0,
    )  # fmt: skip
    result = mae.train(config)
    assert result["linear"] > result["baselines"]["untrained"]["linear"] + 5


@pytest.mark.parametrize("epochs, warmup", [(1, 0.25), (40, 10.0), (80, 20), (400, 20), (None, 20)])
def test_a_recipes_warm_up_is_a_quarter_of_the_epochs_at_most(epochs, warmup):
    assert mae.Config(recipe="cifar", epochs=epochs).warmup_epochs == warmup
    assert mae.Config(recipe="cifar", epochs=epochs, warmup_epochs=0.5).warmup_epochs == 0.5
