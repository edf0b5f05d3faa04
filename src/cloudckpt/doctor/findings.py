"""Findings of checks, and the runner that limits the time of each check."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cloudckpt.config import RetryPolicy
from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CloudCheckpointError,
    ConnectionLostError,
    CredentialsError,
    StoreError,
    TLSError,
)
from cloudckpt.stores.redaction import masked, reason
from cloudckpt.transfer.group import Cancellation
from cloudckpt.transfer.retry import Retrier

__all__ = ["Checks", "Finding", "Test", "Values", "failed", "ok", "skipped", "warning"]

Outcome = Literal["ok", "warning", "failed", "skipped"]
Values = Mapping[str, str | float | None]

# Brief failures are retried and not reported. The five pauses take at least a second, as some
# stores allow one write of an object a second.
_POLICY = RetryPolicy(attempts=6, base=0.2, cap=1.0, deadline=10.0)
_GRACE = 2.0  # seconds for an interrupted check to end
_HOPELESS = (BucketNotFoundError, CredentialsError, TLSError)

_REPORTED = "follow the advice in the message; if the store itself failed, try again later"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a check; it shows no credentials.

    Attributes:
        check: The name of the check.
        outcome: ``ok``; ``warning``: cloudckpt works, with a caveat; ``failed``: it can't work;
            ``skipped``: the check could not be made.
        found: The result in words.
        advice: What to do about it; empty if nothing.
        seconds: The duration of the check.
        values: The result for programs; the keys depend on the check. ``location``: ``scheme``.
            ``credentials``: ``source``, ``identity`` and ``ends`` (seconds since 1970, or None).
            ``endpoint``: ``endpoint`` and ``region``. ``connection``: ``seconds`` (the response
            time) and ``skew_seconds`` (how far this machine's clock is ahead, or None).
            ``checksums``: ``checksum``. ``speed``: ``up`` and ``down`` (bytes per second). Empty
            for all other checks, and for a check that was skipped, ended in an error, or does not
            apply, such as the endpoint of a local path.
    """

    check: str = ""
    outcome: Outcome
    found: str
    advice: str = ""
    seconds: float = 0.0
    values: Values = field(default_factory=dict)


def ok(found: str, values: Values | None = None) -> Finding:
    """Returns a finding of success."""
    return Finding(outcome="ok", found=found, values=values or {})


def warning(found: str, advice: str, values: Values | None = None) -> Finding:
    """Returns a finding of success with a caveat, and what to do about it."""
    return Finding(outcome="warning", found=found, advice=advice, values=values or {})


def failed(found: str, advice: str, values: Values | None = None) -> Finding:
    """Returns a finding of failure, and what to do about it."""
    return Finding(outcome="failed", found=found, advice=advice, values=values or {})


def skipped(found: str) -> Finding:
    """Returns a finding for a check that could not be made; `found` says why."""
    return Finding(outcome="skipped", found=found)


Test = Callable[[Retrier], Finding]
"""A check: makes its requests through the Retrier and returns its finding.

An error that it raises becomes a finding.
"""


class Checks:
    """Runs checks one after another and collects their findings.

    Attributes:
        findings: The findings so far.
        hopeless: Whether further checks of the store are pointless, as it can't be reached, refuses
            the credentials or has no such bucket.
    """

    def __init__(self, tell: Callable[[Finding], None], patience: float) -> None:
        """Prepares to run checks.

        Args:
            tell: Called with each finding.
            patience: Seconds after which a check is interrupted.
        """
        self.findings: list[Finding] = []
        self.hopeless = False
        self._tell = tell
        self._patience = patience

    def run(
        self,
        check: str,
        call: Test,
        *,
        needs: str = "",
        is_vital: bool = False,
        interrupt: Callable[[Collection[int]], None] = lambda threads: None,
    ) -> None:
        """Runs one check in a thread, and reports its finding.

        Args:
            check: The name of the check.
            call: The check.
            needs: The permission that it requires, for the advice; empty if unknown.
            is_vital: Whether later checks of the store are pointless if this one loses or gets no
                connection.
            interrupt: Ends the network waits of threads, given their identifiers.
        """
        began = time.monotonic()
        found, failures = list[Finding](), list[StoreError]()
        cancellation = Cancellation()

        def work() -> None:
            try:
                found.append(call(Retrier(_POLICY, cancellation, on_retry=failures.append)))
            except CloudCheckpointError as error:
                is_lost = is_vital and isinstance(error, ConnectionLostError)
                self.hopeless = self.hopeless or is_lost or isinstance(error, _HOPELESS)
                is_denied = needs and isinstance(error, AccessDeniedError)
                found.append(failed(str(error), f"grant {needs}" if is_denied else _REPORTED))
            except Exception as exc:  # noqa: BLE001 - one defect must not hide the other findings
                found.append(failed(reason(exc), "this is a bug in cloudckpt: please report it"))

        # joining a thread, unlike a call in this one, can time out and be ended by Ctrl-C
        thread = threading.Thread(target=work, name=f"cloudckpt-doctor-{check}", daemon=True)
        thread.start()
        try:
            thread.join(self._patience)
            is_late = thread.is_alive()
        finally:
            if thread.is_alive() and thread.ident is not None:
                cancellation.cancel()
                interrupt([thread.ident])
                thread.join(_GRACE)
        if is_late:
            is_lost = is_vital and all(isinstance(error, ConnectionLostError) for error in failures)
            self.hopeless = self.hopeless or is_lost
            finding = failed(
                "; ".join([f"not finished within {self._patience:g} s", *map(str, failures[-1:])]),
                "check proxies, firewalls, routes and mounts, or raise the limit (--patience)",
            )
        else:
            [finding] = found
        self.add(check, finding, seconds=time.monotonic() - began)

    def add(self, check: str, finding: Finding, *, seconds: float = 0.0) -> None:
        """Redacts, keeps and reports the finding of a check."""
        finding = dataclasses.replace(
            finding,
            check=check,
            found=masked(finding.found.replace(" (try cloudckpt doctor)", "")),
            advice=masked(finding.advice),
            seconds=seconds,
        )
        self.findings.append(finding)
        self._tell(finding)
