"""Functional collectives (`_c10d_functional`), which compiled code, DTensor and tensor parallelism call.

Their kernels call c10d below the Autograd keys, so the hooks of collectives.py don't see them. The hooks here are on
the ADInplaceOrView key of the functional operators. Eager and compiled code (AOT, Inductor) pass it, with and without
gradients. Calls with fake tensors, as when torch.compile traces, are not collectives and are left out.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Callable

from .calls import Call
from .collectives import CollectiveHook, calls

_OPS = {
    "all_reduce": "all_reduce", "all_reduce_": "all_reduce", "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce", "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather", "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "all_to_all_single": "all_to_all", "broadcast": "broadcast",
    "broadcast_": "broadcast",
}  # fmt: skip
_KEY = "ADInplaceOrView"
_UNREAL = ("FakeTensor", "FunctionalTensor")


class FunctionalHook:
    """Hooks the functional collectives. `collectives.around` applies the faults that are due before and after each of
    them."""

    def __init__(self, collectives: CollectiveHook) -> None:
        self._around, self._stamping, self._inside = collectives.around, collectives.stamping, collectives.inside
        self._agent = collectives._agent
        self._libraries: list[Any] = []

    def install(self) -> None:
        torch: Any = import_module("torch")

        library = torch.library.Library("_c10d_functional", "IMPL")
        self._libraries.append(library)
        self._torch = torch
        excluded, guard = (
            torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY)),
            torch._C._ExcludeDispatchKeyGuard,
        )
        for name, op in _OPS.items():
            packet = getattr(torch.ops._c10d_functional, name, None)
            if packet is not None:  # else it is not in this version of torch
                library.impl(name, self._hook(op, packet.default, excluded, guard), _KEY)
        if self._stamping is not None:
            library.impl(
                "wait_tensor", self._wait(torch.ops._c10d_functional.wait_tensor.default, excluded, guard), _KEY
            )

    def remove(self) -> None:
        while self._libraries:
            self._libraries.pop()._destroy()

    def _hook(self, op: str, packet: Any, excluded: Any, guard: Any) -> Callable[..., Any]:
        original = calls(packet)
        group_at = next(n for n, arg in enumerate(packet._schema.arguments) if arg.name == "group_name")

        def collective(*args: Any, **kwargs: Any) -> Any:
            def through() -> Any:
                self._inside.functional = True
                try:
                    with guard(excluded):
                        return original(*args, **kwargs)
                finally:
                    self._inside.functional = False

            if not self._agent.on or not self._is_real(args[0]):
                return through()
            return self._around(Call(op, args, lambda: _named(args[group_at]), packet), through)

        return collective

    def _wait(self, packet: Any, excluded: Any, guard: Any) -> Callable[..., Any]:
        stamping = self._stamping

        def wait_tensor(tensor: Any) -> Any:
            with guard(excluded):
                result = packet(tensor)
            if stamping is not None and self._agent.on and self._is_real(tensor):
                stamping.waited(tensor)
            return result

        return wait_tensor

    def _is_real(self, value: Any) -> bool:
        tensor = value[0] if isinstance(value, (list, tuple)) and value else value
        return type(tensor).__name__ not in _UNREAL and not self._torch._is_functional_tensor(tensor)


def _named(name: str) -> Any:
    c10d: Any = import_module("torch._C._distributed_c10d")
    return c10d._resolve_process_group(name)
