"""Settings for every test: hypothesis draws the same examples each time, and takes its time."""

from __future__ import annotations

import gc
import os
import signal
import sys

import pytest
import torch

from tests import scripts
from tests.interpreter import make_fast

if not torch.cuda.is_available():  # Before anything imports Triton, which reads it once.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The C++ library is built once for all tests, also for those that give a process another home.
if "GRADILOCKS_NATIVE_CACHE" not in os.environ:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    os.environ["GRADILOCKS_NATIVE_CACHE"] = os.path.join(home, "gradilocks", "native")

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and stops.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # Under nohup.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # A machine that runs only the `gpu` tests may have none.
    pass
else:
    settings.register_profile(
        "steady",
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("steady")


# Folders of tests that take seconds each, because they start processes.
LONG = ("tests/cli/", "tests/ranks/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first: where one is the last, the other workers have nothing left to do."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.fixture(scope="session")
def script_server():
    """Runs scripts in processes of their own, without importing torch for each."""
    with scripts.serving() as server:
        yield server


def pytest_collection_finish() -> None:
    """The kernels are interpreted where there is no GPU; modules are no garbage to look through.

    With torch and all tests imported the collector looks at a million objects each time that it is
    asked for by a test of who holds what: 0.2 s, where the objects of the test take 5 ms.
    """
    import torch._dynamo  # noqa: F401 - else the first optimizer imports it, later than this.

    gc.collect()
    gc.freeze()
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        make_fast()


def pytest_unconfigure() -> None:
    """Python's end takes everything down, modules too."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_accelerator_of_another_test():
    """Each test begins and ends without what Accelerators share for the life of a process."""

    def forget():
        if "accelerate" in sys.modules:
            from tests.integrations.accelerate_on_cpu import forget

            forget()

    forget()
    yield
    forget()


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_chosen():
    """Which kernels serve the CPU is fixed when it is first used: not by a test without C++."""
    from gradilocks import kernels

    return kernels.BACKENDS["cpu"]
