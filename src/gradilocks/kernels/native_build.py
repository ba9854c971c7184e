"""Builds the native library from the sources that ship with the package, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sysconfig
from pathlib import Path

import torch

__all__ = ["build"]

SOURCES = Path(__file__).parent / "cpp"


def build() -> Path | None:
    """Where the library is, built if it was not; None if that fails."""
    key = hashlib.sha256(torch.__version__.encode() + (torch.version.git_version or "").encode())
    key.update(str(sysconfig.get_config_var("SOABI")).encode())
    for source in sorted(SOURCES.iterdir()):
        key.update(source.name.encode() + source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gradilocks"
    path = cache / key.hexdigest()[:24] / "gradilocks_native.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    flags = [
        "-std=c++17", "-fPIC", "-O2", "-fvisibility=hidden", "-ffp-contract=off",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}",
        f"-I{sysconfig.get_paths()['include']}",
    ]  # fmt: skip
    kernels = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
    jobs, objects = [], []
    for source in sorted(SOURCES.glob("*.cpp")):
        out = path.parent / f"{source.stem}.{os.getpid()}.o"
        more = kernels if source.stem.startswith("cpu_") else []
        jobs.append(subprocess.Popen(["g++", *flags, *more, "-c", str(source), "-o", str(out)]))
        objects.append(str(out))
    if any([job.wait() for job in jobs]):
        return None
    made = path.with_suffix(f".{os.getpid()}.so")
    libraries = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    command = ["g++", "-shared", *objects, f"-L{root / 'lib'}", *libraries, "-o", str(made)]
    if subprocess.run(command, check=False).returncode:
        return None
    made.replace(path)
    return path
