/* A worker that answers each Generate with the same messages, those of its file.
 *
 *   backend MESSAGES                     all at once
 *   backend MESSAGES PACE_US together    one each PACE_US, all streams in the same moments
 *   backend MESSAGES PACE_US spread      the same, each stream in moments of its own
 *
 * The file's messages have no request id: the request's goes in front of each. A message is a DATA frame;
 * with PACKED in the environment, a frame has as many as there are. Prints its port, and serves until it is
 * killed.
 */

#include "common.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

enum { MAX_ID_BYTES = 127, MAX_EVENTS = 256, MAX_STREAMS = 100000 };

struct client {
    struct link link;
    struct stream *streams;
    struct client *next_dirty;
    bool is_dirty; /* has something to send; flushed once a turn */
    bool is_over;
};

struct stream {
    struct client *client;
    int32_t id;
    struct stream *next, *previous; /* of the client */
    struct stream *sooner, *later;  /* of those that are paced */
    int64_t due_ns;                 /* of the next message; 0: not paced */
    uint8_t *body;                  /* of the request */
    size_t body_size, body_room;
    uint8_t request_id[MAX_ID_BYTES];
    size_t request_id_size;
    size_t n_due, n_sent; /* messages */
    bool is_deferred;
};

static struct messages messages;
static int64_t pace_ns;
static bool is_spread, is_packed;
static double phase;
static struct stream *soonest, *latest;
static int timer, epoll;
static struct client *dirty;

static void mark(struct client *client) {
    if (client->is_dirty) return;
    client->is_dirty = true;
    client->next_dirty = dirty;
    dirty = client;
}

/* --- pace */

static void pace(struct stream *stream) {
    struct stream *before = latest;
    while (before != NULL && before->due_ns > stream->due_ns) before = before->sooner;
    stream->sooner = before;
    stream->later = before == NULL ? soonest : before->later;
    *(before == NULL ? &soonest : &before->later) = stream;
    *(stream->later == NULL ? &latest : &stream->later->sooner) = stream;
}

static void unpace(struct stream *stream) {
    if (stream->due_ns == 0) return;
    *(stream->sooner == NULL ? &soonest : &stream->sooner->later) = stream->later;
    *(stream->later == NULL ? &latest : &stream->later->sooner) = stream->sooner;
    stream->due_ns = 0;
}

static void begin_pace(struct stream *stream) {
    stream->due_ns = (now_ns() / pace_ns + 1) * pace_ns;
    if (is_spread) {
        phase += 0.6180339887498949; /* the golden ratio spreads any number of them evenly */
        if (phase >= 1) phase -= 1;
        stream->due_ns += (int64_t)(phase * pace_ns);
    }
    pace(stream);
}

static void set_timer(void) {
    static int64_t set_ns;
    int64_t at_ns = soonest == NULL ? 0 : soonest->due_ns;
    if (at_ns == set_ns) return;
    set_ns = at_ns;
    struct itimerspec when = {{0, 0}, {at_ns / 1000000000, at_ns % 1000000000}};
    if (timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL) < 0) die("timerfd_settime");
}

static void tick(void) {
    int64_t at_ns = now_ns();
    while (soonest != NULL && soonest->due_ns <= at_ns) {
        struct stream *stream = soonest;
        int64_t next_ns = stream->due_ns + pace_ns;
        unpace(stream);
        stream->n_due++;
        if (stream->n_due < messages.count) {
            stream->due_ns = next_ns;
            pace(stream);
        }
        if (stream->is_deferred) {
            stream->is_deferred = false;
            nghttp2_session_resume_data(stream->client->link.session, stream->id);
        }
        mark(stream->client);
    }
}

/* --- answers */

static size_t put(const struct stream *stream, const struct message *message, uint8_t *out) {
    size_t size = 2 + stream->request_id_size + message->size;
    *out++ = 0;
    write_u32(out, size);
    out += 4;
    *out++ = 1 << 3 | 2; /* request_id */
    *out++ = stream->request_id_size;
    memcpy(out, stream->request_id, stream->request_id_size);
    memcpy(out + stream->request_id_size, message->data, message->size);
    return PREFIX_BYTES + size;
}

static ssize_t on_body_wanted(nghttp2_session *session, int32_t id, uint8_t *out, size_t room,
                              uint32_t *flags, nghttp2_data_source *source, void *user) {
    (void)user;
    struct stream *stream = source->ptr;
    size_t size = 0;
    while (stream->n_sent < stream->n_due && (size == 0 || is_packed)) {
        const struct message *message = &messages.all[stream->n_sent];
        if (size + PREFIX_BYTES + 2 + MAX_ID_BYTES + message->size > room) break;
        size += put(stream, message, out + size);
        stream->n_sent++;
    }
    if (stream->n_sent == messages.count) {
        nghttp2_nv trailers[] = {HEADER("grpc-status", "0")};
        *flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
        nghttp2_submit_trailer(session, id, trailers, 1);
    } else if (size == 0) {
        stream->is_deferred = true;
        return NGHTTP2_ERR_DEFERRED;
    }
    return size;
}

