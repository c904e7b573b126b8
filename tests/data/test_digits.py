"""Multi-digit sets: the same bytes every time, the right numbers, and the picture that PIL would draw.

`PilWriter` is an independent generator: one image at a time, with PIL's own affine transform and resize. It takes the
random draws from the library and nothing else. `benchmarks/digits.py` times it beside the library.
"""

import dataclasses
import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageChops

from torch_dcl.data import digits, mnist_excerpt
from torch_dcl.data.layouts import LAYOUTS, Digit, Layout

ONE = Digit(0, 0)
PLAIN = Layout("plain", (ONE,))


class PilWriter:
    """Writes one image of a set at a time, without noise."""

    def __init__(self, layout, split, mnist, seed=0, count=None):
        self.layout = layout
        images, _ = mnist
        self.images = [Image.fromarray(image) for image in images.numpy()]
        segments = digits.segment(mnist, split)
        stream = digits._Stream(layout.name, split, seed)
        size = digits.SIZES[split]
        numbers = digits._numbers(layout, stream, size)[:count]
        draw = digits._draw(layout, stream, segments, torch.arange(size)[:count], numbers)
        self.source = segments.original[draw.source].T.tolist()
        self.centre = (draw.centre / 256).permute(2, 1, 0).tolist()
        self.scale = (draw.scale / 256).T.tolist()
        self.angle = (draw.angle / 2).T.tolist()

    def image(self, index):
        placed = []
        for k, digit in enumerate(self.layout.digits):
            picture = self.cut(self.images[self.source[index][k]])
            turn = self.angle[index][k]
            if turn or digit.mirror:
                picture = self.turned(picture, turn, digit.mirror)
            (y, x), scale = self.centre[index][k], self.scale[index][k]
            w, h = picture.width * scale, picture.height * scale
            placed.append((picture, scale, (x - w / 2, y - h / 2, x + w / 2, y + h / 2)))
        left, top = (min(box[i] for _, _, box in placed) for i in (0, 1))
        right, bottom = (max(box[i] for _, _, box in placed) for i in (2, 3))
        number = Image.new("L", (28, 28))
        for picture, scale, (x0, y0, _, _) in placed:
            # The number's box, seen from the digit's own pixels.
            box = [(left - x0) / scale, (top - y0) / scale, (right - x0) / scale, (bottom - y0) / scale]
            margin = math.ceil(max(-box[0], -box[1], box[2] - picture.width, box[3] - picture.height, 0)) + 8
            paper = Image.new("L", (picture.width + 2 * margin, picture.height + 2 * margin))
            paper.paste(picture, (margin, margin))
            box = tuple(edge + margin for edge in box)
            number = ImageChops.lighter(number, paper.resize((28, 28), Image.Resampling.BILINEAR, box=box))
        return np.asarray(number)

    @staticmethod
    def cut(picture):
        return picture.crop(picture.point(lambda value: 255 * (value >= digits.INK)).getbbox())

    @classmethod
    def turned(cls, picture, degrees, mirror):
        cos, sin, sign = math.cos(math.radians(degrees)), math.sin(math.radians(degrees)), -1 if mirror else 1
        frame = Image.new("L", (64, 64))
        frame.paste(picture, (32, 32))
        middle = 32 + picture.width // 2, 32 + picture.height // 2
        matrix = (sign * cos, sign * sin, middle[0] - 24 * sign * (cos + sin), -sin, cos, middle[1] - 24 * (cos - sin))
        return cls.cut(frame.transform((48, 48), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR))


