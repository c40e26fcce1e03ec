// A libcuda for tests without a GPU: memory is the host's, and a launch runs the kernel on flashgen's emulator.
//
// FAKE_DRIVER_KERNEL is the library that the emulator's compiler made of the one kernel, FAKE_DRIVER_ARGUMENT_BYTES the
// size of its struct, FAKE_DRIVER_CAPABILITY the GPU's as "80". The file that is loaded must exist; nothing reads it.

#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulator/vector_types.h"

#include "emulator/interface.h"

namespace {

using Launch = int (*)(emulator::LaunchRequest*);

constexpr int kLeastAllowed = 48 * 1024;   // bytes of shared memory, beyond which a function must be told
int allowed_shared = kLeastAllowed;

CUresult loaded(const char* path) {
  std::FILE* file = std::fopen(path, "rb");
  if (file == nullptr) return CUDA_ERROR_FILE_NOT_FOUND;
  std::fclose(file);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int number) { return *device = number, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return *context = nullptr, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxSynchronize() { return CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  const int capability = std::atoi(std::getenv("FAKE_DRIVER_CAPABILITY"));
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? capability / 10 : capability % 10;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult, const char** name) { return *name = "an error of the fake driver", CUDA_SUCCESS; }

CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  *address = reinterpret_cast<CUdeviceptr>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) { return std::free(reinterpret_cast<void*>(address)), CUDA_SUCCESS; }
CUresult cuMemsetD8(CUdeviceptr address, unsigned char value, size_t bytes) {
  return std::memset(reinterpret_cast<void*>(address), value, bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  return std::memcpy(to, reinterpret_cast<const void*>(from), bytes), CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule* module, const char* path) {
  void* library = dlopen(std::getenv("FAKE_DRIVER_KERNEL"), RTLD_NOW);
  if (library == nullptr) std::fprintf(stderr, "%s\n", dlerror());
  *module = reinterpret_cast<CUmodule>(library);
  return library ? loaded(path) : CUDA_ERROR_INVALID_IMAGE;
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  *function = reinterpret_cast<CUfunction>(dlsym(module, "flashgen_emulator_launch"));
  return std::strstr(std::getenv("FAKE_DRIVER_KERNEL"), name) ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute attribute, int value) {
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
  return allowed_shared = value, CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream, void** parameters, void**) {
  if (static_cast<int>(shared_bytes) > allowed_shared) return CUDA_ERROR_INVALID_VALUE;
  static emulator::LaunchRequest request = {};
  const unsigned sizes[6] = {grid_x, grid_y, grid_z, block_x, block_y, block_z};
  std::memcpy(request.grid, sizes, sizeof sizes / 2);
  std::memcpy(request.block, sizes + 3, sizeof sizes / 2);
  request.shared_bytes = shared_bytes;
  request.argument_bytes = std::atoi(std::getenv("FAKE_DRIVER_ARGUMENT_BYTES"));
  request.arguments = parameters[0];
  request.workers = 1;
  const int failed = reinterpret_cast<Launch>(function)(&request);
  if (failed) std::fprintf(stderr, "%s\n", request.message);
  return failed ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
}

}  // extern "C"
