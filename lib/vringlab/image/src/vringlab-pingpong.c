/* SPDX-License-Identifier: GPL-2.0-only
 *
 * vringlab-pingpong: round-trip latency over a stream socket, one message in flight.
 *
 * It exists to cross-check fio's network engine. fio takes a short read for a whole message,
 * answers it, and from then on has more than one message in flight: its latency then collapses
 * without meaning anything. Here every receive asks for the whole message (MSG_WAITALL, and a
 * loop for the cases in which that still returns less), and both ends prove, message by message,
 * that exactly one was in flight (see "Wire format").
 *
 *     vringlab-pingpong listen  PORT     [options]     vsock: any CID; tcp: loopback; unix: a path
 *     vringlab-pingpong connect CID PORT [options]     tcp: ADDRESS PORT; unix: a path only
 *
 * The side that connects sends first and measures: to have the round trip as the host sees it
 * (h-g-h) the guest listens and the host connects, and the other way round for g-h-g.
 *
 * Time is CLOCK_MONOTONIC_RAW, which NTP does not slew, read directly before send() and directly
 * after the last byte of the echo came back.
 *
 * Wire format, little endian. First 16 bytes each way: "VRPP", version, payload, token.
 * Then messages of `payload` bytes: seq, token, ack, filling, check (the last four bytes).
 *   token  a new value drawn by the sender of every message,
 *   ack    the token of the last message that the sender received,
 *   check  a mix of kind, seq, token and ack; the kind (ping, echo, end, end-ack) is nowhere else.
 * The k-th ping must carry the token of the echo k-1, so it cannot have been sent before that
 * echo had arrived: a peer that pipelines, repeats, cuts or shifts messages is counted in
 * sequence_errors.
 *
 * Exit status: 0 measured; 1 usage; 2 the socket could not be set up; 3 the peer went away;
 * 4 nothing moved for --timeout seconds; 5 sequence errors; 6 output could not be written;
 * 128+n ended by signal n. In every case but 1 and 2 the figures taken so far are printed.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>

#define TOOL_NAME "vringlab-pingpong"
#include "vringlab-tool.h"

#define TOOL_VERSION "1.0"
#define WIRE_VERSION 1u

#define HELLO_BYTES 16u
#define PAYLOAD_MIN 16u
/* vsock's MSG_WAITALL returns ENOMEM unless the whole message fits its receive buffer, 256 KiB by
 * default (net/vmw_vsock/af_vsock.c): stay at half of that. */
#define PAYLOAD_MAX 131072u

enum kind { PING = 1, ECHO = 2, END = 3, END_ACK = 4 };

enum ended { RUNNING, BY_COUNT, BY_DURATION, BY_PEER, PEER_GONE, TIMED_OUT, BY_SIGNAL };

static const char *const ended_names[] = {
	"running", "count", "duration", "peer finished", "peer closed", "timeout", "signal",
};

struct options {
	struct place at;
	bool json;
	uint32_t payload;      /* 0 on a listener: take the initiator's */
	double duration_s, timeout_s, wait_s;
	uint64_t warmup, count;
	int cpu;               /* -1: not pinned */
	const char *dump, *output;
};

/* ---- Histogram: 128 linear steps in each power of two --------------------------------------
 *
 * Values below 256 ns have a bin each. Above, a value with e significant bits past the first
 * falls into a bin of width 2^(e-7) that starts at or above 2^e, and is shown as the bin's
 * midpoint: the error is at most 2^(e-8) / 2^e = 1/256. */
#define SUB_BITS 7
#define SUB_COUNT (1u << SUB_BITS)
#define HISTOGRAM_BINS ((64 - SUB_BITS + 1) * SUB_COUNT)

static uint64_t histogram[HISTOGRAM_BINS];

static unsigned int bin_of(uint64_t ns)
{
	if (ns < 2 * SUB_COUNT)
		return (unsigned int)ns;
	unsigned int shift = 63u - (unsigned int)__builtin_clzll(ns) - SUB_BITS;
	return (shift << SUB_BITS) + (unsigned int)(ns >> shift);
}

static uint64_t midpoint_of(unsigned int bin)
{
	if (bin < 2 * SUB_COUNT)
		return bin;
	unsigned int shift = (bin >> SUB_BITS) - 1;
	uint64_t low = (uint64_t)(bin - (shift << SUB_BITS)) << shift;
	return low + (((uint64_t)1 << shift) - 1) / 2;
}