def sha256(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


@pytest.fixture(scope="module")
def test_digits():
    return digits.segment(None, "test")


# The same bytes


@pytest.mark.parametrize(
    ("name", "of_images", "of_labels"),
    [
        ("MNIST-II-01", "ace83e1b398179b89180d15b94bd5eb562cc4ac22f10708cc63f44506355838f", "78f52110"),
        ("MNIST-II-05", "dcaeeab33b4dda7787bc14b11c02eb410966707b6d115d28a94fd21cd1176f87", "c371148b"),
        ("MNIST-III-04", "35f9524e88ee7da3aa8cbc10880c2088f853b7fd71369991ba71f31222e7226d", "bf6899df"),
        ("MNIST-III-10", "62d738722852f93d8174d10102703bf77c6e3348647b07d714eb1159ebd72652", "bbd44748"),
    ],
)
def test_bytes_are_pinned(name, of_images, of_labels):
    # Another strength in `layouts` gives other bytes, and wants these hashes again.
    images, labels = digits.generate(name, "test", indices=range(2000))
    assert sha256(images) == of_images
    assert sha256(labels).startswith(of_labels)


@pytest.mark.parametrize("name", ["MNIST-II-02", "MNIST-III-10"])
def test_batch_size_order_and_threads_change_nothing(name, test_digits):
    whole, labels = digits.generate(name, "test", mnist=test_digits, indices=range(1000), batch=300)
    for batch in (1, 7, 5000):
        few = range(0, 1000, 50) if batch == 1 else range(1000)
        again, again_labels = digits.generate(name, "test", mnist=test_digits, indices=few, batch=batch)
        assert torch.equal(again, whole[list(few)])
        assert torch.equal(again_labels, labels[list(few)])
    mixed = torch.randperm(1000)
    assert torch.equal(digits.generate(name, "test", mnist=test_digits, indices=mixed)[0], whole[mixed])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert torch.equal(digits.generate(name, "test", mnist=test_digits, indices=range(1000))[0], whole)
    finally:
        torch.set_num_threads(threads)


@settings(max_examples=15)
@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    seed=st.integers(-(2**70), 2**70),
    indices=st.lists(st.integers(0, 9999), min_size=1, max_size=12),
    batch=st.integers(1, 5),
)
def test_any_subset_of_any_set(name, seed, indices, batch, test_digits):
    images, labels = digits.generate(name, "test", seed=seed, mnist=test_digits, indices=indices, batch=batch)
    assert images.shape == (len(indices), 28, 28)
    for index, image, label in zip(indices, images, labels, strict=True):
        alone, number = digits.generate(name, "test", seed=seed, mnist=test_digits, indices=[index])
        assert torch.equal(alone[0], image)
        assert number[0] == label


def test_reduced_precision_of_matrix_products_and_other_settings_change_nothing(test_digits):
    def write():
        return digits.generate("MNIST-III-09", "test", mnist=test_digits, indices=range(500))[0]

    expected = write()
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(write(), expected)
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(torch.float32)


def test_no_random_state_is_read_or_changed(test_digits):
    before = torch.get_rng_state()
    digits.generate("MNIST-III-09", "test", mnist=test_digits, indices=range(10))
    assert torch.equal(torch.get_rng_state(), before)


def test_another_seed_gives_other_images(test_digits):
    first, labels = digits.generate("MNIST-II-01", "test", mnist=test_digits, indices=range(100))
    other, other_labels = digits.generate("MNIST-II-01", "test", seed=1, mnist=test_digits, indices=range(100))
    assert not torch.equal(labels, other_labels)
    assert (first != other).flatten(1).any(1).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_gpu_writes_the_same_bytes(name, tf32):
    allowed = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        images, labels = digits.generate(name, "test", device="cuda")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    expected, expected_labels = digits.generate(name, "test")
    assert torch.equal(labels.cpu(), expected_labels)
    assert torch.equal(images.cpu(), expected)


# The right numbers


@pytest.mark.parametrize(("name", "split", "share"), [("MNIST-II-01", "train", 600), ("MNIST-III-01", "test", 10)])
def test_every_class_has_exactly_its_share(name, split, share):
    images, labels = digits.generate(name, split)
    assert images.shape == (digits.SIZES[split], 28, 28)
    assert images.dtype == torch.uint8
    assert labels.dtype == torch.int64
    assert set(labels.bincount().tolist()) == {share}
    # Mixed to the end: no class fills more than a few of the first thousand places.
    assert labels[:1000].bincount().max() < 1000 / len(labels.unique()) * 3 + 10


