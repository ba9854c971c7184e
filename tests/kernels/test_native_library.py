"""The C++ library in a process: there, on its way, or not, and why, in one sentence."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import types
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gradilocks
from gradilocks import kernels
from gradilocks.cli import main
from gradilocks.kernels import native, native_build
from gradilocks.kernels.native import NativeLibrary
from gradilocks.kernels.native_build import Compiler
from tests import PATIENCE
from tests.kernels.fake_compiler import Fake

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the library is built on Linux")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A compiler, a cache and a loader for tests."""
    monkeypatch.delenv("GRADILOCKS_NATIVE", raising=False)
    monkeypatch.setenv("GRADILOCKS_NATIVE_CACHE", str(tmp_path / "cache"))
    threads = []

    def loaded(path):
        alone = lambda: threads.append("one")  # noqa: E731
        return types.SimpleNamespace(path=path, cpu_one_thread=alone, threads=threads)

    monkeypatch.setattr(native, "loaded", loaded)
    folder = tmp_path / "fake"
    folder.mkdir()
    return Fake(folder)


def cache_of_this_test():
    return Path(os.environ["GRADILOCKS_NATIVE_CACHE"])


# --- on its way -----------------------------------------------------------------------------------


def test_the_first_use_builds_in_the_background_and_a_later_one_has_it(fake):
    fake.hold()
    mine = NativeLibrary(fake.recipe)
    assert mine.library() is None
    assert mine.library() is None
    assert mine.status().startswith("Python: it is being built, in ")
    assert mine.library_within(0.01) is None
    fake.go_on()
    module = mine.library_within(PATIENCE)
    assert module.path.read_text() == "made by fake++\n"
    assert mine.library() is module
    assert mine.status().startswith("C++: built ")
    assert str(module.path) in mine.status()
    assert fake.linked() == 1


def test_who_asks_often_meanwhile_looks_only_now_and_then(fake, monkeypatch):
    fake.hold()
    mine = NativeLibrary(fake.recipe)
    assert mine.library() is None
    looks = []
    monkeypatch.setattr(mine._build, "result", looks.append)
    now = native.time.monotonic()
    monkeypatch.setattr(native.time, "monotonic", lambda: now)
    assert [mine.library() for _ in range(100)] == [None] * 100
    assert looks == []
    now += 2 * native.LOOK_EVERY
    assert mine.library() is None
    assert len(looks) == 1
    fake.go_on()


def test_the_next_process_has_it_at_once(fake):
    NativeLibrary(fake.recipe).library_within(PATIENCE)
    assert NativeLibrary(fake.recipe).library() is not None
    assert fake.linked() == 1


def test_wait_waits_for_the_build_and_off_builds_nothing(fake, monkeypatch):
    monkeypatch.setenv("GRADILOCKS_NATIVE", "off")
    without = NativeLibrary(fake.recipe)
    assert without.library() is None
    assert without.status() == "Python: GRADILOCKS_NATIVE=off"
    assert not cache_of_this_test().exists()
    monkeypatch.setenv("GRADILOCKS_NATIVE", " Wait ")
    assert NativeLibrary(fake.recipe).library() is not None
    assert int(fake.said("priority")) == os.nice(0), "somebody waits, so it is not to take longer"
    monkeypatch.setenv("GRADILOCKS_NATIVE", "off")
    assert NativeLibrary(fake.recipe).library() is None


@pytest.mark.parametrize("given", ["on", "0", "wait for it"])
def test_another_word_is_refused_with_those_that_are_known(fake, monkeypatch, given):
    monkeypatch.setenv("GRADILOCKS_NATIVE", given)
    mine = NativeLibrary(fake.recipe)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"auto .*, wait .* or off .*, got '{given}'. Set it"):
            mine.library()
    monkeypatch.setenv("GRADILOCKS_NATIVE", "")
    assert mine.library_within(PATIENCE) is not None


def test_a_thread_does_not_wait_for_another_that_waits(fake):
    mine = NativeLibrary(fake.recipe)
    with mine._lock:
        assert mine.library() is None
    assert fake.asked() == []


