"""What tests of transfers send, and how; and a count of what happens at a time."""

import random
import threading

from cloudckpt.checksum import CRC32C
from cloudckpt.config import Config, RetryPolicy
from cloudckpt.transfer.group import TaskGroup
from cloudckpt.transfer.parts import Piece
from cloudckpt.transfer.stats import TransferStats
from cloudckpt.transfer.upload import ObjectUpload

PART = 1000
KEY = "run/object"
AT_ONCE = RetryPolicy(attempts=6, base=0.0, cap=0.0)


def some_bytes(size, seed=0):
    return random.Random(f"{size}/{seed}").randbytes(size)


def put(store, key, data, **options):
    return store.put(key, [memoryview(data)], checksum=CRC32C.of(data), **options)


def held(store):
    """All that a store holds: objects and unfinished uploads."""
    objects = [info.key for info in store.list("")]
    return objects + [f"upload of {upload.key}" for upload in store.list_uploads("")]


def cut(data, sizes):
    """Pieces of these sizes, one after the other."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(Piece(memoryview(data)[at : at + size]))
        at += size
    return pieces


def transfer(kind, store, *given, produce, width=4, policy=AT_ONCE, create_only=False):
    """What a writer does with an upload or a copy: runs it, and abandons it if anything fails."""
    stats, group = TransferStats(), TaskGroup(width)
    config = Config(retry=policy, conditional_writes="auto" if create_only else "off")
    made = kind(store, *given, group, config, stats)
    try:
        group.run(lambda: produce(made))
    except BaseException:
        made.abandon()
        raise
    return made, stats.snapshot()


def send(store, pieces, *, kind=ObjectUpload, **options):
    """Uploads an object of these pieces in parts of a thousand bytes."""

    def produce(upload):
        for piece in pieces:
            upload.write(piece)
        upload.close()

    return transfer(kind, store, KEY, PART, produce=produce, **options)


class Crowd:
    """Those who are in a with-block, or called this.

    Attributes:
        counts: How many there were whenever one came.
    """

    def __init__(self, seconds=0.001):
        self.counts = []
        self._seconds, self._here, self._lock = seconds, 0, threading.Lock()

    def __enter__(self):
        with self._lock:
            self._here += 1
            self.counts.append(self._here)

    def __exit__(self, *_):
        with self._lock:
            self._here -= 1

    def __call__(self):
        with self:
            threading.Event().wait(self._seconds)  # gives others the chance to be too many
