"""Pickles of stock torch, walked through without running them, before anything unpickles them.

Few bytes of a pickle can ask for much: a memo of four billion places, a text of a terabyte,
``bytearray(n)``, a list that holds itself twice and again twice. The walk keeps the stack of the
pickle machine, with the size of each value once every reference is followed in the place of the
value, and ends at the first opcode that asks for more than the file's size warrants.

Source of the opcodes: ``pickletools`` of Python's standard library.
"""

from __future__ import annotations

import math
import pickle
import pickletools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

FOLLOWED = 64  # values reached by following references, for each byte of the pickle...
FLOOR = 1 << 16  # ...and for the whole of a small one
MOST_INT_BYTES = 64
EXPANDED = 64  # elements of a tensor for each one that its storage holds

Strings = frozenset[str]
_ATOMS = {"NONE", "NEWTRUE", "NEWFALSE", "INT", "LONG", "FLOAT", "BINFLOAT"}
_INTS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG"}
_TEXTS = {"STRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_BYTES = {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINSTRING", "SHORT_BINSTRING"}
_EMPTY = {"EMPTY_LIST": "list", "EMPTY_DICT": "dict", "EMPTY_SET": "set"}
_FROM_MARK = {"LIST": "list", "DICT": "dict", "TUPLE": "tuple", "FROZENSET": "frozenset"}
_COUNTED = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_INTO = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
_INTO_MARK = {"APPENDS", "SETITEMS", "ADDITEMS"}


@dataclass(slots=True)
class Cell:
    """What stands for a value: its kind, its size, and what the walk must know of it."""

    kind: str
    weight: int = 1
    value: Any = None
    held: bool = False


@dataclass(slots=True)
class Rules:
    """What a pickle may call; each as ``"module name"``."""

    calls: Strings

    def refuse(self, name: str, args: Sequence[Cell] | None) -> None:
        """Raise for a call that no writer makes, or that makes much of a number."""
        if name not in self.calls:
            raise pickle.UnpicklingError(f"a call of {name} does not belong in a checkpoint")
        if args is None and name in ("_codecs encode", "builtins bytearray"):
            raise pickle.UnpicklingError(f"a call of {name} without plain arguments")
        kinds = [each.kind for each in args or ()]
        if name == "_codecs encode" and (
            kinds != ["text", "text"] or (args or ())[1].value not in ("latin1", "latin-1")
        ):
            raise pickle.UnpicklingError("a call of encode other than to latin1")
        if name == "builtins bytearray" and kinds and kinds[0] not in ("text", "bytes"):
            raise pickle.UnpicklingError(f"bytearray of a {kinds[0]} does not belong here")


@dataclass
class Walk:
    """One pickle, walked.

    Attributes:
        storages: key of each storage that it names -> number of bytes that it claims.
    """

    rules: Rules
    most: int
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Cell] = field(default_factory=dict)
    storages: dict[str, int] = field(default_factory=dict)

    def step(self, name: str, arg: Any) -> None:
        """One opcode."""
        if name in _COUNTED:
            self._gather("tuple", self._take(_COUNTED[name]))
        elif name in _FROM_MARK:
            self._gather(_FROM_MARK[name], self._to_mark())
        elif name in _EMPTY:
            self.stack.append(Cell(_EMPTY[name]))
        elif name in _INTO:
            self._add(self._take(_INTO[name]))
        elif name in _INTO_MARK:
            self._add(self._to_mark())
        elif name in _INTS or name in _ATOMS or name in _TEXTS or name in _BYTES:
            self.stack.append(_atom(name, arg))
        else:
            self._other(name, arg)

    def _other(self, name: str, arg: Any) -> None:
        """Opcodes that move, name and call."""
        if name in ("PROTO", "FRAME", "STOP"):
            return
        if name == "MARK":
            self.stack.append(None)
        elif name == "POP":
            self.stack.pop()
        elif name == "POP_MARK":
            self._to_mark()
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._put(len(self.memo) if name == "MEMOIZE" else int(arg))
        elif name in ("GET", "BINGET", "LONG_BINGET", "DUP"):
            cell = self._top() if name == "DUP" else self.memo.get(int(arg))
            if cell is None:
                raise pickle.UnpicklingError(f"nothing was put in place {arg} of the memo")
            cell.held = cell.held or cell.kind in ("list", "dict", "set", "object")
            self.stack.append(cell)
        elif name == "GLOBAL":
            self.stack.append(Cell("global", value=_named(str(arg))))
        elif name == "STACK_GLOBAL":
            module, found = self._take(2)
            self.stack.append(Cell("global", value=f"{module.value} {found.value}"))
        elif name in ("REDUCE", "NEWOBJ", "NEWOBJ_EX"):
            self._call(self._take(3 if name == "NEWOBJ_EX" else 2))
        elif name == "BINPERSID":
            self._storage(self._take(1)[0])
        else:
            raise pickle.UnpicklingError(f"opcode {name} does not belong in a checkpoint")

    def _top(self) -> Cell:
        if not self.stack or self.stack[-1] is None:
            raise pickle.UnpicklingError("the pickle takes from an empty stack")
        cell: Cell = self.stack[-1]
        return cell

    def _take(self, count: int) -> list[Cell]:
        found: list[Any] = (
            self.stack[len(self.stack) - count :] if count <= len(self.stack) else [None]
        )
        if None in found:
            raise pickle.UnpicklingError("the pickle takes from an empty stack")
        del self.stack[len(self.stack) - count :]
        return found

    def _to_mark(self) -> list[Cell]:
        found: list[Cell] = []
        while self.stack and self.stack[-1] is not None:
            found.append(self.stack.pop())
        if not self.stack:
            raise pickle.UnpicklingError("the pickle takes from an empty stack")
        self.stack.pop()
        return found[::-1]

    def _put(self, place: int) -> None:
        """Torch and pickle number places one after the other; C makes room for all below one."""
        if not 0 <= place <= len(self.memo):
            raise pickle.UnpicklingError(f"place {place} of a memo of {len(self.memo)}")
        self.memo[place] = self._top()

    def _gather(self, kind: str, items: list[Cell]) -> None:
        cell = Cell(kind, value=items if kind == "tuple" and len(items) <= 64 else None)
        self.stack.append(cell)
        self._grow(cell, items)

    def _add(self, items: list[Cell]) -> None:
        """A value that others hold already has been weighed: it grows no more."""
        cell = self._top()
        if cell.held:
            raise pickle.UnpicklingError("a container that grows after it was put in another")
        self._grow(cell, items)

    def _grow(self, cell: Cell, items: Sequence[Cell]) -> None:
        for item in items:
            item.held = True
            cell.weight += item.weight
        if cell.weight > self.most:
            raise pickle.UnpicklingError(
                f"one value of more than {self.most} once its references are followed; save it "
                "without containers that hold one another many times over"
            )

    def _call(self, taken: list[Cell]) -> None:
        called, args, *_ = taken
        name = called.value if called.kind == "global" else called.kind
        given = args.value if args.kind == "tuple" else None
        self.rules.refuse(str(name), given)
        kind = "bytes" if name in ("_codecs encode", "builtins bytearray") else "object"
        cell = Cell(kind)
        self.stack.append(cell)
        self._grow(cell, taken[1:])
        if str(name).startswith("torch._utils _rebuild_tensor_v"):
            _check_tensor(given)

    def _storage(self, told: Cell) -> None:
        """A persistent id: ``("storage", type, key, location, elements, ...)``."""
        items = told.value if told.kind == "tuple" else None
        if not items or len(items) < 5 or items[1].kind != "global" or items[4].kind != "int":
            raise pickle.UnpicklingError("a persistent id that is no storage")
        width = _widths().get(str(items[1].value).split()[-1])
        if width is None or items[4].value < 0:
            raise pickle.UnpicklingError(f"{items[1].value} is no storage of elements")
        key, size = str(items[2].value), width * items[4].value
        self.storages[key] = max(size, self.storages.get(key, 0))
        self.stack.append(Cell("storage", value=(size, width)))


