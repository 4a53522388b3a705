/* What the parts of the overlay share. Layouts and numbers are those of NVML 13 (nvml.h), checked below and in tests. */
#ifndef TORCHAOS_NVML_OVERLAY_H
#define TORCHAOS_NVML_OVERLAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef unsigned long long u64;
typedef void *Device;
typedef void *EventSet;

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    TIMED_OUT = 10, GPU_IS_LOST = 15, OUT_OF_MEMORY = 20, VERSION_MISMATCH = 25,
};

enum { MAX_GPUS = 64, MAX_LINKS = 18, ANY_GPU = -1 };

typedef struct { Device device; u64 type, data; unsigned gpu_instance, compute_instance; } EventData;
typedef struct { unsigned version, sensor; int temperature; } Temperature1;
typedef struct { unsigned version; u64 total, reserved, free, used; } Memory2;
typedef struct { u64 total, free, used; } Memory1;
typedef struct { u64 l1, l2, device, registers; } EccCounts;
typedef struct { unsigned max, high, partial, low, none; } Histogram;
typedef struct { unsigned corrected, corrected_inactive, uncorrected, uncorrected_inactive, pending, failure; } Remapped2;
typedef struct { unsigned version, channel_pending, tpc_pending; } Repair1;
typedef struct { unsigned version, unrepairable; } Unrepairable1;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct {
    unsigned version;
    u64 aggregate_parity, aggregate_secded, aggregate_corrected, volatile_parity, volatile_secded, volatile_corrected;
    u64 bucket_l2, bucket_sm, bucket_pcie, bucket_mcu, bucket_other;
    unsigned threshold_exceeded;
} Sram1;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci3;
typedef union { double d; int si; unsigned ui; unsigned long ul; u64 ull; long long sll; unsigned short us; } Value;
typedef struct {
    unsigned id, scope;
    long long timestamp_us, latency_us;
    unsigned type;
    int result;
    Value value;
} Field;

/* A versioned struct says what it is: its size, and its version in the highest byte. */
#define VERSION(type, number) ((unsigned)(sizeof(type) | ((number) << 24U)))

_Static_assert(sizeof(EventData) == 32 && sizeof(Pci3) == 68 && sizeof(Field) == 40, "as in nvml.h");
_Static_assert(VERSION(Memory2, 2) == 0x02000028 && VERSION(Temperature1, 1) == 0x0100000C, "as in nvml.h");
_Static_assert(sizeof(Sram1) == 104 && sizeof(Remapped2) == 24 && sizeof(Histogram) == 20, "as in nvml.h");

/* control.c: the orders. A key is what stands between "gpuN." and the sign; ANY_GPU: it stands alone. */
bool orders_given(void);                                 /* reads them again where they have changed */
bool lay(int gpu, const char *key, u64 *value);          /* an order on it, laid over `value`; said in the log */
bool lay32(int gpu, const char *key, unsigned *value);
bool ordered(int gpu, const char *key, u64 *value);      /* the same, unsaid */
int refusal(int gpu, const char *function);              /* the error that is ordered for this call, or SUCCESS */

/* Events in the order in which they were ordered; numbers go up for ever. */
u64 events_end(void);
bool event_at(u64 number, int *gpu, u64 *type, u64 *data);
void event_served(int gpu, u64 type, u64 data);

/* route.c: the driver's library, and whose call it is. */
enum { SYMBOL_COUNT_BELOW = 1024 };
void *real(unsigned symbol);                             /* the driver's function; NULL: there is none */
bool have_driver(void);
int gpu_of(Device device);                               /* NVML index; ANY_GPU: not known */

/* simulate.c */
unsigned simulated_count(void);
Device simulated_device(unsigned gpu);
int simulated_index(Device device);                      /* -1: no handle of ours */
bool simulated_ready(void);                              /* initialised, and not shut down */

/* What each function of the overlay does: it asks the driver first, then changes the answer as the orders say. If the
 * driver says that the GPU does not support the value, an order can still give it. Nothing is written after the end of
 * the caller's struct, whose version gives its length. */
#define ASK(name, otherwise, ...) \
    (real(SYM_##name) ? ((__typeof__(&serve_##name))real(SYM_##name))(__VA_ARGS__) : (otherwise))
#define NEEDS(pointer) do { if (!(pointer)) return INVALID_ARGUMENT; } while (0)

bool may_lay(int result);                                /* a value, or "not supported" */
int settle(int result, int gpu, const char *key, u64 *value);     /* one number, under the order on `key` */
int settle32(int result, int gpu, const char *key, unsigned *value);

/* memory.c: as NVML numbers them; `location` -1 is the sum */
enum { CORRECTED = 0, UNCORRECTED = 1, VOLATILE = 0, AGGREGATE = 1 };
bool lay_ecc(int gpu, unsigned type, unsigned counter, int location, u64 *value);

/* board.c */
enum { SIMULATED_LINKS = 4 };
void link_key(char *key, size_t size, unsigned link, const char *what);

#define S(number, name, takes, served) SYM_##name = number,
enum {
#include "symbols.inc"
};
#undef S

#endif
