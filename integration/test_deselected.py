"""What is deselected exists, and says why."""

import inspect

import pytest

import test_checkpoints
import test_contract
from deselected import DESELECTED
from servers import BY_CLOUD


@pytest.mark.parametrize("server", DESELECTED)
def test_what_is_deselected_exists(server):
    assert server in {server.name for servers in BY_CLOUD.values() for server in servers}
    tests = {**vars(test_checkpoints), **dict(inspect.getmembers(test_contract.TestContract))}
    assert set(DESELECTED[server]) <= set(tests)
    assert all(DESELECTED[server].values())
