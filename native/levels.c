/* Finds out what the processor can do, when the library is loaded. */
#include "levels.h"

#if RA_X86
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

int ra_level_used = RA_BASELINE;
int ra_crc_instructions = 0;

int32_t ra_abi(void) { return RA_ABI; }

#if RA_X86
/* What the operating system saves for every thread: without that a register must not be used. By hand, because
 * `__builtin_cpu_supports` needs a part of the compiler's own library that zig does not have. */
static uint64_t saved_registers(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static int has_crc_instructions(void)
{
    uint32_t a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 20 & 1);
}

int32_t ra_best_level(void)
{
    uint32_t a, b, c, d;
    const uint32_t popcnt = 1u << 23, osxsave = 1u << 27, avx = 1u << 28;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (popcnt | osxsave | avx)) != (popcnt | osxsave | avx))
        return RA_BASELINE;
    uint64_t saved = saved_registers();
    if (!__get_cpuid(0x80000001, &a, &b, &c, &d) || !(c >> 5 & 1)) /* lzcnt */
        return RA_BASELINE;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return RA_BASELINE;
    const uint32_t bmi_avx2 = 1u << 3 | 1u << 5 | 1u << 8;
    if ((b & bmi_avx2) != bmi_avx2 || (saved & 6) != 6)
        return RA_BASELINE;
    const uint32_t avx512 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31; /* f, dq, cd, bw, vl */
    return (b & avx512) == avx512 && (saved & 0xe6) == 0xe6 ? RA_AVX512 : RA_AVX2;
}
#else
static int has_crc_instructions(void)
{
#if defined(__aarch64__) && defined(__linux__)
    return getauxval(AT_HWCAP) >> 7 & 1; /* HWCAP_CRC32 */
#elif defined(__aarch64__) && defined(__APPLE__)
    return 1;
#else
    return 0;
#endif
}

int32_t ra_best_level(void) { return RA_BASELINE; }
#endif

int32_t ra_set_level(int32_t level)
{
    int32_t best = ra_best_level();
    ra_level_used = level < RA_BASELINE ? RA_BASELINE : level < best ? level : best;
    /* Other processors have one level only, which must not lose its instructions. */
    ra_crc_instructions = has_crc_instructions() && (level != RA_BASELINE || !RA_X86);
    return ra_level_used;
}

__attribute__((constructor)) static void choose_when_loaded(void) { ra_set_level(RA_AVX512); }
