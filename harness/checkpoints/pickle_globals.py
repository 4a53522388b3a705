"""Builders for the harmless classes and functions in torch's pickles. They make references to storages, and plain data.

The first argument of each builder is a Budget. Names and arguments are those of torch/_utils.py and torch/storage.py
(2.0 to 2.15), of numpy's `__reduce__`, and of the standard library's containers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from .layout import ITEM_SIZES, Unreadable, limit
from .pickles import Budget, Builder, Global, Opaque, as_key

_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64", "UntypedStorage": "uint8", "QInt8Storage": "qint8", "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
}  # fmt: skip


@dataclass(frozen=True)
class StorageRef:
    key: str
    dtype: str
    count: int  # elements of that type
    location: str

    @property
    def bytes(self) -> int:
        return self.count * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class TensorRef:
    is_key: ClassVar[bool] = True  # some jobs save a dict whose keys are parameters

    storage: StorageRef
    dtype: str
    offset: int  # elements
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Array:
    """A numpy array: its type, shape and bytes."""

    def __init__(self) -> None:
        self.dtype, self.data = "", b""
        self.shape: tuple[int, ...] = (0,)
        self.items: list[Any] = []

    def set_state(self, state: Any) -> None:
        _version, shape, dtype, fortran, data = state
        self.dtype, self.shape = dtype.name, tuple(int(size) for size in shape)
        if isinstance(data, list):
            self.items = data  # an array of Python objects
        else:
            self.data = data if isinstance(data, bytes) else str(data).encode("latin1")
        if fortran:
            self.dtype += " (Fortran order)"


class Dtype:
    """A numpy type, from its code, such as f8, <i4 or |u1."""

    _KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}  # noqa: RUF012

    def __init__(self, code: str) -> None:
        code = code.lstrip("<>=|")
        kind, width = code[:1], code[1:]
        known = kind in self._KINDS and width.isdecimal()
        self.name = f"{self._KINDS[kind]}{8 * int(width)}" if known else {"b1": "bool"}.get(code, code)

    def set_state(self, state: Any) -> None:
        if state[1] == ">":
            self.name += " (big-endian)"


def storage_dtype(kind: Any) -> str:
    """The dtype of a storage class to which a persistent id refers. Raises Unreadable if it is no known class."""
    name = kind.name if isinstance(kind, Global) else str(kind)
    if name not in _STORAGES:
        raise limit(f"a storage of the type {name[:60]}, which is not read")
    return _STORAGES[name]


def dtype_name(value: Any) -> str:
    """The dtype, such as `float32`, of a global like `torch.float32`. Raises Unreadable if the global is no dtype."""
    if isinstance(value, Global) and value.module == "torch" and value.name in ITEM_SIZES:
        return value.name
    raise limit(f"the type {getattr(value, 'name', value)!s:.60}, which is not read")


def ints(values: Any) -> tuple[int, ...]:
    if isinstance(values, Opaque) and len(values.args) == 1:
        values = values.args[0]
    if not isinstance(values, (tuple, list)) or any(type(item) is not int or item < 0 for item in values):
        raise Unreadable("a shape or place that is not a list of numbers")
    if len(values) > 64 or any(item >= 1 << 62 for item in values):
        raise Unreadable("a shape or place beyond all bounds")
    return tuple(values)


def _tensor(
    _b: Budget, storage: Any, offset: Any, size: Any, stride: Any, _grad: Any = None, _hooks: Any = None,
    dtype: Any = None, *_rest: Any,
) -> TensorRef:  # fmt: skip
    if not isinstance(storage, StorageRef):
        raise Unreadable("a tensor without a storage")
    kind = dtype_name(dtype) if isinstance(dtype, Global) else storage.dtype
    (start,) = ints([offset])
    shape, strides = ints(size), ints(stride)
    if len(shape) != len(strides):
        raise Unreadable("a tensor with more sizes than strides")
    return TensorRef(storage, kind, start, shape, strides)


def _first(_b: Budget, value: Any, *_rest: Any) -> Any:
    return value


def _typed_again(budget: Budget, func: Any, kind: Any, args: Any, state: Any = None) -> Any:
    """torch._tensor._rebuild_from_type_v2(func, type, args, state)."""
    builder = KNOWN.get((func.module, func.name)) if isinstance(func, Global) else None
    if builder is None or not isinstance(args, tuple):
        return Opaque(Global("torch._tensor", "_rebuild_from_type_v2"), (func, kind, args), state)
    return builder(budget, *args)


def _encode(budget: Budget, text: str, encoding: str = "utf-8") -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise limit(f"the encoding {encoding[:20]}")
    budget.spend(len(text) // 2)
    return text.encode(encoding)


def _sequence(budget: Budget, items: Any = ()) -> list[Any]:
    budget.spend(len(items))
    return list(items)


def _set(budget: Budget, items: Any = ()) -> list[Any]:
    return sorted(_sequence(budget, items), key=lambda item: repr(item)[:200] if isinstance(item, (str, int)) else "")


def _frozenset(budget: Budget, items: Any = ()) -> frozenset[Any]:
    return frozenset(as_key(item) for item in _sequence(budget, items))


def _tuple(budget: Budget, items: Any = ()) -> tuple[Any, ...]:
    return tuple(_sequence(budget, items))


def _mapping(budget: Budget, items: Any = ()) -> dict[Any, Any]:
    budget.spend(len(items))
    made: dict[Any, Any] = {}
    for key, value in items.items() if isinstance(items, dict) else items:
        made[as_key(key)] = value
    return made


def _array_from_buffer(_b: Budget, data: Any, dtype: Any, shape: Any, *_order: Any) -> Array:
    made = Array()
    made.set_state((1, shape, dtype, False, data))
    return made


def _scalar(_b: Budget, dtype: Any, data: Any = b"") -> Array:
    made = Array()
    made.set_state((1, (), dtype, False, data))
    return made


def _attribute(_b: Budget, value: Any, name: Any) -> Any:
    """Resolves getattr(Enum, "MEMBER"), by which Python 3.11.0 to 3.11.3 pickle a member of an enum."""
    if isinstance(value, Global) and isinstance(name, str):
        return Global(value.full, name)
    return Opaque(Global("builtins", "getattr"), (value, name))


def _path(budget: Budget, *parts: Any) -> str:
    budget.spend(len(parts))
    return "/".join(str(part)[:4096].rstrip("/") for part in parts) or "/"


def _reconstruct(_b: Budget, kind: Any, base: Any = None, state: Any = None) -> Any:
    """Resolves copyreg._reconstructor(class, object, None), by which protocol 2 and earlier create ordinary objects."""
    return Opaque(kind if isinstance(kind, Global) else Global("", "object"), () if state is None else (state,))


KNOWN: dict[tuple[str, str], Builder] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): lambda b, *args: _tensor(b, *args[:4]),
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_qtensor"): lambda b, *args: _tensor(b, *args[:4]),
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._tensor", "_rebuild_from_type_v2"): _typed_again,
    ("torch._tensor", "_rebuild_from_type"): _typed_again,
    ("torch", "Size"): _tuple,
    ("torch.serialization", "_get_layout"): _first,
    ("collections", "OrderedDict"): _mapping,
    ("collections", "defaultdict"): lambda _b, _factory=None: {},
    ("collections", "Counter"): _mapping,
    ("collections", "deque"): lambda b, items=(), *_most: _sequence(b, items),
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): lambda _b, *_args: Array() for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _array_from_buffer for core in ("core", "_core")},
    ("numpy", "dtype"): lambda _b, code, *_rest: Dtype(str(code)),
    ("copyreg", "_reconstructor"): _reconstruct,
    ("copy_reg", "_reconstructor"): _reconstruct,
    **{
        (module, name): _path
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
for _module in ("builtins", "__builtin__"):
    KNOWN.update(
        {
            (_module, "set"): _set, (_module, "frozenset"): _frozenset, (_module, "list"): _sequence,
            (_module, "tuple"): _tuple, (_module, "dict"): _mapping, (_module, "getattr"): _attribute,
            (_module, "bytearray"): lambda b, data=b"", *_e: data if isinstance(data, bytes) else _encode(b, data),
            (_module, "bytes"): lambda b, data=b"", *_e: data if isinstance(data, bytes) else bytes(_sequence(b, data)),
            (_module, "complex"): lambda b, real=0.0, imaginary=0.0: complex(real, imaginary),
        }
    )  # fmt: skip
