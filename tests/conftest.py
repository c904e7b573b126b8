"""What every test starts from: the same random numbers, and no clock."""

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("no clock", deadline=None)
hypothesis.settings.load_profile("no clock")


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)
