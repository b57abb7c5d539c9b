/* Unpacking blocks of checked chunks; included once per level of vector instructions. */

typedef uint32_t VARIANT(lanes) __attribute__((vector_size(32)));

RA_INLINE RA_TARGET VARIANT(lanes) VARIANT(lanes_at)(const void *at)
{
    VARIANT(lanes) found;
    memcpy(&found, at, sizeof found);
    return found;
}

void VARIANT(ra_unpack_full)(const uint8_t *body, int width, uint32_t *out);

RA_INLINE RA_TARGET void VARIANT(unpack_lanes)(const uint8_t *body, int64_t n, int width, uint32_t *out)
{
    if (n > BLOCK - LANES) {
        VARIANT(ra_unpack_full)(body, width, out);
        return;
    }
    uint32_t mask = width < 32 ? ((uint32_t)1 << width) - 1 : ~(uint32_t)0;
    if (width == 0) {
        memset(out, 0, (size_t)(4 * (n + LANES - 1)));
        return;
    }
    int64_t bit = 0;
    for (int64_t i = 0; i < n; i += LANES, bit += width) {
        int shift = bit & 31;
        const uint8_t *word = body + (bit >> 5) * 32;
        VARIANT(lanes) value = VARIANT(lanes_at)(word) >> shift;
        if (shift + width > 32)
            value |= VARIANT(lanes_at)(word + 32) << (32 - shift);
        value &= mask;
        memcpy(out + i, &value, sizeof value);
    }
}

/* The zero bytes behind the last block keep the loads inside the chunk. */
RA_INLINE RA_TARGET void VARIANT(unpack_stream)(const uint8_t *body, int64_t n, int width, uint32_t *out)
{
    uint64_t mask = ((uint64_t)1 << width) - 1, bit = 0;
    for (int64_t i = 0; i < n; i++, bit += (uint64_t)width)
        out[i] = (uint32_t)(load64(body + (bit >> 3)) >> (bit & 7) & mask);
}

/* Write base and place of every set bit, or what `map` has at that number: a load and a permutation, where other blocks
 * take a look-up per value. Unused slots are overwritten by what follows. */
RA_INLINE RA_TARGET void VARIANT(unpack_bitmap)(const uint8_t *body, int64_t n_bytes, uint32_t base, const int32_t *map,
                                                uint32_t *out)
{
    uint32_t *end = out + BLOCK;
#if RA_LEVEL == 2
    const __m512i places = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int64_t i = 0; i < n_bytes && out < end; i += 2, base += 16) {
        __mmask16 bits = i + 1 < n_bytes ? load16(body + i) : body[i];
        __m512i of = map ? _mm512_loadu_si512(map + base) : _mm512_add_epi32(places, _mm512_set1_epi32((int)base));
        _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(bits, of));
        out += __builtin_popcount(bits);
    }
#else
    for (int64_t i = 0; i < n_bytes && out < end; i++, base += 8) {
        uint64_t places = ra_bit_places[body[i]];
#if RA_LEVEL == 1
        __m256i at = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)places));
        __m256i found = map ? _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)(map + base)), at)
                            : _mm256_add_epi32(at, _mm256_set1_epi32((int)base));
        _mm256_storeu_si256((__m256i *)out, found);
#else
        for (int k = 0; k < 8; k++) {
            uint32_t value = base + (uint32_t)(places >> 8 * k & 255);
            out[k] = map ? (uint32_t)map[value] : value;
        }
#endif
        out += __builtin_popcount(body[i]);
    }
#endif
}

/* Turn the gaps less one of an ascending block into its values: entry i becomes base + i + values[0] + .. + values[i].
 * `n` is rounded up to whole vectors. */
RA_INLINE RA_TARGET void VARIANT(add_up)(uint32_t *values, uint32_t base, int64_t n)
{
#if RA_LEVEL == 2
    const __m512i zero = _mm512_setzero_si512(), step = _mm512_set1_epi32(16), last = _mm512_set1_epi32(15);
    const __m512i places = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i carry = _mm512_add_epi32(_mm512_set1_epi32((int)base), places);
    for (int64_t i = 0; i < n; i += 16) {
        __m512i sum = _mm512_loadu_si512(values + i);
        sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 15));
        sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 14));
        sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 12));
        sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 8));
        __m512i total = _mm512_permutexvar_epi32(last, sum);
        _mm512_storeu_si512(values + i, _mm512_add_epi32(sum, carry));
        carry = _mm512_add_epi32(carry, _mm512_add_epi32(total, step));
    }
#elif RA_LEVEL == 1
    const __m256i step = _mm256_set1_epi32(8), last = _mm256_set1_epi32(7), third = _mm256_set1_epi32(3);
    __m256i carry = _mm256_add_epi32(_mm256_set1_epi32((int)base), _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0));
    for (int64_t i = 0; i < n; i += 8) {
        __m256i sum = _mm256_loadu_si256((const __m256i *)(values + i));
        sum = _mm256_add_epi32(sum, _mm256_slli_si256(sum, 4));
        sum = _mm256_add_epi32(sum, _mm256_slli_si256(sum, 8));
        /* Shifts stay inside halves: the upper one gets the sum of the lower. */
        __m256i lower = _mm256_permutevar8x32_epi32(sum, third);
        sum = _mm256_add_epi32(sum, _mm256_blend_epi32(_mm256_setzero_si256(), lower, 0xf0));
        __m256i total = _mm256_permutevar8x32_epi32(sum, last);
        _mm256_storeu_si256((__m256i *)(values + i), _mm256_add_epi32(sum, carry));
        carry = _mm256_add_epi32(carry, _mm256_add_epi32(total, step));
    }
