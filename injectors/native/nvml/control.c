/* The orders: lines of text in a file, or in the files *.nvml of a folder, that TORCHAOS_NVML_CONTROL names.
 *
 *   gpu0.ecc.volatile.uncorrected = 3       the value is 3
 *   gpu1.ecc.volatile.corrected += 500      500 more than it is
 *   gpu*.temperature = 95                   on every GPU
 *   gpu0.xid = 79                           an event, told at the moment at which the line appears
 *   gpu0.error.nvmlDeviceGetName = 999      what this call returns; a pattern may stand for many
 *   node = 1                                the lines below are for the processes of this node (TORCHAOS_NODE)
 *
 * The orders are read again whenever the file, or a file in the folder, has another identity, size or time. Orders that
 * were used, and lines that can't be read, are logged to TORCHAOS_NVML_LOG, or else to nvml.log beside the orders. */
#include "overlay.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MAX_ORDERS = 4096, KEY = 64, MAX_BYTES = 1 << 20, MAX_FILES = 64, KEPT_EVENTS = 1024, XID_EVENT = 8 };
enum { RACY_NS = 50 * 1000 * 1000 }; /* a file changed this lately may change again within one tick of its clock */

typedef struct { int gpu; char key[KEY]; bool add, served; u64 value; } Order;
typedef struct { u64 file; unsigned place; int gpu; u64 type, data; } Event; /* place: which one in its file */
typedef struct { Order order[MAX_ORDERS]; unsigned orders; Event event[MAX_ORDERS]; unsigned events; } Orders;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Orders *now, *before; /* NULL until something was ordered */
static u64 seen_signature;
static bool racy, looked, quiet;
static Event told[KEPT_EVENTS];
static u64 told_end;

static const char *const KEYS[] = { /* as fnmatch(3) patterns */
    "gpus", "lost", "error", "error.*", "xid", "event.*", "field.*", "recovery_action", "unrepairable",
    "ecc.volatile.corrected*", "ecc.volatile.uncorrected*", "ecc.aggregate.corrected*", "ecc.aggregate.uncorrected*",
    "sram.*", "retired.single_bit", "retired.double_bit", "retired.pending", "remap.*", "repair.*", "nvlink*",
    "clocks_event_reasons", "temperature", "temperature.memory", "power", NULL,
};

static const char *control_path(void)
{
    const char *path = getenv("TORCHAOS_NVML_CONTROL");
    return path && *path ? path : NULL;
}

static bool is_folder(const char *path)
{
    struct stat found;
    return stat(path, &found) == 0 && S_ISDIR(found.st_mode);
}

static void say(const char *format, ...)
{
    char path[PATH_MAX], text[512];
    struct timespec at;
    const char *named = getenv("TORCHAOS_NVML_LOG"), *control = control_path();
    if (named && *named)
        snprintf(path, sizeof path, "%s", named);
    else if (control)
        snprintf(path, sizeof path, is_folder(control) ? "%s/nvml.log" : "%s.log", control);
    else
        return;
    clock_gettime(CLOCK_MONOTONIC, &at);
    int head = snprintf(text, sizeof text, "%lld.%06ld pid %d ", (long long)at.tv_sec, at.tv_nsec / 1000, (int)getpid());
    va_list rest;
    va_start(rest, format);
    int body = vsnprintf(text + head, sizeof text - head - 1, format, rest);
    va_end(rest);
    size_t length = head + (body < (int)sizeof text - head - 2 ? body : (int)sizeof text - head - 2);
    const char *node = getenv("TORCHAOS_NODE"); /* GPUs are numbered on each node anew */
    int more = node && *node ? snprintf(text + length, sizeof text - length - 1, " on node %.20s", node) : 0;
    if (more > 0 && length + more < sizeof text - 1)
        length += more;
    text[length++] = '\n';
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file >= 0) {
        if (write(file, text, length) < 0)
            errno = 0; /* a log that can't be written is no reason to fail a call */
        close(file);
    }
}

static u64 mix(u64 seed, const void *data, size_t size) /* FNV-1a */
{
    for (const unsigned char *p = data; size--; p++)
        seed = (seed ^ *p) * 1099511628211ULL;
    return seed;
}

static bool known(const char *key)
{
    for (const char *const *one = KEYS; *one; one++)
        if (fnmatch(*one, key, 0) == 0)
            return true;
    return false;
}

static char *trim(char *text)
{
    while (isspace((unsigned char)*text))
        text++;
    char *end = text + strlen(text);
    while (end > text && isspace((unsigned char)end[-1]))
        *--end = 0;
    return text;
}

