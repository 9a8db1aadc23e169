// Reads rows, cols, lanes, the first row's number, eps and the inputs from stdin; writes y, rstd, dx
// to stdout. DATA is a macro of the build: float, half or bfloat.
#include <sys/mman.h>
#include <unistd.h>

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

// An array of which only elements from `first` on can be touched: a wrong offset is a fault. The span
// before costs address space and no memory, so that offsets past 2^32 can be tried.
template <typename V>
static V* far_array(size_t first, size_t count) {
  const size_t size = (first + count) * sizeof(V), page = sysconf(_SC_PAGESIZE);
  void* base = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  const size_t edge = first * sizeof(V) / page * page;
  if (base == MAP_FAILED) _Exit(4);
  if (mprotect(static_cast<char*>(base) + edge, size - edge, PROT_READ | PROT_WRITE)) _Exit(5);
  return static_cast<V*>(base);
}

template <typename V>
static V* take_far(size_t first, size_t count) {
  const auto values = take<V>(count);
  V* array = far_array<V>(first, count);
  std::copy(values.begin(), values.end(), array + first);
  return array;
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
  const auto sizes = take<long>(4);
  const float eps = take<float>(1)[0];
  const uint rows = sizes[0], lanes = sizes[2], first = sizes[3];
  const long cols = sizes[1];
  const size_t start = size_t(first) * cols, count = size_t(rows) * cols;
  const DATA* x = take_far<DATA>(start, count);
  const auto w = take<DATA>(cols);
  const DATA* dy = take_far<DATA>(start, count);
  DATA* y = far_array<DATA>(start, count);
  DATA* dx = far_array<DATA>(start, count);
  float* rstd = far_array<float>(first, rows);
  for (uint row = first; row < first + rows; row++) {
    run_group(lanes, [&](uint t) {
      rms_norm_forward<DATA>(y, rstd, x, w.data(), cols, eps, row, t, lanes, t % 32, t / 32);
    });
    run_group(lanes, [&](uint t) {
      rms_norm_backward<DATA>(dx, dy, x, w.data(), rstd, cols, row, t, lanes, t % 32, t / 32);
    });
  }
  fwrite(y + start, sizeof(DATA), count, stdout);
  fwrite(rstd + first, sizeof(float), rows, stdout);
  fwrite(dx + start, sizeof(DATA), count, stdout);
}
