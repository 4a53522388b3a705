/* The page through which the agent orders faults, and what an order means for a transfer.
 *
 * The page is `p<pid>.net` in the folder that TORCHAOS_NCCL_NET names; protocol/control_pages.py describes it. An order
 * holds until its fault's control page is cleared or its own end is reached, so the undo of the fault needs neither this
 * library nor the rank's Python. Nothing here waits: NCCL asks again about a transfer that may not go on now.
 */
#define _GNU_SOURCE
#include "net.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PAGE_SIZE = 32768, SLOTS_AT = 512, SLOT_SIZE = 2048, PEERS_AT = 256, CONTROL_AT = 1024, CONTROL_SIZE = 1024 };
enum { CONTROL_PAGE_SIZE = 64, CONTROL_GO = 2, MAGIC = 0, VERSION = 1 };
enum word {
    ACTIVE, KIND, NUMBER, BEGUN_NS, UNTIL_NS, WAYS, CONNECTION, MIN_BYTES, MAX_BYTES, NTH, A, B, PEERS, /* the agent's */
    MATCHED, HITS, FIRST_NS, LAST_NS, LAST_BYTES                                                        /* ours */
};
#define PAGE_MAGIC 0x74656e6363666f74LL

static volatile int64_t *page;
static volatile int64_t *controls[MAX_ORDERS];
static int64_t next_ns[MAX_ORDERS][3]; /* for THROTTLE, by direction: when the next bytes may go */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static volatile int64_t *slot(int i) { return page + (SLOTS_AT + i * SLOT_SIZE) / 8; }
static int64_t get(volatile int64_t *words, int word) { return __atomic_load_n(&words[word], __ATOMIC_ACQUIRE); }
static void set(volatile int64_t *words, int word, int64_t value) {
    __atomic_store_n(&words[word], value, __ATOMIC_RELEASE);
}
static int64_t add(volatile int64_t *words, int word) {
    return __atomic_add_fetch(&words[word], 1, __ATOMIC_ACQ_REL);
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

void open_page(int version) {
    const char *folder = getenv("TORCHAOS_NCCL_NET");
    char path[4096];

    pthread_mutex_lock(&lock);
    if (page == NULL && folder != NULL) {
        snprintf(path, sizeof path, "%s/p%d.net", folder, (int)getpid());
        page = map(path, O_CREAT, PAGE_SIZE); /* the agent may have made it already */
    }
    if (page != NULL) {
        set(page, VERSION, version);
        set(page, MAGIC, PAGE_MAGIC);
    }
    pthread_mutex_unlock(&lock);
}

/* NCCL unloads the library with its last communicator, and loads it again for the next. */
__attribute__((destructor)) static void close_page(void) {
    for (int i = 0; i < MAX_ORDERS; i++)
        if (controls[i] != NULL)
            munmap((void *)controls[i], CONTROL_PAGE_SIZE);
    if (page != NULL)
        munmap((void *)page, PAGE_SIZE);
}

void count(enum count what) {
    if (page != NULL)
        add(page, (int)what);
}

/* The order's control page. NULL if it is not there; then the order could not be undone. */
static volatile int64_t *control_of(int i) {
    if (__atomic_load_n(&controls[i], __ATOMIC_ACQUIRE) == NULL) {
        pthread_mutex_lock(&lock);
        if (controls[i] == NULL) {
            volatile int64_t *mapped = map((const char *)slot(i) + CONTROL_AT, 0, CONTROL_PAGE_SIZE);
            __atomic_store_n(&controls[i], mapped, __ATOMIC_RELEASE);
        }
        pthread_mutex_unlock(&lock);
    }
    return controls[i];
}

/* The order in slot i, if it is on. */
static volatile int64_t *order(int i) {
    volatile int64_t *words = page == NULL ? NULL : slot(i), *control;

    if (words == NULL || !get(words, ACTIVE) || now_ns() >= get(words, UNTIL_NS) || (control = control_of(i)) == NULL)
        return NULL;
    return get(control, CONTROL_GO) < get(words, NUMBER) ? words : NULL;
}

static void hit(volatile int64_t *words, int64_t bytes) {
    int64_t now = now_ns();

    if (add(words, HITS) == 1)
        set(words, FIRST_NS, now);
    set(words, LAST_BYTES, bytes);
    set(words, LAST_NS, now);
}

static int is_for(volatile int64_t *words, const struct ends *ends) {
    int64_t peers = get(words, PEERS), number = get(words, CONNECTION);

    if (!(get(words, WAYS) & ends->way) || (number >= 0 && number != ends->number))
        return 0;
    for (int i = 0; i < peers; i++)
        if (words[PEERS_AT / 8 + i] == ends->peer)
            return 1;
    return peers == 0;
}

/* Compare a transfer with an order, once, and count the transfer if it matches. */
static void compare(struct transfer *transfer, volatile int64_t *words, int i) {
    int64_t size = transfer->size, most = get(words, MAX_BYTES), nth, number;
    uint32_t bit = 1u << i;
    int kind = (int)get(words, KIND);

    transfer->looked |= bit;
    if (kind == REFUSE || kind == NICS || !is_for(words, &transfer->ends))
        return;
    if (size < get(words, MIN_BYTES) || (most >= 0 && size > most) || (kind == CORRUPT && size == 0))
        return;
    number = add(words, MATCHED);
    nth = get(words, NTH);
    if (kind == CORRUPT ? number != nth : number < nth)
        return;
    transfer->meant |= bit;
    if (kind == CORRUPT)
        transfer->wrong_at = (size_t)((double)(size - 1) * get(words, A) / 1e6);
    hit(words, size);
}

static int is_down(volatile int64_t *words) {
    int64_t down = get(words, A), cycle = down + get(words, B);
    return cycle <= 0 || (now_ns() - get(words, BEGUN_NS)) % cycle < down;
}

result allowed(struct transfer *transfer, size_t most, size_t *bytes) {
    *bytes = most;
    for (int i = 0; page != NULL && i < MAX_ORDERS; i++) {
        volatile int64_t *words = order(i);

        if (words == NULL)
            continue;
        if (!(transfer->looked & 1u << i))
            compare(transfer, words, i);
        if (!(transfer->meant & 1u << i))
            continue;
        switch (get(words, KIND)) {
        case FAIL:
            return (result)get(words, A);
        case STALL:
            *bytes = 0;
            break;
        case FLAP:
            if (is_down(words))
                *bytes = 0;
            break;
        case DELAY:
            if (now_ns() < transfer->known_ns + get(words, A))
                *bytes = 0;
            break;
        case THROTTLE: {
            size_t slice = (size_t)(get(words, A) / 200) + 1; /* 5 ms of it */
            if (__atomic_load_n(&next_ns[i][transfer->ends.way], __ATOMIC_RELAXED) > now_ns())
                *bytes = 0;
            else if (*bytes > slice)
                *bytes = slice;
            break;
        }
        }
    }
    return SUCCESS;
}

void moved(const struct transfer *transfer, size_t bytes) {
    for (int i = 0; transfer->meant && i < MAX_ORDERS; i++) {
        volatile int64_t *words = transfer->meant & 1u << i ? order(i) : NULL;

        if (words != NULL && get(words, KIND) == THROTTLE && bytes > 0) {
            int64_t *next = &next_ns[i][transfer->ends.way], now = now_ns();

            pthread_mutex_lock(&lock); /* of all connections together */
            if (*next < now)
                __atomic_store_n(next, now, __ATOMIC_RELAXED);
            __atomic_fetch_add(next, (int64_t)(bytes * 1e9 / get(words, A)), __ATOMIC_RELAXED);
            pthread_mutex_unlock(&lock);
        }
    }
}

result may_connect(struct ends *ends, int *may) {
    *may = 1;
    for (int i = 0; i < MAX_ORDERS; i++) {
        volatile int64_t *words = order(i);

        if (words == NULL || get(words, KIND) != REFUSE || !is_for(words, ends))
            continue;
        if (!(ends->refused & 1u << i))
            hit(words, 0);
        ends->refused |= 1u << i;
        if (get(words, A) != SUCCESS)
            return (result)get(words, A);
        *may = 0;
    }
    return SUCCESS;
}

int shown_nics(int there) {
    for (int i = 0; i < MAX_ORDERS; i++) {
        volatile int64_t *words = order(i);

        if (words != NULL && get(words, KIND) == NICS && get(words, A) > 0) {
            hit(words, 0);
            there = get(words, A) < there ? (int)get(words, A) : there;
        }
    }
    return there;
}

int shown_speed(int speed) {
    for (int i = 0; i < MAX_ORDERS; i++) {
        volatile int64_t *words = order(i);

        if (words != NULL && get(words, KIND) == NICS && get(words, B) > 0) {
            hit(words, 0);
            speed = (int)get(words, B);
        }
    }
    return speed;
}
