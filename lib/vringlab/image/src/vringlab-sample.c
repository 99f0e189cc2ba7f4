/* SPDX-License-Identifier: GPL-2.0-only
 *
 * vringlab-sample: read some files of /proc again and again, at a steady rate and cheaply.
 *
 *     vringlab-sample [options] FILE[:NAME,NAME...]...
 *
 * It stands beside a timed run (slab caches, CPU time), so it must cost next to nothing: one
 * process, no fork a sample, files kept open, and only lines that begin with one of the NAMEs kept
 * (all lines without NAMEs). What it did cost is in its last line.
 *
 * Output, a line each:
 *     @ NS                  one reading begins; CLOCK_MONOTONIC_RAW, as vringlab-stream's times
 *     = FILE                its lines that follow are this file's
 *     ! FILE: why           it could not be read this time
 *     # samples N late N cpu_ns N elapsed_ns N       the end; late: readings that were skipped;
 *                                                    cpu_ns: its CPU time from the first on
 *
 * Exit status: 0; 1 usage; 2 a file cannot be read at the start; 6 output could not be written.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>

#define TOOL_NAME "vringlab-sample"
#include "vringlab-tool.h"

#define TOOL_VERSION "1.0"
#define FILES_MAX 64

struct source {
	const char *path;
	char *names;           /* "name\0name\0", or NULL for all lines */
	size_t names_length;
	bool sysfs;            /* one read gives all of it, and another would make it anew */
	int fd;
};

static struct source sources[FILES_MAX];
static unsigned int source_count;
static volatile sig_atomic_t stop;

static void on_stop(int number)
{
	(void)number;
	stop = 1;
}

/* Whether a line of this length begins with a kept name and then a blank or a colon. */
static bool kept(const struct source *s, const char *line, size_t length)
{
	size_t word = 0;

	if (!s->names)
		return true;
	while (word < length && line[word] != ' ' && line[word] != ':' && line[word] != '\t')
		word++;
	for (const char *name = s->names; name < s->names + s->names_length;
	     name += strlen(name) + 1)
		if (strlen(name) == word && memcmp(name, line, word) == 0)
			return true;
	return false;
}

static char *content;
static size_t content_room;

/* The whole file into `content`; its length, or -1 with errno. */
static ssize_t read_source(const struct source *s)
{
	size_t length = 0;

	for (;;) {
		if (length == content_room) {
			content_room = content_room ? 2 * content_room : 65536;
			content = realloc(content, content_room);
			if (!content)
				die(EXIT_SETUP, "no memory for %s", s->path);
		}
		ssize_t n = pread(s->fd, content + length, content_room - length, (off_t)length);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -1;
		length += (size_t)n;
		if (n == 0 || (s->sysfs && length < content_room))
			return (ssize_t)length;
	}
}

/* CPU time of this process so far. */
static uint64_t cpu_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void take(FILE *out)
{
	fprintf(out, "@ %llu\n", (unsigned long long)now_ns());
	for (unsigned int i = 0; i < source_count; i++) {
		const struct source *s = &sources[i];
		ssize_t length = read_source(s);
		if (length < 0) {
			fprintf(out, "! %s: %s\n", s->path, strerror(errno));
			continue;
		}
		fprintf(out, "= %s\n", s->path);
		for (char *line = content, *end = content + length; line < end;) {
			char *next = memchr(line, '\n', (size_t)(end - line));
			size_t size = (size_t)((next ? next : end) - line);
			if (kept(s, line, size)) {
				fwrite(line, 1, size, out);
				fputc('\n', out);
			}
			line += size + 1;
		}
	}
}

const char usage_text[] =
"usage: vringlab-sample [options] FILE[:NAME,NAME...]...\n"
"\n"
"  --interval S      time between readings (0.1)\n"
"  --duration S      end after S seconds; otherwise with SIGTERM or SIGINT\n"
"  --output FILE     write there instead of to standard output\n"
"  --version, --help\n";

