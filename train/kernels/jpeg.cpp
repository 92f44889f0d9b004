// Decodes a part of a JPEG and resizes it in one sweep over its rows, to the bytes that Pillow gives.
//
// What is not a plain JPEG, or gives any warning, is left to Pillow: the functions return a nonzero number then.
// Each thread has a decoder of its own, which keeps the image between `jpeg_kernel_open` and `jpeg_kernel_decode`.
#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>  // for jpeglib.h
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include <jpeglib.h>
#ifdef __x86_64__
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#endif

namespace {

constexpr int kPrecision = 22;  // bits after the point of a weight, as in Pillow's Resample.c
constexpr int kHalf = 1 << (kPrecision - 1);
constexpr int kLowBits = 11, kLowMask = (1 << kLowBits) - 1;  // of a weight
constexpr int kPixel = 3;                                     // bytes of RGB
constexpr int kBlock = 16;                                    // bytes that are merged at once
// Columns and rows around the region, because the chroma at a region's own edge has no neighbors.
constexpr int kMargin = 16;
// Pillow refuses more pixels: twice Image.MAX_IMAGE_PIXELS.
constexpr uint64_t kMaxPixels = 2 * (uint64_t(1) << 30) / 4 / 3;

// The filter of one output pixel: the first input pixel, and a weight for each.
struct Taps {
  int first, count;
  const int *weights;
};

// Weights along one axis, as Pillow's precompute_coeffs and normalize_coeffs_8bpc for its bilinear filter.
struct Axis {
  std::vector<Taps> taps;
  std::vector<int> weights;
  std::vector<int16_t> parts;  // the weights for AVX2
  int most = 0;                // input pixels of one output pixel
  bool identity = false;

  void set(int in_size, float low, float high, int out_size, const int *order = nullptr) {
    const double scale = double(high - low) / out_size, support = std::max(scale, 1.0), step = 1.0 / support;
    const int room = int(std::ceil(support)) * 2 + 1;
    std::vector<double> exact(room);
    weights.resize(size_t(room) * out_size);
    taps.resize(out_size);
    most = 0;
    for (int out = 0; out < out_size; ++out) {
      const double center = low + (out + 0.5) * scale;
      const int first = std::max(0, int(center - support + 0.5));
      const int count = std::min(in_size, int(center + support + 0.5)) - first;
      double sum = 0.0;
      for (int tap = 0; tap < count; ++tap) {
        exact[tap] = std::max(0.0, 1.0 - std::fabs((tap + first - center + 0.5) * step));
        sum += exact[tap];
      }
      int *own = &weights[size_t(room) * out];
      for (int tap = 0; tap < count; ++tap)
        own[tap] = int(0.5 + (sum != 0.0 ? exact[tap] / sum : exact[tap]) * (1 << kPrecision));
      const int used = count > 1 && own[count - 1] == 0 ? count - 1 : count;
      taps[out] = {first, used, own};
      most = std::max(most, used);
    }
    const std::vector<Taps> own = taps;
    for (int out = 0; order && out < out_size; ++out) taps[out] = own[order[out]];
    identity = low == 0 && high == float(in_size) && in_size == out_size;
    split();
  }

  // A weight of 23 bits is too wide for a product of 16 bits. Its low 11 bits are in the lower half of a register and
  // the rest in the upper half, for two pixels, four times each.
  void split() {
    const int pairs = (most + 1) / 2;
    parts.assign(taps.size() * pairs * 16, 0);
    for (size_t out = 0; out < taps.size(); ++out)
      for (int tap = 0; tap < taps[out].count; ++tap)
        for (int lane = 0; lane < 8; lane += 2) {
          int16_t *at = &parts[(out * pairs + tap / 2) * 16 + lane + tap % 2];
          at[0] = int16_t(taps[out].weights[tap] & kLowMask);
          at[8] = int16_t(taps[out].weights[tap] >> kLowBits);
        }
  }

  const int16_t *part(int out) const { return &parts[size_t(out) * ((most + 1) / 2) * 16]; }
};

uint8_t round_sum(int sum) { return uint8_t(std::min(sum >> kPrecision, 255)); }

// Writes a row of RGB pixels resized, as RGB or as the first channel only.
void resize_row(const uint8_t *row, const Axis &axis, int channels, uint8_t *out) {
  for (const Taps &taps : axis.taps)
    for (int channel = 0; channel < channels; ++channel) {
      int sum = kHalf;
      for (int tap = 0; tap < taps.count; ++tap)
        sum += row[kPixel * (taps.first + tap) + channel] * taps.weights[tap];
      *out++ = round_sum(sum);
    }
}

// Writes the weighted sum of some rows, which have a block more than `size` bytes.
void merge_rows(const uint8_t *const *rows, const Taps &taps, int size, uint8_t *out) {
  for (int i = 0; i < size; ++i) {
    int sum = kHalf;
    for (int tap = 0; tap < taps.count; ++tap) sum += rows[tap][i] * taps.weights[tap];
    out[i] = round_sum(sum);
  }
}

#ifdef AVX2
AVX2 __m256i add_products(__m256i sums, __m256i values, __m256i weights) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(values, weights));
}

