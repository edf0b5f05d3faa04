"""Reads that do not queue for the GIL: a whole buffer in one call.

Without TLS, ``MSG_WAITALL`` lets the kernel fill the buffer; a call would else return with what it
has, some hundred kilobytes. The rest is about TLS.

Python's ``SSLSocket.recv_into`` returns one TLS record, 16 KiB: a GiB takes 65,000 calls, each of
which gives the GIL away and waits for it. With sixteen connections on four cores that queue costs
three times the CPU of the cipher, and beside a thread that keeps the GIL a load nearly stands.
OpenSSL can fill a whole buffer in one call, made here without the GIL, on the same connection::

    BIO_f_buffer       repeats reads until the destination is full; see below why it keeps nothing
    BIO_f_ssl          reads a record by SSL_read
    SSL                Python's own, with all that Python and urllib3 have set up and verified
    BIO_f_buffer       128 KiB of ciphertext: one system call for eight records, not two for each
    the socket's BIO   Python's own

All else stays with Python: handshakes, small reads, writes, errors. Whatever the native call can't
do it leaves undone, and Python's own read finds it in the same place and gives it its name.

Python has no way to ask for the ``SSL*``. It stands in a private struct, between two pointers that
are known; :func:`_ssl_of` believes it only if they are where they should be, and if OpenSSL says
that it belongs to this object and this socket. Otherwise the connection takes the plain way.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import io
import logging
import platform
import socket
import ssl
import sys
import sysconfig
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = [
    "BodyReader",
    "LongReadSocket",
    "LongReadTLSSocket",
    "TLSSocket",
    "WatchedSocket",
    "has_unread",
    "obstacle",
]

logger = logging.getLogger("cloudckpt")

_LONG = 64 * 1024
"""Bytes: smaller reads take the plain way. More than what a BIO_f_buffer holds by itself, 4 KiB."""

_CIPHERTEXT = 128 * 1024
"""Bytes that are taken from the kernel in one call; more would leave the caches of the CPU."""

# constants of openssl/bio.h that are macros, unchanged since 1.0
_BIO_NOCLOSE = 0
_BIO_CTRL_PENDING = 10
_BIO_C_SET_SSL = 109
_BIO_C_SET_BUFF_SIZE = 117

_APP_DATA = 0  # the index at which SSL_set_app_data stores


class _UnfitError(Exception):
    """Why a connection takes the plain way."""


def obstacle() -> str | None:
    """Why this interpreter reads TLS connections the plain way; None if it does not."""
    try:
        _openssl()
    except _UnfitError as exc:
        return str(exc)
    return None


@dataclass(frozen=True)
class _OpenSSL:
    """Functions of the library that Python's ``_ssl`` itself has loaded."""

    read: Any  # BIO_read; the only one that is called without the GIL
    with_gil: ctypes.PyDLL


