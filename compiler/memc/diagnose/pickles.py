"""Reading a pickle without running it: containers, text, bytes and numbers, nothing else.

The standard unpickler can build only what its opcodes name, but some of them call any function, and others reserve any
amount of memory before a byte is checked. This one knows the opcodes that plain data needs (protocols 2 to 5) and
refuses the rest, so there is nothing in it that could import, call or build an object.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NoReturn

from memc.errors import MemcError, usage_error

MAX_BYTES = 1 << 30
MAX_OPERATIONS = 60_000_000
_MAX_INT_BYTES = 16
_MARK = object()
_CALLING = {
    b"c": "imports a name (GLOBAL)",
    b"\x93": "imports a name (STACK_GLOBAL)",
    b"i": "builds an object (INST)",
    b"o": "builds an object (OBJ)",
    b"R": "calls a function (REDUCE)",
    b"b": "sets an object's state (BUILD)",
    b"\x81": "builds an object (NEWOBJ)",
    b"\x92": "builds an object (NEWOBJ_EX)",
    b"\x82": "names an extension",
    b"\x83": "names an extension",
    b"\x84": "names an extension",
    b"P": "names an outside object (PERSID)",
    b"Q": "names an outside object (BINPERSID)",
}


def plain_value(data: bytes) -> Any:
    """Returns the value in a pickle that holds plain data only.

    Raises:
        MemcError: ``pickle-refused`` when it would import, call or build anything; ``pickle-broken`` when it is cut off
            or no pickle; ``pickle-too-large`` beyond 1 GiB or 60 million operations.
    """
    if len(data) > MAX_BYTES:
        raise usage_error("pickle-too-large", f"the snapshot has {len(data):,} bytes; at most {MAX_BYTES:,} are read")
    return _Reader(data).run()


class _Reader:
    """One run over the bytes: a stack, a memo, a position. Nothing recurses, so depth costs only memory."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        steps = _STEPS
        try:
            for _ in range(MAX_OPERATIONS):
                code = self.data[self.at : self.at + 1]
                self.at += 1
                if code == b".":
                    if self.stack[-1] is _MARK:
                        raise IndexError
                    return self.stack[-1]
                step = steps.get(code)
                if step is None:
                    self._refuse(code)
                step(self)
        except (IndexError, KeyError, struct.error, TypeError, UnicodeDecodeError) as error:
            raise self._error(f"it is cut off or damaged near byte {self.at:,}") from error
        raise usage_error("pickle-too-large", f"the snapshot has more than {MAX_OPERATIONS:,} operations")

    def take(self, size: int) -> bytes:
        """Returns the next `size` bytes; sizes are checked against what is there before anything is reserved."""
        if size > len(self.data) - self.at:
            self._broken(f"it announces {size:,} bytes and has {len(self.data) - self.at:,}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def above_mark(self) -> list[Any]:
        """Returns what was pushed since the last mark, and drops both."""
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def container(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise TypeError
        return self.stack[-1]

    def _refuse(self, code: bytes) -> NoReturn:
        if code in _CALLING:
            raise usage_error(
                "pickle-refused",
                f"the file {_CALLING[code]} at byte {self.at - 1:,}; a memory snapshot holds plain data only, so this "
                "is something else, and reading it would run its code",
                hint="give the file that torch.cuda.memory._dump_snapshot wrote",
            )
        if code == b"":
            raise IndexError
        self._broken(f"byte {self.at - 1:,} ({code!r}) is no operation of plain data")

    def _broken(self, why: str) -> NoReturn:
        raise self._error(why)

    def _error(self, why: str) -> MemcError:
        hint = "give a whole file that torch.cuda.memory._dump_snapshot wrote"
        return usage_error("pickle-broken", f"the file is no readable snapshot: {why}", hint=hint)


def _push(make: Callable[[_Reader], Any]) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(make(reader))


def _int(size: int, *, signed: bool = False) -> Callable[[_Reader], None]:
    return _push(lambda reader: int.from_bytes(reader.take(size), "little", signed=signed))


def _text(size: int) -> Callable[[_Reader], None]:
    return _push(lambda reader: reader.take(reader.number(size)).decode("utf-8", "surrogatepass"))


def _bytes(size: int) -> Callable[[_Reader], None]:
    return _push(lambda reader: reader.take(reader.number(size)))


def _long(size: int) -> Callable[[_Reader], None]:
    def read(reader: _Reader) -> int:
        length = reader.number(size)
        if length > _MAX_INT_BYTES:
            raise TypeError
        return int.from_bytes(reader.take(length), "little", signed=True)

    return _push(read)


def _protocol(reader: _Reader) -> None:
    if reader.number(1) > 5:
        raise TypeError


def _frame(reader: _Reader) -> None:
    reader.take(8)


def _memoize(index: Callable[[_Reader], int]) -> Callable[[_Reader], None]:
    def store(reader: _Reader) -> None:
        at, value = index(reader), reader.stack[-1]
        if value is _MARK:
            raise TypeError
        reader.memo[at] = value

    return store


def _recall(size: int) -> Callable[[_Reader], None]:
    return _push(lambda reader: reader.memo[reader.number(size)])


def _tuple(size: int) -> Callable[[_Reader], None]:
    def make(reader: _Reader) -> None:
        items = tuple(reader.stack[-size:])
        if len(items) < size or _MARK in items:
            raise IndexError
        del reader.stack[-size:]
        reader.stack.append(items)

    return make


def _append(reader: _Reader) -> None:
    value = reader.stack.pop()
    reader.container(list).append(value)


def _appends(reader: _Reader) -> None:
    items = reader.above_mark()
    reader.container(list).extend(items)


def _set_items(reader: _Reader, items: list[Any]) -> None:
    target = reader.container(dict)
    if len(items) % 2:
        raise IndexError
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str | int):
            raise TypeError
        target[key] = value


def _set_item(reader: _Reader) -> None:
    items = reader.stack[-2:]
    del reader.stack[-2:]
    _set_items(reader, items)


_STEPS: dict[bytes, Callable[[_Reader], None]] = {
    b"\x80": _protocol,
    b"\x95": _frame,
    b"(": lambda reader: reader.stack.append(_MARK),
    b"}": _push(lambda _: {}),
    b"]": _push(lambda _: []),
    b")": _push(lambda _: ()),
    b"N": _push(lambda _: None),
    b"\x88": _push(lambda _: True),
    b"\x89": _push(lambda _: False),
    b"K": _int(1),
    b"M": _int(2),
    b"J": _int(4, signed=True),
    b"\x8a": _long(1),
    b"\x8b": _long(4),
    b"G": _push(lambda reader: struct.unpack(">d", reader.take(8))[0]),
    b"\x8c": _text(1),
    b"X": _text(4),
    b"\x8d": _text(8),
    b"C": _bytes(1),
    b"B": _bytes(4),
    b"\x8e": _bytes(8),
    b"\x94": _memoize(lambda reader: len(reader.memo)),
    b"q": _memoize(lambda reader: reader.number(1)),
    b"r": _memoize(lambda reader: reader.number(4)),
    b"h": _recall(1),
    b"j": _recall(4),
    b"a": _append,
    b"e": _appends,
    b"s": _set_item,
    b"u": lambda reader: _set_items(reader, reader.above_mark()),
    b"t": lambda reader: reader.stack.append(tuple(reader.above_mark())),
    b"\x85": _tuple(1),
    b"\x86": _tuple(2),
    b"\x87": _tuple(3),
}