/* ---- What is measured --------------------------------------------------------------------- */

struct figures {
	uint64_t messages, warmup_done;
	uint64_t min, max, sum;
	double mean, m2;                 /* Welford's running mean and sum of squares */
	uint64_t first_ns, last_ns;
	uint64_t sequence_errors;
	char first_sequence_error[160];
	bool peer_counted;
	uint64_t peer_sequence_errors;
	int cpu_start, cpu_end;
	long voluntary, involuntary;
	enum ended ended;
	char error[320];
	char peer[160];
};

static struct figures figures = { .min = UINT64_MAX, .cpu_start = -1, .cpu_end = -1 };

static volatile sig_atomic_t stop_signal;   /* the signal, once asked to stop */
static volatile sig_atomic_t stop_hard;     /* the grace for the message in flight is over */
static volatile int connection = -1;

static void on_stop(int number)
{
	stop_signal = number;
	/* One second for the round trip in flight. A signal can also arrive between the test of
	 * stop_signal and recv(): the alarm then ends that recv. */
	alarm(1);
}

static void on_alarm(int number)
{
	(void)number;
	stop_hard = 1;
	if (connection >= 0)
		shutdown(connection, SHUT_RDWR);
	else
		alarm(1);   /* a connection about to be made must not be waited on either */
}

__attribute__((format(printf, 2, 3)))
static void end_with(enum ended how, const char *format, ...)
{
	va_list arguments;
	figures.ended = how;
	va_start(arguments, format);
	vsnprintf(figures.error, sizeof figures.error, format, arguments);
	va_end(arguments);
}

static void record(uint64_t ns)
{
	figures.messages++;
	if (ns < figures.min)
		figures.min = ns;
	if (ns > figures.max)
		figures.max = ns;
	figures.sum += ns;
	double delta = (double)ns - figures.mean;
	figures.mean += delta / (double)figures.messages;
	figures.m2 += delta * ((double)ns - figures.mean);
	histogram[bin_of(ns)]++;
}

/* Nearest rank: the smallest recorded value that at least p per thousand do not exceed. */
static uint64_t percentile(unsigned int per_thousand)
{
	uint64_t n = figures.messages, seen = 0;
	/* n / 1000 first, so that the product cannot overflow. */
	uint64_t rank = n / 1000 * per_thousand + (n % 1000 * per_thousand + 999) / 1000;
	if (rank == 0)
		rank = 1;
	for (unsigned int bin = 0; bin < HISTOGRAM_BINS; bin++) {
		seen += histogram[bin];
		if (seen >= rank) {
			uint64_t value = midpoint_of(bin);
			if (value < figures.min)
				value = figures.min;
			return value > figures.max ? figures.max : value;
		}
	}
	return figures.max;
}

/* ---- Raw record, for tests and for the curious --------------------------------------------- */

static uint64_t *raw;
static size_t raw_room;

static void dump_keep(uint64_t ns)
{
	if (figures.messages >= raw_room) {
		raw_room = raw_room ? 2 * raw_room : 65536;
		raw = realloc(raw, raw_room * sizeof *raw);
		if (!raw)
			die(EXIT_OUTPUT, "no memory to keep %zu latencies for --dump", raw_room);
	}
	raw[figures.messages] = ns;
}

/* ---- Messages ------------------------------------------------------------------------------ */

struct message {
	uint32_t seq, token, ack, check;
};

static unsigned char *buffer;
static uint64_t token_state;

static uint32_t next_token(void)
{
	return (uint32_t)(splitmix64(&token_state) >> 32);
}

static uint32_t check_of(enum kind kind, const struct message *m)
{
	uint32_t h = 0x811c9dc5u ^ (uint32_t)kind;
	h = (h * 0x01000193u) ^ m->seq;
	h = (h * 0x01000193u) ^ m->token;
	h = (h * 0x01000193u) ^ m->ack;
	return h * 0x01000193u;
}

static void encode(uint32_t payload, enum kind kind, struct message *m)
{
	m->check = check_of(kind, m);
	put32(buffer, m->seq);
	put32(buffer + 4, m->token);
	put32(buffer + 8, m->ack);
	put32(buffer + payload - 4, m->check);
}

static struct message decode(uint32_t payload)
{
	return (struct message){ .seq = get32(buffer), .token = get32(buffer + 4),
				 .ack = get32(buffer + 8), .check = get32(buffer + payload - 4) };
}

