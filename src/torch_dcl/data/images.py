"""Image files: supported formats, refused files, and the conversion of every mode."""

import io
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torch_dcl.data.dataset import DataError

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["MAX_BYTES", "SUFFIXES", "read_image"]

SUFFIXES = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # no EPS, which would start Ghostscript
MAX_BYTES = 2**30  # of a file
_BITS, _PHOTOMETRIC = 258, 262  # tags of TIFF
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_image(path: Path | str, mode: str | None = None, *, data: bytes | None = None) -> "Image.Image":
    """Read one image file: BMP, GIF, JPEG, PNG, PPM, TIFF or WebP, whatever its suffix says.

    Of an animation or a file of several pages the first image is read. An EXIF orientation is not applied. With
    ``data``, the bytes of a file that is inside of another, the path is its name in messages.

    With a mode, `"RGB"` or `"L"`, every image is converted to it:

    | from | to 8 bits a channel |
    |---|---|
    | greyscale of 12 or 16 bits | scaled, so that white stays white |
    | colour of 16 bits | the high byte of each value, as Pillow reads it |
    | black and white | 0 and 255 |
    | palette | the colours of the palette |
    | CMYK, YCbCr | Pillow's conversion, without a colour profile |
    | transparency | ignored: the stored colours are used, as torchvision's `ImageFolder` does |
    | 32-bit numbers, CIELAB | refused: they have no known range, or no conversion |

    Raises:
        DataError: The path is not a regular file, or the file is too large, of another format, truncated, damaged, or
            has more pixels than Pillow allows (`PIL.Image.MAX_IMAGE_PIXELS`, twice).
    """
    from PIL import Image, UnidentifiedImageError

    try:
        if data is None:
            _check_file(Path(path))
        with Image.open(path if data is None else io.BytesIO(data), formats=_FORMATS) as file:
            file.load()
            return file.copy() if mode is None else _convert(file, mode)
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise DataError(f"{path}: {error} Remove it, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust it") from error
    except Exception as error:  # Pillow raises many kinds on damaged files
        unknown = isinstance(error, UnidentifiedImageError)
        said = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        reason = f"it is not one of {', '.join(_FORMATS)}" if unknown else said
        raise DataError(f"{path} cannot be read as an image ({reason}); repair or remove it") from error


def _check_file(path: Path) -> None:
    """Refuse files that must not be opened: a pipe waits for a writer, a device may be endless."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        kind = _KINDS.get(stat.S_IFMT(about.st_mode), "something else")
        raise DataError(f"{path} is {kind}, not an image file; remove it")
    if about.st_size > MAX_BYTES:
        raise DataError(f"{path} has {about.st_size:,} bytes, an image file may have {MAX_BYTES:,}; remove it")


def _convert(file: "Image.Image", mode: str) -> "Image.Image":
    # Pillow reads greyscale PPM of 16 bits, and in older releases PNG, as 32-bit numbers up to 65,535.
    if file.mode.startswith("I;16") or (file.mode == "I" and file.format in ("PNG", "PPM")):
        file = _eight_bits(file)
    elif file.mode in ("I", "F"):
        raise ValueError(f"its 32-bit numbers (mode {file.mode}) have no known range; save it with 8 or 16 bits")
    elif "transparency" in file.info:
        file = file.convert("RGBA")  # or Pillow warns
    return file.convert(mode)


def _eight_bits(file: "Image.Image") -> "Image.Image":
    """Greyscale of 12 or 16 bits to the nearest of 256 levels. `Image.convert` would clip everything above 255."""
    from PIL import Image

    tags = getattr(file, "tag_v2", {})
    highest = 2 ** int(tags[_BITS][0]) - 1 if _BITS in tags else 65_535
    levels = (np.asarray(file).astype(np.int64) * 255 + highest // 2) // highest
    if tags.get(_PHOTOMETRIC) == 0:  # white is 0, which Pillow does not invert
        levels = 255 - levels
    return Image.fromarray(levels.astype(np.uint8))
