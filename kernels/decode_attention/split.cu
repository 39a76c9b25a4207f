// First pass of decode attention over pages, as ``triton_split.py`` has it, for Hopper: a warp a program.
//
// Pages come whole into shared memory, STAGES of them ahead by bulk copies, whatever tier or head they belong to, so that
// turning to another one costs no time in which nothing is loaded. Of a page of 16 M slots:
//
// - keys [16 rows of tokens] x queries: 8-bit integer products. Bytes of packed codes are operands as they are, or
//   masked; a query is two columns of signed bytes, 256 times the one and the other, so that nothing of it is lost
//   that its own 8 bits have. Column 2 h + i is plane i of query head h, so a lane ends up with one logit a token.
// - values^T [16 rows of dimensions] x weights: fp16 products. A code masked in place is a subnormal number, exactly
//   2^-24 of its value; planes of a byte differ by a power of two, which the accumulators are multiplied by where a tier
//   begins or ends. So results of tiers add up in the same registers: row r of the two operands (one a byte of a 16-bit
//   word) of halves 2 p and 2 p + 1 belongs to dimensions 16 half + 2 r + byte, at any number of bits.
// - codes whose bits do not divide 8 lie in slices of 4, 2 and 1 bits (``kernels/quantize/reference.py``). Their bits are
//   joined where those of the widest slice are multiplied, from bit 0 of a byte or half on: no plane needs a factor.
//
// The softmax is relative to a reference that a head's largest logit and value scale may outgrow by HEADROOM before it
// moves, so that most pages need not touch the accumulators.
//
// The compiler is told: TIERS (``Tier``, and TIER_LIST of them), LAYERS, HEADS, GROUP, DIM, V_DIM, PAGE_BYTES, MAX_BLOCKS,
// ROOM_FOR, PROGRAMS, TURN, STAGES, STRIDE (of pages in shared memory), RESIDENT, KEPT_TIERS, CAPPED, SLIDES, EARLY, row_t,
// length_t, range_t, BFLOAT.

struct Tier {
    int key_bits, value_bits, tokens, keys, key_meta, values, value_meta, positions, position_bytes, weight, tile;
};
static __device__ constexpr Tier LAYOUTS[TIERS] = {TIER_LIST};
constexpr int BLOCK = 8;                        // columns of a block of the page table
constexpr int SETS = GROUP > 4 ? 2 : 1;         // query heads of a lane
constexpr int PAIRS = V_DIM / 32;               // pairs of halves of 16 dimensions
constexpr int OPERANDS = DIM / 16;              // words of a query that a lane holds
// Of ``bits`` of a code: those of its widest slice; whether it has others; how many bits of a packed vector's codes come
// before a slice.
DEVICE constexpr int widest(int bits) { return bits >= 8 ? 8 : bits >= 4 ? 4 : bits >= 2 ? 2 : 1; }
DEVICE constexpr bool sliced(int bits) { return widest(bits) != bits; }
DEVICE constexpr bool has_slice(int bits, int slice) { return slice < widest(bits) && (bits & slice); }
DEVICE constexpr int bits_before(int bits, int slice) { return bits - bits % (2 * slice); }
constexpr float LOG2E = 1.4426950408889634f;
constexpr float NEVER = -1e30f;
constexpr float HEADROOM = 15.75f, LIFT = 12.0f;  // log2 of what a weight may grow to in fp16, and where it begins

struct Arguments {
    const u16* q;              // [B, HEADS * GROUP, DIM]
    float* partial_out;        // [slots, GROUP, V_DIM]
    float* partial_lse;        // [slots, GROUP]
    u16* logits;               // [HEADS, room, GROUP]
    float* tile_max;           // [HEADS, room / 16, GROUP]
    const int* offsets;        // [LAYERS, HEADS, ROOM_FOR]
    const int* begun;          // [LAYERS, PROGRAMS, 4]
    const int* ranges;         // [LAYERS, 2]
    const char* pages;         // [pages, PAGE_BYTES]
    const int* page_table;     // [blocks, LAYERS, HEADS, BLOCK]
    const range_t* range_lo;
    const range_t* range_hi;
    const int* row_blocks;     // [rows, MAX_BLOCKS]
    const int* entries;        // [rows, LAYERS, HEADS, TIERS]
    const int* own_entry;
    const row_t* rows;         // [B]
    const length_t* seq_lens;  // [B]
    int batch, layer, room, attention_span, every;
    float sm_scale, logit_cap;
};

