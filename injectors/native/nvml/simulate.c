/* GPUs that are not there: what a machine without a driver answers. */
#include "overlay.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GIVE(pointer, value) do { NEEDS(pointer); *(pointer) = (value); return SUCCESS; } while (0)

static char handles[MAX_GPUS]; /* a handle is the address of one */
static int initialised;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const u64 MEMORY = 80ULL << 30, USED = 1ULL << 30;

unsigned simulated_count(void)
{
    const char *named = getenv("TORCHAOS_NVML_GPUS");
    u64 count = named ? strtoull(named, NULL, 10) : 1;
    if (orders_given())
        ordered(ANY_GPU, "gpus", &count);
    return count > MAX_GPUS ? MAX_GPUS : (unsigned)count;
}

Device simulated_device(unsigned gpu) { return &handles[gpu]; }

int simulated_index(Device device)
{
    uintptr_t at = (uintptr_t)device, first = (uintptr_t)handles;
    return at >= first && at - first < simulated_count() ? (int)(at - first) : -1;
}

static int count_init(int change)
{
    pthread_mutex_lock(&lock);
    bool fine = initialised + change >= 0;
    initialised += fine ? change : 0;
    pthread_mutex_unlock(&lock);
    return fine ? SUCCESS : UNINITIALIZED;
}

bool simulated_ready(void)
{
    pthread_mutex_lock(&lock);
    bool ready = initialised > 0;
    pthread_mutex_unlock(&lock);
    return ready;
}

static int text(char *into, unsigned length, const char *what)
{
    NEEDS(into);
    if (strlen(what) >= length)
        return INSUFFICIENT_SIZE;
    strcpy(into, what);
    return SUCCESS;
}

int serve_nvmlInit(void) { return count_init(1); }
int serve_nvmlInit_v2(void) { return count_init(1); }
int serve_nvmlInitWithFlags(unsigned flags) { (void)flags; return count_init(1); }
int serve_nvmlShutdown(void) { return count_init(-1); }

const char *serve_nvmlErrorString(int code)
{
    static const struct { int code; const char *text; } TEXTS[] = {
        {0, "Success"}, {1, "Uninitialized"}, {2, "Invalid Argument"}, {3, "Not Supported"},
        {4, "Insufficient Permissions"}, {6, "Not Found"}, {7, "Insufficient Size"}, {9, "Driver Not Loaded"},
        {10, "Timeout"}, {12, "Shared Library Not Found"}, {13, "Function Not Found"}, {15, "GPU is lost"},
        {16, "GPU requires restart"}, {18, "Driver/library version mismatch"}, {20, "Insufficient Memory"},
        {25, "Invalid Argument version"}, {999, "Unknown Error"},
    };
    for (size_t i = 0; i < sizeof TEXTS / sizeof *TEXTS; i++)
        if (TEXTS[i].code == code)
            return TEXTS[i].text;
    return "Unknown Error";
}

int serve_nvmlSystemGetDriverVersion(char *version, unsigned length) { return text(version, length, "580.65.06"); }
int serve_nvmlSystemGetNVMLVersion(char *version, unsigned length) { return text(version, length, "13.580.65.06"); }
int serve_nvmlSystemGetCudaDriverVersion(int *version) { GIVE(version, 13000); }
int serve_nvmlSystemGetCudaDriverVersion_v2(int *version) { GIVE(version, 13000); }

static int give_count(unsigned *count)
{
    if (!simulated_ready())
        return UNINITIALIZED;
    GIVE(count, simulated_count());
}
int serve_nvmlDeviceGetCount(unsigned *count) { return give_count(count); }
int serve_nvmlDeviceGetCount_v2(unsigned *count) { return give_count(count); }
int serve_nvmlDeviceGetIndex(Device device, unsigned *index) { GIVE(index, (unsigned)simulated_index(device)); }
int serve_nvmlDeviceGetMinorNumber(Device device, unsigned *minor) { GIVE(minor, (unsigned)simulated_index(device)); }

int serve_nvmlDeviceGetUUID(Device device, char *uuid, unsigned length)
{
    char made[48]; /* "torchaos" in hexadecimal, and the index */
    snprintf(made, sizeof made, "GPU-746f7263-6861-6f73-0000-%012x", (unsigned)simulated_index(device));
    return text(uuid, length, made);
}

int serve_nvmlDeviceGetSerial(Device device, char *serial, unsigned length)
{
    char made[32];
    snprintf(made, sizeof made, "%013u", (unsigned)simulated_index(device));
    return text(serial, length, made);
}

int serve_nvmlDeviceGetName(Device device, char *name, unsigned length)
{
    (void)device;
    return text(name, length, "NVIDIA H100 80GB HBM3 (simulated by torchaos)");
}

