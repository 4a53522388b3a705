/* Transfers over TCP: one socket for each connection, from its sender to its receiver.
 *
 * A transfer is its size, in 8 bytes, and its data. A connection carries its transfers in the order in which they were
 * posted, and any call of `test` moves whatever can move. The sockets never block.
 */
#define _GNU_SOURCE
#include "net.h"
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

enum { PER_CALL = 4 << 20, PER_MOVE = 1 << 20, MAX_RANKS = 1 << 16 };

struct link;
struct request {
    struct link *link;
    char *data;
    size_t room, done; /* bytes */
    int used, over;
    struct transfer transfer;
};
struct link {
    int fd;
    struct ends ends;
    result error; /* the connection's own, which stays */
    unsigned first, end; /* numbers of the requests that are not over */
    uint64_t size; /* of the first: what is sent or has come of it */
    size_t size_done;
    struct request requests[MAX_REQUESTS];
};
struct hello { /* what a sender says first */
    uint64_t token;
    int32_t rank, number;
};
union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};
struct handle { /* NCCL brings it to the sender, and gives the same bytes to each call of connect */
    uint64_t token;
    int32_t rank;
    union address address;
    struct link *pending;
};
struct listener {
    int fd;
    uint64_t token;
    struct link *pending;
    struct hello hello;
    size_t hello_done;
};
_Static_assert(sizeof(struct handle) <= HANDLE_SIZE, "NCCL's handles have 128 bytes");

int own_rank = -1;
static uint32_t made[MAX_RANKS]; /* connections to that rank */

static result failure(void) {
    return errno == ECONNRESET || errno == EPIPE || errno == ECONNREFUSED || errno == ETIMEDOUT ? REMOTE_ERROR
                                                                                                : SYSTEM_ERROR;
}

static int is_later(void) { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == EINPROGRESS; }

static struct link *new_link(int fd, int way) {
    struct link *link = calloc(1, sizeof *link);

    if (link == NULL) {
        close(fd);
        return NULL;
    }
    link->fd = fd;
    link->ends.way = way;
    return link;
}

result wire_close(void *connection) {
    struct link *link = connection;

    if (link != NULL) {
        close(link->fd);
        free(link);
    }
    return SUCCESS;
}

/* ---- how connections are made ---- */