DEVICE float minus_infinity() { return as_float(0xff800000u); }
DEVICE int cdiv(int a, int b) { return (a + b - 1) / b; }
DEVICE int weight_of(int tier) {
    int weight = LAYOUTS[0].weight;
    UNROLL for (int t = 1; t < TIERS; t++) weight = tier == t ? LAYOUTS[t].weight : weight;
    return weight;
}
DEVICE int column_of(int entry, int tier) {
    if (tier == 0) return entry;
    if (tier == 1) return MAX_BLOCKS * BLOCK - 1 - entry;
    if (tier == 2) return MAX_BLOCKS / 2 * BLOCK - 1 - entry;
    return MAX_BLOCKS / 2 * BLOCK + entry;
}
// Of a number of each lane, the sum of those up to this lane.
DEVICE int sum_to_here(int x) {
    UNROLL for (int by = 1; by < 32; by *= 2) {
        int other = shuffle_up(x, by);
        if (lane_id() >= by) x += other;
    }
    return x;
}
// The sum over lanes that hold tokens of the same head.
DEVICE float sum_of_tokens(float x) {
    UNROLL for (int mask = 4; mask < 32; mask *= 2) x += shuffle_xor(x, mask);
    return x;
}
DEVICE float to_float(u16 x) { return BFLOAT ? as_float((u32)x << 16) : half_to_float(x); }

// What a lane knows of one of 32 consecutive units (a tier of a head), and of the pages that this program has of them.
struct Unit {
    int row, first, pages, before;  // first entry, number of pages, those of the lanes before
};
// What a lane knows of one of 32 consecutive pages.
struct Place {
    int page, lo, hi, entry, unit;
};

DEVICE void read_units(const Arguments& arg, int begin, int stop, int first_unit, int& start, Unit& mine, int& pages) {
    int number = first_unit + lane_id();
    int tier = number % TIERS, head = number / TIERS % HEADS, b = number / (TIERS * HEADS);
    bool live = b < arg.batch;
    mine.row = live ? (int)arg.rows[b] : 0;
    int count = live ? arg.entries[(((i64)mine.row * LAYERS + arg.layer) * HEADS + head) * TIERS + tier] : 0;
    int weight = weight_of(tier);
    int work = count > 0 ? TURN + count * weight : 0;
    int end = sum_to_here(work);
    int from = start + end - work + TURN;
    start += shuffle(end, 31);
    mine.first = min(cdiv(max(begin - from, 0), weight), count);
    mine.pages = max(min(cdiv(max(stop - from, 0), weight), count) - mine.first, 0);
    int sum = sum_to_here(mine.pages);
    mine.before = sum - mine.pages;
    pages = shuffle(sum, 31);
}

// The unit and entry of this lane's page, the ``first``-th and so on, and the block of the table that has it.
DEVICE int find_block(const Arguments& arg, const Unit& units, int first_unit, int pages, int first, Place& place) {
    int number = first + lane_id();
    int lane = 0;
    UNROLL for (int step = 16; step > 0; step /= 2) {
        int before = shuffle(units.before, lane + step);
        if (before <= number) lane += step;
    }
    // Of units without pages, which have as many before them as the next one, the last is found: it has pages.
    int row = shuffle(units.row, lane);
    place.entry = shuffle(units.first, lane) + number - shuffle(units.before, lane);
    place.unit = first_unit + lane;
    if (number >= pages) return 0;
    return arg.row_blocks[(i64)row * MAX_BLOCKS + column_of(place.entry, place.unit % TIERS) / BLOCK];
}
DEVICE void find_page(const Arguments& arg, int block, Place& place, bool live) {
    int tier = place.unit % TIERS, head = place.unit / TIERS % HEADS;
    i64 at = (((i64)block * LAYERS + arg.layer) * HEADS + head) * BLOCK + column_of(place.entry, tier) % BLOCK;
    place.page = live ? arg.page_table[at] : 0;
    place.lo = live ? (int)arg.range_lo[at] : 0;
    place.hi = live ? (int)arg.range_hi[at] : 0;
}

// Of a lane's query heads (lane % 4, and 4 more): softmax so far, and what turns integer products into logits.
struct Softmax {
    float reference[SETS], norm[SETS], zero[SETS], factor[SETS], total[SETS];
};
DEVICE void begin_head(Softmax& soft, float (&acc)[PAIRS][2][4]) {
    UNROLL for (int pair = 0; pair < PAIRS; pair++)
        UNROLL for (int i = 0; i < 8; i++) acc[pair][i / 4][i % 4] = 0;
    UNROLL for (int set = 0; set < SETS; set++) {
        soft.reference[set] = NEVER;
        soft.norm[set] = soft.zero[set] = 0;
    }
}
struct Kept {  // where the logits of a unit go
    u16* logits;
    float* tile_max;
    int shared, room;
};

// Bits of a slice of codes, from bit ``from`` of a word on, moved to where they stand in the code and alone there. UNIT:
// 1 in each part of a word that holds one code.
template <int BITS, int SLICE, u32 UNIT> DEVICE u32 bits_of(u32 word, int from) {
    constexpr int TO = BITS % SLICE;
    return (from >= TO ? word >> (from - TO) : word << (TO - from)) & ((((1u << SLICE) - 1) << TO) * UNIT);
}
constexpr u32 BYTES = 0x01010101u, HALVES = 0x00010001u;

