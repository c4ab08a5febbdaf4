#include "decode_schedule/launch.h"

#include "common/launch.h"
#include "decode_schedule/kernel.cuh"

namespace jax_hpc::decode_schedule {

cudaError_t launch(const Problem& problem, const int* kv_lens, int* span_pair, int* span_tile,
                   int* merge_last, cudaStream_t stream) {
  if (problem.num_ctas < 1 || problem.num_ctas > kMaxCtas) return cudaErrorInvalidValue;
  const LaunchShape shape{.grid = dim3(1), .threads = kThreads};
  return jax_hpc::launch(schedule_kernel, shape, stream, problem, kv_lens, span_pair, span_tile,
                         merge_last);
}

}  // namespace jax_hpc::decode_schedule
