"""Writes the pickle of torch's ``Metadata`` from columns, without making the objects in it.

Pickling half a million chunks takes seven seconds and 700 MiB, most of it for Python objects that
exist only for this purpose. The opcodes of all chunks with the same number of dimensions differ
only in numbers. So one chunk is pickled, with a mark in place of each number; its bytes are
repeated as rows, and the columns of numbers are copied over the marks. Names are written once, at
the beginning, and then referred to by their numbers in the memo.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from cloudckpt.checkpoint.columns import byte_rows, counted, raw_bytes, repeated
from cloudckpt.checkpoint.lazy import save_id_of
from cloudckpt.checkpoint.record import Extents, Record
from cloudckpt.checkpoint.table import Form, Table
from cloudckpt.checkpoint.torch_private import CURRENT_DCP_VERSION, MemoryFormat, StorageInfo

__all__ = ["metadata_pickle"]

_MARK, _TUPLE, _DICT, _SET = b"(", b"t", b"}", b"u"
_MEMOIZE, _GET, _NONE, _STOP, _DROP_ALL = b"\x94", b"j", b"N", b".", b"1"

_REPEATED = (
    *(TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex),
    *(StorageInfo, torch.Size, "properties", "size", "chunks", "offsets", "sizes", "fqn", "index"),
    *("offset", "relative_path", "length"),
)
_FIRST = 0x7F << 24  # the first mark of four bytes; one of eight bytes has them above four zeros


def metadata_pickle(record: Record) -> bytes:
    """Returns the pickle of torch's metadata for a record with a table."""
    assert record.table is not None
    return _Opcodes(record, record.table).made()


def _state_of(properties: TensorProperties) -> tuple[Any, ...]:
    """Reduces a tensor's properties for pickling, without strides, which torch 2.14 can't read."""
    state = (
        *(properties.dtype, properties.layout, properties.requires_grad),
        *(MemoryFormat.TORCH_CONTIGUOUS_FORMAT, properties.pin_memory),
    )
    return copyreg.__newobj__, (TensorProperties,), state  # type: ignore[attr-defined]


