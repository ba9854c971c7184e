"""A recipe enters; the native library leaves in a cache, built once however many processes ask.

The builder in the background is this file, run by its path as `python -I -S`, so it imports nothing
but the standard library: no torch (seconds, and a gigabyte of address space), no package, nothing
that PYTHONPATH or a script's folder puts in the way.

The cache has a folder for each recipe, named by its key:

    native.json     what was built, from what, and the SHA-256 of the library: renamed into place
                    last, so that it names a whole library or is not there
    gradilocks_native-1f0c2a9d.so
    build.log       every command and what it said
    failure.json    how the last build failed: nobody tries again for a day
    unloadable.json which library does not load, and why: for a day it counts as not there
    lock            held by the one who builds, for as long as his process lives

Nothing is loaded that the hash in native.json does not match, nor from a folder or file that
somebody else than the user and root could have written.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import select
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

__all__ = [
    "BackgroundBuild",
    "BuildFailed",
    "Compiler",
    "Entry",
    "Recipe",
    "Result",
    "build",
    "distrust",
    "fail",
    "failure",
    "find",
    "make_cache",
    "refuse",
    "sources_hash",
    "surroundings",
]

NAME = "gradilocks_native"
RETRY_AFTER = 24 * 3600.0
"""Seconds for which a failed build is not tried again."""
KEPT = 8
"""Libraries that are kept in a cache: another torch, Python, machine or version each."""
UNUSED_AFTER = 24 * 3600.0
"""Seconds after which one that is too many goes, if nobody has loaded it: homes are shared."""
AT_ONCE = 2
"""Compilers at a time: one unit takes ten times as long as the others, so more gain nothing."""
PATIENCE = 900.0
"""Seconds that one command may take, on a machine that has little time for it."""
STALE_CLAIM = 3600.0
"""Seconds after which a claim counts as left behind, where files cannot be locked."""

Report = Callable[[str], None]


class BuildFailed(Exception):
    """A compiler refused, or what it needs is not there. The text is its last meaningful line."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the command with its arguments, and how it names itself."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Recipe:
    """What the library is built from, by and for.

    Args:
        sources: the folder of the units, `*.cpp`, and of their headers.
        includes: folders of other people's headers.
        libraries: files that the library is linked against, by their names in the loaded process.
        compilers: those that were found, in the order in which they are tried.
        flags: for every unit, and for linking.
        kernel_flags: besides, for the units `cpu_*.cpp`.
        facts: what else the result depends on. The places above do not belong to it: two
            environments with the same torch share one library.
    """

    sources: str
    includes: tuple[str, ...]
    libraries: tuple[str, ...]
    compilers: tuple[Compiler, ...]
    flags: tuple[str, ...]
    kernel_flags: tuple[str, ...]
    facts: Mapping[str, str]

    @property
    def base(self) -> str:
        """The part of the key that can be told where there is no compiler."""
        return _digest([self.flags, self.kernel_flags, sorted(self.facts.items())])[:20]

    @property
    def key(self) -> str:
        """The name of the folder that the library lies in."""
        return f"{self.base}-{_digest([asdict(each) for each in self.compilers])[:12]}"

    def to_json(self) -> str:
        """For the builder in the background."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Recipe:
        """As it was before `to_json`."""
        told = json.loads(text)
        compilers = (
            Compiler(tuple(each["command"]), each["version"]) for each in told["compilers"]
        )
        lists = ("includes", "libraries", "flags", "kernel_flags")
        return Recipe(
            **{**told, **{name: tuple(told[name]) for name in lists}, "compilers": tuple(compilers)}
        )


@dataclass(frozen=True)
class Entry:
    """A library in the cache that is what its description says."""

    path: Path
    compiler: str
    built: str
    seconds: str


@dataclass(frozen=True)
class Result:
    """What became of a build.

    Args:
        state: "built", "there" (somebody else had), "failed", "failed before", "ended" where the
            builder was killed, "lost" where what it says cannot be heard any more, or "does not
            load" where a process has found so.
        line: the compiler's last meaningful line, or the loader's.
        log: where all of it is; empty if that was all.
    """

    state: str
    line: str = ""
    log: str = ""


# --- the cache ------------------------------------------------------------------------------------


def make_cache(cache: Path, mode: int = 0o700) -> None:
    """Makes the folder and those above it, all with this mode, where they are not there.

    Raises:
        OSError: that cannot be.
    """
    if cache.is_dir():
        return
    make_cache(cache.parent, mode)
    with contextlib.suppress(FileExistsError):
        cache.mkdir(mode=mode)
        cache.chmod(mode)  # Whatever the umask.


def distrust(cache: Path) -> str:
    """Why nothing may be loaded from a folder; empty if it may, or if it is not there yet."""
    place = Path(os.path.realpath(cache))
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        told = _distrust_one(place)
        if told:
            return told
    for parent in place.parents:
        with contextlib.suppress(OSError):
            mode = parent.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return f"everybody may rename what is in {parent}"
    return ""


def _distrust_one(path: Path) -> str:
    """The same for one folder or file alone."""
    try:
        told = path.stat()
    except PermissionError:
        return f"{path} cannot be read by this user"
    if told.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to user {told.st_uid}, and this is user {os.geteuid()}"
    if told.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others than its owner may write to {path} (chmod go-w {shlex.quote(str(path))})"
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        return f"{path} cannot be read by this user"
    return ""


def find(cache: Path, recipe: Recipe, *, any_compiler: bool = False) -> Entry | None:
    """The library of this recipe, if it is there and whole.

    Args:
        cache: one that `distrust` says nothing about.
        recipe: what it must have been built from and for.
        any_compiler: whether one serves that another compiler has made.
    """
    names = [recipe.key]
    if any_compiler:
        with contextlib.suppress(OSError):
            names += sorted(set(os.listdir(cache)) - {recipe.key})
    for name in names:
        if name.startswith(f"{recipe.base}-"):
            entry = _entry(cache / name)
            if entry is not None:
                return entry
    return None


def _entry(folder: Path) -> Entry | None:
    told = _read(folder / "native.json")
    name = told.get("library")
    if told.get("key") != folder.name or not isinstance(name, str) or Path(name).name != name:
        return None
    path = folder / name
    if _recent(folder / "unloadable.json").get("library") == name:
        return None
    try:
        if _distrust_one(folder) or _distrust_one(path):
            return None
        if hashlib.sha256(path.read_bytes()).hexdigest() != told.get("sha256"):
            return None
    except OSError:
        return None
    with contextlib.suppress(OSError):  # So that it is seen to be in use.
        os.utime(folder / "native.json")
    return Entry(path, *(str(told.get(name)) for name in ("compiler", "built", "seconds")))


def failure(folder: Path) -> Result | None:
    """How what belongs in this folder has failed, to be built or to be loaded, within a day."""
    for name, state in (("failure.json", "failed before"), ("unloadable.json", "does not load")):
        told = _recent(folder / name)
        if told:
            return Result(state, str(told.get("line")), str(told.get("log")))
    return None


def fail(folder: Path, line: str) -> Result:
    """Remembers that a build has failed; a library that is there from before stays good."""
    log = str(folder / "build.log")
    with contextlib.suppress(OSError):
        _write(folder / "failure.json", {"time": time.time(), "line": line, "log": log})
    return Result("failed", line, log)


def refuse(entry: Entry, line: str) -> None:
    """Remembers that a library does not load."""
    told = {"time": time.time(), "line": line, "log": "", "library": entry.path.name}
    with contextlib.suppress(OSError):
        _write(entry.path.parent / "unloadable.json", told)


def _recent(path: Path) -> dict[str, object]:
    """A remembered failure; empty if there is none, or none within a day."""
    told = _read(path)
    when = told.get("time")
    recent = isinstance(when, (int, float)) and 0 <= time.time() - when < RETRY_AFTER
    return told if recent else {}


def sources_hash(folder: Path) -> str:
    """Of all sources, by name and content."""
    return _digest(
        [
            (path.name, hashlib.sha256(path.read_bytes()).hexdigest())
            for path in sorted(folder.iterdir())
            if path.suffix in (".cpp", ".h")
        ]
    )


def _digest(what: object) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _read(path: Path) -> dict[str, object]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _write(path: Path, told: object) -> None:
    """The whole file or none: written beside it, on the disk, renamed."""
    text = json.dumps(told, indent=2).encode()
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(text)
        _settle(file.fileno(), path.parent)
    os.replace(name, path)


def _settle(handle: int, folder: Path) -> None:
    """To the disk, and readable by those who may read the folder."""
    os.fchmod(handle, folder.stat().st_mode & 0o644)
    os.fsync(handle)


# --- one at a time --------------------------------------------------------------------------------

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool = True, report: Report) -> Iterator[bool]:
    """Keeps others out; yields whether it does. What a killed process has held is free again."""
    import fcntl  # Here: it is not there on Windows, where this file is imported and never used.

    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                yield False
                return
            report(
                "another process is building it, at the lowest priority if a training has started "
                "that: waiting for it"
            )
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            with _claimed(folder / "claim", wait=wait) as ours:  # A network's file system.
                yield ours
            return
        yield True
    finally:
        os.close(handle)


@contextlib.contextmanager
def _claimed(path: Path, *, wait: bool) -> Iterator[bool]:
    """The same by a file that only one can make. A claim whose process has gone is taken over.

    Two may take over the same one; then both build, and the last to finish is the one that stays.
    """
    here = socket.gethostname()
    while True:
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            break
        except FileExistsError:
            with contextlib.suppress(OSError, ValueError):
                host, pid = path.read_text(encoding="utf-8").rsplit(" ", 1)
                old = time.time() - path.stat().st_mtime > STALE_CLAIM
                if old or (host == here and not Path("/proc", pid).exists()):
                    path.unlink()
                    continue
            if not wait:
                yield False
                return
            time.sleep(0.2)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(f"{here} {os.getpid()}")
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)


# --- building -------------------------------------------------------------------------------------


def build(
    recipe: Recipe,
    cache: Path,
    *,
    again: bool = False,
    retry: bool = False,
    report: Report = lambda text: None,
) -> Result:
    """Builds the library, unless it is there or its build has failed less than a day ago.

    Args:
        recipe: of the library.
        cache: a folder that is there.
        again: whether to build also if it is there.
        retry: whether to build also if that has failed.
        report: is told what is done.

    Raises:
        OSError: the cache cannot be written.
    """
    folder = cache / recipe.key
    make_cache(folder, stat.S_IMODE(cache.stat().st_mode) & 0o755)
    with _locked(folder, report=report):
        if not again and find(cache, recipe) is not None:
            return Result("there")
        before = failure(folder)
        if before is not None and not (again or retry):
            return before
        for left in folder.glob("work-*"):  # Of one who was killed: who has the lock makes one.
            shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix="work-", dir=folder))
        try:
            _build_in(work, recipe, folder, report)
        except BuildFailed as error:
            return fail(folder, str(error))
        finally:
            shutil.rmtree(work, ignore_errors=True)
        for name in ("failure.json", "unloadable.json"):
            (folder / name).unlink(missing_ok=True)
    _remove_old(cache, folder)
    return Result("built", log=str(folder / "build.log"))


def _build_in(work: Path, recipe: Recipe, folder: Path, report: Report) -> None:
    began = time.monotonic()
    copies = work / "cpp"  # What is compiled is what the key says, whoever edits the sources.
    copies.mkdir()
    for path in Path(recipe.sources).iterdir():
        if path.suffix in (".cpp", ".h"):
            shutil.copyfile(path, copies / path.name)
    if sources_hash(copies) != recipe.facts["sources"]:
        raise OSError(f"the sources in {recipe.sources} were changed while they were built")
    with open(folder / "build.log", "w", encoding="utf-8", errors="backslashreplace") as log:
        run = _Runner(log, work)
        compiler, standard = _first_that_works(recipe, work, run)
        common = [*compiler.command, standard, *recipe.flags]
        for include in recipe.includes:
            common += ["-isystem", include]
        # g++ looks for garbage too often: 10.6 s where the longest unit took 13.4 s.
        clang = "clang" in compiler.version.lower()
        thrifty = [] if clang else ["--param", "ggc-min-heapsize=524288"]
        units = sorted(copies.glob("*.cpp"), key=_quickest_last)

        def compile_one(unit: Path) -> str:
            since, made = time.monotonic(), str(work / f"{unit.stem}.o")
            own = recipe.kernel_flags if unit.stem.startswith("cpu_") else ()
            run([*common, *thrifty, *own, "-c", str(unit), "-o", made])
            report(f"compiled {unit.name} in {time.monotonic() - since:.1f} s")
            return made

        report(f"compiling {len(units)} units with {compiler.version}")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            coming = [pool.submit(compile_one, unit) for unit in units]
            try:
                objects = [each.result() for each in coming]
            except BaseException:
                run.stop()
                raise
        made = work / f"{NAME}.so"
        report("linking")
        link = [*compiler.command, "-shared", *recipe.flags, "-o", str(made)]
        run([*link, *objects, *recipe.libraries])
    content = made.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    path = folder / f"{NAME}-{digest[:8]}.so"
    handle = os.open(made, os.O_RDONLY)
    _settle(handle, folder)
    os.close(handle)
    os.replace(made, path)
    told = {
        "key": folder.name,
        "library": path.name,
        "sha256": digest,
        "compiler": compiler.version,
        "command": shlex.join(common),
        "kernel_flags": shlex.join(recipe.kernel_flags),
        "built": time.strftime("%Y-%m-%d %H:%M"),
        "seconds": round(time.monotonic() - began, 1),
        **recipe.facts,
    }
    _write(folder / "native.json", told)
    for other in folder.glob(f"{NAME}-*.so"):
        if other != path:
            other.unlink(missing_ok=True)


def _quickest_last(unit: Path) -> tuple[bool, bool, str]:
    """torch's Python headers take 10 s, ATen's 1 s, Python's 0.2 s."""
    text = unit.read_text(encoding="utf-8", errors="replace")
    return "<torch/" not in text, "<ATen/" not in text, unit.name


