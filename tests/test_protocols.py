"""Finished runs evaluated: each part of a protocol against its own oracle, and the command line from a run to its pictures."""

import copy
import json
import math

import numpy as np
import pytest
import scipy.linalg
import sklearn.metrics
import torch
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from test_cli import complaint
from test_equations import autoencoder, pictures

import mae
import probe

SEEDS = st.integers(0, 2**16)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# ---- The parts ------------------------------------------------------------------------------------------------------


def test_the_learning_rate_warms_up_and_falls_as_a_cosine():
    assert [probe.warm_cosine(e, 90, 10) for e in (0, 5, 10)] == [0, 0.5, 1]
    assert probe.warm_cosine(50, 90, 10) == pytest.approx(0.5) and probe.warm_cosine(90, 90, 10) == pytest.approx(0)
    assert probe.warm_cosine(0, 4, 0) == 1


def test_layer_decay_is_065_to_the_power_of_the_blocks_above():
    model = autoencoder(4, unet=False)
    classifier = mae.Classifier(model, 5, 0.1, generator())
    groups = probe.layer_decay_groups(classifier.stages)
    scale = {id(p): group["scale"] for group in groups for p in group["params"]}
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert scale[id(model.embed.weight)] == scale[id(model.cls)] == pytest.approx(0.65**5)
    for l, block in enumerate(model.encoder):
        assert all(scale[id(p)] == pytest.approx(0.65 ** (4 - l)) for p in block.parameters())
    assert scale[id(classifier.head.weight)] == scale[id(classifier.norm.bias)] == 1
    assert decay[id(classifier.head.weight)] == 0.05 and decay[id(classifier.head.bias)] == 0
    trained = {*scale}
    unused = {name for name, p in classifier.named_parameters() if id(p) not in trained}
    assert unused and all("decoder" in name or "head" in name or "mask_token" in name for name in unused)
    assert not any(name.startswith(("head", "norm", "model.encoder", "model.embed")) for name in unused)


def test_the_classifier_is_a_linear_layer_on_the_normalised_mean_of_all_tokens():
    model = autoencoder(4, unet=False)
    classifier = mae.Classifier(model, 5, 0.3, generator()).double()
    torch.nn.init.normal_(classifier.head.weight, generator=generator())
    *_, last = model.layer_tokens(pictures())
    mean = last.mean(dim=1)
    normal = (mean - mean.mean(1, keepdim=True)) / (mean.var(1, correction=0, keepdim=True) + 1e-6).sqrt()
    with torch.no_grad():
        torch.testing.assert_close(classifier(pictures()), normal @ classifier.head.weight.T, rtol=1e-9, atol=1e-9)
        noise = torch.rand(2, 8, generator=generator(), dtype=torch.float64)
        *_, dropped = model.encode(model.patches(pictures()), drops=mae.drop_factors(noise, 0.3))
        expected = classifier.head(classifier.norm(dropped.mean(dim=1)))
        torch.testing.assert_close(classifier(pictures(), noise), expected)
        assert not torch.allclose(classifier(pictures(), noise), classifier(pictures()))


def coloured(n, classes=3, size=8, seed=0):
    """Images whose class is their colour, with noise: what any classifier learns."""
    labels = torch.arange(n) % classes
    images = torch.randint(0, 80, (n, 3, size, size), generator=generator(seed))
    images[torch.arange(n), labels] += 120
    return images.to(torch.uint8), labels


def test_the_imagenet_probe_learns_separable_features_and_leaves_them_alone():
    images, labels = coloured(120)
    test, test_labels = coloured(60, seed=1)
    features_of = lambda x: x.mean(dim=(2, 3))
    how = dict(epochs=20, batch_size=40, lr=400.0, flip=False)
    accuracy = probe.imagenet_probe(features_of, images, labels, test, test_labels, (8, 8), **how)
    assert accuracy == 100
    shuffled = labels[torch.randperm(120, generator=generator())]
    chance = probe.imagenet_probe(features_of, images, shuffled, test, test_labels, (8, 8), **how)
    assert chance < 80
    again = probe.imagenet_probe(features_of, images, labels, test, test_labels, (8, 8), **how)
    assert again == accuracy