def test_shares_are_exact_in_every_set():
    for layout in LAYOUTS.values():
        for split, size in digits.SIZES.items():
            numbers = digits._numbers(layout, digits._Stream(layout.name, split, 3), size)
            assert set(numbers.bincount().tolist()) == {size // layout.classes}


def squares(grey):
    """One digit a class: a full square of one grey value each."""
    images = torch.zeros(10, 28, 28, dtype=torch.uint8)
    images[:, 4:24, 4:24] = torch.tensor(grey, dtype=torch.uint8)[:, None, None]
    return images, torch.arange(10)


def test_labels_read_the_digits_in_the_order_of_the_declaration():
    grey = [40 + 20 * value for value in range(10)]
    row = Layout("row", (Digit(-1, 0), Digit(0, 0), Digit(1, 0)))
    images, labels = digits.generate(row, "test", mnist=squares(grey), indices=range(300))
    seen = torch.stack([images[:, 14, x] for x in (4, 14, 23)], 1).long()
    written = (seen - 40 + 10) // 20
    assert torch.equal(written @ torch.tensor([100, 10, 1]), labels)


def test_every_digit_of_a_split_is_used(test_digits):
    stream = digits._Stream("MNIST-III-02", "test", 0)
    numbers = digits._numbers(LAYOUTS["MNIST-III-02"], stream, 10_000)
    draw = digits._draw(LAYOUTS["MNIST-III-02"], stream, test_digits, torch.arange(10_000), numbers)
    uses = draw.source.flatten().bincount(minlength=1000)
    assert uses.min() > 0  # 30 on average
    assert uses.float().std() == pytest.approx(30**0.5, rel=0.15)


# The right pictures


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_images_agree_with_pil(name):
    # Half a grey value of 255 in the median: PIL rounds at other places. Where a rounding lifts a faint row over the
    # threshold of the tight box, the whole number is stretched by a pixel: a few images, by a few grey values.
    layout = dataclasses.replace(LAYOUTS[name], noise=0.0)
    mnist = mnist_excerpt("test")
    count = 60
    writer = PilWriter(layout, "test", mnist, count=count)
    images, _ = digits.generate(layout, "test", mnist=mnist, indices=range(count))
    expected = torch.from_numpy(np.stack([writer.image(index) for index in range(count)]))
    difference = (images.int() - expected.int()).abs().float().mean((1, 2))
    assert difference.median() < 0.5
    assert difference.mean() < 1.5
    assert difference.max() < 25
    assert (difference > 0.5).sum() < count * (0.01 if layout.upright else 0.2)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_numbers_touch_all_four_borders(name, test_digits):
    layout = dataclasses.replace(LAYOUTS[name], noise=0.0)
    images, _ = digits.generate(layout, "test", mnist=test_digits, indices=range(2000))
    for border in (images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]):
        assert border.amax(1).min() > 0


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("quarter", [0, 1, 2, 3])
def test_quarter_turns_and_mirrors_are_exact(quarter, mirror, test_digits):
    turned = Layout("plain", (Digit(0, 0, rotation=90 * quarter, mirror=mirror),))
    plain, _ = digits.generate(PLAIN, "test", mnist=test_digits, indices=range(300))
    images, _ = digits.generate(turned, "test", mnist=test_digits, indices=range(300))
    expected = (plain.flip(2) if mirror else plain).rot90(-quarter, (1, 2))
    # Rows are filtered before columns, with a rounding between: a turn by 90° exchanges them.
    assert (images.int() - expected.int()).abs().max() <= (1 if quarter % 2 else 0)


