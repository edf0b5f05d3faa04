"""fsspec's own tests of what a file system does, on ours.

The store is the one in memory, which lists as the others do (its contract says so). Left out are
`AbstractOpenTests`, which are about mode "xb": that is refused, ``pipe_file(..., mode="create")``
does it.
"""

import uuid

import pytest
from fsspec.tests import abstract

from cloudckpt import Config
from cloudckpt.integrations.fsspec import S3FileSystem


class _InMemory(S3FileSystem):
    protocol = scheme = "memory"


class _Ours(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self):
        return _InMemory(config=Config())

    @pytest.fixture
    def fs_path(self):
        return f"fsspec/{uuid.uuid4().hex}"

    @pytest.fixture
    def supports_empty_directories(self):
        return False


class TestGet(_Ours, abstract.AbstractGetTests):
    pass


class TestPut(_Ours, abstract.AbstractPutTests):
    pass


class TestPipe(_Ours, abstract.AbstractPipeTests):
    pass
