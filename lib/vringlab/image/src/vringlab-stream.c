/* SPDX-License-Identifier: GPL-2.0-only
 *
 * vringlab-stream: one-way throughput over many connections at once, one thread each.
 *
 *     vringlab-stream listen  PORT     [options]     vsock: any CID; tcp: loopback; unix: a path
 *     vringlab-stream connect CID PORT [options]     tcp: ADDRESS PORT; unix: a path only
 *
 * The side that connects sends. It makes all connections, waits until every one of them is served
 * by a thread of the other side, and then starts all its threads at once. They send messages until
 * --warmup plus --duration is over; each connection is then shut down, read to its end by the
 * other side, and answered with what arrived on it. Both ends print a report.
 *
 * A thread that starts late or ends early must not make the sum look small or large: each end
 * counts bytes in slots of time and reports its throughput over the *common window*, the whole
 * slots in which every thread had begun and none had ended, after the warm-up and not past the
 * duration. The sender's time zero is the start of its threads, the listener's is the first byte
 * that it receives. A send is counted when it returns: then its bytes are in the socket's buffers,
 * which hold up to --buffer of them a connection, so the listener's figure is the one that says
 * what got through.
 *
 * Sizes. `N`; `uniform:A,B`, whole numbers from A to B; `normal:MEAN,SD,MIN,MAX`, by Box and
 * Muller (1958), rounded, and drawn again when outside of MIN..MAX. Random numbers are splitmix64,
 * seeded by --seed and the thread's number. 4096 sizes a thread are drawn before the start and
 * then taken in turn, so that drawing costs no time.
 *
 * Content. Byte k of connection i is byte (k + 997 i) mod 65521 of one fixed random sequence. With
 * --verify the listener checks all bytes, and with SEQPACKET each message's size.
 *
 * Time is CLOCK_MONOTONIC_RAW. Wire format: little endian; the sender's hello of 64 bytes, the
 * listener's go-ahead of 16, the data, and after the sender's shutdown the listener's count of 32.
 *
 * Exit status: 0 measured; 1 usage; 2 the sockets could not be set up; 3 a connection was lost;
 * 4 nothing moved for --timeout seconds; 5 what arrived is not what was sent; 6 output could not
 * be written; 128+n ended by signal n. In every case but 1, 2 and 6 a report is printed.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>

#define TOOL_NAME "vringlab-stream"
#include "vringlab-tool.h"

#define TOOL_VERSION "1.0"
#define WIRE_VERSION 1u

#define THREADS_MAX 64u
/* A SEQPACKET message must fit the receiver's vsock buffer, 256 KiB by default. */
#define SIZE_MAX_BYTES 262144u
#define PATTERN_PERIOD 65521u       /* a prime: no message size shares a factor with it */
#define PATTERN_STEP 997u
#define SIZES 4096u
#define SLOTS 500u
#define SLOT_MIN_NS 1000000u

#define HELLO_BYTES 64u
#define GO_BYTES 16u
#define COUNT_BYTES 32u

enum ended { RUNNING, BY_DURATION, BY_PEER, PEER_GONE, TIMED_OUT, BY_SIGNAL };

static const char *const ended_names[] = {
	"running", "duration", "peer finished", "peer closed", "timeout", "signal",
};

enum kind { FIXED, UNIFORM, NORMAL };

static const char *const kind_names[] = { "fixed", "uniform", "normal" };

struct sizes {
	enum kind kind;
	uint32_t mean, sd, min, max;
};

struct options {
	struct place at;
	bool json, verify;
	unsigned int threads;
	struct sizes sizes;
	uint32_t seed, buffer;
	double duration_s, warmup_s, timeout_s, wait_s;
	cpu_set_t cpus;
	const char *cpus_text, *output;
};

/* One connection and the thread that serves it; nothing in it is shared while the run goes on. */
struct flow {
	_Alignas(128) int fd;
	unsigned int index;
	uint64_t bytes, ops;                /* messages sent; receives that returned data */
	uint64_t first_ns, last_ns;         /* absolute; 0: no byte moved */
	uint64_t cpu_ns;
	uint64_t enobufs, resets;
	uint64_t damaged;
	bool peer_counted;
	uint64_t peer_bytes, peer_damaged;
	uint64_t *slots;
	uint32_t *sizes;
	enum ended ended;
	char error[160];
	pthread_t thread;
};

static struct options options = {
	.at = { .family = AF_VSOCK, .type = SOCK_STREAM, .family_name = "vsock" },
	.threads = 1, .sizes = { FIXED, 64, 0, 64, 64 }, .seed = 1,
	.duration_s = 5, .warmup_s = 1, .timeout_s = 30, .wait_s = 5,
};

static struct flow flows[THREADS_MAX];
static unsigned int flow_count;
static uint64_t warmup_ns, duration_ns, slot_ns;
static _Atomic uint64_t zero_ns;
static pthread_barrier_t start_line;
static unsigned char *pattern;
static uint64_t run_token;
static uint32_t buffer_in_force;
static struct rusage use_before, use_after;
static char peer_name[160];
static char run_error[320];
static enum ended run_ended;

static atomic_int stop_signal;      /* the signal, once asked to stop */
static atomic_int stop_hard;        /* the grace for an orderly end is over */

static void on_stop(int number)
{
	atomic_store(&stop_signal, number);
	alarm(1);
}

static void on_alarm(int number)
{
	(void)number;
	atomic_store(&stop_hard, 1);
	for (unsigned int i = 0; i < flow_count; i++)
		shutdown(flows[i].fd, SHUT_RDWR);
	alarm(1);   /* a connection about to be made must not be waited on either */
}

static void put64(unsigned char *at, uint64_t v)
{
	put32(at, (uint32_t)v);
	put32(at + 4, (uint32_t)(v >> 32));
}

