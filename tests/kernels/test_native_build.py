"""The C++ library is built once, whole or not at all, and only what we have built is trusted."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gradilocks.kernels import native_build
from gradilocks.kernels.native_build import BackgroundBuild, Compiler, Recipe, Result
from tests import PATIENCE
from tests.kernels.fake_compiler import Fake

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the library is built on Linux")


@pytest.fixture
def fake(tmp_path):
    folder = tmp_path / "fake"
    folder.mkdir()
    return Fake(folder)


@pytest.fixture
def cache(tmp_path):
    folder = tmp_path / "cache"
    native_build.make_cache(folder)
    return folder


def until(happens):
    """Waits for another process."""
    end = time.monotonic() + PATIENCE
    while not (found := happens()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)
    return found


# --- built once -----------------------------------------------------------------------------------


def test_what_is_built_is_found_again_with_its_hash_and_its_history(fake, cache):
    recipe = fake.recipe()
    assert native_build.find(cache, recipe) is None
    assert native_build.build(recipe, cache).state == "built"
    entry = native_build.find(cache, recipe)
    assert entry.path.read_text() == "made by fake++\n"
    assert entry.path.parent == cache / recipe.key
    assert entry.compiler == "fake++ 1.0"
    assert native_build.build(recipe, cache) == Result("there")
    assert fake.linked() == 1
    assert not list(entry.path.parent.glob("work-*"))
    told = json.loads((entry.path.parent / "native.json").read_text())
    assert told["torch"] == "2.0"


def test_kernels_alone_are_compiled_for_this_processor(fake, cache):
    native_build.build(fake.recipe(), cache)
    compiled = {line.split("/")[-1]: line for line in fake.asked() if " -c " in line}
    assert "-O3 -march=native -DGRADILOCKS_OPENMP -c" in compiled["cpu_kernels.o"]
    assert "-march" not in compiled["module.o"]
    assert all("-std=c++20 -O2" in line for name, line in compiled.items() if name != "trial.o")


def test_clang_is_not_given_what_only_gcc_knows(fake, cache):
    recipe = fake.recipe()
    native_build.build(recipe, cache)
    assert any("--param ggc-min-heapsize" in line for line in fake.asked())
    (fake.folder / "asked").unlink()
    clang = Compiler(recipe.compilers[0].command, "clang version 14.0.6")
    native_build.build(replace(recipe, compilers=(clang,)), cache)
    assert any("-march=native" in line for line in fake.asked())
    assert not any("--param" in line for line in fake.asked())


def test_eight_processes_build_once(fake, cache):
    fake.hold()
    builds = [BackgroundBuild(fake.recipe(), cache, hurry=True) for _ in range(8)]
    until(lambda: fake.asked())
    fake.go_on()
    states = [build.result(PATIENCE).state for build in builds]
    assert sorted(states) == ["built", *["there"] * 7]
    assert fake.linked() == 1


def test_after_a_builder_that_was_killed_the_next_one_builds(fake, cache):
    fake.hold()
    build = BackgroundBuild(fake.recipe(), cache, hurry=True)
    until(lambda: (fake.folder / "builder").exists())
    assert build.result() is None
    os.kill(int(fake.said("builder")), signal.SIGKILL)
    assert build.result(PATIENCE) == Result("ended")
    assert native_build.find(cache, fake.recipe()) is None
    left = list((cache / fake.recipe().key).glob("work-*"))
    assert left
    fake.go_on()
    assert BackgroundBuild(fake.recipe(), cache, hurry=True).result(PATIENCE).state == "built"
    assert native_build.find(cache, fake.recipe()) is not None
    assert not any(each.exists() for each in left)


def test_a_builder_whose_lock_another_holds_waits_and_says_so(fake, cache):
    folder = cache / fake.recipe().key
    folder.mkdir()
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    told = []

    def report(text):
        told.append(text)
        fcntl.flock(handle, fcntl.LOCK_UN)

    assert native_build.build(fake.recipe(), cache, report=report).state == "built"
    os.close(handle)
    assert "at the lowest priority if a training has started that: waiting for it" in told[0]


@pytest.fixture
def no_locks(monkeypatch):
    """A file system that cannot lock, as NFS without its daemon."""

    def flock(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("no_locks")
def test_where_files_cannot_be_locked_a_claim_serves(fake, cache, monkeypatch):
    recipe = fake.recipe()
    claim = cache / recipe.key / "claim"
    seen = []
    monkeypatch.setattr(
        native_build, "_meaningful", lambda said: seen.append(claim.read_text()) or "no"
    )
    fake.break_with("no")
    assert native_build.build(recipe, cache).state == "failed"
    assert set(seen) == {f"{socket.gethostname()} {os.getpid()}"}
    assert not claim.exists()


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("age", [0.0, 2 * native_build.STALE_CLAIM])
def test_the_claim_of_a_builder_that_is_gone_is_taken_over(fake, cache, age):
    folder = cache / fake.recipe().key
    folder.mkdir()
    gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True)
    host = socket.gethostname() if not age else "another-machine"
    (folder / "claim").write_text(f"{host} {gone.stdout.strip()}")
    os.utime(folder / "claim", (time.time() - age,) * 2)
    assert native_build.build(fake.recipe(), cache).state == "built"


@pytest.mark.usefixtures("no_locks")
def test_a_claim_of_a_builder_that_lives_is_respected(tmp_path):
    (tmp_path / "claim").write_text(f"{socket.gethostname()} {os.getpid()}")
    with native_build._claimed(tmp_path / "claim", wait=False) as ours:
        assert not ours
    assert (tmp_path / "claim").exists()


# --- the builder leaves the script alone ----------------------------------------------------------

ENDS_AT_ONCE = """
import importlib.util, os, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("native_build", sys.argv[1])
made = importlib.util.module_from_spec(spec)
sys.modules["native_build"] = made
spec.loader.exec_module(made)
kept = open(sys.argv[4], "w")
os.set_inheritable(kept.fileno(), True)
made.BackgroundBuild(made.Recipe.from_json(sys.argv[2]), Path(sys.argv[3]), hurry=False)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child")
"""


def start_and_end(fake, cache, **surroundings):
    """A script that asks for the library and ends; it prints nothing but that it has no child."""
    file = native_build.__file__
    held = fake.folder / "a file of the script"
    done = subprocess.run(
        [sys.executable, "-S", "-c", ENDS_AT_ONCE, file, fake.recipe().to_json(), cache, held],
        capture_output=True,
        text=True,
        env={**os.environ, **surroundings},
        timeout=PATIENCE,
    )
    assert (done.stdout, done.stderr) == ("no child\n", "")


def test_a_script_that_ends_early_leaves_a_builder_that_goes_on(fake, cache):
    fake.hold()
    start_and_end(fake, cache)
    until(lambda: (fake.folder / "builder").exists())
    assert native_build.find(cache, fake.recipe()) is None
    builder = Path("/proc", fake.said("builder").strip())
    assert os.getsid(int(builder.name)) != os.getsid(0)
    assert os.readlink(builder / "cwd") == "/"
    group = builder / "autogroup"  # Of a kernel that schedules each session as one.
    told = group.read_text() if group.exists() else ""
    assert not told or told.split()[-2:] == ["nice", "19"]
    fake.go_on()
    until(lambda: native_build.find(cache, fake.recipe()) is not None)
    files = fake.said("open files")
    assert "a file of the script" not in files
    assert all(f"{number} -> /dev/null" in files for number in (0, 1, 2))
    assert int(fake.said("priority")) == 19


def test_nothing_that_is_meant_for_the_script_alone_reaches_the_compiler(fake, cache):
    start_and_end(
        fake, cache, PYTHONPATH=str(fake.folder), PYTHONSTARTUP="x", CPATH="/x", KEPT="yes"
    )
    until(lambda: native_build.find(cache, fake.recipe()) is not None)
    environment = dict(line.split("=", 1) for line in fake.said("environment").splitlines())
    assert environment["KEPT"] == "yes"
    assert not {"PYTHONPATH", "PYTHONSTARTUP", "CPATH"} & set(environment)
    assert environment["LC_ALL"] == "C"


def test_a_library_that_is_loaded_before_all_others_is_not_loaded_into_the_compiler(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/lib/libjemalloc.so")
    assert "LD_PRELOAD" not in native_build.surroundings()


def test_an_empty_environment_and_a_path_with_spaces_and_umlauts_are_enough(fake, tmp_path):
    cache = tmp_path / "ein Ordner, größer" / "'cache'"
    native_build.make_cache(cache)
    before = dict(os.environ)
    try:
        os.environ.clear()
        result = BackgroundBuild(fake.recipe(), cache, hurry=True).result(PATIENCE)
    finally:
        os.environ.update(before)
    assert result.state == "built"


def test_a_builder_that_cannot_be_started_is_an_error_that_says_so(fake, cache, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert BackgroundBuild(fake.recipe(), cache, hurry=True).result(PATIENCE) == Result("ended")

    def no_shell(*args, **options):
        raise FileNotFoundError(2, "No such file or directory", "/bin/sh")

    monkeypatch.setattr(subprocess, "run", no_shell)
    with pytest.raises(OSError, match=r"the builder cannot be started: .*/bin/sh"):
        BackgroundBuild(fake.recipe(), cache, hurry=True)


# --- failures -------------------------------------------------------------------------------------


def test_a_failed_build_says_the_compilers_line_once_and_is_not_tried_again(fake, cache):
    fake.break_with("In file from x:\nx.h:1:2: error: no such thing\ncompilation terminated.\n")
    first = native_build.build(fake.recipe(), cache)
    assert (first.state, first.line) == ("failed", "x.h:1:2: error: no such thing")
    assert "In file from x" in Path(first.log).read_text()
    asked = len(fake.asked())
    second = native_build.build(fake.recipe(), cache)
    assert second == replace(first, state="failed before")
    assert len(fake.asked()) == asked
    fake.mend()
    assert native_build.build(fake.recipe(), cache, retry=True).state == "built"
    assert native_build.failure(cache / fake.recipe().key) is None


def test_a_library_that_is_there_stays_good_when_another_build_of_it_fails(fake, cache):
    native_build.build(fake.recipe(), cache)
    there = native_build.find(cache, fake.recipe())
    fake.break_with("error: no")
    assert native_build.build(fake.recipe(), cache, again=True).state == "failed"
    assert native_build.find(cache, fake.recipe()) == there
    assert native_build.build(fake.recipe(), cache).state == "there"


def test_a_library_that_does_not_load_is_not_there_until_it_is_built_anew(fake, cache):
    native_build.build(fake.recipe(), cache)
    folder = cache / fake.recipe().key
    native_build.refuse(native_build.find(cache, fake.recipe()), "no such symbol")
    told = Result("does not load", "no such symbol")
    assert native_build.find(cache, fake.recipe()) is None
    assert native_build.failure(folder) == native_build.build(fake.recipe(), cache) == told
    fake.break_with("error: no")
    assert native_build.build(fake.recipe(), cache, retry=True).state == "failed"
    assert native_build.find(cache, fake.recipe()) is None
    fake.mend()
    assert native_build.build(fake.recipe(), cache, retry=True).state == "built"
    assert native_build.find(cache, fake.recipe()) is not None
    assert native_build.failure(folder) is None


def test_a_failure_is_forgotten_after_a_day(fake, cache):
    fake.break_with("no")
    native_build.build(fake.recipe(), cache)
    path = cache / fake.recipe().key / "failure.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "time": told["time"] - 1.01 * native_build.RETRY_AFTER}))
    fake.mend()
    assert native_build.build(fake.recipe(), cache).state == "built"


def test_another_compiler_or_torch_is_tried_though_the_last_one_failed(fake, cache):
    fake.break_with("no")
    native_build.build(fake.recipe(), cache)
    fake.mend()
    assert native_build.build(fake.recipe(torch="2.1"), cache).state == "built"


def test_the_first_compiler_that_works_is_taken(fake, cache, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    good = Fake(other, "2.0")
    fake.break_with("fatal error: 'vector' file not found")
    both = (*fake.recipe().compilers, *good.recipe().compilers)
    missing = Compiler(("/nowhere/g++",), "g++ 12")
    recipe = replace(fake.recipe(), compilers=(missing, *both))
    assert native_build.build(recipe, cache).state == "built"
    assert native_build.find(cache, recipe).compiler == "fake++ 2.0"


def test_a_compiler_without_the_newer_standard_compiles_by_the_older_one(fake, cache):
    text = fake.program.read_text()
    refuse = 'case " $* " in *c++20*) echo "unrecognized option -std=c++20" >&2; exit 1;; esac\n'
    fake.program.write_text(text.replace("here=", refuse + "here=", 1))
    assert native_build.build(fake.recipe(), cache).state == "built"
    assert all("-std=c++17" in line for line in fake.asked() if " -c " in line)


def test_sources_that_change_meanwhile_are_not_taken_for_what_they_were(fake, cache):
    recipe = fake.recipe()
    (fake.sources / "module.cpp").write_text("// another\n")
    with pytest.raises(OSError, match="changed while they were built"):
        native_build.build(recipe, cache)
    assert native_build.find(cache, recipe) is None
    assert native_build.failure(cache / recipe.key) is None


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (
            "a.cpp:3:1: error: expected ';'\n    3 | }\n      | ^\n",
            "a.cpp:3:1: error: expected ';'",
        ),
        (
            "a.cpp:1:10: fatal error: Python.h: No such file\ncompilation terminated.\n",
            "a.cpp:1:10: fatal error: Python.h: No such file",
        ),
        (
            "/usr/bin/ld: cannot find -lfoo\ncollect2: error: ld returned 1 exit status\n",
            "/usr/bin/ld: cannot find -lfoo",
        ),
        (
            "collect2: error: ld returned 1 exit status",
            "collect2: error: ld returned 1 exit status",
        ),
        ("one\n\ntwo\n\n", "two"),
        ("", ""),
    ],
)
def test_the_line_that_is_told_is_the_one_that_says_most(said, line):
    assert native_build._meaningful(said) == line


def test_a_compiler_that_dies_without_a_word_is_named(fake, cache):
    fake.break_with("")
    result = native_build.build(fake.recipe(), cache)
    assert result.line == f"{fake.program} ended with 1"


# --- what is trusted ------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "replaced", "gone", "no description", "other key"])
def test_a_library_that_is_not_what_its_hash_says_is_built_again(fake, cache, damage):
    recipe = fake.recipe()
    native_build.build(recipe, cache)
    path = native_build.find(cache, recipe).path
    description = path.parent / "native.json"
    told = json.loads(description.read_text())
    if damage == "truncated":
        os.truncate(path, 5)
    elif damage == "replaced":
        path.write_text("made by somebody")
    elif damage == "gone":
        path.unlink()
    elif damage == "no description":
        description.write_text('{"library": ')
    else:
        description.write_text(json.dumps({**told, "key": "another"}))
    assert native_build.find(cache, recipe) is None
    assert native_build.build(recipe, cache).state == "built"
    assert native_build.find(cache, recipe).path.read_text() == "made by fake++\n"


def test_a_description_cannot_lead_out_of_its_folder(fake, cache, tmp_path):
    recipe = fake.recipe()
    native_build.build(recipe, cache)
    entry = native_build.find(cache, recipe)
    shutil.copy(entry.path, tmp_path / "outside.so")
    description = entry.path.parent / "native.json"
    told = json.loads(description.read_text())
    description.write_text(json.dumps({**told, "library": "../../outside.so"}))
    assert native_build.find(cache, recipe) is None


@pytest.mark.parametrize("mode", [0o700, 0o755])
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_cache_and_what_is_made_above_it_are_open_to_those_they_are_for(tmp_path, umask, mode):
    tmp_path.chmod(0o750)
    cache = tmp_path / "a" / "b" / "cache"
    before = os.umask(umask)
    try:
        native_build.make_cache(cache, mode)
    finally:
        os.umask(before)
    assert [each.stat().st_mode & 0o777 for each in (cache, *cache.parents[:2])] == [mode] * 3
    assert tmp_path.stat().st_mode & 0o777 == 0o750, "it was there"
    assert native_build.distrust(cache) == ""


@pytest.mark.parametrize(("folder", "file"), [(0o700, 0o600), (0o755, 0o644)])
def test_what_is_in_a_cache_can_be_read_by_those_who_may_enter_it(fake, cache, folder, file):
    cache.chmod(folder)
    native_build.build(fake.recipe(), cache)
    path = native_build.find(cache, fake.recipe()).path
    assert path.parent.stat().st_mode & 0o777 == folder
    assert path.stat().st_mode & 0o777 == file
    assert (path.parent / "native.json").stat().st_mode & 0o777 == file


def foreign(path, monkeypatch):
    """As if it were somebody else's, who is not root."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


