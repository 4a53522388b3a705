/* Links between GPUs, clocks, temperature, power. */
#include "overlay.h"

#include <stdio.h>

/* NVLink. A simulated GPU has four links that are up. */

static const char *const LINK_ERROR[] = {"replay", "recovery", "crc_flit", "crc_data", "ecc_data"};

void link_key(char *key, size_t size, unsigned link, const char *what) { snprintf(key, size, "nvlink%u.%s", link, what); }

static int simulated_link(unsigned link, unsigned *up)
{
    NEEDS(up && link < MAX_LINKS);
    if (link >= SIMULATED_LINKS)
        return NOT_SUPPORTED;
    *up = 1;
    return SUCCESS;
}

int serve_nvmlDeviceGetNvLinkState(Device device, unsigned link, unsigned *up)
{
    char key[64];
    int result = ASK(nvmlDeviceGetNvLinkState, simulated_link(link, up), device, link, up);
    if (!up || link >= MAX_LINKS)
        return result;
    link_key(key, sizeof key, link, "state");
    return settle32(result, gpu_of(device), key, up);
}

static int no_link_errors(unsigned link, unsigned counter, u64 *count)
{
    NEEDS(count && counter < 5 && link < MAX_LINKS);
    *count = 0;
    return link < SIMULATED_LINKS ? SUCCESS : NOT_SUPPORTED;
}

int serve_nvmlDeviceGetNvLinkErrorCounter(Device device, unsigned link, unsigned counter, u64 *count)
{
    char key[64];
    int result = ASK(nvmlDeviceGetNvLinkErrorCounter, no_link_errors(link, counter, count), device, link, counter, count);
    if (!count || counter >= 5 || link >= MAX_LINKS)
        return result;
    link_key(key, sizeof key, link, LINK_ERROR[counter]);
    return settle(result, gpu_of(device), key, count);
}

/* Clocks, temperature, power. */

static int reasons(int result, Device device, u64 *bits)
{
    u64 more = 0;
    if (!bits || !may_lay(result) || !lay(gpu_of(device), "clocks_event_reasons", &more))
        return result;
    *bits = (result == SUCCESS ? *bits : 0) | more;
    return SUCCESS;
}

static int no_reasons(u64 *bits)
{
    NEEDS(bits);
    *bits = 0;
    return SUCCESS;
}

int serve_nvmlDeviceGetCurrentClocksEventReasons(Device device, u64 *bits)
{
    return reasons(ASK(nvmlDeviceGetCurrentClocksEventReasons, no_reasons(bits), device, bits), device, bits);
}
int serve_nvmlDeviceGetCurrentClocksThrottleReasons(Device device, u64 *bits)
{
    return reasons(ASK(nvmlDeviceGetCurrentClocksThrottleReasons, no_reasons(bits), device, bits), device, bits);
}

static int simulated_temperature(unsigned sensor, unsigned *celsius)
{
    NEEDS(celsius && sensor == 0);
    *celsius = 45;
    return SUCCESS;
}

int serve_nvmlDeviceGetTemperature(Device device, unsigned sensor, unsigned *celsius)
{
    int result = ASK(nvmlDeviceGetTemperature, simulated_temperature(sensor, celsius), device, sensor, celsius);
    return celsius && sensor == 0 ? settle32(result, gpu_of(device), "temperature", celsius) : result;
}

int serve_nvmlDeviceGetTemperatureV(Device device, Temperature1 *temperature)
{
    NEEDS(temperature);
    bool ours = temperature->version == VERSION(Temperature1, 1);
    unsigned sensor = ours ? temperature->sensor : 0;
    int plain = ours ? simulated_temperature(sensor, (unsigned *)&temperature->temperature) : VERSION_MISMATCH;
    int result = ASK(nvmlDeviceGetTemperatureV, plain, device, temperature);
    return ours && sensor == 0 ? settle32(result, gpu_of(device), "temperature", (unsigned *)&temperature->temperature) : result;
}

static int simulated_power(unsigned *milliwatts)
{
    NEEDS(milliwatts);
    *milliwatts = 500000;
    return SUCCESS;
}

int serve_nvmlDeviceGetPowerUsage(Device device, unsigned *milliwatts)
{
    int result = ASK(nvmlDeviceGetPowerUsage, simulated_power(milliwatts), device, milliwatts);
    return milliwatts ? settle32(result, gpu_of(device), "power", milliwatts) : result;
}
