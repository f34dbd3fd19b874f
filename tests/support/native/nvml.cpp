// Driver library libnvidia-ml.so.1 of a node with two GPUs: the first at work, the second without sensors.
//
// The file that NVML_READINGS names has the first one's utilization in per cent, the bits of its clock event
// reasons, its memory errors, the XID number of its newest error and the GiB of its 80 that are in use, read anew
// at each question.
#include <cstdint>
#include <cstdlib>
#include <fstream>

namespace {
constexpr int kSuccess = 0, kNotSupported = 3, kTimeout = 10;

int of_the_first(void* device, auto* place, auto value) {
  if (device != reinterpret_cast<void*>(1)) return kNotSupported;
  *place = value;
  return kSuccess;
}

struct Readings {
  unsigned utilization = 87;
  unsigned long long reasons = 0x40, errors = 3, xid = 0;  // software thermal slowdown is 0x20, hardware 0x40
  unsigned long long used = 20;
};

Readings present() {
  Readings readings;
  if (const char* path = std::getenv("NVML_READINGS"))
    std::ifstream(path) >> readings.utilization >> readings.reasons >> readings.errors >> readings.xid >>
        readings.used;
  return readings;
}
}  // namespace

extern "C" {
struct Utilization { unsigned gpu, memory; };
struct Memory { unsigned long long total, free, used; };

int nvmlInit_v2() { return kSuccess; }
int nvmlInitWithFlags(unsigned) { return kSuccess; }
int nvmlShutdown() { return kSuccess; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 2; return kSuccess; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = reinterpret_cast<void*>(static_cast<uintptr_t>(index + 1));
  return kSuccess;
}
int nvmlDeviceGetUtilizationRates(void* device, Utilization* rates) {
  return of_the_first(device, rates, Utilization{present().utilization, 40});
}
int nvmlDeviceGetTemperature(void* device, int, unsigned* celsius) { return of_the_first(device, celsius, 71u); }
int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  const auto used = present().used;
  return of_the_first(device, memory, Memory{80ull << 30, (80 - used) << 30, used << 30});
}
int nvmlDeviceGetPowerUsage(void* device, unsigned* milliwatts) {
  return of_the_first(device, milliwatts, 412'500u);
}
int nvmlDeviceGetClockInfo(void* device, int, unsigned* megahertz) { return of_the_first(device, megahertz, 1755u); }
int nvmlDeviceGetTotalEccErrors(void* device, int, int, unsigned long long* count) {
  return of_the_first(device, count, present().errors);
}
int nvmlDeviceGetCurrentClocksEventReasons(void* device, unsigned long long* reasons) {
  return of_the_first(device, reasons, present().reasons);
}
struct Event { void* device; unsigned long long type, data; unsigned gpu_instance, compute_instance; };
int nvmlEventSetCreate(void** events) { *events = reinterpret_cast<void*>(7); return kSuccess; }
int nvmlEventSetFree(void*) { return kSuccess; }
int nvmlDeviceRegisterEvents(void* device, unsigned long long types, void*) {
  return device == reinterpret_cast<void*>(1) && types == 0x08 ? kSuccess : kNotSupported;
}
int nvmlEventSetWait_v2(void*, Event* event, unsigned) {
  static unsigned long long told = 0;  // each error is an event once
  const auto xid = present().xid;
  if (xid == told) return kTimeout;
  told = xid;
  *event = {reinterpret_cast<void*>(1), 0x08, xid, 0, 0};
  return kSuccess;
}
const char* nvmlErrorString(int) { return "not supported"; }
}
