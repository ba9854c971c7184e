"""The native library in this process: C++ that walks over tensors, computes on the CPU, launches.

GRADILOCKS_NATIVE and the cache enter; the module `gradilocks_native` leaves, or None as long as it
is not there, with the reason. The first to ask finds it in the cache, which takes 20 ms once, or
has it built in the background and goes on in Python; once that is done, everybody has it. How it is
built, and what is trusted: `native_build.py`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gradilocks.eager import users_line
from gradilocks.errors import GradilocksError
from gradilocks.kernels import native_build
from gradilocks.kernels.native_build import BackgroundBuild, Compiler, Entry, Recipe, Result
from gradilocks.native_mode import mode_asked_for

__all__ = [
    "NativeLibrary",
    "Unavailable",
    "build_native",
    "cache_folder",
    "find_native",
    "is_coming",
    "library",
    "library_within",
    "recipe_here",
    "status",
]

PATIENCE = 900.0
"""Seconds that GRADILOCKS_NATIVE=wait waits."""
LOOK_EVERY = 0.1
"""Seconds between two looks at whether the library is built: steps of a small model ask often."""
MACHINES = ("x86_64", "aarch64")
SOURCES = Path(__file__).parent / "cpp"

# For every unit. Contraction would fuse a product and a sum where the machine can, and so change
# bits from one machine to the next. The macro leaves the functions of all operators out of torch's
# headers, which take a second of 15 (g++ 12, torch 2.13).
FLAGS = (
    "-O2",
    "-fPIC",
    "-pipe",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-DAT_PER_OPERATOR_HEADERS",
)
# Of a library for every machine of a kind, in an image say: what x86-64-v3 stands for.
PORTABLE = {"x86_64": ("-march=x86-64-v3",), "aarch64": ()}
V3_NEEDS = {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}


class Unavailable(Exception):
    """Why there is no library here, and none can be built."""


class BadSetting(Unavailable):
    """The same, where an environment variable makes no sense: a mistake, of which one is told."""


class NativeLibrary:
    """The library of one process, and how far it is from having one.

    Args:
        recipe: makes the recipe of the library for this machine.
    """

    def __init__(self, recipe: Callable[[], Recipe]) -> None:
        self._recipe_here = recipe
        self._place: tuple[Path, Recipe] | None = None  # What is being built, and where.
        self._module: Any = None
        self._settled = False  # Whether nothing will change any more.
        self._why = ""
        self._build: BackgroundBuild | None = None
        self._waits = False
        self._next_look = 0.0
        self._warning = ""
        self._lock = threading.Lock()
        self._forks_with_threads = True
        self._lost_threads = False

    def library(self) -> Any:
        """The module, or None as long as it is not there. Never waits, but for GRADILOCKS_NATIVE.

        Raises:
            ValueError: GRADILOCKS_NATIVE is something else than auto, wait or off.
        """
        if self._settled or time.monotonic() < self._next_look:
            return self._module
        return self.library_within(0.0)

    def library_within(self, seconds: float) -> Any:
        """The same; waits until it is built or has failed, but no longer than so many seconds."""
        # Another thread that is at it, and waits perhaps, is no reason to wait here.
        if not self._lock.acquire(blocking=seconds > 0 or mode_asked_for() == "wait"):
            return None
        try:
            if not self._settled:
                self._go_on(seconds)
            warning, self._warning = self._warning, ""
        finally:
            self._lock.release()
        if warning:
            warnings.warn(warning, RuntimeWarning, stacklevel=users_line())
        return self._module

    def status(self) -> str:
        """What runs, C++ or Python, and why."""
        self.library()
        return f"{'Python' if self._module is None else 'C++'}: {self._why}"

    def is_coming(self) -> bool:
        """Whether it is not there yet and may still come, as while it is being built."""
        return not self._settled

    def before_fork(self) -> None:
        """In the parent: a child has the thread that forks, and no other."""
        try:  # Its links are 2 and one for each thread.
            self._forks_with_threads = os.stat("/proc/self/task").st_nlink > 3
        except OSError:
            self._forks_with_threads = True

    def after_fork(self) -> None:
        """In a child: the lock may have been held, and the pipe is the parent's.

        Where there were other threads, the child computes on one: OpenMP would wait for ever for
        those of its pool. torch's own operators use the pool for large tensors alone, so that a
        small model steps in a child; with ours it must too.
        """
        self._lock, self._next_look = threading.Lock(), 0.0
        self._lost_threads |= self._forks_with_threads
        if self._module is not None and self._lost_threads:
            self._module.cpu_one_thread()
        if self._build is not None:
            self._build.forget()
            self._build = None

    def _go_on(self, seconds: float) -> None:
        if self._build is None:
            self._begin()
        if self._build is not None:
            result = self._build.result(PATIENCE if self._waits else seconds)
            if result is not None:
                self._build = None
                self._conclude(result)
            self._next_look = time.monotonic() + LOOK_EVERY

    def _begin(self) -> None:
        """Loads the library if it is in the cache, else starts to build it if that can be."""
        mode = mode_asked_for()
        self._waits = mode == "wait"
        try:
            if mode == "off":
                raise Unavailable("GRADILOCKS_NATIVE=off")
            cache, recipe = self._place = cache_folder(), self._recipe_here()
            entry = look_up(cache, recipe)
            if entry is not None:
                self._load(entry)
                return
            before = native_build.failure(cache / recipe.key)
            if before is not None:
                raise Unavailable(f"{describe_failure(before)}. `gradilocks build` tries again")
            worker = sys.modules.get("torch.utils.data")
            if worker is not None and worker.get_worker_info() is not None:
                raise Unavailable("it is not built yet, and never by a worker of a DataLoader")
            check_tools(recipe)
            make_cache(cache)
            self._build = BackgroundBuild(recipe, cache, hurry=self._waits)
            self._why = f"it is being built, in {cache / recipe.key}"
        except (Unavailable, OSError) as error:
            self._settle(str(error))
            if isinstance(error, BadSetting):
                self._warn(str(error))

    def _conclude(self, result: Result) -> None:
        assert self._place is not None
        if result.state in ("built", "there"):
            entry = look_up(*self._place)
            if entry is not None:
                self._load(entry)
            else:
                self._settle("it was built, and has gone from the cache since")
        elif result.state == "lost":
            self._settle("it is being built, and this process has closed the pipe to the builder")
        elif result.state == "ended":
            self._settle("its builder was killed; the next process starts another")
        else:
            self._settle(f"{describe_failure(result)}. `gradilocks build` tries again")
            if result.state == "failed":  # Of one who built; others were waiting for the same.
                self._warn(f"the C++ library: {describe_failure(result)}")

    def _load(self, entry: Entry) -> None:
        try:
            module = load(entry)
        except Unavailable as error:
            self._settle(str(error))
            self._warn(f"the C++ library in {entry.path}: {error}")
        else:
            if self._lost_threads:
                module.cpu_one_thread()
            self._module = module
            self._settle(f"built {entry.built} by {entry.compiler}, {entry.path}")

    def _settle(self, why: str) -> None:
        self._why, self._settled = why, True

    def _warn(self, what: str) -> None:
        self._warning = (
            f"Gradilocks goes on in Python, which is slower: {what}. Mend it and run "
            "`gradilocks build`, or set GRADILOCKS_NATIVE=off to do without, silently."
        )


# --- this machine ---------------------------------------------------------------------------------


def cache_folder(given: str = "") -> Path:
    """Where libraries are kept, if not in a folder that is given.

    Raises:
        Unavailable: there is no home, or others could put something there.
    """
    given = given or os.environ.get("GRADILOCKS_NATIVE_CACHE", "")
    if given:
        folder = Path(os.path.expanduser(given)).absolute()
    else:
        home = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(home):  # As the XDG specification has it.
            home = os.path.join(os.path.expanduser("~"), ".cache")
        if not os.path.isabs(home):
            raise Unavailable("there is no home folder to keep it in; set GRADILOCKS_NATIVE_CACHE")
        folder = Path(home, "gradilocks", "native")
    told = native_build.distrust(folder)
    if told:
        raise Unavailable(
            f"its cache is not this user's alone: {told}. Mend that, or name another folder with "
            "GRADILOCKS_NATIVE_CACHE"
        )
    return folder


def look_up(cache: Path, recipe: Recipe) -> Entry | None:
    """The library, if it is there: for this machine, or for every machine of its kind."""
    for each in serving(recipe):
        # Where none can be built, one that another compiler has made is as good: an image that was
        # built with a compiler and runs without.
        stuck = not each.compilers or not os.access(cache, os.W_OK)
        entry = native_build.find(cache, each, any_compiler=stuck)
        if entry is not None:
            return entry
    return None


def check_tools(recipe: Recipe) -> None:
    """Looks for all that building takes.

    Raises:
        Unavailable: something is missing.
    """
    if not recipe.compilers:
        tried = ", ".join(" ".join(each) for each in _candidates())
        raise Unavailable(
            f"no C++ compiler was found (looked for {tried}). On Debian or Ubuntu: "
            "apt-get install g++"
        )
    for name, folder, whose in (
        ("Python.h", recipe.includes[-1], "Python's headers are"),
        ("torch/csrc/autograd/python_variable.h", recipe.includes[0], "torch's headers are"),
    ):
        if not Path(folder, name).is_file():
            way = "; on Debian or Ubuntu: apt-get install python3-dev" if name == "Python.h" else ""
            raise Unavailable(f"{whose} not installed ({name} was looked for in {folder}){way}")
    if not sys.executable or getattr(sys, "frozen", False):
        raise Unavailable("this process has no Python of its own to run the builder with")


def make_cache(cache: Path, mode: int = 0o700) -> None:
    """Makes the folder that is built in.

    Raises:
        Unavailable: it cannot be made, or not be written.
    """
    try:
        native_build.make_cache(cache, mode)
    except OSError as error:
        raise Unavailable(f"the cache {cache} cannot be made: {error.strerror}") from error
    if not os.access(cache, os.W_OK):
        raise Unavailable(f"it is not built, and {cache} cannot be written")


def recipe_here() -> Recipe:
    """The recipe for this torch, Python, machine and compiler.

    Raises:
        Unavailable: none is built for machines of this kind, or by such flags.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES:
        raise Unavailable(
            f"it is built on Linux (x86-64, aarch64), not on {sys.platform} {machine}"
        )
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise Unavailable("it is not built for a free-threaded Python, whose lock it counts on")
    if not SOURCES.is_dir():
        raise Unavailable(f"its sources are not there as files ({SOURCES})")
    torchs, include = Path(torch.__file__).parent, sysconfig.get_path("include")
    headers = torchs / "include"
    openmp = openmp_of(torchs)
    linked = [torchs / "lib" / f"lib{name}.so" for name in ("torch_python", "torch_cpu", "c10")]
    given = os.environ.get("GRADILOCKS_NATIVE_CXXFLAGS", "")
    try:
        more = tuple(shlex.split(given))
    except ValueError as error:
        raise BadSetting(
            f"GRADILOCKS_NATIVE_CXXFLAGS must be flags of a compiler, quoted as in a shell, got "
            f"{given!r} ({error})"
        ) from error
    cpu = cpu_of_this_machine()
    own = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}[machine]
    abi = "1" if torch.compiled_with_cxx11_abi() else "0"
    return Recipe(
        sources=str(SOURCES),
        includes=(str(headers), str(headers / "torch/csrc/api/include"), include),
        libraries=(*map(str, linked), *([openmp] if openmp else [])),
        compilers=compilers_here(),
        flags=(*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *more),
        kernel_flags=(
            "-O3",
            "-fno-math-errno",
            "-fno-trapping-math",
            *([own] if cpu else []),
            *(["-DGRADILOCKS_OPENMP"] if openmp else []),
        ),
        facts={
            "sources": native_build.sources_hash(SOURCES),
            "torch": str(torch.__version__),
            "torch_git": str(torch.version.git_version),
            "python": str(sysconfig.get_config_var("SOABI")),
            "libc": libc_here(),
            "machine": machine,
            "cpu": cpu or "not known",
            "openmp": Path(openmp).name,
        },
    )


