/* NCCL's interface to network plug-ins, versions 8 to 11, as NCCL 2.24 and later load it. From 2.30 on, NCCL asks for
 * version 12 first, and then for 11.
 *
 * The order and the types of all members are those of the headers that NVIDIA publishes for authors of plug-ins:
 * github.com/NVIDIA/nccl, plugins/net/example/nccl (ext-net/example/nccl before 2.29), net_v8.h to net_v11.h. The
 * sizes below were computed from those headers.
 */
#ifndef TORCHAOS_NCCL_ABI_H
#define TORCHAOS_NCCL_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int result; /* ncclResult_t */
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_USAGE = 5, REMOTE_ERROR = 6 };
enum { HANDLE_SIZE = 128, MAX_REQUESTS = 32, MAX_DEVICES_PER_NIC = 4 };
enum { PTR_HOST = 1, DEVICE_HOST = 0 };
enum { LOG_WARN = 2, LOG_INFO = 3, LOG_INIT_NET = 1 | 16 };

typedef void (*logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);
typedef void (*profiler)(void); /* never called */

struct virtual_device {
    int count, devices[MAX_DEVICES_PER_NIC];
};
struct properties_v8 {
    char *name, *pci_path;
    uint64_t guid;
    int pointers, registration_is_global, speed, port; /* speed: Mbit/s */
    float latency;
    int max_connections, max_receives, device_type, device_version;
};
struct properties_v9 { /* also version 10 */
    char *name, *pci_path;
    uint64_t guid;
    int pointers, registration_is_global, force_flush, speed, port;
    float latency;
    int max_connections, max_receives, device_type, device_version;
    struct virtual_device virtual_device;
    size_t max_p2p_bytes, max_collective_bytes;
};
struct properties_v11 {
    struct properties_v9 v9;
    int max_multi_request;
};
_Static_assert(sizeof(struct properties_v8) == 64, "ncclNetProperties_v8_t");
_Static_assert(sizeof(struct properties_v9) == 104, "ncclNetProperties_v9_t, ncclNetProperties_v10_t");
_Static_assert(sizeof(struct properties_v11) == 112, "ncclNetProperties_v11_t");

/* What is the same in all four versions. */
#define TRANSFERS_END \
    result (*flush)(void *receiver, int count, void **data, int *sizes, void **regions, void **request); \
    result (*test)(void *request, int *done, int *sizes); \
    result (*close_send)(void *sender); \
    result (*close_receive)(void *receiver); \
    result (*close_listen)(void *listener); \
    result (*device_region)(void *connection, void *region, void **out); \
    result (*receive_consumed)(void *receiver, int count, void *request);
#define REGIONS \
    result (*accept)(void *listener, void **receiver, void **device); \
    result (*register_memory)(void *connection, void *data, size_t size, int type, void **region); \
    result (*register_dma_buffer)(void *connection, void *data, size_t size, int type, uint64_t offset, int fd, \
                                  void **region); \
    result (*deregister_memory)(void *connection, void *region);

struct net_v8 {
    const char *name;
    result (*init)(logger log);
    result (*devices)(int *count);
    result (*properties)(int device, struct properties_v8 *out);
    result (*listen)(int device, void *handle, void **listener);
    result (*connect)(int device, void *handle, void **sender, void **on_device);
    REGIONS
    result (*send)(void *sender, void *data, int size, int tag, void *region, void **request);
    result (*receive)(void *receiver, int count, void **data, int *sizes, int *tags, void **regions, void **request);
    TRANSFERS_END
};
struct net_v9 {
    const char *name;
    result (*init)(logger log);
    result (*devices)(int *count);
    result (*properties)(int device, struct properties_v9 *out);
    result (*listen)(int device, void *handle, void **listener);
    result (*connect)(int device, void *handle, void **sender, void **on_device);
    REGIONS
    result (*send)(void *sender, void *data, size_t size, int tag, void *region, void **request);
    result (*receive)(void *receiver, int count, void **data, size_t *sizes, int *tags, void **regions, void **request);
    TRANSFERS_END
    result (*make_virtual_device)(int *device, struct virtual_device *parts);
};
struct net_v10 {
    const char *name;
    result (*init)(logger log, profiler profile);
    result (*devices)(int *count);
    result (*properties)(int device, struct properties_v9 *out);
    result (*listen)(int device, void *handle, void **listener);
    result (*connect)(int device, void *config, void *handle, void **sender, void **on_device);
    REGIONS
    result (*send)(void *sender, void *data, size_t size, int tag, void *region, void *profile, void **request);
    result (*receive)(void *receiver, int count, void **data, size_t *sizes, int *tags, void **regions,
                      void **profiles, void **request);
    TRANSFERS_END
    result (*make_virtual_device)(int *device, struct virtual_device *parts);
};
struct net_v11 {
    const char *name;
    result (*init)(void **context, uint64_t communicator, void *config, logger log, profiler profile);
    result (*devices)(int *count);
    result (*properties)(int device, struct properties_v11 *out);
    result (*listen)(void *context, int device, void *handle, void **listener);
    result (*connect)(void *context, int device, void *handle, void **sender, void **on_device);
    REGIONS
    result (*send)(void *sender, void *data, size_t size, int tag, void *region, void *profile, void **request);
    result (*receive)(void *receiver, int count, void **data, size_t *sizes, int *tags, void **regions,
                      void **profiles, void **request);
    TRANSFERS_END
    result (*make_virtual_device)(int *device, struct virtual_device *parts);
    result (*finalize)(void *context);
    result (*set_attributes)(void *context, void *attributes);
};
_Static_assert(sizeof(struct net_v8) == 19 * sizeof(void *), "ncclNet_v8_t");
_Static_assert(sizeof(struct net_v9) == 20 * sizeof(void *), "ncclNet_v9_t");
_Static_assert(sizeof(struct net_v10) == 20 * sizeof(void *), "ncclNet_v10_t");
_Static_assert(sizeof(struct net_v11) == 22 * sizeof(void *), "ncclNet_v11_t");

#endif
