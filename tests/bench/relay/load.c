/* A client that calls Generate, and checks and times every answer; its findings as JSON on stdout.
 *
 *   load ADDRESS... OPTION=VALUE...
 *
 *   addresses are HOST:PORT, taken in turn by connections
 *   requests=FILE       serialised GenerateRequests, taken in turn; `request_id` is their first field and
 *                       has ID_BYTES bytes, which become another number for each request
 *   salt=OFFSET         of a 3-byte varint in each message that becomes another number too
 *   connections=N       (1)
 *   in_flight=N         requests open at once (1)
 *   rate=N              or: requests a second, each in its moment, whatever has become of the others
 *   total=N, seconds=S  of requests begun; the first that is reached
 *   messages=N          that each answer must have
 *   bytes=N             that these must have in all, without their request ids
 *   cancel_after=N      cancel each request behind so many messages
 *   limit=S             for everything, 120 s
 *
 * Latency is counted from the moment at which a request is begun, or at a rate was to be begun. Exits with 1
 * where an answer was not as it must be.
 */

#include "common.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

enum { ID_AT = 2, ID_BYTES = 16, SALT_BYTES = 3, MAX_CONNECTIONS = 1024, MAX_EVENTS = 256 };

struct connection {
    struct link link;
    char authority[64];
    bool is_dirty;
};

struct request {
    const struct message *message;
    size_t sent_bytes;
    uint8_t prefix[PREFIX_BYTES];
    char id[ID_BYTES + 1];
    uint8_t salt[SALT_BYTES];
    int64_t begun_ns, first_ns;
    int64_t n_messages, n_bytes;
    uint8_t *part; /* of a message that has not come whole */
    size_t part_bytes, part_room;
    bool is_ok; /* grpc-status 0 */
    bool is_cancelled;
    const char *broken;
};

struct times {
    double *all_ms;
    size_t count, room;
};

static struct messages requests;
static struct connection connections[MAX_CONNECTIONS];
static int64_t n_connections = 1, max_in_flight = 1, total = INT64_MAX, n_messages = -1;
static int64_t n_bytes = -1, cancel_after = -1, salt_at = -1;
static double rate, seconds = 1e9, limit_s = 120;
static int64_t start_ns, end_ns;
static int64_t n_begun, n_open, n_completed, n_cancelled, n_failed, n_messages_seen, latest_ns;
static char first_failure[200];
static struct times first_times, total_times;

static void note(struct times *times, int64_t ns) {
    if (times->count == times->room) {
        times->room = times->room ? 2 * times->room : 1 << 14;
        times->all_ms = allocated(realloc(times->all_ms, times->room * sizeof(double)));
    }
    times->all_ms[times->count++] = ns / 1e6;
}

static void fail(const char *what, int64_t figure) {
    if (n_failed++ == 0) snprintf(first_failure, sizeof first_failure, "%s (%ld)", what, figure);
}

/* --- one request */

static void overlay(uint8_t *out, size_t from, size_t size, const void *patch, size_t at,
                    size_t patch_size) {
    size_t start = at > from ? at : from;
    size_t end = at + patch_size < from + size ? at + patch_size : from + size;
    if (start < end) memcpy(out + start - from, (const uint8_t *)patch + start - at, end - start);
}

static ssize_t on_body_wanted(nghttp2_session *session, int32_t id, uint8_t *out, size_t room,
                              uint32_t *flags, nghttp2_data_source *source, void *user) {
    (void)session, (void)id, (void)user;
    struct request *request = source->ptr;
    size_t size = 0, at = request->sent_bytes;
    if (at == 0) {
        memcpy(out, request->prefix, PREFIX_BYTES);
        size = PREFIX_BYTES;
    }
    size_t left = request->message->size - at;
    size_t taken = left < room - size ? left : room - size;
    memcpy(out + size, request->message->data + at, taken);
    overlay(out + size, at, taken, request->id, ID_AT, ID_BYTES);
    if (salt_at >= 0) overlay(out + size, at, taken, request->salt, salt_at, SALT_BYTES);
    request->sent_bytes += taken;
    if (request->sent_bytes == request->message->size) *flags |= NGHTTP2_DATA_FLAG_EOF;
    return size + taken;
}

