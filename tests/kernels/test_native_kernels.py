"""The CPU kernels in C++ against the reference: what they find, what they write, and in what order.

Norms are also held against sums that are exact, because the reference adds large float32 tensors in
float32 rows.
"""

from __future__ import annotations

import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradilocks.kernels import chunks, native, reference

if native.library() is None:
    pytest.skip("the native library is not there", allow_module_level=True)

from gradilocks.kernels import native_backend

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SIZES = [0, 1, 15, 16, 17, 100, 4097, 70_001]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

on_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def contents(dtype, size):
    """Tensors of one size with whatever a gradient may hold, each by name."""
    info = torch.finfo(dtype)
    made = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    found = {"normal": made, "zero": torch.zeros_like(made), "negative zero": -made * 0}
    found |= {
        "huge": torch.full_like(made, info.max),
        "tiny": torch.full_like(made, info.tiny),
        "subnormal": torch.full_like(made, info.smallest_normal * info.eps * 3),
    }
    found["mixed"] = torch.where(made > 0, found["huge"], found["subnormal"])
    for name, values in {"nan": [NAN], "inf": [-INF], "both": [INF, NAN, -INF]}.items():
        if size >= len(values):
            found[name] = made.clone()
            found[name][-len(values) :] = torch.tensor(values, dtype=dtype)
    return found


def exact_norm(tensor):
    """The norm of finite elements, rounded once: squares are added as fractions of the largest."""
    values = tensor.double()
    unit = float(values.abs().max()) if values.numel() else 0.0
    if not unit:
        return 0.0
    return unit * math.sqrt(math.fsum((values / unit).square().tolist()))


def check_measured(tensors, order=2.0):
    found = native_backend.measure(tensors, order=order)
    expected = reference.measure(tensors, order=order, detail=True)
    for name in ("nan", "inf", "zeros", "largest"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs), name
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-6, atol=0.0, equal_nan=True)
    return found


def same_bits(mine, theirs):
    """Whether all elements are the same, -0 and 0 apart; a NaN is a NaN."""
    kind = BITS[mine.element_size()]
    equal = mine.contiguous().view(kind) == theirs.contiguous().view(kind)
    return bool((equal | (mine.isnan() & theirs.isnan())).all())


def check_written(tensors, write, *args):
    """Both back ends write the same, and number the versions of what is written."""
    mine, theirs = [t.clone() for t in tensors], [t.clone() for t in tensors]
    versions = [tensor._version for tensor in mine]
    answers = [getattr(module, write)(list_, *args) for module, list_ in _both(mine, theirs)]
    assert all(map(same_bits, mine, theirs))
    for tensor, before, version in zip(mine, tensors, versions, strict=True):
        assert same_bits(tensor, before) or tensor._version > version
    return answers


def _both(mine, theirs):
    return (native_backend, mine), (reference, theirs)


@on_each_dtype
@pytest.mark.parametrize("order", [1.0, 2.0, INF], ids=str)
def test_every_kind_of_element_is_measured_as_by_the_reference(dtype, order):
    for size in SIZES:
        every = contents(dtype, size)
        found = check_measured(list(every.values()), order)
        if order == 2.0:
            for norm, tensor in zip(found.norms.tolist(), every.values(), strict=True):
                if tensor.isfinite().all():
                    assert norm == pytest.approx(exact_norm(tensor), rel=1e-14, abs=0.0)


@given(
    st.lists(st.floats(), max_size=40),
    st.sampled_from(DTYPES),
    st.sampled_from([1.0, 2.0, INF]),
)
def test_any_numbers_are_measured_as_by_the_reference(numbers, dtype, order):
    check_measured([torch.tensor(numbers, dtype=torch.float64).to(dtype)], order)


@pytest.mark.parametrize("order", [0.0, 3.0, -1.0, 0.5])
def test_other_orders_are_the_references(order):
    tensors = [torch.randn(7), torch.randn(3, 3)]
    mine, theirs = (
        backend.measure(tensors, order=order, detail=True).norms
        for backend in (native_backend, reference)
    )
    assert torch.equal(mine, theirs)


