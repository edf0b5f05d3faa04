"""Calls of the vendors' SDKs, whose requests are sent by us.

What is not about bytes (listing, deleting, copying within a cloud) is composed and read by boto3,
google-cloud-storage and azure-storage-blob. Their own transports would wait without end for an
answer that comes byte by byte, as their time limits hold for each read, and no other thread could
end such a wait (docs/decisions.md). So each SDK gets the store's connections in their place: a call
makes one attempt, with the store's credentials, proxies and limits; it can be interrupted; and a
refusal is raised, through the SDK, as the error that the store makes of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cloudckpt.errors import CloudCheckpointError, InvalidRequestError, ServerError, StoreError
from cloudckpt.stores.redaction import reason
from cloudckpt.stores.rest import RestStore

__all__ = ["Answer", "SdkCalls"]

# who sends, what it can read, and how often it was tried is not the SDK's to say
_OURS = frozenset(
    {
        "accept-encoding",
        "amz-sdk-invocation-id",
        "amz-sdk-request",
        "user-agent",
        "x-goog-api-client",
        "x-ms-client-request-id",
    }
)


@dataclass(frozen=True)
class Answer:
    """A success: its status, headers and whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(repr=False)
class _Call:
    """A call under way; ``has_sent`` says whether it has led to a request."""

    key: str
    headers: Mapping[str, str]
    is_long: bool
    has_sent: bool = False


class SdkCalls:
    """The way from an SDK's client to the store that sends its requests. For many threads."""

    def __init__(self, store: RestStore) -> None:
        self._store = store
        self._of_thread = threading.local()

    @contextlib.contextmanager
    def about(
        self, key: str, headers: Mapping[str, str] | None = None, *, is_long: bool = False
    ) -> Iterator[None]:
        """Around one call of the SDK.

        Args:
            key: What it is about, for messages.
            headers: What its request is to carry besides what the SDK composes.
            is_long: Whether its answer may take as long as that to a completion.

        Raises:
            InvalidRequestError: If the SDK does not make a request of it.
            ServerError: If it can't read the answer.
        """
        call = self._of_thread.call = _Call(key, headers or {}, is_long)
        uri = self._store.uri(key)
        try:
            yield
        except StoreError as error:
            error.certain = error.certain or not call.has_sent
            error.uri = error.uri or uri
            raise
        except CloudCheckpointError:
            raise
        except Exception as exc:  # an SDK's own; it has no word of the store's
            if call.has_sent:
                raise ServerError(
                    "the answer is not what it should be", uri=uri, cause=reason(exc)
                ) from exc
            raise InvalidRequestError(
                "the request can't be made", uri=uri, cause=reason(exc), certain=True
            ) from exc

    @property
    def uri(self) -> str:
        """What this thread's call is about."""
        return self._store.uri(self._of_thread.call.key)

    def send(
        self, method: str, url: str, headers: Mapping[str, str | bytes], body: bytes | str | None
    ) -> Answer:
        """Sends what the SDK has composed.

        Raises:
            StoreError: If the answer is no success.
        """
        call: _Call = self._of_thread.call
        data = body.encode() if isinstance(body, str) else body or b""
        given = {
            name: value.decode("latin-1") if isinstance(value, bytes) else value
            for name, value in headers.items()
            if name.lower() not in _OURS
        }
        call.has_sent = True
        with self._store.exchange(
            method, url, {**given, **call.headers}, [memoryview(data)] if data else (),
            key=call.key, is_long=call.is_long,
        ) as reply:  # fmt: skip
            return Answer(reply.status, dict(reply.headers), reply.read_all())
