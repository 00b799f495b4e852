/* XXH64 of a file (Yann Collet's public specification, seed 0): what a checkpoint's manifest holds.
 * Runs at the speed of memory; `xxhsum` prints the same digits. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "liger.h"

enum { STRIPE = 32, PIECE = 1 << 20 };

static const uint64_t P1 = 0x9E3779B185EBCA87, P2 = 0xC2B2AE3D27D4EB4F, P3 = 0x165667B19E3779F9,
                      P4 = 0x85EBCA77C2B2AE63, P5 = 0x27D4EB2F165667C5;

static uint64_t rotate(uint64_t x, int n) { return x << n | x >> (64 - n); }

/* Little endian, as the CPUs that this is built for. */
static uint64_t load(const unsigned char *s, size_t bytes) {
    uint64_t x = 0;
    memcpy(&x, s, bytes);
    return x;
}

static uint64_t turn(uint64_t lane, uint64_t x) { return rotate(lane + x * P2, 31) * P1; }

static void add_stripes(uint64_t lanes[4], const unsigned char *s, size_t bytes) {
    for (; bytes >= STRIPE; bytes -= STRIPE, s += STRIPE)
        for (int i = 0; i < 4; i++) lanes[i] = turn(lanes[i], load(s + 8 * i, 8));
}

static uint64_t finish(const uint64_t lanes[4], uint64_t total, const unsigned char *s, size_t n) {
    uint64_t h = P5;
    if (total >= STRIPE) {
        h = rotate(lanes[0], 1) + rotate(lanes[1], 7) + rotate(lanes[2], 12) + rotate(lanes[3], 18);
        for (int i = 0; i < 4; i++) h = (h ^ turn(0, lanes[i])) * P1 + P4;
    }
    h += total;
    for (; n >= 8; n -= 8, s += 8) h = rotate(h ^ turn(0, load(s, 8)), 27) * P1 + P4;
    for (; n >= 4; n -= 4, s += 4) h = rotate(h ^ load(s, 4) * P1, 23) * P2 + P3;
    for (; n > 0; n--, s++) h = rotate(h ^ *s * P5, 11) * P1;
    h = (h ^ h >> 33) * P2;
    h = (h ^ h >> 29) * P3;
    return h ^ h >> 32;
}

/* Fills the buffer; fewer bytes only at the end of the file, negative is an errno. */
static ssize_t read_piece(int fd, unsigned char *piece) {
    size_t n = 0;
    while (n < PIECE) {
        ssize_t got = read(fd, piece + n, PIECE - n);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -errno;
        if (got == 0) break;
        n += (size_t)got;
    }
    return (ssize_t)n;
}

int32_t lg_sys_checksum(const char *path, char *digits) {
    if (!path || !digits) return EINVAL;
    unsigned char *piece = malloc(PIECE);
    int fd = piece ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) {
        int32_t error = piece ? errno : ENOMEM;
        free(piece);
        return error;
    }
    uint64_t lanes[4] = {P1 + P2, P2, 0, 0 - P1}, total = 0;
    ssize_t n;
    while ((n = read_piece(fd, piece)) > 0) {
        total += (uint64_t)n;
        add_stripes(lanes, piece, (size_t)n);
        if (n < PIECE) break;
    }
    close(fd);
    size_t tail = n > 0 ? (size_t)n % STRIPE : 0;
    uint64_t hash = n < 0 ? 0 : finish(lanes, total, piece + (n > 0 ? n : 0) - tail, tail);
    for (int i = 0; i < 16; i++) digits[i] = "0123456789abcdef"[hash >> (60 - 4 * i) & 15];
    digits[16] = '\0';
    free(piece);
    return n < 0 ? (int32_t)-n : 0;
}
