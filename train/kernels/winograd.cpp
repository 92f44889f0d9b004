// 3x3 convolutions of float32 images in channels_last, by Winograd's algorithm F(4x4, 3x3) (Lavin and Gray, 2015,
// arXiv:1509.09308). A tile of 6x6 input pixels gives 4x4 output pixels by 36 multiplications instead of 144.
// Names as in the paper: data d, filter g, Y = A'[(G g G') * (B' d B)]A. Gradients are the transposed steps.
// Each thread takes some images, in blocks of tiles that stay in its core's cache.
// OpenMP's functions come from the caller, so that the threads are those of torch.

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

typedef float Vector __attribute__((vector_size(32), aligned(4)));
constexpr int WIDTH = 8;       // floats of a Vector: channel counts are multiples of it
constexpr int COLUMNS = 16;    // of a block of a matrix product, whose sums stay in registers
constexpr int ROWS = 6;
constexpr int POINTS = 36;     // values of a transformed tile
constexpr int BLOCK = 36;      // tiles that a thread transforms at once

// Floats between the values of two points, for tiles of `row` floats. Multiples of 4 KiB would share a cache set.
constexpr size_t stride_of(size_t row) { return BLOCK * row + 16; }


struct OpenMP {
  void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
  int (*thread_number)();
  int (*team_size)();
  int threads;
};

struct Shape {
  int images, height, width, inputs, outputs;
  int rows() const { return (height + 3) / 4; }
  int columns() const { return (width + 3) / 4; }
  long tiles() const { return long(rows()) * columns(); }
};

using Floats = std::unique_ptr<float, void (*)(void *)>;

Floats allocate(size_t count) {
  return Floats(static_cast<float *>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64)), std::free);
}

int padded(int channels) { return (channels + COLUMNS - 1) / COLUMNS * COLUMNS; }

inline Vector load(const float *from) { return *reinterpret_cast<const Vector *>(from); }
inline void store(float *to, Vector value) { *reinterpret_cast<Vector *>(to) = value; }

// Calls body(thread, team) in each thread.
template <class Body> void in_parallel(const OpenMP &omp, const Body &body) {
  struct Call { const OpenMP &omp; const Body &body; } call{omp, body};
  omp.parallel([](void *data) {
    auto &given = *static_cast<Call *>(data);
    given.body(given.omp.thread_number(), given.omp.team_size());
  }, &call, omp.threads, 0);
}

// A part of `count` things for a thread of a team.
struct Part {
  long first, last;
  Part(long count, int thread, int team) : first(count * thread / team), last(count * (thread + 1) / team) {}
};

