/* What the load client and the backend share: a clock, options, and HTTP/2 over one socket. */

#ifndef COMMON_H
#define COMMON_H

#define _GNU_SOURCE
#include <errno.h>
#include <nghttp2/nghttp2.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

enum {
    PREFIX_BYTES = 5,        /* in front of each gRPC message */
    OUT_BYTES = 512 << 10,   /* collected before a write */
    FRAME_ROOM = 20 << 10,   /* more than a frame can have */
    STREAM_WINDOW = 1 << 20, /* no stream of these loads ever waits for its window */
    CONNECTION_WINDOW = 1 << 30,
};

static void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000LL + at.tv_nsec;
}

static void *allocated(void *memory) {
    if (memory == NULL) die("out of memory");
    return memory;
}

static uint32_t read_u32(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void write_u32(uint8_t *at, uint32_t value) {
    at[0] = value >> 24;
    at[1] = value >> 16;
    at[2] = value >> 8;
    at[3] = value;
}

/* --- files of messages: 4 bytes of length, big-endian, in front of each */

struct message {
    const uint8_t *data;
    size_t size;
};

struct messages {
    struct message *all;
    size_t count;
};

static struct messages read_messages(const char *path) {
    struct messages found = {NULL, 0};
    FILE *file = fopen(path, "rb");
    if (file == NULL) die("%s: %s", path, strerror(errno));
    uint8_t length[4];
    while (fread(length, 1, 4, file) == 4) {
        size_t size = read_u32(length);
        uint8_t *data = allocated(malloc(size + 1));
        if (fread(data, 1, size, file) != size) die("%s: ends within a message", path);
        found.all = allocated(realloc(found.all, (found.count + 1) * sizeof *found.all));
        found.all[found.count++] = (struct message){data, size};
    }
    fclose(file);
    if (found.count == 0) die("%s: has no message", path);
    return found;
}

/* --- as much of protobuf as it takes to find a message's `request_id`, field 1 */

static bool read_varint(const uint8_t **at, const uint8_t *end, uint64_t *value) {
    *value = 0;
    for (int shift = 0; *at < end && shift < 64; shift += 7) {
        uint8_t byte = *(*at)++;
        *value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) return true;
    }
    return false;
}

struct fields {
    const uint8_t *id; /* the last one: it is the one that counts */
    size_t id_size;
    size_t other_bytes; /* of every other field */
};

static bool read_fields(const uint8_t *at, size_t size, struct fields *found) {
    const uint8_t *end = at + size;
    *found = (struct fields){NULL, 0, 0};
    while (at < end) {
        const uint8_t *start = at;
        uint64_t tag, length = 0;
        if (!read_varint(&at, end, &tag)) return false;
        switch (tag & 7) {
        case 0:
            if (!read_varint(&at, end, &length)) return false;
            length = 0;
            break;
        case 1: length = 8; break;
        case 2:
            if (!read_varint(&at, end, &length)) return false;
            break;
        case 5: length = 4; break;
        default: return false;
        }
        if (length > (uint64_t)(end - at)) return false;
        if (tag == (1 << 3 | 2)) {
            found->id = at;
            found->id_size = length;
        } else {
            found->other_bytes += (size_t)(at - start) + length;
        }
        at += length;
    }
    return true;
}

/* --- one connection */

struct link {
    int fd;
    nghttp2_session *session;
    uint8_t *out;
    size_t out_size, out_at;
    bool is_blocked; /* by the socket */
};

static void link_settings(struct link *link, uint32_t max_streams) {
    nghttp2_settings_entry settings[] = {
        {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, STREAM_WINDOW},
        {NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, max_streams},
    };
    link->out = allocated(malloc(OUT_BYTES));
    nghttp2_submit_settings(link->session, NGHTTP2_FLAG_NONE, settings, 2);
    nghttp2_session_set_local_window_size(link->session, NGHTTP2_FLAG_NONE, 0, CONNECTION_WINDOW);
}

/* False: the connection is over. */
static bool link_flush(struct link *link) {
    for (;;) {
        while (OUT_BYTES - link->out_size >= FRAME_ROOM) {
            const uint8_t *data;
            ssize_t size = nghttp2_session_mem_send(link->session, &data);
            if (size < 0) return false;
            if (size == 0) break;
            memcpy(link->out + link->out_size, data, size);
            link->out_size += size;
        }
        if (link->out_at == link->out_size) break;
        ssize_t sent = write(link->fd, link->out + link->out_at, link->out_size - link->out_at);
        if (sent < 0) {
            link->is_blocked = errno == EAGAIN;
            return link->is_blocked;
        }
        link->out_at += sent;
        if (link->out_at == link->out_size) link->out_at = link->out_size = 0;
    }
    link->is_blocked = false;
    return nghttp2_session_want_read(link->session) || nghttp2_session_want_write(link->session);
}

/* False: the connection is over. */
static bool link_receive(struct link *link) {
    static uint8_t in[256 << 10];
    for (;;) {
        ssize_t size = read(link->fd, in, sizeof in);
        if (size < 0) return errno == EAGAIN;
        if (size == 0) return false;
        if (nghttp2_session_mem_recv(link->session, in, size) < 0) return false;
        if ((size_t)size < sizeof in) return true;
    }
}

#define HEADER(name, value)                                                                        \
    {(uint8_t *)(name), (uint8_t *)(value), strlen(name), strlen(value), NGHTTP2_NV_FLAG_NONE}

#endif
