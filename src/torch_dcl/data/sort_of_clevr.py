"""Sort-of-CLEVR: six coloured shapes on 75 × 75 pixels, with questions about one of them or about several.

After Santoro et al., "A simple neural network module for relational reasoning", 2017. An image has a square or a circle
of each of six colours; shapes do not touch. A question names a colour, is relational or not, and is of one of three
kinds. Its 11 bits are the colour (6), not relational or relational (2), and the kind (3).

| | not relational | relational |
|---|---|---|
| kind 1 | its shape | the shape of the nearest other object |
| kind 2 | is it in the left half | the shape of the farthest other object |
| kind 3 | is it in the upper half | how many objects have its shape, itself included |

Every image has ten different questions of each sort. The paper leaves sizes and ties open: shapes are 11 pixels wide,
none is centred on a middle line, and no object has two nearest or two farthest others.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_dcl.data.draws import below, draw, whole_number

__all__ = ["ANSWERS", "BITS", "COLOURS", "SIDE", "SortOfClevr", "generate_sort_of_clevr"]

SIDE, REACH = 75, 5
"""Pixels of an image's side, and of a shape from its centre to its border."""
COLOURS = {
    "red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "orange": (255, 156, 0), "grey": (128, 128, 128),
    "yellow": (255, 255, 0),
}  # fmt: skip
ANSWERS = ("yes", "no", "square", "circle", "1", "2", "3", "4", "5", "6")
BITS = len(COLOURS) + 2 + 3
ASKED = 10
"""Questions of each sort about an image."""
_CHUNK = 512  # images drawn at a time


