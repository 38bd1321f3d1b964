// The functions of the kernels for one instruction set, SPRINTER_SET. Tensors are given by their addresses.

#include "draws.h"
#include "pack.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#if defined(__linux__) && defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// Whether the processor has an instruction set, by its name in CMakeLists.txt.
bool has(const char* set) {
    const auto is = [=](const char* name) { return std::strcmp(set, name) == 0; };
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    if (is("avx2")) return avx2;
    if (is("avx512"))
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#elif defined(__APPLE__)
    if (is("neon")) return true;  // all of Apple's own processors
#elif defined(__linux__) && defined(__aarch64__)
    if (is("neon")) return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
    return is("plain");
}

int64_t bytes(int format, int64_t high, int64_t width) {
    return with_format(format, [=](auto kind) {
        return (high + CHANNELS - 1) / CHANNELS * decltype(kind)::block(width);
    });
}

void pack_blocks(
    int format, Address stored, Address order, int64_t high, int64_t width, Address packed, int threads
) {
    with_format(format, [=](auto kind) {
        pack<decltype(kind)>(at<uint8_t>(stored), at<int64_t>(order), high, width, at<uint8_t>(packed), threads);
        return int64_t(0);
    });
}

// y [rows, high] = x [rows, width] times a matrix, plus its bias.
void linear(const Matrix& matrix, Address x, int64_t rows, Address y, int threads) {
    Room& own = room(rows, matrix.width);
#pragma omp parallel num_threads(threads)
    matrix.times(at<float>(x), rows, nullptr, at<float>(y), own);
}

// made [count, width] = rows of a matrix.
void rows_of(const Matrix& matrix, Address ids, int64_t count, Address made) {
    Model::rows_of(matrix, at<int64_t>(ids), count, at<float>(made));
}

using KindGiven = std::tuple<Address, Address, Address, int64_t, int64_t>;  // as Pass::Kind

// half: whether keys and values are in bfloat16. position, row and slot: of each token; null: those of rows 0, 1, ...
// that all go on from `start`.
void forward(
    const Model& model, Address tokens, int64_t batch, int64_t n, int64_t start, Address position, Address row,
    Address slot, const std::vector<Address>& caches, bool half, int64_t slots, int64_t keys, Address seen,
    const std::vector<KindGiven>& kinds,
    const std::vector<std::pair<int64_t, Address>>& taken, Address states, Address logits, int threads
) {
    Pass pass = {batch, n, at<int64_t>(tokens), at<int64_t>(position), at<int64_t>(row), at<int64_t>(slot), {}, slots,
                 keys, at<int64_t>(seen), {}, {}};
    for (const Address one : caches) pass.caches.push_back({at<void>(one), half});
    for (const auto& [cosine, sine, mask, mask_batch, mask_token] : kinds)
        pass.kinds.push_back({at<float>(cosine), at<float>(sine), at<uint8_t>(mask), {mask_batch, mask_token}});
    for (const auto& [layer, to] : taken) pass.taken.push_back({layer, at<float>(to)});
    nb::gil_scoped_release without;
    std::vector<int64_t> own;
    if (!row) {
        own.resize(size_t(2 * batch * n));
        for (int64_t i = 0; i < batch * n; ++i) own[size_t(i)] = i / n, own[size_t(batch * n + i)] = start + i % n;
        pass.row = own.data(), pass.slot = pass.position = own.data() + batch * n;
    }
    model.forward(pass, at<float>(states), at<float>(logits), threads);
}

