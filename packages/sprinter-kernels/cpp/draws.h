// Draft steps: the law of a model's logits, a token that is drawn from it, a pass over this token, and so on.
//
// Laws are those of `process` in laws.py, and draws those of random.py: an exponential race. Each row is computed by
// itself, so that its tokens do not depend on the others.

#pragma once

#include "layers.h"

#include <functional>

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

float largest_of(const float* x, int64_t size) {
    Floats most = all(-INFINITY);
    for (int64_t i = 0; i < size; i += WIDE) most = larger(most, load_some(x + i, size - i, -INFINITY));
    return most_of(most);
}

// Greedy: law [size] has all mass on the first largest of the logits, the token that is returned.
int64_t choose_largest(const float* logits, int64_t size, float* law) {
    constexpr int64_t SOME = 1024;  // logits that are searched number by number
    float highest = -INFINITY;
    int64_t from = 0;
    for (int64_t at = 0; at < size; at += SOME) {
        const float own = largest_of(logits + at, std::min(SOME, size - at));
        if (!(own <= highest)) highest = own, from = at;
    }
    const float* last = logits + std::min(from + SOME, size) - 1;
    const int64_t token = std::find(logits + from, last, highest) - logits;
    std::fill(law, law + size, 0.0f);
    law[token] = 1.0f;
    return token;
}

// law [size] = softmax(logits / heat).
void soften_all(const float* logits, int64_t size, float heat, float* law) {
    Floats sum = {};
    const float top = largest_of(logits, size) / heat;
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

// kept [size] = logits of the `many` largest ones, of which `least` is the last; -inf at the others. Of those that are
// `least` the first ones stay.
void keep_largest(const float* logits, int64_t size, float least, int64_t many, float* kept) {
    int64_t ties = many;
    for (int64_t i = 0; i < size; ++i) ties -= logits[i] > least;
    for (int64_t i = 0; i < size; ++i) {
        const bool stays = logits[i] > least || (logits[i] == least && ties-- > 0);
        kept[i] = stays ? logits[i] : -INFINITY;
    }
}

// What a law keeps of its tokens: `top_k` (0: all), those that reach `goal` parts of 2^-50 together (0: all), and those
// that have at least `min_p` of the largest.
struct Truncation {
    int64_t top_k;
    double goal;
    float min_p;
    bool none() const { return top_k == 0 && goal == 0.0 && min_p == 0.0f; }
};

// law [size] of truncated logits, see `process`; kept [size] is room.
void soften_some(const float* logits, int64_t size, float temperature, const Truncation& cut, float* kept, float* law) {
    constexpr int64_t FEW = 256;  // that are sorted first
    // Where one is not a number or infinite there is no order, and no law either.
    const auto ordered = [&] { return std::all_of(logits, logits + size, [](float x) { return x < INFINITY; }); };
    if (cut.none() || !ordered()) return soften_all(logits, size, temperature, law);
    const float* left = logits;
    if (0 < cut.top_k && cut.top_k < size) {
        std::copy(logits, logits + size, kept);
        std::nth_element(kept, kept + cut.top_k - 1, kept + size, std::greater<float>());
        keep_largest(logits, size, kept[cut.top_k - 1], cut.top_k, kept);
        left = kept;
    }
    if (cut.goal > 0.0) {
        soften_all(left, size, temperature, law);
        const auto part = [&](int64_t i) { return std::floor(double(law[i]) * 0x1p50); };  // sums of these are exact
        const auto before = [&](int64_t i, int64_t j) { return left[i] > left[j]; };
        std::vector<int64_t> ids(static_cast<size_t>(size));
        for (int64_t i = 0; i < size; ++i) ids[size_t(i)] = i;
        auto end = ids.begin() + std::min(FEW, size);
        std::nth_element(ids.begin(), end - 1, ids.end(), before);
        double whole = 0.0, mass = 0.0;
        for (auto at = ids.begin(); at != end; ++at) whole += part(*at);
        if (whole < cut.goal) end = ids.end();
        std::sort(ids.begin(), end, before);
        int64_t many = 0;  // a token stays if the mass before it is below the goal
        for (auto at = ids.begin(); at != end && mass < cut.goal; ++at, ++many) mass += part(*at);
        keep_largest(left, size, left[ids[size_t(many - 1)]], many, kept);
        left = kept;
    }
    soften_all(left, size, temperature, law);
    if (cut.min_p > 0.0f) {
        const float least = cut.min_p * *std::max_element(law, law + size);
        Floats sum = {};
        for (int64_t i = 0; i < size; i += WIDE) {
            const Floats made = load_some(law + i, size - i, 0.0f), stays = below(made, least, Floats{}, made);
            store_some(law + i, stays, size - i);
            sum += stays;
        }
        const float whole = total(sum);
        for (int64_t i = 0; i < size; ++i) law[i] /= whole;
    }
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
    const int64_t* top_k;            // of each row, see Truncation
    const double* goal;
    const float* min_p;
    const uint64_t* keys;            // [rows, steps], of the draws
    const uint32_t *high, *low;      // words of the tokens, with room for whole blocks
    int64_t size;                    // of the laws
    const int64_t* ids;              // of their tokens, of a model that knows some alone; null: 0, 1, ...
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
            const float* logits = made.logits + (at + i) * vocab;
            float* law = made.laws + (at + i) * who.size;
            const auto known = [&](int64_t token) { made.tokens[at + i] = who.ids ? who.ids[token] : token; };
            if (who.temperature[i] == 0.0f) {
                known(choose_largest(logits, who.size, law));
                continue;
            }
            float* room = numbers(whole + whole / BLOCK);
            const Truncation cut = {who.top_k[i], who.goal[i], who.min_p[i]};
            soften_some(logits, who.size, who.temperature[i], cut, room, law);
            known(first_arrival(
                law, who.size, whole, who.keys[i * who.steps + step], who.high, who.low, room, room + whole
            ));
        }
    }
}

}  // namespace
