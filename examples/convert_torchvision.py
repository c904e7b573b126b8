"""Convert a torchvision network, starting from its trained weights, and save it.

    python examples/convert_torchvision.py resnet18
    python examples/convert_torchvision.py vgg16 --only classifier.0 'features.2*' --images my-images/
    python examples/convert_torchvision.py resnet18 --images my-images/ --recover 5
    python examples/convert_torchvision.py resnet50 --budget 0.7 --weights none --init random

It prints the plan, how closely each new layer matches the one it replaces, and how much the network's output changed.
With --recover the converted network then learns the outputs of the plain one, on all images of the folder.
"""

import argparse
import copy
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.models import get_model

import torch_dcl as dcl
from torch_dcl.data import Batches, load

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and deviation that torchvision's weights expect


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="?", default="resnet18", help="a name of torchvision (default: resnet18)")
    parser.add_argument("--weights", default="DEFAULT", help='torchvision\'s weights, or "none" (default: DEFAULT)')
    parser.add_argument("--init", default="fit", choices=["fit", "random"], help="where the new layers start")
    parser.add_argument("--branches", type=int, default=2, help="branches of a layer (default: 2)")
    parser.add_argument("--only", nargs="+", metavar="UNIT", help="names or globs of the layers to convert")
    parser.add_argument("--budget", type=float, help="keep at most this part of the weights, for example 0.7")
    parser.add_argument("--images", type=Path, help="an image folder (train/CLASS/*, test/CLASS/*) to calibrate with")
    parser.add_argument("--recover", type=int, metavar="EPOCHS", help="train to give the plain network's outputs again")
    parser.add_argument("--size", type=int, default=224, help="height and width of an image (default: 224)")
    parser.add_argument("-o", "--output", type=Path, help="where to save (default: NETWORK-dcl.safetensors)")
    return parser.parse_args()


def read_images(folder: Path, size: int) -> Batches:
    """The training images of the folder in random order, in the form that the network was trained on."""
    data = load(f"folder:{folder}", size=size, mode="RGB")
    return Batches(data.train_images, data.train_labels, 32, drop_last=False, normalise=IMAGENET)


def main() -> None:
    given = read_arguments()
    if given.images is not None and given.init == "random":
        raise SystemExit("--images is for --init fit: a random start reads no data")
    if given.recover is not None and given.images is None:
        raise SystemExit("--recover needs images to train on: add --images FOLDER")
    weights = None if given.weights == "none" else given.weights
    model = get_model(given.network, weights=weights).eval()

    plan = dcl.plan(model, (3, given.size, given.size), branches=given.branches, budget=given.budget)
    if given.only:
        plan = plan.only(*given.only)
    print(plan)

    batches = None if given.images is None else read_images(given.images, given.size)
    batch = torch.randn(4, 3, given.size, given.size, generator=torch.Generator().manual_seed(0))
    if batches is not None:
        batch = next(iter(batches))[0][:4]
    teacher, before = copy.deepcopy(model), answer(model, batch)
    calibration = None if batches is None else islice(batches, 16)  # 512 images
    print(f"\n{dcl.convert_(model, plan, init=given.init, calibration=calibration)}")
    if given.recover is not None:
        print(f"\n{dcl.recover_(model, teacher, batches, epochs=given.recover)}")

    after = answer(model, batch)
    moved = ((after - before).norm() / before.norm()).item()
    what = "noise" if batches is None else "images of the folder"
    print(f"\nOutput on {len(batch)} inputs ({what}): moved by {100 * moved:.1f} % of its length")

    path = given.output or Path(f"{given.network}-dcl.safetensors")
    dcl.save_model(model, path)
    again = dcl.load_model(lambda: get_model(given.network, weights=None), path).eval()
    if not torch.equal(answer(again, batch), after):
        raise SystemExit(f"{path} does not give the same output as the network that was saved")
    print(f"Saved to {path}, and read back: {plan.weights_after:,} weights instead of {plan.weights:,}")


@torch.no_grad()
def answer(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


if __name__ == "__main__":
    main()