// Draft steps of rows, see Writers and Written in draws.h.
void draft(
    const Model& model, int64_t rows, int64_t steps, Address row, Address start, Address count, Address temperature,
    Address top_k, Address goal, Address min_p, Address keys, Address high, Address low, int64_t size,
    Address ids, const std::vector<Address>& caches, bool half, int64_t slots,
    const std::vector<std::pair<Address, Address>>& angles,
    Address logits, Address states, Address laws, Address tokens, int threads
) {
    Pass pass = {};
    pass.slots = slots;
    for (const Address one : caches) pass.caches.push_back({at<void>(one), half});
    for (const auto& [cosine, sine] : angles) pass.kinds.push_back({at<float>(cosine), at<float>(sine), nullptr, {0, 0}});
    const Writers who = {rows, steps, at<int64_t>(row), at<int64_t>(start), at<int64_t>(count), at<float>(temperature),
                         at<int64_t>(top_k), at<double>(goal), at<float>(min_p), at<uint64_t>(keys),
                         at<uint32_t>(high), at<uint32_t>(low), size, at<int64_t>(ids)};
    nb::gil_scoped_release without;
    write(model, pass, who, {at<float>(logits), at<float>(states), at<float>(laws), at<int64_t>(tokens)}, threads);
}

}  // namespace

NB_MODULE(SPRINTER_SET, module) {
    const nb::call_guard<nb::gil_scoped_release> without_lock;
    module.def("has", &has);
    module.def("bytes", &bytes);
    module.def("pack", &pack_blocks, without_lock);
    module.def("linear", &linear, without_lock);
    module.def("rows", &rows_of, without_lock);
    module.def("forward", &forward);
    module.def("draft", &draft);
    module.attr("CHANNELS") = CHANNELS;

    nb::class_<Matrix>(module, "Matrix")
        .def(nb::init<>())
        .def("__init__", [](Matrix* made, int64_t format, Address packed, int64_t high, int64_t width, Address bias,
                            int64_t run, int64_t step) {
            new (made) Matrix{format, at<uint8_t>(packed), high, width, at<float>(bias), run, step};
        })
        .def_ro("high", &Matrix::high)
        .def_ro("width", &Matrix::width);
    nb::class_<Norm>(module, "Norm").def("__init__", [](Norm* made, Address weight, Address bias) {
        new (made) Norm{at<float>(weight), at<float>(bias)};
    });
    nb::class_<Layer>(module, "Layer")
        .def(nb::init<>())
        .def_rw("q", &Layer::q)
        .def_rw("k", &Layer::k)
        .def_rw("v", &Layer::v)
        .def_rw("o", &Layer::o)
        .def_rw("gate", &Layer::gate)
        .def_rw("up", &Layer::up)
        .def_rw("down", &Layer::down)
        .def_rw("norm", &Layer::norm)
        .def_rw("query_norm", &Layer::query_norm)
        .def_rw("key_norm", &Layer::key_norm)
        .def_rw("second_norm", &Layer::second_norm)
        .def_rw("after_attention", &Layer::after_attention)
        .def_rw("after_mlp", &Layer::after_mlp)
        .def_rw("width", &Layer::width)
        .def_rw("heads", &Layer::heads)
        .def_rw("kv", &Layer::kv)
        .def_rw("d", &Layer::d)
        .def_rw("turned", &Layer::turned)
        .def_rw("activation", &Layer::activation)
        .def_rw("kind", &Layer::kind)
        .def_rw("centred", &Layer::centred)
        .def_rw("parallel", &Layer::parallel)
        .def_rw("eps", &Layer::eps)
        .def_rw("offset", &Layer::offset)
        .def_rw("scaling", &Layer::scaling)
        .def_rw("cap", &Layer::cap);
    nb::class_<Model>(module, "Model")
        .def(nb::init<>())
        .def_rw("embedding", &Model::embedding)
        .def_rw("positions", &Model::positions)
        .def_rw("head", &Model::head)
        .def("set_layers", [](Model& model, const std::vector<Layer>& layers) { model.layers = layers; })
        .def_rw("norm", &Model::norm)
        .def_rw("eps", &Model::eps)
        .def_rw("offset", &Model::offset)
        .def_rw("scale", &Model::scale)
        .def_rw("cap", &Model::cap)
        .def_rw("centred", &Model::centred);
}
