// Sixteen float32 numbers at a time, in any compiler's vectors.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int WIDE = 16;
typedef float Floats __attribute__((vector_size(4 * WIDE)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDE)));
typedef int8_t Bytes __attribute__((vector_size(WIDE)));
typedef float Half __attribute__((vector_size(2 * WIDE)));
typedef float Quarter __attribute__((vector_size(WIDE)));

inline Floats load(const float* from) {
    Floats made;
    std::memcpy(&made, from, sizeof made);
    return made;
}

inline void store(float* at, Floats x) { std::memcpy(at, &x, sizeof x); }

inline float total(Floats x) {
    Half halves[2];
    std::memcpy(halves, &x, sizeof halves);
    halves[0] += halves[1];
    Quarter quarters[2];
    std::memcpy(quarters, halves, sizeof quarters);
    const Quarter sum = quarters[0] + quarters[1];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

inline int32_t total(Ints x) {
    int32_t sum = 0;
    for (int i = 0; i < WIDE; ++i) sum += x[i];
    return sum;
}

inline Floats larger(Floats a, Floats b) { return a < b ? b : a; }

inline float most_of(Floats x) {
    Half halves[2];
    std::memcpy(halves, &x, sizeof halves);
    const Half four = halves[0] < halves[1] ? halves[1] : halves[0];
    float most = four[0];
    for (int i = 1; i < WIDE / 2; ++i) most = std::max(most, four[i]);
    return most;
}

inline Floats absolute(Floats x) {
    Ints bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits &= 0x7fffffff;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// The nearest integers, to even ones from the middle, of numbers below 2^22.
inline Floats nearest(Floats x) { return (x + 12582912.0f) - 12582912.0f; }

// e^x for x <= 0, to about 1e-7 of its value; 0 below -87.
inline Floats exponential(Floats x) {
    const Floats least = Floats{} - 87.0f, kept = x < least ? least : x;
    const Floats rounded = nearest(kept * 1.44269504f);
    const Floats r = (kept - rounded * 0.693145752f) - rounded * 1.42860677e-6f;
    Floats y = Floats{} + 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const Ints bits = (__builtin_convertvector(rounded, Ints) + 127) << 23;
    Floats power;
    std::memcpy(&power, &bits, sizeof power);
    return x < least ? Floats{} : y * power;
}

}  // namespace