static uint64_t get64(const unsigned char *at)
{
	return get32(at) | (uint64_t)get32(at + 4) << 32;
}

__attribute__((format(printf, 3, 4)))
static void flow_end(struct flow *f, enum ended how, const char *format, ...)
{
	va_list arguments;
	f->ended = how;
	va_start(arguments, format);
	vsnprintf(f->error, sizeof f->error, format, arguments);
	va_end(arguments);
}

/* ---- Sizes and content --------------------------------------------------------------------- */

static double unit(uint64_t *state)
{
	/* 53 bits, never 0: its logarithm is taken. */
	return ((double)(splitmix64(state) >> 11) + 0.5) / 9007199254740992.0;
}

static uint32_t draw(const struct sizes *s, uint64_t *state)
{
	if (s->kind == FIXED)
		return s->min;
	if (s->kind == UNIFORM)
		/* The high half of a product: as good as even for ranges so small. */
		return s->min + (uint32_t)(((splitmix64(state) >> 32) *
					    ((uint64_t)s->max - s->min + 1)) >> 32);
	for (;;) {
		double r = sqrt(-2 * log(unit(state))), angle = 6.283185307179586 * unit(state);
		double value = floor(s->mean + s->sd * r * cos(angle) + 0.5);
		if (value >= s->min && value <= s->max)
			return (uint32_t)value;
	}
}

static uint32_t *draw_sizes(const struct options *o, unsigned int index)
{
	uint64_t state = (uint64_t)o->seed << 32 | index;
	uint32_t *found = malloc(SIZES * sizeof *found);
	if (!found)
		die(EXIT_SETUP, "no memory for message sizes");
	for (unsigned int i = 0; i < SIZES; i++)
		found[i] = draw(&o->sizes, &state);
	return found;
}

/* As long as a period and the largest message, so that each message is one piece of it. */
static void make_pattern(void)
{
	uint64_t state = 0x76726e676c6162u;
	size_t length = PATTERN_PERIOD + SIZE_MAX_BYTES;

	pattern = malloc(length);
	if (!pattern)
		die(EXIT_SETUP, "no memory for the content");
	for (size_t i = 0; i < PATTERN_PERIOD; i++)
		pattern[i] = (unsigned char)(splitmix64(&state) >> 56);
	for (size_t i = PATTERN_PERIOD; i < length; i++)
		pattern[i] = pattern[i - PATTERN_PERIOD];
}

/* ---- Time ---------------------------------------------------------------------------------- */

static void set_times(const struct options *o)
{
	warmup_ns = (uint64_t)(o->warmup_s * 1e9);
	duration_ns = (uint64_t)(o->duration_s * 1e9);
	slot_ns = (warmup_ns + duration_ns + SLOTS - 1) / SLOTS;
	if (slot_ns < SLOT_MIN_NS)
		slot_ns = SLOT_MIN_NS;
	for (unsigned int i = 0; i < flow_count; i++) {
		flows[i].slots = calloc(SLOTS, sizeof *flows[i].slots);
		if (!flows[i].slots)
			die(EXIT_SETUP, "no memory for the time slots");
	}
}

static void count(struct flow *f, uint64_t bytes, uint64_t now)
{
	uint64_t slot = (now - atomic_load_explicit(&zero_ns, memory_order_relaxed)) / slot_ns;
	f->bytes += bytes;
	f->last_ns = now;
	if (slot < SLOTS)   /* what is drained after the end counts in the total only */
		f->slots[slot] += bytes;
}

static uint64_t thread_cpu_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- Small messages of the tool's own, each in one piece also with SEQPACKET ----------------- */

/* 0, or what went wrong as an errno; EPIPE: the peer closed. */
static int send_all(int fd, const unsigned char *from, size_t length)
{
	for (size_t done = 0; done < length;) {
		ssize_t n = send(fd, from + done, length - done, MSG_NOSIGNAL);
		if (n > 0)
			done += (size_t)n;
		else if (n == 0 || errno != EINTR)
			return n == 0 ? EPIPE : errno;
		else if (atomic_load(&stop_hard))
			return EINTR;
	}
	return 0;
}

static int receive_all(int fd, unsigned char *to, size_t length)
{
	for (size_t done = 0; done < length;) {
		ssize_t n = recv(fd, to + done, length - done, 0);
		if (n > 0)
			done += (size_t)n;
		else if (n == 0)
			return EPIPE;
		else if (errno != EINTR)
			return errno;
		else if (atomic_load(&stop_hard))
			return EINTR;
	}
	return 0;
}

/* How a connection ended that could not go on. */
static void lost(struct flow *f, int error, const char *doing)
{
	if (atomic_load(&stop_signal) && (atomic_load(&stop_hard) || error == EINTR)) {
		flow_end(f, BY_SIGNAL, "ended by signal %d", atomic_load(&stop_signal));
		return;
	}
	if (error == EAGAIN || error == EWOULDBLOCK) {
		flow_end(f, TIMED_OUT, "nothing moved for %g s while %s", options.timeout_s, doing);
		return;
	}
	if (error == ENOBUFS)
		f->enobufs++;
	if (error == ECONNRESET || error == EPIPE) {
		f->resets++;
		flow_end(f, PEER_GONE, "the peer went away while %s: %s", doing,
			 error == EPIPE ? "it closed" : strerror(error));
	} else {
		flow_end(f, PEER_GONE, "%s failed: %s", doing, strerror(error));
	}
}

/* ---- Sending ------------------------------------------------------------------------------- */

