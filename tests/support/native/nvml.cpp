// Driver library libnvidia-ml.so.1 of a node with two GPUs: the first at work, the second without sensors.
#include <cstdint>

namespace {
constexpr int kSuccess = 0, kNotSupported = 3;

int of_the_first(void* device, auto* place, auto value) {
  if (device != reinterpret_cast<void*>(1)) return kNotSupported;
  *place = value;
  return kSuccess;
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
  return of_the_first(device, rates, Utilization{87, 40});
}
int nvmlDeviceGetTemperature(void* device, int, unsigned* celsius) { return of_the_first(device, celsius, 71u); }
int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  return of_the_first(device, memory, Memory{80ull << 30, 60ull << 30, 20ull << 30});
}
int nvmlDeviceGetPowerUsage(void* device, unsigned* milliwatts) {
  return of_the_first(device, milliwatts, 412'500u);
}
int nvmlDeviceGetClockInfo(void* device, int, unsigned* megahertz) { return of_the_first(device, megahertz, 1755u); }
int nvmlDeviceGetTotalEccErrors(void* device, int, int, unsigned long long* count) {
  return of_the_first(device, count, 3ull);
}
int nvmlDeviceGetCurrentClocksEventReasons(void* device, unsigned long long* reasons) {
  return of_the_first(device, reasons, 0x40ull);  // software thermal slowdown is 0x20, hardware 0x40
}
const char* nvmlErrorString(int) { return "not supported"; }
}