/* Each version of the struct has its own length; the struct of an old caller has no room for the new members. */
static int give_pci(Device device, void *into, size_t size)
{
    Pci3 made = {.bus = 0x10u + (unsigned)simulated_index(device), .id = 0x233010DEu, .subsystem = 0x16C110DEu};
    NEEDS(into);
    snprintf(made.legacy, sizeof made.legacy, "0000:%02X:00.0", made.bus);
    snprintf(made.bus_id, sizeof made.bus_id, "00000000:%02X:00.0", made.bus);
    memcpy(into, &made, size);
    return SUCCESS;
}
int serve_nvmlDeviceGetPciInfo(Device d, void *pci) { return give_pci(d, pci, offsetof(Pci3, subsystem)); }
int serve_nvmlDeviceGetPciInfo_v2(Device d, void *pci) { return give_pci(d, pci, offsetof(Pci3, bus_id)); }
int serve_nvmlDeviceGetPciInfo_v3(Device d, void *pci) { return give_pci(d, pci, sizeof(Pci3)); }

int serve_nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor)
{
    (void)device;
    NEEDS(major && minor);
    *major = 9, *minor = 0;
    return SUCCESS;
}

int serve_nvmlDeviceGetMemoryInfo(Device device, Memory1 *memory)
{
    (void)device;
    GIVE(memory, ((Memory1){MEMORY, MEMORY - USED, USED}));
}

int serve_nvmlDeviceGetMemoryInfo_v2(Device device, Memory2 *memory)
{
    (void)device;
    NEEDS(memory);
    if (memory->version != VERSION(Memory2, 2))
        return VERSION_MISMATCH;
    *memory = (Memory2){VERSION(Memory2, 2), MEMORY, 0, MEMORY - USED, USED};
    return SUCCESS;
}

int serve_nvmlDeviceGetUtilizationRates(Device device, Utilization *rates) { (void)device; GIVE(rates, ((Utilization){90, 40})); }

int serve_nvmlDeviceGetEccMode(Device device, unsigned *current, unsigned *pending)
{
    (void)device;
    NEEDS(current && pending);
    *current = *pending = 1;
    return SUCCESS;
}

int serve_nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending)
{
    (void)device;
    NEEDS(current && pending);
    *current = *pending = 0;
    return SUCCESS;
}

int serve_nvmlDeviceGetPersistenceMode(Device device, unsigned *mode) { (void)device; GIVE(mode, 1); }
int serve_nvmlDeviceGetPerformanceState(Device device, unsigned *state) { (void)device; GIVE(state, 0); }
int serve_nvmlDeviceGetComputeMode(Device device, unsigned *mode) { (void)device; GIVE(mode, 0); }
int serve_nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned *limit) { (void)device; GIVE(limit, 700000); }
int serve_nvmlDeviceGetPowerManagementLimit(Device device, unsigned *limit) { (void)device; GIVE(limit, 700000); }

static int no_processes(unsigned *count) { GIVE(count, 0); }
int serve_nvmlDeviceGetComputeRunningProcesses(Device d, unsigned *n, void *into) { (void)d, (void)into; return no_processes(n); }
int serve_nvmlDeviceGetComputeRunningProcesses_v2(Device d, unsigned *n, void *into) { (void)d, (void)into; return no_processes(n); }
int serve_nvmlDeviceGetComputeRunningProcesses_v3(Device d, unsigned *n, void *into) { (void)d, (void)into; return no_processes(n); }
int serve_nvmlDeviceGetGraphicsRunningProcesses_v3(Device d, unsigned *n, void *into) { (void)d, (void)into; return no_processes(n); }

int serve_nvmlDeviceGetSupportedClocksEventReasons(Device d, u64 *reasons) { (void)d; GIVE(reasons, 0x1FF); }
int serve_nvmlDeviceGetSupportedClocksThrottleReasons(Device d, u64 *reasons) { (void)d; GIVE(reasons, 0x1FF); }
int serve_nvmlDeviceGetSupportedEventTypes(Device d, u64 *types) { (void)d; GIVE(types, 0x1F); }

int serve_nvmlDeviceGetTemperatureThreshold(Device device, unsigned kind, unsigned *celsius)
{
    static const unsigned LIMITS[] = {95, 90, 95, 87}; /* shutdown, slowdown, memory's, the GPU's */
    (void)device;
    NEEDS(celsius);
    if (kind >= sizeof LIMITS / sizeof *LIMITS)
        return NOT_SUPPORTED;
    GIVE(celsius, LIMITS[kind]);
}

static int clock_of(unsigned kind, unsigned *mhz)
{
    static const unsigned CLOCKS[] = {1980, 1980, 2619, 1545}; /* graphics, SM, memory, video */
    if (kind >= sizeof CLOCKS / sizeof *CLOCKS)
        return INVALID_ARGUMENT;
    GIVE(mhz, CLOCKS[kind]);
}
int serve_nvmlDeviceGetClockInfo(Device device, unsigned kind, unsigned *mhz) { (void)device; return clock_of(kind, mhz); }
int serve_nvmlDeviceGetMaxClockInfo(Device device, unsigned kind, unsigned *mhz) { (void)device; return clock_of(kind, mhz); }
