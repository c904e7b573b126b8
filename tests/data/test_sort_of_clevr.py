"""Sort-of-CLEVR: its answers are those of somebody who looks at the pixels."""

import pytest
import torch

from torch_dcl.data.sort_of_clevr import ANSWERS, COLOURS, SIDE, generate_sort_of_clevr


@pytest.fixture(scope="module")
def made():
    return generate_sort_of_clevr(300, "train")


def look(image):
    """What the pixels show: the shape and the middle of each colour, by the box around it."""
    seen = {}
    for name, colour in COLOURS.items():
        rows, columns = (image == torch.tensor(colour, dtype=torch.uint8)[:, None, None]).all(0).nonzero(as_tuple=True)
        height, width = int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1
        assert height == width == 11
        full = len(rows) == height * width
        assert full or 0.7 < len(rows) / (height * width) < 0.85  # a disc fills π/4 of its box
        middle = (float(columns.float().mean()), float(rows.float().mean()))
        seen[name] = ("square" if full else "circle", middle)
    return seen


def answer(seen, bits):
    """Answer a question from what was seen, with nothing but the table of the module's docstring."""
    colour = list(COLOURS)[bits[:6].index(1)]
    relational, kind = bits[6:8].index(1), bits[8:].index(1)
    shape, (x, y) = seen[colour]
    if not relational:
        return (shape, "yes" if x < (SIDE - 1) / 2 else "no", "yes" if y < (SIDE - 1) / 2 else "no")[kind]
    others = sorted(((x - u) ** 2 + (y - v) ** 2, form) for name, (form, (u, v)) in seen.items() if name != colour)
    return (others[0][1], others[-1][1], str(sum(form == shape for form, _ in seen.values())))[kind]


def test_the_answers_are_those_of_somebody_who_looks_at_the_pixels(made):
    for image, questions, answers in zip(made.images, made.questions.tolist(), made.answers.tolist(), strict=True):
        seen = look(image)
        assert [answer(seen, bits) for bits in questions] == [ANSWERS[place] for place in answers]


def test_shapes_do_not_touch_and_leave_the_rest_white(made):
    coloured = (made.images != 255).any(1).flatten(1).sum(1)
    wanted = torch.where(made.circles, 97, 121).sum(1)
    assert torch.equal(coloured, wanted)
    apart = (made.centres[:, :, None] - made.centres[:, None]).abs().amax(-1) + 99 * torch.eye(6, dtype=torch.int64)
    assert int(apart.min()) == 12  # eleven pixels and a gap


def test_every_image_has_ten_different_questions_of_each_sort(made):
    assert made.questions.shape == (300, 20, 11)
    assert torch.equal(made.relational, (torch.arange(20) >= 10).expand(300, -1))
    for part, size in ((slice(0, 6), 6), (slice(6, 8), 2), (slice(8, 11), 3)):
        bits = made.questions[..., part]
        assert bits.shape[-1] == size
        assert bool((bits.sum(-1) == 1).all())
    weights = 2 ** torch.arange(11)
    codes = (made.questions.long() * weights).sum(-1)
    assert all(len(set(of_image)) == 20 for of_image in codes.tolist())


def test_no_answer_of_a_question_can_be_guessed_far_above_chance():
    made = generate_sort_of_clevr(2000, "balance")
    kinds = made.questions[..., 8:].argmax(-1) + 3 * made.relational.long()
    for kind in range(6):
        share = torch.bincount(made.answers[kinds == kind], minlength=10).max() / (kinds == kind).sum()
        # Coins decide five kinds; of six coins, three or four fall alike in 5/16 of cases.
        assert float(share) == pytest.approx(5 / 16 if kind == 5 else 0.5, abs=0.03)


def test_a_set_is_the_same_whatever_its_size_and_another_for_another_name_or_seed(made):
    again = generate_sort_of_clevr(7, "train")
    assert all(torch.equal(part, whole[:7]) for part, whole in zip(again, made, strict=True))
    for other in (generate_sort_of_clevr(7, "test"), generate_sort_of_clevr(7, "train", seed=1)):
        assert not torch.equal(other.images, again.images)
        assert not torch.equal(other.questions, again.questions)


def test_a_pair_is_an_image_with_its_question_below(made):
    images, answers = generate_sort_of_clevr(3, "train").pairs()
    assert images.shape == (60, 3, SIDE + 1, SIDE)
    assert torch.equal(answers, made.answers[:3].flatten())
    for number in (0, 19, 20, 59):
        assert torch.equal(images[number, :, :SIDE], made.images[number // 20])
        assert images[number, 0, SIDE, :11].tolist() == [
            255 * b for b in made.questions[number // 20, number % 20].tolist()
        ]
        assert not images[number, :, SIDE, 11:].any()


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (1.5, TypeError)])
def test_a_count_that_is_none_is_refused(count, error):
    with pytest.raises(error, match="count must be"):
        generate_sort_of_clevr(count, "train")
