// Reads rows, cols, lanes, eps and the inputs from stdin; writes y, rstd, dx to stdout.
// DATA is a macro of the build: float, half or bfloat.
#include <cstdio>

#include "rms_norm.metal"

Group group;
thread_local uint this_thread;

template <typename V>
static std::vector<V> take(size_t count) {
  std::vector<V> values(count);
  if (fread(values.data(), sizeof(V), count, stdin) != count) _Exit(3);
  return values;
}

template <typename F>
static void run_group(uint lanes, F body) {
  group.all = std::make_unique<std::barrier<>>(lanes);
  group.simds.clear();
  for (uint i = 0; i < lanes / 32; i++) group.simds.push_back(std::make_unique<std::barrier<>>(32));
  group.lanes.assign(lanes, 0.0f);
  std::vector<std::thread> threads;
  for (uint t = 0; t < lanes; t++) threads.emplace_back([=] { this_thread = t; body(t); });
  for (auto& thread : threads) thread.join();
}

int main() {
  const auto sizes = take<long>(3);
  const float eps = take<float>(1)[0];
  const uint rows = sizes[0], lanes = sizes[2];
  const long cols = sizes[1];
  const auto x = take<DATA>(rows * cols), w = take<DATA>(cols), dy = take<DATA>(rows * cols);
  std::vector<DATA> y(rows * cols), dx(rows * cols);
  std::vector<float> rstd(rows);
  for (uint row = 0; row < rows; row++) {
    run_group(lanes, [&](uint t) {
      rms_norm_forward<DATA>(y.data(), rstd.data(), x.data(), w.data(), cols, eps, row, t, lanes, t % 32, t / 32);
    });
    run_group(lanes, [&](uint t) {
      rms_norm_backward<DATA>(dx.data(), dy.data(), x.data(), w.data(), rstd.data(), cols, row, t, lanes, t % 32, t / 32);
    });
  }
  fwrite(y.data(), sizeof(DATA), y.size(), stdout);
  fwrite(rstd.data(), sizeof(float), rstd.size(), stdout);
  fwrite(dx.data(), sizeof(DATA), dx.size(), stdout);
}