// The transforms of one dimension: from values `s` apart to values `q` apart.
template <class T> inline void data_transform(const T *d, size_t s, T *o, size_t q) {  // B' d, 6 to 6
  T a = d[4 * s] - 4.f * d[2 * s], b = d[3 * s] - 4.f * d[s], c = d[4 * s] - d[2 * s], e = 2.f * (d[3 * s] - d[s]);
  o[0] = 4.f * d[0] - 5.f * d[2 * s] + d[4 * s];
  o[q] = a + b, o[2 * q] = a - b, o[3 * q] = c + e, o[4 * q] = c - e;
  o[5 * q] = 4.f * d[s] - 5.f * d[3 * s] + d[5 * s];
}
template <class T> inline void data_gradient(const T *d, size_t s, T *o, size_t q) {  // B d, 6 to 6
  T p = d[s] + d[2 * s], m = d[s] - d[2 * s], r = d[3 * s] + d[4 * s], t = 2.f * (d[3 * s] - d[4 * s]);
  o[0] = 4.f * d[0];
  o[q] = 4.f * d[5 * s] - 4.f * m - t;
  o[2 * q] = -5.f * d[0] - 4.f * p - r;
  o[3 * q] = m + t - 5.f * d[5 * s];
  o[4 * q] = d[0] + p + r;
  o[5 * q] = d[5 * s];
}
template <class T> inline void output_transform(const T *d, size_t s, T *o, size_t q) {  // A' d, 6 to 4
  T p = d[s] + d[2 * s], m = d[s] - d[2 * s], r = d[3 * s] + d[4 * s], t = d[3 * s] - d[4 * s];
  o[0] = d[0] + p + r, o[q] = m + 2.f * t, o[2 * q] = p + 4.f * r, o[3 * q] = m + 8.f * t + d[5 * s];
}
template <class T> inline void output_gradient(const T *d, size_t s, T *o, size_t q) {  // A d, 4 to 6
  T e = d[0] + d[2 * s], f = d[s] + d[3 * s], g = d[0] + 4.f * d[2 * s], h = 2.f * d[s] + 8.f * d[3 * s];
  o[0] = d[0], o[q] = e + f, o[2 * q] = e - f, o[3 * q] = g + h, o[4 * q] = g - h, o[5 * q] = d[3 * s];
}
template <class T> inline void filter_transform(const T *g, size_t s, T *o, size_t q) {  // G g, 3 to 6
  T a = (g[0] + g[2 * s]) / -6.f, b = g[s] / -6.f, c = g[0] / 24.f + g[2 * s] / 6.f, e = g[s] / 12.f;
  o[0] = g[0] / 4.f, o[q] = a + b, o[2 * q] = a - b, o[3 * q] = c + e, o[4 * q] = c - e, o[5 * q] = g[2 * s];
}
template <class T> inline void filter_gradient(const T *d, size_t s, T *o, size_t q) {  // G' d, 6 to 3
  T p = d[s] + d[2 * s], m = d[s] - d[2 * s], r = d[3 * s] + d[4 * s], t = d[3 * s] - d[4 * s];
  o[0] = d[0] / 4.f - p / 6.f + r / 24.f, o[q] = t / 12.f - m / 6.f, o[2 * q] = r / 6.f - p / 6.f + d[5 * s];
}

// A tile's place in an image of `channels`: its first pixel may lie outside, which counts as zero.
struct Tile {
  int top, left, height, width, channels;
  bool has(int y, int x) const {
    return unsigned(top + y) < unsigned(height) && unsigned(left + x) < unsigned(width);
  }
  size_t at(int y, int x) const { return (size_t(top + y) * width + left + x) * channels; }
};

// B' d B of a tile: point p goes to points + p * stride.
void transform_data(const float *image, const Tile &tile, float *points, size_t stride) {
  for (int c = 0; c < tile.channels; c += WIDTH) {
    Vector d[POINTS], e[POINTS];
    for (int y = 0; y < 6; y++)
      for (int x = 0; x < 6; x++) d[y * 6 + x] = tile.has(y, x) ? load(image + tile.at(y, x) + c) : Vector{};
    for (int x = 0; x < 6; x++) data_transform(d + x, 6, e + x, 6);
    for (int y = 0; y < 6; y++) {
      data_transform(e + 6 * y, 1, d, 1);
      for (int x = 0; x < 6; x++) store(points + (6 * y + x) * stride + c, d[x]);
    }
  }
}

// A dY A' of a tile.
void transform_output_gradient(const float *image, const Tile &tile, float *points, size_t stride) {
  for (int c = 0; c < tile.channels; c += WIDTH) {
    Vector d[16], e[24], o[6];
    for (int y = 0; y < 4; y++)
      for (int x = 0; x < 4; x++) d[y * 4 + x] = tile.has(y, x) ? load(image + tile.at(y, x) + c) : Vector{};
    for (int x = 0; x < 4; x++) output_gradient(d + x, 4, e + x, 4);
    for (int y = 0; y < 6; y++) {
      output_gradient(e + 4 * y, 1, o, 1);
      for (int x = 0; x < 6; x++) store(points + (6 * y + x) * stride + c, o[x]);
    }
  }
}

