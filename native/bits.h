/* Small inline functions on integers at any address, shared by the sources. */
#ifndef RAGGEDATLAS_BITS_H
#define RAGGEDATLAS_BITS_H

#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "raggedatlas stores little-endian numbers and is written for little-endian machines"
#endif

#if defined(__x86_64__) || defined(_M_X64)
#define RA_X86 1
#else
#define RA_X86 0
#endif

#define RA_INLINE static inline __attribute__((always_inline))

RA_INLINE uint16_t load16(const void *at)
{
    uint16_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

RA_INLINE uint32_t load32(const void *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

RA_INLINE uint64_t load64(const void *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

RA_INLINE void store16(void *at, uint16_t value) { memcpy(at, &value, sizeof value); }

RA_INLINE void store32(void *at, uint32_t value) { memcpy(at, &value, sizeof value); }

RA_INLINE void store64(void *at, uint64_t value) { memcpy(at, &value, sizeof value); }

/* Return the place of the lowest set bit, whatever for zero: tzcnt has a result for zero, and bsf keeps the old one. */
RA_INLINE int32_t lowest_bit(uint64_t bits)
{
#if RA_X86
    uint64_t place;
    __asm__("rep bsf %1, %0" : "=r"(place) : "r"(bits), "0"((uint64_t)0) : "cc");
    return (int32_t)place;
#else
    return bits ? __builtin_ctzll(bits) : 0;
#endif
}

RA_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

RA_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
