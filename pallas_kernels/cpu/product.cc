// x [rows, in] times weight [out, in], the weight as it lies in memory; read once, and fetched
// while what comes before it is multiplied. In two ways:
//
//   few rows   lanes run along `in`: nothing is moved, but each output's lanes have to be summed
//   more rows  a panel of the weight is turned first, so that lanes are outputs
//
// Each output is summed in an order that depends on `in` and the way alone: rows do not change one
// another's bits.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tiles.h"
#include "vectors.h"
#include "workers.h"

namespace pagedjax {
namespace {

namespace ffi = xla::ffi;

constexpr int kOuts = 4;       // outputs of a panel: as many as `sum_lanes` takes
constexpr int kMaxRows = 6;    // of a tile: 24 sums, 4 weights and a row are 29 registers of 32
constexpr int kAhead = 2;      // panels between what is multiplied and what is fetched
constexpr int kMinPanels = 2;  // of a share: fewer are not worth a thread's while
constexpr int kSharesPerThread = 4;
constexpr int kManyRows = 40;        // from here on turning pays
constexpr int kTurned = 2 * kLanes;  // outputs of a turned panel
constexpr int kChunk = 48;           // rows whose sums stay in the nearest cache

template <typename T>
struct Matrix {
  T* data;
  int64_t rows, columns;
  T* row(int64_t i) const { return data + i * columns; }
};

// What a tile fetches while it multiplies: lines of memory from `next` on, `each` a step.
struct Fetch {
  const char* next;
  int each;
};

// One tile: kRows rows of x by the kOuts outputs of a panel, of which `outs` exist.
template <int kRows, typename In, typename Out>
void multiply_tile(Matrix<const In> x, Matrix<const In> weight, Matrix<Out> out, int64_t row,
                   int64_t first, int outs, Fetch fetch) {
  using Pack = Packed<In>;
  const int64_t length = x.columns, whole = length / Pack::kCount * Pack::kCount;
  const In* rows[kRows];
  const In* panel[kOuts];
  for (int i = 0; i < kRows; ++i) rows[i] = x.row(row + i);
  for (int j = 0; j < kOuts; ++j) panel[j] = weight.row(first + std::min(j, outs - 1));

  Floats sums[kRows][kOuts] = {};
  for (int64_t k = 0; k < whole; k += Pack::kCount) {
    typename Pack::Vector weights[kOuts];
    for (int j = 0; j < kOuts; ++j) {
      weights[j] = load<typename Pack::Vector>(panel[j] + k);
      if (j < fetch.each) __builtin_prefetch(fetch.next + j * kVectorBytes);
    }
    fetch.next += fetch.each * kVectorBytes;
    for (int i = 0; i < kRows; ++i) {
      const auto values = load<typename Pack::Vector>(rows[i] + k);
      for (int j = 0; j < kOuts; ++j)
        sums[i][j] = Pack::add_product(sums[i][j], values, weights[j]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < kRows; ++i) {
    Quad totals = sum_lanes(sums[i]);
    for (int64_t k = whole; k < length; ++k)
      for (int j = 0; j < kOuts; ++j) totals[j] += widen(rows[i][k]) * widen(panel[j][k]);
    store(out.row(row + i) + first, totals, outs);
  }
}

// All rows by one panel. Tiles are of nearly equal height: a low last one would waste loads.
template <typename In, typename Out>
void multiply_panel(Matrix<const In> x, Matrix<const In> weight, Matrix<Out> out, int64_t first) {
  const int outs = static_cast<int>(std::min<int64_t>(kOuts, weight.rows - first));
  const int64_t tiles = (x.rows + kMaxRows - 1) / kMaxRows;
  // Evenly over the tiles: a core waits for so many lines at once, and no more.
  const int64_t panel_bytes = kOuts * weight.columns * static_cast<int64_t>(sizeof(In));
  const bool has_next = first + (kAhead + 1) * kOuts <= weight.rows;
  const char* ahead = reinterpret_cast<const char*>(weight.row(first)) + kAhead * panel_bytes;
  const int each = has_next ? static_cast<int>((kOuts + tiles - 1) / tiles) : 0;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t row = x.rows * tile / tiles, end = x.rows * (tile + 1) / tiles;
    const int64_t skipped = tile * each * panel_bytes / kOuts;
    const Fetch fetch{ahead + skipped, skipped < panel_bytes ? each : 0};
    switch (end - row) {
      case 1:
        multiply_tile<1>(x, weight, out, row, first, outs, fetch);
        break;
      case 2:
        multiply_tile<2>(x, weight, out, row, first, outs, fetch);
        break;
      case 3:
        multiply_tile<3>(x, weight, out, row, first, outs, fetch);
        break;
      case 4:
        multiply_tile<4>(x, weight, out, row, first, outs, fetch);
        break;
      case 5:
        multiply_tile<5>(x, weight, out, row, first, outs, fetch);
        break;
      default:
        multiply_tile<6>(x, weight, out, row, first, outs, fetch);
        break;
    }
  }
}

// Some rows by a panel that was turned, `row` on: sums [count, kTurned].
template <typename In>
void multiply_chunk(Matrix<const In> x, const std::vector<uint32_t>& panel, int64_t row,
                    int64_t count, float* sums, Stream& ahead) {
  const int64_t words = x.columns * static_cast<int64_t>(sizeof(In)) / 4;
  const auto values = reinterpret_cast<const uint32_t*>(x.row(row));
  multiply<In>(values, words, count, panel.data(), kTurned, words, sums, kTurned, false, ahead);
}

// The weight's rows [first, first + count) and [second, ...), turned; and what is to be fetched
// then.
template <typename In>
Stream turn_panel(Matrix<const In> weight, int64_t first, int64_t second, int64_t count,
                  std::vector<uint32_t>& panel) {
  const int64_t words = weight.columns * static_cast<int64_t>(sizeof(In)) / 4;
  const int64_t outs = std::min(count, weight.rows - first);
  const uint32_t* rows[kTurned];
  for (int64_t i = 0; i < count; ++i) {
    rows[i] = reinterpret_cast<const uint32_t*>(weight.row(first + std::min(i, outs - 1)));
    if (second) rows[count + i] = reinterpret_cast<const uint32_t*>(weight.row(second + i));
  }
  panel.resize(words * kTurned);
  turn(rows, kTurned, words, panel.data(), kTurned, [] {});

  Stream ahead;
  const int64_t next = std::min(weight.rows, first + count),
                after = std::min(weight.rows, next + count);
  ahead.next = reinterpret_cast<const char*>(weight.row(next));
  ahead.end = reinterpret_cast<const char*>(weight.row(after));
  if (second && second + 2 * count <= weight.rows) {
    ahead.then = reinterpret_cast<const char*>(weight.row(second + count));
    ahead.bytes = count * weight.columns * static_cast<int64_t>(sizeof(In));
  }
  return ahead;
}

// All rows by a panel that is turned first.
template <typename In, typename Out>
void multiply_turned(Matrix<const In> x, Matrix<const In> weight, Matrix<Out> out, int64_t first) {
  static thread_local std::vector<uint32_t> panel;
  Stream ahead = turn_panel(weight, first, 0, kTurned, panel);
  const int64_t outs = std::min<int64_t>(kTurned, weight.rows - first);
  float sums[kChunk * kTurned];
  for (int64_t row = 0; row < x.rows; row += kChunk) {
    const int64_t count = std::min<int64_t>(kChunk, x.rows - row);
    multiply_chunk(x, panel, row, count, sums, ahead);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < outs; j += 4) {
        const int left = static_cast<int>(std::min<int64_t>(4, outs - j));
        store(out.row(row + i) + first + j, load<Quad>(sums + i * kTurned + j), left);
      }
  }
}

// silu(gate) * up of sums [count, gates and ups], to columns `first` on of rows `row` on.
template <typename Out>
void gate(const float* sums, Matrix<Out> out, int64_t row, int64_t count, int64_t first) {
  for (int64_t i = 0; i < count; ++i) {
    const Floats gates = load<Floats>(sums + i * kTurned),
                 ups = load<Floats>(sums + i * kTurned + kLanes);
    const Floats zero{};
    const Floats power = exp_of_negative(gates < zero ? gates : -gates);
    const Floats sigmoid = (gates < zero ? power : zero + 1.0f) / (1.0f + power);
    store_lanes(out.row(row + i) + first, gates * sigmoid * ups);
  }
}

// kLanes outputs of the gated product: weight rows from `first`, and as many from the second half.
template <typename In>
void multiply_gated(Matrix<const In> x, Matrix<const In> weight, Matrix<In> out, int64_t first,
                    bool turns) {
  static thread_local std::vector<uint32_t> panel;
  const int64_t second = weight.rows / 2 + first;
  float sums[kChunk * kTurned];
  if (turns) {
    Stream ahead = turn_panel(weight, first, second, kLanes, panel);
    for (int64_t row = 0; row < x.rows; row += kChunk) {
      const int64_t count = std::min<int64_t>(kChunk, x.rows - row);
      multiply_chunk(x, panel, row, count, sums, ahead);
      gate(sums, out, row, count, first);
    }
    return;
  }
  for (int64_t j = 0; j < kLanes; j += kOuts) {
    multiply_panel(x, weight, Matrix<float>{sums - first, x.rows, kTurned}, first + j);
    multiply_panel(x, weight, Matrix<float>{sums + kLanes - second, x.rows, kTurned}, second + j);
  }
  gate(sums, out, 0, x.rows, first);
}

// Turned panels hold whole words of 32 bits.
template <typename In>
bool pays_to_turn(Matrix<const In> x) {
  return x.rows >= kManyRows && x.columns * sizeof(In) % 4 == 0;
}

// body(panel) for each of so many panels, shared out.
template <typename Body>
void for_panels(ffi::ThreadPool& pool, int64_t panels, int64_t least, const Body& body) {
  const int64_t most = std::max<int64_t>(1, panels / least);
  const int64_t shares =
      std::min(most, std::max<int64_t>(1, pool.num_threads()) * kSharesPerThread);
  share_out(pool, shares, [&](int64_t share) {
    const int64_t end = panels * (share + 1) / shares;
    for (int64_t panel = panels * share / shares; panel < end; ++panel) body(panel);
  });
}

template <typename In, typename Out>
void multiply_all(ffi::ThreadPool& pool, Matrix<const In> x, Matrix<const In> weight,
                  Matrix<Out> out) {
  if (x.rows == 0) return;
  const bool turns = pays_to_turn(x);
  const int64_t height = turns ? kTurned : kOuts;
  const int64_t panels = (weight.rows + height - 1) / height;
  for_panels(pool, panels, turns ? 1 : kMinPanels, [&](int64_t panel) {
    if (turns)
      multiply_turned(x, weight, out, panel * height);
    else
      multiply_panel(x, weight, out, panel * height);
  });
}

template <typename In>
ffi::Error gated_of(ffi::ThreadPool& pool, ffi::AnyBuffer& x, ffi::AnyBuffer& weight,
                    ffi::Result<ffi::AnyBuffer>& out) {
  const auto a = x.dimensions(), b = weight.dimensions(), c = out->dimensions();
  const Matrix<const In> left{static_cast<const In*>(x.untyped_data()), a[0], a[1]};
  const Matrix<const In> right{static_cast<const In*>(weight.untyped_data()), b[0], b[1]};
  const Matrix<In> result{static_cast<In*>(out->untyped_data()), c[0], c[1]};
  if (left.rows == 0) return ffi::Error::Success();
  const bool turns = pays_to_turn(left);
  for_panels(pool, result.columns / kLanes, 1,
             [&](int64_t panel) { multiply_gated(left, right, result, panel * kLanes, turns); });
  return ffi::Error::Success();
}

ffi::Error gated_product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                         ffi::Result<ffi::AnyBuffer> out) {
  const auto a = x.dimensions(), b = weight.dimensions(), c = out->dimensions();
  const auto dtype = x.element_type();
  if (a.size() != 2 || b.size() != 2 || c.size() != 2 || a[1] != b[1] || a[0] != c[0] ||
      b[0] != 2 * c[1] || c[1] % kLanes)
    return ffi::Error::InvalidArgument(
        "gated_product: x [rows, in], weight [2 out, in], out [rows, out]");
  if (weight.element_type() != dtype || out->element_type() != dtype)
    return ffi::Error::InvalidArgument("gated_product: dtypes do not agree");
  if (dtype == ffi::DataType::F32) return gated_of<float>(pool, x, weight, out);
  if (dtype == ffi::DataType::BF16) return gated_of<BFloat16>(pool, x, weight, out);
  return ffi::Error::InvalidArgument("gated_product: neither float32 nor bfloat16");
}

template <typename In>
ffi::Error product_of(ffi::ThreadPool& pool, ffi::AnyBuffer& x, ffi::AnyBuffer& weight,
                      ffi::Result<ffi::AnyBuffer>& out) {
  const auto a = x.dimensions(), b = weight.dimensions(), c = out->dimensions();
  const Matrix<const In> left{static_cast<const In*>(x.untyped_data()), a[0], a[1]};
  const Matrix<const In> right{static_cast<const In*>(weight.untyped_data()), b[0], b[1]};
  if (out->element_type() == ffi::DataType::F32) {
    multiply_all(pool, left, right,
                 Matrix<float>{static_cast<float*>(out->untyped_data()), c[0], c[1]});
  } else {
    multiply_all(pool, left, right, Matrix<In>{static_cast<In*>(out->untyped_data()), c[0], c[1]});
  }
  return ffi::Error::Success();
}

ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                   ffi::Result<ffi::AnyBuffer> out) {
  const auto a = x.dimensions(), b = weight.dimensions(), c = out->dimensions();
  if (a.size() != 2 || b.size() != 2 || c.size() != 2 || a[1] != b[1] || a[0] != c[0] ||
      b[0] != c[1])
    return ffi::Error::InvalidArgument("product: x [rows, in], weight [out, in], out [rows, out]");
  const auto dtype = x.element_type();
  if (weight.element_type() != dtype ||
      (out->element_type() != dtype && out->element_type() != ffi::DataType::F32))
    return ffi::Error::InvalidArgument("product: dtypes do not agree");
  if (dtype == ffi::DataType::F32) return product_of<float>(pool, x, weight, out);
  if (dtype == ffi::DataType::BF16) return product_of<BFloat16>(pool, x, weight, out);
  return ffi::Error::InvalidArgument("product: neither float32 nor bfloat16");
}

}  // namespace
}  // namespace pagedjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_gated_product, pagedjax::gated_product,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_product, pagedjax::product,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
