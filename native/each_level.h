/* Includes the file RA_LOOPS once per level of vector instructions that the processor family may have. */
#define RA_LEVEL 0
#define RA_TARGET
#define VARIANT(f) RA_JOIN(f, _baseline)
#include RA_LOOPS
#undef RA_LEVEL
#undef RA_TARGET
#undef VARIANT

#if RA_X86
#define RA_LEVEL 1
#define RA_TARGET RA_TARGET_AVX2
#define VARIANT(f) RA_JOIN(f, _avx2)
#include RA_LOOPS
#undef RA_LEVEL
#undef RA_TARGET
#undef VARIANT

#define RA_LEVEL 2
#define RA_TARGET RA_TARGET_AVX512
#define VARIANT(f) RA_JOIN(f, _avx512)
#include RA_LOOPS
#undef RA_LEVEL
#undef RA_TARGET
#undef VARIANT
#endif
#undef RA_LOOPS