// A' m A, written to the tile's pixels.
void write_output(const float *points, size_t stride, float *image, const Tile &tile) {
  for (int c = 0; c < tile.channels; c += WIDTH) {
    Vector d[POINTS], e[24], o[4];
    for (int p = 0; p < POINTS; p++) d[p] = load(points + p * stride + c);
    for (int x = 0; x < 6; x++) output_transform(d + x, 6, e + x, 6);
    for (int y = 0; y < 4; y++) {
      output_transform(e + 6 * y, 1, o, 1);
      for (int x = 0; x < 4; x++)
        if (tile.has(y, x)) store(image + tile.at(y, x) + c, o[x]);
    }
  }
}

// B m B', added to the tile's pixels: neighbors overlap.
void add_data_gradient(const float *points, size_t stride, float *image, const Tile &tile) {
  for (int c = 0; c < tile.channels; c += WIDTH) {
    Vector d[POINTS], e[POINTS], o[6];
    for (int p = 0; p < POINTS; p++) d[p] = load(points + p * stride + c);
    for (int x = 0; x < 6; x++) data_gradient(d + x, 6, e + x, 6);
    for (int y = 0; y < 6; y++) {
      data_gradient(e + 6 * y, 1, o, 1);
      for (int x = 0; x < 6; x++) {
        if (!tile.has(y, x)) continue;
        float *pixel = image + tile.at(y, x) + c;
        store(pixel, load(pixel) + o[x]);
      }
    }
  }
}

// M rows and 16 columns of C = A B, or C += A B. A's rows and columns and B's rows have these strides.
template <int M>
void multiply_rows(const float *a, size_t a_row, size_t a_column, const float *b, size_t b_row, float *c, size_t c_row,
                   int depth, bool adds) {
  Vector sums[M][2];
  for (int i = 0; i < M; i++)
    for (int j = 0; j < 2; j++) sums[i][j] = adds ? load(c + i * c_row + j * WIDTH) : Vector{};
  for (int k = 0; k < depth; k++) {
    Vector left = load(b + k * b_row), right = load(b + k * b_row + WIDTH);
#pragma GCC unroll 6
    for (int i = 0; i < M; i++) {
      Vector one = a[i * a_row + k * a_column] - Vector{};  // a copy in each place: x - 0 is x
      sums[i][0] += one * left;
      sums[i][1] += one * right;
    }
  }
  for (int i = 0; i < M; i++)
    for (int j = 0; j < 2; j++) store(c + i * c_row + j * WIDTH, sums[i][j]);
}

void multiply(int rows, const float *a, size_t a_row, size_t a_column, const float *b, size_t b_row, float *c,
              size_t c_row, int depth, bool adds) {
  int i = 0;
  for (; i + ROWS <= rows; i += ROWS)
    multiply_rows<ROWS>(a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row, depth, adds);
  a += i * a_row, c += i * c_row;
  switch (rows - i) {
    case 5: return multiply_rows<5>(a, a_row, a_column, b, b_row, c, c_row, depth, adds);
    case 4: return multiply_rows<4>(a, a_row, a_column, b, b_row, c, c_row, depth, adds);
    case 3: return multiply_rows<3>(a, a_row, a_column, b, b_row, c, c_row, depth, adds);
    case 2: return multiply_rows<2>(a, a_row, a_column, b, b_row, c, c_row, depth, adds);
    case 1: return multiply_rows<1>(a, a_row, a_column, b, b_row, c, c_row, depth, adds);
  }
}

// Transformed filters as the right factor: `depth` channels in, `width` channels out, in panels of 16 columns.
struct Panels {
  int depth, width;
  Floats values;
  Panels(int depth, int width) : depth(depth), width(width), values(allocate(size_t(POINTS) * depth * padded(width))) {}
  int count() const { return padded(width) / COLUMNS; }
  float *at(int point, int panel) const { return values.get() + (size_t(point) * count() + panel) * depth * COLUMNS; }
};

