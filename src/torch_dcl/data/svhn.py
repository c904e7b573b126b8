"""SVHN: its files, the paper's validation split, and its preprocessing.

The paper follows the Maxout paper: 400 images of each class of the training set and 200 of each class of the extra set
are kept for validation, the remaining 598,388 are trained on. Each image is normalised globally, then locally.
"""

from pathlib import Path

import torch
from torch import Tensor

from torch_dcl.data.dataset import DataError, Dataset
from torch_dcl.data.draws import draw
from torch_dcl.data.mat import read_mat

__all__ = ["contrast_normalise", "local_contrast_normalise", "preprocess", "read_svhn", "set_aside"]

FILES = {split: f"{split}_32x32.mat" for split in ("train", "test", "extra")}
PER_CLASS = {"train": 400, "extra": 200}
_THRESHOLD = 1e-4
_CLASSES = tuple(str(digit) for digit in range(10))


def read_svhn(place: Path, *, extra: bool = True, seed: int = 0) -> Dataset | None:
    """Read SVHN's cropped digits with the paper's validation split, from `place`, its `svhn` or its `SVHN`.

    The rest of train, then of extra, is trained on, and the validation images have the same order. None when no file is
    there; an error where only some are.
    """
    wanted = [split for split in FILES if extra or split != "extra"]
    for folder in (place / "svhn", place / "SVHN", place):
        missing = [FILES[split] for split in wanted if not (folder / FILES[split]).is_file()]
        if len(missing) == len(wanted):
            continue
        if missing:
            alone = "; or pass extra=False to do without the extra images" if missing == [FILES["extra"]] else ""
            raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}; put them there{alone}")
        parts = {split: tuple(map(torch.from_numpy, read_mat(folder / FILES[split]))) for split in wanted}
        kept, held = [], []
        for split in ("train", "extra") if extra else ("train",):
            images, labels = parts.pop(split)
            aside = set_aside(labels, PER_CLASS[split], split, seed)
            held.append((images[aside], labels[aside].long()))
            kept.append((images[~aside], labels[~aside].long()))
        train, train_labels = (torch.cat(tensors) for tensors in zip(*kept, strict=True))
        validation = (torch.cat(tensors) for tensors in zip(*held, strict=True))
        test, test_labels = parts["test"]
        counts = f"{len(train):,} + {len(test):,}, validation {sum(len(labels) for _, labels in held):,}"
        source = f"SVHN{'' if extra else ' without extra'}, {counts}, from {folder}"
        return Dataset("svhn", train, train_labels, test, test_labels.long(), _CLASSES, source, *validation)
    return None


def set_aside(labels: Tensor, per_class: int, part: str, seed: int = 0) -> Tensor:
    """Choose the validation images of one part of SVHN, `"train"` or `"extra"`: bool `[N]`.

    Every image gets the integer hash of (seed, `"svhn validation " + part`, its index). Of each class those with the
    smallest hashes are chosen, of equal ones the earlier: 400 of train, 200 of extra.
    """
    order = draw(seed, f"svhn validation {part}", 0, torch.arange(len(labels))).argsort(stable=True)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        of_class = order[labels[order] == digit]
        if len(of_class) < per_class:
            raise DataError(
                f"SVHN's {part} set has {len(of_class)} images of class {digit}, {per_class} are needed for "
                "validation; is the file whole?"
            )
        chosen[of_class[:per_class]] = True
    return chosen


def contrast_normalise(images: Tensor) -> Tensor:
    """Subtract the mean of each image over pixels and channels, and divide by its norm.

    float32 (or float64, if given); a constant image becomes 0.
    """
    x = images if images.dtype == torch.float64 else images.float()
    x = x - x.mean((1, 2, 3), keepdim=True)
    norm = x.square().sum((1, 2, 3), keepdim=True).sqrt()
    return x / torch.where(norm < 1e-8, torch.ones_like(norm), norm)


def local_contrast_normalise(x: Tensor) -> Tensor:
    """LeCun's local contrast normalisation: (x − G∗x) / max(d, mean(d), 1e-4) with d = √(G∗x²), in every channel.

    G is a 7 × 7 gaussian of σ 2 with sum 1, and pixels outside of the image count as 0. d is computed from x itself,
    not from the centred x − G∗x; its mean is over the channel of the image.
    """
    centred = x - _blur(x)
    d = _blur(x.square()).sqrt()
    return centred / torch.maximum(d, d.mean((2, 3), keepdim=True)).clamp_min(_THRESHOLD)


def preprocess(images: Tensor) -> Tensor:
    """Contrast normalisation, then local contrast normalisation: the inputs of the paper's SVHN networks, float32.

    It runs on the device of the images. Pass it to `Batches` as `normalise`.
    """
    return local_contrast_normalise(contrast_normalise(images))


def _blur(x: Tensor) -> Tensor:
    """G∗x, separably: one direction after the other. Sums instead of convolutions, so that no TF32 is used on a GPU."""
    offsets = torch.arange(-3, 4, dtype=torch.float64)
    weights = torch.exp(-(offsets**2) / 8)
    weights /= weights.sum()
    for dim in (2, 3):
        size = x.shape[dim]
        padded = torch.nn.functional.pad(x, (3, 3, 0, 0) if dim == 3 else (0, 0, 3, 3))
        total = padded.narrow(dim, 0, size) * weights[0].item()
        for shift in range(1, 7):
            total.add_(padded.narrow(dim, shift, size), alpha=weights[shift].item())
        x = total
    return x