class SortOfClevr(NamedTuple):
    """Images with their objects, and questions about them with the answers."""

    images: Tensor
    """uint8 ``[N, 3, 75, 75]`` on white."""
    circles: Tensor
    """bool ``[N, 6]``: whether the object of each colour is a circle."""
    centres: Tensor
    """int64 ``[N, 6, 2]``: column and row of its centre."""
    questions: Tensor
    """uint8 ``[N, 20, 11]`` of bits, the relational ones last."""
    answers: Tensor
    """int64 ``[N, 20]``, places in `ANSWERS`."""

    @property
    def relational(self) -> Tensor:
        """Which questions are relational: bool ``[N, 20]``."""
        return self.questions[..., len(COLOURS) + 1].bool()

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Every image with every question about it, as uint8 ``[20·N, 3, 76, 75]``, and the answers.

        The last row of an image has the question: 255 for a bit that is set, in the first 11 pixels of all channels.
        """
        count, asked = self.answers.shape
        rows = F.pad(255 * self.questions, (0, SIDE - BITS))
        images = self.images[:, None].expand(-1, asked, -1, -1, -1)
        below_it = rows[:, :, None, None].expand(-1, -1, 3, -1, -1)
        return torch.cat((images, below_it), 3).flatten(0, 1), self.answers.reshape(count * asked)


def generate_sort_of_clevr(count: int, split: str, *, seed: int = 0, device: torch.device | str = "cpu") -> SortOfClevr:
    """Draw images and questions: the same for the same arguments, on every device, whatever the count.

    Args:
        count: Images, the first ones of the split.
        split: Any name, such as ``"train"``; another one is another set.
        seed: Another one gives other sets.
        device: Where.

    Raises:
        ValueError: The count is below 1.
        TypeError: A number is not whole.
    """
    index = torch.arange(whole_number("count", count, least=1), device=device)
    seed = whole_number("seed", seed)
    objects = torch.arange(len(COLOURS), device=device)
    circles = draw(seed, f"sort-of-clevr {split} shape", 0, index[:, None] * len(COLOURS) + objects) < 0
    centres = _place(index, f"sort-of-clevr {split}", seed)
    images = torch.cat([_paint(circles[i : i + _CHUNK], centres[i : i + _CHUNK]) for i in range(0, count, _CHUNK)])
    asked = [_choose(index, f"sort-of-clevr {split} {sort}", seed) for sort in range(2)]
    answers = _answer(circles, centres)  # [N, 2, 6, 3]
    questions, picked = [], []
    for sort, places in enumerate(asked):
        colour, kind = places // 3, places % 3
        of_sort = torch.full_like(colour, sort)
        bits = [F.one_hot(part, size) for part, size in ((colour, 6), (of_sort, 2), (kind, 3))]
        questions.append(torch.cat(bits, -1).to(torch.uint8))
        picked.append(answers[:, sort].flatten(1).gather(1, places))
    return SortOfClevr(images, circles, centres, torch.cat(questions, 1), torch.cat(picked, 1))


def _place(index: Tensor, purpose: str, seed: int) -> Tensor:
    """Centres of shapes that do not touch, without ties; an image that does not fit is drawn anew."""
    centres = torch.zeros(len(index), len(COLOURS), 2, dtype=torch.int64, device=index.device)
    left, attempt, numbers = index, 0, torch.arange(2 * len(COLOURS), device=index.device)
    while len(left):
        drawn = draw(seed, f"{purpose} place", attempt, left[:, None] * len(numbers) + numbers)
        free = SIDE - 2 * REACH - 1  # places for a centre, without the middle
        places = below(drawn, free) + REACH
        places = (places + (places >= SIDE // 2)).view(len(left), -1, 2)
        good = _is_clear(places)
        centres[left[good]] = places[good]
        left, attempt = left[~good], attempt + 1
    return centres


def _is_clear(centres: Tensor) -> Tensor:
    """Whether there is a pixel or more between any two shapes, and each has one nearest and one farthest other."""
    apart = (centres[:, :, None] - centres[:, None]).abs().amax(-1)
    distance = _distances(centres)
    others = ~torch.eye(len(COLOURS), dtype=torch.bool, device=centres.device)
    ordered = distance[:, others].view(len(centres), len(COLOURS), -1).sort(-1).values
    one_each = (ordered[..., 0] < ordered[..., 1]) & (ordered[..., -2] < ordered[..., -1])
    return (apart[:, others] > 2 * REACH + 1).all(-1) & one_each.all(-1)


def _distances(centres: Tensor) -> Tensor:
    """The squared distance of every two objects, ``[N, 6, 6]``."""
    return (centres[:, :, None] - centres[:, None]).square().sum(-1)


def _paint(circles: Tensor, centres: Tensor) -> Tensor:
    axis = torch.arange(SIDE, device=centres.device)
    images = torch.full((len(centres), 3, SIDE, SIDE), 255, dtype=torch.uint8, device=centres.device)
    for number, colour in enumerate(COLOURS.values()):
        dx = (axis - centres[:, number, :1]).abs()[:, None]
        dy = (axis - centres[:, number, 1:]).abs()[:, :, None]
        square = (dx <= REACH) & (dy <= REACH)
        circle = dx.square() + dy.square() <= (REACH + 0.5) ** 2
        inside = torch.where(circles[:, number, None, None], circle, square)
        value = torch.tensor(colour, dtype=torch.uint8, device=centres.device)[:, None, None]
        images = torch.where(inside[:, None], value, images)
    return images


def _choose(index: Tensor, purpose: str, seed: int) -> Tensor:
    """Ten different of the 18 questions of a sort, as three times the colour plus the kind: ``[N, 10]``."""
    every = len(COLOURS) * 3
    drawn = draw(seed, f"{purpose} question", 0, index[:, None] * every + torch.arange(every, device=index.device))
    return drawn.argsort(dim=1, stable=True)[:, :ASKED]


def _answer(circles: Tensor, centres: Tensor) -> Tensor:
    """The answers to all questions: ``[N, sort, colour, kind]``."""
    shape = ANSWERS.index("square") + circles.long()
    halves = [ANSWERS.index("yes") + (centres[..., axis] > SIDE // 2).long() for axis in range(2)]
    distance = _distances(centres)
    itself = torch.eye(len(COLOURS), dtype=torch.bool, device=centres.device)
    nearest = distance.masked_fill(itself, SIDE**2 * 4).argmin(-1)
    farthest = distance.masked_fill(itself, -1).argmax(-1)
    alike = (circles[:, :, None] == circles[:, None]).sum(-1) + ANSWERS.index("1") - 1
    plain = torch.stack((shape, *halves), -1)
    return torch.stack((plain, torch.stack((shape.gather(1, nearest), shape.gather(1, farthest), alike), -1)), 1)
