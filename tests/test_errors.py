"""Errors keep all they know on their way from rank to rank."""

import pickle
import re

import pytest

from cloudckpt import errors

NAMES = set(errors.__all__) - {"Damage"}
CLASSES = [getattr(errors, name) for name in sorted(NAMES)]


def made(cls):
    """An error of this class with everything it can carry."""
    context = {"uri": "s3://bucket/run/object", "item": "layers.0.weight", "cause": OSError("torn")}
    if issubclass(cls, errors.TransientStoreError):
        context["retry_after"] = 7.5
    if issubclass(cls, errors.ConnectionLostError):
        context["received"] = 4096
    if issubclass(cls, errors.RanksFailedError):
        context["failures"] = {3: "OSError: torn", 5: "ServerError: 500"}
    return cls("it failed; do this", **context)


def tree():
    """``{class: (its parent, its builtin parent)}`` as the docstring of the module draws it."""
    found, path = {}, []
    for line in errors.__doc__.splitlines():
        drawn = re.match(r"    ([│├└─ ]*)(\w+Error)\b(?:\s+also (\w+))?", line)
        if drawn is None:
            continue
        depth = len(drawn[1]) // 4
        path[depth:] = [drawn[2]]
        found[drawn[2]] = (path[depth - 1] if depth else None, drawn[3])
    return found


def test_all_error_classes_are_exported():
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert defined == NAMES


def test_the_drawn_tree_is_the_tree_of_classes():
    drawn = tree()
    assert set(drawn) == NAMES
    for cls in CLASSES:
        parent, builtin = drawn[cls.__name__]
        bases = [base.__name__ for base in cls.__bases__]
        assert bases == [parent or "Exception", *([builtin] if builtin else [])], cls


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickling(cls, protocol):
    error = made(cls)
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is cls
    assert vars(back) == vars(error)
    assert str(back) == str(error)
    assert back.args == error.args
    assert "torn" in str(back)


def test_the_text_names_uri_item_and_cause():
    text = str(made(errors.StoreError))
    assert text == (
        "it failed; do this | at s3://bucket/run/object | item 'layers.0.weight' "
        "| cause: OSError: torn"
    )


def test_a_key_error_is_not_shown_as_a_repr():
    assert str(errors.MissingKeyError("it lacks 'w'")) == "it lacks 'w'"


def test_a_bucket_that_is_missing_is_not_taken_for_a_new_run():
    assert not issubclass(errors.BucketNotFoundError, FileNotFoundError)
    assert issubclass(errors.CheckpointNotFoundError, FileNotFoundError)
