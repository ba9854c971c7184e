"""The walk in C++ and the one in Python say the same, whatever happens to a model between steps."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradilocks import kernels
from gradilocks.errors import SharedParameter
from gradilocks.kernels import native
from gradilocks.kernels.chunks import AddressedTensors, kinds_of
from gradilocks.ranks.layout import dtensor_parts, local_of, meshes_of
from gradilocks.step import table
from gradilocks.step.table import GradientTable, gradients_of, measurable_gradients, requiring

LIBRARY = native.library()
pytestmark = [
    pytest.mark.skipif(LIBRARY is None, reason="the native library cannot be built here"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
]


class Odd(torch.Tensor):
    """A subclass that torch asks at every call, and that does as torch does."""


class Wrapper(torch.Tensor):
    """A subclass without memory of its own, whose operations are Python's."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = [each.inner if isinstance(each, cls) else each for each in args]
        made = func(*args, **(kwargs or {}))
        return cls(made) if isinstance(made, torch.Tensor) else made


class Named(nn.Parameter):
    """A Parameter with nothing of its own."""


class Elsewhere(nn.Parameter):
    """A Parameter that keeps its gradient in a place of its own."""

    @property
    def grad(self):
        return self.__dict__.get("elsewhere")

    @grad.setter
    def grad(self, value):
        self.__dict__["elsewhere"] = value


class Model:
    """Two optimizers' lists of parameters, and what may happen to them."""

    ask = "find"

    def __init__(self):
        self.kept = []
        shapes = [[(4, 3), (6,)], [(1,), ()]], [[(2, 8), (0, 3), (2, 3, 2, 2)]]
        self.lists = [
            [[self.parameter(*shape) for shape in group] for group in groups] for groups in shapes
        ]

    @staticmethod
    def parameter(*shape, kind=nn.Parameter):
        made = kind(torch.ones(shape))
        made.grad = torch.full(shape, 2.0)
        return made

    def groups(self):
        return [group for groups in self.lists for group in groups]

    def params(self):
        return [param for group in self.groups() for param in group]

    def change(self, action, number):
        """Does something to the parameter of this number."""
        params = self.params()
        if params:
            self.kept = self.kept[-20:]  # So that memory is given again, but not at once.
            with contextlib.suppress(RuntimeError):  # What torch refuses does not happen.
                action(self, params[number % len(params)])

    def replace(self, old, new):
        for group in self.groups():
            group[:] = [new if param is old else param for param in group]


def nothing(model, param):
    pass


def new_gradients(model, _):
    for param in model.params():
        if param.grad is not None and type(param.grad) is torch.Tensor:
            model.kept.append(param.grad)
            param.grad = torch.full_like(param, 3.0)


def none(model, param):
    param.grad = None


def filled(model, param):
    if not nn.parameter.is_lazy(param):
        param.grad = None
        param.grad = torch.full_like(param.data, 5.0)


def gradient(make):
    """Gives a parameter the gradient that `make` makes of one like itself."""

    def give(model, param):
        if not nn.parameter.is_lazy(param):
            model.kept.append(param.grad)
            param.grad = None
            param.grad = make(torch.full_like(param.data, 7.0).contiguous())

    give.__name__ = f"gradient_{make.__name__}"
    return give


def strided(grad):
    return torch.stack([grad, grad], -1)[..., 0]


def transposed(grad):
    return grad.transpose(0, -1).contiguous().transpose(0, -1) if grad.dim() > 1 else grad


def channels_last(grad):
    return grad.to(memory_format=torch.channels_last) if grad.dim() == 4 else grad


def expanded(grad):
    return torch.ones(()).expand(grad.shape)


def unaligned(grad):
    return torch.cat([grad.flatten()[:1], grad.flatten(), torch.ones(1)])[1:-1].view(grad.shape)


def sparse(grad):
    return grad.to_sparse() if grad.dim() else grad


def uncoalesced(grad):
    if grad.dim() != 1 or not grad.numel():
        return grad
    return torch.sparse_coo_tensor(
        torch.zeros(1, 2, dtype=torch.int64), torch.ones(2), grad.shape, check_invariants=False
    )


def compressed(grad):
    return grad.to_sparse_csr() if grad.dim() == 2 and grad.numel() else grad


def negative(grad):
    return torch._neg_view(grad)