__attribute__((format(printf, 1, 2)))
static void sequence_error(const char *format, ...)
{
	if (figures.sequence_errors++ == 0) {
		va_list arguments;
		va_start(arguments, format);
		vsnprintf(figures.first_sequence_error, sizeof figures.first_sequence_error, format,
			  arguments);
		va_end(arguments);
	}
}

/* Whether `m` is the `kind` that was due. A wrong one is counted. */
static bool expect(enum kind kind, const struct message *m, uint32_t seq, uint32_t ack)
{
	if (m->check != check_of(kind, m))
		sequence_error("message %u: not the %s that was due (seq %u, wrong check)", seq,
			       kind == PING ? "ping" : kind == ECHO ? "echo" : "end", m->seq);
	else if (m->seq != seq)
		sequence_error("message %u: got sequence number %u", seq, m->seq);
	else if (m->ack != ack)
		sequence_error("message %u: sent before the message before it had been answered",
			       seq);
	else
		return true;
	return false;
}

static bool send_all(int fd, const unsigned char *from, uint32_t length, double timeout_s)
{
	for (uint32_t done = 0; done < length;) {
		ssize_t n = send(fd, from + done, length - done, MSG_NOSIGNAL);
		if (n > 0) {
			done += (uint32_t)n;
		} else if (stop_hard) {
			end_with(BY_SIGNAL, "ended by signal %d", (int)stop_signal);
			return false;
		} else if (n < 0 && errno == EINTR) {
			continue;
		} else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
			end_with(TIMED_OUT, "nothing could be sent for %g s: %u of %u bytes of the "
				 "message went out", timeout_s, done, length);
			return false;
		} else {
			end_with(PEER_GONE, "the peer went away while a message was sent: %s",
				 strerror(errno));
			return false;
		}
	}
	return true;
}

/* A whole message into the buffer. MSG_WAITALL still returns less after a signal, a time-out or a
 * close, hence the loop. */
static bool receive_all(int fd, uint32_t length, double timeout_s, bool listening)
{
	for (uint32_t done = 0; done < length;) {
		ssize_t n = recv(fd, buffer + done, length - done, MSG_WAITALL);
		if (n > 0) {
			done += (uint32_t)n;
			continue;
		}
		int error = errno;
		/* A listener owes nobody an answer while nothing is in flight: it stops at once. */
		if (stop_hard || (stop_signal && listening && done == 0)) {
			end_with(BY_SIGNAL, "ended by signal %d", (int)stop_signal);
			return false;
		}
		if (n < 0 && error == EINTR)
			continue;
		if (n < 0 && (error == EAGAIN || error == EWOULDBLOCK)) {
			end_with(TIMED_OUT, "nothing came for %g s: %u of %u bytes of the message "
				 "were here", timeout_s, done, length);
		} else if (n < 0) {
			end_with(PEER_GONE, "the peer went away: %s (%u of %u bytes of the message "
				 "were here)", strerror(error), done, length);
		} else {
			end_with(PEER_GONE, "the peer closed without ending the run (%u of %u bytes "
				 "of the message were here)", done, length);
		}
		return false;
	}
	return true;
}

static bool hello(int fd, struct options *o, uint32_t own_token, uint32_t *peer_token)
{
	unsigned char mine[HELLO_BYTES];

	if (o->at.listening && !receive_all(fd, HELLO_BYTES, o->timeout_s, true))
		return false;
	if (o->at.listening && memcmp(buffer, "VRPP", 4) == 0 && o->payload == 0)
		o->payload = get32(buffer + 8);
	memcpy(mine, "VRPP", 4);
	put32(mine + 4, WIRE_VERSION);
	put32(mine + 8, o->payload);
	put32(mine + 12, own_token);
	if (!send_all(fd, mine, HELLO_BYTES, o->timeout_s))
		return false;
	if (!o->at.listening && !receive_all(fd, HELLO_BYTES, o->timeout_s, false))
		return false;
	if (memcmp(buffer, "VRPP", 4) != 0 || get32(buffer + 4) != WIRE_VERSION)
		die(EXIT_SETUP, "%s does not speak wire version %u of vringlab-pingpong: use the same "
		    "build on both ends", figures.peer, WIRE_VERSION);
	if (get32(buffer + 8) != o->payload)
		die(EXIT_SETUP, "the peer uses a payload of %u bytes, this end %u: give both the same "
		    "--payload", get32(buffer + 8), o->payload);
	if (o->payload < PAYLOAD_MIN || o->payload > PAYLOAD_MAX)
		die(EXIT_SETUP, "the peer asks for a payload of %u bytes: %u to %u are possible",
		    o->payload, PAYLOAD_MIN, PAYLOAD_MAX);
	*peer_token = get32(buffer + 12);
	return true;
}