def portable(recipe: Recipe) -> Recipe:
    """The recipe for every machine of this kind that is not too old."""
    flags = [flag for flag in recipe.kernel_flags if not flag.startswith(("-march", "-mcpu"))]
    return replace(
        recipe,
        kernel_flags=(*flags, *PORTABLE[recipe.facts["machine"]]),
        facts={**recipe.facts, "cpu": "any"},
    )


def serving(recipe: Recipe) -> tuple[Recipe, ...]:
    """The recipes of all libraries that run on this machine, the best one first."""
    return (recipe, portable(recipe)) if runs_portable(recipe) else (recipe,)


def runs_portable(recipe: Recipe) -> bool:
    """Whether this machine is not too old."""
    can = set(recipe.facts["cpu"].split())
    return recipe.facts["machine"] != "x86_64" or can >= V3_NEEDS


def _candidates() -> list[list[str]]:
    try:
        given = shlex.split(os.environ.get("CXX", ""))
    except ValueError:
        given = []
    return [*([given] if given else []), ["c++"], ["g++"], ["clang++"]]


def compilers_here() -> tuple[Compiler, ...]:
    """The C++ compilers that answer, each once: `c++` is mostly another name of g++."""
    found: dict[tuple[str, ...], Compiler] = {}
    for words in _candidates():
        path = shutil.which(words[0])
        if path is None:
            continue
        path = os.path.abspath(path)
        identity = (os.path.realpath(path), *words[1:])
        if identity in found:
            continue
        version = _version_of((path, *words[1:]))
        if version:
            found[identity] = Compiler((path, *words[1:]), f"{Path(identity[0]).name} {version}")
    return tuple(found.values())


