/* Positions, lines and graphs: the cells of a grid, what a vertex of a line matters, the unbranched chains of a graph. */
#include "levels.h"

/* One function for each width of a coordinate. */
#define NUMBER_CELLS(T)                                                                                              \
    RA_INLINE int32_t number_cells_##T(const void *positions, int64_t n, int64_t n_dims, const double *edges,        \
                                       const int64_t *low, const int64_t *spans, int64_t *codes)                     \
    {                                                                                                                \
        const T *at = positions;                                                                                     \
        int outside = 0;                                                                                             \
        for (int64_t i = 0; i < n; i++, at += n_dims) {                                                              \
            uint64_t code = 0;                                                                                       \
            for (int64_t k = 0; k < n_dims; k++) {                                                                   \
                double place = (double)at[k] / edges[k];                                                             \
                int in = place >= -4.7e18 && place <= 4.7e18;                                                        \
                int64_t cell = (int64_t)(in ? place : 0);                                                            \
                uint64_t from_low = (uint64_t)(cell - (place < (double)cell)) - (uint64_t)low[k];                    \
                outside |= !in | (from_low >= (uint64_t)spans[k]);                                                   \
                code = code * (uint64_t)spans[k] + from_low;                                                         \
            }                                                                                                        \
            codes[i] = (int64_t)code;                                                                                \
        }                                                                                                            \
        return outside ? RA_OUTSIDE : RA_GOOD;                                                                       \
    }
NUMBER_CELLS(float)
NUMBER_CELLS(double)

RA_INLINE int32_t number_cells(const void *positions, int64_t n, int64_t n_dims, int32_t itemsize, const double *edges,
                               const int64_t *low, const int64_t *spans, int64_t *codes)
{
    if (itemsize == 4)
        return number_cells_float(positions, n, n_dims, edges, low, spans, codes);
    return itemsize == 8 ? number_cells_double(positions, n, n_dims, edges, low, spans, codes) : RA_BAD_TYPE;
}

int32_t ra_number_cells(const void *positions, int64_t n, int64_t n_dims, int32_t itemsize, const double *edges,
                        const int64_t *low, const int64_t *spans, int64_t *codes)
{
    /* Written out for the plane and for space, so that the loop over the axes goes. */
    if (n_dims == 3)
        return number_cells(positions, n, 3, itemsize, edges, low, spans, codes);
    if (n_dims == 2)
        return number_cells(positions, n, 2, itemsize, edges, low, spans, codes);
    return number_cells(positions, n, n_dims, itemsize, edges, low, spans, codes);
}

/* Return the squared distance of a point from the segment between a and b. */
RA_INLINE double offset_of(const double *point, const double *a, const double *b, int64_t n_dims)
{
    double along = 0, length = 0, total = 0;
    for (int64_t d = 0; d < n_dims; d++) {
        double edge = b[d] - a[d];
        along += (point[d] - a[d]) * edge;
        length += edge * edge;
    }
    double share = length > 0 ? along / length : 0;
    share = share > 0 ? share : 0;
    share = share < 1 ? share : 1;
    for (int64_t d = 0; d < n_dims; d++) {
        double gap = point[d] - a[d] - share * (b[d] - a[d]);
        total += gap * gap;
    }
    return total;
}

