"""Labels of two digits, against plain Python."""

import pytest
import torch

from torch_dcl.data.relations import TASKS, label_pairs

PLAIN = {
    "number": lambda a, b: int(f"{a}{b}"),
    "order": lambda a, b: "<=>".index("<" if a < b else "=" if a == b else ">"),
    "sum": lambda a, b: int(str(a + b)[-1]),
    "same": lambda a, b: 1 if a == b else 0,
    "difference": lambda a, b: max(a, b) - min(a, b),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_label_is_what_a_person_would_say_of_the_two_digits(task):
    expected = [PLAIN[task](a, b) for a in range(10) for b in range(10)]
    labels = label_pairs(task, torch.arange(100))
    assert labels.dtype == torch.int64
    assert labels.tolist() == expected
    assert set(expected) == set(range(TASKS[task].classes))


@pytest.mark.parametrize(
    ("task", "chance"), [("number", 99), ("order", 55), ("sum", 90), ("same", 10), ("difference", 82)]
)
def test_chance_is_the_error_of_the_most_frequent_answer(task, chance):
    expected = [PLAIN[task](a, b) for a in range(10) for b in range(10)]
    assert 100 - max(expected.count(label) for label in expected) == chance
    assert TASKS[task].chance == chance


def test_labels_keep_shape_and_an_empty_set_has_none():
    assert label_pairs("sum", torch.tensor([[19, 5], [99, 50]])).tolist() == [[0, 5], [8, 5]]
    assert label_pairs("order", torch.empty(0, dtype=torch.int64)).tolist() == []


def test_unknown_tasks_and_longer_numbers_are_refused():
    with pytest.raises(ValueError, match="there is no task 'product'; the tasks are number, order, sum"):
        label_pairs("product", torch.arange(3))
    with pytest.raises(ValueError, match="100 is no number of two digits; use a set of two digits"):
        label_pairs("sum", torch.tensor([5, 100]))
    with pytest.raises(ValueError, match="-1 is no number of two digits"):
        label_pairs("sum", torch.tensor([-1, 5]))
