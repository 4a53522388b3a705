/* nvmlDeviceGetFieldValues: most values of the other functions, and more, by number. */
#include "overlay.h"

#include <stdio.h>
#include <time.h>

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