def test_a_folder_of_somebody_else_is_not_trusted_and_roots_is(cache, monkeypatch):
    assert native_build.distrust(cache) == ""
    foreign(cache, monkeypatch)
    assert "belongs to user" in native_build.distrust(cache)
    link = cache.parent / "link"
    link.symlink_to(cache)
    assert "belongs to user" in native_build.distrust(link)
    monkeypatch.undo()
    if os.geteuid() == 0:
        os.chown(cache, 0, -1)
        cache.chmod(0o755)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert native_build.distrust(cache) == ""


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_not_trusted(cache, mode):
    link = cache.parent / "link"
    link.symlink_to(cache)
    cache.chmod(mode)
    for path in (cache, link):
        assert f"may write to {cache} (chmod go-w" in native_build.distrust(path)


def test_nor_is_one_that_others_may_put_another_in_the_place_of(tmp_path):
    folder = tmp_path / "open" / "cache"
    native_build.make_cache(folder)
    folder.parent.chmod(0o777)
    assert f"everybody may rename what is in {folder.parent}" in native_build.distrust(folder)
    folder.parent.chmod(0o1777)  # As /tmp is.
    assert native_build.distrust(folder) == ""


def test_nor_is_a_library_that_others_may_write_to(fake, cache, monkeypatch):
    native_build.build(fake.recipe(), cache)
    path = native_build.find(cache, fake.recipe()).path
    path.chmod(0o666)
    assert native_build.find(cache, fake.recipe()) is None
    path.chmod(0o600)
    assert native_build.find(cache, fake.recipe()) is not None
    foreign(path, monkeypatch)
    assert native_build.find(cache, fake.recipe()) is None


