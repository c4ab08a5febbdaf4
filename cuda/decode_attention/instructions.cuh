// The tensor core's and the copy engine's instructions that decode attention needs.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/ptx.cuh"

namespace jax_hpc::decode_attention {

// Four 8x8 matrices of 16-bit values: lanes 8i to 8i + 7 give the addresses of matrix i's rows.
// Lane l gets, of each, row l / 4, columns 2 (l % 4) and the next.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], SharedAddress address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], SharedAddress address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// An 8x8 matrix of 16-bit values held by a warp as above, transposed.
__device__ __forceinline__ uint32_t transpose(uint32_t matrix) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

// d[16, 8] += a[16, 16] b[16, 8]. Lane l holds of d: rows l / 4 (d[0], d[1]) and l / 4 + 8,
// columns 2 (l % 4) and the next; of a: rows l / 4 (a[0], a[2]) and l / 4 + 8, columns
// 2 (l % 4) and the next (a[0], a[1]) and eight on; of b: rows as a's columns, column l / 4.
__device__ __forceinline__ void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two float32 as a pair of 16-bit values, the first in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Two of four e4m3 values as f16, exactly.
__device__ __forceinline__ void unpack_e4m3(uint32_t four, uint32_t& low, uint32_t& high) {
  asm("{\n"
      ".reg .b16 l, h;\n"
      "mov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n"
      "}\n"
      : "=r"(low), "=r"(high)
      : "r"(four));
}

// Two float32 rounded to e4m3 (saturating), as f16.
__device__ __forceinline__ uint32_t round_to_e4m3(float low, float high) {
  uint32_t pair;
  asm("{\n"
      ".reg .b16 p;\n"
      "cvt.rn.satfinite.e4m3x2.f32 p, %1, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, p;\n"
      "}\n"
      : "=r"(pair)
      : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float power_of_2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Brings a map for the copy engine, whose first copy would wait for it.
__device__ __forceinline__ void prefetch_descriptor(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Keys and values are read once: their lines leave the L2 cache before others do.
constexpr uint64_t kEvictFirst = 0x12f0000000000000;

// A tile of an array of rank 4 by the copy engine.
__device__ __forceinline__ void copy_tile(SharedAddress to, const CUtensorMap* map,
                                          SharedAddress barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(kEvictFirst)
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

// Whether wait() would not wait.
__device__ __forceinline__ bool is_complete(SharedAddress barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// The line that an address is on, into this SM's cache.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address) : "memory");
}

// Four bytes that the thread does not wait for.
__device__ __forceinline__ void copy_4(SharedAddress to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// One of the barrier's arrivals, once this thread's copies so far have landed.
__device__ __forceinline__ void arrive_after_copies(SharedAddress barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// The same value, of which the compiler no longer knows whence it came: it stays in a register
// instead of being read from a special one, 20 cycles and more, at every use.
__device__ __forceinline__ int keep(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// All threads of the CTA, each warp where it stands in its own code: bar.sync promises that all are
// at one instruction. The code is the same, but synccheck goes by it.
__device__ __forceinline__ void start_barrier(int threads) {
  __syncwarp();
  asm volatile("barrier.sync 2, %0;" ::"r"(threads) : "memory");
}

// A barrier among the consumer warps only.
__device__ __forceinline__ void consumer_barrier(int threads) {
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

}  // namespace jax_hpc::decode_attention