static void *send_flow(void *given)
{
	struct flow *f = given;
	uint32_t at = PATTERN_STEP * f->index % PATTERN_PERIOD;
	unsigned char answer[COUNT_BYTES];
	int error = 0;

	pthread_barrier_wait(&start_line);
	const uint64_t zero = atomic_load(&zero_ns), until = zero + warmup_ns + duration_ns;
	uint64_t now = now_ns();
	f->first_ns = now;
	for (uint64_t turn = 0; now < until && !atomic_load_explicit(&stop_signal,
								    memory_order_relaxed); turn++) {
		uint32_t size = f->sizes[turn % SIZES];
		uint32_t done = 0;
		while (done < size) {
			ssize_t n = send(f->fd, pattern + at + done, size - done, MSG_NOSIGNAL);
			if (n > 0) {
				done += (uint32_t)n;
				continue;
			}
			error = n == 0 ? EPIPE : errno;
			if (error == EINTR && !atomic_load(&stop_hard))
				continue;
			if (error == ENOBUFS && now_ns() < until) {
				/* The connection may live on; the sample is marked all the same. */
				f->enobufs++;
				usleep(1000);
				continue;
			}
			break;
		}
		now = now_ns();
		if (done)
			count(f, done, now);
		if (done < size)
			break;
		f->ops++;
		at = (at + size) % PATTERN_PERIOD;
		error = 0;
	}
	f->cpu_ns = thread_cpu_ns();
	if (error) {
		lost(f, error, "sending");
		return NULL;
	}
	f->ended = atomic_load(&stop_signal) ? BY_SIGNAL : BY_DURATION;
	if (f->ended == BY_SIGNAL)
		flow_end(f, BY_SIGNAL, "ended by signal %d", atomic_load(&stop_signal));
	if (shutdown(f->fd, SHUT_WR) != 0) {
		lost(f, errno, "ending the stream");
		return NULL;
	}
	error = receive_all(f->fd, answer, sizeof answer);
	if (error) {
		lost(f, error, "waiting for what arrived");
	} else if (memcmp(answer, "VRSC", 4) == 0) {
		f->peer_counted = true;
		f->peer_bytes = get64(answer + 8);
		f->peer_damaged = get64(answer + 16);
	}
	return NULL;
}

/* ---- Receiving ----------------------------------------------------------------------------- */

static void verify(struct flow *f, const unsigned char *from, size_t length, bool whole_message)
{
	/* bytes and ops do not count this piece yet. */
	uint32_t at = (uint32_t)((f->bytes + PATTERN_STEP * f->index) % PATTERN_PERIOD);
	bool right = memcmp(from, pattern + at, length) == 0;
	if (whole_message && length != f->sizes[f->ops % SIZES])
		right = false;
	f->damaged += !right;
}

static void *receive_flow(void *given)
{
	struct flow *f = given;
	bool packets = options.at.type == SOCK_SEQPACKET;
	unsigned char *buffer = malloc(SIZE_MAX_BYTES), last[COUNT_BYTES] = "VRSC";
	int error;

	if (!buffer)
		die(EXIT_SETUP, "no memory for a message");
	memset(buffer, 0, SIZE_MAX_BYTES);   /* touches every page before the clock runs */
	pthread_barrier_wait(&start_line);
	for (;;) {
		ssize_t n = recv(f->fd, buffer, SIZE_MAX_BYTES, packets ? MSG_TRUNC : 0);
		if (n > 0) {
			uint64_t now = now_ns(), unset = 0;
			atomic_compare_exchange_strong(&zero_ns, &unset, now);
			/* Another thread's first byte may have been stamped before and set after. */
			if (now < atomic_load(&zero_ns))
				now = atomic_load(&zero_ns);
			if (f->first_ns == 0)
				f->first_ns = now;
			if (options.verify)
				verify(f, buffer, (size_t)n < SIZE_MAX_BYTES ? (size_t)n
				       : SIZE_MAX_BYTES, packets);
			count(f, (uint64_t)n, now);
			f->ops++;
			continue;
		}
		error = n == 0 ? 0 : errno;
		if (error == EINTR && !atomic_load(&stop_hard))
			continue;
		break;
	}
	f->cpu_ns = thread_cpu_ns();
	free(buffer);
	if (error || atomic_load(&stop_hard)) {
		lost(f, error ? error : EINTR, "receiving");
		return NULL;
	}
	f->ended = BY_PEER;
	put64(last + 8, f->bytes);
	put64(last + 16, f->damaged);
	error = send_all(f->fd, last, sizeof last);
	if (error) {
		lost(f, error, "telling what arrived");
		return NULL;
	}
	/* Not closed before the peer has read it: a reset could overtake it. */
	while (recv(f->fd, last, sizeof last, 0) > 0)
		;
	return NULL;
}

/* ---- Setting up ---------------------------------------------------------------------------- */

static void set_buffer(int fd, const struct options *o)
{
	uint64_t size = o->buffer;
	int plain = (int)o->buffer;

	if (!o->buffer)
		return;
	bool set = o->at.family == AF_VSOCK
		? setsockopt(fd, AF_VSOCK, SO_VM_SOCKETS_BUFFER_MAX_SIZE, &size, sizeof size) == 0 &&
		  setsockopt(fd, AF_VSOCK, SO_VM_SOCKETS_BUFFER_SIZE, &size, sizeof size) == 0
		: setsockopt(fd, SOL_SOCKET, o->at.listening ? SO_RCVBUF : SO_SNDBUF, &plain,
			     sizeof plain) == 0;
	if (!set)
		die(EXIT_SETUP, "a buffer of %u bytes cannot be set: %s", o->buffer,
		    strerror(errno));
}

static void read_buffer(int fd, const struct options *o)
{
	uint64_t size = 0;
	int plain = 0;
	socklen_t length = sizeof size, plain_length = sizeof plain;

	if (o->at.family == AF_VSOCK &&
	    getsockopt(fd, AF_VSOCK, SO_VM_SOCKETS_BUFFER_SIZE, &size, &length) == 0)
		buffer_in_force = (uint32_t)size;
	else if (getsockopt(fd, SOL_SOCKET, o->at.listening ? SO_RCVBUF : SO_SNDBUF, &plain,
			    &plain_length) == 0)
		buffer_in_force = (uint32_t)plain;
}

