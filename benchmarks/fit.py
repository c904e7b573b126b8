"""Initialisations of a DCL layer in a trained LeNet, whose first fully connected layer is converted.

    python benchmarks/fit.py --mnist DIR --seeds 5 --device cuda --out results/fit.csv

For each seed a LeNet is trained on MNIST (5 epochs; SGD 0.9, weight decay 5e-4, batch 100, lr 0.03 after a warm-up of
300 steps, a tenth of it after 60 % and a hundredth after 90 %). Then ``fc1`` (800 -> 500) becomes T = 2 or 3 branches
of 100 filters, or the low-rank layer (T = 1) of as many weights, and all train on for one epoch: lr 0.003, a tenth of
the first, falling to 0 in a straight line. "unchanged" is the LeNet itself, trained on in the same way. No setting was
chosen by the test error. The fit's own settings: its floor was chosen on held-out training images; what it assumes of
inputs without calibration, on a LeNet and training images of this kind, and one early probe also looked at 2,000 test
images (without their labels). So the rows "fit" without calibration are not fully independent of this data.

``relative_error`` is what the fit reports: on held-out calibration rows, or without calibration on assumed inputs.
``relative_error_test`` is measured on the test images.
"""

import argparse
import copy
import csv
import math
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import torch_dcl as dcl
from torch_dcl.data.mnist import read_mnist
from torch_dcl.files import replacing
from torch_dcl.models import lenet

BATCH, RATE, WARM_UP = 100, 0.03, 300
WIDTH, CALIBRATION = 100, 4096
MEASURED = ["error_before", "error_after_convert", "error_after_epoch", "relative_error", "relative_error_test"]
COLUMNS = ["seed", "branches", "width", "init", "weights", *MEASURED, "device", "torch"]


def images(x):
    return x.unsqueeze(1).float() / 255


def epochs(model, x, y, count, rate, seed):
    """Train; ``rate`` gives the learning rate from the step and the number of steps."""
    torch.manual_seed(seed)
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9, weight_decay=5e-4)
    model.train()
    step, steps = 0, count * math.ceil(len(x) / BATCH)
    for _ in range(count):
        for pick in torch.randperm(len(x), generator=order).to(x.device).split(BATCH):
            for group in optimizer.param_groups:
                group["lr"] = rate(step, steps)
            loss = F.cross_entropy(model(images(x[pick])), y[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1


def training_rate(step, steps):
    drop = 1 if step < 0.6 * steps else 0.1 if step < 0.9 * steps else 0.01
    return RATE * min(1.0, (step + 1) / WARM_UP) * drop


def tuning_rate(step, steps):
    return 0.1 * RATE * (1 - step / steps)


@torch.no_grad()
def test_error(model, x, y):
    """In percent."""
    model.eval()
    wrong = sum(int((model(images(a)).argmax(1) != b).sum()) for a, b in zip(x.split(1000), y.split(1000), strict=True))
    return 100 * wrong / len(x)


@torch.no_grad()
def hidden(model, x):
    """relu(fc1) on all images."""
    found = []
    handle = model.fc1.register_forward_hook(lambda _module, _inputs, output: found.append(output.relu()))
    test_error(model, x, torch.zeros(len(x), device=x.device))
    handle.remove()
    return torch.cat(found)


def converted(model, branches, width, init, calibration):
    """The converted copy, and the error that the fit reports."""
    model = copy.deepcopy(model)
    plan = dcl.plan(model, model.input_size, branches=branches, width=width).only("fc1")
    if init == "random":
        dcl.convert_(model, plan, init="random")
        return model, math.nan
    batches = calibration if init == "fit+calibration" else None
    return model, dcl.convert_(model, plan, init="fit", calibration=batches).fits["fc1"].error


def weights(model):
    return sum(p.numel() for name, p in model.named_parameters() if not name.endswith("bias"))


def one_seed(seed, train, test, count):
    torch.manual_seed(seed)
    trained = lenet(10).to(train[0].device)
    epochs(trained, *train, count, training_rate, seed)
    before, target = test_error(trained, *test), hidden(trained, test[0])
    pick = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(seed))[:CALIBRATION]
    calibration = [images(x) for x in train[0][pick.to(train[0].device)].split(512)]
    variants = [(0, 0, "unchanged")]
    for branches in (2, 3):
        variants += [(branches, WIDTH, init) for init in ("random", "fit", "fit+calibration")]
        variants += [(1, branches * WIDTH, init) for init in ("fit", "fit+calibration")]
    for branches, width, init in variants:
        torch.manual_seed(seed)
        model, reported = (
            converted(trained, branches, width, init, calibration) if branches else (copy.deepcopy(trained), 0.0)
        )
        apart = float((hidden(model, test[0]) - target).square().sum() / target.square().sum())
        after = test_error(model, *test)
        epochs(model, *train, 1, tuning_rate, seed + 1)
        numbers = [before, after, test_error(model, *test), reported, apart]
        yield dict(zip(COLUMNS, [seed, branches, width, init, weights(model), *numbers], strict=False))


def table(rows):
    print(f"\n{'':30}{'weights':>9}" + "".join(f"{name:>22}" for name in MEASURED))
    for key in dict.fromkeys((row["branches"], row["width"], row["init"]) for row in rows):
        same = [row for row in rows if (row["branches"], row["width"], row["init"]) == key]
        name = f"T = {key[0]}, width {key[1]}, {key[2]}" if key[0] else key[2]
        cells = ""
        for column in MEASURED:
            values = [row[column] for row in same if not math.isnan(row[column])]
            spread = f"{statistics.stdev(values):.4f}" if len(values) > 1 else "–"
            cells += f"{statistics.fmean(values):>13.4f} ± {spread:6}" if values else f"{'–':>22}"
        print(f"{name:30}{same[0]['weights']:>9}{cells}   n = {len(same)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path, required=True, help="folder with the four idx files, packed or not")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5, help="of the training before the conversion")
    parser.add_argument("--images", type=int, default=60000, help="fewer than all training images, to try it out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    sets = []
    for split, size in (("train", arguments.images), ("test", None)):
        x, y = read_mnist(arguments.mnist, split)
        sets.append((x[:size].to(device), y[:size].to(device)))
    rows, begin = [], time.perf_counter()
    for seed in range(arguments.seeds):
        for row in one_seed(seed, *sets, arguments.epochs):
            rows.append({**row, "device": place, "torch": torch.__version__})
            shown = "  ".join(f"{name} {row[name]:.4g}" for name in MEASURED)
            print(
                f"{time.perf_counter() - begin:5.0f} s  seed {seed}  T = {row['branches']} {row['init']:16} {shown}",
                flush=True,
            )
    table(rows)
    print(f"{place}, torch {torch.__version__}, {time.perf_counter() - begin:.0f} s; errors in percent")
    if arguments.out:
        with replacing(arguments.out) as aside, aside.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)


if __name__ == "__main__":
    main()
