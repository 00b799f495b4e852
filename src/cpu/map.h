/* Element-wise loops: MAP1, MAP2 and MAP3 set every y[i] to an expression of u, v and w, the
 * elements i of one to three tensors as doubles. The result is rounded to fp32 and from there to
 * bf16 or f16. y may be one of the inputs. */
#ifndef LIGER_MAP_H
#define LIGER_MAP_H

#include "cpu.h"

/* Elements a thread, at least. A parallel region costs 0.3 us even with one thread; two of them
 * gain from 2 * 65536 elements on (add, fp32: 27 against 94 us at 262144). */
enum { MAP_GRAIN = 65536 };

#define MAP1(y, a, EXPR) MAP3(y, a, a, a, EXPR)
#define MAP2(y, a, b, EXPR) MAP3(y, a, b, b, EXPR)
#define MAP3(y, a, b, c, EXPR)                                              \
    do {                                                                    \
        const int64_t n_ = tensor_numel(y);                                 \
        const int threads_ = op_threads(ctx, n_, MAP_GRAIN);                \
        if ((y)->dtype == LG_F32)                                           \
            MAP_TYPE(float, (double), (float), y, a, b, c, EXPR);           \
        else if ((y)->dtype == LG_F64)                                      \
            MAP_TYPE(double, (double), (double), y, a, b, c, EXPR);         \
        else if ((y)->dtype == LG_BF16)                                     \
            MAP_TYPE(uint16_t, bf16_to_f32, f32_to_bf16, y, a, b, c, EXPR); \
        else                                                                \
            MAP_TYPE(uint16_t, f16_to_f32, f32_to_f16, y, a, b, c, EXPR);   \
    } while (0)

#define MAP_TYPE(T, GET, PUT, y, a, b, c, EXPR)                                     \
    do {                                                                            \
        const T *pa_ = (a)->data, *pb_ = (b)->data, *pc_ = (c)->data;               \
        T *py_ = (y)->data;                                                         \
        if (threads_ > 1) {                                                         \
            _Pragma("omp parallel for simd num_threads(threads_) schedule(static)") \
                MAP_LOOP(GET, PUT, EXPR)                                            \
        } else {                                                                    \
            _Pragma("omp simd") MAP_LOOP(GET, PUT, EXPR)                            \
        }                                                                           \
    } while (0)

#define MAP_LOOP(GET, PUT, EXPR)                                           \
    for (int64_t i_ = 0; i_ < n_; i_++) {                                  \
        const double u = GET(pa_[i_]), v = GET(pb_[i_]), w = GET(pc_[i_]); \
        (void)u, (void)v, (void)w;                                         \
        py_[i_] = PUT(EXPR);                                               \
    }

#endif
