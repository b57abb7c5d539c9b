/* Runs the fuzz target without libFuzzer, e.g. under an emulator or with another compiler: on inputs drawn from a seed, or on
 * recorded ones. Arguments: how many inputs, and the seed; or a file of inputs, each after its length in four bytes, lowest
 * first. What is packed must come back, and all ways to read must agree. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint8_t data[6000];

static int replay(const char *path)
{
    FILE *file = fopen(path, "rb");
    uint8_t size[4];
    long n = 0;
    if (!file) {
        perror(path);
        return 1;
    }
    for (; fread(size, 1, 4, file) == 4; n++) {
        size_t n_bytes = size[0] | (size_t)size[1] << 8 | (size_t)size[2] << 16 | (size_t)size[3] << 24;
        if (n_bytes > sizeof data || fread(data, 1, n_bytes, file) != n_bytes) {
            fprintf(stderr, "%s: input %ld is cut off or too long\n", path, n);
            return 1;
        }
        LLVMFuzzerTestOneInput(data, n_bytes);
    }
    fclose(file);
    printf("%ld recorded inputs passed\n", n);
    return n == 0;
}

int main(int n_arguments, char **arguments)
{
    if (n_arguments == 2 && (arguments[1][0] < '0' || arguments[1][0] > '9'))
        return replay(arguments[1]);
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