// G g G' of all filters. Strides are those of the filters for (depth, width, y, x).
void fill_panels(const Panels &panels, const float *filters, const ptrdiff_t *strides, int thread, int team) {
  Part part(long(panels.count()) * panels.depth, thread, team);
  for (long at = part.first; at < part.last; at++) {
    int panel = at / panels.depth, k = at % panels.depth;
    Vector g[2][9], e[18], o[6];
    std::memset(g, 0, sizeof g);
    for (int i = 0; i < COLUMNS && panel * COLUMNS + i < panels.width; i++)
      for (int y = 0; y < 3; y++)
        for (int x = 0; x < 3; x++)
          g[i / WIDTH][3 * y + x][i % WIDTH] = filters[k * strides[0] + (panel * COLUMNS + i) * strides[1] +
                                                       y * strides[2] + x * strides[3]];
    for (int half = 0; half < 2; half++) {
      for (int x = 0; x < 3; x++) filter_transform(g[half] + x, 3, e + x, 3);
      for (int y = 0; y < 6; y++) {
        filter_transform(e + 3 * y, 1, o, 1);
        for (int x = 0; x < 6; x++) store(panels.at(6 * y + x, panel) + k * COLUMNS + half * WIDTH, o[x]);
      }
    }
  }
}

// For each point, transformed tiles times the filters. A tile has `row` floats, of which the first are its channels.
void multiply_filters(const float *tiles, size_t row, int count, const Panels &panels, float *products) {
  size_t width = padded(panels.width);
  for (int p = 0; p < POINTS; p++)
    for (int panel = 0; panel < panels.count(); panel++)
      multiply(count, tiles + p * stride_of(row), row, 1, panels.at(p, panel), COLUMNS,
               products + p * stride_of(width) + panel * COLUMNS, width, panels.depth, false);
}

Tile tile_of(const Shape &shape, long number, int channels, int border) {
  int at = number % shape.tiles();
  return {at / shape.columns() * 4 - border, at % shape.columns() * 4 - border, shape.height, shape.width, channels};
}

void add_filter_gradient(const Shape &shape, const float *data, const float *outputs, int count, float *sums) {
  size_t width = padded(shape.outputs);
  for (int p = 0; p < POINTS; p++)
    for (size_t column = 0; column < width; column += COLUMNS)
      multiply(shape.inputs, data + p * stride_of(shape.inputs), 1, shape.inputs,
               outputs + p * stride_of(width) + column, width, sums + p * shape.inputs * width + column, width, count,
               true);
}

// G' dU G, where dU is the sum over the threads. Strides are those of the filters for (output, input, y, x).
void write_filter_gradient(const Shape &shape, const float *sums, int members, float *gradient,
                           const ptrdiff_t *strides, Part part) {
  size_t width = padded(shape.outputs), size = POINTS * shape.inputs * width;
  for (long i = part.first; i < part.last; i++)
    for (int c = 0; c < shape.outputs; c += WIDTH) {
      Vector d[POINTS], e[18], o[3];
      for (int p = 0; p < POINTS; p++) {
        const float *at = sums + (p * shape.inputs + i) * width + c;
        d[p] = load(at);
        for (int other = 1; other < members; other++) d[p] += load(at + other * size);
      }
      for (int x = 0; x < 6; x++) filter_gradient(d + x, 6, e + x, 6);
      for (int y = 0; y < 3; y++) {
        filter_gradient(e + 6 * y, 1, o, 1);
        for (int x = 0; x < 3; x++)
          for (int j = 0; j < WIDTH; j++)
            gradient[(c + j) * strides[0] + i * strides[1] + y * strides[2] + x * strides[3]] = o[x][j];
      }
    }
}

}  // namespace

