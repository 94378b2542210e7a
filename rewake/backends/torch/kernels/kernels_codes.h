// Weights in their tiles (abi.h: RwLinear) x a block of rows. Included once per instruction set, before kernels_linear.h.
//
// A row of a group of columns is an exact sum of integers, times the row's step and the group's scale; groups are added in
// the order of the columns. Rows share the unpacking of codes and nothing else.

constexpr int COLUMNS = INPUT_GROUP;
constexpr int GROUP_PAIRS = COLUMNS / 2;
template <int BITS> constexpr size_t CODE_BYTES = 4 * BITS * OUTPUT_TILE;  // of a group of a tile
template <int BITS> constexpr size_t GROUP_BYTES = CODE_BYTES<BITS> + 4 * OUTPUT_TILE;
constexpr int SUPER_GROUPS = SUPER_GROUP / COLUMNS;
constexpr size_t TERM_BYTES = 2 * SUPER_GROUPS * OUTPUT_TILE;
template <int BITS> constexpr size_t SUPER_BYTES = SUPER_GROUPS * CODE_BYTES<BITS> + TERM_BYTES + 4 * OUTPUT_TILE;
template <int BITS> constexpr int LOW_BITS = BITS == 8 ? 8 : 4;          // of a code, in its first plane
template <int BITS> constexpr int HIGH_BITS = BITS - LOW_BITS<BITS>;     // in its second

typedef int16_t VW __attribute__((vector_size(4 * W)));  // words

// A tile of coded weights, by how they are coded.
template <int BITS> struct CodesTile {
    const uint8_t* data;
    CodesTile(const RwLinear& w, int64_t tile) : data(w.data + tile * (w.inputs / COLUMNS) * GROUP_BYTES<BITS>) {}
};
template <int BITS> struct SuperTile {
    const uint8_t* data;
    SuperTile(const RwLinear& w, int64_t tile) : data(w.data + tile * (w.inputs / SUPER_GROUP) * SUPER_BYTES<BITS>) {}
};
template <class Act> inline auto on_tile(const RwLinear& w, int64_t tile, Act act) {
    switch (w.kind) {
        case CODES4: return act(CodesTile<4>(w, tile));
        case CODES5: return act(CodesTile<5>(w, tile));
        case CODES8: return act(CodesTile<8>(w, tile));
        case SUPER4: return act(SuperTile<4>(w, tile));
        case SUPER5: return act(SuperTile<5>(w, tile));
        default: return act(SuperTile<6>(w, tile));
    }
}

// Pair p of a group, from the dwords of its planes.
template <int BITS> inline VI code_pair(VI low, VI high, int p) {
    const VI pair = pair_of<LOW_BITS<BITS>>(low, p % PAIRS<LOW_BITS<BITS>>);
    if constexpr (HIGH_BITS<BITS> == 0) return pair;
    const int at = HIGH_BITS<BITS> * p % 16;
    const VI moved = at < 4 ? high << (4 - at) : high >> (at - 4);
    return pair | (moved & splat_int(BITS == 5 ? 0x00100010 : 0x00300030));
}

// Dword d of a group's first plane, and the one that has what is above its codes.
inline VI low_dword(const uint8_t* codes, int d) { return load_int(codes + 4 * d * OUTPUT_TILE); }
template <int BITS> inline VI high_dword(const uint8_t* codes, int d) {
    return HIGH_BITS<BITS> ? low_dword(codes, 4 + HIGH_BITS<BITS> * d / 4) : low_dword(codes, d);
}

// Vectors of a tile that are multiplied at a time: they share the activations that are spread over the lanes.
constexpr int N = OUTPUT_TILE > W ? 2 : 1;
typedef VF Floats[N];
typedef VI Ints[N];

