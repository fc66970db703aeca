/* NVML with one Tesla P40 in it, for the real Python bindings to load as libnvidia-ml.so.1.
 *
 * Structures and error codes as in NVIDIA's nvml.h. Values are those of
 * captures/p40-q-535.129.03.txt, handed over in the environment (MEMORY_USED=54...), so that the
 * test compares with the capture and not with this file. STUB_ERROR makes every question about the
 * GPU end in that error code; STUB_OLD leaves out what drivers before R510 lack.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int nvmlReturn_t;
typedef void *nvmlDevice_t;
enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, FUNCTION_NOT_FOUND = 13 };

static unsigned number(const char *name) {
    const char *value = getenv(name);
    return value ? (unsigned)strtoul(value, NULL, 0) : 0;
}

static nvmlReturn_t failing(void) { return (nvmlReturn_t)number("STUB_ERROR"); }

static nvmlReturn_t give(unsigned *out, const char *name) {
    if (failing()) return failing();
    *out = number(name);
    return SUCCESS;
}

static const char *const TEXT[] = {
    "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
    "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power",
    "Driver Not Loaded", "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found",
    "Function Not Found", "Corrupted infoROM", "GPU is lost"};

const char *nvmlErrorString(nvmlReturn_t code) {
    return code >= 0 && code <= 15 ? TEXT[code] : "Unknown Error";
}

nvmlReturn_t nvmlInit_v2(void) { return (nvmlReturn_t)number("STUB_INIT"); }
nvmlReturn_t nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
nvmlReturn_t nvmlShutdown(void) { return SUCCESS; }

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 1;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    *device = (nvmlDevice_t)0x40;
    return index == 0 ? SUCCESS : NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) {
    snprintf(name, length, "%s", getenv("NAME"));
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-00000000-0000-0000-0000-000000000040");
    return SUCCESS;
}

typedef struct { unsigned gpu, memory; } utilization_t;

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, utilization_t *out) {
    nvmlReturn_t code = give(&out->gpu, "UTILIZATION");
    return code ? code : give(&out->memory, "MEMORY_UTILIZATION");
}

#define MIB 1048576ull
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;

/* The first version counts what the driver reserves as used. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, memory_t *out) {
    if (failing()) return failing();
    out->total = number("MEMORY_TOTAL") * MIB;
    out->used = (number("MEMORY_USED") + number("MEMORY_RESERVED")) * MIB;
    out->free = out->total - out->used;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, memory_v2_t *out) {
    if (getenv("STUB_OLD")) return FUNCTION_NOT_FOUND;
    if (failing()) return failing();
    if (out->version != (sizeof(memory_v2_t) | 2u << 24)) return 25; /* ARGUMENT_VERSION_MISMATCH */
    out->total = number("MEMORY_TOTAL") * MIB;
    out->reserved = number("MEMORY_RESERVED") * MIB;
    out->used = number("MEMORY_USED") * MIB;
    out->free = out->total - out->reserved - out->used;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *milliwatts) {
    return give(milliwatts, "POWER_MW");
}

nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned *milliwatts) {
    return give(milliwatts, "POWER_LIMIT_MW");
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned *celsius) {
    return sensor == 0 ? give(celsius, "TEMPERATURE") : 2;
}

nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned *percent) {
    return failing() ? failing() : NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, int kind, unsigned *mhz) {
    return give(mhz, kind == 1 ? "SM_CLOCK" : kind == 2 ? "MEMORY_CLOCK" : "OTHER_CLOCK");
}

nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, unsigned *state) {
    return give(state, "PSTATE");
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *mask) {
    if (failing()) return failing();
    *mask = number("THROTTLE");
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned *generation) {
    return give(generation, "PCIE_GENERATION");
}

nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned *width) {
    return give(width, "PCIE_WIDTH");
}

typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} process_t;

static nvmlReturn_t processes(unsigned *count, process_t *out) {
    if (failing()) return failing();
    if (!out || *count < 2) {
        *count = 2;
        return INSUFFICIENT_SIZE;
    }
    *count = 2;
    out[0] = (process_t){4242, 14000ull * MIB, ~0u, ~0u};
    out[1] = (process_t){4243, 640ull * MIB, ~0u, ~0u};
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned *count, process_t *out) {
    return processes(count, out);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, process_t *out) {
    return getenv("STUB_OLD") ? FUNCTION_NOT_FOUND : processes(count, out);
}
