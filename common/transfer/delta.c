/* What differs between two versions of the same words, found and written at the speed of memory.
 *
 * The same as vectors.py, which tells the format. Called through ctypes by native.py, without the GIL, on any
 * address: words are loaded and stored by memcpy, as no buffer need be aligned. Nothing here allocates.
 *
 * SSE2 and NEON are part of their architectures, so nothing is asked of the processor. AVX2 and AVX-512 were
 * tried: both versions come from main memory, and that is what takes the time.
 */
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "deltas are little-endian; numpy does it here"
#endif

/* Raised with every change of what a function takes, or does: native.py refuses an older library. */
#define ABI 1

#define BLOCK_WORDS 65536
#define GROUP 64 /* words that are compared at once; what `offsets` and `values` have room for beyond `most` */
#define AT_ONCE 4 /* words of a group that are noted without asking whether as many differ; divides GROUP */

#define AHEAD 64 /* words, whose lines are on their way from memory while one is written: a seventh less time */

#if defined(__SSE2__)
#include <emmintrin.h>

static uint64_t sixteen(const uint8_t *a, const uint8_t *b) {
    __m128i low = _mm_cmpeq_epi16(_mm_loadu_si128((const __m128i *)a), _mm_loadu_si128((const __m128i *)b));
    __m128i high = _mm_cmpeq_epi16(_mm_loadu_si128((const __m128i *)(a + 16)), _mm_loadu_si128((const __m128i *)(b + 16)));
    return (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_packs_epi16(low, high));
}

static uint64_t differing(const uint8_t *a, const uint8_t *b) {
    return ~(sixteen(a, b) | sixteen(a + 32, b + 32) << 16 | sixteen(a + 64, b + 64) << 32 | sixteen(a + 96, b + 96) << 48);
}

#elif defined(__aarch64__)
#include <arm_neon.h>

static uint8x16_t sixteen(const uint8_t *a, const uint8_t *b) {
    static const uint8_t BITS[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint16x8_t low = vceqq_u16(vreinterpretq_u16_u8(vld1q_u8(a)), vreinterpretq_u16_u8(vld1q_u8(b)));
    uint16x8_t high = vceqq_u16(vreinterpretq_u16_u8(vld1q_u8(a + 16)), vreinterpretq_u16_u8(vld1q_u8(b + 16)));
    return vandq_u8(vcombine_u8(vmovn_u16(low), vmovn_u16(high)), vld1q_u8(BITS));
}

static uint64_t differing(const uint8_t *a, const uint8_t *b) {
    uint8x16_t first = vpaddq_u8(sixteen(a, b), sixteen(a + 32, b + 32));
    uint8x16_t second = vpaddq_u8(sixteen(a + 64, b + 64), sixteen(a + 96, b + 96));
    uint8x16_t sums = vpaddq_u8(first, second);
    return ~vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(sums, sums)), 0);
}

#else
#define differing(a, b) differing_of(a, b, GROUP)
#endif

