"""The errors: one tree, the wider Python kinds beside it, and nothing lost on the way."""

import copy
import pickle

import pytest

from gradilocks import errors


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_a_gradilocks_error(name):
    assert issubclass(getattr(errors, name), errors.GradilocksError)


@pytest.mark.parametrize(
    ("kind", "wider"),
    [
        (errors.BadState, ValueError),
        (errors.MissingKey, KeyError),
        (errors.MissingKey, errors.BadState),
        (errors.BadRunFile, ValueError),
        (errors.MissingPackage, ImportError),
        (errors.NoGradients, RuntimeError),
        (errors.ScaleMisuse, RuntimeError),
        (errors.SharedParameter, ValueError),
        (errors.NonFiniteGradient, RuntimeError),
        (errors.NeverFinite, errors.NonFiniteGradient),
    ],
)
def test_an_error_is_caught_by_the_kind_that_python_users_expect(kind, wider):
    assert issubclass(kind, wider)


def test_a_missing_key_shows_its_message_without_quotes():
    assert str(errors.MissingKey("state_dict has no 'scale'")) == "state_dict has no 'scale'"


@pytest.mark.parametrize("carry", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_from_another_process_tells_as_much(carry):
    error = carry(
        errors.NeverFinite("went nowhere", culprits=["a", "b"], scales=[4.0, 2.0], curable=True)
    )
    assert isinstance(error, errors.NeverFinite)
    assert str(error) == "went nowhere"
    assert (error.culprits, error.scales, error.curable) == (("a", "b"), (4.0, 2.0), True)
