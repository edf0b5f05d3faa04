"""What is special about gcp-storage-emulator, and composing with a server that is not ours."""

import pytest

from cloudckpt import RetryPolicy
from cloudckpt.checkpoint.commit import conditions_work
from cloudckpt.checksum import CRC32C
from cloudckpt.errors import ConfigError
from cloudckpt.transfer.retry import Retrier

pytestmark = [
    pytest.mark.only_on("gcp-storage-emulator"),
    pytest.mark.parametrize("cloud", ["gcs"], indirect=True),
]


def test_that_it_ignores_preconditions_is_found_out(store, place):
    retrier = Retrier(RetryPolicy(attempts=1))
    with pytest.raises(ConfigError, match="ignores conditional writes"):
        conditions_work(store, "auto", f"{place.key}/probe", retrier)


def test_parts_that_need_two_rounds_are_composed(cloud, store, place):
    key = f"{place.key}/large"
    pieces = [bytes([number]) * (1000 + number) for number in range(70)]
    upload = store.create_upload(key, 1100)
    parts = [
        store.put_part(upload, number, [memoryview(data)], checksum=CRC32C.of(data))
        for number, data in enumerate(pieces, 1)
    ]
    info = store.complete_upload(upload, parts)
    assert cloud.look.get(key) == b"".join(pieces)
    assert list(store.list(key)) == [info]
    assert cloud.names(place) == ["large"]
