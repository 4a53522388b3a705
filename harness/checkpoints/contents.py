"""The entries of nested containers under dotted names: tensors, and other values as text. Depth and number are limited,
because a container from a pickle may contain itself, or the same list a million times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from xxhash import xxh3_64_hexdigest

from .known import Array, Dtype, StorageRef, TensorRef
from .layout import TensorEntry, limit
from .pickles import Global, Opaque

_DEPTH, _ENTRIES, _LONG = 50, 3_000_000, 16
_SHORT = 1000  # characters; paths stay readable, so that the run's own folder can be recognised in them
AddTensor = Callable[[str, TensorRef], None]


class Contents:
    """Collects the entries of one checkpoint."""

    def __init__(self, values: dict[str, str], tensors: dict[str, TensorEntry], opaque: list[str]) -> None:
        self._values, self._tensors, self._opaque = values, tensors, opaque
        self._left = _ENTRIES

    def add(self, name: str, value: Any, tensor: AddTensor) -> None:
        """Adds a value and everything nested in it. `tensor` is called for each tensor that refers to a storage. Raises
        Unreadable if the value is nested too deeply or has too many entries."""
        stack = [(name, value, 0)]
        while stack:
            name, value, depth = stack.pop()
            self._left -= 1
            if self._left < 0 or depth > _DEPTH:
                raise limit("it is nested too deeply, or has millions of entries")
            if isinstance(value, TensorRef):
                tensor(name, value)
            elif isinstance(value, Array):
                self._add_array(name, value, stack, depth)
            else:
                inside = list(self._inside(name, value))
                stack.extend((inner, item, depth + 1) for inner, item in reversed(inside))

    def _inside(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """The entries inside a value, which must be added next. A value without entries is recorded here."""
        if isinstance(value, dict):
            for key, item in value.items():
                yield under(name, key), item
        elif isinstance(value, (list, tuple)):
            if len(value) > _LONG and all(isinstance(item, (int, float)) for item in value):
                self._values[name] = f"{len(value)} numbers, digest {_digest(repr(value))}"
            else:
                yield from ((under(name, place), item) for place, item in enumerate(value))
        elif isinstance(value, Opaque):
            yield from self._inside_opaque(name, value)
        else:
            self._values[name] = text_of(value)

    def _inside_opaque(self, name: str, value: Opaque) -> Iterator[tuple[str, Any]]:
        if value.what.full not in ("argparse.Namespace", "types.SimpleNamespace"):
            self._opaque.append(name)
            self._values[under(name, "class")] = value.what.full
        for place, item in enumerate(value.args):
            if not isinstance(item, Global):
                yield under(name, place), item
        states = value.state if isinstance(value.state, tuple) and value.state[:1] == (None,) else (value.state,)
        for state in states:
            if isinstance(state, dict):
                yield name, state
            elif state is not None:
                yield under(name, "state"), state
        if value.items:
            yield name, value.items
        yield from ((under(name, key), item) for key, item in value.pairs)

    def _add_array(self, name: str, value: Array, stack: list[tuple[str, Any, int]], depth: int) -> None:
        if value.items:
            stack.append((name, value.items, depth + 1))
        else:
            self._tensors[name] = TensorEntry(name, value.dtype, value.shape, (), value.data)


def under(name: str, key: Any) -> str:
    inner = key if isinstance(key, str) else text_of(key)
    return f"{name}.{inner}" if name and not name.endswith(":") else f"{name}{inner}"


def text_of(value: Any) -> str:
    """The value as text. A long text is replaced by its type and a digest."""
    if isinstance(value, Global):
        return value.full
    if isinstance(value, TensorRef):
        return f"tensor {value.storage.key}"
    if isinstance(value, (StorageRef, Dtype)):
        return f"{type(value).__name__} {value.dtype if isinstance(value, StorageRef) else value.name}"
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"int, digest {_digest(hex(value))}"
    if isinstance(value, (tuple, set, frozenset)):
        plain = [item if isinstance(item, (str, int, float, bytes)) else type(item).__name__ for item in value]
        value = plain if isinstance(value, tuple) else sorted(plain, key=repr)  # a set has no order
    elif isinstance(value, Opaque):
        return f"<{value.what.full}>"
    text = repr(value)
    return text if len(text) <= _SHORT else f"{type(value).__name__}, digest {_digest(text)}"


def _digest(text: str) -> str:
    return str(xxh3_64_hexdigest(text.encode(errors="replace")))
