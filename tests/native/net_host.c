/* Plays NCCL for one rank, with host memory: it drives a network plug-in as NCCL's proxy thread does.
 *
 * Usage: net_host LIBRARY VERSIONS CHANNELS, with RANK (0 or 1) in the environment. VERSIONS, such as 11,10,9: the
 * interfaces to ask for; the first that the library has is used. Commands come by lines on stdin:
 *   listen                            -> handles HEX...
 *   connect HEX...                    -> connected | failed CODE
 *   exchange SEED COUNT DEPTH SIZE... -> channel N ok BYTES | channel N wrong MESSAGE AT BYTES | channel N error CODE,
 *                                        each when the channel is done; then exchanged CALLS
 *   nics                              -> nics NAME=SPEED...
 *   close                             -> closed
 * An exchange sends COUNT messages each way on every channel, DEPTH at once, with the sizes in turn.
 */
#define _GNU_SOURCE
#include "abi.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_CHANNELS = 16, MAX_SIZES = 32, MAX_DEPTH = 32, LINE = 1 << 16 };

static int version, channels, rank;
static void *plugin, *context;
#define V8 ((const struct net_v8 *)plugin)
#define V9 ((const struct net_v9 *)plugin)
#define V10 ((const struct net_v10 *)plugin)
#define V11 ((const struct net_v11 *)plugin)
#define EACH(member) (version == 8 ? V8->member : version == 9 ? V9->member : version == 10 ? V10->member : V11->member)

struct side { /* one direction of a channel */
    void *connection, *region, *requests[MAX_DEPTH];
    unsigned char *data[MAX_DEPTH];
    int posted, done;
};
struct channel {
    void *listener;
    char handle[HANDLE_SIZE]; /* the peer's */
    struct side out, in;
    int over, wrong_message, code;
    size_t bytes, wrong_at, wrong_bytes;
};
static struct channel all[MAX_CHANNELS];

static void log_line(int level, unsigned long flags, const char *file, int line, const char *format, ...) {
    (void)level, (void)flags, (void)file, (void)line, (void)format;
}

static void check(int code, const char *what) {
    if (code != SUCCESS) {
        printf("failed %s %d\n", what, code);
        exit(1);
    }
}

