// Scalars of every dtype to and from float and double. Portable; the vector paths have their own.
#pragma once
#include <cstdint>
#include <cstring>

namespace pflcore::cpu {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

template <class To, class From>
inline To convert(From value) {
  return static_cast<To>(value);
}

template <>
inline float convert<float, BFloat16>(BFloat16 v) {
  return bits_to_float(static_cast<uint32_t>(v.bits) << 16);
}

template <>
inline float convert<float, Half>(Half v) {
  const uint32_t sign = static_cast<uint32_t>(v.bits & 0x8000u) << 16;
  const uint32_t rest = v.bits & 0x7fffu;
  if (rest >= 0x7c00u)
    return bits_to_float(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));  // Inf, NaN
  if (rest < 0x400u) {  // zero and subnormal: rest * 2^-24
    const float value = static_cast<float>(rest) * 5.9604644775390625e-8f;
    return sign ? -value : value;
  }
  return bits_to_float(sign | ((rest << 13) + 0x38000000u));
}

template <>
inline double convert<double, BFloat16>(BFloat16 v) {
  return convert<float>(v);
}
template <>
inline double convert<double, Half>(Half v) {
  return convert<float>(v);
}

// Round to nearest, ties to even.
template <>
inline BFloat16 convert<BFloat16, float>(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline Half convert<Half, float>(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (rest >= 0x477ff000u)
    return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and above round to Inf
  if (rest < 0x38800000u) {                          // subnormal result: let float addition round
    const float magic = bits_to_float(0x3f000000u);  // 0.5: its last bit is 2^-24
    return {
        static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(rest) + magic) - 0x3f000000u))};
  }
  return {
      static_cast<uint16_t>(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13))};
}

template <>
inline BFloat16 convert<BFloat16, double>(double value) {
  return convert<BFloat16>(static_cast<float>(value));
}
template <>
inline Half convert<Half, double>(double value) {
  return convert<Half>(static_cast<float>(value));
}

}  // namespace pflcore::cpu
