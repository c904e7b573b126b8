"""Convert a torchvision network, starting from its trained weights, and save it.

    python examples/convert_torchvision.py resnet18
    python examples/convert_torchvision.py vgg16 --only classifier.0 'features.2*' --images my-images/
    python examples/convert_torchvision.py resnet50 --budget 0.7 --weights none --init random

It prints the plan, how closely each new layer matches the one it replaces, and how much the network's output changed.
"""

import argparse
from collections.abc import Iterator
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
    parser.add_argument("--size", type=int, default=224, help="height and width of an image (default: 224)")
    parser.add_argument("-o", "--output", type=Path, help="where to save (default: NETWORK-dcl.safetensors)")
    return parser.parse_args()


def some_images(folder: Path, size: int) -> Iterator[Tensor]:
    """Up to 512 images of the folder in batches, in the form that the network was trained on."""
    data = load(f"folder:{folder}", size=size, mode="RGB")
    order = torch.randperm(len(data.train_images), generator=torch.Generator().manual_seed(0))[:512]
    for images, _ in Batches(data.train_images[order], data.train_labels[order], 32, train=False, normalise=IMAGENET):
        yield images


def main() -> None:
    given = read_arguments()
    if given.images is not None and given.init == "random":
        raise SystemExit("--images is for --init fit: a random start reads no data")
    weights = None if given.weights == "none" else given.weights
    model = get_model(given.network, weights=weights).eval()

    plan = dcl.plan(model, (3, given.size, given.size), branches=given.branches, budget=given.budget)
    if given.only:
        plan = plan.only(*given.only)
    print(plan)

    batch = torch.randn(4, 3, given.size, given.size, generator=torch.Generator().manual_seed(0))
    if given.images is not None:
        batch = next(some_images(given.images, given.size))[:4]
    before = answer(model, batch)
    calibration = None if given.images is None else some_images(given.images, given.size)
    print(f"\n{dcl.convert_(model, plan, init=given.init, calibration=calibration)}")

    after = answer(model, batch)
    moved = ((after - before).norm() / before.norm()).item()
    what = "noise" if given.images is None else "images of the folder"
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
