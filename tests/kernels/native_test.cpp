// Self-test of the kernel library, meant to run under AddressSanitizer and UndefinedBehaviorSanitizer:
//
//     c++ -std=c++17 -pthread -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -ffp-contract=off -Wno-psabi \
//         -I rewake/backends/torch/kernels tests/kernels/native_test.cpp -o native_test && ./native_test
//
// Appends random K and V and attends to them on every instruction set, in arenas of exactly the bytes they need, and
// compares with a slow reference in double over what was stored.
#define REWAKE_POISON
#include "native.cpp"

#include <cstdio>
#include <memory>
#include <random>

namespace {

std::mt19937 rng(1);
double normal() { return std::normal_distribution<double>()(rng); }
int pick(std::initializer_list<int> from) { return from.begin()[rng() % from.size()]; }

struct Shape {
    int kv_heads, share, k_dim, v_dim, group, k_prefix, window;
    bool raw;
    float cap;
    std::vector<std::pair<int, int>> seqs;  // tokens, query rows
};

RwLayout layout_of(const Shape& s, int k_bits, int v_bits) {
    RwLayout l = {};
    l.kv_heads = s.kv_heads, l.k_dim = s.k_dim, l.v_dim = s.k_prefix ? 0 : s.v_dim, l.group = s.group, l.k_bits = k_bits, l.v_bits = v_bits;
    int64_t at = 0;
    const auto codes = [&](int dim, int bits) {
        at += (int64_t)s.kv_heads * PAGE * (bits == 16 ? dim : round_up(dim, s.group)) * bits / 8;
    };
    const auto terms = [&](int dim, int bits) { at += bits == 16 ? 0 : (int64_t)s.kv_heads * PAGE * ((dim + s.group - 1) / s.group) * 2; };
    codes(l.k_dim, k_bits), l.k_scales = at;
    terms(l.k_dim, k_bits), l.k_biases = at;
    terms(l.k_dim, k_bits), l.v_codes = at;
    codes(l.v_dim, v_bits), l.v_scales = at;
    terms(l.v_dim, v_bits), l.v_biases = at;
    terms(l.v_dim, v_bits), l.layer_bytes = at;
    l.page_bytes = 2 * at;  // two layers; the second is used
    return l;
}

// What is stored of a token, K still as it was coded.
std::vector<double> stored(const uint8_t* page, const RwLayout& l, int head, int row, bool v) {
    const portable::Side side = portable::side_of(page + l.layer_bytes, l, head, v);
    const uint8_t* codes = side.codes + row * side.row_bytes;
    std::vector<double> x(v ? l.v_dim : l.k_dim);
    for (size_t i = 0; i < x.size(); i++) {
        const size_t at = (size_t)row * side.groups + i / l.group;
        if (side.bits == 16) {
            uint16_t bits;
            memcpy(&bits, codes + 2 * i, 2);
            x[i] = portable::from_bf16(bits);
        } else {
            const int code = side.bits == 8 ? codes[i] : (codes[i / 2] >> (i % 2 * 4)) & 15;
            x[i] = (double)code * portable::from_bf16(side.scales[at]) + portable::from_bf16(side.biases[at]);
        }
    }
    return x;
}

void turn(std::vector<double>& x) {
    std::vector<float> f(x.begin(), x.end());
    portable::rotate(f.data(), (int)f.size());
    x.assign(f.begin(), f.end());
}

struct World {
    Shape shape;
    RwLayout layouts[CODECS] = {};
    std::vector<int64_t> table, append_pages;
    std::vector<uint8_t> codecs, append_codecs;
    std::vector<int32_t> starts{0}, lengths, append_rows;
    std::vector<float> k, v, q, mean, sinks;
    std::unique_ptr<uint8_t[]> arena;
    int64_t arena_bytes = 0;
    int max_pages = 1;
    RwLayer layer = {};

