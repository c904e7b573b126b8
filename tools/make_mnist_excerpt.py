#!/usr/bin/env python3
"""Draw the excerpt of MNIST that ships inside the package.

    python tools/make_mnist_excerpt.py FOLDER [--out FILE]

FOLDER holds the four idx files of MNIST, gzipped. The rule: every digit of a split has the key SHA-256("SPLIT INDEX"),
INDEX being its place in the original file, counted from 0. For each class the digits with the smallest keys are taken,
600 from the training set and 100 from the test set. The chosen digits are then ordered by SHA-256("order SPLIT INDEX"),
so that the classes are mixed to the end. Pixels and labels are copied unchanged.

A draw, rather than the first digits of the file: the first half of the MNIST test set is easier than the second.

The same input gives the same arrays everywhere, and the same bytes with the same release of zlib. The script prints the
SHA-256 that belongs into `src/torch_dcl/data/mnist.py`.
"""

import argparse
import io
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torch_dcl.data.formats import read_idx
from torch_dcl.files import sha256_bytes, write_bytes

Array = npt.NDArray[np.uint8]

SPLITS = {"train": ("train", 600), "test": ("t10k", 100)}
CLASSES = 10
OUT = Path(__file__).resolve().parent.parent / "src" / "torch_dcl" / "data" / "mnist_excerpt.npz"


def choose(labels: Array, split: str, per_class: int) -> npt.NDArray[np.int64]:
    """Choose the indices of `per_class` digits of every class, in the order of the excerpt."""
    drawn = sorted(range(len(labels)), key=lambda index: sha256_bytes(f"{split} {index}".encode()))
    chosen: list[int] = []
    for digit in range(CLASSES):
        mine = [index for index in drawn if labels[index] == digit][:per_class]
        if len(mine) < per_class:
            raise ValueError(f"the {split} set has {len(mine)} digits of class {digit}, {per_class} are needed")
        chosen += mine
    chosen.sort(key=lambda index: sha256_bytes(f"order {split} {index}".encode()))
    return np.array(chosen, np.int64)


def excerpt(folder: Path) -> dict[str, Array]:
    """Read MNIST from a folder of gzipped idx files and choose the digits of both splits."""
    arrays = {}
    for split, (prefix, per_class) in SPLITS.items():
        images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz", 3)
        labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", 1)
        chosen = choose(labels, split, per_class)
        arrays[f"{split}_images"] = images[chosen]
        arrays[f"{split}_labels"] = labels[chosen]
    return arrays


def pack(arrays: dict[str, Array]) -> bytes:
    """Pack arrays as `numpy.savez_compressed` does, without a clock in the file and at the highest level of deflate."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array, allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy")  # dated 1980-01-01
            info.create_system = 3
            info.external_attr = 0o644 << 16
            archive.writestr(info, member.getvalue(), zipfile.ZIP_DEFLATED, compresslevel=9)
    return packed.getvalue()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with the four gzipped idx files of MNIST")
    parser.add_argument("--out", type=Path, default=OUT, help="file to write (default: the one in the package)")
    args = parser.parse_args()
    content = pack(excerpt(args.folder))
    write_bytes(args.out, content)
    print(f"{args.out}: {len(content):,} bytes, SHA-256 {sha256_bytes(content)}")


if __name__ == "__main__":
    main()
