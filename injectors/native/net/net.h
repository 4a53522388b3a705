/* What the files of this plug-in share: transfers, and the orders (faults) that act on them. See plugin.c. */
#ifndef TORCHAOS_NET_H
#define TORCHAOS_NET_H

#include "abi.h"
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

/* ---- orders.c: the page, and what is ordered (protocol/control_pages.py describes both) ---- */

enum kind { STALL = 1, DELAY, THROTTLE, FLAP, FAIL, CORRUPT, REFUSE, NICS };
enum way { OUT = 1, IN = 2 }; /* what this rank sends; what it receives */
enum { MAX_ORDERS = 16 };
enum count { CONNECTIONS = 2, SENT, RECEIVED };

/* One end of a connection, as orders see it. */
struct ends {
    int way, peer, number; /* the peer's rank; number: counts the connections of this pair in this direction */
    uint32_t refused;      /* bits by order */
};

/* One transfer, from when its size is known. */
struct transfer {
    struct ends ends;
    size_t size;
    int64_t known_ns;              /* when it was posted or, for what is received, when its size arrived */
    uint32_t looked, meant, error; /* bits by order: it was compared; it is meant; it is the one that fails */
    size_t wrong_at;               /* the byte that goes wrong; SIZE_MAX: none */
};

int64_t now_ns(void);
void open_page(int version);
void count(enum count what);
/* How many bytes of the transfer may move now, at most `most`; 0: none yet. An error: it fails. */
result allowed(struct transfer *transfer, size_t most, size_t *bytes);
void moved(const struct transfer *transfer, size_t bytes);
/* Whether a connection may be made now. */
result may_connect(struct ends *ends, int *may);
/* How many NICs are shown, of so many; and their speed in Mbit/s. */
int shown_nics(int there);
int shown_speed(int speed);

/* ---- nics.c ---- */

enum { MAX_NICS = 16 };
struct nic {
    char name[IF_NAMESIZE], *pci_path;
    struct sockaddr_storage address;
    socklen_t address_size;
    int speed;
};
const struct nic *nics(int *count);

/* ---- wire.c: transfers over TCP. Nothing in there waits. ---- */

extern int own_rank;
result wire_listen(int device, void *handle, void **listener);
result wire_connect(int device, void *handle, void **sender, void **on_device);
result wire_accept(void *listener, void **receiver, void **on_device);
result wire_post(void *connection, void *data, size_t size, void **request);
result wire_test(void *request, int *done, int *sizes);
result wire_close(void *connection);
result wire_close_listen(void *listener);

/* ---- plugin.c ---- */

void say(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
