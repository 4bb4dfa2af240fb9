"""How much memory a Parquet file takes when it is read, by its footer and by the header of every page.

Readers of Parquet believe what a file says of itself, and one page of a few bytes may stand for a
billion values. Here the headers alone are read, before any page is. They are in Thrift's compact
protocol, of which this is the part that Parquet uses (parquet-format, `parquet.thrift`).
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"PAR1"
MAX_FOOTER_BYTES = 2**24
MAX_HEADER_BYTES = 2**16
MAX_PAGES = 2**14
MAX_DEPTH = 24
VALUE_BYTES = 8
FIRST_LOOK_BYTES = 512  # a page's header is seldom longer
# Numbers of fields in parquet.thrift.
SCHEMA, ROW_GROUPS, COLUMNS, COLUMN_META = 2, 4, 1, 3
ELEMENT_NAME, CHILDREN = 4, 5
CODES_BYTES, DATA_PAGE_OFFSET, DICTIONARY_PAGE_OFFSET = 7, 9, 11
UNCOMPRESSED_BYTES, COMPRESSED_BYTES = 2, 3
PAGE_HEADERS = (5, 7, 8)  # of a data page, of a dictionary, of a data page of version 2; each with its value count
VALUE_COUNT = 1

Struct = dict[int, Any]


class BadParquet(ValueError):
    """A file that is no Parquet, or one whose headers contradict it."""


def decoded_bytes(path: Path, columns: Collection[str] | None = None) -> int:
    """The bytes of all pages unpacked, and of the values that they stand for; of some columns or of all.

    Raises:
        BadParquet: the file is damaged.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        walk = _Walk(file, os.fstat(file.fileno()).st_size)
        return sum(walk.chunk(chunk) for name, chunk in walk.chunks() if columns is None or name in columns)


@dataclass
class _Walk:
    """Goes from page to page of an open file."""

    file: BinaryIO
    size: int
    pages: int = 0

    def chunks(self) -> list[tuple[str, Struct]]:
        """What the footer says of each column of each row group, with the column's name.

        A reader finds a column by its place in the schema, whatever the chunk calls itself.
        """
        self.file.seek(max(0, self.size - 8))
        tail = self.file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != MAGIC or not 0 < length <= min(self.size - 8, MAX_FOOTER_BYTES):
            raise BadParquet("it has no Parquet footer")
        self.file.seek(self.size - 8 - length)
        footer, _ = read_struct(self.file.read(length))
        names = _leaf_columns(_structs(footer.get(SCHEMA, [])))
        groups = [_structs(group.get(COLUMNS, [])) for group in _structs(footer.get(ROW_GROUPS, []))]
        if any(len(group) != len(names) for group in groups):
            raise BadParquet("its footer is damaged")
        return [
            (name, _struct(column.get(COLUMN_META)))
            for group in groups
            for name, column in zip(names, group, strict=True)
        ]

    def chunk(self, meta: Struct) -> int:
        """Memory of one column of one row group, page by page."""
        offsets = [_count(meta.get(field, 0)) for field in (DATA_PAGE_OFFSET, DICTIONARY_PAGE_OFFSET)]
        start = min((offset for offset in offsets if offset), default=0)  # 0 is where no page lies
        length = _count(meta.get(CODES_BYTES))
        if start + length > self.size:
            raise BadParquet("a column of it lies outside of the file")
        at, end, total = start, start + length, 0
        while at < end:
            header, header_bytes = self.header(at, end)
            total += _page_bytes(header)
            at += header_bytes + _count(header.get(COMPRESSED_BYTES))
            self.pages += 1
            if self.pages > MAX_PAGES:
                raise BadParquet("it has more pages than any file of lifetrace")
        return total

    def header(self, at: int, end: int) -> tuple[Struct, int]:
        """A page's header and its length; most are short."""
        for size in (FIRST_LOOK_BYTES, MAX_HEADER_BYTES):
            self.file.seek(at)
            data = self.file.read(min(size, end - at))
            try:
                return read_struct(data)
            except BadParquet:
                if len(data) < size or size == MAX_HEADER_BYTES:
                    raise
        raise AssertionError  # the last size returns or raises


def _leaf_columns(elements: list[Struct]) -> list[str]:
    """The column that each leaf of the schema belongs to: a list of numbers is one column of one leaf, deeper down."""
    found: list[str] = []
    place = 1  # the first element is the root

    def leaves(depth: int) -> int:
        nonlocal place
        if place >= len(elements) or depth > MAX_DEPTH:
            raise BadParquet("its schema is damaged")
        element = elements[place]
        place += 1
        return sum(leaves(depth + 1) for _ in range(_count(element.get(CHILDREN, 0)))) or 1

    while place < len(elements):
        name = elements[place].get(ELEMENT_NAME)
        if not isinstance(name, bytes):
            raise BadParquet("its schema is damaged")
        found += [name.decode("utf-8", "replace")] * leaves(0)
    return found


def _page_bytes(header: Struct) -> int:
    inner = [_struct(header[field]) for field in PAGE_HEADERS if field in header]
    return _count(header.get(UNCOMPRESSED_BYTES)) + VALUE_BYTES * sum(_count(page.get(VALUE_COUNT)) for page in inner)


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise BadParquet("a page of it has no size")
    return value


def _struct(value: Any) -> Struct:
    if not isinstance(value, dict):
        raise BadParquet("its footer is damaged")
    return value


def _structs(values: Any) -> list[Struct]:
    if not isinstance(values, list):
        raise BadParquet("its footer is damaged")
    return [_struct(value) for value in values]


# -- Thrift's compact protocol -----------------------------------------------------------------

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)


def read_struct(data: bytes) -> tuple[Struct, int]:
    """Read a struct by the numbers of its fields; returns it with the bytes that it took.

    Raises:
        BadParquet: it is cut short, or nested too deep.
    """
    reader = _Reader(data)
    try:
        return reader.struct(0), reader.at
    except IndexError:
        raise BadParquet("a header of it is cut short") from None


@dataclass
class _Reader:
    data: bytes
    at: int = 0

    def struct(self, depth: int) -> Struct:
        if depth > MAX_DEPTH:
            raise BadParquet("a header of it is nested too deep")
        fields: Struct = {}
        number = 0
        while (head := self.byte()) != 0:
            number = number + (head >> 4) if head >> 4 else self.integer()
            kind = head & 15
            fields[number] = kind == TRUE if kind in (TRUE, FALSE) else self.value(kind, depth)
        return fields

    def value(self, kind: int, depth: int) -> Any:
        if kind in (I16, I32, I64):
            return self.integer()
        if kind == STRUCT:
            return self.struct(depth + 1)
        if kind in (LIST, SET):
            return self.items(depth + 1)
        if kind == BINARY:
            return self.take(self.varint())
        if kind == DOUBLE:
            return self.take(8)
        if kind in (BYTE, TRUE, FALSE):
            return self.byte()
        raise BadParquet("a header of it holds what Parquet has not")

    def items(self, depth: int) -> list[Any]:
        head = self.byte()
        count = head >> 4 if head >> 4 != 15 else self.varint()
        if count > len(self.data) - self.at:
            raise BadParquet("a header of it is cut short")
        return [self.value(head & 15, depth) for _ in range(count)]

    def integer(self) -> int:
        number = self.varint()
        return (number >> 1) ^ -(number & 1)

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise BadParquet("a header of it holds an endless number")

    def byte(self) -> int:
        byte = self.data[self.at]
        self.at += 1
        return byte

    def take(self, count: int) -> bytes:
        self.at += count
        if self.at > len(self.data):
            raise IndexError
        return self.data[self.at - count : self.at]
