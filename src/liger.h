/* The public C interface: status, dtypes, tensors, context, memory, files and tokenizer. ops.h has the operators.
 *
 * LuaJIT reads this text too (lines that start with # dropped), so constants are enums and comments are
 * the documentation. Sizes are int64_t and count elements unless the name ends in `bytes`.
 */
#ifndef LIGER_H
#define LIGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

typedef enum lg_status {
    LG_OK = 0,
    LG_EINVAL,       /* an argument, shape or dtype is wrong */
    LG_ENOMEM,       /* no memory */
    LG_EIO,          /* a file cannot be opened, read or written */
    LG_EFORMAT,      /* a file's content is wrong */
    LG_ENUMERIC,     /* NaN or Inf where a finite number is needed */
    LG_EUNSUPPORTED, /* a known thing that this backend or build does not do */
    LG_EDEVICE,      /* the device failed; later calls fail the same way */
} lg_status;

typedef enum lg_dtype {
    LG_F32 = 0,
    LG_BF16,
    LG_F16,
    LG_F64,
    LG_I32,
    LG_I64,
    LG_U8,
    LG_NUM_DTYPES
} lg_dtype;

enum { LG_MAX_DIMS = 4, LG_CPU = -1 };

/* The losses between a student and a teacher, see lg_tvd, lg_jsd and lg_cosine. */
typedef enum lg_divergence { LG_TVD = 0, LG_JSD, LG_COSINE, LG_NUM_DIVERGENCES } lg_divergence;

typedef struct lg_context lg_context;

/* A view of memory that its creator owns; the library keeps no pointer to it. Strides count elements; the last
 * dimension is dense. A scalar has ndim 0. */
typedef struct lg_tensor {
    void *data;
    int64_t shape[LG_MAX_DIMS];
    int64_t stride[LG_MAX_DIMS];
    int32_t ndim;
    int32_t dtype;
    int32_t device; /* LG_CPU or a CUDA ordinal */
} lg_tensor;

/* Counters of a context; doubles, so that Lua reads plain numbers. */
typedef struct lg_stats {
    double live_bytes;     /* handed out and not given back */
    double peak_bytes;     /* the largest live_bytes since the last lg_stats_reset_peak */
    double reserved_bytes; /* live and parked */
    double scratch_bytes;  /* the ops' own working memory */
    double gemm_rows; /* rows that went through the matrix products of linear and linear_logprob */
    double syncs;     /* times that the host waited for the device */
} lg_stats;

/* ---- context ---- */

/* A context on LG_CPU or a CUDA device; NULL when out of memory. When the device cannot be opened lg_error says why, and
 * the context is good for closing only. Not thread safe: one thread at a time uses a context. */
lg_context *lg_context_open(int32_t device);
void lg_context_close(lg_context *ctx);
int32_t lg_context_device(const lg_context *ctx);
/* What the device is, in words: "8 CPU threads", "NVIDIA H200, 139.8 GiB". */
const char *lg_context_describe(lg_context *ctx);
/* The text of the last failure; valid until the next call. */
const char *lg_error(const lg_context *ctx);
/* Number of CPU threads; 0 asks for all cores. */
lg_status lg_context_set_threads(lg_context *ctx, int64_t threads);
int64_t lg_context_threads(const lg_context *ctx);
lg_stats *lg_context_stats(lg_context *ctx);
void lg_stats_reset_peak(lg_context *ctx);
/* Waits until the device has done all that was asked of it; reports what failed on the way. */
lg_status lg_sync(lg_context *ctx);
/* Hash of the headers that the library was built from; the Lua side refuses to load another. */
uint64_t lg_abi_hash(void);

/* Device time between two points of the stream, for benches; the stop waits. */
lg_status lg_timer_start(lg_context *ctx);
lg_status lg_timer_stop(lg_context *ctx, double *seconds);

/* ---- memory ---- */

/* A block of the device's memory. */
typedef struct lg_block {
    void *data; /* 64-byte aligned on the CPU, 256 on CUDA */
    int64_t bytes;
    lg_context *ctx;
    bool parked;
} lg_block;