def _coded(value: Any) -> bytes:
    """Returns only the opcodes that make a value: no header, memo, frames or end of a pickle."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 2)
    pickler.fast = True
    pickler.dispatch_table = {
        **copyreg.dispatch_table,
        TensorProperties: _state_of,
        # some versions of Python 3.11 name the member instead
        MemoryFormat: lambda member: (MemoryFormat, (member.value,)),
    }
    pickler.dump(value)
    return file.getvalue()[2:-1]


class _Opcodes:
    def __init__(self, record: Record, table: Table) -> None:
        self._record, self._table = record, table
        self._parts: list[bytes] = []
        self._count = 0  # values in the memo
        self._gets: dict[bytes, bytes] = {}  # by the opcodes that make a value, later ones first

    def made(self) -> bytes:
        """Returns the pickle: first all values that are used repeatedly, then the metadata."""
        table, record = self._table, self._record
        self._parts += (b"\x80\x04", _MARK)
        for value in _REPEATED:
            self._remember(value)
        forms = list(map(self._form, table.forms))
        self._first_name = self._count
        for text in (*table.names, *(one.name for one in record.objects)):
            self._memoize(_text(text))
        self._parts.append(_DROP_ALL)
        entries, paths, places = range(_FIRST, _FIRST + 3)
        meta = StorageMeta(save_id=save_id_of(record.attempt))
        rest = _coded(Metadata(entries, paths, places, meta, CURRENT_DCP_VERSION))  # type: ignore[arg-type]
        writers: dict[int, Callable[[], None]] = {
            entries: functools.partial(self._entries, forms),
            paths: self._paths,
            places: self._places,
        }
        for mark, write in writers.items():
            before, _, rest = rest.partition(_coded(mark))
            self._parts.append(before)
            write()
        self._parts += (rest, _STOP)
        return b"".join(self._parts)

    def _memoize(self, code: bytes) -> None:
        self._parts += (code, _MEMOIZE)
        self._count += 1

    def _remember(self, value: Any) -> None:
        """Adds a value to the pickle's memo, unless the memo has it already.

        The memo may have at most 256 values then, as they are recalled by an index of one byte.
        """
        if (code := _coded(value)) not in self._gets:
            self._memoize(self._short(value))
            self._gets = {code: b"h" + bytes([self._count - 1]), **self._gets}

    def _short(self, value: Any) -> bytes:
        """Returns the opcodes that make a value, with parts from the memo where possible."""
        code = _coded(value)
        for known, get in self._gets.items():
            code = code.replace(known, get)
        return code

    def _form(self, form: Form) -> tuple[bytes, bytes]:
        """Returns the opcodes before and after the chunks of a tensor of this form.

        A value has no chunks: for its form, all opcodes are in the first result, and the second is
        empty.
        """
        if form.shape is None:
            return self._short(BytesStorageMetadata()), b""
        self._remember(form.properties)
        chunks: list[Any] = [_FIRST]
        code = self._short(TensorStorageMetadata(form.properties, torch.Size(form.shape), chunks))
        before, _, after = code.partition(_coded(_FIRST) + b"a")
        return before + _MARK, b"e" + after

    def _entries(self, forms: Sequence[tuple[bytes, bytes]]) -> None:
        table = self._table
        rows: dict[int, tuple[bytes, int]] = {}
        for dims, chunks in table.chunks.items():
            columns = [*chunks.offsets.unbind(1), *chunks.sizes.unbind(1)]

            def chunk(*numbers: int, dims: int = dims) -> ChunkStorageMetadata:
                return ChunkStorageMetadata(torch.Size(numbers[:dims]), torch.Size(numbers[dims:]))

            made = self._rows(chunk, columns, len(chunks.sizes))
            rows[dims] = raw_bytes(made.view(-1)), made.shape[1]
        parts = self._parts
        parts += (_DICT, _MARK)
        numbers = (table.form_of, table.dims, table.places, table.counts)
        columns_of = (column.numpy().data for column in numbers)
        for number, (form, dims, place, count) in enumerate(zip(*columns_of, strict=True)):
            before, after = forms[form]
            packed, length = rows.get(dims, (b"", 0))
            chunks_of_name = packed[place * length : (place + count) * length]
            fqn = (self._first_name + number).to_bytes(4, "little")
            parts += (_GET, fqn, before, chunks_of_name, after)
        parts.append(_SET)

    def _paths(self) -> None:
        paths, names = self._table.paths, self._table.names
        if paths is None:
            self._parts.append(_NONE)
            return

        def text(value: str) -> bytes:
            if (number := names.get(value)) is None:
                return _text(value)
            return _GET + (self._first_name + number).to_bytes(4, "little")

        self._parts += (_DICT, _MARK)
        for name, path in paths.items():
            elements = (text(one) if isinstance(one, str) else _coded(one) for one in path)
            self._parts += (text(name), _MARK, *elements, _TUPLE)
        self._parts.append(_SET)

    def _places(self) -> None:
        table, extents = self._table, self._record.extents
        self._parts += (_DICT, _MARK)
        for dims, chunks in table.chunks.items():
            of_dims = (table.dims == dims).nonzero().view(-1)
            counts = table.counts[of_dims]
            names = repeated(of_dims, counts)
            hints = counted(0, len(chunks.sizes)) - repeated(table.places[of_dims], counts)
            columns = (hints, *chunks.offsets.unbind(1))
            self._places_of(names, extents.at(table.chunk_rows[dims]), columns)
        of_values = (table.dims == -1).nonzero().view(-1)
        self._places_of(of_values, extents.at(table.firsts[of_values]), ())
        self._parts.append(_SET)

    def _places_of(
        self, names: torch.Tensor, extents: Extents, indices: Sequence[torch.Tensor]
    ) -> None:
        """Pickles entries of torch's ``storage_data``: the index and the location of each item.

        Args:
            names: The names of the items, as numbers.
            extents: The locations of the items.
            indices: Columns with the index of each chunk within its tensor, and its offsets; empty
                for values that are not tensors.
        """

        def place(name: int, number: int, offset: int, length: int, *index: int) -> Any:
            at = (torch.Size(index[1:]), index[0]) if index else ()
            return [MetadataIndex(name, *at), StorageInfo(number, offset, length)]  # type: ignore[arg-type]

        objects = extents.objects + len(self._table.names)
        gets = [column + self._first_name for column in (names, objects)]
        columns = [*gets, extents.offsets, extents.lengths, *indices]
        made = self._rows(place, columns, names.numel(), recalled=2)
        self._parts.append(raw_bytes(made[:, 2:-1].reshape(-1)))  # without the list around it

    def _rows(
        self,
        make: Callable[..., Any],
        columns: Sequence[torch.Tensor],
        count: int,
        recalled: int = 0,
    ) -> torch.Tensor:
        """Returns the opcodes of many values as a matrix of bytes, with one row for each value.

        Args:
            make: Makes a sample value from one number of each column. The opcodes of the sample are
                repeated for each row, with that row's numbers.
            columns: The numbers, none negative.
            count: The length of each column, which is the number of values.
            recalled: How many of the first columns have memo indices: instead of such a number, the
                value at this index of the memo is recalled.
        """
        widths = [8 if count and int(column.max()) >= 1 << 31 else 4 for column in columns]
        marks = [(_FIRST + number) << 8 * (width - 4) for number, width in enumerate(widths)]
        row = bytearray(self._short(make(*marks)))
        places = [
            row.index(mark.to_bytes(width, "little"))
            for mark, width in zip(marks, widths, strict=True)
        ]
        for at in places[:recalled]:
            row[at - 1 : at] = _GET
        made = torch.frombuffer(row, dtype=torch.uint8).repeat(count, 1)
        for at, width, column in zip(places, widths, columns, strict=True):
            made[:, at : at + width] = byte_rows(column.to(torch.int32) if width == 4 else column)
        return made


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data
