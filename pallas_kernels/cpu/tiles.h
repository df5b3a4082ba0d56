// Products of rows with a tile that lies turned: a word of the row is broadcast, and multiplied
// with a word of each column. Words are 32 bits: a float32, or a pair of bfloat16.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace pagedjax {

constexpr int kRowsAtOnce = 6;  // 24 sums, 4 words of the tile, one of a row: 29 registers of 32
constexpr int kVectorsAtOnce = 4;
constexpr int kBytesOfLine = 64;

// Memory [next, end) that is read soon, and then `bytes` from `then`. One line is fetched with each
// step of other work: a core waits for so many lines at once, and with more it stands still.
struct Stream {
  const char* next = nullptr;
  const char* end = nullptr;
  const char* then = nullptr;
  int64_t bytes = 0;

  void fetch() {
    if (next < end) {
      __builtin_prefetch(next, 0, 2);
      next += kBytesOfLine;
    } else if (bytes) {
      next = then;
      end = then + bytes;
      bytes = 0;
    }
  }
};

// c [kRows, kVectors] = or += a [kRows, steps] b [steps, kVectors].
template <typename T, int kRows, int kVectors>
void multiply_tile(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                   int64_t steps, float* c, int64_t c_stride, bool adds, Stream& ahead) {
  typedef typename Packed<T>::Vector Vector;
  Floats sums[kRows][kVectors];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVectors; ++j)
      sums[i][j] = adds ? load<Floats>(c + i * c_stride + j * kLanes) : Floats{};
  for (int64_t k = 0; k < steps; ++k) {
    Vector vectors[kVectors];
    for (int j = 0; j < kVectors; ++j) vectors[j] = load<Vector>(b + k * b_stride + j * kLanes);
    ahead.fetch();
    for (int i = 0; i < kRows; ++i) {
      const auto word = reinterpret_cast<Vector>(Words{} + a[i * a_stride + k]);
      for (int j = 0; j < kVectors; ++j)
        sums[i][j] = Packed<T>::add_product(sums[i][j], word, vectors[j]);
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVectors; ++j)
      std::memcpy(c + i * c_stride + j * kLanes, &sums[i][j], sizeof sums[i][j]);
}

template <typename T, int kRows>
void multiply_rows(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                   int64_t steps, float* c, int64_t c_stride, bool adds, Stream& ahead) {
  int64_t lane = 0;
  for (; lane + kVectorsAtOnce * kLanes <= b_stride; lane += kVectorsAtOnce * kLanes)
    multiply_tile<T, kRows, kVectorsAtOnce>(a, a_stride, b + lane, b_stride, steps, c + lane,
                                            c_stride, adds, ahead);
  for (; lane + 2 * kLanes <= b_stride; lane += 2 * kLanes)
    multiply_tile<T, kRows, 2>(a, a_stride, b + lane, b_stride, steps, c + lane, c_stride, adds,
                               ahead);
  for (; lane < b_stride; lane += kLanes)
    multiply_tile<T, kRows, 1>(a, a_stride, b + lane, b_stride, steps, c + lane, c_stride, adds,
                               ahead);
}

// The same for any number of rows; b_stride is whole vectors. Each row is computed for itself.
template <typename T>
void multiply(const uint32_t* a, int64_t a_stride, int64_t rows, const uint32_t* b,
              int64_t b_stride, int64_t steps, float* c, int64_t c_stride, bool adds,
              Stream& ahead) {
  int64_t row = 0;
  for (; row + kRowsAtOnce <= rows; row += kRowsAtOnce)
    multiply_rows<T, kRowsAtOnce>(a + row * a_stride, a_stride, b, b_stride, steps,
                                  c + row * c_stride, c_stride, adds, ahead);
  for (; row + 3 <= rows; row += 3)
    multiply_rows<T, 3>(a + row * a_stride, a_stride, b, b_stride, steps, c + row * c_stride,
                        c_stride, adds, ahead);
  for (; row < rows; ++row)
    multiply_rows<T, 1>(a + row * a_stride, a_stride, b, b_stride, steps, c + row * c_stride,
                        c_stride, adds, ahead);
}

#if defined(__AVX512F__)
// 16 words of 16 rows, turned; word w of all of them goes to `to + w * width`.
inline void turn_square(const uint32_t* const* rows, int64_t word, uint32_t* to, int64_t width) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + word);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  // a[4 r + c] has words c, c + 4, c + 8, c + 12 of rows 4 r .. 4 r + 3, in quarters.
  for (int c = 0; c < 4; ++c) {
    const __m512i low = _mm512_shuffle_i32x4(a[c], a[c + 4], 0x88);
    const __m512i high = _mm512_shuffle_i32x4(a[c + 8], a[c + 12], 0x88);
    const __m512i low_odd = _mm512_shuffle_i32x4(a[c], a[c + 4], 0xdd);
    const __m512i high_odd = _mm512_shuffle_i32x4(a[c + 8], a[c + 12], 0xdd);
    _mm512_storeu_si512(to + c * width, _mm512_shuffle_i32x4(low, high, 0x88));
    _mm512_storeu_si512(to + (c + 8) * width, _mm512_shuffle_i32x4(low, high, 0xdd));
    _mm512_storeu_si512(to + (c + 4) * width, _mm512_shuffle_i32x4(low_odd, high_odd, 0x88));
    _mm512_storeu_si512(to + (c + 12) * width, _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd));
  }
}
#endif

// `words` words of `count` rows, turned: word w of row i goes to to[w * stride + i]. `count` is
// whole vectors. `between` is called now and then.
template <typename Between>
void turn(const uint32_t* const* rows, int64_t count, int64_t words, uint32_t* to, int64_t stride,
          [[maybe_unused]] const Between& between) {
  int64_t word = 0;
#if defined(__AVX512F__)
  for (; word + kLanes <= words; word += kLanes)
    for (int64_t i = 0; i < count; i += kLanes) {
      turn_square(rows + i, word, to + word * stride + i, stride);
      between();
    }
#endif
  for (; word < words; ++word)
    for (int64_t i = 0; i < count; ++i) to[word * stride + i] = rows[i][word];
}

}  // namespace pagedjax
