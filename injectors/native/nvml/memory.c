/* What is wrong with a GPU's memory: ECC counts, retired pages, remapped rows. */
#include "overlay.h"

#include <stdio.h>
#include <time.h>

/* ECC. An order without a location is for the device's memory. Without an order on the sum, the locations are added. */

enum { DEVICE_MEMORY = 2, LOCATIONS = 8 };
static const char *const LOCATION[] = {"l1", "l2", "device", "register", "texture", "shared", "cbu", "sram"};

static void ecc_key(char *key, size_t size, unsigned type, unsigned counter, const char *location)
{
    snprintf(key, size, "ecc.%s.%s%s%s", counter == AGGREGATE ? "aggregate" : "volatile",
             type == UNCORRECTED ? "uncorrected" : "corrected", location ? "." : "", location ? location : "");
}

bool lay_ecc(int gpu, unsigned type, unsigned counter, int location, u64 *value)
{
    char key[64];
    if (location >= 0) {
        ecc_key(key, sizeof key, type, counter, LOCATION[location]);
        if (lay(gpu, key, value))
            return true;
        ecc_key(key, sizeof key, type, counter, NULL);
        return location == DEVICE_MEMORY && lay(gpu, key, value);
    }
    ecc_key(key, sizeof key, type, counter, NULL);
    if (lay(gpu, key, value))
        return true;
    bool any = false;
    for (unsigned one = 0; one < LOCATIONS; one++) {
        u64 there = 0;
        ecc_key(key, sizeof key, type, counter, LOCATION[one]);
        if (lay(gpu, key, &there))
            *value += there, any = true;
    }
    return any;
}

static int settle_ecc(int result, int gpu, unsigned type, unsigned counter, int location, u64 *count)
{
    if (!may_lay(result))
        return result;
    u64 value = result == SUCCESS ? *count : 0;
    if (!lay_ecc(gpu, type, counter, location, &value))
        return result;
    *count = value;
    return SUCCESS;
}

static int zero_count(unsigned type, unsigned counter, u64 *count)
{
    if (type > 1 || counter > 1 || !count)
        return INVALID_ARGUMENT;
    *count = 0;
    return SUCCESS;
}

int serve_nvmlDeviceGetTotalEccErrors(Device device, unsigned type, unsigned counter, u64 *count)
{
    int result = ASK(nvmlDeviceGetTotalEccErrors, zero_count(type, counter, count), device, type, counter, count);
    return type > 1 || counter > 1 || !count ? result : settle_ecc(result, gpu_of(device), type, counter, -1, count);
}

int serve_nvmlDeviceGetMemoryErrorCounter(Device device, unsigned type, unsigned counter, unsigned location, u64 *count)
{
    int result = ASK(nvmlDeviceGetMemoryErrorCounter, zero_count(type, counter, count), device, type, counter, location, count);
    if (type > 1 || counter > 1 || location >= LOCATIONS || !count)
        return have_driver() ? result : INVALID_ARGUMENT;
    return settle_ecc(result, gpu_of(device), type, counter, (int)location, count);
}

int serve_nvmlDeviceGetDetailedEccErrors(Device device, unsigned type, unsigned counter, EccCounts *counts)
{
    u64 unused;
    int gpu = gpu_of(device), plain = counts ? zero_count(type, counter, &unused) : INVALID_ARGUMENT;
    int result = ASK(nvmlDeviceGetDetailedEccErrors, plain, device, type, counter, counts);
    if (plain != SUCCESS || !may_lay(result))
        return result;
    EccCounts made = result == SUCCESS && have_driver() ? *counts : (EccCounts){0};
    bool any = lay_ecc(gpu, type, counter, 0, &made.l1) | lay_ecc(gpu, type, counter, 1, &made.l2)
               | lay_ecc(gpu, type, counter, 2, &made.device) | lay_ecc(gpu, type, counter, 3, &made.registers);
    if (result == SUCCESS || any) {
        *counts = made;
        return SUCCESS;
    }
    return result;
}

