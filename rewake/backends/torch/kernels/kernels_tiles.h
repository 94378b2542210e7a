// Products of many rows with quantised weights, in tile registers (AMX-INT8). Included behind kernels_linear.h, for AVX-512 only.
//
// Activations of 16 bits are a signed byte times 256 and an unsigned one: two products of bytes give the same exact sums of
// integers as one of words, and what is added to a row is the same, in the same order. So a row's bits are those that the
// other kernels give. A tile register multiplies 16 rows x 32 columns with 32 columns x 16 outputs, that is one group.

constexpr int CHUNK = 64;                                 // groups whose codes are unpacked together
constexpr int LEAST_TILED = 16;                           // rows from which tiles are faster
constexpr size_t UNPACKED_BYTES = COLUMNS * OUTPUT_TILE;  // codes of a group of a tile

// A group's codes, less `less` each, as 8 rows of 4 columns x 16 outputs.
template <int BITS> inline void unpack_group(const uint8_t* codes, int less, uint8_t* out) {
    constexpr int PER = PAIRS<LOW_BITS<BITS>>;
    const __m512i by = _mm512_set1_epi8((char)less);
    UNROLL
    for (int octet = 0; octet < COLUMNS / 8; octet++) {
        VI pair[4];
        UNROLL
        for (int i = 0; i < 4; i++) {
            const int d = (4 * octet + i) / PER;
            pair[i] = code_pair<BITS>(low_dword(codes, d), high_dword<BITS>(codes, d), 4 * octet + i);
        }
        UNROLL
        for (int i = 0; i < 2; i++)
            store_int(out + (2 * octet + i) * 64, (VI)_mm512_sub_epi8((__m512i)(pair[i] | (pair[2 + i] << 8)), by));
    }
}

// Some groups of a tile: their codes in bytes, and two vectors of terms each.
struct Strip {
    int groups;
    alignas(64) uint8_t codes[CHUNK * 2 * UNPACKED_BYTES];
    alignas(64) float terms[CHUNK * 2 * OUTPUT_TILE];
    void put_terms(int i, VF a, VF b) { store(terms + 2 * i * OUTPUT_TILE, a), store(terms + (2 * i + 1) * OUTPUT_TILE, b); }
};

template <int BITS> inline void unpack(CodesTile<BITS> tile, int first, Strip& to) {
    for (int i = 0; i < to.groups; i++) {
        const uint8_t *at = tile.data + (first + i) * GROUP_BYTES<BITS>, *terms = at + CODE_BYTES<BITS>;
        unpack_group<BITS>(at, 0, to.codes + i * UNPACKED_BYTES);
        to.put_terms(i, load_f16(terms), load_f16(terms + 2 * OUTPUT_TILE));
    }
}

template <int BITS> inline void unpack(SuperTile<BITS> tile, int first, Strip& to) {
    for (int i = 0; i < to.groups; i++) {
        const int group = (first + i) % SUPER_GROUPS;
        const uint8_t* super = tile.data + (first + i) / SUPER_GROUPS * SUPER_BYTES<BITS>;
        const uint8_t *all = super + SUPER_GROUPS * CODE_BYTES<BITS>, *terms = all + 2 * group * OUTPUT_TILE, *shared = all + TERM_BYTES;
        if constexpr (BITS == 6) {  // each half has a scale: the other one's codes are 0
            uint8_t* codes = to.codes + 2 * i * UNPACKED_BYTES;
            unpack_group<6>(super + group * CODE_BYTES<6>, 32, codes);
            memcpy(codes + 3 * UNPACKED_BYTES / 2, codes + UNPACKED_BYTES / 2, UNPACKED_BYTES / 2);
            memset(codes + UNPACKED_BYTES / 2, 0, UNPACKED_BYTES);
            const VF scale = load_f16(shared);
            to.put_terms(i, scale * to_float(signed_bytes(terms)), scale * to_float(signed_bytes(terms + OUTPUT_TILE)));
        } else {
            unpack_group<BITS>(super + group * CODE_BYTES<BITS>, 0, to.codes + i * UNPACKED_BYTES);
            to.put_terms(i, load_f16(shared) * to_float(bytes(terms)), load_f16(shared + 2 * OUTPUT_TILE) * to_float(bytes(terms + OUTPUT_TILE)));
        }
    }
}