static void begin(int64_t begun_ns) {
    struct connection *connection = &connections[n_begun % n_connections];
    struct request *request = allocated(calloc(1, sizeof *request));
    request->message = &requests.all[n_begun % requests.count];
    request->begun_ns = begun_ns;
    write_u32(request->prefix + 1, request->message->size);
    snprintf(request->id, sizeof request->id, "%016ld", n_begun);
    uint32_t salt = (1 << 14) + n_begun % ((1 << 21) - (1 << 14)); /* what has three bytes */
    for (int at = 0; at < SALT_BYTES; at++)
        request->salt[at] = (salt >> 7 * at & 0x7f) | (at < SALT_BYTES - 1 ? 0x80 : 0);
    nghttp2_nv headers[] = {
        HEADER(":method", "POST"),
        HEADER(":scheme", "http"),
        HEADER(":path", "/openengine.v1.Inference/Generate"),
        HEADER(":authority", connection->authority),
        HEADER("te", "trailers"),
        HEADER("content-type", "application/grpc"),
        HEADER("user-agent", "grpc-c-load/1"),
    };
    nghttp2_data_provider body = {{.ptr = request}, on_body_wanted};
    if (nghttp2_submit_request(connection->link.session, NULL, headers,
                               sizeof headers / sizeof *headers, &body, request) < 0)
        die("a stream cannot be opened");
    connection->is_dirty = true;
    n_begun++;
    n_open++;
}

/* --- its answer */

static void take(struct request *request, const uint8_t *data, size_t size) {
    struct fields found;
    if (!read_fields(data, size, &found)) {
        request->broken = "a message that is no protobuf";
    } else if (found.id_size != ID_BYTES || memcmp(found.id, request->id, ID_BYTES) != 0) {
        request->broken = "a message of another request";
    }
    request->n_bytes += found.other_bytes;
    if (request->n_messages++ == 0) request->first_ns = now_ns();
}

static size_t take_whole(struct request *request, const uint8_t *data, size_t size) {
    size_t at = 0;
    while (size - at >= PREFIX_BYTES) {
        size_t length = read_u32(data + at + 1);
        if (data[at] != 0) request->broken = "a compressed message";
        if (size - at < PREFIX_BYTES + length) break;
        take(request, data + at + PREFIX_BYTES, length);
        at += PREFIX_BYTES + length;
    }
    return at;
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t id, const uint8_t *data,
                   size_t size, void *user) {
    (void)flags, (void)user;
    struct request *request = nghttp2_session_get_stream_user_data(session, id);
    if (request == NULL || request->is_cancelled) return 0;
    size_t taken = request->part_bytes == 0 ? take_whole(request, data, size) : 0;
    if (taken < size) {
        size_t needed = request->part_bytes + size - taken;
        if (needed > request->part_room) {
            request->part_room = 2 * needed;
            request->part = allocated(realloc(request->part, request->part_room));
        }
        memcpy(request->part + request->part_bytes, data + taken, size - taken);
        request->part_bytes = needed;
        size_t whole = take_whole(request, request->part, needed);
        memmove(request->part, request->part + whole, needed - whole);
        request->part_bytes -= whole;
    }
    if (cancel_after >= 0 && request->n_messages >= cancel_after) {
        request->is_cancelled = true;
        nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, id, NGHTTP2_CANCEL);
    }
    return 0;
}

static int on_header(nghttp2_session *session, const nghttp2_frame *frame, const uint8_t *name,
                     size_t name_size, const uint8_t *value, size_t value_size, uint8_t flags,
                     void *user) {
    (void)flags, (void)user;
    struct request *request = nghttp2_session_get_stream_user_data(session, frame->hd.stream_id);
    if (request != NULL && name_size == 11 && memcmp(name, "grpc-status", 11) == 0) {
        request->is_ok = value_size == 1 && *value == '0';
        if (!request->is_ok) request->broken = "a grpc-status that is not 0";
    }
    return 0;
}