static void encode_hello(unsigned char *to, const struct options *o, unsigned int index)
{
	memset(to, 0, HELLO_BYTES);
	memcpy(to, "VRST", 4);
	put32(to + 4, WIRE_VERSION);
	put64(to + 8, run_token);
	put32(to + 16, index);
	put32(to + 20, o->threads);
	put32(to + 24, o->sizes.kind);
	put32(to + 28, o->sizes.mean);
	put32(to + 32, o->sizes.sd);
	put32(to + 36, o->sizes.min);
	put32(to + 40, o->sizes.max);
	put32(to + 44, o->seed);
	put64(to + 48, (uint64_t)(o->warmup_s * 1e9));
	put64(to + 56, (uint64_t)(o->duration_s * 1e9));
}

/* The first hello says what the run is; the others must be of the same one. */
static unsigned int take_hello(const unsigned char *from, struct options *o)
{
	unsigned int index = get32(from + 16);

	if (memcmp(from, "VRST", 4) != 0 || get32(from + 4) != WIRE_VERSION)
		die(EXIT_SETUP, "%s does not speak wire version %u of vringlab-stream: use the same "
		    "build on both ends", peer_name, WIRE_VERSION);
	if (flow_count == 0) {
		run_token = get64(from + 8);
		o->threads = get32(from + 20);
		o->sizes = (struct sizes){ get32(from + 24), get32(from + 28), get32(from + 32),
					   get32(from + 36), get32(from + 40) };
		o->seed = get32(from + 44);
		o->warmup_s = (double)get64(from + 48) / 1e9;
		o->duration_s = (double)get64(from + 56) / 1e9;
		if (o->threads < 1 || o->threads > THREADS_MAX || o->sizes.kind > NORMAL ||
		    o->sizes.min < 1 || o->sizes.max > SIZE_MAX_BYTES ||
		    o->sizes.min > o->sizes.max || !(o->duration_s > 0) || o->duration_s > 1e6 ||
		    o->warmup_s > 1e6)
			die(EXIT_SETUP, "%s asks for what this build cannot do", peer_name);
	}
	if (get64(from + 8) != run_token || index != flow_count)
		die(EXIT_SETUP, "%s is not the connection that was due: another sender came in "
		    "between (choose another port)", peer_name);
	return index;
}

static void add_flow(int fd)
{
	flows[flow_count] = (struct flow){ .fd = fd, .index = flow_count };
	flow_count++;
}

static bool set_up_failed(int error, const char *doing)
{
	if (!error)
		return false;
	if (atomic_load(&stop_signal)) {
		run_ended = BY_SIGNAL;
		snprintf(run_error, sizeof run_error, "ended by signal %d before the start",
			 atomic_load(&stop_signal));
	} else if (error == EAGAIN || error == EWOULDBLOCK || error == ETIMEDOUT) {
		run_ended = TIMED_OUT;
		snprintf(run_error, sizeof run_error, "nothing moved for %g s while %s",
			 options.timeout_s, doing);
	} else {
		run_ended = PEER_GONE;
		snprintf(run_error, sizeof run_error, "the peer went away while %s: %s", doing,
			 error == EPIPE ? "it closed" : strerror(error));
	}
	return true;
}

/* Wait for a client with signals let in only meanwhile: none can slip in before. 0 or errno. */
static int wait_for_client(int fd, const sigset_t *before)
{
	struct pollfd waiting = { .fd = fd, .events = POLLIN };
	double s = options.timeout_s;
	struct timespec limit = { .tv_sec = (time_t)s, .tv_nsec = (long)((s - floor(s)) * 1e9) };

	if (atomic_load(&stop_signal))
		return EINTR;
	int ready = ppoll(&waiting, 1, &limit, before);
	return ready == 1 ? 0 : ready == 0 ? ETIMEDOUT : errno;
}

static bool accept_all(struct options *o, const sigset_t *before)
{
	unsigned char hello[HELLO_BYTES];
	int fd = listen_at(&o->at, (int)THREADS_MAX), error;
	sigset_t blocked;

	set_buffer(fd, o);
	say_listening(&o->at);
	do {
		error = wait_for_client(fd, before);
		int client = error ? -1 : accept4(fd, NULL, NULL, SOCK_CLOEXEC);
		if (client < 0) {
			if (!error)
				error = errno;
			break;
		}
		set_timeouts(client, &o->at, o->timeout_s);
		name_peer(client, &o->at, peer_name, sizeof peer_name);
		sigprocmask(SIG_SETMASK, before, &blocked);
		error = receive_all(client, hello, sizeof hello);
		sigprocmask(SIG_SETMASK, &blocked, NULL);
		if (!error) {
			take_hello(hello, o);
			add_flow(client);
		}
	} while (!error && flow_count < o->threads);
	close(fd);
	remove_unix_path();
	unix_path_made = NULL;
	return !set_up_failed(error, flow_count ? "connections were missing"
					       : "nobody connected");
}