    explicit World(Shape s) : shape(std::move(s)) {
        if (shape.raw)
            layouts[3] = layout_of(shape, 16, 16);
        else
            layouts[0] = layout_of(shape, 4, 4), layouts[1] = layout_of(shape, 8, 4), layouts[2] = layout_of(shape, 8, 8);
        for (auto [length, rows] : shape.seqs) {
            max_pages = std::max(max_pages, (length + PAGE - 1) / PAGE);
            lengths.push_back(length), starts.push_back(starts.back() + rows);
        }
        for (auto [length, rows] : shape.seqs)
            for (int p = 0; p < max_pages; p++) {
                codecs.push_back((uint8_t)(shape.raw ? 3 : rng() % 3));
                table.push_back(p * PAGE < length ? arena_bytes : 0);
                if (p * PAGE < length) arena_bytes += layouts[codecs.back()].page_bytes;
            }
        arena.reset(new uint8_t[arena_bytes]);  // no byte more: reading past a page's end is caught
        memset(arena.get(), 0xFF, arena_bytes);
        const int heads = shape.kv_heads * shape.share;
        for (int i = 0; i < shape.kv_heads * shape.k_dim; i++) mean.push_back((float)normal());
        for (int i = 0; i < heads; i++) sinks.push_back((float)normal());
        for (int i = 0; i < starts.back() * heads * shape.k_dim; i++) q.push_back((float)normal());
        layer = {sinks.data(), mean.data(), (float)(1 / std::sqrt((double)shape.k_dim)), shape.cap, 1, shape.window, shape.k_prefix};
    }

    RwBatch batch() const {
        return {table.data(),        codecs.data(),       starts.data(), lengths.data(), append_pages.data(),
                append_rows.data(), append_codecs.data(), (int)lengths.size(), max_pages, starts.back()};
    }

    void store(int isa) {
        int tokens = 0;
        for (size_t s = 0; s < lengths.size(); s++)
            for (int t = 0; t < lengths[s]; t++, tokens++) {
                append_pages.push_back(table[s * max_pages + t / PAGE]);
                append_codecs.push_back(codecs[s * max_pages + t / PAGE]);
                append_rows.push_back(t % PAGE);
            }
        for (int i = 0; i < tokens * shape.kv_heads * shape.k_dim; i++) k.push_back((float)normal());
        for (int i = 0; i < tokens * shape.kv_heads * shape.v_dim; i++) v.push_back((float)normal());
        RwBatch b = batch();
        b.tokens = tokens;
        const int bad = rw_append(isa, arena.get(), arena_bytes, layouts, &b, &layer, shape.kv_heads, k.data(), shape.kv_heads * shape.k_dim,
                                  shape.k_dim, 0, v.data(), shape.kv_heads * shape.v_dim, shape.v_dim, 0, 1);
        if (bad) std::printf("append refused: %d\n", bad), std::exit(1);
    }

    double error(int isa) {
        const int heads = shape.kv_heads * shape.share;
        std::vector<float> out((size_t)starts.back() * heads * shape.v_dim);
        const RwBatch b = batch();
        const int bad = rw_attend(isa, arena.get(), arena_bytes, layouts, &b, &layer, heads, q.data(), (int64_t)heads * shape.k_dim, shape.k_dim,
                                  0, out.data(), 2);
        if (bad) std::printf("attend refused: %d\n", bad), std::exit(1);
        double worst = 0, largest = 1e-9;
        for (size_t s = 0; s < lengths.size(); s++)
            for (int row = starts[s]; row < starts[s + 1]; row++)
                for (int h = 0; h < heads; h++) {
                    const std::vector<double> want = reference((int)s, row, h);
                    for (int d = 0; d < shape.v_dim; d++) {
                        worst = std::max(worst, std::fabs(want[d] - out[((size_t)row * heads + h) * shape.v_dim + d]));
                        largest = std::max(largest, std::fabs(want[d]));
                    }
                }
        return worst / largest;
    }

