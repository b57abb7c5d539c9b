/* crc32c by instructions where there are any, else by tables; permutations of numbers. */
#include "levels.h"

#if RA_X86
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#endif

#define POLYNOMIAL 0x82f63b78u
#define STREAM 512 /* bytes that each of three streams takes before they are joined */

static uint32_t slices[8][256]; /* slices[k][b]: the crc of byte b and k zero bytes behind it */
static uint32_t beyond[4][256]; /* beyond[k][b]: byte k of a crc moved over STREAM zero bytes */

__attribute__((constructor)) static void fill_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        slices[0][byte] = crc;
    }
    for (uint32_t byte = 0; byte < 256; byte++)
        for (int k = 1; k < 8; k++)
            slices[k][byte] = slices[k - 1][byte] >> 8 ^ slices[0][slices[k - 1][byte] & 255];
    for (int k = 0; k < 4; k++)
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t crc = byte << 8 * k;
            for (int i = 0; i < STREAM; i++)
                crc = crc >> 8 ^ slices[0][crc & 255];
            beyond[k][byte] = crc;
        }
}

static uint32_t extend_by_tables(uint32_t crc, const uint8_t *data, int64_t n)
{
    for (; n >= 8; n -= 8, data += 8) {
        uint64_t word = load64(data) ^ crc;
        crc = 0;
        for (int k = 0; k < 8; k++)
            crc ^= slices[7 - k][word >> 8 * k & 255];
    }
    for (; n > 0; n--)
        crc = crc >> 8 ^ slices[0][(crc ^ *data++) & 255];
    return crc;
}

#if RA_X86 || defined(__aarch64__)

#if RA_X86
#if defined(__clang__) /* which has them apart from SSE4.2 */
#define CRC_TARGET __attribute__((target("sse4.2,crc32")))
#else
#define CRC_TARGET __attribute__((target("sse4.2")))
#endif
#define CRC64(crc, word) ((uint32_t)_mm_crc32_u64(crc, word))
#define CRC8(crc, byte) _mm_crc32_u8(crc, byte)
#else
#define CRC_TARGET __attribute__((target("+crc")))
#define CRC64(crc, word) __crc32cd(crc, word)
#define CRC8(crc, byte) __crc32cb(crc, byte)
#endif

static uint32_t moved_beyond(uint32_t crc)
{
    return beyond[0][crc & 255] ^ beyond[1][crc >> 8 & 255] ^ beyond[2][crc >> 16 & 255] ^ beyond[3][crc >> 24];
}

CRC_TARGET static uint32_t extend_by_instructions(uint32_t crc, const uint8_t *data, int64_t n)
{
    for (; n >= 3 * STREAM; n -= 3 * STREAM, data += 3 * STREAM) {
        uint32_t second = 0, third = 0;
        for (int i = 0; i < STREAM; i += 8) {
            crc = CRC64(crc, load64(data + i));
            second = CRC64(second, load64(data + STREAM + i));
            third = CRC64(third, load64(data + 2 * STREAM + i));
        }
        crc = moved_beyond(moved_beyond(crc) ^ second) ^ third;
    }
    for (; n >= 8; n -= 8, data += 8)
        crc = CRC64(crc, load64(data));
    for (; n > 0; n--)
        crc = CRC8(crc, *data++);
    return crc;
}

#else
#define extend_by_instructions extend_by_tables
#endif

uint32_t ra_crc32c(uint32_t crc, const uint8_t *data, int64_t n_bytes)
{
    return ~(ra_crc_instructions ? extend_by_instructions : extend_by_tables)(~crc, data, n_bytes);
}

static uint64_t hashed(uint64_t value, uint64_t key)
{
    value = (value ^ key) * 0xbf58476d1ce4e5b9u; /* factors of SplitMix64; only the upper bits are used */
    return (value ^ value >> 31) * 0x94d049bb133111ebu;
}

/* Return the image of a number below `size` under the permutation that the keys select. */
static uint64_t permuted(uint64_t number, uint64_t size, const uint64_t *keys, int64_t n_keys)
{
    int bits = 2; /* two halves of at least one bit */
    while (bits < 62 && size > (uint64_t)1 << bits)
        bits++;
    const int low = bits / 2, high = bits - low;
    do { /* each half is changed by a hash of the other, which can be undone: so this is a bijection */
        uint64_t left = number >> low, right = number & (((uint64_t)1 << low) - 1);
        for (int64_t k = 0; k < n_keys; k++)
            if (k & 1)
                right ^= hashed(left, keys[k]) >> (64 - low);
            else
                left ^= hashed(right, keys[k]) >> (64 - high);
        number = left << low | right;
    } while (number >= size); /* ends: a cycle that is entered below `size` comes back there */
    return number;
}

int32_t ra_permute(int64_t *numbers, int64_t n, int64_t size, const uint64_t *keys, int64_t n_keys)
{
    for (int64_t i = 0; i < n; i++) {
        if (numbers[i] < 0 || numbers[i] >= size)
            return RA_OUTSIDE;
        numbers[i] = (int64_t)permuted((uint64_t)numbers[i], (uint64_t)size, keys, n_keys);
    }
    return RA_GOOD;
}

/* The next number of SplitMix64. */
static uint64_t next_random(uint64_t *state)
{
    uint64_t value = *state += 0x9e3779b97f4a7c15u;
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
    value = (value ^ value >> 27) * 0x94d049bb133111ebu;
    return value ^ value >> 31;
}

enum { TABLE = 4096, ROUNDS = 6 };

int32_t ra_permute_each(int64_t *numbers, const int64_t *sizes, const uint64_t *seeds, int64_t n)
{
    uint16_t table[TABLE]; /* of few items a permutation is shuffled, since a network of few bits has few of them */
    uint64_t keys[ROUNDS];
    for (int64_t i = 0; i < n; i++) {
        const int64_t size = sizes[i];
        if (numbers[i] < 0 || numbers[i] >= size || size > (int64_t)1 << 62)
            return RA_OUTSIDE;
        if (i == 0 || seeds[i] != seeds[i - 1] || size != sizes[i - 1]) {
            uint64_t state = seeds[i];
            if (size <= TABLE)
                for (int64_t k = 0; k < size; k++) {
                    const uint64_t other = ((next_random(&state) >> 32) * (uint64_t)(k + 1)) >> 32;
                    table[k] = table[other];
                    table[other] = (uint16_t)k;
                }
            else
                for (int k = 0; k < ROUNDS; k++)
                    keys[k] = next_random(&state);
        }
        numbers[i] = size <= TABLE ? table[numbers[i]] : (int64_t)permuted((uint64_t)numbers[i], (uint64_t)size, keys, ROUNDS);
    }
    return RA_GOOD;
}
