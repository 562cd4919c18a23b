// The only inline PTX: what <cuda/ptx> lacks (wgmma, setmaxnreg, stmatrix, approximate functions) or cannot express
// (streaming access).
#pragma once

#include <cstdint>
#include <cuda/ptx>
#include <cuda_bf16.h>

namespace mok {

namespace ptx = cuda::ptx;

// ---- arithmetic: one instruction each ----

// 2^x and 1 / x to a few units in the last place; subnormal numbers count as 0.
__device__ __forceinline__ float exp2_approximately(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approximately(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// NaN where one of the two is.
__device__ __forceinline__ float smaller_or_nan(float a, float b) {
  float c;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
__device__ __forceinline__ float larger_or_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// ---- wgmma (sm_90a) ----

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Shared-memory matrix descriptor of an operand in 128-byte-swizzled rows of 64 bf16; 8 rows are 1024 bytes. K-major: a
// row holds 64 k of one line of the operand. Otherwise a row holds 64 lines at one k, and further blocks of 64 lines
// follow kBlockBytes apart.
template <int kBlockBytes> __device__ __forceinline__ uint64_t wgmma_descriptor(const void* tile) {
  const uint64_t address = __cvta_generic_to_shared(tile);
  return (address & 0x3FFFF) >> 4 | uint64_t{kBlockBytes >> 4} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

#define MOK_ACC8(i)                                                                                                    \
  "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3]), "+f"(acc[i + 4]), "+f"(acc[i + 5]),              \
      "+f"(acc[i + 6]), "+f"(acc[i + 7])
#define MOK_ACC32(i) MOK_ACC8(i), MOK_ACC8(i + 8), MOK_ACC8(i + 16), MOK_ACC8(i + 24)

// acc[64 x 256] (+)= A[64 x 16] B[256 x 16]^T, bf16 in, fp32 out; replaces acc unless kAccumulate.
// kTransposedA, kTransposedB: the operand is not K-major. Thread t holds rows 16 (t / 32) + t % 32 / 4 and 8 further;
// acc[4 j ..] are columns 8 j + t % 4 * 2 and 1 further.
template <bool kAccumulate, bool kTransposedA, bool kTransposedB>
__device__ __forceinline__ void wgmma_m64n256k16(float (&acc)[128], uint64_t a, uint64_t b) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.b32 p, %130, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
               "%128, %129, p, 1, 1, %131, %132;\n"
               "}\n"
               : MOK_ACC32(0), MOK_ACC32(32), MOK_ACC32(64), MOK_ACC32(96)
               : "l"(a), "l"(b), "n"(int{kAccumulate}), "n"(int{kTransposedA}), "n"(int{kTransposedB}));
}

#undef MOK_ACC32
#undef MOK_ACC8

template <int kRegisters> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Waits until kThreads threads are at named barrier `id` (1 to 15).
template <int kThreads> __device__ __forceinline__ void sync_threads(int32_t id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Stores four 8x8 bf16 matrices; lane l gives the row address of matrix l / 8, row l % 8.
__device__ __forceinline__ void stmatrix_x4(void* row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
               "r"(m2), "r"(m3)
               : "memory");
}

// Loads them: the reverse of stmatrix_x4.
__device__ __forceinline__ void ldmatrix_x4(const void* row, uint32_t (&m)[4]) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// ---- global memory ----

// 16 bytes that are read once: no allocation in L1.
__device__ __forceinline__ uint4 load_stream(const void* address) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_acquire_gpu(const uint32_t* address) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* address) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_release_system(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void add_release_gpu(uint32_t* address, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// Scope: all GPUs, so that peers may poll.
__device__ __forceinline__ void add_relaxed(uint32_t* address, uint32_t value) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void add_release_system(uint32_t* address, uint32_t value) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// `bytes` is a multiple of 16.
__device__ __forceinline__ void prefetch_l2(const void* address, int32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

// Makes a tensor map that the host wrote to global memory visible to the copy engine.
__device__ __forceinline__ void acquire_tensor_map(const void* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

__device__ __forceinline__ uint64_t global_nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

} // namespace mok