    std::vector<double> reference(int s, int row, int h) const {
        const int head = h / shape.share, position = lengths[s] - (starts[s + 1] - row);
        const float* query = q.data() + ((size_t)row * shape.kv_heads * shape.share + h) * shape.k_dim;
        std::vector<double> out(shape.v_dim);
        double total = std::exp(sinks[h]);
        for (int t = shape.window ? std::max(0, position - shape.window + 1) : 0; t <= position; t++) {
            const int64_t entry = (int64_t)s * max_pages + t / PAGE;
            const RwLayout& l = layouts[codecs[entry]];
            std::vector<double> key = stored(arena.get() + table[entry], l, head, t % PAGE, false);
            if (!shape.raw) {
                turn(key);
                for (int d = 0; d < shape.k_dim; d++) key[d] += mean[head * shape.k_dim + d];
            }
            const std::vector<double> value = shape.k_prefix ? key : stored(arena.get() + table[entry], l, head, t % PAGE, true);
            double score = 0;
            for (int d = 0; d < shape.k_dim; d++) score += query[d] * key[d];
            score *= layer.scale;
            if (shape.cap > 0) score = shape.cap * std::tanh(score / shape.cap);
            total += std::exp(score);
            for (int d = 0; d < shape.v_dim; d++) out[d] += std::exp(score) * value[d];
        }
        for (double& x : out) x /= total;
        return out;
    }
};

// Of few rows, or of prompts that fill tile registers.
Shape random_shape(bool prompts) {
    Shape s = {};
    const std::pair<int, int> dims[] = {{64, 64}, {80, 80}, {96, 96}, {128, 128}, {192, 128}, {256, 256}, {8, 24}, {576, 512}, {80, 64}};
    const int which = (int)(rng() % 9);
    s.k_dim = dims[which].first, s.v_dim = dims[which].second;
    s.k_prefix = which >= 7 ? s.v_dim : 0;
    s.kv_heads = which >= 7 ? 1 : pick({1, 2});
    s.share = pick({1, 2, 3, 5, 7});
    s.group = prompts ? 64 : pick({32, 64});
    s.window = pick({0, 0, 1, 64, 100, 257});
    s.raw = !prompts && rng() % 4 == 0;
    s.cap = (float)pick({0, 0, 5});
    for (int n = pick({1, 2, 3}); n > 0; n--) {
        const int length = pick({0, 1, 2, 63, 65, 255, 256, 257, 513, 600});
        s.seqs.push_back({length, std::min(length, prompts ? pick({1, 33, 47, 200}) : pick({0, 1, 1, 3, 20}))});
    }
    return s;
}

// A random decoder of two layers, its weights in memory of exactly their size, and a batch of sequences that begin.
struct Decoder {
    static constexpr int HIDDEN = 256, INTERMEDIATE = 256, Q_HEADS = 4, KV_HEADS = 2, DIM = 32, VOCABULARY = 40, ROWS = 11;
    std::vector<std::unique_ptr<uint8_t[]>> kept;
    RwDenseLayer layers[2];
    RwDense model = {};
    RwLayout layouts[CODECS] = {};

    float* vector(int n, float mean) {
        kept.emplace_back(new uint8_t[n * sizeof(float)]);
        float* x = (float*)kept.back().get();
        for (int i = 0; i < n; i++) x[i] = mean + 0.1f * (float)normal();
        return x;
    }

    RwLinear linear(int outputs, int inputs, int kind) {
        const int tiles = (outputs + OUTPUT_TILE - 1) / OUTPUT_TILE, bits = kind == CODES4 ? 4 : kind == CODES5 ? 5 : 8;
        const int super_bits = kind == SUPER4 ? 4 : kind == SUPER5 ? 5 : kind == SUPER6 ? 6 : 0;
        const size_t super = (size_t)super_bits * 512 + 320;
        const size_t bytes = kind == PLAIN  ? (size_t)tiles * inputs * OUTPUT_TILE * 2
                             : super_bits ? tiles * (inputs / SUPER_GROUP) * super
                                          : (size_t)tiles * (inputs / INPUT_GROUP) * (bits + 1) * 64;
        kept.emplace_back(new uint8_t[bytes]);
        uint8_t* data = kept.back().get();
        if (kind == PLAIN)
            for (size_t i = 0; i < bytes; i += 2) {
                const uint16_t value = portable::to_bf16((float)normal() * 0.1f);
                memcpy(data + i, &value, 2);
            }
        else if (super_bits)
            for (size_t at = 0; at < bytes; at += super) {
                for (size_t i = 0; i < super - 64; i++) data[at + i] = (uint8_t)rng();
                for (int i = 0; i < 2 * OUTPUT_TILE; i++) {  // 2^-14, and about the minimum that brings the mean to 0
                    const uint16_t value = i < OUTPUT_TILE ? 0x0400 : 0x9000;
                    memcpy(data + at + super - 64 + 2 * i, &value, 2);
                }
            }
        else
            for (size_t group = 0; group < bytes; group += (bits + 1) * 64) {
                for (int i = 0; i < bits * 64; i++) data[group + i] = (uint8_t)rng();
                for (int i = 0; i < 2 * OUTPUT_TILE; i++) {  // scales of 2^-7 or 2^-11, minima that bring the mean to 0
                    const uint16_t value = (uint16_t)((bits == 4 ? 0x2000 : 0x1000) + (i < OUTPUT_TILE ? 0 : bits == 4 ? 0x8C00 : 0x9C00));
                    memcpy(data + group + bits * 64 + 2 * i, &value, 2);
                }
            }
        return {data, vector(tiles * OUTPUT_TILE, 0), outputs, inputs, kind};
    }

