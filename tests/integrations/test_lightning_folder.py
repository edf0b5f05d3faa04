"""What Lightning's callback may delete on a URI; its runs are seen by integration/frameworks."""

import pytest

from cloudckpt.integrations.lightning_folder import may_be_removed


@pytest.mark.parametrize(
    ("previous", "folder", "resumed_from", "expected"),
    [
        ("s3://b/run/step-1", "s3://b/run", None, True),
        ("s3://b/run/step-1", "s3://b/run/", "s3://b/other/step-9", True),
        ("s3://b/run/step-1", "s3://b/run", "/local/last.ckpt", True),
        ("s3://b/run/step-1", "s3://b/run", "hdfs://node/last.ckpt", True),
        ("s3://b/step-1", "s3://b", None, True),
        ("s3://b/run/step-1", "s3://b/run", "s3://b/run/step-1", False),
        ("s3://b/run/step-1", "s3://b/run", "s3://b/run/step-1/", False),
        ("az://box/run/1", "az://box/run", "abfss://box@account.dfs.core.windows.net/run/1", False),
        ("s3://b/run/step-1", "s3://b/run2", None, False),
        ("s3://b/run2/step-1", "s3://b/run", None, False),
        ("s3://b/run/step-1", "gs://b/run", None, False),
        ("s3://b/run/step-1", "/local/run", None, False),
        ("s3://b/run/step-1", "hdfs://node/run", None, False),
        ("s3://b/run/step-1", None, None, False),
        ("s3://b/run", "s3://b/run", None, False),
    ],
)
def test_only_what_is_beneath_the_folder_and_was_not_resumed_from_may_go(
    previous, folder, resumed_from, expected
):
    assert may_be_removed(previous, folder, resumed_from) is expected
