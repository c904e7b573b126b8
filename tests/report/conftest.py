"""A small table with everything that a table can have."""

import copy

import pytest
from tests.table_content import CONTENT


@pytest.fixture
def content():
    return copy.deepcopy(CONTENT)