# --- the key --------------------------------------------------------------------------------------


def test_whatever_the_library_depends_on_changes_its_key(fake, tmp_path):
    recipe = fake.recipe()
    (fake.sources / "more.h").write_text("// more\n")
    others = [
        fake.recipe(),
        replace(recipe, flags=("-O1",)),
        replace(recipe, kernel_flags=()),
        *(fake.recipe(**{name: "other"}) for name in ("torch", "cpu", "machine", "openmp")),
        replace(recipe, compilers=(Compiler(("g++",), "g++ 13"),)),
    ]
    assert len({each.key for each in (recipe, *others)}) == len(others) + 1
    elsewhere = replace(recipe, includes=("/other",), libraries=("/other/libc10.so",), sources="/s")
    assert elsewhere.key == recipe.key


def test_a_recipe_reaches_the_builder_as_it_is(fake):
    recipe = replace(fake.recipe(), includes=("/größer", "/not utf-8 \udcff"))
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert Recipe.from_json(recipe.to_json()).key == recipe.key


def test_what_another_compiler_has_made_serves_only_who_asks_for_it(fake, cache):
    native_build.build(fake.recipe(), cache)
    without = replace(fake.recipe(), compilers=())
    assert native_build.find(cache, without) is None
    assert native_build.find(cache, without, any_compiler=True) is not None
    other = replace(fake.recipe(torch="2.1"), compilers=())
    assert native_build.find(cache, other, any_compiler=True) is None