def check_pickle(stream: IO[bytes], rules: Rules, length: int) -> dict[str, int]:
    """Walk through one pickle; the stream is left behind it.

    Args:
        stream: at the beginning of a pickle.
        rules: what it may call.
        length: of the file, in bytes.

    Returns:
        Key -> bytes of each storage that it names, as it claims.

    Raises:
        pickle.UnpicklingError: it asks for what no writer of checkpoints asks for.
    """
    walk = Walk(rules, max(FLOOR, FOLLOWED * length))
    try:
        for opcode, arg, _ in pickletools.genops(stream):
            walk.step(opcode.name, arg)
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise pickle.UnpicklingError(str(error).splitlines()[0][:200]) from error
    return walk.storages


def _named(name: str) -> str:
    """Protocol 2 writes the module of builtins as Python 2 called it."""
    return name.replace("__builtin__ ", "builtins ", 1)


def _atom(name: str, arg: Any) -> Cell:
    if name in _TEXTS or name in _BYTES:
        return Cell("text" if name in _TEXTS else "bytes", 1 + len(arg) // 8, arg)
    if type(arg) is int:
        if arg.bit_length() > MOST_INT_BYTES * 8:
            raise pickle.UnpicklingError(f"a whole number of {arg.bit_length()} bits")
        return Cell("int", value=arg)
    return Cell("atom")


def _check_tensor(args: Sequence[Cell] | None) -> None:
    """A tensor lies within its storage: torch would make the storage larger if it can."""
    if args is None or len(args) < 4 or args[0].kind != "storage" or args[1].kind != "int":
        raise pickle.UnpicklingError("a tensor without a storage")
    size, strides = _ints(args[2]), _ints(args[3])
    if len(size) != len(strides):
        raise pickle.UnpicklingError(f"a tensor of size {size} and strides {strides}")
    length, width = args[0].value
    if len(args) > 6 and args[6].kind == "global":  # _v3: its storage is of bytes
        width = _width_of_dtype(str(args[6].value))
    elements = length // width
    last = args[1].value + sum((n - 1) * each for n, each in zip(size, strides, strict=True))
    if 0 not in size and last >= elements:
        raise pickle.UnpicklingError(f"a tensor of size {size} in a storage of {elements} elements")
    if math.prod(size) > EXPANDED * max(elements, 1 << 14):
        raise pickle.UnpicklingError(
            f"a tensor of size {size} in a storage of {elements} elements: expanded too far; save "
            "its contiguous() copy"
        )


def _ints(cell: Cell) -> list[int]:
    items = cell.value if cell.kind == "tuple" else None
    if items is None or any(each.kind != "int" or each.value < 0 for each in items):
        raise pickle.UnpicklingError("a tensor whose size or strides are no whole numbers")
    return [each.value for each in items]


def _widths() -> dict[str, int]:
    """Bytes of an element in each of torch's storages, by the names that torch.save writes."""
    from torch.storage import _dtype_to_storage_type_map

    found = {name: dtype.itemsize for dtype, name in _dtype_to_storage_type_map().items()}
    return {"UntypedStorage": 1, **found}


def _width_of_dtype(name: str) -> int:
    import torch

    dtype = getattr(torch, name.split()[-1], None)
    if not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError(f"{name} is no dtype")
    return dtype.itemsize
