#include "decode_attention/launch.h"

#include <algorithm>
#include <bit>

#include "common/launch.h"
#include "decode_attention/cache_types.cuh"
#include "decode_attention/combine.cuh"
#include "decode_attention/page_map.h"

namespace jax_hpc::decode_attention {

template <class Cache>
cudaError_t launch_attention(const Arguments&, const LaunchShape&, const CUtensorMap&,
                             const CUtensorMap&, cudaStream_t);
extern template cudaError_t launch_attention<Bf16Cache>(const Arguments&, const LaunchShape&,
                                                        const CUtensorMap&, const CUtensorMap&,
                                                        cudaStream_t);
extern template cudaError_t launch_attention<Fp8Cache>(const Arguments&, const LaunchShape&,
                                                       const CUtensorMap&, const CUtensorMap&,
                                                       cudaStream_t);

namespace {

constexpr int64_t kMostPieces = 1 << 30;  // so that a walk over them fits int

bool is_supported(const Problem& p, const Cut& cut) {
  const bool size =
      p.page_size == 16 || p.page_size == 32 || p.page_size == 64 || p.page_size == 128;
  return size && (p.head_dim == 64 || p.head_dim == 128) && p.rows() <= kMostRows && p.q_len >= 1 &&
         p.q_len <= 8 && (p.fp8_cache || !p.fp8_query) && (cut.splits > 0 || cut.num_ctas > 0) &&
         int64_t{p.batch} * p.kv_heads * std::max(cut.splits, 1) <= kMostPieces;
}

Arguments gather(const Problem& p, const Cut& cut, const Config& config, const Buffers& b) {
  return {.problem = p,
          .cut = cut,
          .by_heads = Divisor::of(p.kv_heads),
          .by_group = Divisor::of(p.group),
          .by_rows = Divisor::of(p.rows()),
          .by_splits = Divisor::of(std::max(cut.splits, 1)),
          .cap_unit = p.cap > 0 ? 2 * kLog2E / p.cap : 0,
          .column_tiles = config.column_tiles,
          .row_groups = config.row_groups,
          .team_warps = config.team_warps,
          .slots = config.slots,
          .long_slots = config.long_slots,
          .page_bits = std::countr_zero(static_cast<unsigned>(p.page_size)),
          .q = b.q,
          .page_table = b.page_table,
          .kv_lens = b.kv_lens,
          .span_pair = b.span_pair,
          .span_tile = b.span_tile,
          .merge_last = b.merge_last,
          .q_scale = b.q_scale,
          .k_scale = b.k_scale,
          .v_scale = b.v_scale,
          .sinks = b.sinks,
          .out = static_cast<__nv_bfloat16*>(b.out),
          .lse = b.lse,
          .partial_out = b.partial_out,
          .partial_state = reinterpret_cast<float2*>(b.partial_state)};
}

cudaError_t count_sms(int* num_sms) {
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  return cudaDeviceGetAttribute(num_sms, cudaDevAttrMultiProcessorCount, device);
}

// CTAs of pieces of `splits`: what fits on the device at once, or fewer.
int count_ctas(const Problem& p, const Cut& cut, int num_sms) {
  const int64_t pieces = int64_t{p.batch} * p.kv_heads * std::max(cut.splits, 1);
  return static_cast<int>(std::min<int64_t>(pieces, num_sms));
}

template <bool kBySchedule>
auto merge_of(int head_dim) {
  return head_dim == 64 ? combine_kernel<64, kBySchedule> : combine_kernel<128, kBySchedule>;
}

// One CTA an SM: there is room for no more while the attention runs, and those that come later
// would begin at its end.
cudaError_t launch_combine(const Arguments& a, int num_sms, bool overlaps, cudaStream_t stream) {
  const int64_t cuts =
      a.cut.splits > 0 ? int64_t{a.problem.batch} * a.problem.kv_heads : int64_t{a.cut.num_ctas};
  const int64_t ctas = (cuts * a.problem.rows() + kCombineWarps - 1) / kCombineWarps;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(std::min<int64_t>(ctas, num_sms))),
                          .threads = kCombineThreads,
                          .overlaps_previous = overlaps};
  const auto kernel =
      a.cut.splits > 0 ? merge_of<false>(a.problem.head_dim) : merge_of<true>(a.problem.head_dim);
  // It starts on SMs whose shared memory the attention still holds.
  const cudaError_t status = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                  cudaFuncAttributePreferredSharedMemoryCarveout,
                                                  cudaSharedmemCarveoutMaxShared);
  if (status != cudaSuccess) return status;
  return jax_hpc::launch(kernel, shape, stream, a);
}

}  // namespace

cudaError_t launch(const Problem& problem, const Config& config, const Cut& cut,
                   const Buffers& buffers, const Order& order, cudaStream_t stream) {
  if (!is_supported(problem, cut)) return cudaErrorInvalidValue;
  CUtensorMap k_map;
  CUtensorMap v_map;
  cudaError_t status = make_page_map(problem, buffers.k_pages, &k_map);
  if (status == cudaSuccess) status = make_page_map(problem, buffers.v_pages, &v_map);
  int num_sms = 0;
  if (status == cudaSuccess) status = count_sms(&num_sms);
  if (status != cudaSuccess) return status;
  const int ctas = cut.splits > 0 ? count_ctas(problem, cut, num_sms) : cut.num_ctas;
  const Arguments arguments = gather(problem, cut, config, buffers);
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(ctas)),
                          .threads = kThreads,
                          .shared_bytes = config.shared_bytes,
                          .overlaps_previous = order.after_schedule && order.overlaps};
  status = problem.fp8_cache ? launch_attention<Fp8Cache>(arguments, shape, k_map, v_map, stream)
                             : launch_attention<Bf16Cache>(arguments, shape, k_map, v_map, stream);
  if (status != cudaSuccess || !may_cut(problem, cut)) return status;
  return launch_combine(arguments, num_sms, order.overlaps, stream);
}

}  // namespace jax_hpc::decode_attention
