/* kernels/rows_cuda.cuh - a matrix as GPU kernels walk it: units that one warp multiplies, in pieces that it fetches.
 *
 * A unit is a row group of T32 (its pieces are tiles) or one row of floats (pieces of at most 4 KiB).  Lanes that share a
 * row hold its sum together; the first of them leads.
 */
#ifndef SPK_ROWS_CUDA_CUH
#define SPK_ROWS_CUDA_CUH

#include <algorithm>

#include "kernels/ring_cuda.cuh"
#include "kernels/tile_cuda.cuh"

namespace spk {

constexpr uint32_t FLOAT_PIECE_BYTES = 4096;

__host__ __device__ __forceinline__ bool is_float(uint32_t type) {
    return type == SPK_TYPE_F32 || type == SPK_TYPE_F16 || type == SPK_TYPE_BF16;
}

struct row_matrix {
    const uint8_t *data;
    uint64_t       unit_stride;                      /* bytes from unit to unit */
    uint32_t       piece_stride, piece_bytes, last_piece_bytes, piece_count;   /* of a unit */
    uint32_t       type, row_count, unit_count;
    uint32_t       lanes_per_row, row_shift;         /* 32 for float rows; 2^row_shift */
    __device__ __forceinline__ const uint8_t *unit(uint32_t index) const { return data + index * unit_stride; }
    __device__ __forceinline__ uint32_t size_of(uint32_t piece) const { return piece + 1 < piece_count ? piece_bytes : last_piece_bytes; }
    __device__ __forceinline__ bool leads(uint32_t lane) const { return (lane & (lanes_per_row - 1)) == 0; }
    __host__ __device__ __forceinline__ uint32_t rows_per_unit() const { return 32u >> row_shift; }
    __device__ __forceinline__ uint32_t row(uint32_t index, uint32_t lane) const { return (index * 32 + lane) >> row_shift; }
    /* Values of x that a piece covers. */
    __host__ __device__ __forceinline__ uint32_t piece_columns() const {
        return is_float(type) ? piece_bytes / (type == SPK_TYPE_F32 ? 4 : 2) : 256 * lanes_per_row;
    }
};

inline row_matrix make_row_matrix(const spk_matrix &w) {
    row_matrix m = {};
    m.data = w.data;
    m.type = w.type;
    m.row_count = (uint32_t)w.row_count;
    if (w.layout == SPK_LAYOUT_T32) {
        const spk_t32_geometry g = spk_t32_geometry_of(w.type, w.row_count, w.col_count);
        m.unit_stride = g.tiles_per_group * w.unit_stride_bytes;
        m.piece_stride = (uint32_t)w.unit_stride_bytes;
        m.piece_bytes = m.last_piece_bytes = (uint32_t)spk_layout_unit_bytes(w.layout, w.type, w.col_count);
        m.piece_count = (uint32_t)g.tiles_per_group;
        m.unit_count = (uint32_t)g.group_count;
        m.lanes_per_row = g.lanes_per_row;
        while (1u << m.row_shift < m.lanes_per_row) m.row_shift++;
        return m;
    }
    const uint32_t row_bytes = (uint32_t)(w.col_count * (w.type == SPK_TYPE_F32 ? 4 : 2));
    m.unit_stride = w.unit_stride_bytes;
    m.piece_stride = FLOAT_PIECE_BYTES;
    m.piece_bytes = std::min(row_bytes, FLOAT_PIECE_BYTES);
    m.piece_count = (row_bytes + FLOAT_PIECE_BYTES - 1) / FLOAT_PIECE_BYTES;
    m.last_piece_bytes = row_bytes - (m.piece_count - 1) * FLOAT_PIECE_BYTES;
    m.unit_count = m.row_count;
    m.lanes_per_row = 32;
    m.row_shift = 5;
    return m;
}

/* Lane's part of (a piece of a float row) . x, where x is the whole vector and first_column the piece's first.  Order of the sums
 * as in input_cuda.cuh, whose riders are float rows too: eight values a lane, a butterfly over 256, which one lane keeps; the
 * caller's butterfly over lanes adds up those. */
__device__ __forceinline__ float dot_floats(uint32_t type, const uint8_t *piece, uint32_t size_bytes, const float *x, uint32_t first_column,
                                            uint32_t lane) {
    const uint32_t width = type == SPK_TYPE_F32 ? 4 : 2, columns = size_bytes / width;
    float kept = 0.0f;
#pragma unroll 1
    for (uint32_t begin = 0; begin < columns; begin += 256) {
        const uint32_t at = begin + 8 * lane;
        float sum = 0.0f;
        if (at < columns) {
            const eight v = *(const eight *)(x + first_column + at);
            sum = dot_eight(type, piece + at * width, (const float *)&v);
        }
        sum = warp_sum(sum);
        kept += lane == ((first_column + begin) / 256) % 32 ? sum : 0.0f;
    }
    return kept;
}

/* Add the lane's part of up to TILES_MAX pieces, which lie side by side, to sums.  first_column is where the pieces' columns
 * begin in v, which is int8 for tiles, F32 for floats. */
__device__ __forceinline__ void add_pieces(const row_matrix &m, const uint8_t *pieces, uint32_t size_bytes, uint32_t piece_count,
                                           const input_vector &v, uint32_t first_column, uint32_t lane, float sums[TILES_MAX]) {
    if (is_float(m.type)) {
#pragma unroll 1
        for (uint32_t i = 0; i < piece_count; i++) {
            const float sum = dot_floats(m.type, pieces + i * size_bytes, size_bytes, v.f32, first_column, lane);
            if (i == 0) sums[0] += sum;
            else sums[1] += sum;
        }
        return;
    }
    const uint32_t kb = first_column / 256 + (lane & (m.lanes_per_row - 1));
    if (v.rest != nullptr) add_tiles<true>(m.type, pieces, size_bytes, piece_count, v, kb, lane, sums);
    else add_tiles<false>(m.type, pieces, size_bytes, piece_count, v, kb, lane, sums);
}
/* The sums of a row's lanes, in all of them.  A tile's are made for each piece, and pieces are added in order; those of floats
 * once, at the end: so experts_down, whose pieces are different warps', gets the same bits. */
__device__ __forceinline__ void add_lanes(const row_matrix &m, uint32_t piece_count, float sums[TILES_MAX]) {
#pragma unroll
    for (uint32_t i = 0; i < TILES_MAX; i++)
        if (i < piece_count) sums[i] = lanes_sum(sums[i], m.lanes_per_row);
}

/* ---- A warp's work: jobs of a few units of one shape that share x, streamed through its ring ---- */

struct job {
    uint32_t owner, unit;                /* what they mean is up to the jobs */
    uint32_t count;                      /* units, at most TILES_MAX */
};

/* JOBS has: uint32_t first, step(), end() (of this warp); job at(index); the job's shape(job), its first_unit(job) and how many bytes
 * apart(job) the units are; prepare(job), called before its products, and put(job, sums), after them, by all lanes with the sums
 * of the rows that they share. */
template <class JOBS> struct job_stream {
    JOBS       &jobs;
    warp_ring  &ring;
    job         current;                 /* the first job is looked up before the wait */
    uint32_t    fill_index, fill_piece;
    float      *kept;                    /* shared: [TILES_MAX][32], sums of a unit's pieces so far */

    __device__ __forceinline__ job_stream(JOBS &j, warp_ring &r, float *sums) : jobs(j), ring(r), fill_index(j.first), fill_piece(0), kept(sums) {}
    __device__ __forceinline__ void keep(const float sums[TILES_MAX]) const {
#pragma unroll
        for (uint32_t i = 0; i < TILES_MAX; i++) kept[32 * i + (threadIdx.x & 31)] = sums[i];
    }
    __device__ __forceinline__ void take_kept(float sums[TILES_MAX]) const {
#pragma unroll
        for (uint32_t i = 0; i < TILES_MAX; i++) sums[i] = kept[32 * i + (threadIdx.x & 31)] + sums[i];
    }
    __device__ __forceinline__ void fill(uint32_t stage) {
        if (fill_index >= jobs.end()) {
            ring.skip();
            return;
        }
        const job filling = jobs.at(fill_index);
        const row_matrix &shape = jobs.shape(filling);
        ring.fill(stage, jobs.first_unit(filling) + (size_t)fill_piece * shape.piece_stride, jobs.apart(filling), shape.size_of(fill_piece),
                  filling.count);
        if (++fill_piece < shape.piece_count) return;
        fill_piece = 0;
        fill_index += jobs.step();
    }
    __device__ __forceinline__ void start() {
        if (fill_index < jobs.end()) current = jobs.at(fill_index);
        for (uint32_t s = 0; s < ring.stage_count; s++) fill(s);
    }
    __device__ __forceinline__ void run(const input_vector &v) {
        const uint32_t lane = threadIdx.x & 31;
        uint32_t stage = 0;
#pragma unroll 1
        for (uint32_t index = jobs.first; index < jobs.end(); index += jobs.step()) {
            if (index != jobs.first) current = jobs.at(index);
            const row_matrix &shape = jobs.shape(current);
            jobs.prepare(current);
#pragma unroll 1
            for (uint32_t piece = 0; piece < shape.piece_count; piece++) {
                const bool is_whole = !is_float(shape.type) || piece + 1 == shape.piece_count;
                float sums[TILES_MAX] = { 0.0f };
                ring.wait(stage);
                if (piece > 0 && is_float(shape.type)) take_kept(sums);
                add_pieces(shape, ring.stage(stage), shape.size_of(piece), current.count, v, piece * shape.piece_columns(), lane, sums);
                __syncwarp();
                fill(stage);
                stage = stage + 1 == ring.stage_count ? 0 : stage + 1;
                if (is_whole) add_lanes(shape, current.count, sums);
                if (piece > 0 && !is_float(shape.type)) take_kept(sums);
                if (piece + 1 == shape.piece_count) jobs.put(current, sums);
                else keep(sums);
            }
        }
    }
};

} // namespace spk

#endif
