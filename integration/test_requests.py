"""Our requests are those of the vendors' own clients, but for differences that are listed."""

import pytest

from vendors.accepted import BY_CLOUD, EVERYWHERE
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
