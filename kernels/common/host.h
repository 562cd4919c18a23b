// Host side of the launches: errors as text, tensor maps.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cuda.h>
#include <cuda_runtime.h>

namespace mok {

// Launch functions return null, or what went wrong; the text lives until the thread's next error.
inline const char* error_text(const char* what, const char* detail) {
  thread_local char text[512];
  std::snprintf(text, sizeof(text), "%s: %s", what, detail);
  return text;
}

inline const char* check_cuda(const char* what, cudaError_t status) {
  return status == cudaSuccess ? nullptr : error_text(what, cudaGetErrorString(status));
}

// Loads kernels onto the current device now: loaded lazily, at their first launch, they could wait for a kernel that
// waits for them. Null, or why they cannot run there.
template <class... Kernels> const char* load_kernels(const char* what, Kernels... kernels) {
  const char* error = nullptr;
  cudaFuncAttributes attributes;
  ((error = error != nullptr ? error : check_cuda(what, cudaFuncGetAttributes(&attributes, kernels))), ...);
  return error;
}

inline const char* check_launch(const char* what) { return check_cuda(what, cudaGetLastError()); }

// Launches a kernel that may be set up while the one before it ends; it waits with cudaGridDependencySynchronize.
template <class... Parameters, class... Arguments>
const char* launch_after(const char* what, void (*kernel)(Parameters...), unsigned grid, unsigned threads,
                         size_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return check_cuda(what, cudaLaunchKernelEx(&config, kernel, arguments...));
}

// A tensor of up to three dimensions, innermost first, read or written in 128-byte-swizzled boxes.
struct MapSpec {
  const void* base;
  int32_t rank;
  uint64_t size[3];
  uint64_t stride_bytes[2]; // of dimensions 1 and 2
  uint32_t box[3];
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
};

// Encodes a tensor map; the driver function is looked up once, so that the library needs no libcuda to load.
inline const char* encode_map(CUtensorMap* map, const MapSpec& spec) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const auto status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (encode == nullptr) return error_text("cuTensorMapEncodeTiled", "not found: the driver is older than CUDA 12");
  const uint32_t element_strides[3] = {1, 1, 1};
  const CUresult status =
      encode(map, spec.type, static_cast<cuuint32_t>(spec.rank), const_cast<void*>(spec.base), spec.size,
             spec.stride_bytes, spec.box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status == CUDA_SUCCESS) return nullptr;
  char detail[256];
  std::snprintf(detail, sizeof(detail), "CUDA error %d for base %p, sizes %llu x %llu x %llu, strides %llu, %llu bytes",
                static_cast<int>(status), spec.base, static_cast<unsigned long long>(spec.size[0]),
                static_cast<unsigned long long>(spec.size[1]), static_cast<unsigned long long>(spec.size[2]),
                static_cast<unsigned long long>(spec.stride_bytes[0]),
                static_cast<unsigned long long>(spec.stride_bytes[1]));
  return error_text("cuTensorMapEncodeTiled", detail);
}

} // namespace mok