// Write the convolution, with a border of one zero. Return 0, or 1 if there is no memory.
extern "C" int winograd_forward(const OpenMP *omp, const Shape *given, const float *images, const float *filters,
                                const ptrdiff_t *strides, float *result) {
  const Shape shape = *given;
  size_t width = padded(shape.outputs), tiles_size = POINTS * stride_of(shape.inputs);
  size_t thread_size = tiles_size + POINTS * stride_of(width);
  Panels panels(shape.inputs, shape.outputs);
  Floats work = allocate(omp->threads * thread_size);
  if (!panels.values || !work) return 1;
  const ptrdiff_t by_input[] = {strides[1], strides[0], strides[2], strides[3]};
  in_parallel(*omp, [&](int thread, int team) { fill_panels(panels, filters, by_input, thread, team); });
  in_parallel(*omp, [&](int thread, int team) {
    float *tiles = work.get() + thread * thread_size, *products = tiles + tiles_size;
    Part part(shape.images * shape.tiles(), thread, team);
    size_t pixels = size_t(shape.height) * shape.width;
    for (long first = part.first; first < part.last; first += BLOCK) {
      int count = std::min<long>(BLOCK, part.last - first);
      for (int i = 0; i < count; i++)
        transform_data(images + (first + i) / shape.tiles() * pixels * shape.inputs,
                       tile_of(shape, first + i, shape.inputs, 1), tiles + i * shape.inputs, stride_of(shape.inputs));
      multiply_filters(tiles, shape.inputs, count, panels, products);
      for (int i = 0; i < count; i++)
        write_output(products + i * width, stride_of(width), result + (first + i) / shape.tiles() * pixels * shape.outputs,
                     tile_of(shape, first + i, shape.outputs, 0));
    }
  });
  return 0;
}

// Write the gradients of images and filters from that of the convolution; a null pointer leaves one out.
extern "C" int winograd_backward(const OpenMP *omp, const Shape *given, const float *images, const float *filters,
                                 const ptrdiff_t *strides, const float *gradient, float *of_images, float *of_filters) {
  const Shape shape = *given;
  size_t outputs = padded(shape.outputs), inputs = padded(shape.inputs);
  size_t data_size = POINTS * stride_of(inputs), thread_size = 2 * data_size + POINTS * stride_of(outputs);
  size_t sums_size = of_filters ? POINTS * shape.inputs * outputs : 0;
  Panels panels(shape.outputs, shape.inputs);
  Floats work = allocate(omp->threads * thread_size), sums = allocate(omp->threads * sums_size + 1);
  if (!panels.values || !work || !sums) return 1;
  if (of_images) in_parallel(*omp, [&](int thread, int team) { fill_panels(panels, filters, strides, thread, team); });
  int members = 1;
  in_parallel(*omp, [&](int thread, int team) {
    if (!thread) members = team;
    float *data = work.get() + thread * thread_size, *products = data + data_size, *changes = products + data_size;
    float *own_sums = sums.get() + thread * sums_size;
    std::memset(own_sums, 0, sums_size * sizeof(float));
    std::memset(changes, 0, POINTS * stride_of(outputs) * sizeof(float));
    Part part(shape.images, thread, team);
    size_t pixels = size_t(shape.height) * shape.width, size = pixels * shape.inputs;
    if (of_images) std::memset(of_images + part.first * size, 0, (part.last - part.first) * size * sizeof(float));
    for (long first = part.first * shape.tiles(); first < part.last * shape.tiles(); first += BLOCK) {
      int count = std::min<long>(BLOCK, part.last * shape.tiles() - first);
      for (int i = 0; i < count; i++)
        transform_output_gradient(gradient + (first + i) / shape.tiles() * pixels * shape.outputs,
                                  tile_of(shape, first + i, shape.outputs, 0), changes + i * outputs, stride_of(outputs));
      if (of_filters) {
        for (int i = 0; i < count; i++)
          transform_data(images + (first + i) / shape.tiles() * size, tile_of(shape, first + i, shape.inputs, 1),
                         data + i * shape.inputs, stride_of(shape.inputs));
        add_filter_gradient(shape, data, changes, count, own_sums);
      }
      if (!of_images) continue;
      multiply_filters(changes, outputs, count, panels, products);
      for (int i = 0; i < count; i++)
        add_data_gradient(products + i * inputs, stride_of(inputs), of_images + (first + i) / shape.tiles() * size,
                          tile_of(shape, first + i, shape.inputs, 1));
    }
  });
  if (of_filters)
    in_parallel(*omp, [&](int thread, int team) {
      write_filter_gradient(shape, sums.get(), members, of_filters, strides, Part(shape.inputs, thread, team));
    });
  return 0;
}
