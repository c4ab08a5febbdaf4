#include "prefill_attention/launch.h"

#include <algorithm>
#include <bit>

#include "common/launch.h"
#include "prefill_attention/arguments.cuh"
#include "prefill_attention/cache_types.cuh"
#include "prefill_attention/page_map.h"
#include "prefill_attention/plan.cuh"

namespace jax_hpc::prefill_attention {

template <class Cache>
cudaError_t launch_attention(const Arguments&, int, bool, const Maps&, cudaStream_t);
extern template cudaError_t launch_attention<Bf16Cache>(const Arguments&, int, bool, const Maps&,
                                                        cudaStream_t);
extern template cudaError_t launch_attention<Fp8Cache>(const Arguments&, int, bool, const Maps&,
                                                       cudaStream_t);

namespace {

bool is_supported(const Problem& p) {
  const bool size =
      p.page_size == 16 || p.page_size == 32 || p.page_size == 64 || p.page_size == 128;
  return size && (p.head_dim == 64 || p.head_dim == 128) && p.group <= kMostGroup && p.scale > 0 &&
         (p.fp8_cache || !p.fp8_query);
}

cudaError_t launch_plan(const Problem& p, int ctas, const Buffers& b, cudaStream_t stream) {
  const PlanArguments a{.problem = p,
                        .ctas = ctas,
                        .capacity = static_cast<int>(most_row_tiles(p.tokens, p.batch, p.group)),
                        .q_starts = b.q_starts,
                        .q_lens = b.q_lens,
                        .kv_lens = b.kv_lens,
                        .plan = b.plan,
                        .out = static_cast<__nv_bfloat16*>(b.out),
                        .lse = b.lse};
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(1 + ceil_div(p.tokens, kFillRows))),
                          .threads = kPlanThreads};
  return jax_hpc::launch(prefill_plan_kernel, shape, stream, a);
}

cudaError_t count_sms(int* sms) {
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  return cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace

cudaError_t launch(const Problem& problem, const Buffers& buffers, bool overlaps,
                   cudaStream_t stream) {
  if (!is_supported(problem)) return cudaErrorInvalidValue;
  Maps maps{};
  int sms = 0;
  cudaError_t status = make_page_map(problem, buffers.k_pages, &maps.k);
  if (status == cudaSuccess) status = make_page_map(problem, buffers.v_pages, &maps.v);
  if (status == cudaSuccess && is_query_box(problem)) {
    status = make_query_map(problem, buffers.q, &maps.q);
  }
  if (status == cudaSuccess) status = count_sms(&sms);
  if (status == cudaSuccess) status = launch_plan(problem, sms, buffers, stream);
  if (status != cudaSuccess) return status;
  const Arguments a{.problem = problem,
                    .group_reciprocal = group_reciprocal(problem.group),
                    .page_bits = std::countr_zero(static_cast<unsigned>(problem.page_size)),
                    .query_boxes = is_query_box(problem),
                    .q = buffers.q,
                    .page_table = buffers.page_table,
                    .plan = buffers.plan,
                    .sinks = buffers.sinks,
                    .q_scale = buffers.q_scale,
                    .k_scale = buffers.k_scale,
                    .v_scale = buffers.v_scale,
                    .out = static_cast<__nv_bfloat16*>(buffers.out),
                    .lse = buffers.lse};
  return problem.fp8_cache ? launch_attention<Fp8Cache>(a, sms, overlaps, maps, stream)
                           : launch_attention<Bf16Cache>(a, sms, overlaps, maps, stream);
}

}  // namespace jax_hpc::prefill_attention
