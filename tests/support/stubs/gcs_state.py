"""What the Cloud Storage stub holds, and the rules that both of its APIs obey.

Documented: generations and preconditions (https://cloud.google.com/storage/docs/request-preconditions;
0 means that there is no object), one change a second of the same object, retention periods, parts
of 5 MiB; the data of publicly readable objects is cached for an hour unless their Cache-Control
forbids it, their metadata never (.../docs/caching, .../docs/consistency). Taken from reports: a
condition is checked before the retention period; a multipart upload that a retention period refuses
stays open; a cache knows data by the whole URL, with the query
(https://build.ralphmayr.com/posts/46-gcs-caching-can-be-a-pain-in-the-neck).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from awscrt.checksums import crc32c

from cloudckpt.checksum import to_base64

from . import gcs_answers as answers
from .gcs_answers import Answer, Request

_MIN_PART = 5 * 1024**2


@dataclass(frozen=True)
class Attributes:
    """What a writer says about an object besides its bytes."""

    cache_control: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    bucket: str
    key: str
    data: bytes
    generation: int
    attributes: Attributes
    created: float

    @cached_property
    def crc32c(self) -> str:
        return to_base64(crc32c(self.data))


@dataclass
class OpenUpload:
    """A multipart upload that was neither completed nor aborted; ``parts`` by number."""

    id: str
    bucket: str
    key: str
    attributes: Attributes
    parts: dict[int, bytes] = field(default_factory=dict)


@dataclass
class Injection:
    """An answer in place of the stub's own.

    Attributes:
        matches: Which request it is for.
        answer: What it gets; None closes the connection without a word.
        carry_out: Do what the request asks for nevertheless, as when only the answer is lost.
    """

    matches: Callable[[Request], bool]
    answer: Answer | None
    carry_out: bool


class State:
    """The buckets and all that is in them, safe to use from many threads.

    Attributes:
        buckets: Those that exist.
        objects: By bucket and key.
        uploads: Open multipart uploads by id.
        requests: All that arrived, in order.
        billable: If it is set, every bucket bills the requester, who must name this project.
        page: Most objects of a list.
        mutation_interval: Seconds between changes of one object; the real service has 1.
        retention: Seconds for which an object can't be replaced or deleted.
        rewritten: Most bytes that one call of rewrite copies; None for all.
        public: Whether everybody may read the objects, so that their data is cached.
    """

    def __init__(self, *buckets: str) -> None:
        self.lock = threading.RLock()
        self.buckets = set(buckets)
        self.objects: dict[tuple[str, str], StoredObject] = {}
        self.uploads: dict[str, OpenUpload] = {}
        self.requests: list[Request] = []
        self.billable: str | None = None
        self.page = 1000
        self.mutation_interval = 0.0
        self.retention = 0.0
        self.rewritten: int | None = None
        self.public = False
        self._cached: dict[tuple[str, frozenset[tuple[str, str]]], StoredObject] = {}
        self._injections: list[Injection] = []
        self._changed: dict[tuple[str, str], float] = {}
        self._numbers = itertools.count(1)
        self._started = time.time_ns() // 1000

    def inject(
        self,
        matches: Callable[[Request], bool],
        status: int | None,
        *,
        carry_out: bool = False,
    ) -> None:
        """Answers the next request that matches; see :class:`Injection`. No status: hangs up."""
        answer = None if status is None else Answer(status)
        with self.lock:
            self._injections.append(Injection(matches, answer, carry_out))

    def injected(self, request: Request) -> Injection | None:
        """Notes the request, and finds what it gets instead of an answer of the stub's."""
        with self.lock:
            self.requests.append(request)
            for injection in self._injections:
                if injection.matches(request):
                    self._injections.remove(injection)
                    return injection
        return None

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """The keys of a bucket, in the service's order."""
        with self.lock:
            found = [key for at, key in self.objects if at == bucket and key.startswith(prefix)]
        return sorted(found, key=str.encode)

    def check_payer(self, project: str | None) -> None:
        """Turns away who does not name the project that pays, where the requester has to."""
        if self.billable is not None and project != self.billable:
            raise answers.no_user_project()

    def check_bucket(self, bucket: str) -> None:
        """Turns away who is wrong about the bucket."""
        if bucket not in self.buckets:
            raise answers.no_bucket()

    def find(self, bucket: str, key: str, expected: int | None = None) -> StoredObject:
        """The object, if it is there, and as the precondition expects."""
        with self.lock:
            found = self.objects.get((bucket, key))
        if found is None:
            raise answers.no_object(bucket, key)
        if expected not in (None, found.generation):
            raise answers.condition_not_met()
        return found

    def read(self, request: Request, bucket: str, key: str, expected: int | None) -> StoredObject:
        """As `find`, for the data: what is cached of it is served, be it replaced or deleted."""
        url = (request.path, frozenset(request.query.items()))
        with self.lock:
            found = self._cached.get(url)
            if found is None:
                found = self.find(bucket, key, expected)
            if "public" in self.cache_control(found):
                self._cached[url] = found
            return found

    def cache_control(self, stored: StoredObject) -> str:
        """The header of that name with which the data of an object is sent."""
        default = "public, max-age=3600" if self.public else "private, max-age=0"
        return stored.attributes.cache_control or default

    @contextlib.contextmanager
    def change(self, bucket: str, key: str, expected: int | None) -> Iterator[StoredObject | None]:
        """The time in which one writer may change an object, if the rules let him."""
        name = (bucket, key)
        with self.lock:
            found = self.objects.get(name)
            if expected is not None and expected != (found.generation if found else 0):
                raise answers.condition_not_met()
            if found is not None and time.time() < found.created + self.retention:
                raise answers.retained(bucket, key, timestamp(found.created + self.retention))
            changed = self._changed.get(name)
            if changed is not None and time.monotonic() < changed + self.mutation_interval:
                raise answers.too_fast(bucket, key)
            yield found
            self._changed[name] = time.monotonic()

    def put(
        self,
        bucket: str,
        key: str,
        data: bytes,
        attributes: Attributes,
        *,
        expected: int | None = None,
        checksum: str | None = None,
    ) -> StoredObject:
        """Creates or replaces an object."""
        with self.change(bucket, key, expected):
            verify(data, checksum)
            stored = StoredObject(
                bucket=bucket,
                key=key,
                data=data,
                generation=self._started + next(self._numbers),
                attributes=attributes,
                created=time.time(),
            )
            self.objects[bucket, key] = stored
            return stored

    def delete(self, bucket: str, key: str, expected: int | None = None) -> None:
        """Removes an object."""
        with self.lock:
            self.find(bucket, key)
            with self.change(bucket, key, expected):
                del self.objects[bucket, key]

    def begin(self, bucket: str, key: str, attributes: Attributes) -> OpenUpload:
        """Opens a multipart upload."""
        with self.lock:
            upload = OpenUpload(f"upload+/{next(self._numbers)}==", bucket, key, attributes)
            self.uploads[upload.id] = upload
            return upload

    def upload(self, bucket: str, key: str, upload_id: str) -> OpenUpload:
        """An open upload of this object."""
        with self.lock:
            found = self.uploads.get(upload_id)
        if found is None or (found.bucket, found.key) != (bucket, key):
            raise answers.no_upload()
        return found

    def complete(self, upload: OpenUpload, parts: list[tuple[int, str]]) -> StoredObject:
        """Makes an object of the named parts, each with the ETag that its sender was given."""
        numbers = [number for number, _ in parts]
        if not parts or numbers != sorted(set(numbers)):
            raise answers.invalid("The parts were not in ascending order.", "InvalidPartOrder")
        with self.lock:
            for number, tag in parts:
                if number not in upload.parts or tag != part_tag(upload.parts[number]):
                    raise answers.invalid(f"Part {number} could not be found.", "InvalidPart")
            if any(len(upload.parts[number]) < _MIN_PART for number in numbers[:-1]):
                text = "Your proposed upload is smaller than the minimum allowed object size."
                raise answers.invalid(text, "EntityTooSmall")
            data = b"".join(upload.parts[number] for number in numbers)
            stored = self.put(upload.bucket, upload.key, data, upload.attributes)
            del self.uploads[upload.id]
            return stored


def verify(data: bytes, checksum: str | None) -> None:
    """Compares a CRC32C in base64, if there is one."""
    computed = to_base64(crc32c(data))
    if checksum not in (None, computed):
        raise answers.bad_checksum(checksum, computed)


def header_checksum(headers: Mapping[str, str]) -> str | None:
    """The CRC32C in ``x-goog-hash``, which holds nothing else here."""
    return headers["x-goog-hash"].removeprefix("crc32c=") if "x-goog-hash" in headers else None


def part_tag(data: bytes) -> str:
    """The ETag of a part."""
    return f'"{hashlib.md5(data).hexdigest()}"'


def timestamp(seconds: float) -> str:
    """RFC 3339, with milliseconds."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def whole_number(text: str | None) -> int | None:
    """The value of a precondition or a limit."""
    if text is None or text.isdigit():
        return int(text) if text else None
    raise answers.invalid(f"Invalid value: {text}")


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First and last byte that ``Range`` asks for; None for all."""
    if header is None:
        return None
    first, last = header.removeprefix("bytes=").split("-")
    start, end = int(first), min(int(last), size - 1)
    if start >= size or start > end:
        raise answers.out_of_range()
    return start, end