result wire_listen(int device, void *opaque, void **out) {
    struct handle *handle = opaque;
    struct listener *listener = calloc(1, sizeof *listener);
    socklen_t size = sizeof handle->address;
    const struct nic *nic;
    int there;

    nic = nics(&there) + device;
    if (listener == NULL || device < 0 || device >= there) {
        free(listener);
        return INTERNAL_ERROR;
    }
    memset(handle, 0, sizeof *handle);
    listener->fd = socket(nic->address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (listener->fd < 0 || bind(listener->fd, (const struct sockaddr *)&nic->address, nic->address_size) != 0 ||
        listen(listener->fd, 64) != 0 || getsockname(listener->fd, &handle->address.any, &size) != 0 ||
        getrandom(&listener->token, sizeof listener->token, 0) != sizeof listener->token) {
        say(LOG_WARN, "NET/torchaos : can't listen on %s: %s", nic->name, strerror(errno));
        wire_close_listen(listener);
        return SYSTEM_ERROR;
    }
    handle->token = listener->token;
    handle->rank = own_rank;
    *out = listener;
    return SUCCESS;
}

result wire_close_listen(void *opaque) {
    struct listener *listener = opaque;

    if (listener != NULL) {
        wire_close(listener->pending);
        if (listener->fd >= 0)
            close(listener->fd);
        free(listener);
    }
    return SUCCESS;
}

static result begin(struct handle *handle) {
    int fd = socket(handle->address.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1;
    socklen_t size = handle->address.any.sa_family == AF_INET ? sizeof handle->address.v4 : sizeof handle->address.v6;

    if (fd < 0 || (handle->pending = new_link(fd, OUT)) == NULL)
        return SYSTEM_ERROR;
    handle->pending->ends.peer = handle->rank;
    handle->pending->ends.number =
        (int)__atomic_fetch_add(&made[(uint32_t)handle->rank % MAX_RANKS], 1, __ATOMIC_RELAXED);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return connect(fd, &handle->address.any, size) == 0 || is_later() ? SUCCESS : failure();
}

/* Send the sender's token and rank, as soon as the socket is connected. */
static result greet(struct handle *handle, int *is_made) {
    struct link *link = handle->pending;
    struct pollfd ready = {.fd = link->fd, .events = POLLOUT};
    struct hello hello = {handle->token, own_rank, link->ends.number};
    socklen_t size = sizeof errno;
    ssize_t sent;

    *is_made = 0;
    if (poll(&ready, 1, 0) != 1)
        return SUCCESS;
    if (getsockopt(link->fd, SOL_SOCKET, SO_ERROR, &errno, &size) != 0 || errno != 0)
        return failure();
    sent = send(link->fd, &hello, sizeof hello, MSG_NOSIGNAL); /* into an empty buffer: all of it, or nothing */
    *is_made = sent == (ssize_t)sizeof hello;
    return *is_made || (sent < 0 && is_later()) ? SUCCESS : failure();
}

result wire_connect(int device, void *opaque, void **sender, void **on_device) {
    struct handle *handle = opaque;
    int may, is_made = 0;
    result code = SUCCESS;

    (void)device;
    (void)on_device;
    *sender = NULL;
    if (handle->pending == NULL)
        code = begin(handle);
    if (code == SUCCESS)
        code = may_connect(&handle->pending->ends, &may);
    if (code == SUCCESS && may)
        code = greet(handle, &is_made);
    if (is_made) {
        *sender = handle->pending;
        count(CONNECTIONS);
    } else if (code != SUCCESS) {
        say(LOG_WARN, "NET/torchaos : rank %d can't connect to rank %d", own_rank, handle->rank);
        wire_close(handle->pending);
    }
    if (is_made || code != SUCCESS)
        handle->pending = NULL;
    return code;
}

/* Accept a connection, and read its token. A connection with a wrong token is closed. */
static result hear(struct listener *listener) {
    struct link *link = listener->pending;
    ssize_t got;
    int on = 1;

    if (link == NULL) {
        int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0)
            return is_later() || errno == ECONNABORTED ? SUCCESS : SYSTEM_ERROR;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        listener->hello_done = 0;
        link = listener->pending = new_link(fd, IN);
        if (link == NULL)
            return SYSTEM_ERROR;
    }
    if (listener->hello_done == sizeof listener->hello)
        return SUCCESS;
    got = recv(link->fd, (char *)&listener->hello + listener->hello_done, sizeof listener->hello - listener->hello_done,
               0);
    if (got < 0 && is_later())
        return SUCCESS;
    listener->hello_done += got > 0 ? (size_t)got : 0;
    if (got <= 0 || (listener->hello_done == sizeof listener->hello && listener->hello.token != listener->token)) {
        wire_close(link);
        listener->pending = NULL;
        return SUCCESS;
    }
    link->ends.peer = listener->hello.rank;
    link->ends.number = listener->hello.number;
    return SUCCESS;
}

result wire_accept(void *opaque, void **receiver, void **on_device) {
    struct listener *listener = opaque;
    result code = hear(listener);
    int may;

    (void)on_device;
    *receiver = NULL;
    if (code != SUCCESS || listener->pending == NULL || listener->hello_done < sizeof listener->hello)
        return code;
    code = may_connect(&listener->pending->ends, &may);
    if (code != SUCCESS || !may)
        return code;
    *receiver = listener->pending;
    listener->pending = NULL;
    count(CONNECTIONS);
    return SUCCESS;
}

/* ---- how data move ---- */

result wire_post(void *connection, void *data, size_t size, void **out) {
    struct link *link = connection;
    struct request *request = &link->requests[link->end % MAX_REQUESTS];

    *out = NULL;
    if (link->error != SUCCESS)
        return link->error;
    if (request->used)
        return SUCCESS; /* NCCL asks again */
    memset(request, 0, sizeof *request);
    request->link = link;
    request->data = data;
    request->room = size;
    request->used = 1;
    request->transfer = (struct transfer){.ends = link->ends, .size = size, .known_ns = now_ns(), .wrong_at = SIZE_MAX};
    link->end++;
    *out = request;
    return SUCCESS;
}

/* One system call; `bytes` says how many bytes it moved. */
static result move(struct link *link, void *data, size_t size, int more, size_t *bytes) {
    ssize_t done = link->ends.way == OUT ? send(link->fd, data, size, MSG_NOSIGNAL | (more ? MSG_MORE : 0))
                                         : recv(link->fd, data, size, 0);

    *bytes = done > 0 ? (size_t)done : 0;
    if (done > 0 || (done < 0 && is_later()))
        return SUCCESS;
    return link->error = done == 0 ? REMOTE_ERROR : failure();
}

static result move_size(struct link *link, struct request *request) {
    size_t bytes;
    result code;

    if (link->size_done == 0)
        link->size = request->transfer.size;
    code = move(link, (char *)&link->size + link->size_done, sizeof link->size - link->size_done, link->size > 0, &bytes);
    link->size_done += bytes;
    if (code != SUCCESS || link->size_done < sizeof link->size || link->ends.way == OUT)
        return code;
    if (link->size > request->room) {
        say(LOG_WARN, "NET/torchaos : rank %d sent %zu bytes, and %zu are expected", link->ends.peer,
            (size_t)link->size, request->room);
        return link->error = INVALID_USAGE;
    }
    request->transfer.size = link->size;
    request->transfer.known_ns = now_ns();
    return SUCCESS;
}

/* The byte to corrupt is sent alone, from a copy, so that the sender's own data stay as they are. */
static result move_data(struct link *link, struct request *request, size_t most, size_t *bytes) {
    size_t at = request->transfer.wrong_at, end = request->done + most;
    char *data = request->data + request->done, wrong;
    result code;

    if (at < request->done || at >= end)
        return move(link, data, most, 0, bytes);
    if (at > request->done)
        return move(link, data, at - request->done, 1, bytes);
    wrong = *data ^ 0x10;
    if (link->ends.way == OUT)
        return move(link, &wrong, 1, 0, bytes);
    code = move(link, data, 1, 0, bytes);
    if (*bytes == 1)
        *data ^= 0x10;
    return code;
}

/* Move as much of the first request as can move now. `bytes`: how many bytes moved. */
static result advance(struct link *link, struct request *request, size_t *bytes) {
    struct transfer *transfer = &request->transfer;
    int is_known = link->size_done == sizeof link->size;
    size_t left = transfer->size - request->done, may = 0;
    result code = SUCCESS;

    *bytes = 0;
    if (link->ends.way == OUT || is_known) {
        code = allowed(transfer, is_known && left > 0 ? (left < PER_MOVE ? left : PER_MOVE) : 1, &may);
        if (code != SUCCESS || may == 0)
            return code;
    }
    if (!is_known) {
        code = move_size(link, request);
        *bytes = link->size_done == sizeof link->size;
    } else if (left > 0) {
        code = move_data(link, request, may, bytes);
        request->done += *bytes;
        moved(transfer, *bytes);
    }
    if (link->size_done == sizeof link->size && request->done == transfer->size && (is_known || link->ends.way == OUT)) {
        request->over = 1;
        link->size_done = 0;
        link->first++;
        count(link->ends.way == OUT ? SENT : RECEIVED);
    }
    return code;
}

result wire_test(void *opaque, int *done, int *sizes) {
    struct request *request = opaque;
    struct link *link = request->link;
    size_t bytes = 1, budget = PER_CALL;
    result code = link->error;

    *done = 0;
    while (code == SUCCESS && link->first != link->end && bytes > 0 && budget >= bytes) {
        struct request *first = &link->requests[link->first % MAX_REQUESTS];
        code = advance(link, first, &bytes);
        bytes += (size_t)first->over; /* a transfer of no bytes is progress too */
        budget -= bytes < budget ? bytes : budget;
    }
    if (!request->over)
        return code;
    *done = 1;
    if (sizes != NULL)
        *sizes = (int)request->transfer.size;
    request->used = 0;
    return SUCCESS;
}
