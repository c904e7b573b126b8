"""Multi-digit numbers written with MNIST digits, as in section 4.1: the same bytes every time, on every device.

An image is a function of (set, split, seed, index). Digits are drawn from those of the split, cut out by their tight
box, mirrored and rotated, and placed; numbers are composed by the maximum; the tight box of the whole number is then
stretched to 28 × 28, each axis on its own, which is how the paper's "rescale it into 28 × 28" is read here. `layouts`
declares the sets.

Why every device produces the same bytes:

* Random numbers are integer hashes of (set, split, seed, purpose, digit, index). There is no generator with a state.
* Coordinates are integers: 1/256 of a pixel, and 1/256 of the size. Sines and cosines have 14 bits.
* Pixels and filter weights are integers of 8 bits. Sampling and filtering multiply and add them in float32, where every
  sum stays below 2^24. So the order of a sum, the size of a batch, TF32 and fused operations cannot change a result.
* What is not an integer (one product for each weight, before it is rounded to 8 bits) is a single IEEE operation.

A digit is resampled at most twice. A rotated digit is sampled bilinearly on its own grid. Then one separable tent
filter, as wide as an output pixel or a source pixel, whichever is larger, maps the digit's pixels directly to the
28 × 28 image: placing, scaling and the final rescaling are one step.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_dcl.data._segments import INK, MnistLike, Segments, segment, source
from torch_dcl.data.draws import whole_number
from torch_dcl.data.layouts import Layout, find_layout
from torch_dcl.files import sha256_bytes

__all__ = ["SIZES", "Segments", "generate", "segment", "source"]

SIZES = {"train": 60_000, "test": 10_000}
SIDE = 28
DIGIT = 20  # pixels: the side of the box that MNIST digits were fitted into, one unit of a layout's positions

_GRID = 32  # the frame that rotated digits are sampled from: a power of two, so that normalised coordinates are exact
_TURN_STEPS = 720  # half degrees
_FAR = -(1 << 23)  # farther than any filter reaches, and still exact in float32 after a subtraction
_MASK = 0xFFFFFFFF


def generate(
    name: str | Layout,
    split: str,
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
    mnist: MnistLike = None,
    indices: Tensor | list[int] | range | None = None,
    batch: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Generate the images of a multi-digit set.

    Classes are exactly balanced, in mixed order. The label is the number as read: with two digits, ten times the first
    plus the second. The same arguments give the same bytes on every device and for any `batch`, and `indices` selects
    images of the whole set.

    Args:
        name: A name from `layouts.LAYOUTS`, or a layout.
        split: `"train"` for 60,000 images or `"test"` for 10,000.
        seed: Another seed gives another set of the same kind.
        device: The device of the computation and of the result; by default the CPU.
        mnist: The digits to write with. A folder with the idx files of MNIST, gzipped or not; or images, uint8
            `[n, 28, 28]`, and labels of the digits of this split; or `Segments`, when many sets are generated; or None
            for the embedded excerpt. `source` describes it.
        indices: The images of the set to generate, in this order; by default all.
        batch: Images at a time. It changes memory and speed, never the result.

    Returns:
        Images, uint8 `[N, 28, 28]` with 0 for paper and 255 for full ink, and labels, int64 `[N]`.

    Raises:
        ValueError: There is no such set or split, an index is outside the set, or the digits cannot be used.
        TypeError: The digits, the indices, the seed or the batch have the wrong type.
        FileNotFoundError: An idx file is missing.
        RuntimeError: The device is not available.
    """
    layout = name if isinstance(name, Layout) else find_layout(name)
    if split not in SIZES:
        raise ValueError(f"split must be 'train' or 'test', not {split!r}")
    place = _device(device)
    chosen = _indices(indices, SIZES[split], layout, split).to(place)
    if batch is None:
        batch = 256 if place.type == "cpu" else 4096
    batch, seed = whole_number("batch", batch, 1), whole_number("seed", seed)
    digits = segment(mnist, split).to(place)
    stream = _Stream(layout.name, split, seed)
    numbers = _numbers(layout, stream, SIZES[split]).to(place)[chosen]
    images = torch.empty(len(chosen), SIDE, SIDE, dtype=torch.uint8, device=place)
    draw = _draw(layout, stream, digits, chosen, numbers)

    def write(part: slice) -> None:
        with torch.no_grad(), torch.autocast(place.type, enabled=False):
            image = _images(layout, digits, draw.part(part))
            images[part] = _noisy(image, round(layout.effective("noise")), stream, chosen[part])

    parts = [slice(start, start + batch) for start in range(0, len(chosen), batch)]
    threads = torch.get_num_threads()
    if place.type == "cpu" and threads > 1 and len(parts) > 1:
        _in_threads(write, parts, threads)
    else:
        for part in parts:
            write(part)
    return images, numbers