def test_the_order_of_additions_is_the_documented_one():
    # What this computes no processor, compiler or number of threads may change.
    tensor = torch.randn(2 * chunks.CHUNK + 1001, generator=torch.Generator().manual_seed(1)) * 1e-3
    total = 0.0
    for part in tensor.double().square().split(chunks.CHUNK):
        padded = torch.nn.functional.pad(part, (0, -part.numel() % 16)).view(-1, 16)
        total += sum(padded.cumsum(0)[-1].tolist())
    assert native_backend.measure([tensor]).norms.item() == math.sqrt(total)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_any_number_of_threads_gives_the_same_bits(threads):
    tensors = [torch.randn(size).to(dtype) for size in (3, 90_001, 250_000) for dtype in DTYPES]
    tensors[1][1], tensors[4][-1], tensors[5][0] = NAN, INF, NAN
    for order in (1.0, 2.0):
        found = []
        for number in (1, 2, 3, 4):
            threads(number)
            statistics = native_backend.measure(tensors, order=order)
            written = [tensor.clone() for tensor in tensors]
            native_backend.multiply_and_check_(written, torch.tensor(0.3))
            native_backend.clamp_(written, torch.tensor(0.1))
            found.append((statistics.norms, statistics.nan, statistics.zeros, *written))
        for other in found[1:]:
            assert all(map(torch.equal, map(_bits, found[0]), map(_bits, other)))


def _bits(tensor):
    return tensor.view(BITS[tensor.element_size()])


def test_subnormal_numbers_are_flushed_on_all_threads_or_on_none(threads):
    tensor = torch.full((400_000,), 1e-40)
    found = []
    for number in (1, 2):
        threads(number)
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush subnormal numbers")
        try:
            written = [tensor.clone()]
            native_backend.multiply_(written, torch.tensor(0.5))
        finally:
            torch.set_flush_denormal(False)
        found.append(written[0])
    assert torch.equal(*found)
    assert not found[0].any()


FACTORS = [0.5, 1.0, 3.7, 2.0**-24, 65536.0, 0.0, -1.5, 1e30, INF, NAN]


@on_each_dtype
@pytest.mark.parametrize("factor", FACTORS)
def test_multiplying_writes_the_references_bits(dtype, factor):
    tensors = [each for size in SIZES[:-1] for each in contents(dtype, size).values()]
    tensors.append(contents(dtype, SIZES[-1])["normal"])
    for kind in (torch.float32, torch.float64):
        multiplier = torch.tensor(factor, dtype=kind)
        check_written(tensors, "multiply_", multiplier)
        (mine, counted), (theirs, counts) = check_written(
            tensors, "multiply_and_check_", multiplier
        )
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
        assert torch.equal(counted().nan, counts().nan)
        assert torch.equal(counted().inf, counts().inf)


@on_each_dtype
def test_each_tensor_is_multiplied_by_its_own_factor(dtype):
    tensors = [contents(dtype, 100)["both"] for _ in FACTORS]
    check_written(tensors, "multiply_each_", torch.tensor(FACTORS))
    check_written(tensors, "multiply_each_", torch.tensor(FACTORS, dtype=torch.float64))


@on_each_dtype
@pytest.mark.parametrize("bound", [0.0, 0.1, 1 / 3, 1.0, 65_510.0, 1e39, INF])
def test_bounding_writes_the_references_bits(dtype, bound):
    tensors = [each for size in (0, 1, 17, 4097) for each in contents(dtype, size).values()]
    check_written(tensors, "clamp_", torch.tensor(bound, dtype=torch.float64))


