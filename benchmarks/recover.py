"""What ``recover_`` regains after the conversion of a whole network, against training on with labels.

    python benchmarks/recover.py --cifar10 DIR --seeds 3 --out results/recover.csv

For each seed a network (six convolutions with batch norm, a hidden layer with dropout; 239,040 weights) is trained on
45,000 of CIFAR-10's training images: 6 epochs, batch 128, SGD with Nesterov momentum 0.9, weight decay 5e-4, one cycle
up to rate 0.1, flips and crops. All its units become DCL layers, or low-rank layers of equal weights, fitted with 512
images as calibration. Then both train for some 350 steps of 128 of the first 1,000, 5,000 or 45,000 training images,
with flips and crops:

- "recover": ``recover_`` with its default rate. It sees no label.
- "labels": the cross-entropy of the labels, in training mode, with the same optimiser at the same rate and schedule.

Errors are on the 10,000 test images, which nothing was chosen by. The settings of ``recover_`` were chosen on the other
5,000 training images, with a network of this kind, and on digits (docs/decisions.md).
A file that exists is resumed: what it has is not trained again.
"""

import argparse
import copy
import time
from pathlib import Path

import torch
from rows import read_rows, write_rows
from torch import nn
from torch.nn import functional as F

import torch_dcl as dcl
from torch_dcl.data import Batches, load

BATCH, STEPS, TRAINED, CALIBRATION = 128, 350, 45_000, 512
IMAGES = (1_000, 5_000, 45_000)
KEY = ["seed", "layer", "images", "method"]
COLUMNS = [*KEY, "weights_ratio", "error_before", "error_converted", "error", "steps", "seconds", "device", "torch"]


def network():
    def block(inputs, outputs):
        return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()

    def pair(inputs, outputs):
        return *block(inputs, outputs), *block(outputs, outputs), nn.MaxPool2d(2)

    return nn.Sequential(
        *block(3, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 32), *block(32, 64), nn.MaxPool2d(2), *pair(64, 64),
        nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10),
    ).to(memory_format=torch.channels_last)  # fmt: skip


@torch.no_grad()
def error(model, batches):
    """In percent."""
    model.eval()
    wrong = [int((model(images).argmax(1) != labels).sum()) for images, labels in batches]
    return 100 * sum(wrong) / len(batches.labels)


def teacher(seed, batches, epochs):
    torch.manual_seed(seed)
    model = network().to(batches.labels.device).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=epochs * len(batches))
    for epoch in range(epochs):
        for images, labels in batches.epoch(epoch):
            step(optimizer, F.cross_entropy(model(images), labels))
            schedule.step()
    return model.eval()


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_on(model, batches, epochs, lr=0.01):
    """With labels, at the rates of ``recover_``."""
    optimizer, done, total = torch.optim.Adafactor(model.parameters(), lr), 0, epochs * len(batches)
    model.train()
    for epoch in range(epochs):
        for images, labels in batches.epoch(epoch):
            share = (done + 0.5) / total
            optimizer.param_groups[0]["lr"] = lr * min(share / 0.1, (1 - share) / 0.9)
            step(optimizer, F.cross_entropy(model(images), labels))
            done += 1


def converted(plain, layer, calibration):
    model = copy.deepcopy(plain)
    plan = dcl.plan(model, (3, 32, 32))
    if layer == "low-rank":
        names = [row.name for row in plan.selected]
        plan = dcl.plan(model, (3, 32, 32), branches=1, ratio=0.5).only(*names)
    dcl.convert_(model, plan, init="fit", calibration=calibration, progress=False)
    return model, plan.weights_after / plan.weights


def measure(given, device, place):
    data = load(f"arrays:{given.cifar10}")
    settings = {"normalise": data.statistics, "device": device}

    def train(count, seed):
        images, labels = data.train_images[:count], data.train_labels[:count]
        return Batches(images, labels, min(BATCH, count), seed, flip=True, pad=4, **settings)

    test = Batches(data.test_images, data.test_labels, 500, train=False, **settings)
    calibration = [
        x for x, _ in Batches(data.train_images[:CALIBRATION], data.train_labels[:CALIBRATION], 128, **settings)
    ]
    done = {tuple(row[name] for name in KEY) for row in read_rows(given.out)}
    for seed in range(given.first, given.first + given.seeds):
        cells = [
            (layer, images, method)
            for layer in ("dcl", "low-rank") for images in IMAGES for method in ("recover", "labels")
            if images <= given.images and (str(seed), layer, str(images), method) not in done
        ]  # fmt: skip
        if not cells:
            continue
        plain = teacher(seed, train(min(TRAINED, given.images), seed), given.epochs)
        before = error(plain, test)
        starts = {layer: converted(plain, layer, calibration) for layer in dict.fromkeys(cell[0] for cell in cells)}
        for layer, images, method in cells:
            model, batches = copy.deepcopy(starts[layer][0]), train(images, seed + 100)
            start, epochs = error(model, test), max(1, round(given.steps / len(batches)))
            begin = time.perf_counter()
            if method == "recover":
                dcl.recover_(model, plain, batches, epochs=epochs, progress=False)
            else:
                train_on(model, batches, epochs)
            seconds, after = time.perf_counter() - begin, error(model, test)
            numbers = [round(starts[layer][1], 4), round(before, 2), round(start, 2), round(after, 2)]
            numbers += [epochs * len(batches), round(seconds, 1), place, torch.__version__]
            yield dict(zip(COLUMNS, [seed, layer, images, method, *numbers], strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path, required=True, help="folder with {train,test}_{images,labels}.npy")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--epochs", type=int, default=6, help="of the training before the conversion")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--images", type=int, default=TRAINED, help="fewer than all training images, to try it out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    device = torch.device(given.device)
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    for row in measure(given, device, place):
        print("  ".join(f"{name} {row[name]}" for name in COLUMNS[:-2]), flush=True)
        if given.out:
            write_rows(given.out, COLUMNS, [row], KEY)


if __name__ == "__main__":
    main()
