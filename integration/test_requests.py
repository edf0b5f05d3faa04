"""Our requests are those of the vendors' own clients, but for differences that are listed."""

import pytest

from vendors.accepted import BY_CLOUD, EVERYWHERE
from vendors.differences import Accepted, Operation, compared
from vendors.fields import fields
from vendors.recorder import Answer, Recorded, recording
from vendors.report import CLOUDS, compare


@pytest.mark.parametrize("vendor", CLOUDS)
def test_requests_differ_from_those_of_the_vendors_client_only_as_accepted(vendor):
    comparison = compare(vendor)
    assert not comparison.problems(), "\n".join(comparison.problems())
    assert len(comparison.operations) == len(set(comparison.operations)) > 30


def test_what_is_accepted_says_why():
    rows = [row for table in (EVERYWHERE, *BY_CLOUD.values()) for row in table]
    assert all(row.reason for row in rows)


# what the comparison itself finds


@pytest.fixture
def recorder(tmp_path):
    with recording(tmp_path) as running:
        running.answering = lambda request: Answer()
        yield running


def sent(method="PUT", target="/key?a=1", body=b"body", **headers):
    named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return Recorded("host", method, target, named, body)


def judged(recorder, theirs, ours, *table):
    """What is made of two lists of requests."""
    recordings = [list(theirs), list(ours)]
    operation = Operation(
        "cloud: put",
        lambda: recorder.requests.extend(recordings[0]),
        lambda: recorder.requests.extend(recordings[1]),
    )
    return compared(recorder, [operation], table)


@pytest.mark.parametrize(
    ("ours", "field"),
    [
        (sent(method="POST"), "method"),
        (sent(target="/kEy?a=1"), "path"),
        (sent(target="/key?a=2"), "query a"),
        (sent(target="/key?a=1&b"), "query b"),
        (sent(body=b"Body"), "body"),
        (sent(If_Match="1"), "header if-match"),
        (sent(Content_Length="5"), "header content-length"),
    ],
)
def test_a_difference_that_is_not_accepted_is_a_problem(recorder, ours, field):
    found = judged(recorder, [sent()], [ours])
    assert [difference.field for difference in found.unexpected] == [field]
    assert len(found.problems()) == 1


def test_a_request_that_only_one_of_them_sends_is_a_problem(recorder):
    for theirs, ours in ([sent()], [sent(), sent("HEAD")]), ([sent(), sent("HEAD")], [sent()]):
        found = judged(recorder, theirs, ours)
        assert [difference.field for difference in found.unexpected] == ["request 2"]


def test_a_row_stands_for_its_own_operation_field_and_values_only(recorder):
    pair = [sent(If_Match="1")], [sent(If_Match="2")]
    right = Accepted("cloud: *", "header if-match", "1", "2", "why")
    found = judged(recorder, *pair, right)
    assert found.problems() == []
    for wrong in (
        Accepted("cloud: get", "header if-match", "1", "2", "why"),
        Accepted("cloud: *", "header if-none-match", "1", "2", "why"),
        Accepted("cloud: *", "header if-match", "2", "2", "why"),
        Accepted("cloud: *", "header if-match", "1", "1", "why"),
        Accepted("cloud: *", "header if-match", "1", None, "why"),
    ):
        found = judged(recorder, *pair, wrong)
        assert len(found.unexpected) == 1
        assert found.stale == [wrong]


def test_a_row_that_no_difference_needs_is_a_problem(recorder):
    row = Accepted("*", "header x", "*", None, "why")
    found = judged(recorder, [sent()], [sent()], row)
    assert found.stale == [row]
    assert len(found.problems()) == 1


def test_what_differs_in_a_structure_is_found_by_its_path():
    found = fields(sent(body=b"<a xmlns='n'><b><c>1</c></b><b><c>2</c></b></a>"))
    assert found.items() >= {("body xmlns", "n"), ("body /a/b[1]/c", "1"), ("body /a/b[2]/c", "2")}
    found = fields(sent(body=b'{"a": [{"b": 1}, {"b": "1"}]}'))
    assert found.items() >= {("body a[1].b", "1"), ("body a[2].b", '"1"')}


def test_a_signature_names_the_headers_that_it_covers():
    scope = "Credential=key/20260101/region/s3/aws4_request"
    found = fields(
        sent(
            Authorization=f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host;range, "
            f"Signature={'0' * 64}"
        )
    )
    assert found.items() >= {("signed host", "yes"), ("signed range", "yes")}
    assert found["header authorization"] == "AWS4-HMAC-SHA256 key/(a date)/region/s3/aws4_request"


def test_a_signature_with_the_accounts_key_that_does_not_fit_is_seen():
    key = "SharedKey account:" + "A" * 43 + "="
    assert fields(sent(Authorization=key))["header authorization"] == key