def odd(grad):
    return grad.as_subclass(Odd)


def as_parameter(grad):
    return nn.Parameter(grad)


def needing_gradient(grad):
    return grad.requires_grad_()


def of_another_dtype(dtype):
    def change(model, param):
        if param.grad is not None and type(param.grad) is torch.Tensor:
            param.grad.data = param.grad.data.to(dtype)

    change.__name__ = f"gradient_in_{dtype}".replace("torch.", "")
    return change


def other_storage(model, param):
    if type(param.grad) is torch.Tensor and param.grad.layout is torch.strided:
        model.kept.append(param.grad.data)
        param.grad.data = param.grad.data.clone()


def shared(model, param):
    for other in model.params():
        if other is not param and other.shape == param.shape and other.grad is not None:
            param.grad = other.grad
            return


def twin(model, param):
    """Another parameter of the same shape, so that gradients can be shared."""
    group = next(group for group in model.groups() if any(param is each for each in group))
    if not nn.parameter.is_lazy(param):
        group.append(model.parameter(*param.shape))


def frozen(model, param):
    if param.is_leaf:
        param.requires_grad_(not param.requires_grad and param.is_floating_point())


def replaced(kind):
    def replace(model, param):
        if not nn.parameter.is_lazy(param):
            model.replace(param, model.parameter(*param.shape, kind=kind))

    replace.__name__ = f"replaced_by_{kind.__name__}"
    return replace


def made_lazy(model, param):
    model.replace(param, nn.UninitializedParameter())


def given_a_shape(model, param):
    if nn.parameter.is_lazy(param):
        param.materialize((3,))
        param.grad = torch.ones(3)


def of_another_class(model, param):
    if type(param) is nn.Parameter:
        param.__class__ = Named
    elif type(param) is Named:
        param.__class__ = nn.Parameter


def on_meta(model, param):
    if not nn.parameter.is_lazy(param):
        model.replace(param, nn.Parameter(torch.ones(param.shape, device="meta")))


def with_a_gradient_on_meta(model, param):
    if not nn.parameter.is_lazy(param):
        other = nn.Parameter(torch.ones(param.shape, device="meta"))
        other.grad = torch.ones(param.shape, device="meta")
        model.replace(param, other)


def complex_valued(model, param):
    other = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    other.grad = torch.ones_like(other)
    model.replace(param, other)


def whole_numbers(model, param):
    other = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    other.grad = torch.ones(3, dtype=torch.int64)
    model.replace(param, other)


def wrapped(model, param):
    if not nn.parameter.is_lazy(param):
        other = nn.Parameter(Wrapper(torch.ones(3)))
        other.grad = Wrapper(torch.ones(3)) if len(model.params()) % 2 else None
        model.replace(param, other)


def with_a_wrapper_as_gradient(model, param):
    if not nn.parameter.is_lazy(param) and param.dtype is torch.float32:
        param.grad = None
        param.grad = Wrapper(torch.ones(param.shape))


def data_swapped(model, param):
    if not nn.parameter.is_lazy(param) and type(param) is not Wrapper:
        model.kept.append(param.data)
        param.data = torch.ones_like(param.data)


def data_transposed(model, param):
    if not nn.parameter.is_lazy(param) and param.dim() == 2 and param.shape[0] == param.shape[1]:
        param.data = param.data.t()


def data_cut(model, param):
    if type(param) is nn.Parameter and param.dim() == 1 and len(param) > 1:
        param.grad = None
        param.data = param.data[:-1]
        param.grad = torch.ones_like(param)


def in_half(model, param):
    if type(param) is nn.Parameter and param.is_floating_point():
        param.grad = None
        param.data = param.data.half()
        param.grad = torch.ones_like(param)


def tensors_swapped(model, param):
    if type(param) is nn.Parameter:
        other = nn.Parameter(torch.ones(3))
        grad, param.grad = param.grad, None
        torch.utils.swap_tensors(param, other)
        model.kept.append((other, grad))
        param.grad = torch.ones_like(param)


def listed_twice(model, param):
    model.groups()[0].append(param)


def taken_out(model, param):
    for group in model.groups():
        group[:] = [each for each in group if each is not param]


def group_added(model, _):
    model.lists[0].append([model.parameter(5)])