static bool connect_all(const struct options *o)
{
	union address a;
	socklen_t length = make_address(&o->at, &a);
	uint64_t until = now_ns() + (uint64_t)(o->wait_s * 1e9);
	unsigned char hello[HELLO_BYTES], go[GO_BYTES];
	int error = 0;

	while (flow_count < o->threads) {
		int fd = make_socket(&o->at);
		set_timeouts(fd, &o->at, o->timeout_s);
		set_buffer(fd, o);
		if (connect(fd, &a.any, length) != 0) {
			error = errno;
			close(fd);
			if (atomic_load(&stop_signal))
				return !set_up_failed(EINTR, "connecting");
			if (!may_come_late(error) || now_ns() >= until)
				die(EXIT_SETUP, "cannot connect to %s: %s (tried for %g s, %u of %u "
				    "connections made: is the listener running there?)",
				    shown(&o->at), strerror(error), o->wait_s, flow_count,
				    o->threads);
			usleep(20000);
			continue;
		}
		name_peer(fd, &o->at, peer_name, sizeof peer_name);
		add_flow(fd);
		encode_hello(hello, o, flow_count - 1);
		error = send_all(fd, hello, sizeof hello);
		if (error)
			return !set_up_failed(error, "connecting");
	}
	for (unsigned int i = 0; i < flow_count && !error; i++) {
		error = receive_all(flows[i].fd, go, sizeof go);
		if (!error && (memcmp(go, "VRSG", 4) != 0 || get64(go + 8) != run_token))
			die(EXIT_SETUP, "%s does not speak wire version %u of vringlab-stream: use "
			    "the same build on both ends", peer_name, WIRE_VERSION);
	}
	return !set_up_failed(error, "waiting for the listener to be ready");
}

static bool send_go(void)
{
	unsigned char go[GO_BYTES] = "VRSG";
	int error = 0;

	put64(go + 8, run_token);
	for (unsigned int i = 0; i < flow_count && !error; i++)
		error = send_all(flows[i].fd, go, sizeof go);
	return !set_up_failed(error, "starting");
}

static void run_flows(struct options *o, const sigset_t *before)
{
	sigset_t all;

	set_times(o);
	if (o->verify || !o->at.listening)
		for (unsigned int i = 0; i < flow_count; i++)
			flows[i].sizes = draw_sizes(o, i);
	read_buffer(flows[0].fd, o);
	pthread_barrier_init(&start_line, NULL, flow_count + 1);
	/* Signals are the main thread's: it waits, the others work. */
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, NULL);
	for (unsigned int i = 0; i < flow_count; i++) {
		int error = pthread_create(&flows[i].thread, NULL,
					   o->at.listening ? receive_flow : send_flow, &flows[i]);
		if (error)
			die(EXIT_SETUP, "thread %u cannot be started: %s", i, strerror(error));
	}
	pthread_sigmask(SIG_SETMASK, before, NULL);
	getrusage(RUSAGE_SELF, &use_before);
	if (!o->at.listening)
		atomic_store(&zero_ns, now_ns());
	pthread_barrier_wait(&start_line);
	/* A listener's threads are in place now: those of the sender may begin. */
	if (o->at.listening && !send_go())
		for (unsigned int i = 0; i < flow_count; i++)
			shutdown(flows[i].fd, SHUT_RDWR);
	for (unsigned int i = 0; i < flow_count; i++)
		pthread_join(flows[i].thread, NULL);
	getrusage(RUSAGE_SELF, &use_after);
}

/* ---- Report -------------------------------------------------------------------------------- */

struct totals {
	uint64_t bytes, ops, enobufs, resets, damaged, peer_bytes, peer_damaged, last_ns;
	bool all_counted;
	uint64_t begin_ns, end_ns;          /* common window, from time zero; equal when empty */
	uint64_t slots_begin, slots_end;    /* the whole slots in it */
	uint64_t window_bytes;
	uint64_t skew_first_ns, skew_last_ns;
	uint64_t series[SLOTS];
	size_t slots_used;
};

static struct totals totals;

static void sum_up(const struct options *o)
{
	struct totals *t = &totals;
	uint64_t zero = atomic_load(&zero_ns), first = UINT64_MAX, last = UINT64_MAX;
	bool idle = flow_count == 0;

	t->all_counted = flow_count > 0;
	for (unsigned int i = 0; i < flow_count; i++) {
		const struct flow *f = &flows[i];
		t->bytes += f->bytes;
		t->ops += f->ops;
		t->enobufs += f->enobufs;
		t->resets += f->resets;
		t->damaged += f->damaged;
		t->peer_bytes += f->peer_bytes;
		t->peer_damaged += f->peer_damaged;
		t->all_counted &= f->peer_counted;
		if (f->last_ns == 0) {
			idle = true;
			continue;
		}
		uint64_t begin = f->first_ns - zero, end = f->last_ns - zero;
		if (begin < first)
			first = begin;
		if (begin > t->begin_ns)
			t->begin_ns = begin;
		if (end < last)
			last = end;
		if (end > t->last_ns)
			t->last_ns = end;
		for (unsigned int s = 0; s < SLOTS && f->slots; s++) {
			t->series[s] += f->slots[s];
			if (f->slots[s] && s + 1 > t->slots_used)
				t->slots_used = s + 1;
		}
	}
	if (first != UINT64_MAX) {
		t->skew_first_ns = t->begin_ns - first;
		t->skew_last_ns = t->last_ns - last;
	}
	if (t->begin_ns < warmup_ns)
		t->begin_ns = warmup_ns;
	t->end_ns = last < warmup_ns + duration_ns ? last : warmup_ns + duration_ns;
	if (idle || t->end_ns <= t->begin_ns || !o->threads) {
		t->end_ns = t->begin_ns;
		return;
	}
	t->slots_begin = (t->begin_ns + slot_ns - 1) / slot_ns;
	t->slots_end = t->end_ns / slot_ns < SLOTS ? t->end_ns / slot_ns : SLOTS;
	for (uint64_t s = t->slots_begin; s < t->slots_end; s++)
		t->window_bytes += t->series[s];
}

static uint64_t window_ns(void)
{
	return totals.slots_end > totals.slots_begin
		? (totals.slots_end - totals.slots_begin) * slot_ns : 0;
}

static double throughput(void)
{
	return window_ns() ? (double)totals.window_bytes * 8e9 / (double)window_ns() : 0;
}