def test_a_builder_that_was_killed_leaves_python_and_no_warning(fake, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    mine = NativeLibrary(fake.recipe)
    assert mine.library_within(PATIENCE) is None
    assert mine.status() == "Python: its builder was killed; the next process starts another"


def test_a_script_that_closes_files_it_does_not_know_is_left_what_it_opens_then(fake):
    fake.hold()
    mine = NativeLibrary(fake.recipe)
    assert mine.library() is None
    number = mine._build._end
    os.close(number)
    assert os.open(fake.program, os.O_RDONLY) == number
    fake.go_on()
    assert mine.library_within(PATIENCE) is None
    assert "closed the pipe" in mine.status()
    assert os.read(number, 9) == b"#!/bin/sh"
    os.close(number)


def test_a_forked_child_asks_for_itself(fake):
    fake.hold()
    mine = NativeLibrary(fake.recipe)
    assert mine.library() is None
    mine._lock.acquire()  # As when another thread is at it while the process forks.
    child = os.fork()
    if not child:
        status = 1
        try:
            mine.after_fork()
            fake.go_on()
            status = 0 if mine.library_within(PATIENCE) is not None else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    mine._lock.release()
    assert mine.library_within(PATIENCE) is not None, "the child has not read the parent's pipe"
    assert fake.linked() == 1


@pytest.mark.parametrize("is_loaded", ["before the fork", "in the child"])
@pytest.mark.parametrize("has_threads", [True, False])
def test_a_child_of_a_process_with_threads_computes_on_one(fake, is_loaded, has_threads):
    mine = NativeLibrary(fake.recipe)
    if is_loaded == "before the fork":
        assert mine.library_within(PATIENCE).threads == []
    if has_threads:
        done = threading.Event()
        thread = threading.Thread(target=done.wait)
        thread.start()
        mine.before_fork()
        done.set()
        thread.join()
    else:
        mine._forks_with_threads = False  # Other tests may have left a pool in this process.
    mine.after_fork()
    assert mine.library_within(PATIENCE).threads == ["one"] * has_threads


def test_a_worker_of_a_dataloader_takes_what_is_there_and_builds_nothing(fake, monkeypatch):
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: "a worker")
    mine = NativeLibrary(fake.recipe)
    assert mine.library_within(PATIENCE) is None
    assert "never by a worker of a DataLoader" in mine.status()
    assert not cache_of_this_test().exists()
    monkeypatch.undo()
    monkeypatch.setenv("GRADILOCKS_NATIVE_CACHE", str(fake.folder / "cache"))
    native_build.make_cache(fake.folder / "cache")
    native_build.build(fake.recipe(), fake.folder / "cache")
    monkeypatch.setattr(native, "loaded", lambda path: path)
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: "a worker")
    assert NativeLibrary(fake.recipe).library() is not None


# --- not there ------------------------------------------------------------------------------------


def test_a_failed_build_is_one_warning_and_one_attempt(fake):
    fake.break_with("x.cpp:7:1: error: no such instruction")
    mine = NativeLibrary(fake.recipe)
    with pytest.warns(RuntimeWarning) as told:
        mine.library_within(PATIENCE)
    assert len(told) == 1
    assert told[0].filename == __file__
    message = str(told[0].message)
    assert "x.cpp:7:1: error: no such instruction" in message
    assert str(cache_of_this_test() / fake.recipe().key / "build.log") in message
    assert "GRADILOCKS_NATIVE=off" in message
    assert mine.library() is None
    asked = len(fake.asked())
    later = NativeLibrary(fake.recipe)  # Warnings are errors in the tests.
    assert later.library_within(PATIENCE) is None
    assert "x.cpp:7:1: error: no such instruction" in later.status()
    assert "`gradilocks build` tries again" in later.status()
    assert len(fake.asked()) == asked


def test_of_eight_ranks_one_warns(fake):
    fake.break_with("error: no")
    fake.hold()
    ranks = [NativeLibrary(fake.recipe) for _ in range(8)]
    assert [rank.library() for rank in ranks] == [None] * 8
    fake.go_on()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert [rank.library_within(PATIENCE) for rank in ranks] == [None] * 8
    assert len(told) == 1


def test_without_a_compiler_python_walks_without_a_warning(fake, monkeypatch):
    monkeypatch.setenv("PATH", str(fake.folder))
    monkeypatch.delenv("CXX", raising=False)
    assert native.compilers_here() == ()
    mine = NativeLibrary(lambda: replace(fake.recipe(), compilers=native.compilers_here()))
    assert mine.library_within(PATIENCE) is None
    told = "Python: no C++ compiler was found (looked for c++, g++, clang++)"
    assert mine.status().startswith(told)
    assert "apt-get install g++" in mine.status()


