// Causal attention of a ragged batch over keys and values in pages: see `paged_attention`.
//
// A unit of work is one key-value head and some query tokens of one sequence. It goes over blocks
// of kBlock positions with an online softmax. A block's keys are turned, its values paired, into a
// buffer that stays in the core's cache: both products then broadcast a number of the row and add
// to lanes, which never have to be summed. Blocks begin at multiples of kBlock and each row is
// computed for itself, so a row has the same bits whatever rows are beside it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tiles.h"
#include "vectors.h"
#include "workers.h"

namespace pagedjax {
namespace {

namespace ffi = xla::ffi;

constexpr int kBlock = 64;                // positions
constexpr int kTileRows = 48;             // query rows of a unit: heads of a group times tokens
constexpr int kLeastShared = 2 * kBlock;  // positions: with fewer, a second round is not worth it
constexpr int kSharesPerThread = 8;
// Lines of memory to fetch between two pieces of work, each of some hundred cycles.
constexpr int kFetchedASquare = 8;
constexpr int kFetchedAStep = 4;
constexpr int kFetchedARow = 16;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// The batch, as `paged_attention` gets it.
template <typename T>
struct Problem {
  const T* q;                 // [num_tokens, num_q_heads, head_dim]
  const T* kv_pages;          // [num_pages, 2, num_kv_heads, page_size, head_dim]
  const int32_t* page_table;  // [max_seqs, pages_per_seq]
  const int32_t* kv_lens;     // [max_seqs]
  const int32_t* cu_q_lens;   // [max_seqs + 1]
  const float* slopes;        // [num_q_heads], or null
  void* out;                  // as q, in its dtype or in float32
  bool out_is_wide;           // float32
  float* lse;                 // [num_tokens, num_q_heads]
  int64_t num_tokens, num_q_heads, num_kv_heads, head_dim, num_pages, page_size, pages_per_seq;
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // positions that a query sees; at least 1

  int64_t group() const { return num_q_heads / num_kv_heads; }

  // Keys of a head in the page that is listed for a sequence; its values are `to_values` further.
  const T* keys(int64_t seq, int64_t column, int64_t head) const {
    const int64_t listed = page_table[seq * pages_per_seq + column];
    const int64_t page = std::clamp<int64_t>(listed, 0, num_pages - 1);
    return kv_pages + (page * 2 * num_kv_heads + head) * page_size * head_dim;
  }
  int64_t to_values() const { return num_kv_heads * page_size * head_dim; }
};

struct Token {
  int64_t index;     // among all of the batch
  int64_t position;  // in its sequence
};

// One key-value head, and some tokens that attend to positions [begin, end) of a sequence's pages.
struct Unit {
  int64_t seq, head, begin, end;
  int64_t first_token, num_tokens;  // in the batch's list
  bool is_shared;  // of several sequences, over pages that all of them have: others continue it
  bool continues;  // after a unit that is shared
};

// Memory that is read soon. It is fetched some lines at a time, between other work: a core waits
// for so many lines at once, and with more it stands still.
class Ahead {
 public:
  void clear() { count_ = range_ = 0; }

  void add(const void* from, int64_t bytes) {
    if (count_ < kMost)
      ranges_[count_++] = {static_cast<const char*>(from), static_cast<const char*>(from) + bytes};
  }

  void fetch(int lines) {
    for (; lines > 0 && range_ < count_; --lines) {
      auto& range = ranges_[range_];
      __builtin_prefetch(range.next, 0, 3);
      range.next += kBytesOfLine;
      if (range.next >= range.end) ++range_;
    }
  }

 private:
  static constexpr int kMost = 2 * kBlock;  // keys and values of pages of one position
  struct Range {
    const char *next, *end;
  };
  Range ranges_[kMost];
  int count_ = 0, range_ = 0;
};

// What one thread works on; kept from call to call.
struct Scratch {
  std::vector<uint32_t> q, keys, values, weights, zeros;
  std::vector<float> scores, out;
  std::vector<float> peaks, totals;  // of each row: largest score, sum of the weights

