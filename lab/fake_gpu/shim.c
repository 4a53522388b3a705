/* Stands before FakeGPU's CUDA runtime, which is one of CUDA 12, for a torch that was built for CUDA 13. */

#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <string.h>

/* Its structure has another layout in CUDA 13. The values are those of an H100. */
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device)
{
    int devices = 0;
    size_t left = 0, total = 80ull << 30;
    cudaGetDeviceCount(&devices);
    if (device < 0 || device >= devices)
        return cudaErrorInvalidDevice;
    cudaMemGetInfo(&left, &total);
    memset(found, 0, sizeof *found);
    strcpy(found->name, "Simulated GPU (FakeGPU)");
    found->totalGlobalMem = total, found->major = 9, found->multiProcessorCount = 132, found->warpSize = 32;
    found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024, found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 2147483647, found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->maxThreadsPerMultiProcessor = 2048, found->maxBlocksPerMultiProcessor = 32, found->l2CacheSize = 50 << 20;
    found->sharedMemPerBlock = 49152, found->sharedMemPerBlockOptin = 232448, found->sharedMemPerMultiprocessor = 233472;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536, found->unifiedAddressing = 1, found->pciBusID = device + 1;
    return cudaSuccess;
}

/* torch refuses kernels that were built for another GPU. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel)
{
    (void)kernel;
    memset(found, 0, sizeof *found);
    found->binaryVersion = found->ptxVersion = 90, found->maxThreadsPerBlock = 1024, found->numRegs = 32;
    found->maxDynamicSharedSizeBytes = 232448;
    return cudaSuccess;
}

/* FakeGPU's event is over only after somebody has waited for its stream. */
cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaEventSynchronize(event); }

static int not_supported(void) { return cudaErrorNotSupported; }

/* FakeGPU reports a function that it has as one that it lacks, and torch asks for all that it might need. */
cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **found, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *how)
{
    (void)version, (void)flags;
    *found = dlsym(RTLD_DEFAULT, name);
    if (!*found)
        *found = (void *)not_supported;
    if (how)
        *how = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