// Operands of a head's queries for keys of a tier: bytes of 8 consecutive elements for each plane and 32 bytes of a row.
// A plane but the last is masked, the last is the whole byte; products with plane p are 2^(p bits) times as precise as
// those with the first, which are multiplied by it when they are added up. Planes of slices are all joined codes alone.
template <int TIER> DEVICE void read_queries(const Arguments& arg, int head, u32 (&operand)[SETS][OPERANDS], Softmax& soft) {
    constexpr bool SLICED = sliced(LAYOUTS[TIER].key_bits);
    constexpr int WIDTH = widest(LAYOUTS[TIER].key_bits), PLANES = 8 / WIDTH, ROW = DIM * WIDTH / 8, STEPS = ROW / 32;
    constexpr int BITS = SLICED ? 0 : WIDTH;  // by which the products of a plane are shifted against the one before
    int lane = lane_id();
    UNROLL for (int set = 0; set < SETS; set++) {
        int g = min(set * 4 + lane / 8, GROUP - 1);
        const u16* q = arg.q + ((i64)head * GROUP + g) * DIM;
        float y[STEPS][PLANES][8];
        float largest = 1e-30f;
        UNROLL for (int step = 0; step < STEPS; step++) {
            int at = ROW >= 64 ? step / 2 * 64 + lane % 4 * 16 + step % 2 * 8 : lane % 4 * 8;
            UNROLL for (int p = 0; p < PLANES; p++) {
                uint4 words = *(const uint4*)(q + p * ROW + at);
                u32 word[4] = {words.x, words.y, words.z, words.w};
                UNROLL for (int j = 0; j < 8; j++)
                    y[step][p][j] = to_float((u16)(word[j / 2] >> j % 2 * 16)) / (float)(1 << p * BITS);
            }
            UNROLL for (int j = 0; j < 8; j++) {
                float whole = SLICED ? 0.0f : y[step][PLANES - 1][j];
                UNROLL for (int p = 0; p < PLANES; p++) {
                    if (p < PLANES - 1) y[step][p][j] -= whole;
                    y[step][p][j] *= (float)(1 << p * BITS);
                    largest = fmaxf(largest, fabsf(y[step][p][j]));
                }
            }
        }
        largest = fmaxf(largest, shuffle_xor(largest, 1));
        largest = fmaxf(largest, shuffle_xor(largest, 2));
        float scale = 32512.0f / largest;
        int total = 0;
        UNROLL for (int step = 0; step < STEPS; step++) {
            UNROLL for (int p = 0; p < PLANES; p++) {
                // What a code of 1 in every plane gives, as planes are added up in ``key_products``.
                int weight = SLICED ? 1 : p < PLANES - 1 ? 1 << (PLANES - 1) * BITS : 255 / ((1 << WIDTH) - 1);
                u32 bytes[2] = {0, 0};
                UNROLL for (int j = 0; j < 8; j++) {
                    int number = (int)rintf(y[step][p][j] * scale);
                    int high = (number + 128) >> 8;
                    int mine = lane / 4 % 2 ? number - high * 256 : high;
                    bytes[j / 4] |= (u32)(mine & 255) << j % 4 * 8;
                    total += number * weight;
                }
                operand[set][(step * PLANES + p) * 2] = bytes[0];
                operand[set][(step * PLANES + p) * 2 + 1] = bytes[1];
            }
        }
        total += shuffle_xor(total, 1);
        total += shuffle_xor(total, 2);
        float factor = arg.sm_scale * LOG2E / (scale * (float)(1 << (PLANES - 1) * BITS));
        soft.factor[set] = shuffle(factor, lane % 4 * 8);
        soft.total[set] = shuffle((float)total * factor, lane % 4 * 8);
    }
}

// 16 or 8 bytes of a row.
template <int PART> DEVICE void read_part(const char* from, u32 (&x)[4]) {
    if (PART == 16) {
        uint4 a = *(const uint4*)from;
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    } else {
        uint2 a = *(const uint2*)from;
        x[0] = a.x, x[1] = a.y, x[2] = x[3] = 0;
    }
}
// Of two keys those bits of a slice that belong to the lane's part of the widest one: plane p of that, ``width`` bits, has
// them from bit p width on.
template <int BITS, int SLICE, int PART> DEVICE void read_slice(const char* one, const char* other, u32 (&x)[2][4]) {
    constexpr int ROW = DIM * SLICE / 8, BEFORE = DIM * bits_before(BITS, SLICE) / 8;
    int at = lane_id() % 4 * PART;
    read_part<PART>(one + BEFORE + at % ROW, x[0]);
    read_part<PART>(other + BEFORE + at % ROW, x[1]);
    UNROLL for (int i = 0; i < 8; i++) x[i / 4][i % 4] >>= at / ROW * SLICE;
}