static void answer(struct stream *stream) {
    nghttp2_session *session = stream->client->link.session;
    struct fields found;
    if (stream->body_size < PREFIX_BYTES ||
        !read_fields(stream->body + PREFIX_BYTES, stream->body_size - PREFIX_BYTES, &found) ||
        found.id == NULL || found.id_size > MAX_ID_BYTES) {
        nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, stream->id, NGHTTP2_INTERNAL_ERROR);
        return;
    }
    stream->request_id_size = found.id_size;
    memcpy(stream->request_id, found.id, found.id_size);
    free(stream->body);
    stream->body = NULL;
    if (pace_ns == 0) {
        stream->n_due = messages.count;
    } else {
        begin_pace(stream);
    }
    nghttp2_nv headers[] = {HEADER(":status", "200"), HEADER("content-type", "application/grpc")};
    nghttp2_data_provider body = {{.ptr = stream}, on_body_wanted};
    nghttp2_submit_response(session, stream->id, headers, 2, &body);
}

/* --- streams */

static int on_begin_headers(nghttp2_session *session, const nghttp2_frame *frame, void *user) {
    struct client *client = user;
    if (frame->hd.type != NGHTTP2_HEADERS) return 0;
    struct stream *stream = allocated(calloc(1, sizeof *stream));
    stream->client = client;
    stream->id = frame->hd.stream_id;
    stream->next = client->streams;
    if (client->streams != NULL) client->streams->previous = stream;
    client->streams = stream;
    return nghttp2_session_set_stream_user_data(session, stream->id, stream);
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t id, const uint8_t *data,
                   size_t size, void *user) {
    (void)flags, (void)user;
    struct stream *stream = nghttp2_session_get_stream_user_data(session, id);
    if (stream == NULL) return 0;
    if (stream->body_size + size > stream->body_room) {
        stream->body_room = 2 * (stream->body_size + size);
        stream->body = allocated(realloc(stream->body, stream->body_room));
    }
    memcpy(stream->body + stream->body_size, data, size);
    stream->body_size += size;
    return 0;
}

static int on_frame(nghttp2_session *session, const nghttp2_frame *frame, void *user) {
    (void)user;
    if (frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA) return 0;
    if (!(frame->hd.flags & NGHTTP2_FLAG_END_STREAM)) return 0;
    struct stream *stream = nghttp2_session_get_stream_user_data(session, frame->hd.stream_id);
    if (stream != NULL) answer(stream);
    return 0;
}

static void drop(struct stream *stream) {
    unpace(stream);
    *(stream->previous == NULL ? &stream->client->streams : &stream->previous->next) = stream->next;
    if (stream->next != NULL) stream->next->previous = stream->previous;
    free(stream->body);
    free(stream);
}

static int on_stream_close(nghttp2_session *session, int32_t id, uint32_t code, void *user) {
    (void)code, (void)user;
    struct stream *stream = nghttp2_session_get_stream_user_data(session, id);
    if (stream != NULL) drop(stream);
    return 0;
}

/* --- connections */

static nghttp2_session_callbacks *callbacks(void) {
    nghttp2_session_callbacks *made;
    nghttp2_session_callbacks_new(&made);
    nghttp2_session_callbacks_set_on_begin_headers_callback(made, on_begin_headers);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(made, on_data);
    nghttp2_session_callbacks_set_on_frame_recv_callback(made, on_frame);
    nghttp2_session_callbacks_set_on_stream_close_callback(made, on_stream_close);
    return made;
}

static void accept_all(int listening, const nghttp2_session_callbacks *told) {
    int fd;
    while ((fd = accept4(listening, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        struct client *client = allocated(calloc(1, sizeof *client));
        int yes = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        client->link.fd = fd;
        nghttp2_session_server_new(&client->link.session, told, client);
        link_settings(&client->link, MAX_STREAMS);
        mark(client);
        struct epoll_event event = {EPOLLIN | EPOLLOUT | EPOLLET, {.ptr = client}};
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) < 0) die("epoll_ctl");
    }
}

static void flush_all(void) {
    while (dirty != NULL) {
        struct client *client = dirty;
        dirty = client->next_dirty;
        client->is_dirty = false;
        if (!client->is_over && link_flush(&client->link)) continue;
        while (client->streams != NULL) drop(client->streams);
        nghttp2_session_del(client->link.session);
        free(client->link.out);
        close(client->link.fd);
        free(client);
    }
}

static int listen_on_any_port(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (bind(fd, (struct sockaddr *)&at, size) < 0 || listen(fd, 4096) < 0) die("listen");
    getsockname(fd, (struct sockaddr *)&at, &size);
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
    return fd;
}

static void watch(int fd, void *what) {
    struct epoll_event event = {EPOLLIN, {.ptr = what}};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) < 0) die("epoll_ctl");
}

int main(int argc, char **argv) {
    if (argc != 2 && argc != 4) die("backend MESSAGES [PACE_US together|spread]");
    messages = read_messages(argv[1]);
    if (argc == 4) {
        pace_ns = atoll(argv[2]) * 1000;
        is_spread = strcmp(argv[3], "spread") == 0;
    }
    is_packed = getenv("PACKED") != NULL;
    epoll = epoll_create1(0);
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    int listening = listen_on_any_port();
    watch(listening, &listening);
    watch(timer, &timer);
    const nghttp2_session_callbacks *told = callbacks();
    for (;;) {
        struct epoll_event events[MAX_EVENTS];
        int n_events = epoll_wait(epoll, events, MAX_EVENTS, -1);
        for (int at = 0; at < n_events; at++) {
            struct client *client = events[at].data.ptr;
            if ((void *)client == &listening) {
                accept_all(listening, told);
            } else if ((void *)client == &timer) {
                uint64_t n_expired;
                if (read(timer, &n_expired, sizeof n_expired) > 0) tick();
            } else {
                if (!link_receive(&client->link)) client->is_over = true;
                mark(client);
            }
        }
        flush_all();
        set_timer();
    }
}
