"""A library in place of the driver's, that plays answers from a file: what the simulated GPUs of the overlay never show,
such as processes on a GPU. Functions that it lacks are those that an early driver lacks."""

from __future__ import annotations

import subprocess
from pathlib import Path

# $ANSWERS has lines such as `gpu1.busy 100`. `gpuN.fails CODE`: every call about that GPU fails so.
SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static long answer(long gpu, const char *key, long otherwise)
{
    char wanted[64], name[64];
    long found = otherwise, value;
    FILE *file = fopen(getenv("ANSWERS"), "r");
    snprintf(wanted, sizeof wanted, gpu < 0 ? "%s" : "gpu%2$ld.%1$s", key, gpu);
    while (file && fscanf(file, "%63s %ld", name, &value) == 2)
        found = strcmp(name, wanted) == 0 ? value : found;
    if (file)
        fclose(file);
    return found;
}
#define GPU(device) ((long)(device) - 1)
#define FAILS(device) do { int code = answer(GPU(device), "fails", 0); if (code) return code; } while (0)
typedef struct { unsigned pid; unsigned long long bytes; unsigned gi, ci; } Process;
typedef struct { unsigned id, scope; long long at, took; unsigned type; int result; unsigned long long value; } Field;
int nvmlInitWithFlags(unsigned flags) { return answer(-1, "init", 0); }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = answer(-1, "gpus", 1); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    *device = (void *)(long)(index + 1);
    return index < (unsigned)answer(-1, "gpus", 1) ? 0 : 2;
}
int nvmlDeviceGetIndex(void *device, unsigned *index) { *index = GPU(device); return 0; }
int nvmlDeviceGetHandleByUUID(const char *name, void **device) { *device = (void *)100L; return strcmp(name, "MIG-a") ? 6 : 0; }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *mig, void **device) { *device = (void *)3L; return 0; }
int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates)
{
    FAILS(device);
    rates[0] = answer(GPU(device), "busy", 0), rates[1] = answer(GPU(device), "memory_busy", 0);
    return answer(GPU(device), "mig", 0) ? 3 : 0;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory)
{
    FAILS(device);
    memory[0] = 80ULL << 30, memory[2] = answer(GPU(device), "memory", 0), memory[1] = memory[0] - memory[2];
    return 0;
}
int nvmlDeviceGetFieldValues(void *device, int count, Field *fields)
{
    char key[32];
    FAILS(device);
    for (int i = 0; i < count; i++) {
        snprintf(key, sizeof key, "field.%u", fields[i].id);
        long value = answer(GPU(device), key, -1);
        fields[i].result = value < 0 ? 3 : 0, fields[i].type = 3, fields[i].value = value;
    }
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Process *processes)
{
    FAILS(device);
    unsigned room = *count;
    long pid = answer(GPU(device), "pid", 0);
    *count = pid != 0;
    if (pid && room == 0)
        return 7;
    if (pid)
        processes[0] = (Process){pid, 1 << 30, -1, -1};
    return 0;
}
"""


def build(folder: Path) -> Path:
    """Compiles it into the folder, under the name that nvidia-ml-py looks for."""
    (folder / "driver.c").write_text(SOURCE)
    made = folder / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", str(made), str(folder / "driver.c")], check=True)
    return made