def group_removed(model, _):
    if len(model.lists[0]) > 1:
        model.kept.append(model.lists[0].pop())


def groups_turned(model, _):
    model.lists[0].reverse()


def order_turned(model, _):
    model.groups()[-1].reverse()


def lists_replaced(model, _):
    model.lists = [[list(group) for group in groups] for groups in model.lists]


def optimizers_swapped(model, _):
    model.lists.reverse()


ACTIONS = [
    *(nothing, new_gradients, none, filled, other_storage, shared, twin, frozen, made_lazy),
    *(given_a_shape, of_another_class, on_meta, with_a_gradient_on_meta, complex_valued),
    *(whole_numbers, wrapped, with_a_wrapper_as_gradient, data_swapped, data_transposed, data_cut),
    *(in_half, tensors_swapped, listed_twice, taken_out, group_added, group_removed),
    *(groups_turned, order_turned, lists_replaced, optimizers_swapped),
    *map(replaced, (nn.Parameter, Named, Elsewhere, Odd)),
    *map(of_another_dtype, (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32)),
    *map(
        gradient,
        (
            *(strided, transposed, channels_last, expanded, unaligned, sparse, uncoalesced),
            *(compressed, negative, odd, as_parameter, needing_gradient),
        ),
    ),
]


class Teller:
    """A table, and all that it says, with the walk in C++ or in Python."""

    def __init__(self, in_cpp, **options):
        self.in_cpp, self.last = in_cpp, None
        self.table = GradientTable(**options)

    def tell(self, model):
        before, native.library = native.library, lambda: LIBRARY if self.in_cpp else None
        try:
            ask = getattr(self.table, model.ask)
            found = ask(model.lists, name=lambda param: f"parameter of {tuple(param.shape)}")
        except Exception as error:
            return type(error), str(error)
        finally:
            native.library = before
        if found is None:
            return None
        told = {
            "the same object": found is self.last,
            "params": [id(param) for param in found.params],
            # Of a sparse gradient the values, which are a new object each time.
            "tensors": [
                id(tensor) if tensor is local_of(param.grad) else tensor.data_ptr()
                for param, tensor in zip(found.params, found.tensors, strict=True)
            ],
            "ends": found.ends,
            "dtypes": found.dtypes,
            "device": found.device,
            "layouts": found.layouts,
            "addressed": found.addressed is not None,
        }
        if found.addressed is not None:
            at = found.at
            assert at.addresses == [tensor.data_ptr() for tensor in found.tensors]
            assert at.located.pointers.tolist() == at.addresses
            assert [local_of(param).data_ptr() for param in found.params] == found.homes
            assert [t.data_ptr() for t in found.elements] == found.homes
            assert self.in_cpp or found.walker is None
            told |= {"addresses": at.addresses, "kinds": at.kinds, "sizes": at.sizes}
            told |= {"homes": found.homes, "shared": found.shared}
            self.last = found
        found.release()
        return told


@pytest.fixture(scope="module", autouse=True)
def _served():
    """The CPU counts as a device whose kernels reach tensors by their addresses."""
    before = dict(kernels.BACKENDS)
    kernels.BACKENDS["cpu"] = SimpleNamespace(BY_ADDRESS=True)
    yield
    kernels.BACKENDS.clear()
    kernels.BACKENDS.update(before)


def compare(actions, options, kind=Model):
    model = kind()
    tellers = [Teller(in_cpp, **options) for in_cpp in (True, False)]
    for action, number in [(nothing, 0), *actions, (nothing, 0)]:
        model.change(action, number)
        told = {teller.in_cpp: teller.tell(model) for teller in tellers}
        assert told[True] == told[False]
        tellers.reverse()  # What looks first may coalesce a gradient.


OPTIONS = st.fixed_dictionaries({"refuse_twice": st.booleans(), "may_share": st.booleans()})


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 20)), min_size=1, max_size=12),
    OPTIONS,
)
def test_both_say_the_same_whatever_happens(actions, options):
    compare(actions, options)


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
@pytest.mark.parametrize("may_share", [False, True], ids=["each its own", "may share"])
def test_both_say_the_same_after(action, may_share):
    for number in range(7):
        options = {"refuse_twice": number % 2 == 0, "may_share": may_share}
        compare([(twin, number), (nothing, 0), (action, number), (new_gradients, 0)], options)


