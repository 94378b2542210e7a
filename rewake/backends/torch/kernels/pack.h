// Weights in the blocks of GGUF files -> codes; codes and terms -> the tiles of abi.h (RwLinear). The same on every instruction set;
// included in native.cpp.

// Low nibbles of n bytes, then high ones.
inline void nibbles(const uint8_t* packed, int n, uint8_t* codes) {
    for (int i = 0; i < n; i += 8) {
        uint64_t x;
        memcpy(&x, packed + i, 8);
        const uint64_t low = x & 0x0F0F0F0F0F0F0F0F, high = x >> 4 & 0x0F0F0F0F0F0F0F0F;
        memcpy(codes + i, &low, 8);
        memcpy(codes + n + i, &high, 8);
    }
}

// A bit of each of 32 codes, above its nibble.
inline void add_fifths(uint32_t bits, uint8_t* codes) {
    for (int i = 0; i < 32; i++) codes[i] |= (uint8_t)((bits >> i & 1) << 4);
}

void codes_of_block(int kind, const uint8_t* block, uint8_t* codes) {
    uint32_t fifths;
    switch (kind) {
        case Q4_0: return nibbles(block + 2, 16, codes);
        case Q4_1: return nibbles(block + 4, 16, codes);
        case Q5_0:
        case Q5_1:
            block += kind == Q5_0 ? 2 : 4;
            memcpy(&fifths, block, 4);
            nibbles(block + 4, 16, codes);
            return add_fifths(fifths, codes);
        case Q8_0:
            for (int i = 0; i < 32; i++) codes[i] = block[2 + i] ^ 0x80;
            return;
        case Q4_K:
            for (int i = 0; i < 4; i++) nibbles(block + 16 + 32 * i, 32, codes + 64 * i);
            return;
        case Q5_K:  // bit g of byte i: code i of group g
            for (int i = 0; i < 4; i++) nibbles(block + 48 + 32 * i, 32, codes + 64 * i);
            for (int i = 0; i < 256; i++) codes[i] |= (uint8_t)((block[16 + i % 32] >> (i / 32) & 1) << 4);
            return;
        default:  // Q6_K: two halves of 64 bytes of nibbles, and 32 of pairs of bits
            for (int i = 0; i < 2; i++) nibbles(block + 64 * i, 64, codes + 128 * i);
            for (int i = 0; i < 256; i++) codes[i] |= (uint8_t)((block[128 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) << 4);
    }
}

// Eight codes below 16, a byte each -> nibbles in their order.
inline uint32_t nibbles_of(uint64_t x) {
    x = (x | x >> 4) & 0x00FF00FF00FF00FF;
    x = (x | x >> 8) & 0x0000FFFF0000FFFF;
    return (uint32_t)(x | x >> 16);
}

// What is above the nibbles of a group's codes, so many bits of each: those of the pairs of columns from `first` on that fill a dword.
inline uint32_t upper_bits(const uint8_t* codes, int first, int bits) {
    uint32_t dword = 0;
    for (int i = 0, at = 0; at < 16; i++, at += bits) {
        const int pair = first + i;
        const uint8_t* column = codes + pair / 4 * 8 + pair % 4;
        dword |= (uint32_t)(column[0] >> 4) << at | (uint32_t)(column[4] >> 4) << (16 + at);
    }
    return dword;
}

// The codes of a group of one output -> its dwords in a tile, in which those of 16 outputs lie side by side.
inline void pack_group(const uint8_t* codes, int bits, uint32_t* to) {
    for (int octet = 0; octet < INPUT_GROUP / 8; octet++) {
        uint64_t x;
        memcpy(&x, codes + 8 * octet, 8);
        if (bits == 8) {
            to[2 * octet * OUTPUT_TILE] = (uint32_t)(x & 0xFFFF) | (uint32_t)(x >> 32 & 0xFFFF) << 16;
            to[(2 * octet + 1) * OUTPUT_TILE] = (uint32_t)(x >> 16 & 0xFFFF) | (uint32_t)(x >> 48) << 16;
        } else {
            to[octet * OUTPUT_TILE] = nibbles_of(x & 0x0F0F0F0F0F0F0F0F);
        }
    }
    if (bits == 5 || bits == 6)
        for (int i = 0; i < bits - 4; i++) to[(4 + i) * OUTPUT_TILE] = upper_bits(codes, 16 / (bits - 4) * i, bits - 4);
}

// One output of a tile of `codes`; see abi.h for where things lie.
void pack_output(const RwCodes& w, int64_t output, uint8_t* tile) {
    const int groups = w.inputs / INPUT_GROUP, lane = (int)(output % OUTPUT_TILE);
    const size_t code_bytes = (size_t)4 * w.bits * OUTPUT_TILE;
    const uint16_t *scales = (const uint16_t*)w.scales + output * groups, *minima = (const uint16_t*)w.minima + output * groups;
    for (int g = 0; g < groups; g++, tile += code_bytes + 4 * OUTPUT_TILE) {
        pack_group(w.codes + output * w.inputs + g * INPUT_GROUP, w.bits, (uint32_t*)tile + lane);
        uint16_t* terms = (uint16_t*)(tile + code_bytes) + lane;
        terms[0] = scales[g], terms[OUTPUT_TILE] = minima[g];
    }
}

// One output of a tile of `super` codes.
void pack_super_output(const RwCodes& w, int64_t output, uint8_t* tile) {
    constexpr int GROUPS = SUPER_GROUP / INPUT_GROUP, TERMS = 2 * GROUPS;  // scales and minima, or scales of half groups
    const int supers = w.inputs / SUPER_GROUP, lane = (int)(output % OUTPUT_TILE);
    const size_t code_bytes = (size_t)4 * w.bits * OUTPUT_TILE;
    for (int s = 0; s < supers; s++, tile += GROUPS * code_bytes + TERMS * OUTPUT_TILE + 4 * OUTPUT_TILE) {
        const int64_t super = output * supers + s;
        for (int g = 0; g < GROUPS; g++)
            pack_group(w.codes + super * SUPER_GROUP + g * INPUT_GROUP, w.bits, (uint32_t*)(tile + g * code_bytes) + lane);
        uint8_t* terms = tile + GROUPS * code_bytes + lane;
        const uint8_t *scales = (const uint8_t*)w.scales, *minima = (const uint8_t*)w.minima;
        for (int g = 0; g < GROUPS; g++) {
            const int64_t group = super * GROUPS + g;
            terms[2 * g * OUTPUT_TILE] = minima ? scales[group] : scales[2 * group];
            terms[(2 * g + 1) * OUTPUT_TILE] = minima ? minima[group] : scales[2 * group + 1];
        }
        uint16_t* shared = (uint16_t*)(tile + GROUPS * code_bytes + TERMS * OUTPUT_TILE) + lane;
        shared[0] = w.scale[super], shared[OUTPUT_TILE] = minima ? w.minimum[super] : 0;
    }
}

// One output of a tile of plain weights.
void pack_plain_output(const RwCodes& w, int64_t output, uint8_t* tile) {
    const uint16_t* x = (const uint16_t*)w.codes + output * w.inputs;
    uint32_t* to = (uint32_t*)tile + output % OUTPUT_TILE;
    for (int pair = 0; pair < w.inputs / 2; pair++) {
        const int column = pair / 4 * 8 + pair % 4;
        to[(int64_t)pair * OUTPUT_TILE] = x[column] | (uint32_t)x[column + 4] << 16;
    }
}

// All tiles, `tile_bytes` each, which are 0 beforehand: so are outputs behind the last.
void pack(const RwCodes& w, size_t tile_bytes, uint8_t* tiles) {
    const auto one = w.bits == 16 ? pack_plain_output : w.scale ? pack_super_output : pack_output;
    for (int64_t output = 0; output < w.outputs; output++) one(w, output, tiles + output / OUTPUT_TILE * tile_bytes);
}
