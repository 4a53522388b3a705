"""Reads pickles without running any code: no class is imported, nothing is called, no attribute of a real object is
set.

An import in the pickle becomes a `Global`, and an object an `Opaque`: names and plain data. pickle_globals.py has
builders for the few harmless classes (tensors, numpy arrays, ordered dicts). Work and memory are limited by the length
of the pickle, whatever it contains. Python's unpickler in C has no such limit: a single memo index of 2^31 takes 32 GB.
The opcodes are those of the standard library's pickle (https://peps.python.org/pep-3154/ and before)."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Callable, ClassVar

from .layout import Trouble, Unreadable, limit

MOST = 1 << 26  # bytes; longer pickles are not read
_CONTAINERS = 4_000_000  # bytes of opcodes that create a container; each container takes about fifty bytes
# Modules that no checkpoint needs: loading a pickle that names them would run a program or code.
_DANGEROUS = {
    "os", "posix", "nt", "subprocess", "sys", "runpy", "pty", "socket", "shutil", "importlib", "ctypes", "marshal",
    "code", "codeop", "webbrowser", "pip", "pdb", "timeit", "commands", "imp", "cProfile", "profile", "bdb",
}  # fmt: skip
_DANGEROUS_NAMES = {
    "builtins": {"eval", "exec", "execfile", "compile", "open", "__import__", "input", "breakpoint", "globals"},
    "io": {"open", "open_code", "FileIO"},
    "torch": {"load"},
    "torch.hub": {"load", "load_state_dict_from_url", "download_url_to_file"},
    "torch.serialization": {"load"},
    "numpy": {"load", "fromfile", "memmap"},
    "numpy.testing._private.utils": {"runstring"},
    "pickle": {"load", "loads"},
}
_PLAIN = (str, bytes, int, float, complex, bool, type(None), frozenset)
_IN_KEY = 1000  # values in the tuples of a key


@dataclass(frozen=True)
class Global:
    """A class or function that the pickle names. It is never imported."""

    module: str
    name: str

    @property
    def full(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def dangerous(self) -> bool:
        module = {"__builtin__": "builtins", "_io": "io", "_pickle": "pickle"}.get(self.module, self.module)
        return module.split(".")[0] in _DANGEROUS or self.name in _DANGEROUS_NAMES.get(module, ())


@dataclass(eq=False)
class Opaque:
    """An object that the pickle would create: its class or function, arguments, state and items, as plain data."""

    what: Global
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)
    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: list[Any]) -> None:
        self.items.extend(items)

    def add(self, item: Any) -> None:
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))


Builder = Callable[..., Any]
Known = Mapping[tuple[str, str], Builder]
Persistent = Callable[[Any], Any]


class Budget:
    """A limit for the data that builders make, so that a short pickle can't become large. Raises Unreadable beyond the
    limit."""

    def __init__(self, length: int) -> None:
        self._left = 8 * length + 4096

    def spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise limit("its pickle would grow far beyond its own length")


# The standard library's unpickler in Python. The unpickler in C can't override single opcodes, and its memory is not
# limited.
_Base: Any = pickle._Unpickler


class _Reader(_Base):  # type: ignore[misc]
    dispatch: ClassVar[dict[int, Any]] = dict(_Base.dispatch)

    def __init__(self, file: Any, length: int, known: Known, persistent: Persistent | None):
        super().__init__(file, encoding="latin1")
        self._known, self._persistent = known, persistent
        self.budget, self.named = Budget(length), set[Global]()

    def find_class(self, module: str, name: str) -> Global:
        named = Global(str(module), str(name))
        self.named.add(named)
        return named

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise Unreadable("it refers to objects outside of it")
        return self._persistent(pid)

    def get_extension(self, code: int) -> None:
        raise limit("it names classes by number")

    def _make(self, what: Any, args: Any, named: dict[Any, Any] | None = None) -> Any:
        if not isinstance(what, Global):
            what = Global("", type(what).__name__)
        args = args if isinstance(args, tuple) else (args,)
        builder = self._known.get((what.module, what.name))
        if builder is None:
            return Opaque(what, args if not named else (*args, named))
        try:
            return builder(self.budget, *args)
        except Unreadable:
            raise
        except Exception as error:
            raise limit(f"{what.full} with arguments that are not known: {type(error).__name__}") from error

    def load_reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._make(self.stack[-1], args)

    def load_newobj(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._make(self.stack[-1], args)

    def load_newobj_ex(self) -> None:
        named = self.stack.pop()
        args = self.stack.pop()
        self.stack[-1] = self._make(self.stack[-1], args, named)

    def load_obj(self) -> None:
        args = self.pop_mark()
        self.append(self._make(args.pop(0), tuple(args)))

    def load_inst(self) -> None:
        module, name = (self.readline()[:-1].decode("ascii") for _ in range(2))
        args = self.pop_mark()
        self.append(self._make(self.find_class(module, name), tuple(args)))

    def load_build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if isinstance(made, Opaque):
            made.state = state
        elif hasattr(made, "set_state"):
            try:
                made.set_state(state)
            except Exception as error:
                raise limit(f"a state that is not known: {type(error).__name__}") from error
        # Attributes of an ordinary container (an OrderedDict's _metadata) are no training state, so they are dropped.

    def load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        _put(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        pairs = self.pop_mark()
        _put(self.stack[-1], pairs)

    def load_dict(self) -> None:
        pairs = self.pop_mark()
        made: dict[Any, Any] = {}
        _put(made, pairs)
        self.append(made)

    def load_additems(self) -> None:
        items = self.pop_mark()
        made = self.stack[-1]
        for item in items:
            made.add(as_key(item))

    def load_frozenset(self) -> None:
        self.append(frozenset(as_key(item) for item in self.pop_mark()))

    def load_bytearray8(self) -> None:
        length = int.from_bytes(self.read(8), "little")
        self.append(self.read(length))  # as bytes: no memory is taken before they were read

    def load_next_buffer(self) -> None:
        raise limit("its buffers lie outside of it")

    for _code, _load in (
        (pickle.REDUCE, load_reduce), (pickle.NEWOBJ, load_newobj), (pickle.NEWOBJ_EX, load_newobj_ex),
        (pickle.OBJ, load_obj), (pickle.INST, load_inst), (pickle.BUILD, load_build), (pickle.SETITEM, load_setitem),
        (pickle.SETITEMS, load_setitems), (pickle.DICT, load_dict), (pickle.ADDITEMS, load_additems),
        (pickle.FROZENSET, load_frozenset), (pickle.BYTEARRAY8, load_bytearray8),
        (pickle.NEXT_BUFFER, load_next_buffer),
    ):  # fmt: skip
        dispatch[_code[0]] = _load


def _put(into: Any, pairs: list[Any]) -> None:
    if len(pairs) % 2:
        raise Unreadable("a key without a value")
    for place in range(0, len(pairs), 2):
        into[as_key(pairs[place])] = pairs[place + 1]


def as_key(value: Any) -> Any:
    """The value, if it is of a type that may be hashed. Hashing a deeply nested tuple would overflow the interpreter's
    stack, and a tuple may hold the same tuple many times. Raises Unreadable for any other type."""
    left = [value]
    for _ in range(_IN_KEY):
        item = left.pop()
        if isinstance(item, tuple):
            left += item[:_IN_KEY]
        elif not (isinstance(item, (*_PLAIN, Global, Opaque)) or getattr(item, "is_key", False)):
            raise limit(f"a key that is a {type(item).__name__}")
        if not left:
            return value
    raise limit("a key that is a tuple of many values")


def read(file: Any, length: int, known: Known, persistent: Persistent | None = None) -> tuple[Any, list[str]]:
    """The next pickle in a file, of at most `length` bytes, and the names in it that would run programs or code if they
    were called.

    `known`: builders of plain data, by module and name. `persistent`: resolves persistent ids. Raises Unreadable if the
    pickle is damaged or too large."""
    if length > MOST:
        raise limit(f"its pickle has {length} bytes, more than are read")
    if isinstance(file, BytesIO) and sum(map(file.getvalue().count, (b"]", b"}", b"(", b"\x8f"))) > _CONTAINERS:
        raise limit("its pickle makes millions of containers")
    reader = _Reader(file, length, known, persistent)
    try:
        made = reader.load()
    except Unreadable:
        raise
    except EOFError as error:
        raise Unreadable("its pickle is cut off", Trouble.TORN) from error
    except Exception as error:  # the reader raises almost anything for damaged opcodes
        text = "an opcode that does not exist" if isinstance(error, KeyError) else str(error) or type(error).__name__
        kind = Trouble.TORN if "truncated" in text or "exhausted" in text else Trouble.UNREADABLE
        raise Unreadable(f"its pickle can't be read: {text[:160]}", kind) from error
    bad = sorted(item.full for item in reader.named if item.dangerous)
    return made, bad