// Integer products of 16 tokens of a page, of the lane's heads, with tokens 2 r and 2 r + 1 for r = lane / 4.
template <int TIER> DEVICE void key_products(const char* page, int m, const u32 (&operand)[SETS][OPERANDS], float (&s)[2][SETS]) {
    constexpr Tier T = LAYOUTS[TIER];
    constexpr bool SLICED = sliced(T.key_bits);
    constexpr int BITS = T.key_bits, WIDTH = widest(BITS), PLANES = 8 / WIDTH, ROW = DIM * WIDTH / 8, STEPS = ROW / 32;
    constexpr int VECTOR = DIM * BITS / 8, PART = ROW >= 64 ? 16 : 8;  // bytes of a key; those of a lane at once
    int lane = lane_id(), r = lane / 4, odd = SLICED ? 0 : r % 2;
    // In odd rows the two tokens change places, so that neighbours lie in different banks.
    const char* keys = page + T.keys + (m * 16 + 2 * r) * VECTOR;
    const char* one = keys + odd * VECTOR;
    const char* other = keys + (1 - odd) * VECTOR;
    int d[SETS][4] = {};
    UNROLL for (int chunk = 0; chunk < (ROW + 63) / 64; chunk++) {
        u32 x[4], y[4], two[2][4], last[2][4];  // of the widest slice; of the others, for both tokens
        read_part<PART>(one + chunk * 64 + lane % 4 * PART, x);
        read_part<PART>(other + chunk * 64 + lane % 4 * PART, y);
        if constexpr (has_slice(BITS, 2)) read_slice<BITS, 2, PART>(one, other, two);
        if constexpr (has_slice(BITS, 1)) read_slice<BITS, 1, PART>(one, other, last);
        UNROLL for (int p = 0; p < PLANES; p++) {
            if (p && !SLICED) {
                UNROLL for (int set = 0; set < SETS; set++)
                    UNROLL for (int i = 0; i < 4; i++) d[set][i] <<= WIDTH;
            }
            UNROLL for (int half = 0; half < (STEPS > 1 ? 2 : 1); half++) {
                constexpr u32 ALL = ((1u << WIDTH % 8) - 1) * BYTES;
                u32 mask = p < PLANES - 1 ? ALL << p * WIDTH : 0xffffffffu;
                u32 a[4] = {x[2 * half], y[2 * half], x[2 * half + 1], y[2 * half + 1]};
                UNROLL for (int i = 0; i < 4; i++) {
                    int word = 2 * half + i / 2;
                    a[i] = SLICED ? bits_of<BITS, WIDTH, BYTES>(a[i], p * WIDTH) : a[i] & mask;
                    if constexpr (has_slice(BITS, 2)) a[i] |= bits_of<BITS, 2, BYTES>(two[i % 2][word], p * WIDTH);
                    if constexpr (has_slice(BITS, 1)) a[i] |= bits_of<BITS, 1, BYTES>(last[i % 2][word], p * WIDTH);
                }
                int at = ((chunk * 2 + half) * PLANES + p) * 2;
                UNROLL for (int set = 0; set < SETS; set++)
                    multiply_bytes(d[set], a, operand[set][at], operand[set][at + 1]);
            }
        }
    }
    UNROLL for (int set = 0; set < SETS; set++) {
        float a = (float)(d[set][0] * 256 + d[set][1]), b = (float)(d[set][2] * 256 + d[set][3]);
        s[0][set] = odd ? b : a;
        s[1][set] = odd ? a : b;
    }
}

// Two consecutive words of a field of 4-byte numbers.
template <int OFFSET> DEVICE void two_words(const char* page, int slot, u32 (&word)[2]) {
    if (OFFSET % 8 == 0) {
        uint2 x = *(const uint2*)(page + OFFSET + slot * 4);
        word[0] = x.x, word[1] = x.y;
    } else {
        word[0] = *(const u32*)(page + OFFSET + slot * 4);
        word[1] = *(const u32*)(page + OFFSET + slot * 4 + 4);
    }
}

// Multiplies accumulators by 2^(plane * bits), or divides them by it.
template <int TIER, bool DIVIDE> DEVICE void scale_planes(float (&acc)[PAIRS][2][4]) {
    constexpr int BITS = LAYOUTS[TIER].value_bits, GROUPS = V_DIM * BITS / 128;
    if (sliced(BITS)) return;
    UNROLL for (int pair = 0; pair < PAIRS; pair++) {
        UNROLL for (int half = 0; half < 2; half++) {
            int shift = (2 * pair + half) / GROUPS * BITS;
            float by = DIVIDE ? 1.0f / (float)(1 << shift) : (float)(1 << shift);
            if (shift) {
                UNROLL for (int byte = 0; byte < 2; byte++) {
                    acc[pair][byte][half * 2] *= by;
                    acc[pair][byte][half * 2 + 1] *= by;
                }
            }
        }
    }
}