def _in_threads(write: Callable[[slice], None], parts: list[slice], threads: int) -> None:
    """Compute whole batches in threads, one core each: torch's own threads would synchronise after every operation."""
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(write, parts):
                pass
    finally:
        torch.set_num_threads(threads)  # the setting of a thread is also what later threads start with


def _device(device: str | torch.device | None) -> torch.device:
    """Check that a device is available."""
    try:
        place = torch.device("cpu" if device is None else device)
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        raise RuntimeError(f"device {str(device)!r} is not available ({first}); use device='cpu'") from None
    return place


def _indices(indices: Tensor | list[int] | range | None, size: int, layout: Layout, split: str) -> Tensor:
    """Check the indices, and return them as int64."""
    if indices is None:
        return torch.arange(size)
    chosen = torch.as_tensor(indices if isinstance(indices, Tensor) else list(indices), device="cpu")
    if chosen.ndim != 1:
        raise TypeError(f"indices must have one axis, they have shape {tuple(chosen.shape)}")
    if len(chosen) == 0:
        return chosen.long()
    if chosen.is_floating_point() or chosen.is_complex() or chosen.dtype == torch.bool:
        raise TypeError(f"indices must be integers, they are {chosen.dtype}")
    low, high = int(chosen.min()), int(chosen.max())
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise ValueError(f"index {wrong} is outside {layout.name} {split}, which has images 0 to {size - 1}")
    return chosen.long()


# Random numbers


def _mix(x: Tensor) -> Tensor:
    """Scramble 32 bits: a bijection in which every bit of the input reaches every bit of the output.

    The constants are those of lowbias32 by Chris Wellons. The second is written as its negative complement, so that no
    product leaves 64 bits.
    """
    x = ((x >> 16) ^ x) * 0x7FEB352D & _MASK
    x = ((x >> 15) ^ x) * (0x846CA68B - (1 << 32)) & _MASK
    return (x >> 16) ^ x


@dataclass(frozen=True)
class _Stream:
    """The random numbers of one set, split and seed: hashes, so that they can be computed in any order."""

    name: str
    split: str
    seed: int

    def bits(self, counter: Tensor, *purposes: str) -> Tensor:
        """Hash counters `[N]` to 32 random bits for each purpose: int64 `[purposes, N]`."""
        texts = [f"{self.name}/{self.split}/{self.seed}/{purpose}" for purpose in purposes]
        keys = [int(sha256_bytes(text.encode())[:16], 16) for text in texts]
        first = torch.tensor([key >> 32 for key in keys], device=counter.device)[:, None]
        second = torch.tensor([key & _MASK for key in keys], device=counter.device)[:, None]
        return _mix(_mix((counter + first) & _MASK) ^ second)


def _within(bits: Tensor, reach: int) -> Tensor:
    """Map 32 random bits to an integer from -reach to reach."""
    return ((bits * (2 * reach + 1)) >> 32) - reach


def _numbers(layout: Layout, stream: _Stream, size: int) -> Tensor:
    """The number that each image of the set shows: every class equally often, in mixed order."""
    order = stream.bits(torch.arange(size, device="cpu"), "order")[0].argsort(stable=True)
    return order % layout.classes


@dataclass(frozen=True)
class _Draw:
    """The random choices for the digits of each image: int64, `[K, N]` for K digits."""

    source: Tensor  # which digit of the split
    centre: Tensor  # [2, K, N]: downwards and to the right, in 1/256 pixel
    scale: Tensor  # in 1/256
    angle: Tensor  # clockwise, in half degrees from 0 to 719
    wave: Tensor  # [2, K, N]: cosine and sine of the angle, in 1/2^14

    def part(self, which: slice) -> "_Draw":
        """The draws of some of the images."""
        return _Draw(*(getattr(self, field.name)[..., which] for field in fields(self)))


