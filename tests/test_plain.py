"""A decayed encoder as a plain ViT and a plain ViT as a decayed encoder: timm and transformers are the oracles."""

import argparse
import json
import math
import re

import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import flags
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_cli import complaint, finished_run
from test_equations import autoencoder, pictures
from torch import nn

import mae
import probe

VARIANTS = [
    {}, {"schedule": "cosine"}, {"schedule": "constant"}, {"schedule": "learned"}, {"decay_on": "mlp"},
    {"shortcut": "scale-both"}, {"shortcut": "scale-branch"},
]  # fmt: skip


def export(clean, tmp_path_factory, capsys):
    """A finished run in run/, plain.safetensors and the folder hf/ made of it; what the export printed."""
    finished_run(mae, clean / "run", tmp_path_factory)
    capsys.readouterr()
    assert mae.main(["--export", "run", "--to", "plain.safetensors", "--to-hf", "hf"]) == 0
    return capsys.readouterr().out


@pytest.fixture
def exported(clean, tmp_path_factory, capsys):
    return export(clean, tmp_path_factory, capsys)


def trained_model():
    return mae.load_run(mae.Path("run"), mae.Study())[1]


def timm_vit(model, width, depth, heads, **more):
    """timm's plain ViT of the model's sizes."""
    sizes = dict(img_size=model.size, patch_size=model.patch, in_chans=len(model.mean), embed_dim=width)
    return timm.create_model(
        "vit_base_patch16_224", **sizes, depth=depth, num_heads=heads, num_classes=0, **more
    ).eval()


def whitened(images, mean=0.5, std=0.5):
    """Images in 0 … 255 as a plain ViT takes them."""
    return (images / 255 - torch.as_tensor(mean).view(-1, 1, 1)) / torch.as_tensor(std).view(-1, 1, 1)


def last_of(model, images):
    *_, last = model.layer_tokens(images)
    return last


# ---- Export ---------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 5), st.floats(0.05, 1), st.sampled_from([8, 16, 24]), st.sampled_from(VARIANTS),
    st.sampled_from([1, 3]), st.sampled_from([(8, 8), (8, 12)]), st.integers(0, 99),
)  # fmt: skip
def test_the_folded_encoder_is_the_decayed_one(depth, alpha_min, width, variant, channels, size, seed):
    """Normalised tokens in float64, the eps of every plain LayerNorm being that of ours over the decay, squared."""
    alpha_min = 1.0 if variant.get("schedule") == "learned" or "shortcut" in variant else alpha_min
    how = dict(width=width, heads=4, image_size=size, unet=False, seed=seed, channels=channels)
    model = autoencoder(depth, alpha_min, **how, **variant)
    model.mean.uniform_(50, 200)
    model.std.uniform_(20, 90)
    plain = timm_vit(model, width, depth, 4).double()
    plain.load_state_dict(mae.plain_vit(model), strict=True)
    decay = 1.0
    for block, decayed in zip(plain.blocks, model.encoder):
        for norm, (a, _) in zip((block.norm1, block.norm2), decayed.weights()):
            norm.eps = 1e-6 / decay**2
            decay *= float(torch.as_tensor(a).detach())
    images = 255 * pictures(2, channels, size, seed)
    with torch.no_grad():
        tokens = last_of(model, images)
        plain.norm.eps = 1e-6 / decay**2
        ours, theirs = F.layer_norm(tokens, tokens.shape[-1:], eps=1e-6), plain.forward_features(whitened(images))
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-8)


def test_the_printed_line_makes_timm_load_an_exported_run(exported):
    line = next(line for line in exported.splitlines() if line.startswith("timm."))
    plain, model = eval(line, {"timm": timm}).eval(), trained_model()
    images = probe.load_images("digits", "data", (16, 16)).test[:50]
    with torch.no_grad():
        ours = last_of(model, images)
        torch.testing.assert_close(
            plain.forward_features(whitened(images)),
            F.layer_norm(ours, ours.shape[-1:], eps=1e-6),
            rtol=1e-4,
            atol=1e-4,
        )


def test_transformers_loads_an_exported_run(clean, tmp_path_factory, capsys):
    transformers = pytest.importorskip("transformers")
    out = export(clean, tmp_path_factory, capsys)
    line = next(line for line in out.splitlines() if line.startswith("transformers."))
    plain, information = eval(
        line.replace("False)", "False, output_loading_info=True)"), {"transformers": transformers}
    )
    assert not any(information.values()), information  # nothing is missing, nothing unexpected
    images = probe.load_images("digits", "data", (16, 16)).test[:50]
    with torch.no_grad():
        ours, theirs = last_of(trained_model(), images), plain.eval()(whitened(images)).last_hidden_state
    torch.testing.assert_close(theirs, F.layer_norm(ours, ours.shape[-1:], eps=1e-6), rtol=1e-4, atol=1e-4)
    processor = transformers.ViTImageProcessor.from_pretrained("hf")
    assert [*processor.image_mean] == [0.5] and dict(processor.size) == {"height": 16, "width": 16}