AVX2 __m256i round_sums(__m256i low, __m256i high) {
  const __m256i sums = _mm256_add_epi32(low, _mm256_slli_epi32(high, kLowBits));
  return _mm256_srai_epi32(_mm256_add_epi32(sums, _mm256_set1_epi32(kHalf)), kPrecision);
}

// As resize_row for three channels.
AVX2 void resize_row_avx2(const uint8_t *row, const Axis &axis, uint8_t *out) {
  const __m256i spread =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
  for (int x = 0, width = int(axis.taps.size()); x < width; ++x) {
    const Taps &taps = axis.taps[x];
    const __m256i *weights = reinterpret_cast<const __m256i *>(axis.part(x));
    __m256i sums = _mm256_setzero_si256();
    for (int tap = 0; tap < taps.count; tap += 2) {
      int64_t two;
      std::memcpy(&two, row + kPixel * (taps.first + tap), sizeof two);
      const __m256i values = _mm256_shuffle_epi8(_mm256_set1_epi64x(two), spread);
      sums = add_products(sums, values, _mm256_loadu_si256(weights++));
    }
    sums = round_sums(sums, _mm256_castsi128_si256(_mm256_extracti128_si256(sums, 1)));
    sums = _mm256_packs_epi32(sums, sums);
    const int bytes = _mm_cvtsi128_si32(_mm256_castsi256_si128(_mm256_packus_epi16(sums, sums)));
    std::memcpy(out + kPixel * x, &bytes, x + 1 < width ? 4 : kPixel);  // the next pixel overwrites the fourth byte
  }
}

AVX2 void merge_rows_avx2(const uint8_t *const *rows, const int16_t *parts, int count, int size, uint8_t *out) {
  for (int i = 0; i < size; i += kBlock) {
    __m256i low[2] = {}, high[2] = {};
    for (int tap = 0; tap < count; tap += 2) {
      const __m128i *weights = reinterpret_cast<const __m128i *>(parts + tap / 2 * 16);
      const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[tap] + i));
      const __m128i other = _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[tap + 1] + i));
      const __m256i low_weights = _mm256_broadcastsi128_si256(_mm_loadu_si128(weights));
      const __m256i high_weights = _mm256_broadcastsi128_si256(_mm_loadu_si128(weights + 1));
      const __m256i values[2] = {_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(row, other)),
                                 _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(row, other))};
      for (int part = 0; part < 2; ++part) {
        low[part] = add_products(low[part], values[part], low_weights);
        high[part] = add_products(high[part], values[part], high_weights);
      }
    }
    __m256i words = _mm256_packs_epi32(round_sums(low[0], high[0]), round_sums(low[1], high[1]));
    words = _mm256_permute4x64_epi64(words, 0xD8);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(out + i), bytes);
  }
}
#endif

struct Failure {
  jpeg_error_mgr base;
  jmp_buf jump;
};

[[noreturn]] void give_up(j_common_ptr info) { std::longjmp(reinterpret_cast<Failure *>(info->err)->jump, 1); }

class Decoder {
 public:
  Decoder() {
    info_.err = jpeg_std_error(&failure_.base);
    failure_.base.error_exit = give_up;
    failure_.base.emit_message = [](j_common_ptr info, int level) { return level < 0 ? give_up(info) : void(); };
    if (setjmp(failure_.jump)) return;  // the library's version is not the header's
    jpeg_create_decompress(&info_);
    jpeg_save_markers(&info_, JPEG_APP0 + 1, 0xFFFF);
    created_ = true;
  }
  ~Decoder() { jpeg_destroy_decompress(&info_); }  // does nothing if none was created

  int open(const uint8_t *data, size_t size, int *header) {
    opened_ = false;
    if (!created_ || size < 4) return 1;
    if (setjmp(failure_.jump)) return fail();
    jpeg_abort_decompress(&info_);  // an image that was opened and not decoded
    jpeg_mem_src(&info_, data, size);
    jpeg_read_header(&info_, TRUE);
    const bool plain = info_.num_components == 1 || info_.num_components == 3;
    if (!plain || !count_exif(&header[2]) || uint64_t(info_.image_width) * info_.image_height > kMaxPixels) return fail();
    header[0] = int(info_.image_width), header[1] = int(info_.image_height), header[3] = info_.num_components == 1;
    opened_ = true;
    return 0;
  }