// Tile registers hold something between these two.
struct TileRegisters {
    TileRegisters() {
        struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, COLUMNS, COLUMNS, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, TILED_ROWS, TILED_ROWS, COLUMNS / 4, COLUMNS / 4};
        } config;
        asm volatile("" ::"m"(config) : "memory");
        _tile_loadconfig(&config);
    }
    ~TileRegisters() { _tile_release(); }
};

// The compiler does not know that tiles are loaded from memory and stored to it.
inline void settle() { asm volatile("" ::: "memory"); }

// The two sums of bytes of a group, [2][16 rows][16 outputs].
template <bool SIGNED> inline void multiply_bytes(const uint8_t* in, const uint8_t* codes, int32_t* sums) {
    _tile_loadd(4, in, COLUMNS);
    _tile_loadd(5, in + HALF_BYTES, COLUMNS);
    _tile_loadd(6, codes, 64);
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (SIGNED) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbusd(1, 5, 6);
    } else {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbuud(1, 5, 6);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILED_ROWS * OUTPUT_TILE, 64);
}

inline VF exact_sum(const int32_t* sums, int row) {
    return to_float((load_int(sums + row * OUTPUT_TILE) << 8) + load_int(sums + (TILED_ROWS + row) * OUTPUT_TILE));
}

// y[16 rows][16 outputs] += a strip x a block of rows; the block's inputs begin with the strip's first group.
inline void add_strip(const Strip& strip, const uint8_t* in, const float* steps, const float* sums, float* to) {
    alignas(64) int32_t of[2][2 * TILED_ROWS * OUTPUT_TILE];
    VF y[TILED_ROWS];
    UNROLL
    for (int r = 0; r < TILED_ROWS; r++) y[r] = load(to + r * OUTPUT_TILE);
    multiply_bytes<false>(in, strip.codes, of[0]);
    for (int g = 0; g < strip.groups; g++, steps += TILED_ROWS, sums += TILED_ROWS) {
        if (g + 1 < strip.groups) {  // a group ahead: what tiles store is not to be had at once
            in += 2 * HALF_BYTES;
            multiply_bytes<false>(in, strip.codes + (g + 1) * UNPACKED_BYTES, of[~g & 1]);
        }
        settle();
        const VF scale = load(strip.terms + 2 * g * OUTPUT_TILE), minimum = load(strip.terms + (2 * g + 1) * OUTPUT_TILE);
        UNROLL
        for (int r = 0; r < TILED_ROWS; r++)
            y[r] = fma(minimum, splat(sums[r]), fma(exact_sum(of[g & 1], r) * splat(steps[r]), scale, y[r]));
    }
    UNROLL
    for (int r = 0; r < TILED_ROWS; r++) store(to + r * OUTPUT_TILE, y[r]);
}

inline void add_strip6(const Strip& strip, const uint8_t* in, const float* steps, float* to) {
    alignas(64) int32_t left[2 * TILED_ROWS * OUTPUT_TILE], right[2 * TILED_ROWS * OUTPUT_TILE];
    VF y[TILED_ROWS];
    UNROLL
    for (int r = 0; r < TILED_ROWS; r++) y[r] = load(to + r * OUTPUT_TILE);
    for (int g = 0; g < strip.groups; g++, in += 2 * HALF_BYTES, steps += TILED_ROWS) {
        multiply_bytes<true>(in, strip.codes + 2 * g * UNPACKED_BYTES, left);
        multiply_bytes<true>(in, strip.codes + (2 * g + 1) * UNPACKED_BYTES, right);
        settle();
        const VF of_left = load(strip.terms + 2 * g * OUTPUT_TILE), of_right = load(strip.terms + (2 * g + 1) * OUTPUT_TILE);
        UNROLL
        for (int r = 0; r < TILED_ROWS; r++) {
            const VF step = splat(steps[r]);
            y[r] = fma(exact_sum(right, r) * step, of_right, fma(exact_sum(left, r) * step, of_left, y[r]));
        }
    }
    UNROLL
    for (int r = 0; r < TILED_ROWS; r++) store(to + r * OUTPUT_TILE, y[r]);
}

