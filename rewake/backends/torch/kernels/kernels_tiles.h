// Products of a prompt's rows with weights, in tile registers (AMX-BF16). Included behind kernels_linear.h, for AVX-512 only.
//
// Activations and weights are rounded to bfloat16, and their products added up in float32. These are not the bits that few rows have,
// which are exact sums of integers; but a row's bits do not depend on the rows beside it here, either.

constexpr int CHUNK = 8;                          // groups whose weights are unpacked together: they stay in the first-level cache
constexpr int MOST_PANEL = 256;                   // rows for which weights are unpacked once
constexpr int PANEL_BYTES = 1 << 20;              // of inputs that stay in the second-level cache meanwhile
constexpr size_t TILE_BYTES = TILED_ROWS * 64;    // of a register: 16 rows x 32 columns, or 16 pairs of columns x 16 outputs
constexpr int PAIR_ROWS = 2 * TILED_ROWS;         // two blocks of rows and two tiles of outputs are multiplied together

// Tile registers hold something between these two.
struct TileRegisters {
    TileRegisters() {
        struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        asm volatile("" ::"m"(config) : "memory");
        _tile_loadconfig(&config);
    }
    ~TileRegisters() { _tile_release(); }
};

// The compiler does not know that tiles are loaded from memory and stored to it.
inline void settle() { asm volatile("" ::: "memory"); }

// Some groups of a tile of weights: [group][pair of columns][output].
struct Strip {
    alignas(64) uint8_t weights[CHUNK * TILE_BYTES];
    void put(int group, int pair, VF first, VF second) { store_int(weights + group * TILE_BYTES + pair * 64, bf16_pairs(first, second)); }
};

// Pairs [FIRST, LAST) of a group of codes, less `less` each.
template <int BITS, int FIRST, int LAST> inline void unpack_codes(const uint8_t* codes, int group, int less, VF scale, VF minimum, Strip& to) {
    constexpr int PER = PAIRS<LOW_BITS<BITS>>;
    UNROLL
    for (int p = FIRST; p < LAST; p++) {
        const VI pair = code_pair<BITS>(low_dword(codes, p / PER), high_dword<BITS>(codes, p / PER), p);
        const VF a = to_float((pair & splat_int(0xFFFF)) - splat_int(less)), b = to_float((pair >> 16) - splat_int(less));
        to.put(group, p, fma(a, scale, minimum), fma(b, scale, minimum));
    }
}

template <int BITS> inline void unpack(CodesTile<BITS> tile, int first, int groups, Strip& to) {
    for (int i = 0; i < groups; i++) {
        const uint8_t *at = tile.data + (first + i) * GROUP_BYTES<BITS>, *terms = at + CODE_BYTES<BITS>;
        unpack_codes<BITS, 0, GROUP_PAIRS>(at, i, 0, load_f16(terms), load_f16(terms + 2 * OUTPUT_TILE), to);
    }
}

template <int BITS> inline void unpack(SuperTile<BITS> tile, int first, int groups, Strip& to) {
    for (int i = 0; i < groups; i++) {
        const int group = (first + i) % SUPER_GROUPS;
        const uint8_t* super = tile.data + (first + i) / SUPER_GROUPS * SUPER_BYTES<BITS>;
        const uint8_t *codes = super + group * CODE_BYTES<BITS>, *all = super + SUPER_GROUPS * CODE_BYTES<BITS>;
        const uint8_t *terms = all + 2 * group * OUTPUT_TILE, *shared = all + TERM_BYTES;
        const VF scale = load_f16(shared);
        if constexpr (BITS == 6) {  // each half has a scale
            unpack_codes<6, 0, GROUP_PAIRS / 2>(codes, i, 32, scale * to_float(signed_bytes(terms)), splat(0), to);
            unpack_codes<6, GROUP_PAIRS / 2, GROUP_PAIRS>(codes, i, 32, scale * to_float(signed_bytes(terms + OUTPUT_TILE)), splat(0), to);
        } else {
            const VF minimum = load_f16(shared + 2 * OUTPUT_TILE) * to_float(bytes(terms + OUTPUT_TILE));
            unpack_codes<BITS, 0, GROUP_PAIRS>(codes, i, 0, scale * to_float(bytes(terms)), minimum, to);
        }
    }
}

inline void unpack(const RwLinear& w, int64_t tile, int first, int groups, Strip& to) {
    if (w.kind == PLAIN)
        memcpy(to.weights, w.data + (tile * w.inputs / COLUMNS + first) * TILE_BYTES, groups * TILE_BYTES);
    else
        on_tile(w, tile, [&](auto of) { unpack(of, first, groups, to); });
}

