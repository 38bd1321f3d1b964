// Draft steps: the law of a model's logits, a token that is drawn from it, a pass over this token, and so on.
//
// Laws are those of `process` in laws.py without truncation, and draws those of random.py: an exponential race. Each row
// is computed by itself, so that its tokens do not depend on the others.

#pragma once

#include "layers.h"

namespace {

constexpr int64_t BLOCK = 64;  // tokens whose best bound is kept

// `count` numbers, at most WIDE; the others are `other`.
inline Floats load_some(const float* from, int64_t count, float other) {
    if (count >= WIDE) return load(from);
    float whole[WIDE];
    std::fill(whole, whole + WIDE, other);
    std::memcpy(whole, from, size_t(count) * sizeof(float));
    return load(whole);
}

inline void store_some(float* to, const Floats& x, int64_t count) {
    if (count >= WIDE) return store(to, x);
    float whole[WIDE];
    store(whole, x);
    std::memcpy(to, whole, size_t(count) * sizeof(float));
}

// law [size] = softmax(logits / temperature); at temperature 0 all mass is on the first largest one.
void soften_all(const float* logits, int64_t size, float temperature, float* law) {
    const float heat = temperature > 0.0f ? temperature : 1.0f;
    Floats most = all(-INFINITY), sum = {};
    for (int64_t i = 0; i < size; i += WIDE) most = larger(most, load_some(logits + i, size - i, -INFINITY));
    const float highest = most_of(most);
    if (temperature == 0.0f) {
        std::fill(law, law + size, 0.0f);
        law[std::find(logits, logits + size - 1, highest) - logits] = 1.0f;
        return;
    }
    const float top = highest / heat;
    for (int64_t i = 0; i < size; i += WIDE) {
        const Floats x = load_some(logits + i, size - i, -INFINITY) / all(heat);
        const Floats made = exponential(x - all(top));
        store_some(law + i, made, size - i);
        sum += made;
    }
    const float whole = total(sum);  // not a number if a logit is NaN or infinite; -inf has no mass
    for (int64_t i = 0; i < size; i += WIDE)
        store_some(law + i, load_some(law + i, size - i, 0.0f) / all(whole), size - i);
}

typedef uint32_t WordPart __attribute__((vector_size(4 * PART)));

// -u of the tokens from `from` on, for numbers u in (0, 1): see _race_numbers in random.py, which has the same integers.
inline Floats race_numbers(const uint32_t* high, const uint32_t* low, uint32_t first, uint32_t second) {
    return each([&](int i) {
        WordPart x, y;
        std::memcpy(&x, high + i * PART, sizeof x);
        std::memcpy(&y, low + i * PART, sizeof y);
        x ^= first;
        x = (x ^ (x >> 16)) * uint32_t(0x7FEB352D);
        x ^= second ^ y;
        x = (x ^ (x >> 15)) * uint32_t(0x846CA68B);
        x ^= x >> 16;
        const FloatPart u = (__builtin_convertvector(x, FloatPart) + 0.5f) * -0x1p-32f;
        const FloatPart least = FloatPart{} + (-1.0f + 0x1p-24f);
        return u < least ? least : u;
    });
}

// The token of `law` that arrives first. A time -ln(1 - u) is at least u, so that few logarithms are needed. bounds
// [whole], best [whole / BLOCK] are room; words have room for `whole` tokens, a multiple of BLOCK.
int64_t first_arrival(
    const float* law, int64_t size, int64_t whole, uint64_t key, const uint32_t* high, const uint32_t* low, float* bounds,
    float* best
) {
    const uint32_t first = uint32_t(key), second = uint32_t(key >> 32);
    for (int64_t block = 0; block < whole; block += BLOCK) {
        Floats most = all(-1.0f);
        for (int64_t i = block; i < block + BLOCK; i += WIDE) {
            const Floats weights = i < size ? load_some(law + i, size - i, 0.0f) : Floats{};
            const Floats bound = weights / (all(0.0f) - race_numbers(high + i, low + i, first, second));
            store(bounds + i, bound);
            most = larger(most, bound);
        }
        best[block / BLOCK] = most_of(most);
    }
    const auto number = [&](int64_t i) {
        float u[WIDE];
        store(u, race_numbers(high + i / WIDE * WIDE, low + i / WIDE * WIDE, first, second));
        return u[i % WIDE];
    };
    const auto reached = [&](int64_t i) { return law[i] / -std::log1p(number(i)); };
    const int64_t top = (std::max_element(best, best + whole / BLOCK) - best) * BLOCK;
    const int64_t leader = std::max_element(bounds + top, bounds + std::min(top + BLOCK, size)) - bounds;
    const float least = reached(leader) * (1.0f - 1e-5f);  // for rounding
    int64_t winner = leader;
    float most = -1.0f;
    for (int64_t block = 0; block < whole; block += BLOCK) {
        if (!(best[block / BLOCK] >= least)) continue;
        for (int64_t i = block; i < std::min(block + BLOCK, size); ++i) {
            if (!(bounds[i] >= least)) continue;
            const float own = reached(i);
            if (own > most) most = own, winner = i;
        }
    }
    return winner;
}

// Rows that draft, those with most tokens first.
struct Writers {
    int64_t rows, steps;             // of the row with most
    const int64_t *row, *start;      // number of each, and of the tokens that it holds
    const int64_t* count;            // of tokens to draw
    const float* temperature;
    const uint64_t* keys;            // [rows, steps], of the draws
    const uint32_t *high, *low;      // words of the tokens, with room for whole blocks
    int64_t size;                    // of the vocabulary
};

// Results [steps, rows, ...]; the first step's logits are given. Places beyond a row's count are not written.
struct Written {
    float *logits, *states, *laws;
    int64_t* tokens;
};

// `pass` has the caches and angles. A token that is drawn last is not read.
void write(const Model& model, Pass pass, const Writers& who, const Written& made, int threads) {
    const int64_t vocab = model.head.high, width = model.embedding.width, whole = (who.size + BLOCK - 1) / BLOCK * BLOCK;
    std::vector<int64_t> slots(size_t(who.rows));
    std::vector<uint8_t> mask;
    for (int64_t step = 0, live = who.rows; step < who.steps; ++step) {
        while (live > 0 && who.count[live - 1] <= step) --live;
        const int64_t at = step * who.rows;
        if (step) {
            for (int64_t i = 0; i < live; ++i) slots[size_t(i)] = who.start[i] + step - 1;
            const auto [least, most] = std::minmax_element(slots.begin(), slots.begin() + live);
            pass.batch = live, pass.n = 1, pass.tokens = made.tokens + at - who.rows;
            pass.position = pass.slot = slots.data(), pass.row = pass.seen = who.row, pass.keys = *most + 1;
            const bool alike = *least == *most;
            if (!alike) {
                mask.resize(size_t(live * pass.keys));
                for (int64_t i = 0; i < live; ++i)
                    for (int64_t k = 0; k < pass.keys; ++k) mask[size_t(i * pass.keys + k)] = k <= slots[size_t(i)];
            }
            for (Pass::Kind& kind : pass.kinds) {
                kind.mask = alike ? nullptr : mask.data();
                kind.mask_step[0] = pass.keys, kind.mask_step[1] = pass.keys;
            }
            model.forward(pass, made.states + at * width, made.logits + at * vocab, threads);
        }
#pragma omp parallel for num_threads(int(std::min<int64_t>(threads, live))) if (live > 1)
        for (int64_t i = 0; i < live; ++i) {
            float* law = made.laws + (at + i) * who.size;
            soften_all(made.logits + (at + i) * vocab, who.size, who.temperature[i], law);
            float* room = numbers(whole + whole / BLOCK);
            made.tokens[at + i] = first_arrival(
                law, who.size, whole, who.keys[i * who.steps + step], who.high, who.low, room, room + whole
            );
        }
    }
}

}  // namespace