def _draw(layout: Layout, stream: _Stream, digits: Segments, index: Tensor, number: Tensor) -> _Draw:
    """Draw source and geometry of every digit of the images `index`, which show `number`."""
    places = range(len(layout.digits))

    def bits(purpose: str) -> Tensor:
        return stream.bits(index, *(f"{purpose}/{k}" for k in places))

    def declared(values: list[float], unit: int) -> Tensor:
        return torch.tensor([round(value * unit) for value in values], device=index.device)[:, None]

    shift, scale = round(layout.effective("shift") * DIGIT * 256), round(layout.effective("scale") * 256)
    value = torch.stack([number // 10 ** (len(layout.digits) - 1 - k) % 10 for k in places])
    y = declared([digit.y for digit in layout.digits], DIGIT * 256) + _within(bits("y"), shift)
    x = declared([digit.x for digit in layout.digits], DIGIT * 256) + _within(bits("x"), shift)
    size = declared([digit.scale for digit in layout.digits], 256) * (256 + _within(bits("scale"), scale))
    angle = declared([digit.rotation for digit in layout.digits], 2)
    angle = (angle + _within(bits("rotation"), round(layout.effective("rotation") * 2))) % _TURN_STEPS
    return _Draw(digits.draw(value, bits("source")), torch.stack([y, x]), (size + 128) >> 8, angle, _wave(angle))


def _wave(angle: Tensor) -> Tensor:
    """Look up cosine and sine of half degrees, in 1/2^14: int64 `[2, ...]`."""
    angles = [math.radians(step / 2) for step in range(_TURN_STEPS)]
    table = [[round(wave(angle) * (1 << 14)) for angle in angles] for wave in (math.cos, math.sin)]
    return torch.tensor(table, device=angle.device)[:, angle]


# Images. K digits of B images are laid out one after the other as K·B digits.


def _images(layout: Layout, digits: Segments, draw: _Draw) -> Tensor:
    """Generate one batch of images: float32 `[B, 28, 28]`, integers from 0 to 255."""
    shape = draw.source.shape
    source = draw.source.flatten()
    size = torch.stack([digits.height[source], digits.width[source]])
    if layout.upright:
        pixels, low = digits.pixels[source].float(), torch.zeros_like(size)
    else:
        mirror = torch.tensor([-1 if digit.mirror else 1 for digit in layout.digits], device=source.device)
        sign = mirror[:, None].expand(shape).flatten()
        pixels = _rotated(digits.pixels[source], size, draw.wave.flatten(1), sign, _reach(layout, digits))
        low, size = _tight_box(pixels)
    # Edges of the digits and of the whole number, in 1/512 pixel.
    extent = 2 * size.view(2, *shape) * draw.scale
    edge = 2 * draw.centre - extent // 2
    start = edge.amin(1, keepdim=True)
    whole = ((edge + extent).amax(1, keepdim=True) - start).expand_as(edge)
    scale = draw.scale.expand_as(edge)
    weights = _weights(pixels.shape[1], *(t.reshape(-1, 1).int() for t in (low, size, edge - start, scale, whole)))
    rows, columns = weights.view(2, len(source), SIDE, -1)
    half = torch.bmm(rows, pixels).mul_(1 / 256).round_().clamp_(max=255)
    drawn = torch.bmm(half, columns.transpose(1, 2))
    return drawn.view(*shape, SIDE, SIDE).amax(0).mul_(1 / 256).round_().clamp_(max=255)


def _reach(layout: Layout, digits: Segments) -> int:
    """The side of a centred grid that contains every digit of the split at every angle of a layout.

    The farthest pixel centre is half of the longest side away along both axes, and sampling spreads it by one pixel.
    """
    farthest = (digits.pixels.shape[1] + 1) // 2 + 0.5
    vary = round(layout.effective("rotation") * 2)
    turns = {round(digit.rotation * 2) + step for digit in layout.digits for step in range(-vary, vary + 1)}
    spread = max(abs(math.cos(math.radians(t / 2))) + abs(math.sin(math.radians(t / 2))) for t in turns)
    return 2 * math.floor(farthest * spread + 0.5)


def _rotated(pixels: Tensor, size: Tensor, wave: Tensor, sign: Tensor, reach: int) -> Tensor:
    """Mirror digits where `sign` is -1 and rotate them, on a grid that contains every digit at every angle.

    The centre is kept. Positions on the digit are rounded to 1/256 pixel, and the frame that is sampled has 32 pixels a
    side, so coordinates, weights and products are exact in float32.
    """
    device = pixels.device
    frame = torch.zeros(len(pixels), 1, _GRID, _GRID, dtype=torch.float32, device=device)
    frame[:, 0, : pixels.shape[1], : pixels.shape[2]] = pixels
    cos, sin = wave
    down, across = (size // 2 - _GRID // 2) << 15
    # Two planes: how x, then y, on the digit follows from x and y on the grid, in 1/2^15 pixel from the frame's middle.
    step = torch.arange(1 - reach, reach, 2, device=device)  # pixel centres, in half pixels
    by_x = torch.stack([sign * cos, -sin], 1)[:, :, None] * step + torch.stack([across, down], 1)[:, :, None]
    by_y = torch.stack([sign * sin, cos], 1)[:, :, None] * step
    grid = (by_x.float().mul_(1 / 128)[:, :, None, :] + by_y.float().mul_(1 / 128)[..., None]).round_()
    grid = grid.mul_(1 / (128 * _GRID)).permute(0, 2, 3, 1)
    return F.grid_sample(frame, grid, mode="bilinear", padding_mode="zeros", align_corners=False)[:, 0].round_()


def _tight_box(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """The first row and column with ink, and the height and width of the ink: two tensors `[2, N]`."""
    side = pixels.shape[-1]
    ink = torch.relu(pixels - (INK - 1))
    # A product with ones sums the rows, which is faster than a maximum over so short an axis.
    rows = torch.mv(ink.view(-1, side), ink.new_ones(side)).view(-1, side)
    inked = torch.stack([rows, ink.sum(1)]) > 0
    place = torch.arange(side, device=pixels.device)
    low = torch.where(inked, place, side).amin(2)
    return low, torch.where(inked, place + 1, 0).amax(2) - low


def _weights(side: int, low: Tensor, size: Tensor, edge: Tensor, scale: Tensor, whole: Tensor) -> Tensor:
    """Weigh the pixels of digits for each of the 28 output pixels along one axis: float32 `[N, 28, side]`, in 1/256.

    The weights are a tent around the centre of the output pixel, which reaches to the next output pixel or the next
    source pixel, whichever is farther; beyond the digit the paper is blank. The unit of length is 1/(512 · 56) pixel,
    in which the centres of output pixels and of source pixels are integers. All tensors are int32 `[N, 1]`.
    """
    centre = torch.arange(1, 2 * SIDE, 2, device=low.device, dtype=torch.int32) * whole
    step = torch.arange(side, device=low.device, dtype=torch.int32) - low
    first, pitch = 56 * (edge + scale), 112 * scale
    pixel = torch.where((step >= 0) & (step < size), first + pitch * step, _FAR)
    radius = torch.maximum(2 * whole, pitch)
    # The sum of the tent over all source pixels: two arithmetic series, to the right and to the left of the centre.
    right = torch.remainder(first - centre, pitch)
    n, m = (radius - right + pitch - 1) // pitch, (radius + right - 1) // pitch
    total = n * (radius - right) + m * (radius + right - pitch) - pitch * ((n * (n - 1) + m * (m - 1)) // 2)
    factor = ((1 << 40) // total.long()).float().mul_(1 / (1 << 32))  # 256 / total
    weights = (centre.float()[:, :, None] - pixel.float()[:, None, :]).abs_()
    return torch.sub(radius.float()[:, :, None], weights, out=weights).clamp_(min=0).mul_(factor[:, :, None]).round_()


def _noisy(image: Tensor, noise: int, stream: _Stream, index: Tensor) -> Tensor:
    """Add noise of up to `noise` grey values, from 8 random bits a pixel."""
    if noise == 0:
        return image
    words = SIDE * SIDE // 4
    counter = index[:, None] * words + torch.arange(words, device=index.device)
    grey = stream.bits(counter.flatten(), "noise").to(torch.int32).view(torch.uint8).view(image.shape).float()
    return image.add_(grey.mul_(noise / 128).sub_(noise * 255 / 256).round_()).clamp_(0, 255)
