"""Your own data: folders of images in torchvision's layout, and arrays in numpy files."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_dcl.data.dataset import DataError, Dataset
from torch_dcl.data.draws import whole_number
from torch_dcl.data.formats import read_bytes, read_npy
from torch_dcl.data.images import SUFFIXES, read_image

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["class_folders", "has_arrays", "image_files", "read_arrays", "read_folder"]

_ARRAYS = [f"{split}_{kind}.npy" for split in ("train", "test") for kind in ("images", "labels")]
_CHANNELS = (1, 3)
_MAX_NAMES = 2**24  # bytes of a list of class names, of which 65,536 are possible


def class_folders(folder: Path) -> list[str]:
    """The class names of a split, at least one: its folders, sorted, without hidden ones."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist; put the images into {folder}/CLASS/*.png")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataError(f"{folder} has no class folders; put the images into {folder}/CLASS/*.png")
    return names


def image_files(folder: Path, classes: list[str]) -> list[tuple[Path, int]]:
    """The image files of a split with their labels, by class and then by name; classes must be its folders.

    Hidden files and folders are left out, such as macOS's `._1.jpg` and Jupyter's `.ipynb_checkpoints`.
    """
    names = class_folders(folder)
    if names != classes:
        differ = sorted(set(names) ^ set(classes))
        raise DataError(f"{folder} must have the same class folders as the training set; these differ: {differ[:5]}")
    files = []
    for label, name in enumerate(classes):
        start = len(str(folder / name))
        found = (path for path in (folder / name).rglob("*") if path.suffix.lower() in SUFFIXES)
        paths = sorted(path for path in found if "/." not in str(path)[start:])
        if not paths:
            kinds = ", ".join(sorted(SUFFIXES))
            raise DataError(f"{folder / name} has no images; put some there ({kinds}), or remove the class everywhere")
        files += [(path, label) for path in paths]
    return files


def read_folder(folder: Path, size: int | tuple[int, int] | None, mode: str | None) -> Dataset:
    """Read `train/CLASS/*` and `test/CLASS/*` into memory; classes are the folder names, sorted.

    `val/` replaces a missing `test/`; where both exist it is the validation split. With a size every image is resized
    to this height and width, by antialiased bilinear interpolation, without keeping the aspect ratio; with a mode it is
    converted, see `images.read_image`. Otherwise all images must have one size and one mode, RGB or L.
    """
    if mode not in (None, "RGB", "L"):
        raise ValueError(f"mode must be 'RGB', 'L' or None, not {mode!r}")
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist; name the folder with train/ and test/ (or val/)")
    classes = class_folders(folder / "train")
    held_out = [name for name in ("test", "val") if (folder / name).is_dir()]
    if not held_out:
        raise FileNotFoundError(f"{folder} has neither test/ nor val/; put the test images into {folder}/test/CLASS")
    splits = {"train": "train", "test": held_out[0]}
    if len(held_out) == 2:
        splits["validation"] = "val"
    form = _Form(size, mode)
    read = {split: form.read(image_files(folder / name, classes)) for split, name in splits.items()}
    counts = " + ".join(f"{len(read[split][1]):,}" for split in ("train", "test"))
    held = read.get("validation", (None, None))
    source = f"image folder, {counts}, from {folder}" + form.note()
    return Dataset(folder.name, *read["train"], *read["test"], tuple(classes), source, *held)


def _read_size(size: int | tuple[int, int] | None) -> tuple[int, int]:
    """Height and width from one number or two; (1, 1) for none."""
    both = size if isinstance(size, tuple | list) else (1, 1) if size is None else (size, size)
    if len(both) != 2:
        raise ValueError(f"size must be one whole number, or height and width, not {size!r}")
    height, width = (whole_number("size", side, 1) for side in both)
    return height, width


