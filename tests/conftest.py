"""What every test starts from: the same random numbers."""

import pytest
import torch


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)
