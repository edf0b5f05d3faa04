"""A link that is slow carries its checkpoint; one that hardly moves is given up."""

import pytest

import cloudckpt
from cloudckpt import Config, RetryPolicy
from cloudckpt.errors import ConnectionLostError
from support.wire.faults import Drip, Throttle

from .selection import on
from .states import filled, impatient, load_step, silence

SIZE = 1024 * 1024  # more than lies in the buffers on the way
ONCE = RetryPolicy(attempts=1)


@pytest.fixture
def hurried(endpoint):
    return impatient(endpoint, **silence(), retry=ONCE)


def slow(config: Config) -> Throttle:
    """All takes twice as long as silence may."""
    return Throttle(SIZE / (2.2 * config.stall_timeout))


@on("s3", "plain s3")
class TestSlowLinks:
    @pytest.mark.timeout(150)
    def test_a_save_takes_the_time_it_needs(self, store, proxy, hurried, direct):
        uri = store.uri("run")
        proxy.inject(slow(hurried))
        cloudckpt.save(filled(1, SIZE), checkpoint_id=uri, config=hurried)
        assert load_step(uri, direct, SIZE) == 1

    @pytest.mark.timeout(150)
    def test_a_load_takes_the_time_it_needs(self, store, proxy, hurried, direct):
        uri = store.uri("run")
        cloudckpt.save(filled(1, SIZE), checkpoint_id=uri, config=direct)
        proxy.inject(slow(hurried))
        assert load_step(uri, hurried, SIZE) == 1

    @pytest.mark.timeout(150)
    @pytest.mark.parametrize("fault", [Throttle(2000), Drip(0.1)], ids=["trickle", "bytes"])
    def test_a_load_that_hardly_moves_is_given_up(self, store, proxy, hurried, direct, fault):
        uri = store.uri("run")
        cloudckpt.save(filled(1, SIZE), checkpoint_id=uri, config=direct)
        proxy.inject(fault, operation="GetObject", path="*.distcp")
        with pytest.raises(ConnectionLostError, match="stall_timeout, or lower connections"):
            load_step(uri, hurried, SIZE)

    @pytest.mark.timeout(150)
    def test_a_save_that_hardly_moves_is_given_up(self, store, proxy, hurried):
        proxy.inject(Throttle(500), operation="PutObject", path="*.distcp")
        with pytest.raises(ConnectionLostError, match="_timeout"):
            cloudckpt.save(filled(1, SIZE), checkpoint_id=store.uri("run"), config=hurried)
