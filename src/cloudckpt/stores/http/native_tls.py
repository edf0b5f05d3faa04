"""Fills a large buffer from a TLS connection in one call, without competing for the GIL.

Python's ``SSLSocket.recv_into`` returns one TLS record, 16 KiB: a GiB takes 65,000 calls, each of
which releases the GIL and waits for it. With sixteen connections on four cores this waiting costs
three times the CPU of the cipher, and beside a thread that holds the GIL a load almost stops.
OpenSSL can fill a whole buffer in one call, made here without the GIL, on the same connection::

    BIO_f_buffer       repeats reads until the destination is full; keeps no data, see below
    BIO_f_ssl          reads a record by SSL_read
    SSL                Python's own, set up and verified by Python and urllib3
    BIO_f_buffer       128 KiB of ciphertext: one system call for eight records, not two for each
    the socket's BIO   Python's own

Everything else stays with Python: handshakes, small reads, writes, errors. If the native call
fails, it leaves the connection's state as it is, and Python's own read meets the same error and
raises it.

Python offers no access to the ``SSL*``. It is a member of a private struct, between two pointers
that are known and compared, see :func:`_ssl_of`. In a version of Python that is not known, or where
OpenSSL is linked statically, the connection uses Python's own reads.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import ssl
import sys
import sysconfig
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudckpt.stores.http.connections import LONG, WatchedSocket

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["LongReadTLSSocket", "is_available"]

logger = logging.getLogger("cloudckpt")

_CIPHERTEXT = 128 * 1024
"""Bytes taken from the kernel in one call; more would not fit the CPU's caches."""

# macros of openssl/bio.h, unchanged since 1.0
_BIO_NOCLOSE = 0
_BIO_CTRL_PENDING = 10
_BIO_C_SET_SSL = 109
_BIO_C_SET_BUFF_SIZE = 117

_APP_DATA = 0  # the index that SSL_set_app_data uses
_UNKNOWN = (3, 16)  # the first version of Python whose private structs are not known


class _UnfitError(Exception):
    """Raised if a connection must use Python's own reads; the message says why."""


def is_available() -> bool:
    """Returns whether this interpreter has an OpenSSL that can be called for long reads."""
    try:
        _openssl()
    except _UnfitError:
        return False
    return True


@dataclass(frozen=True)
class _OpenSSL:
    """Functions of the OpenSSL library that Python's ``_ssl`` module has loaded."""

    read: Any  # BIO_read; the only function called without the GIL
    with_gil: ctypes.PyDLL


@functools.cache
def _openssl() -> _OpenSSL:
    """Loads the functions of OpenSSL; raises _UnfitError if this interpreter has none to use.

    The error is not cached: each call checks again, which takes microseconds.
    """
    if sys.implementation.name != "cpython":
        raise _UnfitError(f"the Python implementation is {sys.implementation.name}, not CPython")
    if sys.platform != "linux":
        raise _UnfitError(f"the platform is {sys.platform}, not Linux")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise _UnfitError("this Python is free-threaded, which is not supported")
    if sys.version_info >= _UNKNOWN:
        raise _UnfitError("this version of Python is newer than the versions that cloudckpt knows")
    import _ssl

    path = getattr(_ssl, "__file__", None)
    if path is None:
        raise _UnfitError("OpenSSL is linked statically into Python")
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
        raise _UnfitError(f"OpenSSL is not accessible: {exc}") from exc
    return _OpenSSL(read, library)


_WORD = ctypes.sizeof(ctypes.c_void_p)


def _ssl_of(sock: ssl.SSLSocket, sslobj: Any, library: ctypes.PyDLL) -> int:
    """Finds the ``SSL*`` of a socket: the word between two known pointers in Python's object.

    OpenSSL then confirms that it belongs to this object and this socket.

    Raises:
        _UnfitError: If the object has another layout.
    """
    import _ssl

    # struct PySSLSocket { PyObject_HEAD; PyObject *Socket; SSL *ssl; PySSLContext *ctx; ...
    # Socket is a weak reference without callback; an object has only one such reference.
    reference, head = weakref.ref(sock), object.__basicsize__
    kind = _ssl._SSLSocket  # type: ignore[attr-defined]
    if isinstance(sslobj, kind) and kind.__basicsize__ >= head + 3 * _WORD:
        before, found, after = (ctypes.c_size_t * 3).from_address(id(sslobj) + head)
        if (
            (before, after) == (id(reference), id(sslobj.context))
            and found
            and library.SSL_get_ex_data(found, _APP_DATA) == id(sslobj)
            and library.SSL_get_fd(found) == sock.fileno()
        ):
            return int(found)
    raise _UnfitError("Python's TLS connection object has an unknown layout")