static int on_stream_close(nghttp2_session *session, int32_t id, uint32_t code, void *user) {
    (void)user;
    struct request *request = nghttp2_session_get_stream_user_data(session, id);
    if (request == NULL) return 0;
    int64_t at_ns = now_ns();
    n_open--;
    n_messages_seen += request->n_messages;
    if (request->broken != NULL) {
        fail(request->broken, request->n_messages);
    } else if (request->is_cancelled) {
        n_cancelled++;
    } else if (code != NGHTTP2_NO_ERROR) {
        fail("a stream was reset", code);
    } else if (!request->is_ok) {
        fail("an answer has no grpc-status", request->n_messages);
    } else if (request->part_bytes > 0) {
        fail("an answer ends within a message", request->part_bytes);
    } else if (n_messages >= 0 && request->n_messages != n_messages) {
        fail("an answer has another number of messages", request->n_messages);
    } else if (n_bytes >= 0 && request->n_bytes != n_bytes) {
        fail("an answer has another size", request->n_bytes);
    } else {
        n_completed++;
        note(&first_times, request->first_ns - request->begun_ns);
        note(&total_times, at_ns - request->begun_ns);
    }
    free(request->part);
    free(request);
    return 0;
}

/* --- all of them */

static bool is_last(int64_t at_ns) {
    return n_begun >= total || at_ns >= end_ns;
}

/* When the next request is to be begun at a rate. */
static int64_t due_ns(void) {
    return start_ns + (int64_t)(n_begun / rate * 1e9);
}

static void begin_due(void) {
    if (rate > 0) {
        while (due_ns() <= now_ns() && !is_last(due_ns())) {
            int64_t late_ns = now_ns() - due_ns();
            if (late_ns > latest_ns) latest_ns = late_ns;
            begin(due_ns());
        }
    } else {
        while (n_open < max_in_flight && !is_last(now_ns())) begin(now_ns());
    }
}

static bool is_done(void) {
    return n_open == 0 && is_last(rate > 0 ? due_ns() : now_ns());
}

static nghttp2_session_callbacks *callbacks(void) {
    nghttp2_session_callbacks *made;
    nghttp2_session_callbacks_new(&made);
    nghttp2_session_callbacks_set_on_header_callback(made, on_header);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(made, on_data);
    nghttp2_session_callbacks_set_on_stream_close_callback(made, on_stream_close);
    return made;
}

static void dial(struct connection *connection, const char *address, int epoll,
                 const nghttp2_session_callbacks *told) {
    struct sockaddr_in at = {.sin_family = AF_INET};
    char host[64];
    int port, yes = 1;
    if (sscanf(address, "%63[^:]:%d", host, &port) != 2 || !inet_aton(host, &at.sin_addr))
        die("%s: is not HOST:PORT", address);
    at.sin_port = htons(port);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&at, sizeof at) < 0) die("%s: %s", address, strerror(errno));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    int epoll_flags = EPOLLIN | EPOLLOUT | EPOLLET;
    struct epoll_event event = {epoll_flags, {.ptr = connection}};
    if (fcntl(fd, F_SETFL, O_NONBLOCK) < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) < 0) die("epoll");
    snprintf(connection->authority, sizeof connection->authority, "%s", address);
    connection->link.fd = fd;
    nghttp2_session_client_new(&connection->link.session, told, connection);
    link_settings(&connection->link, 0);
    connection->is_dirty = true;
}

static void flush_all(void) {
    for (int64_t at = 0; at < n_connections; at++) {
        struct connection *connection = &connections[at];
        if (!connection->is_dirty) continue;
        connection->is_dirty = false;
        if (!link_flush(&connection->link)) die("a connection was lost");
    }
}

static void set_timer(int timer) {
    static int64_t set_ns;
    int64_t at_ns = start_ns + (int64_t)(limit_s * 1e9);
    if (rate > 0 && !is_last(due_ns())) at_ns = due_ns();
    if (at_ns == set_ns) return;
    set_ns = at_ns;
    struct itimerspec when = {{0, 0}, {at_ns / 1000000000, at_ns % 1000000000}};
    if (timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL) < 0) die("timerfd_settime");
}

/* --- what was found */

