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
#include <cstring>
#include <optional>
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

// `multiply_tile` with as many rows as `height` says, at most kRows.
template <int kRows, typename... Arguments>
void multiply_tile_of(int64_t height, const Arguments&... arguments) {
  if (height == kRows) {
    multiply_tile<kRows>(arguments...);
  } else if constexpr (kRows > 1) {
    multiply_tile_of<kRows - 1>(height, arguments...);
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
    multiply_tile_of<kMaxRows>(end - row, x, weight, out, row, first, outs, fetch);
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
  for (int64_t row = 0; row < x.rows; row += kChunk) {
    const Matrix<const In> chunk{x.row(row), std::min<int64_t>(kChunk, x.rows - row), x.columns};
    for (int64_t j = 0; j < kLanes; j += kOuts) {
      multiply_panel(chunk, weight, Matrix<float>{sums - first, chunk.rows, kTurned}, first + j);
      multiply_panel(chunk, weight, Matrix<float>{sums + kLanes - second, chunk.rows, kTurned},
                     second + j);
    }
    gate(sums, out, row, chunk.rows, first);
  }
}

// body(panel) for each of so many panels, shared out.
template <typename Body>
void for_panels(ffi::ThreadPool& pool, int64_t panels, int64_t least, const Body& body) {
  const int64_t most = std::max<int64_t>(1, panels / least);
  const int64_t shares = num_shares(pool, most, kSharesPerThread);
  share_out(pool, shares, [&](int64_t share) {
    const int64_t end = panels * (share + 1) / shares;
    for (int64_t panel = panels * share / shares; panel < end; ++panel) body(panel);
  });
}

// What is multiplied.
template <typename In>
struct Sides {
  Matrix<const In> x, weight;  // x: its live rows alone
  bool turns;                  // panels of the weight

  Sides(const ffi::AnyBuffer& left, const ffi::AnyBuffer& right, int64_t live)
      : x{static_cast<const In*>(left.untyped_data()), live, left.dimensions()[1]},
        weight{static_cast<const In*>(right.untyped_data()), right.dimensions()[0],
               right.dimensions()[1]},
        // By the rows that there is room for: how many of them are live must not change bits.
        // Turned panels hold whole words of 32 bits.
        turns(left.dimensions()[0] >= kManyRows && x.columns * sizeof(In) % 4 == 0) {}
};

// The result, its rows that are not live zeroed.
template <typename Out>
Matrix<Out> result_of(const ffi::Result<ffi::AnyBuffer>& buffer, int64_t live) {
  const auto shape = buffer->dimensions();
  const Matrix<Out> out{static_cast<Out*>(buffer->untyped_data()), shape[0], shape[1]};
  std::memset(static_cast<void*>(out.row(live)), 0, (out.rows - live) * out.columns * sizeof(Out));
  return out;
}

template <typename In, typename Out>
ffi::Error multiply_all(ffi::ThreadPool& pool, const Sides<In>& sides, Matrix<Out> out) {
  const int64_t height = sides.turns ? kTurned : kOuts;
  const int64_t panels = (sides.weight.rows + height - 1) / height;
  if (sides.x.rows > 0)
    for_panels(pool, panels, sides.turns ? 1 : kMinPanels, [&](int64_t panel) {
      if (sides.turns)
        multiply_turned(sides.x, sides.weight, out, panel * height);
      else
        multiply_panel(sides.x, sides.weight, out, panel * height);
    });
  return ffi::Error::Success();
}

template <typename In>
ffi::Error gate_all(ffi::ThreadPool& pool, const Sides<In>& sides, Matrix<In> out) {
  if (sides.x.rows > 0)
    for_panels(pool, out.columns / kLanes, 1, [&](int64_t panel) {
      multiply_gated(sides.x, sides.weight, out, panel * kLanes, sides.turns);
    });
  return ffi::Error::Success();
}

// Nothing, when the arguments of a product with `per_out` weight rows for each output are sound.
std::optional<ffi::Error> complain(const ffi::AnyBuffer& x, const ffi::AnyBuffer& weight,
                                   const ffi::Result<ffi::AnyBuffer>& out, int64_t per_out) {
  const auto a = x.dimensions(), b = weight.dimensions(), c = out->dimensions();
  if (a.size() != 2 || b.size() != 2 || c.size() != 2 || a[1] != b[1] || a[0] != c[0] ||
      b[0] != per_out * c[1] || (per_out == 2 && c[1] % kLanes))
    return ffi::Error::InvalidArgument("shapes of x, weight and result do not agree");
  const auto dtype = x.element_type();
  if (dtype != ffi::DataType::F32 && dtype != ffi::DataType::BF16)
    return ffi::Error::InvalidArgument("neither float32 nor bfloat16");
  const auto kind = out->element_type();
  if (weight.element_type() != dtype ||
      (kind != dtype && (per_out == 2 || kind != ffi::DataType::F32)))
    return ffi::Error::InvalidArgument("dtypes of x, weight and result do not agree");
  return std::nullopt;
}

int64_t live_rows(const ffi::AnyBuffer& x, const ffi::Buffer<ffi::DataType::S32>& live) {
  return std::clamp<int64_t>(live.typed_data()[0], 0, x.dimensions()[0]);
}

ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                   ffi::Buffer<ffi::DataType::S32> live, ffi::Result<ffi::AnyBuffer> out) {
  if (const auto error = complain(x, weight, out, 1)) return *error;
  const int64_t rows = live_rows(x, live);
  if (x.element_type() == ffi::DataType::F32)
    return multiply_all(pool, Sides<float>(x, weight, rows), result_of<float>(out, rows));
  const Sides<BFloat16> sides(x, weight, rows);
  if (out->element_type() == ffi::DataType::F32)
    return multiply_all(pool, sides, result_of<float>(out, rows));
  return multiply_all(pool, sides, result_of<BFloat16>(out, rows));
}

ffi::Error gated_product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                         ffi::Buffer<ffi::DataType::S32> live, ffi::Result<ffi::AnyBuffer> out) {
  if (const auto error = complain(x, weight, out, 2)) return *error;
  const int64_t rows = live_rows(x, live);
  if (x.element_type() == ffi::DataType::F32)
    return gate_all(pool, Sides<float>(x, weight, rows), result_of<float>(out, rows));
  return gate_all(pool, Sides<BFloat16>(x, weight, rows), result_of<BFloat16>(out, rows));
}

}  // namespace
}  // namespace pagedjax

#define PAGEDJAX_PRODUCT(name, function)                                              \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function,                                       \
                                xla::ffi::Ffi::Bind()                                 \
                                    .Ctx<xla::ffi::ThreadPool>()                      \
                                    .Arg<xla::ffi::AnyBuffer>()                       \
                                    .Arg<xla::ffi::AnyBuffer>()                       \
                                    .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>() \
                                    .Ret<xla::ffi::AnyBuffer>())

PAGEDJAX_PRODUCT(pagedjax_gated_product, pagedjax::gated_product);
PAGEDJAX_PRODUCT(pagedjax_product, pagedjax::product);