  int decode(int scale, const int *region, const float *box, int width, int height, int channels,
             const int *columns, uint8_t *out) {
    if (!std::exchange(opened_, false)) return 1;
    if (setjmp(failure_.jump)) return fail();
    info_.scale_num = 1, info_.scale_denom = unsigned(scale);
    info_.out_color_space = JCS_RGB;
    jpeg_start_decompress(&info_);
    if (region[2] > int(info_.output_width) || region[3] > int(info_.output_height)) return fail();
    across_.set(region[2] - region[0], box[0], box[2], width, columns);
    down_.set(region[3] - region[1], box[1], box[3], height);
    sweep(region, width, height, channels, out);
    return jpeg_finish_decompress(&info_) ? 0 : fail();
  }

 private:
  int fail() { return jpeg_abort_decompress(&info_), 1; }

  // Counts the Exif segments; returns false if Pillow might take an orientation from elsewhere.
  bool count_exif(int *count) const {
    static const char kExif[] = "Exif\0", kXmp[] = "tiff:Orientation";
    *count = 0;
    for (jpeg_saved_marker_ptr marker = info_.marker_list; marker; marker = marker->next) {
      const uint8_t *data = marker->data, *end = data + marker->data_length;
      if (marker->data_length >= sizeof kExif && std::memcmp(data, kExif, sizeof kExif) == 0)
        ++*count;
      else if (std::search(data, end, kXmp, kXmp + sizeof kXmp - 1) != end)
        return false;
    }
    return *count < 2;
  }

  void sweep(const int *region, int width, int height, int channels, uint8_t *out) {
    JDIMENSION left = 0, columns = info_.output_width;
    const int from = std::max(0, region[0] - kMargin), to = std::min(int(columns), region[2] + kMargin);
    const bool cuts = !info_.progressive_mode;  // missing scans are smoothed over with all neighbors
    if (cuts && (from > 0 || to < int(columns))) {
      left = JDIMENSION(from), columns = JDIMENSION(to - from);
      jpeg_crop_scanline(&info_, &left, &columns);  // sets `left` to the start of a block
    }
    const int start = cuts ? std::max(0, region[1] - kMargin) : 0, wide = (region[2] - region[0]) * kPixel;
    if (start > 0) jpeg_skip_scanlines(&info_, JDIMENSION(start));
    const size_t before = size_t(region[0] - int(left)) * kPixel, stride = size_t(info_.output_width) * kPixel + kBlock;
    kept_.resize(stride * down_.most);
    merged_.resize(size_t(wide) + 2 * kBlock);
    rows_.assign(down_.most + 1, kept_.data());  // a member, because an error jumps over destructors
    for (int row = start - region[1], next = 0; next < height; ++row) {
      uint8_t *kept = &kept_[stride * (row > 0 ? row % down_.most : 0)];
      jpeg_read_scanlines(&info_, &kept, 1);
      for (; next < height && down_.taps[next].first + down_.taps[next].count == row + 1; ++next) {
        for (int tap = 0, first = down_.taps[next].first; tap < down_.taps[next].count; ++tap)
          rows_[tap] = &kept_[stride * ((first + tap) % down_.most) + before];
        write_row(next, wide, channels, out + size_t(next) * width * channels);
      }
    }
    // Damage below the region counts too, as for Pillow. The library does not look at what is skipped to the end.
    const JDIMENSION rest = info_.output_height - info_.output_scanline;
    if (rest > 1) jpeg_skip_scanlines(&info_, rest - 1);
    if (uint8_t *last = kept_.data(); rest) jpeg_read_scanlines(&info_, &last, 1);
  }

  void write_row(int row, int wide, int channels, uint8_t *out) {
    const Taps &taps = down_.taps[row];
    const uint8_t *merged = down_.identity ? rows_[0] : merged_.data();
#ifdef AVX2
    if (__builtin_cpu_supports("avx2")) {
      if (!down_.identity) merge_rows_avx2(rows_.data(), down_.part(row), taps.count, wide, merged_.data());
      return channels == 3 ? resize_row_avx2(merged, across_, out) : resize_row(merged, across_, channels, out);
    }
#endif
    if (!down_.identity) merge_rows(rows_.data(), taps, wide, merged_.data());
    resize_row(merged, across_, channels, out);
  }

  jpeg_decompress_struct info_{};
  Failure failure_{};
  bool created_ = false, opened_ = false;
  Axis across_, down_;
  std::vector<uint8_t> kept_, merged_;
  std::vector<const uint8_t *> rows_;
};

thread_local Decoder decoder;

}  // namespace

extern "C" {
// Reads the header of a JPEG in memory into (width, height, Exif segments, is gray). The bytes must stay.
int jpeg_kernel_open(const uint8_t *data, size_t size, int *header) { return decoder.open(data, size, header); }

// Decodes at 1/scale. `region` is (left, top, right, bottom) in the decoded image, and `box` is the part inside it that
// becomes the output, (height, width, channels) bytes. `columns` says where each of its columns comes from, or is null.
int jpeg_kernel_decode(int scale, const int *region, const float *box, int width, int height, int channels,
                       const int *columns, uint8_t *out) try {
  return decoder.decode(scale, region, box, width, height, channels, columns, out);
} catch (const std::bad_alloc &) { return 1; }
}