int serve_nvmlDeviceGetSramEccErrorStatus(Device device, Sram1 *status)
{
    NEEDS(status);
    unsigned version = status->version;
    int gpu = gpu_of(device);
    int result = ASK(nvmlDeviceGetSramEccErrorStatus, version == VERSION(Sram1, 1) ? SUCCESS : VERSION_MISMATCH, device, status);
    if (version != VERSION(Sram1, 1) || !may_lay(result))
        return result;
    Sram1 made = {.version = version};
    if (result == SUCCESS && have_driver())
        made = *status;
    const struct { const char *key; u64 *value; } PARTS[] = {
        {"sram.aggregate.uncorrected.parity", &made.aggregate_parity},
        {"sram.aggregate.uncorrected.secded", &made.aggregate_secded},
        {"sram.aggregate.corrected", &made.aggregate_corrected},
        {"sram.volatile.uncorrected.parity", &made.volatile_parity},
        {"sram.volatile.uncorrected.secded", &made.volatile_secded},
        {"sram.volatile.corrected", &made.volatile_corrected},
        {"sram.bucket.l2", &made.bucket_l2}, {"sram.bucket.sm", &made.bucket_sm}, {"sram.bucket.pcie", &made.bucket_pcie},
        {"sram.bucket.mcu", &made.bucket_mcu}, {"sram.bucket.other", &made.bucket_other},
    };
    bool any = lay32(gpu, "sram.threshold_exceeded", &made.threshold_exceeded);
    for (size_t i = 0; i < sizeof PARTS / sizeof *PARTS; i++)
        any |= lay(gpu, PARTS[i].key, PARTS[i].value);
    if (result != SUCCESS && !any)
        return result;
    *status = made;
    return SUCCESS;
}

/* Retired pages: more than the driver knows, at invented addresses. */

enum { DOUBLE_BIT = 1, PAGES_BELOW = 4096 };

static int pages(Device device, unsigned cause, unsigned *count, u64 *addresses, u64 *times, int (*driver)(Device, unsigned, unsigned *, u64 *, u64 *))
{
    static __thread u64 theirs[PAGES_BELOW], their_times[PAGES_BELOW];
    NEEDS(count);
    unsigned have = PAGES_BELOW, room = *count;
    int result = driver ? driver(device, cause, &have, theirs, times ? their_times : NULL) : cause > 1 ? INVALID_ARGUMENT : SUCCESS;
    if (!may_lay(result))
        return result;
    if (!driver || result != SUCCESS)
        have = 0;
    u64 more = 0;
    bool any = lay(gpu_of(device), cause == DOUBLE_BIT ? "retired.double_bit" : "retired.single_bit", &more);
    if (result != SUCCESS && !any)
        return result;
    unsigned added = more > PAGES_BELOW - have ? PAGES_BELOW - have : (unsigned)more;
    *count = have + added;
    if (room < *count)
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; addresses && i < *count; i++)
        addresses[i] = i < have ? theirs[i] : 0x7E0000000ULL + 0x1000ULL * (i - have);
    for (unsigned i = 0; times && i < *count; i++)
        times[i] = i < have ? their_times[i] : (u64)time(NULL) * 1000000;
    return SUCCESS;
}

static int pages_without_times(Device device, unsigned cause, unsigned *count, u64 *addresses, u64 *times)
{
    (void)times;
    int (*driver)(Device, unsigned, unsigned *, u64 *) = (int (*)(Device, unsigned, unsigned *, u64 *))real(SYM_nvmlDeviceGetRetiredPages);
    return driver(device, cause, count, addresses);
}

int serve_nvmlDeviceGetRetiredPages(Device device, unsigned cause, unsigned *count, u64 *addresses)
{
    return pages(device, cause, count, addresses, NULL, real(SYM_nvmlDeviceGetRetiredPages) ? pages_without_times : NULL);
}

int serve_nvmlDeviceGetRetiredPages_v2(Device device, unsigned cause, unsigned *count, u64 *addresses, u64 *times)
{
    return pages(device, cause, count, addresses, times, (int (*)(Device, unsigned, unsigned *, u64 *, u64 *))real(SYM_nvmlDeviceGetRetiredPages_v2));
}

static int zero(unsigned *value)
{
    NEEDS(value);
    *value = 0;
    return SUCCESS;
}

int serve_nvmlDeviceGetRetiredPagesPendingStatus(Device device, unsigned *pending)
{
    int result = ASK(nvmlDeviceGetRetiredPagesPendingStatus, zero(pending), device, pending);
    return pending ? settle32(result, gpu_of(device), "retired.pending", pending) : result;
}

