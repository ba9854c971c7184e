"""Compiles the CPU kernels. Everything else is in pyproject.toml.

The extension is optional: without a C++ compiler the installation succeeds and plain torch is used. It includes neither
Python's nor torch's headers, so one build serves every version of both (`gradilocks.kernels.cpu` loads it by ctypes).
In place: `python setup.py build_ext --inplace`.
"""

import sys

from setuptools import Extension, setup

NATIVE = "src/gradilocks/kernels/native"

extension = Extension(
    "gradilocks.kernels._native",
    sources=[f"{NATIVE}/measure.cpp", f"{NATIVE}/optimizers.cpp", f"{NATIVE}/tensors.cpp"],
    depends=[f"{NATIVE}/parallel.h"],
    # Without contraction and with lanes of fixed number, bits do not depend on the processor.
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fno-unswitch-loops",
        "-fno-exceptions",
        "-fno-rtti",
        "-fvisibility=hidden",
    ],
    language="c++",
    optional=True,
    py_limited_api=True,
)

setup(
    # The kernels use attributes of GCC and Clang.
    ext_modules=[] if sys.platform == "win32" else [extension],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