/* NULL where the line is an order or empty, else what is wrong with it. */
static const char *parse(char *line, u64 file, unsigned *place, bool *elsewhere, Orders *into)
{
    Order one = {.gpu = ANY_GPU};
    char *comment = strchr(line, '#'), *end;
    if (comment)
        *comment = 0;
    line = trim(line);
    if (!*line)
        return NULL;
    char *sign = strchr(line, '=');
    if (!sign)
        return "no = in it";
    char *number = trim(sign + 1);
    one.add = sign > line && sign[-1] == '+';
    sign[one.add ? -1 : 0] = 0;
    char *key = trim(line);
    if (strncmp(key, "gpu", 3) == 0 && (isdigit((unsigned char)key[3]) || key[3] == '*')) {
        char *dot = strchr(key, '.');
        if (!dot)
            return "nothing after the GPU";
        *dot = 0;
        if (strcmp(key, "gpu*") == 0)
            one.gpu = MAX_GPUS;
        else {
            errno = 0;
            unsigned long gpu = strtoul(key + 3, &end, 10);
            if (errno || *end || gpu >= MAX_GPUS)
                return "no such GPU";
            one.gpu = (int)gpu;
        }
        key = dot + 1;
    }
    bool is_node = one.gpu == ANY_GPU && strcmp(key, "node") == 0;
    if (strlen(key) >= KEY || (!is_node && !known(key)))
        return "not known";
    errno = 0;
    one.value = strtoull(number, &end, 0);
    if (errno || end == number || *end || *number == '-')
        return "no number after the sign";
    const char *node = getenv("TORCHAOS_NODE");
    if (is_node)
        *elsewhere = node && *node && strtoull(node, NULL, 10) != one.value;
    if (is_node || *elsewhere)
        return NULL;
    bool xid = strcmp(key, "xid") == 0;
    if (xid || strncmp(key, "event.", 6) == 0) {
        u64 type = xid ? XID_EVENT : strtoull(key + 6, &end, 0);
        if (one.gpu == ANY_GPU || into->events == MAX_ORDERS || (!xid && (!key[6] || *end)))
            return "no event";
        into->event[into->events++] = (Event){file, (*place)++, one.gpu, type, one.value};
        return NULL;
    }
    if (into->orders == MAX_ORDERS)
        return "too many";
    memcpy(one.key, key, strlen(key) + 1);
    into->order[into->orders++] = one;
    return NULL;
}

static void parse_file(const char *path, Orders *into)
{
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0)
        return;
    char *text = malloc(MAX_BYTES + 1), *rest = text, *line;
    size_t size = 0;
    ssize_t got;
    while (text && size < MAX_BYTES && (got = read(file, text + size, MAX_BYTES - size)) > 0)
        size += (size_t)got;
    close(file);
    if (!text)
        return;
    for (size_t at = 0; at < size; at++)
        if (!text[at])
            text[at] = '\n';
    text[size] = 0;
    unsigned number = 0, place = 0;
    bool elsewhere = false;
    u64 name = mix(14695981039346656037ULL, path, strlen(path));
    while ((line = strsep(&rest, "\n"))) {
        number++;
        const char *wrong = parse(line, name, &place, &elsewhere, into);
        if (wrong && !quiet)
            say("refused line %u of %s: %s", number, path, wrong);
    }
    free(text);
}

static int is_orders(const struct dirent *entry)
{
    size_t length = strlen(entry->d_name);
    return length > 5 && entry->d_name[0] != '.' && strcmp(entry->d_name + length - 5, ".nvml") == 0;
}

/* Calls `each` for every file of orders, in order of name. Returns a number that changes when the files change. */
static u64 walk(void (*each)(const char *, Orders *), Orders *into, bool *lately)
{
    const char *control = control_path();
    struct dirent **entries = NULL;
    struct stat found;
    struct timespec clock;
    u64 signature = 1;
    bool folder = control && is_folder(control);
    int count = folder ? scandir(control, &entries, is_orders, alphasort) : control != NULL;
    clock_gettime(CLOCK_REALTIME, &clock);
    for (int i = 0; i < count; i++) {
        char path[PATH_MAX];
        if (snprintf(path, sizeof path, folder ? "%s/%s" : "%s", control, folder ? entries[i]->d_name : "") < PATH_MAX
            && i < MAX_FILES && stat(path, &found) == 0 && S_ISREG(found.st_mode)) {
            u64 marks[] = {found.st_dev, found.st_ino, (u64)found.st_size, (u64)found.st_mtim.tv_sec,
                           (u64)found.st_mtim.tv_nsec, (u64)found.st_ctim.tv_sec, (u64)found.st_ctim.tv_nsec};
            signature = mix(signature, marks, sizeof marks);
            long long age = (clock.tv_sec - found.st_ctim.tv_sec) * 1000000000LL + clock.tv_nsec - found.st_ctim.tv_nsec;
            *lately |= age < RACY_NS;
            if (each)
                each(path, into);
        }
        if (folder)
            free(entries[i]);
    }
    free(entries);
    return signature;
}