static uint64_t microseconds(const struct timeval *a, const struct timeval *b)
{
	return (uint64_t)((b->tv_sec - a->tv_sec) * 1000000 + (b->tv_usec - a->tv_usec));
}

/* The worst of what happened to the connections, and the first of its messages. */
static void end_run(void)
{
	enum ended worst = run_ended;

	for (unsigned int i = 0; i < flow_count && run_ended == RUNNING; i++) {
		if (flows[i].ended > worst) {
			worst = flows[i].ended;
			if (flows[i].error[0])
				snprintf(run_error, sizeof run_error, "connection %u: %s", i,
					 flows[i].error);
		}
	}
	run_ended = worst;
}

static void write_flow(FILE *out, const struct flow *f)
{
	uint64_t zero = atomic_load(&zero_ns);

	fprintf(out, "{\"index\": %u, \"bytes\": %llu, \"ops\": %llu, ", f->index,
		(unsigned long long)f->bytes, (unsigned long long)f->ops);
	if (f->last_ns)
		fprintf(out, "\"first_ns\": %llu, \"last_ns\": %llu, ",
			(unsigned long long)(f->first_ns - zero),
			(unsigned long long)(f->last_ns - zero));
	else
		fprintf(out, "\"first_ns\": null, \"last_ns\": null, ");
	fprintf(out, "\"cpu_ns\": %llu, \"enobufs\": %llu, \"resets\": %llu, \"damaged\": %llu, ",
		(unsigned long long)f->cpu_ns, (unsigned long long)f->enobufs,
		(unsigned long long)f->resets, (unsigned long long)f->damaged);
	if (f->peer_counted)
		fprintf(out, "\"peer_bytes\": %llu, ", (unsigned long long)f->peer_bytes);
	else
		fprintf(out, "\"peer_bytes\": null, ");
	fprintf(out, "\"ended\": \"%s\", \"error\": ", ended_names[f->ended]);
	json_string(out, f->error);
	fprintf(out, "}");
}

static void write_json(FILE *out, const struct options *o)
{
	const struct totals *t = &totals;

	fprintf(out, "{\"tool\": \"vringlab-stream\", \"version\": \"" TOOL_VERSION "\", "
		"\"role\": \"%s\", \"family\": \"%s\", \"type\": \"%s\", \"peer\": ",
		o->at.listening ? "listen" : "connect", o->at.family_name,
		o->at.type == SOCK_SEQPACKET ? "seqpacket" : "stream");
	json_string(out, peer_name);
	fprintf(out, ", \"clock\": \"CLOCK_MONOTONIC_RAW\", \"threads\": %u, \"connections\": %u,\n",
		o->threads, flow_count);
	fprintf(out, " \"sizes\": {\"kind\": \"%s\", \"mean\": %u, \"sd\": %u, \"min\": %u, "
		"\"max\": %u}, \"seed\": %u, \"buffer\": %u, \"verify\": %s, ",
		kind_names[o->sizes.kind], o->sizes.mean, o->sizes.sd, o->sizes.min, o->sizes.max,
		o->seed, buffer_in_force, o->verify ? "true" : "false");
	fprintf(out, "\"zero_ns\": %llu, ", (unsigned long long)atomic_load(&zero_ns));
	fprintf(out, "\"warmup_ns\": %llu, \"duration_ns\": %llu, \"elapsed_ns\": %llu, "
		"\"ended\": \"%s\",\n", (unsigned long long)warmup_ns,
		(unsigned long long)duration_ns, (unsigned long long)t->last_ns,
		ended_names[run_ended]);
	fprintf(out, " \"window\": {\"begin_ns\": %llu, \"end_ns\": %llu, \"counted_ns\": %llu, "
		"\"bytes\": %llu}, \"throughput\": %.3f, \"skew_ns\": {\"first\": %llu, "
		"\"last\": %llu},\n", (unsigned long long)t->begin_ns,
		(unsigned long long)t->end_ns, (unsigned long long)window_ns(),
		(unsigned long long)t->window_bytes, throughput(),
		(unsigned long long)t->skew_first_ns, (unsigned long long)t->skew_last_ns);
	fprintf(out, " \"bytes\": %llu, \"ops\": %llu, \"enobufs\": %llu, \"resets\": %llu, "
		"\"damaged\": %llu, ", (unsigned long long)t->bytes, (unsigned long long)t->ops,
		(unsigned long long)t->enobufs, (unsigned long long)t->resets,
		(unsigned long long)(o->at.listening ? t->damaged : t->peer_damaged));
	if (t->all_counted)
		fprintf(out, "\"peer_bytes\": %llu, ", (unsigned long long)t->peer_bytes);
	else
		fprintf(out, "\"peer_bytes\": null, ");
	fprintf(out, "\"error\": ");
	json_string(out, run_error);
	fprintf(out, ",\n \"cpu_us\": {\"user\": %llu, \"system\": %llu}, \"switches\": "
		"{\"voluntary\": %ld, \"involuntary\": %ld}, \"cpus\": ",
		(unsigned long long)microseconds(&use_before.ru_utime, &use_after.ru_utime),
		(unsigned long long)microseconds(&use_before.ru_stime, &use_after.ru_stime),
		use_after.ru_nvcsw - use_before.ru_nvcsw,
		use_after.ru_nivcsw - use_before.ru_nivcsw);
	if (o->cpus_text)
		json_string(out, o->cpus_text);
	else
		fprintf(out, "null");
	fprintf(out, ",\n \"slot_ns\": %llu, \"series\": [", (unsigned long long)slot_ns);
	for (size_t s = 0; s < t->slots_used; s++)
		fprintf(out, "%s%llu", s ? ", " : "", (unsigned long long)t->series[s]);
	fprintf(out, "],\n \"per_thread\": [");
	for (unsigned int i = 0; i < flow_count; i++) {
		fputs(i ? ",\n  " : "\n  ", out);
		write_flow(out, &flows[i]);
	}
	fprintf(out, "]}\n");
}