# --- gradients that are asked for once ------------------------------------------------------------


def told_once(params, in_cpp, ask):
    before, native.library = native.library, lambda: LIBRARY if in_cpp else None
    try:
        found = ask(params)
    except Exception as error:
        return type(error), str(error)
    finally:
        native.library = before
    places, tensors, *more = found
    told = [places, *more, [tensor.data_ptr() for tensor in tensors], [t.dtype for t in tensors]]
    if isinstance(tensors, AddressedTensors):
        at = tensors.at
        assert at.located.pointers.tolist() == at.addresses == told[-2]
        assert at.located.chunking.sizes.tolist() == [tensor.numel() for tensor in tensors]
        assert at.kinds == kinds_of(tensors, at.addresses)
    return told


def by_gradients_of(params):
    found = gradients_of(params, name=lambda param: "it")
    return [id(param) for param in found.params], found.tensors, found.layouts


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 20)), max_size=6))
def test_gradients_that_are_asked_for_once_are_the_same(actions):
    model = Model()
    for action, number in [(nothing, 0), *actions]:
        model.change(action, number)
        params = model.params()
        for ask in (by_gradients_of, measurable_gradients):
            told_once(params, False, ask)  # Sparse gradients are coalesced by the first.
            assert told_once(params, True, ask) == told_once(params, False, ask)


def test_gradients_of_the_same_kinds_are_not_looked_at_one_by_one(monkeypatch):
    params = [Model.parameter(size) for size in (3, 4, 5)]
    _, first = measurable_gradients(params)
    assert isinstance(first, AddressedTensors)
    monkeypatch.setattr(table, "kinds_of", None)
    kept = [param.grad for param in params]
    for param in params:
        param.grad = torch.ones_like(param)
    _, second = measurable_gradients(params)
    assert second.at.kinds is first.at.kinds
    assert second.at.located.chunking is first.at.located.chunking
    assert second.at.located.pointers.tolist() == [param.grad.data_ptr() for param in params]
    assert first.at.addresses == [grad.data_ptr() for grad in kept]
    assert first.at.located.pointers.tolist() == first.at.addresses


def test_a_gradient_that_needs_a_gradient_is_detached_for_a_watcher():
    param = Model.parameter(3)
    param.grad = torch.ones(3, requires_grad=True)
    places, (seen,) = measurable_gradients([param])
    assert places == [0]
    assert not seen.requires_grad
    assert gradients_of([param], name=str).tensors[0] is param.grad


# --- what C++ does to lists of tensors ------------------------------------------------------------


def test_writes_are_counted_as_torch_counts_them():
    with torch.inference_mode():
        inferred = torch.ones(2)
    given = [torch.ones(2), nn.Parameter(torch.ones(3)), Odd(torch.ones(1)), inferred]
    LIBRARY.count_write(given)
    LIBRARY.count_write(tuple(given[:1]))
    assert [tensor._version for tensor in given[:3]] == [2, 1, 1]
    assert LIBRARY.versions(given[:3]).tolist() == [2, 1, 1]
    with pytest.raises(TypeError, match="expected tensors, got int"):
        LIBRARY.count_write([given[0], 3])
    with pytest.raises(TypeError, match="expected a list of tensors"):
        LIBRARY.count_write(3)


def test_addresses_are_those_of_torch():
    given = [torch.ones(2), torch.empty(0), torch.ones(3)[1:], nn.Parameter(torch.ones(()))]
    assert LIBRARY.addresses(given).tolist() == [tensor.data_ptr() for tensor in given]
    with pytest.raises(RuntimeError):
        LIBRARY.addresses([torch.eye(2).to_sparse()])


def test_who_requires_a_gradient_is_told_as_python_tells_it():
    class Stubborn(nn.Parameter):
        requires_grad = "always"

    params = [
        Model.parameter(3, kind=kind) for kind in (nn.Parameter, Named, Elsewhere, nn.Parameter)
    ]
    params[1].requires_grad_(False)
    marks = bytes([True, False, True, True])
    assert LIBRARY.requiring(params) == requiring(params) == marks
    assert requiring([]) == b""
    assert LIBRARY.requiring([*params, Odd(torch.ones(2))]) is None
    assert requiring([*params, Odd(torch.ones(2))]) == marks + b"\0"
    assert LIBRARY.requiring([*params, Stubborn(torch.ones(2))]) is None
    with pytest.raises(TypeError, match="expected tensors, got int"):
        LIBRARY.requiring([3])


