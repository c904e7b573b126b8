"""Image files from elsewhere: what is read, as what, and what a person is told of the rest."""

import contextlib
import io
import os
import re
import socket
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from torch_dcl.data import DataError, ImageNetBatches, load
from torch_dcl.data.images import read_image

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n%%EOF\n"


def encoded(image, form, **options):
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def png(width, height, *, bits=8, colour=2, pixels=b"", chunks=()):
    """A PNG file from its parts."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(pixels)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def tiff(bits, photometric, pixels, width):
    """An uncompressed greyscale TIFF of one row."""
    fields = {256: width, 257: 1, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 1, 279: len(pixels)}
    pixels += b"\0" * (len(pixels) % 2)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in fields.items())
    start = struct.pack("<HI", 42, 8 + len(pixels))
    return b"II" + start + pixels + struct.pack("<H", len(fields)) + entries + struct.pack("<I", 0)


@pytest.fixture
def folder(tmp_path):
    """A folder of one image a class and split; the first one is `odd`."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8), (10, 20, 30)).save(tmp_path / split / name / "a.png")
    return tmp_path


@pytest.fixture
def readers(folder):
    """Every way that an image of a folder is read."""
    return [
        lambda: load(f"folder:{folder}", size=8, mode="RGB"),
        lambda: list(ImageNetBatches(folder, "train", 1, resize=8, crop=8, workers=0).epoch(0)),
    ]


def test_an_eps_file_named_png_starts_no_ghostscript(folder, readers, monkeypatch):
    started = []
    monkeypatch.setattr(
        EpsImagePlugin, "Ghostscript", lambda *_, **__: started.append("gs") or Image.new("RGB", (4, 4)).im
    )
    odd = folder / "train/cat/a.png"
    odd.write_bytes(EPS)
    with Image.open(odd) as file:
        file.load()
    assert started == ["gs"], "the file is not the trap that this test needs"
    for read in readers:
        with pytest.raises(DataError, match=r"a\.png cannot be read as an image \(it is not one of BMP, .*PNG"):
            read()
    assert started == ["gs"]


@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a device", "a folder"])
def test_what_is_no_file_is_named_and_not_waited_for(folder, readers, kind, monkeypatch):
    odd = folder / "train/cat/a.png"
    odd.unlink()
    if kind == "a named pipe":
        os.mkfifo(odd)
    elif kind == "a socket":
        monkeypatch.chdir(odd.parent)  # the path of a socket must be short
        socket.socket(socket.AF_UNIX).bind(odd.name)
    elif kind == "a device":
        odd.symlink_to("/dev/zero")
    else:
        odd.mkdir()
    for read in readers:
        with pytest.raises(DataError, match=rf"a\.png is {kind}, not an image file; remove it"):
            read()


def test_a_file_of_a_terabyte_is_not_opened(folder, readers):
    with (folder / "train/cat/a.png").open("wb") as file:
        file.truncate(2**40)
    for read in readers:
        with pytest.raises(
            DataError, match=r"a\.png has 1,099,511,627,776 bytes, an image file may have 1,073,741,824"
        ):
            read()


def test_a_link_without_an_end_is_named(folder, readers):
    odd = folder / "train/cat/a.png"
    odd.unlink()
    odd.symlink_to("gone.png")
    for read in readers:
        with pytest.raises(DataError, match=r"a\.png cannot be read as an image \(.*No such file"):
            read()


WHOLE = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)


@pytest.mark.parametrize(
    "content",
    [
        *(encoded(Image.fromarray(WHOLE), form)[:-900] for form in ("PNG", "JPEG", "BMP", "PPM", "TIFF", "WEBP")),
        png(20_000, 20_000),  # 400 million pixels
        png(2, 2, pixels=b"\0" * 14, chunks=[(b"zTXt", b"a\0\0" + zlib.compress(b"a" * 10**8))]),
        b"P6 2 2",
        b"",
        b"<html>not found</html>",
    ],
    ids=["png", "jpeg", "bmp", "ppm", "tiff", "webp", "bomb", "text bomb", "header", "empty", "html"],
)
def test_truncated_files_and_bombs_are_named(folder, readers, content):
    (folder / "train/cat/a.png").write_bytes(content)
    for read in readers:
        with pytest.raises(DataError, match=r"train/cat/a\.png.*[Rr]e(move|pair)"):
            read()


