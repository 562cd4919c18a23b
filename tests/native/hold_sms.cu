// Pairs of blocks, in clusters as the layer has them, that keep an SM's shared memory each until they are told to go,
// or for `limit_ns`.
#include "common/ptx.cuh"

#include <cstdint>

namespace {

constexpr int kBytes = 200 * 1024; // nothing with as much fits beside it

// state: [0] blocks that have begun, [1] blocks that may go, [2] blocks whose limit was over.
__global__ void __cluster_dims__(2, 1, 1) hold(int32_t* state, int64_t limit_ns) {
  extern __shared__ char kept[];
  if (threadIdx.x != 0) return;
  static_cast<volatile char*>(kept)[0] = 0;
  atomicAdd(state, 1);
  const uint64_t begin = mok::global_nanoseconds();
  while (*static_cast<volatile int32_t*>(state + 1) == 0) {
    if (mok::global_nanoseconds() - begin > static_cast<uint64_t>(limit_ns)) {
      atomicAdd(state + 2, 1);
      return;
    }
    __nanosleep(1000);
  }
}

} // namespace

extern "C" int hold_sms(int32_t* state, int32_t sms, int64_t limit_ns, void* stream) {
  cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  hold<<<sms, 32, kBytes, static_cast<cudaStream_t>(stream)>>>(state, limit_ns);
  return static_cast<int>(cudaGetLastError());
}