// y[rows][16] of one tile and the rows [begin, end) of a panel, bias included.
inline void multiply_panel(const RwLinear& w, int64_t tile, const Inputs& in, int64_t begin, int64_t end, Strip& strip, float* y) {
    const int groups = w.inputs / COLUMNS;
    for (int64_t i = 0; i < (end - begin + TILED_ROWS - 1) / TILED_ROWS * TILED_ROWS; i++)
        store(y + i * OUTPUT_TILE, splat(0));
    for (int first = 0; first < groups; first += CHUNK) {
        strip.groups = std::min(CHUNK, groups - first);
        on_tile(w, tile, [&](auto of) { unpack(of, first, strip); });
        settle();
        for (int64_t row = begin; row < end; row += TILED_ROWS) {
            const uint8_t* from = (const uint8_t*)in.pairs + 2 * row * in.columns + first * 2 * HALF_BYTES;
            const int64_t term = row * groups + first * TILED_ROWS;
            float* to = y + (row - begin) * OUTPUT_TILE;
            w.kind == SUPER6 ? add_strip6(strip, from, in.steps + term, to) : add_strip(strip, from, in.steps + term, in.sums + term, to);
        }
    }
    add_bias(w, tile, (int)(end - begin), y);
}

// As multiply, for tiled inputs, too.
void multiply_tiled(const RwLinear& w, const Inputs& in, float* out, int64_t stride, bool add, int64_t first, int64_t last) {
    if (!(in.kinds & TILED_INPUTS)) return multiply(w, in, out, stride, add, first, last);
    const TileRegisters registers;
    Strip strip;
    for (int64_t begin = 0; begin < in.rows; begin += ROW_PANEL)
        for (int64_t tile = first; tile < last; tile++) {
            alignas(64) float y[ROW_PANEL * OUTPUT_TILE];
            const int64_t end = std::min(in.rows, begin + ROW_PANEL);
            for (int64_t r = begin; r < end; r++) __builtin_prefetch(out + r * stride + tile * OUTPUT_TILE, 1);  // rows are pages apart
            multiply_panel(w, tile, in, begin, end, strip, y);
            put_rows(w, tile, y, (int)(end - begin), out + begin * stride, stride, add);
        }
}

void multiply_gated_tiled(const GatedJob& job, int64_t first, int64_t last) {
    if (!(job.in.kinds & TILED_INPUTS)) return multiply_gated(job, first, last);
    constexpr int TILES = COLUMNS / OUTPUT_TILE;
    const TileRegisters registers;
    Strip strip;
    for (int64_t begin = 0; begin < job.in.rows; begin += ROW_PANEL)
        for (int64_t group = first; group < last; group++) {
            alignas(64) float g[TILES][ROW_PANEL * OUTPUT_TILE], u[TILES][ROW_PANEL * OUTPUT_TILE];
            const int64_t end = std::min(job.in.rows, begin + ROW_PANEL);
            for (int t = 0; t < TILES; t++) {
                multiply_panel(job.gate, group * TILES + t, job.in, begin, end, strip, g[t]);
                multiply_panel(job.up, group * TILES + t, job.in, begin, end, strip, u[t]);
            }
            for (int64_t r = begin; r < end; r++) put_gated(job, g, u, r - begin, r, (int)group);
        }
}

constexpr LinearKernels tiled_linear_kernels = {prepare_inputs, multiply_tiled, multiply_gated_tiled, embed, turn_heads, add_normed, cap_values,
                                                LEAST_TILED};
