/* SPDX-License-Identifier: GPL-2.0-only
 *
 * What vringlab's C tools have in common: where a socket goes, the command line's numbers, and a
 * report that is there whole or not at all. One source file a tool: it defines TOOL_NAME before it
 * includes this, and `usage_text` somewhere.
 */
#ifndef VRINGLAB_TOOL_H
#define VRINGLAB_TOOL_H

#include <arpa/inet.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <linux/vm_sockets.h>

enum { EXIT_USAGE = 1, EXIT_SETUP = 2, EXIT_PEER = 3, EXIT_TIMEOUT = 4, EXIT_SEQUENCE = 5,
       EXIT_OUTPUT = 6 };

/* Where one end of a connection is. */
struct place {
	bool listening;
	int family, type;      /* AF_*, SOCK_* */
	const char *family_name, *address;
	unsigned int cid, port;
};

union address {
	struct sockaddr any;
	struct sockaddr_vm vm;
	struct sockaddr_in in;
	struct sockaddr_un un;
};

extern const char usage_text[];

static const char *unix_path_made;

static inline uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC_RAW, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void remove_unix_path(void)
{
	if (unix_path_made)
		unlink(unix_path_made);
}

__attribute__((format(printf, 2, 3), noreturn))
static void die(int status, const char *format, ...)
{
	va_list arguments;
	fputs(TOOL_NAME ": ", stderr);
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputc('\n', stderr);
	remove_unix_path();
	exit(status);
}

__attribute__((format(printf, 1, 2), noreturn))
static void usage(const char *format, ...)
{
	va_list arguments;
	fputs(TOOL_NAME ": ", stderr);
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fprintf(stderr, "\n%s", usage_text);
	exit(EXIT_USAGE);
}

/* ---- Numbers ------------------------------------------------------------------------------- */

static inline uint64_t whole(const char *what, const char *text, uint64_t low, uint64_t high)
{
	char *rest;
	errno = 0;
	unsigned long long value = strtoull(text, &rest, 10);
	if (errno || rest == text || *rest || text[0] < '0' || text[0] > '9' || value < low ||
	    value > high)
		usage("%s must be a whole number from %llu to %llu, not '%s'", what,
		      (unsigned long long)low, (unsigned long long)high, text);
	return value;
}

static inline double seconds(const char *what, const char *text, double low)
{
	char *rest;
	double value = strtod(text, &rest);
	if (rest == text || *rest || !(value >= low) || value > 1e6)
		usage("%s must be seconds from %g to 1e6, not '%s'", what, low, text);
	return value;
}

static inline void put32(unsigned char *at, uint32_t v)
{
	at[0] = (unsigned char)v;
	at[1] = (unsigned char)(v >> 8);
	at[2] = (unsigned char)(v >> 16);
	at[3] = (unsigned char)(v >> 24);
}

static inline uint32_t get32(const unsigned char *at)
{
	return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* splitmix64 (Steele, Lea, Flood 2014): any state, also zero, gives a full period. */
static inline uint64_t splitmix64(uint64_t *state)
{
	uint64_t z = (*state += 0x9e3779b97f4a7c15u);
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
	return z ^ (z >> 31);
}

/* ---- Sockets ------------------------------------------------------------------------------- */

static inline int family_of(const char *name)
{
	int family = strcmp(name, "vsock") == 0 ? AF_VSOCK
		   : strcmp(name, "tcp") == 0   ? AF_INET
		   : strcmp(name, "unix") == 0  ? AF_UNIX : -1;
	if (family < 0)
		usage("--family is vsock, tcp or unix, not '%s'", name);
	return family;
}

/* The command line's words: listen|connect, and where. */
static inline void place_of(struct place *at, const char *const *words, int found)
{
	if (found == 0)
		usage("listen or connect?");
	at->listening = strcmp(words[0], "listen") == 0;
	if (!at->listening && strcmp(words[0], "connect") != 0)
		usage("listen or connect, not '%s'", words[0]);
	int due = at->family == AF_UNIX || at->listening ? 2 : 3;
	if (found != due)
		usage("%s over %s takes %s", words[0], at->family_name,
		      at->family == AF_UNIX ? "a path" : at->listening ? "a port"
		      : at->family == AF_VSOCK ? "a CID and a port" : "an address and a port");
	if (at->family == AF_UNIX) {
		at->address = words[1];
		return;
	}
	uint64_t top = at->family == AF_INET ? 65535 : UINT32_MAX - 1;
	/* Port 0 lets TCP choose; the "listening" line says what it chose. */
	uint64_t low = at->listening && at->family == AF_INET ? 0 : 1;
	at->port = (unsigned int)whole("the port", words[due - 1], low, top);
	if (!at->listening && at->family == AF_VSOCK)
		at->cid = (unsigned int)whole("the CID", words[1], 0, UINT32_MAX - 1);
	if (!at->listening && at->family == AF_INET)
		at->address = words[1];
}

static inline socklen_t make_address(const struct place *at, union address *a)
{
	memset(a, 0, sizeof *a);
	if (at->family == AF_VSOCK) {
		a->vm.svm_family = AF_VSOCK;
		a->vm.svm_cid = at->listening ? VMADDR_CID_ANY : at->cid;
		a->vm.svm_port = at->port;
		return sizeof a->vm;
	}
	if (at->family == AF_INET) {
		a->in.sin_family = AF_INET;
		a->in.sin_port = htons((uint16_t)at->port);
		if (at->listening)
			a->in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
		else if (inet_pton(AF_INET, at->address, &a->in.sin_addr) != 1)
			die(EXIT_USAGE, "%s is not an IPv4 address", at->address);
		return sizeof a->in;
	}
	a->un.sun_family = AF_UNIX;
	if (strlen(at->address) >= sizeof a->un.sun_path)
		die(EXIT_USAGE, "the path of a unix socket has at most %zu bytes: %s",
		    sizeof a->un.sun_path - 1, at->address);
	strcpy(a->un.sun_path, at->address);
	return sizeof a->un;
}

static inline const char *shown(const struct place *at)
{
	static char text[160];
	if (at->family == AF_UNIX)
		snprintf(text, sizeof text, "unix:%s", at->address);
	else if (at->listening)
		snprintf(text, sizeof text, "%s port %u", at->family_name, at->port);
	else if (at->family == AF_VSOCK)
		snprintf(text, sizeof text, "vsock %u:%u", at->cid, at->port);
	else
		snprintf(text, sizeof text, "tcp %s:%u", at->address, at->port);
	return text;
}

static inline int make_socket(const struct place *at)
{
	int fd = socket(at->family, at->type | SOCK_CLOEXEC, 0);
	if (fd < 0)
		die(EXIT_SETUP, "no %s socket: %s%s", at->family_name, strerror(errno),
		    at->family == AF_VSOCK && errno == EAFNOSUPPORT
			? " (is the vsock module loaded?)" : "");
	return fd;
}

static inline void set_timeouts(int fd, const struct place *at, double timeout_s)
{
	struct timeval t = { .tv_sec = (time_t)timeout_s,
			     .tv_usec = (suseconds_t)((timeout_s - floor(timeout_s)) * 1e6) };
	if (t.tv_sec == 0 && t.tv_usec == 0)
		t.tv_usec = 1;   /* zero would mean: wait for ever */
	if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t) != 0 ||
	    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t) != 0)
		die(EXIT_SETUP, "time-outs cannot be set: %s", strerror(errno));
	if (at->family == AF_INET) {
		int one = 1;
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	}
}