# --- who is there at the same time ----------------------------------------------------------------


def found_by(table, lists):
    found = table.find_addressed(lists, name=str)
    assert found is None or found.walker is not None
    return found


def test_gradients_are_held_until_they_are_released():
    model, table = Model(), GradientTable()
    for _ in range(2):
        found = found_by(table, model.lists)
        gone = [weakref.ref(param.grad) for param in model.params()]
        for param in model.params():
            param.grad = None  # As a hook may do between a look and a launch.
        assert [ref() is not None for ref in gone] == [True] * len(gone)
        assert [tensor.data_ptr() for tensor in found.tensors] == found.at.addresses
        found.release()
        gc.collect()
        assert [ref() for ref in gone] == [None] * len(gone)
        for param in model.params():
            param.grad = torch.ones_like(param)


def test_what_was_handed_out_stays_as_it_was_after_another_look():
    model, table = Model(), GradientTable()
    found_by(table, model.lists)
    model.change(new_gradients, 0)
    found = found_by(table, model.lists)
    first, addresses = found.tensors, list(found.at.addresses)
    model.change(new_gradients, 0)
    assert found_by(table, model.lists) is found
    found.release()
    assert [tensor.data_ptr() for tensor in first] == addresses
    assert len(found.tensors) == 0


def test_a_table_keeps_no_parameter_that_was_replaced():
    model, table = Model(), GradientTable()
    found_by(table, model.lists).release()
    gone = weakref.ref(model.params()[0])
    model.change(replaced(nn.Parameter), 0)
    found_by(table, model.lists).release()
    gc.collect()
    assert gone() is None


def test_a_circle_through_a_table_is_collected():
    model, table = Model(), GradientTable()
    found_by(table, model.lists).release()
    param = model.params()[0]
    param.table = table
    gone = weakref.ref(param)
    del param, model, table
    gc.collect()
    assert gone() is None


def test_a_grad_property_that_changes_the_lists_is_survived():
    class Meddling(nn.Parameter):
        @property
        def grad(self):
            for action in actions:
                action()
            return self.__dict__.get("elsewhere")

        @grad.setter
        def grad(self, value):
            self.__dict__["elsewhere"] = value

    actions = []
    model, table = Model(), GradientTable()
    model.change(replaced(Meddling), 1)
    assert found_by(table, model.lists) is not None
    group, groups = model.groups()[0], model.lists[0]
    again = lambda: (actions.clear(), table.find_addressed(model.lists, name=str))  # noqa: E731
    for meddle in (group.clear, groups.clear, model.lists.clear, again, gc.collect):
        before = [[list(group) for group in groups] for groups in model.lists]
        actions[:] = [meddle]
        with contextlib.suppress(IndexError, ValueError):
            table.find_addressed(model.lists, name=str)
        actions.clear()
        model.lists[:] = before
        found = table.find_addressed(model.lists, name=str)
        grads = [param.grad for param in model.params() if param.grad is not None]
        assert found.at.addresses == [grad.data_ptr() for grad in grads]


def test_what_only_looks_like_a_tensor_is_none():
    class Likeness:
        grad, requires_grad = torch._C.TensorBase.grad, torch._C.TensorBase.requires_grad
        __torch_function__ = nn.Parameter.__torch_function__

    model, table = Model(), GradientTable()
    found_by(table, model.lists)
    params = [*model.params(), Likeness()]
    assert LIBRARY.collect(params, None, False, False, False) is None
    assert LIBRARY.meshes(params, None) is None
    assert LIBRARY.localized([params], None) is None
    for ask in (LIBRARY.requiring, LIBRARY.count_write, LIBRARY.GradientMarks().mark):
        with pytest.raises(TypeError):
            ask(params)
    model.groups()[0].append(Likeness())
    with pytest.raises(TypeError):
        table.find_addressed(model.lists, name=str)