// Products of pairs [FIRST, LAST) of a group, less `from` in each half, with R rows.
template <int BITS, int R, int FIRST, int LAST, bool CENTRED> inline void add_products(const uint8_t* codes, const int32_t* pairs, Ints (&sum)[R]) {
    constexpr int PER = PAIRS<LOW_BITS<BITS>>;
    UNROLL
    for (int d = FIRST / PER; d < LAST / PER; d++) {
        __builtin_prefetch(codes + AHEAD + 4 * d * OUTPUT_TILE);
        Ints low, high;
        UNROLL
        for (int n = 0; n < N; n++) low[n] = low_dword(codes + 4 * W * n, d), high[n] = high_dword<BITS>(codes + 4 * W * n, d);
        UNROLL
        for (int i = 0; i < PER; i++) {
            Ints k;
            UNROLL
            for (int n = 0; n < N; n++) {
                k[n] = code_pair<BITS>(low[n], high[n], PER * d + i);
                if constexpr (CENTRED) k[n] = (VI)((VW)k[n] - (VW)splat_int((1 << (BITS - 1)) * 0x00010001));
            }
            UNROLL
            for (int r = 0; r < R; r++) {
                const VI both = splat_int(pairs[(PER * d + i) * R + r]);
                UNROLL
                for (int n = 0; n < N; n++) sum[r][n] = dot16(sum[r][n], k[n], both);
            }
        }
    }
}

template <class V, int R, int C> inline void clear(V (&x)[R][C]) {
    UNROLL
    for (int r = 0; r < R; r++) {
        UNROLL
        for (int c = 0; c < C; c++) x[r][c] = V{};
    }
}

// The inputs of a block of R rows, group by group.
template <int R> struct Block {
    const int32_t* pairs;
    const float *steps, *sums;
    Block(const Inputs& in, int64_t first) {
        const int64_t groups = in.columns / COLUMNS;
        pairs = (const int32_t*)in.pairs + first * in.columns / 2;
        steps = in.steps + first * groups, sums = in.sums + first * groups;
    }
    void next() { pairs += R * GROUP_PAIRS, steps += R, sums += R; }
};

// One group, whose weights are code * scale + minimum.
template <int BITS, int R> inline void add_group(const uint8_t* codes, const Block<R>& in, const Floats& scale, const Floats& minimum, Floats (&y)[R]) {
    Ints sum[R];
    clear(sum);
    add_products<BITS, R, 0, GROUP_PAIRS, false>(codes, in.pairs, sum);
    UNROLL
    for (int r = 0; r < R; r++) {
        const VF step = splat(in.steps[r]), total = splat(in.sums[r]);
        UNROLL
        for (int n = 0; n < N; n++) y[r][n] = fma(minimum[n], total, fma(to_float(sum[r][n]) * step, scale[n], y[r][n]));
    }
}

template <int R> inline void store_lanes(const Floats (&of)[R], int lane, float* y) {
    UNROLL
    for (int r = 0; r < R; r++) {
        UNROLL
        for (int n = 0; n < N; n++) store(y + r * OUTPUT_TILE + lane + n * W, of[r][n]);
    }
}

// One tile x R rows -> y[R][16].
template <int R, int BITS> void multiply_rows(CodesTile<BITS> tile, const Inputs& in, int64_t first, float* y) {
    const int groups = in.columns / COLUMNS;
    for (int lane = 0; lane < OUTPUT_TILE; lane += N * W) {
        const uint8_t* at = tile.data;
        Block<R> block(in, first);
        Floats of[R];
        clear(of);
        for (int g = 0; g < groups; g++, at += GROUP_BYTES<BITS>, block.next()) {
            Floats scale, minimum;
            UNROLL
            for (int n = 0; n < N; n++) {
                const uint8_t* terms = at + CODE_BYTES<BITS> + 2 * (lane + n * W);
                scale[n] = load_f16(terms), minimum[n] = load_f16(terms + 2 * OUTPUT_TILE);
            }
            add_group<BITS, R>(at + 4 * lane, block, scale, minimum, of);
        }
        store_lanes(of, lane, y);
    }
}

