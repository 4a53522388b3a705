"""CUDA's errors in a rank: PyTorch's own message and code, in the right call, and for every later call."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
import torch
from warm import python

from torchaos.injectors import cuda_errors

PAGE = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
UNKNOWN = f"""CUDA error: unknown error
Search for `cudaErrorUnknown' in {PAGE} for more information.
For more detailed error information, run with CUDA_LOG_FILE=stderr
"""  # as torch 2.13.0+cu130 raises it, character by character
LAUNCH_FAILURE = f"""CUDA error: unspecified launch failure
Search for `cudaErrorLaunchFailure' in {PAGE} for more information.
CUDA kernel errors might be asynchronously reported at some other API call, \
so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
"""


def apply(source: str, injector: str, then: str) -> subprocess.CompletedProcess[str]:
    """`apply` of an injector in a process of its own, and what is done then."""
    code = (
        f"import torch, types\nfrom torchaos.injectors.{source} import {injector}\none = {injector}()\n"
        f"site = types.SimpleNamespace(fault='f')\ntensor = torch.ones(3, requires_grad=True)\n{then}"
    )
    return python(code)


def test_the_error_is_torchs_own() -> None:
    """Type, code and text, for this torch."""
    raised = cuda_errors.error(torch, "ecc")
    assert type(raised).__name__ == "AcceleratorError"
    assert isinstance(raised, RuntimeError)
    assert getattr(raised, "error_code", None) == 214
    assert str(raised).startswith("CUDA error: uncorrectable ECC error encountered\nSearch for")
    assert {kind: cuda_errors.ERRORS[kind][0] for kind in ("nvlink", "launch_failure", "unknown")} == {
        "nvlink": 220, "launch_failure": 719, "unknown": 999,
    }  # fmt: skip


def test_the_text_is_that_of_the_version() -> None:
    """Since 2.13 torch speaks of kernels only if a kernel failed. Before 2.9 there is no link to NVIDIA's page."""
    new, middle, old = (SimpleNamespace(__version__=version) for version in ("2.13.0+cu130", "2.12.1", "2.4.0"))
    assert cuda_errors.text(new, "unknown") == UNKNOWN
    assert cuda_errors.text(new, "launch_failure") == LAUNCH_FAILURE
    for torch_ in (middle, old):
        assert cuda_errors.text(torch_, "unknown").endswith(
            "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
            "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
        )
        assert ("Search for" in cuda_errors.text(torch_, "unknown")) is (torch_ is middle)
    assert type(cuda_errors.error(old, "nvlink")) is RuntimeError


def test_a_broken_gpu_is_met_by_calls_that_read_or_make_its_tensors() -> None:
    """`data.to("cuda")` and `zeros(3, device="cuda")` have no CUDA tensor among their arguments, and fail as well."""
    gpu, host = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    cuda_device, cpu_device = torch.device("cuda", 0), torch.device("cpu")
    assert cuda_errors.touches_gpu(([host, gpu],), {})
    assert cuda_errors.touches_gpu((host,), {"device": cuda_device})
    assert cuda_errors.touches_gpu(((3,),), {"device": cuda_device})
    assert not cuda_errors.touches_gpu((host, 3), {"device": cpu_device})
    assert not cuda_errors.touches_gpu((host,), {"dtype": torch.float32})


def test_with_a_broken_gpu_the_wait_for_it_fails_too() -> None:
    """A job may catch the error, and ask with synchronize() whether the GPU is well again. The CPU still works."""
    code = """
import torch
from torchaos.injectors import cuda_errors as cuda
torch.cuda.is_available = lambda: True
cuda.poison(torch, "ecc")
assert (torch.ones(3) + 1).sum().item() == 6.0
for wait in (torch.cuda.synchronize, torch.accelerator.synchronize):
    try:
        wait()
    except RuntimeError as error:
        assert str(error).startswith("CUDA error: uncorrectable ECC error encountered"), error
    else:
        raise AssertionError("it did not fail")
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_an_error_is_kept_until_exit() -> None:
    """A job that catches it meets it again in the next operation, whatever that is, and ends with an error."""
    then = """
calls = [lambda: one.apply(site), lambda: tensor * 2, lambda: tensor.sum().backward(), lambda: torch.zeros(2)]
for what in [*calls, lambda: tensor.detach()[0].item()]:
    try:
        what()
        print("passed")
    except RuntimeError as error:
        print(type(error).__name__, error.error_code)
tensor + 1
"""
    done = apply("cuda", "Error", then)
    assert done.stdout.splitlines() == ["AcceleratorError 214"] * 5, done.stderr
    assert done.returncode == 1
    assert "uncorrectable ECC error encountered" in done.stderr


def test_the_watchdog_aborts() -> None:
    """SIGABRT, with the watchdog's line and the C++ runtime's, while Python is elsewhere."""
    done = apply("cuda", "Abort", "one.apply(site)\nimport time\ntime.sleep(60)\n")
    assert done.returncode == -6
    assert "Process group watchdog thread terminated with exception: CUDA error: uncorrectable ECC" in done.stderr
    assert "terminate called after throwing an instance of 'c10::DistBackendError'" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it is the GPU's memory that is limited")
def test_memory_is_out() -> None:
    """The allocator itself says so, in the call, and again when a job that caught it asks for more."""
    then = """
for what in (lambda: one.apply(site), lambda: torch.empty(1 << 28, dtype=torch.uint8)):
    try:
        what()
    except RuntimeError as error:
        print("can't allocate memory" in str(error))
"""
    done = apply("cuda", "OutOfMemory", then)
    assert done.stdout.splitlines() == ["True", "True"], done.stderr