@on_each_dtype
def test_looking_finds_a_single_bad_element_and_writes_nothing(dtype):
    for size in (1, 16, 70_001):
        for bad in (NAN, INF, -INF):
            tensors = [torch.ones(5, dtype=dtype), torch.ones(size, dtype=dtype)]
            assert native_backend.multiply_and_check_(tensors, None)[0].item() == 0.0
            tensors[1][size // 2] = bad
            flag, counts = native_backend.multiply_and_check_(tensors, None)
            assert flag.item() == 1.0
            assert counts().nan.tolist() == [0, int(math.isnan(bad))]
            assert counts().inf.tolist() == [0, int(math.isinf(bad))]
            assert all(tensor._version <= 1 for tensor in tensors)


class Wrapping(torch.Tensor):
    """A tensor without memory of its own, as tensors of frameworks are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def inside(each):
            if isinstance(each, (list, tuple)):
                return type(each)(map(inside, each))
            return each.inner if isinstance(each, cls) else each

        return func(*inside(args), **(kwargs or {}))


def layouts():
    """Tensors that do not simply lie in one stretch, in order."""
    made = torch.randn(6, 8, 4, 4)
    return {
        "transposed": made[0, 0].t(),
        "channels last": made.to(memory_format=torch.channels_last),
        "every other": made[:, ::2],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "0-d": torch.randn(()),
        "complex": torch.randn(5, dtype=torch.complex64),
        "unaligned": torch.randn(40)[3:36],
        "negated": torch.view_as_complex(torch.randn(4, 2)).conj().imag,
    }


@pytest.mark.parametrize("name", layouts())
def test_whatever_lies_otherwise_is_measured_beside_what_does_not(name):
    check_measured([torch.randn(9), layouts()[name], torch.randn(5).half()])


@pytest.mark.parametrize("name", sorted(layouts().keys() - {"expanded", "complex", "negated"}))
def test_whatever_lies_otherwise_is_written_beside_what_does_not(name):
    def tensors():
        torch.manual_seed(0)
        return [torch.ones(9), layouts()[name], torch.ones(5).half()]

    half = torch.tensor(0.5)
    for write, number in (("multiply_", half), ("clamp_", half), ("multiply_and_check_", half)):
        mine, theirs = tensors(), tensors()
        getattr(native_backend, write)(mine, number)
        getattr(reference, write)(theirs, number)
        assert all(map(torch.equal, mine, theirs))
    mine, theirs = tensors(), tensors()
    factors = torch.tensor([1.0, 2.0, 3.0])
    native_backend.multiply_each_(mine, factors)
    reference.multiply_each_(theirs, factors)
    assert all(map(torch.equal, mine, theirs))


def test_a_tensor_without_memory_of_its_own_is_no_address():
    inner = torch.full((70,), 2.0)
    tensors = [Wrapping(inner), torch.ones(3)]
    native_backend.multiply_(tensors, torch.tensor(2.0))
    assert torch.equal(inner, torch.full((70,), 4.0))
    assert torch.equal(tensors[1], torch.full((3,), 2.0))


def test_tensors_of_inference_mode_can_be_clipped_there():
    with torch.inference_mode():
        tensor = torch.ones(3)
        native_backend.multiply_([tensor], torch.tensor(2.0))
        assert torch.equal(tensor, torch.full((3,), 2.0))


ON_TWO_THREADS = """
import os, torch
from gradilocks.kernels import native_backend

tensors = [torch.empty(1 << 16) for _ in range(8)]  # Nothing has opened a parallel region so far.
torch.set_num_threads(2)
before = os.listdir("/proc/self/task")
native_backend.measure(tensors)
assert len(os.listdir("/proc/self/task")) == len(before) + 1
"""


@pytest.mark.skipif(not native.recipe_here().facts["openmp"], reason="torch runs on no OpenMP here")
def test_the_work_is_shared_out_among_torchs_threads(script_server, tmp_path):
    script = tmp_path / "two_threads.py"
    script.write_text(ON_TWO_THREADS)
    done = script_server.run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_several_python_threads_may_work_at_once():
    tensors = [torch.randn(size) for size in (5, 70_001, 200_000)]
    expected = native_backend.measure(tensors).norms
    wrong = []

    def work(number):
        mine = [tensor.clone() for tensor in tensors]
        for _ in range(20):
            native_backend.multiply_(mine, torch.tensor(2.0))
            native_backend.multiply_(mine, torch.tensor(0.5))
            if not torch.equal(native_backend.measure(mine).norms, expected):
                wrong.append(number)

    running = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong


def test_a_call_with_wrong_arguments_says_so():
    library = native.library()
    sizes = torch.tensor([3])
    made = library.CpuChunks(sizes.data_ptr(), sizes.data_ptr(), 1, 64, False)
    with pytest.raises(TypeError, match="5 arguments were given, expected 2"):
        made.multiply(1, 2.0, 3, 4, 5)
    with pytest.raises(TypeError, match="expected more"):
        made.multiply(1)
    with pytest.raises(TypeError):
        made.multiply("here", 2.0)
    with pytest.raises(ValueError, match="chunk at least 1"):
        library.CpuChunks(0, 0, 0, 0, False)