// Of 16 tokens' values a slice of which a token has 16 or 32 bytes, as ``a`` of ``multiply_halves`` takes them: all planes.
template <int BITS, int SLICE> DEVICE void read_narrow(u32 (&x)[4], const char* values) {
    constexpr int VECTOR = V_DIM * BITS / 8;
    int lane = lane_id();
    values += V_DIM * bits_before(BITS, SLICE) / 8;
    if constexpr (V_DIM * SLICE == 256) {
        load_transposed(x, values + (lane / 16 * 8 + lane % 8) * VECTOR + lane / 8 % 2 * 16);
    } else {
        u32 y[2];
        load_transposed(y, values + lane % 16 * VECTOR);
        x[0] = x[1] = y[0], x[2] = x[3] = y[1];
    }
}
// Its bits in a word of the operand for a byte of a pair of halves.
template <int BITS, int SLICE> DEVICE u32 narrow_bits(const u32 (&x)[4], int i, int pair, int byte) {
    int plane = V_DIM * SLICE == 256 ? pair : 2 * pair + i % 2;
    return bits_of<BITS, SLICE, HALVES>(x[i], byte * 8 + plane * SLICE);
}
template <int BITS> DEVICE void sliced_products(const char* values, u32 b0, u32 b1, float (&acc)[PAIRS][2][4]) {
    constexpr int WIDTH = widest(BITS), GROUPS = V_DIM * WIDTH / 128;
    static_assert(GROUPS >= 2, "a token has 32 bytes of the widest slice");
    int lane = lane_id();
    u32 two[4], last[4];
    if constexpr (has_slice(BITS, 2)) read_narrow<BITS, 2>(two, values);
    if constexpr (has_slice(BITS, 1)) read_narrow<BITS, 1>(last, values);
    const char* row = values + (lane / 16 * 8 + lane % 8) * (V_DIM * BITS / 8) + lane / 8 % 2 * 16;
    UNROLL for (int group = 0; group < GROUPS; group += 2) {
        u32 x[4];
        load_transposed(x, row + group * 16);
        UNROLL for (int byte = 0; byte < 2; byte++) {
            UNROLL for (int p = 0; p < 8 / WIDTH; p++) {
                int pair = (p * GROUPS + group) / 2;
                u32 a[4];
                UNROLL for (int i = 0; i < 4; i++) {
                    a[i] = bits_of<BITS, WIDTH, HALVES>(x[i], byte * 8 + p * WIDTH);
                    if constexpr (has_slice(BITS, 2)) a[i] |= narrow_bits<BITS, 2>(two, i, pair, byte);
                    if constexpr (has_slice(BITS, 1)) a[i] |= narrow_bits<BITS, 1>(last, i, pair, byte);
                }
                multiply_halves(acc[pair][byte], a, b0, b1);
            }
        }
    }
}

template <int BITS> DEVICE void planar_products(const char* values, u32 b0, u32 b1, float (&acc)[PAIRS][2][4]) {
    constexpr int PLANES = 8 / BITS, ROW = V_DIM * BITS / 8, GROUPS = ROW / 16;
    constexpr u32 ALL = ((1u << BITS) - 1) * HALVES;
    int lane = lane_id();
    if (GROUPS >= 2) {
        const char* row = values + (lane / 16 * 8 + lane % 8) * ROW + lane / 8 % 2 * 16;
        UNROLL for (int group = 0; group < GROUPS; group += 2) {
            u32 x[4];
            load_transposed(x, row + group * 16);
            UNROLL for (int byte = 0; byte < 2; byte++) {
                UNROLL for (int p = 0; p < PLANES; p++) {
                    u32 a[4];
                    UNROLL for (int i = 0; i < 4; i++) a[i] = (byte ? x[i] >> 8 : x[i]) & (ALL << p * BITS);
                    multiply_halves(acc[(p * GROUPS + group) / 2][byte], a, b0, b1);
                }
            }
        }
    } else {
        u32 x[2];
        load_transposed(x, values + lane % 16 * ROW);
        UNROLL for (int byte = 0; byte < 2; byte++) {
            UNROLL for (int p = 0; p < PLANES; p += 2) {
                u32 y0 = byte ? x[0] >> 8 : x[0], y1 = byte ? x[1] >> 8 : x[1];
                u32 a[4] = {y0 & (ALL << p * BITS), y0 & (ALL << (p + 1) * BITS), y1 & (ALL << p * BITS),
                            y1 & (ALL << (p + 1) * BITS)};
                multiply_halves(acc[p / 2][byte], a, b0, b1);
            }
        }
    }
}