def test_probing_the_exported_model_gives_the_accuracies_of_the_run(exported):
    data, model = probe.load_images("digits", "data", (16, 16), 600), trained_model()
    plain = timm_vit(model, 16, 2, 2, checkpoint_path="plain.safetensors")
    plain.norm = nn.Identity()  # what is probed here has no last norm

    def layer_tokens(images):
        yield plain.forward_features(whitened(images))

    def whole(images):
        yield last_of(model, images)

    scores = []
    for network, tokens in ((plain, layer_tokens), (model, whole)):
        train, test = (probe.features(network, tokens, images)["mean"] for images in (data.train, data.test))
        scores.append(probe.evaluate_layers(train, data.train_labels, test, data.test_labels, 0)[0])
    for name in ("linear", "knn_weighted", "knn_majority"):
        assert abs(scores[0][name] - scores[1][name]) <= 0.1, name


def test_a_shortcut_of_weight_0_can_not_be_folded(clean, capsys):
    assert mae.main(flags(alpha_min=0.0, out="run")) == 0
    assert "a shortcut's weight is 0" in complaint(capsys, "--export", "run", "--to", "plain.safetensors")
    assert not (clean / "plain.safetensors").exists()
    with pytest.raises(ValueError, match="nearly 0"):
        mae.branch_factors([(1e-3, 1.0)] * 24)


def test_an_export_that_can_not_be_is_one_line_and_leaves_nothing(exported, clean, capsys):
    before = sorted(clean.iterdir())
    assert "is there already" in complaint(capsys, "--export", "run", "--to", "plain.safetensors")
    assert "is there already" in complaint(capsys, "--export", "run", "--to-hf", "hf")
    assert "is not the folder of a finished" in complaint(capsys, "--export", "nowhere", "--to", "new.safetensors")
    assert "goes with --to" in complaint(capsys, "--export", "run")
    assert "goes with --to" in complaint(capsys, "--to", "new.safetensors")
    assert "ends in .safetensors" in complaint(capsys, "--export", "run", "--to", "new.pth")
    assert "two commands" in complaint(capsys, "--export", "run", "--to", "new.safetensors", "--evaluate", "run")
    (clean / "file").write_text("a letter")
    assert "can't write" in complaint(capsys, "--export", "run", "--to", "file/new.safetensors")
    (clean / "file").unlink()
    assert sorted(clean.iterdir()) == before
    assert mae.main(["--export", "run", "--to", "plain.safetensors", "--overwrite"]) == 0


# ---- Start ----------------------------------------------------------------------------------------------------------