    Decoder(bool raw, bool sandwich) {
        const int q = Q_HEADS * DIM, kv = KV_HEADS * DIM;
        for (int l = 0; l < 2; l++)
            layers[l] = {linear(q, HIDDEN, l ? CODES4 : SUPER4), linear(kv, HIDDEN, CODES8), linear(kv, HIDDEN, PLAIN),
                         linear(HIDDEN, q, l ? CODES5 : CODES4), linear(INTERMEDIATE, HIDDEN, l ? SUPER5 : SUPER6),
                         linear(INTERMEDIATE, HIDDEN, PLAIN), linear(HIDDEN, INTERMEDIATE, l ? CODES8 : SUPER6),
                         vector(HIDDEN, 1), vector(HIDDEN, 1), sandwich ? vector(HIDDEN, 1) : nullptr, sandwich ? vector(HIDDEN, 1) : nullptr,
                         l ? vector(DIM, 1) : nullptr, l ? vector(DIM, 1) : nullptr, {nullptr, nullptr, 0.2f, 0, l, 0, 0}, 0, l};
        model = {layers, linear(VOCABULARY, HIDDEN, SUPER6), linear(VOCABULARY, HIDDEN, SUPER5), vector(HIDDEN, 1), vector(DIM, 0.5f),
                 2, HIDDEN, INTERMEDIATE, Q_HEADS, KV_HEADS, DIM, 1e-5f, FIXED_INPUTS | PLAIN_INPUTS, 2, sandwich ? GELU_TANH : SILU,
                 sandwich ? 8.f : 1.f, sandwich ? 30.f : 0.f};
        Shape shape = {};
        shape.kv_heads = KV_HEADS, shape.k_dim = shape.v_dim = DIM, shape.group = 32;
        layouts[raw ? 3 : 0] = layout_of(shape, raw ? 16 : 4, raw ? 16 : 4);
    }

