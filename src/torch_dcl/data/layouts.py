"""The fifteen multi-digit sets of section 4.1, as declarations.

A set declares position, size, rotation and mirroring of each digit of a number, and how far these vary from image to
image. Positions and shifts are in digit sizes: 1.0 is 20 pixels of MNIST, the side of the box that every MNIST digit
was fitted into. x grows to the right, y grows downwards, and positive rotations are clockwise. Only relative positions
matter, because the box of the whole number is rescaled at the end.

The paper shows its layouts in a figure and gives no numbers. These declarations follow its description: difficulty
rises with the id, from digits side by side to other arrangements, unequal sizes, rotated and mirrored digits, overlap
and noise. `STRENGTHS` has one number for each set, which scales every random variation and the noise of that set. They
were fitted by `torch_dcl.experiments.calibrate` so that the *baseline* LeNet errs as often as the paper's, on digits of
the MNIST training set alone. So a table's baseline column is fitted, and only the other columns are evidence.
"""

import difflib
from dataclasses import dataclass, fields

__all__ = ["LAYOUTS", "STRENGTHS", "Digit", "Layout", "find_layout"]


@dataclass(frozen=True)
class Digit:
    """The placement of one digit of a number. It is mirrored first, then rotated, then placed.

    Args:
        x: Centre of the digit's box, in digit sizes to the right.
        y: Centre of the digit's box, in digit sizes downwards.
        scale: Size relative to the MNIST digit.
        rotation: Degrees clockwise.
        mirror: Whether the digit is mirrored horizontally.
    """

    x: float
    y: float
    scale: float = 1.0
    rotation: float = 0.0
    mirror: bool = False

    def __post_init__(self) -> None:
        for name, value, low, high in (("x", self.x, -4, 4), ("y", self.y, -4, 4), ("scale", self.scale, 0.25, 4)):
            if not low <= value <= high:
                raise ValueError(f"{name} of a digit must be between {low} and {high}, not {value}")
        if not -360 <= self.rotation <= 360:
            raise ValueError(f"rotation of a digit must be between -360 and 360 degrees, not {self.rotation}")


@dataclass(frozen=True)
class Layout:
    """A multi-digit set. Every range is uniform, around what the digits declare, and is multiplied by the strength.

    Args:
        name: The set's name. It is part of the seed, so two layouts of one name get the same digits.
        digits: The digits in reading order: the first one is the most significant.
        shift: Largest shift of a digit along each axis, in digit sizes.
        scale: Largest relative change of a digit's size.
        rotation: Largest additional rotation of a digit, in degrees.
        noise: Largest grey value added to or subtracted from each pixel, up to 128 of 255.
        strength: Factor on the four numbers above.
    """

    name: str
    digits: tuple[Digit, ...]
    shift: float = 0.0
    scale: float = 0.0
    rotation: float = 0.0
    noise: float = 0.0
    strength: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.digits) <= 3:
            raise ValueError(f"layout {self.name!r} has {len(self.digits)} digits, it needs one to three")
        if not self.strength >= 0:
            raise ValueError(f"the strength of layout {self.name!r} must not be negative, it is {self.strength}")
        for name, high in (("shift", 4), ("scale", 0.75), ("rotation", 180), ("noise", 128)):
            value = self.effective(name)
            if not 0 <= value <= high:
                raise ValueError(
                    f"{name} of layout {self.name!r} times its strength must be between 0 and {high}, it is {value:g}; "
                    f"lower {name} or the strength"
                )

    @property
    def classes(self) -> int:
        """The number of classes: one for every number of these digits."""
        return int(10 ** len(self.digits))

    def effective(self, name: str) -> float:
        """One of the four ranges as it is applied: the declared value times the strength.

        Args:
            name: `"shift"`, `"scale"`, `"rotation"` or `"noise"`.

        Returns:
            The range in its own unit.

        Raises:
            ValueError: There is no such range.
        """
        if name not in _RANGES:
            raise ValueError(f"{name!r} is no range of a layout; the ranges are {', '.join(_RANGES)}")
        return float(getattr(self, name)) * self.strength

    @property
    def upright(self) -> bool:
        """Whether no digit is ever rotated or mirrored, so that MNIST's own pixels can be placed as they are."""
        return self.effective("rotation") == 0 and all(d.rotation % 360 == 0 and not d.mirror for d in self.digits)


_RANGES = [field.name for field in fields(Layout) if field.name not in ("name", "digits", "strength")]

