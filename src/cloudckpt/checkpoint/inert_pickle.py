"""Reads a pickle as a description: nothing that it names is imported, nothing that it calls is run.

A pickle is a program, and an unpickler with an allow-list still carries it out on live classes: it
sets their attributes, hashes keys of any depth, and reserves the memory that it is told to. Here
the opcodes only make stand-ins, from which somebody else builds what he knows.

Dicts and sets stay lists of what is put into them, since to hash a key is to follow it to any
depth. Places of the memo are taken in order only, as Python's picklers do it, and a length reserves
no memory: all of it stays proportional to the pickle.
"""

from __future__ import annotations

import io
import pickletools
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeVar

__all__ = [
    "NO_STATE",
    "Called",
    "Dict",
    "Global",
    "RefusedError",
    "Set",
    "describe",
    "full_name",
    "home",
]

T = TypeVar("T")

NO_STATE: Any = object()
"""The state of what was made without one; None is a state."""


_HOMES = {"pathlib._local": "pathlib", "__builtin__": "builtins", "__mp_main__": "__main__"}


def home(module: str) -> str:
    """What a module is called in all versions of Python: 3.13 has its paths in another one.

    The script that trains has another name in its saving process.
    """
    return _HOMES.get(module, module)


def full_name(module: str, name: str) -> str:
    """The name of a class or function with that of its module."""
    return f"{home(module)}.{name}"


class RefusedError(Exception):
    """A pickle that is whole does what no writer of checkpoints does; the text says what."""


class Global:
    """The full name of a class, a function or a constant, as this version of Python has it."""

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[[Any], Any] | None = None) -> None:
        self.name = name
        self.make = make


