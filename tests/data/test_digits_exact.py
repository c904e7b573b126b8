"""The float32 arithmetic of the multi-digit sets is exact: integers give the same images, bit for bit.

That is what makes the bytes independent of the device, of the order of sums and of the precision of matrix products.
"""

import pytest
import torch

from torch_dcl.data import digits


def rounded(x, bits):
    """x / 2^bits, rounded to the nearest integer, and to the even one between two."""
    low = x >> bits
    rest, half = x - (low << bits), 1 << (bits - 1)
    return low + ((rest > half) | ((rest == half) & (low % 2 == 1)))


def turned(pixels, size, wave, sign, reach):
    """`digits._rotated` in 64-bit integers, with four explicit neighbours."""
    pixels = torch.nn.functional.pad(pixels.long(), (64, 64, 64, 64))
    step = torch.arange(1 - reach, reach, 2)
    x, y = step[None, None, :], step[None, :, None]
    cos, sin, sign = (t[:, None, None] for t in (*wave, sign))
    middle = (size // 2)[:, :, None, None] * 256 - 128
    across = rounded(sign * (cos * x + sin * y), 7) + middle[1]
    down = rounded(cos * y - sin * x, 7) + middle[0]
    column, row, fx, fy = (across >> 8) + 64, (down >> 8) + 64, across & 255, down & 255
    which = torch.arange(len(pixels))[:, None, None]
    total = pixels[which, row, column] * (256 - fx) * (256 - fy) + pixels[which, row, column + 1] * fx * (256 - fy)
    total += pixels[which, row + 1, column] * (256 - fx) * fy + pixels[which, row + 1, column + 1] * fx * fy
    return rounded(total, 16)


@pytest.mark.parametrize("sign", [1, -1])
def test_turning_is_exact(sign):
    segments = digits.segment(None, "test")
    turn = torch.arange(1000) * 7 % 720
    size = torch.stack([segments.height, segments.width])
    arguments = segments.pixels, size, digits._wave(turn), torch.full((1000,), sign), 30
    assert torch.equal(digits._rotated(*arguments).long(), turned(*arguments))


@pytest.mark.parametrize("name", ["MNIST-II-01", "MNIST-III-10"])
def test_filtering_is_exact(name, monkeypatch):
    expected = digits.generate(name, "test", indices=range(200))
    products = []

    def integer_product(a, b):
        assert torch.equal(a, a.round())
        assert a.min() >= 0
        assert a.max() <= 256
        assert torch.equal(b, b.round())
        assert b.min() >= 0
        assert b.max() <= 256
        products.append(torch.einsum("bij,bjk->bik", a.long(), b.long()))
        assert products[-1].max() < 1 << 24
        return products[-1].float()

    monkeypatch.setattr(torch, "bmm", integer_product)
    again = digits.generate(name, "test", indices=range(200))
    assert products
    assert torch.equal(expected[0], again[0])


def test_weights_are_a_tent_of_the_right_width():
    def draw(low, high):
        return torch.randint(low, high, (2000, 1))

    size, scale = draw(1, 21), draw(64, 512)
    whole = 2 * size * scale + draw(0, 20_000)
    edge = (draw(0, 1 << 20) * (whole - 2 * size * scale + 1)) >> 20
    weights = digits._weights(20, *(t.int() for t in (torch.zeros_like(size), size, edge, scale, whole)))
    # The same in float64, on paper that goes on far beyond the digit.
    out = (torch.arange(28).double() + 0.5) * whole / 28
    pixel = edge + (2 * torch.arange(-300, 320) + 1) * scale
    radius = torch.maximum(whole / 28, 2 * scale).double()[:, :, None]
    tent = (1 - (out[:, :, None] - pixel[:, None, :]).abs() / radius).clamp(min=0)
    expected = (256 * tent / tent.sum(2, keepdim=True))[:, :, 300:320] * (torch.arange(20) < size)[:, None, :]
    assert (weights - expected).abs().max() < 0.501