  void resize(int64_t rows, int64_t words, int64_t steps, int64_t padded) {
    q.resize(rows * words);
    keys.resize(words * kBlock);
    values.resize(steps * padded);
    weights.resize(rows * steps);
    scores.resize(rows * kBlock);
    out.resize(rows * padded);
    peaks.resize(rows);
    totals.resize(rows);
    zeros.resize(words);
  }
};

// What rows have summed over shared pages, until their own units go on with it. It is put together
// as if one unit had seen all: the bits are the same.
class States {
 public:
  void resize(int64_t rows, int64_t padded) { state_.resize(rows * (padded + 2)); }

  void put(int64_t at, const Scratch& from, int64_t row, int64_t padded) {
    float* to = state_.data() + at * (padded + 2);
    std::copy_n(from.out.begin() + row * padded, padded, to);
    to[padded] = from.peaks[row];
    to[padded + 1] = from.totals[row];
  }

  void get(int64_t at, Scratch& to, int64_t row, int64_t padded) const {
    const float* from = state_.data() + at * (padded + 2);
    std::copy_n(from, padded, to.out.begin() + row * padded);
    to.peaks[row] = from[padded];
    to.totals[row] = from[padded + 1];
  }

 private:
  std::vector<float> state_;
};

template <typename T>
class Attention {
 public:
  Attention(const Problem<T>& problem, const std::vector<Token>& tokens, Scratch& scratch,
            States& states)
      : problem_(problem),
        tokens_(tokens),
        scratch_(scratch),
        states_(states),
        words_(problem.head_dim / kPerWord),
        padded_(padded(problem)) {
    scratch.resize(std::max<int64_t>(kTileRows, problem.group()), words_, kSteps, padded_);
  }

  // Floats of a row of values, in whole vectors.
  static int64_t padded(const Problem<T>& problem) {
    return (problem.head_dim + kLanes - 1) / kLanes * kLanes;
  }

  // Attends; meanwhile fetches what `next` (null: nothing) reads first.
  void run(const Unit& unit, const Unit* next) {
    take_rows(unit);
    for (int64_t start = unit.begin / kBlock * kBlock; start < unit.end; start += kBlock) {
      if (start + kBlock < unit.end)
        look_ahead(unit, start + kBlock);
      else if (next)
        look_ahead(*next, next->begin);
      // A position before the first may be of a page that is gone.
      const int64_t skipped = std::max(start, unit.begin) - start;
      const int64_t count = std::min<int64_t>(kBlock, unit.end - start);
      const int64_t width = (count + kLanes - 1) / kLanes * kLanes, steps = width / kPerWord;
      Stream nothing;  // pages are fetched between the products
      find_rows(unit, start, skipped, count);
      turn_keys(width);
      pair_values(steps);
      multiply<T>(scratch_.q.data(), words_, rows_, scratch_.keys.data(), width, words_,
                  scratch_.scores.data(), width, false, nothing);
      for (int64_t row = 0; row < rows_; ++row) {
        weigh(unit, start, width, row);
        ahead_.fetch(kFetchedARow);
      }
      multiply<T>(scratch_.weights.data(), kSteps, rows_, scratch_.values.data(), padded_, steps,
                  scratch_.out.data(), padded_, true, nothing);
    }
    for (int64_t row = 0; row < rows_; ++row) {
      if (unit.is_shared)
        states_.put(row_of(unit, row), scratch_, row, padded_);
      else
        finish(unit, row);
    }
  }

 private:
  static constexpr int kPerWord = 4 / sizeof(T);
  static constexpr int kSteps = kBlock / kPerWord;

  const Token& token(const Unit& unit, int64_t row) const {
    return tokens_[unit.first_token + row / problem_.group()];
  }

  // Index of a row among all [num_tokens, num_q_heads].
  int64_t row_of(const Unit& unit, int64_t row) const {
    const int64_t group = problem_.group();
    return token(unit, row).index * problem_.num_q_heads + unit.head * group + row % group;
  }