/* A bound, listening socket; `at->port` becomes the port it got. */
static inline int listen_at(struct place *at, int backlog)
{
	union address a;
	socklen_t length = make_address(at, &a);
	int fd = make_socket(at), one = 1;

	if (at->family == AF_INET)
		setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (bind(fd, &a.any, length) != 0)
		die(EXIT_SETUP, "cannot listen on %s: %s%s", shown(at), strerror(errno),
		    errno == EADDRINUSE ? " (another listener, or its remains: choose another)" : "");
	if (at->family == AF_UNIX)
		unix_path_made = at->address;
	if (listen(fd, backlog) != 0)
		die(EXIT_SETUP, "cannot listen on %s: %s", shown(at), strerror(errno));
	length = sizeof a;
	if (getsockname(fd, &a.any, &length) == 0 && at->family != AF_UNIX)
		at->port = at->family == AF_INET ? ntohs(a.in.sin_port) : a.vm.svm_port;
	return fd;
}

static inline void say_listening(const struct place *at)
{
	if (at->family == AF_UNIX)
		printf("listening %s\n", at->address);
	else
		printf("listening %u\n", at->port);
	fflush(stdout);
}

/* Whether a connection may still succeed after this error: after a module swap the other side's
 * transport and listener come back late. */
static inline bool may_come_late(int error)
{
	return error == ECONNREFUSED || error == ECONNRESET || error == ETIMEDOUT ||
	       error == ENODEV || error == ENOENT || error == EHOSTUNREACH ||
	       error == ENETUNREACH || error == EINTR || error == EAGAIN || error == EINPROGRESS;
}

static inline void name_peer(int fd, const struct place *at, char *name, size_t room)
{
	union address a;
	socklen_t length = sizeof a;
	char text[INET_ADDRSTRLEN];

	if (at->family == AF_UNIX || getpeername(fd, &a.any, &length) != 0)
		snprintf(name, room, "unix:%s", at->address ? at->address : "");
	else if (at->family == AF_VSOCK)
		snprintf(name, room, "vsock:%u:%u", a.vm.svm_cid, a.vm.svm_port);
	else
		snprintf(name, room, "tcp:%s:%u",
			 inet_ntop(AF_INET, &a.in.sin_addr, text, sizeof text) ? text : "?",
			 ntohs(a.in.sin_port));
}

/* ---- Output: made in memory, written whole --------------------------------------------------- */

static inline void json_string(FILE *out, const char *text)
{
	fputc('"', out);
	for (; *text; text++) {
		unsigned char c = (unsigned char)*text;
		if (c == '"' || c == '\\')
			fprintf(out, "\\%c", c);
		else if (c < 0x20 || c > 0x7e)
			fprintf(out, "\\u%04x", c);   /* bytes of a path, as Latin-1 */
		else
			fputc(c, out);
	}
	fputc('"', out);
}

static inline void write_whole(int fd, const char *text, size_t length, const char *where)
{
	while (length > 0) {
		ssize_t n = write(fd, text, length);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			die(EXIT_OUTPUT, "cannot write to %s: %s", where, strerror(errno));
		text += n;
		length -= (size_t)n;
	}
}

/* To a file, or to standard output without one. A reader of the file sees all of it or none. */
static inline void write_output(const char *path, const char *text, size_t length)
{
	char part[PATH_MAX];

	if (!path) {
		fflush(stdout);
		write_whole(STDOUT_FILENO, text, length, "standard output");
		return;
	}
	if (snprintf(part, sizeof part, "%s.part", path) >= (int)sizeof part)
		die(EXIT_OUTPUT, "the path is too long: %s", path);
	FILE *file = fopen(part, "w");
	if (!file)
		die(EXIT_OUTPUT, "cannot write to %s: %s", part, strerror(errno));
	write_whole(fileno(file), text, length, part);
	if (fclose(file) != 0 || rename(part, path) != 0)
		die(EXIT_OUTPUT, "cannot write to %s: %s", path, strerror(errno));
}

#endif
