/* The code of every width of full blocks: much of it, so it is compiled once for packed.c and gather.c. */
#include "levels.h"

#define BLOCK 256

#define RA_LOOPS "lanes_loops.h"
#include "each_level.h"