static void write_text(FILE *out, const struct options *o)
{
	const struct totals *t = &totals;

	fprintf(out, "%s, %u connections, %s of %u to %u bytes: %.6g Mb/s over the common %.3f s of "
		"%g s\n", peer_name, flow_count,
		o->at.type == SOCK_SEQPACKET ? "messages" : "writes", o->sizes.min, o->sizes.max,
		throughput() / 1e6, (double)window_ns() / 1e9, o->duration_s);
	fprintf(out, "%llu bytes, %llu operations, start skew %.3f ms, %llu ENOBUFS, %llu resets\n",
		(unsigned long long)t->bytes, (unsigned long long)t->ops,
		(double)t->skew_first_ns / 1e6, (unsigned long long)t->enobufs,
		(unsigned long long)t->resets);
}

static void write_report(const struct options *o)
{
	char *text = NULL;
	size_t length = 0;
	FILE *memory = open_memstream(&text, &length);

	if (!memory)
		die(EXIT_OUTPUT, "no memory for the report");
	if (o->json)
		write_json(memory, o);
	else
		write_text(memory, o);
	if (fclose(memory) != 0)
		die(EXIT_OUTPUT, "no memory for the report");
	write_output(o->output, text, length);
	free(text);
}

/* ---- Command line -------------------------------------------------------------------------- */

const char usage_text[] =
"usage: vringlab-stream listen  PORT     [options]\n"
"       vringlab-stream connect CID PORT [options]\n"
"with --family tcp: listen PORT (loopback), connect ADDRESS PORT; unix: listen|connect PATH\n"
"The side that connects sends; marked * are its options, and the listener is told them.\n"
"\n"
"  --threads N       * connections, one thread each on both ends, 1 to 64 (1)\n"
"  --size SPEC       * message size in bytes, 1 to 262144: N, uniform:A,B or\n"
"                      normal:MEAN,SD,MIN,MAX (64)\n"
"  --duration S      * measure for S seconds (5)\n"
"  --warmup S        * send for S seconds before that (1)\n"
"  --seed N          * of the random sizes (1)\n"
"  --type T          stream or seqpacket, the same on both ends (stream)\n"
"  --buffer BYTES    socket buffer; on a vsock listener what a sender may have under way\n"
"  --verify          listener only: check every byte that arrives\n"
"  --timeout S       give up when nothing moves, or nobody connects, for S seconds (30)\n"
"  --wait S          keep trying to connect for S seconds (5)\n"
"  --cpus LIST       run on these CPUs only, as 0,2-3\n"
"  --family F        vsock, tcp or unix (vsock)\n"
"  --json            print JSON\n"
"  --output FILE     write the report there, whole or not at all\n"
"  --version, --help\n";

static struct sizes parse_sizes(const char *option, const char *text)
{
	struct sizes s = { .kind = FIXED };
	uint64_t v[4];
	unsigned int due = 1, found = 0;
	const char *rest = text;

	if (strncmp(text, "uniform:", 8) == 0) {
		s.kind = UNIFORM;
		due = 2;
		rest = text + 8;
	} else if (strncmp(text, "normal:", 7) == 0) {
		s.kind = NORMAL;
		due = 4;
		rest = text + 7;
	}
	char *copy = strdup(rest), *save = NULL;
	if (!copy)
		die(EXIT_SETUP, "no memory");
	for (char *part = strtok_r(copy, ",", &save); part; part = strtok_r(NULL, ",", &save)) {
		if (found < due)
			/* A deviation may be 0; a size may not. */
			v[found] = whole(option, part, s.kind == NORMAL && found == 1 ? 0 : 1,
					 SIZE_MAX_BYTES);
		found++;
	}
	free(copy);
	if (found != due)
		usage("%s: '%s' has %u numbers, not %u", option, text, found, due);
	if (s.kind == FIXED) {
		s.mean = s.min = s.max = (uint32_t)v[0];
	} else if (s.kind == UNIFORM) {
		s.min = (uint32_t)v[0];
		s.max = (uint32_t)v[1];
		s.mean = s.min + (s.max - s.min) / 2;
	} else {
		s = (struct sizes){ NORMAL, (uint32_t)v[0], (uint32_t)v[1], (uint32_t)v[2],
				    (uint32_t)v[3] };
		/* Otherwise drawing until one fits could take for ever. */
		if (s.mean < s.min || s.mean > s.max)
			usage("%s: the mean %u lies outside of %u to %u", option, s.mean, s.min,
			      s.max);
		if (s.sd > 4 * (uint64_t)(s.max - s.min) + 1)
			usage("%s: a deviation of %u is too much for %u to %u", option, s.sd, s.min,
			      s.max);
	}
	if (s.min > s.max)
		usage("%s: %u is more than %u", option, s.min, s.max);
	return s;
}

static cpu_set_t parse_cpus(const char *option, const char *text)
{
	cpu_set_t set;
	char *copy = strdup(text), *save = NULL;

	if (!copy)
		die(EXIT_SETUP, "no memory");
	CPU_ZERO(&set);
	for (char *part = strtok_r(copy, ",", &save); part; part = strtok_r(NULL, ",", &save)) {
		char *dash = strchr(part, '-');
		if (dash)
			*dash = '\0';
		uint64_t low = whole(option, part, 0, CPU_SETSIZE - 1);
		uint64_t high = dash ? whole(option, dash + 1, low, CPU_SETSIZE - 1) : low;
		for (uint64_t cpu = low; cpu <= high; cpu++)
			CPU_SET(cpu, &set);
	}
	free(copy);
	if (CPU_COUNT(&set) == 0)
		usage("%s names no CPU", option);
	return set;
}

