"""The paper's equations, in float64, on random networks: hypothesis chooses depth, α_min and sizes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mae
import rank

DEPTHS = st.integers(1, 7)
ALPHAS = st.floats(0, 1)


def autoencoder(depth=4, alpha_min=0.6, random=True, seed=0, channels=3, **settings):
    """A small float64 autoencoder; `random` fills every parameter, zero-initialised ones too."""
    sizes = dict(
        width=16, heads=2, decoder_width=12, decoder_heads=3, decoder_depth=3, patch_size=4, image_size=(16, 16)
    )
    config = mae.Config(depth=depth, alpha_min=alpha_min, **{**sizes, **settings})
    generator = torch.Generator().manual_seed(seed)
    model = mae.MaskedAutoencoder(config, channels, generator).double()
    if random:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def pictures(count=2, channels=3, size=(16, 16), seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, channels, *size, generator=generator, dtype=torch.float64)


def branches_and_input(model, images):
    """What the encoder adds up: x_0, every branch's output in order, and x_L."""
    outputs, inputs = [], []
    hooks = [model.encoder[0].register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))]
    for block in model.encoder:
        for branch in (block.attn, block.mlp):
            hooks.append(branch.register_forward_hook(lambda module, arguments, output: outputs.append(output)))
    *_, last = model.layer_tokens(images)
    for hook in hooks:
        hook.remove()
    return inputs[0], outputs, last


@given(DEPTHS, ALPHAS)
def test_schedule_falls_in_equal_steps_from_one_to_alpha_min(depth, alpha_min):
    alphas = mae.shortcut_weights(depth, alpha_min)
    assert len(alphas) == 2 * depth
    assert alphas[0] == 1 and alphas[-1] == alpha_min
    steps = [before - after for before, after in zip(alphas, alphas[1:])]
    assert all(step == pytest.approx((1 - alpha_min) / (2 * depth - 1), abs=1e-12) for step in steps)
    assert all(before >= after for before, after in zip(alphas, alphas[1:]))


@given(DEPTHS)
def test_alpha_min_of_one_is_the_plain_network(depth):
    assert mae.shortcut_weights(depth, 1.0) == [1.0] * (2 * depth)


def test_best_vit_b_has_cumulative_decay_3578e_6():
    assert rank.alpha_eff(mae.shortcut_weights(12, 0.6)) == pytest.approx(3.578e-3, abs=5e-7)
    assert rank.alpha_eff(mae.shortcut_weights(24, 0.8)) == pytest.approx(5.738e-3, abs=5e-7)


@given(DEPTHS, ALPHAS, st.integers(0, 2**16))
def test_encoder_is_equation_4(depth, alpha_min, seed):
    """x_L = (Π α_l) x_0 + Σ_l (Π_{i>l} α_i) f_l(x_l), from hooked branch outputs and a schedule made here."""
    model = autoencoder(depth, alpha_min, seed=seed, unet=False)
    first, outputs, last = branches_and_input(model, pictures(seed=seed))
    count = 2 * depth
    alphas = [1 - (1 - alpha_min) * i / (count - 1) for i in range(count)]
    expected = math.prod(alphas) * first
    for l, output in enumerate(outputs):
        expected = expected + math.prod(alphas[l + 1 :]) * output
    assert len(outputs) == count
    torch.testing.assert_close(last, expected, rtol=1e-10, atol=1e-10)


@given(DEPTHS, ALPHAS)
def test_untrained_encoder_only_scales_its_input(depth, alpha_min):
    """Every residual branch starts at zero: x_L = (Π α_l) x_0."""
    model = autoencoder(depth, alpha_min, random=False, unet=False)
    first, outputs, last = branches_and_input(model, pictures())
    assert all((output == 0).all() for output in outputs)
    product = math.prod(mae.shortcut_weights(depth, alpha_min))
    torch.testing.assert_close(last, product * first, rtol=1e-12, atol=1e-15)


@given(st.integers(1, 4), st.floats(0.2, 1))
def test_decaying_the_shortcut_is_growing_the_branches(depth, alpha_min):
    """With y_l = x_l / Π_{i<l} α_i a plain network whose branches are divided by Π_{i≤l} α_i has the same outputs."""
    model = autoencoder(depth, alpha_min, unet=False)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 0.0
    images = pictures()
    *_, decayed = model.layer_tokens(images)
    product = 1.0
    with torch.no_grad():
        for block in model.encoder:
            for i, last in enumerate((block.attn.proj, block.mlp[-1])):
                product *= block.pairs[i][0]
                block.pairs[i] = (1.0, 1.0)
                last.weight /= product
                last.bias /= product
    *_, plain = model.layer_tokens(images)
    torch.testing.assert_close(plain * product, decayed, rtol=1e-8, atol=1e-8)
