// The instructions of Hopper that prefill attention needs beside the common ones.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/ptx.cuh"

namespace jax_hpc::prefill_attention {

// Says at a barrier of this CTA, without waiting, that this thread is there.
template <int Count>
__device__ __forceinline__ void arrive_at(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(Count) : "memory");
}

// What this thread has written to shared memory becomes visible to the tensor cores and the copy
// engine, once a barrier has told them.
__device__ __forceinline__ void fence_shared_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// No use of these registers moves across: wgmma fills them behind the compiler's back.
template <int Count>
__device__ __forceinline__ void settle(float (&registers)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

__device__ __forceinline__ float power_of_2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Two float32 as a pair of bf16, the first in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Four float32 as e4m3, the first in the lowest byte; saturating.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t four;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(four)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}

// Four 8x8 matrices of 16-bit values, each transposed: lanes 8i to 8i + 7 give the addresses of
// matrix i's rows, and lane l gets column l / 4, rows 2 (l % 4) and the next.
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], SharedAddress address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// Four 8x8 matrices from a warp: lane l gives columns 2 (l % 4) and the next of row l / 4.
__device__ __forceinline__ void store_matrices(SharedAddress address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Consecutive bytes, a multiple of 16, by the copy engine.
__device__ __forceinline__ void copy_bytes(SharedAddress to, const void* from, int bytes,
                                           SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(SharedAddress from) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}
__device__ __forceinline__ void store_shared_16(SharedAddress to, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}
__device__ __forceinline__ uint32_t load_shared_4(SharedAddress from) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ void store_shared_4(SharedAddress to, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void prefetch_descriptor(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A tile of an array of rank 4 by the copy engine.
__device__ __forceinline__ void copy_tile(SharedAddress to, const CUtensorMap* map,
                                          SharedAddress barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// And of rank 5.
__device__ __forceinline__ void copy_tile(SharedAddress to, const CUtensorMap* map,
                                          SharedAddress barrier, int x, int y, int z, int w,
                                          int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
      : "memory");
}

// The next ticket of a counter in global memory.
__device__ __forceinline__ int take_ticket(int* counter) { return atomicAdd(counter, 1); }

}  // namespace jax_hpc::prefill_attention