    // Logits of all rows of `seqs` sequences of `length` tokens each, `step` tokens a step.
    std::vector<float> run(int isa, int seqs, int step, int threads, int length = ROWS) {
        const uint8_t codec = layouts[3].kv_heads ? 3 : 0;
        const int64_t page = layouts[codec].page_bytes;
        std::unique_ptr<uint8_t[]> arena(new uint8_t[page * seqs]);
        memset(arena.get(), 0xFF, page * seqs);
        std::vector<float> logits((size_t)seqs * length * VOCABULARY);
        for (int from = 0; from < length; from += step) {
            const int count = std::min(step, length - from);
            std::vector<int64_t> table, pages;
            std::vector<int32_t> starts{0}, lengths, rows, tokens, positions, wanted;
            for (int s = 0; s < seqs; s++) {
                table.push_back(s * page), lengths.push_back(from + count), starts.push_back(starts.back() + count);
                for (int i = from; i < from + count; i++) {
                    pages.push_back(s * page), rows.push_back(i), positions.push_back(i), tokens.push_back((7 * i + s) % VOCABULARY);
                    wanted.push_back((int)wanted.size());
                }
            }
            const std::vector<uint8_t> codecs(wanted.size() + seqs, codec);
            const RwBatch batch = {table.data(), codecs.data(), starts.data(), lengths.data(), pages.data(), rows.data(), codecs.data(), seqs, 1,
                                   (int)tokens.size()};
            std::vector<float> out(wanted.size() * VOCABULARY);
            const int bad = rw_step(isa, arena.get(), page * seqs, layouts, &batch, &model, tokens.data(), positions.data(), wanted.data(),
                                    (int)wanted.size(), out.data(), threads);
            if (bad) std::printf("step refused: %d\n", bad), std::exit(1);
            for (int s = 0; s < seqs; s++)
                memcpy(&logits[((size_t)s * length + from) * VOCABULARY], &out[(size_t)s * count * VOCABULARY], count * VOCABULARY * sizeof(float));
        }
        return logits;
    }
};

bool are_close(const std::vector<float>& got, const std::vector<float>& want) {
    double worst = 0, largest = 0;
    for (size_t i = 0; i < got.size(); i++) {
        worst = std::max(worst, std::fabs((double)got[i] - want[i]));
        largest = std::max(largest, std::fabs((double)want[i]));
    }
    std::printf("         whole steps: %.1e from portable\n", worst / largest);
    return worst < 0.05 * largest;  // where a value of K is coded otherwise, a step of 4 bits lies between
}

// The same bits however rows are put into steps; instruction sets differ by rounding.
bool steps_agree(int isa, bool raw, bool sandwich) {
    Decoder decoder(raw, sandwich);
    const std::vector<float> want = decoder.run(PORTABLE, 9, Decoder::ROWS, 1), got = decoder.run(isa, 9, Decoder::ROWS, 2);
    if (decoder.run(isa, 9, 1, 1) != got || decoder.run(isa, 9, 3, 3) != got) return false;
    const std::vector<float> alone = decoder.run(isa, 1, 2, 1);
    if (!std::equal(alone.begin(), alone.end(), got.begin())) return false;
    return are_close(got, want);
}

// The same of prompts in tile registers, where there are some: on any number of threads, and alone.
bool prompts_agree(int isa) {
    constexpr int LENGTH = 47;
    Decoder decoder(true, true);
    const std::vector<float> want = decoder.run(PORTABLE, 3, LENGTH, 1, LENGTH), got = decoder.run(isa, 3, LENGTH, 2, LENGTH);
    const std::vector<float> alone = decoder.run(isa, 1, LENGTH, 3, LENGTH);
    return decoder.run(isa, 3, LENGTH, 1, LENGTH) == got && std::equal(alone.begin(), alone.end(), got.begin()) && are_close(got, want);
}

// Packs random codes of `kind`, in memory of exactly their size, and reads every weight back from its tile.
bool packs(int kind, int bits) {
    constexpr int OUTPUTS = 21, INPUTS = 2 * SUPER_GROUP;  // the last tile is not whole
    const bool super = kind >= SUPER4, signed_terms = kind == SUPER6;
    const auto random_bytes = [](size_t n, int below) {
        std::unique_ptr<uint8_t[]> x(new uint8_t[n]);
        for (size_t i = 0; i < n; i++) x[i] = (uint8_t)(rng() % below);
        return x;
    };
    const auto random_halves = [](size_t n) {  // from 1 to 2
        std::unique_ptr<uint16_t[]> x(new uint16_t[n]);
        for (size_t i = 0; i < n; i++) x[i] = (uint16_t)(0x3C00 + rng() % 0x400);
        return x;
    };
    const int groups = INPUTS / INPUT_GROUP, supers = INPUTS / SUPER_GROUP;
    const auto codes = random_bytes((size_t)OUTPUTS * INPUTS * (kind == PLAIN ? 2 : 1), kind == PLAIN ? 64 : 1 << bits);
    const auto small = random_bytes((size_t)OUTPUTS * groups * (signed_terms ? 2 : 1), 256), small_minima = random_bytes((size_t)OUTPUTS * groups, 256);
    const auto scales = random_halves((size_t)OUTPUTS * groups), minima = random_halves((size_t)OUTPUTS * groups);
    RwCodes w = {codes.get(), nullptr, nullptr, nullptr, nullptr, OUTPUTS, INPUTS, bits};
    if (kind != PLAIN) w.scales = super ? (const void*)small.get() : scales.get();
    if (kind != PLAIN && !signed_terms) w.minima = super ? (const void*)small_minima.get() : minima.get();
    if (super) w.scale = scales.get(), w.minimum = signed_terms ? nullptr : minima.get();
    const size_t terms = kind == PLAIN ? 0 : super ? (size_t)supers * (SUPER_GROUP + 4 * OUTPUT_TILE) : (size_t)groups * 4 * OUTPUT_TILE;
    const size_t tile_bytes = (size_t)INPUTS * OUTPUT_TILE * bits / 8 + terms;
    std::unique_ptr<uint8_t[]> tiles(new uint8_t[2 * tile_bytes]());
    rw_pack(&w, (int64_t)tile_bytes, tiles.get());
    const RwLinear linear = {tiles.get(), nullptr, OUTPUTS, INPUTS, kind};
    const auto want = [&](int output, int column) {
        const size_t at = (size_t)output * INPUTS + column, group = at / INPUT_GROUP, of_super = at / SUPER_GROUP;
        if (kind == PLAIN) return portable::from_bf16(((const uint16_t*)codes.get())[at]);
        if (signed_terms) return (codes[at] - 32) * (from_f16(&scales[of_super]) * (float)(int8_t)small[at / (INPUT_GROUP / 2)]);
        if (super) return codes[at] * (from_f16(&scales[of_super]) * small[group]) + from_f16(&minima[of_super]) * small_minima[group];
        return codes[at] * from_f16(&scales[group]) + from_f16(&minima[group]);
    };
    for (int output = 0; output < OUTPUTS; output++)
        for (int pair = 0; pair < INPUTS / 2; pair++) {
            const portable::Pair got = portable::pair_at_output(linear, output, pair);
            const int column = portable::paired(pair);
            if (got.first != want(output, column) || got.second != want(output, column + 4)) return false;
        }
    for (int lane = OUTPUTS % OUTPUT_TILE; lane < OUTPUT_TILE; lane++)  // outputs that are not there are 0
        if (portable::pair_at_output(linear, OUTPUT_TILE + lane, 3).first != (signed_terms ? -0.f : 0.f)) return false;
    return true;
}

// Codes of random blocks are below 2^bits, and nothing is read or written beyond them.
bool reads_blocks(int kind, int bytes, int bits) {
    const int count = 3, codes = kind >= Q4_K ? 256 : 32;
    std::unique_ptr<uint8_t[]> blocks(new uint8_t[count * bytes]), out(new uint8_t[count * codes]);
    for (int i = 0; i < count * bytes; i++) blocks[i] = (uint8_t)rng();
    rw_codes(kind, blocks.get(), count, bytes, codes, out.get());
    return std::all_of(out.get(), out.get() + count * codes, [&](uint8_t code) { return code < 1 << bits; });
}

bool packs_all() {
    const int block_bytes[] = {18, 20, 22, 24, 34, 144, 176, 210}, block_bits[] = {4, 4, 5, 5, 8, 4, 5, 6};
    for (int kind = Q4_0; kind <= Q6_K; kind++)
        if (!reads_blocks(kind, block_bytes[kind], block_bits[kind])) return std::printf("blocks %d are read wrongly\n", kind), false;
    const int bits[] = {4, 8, 16, 5, 4, 5, 6};
    for (int kind = CODES4; kind <= SUPER6; kind++)
        if (!packs(kind, bits[kind])) return std::printf("kind %d is packed wrongly\n", kind), false;
    return true;
}

}  // namespace

int main() {
    if (!packs_all()) return 1;
    const char* names[] = {"amx", "avx512", "avx2", "portable"};
    for (int isa = 0; isa < ISAS; isa++) {
        if (!rw_supported(isa)) continue;
        double worst = 0;
        const bool prompts = isa == AMX;  // what is few there, AVX-512 does
        const int rounds = prompts ? 20 : 40;
        for (int i = 0; i < rounds; i++) {
            World world(random_shape(prompts));
            world.store(isa);
            worst = std::max(worst, world.error(isa));
        }
        std::printf("%-8s %d random steps, largest error %.1e of the output's maximum\n", names[isa], rounds, worst);
        if (!(worst < (prompts ? 0x1p-5 : 2e-3)) || !prompts_agree(isa) || !steps_agree(isa, true, false) || !steps_agree(isa, false, false) || !steps_agree(isa, true, true)) return 1;
    }
    return 0;
}