template <int R, int BITS> void multiply_rows(SuperTile<BITS> tile, const Inputs& in, int64_t first, float* y) {
    const int supers = in.columns / SUPER_GROUP;
    for (int lane = 0; lane < OUTPUT_TILE; lane += N * W) {
        const uint8_t* at = tile.data;
        Block<R> block(in, first);
        Floats of[R];
        clear(of);
        for (int s = 0; s < supers; s++, at += SUPER_BYTES<BITS>) {
            const uint8_t *terms = at + SUPER_GROUPS * CODE_BYTES<BITS> + lane, *shared = terms + TERM_BYTES + lane;
            Floats scales, minima;  // what those of its groups are multiples of
            UNROLL
            for (int n = 0; n < N; n++) scales[n] = load_f16(shared + 2 * n * W), minima[n] = load_f16(shared + 2 * (OUTPUT_TILE + n * W));
            for (int g = 0; g < SUPER_GROUPS; g++, terms += 2 * OUTPUT_TILE, block.next()) {
                Floats scale, minimum;
                UNROLL
                for (int n = 0; n < N; n++) {
                    scale[n] = scales[n] * to_float(bytes(terms + n * W));
                    minimum[n] = minima[n] * to_float(bytes(terms + OUTPUT_TILE + n * W));
                }
                add_group<BITS, R>(at + g * CODE_BYTES<BITS> + 4 * lane, block, scale, minimum, of);
            }
        }
        store_lanes(of, lane, y);
    }
}

template <int R> void multiply_rows(SuperTile<6> tile, const Inputs& in, int64_t first, float* y) {
    const int supers = in.columns / SUPER_GROUP;
    for (int lane = 0; lane < OUTPUT_TILE; lane += N * W) {
        const uint8_t* at = tile.data;
        Block<R> block(in, first);
        Floats of[R];
        clear(of);
        for (int s = 0; s < supers; s++, at += SUPER_BYTES<6>) {
            const uint8_t *terms = at + SUPER_GROUPS * CODE_BYTES<6> + lane, *shared = terms + TERM_BYTES + lane;
            Floats scales;
            UNROLL
            for (int n = 0; n < N; n++) scales[n] = load_f16(shared + 2 * n * W);
            for (int g = 0; g < SUPER_GROUPS; g++, terms += 2 * OUTPUT_TILE, block.next()) {
                Ints left[R], right[R];
                clear(left), clear(right);
                const uint8_t* codes = at + g * CODE_BYTES<6> + 4 * lane;
                add_products<6, R, 0, GROUP_PAIRS / 2, true>(codes, block.pairs, left);
                add_products<6, R, GROUP_PAIRS / 2, GROUP_PAIRS, true>(codes, block.pairs, right);
                UNROLL
                for (int n = 0; n < N; n++) {
                    const VF of_left = scales[n] * to_float(signed_bytes(terms + n * W));
                    const VF of_right = scales[n] * to_float(signed_bytes(terms + OUTPUT_TILE + n * W));
                    UNROLL
                    for (int r = 0; r < R; r++) {
                        const VF step = splat(block.steps[r]);
                        of[r][n] = fma(to_float(right[r][n]) * step, of_right, fma(to_float(left[r][n]) * step, of_left, of[r][n]));
                    }
                }
            }
        }
        store_lanes(of, lane, y);
    }
}

// The same for plain bfloat16 weights.
template <int R> void multiply_plain(const RwLinear& w, int64_t tile, const Inputs& in, int64_t first, float* y) {
    const int count = w.inputs / 2;
    const int64_t at = first * in.columns / 2;
    const int32_t *high = (const int32_t*)in.high + at, *low = (const int32_t*)in.low + at;
    for (int lane = 0; lane < OUTPUT_TILE; lane += W) {
        const uint8_t* from = w.data + (tile * count * OUTPUT_TILE + lane) * 4;
        VF of_high[R], of_low[R];
        UNROLL
        for (int r = 0; r < R; r++) of_high[r] = of_low[r] = splat(0);
        for (int p = 0; p < count; p++, from += 4 * OUTPUT_TILE) {
            __builtin_prefetch(from + AHEAD);
            const VI k = load_int(from);
            UNROLL
            for (int r = 0; r < R; r++) {
                of_high[r] = dot_bf16(of_high[r], k, splat_int(high[p * R + r]));
                of_low[r] = dot_bf16(of_low[r], k, splat_int(low[p * R + r]));
            }
        }
        UNROLL
        for (int r = 0; r < R; r++) store(y + r * OUTPUT_TILE + lane, of_high[r] + of_low[r]);
    }
}