def test_a_grad_property_that_raises_is_told():
    class Refusing(nn.Parameter):
        refuses = None

        @property
        def grad(self):
            if self.refuses is not None:
                raise self.refuses
            return self.__dict__.get("elsewhere")

        @grad.setter
        def grad(self, value):
            self.__dict__["elsewhere"] = value

    model, table = Model(), GradientTable()
    model.change(replaced(Refusing), 0)
    found_by(table, model.lists)
    model.params()[0].refuses = KeyError("nothing here")
    with pytest.raises(KeyError, match="nothing here"):
        table.find_addressed(model.lists, name=str)


def test_a_class_that_is_given_a_grad_in_mid_run_is_asked():
    model, table = Model(), GradientTable()

    class Late(nn.Parameter):
        pass

    model.change(replaced(Late), 0)
    found = found_by(table, model.lists)
    other = torch.ones(4, 3)
    Late.grad = property(lambda self: other)
    later = table.find_addressed(model.lists, name=str)
    assert later is not found
    assert later.at.addresses[0] == other.data_ptr()


def test_lists_that_another_thread_changes_never_give_a_wrong_address():
    model, table = Model(), GradientTable()
    own, spare = model.params(), [model.parameter(3) for _ in range(3)]
    # Here and not in the thread: torch itself crashes (2.13) if one thread sets `grad` and another
    # one asks for it.
    for param in spare[:2]:
        param.grad = torch.ones(3)
    done = threading.Event()
    wrong = []

    def meddle():
        number = 0
        while not done.is_set():
            number += 1
            group = model.lists[0][number % 2]
            group.append(spare[number % 3])
            model.lists[0].append([])
            if number % 2:
                group.reverse()
            if number % 7:
                group[:] = [param for param in group if param is not spare[number % 3]]
            else:
                group.pop()
            model.lists[0].pop()
            if len(group) < 2:
                group[:] = own[2 * (number % 2) :][:2]

    thread = threading.Thread(target=meddle)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(400):
            try:
                found = table.find_addressed(model.lists, name=str)
            except SharedParameter:  # Seen while it was put somewhere else.
                continue
            if found is not None:
                tensors = list(found.tensors)
                wrong += [
                    (address, tensor)
                    for address, tensor in zip(found.at.addresses, tensors, strict=True)
                    if address != tensor.data_ptr()
                ]
                assert len(tensors) == len(found.params) == len(found.at.sizes)
                found.release()
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)
    assert not wrong


def test_parts_of_the_gradients_have_addresses_of_their_own():
    model, table = Model(), GradientTable()
    for _ in range(3):
        found = found_by(table, model.lists)
        grads = [param.grad for param in model.params()]
        parts = [found.of_optimizer(number)[1] for number in (0, 1)]
        for part, own in zip(parts, (grads[:4], grads[4:]), strict=True):
            assert part.at.addresses == [grad.data_ptr() for grad in own]
            assert part.at.located.pointers.tolist() == part.at.addresses
            assert [one is other for one, other in zip(part, own, strict=True)] == [True] * len(own)
        assert found.tensors[:] is found.tensors
        assert found.tensors[-1] is grads[-1]
        assert list(map(id, found.tensors[::-2])) == list(map(id, grads[::-2]))
        assert found.tensors[3:3] == []
        model.change(new_gradients, 0)


def test_held_tensors_are_indexed_as_a_list_is():
    model, table = Model(), GradientTable()
    found_by(table, model.lists)
    found = found_by(table, model.lists)
    held, grads = found.tensors.held, [param.grad for param in model.params()]
    assert type(held).__name__ == "HeldTensors"
    assert held[-1] is grads[-1]
    assert list(map(id, held[5:1:-2])) == list(map(id, grads[5:1:-2]))
    for wrong in (len(grads), -len(grads) - 1):
        with pytest.raises(IndexError):
            held[wrong]
    with pytest.raises(TypeError):
        held["first"]


# --- DTensors -------------------------------------------------------------------------------------


class Spread(Model):
    """DTensors beside a plain parameter, on a mesh of one."""

    ask = "find_addressed"  # Which adds no summands up: the second to look would find none.

    def __init__(self):
        import torch.distributed as dist
        from torch.distributed.tensor import init_device_mesh

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.kept = []
        self.mesh = init_device_mesh("cpu", (1,))
        self.lists = [[[self.spread(4, 3), self.spread(6), self.parameter(5), self.spread(0, 3)]]]

    def spread(self, *shape):
        param = nn.Parameter(self.placed(torch.ones(shape)))
        param.grad = self.placed(torch.full(shape, 2.0))
        return param

    def placed(self, tensor, placements=None):
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(tensor, self.mesh, placements or [Shard(0)], run_check=False)


