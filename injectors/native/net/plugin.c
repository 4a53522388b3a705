/* A network plug-in for NCCL whose connections can be broken on order: NCCL_NET_PLUGIN names this library.
 *
 * A plug-in can't use NCCL's own transports, so this one has a simple transport over TCP (wire.c). Before data moves,
 * orders.c says how much may move. NCCL's proxy thread calls all functions here and must never wait, so a transfer that
 * is to be slow or stuck answers "not done yet". Only host memory is offered, so NCCL copies through the host. There is
 * one table of functions for each version of the interface (abi.h) that NCCL 2.24 and later ask for.
 */
#include "net.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

static logger log_to;

void say(int level, const char *format, ...) {
    char text[512];
    va_list arguments;

    if (log_to == NULL)
        return;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    log_to(level, LOG_INIT_NET, "torchaos", 0, "%s", text);
}

static result start(logger log, int version) {
    const char *rank = getenv("RANK");
    int there;

    log_to = log;
    own_rank = rank != NULL ? atoi(rank) : -1;
    open_page(version);
    nics(&there);
    say(LOG_INFO, "NET/torchaos : rank %d, interface version %d, %d network interfaces", own_rank, version, there);
    return there > 0 ? SUCCESS : INTERNAL_ERROR;
}

static result devices(int *count) {
    nics(count);
    *count = shown_nics(*count);
    return SUCCESS;
}

static result properties(int device, struct properties_v9 *out) {
    int there;
    const struct nic *nic = nics(&there) + device;

    if (device < 0 || device >= there)
        return INTERNAL_ERROR;
    *out = (struct properties_v9){
        .name = (char *)nic->name, .pci_path = nic->pci_path, .guid = (uint64_t)device, .pointers = PTR_HOST,
        .speed = shown_speed(nic->speed), .max_connections = 65536, .max_receives = 1, .device_type = DEVICE_HOST,
        .virtual_device = {.count = 1, .devices = {device}}, .max_p2p_bytes = 1u << 30, .max_collective_bytes = 1u << 29,
    };
    return SUCCESS;
}

static result register_memory(void *connection, void *data, size_t size, int type, void **region) {
    (void)connection, (void)data, (void)size;
    *region = NULL;
    return type == PTR_HOST ? SUCCESS : INTERNAL_ERROR;
}

static result deregister_memory(void *connection, void *region) {
    (void)connection, (void)region;
    return SUCCESS;
}

static result flush(void *receiver, int count, void **data, int *sizes, void **regions, void **request) {
    (void)receiver, (void)count, (void)data, (void)sizes, (void)regions, (void)request;
    return INTERNAL_ERROR; /* for memory of GPUs only */
}

#define EXPORTED __attribute__((visibility("default")))
#define SAME                                                                                                   \
    .accept = wire_accept, .register_memory = register_memory, .deregister_memory = deregister_memory,          \
    .flush = flush, .test = wire_test, .close_send = wire_close, .close_receive = wire_close,                   \
    .close_listen = wire_close_listen

/* ---- version 8 ---- */

static result init_v8(logger log) { return start(log, 8); }

static result properties_v8(int device, struct properties_v8 *out) {
    struct properties_v9 all;
    result code = properties(device, &all);

    if (code == SUCCESS)
        *out = (struct properties_v8){
            .name = all.name, .pci_path = all.pci_path, .guid = all.guid, .pointers = all.pointers, .speed = all.speed,
            .max_connections = all.max_connections, .max_receives = all.max_receives, .device_type = all.device_type,
        };
    return code;
}

static result send_v8(void *sender, void *data, int size, int tag, void *region, void **request) {
    (void)tag, (void)region;
    return size < 0 ? INTERNAL_ERROR : wire_post(sender, data, (size_t)size, request);
}

static result receive_v8(void *receiver, int n, void **data, int *sizes, int *tags, void **regions, void **request) {
    (void)tags, (void)regions;
    return n != 1 || sizes[0] < 0 ? INTERNAL_ERROR : wire_post(receiver, data[0], (size_t)sizes[0], request);
}

EXPORTED const struct net_v8 ncclNetPlugin_v8 = {
    "torchaos", init_v8, devices, properties_v8, wire_listen, wire_connect, SAME, .send = send_v8,
    .receive = receive_v8,
};

/* ---- version 9 ---- */

static result init_v9(logger log) { return start(log, 9); }

static result send_v9(void *sender, void *data, size_t size, int tag, void *region, void **request) {
    (void)tag, (void)region;
    return wire_post(sender, data, size, request);
}

static result receive_v9(void *receiver, int n, void **data, size_t *sizes, int *tags, void **regions,
                         void **request) {
    (void)tags, (void)regions;
    return n != 1 ? INTERNAL_ERROR : wire_post(receiver, data[0], sizes[0], request);
}

EXPORTED const struct net_v9 ncclNetPlugin_v9 = {
    "torchaos", init_v9, devices, properties, wire_listen, wire_connect, SAME, .send = send_v9, .receive = receive_v9,
};

/* ---- version 10 ---- */

static result init_v10(logger log, profiler profile) {
    (void)profile;
    return start(log, 10);
}

static result connect_v10(int device, void *config, void *handle, void **sender, void **on_device) {
    (void)config;
    return wire_connect(device, handle, sender, on_device);
}

static result send_v10(void *sender, void *data, size_t size, int tag, void *region, void *profile, void **request) {
    (void)profile;
    return send_v9(sender, data, size, tag, region, request);
}

static result receive_v10(void *receiver, int n, void **data, size_t *sizes, int *tags, void **regions,
                          void **profiles, void **request) {
    (void)profiles;
    return receive_v9(receiver, n, data, sizes, tags, regions, request);
}

EXPORTED const struct net_v10 ncclNetPlugin_v10 = {
    "torchaos", init_v10, devices, properties, wire_listen, connect_v10, SAME, .send = send_v10,
    .receive = receive_v10,
};

/* ---- version 11: the first with a context for each communicator; ours is the same for all ---- */

static result init_v11(void **context, uint64_t communicator, void *config, logger log, profiler profile) {
    (void)communicator, (void)config, (void)profile;
    *context = NULL;
    return start(log, 11);
}

static result properties_v11(int device, struct properties_v11 *out) {
    out->max_multi_request = 1;
    return properties(device, &out->v9);
}

static result listen_v11(void *context, int device, void *handle, void **listener) {
    (void)context;
    return wire_listen(device, handle, listener);
}

static result connect_v11(void *context, int device, void *handle, void **sender, void **on_device) {
    (void)context;
    return wire_connect(device, handle, sender, on_device);
}

static result finalize_v11(void *context) {
    (void)context;
    return SUCCESS;
}

EXPORTED const struct net_v11 ncclNetPlugin_v11 = {
    "torchaos", init_v11, devices, properties_v11, listen_v11, connect_v11, SAME, .send = send_v10,
    .receive = receive_v10, .finalize = finalize_v11,
};