def published(width=16, depth=2, heads=2, decoder=(16, 2), grid=4, patch=4, channels=3, seed=0):
    """Weights under facebookresearch/mae's names and shapes, all random, and timm's ViT with those of the encoder."""
    generator = torch.Generator().manual_seed(seed)
    vit = timm.create_model(
        "vit_base_patch16_224", img_size=grid * patch, patch_size=patch, in_chans=channels, embed_dim=width, depth=depth,
        num_heads=heads, num_classes=0,
    ).eval()  # fmt: skip
    dim, blocks = decoder
    shapes = {name: value.shape for name, value in vit.state_dict().items()}
    shapes |= {"mask_token": (1, 1, dim), "decoder_pos_embed": (1, 1 + grid**2, dim)}
    shapes |= {"decoder_embed.weight": (dim, width), "decoder_embed.bias": (dim,)}
    for i in range(blocks):
        one = {name: shape for name, shape in shapes.items() if name.startswith("blocks.0.")}
        scaled = {name: tuple(side * dim // width for side in shape) for name, shape in one.items()}
        shapes |= {name.replace("blocks.0.", f"decoder_blocks.{i}."): shape for name, shape in scaled.items()}
    shapes |= {"decoder_norm.weight": (dim,), "decoder_norm.bias": (dim,)}
    shapes |= {"decoder_pred.weight": (patch**2 * channels, dim), "decoder_pred.bias": (patch**2 * channels,)}
    state = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    vit.load_state_dict({name: state[name] for name in vit.state_dict()})
    return state, vit


def small(alpha_min=1.0, **settings):
    sizes = dict(width=16, depth=2, heads=2, decoder_width=16, decoder_depth=2, decoder_heads=2, patch_size=4)
    config = mae.Config(**sizes | {"image_size": (16, 16)} | settings, alpha_min=alpha_min)
    return mae.MaskedAutoencoder(config, 3, torch.Generator().manual_seed(3)).eval()


@pytest.mark.parametrize("alpha_min", [1.0, 0.5])
def test_published_weights_give_timms_features_whatever_alpha_min(alpha_min, tmp_path):
    state, vit = published()
    torch.save({"model": state, "args": argparse.Namespace(lr=1)}, tmp_path / "mae.pth")
    model = small(alpha_min)
    mae.start_from(str(tmp_path / "mae.pth"), model)
    vit.norm.weight.data.fill_(1)
    vit.norm.bias.data.fill_(0)
    images = 255 * pictures(3).float()
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.no_grad():
        ours, theirs = last_of(model, images), vit.forward_features(whitened(images, mean, std))
    torch.testing.assert_close(F.layer_norm(ours, (16,), eps=1e-6), theirs, rtol=1e-4, atol=1e-4)


def test_a_whole_published_autoencoder_is_taken_whole(tmp_path):
    """Without UNet skips only the encoder's last norm has no place here, and the decoder is He et al.'s."""
    state, _ = published()
    torch.save({"model": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "mae.pth")
    model = small(unet=False)
    said = mae.start_from(str(tmp_path / "mae.pth"), model)
    assert "not in it, and as they were: none\nin it, and not used: norm.weight, norm.bias" in said
    ours = model.state_dict()
    for own, plain in (("head.weight", "decoder_pred.weight"), ("decoder_embed.bias", "decoder_embed.bias")):
        assert torch.equal(ours[own], state[plain])
    assert torch.equal(ours["decoder.1.mlp.2.weight"], state["decoder_blocks.1.mlp.fc2.weight"])
    assert torch.equal(ours["decoder_positions"], state["decoder_pos_embed"][0])
    assert torch.equal(ours["mask_token"], state["mask_token"].flatten())


def test_what_is_missing_and_what_is_not_used_is_said(tmp_path):
    state, _ = published(decoder=(32, 1))
    encoder = {name: value for name, value in state.items() if "decoder" not in name and name != "mask_token"}
    save_file(encoder, tmp_path / "encoder.safetensors")
    said = mae.start_from(str(tmp_path / "encoder.safetensors"), small())
    missing = said.splitlines()[1]
    assert "mask_token, decoder_positions, skips.*.token" in missing and "decoder.*.attn.qkv.weight" in missing
    assert "encoder" not in missing
    save_file(state, tmp_path / "other.safetensors")  # a decoder of another width
    said = mae.start_from(str(tmp_path / "other.safetensors"), small())
    assert (
        "decoder.*.attn.qkv.weight" in said.splitlines()[1]
        and "decoder_blocks.*.attn.qkv.weight" in said.splitlines()[2]
    )


def test_positions_of_14_by_14_become_those_of_8_by_8_in_order():
    rows, columns = torch.meshgrid(torch.arange(14.0), torch.arange(14.0), indexing="ij")
    positions = torch.cat([torch.full((1, 1, 2), 5.0), torch.stack([rows, columns], dim=-1).view(1, 196, 2)], dim=1)
    placed = mae.regridded(positions, (8, 8), (14, 14))
    assert placed.isfinite().all() and placed[0].tolist() == [5, 5]
    down, across = placed[1:].view(8, 8, 2).unbind(-1)
    assert (down.diff(dim=0) > 1).all() and (across.diff(dim=1) > 1).all()
    assert down.std(dim=1).max() < 1e-5 and across.std(dim=0).max() < 1e-5
    assert -0.5 < down.min() and down.max() < 13.5
    wide = mae.regridded(positions, (4, 7), (14, 14))
    oracle = timm.layers.resample_abs_pos_embed(positions, [4, 7], num_prefix_tokens=1, antialias=True)
    torch.testing.assert_close(wide, oracle[0], rtol=0, atol=1e-5)


def test_a_start_of_another_grid_is_finite_and_keeps_the_class_tokens_place(tmp_path):
    state, _ = published(grid=14)
    torch.save({"model": state}, tmp_path / "mae.pth")
    model = small(image_size=(32, 32))
    mae.start_from(str(tmp_path / "mae.pth"), model)
    assert model.positions.shape == (64, 16) and model.decoder_positions.shape == (65, 16)
    torch.testing.assert_close(model.cls.data, state["cls_token"].flatten() + state["pos_embed"][0, 0])
    assert last_of(model, 255 * pictures(2, size=(32, 32)).float()).isfinite().all()


def test_an_exported_run_is_a_start_that_computes_the_same(exported):
    """With another α_min: what the encoder computes does not change, but for LayerNorm's eps."""
    run, model = mae.load_run(mae.Path("run"), mae.Study())
    other = mae.MaskedAutoencoder(mae.dataclasses.replace(run, alpha_min=0.9), 1)
    mae.start_from("plain.safetensors", other)
    images = probe.load_images("digits", "data", (16, 16)).test[:50]
    with torch.no_grad():
        ours, theirs = (F.layer_norm(last_of(network, images), (16,)) for network in (model, other))
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)


def test_a_run_starts_from_a_file_and_goes_on_without_it(clean, tmp_path_factory, capsys):
    export(clean, tmp_path_factory, capsys)
    arguments = flags(init="plain.safetensors", out="new", alpha_min=0.8)
    assert mae.main(arguments) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"^starting from plain\.safetensors: \d+ tensors, images standardised by mean 127\.5 and", out, re.M
    )
    assert "not in it, and as they were: mask_token" in out
    untrained = json.loads((clean / "new/result.json").read_text())["baselines"]["untrained"]
    assert abs(untrained["linear"] - json.loads((clean / "run/result.json").read_text())["linear"]) < 1
    (clean / "plain.safetensors").unlink()
    (clean / "new/result.json").unlink()  # as if it had been killed
    assert mae.main(arguments) == 0 and "starting from" not in capsys.readouterr().out
    assert "holds a run with init" in complaint(capsys, *flags(out="new", alpha_min=0.8))


class Hostile:
    def __reduce__(self):
        return open, ("it-ran", "w")


def test_a_start_that_can_not_be_is_one_line_and_leaves_nothing(clean, capsys):
    state, _ = published(channels=1)
    bad = {
        "wide.pth": (published(width=32, channels=1)[0], "width 32, and this model has 16"),
        "deep.pth": (published(depth=4, channels=1)[0], "depth 4, and this model has 2"),
        "patch.pth": (published(patch=2, grid=8, channels=1)[0], "patch_size 2, and this model has 4"),
        "colour.pth": (published()[0], "number of channels 3, and this model has 1"),
        "half.pth": ({n: v for n, v in state.items() if "blocks.1.norm2" not in n}, "blocks.1.norm2.weight is missing"),
        "scaled.pth": (state | {"blocks.0.ls1.gamma": torch.ones(16)}, "blocks.0.ls1.gamma has no place here"),
        "oblong.pth": (state | {"pos_embed": torch.zeros(1, 13, 16)}, "12 positions are no square grid"),
        "none.pth": ({"weight": torch.ones(2)}, "or not a plain ViT's weights"),
        "list.pth": ([1, 2], "or not a plain ViT's weights"),
        "hostile.pth": (Hostile(), "or not a plain ViT's weights"),
        "nan.pth": (
            state | {"blocks.0.norm1.weight": torch.full((16,), math.nan)},
            "not finite, in blocks.0.norm1.weight",
        ),
        "checkpoint.pt": ({"config": {}, "state": {}, "model": {}}, "it is a run's checkpoint: --export . --to"),
        "hf.pth": (
            mae.for_transformers({n: v for n, v in state.items() if "pos_embed" not in n}),
            "transformers' names",
        ),
    }
    for name, (content, _) in bad.items():
        torch.save(content, clean / name)
    (clean / "empty.pth").write_bytes(b"")
    (clean / "cut.safetensors").write_bytes(b"\xff" * 100)
    (clean / "text.safetensors").write_text("a letter")
    bad |= dict.fromkeys(("empty.pth", "cut.safetensors", "text.safetensors"), (None, "not a plain ViT's weights"))
    bad |= {"nowhere.pth": (None, "is no file that can be found"), ".": (None, "is a folder, not a file")}
    for name, (_, expected) in bad.items():
        assert expected in complaint(capsys, *flags(init=name, out="run"), script=mae), name
        assert not (clean / "run").exists() and not (clean / "it-ran").exists()


def test_exported_files_hold_tensors_alone_and_say_what_they_are(exported):
    tensors = load_file("plain.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.float32}
    assert not any("decoder" in name or "skip" in name for name in tensors)
    assert json.loads(mae.Path("hf/config.json").read_text())["model_type"] == "vit"


# ---- TensorBoard ----------------------------------------------------------------------------------------------------


def test_tensorboard_shows_what_metrics_jsonl_holds_once(clean, capsys):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    arguments = flags(out="run", log="tensorboard", eval_every=1)
    assert mae.main(arguments) == 0
    (clean / "run/result.json").unlink()
    assert mae.main(arguments) == 0  # goes on, and shows all of it once more
    board = EventAccumulator("run").Reload()
    records = [json.loads(line) for line in (clean / "run/metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "lr", "linear", "effective_rank"):
        events = board.Scalars(name)
        assert [event.step for event in events] == [record["epoch"] for record in records] == [1, 2]
        assert [event.value for event in events] == pytest.approx([record[name] for record in records], rel=1e-6)


def test_tensorboard_that_is_not_installed_is_one_line(clean, capsys, monkeypatch):
    monkeypatch.setattr(mae.importlib.util, "find_spec", lambda name: None)
    assert "pip install tensorboard" in complaint(capsys, *flags(log="tensorboard"))