def test_one_step_of_the_imagenet_probe_is_lars_by_hand(monkeypatch):
    """W ← W − lr · 0.001 ‖W‖/‖g‖ · g and b ← b − lr · g, g of the whole batch from parts; BatchNorm of each part."""
    import timm.optim

    images, labels = coloured(8)
    seen = {}

    class Watched(timm.optim.Lars):
        def step(self):
            before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
            grads = [p.grad.clone() for group in self.param_groups for p in group["params"]]
            super().step()
            after = [p.detach().clone() for group in self.param_groups for p in group["params"]]
            seen.update(before=before, grads=grads, after=after, lr=self.param_groups[0]["lr"])

    monkeypatch.setattr(timm.optim, "Lars", Watched)
    features_of = lambda x: x.mean(dim=(2, 3))
    how = dict(epochs=1, batch_size=8, lr=0.1, warmup_epochs=0, flip=False, part=4)
    probe.imagenet_probe(features_of, images, labels, images, labels, (8, 8), **how)
    (weight, bias), (dw, db), (new_weight, new_bias) = (seen[name] for name in ("before", "grads", "after"))
    assert seen["lr"] == pytest.approx(0.1 * 8 / 256)
    torch.testing.assert_close(new_weight, weight - seen["lr"] * 0.001 * weight.norm() / dw.norm() * dw)
    torch.testing.assert_close(new_bias, bias - seen["lr"] * db)

    on_device, order = generator(), torch.randperm(8, generator=skipped(generator(), weight))
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    for chosen in order.chunk(2):
        x = features_of(probe.augment(images[chosen], (8, 8), on_device, 0.08, False))
        x = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-6).sqrt()
        (torch.nn.functional.cross_entropy(x @ weight.T + bias, labels[chosen]) / 2).backward()
    torch.testing.assert_close(weight.grad, dw, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bias.grad, db, rtol=1e-4, atol=1e-5)


def test_no_batch_of_the_imagenet_probe_is_too_small_for_batchnorm():
    """Nine images in batches of four are three and three and three, not four and four and one."""
    images, labels = coloured(9)
    colours = lambda x: x.mean(dim=(2, 3))
    assert probe.imagenet_probe(colours, images, labels, images, labels, (8, 8), epochs=1, batch_size=4) >= 0


def test_the_imagenet_probe_scores_an_image_by_itself(monkeypatch):
    """BatchNorm's running statistics, not those of the test images: a test of one colour is judged as in a mixed one."""
    images, labels = coloured(120)
    features_of = lambda x: x.mean(dim=(2, 3))
    how = dict(epochs=20, batch_size=40, lr=400.0, flip=False)
    red = labels == 0
    assert probe.imagenet_probe(features_of, images, labels, images[red], labels[red], (8, 8), **how) == 100


def skipped(stream, weight):
    """The stream after the classifier's start has been drawn from it."""
    torch.nn.init.normal_(torch.empty_like(weight), std=0.01, generator=stream)
    return stream


def test_fine_tuning_learns_and_the_same_seed_gives_the_same_weights():
    images, labels = coloured(96, size=16)
    test, test_labels = coloured(48, size=16, seed=1)
    results, weights = [], []
    for _ in range(2):
        model = autoencoder(2, unet=False, random=False).float()
        classifier = mae.Classifier(model, 3, 0.1, generator())
        groups = probe.layer_decay_groups(classifier.stages)
        how = dict(epochs=12, batch_size=32, lr=0.04, flip=False, part=20)
        results.append(probe.finetune(classifier, groups, images, labels, test, test_labels, (16, 16), **how))
        weights.append(copy.deepcopy(classifier.state_dict()))
    assert results[0] == results[1] and results[0] > 80
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_fine_tuning_learns_from_images_of_fewer_classes_than_there_are():
    images, labels = coloured(8, classes=2, size=16)
    classifier = mae.Classifier(autoencoder(2, unet=False, random=False).float(), 3, 0.1, generator())
    groups = probe.layer_decay_groups(classifier.stages)
    how = dict(epochs=1, batch_size=3, flip=False)
    assert probe.finetune(classifier, groups, images, labels, images, labels, (16, 16), **how) >= 0


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"evaluate": ("run",), "lr": 3.0}, "lr 3.0 is not heeded by --evaluate: leave"),
        ({"evaluate": ("run",), "protocol": ("scratch",), "mask_ratio": 0.5}, "by --evaluate --protocol scratch"),
        ({"export": "run", "to": "a.safetensors", "seed": (1,)}, "seed 1 is not heeded by --export"),
    ],
)
def test_a_flag_that_would_not_be_heeded_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        mae.Study(**settings)
    mae.Study(evaluate=("run",), protocol=("finetune", "tsne"), lr=3.0, epochs=2, seed=(1,), limit=5, drop_path=0.2)


