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
are known. No version is asked: each connection proves it anew, see :func:`_ssl_of`. Where that
fails, as in a Python into which OpenSSL is linked unseen, the connection takes the plain way.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import io
import logging
import os
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

_AHEAD = 8 * 1024
"""Bytes that are read ahead where an answer begins. From Python 3.14 on it would be 128 KiB by
itself: a long read, which waits for what the server does not send."""

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
    """Why this interpreter reads TLS the plain way; if None, each connection decides for itself."""
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
    if sys.implementation.name != "cpython":
        raise _UnfitError(f"the Python implementation is {sys.implementation.name}, not CPython")
    if sys.platform != "linux":
        raise _UnfitError(f"the platform is {sys.platform}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise _UnfitError("the Python is free-threaded")
    import _ssl

    # None: Python's own executable and what it has loaded, if OpenSSL's names can be seen there
    path = getattr(_ssl, "__file__", None)
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
            ("BIO_s_socket", pointer, ()),
            ("BIO_up_ref", number, (pointer,)),
            ("ERR_clear_error", None, ()),
            ("SSL_get_SSL_CTX", pointer, (pointer,)),
            ("SSL_get_ex_data", pointer, (pointer, number)),
            ("SSL_get_fd", number, (pointer,)),
            ("SSL_get_rbio", pointer, (pointer,)),
            ("SSL_set0_rbio", None, (pointer, pointer)),
            ("SSL_set_quiet_shutdown", None, (pointer, number)),
            ("TLS_method", pointer, ()),
            ("dladdr", number, (pointer, pointer)),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        read = ctypes.CDLL(path).BIO_read
        read.restype, read.argtypes = number, (pointer, pointer, number)
    except (AttributeError, OSError) as exc:
        where = "linked into Python" if path is None else "not accessible"
        raise _UnfitError(f"OpenSSL is {where}: {exc}") from exc
    return _OpenSSL(read, library)


_WORD = ctypes.sizeof(ctypes.c_void_p)
_FIRST = 4  # words of a BIO or an SSL among which its table of methods is, from OpenSSL 1.1 to 3.6

_Words = tuple[int, ...]


def _words(address: int) -> _Words:
    """The first words at any address, of which nothing is known yet.

    The kernel reads them, as what is to be written to a pipe: if they can't be read it says so, and
    nothing crashes. Only a few pages are certain to fit, and here it is a few words.

    Raises:
        _UnfitError: If there is no memory, or none that can be read.
    """
    if not address or address % _WORD or address >= 1 << (8 * _WORD - 1):
        raise _UnfitError("a pointer to OpenSSL's TLS connection is null")
    there = (ctypes.c_char * (_FIRST * _WORD)).from_address(address)
    try:
        taken, given = os.pipe()
        try:
            os.write(given, there)
            data = os.read(taken, ctypes.sizeof(there))
        finally:
            os.close(given)
            os.close(taken)
    except OSError as exc:
        raise _UnfitError(
            f"a pointer to OpenSSL's TLS connection can't be followed: {exc}"
        ) from exc
    return tuple(memoryview(data).cast("P"))


class _Loaded(ctypes.Structure):
    """``Dl_info`` of dlfcn.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _loaded(address: int, library: ctypes.PyDLL) -> int | None:
    """Where the library begins that an address is in; the address itself is not followed."""
    found = _Loaded()
    return found.base if library.dladdr(address, ctypes.byref(found)) else None


def _own_words(thing: Any, kind: type, count: int) -> _Words:
    """The first members of one of Python's objects, which are its own memory by its size.

    Raises:
        _UnfitError: If it is another kind of object, or a smaller one.
    """
    head = object.__basicsize__
    if not isinstance(thing, kind) or type(thing).__basicsize__ < head + count * _WORD:
        raise _UnfitError("Python's TLS connection object has an unknown layout")
    return tuple((ctypes.c_size_t * count).from_address(id(thing) + head))


def _ssl_of(sock: ssl.SSLSocket, sslobj: Any, library: ctypes.PyDLL) -> int:
    """The ``SSL*`` of a socket, proven in this order; nothing is followed before it is known.

    1. It stands in Python's object between the two pointers that are known.
    2. Its first words can be read: the kernel has tried. One of them points into the library that
       has ``TLS_method``. Only what is libssl's, and made by this copy of it, has a table of
       methods there: not Python's objects, not BIOs of sockets, not sessions.
    3. It is no ``SSL_CTX``, which has such a table, too: it is not the one of Python's context.
    4. So it is an ``SSL``, and may be asked: it knows this object, this context, this socket.
    5. What it reads from is a socket's BIO of the libcrypto that is called here.

    Raises:
        _UnfitError: If it can't be proven that it is one.
    """
    import _ssl

    # struct PySSLSocket { PyObject_HEAD; PyObject *Socket; SSL *ssl; PySSLContext *ctx; ...
    # struct PySSLContext { PyObject_HEAD; SSL_CTX *ctx; ...
    # Socket is a weak reference without a callback, of which an object has but one.
    reference = weakref.ref(sock)
    kind = _ssl._SSLSocket  # type: ignore[attr-defined]
    before, found, behind = _own_words(sslobj, kind, 3)
    context = sslobj.context
    if before != id(reference) or behind != id(context):
        raise _UnfitError("Python's TLS connection object has an unknown layout")
    [shared] = _own_words(context, _ssl._SSLContext, 1)
    home = _loaded(library.TLS_method(), library)
    if found == shared or home is None:
        raise _UnfitError("Python's TLS connection object has an unknown layout")
    if all(_loaded(word, library) != home for word in _words(found)):
        raise _UnfitError("the OpenSSL library that was loaded is not the one that Python uses")
    if library.SSL_get_ex_data(found, _APP_DATA) != id(sslobj):
        raise _UnfitError("OpenSSL's TLS connection does not refer to Python's object")
    if library.SSL_get_SSL_CTX(found) != shared:
        raise _UnfitError("OpenSSL's TLS connection has an unexpected context")
    if library.SSL_get_fd(found) != sock.fileno():
        raise _UnfitError("OpenSSL's TLS connection has an unexpected socket")
    if library.BIO_s_socket() not in _words(library.SSL_get_rbio(found) or 0):
        raise _UnfitError("OpenSSL's TLS connection does not read from its socket")
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
            raise _UnfitError("OpenSSL could not allocate its buffers (BIO)")
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


def has_unread(sock: ssl.SSLSocket) -> bool:
    """Whether more has come by TLS than was asked for, and is in the kernel no longer."""
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

    fills_buffers = True
    """Whether a long read returns less only if the connection ends, fails, or has no more."""

    def makefile(self, mode: str = "r", buffering: int | None = None, **text: Any) -> Any:
        """As that of ``socket``; what http.client reads answers from is a :class:`BodyReader`."""
        file = super().makefile(mode, buffering, **text)  # type: ignore[call-overload]
        if type(file) is not io.BufferedReader:
            return file
        return BodyReader(file.detach(), _AHEAD if buffering is None else buffering)

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
    """A TLS connection that is closed if it can't be made; read record by record.

    Nobody else has the socket meanwhile, and Python closes it only behind errors of the handshake:
    not behind an interrupt, and not if the connection was broken just before, by the peer or by
    another thread, which it takes for one that is still to be connected.
    """

    @property
    def obstacle(self) -> str | None:
        """Why long reads are not made by whole buffers and without the GIL; None if they are."""
        return "native_tls is off"

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
    _why_not: str | None = None

    @property
    def obstacle(self) -> str | None:
        """Why this connection takes the plain way; None if it does not. It is found out once."""
        if not self._tried:
            self._new_chain()
        return self._why_not

    @property
    def fills_buffers(self) -> bool:  # type: ignore[override]
        return self._why_not is None if self._tried else obstacle() is None

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
            self._why_not = str(exc)
            logger.debug(
                "TLS connections are read record by record, which is slower: %s", self._why_not
            )
        else:
            logger.debug("TLS connections are read in whole buffers, without the GIL")
        return self._chain

    def _real_close(self) -> None:
        """Where ``socket`` closes, once nobody reads through a file object any more."""
        self._chain = None
        super()._real_close()  # type: ignore[misc]