@pytest.mark.parametrize("turn", [0, 90, 180, 270])
def test_turned_pixels_are_moved_exactly(turn, test_digits):
    pixels, size = test_digits.pixels, torch.stack([test_digits.height, test_digits.width])
    steps = torch.full((len(pixels),), 2 * turn)
    turned = digits._rotated(pixels, size, digits._wave(steps), torch.ones_like(steps), 30)
    low, new = digits._tight_box(turned)
    for k in range(0, len(pixels), 50):
        h, w = size[:, k]
        (y, x), (nh, nw) = low[:, k], new[:, k]
        assert torch.equal(turned[k, y : y + nh, x : x + nw].byte(), pixels[k, :h, :w].rot90(-turn // 90))


def test_a_clockwise_turn_moves_the_top_to_the_right():
    images = torch.zeros(10, 28, 28, dtype=torch.uint8)
    images[:, 4:24, 12:16] = 255
    images[:, 4:8, 8:20] = 255  # a T
    mnist = images, torch.arange(10)
    turned, _ = digits.generate(Layout("t", (Digit(0, 0, rotation=90),)), "test", mnist=mnist, indices=[0])
    assert turned[0, 1:-1, -3].min() > 250
    assert turned[0, 0, :10].max() == 0


def test_a_turned_digit_is_never_cut_off():
    images = torch.full((10, 28, 28), 255, dtype=torch.uint8)  # as large as an image can be
    layout = Layout("full", (Digit(0, 0, rotation=45),))
    drawn, _ = digits.generate(layout, "test", mnist=(images, torch.arange(10)), indices=[0])
    # A square on its tip: the corners in the middle of the borders, half of the paper covered.
    assert drawn[0, 0, 13:15].min() > 60
    assert drawn[0, 14].min() > 60
    assert drawn[0, :6, :6].max() == 0
    assert drawn[0].float().mean() == pytest.approx(255 / 2, rel=0.05)


def test_positions_and_scales_are_those_declared():
    # Two squares, one of half the size: 20 pixels, a gap of 10, 10 pixels. The number is 40 wide and 20 high.
    layout = Layout("two", (Digit(0, 0), Digit(1.25, 0.25, scale=0.5)))
    image = digits.generate(layout, "test", mnist=squares([255] * 10), indices=[0])[0][0]
    # The filter fades over a pixel at every edge, also at the border.
    assert (image[1:-1, 1:13] > 250).all()
    assert (image[:, :14] > 180).all()
    assert (image[:, 15:20] == 0).all()
    assert (image[15:-1, 22:-1] > 250).all()
    assert (image[:13, 15:] == 0).all()


def test_overlapping_digits_are_composed_by_the_maximum():
    layout = Layout("over", (Digit(0, 0), Digit(0.5, 0)))
    images, labels = digits.generate(layout, "test", mnist=squares(range(50, 250, 20)), indices=range(100))
    first, second = labels // 10, labels % 10
    assert torch.equal(images[:, 14, 14].long(), 50 + 20 * torch.maximum(first, second))


def test_random_variation_stays_within_its_range_and_fills_it(test_digits):
    layout = Layout("vary", (Digit(0.5, -0.5, 0.8, 350),), shift=0.1, scale=0.2, rotation=20, strength=0.5)
    index = torch.arange(5000)
    draw = digits._draw(layout, digits._Stream("vary", "test", 0), test_digits, index, index % 10)
    for drawn, middle, reach in (
        (draw.centre[1] / 256 / 20, 0.5, 0.05),
        (draw.centre[0] / 256 / 20, -0.5, 0.05),
        (draw.scale / 256, 0.8, 0.08),
        ((draw.angle / 2 + 180) % 360 - 180, -10, 10),
    ):
        values = drawn.double()
        assert values.min().item() == pytest.approx(middle - reach, abs=0.004)
        assert values.max().item() == pytest.approx(middle + reach, abs=0.004)
        assert values.mean().item() == pytest.approx(middle, abs=reach / 20)
        assert values.std().item() == pytest.approx(reach / 3**0.5, rel=0.05)


@pytest.mark.parametrize("noise", [1, 60, 128])
def test_noise_has_its_amplitude(noise, test_digits):
    plain, _ = digits.generate(PLAIN, "test", mnist=test_digits, indices=range(500))
    noisy, _ = digits.generate(Layout("plain", (ONE,), noise=noise), "test", mnist=test_digits, indices=range(500))
    difference = noisy.int() - plain.int()
    assert difference.max() == noise
    assert difference.min() == -noise
    if noise == 60:
        free = difference[(plain > 60) & (plain < 195)].double()
        assert free.mean().item() == pytest.approx(0, abs=1)
        assert free.std().item() == pytest.approx(60 / 3**0.5, rel=0.03)
        # Neighbours know nothing of each other, nor the same pixel of the next image.
        paper = (plain == 0).double()
        grey = noisy.double() * paper
        for other in (grey.roll(1, 2), grey.roll(1, 1), grey.roll(1, 0)):
            both = (paper > 0) & (other > 0)
            assert abs(torch.corrcoef(torch.stack([grey[both], other[both]]))[0, 1]) < 0.03


# Bad input


def test_no_images_are_no_error(test_digits):
    images, labels = digits.generate("MNIST-II-01", "test", mnist=test_digits, indices=[])
    assert images.shape == (0, 28, 28)
    assert labels.shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "MNIST-II-1"}, ValueError, "no multi-digit set 'MNIST-II-1'; did you mean 'MNIST-II-01'"),
        ({"split": "val"}, ValueError, "split must be 'train' or 'test', not 'val'"),
        ({"indices": [3, 10_000]}, ValueError, "index 10000 is outside MNIST-II-01 test, which has images 0 to 9999"),
        ({"indices": [-1]}, ValueError, "index -1 is outside"),
        ({"indices": [0.5]}, TypeError, "indices must be integers, they are torch.float32"),
        ({"indices": torch.zeros(2, 2)}, TypeError, r"one axis, they have shape \(2, 2\)"),
        ({"batch": 0}, ValueError, "batch must be at least 1, not 0"),
        ({"batch": 2.5}, TypeError, "batch must be a whole number, not 2.5"),
        ({"seed": "a"}, TypeError, "seed must be a whole number, not 'a'"),
        ({"seed": True}, TypeError, "seed must be a whole number, not True"),
        ({"device": "nonsense"}, RuntimeError, "device 'nonsense' is not available .*; use device='cpu'"),
        ({"device": "cuda:99"}, RuntimeError, "device 'cuda:99' is not available .*; use device='cpu'"),
        ({"mnist": "nowhere"}, FileNotFoundError, "nowhere is not a folder; give the folder with the idx files"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        digits.generate(**{"name": "MNIST-II-01", "split": "test"} | arguments)