static int by_size(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static void print_times(const char *name, struct times *times) {
    static const double parts[] = {0.5, 0.9, 0.99, 1};
    static const char *names[] = {"p50", "p90", "p99", "max"};
    if (times->count > 0) qsort(times->all_ms, times->count, sizeof(double), by_size);
    printf(", \"%s\": {", name);
    for (int at = 0; at < 4 && times->count > 0; at++) {
        size_t row = (size_t)(parts[at] * (times->count - 1));
        printf("%s\"%s\": %.4f", at ? ", " : "", names[at], times->all_ms[row]);
    }
    printf("}");
}

static void report(double elapsed_s) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu_s = used.ru_utime.tv_sec + used.ru_stime.tv_sec +
                   (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
    printf("{\"completed\": %ld, \"cancelled\": %ld, \"failed\": %ld, \"first_failure\": \"%s\", "
           "\"messages\": %ld, \"elapsed_s\": %.6f, \"cpu_s\": %.6f, \"most_late_ms\": %.4f",
           n_completed, n_cancelled, n_failed, first_failure, n_messages_seen, elapsed_s, cpu_s,
           latest_ns / 1e6);
    print_times("first_message_ms", &first_times);
    print_times("total_ms", &total_times);
    printf("}\n");
}

static const char *value_of(const char *option, const char *name) {
    size_t size = strlen(name);
    return strncmp(option, name, size) == 0 && option[size] == '=' ? option + size + 1 : NULL;
}

static void read_option(const char *option) {
    static const struct {
        const char *name;
        int64_t *integer;
        double *number;
    } known[] = {
        {"connections", &n_connections, NULL}, {"in_flight", &max_in_flight, NULL},
        {"rate", NULL, &rate},                 {"total", &total, NULL},
        {"seconds", NULL, &seconds},           {"messages", &n_messages, NULL},
        {"bytes", &n_bytes, NULL},             {"cancel_after", &cancel_after, NULL},
        {"salt", &salt_at, NULL},              {"limit", NULL, &limit_s},
    };
    const char *value = value_of(option, "requests");
    if (value != NULL) {
        requests = read_messages(value);
        return;
    }
    for (size_t at = 0; at < sizeof known / sizeof *known; at++) {
        value = value_of(option, known[at].name);
        if (value == NULL) continue;
        if (known[at].integer != NULL) *known[at].integer = atoll(value);
        if (known[at].number != NULL) *known[at].number = atof(value);
        return;
    }
    die("%s: no such option", option);
}

int main(int argc, char **argv) {
    const char *addresses[MAX_CONNECTIONS];
    size_t n_addresses = 0;
    for (int at = 1; at < argc; at++) {
        if (strchr(argv[at], '=') != NULL) {
            read_option(argv[at]);
        } else {
            addresses[n_addresses++] = argv[at];
        }
    }
    if (n_addresses == 0 || requests.count == 0) die("load ADDRESS... requests=FILE ...");
    if (n_connections < 1 || n_connections > MAX_CONNECTIONS) die("connections=1..1024");
    if (seconds == 1e9 && total == INT64_MAX) die("load: neither total= nor seconds= is given");
    int epoll = epoll_create1(0), timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct epoll_event event = {EPOLLIN, {.ptr = NULL}};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, timer, &event) < 0) die("epoll_ctl");
    const nghttp2_session_callbacks *told = callbacks();
    for (int64_t at = 0; at < n_connections; at++)
        dial(&connections[at], addresses[at % n_addresses], epoll, told);
    start_ns = now_ns();
    end_ns = start_ns + (int64_t)(seconds * 1e9);
    int64_t limit_ns = start_ns + (int64_t)(limit_s * 1e9);
    for (;;) {
        begin_due();
        flush_all();
        if (is_done()) break;
        set_timer(timer);
        /* What was cancelled is closed by the flush, and makes room for others. */
        bool has_room = rate == 0 && n_open < max_in_flight && !is_last(now_ns());
        struct epoll_event events[MAX_EVENTS];
        int n_events = epoll_wait(epoll, events, MAX_EVENTS, has_room ? 0 : -1);
        for (int at = 0; at < n_events; at++) {
            struct connection *connection = events[at].data.ptr;
            if (connection == NULL) continue;
            if (!link_receive(&connection->link)) die("a connection was lost");
            connection->is_dirty = true;
        }
        if (now_ns() >= limit_ns) die("%ld requests are open after %g s", n_open, limit_s);
    }
    report((now_ns() - start_ns) / 1e9);
    return n_failed > 0;
}