// Adds the weighted values of 16 tokens; b0 and b1 are the operand of weights.
template <int TIER> DEVICE void value_products(const char* page, int m, u32 b0, u32 b1, float (&acc)[PAIRS][2][4]) {
    constexpr int BITS = LAYOUTS[TIER].value_bits;
    const char* values = page + LAYOUTS[TIER].values + m * 16 * (V_DIM * BITS / 8);
    if constexpr (sliced(BITS)) {
        sliced_products<BITS>(values, b0, b1, acc);
    } else {
        planar_products<BITS>(values, b0, b1, acc);
    }
}

template <int TIER>
DEVICE void attend(const Arguments& arg, const char* page, int lo, int hi, int entry, const u32 (&operand)[SETS][OPERANDS],
                   Softmax& soft, float (&acc)[PAIRS][2][4], const Kept& kept) {
    constexpr Tier T = LAYOUTS[TIER];
    constexpr int M = (T.tokens + 15) / 16;
    constexpr bool KEEPS = TIER < KEPT_TIERS;
    int lane = lane_id(), r = lane / 4;
    float s[M][2][SETS], top[SETS];
    u32 value_meta[M][2], largest_scale = 0;
    UNROLL for (int set = 0; set < SETS; set++) top[set] = minus_infinity();
    if (T.position_bytes == 2) hi = min(hi, 0xffff);
    u32 span = (u32)max(hi - lo, 0);
    UNROLL for (int m = 0; m < M; m++) {
        int slot = m * 16 + 2 * r;
        u32 key_meta[2], position[2];
        key_products<TIER>(page, m, operand, s[m]);
        two_words<T.key_meta>(page, slot, key_meta);
        two_words<T.value_meta>(page, slot, value_meta[m]);
        if constexpr (T.position_bytes == 2) {
            u32 word = *(const u32*)(page + T.positions + slot * 2);
            position[0] = word & 0xffff, position[1] = word >> 16;
        } else {
            two_words<T.positions>(page, slot, position);
        }
        UNROLL for (int i = 0; i < 2; i++) {
            bool valid = position[i] - (u32)lo < span;
            if ((m + 1) * 16 > T.tokens) valid = valid && slot + i < T.tokens;
            value_meta[m][i] = valid ? value_meta[m][i] : 0;
            u32 scale = value_meta[m][i] & 0xffff;
            largest_scale = scale > largest_scale ? scale : largest_scale;
            float key_scale = half_to_float(key_meta[i]), key_zero = high_half_to_float(key_meta[i]);
            UNROLL for (int set = 0; set < SETS; set++) {
                float x = s[m][i][set] * (key_scale * soft.factor[set]) + key_zero * soft.total[set];
                if (CAPPED) {
                    float cap = arg.logit_cap * LOG2E;
                    x = cap * (2.0f / (1.0f + power2(x * (-2.0f / arg.logit_cap))) - 1.0f);
                }
                s[m][i][set] = valid ? x : minus_infinity();
                top[set] = fmaxf(top[set], s[m][i][set]);
            }
        }
    }
    float scale_exponent = log_2(fmaxf(half_to_float(largest_scale), 5.9604645e-8f));
    bool outgrown = false;
    UNROLL for (int set = 0; set < SETS; set++) {
        top[set] += scale_exponent;
        UNROLL for (int mask = 4; mask < 32; mask *= 2) top[set] = fmaxf(top[set], shuffle_xor(top[set], mask));
        outgrown = outgrown || top[set] - soft.reference[set] > HEADROOM;
    }
    if (any_lane(outgrown)) {
        UNROLL for (int set = 0; set < SETS; set++) {
            float reference = soft.reference[set];
            if (top[set] - reference > HEADROOM) reference = top[set] - LIFT;
            float by = power2(soft.reference[set] - reference);
            soft.reference[set] = reference;
            soft.norm[set] *= by;
            soft.zero[set] *= by;
            // Columns 2 c and 2 c + 1 of the accumulators are heads of the first set for c < 2, else of the second.
            float even = shuffle(by, lane % 2 * 2), odd = shuffle(by, lane % 2 * 2 + 1);
            if (SETS == 1 || (lane % 4 >= 2) == (set == 1)) {
                UNROLL for (int pair = 0; pair < PAIRS; pair++) {
                    UNROLL for (int byte = 0; byte < 2; byte++) {
                        acc[pair][byte][0] *= even, acc[pair][byte][2] *= even;
                        acc[pair][byte][1] *= odd, acc[pair][byte][3] *= odd;
                    }
                }
            }
        }
    }
    int at = entry - kept.shared;
    bool keeps = KEEPS && at >= 0 && at < kept.room;
    if (keeps && r == 0) {
        UNROLL for (int set = 0; set < SETS; set++)
            if (set * 4 + lane % 4 < GROUP) kept.tile_max[(i64)at * GROUP + set * 4 + lane % 4] = soft.reference[set];
    }
    UNROLL for (int m = 0; m < M; m++) {
        u32 weights[SETS];
        UNROLL for (int set = 0; set < SETS; set++) {
            float weight[2], x[2];
            UNROLL for (int i = 0; i < 2; i++) {
                x[i] = s[m][i][set] - soft.reference[set];
                float p = power2(x[i]);
                soft.norm[set] += p;
                soft.zero[set] += p * high_half_to_float(value_meta[m][i]);
                weight[i] = p * half_to_float(value_meta[m][i]);
            }
            weights[set] = pack_halves(weight[0], weight[1]);
            if (keeps && set * 4 + lane % 4 < GROUP) {
                u32 pair = pack_halves(x[0], x[1]);
                u16* logit = kept.logits + ((i64)at * T.tile + m * 16 + 2 * r) * GROUP + set * 4 + lane % 4;
                logit[0] = (u16)pair;
                logit[GROUP] = (u16)(pair >> 16);
            }
        }
        // Column n of the operand is head n, its rows are pairs of tokens: those of lane 4 pair + n % 4.
        int from = lane % 4 * 4 + lane / 4 % 4;
        u32 b0 = shuffle(weights[0], from), b1 = shuffle(weights[0], from + 16);
        if (SETS == 2) {
            u32 c0 = shuffle(weights[SETS - 1], from), c1 = shuffle(weights[SETS - 1], from + 16);
            b0 = lane >= 16 ? c0 : b0;
            b1 = lane >= 16 ? c1 : b1;
        }
        value_products<TIER>(page, m, b0, b1, acc);
    }
}

