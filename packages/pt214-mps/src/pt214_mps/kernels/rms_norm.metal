// RMSNorm, forward and the input's gradient: one threadgroup per row.
//
//   rstd[m] = rsqrt(sum_n x[m, n]^2 / N + eps)
//   y[m, n] = x[m, n] * rstd[m] * w[n]
//   dx[m, n] = rstd[m] * (w[n] * dy[m, n] - x[m, n] * rstd[m]^2 * sum_k(w[k] * dy[m, k] * x[m, k]) / N)
//
// Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, eq. 4; dx is its derivative.
//
// Launch: threads (M * lanes), group_size (lanes); lanes is a multiple of 32, at most 1024, so that
// every simdgroup is full and the sums of 32 simdgroups fit in one simdgroup's lanes.
// Traffic: x is read twice (the second time from the cache where a row fits there), y written once.

#include <metal_stdlib>
using namespace metal;

constant constexpr uint SIMD = 32;  // Apple GPUs: lanes of a simdgroup
constant constexpr uint MAX_SIMDS = 32;

// Sum of `value` over the threadgroup, the same bits in every thread.
// `partial` is reused between calls: the leading barrier keeps a fast simdgroup from overwriting
// what a slow one still reads.
static float sum_over_group(
    float value, threadgroup float* partial, uint lane, uint simd, uint simds) {
  value = simd_sum(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) {
    partial[simd] = value;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < simds ? partial[lane] : 0.0f);
}

template <typename T>
kernel void rms_norm_forward(
    device T* y,            // [M, N] contiguous
    device float* rstd,     // [M]
    constant T* x,          // [M, N] contiguous
    constant T* w,          // [N]
    constant long& cols,    // N; a Python int is bound as int64
    constant float& eps,
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[MAX_SIMDS];
  const ulong start = ulong(row) * ulong(cols);  // ulong: M * N can pass 2^32
  x += start;
  y += start;

  float squares = 0.0f;
  for (uint i = thread_index; i < uint(cols); i += lanes) {
    const float value = float(x[i]);
    squares += value * value;
  }
  const float total = sum_over_group(squares, partial, lane, simd, lanes / SIMD);
  const float scale = precise::rsqrt(total / float(cols) + eps);

  for (uint i = thread_index; i < uint(cols); i += lanes) {
    y[i] = T(float(x[i]) * scale * float(w[i]));
  }
  if (thread_index == 0) {
    rstd[row] = scale;
  }
}

template <typename T>
kernel void rms_norm_backward(
    device T* dx,             // [M, N] contiguous
    constant T* dy,           // [M, N] contiguous
    constant T* x,            // [M, N] contiguous
    constant T* w,            // [N]
    constant float* rstd,     // [M], from the forward
    constant long& cols,      // N
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[MAX_SIMDS];
  const ulong start = ulong(row) * ulong(cols);
  x += start;
  dy += start;
  dx += start;
  const float scale = rstd[row];

  float dot = 0.0f;
  for (uint i = thread_index; i < uint(cols); i += lanes) {
    dot += float(w[i]) * float(dy[i]) * float(x[i]);
  }
  const float total = sum_over_group(dot, partial, lane, simd, lanes / SIMD);
  const float along = total / float(cols) * scale * scale;

  for (uint i = thread_index; i < uint(cols); i += lanes) {
    dx[i] = T(scale * (float(w[i]) * float(dy[i]) - float(x[i]) * along));
  }
}

#define INSTANTIATE(name, T)                                                         \
  template [[host_name("rms_norm_forward_" #name)]] kernel void rms_norm_forward<T>( \
      device T*, device float*, constant T*, constant T*, constant long&,            \
      constant float&, uint, uint, uint, uint, uint);                                \
  template [[host_name("rms_norm_backward_" #name)]] kernel void rms_norm_backward<T>( \
      device T*, constant T*, constant T*, constant T*, constant float*,             \
      constant long&, uint, uint, uint, uint, uint);

INSTANTIATE(float, float)
INSTANTIATE(half, half)
INSTANTIATE(bfloat, bfloat)