def test_old_libraries_go_but_for_a_few_and_for_what_is_in_use(fake, cache):
    def age(key, days):
        os.utime(cache / key / "native.json", (time.time() - days * 86400,) * 2)

    keys = []
    for number in range(native_build.KEPT + 3):
        recipe = fake.recipe(torch=f"1.{number}")
        native_build.build(recipe, cache)
        keys.append(recipe.key)
    assert all((cache / key).exists() for key in keys), "what was used today stays"
    for number, key in enumerate(keys):
        age(key, 30 - number)
    age(keys[0], 0)
    (cache / "somebody's").mkdir()
    native_build.build(fake.recipe(), cache)
    left = {path.name for path in cache.iterdir()}
    assert left == {fake.recipe().key, keys[0], *keys[-native_build.KEPT + 2 :], "somebody's"}


# --- a compiler that is one -----------------------------------------------------------------------

MODULE = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "gradilocks_native", nullptr, -1, nullptr,
                                 nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit_gradilocks_native() { return PyModule_Create(&definition); }
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here")
def test_a_real_compiler_builds_a_module_that_loads_under_a_difficult_path(fake, tmp_path):
    folder = tmp_path / "größer und $HOME"
    (folder / "s p").mkdir(parents=True)
    (folder / "s p" / "module.cpp").write_text(MODULE)
    native_build.make_cache(folder / "cache")
    recipe = Recipe(
        sources=str(folder / "s p"),
        includes=(sysconfig.get_path("include"),),
        libraries=(),
        compilers=(Compiler((shutil.which("env"), "g++"), "g++"),),
        flags=("-fPIC",),
        kernel_flags=(),
        facts={"sources": native_build.sources_hash(folder / "s p")},
    )
    result = BackgroundBuild(recipe, folder / "cache", hurry=True).result(PATIENCE)
    assert result.state == "built", result
    path = native_build.find(folder / "cache", recipe).path
    spec = importlib.util.spec_from_file_location("gradilocks_native", path)
    assert importlib.util.module_from_spec(spec).__name__ == "gradilocks_native"