// Writes what a head's pages gave, normalised, and its base-2 log-sum-exp.
DEVICE void write_head(const Arguments& arg, i64 slot, const Softmax& soft, const float (&acc)[PAIRS][2][4]) {
    int lane = lane_id(), r = lane / 4;
    float inverse[SETS], zero[SETS];
    UNROLL for (int set = 0; set < SETS; set++) {
        float norm = sum_of_tokens(soft.norm[set]);
        zero[set] = sum_of_tokens(soft.zero[set]);
        inverse[set] = norm > 0 ? 1.0f / norm : 0.0f;
        if (r == 0 && set * 4 + lane % 4 < GROUP)
            arg.partial_lse[slot * GROUP + set * 4 + lane % 4] = soft.reference[set] + log_2(norm);
    }
    UNROLL for (int column = 0; column < 2; column++) {
        int from = lane % 2 * 2 + column;
        float by = shuffle(inverse[0], from), plus = shuffle(zero[0], from);
        if (SETS == 2) {
            float by2 = shuffle(inverse[SETS - 1], from), plus2 = shuffle(zero[SETS - 1], from);
            by = lane % 4 >= 2 ? by2 : by;
            plus = lane % 4 >= 2 ? plus2 : plus;
        }
        int g = lane % 4 * 2 + column;
        if (g < GROUP) {
            float* out = arg.partial_out + (slot * GROUP + g) * V_DIM + 2 * r;
            UNROLL for (int pair = 0; pair < PAIRS; pair++) {
                UNROLL for (int half = 0; half < 2; half++) {
                    int c = half * 2 + column;
                    *(float2*)(out + (2 * pair + half) * 16) =
                        make_float2((acc[pair][0][c] * 16777216.0f + plus) * by, (acc[pair][1][c] * 16777216.0f + plus) * by);
                }
            }
        }
    }
}

template <int TIER> DEVICE void turn_to(const Arguments& arg, int unit, int row, u32 (&operand)[SETS][OPERANDS], Softmax& soft,
                                        float (&acc)[PAIRS][2][4], Kept& kept) {
    int head = unit / TIERS % HEADS, b = unit / (TIERS * HEADS);
    if (TIER < KEPT_TIERS) {
        i64 at = (((i64)row * LAYERS + arg.layer) * HEADS + head) * TIERS;
        int from = min(arg.offsets[(arg.layer * HEADS + head) * ROOM_FOR + b], arg.room);
        int tokens = 0, tiles = 0;
        UNROLL for (int t = 0; t < TIER; t++) {
            int own = arg.entries[at + t] - arg.own_entry[at + t];
            tiles += own;
            tokens += own * LAYOUTS[t].tile;
        }
        kept.shared = arg.own_entry[at + TIER];
        bool observed = (int)arg.seq_lens[b] % arg.every == 0;  // else nobody reads the logits of this step
        kept.room = observed ? max(arg.room - from - tokens, 0) / LAYOUTS[TIER].tile : 0;
        kept.logits = arg.logits + ((i64)head * arg.room + from + tokens) * GROUP;
        kept.tile_max = arg.tile_max + (((i64)head * arg.room + from) / 16 + tiles) * GROUP;
    }
    read_queries<TIER>(arg, unit / TIERS, operand, soft);
    scale_planes<TIER, false>(acc);
}