/* Memory that is not initialised; NULL when there is none. */
lg_block *lg_alloc(lg_context *ctx, int64_t bytes);
/* Gives a block back, in stream order: work that was asked for before may still use it. NULL is allowed. The context must
 * still be open. Never fails: it is a finalizer. */
void lg_free(lg_block *block);
/* Parked blocks stay allocated and stop counting as live: a cache above this library recycles them. */
void lg_park(lg_block *block);
void lg_unpark(lg_block *block);

/* Bytes that the device could still give; parked blocks count as taken. */
double lg_available_bytes(lg_context *ctx);

/* Copies between host memory and a dense tensor. An upload returns when `host` may be reused; a download waits for the
 * device. */
lg_status lg_upload(lg_context *ctx, const void *host, lg_tensor *y);
lg_status lg_download(lg_context *ctx, const lg_tensor *x, void *host);

/* A recorded run of operators, replayed by one call. Between begin and end operators are recorded and not run; they must
 * not wait, and the memory they touch must stay where it is for as long as the graph lives, but for scratch, which the
 * graph keeps itself. LG_EUNSUPPORTED where the device has no such thing. */
typedef struct lg_graph {
    lg_context *ctx;
    void *state;   /* the device's */
    void *scratch; /* blocks of working memory that the recorded operators use */
} lg_graph;

lg_status lg_graph_begin(lg_context *ctx);
/* Ends the recording in any case; *graph is NULL on failure. */
lg_status lg_graph_end(lg_context *ctx, lg_graph **graph);
lg_status lg_graph_launch(lg_graph *graph);
void lg_graph_free(lg_graph *graph);

int64_t lg_dtype_bytes(int32_t dtype);
const char *lg_dtype_name(int32_t dtype);

/* ---- random numbers: Philox 4x32-10, cuRAND's stream ---- */

/* What curand_init(seed, subsequence, offset) followed by curand() gives, `n` words: key = seed, counter =
 * (offset / 4, subsequence), low words first, starting at word offset % 4. */
void lg_philox(uint64_t seed, uint64_t subsequence, uint64_t offset, int64_t n, uint32_t *words);

/* ---- files ---- */

/* A tensor file, mapped: safetensors or GGUF by its content. Names and data live until lg_file_close. */
typedef struct lg_file lg_file;

typedef struct lg_file_tensor {
    const char *name;
    const void *data; /* at any alignment */
    int64_t data_bytes;
    int64_t shape[8]; /* outermost dimension first, also for GGUF */
    int32_t ndim;
    int32_t dtype;    /* an lg_dtype, or -1: quantised, or a type that the library does not have */
    const char *type; /* the file's own name of the element type: "F32", "Q8_0" */
} lg_file_tensor;

/* Opens and checks the whole directory of the file before returning. On failure *file is NULL and lg_error says
 * which check failed, with the path. */
lg_status lg_file_open(lg_context *ctx, const char *path, lg_file **file);
void lg_file_close(lg_file *file);
int64_t lg_file_num_tensors(const lg_file *file);
/* The tensor at `index` (file order), or NULL out of range. */
const lg_file_tensor *lg_file_tensor_at(const lg_file *file, int64_t index);
/* Copies or dequantises tensor `index` into `y`, a dense CPU tensor of the same number of elements, f32 or bf16 or f16 or
 * f64 (rounded to nearest even), or the file's own dtype. LG_EUNSUPPORTED when the element type cannot be read. */
lg_status lg_file_read(lg_context *ctx, const lg_file *file, int64_t index, lg_tensor *y);
/* Metadata as one JSON object: a safetensors file's __metadata__, or all of GGUF's key-value pairs. Owned by the file,
 * ends in NUL. From GGUF: a byte that is no valid UTF-8 is written as \u00XX, NaN and infinities as null. */
const char *lg_file_metadata(const lg_file *file, int64_t *bytes);