  // The unit's queries, and what was summed before its first block.
  void take_rows(const Unit& unit) {
    const int64_t group = problem_.group();
    rows_ = unit.num_tokens * group;
    for (int64_t row = 0; row < rows_; row += group)
      std::memcpy(scratch_.q.data() + row * words_,
                  problem_.q + row_of(unit, row) * problem_.head_dim,
                  group * words_ * sizeof(uint32_t));
    for (int64_t row = 0; row < rows_; ++row) {
      if (unit.continues) {
        states_.get(row_of(unit, row), scratch_, row, padded_);
      } else {
        scratch_.peaks[row] = kNone;
        scratch_.totals[row] = 0;
        std::fill_n(scratch_.out.begin() + row * padded_, padded_, 0.0f);
      }
    }
  }

  // What to fetch next: the block of a unit that begins at `start`.
  void look_ahead(const Unit& unit, int64_t start) {
    const int64_t page_size = problem_.page_size;
    const int64_t end = std::min(unit.end, start / kBlock * kBlock + kBlock);
    ahead_.clear();
    for (int64_t at = start; at < end;) {
      const int64_t offset = at % page_size, positions = std::min(page_size - offset, end - at);
      const T* keys =
          problem_.keys(unit.seq, at / page_size, unit.head) + offset * problem_.head_dim;
      ahead_.add(keys, positions * problem_.head_dim * sizeof(T));
      ahead_.add(keys + problem_.to_values(), positions * problem_.head_dim * sizeof(T));
      at += positions;
    }
  }

  // Where the keys and values of each position of the block are; a row of zeros where none is.
  void find_rows(const Unit& unit, int64_t start, int64_t skipped, int64_t count) {
    const int64_t page_size = problem_.page_size;
    const T* zeros = reinterpret_cast<const T*>(scratch_.zeros.data());
    std::fill_n(keys_, kBlock, zeros);
    std::fill_n(values_, kBlock, zeros);
    for (int64_t i = skipped; i < count;) {
      const int64_t offset = (start + i) % page_size,
                    stop = std::min(count, i + page_size - offset);
      const T* keys =
          problem_.keys(unit.seq, (start + i) / page_size, unit.head) + offset * problem_.head_dim;
      for (; i < stop; ++i, keys += problem_.head_dim) {
        keys_[i] = keys;
        values_[i] = keys + problem_.to_values();
      }
    }
  }

  // Word by word of the head, the positions of the block beside one another.
  void turn_keys(int64_t width) {
    const auto rows = reinterpret_cast<const uint32_t* const*>(keys_);
    turn(rows, width, words_, scratch_.keys.data(), width,
         [this] { ahead_.fetch(kFetchedASquare); });
  }

  // The values of two positions (of one, in float32) in each word.
  void pair_values(int64_t steps) {
    const int64_t length = problem_.head_dim;
    for (int64_t step = 0; step < steps; ++step) {
      uint32_t* __restrict to = scratch_.values.data() + step * padded_;
      if constexpr (kPerWord == 1) {
        std::memcpy(to, values_[step], length * sizeof(T));
      } else {
        const T *even = values_[2 * step], *odd = values_[2 * step + 1];
        for (int64_t d = 0; d < length; ++d)
          to[d] = even[d].bits | static_cast<uint32_t>(odd[d].bits) << 16;
      }
      for (int64_t d = length; d < padded_; ++d) to[d] = 0;
      ahead_.fetch(kFetchedAStep);
    }
  }

