"""benchmarks/speed.py: its counts against torch's own, and the command from end to end."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY
from test_cli import complaint

import mae
import probe
import resnet_decay
import uvit

sys.path.insert(0, str(ROOT / "benchmarks"))
import speed  # noqa: E402


def counted(model, *inputs):
    """Floating-point operations of a forward pass of one image, by torch's count."""
    return probe.training_flops(model, *inputs) / 3


def test_operations_are_those_that_torch_counts():
    config = mae.Config(
        image_size=64, patch_size=8, width=96, depth=4, heads=4, decoder_width=64, decoder_depth=3, decoder_heads=4
    )
    model, images = mae.MaskedAutoencoder(config, 3), torch.rand(2, 3, 64, 64)
    assert counted(model, images, torch.rand(2, 64)) == pytest.approx(speed.mae_flops(config), rel=0.01)

    config = uvit.Config(image_size=32, patch_size=4, width=64, depth=4, heads=4)
    model, images = uvit.UViT(config, 3), torch.rand(2, 3, 32, 32)
    assert counted(model, images, torch.rand(2)) == pytest.approx(speed.uvit_flops(config), rel=0.01)

    config = resnet_decay.Config(image_size=32, blocks=8, width=64)
    model, images = resnet_decay.ResNet(config, 3, 10), torch.rand(2, 3, 32, 32)
    assert counted(model, images) == pytest.approx(speed.resnet_flops(32), rel=0.01)


def test_counting_leaves_the_model_as_it_was():
    model = resnet_decay.ResNet(resnet_decay.Config(image_size=16, blocks=8, width=4), 1, 10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert probe.training_flops(model, torch.rand(2, 1, 16, 16)) > 0 and model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert probe.product_rate(torch.device("cpu"), torch.float32) is None


def test_on_a_gpu_a_run_says_what_share_of_a_products_rate_it_reached(clean, no_probes, monkeypatch, capsys):
    """Here of a rate that is made up, and by the formula."""
    monkeypatch.setattr(probe, "product_rate", lambda device, dtype: 1e9)
    result = mae.train(mae.Config(**TINY, out="run"))
    config = mae.Config(**TINY)
    records = [json.loads(line) for line in (clean / "run/metrics.jsonl").read_text().splitlines()]
    for record in records:
        expected = 3 * speed.mae_flops(config, 1) * record["images_per_second"] / 1e9
        assert record["utilisation"] == pytest.approx(expected, rel=0.02)
    assert result["utilisation"] == records[-1]["utilisation"] and " utilisation=" in capsys.readouterr().out


def test_operations_of_the_peer_are_those_that_torch_counts():
    transformers = pytest.importorskip("transformers")
    config = mae.Config(
        image_size=64, patch_size=8, width=96, depth=4, heads=4, decoder_width=64, decoder_depth=3, decoder_heads=4
    )
    peer = transformers.ViTMAEForPreTraining(
        transformers.ViTMAEConfig(
            hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=384, image_size=64, patch_size=8,
            decoder_hidden_size=64, decoder_num_hidden_layers=3, decoder_num_attention_heads=4,
            decoder_intermediate_size=256,
        )
    )  # fmt: skip
    assert counted(peer, torch.rand(2, 3, 64, 64)) == pytest.approx(speed.hf_mae_flops(config), rel=0.01)


def test_the_command_prints_and_keeps_one_table(clean):
    rows = ["mae-step", "knn", "effective-rank", "augment", "pipeline-later"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/speed.py"), "--quick", "--repeats", "2", "--only", *rows],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = json.loads((clean / "results/speed.json").read_text())
    assert [row["row"] for row in table["rows"]] == ["product", *rows] and table["quick"]
    assert table["versions"]["torch"] == torch.__version__.split("+")[0]
    for row in table["rows"][1:]:
        assert row["row"] in done.stdout
        if "not installed" not in row["note"]:
            assert row["least"] <= row["ratio"] * 1.001 or row["ratio"] > 0
            assert row["ratio"] == pytest.approx(row["ours_seconds"] / row["theirs_seconds"])


def test_a_ratio_is_of_medians_and_the_range_of_neighbours(monkeypatch):
    ours, theirs = object(), object()
    times = {ours: iter([50.0, 1.0, 2.0, 9.0]), theirs: iter([7.0, 2.0, 2.0, 3.0])}  # the first is a warm-up
    monkeypatch.setattr(speed, "stopwatch", lambda work, device: next(times[work.__self__]))
    row = speed.Bench(ours.__eq__, theirs.__eq__, flops=(4.0, 6.0), images=8)
    row.ours, row.theirs = (Timed(side) for side in (ours, theirs))
    found = speed.measured(row, 3, torch.device("cpu"))
    assert found["ratio"] == 1.0 and (found["least"], found["paired"], found["greatest"]) == (0.5, 1.0, 3.0)
    assert found["images_per_second"] == 4.0 and found["theirs_flops_per_second"] == 3.0


class Timed:
    """Work that does nothing, known to the stopwatch by what it is bound to."""

    def __init__(self, side):
        self.__self__ = side

    def __call__(self):
        pass


def test_a_mistake_is_one_line(capsys):
    for arguments in (["--only", "nothing"], ["--repeats", "0"], ["--repeats", "x"], ["--device", "abacus"]):
        assert speed.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("speed.py: ") and len(error.splitlines()) == 1


def test_freed_memory_is_kept_where_the_c_library_can():
    probe.keep_memory()  # and elsewhere it does nothing


@pytest.mark.parametrize(
    "line, words",
    [
        ("--only", "only must name one or more of mae-step"),
        ("--out .", "can't write .: it is a folder"),
        ("--out file/speed.json", "can't write file/speed.json"),
        ("--out /proc/speed.json", "can't write /proc/speed.json"),
    ],
)
def test_what_cant_be_measured_or_written_is_told_before_measuring(line, words, clean, capsys, monkeypatch):
    (clean / "file").write_text("a letter")
    monkeypatch.setattr(speed, "run", lambda config: pytest.fail("it measures"))
    assert words in complaint(capsys, *line.split(), script=speed)
    assert [path.name for path in clean.iterdir()] == ["file"]


def test_a_reader_that_leaves_early_is_no_complaint(clean):
    command = f"{sys.executable} {ROOT}/benchmarks/speed.py --quick --only knn effective-rank | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stderr == "" and "torch" in done.stdout