# Frozen on 2026-11-15, before any DCL network was trained on the sets. The comments give the error of the baseline
# LeNet on digits held out from MNIST's training set (mean, runs), and the paper's on its own set. All trials, and why
# these means are optimistic, are in results/calibration.json. No arrangement of three digits reached the target of
# MNIST-III-01.
STRENGTHS = {
    "MNIST-II-01": 0.7,  # 1.99 (4), paper 1.96
    "MNIST-II-02": 0.7,  # 2.62 (4), paper 2.58
    "MNIST-II-03": 1.65,  # 2.96 (3), paper 2.99
    "MNIST-II-04": 1.01,  # 3.55 (3), paper 3.55
    "MNIST-II-05": 1.25,  # 5.15 (6), paper 5.10
    "MNIST-III-01": 0.5,  # 4.79 (3), paper 3.08
    "MNIST-III-02": 0.7,  # 5.38 (4), paper 5.38
    "MNIST-III-03": 1.74,  # 6.28 (3), paper 6.30
    "MNIST-III-04": 0.73,  # 7.91 (3), paper 7.81
    "MNIST-III-05": 1.19,  # 7.92 (3), paper 7.88
    "MNIST-III-06": 1.38,  # 7.95 (3), paper 8.03
    "MNIST-III-07": 0.96,  # 8.97 (3), paper 8.98
    "MNIST-III-08": 1.05,  # 9.50 (3), paper 9.57
    "MNIST-III-09": 0.7,  # 10.21 (4), paper 10.08
    "MNIST-III-10": 0.51,  # 10.11 (3), paper 10.12
}


def _layout(name: str, *digits: Digit, **ranges: float) -> Layout:
    return Layout(name, digits, strength=STRENGTHS[name], **ranges)


_ALL = (
    # Two digits: side by side, stacked, on a diagonal in unequal sizes, rotated and overlapping, mirrored in noise.
    _layout("MNIST-II-01", Digit(-0.50, 0.00), Digit(0.50, 0.00), shift=0.04, scale=0.05),
    _layout("MNIST-II-02", Digit(0.00, -0.50), Digit(0.00, 0.50), shift=0.08, scale=0.10),
    _layout(
        "MNIST-II-03", Digit(-0.40, -0.30), Digit(0.45, 0.35, scale=0.75), shift=0.08, scale=0.10, rotation=6,
    ),
    _layout(
        "MNIST-II-04", Digit(-0.38, 0.00, rotation=-20), Digit(0.38, 0.00, rotation=20),
        shift=0.08, scale=0.10, rotation=10,
    ),
    _layout(
        "MNIST-II-05", Digit(-0.38, -0.10, rotation=15), Digit(0.38, 0.10, scale=0.85, mirror=True),
        shift=0.08, scale=0.12, rotation=12, noise=60,
    ),
    # Three digits: a triangle, a row, a diagonal, a column; then unequal sizes, rotation, mirroring, overlap and noise.
    _layout("MNIST-III-01", Digit(-0.55, -0.55), Digit(0.55, -0.55), Digit(0.00, 0.55), shift=0.04, scale=0.05),
    _layout("MNIST-III-02", Digit(-1.00, 0.00), Digit(0.00, 0.00), Digit(1.00, 0.00), shift=0.04, scale=0.05),
    _layout("MNIST-III-03", Digit(-0.75, -0.45), Digit(0.00, 0.00), Digit(0.75, 0.45), shift=0.06, scale=0.08),
    _layout(
        "MNIST-III-04", Digit(0.00, -0.85, scale=0.80), Digit(0.00, 0.00), Digit(0.00, 0.85, scale=0.80),
        shift=0.08, scale=0.10, rotation=5,
    ),
    _layout(
        "MNIST-III-05", Digit(0.00, -0.45), Digit(-0.45, 0.40, rotation=-15), Digit(0.45, 0.40, rotation=15),
        shift=0.08, scale=0.10, rotation=8,
    ),
    _layout(
        "MNIST-III-06", Digit(-0.85, 0.00, rotation=-20), Digit(0.00, 0.00, scale=0.80), Digit(0.85, 0.00, rotation=20),
        shift=0.08, scale=0.10, rotation=8,
    ),
    _layout(
        "MNIST-III-07", Digit(-0.45, -0.40, mirror=True), Digit(0.45, -0.40, rotation=25), Digit(0.00, 0.42),
        shift=0.10, scale=0.12, rotation=10,
    ),
    _layout(
        "MNIST-III-08", Digit(-0.70, 0.10, rotation=-15), Digit(0.00, -0.10, mirror=True),
        Digit(0.70, 0.10, scale=0.85), shift=0.10, scale=0.12, rotation=10,
    ),
    _layout(
        "MNIST-III-09", Digit(-0.42, 0.38, rotation=20), Digit(0.00, -0.40), Digit(0.42, 0.38, rotation=-20),
        shift=0.10, scale=0.15, rotation=12, noise=60,
    ),
    _layout(
        "MNIST-III-10", Digit(-0.70, -0.20, rotation=30), Digit(0.00, 0.10, scale=0.85, mirror=True),
        Digit(0.70, 0.20, rotation=-30), shift=0.10, scale=0.15, rotation=12, noise=80,
    ),
)  # fmt: skip

LAYOUTS = {layout.name: layout for layout in _ALL}


def find_layout(name: str) -> Layout:
    """Look a set up by its name.

    Args:
        name: One of the fifteen names in `LAYOUTS`.

    Returns:
        The declaration.

    Raises:
        ValueError: There is no such set; the nearest name is offered.
    """
    if name in LAYOUTS:
        return LAYOUTS[name]
    near = difflib.get_close_matches(str(name).upper(), LAYOUTS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"the sets are {', '.join(LAYOUTS)}"
    raise ValueError(f"there is no multi-digit set {name!r}; {hint}")