  // The row's weights of a block, its new peak and total; what was summed before is scaled.
  void weigh(const Unit& unit, int64_t start, int64_t width, int64_t row) {
    const int64_t group = problem_.group();
    const int64_t position = token(unit, row).position;
    float* scores = scratch_.scores.data() + row * width;
    if (problem_.soft_cap > 0 || problem_.slopes)
      bend(scores, start, width, position, unit.head * group + row % group);
    const float from =
        static_cast<float>(std::max<int64_t>(position - problem_.window + 1 - start, 0));
    const float to = static_cast<float>(std::min<int64_t>(position - start, kBlock));
    const float scale = problem_.soft_cap > 0 || problem_.slopes ? 1.0f : problem_.scale;
    Floats highest = Floats{} + kNone, lane = lane_numbers();
    Words nans{};  // a NaN is no number to compare with: it is passed on by hand
    for (int64_t i = 0; i < width; i += kLanes, lane += kLanes) {
      Floats value = load<Floats>(scores + i) * scale;
      value = lane < from ? Floats{} + kNone : lane > to ? Floats{} + kNone : value;
      nans |= reinterpret_cast<Words>(value != value);
      std::memcpy(scores + i, &value, sizeof value);
      highest = value > highest ? value : highest;
    }
    const float before = scratch_.peaks[row];
    const float peak = std::max(before, highest_lane(highest));
    T* weights = reinterpret_cast<T*>(scratch_.weights.data() + row * kSteps);
    if (any_set(nans)) scratch_.totals[row] = std::numeric_limits<float>::quiet_NaN();
    if (peak == kNone) {  // nothing of this block, and nothing before
      std::memset(static_cast<void*>(weights), 0, width * sizeof(T));
      return;
    }
    Floats sum = Floats{};
    for (int64_t i = 0; i < width; i += kLanes) {
      const Floats value = exp_of_negative(load<Floats>(scores + i) - peak);
      sum += value;
      store_lanes(weights + i, value);
    }
    const float shrinks = before == peak ? 1.0f : before == kNone ? 0.0f : std::exp(before - peak);
    scratch_.totals[row] = scratch_.totals[row] * shrinks + sum_of_lanes(sum);
    scratch_.peaks[row] = peak;
    if (before != kNone && shrinks != 1.0f) {
      float* out = scratch_.out.data() + row * padded_;
      for (int64_t d = 0; d < padded_; ++d) out[d] *= shrinks;
    }
  }

  // Scale, cap and slope, where there is more than a scale.
  void bend(float* __restrict scores, int64_t start, int64_t width, int64_t position,
            int64_t head) const {
    const float scale = problem_.scale, cap = problem_.soft_cap;
    const float slope = problem_.slopes ? problem_.slopes[head] : 0.0f;
    for (int64_t i = 0; i < width; ++i) {
      float score = scores[i] * scale;
      if (cap > 0) score = cap * std::tanh(score / cap);
      scores[i] = score + slope * static_cast<float>(start + i - position);
    }
  }

  void finish(const Unit& unit, int64_t row) {
    const int64_t at = row_of(unit, row);
    const float total = scratch_.totals[row], share = total == 0 ? 0.0f : 1.0f / total;
    if (problem_.out_is_wide)
      write(static_cast<float*>(problem_.out), at, row, share);
    else
      write(static_cast<T*>(problem_.out), at, row, share);
    problem_.lse[at] = total != 0 ? scratch_.peaks[row] + std::log(total) : kNone;
  }

  template <typename Out>
  void write(Out* to, int64_t at, int64_t row, float share) const {
    const float* from = scratch_.out.data() + row * padded_;
    to += at * problem_.head_dim;
    int64_t d = 0;
    for (; d + kLanes <= problem_.head_dim; d += kLanes)
      store_lanes(to + d, load<Floats>(from + d) * share);
    for (; d < problem_.head_dim; ++d) store(to + d, from[d] * share);
  }

  const Problem<T>& problem_;
  const std::vector<Token>& tokens_;
  Scratch& scratch_;
  States& states_;
  const int64_t words_, padded_;  // of a head: words, and lanes of its values
  int64_t rows_ = 0;
  Ahead ahead_;
  const T *keys_[kBlock], *values_[kBlock];  // of each position of the block
};

// The units of a batch. Sequences of one token each that begin with the same pages attend to those
// together, in units that come first.
template <typename T>
class Batch {
 public:
  std::vector<Unit> shared, own;
  std::vector<Token> tokens;  // those of a unit beside one another

  Batch(const Problem<T>& problem, int64_t num_seqs) : problem_(problem) {
    find_shared(num_seqs);
    for (int64_t seq = 0; seq < num_seqs; ++seq) add_sequence(seq);
    // The longest first: threads then end at about the same time.
    std::stable_sort(own.begin(), own.end(), [](const Unit& a, const Unit& b) {
      return a.end - a.begin > b.end - b.begin;
    });
  }

