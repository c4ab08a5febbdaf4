// Hopper's synchronisation, copy and cluster instructions behind readable names.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace jax_hpc {

// A place in shared memory. Most functions here take one rather than a pointer, so that a kernel
// can keep it in a register: from a pointer the compiler computes it again at every use.
using SharedAddress = uint32_t;

__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

// True in one lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t chosen;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(chosen));
  return chosen != 0;
}

// Registers of this warpgroup: the producer gives its share to the consumers.
template <int Count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

// Waits for Count threads of this CTA at one of its barriers 1 to 15; 0 is __syncthreads.
template <int Count>
__device__ __forceinline__ void sync_threads(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(Count) : "memory");
}

// Programmatic dependent launch (LaunchShape::overlaps_previous). A kernel launched so waits before
// it touches any buffer that an earlier kernel may use, on every path.

__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// The next kernel may start once every CTA of this one has said so or ended.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ float4 load_shared(SharedAddress from) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

// Barriers in shared memory (mbarrier).

__device__ __forceinline__ void init_barrier(SharedAddress barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the cluster.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_expecting(SharedAddress barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void wait(SharedAddress barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Copies of 16 bytes from global to shared memory that a thread does not wait for.

// Zeros are written where `valid` is false; `from` must be an address of the array all the same.
__device__ __forceinline__ void copy_16(SharedAddress to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until at most Pending groups of this thread's copies are under way.
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Tiles from global to shared memory by the copy engine; bytes count on the barrier.

__device__ __forceinline__ void copy_tile(SharedAddress to, const CUtensorMap* map,
                                          SharedAddress barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

__device__ __forceinline__ void copy_tile(SharedAddress to, const CUtensorMap* map,
                                          SharedAddress barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Order of warpgroup products (wgmma).

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Descriptor of a K-major tile of 128-byte rows in the copy engine's 128-byte swizzle: groups of
// eight rows lie 1024 bytes apart, and the tile starts at a multiple of 1024. Its lower half holds
// the place, in units of 16 bytes: tiles and columns beside this one are an addition away.
__device__ __forceinline__ uint32_t swizzled_tile(SharedAddress tile) {
  return (uint32_t{1} << 16) | ((tile & 0x3ffff) >> 4);
}
__device__ __forceinline__ uint64_t descriptor(uint32_t swizzled_tile) {
  constexpr uint64_t kGroupBytes = 1024 >> 4;
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | (kGroupBytes << 32) | swizzled_tile;
}

// Clusters: CTAs that run together and reach each other's shared memory.

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Orders nothing: a releasing arrival waits for the memory system, 0.4 us on an H200 even at the
// start of a kernel. What a barrier of a cluster has to publish, initialised mbarriers, has a
// fence.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same place in the shared memory of another CTA of the cluster.
__device__ __forceinline__ SharedAddress address_in_cluster(SharedAddress address, uint32_t rank) {
  SharedAddress there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Stores whose bytes count on an mbarrier of the CTA that they go to; both addresses are of
// address_in_cluster.
__device__ __forceinline__ void send(SharedAddress to, float2 value, SharedAddress barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
          "r"(to),
      "f"(value.x), "f"(value.y), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void send(SharedAddress to, float4 value, SharedAddress barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
      "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}

// As `wait`, for what other CTAs of the cluster have sent.
__device__ __forceinline__ void wait_for_cluster(SharedAddress barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace jax_hpc
