// Instructions that the grouped products need beside those of common/ptx.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/ptx.cuh"
#include "fused_moe/cache_policy.h"
#include "fused_moe/config.h"

namespace jax_hpc::fused_moe {

// Weights, which are read once.

__device__ __forceinline__ void copy_weights(SharedAddress to, const CUtensorMap* map,
                                             SharedAddress barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(kEvictFirst)
      : "memory");
}

__device__ __forceinline__ void copy_weights(SharedAddress to, const CUtensorMap* map,
                                             SharedAddress barrier, int x, int y, int z, int u) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "l"(kEvictFirst)
      : "memory");
}

__device__ __forceinline__ void copy_weights(SharedAddress to, const CUtensorMap* map,
                                             SharedAddress barrier, int x, int y, int z, int u,
                                             int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v), "l"(kEvictFirst)
      : "memory");
}

// As send() of common/ptx.cuh, of a word.
__device__ __forceinline__ void send_word(SharedAddress to, uint32_t value, SharedAddress barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to),
      "r"(value), "r"(barrier)
      : "memory");
}

// Like copy_16, of 4 bytes.
__device__ __forceinline__ void copy_4(SharedAddress to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// One of a barrier's arrivals, once the copies of 4 and 16 bytes that this thread has asked for are
// there. The thread does not wait.
__device__ __forceinline__ void arrive_when_copied(SharedAddress barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// What ordinary stores and such copies have written to shared memory, and this thread knows of, may
// be read by the products that it asks for next.
__device__ __forceinline__ void fence_for_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Reads past the L1 cache, which may be older than what a kernel before the last one wrote.
__device__ __forceinline__ int load_int(const int* from) {
  int value;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ Tile load_tile(const Tile* from) {
  Tile tile;
  asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(tile.expert), "=r"(tile.first_row), "=r"(tile.rows), "=r"(tile.number)
               : "l"(from)
               : "memory");
  return tile;
}

__device__ __forceinline__ float2 load_shared_pair(SharedAddress from) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(from)
               : "memory");
  return value;
}
__device__ __forceinline__ void store_shared(SharedAddress to, float4 value) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(value.x), "f"(value.y),
               "f"(value.z), "f"(value.w)
               : "memory");
}

// Counts what the CTA's threads have written before their last barrier, and returns how many were
// counted before; these have been written too.
__device__ __forceinline__ unsigned count_arrival(unsigned* counter) {
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}
// Past the L1 cache.
__device__ __forceinline__ float4 load_float4(const float* from) {
  float4 value;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(from)
               : "memory");
  return value;
}
__device__ __forceinline__ void store_shared_word(SharedAddress to, unsigned value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}
__device__ __forceinline__ unsigned load_shared_word(SharedAddress from) {
  unsigned value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint4 load_shared_words(SharedAddress from) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

// What a line of the L2 cache holds need not be written back to memory, and is no longer defined.
constexpr int kLineBytes = 128;
__device__ __forceinline__ void discard_line(const void* line) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
}

// Keeps uses of a register behind the wait for the product that writes it.
__device__ __forceinline__ void hold(float& value) { asm volatile("" : "+f"(value)::"memory"); }

// Two float32 as bf16, the first in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// An 8x8 matrix of 16-bit values, of which lane l holds row l / 4, columns 2 (l % 4) and the next;
// transposed.
__device__ __forceinline__ uint32_t transpose(uint32_t matrix) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

}  // namespace jax_hpc::fused_moe
