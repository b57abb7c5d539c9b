/* Runs the fuzz target without libFuzzer, on inputs drawn from a seed: where there is no libFuzzer, e.g. under an emulator.
 * Arguments: how many inputs, and the seed. What is packed must come back, and all ways to read must agree. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int main(int n_arguments, char **arguments)
{
    static uint8_t data[6000];
    long n = n_arguments > 1 ? atol(arguments[1]) : 10000;
    uint64_t state = n_arguments > 2 ? strtoull(arguments[2], NULL, 10) + 1 : 1;
    for (long i = 0; i < n; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        size_t size = 8 + state % (i % 16 ? 600 : sizeof data - 8);
        uint64_t top = state >> 20 & 7 ? ~(uint64_t)0 >> (state >> 24 & 63) : 3;
        for (size_t k = 0; k < size; k++) {
            state ^= state << 13, state ^= state >> 7, state ^= state << 17;
            data[k] = (uint8_t)(k < 8 ? state >> 32 : (state >> 16) & top);
        }
        LLVMFuzzerTestOneInput(data, size);
    }
    printf("%ld passed, 0 failed\n", n);
    return 0;
}
