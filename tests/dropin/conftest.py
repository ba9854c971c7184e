"""For the tests of the drop-ins."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors here are small, and on a busy machine threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