def _first_that_works(recipe: Recipe, work: Path, run: _Runner) -> tuple[Compiler, str]:
    """A compiler that finds its own and Python's headers, and the newest standard that it knows.

    torch's headers of 2.13 are C++20; those of 2.6 are C++17 and compile as both.
    """
    trial = work / "trial.cpp"
    trial.write_text("#include <Python.h>\n#include <vector>\nstd::vector<int> numbers{1};\n")
    told = "no C++ compiler was found"
    for compiler in recipe.compilers:
        for standard in ("-std=c++20", "-std=c++17"):
            command = [*compiler.command, standard, "-fPIC"]
            for include in recipe.includes:
                command += ["-isystem", include]
            try:
                run([*command, "-c", str(trial), "-o", str(work / "trial.o")])
            except BuildFailed as error:
                told = str(error)
            else:
                return compiler, standard
    raise BuildFailed(told)


class _Runner:
    """Runs commands, writes down what they say, and raises that of one that fails."""

    def __init__(self, log: IO[str], work: Path) -> None:
        self._log, self._running = log, set[subprocess.Popen[str]]()
        self._environment = {**surroundings(), "LC_ALL": "C", "TMPDIR": str(work)}
        self._stopped = False

    def __call__(self, command: Sequence[str]) -> None:
        if self._stopped:
            raise BuildFailed("another unit failed")
        try:
            running = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment,
                text=True,
                errors="backslashreplace",
            )
        except OSError as error:
            raise BuildFailed(f"{command[0]}: {error.strerror}") from error
        self._running.add(running)
        try:
            said, _ = running.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            running.kill()
            said, _ = running.communicate()
            said += f"\n{command[0]} took longer than {PATIENCE:.0f} s"
        finally:
            self._running.discard(running)
        self._log.write(f"$ {shlex.join(command)}\n{said}")
        self._log.flush()
        if running.returncode:
            raise BuildFailed(_meaningful(said) or f"{command[0]} ended with {running.returncode}")

    def stop(self) -> None:
        """Ends the compilers that run."""
        self._stopped = True
        for each in [*self._running]:
            each.kill()