@functools.cache
def _openssl() -> _OpenSSL:
    """Raises _UnfitError, which is found out anew at each call; it takes microseconds."""
    if sys.implementation.name != "cpython" or not (3, 10) <= sys.version_info[:2] <= (3, 13):
        raise _UnfitError(f"{platform.python_implementation()} {platform.python_version()}")
    if sys.platform != "linux":
        raise _UnfitError(f"the platform {sys.platform}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise _UnfitError("a free-threaded Python")
    import _ssl

    path = getattr(_ssl, "__file__", None)
    if path is None:
        raise _UnfitError("a Python that has OpenSSL built in")
    pointer, number = ctypes.c_void_p, ctypes.c_int
    try:
        library = ctypes.PyDLL(path)
        for name, result, arguments in (
            ("BIO_ctrl", ctypes.c_long, (pointer, number, ctypes.c_long, pointer)),
            ("BIO_f_buffer", pointer, ()),
            ("BIO_f_ssl", pointer, ()),
            ("BIO_free_all", None, (pointer,)),
            ("BIO_new", pointer, (pointer,)),
            ("BIO_push", pointer, (pointer, pointer)),
            ("BIO_up_ref", number, (pointer,)),
            ("ERR_clear_error", None, ()),
            ("SSL_get_ex_data", pointer, (pointer, number)),
            ("SSL_get_fd", number, (pointer,)),
            ("SSL_get_rbio", pointer, (pointer,)),
            ("SSL_set0_rbio", None, (pointer, pointer)),
            ("SSL_set_quiet_shutdown", None, (pointer, number)),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        read = ctypes.CDLL(path).BIO_read
        read.restype, read.argtypes = number, (pointer, pointer, number)
    except (AttributeError, OSError) as exc:
        raise _UnfitError(f"OpenSSL is out of reach: {exc}") from exc
    return _OpenSSL(read, library)


def _ssl_of(sock: ssl.SSLSocket, sslobj: Any, library: ctypes.PyDLL) -> int:
    """The ``SSL*`` of a socket.

    Raises:
        _UnfitError: If it can't be proven that it is one.
    """
    # struct PySSLSocket { PyObject_HEAD; PyObject *Socket; SSL *ssl; PySSLContext *ctx; ...
    # Socket is a weak reference without a callback, of which an object has but one.
    head = object.__basicsize__
    size = ctypes.sizeof(ctypes.c_void_p)
    if type(sslobj).__basicsize__ < head + 3 * size:
        raise _UnfitError("Python's object of a TLS connection is another one")
    reference = weakref.ref(sock)
    before, found, behind = (ctypes.c_size_t * 3).from_address(id(sslobj) + head)
    if before != id(reference) or behind != id(sslobj.context) or not found:
        raise _UnfitError("Python's object of a TLS connection is another one")
    # Between these two there is nothing but the SSL*: it may be asked.
    if library.SSL_get_ex_data(found, _APP_DATA) != id(sslobj):
        raise _UnfitError("OpenSSL's object of a TLS connection does not know Python's")
    if library.SSL_get_fd(found) != sock.fileno():
        raise _UnfitError("OpenSSL's object of a TLS connection has another socket")
    return int(found)


class _Chain:
    """The BIOs of one connection.

    It keeps Python's object, and with it the ``SSL``, alive: a thread that reads holds the chain,
    so that nothing is freed under it if another thread closes the socket.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._upper: int | None = None
        openssl = _openssl()
        library = self._library = openssl.with_gil
        self._read = openssl.read
        self.sslobj: Any = sock._sslobj  # type: ignore[attr-defined]
        tls = _ssl_of(sock, self.sslobj, library)
        below = library.BIO_new(library.BIO_f_buffer())
        records = library.BIO_new(library.BIO_f_ssl())
        upper = library.BIO_new(library.BIO_f_buffer())
        for_reads = ctypes.byref(ctypes.c_int(0))
        if not (
            below
            and records
            and upper
            and library.BIO_ctrl(below, _BIO_C_SET_BUFF_SIZE, _CIPHERTEXT, for_reads)
        ):
            for bio in (below, records, upper):
                library.BIO_free_all(bio)  # of NULL: nothing
            raise _UnfitError("no memory for the BIOs")
        # SSL_set0_rbio gives one reference of the old BIO away and takes over the new one.
        plain = library.SSL_get_rbio(tls)
        library.BIO_up_ref(plain)
        library.SSL_set0_rbio(tls, library.BIO_push(below, plain))
        # A BIO_f_ssl calls SSL_shutdown when it is freed, even with BIO_NOCLOSE. Quietly it sends
        # nothing: the socket may be a parent's, or its number another connection's by then.
        # Python, for its part, says goodbye in `unwrap` alone, which nobody calls here.
        library.SSL_set_quiet_shutdown(tls, 1)
        library.BIO_ctrl(records, _BIO_C_SET_SSL, _BIO_NOCLOSE, tls)
        self._below = below
        self._upper = library.BIO_push(upper, records)

    def read_into(self, view: memoryview) -> int:
        """Fills ``view``, of more than 4 KiB; fewer bytes come if there is an error or the end.

        A BIO_f_buffer that is asked for more than it can hold reads straight into the destination,
        to the end of that call. So the upper one never keeps plaintext that Python would miss.
        """
        start = ctypes.c_char.from_buffer(view)
        return int(self._read(self._upper, ctypes.addressof(start), view.nbytes))

    @property
    def unread(self) -> int:
        """Bytes of ciphertext that nobody has asked for yet."""
        return int(self._library.BIO_ctrl(self._below, _BIO_CTRL_PENDING, 0, None))

    def __del__(self) -> None:
        if self._upper is not None:
            self._library.BIO_free_all(self._upper)
            # what a broken connection has left in this thread is not the next one's
            self._library.ERR_clear_error()


def has_unread(sock: object) -> bool:
    """Whether more has come by TLS than was asked for, and is in the kernel no longer."""
    if not isinstance(sock, ssl.SSLSocket):
        return False
    chain = sock._chain if isinstance(sock, LongReadTLSSocket) else None
    return sock.pending() > 0 or (chain is not None and chain.unread > 0)


class BodyReader(io.BufferedReader):
    """Tells of all that has come of a body, even if the connection breaks then.

    A BufferedReader reads until the buffer is full; if that fails, it does not say what is there
    already, which would have to be sent again: up to a whole step. A long read fills the buffer by
    itself. Short ones, and chunks, which http.client wants whole, remain a BufferedReader's.
    """

    has_chunks = True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """As that of BufferedReader, but a long read is one call to the socket."""
        if self.has_chunks or memoryview(buffer).nbytes <= _LONG:
            return super().readinto(buffer)
        return self.readinto1(buffer)


class WatchedSocket(socket.socket):
    """A connection without a timeout: the watch ends what takes too long.

    urllib3 sets timeouts before each request and each answer. Each would be a system call, which
    gives the GIL away, and another one to take it back.
    """

    is_watched = False

    @property
    def fills_buffers(self) -> bool:
        """Whether a long read returns less only if the connection ends, fails, or has no more."""
        return True

    def makefile(self, mode: str = "r", buffering: int | None = None, **text: Any) -> Any:
        """As that of ``socket``; what http.client reads answers from is a :class:`BodyReader`."""
        file = super().makefile(mode, buffering, **text)  # type: ignore[call-overload]
        return BodyReader(file.detach()) if type(file) is io.BufferedReader else file

    def settimeout(self, value: float | None) -> None:
        """As that of ``socket``, as long as nobody watches."""
        if not self.is_watched:
            super().settimeout(value)

    def watched(self) -> None:
        """From now on there are no timeouts."""
        self.settimeout(None)
        self.is_watched = True


class LongReadSocket(WatchedSocket):
    """A connection whose long reads are one call each, where it has no timeout."""

    @classmethod
    def of(cls, sock: socket.socket) -> LongReadSocket:
        """Takes the connection of another socket over, which is closed then."""
        return cls(sock.family, sock.type, sock.proto, fileno=sock.detach())

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        """As that of ``socket``, but a long read ends when it is full or nothing follows."""
        wanted = nbytes or memoryview(buffer).nbytes
        if wanted > _LONG and not flags and self.gettimeout() is None:
            flags = socket.MSG_WAITALL
        return super().recv_into(buffer, nbytes, flags)


class TLSSocket(ssl.SSLSocket):
    """A TLS connection that is closed if it can't be made.

    Nobody else has the socket meanwhile, and Python closes it only behind errors of the handshake:
    not behind an interrupt, and not if the connection was broken just before, by the peer or by
    another thread, which it takes for one that is still to be connected.
    """

    def getpeername(self) -> Any:
        """As that of ``socket``; what Python asks before the handshake."""
        try:
            return super().getpeername()
        except OSError as exc:
            if self._sslobj is not None or self.fileno() < 0:  # type: ignore[attr-defined]
                raise
            self.close()
            raise ConnectionResetError(
                errno.ECONNRESET, "the connection was broken before TLS began"
            ) from exc

    def do_handshake(self, block: bool = False) -> None:
        """As that of ``SSLSocket``."""
        try:
            super().do_handshake(block)
        except BaseException:
            self.close()
            raise


class LongReadTLSSocket(WatchedSocket, TLSSocket):
    """A TLS connection whose long reads are one native call each, where that is possible.

    A read of more than 64 KiB into a socket without a timeout then returns when the buffer is full
    or the connection has ended. One thread at a time may use it, as with every ``SSLSocket``.
    Another one may break it by ``socket.shutdown``, and may close it.
    """

    _chain: _Chain | None = None
    _tried = False

    @property
    def fills_buffers(self) -> bool:
        return obstacle() is None

    def recv_into(self, buffer: WriteableBuffer, nbytes: int | None = None, flags: int = 0) -> int:
        """As that of ``SSLSocket``, but see above."""
        view = memoryview(buffer).cast("B")
        wanted = min(nbytes, view.nbytes) if nbytes else view.nbytes
        if wanted > _LONG and not flags and self.gettimeout() is None:
            chain = self._chain or self._new_chain()
            if chain is not None and chain.sslobj is self._sslobj:  # type: ignore[attr-defined]
                count = chain.read_into(view[:wanted])
                if count > 0:
                    return count
        # Python finds the same end or error; or it was a signal, whose handler has run by now
        return super().recv_into(buffer, nbytes, flags)

    def _new_chain(self) -> _Chain | None:
        if self._tried:
            return None
        self._tried = True
        try:
            self._chain = _Chain(self)
        except _UnfitError as exc:
            logger.debug("a TLS connection is read record by record: %s", str(exc))
        else:
            logger.debug("a TLS connection is read by whole buffers, without the GIL")
        return self._chain

    def _real_close(self) -> None:
        """Where ``socket`` closes, once nobody reads through a file object any more."""
        self._chain = None
        super()._real_close()  # type: ignore[misc]