def with_new_specs(model, _):
    for param in model.params():
        model.kept.append(param.grad)
        placed = model.placed if hasattr(param, "placements") else torch.Tensor.clone
        param.grad = placed(torch.ones(param.shape))


def with_the_specs_of_parameters(model, _):
    """As FSDP2 makes them."""
    for param in model.params():
        if hasattr(param, "placements"):
            model.kept.append(param.grad)
            param.grad = model.placed(torch.ones(param.shape))
            param.grad._spec = param._spec


def summands(model, param):
    from torch.distributed.tensor import Partial

    param.grad = model.placed(torch.ones(param.shape), [Partial()])


def replicated(model, param):
    from torch.distributed.tensor import Replicate

    param.grad = model.placed(torch.ones(param.shape), [Replicate()])


def on_another_mesh(model, param):
    from torch.distributed.tensor import init_device_mesh

    before, model.mesh = model.mesh, init_device_mesh("cpu", (1, 1))
    try:
        param.grad = model.placed(torch.ones(param.shape), None)
    finally:
        model.mesh = before


def on_an_equal_mesh(model, param):
    from torch.distributed.tensor import init_device_mesh

    model.mesh = init_device_mesh("cpu", (1,))
    param.grad = model.placed(torch.ones(param.shape))


def plainly(model, param):
    with contextlib.suppress(RuntimeError):
        param.grad = torch.ones(param.shape)


def locally_elsewhere(model, param):
    if hasattr(param, "placements"):
        model.kept.append(param._local_tensor)
        param._local_tensor = torch.ones(param.shape)


def locally_of_another_shape(model, param):
    if hasattr(param.grad, "placements") and param.grad.dim() == 2:
        param.grad._local_tensor = torch.ones(2, 2)


def locally_needing_gradient(model, param):
    if hasattr(param.grad, "placements"):
        param.grad._local_tensor = torch.ones(param.shape, requires_grad=True)


def locally_needing_gradient_as_parameter(model, param):
    if hasattr(param, "placements"):
        param._local_tensor = param._local_tensor.detach().requires_grad_()


def spread_anew(model, param):
    model.replace(param, model.spread(*param.shape))


def spread_as_summands(model, param):
    from torch.distributed.tensor import Partial

    other = nn.Parameter(model.placed(torch.ones(param.shape), [Partial()]))
    other.grad = model.placed(torch.ones(param.shape), [Partial()])
    model.replace(param, other)


def of_a_subclass(model, param):
    """Also where one of the two is none, and C++ has to look twice."""
    for each in (param, param.grad):
        if hasattr(each, "placements"):
            each.__class__ = spread_class()


@functools.cache
def spread_class():
    from torch.distributed.tensor import DTensor

    return type("Spreading", (DTensor,), {})


SPREAD_ACTIONS = [
    *(nothing, none, filled, with_new_specs, with_the_specs_of_parameters, summands, replicated),
    *(on_another_mesh, on_an_equal_mesh, plainly, locally_elsewhere, locally_of_another_shape),
    *(locally_needing_gradient, locally_needing_gradient_as_parameter, spread_anew),
    *(spread_as_summands, of_a_subclass, listed_twice, taken_out, order_turned, frozen),
]


@pytest.fixture(scope="module")
def process_group():
    import torch.distributed as dist

    yield dist
    if dist.is_initialized():
        dist.destroy_process_group()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(SPREAD_ACTIONS), st.integers(0, 5)), max_size=8), OPTIONS)
def spread_models_agree(actions, options):
    compare(actions, options, Spread)


@pytest.mark.usefixtures("process_group")
def test_both_say_the_same_of_dtensors():
    spread_models_agree()
    for action in SPREAD_ACTIONS:
        for number in range(4):
            compare([(action, number), (with_new_specs, 0)], {"may_share": True}, Spread)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(SPREAD_ACTIONS), st.integers(0, 5)), max_size=5))
