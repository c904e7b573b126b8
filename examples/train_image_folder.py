"""Train a torchvision network with DCL layers on a folder of images: train/CLASS/*.png and test/CLASS/*.png.

    python examples/train_image_folder.py my-images/ --epochs 20
    python examples/train_image_folder.py my-images/ --weights DEFAULT --size 224 --lr 0.01     # fine-tune
    python examples/train_image_folder.py my-images/ --branches 3 --stochastic
    python examples/train_image_folder.py digits/ --make --size 32 --epochs 5                   # without images

The run folder (--out) holds the arguments, a line for every epoch, and a checkpoint with a SHA-256. The same command
with --resume continues a run that was stopped, and ends with the same weights.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import get_model
from torchvision.utils import save_image

import torch_dcl as dcl
from torch_dcl.data import Batches, Dataset, load, mnist_excerpt
from torch_dcl.files import read_sealed, write_sealed
from torch_dcl.fleet.run_folder import RunFolder

KIND = "train_image_folder"


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder with train/ and test/")
    parser.add_argument("--make", action="store_true", help="write a small folder of digits there first")
    parser.add_argument("--network", default="resnet18", help="a name of torchvision (default: resnet18)")
    parser.add_argument("--weights", default="none", help='torchvision\'s weights to start from, or "none"')
    parser.add_argument("--only", nargs="+", metavar="UNIT", help="names or globs of the layers to convert")
    parser.add_argument("--branches", type=int, default=2, help="branches of a layer (default: 2)")
    parser.add_argument("--stochastic", action="store_true", help="train one random pair of branches a step")
    parser.add_argument("--size", type=int, default=64, help="height and width of an image (default: 64)")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the images (default: 10)")
    parser.add_argument("--batch", type=int, default=50, help="images of a step (default: 50)")
    parser.add_argument("--lr", type=float, default=0.05, help="the largest learning rate (default: 0.05)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and augmentation (default: 0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/image-folder"), help="the run folder")
    parser.add_argument("--resume", action="store_true", help="resume the run of the folder")
    parser.add_argument("--stop-after", type=int, metavar="EPOCHS", help="end this call after so many epochs")
    return parser.parse_args()


def make_folder(folder: Path) -> None:
    """Ten classes of MNIST digits as PNG files: 60 of each to train on, 20 to test with."""
    for split, count in (("train", 60), ("test", 20)):
        images, labels = mnist_excerpt(split)
        for digit in range(10):
            place = folder / split / str(digit)
            place.mkdir(parents=True, exist_ok=True)
            for i, image in enumerate(images[labels == digit][:count]):
                save_image(image / 255, place / f"{i:03d}.png")


def make_network(given: argparse.Namespace, data: Dataset) -> nn.Module:
    """A torchvision network with a head for our classes, converted."""
    torch.manual_seed(given.seed)
    trained = given.weights != "none"
    model = get_model(given.network, weights=given.weights if trained else None)
    name, head = list(model.named_modules())[-1]
    if not isinstance(head, nn.Linear):
        raise SystemExit(
            f"{given.network} ends in {type(head).__name__}, not in a linear layer; choose another network"
        )
    model.set_submodule(name, nn.Linear(head.in_features, len(data.classes)))
    plan = dcl.plan(
        model, (3, given.size, given.size), branches=given.branches,
        strategy="stochastic" if given.stochastic else "deterministic",
        eps=None if trained else 1.0,  # from a random start many layers in a row want it: see docs/numerics.md
    )  # fmt: skip
    plan = plan.only(*given.only) if given.only else plan
    some = torch.randperm(len(data.train_images))[:500]
    few = data.train_images[some], data.train_labels[some]
    images = (x for x, _ in Batches(*few, batch=50, train=False, normalise=data.statistics))
    init = {"init": "fit", "calibration": images} if trained else {"init": "random"}
    dcl.convert_(model, plan, seed=given.seed, **init)
    print(f"{given.network}: {plan.weights:,} weights, converted {plan.weights_after:,} in {len(plan.selected)} layers")
    return model


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Weights, buffers, momenta and the count of epochs, in one file that knows its SHA-256."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for i, state in optimizer.state_dict()["state"].items():
        tensors[f"momentum.{i}"] = state["momentum_buffer"]
    write_sealed(path, KIND, tensors, {"epoch": epoch})


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    tensors, about = read_sealed(path, KIND)
    model.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
    content = optimizer.state_dict()
    for name, value in tensors.items():
        if name.startswith("momentum."):
            content["state"][int(name.removeprefix("momentum."))] = {"momentum_buffer": value}
    optimizer.load_state_dict(content)
    return about["epoch"]


@torch.no_grad()
def error(model: nn.Module, batches: Batches) -> float:
    """Per cent of images that the network gets wrong."""
    model.eval()
    wrong = sum((model(images).argmax(1) != labels).sum().item() for images, labels in batches)
    model.train()
    return 100 * wrong / len(batches.labels)


def main() -> None:
    given = read_arguments()
    if given.make:
        make_folder(given.folder)
    data = load(f"folder:{given.folder}", size=given.size, mode="RGB")
    print(data)
    common = {"batch": given.batch, "normalise": data.statistics, "device": given.device}
    train = Batches(data.train_images, data.train_labels, seed=given.seed, pad=given.size // 8, **common)
    test = Batches(data.test_images, data.test_labels, train=False, **common)

    model = make_network(given, data).to(given.device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=given.lr, momentum=0.9, weight_decay=5e-4)
    dcl.follow_optimizer(model, optimizer)  # does nothing without a stochastic layer

    elsewhere = ("make", "device", "out", "resume", "stop_after")
    recipe = {key: value for key, value in vars(given).items() if key not in elsewhere}
    recipe["folder"] = data.source
    checkpoint = given.out / "checkpoint.safetensors"
    with RunFolder.open(given.out, recipe, resume=given.resume) as folder:
        begun = folder.read("metrics") or checkpoint.exists()  # a checkpoint that was removed is an error
        first = restore(checkpoint, model, optimizer) if begun else 0
        last = given.epochs if given.stop_after is None else min(given.epochs, first + given.stop_after)
        for epoch in range(first, last):
            for step, (images, labels) in enumerate(train.epoch(epoch)):
                part = (epoch + step / len(train)) / given.epochs
                optimizer.param_groups[0]["lr"] = given.lr * min(1, 10 * part + 0.1) * (1 - part)
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
            line = {"epoch": epoch + 1, "loss": loss.item(), "error": error(model, test)}
            save(checkpoint, model, optimizer, epoch + 1)
            folder.append("metrics", line)
            print(f"epoch {line['epoch']:3d}: last loss {line['loss']:.3f}, test error {line['error']:.1f} %")
    if last < given.epochs:
        print(f"{last} of {given.epochs} epochs done; resume with the same command and --resume")
        return
    dcl.save_model(model, given.out / "model.safetensors")
    print(f"Saved to {given.out / 'model.safetensors'}; load_model reads it")


if __name__ == "__main__":
    main()
