/* Handles of GPUs, and what all functions of the overlay share. */
#include "overlay.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

bool may_lay(int result) { return result == SUCCESS || result == NOT_SUPPORTED; }

/* One number: `value` as the driver left it (0 where it has none), under the order on `key`. */
int settle(int result, int gpu, const char *key, u64 *value)
{
    if (!may_lay(result))
        return result;
    u64 wide = result == SUCCESS ? *value : 0;
    if (!lay(gpu, key, &wide))
        return result;
    *value = wide;
    return SUCCESS;
}

int settle32(int result, int gpu, const char *key, unsigned *value)
{
    u64 wide = result == SUCCESS ? *value : 0;
    result = settle(result, gpu, key, &wide);
    if (result == SUCCESS)
        *value = (unsigned)wide;
    return result;
}

/* Handles. A lost GPU has no handle. */

static int found(int result, Device *device)
{
    return result == SUCCESS ? refusal(gpu_of(*device), "nvmlDeviceGetHandle") : result;
}

static int simulated_by_index(unsigned index, Device *device)
{
    NEEDS(device);
    if (!simulated_ready())
        return UNINITIALIZED;
    if (index >= simulated_count())
        return INVALID_ARGUMENT;
    *device = simulated_device(index);
    return SUCCESS;
}

static int simulated_by_text(const char *text, Device *device, const char *(*name)(unsigned, char *, size_t))
{
    char made[64];
    NEEDS(text && device);
    if (!simulated_ready())
        return UNINITIALIZED;
    for (unsigned gpu = 0; gpu < simulated_count(); gpu++)
        if (strcasecmp(text, name(gpu, made, sizeof made)) == 0)
            return simulated_by_index(gpu, device);
    return NOT_FOUND;
}

static const char *uuid_of(unsigned gpu, char *into, size_t size)
{
    snprintf(into, size, "GPU-746f7263-6861-6f73-0000-%012x", gpu);
    return into;
}
static const char *serial_of(unsigned gpu, char *into, size_t size) { snprintf(into, size, "%013u", gpu); return into; }
static const char *bus_of(unsigned gpu, char *into, size_t size) { snprintf(into, size, "0000:%02x:00.0", 0x10 + gpu); return into; }

static int simulated_by_bus(const char *bus, Device *device)
{
    NEEDS(bus);
    return simulated_by_text(strncmp(bus, "00000000:", 9) == 0 ? bus + 4 : bus, device, bus_of);
}

int serve_nvmlDeviceGetHandleByIndex(unsigned index, Device *device)
{
    return found(ASK(nvmlDeviceGetHandleByIndex, simulated_by_index(index, device), index, device), device);
}
int serve_nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device)
{
    return found(ASK(nvmlDeviceGetHandleByIndex_v2, simulated_by_index(index, device), index, device), device);
}
int serve_nvmlDeviceGetHandleByPciBusId(const char *bus, Device *device)
{
    return found(ASK(nvmlDeviceGetHandleByPciBusId, simulated_by_bus(bus, device), bus, device), device);
}
int serve_nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Device *device)
{
    return found(ASK(nvmlDeviceGetHandleByPciBusId_v2, simulated_by_bus(bus, device), bus, device), device);
}
int serve_nvmlDeviceGetHandleByUUID(const char *uuid, Device *device)
{
    return found(ASK(nvmlDeviceGetHandleByUUID, simulated_by_text(uuid, device, uuid_of), uuid, device), device);
}
int serve_nvmlDeviceGetHandleBySerial(const char *serial, Device *device)
{
    return found(ASK(nvmlDeviceGetHandleBySerial, simulated_by_text(serial, device, serial_of), serial, device), device);
}
