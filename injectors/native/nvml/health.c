/* What an order can change of a GPU's health: counts, rows, pages, links, clocks, temperature, power, presence.
 *
 * Each function asks the driver first, then lays the orders over its answer. Where the driver says that the GPU does not
 * have it, an order gives it. Nothing is written past what the caller's struct, by its version, has. */
#include "overlay.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

/* The driver's answer, or `otherwise` where there is no driver. */
#define ASK(name, otherwise, ...) \
    (real(SYM_##name) ? ((__typeof__(&serve_##name))real(SYM_##name))(__VA_ARGS__) : (otherwise))
#define NEEDS(pointer) do { if (!(pointer)) return INVALID_ARGUMENT; } while (0)

static bool may_lay(int result) { return result == SUCCESS || result == NOT_SUPPORTED; }

/* One number: `value` as the driver left it (0 where it has none), under the order on `key`. */
static int settle(int result, int gpu, const char *key, u64 *value)
{
    if (!may_lay(result))
        return result;
    u64 wide = result == SUCCESS ? *value : 0;
    if (!lay(gpu, key, &wide))
        return result;
    *value = wide;
    return SUCCESS;
}

static int settle32(int result, int gpu, const char *key, unsigned *value)
{
    u64 wide = result == SUCCESS ? *value : 0;
    result = settle(result, gpu, key, &wide);
    if (result == SUCCESS)
        *value = (unsigned)wide;
    return result;
}

/* Handles. A GPU that is lost has none any more. */

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

/* ECC. An order without a location is of the device's memory; without one on the sum, the sum is that of the locations. */

enum { CORRECTED = 0, UNCORRECTED = 1, VOLATILE = 0, AGGREGATE = 1, DEVICE_MEMORY = 2, LOCATIONS = 8 };
static const char *const LOCATION[] = {"l1", "l2", "device", "register", "texture", "shared", "cbu", "sram"};

static void ecc_key(char *key, size_t size, unsigned type, unsigned counter, const char *location)
{
    snprintf(key, size, "ecc.%s.%s%s%s", counter == AGGREGATE ? "aggregate" : "volatile",
             type == UNCORRECTED ? "uncorrected" : "corrected", location ? "." : "", location ? location : "");
}

static bool lay_ecc(int gpu, unsigned type, unsigned counter, int location, u64 *value)
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

/* Retired pages: so many more than the driver knows, at addresses that are made up. */

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

/* NVLink. A simulated GPU has four links that are up. */

enum { SIMULATED_LINKS = 4 };
static const char *const LINK_ERROR[] = {"replay", "recovery", "crc_flit", "crc_data", "ecc_data"};

static void link_key(char *key, size_t size, unsigned link, const char *what) { snprintf(key, size, "nvlink%u.%s", link, what); }

static int simulated_link(unsigned link, unsigned *up)
{
    NEEDS(up && link < MAX_LINKS);
    if (link >= SIMULATED_LINKS)
        return NOT_SUPPORTED;
    *up = 1;
    return SUCCESS;
}

int serve_nvmlDeviceGetNvLinkState(Device device, unsigned link, unsigned *up)
{
    char key[64];
    int result = ASK(nvmlDeviceGetNvLinkState, simulated_link(link, up), device, link, up);
    if (!up || link >= MAX_LINKS)
        return result;
    link_key(key, sizeof key, link, "state");
    return settle32(result, gpu_of(device), key, up);
}

static int no_link_errors(unsigned link, unsigned counter, u64 *count)
{
    NEEDS(count && counter < 5 && link < MAX_LINKS);
    *count = 0;
    return link < SIMULATED_LINKS ? SUCCESS : NOT_SUPPORTED;
}

int serve_nvmlDeviceGetNvLinkErrorCounter(Device device, unsigned link, unsigned counter, u64 *count)
{
    char key[64];
    int result = ASK(nvmlDeviceGetNvLinkErrorCounter, no_link_errors(link, counter, count), device, link, counter, count);
    if (!count || counter >= 5 || link >= MAX_LINKS)
        return result;
    link_key(key, sizeof key, link, LINK_ERROR[counter]);
    return settle(result, gpu_of(device), key, count);
}

/* Clocks, temperature, power. */

static int reasons(int result, Device device, u64 *bits)
{
    u64 more = 0;
    if (!bits || !may_lay(result) || !lay(gpu_of(device), "clocks_event_reasons", &more))
        return result;
    *bits = (result == SUCCESS ? *bits : 0) | more;
    return SUCCESS;
}

static int no_reasons(u64 *bits)
{
    NEEDS(bits);
    *bits = 0;
    return SUCCESS;
}

int serve_nvmlDeviceGetCurrentClocksEventReasons(Device device, u64 *bits)
{
    return reasons(ASK(nvmlDeviceGetCurrentClocksEventReasons, no_reasons(bits), device, bits), device, bits);
}
int serve_nvmlDeviceGetCurrentClocksThrottleReasons(Device device, u64 *bits)
{
    return reasons(ASK(nvmlDeviceGetCurrentClocksThrottleReasons, no_reasons(bits), device, bits), device, bits);
}

static int simulated_temperature(unsigned sensor, unsigned *celsius)
{
    NEEDS(celsius && sensor == 0);
    *celsius = 45;
    return SUCCESS;
}

int serve_nvmlDeviceGetTemperature(Device device, unsigned sensor, unsigned *celsius)
{
    int result = ASK(nvmlDeviceGetTemperature, simulated_temperature(sensor, celsius), device, sensor, celsius);
    return celsius && sensor == 0 ? settle32(result, gpu_of(device), "temperature", celsius) : result;
}

int serve_nvmlDeviceGetTemperatureV(Device device, Temperature1 *temperature)
{
    NEEDS(temperature);
    bool ours = temperature->version == VERSION(Temperature1, 1);
    unsigned sensor = ours ? temperature->sensor : 0;
    int plain = ours ? simulated_temperature(sensor, (unsigned *)&temperature->temperature) : VERSION_MISMATCH;
    int result = ASK(nvmlDeviceGetTemperatureV, plain, device, temperature);
    return ours && sensor == 0 ? settle32(result, gpu_of(device), "temperature", (unsigned *)&temperature->temperature) : result;
}

static int simulated_power(unsigned *milliwatts)
{
    NEEDS(milliwatts);
    *milliwatts = 500000;
    return SUCCESS;
}

int serve_nvmlDeviceGetPowerUsage(Device device, unsigned *milliwatts)
{
    int result = ASK(nvmlDeviceGetPowerUsage, simulated_power(milliwatts), device, milliwatts);
    return milliwatts ? settle32(result, gpu_of(device), "power", milliwatts) : result;
}

/* Field values: an order on field.N (or field.N.SCOPE), else what the same thing has in the functions above. */

enum { UNSIGNED = 1, UNSIGNED_LONG_LONG = 3, RECOVERY_ACTION = 230 };

static bool lay_links(int gpu, const char *what, int link, u64 *value)
{
    char key[64];
    bool any = false;
    for (unsigned one = 0; one < MAX_LINKS; one++) {
        u64 there = link < 0 ? 0 : *value;
        if (link >= 0 && one != (unsigned)link)
            continue;
        link_key(key, sizeof key, one, what);
        if (lay(gpu, key, &there))
            *value = link < 0 ? *value + there : there, any = true;
    }
    return any;
}

/* The fields of one NVLink counter: those of links 0 to 5 with their sum after them, and those of links 6 to 11. */
static bool link_field(unsigned id, const char **what, int *link)
{
    static const struct { unsigned first, second, sum; const char *what; } RANGES[] = {
        {32, 96, 38, "crc_flit"}, {39, 102, 45, "crc_data"}, {46, 108, 52, "replay"}, {53, 114, 59, "recovery"},
        {148, 154, 160, "ecc_data"},
    };
    for (size_t i = 0; i < sizeof RANGES / sizeof *RANGES; i++) {
        *what = RANGES[i].what;
        *link = id - RANGES[i].first < 6 ? (int)(id - RANGES[i].first) : id - RANGES[i].second < 6 ? (int)(id - RANGES[i].second) + 6 : -1;
        if (*link >= 0 || id == RANGES[i].sum)
            return true;
    }
    return false;
}

static bool ecc_field(unsigned id, unsigned *type, unsigned *counter, int *location)
{
    if (id < 3 || id > 28)
        return false;
    static const int PLACES[] = {0, 1, 2, 3, 4};
    if (id <= 6) {
        *type = (id - 3) % 2, *counter = (id - 3) / 2, *location = -1;
    } else if (id == 17 || id == 28) {
        *type = UNCORRECTED, *counter = id == 28, *location = 6;
    } else {
        unsigned at = id < 17 ? id - 7 : id - 18;
        *type = at % 2, *counter = id > 17, *location = PLACES[at / 2];
    }
    return true;
}

/* Whether there is an order on this field; `simulated`: whether a simulated GPU has the field at all. */
static bool lay_field(int gpu, unsigned id, unsigned scope, u64 *value, bool *simulated)
{
    static const struct { unsigned id; const char *key; u64 plain; } SINGLE[] = {
        {1, "", 1}, {2, "", 1}, {29, "retired.single_bit", 0}, {30, "retired.double_bit", 0}, {31, "retired.pending", 0},
        {142, "remap.corrected", 0}, {143, "remap.uncorrected", 0}, {144, "remap.pending", 0}, {145, "remap.failure", 0},
        {301, "remap.corrected_inactive", 0}, {302, "remap.uncorrected_inactive", 0}, {82, "temperature.memory", 50},
        {185, "power", 500000}, {186, "power", 500000}, {RECOVERY_ACTION, "recovery_action", 0}, {91, "", SIMULATED_LINKS},
    };
    static const char *const SCOPED[] = {"replay", "recovery", "crc_flit"}; /* 161, 162, 163; 165 is the state */
    char key[64];
    const char *what;
    unsigned type, counter;
    int link, location;
    *simulated = true;
    snprintf(key, sizeof key, "field.%u.%u", id, scope);
    if (lay(gpu, key, value))
        return true;
    snprintf(key, sizeof key, "field.%u", id);
    if (lay(gpu, key, value))
        return true;
    if (ecc_field(id, &type, &counter, &location))
        return lay_ecc(gpu, type, counter, location, value);
    if (link_field(id, &what, &link))
        return lay_links(gpu, what, link, value);
    for (size_t i = 0; i < sizeof SINGLE / sizeof *SINGLE; i++)
        if (SINGLE[i].id == id) {
            *value = have_driver() ? *value : SINGLE[i].plain;
            return *SINGLE[i].key && lay(gpu, SINGLE[i].key, value);
        }
    if (id >= 161 && id <= 163)
        return scope < MAX_LINKS && lay_links(gpu, SCOPED[id - 161], (int)scope, value);
    if (id == 165) {
        *value = have_driver() ? *value : scope < SIMULATED_LINKS;
        return scope < MAX_LINKS && lay_links(gpu, "state", (int)scope, value);
    }
    if (id == 215 || id == 208 || id == 295) /* recoveries, receive errors and retries of one link, as NVLink 5 counts */
        return scope < MAX_LINKS && lay_links(gpu, id == 215 ? "recovery" : id == 208 ? "receive" : "retry", (int)scope, value);
    return *simulated = false;
}

static u64 as_number(const Field *field)
{
    switch (field->type) {
    case 0: return (u64)field->value.d;
    case UNSIGNED: return field->value.ui;
    case 5: return (u64)(long long)field->value.si;
    case 6: return field->value.us;
    default: return field->value.ull;
    }
}

static void set_number(Field *field, u64 number)
{
    switch (field->type) {
    case 0: field->value.d = (double)number; break;
    case UNSIGNED: field->value.ui = (unsigned)number; break;
    case 5: field->value.si = (int)number; break;
    case 6: field->value.us = (unsigned short)number; break;
    default: field->value.ull = number; break;
    }
}

int serve_nvmlDeviceGetFieldValues(Device device, int count, Field *fields)
{
    int gpu = gpu_of(device), result = ASK(nvmlDeviceGetFieldValues, SUCCESS, device, count, fields);
    if (count < 0 || !fields)
        return have_driver() ? result : INVALID_ARGUMENT;
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    for (int i = 0; i < count && may_lay(result); i++) {
        Field *one = &fields[i];
        bool theirs = have_driver() && result == SUCCESS, simulated;
        bool fine = theirs && one->result == SUCCESS;
        u64 number = fine ? as_number(one) : 0;
        bool any = lay_field(gpu, one->id, one->scope, &number, &simulated);
        if (theirs && !any)
            continue;
        if (!fine) {
            one->type = one->id == RECOVERY_ACTION ? UNSIGNED : UNSIGNED_LONG_LONG;
            one->timestamp_us = at.tv_sec * 1000000LL + at.tv_nsec / 1000;
            one->latency_us = 0;
        }
        one->result = any || (!have_driver() && simulated) ? SUCCESS : NOT_SUPPORTED;
        one->value = fine ? one->value : (Value){.ull = 0};
        set_number(one, number);
    }
    return result;
}