static void initiate(int fd, const struct options *o, uint32_t token, uint32_t peer_token)
{
	const uint64_t duration_ns = (uint64_t)(o->duration_s * 1e9);
	struct message out = { .seq = 0, .token = token, .ack = peer_token };
	bool warm = o->warmup == 0;

	for (;; out.seq++) {
		if (!warm && figures.warmup_done == o->warmup)
			warm = true;
		if (stop_signal) {
			end_with(BY_SIGNAL, "ended by signal %d", (int)stop_signal);
			break;
		}
		out.token = next_token();
		encode(o->payload, PING, &out);
		uint64_t t0 = now_ns();
		if (!send_all(fd, buffer, o->payload, o->timeout_s) ||
		    !receive_all(fd, o->payload, o->timeout_s, false))
			return;
		uint64_t t1 = now_ns();

		struct message in = decode(o->payload);
		expect(ECHO, &in, out.seq, out.token);
		out.ack = in.token;
		if (!warm) {
			figures.warmup_done++;
			continue;
		}
		if (figures.messages == 0)
			figures.first_ns = t0;
		figures.last_ns = t1;
		if (o->dump)
			dump_keep(t1 - t0);
		record(t1 - t0);
		if (o->count && figures.messages >= o->count) {
			figures.ended = BY_COUNT;
			out.seq++;
			break;
		}
		if (!o->count && t1 - figures.first_ns >= duration_ns) {
			figures.ended = BY_DURATION;
			out.seq++;
			break;
		}
	}

	/* The end is a message too, so that the other side can tell it from a lost peer; its answer
	 * brings that side's count of sequence errors. */
	enum ended how = figures.ended;
	out.token = next_token();
	encode(o->payload, END, &out);
	if (!send_all(fd, buffer, o->payload, o->timeout_s) ||
	    !receive_all(fd, o->payload, o->timeout_s, false))
		return;
	struct message in = decode(o->payload);
	if (expect(END_ACK, &in, out.seq, out.token)) {
		figures.peer_counted = true;
		figures.peer_sequence_errors = in.token;
	}
	figures.ended = how;
}

static void answer(int fd, const struct options *o, uint32_t token)
{
	struct message out = { .seq = 0, .token = token, .ack = 0 };

	for (uint32_t due = 0;; due++) {
		if (stop_signal) {
			end_with(BY_SIGNAL, "ended by signal %d", (int)stop_signal);
			return;
		}
		if (!receive_all(fd, o->payload, o->timeout_s, true))
			return;
		struct message in = decode(o->payload);
		if (in.check == check_of(END, &in)) {
			expect(END, &in, due, out.token);
			uint64_t errors = figures.sequence_errors;
			struct message last = { .seq = in.seq, .ack = in.token,
						.token = errors > UINT32_MAX ? UINT32_MAX
									     : (uint32_t)errors };
			encode(o->payload, END_ACK, &last);
			if (send_all(fd, buffer, o->payload, o->timeout_s))
				figures.ended = BY_PEER;
			return;
		}
		expect(PING, &in, due, out.token);
		/* What came decides the answer, as an echo must; `due` is only what it is held to. */
		out.seq = in.seq;
		out.ack = in.token;
		out.token = next_token();
		encode(o->payload, ECHO, &out);
		if (!send_all(fd, buffer, o->payload, o->timeout_s))
			return;
		figures.last_ns = now_ns();
		if (figures.messages++ == 0)
			figures.first_ns = figures.last_ns;
	}
}

/* ---- Connections ---------------------------------------------------------------------------- */