def spread_gradients_agree(actions):
    model = Spread()
    for action, number in [(nothing, 0), *actions]:
        model.change(action, number)
        params = model.params()
        for ask in (by_gradients_of, measurable_gradients):
            told_once(params, False, ask)  # Summands are added up by the first.
            assert told_once(params, True, ask) == told_once(params, False, ask)


@pytest.mark.usefixtures("process_group")
def test_dtensors_that_are_asked_for_once_are_the_same():
    spread_gradients_agree()
    for action in SPREAD_ACTIONS:
        model = Spread()
        model.change(action, 1)
        found = [told_once(model.params(), in_cpp, by_gradients_of) for in_cpp in (True, False)]
        assert found[0] == found[1]


@pytest.mark.usefixtures("process_group")
def test_dtensors_are_found_and_walked_over_without_asking_python(monkeypatch):
    model, mine = Spread(), GradientTable()
    monkeypatch.setattr(table, "lie_alike", None)
    monkeypatch.setattr(table, "local_of", None)
    model.change(with_the_specs_of_parameters, 0)
    first = found_by(mine, model.lists)
    for change in (with_the_specs_of_parameters, with_new_specs, with_new_specs):
        model.change(change, 0)
        assert found_by(mine, model.lists) is first
        found = gradients_of(model.params(), name=str)
        assert found.addressed.at.addresses == first.at.addresses
        assert found.layouts == first.layouts
    model.change(none, 1)
    assert len(found_by(mine, model.lists).params) == 3


@pytest.mark.usefixtures("process_group")
def test_layouts_of_the_same_dtensors_are_worked_out_once(monkeypatch):
    model = Spread()
    first = gradients_of(model.params(), name=str)
    monkeypatch.setattr(table, "layout_on", None)
    model.change(with_new_specs, 0)
    assert gradients_of(model.params(), name=str).layouts is first.layouts
    monkeypatch.undo()
    other = Spread()  # On a mesh that is equal and another, perhaps of another world.
    found = gradients_of(other.params(), name=str)
    assert found.layouts[0].mesh is other.mesh
    assert first.layouts[0].mesh is model.mesh


@pytest.mark.usefixtures("process_group")
def test_meshes_are_found_as_python_finds_them():
    from torch.distributed.tensor import init_device_mesh

    def found(tensors, in_cpp):
        before, native.library = native.library, lambda: LIBRARY if in_cpp else None
        try:
            return [(id(mesh), id(tensor)) for mesh, tensor in meshes_of(tensors)]
        finally:
            native.library = before

    model = Spread()
    first, params = model.mesh, model.params()
    for mesh in (init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1)), first):
        model.mesh = mesh
        params += [Model.parameter(2), model.spread(3)]
    for tensors in (params, params[::-1], tuple(params), [], [Model.parameter(2)], params[:1]):
        assert found(tensors, True) == found(tensors, False)
    assert len(found(params, True)) > 1
    assert LIBRARY.meshes([Odd(torch.ones(2))], dtensor_parts()) is None
    assert found([*params, Odd(torch.ones(2))], True) == found(params, False)


@pytest.mark.usefixtures("process_group")
def test_a_dtensor_without_its_parts_is_no_crash():
    for of_gradient in (False, True):
        for part in ("_local_tensor", "_spec"):
            model, mine = Spread(), GradientTable()
            assert found_by(mine, model.lists) is not None
            param = model.params()[1]
            delattr(param.grad if of_gradient else param, part)
            with pytest.raises(AttributeError):
                mine.find_addressed(model.lists, name=str)
            if of_gradient or part == "_spec":
                with pytest.raises(AttributeError):
                    gradients_of(model.params(), name=str)
            else:  # Which are not asked for.
                assert len(gradients_of(model.params(), name=str).tensors) == 4


@pytest.mark.usefixtures("process_group")
def test_a_class_of_dtensors_that_is_given_other_parts_in_mid_run_is_asked():
    from torch.distributed.tensor import DTensor

    class Late(DTensor):
        pass

    model, mine = Spread(), GradientTable()
    param = model.params()[0]
    param.__class__ = param.grad.__class__ = Late
    first = found_by(mine, model.lists)
    assert found_by(mine, model.lists) is first
    other = torch.full((4, 3), 9.0)
    Late._local_tensor = property(lambda self: other)
    found = mine.find_addressed(model.lists, name=str)
    assert found is None or found.homes[0] == other.data_ptr()