class _Chain:
    """The chain of BIOs (OpenSSL's input and output objects) that reads from a TLS connection.

    It keeps Python's object alive, and with it the ``SSL``: a reading thread holds the chain, so
    that nothing is freed under it if another thread closes the socket.
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
                library.BIO_free_all(bio)  # NULL is ignored
            raise _UnfitError("OpenSSL could not allocate its buffers (BIO)")
        # SSL_set0_rbio drops one reference of the old BIO and takes ownership of the new BIO
        plain = library.SSL_get_rbio(tls)
        library.BIO_up_ref(plain)
        library.SSL_set0_rbio(tls, library.BIO_push(below, plain))
        # A BIO_f_ssl calls SSL_shutdown when it is freed, even with BIO_NOCLOSE. In quiet mode that
        # sends nothing: the socket may belong to a parent process, or its descriptor to another
        # connection by then. Python itself sends a TLS shutdown only in `unwrap`, which is not
        # called here.
        library.SSL_set_quiet_shutdown(tls, 1)
        library.BIO_ctrl(records, _BIO_C_SET_SSL, _BIO_NOCLOSE, tls)
        self._below = below
        self._upper = library.BIO_push(upper, records)

    def read_into(self, view: memoryview) -> int:
        """Fills `view`, larger than the upper BIO's 4 KiB; returns the number of bytes received.

        That is fewer than the view has only at an error or the end of the connection, and 0 or
        negative if nothing arrived.

        A BIO_f_buffer that is asked for more than it can hold reads straight into the destination.
        So the upper BIO never keeps plaintext that Python's own reads would miss.
        """
        start = ctypes.c_char.from_buffer(view)
        return int(self._read(self._upper, ctypes.addressof(start), view.nbytes))

    @property
    def unread(self) -> int:
        """Bytes of ciphertext that were received but not decrypted yet."""
        return int(self._library.BIO_ctrl(self._below, _BIO_CTRL_PENDING, 0, None))

    def __del__(self) -> None:
        if self._upper is not None:
            self._library.BIO_free_all(self._upper)
            # errors that a broken connection left in this thread's queue must not reach the next
            # connection
            self._library.ERR_clear_error()


class LongReadTLSSocket(WatchedSocket, ssl.SSLSocket):
    """A TLS socket that makes each long read in one native call, where that is possible.

    A read of more than `LONG` bytes into a socket without a timeout then returns when the buffer is
    full or the connection has ended. One thread at a time may use the socket, as with every
    ``SSLSocket``; another thread may shut it down with ``socket.shutdown``, or close it.
    """

    _chain: _Chain | None = None
    _tried = False

    @property
    def fills_buffers(self) -> bool:  # type: ignore[override]
        return self._chain is not None if self._tried else is_available()

    @property
    def has_unread(self) -> bool:  # type: ignore[override]
        return self.pending() > 0 or (self._chain is not None and self._chain.unread > 0)

    def getpeername(self) -> Any:
        """Returns the peer's address, as needed by the handshake; closes a broken socket.

        If the connection was broken just before (by the peer or another thread), Python takes the
        socket for one that is still to be connected, and does not close it.

        Raises:
            ConnectionResetError: If the connection was broken before TLS began.
        """
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
        """Performs the handshake; closes the socket if that fails, also by a KeyboardInterrupt."""
        try:
            super().do_handshake(block)
        except BaseException:
            self.close()
            raise

    def recv_into(self, buffer: WriteableBuffer, nbytes: int | None = None, flags: int = 0) -> int:
        """Receives into `buffer`: a long read in one native call, others as ``SSLSocket`` does."""
        view = memoryview(buffer).cast("B")
        wanted = min(nbytes, view.nbytes) if nbytes else view.nbytes
        if wanted > LONG and not flags and self.gettimeout() is None:
            chain = self._chain or self._new_chain()
            if chain is not None and chain.sslobj is self._sslobj:  # type: ignore[attr-defined]
                count = chain.read_into(view[:wanted])
                if count > 0:
                    return count
        # Python's read meets the same end or error; or a signal interrupted, whose handler has run
        # by now
        return ssl.SSLSocket.recv_into(self, buffer, nbytes, flags)

    def _new_chain(self) -> _Chain | None:
        if self._tried:
            return None
        self._tried = True
        try:
            self._chain = _Chain(self)
        except _UnfitError as exc:
            # as text: a log record that is kept must not keep the connection
            why = str(exc)
            logger.debug("TLS connections are read record by record, which is slower: %s", why)
        else:
            logger.debug("TLS connections are read in whole buffers, without the GIL")
        return self._chain

    def _real_close(self) -> None:
        """Closes the socket once no file object uses it any more; ``socket.close`` calls this."""
        self._chain = None
        super()._real_close()  # type: ignore[misc]