static int accept_one(struct options *o)
{
	int fd = listen_at(&o->at, 1);

	/* ppoll takes the signals only while it waits: none can slip in before it does. */
	sigset_t stop_set, before;
	sigemptyset(&stop_set);
	sigaddset(&stop_set, SIGINT);
	sigaddset(&stop_set, SIGTERM);
	sigprocmask(SIG_BLOCK, &stop_set, &before);
	say_listening(&o->at);

	struct pollfd waiting = { .fd = fd, .events = POLLIN };
	struct timespec limit = { .tv_sec = (time_t)o->timeout_s,
				  .tv_nsec = (long)((o->timeout_s - floor(o->timeout_s)) * 1e9) };
	int ready = stop_signal ? -1 : ppoll(&waiting, 1, &limit, &before);
	int client = ready == 1 ? accept4(fd, NULL, NULL, SOCK_CLOEXEC) : -1;
	int error = errno;
	sigprocmask(SIG_SETMASK, &before, NULL);
	if (client < 0) {
		if (stop_signal)
			end_with(BY_SIGNAL, "ended by signal %d before anyone connected",
				 (int)stop_signal);
		else if (ready == 0)
			end_with(TIMED_OUT, "nobody connected to %s for %g s", shown(&o->at),
				 o->timeout_s);
		else
			end_with(PEER_GONE, "nobody could be accepted on %s: %s", shown(&o->at),
				 strerror(error));
	}
	close(fd);
	remove_unix_path();
	unix_path_made = NULL;
	return client;
}

static int connect_to(const struct options *o)
{
	union address a;
	socklen_t length = make_address(&o->at, &a);
	uint64_t until = now_ns() + (uint64_t)(o->wait_s * 1e9);

	for (;;) {
		int fd = make_socket(&o->at);
		set_timeouts(fd, &o->at, o->timeout_s);
		if (connect(fd, &a.any, length) == 0)
			return fd;
		int error = errno;
		close(fd);
		if (stop_signal) {
			end_with(BY_SIGNAL, "ended by signal %d before %s answered",
				 (int)stop_signal, shown(&o->at));
			return -1;
		}
		if (!may_come_late(error) || now_ns() >= until)
			die(EXIT_SETUP, "cannot connect to %s: %s (tried for %g s: is the listener "
			    "running there?)", shown(&o->at), strerror(error), o->wait_s);
		usleep(20000);
	}
}

/* ---- Output ---------------------------------------------------------------------------------- */

static const struct { const char *name; unsigned int per_thousand; } percentiles[] = {
	{ "1", 10 }, { "50", 500 }, { "90", 900 }, { "99", 990 }, { "99.9", 999 },
};

static double deviation(void)
{
	return figures.messages > 1 ? sqrt(figures.m2 / (double)(figures.messages - 1)) : 0.0;
}

static void write_json(FILE *out, const struct options *o)
{
	bool timed = !o->at.listening && figures.messages > 0;

	fprintf(out, "{\"tool\": \"vringlab-pingpong\", \"version\": \"" TOOL_VERSION "\", "
		"\"role\": \"%s\", \"family\": \"%s\", \"peer\": ",
		o->at.listening ? "listen" : "connect", o->at.family_name);
	json_string(out, figures.peer);
	fprintf(out, ", \"clock\": \"CLOCK_MONOTONIC_RAW\", \"payload\": %u, \"warmup\": %llu, "
		"\"messages\": %llu, \"elapsed_ns\": %llu, \"ended\": \"%s\",\n", o->payload,
		(unsigned long long)figures.warmup_done, (unsigned long long)figures.messages,
		(unsigned long long)(figures.last_ns - figures.first_ns), ended_names[figures.ended]);
	if (timed) {
		fprintf(out, " \"latency_ns\": {\"min\": %llu, \"max\": %llu, \"mean\": %.3f, "
			"\"stddev\": %.3f, \"percentile\": {",
			(unsigned long long)figures.min, (unsigned long long)figures.max,
			(double)figures.sum / (double)figures.messages, deviation());
		for (size_t i = 0; i < sizeof percentiles / sizeof *percentiles; i++)
			fprintf(out, "%s\"%s\": %llu", i ? ", " : "", percentiles[i].name,
				(unsigned long long)percentile(percentiles[i].per_thousand));
		fprintf(out, "}},\n");
	} else {
		fprintf(out, " \"latency_ns\": null,\n");
	}
	fprintf(out, " \"bin_error\": %.8f, \"bins\": [", 1.0 / (2 * SUB_COUNT));
	bool first = true;
	for (unsigned int bin = 0; timed && bin < HISTOGRAM_BINS; bin++)
		if (histogram[bin]) {
			fprintf(out, "%s[%llu, %llu]", first ? "" : ", ",
				(unsigned long long)midpoint_of(bin),
				(unsigned long long)histogram[bin]);
			first = false;
		}
	fprintf(out, "],\n \"sequence_errors\": %llu, \"first_sequence_error\": ",
		(unsigned long long)figures.sequence_errors);
	json_string(out, figures.first_sequence_error);
	if (figures.peer_counted)
		fprintf(out, ", \"peer_sequence_errors\": %llu",
			(unsigned long long)figures.peer_sequence_errors);
	else
		fprintf(out, ", \"peer_sequence_errors\": null");
	fprintf(out, ", \"error\": ");
	json_string(out, figures.error);
	fprintf(out, ",\n \"cpu\": {\"asked\": ");
	if (o->cpu >= 0)
		fprintf(out, "%d", o->cpu);
	else
		fprintf(out, "null");
	fprintf(out, ", \"start\": %d, \"end\": %d}, \"switches\": {\"voluntary\": %ld, "
		"\"involuntary\": %ld}}\n", figures.cpu_start, figures.cpu_end, figures.voluntary,
		figures.involuntary);
}