 private:
  int64_t tile() const { return std::max<int64_t>(1, kTileRows / problem_.group()); }
  int64_t first_of(int64_t seq) const { return std::max<int64_t>(0, problem_.cu_q_lens[seq]); }
  int64_t end_of(int64_t seq) const {
    return std::min<int64_t>(problem_.num_tokens, problem_.cu_q_lens[seq + 1]);
  }
  int64_t kv_len(int64_t seq) const {
    return std::min<int64_t>(problem_.kv_lens[seq], problem_.pages_per_seq * problem_.page_size);
  }
  const int32_t* pages(int64_t seq) const {
    return problem_.page_table + seq * problem_.pages_per_seq;
  }

  // Fills `prefixes_`: of each sequence, positions that it attends to with others.
  void find_shared(int64_t num_seqs) {
    prefixes_.assign(num_seqs, 0);
    if (problem_.window < problem_.pages_per_seq * problem_.page_size) return;
    std::vector<int64_t> order;
    for (int64_t seq = 0; seq < num_seqs; ++seq)
      if (end_of(seq) - first_of(seq) == 1 && kv_len(seq) > kLeastShared) order.push_back(seq);
    std::stable_sort(order.begin(), order.end(),
                     [this](int64_t a, int64_t b) { return pages(a)[0] < pages(b)[0]; });
    for (size_t from = 0, to; from < order.size(); from = to) {
      for (to = from + 1; to < order.size() && pages(order[to])[0] == pages(order[from])[0];) ++to;
      if (to - from > 1) share(order.data() + from, to - from);
    }
  }

  void share(const int64_t* seqs, int64_t count) {
    int64_t columns = problem_.pages_per_seq;
    for (int64_t i = 0; i < count; ++i) {
      // The page of the newest position is nobody else's.
      columns = std::min(columns, (kv_len(seqs[i]) - 1) / problem_.page_size);
      for (int64_t column = 0; column < columns; ++column)
        if (pages(seqs[i])[column] != pages(seqs[0])[column]) columns = column;
    }
    const int64_t length = columns * problem_.page_size / kBlock * kBlock;
    if (length < kLeastShared) return;
    for (int64_t at = 0; at < count; at += tile()) {
      const int64_t members = std::min(tile(), count - at);
      const int64_t first_token = tokens.size();
      for (int64_t i = at; i < at + members; ++i) {
        tokens.push_back({first_of(seqs[i]), kv_len(seqs[i]) - 1});
        prefixes_[seqs[i]] = length;
      }
      for (int64_t head = 0; head < problem_.num_kv_heads; ++head)
        shared.push_back({seqs[0], head, 0, length, first_token, members, true, false});
    }
  }

  void add_sequence(int64_t seq) {
    const int64_t end = end_of(seq), offset = kv_len(seq) - problem_.cu_q_lens[seq + 1];
    for (int64_t first = first_of(seq); first < end; first += tile()) {
      const int64_t stop = std::min(end, first + tile());
      const int64_t first_token = tokens.size();
      for (int64_t token = first; token < stop; ++token) tokens.push_back({token, token + offset});
      const int64_t seen = std::max<int64_t>(0, first + offset - problem_.window + 1);
      const int64_t begin = std::max(seen, prefixes_[seq]);
      for (int64_t head = 0; head < problem_.num_kv_heads; ++head)
        own.push_back({seq, head, begin, stop + offset, first_token, stop - first, false,
                       prefixes_[seq] > 0});
    }
  }

