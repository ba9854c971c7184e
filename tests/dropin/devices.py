"""Devices of the tests that run with the Triton kernels: interpreted on a CPU, compiled with `-m gpu`."""

from __future__ import annotations

import pytest
import torch

DEVICES = [
    pytest.param("extension"),
    pytest.param("plain torch"),
    pytest.param(
        "interpreted",
        marks=[
            pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the Triton kernels are compiled"),
            # The interpreter computes with NumPy, which warns where arithmetic overflows.
            pytest.mark.filterwarnings("ignore::RuntimeWarning"),
        ],
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