@pytest.mark.parametrize(("header", "place"), [("Python.h", -1), ("python_variable.h", 0)])
def test_without_headers_python_walks_and_says_which(fake, tmp_path, header, place):
    includes = list(fake.recipe().includes)
    includes[place] = str(tmp_path)
    mine = NativeLibrary(lambda: replace(fake.recipe(), includes=tuple(includes)))
    assert mine.library_within(PATIENCE) is None
    assert f"{header} was looked for in {tmp_path}" in mine.status()
    assert ("python3-dev" in mine.status()) == (header == "Python.h")


def test_a_home_that_cannot_be_written_leaves_python(fake, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRADILOCKS_NATIVE_CACHE", str(tmp_path / "file" / "cache"))
    mine = NativeLibrary(fake.recipe)
    assert mine.library_within(PATIENCE) is None
    assert f"the cache {tmp_path}/file/cache cannot be made" in mine.status()
    cache = tmp_path / "read-only"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("GRADILOCKS_NATIVE_CACHE", str(cache))
    really = os.access
    monkeypatch.setattr(os, "access", lambda path, how: not how & os.W_OK and really(path, how))
    mine = NativeLibrary(fake.recipe)
    assert mine.library_within(PATIENCE) is None
    assert mine.status() == f"Python: it is not built, and {cache} cannot be written"


def test_a_cache_that_others_may_write_to_is_not_used(fake):
    cache_of_this_test().mkdir()
    cache_of_this_test().chmod(0o777)
    mine = NativeLibrary(fake.recipe)
    assert mine.library_within(PATIENCE) is None
    assert "its cache is not this user's alone" in mine.status()
    assert "GRADILOCKS_NATIVE_CACHE" in mine.status()
    assert list(cache_of_this_test().iterdir()) == []


def test_a_library_that_does_not_load_is_one_warning_for_all_processes(fake, monkeypatch):
    def refuse(path):
        raise ImportError("version `GLIBCXX_3.4.32' not found")

    monkeypatch.setattr(native, "loaded", refuse)
    mine = NativeLibrary(fake.recipe)
    with pytest.warns(RuntimeWarning, match="does not load .*GLIBCXX_3.4.32' not found"):
        assert mine.library_within(PATIENCE) is None
    assert mine.status().startswith("Python: it does not load (ImportError")
    later = NativeLibrary(fake.recipe)  # Warnings are errors in the tests.
    assert later.library_within(PATIENCE) is None
    assert later.status().startswith("Python: it does not load (ImportError: version `GLIBCXX")
    assert fake.linked() == 1


def test_an_image_without_a_compiler_loads_what_was_built_with_one(fake):
    NativeLibrary(fake.recipe).library_within(PATIENCE)
    without = NativeLibrary(lambda: replace(fake.recipe(), compilers=()))
    assert without.library() is not None


def test_what_was_built_for_any_machine_serves_those_that_are_new_enough(fake):
    new = f"AuthenticAMD; 25; {' '.join(sorted(native.V3_NEEDS))}"
    cache = cache_of_this_test()
    native_build.make_cache(cache)
    native_build.build(native.portable(fake.recipe(cpu=new)), cache)
    assert any("-march=x86-64-v3" in line for line in fake.asked())
    assert not any("-march=native" in line for line in fake.asked())
    assert native.look_up(cache, fake.recipe(cpu=f"another; {new}")) is not None
    assert native.look_up(cache, fake.recipe(cpu=new.replace("avx2", ""))) is None
    assert native.look_up(cache, fake.recipe(cpu="not known")) is None


# --- this machine ---------------------------------------------------------------------------------


def test_the_compiler_of_the_environment_comes_first_with_its_arguments(fake, monkeypatch):
    monkeypatch.setenv("PATH", f"{fake.folder}:{os.environ['PATH']}")
    monkeypatch.setenv("CXX", "fake++ -m64 '-DA=b c'")
    first, *others = native.compilers_here()
    assert first.command == (str(fake.program), "-m64", "-DA=b c")
    assert first.version == "fake++ (for tests) 1.0"
    monkeypatch.setenv("CXX", "fake++ 'not closed")
    assert native.compilers_here() == tuple(others)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.compilers_here() == tuple(others)


def test_one_compiler_by_two_names_is_asked_once(fake, monkeypatch):
    for name in ("c++", "g++"):
        (fake.folder / name).symlink_to(fake.program)
    monkeypatch.setenv("PATH", f"{fake.folder}:/usr/bin:/bin")
    monkeypatch.delenv("CXX", raising=False)
    named = [each for each in native.compilers_here() if each.version.startswith("fake++")]
    assert named == [Compiler((str(fake.folder / "c++"),), "fake++ (for tests) 1.0")]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/gradilocks/native"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/gradilocks/native"),
        ({"HOME": "/h"}, "/h/.cache/gradilocks/native"),
        ({"GRADILOCKS_NATIVE_CACHE": "/opt/native", "XDG_CACHE_HOME": "/x"}, "/opt/native"),
    ],
)
def test_where_the_cache_is(monkeypatch, variables, expected):
    for name in ("GRADILOCKS_NATIVE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert native.cache_folder() == Path(expected)


def test_elsewhere_than_on_linux_and_in_a_free_threaded_python_none_is_built(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(native.sys, "platform", "darwin")
        with pytest.raises(native.Unavailable, match=r"on Linux .* not on darwin"):
            native.recipe_here()
    with monkeypatch.context() as patch:
        patch.setattr(native.sysconfig, "get_config_var", lambda name: name == "Py_GIL_DISABLED")
        with pytest.raises(native.Unavailable, match="free-threaded"):
            native.recipe_here()


def test_in_a_free_threaded_python_everything_goes_on_without_it(monkeypatch):
    asked, really = [], native.sysconfig.get_config_var

    def told(name):
        asked.append(name)
        return 1 if name == "Py_GIL_DISABLED" else really(name)

    monkeypatch.setattr(native.sysconfig, "get_config_var", told)
    mine = NativeLibrary(native.recipe_here)
    for name in ("library", "library_within", "status", "is_coming"):
        monkeypatch.setattr(native, name, getattr(mine, name))
    for chosen in (kernels.BACKENDS, kernels._reasons):
        monkeypatch.delitem(chosen, "cpu", raising=False)
    weight = torch.nn.Parameter(torch.ones(3))
    control = gradilocks.GradientControl(gradilocks.optim.SGD([weight], lr=0.5), scale=None)
    control.backward(weight.sum())
    assert not control.step().skipped  # Warnings are errors in the tests.
    assert weight.tolist() == [0.5] * 3
    assert "Py_GIL_DISABLED" in asked
    described = kernels.describe()
    assert described["walk"].startswith("Python: it is not built for a free-threaded Python")
    assert described["cpu"].startswith("reference: ")
    assert native.find_native()[0] is False


def test_extra_flags_of_a_developer_are_part_of_the_key(monkeypatch):
    plain = native.recipe_here()
    monkeypatch.setenv("GRADILOCKS_NATIVE_CXXFLAGS", "-fsanitize=address -g")
    assert native.recipe_here().flags[-2:] == ("-fsanitize=address", "-g")
    assert native.recipe_here().base != plain.base
    monkeypatch.setenv("GRADILOCKS_NATIVE_CXXFLAGS", "-DA='b")
    with pytest.raises(native.Unavailable, match=r"quoted as in a shell, got .*No closing quot"):
        native.recipe_here()


def test_flags_that_are_no_flags_are_one_warning_in_a_training_and_one_line_of_the_command(
    monkeypatch, capfd
):
    monkeypatch.delenv("GRADILOCKS_NATIVE", raising=False)
    monkeypatch.setenv("GRADILOCKS_NATIVE_CXXFLAGS", "-DA='b")
    told = "GRADILOCKS_NATIVE_CXXFLAGS must be flags of a compiler, quoted as in a shell, got "
    mine = NativeLibrary(native.recipe_here)
    with pytest.warns(RuntimeWarning, match=f"goes on in Python.*{told}"):
        assert mine.library() is None
    assert mine.library() is None  # Warnings are errors in the tests.
    assert mine.status().startswith(f"Python: {told}")
    assert main(["build"]) == 1
    _, err = capfd.readouterr()
    assert err.startswith(f"gradilocks: the C++ library cannot be built: {told}")
    assert err.count("\n") == 1
    assert main(["build", "--check"]) == 1
    out, err = capfd.readouterr()
    assert out.startswith(f"The C++ library is not there: {told}")
    assert err == ""


def test_the_key_has_all_that_the_library_depends_on():
    facts = native.recipe_here().facts
    assert facts["torch"] == str(torch.__version__)
    assert facts["torch_git"] == torch.version.git_version
    assert len(facts["cpu"].split()) > 3
    assert {"sources", "python", "libc", "machine", "openmp"} <= set(facts)


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here")
@pytest.mark.skipif(
    os.environ.get("GRADILOCKS_NATIVE") == "off", reason="the library is switched off"
)
def test_the_library_itself_is_built_loads_and_has_no_threads_of_its_own():
    module = native.library_within(PATIENCE)
    assert module is not None, native.status()
    assert module.__name__ == "gradilocks_native"
    assert kernels.describe()["walk"] == native.status()
    mapped = Path("/proc/self/maps").read_text().splitlines()
    names = {Path(line.split(maxsplit=5)[-1].strip()) for line in mapped}
    openmp = {path for path in names if path.name.startswith(("libgomp", "libiomp", "libomp"))}
    assert len(openmp) <= 1, "a second OpenMP library would have threads of its own"


# --- gradilocks build -----------------------------------------------------------------------------


@pytest.fixture
def command(fake, monkeypatch, capfd):
    monkeypatch.setattr(native, "recipe_here", fake.recipe)

    def run(*words):
        status = main(["build", *words])
        return status, *capfd.readouterr()

    return run


def test_the_command_builds_once_and_says_where(fake, command):
    status, out, err = command("--check")
    assert not cache_of_this_test().exists()
    assert (status, out) == (1, f"The C++ library is not there: it is not in {cache_of_this_test()}"
                                "; it can be built.\n")  # fmt: skip
    status, out, err = command()
    assert status == 0
    assert out.startswith("The C++ library is built in ")
    assert str(native_build.find(cache_of_this_test(), fake.recipe()).path) in out
    assert "compiling 2 units with fake++ 1.0" in err
    assert "compiled module.cpp in " in err
    status, out, err = command()
    assert (status, err, fake.linked()) == (0, "", 1)
    assert out.startswith("The C++ library is there already, built ")
    assert command("--check")[0] == 0
    assert command("--again")[0] == 0
    assert fake.linked() == 2


def test_the_command_tries_again_what_has_failed(fake, command):
    fake.break_with("error: no")
    for _ in range(2):
        status, out, err = command()
        assert (status, out) == (1, "")
        assert err.startswith("gradilocks: the C++ library: it could not be built: error: no")
    assert command("--check")[0] == 1
    fake.mend()
    assert command()[0] == 0


def test_a_library_stays_there_when_the_command_fails_to_build_it_again(fake, command):
    assert command()[0] == 0
    path = native_build.find(cache_of_this_test(), fake.recipe()).path
    fake.break_with("error: no")
    status, out, err = command("--again")
    assert (status, out) == (1, "")
    assert "it could not be built: error: no" in err
    assert f"The one that was there stays: {path}." in err
    assert command("--check")[0] == 0
    assert NativeLibrary(fake.recipe).library() is not None


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("who", ["command", "background"])
def test_the_command_does_not_call_a_library_there_that_does_not_load(
    fake, command, monkeypatch, who, portable
):
    def refuse(path):
        raise ImportError("version `GLIBCXX_3.4.32' not found")

    recipe = fake.recipe(cpu=" ".join(sorted(native.V3_NEEDS)))
    monkeypatch.setattr(native, "recipe_here", lambda: recipe)
    monkeypatch.setattr(native, "loaded", refuse)
    if who == "background":  # Of a script that has ended before it could load it.
        native_build.make_cache(cache_of_this_test())
        chosen = native.portable(recipe) if portable else recipe
        assert native_build.build(chosen, cache_of_this_test()).state == "built"
    else:
        status, out, err = command(*["--portable"] * portable)
        assert (status, out) == (1, "")
        assert "it does not load (ImportError: version `GLIBCXX_3.4.32' not found)." in err
    for _ in range(2):
        status, out, _ = command("--check")
        assert status == 1
        assert out == (
            "The C++ library is not there: it does not load (ImportError: version "
            "`GLIBCXX_3.4.32' not found).\n"
        )
    monkeypatch.setattr(native, "loaded", lambda path: path)
    assert command()[0] == 0
    assert command("--check")[0] == 0


def test_the_command_builds_for_all_users_of_an_image(fake, command, tmp_path):
    folder = tmp_path / "opt" / "gradilocks"
    before = os.umask(0o077)
    try:
        status, out, _ = command("--cache", str(folder), "--portable")
    finally:
        os.umask(before)
    assert status == 0
    assert f"GRADILOCKS_NATIVE_CACHE={folder}" in out
    path = native_build.find(folder, native.portable(fake.recipe())).path
    folders = (folder.parent, folder, path.parent)
    assert [each.stat().st_mode & 0o777 for each in folders] == [0o755] * 3
    assert path.stat().st_mode & 0o777 == 0o644


def test_the_command_says_why_it_cannot_build(fake, command, monkeypatch):
    monkeypatch.setattr(native, "recipe_here", lambda: replace(fake.recipe(), compilers=()))
    status, _, err = command()
    assert status == 1
    assert err.startswith("gradilocks: the C++ library cannot be built: no C++ compiler was found")
