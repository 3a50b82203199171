"""Status codes and exceptions, in both directions."""

from __future__ import annotations

import grpc
import pytest

from splitwise import errors
from splitwise.rpc.status import EXCEPTIONS, retry_after, status_of


def test_every_failing_status_has_an_exception():
    assert set(EXCEPTIONS) == set(grpc.StatusCode) - {grpc.StatusCode.OK}


@pytest.mark.parametrize("code", list(EXCEPTIONS))
def test_a_named_status_survives_the_round_trip(code: grpc.StatusCode):
    assert status_of(EXCEPTIONS[code]("x", code=code.name)) is code


def test_a_class_alone_gives_its_first_status():
    assert status_of(errors.InvalidRequestError("x")) is grpc.StatusCode.INVALID_ARGUMENT
    assert status_of(errors.ServerError("x")) is grpc.StatusCode.UNKNOWN


def test_a_code_of_another_class_is_not_believed():
    assert status_of(errors.DataLossError("x", code="NOT_FOUND")) is grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize(
    ("metadata", "seconds"),
    [
        ([], None),
        ([("retry-after-ms", "1500")], 1.5),
        ([("retry-after-ms", b"0")], 0.0),
        ([("retry-after-ms", "-1")], None),
        ([("retry-after-ms", "soon")], None),
        ([("other", "1"), ("retry-after-ms", "2")], 0.002),
    ],
)
def test_retry_after(metadata, seconds):
    assert retry_after(metadata) == seconds


def test_a_subclass_has_the_status_of_its_class():
    class FieldError(errors.InvalidRequestError):
        pass

    assert status_of(FieldError("x")) is grpc.StatusCode.INVALID_ARGUMENT
    assert status_of(FieldError("x", code="OUT_OF_RANGE")) is grpc.StatusCode.OUT_OF_RANGE