static void write_text(FILE *out, const struct options *o)
{
	double seconds = (double)(figures.last_ns - figures.first_ns) / 1e9;

	fprintf(out, "%s, payload %u bytes: %llu messages in %.3f s, %llu sequence errors\n",
		figures.peer, o->payload, (unsigned long long)figures.messages, seconds,
		(unsigned long long)(figures.sequence_errors + figures.peer_sequence_errors));
	if (!o->at.listening && figures.messages) {
		fprintf(out, "round trip in ns: min %llu mean %.0f max %llu stddev %.0f\n",
			(unsigned long long)figures.min,
			(double)figures.sum / (double)figures.messages,
			(unsigned long long)figures.max, deviation());
		for (size_t i = 0; i < sizeof percentiles / sizeof *percentiles; i++)
			fprintf(out, "  p%-5s %llu\n", percentiles[i].name,
				(unsigned long long)percentile(percentiles[i].per_thousand));
	}
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

	if (o->dump) {
		FILE *file = fopen(o->dump, "w");
		if (!file)
			die(EXIT_OUTPUT, "cannot write to %s: %s", o->dump, strerror(errno));
		for (uint64_t i = 0; i < figures.messages && !o->at.listening; i++)
			fprintf(file, "%llu\n", (unsigned long long)raw[i]);
		if (fclose(file) != 0)
			die(EXIT_OUTPUT, "cannot write to %s: %s", o->dump, strerror(errno));
	}
}

/* ---- Command line ---------------------------------------------------------------------------- */

const char usage_text[] =
"usage: vringlab-pingpong listen  PORT     [options]\n"
"       vringlab-pingpong connect CID PORT [options]\n"
"with --family tcp: listen PORT (loopback), connect ADDRESS PORT; unix: listen|connect PATH\n"
"\n"
"  --payload BYTES   message size, 16 to 131072 (64; a listener takes the other side's)\n"
"  --duration S      measure for S seconds (5)\n"
"  --count N         measure N messages instead\n"
"  --warmup N        messages before the measurement (100)\n"
"  --timeout S       give up when nothing moves, or nobody connects, for S seconds (30)\n"
"  --wait S          keep trying to connect for S seconds (5)\n"
"  --cpu N           pin to CPU N\n"
"  --family F        vsock, tcp or unix (vsock)\n"
"  --json            print JSON\n"
"  --output FILE     write the report there, whole or not at all\n"
"  --dump FILE       write every latency in ns there, one a line, in order\n"
"  --version, --help\n";

static struct options parse(int argc, char **argv)
{
	struct options o = { .at = { .family = AF_VSOCK, .type = SOCK_STREAM,
				     .family_name = "vsock" }, .duration_s = 5,
			     .timeout_s = 30, .wait_s = 5, .warmup = 100, .cpu = -1 };
	const char *words[3] = { NULL, NULL, NULL };
	int found = 0;
	bool duration_given = false;