_SUMMING_UP = re.compile(r"collect2: error|compilation terminated|.*linker command failed|\s*[|^~]")


def _meaningful(said: str) -> str:
    """The last line with an error in it; the last one if none is called so."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    lines = [line for line in lines if not _SUMMING_UP.match(line)] or lines
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [""])[-1]


def surroundings() -> dict[str, str]:
    """This process's environment, without what is meant for it alone and disturbs a compiler.

    CPATH comes before the folders of torch's headers, and may lead to those of another torch.
    """
    ours = ("LD_PRELOAD", "LD_AUDIT", "CPATH", "DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith(("PYTHON", "MALLOC_"))
    }


def _remove_old(cache: Path, mine: Path) -> None:
    """Removes what nobody has loaded for a day, but for the newest few."""

    def age(folder: Path) -> float:
        for name in ("native.json", "failure.json", "."):
            with contextlib.suppress(OSError):
                return time.time() - (folder / name).stat().st_mtime
        return 0.0

    with contextlib.suppress(OSError):
        named = re.compile(r"[0-9a-f]{20}-[0-9a-f]{12}")
        others = [path for path in cache.iterdir() if named.fullmatch(path.name) and path != mine]
        for folder in sorted(others, key=age)[KEPT - 1 :]:
            if age(folder) > UNUSED_AFTER:
                with _locked(folder, wait=False, report=lambda text: None) as ours:
                    if ours:
                        shutil.rmtree(folder, ignore_errors=True)


# --- in the background ----------------------------------------------------------------------------


class BackgroundBuild:
    """A builder that lives by itself: the process that asked may end, and it goes on.

    It is no child of ours (a shell starts it and ends, in 2 ms), so that nobody's `os.wait()` sees
    it and no zombie stays; it has a session, a folder (/) and standard streams of its own, and none
    of our files. What it holds of ours is the end of a pipe, on which it says what came of it; when
    that closes without a word, it was killed.

    Args:
        recipe: of the library.
        cache: a folder that is there.
        hurry: whether somebody waits; else it runs at the lowest priority.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, recipe: Recipe, cache: Path, *, hurry: bool) -> None:
        self._end, theirs = os.pipe()
        request = json.dumps({"cache": str(cache), "hurry": hurry, "pipe": theirs})
        python = [sys.executable, "-I", "-S", __file__]
        try:
            subprocess.run(
                ["/bin/sh", "-c", '"$@" &', "sh", *python, request, recipe.to_json()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=surroundings(),
                pass_fds=(theirs,),
                start_new_session=True,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            os.close(self._end)
            raise OSError(f"the builder cannot be started: {error}") from error
        finally:
            os.close(theirs)
        self._said = b""
        self._pipe = os.fstat(self._end)

    def result(self, seconds: float = 0.0) -> Result | None:
        """What came of it; None if nothing has within so many seconds."""
        if not self._is_open():
            return Result("lost")
        until = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        while poll.poll(max(0.0, until - time.monotonic()) * 1000):
            read = os.read(self._end, 65536)
            if not read:
                self.forget()
                try:
                    return Result(**json.loads(self._said))
                except (ValueError, TypeError):
                    return Result("ended")
            self._said += read
        return None

    def forget(self) -> None:
        """Nobody asks any more; the builder goes on."""
        if self._is_open():
            os.close(self._end)

    def _is_open(self) -> bool:
        """Whether the number still stands for our pipe: a script may close files that it does not
        know, and open others under their numbers."""
        try:
            return os.path.samestat(os.fstat(self._end), self._pipe)
        except OSError:
            return False


def _main(request: str, recipe: str) -> None:
    """The builder itself."""
    told = json.loads(request)
    pipe = told["pipe"]
    os.set_inheritable(pipe, False)
    if not told["hurry"]:
        os.nice(19)
        # Where sessions are scheduled as groups (Debian's and Ubuntu's default), nice counts only
        # inside a session, and this one is our own: beside a busy process on the same core the
        # builder took half of it, and takes 2 % so.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text("19")
        ionice = shutil.which("ionice")
        if ionice is not None:
            idle = [ionice, "-c", "3", "-p", str(os.getpid())]
            subprocess.run(idle, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL, check=False)  # fmt: skip
    try:
        result = build(Recipe.from_json(recipe), Path(told["cache"]))
    except OSError as error:
        result = Result("failed", str(error))
    with contextlib.suppress(OSError):  # Who asked has ended.
        os.write(pipe, json.dumps(asdict(result)).encode())


if __name__ == "__main__":
    _main(*sys.argv[1:])
