/* Full blocks of 256 values in eight lanes, packed and unpacked; included once per level by lanes.c. */

typedef uint32_t VARIANT(lanes) __attribute__((vector_size(32)));

RA_INLINE RA_TARGET VARIANT(lanes) VARIANT(lanes_at)(const void *at)
{
    VARIANT(lanes) found;
    memcpy(&found, at, sizeof found);
    return found;
}

/* POSITION for each of the 32 positions of a lane, and WIDTH for each width. */
#define POSITIONS4(p) POSITION(p) POSITION(p + 1) POSITION(p + 2) POSITION(p + 3)
#define POSITIONS16(p) POSITIONS4(p) POSITIONS4(p + 4) POSITIONS4(p + 8) POSITIONS4(p + 12)
#define POSITIONS POSITIONS16(0) POSITIONS16(16)
#define WIDTHS4(w) WIDTH(w) WIDTH(w + 1) WIDTH(w + 2) WIDTH(w + 3)
#define WIDTHS                                                                                                       \
    WIDTHS4(0) WIDTHS4(4) WIDTHS4(8) WIDTHS4(12) WIDTHS4(16) WIDTHS4(20) WIDTHS4(24) WIDTHS4(28) WIDTH(32)

/* Value i lies in lane i % 8 at position i / 8, so that one shift and one mask unpack eight neighbours. */
#define POSITION(p)                                                                                                  \
    {                                                                                                                \
        int word = (p)*width / 32, shift = (p)*width % 32;                                                           \
        VARIANT(lanes) value = VARIANT(lanes_at)(body + 32 * word) >> shift;                                         \
        if (shift + width > 32)                                                                                      \
            value |= VARIANT(lanes_at)(body + 32 * word + 32) << (32 - shift);                                       \
        if (shift + width != 32)                                                                                     \
            value &= mask;                                                                                           \
        memcpy(out + 8 * (p), &value, sizeof value);                                                                 \
    }

RA_INLINE RA_TARGET void VARIANT(unpack_width)(const uint8_t *body, const int width, uint32_t *out)
{
    const uint32_t mask = width < 32 ? ((uint32_t)1 << width) - 1 : ~(uint32_t)0;
    if (width == 0) {
        memset(out, 0, 4 * BLOCK);
        return;
    }
    POSITIONS
}

#define WIDTH(w)                                                                                                     \
    case w:                                                                                                          \
        VARIANT(unpack_width)(body, w, out);                                                                         \
        break;

/* Unpack 256 values of a width that the compiler knows, for each width. */
RA_TARGET void VARIANT(ra_unpack_full)(const uint8_t *body, int width, uint32_t *out)
{
    switch (width) {
        WIDTHS
    }
}

#undef WIDTH
#undef POSITION

#define POSITION(p)                                                                                                  \
    {                                                                                                                \
        int word = (p)*width / 32, shift = (p)*width % 32;                                                           \
        VARIANT(lanes) value = VARIANT(lanes_at)(in + 8 * (p));                                                      \
        held |= value << shift;                                                                                      \
        if (shift + width >= 32) {                                                                                   \
            memcpy(out + 32 * word, &held, sizeof held);                                                             \
            held = shift + width > 32 ? value >> (32 - shift) : zero;                                                \
        }                                                                                                            \
    }

RA_INLINE RA_TARGET void VARIANT(pack_width)(const uint32_t *in, const int width, uint8_t *out)
{
    const VARIANT(lanes) zero = {0};
    VARIANT(lanes) held = zero;
    if (width == 0)
        return;
    POSITIONS
}

#define WIDTH(w)                                                                                                     \
    case w:                                                                                                          \
        VARIANT(pack_width)(in, w, out);                                                                             \
        break;

/* Pack 256 values of a width that the compiler knows, for each width; the inverse of ra_unpack_full. */
RA_TARGET void VARIANT(ra_pack_full)(const uint32_t *in, int width, uint8_t *out)
{
    switch (width) {
        WIDTHS
    }
}

#undef WIDTH
#undef WIDTHS
#undef WIDTHS4
#undef POSITION
#undef POSITIONS
#undef POSITIONS4
#undef POSITIONS16