	for (int i = 1; i < argc; i++) {
		const char *option = argv[i];
		if (strcmp(option, "--help") == 0 || strcmp(option, "--version") == 0) {
			printf("vringlab-pingpong " TOOL_VERSION "\n%s",
			       option[2] == 'h' ? usage_text : "");
			exit(0);
		}
		if (strcmp(option, "--json") == 0) {
			o.json = true;
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
		if (strcmp(option, "--payload") == 0) {
			o.payload = (uint32_t)whole(option, value, PAYLOAD_MIN, PAYLOAD_MAX);
		} else if (strcmp(option, "--duration") == 0) {
			o.duration_s = seconds(option, value, 0.001);
			duration_given = true;
		} else if (strcmp(option, "--count") == 0) {
			o.count = whole(option, value, 1, UINT32_MAX);
		} else if (strcmp(option, "--warmup") == 0) {
			o.warmup = whole(option, value, 0, 1000000000);
		} else if (strcmp(option, "--timeout") == 0) {
			o.timeout_s = seconds(option, value, 0.001);
		} else if (strcmp(option, "--wait") == 0) {
			o.wait_s = seconds(option, value, 0);
		} else if (strcmp(option, "--cpu") == 0) {
			o.cpu = (int)whole(option, value, 0, CPU_SETSIZE - 1);
		} else if (strcmp(option, "--dump") == 0) {
			o.dump = value;
		} else if (strcmp(option, "--output") == 0) {
			o.output = value;
		} else if (strcmp(option, "--family") == 0) {
			o.at.family_name = value;
			o.at.family = family_of(value);
		} else {
			usage("unknown option %s", option);
		}
	}

	place_of(&o.at, words, found);
	if (o.count && duration_given)
		usage("--count or --duration, not both");
	if (!o.at.listening && o.payload == 0)
		o.payload = 64;
	return o;
}

static void pin(int cpu)
{
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET((unsigned int)cpu, &set);
	if (sched_setaffinity(0, sizeof set, &set) != 0)
		die(EXIT_SETUP, "cannot pin to CPU %d: %s (is it online and allowed here?)", cpu,
		    strerror(errno));
}

static void count_switches(int sign)
{
	struct rusage use;
	if (getrusage(RUSAGE_SELF, &use) == 0) {
		figures.voluntary += sign * use.ru_nvcsw;
		figures.involuntary += sign * use.ru_nivcsw;
	}
}

int main(int argc, char **argv)
{
	struct options o = parse(argc, argv);
	struct sigaction stop = { .sa_handler = on_stop }, hard = { .sa_handler = on_alarm };

	/* No SA_RESTART: a waiting recv has to come back. */
	sigaction(SIGINT, &stop, NULL);
	sigaction(SIGTERM, &stop, NULL);
	sigaction(SIGALRM, &hard, NULL);
	signal(SIGPIPE, SIG_IGN);
	if (o.cpu >= 0)
		pin(o.cpu);
	if (!o.at.listening && o.dump && o.count) {
		raw_room = (size_t)o.count;
		raw = malloc(raw_room * sizeof *raw);
		if (!raw)
			die(EXIT_SETUP, "no memory to keep %zu latencies for --dump", raw_room);
	}
	buffer = malloc(PAYLOAD_MAX);
	if (!buffer)
		die(EXIT_SETUP, "no memory for a message");
	memset(buffer, 0x5a, PAYLOAD_MAX);   /* also touches every page before the clock runs */
	token_state = now_ns() ^ (uint64_t)getpid() << 32;

	int fd = o.at.listening ? accept_one(&o) : connect_to(&o);
	connection = fd;
	if (fd >= 0) {
		uint32_t token = next_token(), peer_token = 0;
		set_timeouts(fd, &o.at, o.timeout_s);
		name_peer(fd, &o.at, figures.peer, sizeof figures.peer);
		if (hello(fd, &o, token, &peer_token)) {
			count_switches(-1);
			figures.cpu_start = sched_getcpu();
			if (o.at.listening)
				answer(fd, &o, token);
			else
				initiate(fd, &o, token, peer_token);
			figures.cpu_end = sched_getcpu();
			count_switches(1);
		}
		connection = -1;
		close(fd);
	}
	alarm(0);
	write_report(&o);
	if (figures.error[0])
		fprintf(stderr, "vringlab-pingpong: %s\n", figures.error);

	switch (figures.ended) {
	case BY_SIGNAL:
		return 128 + (int)stop_signal;
	case PEER_GONE:
		return EXIT_PEER;
	case TIMED_OUT:
		return EXIT_TIMEOUT;
	default:
		if (figures.sequence_errors || figures.peer_sequence_errors) {
			fprintf(stderr, "vringlab-pingpong: %s\n",
				figures.first_sequence_error[0]
				? figures.first_sequence_error
				: "the peer counted sequence errors");
			return EXIT_SEQUENCE;
		}
		return 0;
	}
}
