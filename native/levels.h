/* The level of vector instructions in use, and what a source must do to be compiled for each.
 *
 * A source with variants has its loops in a file of its own, names it as RA_LOOPS and includes each_level.h, which
 * includes it once per level with RA_LEVEL defined: VARIANT(f) names the variant of f, and RA_TARGET goes before every
 * function. Callers choose with RA_CHOOSE. */
#ifndef RAGGEDATLAS_LEVELS_H
#define RAGGEDATLAS_LEVELS_H

#include "bits.h"
#include "raggedatlas.h"

#if RA_X86
#include <immintrin.h>
#endif

extern int ra_level_used;
extern int ra_crc_instructions;

#define RA_JOIN2(a, b) a##b
#define RA_JOIN(a, b) RA_JOIN2(a, b)

#if RA_X86
#define RA_CHOOSE(f) (ra_level_used == RA_AVX512 ? f##_avx512 : ra_level_used == RA_AVX2 ? f##_avx2 : f##_baseline)
#else
#define RA_CHOOSE(f) f##_baseline
#endif

#define RA_TARGET_AVX2 __attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt")))
#define RA_AVX512_FEATURES "avx2,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512cd,avx512dq,avx512vl"
#if defined(__clang__) /* ignores a whole attribute that says something about the width */
#define RA_TARGET_AVX512 __attribute__((target(RA_AVX512_FEATURES)))
#else
#define RA_TARGET_AVX512 __attribute__((target(RA_AVX512_FEATURES ",prefer-vector-width=512")))
#endif

/* Compile an inline function f of the file for each level, to be called as RA_CHOOSE(f)(...). This serves where the
 * compiler finds the instructions; a file that names them is included once per level instead. */
#if RA_X86
#define RA_VARIANTS(f, parameters, arguments)                                                                        \
    static int32_t f##_baseline parameters { return f arguments; }                                                   \
    RA_TARGET_AVX2 static int32_t f##_avx2 parameters { return f arguments; }                                        \
    RA_TARGET_AVX512 static int32_t f##_avx512 parameters { return f arguments; }
#else
#define RA_VARIANTS(f, parameters, arguments)                                                                        \
    static int32_t f##_baseline parameters { return f arguments; }
#endif

/* Call the function of a family that is for unsigned integers of so many bytes. */
#define RA_CHOOSE_WIDTH(itemsize, f, ...)                                                                            \
    switch (itemsize) {                                                                                              \
    case 1:                                                                                                          \
        return f##_uint8_t(__VA_ARGS__);                                                                             \
    case 2:                                                                                                          \
        return f##_uint16_t(__VA_ARGS__);                                                                            \
    case 4:                                                                                                          \
        return f##_uint32_t(__VA_ARGS__);                                                                            \
    case 8:                                                                                                          \
        return f##_uint64_t(__VA_ARGS__);                                                                            \
    default:                                                                                                         \
        return RA_BAD_TYPE;                                                                                          \
    }

#endif