  const Problem<T>& problem_;
  std::vector<int64_t> prefixes_;
};

template <typename T>
void run_all(ffi::ThreadPool& pool, const Problem<T>& problem, const std::vector<Token>& tokens,
             const std::vector<Unit>& units, States& states) {
  const int64_t count = units.size();
  const int64_t shares = num_shares(pool, count, kSharesPerThread);
  share_out(pool, shares, [&](int64_t share) {
    static thread_local Scratch scratch;
    Attention<T> attention(problem, tokens, scratch, states);
    for (int64_t i = share; i < count; i += shares)
      attention.run(units[i], i + shares < count ? &units[i + shares] : nullptr);
  });
}

template <typename T>
void attend(ffi::ThreadPool& pool, const Problem<T>& problem, int64_t num_seqs) {
  // Padding rows, and those of sequences that see nothing.
  const int64_t rows = problem.num_tokens * problem.num_q_heads;
  const int64_t width = problem.out_is_wide ? sizeof(float) : sizeof(T);
  std::memset(problem.out, 0, rows * problem.head_dim * width);
  std::fill_n(problem.lse, rows, kNone);
  const Batch<T> batch(problem, num_seqs);
  States states;
  if (!batch.shared.empty()) states.resize(rows, Attention<T>::padded(problem));
  run_all(pool, problem, batch.tokens, batch.shared, states);
  run_all(pool, problem, batch.tokens, batch.own, states);
}

template <typename T>
ffi::Error attention_of(ffi::ThreadPool& pool, ffi::AnyBuffer& q, ffi::AnyBuffer& kv_pages,
                        ffi::Buffer<ffi::DataType::S32>& page_table,
                        ffi::Buffer<ffi::DataType::S32>& kv_lens,
                        ffi::Buffer<ffi::DataType::S32>& cu_q_lens, int64_t num_seqs,
                        const float* slopes, ffi::Result<ffi::AnyBuffer>& out,
                        ffi::Result<ffi::Buffer<ffi::DataType::F32>>& lse, float scale,
                        float soft_cap, int64_t window) {
  const auto of_q = q.dimensions(), of_pages = kv_pages.dimensions();
  const Problem<T> problem{
      static_cast<const T*>(q.untyped_data()),
      static_cast<const T*>(kv_pages.untyped_data()),
      page_table.typed_data(),
      kv_lens.typed_data(),
      cu_q_lens.typed_data(),
      slopes,
      out->untyped_data(),
      out->element_type() == ffi::DataType::F32,
      lse->typed_data(),
      of_q[0],
      of_q[1],
      of_pages[2],
      of_q[2],
      of_pages[0],
      of_pages[3],
      page_table.dimensions()[1],
      scale,
      soft_cap,
      window,
  };
  attend(pool, problem, std::clamp<int64_t>(num_seqs, 0, kv_lens.dimensions()[0]));
  return ffi::Error::Success();
}

ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer kv_pages,
                     ffi::Buffer<ffi::DataType::S32> page_table,
                     ffi::Buffer<ffi::DataType::S32> kv_lens,
                     ffi::Buffer<ffi::DataType::S32> cu_q_lens,
                     ffi::Buffer<ffi::DataType::S32> num_seqs,
                     ffi::Buffer<ffi::DataType::F32> slopes, ffi::Result<ffi::AnyBuffer> out,
                     ffi::Result<ffi::Buffer<ffi::DataType::F32>> lse, float scale, float soft_cap,
                     int64_t window) {
  const auto of_q = q.dimensions(), of_pages = kv_pages.dimensions();
  if (of_q.size() != 3 || of_pages.size() != 5 || of_q[2] != of_pages[4] || of_q[1] % of_pages[2])
    return ffi::Error::InvalidArgument("attention: shapes of q and kv_pages do not agree");
  const auto dtype = q.element_type();
  const auto of_out = out->element_type();
  if (kv_pages.element_type() != dtype || (of_out != dtype && of_out != ffi::DataType::F32))
    return ffi::Error::InvalidArgument("attention: dtypes do not agree");
  const float* slope = slopes.element_count() ? slopes.typed_data() : nullptr;
  const int64_t live = num_seqs.typed_data()[0];
  if (dtype == ffi::DataType::F32)
    return attention_of<float>(pool, q, kv_pages, page_table, kv_lens, cu_q_lens, live, slope, out,
                               lse, scale, soft_cap, window);
  if (dtype == ffi::DataType::BF16 && of_q[2] % 2 == 0)
    return attention_of<BFloat16>(pool, q, kv_pages, page_table, kv_lens, cu_q_lens, live, slope,
                                  out, lse, scale, soft_cap, window);
  return ffi::Error::InvalidArgument("attention: neither float32 nor bfloat16 of an even head_dim");
}

}  // namespace
}  // namespace pagedjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_attention, pagedjax::attention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window"));