// Two weights of one output: those of a pair of columns.
struct Pair {
    float first, second;
};

template <int BITS> inline Pair codes_at(const uint8_t* codes, int lane, int pair) {
    constexpr int LOW = LOW_BITS<BITS>, HIGH = HIGH_BITS<BITS>, PER = PAIRS<LOW>;
    const auto dword = [&](int d) { return (uint32_t)pair_at(codes + 4 * (d * OUTPUT_TILE + lane)); };
    const auto both = [](uint32_t of, int at, int bits) {
        return Pair{(float)(of >> at & ((1 << bits) - 1)), (float)(of >> (16 + at) & ((1 << bits) - 1))};
    };
    Pair code = both(dword(pair / PER), LOW * (pair % PER), LOW);
    if constexpr (HIGH > 0) {
        const Pair above = both(dword(4 + HIGH * pair / 16), HIGH * pair % 16, HIGH);
        code.first += 16 * above.first, code.second += 16 * above.second;
    }
    return code;
}

template <int BITS> inline Pair pair_in(CodesTile<BITS> tile, int lane, int pair) {
    const uint8_t *group = tile.data + pair / GROUP_PAIRS * GROUP_BYTES<BITS>, *terms = group + CODE_BYTES<BITS> + 2 * lane;
    const Pair code = codes_at<BITS>(group, lane, pair % GROUP_PAIRS);
    const float scale = from_f16(terms), minimum = from_f16(terms + 2 * OUTPUT_TILE);
    return {code.first * scale + minimum, code.second * scale + minimum};
}

template <int BITS> inline Pair pair_in(SuperTile<BITS> tile, int lane, int pair) {
    const uint8_t* super = tile.data + pair / (SUPER_GROUP / 2) * SUPER_BYTES<BITS>;
    const int in_super = pair % (SUPER_GROUP / 2), group = in_super / GROUP_PAIRS;
    const uint8_t *terms = super + SUPER_GROUPS * CODE_BYTES<BITS>, *shared = terms + TERM_BYTES + 2 * lane;
    const Pair code = codes_at<BITS>(super + group * CODE_BYTES<BITS>, lane, in_super % GROUP_PAIRS);
    if constexpr (BITS == 6) {
        const float scale = from_f16(shared) * (float)(int8_t)terms[in_super / (GROUP_PAIRS / 2) * OUTPUT_TILE + lane];
        return {(code.first - 32) * scale, (code.second - 32) * scale};
    }
    const uint8_t* of_group = terms + group * 2 * OUTPUT_TILE + lane;
    const float scale = from_f16(shared) * of_group[0], minimum = from_f16(shared + 2 * OUTPUT_TILE) * of_group[OUTPUT_TILE];
    return {code.first * scale + minimum, code.second * scale + minimum};
}

inline Pair pair_at_output(const RwLinear& w, int64_t output, int pair) {
    const int64_t tile = output / OUTPUT_TILE;
    const int lane = (int)(output % OUTPUT_TILE);
    if (w.kind != PLAIN) return on_tile(w, tile, [=](auto of) { return pair_in(of, lane, pair); });
    const uint32_t both = (uint32_t)pair_at(w.data + ((tile * w.inputs / 2 + pair) * OUTPUT_TILE + lane) * 4);
    return {from_bf16((uint16_t)both), from_bf16((uint16_t)(both >> 16))};
}