class Called:
    """What a call would return.

    Attributes:
        function: What would be called.
        arguments: What with; for ``new_ex`` the positional and the keyword arguments.
        form: Whether that is ``function`` itself, its ``__new__``, or whoever reads the pickle,
            who would be asked for what the pickle calls ``arguments``.
        state: What would be given to ``__setstate__``, or put into ``__dict__``.
        contents: What would be put into it: a :class:`Dict` or a list, or None.
    """

    __slots__ = ("arguments", "contents", "form", "function", "state")

    def __init__(
        self, function: Any, arguments: Any, form: Literal["call", "new", "new_ex", "persistent"]
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.form = form
        self.state = NO_STATE
        self.contents: Dict | list[Any] | None = None


class Dict:
    """A dict: its keys and values in turn."""

    __slots__ = ("pairs",)

    def __init__(self) -> None:
        self.pairs: list[Any] = []


class Set:
    """A set."""

    __slots__ = ("entries", "is_frozen")

    def __init__(self, entries: list[Any], *, is_frozen: bool) -> None:
        self.entries = entries
        self.is_frozen = is_frozen


def describe(
    data: bytes | bytearray,
    end: int | None = None,
    makers: Mapping[str, Callable[[Any], Any]] = MappingProxyType({}),
    *,
    persistent: bool = False,
) -> Any:
    """What the pickle in the first ``end`` bytes of ``data`` describes.

    It consists of None, bools, ints, floats, strs, bytes, bytearrays, tuples and lists as they are,
    and of the stand-ins of this module. It may contain itself, and be nested to any depth.

    Args:
        data: Where the pickle is.
        end: Where it must have ended; default: at the end of ``data``.
        makers: For globals whose calls make immutable values: what makes them, of arguments that
            may be anything; it raises ValueError for wrong ones.
        persistent: Whether it may ask whoever reads it for objects, as ``torch.save`` does for
            storages.

    Raises:
        RefusedError: If it does what no writer of checkpoints does.
        ValueError: If it is damaged, or no pickle.
    """
    names: dict[tuple[str, str], Global] = {}
    end = len(data) if end is None else end
    try:
        return _run(data, end, names, makers, persistent)
    except RefusedError as refused:
        if not _is_pickle(data):
            raise ValueError(str(refused)) from None
        named = ", ".join(one.name for one in list(names.values())[:8])
        raise RefusedError(f"{refused}{f' (it names {named})' if named else ''}") from None
    except (IndexError, struct.error) as exc:
        raise ValueError(str(exc)) from exc


def _is_pickle(data: bytes | bytearray) -> bool:
    """Whether the data are opcodes up to the last, or as far as it is worth a look."""
    try:
        for _, _, position in pickletools.genops(io.BytesIO(data)):
            if (position or 0) > _WORTH_A_LOOK:
                break
    except Exception:  # noqa: BLE001 - it decodes whatever is there
        return False
    return True


_U32 = struct.Struct("<I").unpack_from
_I32 = struct.Struct("<i").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_F64 = struct.Struct(">d").unpack_from


def _text(data: bytes | bytearray) -> str:
    return str(data, "utf-8", "surrogatepass")


_COUNTED: Mapping[int, tuple[int, Callable[[bytes | bytearray], Any]]] = {
    0x58: (4, _text),  # BINUNICODE
    0x8D: (8, _text),  # BINUNICODE8
    0x43: (1, bytes),  # SHORT_BINBYTES
    0x42: (4, bytes),  # BINBYTES
    0x8E: (8, bytes),  # BINBYTES8
    0x96: (8, bytearray),  # BYTEARRAY8
}
"""Opcodes before a length: its bytes, and what is made of the bytes behind it."""
_NEWEST_PROTOCOL = 5
_WORTH_A_LOOK = 1 << 16

# what follows EMPTY_TUPLE where an instance begins: NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK
_INSTANCE = b"\x81\x94}\x94("
# what follows a tuple that is the one argument of a call: MEMOIZE, TUPLE1, MEMOIZE, REDUCE, MEMOIZE
_ARGUMENT = b"\x94\x85\x94R\x94"


def _run(
    data: bytes | bytearray,
    end: int,
    names: dict[tuple[str, str], Global],
    makers: Mapping[str, Callable[[Any], Any]],
    persistent: bool,
) -> Any:
    """The loop over the opcodes: those of large metadata first, and their usual sequences at once.

    Each mark begins a stack of its own. What takes more than is there, of a stack, of the memo or
    of the data, ends in an IndexError; so does the next opcode behind a length that is too large.
    """
    at = 0
    memo: list[Any] = []
    stack: list[Any] = []
    below: list[list[Any]] = []
    while True:
        op = data[at]
        at += 1
        if op == 0x6A:  # LONG_BINGET
            stack.append(memo[_U32(data, at)[0]])
            at += 4
        elif op == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif op == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif op == 0x4D:  # BININT2
            stack.append(data[at] | data[at + 1] << 8)
            at += 2
        elif op == 0x29:  # EMPTY_TUPLE
            if data.startswith(_INSTANCE, at):
                at += 5
                instance, fields = Called(stack[-1], (), "new"), Dict()
                memo.append(instance)
                memo.append(fields)
                stack[-1] = instance
                stack.append(fields)
                below.append(stack)
                stack = []
            else:
                stack.append(())
        elif op == 0x75:  # SETITEMS
            items = stack
            stack = below.pop()
            target = stack[-1]
            if type(target) is Dict and not target.pairs and not len(items) & 1:
                target.pairs = items
            else:
                _set_items(target, items)
        elif op == 0x62:  # BUILD
            state = stack.pop()
            target = stack[-1]
            if type(target) is not Called or target.state is not NO_STATE:
                raise RefusedError(f"changes {_kind(target)}")
            target.state = state
        elif op == 0x86 or op == 0x85 or op == 0x87:  # TUPLE2, TUPLE1, TUPLE3
            last = stack.pop()
            if op == 0x86:
                value: tuple[Any, ...] = (stack.pop(), last)
            elif op == 0x85:
                value = (last,)
            else:
                middle = stack.pop()
                value = (stack.pop(), middle, last)
            if data.startswith(_ARGUMENT, at):
                at += 5
                arguments = (value,)
                stack[-1] = made = _call(stack[-1], arguments)
                memo.append(value)
                memo.append(arguments)
                memo.append(made)
            else:
                stack.append(value)
        elif op == 0x4A:  # BININT
            stack.append(_I32(data, at)[0])
            at += 4
        elif op == 0x94:  # MEMOIZE
            memo.append(stack[-1])
        elif op == 0x8C:  # SHORT_BINUNICODE
            start, at = at + 1, at + 1 + data[at]
            stack.append(str(data[start:at], "utf-8", "surrogatepass"))
        elif op == 0x28:  # MARK
            below.append(stack)
            stack = []
        elif op == 0x31:  # POP_MARK
            stack = below.pop()
        elif op == 0x7D:  # EMPTY_DICT
            stack.append(Dict())
        elif op == 0x81:  # NEWOBJ
            arguments = _a(tuple, stack.pop())
            stack.append(Called(stack.pop(), arguments, "new"))
        elif op == 0x52:  # REDUCE
            arguments = _a(tuple, stack.pop())
            stack.append(_call(stack.pop(), arguments))
        elif op == 0x71 or op == 0x72:  # BINPUT, LONG_BINPUT
            place, at = (data[at], at + 1) if op == 0x71 else (_U32(data, at)[0], at + 4)
            if place != len(memo):
                raise RefusedError("takes places of the memo out of order")
            memo.append(stack[-1])
        elif op in _COUNTED:
            width, made_of = _COUNTED[op]
            start = at + width
            at = start + int.from_bytes(data[at:start], "little")
            stack.append(made_of(data[start:at]))
        elif op == 0x74:  # TUPLE
            items = stack
            stack = below.pop()
            stack.append(tuple(items))
        elif op == 0x73:  # SETITEM
            items = stack[-2:]
            del stack[-2:]
            _set_items(stack[-1], items)
        elif op == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif op == 0x65:  # APPENDS
            items = stack
            stack = below.pop()
            _append(stack[-1], items)
        elif op == 0x61:  # APPEND
            items = [stack.pop()]
            _append(stack[-1], items)
        elif op == 0x93:  # STACK_GLOBAL
            name = stack.pop()
            stack.append(_global(stack.pop(), name, names, makers))
        elif op == 0x63:  # GLOBAL
            newline = data.index(b"\n", at)
            stop = data.index(b"\n", newline + 1)
            module, name = data[at:newline].decode(), data[newline + 1 : stop].decode()
            stack.append(_global(module, name, names, makers))
            at = stop + 1
        elif op == 0x4E:  # NONE
            stack.append(None)
        elif op == 0x88 or op == 0x89:  # NEWTRUE, NEWFALSE
            stack.append(op == 0x88)
        elif op == 0x8A:  # LONG1
            start, at = at + 1, at + 1 + data[at]
            stack.append(int.from_bytes(data[start:at], "little", signed=True))
        elif op == 0x47:  # BINFLOAT
            stack.append(_F64(data, at)[0])
            at += 8
        elif op == 0x8F:  # EMPTY_SET
            stack.append(Set([], is_frozen=False))
        elif op == 0x90:  # ADDITEMS
            items = stack
            stack = below.pop()
            _a(Set, stack[-1]).entries.extend(items)
        elif op == 0x91:  # FROZENSET
            items = stack
            stack = below.pop()
            stack.append(Set(items, is_frozen=True))
        elif op == 0x92:  # NEWOBJ_EX
            keywords, arguments = _a(Dict, stack.pop()), _a(tuple, stack.pop())
            stack.append(Called(stack.pop(), (arguments, keywords), "new_ex"))
        elif op == 0x51 and persistent:  # BINPERSID
            stack.append(Called(None, stack.pop(), "persistent"))
        elif op == 0x95:  # FRAME
            at += 8
        elif op == 0x80:  # PROTO
            if data[at] > _NEWEST_PROTOCOL:
                raise ValueError(f"a pickle of protocol {data[at]}")
            at += 1
        elif op == 0x2E:  # STOP
            if at > end or below or len(stack) != 1:
                raise ValueError("a pickle that ends too late or too early")
            return stack[0]
        else:
            for known in pickletools.opcodes:
                if known.code == chr(op):
                    raise RefusedError(f"uses the opcode {known.name}")
            raise ValueError(f"{op:#x} is no opcode")


def _a(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _global(
    module: object,
    name: object,
    names: dict[tuple[str, str], Global],
    makers: Mapping[str, Callable[[Any], Any]],
) -> Global:
    key: tuple[str, str] = _a(str, module), _a(str, name)
    found = names.get(key)
    if found is None:
        full = full_name(*key)
        found = names[key] = Global(full, makers.get(full))
    return found


def _call(function: Any, arguments: Any) -> Any:
    if type(function) is Global and function.make is not None:
        return function.make(arguments)
    return Called(function, arguments, "call")


def _set_items(target: Any, items: list[Any]) -> None:
    if len(items) % 2:
        raise ValueError("a key without a value")
    if type(target) is Called:
        if target.contents is None:
            target.contents = Dict()
        target = target.contents
    described = _a(Dict, target)
    if described.pairs:
        described.pairs += items
    else:
        described.pairs = items


def _append(target: Any, items: list[Any]) -> None:
    if type(target) is Called:
        if target.contents is None:
            target.contents = []
        target = target.contents
    _a(list, target).extend(items)


def _kind(target: Any) -> str:
    while type(target) is Called:
        target = target.function
    return target.name if type(target) is Global else f"a {type(target).__name__}"