static uint16_t word(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint32_t quad(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* A bit for each of at most 64 words, the first one's the lowest. */
static uint64_t differing_of(const uint8_t *a, const uint8_t *b, int64_t words) {
    uint64_t mask = 0;
    for (int64_t i = 0; i < words; i++)
        mask |= (uint64_t)(word(a + 2 * i) != word(b + 2 * i)) << i;
    return mask;
}

int32_t rollout_delta_abi(void) { return ABI; }

/* Note where words differ and what they are now; returns how many do, -1: more than `most`.
 *
 * counts: [blocks]; offsets, values: [most + GROUP], of which the first `returned` are the answer. Each group is
 * read once for what differs, and as many are noted as bits were found: whoever writes the memory meanwhile can
 * spoil the answer, but never lets it grow over its room.
 */
int64_t rollout_delta_find(const uint8_t *before, const uint8_t *after, int64_t words, int64_t most,
                           uint32_t *counts, uint16_t *offsets, uint16_t *values) {
    int64_t total = 0;
    for (int64_t block = 0; block < words; block += BLOCK_WORDS) {
        const uint8_t *old = before + 2 * block, *now = after + 2 * block;
        int64_t end = words - block < BLOCK_WORDS ? words - block : BLOCK_WORDS, began = total;
        for (int64_t at = 0; at < end; at += GROUP) {
            const uint8_t *group = now + 2 * at;
            uint64_t mask = end - at >= GROUP ? differing(old + 2 * at, group)
                                              : differing_of(old + 2 * at, group, end - at);
            int64_t found = __builtin_popcountll(mask);
            /* A branch for each word that differs would be guessed wrongly half of the time. Without a bit it is the
             * first word that is noted, which is there, and is no part of the answer. */
            for (int64_t noted = 0; noted == 0 || noted < found; noted += AT_ONCE)
                for (int64_t i = total + noted; i < total + noted + AT_ONCE; i++) {
                    int64_t bit = mask ? __builtin_ctzll(mask) : 0;
                    offsets[i] = (uint16_t)(at + bit);
                    values[i] = word(group + 2 * bit);
                    mask &= mask - 1;
                }
            total += found;
            if (total > most)
                return -1;
        }
        counts[block / BLOCK_WORDS] = (uint32_t)(total - began);
    }
    return total;
}

/* Where a delta's parts are, once it is known to be one. */
struct parts {
    uint64_t blocks;
    const uint8_t *table, *offsets, *values;
};

/* Whether `size` bytes are a delta of `words` words and `odd` bytes: all of it is looked at before anything is
 * written, and only what was looked at is written by. Sums can't wrap: a table has less than 2^32 blocks.
 */
static int is_delta(const uint8_t *delta, uint64_t size, uint64_t words, uint64_t odd, struct parts *parts) {
    if (size < 4)
        return 0;
    uint64_t blocks = quad(delta), begin = 4 + 8 * blocks, total = 0, least = 0;
    if (begin > size)
        return 0;
    const uint8_t *table = delta + 4, *offset = delta + begin;
    for (uint64_t i = 0; i < blocks; i++)
        total += quad(table + 8 * i + 4);
    if (total > size / 4 || begin + 4 * total + odd != size)
        return 0;
    *parts = (struct parts){blocks, table, offset, offset + 2 * total};
    for (uint64_t i = 0; i < blocks; i++) {
        uint64_t index = quad(table + 8 * i), count = quad(table + 8 * i + 4);
        if (index < least || count == 0)
            return 0;
        int falls = 0;
        for (uint64_t j = 1; j < count; j++)
            falls |= word(offset + 2 * j) <= word(offset + 2 * j - 2);
        if (falls || index * BLOCK_WORDS + word(offset + 2 * count - 2) >= words)
            return 0;
        least = index + 1;
        offset += 2 * count;
    }
    return 1;
}

/* Write a delta into `nbytes` of memory; returns 0 and writes nothing if it is none of them.
 *
 * The delta is memory that nobody else writes: bytes of this process, not pages that a sender shares.
 */
int32_t rollout_delta_apply(const uint8_t *delta, uint64_t size, uint8_t *memory, uint64_t nbytes) {
    struct parts parts;
    if (!is_delta(delta, size, nbytes / 2, nbytes % 2, &parts))
        return 0;
    const uint8_t *offset = parts.offsets, *value = parts.values;
    for (uint64_t i = 0; i < parts.blocks; i++) {
        uint8_t *block = memory + 2 * (uint64_t)BLOCK_WORDS * quad(parts.table + 8 * i);
        for (const uint8_t *end = offset + 2 * (uint64_t)quad(parts.table + 8 * i + 4); offset < end; offset += 2, value += 2) {
            if (end - offset > 2 * AHEAD)
                __builtin_prefetch(block + 2 * (uint64_t)word(offset + 2 * AHEAD), 1);
            memcpy(block + 2 * (uint64_t)word(offset), value, 2);
        }
    }
    if (nbytes % 2)
        memory[nbytes - 1] = delta[size - 1];
    return 1;
}
