"""Children forked from a process that has torch and cloudckpt imported already.

Importing torch costs a process three seconds and some hundred MiB, a fork milliseconds and what
it writes to. The process that is forked is started with the first child, one for each process that
runs tests; it has a single thread, so that its children are sound.
"""

import multiprocessing

__all__ = ["context"]

context = multiprocessing.get_context("forkserver")
"""Makes such children. They have the environment of the time when the first was made."""

context.set_forkserver_preload(
    [
        "boto3",
        "cloudckpt",
        "cloudckpt.stores.azure",
        "cloudckpt.stores.gcs",
        "cloudckpt.stores.s3",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
    ]
)