RA_INLINE int32_t weigh_lines(const double *points, int64_t n, int64_t n_dims, const int64_t *offsets, int64_t n_lines,
                              double *weights, int64_t *pieces, double *bounds, int64_t room)
{
    for (int64_t line = 0; line < n_lines; line++) {
        int64_t first = offsets[line], stop = offsets[line + 1], last = stop - (stop > 0), left = 0;
        if (first < 0 || stop < first || stop > n)
            return RA_BAD_BOUNDS;
        if (stop == first)
            continue;
        if (room < last - first + 2)
            return RA_BAD_SIZE;
        weights[first] = weights[last] = bounds[0] = __builtin_inf();
        pieces[0] = first;
        pieces[1] = last;
        /* A piece that is split becomes two, of which each has an inner point less: never more pieces than points. */
        for (left = 1; left;) {
            left--;
            int64_t a = pieces[2 * left], b = pieces[2 * left + 1], at = a + 1;
            double worst = -1, bound = bounds[left];
            if (b - a < 2)
                continue;
            for (int64_t i = a + 1; i < b; i++) {
                double gap = offset_of(points + i * n_dims, points + a * n_dims, points + b * n_dims, n_dims);
                if (gap > worst) {
                    worst = gap;
                    at = i;
                }
            }
            double root = __builtin_sqrt(worst), weight = root < bound ? root : bound;
            weights[at] = weight;
            pieces[2 * left] = a;
            pieces[2 * left + 1] = pieces[2 * left + 2] = at;
            pieces[2 * left + 3] = b;
            bounds[left] = bounds[left + 1] = weight;
            left += 2;
        }
    }
    return RA_GOOD;
}

int32_t ra_weigh_lines(const double *points, int64_t n, int64_t n_dims, const int64_t *offsets, int64_t n_lines,
                       double *weights, int64_t *pieces, double *bounds, int64_t room)
{
    if (n_dims == 3)
        return weigh_lines(points, n, 3, offsets, n_lines, weights, pieces, bounds, room);
    return weigh_lines(points, n, n_dims, offsets, n_lines, weights, pieces, bounds, room);
}

/* A graph that is being walked. */
struct walk {
    const int64_t *adjacency, *bounds;
    const uint8_t *fixed;
    uint8_t *used;
    int64_t *members, *chains;
    int64_t n, n_edges, n_members, n_chains;
};

/* Follow one chain from a vertex by one of its entries, an edge that was not used. */
static int32_t follow_chain(struct walk *walk, int64_t start, int64_t entry)
{
    int64_t room = 2 * walk->n_edges, here = start, edge = walk->adjacency[2 * entry + 1];
    if (room - walk->n_members < 2)
        return RA_OUTSIDE;
    walk->chains[2 * walk->n_chains + 1] = edge;
    walk->members[walk->n_members++] = start;
    do {
        here = walk->adjacency[2 * entry];
        if (here < 0 || here >= walk->n || walk->n_members >= room)
            return RA_OUTSIDE;
        walk->used[edge] = 1;
        walk->members[walk->n_members++] = here;
        if (walk->fixed[here] || here == start)
            break;
        int64_t last = walk->bounds[here + 1];
        for (entry = walk->bounds[here]; entry < last; entry++) {
            edge = walk->adjacency[2 * entry + 1];
            if (edge < 0 || edge >= walk->n_edges)
                return RA_OUTSIDE;
            if (!walk->used[edge])
                break;
        }
        if (entry >= last)
            return RA_OUTSIDE;
    } while (1);
    walk->chains[2 * walk->n_chains++] = walk->n_members;
    return RA_GOOD;
}

int32_t ra_walk_chains(const int64_t *adjacency, int64_t n_edges, const int64_t *bounds, const uint8_t *fixed, int64_t n,
                       uint8_t *used, int64_t *members, int64_t *chains, int64_t *n_chains)
{
    struct walk walk = {adjacency, bounds, fixed, used, members, chains, n, n_edges, 0, 0};
    for (int64_t v = 0; v < n; v++)
        if (bounds[v] < 0 || bounds[v] > bounds[v + 1] || bounds[v + 1] > 2 * n_edges)
            return RA_BAD_BOUNDS;
    /* Chains between fixed vertices first; what is left then are rings. */
    for (int ring = 0; ring < 2; ring++) {
        for (int64_t start = 0; start < n; start++) {
            if ((fixed[start] == 0) != ring)
                continue;
            for (int64_t entry = bounds[start]; entry < bounds[start + 1]; entry++) {
                int64_t edge = adjacency[2 * entry + 1];
                if (edge < 0 || edge >= n_edges)
                    return RA_OUTSIDE;
                if (used[edge])
                    continue;
                int32_t fault = follow_chain(&walk, start, entry);
                if (fault)
                    return fault;
            }
        }
    }
    *n_chains = walk.n_chains;
    return RA_GOOD;
}
