// Instructions of the wide products: the weights' copies, and results on their way through shared
// memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/ptx.cuh"
#include "fused_moe/config.h"

namespace jax_hpc::fused_moe {

// Of five dimensions, with a policy of the L2 cache.
__device__ __forceinline__ void copy_wide_weights(SharedAddress to, const CUtensorMap* map,
                                                  SharedAddress barrier, int x, int group,
                                                  int expert, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(0), "r"(group), "r"(expert), "l"(policy)
      : "memory");
}

// Turns over the bytes of four lanes that lie 4 apart, of which this one is `lane`: byte i of lane
// q becomes byte q of lane i.
__device__ __forceinline__ uint32_t turn_over_bytes(uint32_t own, int lane) {
  const uint32_t pairs =
      __byte_perm(own, __shfl_xor_sync(kWholeWarp, own, 4), lane % 2 == 0 ? 0x6240 : 0x3715);
  return __byte_perm(pairs, __shfl_xor_sync(kWholeWarp, pairs, 8), lane < 2 ? 0x5410 : 0x3276);
}

__device__ __forceinline__ void store_shared_half(SharedAddress to, uint32_t value) {
  asm volatile(
      "{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nst.shared.b16 [%0], low;\n}\n" ::"r"(to),
      "r"(value)
      : "memory");
}
__device__ __forceinline__ void store_shared_pair(SharedAddress to, float2 value) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(value.x), "f"(value.y) : "memory");
}
__device__ __forceinline__ void store_shared_float(SharedAddress to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

// Stores four 8x8 matrices of 16-bit values, of which lane l holds, a word each, row l / 4, columns
// 2 (l % 4) and the next: column i of matrix m, 16 bytes, goes where lane 8 m + i says.
__device__ __forceinline__ void store_transposed(SharedAddress to, uint4 matrices) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(matrices.x), "r"(matrices.y), "r"(matrices.z), "r"(matrices.w)
               : "memory");
}

// The same as they are: row i of matrix m goes where lane 8 m + i says.
__device__ __forceinline__ void store_matrices(SharedAddress to, uint4 matrices) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(matrices.x), "r"(matrices.y), "r"(matrices.z), "r"(matrices.w)
               : "memory");
}

}  // namespace jax_hpc::fused_moe
