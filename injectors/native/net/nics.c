/* The network interfaces that NCCL is shown: those that its own socket transport would take. */
#define _GNU_SOURCE
#include "net.h"
#include <ifaddrs.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct nic found[MAX_NICS];
static int how_many;
static pthread_once_t looked = PTHREAD_ONCE_INIT;

/* NCCL_SOCKET_IFNAME: prefixes with commas; = before them: whole names; ^ before them: all but these. */
static int is_chosen(const char *name, const char *list) {
    int without = *list == '^', whole, is_there = 0;
    char copy[1024], *rest = NULL;

    list += without;
    whole = *list == '=';
    snprintf(copy, sizeof copy, "%s", list + whole);
    for (char *word = strtok_r(copy, ",", &rest); word != NULL; word = strtok_r(NULL, ",", &rest))
        is_there |= whole ? strcmp(name, word) == 0 : strncmp(name, word, strlen(word)) == 0;
    return is_there != without;
}

static int is_known(const char *name) {
    for (int i = 0; i < how_many; i++)
        if (strcmp(found[i].name, name) == 0)
            return 1;
    return 0;
}

static int is_usable(const struct sockaddr *address) {
    const char *wanted = getenv("NCCL_SOCKET_FAMILY");

    if (address == NULL || (address->sa_family != AF_INET && address->sa_family != AF_INET6))
        return 0;
    if (wanted != NULL && strcmp(wanted, address->sa_family == AF_INET ? "AF_INET6" : "AF_INET") == 0)
        return 0;
    return address->sa_family == AF_INET || !IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)address)->sin6_addr);
}

static int speed_of(const char *name) {
    char path[PATH_MAX];
    int speed = 0;
    FILE *file;

    snprintf(path, sizeof path, "/sys/class/net/%s/speed", name);
    file = fopen(path, "re");
    if (file != NULL) {
        if (fscanf(file, "%d", &speed) != 1)
            speed = 0;
        fclose(file);
    }
    return speed > 0 ? speed : 10000; /* as NCCL does */
}

static void add(const struct ifaddrs *one) {
    struct nic *nic = &found[how_many];
    char path[PATH_MAX];

    snprintf(nic->name, sizeof nic->name, "%s", one->ifa_name);
    snprintf(path, sizeof path, "/sys/class/net/%s/device", one->ifa_name);
    nic->pci_path = realpath(path, NULL); /* NULL for a virtual interface, as NCCL expects it */
    nic->address_size =
        one->ifa_addr->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    memcpy(&nic->address, one->ifa_addr, nic->address_size);
    nic->speed = speed_of(one->ifa_name);
    how_many++;
}

static void look(void) {
    const char *list = getenv("NCCL_SOCKET_IFNAME"), *default_lists[] = {"^docker,lo,virbr", "docker", "lo"};
    struct ifaddrs *all = NULL;
    int lists = list != NULL && *list != '\0' ? 1 : 3;

    if (getifaddrs(&all) != 0)
        return;
    for (int i = 0; i < lists && how_many == 0; i++)
        for (struct ifaddrs *one = all; one != NULL && how_many < MAX_NICS; one = one->ifa_next)
            if ((one->ifa_flags & IFF_UP) && is_usable(one->ifa_addr) && !is_known(one->ifa_name) &&
                is_chosen(one->ifa_name, lists == 1 ? list : default_lists[i]))
                add(one);
    freeifaddrs(all);
}

const struct nic *nics(int *count) {
    pthread_once(&looked, look);
    *count = how_many;
    return found;
}
