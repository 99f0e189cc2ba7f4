/* SPDX-License-Identifier: GPL-2.0-only
 *
 * vringlab-wake: what a machine restored from a snapshot does before anything else. Its clock is that
 * of the snapshot, and so are its random numbers: all machines restored from it would draw the same.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include <linux/random.h>

/* The seed below is then where the kernel looks for it. */
_Static_assert(sizeof(struct rand_pool_info) == offsetof(struct rand_pool_info, buf), "no padding");

enum { SEED_BYTES = 64, EXIT_USAGE = 1, EXIT_SETUP = 2 };

static const char usage_text[] =
	"usage: vringlab-wake SECONDS < SEED\n"
	"Sets the clock to SECONDS since 1970 (may have a fraction), and reseeds the kernel's random\n"
	"numbers with the 64 bytes of standard input. Needs root. Prints what the clock was, in seconds\n"
	"since 1970.\n"
	"Exit status: 0 done, 1 usage, 2 the kernel refused or the seed was too short.\n";

static int refused(const char *what)
{
	fprintf(stderr, "vringlab-wake: %s: %s\n", what, strerror(errno));
	return EXIT_SETUP;
}

int main(int argc, char **argv)
{
	struct {
		struct rand_pool_info info;
		unsigned char seed[SEED_BYTES];
	} pool = { .info = { .entropy_count = 8 * SEED_BYTES, .buf_size = SEED_BYTES } };
	struct timespec was, now;
	size_t got = 0;
	char *end;

	if (argc == 2 && !strcmp(argv[1], "--help")) {
		fputs(usage_text, stdout);
		return 0;
	}
	double seconds = argc == 2 ? strtod(argv[1], &end) : 0;
	if (argc != 2 || *end || end == argv[1] || !(seconds > 0) || seconds > 1e11) {
		fputs(usage_text, stderr);
		return EXIT_USAGE;
	}
	while (got < SEED_BYTES) {
		ssize_t n = read(0, pool.seed + got, SEED_BYTES - got);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0) {
			fputs("vringlab-wake: the seed is shorter than 64 bytes\n", stderr);
			return EXIT_SETUP;
		}
		got += (size_t)n;
	}
	int random = open("/dev/urandom", O_RDWR | O_CLOEXEC);
	if (random < 0 || ioctl(random, RNDADDENTROPY, &pool.info) ||
	    ioctl(random, RNDRESEEDCRNG))
		return refused("the random numbers cannot be reseeded");
	now.tv_sec = (time_t)floor(seconds);
	now.tv_nsec = (long)((seconds - floor(seconds)) * 1e9);
	if (clock_gettime(CLOCK_REALTIME, &was) || clock_settime(CLOCK_REALTIME, &now))
		return refused("the clock cannot be set");
	printf("%lld.%09ld\n", (long long)was.tv_sec, was.tv_nsec);
	return 0;
}
