"""Where MNIST is, where output may go, and which device to use."""

from pathlib import Path

from torch_dcl.cli.names import UsageError

__all__ = ["check_output", "find_mnist", "make_folder", "mnist_in", "read_device"]

_FIRST = "train-images-idx3-ubyte"
_INSIDE = ("MNIST/raw", "mnist", ".")


def mnist_in(place: Path) -> Path | None:
    """The folder with MNIST's idx files in or below a place; None where there is none."""
    for inside in _INSIDE:
        folder = place / inside
        if any((folder / name).is_file() for name in (_FIRST, f"{_FIRST}.gz")):
            return folder
    return None


def find_mnist(given: str | None) -> Path | None:
    """The folder that is meant.

    Args:
        given: A folder; "auto" or None for the usual places; "excerpt" for the embedded digits.

    Returns:
        The folder with the idx files; None for the embedded digits.

    Raises:
        UsageError: A folder was named, and MNIST is not there.
    """
    from torch_dcl.data.sources import places  # noqa: PLC0415

    if given == "excerpt":
        return None
    if given not in (None, "", "auto"):
        found = mnist_in(Path(str(given)).expanduser())
        if found is None:
            raise UsageError(
                f"{given} has no idx files of MNIST ({_FIRST}, gzipped or not, there or in MNIST/raw); "
                "leave the option out for the embedded excerpt"
            )
        return found
    return next((found for place in places() if (found := mnist_in(place)) is not None), None)


def check_output(path: Path) -> None:
    """Refuse a file that cannot be written, before any work goes into its content.

    Raises:
        UsageError: Its folder does not exist, or it is a folder itself.
    """
    if not path.parent.is_dir():
        raise UsageError(f"{path} cannot be written: the folder {path.parent} does not exist")
    if path.is_dir():
        raise UsageError(f"{path} cannot be written: it is a folder; name a file inside it")


def make_folder(path: Path) -> None:
    """Make a folder to write to, with those above it.

    Raises:
        UsageError: A file is in the way.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"{path} cannot be a folder: a file is in the way; choose another --out") from None


def read_device(given: str) -> str:
    """The device that is meant; "auto" is the GPU where there is one.

    Raises:
        UsageError: It is not there.
    """
    import torch  # noqa: PLC0415

    if given == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(given).type
        torch.empty(1, device=given)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        raise UsageError(f"the device {given!r} cannot be used ({first}); use --device cpu") from None
    return given if kind != "meta" else "cpu"
