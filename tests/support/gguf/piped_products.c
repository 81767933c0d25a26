/* Multiplies the matrices that come on stdin, for processors that this machine emulates.
 *
 * A case is five numbers (a format, the bytes of a row, outputs, inputs, and rows of activations), the matrix, and
 * the activations. Its outputs go to stdout: first those of rows, then those of interleaved rows if the format has
 * them. */
#include <stdio.h>

#include "products.c"

static void *from_stdin(size_t bytes) {
    void *found = malloc(bytes);
    if (!found || fread(found, 1, bytes, stdin) != bytes) exit(2);
    return found;
}

int main(void) {
    int64_t numbers[5];
    while (fread(numbers, sizeof numbers, 1, stdin)) {
        int64_t row_bytes = numbers[1], outputs = numbers[2], inputs = numbers[3], rows = numbers[4];
        segment segments[] = {{from_stdin(outputs * row_bytes), numbers[0], row_bytes, outputs, 0}, {NULL, numbers[0], row_bytes, outputs, 1}};
        float *x = from_stdin(rows * inputs * sizeof *x), *out = malloc(rows * outputs * sizeof *out);
        uint8_t *groups = malloc((outputs + GROUP - 1) / GROUP * GROUP * row_bytes);
        segments[1].rows = groups;
        if (layout_of(numbers[0])) interleave(segments, inputs, 2, groups);
        for (segment *s = segments; s < segments + (layout_of(numbers[0]) ? 2 : 1); s++) {
            linear of = {s, NULL, 1, inputs};
            if (!multiply(&of, outputs, x, rows, 1 + rows % 3, out)) return 2;
            fwrite(out, sizeof *out, rows * outputs, stdout);
        }
        free((uint8_t *)segments->rows);
        free(groups);
        free(x);
        free(out);
    }
    return trial();
}