def test_damaged_files_raise_nothing_else(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "a.png"
    image = Image.fromarray(WHOLE[:9, :9])
    for form in ("PNG", "JPEG", "BMP", "PPM", "TIFF", "WEBP", "GIF"):
        whole = bytearray(encoded(image, form))
        for _ in range(50):
            damaged = whole.copy()
            for place in rng.integers(0, min(len(whole), 200), 3):
                damaged[place] = rng.integers(256)
            path.write_bytes(damaged)
            with warnings.catch_warnings(), contextlib.suppress(DataError):
                warnings.simplefilter("ignore")
                assert read_image(path, "RGB").mode == "RGB"


# Conversions

RAMP = np.arange(65_536, dtype=np.uint16).reshape(256, 256)
NEAREST = np.round(RAMP / 65_535 * 255)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.png", encoded(Image.fromarray(RAMP), "PNG")),
        ("a.tif", encoded(Image.fromarray(RAMP), "TIFF")),
        ("b.tif", encoded(Image.fromarray(RAMP.astype(">u2")), "TIFF")),
        ("a.pgm", b"P5 256 256 65535\n" + RAMP.astype(">u2").tobytes()),
    ],
)
def test_greyscale_of_16_bits_is_scaled(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    for mode in ("L", "RGB"):
        found = np.atleast_3d(np.asarray(read_image(tmp_path / name, mode)))
        assert found.dtype == np.uint8
        assert (found == NEAREST[:, :, None]).all()


def test_greyscale_tiff_of_12_bits_and_with_white_as_0(tmp_path):
    path = tmp_path / "a.tif"
    for content, levels in (
        (tiff(12, 1, bytes([0x00, 0x08, 0x00, 0xFF, 0xF0, 0x00]), 4), [0, 128, 255, 0]),
        (tiff(16, 1, np.array([0, 257, 65_535], "<u2").tobytes(), 3), [0, 1, 255]),
        (tiff(16, 0, np.array([0, 257, 65_535], "<u2").tobytes(), 3), [255, 254, 0]),
        (tiff(8, 0, bytes([0, 1, 255]), 3), [255, 254, 0]),
    ):
        path.write_bytes(content)
        assert np.asarray(read_image(path, "L")).ravel().tolist() == levels


def test_colour_of_16_bits_keeps_its_high_byte(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(png(1, 1, bits=16, pixels=b"\0" + struct.pack(">3H", 0x12FF, 0x8000, 0xFFFF)))
    assert read_image(path, "RGB").getpixel((0, 0)) == (0x12, 0x80, 0xFF)


@pytest.mark.parametrize("form", ["JPEG", "TIFF"])
def test_cmyk_becomes_the_printed_colour(tmp_path, form):
    path = tmp_path / "a.jpg"
    ink = (0, 255, 255, 0), (255, 0, 0, 0), (0, 0, 0, 255), (0, 0, 0, 0), (51, 102, 0, 51)
    for cmyk in ink:
        path.write_bytes(encoded(Image.new("CMYK", (16, 16), cmyk), form))
        key = 1 - cmyk[3] / 255
        printed = [255 * (1 - part / 255) * key for part in cmyk[:3]]
        np.testing.assert_allclose(read_image(path, "RGB").getpixel((8, 8)), printed, atol=3)


@pytest.mark.parametrize("form", ["PNG", "WEBP", "GIF", "TIFF"])
def test_the_first_frame_of_an_animation_is_read(tmp_path, form):
    path = tmp_path / "a.png"
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    path.write_bytes(encoded(frames[0], form, save_all=True, append_images=frames[1:]))
    with Image.open(path) as file:
        assert file.n_frames == 3
    np.testing.assert_allclose(read_image(path, "RGB").getpixel((4, 4)), (255, 0, 0), atol=2)


@pytest.mark.parametrize("transparency", [bytes([0, 100]), 1, None])
def test_a_palette_gives_its_colours_and_transparency_is_ignored(tmp_path, transparency):
    path = tmp_path / "a.png"
    image = Image.new("P", (4, 4), 1)
    image.putpalette([1, 2, 3, 10, 20, 30])
    image.putpixel((0, 0), 0)
    path.write_bytes(encoded(image, "PNG", **({} if transparency is None else {"transparency": transparency})))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read_image(path, "RGB")
    assert (found.getpixel((0, 0)), found.getpixel((3, 3))) == ((1, 2, 3), (10, 20, 30))
    assert read_image(path, "L").getpixel((3, 3)) == round(0.299 * 10 + 0.587 * 20 + 0.114 * 30)


def test_other_modes(tmp_path):
    path = tmp_path / "a.png"
    for mode, value, colour in (("RGBA", (1, 2, 3, 0), (1, 2, 3)), ("LA", (9, 0), (9, 9, 9)), ("1", 1, (255,) * 3)):
        path.write_bytes(encoded(Image.new(mode, (4, 4), value), "PNG"))
        assert read_image(path, "RGB").getpixel((0, 0)) == colour
        assert read_image(path).mode == mode


@pytest.mark.parametrize(("mode", "value"), [("I", 70_000), ("F", 0.5), ("LAB", (1, 2, 3))])
def test_numbers_without_a_range_are_refused(tmp_path, mode, value):
    path = tmp_path / "a.tif"
    path.write_bytes(encoded(Image.new(mode, (4, 4), value), "TIFF"))
    with pytest.raises(DataError, match=rf"a\.tif cannot be read as an image \(.*{mode}"):
        read_image(path, "L")


def test_a_folder_without_a_mode_still_names_the_way_to_convert(folder):
    for path in folder.rglob("*.png"):
        Image.fromarray(RAMP[:8, :8]).save(path)
    with pytest.raises(DataError, match=r"has mode I;16; pass mode='RGB' or mode='L'"):
        load(f"folder:{folder}")
    assert re.search("converted to L", load(f"folder:{folder}", mode="L").source)