// y[2 tiles][32 rows][16] += two strips x two blocks of rows, which are `block` bytes apart.
inline void add_strips(const Strip (&strips)[2], int groups, const uint8_t* rows, size_t block, float* y, float* y2) {
    float *const below = y + TILED_ROWS * OUTPUT_TILE, *const below2 = y2 + TILED_ROWS * OUTPUT_TILE;
    _tile_loadd(0, y, 64);
    _tile_loadd(1, y2, 64);
    _tile_loadd(2, below, 64);
    _tile_loadd(3, below2, 64);
    for (int g = 0; g < groups; g++, rows += TILE_BYTES) {
        _tile_loadd(4, rows, 64);
        _tile_loadd(5, rows + block, 64);
        _tile_loadd(6, strips[0].weights + g * TILE_BYTES, 64);
        _tile_loadd(7, strips[1].weights + g * TILE_BYTES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, y, 64);
    _tile_stored(1, y2, 64);
    _tile_stored(2, below, 64);
    _tile_stored(3, below2, 64);
}

typedef float PanelSums[MOST_PANEL * OUTPUT_TILE];

// y[rows][16] of one or two tiles and the rows [begin, end) of a panel, bias included.
inline void multiply_panel(const RwLinear& w, int64_t tile, int tiles, const Inputs& in, int64_t begin, int64_t end, PanelSums (&y)[2]) {
    const int groups = w.inputs / COLUMNS;
    const size_t block = groups * TILE_BYTES;
    const int64_t padded = (end - begin + PAIR_ROWS - 1) / PAIR_ROWS * PAIR_ROWS;
    for (int t = 0; t < 2; t++) memset(y[t], 0, padded * OUTPUT_TILE * sizeof(float));
    Strip strips[2];
    for (int first = 0; first < groups; first += CHUNK) {
        const int count = std::min(CHUNK, groups - first);
        for (int t = 0; t < 2; t++) unpack(w, tile + std::min(t, tiles - 1), first, count, strips[t]);
        settle();
        for (int64_t row = 0; row < padded; row += PAIR_ROWS) {
            const uint8_t* from = (const uint8_t*)in.high + (begin + row) / TILED_ROWS * block + first * TILE_BYTES;
            add_strips(strips, count, from, block, y[0] + row * OUTPUT_TILE, y[1] + row * OUTPUT_TILE);
        }
        settle();
    }
    for (int t = 0; t < tiles; t++) add_bias(w, tile + t, (int)(end - begin), y[t]);
}

inline int64_t panel_rows(const Inputs& in) {
    const int64_t fitting = PANEL_BYTES / (2 * in.columns) / PAIR_ROWS * PAIR_ROWS;
    return std::min<int64_t>(MOST_PANEL, std::max<int64_t>(2 * PAIR_ROWS, fitting));
}

// As multiply, for tiled inputs, too.
void multiply_tiled(const RwLinear& w, const Inputs& in, float* out, int64_t stride, bool add, int64_t first, int64_t last) {
    if (!(in.kinds & TILED_INPUTS)) return multiply(w, in, out, stride, add, first, last);
    const TileRegisters registers;
    alignas(64) PanelSums y[2];
    const int64_t panel = panel_rows(in);
    for (int64_t begin = 0; begin < in.rows; begin += panel)
        for (int64_t tile = first; tile < last; tile += 2) {
            const int64_t end = std::min(in.rows, begin + panel), tiles = std::min<int64_t>(2, last - tile);
            multiply_panel(w, tile, (int)tiles, in, begin, end, y);
            for (int64_t t = 0; t < tiles; t++) put_rows(w, tile + t, y[t], in, begin, (int)(end - begin), out, stride, add);
        }
}

void multiply_gated_tiled(const GatedJob& job, int64_t first, int64_t last) {
    if (!(job.in.kinds & TILED_INPUTS)) return multiply_gated(job, first, last);
    static_assert(COLUMNS == 2 * OUTPUT_TILE, "two tiles are a group of what follows");
    const TileRegisters registers;
    alignas(64) PanelSums g[2], u[2];
    const int64_t panel = panel_rows(job.in);
    for (int64_t begin = 0; begin < job.in.rows; begin += panel)
        for (int64_t group = first; group < last; group++) {
            const int64_t end = std::min(job.in.rows, begin + panel);
            multiply_panel(job.gate, 2 * group, 2, job.in, begin, end, g);
            multiply_panel(job.up, 2 * group, 2, job.in, begin, end, u);
            for (int64_t r = begin; r < end; r++) put_gated(job, g, u, r - begin, r, (int)group);
        }
}

constexpr LinearKernels tiled_linear_kernels = {input_groups, prepare_inputs, multiply_tiled, multiply_gated_tiled, embed, turn_heads, add_normed, cap_values, true};