def test_fine_tuning_that_diverges_says_so():
    images, labels = coloured(32, size=16)
    model = autoencoder(2, unet=False, random=False).float()
    classifier = mae.Classifier(model, 3, 0.1, generator())
    classifier.head.bias.data.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="not finite in epoch 1"):
        probe.finetune(
            classifier, probe.layer_decay_groups(classifier.stages), images, labels, images, labels, (16, 16), epochs=1
        )


def test_randaugment_changes_images_by_the_stream_alone():
    images, _ = coloured(12, size=16)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, two, other = (probe.randaugmented(images, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert one.dtype == torch.uint8 and one.shape == images.shape
    assert torch.equal(torch.get_rng_state(), state)
    changed = (one != images).flatten(1).any(dim=1)
    assert changed.sum() >= 8 and probe.randaugmented(images[:, :1], generator()).shape == (12, 1, 16, 16)


@given(st.integers(5, 40), st.integers(2, 8), SEEDS)
def test_the_normalised_cut_is_scipys_generalised_eigenvectors(n, width, seed):
    tokens = torch.randn(n, width, generator=generator(seed), dtype=torch.float64)
    count = min(3, width - 1, n - 2)
    found = probe.normalised_cut(tokens, count).numpy()
    unit = tokens.numpy() / np.linalg.norm(tokens.numpy(), axis=1, keepdims=True)
    affinity = (1 + unit @ unit.T) / 2
    values, vectors = scipy.linalg.eigh(affinity, np.diag(affinity.sum(axis=1)))
    gaps = -np.diff(values[::-1][: count + 2])
    assert values[-1] == pytest.approx(1)
    for i in range(count):
        if min(gaps[i : i + 2]) < 1e-4 or values[-2 - i] < 1e-6:
            return  # equal eigenvalues have no vectors of their own
        expected = vectors[:, -2 - i] / np.linalg.norm(vectors[:, -2 - i])
        expected *= np.sign(expected[np.abs(expected).argmax()]) * np.sign(found[np.abs(expected).argmax(), i])
        np.testing.assert_allclose(found[:, i], expected, atol=1e-6)
    assert (found.max(axis=0) >= -found.min(axis=0) - 1e-12).all()


def test_the_cut_separates_two_groups_of_tokens():
    tokens = torch.cat([torch.randn(30, 4, generator=generator()) * 0.1 + sign * torch.ones(4) for sign in (-1, 1)])
    first = probe.normalised_cut(tokens, 1)[:, 0]
    assert (first[:30] > 0).all() != (first[30:] > 0).all() and (first[:30] * first[30:] < 0).all()
    clusters = probe.clustered(first[:, None], 2)
    assert len(clusters[:30].unique()) == len(clusters[30:].unique()) == 1


@given(st.integers(2, 5), SEEDS)
def test_truth_against_itself_has_an_miou_of_100_under_any_names(segments, seed):
    stream = generator(seed)
    truth = torch.randint(segments, (4, 9, 9), generator=stream)
    truth[0, 0, :segments] = torch.arange(segments)
    names = torch.randperm(9, generator=stream)[:segments]
    assert probe.matched_miou(names[truth], truth) == pytest.approx(100)
    assert probe.matched_miou(names[truth], torch.tensor([7, 30, 2, 90, 11])[truth]) == pytest.approx(100)


def test_miou_is_scikit_learns_for_the_best_of_all_matches():
    import itertools

    stream = generator(3)
    truth, clusters = torch.randint(3, (5, 8, 8), generator=stream), torch.randint(3, (5, 8, 8), generator=stream)
    clusters = torch.where(torch.rand(5, 8, 8, generator=stream) < 0.6, (truth + 1) % 3, clusters)
    best = max(
        sklearn.metrics.jaccard_score(truth.flatten(), torch.tensor(match)[clusters].flatten(), average="macro")
        for match in itertools.permutations(range(3))
    )
    assert probe.matched_miou(clusters, truth) == pytest.approx(100 * best)
    ignored = truth.clone()
    ignored[0] = 255
    assert probe.matched_miou(clusters, ignored) == pytest.approx(probe.matched_miou(clusters[1:], truth[1:]))


def test_random_labels_have_an_miou_near_chance():
    """Two segments of equal size against coin tosses: IoU is (1/4) / (3/4) = 1/3 each."""
    truth = torch.arange(20_000) % 2
    clusters = torch.randint(2, (20_000,), generator=generator())
    assert probe.matched_miou(clusters, truth) == pytest.approx(100 / 3, abs=1)


def test_a_segment_without_a_cluster_counts_as_nothing():
    truth = torch.tensor([0, 0, 1, 1])
    assert probe.matched_miou(torch.zeros(4, dtype=torch.long), truth) == pytest.approx(25)  # (1/2 + 0) / 2
    with pytest.raises(ValueError, match="labelled"):
        probe.matched_miou(truth, torch.full((4,), 255))


def test_tsne_keeps_separate_groups_apart_and_its_silhouette_is_scikit_learns():
    labels = torch.arange(60) % 3
    features = 8 * torch.nn.functional.one_hot(labels, 5).double() + torch.randn(60, 5, generator=generator())
    points, score = probe.tsne(features, labels)
    assert score == pytest.approx(sklearn.metrics.silhouette_score(points.numpy(), labels.numpy()))
    assert points.shape == (60, 2) and score > 0.5
    assert probe.tsne(features, labels[torch.randperm(60, generator=generator())])[1] < 0.2


def test_masked_images_are_squared_alike(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    mask = np.zeros((20, 40), dtype=np.uint8)
    mask[:, 20:] = 3
    Image.fromarray(np.stack([mask * 80] * 3, axis=2)).save(tmp_path / "images/b.jpg", quality=95)
    Image.fromarray(mask).save(tmp_path / "masks/b.png")
    images, masks = probe.masked_images(tmp_path, (10, 10))
    assert images.shape == (1, 3, 10, 10) and masks.shape == (1, 10, 10)
    assert (masks[0, :, :5] == 0).all() and (masks[0, :, 5:] == 3).all()
    assert ((images[0, 0] > 120).long() * 3 == masks[0]).all()


# ---- The command line -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two finished runs, α_min 1.0 and 0.5."""
    folder = tmp_path_factory.mktemp("runs")
    for alpha_min in (1.0, 0.5):
        mae.train(mae.Config(**TINY, alpha_min=alpha_min, out=str(folder / f"a{alpha_min:g}")))
    return folder


def test_layers_probed_again_are_those_of_the_result(runs, capsys):
    assert mae.main(["--evaluate", str(runs / "a0.5"), "--protocol", "linear", "knn"]) == 0
    found = json.loads((runs / "a0.5/evaluation.json").read_text())["layers"]
    result = json.loads((runs / "a0.5/result.json").read_text())
    assert found["per_layer"] == result["per_layer"]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("layer number=")]
    assert len(lines) == 2 and f"linear={result['linear']:.5g} " in lines[1] and "knn_majority=" in lines[1]
    assert (runs / "a0.5/layers.png").exists()


def test_the_protocols_that_train_leave_the_checkpoint_bit_for_bit(runs, capsys):
    before = (runs / "a1/checkpoint.pt").read_bytes()
    protocols = ["linear-imagenet", "finetune", "scratch"]
    cut = ["--epochs", "1", "--batch-size", "50", "--limit", "100"]
    assert mae.main(["--evaluate", str(runs / "a1"), "--protocol", *protocols, *cut]) == 0
    found = json.loads((runs / "a1/evaluation.json").read_text())
    out = capsys.readouterr().out
    for name in protocols:
        assert 0 <= found[name]["accuracy"] <= 100 and found[name]["images"] == 100 and found[name]["epochs"] == 1
        assert f"{name} accuracy={found[name]['accuracy']:.5g} run={runs / 'a1'}" in out
    assert (runs / "a1/checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize("protocol, limit", [("finetune", 1), ("finetune", 9), ("scratch", 5), ("linear-imagenet", 6)])
def test_protocols_train_on_fewer_images_than_classes(runs, protocol, limit, capsys):
    more = ["--batch-size", "2", "--warmup-epochs", "0"]
    assert (
        mae.main(["--evaluate", f"{runs}/a1", "--protocol", protocol, "--epochs", "1", "--limit", f"{limit}", *more])
        == 0
    )
    assert f"{protocol} accuracy=" in capsys.readouterr().out


def test_fine_tuning_that_diverges_is_one_line(runs, capsys):
    arguments = ["--evaluate", f"{runs}/a1", "--protocol", "finetune", "--epochs", "2", "--limit", "40"]
    assert mae.main([*arguments, "--batch-size", "4", "--warmup-epochs", "0", "--lr", "1e9"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mae.py: the loss of fine-tuning is not finite in epoch")


def test_the_imagenet_probe_of_a_run_changes_nothing_in_its_encoder(runs):
    study = mae.parse(["--evaluate", str(runs / "a1"), "--protocol", "linear-imagenet", "--epochs", "1"])
    run, model = mae.load_run(runs / "a1", study)
    weights = copy.deepcopy(model.state_dict())
    data = probe.load_images("digits", "data", run.image_size, 200)
    mae.trained_accuracy("linear-imagenet", run, model, data, study)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert not model.training and all(p.grad is None for p in model.parameters())


def test_two_runs_share_their_pictures(runs, capsys):
    folders = [str(runs / name) for name in ("a1", "a0.5")]
    out = runs / "both"
    protocols = ["tsne", "segment", "reconstruct", "knn"]
    assert mae.main(["--evaluate", *folders, "--protocol", *protocols, "--out", str(out)]) == 0
    names = {f"mae-digits-{name}.png" for name in ("tsne", "segment", "reconstruct", "layers")}
    assert {path.name for path in out.iterdir()} == names
    assert all(Image.open(out / name).size[0] > 300 for name in names)
    printed = capsys.readouterr().out
    for folder in folders:
        found = json.loads((runs / folder / "evaluation.json").read_text())
        assert f"segment miou={found['segment']['miou']:.5g} run={folder}" in printed
        assert -1 <= found["tsne"]["silhouette"] <= 1 and 0 <= found["segment"]["miou"] <= 100


def test_fine_tuning_starts_from_the_run_and_scratch_does_not(monkeypatch, tmp_path):
    mae.train(mae.Config(**TINY | {"limit": 50}, out=str(tmp_path / "run")))
    study = mae.parse(["--evaluate", str(tmp_path / "run"), "--protocol", "finetune"])
    run, model = mae.load_run(tmp_path / "run", study)
    torch.nn.init.normal_(model.encoder[0].attn.proj.weight, generator=generator())
    data = probe.load_images("digits", "data", run.image_size, 50)
    started = {}
    for protocol in ("finetune", "scratch"):
        monkeypatch.setattr(
            probe, "finetune", lambda classifier, *more, **how: started.update({protocol: classifier}) or 1.0
        )
        mae.trained_accuracy(protocol, run, model, data, study)
    weights = model.encoder[0].attn.proj.weight
    assert torch.equal(started["finetune"].model.encoder[0].attn.proj.weight, weights) and weights.any()
    assert not started["scratch"].model.encoder[0].attn.proj.weight.any()  # branches start at zero


def test_what_is_told_beats_the_protocols_own(runs, monkeypatch):
    seen = {}
    monkeypatch.setattr(probe, "finetune", lambda *arguments, **how: seen.update(how) or 1.0)
    line = ["--evaluate", str(runs / "a1"), "--protocol", "finetune"]
    assert mae.main(line) == 0
    assert not {"epochs", "lr", "batch_size", "warmup_epochs"} & seen.keys()
    assert mae.main([*line, "--epochs", "3", "--lr", "0.1"]) == 0
    assert seen["epochs"] == 3 and seen["lr"] == 0.1 and "batch_size" not in seen


@pytest.mark.parametrize(
    "line, words",
    [
        ("--evaluate", "evaluate must name one finished run or more"),
        ("--protocol tsne", "protocol tsne is for --evaluate RUN"),
        ("--evaluate {runs}/a1 --alpha-min 0.3", "alpha_min 0.3 is not heeded by --evaluate: leave it out"),
        ("--evaluate {runs}/a1 --init x", "init x is not heeded by --evaluate"),
        ("--evaluate {runs}/a1 --log tensorboard", "log tensorboard is not heeded by --evaluate"),
        ("--evaluate {runs}/a1 --protocol tsne --epochs 3", "epochs 3 is not heeded by --evaluate --protocol tsne"),
        ("--evaluate {runs}/a1 --protocol linear --limit 9", "limit 9 is not heeded by --evaluate --protocol linear"),
        ("--evaluate {runs}/a1 --protocol linear-imagenet --drop-path 0.2", "drop_path 0.2 is not heeded by"),
        ("--evaluate {runs}/a1 --protocol finetune --seed 1 2", "evaluate takes one seed, not 1 2"),
        ("--evaluate {runs}/a1 --protocol linear-imagenet --limit 1", "two images or more in each, not 1 in batches of 1"),
        ("--evaluate {runs}/a1 --export {runs}/a1 --to a.safetensors", "export and evaluate are two commands"),
        ("--export {runs}/a1 --to a.safetensors --epochs 3", "epochs 3 is not heeded by --export: leave it out"),
        ("--evaluate nowhere", "'nowhere' is not the folder of a finished mae.py run"),
        ("--evaluate {runs}/a1 --protocol linear quiz", "protocol must be one or more of linear, knn"),
        ("--evaluate {runs}/a1 --protocol", "protocol must name one or more"),
        ("--evaluate {runs}/a1 --masks there", "masks 'there' is for --evaluate with --protocol segment"),
        ("--evaluate {runs}/a1 --protocol segment --masks there", "must be a folder that holds images/* and masks"),
        ("--evaluate {runs}/a1 --protocol finetune --epochs 2 --warmup-epochs 3", "warmup_epochs must lie in [0, epochs = 2]"),
        ("--evaluate {runs}/broken", "checkpoint.pt is missing, damaged or not of mae.py"),
        ("--evaluate {runs}/a1 {runs}/other --protocol reconstruct", "mask_ratio is 0.75 in"),
    ],
)  # fmt: skip
def test_what_cant_be_evaluated_gets_one_line(runs, line, words, capsys, tmp_path):
    import shutil

    if "broken" in line and not (runs / "broken").exists():
        shutil.copytree(runs / "a1", runs / "broken")
        (runs / "broken/checkpoint.pt").write_bytes(b"not a checkpoint")
    if "other" in line and not (runs / "other").exists():
        mae.train(mae.Config(**TINY | {"limit": 50, "epochs": 1}, mask_ratio=0.5, out=str(runs / "other")))
    assert words in complaint(capsys, *line.format(runs=runs).split(), script=mae)


def test_other_data_has_no_masks_of_its_own(runs, capsys, tmp_path, monkeypatch):
    study = mae.parse(["--evaluate", str(runs / "a1"), "--protocol", "segment"])
    run, model = mae.load_run(runs / "a1", study)
    object.__setattr__(run, "data", "cifar10")
    monkeypatch.setattr(mae, "load_run", lambda folder, study: (run, model))
    with pytest.raises(probe.BadInput, match="segment needs masks, and cifar10 has none"):
        mae.evaluate_runs(study)
