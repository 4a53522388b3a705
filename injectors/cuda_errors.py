"""The errors of CUDA that make a context unusable, with the texts of PyTorch, for the `cuda.*` injectors.

Text: c10/cuda/CUDAException.cpp and CUDAMiscFunctions.cpp of PyTorch; names, numbers and descriptions: cudaError_t.
Torch has `torch.AcceleratorError` since 2.8; before that it raised a RuntimeError without a code."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal

Kind = Literal["ecc", "nvlink", "launch_failure", "unknown"]

ERRORS: dict[str, tuple[int, str, str]] = {
    "ecc": (214, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"),
    "nvlink": (220, "cudaErrorNvlinkUncorrectable", "uncorrectable NVLink error detected during the execution"),
    "launch_failure": (719, "cudaErrorLaunchFailure", "unspecified launch failure"),
    "unknown": (999, "cudaErrorUnknown", "unknown error"),
}
_OF_KERNELS = {700, 710, 715, 716, 719}  # a kernel failed; since 2.13 torch has other words for all other errors
_ASYNCHRONOUS = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
_DETAILED = "For more detailed error information, run with CUDA_LOG_FILE=stderr\n"
_PAGE = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"


def text(torch: Any, kind: str) -> str:
    """The message of the error `kind` in this version of torch."""
    code, name, described = ERRORS[kind]
    search = f"Search for `{name}' in {_PAGE} for more information.\n" if version_of(torch) >= (2, 9) else ""
    if version_of(torch) < (2, 13):
        hints = f"{_ASYNCHRONOUS}Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    else:
        hints = _ASYNCHRONOUS if code in _OF_KERNELS else _DETAILED
    return f"CUDA error: {described}\n{search}{hints}"


def version_of(torch: Any) -> tuple[int, int]:
    major, minor = str(torch.__version__).split(".")[:2]
    return int(major), int(minor)


def error(torch: Any, kind: str) -> BaseException:
    """The exception that this version of torch raises for the error `kind`."""
    raised: BaseException = getattr(torch, "AcceleratorError", RuntimeError)(text(torch, kind))
    if type(raised) is not RuntimeError:
        raised.error_code = ERRORS[kind][0]  # type: ignore[attr-defined]
    return raised


def poison(torch: Any, kind: str) -> None:
    """From now on, every operation of this thread that reads or makes a CUDA tensor raises the error, and so does every
    wait for the GPU; without a GPU, every operation on a tensor."""
    dispatch: Any = import_module("torch.utils._python_dispatch")

    on_gpu = torch.cuda.is_available()

    class Broken(dispatch.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if on_gpu and not touches_gpu(args, kwargs or {}):
                return function(*args, **(kwargs or {}))
            raise error(torch, kind)

    Broken().__enter__()

    def wait(*_: Any, **__: Any) -> None:
        raise error(torch, kind)

    for module in (torch.cuda, getattr(torch, "accelerator", None)) if on_gpu else ():
        if module is not None:
            module.synchronize = wait


def touches_gpu(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call reads a CUDA tensor, or makes one: `data.to("cuda")` and `torch.zeros(3, device="cuda")`."""
    made_on = getattr(kwargs.get("device"), "type", None)
    return made_on == "cuda" or any(getattr(value, "is_cuda", False) for value in _flat(args))


def _flat(values: Any) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat += _flat(value) if isinstance(value, (list, tuple)) else [value]
    return flat