static void parse(int argc, char **argv, struct options *o)
{
	const char *words[3] = { NULL, NULL, NULL }, *senders = NULL;
	int found = 0;

	for (int i = 1; i < argc; i++) {
		const char *option = argv[i];
		if (strcmp(option, "--help") == 0 || strcmp(option, "--version") == 0) {
			printf("vringlab-stream " TOOL_VERSION "\n%s",
			       option[2] == 'h' ? usage_text : "");
			exit(0);
		}
		if (strcmp(option, "--json") == 0) {
			o->json = true;
			continue;
		}
		if (strcmp(option, "--verify") == 0) {
			o->verify = true;
			continue;
		}
		if (strncmp(option, "--", 2) != 0) {
			if (found == 3)
				usage("what is '%s'?", option);
			words[found++] = option;
			continue;
		}
		if (i + 1 == argc)
			usage("%s needs a value, or is unknown", option);
		const char *value = argv[++i];
		bool sender = true;
		if (strcmp(option, "--threads") == 0) {
			o->threads = (unsigned int)whole(option, value, 1, THREADS_MAX);
		} else if (strcmp(option, "--size") == 0) {
			o->sizes = parse_sizes(option, value);
		} else if (strcmp(option, "--duration") == 0) {
			o->duration_s = seconds(option, value, 0.001);
		} else if (strcmp(option, "--warmup") == 0) {
			o->warmup_s = seconds(option, value, 0);
		} else if (strcmp(option, "--seed") == 0) {
			o->seed = (uint32_t)whole(option, value, 0, UINT32_MAX);
		} else {
			sender = false;
		}
		if (sender) {
			senders = option;
		} else if (strcmp(option, "--type") == 0) {
			if (strcmp(value, "stream") != 0 && strcmp(value, "seqpacket") != 0)
				usage("--type is stream or seqpacket, not '%s'", value);
			o->at.type = value[1] == 'e' ? SOCK_SEQPACKET : SOCK_STREAM;
		} else if (strcmp(option, "--buffer") == 0) {
			o->buffer = (uint32_t)whole(option, value, 1024, 1u << 30);
		} else if (strcmp(option, "--timeout") == 0) {
			o->timeout_s = seconds(option, value, 0.001);
		} else if (strcmp(option, "--wait") == 0) {
			o->wait_s = seconds(option, value, 0);
		} else if (strcmp(option, "--cpus") == 0) {
			o->cpus = parse_cpus(option, value);
			o->cpus_text = value;
		} else if (strcmp(option, "--output") == 0) {
			o->output = value;
		} else if (strcmp(option, "--family") == 0) {
			o->at.family_name = value;
			o->at.family = family_of(value);
		} else {
			usage("unknown option %s", option);
		}
	}
	place_of(&o->at, words, found);
	if (o->at.listening && senders)
		usage("%s is the sender's to say", senders);
	if (!o->at.listening && o->verify)
		usage("--verify is the listener's: it sees what arrives");
	if (o->at.family == AF_INET && o->at.type == SOCK_SEQPACKET)
		usage("tcp has no seqpacket: use vsock or unix");
}

static int exit_status(const struct options *o)
{
	uint64_t damaged = o->at.listening ? totals.damaged : totals.peer_damaged;

	switch (run_ended) {
	case BY_SIGNAL:
		return 128 + atomic_load(&stop_signal);
	case PEER_GONE:
		return EXIT_PEER;
	case TIMED_OUT:
		return EXIT_TIMEOUT;
	default:
		break;
	}
	if (damaged) {
		fprintf(stderr, TOOL_NAME ": %llu pieces did not arrive as they were sent\n",
			(unsigned long long)damaged);
		return EXIT_SEQUENCE;
	}
	if (!o->at.listening && totals.all_counted && totals.bytes != totals.peer_bytes) {
		fprintf(stderr, TOOL_NAME ": %llu bytes were sent and %llu arrived\n",
			(unsigned long long)totals.bytes, (unsigned long long)totals.peer_bytes);
		return EXIT_SEQUENCE;
	}
	return 0;
}

int main(int argc, char **argv)
{
	struct options *o = &options;
	struct sigaction stop = { .sa_handler = on_stop }, hard = { .sa_handler = on_alarm };
	sigset_t stop_set, before;

	parse(argc, argv, o);
	/* No SA_RESTART: a waiting call has to come back. */
	sigaction(SIGINT, &stop, NULL);
	sigaction(SIGTERM, &stop, NULL);
	sigaction(SIGALRM, &hard, NULL);
	signal(SIGPIPE, SIG_IGN);
	if (o->cpus_text && sched_setaffinity(0, sizeof o->cpus, &o->cpus) != 0)
		die(EXIT_SETUP, "cannot run on CPUs %s: %s (are they online and allowed here?)",
		    o->cpus_text, strerror(errno));
	make_pattern();
	run_token = now_ns() ^ (uint64_t)getpid() << 32;
	run_token = splitmix64(&run_token);

	sigemptyset(&stop_set);
	sigaddset(&stop_set, SIGINT);
	sigaddset(&stop_set, SIGTERM);
	if (o->at.listening)
		sigprocmask(SIG_BLOCK, &stop_set, &before);
	else
		sigprocmask(SIG_BLOCK, NULL, &before);
	bool ready = o->at.listening ? accept_all(o, &before) : connect_all(o);
	sigprocmask(SIG_SETMASK, &before, NULL);
	if (ready)
		run_flows(o, &before);
	alarm(0);
	for (unsigned int i = 0; i < flow_count; i++)
		close(flows[i].fd);
	end_run();
	sum_up(o);
	write_report(o);
	if (run_error[0])
		fprintf(stderr, TOOL_NAME ": %s\n", run_error);
	return exit_status(o);
}