/* Row remapping. */

static int zero_rows(unsigned *a, unsigned *b, unsigned *c, unsigned *d)
{
    return zero(a) | zero(b) | zero(c) | zero(d);
}

int serve_nvmlDeviceGetRemappedRows(Device device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failure)
{
    int gpu = gpu_of(device);
    int result = ASK(nvmlDeviceGetRemappedRows, zero_rows(corrected, uncorrected, pending, failure), device, corrected, uncorrected, pending, failure);
    if (!corrected || !uncorrected || !pending || !failure || !may_lay(result))
        return result;
    unsigned made[4] = {0};
    if (result == SUCCESS)
        made[0] = *corrected, made[1] = *uncorrected, made[2] = *pending, made[3] = *failure;
    if (!(lay32(gpu, "remap.corrected", &made[0]) | lay32(gpu, "remap.uncorrected", &made[1]) | lay32(gpu, "remap.pending", &made[2])
          | lay32(gpu, "remap.failure", &made[3])))
        return result;
    *corrected = made[0], *uncorrected = made[1], *pending = made[2], *failure = made[3];
    return SUCCESS;
}

int serve_nvmlDeviceGetRemappedRows_v2(Device device, Remapped2 *rows)
{
    NEEDS(rows);
    int gpu = gpu_of(device);
    int result = ASK(nvmlDeviceGetRemappedRows_v2, SUCCESS, device, rows);
    if (!may_lay(result))
        return result;
    Remapped2 made = {0};
    if (result == SUCCESS && have_driver())
        made = *rows;
    bool any = lay32(gpu, "remap.corrected", &made.corrected) | lay32(gpu, "remap.corrected_inactive", &made.corrected_inactive)
               | lay32(gpu, "remap.uncorrected", &made.uncorrected) | lay32(gpu, "remap.uncorrected_inactive", &made.uncorrected_inactive)
               | lay32(gpu, "remap.pending", &made.pending) | lay32(gpu, "remap.failure", &made.failure);
    if (result != SUCCESS && !any)
        return result;
    *rows = made;
    return SUCCESS;
}

int serve_nvmlDeviceGetRowRemapperHistogram(Device device, Histogram *histogram)
{
    NEEDS(histogram);
    int gpu = gpu_of(device);
    int result = ASK(nvmlDeviceGetRowRemapperHistogram, SUCCESS, device, histogram);
    if (!may_lay(result))
        return result;
    Histogram made = {.max = 640};
    if (result == SUCCESS && have_driver())
        made = *histogram;
    bool any = lay32(gpu, "remap.histogram.max", &made.max) | lay32(gpu, "remap.histogram.high", &made.high)
               | lay32(gpu, "remap.histogram.partial", &made.partial) | lay32(gpu, "remap.histogram.low", &made.low)
               | lay32(gpu, "remap.histogram.none", &made.none);
    if (result != SUCCESS && !any)
        return result;
    *histogram = made;
    return SUCCESS;
}

int serve_nvmlDeviceGetRepairStatus(Device device, Repair1 *status)
{
    NEEDS(status);
    unsigned version = status->version;
    int result = ASK(nvmlDeviceGetRepairStatus, version == VERSION(Repair1, 1) ? SUCCESS : VERSION_MISMATCH, device, status);
    if (version != VERSION(Repair1, 1) || !may_lay(result))
        return result;
    Repair1 made = {.version = version};
    if (result == SUCCESS && have_driver())
        made = *status;
    bool any = lay32(gpu_of(device), "repair.channel", &made.channel_pending) | lay32(gpu_of(device), "repair.tpc", &made.tpc_pending);
    if (result != SUCCESS && !any)
        return result;
    *status = made;
    return SUCCESS;
}

int serve_nvmlDeviceGetUnrepairableMemoryFlag_v1(Device device, Unrepairable1 *status)
{
    NEEDS(status);
    unsigned version = status->version;
    int result = ASK(nvmlDeviceGetUnrepairableMemoryFlag_v1, version == VERSION(Unrepairable1, 1) ? zero(&status->unrepairable) : VERSION_MISMATCH, device, status);
    if (version != VERSION(Unrepairable1, 1))
        return result;
    return settle32(result, gpu_of(device), "unrepairable", &status->unrepairable);
}
