"""Each test begins and ends without what Accelerators share for the life of a process."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def no_accelerator_of_another_test():
    def forget():
        if "accelerate" in sys.modules:
            from tests.integrations.accelerate_on_cpu import forget

            forget()

    forget()
    yield
    forget()
