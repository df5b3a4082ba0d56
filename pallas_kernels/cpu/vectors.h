// Vectors of float32 lanes, and how numbers of the supported dtypes get into them.
//
// Written with the compilers' vector extensions, so that one source serves every processor; only
// products of bfloat16 pairs, which have no such notation, use an instruction by its name.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace pagedjax {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanes = kVectorBytes / 4;

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef float Quad __attribute__((vector_size(16)));
typedef uint32_t QuadWords __attribute__((vector_size(16)));
typedef uint16_t QuadHalves __attribute__((vector_size(8)));

struct BFloat16 {
  uint16_t bits;
};

inline float widen(float value) { return value; }

inline float widen(BFloat16 value) {
  const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &word, sizeof wide);
  return wide;
}

// To the nearest, ties to even; a NaN stays one.
inline QuadHalves narrow(Quad values) {
  const QuadWords words = reinterpret_cast<QuadWords>(values);
  const QuadWords rounded = (words + 0x7fffu + ((words >> 16) & 1u)) >> 16;
  const QuadWords quiet = (words >> 16) | 0x40u;
  return __builtin_convertvector((words & 0x7fffffffu) > 0x7f800000u ? quiet : rounded, QuadHalves);
}

// The first `count` of four numbers.
inline void store(float* to, Quad values, int count) {
  if (count == 4) {
    std::memcpy(to, &values, sizeof values);
  } else {
    for (int i = 0; i < count; ++i) to[i] = values[i];
  }
}

inline void store(BFloat16* to, Quad values, int count) {
  const QuadHalves halves = narrow(values);
  if (count == 4) {
    std::memcpy(to, &halves, sizeof halves);
  } else {
    for (int i = 0; i < count; ++i) to[i].bits = halves[i];
  }
}

inline void store(float* to, float value) { *to = value; }

inline void store(BFloat16* to, float value) { store(to, Quad{value}, 1); }

template <typename Vector>
inline Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// What one vector register holds of a dtype, and how a product is added to float32 lanes.
template <typename T>
struct Packed;

template <>
struct Packed<float> {
  typedef Floats Vector;
  static constexpr int kCount = kLanes;
  static Floats add_product(Floats sum, Vector a, Vector b) { return sum + a * b; }
};

template <>
struct Packed<BFloat16> {
  typedef Words Vector;  // a pair of bfloat16 in each lane
  static constexpr int kCount = 2 * kLanes;
#if defined(__AVX512BF16__)
  static Floats add_product(Floats sum, Vector a, Vector b) {
    return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum),
                                                     reinterpret_cast<__m512bh>(a),
                                                     reinterpret_cast<__m512bh>(b)));
  }
#else
  static Floats add_product(Floats sum, Vector a, Vector b) {
    sum += reinterpret_cast<Floats>(a << 16) * reinterpret_cast<Floats>(b << 16);
    return sum +
           reinterpret_cast<Floats>(a & 0xffff0000u) * reinterpret_cast<Floats>(b & 0xffff0000u);
  }
#endif
};

// A vector of numbers as so many bfloat16.
inline void narrow_to(Floats values, BFloat16* to) {
#if defined(__AVX512BF16__)
  const __m256bh halves = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(values));
  std::memcpy(to, &halves, sizeof halves);
#else
  for (int i = 0; i < kLanes; i += 4) {
    Quad quad;
    std::memcpy(&quad, reinterpret_cast<const char*>(&values) + 4 * i, sizeof quad);
    store(to + i, quad, 4);
  }
#endif
}

inline void store_lanes(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }
inline void store_lanes(BFloat16* to, Floats values) { narrow_to(values, to); }

// The numbers in one vector's lanes, put together in an order that is always the same.
template <typename Fold>
float fold_lanes(Floats lanes, Fold fold) {
  float values[kLanes];
  std::memcpy(values, &lanes, sizeof values);
  for (int width = kLanes / 2; width; width /= 2)
    for (int lane = 0; lane < width; ++lane)
      values[lane] = fold(values[lane], values[lane + width]);
  return values[0];
}

inline float sum_of_lanes(Floats lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(lanes));
#else
  return fold_lanes(lanes, [](float a, float b) { return a + b; });
#endif
}

inline float highest_lane(Floats lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(lanes));
#else
  return fold_lanes(lanes, [](float a, float b) { return a < b ? b : a; });
#endif
}

// Sums of the lanes of four vectors, always in the same order.
inline Quad sum_lanes(const Floats* vectors) {
#if defined(__AVX512F__)
  const auto a = reinterpret_cast<__m512>(vectors[0]), b = reinterpret_cast<__m512>(vectors[1]);
  const auto c = reinterpret_cast<__m512>(vectors[2]), d = reinterpret_cast<__m512>(vectors[3]);
  const __m512 ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
  const __m512 cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
  const __m512 abcd = _mm512_shuffle_ps(ab, cd, 0x44) + _mm512_shuffle_ps(ab, cd, 0xee);
  const __m256 half = _mm512_castps512_ps256(abcd) + _mm512_extractf32x8_ps(abcd, 1);
  return reinterpret_cast<Quad>(_mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#else
  Quad sums;
  for (int i = 0; i < 4; ++i) sums[i] = sum_of_lanes(vectors[i]);
  return sums;
#endif
}

inline bool any_set(Words lanes) {
  uint32_t found = 0;
  for (int lane = 0; lane < kLanes; ++lane) found |= lanes[lane];
  return found != 0;
}

inline Floats lane_numbers() {
  Floats numbers;
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = static_cast<float>(lane);
  return numbers;
}

// e^x for x <= 0, to about 2 units in the last place; 0 below -87.
inline Floats exp_of_negative(Floats x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole
  const Floats low = Floats{} - 87.0f;
  const Floats bounded = x < low ? low : x;
  const Floats shifted = bounded * kLog2E + kRounds;
  const Floats whole = shifted - kRounds;
  const Floats rest = bounded - whole * kLn2High - whole * kLn2Low;
  // Taylor's series to rest^7 / 7!, |rest| <= ln(2) / 2.
  Floats sum = Floats{} + 1.0f / 5040;
  for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    sum = sum * rest + term;
  const Words power = (reinterpret_cast<Words>(shifted) - 0x4b400000u) << 23;  // into the exponent
  const Floats result = reinterpret_cast<Floats>(reinterpret_cast<Words>(sum) + power);
  return x < low ? Floats{} : result;
}

}  // namespace pagedjax