// Calls ``f`` with the number of a tier, known when compiled.
template <int TIER> struct Constant {
    static constexpr int value = TIER;
};
template <typename F> DEVICE void for_tier(int tier, F f) {
    if (tier == 0) f(Constant<0>());
    if (TIERS > 1 && tier == 1) f(Constant<(TIERS > 1 ? 1 : 0)>());
    if (TIERS > 2 && tier == 2) f(Constant<(TIERS > 2 ? 2 : 0)>());
    if (TIERS > 3 && tier == 3) f(Constant<(TIERS > 3 ? 3 : 0)>());
}

DEVICE void leave_tier(int tier, float (&acc)[PAIRS][2][4]) {
    for_tier(tier, [&](auto tier) { scale_planes<decltype(tier)::value, true>(acc); });
}

KERNEL void __launch_bounds__(32, RESIDENT) split_kernel(const Arguments arg) {
    if (EARLY) {  // in this order: the second pass, once begun, reads what was written before this one
        wait_for_launch_before();
        launch_next();
    }
    int lane = lane_id(), program = program_id();
    int each = arg.ranges[arg.layer * 2], end = arg.ranges[arg.layer * 2 + 1];
    int4 begun = *(const int4*)(arg.begun + ((i64)arg.layer * PROGRAMS + program) * 4);
    int begin = program * each;
    if (begin >= end) return;
    int stop = min(begin + each, end);

    char* memory = shared_memory();
    int4* held = (int4*)(memory + STAGES * STRIDE);  // of each page: lo, hi, entry, unit
    unsigned long long* barriers = (unsigned long long*)(held + STAGES);
    if (lane == 0) {
        UNROLL for (int stage = 0; stage < STAGES; stage++) barrier_init(&barriers[stage]);
        barriers_ready();
    }
    sync_warp();

    float acc[PAIRS][2][4];
    u32 operand[SETS][OPERANDS];
    Softmax soft;
    Kept kept = {};
    int unit = -1, stage = 0, parity = 0;
    begin_head(soft, acc);

    int start = begun.y;
    for (int first_unit = begun.x; start < stop; first_unit += 32) {
        Unit units;
        int pages;
        read_units(arg, begin, stop, first_unit, start, units, pages);
        Place now, next;
        int block = find_block(arg, units, first_unit, pages, 0, next);
        find_page(arg, block, next, lane < pages);
        int issued = 0, into = stage;
        bool looked_up = false;
        auto issue = [&]() {
            int at = issued % 32;
            if (at == 0) {
                now = next;
                looked_up = issued + 32 < pages;
                if (looked_up) block = find_block(arg, units, first_unit, pages, issued + 32, next);
            } else if (looked_up) {  // a page later, so that nothing waits for the block's number
                find_page(arg, block, next, issued - at + 32 + lane < pages);
                looked_up = false;
            }
            int page = shuffle(now.page, at), lo = shuffle(now.lo, at), hi = shuffle(now.hi, at);
            int entry = shuffle(now.entry, at), of_unit = shuffle(now.unit, at);
            if (lane == 0) {
                held[into] = make_int4(lo, hi, entry, of_unit);
                expect_bytes(&barriers[into], PAGE_BYTES);
                copy_bytes(memory + into * STRIDE, arg.pages + (i64)page * PAGE_BYTES, PAGE_BYTES, &barriers[into]);
            }
            into = into + 1 == STAGES ? 0 : into + 1;
            issued++;
        };
        while (issued < min(pages, STAGES)) issue();
        sync_warp();
        for (int done = 0; done < pages; done++) {
            int4 place = held[stage];
            if (place.w != unit) {
                if (unit >= 0) {
                    leave_tier(unit % TIERS, acc);
                    if (place.w / TIERS != unit / TIERS) {
                        write_head(arg, (i64)program + unit / TIERS, soft, acc);
                        begin_head(soft, acc);
                    }
                }
                unit = place.w;
                int row = shuffle(units.row, unit - first_unit);
                for_tier(unit % TIERS, [&](auto tier) {
                    turn_to<decltype(tier)::value>(arg, unit, row, operand, soft, acc, kept);
                });
            }
            int lo = place.x;
            if (SLIDES) lo = max(lo, (int)arg.seq_lens[unit / (TIERS * HEADS)] - arg.attention_span);
            wait_bytes(&barriers[stage], parity);
            for_tier(unit % TIERS, [&](auto tier) {
                attend<decltype(tier)::value>(arg, memory + stage * STRIDE, lo, place.y, place.z, operand, soft, acc, kept);
            });
            if (++stage == STAGES) stage = 0, parity ^= 1;
            sync_warp();  // all lanes have read the page before another one takes its place
            if (issued < pages) {
                issue();
                sync_warp();
            }
        }
    }
    if (unit >= 0) {
        leave_tier(unit % TIERS, acc);
        write_head(arg, (i64)program + unit / TIERS, soft, acc);
    }
}
