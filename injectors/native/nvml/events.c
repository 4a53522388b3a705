/* Event sets. An event that was ordered reaches a waiting set within some milliseconds, also if the driver sends none. */
#include "overlay.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_SETS = 64, LOOK_MS = 2, NO_INSTANCE = -1 };

typedef struct { EventSet set; u64 next, types[MAX_GPUS]; Device device[MAX_GPUS]; } Set;

static Set sets[MAX_SETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Set *find(EventSet set)
{
    for (unsigned i = 0; set && i < MAX_SETS; i++)
        if (sets[i].set == set)
            return &sets[i];
    return NULL;
}

static int simulated_create(EventSet *set)
{
    if (!set)
        return INVALID_ARGUMENT;
    if (!simulated_ready())
        return UNINITIALIZED;
    *set = malloc(1);
    return *set ? SUCCESS : OUT_OF_MEMORY;
}

int serve_nvmlEventSetCreate(EventSet *set)
{
    int result = ASK(nvmlEventSetCreate, simulated_create(set), set);
    if (result != SUCCESS || !set)
        return result;
    u64 end = events_end();
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < MAX_SETS; i++)
        if (!sets[i].set || sets[i].set == *set) { /* the driver gives the address of a freed one again */
            sets[i] = (Set){.set = *set, .next = end};
            break;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

int serve_nvmlDeviceRegisterEvents(Device device, u64 types, EventSet set)
{
    int result = ASK(nvmlDeviceRegisterEvents, SUCCESS, device, types, set), gpu = gpu_of(device);
    u64 end = events_end();
    pthread_mutex_lock(&lock);
    Set *ours = find(set);
    bool first = ours != NULL;
    for (unsigned i = 0; ours && i < MAX_GPUS; i++)
        first &= ours->types[i] == 0;
    if (ours && gpu != ANY_GPU && result == SUCCESS) {
        ours->types[gpu] |= types;
        ours->device[gpu] = device;
        ours->next = first ? end : ours->next;
    }
    pthread_mutex_unlock(&lock);
    return result == SUCCESS && !ours && !have_driver() ? INVALID_ARGUMENT : result;
}

/* The next event for this set. `ours`: the set was made through the overlay. `lost`: a GPU of the set is gone. */
static bool next_event(EventSet set, EventData *event, bool *ours, bool *lost)
{
    u64 type, data, gone = 0, end = events_end();
    int gpu;
    bool any = false;
    *lost = false;
    pthread_mutex_lock(&lock);
    Set *one = find(set);
    *ours = one != NULL;
    while (one && !any && one->next < end) {
        u64 number = one->next++;
        if (!event_at(number, &gpu, &type, &data))
            continue;
        for (int at = gpu == MAX_GPUS ? 0 : gpu; at <= (gpu == MAX_GPUS ? MAX_GPUS - 1 : gpu) && !any; at++)
            if (one->types[at] & type) { /* of an event on every GPU a set hears once, of the first */
                *event = (EventData){one->device[at], type, data, (unsigned)NO_INSTANCE, (unsigned)NO_INSTANCE};
                event_served(at, type, data);
                any = true;
            }
    }
    for (int at = 0; one && !any && at < MAX_GPUS; at++)
        *lost |= one->types[at] && ordered(at, "lost", &gone) && gone;
    pthread_mutex_unlock(&lock);
    return any;
}

static long long now_ms(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000LL + at.tv_nsec / 1000000;
}

/* `size`: of the caller's struct; the first version has no instances in it. */
static int wait(EventSet set, void *data, size_t size, unsigned timeout_ms, int (*driver)(EventSet, void *, unsigned))
{
    EventData event;
    bool ours, lost;
    long long end = now_ms() + timeout_ms;
    if (!data)
        return driver ? driver(set, data, timeout_ms) : INVALID_ARGUMENT;
    for (;;) {
        if (next_event(set, &event, &ours, &lost)) {
            memcpy(data, &event, size);
            return SUCCESS;
        }
        if (!ours)
            return driver ? driver(set, data, timeout_ms) : INVALID_ARGUMENT;
        if (lost)
            return GPU_IS_LOST;
        long long left = end - now_ms();
        unsigned slice = left < LOOK_MS ? (left < 0 ? 0 : (unsigned)left) : LOOK_MS;
        int result = driver ? driver(set, data, slice) : TIMED_OUT;
        if (result != TIMED_OUT)
            return result;
        if (left <= 0)
            return TIMED_OUT;
        if (!driver)
            nanosleep(&(struct timespec){0, slice * 1000000L}, NULL);
    }
}

int serve_nvmlEventSetWait(EventSet set, void *data, unsigned timeout_ms)
{
    size_t size = offsetof(EventData, gpu_instance);
    return wait(set, data, size, timeout_ms, (int (*)(EventSet, void *, unsigned))real(SYM_nvmlEventSetWait));
}

int serve_nvmlEventSetWait_v2(EventSet set, void *data, unsigned timeout_ms)
{
    return wait(set, data, sizeof(EventData), timeout_ms, (int (*)(EventSet, void *, unsigned))real(SYM_nvmlEventSetWait_v2));
}

static int simulated_free(EventSet set, bool ours)
{
    if (!ours)
        return INVALID_ARGUMENT;
    free(set);
    return SUCCESS;
}

int serve_nvmlEventSetFree(EventSet set)
{
    pthread_mutex_lock(&lock);
    Set *one = find(set);
    if (one)
        one->set = NULL;
    pthread_mutex_unlock(&lock);
    return ASK(nvmlEventSetFree, simulated_free(set, one != NULL), set);
}
