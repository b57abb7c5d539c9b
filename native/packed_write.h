/* Packing blocks; included once per level of vector instructions and width of arithmetic: WIDE is uint32_t or uint64_t,
 * WIDE_BITS its bits, and NAME(f) names what depends on both. */

/* Copy values of `itemsize` bytes to wider ones. */
RA_INLINE RA_TARGET void NAME(load_values)(const uint8_t *in, int itemsize, int64_t n, WIDE *out)
{
    switch (itemsize) {
    case 1:
        for (int64_t i = 0; i < n; i++)
            out[i] = in[i];
        break;
    case 2:
        for (int64_t i = 0; i < n; i++)
            out[i] = load16(in + 2 * i);
        break;
    default:
        memcpy(out, in, sizeof(WIDE) * (size_t)n);
    }
}

/* Count how often a value is above the one before. */
RA_INLINE RA_TARGET int64_t NAME(count_ascents)(const WIDE *values, int64_t n)
{
    uint32_t ascents = 0;
    for (int64_t i = 1; i < n; i++)
        ascents += values[i] > values[i - 1];
    return ascents;
}

/* Tell whether at least seven of eight neighbours ascend strictly. */
static RA_TARGET int NAME(is_ascending)(const uint8_t *in, int itemsize, int64_t n)
{
    WIDE values[BLOCK + 1];
    int64_t ascents = 0;
    for (int64_t start = 0; start + 1 < n; start += BLOCK) {
        int64_t step = least(BLOCK + 1, n - start);
        NAME(load_values)(in + start * itemsize, itemsize, step, values);
        ascents += NAME(count_ascents)(values, step);
    }
    return n > 1 && ascents * 8 >= (n - 1) * 7;
}

RA_INLINE RA_TARGET WIDE NAME(smallest)(const WIDE *values, int64_t n)
{
    WIDE found = values[0];
    for (int64_t i = 1; i < n; i++)
        found = values[i] < found ? values[i] : found;
    return found;
}

/* Return how many of `n` loaded values, which begin at `start`, the block takes; `breaks` are those beyond it. */
RA_INLINE RA_TARGET int64_t NAME(block_length)(const WIDE *values, int64_t n, int ascending, int64_t start,
                                               const int64_t *breaks, int64_t n_breaks)
{
    if (ascending) {
        /* Counting has no branch and most blocks have no fall; where there is one, it is looked for. */
        if (NAME(count_ascents)(values, n) == n - 1)
            return n;
        int64_t i = 1;
        while (values[i] > values[i - 1])
            i++;
        return i;
    }
    for (int64_t i = 0; i < n_breaks && breaks[i] < start + n; i++)
        if (breaks[i] - start >= SHORT)
            return breaks[i] - start;
    return n;
}

/* Fill `x` with gaps less one, or differences from the base; return the bits of the largest. */
RA_INLINE RA_TARGET int NAME(differences)(const WIDE *values, int64_t n, int ascending, WIDE base, WIDE *x)
{
    WIDE largest = 0;
    x[0] = ascending ? 0 : values[0] - base;
    for (int64_t i = ascending; i < n; i++) {
        x[i] = values[i] - (ascending ? values[i - 1] + 1 : base);
        largest = x[i] > largest ? x[i] : largest;
    }
    return bits_of(largest);
}

/* Choose the width that makes values of at most `bits` bits smallest; -1 where none of at most 32 bits leaves few
 * enough exceptions, whose number goes to `beyond`. */
RA_INLINE RA_TARGET int NAME(choose_width)(const WIDE *x, int64_t n, int bits, int *beyond)
{
    int best = -1;
    int64_t best_bytes = (int64_t)1 << 40;
    for (int width = bits < MOST_WIDTH ? bits : MOST_WIDTH; width >= 0; width--) {
        uint32_t larger = 0;
        if (width < bits) {
            WIDE limit = (WIDE)(((uint64_t)1 << width) - 1);
            for (int64_t i = 0; i < n; i++)
                larger += x[i] > limit;
        }
        if (larger > 255 || larger * LEAST_EXCEPTION >= best_bytes)
            break;
        int64_t size = body_bytes(n, width) + larger * (1 + (1 << byte_class(bits - width)) + EXCEPTION_PENALTY);
        if (size < best_bytes) {
            best = width;
            best_bytes = size;
            *beyond = (int)larger;
        }
    }
    return best;
}

/* Set one bit for every value of an ascending block, counted from its first. */
RA_INLINE RA_TARGET void NAME(pack_bitmap)(const WIDE *values, int64_t n, int64_t n_bytes, uint8_t *out)
{
    uint64_t words[MOST_SPAN / 64 + 2] = {0}, held = 0, word = 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t place = values[i] - values[0];
        if (place >> 6 != word) {
            words[word] = held;
            held = 0;
            word = place >> 6;
        }
        held |= (uint64_t)1 << (place & 63);
    }
    words[word] = held;
    memcpy(out, words, (size_t)n_bytes);
}

