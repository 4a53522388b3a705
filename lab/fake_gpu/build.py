"""Makes a folder in which a CUDA build of torch trains on two simulated GPUs, with right numbers, without a driver.

FakeGPU (github.com/FanBB2333/FakeGPU) simulates the CUDA driver and runtime, cuBLAS, NCCL and NVML. Its kernels do
nothing. So compute.cpp lets the CPU run each operator, and shim.c adapts what CUDA 13 changed. Collectives are
FakeGPU's: they return only when all ranks have joined them.

Usage: python lab/fake_gpu/build.py FAKEGPU_SOURCES FOLDER [TORCH_VERSION], and then:

    . FOLDER/env; FOLDER/coordinator &      # one coordinator for all jobs
    lab/gpu-check --slow 3

Needs cmake, ninja, g++, readelf and pip. Downloads torch (530 MB) and the headers of CUDA's runtime.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TORCH, RUNTIME = "2.13.0", "nvidia-cuda-runtime==13.0.*"
TARGETS = {  # of FakeGPU's build: the names under which torch loads the library
    "fake_gpu": ("libnvidia-ml.so.1", "libnvidia-ml.so.1"), "fake_cuda": ("libcuda.so.1", "libcuda.so.1"),
    "fake_cudart": ("libcudart.so.12", "libcudart.so.13"), "fake_nccl": ("libnccl.so.2", "libnccl.so.2"),
    "fake_cublas": ("libcublas.so.12", "libcublas.so.13"),
}  # fmt: skip
# Words that the headers leave to the CUDA compiler.
WORDS = (
    "CUDARTAPI", "CUDARTAPI_CDECL", "__constant__", "__cudart_builtin__", "__device__", "__device_builtin__",
    "__device_builtin_surface_type__", "__device_builtin_texture_type__", "__global__", "__host__", "__managed__",
    "__shared__",
)  # fmt: skip
LOAD = """

import ctypes as _ctypes
_ctypes.CDLL({path!r})
_C._set_sdp_use_flash(False), _C._set_sdp_use_mem_efficient(False), _C._set_sdp_use_cudnn(False)  # these are CUDA only
"""
# FakeGPU reads a part of YAML only: no braces.
CLUSTER = """version: 1
cluster:
  name: two
  default_backend: nccl
nodes:
  - id: node0
    host: 127.0.0.1
    ranks: [0, 1]
    gpus:
      - profile: h100
      - profile: h100
fabric:
  intra_node:
    type: nvlink
    bandwidth_gbps: 300
    latency_us: 3
  inter_node:
    type: infiniband
    bandwidth_gbps: 200
    latency_us: 15
    oversubscription: 1.5
"""


def run(*command: object) -> None:
    print("+", *command, flush=True)
    subprocess.run(list(map(str, command)), check=True)


def libraries(sources: Path, folder: Path) -> list[Path]:
    run("cmake", "-S", sources, "-B", folder / "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release")
    run("ninja", "-C", folder / "build", *TARGETS, "fakegpu_coordinator")
    (folder / "lib").mkdir(exist_ok=True)
    for made, name in TARGETS.values():
        (folder / "lib" / name).write_bytes((folder / "build" / made).read_bytes())
    (folder / "lib" / "libcublasLt.so.13").write_bytes((folder / "lib" / "libcublas.so.13").read_bytes())
    run("pip", "download", "-q", "--no-deps", "--dest", folder / "wheels", RUNTIME)
    run("unzip", "-qo", next((folder / "wheels").glob("nvidia_cuda_runtime*")), "-d", folder / "headers")
    given = folder / "headers" / "crt" / "host_defines.h"
    given.parent.mkdir(exist_ok=True)
    aligned = "#define __align__(n) __attribute__((aligned(n)))\n#define __builtin_align__(n) __align__(n)\n"
    given.write_text(aligned + "".join(f"#define {word}\n" for word in WORDS))
    include = ["-I", folder / "headers", "-I", next((folder / "headers").rglob("cuda_runtime_api.h")).parent]
    run("gcc", "-shared", "-fPIC", "-w", *include, HERE / "shim.c", "-o", folder / "lib" / "libshim.so")
    return [folder / "lib" / name for name in ("libshim.so", *(name for _made, name in TARGETS.values()))]


def torch(folder: Path, version: str) -> None:
    run("pip", "install", "-q", "--no-deps", "--target", folder / "site", f"torch=={version}")
    own = folder / "site" / "torch"
    run(sys.executable, HERE.parents[1] / "ci" / "cuda_stubs.py", own / "lib")
    made, include = folder / "lib" / "compute.so", own / "include"
    include_all = ["-I", include, "-I", include / "torch" / "csrc" / "api" / "include"]
    linked = ["-o", made, f"-L{own / 'lib'}", "-ltorch_cpu", "-lc10"]
    run("g++", "-shared", "-fPIC", "-w", "-std=c++20", *include_all, HERE / "compute.cpp", *linked)
    with open(own / "__init__.py", "a") as file:
        file.write(LOAD.format(path=str(made)))


def main(sources: Path, folder: Path, version: str = TORCH) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    preloaded = libraries(sources, folder)
    torch(folder, version)
    (folder / "cluster.yaml").write_text(CLUSTER)
    socket, program = folder / "coordinator.sock", folder / "build" / "fakegpu-coordinator"
    serve = f"rm -f {socket}; {program} --transport unix --address {socket}; sleep 1"
    starts = f"#!/bin/sh\n# A coordinator ends with its job.\nwhile :; do {serve}; done\n"
    (folder / "coordinator").write_text(starts)
    (folder / "coordinator").chmod(0o755)
    env = {
        "LD_LIBRARY_PATH": f"{folder / 'lib'}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}", "PYTHONPATH": folder / "site",
        "LD_PRELOAD": ":".join(map(str, preloaded)), "FAKEGPU_MODE": "simulate", "FAKEGPU_DIST_MODE": "simulate",
        "FAKEGPU_DEVICE_COUNT": 2, "FAKEGPU_PROFILE": "h100", "FAKEGPU_TERMINAL_REPORT": 0,
        "FAKEGPU_REPORT_PATH": folder / "report.json", "FAKEGPU_CLUSTER_CONFIG": folder / "cluster.yaml",
        "FAKEGPU_COORDINATOR_TRANSPORT": "unix", "FAKEGPU_COORDINATOR_ADDR": socket,
        "FAKEGPU_COORDINATOR_TIMEOUT_MS": 120_000,
    }  # fmt: skip
    (folder / "env").write_text("".join(f"export {name}={value}\n" for name, value in env.items()))
    print(f". {folder / 'env'}; {folder / 'coordinator'} &")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), *sys.argv[3:]))