static void start(const char *library, char *versions) {
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    char symbol[64], *rest = NULL;

    for (char *one = strtok_r(versions, ",", &rest); handle != NULL && plugin == NULL && one != NULL;
         one = strtok_r(NULL, ",", &rest)) {
        version = atoi(one);
        snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", version);
        plugin = dlsym(handle, symbol);
    }
    if (plugin == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    switch (version) {
    case 8: check(V8->init(log_line), "init"); break;
    case 9: check(V9->init(log_line), "init"); break;
    case 10: check(V10->init(log_line, NULL), "init"); break;
    default: check(V11->init(&context, 1, NULL, log_line, NULL), "init");
    }
}

static void show_nics(void) {
    int count = 0;

    check(EACH(devices)(&count), "devices");
    printf("nics");
    for (int i = 0; i < count; i++) {
        struct properties_v8 p8 = {0};
        struct properties_v11 p11 = {0};
        int is_host;

        if (version == 8)
            check(V8->properties(i, &p8), "properties");
        else if (version == 11)
            check(V11->properties(i, &p11), "properties");
        else
            check((version == 9 ? V9->properties : V10->properties)(i, &p11.v9), "properties");
        is_host = version == 8 ? p8.pointers == PTR_HOST && p8.max_receives == 1
                               : p11.v9.pointers == PTR_HOST && p11.v9.max_receives == 1 &&
                                     p11.v9.virtual_device.count == 1 && p11.v9.max_p2p_bytes > 1 << 20;
        if (!is_host)
            check(-1, "properties");
        printf(" %s=%d", version == 8 ? p8.name : p11.v9.name, version == 8 ? p8.speed : p11.v9.speed);
    }
    printf("\n");
}

static void listen_all(void) {
    printf("handles");
    for (int c = 0; c < channels; c++) {
        unsigned char handle[HANDLE_SIZE] = {0};
        check(version == 11 ? V11->listen(context, 0, handle, &all[c].listener)
                            : (version == 8   ? V8->listen
                               : version == 9 ? V9->listen
                                              : V10->listen)(0, handle, &all[c].listener),
              "listen");
        printf(" ");
        for (int i = 0; i < HANDLE_SIZE; i++)
            printf("%02x", handle[i]);
    }
    printf("\n");
}

static int connect_one(struct channel *channel) {
    void **sender = &channel->out.connection, **receiver = &channel->in.connection;
    int code = SUCCESS;

    if (*sender == NULL) {
        switch (version) {
        case 8: code = V8->connect(0, channel->handle, sender, NULL); break;
        case 9: code = V9->connect(0, channel->handle, sender, NULL); break;
        case 10: code = V10->connect(0, NULL, channel->handle, sender, NULL); break;
        default: code = V11->connect(context, 0, channel->handle, sender, NULL);
        }
    }
    if (code == SUCCESS && *receiver == NULL)
        code = EACH(accept)(channel->listener, receiver, NULL);
    return code;
}

static void connect_all(char *words) {
    int made;

    for (int c = 0; c < channels; c++) {
        char *word = strtok_r(NULL, " \n", &words);
        for (int i = 0; word != NULL && i < HANDLE_SIZE; i++)
            sscanf(word + 2 * i, "%2hhx", (unsigned char *)&all[c].handle[i]);
    }
    do {
        made = 0;
        for (int c = 0; c < channels; c++) {
            int code = connect_one(&all[c]);
            if (code != SUCCESS) {
                printf("failed %d\n", code);
                return;
            }
            made += all[c].out.connection != NULL && all[c].in.connection != NULL;
        }
        usleep(200);
    } while (made < channels);
    printf("connected\n");
}

/* What a message consists of: differs by seed, sender, channel, message and place. */
static void fill(unsigned char *data, size_t size, uint64_t seed, int from, int channel, int message) {
    uint64_t state = seed * 1000003 + from * 10007 + channel * 101 + message + 1;

    for (size_t i = 0; i < size; i += 8) {
        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        memcpy(data + i, &state, size - i < 8 ? size - i : 8);
    }
}

static int post(struct side *side, int out, void *data, size_t size, void **request) {
    int size32 = (int)size, tag = rank;
    void *profile = NULL;

    if (out && version == 8)
        return V8->send(side->connection, data, size32, tag, side->region, request);
    if (out && version == 9)
        return V9->send(side->connection, data, size, tag, side->region, request);
    if (out)
        return (version == 10 ? V10->send : V11->send)(side->connection, data, size, tag, side->region, NULL, request);
    if (version == 8)
        return V8->receive(side->connection, 1, &data, &size32, &tag, &side->region, request);
    if (version == 9)
        return V9->receive(side->connection, 1, &data, &size, &tag, &side->region, request);
    return (version == 10 ? V10->receive : V11->receive)(side->connection, 1, &data, &size, &tag, &side->region,
                                                         &profile, request);
}

struct plan {
    uint64_t seed;
    int count, depth, sizes;
    size_t size[MAX_SIZES], most;
};

static size_t size_of(const struct plan *plan, int message) { return plan->size[message % plan->sizes]; }

static void compare(struct channel *channel, const unsigned char *data, size_t got, const struct plan *plan, int number) {
    size_t size = size_of(plan, channel->in.done);
    unsigned char *right = malloc(size + 8);

    fill(right, size, plan->seed, 1 - rank, number, channel->in.done);
    for (size_t i = 0; got != size || i < size; i++)
        if (got != size || data[i] != right[i]) {
            if (channel->wrong_bytes++ == 0) {
                channel->wrong_message = channel->in.done;
                channel->wrong_at = i;
            }
            if (got != size)
                break;
        }
    channel->bytes += got;
    free(right);
}

/* Do what can be done in one direction of a channel. Returns whether anything was done. */
static int work(struct channel *channel, struct side *side, int out, const struct plan *plan, int number, long *calls) {
    int did = 0, done = 0, got = -1, slot = side->posted % plan->depth;

    if (side->posted < plan->count && side->posted - side->done < plan->depth) {
        size_t size = out ? size_of(plan, side->posted) : plan->most;
        if (out)
            fill(side->data[slot], size, plan->seed, rank, number, side->posted);
        channel->code = post(side, out, side->data[slot], size, &side->requests[slot]);
        did = side->requests[slot] != NULL;
        side->posted += did;
    }
    if (channel->code == SUCCESS && side->done < side->posted) {
        slot = side->done % plan->depth;
        channel->code = EACH(test)(side->requests[slot], &done, &got);
        ++*calls;
    }
    if (done && channel->code == SUCCESS) {
        if (!out)
            compare(channel, side->data[slot], (size_t)got, plan, number);
        else if ((size_t)got != size_of(plan, side->done))
            channel->wrong_bytes++;
        side->done++;
    }
    return did || done;
}

static void begin(struct side *side, const struct plan *plan) {
    side->posted = side->done = 0;
    for (int i = 0; i < plan->depth; i++)
        side->data[i] = malloc(plan->most + 8);
    check(EACH(register_memory)(side->connection, side->data[0], plan->most, PTR_HOST, &side->region), "register");
}

static void end(struct side *side, const struct plan *plan) {
    check(EACH(deregister_memory)(side->connection, side->region), "deregister");
    for (int i = 0; i < plan->depth; i++)
        free(side->data[i]);
}

static void exchange(char *words) {
    struct plan plan = {.seed = strtoull(strtok_r(NULL, " \n", &words), NULL, 10)};
    char *word;
    int left = channels;
    long calls = 0;

    plan.count = atoi(strtok_r(NULL, " \n", &words));
    plan.depth = atoi(strtok_r(NULL, " \n", &words));
    while ((word = strtok_r(NULL, " \n", &words)) != NULL && plan.sizes < MAX_SIZES) {
        plan.size[plan.sizes] = strtoull(word, NULL, 10);
        plan.most = plan.size[plan.sizes] > plan.most ? plan.size[plan.sizes] : plan.most;
        plan.sizes++;
    }
    for (int c = 0; c < channels; c++) {
        all[c].over = all[c].code = 0;
        all[c].bytes = all[c].wrong_bytes = 0;
        begin(&all[c].out, &plan);
        begin(&all[c].in, &plan);
    }
    while (left > 0) {
        int did = 0;
        for (int c = 0; c < channels; c++) {
            struct channel *one = &all[c];
            if (one->over)
                continue;
            did |= work(one, &one->out, 1, &plan, c, &calls);
            if (one->code == SUCCESS)
                did |= work(one, &one->in, 0, &plan, c, &calls);
            one->over = one->code != SUCCESS || (one->out.done == plan.count && one->in.done == plan.count);
            if (!one->over)
                continue;
            left--;
            if (one->code != SUCCESS)
                printf("channel %d error %d\n", c, one->code);
            else if (one->wrong_bytes)
                printf("channel %d wrong %d %zu %zu\n", c, one->wrong_message, one->wrong_at, one->wrong_bytes);
            else
                printf("channel %d ok %zu\n", c, one->bytes);
            fflush(stdout);
        }
        if (!did)
            usleep(50);
    }
    for (int c = 0; c < channels; c++) {
        end(&all[c].out, &plan);
        end(&all[c].in, &plan);
    }
    printf("exchanged %ld\n", calls);
}

static void close_all(void) {
    for (int c = 0; c < channels; c++) {
        if (all[c].out.connection != NULL)
            check(EACH(close_send)(all[c].out.connection), "close");
        if (all[c].in.connection != NULL)
            check(EACH(close_receive)(all[c].in.connection), "close");
        if (all[c].listener != NULL)
            check(EACH(close_listen)(all[c].listener), "close");
    }
    if (version == 11)
        check(V11->finalize(context), "finalize");
    printf("closed\n");
}

int main(int argc, char **argv) {
    static char line[LINE];

    if (argc != 4 || getenv("RANK") == NULL)
        return 2;
    channels = atoi(argv[3]);
    rank = atoi(getenv("RANK"));
    start(argv[1], argv[2]);
    while (fgets(line, sizeof line, stdin) != NULL) {
        char *words, *command = strtok_r(line, " \n", &words);
        if (strcmp(command, "listen") == 0)
            listen_all();
        else if (strcmp(command, "connect") == 0)
            connect_all(words);
        else if (strcmp(command, "exchange") == 0)
            exchange(words);
        else if (strcmp(command, "nics") == 0)
            show_nics();
        else if (strcmp(command, "close") == 0)
            close_all();
        fflush(stdout);
    }
    return 0;
}