#else
    for (int64_t i = 0; i < n; i++) {
        base += values[i];
        values[i] = base + (uint32_t)i;
    }
#endif
}

/* Add what did not fit the width of a block. */
RA_INLINE RA_TARGET void VARIANT(patch)(const uint8_t *body, struct entry e, uint32_t *out)
{
    const uint8_t *places = body + body_bytes(e.count, e.width), *highs = places + e.third;
    int size = 1 << (e.kind >> 6);
    for (int i = 0; i < e.third; i++)
        out[places[i]] |= (uint32_t)(load_bytes(highs + i * size, size) << e.width);
}

/* Unpack one checked block of values of at most 4 bytes to `out`, (SCRATCH,); return what to add to every value. */
RA_INLINE RA_TARGET uint32_t VARIANT(unpack_block)(const struct packed *chunk, struct place at, struct entry e,
                                                   uint32_t *out)
{
    const uint8_t *body = chunk->payload + at.position;
    uint32_t base = (uint32_t)load_bytes(body, chunk->base_bytes);
    body += chunk->base_bytes;
    if (e.width == BITMAP) {
        VARIANT(unpack_bitmap)(body, e.third, base, NULL, out);
        return 0;
    }
    if (e.width == RAW) {
        for (int64_t i = 0; i < e.count; i++)
            out[i] = (uint32_t)load_bytes(body + i * chunk->itemsize, chunk->itemsize);
    } else {
        if (e.count < STREAM_BELOW)
            VARIANT(unpack_stream)(body, e.count, e.width, out);
        else
            VARIANT(unpack_lanes)(body, e.count, e.width, out);
        if (e.third)
            VARIANT(patch)(body, e, out);
    }
    if (!chunk->ascending)
        return base;
    VARIANT(add_up)(out, base, e.count);
    return 0;
}

#define WRITE(type)                                                                                                  \
    for (int64_t i = 0; i < n; i++)                                                                                  \
        ((type *)out)[i] = (type)(uint32_t)(values[i] + more);                                                       \
    break;

/* Write values plus a number in an element type. */
RA_INLINE RA_TARGET void VARIANT(write_values)(const uint32_t *values, int64_t n, uint32_t more, void *out, int type)
{
    switch (type) {
    case RA_UINT8:
        WRITE(uint8_t)
    case RA_UINT16:
        WRITE(uint16_t)
    case RA_UINT32:
        WRITE(uint32_t)
    case RA_UINT64:
        WRITE(uint64_t)
    case RA_FLOAT32:
        WRITE(float)
    default:
        WRITE(double)
    }
}
#undef WRITE

/* Write what a map has for values plus a number, its last entry for those beyond. */
RA_INLINE RA_TARGET void VARIANT(write_mapped)(const uint32_t *values, int64_t n, uint32_t more, const int32_t *map,
                                               int64_t n_map, int32_t *out)
{
    uint32_t beyond = (uint32_t)(n_map - 1);
#if RA_LEVEL == 2
    const __m512i add = _mm512_set1_epi32((int)more), end = _mm512_set1_epi32((int)beyond);
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 part = n - i >= 16 ? 0xffff : (__mmask16)((1u << (n - i)) - 1);
        __m512i found = _mm512_maskz_loadu_epi32(part, values + i);
        found = _mm512_min_epu32(_mm512_add_epi32(found, add), end);
        found = _mm512_mask_i32gather_epi32(found, part, found, map, 4);
        _mm512_mask_storeu_epi32(out + i, part, found);
    }
#else
    for (int64_t i = 0; i < n; i++) {
        uint32_t value = values[i] + more;
        out[i] = map[value < beyond ? value : beyond];
    }
#endif
}

/* Unpack values first to last of a checked chunk, and only the blocks that hold them. `map` may be NULL. */
RA_INLINE RA_TARGET void VARIANT(unpack_range)(const uint8_t *data, int64_t first, int64_t last, uint32_t *scratch,
                                               const int32_t *map, int64_t n_map, void *out, int type)
{
    struct packed chunk = open_packed(data);
    struct place at = seek(&chunk, first);
    char *target = out;
    while (at.start < last) {
        struct entry e = entry_at(&chunk, at.block);
        int64_t low = most(first - at.start, 0), n = least(last - at.start, e.count) - low;
        if (map && e.width == BITMAP) {
            const uint8_t *body = chunk.payload + at.position;
            uint64_t base = (uint32_t)load_bytes(body, chunk.base_bytes);
            if (base + 8 * (uint64_t)e.third + 8 <= (uint64_t)n_map) {
                VARIANT(unpack_bitmap)(body + chunk.base_bytes, e.third, (uint32_t)base, map, scratch);
                memcpy(target, scratch + low, 4 * (size_t)n);
                target += 4 * n;
                go_on(&chunk, e, &at);
                continue;
            }
        }
        uint32_t more = VARIANT(unpack_block)(&chunk, at, e, scratch);
        if (map) {
            VARIANT(write_mapped)(scratch + low, n, more, map, n_map, (int32_t *)target);
            target += 4 * n;
        } else {
            VARIANT(write_values)(scratch + low, n, more, target, type);
            target += ra_type_bytes[type] * n;
        }
        go_on(&chunk, e, &at);
    }
}