/* Writes a safetensors file: `n` dense tensors of the context's device or the CPU under `names`, `metadata` a JSON object of
 * strings or NULL. The file is written beside `path`, synced and renamed: it is there in whole or not at all. */
lg_status lg_safetensors_write(lg_context *ctx, const char *path, const char *const *names,
                               const lg_tensor *const *tensors, int64_t n, const char *metadata);

/* ---- tokenizer: byte-level and byte-fallback BPE ---- */

typedef struct lg_tokenizer lg_tokenizer;

/* A description in JSON (the shape of Hugging Face's tokenizer.json); see tokenizer.c for what is read. A tokenizer is
 * used by one thread at a time. */
lg_status lg_tokenizer_open(lg_context *ctx, const char *json, int64_t bytes,
                            lg_tokenizer **tokenizer);
void lg_tokenizer_close(lg_tokenizer *tokenizer);
/* Encodes UTF-8 text. Special and added tokens in the text become their ids; `special` adds the description's own ids
 * around the text (its post-processor: BOS, EOS). Bytes that are no UTF-8 are encoded as they are where the vocabulary has
 * bytes, and as unknown elsewhere. Writes at most `capacity` ids and puts the number needed into *n; call again with more
 * room when *n > capacity. */
lg_status lg_tokenizer_encode(lg_context *ctx, lg_tokenizer *tokenizer, const char *text,
                              int64_t bytes, bool special, int32_t *ids, int64_t capacity,
                              int64_t *n);
/* Decodes ids to bytes (UTF-8 with U+FFFD where bytes are no valid text); the same two-call protocol. An id without a
 * token (models pad their vocabulary) decodes to nothing; a negative one is LG_EINVAL. */
lg_status lg_tokenizer_decode(lg_context *ctx, lg_tokenizer *tokenizer, const int32_t *ids,
                              int64_t n, bool skip_special, char *text, int64_t capacity,
                              int64_t *bytes);
/* The largest id plus one. */
int64_t lg_tokenizer_vocab(const lg_tokenizer *tokenizer);
/* The id of a token's exact text, or -1. */
int32_t lg_tokenizer_id(const lg_tokenizer *tokenizer, const char *token);
/* The text of token `id` as the vocabulary spells it (not decoded), or NULL; valid until the tokenizer is closed. */
const char *lg_tokenizer_token(const lg_tokenizer *tokenizer, int32_t id, int64_t *bytes);

/* ---- system ---- */

/* Functions that can fail return 0 or an errno value. */
const char *lg_sys_error(int32_t error);

/* Seconds on a clock that never goes back. */
double lg_sys_time(void);
bool lg_sys_isatty(int32_t fd);
/* Width of the terminal in characters, 80 where there is none. */
int32_t lg_sys_columns(void);

typedef struct lg_sys_info {
    double bytes;
    double mtime; /* seconds since 1970 */
    bool is_folder;
} lg_sys_info;

int32_t lg_sys_stat(const char *path, lg_sys_info *info);
/* Makes a folder and those above it; a folder that is there already is no error. */
int32_t lg_sys_make_folders(const char *path);
/* Waits until a file, or a folder's list of names, is on the disk. */
int32_t lg_sys_sync(const char *path);
/* XXH64 of a file's bytes as 16 hexadecimal digits and a NUL. */
int32_t lg_sys_checksum(const char *path, char *digits);

typedef struct lg_sys_folder lg_sys_folder;

/* Reads a folder's names in no order, "." and ".." left out; open gives NULL where it cannot be read. A name lives until
 * the next call, NULL ends. */
lg_sys_folder *lg_sys_folder_open(const char *path);
const char *lg_sys_folder_next(lg_sys_folder *folder);
void lg_sys_folder_close(lg_sys_folder *folder);

/* From here on the first SIGINT or SIGUSR1 (mpirun hands this one on) only sets the flag and a second one ends the process
 * with status 130 or 138; `false` gives them their usual meaning back. Both clear the flag. */
void lg_sys_catch_interrupt(bool on);
bool lg_sys_interrupted(void);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
#endif