class _Form:
    """The size and mode that all images share: given, or those of the first image."""

    def __init__(self, size: int | tuple[int, int] | None, mode: str | None):
        height, width = _read_size(size)
        self.resized, self.converted = size is not None, mode
        self.size: tuple[int, int] | None = (width, height) if self.resized else None
        self.mode = mode
        self.first: Path | None = None

    def note(self) -> str:
        done = [f"resized to {self.size[1]} × {self.size[0]}"] if self.resized and self.size else []
        done += [f"converted to {self.converted}"] if self.converted else []
        return "".join(f", {what}" for what in done)

    def read(self, files: list[tuple[Path, int]]) -> tuple[Tensor, Tensor]:
        """All images of a split, uint8 [N, C, H, W], and their labels."""
        images: npt.NDArray[np.uint8] | None = None
        for place, (path, _) in enumerate(files):
            pixels = np.atleast_3d(np.asarray(self._open(path), np.uint8)).transpose(2, 0, 1)
            if images is None:
                images = np.empty((len(files), *pixels.shape), np.uint8)
            images[place] = pixels
        return torch.from_numpy(images), torch.tensor([label for _, label in files])

    def _open(self, path: Path) -> "Image.Image":
        from PIL.Image import Resampling

        image = read_image(path, self.converted)
        self._check(path, image)
        return image.resize(self.size, Resampling.BILINEAR) if self.resized and self.size else image

    def _check(self, path: Path, image: "Image.Image") -> None:
        self.first = self.first or path
        self.mode = self.mode or image.mode
        if self.mode not in ("RGB", "L"):
            raise DataError(f"{path} has mode {image.mode}; pass mode='RGB' or mode='L' to convert every image")
        if image.mode != self.mode:
            raise DataError(
                f"images of mixed mode: {self.first} is {self.mode}, {path} is {image.mode}; pass mode='RGB' or "
                "mode='L' to convert every image"
            )
        if self.resized:
            return
        self.size = self.size or image.size
        if image.size != self.size:
            one, other = (f"{height} × {width}" for width, height in (self.size, image.size))
            raise DataError(
                f"images of mixed size: {self.first} is {one} (height × width), {path} is {other}; pass size= to "
                "resize every image"
            )


def has_arrays(folder: Path) -> bool:
    """Whether a folder has any of the four files of `read_arrays`."""
    return any((folder / name).is_file() for name in _ARRAYS)


def read_arrays(folder: Path, name: str, classes: tuple[str, ...] | None = None) -> Dataset:
    """Open `{train,test}_{images,labels}.npy`, memory-mapped: nothing is read before it is used.

    Images are uint8 `[N, H, W]`, `[N, H, W, C]` or `[N, C, H, W]` with 1 or 3 channels. Where class names are not given
    they are those of `classes.json`, a list, in the same folder; otherwise the numbers up to the largest label.
    """
    missing = [file for file in _ARRAYS if not (folder / file).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}; write them with numpy.save")
    train, train_labels, test, test_labels = (folder / file for file in _ARRAYS)
    labels = [_labels(train_labels), _labels(test_labels)]
    if classes is None:
        highest = max(int(some.max()) if len(some) else 0 for some in labels)
        classes = _class_names(folder / "classes.json") or tuple(str(label) for label in range(highest + 1))
    counts = f"{len(labels[0]):,} + {len(labels[1]):,}"
    source = f"arrays, {counts}, from {folder}"
    return Dataset(name, _channels_first(train), labels[0], _channels_first(test), labels[1], classes, source)


def _labels(path: Path) -> Tensor:
    array = read_npy(path)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{path}: labels must be whole numbers in one dimension, not {array.dtype} {list(array.shape)}")
    if len(array) and int(array.max()) > 65_535:
        raise DataError(f"{path}: label {int(array.max())} is out of range, at most 65,535 is supported")
    return torch.from_numpy(array.astype(np.int64))


def _channels_first(path: Path) -> Tensor:
    array = read_npy(path)
    if array.dtype != np.uint8 or array.ndim not in (3, 4):
        raise DataError(
            f"{path}: images must be uint8 [N, H, W], [N, H, W, C] or [N, C, H, W], not {array.dtype} "
            f"{list(array.shape)}; convert them first"
        )
    images = torch.from_numpy(array)
    if images.ndim == 3:
        return images[:, None]
    first, last = images.shape[1] in _CHANNELS, images.shape[3] in _CHANNELS
    if first == last:
        why = "could be channels first or last" if first else "has neither 1 nor 3 channels"
        raise DataError(f"{path}: shape {list(images.shape)} {why}; save it as [N, C, H, W] with 1 or 3 channels")
    return images if first else images.permute(0, 3, 1, 2)


def _class_names(path: Path) -> tuple[str, ...] | None:
    if not path.is_file():
        return None
    try:
        names = json.loads(read_bytes(path, _MAX_NAMES))
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}); write a list of class names, or remove it") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path} must hold a list of class names; write one, or remove it")
    return tuple(names)