static void add_source(char *text)
{
	struct source *s = &sources[source_count++];
	char *colon = strchr(text, ':');

	s->path = text;
	if (colon) {
		*colon = '\0';
		s->names = colon + 1;
		s->names_length = strlen(s->names) + 1;
		for (char *c = s->names; *c; c++)
			if (*c == ',')
				*c = '\0';
	}
	s->sysfs = strncmp(s->path, "/sys/", 5) == 0;
	s->fd = open(s->path, O_RDONLY | O_CLOEXEC);
	if (s->fd < 0 || read_source(s) < 0)
		die(EXIT_SETUP, "cannot read %s: %s%s", s->path, strerror(errno),
		    errno == EACCES ? " (it is root's to read)" : "");
}

int main(int argc, char **argv)
{
	struct sigaction ending = { .sa_handler = on_stop };
	double interval = 0.1, duration = 0;
	unsigned long long samples = 0, late = 0;
	FILE *out = stdout;
	time_t written = 0;
	struct timespec due;

	for (int i = 1; i < argc; i++) {
		const char *option = argv[i];
		if (strcmp(option, "--help") == 0 || strcmp(option, "--version") == 0) {
			printf("vringlab-sample " TOOL_VERSION "\n%s",
			       option[2] == 'h' ? usage_text : "");
			return 0;
		}
		if (strncmp(option, "--", 2) != 0) {
			if (source_count == FILES_MAX)
				usage("more than %d files", FILES_MAX);
			add_source(argv[i]);
			continue;
		}
		if (i + 1 == argc)
			usage("%s needs a value, or is unknown", option);
		const char *value = argv[++i];
		if (strcmp(option, "--interval") == 0) {
			interval = seconds(option, value, 0.001);
		} else if (strcmp(option, "--duration") == 0) {
			duration = seconds(option, value, 0.001);
		} else if (strcmp(option, "--output") == 0) {
			out = fopen(value, "w");
			if (!out)
				die(EXIT_OUTPUT, "cannot write to %s: %s", value, strerror(errno));
		} else {
			usage("unknown option %s", option);
		}
	}
	if (source_count == 0)
		usage("which files?");
	setvbuf(out, NULL, _IOFBF, 1 << 18);
	sigaction(SIGINT, &ending, NULL);
	sigaction(SIGTERM, &ending, NULL);

	const uint64_t begin = now_ns(), cost = cpu_ns(), step = (uint64_t)(interval * 1e9);
	clock_gettime(CLOCK_MONOTONIC, &due);
	while (!stop && (duration == 0 || (double)(now_ns() - begin) < duration * 1e9)) {
		struct timespec now;
		take(out);
		samples++;
		clock_gettime(CLOCK_MONOTONIC, &now);
		/* Each write wakes its reader up: one a second is enough. */
		if (now.tv_sec != written) {
			written = now.tv_sec;
			if (fflush(out) != 0)
				die(EXIT_OUTPUT, "the readings cannot be written: %s",
				    strerror(errno));
		}
		/* From due time to due time, so that the rate holds; those already past are left out. */
		for (int passed = 0;; passed++) {
			uint64_t next = (uint64_t)due.tv_nsec + step;
			due.tv_sec += (time_t)(next / 1000000000u);
			due.tv_nsec = (long)(next % 1000000000u);
			if (due.tv_sec > now.tv_sec ||
			    (due.tv_sec == now.tv_sec && due.tv_nsec > now.tv_nsec)) {
				late += (unsigned long long)passed;
				break;
			}
		}
		if (!stop)
			clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
	}
	fprintf(out, "# samples %llu late %llu cpu_ns %llu elapsed_ns %llu\n", samples, late,
		(unsigned long long)(cpu_ns() - cost), (unsigned long long)(now_ns() - begin));
	if (fclose(out) != 0)
		die(EXIT_OUTPUT, "the readings cannot be written: %s", strerror(errno));
	return 0;
}
