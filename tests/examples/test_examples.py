"""Each example is run at a small size, and does what it says."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from tests.halves import slow
from torchvision.models import get_model

import torch_dcl as dcl

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(tmp_path, monkeypatch, capsys):
    """Run an example as a script, in an empty folder: `example("export_onnx.py", "--help")` gives what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A small image folder, as the example makes one."""
    folder = tmp_path_factory.mktemp("images") / "digits"
    runpy.run_path(str(FOLDER / "train_image_folder.py"), run_name="example")["make_folder"](folder)
    return folder


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_has_help_and_a_test(example, path, capsys):
    with pytest.raises(SystemExit) as ended:
        example(path.name, "--help")
    assert ended.value.code in (0, None)
    assert "usage:" in capsys.readouterr().out.lower()
    assert f'"{path.name}"' in Path(__file__).read_text()


# Convert


def test_a_torchvision_network_is_converted_fitted_and_saved(example):
    shown = example("convert_torchvision.py", "resnet18", "--weights", "none", "--only", "layer1*", "--size", "32")
    assert "layer1.0.conv1" in shown
    assert "low-rank's" in shown
    model = dcl.load_model(lambda: get_model("resnet18"), "resnet18-dcl.safetensors")
    assert [name for name, m in model.named_modules() if isinstance(m, dcl.DCLConv2d)] == [
        "layer1.0.conv1", "layer1.1.conv1",
    ]  # fmt: skip
    # Two of seventeen convolutions have moved a little, so the output has too.
    moved = float(shown.split("moved by ")[1].split(" %")[0])
    assert 0 < moved < 50


def test_a_budget_and_images_to_calibrate_with(example, digits):
    shown = example(
        "convert_torchvision.py", "squeezenet1_1", "--weights", "none", "--budget", "0.97", "--size", "32",
        "--images", digits, "-o", "small.safetensors",
    )  # fmt: skip
    before, after = (
        int(part.split()[0].replace(",", "")) for part in shown.split("Weights (no biases): ")[1].split(" → ")[:2]
    )
    assert after <= 0.97 * before
    assert "images of the folder" in shown
    assert Path("small.safetensors").is_file()


def test_what_a_conversion_changed_is_recovered(example, digits):
    flags = "--weights", "none", "--size", "32", "--images", digits, "-o", "small.safetensors"
    names = "--only", "features.12.expand1x1", "features.12.expand3x3"

    def moved(*more):
        return float(
            example("convert_torchvision.py", "squeezenet1_1", *flags, *names, *more).split("moved by ")[1].split()[0]
        )

    assert moved("--recover", "3") < moved()
    with pytest.raises(SystemExit, match="--recover needs images"):
        example("convert_torchvision.py", "--recover", "3")


def test_images_are_refused_where_nothing_is_fitted(example):
    with pytest.raises(SystemExit, match="--images is for --init fit"):
        example("convert_torchvision.py", "--init", "random", "--images", "digits")


# Train

SMALL = ("--network", "shufflenet_v2_x0_5", "--only", "stage4.1.branch2.0", "--batch", "100")


def weights(path):
    from safetensors.torch import load_file

    return load_file(path)


@pytest.mark.parametrize(
    "stochastic", [slow(()), ("--branches", "3", "--stochastic")], ids=["deterministic", "stochastic"]
)
def test_a_stopped_training_goes_on_and_ends_with_the_same_weights(example, digits, stochastic):
    words = (digits, "--size", "32", "--epochs", "2", *SMALL, *stochastic)
    example("train_image_folder.py", *words, "--out", "whole")
    shown = example("train_image_folder.py", *words, "--out", "parts", "--stop-after", "1")
    assert "1 of 2 epochs done" in shown
    assert not Path("parts/model.safetensors").exists()
    example("train_image_folder.py", *words, "--out", "parts", "--resume")
    whole, parts = (weights(Path(out, "model.safetensors")) for out in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    lines = [json.loads(line) for line in Path("parts/metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert all(0 <= line["error"] <= 100 for line in lines)


def test_a_run_is_not_begun_over_silently(example):
    words = ("digits", "--size", "32", "--epochs", "2", *SMALL, "--stop-after", "1")
    example("train_image_folder.py", "--make", *words)
    with pytest.raises(RuntimeError, match="holds a run already"):
        example("train_image_folder.py", *words)
    with pytest.raises(SystemExit, match="not in a linear layer"):
        example("train_image_folder.py", *words, "--network", "squeezenet1_1")
    with pytest.raises(RuntimeError, match="other settings"):
        example("train_image_folder.py", *words, "--resume", "--lr", "0.5")
    Path("runs/image-folder/checkpoint.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="checkpoint"):
        example("train_image_folder.py", *words, "--resume")


def test_training_from_weights_fits_the_layers_to_the_images(example, digits, monkeypatch):
    """The weights are made up, in place of what torchvision would download."""
    from torchvision.models import _api

    made_up = get_model("shufflenet_v2_x0_5", weights=None).state_dict()
    monkeypatch.setattr(_api.WeightsEnum, "get_state_dict", lambda *_, **__: made_up)
    example("train_image_folder.py", digits, "--size", "32", "--epochs", "1", *SMALL, "--weights", "DEFAULT")
    model = dcl.load_model(
        lambda: get_model("shufflenet_v2_x0_5", num_classes=10), "runs/image-folder/model.safetensors"
    )
    assert isinstance(model.stage4[1].branch2[0], dcl.DCLConv2d)


# Export


def test_onnxruntime_gives_what_torch_gives(example):
    pytest.importorskip("onnxruntime", reason="needs the extra torch-dcl[onnx]")
    pytest.importorskip("onnxscript", reason="needs the extra torch-dcl[onnx]")
    network = ("squeezenet1_1", "--only", "features.3.expand3x3", "--size", "32")
    shown = example("export_onnx.py", *network, "-o", "a.onnx")
    assert shown.count("batch of") == 3
    assert Path("a.onnx").stat().st_size > 1000
    with pytest.raises(SystemExit, match="the outputs differ"):
        example("export_onnx.py", *network, "-o", "b.onnx", "--tolerance", "0")
