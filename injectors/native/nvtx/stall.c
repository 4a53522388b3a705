/* Stalls one NCCL call of this process, by NVTX.
 *
 * At the start of each API call, NCCL pushes an NVTX range with the name of the call and, from 2.26 on, communicator and
 * size. NVTX loads the library that NVTX_INJECTION64_PATH names, and calls the functions that this library puts into a
 * table. A wait in such a function is a wait before the call. Nothing in NCCL or in the job is changed.
 *
 * Orders are in a memory-mapped page, `p<pid>.nvtx` in the folder that TORCHAOS_NVTX names; protocol/control_pages.py
 * describes it. The stall ends when the fault's control page is cleared or its lease is over, so the undo of the fault
 * needs neither this library nor the rank's Python.
 *
 * The structs of NVTX are those of its public headers (nvtxTypes.h, nvToolsExt.h, version 3), without unused parts.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ---- NvtxPage and ControlPage of protocol/control_pages.py ---- */

enum { PAGE_SIZE = 4096, NAME_AT = 256, NAME_SIZE = 64, CONTROL_AT = 512, CONTROL_SIZE = 1024 };
enum { CONTROL_PAGE_SIZE = 64, CONTROL_GO = 2 };
enum word {
    MAGIC, CALLS, ORDER, NTH, MIN_BYTES, MAX_BYTES, LEASE_NS, NUMBER, MATCHED, STALLED, BEGUN_NS, ENDED_NS, LAST_BYTES
};
#define PAGE_MAGIC 0x78747663616f7274LL

/* ---- NVTX ---- */

enum { ETID_CALLBACKS = 1, MODULE_CORE2 = 5 };
enum { CORE2_RANGE_PUSH = 4, CORE2_REGISTER_STRING = 10, CORE2_DOMAIN_CREATE = 12 };
enum { MESSAGE_ASCII = 1, MESSAGE_REGISTERED = 3 };
#define PAYLOAD_EXT ((int32_t)0xDFBD0009)

typedef void (*function)(void);
struct callbacks {
    size_t size;
    int (*module_functions)(int module, function ***table, unsigned int *count);
};
struct event {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, payloads; /* reserved0: how many payloads of the extension there are */
    uint64_t payload;
    int32_t message_type;
    const char *message;
};
struct payload {
    uint64_t schema;
    size_t size;
    const void *data;
};

static volatile int64_t *page;
static pid_t owner;
static const char nccl_domain[] = "NCCL";
static const char other_domain[] = "";

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int64_t get(volatile int64_t *words, int word) { return __atomic_load_n(&words[word], __ATOMIC_ACQUIRE); }
static void set(volatile int64_t *words, int word, int64_t value) {
    __atomic_store_n(&words[word], value, __ATOMIC_RELEASE);
}

static void *map(const char *path, int flags, size_t size) {
    int fd = open(path, flags | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600);
    struct stat found;
    void *mapped = MAP_FAILED;

    if (fd < 0)
        return NULL;
    if ((!(flags & O_CREAT) || ftruncate(fd, size) == 0) && fstat(fd, &found) == 0 && found.st_size == (off_t)size)
        mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return mapped == MAP_FAILED ? NULL : mapped;
}

static void open_page(void) {
    const char *folder = getenv("TORCHAOS_NVTX");
    char path[4096];

    if (page != NULL || folder == NULL)
        return;
    owner = getpid();
    snprintf(path, sizeof path, "%s/p%d.nvtx", folder, (int)owner);
    page = map(path, O_CREAT, PAGE_SIZE); /* the agent may have made it already */
    if (page != NULL)
        set(page, MAGIC, PAGE_MAGIC);
}

/* The size in bytes, or -1 if not known. NCCL's payloads of collectives begin with communicator and size. */
static int64_t bytes_of(const struct event *event) {
    const struct payload *payload = (const struct payload *)(uintptr_t)event->payload;

    if (event->payload_type != PAYLOAD_EXT || event->payloads < 1 || payload == NULL || payload->size < 16)
        return -1;
    return ((const int64_t *)payload->data)[1];
}

static int is_meant(const char *name, int64_t bytes) {
    const char *wanted = (const char *)page + NAME_AT;
    int64_t least = get(page, MIN_BYTES), most = get(page, MAX_BYTES);

    if (strncmp(wanted, name, NAME_SIZE) != 0)
        return 0;
    return (least < 0 || bytes >= least) && (most < 0 || (bytes >= 0 && bytes <= most));
}

static void stall(int64_t order) {
    const struct timespec step = {0, 500000};
    int64_t number = get(page, NUMBER), begun = now_ns(), end = begun + get(page, LEASE_NS);
    char path[CONTROL_SIZE];
    volatile int64_t *control;

    memcpy(path, (const char *)page + CONTROL_AT, sizeof path);
    path[sizeof path - 1] = '\0';
    control = map(path, 0, CONTROL_PAGE_SIZE);
    if (control == NULL) /* nobody could take it back */
        return;
    set(page, BEGUN_NS, begun);
    set(page, STALLED, order);
    while (get(control, CONTROL_GO) < number && now_ns() < end)
        nanosleep(&step, NULL);
    set(page, ENDED_NS, now_ns());
    munmap((void *)control, CONTROL_PAGE_SIZE);
}

static int range_push(const void *domain, const struct event *event) {
    int64_t order, bytes;

    if (domain != nccl_domain || page == NULL || getpid() != owner || event->message == NULL)
        return 0;
    if (event->message_type != MESSAGE_ASCII && event->message_type != MESSAGE_REGISTERED)
        return 0;
    __atomic_fetch_add(&page[CALLS], 1, __ATOMIC_RELAXED);
    order = get(page, ORDER);
    if (order == 0 || get(page, STALLED) >= order)
        return 0;
    bytes = bytes_of(event);
    if (!is_meant(event->message, bytes))
        return 0;
    if (__atomic_add_fetch(&page[MATCHED], 1, __ATOMIC_ACQ_REL) == get(page, NTH)) {
        set(page, LAST_BYTES, bytes);
        stall(order);
    }
    return 0;
}

/* Handles are ours to choose: a registered string is its own copy. They live as long as the process, as in NVTX. */
static const void *register_string(const void *domain, const char *text) {
    (void)domain;
    return text == NULL ? NULL : strdup(text);
}

static const void *domain_create(const char *name) {
    return name != NULL && strcmp(name, nccl_domain) == 0 ? nccl_domain : other_domain;
}

/* Called once by each shared object that has NVTX in it; each has a table of its own. */
__attribute__((visibility("default"))) int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    const struct callbacks *callbacks = export_table(ETID_CALLBACKS);
    function **table = NULL;
    unsigned int count = 0;

    if (callbacks == NULL || callbacks->size < sizeof *callbacks)
        return 0;
    if (!callbacks->module_functions(MODULE_CORE2, &table, &count) || count <= CORE2_DOMAIN_CREATE)
        return 0;
    open_page();
    *table[CORE2_RANGE_PUSH] = (function)range_push;
    *table[CORE2_REGISTER_STRING] = (function)register_string;
    *table[CORE2_DOMAIN_CREATE] = (function)domain_create;
    return 1;
}