/* Pack one block of loaded values behind its base at `out`; `room` is for differences and their low bits. */
static RA_TARGET struct packed_block NAME(pack_block)(const WIDE *values, int64_t n, int ascending, int base_bytes,
                                                      int itemsize, uint8_t *out)
{
    WIDE x[BLOCK];
    uint32_t low[BLOCK];
    WIDE base = ascending ? values[0] : NAME(smallest)(values, n);
    int bits = NAME(differences)(values, n, ascending, base, x), beyond = 0;
    int width = NAME(choose_width)(x, n, bits, &beyond);
    int size = byte_class(bits - width);
    int64_t raw = n * itemsize, packed = raw + 1, bitmap = raw + 1;
    if (width >= 0)
        packed = body_bytes(n, width) + beyond * (1 + (1 << size));
    if (ascending && values[n - 1] - base < MOST_SPAN)
        bitmap = ((int64_t)(values[n - 1] - base) + 8) >> 3;
    store_bytes(out, base_bytes, base);
    out += base_bytes;
    if (raw < packed && raw < bitmap) {
        for (int64_t i = 0; i < n; i++)
            store_bytes(out + i * itemsize, itemsize, x[i]);
        return (struct packed_block){RAW, 0, base_bytes + raw};
    }
    if (bitmap < packed) {
        NAME(pack_bitmap)(values, n, bitmap, out);
        return (struct packed_block){BITMAP, (uint8_t)bitmap, base_bytes + bitmap};
    }
    uint32_t mask = (uint32_t)(((uint64_t)1 << width) - 1);
    for (int64_t i = 0; i < n; i++)
        low[i] = (uint32_t)x[i] & mask;
    if (n < STREAM_BELOW) {
        pack_stream(low, n, width, out);
    } else {
        uint8_t words[4 * BLOCK];
        memset(low + n, 0, sizeof low - 4 * (size_t)n);
        VARIANT(ra_pack_full)(low, width, words);
        memcpy(out, words, (size_t)body_bytes(n, width));
    }
    if (beyond) {
        /* Without a branch: which values are too wide cannot be foretold. */
        uint8_t *places = out + body_bytes(n, width), *highs = places + beyond, found[BLOCK + 1];
        int n_found = 0;
        for (int64_t i = 0; i < n; i++) {
            found[n_found] = (uint8_t)i;
            n_found += x[i] > mask;
        }
        memcpy(places, found, (size_t)beyond);
        for (int i = 0; i < beyond; i++)
            store_bytes(highs + (i << size), 1 << size, (uint64_t)x[found[i]] >> width);
    }
    return (struct packed_block){(uint8_t)(width | (beyond ? size << 6 : 0)), (uint8_t)beyond, base_bytes + packed};
}

/* Pack a chunk; see ra_pack. */
static RA_TARGET int64_t NAME(pack_chunk)(const uint8_t *in, int itemsize, int64_t n, const int64_t *breaks,
                                          int64_t n_breaks, uint8_t *out, uint8_t *lengths)
{
    WIDE values[BLOCK], largest = 0;
    int ascending = NAME(is_ascending)(in, itemsize, n);
    int64_t n_blocks = 0, at_break = 0;
    for (int64_t start = 0; start < n;) {
        int64_t step = least(BLOCK, n - start);
        while (at_break < n_breaks && breaks[at_break] <= start)
            at_break++;
        NAME(load_values)(in + start * itemsize, itemsize, step, values);
        step = NAME(block_length)(values, step, ascending, start, breaks + at_break, n_breaks - at_break);
        WIDE base = ascending ? values[0] : NAME(smallest)(values, step);
        largest = base > largest ? base : largest;
        lengths[n_blocks++] = (uint8_t)(step - 1);
        start += step;
    }
    int base_class = byte_class(bits_of(largest));
    uint8_t *skips = out + HEAD_BYTES, *table = skips + SKIP_BYTES * ((n_blocks + SKIP - 1) / SKIP);
    uint8_t *payload = table + 3 * n_blocks, *to = payload;
    int64_t start = 0;
    for (int64_t block = 0; block < n_blocks; block++) {
        if (block % SKIP == 0) {
            store32(skips + SKIP_BYTES * (block / SKIP), (uint32_t)start);
            store32(skips + SKIP_BYTES * (block / SKIP) + 4, (uint32_t)(to - payload));
        }
        int64_t step = lengths[block] + 1;
        NAME(load_values)(in + start * itemsize, itemsize, step, values);
        struct packed_block made = NAME(pack_block)(values, step, ascending, 1 << base_class, itemsize, to);
        table[block] = lengths[block];
        table[n_blocks + block] = made.kind;
        table[2 * n_blocks + block] = made.third;
        to += made.n_bytes;
        start += step;
    }
    memset(to, 0, TAIL_BYTES);
    int64_t total = to + TAIL_BYTES - out;
    store16(out, MAGIC);
    out[2] = VERSION;
    out[3] = (uint8_t)(byte_class(8 * itemsize) | (ascending ? ASCENDING : 0) | base_class << 3);
    store32(out + 4, (uint32_t)n);
    store32(out + 8, (uint32_t)n_blocks);
    store32(out + 12, (uint32_t)total);
    return total;
}