def _version_of(command: tuple[str, ...]) -> str:
    """What a compiler says of itself, without the name that it was called by."""
    try:
        told = subprocess.run(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=native_build.surroundings(),
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    first = told.stdout.decode(errors="replace").partition("\n")[0].strip()
    return "" if told.returncode else first.partition(" ")[2] or first


def openmp_of(torchs: Path) -> str:
    """The OpenMP library that torch itself runs on: a second one would have threads of its own."""
    for folder in (torchs / "lib", torchs.parent / "torch.libs"):
        found = sorted(folder.glob("libgomp*.so*"))
        if found:
            return str(found[0])
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            path = line.split(maxsplit=5)[-1].strip()
            if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")):
                return path
    return ""


def libc_here() -> str:
    """The C library, which a newer one's programs do not run on."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "not known"
    except (AttributeError, ValueError, OSError):  # Another C library has no such name.
        return "not known"


@functools.cache
def cpu_of_this_machine() -> str:
    """What its processors are and can do, so that no code for another is loaded: homes are shared.

    Empty if the system does not say; then no code is made for it in particular.
    """
    x86 = ("vendor_id", "cpu family", "model", "flags")
    arm = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features")
    names = (*x86, *arm)
    seen: dict[str, set[str]] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in names:
                    seen.setdefault(name.strip(), set()).add(value.strip())
                # All of x86's are alike; to read on costs a millisecond for every twenty.
                if not line.strip() and "flags" in seen:
                    break
    except OSError:
        return ""
    return "; ".join(" ".join(sorted(seen[name])) for name in names if name in seen)


def loaded(path: Path) -> Any:
    """The module in a file."""
    spec = importlib.util.spec_from_file_location(native_build.NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(entry: Entry) -> Any:
    """The module of a library in the cache.

    Raises:
        Unavailable: it does not load, which later processes know from the cache.
    """
    try:
        return loaded(entry.path)
    except Exception as error:  # What the loader or the module's own start says.
        line = f"{type(error).__name__}: {error}"
        native_build.refuse(entry, line)
        raise Unavailable(describe_failure(Result("does not load", line))) from error


def describe_failure(result: Result) -> str:
    """How a library has failed, to be built or to be loaded, and where more is said."""
    if result.state == "does not load":
        return f"it does not load ({result.line})"
    log = f" (all of it: {result.log})" if result.log else ""
    return f"it could not be built: {result.line}{log}"


# --- ahead of time --------------------------------------------------------------------------------


def find_native(cache: str = "") -> tuple[bool, str]:
    """Whether the library is there and loads, and where it is, or why not; builds nothing.

    Args:
        cache: the folder to look in; the user's own if empty.
    """
    try:
        recipe, folder = recipe_here(), cache_folder(cache)
        entry = look_up(folder, recipe)
        if entry is not None:
            load(entry)
            return True, f"{entry.path}, built {entry.built} by {entry.compiler}"
        for each in serving(recipe):
            before = native_build.failure(folder / each.key)
            if before is not None:
                return False, describe_failure(before)
        check_tools(recipe)
    except Unavailable as error:
        return False, str(error)
    return False, f"it is not in {folder}; it can be built"


def build_native(
    cache: str = "",
    *,
    for_any_machine: bool = False,
    again: bool = False,
    report: Callable[[str], None],
) -> Entry:
    """Builds the library now, unless it is there, and loads it once.

    Args:
        cache: a folder for all users of an image, say; the user's own if empty.
        for_any_machine: whether it is to run also on other processors than this machine's.
        again: whether to build also if it is there.
        report: is told what is done.

    Raises:
        GradilocksError: it cannot be built here, or does not load.
    """
    try:
        recipe, folder = recipe_here(), cache_folder(cache)
        chosen = portable(recipe) if for_any_machine else recipe
        result = Result("there")
        if again or native_build.find(folder, chosen, any_compiler=not chosen.compilers) is None:
            check_tools(recipe)
            make_cache(folder, 0o755 if cache else 0o700)
            result = native_build.build(chosen, folder, again=again, retry=True, report=report)
    except (Unavailable, OSError) as error:
        raise GradilocksError(f"the C++ library cannot be built: {error}.") from error
    entry = native_build.find(folder, chosen, any_compiler=not chosen.compilers)
    if entry is None or result.state == "failed":
        kept = "" if entry is None else f". The one that was there stays: {entry.path}"
        raise GradilocksError(f"the C++ library: {describe_failure(result)}{kept}.")
    if not for_any_machine or runs_portable(recipe):
        try:
            load(entry)
        except Unavailable as error:
            raise GradilocksError(f"the C++ library in {entry.path}: {error}.") from error
    return entry


_HERE = NativeLibrary(recipe_here)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_HERE.before_fork, after_in_child=_HERE.after_fork)

library = _HERE.library
library_within = _HERE.library_within
status = _HERE.status
is_coming = _HERE.is_coming