static const Order *find(const Orders *in, int gpu, const char *key)
{
    for (unsigned i = in ? in->orders : 0; i-- > 0;) { /* the last one counts */
        const Order *one = &in->order[i];
        if ((one->gpu == gpu || (one->gpu == MAX_GPUS && gpu != ANY_GPU)) && strcmp(one->key, key) == 0)
            return one;
    }
    return NULL;
}

static bool was_there(const Orders *in, const Event *event)
{
    for (unsigned i = 0; in && i < in->events; i++) {
        const Event *one = &in->event[i];
        if (one->file == event->file && one->place == event->place && one->gpu == event->gpu && one->type == event->type
            && one->data == event->data)
            return true;
    }
    return false;
}

static void read_again(void)
{
    Orders *fresh = before ? before : malloc(sizeof *fresh);
    if (!fresh)
        return;
    fresh->orders = fresh->events = 0;
    racy = false;
    quiet = looked && walk(NULL, NULL, &racy) == seen_signature; /* said already */
    seen_signature = walk(parse_file, fresh, &racy);
    before = now;
    now = fresh;
    for (unsigned i = 0; i < fresh->orders; i++) {
        Order *one = &fresh->order[i];
        const Order *old = find(before, one->gpu, one->key);
        one->served = old && old->served && old->value == one->value && old->add == one->add;
    }
    for (unsigned i = 0; i < fresh->events; i++)
        if (looked && !was_there(before, &fresh->event[i])) /* not those from before this process looked at all */
            told[told_end++ % KEPT_EVENTS] = fresh->event[i];
    looked = true;
}

static void refresh(void)
{
    bool lately = false;
    if (!looked || racy || walk(NULL, NULL, &lately) != seen_signature)
        if (control_path() || now)
            read_again();
}

bool orders_given(void)
{
    if (!control_path())
        return false;
    pthread_mutex_lock(&lock);
    refresh();
    bool any = now && (now->orders || now->events);
    pthread_mutex_unlock(&lock);
    return any;
}

static bool laid(int gpu, const char *key, u64 *value, bool aloud)
{
    pthread_mutex_lock(&lock);
    Order *one = (Order *)find(now, gpu, key);
    if (one) {
        *value = one->value + (one->add ? *value : 0);
        if (aloud && !one->served) {
            one->served = true;
            if (gpu == ANY_GPU)
                say("served %s = %llu", key, *value);
            else
                say("served gpu%d.%s = %llu", gpu, key, *value);
        }
    }
    pthread_mutex_unlock(&lock);
    return one != NULL;
}

bool lay(int gpu, const char *key, u64 *value) { return laid(gpu, key, value, true); }

bool ordered(int gpu, const char *key, u64 *value) { return laid(gpu, key, value, false); }

bool lay32(int gpu, const char *key, unsigned *value)
{
    u64 wide = *value;
    bool any = lay(gpu, key, &wide);
    *value = (unsigned)wide;
    return any;
}

int refusal(int gpu, const char *function)
{
    char key[KEY] = "";
    u64 code = 0;
    if (gpu != ANY_GPU && lay(gpu, "lost", &code) && code)
        return GPU_IS_LOST;
    pthread_mutex_lock(&lock);
    for (unsigned i = now ? now->orders : 0; i-- > 0 && !*key;) {
        Order *one = &now->order[i];
        bool ours = one->gpu == gpu || (one->gpu == MAX_GPUS && gpu != ANY_GPU) || one->gpu == ANY_GPU;
        bool all = strcmp(one->key, "error") == 0;
        if (ours && (all || (strncmp(one->key, "error.", 6) == 0 && fnmatch(one->key + 6, function, 0) == 0))) {
            memcpy(key, one->key, sizeof key);
            gpu = one->gpu == ANY_GPU ? ANY_GPU : gpu;
        }
    }
    pthread_mutex_unlock(&lock);
    code = 0;
    return *key && lay(gpu, key, &code) ? (int)code : SUCCESS;
}

u64 events_end(void)
{
    pthread_mutex_lock(&lock);
    if (control_path())
        refresh();
    u64 end = told_end;
    pthread_mutex_unlock(&lock);
    return end;
}

bool event_at(u64 number, int *gpu, u64 *type, u64 *data)
{
    pthread_mutex_lock(&lock);
    bool there = number < told_end && number + KEPT_EVENTS >= told_end;
    const Event *one = &told[number % KEPT_EVENTS];
    if (there)
        *gpu = one->gpu, *type = one->type, *data = one->data;
    pthread_mutex_unlock(&lock);
    return there;
}

void event_served(int gpu, u64 type, u64 data)
{
    if (type == XID_EVENT)
        say("served gpu%d.xid = %llu", gpu, data);
    else
        say("served gpu%d.event.%llu = %llu", gpu, type, data);
}
